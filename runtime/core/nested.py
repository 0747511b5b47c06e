"""Flattening of nested inputs and outputs into tensors, and reconstruction."""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sized
from enum import Enum
from functools import cache
from operator import is_
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

logger = logging.getLogger(__name__)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)


_PACKED = (
    "a PackedSequence cannot be split along dimension 0: pass the padded batch and its lengths, "
    "and pack in forward"
)


class NestedSpec:
    """Structure of a nested value without its tensors.

    Containers are tuples (also named ones), lists, mappings and dataclasses. Tensors are leaves;
    other objects are constants, also mappings that items alone cannot fill.

    Attributes:
        kind: Type of a container, ``Tensor`` for a tensor, ``None`` for a constant.
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


def flatten(
    value: Any,
    tensors: list[Tensor],
    *,
    strict: bool,
    objects: list[NestedSpec] | None = None,
) -> NestedSpec:
    """Flatten a nested value.

    Args:
        tensors: Its tensors are appended here, in order.
        strict: Refuse an unknown object, which could hide tensors, and replace one in a container
            by ``None``; otherwise such objects are constants.
        objects: The specs of such constants are appended here.

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
        raise TypeError(_PACKED)
    if isinstance(value, (np.ndarray, np.generic)):
        raise TypeError("pass tensors, not NumPy arrays: torch.as_tensor(array)")
    opened = _open(value)
    if opened is None and strict:
        raise TypeError(
            f"forward returned a {type(value).__name__}, which cannot be assembled from the "
            "replicas' outputs: return tensors, or tuples, lists, dicts or dataclasses of them"
        )
    if opened is None:
        spec = NestedSpec(None, value=value)
        if objects is not None:
            objects.append(spec)
        return spec
    spec, parts = opened
    children = []
    for name, part in zip(spec.keys, parts, strict=True):
        if strict and not _can_be_rebuilt(part):
            with _WARNING_LOCK:  # functools.cache may run the function in two threads
                _warn_once(type(value).__name__, str(name), type(part).__name__)
            part = None
        children.append(flatten(part, tensors, strict=strict, objects=objects))
    spec.children = tuple(children)
    return spec


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_container(value: object) -> bool:
    """True for tuples, lists, mappings and dataclasses."""
    return isinstance(value, (tuple, list, Mapping)) or _is_dataclass(value)


def items_of(value: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """Names and values of a container's items; none for other objects."""
    if _is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value))
        return names, [getattr(value, name) for name in names]
    if isinstance(value, (tuple, list)):
        return tuple(range(len(value))), list(value)
    if isinstance(value, Mapping):
        return tuple(value.keys()), list(value.values())  # tensor dicts iterate over rows
    return (), []


def tensors_in(value: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested containers, with the expressions that select them from ``place``."""
    if isinstance(value, Tensor):
        yield place, value
    has_attributes = _is_dataclass(value)
    for name, part in zip(*items_of(value), strict=True):
        yield from tensors_in(part, f"{place}.{name}" if has_attributes else f"{place}[{name!r}]")


def _open(value: Any) -> tuple[NestedSpec, list[Any]] | None:
    """A container's spec, still without children, and its parts; ``None`` for other objects."""
    kind = type(value)
    if kind is dict:
        return NestedSpec(kind, tuple(value)), list(value.values())
    if kind is not list and kind is not tuple and (not is_container(value) or cuts_itself(value)):
        return None
    names, parts = items_of(value)
    return NestedSpec(type(value), names, value=_emptied(value)), parts


def with_items(value: Any, parts: list[Any]) -> Any:
    """A container like ``value`` with other items; a ``TypeError`` names a class that has none."""
    return _assemble(NestedSpec(type(value), items_of(value)[0], value=_emptied(value)), parts)


def cuts_itself(value: Any) -> bool:
    """True for a container that its items do not make, and any other object with a ``batch_size``.

    So are immutable mappings, and containers that keep the size of their batch beside their items.
    """
    if isinstance(value, Mapping) and not _is_dataclass(value):
        if type(value) in _MADE_OF_ITEMS:
            return False
        twin = _emptied(value)
        return twin is None or own_size(twin) is not None
    size = own_size(value)
    if size is None or not is_container(value):
        return size is not None
    return own_size(with_items(value, items_of(value)[1])) != size


def is_batch(value: object) -> bool:
    """True for a dataclass, and for an object that cuts itself or that can be moved to a device."""
    if isinstance(value, (Tensor, torch.nn.Module)):
        return False
    return _is_dataclass(value) or cuts_itself(value) or callable(getattr(value, "to", None))


def own_size(value: object) -> int | None:
    """The size of the batch that an object has as ``batch_size``, other than as an item."""
    try:
        size = getattr(value, "batch_size", None)
    except Exception:  # of a property
        return None
    if size is None or "batch_size" in items_of(value)[0]:
        return None
    size = size[0] if isinstance(size, tuple) and size else size
    return size if type(size) is int else None


def _can_be_rebuilt(part: Any) -> bool:
    """True for tensors, constants and containers, and for types that :func:`flatten` refuses."""
    types = (Tensor, *_PLAIN, PackedSequence, np.ndarray, np.generic, tuple, list, Mapping)
    return isinstance(part, types) or _is_dataclass(part)


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


_MADE_OF_ITEMS = (dict, MappingProxyType)


def _emptied(value: object) -> Any:
    """A copy of a list or mapping with its type and attributes, but without its values.

    ``None`` for plain ones, for immutable mappings and for other objects.
    """
    if type(value) in (list, dict) or _is_dataclass(value):
        return None
    if isinstance(value, list):
        twin: Any = copy.copy(value)
        twin.clear()
        return twin
    if not isinstance(value, MutableMapping):
        return None
    twin = copy.copy(value)
    try:
        for key in value.keys():  # noqa: SIM118
            twin[key] = None
    except TypeError:
        return None
    return twin


def _assemble(spec: NestedSpec, parts: list[Any]) -> Any:
    """The container that a spec describes; a ``TypeError`` names a class that does not allow it."""
    kind = spec.kind
    assert kind is not None, "a container has a type"
    if spec.value is not None:
        twin = copy.copy(spec.value)
        if isinstance(twin, list):
            twin.extend(parts)
            return twin
        for key, part in zip(spec.keys, parts, strict=True):
            twin[key] = part
        return twin
    try:
        if dataclasses.is_dataclass(kind):
            return _dataclass(kind, dict(zip(spec.keys, parts, strict=True)))
        if issubclass(kind, Mapping):
            return kind(dict(zip(spec.keys, parts, strict=True)))  # type: ignore[call-arg]
        make: Callable[[list[Any]], Any] = getattr(kind, "_make", kind)  # of named tuples
        return make(parts)
    except TypeError as error:
        raise TypeError(
            f"a {kind.__name__} cannot be made from its parts ({error}): pass the parts, or a "
            "class whose constructor takes them"
        ) from error


def _dataclass(kind: Any, values: dict[str, Any]) -> Any:
    """A dataclass with these fields; constants that its constructor computes stay as they are."""
    fields = dataclasses.fields(kind)
    made = kind(**{field.name: values[field.name] for field in fields if field.init})
    computes = hasattr(kind, "__post_init__")
    for field in fields:
        value = values[field.name]
        if field.init or (computes and isinstance(value, _PLAIN) and hasattr(made, field.name)):
            continue
        object.__setattr__(made, field.name, value)
    return made


def _name(kind: type | None) -> str:
    return "no container" if kind is None else f"a {kind.__name__}"


def map_batch(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to every tensor and other object with ``.to()`` in nested containers.

    Lists and mutable mappings are copied, other containers if a part changes; other values are
    kept.

    Raises:
        TypeError: A container cannot be made from its parts; names its class.
    """
    if isinstance(batch, Tensor) or callable(getattr(batch, "to", None)):
        return change(batch)
    if isinstance(batch, Mapping) and not _is_dataclass(batch):
        items = {key: map_batch(part, change) for key, part in batch.items()}
        if isinstance(batch, MutableMapping):
            made = copy.copy(batch)  # keeps a subclass's attributes, such as a default factory
            made.update(items)
            return made
        if all(map(is_, items.values(), batch.values())):
            return batch
        return _assemble(NestedSpec(type(batch), tuple(items)), list(items.values()))
    opened = _open(batch)
    if opened is None:
        return batch
    spec, parts = opened
    changed = [map_batch(part, change) for part in parts]
    if not isinstance(batch, list) and all(map(is_, changed, parts)):
        return batch
    return _assemble(spec, changed)


def movable_parts(batch: Any) -> list[Any]:
    """All tensors and other objects with ``.to()`` in ``batch``, in container order."""
    parts: list[Any] = []

    def keep(part: Any) -> Any:
        parts.append(part)
        return part

    map_batch(batch, keep)
    return parts


def num_rows(value: Any) -> int | None:
    """The size of a batch: its ``batch_size``, else rows of its first tensor, else its length."""
    if isinstance(value, Tensor):
        return value.size(0) if value.dim() else None
    size = own_size(value)
    if size is not None or isinstance(value, (str, bytes)):
        return size
    sizes = map(num_rows, items_of(value)[1])
    found = next((size for size in sizes if size is not None), None)
    return len(value) if found is None and isinstance(value, Sized) else found


def piece_of(value: Any, start: int, stop: int, num_samples: int) -> Any:
    """Samples of an object that its class cuts, by slices, ``split`` or its constructor.

    Args:
        value: The object, with ``num_samples`` samples.
        start: First sample.
        stop: One past the last sample.
        num_samples: Size of the whole batch.

    Raises:
        TypeError: The result is not of its class, or has another number of samples.
    """
    if isinstance(value, PackedSequence):
        raise TypeError(_PACKED)
    if stop - start == num_samples:
        return value
    for cut in (_indexed, _split, _made_anew):
        try:
            piece = cut(value, start, stop, num_samples)
        except Exception:
            logger.debug("%s of a %s", cut.__name__, type(value).__name__, exc_info=True)
            continue
        if type(piece) is type(value) and num_rows(piece) == stop - start:
            return piece
    kind = type(value).__name__
    raise TypeError(
        f"a {kind} of {num_samples} samples cannot be divided: neither {kind}[{start}:{stop}] nor "
        f"its split(...) or constructor gives a {kind} of {stop - start} samples. Let its "
        "__getitem__ take slices, or pass its tensors, in a dict for example"
    )


def _indexed(value: Any, start: int, stop: int, num_samples: int) -> Any:
    return value[start:stop]


def _split(value: Any, start: int, stop: int, num_samples: int) -> Any:
    sizes = [size for size in (start, stop - start, num_samples - stop) if size]
    return value.split(sizes)[1 if start else 0]


def _made_anew(value: Any, start: int, stop: int, num_samples: int) -> Any:
    """A container with cut items, unless its constructor loses an attribute."""
    piece = with_items(value, _cut_items(value, start, stop, num_samples))
    sizes = (num_samples, stop - start)
    for name, old in getattr(value, "__dict__", {}).items():
        new = getattr(piece, name)
        is_plain = isinstance(old, _PLAIN)
        if type(new) is not type(old) or (is_plain and new != old and (old, new) != sizes):
            raise TypeError(f"another {name}")
    return piece


def rows_beside(value: Any, num_samples: int) -> dict[str, Any]:
    """Attributes of a container that have an entry for each sample."""
    return {
        name: rows
        for name, rows in getattr(value, "__dict__", {}).items()
        if isinstance(rows, (list, Tensor)) and len(rows) == num_samples
    }


def cut_attributes(piece: Any, start: int, stop: int, num_samples: int) -> Any:
    """Cut the attributes of a new container that have an entry for each sample; returns it."""
    if not _is_dataclass(piece):
        for name, rows in rows_beside(piece, num_samples).items():
            setattr(piece, name, rows[start:stop])
    return piece


def _cut_items(value: Any, start: int, stop: int, num_samples: int) -> list[Any]:
    return [
        stop - start
        if name == "batch_size" and part == num_samples
        else cut_batch(part, start, stop, num_samples)
        for name, part in zip(*items_of(value), strict=True)
    ]


def cut_batch(value: Any, start: int, stop: int, num_samples: int) -> Any:
    """Samples of a nested batch; parts without an entry for each sample are kept.

    Raises:
        TypeError: The class of a part allows no pieces; see :func:`piece_of`.
    """
    if isinstance(value, Tensor):
        has_rows = value.dim() and len(value) == num_samples
        return like(value[start:stop], value) if has_rows else value
    if isinstance(value, (list, tuple)) and len(value) == num_samples:
        is_text = all(isinstance(part, (str, bytes)) for part in value)
        is_list = isinstance(value, list) and not any(isinstance(part, Tensor) for part in value)
        if is_text or is_list:
            return value[start:stop]
    if is_batch(value):
        return piece_of(value, start, stop, num_samples)
    if is_container(value):
        piece = with_items(value, _cut_items(value, start, stop, num_samples))
        return cut_attributes(piece, start, stop, num_samples)
    return value


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """A part of a tensor, of its class and with its attributes."""
    if type(part) is not type(tensor) and not isinstance(tensor, torch.nn.Parameter):
        part = part.as_subclass(type(tensor))
    if tensor.__dict__:
        part.__dict__.update(tensor.__dict__)
    return part


def held_parts(value: Any) -> list[Any]:
    """Tensors and objects with ``.to()`` among the items or attributes of an object."""
    if isinstance(value, (type, torch.nn.Module)):
        return []
    content = items_of(value)[1]
    if not is_container(value):
        slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
        content = [*slots, *getattr(value, "__dict__", {}).values()]
    return movable_parts(content)
