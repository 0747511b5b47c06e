"""What loggers tell of an epoch, under harmless names."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator

from coordinator.metrics import EpochMetrics

logger = logging.getLogger(__name__)


# -- Several functions where one is expected --


class CombinedLogger:
    """Hands each epoch to several loggers or functions, for ``metrics_fn``.

    One that raises is logged, and the others are called all the same.

    Args:
        functions: Each as ``metrics_fn`` takes it, called in this order.

    Raises:
        TypeError: One of them cannot be called.
    """

    def __init__(self, *functions: Callable[[EpochMetrics], object]) -> None:
        for function in functions:
            if not callable(function):
                raise TypeError(
                    f"CombinedLogger({function!r:.80}): pass loggers or functions f(EpochMetrics)"
                )
        self._functions = functions

    def __call__(self, metrics: EpochMetrics) -> bool:
        """Call all of them; ``False``, which ends the run, if one returned ``False``."""
        goes_on = True
        for function in self._functions:
            try:
                goes_on = function(metrics) is not False and goes_on
            except Exception:
                logger.exception("%r failed for epoch %d", function, metrics.epoch)
        return goes_on


Number = int | float

EPOCH_FIELDS = (
    "avg_loss",
    "epoch_s",
    "num_samples",
    "num_retrained",
    "num_skipped",
    "num_averagings",
)
RANK_FIELDS = ("num_samples", "throughput", "batch_share")


def epoch_values(metrics: EpochMetrics) -> Iterator[tuple[str, Number]]:
    """The numbers of an epoch itself, by name."""
    for name in EPOCH_FIELDS:
        yield name, getattr(metrics, name)


def rank_values(metrics: EpochMetrics) -> Iterator[tuple[str, Number]]:
    """The numbers of each rank, by name; throughput in samples for each second of computing."""
    for rank in metrics.per_rank:
        share = metrics.per_rank_batch_share[rank.rank]
        values = (rank.num_samples, rank.throughput, share)
        for name, value in zip(RANK_FIELDS, values, strict=True):
            yield f"rank{rank.rank}/{name}", value


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
