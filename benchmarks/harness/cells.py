"""The runtime as the speed benchmarks run it, and cells of it, of bare loops and of peers.

Uses only public names of ``runtime``, so that it runs with another checkout as well.
"""

from __future__ import annotations

import math
import os
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.measure import Cell
from benchmarks.harness.models import Batch, Workload, solo_rate, threads_rate
from benchmarks.harness.processes import GlooGroup
from runtime import (
    ApplyPolicy,
    AverageBackend,
    Statistics,
    Timeline,
    Trainer,
    TrainerBuilder,
    TrainerHandle,
    current_worker,
)

POLICIES = {p.name.lower(): p for p in (ApplyPolicy.SYNC, ApplyPolicy.CADENCE, ApplyPolicy.ASYNC)}
WAYS = {
    "one": (1, ApplyPolicy.CADENCE, AverageBackend.AUTO),
    "sync": (2, ApplyPolicy.SYNC, AverageBackend.AUTO),
    "cadence": (2, ApplyPolicy.CADENCE, AverageBackend.CPU),
    "cadence_thread": (2, ApplyPolicy.CADENCE, AverageBackend.THREAD),
    "async": (2, ApplyPolicy.ASYNC, AverageBackend.CPU),
    "async_thread": (2, ApplyPolicy.ASYNC, AverageBackend.THREAD),
}
"""Workers, policy and backend, by name; lockstep on CPUs is over ``THREAD``."""
WAY_TITLES = {
    "one": "1 worker",
    "sync": "SYNC over THREAD",
    "cadence": "CADENCE over CPU",
    "cadence_thread": "CADENCE over THREAD",
    "async": "ASYNC over CPU",
    "async_thread": "ASYNC over THREAD",
}


# -- a run under the conditions of the bare loops ----------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job for the runtime.

    Attributes:
        workload: Model, optimizer and loss.
        data: The data set, tensors or what gathers batches; its length is that of an epoch.
        num_workers: CPU workers.
        policy: The policy.
        backend: The transport; all other settings have their defaults.
        num_epochs: Epochs; the first warms up.
        pauses_s: Sleep of each rank within a step of a whole batch, in seconds; a smaller batch
            sleeps in proportion. Empty: none.
        recorded: True if a timeline records the rounds.
        pinned: True if each worker's thread is pinned to a separate core (Linux).
        balance: True if ``SYNC`` cuts global batches by measured speed.
        own_loop: True if the steps are made by a loop of ``Trainer.loop``.
    """

    workload: Workload
    data: Any
    num_workers: int
    policy: ApplyPolicy
    num_epochs: int
    pauses_s: tuple[float, ...] = ()
    backend: AverageBackend = AverageBackend.AUTO
    recorded: bool = False
    pinned: bool = False
    balance: bool = False
    own_loop: bool = False


def zeros(job: Job) -> array[int]:
    """A count for each rank, which the rank alone writes; workers watch lists that they share."""
    return array("q", bytes(8 * job.num_workers))


def runtime_builder(
    job: Job,
    counts: array[int] | None = None,
    train_fn: Callable[[nn.Module, Batch], Tensor] | None = None,
) -> TrainerBuilder:
    """CPU workers with one intra-op thread each; all other settings have their defaults.

    Args:
        job: The job.
        counts: Batches that each rank has trained, which its worker counts up.
        train_fn: Replaces the workload's loss, the pause and the count.
    """
    workload, trained = job.workload, counts or zeros(job)
    ranks = count()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss = workload.loss(model, batch)
        rank = current_worker().rank
        if job.pauses_s and job.pauses_s[rank]:
            time.sleep(job.pauses_s[rank] * len(batch[0]) / workload.batch_size)
        trained[rank] += 1
        return loss

    def make_model(device: torch.device) -> nn.Module:
        # Called in the worker's own thread, rank 0 first.
        torch.set_num_threads(1)
        if job.pinned:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[next(ranks) % len(cores)]})
        return workload.make_model().to(device)

    loss_fn = train_fn or step

    def loop(worker: Any) -> None:
        for batch in worker.batches():
            worker.step(loss_fn(worker.model, batch))

    if job.own_loop:
        new = Trainer.loop(make_model, lambda m: workload.make_optimizer(m.parameters()), loop)
    else:
        new = Trainer.builder(make_model, workload.make_optimizer, loss_fn)
    builder = (
        new.dataset(job.data)
        .batch_size(workload.batch_size)
        .num_epochs(job.num_epochs)
        .devices(["cpu"] * job.num_workers)
        .policy(job.policy)
        .backend(job.backend)
        .tune_allocator(False)
        .progress(False)
    )
    return builder.balance(True) if job.balance else builder  # absent in some other checkouts


# -- one run and its measurements ----------------------------------------------------


JOIN_S = 180.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Measurements of a run.

    Attributes:
        rate: Samples/s from the close of epoch 0 to the return of ``join()``.
        steady_rate: The same to the close of the last epoch.
        tail_s: Time between the two ends.
        averagings: Rounds in the steady part; under SYNC the global steps.
        pause_s: Largest time that a rank lost in such a round; ``nan`` without one.
        round_s: Whole time of each round, from the requests to the last acknowledgement.
        average_s: Time of each averaging's arithmetic, in its own thread.
        coordinator_s: CPU time of the coordinator's thread for a batch; averages are
            computed in another thread and are not in it.
        batches_per_s: Batches/s of all ranks during the measurement of ``coordinator_s``.
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

    def __init__(
        self, handle: TrainerHandle, counts: array[int], clocks: Mapping[str, int]
    ) -> None:
        self.time = time.perf_counter()
        self.num_batches = sum(counts)
        self.stats: Statistics = handle.statistics()
        self.cpu_s = {name: read_clock(clock) for name, clock in clocks.items()}

    def cpu_since(self, earlier: Moment, prefix: str) -> float:
        """CPU time of the threads with this prefix; ``nan`` without any."""
        found = [s - earlier.cpu_s[name] for name, s in self.cpu_s.items() if prefix in name]
        return sum(found) if found else math.nan

    def pauses(self, earlier: Moment) -> list[float]:
        """Time that averaging cost each rank since ``earlier``, in seconds."""
        pairs = zip(self.stats.ranks, earlier.stats.ranks, strict=True)
        return [now.sync_s - then.sync_s for now, then in pairs]


def train(job: Job) -> Outcome:
    """Train, with one intra-op thread for each worker."""
    counts = zeros(job)
    timeline = Timeline(poll_s=1.0) if job.recorded else None
    builder = runtime_builder(job, counts)
    if timeline is not None:
        builder.timeline(timeline)
    handle = builder.run()
    clocks = thread_clocks()
    moments: list[Moment] = []
    for _ in range(job.num_epochs):
        handle.next_metrics(JOIN_S)
        # The threads may be gone once the last epoch has closed.
        is_last = len(moments) == job.num_epochs - 1
        moments.append(Moment(handle, counts, {} if is_last else clocks))
    state = handle.join(JOIN_S)
    end = time.perf_counter()
    outcome = _outcome(job, moments, sum(counts), end, timeline)
    last = state.metrics[-1]
    shares = [round(rank.num_samples / last.num_samples, 3) for rank in last.per_rank]
    outcome.details.update(backend=handle.backend.name, shares=shares)
    return outcome


def _outcome(
    job: Job, moments: list[Moment], trained: int, end: float, timeline: Timeline | None
) -> Outcome:
    first, inner, last = moments[0], moments[-2], moments[-1]
    rounds = last.stats.num_averagings - first.stats.num_averagings
    batch_size, num_batches = job.workload.batch_size, inner.num_batches - first.num_batches
    if not num_batches:
        raise RuntimeError("the run ended before its first epoch was observed: use longer epochs")
    steady = (last.num_batches - first.num_batches) / (last.time - first.time)
    round_s, average_s = _rounds(timeline) if timeline is not None else ((), ())
    tail_s = end - last.time
    return Outcome(
        rate=(trained - first.num_batches) * batch_size / (end - first.time),
        steady_rate=steady * batch_size,
        tail_s=tail_s,
        averagings=rounds,
        pause_s=max(last.pauses(first)) / rounds if rounds else float("nan"),
        coordinator_s=inner.cpu_since(first, "coordinator") / num_batches,
        batches_per_s=num_batches / (inner.time - first.time),
        round_s=round_s,
        average_s=average_s,
        details={"averagings": rounds, "tail_s": tail_s, "anchor": last.stats.anchor},
    )


def _rounds(timeline: Timeline) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Times of whole rounds, and of their arithmetic, without the first round."""
    events = [e for e in timeline.events() if e.rank is None]
    whole = [e.duration_s for e in events if e.kind.value == "averaging"]
    phases = [e for e in events if e.kind.value == "phase" and e.args.get("phase") == "computed"]
    return tuple(whole[1:]), tuple(e.duration_s for e in phases[1:])


def thread_clocks() -> dict[str, int]:
    """The CPU clock of every thread of this process, by its name."""
    return {
        thread.name: time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.ident is not None
    }


def read_clock(clock: int) -> float:
    """A thread's CPU time, ``nan`` once it has ended."""
    try:
        return time.clock_gettime(clock)
    except OSError:
        return math.nan


# -- cells: the same training in each system, sized by its expected rate -----------------


NUM_EPOCHS = 5
"""Number of epochs; the first is warm-up."""
MIN_BATCHES = 12
"""Least number of batches of a rank in an epoch: at least one average by default."""
LOCKSTEP = 0.8
FREE = 0.85
"""First guesses of a system's share of the sum of its ranks' solo rates."""


class Cells:
    """Makes the cells of one workload.

    Args:
        workload: The workload.
        step_s: Time of its bare step, without pauses.
        seconds: Length of one measurement.
        group: The peers' processes, if there are any.

    Attributes:
        outcomes: Results of the runtime's runs, by key.
    """

    def __init__(
        self, workload: Workload, step_s: float, seconds: float, group: GlooGroup | None = None
    ) -> None:
        self._workload = workload
        self._step_s = step_s
        self._seconds = seconds
        self._group = group
        self._data: Batch | None = None
        self.outcomes: dict[str, list[Outcome]] = defaultdict(list)

    def solo(self, key: str, pause_s: float = 0.0) -> Cell:
        """A bare loop in the calling thread."""

        def run(expected: float) -> float:
            return solo_rate(
                self._workload,
                self._at_most(self._batches(expected)),
                warmup_s=self._seconds / 5,
                measure_s=self._seconds,
                pause_s=pause_s,
            )

        return Cell(key=key, guess=self._rate(pause_s), run=run)

    def threads(self, key: str, pauses_s: tuple[float, ...], like: str = "") -> Cell:
        """Bare loops side by side.

        Args:
            key: The cell's.
            pauses_s: Sleep of each loop within a step.
            like: Key of a run of the runtime, measured before, whose shares of the global batch
                are the loops' batches; empty: equal batches.
        """

        def run(expected: float) -> float:
            total = len(pauses_s) * self._workload.batch_size
            shares = self.outcomes[like][-1].details["shares"] if like else ()
            return threads_rate(
                self._workload,
                self._at_most(self._batches(expected)),
                num_threads=len(pauses_s),
                warmup_s=self._seconds / 5,
                measure_s=self._seconds,
                pauses_s=pauses_s,
                sizes=tuple(max(1, round(total * share)) for share in shares),
            )

        return Cell(key=key, guess=sum(map(self._rate, pauses_s)), run=run)

    def runtime(
        self,
        key: str,
        policy: ApplyPolicy,
        pauses_s: tuple[float, ...],
        *,
        steady: bool = False,
        **settings: Any,
    ) -> Cell:
        """The runtime with as many workers as there are pauses.

        Args:
            key: The cell's.
            policy: The policy.
            pauses_s: Sleep of each rank within a step.
            steady: True if the rate leaves out what follows the last epoch.
            settings: Further fields of :class:`Job`.
        """
        num_workers = len(pauses_s)

        def run(expected: float) -> float:
            wanted = max(self._batches(expected) // (NUM_EPOCHS - 1), MIN_BATCHES * num_workers)
            job = Job(
                workload=self._workload,
                data=self._at_most(num_workers * max(1, wanted // num_workers)),
                num_workers=num_workers,
                policy=policy,
                num_epochs=NUM_EPOCHS,
                pauses_s=pauses_s,
                **settings,
            )
            outcome = train(job)
            self.outcomes[key].append(outcome)
            return outcome.steady_rate if steady else outcome.rate

        waits = policy is ApplyPolicy.SYNC and not settings.get("balance")
        return Cell(key=key, guess=self._expect(waits, pauses_s), run=run)

    def peer(self, key: str, system: str, pauses_s: tuple[float, ...]) -> Cell:
        """One of the peers, in as many processes as there are pauses."""
        group = self._group
        assert group is not None
        batch_size = self._workload.batch_size

        def run(expected: float) -> float:
            num_steps = max(MIN_BATCHES, self._batches(expected) // len(pauses_s))
            rate: float = group.ask(
                system=system,
                name=self._workload.name,
                num_samples=batch_size * min(num_steps, self._workload.max_batches),
                num_warmup=max(2, num_steps // 5),
                num_steps=num_steps,
                pauses_s=list(pauses_s),
            )
            return rate

        return Cell(key=key, guess=self._expect(True, pauses_s), run=run)

    def way(self, key: str, name: str, slowdown: float = 1.0) -> Cell:
        """One of :data:`WAYS`, with rank 1 slowed by this factor."""
        num_workers, policy, backend = WAYS[name]
        pauses = (0.0, (slowdown - 1.0) * self._step_s)[:num_workers]
        return self.runtime(key, policy, pauses, backend=backend)

    def details(self) -> dict[str, list[dict[str, Any]]]:
        """Details of every repetition of the runtime's cells, for the record."""
        return {key: [o.details for o in found] for key, found in self.outcomes.items()}

    def _rate(self, pause_s: float) -> float:
        return self._workload.batch_size / (self._step_s + pause_s)

    def _expect(self, lockstep: bool, pauses_s: tuple[float, ...]) -> float:
        rates = [self._rate(pause_s) for pause_s in pauses_s]
        return LOCKSTEP * len(rates) * min(rates) if lockstep else FREE * sum(rates)

    def _batches(self, rate: float) -> int:
        return max(1, round(rate * self._seconds / self._workload.batch_size))

    def _at_most(self, num_batches: int) -> Batch:
        """A data set of this many batches, up to the largest permitted size."""
        num_samples = self._workload.batch_size * min(num_batches, self._workload.max_batches)
        if self._data is None or len(self._data[0]) < num_samples:
            self._data = self._workload.make_data(num_samples)
        return self._data[0][:num_samples], self._data[1][:num_samples]
