"""A run in numbers: TimelineSummary, RankSummary and RunFacts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runtime.timeline.events import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSummary:
    """A run in numbers.

    Attributes:
        state: ``"empty"``, ``"running"``, ``"finished"``, ``"stopped"`` or ``"failed"``.
        error: The error, on one line, if it failed.
        wall_s: Seconds since its start, or its whole duration.
        model: Class of the model, once it is built.
        facts: Facts known at the start; ``None`` while ``state`` is ``"empty"``.
        ranks: The summary of each rank.
        num_epochs: Epochs closed.
        num_averagings: Averagings done; under ``SYNC`` the global steps.
        num_failed_rounds: Averaging rounds given up.
        anchor: Latest number of batches of the slowest rank between two averagings.
        coordinator_busy_s: Seconds that the coordinator spent on events.
        num_dropped: Events dropped by all rings.
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
        """One line for the run and one for each rank."""
        error = f" ({self.error})" if self.error else ""
        first = (
            f"{self.model or 'run'}: {self.state} after {self.wall_s:.2f} s{error}; "
            f"{self.num_epochs} epochs, {self.num_averagings} averagings"
        )
        return "\n".join([first, *map(str, self.ranks)])

    def as_dict(self) -> dict[str, Any]:
        """The summary as a JSON object."""
        return asdict(self)


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
        num_samples: Samples in these batches.
        throughput: Samples per second of ``wall_s``.
        num_throttles: Times the rank was parked.
        num_dropped: Events dropped by the ring.
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
        """One line: shares of time, the largest first."""
        parts = sorted(self.causes.items(), key=lambda part: -part[1])
        shares = [(name, share(seconds, self.wall_s)) for name, seconds in parts]
        listed = ", ".join(f"{name} {part:.1%}" for name, part in shares if part >= MIN_SHOWN)
        return (
            f"rank {self.rank} ({self.device}): {self.num_samples:,} samples, "
            f"{self.throughput:,.0f} a second, idle {self.idle_share:.1%}: {listed}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts of a run that are known at its start.

    Attributes:
        devices: Name of each rank's device.
        policy: Averaging policy.
        backend: Transport of averaging.
        backend_reason: Reason for this transport.
        num_epochs: Number of epochs to train.
        batch_size: Samples in a batch; the mean if ranks have different batch sizes.
        batch_sizes: Batch size of each rank, if they differ.
        num_samples: Length of the data set.
        global_batch: Samples of an optimizer step on all ranks together; 0: each rank makes steps
            of its own.
        batch_text: The batch and its division among the ranks, as text.
        steps_per_epoch: Optimizer steps in an epoch, of each rank on average.
        lr_factor: Factor of the learning rate by the number of devices.
    """

    devices: tuple[str, ...]
    policy: str
    backend: str
    backend_reason: str = ""
    num_epochs: int = 0
    batch_size: int = 0
    batch_sizes: tuple[int, ...] = ()
    num_samples: int = 0
    global_batch: int = 0
    batch_text: str = ""
    steps_per_epoch: int = 0
    lr_factor: float = 1.0

    @property
    def batch_line(self) -> str:
        """Batch, steps and factor of the learning rate, separated by semicolons."""
        each = "" if self.global_batch else " on each worker"
        epochs = f"{self.num_epochs:,} epoch{'s' if self.num_epochs != 1 else ''}"
        steps = f"{self.steps_per_epoch:,} steps an epoch{each}, {epochs}"
        return f"{self.batch_text}; {steps}; learning rate x {self.lr_factor:.4g}"


MIN_SHOWN = 0.001
"""Smallest share of a rank's time that its line shows."""
_WAITS = (Cause.DATA, Cause.SYNC, Cause.PARKED, Cause.IDLE, Cause.GONE)


def idle_seconds(seconds: list[float]) -> float:
    """Seconds in which a rank waited."""
    return sum(seconds[cause] for cause in _WAITS)


def share(part: float, whole: float) -> float:
    """``part / whole``; 0 if ``whole`` is 0."""
    return part / whole if whole > 0 else 0.0
