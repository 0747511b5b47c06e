"""What loggers tell of an epoch, under harmless names, and how a run closes them."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

from coordinator.metrics import MEASURED, EpochMetrics, StepMetrics
from runtime.core.threads import Closing

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
    """The numbers of some steps, by name, as far as they are known."""
    for name in STEP_FIELDS:
        if not math.isnan(value := getattr(metrics, name)):
            yield name, value


def rank_values(metrics: EpochMetrics) -> Iterator[tuple[str, Number]]:
    """The numbers of each rank, by name; throughput in samples for each second of computing."""
    for rank in metrics.per_rank:
        share = metrics.per_rank_batch_share[rank.rank]
        values = (rank.num_samples, rank.throughput, share)
        for name, value in zip(RANK_FIELDS, values, strict=True):
            yield f"rank{rank.rank}/{name}", value


_RUNS = threading.Lock()  # of the counts of all loggers, for a moment each


class RunLogger(Closing):
    """What a run closes when it is over, if it was given it as ``metrics_fn``.

    A logger that several runs share is closed with the last of them. Any thread may call it.
    """

    _num_runs = 0

    def __call__(self, metrics: EpochMetrics | StepMetrics) -> object:
        """Write the metrics of an epoch or of some steps; ``False`` ends the run."""
        raise NotImplementedError

    def begin_run(self) -> None:
        """A run will call it; called by the run."""
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
        """Let go of what is open. Idempotent; a later call opens it anew."""


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


class CombinedLogger(RunLogger):
    """Hands metrics to several loggers or functions, for ``metrics_fn``.

    One that raises is logged, and the others are called all the same. At the end of the run,
    or by :meth:`close`, the loggers of this package among them, and of classes derived from
    them, are closed; other functions and objects are left alone.

    Args:
        functions: Each as ``metrics_fn`` takes it, called in this order.

    Raises:
        TypeError: One of them cannot be called.
    """

    def __init__(self, *functions: Callable[[Any], object]) -> None:
        for function in functions:
            if not callable(function):
                raise TypeError(
                    f"CombinedLogger({function!r:.80}): pass loggers or functions f(EpochMetrics)"
                )
        self._functions = functions

    def __call__(self, metrics: EpochMetrics | StepMetrics) -> bool:
        """Call all of them; ``False``, which ends the run, if one returned ``False``."""
        goes_on = True
        for function in self._functions:
            try:
                goes_on = function(metrics) is not False and goes_on
            except Exception:
                logger.exception("%r failed for epoch %d", function, metrics.epoch)
        return goes_on

    def begin_run(self) -> None:
        """A run will call it, and so each of them; called by the run."""
        for log in self._loggers():
            log.begin_run()

    def end_run(self) -> None:
        """A run has called it for the last time; called by the run, once."""
        self._each(lambda log: log.end_run())

    def close(self) -> None:
        """Close each logger; one that raises is logged. Idempotent."""
        self._each(lambda log: log.close())

    def _loggers(self) -> list[RunLogger]:
        return [function for function in self._functions if isinstance(function, RunLogger)]

    def _each(self, close: Callable[[RunLogger], None]) -> None:
        for log in self._loggers():
            try:
                close(log)
            except Exception:
                logger.exception("%r could not be closed", log)
