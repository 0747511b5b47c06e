"""One optimizer step: forward, backward, reduction under lockstep, clip, step.

Nothing here waits for the device: losses stay tensors, and the only host reads are those
of fp16's gradient scaler, of :mod:`runtime.replica.non_finite` and of
:mod:`runtime.replica.reducer`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runtime.collective.base import LateResult
from runtime.core.loss_weights import (
    GradientMask,
    Weight,
    WindowWeight,
    check_read_weight,
    checked_loss,
    split_loss,
)
from runtime.device.timing import HostTimer, StepTimer
from runtime.replica.flat import NamedParams
from runtime.replica.global_batch import GlobalBatch
from runtime.replica.gradients import check_gradients
from runtime.replica.non_finite import StepFiniteCheck
from runtime.replica.optimizers import load_optimizer_state, optimizer_kind
from runtime.replica.reducer import GradientReducer, PackedGradients

TrainFn = Callable[[nn.Module, Any], Any]
"""Gives a batch's mean loss over its samples, or ``(loss, weight)``: its mean over ``weight``
units, such as the tokens that are not ignored, or the sum of the samples' class weights; or what
a model returns, with a field ``loss``."""
TrainFns = TrainFn | Mapping[str, TrainFn]
"""One, or one for each of several optimizers, by their names, in the order of their steps."""
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Stepper:
    """Makes steps of a replica.

    Args:
        model: The replica.
        params: Its flat parameters.
        optimizer: Its optimizer.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        max_grad_norm: Clip the gradients' norm to this, after the reduction.
        reducer: Averages gradients over the ranks; ``None``: each rank keeps its own.
        judge: Judges each step before it is made; ``None``: nothing is judged.
        timer: Times the steps; what the reduction takes is left out.
        rates: Context around the optimizer's step, which puts its learning rates in place.
        is_prompt: Whether values of the device can be read at no cost.
        parts: The optimizers, if there are several: :meth:`enter` says whose step is next.

    Attributes:
        parts: See above.
        weight: Of the last micro-batch, as it is logged; ``None``: its samples.
        window: Weight of the step in progress; ``None``: its samples.
        trails: Whether steps may be made before the host knows that their gradients can be used;
            whoever makes them looks at :meth:`take_late_result`.
        global_batch: Where forward and backward passes meet those of the other ranks; ``None``:
            they do not.
    """

    def __init__(
        self,
        model: nn.Module,
        params: NamedParams,
        optimizer: torch.optim.Optimizer,
        *,
        device: torch.device,
        precision: str = "fp32",
        max_grad_norm: float | None = None,
        reducer: GradientReducer | None = None,
        finite_check: StepFiniteCheck | None = None,
        timer: StepTimer | None = None,
        rates: Callable[[], AbstractContextManager[None]] | None = None,
        is_prompt: bool = True,
        parts: Sequence[OptimizerPart] = (),
    ) -> None:
        self.weight: Weight | None = None
        self.window: WindowWeight | None = None
        self.host_runs_ahead = False
        self.global_batch: GlobalBatch | None = None
        self._last_of = 0
        self._units = 0.0  # of the step's micro-batches before the first that has a weight
        self._is_prompt = is_prompt
        self._weighs_late = False
        self._is_scaled = False  # whether the step's losses were scaled for their weights
        self._mask: GradientMask | None = None
        self._model = model
        self._params = params.params
        self._names = params.names
        self._whole = self._optimizer = optimizer
        self.parts = parts
        self._known_parts: set[str] = set()  # whose gradients have been looked at
        self._kept: list[tuple[list[Tensor], dict[str, Any]]] = []
        self._kept_scale: dict[str, Any] | None = None
        self._device_type = device.type
        self._dtype = _AUTOCAST.get(precision)
        self._max_grad_norm = max_grad_norm
        self._reducer = reducer
        self._finite_check = finite_check
        self._timer = timer or HostTimer()
        self._rates = rates or nullcontext
        # Nothing comes with the optimizer's step: with steps of 1 ms each call counts.
        self._is_bare = rates is None and max_grad_norm is None and precision != "fp16"
        self._losses: list[Tensor] = []
        self._checked = False
        self._has_stepped = False
        self._scaler: torch.amp.GradScaler | None = None
        if precision == "fp16":
            self._scaler = torch.amp.GradScaler(device.type)
            # Creates the scale now: a rank without a batch unscales before it ever scales.
            self._scaler.scale(torch.zeros((), device=device))

    def copy_from(self, other: Stepper) -> None:
        """Take over the optimizer's state and the scaler of another rank's replica."""
        self._has_stepped = False
        # load_state_dict keeps tensors of the right dtype and device, which are the other's.
        load_optimizer_state(self._whole, copy.deepcopy(other._whole.state_dict()))
        if self._scaler is not None and other._scaler is not None:
            self._scaler.load_state_dict(other._scaler.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer and, if there is one, of the scaler; no copies."""
        scaler = None if self._scaler is None else self._scaler.state_dict()
        kind = optimizer_kind(self._whole)
        return {"optimizer": self._whole.state_dict(), "kind": kind, "scaler": scaler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        How the optimizer computes (``foreach``, ``fused``, ``capturable``) stays as built.

        Raises:
            ValueError: It is of another optimizer.
        """
        kind = optimizer_kind(self._whole)
        if state["kind"] != kind:  # torch would load it, and fail in the first step
            raise ValueError(f"it holds the state of {state['kind']}, not of {kind}")
        self._has_stepped = False
        # A copy: ranks may share it, and torch keeps its containers.
        load_optimizer_state(self._whole, copy.deepcopy(state["optimizer"]))
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])

    def enter(self, part: OptimizerPart) -> None:
        """The step that follows is that of one of several optimizers: no other parameter gets a
        gradient."""
        self._params, self._names = part.params.params, part.params.names
        self._optimizer, self._reducer, self._finite_check = (
            part.optimizer,
            part.reducer,
            part.finite_check,
        )
        for each in self.parts:
            for p in each.params.params:
                p.requires_grad_(each is part)
        self._checked = part.name in self._known_parts
        self._known_parts.add(part.name)

    def leave(self) -> None:
        """The steps of all optimizers are over, made or not."""
        for each in self.parts:
            for p in each.params.params:
                p.requires_grad_(True)

    def keep(self) -> None:
        """Remember what all optimizers but the last are about to change."""
        self._kept = [
            (
                [p.detach().clone() for p in part.params.params],
                copy.deepcopy(part.optimizer.state_dict()),
            )
            for part in self.parts[:-1]
        ]
        if self._scaler is not None:
            self._kept_scale = self._scaler.state_dict()

    def take_back(self) -> None:
        """Undo the steps made since :meth:`keep`: a later optimizer's was broken off."""
        kept, self._kept = self._kept, []
        with torch.no_grad():
            for part, (values, state) in zip(self.parts[:-1], kept, strict=True):
                for p, value in zip(part.params.params, values, strict=True):
                    p.copy_(value)
                load_optimizer_state(part.optimizer, state)
        if self._scaler is not None and self._kept_scale:
            self._scaler.load_state_dict(self._kept_scale)

    def begin(self) -> None:
        """A step begins: what follows can be taken back, and has no gradients yet."""
        self.open()
        self.clear_gradients()

    def open(self) -> None:
        """A step begins: what follows can be taken back."""
        if self._finite_check is not None:
            self._finite_check.begin()

    def clear_gradients(self) -> None:
        """Forget the gradients, losses and weights of the last step."""
        self._losses.clear()
        self.window, self._units = None, 0.0
        self._last_of = 0
        if self._reducer is not None:
            self._reducer.reset()
        for p in self._params:
            p.grad = None

    def expect_last(self, num_samples: int) -> None:
        """The micro-batch that follows is the step's last one: gradients may travel as they come.

        Args:
            num_samples: Samples of the step.
        """
        self._last_of = num_samples

    def pause(self) -> None:
        """What follows is no work of the step: its time is not counted."""
        self._timer.pause()

    def resume(self) -> None:
        """The step goes on."""
        self._timer.resume()

    def gradients(self) -> list[Tensor | None]:
        """The gradients as they are now, in the order of the parameters."""
        return [p.grad for p in self._params]

    def packed(self) -> PackedGradients | None:
        """What was packed for the reduction; ``None`` where there is none."""
        return None if self._reducer is None else self._reducer.packed

    def give_gradients(
        self, grads: Sequence[Tensor | None], packed: PackedGradients | None
    ) -> None:
        """Put gradients in place that were computed elsewhere.

        Args:
            grads: One for each parameter.
            packed: What was packed of them already; ``None``: nothing.
        """
        if packed is not None and self._reducer is not None:
            self._reducer.packed = packed
            return
        for p, grad in zip(self._params, grads, strict=True):
            p.grad = grad

    @property
    def is_split(self) -> bool:
        """Whether something comes between the gradients and the optimizer's step."""
        if self._reducer is not None or (
            self._finite_check is not None and self._finite_check.skips
        ):
            return True
        return self._weighs_late and not self._skips_by_itself

    @property
    def _skips_by_itself(self) -> bool:
        """Whether the optimizer's kernels leave a step out that the device calls off."""
        supports = getattr(self._optimizer, "_step_supports_amp_scaling", False)
        return bool(supports) and self._scaler is None

    @property
    def _is_gated(self) -> bool:
        """Whether the device tells the optimizer whether the reduced gradients can be used."""
        reducer = self._reducer
        return reducer is not None and reducer.collective.host_runs_ahead and self._skips_by_itself

    def take_late_result(self) -> LateResult | None:
        """How the reduction of the step that was made ends; ``None``: it has ended well."""
        return None if self._reducer is None else self._reducer.take_late_result()

    def _autocast(self) -> AbstractContextManager[object]:
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._dtype)

    def micro_step(
        self, train_fn: TrainFn, batch: Any, fraction: float = 1.0, num_samples: int = 1
    ) -> Tensor:
        """Forward and backward of one micro-batch.

        Args:
            train_fn: Gives the batch's mean loss, and its weight.
            batch: What the data set gave, on the device.
            fraction: The micro-batch's part of the samples of the step.
            num_samples: Its samples: its weight, where it gives none.

        Returns:
            The loss, detached, still on the device; 0 where its weight is.
        """
        global_batch = self.global_batch
        if global_batch is not None:
            global_batch.next_batch()
        if self._dtype is None:
            result = train_fn(self._model, batch)
        else:
            with self._autocast():
                result = train_fn(self._model, batch)
        weight: Weight | None = None
        if not isinstance(result, Tensor):
            result, weight = split_loss(result, self._model, batch)
        loss = checked_loss(result, "train_fn")
        live: Tensor | bool = True
        if weight is None and self.window is None:
            self.weight = None
            self._units += fraction
            target = loss if fraction == 1.0 else loss * fraction
        else:
            live, scale = self._weigh(loss, weight, fraction, num_samples)
            target = loss if fraction == 1.0 else loss * scale
        if self._scaler is not None:
            target = self._scaler.scale(target)
        if global_batch is not None:
            window = self.window
            global_batch.weight = num_samples / fraction if window is None else window.unit
            global_batch.live = live
            target, tied = global_batch.connect(target, live)
        else:
            tied = live
        if self._last_of:
            self._reducing_backward(target, tied)
        elif tied is True:
            target.backward()  # type: ignore[no-untyped-call]
        else:
            self._backward(target, tied)
        if global_batch is not None:
            global_batch.end_batch()
        if not self._checked:
            self._checked = True
            check_gradients(self._names, self._params, "train_fn")
        # Unlike detach(), .data does not give up the interpreter: with 1 ms steps each
        # hand-over to another worker counts.
        loss = loss.data
        if live is not True:
            loss = (
                torch.where(live, loss, 0) if isinstance(live, Tensor) else torch.zeros_like(loss)
            )
        if self._reducer is not None:
            self._losses.append(loss)
        return loss

    def _weigh(
        self, loss: Tensor, weight: Weight | None, fraction: float, num_samples: int
    ) -> tuple[Tensor | bool, Weight]:
        """Take a micro-batch's weight into that of the step.

        Returns:
            Whether it is above 0, and what the loss is scaled by.
        """
        plain = num_samples / fraction  # the unit of micro-batches without a weight
        live: Tensor | bool
        first: Weight
        if isinstance(weight, Tensor):
            if self._is_prompt or weight.device.type != loss.device.type:
                weight = weight.item()  # it lies on the CPU
            elif weight.device != loss.device:
                raise ValueError(
                    f"train_fn returned a loss on {loss.device} with a weight on {weight.device}: "
                    "return the weight on the loss's device, or as a number"
                )
        if isinstance(weight, Tensor):
            # Judged when it is read; until then what is no weight counts as 0.
            told = weight.detach().to(torch.float64, copy=True).reshape(())
            self.weight = told
            self._weighs_late = True
            live = told > 0
            weight = torch.where(live, told, 0)
            first = torch.where(live, weight / fraction, plain)
        else:
            self.weight = None if weight is None else check_read_weight(weight)
            weight = num_samples if weight is None else float(weight)
            live = weight > 0
            first = weight / fraction if live else plain
        if self.window is not None:
            unit, units = self.window
        elif self._units:
            unit, units = plain, self._units
        else:
            unit, units = first, 0.0
        self._is_scaled = fraction != 1.0
        scale = weight / unit
        self.window = WindowWeight(unit, units + scale)
        return live, scale.to(loss.dtype) if isinstance(scale, Tensor) else scale

    def _backward(self, target: Tensor, live: Tensor | bool) -> None:
        """Backward of a micro-batch whose gradients count only if it is live."""
        if live is True:
            target.backward()  # type: ignore[no-untyped-call]
            return
        if self._mask is None:
            self._mask = GradientMask(self._params)
        self._mask.live = live
        try:
            target.backward()  # type: ignore[no-untyped-call]
        finally:
            self._mask.live = None

    def _reducing_backward(self, target: Tensor, live: Tensor | bool) -> None:
        """The last backward of a step: gradients travel while others are computed."""
        num_samples, self._last_of = self._last_of, 0
        reducer = self._reducer
        if reducer is None:
            self._backward(target, live)
            return
        reducer.arm(num_samples, self.window)
        try:
            self._backward(target, live)
        except BaseException:
            reducer.abort_backward()
            raise
        reducer.disarm()

    def finish(self, num_samples: int) -> StepEnd:
        """Reduce, judge, clip and step.

        Args:
            num_samples: Samples behind this rank's gradients; 0 only under lockstep.
        """
        if self._reducer is None and self.window is None:
            if self._finite_check is not None and not self._finite_check.accept():
                return DROPPED
            if self._is_bare:
                self._optimizer.step()
            else:
                self.apply()
            return MADE
        self.pack(num_samples)
        end = self.settle(num_samples)
        if end is not None:
            return end
        self.unpack()
        self.apply()
        return MADE

    def pack(self, num_samples: int) -> None:
        """Make this rank's part of the reduction ready; without one, divide by the weights."""
        if self._reducer is not None:
            self._reducer.pack(num_samples, self._losses, self.window)
        elif self.window is not None and self._is_scaled:
            self._divide(self.window.units)

    def _divide(self, units: Weight) -> None:
        """Turn the sum of weighted gradients into their mean."""
        grads = [p.grad for p in self._params if p.grad is not None]
        if isinstance(units, Tensor):
            factor = torch.where(units > 0, 1 / units, 0)
            if not any(g.dtype is torch.float64 for g in grads):
                factor = factor.float()
            torch._foreach_mul_(grads, factor)
        elif units > 0 and units != 1.0:
            torch._foreach_div_(grads, units)

    def settle(self, num_samples: int) -> StepEnd | None:
        """Reduce what was packed, and judge.

        Returns:
            How the step has ended; ``None``: it may be made.
        """
        if self._reducer is not None:
            # The first step makes the optimizer's state, which one that is called off would leave
            # without values.
            late = self.host_runs_ahead and self._has_stepped and self._is_gated
            late = late and self._reducer.can_end_late()
            self._timer.pause()
            accepted = self._reducer.exchange(num_samples, late=late)
            self._timer.resume()
            if not accepted:
                return DROPPED
            return EMPTY if self._reducer.is_empty else None
        if self._finite_check is not None and not self._finite_check.accept():
            return DROPPED
        if self.window is None:
            return None
        units = self.window.units
        if isinstance(units, Tensor) and self._skips_by_itself:
            return None
        # On a device, one number read in each step.
        return None if units > 0 else EMPTY

    def unpack(self) -> None:
        """Put the reduced gradients in place; nothing where none are reduced."""
        if self._reducer is not None:
            self._reducer.unpack()

    def apply(self) -> None:
        """Clip and step."""
        # A dropped step never comes here: the scaler neither unscales nor counts it.
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._params, self._max_grad_norm)
        with self._rates():
            if self._scaler is not None:
                self._scaler.step(self._optimizer)
                self._scaler.update()
            elif self._is_gated:
                assert self._reducer is not None
                self._step_unless(self._reducer.skip_flag)
            elif self._is_called_off_late:
                assert self.window is not None
                self._step_unless(1.0 - torch.as_tensor(self.window.units > 0).float())
            else:
                self._optimizer.step()
        self._has_stepped = True

    @property
    def _is_called_off_late(self) -> bool:
        """Whether the device decides whether the step's weights leave anything to do."""
        if self._reducer is not None or self.window is None or not self._skips_by_itself:
            return False
        return isinstance(self.window.units, Tensor)

    def _step_unless(self, called_off: Tensor) -> None:
        """Step with kernels that do nothing where ``called_off`` is 1; nothing is read."""
        optimizer: Any = self._optimizer
        optimizer.found_inf = called_off
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """One optimizer, and what makes its steps.

    Attributes:
        name: Of the submodule that it trains.
        params: The submodule's trainable parameters.
        optimizer: Their optimizer.
        reducer: Averages their gradients over the ranks.
        judge: Judges their steps.
    """

    name: str
    params: NamedParams
    optimizer: torch.optim.Optimizer
    reducer: GradientReducer | None
    finite_check: StepFiniteCheck | None


class StepEnd(NamedTuple):
    """How a step ended.

    Attributes:
        dropped: Whether it was dropped because of a value that is not finite.
    """

    dropped: bool


MADE, DROPPED = StepEnd(False), StepEnd(True)
EMPTY = MADE
"""The weights sum to 0: the batches are trained, and nothing follows from them."""
