"""The optimizer steps of a worker: made eagerly or as graphs, confirmed, and counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.collective.base import CollectiveWork
from runtime.core.errors import (
    CollectiveAborted,
    CollectiveTimeout,
    PieceTooLarge,
    without_tracebacks,
)
from runtime.core.loss_weights import Weight
from runtime.core.nested import num_rows
from runtime.device.memory import is_out_of_memory
from runtime.device.metering import StepValues
from runtime.replica.build import TrainFn, TrainFns
from runtime.replica.capturable import CapturableOptimizer
from runtime.replica.error_notes import MemoryUse, accumulate_remedy, add_note_once, explain_size
from runtime.replica.graphs import GraphedSteps, GraphFallbacks
from runtime.replica.schedule import ScheduleMark
from runtime.replica.stepper import (
    DROPPED,
    MADE,
    AccumulationWindow,
    StepEnd,
)
from runtime.timeline.events import COMPUTE, CONTROL
from runtime.worker.rank_resources import RankResources
from runtime.worker.replica import WorkerReplica
from runtime.worker.worker_config import StepResult, WorkerConfig

MAX_STEPS_AHEAD = 3
"""Steps that may be launched before the host waits for the reduction of the first."""
_STATE_REMEDY = (
    "keep equal pieces, .balance(False), leave a short last batch out, .drop_last(True), or begin "
    "the state anew with each batch"
)


class WorkerSteps:
    """Makes the optimizer steps of one worker. In its thread.

    With a collective whose ``host_runs_ahead`` is set, up to ``MAX_STEPS_AHEAD`` steps are launched
    before the host waits for the result of the first reduction. None of them is reported before
    that, and every other user of the replica calls :meth:`confirm_steps` first. The device skips
    each step whose reduction was aborted.

    Args:
        await_batch: Returns the batches of a plan; ``None``: only :meth:`train_step` is called.
        fallbacks: Shared by all workers of a run; records what is not captured.

    Attributes:
        is_torn: True if an exception interrupted an optimizer's step, so that the replica is in
            no state between two steps.
        global_step: Position of the schedule at the present step.
    """

    def __init__(
        self,
        rank: RankResources,
        replica: WorkerReplica,
        *,
        await_batch: AwaitBatch | None = None,
        fallbacks: GraphFallbacks | None = None,
    ) -> None:
        config = rank.config
        self.replica = replica
        self._context = replica.context
        self._stepper = replica.stepper
        self._log = replica.stepper.log
        self._schedule = replica.schedule
        self._capturable = replica.capturable
        self._is_lockstep = replica.is_lockstep
        self._lockstep = replica.lockstep
        self._progress = replica.progress
        self._protocol = rank.protocol
        self._meter = rank.meter
        self._timer = rank.timer
        self._await_batch = await_batch
        self._lane = rank.recorder.lane
        self._config = config
        self._can_repeat = self._is_lockstep and (config.redoes or config.falls_back)
        # Failed steps are undone to be repeated, and to save the state before them.
        self._undoes = (config.redoes and self._is_lockstep) or config.saves
        # Launched steps are undone together, with the positions of the schedule.
        self._marks_schedule = config.redoes or (config.saves and config.device.type != "cpu")
        self.is_torn = False
        self.global_step = 0
        self._launched: deque[_LaunchedStep] = deque()
        self._schedule_before: ScheduleMark | None = None
        self._shrinks = config.balance and self._is_lockstep
        self._draws_again = self._shrinks or config.saves
        num_batches = max(config.accumulate, config.num_micro_batches)
        self._sizes = (num_batches, config.global_batch_size)
        self._largest = 0  # samples of the largest batch that fitted into memory
        self._last = 0  # samples of the last batch
        varies = self._is_lockstep and (config.balance or config.batch_sizes is not None)
        self._memory = replica.context.step_memory() if varies else None
        self._gathers = config.all_gather
        self._device_weight: Tensor | None = None  # sum over the steps since the last flush
        self._graphs: GraphedSteps | None = None
        if self._capturable is not None:
            fallbacks = fallbacks or GraphFallbacks()
            self._graphs = self._make_graphs(config, self._capturable, fallbacks, varies=varies)

    def _make_graphs(
        self,
        config: WorkerConfig,
        optimizer: CapturableOptimizer,
        fallbacks: GraphFallbacks,
        *,
        varies: bool,
    ) -> GraphedSteps:
        obstacle = None
        if self.replica.precision.scales:
            obstacle = "fp16's gradient scaler reads the device in each step; use bf16"
        return GraphedSteps(
            config.rank,
            self._context,
            self.replica.model,
            optimizer,
            log=self._log,
            full=[config.own_batch_size] * (config.accumulate * config.num_micro_batches),
            varies=varies,
            memory=self._memory,
            fallbacks=fallbacks,
            generator=self.replica.generator,
            obstacle=obstacle,
        )

    def forget_graphs(self) -> None:
        """Drop all graphs; steps are captured again after some eager ones."""
        if self._graphs is not None:
            self._graphs.reset()

    def check_graphs(self) -> None:
        """Between two plans, drop graphs of tensors that user functions have replaced."""
        if self._graphs is not None:
            self._graphs.drop_replaced()

    def close(self) -> None:
        """Release graphs, batches and subgroups."""
        self._graphs = None
        self._await_batch = None
        if self.replica.global_batch is not None:
            self.replica.global_batch.close()
        self.replica.state.params.close()

    def train_step(self, batch: Any, train_fn: TrainFns) -> StepResult:
        """One optimizer step on one batch, eagerly.

        Args:
            batch: A tuple, list or dict of tensors on the worker's device.
            train_fn: Returns a batch's mean loss, and its weight.

        Returns:
            Device-side handles; nothing is synchronised.
        """
        samples = num_rows(batch) or 1
        self.confirm_steps()
        self._advance_schedule()
        self._timer.start()
        weight: Weight | None = None
        values = self._log.begin()
        try:
            if self._stepper.part_names:
                loss, end = self._step_parts(train_fn, batch, samples, values)
            else:
                with self._stepper.window(samples, values=values) as window:
                    loss, weight = window.add(_single(train_fn), batch, samples)
                    end = window.finish()
        finally:
            self._log.end()
        time = self._timer.stop(1)
        self._log.kept.keep(values)
        self._count(1, samples, end)
        return StepResult(loss, time, samples if weight is None else weight)

    def run(self, sizes: Sequence[int], position: int | None, train_fn: TrainFns) -> bool:
        """One optimizer step.

        Args:
            sizes: Samples of each batch; empty if this rank only receives.
            position: Position of the schedule; ``None``: computed from this rank's counts.
            train_fn: Returns a batch's mean loss, and its weight.

        Returns:
            ``False`` if ``Shutdown`` was received while waiting for data.
        """
        lane = self._lane
        first: Any = None
        if self._launched:
            self._confirm(MAX_STEPS_AHEAD - 1)
        if sizes:
            first = self.next_batch(answer=True)
            if first is None:
                return False
        else:
            lane.enter(COMPUTE)
        self._follow_schedule(position)
        start = lane.since  # written here: a wrapper would cost as much as the entries
        self.train_window(sizes, first, train_fn)
        lane.end_step(CONTROL, start, sizes)
        return True

    def next_batch(self, *, answer: bool) -> Any:
        """Wait for a batch of the plan in progress; see :class:`AwaitBatch`."""
        assert self._await_batch is not None, "the worker is closed, or has no batches"
        return self._await_batch(answer=answer)

    def _follow_schedule(self, position: int | None) -> None:
        self.global_step = self.position_of(position)
        if self.replica.rates is not None:
            self.replica.rates.factor = self._protocol.lr_factor
        if self._schedule.scheduler is not None or self._capturable is not None:
            if self._marks_schedule:
                self._schedule_before = self._schedule.mark()
            self._advance_schedule(position)

    def prepare(self, position: int | None) -> BeforeStep:
        """Prepare a step whose forward passes the caller runs: confirm earlier ones, set the
        learning rates and start the timer.

        Args:
            position: As in :meth:`run`.

        Returns:
            The state before the step, for :meth:`commit` and :meth:`undo`.
        """
        if self._launched:
            self._confirm(MAX_STEPS_AHEAD - 1)
        self._follow_schedule(position)
        self._timer.start()
        return self.state_before()

    def state_before(self) -> BeforeStep:
        """The present state, for :meth:`commit` and :meth:`undo`."""
        return BeforeStep(
            self._log.begin(),
            self._copy_buffers(),
            self.replica.generator.get_state() if self._draws_again else None,
            self._schedule_before,
            self._progress.body_steps,
        )

    def train_window(self, sizes: Sequence[int], first: Any, train_fn: TrainFns) -> None:
        """Make the step of a window whose first batch is available.

        Args:
            sizes: Samples of each batch; empty if this rank only receives.
            first: The first batch.
            train_fn: Returns a batch's mean loss, and its weight.
        """
        total = sum(sizes)
        before, num_begun = self.state_before(), self._stepper.num_begun
        self._timer.start()
        try:
            if self._is_lockstep:
                self._make_lockstep(sizes, first, train_fn, total, before)
            else:
                end = self._make_step(sizes, first, train_fn, total, before.values)
                self._timer.stop(len(sizes))
                self._log.end()
                self._log.kept.keep(before.values)
                self._lockstep.stepped(0 if end.dropped else total)
                self._count(len(sizes), total, end)
        except BaseException as error:
            # Also if another rank aborted the step of a later optimizer, unless that is undone.
            aborted = isinstance(error, (CollectiveAborted, CollectiveTimeout))
            if self._stepper.num_begun != num_begun and not (aborted and self._can_repeat):
                self.is_torn = True
            elif not (aborted and self._is_lockstep):  # else undone already
                self.undo_failed(before)
            self.explain_sizes(error, sizes)
            raise
        if sizes:
            self.batches_fitted(sizes)

    def explain_sizes(self, error: BaseException, sizes: Sequence[int]) -> None:
        """Add a note to an error if the samples of these batches are its cause."""
        if is_out_of_memory(error):
            most = max(sizes, default=0)
            remedy = accumulate_remedy(most, self._largest, *self._sizes)
            add_note_once(error, MemoryUse(most, remedy, self._largest).note())
        else:
            explain_size(error, (self._last, *sizes), _STATE_REMEDY)

    def batches_fitted(self, sizes: Sequence[int]) -> None:
        self._largest = max(self._largest, *sizes)
        self._last = sizes[-1]

    def undo_failed(self, before: BeforeStep) -> None:
        """Undo a step in which user code raised, for the state to be saved."""
        self._log.end()
        try:
            self._restore(before)
        except Exception:  # of a broken device
            self.is_torn = True

    def _make_lockstep(
        self,
        sizes: Sequence[int],
        first: Any,
        train_fn: TrainFns,
        total: int,
        before: BeforeStep,
    ) -> None:
        """A step in lockstep, which leaves no trace if the reduction fails, to be repeated."""
        try:
            end = self._make_step(sizes, first, train_fn, total, before.values)
        except (CollectiveAborted, CollectiveTimeout) as error:
            cause = self.undo(before)
            if cause is not None and not isinstance(error, PieceTooLarge):
                raise cause from error
            raise
        self._timer.stop(len(sizes))
        if self._memory is not None and sizes:
            self._memory.stepped(max(sizes))
            if self._shrinks:  # fixed shares do not change
                self._meter.most_samples = self._memory.most
        self.commit(before, end, len(sizes), total)

    def undo(self, before: BeforeStep) -> BaseException | None:
        """Undo a step in lockstep that has failed, and earlier ones that fail with it.

        Returns:
            The error of an earlier step, if one has failed.
        """
        self._log.end()
        self._restore(before)
        return self.abandon_steps()

    def commit(
        self,
        before: BeforeStep,
        end: StepEnd,
        num_batches: int,
        num_samples: int,
        num_steps: int = 1,
    ) -> None:
        """Count a step, once its reduction has succeeded.

        Args:
            before: The state before it.
            num_batches: Batches of this rank in it.
            num_steps: Steps of the plan in it.
        """
        self._log.end()
        self._lockstep.stepped(0 if end.dropped else num_samples, num_steps)
        if end.pending is None:
            self.confirm_steps()  # this one has succeeded, and so have those before it
            self._log.kept.keep(before.values)
            self._count(num_batches, num_samples, end)
        else:
            self._launched.append(
                _LaunchedStep(end.pending, before, num_batches, num_samples, num_steps)
            )
            self._progress.local_step += num_batches

    def _restore(self, before: BeforeStep) -> None:
        """Undo the changes of a failed step other than those of parameters."""
        if before.buffers is not None:
            self.replica.state.buffers.write_from(*before.buffers)
        if before.draws is not None:
            self.replica.generator.set_state(before.draws)
        if before.schedule is not None:
            self._schedule.restore(before.schedule)
        self._progress.body_steps = before.body_steps

    def confirm_steps(self) -> None:
        """Wait for the reductions of all launched steps.

        Raises:
            CollectiveAborted, CollectiveTimeout: One failed; its step and later ones are undone.
        """
        if self._launched:
            self._confirm(0)

    def abandon_steps(self) -> BaseException | None:
        """Like :meth:`confirm_steps`, after a failure: returns the error, if any."""
        try:
            self.confirm_steps()
        except (CollectiveAborted, CollectiveTimeout) as error:
            return error
        return None

    def _confirm(self, num_left: int) -> None:
        """Count steps whose reductions have succeeded; at most ``num_left`` others may remain."""
        launched = self._launched
        while launched and (len(launched) > num_left or launched[0].pending.done):
            try:
                launched[0].pending.wait()
            except (CollectiveAborted, CollectiveTimeout):
                self._undo_launched()
                raise
            step = launched.popleft()
            self._log.kept.keep(step.before.values)
            self._meter.add(step.num_batches, step.num_samples)
            self._meter.add_empty(step.num_empty)
            self._protocol.on_step_reduced(step.num_batches + step.num_empty)

    def _undo_launched(self) -> None:
        """Undo all launched steps: the oldest has failed, and so have those after it."""
        first = self._launched[0].before
        for step in self._launched:
            self._lockstep.step_undone(step.num_samples, step.num_steps)
            self._progress.local_step -= step.num_batches + step.num_empty
        self._launched.clear()
        self._restore(first)
        self._stepper.clear_gradients()

    def all_gather(self, tensor: Tensor) -> tuple[Tensor, slice]:
        """See :func:`gpuworker.all_gather`."""
        if not self._gathers:
            raise RuntimeError(
                "all_gather requires all_gather(True): call it on the builder, so that ranks agree "
                "in every step on those without a batch"
            )
        assert self.replica.global_batch is not None, "made for all_gather(True)"
        return self.replica.global_batch.all_gather(tensor)

    def _copy_buffers(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
        """A copy of the buffers, if a step may have to be undone."""
        buffers = self.replica.state.buffers
        if not (buffers and self._undoes):
            return None
        kept = buffers.empty()
        buffers.read_into(*kept)
        return kept

    def _make_step(
        self, sizes: Sequence[int], batch: Any, train_fn: TrainFns, total: int, values: StepValues
    ) -> StepEnd:
        if self._stepper.part_names:
            return self._step_parts(train_fn, batch, total, values)[1]
        assert callable(train_fn), "a dict of functions is for several optimizers"
        graphs = self._graphs
        static = graphs.batches(sizes) if graphs is not None else None
        with self._stepper.window(
            total, len(sizes), values=values, run_ahead=self._is_lockstep
        ) as window:
            for i, size in enumerate(sizes):
                if i:
                    assert self._await_batch is not None
                    self._timer.pause()
                    batch = self._await_batch(answer=False)
                    self._timer.resume()
                if static is not None:
                    if static.copy(batch):
                        continue
                    assert graphs is not None
                    graphs.add_eagerly(window, static, train_fn)
                    static = None
                self._add(window, train_fn, batch, size)
                batch = None  # the loader may use its memory again
            if static is None:
                return window.finish()
            assert graphs is not None
            return graphs.finish(window, static, train_fn)

    def _add(self, window: AccumulationWindow, train_fn: TrainFn, batch: Any, size: int) -> None:
        """Add a micro-batch.

        Raises:
            PieceTooLarge: It needs too much memory, and smaller pieces can be trained instead.
        """
        try:
            window.add(train_fn, batch, size)
        except RuntimeError as error:
            if not (self._shrinks and size > 1 and is_out_of_memory(error)):
                raise
            # Its frames hold the memory.
            raise PieceTooLarge(size) from without_tracebacks(error)

    def _step_parts(
        self, train_fns: Any, batch: Any, num_samples: int, values: StepValues
    ) -> tuple[Tensor, StepEnd]:
        """Make one step of each of several optimizers on a batch, in turn.

        Args:
            train_fns: The functions by optimizer name.
            num_samples: Its samples; 0: this rank only receives.
            values: Receive the sum of the losses, each loss as a scalar, and scalars.

        Returns:
            The sum of the losses, and the end of the steps: dropped if any was.
        """
        if not isinstance(train_fns, Mapping):
            raise TypeError("several optimizers require a dict of functions, one for each")
        losses: list[Tensor] = []
        scalars: list[tuple[str, float | Tensor, Weight]] = []
        end = MADE
        with self._stepper.alternate(undo=self._can_repeat):
            for name, train_fn in train_fns.items():
                own = self._log.begin()
                try:
                    if self._step_part(name, train_fn, batch, num_samples, own).dropped:
                        end = DROPPED
                finally:
                    self._log.values = values
                for loss in filter(None, own.losses):
                    if loss[1]:
                        losses.append(loss[0])
                        scalars.append((f"loss/{name}", loss[0], num_samples))
                scalars += own.scalars
        total = torch.stack(losses).sum() if losses else torch.zeros(())
        if num_samples:
            values.begin_batch()
            values.push_loss(total, num_samples)
            if end.dropped:
                values.drop()
            values.scalars += scalars
        return total, end

    def _step_part(
        self, name: str, train_fn: TrainFn, batch: Any, num_samples: int, values: StepValues
    ) -> StepEnd:
        num_batches = 1 if num_samples else 0
        with self._stepper.window(num_samples, num_batches, values=values, part=name) as window:
            if num_samples:
                self._add(window, train_fn, batch, num_samples)
                if window.weight is not None:
                    raise ValueError(
                        f"the function of the optimizer {name!r} returned a loss with a weight: "
                        "with several optimizers return the mean over samples alone"
                    )
            return window.finish()

    def _count(self, batches: int, samples: int, end: StepEnd) -> None:
        self._progress.local_step += batches
        kept = 0 if end.dropped else samples
        self._meter.add(batches, samples, num_skipped=samples - kept)
        if self._is_lockstep:
            self._protocol.on_step_reduced(batches)
            return
        weight = None if end.weight is None else end.weight.total
        if isinstance(weight, Tensor):
            earlier = self._device_weight
            self._device_weight = weight if earlier is None else earlier + weight
            weight = 0
        self._protocol.on_trained(batches, kept, weight)
        if self._protocol.alone:
            self.replica.averager.step_alone(self._protocol.batches)

    def count_empty(self, num_batches: int) -> None:
        """Count batches of a lockstep step whose samples the peers have trained."""
        self._progress.local_step += num_batches
        if self._launched:
            self._launched[-1].num_empty += num_batches
            return
        self._meter.add_empty(num_batches)
        self._protocol.on_step_reduced(num_batches)

    def flush_weight(self) -> None:
        """Add the weights summed on the device to the protocol's; waits for the device."""
        weight, self._device_weight = self._device_weight, None
        if weight is not None:
            self._protocol.add_weight(float(weight))

    def position_of(self, position: int | None, num_open: int = 0) -> int:
        """The position of the schedule; ``None``: computed from this rank's counts.

        Args:
            position: The position, if it is known.
            num_open: Batches of this rank that are not counted yet.
        """
        if position is not None:
            return position
        num_batches = self._protocol.batches + num_open
        return self._config.position(self._protocol.global_step, num_batches)

    def _advance_schedule(self, position: int | None = None) -> None:
        position = self.position_of(position)
        self._schedule.advance(position)
        if self._capturable is not None:
            self._capturable.refresh()


@dataclass(slots=True)
class _LaunchedStep:
    """A step launched on the device, whose reduction may still fail.

    Attributes:
        before: The state before the step.
        num_steps: Steps of the plan in it.
        num_empty: Following batches without samples for this rank.
    """

    pending: CollectiveWork
    before: BeforeStep
    num_batches: int
    num_samples: int
    num_steps: int = 1
    num_empty: int = 0


@dataclass(slots=True)
class BeforeStep:
    """State before a step in lockstep, to undo it.

    Attributes:
        values: Losses and scalars of the step.
        buffers: The model's buffers, if they may have to be restored.
        draws: State of the worker's generator, likewise.
        schedule: State of the schedule, likewise.
        body_steps: Steps made by the body of an own loop.
    """

    values: StepValues
    buffers: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None
    draws: Tensor | None
    schedule: ScheduleMark | None
    body_steps: int


class AwaitBatch(Protocol):
    """Returns the next batch of the plan in progress; ``None`` if the worker must leave."""

    def __call__(self, *, answer: bool) -> Any:
        """Wait for the batch; ``answer``: handle messages meanwhile, between two steps."""


def _single(train_fn: TrainFns) -> TrainFn:
    if isinstance(train_fn, Mapping):
        raise TypeError("a dict of functions requires a dict of optimizers, one for each")
    return train_fn
