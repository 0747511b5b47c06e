"""Weighted means of gradients over replicas, in the calling thread or over a process group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coordinator.config import AverageBackend
from runtime.collective import close_collectives, create_collectives, set_timeout_remedy
from runtime.collective.thread import weighted_sums
from runtime.core.loss_weights import Weight, fractions_of, scale_
from runtime.device import cuda_api
from runtime.device.cuda_api import Event, StreamSync
from runtime.loop.rank_threads import Job, RankThreads, first_failure
from runtime.replica.gradients import FlatGradients

Tensors = Sequence[Tensor]
_BLOCK_ELEMENTS = 1 << 18
"""Elements that are reduced together, so that they stay in the CPU cache."""
ABORT_TIMEOUT_S = 10.0
"""Seconds that an interrupted call waits for internal threads after the abort of their group."""
_DDP_REMEDY = (
    "the limit of Ddp is fixed. Call torch.cuda.synchronize(device) for each device before the "
    "reduction, so that no rank has a long queue of kernels; replicas that are all on the CPU need "
    "no group with Ddp.wrap(..., backend=AverageBackend.CPU)"
)


class Reduction(ABC):
    """Replaces the ranks' tensors by their weighted mean. Not thread-safe."""

    @abstractmethod
    def mean_(self, tensors: Sequence[Tensors], weights: Sequence[Weight]) -> None:
        """Replace every rank's tensors by the mean, with the same bits on all ranks.

        Runs after the work already on the calling thread's current stream of each GPU, and
        before later work there. Each tensor keeps its strides.

        Args:
            tensors: ``tensors[rank][i]``, of the same shape and dtype on every rank.
            weights: One per rank, finite, not negative, not all 0. The values of a rank with
                weight 0 are never used. With tensors that the host does not read, the mean is
                zeros if all are 0, and NaN if one is negative.
        """

    def close(self) -> None:
        """Free all resources. Idempotent."""
        return


class CpuReduction(Reduction):
    """Reduces in place in the calling thread, for replicas that are all on the CPU.

    Adds in order of rank, float16 and bfloat16 in float32, like the collectives.
    """

    def mean_(self, tensors: Sequence[Tensors], weights: Sequence[Weight]) -> None:
        """Like :meth:`Reduction.mean_`."""
        numbers, scales = _divided(weights)
        for own, scale in zip(tensors, scales, strict=False):
            scale_(own, scale.cpu())
        total = sum(numbers)
        factors = [number / total for number in numbers]
        with torch.no_grad():
            for block in _blocks(tensors[0]):
                values = [[own[i] for i in block] for own in tensors]
                mean = weighted_sums(values, factors)
                for target in values:
                    if target is not mean:
                        torch._foreach_copy_(target, mean)


def _divided(weights: Sequence[Weight]) -> tuple[list[float], list[Tensor]]:
    """Weights that are numbers; with tensors equal ones, and the factor of each rank's values."""
    numbers = [weight for weight in weights if not isinstance(weight, Tensor)]
    if len(numbers) == len(weights):
        return numbers, []
    num = len(weights)
    first = next(weight.device for weight in weights if isinstance(weight, Tensor))
    return [1.0] * num, [torch.as_tensor(f * num) for f in fractions_of(weights, first)]


def _blocks(tensors: Tensors) -> Iterator[list[int]]:
    """Indices of tensors of one dtype that are reduced together."""
    order = sorted(range(len(tensors)), key=lambda i: str(tensors[i].dtype))
    block: list[int] = []
    size = 0
    for i in order:
        tensor = tensors[i]
        if block and (
            size + tensor.numel() > _BLOCK_ELEMENTS or tensors[block[0]].dtype != tensor.dtype
        ):
            yield block
            block, size = [], 0
        block.append(i)
        size += tensor.numel()
    if block:
        yield block


class GroupReduction(Reduction):
    """Reduces over a process group, with one internal thread per rank.

    The call blocks until the mean is computed; copies back to the gradients are only enqueued.
    After a failure the tensors are unchanged, and the group stays aborted.

    Args:
        devices: One per rank.
        kind: ``"nccl"`` or ``"gloo"``; ``"thread"``: in CPU memory, through pinned memory for
            ranks on GPUs, of which several may share one.
        timeout_s: Time limit of an exchange, in seconds.
    """

    def __init__(self, devices: Sequence[torch.device], kind: str, timeout_s: float = 60.0) -> None:
        self._devices = devices
        self._sync = StreamSync()
        self._stores: list[FlatGradients | None] = [None] * len(devices)
        self._events: list[Event | None] = [None] * len(devices)
        self._collectives = create_collectives(len(devices), kind, devices, timeout_s)
        set_timeout_remedy(self._collectives, _DDP_REMEDY)
        close = partial(close_collectives, self._collectives)
        try:
            contexts = [_stream_of(device) for device in devices]
            self._threads = RankThreads("ddp", contexts, close)
        except BaseException:
            close()
            raise

    def mean_(self, tensors: Sequence[Tensors], weights: Sequence[Weight]) -> None:
        """Like :meth:`Reduction.mean_`.

        Raises:
            CollectiveAborted, CollectiveTimeout: The exchange failed, now or earlier.
        """
        with torch.no_grad():
            numbers, scales = _divided(weights)
            stores = [
                self._load(rank, own, tensors[0], scales[rank] if scales else None)
                for rank, own in enumerate(tensors)
            ]

            def exchange(rank: int) -> Event | None:
                self._sync.wait(self._devices[rank], [self._events[rank]])
                self._collectives[rank].weighted_mean_(stores[rank].flats, numbers[rank])
                return self._sync.mark(self._devices[rank])

            job = Job([partial(exchange, rank) for rank in range(len(stores))])
            try:
                self._threads.submit(job)
                job.wait()
            except (
                BaseException
            ):  # KeyboardInterrupt: no thread may write to the tensors afterwards
                if job.is_posted:
                    self._collectives[0].abort()
                    self._threads.submit(job)
                    job.wait(ABORT_TIMEOUT_S)
                raise
            failure = first_failure(job.outcomes)
            if failure is not None:
                raise failure[1]
            done = zip(tensors, stores, job.outcomes, strict=True)
            for rank, (own, store, outcome) in enumerate(done):
                self._sync.wait(self._devices[rank], [outcome.value])
                torch._foreach_copy_(list(own), store.views)
                self._events[rank] = self._sync.mark(self._devices[rank], self._events[rank])

    def _load(
        self, rank: int, tensors: Tensors, like: Tensors, scale: Tensor | None
    ) -> FlatGradients:
        """Copy a rank's tensors, scaled, to flat ones in the layout that those of rank 0 need."""
        device, event = self._devices[rank], self._events[rank]
        # The current stream may have changed: the last call's copies must be complete.
        self._sync.wait(device, [event])
        store = self._stores[rank]
        if store is None or not store.fits(like):
            store = self._stores[rank] = None  # its memory is free before other memory is taken
            store = self._stores[rank] = FlatGradients(like, device=tensors[0].device)
        store.load(tensors)
        if scale is not None:
            place = store.flats[0].device
            scale_(store.parts, scale.to(place, non_blocking=place.type != "cpu"))
        self._events[rank] = self._sync.mark(device, event)
        return store

    def close(self) -> None:
        """Close the threads and the group; blocks until they have ended."""
        self._threads.close()
        self._stores = []


def _stream_of(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """The context manager of a rank's internal thread: its device, and a new stream."""
    api: Any = cuda_api.API

    @contextmanager
    def current() -> Iterator[None]:
        with api.on_device(device), api.stream(api.new_stream(device)):
            yield

    return nullcontext if device.type == "cpu" else current


def make_reduction(backend: AverageBackend, devices: Sequence[torch.device]) -> Reduction:
    """Make the reduction for replicas on these devices; ``backend`` is resolved."""
    over_group = backend in (AverageBackend.NCCL, AverageBackend.GLOO)
    if not over_group and all(device.type == "cpu" for device in devices):
        return CpuReduction()
    return GroupReduction(devices, backend.collective)
