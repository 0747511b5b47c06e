"""Stream order on a GPU: delay kernels before every write, exact values afterwards."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from runtime import ApplyPolicy, AverageBackend, GpuWorker, Trainer, UserFunctions, WorkerConfig
from runtime.device.cuda import MAX_RUN_AHEAD, CudaDevice
from tests.gpu import replicas
from tests.gpu.delays import GPU, LONG, DelayedApi, Delays
from tests.gpu.no_sync import no_sync
from tests.support.fake_cuda import standing_in

pytestmark = pytest.mark.gpu

NUM_ROUNDS = 1000
STEP_CYCLES = LONG
WAIT_S = 60.0

slow_enough = pytest.mark.timeout(200)


@slow_enough
def test_a_thousand_averagings_of_two_workers_on_one_gpu_are_exact():
    replicas.average_over_the_cpu(GPU, NUM_ROUNDS)


@slow_enough
def test_a_thousand_averagings_through_pinned_memory_are_exact():
    with standing_in(DelayedApi(Delays(GPU, 7))):
        replicas.average_in_shared_memory(GPU, NUM_ROUNDS)


class UnorderedDevice(CudaDevice):
    """A device without one of the two stream waits around its communication stream."""

    def __init__(self, device, missing):
        super().__init__(device)
        self._missing = missing

    def _order(self, stream, *, behind):
        if (behind is self.compute) is not (self._missing == "before"):
            super()._order(stream, behind=behind)


@pytest.mark.parametrize("missing", ["before", "after"])
def test_a_missing_stream_wait_is_detected(missing, monkeypatch):
    """Shows that the tests above can fail."""
    monkeypatch.setattr(replicas, "context_of", lambda *_: UnorderedDevice(GPU, missing))
    with pytest.raises(AssertionError):
        replicas.average_over_the_cpu(GPU, 50)


# -- the step -----------------------------------------------------------------------


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Linear(256, 10))


def loss_of(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


@contextmanager
def single_worker(train_fn=loss_of, **settings):
    device = CudaDevice(GPU)
    endpoints, channels = GpuWorker.channels()
    with device.activate():
        worker = GpuWorker(
            WorkerConfig(
                device=GPU,
                num_samples=64,
                batch_size=64,
                policy=ApplyPolicy.CADENCE,
                **settings,
            ),
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["raise", "ignore"])
def test_the_step_never_synchronises(precision, mode):
    """Forward, backward, clipping, optimizer, losses, scalars, times and reports."""

    def train(model, data):
        worker.record_scalar("one", data[0].mean())
        return loss_of(model, data)

    settings = {"precision": precision, "on_non_finite": mode, "max_grad_norm": 1.0}
    with single_worker(train, **settings, report_interval_s=0.0) as (worker, channels):
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
            tallies.append(channels.reports.get().stats)
    assert sum(t.num_batches for t in tallies) == 55
    assert sum(t.loss_samples for t in tallies) == sum(t.num_samples for t in tallies) == 55 * 64
    assert sum(t.num_timed for t in tallies) == 55
    assert sum(t.compute_s for t in tallies) > 0


def test_a_planted_synchronisation_is_detected():
    """Shows that the test above can fail."""
    with single_worker(lambda model, data: loss_of(model, data) * data[0].sum().item()) as (
        worker,
        _,
    ):
        data = batch()
        worker.train_step(data)
        with no_sync(), pytest.raises(RuntimeError, match="synchroniz"):
            worker.train_step(data)


def test_the_host_runs_only_a_few_steps_ahead_of_the_device():
    def late(model, data):
        torch.cuda._sleep(STEP_CYCLES)
        return loss_of(model, data)

    with single_worker(late) as (worker, _):
        data = batch()
        for _ in range(3):
            worker.train_step(data)
        worker.replica.context.finish()
        begin = time.perf_counter()
        results = [worker.train_step(data) for _ in range(12)]
        launched_s = time.perf_counter() - begin
        total_s = sum(result.compute_s for result in results)
    assert launched_s > total_s * (12 - MAX_RUN_AHEAD - 1) / 12
    assert launched_s < total_s


def test_step_times_are_measured_on_the_device():
    def late(model, data):
        torch.cuda._sleep(STEP_CYCLES)
        return loss_of(model, data)

    with single_worker(late) as (worker, _):
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


@pytest.fixture
def _every_warning():
    """Repeat warnings that PyTorch gives once per process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.usefixtures("_every_warning")
def test_gradient_accumulators_belong_to_the_compute_stream():
    """PyTorch warns about a mismatch, and warnings are errors here."""
    with single_worker() as (worker, _):
        data = batch()
        for _ in range(3):
            worker.train_step(data)
        with worker.replica.context.comm():
            kept = loss_of(worker.model, data)  # would create new nodes if the old ones were freed
        worker.train_step(data)
        assert kept.requires_grad


@pytest.mark.usefixtures("_every_warning")
def test_an_accumulator_of_another_stream_is_detected():
    """Shows that the test above can fail."""
    weight = nn.Parameter(torch.ones(8, device=GPU))
    torch.cuda.synchronize(GPU)
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        node = torch.autograd.graph.get_gradient_edge(weight).node
    with (
        torch.cuda.stream(torch.cuda.Stream(GPU)),
        torch.autograd.set_multithreading_enabled(False),
        pytest.warns(UserWarning, match="AccumulateGrad"),
    ):
        (weight * 2).sum().backward()
    assert node is not None
    torch.cuda.synchronize(GPU)


# -- whole runs -------------------------------------------------------------------------

WAYS = [
    (policy, backend)
    for policy in ApplyPolicy
    for backend in (AverageBackend.CPU, AverageBackend.THREAD)
]


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0"] * 2, ["cuda:0", "cpu"]], ids="+".join)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: f"{w[0].name}-{w[1].name}")
@slow_enough
def test_runs_on_one_gpu_converge_and_train_every_sample_once(way, devices):
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
