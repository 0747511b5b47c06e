"""Steps as graphs, on a stand-in that records the operations of PyTorch and repeats them."""

from __future__ import annotations

import importlib
import logging

import pytest
import torch
from torch import nn

from runtime import current_worker, record_scalar
from runtime import run as run_module
from runtime.capture_gate import CaptureGate
from runtime.cuda_device import CudaDevice
from runtime.data_path import DataPath
from runtime.device import CpuDevice
from tests.unit.fake_cuda import GPU, FakeCuda
from tests.unit.running import CADENCE, LOCAL_WAYS, OVER_CPU, SYNC, THREAD, WAIT_S, builder

every_way = pytest.mark.parametrize("way", LOCAL_WAYS, ids=lambda w: f"{w[0].name}-{w[1].name}")
DATA = torch.randn(66, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def net(device):
    layers = nn.BatchNorm1d(3), nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*layers).to(device, torch.float64)


def loss_of(model, batch):
    record_scalar("mean", batch[0].mean())
    record_scalar("one", 1.0)
    return (model(batch[0]).squeeze(1) - batch[0].sum(1)).square().mean()


def adamw(params):
    # It counts in float32 then, with and without graphs.
    return torch.optim.AdamW(params, 0.01, capturable=True)


def sgd(params):
    return torch.optim.SGD(params, 0.01, momentum=0.9)


@pytest.fixture(autouse=True)
def capturable_on_cpu(monkeypatch):
    """PyTorch lets optimizers count their steps in tensors on accelerators alone."""
    for name in ("adam", "rmsprop"):
        module = importlib.import_module(f"torch.optim.{name}")
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])


class Posing:
    """Runs on CPU devices that take them for GPUs."""

    def __init__(self, monkeypatch):
        self.fake = FakeCuda(patience=2)
        gate = CaptureGate()

        def data_path(config, adapter, index, contexts):
            return DataPath(config, adapter, index, [CpuDevice(1) for _ in contexts])

        def open_posing(device, num_cpu_workers):
            return CudaDevice(GPU, api=self.fake, gate=gate)

        monkeypatch.setattr(run_module, "open_device", open_posing)
        monkeypatch.setattr(run_module, "DataPath", data_path)

    @property
    def num_replays(self):
        return [graph.num_replays for graph in self.fake.graphs]


@pytest.fixture
def posing(monkeypatch):
    posing = Posing(monkeypatch)
    yield posing
    assert posing.fake.violations == []


def train(b):
    return b.seed(3).run().join(WAIT_S)


def a_run(*, model=net, optim=adamw, loss=loss_of, way=(CADENCE, OVER_CPU), ranks=1, **kwargs):
    settings = {"dataset": (DATA,), "batch_size": 4, "epochs": 3} | kwargs
    return builder(model=model, optim=optim, train=loss, way=way, ranks=ranks, **settings)


def assert_equal_runs(actual, expected):
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], tensor, rtol=1e-6, atol=1e-7)
    for a, e in zip(actual.metrics, expected.metrics, strict=True):
        assert a.avg_loss == pytest.approx(e.avg_loss)
        assert a.scalars == pytest.approx(e.scalars)
        assert a.num_samples == e.num_samples


# -- a captured run is the eager one ---------------------------------------------------------


@pytest.mark.parametrize("optim", [adamw, sgd])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_graph_trains_what_eager_steps_train(optim, accumulate, posing):
    def run(flag):
        b = a_run(optim=optim).accumulate(accumulate).max_grad_norm(0.5)
        return train(b.cuda_graphs(flag))

    expected = run(False)
    assert posing.num_replays == []
    assert_equal_runs(run(True), expected)
    windows = 3 * (16 // accumulate)  # each epoch ends with a short batch
    assert posing.num_replays == [windows - 3]


def test_under_lockstep_two_graphs_stand_around_the_reduction(posing):
    def run(flag):
        return train(a_run(way=(SYNC, THREAD), ranks=2).max_grad_norm(0.5).cuda_graphs(flag))

    expected = run(False)
    assert_equal_runs(run(True), expected)
    assert len(posing.fake.graphs) == 4
    assert all(n >= 8 for n in posing.num_replays)


@every_way
def test_every_policy_trains_every_sample_with_graphs(way, posing):
    state = train(a_run(way=way, ranks=3, epochs=6).cuda_graphs(True))
    assert [e.num_samples for e in state.metrics] == [66] * 6
    assert state.metrics[-1].avg_loss < state.metrics[0].avg_loss
    assert sum(posing.num_replays) > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_scheduler_moves_the_learning_rate_of_a_graph(ranks, posing):
    def run(flag):
        b = a_run(way=(SYNC, THREAD), ranks=ranks)
        b.scheduler(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 60))
        return train(b.cuda_graphs(flag))

    expected = run(False)
    assert_equal_runs(run(True), expected)
    assert sum(posing.num_replays) > 15


def test_a_generator_of_the_worker_goes_on_drawing(posing):
    def noisy(model, batch):
        draw = torch.rand(1, generator=current_worker().generator, dtype=torch.float64)
        record_scalar("draw", draw)
        return loss_of(model, batch) * draw.sum()

    state = train(a_run(loss=noisy).cuda_graphs(True))
    draws = [e.scalars["draw"] for e in state.metrics]
    assert len(set(draws)) == 3
    assert posing.num_replays == [45]


def test_short_batches_are_trained_without_a_graph(posing):
    train(a_run(epochs=6).cuda_graphs(True))
    assert posing.num_replays == [6 * 16 - 3]


def test_a_rank_that_waits_for_messages_is_no_obstacle_to_a_capture(posing):
    """Rank 1 has no batch in the whole run."""
    state = train(a_run(ranks=2).partition_ratios([1, 0]).cuda_graphs(True))
    assert [e.num_samples for e in state.metrics] == [66] * 3
    assert posing.num_replays == [45]


# -- what cannot be captured ------------------------------------------------------------------


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def reading(model, batch):
    loss = loss_of(model, batch)
    return loss * (2.0 if loss.item() > 1e9 else 1.0)


def test_a_step_that_reads_the_device_is_made_eagerly_with_one_warning(posing, caplog):
    expected = train(a_run(loss=reading, ranks=2, way=(SYNC, THREAD)))
    state = train(a_run(loss=reading, ranks=2, way=(SYNC, THREAD)).cuda_graphs(True))
    assert_equal_runs(state, expected)
    (warning,) = warnings_of(caplog)
    assert "without a graph" in warning
    assert "not permitted when stream is capturing" in warning
    assert posing.fake.graphs == []


def test_an_optimizer_that_reads_the_device_steps_behind_a_graph(posing, caplog):
    class Reading(torch.optim.SGD):
        def step(self, closure=None):
            float(self.param_groups[0]["params"][0].detach().sum())
            return super().step(closure)

    def run(flag):
        return train(a_run(optim=lambda params: Reading(params, 0.01)).cuda_graphs(flag))

    expected = run(False)
    assert_equal_runs(run(True), expected)
    (warning,) = warnings_of(caplog)
    assert "the optimizer steps without a graph" in warning
    assert posing.num_replays == [45]


def test_a_setting_that_moves_with_each_step_leaves_the_optimizer_out(posing, caplog):
    def run(flag):
        b = a_run(optim=sgd).scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.99))
        return train(b.cuda_graphs(flag))

    expected = run(False)
    assert_equal_runs(run(True), expected)
    (warning,) = warnings_of(caplog)
    assert "(lr)" in warning
    assert "fused=True" in warning
    assert max(posing.num_replays) > 30


def test_a_learning_rate_that_is_set_once_is_captured_anew(posing, caplog):
    def slower(epoch, worker):
        if epoch == 2:
            worker.set_lr(0.001)

    def run(flag):
        return train(a_run(optim=sgd).epoch_fn(slower).cuda_graphs(flag))

    expected = run(False)
    assert_equal_runs(run(True), expected)
    assert warnings_of(caplog) == []
    assert posing.num_replays == [29, 16]


class Replacing(nn.Module):
    """Keeps a mean by giving its buffer a new tensor."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return self.inner(x - self.seen)


def test_a_buffer_that_is_replaced_keeps_the_step_eager(posing, caplog):
    def run(flag):
        b = a_run(model=lambda d: Replacing().to(d, torch.float64), loss=loss_of)
        return train(b.cuda_graphs(flag))

    expected = run(False)
    assert_equal_runs(run(True), expected)
    (warning,) = warnings_of(caplog)
    assert "'seen'" in warning
    assert "in place" in warning


def test_fp16_is_made_eagerly(posing, caplog):
    train(
        a_run(model=lambda d: nn.Sequential(nn.Linear(3, 1)).to(d), loss=half)
        .precision("fp16")
        .cuda_graphs(True)
    )
    (warning,) = warnings_of(caplog)
    assert "use bf16" in warning


def half(model, batch):
    return model(batch[0].float()).square().mean().float()


def test_bf16_is_captured(posing):
    def run(flag):
        b = a_run(model=lambda d: nn.Sequential(nn.Linear(3, 1)).to(d), loss=half)
        return train(b.precision("bf16").cuda_graphs(flag))

    expected = run(False)
    actual = run(True)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], tensor)
    assert posing.num_replays == [45]


def test_on_a_cpu_it_says_that_it_has_no_effect(caplog):
    train(a_run().cuda_graphs(True))
    (warning,) = warnings_of(caplog)
    assert "no effect on cpu" in warning


# -- what a graph holds on to ------------------------------------------------------------------


def test_a_graph_goes_when_the_state_of_its_optimizer_is_replaced(posing):
    seen = []

    def restart(epoch, worker):
        seen.append(len(posing.fake.graphs))
        if epoch == 1:
            worker.optimizer.load_state_dict(worker.optimizer.state_dict())

    def run(flag):
        return train(a_run(optim=sgd).epoch_fn(restart).cuda_graphs(flag))

    expected = run(False)
    assert_equal_runs(run(True), expected)
    assert posing.num_replays == [13, 29]


def test_forgetting_the_graphs_takes_a_change_of_python_up(posing):
    weight = [1.0]

    def weighted(model, batch):
        return loss_of(model, batch) * weight[0]

    def heavier(epoch, worker):
        weight[0] = 1.0 + epoch
        worker.forget_graphs()

    def run(flag):
        return train(a_run(loss=weighted).epoch_fn(heavier).cuda_graphs(flag))

    expected = run(False)
    assert_equal_runs(run(True), expected)
    assert posing.num_replays == [13, 13, 13]


def test_skipped_steps_are_judged_between_two_graphs(posing):
    data = DATA.clone()
    data[41] = torch.nan

    def run(flag):
        b = a_run(
            model=lambda d: nn.Sequential(nn.Linear(3, 1)).to(d, torch.float64), dataset=(data,)
        )
        return train(b.on_non_finite("skip").cuda_graphs(flag))

    expected = run(False)
    actual = run(True)
    assert_equal_runs(actual, expected)
    assert [e.num_skipped for e in actual.metrics] == [e.num_skipped for e in expected.metrics]
    assert sum(e.num_skipped for e in actual.metrics) >= 3
    assert posing.num_replays[0] == 45


def test_batches_of_several_shapes_get_a_graph_each(posing):
    lengths = [3, 5]

    class Ragged(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            raise AssertionError("batches are asked for")

        def __getitems__(self, indices):
            length = lengths[indices[0] % 2]
            return [torch.full((length,), float(i), dtype=torch.float64) / 64 for i in indices]

    def loss(model, batch):
        return (model.w * batch).sum(1).square().mean() + model.w.square().sum()

    def run(flag):
        b = a_run(model=_one_number, loss=loss, dataset=Ragged(), optim=sgd)
        return train(b.cuda_graphs(flag))

    expected = run(False)
    assert_equal_runs(run(True), expected)
    assert len(posing.num_replays) == 2
    assert sum(posing.num_replays) == 48 - 6


def _one_number(device):
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(1, dtype=torch.float64))
    return model.to(device)
