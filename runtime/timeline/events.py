"""What a timeline tells of: things that happened at a time, or took some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any

from runtime.timeline.causes import Cause

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
