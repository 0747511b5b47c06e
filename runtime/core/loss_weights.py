"""Weights of losses: a mean loss's number of units, such as tokens, samples or class weights.

Losses and gradients of pieces, micro-batches and ranks are averaged by these weights, so that the
result is the mean over all units, as one device would compute it. A piece of weight 0 adds
nothing, even if its loss and gradients are NaN. A weight on a device is not read during a step,
except for the total of a step that may be 0.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn._reduction import legacy_get_string
from torch.overrides import TorchFunctionMode

logger = logging.getLogger(__name__)

Weight = float | Tensor
"""A number on the host, or a scalar tensor on a device, which the host does not read."""


class Weighted(NamedTuple):
    """The explicit form of the result of a ``train_fn`` or ``loss_fn``.

    Attributes:
        loss: The mean loss over ``weight`` units, a scalar tensor.
        weight: The number of units: tokens, or a sum of class weights. A number or a scalar tensor.
        correct: The number of correctly predicted samples, for
            :class:`~gpuworker.DataParallelCoordinator` alone.
    """

    loss: Tensor
    weight: float | Tensor
    correct: int | Tensor = 0


def check_weight(name: str, weight: object) -> Weight:
    """Check a weight; one that is not on a GPU is returned as a number.

    Of a tensor on a GPU only shape and dtype are checked; if it is negative or NaN, the weighted
    result is NaN.

    Raises:
        TypeError: Neither a number nor a tensor.
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
    """True if the host can read it without waiting for a device."""
    return weight.device.type == "cpu"


def inverse_of(weight: Weight) -> Weight:
    """``1 / weight``; 0 for 0, NaN for a negative weight."""
    if isinstance(weight, Tensor):
        return fraction_of(weight, weight * weight)
    return 1.0 / weight if weight else 0.0


def fractions_of(weights: Sequence[Weight], device: torch.device) -> list[Weight]:
    """The weights divided by their sum; all 0 if the sum is 0. No host sync.

    Numbers if all weights are numbers, else tensors on a device.
    """
    numbers = [weight for weight in weights if not isinstance(weight, Tensor)]
    if len(numbers) == len(weights):
        whole = sum(numbers) or 1.0
        return [number / whole for number in numbers]
    away = device.type != "cpu"
    found = [torch.as_tensor(w).to(device, torch.float64, non_blocking=away) for w in weights]
    total = torch.stack(found).sum()
    return [fraction_of(w, total) for w in found]


def fraction_of(weight: Tensor, total: Tensor) -> Tensor:
    """``weight / total``; 0 where the weight is 0, NaN where it is negative."""
    part = torch.where(weight == 0, 0.0, weight / total)
    return torch.where(weight < 0, math.nan, part)


@torch.no_grad()
def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place by a scalar on the same device; 0 turns NaN into zeros too."""
    empty = factor == 0
    for tensor in tensors:
        tensor.mul_(factor)
        tensor.masked_fill_(empty, 0)


WEIGHT_REMEDY = (
    "return (loss, weight) with the mean loss and its number of units, a non-negative number or "
    "scalar tensor, for instance (labels != -100).sum()"
)


class WindowWeight(NamedTuple):
    """The weight of a step's losses on one rank: ``unit * units``.

    Attributes:
        unit: The weight of a micro-batch whose loss was scaled by 1.
        units: The sum of the factors by which the losses of the micro-batches were scaled.
    """

    unit: Weight
    units: Weight

    @property
    def total(self) -> Weight:
        """The sum of the micro-batches' weights."""
        return self.unit * self.units


class WeightAccumulator:
    """Accumulates the weights of a step's micro-batches on one rank.

    Args:
        plain_units: Sum of the micro-batches' fractions of the step before the first weight.
        is_prompt: True if the host can read the device at no cost.

    Attributes:
        last: The weight of the last micro-batch, for the log; ``None``: its samples.
        total: The weight of all micro-batches; ``None`` before the first.
    """

    def __init__(self, plain_units: float, *, is_prompt: bool) -> None:
        self.last: Weight | None = None
        self.total: WindowWeight | None = None
        self._plain_units = plain_units
        self._is_prompt = is_prompt
        self._is_scaled = False

    def add(
        self, loss: Tensor, weight: Weight | None, fraction: float, num_samples: int
    ) -> tuple[Tensor | bool, Weight]:
        """Add the weight of a micro-batch.

        Args:
            weight: Its weight; ``None``: its samples.
            fraction: Its fraction of the step's samples.

        Returns:
            True if the weight is above 0 (a tensor if only the device has it), and the factor to
            scale the loss by.
        """
        plain = num_samples / fraction  # the unit of micro-batches without a weight
        live: Tensor | bool
        first: Weight
        if isinstance(weight, Tensor):
            if self._is_prompt or weight.device.type != loss.device.type:
                weight = weight.item()  # on the CPU
            elif weight.device != loss.device:
                raise ValueError(
                    f"train_fn returned a loss on {loss.device} with a weight on {weight.device}: "
                    "return the weight on the loss's device, or as a number"
                )
        if isinstance(weight, Tensor):
            # Checked when it is read; until then an invalid weight counts as 0.
            raw = weight.detach().to(torch.float64, copy=True).reshape(())
            self.last = raw
            live = raw > 0
            weight = torch.where(live, raw, 0)
            first = torch.where(live, weight / fraction, plain)
        else:
            self.last = None if weight is None else check_read_weight(weight)
            weight = num_samples if weight is None else float(weight)
            live = weight > 0
            first = weight / fraction if live else plain
        if self.total is not None:
            unit, units = self.total
        elif self._plain_units:
            unit, units = plain, self._plain_units
        else:
            unit, units = first, 0.0
        self._is_scaled = fraction != 1.0 or self.total is not None or self._plain_units > 0
        scale = weight / unit
        self.total = WindowWeight(unit, units + scale)
        return live, scale.to(loss.dtype) if isinstance(scale, Tensor) else scale

    def divide(self, params: Sequence[nn.Parameter]) -> None:
        """Divide the sum of weighted gradients by the weights, to their mean."""
        if not self._is_scaled or self.total is None:
            return
        units = self.total.units
        grads = [p.grad for p in params if p.grad is not None]
        if isinstance(units, Tensor):
            factor = torch.where(units > 0, 1 / units, 0)
            if not any(g.dtype is torch.float64 for g in grads):
                factor = factor.float()
            torch._foreach_mul_(grads, factor)
        elif units > 0 and units != 1.0:
            torch._foreach_div_(grads, units)


def with_graph(loss: Tensor, weight: Weight | None, params: Iterable[Tensor]) -> Tensor:
    """The loss; one of weight 0 that has no graph gets one with gradients of 0.

    A rank may return a constant for a batch of padding only, while the others train.
    """
    if loss.requires_grad or weight is None or float(weight) != 0:
        return loss
    for p in params:
        if p.requires_grad:
            loss = loss + p.flatten()[:0].abs().sum()
    return loss


def checked_loss(
    loss: object,
    function: str,
    weight: Weight | None = None,
    params: Iterable[Tensor] = (),
    *,
    has_run_backward: bool = False,
) -> Tensor:
    """Check that a user function returned a scalar loss with a graph.

    Args:
        weight: The weight of the loss, if it returned one.
        params: Of the model; see :func:`with_graph`.
        has_run_backward: True if it has run a backward pass itself.

    Returns:
        The loss, with a graph.

    Raises:
        TypeError, ValueError: It did not; the message has the remedy.
    """
    if not isinstance(loss, Tensor):
        several = ""
        if isinstance(loss, Mapping):
            several = (
                "; of several losses return the sum, and record each with "
                "gpuworker.record_scalar(name, value)"
            )
        raise TypeError(
            f"{function} returned {type(loss).__name__}: return the batch's mean loss as a tensor"
            f"{several}"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"{function} returned a loss of shape {tuple(loss.shape)}: return a scalar, the "
            "batch's mean loss, for instance loss.mean()"
        )
    loss = with_graph(loss, weight, params)
    if not loss.requires_grad:
        if has_run_backward:
            raise ValueError(
                f"{function} calls backward() itself and returned a loss without a gradient: "
                f"end {function} with return loss, not detached, and leave backward(), "
                "optimizer.step() and optimizer.zero_grad() out, which the run does"
            )
        raise ValueError(
            f"{function} returned a loss without a gradient: compute it from the output of the "
            "model passed to it, outside torch.no_grad(), and do not detach it"
        )
    return loss


def check_read_weight(weight: float, where: str = "") -> float:
    """Check a weight of ``train_fn`` that the host has read.

    Raises:
        ValueError: It is negative or not finite.
    """
    if not 0 <= weight < math.inf:
        raise ValueError(f"train_fn returned the weight {weight}{where}: {WEIGHT_REMEDY}")
    return weight if isinstance(weight, int) else float(weight)


def split_loss(result: Any, model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Split the result of ``train_fn``, if it is not a tensor, into loss and weight.

    Of a model's output, the loss is the field ``loss``, and the weight a field of the output or
    the number of the batch's labels that are not -100. ``None``: no weight, samples count.
    """
    if isinstance(result, Weighted):
        if isinstance(result.correct, Tensor) or result.correct != 0:
            raise ValueError(
                "train_fn returned Weighted(loss, weight, correct): correct is for "
                "DataParallelCoordinator; record it by gpuworker.record_scalar(name, value)"
            )
        return _checked_pair(result.loss, result.weight)
    found = field_of(result, "loss")
    if found is not None:
        inputs = (batch,) if isinstance(batch, Mapping) else ()
        weight = output_weight(model, inputs, {}, result, None)
        if weight is None:
            with _WARN_LOCK:  # the cache alone would let two ranks warn at once
                _warn_of_guess()
        return found, weight
    if not isinstance(result, tuple):
        return result, None
    if len(result) != 2:
        raise ValueError(
            f"train_fn returned a tuple of {len(result)}: {WEIGHT_REMEDY}; {RECORD_REMEDY}"
        )
    pair = _checked_pair(*result)
    check_meant_as_weight(result[1], "train_fn", RECORD_REMEDY)
    return pair


def _checked_pair(loss: Any, weight: Any) -> tuple[Any, Any]:
    """Check the type of a weight of ``train_fn``."""
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(
                f"train_fn returned a weight of shape {tuple(weight.shape)}: {WEIGHT_REMEDY}; "
                f"{RECORD_REMEDY}"
            )
        if weight.dtype is torch.bool or weight.is_complex():
            raise TypeError(f"train_fn returned a weight of {weight.dtype}: {WEIGHT_REMEDY}")
    elif isinstance(weight, bool) or not isinstance(weight, Real):
        raise TypeError(
            f"train_fn returned a weight of type {type(weight).__name__}: {WEIGHT_REMEDY}; "
            f"{RECORD_REMEDY}"
        )
    return loss, weight


RECORD_REMEDY = (
    "to log a value such as the accuracy, call gpuworker.record_scalar(name, value) and return "
    "the loss alone"
)


def check_meant_as_weight(value: object, function: str, otherwise: str) -> None:
    """Check that the second value of a plain ``(loss, value)`` can be meant as a weight.

    Counts pass. A fraction below 1 is rejected: it is an accuracy or a share far more often than
    a weight. Other fractions, and floating-point tensors that the host cannot read without
    waiting, are reported once.

    Args:
        value: The second value.
        otherwise: The remedy for a value that is not a weight.

    Raises:
        ValueError: It is a fraction between 0 and 1, or has a graph.
    """
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise ValueError(
                f"{function} returned (loss, value) with a value that requires grad: a second "
                "value is the weight of the loss, not another loss: add losses up, or return "
                f"gpuworker.Weighted(loss, weight.detach()) if it is a weight; {otherwise}"
            )
        if not value.is_floating_point():
            return
        if not _may_be_read(value):
            _warn_of_fraction(function, otherwise)
            return
        value = value.item()
    if isinstance(value, int) or not isinstance(value, Real):
        return
    number = float(value)
    if 0 < number < 1:
        raise ValueError(
            f"{function} returned (loss, {number:g}): a second value is the weight of the loss, "
            "and a fraction is not taken for one: return gpuworker.Weighted(loss, weight) if it "
            f"is; {otherwise}"
        )
    if not number.is_integer() and math.isfinite(number):
        _warn_of_fraction(function, otherwise)


def _warn_of_fraction(function: str, otherwise: str) -> None:
    """Warn once in a process."""
    with _WARN_LOCK:
        if function in _WARNED:
            return
        _WARNED.add(function)
    logger.warning(
        "%s returned (loss, value): the value is the weight of the loss. Return "
        "gpuworker.Weighted(loss, weight) to confirm it; %s",
        function,
        otherwise,
    )


_WARNED: set[str] = set()
_WARN_LOCK = threading.Lock()


@cache
def _warn_of_guess() -> None:
    """Warn once in a process."""
    logger.warning(
        "train_fn returned a model's output without the number of units of its mean loss: it is "
        "weighted by samples, which is wrong where tokens are ignored or classes have weights; "
        "return output.loss, or (output.loss, weight)"
    )


class GradientMask:
    """Zeros the gradients of a micro-batch of weight 0, which may be NaN.

    Attributes:
        live: True if the micro-batch has a weight above 0; a tensor if only the device has it;
            ``None``: nothing is masked.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.live: Tensor | bool | None = None
        for p in params:
            requires_grad = p.requires_grad
            p.requires_grad_(True)  # one that is frozen now may be trained later
            p.register_hook(self._hook)  # type: ignore[no-untyped-call]
            p.requires_grad_(requires_grad)

    def _hook(self, grad: Tensor) -> Tensor | None:
        if self.live is None or grad.layout is not torch.strided:
            return None
        if isinstance(self.live, Tensor):
            return torch.where(self.live, grad, 0)
        return torch.zeros_like(grad)


LossWeightFn = Callable[[Any, Any], Any]
_WEIGHT_FIELDS = ("loss_weight", "weight")
_UNSHIFTED = (
    "MaskedLM",
    "TokenClassification",
    "PreTraining",
    "ConditionalGeneration",
    "Seq2Seq",
)
"""Parts of class names in Transformers whose logits and labels have equal positions."""
IGNORED = -100


def field_of(output: object, name: str) -> Any:
    """A field of a mapping, a dataclass or a named tuple; ``None`` if it does not exist."""
    if isinstance(output, Mapping):
        return output.get(name)
    if dataclasses.is_dataclass(output) or hasattr(output, "_fields"):
        return getattr(output, name, None)
    return None


def weight_field(output: object) -> Tensor | None:
    """The weight field of a model's output; ``None`` if it has none."""
    for name in _WEIGHT_FIELDS:
        found = field_of(output, name)
        if isinstance(found, Tensor) and found.numel() == 1:
            return found
    return None


def named_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The inputs by name, as in the signature of ``forward``; unnamed ones are left out."""
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
    """Number of labels other than -100; ``None`` without labels.

    If ``logits`` are as long as two-dimensional labels, a causal language model is assumed, whose
    loss leaves out the first label of each sequence; except for classes of Transformers whose
    logits and labels have equal positions.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() == 0:
        return None
    if labels.is_floating_point() or labels.is_complex():
        return float(labels.size(0))  # a regression: samples have equal weights
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
    """The weight of the scalar losses in a model's output; ``None`` if it is not available.

    In this order: the result of ``loss_weight``, a field of the output, the inputs' labels.
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


class CountedLoss:
    """A loss function of ``(output, target)``, whose result has the weight of its mean.

    The mean of PyTorch's cross-entropy and negative log-likelihood is over the labels that are not
    ignored, by class weights; all other means of PyTorch are over samples. The calls of these two
    within the loss function are observed: in objects, subclasses and functions around them.

    On a GPU, labels are counted by the device once one was found to be ignored, which the host
    reads in each worker's calls 1, 2, 4, 8 and so on.

    Args:
        in_graphs: Its calls are captured in graphs: the device counts from the start, and the
            host reads nothing after the second call.

    Raises:
        TypeError: It is scripted, so that its calls cannot be observed.
    """

    def __init__(self, function: Callable[[Any, Any], Any], *, in_graphs: bool = False) -> None:
        if isinstance(function, torch.jit.ScriptModule) and any(
            hasattr(module, "ignore_index") for module in function.modules()
        ):
            raise TypeError(
                f"fit(loss={function.original_name}): the mean of this scripted loss is by class "
                "weights, or over labels that are not ignored, and cannot be read: pass the module "
                f"itself, or {_TRAIN_FN_REMEDY}"
            )
        self._function = function
        inner = getattr(function, "func", function)  # of a functools.partial
        self._name = getattr(inner, "__name__", type(inner).__name__)
        self._in_graphs = in_graphs
        self._ignores = False
        self._is_plain = False
        self._seen = _SeenLabels()

    def __call__(self, output: Any, target: Any) -> Any:
        """The loss; a :class:`Weighted` if it is a mean over labels.

        Raises:
            ValueError: It is computed from a mean that is not over samples.
        """
        if self._is_plain:
            return self._function(output, target)
        with _ObservedMeans() as means:
            loss = self._function(output, target)
        self._is_plain = not means.found
        for mean in means.found:
            if mean.loss is loss:
                return Weighted(loss, self._units(mean))
        if isinstance(loss, Tensor):  # else with a weight of its own
            for mean in means.found:
                self._require_plain(mean)
        return loss

    def _units(self, mean: _Mean) -> Weight:
        """The number of units of a mean; a tensor if they are class weights, or were counted."""
        if mean.ignore_index is None:
            return mean.num_labels
        if mean.class_weights is not None:
            kept = mean.target != mean.ignore_index
            return (mean.class_weights[torch.where(kept, mean.target, 0)] * kept).sum()
        if _lies_on_host(mean.target):
            return mean.num_labels - mean.num_ignored()
        if self._in_graphs or self._has_ignored(mean):
            return (mean.target != mean.ignore_index).sum()
        return mean.num_labels

    def _has_ignored(self, mean: _Mean) -> bool:
        """True if a label was found to be ignored; waits for a GPU in a few calls only."""
        if _lies_on_host(mean.target):
            return mean.num_ignored() > 0
        seen = self._seen
        seen.num_calls += 1
        kept: Any = mean.target != mean.ignore_index
        seen.has_ignored = seen.has_ignored | kept.logical_not().any()
        is_read = seen.num_calls & (seen.num_calls - 1) == 0
        if not self._ignores and is_read and (seen.num_calls <= 2 or not self._in_graphs):
            self._ignores = _read(seen.has_ignored)
            if self._ignores and seen.num_calls > 2:
                logger.warning(
                    "fit(loss=%s): labels are ignored, and were not in the first batches: batches "
                    "since then were weighted by all of their labels",
                    self._name,
                )
        return self._ignores

    def _require_plain(self, mean: _Mean) -> None:
        """Raise ``ValueError`` unless a mean that the loss is computed from is over samples."""
        if mean.ignore_index is None:
            return
        by = "by class weights"
        if mean.class_weights is None:
            if not self._has_ignored(mean):
                return
            by = "over the labels that are not ignored"
        raise ValueError(
            f"fit(loss={self._name}): it returns a value that it computes from a mean {by}, and "
            f"whose weight cannot be read: {_TRAIN_FN_REMEDY}"
        )


_TRAIN_FN_REMEDY = (
    "use Trainer.builder with train_fn(model, batch), which returns (loss, weight) with the mean "
    "loss and the number that it is a mean over, class_weights[labels].sum() or "
    "(labels != ignore_index).sum()"
)


def _lies_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _read(flag: Tensor | bool) -> bool:
    """The flag's value; waits for its device."""
    return bool(flag)


class _SeenLabels(threading.local):
    """Labels of the batches of one worker."""

    num_calls = 0
    has_ignored: Tensor | bool = False


class _Mean(NamedTuple):
    """A mean over labels.

    Attributes:
        loss: The mean.
        ignore_index: The label that is ignored; ``None`` for probabilities, which all count 1.
        class_weights: The weight of each class, if any.
    """

    loss: Tensor
    target: Tensor
    num_labels: int
    ignore_index: int | None
    class_weights: Tensor | None

    def num_ignored(self) -> int:
        """The number of labels on the host that are ignored; faster than by PyTorch."""
        return int(np.count_nonzero(self.target.numpy() == self.ignore_index))


class _ObservedMeans(TorchFunctionMode):
    """Records the means over labels that are computed in a thread within this context."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[_Mean] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        names = _MEANS_OVER_LABELS.get(func)
        if names is not None:
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            reduction = given.get("reduction", "mean")
            if given.get("size_average") is not None or given.get("reduce") is not None:
                reduction = legacy_get_string(given.get("size_average"), given.get("reduce"))
            if reduction == "mean":
                self.found.append(_mean_of(found, given))
        return found


def _mean_of(loss: Tensor, given: Mapping[str, Any]) -> _Mean:
    target, scores = given["target"], given["input"]
    if target.is_floating_point():
        num_labels = scores.numel() // scores.size(min(1, scores.dim() - 1))
        return _Mean(loss, target, num_labels, None, None)
    ignored = given.get("ignore_index", IGNORED)
    return _Mean(loss, target, target.numel(), ignored, given.get("weight"))


_MEANS_OVER_LABELS = {
    function: tuple(inspect.signature(function).parameters)
    for function in (functional.cross_entropy, functional.nll_loss)
}
"""PyTorch's functions whose mean may not be over samples, and the names of their parameters."""
