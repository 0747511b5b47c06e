"""Collectives between threads whose tensors lie on GPUs, through pinned memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.collective.base import Group, Request
from runtime.collective.thread import ThreadCollective
from runtime.device import cuda_api
from runtime.device.cuda_api import Event

_ALIGNMENT_BYTES = 64


class StagedThreadCollective(ThreadCollective):
    """A rank on a GPU: its tensors are reduced in CPU memory, with those of its peers.

    Tensors of its GPU are copied to pinned memory of its own, reduced there and copied
    back; tensors of the CPU are taken as they are. Ranks may share a GPU, and others may be
    on the CPU. Copies run on the stream that is current in the calling thread: a result is
    ordered there, and a call blocks until the work before it is done. After a failure the
    tensors of the GPU are as they were.

    Args:
        rank: This rank.
        world_size: How many ranks there are.
        group: Shared by the ranks.
        device: The rank's GPU.
    """

    def __init__(self, rank: int, world_size: int, group: Group, device: torch.device) -> None:
        super().__init__(rank, world_size, group)
        self._device = device
        self._api = cuda_api.API
        self._pinned: Tensor | None = None
        self._fetched: Event | None = None
        self._returned: Event | None = None

    def _placement_fault(self, tensor: Tensor) -> str | None:
        # The rank that arrives last judges them all, when each has staged its own.
        device = self._api.device_of(tensor)
        if device.type == "cpu":
            return None
        return f"passed a tensor on {device}; pass tensors of its own device or of the CPU"

    def _run(self, request: Request) -> float:
        staged = self._views(request.tensors)
        if staged is None:
            return super()._run(request)
        read, written = _roles(request, self.rank)
        try:
            self._fetch(request.tensors, staged, read)
        except BaseException as error:
            self._group.fail(error)
            raise
        total = super()._run(request._replace(tensors=staged))
        if request.name != "weighted_mean_" or total > 0:
            self._return(request.tensors, staged, written)
        return total

    def _views(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Pinned twins of the tensors on this rank's GPU; ``None`` if there are none.

        What is not as it should be stays what it is, to be judged with the others'.
        """
        if not isinstance(tensors, (tuple, list)):
            return None
        sizes = [self._staged_bytes(tensor) for tensor in tensors]
        if all(size is None for size in sizes):
            return None
        pinned = self._room(sum(size or 0 for size in sizes))
        views: list[Tensor] = []
        offset = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            if size is None:
                views.append(tensor)
                continue
            part = pinned[offset : offset + tensor.numel() * tensor.element_size()]
            views.append(part.view(tensor.dtype).view(tensor.shape))
            offset += size
        return views

    def _staged_bytes(self, tensor: object) -> int | None:
        if (
            not isinstance(tensor, Tensor)
            or tensor.layout != torch.strided
            or not tensor.is_contiguous()
            or self._api.device_of(tensor) != self._device
        ):
            return None
        num_bytes = tensor.numel() * tensor.element_size()
        return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def _room(self, num_bytes: int) -> Tensor:
        if self._pinned is None or self._pinned.numel() < num_bytes:
            self._pinned = self._api.empty_pinned((num_bytes,), torch.uint8)
        return self._pinned

    def _fetch(
        self, tensors: Sequence[Tensor], staged: Sequence[Tensor], read: Sequence[bool]
    ) -> None:
        """Copy to pinned memory; on return it is there, and nothing else uses the memory."""
        pairs = list(zip(tensors, staged, read, strict=True))
        if not any(wanted and twin is not tensor for tensor, twin, wanted in pairs):
            self._wait_returned()
            return
        if self._returned is not None:
            self._api.wait_event(self._returned)  # the stream may be another one now
        for tensor, twin, wanted in pairs:
            if wanted and twin is not tensor:
                self._api.copy(twin, tensor)
        self._fetched = self._fetched or self._api.new_event()
        self._api.record(self._fetched)
        self._api.wait_host(self._fetched)

    def _return(
        self, tensors: Sequence[Tensor], staged: Sequence[Tensor], written: Sequence[bool]
    ) -> None:
        for tensor, twin, wanted in zip(tensors, staged, written, strict=True):
            if wanted and twin is not tensor:
                self._api.copy(tensor, twin)
        self._returned = self._returned or self._api.new_event()
        self._api.record(self._returned)

    def _wait_returned(self) -> None:
        """Wait until the last result has left the pinned memory."""
        if self._returned is not None:
            self._api.wait_host(self._returned)

    def _release(self) -> None:
        # The allocator of pinned memory keeps it until the copies that use it are over.
        self._pinned = self._fetched = self._returned = None


def _roles(request: Request, rank: int) -> tuple[list[bool], list[bool]]:
    """Which tensors a collective reads on this rank, and which it writes."""
    if request.name in ("all_gather_into", "reduce_scatter_into"):
        return [False, True], [True, False]
    if request.name == "broadcast_":
        return [request.detail == rank], [request.detail != rank]
    every = [True] * len(request.tensors)
    return every, every
