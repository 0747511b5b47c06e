"""Making sure that all ranks wrap the same module in the same way."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from runtime.collective import Collective, ReduceOp
from runtime.core.errors import ReplicaMismatch


def check_same(lines: Sequence[str], collective: Collective) -> None:
    """Compares descriptions over all ranks; a collective call.

    Args:
        lines: This rank's description, one thing a line.
        collective: The ranks.

    Raises:
        ReplicaMismatch: They differ; raised on every rank, naming the first difference.
    """
    text = "\n".join(lines).encode()
    digests = _gather(hashlib.sha256(text).digest(), collective)
    if len(set(digests)) == 1:
        return
    length = torch.tensor([len(text)])
    collective.all_reduce_(length, ReduceOp.MAX)
    padded = text.ljust(int(length.item()), b"\0")
    first, *others = [
        whole.rstrip(b"\0").decode().split("\n") for whole in _gather(padded, collective)
    ]
    for rank, other in enumerate(others, 1):
        for index in range(max(len(first), len(other))):
            here, there = (x[index] if index < len(x) else "nothing" for x in (first, other))
            if here != there:
                raise ReplicaMismatch(
                    f"rank {rank} wraps another module than rank 0, or in another way: it has "
                    f"{there}, rank 0 has {here}; build the same on every rank"
                )


def _gather(data: bytes, collective: Collective) -> list[bytes]:
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    whole = torch.empty(collective.world_size * len(data), dtype=torch.uint8)
    collective.all_gather_into(whole, mine)
    return [bytes(row.tolist()) for row in whole.view(collective.world_size, -1)]
