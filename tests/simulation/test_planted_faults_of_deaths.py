"""Faults planted in the handling of deaths, each of which the simulator must find."""

from __future__ import annotations

import dataclasses
import random

import pytest

from coordinator import machine
from coordinator import messages as m
from coordinator.config import ApplyPolicy, AverageBackend, CoordinatorConfig
from coordinator.epochs import EpochScheduler
from coordinator.failure_recovery import FailureRecovery, RecoveryPhase
from coordinator.ledger import BatchLedger, RankLedger
from coordinator.rounds import RoundRunner
from coordinator.run_state import RankState, RunState
from coordinator.steps import StepQueue
from runtime.worker.flow import WorkerFlow
from runtime.worker.lockstep import LockstepProgress
from runtime.worker.plan_steps import PlanSteps
from runtime.worker.protocol import WorkerProtocol
from tests.simulation.finding import STUCK, assert_is_found, drawn
from tests.simulation.harness import Simulation, SimulationFailed
from tests.simulation.schedule import Death, Pace, Schedule
from tests.support.pairs import SCALE

NOT_ASSIGNED = "reports batches that it was not assigned"


def without(monkeypatch, owner, name, dropped):
    """Drop the messages that ``dropped`` selects."""
    send = getattr(owner, name)

    def dropping(self, rank, message):
        if not dropped(message):
            send(self, rank, message)

    monkeypatch.setattr(owner, name, dropping)


def test_unsettled_batches_not_reopened_after_a_death_are_found(monkeypatch):
    reopen_rank = BatchLedger.reopen_rank

    def forgetful(self, rank, shares, *, in_round=True):
        settled = self.by_rank[rank]
        settled.in_round, lost = [*settled.in_round, *settled.trained], settled.trained
        settled.trained = []
        self.settle(rank)
        reopen_rank(self, rank, shares, in_round=in_round)
        assert lost is not None

    monkeypatch.setattr(BatchLedger, "reopen_rank", forgetful)
    assert_is_found("is closed without the effect of", first=66)


def test_assigned_batches_not_reopened_after_a_death_are_found(monkeypatch):
    reopen_rank = BatchLedger.reopen_rank

    def forgetful(self, rank, shares, *, in_round=True):
        self.by_rank[rank].assigned.clear()
        reopen_rank(self, rank, shares, in_round=in_round)

    monkeypatch.setattr(BatchLedger, "reopen_rank", forgetful)
    assert_is_found(STUCK)


def test_a_share_kept_for_a_dead_rank_is_found(monkeypatch):
    monkeypatch.setattr(BatchLedger, "_redistribute_quota", lambda self, epoch, rank, shares: None)
    assert_is_found(STUCK)


def test_a_round_that_waits_for_a_dead_rank_is_found(monkeypatch):
    monkeypatch.setattr(RoundRunner, "on_death", lambda self, rank: True)
    assert_is_found(STUCK, first=66)


def test_a_round_with_unreported_training_of_a_dead_rank_is_found(monkeypatch):
    on_death = RoundRunner.on_death

    def trusting(self, rank):
        going_on = on_death(self, rank)
        self.round.must_fail = False
        return going_on or on_death(self, rank)

    monkeypatch.setattr(RoundRunner, "on_death", trusting)
    assert_is_found("but the average holds", first=106)


def test_a_round_that_is_not_undone_is_found(monkeypatch):
    without(
        monkeypatch, Simulation, "_send_to_worker", lambda message: isinstance(message, m.Rollback)
    )
    assert_is_found("start from different averages")


def test_counters_that_are_not_restored_when_a_round_is_undone_are_found(monkeypatch):
    rolled_back = WorkerProtocol.on_rolled_back

    def careless(self, round_id):
        batches, samples = self.batches, self.samples
        undone = rolled_back(self, round_id)
        self.batches, self.samples = batches, samples
        return undone

    monkeypatch.setattr(WorkerProtocol, "on_rolled_back", careless)
    assert_is_found("samples for the batches")


def test_ranks_left_in_a_broken_collective_are_found(monkeypatch):
    monkeypatch.setattr(Simulation, "_abort", lambda self, generation: None)
    assert_is_found(STUCK)


def test_a_group_that_is_not_replaced_is_found(monkeypatch):
    without(
        monkeypatch, Simulation, "_send_to_worker", lambda message: isinstance(message, m.Regroup)
    )
    assert_is_found(STUCK)


def test_a_limit_on_the_last_rank_is_found(monkeypatch):
    continue_alone = FailureRecovery.continue_alone

    def quietly(self):
        sent = len(self._run.commands)
        continue_alone(self)
        del self._run.commands[sent:]

    monkeypatch.setattr(FailureRecovery, "continue_alone", quietly)
    assert_is_found(STUCK, first=39)


def test_an_evaluation_that_dies_with_the_lead_is_found(monkeypatch):
    monkeypatch.setattr(EpochScheduler, "orphaned", lambda self: None)
    assert_is_found(STUCK, first=487)


def test_lockstep_ranks_without_a_halt_message_are_found(monkeypatch):
    without(monkeypatch, Simulation, "_send_to_worker", lambda message: isinstance(message, m.Halt))
    assert_is_found(STUCK)


def test_a_step_counted_by_reports_is_found(monkeypatch):
    """Unreported batches of the dead rank would be trained twice."""
    agree = StepQueue.agree

    def by_reports(self, num_steps):
        with monkeypatch.context() as patch:
            patch.setattr(StepQueue, "_num_batches", lambda self, num_global: self.settled)
            return agree(self, num_steps)

    monkeypatch.setattr(StepQueue, "agree", by_reports)
    assert_is_found("the plan begins at", first=158)


def test_a_laggard_that_copies_nothing_is_found(monkeypatch):
    monkeypatch.setattr(LockstepProgress, "position", property(lambda self: (0, 0)))
    assert_is_found("is closed without the effect of", first=258)


def test_a_plan_assigned_before_all_have_halted_is_found(monkeypatch):
    """The steps of the first rank that halted are taken for those of all."""

    def hasty(self):
        for rank in self.survivors if self._halted else ():
            first = next(iter(self._halted.values()))
            self._halted.setdefault(rank.rank, dataclasses.replace(first, rank=rank.rank))
        return bool(self._halted) and self.phase is RecoveryPhase.HALTING

    monkeypatch.setattr(FailureRecovery, "all_halted", property(hasty))
    assert_is_found("the plan begins at", first=158)


def test_a_plan_kept_through_a_halt_is_found(monkeypatch):
    halt = WorkerFlow._halt

    def stubborn(self, *args, **kwargs):
        plan = self.protocol.plan
        halt(self, *args, **kwargs)
        if plan is not None:
            self.protocol.plans.append(plan)

    monkeypatch.setattr(WorkerFlow, "_halt", stubborn)
    assert_is_found("the plan begins at")


def test_training_that_a_halted_rank_does_not_report_is_found(monkeypatch):
    send = WorkerFlow._send_halted

    def silent(self, *args):
        with monkeypatch.context() as patch:
            patch.setattr(self._reporter, "take_report", lambda: None)
            send(self, *args)

    monkeypatch.setattr(WorkerFlow, "_send_halted", silent)
    assert_is_found("reports batches that it was not assigned", first=258)


def test_a_batch_assigned_to_a_dead_rank_is_found(monkeypatch):
    assign_batches = EpochScheduler.assign_batches
    assignable = RankState.LIVE, RankState.DEAD

    def to_all(self):
        with monkeypatch.context() as patch:
            all_ranks = property(lambda run: [r for r in run.ranks if r.state in assignable])
            patch.setattr(RunState, "live", all_ranks)
            assign_batches(self)

    monkeypatch.setattr(EpochScheduler, "assign_batches", to_all)
    assert_is_found("which is dead: StartEpoch", first=97)


def test_batches_kept_by_a_dead_rank_are_found(monkeypatch):
    reopen_rank = BatchLedger.reopen_rank

    def hoarding(self, rank, shares, *, in_round=True):
        held = list(self.by_rank[rank].assigned)
        reopen_rank(self, rank, shares, in_round=in_round)
        self.by_rank[rank] = RankLedger()
        self.by_rank[rank].assigned.extend(held)

    monkeypatch.setattr(BatchLedger, "reopen_rank", hoarding)
    assert_is_found(STUCK, first=253)


def two_deaths(seed):
    """The second death occurs while the ranks regroup after the first."""
    rng = random.Random(seed)
    first_s = rng.uniform(0.01, 0.03)
    config = CoordinatorConfig(
        devices=("cpu",) * 5,
        num_samples=150,
        batch_size=5,
        num_epochs=2,
        policy=ApplyPolicy.SYNC,
        backend=AverageBackend.THREAD,
        continue_on_failure=True,
    )
    return Schedule(
        seed=seed,
        config=config,
        paces=((Pace(start_s=0.0, batch_s=0.004),),) * 5,
        delay_s=0.0002,
        linger_s=0.03,
        load_chance=0.5,
        load_s=0.01,
        torn_chance=1.0,
        deaths=(
            Death(rank=1, at_s=first_s, vanishes=False),
            Death(rank=2, at_s=first_s + rng.uniform(0.005, 0.04), vanishes=False),
        ),
    )


def _run_all(count):
    for seed in range(count):
        Simulation(two_deaths(seed)).run()


def test_a_plan_sent_before_a_halt_and_trained_after_it_is_found(monkeypatch):
    """A rank leaves the connection of a group late, after the group broke."""
    _run_all(60 if SCALE == 1 else 200)
    begin_plan = WorkerProtocol.begin_plan

    def even_halted(self):
        if self.plan is None and self.plans and not self.leaving:
            self.plan = self.plans.popleft()
        return begin_plan(self) or self.plan

    monkeypatch.setattr(WorkerProtocol, "accepts", lambda self, plan: not self.leaving)
    monkeypatch.setattr(WorkerProtocol, "begin_plan", even_halted)
    with pytest.raises(
        SimulationFailed, match=r"^seed \d+: Violation: .*(trained others|the plan begins at)"
    ):
        _run_all(200)


def undone(seed):
    """Rank 0 dies once it has reported steps whose results others may have lost."""
    schedule, rng = two_deaths(seed), random.Random(seed)
    return dataclasses.replace(
        schedule,
        load_chance=0.0,
        report_interval_s=0.0,
        deaths=(Death(rank=0, at_s=rng.uniform(0.01, 0.3), vanishes=False),),
    )


def test_samples_released_while_a_step_may_be_undone_are_found(monkeypatch):
    for seed in range(20):
        Simulation(undone(seed)).run()
    monkeypatch.setattr(machine, "STEPS_BACK", 0)
    assert_is_found("was released", undone)


def test_samples_released_after_training_are_found(monkeypatch):
    first_unsettled = BatchLedger.first_unsettled

    def forgetful(self):
        trained = [led.trained for led in self.by_rank]
        for led in self.by_rank:
            led.trained = []
        found = first_unsettled(self)
        for led, spans in zip(self.by_rank, trained, strict=True):
            led.trained = spans
        return found

    monkeypatch.setattr(BatchLedger, "first_unsettled", forgetful)
    assert_is_found("was released", first=66)


def lockstep(schedule):
    c = schedule.config
    return c.policy is ApplyPolicy.SYNC and c.world_size > 1


def test_a_global_batch_that_shrinks_with_a_death_is_found(monkeypatch):
    become = FailureRecovery._resume

    def shrinking(self):
        become(self)
        self._run.per_global = len(self.survivors)

    monkeypatch.setattr(FailureRecovery, "_resume", shrinking)
    assert_is_found("a step of", drawn(lockstep))


def test_a_piece_that_counts_as_a_batch_is_found(monkeypatch):
    """After a death a piece is a part of the global batch, and not one of its batches."""
    report = StepQueue.report

    def each(self, rank, num_pieces):
        num_slices = self.plans[0].num_slices if self.plans else 1
        return report(self, rank, num_pieces * num_slices)

    monkeypatch.setattr(StepQueue, "report", each)
    assert_is_found(NOT_ASSIGNED, drawn(lambda s: lockstep(s) and s.deaths))


def test_a_short_global_batch_that_counts_as_a_whole_one_is_found(monkeypatch):
    report_steps = BatchLedger.report_steps

    def whole(self, rank, num_pieces):
        num = self.queue.plans[0].per_global if self.queue.plans else 1
        return -(-report_steps(self, rank, num_pieces) // num) * num

    monkeypatch.setattr(BatchLedger, "report_steps", whole)
    assert_is_found("the plan begins at", drawn(lockstep))


def test_slices_that_are_counted_as_global_batches_are_found(monkeypatch):
    """With few ranks a step has several slices of the global batch."""
    init = PlanSteps.__init__

    def of_slices(self, plan, config):
        init(self, plan, config)
        self.steps = [[size] for step in self.steps for size in step]

    monkeypatch.setattr(PlanSteps, "__init__", of_slices)
    assert_is_found("batches trained [(", drawn(lockstep))
