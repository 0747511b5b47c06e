"""The records of the chunk pool: an open epoch, and what a rank holds of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.dispatch import BatchSet
from coordinator.metrics import EpochTally


@dataclass(slots=True)
class Epoch:
    """One open epoch.

    ``told`` are the ranks that had a plan of it, ``worked`` says that a round has carried
    its evaluation and checkpoint to ``lead``, ``evaluation`` is what came back, ``saved``
    says that the checkpoint function has returned, ``parts`` is what each rank was dealt of
    it before the run was interrupted.
    """

    epoch: int
    num_batches: int
    started_at: float
    tally: EpochTally
    open: BatchSet
    quotas: list[int] | None = None
    num_settled: int = 0
    num_samples: int = 0
    num_retrained: int = 0
    num_averagings: int = 0
    told: set[int] = field(default_factory=set)
    worked: bool = False
    lead: int = -1
    evaluation: dict[str, float] | None = None
    saved: bool = False
    parts: dict[int, tuple[range, ...]] | None = None

    @property
    def settled(self) -> bool:
        """Whether the effect of every batch is in the result."""
        return self.num_settled == self.num_batches

    def take_parts(
        self, ranks: Sequence[int], spans: Sequence[range]
    ) -> dict[int, tuple[range, ...]]:
        """What an interrupted run had dealt, if it is all of ``spans`` and for these ranks."""
        parts, self.parts = self.parts, None
        if parts is None or set(parts) != set(ranks):
            return {}
        dealt = sorted(b for part in parts.values() for span in part for b in span)
        return parts if dealt == [b for span in spans for b in span] else {}


@dataclass(slots=True)
class Ledger:
    """What one rank holds, oldest first, as ``(epoch, ranges of batches)``."""

    assigned: deque[tuple[int, range]] = field(default_factory=deque)
    trained: list[tuple[int, range]] = field(default_factory=list)
    in_round: list[tuple[int, range]] = field(default_factory=list)

    @property
    def num_assigned(self) -> int:
        return sum(len(span) for _, span in self.assigned)

    def note_trained(self, epoch: int, span: range) -> None:
        """Batches were trained; with those right before them they are one range."""
        if self.trained:
            number, last = self.trained[-1]
            if number == epoch and last.stop == span.start and last.step == span.step == 1:
                self.trained[-1] = (epoch, range(last.start, span.stop))
                return
        self.trained.append((epoch, span))


@dataclass(slots=True)
class LockstepPlan:
    """What all ranks were dealt together under ``SYNC``, and what is known of it.

    Attributes:
        epoch: Its epoch.
        parts: The batches of each rank, in order.
        first_window: Optimizer steps that every rank had made before it.
        num_windows: Optimizer steps in it.
        first_step: Batches that all ranks had trained before it.
        told: Batches of it that each rank has reported.
    """

    epoch: int
    parts: dict[int, tuple[range, ...]]
    first_window: int
    num_windows: int
    first_step: int
    told: dict[int, int] = field(default_factory=dict)
