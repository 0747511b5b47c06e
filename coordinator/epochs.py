"""Scheduling of epochs: plans to the ranks, evaluation, closing and publishing in order."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator import messages as m
from coordinator.average_tasks import AverageTasks
from coordinator.ledger import Epoch
from coordinator.messages import PublishEpoch
from coordinator.metrics import StepMetrics
from coordinator.run_state import Rank, RunState
from coordinator.shares import PieceTimes
from coordinator.steps import StepPlan

logger = logging.getLogger(__name__)
PLAN_S = 0.5
"""Target duration of a plan under ``SYNC``: the ranks stop, save and evaluate between two plans."""
PLAN_STEPS = 5
"""Maximum optimizer steps in a plan with measured shares, or with granted batches. Ranks hold the
next plan while they train one, so that a changed speed takes effect in the fourth plan at the
latest."""
FIRST_PLANS, FIRST_PLAN_STEPS = 5, 2
"""The first plans with measured shares are short, until the probe sizes have been measured: before
that the slowest rank trains as many samples as the others."""


class EpochScheduler:
    """Sends plans, closes epochs once all batches are settled, and publishes their metrics.

    Attributes:
        common: In a cluster, the state of all machines at the end of each closed epoch that is
            not published yet.
        resumed_s: Time since the last epoch closed, before a resume.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self.tasks = AverageTasks(
            run.config,
            live=lambda: [rank.rank for rank in run.live],
            choose=run.evaluation_rank,
            num_trained=lambda: run.num_trained,
            oldest=lambda: None if run.ledger.oldest is None else run.ledger.oldest.epoch,
        )
        self.common: dict[int, m.Payload] = {}
        self._closing: deque[_Closing] = deque()
        self._last_close = 0.0
        self._values: tuple[float | None, ...] = ()
        self.resumed_s = 0.0
        self._sent: deque[tuple[float, int]] = deque()  # plans of SYNC in progress: time, steps
        self._plan_ended_at = 0.0  # the last one
        self._step_s = PLAN_S
        self._times = PieceTimes() if run.config.balance else None

    def begin(self, now: float) -> None:
        """Start the run, :attr:`resumed_s` after the last epoch closed."""
        self._last_close = now - self.resumed_s
        self.tasks.mark(tuple(m.TaskKind))

    @property
    def elapsed_s(self) -> float:
        """Time since the last epoch closed."""
        return self._run.now - self._last_close

    def closing(self) -> list[tuple[Epoch, float]]:
        """Closed epochs that are not published yet, and their durations."""
        return [(closing.epoch, closing.epoch_s) for closing in self._closing]

    def all_open(self) -> list[Epoch]:
        """Every epoch that is open or not published yet."""
        return [*(closing.epoch for closing in self._closing), *self._run.ledger.epochs]

    @property
    def all_published(self) -> bool:
        """True if no closed epoch waits for its evaluation or checkpoint call."""
        return not self._closing

    def send_tasks(self, epoch: int | None) -> None:
        """Send the tasks that are due on the live weights, or on the state of all machines.

        Args:
            epoch: As for :meth:`AverageTasks.due`.
        """
        tasks = self.tasks.begin(epoch)
        state = None if epoch is None else self.common.get(epoch)
        for rank in self._run.live if tasks else ():
            own = tuple(t for t in tasks if t.kind.is_shared or t.rank == rank.rank)
            if own:
                self._run.send(rank.rank, m.RunTasks(tasks=own, state=state))

    def _batches_until_pause(self, assigned: int, pause_at: int | None = None) -> int | None:
        """Batches to assign before all ranks stop for an evaluation; ``None``: no limit.

        Args:
            assigned: Batches of all ranks that are trained or assigned.
            pause_at: Batches after which they stop for something else.
        """
        run, c = self._run, self._run.config
        stops = [at for at in (self.tasks.next_within, pause_at) if at is not None]
        if not stops:
            return None
        in_step = c.accumulate * (run.per_global if run.lockstep else 1)
        return max(0, -(-(min(stops) - assigned) // in_step) * in_step)

    def publish_within(self) -> None:
        """Publish results within epochs, whose averages can no longer be given up."""
        for event in self.tasks.take_within():
            task = event.task
            if task.kind is m.TaskKind.REQUESTED:
                continue
            assert task.at is not None, "it is within an epoch"
            metrics = StepMetrics(
                step=task.at,
                epoch=task.epoch,
                num_batches=0,
                avg_loss=math.nan,
                scalars=_scalars({task.kind: dict(event.values or ())}),
                learning_rate=math.nan,
                throughput=math.nan,
            )
            self._run.publish_steps([metrics])

    def on_task_done(self, event: m.TaskDone) -> None:
        """Handle the end of a rank's part of a task."""
        if self.tasks.done(event) and event.task.kind is m.TaskKind.VALIDATE:
            self._last_close += event.seconds  # no training time
            if self._run.steps is not None:
                self._run.steps.exclude(event.seconds)

    def assign_batches(self) -> None:
        """Keep two plans queued on every rank: one in progress and the next.

        Every rank receives a first plan before any receives a second. Under a lead limit all ranks
        train at one pace, so that chunks follow the limit and not the speed.
        """
        for rank in self._run.live:
            if rank.open_epoch is not None and not rank.num_queued:
                self._continue_step(rank, rank.open_epoch)
        short = [
            rank
            for rank in self._run.live
            if rank.num_queued < 2 and (rank.num_queued or rank.open_epoch is None)
        ]
        if not short:
            return
        lead = self._run.config.max_batch_diff
        max_chunk = None if lead is None else lead + 1
        limit: int | None = None
        if self._run.alone and self._run.config.stops_within:
            # The rank stops for each evaluation.
            if any(rank.num_queued for rank in self._run.live):
                return
            self.send_tasks(None)
            limit = self._batches_until_pause(self._run.num_trained)
            if self.tasks.is_busy or limit == 0:
                return
        shares, seconds = self._run.elche.shares, self._run.elche.seconds_per_batch
        for depth in (1, 2) if limit is None else (1,):  # the next plan would exceed the limit
            for rank in short:
                if rank.num_queued >= depth:
                    continue
                chunk = self._run.ledger.assign_chunk(
                    rank.rank,
                    shares=shares,
                    seconds_per_batch=seconds,
                    max_chunk=max_chunk,
                    limit=limit,
                )
                if chunk is not None:
                    self._send_empty_plans(rank, chunk[0])
                    self._start(rank, self._chunk(rank.rank, *chunk))

    def _continue_step(self, rank: Rank, number: int) -> None:
        """Send another batch to a rank within a step over several batches."""
        run = self._run
        chunk = run.ledger.assign_chunk(
            rank.rank, shares=run.elche.shares, seconds_per_batch=None, limit=1, within=number
        )
        if chunk is not None:
            self._start(rank, self._chunk(rank.rank, *chunk))
        else:
            self._end_step(rank, number)

    def _may_continue_steps(self) -> bool:
        """True under ``SYNC`` if batches are left for steps over several batches."""
        may_continue, ledger = True, self._run.ledger
        for rank in self._run.live:
            number = rank.open_epoch
            epoch = None if number is None else ledger.find(number)
            if number is not None and (epoch is None or not ledger.has_more(epoch)):
                self._end_step(rank, number)
                may_continue = False
        return may_continue

    def _end_step(self, rank: Rank, number: int) -> None:
        """Send a plan without batches within a step over several batches. If some may follow, the
        rank handles its messages meanwhile; if not, a plan of the next epoch ends the step by an
        error.
        """
        if self._run.ledger.may_assign(number, rank.rank):
            self._starve(rank, number)
        else:
            self._start(rank, m.EpochPlan(epoch=number + 1))

    def starve_steps(self) -> None:
        """Have ranks within a step over several batches handle their messages: the run ends."""
        for rank in self._run.live:
            if rank.open_epoch is not None and not rank.num_queued:
                self._starve(rank, rank.open_epoch)

    def _starve(self, rank: Rank, number: int) -> None:
        if not rank.is_starved:
            rank.is_starved = True
            self._start(rank, m.EpochPlan(epoch=number))

    def _chunk(self, rank: int, epoch: int, spans: tuple[range, ...]) -> m.EpochPlan:
        cuts = self._run.ledger.cuts
        if not cuts.unequal:
            return m.EpochPlan(epoch=epoch, batches=spans)
        numbers, pieces = cuts.of_rank(rank, spans)
        return m.EpochPlan(epoch=epoch, batches=numbers, pieces=pieces)

    def _send_empty_plans(self, rank: Rank, before: int) -> None:
        """Send empty plans of earlier epochs in which the rank has no batch."""
        for epoch in self._run.ledger.epochs:
            if epoch.epoch < before and rank.rank not in epoch.notified:
                epoch.notified.add(rank.rank)
                self._start(rank, m.EpochPlan(epoch=epoch.epoch))

    def _start(self, rank: Rank, plan: m.EpochPlan) -> None:
        name, closed = self._run.config.scheduler_metric, self._run.outcome.metrics
        if name is not None and closed:
            self._values += tuple(e.value(name) for e in closed[len(self._values) :])
            plan = replace(plan, metrics=self._values)
        rank.num_queued += 1
        rank.is_starved &= not plan.num_batches
        self._run.send(rank.rank, m.StartEpoch(plan=plan))

    def assign_lockstep(self, pause_at: int | None) -> None:
        """Send the next steps to all ranks once they have trained the plan before the last.

        The sizes of the pieces come with the plan, so that all ranks agree on them; the measured
        times of a plan decide the sizes of the plan after the next.

        Args:
            pause_at: Batches after which no plan follows; ``None``: no limit.
        """
        while self._assign_next(pause_at):
            pass

    @property
    def is_between_plans(self) -> bool:
        """True if no rank has a plan: under ``SYNC`` all are at one step."""
        return not any(rank.num_queued for rank in self._run.live)

    @property
    def is_within_step(self) -> bool:
        """True if ranks handle no messages: their plans have ended within a step over several
        batches.
        """
        return any(r.open_epoch is not None and not r.is_starved for r in self._run.live)

    def _assign_next(self, pause_at: int | None) -> bool:
        run = self._run
        live, accumulate, queue = run.live, run.config.accumulate, run.ledger.queue
        most_queued = max((r.num_queued for r in live), default=0)
        self._measure_plans(most_queued)
        is_open = any(rank.open_epoch is not None for rank in live)
        if is_open and not most_queued and not self._may_continue_steps():
            return False  # before what follows: a rank within a step would never answer
        if most_queued > 1 or not self.all_published:
            # Peers of an evaluating lead wait here and not in a collective with a timeout.
            return False
        before = queue.plans[-1] if queue.plans and (most_queued or is_open) else None
        if before is not None and not queue.may_continue:
            return False
        oldest = run.ledger.oldest
        if before is not None and oldest is not None and before.epoch != oldest.epoch:
            return False  # an epoch trained by other machines is announced first
        if before is None:
            self.send_tasks(None)
        assigned = run.num_trained if before is None else before.first_step + len(before.span)
        left = self._batches_until_pause(assigned, pause_at)
        if left == 0 and not most_queued and is_open:
            left = accumulate * run.per_global  # the step ends before the pause
        if self.tasks.is_busy or left == 0:
            return False
        ranks = [r.rank for r in self._participants()]
        if not ranks:
            return False
        most = self._num_steps(ranks) * accumulate * run.per_global
        taken = run.ledger.take_global(
            ranks, run.elche.shares, most if left is None else min(most, left)
        )
        if taken is None:
            return False
        if before is None:
            queue.clear()
        plan = self._plan(*taken, ranks, assigned)
        queue.add(plan)
        num_steps = queue.steps_of(plan)
        if not run.alone:
            run.count_averagings(num_steps, run.ledger.oldest)
        if self._times is not None:
            self._times.expect(plan, anew=before is None)
        self._sent.append((run.now, num_steps))
        self._send_plan(plan)
        return True

    def _send_plan(self, plan: StepPlan) -> None:
        epoch, then = self._run.ledger.epochs[0], m.AfterPlan.MORE
        if not epoch.open:
            then = m.AfterPlan.EPOCH_END
        elif not self._run.ledger.has_more(epoch):
            then = m.AfterPlan.RUN_END
        elif self._batches_until_pause(plan.first_step + len(plan.span)) == 0:
            then = m.AfterPlan.PAUSE
        for rank in self._run.live:
            self._start(rank, m.EpochPlan(epoch=plan.epoch, steps=plan, then=then))

    def _measure_plans(self, num_queued: int) -> None:
        """Measure the steps of the plans that all ranks have completed. A plan is at most about
        twice as long as the one before: reports may arrive together.
        """
        if not self._run.ledger.queue.plans:
            self._sent.clear()  # after a death
        while len(self._sent) > num_queued:
            sent_at, num_steps = self._sent.popleft()
            elapsed_s = self._run.now - max(sent_at, self._plan_ended_at)
            self._plan_ended_at = self._run.now
            self._step_s = max(elapsed_s / num_steps, self._step_s / 2)

    def _num_steps(self, ranks: Sequence[int]) -> int:
        """Optimizer steps in the next plan, which has a batch for each one that is read ahead."""
        c = self._run.config
        if c.balance and self._run.shares.num_plans < FIRST_PLANS:
            return FIRST_PLAN_STEPS
        ahead = c.read_ahead // (c.accumulate * self._run.num_slices(ranks))
        num = max(1, int(PLAN_S / self._step_s), ahead)
        return min(num, PLAN_STEPS) if c.balance or c.granted else num

    def _plan(self, epoch: int, span: range, ranks: Sequence[int], first_step: int) -> StepPlan:
        run, ledger = self._run, self._run.ledger
        num_slices, batch_size = run.num_slices(ranks), run.config.batch_size
        parts = run.shares.sizes(run.slice_samples(ranks), ranks)
        sizes = dict(zip(ranks, parts, strict=True))
        whole = run.per_global * batch_size
        start, stop = ledger.cuts.bounds(span)
        num_last = stop - start - (len(span) - 1) // run.per_global * whole
        is_short = num_last < whole
        return StepPlan(
            epoch=epoch,
            span=span,
            start=start,
            ranks=tuple(ranks),
            whole=run.shares.pieces(whole, num_slices, sizes),
            last=run.shares.pieces(num_last, num_slices, sizes, is_short=is_short),
            per_global=run.per_global,
            first_step=first_step,
            key_stride=ledger.batches_per_epoch + run.per_global,
            omits_empty=is_short and set(parts) == {batch_size} and not ledger.may_assign(epoch),
        )

    def record_time(self, rank: int, num_pieces: int, compute_s: float) -> None:
        """Record the compute time of a rank's next pieces with samples."""
        if self._times is not None:
            self._times.record(rank, num_pieces, compute_s)

    def measure(self, rank: int) -> None:
        """Record the time of a rank's completed plan in the shares."""
        times = None if self._times is None else self._times.take(rank)
        if times is not None:
            num_samples, compute_s = times
            wait_s = self._run.data_wait_s(rank) * num_samples
            self._run.shares.observe(rank, num_samples, compute_s + wait_s)

    def orphaned(self) -> Epoch | None:
        """A closed epoch with tasks that no live rank is doing: a rank died before their end."""
        closed = (closing.epoch for closing in self._closing)
        return next((epoch for epoch in closed if self.tasks.due(epoch.epoch)), None)

    def uses_live_weights(self, epoch: Epoch) -> bool:
        """True if the tasks on a closed epoch need no averaging round.

        Under lockstep and with one rank the live weights are the average. In a cluster the state
        of all machines is available.
        """
        return self._run.lockstep or self._run.alone or epoch.epoch in self.common

    def close(self, now: float) -> None:
        """Close epochs whose batches are all settled, in order.

        Epochs closed by one averaging share the time since the last one closed.
        """
        num_before = len(self._closing)
        self._end_left()
        while self._close_settled():
            self._end_left()  # of the epoch that is the oldest now
        closed = list(self._closing)[num_before:]
        for closing in closed:
            closing.epoch_s = (now - self._last_close) / len(closed)
        if closed:
            self._last_close = now

    def leave(self, rank: int, number: int) -> None:
        """A rank has left an epoch, and has reported what it has trained of it."""
        self._run.ledger.leave_epoch(rank, number, self._run.elche.shares)

    @property
    def abandoned(self) -> Epoch | None:
        """The oldest epoch, if all live ranks have left it while batches of it are open."""
        epoch = self._run.ledger.oldest
        if epoch is None or not epoch.open or not epoch.left:
            return None
        return epoch if all(rank.rank in epoch.left for rank in self._run.live) else None

    def _end_left(self) -> None:
        """End the oldest epoch short once all live ranks have left it."""
        epoch = self.abandoned
        if epoch is not None and epoch.granted is None:
            omitted = self._run.ledger.end_short(epoch)
            logger.warning(
                "epoch %d ends short: all workers have left it, and %d samples are not trained",
                epoch.epoch,
                omitted,
            )

    def _participants(self) -> list[Rank]:
        """Live ranks that have not left the oldest epoch."""
        oldest = self._run.ledger.oldest
        left = set() if oldest is None else oldest.left
        return [rank for rank in self._run.live if rank.rank not in left]

    def _close_settled(self) -> bool:
        """Close the settled epochs, oldest first; True if there were any."""
        num_before = len(self._closing)
        while (epoch := self._run.ledger.oldest) is not None and epoch.settled:
            due = self.tasks.at_end(epoch.epoch)
            if self.uses_live_weights(epoch):
                if self._run.lockstep and any(r.num_queued for r in self._run.live):
                    break
                if not epoch.averaged:
                    self.send_tasks(epoch.epoch)
            elif due and not epoch.averaged:
                break
            for rank in self._run.live:
                self._send_empty_plans(rank, epoch.epoch + 1)
            self._run.ledger.epochs.popleft()
            self.tasks.mark(due)
            self._closing.append(_Closing(epoch=epoch, epoch_s=0.0))
        return len(self._closing) > num_before

    def publish(self, *, anyway: bool = False) -> None:
        """Publish closed epochs, in order, once their evaluation and checkpoint call are done.

        Args:
            anyway: Do not wait for them: no rank is left.
        """
        while self._closing and (anyway or self.tasks.is_done(self._closing[0].epoch.epoch)):
            head = self._closing.popleft()
            self.common.pop(head.epoch.epoch, None)
            self._publish(head.epoch, head.epoch_s, head.epoch.num_samples)

    def publish_partial(self) -> None:
        """Publish the trained part of the epochs within which ``max_steps`` ends the run."""
        open_epochs = [e for e in self._run.ledger.epochs if e.stats.num_samples]
        for epoch in open_epochs:
            num_samples = epoch.stats.num_samples - epoch.num_retrained
            self._publish(epoch, self.elapsed_s / len(open_epochs), num_samples, partial=True)

    def _publish(
        self, epoch: Epoch, epoch_s: float, num_samples: int, *, partial: bool = False
    ) -> None:
        if self._run.steps is not None:
            self._run.publish_steps(self._run.steps.flush())
        metrics = epoch.stats.close(
            epoch=epoch.epoch,
            epoch_s=epoch_s,
            num_samples=num_samples,
            num_retrained=epoch.num_retrained,
            num_averagings=epoch.num_averagings,
            devices=self._run.config.devices,
            divergence=epoch.divergence,
            param_norm=epoch.norm,
            lr_factor=self._run.lr_factor.value,
            machine=self._run.config.machine,
            others=epoch.others,
            extra_scalars=_scalars(self.tasks.take_results(epoch.epoch)),
            partial=partial,
        )
        self._run.outcome.metrics.append(metrics)
        # A copy: users may modify it while a checkpoint reads the original.
        given = replace(metrics, scalars=metrics.scalars.copy())
        self._run.emit(PublishEpoch(metrics=given))


@dataclass(slots=True)
class _Closing:
    """A closed epoch that waits for its evaluation or checkpoint call."""

    epoch: Epoch
    epoch_s: float


def _scalars(results: Mapping[m.TaskKind, Mapping[str, float]]) -> dict[str, float]:
    """The results of evaluations and validations as scalars of the metrics."""
    prefixes = {m.TaskKind.EVALUATE: "eval", m.TaskKind.VALIDATE: "val"}
    return {
        f"{prefix}/{name}": value
        for kind, prefix in prefixes.items()
        for name, value in results.get(kind, {}).items()
    }
