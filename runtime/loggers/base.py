"""RunLogger: base class of loggers, and the metrics that they write."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Iterator

from coordinator.metrics import OPTIONAL_METRICS, EpochMetrics, StepMetrics
from runtime.core.threads import Closeable

_RUN_COUNTS = threading.Lock()  # shared by all loggers


class RunLogger(Closeable):
    """A logger that is closed at the end of the run whose ``metrics_fn`` it is.

    A logger shared by several runs is closed with the last of them. Callable from any thread.
    """

    _num_runs = 0

    def __call__(self, metrics: EpochMetrics | StepMetrics) -> object:
        """Write the metrics of an epoch or of some steps; ``False`` ends the run."""
        raise NotImplementedError

    def begin_run(self) -> None:
        """Register a run that will use the logger; called by the run."""
        with _RUN_COUNTS:
            self._num_runs += 1

    def end_run(self) -> None:
        """Unregister a run, after its last metrics; called by the run, once."""
        with _RUN_COUNTS:
            self._num_runs -= 1
            last = self._num_runs == 0
        if last:
            self.close()

    def close(self) -> None:
        """Close files and connections. Idempotent; the next metrics reopen them."""


class ScalarNames:
    """Maps scalar names to safe and unique names.

    Args:
        clean: Makes a name safe; may map two names to one.
        reserved: True for names that no scalar may get.
    """

    def __init__(self, clean: Callable[[str], str], reserved: Callable[[str], bool]) -> None:
        self._clean = clean
        self._reserved = reserved
        self._assigned: dict[str, str] = {}
        self._used: set[str] = set()

    def of(self, name: str) -> str:
        """The safe name; always the same for the same name."""
        given = self._assigned.get(name)
        if given is None:
            given = self._clean(name)
            if given in self._used or self._reserved(given):
                digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()
                given = f"{given}#{digest[:8]}"
            self._assigned[name] = given
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
    """The metrics of an epoch as a whole, by name."""
    for name in EPOCH_FIELDS:
        yield name, getattr(metrics, name)
    for name in OPTIONAL_METRICS:
        if not math.isnan(value := getattr(metrics, name)):
            yield name, value


def step_values(metrics: StepMetrics) -> Iterator[tuple[str, Number]]:
    """The metrics of some steps, by name, without those that are NaN."""
    for name in STEP_FIELDS:
        if not math.isnan(value := getattr(metrics, name)):
            yield name, value


def rank_values(metrics: EpochMetrics) -> Iterator[tuple[str, Number]]:
    """The metrics of each rank, by name; throughput in samples per second of compute time."""
    for rank in metrics.per_rank:
        share = metrics.per_rank_batch_share[rank.rank]
        values = (rank.num_samples, rank.throughput, share)
        for name, value in zip(RANK_FIELDS, values, strict=True):
            yield f"rank{rank.rank}/{name}", value
