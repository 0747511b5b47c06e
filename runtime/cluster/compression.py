"""What travels between machines: tensors in fewer bits, with error feedback; signed messages.

Each machine sums one part of the tensor: it takes that part of all, as they were rounded for
the way, adds them in the machines' order, and sends the sum, rounded again, to all. Both
roundings are thus seen by one machine each, which adds what they lost to its next
contribution (Seide et al., 1-bit SGD, 2014; Karimireddy et al., 1901.09847). All machines
decode the same bytes, so their sums have the same bits.

Messages are signed with the token that the machines share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 256
"""Numbers that share a scale in ``int8``."""


MIN_NUMEL = 1024
"""Smaller tensors travel as they are."""


Exchange = Callable[[Tensor, Tensor], None]
"""Fills the first ``uint8`` tensor from the second ones of all machines."""


class ErrorFeedback:
    """Sums over machines, and what rounding has lost on this one, by place in the list.

    What was lost counts once :meth:`keep` says that the sums are used.

    Args:
        codec: How numbers travel.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._lost: dict[int, Tensor] = {}
        self._next: dict[int, Tensor] = {}

    def all_reduce(
        self, place: int, x: Tensor, rank: int, size: int, scatter: Exchange, gather: Exchange
    ) -> None:
        """Sum a tensor over the machines, in place.

        Args:
            place: Which tensor of a round it is; what its last round lost is added.
            x: Flat; float32 or bfloat16.
            rank: This machine's.
            size: How many machines there are.
            scatter: An all-to-all: row ``i`` goes to machine ``i``.
            gather: An all-gather.
        """
        length = -(-x.numel() // (size * BLOCK)) * BLOCK
        own = torch.zeros(size * length)
        own[: x.numel()] = x
        lost = self._lost.get(place)
        if lost is not None and lost.numel() == x.numel():
            own[: x.numel()] += lost
        sent = self._codec.encode(own.view(size, length))
        taken = torch.empty_like(sent)
        scatter(taken, sent)
        own -= self._codec.decode(sent).view(-1)
        part = torch.zeros(1, length)
        for row in self._codec.decode(taken):
            part += row
        summed = self._codec.encode(part)
        whole = torch.empty_like(sent)
        gather(whole, summed)
        own[rank * length : (rank + 1) * length] += (part - self._codec.decode(summed)).view(-1)
        x.copy_(self._codec.decode(whole).view(-1)[: x.numel()])
        self._next[place] = own[: x.numel()].nan_to_num_(0.0, 0.0, 0.0)

    def keep(self) -> None:
        """The round is committed."""
        self._lost.update(self._next)
        self._next = {}

    def drop(self) -> None:
        """The round failed; its contributions are made again."""
        self._next = {}

    def forget(self) -> None:
        """Start anew, as the machine itself does."""
        self._lost, self._next = {}, {}


class Codec(ABC):
    """How float32 numbers become bytes and back; both work on multiples of :data:`BLOCK`."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Bytes of a contiguous float32 tensor of shape ``(rows, length)``, one row for each."""

    @abstractmethod
    def decode(self, rows: Tensor) -> Tensor:
        """The numbers of encoded rows, float32."""


class Bfloat16(Codec):
    """Two bytes a number."""

    def encode(self, x: Tensor) -> Tensor:
        """See :meth:`Codec.encode`."""
        return x.bfloat16().view(torch.uint8)

    def decode(self, rows: Tensor) -> Tensor:
        """See :meth:`Codec.decode`."""
        return rows.view(torch.bfloat16).float()


class Int8(Codec):
    """One byte a number, and four for each block's largest magnitude.

    A block with a NaN or an infinity comes back as NaN, so that it is seen.
    """

    def encode(self, x: Tensor) -> Tensor:
        """See :meth:`Codec.encode`."""
        blocks = x.view(x.shape[0], -1, BLOCK)
        scales = blocks.abs().amax(-1, keepdim=True) / 127
        steps = torch.where(scales > 0, scales, 1.0)
        whole = (blocks / steps).nan_to_num_(0.0).round_().to(torch.int8)
        parts = (scales.view(x.shape[0], -1), whole.view(x.shape[0], -1))
        return torch.cat([part.view(torch.uint8) for part in parts], dim=1)

    def decode(self, rows: Tensor) -> Tensor:
        """See :meth:`Codec.decode`."""
        num_blocks = rows.shape[1] // (BLOCK + 4)
        scales = rows[:, : 4 * num_blocks].contiguous().view(torch.float32)
        whole = rows[:, 4 * num_blocks :].view(torch.int8).view(len(rows), num_blocks, BLOCK)
        return (whole.float() * scales.unsqueeze(-1)).view(len(rows), -1)


CODECS: dict[str, Codec] = {"bf16": Bfloat16(), "int8": Int8()}


def is_compressed(tensor: Tensor) -> bool:
    """Whether a tensor may travel in fewer bits: never float64, and no small one."""
    return tensor.dtype in (torch.float32, torch.bfloat16) and tensor.numel() >= MIN_NUMEL
