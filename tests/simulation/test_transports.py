"""Runs that choose their backend: switches between rounds, fallbacks, deaths in between."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from coordinator import messages as m
from coordinator.backend_choice import BackendChoice
from coordinator.config import ApplyPolicy, AverageBackend, CoordinatorConfig
from coordinator.rounds import RoundRunner, SnapshotTransport
from coordinator.run_state import RunState
from tests.simulation.finding import NUM_SCHEDULES, STUCK, assert_is_found
from tests.simulation.harness import Simulation, simulate
from tests.simulation.schedule import (
    Death,
    Pace,
    Schedule,
    draw_late_schedule,
    draw_schedule,
)

CPU, THREAD, NCCL = AverageBackend.CPU, AverageBackend.THREAD, AverageBackend.NCCL


def choosing(draw):
    """A function that draws schedules from a seed until one has a choice of backends."""

    def drawn(seed):
        schedule = draw(seed)
        while not schedule.config.alternatives:
            seed += 10**6
            schedule = draw(seed)
        return schedule

    return drawn


@pytest.mark.parametrize("late", [False, True])
def test_every_run_with_a_choice_ends_with_every_sample_in_the_result_once(late):
    seen = Counter()
    draw = choosing(draw_late_schedule if late else draw_schedule)
    for seed in range(NUM_SCHEDULES // 4):
        run = simulate(seed, draw=draw)
        seen["choices"] += len(run.choices)
        seen["switched"] += any(not c.failed and c.backend is not c.before for c in run.choices)
        seen["fell back", run.schedule.config.policy is ApplyPolicy.SYNC] += any(
            c.failed for c in run.choices
        )
        seen["with a death"] += bool(run.choices and run.dead)
        seen["stopped"] += bool(run.choices and run.machine.outcome.stopped)
        seen["unconnected"] += bool(run.unconnected)
    for what in ("choices", "with a death", "stopped", "unconnected", ("fell back", False)):
        assert seen[what] >= 2, what
    assert seen["switched" if late else ("fell back", True)] >= 2


# -- choice of the backend ----------------------------------------------------------------------


def steady(**settings):
    """Two ranks of one speed, with batches of 10 ms and rounds every 20 ms or so."""
    config = CoordinatorConfig(
        devices=("cpu", "cpu"),
        num_samples=settings.pop("num_samples", 400),
        batch_size=2,
        num_epochs=1,
        backend=settings.pop("backend", CPU),
        alternatives=settings.pop("alternatives", (THREAD,)),
        policy=settings.pop("policy", ApplyPolicy.CADENCE),
        anchor=2,
        max_anchor=settings.pop("max_anchor", 2),
        continue_on_failure=True,
    )
    pace = (Pace(start_s=0.0, batch_s=0.01),)
    values = {"delay_s": 1e-5, "average_s": 1e-4, "sync_s": 1e-4, "jitter": 0.1}
    return Schedule(config=config, paces=(pace, pace), **(values | settings))


@pytest.mark.parametrize("policy", [ApplyPolicy.CADENCE, ApplyPolicy.ASYNC])
@pytest.mark.parametrize(("backend", "alternatives"), [(CPU, (THREAD,)), (NCCL, (CPU,))])
@pytest.mark.parametrize("slow", ["collective", "coordinator"])
def test_the_cheaper_backend_is_chosen_within_ten_rounds(slow, backend, alternatives, policy):
    costs = {"sync_s": 0.05} if slow == "collective" else {"average_s": 0.2}
    sim = Simulation(steady(backend=backend, alternatives=alternatives, policy=policy, **costs))
    at = []
    handle = sim._execute

    def execute(command):
        if isinstance(command, m.BackendChosen):
            at.append(sim.machine.rounds.round.id)
        handle(command)

    sim._execute = execute
    sim.run()
    chosen = sim.choices[0]
    assert (chosen.backend is CPU) == (slow == "collective"), chosen.reason
    assert at[0] <= 10
    assert "ms a round" in chosen.reason
    assert "CPU" in chosen.reason


@pytest.mark.parametrize("target", [0.1, 0.5])
def test_training_during_an_average_is_charged_at_the_overhead_target(monkeypatch, target):
    """Ranks train during a round over the coordinator, but not over a collective."""
    costs = {CPU: [], THREAD: []}
    record_round = BackendChoice.record_round

    def noting(self, backend, cost, anchor):
        costs[backend].append(cost)
        return record_round(self, backend, cost, anchor)

    monkeypatch.setattr(BackendChoice, "record_round", noting)
    average_s = 0.004
    schedule = steady(average_s=average_s, sync_s=0.0, jitter=0.0, delay_s=0.0)
    config = replace(schedule.config, overhead_target=target)
    Simulation(replace(schedule, config=config)).run()
    measured = [cost for cost in costs[CPU][1:] if cost is not None]
    assert len(measured) >= 2
    for cost in measured:  # from the request, after at most a batch, to the average
        assert average_s <= cost.stale_s / (2 * target) <= average_s + 0.011
        assert cost.total_s == cost.ranks_s + cost.own_s + cost.stale_s
    assert len(costs[THREAD]) >= 3
    assert {cost.stale_s for cost in costs[THREAD]} == {0.0}


def test_backends_are_measured_again_after_a_death():
    pace = (Pace(start_s=0.0, batch_s=0.01),)
    schedule = steady(num_samples=900)
    config = replace(schedule.config, devices=("cpu",) * 3)
    death = Death(rank=1, at_s=0.8, vanishes=False)
    schedule = replace(schedule, config=config, paces=(pace,) * 3, deaths=(death,))
    run = Simulation(schedule).run()
    assert [c.failed for c in run.choices] == [False, False]


def test_a_late_rank_is_not_a_fault_of_the_backend():
    """Repeated timeouts end the run, even if another backend is usable."""
    schedule = steady(
        backend=NCCL,
        alternatives=(CPU,),
        collective_timeout_s=0.001,
        jitter=0.0,
        sync_s=0.0,
    )
    paces = ((Pace(start_s=0.0, batch_s=0.001),), (Pace(start_s=0.0, batch_s=0.5),))
    config = replace(schedule.config, max_failed_rounds=2)
    run = Simulation(replace(schedule, paces=paces, config=config)).run()
    assert run.machine.run_state.num_failed_rounds >= 1
    assert not any(c.failed for c in run.choices)


# -- planted faults ------------------------------------------------------------------------


def test_a_switch_with_a_round_in_flight_is_found(monkeypatch):
    """The transport is replaced while its round is in flight."""
    take = RoundRunner.receive

    def switching(self, event, now):
        self.transport = self.next_transport
        return take(self, event, now)

    monkeypatch.setattr(RoundRunner, "receive", switching)
    assert_is_found(STUCK, choosing(draw_schedule))


def test_one_rank_on_the_old_transport_is_found(monkeypatch):
    ask = SnapshotTransport.request

    def lopsided(self, now):
        if self._run.backend_choice.is_trial(CPU) or len(self._round.ranks) < 2:
            ask(self, now)
            return
        *asked, left = self._round.ranks
        self._round.ranks = tuple(asked)
        ask(self, now)
        self._round.ranks = (*asked, left)
        self._run.send(left, m.SyncNow(round=self._round.id))

    monkeypatch.setattr(SnapshotTransport, "request", lopsided)
    assert_is_found(STUCK, choosing(draw_schedule), first=81)


def test_a_fallback_that_counts_samples_twice_is_found(monkeypatch):
    """Unsettled batches are settled, and averaged again by the next round."""
    leave = RunState.exclude_backend

    def settling(self, backend, why):
        for rank in self.live:
            self.ledger.freeze(rank.rank)
            self.ledger.settle(rank.rank)
            self.global_step += rank.since_round
        return leave(self, backend, why)

    monkeypatch.setattr(RunState, "exclude_backend", settling)
    assert_is_found("batches records", choosing(draw_schedule))


def test_a_fallback_that_does_not_undo_its_last_round_is_found(monkeypatch):
    """Some ranks keep the average of a round that failed on another."""
    leave = RunState.exclude_backend

    def keeping(self, backend, why):
        left = leave(self, backend, why)
        self.commands[:] = [
            c for c in self.commands if not isinstance(getattr(c, "message", None), m.Rollback)
        ]
        return left

    monkeypatch.setattr(RunState, "exclude_backend", keeping)
    assert_is_found("start from different averages", choosing(draw_schedule), first=34)


def test_faults_of_an_excluded_backend_are_not_counted_for_the_next():
    """Failed rounds, then a group that cannot be connected: the next backend starts at 0."""
    seen = Counter()

    def draw(seed):
        schedule = steady(policy=ApplyPolicy.SYNC, backend=NCCL)
        return replace(schedule, seed=seed, fault_chance=1.0, unconnected_chance=0.3)

    for seed in range(40):
        run = simulate(seed, draw=draw)
        assert run.machine.outcome.failure is None, seed
        seen[run.machine.run_state.backend_choice.chosen] += 1
    assert seen == {THREAD: 40}
