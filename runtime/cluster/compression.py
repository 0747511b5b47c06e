"""Compressed all-reduce between machines, with error feedback.

Each machine reduces one part of the tensor: it receives that part, rounded, from all machines,
adds them in the machines' order, and sends the sum, rounded again, to all. The error of each
rounding is known to one machine, which adds it to its next contribution (Seide et al., 1-bit SGD,
2014; Karimireddy et al., 1901.09847). All machines decode the same bytes, so that their sums are
bitwise equal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 256
"""Elements that share a scale in ``int8``."""
MIN_NUMEL = 1024
"""Smaller tensors are sent uncompressed."""
ByteExchange = Callable[[Tensor, Tensor], None]
"""Collective on ``uint8`` tensors: fills the first from the second ones of all machines."""


class ErrorFeedback:
    """Compressed all-reduce; adds this machine's rounding errors to its next contribution.

    Errors are kept per tensor, and only once :meth:`commit` confirms that the sums are used.

    Args:
        codec: Encoding of the tensors.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._errors: dict[int, Tensor] = {}
        self._pending: dict[int, Tensor] = {}

    def all_reduce(
        self,
        index: int,
        x: Tensor,
        rank: int,
        size: int,
        scatter: ByteExchange,
        gather: ByteExchange,
    ) -> None:
        """Sum a tensor over the machines, in place.

        Args:
            index: Index of the tensor in the round.
            x: Flat tensor; float32 or bfloat16.
            rank: This machine's rank.
            size: Number of machines.
            scatter: All-to-all: row ``i`` is sent to machine ``i``.
            gather: All-gather.
        """
        length = -(-x.numel() // (size * BLOCK)) * BLOCK
        own = torch.zeros(size * length)
        own[: x.numel()] = x
        error = self._errors.get(index)
        if error is not None and error.numel() == x.numel():
            own[: x.numel()] += error
        sent = self._codec.encode(own.view(size, length))
        received = torch.empty_like(sent)
        scatter(received, sent)
        own -= self._codec.decode(sent).view(-1)
        part = torch.zeros(1, length)
        for row in self._codec.decode(received):
            part += row
        summed = self._codec.encode(part)
        whole = torch.empty_like(sent)
        gather(whole, summed)
        own[rank * length : (rank + 1) * length] += (part - self._codec.decode(summed)).view(-1)
        x.copy_(self._codec.decode(whole).view(-1)[: x.numel()])
        self._pending[index] = own[: x.numel()].nan_to_num_(0.0, 0.0, 0.0)

    def commit(self) -> None:
        """Keep the errors of the round, which is committed."""
        self._errors.update(self._pending)
        self._pending = {}

    def discard(self) -> None:
        """Drop the errors of the round, which failed; its contributions are repeated."""
        self._pending = {}

    def reset(self) -> None:
        """Drop all errors, because the machine restarts from another state."""
        self._errors, self._pending = {}, {}


class Codec(ABC):
    """Encoding of float32 rows whose length is a multiple of :data:`BLOCK`."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Encode a contiguous float32 tensor ``(rows, length)`` as ``uint8``, row by row."""

    @abstractmethod
    def decode(self, rows: Tensor) -> Tensor:
        """Decode rows to float32."""


class Bfloat16Codec(Codec):
    """Two bytes per element."""

    def encode(self, x: Tensor) -> Tensor:
        return x.bfloat16().view(torch.uint8)

    def decode(self, rows: Tensor) -> Tensor:
        return rows.view(torch.bfloat16).float()


class Int8Codec(Codec):
    """One byte per element, and four for each block's scale.

    A block with a NaN or an infinity decodes to NaN, so that it is not hidden.
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
        num_blocks = rows.shape[1] // (BLOCK + 4)
        scales = rows[:, : 4 * num_blocks].contiguous().view(torch.float32)
        whole = rows[:, 4 * num_blocks :].view(torch.int8).view(len(rows), num_blocks, BLOCK)
        return (whole.float() * scales.unsqueeze(-1)).view(len(rows), -1)


CODECS: dict[str, Codec] = {"bf16": Bfloat16Codec(), "int8": Int8Codec()}


def is_compressible(tensor: Tensor) -> bool:
    """True if a tensor is compressed: not float64, and of :data:`MIN_NUMEL` elements or more."""
    return tensor.dtype in (torch.float32, torch.bfloat16) and tensor.numel() >= MIN_NUMEL
