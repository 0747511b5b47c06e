"""Overhead of the runtime per step, of recording and of monitoring; gain of prefetching.

Usage: ``python benchmarks/overhead.py SECTION [--json FILE] ...``, where a section is one of
``step``, ``prefetch``, ``timeline``, ``metrics``, ``monitor``, ``buckets``, ``draws``,
``loaders`` and ``parts``.
``benchmarks/README.md`` describes the measurements.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness.cells import WAYS, Job, read_clock, runtime_builder, thread_clocks, train
from benchmarks.harness.measure import (
    Cell,
    Check,
    MachineLoad,
    add_retry,
    begin,
    disturbed_line,
    interleaved,
    median,
    median_interval,
    parser_of_sections,
    save,
    table,
)
from benchmarks.harness.models import (
    WORKLOADS,
    Batch,
    Workload,
    batches,
    classification_loss,
    step_seconds,
    tiny,
    train_step,
)
from runtime import (
    ApplyPolicy,
    AverageBackend,
    Monitor,
    Timeline,
    Trainer,
    TrainerBuilder,
    TrainerHandle,
    current_worker,
)
from runtime.core import rng as own_draws

JOIN_S = 600.0


# -- step: blocks of a bare loop and of the worker's own steps in turn --------------------

BLOCK_S = 0.1
"""Length of a block: longer than a scheduler's time slice, shorter than load changes."""
NEVER = 10**6
"""Batches between two rounds, more than a run has."""
SKIPPED = 3
"""Pairs at the start, during which the caches and the allocator warm up."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A block of the worker's steps and the bare block that follows it in the same thread.

    Attributes:
        wall_s: Seconds a step, the worker's and the bare one.
        cpu_s: The same of the thread's CPU time.
    """

    wall_s: tuple[float, float]
    cpu_s: tuple[float, float]


@dataclass
class Turns(threading.local):
    """The bare loop of one worker's thread, and the start of its block."""

    num_steps: int = 0
    begun: tuple[float, float] | None = None
    bare: tuple[nn.Module, torch.optim.Optimizer, Iterator[Batch]] | None = None
    pairs: list[Pair] = field(default_factory=list)


def clocks() -> tuple[float, float]:
    """Wall time, and CPU time of the calling thread."""
    return time.perf_counter(), time.thread_time()


def step_pairs(workload: Workload, num_workers: int, seconds: float) -> list[Pair]:
    """Trains under ``CADENCE`` without a round; after each block a worker runs a bare one."""
    step_s = step_seconds(workload)
    length = max(10, round(BLOCK_S / step_s))
    # Half of the time goes to the bare blocks.
    wanted = round(seconds / 2 / step_s) * num_workers
    num_batches = min(wanted, workload.max_batches)
    data = workload.make_data(num_batches * workload.batch_size)
    turns = Turns()
    found: dict[int, list[Pair]] = {}

    def bare_block() -> tuple[float, float]:
        if turns.bare is None:
            model = workload.make_model()
            order = batches(data, workload.batch_size, seed=current_worker().rank)
            turns.bare = model, workload.make_optimizer(model.parameters()), order
        model, optimizer, order = turns.bare
        train_step(
            workload, model, optimizer, next(order)
        )  # starts with warm caches like the others
        start = clocks()
        for _ in range(length):
            train_step(workload, model, optimizer, next(order))
        end = clocks()
        return (end[0] - start[0]) / length, (end[1] - start[1]) / length

    def train_fn(model: nn.Module, batch: Batch) -> Tensor:
        if turns.num_steps % length == 0:
            now = clocks()
            bare = bare_block()
            if turns.begun is not None:
                own = [(b - a) / length for a, b in zip(turns.begun, now, strict=True)]
                turns.pairs.append(Pair(wall_s=(own[0], bare[0]), cpu_s=(own[1], bare[1])))
                found[current_worker().rank] = turns.pairs
            turns.begun = clocks()
        turns.num_steps += 1
        return workload.loss(model, batch)

    job = Job(
        workload=workload,
        data=data,
        num_workers=num_workers,
        policy=ApplyPolicy.CADENCE,
        num_epochs=math.ceil(wanted / num_batches),
    )
    builder = runtime_builder(job, train_fn=train_fn)
    builder.anchor(NEVER).max_anchor(NEVER).run().join(JOIN_S)
    return [pair for rank in sorted(found) for pair in found[rank][SKIPPED:]]


def summarize(model: str, num_workers: int, pairs: list[Pair]) -> dict[str, Any]:
    """Medians over the pairs, in seconds."""
    added = [own - bare for own, bare in (p.wall_s for p in pairs)]
    return {
        "model": model,
        "workers": num_workers,
        "pairs": len(pairs),
        "bare_s": statistics.median(p.wall_s[1] for p in pairs),
        "added_s": statistics.median(added),
        "quartiles_s": statistics.quantiles(added, n=4)[::2],
        "added_cpu_s": statistics.median(p.cpu_s[0] - p.cpu_s[1] for p in pairs),
        "share": statistics.median(p.wall_s[1] / p.wall_s[0] for p in pairs),
    }


def step_table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    head = ["model", "workers", "bare step, us", "a worker adds, us", "quartiles"]
    head += ["of it CPU time", "bare / worker's step", "pairs"]
    cells = [
        [
            *(r["model"], str(r["workers"]), f"{r['bare_s'] * 1e6:.0f}"),
            f"{r['added_s'] * 1e6:.0f}",
            " to ".join(f"{quartile * 1e6:.0f}" for quartile in r["quartiles_s"]),
            *(f"{r['added_cpu_s'] * 1e6:.0f}", f"{r['share']:.3f}", str(r["pairs"])),
        ]
        for r in rows
    ]
    return table(head, cells)


def step(args: argparse.Namespace) -> None:
    """Overhead of a worker per step."""
    if min(args.workers) < 1 or args.seconds < 20 * BLOCK_S:
        sys.exit(f"--workers must be at least 1 and --seconds at least {20 * BLOCK_S:g}")
    result = begin()
    rows: list[dict[str, Any]] = []
    for model in args.models:
        for num_workers in args.workers:
            load = MachineLoad()
            pairs = step_pairs(WORKLOADS[model], num_workers, args.seconds)
            rows.append(summarize(model, num_workers, pairs) | {"used_by_others": load.others()})
    print(step_table(rows), end="\n\n")
    print(f"Other processes used up to {max(r['used_by_others'] for r in rows):.0%} of the cores.")
    save(args.json, {**result, "rows": rows})


# -- prefetch: a data set that takes as long as the training step -------------------------

PREFETCH_WANTED = 1.8
PREFETCH_EPOCHS = 5
DEPTHS = {"prefetch(0)": 0, "prefetch(1)": 1, "default, by measure": None}
SYNCHRONOUS, _, BY_MEASURE = DEPTHS


class SlowData:
    """Gathers batches from tensors, each after a pause outside the interpreter lock."""

    def __init__(self, data: Batch, pause_s: float) -> None:
        self._data = data
        self._pause_s = pause_s

    def __len__(self) -> int:
        return len(self._data[0])

    def get_batch(self, indices: Tensor) -> Batch:
        if self._pause_s:
            time.sleep(self._pause_s)
        return self._data[0].index_select(0, indices), self._data[1].index_select(0, indices)


def loading_rate(
    workload: Workload, data: Batch, pause_s: float, depth: int | None, num_epochs: int
) -> float:
    """Samples/s of one worker from the close of epoch 0 to the return of ``join()``."""
    builder = runtime_builder(
        Job(
            workload=workload,
            data=SlowData(data, pause_s),
            num_workers=1,
            policy=ApplyPolicy.CADENCE,
            num_epochs=num_epochs,
        )
    )
    if depth is not None:
        builder.prefetch(depth)
    handle = builder.run()
    assert handle.next_metrics(JOIN_S) is not None
    start = time.perf_counter()
    state = handle.join(JOIN_S)
    elapsed_s = time.perf_counter() - start
    return sum(m.num_samples for m in state.metrics[1:]) / elapsed_s


def measure_prefetch(
    workload: Workload, repeat: int, seconds: float, num_retries: int
) -> tuple[dict[str, Any], list[bool]]:
    """Every depth in turn; each repetition sets the pause to the time of a step."""
    probe = workload.make_data(24 * workload.batch_size)
    steps_s: list[float] = []
    jobs: list[tuple[Batch, float]] = []

    def prepare() -> None:
        # A step as in the runtime, without loading except for the gather.
        rates = [loading_rate(workload, probe, 0.0, 0, 3) for _ in range(3)]
        steps_s.append(workload.batch_size / max(rates))
        num_batches = max(8, round(seconds / 4 / (2 * steps_s[-1])))
        jobs.append((workload.make_data(num_batches * workload.batch_size), steps_s[-1]))

    def cell(title: str) -> Cell:
        def run(_: float) -> float:
            return loading_rate(workload, *jobs[-1], DEPTHS[title], PREFETCH_EPOCHS)

        return Cell(key=title, guess=1.0, run=run)

    found = interleaved([cell(title) for title in DEPTHS], repeat, num_retries, prepare)
    ratios = {title: found.ratios(title, SYNCHRONOUS) for title in DEPTHS}
    record = {**found.record(), "steps_s": steps_s, "ratios": ratios}
    return record, found.disturbed()


def prefetch(args: argparse.Namespace) -> None:
    """Gain of loading ahead."""
    result: dict[str, Any] = {**begin(), "models": {}}
    for name in args.models:
        record, disturbed = measure_prefetch(WORKLOADS[name], args.repeat, args.seconds, args.retry)
        result["models"][name] = record
        step_ms = median(record["steps_s"]) * 1e3
        print(f"## {WORKLOADS[name].what}: {step_ms:.2f} ms a step, as to load\n")
        rows = [
            [title, f"{rate:,.0f}", f"{median(record['ratios'][title]):.2f}"]
            for title, rate in record["median_rates"].items()
        ]
        print(table(["prefetch", "samples/s", "/ synchronous"], rows), end="\n\n")
        ratio = median(record["ratios"][BY_MEASURE])
        print(Check(what="default / synchronous", measured=ratio, wanted=PREFETCH_WANTED))
        print(disturbed_line(disturbed), end="\n\n")
    save(args.json, result)


# -- timeline and monitor: pairs of runs without and with, on steps of a millisecond ------

TIMELINE_TARGET, MONITOR_TARGET, HALF_SENT_TARGET = 0.99, 0.98, 0.97
METRICS_TARGET, METRICS_EVERY = 0.99, 10
STEP_S = 0.001
NUM_FEATURES = 128
ANCHOR = 40
"""The same for both, so that no run averages more often than the other; about what steps of a
millisecond come to by themselves."""
Rates = tuple[float, float]
"""Batches for each second by the clock, and for each second of the process's CPU time."""
NUM_HALF_SENT, NUM_DESCRIPTORS = 1_100, 1_024
SETTLE_S = 0.5
SETTINGS = {
    "both": "monitor and timeline",
    "plain": "monitor",
    "half_sent": f"{NUM_HALF_SENT:,} half-sent requests",
}
HALF_SENT = Path(__file__).parents[1] / "tests" / "support" / "half_sent.py"
VIEWER = """
import sys, urllib.request
stream = urllib.request.urlopen(sys.argv[1] + "events", timeout=60)
print("open", flush=True)
try:
    while stream.readline():
        pass
except OSError:
    pass
"""


def of_width(width: int) -> Workload:
    """A network of one hidden layer."""

    def make_data(num_samples: int) -> Batch:
        return torch.randn(num_samples, NUM_FEATURES), torch.randint(10, (num_samples,))

    return Workload(
        name=f"width {width}",
        what=f"MLP {NUM_FEATURES}-{width}-10, batch 16, SGD",
        batch_size=16,
        sample_bytes=4 * NUM_FEATURES,
        make_model=lambda: nn.Sequential(
            nn.Linear(NUM_FEATURES, width), nn.ReLU(), nn.Linear(width, 10)
        ),
        make_optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        loss=classification_loss,
        make_data=make_data,
    )


def shortest_step(workload: Workload) -> float:
    """The shortest time of some bare steps."""
    model = workload.make_model()
    optimizer = workload.make_optimizer(model.parameters())
    batch = workload.make_data(workload.batch_size)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        train_step(workload, model, optimizer, batch)
        times.append(time.perf_counter() - start)
    return min(times)


def fitting_width(step_s: float = STEP_S) -> int:
    """The width of a model whose bare step takes ``step_s``."""
    width = 256
    while shortest_step(of_width(width)) < step_s and width < 1 << 16:
        width = math.ceil(width * 1.25)
    return width


def builder_of(
    way: str, width: int, num_batches: int, loss: Callable[..., Tensor] = classification_loss
) -> TrainerBuilder:
    """The measured run: three epochs, of which the first is warm-up."""
    num_workers, policy, backend = WAYS[way]
    workload = replace(of_width(width), loss=loss)
    job = Job(
        workload=workload,
        data=workload.make_data(num_batches * workload.batch_size),
        num_workers=num_workers,
        policy=policy,
        num_epochs=3,
        backend=backend,
    )
    return runtime_builder(job).anchor(ANCHOR).max_anchor(ANCHOR)


class Meter:
    """Batches of a run since this was made, by the clock and by the process's CPU time."""

    def __init__(self, handle: TrainerHandle) -> None:
        self._handle = handle
        self._start = self._read()

    def rates(self) -> Rates:
        """Batches for each second, and for each second of the process's CPU time, which shows
        the cost of the recording on a machine that other processes use.
        """
        trained, wall_s, cpu_s = (
            now - then for now, then in zip(self._read(), self._start, strict=True)
        )
        return trained / wall_s, trained / cpu_s

    def _read(self) -> tuple[float, float, float]:
        trained = sum(rank.num_batches for rank in self._handle.statistics().ranks)
        return trained, time.perf_counter(), time.process_time()


def timed(handle: TrainerHandle) -> Rates:
    """From the close of the first epoch to the end of the run."""
    handle.next_metrics(JOIN_S)
    meter = Meter(handle)
    handle.join(JOIN_S)
    return meter.rates()


def recorded_rates(way: str, width: int, num_batches: int, enabled: bool) -> Rates:
    """With a timeline, or without."""
    builder = builder_of(way, width, num_batches)
    if enabled:
        builder.timeline(Timeline())
    return timed(builder.run())


@contextmanager
def program(*arguments: str) -> Iterator[None]:
    """A program in a separate process, from its line "open" to the end of the block."""
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"open"), "no request could be sent"
        yield
    finally:
        process.kill()
        process.communicate()


def viewer(url: str) -> AbstractContextManager[None]:
    """A client that reads all data, like a browser."""
    return program("-c", VIEWER, url)


def half_sent(port: int) -> AbstractContextManager[None]:
    """Half-sent requests at a port."""
    return program(str(HALF_SENT), str(port), str(NUM_HALF_SENT))


def watched_rates(way: str, setting: str, width: int, num_batches: int, enabled: bool) -> Rates:
    """With a monitor and an open page, or without; the page's own CPU time is left out.

    Args:
        way: Of :data:`WAYS`.
        setting: ``both`` or ``plain`` of :data:`SETTINGS`: with a timeline as well, or without.
        width: Of the model.
        num_batches: Batches in an epoch.
        enabled: True if it is watched.
    """
    builder = builder_of(way, width, num_batches)
    if not enabled:
        return timed(builder.run())
    if setting == "both":
        builder.timeline(Timeline())
    with Monitor() as monitor, viewer(monitor.url):
        handle = builder.run()
        handle.attach(monitor)
        return timed(handle)


Measured = Callable[[bool], Rates]
"""Returns the rates without and with the tested feature."""


@contextmanager
def in_runs(rates: Callable[[int, int, bool], Rates], width: int, count: int) -> Iterator[Measured]:
    """A run for each measurement, of this many batches in an epoch."""
    yield partial(rates, width, count)


def stretches(
    handle: TrainerHandle,
    stretch_s: float,
    feature: Callable[[], AbstractContextManager[None]],
    settle_s: float = SETTLE_S,
) -> Measured:
    """Intervals of one run, with the tested feature in some of them.

    Runs of the same program differ by more than a tenth in their memory layout; stretches of one
    run do not.

    Args:
        handle: The run.
        stretch_s: Length of a stretch.
        feature: Context of every other stretch.
        settle_s: Rest between two stretches.
    """

    def stretch(enabled: bool) -> Rates:
        with feature() if enabled else nullcontext():
            meter = Meter(handle)
            time.sleep(stretch_s)
            rates = meter.rates()
        time.sleep(settle_s)
        return rates

    return stretch


@contextmanager
def in_stretches(way: str, width: int, count: int) -> Iterator[Measured]:
    """One watched run, with half-sent requests to its monitor in some stretches of it, each of
    which has the batches of two epochs.
    """
    builder = builder_of(way, width, count).num_epochs(10**6)
    with Monitor() as monitor, viewer(monitor.url):
        handle = builder.run()
        handle.attach(monitor)
        handle.next_metrics(JOIN_S)
        yield stretches(handle, 2 * count * STEP_S, lambda: half_sent(monitor.port))
        handle.stop()
        handle.join(JOIN_S)


class StepMetricsSwitch:
    """Switches the metrics of steps of a run on and off, in the workers' threads.

    A worker that keeps no losses for them sends none: only the settings remain.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._is_on = False

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The workload's loss; applies the switch to the calling worker."""
        log = current_worker()._log.kept  # type: ignore[attr-defined]
        if (log.each is None) is self._is_on:
            log.each = [] if self._is_on else None
        return self._workload.loss(model, batch)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Context in which step metrics are collected."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False


@contextmanager
def switched_metrics(way: str, width: int, count: int) -> Iterator[Measured]:
    """One run, with step metrics passed to a function in alternate stretches."""
    switch = StepMetricsSwitch(of_width(width))
    builder = builder_of(way, width, count, loss=switch.loss).num_epochs(10**6)
    handle = builder.metrics_fn(lambda _: None).metrics_every(METRICS_EVERY).run()
    handle.next_metrics(JOIN_S)
    yield stretches(handle, 2 * count * STEP_S, switch.on, SETTLE_S / 10)
    handle.stop()
    handle.join(JOIN_S)


def compare(measured: Callable[[bool], Rates], num_pairs: int) -> dict[str, Any]:
    """Pairs of runs without and with the tested feature, every other pair in reverse order."""
    ratios, cpu_ratios, loads = [], [], []
    for pair in range(num_pairs):
        load = MachineLoad()
        order = (False, True) if pair % 2 == 0 else (True, False)
        rates = {enabled: measured(enabled) for enabled in order}
        loads.append(load.others())
        ratios.append(rates[True][0] / rates[False][0])
        cpu_ratios.append(rates[True][1] / rates[False][1])
    return {
        "ratios": ratios,
        "wall": median_interval(ratios),
        "cpu_ratios": cpu_ratios,
        "cpu": median_interval(cpu_ratios),
        "others": loads,
    }


BY_CPU = ("by CPU time", "95 % interval")


def print_head(*titles: str) -> None:
    """The head of a table whose rows are printed as they are measured."""
    print(table(titles, [], num_texts=len(titles)), flush=True)


def print_row(*cells: str) -> None:
    """A row of such a table."""
    print("| " + " | ".join(cells) + " |", flush=True)


def judged(
    found: tuple[float, float, float], target: float, *, at_most: bool = False
) -> tuple[str, str, str]:
    """A median, its interval, and the target with the verdict."""
    middle, low, high = found
    verdict = Check(what="", measured=middle, wanted=target, at_most=at_most).verdict
    return f"{middle:.4f}", f"{low:.4f} to {high:.4f}", f"{target} {verdict}"


Cases: TypeAlias = Mapping[tuple[str, ...], Callable[[int, int], AbstractContextManager[Measured]]]


def judge_pairs(
    args: argparse.Namespace,
    cases: Cases,
    targets: Mapping[tuple[str, ...], float],
) -> None:
    """Measure all cases and print a row for each as it completes.

    Args:
        args: Has ``pairs``, ``seconds`` and ``json``.
        cases: By their texts in the table, what measures a width and so many batches in an
            epoch.
        targets: Bound of each median.
    """
    result = begin()
    width = fitting_width()
    num_batches = max(50, int(args.seconds / 2 / STEP_S))
    result |= {"width": width, "ways": {}}
    step_ms = shortest_step(of_width(width)) * 1e3
    print(f"step of {step_ms:.2f} ms, {args.pairs} interleaved pairs\n")
    texts = ["way", "watched with"][: len(next(iter(cases)))]
    print_head(*texts, "with over without", "95 % interval", "target", *BY_CPU)
    for names, measured in cases.items():
        with measured(width, num_batches) as rates:
            found = compare(rates, args.pairs)
        result["ways"]["/".join(names)] = found
        cpu, *spread = (f"{number:.4f}" for number in found["cpu"])
        print_row(*names, *judged(found["wall"], targets[names]), cpu, " to ".join(spread))
        save(args.json, result)
    busy = statistics.mean(x for found in result["ways"].values() for x in found["others"])
    print(f"\nOther processes used {busy:.0%} of the cores meanwhile, an open page's among them.")


def timeline(args: argparse.Namespace) -> None:
    """Cost of recording a timeline."""
    cases: Cases = {(way,): partial(in_runs, partial(recorded_rates, way)) for way in args.ways}
    judge_pairs(args, cases, dict.fromkeys(cases, TIMELINE_TARGET))


def metrics(args: argparse.Namespace) -> None:
    """Cost of metrics every ten batches."""
    cases: Cases = {(way,): partial(switched_metrics, way) for way in args.ways}
    judge_pairs(args, cases, dict.fromkeys(cases, METRICS_TARGET))


def monitor(args: argparse.Namespace) -> None:
    """Cost of monitoring a run: with a monitor and a page over without.

    Half-sent requests are measured with a monitor and a page in both runs, in a process with few
    descriptors.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(NUM_DESCRIPTORS, hard), hard))
    cases: Cases = {
        (way, SETTINGS[setting]): partial(in_stretches, way)
        if setting == "half_sent"
        else partial(in_runs, partial(watched_rates, way, setting))
        for way in args.ways
        for setting in args.settings
    }
    half_sent_name = SETTINGS["half_sent"]
    targets = {n: HALF_SENT_TARGET if n[1] == half_sent_name else MONITOR_TARGET for n in cases}
    judge_pairs(args, cases, targets)


# -- buckets: gain of an exchange beside the backward pass on shared cores -----

BUCKETS_TARGET = 1.02
"""Gain below which buckets are not the default of a transport."""


def bucketed_rates(workload: Workload, cap_mb: float, num_batches: int, enabled: bool) -> Rates:
    """In buckets, or all at once after the backward pass."""
    job = Job(
        workload=workload,
        data=workload.make_data(num_batches * workload.batch_size),
        num_workers=2,
        policy=ApplyPolicy.SYNC,
        num_epochs=3,
        backend=AverageBackend.GLOO,
    )
    return timed(runtime_builder(job).bucket_cap_mb(cap_mb if enabled else None).run())


def buckets(args: argparse.Namespace) -> None:
    """Gain or cost of buckets over Gloo, with two workers."""
    result = begin() | {"models": {}}
    print_head("model", "buckets of MiB", "with over without", "95 % interval", "target")
    for model in args.models:
        workload = WORKLOADS[model]
        step_s = shortest_step(workload)
        num_batches = 2 * max(25, int(args.seconds / 4 / step_s))
        for cap_mb in args.mb:
            found = compare(partial(bucketed_rates, workload, cap_mb, num_batches), args.pairs)
            result["models"][f"{model}/{cap_mb:g}"] = found
            shown = judged(found["wall"], BUCKETS_TARGET)
            print_row(f"{model}, {step_s * 1e3:.1f} ms", f"{cap_mb:g}", *shown)
            save(args.json, result)


# -- draws: cost of kernels that draw from a worker's generator ----------------------------

DRAWS_TARGET = 1.01
DRAWING = {
    "no draws": lambda width: [],
    "dropout": lambda width: [nn.Dropout(0.1)],
}
DRAWS_BLOCK_S = 0.2
DRAWS_WARM = 10
"""Warm-up steps before each block, since the first ones after a change of kernels are slower."""


def draws(args: argparse.Namespace) -> None:
    """Time of a one-millisecond step with kernels that draw from the thread's generator, over
    PyTorch's own: blocks of one loop in turn, in one thread.
    """
    result = begin() | {"models": {}}
    width = fitting_width()
    generator = torch.Generator()
    print_head("model", "step", "with over without", "95 % interval", "target")
    for name, layers in DRAWING.items():
        base = of_width(width)
        model = base.make_model()
        model = nn.Sequential(*model[:2], *layers(width), *model[2:])  # type: ignore[index, unused-ignore]
        optimizer = base.make_optimizer(model.parameters())
        batch = base.make_data(base.batch_size)
        ratios, times = [], []
        for pair in range(args.pairs + SKIPPED):
            found = {}
            for own in (False, True) if pair % 2 == 0 else (True, False):
                with kernels_of_workers(generator) if own else nullcontext():
                    found[own] = block_s(base, model, optimizer, batch)
            if pair >= SKIPPED:
                ratios.append(found[True] / found[False])
                times.append(found[False])
        found_ratio = median_interval(ratios)
        result["models"][name] = {"ratios": ratios, "wall": found_ratio}
        step_ms = f"{median(times) * 1e3:.3f} ms"
        print_row(name, step_ms, *judged(found_ratio, DRAWS_TARGET, at_most=True))
    save(args.json, result)


@contextmanager
def kernels_of_workers(generator: torch.Generator) -> Iterator[None]:
    """The kernels of :mod:`runtime.core.rng` instead of PyTorch's, with a generator to draw from;
    nothing else may run meanwhile.
    """
    default = torch.default_generator
    own_draws.install_thread_generators()
    try:
        with own_draws.thread_generator(generator):
            yield
    finally:
        for library in own_draws._installed:
            library._destroy()
        own_draws._installed.clear()
        torch.random.default_generator = default  # type: ignore[attr-defined]


def block_s(workload: Workload, model: nn.Module, optimizer: Any, batch: Batch) -> float:
    """The mean time of a step, over a block of them, when some have warmed up."""
    for _ in range(DRAWS_WARM):
        train_step(workload, model, optimizer, batch)
    num, start = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - start) < DRAWS_BLOCK_S:
        train_step(workload, model, optimizer, batch)
        num += 1
    return elapsed_s / num


# -- loaders: the first batch of loader processes ---------------------------------------------

LOADERS_TARGET = 1.5
LOADERS_PER_WORKER, LOADERS_WORKERS = 2, 2


class Slow(torch.utils.data.Dataset[Tensor]):
    """A data set for loader processes, whose samples take a moment."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.001)
        return torch.full((8,), float(index))


def first_of_ours() -> float:
    """Seconds from ``run()`` to the first batch that a worker trains."""
    begun: list[float] = []

    def train_fn(model: nn.Module, batch: Tensor) -> Tensor:
        begun.append(time.perf_counter())
        return model(batch).square().mean()

    builder = Trainer.builder(
        lambda device: nn.Linear(8, 1), lambda params: torch.optim.SGD(params, 1e-3), train_fn
    )
    builder.dataset(Slow()).batch_size(16).num_epochs(1).devices(LOADERS_WORKERS).policy("sync")
    builder.loader_workers(LOADERS_PER_WORKER).max_steps(8)
    start = time.perf_counter()
    builder.run().join(JOIN_S)
    return min(begun) - start


def first_of_plain() -> float:
    """Seconds to the first batch of one DataLoader with as many processes."""
    start = time.perf_counter()
    loader = torch.utils.data.DataLoader(
        Slow(),
        batch_size=16,
        num_workers=LOADERS_PER_WORKER * LOADERS_WORKERS,
        multiprocessing_context="forkserver",
    )
    batches_of = iter(loader)
    next(batches_of)
    return time.perf_counter() - start


FIRST = {"plain": first_of_plain, "ours": first_of_ours}


def loaders(args: argparse.Namespace) -> None:
    """The first batch of ``loader_workers(2)`` with two workers, over that of a plain DataLoader
    with four processes, each in a process of its own, in turn.
    """
    if args.child:
        print(FIRST[args.child]())
        return
    result = begin()
    seconds: dict[str, list[float]] = {name: [] for name in FIRST}
    for pair in range(args.pairs):
        for name in FIRST if pair % 2 == 0 else reversed(FIRST):
            command = [sys.executable, __file__, "loaders", "--child", name]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            seconds[name].append(float(output.split()[-1]))
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["plain"], strict=True)]
    ratio, low, high = median_interval(ratios)
    result |= {"seconds": seconds, "ratios": ratios, "ratio": (ratio, low, high)}
    rows = [[name, f"{median(found):.2f}"] for name, found in seconds.items()]
    print(table(["first batch of", "s"], rows), end="\n\n")
    print(f"95 % interval of the ratio: {low:.2f} to {high:.2f}")
    what = "loader_workers(2), two workers / a DataLoader with four processes"
    print(Check(what=what, measured=ratio, wanted=LOADERS_TARGET, at_most=True))
    save(args.json, result)


# -- parts: cost of a timeline in a step and a message, and of a reading --------

PARTS_TARGET_NS = 10_000
PARTS_ROUNDS = 3
PARTS_EPOCHS = 3
BLOCK = 50
"""Steps between two reads of the clock."""
READING_S = 0.1
POLL_THREAD = "timeline-poll"


class Blocks:
    """Records a worker's CPU time at intervals of some steps.

    Attributes:
        marks: CPU time of each rank's thread, in seconds.
    """

    def __init__(self, workload: Workload, num_workers: int) -> None:
        self._workload = workload
        self._counts = [0] * num_workers
        self.marks: list[list[float]] = [[] for _ in range(num_workers)]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Loss of the workload."""
        rank = current_worker().rank
        self._counts[rank] += 1
        if self._counts[rank] % BLOCK == 0:
            self.marks[rank].append(time.thread_time())
        return self._workload.loss(model, batch)

    def steps_s(self) -> list[float]:
        """Mean time of a step in each block."""
        return [(b - a) / BLOCK for marks in self.marks for a, b in pairwise(marks)]


def added_ns(policy: ApplyPolicy, num_workers: int, num_steps: int) -> tuple[float, float]:
    """CPU time that a timeline adds to a worker's step and to the coordinator's for a batch.

    Of runs with it and without in turn, blocks of steps that are less disturbed than nine in
    ten, and the least disturbed run.
    """
    steps_s: dict[bool, list[float]] = {False: [], True: []}
    messages_s: dict[bool, list[float]] = {False: [], True: []}
    num_batches = num_workers * max(2 * BLOCK, num_steps // PARTS_EPOCHS)
    for index in range(PARTS_ROUNDS):
        for recorded in (False, True) if index % 2 == 0 else (True, False):
            blocks = Blocks(tiny(), num_workers)
            workload = replace(tiny(), loss=blocks.loss)
            outcome = train(
                Job(
                    workload=workload,
                    data=workload.make_data(num_batches * workload.batch_size),
                    num_workers=num_workers,
                    policy=policy,
                    num_epochs=PARTS_EPOCHS,
                    recorded=recorded,
                )
            )
            steps_s[recorded] += blocks.steps_s()
            messages_s[recorded].append(outcome.coordinator_s)
    low = {recorded: statistics.quantiles(found, n=10)[0] for recorded, found in steps_s.items()}
    step_s = low[True] - low[False]
    return step_s * 1e9, (min(messages_s[True]) - min(messages_s[False])) * 1e9


def readings_us(num_readings: int) -> list[float]:
    """CPU time of readings of the machine as they come, a tenth of a second apart."""
    rest_s = 0.01
    job = Job(
        workload=tiny(),
        data=tiny().make_data(10**5),
        num_workers=1,
        policy=ApplyPolicy.CADENCE,
        num_epochs=10**6,
        pauses_s=(rest_s,),
    )
    handle = runtime_builder(job).timeline(Timeline(poll_s=READING_S)).run()
    seen: list[float] = []
    try:
        deadline = time.monotonic() + 10 * READING_S * (num_readings + 2)
        while len(seen) < num_readings + 2 and time.monotonic() < deadline:
            clock = thread_clocks().get(POLL_THREAD)
            now = math.nan if clock is None else read_clock(clock)
            if not math.isnan(now) and (not seen or now > seen[-1]):
                seen.append(now)
            time.sleep(rest_s)
    finally:
        handle.stop()
        handle.join(JOIN_S)
    # The first one includes the start of the thread.
    return [(later - earlier) * 1e6 for earlier, later in pairwise(seen[1:])]


def parts(args: argparse.Namespace) -> None:
    """Cost of a timeline's parts, each on its own."""
    begin()
    step_ns, message_ns = added_ns(ApplyPolicy.CADENCE, 1, args.count)
    collective_ns, _ = added_ns(ApplyPolicy.SYNC, 2, args.count)
    readings = readings_us(args.readings)
    rows = [
        ["a step", f"{step_ns:.0f} ns"],
        ["a step with its collective", f"{collective_ns:.0f} ns"],
        ["a batch, in the coordinator's thread", f"{message_ns:.0f} ns"],
        ["a reading of the machine, median", f"{median(readings):.0f} us"],
        ["... and the longest", f"{max(readings):.0f} us"],
    ]
    print(table(["part", "cost"], rows), end="\n\n")
    what = "a step with its collective, ns"
    print(Check(what=what, measured=collective_ns, wanted=PARTS_TARGET_NS, at_most=True))


# -- the command line --------------------------------------------------------------------

SECTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "step": step,
    "prefetch": prefetch,
    "timeline": timeline,
    "metrics": metrics,
    "monitor": monitor,
    "buckets": buckets,
    "draws": draws,
    "loaders": loaders,
    "parts": parts,
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser, commands = parser_of_sections(__doc__, SECTIONS)
    adds = {name: command.add_argument for name, command in commands.items()}
    add = adds["step"]
    add("--models", nargs="+", choices=WORKLOADS, default=["mlp", "lenet"])
    add("--workers", nargs="+", type=int, default=[1, 2])
    add("--seconds", type=float, default=40.0, help="approximate time of each row")
    add = adds["prefetch"]
    add("--models", nargs="+", choices=WORKLOADS, default=["lenet"])
    add("--repeat", type=int, default=3, help="repetitions of each cell")
    add("--seconds", type=float, default=2.0, help="length of a synchronous run")
    add_retry(commands["prefetch"])
    usual = (("timeline", 25, 2.0), ("metrics", 25, 2.0), ("monitor", 15, 4.0))
    for name, num_pairs, seconds in usual:
        add = adds[name]
        add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
        add("--pairs", type=int, default=num_pairs, help=f"pairs of runs for each ({num_pairs})")
        add("--seconds", type=float, help=f"length of one run, about ({seconds:g})")
        add("--quick", action="store_true", help="at most 15 pairs of short runs")
        commands[name].set_defaults(usual_s=seconds)
    adds["monitor"](
        "--settings",
        nargs="+",
        choices=SETTINGS,
        default=list(SETTINGS),
        help="with a timeline as well, or with the monitor alone",
    )
    add = adds["buckets"]
    add("--models", nargs="+", choices=WORKLOADS, default=["mlp", "lenet", "transformer"])
    add("--mb", nargs="+", type=float, default=[0.25, 25.0], help="sizes of buckets")
    add("--pairs", type=int, default=11, help="pairs of runs for each")
    add("--seconds", type=float, default=4.0, help="length of one run, about")
    adds["draws"]("--pairs", type=int, default=100, help="pairs of blocks for each")
    add = adds["loaders"]
    add("--pairs", type=int, default=7, help="pairs of processes")
    add("--child", choices=FIRST, help=argparse.SUPPRESS)
    add = adds["parts"]
    add("--count", type=int, default=5_000, help="steps of a worker in a run")
    add("--readings", type=int, default=20)
    args = parser.parse_args(argv)
    if min(getattr(args, name, 1) for name in ("repeat", "pairs")) < 1:
        parser.error("--repeat and --pairs must be at least 1")
    if args.section in ("timeline", "metrics", "monitor"):
        if args.quick:
            args.pairs = min(args.pairs, 15)
        if args.seconds is None:
            args.seconds = args.usual_s / (5 if args.quick else 1)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main()
