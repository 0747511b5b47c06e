"""The coordinator's commands, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coordinator import messages as m
from coordinator.cadence import CadenceAction
from coordinator.config import ApplyPolicy, AverageBackend, CoordinatorConfig
from coordinator.machine import Coordinator
from coordinator.messages import (
    FINAL_ROUND,
    SAVE_ROUND,
    Average,
    PublishEpoch,
    PublishSteps,
    SaveCheckpoint,
    Send,
)
from coordinator.run_errors import AveragingFailed
from coordinator.run_finalizer import MAX_COLLECT_S
from coordinator.run_state import Phase, Rank, RankState

EMPTY = m.Payload(params=())
CPU, THREAD, NCCL = AverageBackend.CPU, AverageBackend.THREAD, AverageBackend.NCCL


class Run:
    """A coordinator and its sent messages."""

    def __init__(self, world=2, *, ready=True, **settings):
        defaults = {"num_samples": 100, "batch_size": 1, "num_epochs": 1, "anchor": 2}
        defaults["policy"] = ApplyPolicy.CADENCE
        config = CoordinatorConfig(devices=("cpu",) * world, **(defaults | settings))
        self.machine = Coordinator(config)
        self.now = 0.0
        self.sent = []
        self.others = []
        if ready:
            for rank in range(world):
                self.handle(m.Ready(rank=rank))

    def handle(self, event):
        """Handle an event; returns the messages that it caused."""
        commands = self.machine.handle(event, self.now)
        new = [(c.rank, c.message) for c in commands if isinstance(c, Send)]
        self.sent += new
        self.others += [c for c in commands if not isinstance(c, Send)]
        return new

    def to(self, kind, rank=None):
        return [msg for r, msg in self.sent if isinstance(msg, kind) and rank in (None, r)]

    def report(self, rank, batches=1, epoch=0):
        stats = m.ReportStats(num_batches=batches, num_samples=batches, compute_s=0.01 * batches)
        return self.handle(m.BatchReport(rank=rank, epoch=epoch, stats=stats))

    def end_plan(self, rank, batches=1, epoch=0, batch_s=0.01):
        stats = m.ReportStats(num_batches=batches, num_samples=batches, compute_s=batch_s * batches)
        return self.handle(m.EpochReport(rank=rank, epoch=epoch, stats=stats))

    def snapshot(self, rank, round_id, samples=1):
        return self.handle(
            m.ParamSnapshot(
                rank=rank, round=round_id, payload=EMPTY, num_samples=samples, num_batches=samples
            )
        )

    def jobs(self):
        return [c for c in self.others if isinstance(c, Average)]


def end_plans(run, world=2):
    """Each rank under ``SYNC`` completes the plans that it has, one after another."""
    while run.machine.run_state.ranks[0].num_queued:
        for rank in range(world):
            queued = run.machine.run_state.ranks[rank].num_queued
            run.end_plan(rank, run.to(m.StartEpoch, rank)[-queued].plan.steps.num_pieces(rank))


def at_a_round(backend=CPU, **settings):
    """Two ranks with an outstanding request of round 1."""
    run = Run(backend=backend, **settings)
    for _ in range(2):
        run.end_plan(0)
        run.end_plan(1)
    kind = m.RequestParams if backend is CPU else m.SyncNow
    assert [msg.round for msg in run.to(kind)] == [1, 1]
    return run


# -- start ---------------------------------------------------------------------------------


def test_nothing_is_assigned_before_every_rank_is_ready():
    run = Run(ready=False)
    assert run.handle(m.Ready(rank=0)) == []
    run.handle(m.Ready(rank=1))
    assert run.machine.phase is Phase.RUNNING
    assert [len(run.to(m.StartEpoch, rank)) for rank in (0, 1)] == [2, 2]


def test_each_rank_has_two_plans_queued():
    run = Run()
    assert [type(msg) for _, msg in run.end_plan(0)] == [m.StartEpoch]


def test_every_rank_receives_a_first_plan_before_any_second():
    run = Run(num_samples=2)
    assert [len(run.to(m.StartEpoch, rank)) for rank in (0, 1)] == [1, 1]


def test_a_rank_without_a_batch_of_an_epoch_receives_an_empty_plan():
    run = Run(world=3, num_samples=2)
    assert run.to(m.StartEpoch, 2) == []
    run.end_plan(0), run.end_plan(1)
    for rank in range(3):
        run.snapshot(rank, 1, 0 if rank == 2 else 1)
    run.handle(m.Averaged(round=1, average=EMPTY, num_samples=2))
    assert run.to(m.StartEpoch, 2) == [m.StartEpoch(plan=m.EpochPlan(epoch=0))]


def test_a_rank_receives_one_empty_plan_per_epoch():
    run = Run(world=3, num_samples=4, num_epochs=2, batch_size=2)
    empty = m.StartEpoch(plan=m.EpochPlan(epoch=0))
    assert run.to(m.StartEpoch, 2)[0] == empty
    for rank in range(3):
        run.end_plan(rank, 0 if rank == 2 else 1)
    for rank in range(3):
        run.snapshot(rank, 1, 0 if rank == 2 else 1)
    run.handle(m.Averaged(round=1, average=EMPTY, num_samples=4))
    assert run.machine.run_state.ledger.oldest.epoch == 1
    assert run.to(m.StartEpoch, 2).count(empty) == 1


def test_a_stop_before_the_start_ends_the_run_without_training():
    run = Run(ready=False)
    run.handle(m.StopRequested())
    for rank in (0, 1):
        run.handle(m.Ready(rank=rank))
    assert run.to(m.StartEpoch) == []
    assert run.to(m.Shutdown) == [m.Shutdown(), m.Shutdown()]


# -- rounds ------------------------------------------------------------------------------------


def test_a_round_over_the_cpu_collects_computes_and_delivers():
    run = at_a_round()
    assert run.snapshot(0, 1, 2) == []
    run.snapshot(1, 1, 3)
    (job,) = run.jobs()
    assert (job.round, job.ranks, job.weights) == (1, (0, 1), (2, 3))
    run.handle(m.Averaged(round=1, average=EMPTY, num_samples=5))
    assert [msg.round for msg in run.to(m.Update)] == [1, 1]
    assert run.to(m.SetGlobalStep) == [m.SetGlobalStep(step=4)] * 2
    assert run.machine.run_state.ledger.oldest.num_settled == 4


def test_a_ranks_own_wait_for_data_counts_in_the_cadence():
    run = Run(anchor=50, num_samples=200)
    for _ in range(8):
        for rank, wait_s in enumerate((0.01, 0.03)):
            stats = m.ReportStats(num_batches=1, num_samples=1, compute_s=0.01, data_wait_s=wait_s)
            run.handle(m.EpochReport(rank=rank, epoch=0, stats=stats))
    state = run.machine.run_state
    assert [r.compute_since_round for r in state.ranks] == pytest.approx([0.08, 0.08 + 7 * 0.02])
    assert [r.totals.compute_s for r in state.ranks] == pytest.approx([0.08, 0.08])
    assert state.elche.seconds_per_batch == pytest.approx((0.01, 0.03), rel=0.1)


def test_a_round_without_timely_replies_is_abandoned_and_retried():
    run = at_a_round(snapshot_timeout_s=1.0)
    run.snapshot(0, 1)
    assert run.machine.deadline == pytest.approx(1.0)
    run.now = 0.9
    run.handle(m.Tick())
    assert len(run.to(m.RequestParams)) == 2
    run.now = 1.0
    run.handle(m.Tick())
    assert [msg.round for msg in run.to(m.RequestParams)] == [1, 1, 2, 2]
    assert run.machine.statistics().num_failed_rounds == 1


def test_too_many_failed_rounds_in_a_row_end_the_run():
    run = at_a_round(snapshot_timeout_s=1.0, max_failed_rounds=3)
    for _ in range(3):
        run.now += 1.0
        run.handle(m.Tick())
    assert isinstance(run.machine.outcome.failure.error, AveragingFailed)
    assert run.to(m.Shutdown) == [m.Shutdown(failed=True)] * 2


def finish_round(run):
    """Both ranks reply to the last round and acknowledge its average."""
    round_id = run.to(m.RequestParams)[-1].round
    run.snapshot(0, round_id), run.snapshot(1, round_id)
    run.handle(m.Averaged(round=round_id, average=EMPTY, num_samples=2))
    run.handle(m.SyncAck(rank=0, round=round_id)), run.handle(m.SyncAck(rank=1, round=round_id))


def test_late_rounds_that_are_not_consecutive_do_not_end_the_run():
    run = at_a_round(snapshot_timeout_s=1.0, max_failed_rounds=3)
    for _ in range(5):
        for _ in range(2):
            run.now += 1.0
            run.handle(m.Tick())
        finish_round(run)
        asked = len(run.to(m.RequestParams))
        while len(run.to(m.RequestParams)) == asked:
            run.end_plan(0), run.end_plan(1)
    assert run.machine.statistics().num_failed_rounds == 10
    assert run.machine.phase is Phase.RUNNING


def test_a_delivered_average_is_not_abandoned_but_its_late_ranks_end_the_run():
    run = at_a_round(snapshot_timeout_s=1.0, max_failed_rounds=3)
    run.now = 0.5
    run.snapshot(0, 1), run.snapshot(1, 1)
    run.now = 5.0
    run.handle(m.Averaged(round=1, average=EMPTY, num_samples=2))
    run.handle(m.SyncAck(rank=0, round=1))
    for deadline in (6.0, 7.0):
        assert run.machine.deadline == deadline
        run.now = deadline
        run.handle(m.Tick())
        assert len(run.to(m.RequestParams)) == 2
        assert run.machine.phase is Phase.RUNNING
    run.now = 8.0
    run.handle(m.Tick())
    error = run.machine.outcome.failure.error
    assert isinstance(error, AveragingFailed)
    assert "ranks [1] have not answered a round for 3 times 1 s" in str(error)


def test_a_collective_that_one_rank_has_left_is_waited_for_until_its_timeout():
    run = at_a_round(THREAD, collective_timeout_s=7.0, max_failed_rounds=1)
    assert run.machine.rounds.round.deadline is None  # the collective has its own
    run.now = 3.0
    run.handle(m.SyncAck(rank=0, round=1, ok=False))
    assert run.machine.deadline == 10.0
    run.now = 10.0
    run.handle(m.Tick())
    assert "ranks [1] have not answered" in str(run.machine.outcome.failure.error)


def test_a_late_acknowledgement_completes_the_round():
    run = at_a_round(snapshot_timeout_s=1.0, max_failed_rounds=3)
    run.snapshot(0, 1), run.snapshot(1, 1)
    run.handle(m.Averaged(round=1, average=EMPTY, num_samples=2))
    run.handle(m.SyncAck(rank=0, round=1))
    for run.now in (1.0, 2.0):
        run.handle(m.Tick())
    run.handle(m.SyncAck(rank=1, round=1))
    assert run.machine.rounds.round.num_failed == 0
    assert run.machine.statistics().num_failed_rounds == 2
    assert run.machine.deadline == 2.0 + run.machine.run_state.config.stall_timeout_s


@pytest.mark.parametrize(("batch_s", "timeout_s"), [(0.01, 5.0), (4.0, 24.0)])
def test_a_round_waits_for_three_steps_of_the_slowest_rank(batch_s, timeout_s):
    run = Run(accumulate=2, anchor=2, snapshot_timeout_s=5.0)
    run.end_plan(0, 2, batch_s=0.01), run.end_plan(1, 2, batch_s=batch_s)
    assert len(run.to(m.RequestParams)) == 2
    assert run.machine.deadline == pytest.approx(timeout_s)


@pytest.mark.parametrize("backend", [CPU, THREAD])
def test_a_speed_is_measured_over_failed_rounds_and_the_next(backend):
    run = at_a_round(backend, snapshot_timeout_s=1.0)
    if backend is CPU:
        run.snapshot(0, 1)
        run.now = 1.0
        run.handle(m.Tick())
    else:
        run.handle(m.SyncAck(rank=0, round=1))
        run.handle(m.SyncAck(rank=1, round=1, ok=False))
    run.end_plan(0, batch_s=0.07), run.end_plan(1, batch_s=0.01)
    ranks = run.machine.run_state.ranks
    assert [r.since_round for r in ranks] == [3, 3]
    assert [r.compute_since_round for r in ranks] == pytest.approx([0.09, 0.03])
    if backend is CPU:
        finish_round(run)
    else:
        for rank in (0, 1):
            run.handle(m.SyncAck(rank=rank, round=run.to(m.SyncNow)[-1].round))
    assert [r.round_batches for r in ranks] == [3, 3]
    assert [r.round_compute_s for r in ranks] == pytest.approx([0.09, 0.03])


def test_a_completed_round_has_no_deadline():
    run = at_a_round(snapshot_timeout_s=1.0)
    assert run.machine.deadline == 1.0
    finish_round(run)
    assert run.machine.deadline == run.machine.run_state.config.stall_timeout_s


def test_a_death_in_a_round_is_not_a_late_reply():
    """The number of failed rounds in a row stays the same."""
    run = at_a_round(world=2, snapshot_timeout_s=1.0, max_failed_rounds=2, continue_on_failure=True)
    run.now += 1.0
    run.handle(m.Tick())
    assert run.machine.rounds.round.num_failed == 1
    run.handle(m.Failed(rank=1, epoch=0, step=1, error=ValueError("planted")))
    assert run.machine.rounds.round.num_failed == 1
    assert run.machine.phase is Phase.RUNNING


def test_a_failed_average_abandons_the_round():
    run = at_a_round()
    run.snapshot(0, 1), run.snapshot(1, 1)
    run.handle(m.Averaged(round=1, average=None, error=MemoryError()))
    assert run.to(m.Update) == []
    assert [msg.round for msg in run.to(m.RequestParams)] == [1, 1, 2, 2]


# -- the end ---------------------------------------------------------------------------------


def finish_training(run, epoch=0):
    """Settle an epoch of two batches by a round over the CPU."""
    run.end_plan(0, epoch=epoch), run.end_plan(1, epoch=epoch)
    round_id = run.to(m.RequestParams)[-1].round
    run.snapshot(0, round_id), run.snapshot(1, round_id)
    run.handle(m.Averaged(round=round_id, average=EMPTY, num_samples=2))
    for rank in (0, 1):
        run.handle(m.SyncAck(rank=rank, round=round_id))


def test_a_run_ends_with_the_average_of_the_last_snapshots():
    run = Run(num_samples=2)
    finish_training(run)
    assert run.to(m.Shutdown) == [m.Shutdown()] * 2
    for rank in (0, 1):
        run.handle(m.FinalSnapshot(rank=rank, payload=EMPTY, num_samples=1))
        run.handle(m.Exiting(rank=rank))
    assert run.jobs()[-1].round == FINAL_ROUND
    final = m.Payload(params=())
    run.handle(m.Averaged(round=FINAL_ROUND, average=final, num_samples=2))
    assert run.machine.done
    assert run.machine.outcome.payload is final
    assert run.machine.outcome.failure is None
    assert not run.machine.outcome.stopped


def test_a_run_ends_without_an_average_if_nothing_was_trained_since_the_last_one():
    run = Run(num_samples=2)
    finish_training(run)
    payloads = [m.Payload(params=(torch.tensor([float(rank)]),)) for rank in (0, 1)]
    for rank in (0, 1):
        run.handle(m.FinalSnapshot(rank=rank, payload=payloads[rank], num_samples=0))
        run.handle(m.Exiting(rank=rank))
    assert [job.round for job in run.jobs()] == [1]
    assert run.machine.done
    assert run.machine.outcome.payload is payloads[0]


def test_the_average_after_a_failure_has_a_time_limit_of_its_own():
    run = Run(world=3, grace_s=1.0)
    for rank in range(3):
        run.end_plan(rank)
    run.handle(m.Failed(rank=2, epoch=0, step=1, error=RuntimeError("planted")))
    run.handle(m.Exiting(rank=2))
    for rank in (0, 1):
        run.handle(m.FinalSnapshot(rank=rank, payload=EMPTY, num_samples=1))
        run.handle(m.Exiting(rank=rank))
    assert run.jobs()[-1].round == FINAL_ROUND
    run.now = 2.0  # longer than the ranks' own limit
    run.handle(m.Tick())
    assert not run.machine.done
    run.now = MAX_COLLECT_S
    run.handle(m.Tick())
    assert run.machine.done
    assert run.machine.outcome.payload is None


def test_an_epoch_is_published_after_its_evaluation():
    run = Run(num_samples=2, evaluate=True)
    finish_training(run)
    assert [(rank, t.epoch) for rank, t in tasks_sent(run)] == [(0, 0)]
    assert not any(isinstance(c, PublishEpoch) for c in run.others)
    assert run.to(m.Shutdown) == []
    ((_, task),) = tasks_sent(run)
    run.handle(m.TaskDone(rank=0, task=task, values=(("acc", 0.5),)))
    (published,) = (c for c in run.others if isinstance(c, PublishEpoch))
    assert published.metrics.scalars["eval/acc"] == 0.5
    assert len(run.to(m.Shutdown)) == 2


def at_an_evaluation(**settings):
    """Ranks with an outstanding request of a round that is evaluated within the epoch."""
    run = Run(evaluate=True, eval_every=4, anchor=50, **settings)
    for _ in range(2):
        run.end_plan(0), run.end_plan(1)
    assert {msg.round for msg in run.to(m.RequestParams)} == {1}
    return run


def tasks_sent(run):
    """The rank and the task of each task that was sent."""
    messages = [(rank, msg) for rank, msg in run.sent if isinstance(msg, m.RunTasks | m.Update)]
    return [(rank, task) for rank, msg in messages for task in msg.tasks]


def evaluations(run):
    return [(rank, task.epoch, task.at) for rank, task in tasks_sent(run)]


def answer_round(run, ranks):
    """These ranks reply to the last round and acknowledge its average."""
    round_id = run.to(m.RequestParams)[-1].round
    for rank in ranks:
        run.snapshot(rank, round_id)
    run.handle(m.Averaged(round=round_id, average=EMPTY, num_samples=len(ranks)))
    for rank in ranks:
        run.handle(m.SyncAck(rank=rank, round=round_id))


def test_an_evaluation_within_an_epoch_is_due_again_after_a_failed_round():
    run = at_an_evaluation(snapshot_timeout_s=1.0)
    run.now = 1.0
    run.handle(m.Tick())
    answer_round(run, (0, 1))
    assert evaluations(run) == [(0, 0, 4)]


def test_an_evaluation_within_an_epoch_is_published_once():
    run = at_an_evaluation()
    answer_round(run, (0, 1))
    values = (("acc", 0.5),)
    ((_, task),) = tasks_sent(run)
    undone = replace(task, id=task.id - 1)
    run.handle(m.TaskDone(rank=0, task=undone, values=values))
    run.end_plan(0), run.end_plan(1)
    assert not any(isinstance(c, PublishSteps) for c in run.others)
    for _ in range(2):
        run.handle(m.TaskDone(rank=0, task=task, values=values))
    (published,) = (c.metrics for c in run.others if isinstance(c, PublishSteps))
    assert (published.step, published.scalars) == (4, {"eval/acc": 0.5})
    run.end_plan(0)
    assert {msg.round for msg in run.to(m.RequestParams)} == {1}
    run.end_plan(1)
    answer_round(run, (0, 1))
    assert evaluations(run) == [(0, 0, 4), (0, 0, 8)]


def test_results_of_an_average_that_is_given_up_do_not_count():
    """Rank 0 has it, and has done its tasks when rank 1 reports that it has not."""
    run = Run(backend=THREAD, num_samples=2, evaluate=True, checkpoint_every=1, val_batches=4)
    run.end_plan(0), run.end_plan(1)
    kinds = [m.TaskKind.EVALUATE, m.TaskKind.HAND_OVER, m.TaskKind.VALIDATE]

    def acknowledge(number, value, *, ok):
        (sent,) = (msg for msg in run.to(m.SyncNow, 0) if msg.round == number)
        assert [task.kind for task in sent.tasks] == kinds
        run.handle(m.SyncAck(rank=0, round=number))
        for task in sent.tasks:
            run.handle(m.TaskDone(rank=0, task=task, values=(("x", value),)))
        run.handle(m.SyncAck(rank=1, round=number, ok=ok))

    acknowledge(1, 1.0, ok=False)
    assert not any(isinstance(c, PublishEpoch) for c in run.others)
    acknowledge(2, 2.0, ok=True)
    (published,) = (c for c in run.others if isinstance(c, PublishEpoch))
    assert published.metrics.scalars == {"eval/x": 2.0, "val/x": 2.0}


def test_results_within_an_epoch_of_an_average_that_is_given_up_are_not_published():
    settings = {"evaluate": True, "eval_every": 4, "val_batches": 4, "val_every_steps": 4}
    run = Run(backend=THREAD, anchor=50, **settings)
    for _ in range(2):
        run.end_plan(0), run.end_plan(1)
    for number, ok in ((1, False), (2, True)):
        (sent,) = (msg for msg in run.to(m.SyncNow, 0) if msg.round == number)
        assert [task.kind for task in sent.tasks] == [m.TaskKind.EVALUATE, m.TaskKind.VALIDATE]
        run.handle(m.SyncAck(rank=0, round=number))
        for task in sent.tasks:
            run.handle(m.TaskDone(rank=0, task=task, values=(("x", float(number)),)))
        assert not any(isinstance(c, PublishSteps) for c in run.others)
        run.handle(m.SyncAck(rank=1, round=number, ok=ok))
    published = [c.metrics for c in run.others if isinstance(c, PublishSteps)]
    assert [(p.step, p.scalars) for p in published] == [(4, {"eval/x": 2.0}), (4, {"val/x": 2.0})]


def test_an_evaluation_of_a_dead_rank_is_not_waited_for():
    run = at_an_evaluation(world=3, continue_on_failure=True)
    answer_round(run, (0, 1, 2))
    assert evaluations(run) == [(0, 0, 4)]
    run.handle(m.Failed(rank=0, epoch=0, step=1, error=ValueError("planted")))
    run.end_plan(1)
    answer_round(run, (1, 2))
    assert [rank for rank, _, _ in evaluations(run)] == [0, 1]


def test_epochs_that_close_together_share_the_time():
    run = Run(num_samples=2, num_epochs=2, anchor=10)
    run.end_plan(0), run.end_plan(0, epoch=1), run.end_plan(1)
    assert len(run.to(m.RequestParams)) == 2  # epoch 0 is trained
    run.end_plan(1, epoch=1)
    run.snapshot(0, 1, 2), run.snapshot(1, 1, 2)
    run.now = 3.0
    run.handle(m.Averaged(round=1, average=EMPTY, num_samples=4))
    published = [c.metrics for c in run.others if isinstance(c, PublishEpoch)]
    assert [(metrics.epoch, metrics.epoch_s) for metrics in published] == [(0, 1.5), (1, 1.5)]


def test_a_rank_that_has_left_an_epoch_receives_no_batches_of_those_before():
    """Both end short with the death of the other rank."""
    run = Run(num_samples=4, num_epochs=2, anchor=50, continue_on_failure=True)
    for _ in range(2):
        run.end_plan(0), run.end_plan(1)
    assert {msg.plan.epoch for msg in run.to(m.StartEpoch)} == {0, 1}
    assert len(run.to(m.RequestParams)) == 2
    (survivor,) = (r for r in run.machine.run_state.live if r.rank == 1)
    while survivor.num_queued:
        run.handle(m.EpochReport(rank=1, epoch=1, stats=m.ReportStats(), left=True))
    run.handle(m.Failed(rank=0, epoch=0, step=2, error=ValueError("planted")))
    assert survivor.num_queued == 0
    assert run.machine.run_state.ledger.oldest is None
    assert run.to(m.Shutdown, 1)


def test_a_stop_waits_for_the_round_in_flight():
    run = at_a_round()
    run.handle(m.StopRequested())
    assert run.to(m.Shutdown) == []
    run.snapshot(0, 1), run.snapshot(1, 1)
    run.handle(m.Averaged(round=1, average=EMPTY, num_samples=2))
    run.handle(m.SyncAck(rank=0, round=1))
    assert run.to(m.Shutdown) == []
    run.handle(m.SyncAck(rank=1, round=1))
    assert len(run.to(m.Shutdown)) == 2
    assert run.machine.outcome.stopped


def test_a_failed_final_average_fails_the_run():
    run = Run(num_samples=2)
    finish_training(run)
    for rank in (0, 1):
        run.handle(m.FinalSnapshot(rank=rank, payload=EMPTY, num_samples=1))
        run.handle(m.Exiting(rank=rank))
    error = MemoryError()
    run.handle(m.Averaged(round=FINAL_ROUND, average=None, error=error))
    assert run.machine.outcome.failure.error is error


# -- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [0, 1])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_the_result_of_sync_is_averaged_over_the_ranks_with_the_most_steps(ahead, num_samples):
    """After a death in a reduction ranks may differ by one step."""
    run = Run(world=3, policy=ApplyPolicy.SYNC, backend=THREAD, continue_on_failure=True)
    run.handle(m.StopRequested())
    end_plans(run, 3)
    assert len(run.to(m.Shutdown)) == 3
    payloads = [m.Payload(params=(torch.tensor([float(rank)]),)) for rank in range(3)]
    for rank, payload in enumerate(payloads):
        step = 2 if rank == ahead else 1
        run.handle(m.FinalSnapshot(rank=rank, payload=payload, num_samples=num_samples, step=step))
        run.handle(m.Exiting(rank=rank))
    assert run.machine.outcome.payload is payloads[ahead]
    assert run.jobs() == []


def test_a_failure_ends_the_round_in_flight():
    """Its average is sent to no rank."""
    run = at_a_round()
    run.snapshot(0, 1), run.snapshot(1, 1)
    run.handle(m.Failed(rank=1, epoch=0, step=2, error=RuntimeError()))
    assert run.handle(m.Averaged(round=1, average=EMPTY, num_samples=2)) == []
    assert run.machine.run_state.ledger.oldest.num_settled == 0


def test_ranks_that_do_not_leave_in_time_are_named():
    """D22: one bounded wait for all."""
    run = Run(world=3, grace_s=2.0)
    run.handle(m.Failed(rank=0, epoch=0, step=0, error=RuntimeError()))
    run.handle(m.Exiting(rank=1))
    run.now = run.machine.deadline
    assert run.now == 2.0
    run.handle(m.Tick())
    assert run.machine.done
    assert run.machine.outcome.missing == (2,)


def test_a_finished_coordinator_ignores_events():
    run = Run(world=2, grace_s=0.0)
    run.handle(m.Failed(rank=0, epoch=0, step=0, error=RuntimeError()))
    run.handle(m.Tick())
    assert run.machine.done
    assert run.handle(m.Ready(rank=1)) == []
    assert run.machine.deadline is None


@pytest.mark.parametrize(
    ("state", "target"),
    [
        (RankState.GONE, RankState.LIVE),
        (RankState.DEAD, RankState.GONE),
        (RankState.LIVE, RankState.BUILDING),
        (RankState.LEAVING, RankState.LIVE),
    ],
)
def test_a_rank_cannot_return_to_an_earlier_state(state, target):
    rank = Rank(rank=4, state=state)
    with pytest.raises(AssertionError, match="rank 4"):
        rank.move(target)


def test_a_failed_backend_is_excluded_even_if_the_last_round_failed_by_a_death():
    """The failed acknowledgement of the dead rank arrives before its death is known."""
    settings = {"backend": NCCL, "alternatives": (CPU,), "max_failed_rounds": 3}
    run = at_a_round(continue_on_failure=True, **settings)
    for round_id in (1, 2, 3):
        fault = "planted" if round_id < 3 else None
        for rank in (0, 1):
            run.handle(m.SyncAck(rank=rank, round=round_id, ok=False, fault=fault))
    assert run.machine.outcome.failure is None
    assert run.machine.run_state.backend_choice.chosen is CPU
    run.handle(m.Failed(rank=0, epoch=0, step=0, error=ValueError("planted")))
    assert run.machine.run_state.alone


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (m.ParamSnapshot, {"round": 7, "payload": EMPTY, "num_samples": 2, "num_batches": 1}),
        (m.SyncAck, {"round": 7}),
        (m.CapturedState, {"id": 7, "payload": EMPTY, "num_samples": 2, "step": 1, "extra": {}}),
        (m.Halted, {"generation": 7, "step": 1}),
    ],
)
def test_training_that_is_reported_with_a_reply_counts_whatever_becomes_of_the_reply(kind, fields):
    run = Run()
    stats = m.ReportStats(num_batches=1, num_samples=2, loss_sum=6.0, loss_samples=2)
    report = m.BatchReport(rank=1, epoch=0, stats=stats)
    run.handle(kind(rank=1, report=report, **fields))
    found = run.machine.statistics()
    assert (found.loss_sum, found.ranks[1].num_samples, found.num_trained) == (6.0, 2, 1)


# -- SYNC and one device -----------------------------------------------------------------------


def test_under_sync_no_round_and_no_limit_is_sent():
    run = Run(policy=ApplyPolicy.SYNC, backend=THREAD, num_samples=10, max_batch_diff=0)
    end_plans(run)
    assert sum(p.plan.steps.num_pieces(0) for p in run.to(m.StartEpoch, 0)) == 5
    assert run.to(m.StartEpoch, 0) == run.to(m.StartEpoch, 1)
    assert run.machine.statistics().num_averagings == 5
    assert run.to(m.SyncNow) + run.to(m.Throttle) + run.to(m.Resume) == []
    assert len(run.to(m.Shutdown)) == 2


@pytest.mark.parametrize(("world", "policy"), [(1, "cadence"), (2, "sync")])
@pytest.mark.parametrize("buffers", [False, True])
def test_every_requested_checkpoint_is_made(world, policy, buffers):
    """Checkpoints are made one at a time."""
    run = Run(world=world, policy=ApplyPolicy(policy), backend=THREAD)
    held = (torch.zeros(1),) if buffers else ()
    for ticket in range(3):
        run.handle(m.SaveRequested(ticket=ticket))
        if policy == "sync":
            assert len(run.to(m.TakeCheckpoint)) == 2 * ticket
            end_plans(run)
        for rank in range(world):
            asked = run.to(m.TakeCheckpoint, rank)
            assert len(asked) == ticket + 1
            part = m.Payload(params=(), buffers=held)
            step, extra = ticket + 1, {"rank": rank}
            run.handle(
                m.CapturedState(
                    rank=rank, id=asked[-1].id, payload=part, num_samples=1, step=step, extra=extra
                )
            )
        if buffers and world > 1:
            run.handle(m.Averaged(round=SAVE_ROUND, average=EMPTY, kept=EMPTY))
        saved = [c.tickets for c in run.others if isinstance(c, SaveCheckpoint)]
        assert saved == [(t,) for t in range(ticket + 1)]


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_request_of_a_checkpoint_that_is_withdrawn_makes_none(policy):
    run = Run(policy=ApplyPolicy(policy), backend=THREAD, anchor=50)
    run.handle(m.SaveRequested(ticket=0))
    run.handle(m.SaveRequested(ticket=1))
    run.handle(m.SaveRequested(ticket=1, withdrawn=True))
    if policy == "cadence":
        run.end_plan(0), run.end_plan(1)
    else:
        end_plans(run)
    first = run.to(m.TakeCheckpoint, 0) + run.to(m.SyncNow, 0)
    part = m.Payload(params=(), buffers=())
    for rank, average in enumerate((EMPTY, None)):
        extra = {"rank": rank}
        run.handle(
            m.CapturedState(
                rank=rank, id=first[0].id, payload=part, num_samples=1, step=1, extra=extra
            )
            if policy == "sync"
            else m.SyncAck(rank=rank, round=first[0].round, extra=extra, average=average)
        )
    assert [c.tickets for c in run.others if isinstance(c, SaveCheckpoint)] == [(0,)]
    assert len(run.to(m.TakeCheckpoint, 0)) == (1 if policy == "sync" else 0)
    assert not run.machine._saving.due


def test_buffers_of_a_sync_checkpoint_are_averaged_without_samples_on_one_rank():
    run = Run(policy=ApplyPolicy.SYNC, backend=THREAD)
    run.handle(m.SaveRequested(ticket=0))
    end_plans(run)
    part = m.Payload(params=(), buffers=(torch.zeros(1),))
    for rank, num_samples in enumerate((0, 3)):
        number = run.to(m.TakeCheckpoint, rank)[-1].id
        run.handle(
            m.CapturedState(
                rank=rank, id=number, payload=part, num_samples=num_samples, step=1, extra={}
            )
        )
    assert [job.weights for job in run.jobs()] == [(0, 3)]


def test_every_requested_checkpoint_has_its_own_round():
    run = Run(backend=THREAD, anchor=50)
    for ticket in range(3):
        run.end_plan(0), run.end_plan(1)
        run.handle(m.SaveRequested(ticket=ticket))
        call = run.to(m.SyncNow, 0)[-1]
        assert (call.round, call.capture) == (ticket + 1, True)
        for rank, average in enumerate((EMPTY, None)):
            extra = {"rank": rank}
            run.handle(m.SyncAck(rank=rank, round=call.round, extra=extra, average=average))
        saved = [c.tickets for c in run.others if isinstance(c, SaveCheckpoint)]
        assert saved == [(t,) for t in range(ticket + 1)]


def test_the_last_rank_of_sync_counts_no_averagings():
    """Two steps were made together; steps of a single rank are not averagings."""
    run = Run(policy=ApplyPolicy.SYNC, backend=THREAD, continue_on_failure=True, num_samples=6)
    run.handle(m.Failed(rank=1, epoch=0, step=0, error=ValueError("planted")))
    stats = m.ReportStats(num_batches=2, num_samples=2)
    report = m.BatchReport(rank=0, epoch=0, stats=stats)
    run.handle(m.Halted(rank=0, generation=0, step=2, num_syncs=0, report=report))
    run.handle(m.Regrouped(rank=0, generation=1))
    assert run.machine.run_state.alone
    assert run.to(m.StartEpoch, 0)[-1].plan.num_batches == 2
    assert run.machine.statistics().num_averagings == 2


@pytest.mark.parametrize("alternatives", [(), (THREAD,)])
def test_a_halt_before_the_report_of_a_death_is_not_a_failed_reduction(alternatives):
    """The other ranks notice the death by their aborted collective before the coordinator."""
    settings = {"backend": NCCL, "alternatives": alternatives, "max_failed_rounds": 3}
    run = Run(world=3, policy=ApplyPolicy.SYNC, continue_on_failure=True, **settings)
    for generation in range(2):
        for rank in range(3):
            where = {"generation": generation, "step": 0, "num_syncs": 0}
            run.handle(m.Halted(rank=rank, fault="planted", **where))
        for rank in range(3):
            run.handle(m.Regrouped(rank=rank, generation=generation + 1))
    halted = m.Halted(rank=0, generation=2, step=0, num_syncs=0)
    run.handle(halted)
    run.handle(m.Failed(rank=2, epoch=0, step=0, error=ValueError("planted")))
    run.handle(replace(halted, rank=1))
    assert run.machine.outcome.failure is None
    assert run.to(m.Regroup, 0)[-1].ranks == (0, 1)
    run.handle(m.Regrouped(rank=0, generation=3))
    assert run.machine.run_state.phase is Phase.RUNNING


@pytest.mark.parametrize("fault", [None, "planted"])
def test_max_failed_rounds_consecutive_halts_end_the_run(fault):
    settings = {"backend": NCCL, "max_failed_rounds": 3, "continue_on_failure": True}
    run = Run(policy=ApplyPolicy.SYNC, **settings)
    for generation in range(3):
        assert run.machine.outcome.failure is None
        for rank in range(2):
            where = {"generation": generation, "step": 0, "num_syncs": 0}
            run.handle(m.Halted(rank=rank, fault=fault, **where))
        for rank in range(2):
            run.handle(m.Regrouped(rank=rank, generation=generation + 1))
    assert isinstance(run.machine.outcome.failure.error, AveragingFailed)


@pytest.mark.parametrize("first_rank", [0, 1])
def test_an_out_of_memory_halt_is_not_a_failed_reduction_in_any_order_of_reports(first_rank):
    """A peer may notice the aborted collective before the rank itself reports."""
    settings = {"backend": NCCL, "max_failed_rounds": 1, "balance": True, "batch_size": 8}
    run = Run(policy=ApplyPolicy.SYNC, **settings)
    halted = m.Halted(rank=first_rank, generation=0, step=0, too_large=8 * (first_rank == 1))
    run.handle(halted)
    run.handle(replace(halted, rank=1 - first_rank, too_large=8 - halted.too_large))
    assert run.machine.outcome.failure is None
    assert run.to(m.Regroup, 0)


def test_a_halt_after_progress_of_another_rank_restarts_the_count():
    """The first rank to halt may be one with fewer steps."""
    settings = {"backend": NCCL, "max_failed_rounds": 3, "continue_on_failure": True}
    run = Run(policy=ApplyPolicy.SYNC, **settings)
    stats = m.ReportStats(num_batches=1, num_samples=1)
    report = m.BatchReport(rank=1, epoch=0, stats=stats)
    for generation, made in enumerate((0, 0, 1)):
        halted = m.Halted(rank=0, generation=generation, step=0, num_syncs=0)
        run.handle(halted)
        run.handle(replace(halted, rank=1, step=made, report=report if made else None))
        for rank in range(2):
            run.handle(m.Regrouped(rank=rank, generation=generation + 1))
    assert run.machine.outcome.failure is None
    assert run.machine.run_state.phase is Phase.RUNNING


def test_generations_are_ascending():
    run = Run(world=4, backend=THREAD, continue_on_failure=True)
    for rank in (3, 2):
        run.handle(m.Failed(rank=rank, epoch=0, step=0, error=ValueError("planted")))
    assert [msg.generation for msg in run.to(m.Regroup, 0)] == [1, 2]


@pytest.mark.parametrize(("granted", "num_plans"), [(4, 2), (5, 1), (6, 1), (8, 2)])
def test_no_plan_follows_a_short_window_before_it_is_trained(granted, num_plans):
    """After a death, steps are counted in whole windows up to the last one of the plan."""
    run = Run(
        policy=ApplyPolicy.SYNC,
        granted=True,
        accumulate=2,
        balance=True,
        num_samples=400,
        batch_size=4,
    )
    for batches in (range(granted), range(granted, granted + 8)):
        epoch = m.EpochGrant(epoch=0, batches=(batches,))
        run.handle(m.ClusterRoundDone(epochs=(epoch,)))
    first, *others = [message.plan for message in run.to(m.StartEpoch, 0)]
    assert len(others) == num_plans - 1
    if not others:
        for rank in (0, 1):
            run.end_plan(rank, run.to(m.StartEpoch, rank)[0].plan.steps.num_pieces(rank))
        first, *others = [message.plan for message in run.to(m.StartEpoch, 0)]
    assert [plan.steps.first_step for plan in others] == [first.steps.first_step + granted]


def test_batches_of_other_machines_count_after_a_death_within_a_plan():
    run = Run(
        world=3,
        policy=ApplyPolicy.SYNC,
        backend=THREAD,
        granted=True,
        continue_on_failure=True,
        num_samples=400,
    )
    grant = m.EpochGrant(epoch=0, batches=(range(6),))
    run.handle(m.ClusterRoundDone(epochs=(grant,)))
    others = m.EpochGrant(epoch=0, consumed=(range(6, 11),))
    run.handle(m.ClusterRoundDone(epochs=(others,)))
    run.handle(m.Failed(rank=2, epoch=0, step=0, error=ValueError("planted")))
    for rank in (0, 1):
        run.handle(m.Halted(rank=rank, generation=0, step=1))
    for rank in (0, 1):
        run.handle(m.Regrouped(rank=rank, generation=1))
    assert run.machine.statistics().global_step == 5 + 3
    assert run.to(m.StartEpoch, 0)[-1].plan.steps.first_step == 5 + 3


def test_a_machine_is_idle_once_the_plans_of_its_grant_have_ended():
    run = Run(granted=True, anchor=50)
    run.handle(m.ClusterRoundDone(epochs=(m.EpochGrant(epoch=0, batches=(range(2),)),)))
    for rank in (0, 1):
        assert not run.machine.idle
        run.report(rank)
    finish_round(run)
    for rank in (0, 1):
        assert not run.machine.idle
        run.end_plan(rank, 0)
    assert run.machine.idle


@pytest.mark.parametrize("threshold", [0.02, 0.5])
def test_the_guard_of_convergence_has_the_threshold_of_the_settings(threshold):
    guard = Run(divergence_threshold=threshold).machine.run_state.guard
    assert guard.report([threshold]) is CadenceAction.STABLE
    assert guard.report([1.01 * threshold]) is CadenceAction.SUPPRESS_GROWTH


def test_batches_of_other_machines_advance_the_schedules_of_the_ranks():
    run = Run(granted=True)
    run.handle(m.ClusterRoundDone(epochs=(m.EpochGrant(epoch=0, consumed=(range(7),)),)))
    assert run.to(m.SetGlobalStep) == [m.SetGlobalStep(step=7)] * 2


def test_the_first_epoch_is_measured_from_the_moment_that_all_ranks_are_ready():
    run = Run(num_samples=2, ready=False)
    run.handle(m.Ready(rank=0))
    run.now = 100.0
    run.handle(m.Ready(rank=1))
    run.now = 103.0
    finish_training(run)
    (published,) = [c for c in run.others if isinstance(c, PublishEpoch)]
    assert published.metrics.epoch_s == 3.0


@pytest.mark.parametrize("sizes", [(8, 8), (8, 40)], ids=["again", "too small together"])
def test_pieces_that_cannot_shrink_further_end_the_run(sizes):
    """A piece above its limit, or limits that leave no room for the global batch."""
    run = Run(policy=ApplyPolicy.SYNC, balance=True, batch_size=8, max_failed_rounds=9)
    large = (sizes[0], 0) if sizes[1] == 8 else (2, 2)
    for rank in (0, 1):
        run.handle(m.Halted(rank=rank, generation=0, step=0, too_large=large[rank]))
    if sizes[1] == 8:
        assert run.machine.outcome.failure is None
        for rank in (0, 1):
            run.handle(m.Regrouped(rank=rank, generation=1))
        run.handle(m.Halted(rank=0, generation=1, step=0, too_large=8))
    assert "ran out of memory on a piece" in str(run.machine.outcome.failure.error)


@pytest.mark.parametrize(
    ("world", "policy", "backend", "alternatives", "uses"),
    [
        (1, ApplyPolicy.SYNC, THREAD, (), False),
        (2, ApplyPolicy.SYNC, CPU, (), True),
        (2, ApplyPolicy.CADENCE, CPU, (), False),
        (2, ApplyPolicy.CADENCE, THREAD, (), True),
        (2, ApplyPolicy.ASYNC, CPU, (NCCL,), True),
    ],
)
def test_ranks_use_a_collective_if_the_policy_or_a_backend_needs_one(
    world, policy, backend, alternatives, uses
):
    config = CoordinatorConfig(
        devices=("cpu",) * world,
        num_samples=9,
        batch_size=1,
        num_epochs=1,
        policy=policy,
        backend=backend,
        alternatives=alternatives,
    )
    assert config.uses_collectives is uses


def test_a_single_device_has_no_rounds():
    run = Run(world=1, num_samples=3)
    while (plans := run.to(m.StartEpoch)) and not run.to(m.Shutdown):
        run.end_plan(0, plans[0].plan.num_batches)
        run.sent = [s for s in run.sent if s[1] is not plans[0]]
    assert run.to(m.Shutdown) == [m.Shutdown()]
    assert run.jobs() == []
    assert run.machine.outcome.metrics[0].num_samples == 3


# -- late messages ---------------------------------------------------------------------


LATE = {
    "ready": m.Ready(rank=1),
    "a report": m.BatchReport(rank=1, epoch=0, stats=m.ReportStats(num_batches=1, num_samples=1)),
    "a failure": m.Failed(rank=1, epoch=0, step=0, error=ValueError("again")),
    "its leave": m.Exiting(rank=1),
    "the end of its thread": m.ThreadEnded(rank=1),
}


@pytest.mark.parametrize("event", LATE.values(), ids=LATE)
def test_messages_of_a_dead_rank_change_nothing(event):
    run = Run(world=3, continue_on_failure=True)
    run.handle(m.Failed(rank=1, epoch=0, step=0, error=ValueError("planted")))
    before = run.machine.statistics()
    assert run.handle(event) == []
    assert run.machine.statistics() == before
    assert run.machine.phase is Phase.RUNNING


def test_step_metrics_do_not_wait_for_a_dead_rank():
    run = Run(world=3, continue_on_failure=True, metrics_every=4)
    run.handle(m.Failed(rank=1, epoch=0, step=0, error=ValueError("planted")))
    stats = m.ReportStats(num_batches=2, num_samples=2, losses=((1.0, 1.0, 0.1), (3.0, 1.0, 0.2)))
    for rank in (0, 2):
        run.handle(m.BatchReport(rank=rank, epoch=0, stats=stats))
    published = [c.metrics for c in run.others if isinstance(c, PublishSteps)]
    (steps,) = published
    assert (steps.num_batches, steps.avg_loss, steps.learning_rate) == (4, 2.0, 0.2)


def test_the_run_fails_if_no_backend_can_connect_the_ranks():
    run = Run(backend=THREAD)
    run.handle(m.ConnectFailed(rank=0, generation=0, backend=THREAD, error=OSError("planted")))
    assert run.machine.phase is Phase.FAILING
    error = run.machine.outcome.failure.error
    assert isinstance(error, AveragingFailed)
    assert "THREAD: the ranks could not be connected: planted" in str(error)
