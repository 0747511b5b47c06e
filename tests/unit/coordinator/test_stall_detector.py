"""Events that count as progress, and the end of a run without any."""

from __future__ import annotations

import pytest

from coordinator import messages as m
from coordinator.config import ApplyPolicy
from coordinator.messages import AbortCollective, ReportStall
from coordinator.run_errors import RunAborted, RunStalled
from coordinator.run_state import Phase
from tests.unit.coordinator.test_machine import CPU, EMPTY, THREAD, Run, at_a_round

TIMEOUT_S = 100.0


def stalled(run):
    """Let the stall timeout pass; returns the commands."""
    run.now = run.machine.deadline
    run.others.clear()
    run.sent.clear()
    run.handle(m.Tick())
    return run.others


def later(run, event):
    """Handle an event just before the deadline; returns True if it moved the deadline."""
    before = run.machine._stall_detector.deadline
    run.now = before - 1.0
    run.handle(event)
    after = run.machine._stall_detector.deadline
    assert after in (before, run.now + TIMEOUT_S)
    return after > before


def fresh(**settings):
    return Run(stall_timeout_s=TIMEOUT_S, **settings)


def stats(batches):
    return m.ReportStats(num_batches=batches, num_samples=batches, compute_s=0.01 * batches)


def report(rank=0, batches=1):
    return m.BatchReport(rank=rank, epoch=0, stats=stats(batches))


# -- progress --------------------------------------------------------------------


def test_a_rank_that_becomes_ready_is_progress():
    run = fresh(ready=False)
    run.machine.restart_stall_timer(0.0)
    assert later(run, m.Ready(rank=0))


@pytest.mark.parametrize("kind", [m.BatchReport, m.EpochReport])
def test_batches_are_progress_but_an_empty_report_is_not(kind):
    run = fresh()
    assert not later(run, kind(rank=0, epoch=0, stats=stats(0)))
    assert later(run, kind(rank=0, epoch=0, stats=stats(1)))


def test_batches_reported_with_a_snapshot_are_progress_but_the_snapshot_is_not():
    run = at_a_round(stall_timeout_s=TIMEOUT_S, snapshot_timeout_s=1e6)
    snapshot = {"round": 1, "payload": EMPTY, "num_samples": 1, "num_batches": 1}
    assert later(run, m.ParamSnapshot(rank=0, **snapshot, report=report(0)))
    assert not later(run, m.ParamSnapshot(rank=1, **snapshot))


@pytest.mark.parametrize("backend", [CPU, THREAD])
def test_a_round_is_progress_when_the_last_rank_completes_it(backend):
    run = at_a_round(backend, stall_timeout_s=TIMEOUT_S)
    if backend is CPU:
        run.snapshot(0, 1), run.snapshot(1, 1)
        assert not later(run, m.Averaged(round=1, average=EMPTY, num_samples=2))
    assert not later(run, m.SyncAck(rank=0, round=1))
    assert later(run, m.SyncAck(rank=1, round=1))


def test_a_failed_round_is_not_progress():
    run = at_a_round(THREAD, stall_timeout_s=TIMEOUT_S)
    run.handle(m.SyncAck(rank=0, round=1))
    assert not later(run, m.SyncAck(rank=1, round=1, ok=False))
    assert run.machine.run_state.num_failed_rounds == 1
    before = run.machine._stall_detector.deadline
    run.machine.rounds.give_up()  # its successor
    run.machine._stall_detector.observe(m.Tick(), run.now)
    assert run.machine._stall_detector.deadline == before


@pytest.mark.parametrize("order", [1, -1])
def test_evaluation_and_checkpoint_calls_are_progress(order):
    run = fresh(world=1, num_samples=1, evaluate=True, checkpoint_every=1)
    run.end_plan(0)
    tasks = [t for message in run.to(m.RunTasks) for t in message.tasks]
    done = [m.TaskDone(rank=0, task=task, values=()) for task in tasks]
    first, second = done[::order]
    assert later(run, first)
    assert run.machine.outcome.metrics == []
    assert later(run, second)
    assert len(run.machine.outcome.metrics) == 1


def test_a_rank_that_leaves_is_progress():
    run = fresh(num_samples=1)
    run.handle(m.StopRequested())
    assert run.machine.phase is Phase.LEAVING
    assert not later(run, m.FinalSnapshot(rank=0, payload=EMPTY, num_samples=0))
    assert later(run, m.Exiting(rank=0))


@pytest.mark.parametrize("event", [m.StopRequested(), m.Tick()])
def test_requests_and_ticks_are_not_progress(event):
    assert not later(fresh(), event)


def test_the_stall_timer_starts_with_the_run():
    run = fresh(ready=False)
    assert run.machine.deadline is None
    run.machine.restart_stall_timer(5.0)
    assert run.machine.deadline == 5.0 + TIMEOUT_S


# -- a stall -----------------------------------------------------------------------


@pytest.mark.parametrize("ready", [False, True])
def test_a_stalled_run_reports_before_it_wakes_any_thread(ready):
    run = fresh(ready=ready)
    run.machine.restart_stall_timer(0.0)
    run.now = TIMEOUT_S - 0.1
    assert run.handle(m.Tick()) == []
    command, *others = stalled(run)
    assert isinstance(command, ReportStall)
    assert others == [AbortCollective()]
    assert run.to(m.Shutdown) == [m.Shutdown(snapshot=ready, failed=True)] * 2
    assert run.machine.outcome.failure.error is command.error
    assert isinstance(command.error, RunStalled)
    assert f"no progress for {TIMEOUT_S:g} s" in str(command.error)
    assert "raise stall_timeout" in str(command.error)
    assert f"phase {'running' if ready else 'starting'}" in command.state


def test_the_reported_state_is_the_one_before_the_failure():
    run = at_a_round(THREAD, stall_timeout_s=TIMEOUT_S)
    run.handle(m.SyncAck(rank=1, round=1, report=report(1, 2)))
    command = stalled(run)[0]
    state = command.state
    assert "state=syncing" in state
    assert "acks=[1]" in state
    assert "ranks=[0, 1]" in state
    assert "rank 1: rank=1, state=live" in state
    assert "ledger: epoch 0" in state
    assert "batches assigned, 0 trained, 4 in the round" in state


def test_the_reported_state_contains_no_tensors():
    run = fresh(num_samples=1)
    run.handle(m.StopRequested())
    run.handle(m.FinalSnapshot(rank=0, payload=EMPTY, num_samples=0))
    (command, _) = stalled(run)
    assert "final=FinalSnapshot" in command.state
    assert "Payload" not in command.state


@pytest.mark.parametrize("policy", [ApplyPolicy.SYNC, ApplyPolicy.ASYNC])
def test_a_run_stalls_at_most_once(policy):
    run = fresh(policy=policy, backend=THREAD, grace_s=2.0)
    failed_at = run.machine.deadline
    stalled(run)
    assert run.machine.phase is Phase.FAILING
    assert run.machine.deadline == failed_at + 2.0
    assert stalled(run) == []
    assert run.machine.done
    assert run.machine.deadline is None
    assert run.machine.outcome.missing == (0, 1)


# -- an abort ------------------------------------------------------------------------


def test_an_abort_ends_a_run_in_every_phase():
    starting, running, leaving, averaging = fresh(ready=False), fresh(), fresh(), fresh()
    leaving.handle(m.StopRequested())
    averaging.report(0)
    averaging.handle(m.StopRequested())
    for rank in (0, 1):
        averaging.handle(m.FinalSnapshot(rank=rank, payload=EMPTY, num_samples=1))
        averaging.handle(m.Exiting(rank=rank))
    runs = {
        Phase.STARTING: starting,
        Phase.RUNNING: running,
        Phase.LEAVING: leaving,
        Phase.AVERAGING: averaging,
    }
    for phase, run in runs.items():
        assert run.machine.phase is phase
        run.handle(m.AbortRequested())
        assert AbortCollective() in run.others
        if phase is not Phase.AVERAGING:  # otherwise no rank is left
            assert run.to(m.Shutdown)[-2:] == [m.Shutdown(snapshot=False, failed=True)] * 2
            run.now = run.machine.deadline
            run.handle(m.Tick())
        assert run.machine.done
        assert isinstance(run.machine.outcome.failure.error, RunAborted)


def test_an_abort_after_a_failure_keeps_the_failure():
    run, error = fresh(), RuntimeError("first")
    run.handle(m.Failed(rank=0, epoch=0, step=0, error=error))
    run.handle(m.AbortRequested())
    assert run.machine.outcome.failure.error is error
