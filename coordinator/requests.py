"""Messages from the coordinator to a worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.contents import Allowance, EpochPlan, Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEpoch:
    """Train the plan after those already queued."""

    plan: EpochPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncNow:
    """Join the collective of an averaging round at the next step boundary.

    Attributes:
        round: Id of the round.
        allowance: How far to go after it.
        evaluate: Epoch to evaluate on the averaged weights, if any.
        checkpoint: Version to hand to the checkpoint function, if any.
        capture: Whether the acknowledgement shall carry the rank's own state.
    """

    round: int
    allowance: Allowance = field(default_factory=Allowance)
    evaluate: int | None = None
    checkpoint: int | None = None
    capture: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """Send a :class:`ParamSnapshot` for this round.

    Attributes:
        round: Id of the round.
        capture: Whether the snapshot shall carry the rank's own state.
    """

    round: int
    capture: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Send a :class:`Captured`: between two steps, under ``SYNC`` the same on every rank.

    Attributes:
        id: Counts the captures of a run. A worker that has answered this one, because a
            peer heard of it first, skips the message.
    """

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Take the average of a round: add ``average - own snapshot`` to the live state.

    Attributes:
        round: Id of the round whose snapshot the average was made from.
        average: The averaged state; read-only, shared by all ranks.
        num_samples: Sum of the weights; 0: the round changes nothing.
        allowance: How far to go after it.
        evaluate: Epoch to evaluate on the average, if any.
        checkpoint: Version to hand to the checkpoint function, if any.
    """

    round: int
    average: Payload
    num_samples: float = 1
    allowance: Allowance = field(default_factory=Allowance)
    evaluate: int | None = None
    checkpoint: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetGlobalStep:
    """Batches trained by all ranks up to the last round, for the schedule."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """Park once ``limit`` batches have been trained since the last round (0: at once)."""

    limit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Go on, as far as the allowance says (by default: no limit)."""

    allowance: Allowance = field(default_factory=Allowance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Evaluate on the live weights, which hold the average (``SYNC``, one device)."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Hand the live weights, which hold the average, to the checkpoint function."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Finish at the next step boundary, send the final snapshot, leave.

    Attributes:
        snapshot: Whether a :class:`FinalSnapshot` is wanted; not after a failure.
        capture: Whether that shall carry the rank's own state.
    """

    snapshot: bool = True
    capture: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """Undo the collective of a round, which a peer could not complete.

    The worker takes back what the round changed and keeps what it trained since; its
    counters are those of before the round plus what came after.
    """

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Under ``SYNC``, between two steps: leave the plan and say where you stand.

    Attributes:
        generation: The group of ranks that is broken. A worker that has halted for it
            already, or belongs to a later one, skips the message.
    """

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup:
    """Leave the collective of before and join the one of these ranks.

    Attributes:
        generation: Counts the groups of a run; the first is 0.
        ranks: The ranks that are left, ascending; their places are their new ranks.
        step: Under ``SYNC``, the optimizer steps that count; a rank that made fewer takes
            everything from ``donor``.
        donor: A rank that has made all of them.
    """

    generation: int
    ranks: tuple[int, ...]
    step: int | None = None
    donor: int | None = None


ToWorker = (
    StartEpoch
    | SyncNow
    | RequestParams
    | Update
    | SetGlobalStep
    | Throttle
    | Resume
    | Evaluate
    | Checkpoint
    | Capture
    | Rollback
    | Halt
    | Regroup
    | Shutdown
)
