"""Optimizer steps of a replica, one accumulation window at a time.

Nothing here waits for the device: losses stay tensors, and the only host reads are those of
fp16's gradient scaler, :mod:`runtime.replica.non_finite` and :mod:`runtime.replica.reducer`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runtime.checkpoint.content import SavedStepper
from runtime.checkpoint.subclasses import restore_subclasses
from runtime.collective.base import CollectiveWork
from runtime.core.errors import CollectiveAborted, CollectiveTimeout
from runtime.core.loss_weights import (
    GradientMask,
    Weight,
    WeightAccumulator,
    WindowWeight,
    checked_loss,
    split_loss,
)
from runtime.core.shared_objects import SharedObjects
from runtime.device.metering import StepValues, ValueLog
from runtime.device.timing import HostTimer, StepTimer
from runtime.replica.batch_log import BatchLog
from runtime.replica.build import TrainFn
from runtime.replica.error_notes import explain_error
from runtime.replica.global_batch_comm import GlobalBatchComm
from runtime.replica.optimizer_update import OptimizerPart, OptimizerUpdate
from runtime.replica.optimizers import (
    load_optimizer_state,
    members_of,
    optimizer_kind,
    own_numbers,
    shallow_copy,
    state_in_order,
    state_of,
)
from runtime.replica.reducer import PackedGradients


class Stepper:
    """Makes the optimizer steps of a replica: ``with stepper.window(num_samples) as window``.

    Args:
        whole: The optimizer, or the one that stands for several.
        update: Updates the parameters from complete gradients.
        timer: Timer of the steps; the reduction is excluded.
        is_prompt: True if values on the device can be read at no cost.
        log: Receives losses; ``None``: a new log.
        global_batch: Exchanges within forward and backward passes; ``None``: there are none.
        sum_scale: The losses are sums over the samples, and without a reducer their gradients are
            multiplied by this factor; ``None``: the losses are means.

    Attributes:
        log: See above.
        part_names: Names of the optimizers, if there are several.
        num_begun: Optimizer steps begun, completed or not.
    """

    def __init__(
        self,
        model: nn.Module,
        whole: OptimizerPart,
        update: OptimizerUpdate | None = None,
        *,
        timer: StepTimer | None = None,
        is_prompt: bool = True,
        log: BatchLog | None = None,
        global_batch: GlobalBatchComm | None = None,
        sum_scale: float | None = None,
    ) -> None:
        self._model = model
        self._whole = whole
        self._update = update or OptimizerUpdate()
        self._precision = self._update.precision
        self._timer = timer or HostTimer()
        self._is_prompt = is_prompt
        self.log = log or BatchLog(ValueLog())
        self._global_batch = global_batch
        self._sum_scale = sum_scale
        self._parts = {part.name: part for part in whole.parts}
        self.part_names = tuple(self._parts)
        self._built_numbers = own_numbers(whole.optimizer)
        self._frozen: set[int] = set()  # parameters of parts that the user has frozen, by id
        self._mask: GradientMask | None = None
        self._weights_on_device = False
        self._has_stepped = False
        self._is_open = False
        self.num_begun = 0

    def compare_shared(self, shared: SharedObjects | None) -> None:
        """Set the objects whose changes explain gradients that ``train_fn`` seems to change."""
        for part in self._whole.parts or (self._whole,):
            part.checks.shared = shared

    def window(
        self,
        num_samples: int,
        num_batches: int = 1,
        *,
        values: StepValues | None = None,
        part: str | None = None,
        run_ahead: bool = False,
    ) -> AccumulationWindow:
        """Open the window of one optimizer step. Collective if passes exchange global batches.

        Args:
            num_samples: Samples of the step; 0: this rank only receives gradients.
            values: Receive its losses; ``None``: new ones.
            part: The optimizer, if there are several; within :meth:`alternate`.
            run_ahead: The step may be made before the result of the reduction is known to the
                host, which then has to wait for :attr:`StepEnd.pending`.

        Raises:
            RuntimeError: A window is open.
            CollectiveAborted, CollectiveTimeout: See :meth:`GlobalBatchComm.begin`.
        """
        if self._is_open:
            raise RuntimeError("a window is open: finish its step before the next one")
        chosen = self._whole if part is None else self._choose(part)
        values = values or self.log.new_values()
        window = AccumulationWindow(self, chosen, values, num_samples, num_batches, run_ahead)
        if self._global_batch is not None:
            try:
                self._global_batch.begin(num_batches)
            except BaseException:
                self.clear_gradients()
                raise
        if chosen.finite_check is not None:
            chosen.finite_check.begin(values)
        return window

    def open_window(
        self, values: StepValues, part: str | None = None, *, run_ahead: bool = False
    ) -> AccumulationWindow:
        """Open the window of a step whose forward passes the caller runs; see :meth:`window`.

        The window grows with :meth:`AccumulationWindow.add_loss`, and keeps gradients that
        parameters have already. Windows of several optimizers may be open at the same time.

        Args:
            values: Receive its losses.
            part: The optimizer, if there are several.
            run_ahead: As in :meth:`window`.
        """
        chosen = self._whole if part is None else self._parts[part]
        if chosen.finite_check is not None:
            chosen.finite_check.begin(values)
        window = AccumulationWindow(self, chosen, values, 0, 0, run_ahead)
        window.keep_gradients()
        return window

    def check_rows(self, part: str, batch: Any, num_samples: int) -> None:
        if self._sum_scale is None:
            (self._parts[part] if part else self._whole).checks.check_rows(batch, num_samples)

    def params_of(self, part: str) -> Sequence[nn.Parameter]:
        """The parameters of an optimizer; ``""``: of the only one."""
        return (self._parts[part] if part else self._whole).params.params

    def inputs_of(self, part: str) -> list[nn.Parameter]:
        """The parameters of an optimizer that are not frozen."""
        return [p for p in self.params_of(part) if p.requires_grad]

    def _choose(self, name: str) -> OptimizerPart:
        """One of several optimizers: parameters of the others get no gradients."""
        for each in self._parts.values():
            for p in each.params.params:
                p.requires_grad_(each.name == name and id(p) not in self._frozen)
        return self._parts[name]

    @contextmanager
    def alternate(self, *, undo: bool) -> Iterator[None]:
        """Context of one step of each of several optimizers.

        Args:
            undo: Undo the steps that were made if the reduction of a later one is aborted.
        """
        kept = self._copy_parts() if undo else None
        every = [p for each in self._parts.values() for p in each.params.params]
        self._frozen = {id(p) for p in every if not p.requires_grad}
        try:
            yield
        except (CollectiveAborted, CollectiveTimeout):
            if kept is not None:
                self._restore_parts(*kept)
            raise
        finally:
            for p in every:
                p.requires_grad_(id(p) not in self._frozen)

    def _copy_parts(self) -> tuple[list[tuple[list[Tensor], dict[str, Any]]], Any, Any]:
        """Parameters and optimizer states of all parts but the last, the scaler's state and the
        moving average.
        """
        states = [
            (
                [p.detach().clone() for p in part.params.params],
                copy.deepcopy(part.optimizer.state_dict()),
            )
            for part in list(self._parts.values())[:-1]
        ]
        ema = self._update.ema
        return states, self._precision.state_dict(), None if ema is None else ema.copy()

    def _restore_parts(
        self,
        states: list[tuple[list[Tensor], dict[str, Any]]],
        scale: Any,
        ema: list[Tensor] | None,
    ) -> None:
        with torch.no_grad():
            parts = list(self._parts.values())[:-1]
            for part, (values, state) in zip(parts, states, strict=True):
                for p, value in zip(part.params.params, values, strict=True):
                    p.copy_(value)
                load_optimizer_state(part.optimizer, state)
        self._precision.load_state_dict(scale)
        if self._update.ema is not None and ema is not None:
            self._update.ema.load(ema)

    def clear_gradients(self) -> None:
        """Drop the gradients of the last step."""
        for part in self._parts.values() or (self._whole,):
            part.clear_gradients()

    def copy_from(
        self, other: Stepper, theirs: Sequence[Sequence[str]], own: Sequence[Sequence[str]]
    ) -> None:
        """Copy the state of the optimizer and the scaler of another rank's replica.

        Args:
            other: The other rank's.
            theirs: The names of the parameters in each group of its optimizer.
        """
        self._has_stepped = False
        # load_state_dict keeps tensors of the right dtype and device, which are the other's.
        state = state_in_order(other._whole.optimizer.state_dict(), theirs, own)
        state = copy.deepcopy(state)
        load_optimizer_state(self._whole.optimizer, state)
        self._load_numbers(other._changed_numbers())
        self._precision.load_state_dict(other._precision.state_dict())

    def saved(self) -> SavedStepper:
        """State of the optimizer and, if there is one, of the scaler; not copied."""
        optimizer = self._whole.optimizer
        return SavedStepper(
            kind=optimizer_kind(optimizer),
            optimizer=state_of(optimizer),
            numbers=tuple(self._changed_numbers()),
            scaler=self._precision.state_dict(),
        )

    def check_saved(self, saved: SavedStepper) -> None:
        """Load a state of :meth:`saved`, as a checkpoint has it, into a copy of the optimizer.

        Raises:
            Exception: The optimizer cannot load it.
        """
        state = restore_subclasses(saved.optimizer, copy=False)
        load_optimizer_state(shallow_copy(self._whole.optimizer), state)

    def _changed_numbers(self) -> list[dict[str, float]]:
        """Numbers of the optimizers' own that steps have changed; others are settings."""
        now = own_numbers(self._whole.optimizer)
        return [
            {name: value for name, value in values.items() if built.get(name) != value}
            for built, values in zip(self._built_numbers, now, strict=True)
        ]

    def _load_numbers(self, changed: Sequence[Mapping[str, float]]) -> None:
        for each, values in zip(members_of(self._whole.optimizer), changed, strict=False):
            vars(each).update(values)

    def restore(self, saved: SavedStepper) -> None:
        """Restore a state of :meth:`saved`.

        Settings of the implementation (``foreach``, ``fused``, ``capturable``) stay as built.

        Raises:
            ValueError: It is the state of another optimizer, or has tensors of a class that is
                not imported or that the optimizer does not keep.
        """
        optimizer = self._whole.optimizer
        kind = optimizer_kind(optimizer)
        if saved.kind != kind:  # torch would load it, and fail in the first step
            raise ValueError(f"it holds the state of {saved.kind}, not of {kind}")
        self._has_stepped = False
        # A copy: ranks may share it, and torch keeps its containers.
        load_optimizer_state(optimizer, restore_subclasses(saved.optimizer))
        self._load_numbers(saved.numbers)
        self._precision.load_state_dict(saved.scaler)


class _Stage(Enum):
    """Stages of a window, in order."""

    NEW = auto()
    ACCUMULATING = auto()
    PACKED = auto()
    APPLIED = auto()
    CLOSED = auto()


_OPEN = (_Stage.NEW, _Stage.ACCUMULATING, _Stage.PACKED, _Stage.APPLIED)


class AccumulationWindow:
    """One optimizer step: :meth:`add` each micro-batch, then :meth:`finish`. See :class:`Stepper`.

    A window that is left without :meth:`finish`, or by an exception, makes no step and drops its
    gradients. Calls in another order raise ``RuntimeError``. :meth:`restart`, :meth:`pack`,
    :meth:`apply`, :meth:`captured` and :meth:`load` serve the capture of steps as graphs.

    Attributes:
        values: Receive the losses.
        num_samples: Samples of the step.
    """

    def __init__(
        self,
        stepper: Stepper,
        part: OptimizerPart,
        values: StepValues,
        num_samples: int,
        num_batches: int,
        run_ahead: bool,
    ) -> None:
        self.values = values
        self.num_samples = num_samples
        self._stepper = stepper
        self._part = part
        # Counted only for buckets, which the backward pass of the last micro-batch sends.
        has_buckets = part.reducer is not None and part.reducer.has_buckets
        self._num_batches = self._num_left = num_batches if has_buckets else 0
        self._run_ahead = run_ahead
        self._stage = _Stage.NEW
        self._losses: list[Tensor] = []
        self._plain_units = 0.0  # sum over micro-batches before the first weight
        self._weights: WeightAccumulator | None = None
        self._pending: CollectiveWork | None = None
        # Of the backward pass; without inputs, all leaves receive gradients.
        self._inputs: Sequence[Tensor] | None = None
        self._retain_graph = False

    def __enter__(self) -> AccumulationWindow:
        self._stepper._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stepper._is_open = False
        if self._stage is not _Stage.CLOSED:
            self._stage = _Stage.CLOSED
            self._part.clear_gradients()

    def restart(self) -> None:
        """Drop all micro-batches that were added."""
        self._require(*_OPEN)
        self._stage = _Stage.ACCUMULATING
        self._losses.clear()
        self._plain_units, self._weights = 0.0, None
        self._num_left = self._num_batches
        self._part.clear_gradients()

    def add(self, train_fn: TrainFn, batch: Any, num_samples: int) -> tuple[Tensor, Weight | None]:
        """Run forward and backward of a micro-batch, and log its loss.

        Args:
            train_fn: Returns the micro-batch's mean loss, and its weight.
            num_samples: Its samples: its weight, if ``train_fn`` returns none.

        Returns:
            The loss, detached, on the device, 0 if its weight is 0; and the weight, ``None`` if
            ``train_fn`` returned none.
        """
        try:
            return self._add(train_fn, batch, num_samples)
        except (RuntimeError, ValueError) as error:
            model = self._stepper._model
            owns_backward = not self._part.checks.shares_changes()
            explain_error(error, "train_fn", model, batch, owns_backward=owns_backward)
            raise

    def _add(self, train_fn: TrainFn, batch: Any, num_samples: int) -> tuple[Tensor, Weight | None]:
        if self._stage is not _Stage.ACCUMULATING:
            self._require(_Stage.NEW)
            self.restart()
        stepper = self._stepper
        global_batch, values = stepper._global_batch, self.values
        stepper.log.num_samples = num_samples
        values.begin_batch()
        if global_batch is not None:
            global_batch.next_batch()
        part, precision = self._part, stepper._precision
        checks = part.checks
        scaled = num_samples != self.num_samples or precision.scales
        scaled = scaled or not (stepper._sum_scale is None or part.reducer is None)
        probes = checks.probe() if scaled or checks.is_first else ()
        if precision.dtype is None:
            result = train_fn(stepper._model, batch)
        else:
            with precision.autocast():
                result = train_fn(stepper._model, batch)
        if probes:
            if scaled:
                reason = "accumulate(n) and fp16 scale the loss that it returns"
                checks.check_untouched(probes, reason)
            else:
                checks.note_own_backward(probes)
        weight: Weight | None = None
        if not isinstance(result, Tensor):
            result, weight = split_loss(result, stepper._model, batch)
        params, ran = stepper._model.parameters(), checks.has_run_backward
        loss = checked_loss(result, "train_fn", weight, params, has_run_backward=ran)
        checks.check_graph(loss)
        if weight is None and stepper._sum_scale is None:
            checks.check_rows(batch, num_samples)
        fraction = 1.0 if num_samples == self.num_samples else num_samples / self.num_samples
        loss, weight = self._run_backward(loss, weight, num_samples, fraction)
        if weight is not None:
            values.weigh_scalars(weight)
        return loss, weight

    def keep_gradients(self) -> None:
        """Begin to accumulate, on top of the parameters' present gradients."""
        self._require(_Stage.NEW)
        self._stage = _Stage.ACCUMULATING

    def add_loss(
        self,
        loss: Tensor,
        num_samples: int,
        weight: Weight | None = None,
        *,
        fraction: float = 1.0,
        inputs: Sequence[Tensor] | None = None,
        retain_graph: bool = False,
    ) -> Tensor:
        """Run the backward pass of a loss that the caller has computed, and log the loss.

        Args:
            loss: A scalar with a graph.
            num_samples: Samples of its batch: its weight, if ``weight`` is ``None``.
            weight: The number of units of which it is the mean.
            fraction: The factor of its gradients in the step's, without weights.
            inputs: The tensors that receive gradients; ``None``: all leaves.

        Returns:
            The loss, detached, on the device.
        """
        self._require(_Stage.ACCUMULATING)
        self._stepper.log.num_samples = num_samples
        self._inputs, self._retain_graph = inputs, retain_graph
        self._part.checks.check_graph(loss)
        return self._run_backward(loss, weight, num_samples, fraction)[0]

    def _run_backward(
        self,
        loss: Tensor,
        weight: Weight | None,
        num_samples: int,
        fraction: float,
    ) -> tuple[Tensor, Weight | None]:
        """Scale a loss, run its backward pass and log it; see :meth:`add` for the result."""
        stepper, part = self._stepper, self._part
        global_batch = stepper._global_batch
        checks = part.checks
        live: Tensor | bool = True
        if stepper._sum_scale is not None:
            self._plain_units += fraction
            target = self._scale_sum(loss, weight, stepper._sum_scale)
            loss = loss.detach() / num_samples
        elif weight is None and self._weights is None:
            self._plain_units += fraction
            target = loss if fraction == 1.0 else loss * fraction
        else:
            weights = self._weights
            if weights is None:
                weights = WeightAccumulator(self._plain_units, is_prompt=stepper._is_prompt)
                self._weights = weights
            is_first = weights.total is None and not self._plain_units
            live, scale = weights.add(loss, weight, fraction, num_samples)
            weight = weights.last
            stepper._weights_on_device |= isinstance(weight, Tensor)
            target = loss if fraction == 1.0 and is_first else loss * scale
        if stepper._precision.scales:
            target = stepper._precision.scale(target)
        counts = live
        if global_batch is not None:
            unit = num_samples / fraction if self.weight is None else self.weight.unit
            global_batch.weight, global_batch.live = unit, live
            target, counts = global_batch.connect(target, live)
        if self._num_left:
            self._num_left -= 1
            is_last = self._num_left == 0
        else:
            is_last = False
        versions = checks.versions()
        if is_last:
            self._reducing_backward(target, counts)
        elif counts is True and self._inputs is None and not self._retain_graph:
            target.backward()  # type: ignore[no-untyped-call]
        else:
            self._backward(target, counts)
        if global_batch is not None:
            global_batch.end_batch()
        if versions is not None:
            checks.check_first_backward(versions)
        # Unlike detach(), .data does not release the GIL: with 1 ms steps each hand-over to
        # another worker counts.
        loss = loss.data
        if live is not True:
            loss = (
                torch.where(live, loss, 0) if isinstance(live, Tensor) else torch.zeros_like(loss)
            )
        if part.reducer is not None:
            self._losses.append(loss)
        self.values.push_loss(loss, num_samples if weight is None else weight)
        return loss, weight

    def _scale_sum(self, loss: Tensor, weight: Weight | None, scale: float) -> Tensor:
        """Scale the sum of a micro-batch, which the reducer expects as a part of the rank's mean.

        Raises:
            ValueError: It has a weight.
        """
        if weight is not None:
            raise ValueError(
                'loss_reduction("sum"): train_fn returned a loss with a weight, which are for '
                "means: return the sum alone"
            )
        if self._part.reducer is not None:
            return loss / self.num_samples
        return loss if scale == 1.0 else loss * scale

    def _require(self, *stages: _Stage) -> None:
        if self._stage not in stages:
            raise RuntimeError(
                f"the window is {self._stage.name}, not {' or '.join(s.name for s in stages)}: a "
                "step is add() for each micro-batch, then finish(); then open another window"
            )

    def _backward(self, target: Tensor, live: Tensor | bool) -> None:
        """Backward pass of a micro-batch whose gradients are zeroed unless ``live``."""
        if live is True:
            torch.autograd.backward(target, retain_graph=self._retain_graph, inputs=self._inputs)
            return
        stepper = self._stepper
        if stepper._mask is None:
            stepper._mask = GradientMask(self._part.params.params)
        stepper._mask.live = live
        try:
            torch.autograd.backward(target, retain_graph=self._retain_graph, inputs=self._inputs)
        finally:
            stepper._mask.live = None

    def _reducing_backward(self, target: Tensor, live: Tensor | bool) -> None:
        """The last backward pass of a step, which sends buckets of gradients."""
        reducer = self._part.reducer
        assert reducer is not None, "only a reducer has buckets"
        reducer.arm(self.num_samples, self.weight)
        try:
            self._backward(target, live)
        except BaseException:
            reducer.abort_backward()
            raise
        reducer.disarm()

    @property
    def weight(self) -> WindowWeight | None:
        """The weight of the step's losses; ``None``: its samples."""
        return None if self._weights is None else self._weights.total

    @property
    def is_split(self) -> bool:
        """True if the host acts between the gradients and the optimizer's step."""
        part = self._part
        if part.reducer is not None or (part.finite_check is not None and part.finite_check.skips):
            return True
        return self._stepper._weights_on_device and not self._can_skip

    def finish(
        self,
        apply: Callable[[], None] | None = None,
        agreed: Callable[[], bool] | None = None,
    ) -> StepEnd:
        """Reduce, check, clip and step.

        Args:
            apply: A captured graph of :meth:`apply`, to replay instead.
            agreed: Called after the reduction; False drops the step, on every rank alike.

        Raises:
            NonFiniteError, CollectiveAborted, CollectiveTimeout: See :class:`GradientReducer`.
        """
        part = self._part
        if self._stage is _Stage.NEW:
            self.restart()
        if self._stage is _Stage.ACCUMULATING:
            if part.reducer is None and self._weights is None:
                end = MADE
                if part.finite_check is not None and not part.finite_check.accept():
                    end = DROPPED
                elif self._stepper._update.is_bare:
                    self._stepper.num_begun += 1
                    part.optimizer.step()
                else:
                    self._step()
                self._stage = _Stage.CLOSED
                return end
            self.pack()
        self._require(*_OPEN)
        if self._stage is _Stage.PACKED:
            ended = self._reduce()
            if agreed is not None and not agreed():
                ended = DROPPED
            if ended is not None:
                self._stage = _Stage.CLOSED
                return ended
            self._stepper.num_begun += apply is not None  # else counted by the step
            (apply or self.apply)()
        self._stage = _Stage.CLOSED
        return self._end()

    def _end(self) -> StepEnd:
        weight = self.weight
        if weight is None and self._pending is None:
            return MADE
        return StepEnd(False, weight, self._pending)

    def pack(self) -> None:
        """Prepare this rank's part of the reduction; without one, divide by the weights."""
        self._require(_Stage.ACCUMULATING)
        reducer = self._part.reducer
        if reducer is not None:
            reducer.pack(self.num_samples, self._losses, self.weight)
        elif self._weights is not None:
            self._weights.divide(self._part.params.params)
        self._stage = _Stage.PACKED

    def _reduce(self) -> StepEnd | None:
        """Reduce the packed gradients and check the step; ``None`` if it may be made."""
        stepper, part = self._stepper, self._part
        if part.reducer is not None:
            # The first step creates the optimizer's state, so it must not be skipped.
            async_op = self._run_ahead and stepper._has_stepped and self._is_gated
            async_op = async_op and part.reducer.can_end_async()
            stepper._timer.pause()
            accepted = part.reducer.exchange(self.num_samples, async_op=async_op)
            stepper._timer.resume()
            if async_op:
                self._pending = part.reducer.take_pending_work()
            if not accepted:
                return DROPPED
            return self._end() if part.reducer.is_empty else None
        if part.finite_check is not None and not part.finite_check.accept():
            return DROPPED
        if self.weight is None:
            return None
        units = self.weight.units
        if isinstance(units, Tensor) and self._can_skip:
            return None
        # On a device, this reads one number in each step.
        return None if units > 0 else self._end()

    def apply(self) -> None:
        """Take the reduced gradients, clip and step."""
        self._require(_Stage.PACKED)
        if self._part.reducer is not None:
            self._part.reducer.unpack()
        self._step()
        self._stage = _Stage.APPLIED

    def _step(self) -> None:
        # Dropped steps do not get here: the scaler neither unscales nor counts them.
        stepper, skip_flag = self._stepper, self._units_flag()
        if self._is_gated and self._part.reducer is not None:
            skip_flag = self._part.reducer.skip_flag
        stepper.num_begun += 1
        stepper._update.apply(self._part, skip_flag)
        stepper._has_stepped = True

    @property
    def _can_skip(self) -> bool:
        """True if the optimizer's kernels can skip a step by a flag on the device."""
        supports = getattr(self._part.optimizer, "_step_supports_amp_scaling", False)
        return bool(supports) and not self._stepper._precision.scales

    @property
    def _is_gated(self) -> bool:
        """True if a flag on the device decides if the reduced gradients are used."""
        reducer = self._part.reducer
        return reducer is not None and reducer.collective.host_runs_ahead and self._can_skip

    def _units_flag(self) -> Tensor | None:
        """1 on the device if the units of the weights are 0; ``None``: the host has decided."""
        if self._part.reducer is not None or self.weight is None or not self._can_skip:
            return None
        units = self.weight.units
        return 1.0 - (units > 0).float() if isinstance(units, Tensor) else None

    def close(self) -> None:
        """Drop the gradients, of a step that was made or not; the window is over."""
        self._stage = _Stage.CLOSED
        self._part.clear_gradients()

    def captured(self) -> CapturedWindow:
        """The window's present result, for :meth:`load` after a replay of the captured work."""
        reducer, is_packed = self._part.reducer, self._stage is _Stage.PACKED
        grads = [p.grad for p in self._part.params.params]
        return CapturedWindow(
            self._stage,
            () if self._stage is _Stage.APPLIED else grads,
            reducer.packed if reducer is not None and is_packed else None,
            self._weights,
        )

    def load(self, captured: CapturedWindow) -> None:
        """Set the result of captured work that was replayed; :meth:`finish` continues from it."""
        self._require(*_OPEN)
        self._stage, self._weights = captured.stage, captured.weights
        if captured.packed is not None and self._part.reducer is not None:
            self._part.reducer.packed = captured.packed
        elif captured.grads:
            for p, grad in zip(self._part.params.params, captured.grads, strict=True):
                p.grad = grad

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Exclude the time in this context from the step."""
        self._stepper._timer.pause()
        try:
            yield
        finally:
            self._stepper._timer.resume()


class StepEnd(NamedTuple):
    """The result of a step.

    Attributes:
        dropped: True if it was dropped because of a value that is not finite.
        weight: The weight of its losses; ``None``: its samples.
        pending: The result of its reduction, which may still fail; ``None``: it has succeeded.
    """

    dropped: bool
    weight: WindowWeight | None = None
    pending: CollectiveWork | None = None


MADE, DROPPED = StepEnd(False), StepEnd(True)


class CapturedWindow(NamedTuple):
    """The result of a captured window, on the device.

    Attributes:
        grads: Its gradients, one for each parameter; empty after the optimizer's step.
        packed: The gradients as packed for the reduction; ``None``: not packed.
        weights: The weights of its losses; ``None``: its samples.
    """

    stage: _Stage
    grads: Sequence[Tensor | None]
    packed: PackedGradients | None
    weights: WeightAccumulator | None
