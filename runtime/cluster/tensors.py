"""Tensors of the global state: summed in rounds, and by name for healing and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from coordinator.messages import Payload

_PARTS = {"params": "params", "buffers": "buffers", "other_buffers": "taken"}
"""Fields of a payload, and their names in stored and sent tensors."""


def to_wire(t: Tensor) -> Tensor:
    """The tensor in the form that is summed: real, contiguous, float32 or better."""
    real = torch.view_as_real(t) if t.is_complex() else t
    if real.dtype in (torch.float32, torch.float64):
        return real.contiguous()
    return real.to(torch.float32 if real.is_floating_point() else torch.float64)


def from_wire(summed: Tensor, like: Tensor) -> Tensor:
    """The inverse of :func:`to_wire`, in the dtype of ``like``."""
    if like.is_complex():
        return torch.view_as_complex(summed).to(like.dtype)
    if like.is_floating_point():
        return summed.to(like.dtype)
    return summed.round().to(like.dtype)


def contribution(
    state: Payload, own: Payload | None, scale: float, *, heaviest: bool
) -> list[Tensor]:
    """This machine's addends in a round.

    Args:
        own: This machine's average; ``None`` if it has trained nothing.
        scale: Its share of the weights.
        heaviest: True if the buffers that are not averaged are this machine's.

    Returns:
        Tensors to sum: ``scale * (global - own)`` of parameters and float buffers, then the other
        buffers, or zeros.
    """
    parts: list[Tensor] = []
    for name in ("params", "buffers"):
        flats = getattr(state, name)
        mine = flats if own is None else getattr(own, name)
        pairs = zip(flats, mine, strict=True)
        parts += [to_wire(g).sub(to_wire(s)).mul_(scale) for g, s in pairs]
    others = state.other_buffers if own is None else own.other_buffers
    return parts + [to_wire(t).mul(1.0 if heaviest else 0.0) for t in others]


def split(tensors: Sequence[Tensor], state: Payload) -> tuple[list[Tensor], ...]:
    """Summed tensors by the fields of a payload: parameters, float buffers, other buffers."""
    rest, found = list(tensors), []
    for name in _PARTS:
        count = len(getattr(state, name))
        found.append(rest[:count])
        rest = rest[count:]
    return tuple(found)


def difference(new: Payload, old: Payload) -> Payload:
    """``new - old``, and the new values of the buffers that are not averaged."""

    def minus(name: str) -> tuple[Tensor, ...]:
        pairs = zip(getattr(new, name), getattr(old, name), strict=True)
        return tuple(n - o for n, o in pairs)

    return Payload(
        params=minus("params"), buffers=minus("buffers"), other_buffers=new.other_buffers
    )


def named_tensors(state: Payload, outer: Iterable[Tensor]) -> dict[str, Tensor]:
    """The global state as named tensors, for healing and checkpoints."""
    found = {
        f"{key}.{i}": t for name, key in _PARTS.items() for i, t in enumerate(getattr(state, name))
    }
    return found | {f"outer.{i}": t for i, t in enumerate(outer)}


def state_from_tensors(
    tensors: Mapping[str, Tensor], like: Payload
) -> tuple[Payload, list[Tensor]]:
    """The inverse of :func:`named_tensors`: the state, and the outer optimizer's.

    Raises:
        ValueError: The tensors are not this model's; names the first that differs.
    """
    parts: dict[str, tuple[Tensor, ...]] = {}
    for name, key in _PARTS.items():
        found = []
        for i, own in enumerate(getattr(like, name)):
            t = tensors.get(f"{key}.{i}")
            if t is None or t.shape != own.shape or t.dtype != own.dtype:
                raise ValueError(f"the state received does not match this model in {key}.{i}")
            found.append(t)
        parts[name] = tuple(found)
    num_outer = sum(key.startswith("outer.") for key in tensors)
    try:
        return Payload(**parts), [tensors[f"outer.{i}"] for i in range(num_outer)]
    except KeyError as error:
        raise ValueError(f"the state received has no tensor {error}") from error
