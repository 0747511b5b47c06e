"""Gradients of replicas: their weighted mean, norm, scale and checks."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.collective.base import LOW_PRECISION, Collective, ReduceOp, RegisteredTensors
from runtime.core.loss_weights import Weight, fraction_of, scale_
from runtime.replica.flat import FlatLayout


def average_gradients(grads: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
    """Compute the weighted mean of the gradients of several replicas.

    NaN and infinity propagate. The arguments are not modified, and the result shares no memory
    with them. float16 and bfloat16 are summed in float32.

    Args:
        grads: For each replica a tensor, or a list of tensors, of numbers or of lists. A
            tensor may be ``None`` for a parameter without a gradient: it counts as zero, and
            is ``None`` in the result if it is on all replicas.
        weights: The weight of each replica, for instance its samples; not negative, not all 0.
            Gradients of weight 0 are not used, even if they are NaN. ``None``: equal weights.

    Returns:
        The mean, in the structure of one replica's gradients; ``[]`` for ``[]``.

    Raises:
        ValueError: Gradients of different structures, shapes or dtypes, or invalid weights.
    """
    if not isinstance(grads, Sequence):
        raise TypeError(
            f"grads is a {type(grads).__name__}; pass a list with the gradients of each replica"
        )
    if weights is None:
        weights = [1.0] * len(grads)
    if len(weights) != len(grads):
        raise ValueError(f"{len(weights)} weights for the gradients of {len(grads)} replicas")
    if not grads:
        return []
    total = float(sum(weights))
    if not all(0 <= w < math.inf for w in weights) or not 0 < total < math.inf:
        raise ValueError(
            f"weights {list(weights)}: pass finite numbers, none negative and not all 0"
        )
    with torch.no_grad():
        return _mean(grads, [w / total for w in weights], "the gradient")


def _mean(values: Sequence[Any], factors: Sequence[float], name: str) -> Any:
    present = [value for value in values if value is not None]
    if not present:
        return None
    if isinstance(present[0], Tensor):
        return _mean_of_tensors(values, factors, name)
    if isinstance(present[0], (list, tuple)):
        lengths = {len(v) if isinstance(v, (list, tuple)) else -1 for v in values}
        if len(lengths) > 1:
            raise ValueError(f"{name} has different lengths on the replicas: pass equal structures")
        columns = zip(*values, strict=True)
        return [_mean(c, factors, f"{name}[{i}]") for i, c in enumerate(columns)]
    return sum(f * v for v, f in zip(values, factors, strict=True) if f and v is not None)


def _mean_of_tensors(values: Sequence[Any], factors: Sequence[float], name: str) -> Tensor:
    first = next(value for value in values if value is not None)
    for rank, value in enumerate(values):
        if value is None:
            continue
        if not isinstance(value, Tensor) or (value.shape, value.dtype) != (
            first.shape,
            first.dtype,
        ):
            raise ValueError(f"{name} of replica {rank} has another shape or dtype than the others")
    exact = first.is_floating_point() or first.is_complex()
    wide = torch.float32 if first.dtype in LOW_PRECISION or not exact else first.dtype
    mean = torch.zeros_like(first, dtype=wide)
    for value, factor in zip(values, factors, strict=True):
        if value is not None and factor:
            mean.add_(value.to(mean.device), alpha=factor)
    return mean.to(first.dtype) if exact else mean


def has_non_finite(values: Any) -> bool:
    """Return True if a value is NaN or infinite.

    Args:
        values: A tensor, a number, ``None``, or a list, tuple or dict of these. Reads each
            tensor, so it waits for a GPU.
    """
    if values is None:
        return False
    if isinstance(values, Tensor):
        return not bool(torch.isfinite(values).all())
    if isinstance(values, dict):
        return any(has_non_finite(value) for value in values.values())
    if isinstance(values, (list, tuple)):
        return any(has_non_finite(value) for value in values)
    return not math.isfinite(values)


def gradient_norm(grads: Sequence[Tensor]) -> float:
    """L2 norm of all gradients; not finite if and only if one of their elements is not.

    Reads one value, so it waits for a GPU.
    """
    if not grads:
        return 0.0
    total = float(torch.nn.utils.get_total_norm(grads))
    if math.isfinite(total):
        return total
    # The squares of finite values overflow, in the dtype of the gradient.
    peaks = [float(torch.linalg.vector_norm(g, math.inf)) for g in grads if g.numel()]
    for peak in peaks:  # max() would drop a NaN
        if not math.isfinite(peak):
            return peak
    peak = max(peaks)
    parts = [torch.linalg.vector_norm(_widest(g) / peak).to("cpu") for g in grads]
    return min(peak * float(torch.linalg.vector_norm(torch.stack(parts))), sys.float_info.max)


def _widest(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


class FlatGradients:
    """Gradients in one flat tensor for each dtype, with room for flags and a weight.

    Complex gradients are stored as real and imaginary parts.

    Args:
        like: Tensors of the gradients' shapes, dtypes and strides; on all ranks alike.
        order: Their order in the flat tensors; ``None``: as given.
        num_flags: Number of flags, after the gradients of the first dtype.
        weighed: Add an element for a weight to the widest dtype.
        device: The device; ``None``: that of ``like``.

    Attributes:
        flats: One tensor for each dtype, filled with zeros at first.
        parts: The gradients in each, without flags and weight.
        views: The gradient for each of ``like``.
        flags: The flags.
        weight: The weight, of shape ``(1,)``.
        weight_apart: True if the weight is a tensor of its own: 16 bits would round it to three
            digits.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        order: Sequence[int] | None = None,
        *,
        num_flags: int = 0,
        weighed: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self._facts = _facts(like)
        layout = FlatLayout(like, order)
        self._groups = layout.groups
        dtypes = [like[group[0]].dtype for group in layout.groups]
        widths = [2 if dtype.is_complex else 1 for dtype in dtypes]
        dtypes = [dtype.to_real() for dtype in dtypes]
        widest = max(range(len(dtypes)), key=lambda i: (dtypes[i].itemsize, -i))
        self.weight_apart = weighed and dtypes[widest] in LOW_PRECISION
        self._room = [num_flags, *[0] * (len(dtypes) - 1)]
        self._room[widest] += weighed and not self.weight_apart
        self._ends = [
            [end * width for end in layout.ends(number)] for number, width in enumerate(widths)
        ]
        device = device or like[0].device
        self.flats = RegisteredTensors(
            torch.zeros(ends[-1] + more, dtype=dtype, device=device)
            for ends, more, dtype in zip(self._ends, self._room, dtypes, strict=True)
        )
        self.parts = [flat[: ends[-1]] for flat, ends in zip(self.flats, self._ends, strict=True)]
        self.flags = self.flats[0][self._ends[0][-1] :][:num_flags]
        self.weight = self.flats[widest][-1:]
        if self.weight_apart:
            self.weight = self.weight.new_zeros(1, dtype=torch.float32)
        in_dtype = [
            part if width == 1 else torch.view_as_complex(part.view(-1, 2))
            for part, width in zip(self.parts, widths, strict=True)
        ]
        self.views = layout.views(in_dtype, like)

    def fits(self, like: Sequence[Tensor]) -> bool:
        """True if the layout is that of these tensors."""
        return self._facts == _facts(like)

    def load(self, grads: Sequence[Tensor | None]) -> None:
        """Copy gradients to :attr:`flats`; missing ones are zeros there."""
        copy_gradients(self.views, grads, complete=not [g for g in grads if g is None])

    def extents(self) -> Iterator[tuple[Sequence[int], Sequence[int], Tensor, int]]:
        """For each flat tensor the indices of its gradients, their ends in it, the tensor itself,
        and the number of elements after them.
        """
        return zip(self._groups, self._ends, self.flats, self._room, strict=True)


def _facts(like: Sequence[Tensor]) -> list[tuple[torch.dtype, torch.Size, tuple[int, ...]]]:
    return [(t.dtype, t.size(), t.stride()) for t in like]


def copy_gradients(
    views: Sequence[Tensor], grads: Sequence[Tensor | None], *, complete: bool
) -> None:
    """Copy gradients to views, where missing ones are zeros.

    Args:
        views: The targets.
        grads: One for each.
        complete: True if none is missing.
    """
    if complete:
        torch._foreach_copy_(views, grads)  # type: ignore[arg-type]
        return
    for view, grad in zip(views, grads, strict=True):
        view.zero_() if grad is None else view.copy_(grad)


def refuse_sparse(names: Iterable[str], grads: Iterable[Tensor | None], where: str = "") -> None:
    """Check that gradients can be copied into flat tensors.

    Args:
        names: The name of each parameter.
        grads: Its gradient, if it has one.

    Raises:
        ValueError: One is sparse.
    """
    for name, grad in zip(names, grads, strict=True):
        if grad is not None and grad.layout is not torch.strided:
            raise ValueError(
                f"parameter {name!r}{where} has a sparse gradient, which replicas cannot average: "
                "build the embedding with sparse=False"
            )


def check_gradients(names: Sequence[str], params: Sequence[Tensor], function: str) -> None:
    """Check the gradients of the first loss of a user function.

    Raises:
        ValueError: No parameter has one, or one is sparse.
    """
    if all(p.grad is None for p in params):
        raise ValueError(
            f"{function}'s loss depends on no trainable parameter: every gradient is None after "
            f"backward; compute the loss with the model passed to {function}"
        )
    refuse_sparse(names, [p.grad for p in params])


@torch.no_grad()
def scale_for_mean_(
    gradients: Sequence[Tensor], weight: Weight, device: torch.device, collective: Collective
) -> None:
    """Scale a rank's gradients so that their plain mean over the ranks is the weighted mean.

    A collective call, without a host sync: every rank takes part, also with weight 0. If all
    weights are 0, the gradients become zeros.

    Args:
        gradients: The rank's gradients, modified in place.
        weight: The rank's weight.
        device: The device on which the weights are summed.
        collective: The collective of all ranks.
    """
    own = torch.as_tensor(weight, dtype=torch.float64, device=device).reshape(1).clone()
    total = own.clone()
    collective.all_reduce_(total, ReduceOp.SUM)
    scale_(gradients, (fraction_of(own, total) * collective.world_size).reshape(()))
