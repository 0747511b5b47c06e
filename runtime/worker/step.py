"""A worker's optimizer steps: windows of micro-batches, made eagerly or as graphs, and counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.collective.base import LateResult
from runtime.core.errors import (
    CollectiveAborted,
    CollectiveTimeout,
    PieceTooLarge,
    without_tracebacks,
)
from runtime.device.memory import is_out_of_memory
from runtime.device.metering import LogMark, PendingStep, StepMeter, ValueLog
from runtime.device.timing import StepTimer
from runtime.replica.capturable import CapturableOptimizer
from runtime.replica.graphs import GraphedSteps, GraphFallbacks, StaticWindow
from runtime.replica.schedule import ScheduleMark
from runtime.replica.stepper import DROPPED, MADE, StepEnd, TrainFn, TrainFns
from runtime.timeline.events import COMPUTE, CONTROL
from runtime.timeline.rank_lane import RankLane
from runtime.worker.protocol import WorkerProtocol
from runtime.worker.replica import WorkerReplica
from runtime.worker.worker_config import StepResult, WorkerConfig

MAX_STEPS_AHEAD = 3
"""Steps that may be launched before the host knows that the first of them counts."""


class WorkerSteps:
    """Makes the optimizer steps of one worker. In its thread.

    With a collective whose ``host_runs_ahead`` is set, up to ``MAX_STEPS_AHEAD`` steps are launched
    before the host inspects how the reduction of the first has ended. None of them is reported
    before that, and every other user of the replica calls :meth:`confirm_steps` first. The device
    skips each step whose reduction was aborted.

    Args:
        config: The worker's settings.
        replica: What is trained.
        protocol: Is told what was trained.
        meter: Counts it.
        timer: Times the steps.
        values: Where losses go.
        await_batch: Gives the batches of a plan; ``None``: only :meth:`train_step` is called.
        lane: Where the time of each step goes, if that is recorded: written here and not around
            it, where every call costs as much as the notes.
        fallbacks: Shared by all workers of a run; tells what is not captured.
    """

    def __init__(
        self,
        config: WorkerConfig,
        replica: WorkerReplica,
        protocol: WorkerProtocol,
        meter: StepMeter,
        timer: StepTimer,
        values: BatchLog,
        *,
        await_batch: AwaitBatch | None = None,
        lane: RankLane | None = None,
        fallbacks: GraphFallbacks | None = None,
    ) -> None:
        self.replica = replica
        self._context = replica.context
        self._stepper = replica.stepper
        self._schedule = replica.schedule
        self._capturable = replica.capturable
        self._is_lockstep = replica.is_lockstep
        self._lockstep = replica.lockstep
        self._progress = replica.progress
        self._protocol = protocol
        self._meter = meter
        self._timer = timer
        self._values = values
        self._await_batch = await_batch
        self._lane = lane
        self._part = config.batch_part
        self._makes_again = self._is_lockstep and (config.redoes or config.falls_back)
        self._redoes = config.redoes
        self._launched: deque[_Launched] = deque()
        self._schedule_before: ScheduleMark | None = None
        self._shrinks = config.balance and self._is_lockstep
        varies = self._is_lockstep and (config.balance or config.batch_sizes is not None)
        self._memory = replica.context.step_memory() if varies else None
        self._buckets = config.bucket_bytes is not None
        self._gathers = config.all_gather
        self._late_weight: Tensor | None = None  # of steps since it was last told
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
        if config.precision == "fp16":
            obstacle = "fp16's gradient scaler reads the device in each step; use bf16"
        return GraphedSteps(
            config.rank,
            self._context,
            self.replica.model,
            self._stepper,
            optimizer,
            micro_step=self._micro_step,
            redirect=self._values.redirected,
            log=self._values.log,
            full=[config.own_batch_size] * config.accumulate,
            varies=varies,
            memory=self._memory,
            fallbacks=fallbacks,
            generator=self.replica.generator,
            obstacle=obstacle,
        )

    def forget_graphs(self) -> None:
        """Capture the step anew, after some eager ones."""
        if self._graphs is not None:
            self._graphs.forget()

    def verify_graphs(self) -> None:
        """Look, between two plans, whether the captured steps are still the user's."""
        if self._graphs is not None:
            self._graphs.verify()

    def close(self) -> None:
        """Break the cycles of references, or only the collector of cycles frees the replica."""
        self._graphs = None
        self._await_batch = None
        if self._stepper.global_batch is not None:
            self._stepper.global_batch.close()

    def train_step(self, batch: Any, train_fn: TrainFns) -> StepResult:
        """One optimizer step on one batch, eagerly.

        Args:
            batch: A tuple, list or dict of tensors on the worker's device.
            train_fn: Gives a batch's mean loss, and its weight.

        Returns:
            Device-side handles; nothing is synchronised.
        """
        samples = count_samples(batch)
        self.confirm_steps()
        self._stepper.host_runs_ahead = False
        self._advance_schedule()
        self._timer.start()
        if self._stepper.parts:
            loss, end = self._make_parts(train_fn, batch, samples)
        else:
            train_fn = _one(train_fn)
            self._begin_global_batch(1)
            self._stepper.begin()
            loss = self._micro_step(train_fn, batch, samples, 1.0)
            end = self._stepper.finish(samples)
        time = self._timer.stop(1)
        self._count(1, samples, dropped=end.dropped)
        weight = self._stepper.weight
        return StepResult(loss, time, samples if weight is None else weight)

    def run(self, sizes: Sequence[int], position: int | None, train_fn: TrainFns) -> bool:
        """One optimizer step.

        Args:
            sizes: Samples of each batch; empty where this rank only receives.
            position: Where the schedule stands; ``None``: this rank knows.
            train_fn: Gives a batch's mean loss, and its weight.

        Returns:
            ``False`` if ``Shutdown`` came while data was awaited.
        """
        lane = self._lane
        first: Any = None
        if self._launched:
            self._confirm(MAX_STEPS_AHEAD - 1)
        if sizes:
            assert self._await_batch is not None, "the worker is closed, or was given no batches"
            first = self._await_batch(answer=not self._protocol.leaving)
            if first is None:
                return False
        elif lane is not None:
            lane.enter(COMPUTE)
        if self._schedule.scheduler is not None or self._capturable is not None:
            if self._redoes:
                self._schedule_before = self._schedule.mark()
            self._advance_schedule(position)
        if lane is None:
            self.train_window(sizes, first, train_fn)
            return True
        start = lane.since
        self.train_window(sizes, first, train_fn)
        lane.end_step(CONTROL, start, sizes)
        return True

    def train_window(self, sizes: Sequence[int], first: Any, train_fn: TrainFns) -> None:
        """The work of a step, its first batch being there.

        Args:
            sizes: Samples of each batch; empty where this rank only receives.
            first: The first batch; the others are awaited here.
            train_fn: Gives a batch's mean loss, and its weight.
        """
        total = sum(sizes)
        self._timer.start()
        if self._is_lockstep:
            self._make_undoable_step(sizes, first, train_fn, total)
            return
        end = self._make_step(sizes, first, train_fn, total)
        self._timer.stop(len(sizes))
        self._lockstep.stepped(0 if end.dropped else total)
        self._count(len(sizes), total, dropped=end.dropped)

    def _make_undoable_step(
        self, sizes: Sequence[int], first: Any, train_fn: TrainFns, total: int
    ) -> None:
        """A step that is trained again, as if it had not been, where the reduction fails."""
        before = _Before(
            self._values.log.mark(),
            self._keep_buffers(),
            self.replica.generator.get_state() if self._shrinks else None,
            self._schedule_before,
        )
        self._stepper.host_runs_ahead = not self._stepper.parts
        try:
            self._begin_global_batch(len(sizes))
            end = self._make_step(sizes, first, train_fn, total)
        except (CollectiveAborted, CollectiveTimeout) as error:
            self._values.log.retract(before.mark)
            self._put_back(before)
            cause = self.give_up()
            if cause is not None and not isinstance(error, PieceTooLarge):
                raise cause from error
            raise
        self._timer.stop(len(sizes))
        if self._memory is not None and sizes:
            self._memory.stepped(max(sizes))
            if self._shrinks:  # shares that are fixed stay as they are
                self._meter.most_samples = self._memory.most
        self._lockstep.stepped(0 if end.dropped else total)
        outcome = self._stepper.take_late_result()
        if outcome is None and not self._launched:
            self._count(len(sizes), total, dropped=end.dropped)
            return
        values = self._values.log.withhold(before.mark)
        if outcome is None:
            self.confirm_steps()  # this one has ended well, and so have those before it
            self._values.log.give(values)
            self._count(len(sizes), total, dropped=end.dropped)
        else:
            self._launched.append(_Launched(outcome, before, values, len(sizes), total))
            self._progress.local_step += len(sizes)

    def _put_back(self, before: _Before) -> None:
        """What a step that has failed did to the replica, beside its parameters."""
        if before.buffers is not None:
            self.replica.state.buffers.write_from(*before.buffers)
        if before.draws is not None:
            self.replica.generator.set_state(before.draws)
        if before.schedule is not None:
            self._schedule.restore(before.schedule)
        self._stepper.clear_gradients()

    def confirm_steps(self) -> None:
        """Wait until it is known of every step that was launched whether it counts.

        Raises:
            CollectiveAborted, CollectiveTimeout: One does not, and it and those after it are taken
                back.
        """
        if self._launched:
            self._confirm(0)

    def give_up(self) -> BaseException | None:
        """As :meth:`confirm_steps`, where steps are broken off already: gives the error, if any."""
        try:
            self.confirm_steps()
        except (CollectiveAborted, CollectiveTimeout) as error:
            return error
        return None

    def _confirm(self, num_unseen: int) -> None:
        """Count the steps that are known to be good, leaving at most ``num_unseen`` others."""
        launched = self._launched
        while launched and (len(launched) > num_unseen or launched[0].outcome.done):
            try:
                launched[0].outcome.wait()
            except (CollectiveAborted, CollectiveTimeout):
                self._take_back()
                raise
            step = launched.popleft()
            self._values.log.give(step.values)
            self._meter.add(step.num_batches, step.num_samples)
            self._meter.add_empty(step.num_empty)
            self._protocol.step_reduced(step.num_batches + step.num_empty)

    def _take_back(self) -> None:
        """The oldest step that was launched has failed, and so have all after it."""
        first = self._launched[0].before
        for step in self._launched:
            self._lockstep.step_undone(step.num_samples)
            self._progress.local_step -= step.num_batches + step.num_empty
        self._launched.clear()
        self._values.log.start_at(first.mark.step)
        self._put_back(first)

    def _begin_global_batch(self, num_batches: int) -> None:
        """Tell the other ranks in how many micro-batches the passes of this one meet theirs."""
        if self._stepper.global_batch is not None:
            self._stepper.global_batch.begin(num_batches)

    def all_gather(self, tensor: Tensor) -> tuple[Tensor, slice]:
        """See :func:`gpuworker.all_gather`."""
        if not self._gathers:
            raise RuntimeError(
                "all_gather needs all_gather(True): call it on the builder, so that ranks without "
                "a batch are known before others wait for them"
            )
        assert self._stepper.global_batch is not None, "made where it is asked for"
        return self._stepper.global_batch.all_gather(tensor)

    def _keep_buffers(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
        """A copy of the buffers where a step under lockstep may have to be undone."""
        buffers = self.replica.state.buffers
        if not (buffers and self._redoes):
            return None
        kept = buffers.empty()
        buffers.read_into(*kept)
        return kept

    def _make_step(
        self, sizes: Sequence[int], batch: Any, train_fn: TrainFns, total: int
    ) -> StepEnd:
        if self._stepper.parts:
            return self._make_parts(train_fn, batch, total)[1]
        assert callable(train_fn)  # a dict of functions makes parts
        window = self._graphs.window(sizes) if self._graphs is not None else None
        if window is None:
            self._stepper.begin()
        else:
            self._stepper.open()
        for i, size in enumerate(sizes):
            if i:
                assert self._await_batch is not None
                self._timer.pause()
                batch = self._await_batch(answer=False)
                self._timer.resume()
            if window is not None:
                if window.hold(batch):
                    continue
                self._make_held(window, train_fn, total)
                window = None
            if self._buckets and i + 1 == len(sizes):
                self._stepper.expect_last(total)
            self._train_piece(train_fn, batch, size, size / total)
            batch = None  # the loader may use its memory again
        if window is None:
            return self._stepper.finish(total)
        assert self._graphs is not None
        return self._graphs.step(window, train_fn)

    def _make_parts(self, train_fns: Any, batch: Any, num_samples: int) -> tuple[Tensor, StepEnd]:
        """A step of each optimizer on one batch, one after the other.

        Args:
            train_fns: One for each, by name.
            batch: The batch.
            num_samples: Its samples; 0: this rank only receives.

        Returns:
            The sum of the losses, and whether any of the steps was dropped.
        """
        if not isinstance(train_fns, Mapping):
            raise TypeError("several optimizers need a dict of functions, one for each")
        log, parts = self._values.log, {part.name: part for part in self._stepper.parts}
        own = self.replica.part_log
        own.start_at(log.mark().step)
        begun = own.mark()
        scalars: list[tuple[str, Any]] = []
        losses: list[Tensor] = []
        end = MADE
        if self._makes_again:
            self._stepper.keep()
        try:
            with self._values.redirected(own):
                for name, train_fn in train_fns.items():
                    self._stepper.enter(parts[name])
                    self._stepper.begin()
                    if num_samples:
                        if self._buckets:
                            self._stepper.expect_last(num_samples)
                        self._train_piece(train_fn, batch, num_samples, 1.0)
                        if self._stepper.weight is not None:
                            raise ValueError(
                                f"the function of the optimizer {name!r} returned a loss with a "
                                "weight: with several optimizers return the mean over samples alone"
                            )
                    if self._stepper.finish(num_samples).dropped:
                        end = DROPPED
                    for loss, _, _ in own.since(begun):
                        losses.append(loss)
                        scalars.append((f"loss/{name}", loss))
                    scalars += own.take_scalars()
                    own.retract(begun)
        except (CollectiveAborted, CollectiveTimeout, PieceTooLarge):
            if self._makes_again:
                self._stepper.take_back()
            own.take_scalars()
            own.retract(begun)
            raise
        finally:
            self._stepper.leave()
        total = torch.stack(losses).sum() if losses else torch.zeros(())
        if num_samples:
            mark = log.mark()
            log.push_loss(total, num_samples)
            if end.dropped:
                log.rewind(mark)
            for name, value in scalars:
                log.push_scalar(name, value, num_samples)
        return total, end

    def _train_piece(self, train_fn: TrainFn, batch: Any, size: int, fraction: float) -> None:
        """A micro-batch; where there is no memory for it, all ranks make the step again.

        Raises:
            PieceTooLarge: There is none, and pieces are made smaller.
        """
        try:
            self._micro_step(train_fn, batch, size, fraction)
        except RuntimeError as error:
            if not (self._shrinks and size > 1 and is_out_of_memory(error)):
                raise
            # The frames hold what has used the memory up.
            raise PieceTooLarge(size) from without_tracebacks(error)

    def _make_held(self, window: StaticWindow, train_fn: TrainFn, total: int) -> None:
        """The batches so far, when the window turns out to be none for a graph."""
        assert self._graphs is not None
        self._graphs.report_skipped()
        self._graphs.eagerly(window, train_fn, total)

    def _micro_step(self, train_fn: TrainFn, batch: Any, samples: int, fraction: float) -> Tensor:
        values = self._values
        values.num_samples = samples
        log = values.log
        num_scalars = log.num_scalars
        loss = self._stepper.micro_step(train_fn, batch, fraction, samples)
        weight = self._stepper.weight
        if weight is None:
            log.push_loss(loss, samples)
        else:
            log.weigh_scalars(num_scalars, weight)
            log.push_loss(loss, weight)
        return loss

    def _count(self, batches: int, samples: int, *, dropped: bool) -> None:
        self._progress.local_step += batches
        kept = 0 if dropped else samples
        self._meter.add(batches, samples, num_skipped=samples - kept)
        if self._is_lockstep:
            self._protocol.step_reduced(batches)
            return
        window = None if dropped else self._stepper.window
        if window is None:
            self._protocol.trained(batches, kept)
            return
        weight = window.total
        if isinstance(weight, Tensor):
            late = self._late_weight
            self._late_weight = weight if late is None else late + weight
            weight = 0
        self._protocol.trained(batches, kept, weight)

    def count_empty(self, num_batches: int) -> None:
        """Count batches of a lockstep step whose samples the peers have trained."""
        self._progress.local_step += num_batches
        if self._launched:
            self._launched[-1].num_empty += num_batches
            return
        self._meter.add_empty(num_batches)
        self._protocol.step_reduced(num_batches)

    def flush_weight(self) -> None:
        """Tell the protocol the weights that were summed on the device; waits for it."""
        late, self._late_weight = self._late_weight, None
        if late is not None:
            self._protocol.add_weight(float(late))

    def _advance_schedule(self, position: int | None = None) -> None:
        if position is None:
            own = self._protocol.batches
            if self._part is not None:
                own = int(own * self._part)
            position = self._protocol.global_step + own
        self._schedule.advance(position)
        if self._capturable is not None:
            self._capturable.refresh()


@dataclass(slots=True)
class _Launched:
    """A step that was given to the device, whose reduction may still fail there.

    Attributes:
        outcome: How the reduction ends.
        before: How things stood.
        values: Its losses and scalars.
        num_batches: Its batches.
        num_samples: Their samples.
        num_empty: Batches after it that peers have trained.
    """

    outcome: LateResult
    before: _Before
    values: PendingStep
    num_batches: int
    num_samples: int
    num_empty: int = 0


@dataclass(slots=True)
class _Before:
    """How things stood before a step under lockstep.

    Attributes:
        mark: The log.
        buffers: Those of the model, where they may have to be put back.
        draws: State of the worker's generator, likewise.
        schedule: The learning rate, likewise.
    """

    mark: LogMark
    buffers: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None
    draws: Tensor | None
    schedule: ScheduleMark | None


class BatchLog:
    """Where the losses and scalars of the batch in training go.

    Args:
        log: There, unless they are redirected.

    Attributes:
        log: There.
        num_samples: Samples in the batch.
    """

    __slots__ = ("log", "num_samples")

    def __init__(self, log: ValueLog) -> None:
        self.log = log
        self.num_samples = 1

    def record_scalar(self, name: str, value: float | Tensor) -> None:
        """See :func:`gpuworker.record_scalar`."""
        if isinstance(value, Tensor):
            value = value.data.clone()  # read later, when a parameter has moved on
        self.log.push_scalar(name, value, self.num_samples)

    @contextmanager
    def redirected(self, log: ValueLog) -> Iterator[None]:
        """Send them elsewhere meanwhile."""
        before, self.log = self.log, log
        try:
            yield
        finally:
            self.log = before


class AwaitBatch(Protocol):
    """Gives the next batch of the plan in progress; ``None``: the worker is to leave."""

    def __call__(self, *, answer: bool) -> Any:
        """Wait for it; ``answer``: between two steps, where messages are answered meanwhile."""


def count_samples(batch: Any) -> int:
    """Length of the first tensor of a batch."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    values = batch.values() if isinstance(batch, dict) else batch
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        return 1
    for value in values:
        return count_samples(value)
    return 1


def _one(train_fn: TrainFns) -> TrainFn:
    if isinstance(train_fn, Mapping):
        raise TypeError("a dict of functions needs a dict of optimizers, one for each")
    return train_fn
