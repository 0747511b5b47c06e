"""Weighted means over replicas whose tensors one thread holds, for :class:`~runtime.loop.ddp.Ddp`.

Three ways: in place in CPU memory, through pinned memory, and over a process group with an
internal thread for each rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.collective import Collective, create_collectives
from runtime.collective.base import LOW_PRECISION
from runtime.device import cuda_api
from runtime.device.cuda_api import Event
from runtime.device.sync import StreamSync
from runtime.loop.rank_threads import Job, RankThreads, first_failure

Tensors = Sequence[Tensor]

_BLOCK = 1 << 18
"""Elements of one rank that are reduced before the next: they stay in cache meanwhile."""
ABORT_S = 10.0
"""How long internal threads may take to come back once their group was aborted."""


class Reduction(ABC):
    """Replaces tensors of all ranks by their weighted mean. For one thread at a time."""

    @abstractmethod
    def mean_(self, tensors: Sequence[Tensors], weights: Sequence[float]) -> None:
        """Give every rank the mean, in place, with the same bits on all of them.

        Behind the work of the calling thread's current stream of each GPU, and in front of
        what follows there. Each tensor keeps its strides.

        Args:
            tensors: ``tensors[rank][i]``, of the same shape and dtype on every rank.
            weights: One for each rank, finite, not negative, not all 0. The values of a
                rank with weight 0 are never used.
        """

    def close(self) -> None:
        """Free what the reduction holds. Idempotent."""
        return


class CpuReduction(Reduction):
    """All replicas are on the CPU: the calling thread reduces where the tensors lie.

    In order of rank, float16 and bfloat16 in float32, as the collectives do.
    """

    def mean_(self, tensors: Sequence[Tensors], weights: Sequence[float]) -> None:
        """As :meth:`Reduction.mean_`."""
        total = float(sum(weights))
        factors = [weight / total for weight in weights]
        with torch.no_grad():
            for block in _blocks(tensors[0]):
                _mean_of_block([[own[i] for i in block] for own in tensors], factors)


def _blocks(tensors: Tensors) -> Iterator[list[int]]:
    """Indices of tensors of one dtype that are reduced together."""
    order = sorted(range(len(tensors)), key=lambda i: str(tensors[i].dtype))
    block: list[int] = []
    size = 0
    for i in order:
        tensor = tensors[i]
        if block and (size + tensor.numel() > _BLOCK or tensors[block[0]].dtype != tensor.dtype):
            yield block
            block, size = [], 0
        block.append(i)
        size += tensor.numel()
    if block:
        yield block


def _mean_of_block(tensors: list[list[Tensor]], factors: Sequence[float]) -> None:
    # What has the factor 0 is left out, for it may be NaN.
    first, *others = [rank for rank, factor in enumerate(factors) if factor]
    mean = tensors[first]
    if mean[0].dtype in LOW_PRECISION:
        mean = [tensor.float() for tensor in mean]
    if others:
        # Scaled before the sum, so that huge values do not overflow.
        torch._foreach_mul_(mean, factors[first])
        for rank in others:
            torch._foreach_add_(mean, tensors[rank], alpha=factors[rank])
    for target in tensors:
        if target is not mean:
            torch._foreach_copy_(target, mean)


class _Packed:
    """Tensors of one rank side by side: one flat tensor for each dtype, used again and again."""

    def __init__(self) -> None:
        self._flats: dict[torch.dtype, Tensor] = {}
        self._groups: list[tuple[list[int], list[Tensor]]] = []

    def load(self, tensors: Tensors) -> list[Tensor]:
        """Copy tensors of one device into the flat ones; gives those, in order of dtype."""
        groups: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            groups.setdefault(tensor.dtype, []).append(i)
        flats: list[Tensor] = []
        self._groups = []
        for dtype, group in groups.items():
            sizes = [tensors[i].numel() for i in group]
            flat = self._room(tensors[group[0]], sum(sizes))
            parts = flat.split(sizes)  # type: ignore[no-untyped-call]
            views = [part.view(tensors[i].shape) for i, part in zip(group, parts, strict=True)]
            torch._foreach_copy_(views, [tensors[i] for i in group])
            self._groups.append((group, views))
            flats.append(torch.view_as_real(flat).view(-1) if dtype.is_complex else flat)
        return flats

    def store(self, tensors: Tensors) -> None:
        """Copy the flat tensors back to where they were loaded from."""
        for group, views in self._groups:
            torch._foreach_copy_([tensors[i] for i in group], views)

    def _room(self, like: Tensor, num_elements: int) -> Tensor:
        flat = self._flats.get(like.dtype)
        if flat is None or flat.numel() < num_elements:
            flat = self._flats[like.dtype] = like.new_empty(num_elements)
        return flat[:num_elements]


class StagedReduction(Reduction):
    """Some replicas are on GPUs: the calling thread reduces in pinned memory of the CPU.

    GPUs may stand more than once, and replicas on the CPU may take part. The call blocks
    until the ranks' work is done and the mean is formed; the copies back are only issued.

    Args:
        devices: The device of each rank.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._stages = [_Stage(device) for device in devices]

    def mean_(self, tensors: Sequence[Tensors], weights: Sequence[float]) -> None:
        """As :meth:`Reduction.mean_`."""
        with torch.no_grad():
            for stage, own in zip(self._stages, tensors, strict=True):
                stage.fetch(own)
            CpuReduction().mean_([stage.arrived() for stage in self._stages], weights)
            for stage, own in zip(self._stages, tensors, strict=True):
                stage.put_back(own)

    def close(self) -> None:
        """As :meth:`Reduction.close`; the allocator keeps memory until its copies are over."""
        self._stages = []


class _Stage:
    """One rank's way to the CPU's memory and back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._api = cuda_api.API
        self._packed = _Packed()
        self._sync = StreamSync()
        self._pinned: dict[tuple[int, torch.dtype], Tensor] = {}
        self._flats: list[Tensor] = []
        self._twins: list[Tensor] = []
        self._fetched: Event | None = None
        self._returned: Event | None = None

    def fetch(self, tensors: Tensors) -> None:
        """Start to copy a rank's tensors."""
        if self._device.type == "cpu":
            self._flats = self._twins = self._packed.load(tensors)
            return
        # The stream may be another one now: what the last call copies must have left.
        self._sync.wait_host(self._returned)
        with self._api.on_device(self._device):
            self._flats = self._packed.load(tensors)
            self._twins = []  # or a block that is too small now would stay
            self._twins = [self._twin(i, flat) for i, flat in enumerate(self._flats)]
            for twin, flat in zip(self._twins, self._flats, strict=True):
                self._api.copy(twin, flat)
            self._fetched = self._sync.mark(self._device, self._fetched)

    def arrived(self) -> list[Tensor]:
        """The tensors in the CPU's memory, flat. Blocks until they are there."""
        self._sync.wait_host(self._fetched)
        return self._twins

    def put_back(self, tensors: Tensors) -> None:
        """Start to copy what became of them to where they came from."""
        if self._device.type == "cpu":
            self._packed.store(tensors)
            return
        with self._api.on_device(self._device):
            for flat, twin in zip(self._flats, self._twins, strict=True):
                self._api.copy(flat, twin)
            self._packed.store(tensors)
            self._returned = self._sync.mark(self._device, self._returned)

    def _twin(self, index: int, flat: Tensor) -> Tensor:
        # Two flat tensors may have one dtype: complex ones are seen as real.
        key, num_elements = (index, flat.dtype), flat.numel()
        pinned = self._pinned.pop(key, None)
        if pinned is None or pinned.numel() < num_elements:
            pinned = None  # its block is free before a larger one is taken
            num_bytes = cuda_api.pinned_bytes(flat.nbytes)
            pinned = self._api.empty_pinned((num_bytes // flat.itemsize,), flat.dtype)
        self._pinned[key] = pinned
        return pinned[:num_elements]


class GroupReduction(Reduction):
    """The replicas' means are formed by a process group, one internal thread for each rank.

    The call blocks until the result is there. After a failure the tensors are as they were,
    and the group is aborted for good.

    Args:
        devices: The device of each rank.
        kind: ``"nccl"`` or ``"gloo"``.
        timeout_s: How long an exchange may take, in seconds.
    """

    def __init__(self, devices: Sequence[torch.device], kind: str, timeout_s: float = 60.0) -> None:
        self._devices = devices
        self._sync = StreamSync()
        self._packed = [_Packed() for _ in devices]
        self._events: list[Event | None] = [None] * len(devices)
        self._ends = create_collectives(len(devices), kind, devices, timeout_s)
        try:
            contexts = [_stream_of(device) for device in devices]
            self._threads = RankThreads("ddp", contexts, _closing(self._ends))
        except BaseException:
            _closing(self._ends)()
            raise

    def mean_(self, tensors: Sequence[Tensors], weights: Sequence[float]) -> None:
        """As :meth:`Reduction.mean_`.

        Raises:
            CollectiveAborted, CollectiveTimeout: The exchange failed, now or earlier.
        """
        with torch.no_grad():
            flats = [self._load(rank, own) for rank, own in enumerate(tensors)]

            def exchange(rank: int) -> None:
                self._sync.wait(self._devices[rank], [self._events[rank]])
                self._ends[rank].weighted_mean_(flats[rank], weights[rank])

            job = Job([partial(exchange, rank) for rank in range(len(flats))])
            try:
                self._threads.deliver(job)
                job.wait()
            except BaseException:  # Ctrl-C: nobody may write to the tensors any more
                if job.is_begun:
                    self._ends[0].abort()
                    self._threads.deliver(job)
                    job.wait(ABORT_S)
                raise
            failure = first_failure(job.outcomes)
            if failure is not None:
                raise failure[1]
            for packed, own in zip(self._packed, tensors, strict=True):
                packed.store(own)

    def _load(self, rank: int, tensors: Tensors) -> list[Tensor]:
        device = self._devices[rank]
        flats = self._packed[rank].load(tensors)
        self._events[rank] = self._sync.mark(device, self._events[rank])
        return flats

    def close(self) -> None:
        """End the threads and the group; blocks for that."""
        self._threads.close()
        self._packed = []


def _stream_of(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """What makes the context of a rank's internal thread: its device, and a stream of its own."""
    api: Any = cuda_api.API

    @contextmanager
    def current() -> Iterator[None]:
        with api.on_device(device), api.stream(api.new_stream(device)):
            yield

    return nullcontext if device.type == "cpu" else current


def _closing(ends: Sequence[Collective]) -> Callable[[], None]:
    def close() -> None:
        for end in ends:
            end.close()

    return close
