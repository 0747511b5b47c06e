"""Steps as CUDA graphs: when they are captured, replayed, or made eagerly instead.

Windows of the same kind are made eagerly a few times, which also initialises everything that
PyTorch creates on first use. Then the step is captured once and replayed from there on (Nguyen et
al., "Accelerating PyTorch with CUDA Graphs", 2021). Parts that cannot be captured are made eagerly:
the optimizer alone, or the whole step.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime.core.loss_weights import Weight
from runtime.core.nested import cuts_itself, is_container, items_of, map_batch, movable_parts
from runtime.device.base import WARM_UP_STEPS, Device
from runtime.device.memory import StepMemory
from runtime.device.metering import StepValues
from runtime.replica.batch_log import BatchLog
from runtime.replica.build import TrainFn
from runtime.replica.capturable import (
    CannotCapture,
    CapturableOptimizer,
    ModuleTensors,
    StateMissing,
)
from runtime.replica.stepper import AccumulationWindow, CapturedWindow, StepEnd

logger = logging.getLogger(__name__)

MAX_SIZES = 4
"""Sizes of windows that are captured; a graph of each takes the memory of a step."""
MAX_SIGNATURES = 8
"""Signatures of batches with static buffers of their own."""
MAX_CHANGES = 3
"""Changes of the optimizer's settings after which the step is captured again."""
FIRST_PAUSE_STEPS = 8
"""Steps made eagerly after a refused capture; doubled each time."""
MAX_PAUSE_STEPS = 64
_MAX_COUNTED = 64
Replay = Callable[[], None]
CaptureWork = Callable[[Callable[[], None]], Replay]
"""Records work of the device without running it, and returns a function that runs it."""


class GraphedSteps:
    """The graphs of one worker. In its thread, on its compute stream.

    Args:
        log: Receives losses and scalars.
        varies: True if full windows also have other sizes, as pieces of global batches.
        memory: Reports if there is memory for graphs of further sizes; ``None``: assume there is.
        generator: The worker's random generator, which steps may use.
        obstacle: The reason why no step can be captured; ``None``: there is none.
    """

    def __init__(
        self,
        rank: int,
        device: Device,
        model: nn.Module,
        optimizer: CapturableOptimizer,
        *,
        log: BatchLog,
        full: Sequence[int],
        varies: bool = False,
        memory: StepMemory | None = None,
        fallbacks: GraphFallbacks,
        generator: torch.Generator,
        obstacle: str | None = None,
    ) -> None:
        self._rank = rank
        self._device = device
        self._model = model
        self._optimizer = optimizer
        self._log = log
        self._full = tuple(full)
        self._varies = varies
        self._memory = memory
        self._sizes: Counter[tuple[int, ...]] = Counter()  # sizes of windows without a graph
        self._captured_sizes = {self._full}
        self._fallbacks = fallbacks
        self._generator = generator
        self._buffers = StaticBuffers()
        self._graphs: dict[Hashable, StepGraph] = {}
        self._seen: dict[Hashable, int] = {}
        self._has_stopped = False
        self._num_changes = 0
        self._pause = 0
        self._next_pause = FIRST_PAUSE_STEPS
        if obstacle is not None:
            self._give_up(obstacle)

    def batches(self, sizes: Sequence[int]) -> StaticBatches | None:
        """Static batches for a window; ``None`` if it is made eagerly, batch by batch."""
        if self._has_stopped or not self._is_captured(tuple(sizes)):
            return None
        return StaticBatches(self._buffers, sizes)

    def _is_captured(self, sizes: tuple[int, ...]) -> bool:
        """True for windows that are captured: full ones, and the first other repeated sizes."""
        if sizes in self._captured_sizes:
            return True
        is_full = len(sizes) == len(self._full)
        if not self._varies or not is_full or len(self._captured_sizes) == MAX_SIZES:
            return False
        self._sizes[sizes] += 1
        if self._sizes[sizes] == WARM_UP_STEPS + 1:
            if self._memory is None or self._memory.has_room_for_graph(max(sizes)):
                self._captured_sizes.add(sizes)
            else:
                self._fallbacks.report_skipped(
                    self._rank,
                    f"{self._device.device} lacks memory for a graph of {sum(sizes)} samples, "
                    "beside that of steps and other graphs: raise vram_fraction, or use a smaller "
                    "batch_size",
                )
        return False

    def drop_replaced(self) -> None:
        """Drop all graphs if user functions have replaced tensors of the model."""
        for graph in self._graphs.values():
            if graph.module.first_replaced() is not None:
                self.reset()
                return

    def reset(self) -> None:
        """Drop all graphs; steps are captured again after some eager ones."""
        self._graphs.clear()
        self._seen.clear()

    def finish(
        self, window: AccumulationWindow, batches: StaticBatches, train_fn: TrainFn
    ) -> StepEnd:
        """Make the step of a window on static batches, by a graph if there is one."""
        graph = self._graph_of(window, batches, train_fn)
        if graph is not None:
            return graph.run(window)
        batches.add_to(window, train_fn)
        return window.finish()

    def add_eagerly(
        self, window: AccumulationWindow, batches: StaticBatches, train_fn: TrainFn
    ) -> None:
        """Add the batches so far to a window, whose next batch cannot be captured."""
        self._fallbacks.report_skipped(
            self._rank,
            f"a batch has a value that is not a plain tensor, or batches have more than "
            f"{MAX_SIGNATURES} different shapes: use batches of tensors alone, of few shapes",
        )
        batches.add_to(window, train_fn)

    def _graph_of(
        self, window: AccumulationWindow, batches: StaticBatches, train_fn: TrainFn
    ) -> StepGraph | None:
        key = (train_fn, *batches.signatures)
        graph = self._graphs.get(key)
        if graph is not None and not graph.holds(self._optimizer):
            # The optimizer's state was replaced; the graphs use the old one.
            self.reset()
            graph = None
        if graph is not None and self._settings_changed(graph):
            # All of them: the end of one may free cuBLAS workspaces of the stream.
            self._graphs.clear()
            graph = None
        if graph is None and self._is_due(key):
            with window.untimed():
                graph = self._capture(window, batches, train_fn)
            if graph is not None:
                self._graphs[key] = graph
        return graph

    def _is_due(self, key: Hashable) -> bool:
        seen = self._seen.get(key, 0)
        if seen < WARM_UP_STEPS:
            if seen or len(self._seen) < _MAX_COUNTED:
                self._seen[key] = seen + 1
            return False
        if self._pause:
            self._pause -= 1
            return False
        if self._fallbacks.without_graphs and not self._has_stopped:
            self._stop()
        return not self._has_stopped

    def _settings_changed(self, graph: StepGraph) -> bool:
        if graph.settings is None or graph.settings == self._optimizer.settings():
            return False
        self._num_changes += 1
        if self._num_changes > MAX_CHANGES and not self._fallbacks.without_optimizer:
            names = self._optimizer.changed_settings(graph.settings)
            self._leave_out_optimizer(
                f"its settings change repeatedly ({names}), and a graph keeps those of its "
                "capture: keep them constant (OneCycleLR: cycle_momentum=False), and for a "
                "learning rate use an optimizer with capturable, such as AdamW, or fused=True"
            )
        return True

    def _capture(
        self, window: AccumulationWindow, batches: StaticBatches, train_fn: TrainFn
    ) -> StepGraph | None:
        if self._device.is_shared:
            self._give_up(
                f"several workers share {self._device.device}, where a capture in one would break "
                "the random draws of the others: give each worker a GPU of its own",
                everywhere=False,
            )
            return None
        with self._device.capturing() as granted:
            if not granted:
                self._pause = self._next_pause
                self._next_pause = min(2 * self._next_pause, MAX_PAUSE_STEPS)
                logger.info("rank %d: no capture now, data is being read", self._rank)
                return None
            for _ in range(2):
                try:
                    with self._memory.capturing() if self._memory else nullcontext():
                        return self._try(window, batches, train_fn)
                except StateMissing:
                    self._seen.clear()
                    return None
                except CannotCapture as reason:
                    self._leave_out_optimizer(str(reason))
                except Exception as error:
                    # Other ranks may have GPUs with more memory.
                    is_common = not isinstance(error, torch.OutOfMemoryError)
                    self._give_up(error_summary(error), everywhere=is_common)
                    return None
            return None

    def _try(
        self, window: AccumulationWindow, batches: StaticBatches, train_fn: TrainFn
    ) -> StepGraph:
        module = ModuleTensors(self._model)
        try:
            graph = StepCapture(
                capture=lambda work: self._device.capture(work, self._generator),
                window=window,
                optimizer=self._optimizer,
                forward=lambda: batches.add_to(window, train_fn),
                log=self._log,
                is_split=window.is_split,
                with_optimizer=not self._fallbacks.without_optimizer,
                module=module,
            ).make()
        finally:
            replaced = module.first_replaced()
            module.restore()
        if replaced is not None:
            raise RuntimeError(
                f"the step replaces the tensor {replaced!r} of the model: write to it in place"
            )
        return graph

    def _leave_out_optimizer(self, reason: str) -> None:
        self._graphs.clear()
        self._fallbacks.leave_out_optimizer(self._rank, reason)

    def _give_up(self, reason: str, *, everywhere: bool = True) -> None:
        self._stop()
        self._fallbacks.give_up(self._rank, reason, everywhere=everywhere)

    def _stop(self) -> None:
        self._has_stopped = True
        self._graphs.clear()
        self._buffers = StaticBuffers()


class StaticBatches:
    """The micro-batches of one window, in static buffers.

    Args:
        sizes: Samples of each micro-batch of the window.
    """

    def __init__(self, buffers: StaticBuffers, sizes: Sequence[int]) -> None:
        self._buffers = buffers
        self._sizes = sizes
        self._batches: list[StaticBatch] = []

    def copy(self, batch: Any) -> bool:
        """Copy the next micro-batch to its buffer; False if it cannot be captured."""
        copied = self._buffers.copy(len(self._batches), batch)
        if copied is not None:
            self._batches.append(copied)
        return copied is not None

    @property
    def signatures(self) -> Sequence[Hashable]:
        return [batch.signature for batch in self._batches]

    def add_to(self, window: AccumulationWindow, train_fn: TrainFn) -> None:
        """Add the micro-batches so far to a window, as its first ones."""
        window.restart()
        for batch, size in zip(self._batches, self._sizes, strict=False):
            window.add(train_fn, batch.data, size)


class StaticBuffers:
    """Memory for the batches of a window. In the worker's thread, on its compute stream."""

    def __init__(self) -> None:
        self._batches: dict[tuple[int, Hashable], StaticBatch] = {}

    def copy(self, index: int, batch: Any) -> StaticBatch | None:
        """Copy a batch to its buffer, on the device; the host does not wait.

        Returns:
            ``None`` if the batch cannot be captured, or there are too many signatures.
        """
        signature = batch_signature(batch)
        if signature is None:
            return None
        static = self._batches.get((index, signature))
        if static is None:
            if len({known for _, known in self._batches} | {signature}) > MAX_SIGNATURES:
                return None
            static = StaticBatch(signature, map_batch(batch, torch.empty_like))
            self._batches[index, signature] = static
        targets = movable_parts(static.data)
        if targets:
            torch._foreach_copy_(targets, movable_parts(batch))
        return static


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """A batch in a static buffer.

    Attributes:
        signature: See :func:`batch_signature`.
        data: The batch; the next one of its signature overwrites its tensors.
    """

    signature: Hashable
    data: Any


def batch_signature(batch: Any) -> Hashable | None:
    """Signature of batches that share a graph; ``None`` if the batch cannot be captured.

    It contains the containers, the tensors' shapes and dtypes, and all values that are not
    tensors.
    """
    if isinstance(batch, Tensor):
        plain = type(batch) is Tensor and batch.layout is torch.strided
        return (tuple(batch.shape), batch.dtype, batch.device) if plain else None
    if callable(getattr(batch, "to", None)):
        return None
    if cuts_itself(batch):
        return None
    if is_container(batch):
        names, parts = items_of(batch)
        kinds = tuple(map(batch_signature, parts))
        return None if None in kinds else (type(batch), names, kinds)
    try:
        hash(batch)
    except TypeError:
        return None
    return (type(batch), batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """The captured step of a window.

    Attributes:
        first: Forward, backward and, unless the host acts in between, the optimizer's step.
        second: Clip and step, if the host acts in between and the optimizer is captured.
        values: Losses and scalars of ``first``.
        result: The window's result of ``first``.
        settings: Settings of the optimizer at the capture; ``None``: it is not captured.
        state: Identity of the optimizer's state at the capture; ``None``: it is not captured.
        kept: Tensors of the optimizer's state, whose memory the graphs use.
    """

    first: Replay
    second: Replay | None
    values: ReplayedValues
    result: CapturedWindow
    settings: Any
    state: tuple[Any, int, Any] | None
    kept: Sequence[Tensor]
    module: ModuleTensors

    def run(self, window: AccumulationWindow) -> StepEnd:
        """Make the step of a window on the batches in the static buffers."""
        self.first()
        self.values.push(window.values)
        window.load(self.result)
        return window.finish(self.second)

    def holds(self, optimizer: CapturableOptimizer) -> bool:
        """True if the optimizer still has the state that the graphs write to."""
        if self.state is None:
            return True
        mapping, size, first = optimizer.state_identity()
        return mapping is self.state[0] and size == self.state[1] and first is self.state[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCapture:
    """The capture of a window's step.

    Attributes:
        log: Receives losses and scalars.
        is_split: True if the host acts between the gradients and the optimizer's step.
        with_optimizer: True if clip and step are captured too.
    """

    capture: CaptureWork
    window: AccumulationWindow
    optimizer: CapturableOptimizer
    forward: Callable[[], None]
    log: BatchLog
    is_split: bool
    with_optimizer: bool
    module: ModuleTensors

    def make(self) -> StepGraph:
        """Capture. Nothing is trained, and gradients are dropped.

        Raises:
            CannotCapture: The optimizer's part cannot be captured.
            StateMissing: The optimizer has no state yet.
            BaseException: Errors of the device or of the user's function in the rest.
        """
        window, whole = self.window, self.with_optimizer and not self.is_split
        window.restart()  # also frees the memory of earlier captured gradients
        try:
            values, first = self._first(whole)
            result = window.captured()
            if result.packed is not None and not result.packed.complete:
                raise CannotCapture("a parameter has no gradient, so ranks must exchange flags")
            second = self._second() if self.with_optimizer and self.is_split else None
        finally:
            window.restart()
        return StepGraph(
            first=first,
            second=second,
            values=values,
            result=result,
            settings=self.optimizer.settings() if self.with_optimizer else None,
            state=self.optimizer.state_identity() if self.with_optimizer else None,
            kept=self.optimizer.state_tensors() if self.with_optimizer else (),
            module=self.module,
        )

    def _first(self, whole: bool) -> tuple[ReplayedValues, Replay]:
        captured, values = self.log.new_values(), []
        in_optimizer = False

        def work() -> None:
            nonlocal in_optimizer
            with self._into(captured):
                self.forward()
            if whole and self.window.is_split:
                raise StateMissing  # its first weight on the device: capture again, split
            if self.with_optimizer:
                self.window.pack()
            values.append(ReplayedValues.of(captured))
            if whole:
                in_optimizer = True
                with self.optimizer.unchanged():
                    self.window.apply()

        try:
            replay = self.capture(work)
        except (CannotCapture, StateMissing):
            raise
        except Exception as error:
            if in_optimizer:
                raise CannotCapture(error_summary(error)) from error
            raise
        return values[0], replay

    @contextmanager
    def _into(self, values: StepValues) -> Iterator[None]:
        """Collect the values of the window and of its functions apart from the step."""
        window, log = self.window, self.log
        kept = window.values, log.values
        window.values = log.values = values
        try:
            yield
        finally:
            window.values, log.values = kept

    def _second(self) -> Replay:
        def work() -> None:
            with self.optimizer.unchanged():
                self.window.apply()

        try:
            return self.capture(work)
        except (CannotCapture, StateMissing):
            raise
        except Exception as error:
            raise CannotCapture(error_summary(error)) from error


class ReplayedValues:
    """Losses and scalars of a replay, on the device.

    Args:
        values: The values, of shape ``(n,)``; the next replay overwrites them.
        entries: ``(name, number, weight)`` in order. The name of a loss is ``None``, as are
            numbers and weights that are in ``values``.
    """

    def __init__(
        self, values: Tensor, entries: Sequence[tuple[str | None, float | None, float | None]]
    ) -> None:
        self._values = values
        self._entries = entries

    @classmethod
    def of(cls, captured: StepValues) -> ReplayedValues:
        """The values of a step, stacked into one tensor; captured after the step."""
        losses = [(None, *loss[:2]) for loss in captured.losses if loss is not None]
        entries: list[tuple[str | None, float | Tensor, Weight]] = [*losses, *captured.scalars]
        every = [v for _, *pair in entries for v in pair if isinstance(v, Tensor)]
        # Values on a CPU are read now, unless the CPU stands in for a device.
        tensors = [t for t in every if not t.is_cpu] or every
        known = {id(t) for t in tensors}
        return cls(
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

    def push(self, step: StepValues) -> None:
        """Push a copy of the values to those of a step."""
        values = iter(self._values.clone().unbind())
        for name, number, known in self._entries:
            value = next(values) if number is None else number
            weight = next(values) if known is None else known
            if name is not None:
                step.push_scalar(name, value, weight)
            elif isinstance(value, Tensor):
                step.begin_batch()
                step.push_loss(value, weight)


class GraphFallbacks:
    """Parts of steps that cannot be captured, shared by the workers of a run; thread-safe.

    A rank need not fail in a capture if another one already has.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reported: set[str] = set()
        self._optimizer = False
        self._all = False

    @property
    def without_optimizer(self) -> bool:
        """True if the optimizer cannot be captured."""
        return self._optimizer

    @property
    def without_graphs(self) -> bool:
        """True if nothing can be captured."""
        return self._all

    def leave_out_optimizer(self, rank: int, reason: str) -> None:
        """Capture no optimizer from now on, on any rank."""
        self._optimizer = True
        self._log(rank, "the optimizer steps without a graph", reason)

    def give_up(self, rank: int, reason: str, *, everywhere: bool = True) -> None:
        """Capture nothing from now on, on this rank or ``everywhere``."""
        if everywhere:  # "or" could overwrite a concurrent write
            self._all = True
        self._log(rank, "steps are made without a graph", reason)

    def report_skipped(self, rank: int, reason: str) -> None:
        """Report that some windows are made without a graph."""
        self._log(rank, "some steps are made without a graph", reason)

    def _log(self, rank: int, what: str, reason: str) -> None:
        with self._lock:
            first = reason not in self._reported
            self._reported.add(reason)
        level = logging.WARNING if first else logging.DEBUG
        logger.log(level, "cuda_graphs, rank %d: %s: %s", rank, what, reason)


def error_summary(error: BaseException) -> str:
    """An error's message in one line, with the line of user code that raised it."""
    text = str(error).strip().splitlines()
    summary = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    return f"{summary} ({own[-1].filename}, line {own[-1].lineno})" if own else summary


def _is_library(filename: str) -> bool:
    return filename.startswith((str(Path(torch.__file__).parent), str(Path(__file__).parent)))
