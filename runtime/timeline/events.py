"""What a timeline tells of: events, gaps, and a run in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, unique
from typing import Any


class Cause(IntEnum):
    """What a rank is doing; at each moment it is exactly one of these.

    On a CUDA device these are times of the host: ``COMPUTE`` is the time in which the worker
    submits work to its device, or waits because it is too far ahead of the device.
    """

    UNATTRIBUTED = 0
    """None of the other causes."""
    STARTUP = 1
    """Building the replica, and waiting until the other ranks have built theirs."""
    COMPUTE = 2
    """Forward, backward and the optimizer's step, and capturing them as a graph."""
    DATA = 3
    """Waiting for a batch, or reading it if the worker's thread does that."""
    SYNC = 4
    """Waiting for the other ranks to join a collective."""
    PARKED = 5
    """Throttled, because it is too far ahead of the others."""
    IDLE = 6
    """Without a plan, because nothing is left to train for now."""
    AVERAGING = 7
    """Copying parameters, and exchanging parameters or gradients."""
    CALLBACKS = 8
    """``epoch_fn``, ``eval_fn``, and checkpoints: ``checkpoint_fn`` and copies of the state."""
    CONTROL = 9
    """Answering messages, reporting, and the loop between the steps."""
    ENDING = 10
    """The final snapshot and leaving."""
    GONE = 11
    """The rank has ended while the run continues."""

    @property
    def label(self) -> str:
        """The name in tables and pages."""
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
    TRANSPORT = "transport"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    EPOCH_FN = "epoch_fn"
    FAILURE = "failure"
    STOP = "stop"
    MACHINES = "machines"
    """A round between the machines of a cluster was committed."""


ARGS: Mapping[Kind, tuple[str, ...]] = {
    Kind.EPOCH: ("epoch",),
    Kind.CHUNK: ("epoch", "batches"),
    Kind.STEP: ("step", "batches", "samples"),
    Kind.AVERAGING: ("round", "part", "divergence"),
    Kind.PHASE: ("round", "phase"),
    Kind.THROTTLE: ("rank", "limit"),
    Kind.RESUME: ("rank",),
    Kind.ANCHOR: ("anchor", "before"),
    Kind.TRANSPORT: ("backend", "before", "reason"),
    Kind.CHECKPOINT: ("version", "part"),
    Kind.EVALUATION: ("epoch",),
    Kind.EPOCH_FN: ("epoch",),
    Kind.FAILURE: ("rank", "epoch", "step", "error"),
    Kind.STOP: ("reason",),
    Kind.MACHINES: ("round", "machines", "lasted_s"),
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
        kind: The kind of event.
        rank: The rank; ``None``: the coordinator.
        start_s: When it began, in seconds since the start of the run.
        end_s: When it ended, likewise; equal to ``start_s`` if it took no time.
        args: Further values by name; numbers and short texts.
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
