"""Flattening of nested inputs and outputs into tensors, and reconstruction."""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from enum import Enum
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

logger = logging.getLogger(__name__)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)


class NestedSpec:
    """Structure of a nested value without its tensors.

    Containers are tuples (also named ones), lists, mappings and dataclasses. Tensors are leaves;
    other objects are constants.

    Attributes:
        kind: Type of a container, ``Tensor`` for a tensor, ``None`` for a constant.
        keys: Names of the children.
        children: Specs of a container's items.
        value: The constant; for some containers an empty one of the same type.
    """

    __slots__ = ("children", "keys", "kind", "value")

    def __init__(
        self,
        kind: type | None,
        keys: tuple[Any, ...] = (),
        children: tuple[NestedSpec, ...] = (),
        value: Any = None,
    ) -> None:
        self.kind = kind
        self.keys = keys
        self.children = children
        self.value = value

    def build(self, tensors: Iterator[Tensor]) -> Any:
        """Rebuild the value with these tensors, in the order of :func:`flatten`."""
        if self.kind is Tensor:
            return next(tensors)
        if self.kind is None:
            return self.value
        parts = [child.build(tensors) for child in self.children]
        return _assemble(self, parts)

    def difference(self, other: NestedSpec, path: str = "the output") -> str | None:
        """Describe how another structure differs; ``None`` if it does not."""
        if self.kind is not other.kind:
            return f"{path} is {_name(self.kind)} there and {_name(other.kind)} here"
        if self.kind is None and self.value != other.value:
            return f"{path} is {self.value!r} there and {other.value!r} here"
        if self.keys != other.keys:
            return f"{path} has {list(self.keys)} there and {list(other.keys)} here"
        for key, mine, theirs in zip(self.keys, self.children, other.children, strict=True):
            found = mine.difference(theirs, f"{path}[{key!r}]")
            if found is not None:
                return found
        return None


_TENSOR = NestedSpec(Tensor)


def flatten(value: Any, tensors: list[Tensor], *, strict: bool) -> NestedSpec:
    """Flatten a nested value.

    Args:
        value: The value.
        tensors: Its tensors are appended here, in order.
        strict: Refuse an unknown object, which could hide tensors, and replace one in a container
            by ``None``; otherwise such objects are constants.

    Raises:
        TypeError: The value cannot be split along dimension 0, or rebuilt.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_nested:
            raise TypeError(
                f"a tensor of layout {value.layout} cannot be split along dimension 0: pass "
                "a dense one, for instance tensor.to_dense()"
            )
        tensors.append(value)
        return _TENSOR
    if isinstance(value, _PLAIN):
        return NestedSpec(None, value=value)
    if isinstance(value, PackedSequence):
        raise TypeError(
            "a PackedSequence cannot be split along dimension 0: pass the padded batch and "
            "its lengths, and pack in forward"
        )
    if isinstance(value, (np.ndarray, np.generic)):
        raise TypeError("pass tensors, not NumPy arrays: torch.as_tensor(array)")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names: tuple[Any, ...] = tuple(field.name for field in dataclasses.fields(value))
        parts = [getattr(value, name) for name in names]
        empty = None
    elif isinstance(value, (tuple, list)):
        names, parts, empty = tuple(range(len(value))), list(value), None
    elif isinstance(value, Mapping):
        names, parts = tuple(value), list(value.values())
        empty = _emptied(value)
    elif strict:
        raise TypeError(
            f"forward returned a {type(value).__name__}, which cannot be assembled from the "
            "replicas' outputs: return tensors, or tuples, lists, dicts or dataclasses of them"
        )
    else:
        return NestedSpec(None, value=value)
    children = []
    for name, part in zip(names, parts, strict=True):
        if strict and not _can_be_rebuilt(part):
            with _WARNING_LOCK:  # functools.cache may run the function in two threads
                _warn_once(type(value).__name__, str(name), type(part).__name__)
            part = None
        children.append(flatten(part, tensors, strict=strict))
    return NestedSpec(type(value), names, tuple(children), empty)


def _can_be_rebuilt(part: Any) -> bool:
    """True for tensors, constants and containers, and for types that :func:`flatten` refuses."""
    types = (Tensor, *_PLAIN, PackedSequence, np.ndarray, np.generic, tuple, list, Mapping)
    return isinstance(part, types) or (
        dataclasses.is_dataclass(part) and not isinstance(part, type)
    )


_WARNING_LOCK = threading.Lock()


@cache
def _warn_once(container: str, name: str, kind: str) -> None:
    logger.warning(
        "forward returned a %s in %r of a %s, which cannot be assembled from the replicas' "
        "outputs and is replaced by None; call model.module(...) to get it",
        kind,
        name,
        container,
    )


def _emptied(value: Mapping[Any, Any]) -> Any:
    """A copy of a mapping with its type and attributes, but without its values."""
    if type(value) is dict or not isinstance(value, MutableMapping):
        return None
    twin = copy.copy(value)
    for key in list(twin):
        twin[key] = None
    return twin


def _assemble(spec: NestedSpec, parts: list[Any]) -> Any:
    kind = spec.kind
    assert kind is not None, "a container has a type"
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, dict(zip(spec.keys, parts, strict=True)))
    if issubclass(kind, Mapping):
        items = dict(zip(spec.keys, parts, strict=True))
        if spec.value is None:
            return items
        twin = copy.copy(spec.value)
        for key, part in items.items():
            twin[key] = part
        return twin
    if hasattr(kind, "_fields"):
        return kind(*parts)
    return kind(parts)  # type: ignore[call-arg]


def _dataclass(kind: Any, values: dict[str, Any]) -> Any:
    fields = dataclasses.fields(kind)
    made = kind(**{field.name: values[field.name] for field in fields if field.init})
    for field in fields:
        if not field.init:
            object.__setattr__(made, field.name, values[field.name])
    return made


def _name(kind: type | None) -> str:
    return "no container" if kind is None else f"a {kind.__name__}"


def map_batch(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to every tensor and other object with ``.to()`` in nested containers.

    Containers are copied; other values are kept.
    """
    if isinstance(batch, Tensor) or callable(getattr(batch, "to", None)):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_batch(part, change) for part in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_batch(part, change) for part in batch)
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)  # keeps a subclass's attributes, such as a default factory
        made.update({key: map_batch(part, change) for key, part in batch.items()})
        return made
    if isinstance(batch, Mapping):
        return {key: map_batch(part, change) for key, part in batch.items()}
    return batch
