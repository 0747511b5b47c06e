"""Reported results are correct, and reporting blocks nothing."""

from __future__ import annotations

import logging
import math
import threading

import pytest

from coordinator import messages as m
from runtime import NonFiniteError, WorkerFailed, current_worker, record_scalar
from tests.deadlock.faults import BOUND_S
from tests.deadlock.tap import within
from tests.simulation.harness import Simulation
from tests.simulation.test_unequal_speeds import FAST_S, schedule_of
from tests.support.running import (
    CADENCE,
    OVER_CPU,
    builder,
    count_up,
    expect_finite,
    local_ways,
)


@local_ways
def test_a_blocking_metrics_function_does_not_stop_dispatch(way):
    """S23: it blocks in its first call while all epochs are trained and read by others."""
    called, opened = threading.Event(), threading.Event()

    def block(metrics):
        called.set()
        assert opened.wait(BOUND_S)

    handle = builder(epochs=4, way=way).metrics_fn(block).run()
    assert [handle.next_metrics(BOUND_S).epoch for _ in range(4)] == [0, 1, 2, 3]
    assert called.wait(BOUND_S)
    assert not opened.is_set()
    opened.set()
    with within(5):
        assert len(handle.join(BOUND_S).metrics) == 4


@local_ways
@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_failing_metrics_function_is_logged_and_does_not_end_the_run(way, error, caplog):
    """S23: it still receives every epoch."""
    seen = []

    def fail(metrics):
        seen.append(metrics.epoch)
        raise error("in the user's function")

    with caplog.at_level(logging.ERROR, "runtime.loggers.metrics_thread"):
        state = builder(epochs=3, way=way).metrics_fn(fail).run().join(BOUND_S)
    assert seen == [e.epoch for e in state.metrics] == [0, 1, 2]
    assert len(caplog.records) == 3


def recording(model, batch):
    record_scalar("samples", float(len(batch[0])))
    return count_up(model, batch)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_single_device_reports_like_several_and_keeps_no_references(ranks, tap):
    """S24: the same metrics by the same path, and no remaining report, batch or tensor."""
    b = builder(train=recording, dataset=45, batch_size=2, epochs=3, ranks=ranks)
    state = b.backend(OVER_CPU).run().join(BOUND_S)
    for epoch in state.metrics:
        assert epoch.num_samples == sum(r.num_samples for r in epoch.per_rank) == 45
        assert sum(r.num_batches for r in epoch.per_rank) == 23
        assert epoch.scalars["samples"] == pytest.approx((22 * 2 * 2 + 1) / 45)
        assert all(r.compute_s > 0 for r in epoch.per_rank if r.num_batches)
    reported = [r.stats for r in tap.came(m.EpochReport | m.BatchReport)]
    reported += [r.report.stats for r in tap.came(m.ParamSnapshot) if r.report]
    assert sum(stats.num_batches for stats in reported) == 3 * 23
    assert sum(stats.loss_samples for stats in reported) == 3 * 45
    run = tap.machine.run_state
    assert not run.ledger.epochs
    assert all(not (led.assigned or led.trained or led.in_round) for led in run.ledger.by_rank)
    assert [rank.final for rank in run.ranks] == [None] * ranks


def test_throughput_divides_by_the_time_of_all_chunks():
    """S20: on the virtual clock, where an epoch comes in many chunks of known time."""
    schedule = schedule_of(
        CADENCE, OVER_CPU, slowness=(1.0, 2.0), jitter=0.0, num_samples=6000, num_epochs=1
    )
    (epoch,) = Simulation(schedule).run().machine.outcome.metrics
    wanted = [10 / FAST_S, 10 / (2 * FAST_S)]
    assert list(epoch.per_rank_throughput) == pytest.approx(wanted)
    # The longest chunk is a small part of it.
    assert all(r.compute_s > 0.5 for r in epoch.per_rank)


@local_ways
def test_a_nan_loss_is_an_error_that_names_its_step(way, faults):
    """S19: one rank's loss is NaN at one step; no maximum and no comparison hides it."""
    planted = faults(poisoned_at(rank=1, step=2))
    b = planted.builder(dataset=40, batch_size=1, way=way).anchor(1)
    handle = b.partition_ratios([1, 1]).run()
    with within(5), pytest.raises(WorkerFailed) as failed:
        handle.join(BOUND_S)
    cause = failed.value.__cause__
    assert isinstance(cause, NonFiniteError)
    assert (cause.rank, cause.step) == (1, 2)
    expect_finite(handle.state)
    assert planted.steps[1] > 2


def poisoned_at(*, rank, step):
    """A ``train_fn`` whose loss is NaN once."""

    def train(model, batch):
        worker = current_worker()
        loss = count_up(model, batch)
        return loss * math.nan if (worker.rank, worker.local_step) == (rank, step) else loss

    return train
