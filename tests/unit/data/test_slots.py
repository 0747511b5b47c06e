"""Slots under delayed events: no slot is used too early, whatever the delays."""

import random
from collections import deque

import pytest
import torch

from runtime.data.slots import BatchLayout, SlotPool, TensorSpec, slot_tensors
from runtime.device.base import Device
from tests.support.fake_streams import DelayedCopies

SIZE = 4
LAYOUT = BatchLayout(
    [
        TensorSpec((3,), torch.float32, True),
        TensorSpec((), torch.int64, True),
        TensorSpec((2,), torch.float64, False),
    ],
    SIZE,
)


def batch(number, rows=SIZE):
    return [
        torch.full((rows, 3), float(number)),
        torch.full((rows,), number),
        torch.full((2,), float(number), dtype=torch.float64),
    ]


def writer(tensors):
    def write(out):
        for target, source in zip(out, tensors, strict=True):
            target.copy_(source)

    return write


def drive(context, *, depth=2, num_hosts=2, num_batches=24, seed=0):
    """Interleave a loader and a worker at random; fails on an order violation."""
    chance = random.Random(seed)
    pool = SlotPool(context, LAYOUT)
    assert pool.grow(depth + 1, num_hosts) == depth + 1
    waiting, taken, loaded, used = deque(), None, 0, 0
    while used < num_batches:
        can_load = loaded < num_batches and len(waiting) < depth
        if can_load and (not waiting or chance.random() < 0.6):
            rows = chance.choice((SIZE, SIZE, 1, 3))
            tensors = batch(loaded, rows)
            slot, parts = pool.fill([rows, rows, None], writer(tensors))
            waiting.append((slot, parts, tensors))
            loaded += 1
        elif waiting:
            if taken is not None:
                pool.release(taken)
            taken, parts, tensors = waiting.popleft()
            pool.take(taken)
            context.use(parts, tensors)
            used += 1
    context.finish()
    assert context.num_used == num_batches


@pytest.mark.parametrize(("depth", "num_hosts"), [(1, 1), (1, 2), (3, 2), (7, 4)])
def test_no_slot_is_used_too_early_under_any_delays(depth, num_hosts):
    for seed in range(60):
        drive(DelayedCopies(seed), depth=depth, num_hosts=num_hosts, seed=seed)


FAULTS = {
    "free": "overwritten while in use",
    "ready": "not its own",
    "host": "before the copy out of it",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checker_detects_every_missing_wait(fault):
    num_found = 0
    for seed in range(30):
        context = DelayedCopies(seed, faults={fault})
        try:
            drive(context, seed=seed)
        except AssertionError:
            num_found += any(FAULTS[fault] in violation for violation in context.violations)
    assert num_found >= 10


def test_growing_stops_when_the_device_is_out_of_memory():
    context = DelayedCopies(limit_bytes=3 * LAYOUT.slot_bytes)
    assert SlotPool(context, LAYOUT).grow(8, 2) == 3


def test_a_new_slot_is_written_only_after_work_issued_before_its_allocation():
    for seed in range(20):
        context, order = DelayedCopies(seed), []

        def note(what, order=order):
            order.append(what)

        context.push(lambda: note("compute"))
        pool = SlotPool(context, LAYOUT)
        pool.grow(2, 1)
        pool.fill([1, 1, None], lambda out: None)
        with context.copying():
            context.push(lambda: note("copied"))
        context.finish()
        assert order == ["compute", "copied"]


def test_a_failed_write_loses_no_slot():
    def fail(out):
        raise KeyError("planted")

    pool = SlotPool(Device(), LAYOUT)
    pool.grow(2, 1)
    for _ in range(5):
        with pytest.raises(KeyError):
            pool.fill([SIZE, SIZE, None], fail)
    slot, parts = pool.fill([2, 2, None], writer(batch(7, 2)))
    assert [part.tolist() for part in parts] == [part.tolist() for part in batch(7, 2)]
    pool.release(slot)


def test_wait_for_copies_waits_until_its_timeout():
    context = DelayedCopies()
    pool = SlotPool(context, LAYOUT)
    pool.grow(2, 1)
    slot, _ = pool.fill([SIZE, SIZE, None], writer(batch(1)))
    context.record(slot.ready)
    slot.ready.mark.done = False
    context._streams["copy"].clear()  # never completes
    context._streams["compute"].clear()
    assert not pool.wait_for_copies(0.01)
    slot.ready.mark.done = True
    assert pool.wait_for_copies(0.01)


class FailingCopies(DelayedCopies):
    """Raises in the first copy to the device."""

    num_copies = 0

    def copy(self, target, source):
        self.num_copies += 1
        if self.num_copies == 1:
            raise RuntimeError("planted")
        super().copy(target, source)


def test_the_slots_of_a_failed_copy_are_used_again():
    context = FailingCopies()
    pool = SlotPool(context, LAYOUT)
    assert pool.grow(1, 1) == 1
    with pytest.raises(RuntimeError, match="planted"):
        pool.fill([SIZE, SIZE, None], writer(batch(1)))
    slot, parts = pool.fill([SIZE, SIZE, None], writer(batch(2)))
    pool.take(slot)
    context.finish()
    assert [part.tolist() for part in parts] == [part.tolist() for part in batch(2)]


# -- layouts ---------------------------------------------------------------------


def test_a_layout_separates_rows_from_shapes():
    layout = BatchLayout.of({"x": torch.zeros(3, 5), "pair": (torch.zeros(2), 7)}, 3, 8)
    assert layout.specs[0] == TensorSpec((5,), torch.float32, True)
    assert layout.specs[1] == TensorSpec((2,), torch.float32, False)
    assert layout.specs[0].full_shape(8) == (8, 5)
    assert layout.slot_bytes == 512 + 512


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)],
        batch(0, SIZE + 1),
        [torch.zeros(4, 2), *batch(0)[1:]],
        [batch(0)[0].double(), *batch(0)[1:]],
        [torch.zeros(()), *batch(0)[1:]],
        [*batch(0)[:2], torch.zeros(3, dtype=torch.float64)],
    ],
    ids=["number", "rows", "shape", "dtype", "scalar", "fixed"],
)
def test_a_layout_does_not_fit_other_shapes_and_dtypes(tensors):
    assert not LAYOUT.fits(tensors)


@pytest.mark.parametrize(
    "part",
    [
        torch.nn.utils.rnn.pack_sequence([torch.zeros(3)]),
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.nn.Parameter(torch.zeros(2)),
        torch.zeros(2, requires_grad=True),
    ],
    ids=["packed", "elsewhere", "sparse", "subclass", "gradient"],
)
def test_only_plain_tensors_fit_into_slots(part):
    assert slot_tensors((torch.zeros(2), part)) is None
    assert BatchLayout.of((torch.zeros(2), part), 2, 2) is None


def test_a_batch_without_a_tensor_has_no_layout():
    assert BatchLayout.of(("name", 3), 2, 2) is None
