"""Load and memory of the machine while a run is watched."""

from __future__ import annotations

from runtime.monitor.watched import WatchedRun
from runtime.timeline.resources import ResourcePoller

_NAMES = {"process_cpu_percent": "cpu", "process_rss_bytes": "rss", "machine_cpu_percent": "all"}


class MachineLoad:
    """The last reading: the timeline's, or that of a poller of its own.

    Args:
        run: The run.
        poll_s: Seconds between two readings of its own.
    """

    def __init__(self, run: WatchedRun, poll_s: float) -> None:
        self._timeline = run.timeline
        self._poller: ResourcePoller | None = None
        if run.timeline is None and run.end() is None:
            self._poller = ResourcePoller(poll_s, run.devices)
            self._poller.start()

    def read(self) -> dict[str, float]:
        """By short name: ``cpu`` (percent of one core) and ``rss`` (bytes) of the process,
        ``all`` (percent of all cores), and the load of each GPU; empty before the first
        reading."""
        if self._timeline is not None:
            columns, rows = self._timeline.resources()
        elif self._poller is not None:
            columns, rows = self._poller.columns, self._poller.rows()
        else:
            return {}
        return named(columns, rows[-1][1:]) if rows else {}

    def close(self) -> None:
        """End the poller. Idempotent."""
        poller, self._poller = self._poller, None
        if poller is not None:
            poller.stop()


def named(columns: tuple[str, ...], values: tuple[float, ...]) -> dict[str, float]:
    """A reading by short names, without what is not a number."""
    found = {}
    for column, value in zip(columns, values, strict=True):
        name = _NAMES.get(column) or (column if column.startswith("gpu") else None)
        if name is not None and value == value:
            found[name] = round(value, 1)
    return found
