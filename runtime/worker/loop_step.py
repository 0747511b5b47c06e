"""LoopStep and BodySteps: the optimizer steps that the body of an own loop makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.core.loss_weights import check_weight, with_graph
from runtime.device.timing import StepTimer
from runtime.replica.stepper import DROPPED, AccumulationWindow, StepEnd
from runtime.worker.meetings import Act, MeetingPlace, Post
from runtime.worker.misuse_watch import MisuseWatch
from runtime.worker.rank_resources import RankResources
from runtime.worker.step import BeforeStep, WorkerSteps


@dataclass(slots=True)
class LoopStep:
    """An optimizer step over one batch or several, made new once the one before it is counted.

    Attributes:
        before: The state before it; ``None``: it has not begun.
        num_begun: Optimizer steps begun before its first batch.
        windows: Those with gradients, by optimizer.
        num_steps: Steps of the plans in it.
        num_batches, num_samples: Of this rank.
        num_empty: Batches without samples for this rank.
        is_followed: It is in progress on other ranks only.
    """

    before: BeforeStep | None = None
    num_begun: int = 0
    windows: dict[str, AccumulationWindow] = field(default_factory=dict)
    num_steps: int = 0
    num_batches: int = 0
    num_samples: int = 0
    num_empty: int = 0
    is_followed: bool = False

    @property
    def is_open(self) -> bool:
        """True within the step. Under lockstep equal on all ranks after each step of the plan."""
        return bool(self.num_steps or self.windows or self.is_followed)

    def drop_windows(self) -> None:
        for window in self.windows.values():
            window.close()
        self.windows.clear()


@dataclass(slots=True)
class LoopBatch:
    """The batch of a step of the plan, in one micro-batch or several.

    Attributes:
        global_step: Batches of all ranks before it: the position of the schedule.
        total: Its samples on this rank; 0: it only receives.
        ranks: Under lockstep, the ranks with samples.
        continues: An optimizer step was in progress before it.
        made: Optimizers of the steps on it.
        losses: Those of several optimizers, one for each step.
        is_dropped: A step on it was dropped.
        skips: A micro-batch was skipped.
        lr: The learning rate that the body has set on it.
        micro: The micro-batch in the body.
    """

    global_step: int = 0
    total: int = 0
    ranks: Sequence[int] = ()
    continues: bool = False
    made: list[str] = field(default_factory=list)
    losses: dict[str, list[Tensor]] = field(default_factory=dict)
    is_dropped: bool = False
    skips: bool = False
    lr: float | None = None
    micro: MicroBatch = field(default_factory=lambda: MicroBatch())


@dataclass(slots=True)
class MicroBatch:
    """A micro-batch in the body.

    Attributes:
        data: The batch, until the body has ended it.
        size: Its samples.
        is_last: It is the last one of the batch.
        added: Optimizers with gradients of it.
        has_stepped: ``step()`` was called.
        was_averaged: ``evaluate()`` has waited for an averaging round.
    """

    data: Any = None
    size: int = 0
    is_last: bool = True
    added: set[str] = field(default_factory=set)
    has_stepped: bool = False
    was_averaged: bool = False


class StepClock:
    """Times the batches of an optimizer step, without the waits for them."""

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer
        self._is_paused = False
        self.num_batches = 0

    def begin(self) -> None:
        """Begin a step for which the timer was started."""
        self.num_batches, self._is_paused = 0, False

    def start(self) -> None:
        self._timer.start()
        self.begin()

    def pause(self) -> None:
        """Exclude the time until :meth:`resume`."""
        if not self._is_paused:
            self._is_paused = True
            self._timer.pause()

    def resume(self) -> None:
        """Continue, if paused."""
        if self._is_paused:
            self._is_paused = False
            self._timer.resume()

    def stop(self, *, counts: bool = True) -> None:
        """End the step; its batches count as timed unless they are given back."""
        self._timer.stop(self.num_batches if counts else 0)


class BodySteps:
    """Makes the optimizer steps of a body, in lockstep together with the other ranks.

    Args:
        steps: Prepares, counts and undoes steps.
        place: The rank's place in the meetings at which ranks agree on steps.
        watch: Watches for steps and changes of the body's own.

    Attributes:
        names: Names of the optimizers, if there are several.
        accumulates: Each step is over several micro-batches of the plan.
        step: The optimizer step in progress, or the next one.
        batch: The batch in progress.
        place: See above.
        clock: Times the steps.
    """

    def __init__(
        self, rank: RankResources, steps: WorkerSteps, place: MeetingPlace, watch: MisuseWatch
    ) -> None:
        config = rank.config
        self._rank = rank
        self._log = rank.log
        self._steps = steps
        self._replica = replica = steps.replica
        self._stepper = replica.stepper
        self._precision = replica.precision
        self._is_lockstep = replica.is_lockstep
        self._watch = watch
        self.names = replica.stepper.part_names
        self.accumulates = config.accumulate * config.num_micro_batches > 1
        if self.accumulates and self.names:
            raise ValueError(
                f"accumulate({config.accumulate}) cannot be combined with several optimizers: "
                "leave it out, and accumulate by worker.backward(loss, optimizer=...)"
            )
        self.step, self.batch = LoopStep(), LoopBatch()
        self.place = place
        self.clock = StepClock(rank.timer)

    def begin(self, position: int | None) -> None:
        """Begin an optimizer step; see :meth:`WorkerSteps.prepare`."""
        before = self._steps.prepare(position)
        self.step = LoopStep(before, self._stepper.num_begun)
        self.clock.begin()

    def begin_batch(
        self, position: int | None, total: int, ranks: Sequence[int], num_empty: int
    ) -> None:
        """Begin a step of the plan; see :meth:`OwnLoop.train_step`."""
        step, place = self.step, self.place
        at = self._steps.position_of(position, step.num_batches)
        self.batch = LoopBatch(at, total, ranks, continues=step.is_open)
        place.batch += 1
        step.is_followed = False
        step.num_steps += 1
        step.num_empty += num_empty

    def begin_micro(self, data: Any, size: int, *, is_last: bool) -> None:
        """Begin a micro-batch of it."""
        step = self.step
        self.batch.micro = MicroBatch(data, size, is_last)
        self._watch.begin_batch()
        step.num_batches += 1
        step.num_samples += size
        self.clock.num_batches += 1
        self._log.num_samples = size
        if step.before is not None and not self.names:
            step.before.values.begin_batch()

    def backward(
        self, loss: Any, weight: Any, name: str, call: str, *, retain_graph: bool = False
    ) -> None:
        """Run the backward pass of a loss on the micro-batch."""
        if weight is not None:
            weight = check_weight(f"worker.{call}: weight", weight)
            if isinstance(loss, Tensor):
                loss = with_graph(loss, weight, self._replica.model.parameters())
        _check_loss(loss, call)
        batch, micro = self.batch, self.batch.micro
        window = self.step.windows.get(name) or self._open(name)
        is_first = name not in micro.added
        if is_first:
            micro.added.add(name)
            window.num_samples += micro.size
            if self.names:
                window.values.begin_batch()
        if weight is None:
            self._stepper.check_rows(name, micro.data, micro.size)
        size, total = micro.size, batch.total
        fraction = size / total if self.accumulates and size != total else 1.0
        add = partial(
            window.add_loss, loss, size, weight, fraction=fraction, retain_graph=retain_graph
        )
        if not (self.names or self._precision.dtype):
            add()
        else:
            with self._precision.without_autocast():
                loss = add(inputs=self._stepper.inputs_of(name) if self.names else None)
        if self.names:
            losses = batch.losses.setdefault(name, [])
            if is_first:
                losses.append(loss)
            else:
                losses[-1] = losses[-1] + loss
        self._watch.after_backward()

    def _open(self, name: str) -> AccumulationWindow:
        step, batch = self.step, self.batch
        if batch.micro.was_averaged:
            raise RuntimeError(
                "worker.backward() or worker.step() after worker.evaluate() on the same batch: "
                f"under {self._rank.config.policy.name} its averaging round has counted the batch; "
                "make all steps on a batch before the evaluation"
            )
        if batch.made:  # a further step on the batch
            self._steps.confirm_steps()
            self.keep_values()
            step.before = self._steps.state_before()
        if self._precision.scales and self._has_gradients(name):
            raise ValueError(
                "gradients of a plain loss.backward() are not scaled, as fp16 requires: call "
                "worker.backward(loss)"
            )
        assert step.before is not None, "a batch is in progress"
        values = self._log.new_values() if self.names else step.before.values
        run_ahead = self._is_lockstep and not (self.names or batch.made)
        window = self._stepper.open_window(values, name or None, run_ahead=run_ahead)
        step.windows[name] = window
        return window

    def window_of(self, name: str) -> AccumulationWindow:
        """The window of an optimizer with gradients, also of plain backward passes."""
        window = self.step.windows.get(name)
        if window is not None:
            return window
        if not self._has_gradients(name):
            of = f"optimizer={name!r}" if name else ""
            raise RuntimeError(
                f"worker.step({of}) without a gradient: pass the loss, or call "
                "worker.backward(loss) before"
            )
        window, micro = self._open(name), self.batch.micro
        window.num_samples = micro.size
        micro.added.add(name)
        return window

    def _has_gradients(self, name: str) -> bool:
        return any(p.grad is not None for p in self._stepper.params_of(name))

    @property
    def has_gradients(self) -> bool:
        """True if any parameter has a gradient."""
        return any(map(self._has_gradients, self.names or ("",)))

    def make(self, name: str, window: AccumulationWindow) -> None:
        """Make the optimizer step of a window that is complete on this rank."""
        number = self.post(Act.STEP, name) if self._is_lockstep else 0
        if self.names or self._precision.dtype:
            with self._precision.without_autocast():
                end = self._finish(window, number)
        else:
            end = self._finish(window, number)
        window.close()
        del self.step.windows[name]
        self.commit(name, end)

    def join(self, found: Post, number: int) -> tuple[str, StepEnd]:
        """Join the step of other ranks, with the gradients of earlier batches or none.

        Returns:
            The optimizer, and the end of the step.
        """
        name = found.optimizer
        window = self.step.windows.pop(name, None)
        window = window or self._stepper.open_window(self._log.new_values(), name or None)
        try:
            with self._precision.without_autocast():
                return name, self._finish(window, number)
        finally:
            window.close()

    def post(self, act: Act, *names: str) -> int:
        """Post an act, in lockstep; returns the number of the meeting."""
        batch = self.batch
        return self.place.post(act, (*batch.made, *names), self.step.num_steps, batch.lr)

    def _finish(self, window: AccumulationWindow, number: int) -> StepEnd:
        """Reduce and step; in lockstep only if no rank skips the batch."""
        self._watch.is_stepping = True
        try:
            if not self._is_lockstep:
                return window.finish()
            all_step = partial(self.place.all_step, number)
            if self.runs_ahead:
                # The reduction does not order the ranks' hosts.
                self.place.wait_for_all(number)
                end = window.finish() if all_step() else DROPPED
            else:
                end = window.finish(agreed=all_step)
            if end.dropped and not all_step():
                window.values.drop()
            return end
        finally:
            self._watch.is_stepping = False

    @property
    def runs_ahead(self) -> bool:
        """True if the host does not wait for reductions."""
        collective = self._replica.averager.collective
        return collective is not None and collective.host_runs_ahead

    def commit(self, name: str, end: StepEnd) -> None:
        """Count a step that was made or dropped: the batches with the first one on them."""
        batch = self.batch
        if not batch.made:
            self.count(end)
        else:
            if self._is_lockstep:
                self._rank.lockstep.num_syncs += 1  # a peer without it is behind
            self.keep_values()
            if end.dropped and not batch.is_dropped:
                self._rank.meter.num_skipped += batch.micro.size
        if self.step.windows:
            self.step.before = self._steps.state_before()
        batch.is_dropped |= end.dropped
        batch.made.append(name)
        batch.micro.added.discard(name)
        self._rank.progress.body_steps += 1

    def count(self, end: StepEnd) -> None:
        """Count the batches of the step; windows that are left belong to the next one."""
        step = self.step
        assert step.before is not None, "a batch is in progress"
        self._steps.commit(step.before, end, step.num_batches, step.num_samples, step.num_steps)
        if step.num_empty:
            self._steps.count_empty(step.num_empty)
        self.step = LoopStep(None, step.num_begun, step.windows)

    def keep_values(self) -> None:
        """Keep the values since the last step on the batch."""
        before, self.step.before = self.step.before, None
        if before is not None:
            self._log.end()
            self._log.kept.keep(before.values)

    def skip(self, step: Post | None, number: int) -> None:
        """Count the batches as skipped.

        Args:
            step: In lockstep, the step of another rank, which is dropped.
            number: Number of its meeting.
        """
        self.step.drop_windows()
        before = self.step.before
        assert before is not None, "a batch is in progress"
        if self.accumulates:
            before.values.drop()
        if step is not None:
            self._rank.progress.body_steps += 1  # as on the ranks that step in vain
            if not self.runs_ahead:
                self.join(step, number)
        self.count(DROPPED)

    def follow_open(self) -> None:
        """Be within the step that is in progress on other ranks."""
        if not self.step.is_open:
            self.step.is_followed = True
            self.step.before = self._steps.state_before()

    def undo(self, error: BaseException) -> BaseException:
        """Undo the step in progress after a failed collective; returns the error to raise."""
        self.step.drop_windows()
        self._steps.is_torn |= bool(self.batch.made)
        before = self.step.before
        cause = None if before is None else self._steps.undo(before)
        if cause is None:
            return error
        cause.__cause__ = error
        return cause

    def undo_failed(self) -> bool:
        """Undo the step in progress after the body has raised.

        Returns:
            False if an optimizer has changed the replica in it: it is in no state between steps.
        """
        step = self.step
        if not step.is_open or step.before is None:
            return True
        if self._stepper.num_begun != step.num_begun:
            return False
        step.drop_windows()
        self._stepper.clear_gradients()
        self._steps.undo_failed(step.before)
        return not self._steps.is_torn

    def leave(self) -> None:
        """Give a batch back without a step, and end one with a step."""
        self.clock.stop(counts=bool(self.batch.made))
        self.step.drop_windows()
        self._stepper.clear_gradients()
        if not self.batch.made and self.step.before is not None:
            error = self._steps.undo(self.step.before)
            if error is not None:
                raise error
            return
        self.keep_values()
        self.log_losses()

    def halted(self) -> None:
        """Drop the step in progress, whose batches are assigned again."""
        self.step.drop_windows()
        self.step = LoopStep()
        self._log.end()

    def log_losses(self) -> None:
        """Log the losses of several optimizers on the batch: each one's mean over its steps, and
        their sum.
        """
        batch = self.batch
        losses, batch.losses = batch.losses, {}
        if not losses:
            return
        values = self._log.new_values()
        values.begin_batch()
        means = {
            name: each[0] if len(each) == 1 else torch.stack(each).mean()
            for name, each in losses.items()
        }
        values.push_loss(torch.stack([*means.values()]).sum(), batch.micro.size)
        if batch.is_dropped:
            values.drop()
        for name, mean in means.items():
            values.push_scalar(f"loss/{name}", mean, batch.micro.size)
        self._log.values.keep(values)


def _check_loss(loss: object, call: str) -> None:
    """Check that the loss of a body is a scalar with a graph.

    Raises:
        TypeError, ValueError: It is not.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"worker.{call}({type(loss).__name__}): pass the loss, a scalar tensor")
    if loss.numel() != 1:
        raise ValueError(
            f"worker.{call}: the loss has the shape {tuple(loss.shape)}: pass a scalar, for "
            "instance loss.mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            f"worker.{call}: the loss has no gradient: compute it from the output of worker.model, "
            "outside torch.no_grad(), and do not detach it"
        )
