"""What loggers tell of an epoch and how a run closes them; tables of it, and several at once."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Iterator

from coordinator.metrics import MEASURED, EpochMetrics, StepMetrics
from runtime.core.threads import Closing

_RUNS = threading.Lock()  # of the counts of all loggers, for a moment each


class RunLogger(Closing):
    """A logger that the run closes at its end, if passed as ``metrics_fn``.

    A logger shared by several runs is closed with the last of them. Any thread may call it.
    """

    _num_runs = 0

    def __call__(self, metrics: EpochMetrics | StepMetrics) -> object:
        """Write the metrics of an epoch or of some steps; ``False`` ends the run."""
        raise NotImplementedError

    def begin_run(self) -> None:
        """Register a run that will use the logger; called by the run."""
        with _RUNS:
            self._num_runs += 1

    def end_run(self) -> None:
        """A run has called it for the last time; called by the run, once."""
        with _RUNS:
            self._num_runs -= 1
            last = self._num_runs == 0
        if last:
            self.close()

    def close(self) -> None:
        """Close what is open. Idempotent; the next metrics open it again."""


class Names:
    """Names for scalars: harmless, and different for what differs.

    Args:
        clean: Makes a name harmless; it may make two names the same.
        reserved: Whether no scalar may get a name.
    """

    def __init__(self, clean: Callable[[str], str], reserved: Callable[[str], bool]) -> None:
        self._clean = clean
        self._reserved = reserved
        self._given: dict[str, str] = {}
        self._used: set[str] = set()

    def of(self, name: str) -> str:
        """The name to use; always the same for the same one."""
        given = self._given.get(name)
        if given is None:
            given = self._clean(name)
            if given in self._used or self._reserved(given):
                digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()
                given = f"{given}#{digest[:8]}"
            self._given[name] = given
            self._used.add(given)
        return given


logger = logging.getLogger(__name__)

Number = int | float

EPOCH_FIELDS = (
    "avg_loss",
    "epoch_s",
    "num_samples",
    "num_retrained",
    "num_skipped",
    "num_averagings",
)
STEP_FIELDS = ("avg_loss", "learning_rate", "throughput")
RANK_FIELDS = ("num_samples", "throughput", "batch_share")


def epoch_values(metrics: EpochMetrics) -> Iterator[tuple[str, Number]]:
    """The numbers of an epoch itself, by name."""
    for name in EPOCH_FIELDS:
        yield name, getattr(metrics, name)
    for name in MEASURED:
        if not math.isnan(value := getattr(metrics, name)):
            yield name, value


def step_values(metrics: StepMetrics) -> Iterator[tuple[str, Number]]:
    """The numbers of some steps, by name; unknown ones are left out."""
    for name in STEP_FIELDS:
        if not math.isnan(value := getattr(metrics, name)):
            yield name, value


def rank_values(metrics: EpochMetrics) -> Iterator[tuple[str, Number]]:
    """The numbers of each rank, by name; throughput in samples per second of computing."""
    for rank in metrics.per_rank:
        share = metrics.per_rank_batch_share[rank.rank]
        values = (rank.num_samples, rank.throughput, share)
        for name, value in zip(RANK_FIELDS, values, strict=True):
            yield f"rank{rank.rank}/{name}", value
