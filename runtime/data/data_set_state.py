"""Changes of a data set that loader processes have copies of."""

from __future__ import annotations

import hashlib
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runtime.data.dataset import DatasetAdapter

MAX_SHARED_TENSORS = 64
"""Tensors of which each is sent to another process by a file descriptor of its own; their number
in a message, and in a process, is limited."""


class DataSetState:
    """The state of the data set that a worker's loader processes have.

    Used by one thread at a time.

    Args:
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
        packed = dumps(self._adapter, len(self._held))
        if is_first:  # which moves tensors to shared memory
            self._digest, self._held = digest_of(self._adapter)
        return packed


class Packed:
    """An object in a form that ``ForkingPickler`` sends with few file descriptors.

    The largest storages of its tensors are shared with the other process, as without it, and the
    others are copied into one that is. Tensors of one storage have one there, too.
    """

    def __init__(self, content: Any) -> None:
        self._content = content
        self._parts: tuple[bytes, list[Tensor], list[_Place]] | None = None

    def __reduce__(self) -> Any:
        if self._parts is None:
            packer = _Packer(file := io.BytesIO(), pickle.HIGHEST_PROTOCOL)
            packer.dump(self._content)
            self._parts = (file.getvalue(), *_gathered(packer.tensors))
        return _unpack, self._parts


class _Place(NamedTuple):
    """A tensor as a part of one of several storages."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Packer(ForkingPickler):
    """Pickles plain tensors by their number in ``tensors``."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.device.type != "cpu":
            return None
        if obj.requires_grad or obj.is_quantized or obj.is_conj() or obj.is_neg():
            return None
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)
        return number


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def _gathered(tensors: list[Tensor]) -> tuple[list[Tensor], list[_Place]]:
    """The storages of ``tensors``, the smaller ones in one, and each tensor's place in them."""
    storages = {s._cdata: s for s in (t.untyped_storage() for t in tensors)}
    order = sorted(storages, key=lambda key: storages[key].nbytes(), reverse=True)
    order, small = order[: MAX_SHARED_TENSORS // 2], order[MAX_SHARED_TENSORS // 2 :]
    starts, size = {}, 0
    for key in small:
        starts[key] = size
        size += -(-storages[key].nbytes() // 64) * 64  # aligned for every dtype
    common = torch.empty(size, dtype=torch.uint8)
    for key, start in starts.items():
        part = _bytes_of(storages[key])
        common[start : start + len(part)] = part
    numbers = {key: i for i, key in enumerate(order)}
    places = []
    for t in tensors:
        key = t.untyped_storage()._cdata
        offset = starts.get(key, 0) // t.itemsize + t.storage_offset()
        number = numbers.get(key, len(order))
        places.append(_Place(number, t.dtype, int(offset), tuple(t.shape), t.stride()))
    return [*(_bytes_of(storages[key]) for key in order), common], places


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _unpack(packed: bytes, storages: list[Tensor], places: list[_Place]) -> Any:
    tensors = [
        torch.empty(0, dtype=each.dtype).set_(
            storages[each.storage].untyped_storage(), each.offset, each.shape, each.stride
        )
        for each in places
    ]
    return _Unpacker(io.BytesIO(packed), tensors).load()


def dumps(content: Any, num_tensors: int) -> bytes:
    """Pickle an object that holds ``num_tensors`` tensors for another process."""
    sent = Packed(content) if num_tensors > MAX_SHARED_TENSORS else content
    return bytes(ForkingPickler.dumps(sent))


class _NullFile:
    """A file that discards its content."""

    def write(self, data: Any) -> int:
        return len(memoryview(data))


class _DryPickler(pickle.Pickler):
    """Pickles everything but the contents of tensors and arrays."""

    num_tensors = 0

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            self.num_tensors += 1
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
    if len(digester.tensors) > MAX_SHARED_TENSORS:  # processes have copies of some
        versions = [-1 if t.is_inference() else t._version for t in digester.tensors]
        digest.hash.update(repr(versions).encode())
    return digest.hash.hexdigest(), digester.tensors


def check_picklable(source: object) -> int:
    """Raise ``TypeError``, with the remedy, if ``source`` cannot be sent to a process.

    Returns:
        The number of tensors that it holds.
    """
    pickler = _DryPickler(_NullFile(), pickle.HIGHEST_PROTOCOL)
    _dump(pickler, source)
    return pickler.num_tensors


def _dump(pickler: pickle.Pickler, source: object) -> None:
    try:
        pickler.dump(source)
    except Exception as error:
        raise TypeError(
            f"loader_workers(n) sends the data set and collate_fn to other processes, and they "
            f"cannot be pickled: {error}. Define their classes and functions at the top of a "
            "module, keep data on the CPU and open files in __getitem__, or use loader_workers(0)"
        ) from error
