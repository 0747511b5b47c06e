"""Changes that reads of a data set make to what it refers to."""

from __future__ import annotations

import sys
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from runtime.core.references import held_by

MEMORY = (Tensor, np.ndarray, bytearray)

_NUM_COMPARED = 8
"""Samples of a read after each of which attributes are compared."""
_MAX_OBJECTS = 256
"""Objects and containers that are searched."""
_MAX_LEAVES = 1024
"""Files, tensors and arrays that are compared."""
_MAX_ELEMENTS = 64
"""Objects of one container that are searched; elements of longer ones are not compared."""
_MAX_UNDECIDED = 64
"""Attributes and files that are compared after each further read."""
_MAX_ARRAY_BYTES = 4 << 20
_MAX_ALL_BYTES = 16 << 20

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, range, slice, ModuleType)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_OPAQUE = frozenset(
    ("_thread", "threading", "queue", "logging", "multiprocessing", "runtime", "coordinator")
)
"""Modules whose objects are made for several threads, or are no part of the data set."""
_HANDLES = frozenset(
    ("av", "cv2", "decord", "netCDF4", "osgeo", "rasterio", "sqlite3", "torchcodec")
)
"""Modules whose objects are for one thread at a time, and have no position to compare."""


class ReadChanges:
    """Changes that reads make to files, memory and attributes. Used by one read at a time.

    Args:
        sources: The data set, and the function that makes its batches.
    """

    def __init__(self, sources: Sequence[object]) -> None:
        self._sources = sources
        self._attributes: dict[tuple[int, Any], Change] = {}
        self._nodes: list[Node] = []
        self._states: list[Any] = []
        self._values: dict[tuple[int, Any], Any] = {}
        self._num_compared = 0

    def begin(self) -> None:
        self._nodes = reachable(self._sources)
        self._states = list(_states_of(self._nodes))
        self._values = {place: value for _, place, value in _values_of(self._nodes)}
        self._num_compared = 0

    def sample_read(self, position: int) -> None:
        """Compare attributes after a sample of the read."""
        if self._num_compared < _NUM_COMPARED:
            self._num_compared += 1
            self._compare((position,), {1})

    def end(self, positions: Sequence[int], *, is_last: bool) -> list[Change]:
        """End a read.

        Args:
            is_last: No other read will be observed.

        Returns:
            The changes that other reads at the same time would see.
        """
        self._compare(positions, {1, len(positions) - self._num_compared})
        states = zip(self._nodes, self._states, _states_of(self._nodes), strict=True)
        found = [
            Change(node)
            for node, before, now in states
            if before is not None and now is not None and before != now
        ]
        return found + [each for each in self._attributes.values() if each.is_state(is_last)]

    def undecided(self) -> list[Change]:
        """Attributes that were set once, and files that were not moved, after the last read."""
        once = (change for change in self._attributes.values() if change.may_be_set_again)
        files = (
            Change(node, value=position)
            for node in self._nodes
            if (position := _position_of(node.value)) is not None
        )
        return list(islice(chain(once, files), _MAX_UNDECIDED))

    def _compare(self, positions: Sequence[int], steps: set[int]) -> None:
        for node, place, value in _values_of(self._nodes):
            before = self._values.get(place, _ABSENT)
            if before is not value:
                self._values[place] = value
                change = self._attributes.setdefault(place, Change(node, place[1]))
                change.add(before, value, positions, steps)


_ABSENT = object()
_STATE = object()


@dataclass(slots=True, eq=False)
class Change:
    """A file or memory that reads change, or an attribute that they set.

    Attributes:
        node: The file or memory, or the object with the attribute.
        key: The attribute, or key of a dict.
        value: Its last value; of a file, its position.
        num: Number of reads that have set it.
    """

    node: Node
    key: Any = _STATE
    value: Any = None
    num: int = 0
    _is_count: bool = True
    _is_index: bool = True

    def add(self, before: Any, value: Any, positions: Sequence[int], steps: set[int]) -> None:
        """Add a read that has set the attribute.

        Args:
            before: Its value before.
            steps: Increments of a counter of samples or batches.
        """
        self.num += 1
        self.value = value
        if before is not _ABSENT:
            self._is_count &= type(before) is type(value) is int and value - before in steps
        # In order, the index of the sample grows like a counter.
        self._is_index &= type(value) is int and value in (*positions[:1], *positions[-1:])

    @property
    def is_attribute(self) -> bool:
        """False for a file or memory."""
        return self.key is not _STATE

    def is_state(self, is_last: bool) -> bool:
        """True if reads have set the attribute again, other than by counting."""
        return self.num > 1 and (not self._is_count or (self._is_index and is_last))

    @property
    def may_be_set_again(self) -> bool:
        """True if one read has set it, and it is an attribute of an object."""
        return self.num == 1 and self.key in getattr(self.node.value, "__dict__", ())

    def has_changed(self, num_samples: int) -> bool:
        """True if it is not as it was in the first reads, other than by counting."""
        if not self.is_attribute:
            now = _position_of(self.node.value)
            return now is not None and now != self.value
        before, self.value = self.value, getattr(self.node.value, self.key, None)
        if type(before) is type(self.value) is int and self.value - before in (1, num_samples):
            return False
        return before is not self.value

    def __str__(self) -> str:
        node, key = self.node, self.key
        if not self.is_attribute:
            if node.parent is None:
                return f"{type(node.value).__name__} changes its position"
            node, key = node.parent, node.name
        while node.parent is not None and isinstance(node.value, _CONTAINERS):
            node, key = node.parent, node.name
        owner: Any = node.value
        kind = owner if isinstance(owner, type | FunctionType) else type(owner)
        return f"{kind.__qualname__} {'sets' if self.is_attribute else 'changes'} its {key!r}"


@dataclass(slots=True, eq=False)
class Node:
    """An object to which a data set refers.

    Attributes:
        parent: The object that refers to it; ``None`` for the data set itself.
    """

    value: Any
    parent: Node | None = None
    name: Any = ""

    def path(self) -> Iterator[Any]:
        """The object, and those through which the data set refers to it."""
        node: Node | None = self
        while node is not None:
            yield node.value
            node = node.parent


def reachable(sources: Sequence[object]) -> list[Node]:
    """The files, memory and objects to which the sources refer, breadth first."""
    nodes = [Node(source) for source in sources]
    seen = {id(source) for source in sources}
    num_objects = len(nodes)
    for node in nodes:  # grows
        if isinstance(node.value, MEMORY):
            continue
        num_elements = 0
        for name, value in held_by(node.value):
            if id(value) in seen or isinstance(value, _CONSTANTS):
                continue
            if _position_of(value) is None and not isinstance(value, MEMORY):
                num_elements += 1
                if num_elements > _MAX_ELEMENTS or num_objects == _MAX_OBJECTS or _is_opaque(value):
                    continue
                num_objects += 1
            elif len(nodes) - num_objects == _MAX_LEAVES or _is_no_part(value):
                continue
            seen.add(id(value))
            nodes.append(Node(value, node, name))
    return nodes


def _is_opaque(value: Any) -> bool:
    return _package_of(type(value)) in _OPAQUE or isinstance(value, threading.local)


def _is_no_part(value: Any) -> bool:
    """True for memory maps, parameters of models and the streams of the process."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return isinstance(value, np.memmap | nn.Parameter) or any(value is each for each in streams)


def _states_of(nodes: Sequence[Node]) -> Iterator[Any]:
    """State of each file and memory: equal before and after a read that does not change it."""
    left = _MAX_ALL_BYTES
    for node in nodes:
        value = node.value
        if isinstance(value, Tensor):
            yield None if value.is_inference() else value._version
        elif isinstance(value, np.ndarray | bytearray):
            num_bytes = value.nbytes if isinstance(value, np.ndarray) else len(value)
            if num_bytes <= min(left, _MAX_ARRAY_BYTES) and _is_writable(value):
                left -= num_bytes
                yield zlib.crc32(value.tobytes() if isinstance(value, np.ndarray) else value)
            else:
                yield None
        else:
            yield _position_of(value)


def _is_writable(value: Any) -> bool:
    return isinstance(value, bytearray) or (value.flags.writeable and not value.dtype.hasobject)


def _position_of(value: Any) -> Any:
    """Position of a file, an object that equals no other for a pipe or socket, else ``None``."""
    kind = type(value)
    if not _may_be_file(kind):  # type: ignore[arg-type]
        return None
    if _package_of(kind) in _HANDLES:
        return object()
    with suppress(Exception):  # closed, without a position, or a method of another meaning
        return int(value.tell())
    with suppress(Exception):
        return object() if value.fileno() >= 0 else None
    return None


@lru_cache(1024)
def _may_be_file(kind: type) -> bool:
    methods = (getattr(kind, name, None) for name in ("tell", "fileno"))
    return _package_of(kind) in _HANDLES or any(map(callable, methods))


def _package_of(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _values_of(nodes: Sequence[Node]) -> Iterator[tuple[Node, tuple[int, Any], Any]]:
    """Object, place and value of each attribute, and of each element of a short dict or list."""
    for node in nodes:
        value = node.value
        if isinstance(value, (*MEMORY, tuple, set, frozenset, deque)):
            continue
        if isinstance(value, dict | list) and len(value) > _MAX_ELEMENTS:
            continue
        for key, held in held_by(value):
            yield node, (id(value), key), held
