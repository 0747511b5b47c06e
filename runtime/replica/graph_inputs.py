"""Batches in memory that stays where it is, as the replay of a graph needs them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.data.batches import map_batch, parts_of

MAX_KINDS = 8
"""Kinds of batches that are held, each with memory of its own."""


def kind_of(batch: Any) -> Hashable | None:
    """What two batches must share for one graph to serve both; ``None``: none can.

    That is the containers, the tensors' shapes and dtypes, and the values of everything
    that is no tensor.
    """
    if isinstance(batch, Tensor):
        plain = type(batch) is Tensor and batch.layout is torch.strided
        return (tuple(batch.shape), batch.dtype, batch.device) if plain else None
    if callable(getattr(batch, "to", None)):
        return None
    if isinstance(batch, Mapping):
        parts = [(key, kind_of(part)) for key, part in batch.items()]
        return None if any(kind is None for _, kind in parts) else (type(batch), tuple(parts))
    if isinstance(batch, tuple | list):
        kinds = [kind_of(part) for part in batch]
        return None if any(kind is None for kind in kinds) else (type(batch), tuple(kinds))
    try:
        hash(batch)
    except TypeError:
        return None
    return (type(batch), batch)


@dataclass(frozen=True, slots=True)
class Held:
    """A batch in memory of its own.

    Attributes:
        kind: See :func:`kind_of`.
        data: The batch, with tensors that the next batch of its kind overwrites.
    """

    kind: Hashable
    data: Any


class HeldBatches:
    """Memory for the batches of a window. In the worker's thread, on its compute stream."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, Hashable], Held] = {}

    def hold(self, index: int, batch: Any) -> Held | None:
        """Copy a batch to its memory, on the device; the host does not wait.

        Args:
            index: Which micro-batch of the window it is.
            batch: On the device.

        Returns:
            ``None`` if no graph can serve such batches, or there are too many kinds.
        """
        kind = kind_of(batch)
        if kind is None:
            return None
        held = self._held.get((index, kind))
        if held is None:
            if len({known for _, known in self._held} | {kind}) > MAX_KINDS:
                return None
            held = Held(kind, map_batch(batch, torch.empty_like))
            self._held[index, kind] = held
        targets = parts_of(held.data)
        if targets:
            torch._foreach_copy_(targets, parts_of(batch))
        return held
