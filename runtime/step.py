"""One optimizer step: forward, backward, reduction under lockstep, clip, step.

Nothing here waits for the device: losses stay tensors, and the only host reads are those
of fp16's gradient scaler, of :mod:`runtime.finite` and of :mod:`runtime.reducer`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runtime.finite import StepJudge
from runtime.flat import FlatParams
from runtime.optimizer_state import load_optimizer_state
from runtime.reducer import NOTHING, GradientReducer, Packed
from runtime.timing import HostTimer, StepTimer

TrainFn = Callable[[nn.Module, Any], Tensor]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class StepEnd(NamedTuple):
    """How a step ended.

    Attributes:
        dropped: Whether it was dropped because of a value that is not finite.
    """

    dropped: bool


MADE, DROPPED = StepEnd(False), StepEnd(True)


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
    """

    def __init__(
        self,
        model: nn.Module,
        params: FlatParams,
        optimizer: torch.optim.Optimizer,
        *,
        device: torch.device,
        precision: str = "fp32",
        max_grad_norm: float | None = None,
        reducer: GradientReducer | None = None,
        judge: StepJudge | None = None,
        timer: StepTimer | None = None,
        rates: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._model = model
        self._params = params.params
        self._names = params.names
        self._optimizer = optimizer
        self._device_type = device.type
        self._dtype = _AUTOCAST.get(precision)
        self._max_grad_norm = max_grad_norm
        self._reducer = reducer
        self._judge = judge
        self._timer = timer or HostTimer()
        self._rates = rates or nullcontext
        # Nothing comes with the optimizer's step: with steps of 1 ms each call counts.
        self._is_bare = rates is None and max_grad_norm is None and precision != "fp16"
        self._losses: list[Tensor] = []
        self._checked = False
        self._scaler: torch.amp.GradScaler | None = None
        if precision == "fp16":
            self._scaler = torch.amp.GradScaler(device.type)
            # Creates the scale now: a rank without a batch unscales before it ever scales.
            self._scaler.scale(torch.zeros((), device=device))

    def copy_from(self, other: Stepper) -> None:
        """Take over the optimizer's state and the scaler of another rank's replica."""
        # load_state_dict keeps tensors of the right dtype and device, which are the other's.
        load_optimizer_state(self._optimizer, copy.deepcopy(other._optimizer.state_dict()))
        if self._scaler is not None and other._scaler is not None:
            self._scaler.load_state_dict(other._scaler.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer and, if there is one, of the scaler; no copies."""
        scaler = None if self._scaler is None else self._scaler.state_dict()
        kind = type(self._optimizer).__name__
        return {"optimizer": self._optimizer.state_dict(), "kind": kind, "scaler": scaler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        How the optimizer computes (``foreach``, ``fused``, ``capturable``) stays as built.

        Raises:
            ValueError: It is of another optimizer.
        """
        kind = type(self._optimizer).__name__
        if state["kind"] != kind:  # torch would load it, and fail in the first step
            raise ValueError(f"it holds the state of {state['kind']}, not of {kind}")
        # A copy: ranks may share it, and torch keeps its containers.
        load_optimizer_state(self._optimizer, copy.deepcopy(state["optimizer"]))
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])

    def begin(self) -> None:
        """A step begins: what follows can be taken back, and has no gradients yet."""
        self.open()
        self.clear_gradients()

    def open(self) -> None:
        """A step begins: what follows can be taken back."""
        if self._judge is not None:
            self._judge.begin()

    def clear_gradients(self) -> None:
        """Forget the gradients and losses of the last step."""
        self._losses.clear()
        if self._reducer is not None:
            self._reducer.packed = NOTHING
        for p in self._params:
            p.grad = None

    def pause(self) -> None:
        """What follows is no work of the step: its time is not counted."""
        self._timer.pause()

    def resume(self) -> None:
        """The step goes on."""
        self._timer.resume()

    def gradients(self) -> list[Tensor | None]:
        """The gradients as they are now, in the order of the parameters."""
        return [p.grad for p in self._params]

    def packed(self) -> Packed | None:
        """What was packed for the reduction; ``None`` where there is none."""
        return None if self._reducer is None else self._reducer.packed

    def give_gradients(self, grads: Sequence[Tensor | None], packed: Packed | None) -> None:
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
        return self._reducer is not None or (self._judge is not None and self._judge.skips)

    def _autocast(self) -> AbstractContextManager[object]:
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._dtype)

    def micro_step(self, train_fn: TrainFn, batch: Any, fraction: float = 1.0) -> Tensor:
        """Forward and backward of one micro-batch.

        Args:
            train_fn: Gives the batch's mean loss.
            batch: What the data set gave, on the device.
            fraction: The micro-batch's part of the samples of the step.

        Returns:
            The loss, detached, still on the device.
        """
        if self._dtype is None:
            loss = train_fn(self._model, batch)
        else:
            with self._autocast():
                loss = train_fn(self._model, batch)
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"train_fn returned {type(loss).__name__}: return the batch's mean loss as a tensor"
            )
        if loss.numel() != 1:
            raise ValueError(
                f"train_fn returned a loss of shape {tuple(loss.shape)}: return a scalar, the "
                "batch's mean loss, for instance loss.mean()"
            )
        if not loss.requires_grad:
            raise ValueError(
                "train_fn returned a loss without a gradient: compute it from the model's output "
                "outside torch.no_grad(), and do not detach it"
            )
        target = loss if fraction == 1.0 else loss * fraction
        if self._scaler is not None:
            target = self._scaler.scale(target)
        target.backward()  # type: ignore[no-untyped-call]
        if not self._checked:
            self._check_gradients()
        # Unlike detach(), .data does not give up the interpreter: with 1 ms steps each
        # hand-over to another worker counts.
        loss = loss.data
        if self._reducer is not None:
            self._losses.append(loss)
        return loss

    def _check_gradients(self) -> None:
        self._checked = True
        grads = [(n, p.grad) for n, p in zip(self._names, self._params, strict=True)]
        if all(g is None for _, g in grads):
            raise ValueError(
                "train_fn's loss reaches no trainable parameter: every gradient is None after "
                "backward; compute the loss with the model that train_fn is given"
            )
        for name, g in grads:
            if g is not None and g.layout is not torch.strided:
                raise ValueError(
                    f"parameter {name!r} has a sparse gradient, which replicas cannot average: "
                    "build the embedding with sparse=False"
                )

    def finish(self, num_samples: int) -> StepEnd:
        """Reduce, judge, clip and step.

        Args:
            num_samples: Samples behind this rank's gradients; 0 only under lockstep.
        """
        if self._reducer is None:
            if self._judge is not None and not self._judge.accept():
                return DROPPED
            if self._is_bare:
                self._optimizer.step()
            else:
                self.apply()
            return MADE
        self.pack(num_samples)
        if not self.settle(num_samples):
            return DROPPED
        self.unpack()
        self.apply()
        return MADE

    def pack(self, num_samples: int) -> None:
        """Make this rank's part of the reduction ready; nothing where there is none."""
        if self._reducer is not None:
            self._reducer.pack(num_samples, self._losses)

    def settle(self, num_samples: int) -> bool:
        """Reduce what was packed, and judge; whether the step may be made."""
        if self._reducer is not None:
            self._timer.pause()
            accepted = self._reducer.exchange(num_samples)
            self._timer.resume()
            return accepted
        return self._judge is None or self._judge.accept()

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
            if self._scaler is None:
                self._optimizer.step()
            else:
                self._scaler.step(self._optimizer)
                self._scaler.update()
