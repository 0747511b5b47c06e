"""The coordinator: a message and a time go in, commands come out.

No thread, no queue, no clock and no random number: the same machine runs behind
:mod:`coordinator.service` and under a simulated clock. After each event it looks at the
whole state and does what is due, so the order of messages decides little and a lost
wake-up cannot be.
"""

from __future__ import annotations

from typing import assert_never

from coordinator import messages as m
from coordinator.commands import FINAL_ROUND, AbortCollective, Average, Command
from coordinator.config import CoordinatorConfig
from coordinator.core import Core
from coordinator.epochs import Epochs
from coordinator.errors import AveragingFailed
from coordinator.outcome import Failure, Outcome, Phase
from coordinator.policy import AverageBackend
from coordinator.round_keeper import RoundKeeper
from coordinator.rounds import RoundState
from coordinator.world import RankState, Statistics


class Coordinator:
    """Decides who trains what, when replicas average and when the run ends."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._core = Core(config)
        self._epochs = Epochs(self._core)
        self._rounds = RoundKeeper(self._core)
        self._phase = Phase.STARTING
        self._deadline: float | None = None

    # -- outside -----------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Where the run stands."""
        return self._phase

    @property
    def done(self) -> bool:
        """Whether ``outcome`` is final."""
        return self._phase is Phase.DONE

    @property
    def outcome(self) -> Outcome:
        """The end of the run."""
        return self._core.outcome

    @property
    def core(self) -> Core:
        """The state behind the decisions, to be looked at by tests and reports."""
        return self._core

    @property
    def rounds(self) -> RoundKeeper:
        """The averaging rounds, to be looked at by tests and reports."""
        return self._rounds

    @property
    def deadline(self) -> float | None:
        """When to send a :class:`~coordinator.messages.Tick`, if nothing else comes."""
        times = [t for t in (self._deadline, self._rounds.round.deadline) if t is not None]
        return min(times, default=None)

    def handle(self, event: m.Event, now: float) -> list[Command]:
        """Take one event and return what is to be done, in order."""
        self._core.out = []
        if self._phase is not Phase.DONE:
            self._take(event, now)
            self._advance(now)
        return self._core.out

    def statistics(self) -> Statistics:
        """A snapshot of counters."""
        return self._core.statistics()

    # -- events ------------------------------------------------------------

    def _take(self, event: m.Event, now: float) -> None:
        match event:
            case m.Ready():
                self._on_ready(event, now)
            case m.BatchReport():
                self._on_report(event)
            case m.EpochReport():
                self._on_report(event)
                self._core.ranks[event.rank].num_queued -= 1
            case m.ParamSnapshot():
                if event.report is not None:
                    self._on_report(event.report)
                self._rounds.on_snapshot(event)
            case m.Averaged():
                self._on_averaged(event, now)
            case m.SyncAck():
                if event.report is not None:
                    self._on_report(event.report)
                if not self._rounds.on_ack(event):
                    self._give_up(now)
            case m.EvalReport():
                self._epochs.on_evaluated(event)
            case m.CheckpointDone():
                self._epochs.on_saved(event)
            case m.FinalSnapshot():
                self._core.ranks[event.rank].final = event
            case m.Exiting():
                self._on_exiting(event.rank, now)
            case m.Failed():
                self._on_failed(event, now)
            case m.ThreadEnded():
                self._on_thread_ended(event.rank, now)
            case m.StopRequested():
                self._on_stop()
            case m.Tick():
                self._on_tick(now)
            case _:
                assert_never(event)

    def _on_averaged(self, event: m.Averaged, now: float) -> None:
        if event.round == FINAL_ROUND:
            self._on_final_average(event)
        elif not self._rounds.on_averaged(event):
            self._give_up(now)

    def _on_ready(self, event: m.Ready, now: float) -> None:
        rank = self._core.ranks[event.rank]
        if rank.state is not RankState.BUILDING:
            return
        rank.move(RankState.LIVE)
        if self._phase is Phase.STARTING and len(self._core.live) == len(self._core.ranks):
            self._phase = Phase.STOPPING if self._core.outcome.stopped else Phase.RUNNING
            self._epochs.begin(now)
            if not self._core.alone and not self._core.lockstep:
                for r in self._core.live:
                    allowance = self._core.gate.allowance(r.rank)
                    r.set_limit(allowance.limit)
                    self._core.send(r.rank, m.Resume(allowance=allowance))

    def _on_report(self, event: m.BatchReport | m.EpochReport) -> None:
        rank, tally = self._core.ranks[event.rank], event.tally
        if rank.state is RankState.DEAD:
            return
        if tally.num_batches and self._phase is Phase.RUNNING:
            self._core.elche.observe(event.rank, tally.compute_s, tally.num_batches)
        rank.note(tally)
        epoch = self._core.pool.find(event.epoch)
        if epoch is not None:
            epoch.tally.add(event.rank, tally)
        self._core.pool.trained(event.rank, tally.num_batches)
        if self._core.alone or self._core.lockstep:
            # One replica, or replicas that moved together: the effect is in the result.
            self._core.pool.freeze(event.rank)
            self._core.pool.settle(event.rank)
            self._core.global_step += tally.num_batches

    def _on_exiting(self, rank: int, now: float) -> None:
        info = self._core.ranks[rank]
        if info.state in (RankState.GONE, RankState.DEAD):
            return
        info.move(RankState.GONE)
        if self._rounds.round.in_flight and rank in self._rounds.round.ranks:
            self._give_up(now)  # D1: a peer may wait for it in the collective
        if self._phase in (Phase.STARTING, Phase.RUNNING, Phase.STOPPING):
            error = RuntimeError(f"rank {rank} left before the run was over")
            self._fail(Failure(error=error, rank=rank), now)

    def _on_failed(self, event: m.Failed, now: float) -> None:
        info = self._core.ranks[event.rank]
        if info.state is RankState.DEAD:
            return
        info.move(RankState.DEAD)
        self._core.send(event.rank, m.Shutdown(snapshot=False))
        self._fail(
            Failure(error=event.error, rank=event.rank, epoch=event.epoch, step=event.step), now
        )

    def _on_thread_ended(self, rank: int, now: float) -> None:
        info = self._core.ranks[rank]
        if info.state in (RankState.GONE, RankState.DEAD):
            return
        info.move(RankState.DEAD)
        error = RuntimeError(f"the thread of rank {rank} ended without a word")
        self._fail(Failure(error=error, rank=rank), now)

    def _on_stop(self) -> None:
        if self._phase in (Phase.STARTING, Phase.RUNNING):
            self._core.outcome.stopped = True
        if self._phase is Phase.RUNNING:
            self._phase = Phase.STOPPING

    def _give_up(self, now: float) -> None:
        """The round failed; too many of them in a row end the run."""
        self._rounds.give_up()
        limit = self._core.config.max_failed_rounds
        if self._rounds.round.num_failed >= limit and self._phase is Phase.RUNNING:
            error = AveragingFailed(
                f"{limit} averaging rounds failed in a row; raise snapshot_timeout "
                f"({self._core.config.snapshot_timeout_s} s) if the steps are long"
            )
            self._fail(Failure(error=error), now)

    def _on_tick(self, now: float) -> None:
        if self._rounds.round.deadline is not None and now >= self._rounds.round.deadline:
            self._give_up(now)
        if self._deadline is not None and now >= self._deadline:
            self._core.outcome.missing = tuple(r.rank for r in self._core.ranks if r.present)
            self._finish()

    # -- what is due -------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Do everything that is due in the present state."""
        if self._phase in (Phase.RUNNING, Phase.STOPPING):
            self._epochs.close(now)
        self._epochs.publish()
        if self._phase is Phase.RUNNING:
            if self._core.lockstep:
                self._epochs.deal_lockstep(now)
            else:
                self._epochs.deal(now)
                self._adjust_limits()
                self._average_if_due(now)
            if self._over():
                self._phase = Phase.STOPPING
        if self._phase is Phase.STOPPING and not self._rounds.round.in_flight:
            self._dismiss()
        if self._phase is Phase.LEAVING:
            self._collect_finals()
        if self._phase is Phase.FAILING and not any(r.present for r in self._core.ranks):
            self._finish()

    def _over(self) -> bool:
        """Whether nothing is left to train, average, evaluate or publish."""
        if not self._epochs.all_published or self._rounds.round.in_flight:
            return False
        if not self._core.pool.exhausted:
            return False
        if any(r.num_queued for r in self._core.live):
            return False
        # With max_steps the last epoch stays open; one that is trained has yet to close.
        return not any(self._core.pool.fully_trained(e) for e in self._core.pool.epochs)

    def _average_if_due(self, now: float) -> None:
        live = self._core.live
        if self._rounds.round.in_flight or len(live) < 2:
            return
        if not self._epochs.all_published and self._core.config.backend is not AverageBackend.CPU:
            return  # peers would wait for the lead, which is evaluating, inside the collective
        oldest = self._core.pool.oldest
        if oldest is not None and not self._core.pool.fully_trained(oldest):
            oldest = None
        if oldest is not None or self._core.gate.due(live):
            work = (None, None) if oldest is None else self._epochs.per_epoch(oldest)
            self._rounds.start(now, work, closing=oldest is not None)

    def _adjust_limits(self) -> None:
        # Between SyncNow and its acknowledgement a limit could be read against either round.
        if self._core.alone or self._rounds.round.state is RoundState.SYNCING:
            return
        live = self._core.live
        for rank in live:
            limit = self._core.gate.limit(rank, live)
            if limit == rank.limit:
                continue
            raised = limit is None or (rank.limit is not None and limit > rank.limit)
            rank.set_limit(limit)
            if raised:
                self._core.send(rank.rank, m.Resume(allowance=self._core.gate.relimit(rank, limit)))
            elif limit is not None:
                self._core.send(rank.rank, m.Throttle(limit=limit))

    # -- the end -----------------------------------------------------------

    def _dismiss(self) -> None:
        for rank in self._core.ranks:
            if rank.state in (RankState.LIVE, RankState.BUILDING):
                snapshot = rank.state is RankState.LIVE
                rank.move(RankState.LEAVING)
                self._core.send(rank.rank, m.Shutdown(snapshot=snapshot))
        self._phase = Phase.LEAVING

    def _collect_finals(self) -> None:
        if any(r.present for r in self._core.ranks):
            return
        finals = [r.final for r in self._core.ranks if r.final is not None]
        weights = [f.num_samples for f in finals]
        if len(finals) <= 1 or not any(weights):
            self._core.outcome.payload = finals[0].payload if finals else None
            self._finish()
            return
        self._phase = Phase.AVERAGING
        self._core.out.append(
            Average(
                round=FINAL_ROUND,
                ranks=tuple(f.rank for f in finals),
                payloads=tuple(f.payload for f in finals),
                weights=tuple(weights),
            )
        )

    def _on_final_average(self, event: m.Averaged) -> None:
        if self._phase is not Phase.AVERAGING:
            return
        self._core.outcome.payload = event.average
        if event.error is not None:
            self._core.outcome.failure = Failure(error=event.error)
        self._finish()

    def _fail(self, failure: Failure, now: float) -> None:
        if self._core.outcome.failure is None:
            self._core.outcome.failure = failure
        if self._phase is Phase.FAILING:
            return
        self._phase = Phase.FAILING
        self._deadline = now + self._core.config.grace_s
        if self._rounds.round.in_flight:
            self._rounds.give_up()
        self._core.out.append(AbortCollective())
        for rank in self._core.ranks:
            if rank.present:
                self._core.send(rank.rank, m.Shutdown(snapshot=False))

    def _finish(self) -> None:
        self._phase = Phase.DONE
        self._deadline = None
        self._rounds.round.deadline = None
        self._rounds.round.forget_tensors()
        for rank in self._core.ranks:
            rank.final = None
