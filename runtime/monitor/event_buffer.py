"""EventBuffer: the events of a run between two readings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.metrics import EpochMetrics
from coordinator.state import Statistics
from runtime.monitor.feed import Json
from runtime.monitor.watched_run import End, WatchedRun
from runtime.timeline.coordinator_lane import machine_shares
from runtime.timeline.events import Event, Kind
from runtime.timeline.text import one_line

MAX_AT_ONCE = 40
"""Events that are told of one look; the newest."""


_OF_COORDINATOR = (
    *(Kind.EPOCH, Kind.AVERAGING, Kind.ANCHOR, Kind.TRANSPORT, Kind.STOP),
    Kind.MACHINES,
)


_OF_RANKS = (Kind.CHECKPOINT, Kind.EVALUATION, Kind.FAILURE, Kind.THROTTLE)


_OFTEN = (Kind.AVERAGING, Kind.THROTTLE, Kind.ANCHOR)


class EventBuffer:
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
        last = statistics.machine_round
        if last is not None and last != before.machine_round:
            round_args: Json = {
                "round": last.step,
                "machines": machine_shares(last),
                "lasted_s": last.round_s,
            }
            found.append(_event(Kind.MACHINES.value, elapsed_s, None, **round_args))
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
