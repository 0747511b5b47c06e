"""Reads the result of a user's loss function on one shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor, nn

from runtime.core.loss_weights import Weighted, check_weight, checked_loss

ShardLossFn = Callable[[nn.Module, Any], Any]


class ShardLoss(NamedTuple):
    """What a replica made of its samples.

    Attributes:
        loss: Their mean loss.
        second: What ``loss_fn`` gave beside it in a tuple of two, to be read with that of the
            other replicas.
        weight: What the loss is a mean over; ``None``: the samples.
        correct: How many of them were right, as ``loss_fn`` counted.
    """

    loss: float = 0.0
    second: float | None = None
    weight: float | None = None
    correct: int = 0


def read_result(result: object) -> tuple[Tensor, ShardLoss]:
    """The mean loss, and what else ``loss_fn`` gave."""
    loss, part = result, ShardLoss()
    if isinstance(result, Weighted):
        loss = result.loss
        weight, correct = host_weight(result.weight), read_correct(_number(result.correct))
        part = ShardLoss(weight=weight, correct=correct)
    elif isinstance(result, tuple) and len(result) == 2:
        loss, part = result[0], ShardLoss(second=_number(result[1]))
    elif isinstance(result, tuple) and len(result) == 3:
        loss, correct, weight = result
        part = ShardLoss(weight=host_weight(weight), correct=read_correct(_number(correct)))
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss_fn returned {type(result).__name__}: return the mean loss of the samples as a "
            "tensor, (loss, weight), (loss, number correct), or Weighted(loss, weight, correct)"
        )
    return checked_loss(loss, "loss_fn"), part


def _number(value: object) -> float:
    """A number that ``loss_fn`` gave beside the loss."""
    found = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(found, bool) or not isinstance(found, Real):
        raise TypeError(
            f"loss_fn returned (loss, {type(value).__name__}): the second is the number of "
            "samples that were right, for instance (logits.argmax(1) == y).sum(), or the loss's "
            "weight, for instance (labels != -100).sum()"
        )
    return float(found)


def host_weight(value: object) -> float:
    """A weight as a number; the host has read the loss already."""
    weight = check_weight("the weight that loss_fn returned", value)
    return weight if isinstance(weight, float) else check_weight("weight", weight.cpu())  # type: ignore[return-value]


def read_correct(number: float) -> int:
    """A number of samples that were right."""
    if not number.is_integer() or number < 0:
        raise ValueError(
            f"loss_fn returned (loss, {number:g}): the second is the number of samples that were "
            "right, not their share; for instance (logits.argmax(1) == y).sum(). If it is the "
            "loss's weight, return runtime.Weighted(loss, weight)"
        )
    return int(number)


class Seconds:
    """Reads what ``loss_fn`` gives beside the loss in a tuple of two: a weight, or a count.

    All replicas' numbers of a batch are read alike. They are weights if one of them cannot be
    a number of right samples: it exceeds the replica's samples, or is a fraction above 1. From
    then on they always are. Until then they count right samples.
    """

    def __init__(self) -> None:
        self._are_weights = False
        self._were_counts = False

    def classify(self, parts: Sequence[ShardLoss], counts: Sequence[int]) -> None:
        """Find out what the numbers of a batch are.

        Raises:
            ValueError: These are weights, and earlier ones were taken for counts.
        """
        told = [(p.second, n) for p, n in zip(parts, counts, strict=True) if p.second is not None]
        if not self._are_weights and any(s > n or (s > 1 and s % 1) for s, n in told):
            if self._were_counts:
                raise ValueError(
                    "loss_fn returned (loss, number), and the number can be no count of right "
                    "samples, for which earlier ones were taken: return runtime.Weighted(loss, "
                    "weight), or (loss, correct, weight)"
                )
            self._are_weights = True
        if not self._are_weights:
            self._were_counts = self._were_counts or any(s for s, _ in told)

    def resolve(self, part: ShardLoss) -> ShardLoss:
        """A replica's part with its number in its place.

        Raises:
            ValueError: It is neither a weight nor a count.
        """
        if part.second is None:
            return part
        if self._are_weights:
            return part._replace(weight=host_weight(part.second))
        return part._replace(correct=read_correct(part.second))
