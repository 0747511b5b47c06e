"""Batch normalisation over the global batch, compared with one device and PyTorch's layer."""

import copy
import io
import random
import sys
import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from coordinator.shares import Shares
from coordinator.splitting import permutation, split_like
from runtime import (
    AverageBackend,
    WorkerFailed,
    all_gather,
    create_collectives,
    current_worker,
)
from runtime.replica.batch_norm import synchronise
from runtime.replica.global_batch_comm import GlobalBatchComm
from tests.support.pairs import diagonal
from tests.support.running import CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, at_once, builder

N, EPOCHS, SIZE, SEED = 107, 2, 4, 5
GENERATOR = torch.Generator().manual_seed(0)
X = 3 + torch.randn(N, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randn(N, 2, generator=GENERATOR, dtype=torch.float64)


class Net(nn.Module):
    """Two kinds of layers, one without parameters of its own and with a plain mean over time."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.conv = nn.Conv2d(2, 3, 2)
        self.plain = nn.BatchNorm2d(3, affine=False, momentum=None)
        self.two = nn.Linear(3, 2)

    def forward(self, x):
        x = torch.tanh(self.norm(self.one(x)))
        x = self.plain(self.conv(x.view(-1, 2, 2, 2)))
        return self.two(x.flatten(1))


torch.manual_seed(1)
START = Net().double()


def sgd(params):
    return torch.optim.SGD(params, 0.05, momentum=0.9)


def adamw(params):
    return torch.optim.AdamW(params, 0.01)


def mean_loss(model, batch):
    x, y = batch[:2]
    return F.mse_loss(model(x), y)


def weighted(model, batch):
    """A mean over units that differ from sample to sample."""
    x, y, index = batch
    units = (1 + index % 3).double()
    return ((model(x) - y).square().mean(1) * units).sum() / units.sum(), units.sum()


def run(train, optim=sgd, *, ranks, accumulate=1, way=(SYNC, THREAD), balance=False, **more):
    b = builder(
        model=lambda device: copy.deepcopy(START),
        optim=optim,
        train=train,
        dataset=(X, Y, torch.arange(N)),
        batch_size=SIZE,
        epochs=EPOCHS,
        ranks=ranks,
        way=way,
    )
    b.accumulate(accumulate).seed(SEED).tune_allocator(False).sync_batchnorm(True)
    if way[0] is SYNC:
        b.balance(balance)
    for name, value in more.items():
        getattr(b, name)(value)
    return b.run()


def one_device(train, optim, ranks, accumulate):
    """The same micro-batches, whole, on one model."""
    model = copy.deepcopy(START)
    optimizer = optim(model.parameters())
    for epoch in range(EPOCHS):
        order = torch.from_numpy(permutation(N, epoch, SEED))
        for window in order.split(SIZE * ranks * accumulate):
            optimizer.zero_grad()
            total = 0
            for indices in window.split(SIZE * ranks):
                found = train(model, (X[indices], Y[indices], indices))
                loss, weight = found if isinstance(found, tuple) else (found, len(indices))
                (loss * weight).backward()
                total += weight
            for p in model.parameters():
                p.grad /= total
            optimizer.step()
    return model.state_dict()


def assert_same(actual, expected, *, buffers=True):
    for name, tensor in expected.items():
        if ("running" in name or "tracked" in name) and not buffers:
            continue
        scale = tensor.double().norm().clamp_min(1e-12)
        error = ((actual[name] - tensor).double().norm() / scale).item()
        assert error < 1e-8, f"{name}: relative error {error:.1e}"
    assert (expected["one.weight"] - START.state_dict()["one.weight"]).norm() > 0.05


@diagonal(
    way=[
        (1, 2, sgd, THREAD),
        (2, 1, adamw, THREAD),
        (2, 3, sgd, AverageBackend.GLOO),
        (3, 1, sgd, THREAD),
        (4, 2, adamw, THREAD),
    ],
    train=[mean_loss, weighted],
)
def test_ranks_equal_one_device_on_the_global_batch(way, train):
    ranks, accumulate, optim, backend = way
    handle = run(train, optim, ranks=ranks, accumulate=accumulate, way=(SYNC, backend))
    state = handle.join(WAIT_S).state_dict()
    expected = one_device(train, optim, ranks, accumulate)
    assert_same(state, expected)


@pytest.mark.parametrize("on_device", [False, True])
def test_nan_gradients_of_a_piece_of_weight_0_do_not_reach_other_ranks(on_device):
    def dead(model, batch):
        loss, weight = weighted(model, batch)
        if current_worker().rank == 1 and current_worker().local_step % 3 == 1:
            loss, weight = loss * float("nan"), 0 * weight
        return loss, weight if on_device else float(weight)

    state = run(dead, ranks=3).join(WAIT_S)
    assert all(tensor.isfinite().all() for tensor in state.state_dict().values())
    assert all(metrics.avg_loss > 0 for metrics in state.metrics)


def test_a_piece_of_weight_0_takes_part_in_the_backward_pass_of_the_layers():
    """Even if its loss is left out, as that of gathered rows may be."""

    def dead(model, batch):
        loss, weight = weighted(model, batch)
        worker = current_worker()
        alive = worker.rank != 1 or worker.local_step % 3 != 1
        return (loss, float(weight)) if alive else (loss * float("nan"), 0.0)

    def gathering(model, batch):
        loss, weight = dead(model, batch)
        rows, _ = all_gather(batch[0] * model.one.bias[0])
        return loss + 0 * rows.sum(), weight

    settings = {"ranks": 3, "collective_timeout": 5.0}
    expected = run(dead, **settings).join(WAIT_S).state_dict()
    state = run(gathering, all_gather=True, **settings).join(WAIT_S).state_dict()
    assert_same(state, expected)


@pytest.mark.parametrize(("ranks", "accumulate", "least"), [(2, 1, 1), (3, 2, 1), (4, 1, 0)])
def test_randomly_changing_shares_equal_one_device(monkeypatch, ranks, accumulate, least):
    draw = random.Random(7)

    def sizes(self, total, ranks):
        if least:
            return split_like(total, [draw.randint(0, 5) + (i == 0) for i in range(len(ranks))])
        some = draw.sample(range(len(ranks)), draw.randint(1, len(ranks)))
        parts = dict(zip(some, split_like(total, [1] * len(some)), strict=True))
        return tuple(parts.get(i, 0) for i in range(len(ranks)))

    monkeypatch.setattr(Shares, "sizes", sizes)
    handle = run(mean_loss, ranks=ranks, accumulate=accumulate, balance=True)
    state = handle.join(WAIT_S).state_dict()
    assert_same(state, one_device(mean_loss, sgd, ranks, accumulate))


class Modes(nn.Module):
    """A layer without running statistics, one in eval mode, and one that is used in both modes."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 8)
        self.bare = nn.BatchNorm1d(8, track_running_stats=False)
        self.frozen = nn.BatchNorm1d(8)
        self.both = nn.BatchNorm1d(8)
        self.two = nn.Linear(8, 2)

    def forward(self, x):
        x = self.frozen.eval()(self.bare(self.one(x)))
        trained = self.both.train()(x)
        return self.two(trained + self.both.eval()(x) + self.bare.eval()(x))


@pytest.mark.parametrize("ranks", [2, 3])
def test_layers_in_eval_mode_and_without_running_statistics_equal_one_device(monkeypatch, ranks):
    torch.manual_seed(1)
    monkeypatch.setattr(sys.modules[__name__], "START", Modes().double())
    state = run(mean_loss, ranks=ranks).join(WAIT_S).state_dict()
    assert_same(state, one_device(mean_loss, sgd, ranks, 1))


def taught(model, batch):
    """The model in eval mode teaches itself; its graph has saved the running statistics."""
    x, y = batch[:2]
    target = model.eval()(x)
    return F.mse_loss(model.train()(x) + 0.1 * target, y)


def taught_in_between(model, batch):
    x, y = batch[:2]
    first = model(x)
    target = model.eval()(x)
    return F.mse_loss(first + model.train()(2 * x) + 0.1 * target, y)


def recomputed(model, batch):
    x, y = batch[:2]
    return F.mse_loss(checkpoint(model, x, use_reentrant=False) + model(2 * x), y)


def functional(model, batch):
    x, y = batch[:2]
    state = dict(model.named_parameters())
    target = functional_call(model.eval(), state, (x,))
    state |= dict(model.named_buffers())
    return F.mse_loss(functional_call(model.train(), state, (x,)) + 0.1 * target, y)


@diagonal(train=[taught, taught_in_between, recomputed, functional], ranks=[2, 3])
def test_several_passes_before_the_backward_pass_equal_one_device(train, ranks):
    """Their running statistics are updated without a change that autograd counts."""
    state = run(train, ranks=ranks).join(WAIT_S).state_dict()
    assert_same(state, one_device(train, sgd, ranks, 1))


def test_a_training_forward_outside_of_a_step_uses_the_ranks_own_statistics():
    seen = {}

    def epoch_fn(epoch, worker):
        if worker.rank == 1:  # no other rank joins it
            worker.model.train()
            seen[epoch] = worker.model(X[:8]).detach()

    run(mean_loss, ranks=2, epoch_fn=epoch_fn).join(WAIT_S)
    assert all(output.isfinite().all() for output in seen.values())
    assert len(seen) == EPOCHS


def test_gradients_of_gradients_are_refused_by_name():
    def penalised(model, batch):
        x = batch[0].clone().requires_grad_()
        loss = F.mse_loss(model(x), batch[1])
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()

    with pytest.raises(WorkerFailed, match=r"sync_batchnorm\(True\): gradients of gradients"):
        run(penalised, ranks=2).join(WAIT_S)


def test_the_other_ranks_continue_after_a_death_in_the_forward_pass():
    """They wait for the dead rank within their forward passes."""
    calls = threading.Lock()
    count = 0

    def dies(model, batch):
        nonlocal count
        if current_worker().rank == 1:
            with calls:
                count += 1
            if count == 6:
                raise RuntimeError("planted")
        return mean_loss(model, batch)

    state = run(dies, ranks=3, on_worker_failure="continue").join(WAIT_S)
    assert [metrics.num_samples for metrics in state.metrics] == [N] * EPOCHS
    # The statistics of each step are those of its whole global batch, as before.
    assert_same(state.state_dict(), one_device(mean_loss, sgd, 3, 1), buffers=False)


def test_a_failure_ends_a_run_whose_ranks_wait_in_their_forward_pass():
    def dies(model, batch):
        if current_worker().rank == 1 and current_worker().local_step == 3:
            raise ValueError("planted")
        return mean_loss(model, batch)

    with pytest.raises(WorkerFailed, match="worker 1") as failed:
        run(dies, ranks=3).join(WAIT_S)
    assert isinstance(failed.value.__cause__, ValueError)


def test_without_sync_batchnorm_the_pieces_have_their_own_statistics():
    b = run(mean_loss, ranks=2, sync_batchnorm=False)
    state = b.join(WAIT_S).state_dict()
    expected = one_device(mean_loss, sgd, 2, 1)
    assert not torch.allclose(state["one.weight"], expected["one.weight"], rtol=1e-4)


def test_keys_copies_files_and_evaluation_are_those_of_the_plain_layers():
    seen = {}

    def evaluate(model, epoch):
        seen["keys"] = list(model.state_dict())
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        x = X[:10]
        seen["same"] = torch.equal(model(x), loaded(x))
        loaded.train()
        seen["alone"] = loaded(x).isfinite().all().item()
        return {"loss": F.mse_loss(model(x), Y[:10]).item()}

    def copies(model, batch):
        copy.deepcopy(model)
        return mean_loss(model, batch)

    state = run(copies, ranks=2, eval_fn=evaluate).join(WAIT_S)
    assert seen["keys"] == list(START.state_dict())
    assert seen["same"]
    assert seen["alone"]
    assert not torch.isnan(torch.tensor(state.metrics[-1].scalars["eval/loss"]))
    copy.deepcopy(START).load_state_dict(state.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_synchronised_layer_equals_the_plain_layer_on_all_samples(dtype):
    """Values, gradients, running statistics; pieces of unequal size around a large mean."""
    torch.manual_seed(3)
    sizes, tolerance = (1, 5, 2), 2e-2 if dtype is torch.bfloat16 else 1e-4
    tolerance = 1e-9 if dtype is torch.float64 else tolerance
    x = (100 * (dtype is not torch.bfloat16) + torch.randn(8, 4, 3, dtype=torch.float64)).to(dtype)
    dy = torch.randn(8, 4, 3, dtype=torch.float64).to(dtype)
    plain = nn.BatchNorm1d(4).to(torch.float64)
    whole = x.detach().double().clone().requires_grad_()
    y = plain(whole)
    y.backward(dy.double())
    ends = create_collectives(len(sizes))
    found = [None] * len(sizes)

    def rank(i, piece, grad):
        layer = nn.BatchNorm1d(4).to(torch.float64 if dtype is torch.float64 else torch.float32)
        statistics = GlobalBatchComm(ends[i])
        assert synchronise(layer, statistics) == 1
        statistics.begin(1)
        statistics.next_batch()
        piece = piece.clone().requires_grad_()
        out = layer(piece)
        out.backward(grad)
        found[i] = (out, piece.grad, layer)

    pieces = zip(x.split(sizes), dy.split(sizes), strict=True)
    at_once(lambda args: rank(*args), [(i, *p) for i, p in enumerate(pieces)])
    out, grads, layers = zip(*found, strict=True)

    def error(a, b):
        return ((a.double() - b).norm() / b.norm().clamp(min=1e-9)).item()

    assert out[0].dtype == dtype
    assert error(torch.cat(out), y) < tolerance
    assert error(torch.cat(grads), whole.grad) < tolerance
    assert error(sum(layer.weight.grad for layer in layers), plain.weight.grad) < tolerance
    assert error(sum(layer.bias.grad for layer in layers), plain.bias.grad) < tolerance
    for name, value in plain.state_dict().items():
        assert error(layers[1].state_dict()[name], value.double()) < tolerance, name
        assert torch.equal(layers[0].state_dict()[name], layers[2].state_dict()[name])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda b: b.policy(CADENCE).backend(OVER_CPU), "is for SYNC"),
        (lambda b: b.cuda_graphs(True), "cuda_graphs"),
    ],
)
def test_settings_that_exclude_sync_batchnorm_are_refused(change, match):
    b = builder(way=(SYNC, THREAD)).sync_batchnorm(True)
    change(b)
    with pytest.raises(ValueError, match=match):
        b.run()


def test_a_global_batch_of_one_value_is_refused_as_by_the_plain_layer():
    """It has no variance; the running one would become NaN."""
    data = (X[:9], Y[:9], torch.arange(9))
    with pytest.raises(WorkerFailed, match="worker 0") as failed:
        run(mean_loss, ranks=2, dataset=data).join(WAIT_S)
    assert "drop_last(True)" in str(failed.value.__cause__)
    state = run(mean_loss, ranks=2, dataset=data, drop_last=True).join(WAIT_S)
    assert all(tensor.isfinite().all() for tensor in state.state_dict().values())


def test_a_layer_with_a_forward_of_its_own_is_refused():
    class Own(nn.BatchNorm1d):
        def forward(self, input):
            return 2 * super().forward(input)

    b = builder(model=lambda d: nn.Sequential(nn.Linear(1, 2), Own(2)), way=(SYNC, THREAD))
    with pytest.raises(WorkerFailed) as failed:  # of any rank
        b.sync_batchnorm(True).run().join(WAIT_S)
    assert "1 is a Own" in str(failed.value.__cause__)
