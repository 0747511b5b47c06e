"""Optimizer steps that all ranks make together under ``SYNC``: their plans and their account."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

Pieces = tuple[tuple[int, ...], ...]
"""For each micro-batch of a global batch, the samples of each rank's piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Global batches of one epoch for all ranks to train together.

    A global batch is trained in consecutive micro-batches, each split into contiguous pieces in the
    order of ranks: its samples do not depend on the split.

    Attributes:
        span: Its batches, from the start of a global batch.
        start: Position of the first sample in the epoch's permutation.
        ranks: The ranks that take part, ascending.
        whole: The pieces of a whole global batch.
        last: Those of the last one, which may have fewer batches.
        per_global: Batches in a global batch.
        first_step: Batches of all ranks before it: the position of the schedule.
        key_stride: Distance of the keys of pieces beyond one for each batch of a global batch;
            above all numbers of batches.
        omits_empty: Pieces are the batches themselves, and no others follow in the epoch: a rank
            but the first has no pieces after its last one with samples.
    """

    epoch: int
    span: range
    start: int
    ranks: tuple[int, ...]
    whole: Pieces
    last: Pieces
    per_global: int
    first_step: int
    key_stride: int
    omits_empty: bool = False

    @property
    def num_global(self) -> int:
        return -(-len(self.span) // self.per_global)

    @property
    def num_slices(self) -> int:
        return len(self.whole)

    @property
    def part(self) -> Fraction | int:
        """The size of a piece, in batches."""
        num = self.num_slices * len(self.ranks)
        return Fraction(self.per_global, num) if num != self.per_global else 1

    def num_pieces(self, rank: int) -> int:
        """Pieces of a rank, empty ones included."""
        if rank not in self.ranks:
            return 0
        num, place = self.num_global * self.num_slices, self.ranks.index(rank)
        for sizes in reversed(self.last) if self.omits_empty and place else ():
            if sizes[place]:
                break
            num -= 1
        return num

    def pieces(self, rank: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """The key of each piece of a rank, which seeds the data set's random draws for it, and its
        samples, as positions ``[start, stop)`` in the epoch's permutation.

        With one piece for each batch of the global batch the keys are the numbers of the batches.
        """
        return islice(self._pieces(rank), self.num_pieces(rank))

    def _pieces(self, rank: int) -> Iterator[tuple[int, tuple[int, int]]]:
        start, num_samples = self.start, sum(map(sum, self.whole))
        whole, last = self._layout(self.whole, rank), self._layout(self.last, rank)
        for first in range(self.span.start, self.span.stop, self.per_global):
            is_last = first + self.per_global >= self.span.stop
            for key, begin, size in last if is_last else whole:
                yield first + key, (start + begin, start + begin + size)
            start += num_samples

    def _layout(self, pieces: Pieces, rank: int) -> list[tuple[int, int, int]]:
        """Key, first sample and size of a rank's pieces in a global batch."""
        place, start, found = self.ranks.index(rank), 0, []
        for i, sizes in enumerate(pieces):
            turn, key = divmod(i * len(sizes) + place, self.per_global)
            found.append((key + turn * self.key_stride, start + sum(sizes[:place]), sizes[place]))
            start += sum(sizes)
        return found

    def trained_by(self, first: int, stop: int) -> tuple[int, ...]:
        """The ranks with samples in the global batches ``[first, stop)`` of the plan."""
        some = self.whole if first + 1 < self.num_global else ()
        some += self.last if stop >= self.num_global else ()
        return tuple(rank for i, rank in enumerate(self.ranks) if any(sizes[i] for sizes in some))


class StepQueue:
    """The account of ``SYNC``: the plans of all ranks, and how much of them is settled.

    The batches belong to no single rank: those of a global batch are settled once the first rank
    has reported its last piece of it. An epoch is trained in order, so that what is settled is a
    number.

    Attributes:
        plans: Those that some rank has not completed, oldest first, and the last one; of one epoch
            and the same ranks.
        num_steps: Optimizer steps assigned since the start of the run.
        settled: Batches of the plans that are settled.
    """

    def __init__(self, accumulate: int) -> None:
        self._accumulate = accumulate
        self.plans: list[StepPlan] = []
        self.num_steps = 0
        self.settled = 0
        self._reported: dict[int, int] = {}  # pieces of each rank, from the first plan on

    def clear(self) -> None:
        """Drop the plans: all ranks have completed them."""
        self.plans, self.settled, self._reported = [], 0, {}

    def add(self, plan: StepPlan) -> None:
        """Add an assigned plan, and drop those that every rank has reported: no death can undo
        them.
        """
        self.plans.append(plan)
        self.num_steps += self.steps_of(plan)
        while len(self.plans) > 1:
            first = self.plans[0]
            nums = {rank: first.num_pieces(rank) for rank in first.ranks}
            if any(self._reported.get(rank, 0) < num for rank, num in nums.items()):
                return
            self.plans.pop(0)
            self.settled -= len(first.span)
            for rank, num in nums.items():
                self._reported[rank] -= num

    def steps_of(self, plan: StepPlan) -> int:
        return -(-plan.num_global // self._accumulate)

    @property
    def may_continue(self) -> bool:
        """True if a plan may follow: a short optimizer step is the last one."""
        return self.plans[-1].num_global % self._accumulate == 0

    @property
    def unsettled(self) -> tuple[range, ...]:
        """The batches that are not settled, in order."""
        return self._batches(self.settled)

    def report(self, rank: int, num_pieces: int) -> tuple[range, ...]:
        """Record pieces that a rank has trained; returns the batches that are settled by them."""
        reported = self._reported[rank] = self._reported.get(rank, 0) + num_pieces
        num = sum(plan.num_pieces(rank) for plan in self.plans)
        assert reported <= num, f"rank {rank} reports batches that it was not assigned"
        if not self.plans or rank != self.plans[0].ranks[0]:
            return ()
        before = self.settled
        self.settled = self._num_batches(reported // self.plans[0].num_slices)
        return self._batches(before, self.settled)

    @property
    def _num_before(self) -> int:
        return self.num_steps - sum(map(self.steps_of, self.plans))

    def num_steps_of(self, rank: int) -> int:
        """Optimizer steps since the start of the run, up to the last of which a rank has reported
        a piece.
        """
        per_step = self._accumulate * self.plans[0].num_slices
        return self._num_before - (-self._reported.get(rank, 0) // per_step)

    def agree(self, num_steps: int) -> Agreement | None:
        """Drop the plans: exactly ``num_steps`` were made since the start of the run.

        Returns:
            The changes of the account; ``None``: there was no plan.
        """
        num_global = (num_steps - self._num_before) * self._accumulate
        num_undone, self.num_steps = self.num_steps - num_steps, num_steps
        if not self.plans:
            return None
        made = self._num_batches(num_global)
        num_retrained, unreported = 0, {}
        for rank in self.plans[0].ranks:
            sizes = [stop - start for plan in self.plans for _, (start, stop) in plan.pieces(rank)]
            num, reported = self._num_pieces(rank, num_global), self._reported.get(rank, 0)
            num_retrained += sum(sizes[num:reported])
            if num > reported:  # the rank took part in these steps
                unreported[rank] = num - reported, sum(sizes[reported:num])
        agreed = Agreement(
            epoch=self.plans[0].epoch,
            num_undone=num_undone,
            settled=self._batches(self.settled, made),
            reverted=self._batches(made, self.settled),
            reopened=self._batches(made),
            num_retrained=num_retrained,
            unreported=unreported,
        )
        self.clear()
        return agreed

    def _batches(self, start: int, stop: int | None = None) -> tuple[range, ...]:
        return cut([plan.span for plan in self.plans], start, stop)

    def _num_batches(self, num_global: int) -> int:
        """Batches in the first global batches of the plans."""
        total = 0
        for plan in self.plans:
            total += min(max(0, num_global) * plan.per_global, len(plan.span))
            num_global -= plan.num_global
        return total

    def _num_pieces(self, rank: int, num_global: int) -> int:
        """Pieces of a rank in the first global batches of the plans."""
        total = 0
        for plan in self.plans:
            total += min(max(0, num_global) * plan.num_slices, plan.num_pieces(rank))
            num_global -= plan.num_global
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Changes of the account by the agreement on the steps made.

    Attributes:
        num_undone: Optimizer steps that were assigned and not made.
        settled: Batches in steps made that were not settled.
        reverted: Settled batches in steps not made.
        reopened: All batches in steps not made.
        num_retrained: Samples that ranks have reported of these.
        unreported: Batches and samples that each rank has trained and not reported.
    """

    epoch: int
    num_undone: int
    settled: tuple[range, ...]
    reverted: tuple[range, ...]
    reopened: tuple[range, ...]
    num_retrained: int
    unreported: dict[int, tuple[int, int]]


def cut(spans: Iterable[range], start: int, stop: int | None = None) -> tuple[range, ...]:
    """The batches at positions ``[start, stop)`` of the concatenated ranges."""
    parts: list[range] = []
    for span in spans:
        parts.append(span[max(0, start) : None if stop is None else max(0, stop)])
        start -= len(span)
        stop = None if stop is None else stop - len(span)
    return tuple(part for part in parts if part)
