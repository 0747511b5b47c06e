"""Collectives between threads, in the memory they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.collective.base import (
    LOW_PRECISION,
    Collective,
    Group,
    Plan,
    ReduceOp,
    RegisteredTensors,
    Request,
    is_weight,
    pairs_of,
)
from runtime.device import cuda_api
from runtime.device.cuda_api import Event, StreamSync

# Elements. A block stays in cache while it is reduced and copied back; smaller ones cost more
# in calls, each of which may wait for the interpreter lock, than they gain.
_BLOCK = 1 << 19
# Elements of all ranks together up to which the last rank to arrive does all the work: one
# meeting instead of two.
_SMALL = 1 << 19


class ThreadCollective(Collective):
    """Ranks reduce CPU tensors in place, each its own share of the elements.

    Every rank publishes its tensors and meets the others; each then reduces its share
    over all ranks' tensors, in order of rank, and writes the result to all of them; a
    second meeting ends the call (a reduce-scatter and an all-gather without a transfer).
    The only buffer is one block: for partial sums of a weighted mean, kept until the end; in
    float32 for float16 and bfloat16; or for ``reduce_scatter_into``. Small tensors are reduced
    by the last rank to arrive while the others wait. The order of summation depends only on
    sizes, so the same input gives the same bits in any order of arrival.
    """

    kind = "thread"
    can_hang = False
    # For ranks on a GPU, which stage all tensors of a request in pinned memory at once.
    coalesced_bytes = 25 * 2**20

    def __init__(self, rank: int, world_size: int, group: Group) -> None:
        super().__init__(rank, world_size, group)
        self._scratch = Scratch()

    def _placement_fault(self, tensor: Tensor) -> str | None:
        if tensor.device.type == "cpu":
            return None
        return f"passed a tensor on {tensor.device}; THREAD reduces CPU tensors, pass tensor.cpu()"

    def _plan(self, requests: Sequence[Request]) -> Plan:
        # The views are made here, while all others sleep: every call into PyTorch releases the
        # interpreter lock, and running ranks would contend for it.
        kept = self._group.kept
        if kept is not None and kept.fits(requests):
            plan, work = self._plan_valid(requests), kept.work
        else:
            self._group.kept = work = None
            plan = super()._plan(requests)
        if plan.done:
            return plan
        if work is None:
            num_elements = sum([tensor.numel() for tensor in requests[0].tensors])
            is_small = num_elements * self.world_size <= _SMALL or self.world_size == 1
            work = work_of(requests, at_once=is_small)
            tensors = [t for r in requests if isinstance(t := r.tensors, RegisteredTensors)]
            if plan.factors is not None and len(tensors) == len(requests):
                self._group.kept = _RegisteredMean(tensors, work)
        if work.at_once:
            return reduce_at_once(self._group, self.rank, work, plan, self._scratch)
        return ThreadPlan(
            done=False,
            total=plan.total,
            factors=plan.factors,
            is_long=plan.is_long,
            tally=plan.tally,
            work=work,
        )

    def _take_part(self, request: Request, plan: Plan) -> None:
        assert isinstance(plan, ThreadPlan)
        assert plan.work is not None, "every plan that is not done has work"
        steps = plan.work.shares[self.rank]
        _carry_out(self._group, self.rank, steps, plan.work.op, plan.factors, self._scratch)
        self._group.part(self.rank)

    def _join_subgroup(self, rank: int, group: Group, shared: Any) -> Collective:
        return type(self)(rank, group.barrier.parties, group)

    def _release(self) -> None:
        self._group.kept = None
        self._scratch = Scratch()


@dataclass(slots=True)
class Step:
    """Views of the ranks' tensors: the sources are reduced, the result is copied to targets.

    Sources that are also targets are reduced in place; others are not changed.
    """

    sources: Sequence[Tensor]
    targets: Sequence[Tensor]


@dataclass(slots=True)
class Work:
    """The work of a collective.

    Attributes:
        op: The reduction; ``None``: a weighted mean, or a copy.
        shares: The share of each rank; if ``at_once``, all are executed by one rank.
        at_once: True if the last rank to arrive executes it, while the others wait.
    """

    op: ReduceOp | None
    shares: Sequence[Sequence[Step]]
    at_once: bool


@dataclass(slots=True)
class ThreadPlan(Plan):
    """A plan with its work."""

    work: Work | None = None


class _RegisteredMean(NamedTuple):
    """The work of a weighted mean of registered tensors, one tuple for each rank."""

    tensors: Sequence[RegisteredTensors]
    work: Work

    def fits(self, requests: Sequence[Request]) -> bool:
        """True for valid requests of the same mean."""
        for tensors, request in zip(self.tensors, requests, strict=True):
            if request.tensors is not tensors or request.name != "weighted_mean_":
                return False
            if request.detail is not None or not is_weight(request.weight):
                return False
        return True


def _carry_out(
    group: Group,
    rank: int,
    steps: Sequence[Step],
    op: ReduceOp | None,
    factors: Sequence[float] | None,
    scratch: Scratch,
) -> None:
    """Executes a share of the work in the thread of a rank."""
    # A rank that leaves because of an abort waits for this lock, so that its tensors are no
    # longer written to; a thread that acquires it later finds the group aborted.
    with group.writing[rank], torch.no_grad():
        for step in steps:
            group.require_intact()
            if factors is None:
                result = _reduce(step.sources, step.targets, op)
            else:
                result = _weighted_mean(step.sources, factors, rank, scratch)
            for target in step.targets:
                if target is not result:
                    target.copy_(result)


def work_of(requests: Sequence[Request], *, at_once: bool) -> Work:
    """The work of valid requests."""
    detail = requests[0].detail
    op = detail if isinstance(detail, ReduceOp) else None
    return Work(op, _shares(requests, 1 if at_once else len(requests)), at_once)


def reduce_at_once(group: Group, rank: int, work: Work, plan: Plan, scratch: Scratch) -> Plan:
    """Does all the work in the thread of one rank, while the others sleep.

    Returns:
        The plan, done.
    """
    for steps in work.shares:
        _carry_out(group, rank, steps, work.op, plan.factors, scratch)
    plan.done = True
    return plan


class Scratch:
    """A reused block of memory for a rank's reductions."""

    def __init__(self) -> None:
        self._block = torch.empty(0)

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor with the shape and dtype of this one and arbitrary values."""
        size = tensor.numel()
        if self._block.numel() < size or self._block.dtype != tensor.dtype:
            self._block = torch.empty(size, dtype=tensor.dtype)
        return self._block[:size].view(tensor.shape)


def _weighted_mean(
    values: Sequence[Tensor], factors: Sequence[float], rank: int, scratch: Scratch
) -> Tensor:
    """Replaces the rank's own value by the weighted mean; see :func:`weighted_sums`.

    Peers' values are only read here, and later overwritten by copies. Arithmetic in a peer's
    memory would leave its cache lines in a state in which the peer's next write takes several
    times as long (measured on an AMD EPYC).

    Returns:
        The rank's own value; or a new tensor, or the only one with a factor above 0, unchanged.
    """
    first, *others = [index for index, factor in enumerate(factors) if factor]
    if not others or first == rank or values[first].dtype in LOW_PRECISION:
        return weighted_sums([[value] for value in values], factors)[0]
    total = torch.mul(values[first], factors[first], out=scratch.like(values[first]))
    for index in others[:-1]:
        total.add_(values[index], alpha=factors[index])
    last = others[-1]
    return torch.add(total, values[last], alpha=factors[last], out=values[rank])


def _reduce(values: Sequence[Tensor], targets: Sequence[Tensor], op: ReduceOp | None) -> Tensor:
    """Reduces the values in order of rank.

    Returns:
        The first value, or a new tensor (in float32 for low precision).
    """
    result = values[0]
    if len(values) == 1:
        return result
    if result.dtype in LOW_PRECISION:
        result = result.float()
    elif targets is not values:
        result = result.clone()  # the target may be this rank's part of its own source
    for value in values[1:]:
        if op is ReduceOp.MAX:
            torch.maximum(result, value.to(result.dtype), out=result)
        elif op is ReduceOp.MIN:
            torch.minimum(result, value.to(result.dtype), out=result)
        else:
            result.add_(value)
    if op is ReduceOp.AVG:
        result.div_(len(values))
    return result


def weighted_sums(values: Sequence[list[Tensor]], factors: Sequence[float]) -> list[Tensor]:
    """Weighted sums over the ranks, in order of rank; tensors with the factor 0 are not read.

    Args:
        values: ``values[rank][i]``, of the same shapes and one dtype.
        factors: One for each rank, not all 0.

    Returns:
        The tensors of the first rank with a factor above 0, changed in place, or new ones in
        float32 for float16 and bfloat16; the same ones, unchanged, if it is the only such rank.
    """
    first, *others = [rank for rank, factor in enumerate(factors) if factor]
    sums = values[first]
    if not others:
        return sums
    if sums[0].dtype in LOW_PRECISION:
        sums = [tensor.float() for tensor in sums]
    # Scaled before the sum, so that huge values (masks) do not overflow.
    torch._foreach_mul_(sums, factors[first])
    for rank in others:
        torch._foreach_add_(sums, values[rank], alpha=factors[rank])
    return sums


def _shares(requests: Sequence[Request], num_shares: int) -> Sequence[Sequence[Step]]:
    """The work in ``num_shares`` shares; one per rank if each rank has its own output."""
    first = requests[0]
    world_size = len(requests)
    if first.name in ("all_reduce_", "weighted_mean_"):
        return [_reduction(requests, share, num_shares) for share in range(num_shares)]
    if first.name == "broadcast_":
        assert isinstance(first.detail, int)
        source = requests[first.detail].tensors[0]
        return [
            list(_steps([source], [request.tensors[0]])) if rank != first.detail else []
            for rank, request in enumerate(requests)
        ]
    if first.name == "all_gather_into":
        return [
            [
                step
                for index, (output, _) in enumerate(pairs_of(request.tensors))
                for rank, other in enumerate(requests)
                for step in _steps(
                    [other.tensors[2 * index + 1]], [_part(output, rank, world_size)]
                )
            ]
            for request in requests
        ]
    return [
        [
            step
            for index, (output, _) in enumerate(pairs_of(requests[rank].tensors))
            for step in _steps(
                [_part(request.tensors[2 * index + 1], rank, world_size) for request in requests],
                [output],
            )
        ]
        for rank in range(world_size)
    ]


def _reduction(requests: Sequence[Request], share: int, num_shares: int) -> list[Step]:
    """One of equal shares of all tensors, laid end to end."""
    sizes = [tensor.numel() for tensor in requests[0].tensors]
    # Whole cache lines, so that two ranks do not write to the same one.
    size = -(-sum(sizes) // (num_shares * 64)) * 64
    low, high = share * size, (share + 1) * size
    steps: list[Step] = []
    offset = 0
    for index, num_elements in enumerate(sizes):
        start, stop = max(low - offset, 0), min(high - offset, num_elements)
        offset += num_elements
        if start < stop:
            tensors = [request.tensors[index] for request in requests]
            if stop - start < num_elements:
                tensors = [tensor.view(-1)[start:stop] for tensor in tensors]
            steps.extend(_steps(tensors, tensors))
    return steps


def _steps(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Iterator[Step]:
    """Cuts tensors of the same size into blocks."""
    if sources[0].numel() <= _BLOCK:
        # Shapes differ only where outputs and inputs do: views keep copies elementwise.
        if targets is not sources:
            sources, targets = [t.view(-1) for t in sources], [t.view(-1) for t in targets]
        yield Step(sources, targets)
        return
    source_blocks = _split_blocks(sources)
    target_blocks = source_blocks if targets is sources else _split_blocks(targets)
    for block, target_block in zip(source_blocks, target_blocks, strict=True):
        yield Step(block, target_block)


def _split_blocks(tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    blocks = [tensor.view(-1).split(_BLOCK) for tensor in tensors]  # type: ignore[no-untyped-call]
    return list(zip(*blocks, strict=True))


def _part(tensor: Tensor, rank: int, num_parts: int) -> Tensor:
    size = tensor.numel() // num_parts
    return tensor.view(-1)[rank * size : (rank + 1) * size]


_ALIGNMENT_BYTES = 64


class StagedThreadCollective(ThreadCollective):
    """A rank on a GPU: its tensors are reduced in CPU memory, with those of its peers.

    Tensors on its GPU are copied to its own pinned memory, reduced there and copied back; CPU
    tensors are used directly. Ranks may share a GPU, and others may be on the CPU. Copies run
    on the stream that is current in the calling thread: a result is ordered there, and a call
    blocks until earlier work on it is done. After a failure the tensors on the GPU are
    unchanged.

    Args:
        group: Shared by the ranks.
    """

    def __init__(self, rank: int, world_size: int, group: Group, device: torch.device) -> None:
        super().__init__(rank, world_size, group)
        self._device = device
        self._api = cuda_api.API
        self._sync = StreamSync()
        self._pinned: Tensor | None = None
        self._fetched: Event | None = None
        self._returned: Event | None = None

    def _join_subgroup(self, rank: int, group: Group, shared: Any) -> Collective:
        return type(self)(rank, group.barrier.parties, group, self._device)

    def _placement_fault(self, tensor: Tensor) -> str | None:
        # Called by the last rank to arrive for the tensors of all ranks, already staged.
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

        Invalid arguments are passed through: the meeting reports them on every rank.
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
            self._pinned = None  # its block is free before a larger one is taken
            self._pinned = self._api.empty_pinned((cuda_api.pinned_bytes(num_bytes),), torch.uint8)
        return self._pinned

    def _fetch(
        self, tensors: Sequence[Tensor], staged: Sequence[Tensor], read: Sequence[bool]
    ) -> None:
        """Copy to pinned memory; on return the copy is complete, and no other copy uses it."""
        pairs = list(zip(tensors, staged, read, strict=True))
        if not any(wanted and twin is not tensor for tensor, twin, wanted in pairs):
            self._sync.wait_host(self._returned)  # the last result has left the pinned memory
            return
        self._sync.wait(self._device, [self._returned])  # the stream may be another one now
        for tensor, twin, wanted in pairs:
            if wanted and twin is not tensor:
                self._api.copy(twin, tensor)
        self._fetched = self._sync.mark(self._device, self._fetched)
        self._sync.wait_host(self._fetched)

    def _return(
        self, tensors: Sequence[Tensor], staged: Sequence[Tensor], written: Sequence[bool]
    ) -> None:
        for tensor, twin, wanted in zip(tensors, staged, written, strict=True):
            if wanted and twin is not tensor:
                self._api.copy(tensor, twin)
        self._returned = self._sync.mark(self._device, self._returned)

    def _release(self) -> None:
        super()._release()
        # The pinned allocator keeps the memory until the copies that use it are complete.
        self._pinned = self._fetched = self._returned = None


def _roles(request: Request, rank: int) -> tuple[list[bool], list[bool]]:
    """Flags for the tensors that a collective reads, and that it writes, on this rank."""
    if request.name in ("all_gather_into", "reduce_scatter_into"):
        num_pairs = len(request.tensors) // 2
        return [False, True] * num_pairs, [True, False] * num_pairs
    if request.name == "broadcast_":
        return [request.detail == rank], [request.detail != rank]
    every = [True] * len(request.tensors)
    return every, every
