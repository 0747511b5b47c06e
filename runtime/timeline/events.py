"""What a timeline tells of: things that happened at a time, or took some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, unique
from typing import Any

# -- What a rank's time goes to --


class Cause(IntEnum):
    """What a rank is doing; at each moment it is exactly one of these.

    On a CUDA device these are the times of the host: ``COMPUTE`` is the time in which the
    worker gives its device work or waits because it is too far ahead of it.
    """

    UNATTRIBUTED = 0
    """In none of the parts of its life that have a name."""
    STARTUP = 1
    """Building the replica, and waiting for the others to have built theirs."""
    COMPUTE = 2
    """Forward, backward and the optimizer's step, and capturing them as a graph."""
    DATA = 3
    """Waiting for a batch, or reading it where that is done in the worker's thread."""
    SYNC = 4
    """Waiting for the other ranks to join a collective."""
    PARKED = 5
    """Throttled, because it is too far ahead of the others."""
    IDLE = 6
    """No plan, because nothing is left to train for now."""
    AVERAGING = 7
    """Copying parameters and exchanging them or gradients."""
    CALLBACKS = 8
    """``epoch_fn``, ``eval_fn``, and checkpoints: ``checkpoint_fn`` and copies of the state."""
    CONTROL = 9
    """Answering messages, reporting, and the loop between the steps."""
    ENDING = 10
    """The final snapshot and leaving."""
    GONE = 11
    """The rank has ended, and the run goes on."""

    @property
    def label(self) -> str:
        """As tables and pages name it."""
        return self.name.lower()


NUM_CAUSES = len(Cause)

# Plain numbers, which is all that a worker's thread handles: members of an enumeration cost it
# several times as much, and both kinds at one place undo what the interpreter specialises.
UNATTRIBUTED = int(Cause.UNATTRIBUTED)
STARTUP = int(Cause.STARTUP)
COMPUTE = int(Cause.COMPUTE)
DATA = int(Cause.DATA)
SYNC = int(Cause.SYNC)
PARKED = int(Cause.PARKED)
IDLE = int(Cause.IDLE)
AVERAGING = int(Cause.AVERAGING)
CALLBACKS = int(Cause.CALLBACKS)
CONTROL = int(Cause.CONTROL)
ENDING = int(Cause.ENDING)
GONE = int(Cause.GONE)

Value = int | float | str | None


@unique
class Kind(Enum):
    """Kind of an event; its value is its name in every output."""

    RUN = "run"
    EPOCH = "epoch"
    CHUNK = "chunk"
    STEP = "step"
    STARTUP = "startup"
    DATA = "data"
    SYNC = "sync"
    IDLE = "idle"
    CONTROL = "control"
    ENDING = "ending"
    AVERAGING = "averaging"
    PHASE = "phase"
    THROTTLE = "throttle"
    RESUME = "resume"
    ANCHOR = "anchor"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    EPOCH_FN = "epoch_fn"
    FAILURE = "failure"
    STOP = "stop"


ARGS: Mapping[Kind, tuple[str, ...]] = {
    Kind.EPOCH: ("epoch",),
    Kind.CHUNK: ("epoch", "batches"),
    Kind.STEP: ("step", "batches", "samples"),
    Kind.AVERAGING: ("round", "part"),
    Kind.PHASE: ("round", "phase"),
    Kind.THROTTLE: ("rank", "limit"),
    Kind.RESUME: ("rank",),
    Kind.ANCHOR: ("anchor", "before"),
    Kind.CHECKPOINT: ("version", "part"),
    Kind.EVALUATION: ("epoch",),
    Kind.EPOCH_FN: ("epoch",),
    Kind.FAILURE: ("rank", "epoch", "step", "error"),
    Kind.STOP: ("reason",),
}
"""Names of what an event of each kind carries, in order."""

STRETCHES: Mapping[Cause, Kind] = {
    Cause.STARTUP: Kind.STARTUP,
    Cause.DATA: Kind.DATA,
    Cause.SYNC: Kind.SYNC,
    Cause.IDLE: Kind.IDLE,
    Cause.CONTROL: Kind.CONTROL,
    Cause.ENDING: Kind.ENDING,
}
"""Gaps that are events of their own; the others lie inside an event that says more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened on a rank or at the coordinator.

    Attributes:
        kind: What it was.
        rank: On which rank; ``None``: at the coordinator.
        start_s: When it began, in seconds since the start of the run.
        end_s: When it ended; the same for what took no time.
        args: What else is known, by name; numbers and short texts.
    """

    kind: Kind
    rank: int | None
    start_s: float
    end_s: float
    args: Mapping[str, Value] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        """How long it took, in seconds."""
        return self.end_s - self.start_s

    def as_dict(self) -> dict[str, Any]:
        """As plain numbers and texts."""
        return {
            "kind": self.kind.value,
            "rank": self.rank,
            "start_s": self.start_s,
            "end_s": self.end_s,
            **({"args": dict(self.args)} if self.args else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleGap:
    """A stretch of time in which a rank did not train.

    Attributes:
        rank: The rank.
        cause: Why.
        start_s: When it began, in seconds since the start of the run.
        duration_s: How long it took.
    """

    rank: int
    cause: Cause
    start_s: float
    duration_s: float
