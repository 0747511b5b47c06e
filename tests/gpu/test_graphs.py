"""Training steps captured as CUDA graphs."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from runtime import ApplyPolicy, AverageBackend, Trainer, current_worker, record_scalar
from runtime.replica.graphs import GraphedSteps
from tests.gpu.no_sync import allow_sync, forbid_sync

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

WAIT_S = 120.0
SYNC, CADENCE, ASYNC = ApplyPolicy.SYNC, ApplyPolicy.CADENCE, ApplyPolicy.ASYNC
CPU, THREAD, NCCL = AverageBackend.CPU, AverageBackend.THREAD, AverageBackend.NCCL
SHARED = [(SYNC, THREAD), (CADENCE, CPU), (CADENCE, THREAD), (ASYNC, CPU)]


def net(device, dropout=0.0):
    layers = nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(dropout)
    return nn.Sequential(*layers, nn.Linear(128, 10)).to(device)


def loss_of(model, batch):
    x, y = batch
    out = model(x)
    record_scalar("accuracy", (out.argmax(1) == y).float().mean())
    return nn.functional.cross_entropy(out.float(), y)


def samples(n=1030):
    x = torch.randn(n, 64, generator=torch.Generator().manual_seed(1))
    return x, x[:, :10].argmax(1)


def adamw(params):
    return torch.optim.AdamW(params, 1e-3, capturable=True)


def a_run(*, model=net, optim=adamw, loss=loss_of, devices=("cuda:0",), way=(CADENCE, CPU)):
    b = Trainer.builder(model, optim, loss).dataset(samples()).batch_size(32).num_epochs(4)
    return b.devices(list(devices)).policy(way[0]).backend(way[1]).seed(5).stall_timeout(60)


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def assert_close(actual, expected, **tolerance):
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], tensor, **tolerance)
    for a, e in zip(actual.metrics, expected.metrics, strict=True):
        assert a.num_samples == e.num_samples == 1030
        assert a.avg_loss == pytest.approx(e.avg_loss, rel=1e-2)
        assert a.scalars["accuracy"] == pytest.approx(e.scalars["accuracy"], abs=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("resident", [True, False])
def test_graph_replays_equal_eager_steps(precision, resident, caplog):
    def run(flag):
        b = a_run().precision(precision).resident(resident).max_grad_norm(1.0)
        b.scheduler(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 140))
        return b.cuda_graphs(flag).run().join(WAIT_S)

    assert_close(run(True), run(False), rtol=1e-2, atol=1e-2)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("way", SHARED, ids=lambda w: f"{w[0].name}-{w[1].name}")
def test_workers_sharing_a_gpu_run_eager_steps_with_one_warning(way, caplog):
    b = a_run(way=way, devices=("cuda:0", "cuda:0")).resident(False)
    state = b.cuda_graphs(True).run().join(WAIT_S)
    assert [e.num_samples for e in state.metrics] == [1030] * 4
    assert state.metrics[-1].avg_loss < state.metrics[0].avg_loss
    (warning,) = warnings_of(caplog)
    assert "several workers share cuda:0" in warning


class DeviceNoise(torch.utils.data.Dataset):
    """Noise from the default generator of the training GPU, with a synchronisation."""

    def __len__(self):
        return 1030

    def __getitem__(self, index):
        x = torch.randn(64, device="cuda:0")
        torch.cuda.synchronize("cuda:0")
        return x.cpu(), index % 10


def test_a_data_set_may_draw_on_the_capturing_gpu(caplog):
    """The loader's thread waits during the capture."""
    b = Trainer.builder(net, adamw, loss_of).dataset(DeviceNoise()).batch_size(32).num_epochs(4)
    b.devices(["cuda:0"]).policy(CADENCE).backend(CPU).seed(5).stall_timeout(60)
    state = b.cuda_graphs(True).run().join(WAIT_S)
    assert [e.num_samples for e in state.metrics] == [1030] * 4
    assert warnings_of(caplog) == []


@pytest.mark.two_gpus
def test_sync_with_graphs_equals_sync_without(caplog):
    def run(flag):
        b = a_run(way=(SYNC, THREAD), devices=("cuda:0", "cuda:1"))
        return b.cuda_graphs(flag).run().join(WAIT_S)

    assert_close(run(True), run(False), rtol=1e-2, atol=1e-2)
    assert warnings_of(caplog) == []


def test_each_replay_draws_new_random_numbers_for_dropout_and_the_workers_generator():
    draws = []

    def noisy(model, batch):
        worker = current_worker()
        draw = torch.rand((), device=worker.device, generator=worker.generator)
        other = torch.rand((), device=worker.device)
        record_scalar("square", (draw - 0.5).square())
        record_scalar("other", (other - 0.5).square())
        return loss_of(model, batch)

    state = a_run(model=lambda d: net(d, 0.3), loss=noisy).cuda_graphs(True).run().join(WAIT_S)
    for name in ("square", "other"):
        # The mean of 33 draws is far from 33 repetitions of one draw.
        draws = [e.scalars[name] for e in state.metrics]
        assert all(0.03 < draw < 0.15 for draw in draws)
        assert len(set(draws)) == len(draws)


def test_a_step_that_synchronises_falls_back_to_eager_with_one_warning(caplog):
    """Dropout still draws new numbers after the failed capture."""

    def reading(model, batch):
        loss = loss_of(model, batch)
        return loss * (2.0 if float(loss.detach()) > 1e9 else 1.0)

    b = a_run(model=lambda d: net(d, 0.3), loss=reading)
    state = b.cuda_graphs(True).run().join(WAIT_S)
    (warning,) = warnings_of(caplog)
    assert "without a graph" in warning
    assert [e.num_samples for e in state.metrics] == [1030] * 4
    assert state.metrics[-1].avg_loss < state.metrics[0].avg_loss


def test_no_host_sync_in_captured_steps(monkeypatch):
    """Replays, batch copies and the step log synchronise by events alone."""
    finish, watched = GraphedSteps.finish, []

    def watch(self, window, batches, train_fn):
        watches = bool(self._graphs)
        (forbid_sync if watches else allow_sync)()
        try:
            return finish(self, window, batches, train_fn)
        finally:
            allow_sync()
            watched.append(watches)

    monkeypatch.setattr(GraphedSteps, "finish", watch)
    state = a_run().cuda_graphs(True).run().join(WAIT_S)
    assert [e.num_samples for e in state.metrics] == [1030] * 4
    assert watched.count(True) > 100


@pytest.mark.two_gpus
@pytest.mark.parametrize("policy", [SYNC, CADENCE], ids=lambda p: p.name)
def test_two_gpus_capture_around_nccl(policy, caplog):
    b = a_run(way=(policy, NCCL), devices=("cuda:0", "cuda:1"))
    state = b.cuda_graphs(True).run().join(WAIT_S)
    assert [e.num_samples for e in state.metrics] == [1030] * 4
    assert warnings_of(caplog) == []
