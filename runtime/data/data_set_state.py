"""Changes of a data set that loader processes have copies of."""

from __future__ import annotations

import hashlib
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.data.dataset import DatasetAdapter


class DataSetState:
    """The state of the data set that a worker's loader processes have.

    Used by one thread at a time.

    Args:
        adapter: The data set.
        num_processes: Number of loader processes, each with a copy.
    """

    def __init__(self, adapter: DatasetAdapter, num_processes: int) -> None:
        self._adapter = adapter
        self._num_processes = num_processes
        self.version = 0
        self._digest = ""
        self._epoch = -1
        self._held: list[Tensor] = []  # so that no other tensor gets the address of one of them
        self._num_left = 0

    def sent(self) -> None:
        """Each process has the data set as it is now."""
        self._digest, self._held = digest_of(self._adapter)

    def begin_epoch(self, epoch: int) -> None:
        """Compare the data set to what was sent, once for each epoch.

        Raises:
            TypeError: It cannot be sent any more.
        """
        if epoch == self._epoch:
            return
        self._epoch = epoch
        digest, held = digest_of(self._adapter)
        if digest != self._digest:
            self._digest, self.version = digest, self.version + 1
            self._num_left = self._num_processes
        self._held = held

    def begin_pass(self) -> None:
        """The ``DataLoader`` starts over with its first process."""
        if self._num_left:
            self._num_left = self._num_processes

    def take(self) -> bytes | None:
        """The pickled data set for the next request, if its process may have an older state.

        Consecutive requests of a pass go to the processes in turn.
        """
        if self._num_left == 0:
            return None
        is_first = self._num_left == self._num_processes
        self._num_left -= 1
        packed = bytes(ForkingPickler.dumps(self._adapter))
        if is_first:  # which moves tensors to shared memory
            self._digest, self._held = digest_of(self._adapter)
        return packed


class _NullFile:
    """A file that discards its content."""

    def write(self, data: Any) -> int:
        return len(memoryview(data))


class _DryPickler(pickle.Pickler):
    """Pickles everything but the contents of tensors and arrays."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            if obj.is_cuda:
                raise TypeError("it holds a CUDA tensor")
            return int, ()
        if isinstance(obj, np.ndarray) and not obj.dtype.hasobject:
            return int, ()
        return NotImplemented


class _Digest:
    """A file that keeps a hash of what is written to it."""

    def __init__(self) -> None:
        self.hash = hashlib.sha1(usedforsecurity=False)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(memoryview(data))


class _Digester(_DryPickler):
    """Pickles tensors, which processes share, by their place, and arrays by their contents."""

    def __init__(self, digest: _Digest) -> None:
        super().__init__(digest, pickle.HIGHEST_PROTOCOL)
        self._digest = digest
        self.tensors: list[Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        found = super().reducer_override(obj)
        if found is NotImplemented:
            return found
        if isinstance(obj, Tensor):
            self.tensors.append(obj.detach())
            place = obj.data_ptr() if obj.layout == torch.strided else id(obj)
            return str, (f"{place} {tuple(obj.shape)} {obj.dtype}",)
        if isinstance(obj, np.memmap):
            return str, (f"{obj.filename} {obj.offset} {obj.shape} {obj.dtype} {obj.ctypes.data}",)
        self._digest.hash.update(np.ascontiguousarray(obj).reshape(-1).view(np.uint8).data)
        return str, (f"{obj.shape} {obj.dtype}",)


def digest_of(source: object) -> tuple[str, list[Tensor]]:
    """A digest of all that a process gets with ``source``, and the tensors in it.

    Raises:
        TypeError: It cannot be sent to a process.
    """
    digester = _Digester(digest := _Digest())
    _dump(digester, source)
    return digest.hash.hexdigest(), digester.tensors


def check_picklable(source: object) -> None:
    """Raise ``TypeError``, with the remedy, if ``source`` cannot be sent to a process."""
    _dump(_DryPickler(_NullFile(), pickle.HIGHEST_PROTOCOL), source)


def _dump(pickler: pickle.Pickler, source: object) -> None:
    try:
        pickler.dump(source)
    except Exception as error:
        raise TypeError(
            f"loader_workers(n) sends the data set and collate_fn to other processes, and they "
            f"cannot be pickled: {error}. Define their classes and functions at the top of a "
            "module, keep data on the CPU and open files in __getitem__, or use loader_workers(0)"
        ) from error
