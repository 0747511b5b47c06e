"""Tensors of the global state: summed in rounds, and by name for healing and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from coordinator.messages import Payload

_PARTS = {"params": "params", "buffers": "buffers", "other_buffers": "taken"}
"""Fields of a payload, and their names in stored and sent tensors."""


def on_the_wire(t: Tensor) -> Tensor:
    """A tensor as it is summed between machines: real, contiguous, float32 or better."""
    real = torch.view_as_real(t) if t.is_complex() else t
    if real.dtype in (torch.float32, torch.float64):
        return real.contiguous()
    return real.to(torch.float32 if real.is_floating_point() else torch.float64)


def from_the_wire(summed: Tensor, like: Tensor) -> Tensor:
    """The opposite of :func:`on_the_wire`, for a tensor like this one."""
    if like.is_complex():
        return torch.view_as_complex(summed).to(like.dtype)
    if like.is_floating_point():
        return summed.to(like.dtype)
    return summed.round().to(like.dtype)


def contribution(
    state: Payload, own: Payload | None, scale: float, *, heaviest: bool
) -> list[Tensor]:
    """What this machine adds to the sums of a round.

    Args:
        state: The global state.
        own: This machine's average; ``None``: it has trained nothing.
        scale: Its part of the weights.
        heaviest: Whether the buffers that are not averaged are its own.

    Returns:
        Tensors to be summed: what it has taken from the parameters and float buffers, and the
        other buffers or zeros.
    """
    parts: list[Tensor] = []
    for name in ("params", "buffers"):
        flats = getattr(state, name)
        mine = flats if own is None else getattr(own, name)
        pairs = zip(flats, mine, strict=True)
        parts += [on_the_wire(g).sub(on_the_wire(s)).mul_(scale) for g, s in pairs]
    others = state.other_buffers if own is None else own.other_buffers
    return parts + [on_the_wire(t).mul(1.0 if heaviest else 0.0) for t in others]


def split(tensors: Sequence[Tensor], state: Payload) -> tuple[list[Tensor], ...]:
    """Summed tensors by the parts of a payload: parameters, buffers, others."""
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


def to_tensors(state: Payload, outer: Iterable[Tensor]) -> dict[str, Tensor]:
    """What heals a machine, by name."""
    found = {
        f"{key}.{i}": t for name, key in _PARTS.items() for i, t in enumerate(getattr(state, name))
    }
    return found | {f"outer.{i}": t for i, t in enumerate(outer)}


def from_tensors(tensors: Mapping[str, Tensor], like: Payload) -> tuple[Payload, list[Tensor]]:
    """The state and the outer optimizer's of what :func:`to_tensors` gave.

    Raises:
        ValueError: They are not those of this model; names the first that differs.
    """
    parts: dict[str, tuple[Tensor, ...]] = {}
    for name, key in _PARTS.items():
        found = []
        for i, own in enumerate(getattr(like, name)):
            t = tensors.get(f"{key}.{i}")
            if t is None or t.shape != own.shape or t.dtype != own.dtype:
                raise ValueError(f"the state received has another {key}.{i} than this model")
            found.append(t)
        parts[name] = tuple(found)
    num_outer = sum(key.startswith("outer.") for key in tensors)
    try:
        return Payload(**parts), [tensors[f"outer.{i}"] for i in range(num_outer)]
    except KeyError as error:
        raise ValueError(f"the state received has no tensor {error}") from error
