"""One replica of a :class:`~runtime.loop.data_parallel.DataParallelCoordinator`, in its thread."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runtime.collective import Collective
from runtime.data.batches import move_batch
from runtime.device import cuda_api
from runtime.device.base import DeviceContext
from runtime.device.cuda_api import Event
from runtime.loop.shards import holds_columns
from runtime.replica.build import Replica, Template, adopt
from runtime.replica.gradients import gradient_norm
from runtime.replica.non_finite import first_bad
from runtime.replica.reducer import GradientReducer

LossFn = Callable[[nn.Module, Any], Any]


class Part(NamedTuple):
    """What a replica made of its samples.

    Attributes:
        loss: Their mean loss.
        correct: How many of them were right, as ``loss_fn`` counted.
    """

    loss: float = 0.0
    correct: int = 0


class Reduced(NamedTuple):
    """A replica's view of the averaged gradients.

    Attributes:
        norm: Their L2 norm; not finite exactly if one of them is not.
        bad: The first parameter whose gradient was not finite on this replica before.
    """

    norm: float
    bad: str | None = None


class LoopReplica:
    """A model, its optimizer and its part in each batch. Every method runs in its thread.

    Args:
        replica: The built replica.
        device: Where it lives; the thread is inside its ``activate()``.
        collective: Where gradients are averaged; ``None``: there is one replica.

    Attributes:
        modules: The model and everything in it, in one order on every replica.
        tensors: All its parameters, frozen ones too, in one order on every replica.
    """

    def __init__(
        self, replica: Replica, device: DeviceContext, collective: Collective | None
    ) -> None:
        self.model = replica.model
        self.optimizer = replica.optimizer
        # PyTorch takes the tensors of a state as they are, and each replica needs its own.
        self.optimizer.register_load_state_dict_pre_hook(lambda _, state: copy.deepcopy(state))
        self.modules = list(replica.model.modules())
        self.tensors = list(replica.model.parameters())
        self._state = replica.state
        self._params = replica.state.params.params
        self._names = replica.state.params.names
        self._device = device
        self._reducer: GradientReducer | None = None
        if collective is not None:
            self._reducer = GradientReducer(replica.state.params, collective, comm=device.comm)
        device.pin_accumulators(self._params)
        self._kept: list[Tensor] = []
        self._checked = False

    def buffers(self) -> list[Tensor]:
        """The model's buffers as they are now; a module may replace them."""
        return self._state.buffers.tensors()

    def forward_backward(
        self, loss_fn: LossFn, samples: Any, num_samples: int, behind: Sequence[Event]
    ) -> Part:
        """Compute the gradients of a shard. The parameters stay as they are.

        Args:
            loss_fn: The user's.
            samples: The shard; tensors in columns are moved to the device.
            num_samples: Its size; 0: nothing is computed.
            behind: Marks in the caller's streams, which the device's work must wait for.
        """
        for event in behind:
            cuda_api.API.wait_event(event)
        self._state.params.check()
        self._kept = [buffer.clone() for buffer in self.buffers()]
        self._forget_gradients()
        if num_samples == 0:
            return Part()
        if isinstance(samples, Tensor) or holds_columns(samples):
            samples = move_batch(samples, self._device.device)
        loss, correct = _check_result(loss_fn(self.model, samples))
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._checked:
            self._check_gradients()
        return Part(float(loss.detach()), _count(correct))

    def reduce(self, num_samples: int) -> Reduced:
        """Average the gradients with those of the other replicas, weighted by samples."""
        own = [p.grad for p in self._params]
        if self._reducer is not None:
            try:
                self._reducer.pack(num_samples)
                self._reducer.exchange(num_samples)
                self._reducer.unpack()
            except BaseException:
                self._reducer.collective.abort()  # the peers wait for this rank
                raise
        grads = self._gradients()
        norm = gradient_norm(grads)
        if math.isfinite(norm):
            return Reduced(norm)
        return Reduced(norm, first_bad(self._names, own))

    def step(self, factor: float, source: LoopReplica) -> None:
        """Scale the gradients, let the optimizer step, take over another replica's buffers.

        Waits for the device: what the replica holds may be read anywhere afterwards.

        Args:
            factor: What to multiply the gradients with.
            source: Whose buffers every replica has afterwards.
        """
        if factor != 1.0:
            torch._foreach_mul_(self._gradients(), factor)
        self.optimizer.step()
        with torch.no_grad():
            for target, value in zip(self.buffers(), source.buffers(), strict=True):
                if target is not value:
                    target.copy_(value)
        self._kept = []
        self._device.finish()

    def undo(self) -> None:
        """Take the batch back: the buffers are as they were, and there are no gradients."""
        with torch.no_grad():
            for buffer, kept in zip(self.buffers(), self._kept, strict=False):
                buffer.copy_(kept)
        self._kept = []
        self._forget_gradients()
        self._device.finish()

    def copy_optimizer(self, source: LoopReplica) -> None:
        """Take over the state and settings of another replica's optimizer, which rests."""
        self.optimizer.load_state_dict(source.optimizer.state_dict())
        self._device.finish()

    def copy_params(self, source: LoopReplica) -> None:
        """Take over another replica's trainable parameters, which nobody changes meanwhile."""
        with torch.no_grad():
            flats = zip(self._state.params.flats, source._state.params.flats, strict=True)
            for target, value in flats:
                target.copy_(value)
        self._device.finish()

    def copy_all(self, source: LoopReplica, rank: int, behind: Sequence[Event]) -> None:
        """Take over every tensor of another replica's model, frozen ones and buffers too."""
        for event in behind:
            cuda_api.API.wait_event(event)
        adopt(self.model, Template.of(source.model), rank)
        self._device.finish()

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._params if p.grad is not None]

    def _forget_gradients(self) -> None:
        for p in self._params:
            p.grad = None

    def _check_gradients(self) -> None:
        if not self._gradients():
            raise ValueError(
                "loss_fn's loss reaches no trainable parameter: every gradient is None after "
                "backward; compute the loss with the model that loss_fn is given"
            )
        for name, p in zip(self._names, self._params, strict=True):
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise ValueError(
                    f"parameter {name!r} has a sparse gradient, which replicas cannot average: "
                    "build the embedding with sparse=False"
                )
        self._checked = True


def _check_result(result: object) -> tuple[Tensor, object]:
    """The mean loss and the number correct that ``loss_fn`` gave."""
    loss, correct = result if isinstance(result, tuple) and len(result) == 2 else (result, 0)
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss_fn returned {type(result).__name__}: return the mean loss of the samples as a "
            "tensor, or (mean loss, number correct)"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"loss_fn returned a loss of shape {tuple(loss.shape)}: return a scalar, the mean loss "
            "of the samples, for instance loss.mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss without a gradient: compute it from the model's output "
            "outside torch.no_grad(), and do not detach it"
        )
    return loss, correct


def _count(correct: object) -> int:
    """The number correct, as a whole number."""
    value = correct.item() if isinstance(correct, Tensor) and correct.numel() == 1 else correct
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"loss_fn returned (loss, {type(correct).__name__}): the second is the number of "
            "samples that were right, for instance (logits.argmax(1) == y).sum()"
        )
    number = float(value)
    if not number.is_integer() or number < 0:
        raise ValueError(
            f"loss_fn returned (loss, {value}): the second is the number of samples that were "
            "right, not their share; for instance (logits.argmax(1) == y).sum()"
        )
    return int(number)
