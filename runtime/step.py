"""One optimizer step: forward, backward, reduction under lockstep, clip, step.

Nothing here waits for the device: losses stay tensors, and the only host reads are those
of fp16's gradient scaler, of :mod:`runtime.finite` and, under lockstep, of the flags that
say which parameters got a gradient, where this rank alone cannot know.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runtime.collective import Collective
from runtime.finite import StepJudge
from runtime.flat import FlatParams
from runtime.timing import HostTimer, StepTimer

TrainFn = Callable[[nn.Module, Any], Tensor]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class StepEnd(NamedTuple):
    """How a step ended.

    Attributes:
        dropped: Whether it was dropped because of a value that is not finite.
    """

    dropped: bool


class GradientReducer:
    """Averages gradients over the ranks, weighted by samples, through one flat tensor.

    Behind the gradients of the first dtype lies a flag for each parameter: a parameter
    that got no gradient on any rank keeps ``.grad is None`` for the optimizer. Where steps
    are judged, a last element tells every rank whether all losses are finite.

    Args:
        params: The replica's parameters.
        collective: Where the ranks meet.
        judge: Judges what was reduced.
        comm: The context for collectives, see :meth:`DeviceContext.comm`.
    """

    def __init__(
        self,
        params: FlatParams,
        collective: Collective,
        judge: StepJudge | None = None,
        comm: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._params = params.params
        self.collective = collective
        self._judge = judge
        self._comm = comm
        num = len(self._params)
        first, *rest = params.flats
        extra = num if judge is None else num + 1
        self._flats = [first.new_zeros(first.numel() + extra), *(torch.zeros_like(f) for f in rest)]
        self._flags = self._flats[0][first.numel() : first.numel() + num]
        self._loss_flag = self._flats[0][first.numel() + num :]
        self._views = params.views([self._flats[0][: first.numel()], *self._flats[1:]])

    def reduce(self, num_samples: int) -> bool:
        """Replace every ``.grad`` by the weighted mean over the ranks.

        Args:
            num_samples: Samples behind this rank's gradients; 0: it only receives.

        Returns:
            Whether the step may be made; if not, the gradients are this rank's own still.

        Raises:
            NonFiniteError, CollectiveAborted: See :meth:`StepJudge.accept_reduced`.
        """
        grads = [p.grad for p in self._params]
        complete = num_samples > 0 and not any(g is None for g in grads)
        if complete:
            torch._foreach_copy_(self._views, grads)  # type: ignore[arg-type]
            # Each time: a peer that lacks a parameter halves its flag, which would end at 0.
            self._flags.fill_(1)
        elif num_samples > 0:
            for view, grad in zip(self._views, grads, strict=True):
                view.zero_() if grad is None else view.copy_(grad)
            told = torch.tensor([g is not None for g in grads])
            self._flags.copy_(told, non_blocking=True)
        if self._judge is not None:
            self._judge.write_flag(self._loss_flag)
        with self._comm():
            self.collective.weighted_mean_(self._flats, num_samples)
        if self._judge is not None and not self._judge.accept_reduced(
            self._flats, self._loss_flag, grads, self.collective
        ):
            return False
        used = None if complete else (self._flags > 0).tolist()
        for i, (p, view) in enumerate(zip(self._params, self._views, strict=True)):
            p.grad = view if used is None or used[i] else None
        return True


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
        self._checked = False
        self._scaler: torch.amp.GradScaler | None = None
        if precision == "fp16":
            self._scaler = torch.amp.GradScaler(device.type)
            # Creates the scale now: a rank without a batch unscales before it ever scales.
            self._scaler.scale(torch.zeros((), device=device))

    def copy_from(self, other: Stepper) -> None:
        """Take over the optimizer's state and the scaler of another rank's replica."""
        # load_state_dict keeps tensors of the right dtype and device, which are the other's.
        self._optimizer.load_state_dict(copy.deepcopy(other._optimizer.state_dict()))
        if self._scaler is not None and other._scaler is not None:
            self._scaler.load_state_dict(other._scaler.state_dict())

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        for p in self._params:
            p.grad = None
        if self._judge is not None:
            self._judge.begin()

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
        return loss.data

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
        accepted = True
        if self._reducer is not None:
            self._timer.pause()
            accepted = self._reducer.reduce(num_samples)
            self._timer.resume()
        elif self._judge is not None:
            accepted = self._judge.accept()
        if accepted:
            self._step()
        return StepEnd(not accepted)

    def _step(self) -> None:
        # A dropped step never comes here: the scaler neither unscales nor counts it.
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._params, self._max_grad_norm)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
