"""Scheduling of epochs: plans to the ranks, evaluation, closing and publishing in order."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator import messages as m
from coordinator.ledger import Epoch, LockstepPlan
from coordinator.messages import PublishEpoch
from coordinator.metrics import StepMetrics
from coordinator.run_state import Rank, RunState
from coordinator.validator import Tasks, Validation, Validator

logger = logging.getLogger(__name__)
PLAN_STEPS = 5
"""Optimizer steps in a plan with measured shares, or with granted batches. Ranks hold the next plan
while they train one, so that a changed speed takes effect in the fourth plan at the latest."""
FIRST_PLANS, FIRST_PLAN_STEPS = 5, 2
"""The first plans with measured shares are short, until the probe sizes have been measured: before
that the slowest rank trains as many samples as the others."""
FIXED_PLAN_STEPS = 50
"""Optimizer steps in a plan of pieces with fixed sizes."""


class EpochScheduler:
    """Sends plans, closes epochs once all batches are settled, and publishes their metrics.

    Attributes:
        common: In a cluster, the state of all machines at the end of each closed epoch that is
            not published yet.
        resumed_s: Time since the last epoch closed, before a resume.
        validator: The validations.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self.common: dict[int, m.Payload] = {}
        self.validator = Validator(run.config)
        self._closing: deque[_Closing] = deque()
        self._last_close = 0.0
        self._values: tuple[float | None, ...] = ()
        self._num_evaluated = 0  # multiples of eval_every passed
        self._num_validated = 0  # multiples of val_every_steps passed
        self._evaluating: tuple[int, int] | None = None  # (rank, batches before)
        self.resumed_s = 0.0

    def begin(self, now: float) -> None:
        """Start the run, :attr:`resumed_s` after the last epoch closed."""
        self._last_close = now - self.resumed_s
        self._mark_evaluated()
        self._mark_validated()

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

    def _find(self, number: int) -> Epoch | None:
        for closing in self._closing:
            if closing.epoch.epoch == number:
                return closing.epoch
        return self._run.ledger.find(number)

    @property
    def is_evaluating(self) -> bool:
        """True while ranks evaluate within an epoch."""
        if self._evaluating is not None and self._run.is_live(self._evaluating[0]):
            return True
        if self._run.evaluations.waits_for(self._speeds):
            return True
        within = self.validator.within
        return within is not None and within.waits_for(self._speeds)

    @property
    def _speeds(self) -> dict[int, float]:
        """Samples a second of each live rank; 0: not measured."""
        return {
            r.rank: r.num_samples / r.compute_s if r.compute_s > 0 else 0.0 for r in self._run.live
        }

    @property
    def evaluation_due(self) -> bool:
        """True if an evaluation within the open epoch is due."""
        return self._is_due(self._run.config.eval_every, self._num_evaluated)

    def begin_evaluation(self, lead: int) -> tuple[int, int]:
        """Record the start of an evaluation within the open epoch.

        Returns:
            The epoch, and the number of batches before the evaluation.
        """
        oldest = self._run.ledger.oldest
        assert oldest is not None, "no evaluation is due"
        self._evaluating = lead, self._run.num_trained
        return oldest.epoch, self._run.num_trained

    def cancel_evaluation(self, eval_at: int | None) -> None:
        """Make an evaluation due again: its average was not made."""
        if self._evaluating is not None and self._evaluating[1] == eval_at:
            self._evaluating = None

    @property
    def validation_due(self) -> bool:
        """True if a validation within the open epoch is due."""
        return self._is_due(self._run.config.val_every_steps, self._num_validated)

    def _is_due(self, every: int | None, num_done: int) -> bool:
        if every is None or self._run.ledger.oldest is None or self.is_evaluating:
            return False
        return self._run.num_trained // every > num_done

    def begin_validation(self, closing: Epoch | None = None) -> Validation:
        """Begin a validation of an average, for all live ranks.

        Args:
            closing: The epoch that it closes; ``None``: it is within the open epoch.
        """
        if closing is not None:
            return self.validator.begin(closing.epoch, None, self._speeds)
        oldest = self._run.ledger.oldest
        assert oldest is not None, "no validation is due"
        return self.validator.begin(oldest.epoch, self._run.num_trained, self._speeds)

    def cancel_validation(self, validation: Validation | None) -> None:
        """Make a validation due again: its average was rolled back."""
        self.validator.cancel(validation)
        if validation is not None and validation.at is None:
            epoch = self._find(validation.epoch)
            if epoch is not None:
                epoch.validation = None

    def evaluate_if_due(self) -> None:
        """Send the evaluation of the live weights to one rank, and a validation to all."""
        evaluates, validates = self.evaluation_due, self.validation_due
        if evaluates:
            lead = self._run.evaluation_rank(within=True)
            epoch, eval_at = self.begin_evaluation(lead)
            self._run.send(lead, m.Evaluate(epoch=epoch, eval_at=eval_at))
        if validates:
            validation = self.begin_validation()
            self._send_tasks(validation, validation.tasks)

    def _send_tasks(
        self, validation: Validation, tasks: Tasks, state: m.Payload | None = None
    ) -> None:
        for rank, batches in tasks.items():
            self._run.send(rank, m.Validate(task=validation.message(batches), state=state))

    def _mark_evaluated(self) -> None:
        every = self._run.config.eval_every
        if every is not None:
            self._num_evaluated = self._run.num_trained // every

    def _mark_validated(self) -> None:
        every = self._run.config.val_every_steps
        if every is not None:
            self._num_validated = self._run.num_trained // every

    def _batches_until_evaluation(self, plan: LockstepPlan | None) -> int | None:
        """Batches to assign before all ranks stop for an evaluation; ``None``: no limit.

        Args:
            plan: The plan in progress; ``None``: the last one is trained.
        """
        run, c = self._run, self._run.config
        assigned = run.num_trained if plan is None else plan.first_step + plan.num_batches
        passed = ((c.eval_every, self._num_evaluated), (c.val_every_steps, self._num_validated))
        left = [(num + 1) * every - assigned for every, num in passed if every is not None]
        if not left:
            return None
        in_step = c.accumulate * (run.per_global if run.lockstep else 1)
        return max(0, -(-min(left) // in_step) * in_step)

    def _on_mid_epoch_evaluation(self, event: m.EvalReport, eval_at: int) -> None:
        if self._evaluating != (event.rank, eval_at):
            return  # the average was rolled back
        self._evaluating = None
        self._mark_evaluated()
        scalars = {f"eval/{name}": value for name, value in event.values}
        self._publish_within(event.epoch, eval_at, scalars)

    def _publish_within(self, epoch: int, step: int, scalars: dict[str, float]) -> None:
        metrics = StepMetrics(
            step=step,
            epoch=epoch,
            num_batches=0,
            avg_loss=math.nan,
            scalars=scalars,
            learning_rate=math.nan,
            throughput=math.nan,
        )
        self._run.publish_steps([metrics])

    def on_validated(self, event: m.ValidationReport) -> None:
        """Handle results of a validation."""
        done = self.validator.on_report(event)
        if done is None:
            return
        self._last_close += done.duration_s  # no training time
        if self._run.steps is not None:
            self._run.steps.exclude(done.duration_s)
        if done.at is not None:
            self._mark_validated()
            scalars = {f"val/{name}": value for name, value in done.means.items()}
            self._publish_within(done.epoch, done.at, scalars)
            return
        epoch = self._find(done.epoch)
        if epoch is not None:
            epoch.validation = done.means

    def on_evaluated(self, event: m.EvalReport) -> None:
        """Handle the results of an evaluation."""
        if event.eval_at is not None:
            self._on_mid_epoch_evaluation(event, event.eval_at)
            return
        epoch = self._find(event.epoch)
        if epoch is not None:
            epoch.evaluation = dict(event.values)

    def on_saved(self, event: m.CheckpointDone) -> None:
        """Handle the return of the lead's checkpoint function."""
        epoch = self._find(event.version - 1)
        if epoch is not None:
            epoch.saved = True

    def _is_done(self, epoch: Epoch) -> bool:
        return self.pending_work(epoch) == (None, None) and not self.needs_validation(epoch)

    def needs_validation(self, epoch: Epoch) -> bool:
        """True if the average that closes an epoch is to be validated and has no result yet."""
        return self._is_validated(epoch) and epoch.validation is None

    def _is_validated(self, epoch: Epoch) -> bool:
        """True if the average that closes a trained epoch is validated, by the number of epochs or
        of steps.
        """
        if epoch.is_validated is None:
            every, num_trained = self._run.config.val_every_steps, self._run.num_trained
            by_steps = every is not None and num_trained // every > self._num_validated
            epoch.is_validated = by_steps or self.validator.is_due(epoch.epoch)
        return epoch.is_validated

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
            self.evaluate_if_due()
            limit = self._batches_until_evaluation(None)
            if self.is_evaluating or limit == 0:
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
        if self._run.ledger.may_assign(rank.rank, number):
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
        if not self._run.ledger.unequal:
            return m.EpochPlan(epoch=epoch, batches=spans)
        numbers, pieces = self._run.ledger.batches_of_rank(rank, spans)
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
        rank.is_starved &= not (plan.batches or plan.shares)
        self._run.send(rank.rank, m.StartEpoch(plan=plan))

    def assign_lockstep(self) -> None:
        """Send the next epoch to all ranks once they have trained the last.

        Where global batches are split into pieces, send the next steps once all ranks have trained
        the plan before the last. Sizes come with the plan, so that all ranks agree on them; the
        measured times of a plan decide the sizes of the plan after the next.
        """
        while self._assign_next():
            pass

    @property
    def is_within_step(self) -> bool:
        """True if ranks handle no messages: their plans have ended within a step over several
        batches.
        """
        return any(r.open_epoch is not None and not r.is_starved for r in self._run.live)

    @property
    def _splits(self) -> bool:
        run = self._run
        if run.config.partition_ratios is not None:
            return False
        ranks = [rank.rank for rank in self._participants()]
        if run.shares is not None or len(ranks) != run.per_global:
            return True
        return run.num_slices(ranks) > 1

    def _assign_next(self) -> bool:
        run, splits = self._run, self._splits
        live, accumulate = run.live, run.config.accumulate
        most_queued = max((r.num_queued for r in live), default=0)
        if most_queued > int(splits) or not self.all_published:
            # Peers of an evaluating lead wait here and not in a collective with a timeout.
            return False
        is_open = any(rank.open_epoch is not None for rank in live)
        if is_open and not most_queued and not self._may_continue_steps():
            return False
        before = run.plan if most_queued or is_open else None
        if before is not None and not before.has_whole_steps(accumulate):
            return False
        oldest = run.ledger.oldest
        if before is not None and oldest is not None and before.epoch != oldest.epoch:
            return False  # an epoch trained by other machines is announced first
        if before is None:
            self.evaluate_if_due()
        left = self._batches_until_evaluation(before)
        if left == 0 and not most_queued and is_open:
            left = accumulate * run.per_global  # the step ends before the evaluation
        if self.is_evaluating or left == 0:
            return False
        follows = run.config.balance or run.config.granted
        steps = PLAN_STEPS if follows else FIXED_PLAN_STEPS
        if run.config.balance and run.split_batches().num_plans < FIRST_PLANS:
            steps = FIRST_PLAN_STEPS
        ranks = [r.rank for r in self._participants()]
        if not ranks:
            return False
        assigned = run.ledger.assign_epoch(
            ranks,
            run.elche.shares,
            steps * accumulate * run.per_global if splits else None,
            left,
        )
        if assigned is None:
            return False
        plan = self._plan(*assigned, splits=splits)
        if before is not None:
            assert plan.epoch == before.epoch, "an epoch begins after the one before"
            plan.first_step = before.first_step + before.num_batches
        for own in self._own_plans(plan):
            self._start(*own)
        run.add_plan(plan, before)
        return True

    def _plan(
        self, number: int, parts: dict[int, tuple[range, ...]], *, splits: bool
    ) -> LockstepPlan:
        run = self._run
        plan = LockstepPlan(
            epoch=number,
            parts=parts,
            first_window=run.num_windows,
            num_windows=0,
            first_step=run.global_step,
        )
        if splits:
            ranks = list(parts)
            plan.num_slices = run.num_slices(ranks)
            (span,) = parts[ranks[0]]
            pieces, plan.counts = run.ledger.split_pieces(
                span,
                run.per_global,
                plan.num_slices,
                self._sizes(ranks),
                run.split_batches().short_sizes,
                run.min_piece,
            )
            plan.set_pieces(pieces)
        longest = max(plan.num_micro_batches(rank) for rank in parts)
        plan.num_windows = -(-longest // (run.config.accumulate * plan.num_slices))
        return plan

    def _own_plans(self, plan: LockstepPlan) -> Iterator[tuple[Rank, m.EpochPlan]]:
        run, live = self._run, self._run.live
        shares = [0] * len(run.ranks)
        for rank in plan.parts:
            shares[rank] = plan.num_micro_batches(rank)
        batches: Mapping[int, tuple[range, ...]] = plan.parts
        if plan.pieces:
            ranks = list(plan.parts)
            (span,) = plan.parts[ranks[0]]
            keys = run.ledger.draw_keys(span, run.per_global, plan.num_slices, len(ranks))
            batches = dict(zip(ranks, keys, strict=True))
        epoch = run.ledger.epochs[0]
        has_more = run.ledger.has_more(epoch)
        pauses = has_more and self._batches_until_evaluation(plan) == 0
        more = bool(plan.pieces) and has_more and not pauses
        trained_by = plan.trained_by(run.config.accumulate) if run.config.own_loop else ()
        for info in live:
            yield (
                info,
                m.EpochPlan(
                    epoch=plan.epoch,
                    batches=batches.get(info.rank, ()),
                    shares=tuple(shares),
                    first_step=plan.first_step,
                    pieces=tuple(plan.pieces.get(info.rank, ())),
                    per_global=run.per_global if plan.pieces else 0,
                    num_slices=plan.num_slices,
                    trained_by=trained_by,
                    more=more,
                    pauses=pauses,
                    is_partial=bool(epoch.open) and not more,
                ),
            )

    def measure(self, rank: int) -> None:
        """Record the time of a rank's completed plan in the shares."""
        shares, plan = self._run.shares, self._run.plan
        if shares is None or plan is None:
            return
        times = plan.take_times(rank)
        if times is not None:
            num_samples, compute_s = times
            wait_s = self._run.data_wait_s(rank) * num_samples
            shares.observe(rank, num_samples, compute_s + wait_s)

    def _sizes(self, ranks: Sequence[int]) -> dict[int, int]:
        total = self._run.slice_samples(ranks)
        some = ranks[:total]
        return dict.fromkeys(ranks, 0) | dict(
            zip(some, self._run.split_batches().sizes(total, some), strict=True)
        )

    def has_work(self, epoch: Epoch) -> bool:
        """True if the average that closes the epoch is evaluated or handed over."""
        every = self._run.config.checkpoint_every
        hands_over = every is not None and (epoch.epoch + 1) % every == 0
        return self._run.config.evaluate or hands_over or self._is_validated(epoch)

    def pending_work(self, epoch: Epoch) -> tuple[int | None, int | None]:
        """The epoch to evaluate and the version to hand over that are pending on its average."""
        every = self._run.config.checkpoint_every
        version = epoch.epoch + 1
        due = every is not None and version % every == 0 and not epoch.saved
        evaluate = self._run.config.evaluate and epoch.evaluation is None
        return epoch.epoch if evaluate else None, version if due else None

    def orphaned(self) -> Epoch | None:
        """A closed epoch whose lead died before it evaluated or handed it over, or of which a rank
        died before it had validated its part.
        """
        for closing in self._closing:
            if self.orphaned_work(closing.epoch) != (None, None):
                return closing.epoch
            if self.needs_validation(closing.epoch) and not self._is_validating(closing.epoch):
                return closing.epoch
        return None

    def orphaned_work(self, epoch: Epoch) -> tuple[int | None, int | None]:
        """The pending work of a closed epoch whose lead has died."""
        return (None, None) if self._run.is_live(epoch.lead) else self.pending_work(epoch)

    def _is_validating(self, epoch: Epoch) -> bool:
        validation = self.validator.of_epoch.get(epoch.epoch)
        return validation is not None and validation.waits_for(self._speeds)

    def uses_live_weights(self, epoch: Epoch) -> bool:
        """True if the lead needs no averaging round for its work on a closed epoch.

        Under lockstep and with one rank the live weights are the average. In a cluster the state
        of all machines is available.
        """
        return self._run.lockstep or self._run.alone or epoch.epoch in self.common

    def request_work(self, epoch: Epoch) -> None:
        """Have one rank evaluate and hand over its live weights, or the state of all machines,
        and all ranks validate it.
        """
        evaluate, checkpoint = self.orphaned_work(epoch)
        state = self.common.get(epoch.epoch)
        if not self._run.is_live(epoch.lead):
            epoch.lead = self._run.evaluation_rank()
        lead = epoch.lead
        if evaluate is not None:
            self._run.send(lead, m.Evaluate(epoch=evaluate, state=state))
        if checkpoint is not None:
            self._run.send(lead, m.CallCheckpointFn(version=checkpoint, state=state))
        if not self.needs_validation(epoch) or self._is_validating(epoch):
            return
        validation = self.validator.of_epoch.get(epoch.epoch)
        if validation is not None and (self._run.lockstep or state is not None):
            tasks = self.validator.reassign(validation, self._speeds)
        else:  # the weights have changed since an earlier one
            validation = self.begin_validation(epoch)
            tasks = validation.tasks
        self._send_tasks(validation, tasks, state)

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
            work = self.has_work(epoch)
            if self.uses_live_weights(epoch):
                if self._run.lockstep and any(r.num_queued for r in self._run.live):
                    break
                if work and not epoch.worked:
                    self.request_work(epoch)
            elif work and not epoch.worked:
                break
            for rank in self._run.live:
                self._send_empty_plans(rank, epoch.epoch + 1)
            self._run.ledger.pop_oldest()
            if self._run.config.evaluate:
                self._mark_evaluated()
            if self._is_validated(epoch):
                self._mark_validated()
            self._closing.append(_Closing(epoch=epoch, epoch_s=0.0))
        return len(self._closing) > num_before

    def publish(self, *, anyway: bool = False) -> None:
        """Publish closed epochs, in order, once their evaluation and checkpoint call are done.

        Args:
            anyway: Do not wait for them: no rank is left.
        """
        while self._closing and (anyway or self._is_done(self._closing[0].epoch)):
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
            extra_scalars={
                **{f"eval/{k}": v for k, v in (epoch.evaluation or {}).items()},
                **{f"val/{k}": v for k, v in (epoch.validation or {}).items()},
            },
            partial=partial,
        )
        self._run.outcome.close_epoch(metrics)
        # A copy: users may modify it while a checkpoint reads the original.
        given = replace(metrics, scalars=metrics.scalars.copy())
        self._run.emit(PublishEpoch(metrics=given))


@dataclass(slots=True)
class _Closing:
    """A closed epoch that waits for its evaluation or checkpoint call."""

    epoch: Epoch
    epoch_s: float
