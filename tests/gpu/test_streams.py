"""The order of a real GPU's streams: delay kernels before every write, and exact sums after."""

from __future__ import annotations

import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from coordinator.averaging import Averager
from runtime import (
    ApplyPolicy,
    AverageBackend,
    GpuWorker,
    Trainer,
    UserFunctions,
    WorkerConfig,
    cuda_api,
)
from runtime.averaging import ReplicaAverager
from runtime.collective import create_collectives
from runtime.cuda_api import CudaApi
from runtime.cuda_device import MAX_RUN_AHEAD, CudaDevice
from runtime.flat import FlatState

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
SIZE = 1 << 16
NUM_ROUNDS = 1000
DELAY_CYCLES = 100_000  # some 50 microseconds
STEP_CYCLES = 10_000_000  # some 5 milliseconds
WAIT_S = 300.0

slow_enough = pytest.mark.timeout(600)


class DelayedApi(CudaApi):
    """Holds the current stream up before every copy."""

    def copy(self, target, source):
        torch.cuda._sleep(DELAY_CYCLES)
        super().copy(target, source)


class Counter(nn.Module):
    """Numbers and a buffer that every step adds to, late."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(7, dtype=torch.float64))

    @torch.no_grad()
    def step(self, amount):
        torch.cuda._sleep(DELAY_CYCLES)
        self.w.add_(amount)
        self.seen.add_(amount)


class Rank:
    """A replica on the GPU in a thread of its own, and the number that it must hold."""

    def __init__(self, rank):
        self.rank, self.expected, self.base = rank, 0.0, 0.0
        self.device = CudaDevice(GPU, api=DelayedApi())
        self.pool = ThreadPoolExecutor(1)
        self._active = self.device.activate()
        self.run(self._build)

    def run(self, work, *args):
        return self.pool.submit(work, *args).result(WAIT_S)

    def _build(self):
        self._active.__enter__()
        self.model = Counter().to(GPU)
        self.state = FlatState(self.model)
        self.averager = ReplicaAverager(self.state, self.device, None)

    def close(self):
        self.run(self._active.__exit__, None, None, None)
        self.pool.shutdown()

    def train(self, num_steps):
        for _ in range(num_steps):
            self.model.step(self.rank + 1)
            self.expected += self.rank + 1

    def snapshot(self):
        payload, arrival = self.averager.start_snapshot()
        self.base = self.expected
        self.train(1)  # while the copy is on its way
        arrival.wait()
        return payload

    def take(self, average, value):
        self.train(1)
        arrival = self.averager.take(average)
        self.expected += value - self.base
        self.train(1)
        return arrival

    def check(self):
        for tensor in (self.model.w, self.model.seen):
            assert bool((tensor == self.expected).all())


@contextmanager
def two_ranks():
    ranks = [Rank(rank) for rank in range(2)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


@slow_enough
def test_a_thousand_averagings_of_two_workers_on_one_gpu_are_exact():
    """S4 to S6: numbers are small enough to be exact, and any one too early shows."""
    averager = Averager()
    with two_ranks() as ranks:
        for round_id in range(NUM_ROUNDS):
            for rank in ranks:
                rank.run(rank.train, 1 + round_id % 2)
            payloads = [rank.run(rank.snapshot) for rank in ranks]
            for rank, payload in zip(ranks, payloads, strict=True):
                assert bool((payload.params[0] == rank.base).all())
            result = averager.average(payloads, (1, 1))
            value = (ranks[0].base + ranks[1].base) / 2
            arrivals = [rank.run(rank.take, result.average, value) for rank in ranks]
            if round_id % 100 == 99:
                for rank in ranks:
                    rank.run(rank.check)
            for rank, arrival in zip(ranks, arrivals, strict=True):
                rank.run(arrival.wait)


@slow_enough
def test_averagings_through_pinned_memory_are_exact(monkeypatch):
    monkeypatch.setattr(cuda_api, "API", DelayedApi())
    ends = create_collectives(2, "thread", [GPU, GPU], WAIT_S)
    with two_ranks() as ranks:

        def reduce(rank, weight):
            rank.train(1)
            rank.averager.all_reduce(weight)
            rank.train(1)

        for rank, end in zip(ranks, ends, strict=True):
            rank.averager.collective = end
        for round_id in range(200):
            futures = [rank.pool.submit(reduce, rank, 1) for rank in ranks]
            for future in futures:
                future.result(WAIT_S)
            before = [rank.expected - (rank.rank + 1) for rank in ranks]
            for rank in ranks:
                rank.expected = sum(before) / 2 + rank.rank + 1
            if round_id % 20 == 19:
                for rank in ranks:
                    rank.run(rank.check)
    for end in ends:
        end.close()


# -- the step -----------------------------------------------------------------------


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Linear(256, 10))


def loss_of(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


@contextmanager
def lone_worker(train_fn=loss_of, **settings):
    device = CudaDevice(GPU)
    endpoints, channels = GpuWorker.channels()
    with device.activate():
        worker = GpuWorker(
            WorkerConfig(device=GPU, num_samples=64, batch_size=64, **settings),
            UserFunctions(
                model_factory=lambda where: Mlp().to(where),
                optim_factory=lambda params: torch.optim.AdamW(params, 1e-3),
                train_fn=train_fn,
            ),
            endpoints,
            device=device,
        )
        yield worker, channels
        worker.close()


def batch():
    return torch.randn(64, 64, device=GPU), torch.randint(10, (64,), device=GPU)


@contextmanager
def no_sync():
    """Any wait for the device that PyTorch knows of is an error, in the whole process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is called a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["raise", "ignore"])
def test_the_step_waits_for_nothing(precision, mode):
    """S22: forward, backward, clip, optimizer, losses, scalars, times and reports."""

    def train(model, data):
        worker.record_scalar("one", data[0].mean())
        return loss_of(model, data)

    settings = {"precision": precision, "on_non_finite": mode, "max_grad_norm": 1.0}
    with lone_worker(train, **settings, report_interval_s=0.0) as (worker, channels):
        data = batch()
        for _ in range(5):
            worker.train_step(data)
        with no_sync():
            for _ in range(50):
                worker.train_step(data)
                worker.handle_control()
                worker._reporter.report_if_due()
        worker.report_epoch(0)
        tallies = []
        while not channels.reports.empty():
            tallies.append(channels.reports.get().tally)
    assert sum(t.num_batches for t in tallies) == 55
    assert sum(t.loss_samples for t in tallies) == sum(t.num_samples for t in tallies) == 55 * 64
    assert sum(t.num_timed for t in tallies) == 55
    assert sum(t.compute_s for t in tallies) > 0


def test_a_sync_in_the_step_is_noticed():
    """The fault itself, so that the test above means something."""
    with lone_worker(lambda model, data: loss_of(model, data) * data[0].sum().item()) as (
        worker,
        _,
    ):
        data = batch()
        worker.train_step(data)
        with no_sync(), pytest.raises(RuntimeError, match="synchroniz"):
            worker.train_step(data)


def test_the_host_runs_ahead_by_a_few_steps_and_no_further():
    def late(model, data):
        torch.cuda._sleep(STEP_CYCLES)
        return loss_of(model, data)

    with lone_worker(late) as (worker, _):
        data = batch()
        for _ in range(3):
            worker.train_step(data)
        worker._context.finish()
        begin = time.perf_counter()
        results = [worker.train_step(data) for _ in range(12)]
        launched_s = time.perf_counter() - begin
        total_s = sum(result.compute_s for result in results)
    assert launched_s > total_s * (12 - MAX_RUN_AHEAD - 1) / 12
    assert launched_s < total_s


def test_step_times_are_those_of_the_device():
    def late(model, data):
        torch.cuda._sleep(STEP_CYCLES)
        return loss_of(model, data)

    with lone_worker(late) as (worker, _):
        data = batch()
        worker.train_step(data)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(STEP_CYCLES)
        end.record()
        end.synchronize()
        delay_s = start.elapsed_time(end) / 1e3
        seconds = [worker.train_step(data).compute_s for _ in range(5)]
    assert all(delay_s <= s < 3 * delay_s for s in seconds)


def test_accumulators_live_under_the_compute_stream():
    """D30: a mismatch is a warning of PyTorch, and warnings are errors here."""
    with lone_worker() as (worker, _):
        data = batch()
        for _ in range(3):
            worker.train_step(data)
        with worker._context.comm(), torch.no_grad():
            worker.model(data[0])
        worker.train_step(data)


# -- whole runs -------------------------------------------------------------------------

WAYS = [
    (policy, backend)
    for policy in ApplyPolicy
    for backend in (AverageBackend.CPU, AverageBackend.THREAD)
]


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0"] * 2, ["cuda:0", "cpu"]], ids="+".join)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: f"{w[0].name}-{w[1].name}")
@slow_enough
def test_runs_on_one_gpu_learn_and_train_every_sample_once(way, devices):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 64, generator=generator)
    y = x[:, :10].argmax(1)
    state = (
        Trainer.builder(
            lambda device: Mlp().to(device), lambda p: torch.optim.AdamW(p, 3e-3), loss_of
        )
        .dataset((x, y))
        .batch_size(64)
        .num_epochs(3)
        .devices(devices)
        .policy(way[0])
        .backend(way[1])
        .seed(0)
        .run()
        .join(WAIT_S)
    )
    assert [e.num_samples for e in state.metrics] == [4096] * 3
    assert state.metrics[-1].avg_loss < state.metrics[0].avg_loss
    assert all(e.per_rank[0].compute_s > 0 for e in state.metrics)
    assert all(t.device.type == "cpu" for t in state.params.values())
    model = Mlp()
    model.load_state_dict(state.state_dict())
