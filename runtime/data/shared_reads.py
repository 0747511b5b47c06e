"""Reads of data sets that share what a read changes, such as the position of a file."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from runtime.core.nested import map_batch, movable_parts
from runtime.core.rng import seeded_globals
from runtime.data.read_changes import MEMORY, Change, Node, ReadChanges, reachable

logger = logging.getLogger(__name__)

_NUM_OBSERVED = 3
"""Reads that are observed: a data set may alternate between two buffers."""
_PATIENCE_S = 60.0
"""Wait for another read after which it is logged."""


class SharedReads:
    """Turns of the reads of a data set, with all other reads that share what they change.

    The threads of all workers, of validations, evaluations and predictions read one data set
    object, or several that hold one file. The first reads of a data set are made one at a time,
    under the locks of all objects that it refers to, and observed. If they move the position of a
    file, write to a tensor or array, return the memory of an earlier batch again, or set an
    attribute again other than by counting, this object is marked, and so are those through which
    the data set refers to it. Each read of a data set that refers to marked objects holds their
    locks: the process has one for each object, and they are taken in the order of their creation.
    Thread-safe.

    Args:
        sources: The data set, and the function that makes its batches; ``None`` is ignored.
        lock: True: all reads are made one at a time, and seed Python's and NumPy's generators;
            False: none waits for another one; ``None``: as observed.
        is_serial: The caller makes one read at a time, so that only other data sets can interfere.
    """

    def __init__(self, *sources: object, lock: bool | None = None, is_serial: bool = False) -> None:
        self._sources = tuple(source for source in sources if source is not None)
        self._lock = lock
        self._is_logged = is_serial or lock is True
        self._num_left = 0 if lock is False or not self._sources else _NUM_OBSERVED
        self._changes = ReadChanges(self._sources)
        self._kept: list[list[Tensor]] = []  # so that their memory is not allocated again
        self._undecided: list[Change] = []
        self._copies = False
        self._marked: set[_Guard] = set()  # so that their marks last
        self._required: tuple[int, tuple[_Guard, ...]] = (-1, ())  # by the number of marks
        if lock:
            self._mark(_whole(self._sources[:1]))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(SharedReads, lock=False), ()  # a loader process reads in one thread

    @property
    def are_free(self) -> bool:
        """True if a read may be made without :meth:`turn`."""
        if self._num_left or self._undecided:
            return False
        return self._lock is False or self._required == (_Guard.num_marks, ())

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Context of one read; waits for other reads that share what it changes."""
        while True:
            marks, is_observed = _Guard.num_marks, self._num_left > 0
            with ExitStack() as held:
                held.enter_context(_held(self._guards(marks, is_observed)))
                if (marks, is_observed) != (_Guard.num_marks, self._num_left > 0):
                    continue  # another read has found changes
                if self._lock:
                    held.enter_context(seeded_globals())
                if is_observed:
                    self._changes.begin()
                sample_read = self._changes.sample_read if is_observed else None
                yield Turn(partial(self._take, is_observed), sample_read)
                return

    def _guards(self, marks: int, is_observed: bool) -> tuple[_Guard, ...]:
        """The locks that a read takes, in order."""
        if self._lock is False or (marks == self._required[0] and not is_observed):
            return self._required[1]
        guards = _guards_of(reachable(self._sources))
        if not is_observed:
            guards = {guard for guard in guards if guard.is_marked}
        if self._lock:
            guards.add(_Guard.of(random))  # stands for the generators of the process
        required = _ordered(guards)
        if not is_observed:
            self._required = marks, required
        return required

    def _take(self, is_observed: bool, batch: Any, positions: Sequence[int] = ()) -> Any:
        if is_observed:
            copied = _copied(batch)
            self._observe(batch, positions)
            return copied
        for change in self._undecided:
            if change.has_changed(len(positions)):
                self._undecided = []
                self._mark([change.node])
                logger.warning(
                    "%s, and did not in its first reads: from now on one thread at a time reads "
                    "it; batches that were read at that time may be wrong. dataset_lock(True) has "
                    "one thread at a time read from the start",
                    change,
                )
                break
        return _copied(batch) if self._copies else batch

    def _observe(self, batch: Any, positions: Sequence[int]) -> None:
        """Evaluate an observed read, before its locks are released."""
        for change in self._changes.end(positions, is_last=self._num_left == 1):
            self._copies |= isinstance(change.node.value, MEMORY) and not change.is_attribute
            level = logging.WARNING if change.is_attribute else logging.INFO
            self._mark([change.node], f"{change} in each read", level)
        parts = [part for part in movable_parts(batch) if _is_plain(part)]
        earlier = {part.data_ptr() for one in self._kept for part in one}
        if any(part.data_ptr() in earlier for part in parts):
            self._copies = True
            name = type(self._sources[0]).__name__
            self._mark(
                _whole(self._sources), f"{name} returns the memory of an earlier batch again"
            )
        self._kept.append(parts)
        if self._num_left == 1:
            self._undecided = [] if self._marked else self._changes.undecided()
            self._changes, self._kept = ReadChanges(()), []
        self._num_left -= 1

    def _mark(self, nodes: Sequence[Node], reason: str = "", level: int = logging.INFO) -> None:
        is_new = not _Guard.of(nodes[0].value).is_marked
        guards = _guards_of(nodes)
        self._marked |= guards
        _Guard.mark(guards)
        if reason and is_new and not self._is_logged and _is_unreported(self._sources[0]):
            self._is_logged = True
            text = "%s: one thread at a time reads it; dataset_lock(False) turns this off"
            logger.log(level, text, reason)


_REPORTED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _is_unreported(source: object) -> bool:
    """False from the second call for an object on: each evaluation observes its data set anew."""
    with suppress(TypeError):  # it cannot be referred to weakly
        if _REPORTED.get(id(source)) is source:
            return False
        _REPORTED[id(source)] = source
    return True


@dataclass(frozen=True, slots=True)
class Turn:
    """One read of a data set.

    Attributes:
        take: Called with the batch and the positions of its samples, if it has any, at the end of
            the read; returns the batch, copied if later reads would overwrite it.
        sample_read: Called with the position of each sample that was read, unless ``None``.
    """

    take: Callable[..., Any]
    sample_read: Callable[[int], None] | None


class _Guard:
    """The lock of an object that reads change.

    Attributes:
        num_marks: Incremented when objects are marked, of which all reads then take the locks.
        owner: The object; kept, so that no other one gets its ``id``.
        number: Position in the order in which locks are taken.
    """

    num_marks: ClassVar[int] = 0
    _all: ClassVar[weakref.WeakValueDictionary[int, _Guard]] = weakref.WeakValueDictionary()
    _lookup: ClassVar[threading.Lock] = threading.Lock()
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, owner: object) -> None:
        self.owner = owner
        self.number = next(self._numbers)
        self.is_marked = False
        self.lock = threading.Lock()

    @classmethod
    def of(cls, value: Any) -> _Guard:
        """The lock of an object; views of one memory have one."""
        with suppress(Exception):  # sparse tensors
            value = value.untyped_storage() if isinstance(value, Tensor) else value
        while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
            value = value.base
        with cls._lookup:
            guard = cls._all.get(id(value))
            if guard is None:
                guard = cls._all[id(value)] = cls(value)
        return guard

    @classmethod
    def mark(cls, guards: Iterable[_Guard]) -> None:
        """Have all reads of data sets that refer to these objects take their locks."""
        with cls._lookup:
            for guard in guards:
                cls.num_marks += not guard.is_marked
                guard.is_marked = True


_LENT: ContextVar[Mapping[_Guard, threading.Lock]] = ContextVar(
    "locks in place of those that the caller holds", default=MappingProxyType({})
)


@contextmanager
def _held(guards: Sequence[_Guard]) -> Iterator[None]:
    """Context of a thread that holds locks, which are in their order.

    Reads that it makes meanwhile, and threads that it starts for them, exclude each other.
    """
    lent = _LENT.get()
    with ExitStack() as held:
        for guard in guards:
            lock = lent.get(guard, guard.lock)
            if not lock.acquire(timeout=_PATIENCE_S):
                name = type(guard.owner).__name__
                logger.warning("a read of %s waits for another one since %g s", name, _PATIENCE_S)
                lock.acquire()
            held.callback(lock.release)
        token = _LENT.set({**lent, **{guard: threading.Lock() for guard in guards}})
        held.callback(_LENT.reset, token)
        yield


@contextmanager
def reading_alone(function: Callable[..., object], lock: bool | None = None) -> Iterator[None]:
    """Context of a function of the user that may read data sets itself.

    No loader then reads what the function refers to and reads change, unless ``lock`` is False.
    Evaluations and predictions that the function makes take turns with each other.
    """
    may_wait = _Guard.num_marks and lock is not False
    guards = _ordered(
        guard for guard in _guards_of(reachable([function]) if may_wait else ()) if guard.is_marked
    )
    with _held(guards):
        yield


def _ordered(guards: Iterable[_Guard]) -> tuple[_Guard, ...]:
    return tuple(sorted(guards, key=lambda guard: guard.number))


def _guards_of(nodes: Iterable[Node]) -> set[_Guard]:
    return {_Guard.of(owner) for node in nodes for owner in node.path()}


def _whole(sources: Sequence[object]) -> list[Node]:
    """The sources and what they refer to, other than through classes and functions."""
    return [
        node
        for node in reachable(sources)
        if not any(isinstance(owner, type | FunctionType) for owner in [*node.path()][:-1])
    ]


def _is_plain(part: Any) -> bool:
    if type(part) is not Tensor or not part.is_cpu or part.layout is not torch.strided:
        return False
    return part.numel() > 0


def _copied(batch: Any) -> Any:
    return map_batch(batch, lambda part: _copy(part) if _is_plain(part) else part)


def _copy(part: Tensor) -> Tensor:
    return part.detach().clone().requires_grad_(part.requires_grad)
