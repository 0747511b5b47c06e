"""The states of one averaging round, over the CPU path or a collective.

``CPU``: ``COLLECTING`` snapshots, ``COMPUTING`` their average in the background,
``DELIVERING`` it until every rank has acknowledged. Over a collective: ``SYNCING`` until
every rank has acknowledged. There is at most one round at a time, and the next starts
only after the last acknowledgement, so that no report from before a round can trigger
another, and the averaged buffers are no longer read when they are written again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from coordinator.ledger import Epoch
from coordinator.messages import Event
from coordinator.reports import ParamSnapshot, SyncAck


class RoundState(Enum):
    """Where a round stands."""

    NONE = "none"
    COLLECTING = "collecting"
    COMPUTING = "computing"
    DELIVERING = "delivering"
    SYNCING = "syncing"


_NEXT = {
    RoundState.NONE: {RoundState.COLLECTING, RoundState.SYNCING},
    RoundState.COLLECTING: {RoundState.COMPUTING, RoundState.NONE},
    RoundState.COMPUTING: {RoundState.DELIVERING, RoundState.NONE},
    RoundState.DELIVERING: {RoundState.NONE},
    RoundState.SYNCING: {RoundState.NONE},
}


@dataclass(slots=True)
class Round:
    """The round in progress, or the last one while ``state`` is ``NONE``.

    ``ranks`` are those whose state goes in, ``lead`` the one that evaluates and hands
    over the average if it closes ``epoch``. ``doomed``: a rank died in the collective
    before it could say what it put in, so that the round must be undone. ``capture``: a
    checkpoint is made of it.
    """

    id: int = 0
    state: RoundState = RoundState.NONE
    ranks: tuple[int, ...] = ()
    lead: int = 0
    epoch: Epoch | None = None
    generation: int = 0
    doomed: bool = False
    evaluate: int | None = None
    checkpoint: int | None = None
    capture: bool = False
    deadline: float | None = None
    num_failed: int = 0
    snapshots: dict[int, ParamSnapshot] = field(default_factory=dict)
    acks: dict[int, SyncAck] = field(default_factory=dict)
    divergences: dict[int, float] = field(default_factory=dict)
    limits: dict[int, int | None] = field(default_factory=dict)
    average_s: float = 0.0
    num_samples: int = 0

    @property
    def in_flight(self) -> bool:
        """Whether a round is in progress."""
        return self.state is not RoundState.NONE

    def move(self, state: RoundState) -> None:
        """Go to ``state``; an illegal move is a bug."""
        assert state in _NEXT[self.state], f"{self.state} -> {state}"
        self.state = state

    def begin(
        self,
        state: RoundState,
        ranks: tuple[int, ...],
        *,
        epoch: Epoch | None,
        generation: int,
        evaluate: int | None,
        checkpoint: int | None,
        deadline: float | None,
        capture: bool = False,
    ) -> None:
        """Start the next round."""
        self.move(state)
        self.id += 1
        self.ranks = ranks
        self.lead = ranks[0]
        self.epoch = epoch
        self.generation = generation
        self.doomed = False
        self.evaluate = evaluate
        self.checkpoint = checkpoint
        self.capture = capture
        self.deadline = deadline
        self.snapshots = {}
        self.acks = {}
        self.divergences = {}
        self.limits = {}
        self.average_s = 0.0
        self.num_samples = 0

    def accepts(self, message: ParamSnapshot | SyncAck, state: RoundState) -> bool:
        """Whether a reply belongs to this round, in this state, and is the first."""
        seen = self.snapshots if isinstance(message, ParamSnapshot) else self.acks
        return (
            message.round == self.id
            and self.state is state
            and message.rank in self.ranks
            and message.rank not in seen
        )

    def is_part(self, event: Event) -> bool:
        """Whether this answer was taken and the round still waits for others.

        It makes nothing due then, unless what it tells of training lifts a limit.
        """
        taken: ParamSnapshot | SyncAck | None
        if isinstance(event, ParamSnapshot):
            taken, during = self.snapshots.get(event.rank), self.state is RoundState.COLLECTING
        elif isinstance(event, SyncAck):
            taken = self.acks.get(event.rank)
            during = self.state in (RoundState.DELIVERING, RoundState.SYNCING)
        else:
            return False
        return during and taken is not None and taken.round == event.round

    def forget_tensors(self) -> None:
        """Drop the references to the snapshots."""
        self.snapshots = {}

    def drop(self, rank: int) -> None:
        """The rank is dead: nothing of it is waited for."""
        self.ranks = tuple(r for r in self.ranks if r != rank)
        self.acks.pop(rank, None)

    @property
    def all_snapshots(self) -> bool:
        return len(self.snapshots) == len(self.ranks)

    @property
    def all_acks(self) -> bool:
        return len(self.acks) == len(self.ranks)
