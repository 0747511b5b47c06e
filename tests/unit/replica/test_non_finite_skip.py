"""``on_non_finite("skip")``: the step is dropped as if its batch did not exist."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from runtime import current_worker, record_scalar
from tests.support.faulty import (
    KINDS,
    Single,
    Spoilt,
    Watch,
    is_finite,
    spoilt_run,
)
from tests.support.running import (
    CADENCE,
    GLOO,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    local_averaged_ways,
    local_ways,
    over,
)

kinds = pytest.mark.parametrize("kind", KINDS)

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(44, 5, dtype=torch.float64, generator=GENERATOR)
Y = X.pow(2).sum(1)
START = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def warned(caplog):
    """The warnings that name a rank."""
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [message for message in messages if message.startswith("rank ")]


# -- lockstep ------------------------------------------------------------------------


class SkippingAdam(torch.optim.AdamW):
    """Skips one of its steps, counted from 0; ``None``: none."""

    def __init__(self, params, skip=None):
        super().__init__(params, 0.05)
        self._skip = skip
        self.num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        if self.num_steps - 1 != self._skip:
            super().step()


def regress(backend, mode, *, spoil=None, skip=None, accumulate=1):
    """Train three ranks in lockstep for two epochs; returns the state and each rank's steps.

    Args:
        backend: The transport.
        mode: For ``on_non_finite``.
        spoil: ``(kind, rank, batch)`` of a fault.
        skip: Optimizer step that does nothing.
        accumulate: Micro-batches in a step.
    """
    optimizers, num_seen = [], [0, 0, 0]

    def optim(params):
        optimizers.append(SkippingAdam(params, skip))
        return optimizers[-1]

    def train(net, batch):
        worker = current_worker()
        loss = ((net(batch[0]).squeeze(1) - batch[1]) ** 2).mean()
        place = worker.rank, num_seen[worker.rank]
        num_seen[worker.rank] += 1
        if spoil is None or place != spoil[1:]:
            return loss
        if spoil[0] == "value":
            return loss + float("nan")
        return loss * float("nan" if spoil[0] == "loss" else "inf")

    b = spoilt_run(
        mode,
        train,
        way=(SYNC, backend),
        ranks=3,
        model=lambda d: copy.deepcopy(START),
        optim=optim,
        dataset=(X, Y),
        batch_size=3,
        epochs=2,
    )
    state = b.accumulate(accumulate).max_grad_norm(1.0).run().join(WAIT_S)
    return state, [o.num_steps for o in optimizers]


@kinds
@pytest.mark.parametrize("backend", [THREAD, GLOO], ids=lambda b: b.name)
def test_a_lockstep_run_is_bitwise_equal_to_one_without_the_dropped_step(backend, kind):
    state, steps = regress(backend, "skip", spoil=(kind, 1, 7))
    reference, all_steps = regress(backend, "ignore", skip=7)
    assert (steps, all_steps) == ([9, 9, 9], [10, 10, 10])
    for key, value in reference.state_dict().items():
        assert torch.equal(state.state_dict()[key], value)
    # The eighth global step: three batches of three, in the second epoch.
    assert [metrics.num_skipped for metrics in state.metrics] == [0, 9]
    assert [metrics.num_samples for metrics in state.metrics] == [44, 44]


def test_skip_without_a_fault_changes_no_bit():
    state, _ = regress(THREAD, "skip")
    reference, _ = regress(THREAD, "ignore")
    for key, value in reference.state_dict().items():
        assert torch.equal(state.state_dict()[key], value)
    # Sums of losses are cut by time, so their last bit may differ.
    assert [metrics.avg_loss for metrics in state.metrics] == pytest.approx(
        [metrics.avg_loss for metrics in reference.metrics], rel=1e-12
    )


@kinds
def test_one_bad_micro_batch_drops_the_whole_accumulated_step_on_every_rank(kind):
    state, steps = regress(THREAD, "skip", spoil=(kind, 2, 3), accumulate=2)
    reference, _ = regress(THREAD, "ignore", skip=1, accumulate=2)
    assert steps == [5, 5, 5]
    for key, value in reference.state_dict().items():
        assert torch.equal(state.state_dict()[key], value)
    assert [metrics.num_skipped for metrics in state.metrics] == [18, 0]


def test_only_the_rank_at_fault_warns(caplog):
    regress(THREAD, "skip", spoil=("loss", 1, 7))
    (line,) = warned(caplog)
    for part in ("rank 1", "step 7", "loss", "0.weight", "dropped"):
        assert part in line


# -- replicas that average parameters --------------------------------------------------


@kinds
@local_averaged_ways
def test_a_dropped_step_has_no_weight_and_changes_no_replica(monkeypatch, caplog, way, kind):
    watch = Watch(monkeypatch)
    spoilt = Spoilt(kind, (1, 3))
    state = spoilt_run("skip", spoilt, watch=watch, way=way).run().join(WAIT_S)
    spoilt.check()
    watch.check()
    assert is_finite(state.params.values())
    assert sum(metrics.num_skipped for metrics in state.metrics) == 2
    assert [metrics.num_samples for metrics in state.metrics] == [40] * 3
    assert is_finite([torch.tensor([metrics.avg_loss for metrics in state.metrics])])
    assert sum(watch.weights) == 3 * 40 - 2
    (line,) = warned(caplog)
    parameter = {"loss": "first", "gradient": "second", "value": "None"}[kind]
    for part in ("rank 1", "step 3", parameter, "dropped"):
        assert part in line


@local_averaged_ways
def test_a_run_whose_every_step_is_dropped_ends_with_the_first_weights(monkeypatch, way):
    watch = Watch(monkeypatch)
    every = [(rank, step) for rank in (0, 1) for step in range(200)]
    b = spoilt_run("skip", Spoilt("loss", *every), watch=watch, way=way, epochs=2)
    state = b.run().join(WAIT_S)
    watch.check()
    assert watch.seen.count(("evaluated", True)) == 2
    assert all(not value.any() for value in state.params.values())
    assert [metrics.num_skipped for metrics in state.metrics] == [40, 40]


@kinds
def test_a_run_on_one_device_lacks_only_the_dropped_step(kind):
    state = spoilt_run("skip", Spoilt(kind, (0, 3), (0, 30)), ranks=1).run().join(WAIT_S)
    assert torch.equal(state.params["first"], torch.full((2,), 58.0, dtype=torch.float64))
    assert [metrics.num_skipped for metrics in state.metrics] == [2, 2, 0]


def test_an_accumulated_step_is_dropped_as_a_unit_and_the_warning_names_the_batch(caplog):
    b = spoilt_run("skip", Spoilt("value", (0, 7)), ranks=1, epochs=1).accumulate(3)
    state = b.run().join(WAIT_S)
    assert state.metrics[0].num_skipped == 6
    # Twenty batches make seven steps.
    assert torch.equal(state.params["first"], torch.full((2,), 6.0, dtype=torch.float64))
    (line,) = warned(caplog)
    assert "rank 0, step 7" in line


def test_losses_and_scalars_of_a_dropped_step_are_left_out_of_the_means():
    inner = Spoilt("loss", (0, 3))

    def train(model, batch):
        worker = current_worker()
        record_scalar("step", float(worker.local_step))
        return inner(model, batch) * 0 + worker.local_step

    state = spoilt_run("skip", train, ranks=1, dataset=20, epochs=1).run().join(WAIT_S)
    kept = [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert state.metrics[0].avg_loss == pytest.approx(sum(kept) / 9)
    assert state.metrics[0].scalars["step"] == pytest.approx(sum(kept) / 9)


def test_the_schedule_advances_over_a_dropped_step():
    rates = []
    inner = Spoilt("loss", (0, 2))

    def train(model, batch):
        rates.append(current_worker().current_lr)
        return inner(model, batch)

    b = spoilt_run("skip", train, ranks=1, dataset=10, epochs=1)
    b.scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)).run().join(WAIT_S)
    assert rates == [1.0, 0.5, 0.25, 0.125, 0.0625]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5).double()
        self.out = nn.Linear(5, 1).double()
        nn.init.ones_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x):
        return self.out(self.norm(x))


@over([(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_changes_of_buffers_by_a_bad_batch_are_undone(way):
    x = X.clone()
    x[9] = float("nan")

    def train(net, batch):
        return net(batch[0]).square().mean()

    b = spoilt_run(
        "skip",
        train,
        way=way,
        model=lambda d: Normed(),
        optim=lambda p: torch.optim.SGD(p, 0.01),
        dataset=(x,),
        epochs=2,
    )
    state = b.run().join(WAIT_S)
    assert is_finite(state.buffers.values())
    assert is_finite(state.params.values())
    assert [metrics.num_skipped for metrics in state.metrics] == [4 if way[0] is SYNC else 2] * 2


# -- fp16 ----------------------------------------------------------------------------


@local_ways
def test_fp16_training_continues_after_a_dropped_loss(way):
    def train(model, batch):
        worker = current_worker()
        bad = worker.rank == 1 and worker.local_step == 3
        return model.w.sum() * (float("nan") if bad else 1.0)

    b = spoilt_run("skip", train, way=way, model=lambda d: Single(), epochs=2)
    state = b.precision("fp16").max_grad_norm(5.0).run().join(WAIT_S)
    assert sum(metrics.num_skipped for metrics in state.metrics) == (4 if way[0] is SYNC else 2)
    w = float(state.params["w"])
    assert w == -19.0 if way[0] is SYNC else -40 < w < -10
