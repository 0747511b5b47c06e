"""``on_non_finite("raise")``: the run ends before a value that is not finite is used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime import NonFiniteError, WorkerFailed, current_worker
from runtime.device.metering import StepMeter, ValueLog
from runtime.replica import non_finite as finite
from runtime.replica.flat import FlatState
from runtime.replica.non_finite import ON_NON_FINITE, ReplicaFiniteCheck, all_finite
from runtime.worker.reporter import Reporter
from tests.support.faulty import (
    KINDS,
    Pair,
    Single,
    Spoilt,
    SpoiltLater,
    Watch,
    count_pair,
    pair,
    spoilt_run,
)
from tests.support.running import (
    CADENCE,
    GLOO,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    builder,
    expect_finite,
    local_ways,
    over,
    train,
)

kinds = pytest.mark.parametrize("kind", KINDS)
modes = pytest.mark.parametrize("mode", ON_NON_FINITE)


def failure(b):
    """Run to the expected failure; returns the error of ``join`` and its cause."""
    handle = b.run()
    with pytest.raises(WorkerFailed) as caught:
        handle.join(WAIT_S)
    expect_finite(handle.state)
    cause = caught.value.__cause__
    assert isinstance(cause, NonFiniteError)
    assert caught.value.rank == cause.rank
    for part in (f"rank {cause.rank}", f"step {cause.step}", cause.what, "on_non_finite"):
        assert part in str(caught.value)
    if cause.parameter is not None:
        assert repr(cause.parameter) in str(caught.value)
    return cause


def expected(kind, step, *, at_once):
    """The allowed descriptions of a fault at ``step``: ``(what, step, parameter)``."""
    if kind == "loss":
        return {("loss", step, "first")}
    if kind == "value":
        return {("loss", step, None)}
    if at_once:
        return {("gradient", step, "second")}
    # Seen in the loss of the next step, or in the parameters where none was made before.
    return {("loss", step + 1, "second"), ("parameter", step, "second")}


# -- raise ---------------------------------------------------------------------------


@kinds
@local_ways
def test_a_fault_of_one_rank_ends_the_run_before_anything_is_used(monkeypatch, way, kind):
    lockstep = way[0] is SYNC
    watch = Watch(monkeypatch, collectives=not lockstep)
    spoilt = SpoiltLater(kind, 1, lambda: ("evaluated", True) in watch.seen)
    cause = failure(spoilt_run("raise", spoilt, watch=watch, way=way, epochs=500))
    spoilt.check()
    watch.check()
    assert cause.rank == 1
    found = (cause.what, cause.step, cause.parameter)
    assert found in expected(kind, spoilt.at, at_once=lockstep)


@kinds
@over([(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_one_device_publishes_no_metrics_of_the_epoch_of_the_fault(monkeypatch, way, kind):
    watch = Watch(monkeypatch)
    # The last batch of the second epoch: only the end of the plan follows.
    b = spoilt_run("raise", Spoilt(kind, (0, 39)), watch=watch, way=way, ranks=1)
    cause = failure(b)
    watch.check()
    assert watch.seen == [("evaluated", True), ("checkpointed", True)]
    late = "parameter" if kind == "gradient" else "loss"
    parameter = {"loss": "first", "gradient": "second", "value": None}[kind]
    assert (cause.rank, cause.what, cause.step, cause.parameter) == (0, late, 39, parameter)


@kinds
@over([(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_one_device_does_not_close_the_epoch_of_the_fault(monkeypatch, way, kind):
    # Every batch is reported as soon as it may be; the epoch closes with its last batch.
    monkeypatch.setattr(Reporter, "report_if_due", Reporter.report_timing)
    handle = spoilt_run("raise", Spoilt(kind, (0, 39)), way=way, ranks=1).run()
    with pytest.raises(WorkerFailed):
        handle.join(WAIT_S)
    assert [metrics.epoch for metrics in handle.poll_metrics()] == [0]


@kinds
def test_lockstep_over_gloo_names_the_rank_at_fault(kind):
    cause = failure(spoilt_run("raise", Spoilt(kind, (1, 4)), way=(SYNC, GLOO)))
    assert (cause.rank, cause.step) == (1, 4)
    assert (cause.what, cause.step, cause.parameter) in expected(kind, 4, at_once=True)


def test_the_first_of_several_ranks_at_fault_in_lockstep_is_named():
    spoilt = Spoilt("gradient", (1, 4), (2, 4))
    assert failure(spoilt_run("raise", spoilt, way=(SYNC, THREAD), ranks=3)).rank == 1
    spoilt.check()


@kinds
def test_no_rank_makes_the_lockstep_step_of_the_fault(kind):
    steps = []

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            steps.append(1)
            return super().step()

    spoilt = Spoilt(kind, (1, 4))
    failure(spoilt_run("raise", spoilt, way=(SYNC, THREAD), optim=lambda p: Counting(p, 1.0)))
    assert len(steps) == 2 * 4


def test_the_batch_within_an_accumulated_step_is_named():
    spoilt = Spoilt("value", (1, 7))
    cause = failure(spoilt_run("raise", spoilt, way=(SYNC, THREAD)).accumulate(3))
    assert (cause.rank, cause.what, cause.step) == (1, "loss", 7)


@local_ways
def test_a_parameter_that_overflows_without_a_bad_gradient_is_found(monkeypatch, way):
    watch = Watch(monkeypatch, collectives=way[0] is not SYNC)

    class Exploding(torch.optim.SGD):
        def step(self, closure=None):
            with torch.no_grad():
                self.param_groups[0]["params"][1].fill_(float("inf"))

    # The loss does not depend on the parameter's value, so it stays finite.
    b = spoilt_run(
        "raise",
        lambda model, batch: model.second.clamp(0, 0).sum() + model.first.sum(),
        watch=watch,
        way=way,
        optim=lambda p: Exploding(p, 1.0),
    )
    cause = failure(b)
    watch.check()
    assert (cause.what, cause.parameter) == ("parameter", "second")


@pytest.mark.parametrize("mode", ["raise", "ignore"])
def test_a_stopped_run_returns_nothing_that_is_not_finite(mode):
    spoilt = Spoilt("gradient", (0, 2), hold=(0, 3))
    handle = spoilt.stop_while_held(spoilt_run(mode, spoilt, ranks=1, dataset=4000))
    with pytest.raises(WorkerFailed) as caught:
        handle.join(WAIT_S)
    assert isinstance(caught.value.__cause__, NonFiniteError)
    expect_finite(handle.state)


@kinds
@local_ways
def test_a_fault_ends_a_run_that_survives_deaths(way, kind):
    spoilt = Spoilt(kind, (1, 4))
    b = spoilt_run("raise", spoilt, way=way, ranks=3, epochs=50)
    assert failure(b.on_worker_failure("continue")).rank == 1
    spoilt.check()


@pytest.mark.parametrize("mode", ON_NON_FINITE)
@local_ways
def test_a_survivor_with_a_state_that_is_not_finite_ends_the_run(monkeypatch, way, mode):
    watch = Watch(monkeypatch, collectives=False)

    class Exploding(torch.optim.SGD):
        """Finite gradients with parameters that are not finite, which no mode can drop."""

        def step(self, closure=None):
            super().step()
            if died:
                self.param_groups[0]["params"][0].data.fill_(float("nan"))

    died = []

    def dies(model, batch):
        worker = current_worker()
        if worker.rank == 0 and worker.local_step == 3:
            died.append(1)
            raise OSError("rank 0 dies")
        return -model.second.sum()

    b = spoilt_run(mode, dies, watch=watch, way=way, optim=lambda p: Exploding(p, 1.0))
    cause = failure(b.on_worker_failure("continue"))
    watch.check()
    assert (cause.rank, cause.what, cause.parameter) == (1, "parameter", "first")


# -- no false alarms -----------------------------------------------------------------


class Masked(Pair):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((3,), -torch.inf, dtype=torch.float64))


@modes
@local_ways
def test_a_mask_of_infinities_kept_as_a_buffer_is_no_fault(way, mode):
    state = spoilt_run(mode, count_pair, way=way, model=lambda d: Masked()).run().join(WAIT_S)
    assert all(metrics.num_skipped == 0 for metrics in state.metrics)
    assert torch.equal(state.buffers["mask"], Masked().mask)


@modes
@local_ways
def test_values_whose_norm_overflows_are_no_fault(way, mode):
    class Huge(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.full((9,), 3e38))

    def huge_gradient(model, batch):
        return (model.w * 1e-38).sum() + (model.w - model.w.detach()).sum() * 3e38

    b = spoilt_run(mode, huge_gradient, way=way, model=lambda d: Huge(), optim=tiny_sgd)
    state = b.run().join(WAIT_S)
    assert torch.isfinite(state.params["w"]).all()
    assert all(metrics.num_skipped == 0 for metrics in state.metrics)


def tiny_sgd(params):
    return torch.optim.SGD(params, 1e-30)


def overflow_once(model, batch):
    """Finite before fp16's scale, but not after it, so that the scaler skips the step."""
    worker = current_worker()
    factor = 1e38 if worker.rank == worker.world_size - 1 and worker.local_step == 2 else 1.0
    return model.w.sum() * factor


@modes
@local_ways
def test_an_overflow_of_fp16s_scale_is_no_fault(way, mode):
    b = spoilt_run(mode, overflow_once, way=way, model=lambda d: Single(), epochs=1)
    state = b.precision("fp16").run().join(WAIT_S)
    assert state.metrics[0].num_skipped == 0
    w = float(state.params["w"])
    assert w == -9.0 if way[0] is SYNC else -20 < w < 0  # of ten steps of both ranks


@over([(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_a_loss_that_is_not_finite_is_a_fault_under_fp16_too(way):
    def spoilt(model, batch):
        worker = current_worker()
        return model.w.sum() * (float("nan") if (worker.rank, worker.local_step) == (1, 3) else 1.0)

    b = spoilt_run("raise", spoilt, way=way, model=lambda d: Single())
    cause = failure(b.precision("fp16"))
    assert (cause.rank, cause.what, cause.step) == (1, "loss", 3)


# -- parts ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["Raise", "", None, "warn", True])
def test_an_unknown_mode_is_refused_with_the_three_modes(mode):
    with pytest.raises(ValueError, match="raise, skip, ignore"):
        builder().on_non_finite(mode)


def test_raise_is_the_default():
    def spoilt(model, batch):
        return count_pair(model, batch) * float("nan")

    with pytest.raises(WorkerFailed, match="loss is not finite"):
        train(model=pair, train=spoilt)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("bad", range(len(DTYPES)))
def test_one_value_among_tensors_of_every_dtype_is_found(bad, value):
    tensors = [torch.ones(1000, dtype=dtype) for dtype in DTYPES]
    assert all_finite(tensors)
    tensors[bad][777] = value
    assert not all_finite(tensors)
    assert not all_finite([tensors[bad]])


def test_an_empty_list_of_tensors_is_finite():
    assert all_finite([])
    assert all_finite([torch.empty(0)])
    assert all_finite([torch.empty(0)] * 2)


def test_the_error_of_a_bad_loss_has_the_number_of_its_batch():
    log, named = ValueLog(), []
    log.on_bad_loss = named.append
    for loss in (1.0, 2.0):
        log.push_loss(torch.tensor(loss), 1)
    assert log.harvest()[:2] == (3.0, 2)
    for loss in (3.0, float("inf"), float("nan")):
        log.push_loss(torch.tensor(loss), 1)
    log.harvest()
    assert named == [3, 4]


def judge_of(module, mode, *, averaged=True):
    meter = StepMeter(ValueLog())
    params = FlatState(module).params
    optimizer = torch.optim.SGD(module.parameters(), 1.0, momentum=0.9)
    finite_check = ReplicaFiniteCheck(
        mode, 2, params, optimizer, meter, lambda: 7, averaged=averaged
    )
    return finite_check, meter, optimizer


def test_samples_of_abandoned_rounds_are_counted_as_skipped_once():
    module = Pair()
    finite_check, meter, optimizer = judge_of(module, "ignore")
    assert finite_check.enter_round(5)
    with torch.no_grad():
        module.second[1] = float("nan")
    assert not finite_check.enter_round(10)
    assert not finite_check.enter_round(16)
    assert meter.num_skipped == 16
    optimizer.state[module.first]["momentum_buffer"] = torch.ones(2)
    finite_check.healed(3)
    assert meter.take().num_skipped == 19
    assert meter.take().num_skipped == 0
    assert not optimizer.state
    assert not finite_check.is_bad


def test_norms_of_a_snapshot_serve_as_the_check_of_the_replica(monkeypatch):
    """The parameters are read again only to distinguish an overflow from a bad value."""
    module = Pair()
    finite_check, _, _ = judge_of(module, "ignore")
    read = []
    monkeypatch.setattr(finite, "all_finite", lambda flats: read.append(1) or all_finite(flats))
    assert finite_check.enter_round(5, (4.0, 1e300))
    assert not read
    assert finite_check.enter_round(5, (4.0, float("inf")))
    assert len(read) == 1
    with torch.no_grad():
        module.second[1] = float("nan")
    assert not finite_check.enter_round(5, (4.0, float("nan")))
    assert finite_check.is_bad


@pytest.mark.parametrize(("mode", "averaged"), [("raise", True), ("skip", True), ("ignore", False)])
def test_a_replica_that_cannot_be_healed_enters_no_round(mode, averaged):
    module = Pair()
    finite_check, _, _ = judge_of(module, mode, averaged=averaged)
    finite_check.require_finite()
    with torch.no_grad():
        module.second[1] = float("inf")
    for use in (
        finite_check.require_finite,
        lambda: finite_check.enter_round(1),
        lambda: finite_check.final_fault(0),
    ):
        with pytest.raises(NonFiniteError) as caught:
            use()
        error = caught.value
        assert (error.rank, error.step, error.what, error.parameter) == (
            2,
            6,
            "parameter",
            "second",
        )
