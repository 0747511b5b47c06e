"""Prefetching through slots, on a device with delayed streams."""

from __future__ import annotations

import threading
from collections import namedtuple
from itertools import pairwise

import pytest
import torch

from coordinator.messages import EpochPlan
from runtime.data import prefetch as prefetch_module
from runtime.data.budget import DeviceBudget
from runtime.data.dataset import ColumnAdapter, adapt_dataset
from runtime.data.epoch_index import EpochIndex
from runtime.data.loader import LoaderSpec, SizingSchedule
from runtime.data.prefetch import SlotStage
from runtime.data.process_loader import ProcessLoader
from runtime.device.base import Device
from tests.support import prefetching
from tests.support.fake_streams import GIB, DelayedCopies
from tests.support.loading import ALL, INDEX, SEED, SIZE, FrozenClock, N, Noisy, assert_is_plan
from tests.support.prefetching import CALIBRATION, EPOCHS, TENSORS, Numbers, Rig, slot_bytes


@pytest.fixture(params=["slots", "tensors"])
def streamed(request):
    """A data set that is read and collated, and one that is gathered into slots."""
    return Numbers() if request.param == "slots" else TENSORS


@pytest.mark.parametrize("depth", [None, 1, 3])
def test_streamed_batches_are_exact_under_all_delays(streamed, depth):
    for seed in range(8):
        with Rig(streamed, context=DelayedCopies(seed), depth=depth, resident=False) as rig:
            for plan in EPOCHS:
                rig.use(plan)
        assert rig.context.num_used == 24


def test_a_layout_cleared_by_the_loader_during_sizing_is_read_once(monkeypatch):
    """Batches that no slot can hold may follow those of the first steps."""

    class TakenBack(SlotStage):
        layout, num_reads = None, 0

        @property
        def _layout(self):
            found, self.num_reads = self.layout, self.num_reads + 1
            if found is not None and self._pool is None:
                self.layout = None
            return found

        @_layout.setter
        def _layout(self, value):
            self.layout = value

    monkeypatch.setattr(prefetching, "SlotStage", TakenBack)
    with Rig(Numbers()) as rig:
        for plan in EPOCHS:
            rig.use(plan)
        assert rig.stage.num_reads
    assert rig.context.num_used == 24


def test_batches_are_gathered_by_num_threads_threads(monkeypatch):
    before, seen = torch.get_num_threads(), set()
    gather = ColumnAdapter.load_into

    def load_into(self, indices, out):
        seen.add(torch.get_num_threads())
        gather(self, indices, out)

    monkeypatch.setattr(ColumnAdapter, "load_into", load_into)
    try:
        with Rig(TENSORS, resident=False, threads=before + 1) as rig:
            rig.use(EPOCHS[0])
    finally:
        torch.set_num_threads(before)  # later threads would inherit it
    assert seen == {before + 1}


def test_the_time_of_a_read_excludes_waits_for_slots(monkeypatch):
    clock, gather, wait = FrozenClock(), ColumnAdapter.load_into, DelayedCopies.wait_host

    def load_into(self, indices, out):
        clock.advance()
        gather(self, indices, out)

    def wait_host(self, event):
        clock.advance()
        wait(self, event)

    monkeypatch.setattr(prefetch_module, "time", clock)
    monkeypatch.setattr(ColumnAdapter, "load_into", load_into)
    monkeypatch.setattr(DelayedCopies, "wait_host", wait_host)
    with Rig(TENSORS, resident=False) as rig:
        assert rig.loader.reads_ahead  # after the first steps
        rig.use(EPOCHS[0])
        rig.loader.submit(EPOCHS[1])
        loaded = [rig.use_next() for _ in range(EPOCHS[1].num_batches)]
        assert {batch.load_s for batch in loaded if batch.slot is not None} == {clock.READ_S}


def test_a_piece_larger_than_a_slot_is_copied_without_one(streamed):
    """With measured shares a rank may get more samples than its batch size."""
    with Rig(streamed, resident=False) as rig:
        rig.use(EPOCHS[0])  # allocates slots of SIZE rows
        sizes = [SIZE + 2, SIZE - 1, 1, SIZE + 3]
        ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        plan = EpochPlan(epoch=1, batches=(range(4),), pieces=tuple(pairwise(ends)))
        rig.loader.submit(plan)
        order = INDEX.order(1)
        for start, stop in plan.pieces:
            loaded = rig.next()
            assert loaded.num_samples == stop - start
            wanted = [column[order[start:stop]] for column in TENSORS]
            rig.context.use(list(loaded.data), wanted)


def test_a_device_without_streams_loads_the_same_batches():
    class Roomy(Device):
        def memory(self):
            return DelayedCopies().memory()

    with Rig(Noisy(), context=Roomy()) as rig:
        for plan in EPOCHS:
            assert_is_plan(rig.take(plan), plan)
        assert rig.stage.depth == 6


def test_no_batch_is_loaded_ahead_before_the_peak_is_measured(streamed):
    with Rig(streamed, resident=False) as rig:
        rig.loader.submit(ALL)
        assert rig.context.num_resets == 1
        for _ in range(CALIBRATION):
            assert not rig.ready.acquire(timeout=0.02)
            rig.use_next()
            assert rig.stage.depth == 0
            assert rig.budget.share_bytes("worker", rig.context.memory()) == 0
        loaded = rig.use_next()
        assert loaded.batch == CALIBRATION
        assert rig.stage.depth == 6
        assert rig.budget.share_bytes("worker", rig.context.memory()) > 0
        assert rig.context.allocated_bytes > 0
        while rig.loader._positions:
            assert rig.ready.acquire(timeout=30)


def test_batches_are_copied_through_slots_only(streamed):
    with Rig(streamed, resident=False) as rig:
        for plan in EPOCHS:
            rig.use(plan)
    # Two tensors of each batch of the first steps, and of the one requested before the slots
    # were allocated.
    assert rig.context.num_brought <= 2 * (CALIBRATION + 1)


@pytest.mark.parametrize(("fitting", "depth"), [(3, 2), (1, 0)])
def test_the_budget_bounds_the_slots(fitting, depth):
    """A single slot would hold no batch but the present one: none is allocated."""
    context = DelayedCopies()
    peak = 2 * GIB
    context.total_bytes = 2 * (peak + fitting * slot_bytes())
    with Rig(Numbers(), context=context) as rig:
        rig.use(ALL)
        assert rig.stage.depth == depth
        assert context.allocated_bytes == (fitting * slot_bytes() if depth else 0)


def test_a_depth_beyond_the_budget_is_logged(caplog):
    context = DelayedCopies()
    context.total_bytes = 2 * (2 * GIB + 3 * slot_bytes())
    with Rig(Numbers(), context=context, depth=5) as rig:
        for plan in EPOCHS:
            rig.use(plan)
        assert rig.stage.depth == 2
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "prefetch(5)" in record.getMessage()
    assert "raise vram_fraction" in record.getMessage()


def test_the_depth_is_limited_by_the_plan_and_changes_when_a_plan_ends():
    with Rig(Numbers()) as rig:
        for num_batches, depth in ((6, 6), (2, 2), (4, 4)):
            rig.use(EpochPlan(epoch=0, batches=(range(num_batches),)))
            assert rig.stage.depth == depth
        assert rig.stage._pool.num_device_slots == 7


def test_a_higher_peak_leaves_slots_unused_and_frees_none():
    with Rig(Numbers()) as rig:
        rig.use(EPOCHS[0])
        before = rig.context.allocated_bytes
        assert rig.stage.depth == 6
        rig.context.step_bytes = 8 * GIB - GIB - 3 * slot_bytes()
        rig.use(EPOCHS[1])
        assert rig.stage.depth == 2
        assert rig.context.allocated_bytes == before
        rig.context.step_bytes = 100 * GIB
        rig.use(EPOCHS[2])
        assert rig.stage.depth == 0
        rig.use(EPOCHS[3])
        assert rig.context.allocated_bytes == before


@pytest.mark.parametrize(("fitting", "depth"), [(4, 3), (1, 0)])
def test_a_failed_allocation_reduces_the_depth_and_is_not_retried(fitting, depth):
    context = DelayedCopies(limit_bytes=fitting * slot_bytes())
    with Rig(Numbers(), context=context) as rig:
        rig.use(EPOCHS[0])
        assert rig.stage.depth == depth
        context._limit_bytes = None
        for plan in EPOCHS[1:]:
            rig.use(plan)
        assert rig.stage.depth == depth


# -- shapes ----------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


def test_nested_batches_keep_their_structure():
    class Nested(Numbers):
        def get_batch(self, indices):
            x, y = super().get_batch(indices)
            return {"pair": Pair(x, [y, "name"]), "n": 3, "scale": torch.tensor(2.0)}

    with Rig(Nested()) as rig:
        for plan in EPOCHS[:2]:
            rig.loader.submit(plan)
            for batch in range(6):
                data = rig.next().data
                indices = INDEX.indices(plan.epoch, batch)
                assert type(data["pair"]) is Pair
                assert data["pair"].y[1] == "name"
                assert data["n"] == 3
                x, y, scale = data["pair"].x, data["pair"].y[0], data["scale"]
                rig.context.use(
                    [x, y, scale], [TENSORS[0][indices], TENSORS[1][indices], torch.tensor(2.0)]
                )
        assert rig.stage._pool is not None


def test_changing_shapes_are_copied_without_slots_and_logged_once(caplog):
    class Ragged(Numbers):
        def get_batch(self, indices):
            x, _ = super().get_batch(indices)
            width = 1 + int(x[0]) % 5
            return x, x[:, None].expand(-1, width).float()

    with Rig(Ragged()) as rig:
        for plan in EPOCHS:
            rig.loader.submit(plan)
            for batch in range(6):
                x, y = rig.next().data
                indices = INDEX.indices(plan.epoch, batch)
                wide = indices[:, None].expand(-1, 1 + int(indices[0]) % 5).float()
                rig.context.use([x, y], [indices, wide])
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "pad them" in record.getMessage()


def test_batches_that_no_slot_can_hold_are_still_loaded_ahead():
    class Packs(Numbers):
        def get_batch(self, indices):
            x, _ = super().get_batch(indices)
            return x, torch.nn.utils.rnn.pack_sequence([x.float()])

    with Rig(Packs()) as rig:
        for plan in EPOCHS[:2]:
            taken = rig.take(plan)
            assert_is_plan(taken, plan)
            assert taken[-1].data[1].data.tolist() == taken[-1].data[0].tolist()
        assert rig.stage.depth == 6
        assert rig.stage._pool is None


# -- failures and shutdown -----------------------------------------------------------


def test_an_error_is_raised_in_place_of_its_batch():
    class Fails(Numbers):
        def get_batch(self, indices):
            if self.num_reads == 9:
                self.num_reads += 1
                raise KeyError("planted")
            return super().get_batch(indices)

    with Rig(Fails()) as rig:
        rig.use(EPOCHS[0])
        rig.loader.submit(EPOCHS[1])
        for batch in range(6):
            if batch == 3:
                with pytest.raises(KeyError, match="planted"):
                    rig.next()
            else:
                assert rig.use_next().batch == batch
        rig.use(EPOCHS[2])


def test_a_cancelled_plan_leaves_every_slot_free(streamed):
    for seed in range(5):
        with Rig(streamed, context=DelayedCopies(seed), resident=False) as rig:
            for plan in EPOCHS:
                rig.loader.submit(plan)
                for _ in range(4):
                    rig.use_next()
                rig.loader.cancel()
                assert rig.loader.try_next() is None
                rig.use(plan)
            rig.loader.cancel()
            rig.stage.advance()
            pool = rig.stage._pool
            assert len(pool._free) == pool.num_device_slots


def test_a_fast_data_set_is_read_to_the_depth_only():
    dataset = Numbers()
    with Rig(dataset, depth=2) as rig:
        rig.use(EPOCHS[0])
        rig.loader.submit(EPOCHS[1])
        rig.use_next()
        while len(rig.loader._ready) < 2:
            assert rig.ready.acquire(timeout=30)
        while rig.ready.acquire(timeout=0.05):
            pass
        assert dataset.num_reads == 6 + 1 + 2
        assert rig.stage._pool.num_device_slots == 3


def test_close_stops_the_thread_and_frees_the_slots():
    rig = Rig(Numbers())
    rig.use(ALL)
    rig.loader.submit(ALL)
    rig.context.finish()
    assert rig.loader.close(20)
    assert rig.stage._pool is None
    assert rig.loader.try_next() is None
    with pytest.raises(RuntimeError, match="closed"):
        rig.loader.submit(ALL)
    assert rig.loader.close(20)


def test_close_frees_no_slot_while_a_copy_is_in_progress():
    rig = Rig(Numbers())
    rig.use(EPOCHS[0])
    slot = rig.stage._pool._all[0]
    rig.context.finish()
    rig.context.record(slot.ready)
    rig.context._streams["compute"].clear()
    slot.ready.mark.done = False
    assert not rig.loader.close(0.05)
    assert rig.stage._pool is not None
    slot.ready.mark.done = True
    assert rig.loader.close(20)


def test_a_read_that_returns_after_close_uses_no_device():
    entered, let = threading.Event(), threading.Event()

    class Stuck(Numbers):
        def get_batch(self, indices):
            if self.num_reads == 6:
                entered.set()
                assert let.wait(30)
            return super().get_batch(indices)

    rig = Rig(Stuck())
    rig.use(EPOCHS[0])
    rig.loader.submit(EPOCHS[1])
    assert rig.loader.try_next() is None or entered.is_set()
    assert entered.wait(30)
    assert not rig.loader.close(0.05)
    num_copies = sum(slot.ready.num_recorded for slot in rig.stage._pool._all)
    pool = rig.stage._pool
    let.set()
    assert rig.loader.close(20)
    assert sum(slot.ready.num_recorded for slot in pool._all) == num_copies


def test_batches_of_loader_processes_are_copied_through_slots():
    context, ready = DelayedCopies(4), threading.Semaphore(0)
    stage = SlotStage(
        context,
        DeviceBudget(0.5, margin=0),
        rank=0,
        batch_size=SIZE,
        sizing=SizingSchedule(CALIBRATION),
    )
    loader = ProcessLoader(
        LoaderSpec(
            adapter=adapt_dataset(Noisy()),
            index=EpochIndex(N, SIZE, SEED),
            device=context.device,
            seed=SEED,
            rank=0,
        ),
        on_ready=ready.release,
        num_processes=1,
        stage=stage,
    )
    loader.start()
    try:
        for plan in EPOCHS[:2]:
            loader.submit(plan)
            for batch in range(6):
                while (loaded := loader.try_next()) is None:
                    assert ready.acquire(timeout=30)
                indices = INDEX.indices(plan.epoch, batch)
                context.use([loaded.data[0]], [indices])
        assert stage.depth == 6
        assert stage._pool.num_device_slots == 7
    finally:
        context.finish()
        assert loader.close(20)


class Pinning(DelayedCopies):
    """Counts the tensors in pinned memory."""

    num_pinned = 0

    def empty_pinned(self, shape, dtype):
        self.num_pinned += 1
        return super().empty_pinned(shape, dtype)


@pytest.mark.parametrize(("available", "num_hosts"), [(4 * 240, 2), (4 * 288, 3)])
def test_host_slots_are_counted_at_the_size_that_pytorch_allocates(
    monkeypatch, available, num_hosts
):
    """A batch of 32 and 48 bytes takes 32 and 64: 96 bytes of a quarter of the memory."""
    monkeypatch.setattr(prefetch_module, "available_host_bytes", lambda: available)
    with Rig(Numbers(), context=Pinning()) as rig:
        rig.use(EPOCHS[0])
        assert rig.context.num_pinned == 2 * num_hosts


def test_memory_for_snapshots_is_reserved_on_the_host_once(monkeypatch):
    monkeypatch.setattr(prefetch_module, "available_host_bytes", lambda: 4 * 288 + 1000)
    with Rig(Numbers(), context=Pinning(), snapshot_bytes=lambda: 1000 + 4 * 96) as rig:
        rig.use(EPOCHS[0])
        assert rig.context.num_pinned == 2 * 2
        rig.use(EPOCHS[1])  # the available memory now includes them
        assert rig.context.num_pinned == 2 * 4
