"""Ddp and DataParallelCoordinator on GPUs: equal to the CPU, ordered with the caller's streams."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn import functional as F

from runtime import AverageBackend, DataParallelCoordinator, Ddp, NonFiniteError, ReplicaFailed
from tests.gpu.placing import nccl_devices

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_STEPS = 20
DELAY_CYCLES = 5_000_000  # a few milliseconds
SHARED, MIXED = ["cuda:0", "cuda:0"], ["cuda:0", "cpu"]
needs_nccl = pytest.mark.skipif(
    not torch.distributed.is_nccl_available(), reason="this build of PyTorch has no NCCL"
)
over_nccl = [pytest.mark.two_gpus, needs_nccl]
AUTO, NCCL = AverageBackend.AUTO, AverageBackend.NCCL
each_placement = pytest.mark.parametrize(
    ("devices", "backend"),
    [
        pytest.param(SHARED, AUTO, id="shared"),
        pytest.param(MIXED, AUTO, id="mixed"),
        pytest.param(["cpu", "cuda:0"], AUTO, id="cpu-first"),
        pytest.param(["cuda:0", "cuda:1"], AUTO, marks=over_nccl, id="distinct"),
        pytest.param(
            [str(device) for device in nccl_devices(2) or SHARED],
            NCCL,
            marks=[pytest.mark.two_ranks, needs_nccl],
            id="over-nccl",
        ),
    ],
)


def model_on(device, dtype=torch.float64):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(36, 5)
        )
    return model.to(device, dtype)


def optimizer_of(params):
    return torch.optim.AdamW(params, 1e-2)


def loss_fn(model, samples):
    x, y = samples
    logits = model(x)
    return F.cross_entropy(logits, y), (logits.argmax(1) == y).sum()


def samples_of(count, seed, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, 5, 5, generator=generator, dtype=torch.float64)
    return x.to(device), torch.randint(5, (count,), generator=generator).to(device)


def assert_close(actual, expected, tolerance=1e-8):
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name].cpu(), tensor.cpu(), rtol=tolerance, atol=tolerance, msg=name
        )


# -- Ddp.wrap ---------------------------------------------------------------------------------


def train_wrapped(devices, counts, backend=AverageBackend.AUTO, *, delay=False):
    """Train replicas in a loop; ``delay`` adds a delay kernel to every backward pass."""
    models = [model_on(device) for device in devices]
    with torch.no_grad():
        models[1][0].weight.add_(1)
    optimizers = [optimizer_of(model.parameters()) for model in models]
    with Ddp.wrap(models, devices, backend) as ddp:
        ddp.sync_params()
        for step in range(NUM_STEPS):
            for rank, model in enumerate(models):
                optimizers[rank].zero_grad()
                if delay and devices[rank] != "cpu":
                    with torch.cuda.device(devices[rank]):
                        torch.cuda._sleep(DELAY_CYCLES)
                samples = samples_of(counts[rank], 10 * step + rank, devices[rank])
                loss_fn(model, samples)[0].backward()
            ddp.weighted_all_reduce_gradients(counts)
            grads = [[p.grad.cpu() for p in model.parameters()] for model in models]
            assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
            ddp.sync_buffers()
            for optimizer in optimizers:
                optimizer.step()
        return [model.state_dict() for model in models]


@each_placement
@pytest.mark.parametrize("delay", [False, True])
def test_wrapped_replicas_equal_those_on_the_cpu(devices, backend, delay):
    counts = [5, 9]
    expected, _ = train_wrapped(["cpu", "cpu"], counts)
    for actual in train_wrapped(devices, counts, backend, delay=delay):
        assert_close(actual, expected)


@pytest.mark.parametrize("devices", [pytest.param(["cuda:0", "cuda:1"], marks=over_nccl)])
def test_auto_selects_nccl_on_distinct_gpus_and_nccl_equals_host_staging(devices):
    models = [model_on(device) for device in devices]
    with Ddp.wrap(models, devices) as ddp:
        assert ddp.backend is AverageBackend.NCCL
    over_nccl_, _ = train_wrapped(devices, [4, 6], AverageBackend.NCCL)
    staged, _ = train_wrapped(devices, [4, 6], AverageBackend.THREAD)
    assert_close(over_nccl_, staged)


def test_reduction_waits_for_gradients_from_another_stream():
    models = [nn.Linear(1 << 16, 1, bias=False).to("cuda") for _ in range(2)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), Ddp.wrap(models, SHARED) as ddp:
        for step in range(50):
            for rank, model in enumerate(models):
                model.weight.grad = torch.zeros_like(model.weight)
                torch.cuda._sleep(DELAY_CYCLES)
                model.weight.grad.fill_(step + 2 * rank)
            ddp.all_reduce_gradients()
            for model in models:
                torch.cuda._sleep(DELAY_CYCLES)
                assert model.weight.grad.unique().tolist() == [step + 1.0]


def test_channels_last_gradients_keep_their_strides():
    models = [model_on("cuda").to(memory_format=torch.channels_last) for _ in range(2)]
    for rank, model in enumerate(models):
        loss_fn(model, samples_of(4, rank, "cuda"))[0].backward()
    wanted = models[0][0].weight.grad.stride()
    with Ddp.wrap(models, SHARED) as ddp:
        ddp.all_reduce_gradients()
    assert [model[0].weight.grad.stride() for model in models] == [wanted] * 2


def test_a_model_on_a_device_that_was_not_named_is_refused():
    with pytest.raises(ValueError, match="of model 1 is on cpu, not on cuda:0"):
        Ddp.wrap([model_on("cuda"), model_on("cpu")], SHARED)


# -- DataParallelCoordinator --------------------------------------------------------------------


def without_norm(device, dtype=torch.float64):
    model = model_on(device, dtype)
    del model[1]
    return model


@each_placement
@pytest.mark.parametrize("samples_on", ["cpu", "cuda:0"])
def test_batches_on_replicas_equal_those_on_one_cpu(devices, backend, samples_on):
    model = without_norm("cpu")
    alone = optimizer_of(model.parameters())
    with DataParallelCoordinator(
        without_norm, optimizer_of, loss_fn, devices, backend=backend
    ) as coordinator:
        for step in range(NUM_STEPS):
            count = (12, 7, 1)[step % 3]
            alone.zero_grad()
            loss, correct = loss_fn(model, samples_of(count, step))
            loss.backward()
            alone.step()
            result = coordinator.train_batch(samples_of(count, step, samples_on))
            assert result.avg_loss == pytest.approx(loss.item(), rel=1e-8)
            assert (result.correct, result.total) == (int(correct), count)
            states = [replica.state_dict() for replica in coordinator.models]
            assert all(torch.equal(states[0][n].cpu(), states[1][n].cpu()) for n in states[0])
        assert_close(coordinator.primary.state_dict(), model.state_dict())


@each_placement
def test_buffers_are_the_same_on_every_device(devices, backend):
    with DataParallelCoordinator(
        model_on, optimizer_of, loss_fn, devices, backend=backend
    ) as coordinator:
        for step in range(5):
            coordinator.train_batch(samples_of(8, step))
        states = [replica.state_dict() for replica in coordinator.models]
    assert all(torch.equal(states[0][name].cpu(), states[1][name].cpu()) for name in states[0])


def test_train_batch_waits_for_samples_and_weights_from_the_callers_stream():
    x, y = samples_of(64, 0, "cuda")
    with DataParallelCoordinator(without_norm, optimizer_of, loss_fn, SHARED) as coordinator:
        twin = copy.deepcopy(coordinator.primary)
        for _ in range(20):
            late = torch.zeros_like(x)
            torch.cuda._sleep(DELAY_CYCLES)
            late.copy_(x)
            expected = loss_fn(twin, (x, y))[0].item()
            torch.cuda._sleep(DELAY_CYCLES)
            late.copy_(x)
            assert coordinator.train_batch((late, y)).avg_loss == pytest.approx(expected, rel=1e-8)
            torch.cuda._sleep(DELAY_CYCLES)
            with torch.no_grad():
                for p, q in zip(coordinator.primary.parameters(), twin.parameters(), strict=True):
                    p.copy_(q)
            coordinator.sync_params()


def test_a_failed_batch_leaves_replicas_unchanged():
    plan = {}

    def planned(model, samples):
        loss, correct = loss_fn(model, samples)
        if threading.current_thread().name == "data-parallel-1" and plan:
            return plan["do"](loss), correct
        return loss, correct

    def fail(loss):
        raise LookupError("planted")

    def poison(loss):
        return loss * float("nan")

    with DataParallelCoordinator(model_on, optimizer_of, planned, SHARED) as coordinator:
        coordinator.train_batch(samples_of(8, 0))
        before = [copy.deepcopy(m.state_dict()) for m in coordinator.models]
        for do, error in (
            (lambda loss: loss * float("nan"), NonFiniteError),
            (fail, ReplicaFailed),
        ):
            plan["do"] = do
            with pytest.raises(error, match="rank 1"):
                coordinator.train_batch(samples_of(8, 1))
            after = [model.state_dict() for model in coordinator.models]
            for kept, now in zip(before, after, strict=True):
                assert all(torch.equal(kept[name], now[name]) for name in kept)
        plan.clear()
        coordinator.train_batch(samples_of(8, 2))


@each_placement
def test_close_ends_threads_and_frees_memory(devices, backend):
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(0)
    for _ in range(3):
        with DataParallelCoordinator(
            model_on, optimizer_of, loss_fn, devices, backend=backend
        ) as coordinator:
            coordinator.train_batch(samples_of(8, 0))
        del coordinator
        gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(0) <= before + (1 << 20)
    assert not [t for t in threading.enumerate() if t.name.startswith("data-parallel-")]
