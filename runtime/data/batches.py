"""Batches: positions in the epoch, seeded reading, and traversal of their tensors.

A data set's random draws on the CPU come from ``current_worker().generator``, seeded for each batch
by ``(seed, epoch, batch position)``. So a batch is the same in the worker's thread, a loader thread
or a loader process, on any rank and however far it is read ahead.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coordinator.messages import EpochPlan
from runtime.core.context import LoaderView, worker_context
from runtime.core.nested import map_batch, movable_parts
from runtime.core.rng import seed_of, seeded_globals, thread_generator
from runtime.data.dataset import DatasetAdapter
from runtime.device.base import Device
from runtime.device.capture_gate import GATE


class Position(NamedTuple):
    """A batch of an epoch.

    Attributes:
        epoch: Epoch, counted from 0.
        batch: Position of the batch in the epoch's permutation.
        piece: Its samples, ``[start, stop)`` in the permutation, if the plan specifies them.
    """

    epoch: int
    batch: int
    piece: tuple[int, int] | None = None


_LOADER_STREAM, _EPOCH_STREAM = 1, 2  # spawn keys: independent of each other and the permutation


class PlanQueue:
    """A rank's batch positions in the submitted plans, in order. Not thread-safe."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._plans: deque[tuple[int, Iterator[tuple[int, tuple[int, int] | None]]]] = deque()
        self._num_left = 0

    def __len__(self) -> int:
        return self._num_left

    def put(self, plan: EpochPlan) -> None:
        """Append the batches of ``plan``."""
        self._plans.append((plan.epoch, plan.loads(self._rank)))
        self._num_left += plan.num_loads(self._rank)

    def pop(self) -> Position | None:
        """Remove and return the next position; ``None`` if there is none."""
        while self._plans:
            epoch, batches = self._plans[0]
            for batch, piece in batches:
                self._num_left -= 1
                return Position(epoch, batch, piece)
            self._plans.popleft()
        return None

    def clear(self) -> None:
        """Remove all positions."""
        self._plans.clear()
        self._num_left = 0


def batch_generator(seed: int, epoch: int, batch: int) -> torch.Generator:
    """A CPU generator for the draws of one batch."""
    return torch.Generator().manual_seed(seed_of(seed, epoch, batch, stream=_LOADER_STREAM))


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """A CPU generator for a stream's draws in an epoch, seeded as :func:`batch_generator`."""
    return torch.Generator().manual_seed(seed_of(seed, epoch, stream=_EPOCH_STREAM))


_OF_A_THREAD = re.compile(r"\bthread\b")
_IN_A_THREAD = (
    "the data set is read in the thread {!r}, not in the main one: let __getitem__ make what "
    "belongs to a thread, such as a connection to a database, once for each thread, in an "
    "attribute that is a threading.local(); or let loader_workers(n) read it, in the main threads "
    "of other processes"
)


@contextmanager
def in_own_thread() -> Iterator[None]:
    """Context of a read by the data set; an error that names threads has a note on this one."""
    try:
        yield
    except Exception as error:
        thread = threading.current_thread()
        if _OF_A_THREAD.search(str(error)) and thread is not threading.main_thread():
            error.add_note(_IN_A_THREAD.format(thread.name))
        raise


def read_batch(
    adapter: DatasetAdapter,
    indices: Tensor,
    *,
    seed: int,
    rank: int,
    position: Position,
    worker: object = None,
    alone: bool = False,
) -> Any:
    """Load one batch under ``current_worker()`` with the batch's generator.

    With ``alone``, for a process that reads nothing else at the time, also seeds Python's and
    NumPy's global generators. Waits while a CUDA graph is captured, which a data set that uses
    the GPU would break.

    Raises:
        RuntimeError: The data set raised ``StopIteration``, ``SystemExit`` or another exception
            that would end an iteration or a process further out.
    """
    generator = batch_generator(seed, position.epoch, position.batch)
    view = LoaderView(rank, generator, worker)
    others = seeded_globals() if alone else nullcontext()
    with worker_context(view), thread_generator(generator), others, GATE.reading(), in_own_thread():
        try:
            return adapter.load(indices)
        except (StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(
                f"the data set raised {error!r} for batch {position.batch} of epoch "
                f"{position.epoch}: raise another exception there, such as ValueError"
            ) from error


def move_batch(batch: Any, device: torch.device) -> Any:
    """Copy every tensor of ``batch`` to ``device`` with ``.to()``."""
    return map_batch(batch, lambda part: part.to(device))


def pin_batch(batch: Any, context: Device) -> Any:
    """Copy the host tensors of ``batch`` into pinned memory; see ``Device.pin``."""
    return map_batch(batch, lambda part: context.pin(part) if isinstance(part, Tensor) else part)


def copy_batch_to_device(batch: Any, context: Device) -> Any:
    """Copy ``batch`` to a worker's device in the current stream; see ``Device.to_device``."""

    def copy(part: Any) -> Any:
        return context.to_device(part) if isinstance(part, Tensor) else part.to(context.device)

    return map_batch(batch, copy)


def batch_bytes(batch: Any, allocated: Callable[[int], int] = int) -> int:
    """Memory of the tensors of ``batch``.

    Args:
        allocated: Memory allocated for a tensor of the given size, in bytes.
    """
    parts = [part for part in movable_parts(batch) if isinstance(part, Tensor)]
    return sum(allocated(tensor_bytes(part)) for part in parts)


def tensor_bytes(tensor: Tensor) -> int:
    """Memory of a tensor's elements, or of the indices and values of a sparse one, in bytes."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices().nbytes + tensor.col_indices().nbytes + tensor.values().nbytes
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices().nbytes + tensor.row_indices().nbytes + tensor.values().nbytes
    return tensor.nbytes
