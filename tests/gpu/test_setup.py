"""``Trainer.setup`` on GPUs: equal to one device, ordered with the caller's streams."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn import functional as F

from runtime import AverageBackend, DdpConfig, ReplicaFailed, Trainer
from runtime.loop import loop_setup
from tests.gpu.no_sync import no_sync
from tests.gpu.placing import nccl_devices

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GPU = torch.device("cuda", 0)
DELAY_CYCLES = 20_000_000  # about 10 milliseconds
NUM_FEATURES, NUM_CLASSES = 16, 5

SHARED = ["cuda:0", "cuda:0"]
MIXED = ["cuda:0", "cpu"]
DISTINCT = pytest.param(["cuda:0", "cuda:1"], marks=pytest.mark.two_gpus, id="two-gpus")
NCCL = [
    pytest.mark.two_ranks,
    pytest.mark.skipif(
        not torch.distributed.is_nccl_available(), reason="this build of PyTorch has no NCCL"
    ),
]
OVER_NCCL = "over-nccl"
every_kind = pytest.mark.parametrize(
    "devices",
    [
        pytest.param(SHARED, id="one-gpu"),
        pytest.param(MIXED, id="gpu-and-cpu"),
        DISTINCT,
        pytest.param(OVER_NCCL, marks=NCCL, id=OVER_NCCL),
    ],
    indirect=True,
)


@pytest.fixture
def devices(request, monkeypatch):
    """The devices; those over NCCL may share a GPU, for which it is not chosen by default."""
    if request.param != OVER_NCCL:
        return request.param
    chosen = AverageBackend.NCCL, "a test"
    monkeypatch.setattr(loop_setup, "resolve_backend", lambda *args, **kwargs: chosen)
    return list(map(str, nccl_devices(2)))


class Slow(nn.Module):
    """Delays its stream before the forward pass and before its gradients are complete."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(NUM_FEATURES, 32), nn.Tanh(), nn.Linear(32, NUM_CLASSES)
        ).double()

    def forward(self, x):
        delayed(x)
        out = self.net(x)
        if out.requires_grad:
            out.register_hook(delayed)
        return out


def delayed(tensor):
    if tensor.is_cuda:
        torch.cuda._sleep(DELAY_CYCLES)


def adamw(params):
    return torch.optim.AdamW(params, 1e-2)


def make_batch(size, device=GPU):
    return (
        torch.randn(size, NUM_FEATURES, dtype=torch.float64, device=device),
        torch.randint(NUM_CLASSES, (size,), device=device),
    )


class OneDevice:
    def __init__(self, model):
        self.model = copy.deepcopy(model).to(GPU)
        self.optimizer = adamw(self.model.parameters())

    def __call__(self, x):
        return self.model(x)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def assert_close(model, expected):
    for a, e in zip(model.parameters(), expected.parameters(), strict=True):
        assert (a - e).norm() / e.norm() < 1e-8


def assert_alike(model, tolerance):
    """Bitwise on devices of one type."""
    first, *others = model.replicas
    for other in others:
        for a, b in zip(first.parameters(), other.parameters(), strict=True):
            assert torch.allclose(a.cpu(), b.cpu(), rtol=tolerance, atol=tolerance)


@every_kind
@pytest.mark.parametrize("own_stream", [False, True])
def test_steps_equal_one_device_with_delays_in_every_stream(devices, own_stream):
    net = Slow()
    alone = OneDevice(net)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    stream.wait_stream(torch.cuda.default_stream())
    config = DdpConfig(speed_hint=(1, 2.0))
    made = Trainer.setup_with(net, adamw, devices, config=config)
    with made as model, torch.cuda.stream(stream):
        for _ in range(8):
            delayed(torch.empty(0, device=GPU))
            x, y = make_batch(13)
            kept = x.clone()
            F.cross_entropy(model(x), y).backward()
            x.zero_()  # ordered after the replicas' last read
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            model.step()
            F.cross_entropy(alone(kept), y).backward()
            nn.utils.clip_grad_norm_(alone.model.parameters(), 0.5)
            alone.step()
        assert_close(model, alone.model)
        assert_alike(model, 1e-12 if "cpu" in devices else 0.0)


@every_kind
def test_rounds_equal_one_device(devices):
    net = Slow()
    alone = OneDevice(net)

    def loss_fn(module, batch):
        x, y = batch
        return F.cross_entropy(module(x), y)

    config = DdpConfig(max_anchor=2)
    with Trainer.setup_with(net, adamw, devices, config=config) as model:
        for _ in range(4):
            batches = [make_batch(5, "cpu") for _ in range(sum(model.batch_counts))]
            model.accumulate(loss_fn, batches)
            model.step()
            losses = [F.cross_entropy(alone(x.to(GPU)), y.to(GPU)) for x, y in batches]
            torch.stack(losses).mean().backward()
            alone.step()
        assert_close(model, alone.model)


@every_kind
def test_gradients_reach_inputs_on_another_device(devices):
    net = Slow()
    x = torch.randn(7, NUM_FEATURES, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(copy.deepcopy(net)(x).square().sum(), x)[0]
    with Trainer.setup(net, adamw, devices) as model:
        out = model(x)
        assert out.device == GPU
        out.square().sum().backward()
    assert x.grad.device.type == "cpu"
    assert torch.allclose(x.grad, expected, rtol=1e-9)


@every_kind
def test_batch_norm_statistics_are_those_of_the_first_device(devices):
    net = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8)).double()
    with Trainer.setup(net, adamw, devices) as model:
        for _ in range(3):
            model(make_batch(12)[0]).square().mean().backward()
            model.step()
            for name, buffer in model.named_buffers():
                for replica in model.replicas:
                    assert torch.equal(replica.get_buffer(name).cpu(), buffer.cpu())


def test_a_step_on_one_gpu_never_synchronises():
    x, y = make_batch(32)
    model = Trainer.setup(Slow(), adamw, ["cuda:0"])
    F.cross_entropy(model(x), y).backward()
    model.step()
    with no_sync():
        F.cross_entropy(model(x), y).backward()
        model.step()


@pytest.mark.parametrize("devices", [pytest.param(OVER_NCCL, marks=NCCL)], indirect=True)
def test_a_step_over_nccl_never_synchronises(devices):
    x, y = make_batch(32)
    with Trainer.setup(Slow(), adamw, devices) as model:
        for _ in range(3):
            F.cross_entropy(model(x), y).backward()
            model.step()
        with no_sync():
            F.cross_entropy(model(x), y).backward()
            model.step()


def test_autocast_applies_in_the_replicas():
    with Trainer.setup(Slow().float(), adamw, SHARED) as model:
        with torch.autocast("cuda", torch.bfloat16):
            out = model(make_batch(6)[0].float())
        assert out.dtype is torch.bfloat16
        out.float().sum().backward()
        model.step()


def test_a_failure_leaves_the_module_usable():
    class Failing(Slow):
        bad = False

        def forward(self, x):
            if self.bad and threading.current_thread().name.endswith("-1"):
                raise ZeroDivisionError
            return super().forward(x)

    x, y = make_batch(8)
    with Trainer.setup(Failing(), adamw, SHARED) as model:
        model.bad = True
        with pytest.raises(ReplicaFailed, match="rank 1 on cuda:0"):
            model(x)
        model.bad = False
        F.cross_entropy(model(x), y).backward()
        model.step()
        assert_alike(model, 0.0)


def test_close_frees_memory():
    size = 8192
    before = torch.cuda.memory_allocated()
    with Trainer.setup(nn.Linear(size, size), adamw, SHARED) as model:
        for _ in range(3):
            model(torch.randn(8, size, device=GPU)).sum().backward()
            model.step()
        used = torch.cuda.memory_allocated() - before
    del model
    gc.collect()
    left = torch.cuda.memory_allocated() - before
    assert used > 3 * 4 * size**2  # weights and two moments, which ranks of one device share
    assert left < 4 * size**2  # the libraries' workspaces remain


@every_kind
def test_the_first_model_may_be_trained_on_the_callers_stream(devices):
    """PyTorch warns about gradient accumulators of another stream; warnings are errors here."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else only once per process
    try:
        with Trainer.setup(Slow(), adamw, devices) as model:
            for _ in range(3):
                x, y = make_batch(8)
                F.cross_entropy(model.module(x), y).backward()
                model.step()
                F.cross_entropy(model(x), y).backward()
                model.step()
    finally:
        torch.set_warn_always(before)
