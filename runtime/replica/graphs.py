"""Whole steps as CUDA graphs: when they are captured, replayed, and made eagerly instead.

A window of batches is made eagerly until its kind has been seen a few times, which also
warms up everything that PyTorch makes on first use. Then it is captured once and replayed
from there on (Nguyen et al., "Accelerating PyTorch with CUDA Graphs", 2021). What cannot be
captured is made eagerly, as far as needed: the optimizer alone, or the whole step.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime.core.loss_weights import Weight, WindowWeight
from runtime.data.batches import map_batch, movable_parts
from runtime.device.base import WARM_UP_STEPS, Device
from runtime.device.memory import StepMemory
from runtime.device.metering import ValueLog
from runtime.replica.capturable import (
    CannotCapture,
    CapturableOptimizer,
    ModuleTensors,
    StateMissing,
)
from runtime.replica.reducer import PackedGradients
from runtime.replica.stepper import MADE, StepEnd, Stepper, TrainFn

logger = logging.getLogger(__name__)

MAX_SIZES = 4
"""Sizes of windows that are captured; a graph of each takes the memory of a step."""
MAX_SIGNATURES = 8
"""Kinds of batches that are held, each with memory of its own."""
MAX_CHANGES = 3
"""Times that a changed setting of the optimizer is answered by a new capture."""
FIRST_PAUSE_STEPS = 8
"""Steps made eagerly after a capture that was refused; doubled each time."""
MAX_PAUSE_STEPS = 64
_MAX_COUNTED = 64
Replay = Callable[[], None]
CaptureWork = Callable[[Callable[[], None]], Replay]
"""Records work of the device without running it, and gives what runs it."""
MicroStep = Callable[[TrainFn, Any, int, float], object]


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
        varies: Whether the ranks share each global batch, so that whole windows come in other
            sizes, too.
        memory: Tells whether there is room for graphs of these; ``None``: nobody knows.
        fallbacks: Tells why something is made eagerly.
        generator: That of the worker, which steps may draw from.
        obstacle: Why no step can be captured; ``None``: it may be tried.
    """

    def __init__(
        self,
        rank: int,
        device: Device,
        model: nn.Module,
        stepper: Stepper,
        optimizer: CapturableOptimizer,
        *,
        micro_step: MicroStep,
        redirect: Callable[[ValueLog], AbstractContextManager[None]],
        log: ValueLog,
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
        self._stepper = stepper
        self._optimizer = optimizer
        self._micro_step = micro_step
        self._redirect = redirect
        self._log = log
        self._full = tuple(full)
        self._varies = varies
        self._memory = memory
        self._sizes: Counter[tuple[int, ...]] = Counter()  # how often other windows came
        self._served = {self._full}
        self._fallbacks = fallbacks
        self._generator = generator
        self._batches = StaticBatches()
        self._graphs: dict[Hashable, StepGraph] = {}
        self._seen: dict[Hashable, int] = {}
        self._gives_up = False
        self._num_changes = 0
        self._pause = 0
        self._next_pause = FIRST_PAUSE_STEPS
        if obstacle is not None:
            self._give_up(obstacle)

    def window(self, sizes: Sequence[int]) -> StaticWindow | None:
        """Where the batches of a window go; ``None``: it is made eagerly, batch by batch."""
        if self._gives_up or not self._serves(tuple(sizes)):
            return None
        return StaticWindow(self._batches, sizes)

    def _serves(self, sizes: tuple[int, ...]) -> bool:
        """Whether such windows get a graph: whole ones, and the first others that come again."""
        if sizes in self._served:
            return True
        if not self._varies or len(sizes) != len(self._full) or len(self._served) == MAX_SIZES:
            return False
        self._sizes[sizes] += 1
        if self._sizes[sizes] == WARM_UP_STEPS + 1:
            if self._memory is None or self._memory.has_room_for_graph(max(sizes)):
                self._served.add(sizes)
            else:
                self._fallbacks.report_skipped(
                    self._rank,
                    f"{self._device.device} has no room for a graph of {sum(sizes)} samples beside "
                    "what steps and graphs keep already: raise vram_fraction, or use a smaller "
                    "batch_size",
                )
        return False

    def report_skipped(self) -> None:
        """A window turned out to hold a batch that no graph can serve."""
        self._fallbacks.report_skipped(
            self._rank,
            f"a batch holds a value that is not a plain tensor, or batches have more than "
            f"{MAX_SIGNATURES} different shapes: use batches of tensors alone, of few shapes",
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

    def step(self, window: StaticWindow, train_fn: TrainFn) -> StepEnd:
        """Make a whole window, after ``stepper.open()``."""
        total = sum(window.sizes)
        graph = self._graph_of(window, train_fn)
        if graph is not None:
            return graph.run(self._stepper, self._log, total)
        self.eagerly(window, train_fn, total)
        return self._stepper.finish(total)

    def eagerly(self, window: StaticWindow, train_fn: TrainFn, total: int) -> None:
        """Forward and backward of the batches that are held, without a graph."""
        self._stepper.clear_gradients()
        for held, size in zip(window.held, window.sizes, strict=False):
            self._micro_step(train_fn, held.data, size, size / total)

    def _graph_of(self, window: StaticWindow, train_fn: TrainFn) -> StepGraph | None:
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
            self._stepper.pause()
            graph = self._capture(window, train_fn)
            self._stepper.resume()
            if graph is not None:
                self._graphs[key] = graph
        return graph

    @staticmethod
    def _key(window: StaticWindow, train_fn: TrainFn) -> Hashable:
        return (train_fn, *(held.kind for held in window.held))

    def _is_due(self, key: Hashable) -> bool:
        seen = self._seen.get(key, 0)
        if seen < WARM_UP_STEPS:
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

    def _capture(self, window: StaticWindow, train_fn: TrainFn) -> StepGraph | None:
        if self._device.is_shared:
            self._give_up(
                f"several workers are on {self._device.device}, where a capture in one would "
                "break the others' draws: give each worker a GPU of its own",
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
                        return self._try(window, train_fn)
                except StateMissing:
                    self._seen.clear()
                    return None
                except CannotCapture as reason:
                    self._leave_out_optimizer(str(reason))
                except Exception as error:
                    # A GPU with more memory may not run out of it.
                    is_common = not isinstance(error, torch.OutOfMemoryError)
                    self._give_up(error_summary(error), everywhere=is_common)
                    return None
            return None

    def _try(self, window: StaticWindow, train_fn: TrainFn) -> StepGraph:
        total = sum(window.sizes)

        def forward() -> None:
            for held, size in zip(window.held, window.sizes, strict=True):
                self._micro_step(train_fn, held.data, size, size / total)

        module = ModuleTensors(self._model)
        try:
            graph = StepCapture(
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
            module.restore()
        if replaced is not None:
            raise RuntimeError(
                f"the step gives {replaced!r} of the model a new tensor: write to it in place"
            )
        return graph

    def _leave_out_optimizer(self, reason: str) -> None:
        self._graphs.clear()
        self._fallbacks.leave_out_optimizer(self._rank, reason)

    def _give_up(self, reason: str, *, everywhere: bool = True) -> None:
        self._stop()
        self._fallbacks.give_up(self._rank, reason, everywhere=everywhere)

    def _stop(self) -> None:
        self._gives_up = True
        self._graphs.clear()
        self._batches = StaticBatches()


class StaticWindow:
    """A window of batches that is to be made at once.

    Args:
        batches: Memory for them.
        sizes: Samples of each of its batches.
    """

    def __init__(self, batches: StaticBatches, sizes: Sequence[int]) -> None:
        self._batches = batches
        self.sizes = sizes
        self.held: list[StaticBatch] = []

    def hold(self, batch: Any) -> bool:
        """Keep the next batch; whether that was possible."""
        held = self._batches.hold(len(self.held), batch)
        if held is not None:
            self.held.append(held)
        return held is not None


class StaticBatches:
    """Memory for the batches of a window. In the worker's thread, on its compute stream."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, Hashable], StaticBatch] = {}

    def hold(self, index: int, batch: Any) -> StaticBatch | None:
        """Copy a batch to its memory, on the device; the host does not wait.

        Args:
            index: Which micro-batch of the window it is.
            batch: On the device.

        Returns:
            ``None`` if no graph can serve such batches, or there are too many kinds.
        """
        kind = batch_signature(batch)
        if kind is None:
            return None
        held = self._held.get((index, kind))
        if held is None:
            if len({known for _, known in self._held} | {kind}) > MAX_SIGNATURES:
                return None
            held = StaticBatch(kind, map_batch(batch, torch.empty_like))
            self._held[index, kind] = held
        targets = movable_parts(held.data)
        if targets:
            torch._foreach_copy_(targets, movable_parts(batch))
        return held


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """A batch in memory of its own.

    Attributes:
        kind: See :func:`batch_signature`.
        data: The batch, with tensors that the next batch of its kind overwrites.
    """

    kind: Hashable
    data: Any


def batch_signature(batch: Any) -> Hashable | None:
    """What two batches must share for one graph to serve both; ``None``: none can.

    That is the containers, the tensors' shapes and dtypes, and the values of everything
    that is no tensor.
    """
    if isinstance(batch, Tensor):
        plain = type(batch) is Tensor and batch.layout is torch.strided
        return (tuple(batch.shape), batch.dtype, batch.device) if plain else None
    if callable(getattr(batch, "to", None)):
        return None
    if isinstance(batch, Mapping):
        parts = [(key, batch_signature(part)) for key, part in batch.items()]
        return None if any(kind is None for _, kind in parts) else (type(batch), tuple(parts))
    if isinstance(batch, tuple | list):
        kinds = [batch_signature(part) for part in batch]
        return None if any(kind is None for kind in kinds) else (type(batch), tuple(kinds))
    try:
        hash(batch)
    except TypeError:
        return None
    return (type(batch), batch)


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
    packed: PackedGradients | None
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
        mapping, size, first = optimizer.state_identity()
        return mapping is self.state[0] and size == self.state[1] and first is self.state[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCapture:
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
            state=self.optimizer.state_identity() if self.with_optimizer else None,
            kept=self.optimizer.state_tensors() if self.with_optimizer else (),
            module=self.module,
        )

    def _first(self, whole: bool) -> tuple[StepValues, Replay]:
        tap, made = CapturedLog(), []
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
                raise CannotCapture(error_summary(error)) from error
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
            raise CannotCapture(error_summary(error)) from error


class CapturedLog(ValueLog):
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


class GraphFallbacks:
    """What the workers of a run have found out; thread-safe.

    A rank that knows it from another one need not break a capture of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._optimizer = False
        self._all = False

    @property
    def without_optimizer(self) -> bool:
        """Whether the optimizer cannot be captured."""
        return self._optimizer

    @property
    def without_graphs(self) -> bool:
        """Whether nothing can be captured."""
        return self._all

    def leave_out_optimizer(self, rank: int, reason: str) -> None:
        """No rank captures the optimizer from here on."""
        self._optimizer = True
        self._tell(rank, "the optimizer steps without a graph", reason)

    def give_up(self, rank: int, reason: str, *, everywhere: bool = True) -> None:
        """A rank captures nothing from here on, nor does any other if so ``everywhere``."""
        if everywhere:  # not "or": that would write back what it read before another rank's word
            self._all = True
        self._tell(rank, "steps are made without a graph", reason)

    def report_skipped(self, rank: int, reason: str) -> None:
        """Some windows of batches are made without a graph."""
        self._tell(rank, "some steps are made without a graph", reason)

    def _tell(self, rank: int, what: str, reason: str) -> None:
        with self._lock:
            first = reason not in self._told
            self._told.add(reason)
        level = logging.WARNING if first else logging.DEBUG
        logger.log(level, "cuda_graphs, rank %d: %s: %s", rank, what, reason)


def error_summary(error: BaseException) -> str:
    """What an error says in one line, and the line of the user's code that it came from."""
    text = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    own = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    return f"{said} ({own[-1].filename}, line {own[-1].lineno})" if own else said


def _is_library(filename: str) -> bool:
    return filename.startswith((str(Path(torch.__file__).parent), str(Path(__file__).parent)))
