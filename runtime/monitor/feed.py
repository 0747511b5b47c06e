"""What the pages of a monitor show, encoded once for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from coordinator.metrics import EpochMetrics
from coordinator.state import Statistics
from runtime.timeline.events import Event, Kind, RunFacts
from runtime.timeline.export import one_line
from runtime.timeline.page import embedded
from runtime.timeline.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a run ended.

    Attributes:
        state: ``"finished"``, ``"stopped"`` or ``"failed"``.
        at: When, by ``time.monotonic``.
        error: What stopped it, if it failed.
    """

    state: str
    at: float
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """A run, as far as a monitor may see it. Every function returns at once, in any thread.

    Attributes:
        facts: What was known when it began.
        devices: Of each rank.
        total_batches: Of the whole run, over all ranks.
        started: When it began, by ``time.monotonic``.
        timeline: What it is recorded in, if it is.
        statistics: The coordinator's counters.
        epochs: The closed epochs, without the first so many.
        end: How it ended; ``None`` while it goes on.
    """

    facts: RunFacts
    devices: tuple[torch.device, ...]
    total_batches: int
    started: float
    timeline: Timeline | None
    statistics: Callable[[], Statistics]
    epochs: Callable[[int], Sequence[EpochMetrics]]
    end: Callable[[], End | None]


T = TypeVar("T")

MAX_TICKS = 600
MAX_EPOCHS = 1000
MAX_EVENTS = 200

Json = dict[str, Any]


class Thinned(Generic[T]):
    """Items in order; once there are too many, only each second one stays.

    From then on each second one that comes is left out too, and so on; the last one is
    always there.

    Args:
        max_items: At most so many, and the last.
    """

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._items: list[T] = []
        self._last: T | None = None
        self._stride = 1
        self._num_seen = 0

    def add(self, item: T) -> None:
        """Add an item at the end."""
        self._last = item
        if self._num_seen % self._stride == 0:
            self._items.append(item)
            if len(self._items) >= self._max_items:
                self._items = self._items[::2]
                self._stride *= 2
        self._num_seen += 1

    def read(self) -> list[T]:
        """What is kept, oldest first."""
        items = list(self._items)
        if self._last is not None and (not items or items[-1] is not self._last):
            items.append(self._last)
        return items


class Feed:
    """All that a page needs: facts of the run, how it stands, its past.

    Every piece is encoded when it comes and never again: the history for a new page is
    pieces put together, whose number is bounded. The texts are ASCII without line breaks,
    ``<``, ``>`` and ``&``, so that they can stand in an event stream or within a page.
    Any thread may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin(None)

    def begin(self, facts: Json | None) -> None:
        """Forget the past; another run begins."""
        with self._lock:
            self._facts = embedded(facts)
            self._now = "null"
            self._ticks: Thinned[str] = Thinned(MAX_TICKS)
            self._epochs: Thinned[str] = Thinned(MAX_EPOCHS)
            self._events: list[str] = []

    def add(self, now: Json, ticks: list[Json], epochs: list[Json], events: list[Json]) -> str:
        """Add what is new.

        Args:
            now: How the run stands.
            ticks: Readings of the counters, in order.
            epochs: Epochs that have closed.
            events: What has happened.

        Returns:
            It, encoded for the pages that have the rest.
        """
        fresh = [[embedded(item) for item in items] for items in (ticks, epochs, events)]
        standing = embedded(now)
        with self._lock:
            self._now = standing
            for tick in fresh[0]:
                self._ticks.add(tick)
            for epoch in fresh[1]:
                self._epochs.add(epoch)
            self._events = [*self._events, *fresh[2]][-MAX_EVENTS:]
        encoded = [_list(items) for items in fresh]
        return _object(now=standing, ticks=encoded[0], epochs=encoded[1], events=encoded[2])

    def history(self) -> str:
        """Everything, encoded for a page that has nothing."""
        with self._lock:
            facts, now = self._facts, self._now
            ticks, epochs, events = self._ticks.read(), self._epochs.read(), self._events
        return _object(facts=facts, now=now, ticks=_list(ticks), epochs=_list(epochs),
                       events=_list(events))  # fmt: skip


def _list(items: list[str]) -> str:
    return f"[{','.join(items)}]"


def _object(**items: str) -> str:
    return "{" + ",".join(f'"{name}":{text}' for name, text in items.items()) + "}"


MAX_AT_ONCE = 40
"""Events that are told of one look; the newest."""

_OF_COORDINATOR = (Kind.EPOCH, Kind.AVERAGING, Kind.ANCHOR, Kind.TRANSPORT, Kind.STOP)
_OF_RANKS = (Kind.CHECKPOINT, Kind.EVALUATION, Kind.FAILURE, Kind.THROTTLE)
_OFTEN = (Kind.AVERAGING, Kind.THROTTLE, Kind.ANCHOR)


class Happenings:
    """What happened between two looks: the timeline's events, or what the counters show.

    Args:
        run: The run.
    """

    def __init__(self, run: WatchedRun) -> None:
        self._timeline = run.timeline
        self._cursor: dict[str, tuple[int, ...]] | None = None
        self._before: Statistics | None = None
        self._ended = False

    def since_last(
        self,
        statistics: Statistics,
        epochs: Sequence[EpochMetrics],
        end: End | None,
        elapsed_s: float,
    ) -> list[Json]:
        """Events that are new, oldest first.

        Args:
            statistics: The counters as they are.
            epochs: Epochs that have closed since the last call.
            end: How the run ended, if it has.
            elapsed_s: Seconds since the run began.
        """
        if self._timeline is not None:
            events, self._cursor = self._timeline.read(self._cursor)
            found = _of_timeline(events)
        else:
            found = self._of_counters(statistics, elapsed_s)
            found += [_event("epoch", elapsed_s, None, epoch=metrics.epoch) for metrics in epochs]
        found.sort(key=lambda event: float(event["t"]))
        left_out = len(found) - MAX_AT_ONCE
        if left_out > 0:
            found = [_event("more", found[left_out]["t"], None, events=left_out), *found[left_out:]]
        if end is not None and not self._ended:
            self._ended = True
            found.append(_event(end.state, elapsed_s, None))
        return found

    def _of_counters(self, statistics: Statistics, elapsed_s: float) -> list[Json]:
        before, self._before = self._before, statistics
        if before is None:
            return []
        found = []
        averagings = statistics.num_averagings - before.num_averagings
        if averagings > 0:
            found.append(_event(Kind.AVERAGING.value, elapsed_s, None, times=averagings))
        if statistics.anchor != before.anchor:
            args = {"anchor": statistics.anchor, "before": before.anchor}
            found.append(_event(Kind.ANCHOR.value, elapsed_s, None, **args))
        if statistics.backend_reason != before.backend_reason:
            told = {
                "backend": statistics.backend.name,
                "before": before.backend.name,
                "reason": statistics.backend_reason,
            }
            found.append(_event(Kind.TRANSPORT.value, elapsed_s, None, **told))
        for was, rank in zip(before.ranks, statistics.ranks, strict=True):
            throttles = rank.num_throttles - was.num_throttles
            if throttles > 0:
                found.append(_event(Kind.THROTTLE.value, elapsed_s, rank.rank, times=throttles))
            if was.alive and not rank.alive:
                found.append(_event(Kind.FAILURE.value, elapsed_s, rank.rank))
        return found


def _of_timeline(events: Iterable[Event]) -> list[Json]:
    found: list[Json] = []
    often: dict[tuple[Kind, int | None], list[Event]] = {}
    for event in events:
        # Of a round both the coordinator and each rank tell, and so of other things.
        if event.kind not in (_OF_COORDINATOR if event.rank is None else _OF_RANKS):
            continue
        if event.kind in _OFTEN:
            often.setdefault((event.kind, event.rank), []).append(event)
        else:
            found.append(_event(event.kind.value, event.end_s, event.rank, **event.args))
    for (kind, rank), same in often.items():
        args: dict[str, object] = {"times": len(same)}
        if kind is Kind.ANCHOR:
            args.update(anchor=same[-1].args["anchor"], before=same[0].args["before"])
        else:
            args["lasted_s"] = round(sum(event.duration_s for event in same), 6)
        found.append(_event(kind.value, same[-1].end_s, rank, **args))
    return found


def _event(kind: str, t: float, rank: int | None, **args: object) -> Json:
    clean = {
        name: one_line(value) if isinstance(value, str) else value for name, value in args.items()
    }
    return {"kind": kind, "t": round(t, 3), "rank": rank, "args": clean}
