"""Buffers that get their size in the first forward pass, as observers of quantization do."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import runtime
from runtime import DataParallelCoordinator, ReplicaFailed, Trainer, WorkerFailed
from tests.support.own_loop import OneDevice, on_cpus
from tests.support.running import CADENCE, GLOO, OVER_CPU, SYNC, THREAD, WAIT_S

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :1].sin()
PLAIN = TensorDataset(X, Y)
WAYS = [(SYNC, THREAD), (CADENCE, OVER_CPU), (CADENCE, THREAD), (CADENCE, GLOO)]


class Tracked(nn.Module):
    """Tracks the mean of its inputs, in a buffer that is sized in the first pass unless ``width``
    is given, beside a counter in a buffer, one in its extra state, and draws.
    """

    def __init__(self, width=0, *, in_place=True):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.num_passes = 0

    def get_extra_state(self):
        return {"num_passes": self.num_passes}

    def set_extra_state(self, state):
        self.num_passes = state["num_passes"]

    def forward(self, x):
        if self.mean.numel() == 0:
            if self.in_place:
                self.mean.resize_(6).zero_()
            else:
                self.mean = torch.zeros(6)
        if self.training:
            self.mean.lerp_(torch.ones(6), 0.1)
            self.passes += 1
            self.num_passes += 1
        return self.head(x - self.mean)


def mse(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def sgd(params):
    return torch.optim.SGD(params, 0.1)


def configured(builder, way=(SYNC, THREAD), ranks=2, data=PLAIN):
    builder.dataset(data).batch_size(8).num_epochs(2).devices(["cpu"] * ranks)
    return builder.policy(way[0]).backend(way[1]).seed(0).progress(False)


def by_builder(net, **kwargs):
    return configured(Trainer.builder(net, sgd, mse), **kwargs).run().join(WAIT_S)


def by_loop(net, **kwargs):
    def loop(worker):
        for batch in worker.batches():
            worker.step(mse(worker.model, batch))

    optim = lambda model: sgd(model.parameters())  # noqa: E731
    return configured(Trainer.loop(net, optim, loop), **kwargs).run().join(WAIT_S)


def by_fit(net, way=(SYNC, THREAD), ranks=2, data=PLAIN):
    state = runtime.fit(
        net,
        data,
        optimizer=sgd,
        loss=nn.functional.mse_loss,
        epochs=2,
        batch_size=8,
        devices=["cpu"] * ranks,
        policy=way[0],
        backend=way[1],
        seed=0,
        progress=False,
    )
    assert all(torch.equal(net.state_dict()[k], v) for k, v in state.params.items())
    return state


DOORS = {"builder": by_builder, "loop": by_loop, "fit": by_fit}


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("door", DOORS)
def test_training_equals_that_of_a_model_with_sizes(door, ranks, in_place):
    wanted = DOORS[door](Tracked(6), ranks=ranks)
    found = DOORS[door](Tracked(in_place=in_place), ranks=ranks)
    assert found.buffers["passes"] == wanted.buffers["passes"] > 0
    for (name, value), theirs in zip(
        found.state_dict().items(), wanted.state_dict().values(), strict=True
    ):
        assert value == theirs if name.endswith("_extra_state") else torch.equal(value, theirs)


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
@pytest.mark.parametrize("door", DOORS)
def test_averaged_replicas_have_the_sized_buffers(door, way):
    state = DOORS[door](Tracked(), way=way)
    assert state.buffers["mean"].shape == (6,)
    assert 0.4 < state.buffers["mean"].min() <= state.buffers["mean"].max() < 1


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_rank_without_a_batch_takes_part_in_averages(way):
    builder = Trainer.builder(Tracked(), sgd, mse)
    one_batch = TensorDataset(X[:8], Y[:8])
    state = configured(builder, way=way, data=one_batch).num_epochs(1).run().join(WAIT_S)
    assert state.buffers["passes"] == 1
    torch.testing.assert_close(state.buffers["mean"], torch.full((6,), 0.1))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def test_a_stream_is_trained_from_its_first_item():
    wanted = by_builder(Tracked(6), data=Stream())
    found = by_builder(Tracked(), data=Stream())
    assert found.metrics[0].num_samples == len(X)
    for name, value in wanted.params.items():
        assert torch.equal(found.params[name], value)


def test_random_numbers_of_the_process_are_those_of_a_model_with_sizes():
    def train_fn(model, batch):
        return mse(model, batch) * (1 + random.random() + np.random.rand())

    def drawn(width):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        configured(Trainer.builder(Tracked(width), sgd, train_fn), ranks=1).run().join(WAIT_S)
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert drawn(0) == drawn(6)


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
def test_a_resumed_run_continues_with_the_sized_buffers(way, tmp_path):
    def trained(epochs, path, ranks=1):
        built = configured(Trainer.builder(lambda d: Tracked(), sgd, mse), way=way, ranks=ranks)
        built.num_epochs(epochs).checkpoint_dir(path)
        return (built.resume(path) if path.exists() else built).run().join(WAIT_S)

    wanted = trained(2, tmp_path / "whole")
    trained(1, tmp_path / "parts")
    found = trained(2, tmp_path / "parts")
    assert torch.equal(found.buffers["mean"], wanted.buffers["mean"])
    for name, value in wanted.params.items():
        assert torch.equal(found.params[name], value)
    assert trained(3, tmp_path / "parts", ranks=2).buffers["mean"].shape == (6,)


def test_the_trained_state_is_loaded_into_modules_without_sizes():
    net = Tracked()
    state = by_builder(net)
    for module in (net, state.model(), state.load_into(Tracked())):
        assert torch.equal(module.mean, state.buffers["mean"])
        assert torch.equal(module.head[0].weight, state.params["head.0.weight"])


def test_an_error_of_the_first_step_is_that_of_the_step():
    def train_fn(model, batch):
        model(batch[0])
        raise KeyError("label")

    with pytest.raises(WorkerFailed, match=r"worker . failed in epoch 0 at step 0: KeyError"):
        configured(Trainer.builder(lambda d: Tracked(), sgd, train_fn)).run().join(WAIT_S)


def test_a_buffer_that_changes_its_shape_again_is_refused_with_the_remedy():
    class Growing(Tracked):
        def forward(self, x):
            if self.training:
                self.mean = torch.cat([self.mean.flatten(), x.detach().mean()[None]])
            return self.head(x)

    with pytest.raises(WorkerFailed, match=r"buffer 'mean' changed its shape.*one forward pass"):
        by_builder(Growing())


@pytest.mark.parametrize("in_place", [True, False])
def test_own_loops_train_as_one_device(in_place):
    net = Tracked(in_place=in_place)
    net.head[1].p = 0.0
    alone = OneDevice(net)
    with on_cpus(net) as model:
        for start in range(0, 48, 8):
            batch = X[start : start + 8], Y[start : start + 8]
            for each in (model, alone):
                mse(each, batch).backward()
                each.step()
        assert all(torch.equal(replica.mean, net.mean) for replica in model.replicas)
    for name, value in alone.model.state_dict().items():
        if name != "_extra_state":
            torch.testing.assert_close(net.state_dict()[name], value, msg=name)


def test_a_batch_without_a_step_leaves_buffers_without_a_size():
    def fail(model, samples):
        mse(model, samples)
        raise KeyError("label")

    with DataParallelCoordinator(lambda d: Tracked(), sgd, fail, ["cpu"] * 2) as coordinator:
        with pytest.raises(ReplicaFailed, match="label"):
            coordinator.train_batch((X[:8], Y[:8]))
        with pytest.raises(ReplicaFailed, match="label"):
            coordinator.train_batch((X[:8], Y[:8]))
        assert coordinator.primary.mean.shape == (0,)
        coordinator._loss_fn = mse
        coordinator.train_batch((X[:8], Y[:8]))
        torch.testing.assert_close(coordinator.primary.mean, torch.full((6,), 0.1))


# Quantization-aware training of torch.ao

QUANTIZED = pytest.mark.filterwarnings("ignore")  # torch.ao warns of its own deprecation


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = quantization.QuantStub(), quantization.DeQuantStub()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.out(self.layers(self.into(x)))


def quantized():
    torch.manual_seed(0)
    net = Quantized().train()
    net.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(net)


def plain(net):
    optimizer = sgd(net.parameters())
    for _ in range(2):
        for batch in DataLoader(PLAIN, batch_size=8):
            optimizer.zero_grad()
            mse(net, batch).backward()
            optimizer.step()
    return net.state_dict()


def in_order(data):
    return DataLoader(data, batch_size=8)


@QUANTIZED
@pytest.mark.parametrize("door", DOORS)
def test_quantization_aware_training_equals_a_plain_loop(door):
    net = quantized()
    wanted = plain(copy.deepcopy(net))
    found = DOORS[door](net, ranks=1, data=in_order(PLAIN)).state_dict()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=name)


@QUANTIZED
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_quantization_aware_training_on_two_workers_can_be_converted(way):
    net = quantized()
    by_builder(net, way=way)
    assert net.layers[0].weight_fake_quant.scale.shape == (16,)
    assert quantization.convert(net.eval())(X).shape == (48, 1)


@QUANTIZED
def test_own_loops_train_quantization_aware():
    net = quantized()
    with on_cpus(net, optim=sgd) as model:
        first = mse(model, (X, Y)).item()
        for batch in DataLoader(PLAIN, batch_size=8):
            mse(model, batch).backward()
            model.step()
        assert mse(model, (X, Y)).item() < first
    assert quantization.convert(net.eval())(X).shape == (48, 1)
