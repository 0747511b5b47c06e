"""Bytes of tensor memory that objects hold."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable

from torch import Tensor


def reachable_bytes(*roots: object) -> int:
    """Bytes of all tensor memory that objects hold, each piece of memory counted once.

    Follows every reference that the garbage collector sees, gradients included, but for
    classes, Python modules, functions and bound methods: roots may be models, optimizers and
    containers of them. What a graph of autograd saves is not seen. Nobody may change the
    objects meanwhile.

    Args:
        roots: Where to start.

    Returns:
        The sum, in bytes, on all devices together.
    """
    seen: set[int] = set()
    storages: dict[int, int] = {}
    waiting: list[object] = list(roots)
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, _OPAQUE):
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            waiting.extend(_held_by(found))
        else:
            waiting.extend(gc.get_referents(found))
    return sum(storages.values())


_OPAQUE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.FrameType,
    types.CodeType,
)


def _held_by(tensor: Tensor) -> Iterable[object]:
    yield tensor.__dict__
    if tensor.is_leaf or tensor.retains_grad:
        yield tensor.grad
