"""Progress of a run: a bar on a terminal or in a notebook, lines elsewhere."""

from __future__ import annotations

import importlib.util
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from coordinator.metrics import EpochMetrics
from coordinator.run_state import Statistics
from runtime.core.context import LINE_WIDTH, announce, is_announced
from runtime.timeline.recent_progress import RecentProgress

logger = logging.getLogger(__name__)

BAR_REFRESH_S = 0.2
LINE_INTERVAL_S = 30.0


class ProgressDisplay(ABC):
    """Shows the progress of one run, on one thread.

    Attributes:
        refresh_s: Seconds between two calls of :meth:`refresh`.
    """

    refresh_s: float

    @abstractmethod
    def refresh(self) -> None:
        """Show the present progress."""

    @abstractmethod
    def epoch_closed(self, metrics: EpochMetrics) -> None:
        """Show the results of an epoch."""

    @abstractmethod
    def close(self) -> None:
        """Show the last state, and release the display."""


class ProgressBar(ProgressDisplay):
    """A bar of tqdm with loss, samples/s and time left.

    Args:
        kind: Its class; see :func:`bar_kind`.
        recent: Reads the run.
        total: Batches in the whole run.
    """

    refresh_s = BAR_REFRESH_S

    def __init__(self, kind: type[Any], recent: RecentProgress, total: int) -> None:
        self._recent = recent
        self._bar = kind(
            total=total,
            unit="batch",
            leave=True,
            dynamic_ncols=True,
            bar_format="{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}",
        )

    def refresh(self) -> None:
        """See :meth:`ProgressDisplay.refresh`."""
        now = self._recent.read()
        if now.num_trained:
            shown = f"epoch {now.epoch}: loss {now.loss:.4g}, {now.rate:,.0f} samples/s "
            self._bar.set_description_str(shown, refresh=False)
        self._bar.update(now.num_trained - self._bar.n)

    def epoch_closed(self, metrics: EpochMetrics) -> None:
        self.refresh()

    def close(self) -> None:
        self.refresh()
        self._bar.refresh()
        self._bar.close()


class ProgressLines(ProgressDisplay):
    """A line for each epoch and one every ``LINE_INTERVAL_S`` between, logged or on stderr.

    Args:
        recent: Reads the run.
        total: Batches in the whole run.
    """

    refresh_s = LINE_INTERVAL_S

    def __init__(self, recent: RecentProgress, total: int) -> None:
        self._recent = recent
        self._total = total

    def refresh(self) -> None:
        """See :meth:`ProgressDisplay.refresh`."""
        now = self._recent.read()
        if not now.num_trained:
            return
        line = f"epoch {now.epoch}: loss {now.loss:.4g}, {now.rate:,.0f} samples/s"
        line += f", {min(1.0, now.num_trained / self._total):.0%} of the run"
        if now.left_s is not None:
            line += f", {duration_text(now.left_s)} left"
        announce(logger, line)

    def epoch_closed(self, metrics: EpochMetrics) -> None:
        """See :meth:`ProgressDisplay.epoch_closed`."""
        self._recent.read()  # short epochs limit the time of the means between them
        line = f"epoch {metrics.epoch}: loss {metrics.avg_loss:.4g}"
        end = f"; {metrics.num_samples:,} samples in {duration_text(metrics.epoch_s)}"
        scalars = metrics.scalars.items()
        line += "".join(f", {name} {value:.4g}" for name, value in scalars if _is_held_out(name))
        for name, value in scalars:
            part = f", {name} {value:.4g}"
            if not _is_held_out(name) and len(line + part + end) <= LINE_WIDTH:
                line += part
        announce(logger, line + end)

    def close(self) -> None:
        """See :meth:`ProgressDisplay.close`; every epoch has had its line."""


def _is_held_out(name: str) -> bool:
    """True for metrics of evaluations, which an epoch's line always has."""
    return name.startswith(("val/", "eval/"))


def make_display(
    progress: bool | None, statistics: Callable[[], Statistics], total: int, num_epochs: int
) -> ProgressDisplay | None:
    """The display of a run's progress; ``None`` if nothing is shown.

    Args:
        progress: ``False``: nothing is shown.
        statistics: Returns the counters of the run.
        total: Batches in the whole run.
        num_epochs: Epochs in the whole run.
    """
    if progress is False:
        return None
    recent = RecentProgress(statistics, total, num_epochs)
    kind = bar_kind()
    if kind is not None:
        return ProgressBar(kind, recent, total)
    return ProgressLines(recent, total) if is_announced(logger) else None


class _Bar(tqdm):  # type: ignore[type-arg]
    monitor_interval = 0  # no monitor thread


def bar_kind() -> type[Any] | None:
    """The progress bar's class for a terminal or a notebook; ``None`` elsewhere."""
    if sys.stderr is not None and sys.stderr.isatty():
        return _Bar
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    if importlib.util.find_spec("ipywidgets") is None:
        return _Bar  # as text, below the cell
    from tqdm.notebook import tqdm_notebook

    return type("_NotebookBar", (tqdm_notebook,), {"monitor_interval": 0})


def duration_text(seconds: float) -> str:
    """A duration in at most two units."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
