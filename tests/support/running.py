"""Helpers of tests with whole runs: small models with simple arithmetic."""

import threading
import time
from collections import Counter as Tally
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from coordinator import messages as m
from runtime import ApplyPolicy, AverageBackend, Trainer, current_worker, run

# Else every run warns where PyTorch can crash on free-threaded Python, and tests of a run's
# messages fail.
run.thread_end_fault = lambda: None  # type: ignore[attr-defined]

CPU = torch.device("cpu")
WAIT_S = 60.0
"""Bound of every wait: reached only by a test that fails."""

SYNC, CADENCE, ASYNC = ApplyPolicy.SYNC, ApplyPolicy.CADENCE, ApplyPolicy.ASYNC
OVER_CPU, THREAD, GLOO = AverageBackend.CPU, AverageBackend.THREAD, AverageBackend.GLOO
WAYS = [
    (policy, backend)
    for policy in ApplyPolicy
    for backend in (OVER_CPU, THREAD, GLOO)
    if (policy, backend) != (SYNC, OVER_CPU)  # the reduction of (SYNC, THREAD)
]
LOCAL_WAYS = [way for way in WAYS if way[1] is not GLOO]


def over(ways):
    """A mark that runs a test with each of these ways as ``way``."""
    return pytest.mark.parametrize("way", ways, ids=lambda way: f"{way[0].name}-{way[1].name}")


def until(condition, timeout_s=WAIT_S):
    """Poll until the condition holds, where there is no event to wait for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the state waited for never came"
        time.sleep(0.001)


def at_once(work, arguments):
    """The results of a function for each argument, each in a thread; an error of one is raised."""
    arguments = list(arguments)
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(work, arguments, timeout=WAIT_S))


every_way, local_ways = over(WAYS), over(LOCAL_WAYS)
averaged_ways = over([way for way in WAYS if way[0] is not SYNC])
local_averaged_ways = over([way for way in LOCAL_WAYS if way[0] is not SYNC])


class Counter(nn.Module):
    """One number, which :func:`count_up` with :func:`plain_sgd` increments in each step."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def counter(device):
    return Counter().to(device)


def count_up(model, batch):
    return -model.w.sum()


def plain_sgd(params, lr=1.0):
    return torch.optim.SGD(params, lr)


def numbers(n):
    """A data set whose sample ``i`` is ``i``."""
    return (torch.arange(n),)


class Stream(IterableDataset):
    """The same samples as a stream."""

    def __init__(self, n):
        self._n = n

    def __len__(self):
        return self._n

    def __iter__(self):
        return ((torch.tensor(i),) for i in range(self._n))


def builder(
    *,
    model=counter,
    optim=plain_sgd,
    train=count_up,
    dataset=20,
    batch_size=2,
    epochs=1,
    ranks=2,
    way=(CADENCE, OVER_CPU),
):
    """A complete builder; ``dataset`` may be a length."""
    return (
        Trainer.builder(model, optim, train)
        .dataset(numbers(dataset) if isinstance(dataset, int) else dataset)
        .batch_size(batch_size)
        .num_epochs(epochs)
        .devices(["cpu"] * ranks)
        .policy(way[0])
        .backend(way[1])
        .collective_timeout(WAIT_S)
    )


def train(**kwargs):
    """Run to the end; returns the state."""
    return builder(**kwargs).run().join(WAIT_S)


class Trace:
    """A ``train_fn`` that records the batches of each rank, in order."""

    def __init__(self, inner=count_up):
        self._inner = inner
        self._changed = threading.Condition()
        self.batches = []  # (epoch, rank, indices)
        self.steps = defaultdict(int)

    def __call__(self, model, batch):
        worker = current_worker()
        indices = batch[-1] if isinstance(batch, (tuple, list)) else batch
        with self._changed:
            self.batches.append((worker.current_epoch, worker.rank, tuple(indices.tolist())))
            self.steps[worker.rank] += 1
            self._changed.notify_all()
        return self._inner(model, batch)

    def wait_for(self, ready):
        with self._changed:
            assert self._changed.wait_for(ready, WAIT_S), "the run did not get that far"

    def of_epoch(self, epoch):
        return [(rank, indices) for e, rank, indices in self.batches if e == epoch]


class Seen:
    """A ``train_fn`` that records each rank's samples; rank 1 fails at its n-th batch."""

    def __init__(self, fails_at=None):
        self.batches, self._lock, self._fails_at = [], threading.Lock(), fails_at
        self._num = 0

    def __call__(self, model, batch):
        worker, (index,) = current_worker(), batch
        with self._lock:
            self._num += worker.rank == 1
            if worker.rank == 1 and self._num == self._fails_at:
                raise RuntimeError("planted")
            self.batches.append((worker.rank, worker.current_epoch, index.tolist()))
        return 1e-3 * model(torch.ones(len(index), 1)).mean()

    def sizes(self, rank):
        return [len(batch) for r, _, batch in self.batches if r == rank]

    def trained(self):
        return Tally((epoch, i) for _, epoch, batch in self.batches for i in batch)


class Gate:
    """A ``train_fn`` that waits at its first call until the test opens it."""

    def __init__(self, inner=count_up, rank=None):
        self._inner = inner
        self._rank = rank
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, model, batch):
        if self._rank in (None, current_worker().rank):
            self.entered.set()
            assert self.opened.wait(WAIT_S), "the gate was never opened"
        return self._inner(model, batch)

    def await_entry(self):
        assert self.entered.wait(WAIT_S), "no step began"


def expect_finite(state):
    """Check the state that a failed run left, if any."""
    if state is not None:
        assert state.reason == "failed"
        assert all(torch.isfinite(t).all() for t in state.params.values())


def task(kind, epoch=0, at=None, rank=0, id=1):
    """A task of a rank on an average."""
    return m.Task(id=id, kind=kind, epoch=epoch, at=at, rank=rank)
