"""Training and messages while an average is computed, and its contents."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from coordinator import messages as m
from coordinator.averaging import Averager
from runtime.replica.flat import FlatState
from tests.deadlock.faults import BOUND_S
from tests.deadlock.stage import running
from tests.simulation.harness import Simulation
from tests.simulation.schedule import Schedule
from tests.simulation.test_unequal_speeds import schedule_of
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    THREAD,
    builder,
    count_up,
    counter,
)
from tests.unit.coordinator.test_machine import at_a_round
from tests.unit.worker.test_worker import MANY, Alone, payload, start

both = pytest.mark.parametrize("policy", [CADENCE, ASYNC], ids=lambda p: p.name)


class HeldAverage:
    """Blocks the first average until the test releases it; records inputs and results."""

    def __init__(self, monkeypatch):
        self.computing, self.opened = threading.Event(), threading.Event()
        self.before, self.after, self.devices = [], [], set()
        average = Averager.average

        def held(averager, payloads, weights, squares):
            self.devices |= {str(t.device) for p in payloads for t in p.params}
            if not self.before:
                self.before = [float(p.params[0][0]) for p in payloads]
                self.computing.set()
                assert self.opened.wait(BOUND_S)
                self.after = [float(p.params[0][0]) for p in payloads]
            return average(averager, payloads, weights, squares)

        monkeypatch.setattr(Averager, "average", held)

    def await_start(self):
        assert self.computing.wait(BOUND_S), "no average was ever computed"


# -- training continues --------------------------------------------------------------------


@both
def test_batches_trained_while_an_average_is_computed_count_for_the_next(
    policy, faults, tap, monkeypatch
):
    """D19: counters subtract the snapshot's batches; every sample has one weight."""
    held, planted = HeldAverage(monkeypatch), faults()
    b = planted.builder(dataset=400, batch_size=1, epochs=2, way=(policy, OVER_CPU))
    handle = b.anchor(2).max_overshoot(1000).run()
    held.await_start()
    begun = dict(planted.steps)
    planted.wait_for(lambda: all(planted.steps[r] >= begun[r] + 5 for r in (0, 1)))
    held.opened.set()
    handle.join(BOUND_S)
    first, second = tap.averages[:2]
    assert sum(second.weights) >= 2 * 4  # at least what was trained meanwhile
    assert sum(sum(job.weights) for job in tap.averages) == 800
    assert sum(first.weights) < 800


def test_plans_and_releases_are_sent_while_an_average_is_computed(faults, tap, monkeypatch):
    """D19: averaging blocks neither dispatch nor throttling."""
    held, planted = HeldAverage(monkeypatch), faults()
    b = planted.builder(dataset=400, batch_size=1, way=(CADENCE, OVER_CPU))
    handle = b.anchor(2).max_batch_diff(1).run()
    held.await_start()
    plans, resumes = len(tap.sent(m.StartEpoch)), len(tap.sent(m.Resume))
    tap.wait_for(lambda: len(tap.sent(m.StartEpoch)) > plans + 5)
    tap.wait_for(lambda: len(tap.sent(m.Resume)) > resumes + 5)
    assert not tap.sent(m.Update)
    held.opened.set()
    assert [e.num_samples for e in handle.join(BOUND_S).metrics] == [400]


@both
def test_training_does_not_modify_snapshots(policy, faults, tap, monkeypatch):
    """S14: they own their memory, and carry their round and their batches."""
    held, planted = HeldAverage(monkeypatch), faults()
    b = planted.builder(dataset=400, batch_size=1, way=(policy, OVER_CPU))
    handle = b.anchor(2).max_overshoot(1000).run()
    held.await_start()
    begun = planted.steps[0]
    planted.wait_for(lambda: planted.steps[0] >= begun + 5)
    held.opened.set()
    handle.join(BOUND_S)
    assert held.before == held.after
    asked = [msg.round for msg in tap.sent(m.RequestParams, 0)]
    assert [s.round for s in tap.came(m.ParamSnapshot, 0)] == asked == sorted(set(asked))


@contextmanager
def one_batch_in_a_snapshot(train, model=counter):
    """A worker in its thread that trained a batch and gave a snapshot for round 1."""
    alone = Alone(train=train, model=model)
    with running(alone):
        alone.send(start(range(1)))
        alone.take_next(m.EpochReport)
        alone.send(m.RequestParams(round=1))
        assert alone.take_next(m.ParamSnapshot).num_batches == 1
        yield alone


def test_an_update_keeps_training_since_the_snapshot():
    """S8: a snapshot, two batches more, the average 10: 12, and two batches still count."""
    with one_batch_in_a_snapshot(count_up) as alone:
        alone.send(start(range(1, 3)))
        alone.take_next(m.EpochReport)
        alone.send(m.Update(round=1, average=payload(10.0), num_samples=8, budget=MANY))
        alone.take_next(m.SyncAck)
        assert (alone.w, alone.worker.protocol.batches) == (12.0, 2)


class Wide(nn.Module):
    """A parameter that takes a while to copy."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1 << 20, dtype=torch.float64))


def test_a_snapshot_after_an_update_contains_the_update(faults):
    """D16: the worker finds both after a step; the snapshot waits for the copy."""
    held = threading.Event()
    planted = faults().stall_at(rank=0, step=2, until=held)
    average = m.Payload(params=(torch.full((1 << 20,), 10.0, dtype=torch.float64),))
    update = m.Update(round=1, average=average, num_samples=4, budget=MANY)
    with one_batch_in_a_snapshot(planted, lambda device: Wide()) as alone:
        alone.send(start(range(1, 3)))
        planted.await_all()
        alone.send(update, m.RequestParams(round=2))
        held.set()
        second = alone.take_next(m.ParamSnapshot)
    assert (second.round, second.num_batches) == (2, 2)
    assert bool((second.payload.params[0] == 12.0).all())


# -- contents of averages ---------------------------------------------------------------------


def test_snapshots_are_cpu_tensors_on_any_device(tap, monkeypatch):
    """D17: the averaging thread never touches a device."""
    held = HeldAverage(monkeypatch)
    held.opened.set()
    builder(way=(CADENCE, OVER_CPU)).anchor(1).run().join(BOUND_S)
    assert held.devices == {"cpu"}
    elsewhere = FlatState(nn.BatchNorm1d(4, device="meta")).new_payload()
    tensors = (*elsewhere.params, *elsewhere.buffers, *elsewhere.other_buffers)
    assert [str(t.device) for t in tensors] == ["cpu"] * 3


# -- effect of a round on the cadence -----------------------------------------------------------


def finish_round(run, number, divergence):
    """Complete a round over a collective with this divergence."""
    for rank in (0, 1):
        run.report(rank, 0)
        run.handle(m.SyncAck(rank=rank, round=number, divergence=divergence, sync_s=1e-9))


def test_the_divergence_of_one_round_does_not_leak_into_the_next():
    """D28: one bad round among good ones; the cadence is not driven down to 1."""
    run = at_a_round(THREAD, anchor=2, num_samples=10_000)
    anchors = []
    for number, divergence in enumerate([0.0, 9.0] + [0.0] * 12, start=1):
        assert run.to(m.SyncNow)[-1].round == number
        finish_round(run, number, divergence)
        anchors.append(run.machine.run_state.elche.anchor)
        for _ in range(40):
            if run.to(m.SyncNow)[-1].round > number:
                break
            for rank in (0, 1):
                if run.machine.run_state.ranks[rank].num_queued:
                    run.end_plan(rank, run.to(m.StartEpoch, rank)[-2].plan.num_batches)
    assert min(anchors) == 2


@both
def test_lasting_divergence_lowers_the_anchor(policy):
    """S11: the guard's last action is reachable, on the virtual clock."""
    settings = {"num_samples": 8000, "num_epochs": 1, "anchor": 8, "max_anchor": 8}
    for divergence, expected in ((50.0, 1), (0.0, 8)):
        s = schedule_of(policy, THREAD, slowness=(1.0, 1.0), **settings)
        config = replace(s.config, divergence_threshold=0.05)
        run = Simulation(Schedule(config=config, paces=s.paces, divergence=divergence)).run()
        assert run.machine.run_state.elche.anchor == expected


@pytest.mark.parametrize("backend", [THREAD, OVER_CPU], ids=lambda b: b.name)
def test_the_cost_of_averaging_reaches_the_cadence_over_every_transport(backend):
    """S10: rounds that cost five batches are spread out; free ones are not."""
    anchors = []
    for cost_s in (0.02, 0.0):
        s = schedule_of(
            CADENCE, backend, slowness=(1.0, 1.0), num_samples=20_000, num_epochs=1, anchor=4
        )
        costly = Schedule(config=s.config, paces=s.paces, sync_s=cost_s, average_s=2 * cost_s)
        anchors.append(Simulation(costly).run().machine.run_state.elche.anchor)
    assert anchors[0] >= 20
    assert anchors[1] == 4
