"""Tensor subclasses in checkpoints: plain tensors and the name of the class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_CLASS = "gpuworker tensor subclass"


def flatten_subclass(t: Tensor) -> dict[str, Any] | None:
    """The inner tensors of a tensor subclass and the name of its class, not copied.

    Supports classes with ``__tensor_flatten__`` and ``__tensor_unflatten__``, and classes without
    dispatch and attributes of their own, whose data is a strided tensor.

    Returns:
        An argument of :func:`restore_subclasses`; ``None``: the class is not supported.
    """
    kind: Any = type(t)
    found: dict[str, Any] = {_CLASS: _name(kind)}
    if hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__"):
        names, context = t.__tensor_flatten__()  # type: ignore[attr-defined]
        found["inner"] = {name: getattr(t, name) for name in names}
        found.update(context=context, size=tuple(t.size()), stride=tuple(t.stride()))
    elif not (is_wrapper(t) or vars(t)):
        found["data"] = without_class(t)
    else:
        return None
    return found if _find(found[_CLASS]) is kind else None


def is_wrapper(t: Tensor) -> bool:
    """True if the tensor's class keeps its values in other tensors."""
    return type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__


def without_class(t: Tensor) -> Tensor:
    """The detached tensor as a plain one that shares its memory; a wrapper keeps its class."""
    if is_wrapper(t):
        return t.detach()
    with torch._C.DisableTorchFunctionSubclass():
        return t.detach().as_subclass(Tensor)


def is_flattened(value: Any) -> bool:
    """True for a result of :func:`flatten_subclass`."""
    return isinstance(value, dict) and _CLASS in value


def restore_subclasses(value: Any, *, copy: bool = True) -> Any:
    """A copy of a checkpoint's value in which flattened tensors have their class again.

    Classes are looked up among those that the process has imported; nothing is imported.

    Args:
        value: A result of :func:`~runtime.checkpoint.format.plain`.
        copy: Copy tensors; otherwise containers alone.

    Raises:
        ValueError: A class does not exist; the message has its name.
    """
    if isinstance(value, Tensor):
        return value.clone() if copy else value
    if isinstance(value, dict):
        if is_flattened(value):
            return _restored(value, copy=copy)
        kept = type(value)()
        kept.update({key: restore_subclasses(item, copy=copy) for key, item in value.items()})
        return kept
    if isinstance(value, list):
        return [restore_subclasses(item, copy=copy) for item in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(restore_subclasses(item, copy=copy) for item in value)
    return value


def _restored(flattened: dict[str, Any], *, copy: bool) -> Tensor:
    kind = _find(flattened[_CLASS])
    if kind is None:
        raise ValueError(
            f"there is no tensor subclass {flattened[_CLASS]}: import its module before the run"
        )
    restored: Tensor
    if "data" in flattened:
        data = flattened["data"]
        restored = (data.clone() if copy else data).as_subclass(kind)
    else:
        inner = {n: restore_subclasses(t, copy=copy) for n, t in flattened["inner"].items()}
        size, stride = torch.Size(flattened["size"]), tuple(flattened["stride"])
        restored = kind.__tensor_unflatten__(inner, flattened["context"], size, stride)
    return restored


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _find(name: str) -> Any:
    """The class of this name; of several, as a notebook defines, the last."""
    found = [kind for kind in _descendants(Tensor) if _name(kind) == name]
    return found[-1] if found else None


def _descendants(kind: type) -> Iterator[type]:
    child: type
    for child in kind.__subclasses__():
        yield child
        yield from _descendants(child)
