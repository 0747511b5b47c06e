"""Collectives within the forward and backward passes of ranks that train one global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from runtime.collective.base import LOW_PRECISION, Collective
from runtime.collective.subgroups import split
from runtime.core.loss_weights import Weight
from runtime.device.timing import HostTimer, StepTimer
from runtime.replica.flat import by_dtype, views_of


class GlobalBatchComm:
    """Exchanges of one rank with the ranks that train the other pieces of its global batch.

    Every rank calls :meth:`begin`, with samples or without; the exchanges that follow are among
    the ranks with samples, over a subgroup if some have none. These ranks must make the same
    exchanges in the same order. Used by the rank's thread and by the thread of its device's
    backward pass. Waiting time is not counted as time of the rank's step.

    Args:
        collective: The collective of all ranks; ``None``: there is one rank.
        comm: The context for collectives, see :meth:`Device.comm`.

    Attributes:
        weight: The factor of this rank's gradients in the sum over the ranks.
        live: True if the micro-batch has a weight above 0; otherwise its gradients may be NaN.
    """

    def __init__(
        self,
        collective: Collective | None,
        comm: Callable[[], AbstractContextManager[None]] = nullcontext,
        timer: StepTimer | None = None,
    ) -> None:
        self._collective = collective
        self._comm = comm
        self._timer = timer or HostTimer()
        self._groups: dict[tuple[int, ...], Collective] = {}
        self._batches: list[tuple[Collective | None, bool]] = []
        self._group: Collective | None = None
        self._group_changes = False  # after this micro-batch
        self._is_open = False
        self._num_batches = 0  # micro-batch within the step
        self._num_calls = 0  # all_gather() calls in the micro-batch
        self._tokens: list[Tensor] = []
        self.weight: Weight = 1.0
        self.live: bool | Tensor = True
        self.layers: list[nn.Module] = []
        self._complete_rank: int | None = None  # if others had fewer micro-batches in the step

    def join(self, collective: Collective) -> None:
        self.close()
        self._collective = collective
        self._complete_rank = None

    def close(self) -> None:
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.close()

    def begin(self, num_batches: int) -> None:
        """Begin a step, and exchange the ranks' numbers of micro-batches. Collective.

        Args:
            num_batches: Micro-batches of this rank in the step; may be 0.

        Raises:
            CollectiveAborted, CollectiveTimeout: See :class:`~runtime.collective.Collective`.
        """
        self._batches, self._num_batches = [], 0
        if self._collective is None:
            return
        self.share_statistics()
        with self._untimed():
            counts = self._collective.all_gather_number(num_batches)
            most = int(max(counts))
            self._complete_rank = counts.index(most) if min(counts) < most else None
            members = [_ranks_with_batch(i, counts) for i in range(most)]
            members.append(tuple(range(len(counts))))  # for the reduction
            for i in range(most):
                group = self._group_of(members[i])
                if i < num_batches:
                    changes = members[i] != members[i + 1]
                    self._batches.append((group if len(members[i]) > 1 else None, changes))
        self._batches.reverse()

    @torch.no_grad()
    def share_statistics(self) -> None:
        """Copy the layers' buffers to ranks without a batch in the last step. Collective."""
        source, self._complete_rank = self._complete_rank, None
        buffers = [buffer for layer in self.layers for buffer in layer.buffers(recurse=False)]
        if source is None or not buffers:
            return
        assert self._collective is not None, "a single rank has every batch"
        with self._untimed(), self._comm():
            for group in by_dtype(buffers):
                alike = [buffers[i] for i in group]
                flat = torch.cat([buffer.reshape(-1) for buffer in alike])
                self._collective.broadcast_(flat, source)
                parts = views_of(flat, [buffer.size() for buffer in alike])
                for buffer, part in zip(alike, parts, strict=True):
                    buffer.copy_(part)

    @property
    def is_open(self) -> bool:
        """True within the training of a micro-batch."""
        return self._is_open

    def _group_of(self, members: tuple[int, ...]) -> Collective:
        """The group of these ranks. Collective: all ranks call it with the same arguments."""
        assert self._collective is not None, "a single rank needs no group"
        if len(members) == self._collective.world_size:
            return self._collective
        if members not in self._groups:
            self._groups[members] = split(self._collective, self._collective.rank in members)
        return self._groups[members]

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        """Exclude the time in this context from the rank's step."""
        self._timer.pause()
        try:
            yield
        finally:
            self._timer.resume()

    def next_batch(self) -> None:
        """Begin the next micro-batch of the step."""
        if self._collective is not None:
            self._group, self._group_changes = self._batches.pop()
        self._is_open = True
        self._num_batches += 1
        self._num_calls = 0
        self._tokens = []

    def end_batch(self) -> None:
        """End the micro-batch, after its backward pass.

        Raises:
            ValueError: Another rank waits for this one in a pass.
        """
        self._is_open = False
        if self._group is not None and self._group_changes:
            # The next group has other members, which could not see a rank that still waits here.
            with self._untimed():
                self._group.barrier()

    @property
    def is_single_rank(self) -> bool:
        """True if no other rank has samples of the micro-batch."""
        return self._group is None

    def gather(self, own: Tensor) -> Tensor:
        """The tensors of all ranks, of shape ``(ranks, *own.shape)``."""
        if self._group is None:
            return own[None]
        found = own.new_empty((self._group.world_size, *own.shape))
        with self._untimed(), self._comm():
            self._group.all_gather_into(found.view(-1), own)
        return found

    def sum_over_ranks(self, own: Tensor) -> Tensor:
        """The weighted sum over the ranks, divided by this rank's weight.

        The reduction of the gradients later multiplies by that weight.
        """
        if self._group is None:
            return own
        total = self._weighted(own)
        with self._untimed(), self._comm():
            self._group.all_reduce_(total)
        return total / self.weight

    def _weighted(self, own: Tensor) -> Tensor:
        """A gradient times the weight of this rank's piece; zeros if the weight is 0."""
        total = own * self.weight
        if self.live is True:
            return total
        live = self.live if isinstance(self.live, Tensor) else own.new_zeros((), dtype=torch.bool)
        return torch.where(live, total, 0)

    def all_gather(self, tensor: Tensor) -> tuple[Tensor, slice]:
        """See :func:`gpuworker.all_gather`."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"all_gather({type(tensor).__name__}): pass a tensor")
        if tensor.dim() == 0:
            raise ValueError(
                "all_gather gathers rows, got a tensor without dimensions: pass one row for each "
                "sample, shape (rows, ...)"
            )
        if not self._is_open:
            raise RuntimeError(
                "all_gather works within the training of a batch: call it in train_fn, where all "
                "ranks train their pieces of one global batch"
            )
        num_rows = tensor.size(0)
        if self._group is None:
            return tensor, slice(0, num_rows)
        has_grad = tensor.requires_grad and torch.is_grad_enabled()
        self._num_calls += 1
        call = (
            f"call {self._num_calls} in micro-batch {self._num_batches}, rows of "
            f"{tuple(tensor.shape[1:])} {tensor.dtype} {'with' if has_grad else 'without'} gradient"
        )
        with self._untimed():
            counts = [int(count) for count in self._group.all_gather_num_rows(num_rows, call)]
        start = sum(counts[: self._group.rank])
        rows = slice(start, start + num_rows)
        if not has_grad:
            return self._gather_rows(tensor.detach(), counts), rows
        whole, token = _AllGather.apply(tensor, self, counts)  # type: ignore[no-untyped-call]
        self._tokens.append(token)
        return whole, rows

    def connect(self, loss: Tensor, live: Tensor | bool) -> tuple[Tensor, Tensor | bool]:
        """Connect a loss to every all-gather of its forward pass, so that backward reaches them.

        Even if a rank's loss does not depend on the rows that it gathered, its own rows have
        gradients from the losses of other ranks.

        Args:
            loss: The tensor to call backward on.
            live: True if the loss has a weight above 0; a tensor if only the device has it.

        Returns:
            The connected loss, and its ``live``.
        """
        tokens, self._tokens = self._tokens, []
        if not tokens:
            return loss, live
        if live is False and not self.layers:
            # The loss is left out, as its gradients may be NaN; those of the rows are not.
            return torch.stack([token.float() for token in tokens]).sum(), True
        for token in tokens:  # zeros
            loss = loss + token
        return loss, live

    def _gather_rows(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks, in order of rank."""
        group = self._group
        assert group is not None, "a single rank has all rows"
        padded = _padded([own], [max(counts)])
        found = own.new_empty((group.world_size * max(counts), *own.shape[1:]))
        with self._untimed(), self._comm():
            group.all_gather_into(found, padded)
        if min(counts) == max(counts):
            return found
        parts = found.split(max(counts))  # type: ignore[no-untyped-call]
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def _scatter_gradient(self, whole: Tensor, counts: Sequence[int]) -> Tensor:
        """Reduce-scatter the gradients of all rows, to that of this rank's rows.

        It is divided by the rank's weight, as in :meth:`sum_over_ranks`.
        """
        if whole.is_complex():
            parts = torch.view_as_real(whole.resolve_conj())
            return torch.view_as_complex(self._scatter_gradient(parts, counts))
        group = self._group
        assert group is not None, "a single rank has all rows"
        wide = whole.float() if whole.dtype in LOW_PRECISION else whole
        parts = self._weighted(wide).split(list(counts))  # type: ignore[no-untyped-call]
        padded = _padded(parts, [max(counts)] * len(counts))
        found = padded.new_empty((max(counts), *whole.shape[1:]))
        with self._untimed(), self._comm():
            group.reduce_scatter_into(found, padded)
        return (found[: counts[group.rank]] / self.weight).to(whole.dtype)

    def __deepcopy__(self, memo: object) -> GlobalBatchComm:
        return self  # a copy of the model is this rank's too

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _no_batch, ()  # a model in a file has no peers


def _ranks_with_batch(number: int, counts: Sequence[float]) -> tuple[int, ...]:
    """Ranks with more than ``number`` micro-batches in the step."""
    return tuple(rank for rank, count in enumerate(counts) if count > number)


def _no_batch() -> None:
    return None


def _padded(parts: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Concatenate the parts, each padded with zeros to its length."""
    if all(len(part) == length for part, length in zip(parts, lengths, strict=True)):
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))
    found = parts[0].new_zeros((sum(lengths), *parts[0].shape[1:]))
    start = 0
    for part, length in zip(parts, lengths, strict=True):
        found[start : start + len(part)] = part
        start += length
    return found


class _AllGather(torch.autograd.Function):
    """The rows of all ranks, and a zero token that connects any loss to this backward."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, batch: GlobalBatchComm, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        ctx.batch, ctx.counts = batch, counts
        return batch._gather_rows(own, counts), own.new_zeros((), dtype=own.real.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.batch._scatter_gradient(grad, ctx.counts), None, None
