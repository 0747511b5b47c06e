"""FSDP on GPUs: NCCL on distinct GPUs, thread collectives with several ranks on one GPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed
from torch import nn

from runtime import FSDP, ShardingStrategy
from tests.gpu.placing import nccl_devices, on_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LONG_CYCLES = 400_000_000  # about 0.2 seconds
NUM_STEPS = 5

FULL, GRAD_OP, NONE, HYBRID = ShardingStrategy

needs_nccl = pytest.mark.skipif(
    not torch.distributed.is_nccl_available(), reason="this build of PyTorch has no NCCL"
)
two_gpus = pytest.mark.two_gpus

each_group = pytest.mark.parametrize(
    ("kind", "devices"),
    [
        pytest.param("nccl", ["cuda:0"], marks=needs_nccl, id="nccl-1"),
        pytest.param("thread", ["cuda:0"], id="thread-1"),
        pytest.param("thread", ["cuda:0", "cuda:0"], id="thread-2-on-1"),
        pytest.param("thread", ["cuda:0", "cpu"], id="thread-gpu-and-cpu"),
        pytest.param("thread", ["cuda:0", "cuda:1"], marks=two_gpus, id="thread-2"),
        pytest.param(
            "nccl",
            nccl_devices(2),
            marks=[needs_nccl, pytest.mark.two_ranks],
            id="nccl-2",
        ),
    ],
)
each_strategy = pytest.mark.parametrize("strategy", ShardingStrategy, ids=lambda s: s.name)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(31, 33), nn.LayerNorm(33), nn.Linear(33, 47), nn.GELU(), nn.Linear(47, 31)
    ).double()


def batch_of(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(31, (2, 16), generator=generator)


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens[0]), tokens[1])


def wrap(end, device, strategy, model):
    size = 1 if strategy is HYBRID else None
    return FSDP(model.to(device), end, strategy, size)


def train(end, device, strategy, model, *, prefetches=False):
    fsdp = wrap(end, device, strategy, model)
    optimizer = torch.optim.AdamW(fsdp.parameters(), lr=0.01, fused=device.type == "cuda")
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        if prefetches and step:
            fsdp.prefetch_forward_params()
        loss_of(fsdp, batch_of(step, end.rank).to(device)).backward()
        fsdp.sync_gradients()
        fsdp.clip_grad_norm_(0.5)
        optimizer.step()
        fsdp.broadcast_updated_params()
    state = fsdp.full_state_dict()
    fsdp.close()
    return state


def train_on_the_cpu(num_ranks):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        losses = [loss_of(model, batch_of(step, rank)) for rank in range(num_ranks)]
        torch.stack(losses).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict()


def assert_close(actual, expected):
    for name, tensor in expected.items():
        error = (actual[name] - tensor).norm() / tensor.norm()
        assert error < 1e-8, f"{name}: {error:.1e}"


@each_group
@each_strategy
def test_training_equals_the_cpu(kind, devices, strategy):
    models = [make_model() for _ in devices]
    states = on_ranks(kind, devices, lambda e, d: train(e, d, strategy, models[e.rank]))
    expected = train_on_the_cpu(len(devices))
    for state in states:
        assert_close(state, expected)


@each_group
@pytest.mark.parametrize("strategy", [FULL, HYBRID], ids=lambda s: s.name)
def test_training_with_prefetches_equals_the_cpu(kind, devices, strategy):
    models = [make_model() for _ in devices]
    states = on_ranks(
        kind, devices, lambda e, d: train(e, d, strategy, models[e.rank], prefetches=True)
    )
    expected = train_on_the_cpu(len(devices))
    for state in states:
        assert_close(state, expected)


@each_group
def test_a_prefetch_waits_for_a_step_that_is_still_queued(kind, devices):
    def work(end, device):
        module = nn.Linear(300, 400, bias=False).to(device)
        fsdp = FSDP(module, end)
        (shard,) = fsdp.parameters()
        x = torch.ones(1, 300, device=device)
        for value in (1.0, 2.0, 3.0):
            if device.type == "cuda":
                torch.cuda._sleep(LONG_CYCLES)
            with torch.no_grad():
                shard.data.fill_(value)  # does not bump the version counter, as fused optimizers
                fsdp.prefetch_forward_params()
                output = fsdp(x)
            assert output.unique().tolist() == [300 * value]
        fsdp.close()

    on_ranks(kind, devices, work)


@each_group
def test_gradient_reduction_waits_for_a_backward_that_is_still_queued(kind, devices):
    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1000))

        def forward(self, x):
            return (self.weight * x).sum()

    def work(end, device):
        fsdp = FSDP(Slow().to(device), end)
        for step in range(3):
            fsdp.zero_grad()
            loss = fsdp(torch.full((1000,), 1.0 + end.rank, device=device))
            if device.type == "cuda":
                torch.cuda._sleep(LONG_CYCLES)
            loss.backward()
            fsdp.sync_gradients()
            (shard,) = fsdp.parameters()
            assert shard.grad.unique().tolist() == [(1 + end.world_size) / 2], step

    on_ranks(kind, devices, work)


@pytest.mark.parametrize("kind", [pytest.param("nccl", marks=needs_nccl), "thread"])
def test_full_parameters_are_freed_after_a_step_and_an_evaluation(kind):
    def work(end, device):
        x = torch.ones(1, 8192, device=device)
        nn.Linear(8192, 2, device=device)(x).sum().backward()  # allocates the libraries' workspaces
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        fsdp = FSDP(nn.Linear(8192, 8192, bias=False).to(device), end)
        unit = 4 * 8192 * 8192
        readings = []

        def read():
            readings.append((torch.cuda.memory_allocated(device) - before) / unit)

        read()
        with torch.no_grad():
            fsdp(x)
        read()
        output = fsdp(x).sum()
        read()
        output.backward()
        del output
        fsdp.sync_gradients()
        fsdp.zero_grad()
        read()
        return readings

    (readings,) = on_ranks(kind, ["cuda:0"], work)
    assert readings == pytest.approx([1.0, 1.0, 2.0, 1.0], abs=0.2)


@pytest.mark.parametrize("kind", [pytest.param("nccl", marks=needs_nccl), "thread"])
def test_bfloat16_and_autocast_train(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
    low = copy.deepcopy(model).bfloat16()

    def work(end, device):
        x = torch.randn(64, 32, device=device)
        for fsdp, cast in (
            (FSDP(model.to(device), end), True),
            (FSDP(low.to(device), end), False),
        ):
            optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.05)
            losses = []
            for _ in range(20):
                optimizer.zero_grad()
                with torch.autocast("cuda", torch.bfloat16, enabled=cast):
                    inputs = x if cast else x.bfloat16()
                    loss = (fsdp(inputs).float().squeeze(1) - x.sum(1)).square().mean()
                loss.backward()
                fsdp.sync_gradients()
                optimizer.step()
                losses.append(loss.item())
            assert losses[-1] < losses[0]

    on_ranks(kind, ["cuda:0"], work)


@needs_nccl
@pytest.mark.two_ranks
@pytest.mark.parametrize("strategy", [FULL, HYBRID], ids=lambda s: s.name)
def test_a_ranks_death_aborts_the_survivors_prefetch(strategy):
    models = [make_model() for _ in range(2)]

    def work(end, device):
        fsdp = wrap(end, device, strategy, models[end.rank])
        fsdp.prefetch_forward_params()
        with torch.no_grad():
            fsdp(batch_of(0, 0)[0].to(device))
        if end.rank == 1:
            end.abort()
            return None
        try:
            for _ in range(3):
                fsdp.prefetch_forward_params()
                with torch.no_grad():
                    fsdp(batch_of(0, 0)[0].to(device))
                fsdp.full_state_dict()
        except RuntimeError as error:
            return type(error).__name__

    assert on_ranks("nccl", nccl_devices(2), work)[0] == "CollectiveAborted"
