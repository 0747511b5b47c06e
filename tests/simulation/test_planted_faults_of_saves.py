"""Faults planted in checkpoints, each of which the simulator must find."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from coordinator import coordinator_checkpoint, machine, saving
from coordinator import messages as m
from coordinator.average_tasks import AverageTasks
from coordinator.config import ApplyPolicy
from coordinator.coordinator_checkpoint import RankCut, capture_run
from coordinator.epochs import EpochScheduler
from coordinator.ledger import BatchLedger
from coordinator.run_state import Phase, RunState
from coordinator.saving import RunCheckpointer
from tests.simulation.finding import STUCK, assert_is_found, drawn
from tests.simulation.harness import Hooks, Simulation, SimulationFailed
from tests.simulation.saves import Origin
from tests.simulation.schedule import draw_schedule
from tests.support.pairs import SCALE


def test_sums_with_reports_after_the_cut_are_found(monkeypatch):
    def late(run, closing, elapsed_s, cuts):
        epochs = [*(epoch for epoch, _ in closing), *run.ledger.epochs]
        now = {rank: RankCut.of(run, epochs, rank) for rank in cuts}
        return capture_run(run, closing, elapsed_s, now)

    monkeypatch.setattr(saving, "capture_run", late)
    assert_is_found("samples of an epoch are in the checkpoint")


class LateParts(Hooks):
    """The reply of one rank arrives late."""

    def extra_delay_s(self, sim, rank, message):
        late = isinstance(message, m.CapturedState) and rank == 1
        return 20 * sim.schedule.batch_s(rank, sim.now) if late else 0.0


def lockstep_schedules():
    for seed in range(3000):
        schedule = draw_schedule(seed)
        c = schedule.config
        if c.policy is ApplyPolicy.SYNC and c.world_size > 1 and schedule.saves_at_s:
            yield replace(schedule, deaths=(), collective_timeout_s=0.0)


def run_all(schedules, hooks):
    for schedule in schedules:
        Simulation(schedule, hooks).run()


def test_plans_that_are_sent_before_the_last_reply_of_a_cut_are_found(monkeypatch):
    seen = 0
    for schedule in itertools.islice(lockstep_schedules(), 60):
        seen += len(Simulation(schedule, LateParts()).run().saved)
    assert seen > 60
    monkeypatch.setattr(RunCheckpointer, "is_collecting", False)
    with pytest.raises(SimulationFailed, match=r"recorded, not trained: \[\("):
        run_all(lockstep_schedules(), LateParts())


def test_batches_in_flight_counted_as_consumed_are_found(monkeypatch):
    captured = coordinator_checkpoint._saved_epoch

    def forgetful(run, epoch, notes, *, epoch_s=None):
        state = captured(run, epoch, notes, epoch_s=epoch_s)
        if epoch_s is None:
            rest = {b for span in epoch.open.spans for b in span}
            done = (b for b in range(epoch.num_batches) if b not in rest)
            state = replace(state, consumed=tuple(range(b, b + 1) for b in done))
        return state

    monkeypatch.setattr(coordinator_checkpoint, "_saved_epoch", forgetful)
    assert_is_found("recorded, not trained: [(")


def test_ranks_that_capture_within_a_plan_are_found(monkeypatch):
    monkeypatch.setattr(EpochScheduler, "is_between_plans", True)
    assert_is_found("ranks captured other steps")


def test_a_cut_that_outlives_its_round_is_found(monkeypatch):
    monkeypatch.setattr(RunCheckpointer, "cancel", lambda self: None)
    assert_is_found(STUCK, first=87)


def test_a_last_checkpoint_without_the_last_batches_is_found(monkeypatch):
    freeze_final, settle, ending = RunCheckpointer.freeze_final, BatchLedger.settle, []

    def marking(self, finals):
        ending.append(True)
        freeze_final(self, finals)
        ending.clear()

    monkeypatch.setattr(RunCheckpointer, "freeze_final", marking)
    monkeypatch.setattr(
        BatchLedger, "settle", lambda self, rank: 0 if ending else settle(self, rank)
    )
    assert_is_found("trained, not recorded: [(", first=48)


def test_a_last_checkpoint_with_sums_of_a_rank_that_is_not_in_it_is_found(monkeypatch):
    freeze_final, reopen, ending = RunCheckpointer.freeze_final, BatchLedger.reopen_rank, []

    def marking(self, finals):
        ending.append(True)
        freeze_final(self, finals)
        ending.clear()

    def reopened(self, rank, shares, **how):
        if not ending:
            reopen(self, rank, shares, **how)

    monkeypatch.setattr(RunCheckpointer, "freeze_final", marking)
    monkeypatch.setattr(BatchLedger, "reopen_rank", reopened)
    assert_is_found("samples of an epoch are in the checkpoint", first=589)


def test_a_failure_that_rolls_no_round_back_is_found(monkeypatch):
    send = RunState.send

    def without(self, rank, message):
        if not (isinstance(message, m.Rollback) and self.phase is Phase.FAILING):
            send(self, rank, message)

    monkeypatch.setattr(RunState, "send", without)
    assert_is_found("trained, not recorded: [(", first=1520)


def test_consumed_batches_assigned_again_are_found(monkeypatch):
    open_epoch = coordinator_checkpoint._open_epoch

    def whole(run, saved):
        return open_epoch(run, replace(saved, consumed=()))

    monkeypatch.setattr(coordinator_checkpoint, "_open_epoch", whole)
    with pytest.raises(SimulationFailed, match="which rank -1 trained"):
        resume_all(replace(draw_schedule(seed), deaths=()) for seed in range(500))


def test_evaluations_that_ignore_training_before_a_resume_are_found(monkeypatch):
    restore = machine.restore_run

    def forgetful(run, saved):
        totals = tuple(replace(each, num_batches=0) for each in saved.ranks)
        restore(run, replace(saved, ranks=totals))

    monkeypatch.setattr(machine, "restore_run", forgetful)
    first = 1067 if SCALE == 1 else 0  # a seed that found the fault before
    with pytest.raises(SimulationFailed, match="evaluated after"):
        resume_all(
            replace(schedule, deaths=())
            for schedule in map(draw_schedule, range(first, 2000))
            if schedule.config.eval_every is not None
        )


@pytest.mark.parametrize(("policy", "first"), [(ApplyPolicy.CADENCE, 154), (ApplyPolicy.ASYNC, 21)])
def test_missing_evaluations_within_an_epoch_are_found(monkeypatch, policy, first):
    due = AverageTasks.due

    def alone(self, epoch):
        return [] if epoch is None and len(self._live()) > 1 else due(self, epoch)

    monkeypatch.setattr(AverageTasks, "due", alone)
    has_some = drawn(lambda s: s.config.eval_every is not None and s.config.policy is policy)

    def draw(seed):
        schedule = has_some(seed)
        return replace(schedule, config=replace(schedule.config, eval_every=2))

    assert_is_found("never evaluated within", draw, first=first)


def resume_all(schedules):
    for schedule in schedules:
        for command in Simulation(schedule).run().saved:
            if any(e.consumed for e in command.run.epochs):
                Simulation(replace(schedule, stop_at_s=None), origin=Origin(command)).run()
