"""PendingMeans: the result of an evaluation function for a batch; the context of its call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runtime.core.errors import EvaluationFailed
from runtime.core.loss_weights import Weight, Weighted, check_weight, split_loss
from runtime.core.rng import thread_generator
from runtime.evaluation.batch_means import BatchMeans

EvaluationFn = Callable[[Any, Any], Any]
_REMEDY = "return a dict of means over the batch, such as {'loss': loss}, or (dict, weight)"


class PendingMeans:
    """The means of one batch, which the host has not read from the device.

    Args:
        position: Its position among the batches.
        result: Result of the evaluation function: a dict of means; ``(dict, weight)``; or a loss
            in any form that ``train_fn`` may return. A value in a dict may be a
            :class:`~gpuworker.Weighted` with a weight of its own.
        scalars: Values of ``record_scalar``.
        num_samples: The weight of values without one.
        model: The evaluated model, for weights of model outputs.

    Raises:
        TypeError, ValueError: The result is not of these forms.
    """

    def __init__(
        self,
        position: int,
        result: Any,
        scalars: Mapping[str, Any],
        *,
        num_samples: int,
        model: nn.Module,
        data: Any,
    ) -> None:
        self._position = position
        found, weight = _parse(result, model, data)
        shared: Weight = num_samples if weight is None else check_weight("the weight", weight)
        self._values: list[tuple[str, Any, Weight]] = []
        for name, value in (*scalars.items(), *found.items()):
            mean, own = value, shared
            if isinstance(value, Weighted):
                mean, own = value.loss, check_weight(f"the weight of {name!r}", value.weight)
            self._values.append((str(name), _checked(str(name), mean), own))

    def read(self) -> BatchMeans:
        """Read the values; waits for the device."""
        read = tuple((name, float(value), float(own)) for name, value, own in self._values)
        for name, _, weight in read:
            check_weight(f"the weight of {name!r}", weight)
        return BatchMeans(self._position, read)


def _parse(result: Any, model: nn.Module, data: Any) -> tuple[Mapping[Any, Any], Any]:
    """The values of a result and their weight; ``None``: the samples."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Mapping):
        return result
    if type(result) is dict:
        return result, None
    if isinstance(result, (Tensor, float, int)) and not isinstance(result, bool):
        return {"loss": result}, None
    if result is None:
        raise TypeError(f"the evaluation function returned None: {_REMEDY}")
    if isinstance(result, Mapping) and "loss" not in result:
        return result, None
    loss, weight = split_loss(result, model, data)
    if loss is result:
        raise TypeError(f"the evaluation function returned {result!r:.80}: {_REMEDY}")
    return {"loss": loss}, weight


def _checked(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"the evaluation function returned {name!r} of shape {tuple(value.shape)}: return "
                "its mean over the batch"
            )
        return value.detach().clone()  # read later
    if not hasattr(value, "__float__"):
        raise TypeError(
            f"the evaluation function returned {name!r} of type {type(value).__name__}: {_REMEDY}"
        )
    return value


class EvaluationView:
    """``current_worker()`` of a thread that evaluates a batch.

    Collects scalars for the batch, and gathers no rows of other ranks: a batch is evaluated as on
    one device. Other attributes are those of the worker, if there is one.

    Args:
        generator: A generator on the device for the draws of the batch.
        rank: The rank of the thread.
        world_size: Number of threads.

    Attributes:
        scalars: Values of ``record_scalar`` for the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        generator: torch.Generator,
        rank: int = 0,
        world_size: int = 1,
        worker: object = None,
    ) -> None:
        self.model, self.device, self.generator = model, device, generator
        self.rank, self.world_size = rank, world_size
        self.scalars: dict[str, Any] = {}
        self._worker = worker

    def record_scalar(self, name: str, value: float | Tensor) -> None:
        """See :func:`gpuworker.record_scalar`."""
        self.scalars[name] = value.detach().clone() if isinstance(value, Tensor) else value

    def all_gather(self, tensor: Tensor) -> tuple[Tensor, slice]:
        """The tensor itself, and the slice of all its rows."""
        return tensor, slice(0, len(tensor))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._worker is None:
            raise AttributeError(f"current_worker().{name} is not available in an evaluation")
        return getattr(self._worker, name)


def read_means(start: int, stop: int, data: Any, result: Any, view: EvaluationView) -> BatchMeans:
    """The means of the samples from ``start`` to ``stop - 1``; waits for the device.

    Args:
        start: Position of the first sample.
        stop: Position after the last one.
        view: The context of its call.
    """
    return PendingMeans(
        start, result, view.scalars, num_samples=stop - start, model=view.model, data=data
    ).read()


@contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Restore the mode of each submodule afterwards, by its ``train()`` or ``eval()``, which layers
    override.
    """
    modes = [(part, part.training) for part in model.modules()]  # parents first
    try:
        yield
    finally:
        for part, training in modes:
            if part.training != training:
                (part.train if training else part.eval)()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode without gradients; restore the mode of each submodule."""
    with keeping_modes(model):
        model.eval()
        with torch.no_grad():
            yield


@contextmanager
def drawing(device: torch.device, seed: int) -> Iterator[torch.Generator]:
    """A generator on a device, seeded with ``seed``; on a CPU the source of all draws of this
    thread as well.
    """
    generator = torch.Generator(device).manual_seed(seed)
    with thread_generator(generator if device.type == "cpu" else None):
        yield generator


def failed(start: int, stop: int, device: torch.device, error: BaseException) -> EvaluationFailed:
    """The error that names the samples whose evaluation raised ``error``."""
    found = EvaluationFailed(start, stop, str(device), error)
    found.__cause__ = error
    return found
