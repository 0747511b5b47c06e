"""Schedules with real tensors and averagers: the result contains every effect once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from coordinator import messages as m
from coordinator.averaging import Averager
from coordinator.config import ApplyPolicy, AverageBackend
from runtime.replica.averager import ReplicaAverager
from runtime.replica.flat import FlatState
from runtime.worker.protocol import WorkerProtocol
from tests.simulation.finding import assert_is_found
from tests.simulation.harness import simulate
from tests.simulation.schedule import draw_schedule
from tests.support.pairs import SCALE

NUM_SCHEDULES = 110 if SCALE == 1 else 150 * SCALE
"""Number of schedules; each takes four times as long as one without tensors."""


def draw_rounds(seed):
    """A schedule with rounds."""
    schedule = draw_schedule(seed)
    while schedule.config.world_size == 1 or schedule.config.policy is ApplyPolicy.SYNC:
        seed += 10**6
        schedule = draw_schedule(seed)
    return schedule


def test_every_effect_is_in_the_tensors_exactly_once():
    seen = Counter()
    for seed in range(NUM_SCHEDULES):
        run = simulate(seed, draw=draw_rounds, tensors=True)
        over_cpu = run.schedule.config.backend is AverageBackend.CPU
        for worker in run.workers:
            seen.update(worker.replica.seen)
        seen["results over the CPU" if over_cpu else "results"] += (
            run.machine.outcome.payload is not None
        )
        seen["saved"] += len(run.saved)
    for what in ("updated", "shown", "averaged", "saved", "results over the CPU", "results"):
        assert seen[what] >= 30, (what, seen)
    for what in ("undone", "a round that failed"):
        assert seen[what] >= 3, (what, seen)


@pytest.mark.parametrize("seed", [1, 66, 77])
def test_tensors_do_not_change_a_history(seed):
    plain, real = simulate(seed, draw=draw_rounds), simulate(seed, draw=draw_rounds, tensors=True)
    assert plain.num_events == real.num_events
    assert [line[:2] for line in plain.trace] == [line[:2] for line in real.trace]


def test_a_round_not_undone_is_found(monkeypatch):
    monkeypatch.setattr(ReplicaAverager, "undo_all_reduce", lambda self: None)
    assert_is_found("undone: effects in parameters", draw_rounds, tensors=True, first=66)


def forget_parameters(averager):
    for change in averager._params_before:
        change.zero_()


def forget_buffers(averager):
    averager._buffers_before = ()


def forget_flags(averager):
    for change in averager._buffers_before:
        if change.dtype is torch.int8:
            change.zero_()


@pytest.mark.parametrize(
    ("forget", "what", "first"),
    [
        (forget_parameters, "effects in parameters", 66),
        (forget_buffers, "effects in buffers", 66),
        (forget_flags, "flags", 106),
    ],
)
def test_changes_not_undone_are_found(forget, what, first, monkeypatch):
    undo = ReplicaAverager.undo_all_reduce

    def forgetful(self):
        forget(self)
        undo(self)

    monkeypatch.setattr(ReplicaAverager, "undo_all_reduce", forgetful)
    assert_is_found(f"undone: {what}", draw_rounds, tensors=True, first=first)


def test_integers_of_the_first_rank_are_found(monkeypatch):
    def first(self, others, num_samples):
        for flat in others:
            self.collective.broadcast_(flat, src=0)

    monkeypatch.setattr(ReplicaAverager, "_copy_from_heaviest", first)
    assert_is_found("averaged: counts", draw_rounds, tensors=True)


def test_an_average_that_loses_training_since_the_snapshot_is_found(monkeypatch):
    def replacing(self, average, meanwhile=None):
        self.replace(average)
        if meanwhile is not None:
            meanwhile()

    monkeypatch.setattr(ReplicaAverager, "apply", replacing)
    assert_is_found("updated: effects in parameters", draw_rounds, tensors=True, first=19)


def test_an_average_without_weights_is_found(monkeypatch):
    average = Averager.average

    def equal(self, payloads, weights, squares=()):
        return average(self, payloads, [int(w > 0) for w in weights], squares)

    monkeypatch.setattr(Averager, "average", equal)
    assert_is_found("effects in parameters", draw_rounds, tensors=True)


def test_a_snapshot_without_buffers_is_found(monkeypatch):
    measured = FlatState.snapshot_with_norms

    def careless(self, payload):
        held = [t.clone() for t in payload.buffers]
        squares = measured(self, payload)
        for buffer, before in zip(payload.buffers, held, strict=True):
            buffer.copy_(before)
        return squares

    monkeypatch.setattr(FlatState, "snapshot_with_norms", careless)
    assert_is_found("effects in buffers", draw_rounds, tensors=True)


def test_samples_in_place_of_weights_are_found(monkeypatch):
    monkeypatch.setattr(m.ParamSnapshot, "round_weight", property(lambda self: self.num_samples))
    assert_is_found("for the batches", draw_rounds, tensors=True)


def test_samples_in_place_of_weights_over_a_collective_are_found(monkeypatch):
    def add_weight(self, weight):
        self.weight = self._weight_since = self.samples

    monkeypatch.setattr(WorkerProtocol, "add_weight", add_weight)
    assert_is_found("for the batches", draw_rounds, tensors=True)
