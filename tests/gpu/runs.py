"""Checks of whole runs, for CUDA devices and the CPU."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from runtime import ApplyPolicy, AverageBackend, Trainer, WorkerFailed, current_worker
from tests.gpu.delays import LONG, delay

SYNC, CADENCE, ASYNC = ApplyPolicy.SYNC, ApplyPolicy.CADENCE, ApplyPolicy.ASYNC
OVER_CPU, THREAD = AverageBackend.CPU, AverageBackend.THREAD
WAYS = [(policy, backend) for policy in ApplyPolicy for backend in (OVER_CPU, THREAD)]
N, SIZE, WIDTH = 512, 16, 8
WAIT_S = 60.0
TRUE_W = torch.arange(1.0, WIDTH + 1, dtype=torch.float64)


def name_of(way):
    return f"{way[0].name}-{way[1].name}"


def problem(dtype=torch.float64):
    """Linear regression without noise, which converges to one point in any batch order."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, WIDTH, generator=generator, dtype=torch.float64)
    return x.to(dtype), (x @ TRUE_W).to(dtype)


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x):
        return x @ self.w


def squares(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def learn(devices, way, *, model=Line, train=squares, data=None, epochs=15, lr=0.05, **settings):
    """Start a run."""
    builder = (
        Trainer.builder(
            lambda device: model().to(device), lambda params: torch.optim.SGD(params, lr), train
        )
        .dataset(problem() if data is None else data)
        .batch_size(SIZE)
        .num_epochs(epochs)
        .devices(devices)
        .policy(way[0])
        .backend(way[1])
        .collective_timeout(20)
        .seed(0)
    )
    for name, value in settings.items():
        getattr(builder, name)(value)
    return builder.run()


def assert_learned(state, *, epochs=15):
    """Check that each sample was trained once per epoch and that training converged."""
    assert [m.num_samples for m in state.metrics] == [N] * epochs
    assert [m.num_skipped for m in state.metrics] == [0] * epochs
    torch.testing.assert_close(state.params["w"], TRUE_W, rtol=0, atol=1e-3)


# -- results ----------------------------------------------------------------------------------


class Norm(nn.Module):
    """A network with matrices, vectors, and buffers of floats and integers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.inner = nn.Linear(WIDTH, 12)
        self.outer = nn.Linear(12, 1)
        self.double()

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(self.norm(x)))).squeeze(1)


def adam_like(model, batch):
    """:func:`squares` for a model with a wider output."""
    x, y = batch
    return (model(x) - y / 20).square().mean()


def sync_state(devices):
    """Final state of two workers under ``SYNC``; bitwise reproducible on the CPU."""
    handle = learn(
        devices,
        (SYNC, THREAD),
        model=Norm,
        train=adam_like,
        epochs=2,
        max_grad_norm=1.0,
        balance=False,  # batch statistics are those of the pieces, whose sizes must be the same
    )
    return handle.join(WAIT_S)


def assert_states_agree(actual, expected):
    for name, tensor in expected.state_dict().items():
        found = actual.state_dict()[name].double()
        norm = tensor.double().norm().clamp(min=1.0)
        assert float((found - tensor.double()).norm() / norm) < 1e-8, name
    for a, e in zip(actual.metrics, expected.metrics, strict=True):
        assert a.avg_loss == pytest.approx(e.avg_loss, rel=1e-9)
        assert a.num_samples == e.num_samples


def converges_as_on_cpu(device, policy):
    """Two workers on one device, averaging through host memory, converge as CPU workers do."""
    way = (policy, THREAD)
    states = [learn([d, d], way).join(WAIT_S) for d in (device, torch.device("cpu"))]
    for state in states:
        assert_learned(state)
    torch.testing.assert_close(states[0].params["w"], states[1].params["w"], rtol=0, atol=2e-3)


def unequal_speeds(device, policy):
    """Rank 1 is delayed in every step; each sample is trained once, and training converges."""

    def train(model, batch):
        if current_worker().rank == 1:
            delay(device, LONG // 2)
            if device.type == "cpu":
                time.sleep(0.002)
        return squares(model, batch)

    state = learn([device, device], (policy, OVER_CPU), train=train).join(WAIT_S)
    assert_learned(state)
    assert sum(m.num_retrained for m in state.metrics) == 0
    assert sum(r.num_samples for m in state.metrics for r in m.per_rank) == N * len(state.metrics)
    assert sum(m.num_averagings for m in state.metrics) > 0
    fast, slow = (sum(m.per_rank[r].num_batches for m in state.metrics) for r in (0, 1))
    assert fast > slow


class FailingStep:
    """A ``train_fn`` that calls ``error`` at one step of one rank."""

    def __init__(self, rank, step, error, inner=squares):
        self._rank, self._step, self._error, self._inner = rank, step, error, inner
        self.num_shots = 0

    def __call__(self, model, batch):
        worker = current_worker()
        if (worker.rank, worker.local_step) == (self._rank, self._step):
            self.num_shots += 1
            self._error()
        return self._inner(model, batch)


def raise_planted():
    raise KeyError("planted")


def equal_shares(devices):
    """Settings under which a slow rank still trains its share of the steps."""
    return {"partition_ratios": [1 / len(devices)] * len(devices)}


def raising(devices, way):
    """An exception in one rank ends the run promptly, with the cause."""
    fault = FailingStep(1, 7, raise_planted)
    begin = time.monotonic()
    handle = learn(devices, way, train=fault, **equal_shares(devices))
    with pytest.raises(WorkerFailed, match="planted") as caught:
        handle.join(WAIT_S)
    assert time.monotonic() - begin < 20
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert fault.num_shots == 1


def stalling(devices, way):
    """A rank that never returns from its step ends the run soon after the timeouts."""
    released = threading.Event()
    fault = FailingStep(1, 7, lambda: released.wait(WAIT_S))
    begin = time.monotonic()
    limits = {"collective_timeout": 1.0, "stall_timeout": 2.0}
    handle = learn(devices, way, train=fault, **limits, **equal_shares(devices))
    try:
        with pytest.raises(RuntimeError, match=r"did not|stall|rank 1"):
            handle.join(WAIT_S)
        assert time.monotonic() - begin < 30
        assert fault.num_shots == 1
    finally:
        released.set()


def survivors_continue(devices, way, rank):
    """The other workers continue after a failure, and every sample is trained."""
    fault = FailingStep(rank, 7, raise_planted)
    handle = learn(devices, way, train=fault, on_worker_failure="continue", **equal_shares(devices))
    state = handle.join(WAIT_S)
    assert fault.num_shots == 1
    assert [f.rank for f in state.failures] == [rank]
    assert_learned(state)


def exhaust(devices, way, grab, message):
    """A rank that runs out of memory ends the run promptly, with the cause."""
    fault = FailingStep(1, 5, grab)
    begin = time.monotonic()
    fraction = small_fraction(devices[0])
    handle = learn(devices, way, train=fault, vram_fraction=fraction, **equal_shares(devices))
    with pytest.raises(WorkerFailed, match=message) as caught:
        handle.join(WAIT_S)
    assert time.monotonic() - begin < 20
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert fault.num_shots == 1


BUDGET_GIB = 2


def small_fraction(device):
    if device.type == "cpu":
        return 0.5
    return BUDGET_GIB * 2**30 / torch.cuda.get_device_properties(device).total_memory


def low_precision(device):
    """Autocast applies in ``train_fn``; parameters and results keep their dtype."""
    seen = set()

    def train(model, batch):
        x, y = batch
        out = nn.functional.linear(x, model.w[None])
        seen.add(out.dtype)
        return (out.float().squeeze(1) - y).square().mean()

    class Single(Line):
        def __init__(self):
            super().__init__()
            self.float()

    data = problem(torch.float32)
    for way, ranks in (((SYNC, THREAD), 1), ((SYNC, THREAD), 2), ((CADENCE, OVER_CPU), 2)):
        handle = learn(
            [device] * ranks, way, model=Single, train=train, data=data, precision="bf16"
        )
        state = handle.join(WAIT_S)
        assert state.params["w"].dtype is torch.float32
        assert [m.num_samples for m in state.metrics] == [N] * 15
        # bf16 has 8 bits of precision.
        torch.testing.assert_close(state.params["w"].double(), TRUE_W, rtol=0, atol=0.1)
    assert seen == {torch.bfloat16}


# -- steps without synchronisation ---------------------------------------------------------------


class Read(Dataset):
    """:func:`problem` as a data set with its own code, which is streamed through slots."""

    def __init__(self, num_samples):
        times = num_samples // N
        self.columns = tuple(torch.cat([t] * times) for t in problem())

    def __len__(self):
        return len(self.columns[0])

    def get_batch(self, indices):
        x, y = self.columns
        return x[indices], y[indices]


class GuardedSteps:
    """A ``train_fn`` that forbids an operation between two steps of all ranks.

    Args:
        ranks: Number of ranks.
        forbid: Called once all ranks have reached step ``FIRST``.
        allow: Called once all ranks have reached step ``LAST``.
    """

    FIRST, LAST = 20, 60

    def __init__(self, ranks, forbid, allow):
        self._calls = {self.FIRST: forbid, self.LAST: allow}
        self._barrier = threading.Barrier(ranks)
        self._lock = threading.Lock()
        self.is_guarded = False
        self.num_steps = 0

    def __call__(self, model, batch):
        step = current_worker().local_step
        if step in self._calls and self._barrier.wait(WAIT_S) == 0:
            self._calls[step]()
            self.is_guarded = step == self.FIRST
        if step in self._calls:
            self._barrier.wait(WAIT_S)
        with self._lock:
            self.num_steps += self.is_guarded
        current_worker().record_scalar("first", batch[0][0, 0])
        return squares(model, batch)


GUARDED_WAYS = [
    ((SYNC, THREAD), 1),
    ((CADENCE, OVER_CPU), 1),
    ((CADENCE, OVER_CPU), 2),
    ((ASYNC, OVER_CPU), 2),
    ((SYNC, THREAD), 2),
]
GUARDED_SAMPLES = 8 * N


def guarded_data(kind, device):
    """Data and settings for one data path: read, inline, gathered, resident, or on the device."""
    if kind in ("read", "inline"):
        return Read(GUARDED_SAMPLES), {"prefetch": 0} if kind == "inline" else {}
    data = Read(GUARDED_SAMPLES).columns
    if kind == "on_device":
        return tuple(t.to(device) for t in data), {}
    return data, {"resident": kind == "resident"}


def guarded_steps(device, way, ranks, kind, forbid, allow):
    """Train steps between two rounds while batches are loaded ahead and reports are sent."""
    train = GuardedSteps(ranks, forbid, allow)
    data, settings = guarded_data(kind, device)
    if ranks > 1:  # else a rank that is slow at first may have no steps left at the last barrier
        settings = {**settings, "partition_ratios": [1 / ranks] * ranks}
    handle = learn(
        [device] * ranks,
        way,
        train=train,
        data=data,
        epochs=1,
        lr=1e-3,
        anchor=5000,  # rounds are due by time: a delayed rank must not reach one
        max_anchor=5000,
        max_grad_norm=10.0,
        **settings,
    )
    state = handle.join(WAIT_S)
    assert train.num_steps == ranks * (GuardedSteps.LAST - GuardedSteps.FIRST)
    assert not train.is_guarded
    assert state.metrics[0].num_samples == GUARDED_SAMPLES
    assert "first" in state.metrics[0].scalars


# -- data from the caller's streams -----------------------------------------------------------


def late_data(device, *, side_stream):
    """Data still being written when the run starts is read only once it is complete."""
    x = torch.zeros(N, WIDTH, dtype=torch.float64, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        stream = torch.cuda.Stream(device) if side_stream else torch.cuda.default_stream(device)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50 * LONG)
            x.fill_(1.0)
            handle = learn([device, device], (CADENCE, OVER_CPU), train=_count_zeros, data=(x,))
    else:
        x.fill_(1.0)
        handle = learn([device, device], (CADENCE, OVER_CPU), train=_count_zeros, data=(x,))
    state = handle.join(WAIT_S)
    assert [m.scalars["zeros"] for m in state.metrics] == [0.0] * 15


def _count_zeros(model, batch):
    (x,) = batch
    current_worker().record_scalar("zeros", (x == 0).double().mean())
    return (x @ model.w).square().mean()
