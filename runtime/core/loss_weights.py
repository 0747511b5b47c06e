"""How much a loss counts: what it is a mean over, tokens or a sum of class weights or samples.

Losses and gradients of several pieces, micro-batches and ranks are averaged by these weights, so
that the result is the mean over all units, as one device would compute it. A piece of weight 0
adds nothing, even where its loss and gradients are NaN. A weight on the device is never read in a
step, but for the total where a step may have none at all.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

Weight = float | Tensor
"""A number on the host, or a scalar on a device that the host does not read."""


class Weighted(NamedTuple):
    """What a ``loss_fn`` may return, with nothing left to guess.

    Attributes:
        loss: The mean loss over ``weight`` units, a scalar tensor.
        weight: How many units: tokens, or a sum of class weights. A number or a scalar tensor.
        correct: How many samples were right.
    """

    loss: Tensor
    weight: float | Tensor
    correct: int | Tensor = 0


def check_weight(name: str, weight: object) -> Weight:
    """A weight that can be used: what is not on a GPU comes as a number.

    Of a tensor on a GPU only shape and dtype are looked at; if it is negative or NaN, what is
    weighed becomes NaN.

    Raises:
        TypeError: No number and no tensor.
        ValueError: Not a scalar, negative, NaN or infinite.
    """
    if isinstance(weight, Tensor):
        if weight.numel() != 1 or weight.is_complex():
            raise ValueError(
                f"{name} is a {weight.dtype} tensor of shape {tuple(weight.shape)}: pass a scalar, "
                "for instance (labels != -100).sum()"
            )
        if not _may_be_read(weight):
            return weight.detach().reshape(()).to(torch.float64)
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise TypeError(f"{name} is a {type(weight).__name__}: pass a number or a scalar tensor")
    number = float(weight)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} is {number}: pass a finite number, not negative")
    return number


def _may_be_read(weight: Tensor) -> bool:
    """Whether the host can read it without waiting for a device."""
    return weight.device.type == "cpu"


def inverse_of(weight: Weight) -> Weight:
    """``1 / weight``, 0 of 0, NaN of what is negative."""
    if isinstance(weight, Tensor):
        return part_of(weight, weight * weight)
    return 1.0 / weight if weight else 0.0


def parts_of(weights: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Each weight's part in their sum, on a device; all 0 if the sum is. No host sync."""
    found = [w.to(device, torch.float64, non_blocking=device.type != "cpu") for w in weights]
    total = torch.stack(found).sum()
    return [part_of(w, total) for w in found]


def part_of(weight: Tensor, total: Tensor) -> Tensor:
    """``weight / total``, 0 where the weight is 0, NaN where it is negative."""
    part = torch.where(weight == 0, 0.0, weight / total)
    return torch.where(weight < 0, math.nan, part)


@torch.no_grad()
def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply by a scalar on the same device, in place; 0 gives zeros, of NaN too."""
    empty = factor == 0
    for tensor in tensors:
        tensor.mul_(factor)
        tensor.masked_fill_(empty, 0)


WEIGHT_REMEDY = (
    "return (loss, weight) with the mean loss and what it is a mean over, a number or a scalar "
    "tensor from 0 up, for instance (labels != -100).sum()"
)


class WindowWeight(NamedTuple):
    """The weight of a step's losses on one rank: ``unit * units``.

    Attributes:
        unit: Weight that a micro-batch has whose loss was not scaled.
        units: Sum of what the losses of the micro-batches were scaled by.
    """

    unit: Weight
    units: Weight

    @property
    def total(self) -> Weight:
        """The sum of the micro-batches' weights."""
        return self.unit * self.units


def checked_loss(loss: object, function: str) -> Tensor:
    """A scalar loss with a graph, of a function of the user's.

    Raises:
        TypeError, ValueError: It is none; says what to do.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{function} returned {type(loss).__name__}: return the batch's mean loss as a tensor"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"{function} returned a loss of shape {tuple(loss.shape)}: return a scalar, the "
            "batch's mean loss, for instance loss.mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            f"{function} returned a loss without a gradient: compute it from the output of the "
            "model that it is given, outside torch.no_grad(), and do not detach it"
        )
    return loss


def check_read_weight(weight: float, where: str = "") -> float:
    """A weight of ``train_fn`` that the host has read, as a plain number.

    Raises:
        ValueError: It is negative or not finite.
    """
    if not 0 <= weight < math.inf:
        raise ValueError(f"train_fn returned the weight {weight}{where}: {WEIGHT_REMEDY}")
    return weight if isinstance(weight, int) else float(weight)


def split_loss(result: Any, model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """What ``train_fn`` has returned as loss and weight, if it is no tensor, which is a loss
    without a weight (``None``).

    Of what a model returns, it is the field ``loss``, which is taken for a mean over the labels
    of the batch that are not -100, unless a field tells its weight.
    """
    found = field_of(result, "loss")
    if found is not None:
        inputs = (batch,) if isinstance(batch, Mapping) else ()
        weight = output_weight(model, inputs, {}, result, None)
        if weight is None:
            with _TELLS:  # two ranks may come here at once, and the cache lets both in
                _warn_of_guess()
        return found, weight
    if not isinstance(result, tuple):
        return result, None
    if len(result) != 2:
        raise ValueError(f"train_fn returned a tuple of {len(result)}: {WEIGHT_REMEDY}")
    loss, weight = result
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(
                f"train_fn returned a weight of shape {tuple(weight.shape)}: {WEIGHT_REMEDY}"
            )
        if weight.dtype is torch.bool or weight.is_complex():
            raise TypeError(f"train_fn returned a weight of {weight.dtype}: {WEIGHT_REMEDY}")
    elif isinstance(weight, bool) or not isinstance(weight, Real):
        raise TypeError(
            f"train_fn returned a weight of type {type(weight).__name__}: {WEIGHT_REMEDY}"
        )
    return loss, weight


_TELLS = threading.Lock()


@cache
def _warn_of_guess() -> None:
    """Once in a process."""
    logger.warning(
        "train_fn returned a model's output, and nothing tells what its loss is a mean over: it is "
        "weighted by samples, which is wrong where tokens are ignored or classes have weights; "
        "return output.loss, or (output.loss, weight)"
    )


class GradientMask:
    """Makes zeros of the gradients of a micro-batch of weight 0, which may be NaN.

    Attributes:
        live: Whether the weight of the micro-batch is above 0, on the device where the host
            does not know; ``None``: nothing is masked.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.live: Tensor | bool | None = None
        for p in params:
            p.register_hook(self._masked)  # type: ignore[no-untyped-call]

    def _masked(self, grad: Tensor) -> Tensor | None:
        if self.live is None or grad.layout is not torch.strided:
            return None
        if isinstance(self.live, Tensor):
            return torch.where(self.live, grad, 0)
        return torch.zeros_like(grad)


LossWeightFn = Callable[[Any, Any], Any]
_FIELDS = ("loss_weight", "weight")
_UNSHIFTED = ("MaskedLM", "TokenClassification", "PreTraining", "ConditionalGeneration", "Seq2Seq")
"""In class names of the Transformers library: labels stand under the logits that they judge."""
IGNORED = -100


def field_of(output: object, name: str) -> Any:
    """A field of a mapping, a dataclass or a named tuple; ``None`` if there is no such."""
    if isinstance(output, Mapping):
        return output.get(name)
    if dataclasses.is_dataclass(output) or hasattr(output, "_fields"):
        return getattr(output, name, None)
    return None


def weight_field(output: object) -> Tensor | None:
    """The weight that a model puts into its output beside the loss."""
    for name in _FIELDS:
        found = field_of(output, name)
        if isinstance(found, Tensor) and found.numel() == 1:
            return found
    return None


def named_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All inputs under the names of ``forward``'s parameters; those that have one."""
    try:
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return dict(kwargs)
    found = {name: value for name, value in bound.items() if not isinstance(value, dict)}
    for value in (*args, *bound.values()):
        if isinstance(value, Mapping):
            found |= value
    return found | kwargs


def labels_weight(model: nn.Module, inputs: Mapping[str, Any], output: object) -> Weight | None:
    """How many labels count in a mean that ignores those of -100; ``None`` without labels.

    Where ``logits`` are as long as two-dimensional labels, a causal language model is assumed,
    whose loss leaves the first label of each sequence out; but not for the classes of the
    Transformers library that judge each label where it stands.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() == 0:
        return None
    if labels.is_floating_point() or labels.is_complex():
        return float(labels.size(0))  # a regression: every sample counts alike
    logits = field_of(output, "logits")
    if labels.dim() == 2 and isinstance(logits, Tensor) and logits.dim() == 3:
        name = type(model).__name__
        paired = getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True
        unshifted = paired or any(word in name for word in _UNSHIFTED)
        if logits.size(1) == labels.size(1) and not unshifted:
            labels = labels[:, 1:]
    return check_weight("the number of labels", (labels != IGNORED).sum())


def output_weight(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: object,
    loss_weight: LossWeightFn | None,
) -> Weight | None:
    """What the scalar losses in a model's output are means over; ``None``: it is not known.

    In this order: what ``loss_weight`` gives, a field of the output, labels in the inputs.
    """
    if loss_weight is not None:
        inputs: Any = kwargs if kwargs else args
        if args and kwargs:
            inputs = named_inputs(model, args, kwargs)
        return check_weight("loss_weight(inputs, output)", loss_weight(inputs, output))
    given = weight_field(output)
    if given is not None:
        return check_weight("the weight in the model's output", given)
    return labels_weight(model, named_inputs(model, args, kwargs), output)
