"""Events, causes and gaps of a timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, unique
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened on a rank or at the coordinator.

    Attributes:
        kind: The kind of event.
        rank: The rank; ``None``: the coordinator.
        start_s: Start, in seconds since the start of the run.
        end_s: End, likewise; equal to ``start_s`` for an instant.
        args: Arguments by name; numbers and short texts.
    """

    kind: Kind
    rank: int | None
    start_s: float
    end_s: float
    args: Mapping[str, Value] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.start_s

    def as_dict(self) -> dict[str, Any]:
        """The event as a JSON object."""
        return {
            "kind": self.kind.value,
            "rank": self.rank,
            "start_s": self.start_s,
            "end_s": self.end_s,
            **({"args": dict(self.args)} if self.args else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleGap:
    """An interval in which a rank did not train.

    Attributes:
        rank: The rank.
        cause: Its activity in the interval.
        start_s: Start, in seconds since the start of the run.
        duration_s: Duration in seconds.
    """

    rank: int
    cause: Cause
    start_s: float
    duration_s: float


class Cause(IntEnum):
    """Activity of a rank; exactly one at each moment.

    On a CUDA device these are host times: ``COMPUTE`` is the time in which the worker submits work
    to its device, or waits because it is too far ahead of the device.
    """

    UNATTRIBUTED = 0
    """None of the others."""
    STARTUP = 1
    """Building the replica, and waiting until the other ranks have built theirs."""
    COMPUTE = 2
    """Forward, backward and the optimizer's step, and capturing them as a graph."""
    DATA = 3
    """Waiting for a batch, or reading it in the worker's thread."""
    SYNC = 4
    """Waiting for the other ranks to join a collective."""
    PARKED = 5
    """Throttled: too far ahead of the other ranks."""
    IDLE = 6
    """Without a plan: nothing to train at present."""
    AVERAGING = 7
    """Copying parameters, and exchanging parameters or gradients."""
    CALLBACKS = 8
    """``epoch_fn``, ``eval_fn``, and checkpoints: ``checkpoint_fn`` and copies of the state."""
    CONTROL = 9
    """Replying to messages, reporting, and the loop between steps."""
    ENDING = 10
    """The final snapshot and shutdown."""
    GONE = 11
    """The rank has ended while the run continues."""

    @property
    def label(self) -> str:
        """The name in tables and pages."""
        return self.name.lower()


NUM_CAUSES = len(Cause)

# Plain integers for the worker's thread: enum members are several times as slow, and mixed types
# at one place defeat the interpreter's specialization.
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
"""Names of the arguments of each kind of event, in order."""

GAP_KINDS: Mapping[Cause, Kind] = {
    Cause.STARTUP: Kind.STARTUP,
    Cause.DATA: Kind.DATA,
    Cause.SYNC: Kind.SYNC,
    Cause.IDLE: Kind.IDLE,
    Cause.CONTROL: Kind.CONTROL,
    Cause.ENDING: Kind.ENDING,
}
"""Kinds of the gaps that are events; other gaps are within a more specific event."""
