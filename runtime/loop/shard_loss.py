"""Reads the result of a user's loss function on one shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

from runtime.core.loss_weights import Weighted, check_weight, checked_loss

ShardLossFn = Callable[[Any, Any], Any]


class ShardLoss(NamedTuple):
    """The result of ``loss_fn`` on one replica's shard.

    Attributes:
        loss: The mean loss.
        second: The second value of a tuple of two, to be classified together with those of the
            other replicas.
        weight: The count that the loss is a mean over; ``None``: the samples.
    """

    loss: float = 0.0
    second: float | None = None
    weight: float | None = None
    correct: int = 0


def read_result(result: object, params: Iterable[Tensor]) -> tuple[Tensor, ShardLoss]:
    """The mean loss, and the other values that ``loss_fn`` returned for these parameters."""
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
    return checked_loss(loss, "loss_fn", part.weight, params), part


def _number(value: object) -> float:
    """A number that ``loss_fn`` returned next to the loss."""
    found = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(found, bool) or not isinstance(found, Real):
        raise TypeError(
            f"loss_fn returned (loss, {type(value).__name__}): the second value is the number "
            "of right samples, for instance (logits.argmax(1) == y).sum(), or the loss's "
            "weight, for instance (labels != -100).sum()"
        )
    return float(found)


def host_weight(value: object) -> float:
    """A weight as a number; a synchronization, after that of the loss."""
    weight = check_weight("the weight that loss_fn returned", value)
    return weight if isinstance(weight, float) else check_weight("weight", weight.cpu())  # type: ignore[return-value]


def read_correct(number: float) -> int:
    """A number of right samples, as an integer."""
    if not number.is_integer() or number < 0:
        raise ValueError(
            f"loss_fn returned (loss, {number:g}): the second value is the number of right "
            "samples, not their fraction; for instance (logits.argmax(1) == y).sum(). If it is the "
            "loss's weight, return gpuworker.Weighted(loss, weight)"
        )
    return int(number)


def weights_of(parts: Sequence[ShardLoss], counts: Sequence[int]) -> list[float]:
    """The weight of each replica's loss in the mean: as returned, or its samples.

    Raises:
        ValueError: Some replicas returned a weight, and others with samples did not.
    """
    has_weight = [part.weight is not None for part, n in zip(parts, counts, strict=True) if n]
    if any(has_weight) and not all(has_weight):
        raise ValueError(
            "loss_fn returned a weight on some replicas only, so the weights of the other losses "
            "are unknown: return it for every shard, 0 where nothing counts"
        )
    return [
        float(n) if part.weight is None else part.weight
        for part, n in zip(parts, counts, strict=True)
    ]


class SecondValueClassifier:
    """Classifies the second value of ``(loss, number)`` as a weight or a count of right samples.

    All replicas' numbers of a batch are classified together. They are weights if one of them
    cannot be a count: it exceeds the replica's samples, or is fractional above 1. From then on
    all numbers are weights; until then they are counts.
    """

    def __init__(self) -> None:
        self._are_weights = False
        self._were_counts = False

    def classify(self, parts: Sequence[ShardLoss], counts: Sequence[int]) -> None:
        """Classify the numbers of a batch.

        Raises:
            ValueError: These are weights, but earlier numbers counted as right samples.
        """
        numbers = [
            (p.second, n) for p, n in zip(parts, counts, strict=True) if p.second is not None
        ]
        if not self._are_weights and any(s > n or (s > 1 and s % 1) for s, n in numbers):
            if self._were_counts:
                raise ValueError(
                    "loss_fn returned (loss, number), and the number cannot be a count of right "
                    "samples, as earlier ones were: return gpuworker.Weighted(loss, "
                    "weight), or (loss, correct, weight)"
                )
            self._are_weights = True
        if not self._are_weights:
            self._were_counts = self._were_counts or any(s for s, _ in numbers)

    def resolve(self, part: ShardLoss) -> ShardLoss:
        """Move a replica's number to ``weight`` or ``correct``.

        Raises:
            ValueError: It is neither a weight nor a count.
        """
        if part.second is None:
            return part
        if self._are_weights:
            return part._replace(weight=host_weight(part.second))
        return part._replace(correct=read_correct(part.second))
