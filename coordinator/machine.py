"""Coordinator: a state machine that takes an event and a time, and returns commands.

It has no thread, queue, clock or random numbers: the same state machine runs in
:mod:`coordinator.service` and under a simulated clock. After each event it inspects the whole state
and does all that is due, so that the order of messages matters little and no wake-up can be lost.
"""

from __future__ import annotations

from typing import assert_never

from coordinator import messages as m
from coordinator.config import CoordinatorConfig
from coordinator.coordinator_checkpoint import restore_run
from coordinator.epochs import EpochScheduler
from coordinator.failure_recovery import FailureRecovery, RecoveryPhase
from coordinator.messages import FINAL_ROUND, SAVE_ROUND, Command
from coordinator.rounds import LimitSender, RoundRunner, RoundState
from coordinator.run_errors import AveragingFailed, GpuWorkerError, RunAborted
from coordinator.run_finalizer import RunFinalizer
from coordinator.run_state import Outcome, Phase, RankState, RunState, Statistics
from coordinator.saved_run import SavedRun
from coordinator.saving import RunCheckpointer
from coordinator.stall import StallDetector

STEPS_BACK = 2
"""Optimizer steps under lockstep whose samples are kept after all ranks reported them. A death can
undo one, if the other ranks have not made it."""


class Coordinator:
    """Decides who trains what, when replicas average and when the run ends.

    Args:
        config: Settings.
        resume: The state of an earlier coordinator to continue from.
    """

    def __init__(self, config: CoordinatorConfig, resume: SavedRun | None = None) -> None:
        self._run = RunState(config)
        self._epochs = EpochScheduler(self._run)
        self._saving = RunCheckpointer(self._run, self._epochs)
        if resume is not None:
            restore_run(self._run, resume)
            self._epochs.resumed_s = resume.elapsed_s
            self._saving.resumed()
        self._rounds = RoundRunner(self._run, self._epochs.tasks, self._saving)
        self._recovery = FailureRecovery(self._run)
        self._finalizer = RunFinalizer(
            self._run,
            self._epochs,
            self._saving,
            self._recovery,
            self._rounds,
        )
        self._limits = LimitSender(self._run, self._rounds)
        self._stall_detector = StallDetector(self._run, self._rounds)
        self._pending_deltas: list[m.Payload] = []

    @property
    def phase(self) -> Phase:
        """Phase of the run."""
        return self._run.phase

    @property
    def done(self) -> bool:
        """True once ``outcome`` is final."""
        return self._run.phase is Phase.DONE

    @property
    def outcome(self) -> Outcome:
        """Outcome of the run so far."""
        return self._run.outcome

    @property
    def run_state(self) -> RunState:
        """The state of the run; read-only for tests and reports."""
        return self._run

    @property
    def rounds(self) -> RoundRunner:
        """The averaging rounds; read-only for tests and reports."""
        return self._rounds

    @property
    def deadline(self) -> float | None:
        """Time of the next :class:`~coordinator.messages.Tick` if no event arrives before."""
        due = (self._finalizer.deadline, self._rounds.round.deadline, self._stall_detector.deadline)
        return min((t for t in due if t is not None), default=None)

    def restart_stall_timer(self, now: float) -> None:
        """Restart the stall timer: the run starts, or was suspended."""
        self._stall_detector.restart(now)

    def handle(self, event: m.Event, now: float) -> list[Command]:
        """Handle one event; returns the commands to execute, in order."""
        self._run.commands, self._run.now = [], now
        self._rounds.cpu_time.record(event)
        if self._run.phase is not Phase.DONE:
            self._record_report(event)
            self._dispatch(event, now)
            if self._run.round_schedule.any_limit or not self._rounds.round.is_partial_reply(event):
                self._advance(now)
            self._stall_detector.observe(event, now)
        return self._run.commands

    def first_needed(self) -> tuple[int, int]:
        """The first batch that may be assigned, now or after a death, as ``(epoch, batch)``."""
        epoch, batch = self._run.ledger.first_unsettled()
        if self._run.ledger.queue.plans:
            batch -= STEPS_BACK * self._run.config.accumulate * self._run.per_global
        return epoch, max(0, batch)

    def statistics(self) -> Statistics:
        """A snapshot of counters."""
        return self._run.statistics()

    def _dispatch(self, event: m.Event, now: float) -> None:  # noqa: C901  # one case an event
        match event:
            case m.Ready():
                self._on_ready(event)
            case m.BatchReport() | m.Evaluating():
                pass  # the training is recorded; the stall timer observes both
            case m.EpochReport():
                rank = self._run.ranks[event.rank]
                rank.num_queued -= 1
                rank.open_epoch = event.open_epoch
                rank.is_starved &= event.open_epoch is not None
                self._run.note_norms({}, event.norm)
                self._epochs.measure(event.rank)
                if event.left:
                    self._on_left(event)
            case m.ParamSnapshot() | m.SyncAck():
                self._take_reply(event, now)
            case m.Averaged():
                self._on_averaged(event, now)
            case m.CapturedState():
                self._saving.on_captured(event)
            case m.TaskDone():
                self._epochs.on_task_done(event)
            case m.EvaluationRequested():
                self._epochs.tasks.callers.add(event.rank)
            case m.FinalSnapshot():
                self._run.ranks[event.rank].final = event
            case m.Halted():
                self._on_halted(event, now)
            case m.Regrouped():
                self._recovery.on_regrouped(event)
            case m.ConnectFailed():
                self._on_unconnected(event, now)
            case m.Exiting():
                self._on_exiting(event.rank, now)
            case m.Failed():
                self._on_failed(event, now)
            case m.ThreadEnded():
                self._on_thread_ended(event.rank, now)
            case m.StopRequested():
                self._on_stop(event.reason)
            case m.SaveRequested():
                request = self._saving.withdraw if event.withdrawn else self._saving.request
                request(event.ticket)
            case m.ClusterCheckpointRequested():
                self._saving.request_cluster_checkpoint(event.reserve_s)
            case m.ClusterRoundDone():
                self._on_granted(event)
            case m.AbortRequested():
                error = RunAborted("the run was aborted")
                self._finalizer.fail(m.WorkerFailure(error=error), now, saves=False)
            case m.Tick():
                self._on_tick(now)
            case _:
                assert_never(event)

    def _on_averaged(self, event: m.Averaged, now: float) -> None:
        if event.round == FINAL_ROUND:
            self._finalizer.on_averaged(event)
        elif event.round == SAVE_ROUND:
            self._saving.on_averaged(event)
        else:
            self._take_reply(event, now)

    def _take_reply(self, event: m.ParamSnapshot | m.Averaged | m.SyncAck, now: float) -> None:
        if not self._rounds.receive(event, now):
            # A round in which a rank died does not count as failed.
            self._give_up(now, counts=not self._rounds.round.must_fail)

    def _on_ready(self, event: m.Ready) -> None:
        rank = self._run.ranks[event.rank]
        if rank.state is not RankState.BUILDING:
            return
        rank.move(RankState.LIVE)
        self._run.lr_factor.enable(event.scale_invariant)
        if event.batch_statistics:
            self._run.require_batch_statistics()

    def _begin(self, now: float) -> None:
        if not any(r.state is RankState.BUILDING for r in self._run.ranks):
            self._run.enter(Phase.STOPPING if self._run.outcome.stopped else Phase.RUNNING)
            self._epochs.begin(now)
            self._saving.begin(now)
            if self._run.steps is not None:
                self._run.steps.begin(now)
            for r in self._run.live if self._run.global_step else ():
                self._run.send(r.rank, m.SetGlobalStep(step=self._run.position))
            self._limits.begin()

    def _record_report(self, event: m.Event) -> None:
        """Record the training that an event reports, before its own effect."""
        match event:
            case m.BatchReport() | m.EpochReport():
                self._on_report(event)
            case m.ParamSnapshot() | m.SyncAck() | m.CapturedState() | m.Halted():
                if event.report is not None:
                    self._on_report(event.report)

    def _on_report(self, event: m.BatchReport | m.EpochReport) -> None:
        rank, stats = self._run.ranks[event.rank], event.stats
        if rank.state is RankState.DEAD:
            return
        timed = stats.num_batches if stats.num_timed is None else stats.num_timed
        self._run.data_waits.add(event.rank, stats)
        wait_s = self._run.data_wait_s(event.rank) * stats.num_samples
        if timed and self._run.phase is Phase.RUNNING:
            timed_wait_s = wait_s * timed / stats.num_batches if stats.num_batches else 0.0
            self._run.elche.observe(event.rank, stats.compute_s + timed_wait_s, timed)
        rank.note(stats, wait_s)
        self._run.note_losses(stats)
        plans, epoch = self._run.ledger.queue.plans, self._run.ledger.find(event.epoch)
        if epoch is not None:
            epoch.stats.add(event.rank, stats)
        if self._run.steps is not None:
            part = self._run.config.batch_parts[event.rank]
            if plans:
                part = plans[0].part
            steps = self._run.steps.add(event.rank, event.epoch, stats, self._run.now, part)
            self._run.publish_steps(steps)
        self._run.shares.set_memory_limit(event.rank, stats.most_samples)
        # With one replica, or identical ones, the effect is in the result.
        if self._run.lockstep:
            self._epochs.record_time(event.rank, timed, stats.compute_s)
            num_settled = self._run.ledger.report_steps(event.rank, stats.num_batches)
            self._run.global_step += num_settled
            return
        self._run.ledger.record_trained(event.rank, stats.num_batches)
        if self._run.alone:
            self._run.ledger.freeze(event.rank)
            self._run.settle(event.rank)

    def _on_left(self, event: m.EpochReport) -> None:
        """Take back the batches of an epoch that a rank has left."""
        queue = self._run.ledger.queue
        if queue.plans and queue.plans[0].epoch == event.epoch:  # the only rank: others halt
            self._recovery.return_to(queue.num_steps_of(event.rank))
        self._epochs.leave(event.rank, event.epoch)

    def _on_exiting(self, rank: int, now: float) -> None:
        info = self._run.ranks[rank]
        if info.state in (RankState.GONE, RankState.DEAD):
            return
        if self._run.phase in (Phase.STARTING, Phase.RUNNING, Phase.STOPPING):
            # A peer may be waiting for it in the collective.
            error = RuntimeError(f"rank {rank} left before the run was over")
            self._on_death(m.WorkerFailure(error=error, rank=rank), now)
            return
        info.move(RankState.GONE)

    def _on_failed(self, event: m.Failed, now: float) -> None:
        if self._run.ranks[event.rank].state is RankState.DEAD:
            return
        failure = m.WorkerFailure(
            error=event.error, rank=event.rank, epoch=event.epoch, step=event.step
        )
        self._on_death(
            failure, now, fatal=event.fatal, answers=event.answers, saves=not event.unsafe
        )
        if self._run.ranks[event.rank].state is RankState.DEAD:
            self._run.send(event.rank, m.Shutdown(snapshot=False))

    def _on_thread_ended(self, rank: int, now: float) -> None:
        if self._run.ranks[rank].state in (RankState.GONE, RankState.DEAD):
            return
        error = RuntimeError(f"the thread of rank {rank} ended without a message")
        self._on_death(m.WorkerFailure(error=error, rank=rank), now)

    def _on_death(
        self,
        failure: m.WorkerFailure,
        now: float,
        *,
        fatal: bool = False,
        answers: bool = False,
        saves: bool = True,
    ) -> None:
        run, info = self._run, self._run.ranks[failure.rank]
        # The others receive their weights from rank 0.
        fatal |= info.state is RankState.BUILDING and failure.rank == 0
        fatal |= not run.config.continue_on_failure or run.phase is Phase.FAILING
        had_left = info.state is RankState.GONE
        is_leaving = had_left or run.phase in (Phase.LEAVING, Phase.AVERAGING)
        is_last = not any(rank is not info for rank in self._recovery.survivors)
        if answers and (fatal or is_last) and self._finalizer.collects(saves=saves):
            if info.state is RankState.LIVE:
                info.move(RankState.LEAVING)
        else:
            info.move(RankState.DEAD)
        self._epochs.tasks.lose(failure.rank)
        if run.steps is not None:
            run.steps.drop(failure.rank)
        if fatal:
            self._finalizer.fail(failure, now, saves=saves)
        elif is_leaving:
            # Its last state counts if it was received; the others are leaving.
            self._run.outcome.failures.append(failure)
            if not had_left and self._run.lockstep:
                self._run.abort_collective()
        elif is_last:
            self._finalizer.fail(failure, now, saves=saves)
        else:
            self._recovery.remove(failure, in_round=self._rounds.holds(failure.rank))
            if not self._rounds.on_death(failure.rank):
                self._give_up(now, counts=False)
            self._limits.readjust()

    def _on_halted(self, event: m.Halted, now: float) -> None:
        leaves_step = event.too_large or event.left is not None
        if leaves_step and self._run.phase is Phase.LEAVING:
            # The others are leaving, and wait for it in the last step.
            self._run.abort_collective()
        if self._run.phase not in (Phase.STARTING, Phase.RUNNING, Phase.STOPPING):
            return
        if event.too_large and not self._shrink(event):
            self._finalizer.fail(
                m.WorkerFailure(error=_out_of_memory_error(event), rank=event.rank), now
            )
            return
        self._recovery.on_halted(event)

    def _on_all_halted(self, now: float) -> None:
        """Continue from the steps that the halted ranks report, over another backend after
        repeated faults; too many halts in a row end the run.
        """
        run, recovery = self._run, self._recovery
        recovery.count_halts()
        fault, limit = recovery.fault, run.config.max_failed_rounds
        if fault is not None and recovery.num_halts >= limit:
            why = f"{recovery.num_halts} reductions failed in a row: {fault}"
            if run.exclude_backend(run.backend_choice.chosen, why):
                recovery.num_halts = 0
        if recovery.num_halts < limit:
            recovery.agree()
            return
        backend = run.backend_choice.chosen
        error = AveragingFailed(
            f"{limit} reductions in a row failed because a rank did not join in time; raise "
            "collective_timeout if the steps are long"
            if fault is None
            else f"{limit} reductions in a row failed over {backend.name}: {fault}"
        )
        self._finalizer.fail(m.WorkerFailure(error=error), now)

    def _on_unconnected(self, event: m.ConnectFailed, now: float) -> None:
        """Handle a group that could not be connected: use another backend, or end the run."""
        ends = self._run.phase in (Phase.LEAVING, Phase.AVERAGING, Phase.FAILING)
        excluded = event.backend not in self._run.backend_choice.usable
        if event.generation != self._run.generation or ends or excluded:
            return
        why = f"the ranks could not be connected: {event.error}"
        if self._run.exclude_backend(event.backend, why):
            self._recovery.num_halts = 0  # they count for the excluded backend
            return
        error = AveragingFailed(f"{event.backend.name}: {why}")
        self._finalizer.fail(m.WorkerFailure(error=error), now)

    def _shrink(self, event: m.Halted) -> bool:
        shares, ranks = self._run.shares, [r.rank for r in self._run.live]
        is_new = shares.record_out_of_memory(event.rank, event.too_large)
        return is_new and shares.may_fit(self._run.slice_samples(ranks), ranks)

    def _on_stop(self, reason: str) -> None:
        if self._run.phase in (Phase.STARTING, Phase.RUNNING):
            self._run.outcome.stop(reason)
        if self._run.phase is Phase.RUNNING:
            self._run.enter(Phase.STOPPING)

    def _on_granted(self, event: m.ClusterRoundDone) -> None:
        run = self._run
        if run.phase not in (Phase.STARTING, Phase.RUNNING):
            return
        run.ledger.end_machine_round(run.elche.shares, committed=event.round is not None)
        num_elsewhere = 0
        for grant in event.epochs:
            epoch = run.ledger.grant(grant.epoch, grant.batches, run.elche.shares)
            num_elsewhere += epoch.count_elsewhere(grant.consumed)
            if grant.complete:
                epoch.complete = True
                epoch.num_samples, epoch.others = grant.num_samples, grant.others
                if event.state is not None:
                    self._epochs.common[grant.epoch] = event.state
        run.machine_round = event.round or run.machine_round
        run.global_step += num_elsewhere
        if event.over:
            run.ledger.end()
        if event.delta is not None:
            self._pending_deltas.append(event.delta)
        if num_elsewhere and not run.lockstep:
            for rank in run.live:
                run.send(rank.rank, m.SetGlobalStep(step=run.position))

    def _send_deltas(self) -> None:
        """Send the pending deltas of other machines to every rank."""
        for delta in self._pending_deltas:
            for rank in self._run.live:
                self._run.send(rank.rank, m.ApplyDelta(delta=delta))
        self._pending_deltas.clear()

    @property
    def idle(self) -> bool:
        """True if all granted batches are trained and no message is in flight."""
        run = self._run
        if run.phase is not Phase.RUNNING or self._rounds.round.in_flight or self._pending_deltas:
            return False
        is_idle = run.ledger.is_idle(in_order=run.lockstep)
        return is_idle and not any(rank.num_queued for rank in run.live)

    def _give_up(self, now: float, *, counts: bool = True) -> None:
        """Abandon the round; too many failures in a row end the run.

        Args:
            now: The present time.
            counts: False if a rank died in the round: it then does not count.
        """
        rnd, broken = self._rounds.round, self._rounds.transport.waits
        if counts and rnd.fault is not None:
            self._rounds.record_fault(now)
        for rank in self._rounds.give_up():
            self._run.send(rank, m.Rollback(round=rnd.id))
        if not counts:
            rnd.num_failed -= 1
        if rnd.backend not in self._run.backend_choice.usable:
            rnd.num_failed = 0  # excluded while the round was in flight
        elif counts and self._run.backend_choice.num_faults and self._rounds.too_many_failed:
            # Also if the last one failed because of a death that is not known yet.
            fault = rnd.fault or "a rank did not join the last one"
            why = f"{rnd.num_failed} rounds failed in a row: {fault}"
            if self._run.exclude_backend(rnd.backend, why):
                rnd.num_failed = 0
        if self._rounds.too_many_failed:
            error = AveragingFailed(
                f"{rnd.num_failed} averaging rounds failed in a row; {self._rounds.remedy}"
            )
            self._finalizer.fail(m.WorkerFailure(error=error), now)
            return
        if broken and rnd.generation == self._run.generation and self._run.collective:
            self._recovery.regroup()
        self._limits.readjust()

    def _on_tick(self, now: float) -> None:
        rnd = self._rounds.round
        if rnd.deadline is not None and now >= rnd.deadline:
            if rnd.state is RoundState.COLLECTING:
                self._give_up(now)
            elif (missing := self._rounds.extend_deadline(now)) and self._rounds.too_many_failed:
                error = AveragingFailed(
                    f"the ranks {list(missing)} have not answered a round for "
                    f"{rnd.num_failed} times {rnd.deadline - now:g} s; {self._rounds.remedy}"
                )
                self._finalizer.fail(m.WorkerFailure(error=error), now)
        if self._finalizer.deadline is not None and now >= self._finalizer.deadline:
            self._finalizer.expire(now)
        stalled = self._stall_detector.check(now)
        if stalled is not None:
            self._finalizer.fail(m.WorkerFailure(error=stalled), now)

    def _advance(self, now: float) -> None:
        if self._rounds.round.state is not RoundState.SYNCING:
            self._epochs.publish_within()
        if self._recovery.all_halted:
            self._on_all_halted(now)
        if self._recovery.phase is not RecoveryPhase.NONE:
            self._saving.cancel()
            return
        if self._run.phase is Phase.STARTING:
            self._begin(now)
        if (
            not self._run.alone
            and self._run.phase in (Phase.RUNNING, Phase.STOPPING)
            and not self._rounds.round.in_flight
            and len(self._recovery.survivors) == 1
        ):
            self._recovery.continue_alone()
        if self._run.phase in (Phase.RUNNING, Phase.STOPPING):
            self._epochs.close(now)
            abandoned = self._epochs.abandoned
            if abandoned is not None and self._run.phase is Phase.RUNNING:
                self._finalizer.fail(m.WorkerFailure(error=_abandoned_error(abandoned.epoch)), now)
                return
            orphan = self._epochs.orphaned()
            if orphan is not None and self._epochs.uses_live_weights(orphan):
                self._epochs.send_tasks(orphan.epoch)
        self._epochs.publish()
        if not self._rounds.round.in_flight and self._at_one_step:
            self._send_deltas()
        if self._run.phase is Phase.RUNNING:
            if self._run.lockstep:
                self._continue_lockstep()
            else:
                if self._run.alone and self._may_save():
                    self._saving.request_states()
                self._epochs.assign_batches()
                self._limits.adjust()
                self._average_if_due(now)
            if self._is_over():
                self._run.enter(Phase.STOPPING)
        if self._run.phase is Phase.STOPPING:
            if self._rounds.round.in_flight:
                self._epochs.starve_steps()
            elif not self._run.lockstep or self._epochs.is_between_plans:
                self._finalizer.shut_down_ranks()
        is_ending = self._run.phase in (Phase.LEAVING, Phase.FAILING)
        if is_ending and not any(rank.present for rank in self._run.ranks):
            self._finalizer.collect(now)

    def _continue_lockstep(self) -> None:
        """Between two plans of ``SYNC``, do what all ranks must do at one step; else send plans."""
        saving, may_save = self._saving, self._may_save()
        if may_save and self._at_one_step:
            saving.request_states()
        waits = may_save or saving.is_collecting or self._pending_deltas
        self._epochs.assign_lockstep(0 if waits else saving.next_step)

    @property
    def _at_one_step(self) -> bool:
        """True if all ranks are at one step, as far as they must be."""
        epochs = self._epochs
        return not self._run.lockstep or (epochs.is_between_plans and not epochs.is_within_step)

    def _may_save(self) -> bool:
        """True if a checkpoint is due now; the end of the run makes its own."""
        return self._saving.due and not self._is_over()

    def _is_over(self) -> bool:
        if not self._epochs.all_published or self._rounds.round.in_flight:
            return False
        if not self._run.ledger.exhausted:
            return False
        if any(r.num_queued for r in self._run.live):
            return False
        # With max_steps the last epoch stays open; a fully trained one must close first.
        return not any(self._run.ledger.fully_trained(e) for e in self._run.ledger.epochs)

    def _average_if_due(self, now: float) -> None:
        live = self._run.live
        if self._rounds.round.in_flight or len(live) < 2:
            return
        orphan = self._epochs.orphaned()
        if orphan is not None:
            self._rounds.start(now, orphan)
            return
        tasks = self._epochs.tasks
        if (tasks.is_busy or not self._epochs.all_published) and self._rounds.next_transport.waits:
            return  # peers would wait in the collective for an evaluating rank
        oldest = self._run.ledger.oldest
        if oldest is not None and not self._run.ledger.fully_trained(oldest):
            oldest = None
        if (
            oldest is not None
            or tasks.due(None)
            or tasks.callers
            or self._may_save()
            or self._run.round_schedule.is_round_due(live)
        ):
            self._rounds.start(now, oldest)


def _abandoned_error(epoch: int) -> GpuWorkerError:
    return GpuWorkerError(
        f"all workers of this machine have left epoch {epoch} by break or return, and its batches "
        "are assigned to this machine: in a cluster, skip batches with continue, or end the run "
        "with worker.stop()"
    )


def _out_of_memory_error(event: m.Halted) -> BaseException:
    error = MemoryError(
        f"rank {event.rank} ran out of memory on a piece of {event.too_large} samples, and all "
        "ranks together have no memory for the global batch: use a smaller batch_size, with "
        "accumulate(n) for the same steps"
    )
    error.__cause__ = event.error
    return error
