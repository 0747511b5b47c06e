"""One captured window: its graphs, and what a replay gives."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.core.weight import Weight, WindowWeight
from runtime.device.base import ValueLog
from runtime.replica.graph_fallback import CannotCapture
from runtime.replica.graph_module import ModuleTensors
from runtime.replica.graph_optimizer import CapturableOptimizer, StateMissing
from runtime.replica.reducer import Packed
from runtime.replica.step import MADE, StepEnd, Stepper

Replay = Callable[[], None]
CaptureWork = Callable[[Callable[[], None]], Replay]
"""Records work of the device without running it, and gives what runs it."""


class ValueTap(ValueLog):
    """Takes the losses and scalars of a step while it is captured."""

    def gather(self) -> StepValues:
        """Make one tensor of them; to be captured behind the step."""
        losses = [(None, loss, n) for loss, n, _ in self._losses]
        entries: list[tuple[str | None, float | Tensor, Weight]] = [*losses, *self._scalars]
        every = [v for _, *pair in entries for v in pair if isinstance(v, Tensor)]
        # Those on a CPU are known now, unless it is the stand-in of a device.
        tensors = [t for t in every if not t.is_cpu] or every
        known = {id(t) for t in tensors}
        return StepValues(
            torch.stack([t.detach().reshape(()).double() for t in tensors]),
            [
                (
                    name,
                    None if id(value) in known else float(value),
                    None if id(n) in known else n if isinstance(n, int) else float(n),
                )
                for name, value, n in entries
            ],
        )


class StepValues:
    """Losses and scalars that a replay leaves on the device.

    Args:
        values: The values, of shape ``(n,)``; the next replay overwrites them.
        entries: ``(name, number, weight)`` in order; a loss has no name, and what is in
            ``values`` no number and no weight.
    """

    def __init__(
        self, values: Tensor, entries: Sequence[tuple[str | None, float | None, float | None]]
    ) -> None:
        self._values = values
        self._entries = entries

    def push(self, log: ValueLog) -> None:
        """Hand a copy of the values on."""
        values = iter(self._values.clone().unbind())
        for name, number, known in self._entries:
            value = next(values) if number is None else number
            weight = next(values) if known is None else known
            if name is not None:
                log.push_scalar(name, value, weight)
            elif isinstance(value, Tensor):
                log.push_loss(value, weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """A captured window.

    Attributes:
        first: Forward, backward and, where they are packed or nothing comes between, more.
        second: Clip and step, where something comes between; else ``None``.
        is_whole: Whether ``first`` is all.
        values: What ``first`` leaves.
        grads: The gradients that it leaves; empty where nobody reads them.
        packed: What it has packed; ``None``: nothing.
        window: Weight of the step, which it leaves, too; ``None``: its samples.
        settings: Of the optimizer when it was captured.
        state: Mark of the optimizer's state then; ``None``: no graph touches it.
        kept: Tensors of the optimizer's state, whose memory the graphs use.
        module: What they read of the module.
    """

    first: Replay
    second: Replay | None
    is_whole: bool
    values: StepValues
    grads: Sequence[Tensor | None]
    packed: Packed | None
    window: WindowWeight | None
    settings: Any
    state: tuple[Any, int, Any] | None
    kept: Sequence[Tensor]
    module: ModuleTensors

    def run(self, stepper: Stepper, log: ValueLog, num_samples: int) -> StepEnd:
        """Make the step on the batches that lie in the held memory."""
        self.first()
        self.values.push(log)
        stepper.window = self.window
        if self.is_whole:
            return MADE
        stepper.give_gradients(self.grads, self.packed)
        if self.second is None:
            return stepper.finish(num_samples)
        end = stepper.settle(num_samples)
        if end is not None:
            return end
        self.second()
        return MADE

    def holds(self, optimizer: CapturableOptimizer) -> bool:
        """Whether the optimizer's state is still the one that the graphs write to."""
        if self.state is None:
            return True
        mapping, size, first = optimizer.state_mark()
        return mapping is self.state[0] and size == self.state[1] and first is self.state[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a window is captured.

    Attributes:
        capture: Records work.
        stepper: Makes the step.
        optimizer: Its optimizer.
        forward: Forward and backward of the window on the held batches.
        redirect: Sends losses and scalars to a log meanwhile.
        num_samples: Samples in the window.
        is_split: Whether the ranks reduce, or a flag is read, before the optimizer steps.
        with_optimizer: Whether clip and step are captured too.
        module: What the step reads of the module.
    """

    capture: CaptureWork
    stepper: Stepper
    optimizer: CapturableOptimizer
    forward: Callable[[], None]
    redirect: Callable[[ValueLog], AbstractContextManager[None]]
    num_samples: int
    is_split: bool
    with_optimizer: bool
    module: ModuleTensors

    def make(self) -> StepGraph:
        """Capture. Nothing is trained; gradients are forgotten.

        Raises:
            CannotCapture: The optimizer's part cannot be captured.
            StateMissing: The optimizer has no state yet.
            BaseException: What the device, or the user's function, says of the rest.
        """
        stepper, whole = self.stepper, self.with_optimizer and not self.is_split
        stepper.clear_gradients()  # the memory of what was captured before goes with it
        try:
            values, first = self._first(whole)
            grads, window = stepper.gradients(), stepper.window
            split = self.with_optimizer and self.is_split
            packed = stepper.packed() if split else None
            if packed is not None and not packed.complete:
                raise CannotCapture("a parameter gets no gradient, which the ranks tell each other")
            second = self._second() if split else None
        finally:
            stepper.clear_gradients()
        return StepGraph(
            first=first,
            second=second,
            is_whole=whole,
            values=values,
            grads=() if whole else grads,
            packed=packed,
            window=window,
            settings=self.optimizer.settings() if self.with_optimizer else None,
            state=self.optimizer.state_mark() if self.with_optimizer else None,
            kept=self.optimizer.state_tensors() if self.with_optimizer else (),
            module=self.module,
        )

    def _first(self, whole: bool) -> tuple[StepValues, Replay]:
        tap, made = ValueTap(), []
        in_optimizer = False

        def work() -> None:
            nonlocal in_optimizer
            self.stepper.clear_gradients()
            with self.redirect(tap):
                self.forward()
            if whole and self.stepper.is_split:
                raise StateMissing  # its first loss with a weight: once more, with a read between
            if self.with_optimizer:
                self.stepper.pack(self.num_samples)
            made.append(tap.gather())
            if whole:
                in_optimizer = True
                with self.optimizer.unchanged():
                    self.stepper.apply()

        try:
            replay = self.capture(work)
        except (CannotCapture, StateMissing):
            raise
        except Exception as error:
            if in_optimizer:
                raise CannotCapture(first_line(error)) from error
            raise
        return made[0], replay

    def _second(self) -> Replay:
        def work() -> None:
            self.stepper.unpack()
            with self.optimizer.unchanged():
                self.stepper.apply()

        try:
            return self.capture(work)
        except (CannotCapture, StateMissing):
            raise
        except Exception as error:
            raise CannotCapture(first_line(error)) from error


def first_line(error: BaseException) -> str:
    """What an error says in one line, and the line of the user's code that it came from."""
    text = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    own = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    return f"{said} ({own[-1].filename}, line {own[-1].lineno})" if own else said


def _is_library(filename: str) -> bool:
    return filename.startswith((str(Path(torch.__file__).parent), str(Path(__file__).parent)))
