"""Reads of a data set that keeps state between them, such as the position of a file or a buffer."""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.core.nested import map_batch, movable_parts

logger = logging.getLogger(__name__)

_NUM_OBSERVED = 3
"""Reads that are observed: a data set may alternate between two buffers."""
_WAIT_S = 1.0
"""Longest wait of an observed read for another one, which may itself wait for this one."""
_MAX_ARRAY_BYTES = 4 << 20
_MAX_OBJECTS = 64


class SharedReads:
    """Serialises the reads of a data set whose own state they change.

    The threads of all workers read one data set object. Its first reads are made one at a time,
    and observed: if they move a file's position, write to tensors or arrays among the attributes,
    or return the memory of an earlier batch again, all further reads are made one at a time, and
    their batches are copied before the next one. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[list[Tensor]] | None = []  # so that their memory is not allocated again
        self._reason = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedReads, ()  # for another process

    @property
    def are_free(self) -> bool:
        """True once reads may be made at the same time, outside :meth:`turn`."""
        return self._kept is None and not self._reason

    @contextmanager
    def turn(self, source: object) -> Iterator[Callable[[Any], Any]]:
        """Context of one read; yields a function that is called with its batch, and returns a copy.

        Args:
            source: The data set, or a function that makes its batches.
        """
        is_locked = self._lock.acquire(timeout=-1 if self._reason else _WAIT_S)
        try:
            before = None if self._reason else dict(_state_of(source))

            def take(batch: Any) -> Any:
                copied = map_batch(batch, lambda part: _copy(part) if _is_plain(part) else part)
                if before is not None:
                    self._observe(source, before, batch)
                return copied

            yield take
        finally:
            if is_locked:
                self._lock.release()

    def _observe(self, source: object, before: dict[str, Any], batch: Any) -> None:
        kept = self._kept
        if kept is None:
            return
        parts = [part for part in movable_parts(batch) if _is_plain(part)]
        earlier = {part.data_ptr() for one in kept for part in one}
        changed = [name for name, value in _state_of(source) if before.get(name, value) != value]
        if changed:
            self._reason = f"changes {changed[0]} whenever it is read"
        elif any(part.data_ptr() in earlier for part in parts):
            self._reason = "returns the memory of an earlier batch again"
        kept.append(parts)
        if self._reason or len(kept) == _NUM_OBSERVED:
            self._kept = None
        if self._reason:
            logger.info("%s %s: one thread at a time reads it", type(source).__name__, self._reason)


def _is_plain(part: Any) -> bool:
    if type(part) is not Tensor or not part.is_cpu or part.layout is not torch.strided:
        return False
    return part.numel() > 0


def _copy(part: Tensor) -> Tensor:
    return part.detach().clone().requires_grad_(part.requires_grad)


def _state_of(source: object) -> Iterator[tuple[str, Any]]:
    """State that reads may change, by name: positions of files, versions of tensors, arrays."""
    found, seen = [("", source)], set()
    for name, value in found:  # grows
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if not value.is_inference():
                yield name, value._version
        elif isinstance(value, np.ndarray):
            if (
                value.flags.writeable
                and value.nbytes <= _MAX_ARRAY_BYTES
                and not value.dtype.hasobject
            ):
                yield name, zlib.crc32(value.tobytes())
        elif callable(getattr(type(value), "tell", None)):
            with suppress(Exception):  # of a pipe, a closed file, or a method of another meaning
                yield name, int(value.tell())  # type: ignore[attr-defined]
        elif len(found) < _MAX_OBJECTS and type(value).__module__ != "builtins":
            parts = getattr(value, "__dict__", {})
            if isinstance(parts, dict):
                # A copy: another thread may add an attribute.
                found += [(name or f"its {key!r}", part) for key, part in parts.copy().items()]
        elif len(found) < _MAX_OBJECTS and isinstance(value, list | tuple) and len(value) <= 8:
            found += [(name, part) for part in value]
