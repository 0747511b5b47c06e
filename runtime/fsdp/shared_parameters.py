"""Parameters of a module with their tied names; comparison of modules over all ranks."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from runtime.collective import Collective, ReduceOp
from runtime.collective.base import FLOATS
from runtime.core.errors import ReplicaMismatch
from runtime.replica.flat import memory_order


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """One parameter of a module.

    Attributes:
        name: Its first name.
        locations: Each module and attribute that holds it; several for a tied parameter.
    """

    name: str
    parameter: nn.Parameter
    locations: tuple[tuple[nn.Module, str], ...]


def describe_original(shard: nn.Parameter, original: nn.Parameter, name: str) -> None:
    """Set ``original_shape`` and ``original_name``, by which parameter groups can be made."""
    shard.original_shape = original.size()  # type: ignore[attr-defined]
    shard.original_name = name  # type: ignore[attr-defined]


class ParameterClaims:
    """Prevents that two open wrappers shard the same parameter. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[object]]] = {}

    def claim(self, parameters: Iterable[tuple[str, nn.Parameter]], owner: object) -> None:
        """Register the wrapper of parameters, for as long as it lives or until :meth:`release`.

        Raises:
            ValueError: Another wrapper has one of them; none is registered.
        """
        named = list(parameters)
        with self._lock:
            for key in [key for key, (ref, _) in self._owners.items() if ref() is None]:
                del self._owners[key]
            for name, p in named:
                ref, other = self._owners.get(id(p), (None, None))
                if ref is None or other is None or ref() is not p:
                    continue
                if other() not in (None, owner):
                    raise ValueError(
                        f"parameter {name!r} belongs to another FSDP: another rank has wrapped "
                        "this module, or a part of it. Build one module for each rank, or make the "
                        "copies with copy.deepcopy(module) before any rank wraps its own"
                    )
            for _, p in named:
                self._owners[id(p)] = weakref.ref(p), weakref.ref(owner)

    def release(self, owner: object) -> None:
        with self._lock:
            for key in [key for key, (_, ref) in self._owners.items() if ref() is owner]:
                del self._owners[key]


CLAIMS = ParameterClaims()
"""The claims of this process."""


def find_parameters(module: nn.Module) -> list[SharedParameter]:
    """All parameters of a module, in the order of ``named_parameters``.

    Raises:
        TypeError: Not a module.
        ValueError: The module has no parameters, or one that cannot be sharded.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"FSDP wraps a torch.nn.Module, not a {type(module).__name__}")
    locations: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                locations.setdefault(id(parameter), []).append((owner, key))
    found = [
        SharedParameter(name, p, tuple(locations[id(p)])) for name, p in module.named_parameters()
    ]
    if not found:
        raise ValueError(
            f"{type(module).__name__} has no parameters, so there is nothing to shard; call it "
            "without FSDP"
        )
    for each in found:
        if (fault := _unsupported(each.parameter, found[0].parameter.device)) is not None:
            raise ValueError(f"FSDP: parameter {each.name!r} {fault}")
    return found


def _unsupported(parameter: nn.Parameter, device: torch.device) -> str | None:
    if is_lazy(cast("Any", parameter)):
        return "is lazy; run one forward before wrapping, or give the module its sizes"
    if parameter.layout is not torch.strided:
        return f"has the layout {parameter.layout}; only dense parameters can be sharded"
    if parameter.is_meta:
        return "is on the meta device; give it values before wrapping"
    if parameter.device != device:
        return f"is on {parameter.device}, others are on {device}; use one device for each rank"
    if parameter.requires_grad and parameter.dtype not in FLOATS:
        return f"is trainable and {parameter.dtype}; only real floating-point ones can be"
    return None


def describe_module(module: nn.Module, found: Sequence[SharedParameter]) -> list[str]:
    """The properties that must match on every rank, one parameter or buffer per line."""
    lines = []
    for each in found:
        p = each.parameter
        kind = "trainable" if p.requires_grad else "frozen"
        form = f"shape {tuple(p.shape)}, strides {memory_order(p)} and {p.dtype}"
        lines.append(f"{kind} {each.name!r} of {form}")
    for name, buffer in module.named_buffers():
        lines.append(f"a buffer {name!r} of shape {tuple(buffer.shape)} and {buffer.dtype}")
    return lines


def check_same_on_all_ranks(lines: Sequence[str], collective: Collective) -> None:
    """Compare descriptions over all ranks; a collective call.

    Raises:
        ReplicaMismatch: The descriptions differ; raised on every rank, with the first difference.
    """
    text = "\n".join(lines).encode()
    digests = _gather(hashlib.sha256(text).digest(), collective)
    if len(set(digests)) == 1:
        return
    length = torch.tensor([len(text)])
    collective.all_reduce_(length, ReduceOp.MAX)
    padded = text.ljust(int(length.item()), b"\0")
    first, *others = [
        gathered.rstrip(b"\0").decode().split("\n") for gathered in _gather(padded, collective)
    ]
    for rank, other in enumerate(others, 1):
        for index in range(max(len(first), len(other))):
            here, there = (x[index] if index < len(x) else "nothing" for x in (first, other))
            if here != there:
                raise ReplicaMismatch(
                    f"rank {rank} wraps another module than rank 0, or in another way: it has "
                    f"{there}, rank 0 has {here}; build the same on every rank"
                )


def _gather(data: bytes, collective: Collective) -> list[bytes]:
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    gathered = torch.empty(collective.world_size * len(data), dtype=torch.uint8)
    collective.all_gather_into(gathered, mine)
    return [bytes(row.tolist()) for row in gathered.view(collective.world_size, -1)]
