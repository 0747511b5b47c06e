"""What a timeline tells of: events, gaps, and a run in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts of a run that are known when it begins.

    Attributes:
        devices: Name of each rank's device.
        policy: When replicas average.
        backend: The transport of averaging.
        backend_reason: Why this transport is used.
        num_epochs: Number of epochs to train.
        batch_size: Samples in a batch; the mean if ranks have different batch sizes.
        batch_sizes: Batch size of each rank, if they differ.
        num_samples: Length of the data set.
    """

    devices: tuple[str, ...]
    policy: str
    backend: str
    backend_reason: str = ""
    num_epochs: int = 0
    batch_size: int = 0
    batch_sizes: tuple[int, ...] = ()
    num_samples: int = 0


TOLD = 0.001
"""Smaller parts of a rank's time are left out of its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank's time.

    Attributes:
        rank: The rank.
        device: Its device, by name.
        wall_s: Seconds since the start of the run, or its whole duration: the same for all
            ranks of a run that is over.
        causes: Seconds by cause, named as in :class:`Cause` in lower case; they sum to
            ``wall_s``.
        idle_share: Share of ``wall_s`` in which the rank waited for data or for peers, was
            parked, had no plan or was gone.
        num_steps: Optimizer steps made.
        num_batches: Batches reported to the coordinator.
        num_samples: Samples in them.
        throughput: These samples per second of ``wall_s``.
        num_throttles: Number of times the rank was parked.
        num_dropped: Events that the ring has dropped.
    """

    rank: int
    device: str
    wall_s: float
    causes: Mapping[str, float]
    idle_share: float
    num_steps: int
    num_batches: int
    num_samples: int
    throughput: float
    num_throttles: int
    num_dropped: int

    @property
    def unattributed_share(self) -> float:
        """Share of ``wall_s`` without a known cause."""
        return share(self.causes[Cause.UNATTRIBUTED.label], self.wall_s)

    def __str__(self) -> str:
        """One line: what the time went to, most of it first."""
        parts = sorted(self.causes.items(), key=lambda part: -part[1])
        shares = [(name, share(seconds, self.wall_s)) for name, seconds in parts]
        told = ", ".join(f"{name} {part:.1%}" for name, part in shares if part >= TOLD)
        return (
            f"rank {self.rank} ({self.device}): {self.num_samples:,} samples, "
            f"{self.throughput:,.0f} a second, idle {self.idle_share:.1%}: {told}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSummary:
    """A run in numbers.

    Attributes:
        state: ``"empty"``, ``"running"``, ``"finished"``, ``"stopped"`` or ``"failed"``.
        error: Why it failed, on one line.
        wall_s: Seconds since its start, or its whole duration.
        model: Class of the model, once it is built.
        facts: What was known when it began; ``None`` while ``state`` is ``"empty"``.
        ranks: One record for each rank.
        num_epochs: Epochs closed.
        num_averagings: Averagings done; under ``SYNC`` the global steps.
        num_failed_rounds: Averaging rounds given up.
        anchor: Latest number of batches of the slowest rank between two averagings.
        coordinator_busy_s: Seconds that the coordinator spent on events.
        num_dropped: Events that the rings have dropped, in total.
    """

    state: str
    error: str | None = None
    wall_s: float = 0.0
    model: str = ""
    facts: RunFacts | None = None
    ranks: tuple[RankSummary, ...] = ()
    num_epochs: int = 0
    num_averagings: int = 0
    num_failed_rounds: int = 0
    anchor: int = 0
    coordinator_busy_s: float = 0.0
    num_dropped: int = 0

    def __str__(self) -> str:
        """A line for the run, and one for each rank."""
        error = f" ({self.error})" if self.error else ""
        first = (
            f"{self.model or 'run'}: {self.state} after {self.wall_s:.2f} s{error}; "
            f"{self.num_epochs} epochs, {self.num_averagings} averagings"
        )
        return "\n".join([first, *map(str, self.ranks)])

    def as_dict(self) -> dict[str, Any]:
        """As plain numbers, texts, lists and dictionaries."""
        return asdict(self)


_WAITS = (Cause.DATA, Cause.SYNC, Cause.PARKED, Cause.IDLE, Cause.GONE)


def idle_seconds(seconds: list[float]) -> float:
    """Seconds of a rank's time in which it waited."""
    return sum(seconds[cause] for cause in _WAITS)


def share(part: float, whole: float) -> float:
    """``part`` of ``whole``; 0 of nothing."""
    return part / whole if whole > 0 else 0.0
