"""A run that is over leaves no thread, no file descriptor and no model."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
import torch
from torch.utils.data import Dataset

from runtime import WorkerFailed
from tests.support.running import (
    CADENCE,
    GLOO,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    Counter,
    builder,
    count_up,
    over,
)

NUM_RUNS = 10
NUM_WARM = 3
WAYS = [(CADENCE, OVER_CPU), (SYNC, THREAD), (CADENCE, THREAD), (SYNC, GLOO), (CADENCE, GLOO)]


class Read(Dataset):
    """A data set not in memory, so that loader threads run."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor(index)


@pytest.fixture
def no_garbage_collection():
    """Disable garbage collection: a run must free its memory by reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def native_threads():
    return len(os.listdir("/proc/self/task"))


def fail_once(model, batch):
    raise RuntimeError("planted")


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
@over(WAYS)
@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_runs_leave_no_thread_and_no_file_descriptor(way, fails):
    before = set(threading.enumerate())
    counts, natives = [], []
    for _ in range(NUM_RUNS):
        handle = builder(
            dataset=Read(), train=fail_once if fails else count_up, epochs=2, way=way
        ).run()
        if fails:
            with pytest.raises(WorkerFailed):
                handle.join(WAIT_S)
        else:
            handle.join(WAIT_S)
        del handle
        assert {t for t in threading.enumerate() if t.is_alive()} <= before
        counts.append(descriptors())
        natives.append(native_threads())
    # The first runs may load libraries and start pools that stay for the process.
    assert max(counts[NUM_WARM:]) <= max(counts[:NUM_WARM])
    # The kernel may take a moment longer than Python to forget a thread.
    assert min(natives[-5:]) <= max(natives[:NUM_WARM]) + 1


@over(WAYS[:3])
def test_an_ended_run_keeps_no_model(way):
    models = []

    def model(device):
        built = Counter()
        models.append(weakref.ref(built))
        return built

    handle = builder(model=model, way=way).run()
    state = handle.join(WAIT_S)
    gc.collect()
    assert len(models) == 2
    assert [ref() for ref in models] == [None, None]
    assert state is handle.state
