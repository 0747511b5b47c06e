"""Tensor memory reachable from Python objects."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable

from torch import Tensor


def reachable_bytes(*roots: object) -> int:
    """Bytes of all tensor memory reachable from objects, each storage counted once.

    Follows every reference visible to the garbage collector, gradients included, except those of
    classes, Python modules, functions and bound methods: roots may be models, optimizers and
    containers of them. Tensors saved by autograd graphs are not counted. No other thread may
    modify the objects meanwhile.

    Args:
        roots: The objects to start from.

    Returns:
        The sum in bytes over all devices.
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
            waiting.extend(_referents_of(found))
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


def _referents_of(tensor: Tensor) -> Iterable[object]:
    yield tensor.__dict__
    if tensor.is_leaf or tensor.retains_grad:
        yield tensor.grad
