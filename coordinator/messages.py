"""The protocol between the coordinator and the workers.

Every message is a frozen dataclass; there is one union for each direction. A
request carries the id of its averaging round and every reply repeats it, so a
reply to a round that was given up can be told from a reply to the current one.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.contents import Allowance, EpochPlan, Payload, Tally
from coordinator.reports import (
    BatchReport,
    Captured,
    CheckpointDone,
    EpochReport,
    EvalReport,
    Exiting,
    Extra,
    Failed,
    FinalSnapshot,
    FromWorker,
    Halted,
    ParamSnapshot,
    Ready,
    Regrouped,
    SyncAck,
)
from coordinator.requests import (
    Capture,
    Checkpoint,
    Evaluate,
    Halt,
    Regroup,
    RequestParams,
    Resume,
    Rollback,
    SetGlobalStep,
    Shutdown,
    StartEpoch,
    SyncNow,
    Throttle,
    ToWorker,
    Update,
)

__all__ = [
    "AbortRequested",
    "Allowance",
    "Averaged",
    "BatchReport",
    "Capture",
    "Captured",
    "Checkpoint",
    "CheckpointDone",
    "EpochPlan",
    "EpochReport",
    "EvalReport",
    "Evaluate",
    "Event",
    "Exiting",
    "Extra",
    "Failed",
    "FinalSnapshot",
    "FromService",
    "FromWorker",
    "Halt",
    "Halted",
    "ParamSnapshot",
    "Payload",
    "Ready",
    "Regroup",
    "Regrouped",
    "RequestParams",
    "Resume",
    "Rollback",
    "SaveRequested",
    "SetGlobalStep",
    "Shutdown",
    "StartEpoch",
    "StopRequested",
    "SyncAck",
    "SyncNow",
    "Tally",
    "ThreadEnded",
    "Throttle",
    "Tick",
    "ToWorker",
    "Update",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    """The background computation of a round has ended.

    Attributes:
        round: Id of the round; -1 for the final average.
        average: The result; ``None`` if the computation failed.
        num_samples: Sum of the weights.
        divergences: ``(rank, ||snapshot - average|| / ||average||)``.
        compute_s: Time the computation took.
        error: Why there is no result.
        kept: A copy of the result that nobody overwrites, if it was asked for.
    """

    round: int
    average: Payload | None
    num_samples: float = 0
    divergences: tuple[tuple[int, float], ...] = ()
    compute_s: float = 0.0
    error: BaseException | None = None
    kept: Payload | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """``stop()`` was called, or the metrics function returned ``False``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequested:
    """``save()`` was called.

    Attributes:
        ticket: Tells the calls apart.
    """

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequested:
    """A second signal: the run ends without waiting for a step boundary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadEnded:
    """A worker's thread has ended; if nothing was heard of it before, it is dead."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A deadline of the machine may have passed."""


FromService = Averaged | StopRequested | SaveRequested | AbortRequested | ThreadEnded | Tick
Event = FromWorker | FromService
