"""One run of the runtime, and what the peers benchmark reads off it."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.models import Batch, Workload
from benchmarks.runtime_builder import runtime_builder
from runtime import ApplyPolicy, Statistics, Timeline, TrainerHandle
from runtime.timeline import Kind

JOIN_S = 180.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the runtime is to train.

    Attributes:
        workload: Model, optimizer and loss.
        data: The data set; its length is that of an epoch.
        num_workers: CPU workers.
        policy: The policy; all else has the defaults.
        num_epochs: Epochs, the first of which warms up; at least 3.
        pauses_s: Sleep of each rank within a step; empty: none.
        recorded: Whether a timeline tells of the rounds.
        pinned: Whether each worker's thread is kept on a core of its own.
    """

    workload: Workload
    data: Batch
    num_workers: int
    policy: ApplyPolicy
    num_epochs: int
    pauses_s: tuple[float, ...] = ()
    recorded: bool = False
    pinned: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run took.

    Attributes:
        rate: Samples/s from the close of epoch 0 to the return of ``join()``.
        steady_rate: The same to the close of the last epoch.
        tail_s: What lies between the two ends.
        averagings: Rounds in the steady part; under SYNC the global steps.
        pause_s: Time that such a round cost the rank that it cost most; ``nan`` without one.
        round_s: Whole time of each round, from the requests to the last acknowledgement.
        average_s: Time of each averaging's arithmetic, in its own thread.
        coordinator_s: CPU time of the coordinator's thread for a batch; averages are
            computed in another thread and are not in it.
        batches_per_s: Batches/s of all ranks, while that was measured.
        details: For the record.
    """

    rate: float
    steady_rate: float
    tail_s: float
    averagings: int
    pause_s: float
    coordinator_s: float
    batches_per_s: float
    round_s: tuple[float, ...] = ()
    average_s: tuple[float, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


class Moment:
    """The state of a run at one time."""

    def __init__(self, handle: TrainerHandle, counts: list[int], clock: int | None) -> None:
        self.time = time.perf_counter()
        self.num_batches = sum(counts)
        self.stats: Statistics = handle.statistics()
        self.coordinator_s = float("nan") if clock is None else _read(clock)

    def pauses(self, earlier: Moment) -> list[float]:
        """What averaging cost each rank since ``earlier``, in seconds."""
        pairs = zip(self.stats.ranks, earlier.stats.ranks, strict=True)
        return [now.sync_s - then.sync_s for now, then in pairs]


def train(job: Job) -> Outcome:
    """Train, with one intra-op thread for each worker."""
    counts = [0] * job.num_workers
    timeline = Timeline(poll_s=1.0) if job.recorded else None
    builder = runtime_builder(
        job.workload,
        job.data,
        counts,
        num_epochs=job.num_epochs,
        policy=job.policy,
        pauses_s=job.pauses_s,
        pinned=job.pinned,
    )
    if timeline is not None:
        builder.timeline(timeline)
    handle = builder.run()
    clock = _coordinator_clock()
    moments: list[Moment] = []
    for _ in range(job.num_epochs):
        handle.next_metrics(JOIN_S)
        # The thread may be gone once the last epoch has closed.
        last = len(moments) == job.num_epochs - 1
        moments.append(Moment(handle, counts, None if last else clock))
    state = handle.join(JOIN_S)
    end = time.perf_counter()
    outcome = _outcome(job, moments, sum(counts), end, timeline)
    shares = [round(share, 3) for share in state.metrics[-1].per_rank_batch_share]
    outcome.details.update(backend=handle.backend.name, shares=shares)
    return outcome


def _outcome(
    job: Job, moments: list[Moment], trained: int, end: float, timeline: Timeline | None
) -> Outcome:
    first, inner, last = moments[0], moments[-2], moments[-1]
    rounds = last.stats.num_averagings - first.stats.num_averagings
    batch_size, num_batches = job.workload.batch_size, inner.num_batches - first.num_batches
    steady = (last.num_batches - first.num_batches) / (last.time - first.time)
    round_s, average_s = _rounds(timeline) if timeline is not None else ((), ())
    tail_s = end - last.time
    return Outcome(
        rate=(trained - first.num_batches) * batch_size / (end - first.time),
        steady_rate=steady * batch_size,
        tail_s=tail_s,
        averagings=rounds,
        pause_s=max(last.pauses(first)) / rounds if rounds else float("nan"),
        coordinator_s=(inner.coordinator_s - first.coordinator_s) / num_batches,
        batches_per_s=num_batches / (inner.time - first.time),
        round_s=round_s,
        average_s=average_s,
        details={"averagings": rounds, "tail_s": tail_s, "anchor": last.stats.anchor},
    )


def _rounds(timeline: Timeline) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Times of whole rounds, and of their arithmetic; the first round warms memory."""
    events = [e for e in timeline.events() if e.rank is None]
    whole = [e.duration_s for e in events if e.kind is Kind.AVERAGING]
    phases = [e for e in events if e.kind is Kind.PHASE and e.args.get("phase") == "computed"]
    return tuple(whole[1:]), tuple(e.duration_s for e in phases[1:])


def _coordinator_clock() -> int:
    """The CPU clock of the coordinator's thread of the run that has just been started."""
    threads = [t for t in threading.enumerate() if t.name == "coordinator"]
    assert len(threads) == 1, "one run at a time"
    assert threads[0].ident is not None
    return time.pthread_getcpuclockid(threads[0].ident)


def _read(clock: int) -> float:
    try:
        return time.clock_gettime(clock)
    except OSError:  # the thread has ended
        return float("nan")


def median(values: tuple[float, ...]) -> float:
    """The median, ``nan`` of nothing."""
    return statistics.median(values) if values else float("nan")
