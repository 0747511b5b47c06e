"""ProcessLoader: batches equal those of a thread, and processes are stopped."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import signal
import threading
import time
from multiprocessing import resource_sharer

import pytest
import torch
from torch.utils.data import DataLoader

from coordinator.messages import EpochPlan
from runtime import predict
from runtime.data import process_loader
from runtime.data.data_set_state import (
    MAX_SHARED_TENSORS,
    DataSetState,
    Packed,
    check_picklable,
    dumps,
)
from runtime.data.dataset import adapt_dataset
from runtime.data.loader import InlineLoader
from runtime.data.process_loader import ProcessLoader
from tests.support.loading import ALL, SIZE, Consumer, Noisy, Troubled, assert_is_plan, draws
from tests.support.running import WAIT_S, builder


def children():
    return {child.pid for child in multiprocessing.active_children()}


def test_loader_processes_in_a_daemonic_process_are_refused_with_the_remedy(monkeypatch):
    """Such processes may not have children: those of ``multiprocessing.Pool``, for instance."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    remedy = r"2 loader processes: this process is daemonic.* loader_workers\(0\).* daemon=False"
    loader = DataLoader(Noisy(), batch_size=2, num_workers=2)
    for start in (
        lambda: builder(dataset=Noisy(), ranks=1).loader_workers(2).run(),
        lambda: builder(dataset=loader, ranks=1).run(),
        lambda: builder(ranks=1).val_dataset(loader, fn=lambda model, batch: model.w.sum()).run(),
        lambda: predict(torch.nn.Linear(1, 1), loader),
        lambda: builder(ranks=1).run().join(WAIT_S).evaluate(loader, lambda model, batch: {}),
    ):
        threads = threading.active_count()
        with pytest.raises(ValueError, match=remedy):
            start()
        assert threading.active_count() == threads


def test_processes_load_the_batches_and_draws_of_a_thread():
    with Consumer(InlineLoader, Noisy()) as inline:
        wanted = draws(inline.take(ALL))
    before = children()
    state = torch.get_rng_state()
    with Consumer(ProcessLoader, Troubled(), rank=2, num_processes=2) as consumer:
        assert torch.equal(torch.get_rng_state(), state)
        pids = children() - before
        assert len(pids) == 2
        assert_is_plan(first := consumer.take(ALL), ALL)
        assert min(loaded.load_s for loaded in first) > 0
        for pid in pids:
            os.kill(pid, signal.SIGINT)  # as Ctrl-C does
        taken = consumer.take(ALL)
        assert_is_plan(taken, ALL)
        assert draws(taken) == wanted
        assert taken[0].data[2].tolist() == [2] * SIZE

        queued = (EpochPlan(epoch=1, batches=(range(2, 6),)), ALL)
        for plan in queued:
            consumer.loader.submit(plan)
        for plan in queued:
            assert_is_plan([consumer.next() for _ in range(plan.num_batches)], plan)

        consumer.loader.submit(ALL)
        assert consumer.next().batch == 0
        consumer.loader.cancel()
        assert consumer.loader.try_next() is None
        assert_is_plan(consumer.take(queued[0]), queued[0])

        consumer.loader.submit(EpochPlan(epoch=1, batches=(range(3),)))
        assert consumer.next().batch == 0
        with pytest.raises(KeyError, match="no such sample"):
            consumer.next()
        assert consumer.next().batch == 2
        assert children() - before == pids
    assert children() == before
    assert "QueueFeederThread" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_a_dead_process_raises_an_error_and_leaks_nothing():
    # The fork server keeps running, so it is started before files are counted.
    first = multiprocessing.get_context("forkserver").Process(target=time.time)
    first.start()
    first.join(30)
    first.close()
    before, num_files = children(), len(os.listdir("/proc/self/fd"))
    with Consumer(ProcessLoader, Troubled(), num_processes=1) as consumer:
        consumer.take(EpochPlan(epoch=2, batches=(range(2),)))
        for plan in (EpochPlan(epoch=2, batches=(range(2, 6),)), ALL):
            consumer.loader.submit(plan)
            for _ in range(3):
                with pytest.raises(RuntimeError, match="rank 0 died with exit code 7"):
                    consumer.next()
            consumer.loader.cancel()
    assert len(os.listdir("/proc/self/fd")) <= num_files
    assert children() == before


class Many(Noisy):
    """A data set, and batches, of many tensors, some of them views of one storage."""

    def __init__(self):
        super().__init__()
        self.rows = [torch.full((1 + i % 3,), float(i)) for i in range(600)]
        self.views = list(torch.arange(1200.0).view(600, 2))

    def __getitem__(self, index):
        return {str(i): self.rows[index + 5 * i][:1] for i in range(100)} | {"v": self.views[index]}


def test_many_tensors_are_sent_to_processes_and_back():
    with Consumer(InlineLoader, Many()) as inline:
        wanted = inline.take(ALL)
    with Consumer(ProcessLoader, Many(), num_processes=2) as consumer:
        taken = consumer.take(ALL)
    for one, other in zip(taken, wanted, strict=True):
        assert one.data.keys() == other.data.keys()
        assert all(torch.equal(one.data[key], value) for key, value in other.data.items())


@pytest.fixture
def sharer():
    """The server of the file descriptors that this process shares ends."""
    yield
    resource_sharer.stop(timeout=10.0)


def test_packed_tensors_keep_storages_identity_and_layout(sharer):
    base = torch.arange(12.0).view(3, 4)
    small = [torch.tensor(i, dtype=torch.int16) for i in range(300)]
    content = {"base": base, "t": base.T, "again": base, "small": small, "e": torch.empty(0, 3)}
    found = pickle.loads(dumps(content, num_tensors=304))
    assert found["again"] is found["base"]
    assert torch.equal(found["t"], base.T)
    found["t"][0, 0] = 7.0
    assert found["base"][0, 0] == 7.0
    assert found["small"] == small
    assert found["e"].shape == (0, 3)
    _, (_, storages, _) = Packed(content).__reduce__()
    assert len(storages) <= MAX_SHARED_TENSORS


def test_writes_to_one_of_many_tensors_are_sent_again(sharer):
    data = Many()
    state = DataSetState(adapt_dataset(data), 1)
    state.sent()
    state.begin_epoch(0)
    assert state.take() is None
    data.rows[3].add_(1)
    state.begin_epoch(1)
    sent = state.take()
    assert sent is not None
    assert pickle.loads(sent).dataset.rows[3][0] == 4.0


class Stuck(Noisy):
    """Reports through a pipe that it is being read, and never returns."""

    def __init__(self, pipe):
        self.pipe = pipe

    def __getitem__(self, index):
        self.pipe.write_bytes(b"!")
        threading.Event().wait(60)


@pytest.mark.slow
def test_close_kills_a_stuck_process(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    before = children()
    consumer = Consumer(ProcessLoader, Stuck(pipe), num_processes=1)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        consumer.loader.start()
        consumer.loader.submit(ALL)
        assert select.select([reader], [], [], 30)[0], "the data set is not read"
    finally:
        os.close(reader)
    assert consumer.loader.try_next() is None
    start = time.monotonic()
    assert consumer.loader.close(0.5)
    assert time.monotonic() - start < 15
    assert children() == before
    assert consumer.loader.close()


def test_a_plan_before_start_raises_an_error():
    consumer = Consumer(ProcessLoader, Noisy(), num_processes=1)
    with pytest.raises(RuntimeError, match="start"):
        consumer.loader.submit(ALL)
    assert consumer.loader.close()


def test_objects_that_cannot_be_pickled_are_refused_at_start():
    before = children()
    adapter = adapt_dataset(Noisy(), collate_fn=lambda samples: samples)
    consumer = Consumer(ProcessLoader, Noisy(), num_processes=1)
    consumer.loader._adapter = adapter
    with pytest.raises(TypeError, match=r"collate_fn.*cannot be pickled.*top of a module"):
        consumer.loader.start()
    assert children() == before


def test_picklability_is_checked_without_copying_large_tensors():
    big = torch.empty(1 << 40, dtype=torch.uint8, device="meta")
    check_picklable([adapt_dataset(Noisy(), lock=True), big])
    with pytest.raises(TypeError, match="cannot be pickled"):
        check_picklable(threading.Lock())


@pytest.mark.parametrize(("configured", "preloaded"), [(["__main__"], True), (["numpy"], False)])
def test_the_fork_server_preloads_torch_unless_configured_otherwise(
    configured, preloaded, monkeypatch
):
    server = multiprocessing.forkserver._forkserver
    monkeypatch.setattr(server, "_preload_modules", configured)
    process_loader._preload()
    assert ("torch" in server._preload_modules) is preloaded
    assert (process_loader.__name__ in server._preload_modules) is preloaded
    assert configured[0] in server._preload_modules
