"""Divergence and norms of drifting replicas in metrics, statistics, timeline and loggers."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace

import pytest
import torch

from coordinator.cadence import ElChe
from coordinator.codec import decode, encode
from coordinator.metrics import EpochMetrics
from runtime import CsvLogger, TensorBoardLogger, Timeline, current_worker
from runtime.monitor.run_reader import _epoch
from tests.support.running import (
    ASYNC,
    CADENCE,
    GLOO,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    builder,
    over,
)

WAYS = [(CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, GLOO)]


def drift(model, batch):
    """Rank 1 moves in the opposite direction, ten times as fast."""
    return model.w.sum() * (-1.0 if current_worker().rank == 0 else 10.0)


def run(way, train=drift, ranks=2, **more):
    b = builder(train=train, dataset=40, batch_size=2, epochs=2, ranks=ranks, way=way)
    b.partition_ratios([1] * ranks).anchor(5).max_anchor(5).no_divergence_guard()
    b.max_batch_diff(0)  # every rank takes part in every round
    for name, value in more.items():
        getattr(b, name)(value)
    return b.run()


def lowered_anchors(monkeypatch, distance, warm_up=1.0):
    """Anchors lowered by the guard in a run whose ranks move to ``1 + distance(worker)`` and
    ``1 - distance(worker)`` in each step, however many batches they have between two rounds.
    The learning rate grows by ``warm_up`` in each step.
    """
    lowered = []

    def nudge_down(elche):
        lower(elche)
        lowered.append(elche.anchor)  # grows again while rounds cost more than these steps

    lower = ElChe.nudge_down
    monkeypatch.setattr(ElChe, "nudge_down", nudge_down)

    def move_apart(model, batch):
        worker = current_worker()
        target = 1.0 if lowered else 1.0 + min(distance(worker), 0.3) * (1 - 2 * worker.rank)
        return (model.w - target).square().sum() / (2 * worker.current_lr)

    b = builder(train=move_apart, dataset=400, way=(CADENCE, THREAD))
    b.partition_ratios([1, 1]).max_batch_diff(0).anchor(4).max_anchor(4).divergence_threshold(1.0)
    b.scheduler(lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: warm_up**step))
    (metrics,) = b.run().join(WAIT_S).metrics
    assert 0.01 < metrics.divergence < 1.0  # never above the threshold
    return lowered


def test_growing_divergence_shortens_the_rounds(monkeypatch):
    anchors = lowered_anchors(monkeypatch, lambda worker: 0.02 * 1.3**worker.current_version)
    assert anchors[:1] == [2]


def test_equal_divergence_and_growth_with_the_learning_rate_keep_the_rounds(monkeypatch):
    assert lowered_anchors(monkeypatch, lambda worker: 0.2) == []
    warm = lowered_anchors(monkeypatch, lambda worker: 0.0015 * worker.current_lr, warm_up=1.03)
    assert warm == []


def measured(state):
    """Epochs with a divergence: one that closes with another epoch's round has none."""
    return [metrics for metrics in state.metrics if not math.isnan(metrics.divergence)]


@over(WAYS)
def test_a_replica_that_drifts_shows_in_metrics_and_statistics(way):
    handle = run(way)
    state = handle.join(WAIT_S)
    assert max(m.divergence for m in measured(state)) > 0.01
    assert all(metrics.param_norm > 0 for metrics in measured(state))
    statistics = handle.statistics()
    assert statistics.divergence >= 0
    assert statistics.param_norm == measured(state)[-1].param_norm
    assert max(rank.divergence for rank in statistics.ranks) == statistics.divergence


@pytest.mark.parametrize("way", WAYS[:2], ids=["cpu", "thread"])
def test_the_numbers_are_those_of_the_definition(way):
    """One round an epoch, of ranks with equal samples: the average is their midpoint."""
    b = builder(train=drift, dataset=8, batch_size=2, way=way).partition_ratios([1, 1])
    state = b.anchor(2).max_anchor(2).no_divergence_guard().run().join(WAIT_S)
    (metrics,) = state.metrics
    # Rank 0 is at +2 and rank 1 at -20 after two batches: the mean is -9, each 11 away from it.
    assert metrics.num_averagings == 1
    assert metrics.param_norm == pytest.approx(9.0)
    assert metrics.divergence == pytest.approx(11.0 / 9.0)


@pytest.mark.parametrize(("way", "ranks"), [((SYNC, THREAD), 2), ((CADENCE, OVER_CPU), 1)])
def test_without_rounds_there_is_the_norm_alone(way, ranks):
    handle = run(way, train=lambda model, batch: -model.w.sum(), ranks=ranks)
    state = handle.join(WAIT_S)
    assert all(math.isnan(metrics.divergence) for metrics in state.metrics)
    first, last = (metrics.param_norm for metrics in state.metrics)
    assert last == pytest.approx(float(torch.linalg.vector_norm(state.params["w"])))
    assert first == pytest.approx(last / 2)
    assert handle.statistics().divergence is None
    assert handle.statistics().param_norm == last


def test_divergence_is_on_the_timeline_and_in_the_tables(tmp_path):
    timeline = Timeline()
    logger = CsvLogger(tmp_path / "run.csv")
    handle = run((CADENCE, OVER_CPU), timeline=timeline, metrics_fn=logger)
    state = handle.join(WAIT_S)
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, metrics, record in zip(rows, state.metrics, timeline.epochs(), strict=True):
        if metrics not in measured(state):
            continue
        assert float(row["divergence"]) == metrics.divergence == record["divergence"]
        assert float(row["param_norm"]) == metrics.param_norm == record["param_norm"]
        shown = dict(map(tuple, _epoch(metrics)["scalars"]))
        assert shown["divergence"] == metrics.divergence
        assert shown["param_norm"] == metrics.param_norm
    rounds = [e for e in timeline.events() if e.args.get("part") == "round"]
    assert max(e.args["divergence"] for e in rounds) == max(m.divergence for m in measured(state))
    json.loads(json.dumps(rounds[0].as_dict()))


def test_tensorboard_shows_divergence(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    logger = TensorBoardLogger(tmp_path)
    state = run((CADENCE, OVER_CPU), metrics_fn=logger).join(WAIT_S)
    found = accumulators.EventAccumulator(str(tmp_path))
    found.Reload()
    values = [event.value for event in found.Scalars("epoch/divergence")]
    assert values == pytest.approx([m.divergence for m in measured(state)])
    assert values


def test_tables_leave_out_values_that_were_not_measured(tmp_path):
    logger = CsvLogger(tmp_path / "run.csv")
    state = run((SYNC, THREAD), train=lambda model, batch: -model.w.sum(), metrics_fn=logger).join(
        WAIT_S
    )
    with (tmp_path / "run.csv").open(newline="") as file:
        (first, *_) = list(csv.DictReader(file))
    assert "divergence" not in first
    assert float(first["param_norm"]) == state.metrics[0].param_norm


def test_metrics_of_an_earlier_version_are_read():
    state = run((CADENCE, OVER_CPU)).join(WAIT_S)
    saved = encode(state.metrics[0])
    assert decode(EpochMetrics, saved, "metrics") == state.metrics[0]
    del saved["divergence"], saved["param_norm"]
    again = decode(EpochMetrics, saved, "metrics")
    assert math.isnan(again.divergence)
    known = replace(again, divergence=0.0, param_norm=0.0)
    assert known == replace(state.metrics[0], divergence=0.0, param_norm=0.0)
