"""Whole steps as CUDA graphs: when they are captured, replayed, and made eagerly instead.

A window of batches is made eagerly until its kind has been seen a few times, which also
warms up everything that PyTorch makes on first use. Then it is captured once and replayed
from there on (Nguyen et al., "Accelerating PyTorch with CUDA Graphs", 2021). What cannot be
captured is made eagerly, as far as needed: the optimizer alone, or the whole step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from runtime.device.base import DeviceContext, ValueLog
from runtime.replica.graph_fallback import CannotCapture, Fallbacks
from runtime.replica.graph_inputs import MAX_KINDS, Held, HeldBatches
from runtime.replica.graph_module import ModuleTensors
from runtime.replica.graph_optimizer import CapturableOptimizer, StateMissing
from runtime.replica.graph_step import Recipe, StepGraph, first_line
from runtime.replica.step import StepEnd, Stepper, TrainFn

WARM_UP_STEPS = 3
"""Windows of a kind that are made eagerly first; with the last of them comes the reservation."""
MAX_CHANGES = 3
"""Times that a changed setting of the optimizer is answered by a new capture."""
FIRST_PAUSE_STEPS = 8
"""Steps made eagerly after a capture that had to wait for others; doubled each time."""
MAX_PAUSE_STEPS = 64
_MAX_COUNTED = 64

logger = logging.getLogger(__name__)

MicroStep = Callable[[TrainFn, Any, int, float], object]


class Window:
    """A window of batches that is to be made at once.

    Args:
        batches: Memory for them.
        sizes: Samples of each of its batches.
    """

    def __init__(self, batches: HeldBatches, sizes: Sequence[int]) -> None:
        self._batches = batches
        self.sizes = sizes
        self.held: list[Held] = []

    def hold(self, batch: Any) -> bool:
        """Keep the next batch; whether that was possible."""
        held = self._batches.hold(len(self.held), batch)
        if held is not None:
            self.held.append(held)
        return held is not None


class GraphedSteps:
    """The graphs of one worker. In its thread, on its compute stream.

    Args:
        rank: The worker's rank.
        device: Where they are captured.
        model: The replica.
        stepper: Makes eager steps, and is what is captured.
        optimizer: The one that the stepper steps.
        micro_step: Forward and backward of ``(train_fn, batch, samples, fraction)``.
        redirect: Sends losses and scalars to another log meanwhile.
        log: Where they go otherwise.
        full: Sizes of the batches of a whole window.
        fallbacks: Tells why something is made eagerly.
        generator: That of the worker, which steps may draw from.
        obstacle: Why no step can be captured; ``None``: it may be tried.
    """

    def __init__(
        self,
        rank: int,
        device: DeviceContext,
        model: nn.Module,
        stepper: Stepper,
        optimizer: CapturableOptimizer,
        *,
        micro_step: MicroStep,
        redirect: Callable[[ValueLog], AbstractContextManager[None]],
        log: ValueLog,
        full: Sequence[int],
        fallbacks: Fallbacks,
        generator: torch.Generator,
        obstacle: str | None = None,
    ) -> None:
        self._rank = rank
        self._device = device
        self._model = model
        self._stepper = stepper
        self._optimizer = optimizer
        self._micro_step = micro_step
        self._redirect = redirect
        self._log = log
        self._full = list(full)
        self._fallbacks = fallbacks
        self._generator = generator
        self._batches = HeldBatches()
        self._graphs: dict[Hashable, StepGraph] = {}
        self._seen: dict[Hashable, int] = {}
        self._gives_up = False
        self._reserved = False
        self._num_changes = 0
        self._pause = 0
        self._next_pause = FIRST_PAUSE_STEPS
        if obstacle is not None:
            self._give_up(obstacle)

    def window(self, sizes: Sequence[int]) -> Window | None:
        """Where the batches of a window go; ``None``: it is made eagerly, batch by batch."""
        if self._gives_up or list(sizes) != self._full:
            self._unreserve()
            return None
        return Window(self._batches, sizes)

    def pass_by(self) -> None:
        """A window turned out to hold a batch that no graph can serve."""
        self._unreserve()
        self._fallbacks.pass_by(
            self._rank,
            f"a batch holds something that is no plain tensor, or there are more than {MAX_KINDS} "
            "kinds of them: give batches tensors alone, of few shapes",
        )

    def verify(self) -> None:
        """Functions of the user have run: what they have replaced is captured anew."""
        for graph in self._graphs.values():
            if graph.module.first_replaced() is not None:
                self.forget()
                return

    def forget(self) -> None:
        """Capture anew, after eager steps: what a graph holds on to has been replaced.

        For a change of the model or the optimizer that Python code has made.
        """
        self._graphs.clear()
        self._seen.clear()
        self._unreserve()

    def step(self, window: Window, train_fn: TrainFn) -> StepEnd:
        """Make a whole window, after ``stepper.open()``."""
        total = sum(window.sizes)
        graph = self._graph_of(window, train_fn)
        if graph is not None:
            return graph.run(self._stepper, self._log, total)
        self.eagerly(window, train_fn, total)
        return self._stepper.finish(total)

    def eagerly(self, window: Window, train_fn: TrainFn, total: int) -> None:
        """Forward and backward of the batches that are held, without a graph."""
        self._stepper.clear_gradients()
        for held, size in zip(window.held, window.sizes, strict=False):
            self._micro_step(train_fn, held.data, size, size / total)

    # -- which graph ----------------------------------------------------------------

    def _graph_of(self, window: Window, train_fn: TrainFn) -> StepGraph | None:
        key = self._key(window, train_fn)
        graph = self._graphs.get(key)
        if graph is not None and not graph.holds(self._optimizer):
            # Its memory is still there, but no step looks at it any more.
            self.forget()
            graph = None
        if graph is not None and self._settings_changed(graph):
            # All of them: the end of one may free what cuBLAS keeps for its stream.
            self._graphs.clear()
            graph = None
        if graph is None and self._is_due(key):
            if not self._reserved:
                self._device.reserve()
                self._reserved = True
                return None
            self._reserved = False
            self._stepper.pause()
            graph = self._capture(window, train_fn)
            self._stepper.resume()
            if graph is not None:
                self._graphs[key] = graph
        return graph

    @staticmethod
    def _key(window: Window, train_fn: TrainFn) -> Hashable:
        return (train_fn, *(held.kind for held in window.held))

    def _is_due(self, key: Hashable) -> bool:
        seen = self._seen.get(key, 0)
        if seen < WARM_UP_STEPS - 1:
            if seen or len(self._seen) < _MAX_COUNTED:
                self._seen[key] = seen + 1
            return False
        if self._pause:
            self._pause -= 1
            return False
        if self._fallbacks.without_graphs and not self._gives_up:
            self._stop()
        return not self._gives_up

    def _settings_changed(self, graph: StepGraph) -> bool:
        if graph.settings is None or graph.settings == self._optimizer.settings():
            return False
        self._num_changes += 1
        if self._num_changes > MAX_CHANGES and not self._fallbacks.without_optimizer:
            names = self._optimizer.changed_settings(graph.settings)
            self._leave_out_optimizer(
                f"its settings change again and again ({names}), and a graph keeps what they were: "
                "hold them constant (OneCycleLR: cycle_momentum=False), and for a learning rate "
                "use an optimizer with capturable, such as AdamW, or fused=True"
            )
        return True

    def _capture(self, window: Window, train_fn: TrainFn) -> StepGraph | None:
        with self._device.alone() as alone:
            if not alone:
                self._pause = self._next_pause
                self._next_pause = min(2 * self._next_pause, MAX_PAUSE_STEPS)
                logger.info("rank %d: no capture now, other workers are busy", self._rank)
                return None
            for _ in range(2):
                try:
                    return self._try(window, train_fn)
                except StateMissing:
                    self._seen.clear()
                    return None
                except CannotCapture as reason:
                    self._leave_out_optimizer(str(reason))
                except Exception as error:
                    self._give_up(first_line(error), everywhere=not _is_out_of_memory(error))
                    return None
            return None

    def _try(self, window: Window, train_fn: TrainFn) -> StepGraph:
        total = sum(window.sizes)

        def forward() -> None:
            for held, size in zip(window.held, window.sizes, strict=True):
                self._micro_step(train_fn, held.data, size, size / total)

        module = ModuleTensors(self._model)
        try:
            graph = Recipe(
                capture=lambda work: self._device.capture(work, self._generator),
                stepper=self._stepper,
                optimizer=self._optimizer,
                forward=forward,
                redirect=self._redirect,
                num_samples=total,
                is_split=self._stepper.is_split,
                with_optimizer=not self._fallbacks.without_optimizer,
                module=module,
            ).make()
        finally:
            replaced = module.first_replaced()
            module.put_back()
        if replaced is not None:
            raise RuntimeError(
                f"the step gives {replaced!r} of the model a new tensor: write to it in place"
            )
        return graph

    # -- what is made eagerly -----------------------------------------------------------

    def _leave_out_optimizer(self, reason: str) -> None:
        self._graphs.clear()
        self._fallbacks.leave_out_optimizer(self._rank, reason)

    def _give_up(self, reason: str, *, everywhere: bool = True) -> None:
        self._stop()
        self._fallbacks.give_up(self._rank, reason, everywhere=everywhere)

    def _stop(self) -> None:
        self._gives_up = True
        self._graphs.clear()
        self._batches = HeldBatches()
        self._unreserve()

    def _unreserve(self) -> None:
        if self._reserved:
            self._reserved = False
            self._device.unreserve()


def _is_out_of_memory(error: BaseException) -> bool:
    """Which a GPU with more memory may not meet."""
    return isinstance(error, torch.OutOfMemoryError)
