"""EventBuffer: the events of a run between two readings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.metrics import EpochMetrics
from coordinator.run_state import Statistics
from runtime.monitor.feed import Json
from runtime.monitor.run_view import RunEnd, RunView
from runtime.timeline.coordinator_lane import machine_shares
from runtime.timeline.events import Event, Kind
from runtime.timeline.text import one_line

MAX_NEW_EVENTS = 40
"""Events returned by one reading, the newest."""
_COORDINATOR_KINDS = (
    *(Kind.EPOCH, Kind.AVERAGING, Kind.ANCHOR, Kind.TRANSPORT, Kind.STOP),
    Kind.MACHINES,
)
_RANK_KINDS = (Kind.CHECKPOINT, Kind.EVALUATION, Kind.FAILURE, Kind.THROTTLE)
_AGGREGATED_KINDS = (Kind.AVERAGING, Kind.THROTTLE, Kind.ANCHOR)


class EventBuffer:
    """Events since the last reading, from the timeline or from changes of the counters."""

    def __init__(self, run: RunView) -> None:
        self._timeline = run.timeline
        self._cursor: dict[str, tuple[int, ...]] | None = None
        self._before: Statistics | None = None
        self._ended = False

    def since_last(
        self,
        statistics: Statistics,
        epochs: Sequence[EpochMetrics],
        end: RunEnd | None,
        elapsed_s: float,
    ) -> list[Json]:
        """The new events, oldest first.

        Args:
            statistics: The present counters.
            epochs: Epochs closed since the last call.
            end: The end of the run, if it has ended.
            elapsed_s: Seconds since the start of the run.
        """
        if self._timeline is not None:
            events, self._cursor = self._timeline.read(self._cursor)
            found = _timeline_events(events)
        else:
            found = self._of_counters(statistics, elapsed_s)
            found += [_event("epoch", elapsed_s, None, epoch=metrics.epoch) for metrics in epochs]
        found.sort(key=lambda event: float(event["t"]))
        num_omitted = len(found) - MAX_NEW_EVENTS
        if num_omitted > 0:
            found = [
                _event("more", found[num_omitted]["t"], None, events=num_omitted),
                *found[num_omitted:],
            ]
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
            transport_args = {
                "backend": statistics.backend.name,
                "before": before.backend.name,
                "reason": statistics.backend_reason,
            }
            found.append(_event(Kind.TRANSPORT.value, elapsed_s, None, **transport_args))
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


def _timeline_events(events: Iterable[Event]) -> list[Json]:
    found: list[Json] = []
    aggregated: dict[tuple[Kind, int | None], list[Event]] = {}
    for event in events:
        # Rounds, for instance, are recorded by the coordinator and by each rank.
        if event.kind not in (_COORDINATOR_KINDS if event.rank is None else _RANK_KINDS):
            continue
        if event.kind in _AGGREGATED_KINDS:
            aggregated.setdefault((event.kind, event.rank), []).append(event)
        else:
            found.append(_event(event.kind.value, event.end_s, event.rank, **event.args))
    for (kind, rank), same in aggregated.items():
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
