"""Symbolic tensors of the simulation: the batches whose effect is in each state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator import messages as m

Batch = tuple[int, int]
"""(epoch, position in the epoch)"""


class Violation(AssertionError):
    """A violated invariant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced(m.Payload):
    """A payload with the batches whose effect it contains.

    Attributes:
        base: The batches in the average that the replica started from.
        local: The batches that it trained since, in order.
        squares: Norms that were sent with a snapshot of tensors.
        held: The expected tensors of ``base``, if any.
        places: Positions of the batches of ``local`` in them.
        brought: The contributions of the ranks to the collective that made it.
    """

    base: frozenset[Batch] = frozenset()
    local: tuple[Batch, ...] = ()
    squares: tuple[float, ...] | None = None
    held: Any = None
    places: tuple[int, ...] = ()
    brought: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"<{len(self.base)} averaged, since {list(self.local)}>"


def replica(base: frozenset[Batch], local: Iterable[Batch]) -> Traced:
    """The state of a replica."""
    return Traced(params=(), base=base, local=tuple(local))


def squares_of(state: m.Payload) -> tuple[float, ...] | None:
    """The squared norms of a snapshot, for some states only."""
    assert isinstance(state, Traced)
    if state.held is not None:
        return state.squares
    return (float(len(state.base)), float(len(state.local))) if len(state.local) % 3 else None


def average(
    parts: Sequence[Traced], weights: Sequence[float], weight_of: Callable[[Batch], float]
) -> Traced:
    """The weighted average of replicas, every batch in it once."""
    base = parts[0].base
    effects = set(base)
    for part, weight in zip(parts, weights, strict=True):
        if part.base is not base and part.base != base:
            odd = sorted(part.base ^ base)
            raise Violation(f"replicas that start from different averages are averaged: {odd}")
        if sum(map(weight_of, part.local)) != weight:
            raise Violation(f"weight {weight} for the batches {list(part.local)}")
        for batch in part.local:
            if batch in effects:
                raise Violation(f"batch {batch} is in the average twice")
            effects.add(batch)
    return replica(frozenset(effects) if len(effects) > len(base) else base, ())


class SamplesOf:
    """Samples in a batch."""

    def __init__(self, num_samples: int, batch_size: int) -> None:
        self._num_samples = num_samples
        self._batch_size = batch_size

    def __call__(self, batch: Batch) -> int:
        return min(self._batch_size, self._num_samples - batch[1] * self._batch_size)


class WeightOf:
    """The weight of a batch's loss: its samples, or another number for each batch.

    Args:
        samples_of: The samples of a batch.
        own: True if losses come with weights of their own.
    """

    def __init__(self, samples_of: SamplesOf, own: bool) -> None:
        self._samples_of = samples_of
        self.own = own

    def __call__(self, batch: Batch) -> int:
        factor = 1 + sum(batch) % 3 if self.own else 1  # integers, whose sums are exact
        return factor * self._samples_of(batch)
