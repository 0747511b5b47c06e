"""Throughput: against other systems, against another checkout, and by size.

Usage: ``python benchmarks/speed.py [--sections peers world] [--quick] [--json FILE]``, or
``python benchmarks/speed.py --against WORKTREE [--pairs 10] [--json FILE]``.
``benchmarks/README.md`` describes the measurements.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness import ROOT
from benchmarks.harness.cells import POLICIES, WAY_TITLES, WAYS, Cells, Outcome
from benchmarks.harness.measure import (
    Cell,
    Check,
    Measured,
    add_retry,
    begin,
    checks_table,
    disturbed_line,
    interleaved,
    median,
    median_interval,
    milliseconds,
    parser_of,
    save,
    table,
)
from benchmarks.harness.models import (
    WORKLOADS,
    busy,
    dense,
    solo_rate,
    sparse,
    step_seconds,
    tiny,
    workload_of,
)
from benchmarks.harness.processes import Child, GlooGroup, serve
from coordinator.data_waits import DataWaits
from runtime import ApplyPolicy, AverageBackend, Trainer, TrainerBuilder, current_worker

WORLDS = (1, 2, 4, 6, 8)
WORLD_STEP_S = 0.010
SIZES = (10**4, 10**5, 10**6, 10**7, 10**8)
MODEL_STEP_S = 0.020
ASLEEP = (0.1, 0.01, 0.003, 0.001)
BUSY = (0.01, 0.003, 0.001, 0.0005, 0.0002, 0.0001)
COORDINATED = ((8, 0.007), (2, 0.0014))
LONGER = 6.0
"""Times a measurement, in ``efficiency`` and ``coordinator``: with epochs of about 2 seconds their
ends, where plans are short, count as in short training, and no more."""
FOLLOW_AT, FOLLOW_STEPS, FOLLOW_STEADY = 60, 140, 20
"""Steps before rank 1 changes its speed, in total, and evaluated before the change."""
FOLLOW_BATCH, FOLLOW_SAMPLE_S = 64, 3e-4
"""Samples of a rank, and its sleep for each."""
SLEEP_SAMPLE_S, SLEEP_BATCH, SLEEP_SAMPLES, SLEEP_EPOCHS = 5e-4, 10, 600, 8
"""In the section ``delivered``, the sleep of a sample, and the sizes of a run."""
SLEEP_SLOWDOWN, SLEEP_EVAL = 3.0, 20
"""In the section ``delivered``, the slowness of one rank, and batches that an evaluation takes."""
NEAR = 0.05
"""Relative excess up to which a step counts as near the shortest one."""
MIN_STEPS = 40
"""Least number of batches of each worker in a measurement."""


# == tables and targets: pure functions of the rates ======================================

Rates = Mapping[str, float]

OURS = ("sync", "cadence", "async")
PEERS = ("ddp", "local_sgd", "averager")
TITLES = {
    "threads": "2 bare threads",
    "one": "runtime, 1 worker",
    "sync": "runtime, SYNC",
    "sync_pinned": "runtime, SYNC, each worker on a core of its own",
    "cadence": "runtime, CADENCE",
    "cadence_thread": "runtime, CADENCE over THREAD",
    "async": "runtime, ASYNC",
    "ddp": "DistributedDataParallel",
    "local_sgd": "Accelerate LocalSGD, 8 steps",
    "averager": "PeriodicModelAverager, 8 steps",
}
EFFICIENCY = 0.95
"""Wanted share of two bare threads, and of the sum of the solo rates of sleeping workers."""
MIN_STEP_S = 0.0009
"""From "1 ms steps" on the share is wanted; a calibrated step may come out a little shorter."""
MAX_COORDINATOR = 0.02
"""Share of a core at 1,000 batches/s in total."""


def cell(system: str, at: float) -> str:
    """Key of a system's measurement at a slow-down, a world size, a size or a step time."""
    return f"{system}@{at:g}"


# -- peers ------------------------------------------------------------------------------


def sum_of_solos(rates: Rates, slowdown: float) -> float:
    """Rate of both ranks if each had the machine to itself."""
    return rates[cell("solo", 1)] + rates[cell("solo", slowdown)]


def best_peer(rates: Rates, slowdown: float) -> tuple[str, float] | None:
    """The fastest of the peers that were measured, and its rate."""
    found = [(p, rates[cell(p, slowdown)]) for p in PEERS if cell(p, slowdown) in rates]
    return max(found, key=lambda pair: pair[1], default=None)


def against_peers(rates: Rates, system: str, slowdown: float) -> str:
    """The ratio to the fastest peer, and True if the system is at least as fast."""
    best = best_peer(rates, slowdown)
    if best is None:
        return "no peer"
    ratio = rates[cell(system, slowdown)] / best[1]
    return f"{ratio:.2f} {'yes' if ratio >= 1 else f'NO ({best[0]})'}"


def peers_table(rates: Rates, slowdowns: Sequence[float]) -> str:
    """All systems at all slow-downs of rank 1."""
    head = ("rank 1 slowed", "system", "samples/s", "/ sum of solos", "/ 2 bare threads")
    rows = []
    for slowdown in slowdowns:
        total = sum_of_solos(rates, slowdown)
        threads = rates[cell("threads", slowdown)]
        rows.append([f"{slowdown:g}", "sum of solo rates", f"{total:,.0f}", "1.00", "", ""])
        for system, title in TITLES.items():
            rate = rates.get(cell(system, slowdown))
            if rate is None:
                continue
            verdict = against_peers(rates, system, slowdown) if system in OURS else ""
            shares = [f"{rate / total:.2f}", f"{rate / threads:.2f}"]
            rows.append([f"{slowdown:g}", title, f"{rate:,.0f}", *shares, verdict])
    return table((*head, "/ fastest peer"), rows, num_texts=2)


def peers_checks(
    model: str, step_s: float, rates: Rates, slowdowns: Sequence[float]
) -> list[Check]:
    """The targets for one model."""
    checks = []
    for slowdown in slowdowns:
        where = f"{model}, rank 1 slowed {slowdown:g} times"
        if step_s >= MIN_STEP_S:
            share = rates[cell("cadence", slowdown)] / rates[cell("threads", slowdown)]
            what = f"{where}: CADENCE / 2 bare threads"
            checks.append(Check(what=what, measured=share, wanted=EFFICIENCY))
        best = best_peer(rates, slowdown)
        if best is not None:
            for system in OURS:
                ratio = rates[cell(system, slowdown)] / best[1]
                what = f"{where}: {system.upper()} / fastest peer ({best[0]})"
                checks.append(Check(what=what, measured=ratio, wanted=1.0))
    return checks


def ddp_checks(model: str, rates: Rates, slowdowns: Sequence[float]) -> list[Check]:
    """The targets against ``DistributedDataParallel``, and one worker's against a bare loop.

    Against DDP they differ for the MLP, whose step is short.
    """
    small, checks = model == "mlp", []

    def add(what: str, over: str, under: str, wanted: float) -> None:
        if over in rates and under in rates:
            ratio = rates[over] / rates[under]
            checks.append(Check(what=f"{model}{what}", measured=ratio, wanted=wanted))

    for s in slowdowns:
        if s == 1.0:
            add(": 1 worker / bare loop", cell("one", s), cell("solo", s), 0.97)
            wanted = 2.0 if small else 1.3
            add(": CADENCE / DDP", cell("cadence", s), cell("ddp", s), wanted)
            add(": SYNC / DDP", cell("sync", s), cell("ddp", s), 2.0 if small else 1.2)
        elif s >= 3.0:
            where = f", rank 1 slowed {s:g} times"
            add(f"{where}: CADENCE / DDP", cell("cadence", s), cell("ddp", s), 1.8)
            what = f"{where}: CADENCE / the sum of both speeds"
            add(what, cell("cadence", s), cell("threads", s), 1 / 1.1)
    return checks


# -- efficiency -------------------------------------------------------------------------


def efficiency_table(ratios: Mapping[float, Sequence[float]]) -> str:
    """The ratios of neighbours in time at each slow-down of rank 1."""
    rows = [
        [f"{slowdown:g}", f"{statistics.median(found):.3f}", *_ends(found), f"{len(found)}"]
        for slowdown, found in ratios.items()
    ]
    return table(("rank 1 slowed", "CADENCE / 2 bare threads", "least", "most", "pairs"), rows, 0)


def _ends(found: Sequence[float]) -> list[str]:
    return [f"{end(found):.3f}" for end in (min, max)]


def efficiency_checks(
    model: str, step_s: float, ratios: Mapping[float, Sequence[float]]
) -> list[Check]:
    """The targets for one model, by the medians."""
    if step_s < MIN_STEP_S:
        return []
    return [
        Check(
            what=f"{model}, rank 1 slowed {slowdown:g} times: CADENCE / 2 bare threads, pairwise",
            measured=statistics.median(found),
            wanted=EFFICIENCY,
        )
        for slowdown, found in ratios.items()
    ]


# -- shares -----------------------------------------------------------------------------

SHARED = {
    "threads": "2 bare threads",
    "balanced": "SYNC, balance(True)",
    "alike": "2 bare threads with its shares, free lockstep",
    "sync": "SYNC, equal batches",
    "cadence": "CADENCE",
    "ddp": "DistributedDataParallel",
}


def shares_table(measured: Measured, slowdowns: Sequence[float]) -> str:
    """Rates, and the medians of their ratios to their neighbours in time."""
    head = ("rank 1 slowed", "system", "samples/s", "/ 2 bare threads", "95 % interval", "/ DDP")
    rows = []
    for slowdown in slowdowns:
        threads, ddp = (cell(name, slowdown) for name in ("threads", "ddp"))
        for name, title in SHARED.items():
            key = cell(name, slowdown)
            middle, low, high = median_interval(measured.ratios(key, threads))
            rate = f"{median(measured.rates[key]):,.0f}"
            peer = f"{median(measured.ratios(key, ddp)):.2f}"
            interval = f"{low:.2f} to {high:.2f}"
            rows.append([f"{slowdown:g}", title, rate, f"{middle:.2f}", interval, peer])
    return table(head, rows, num_texts=2)


def shares_checks(model: str, measured: Measured, slowdowns: Sequence[float]) -> list[Check]:
    """The targets for one model: lower for the MLP, whose step is short."""
    small, checks = model == "mlp", []

    def add(what: str, over: str, under: str, wanted: float) -> None:
        ratio = median(measured.ratios(over, under))
        checks.append(Check(what=f"{model}{what}", measured=ratio, wanted=wanted))

    for s in slowdowns:
        balanced = cell("balanced", s)
        where = f", rank 1 slowed {s:g} times: SYNC with shares"
        if s == 1.0:
            add(f"{where} / SYNC", balanced, cell("sync", s), 0.98)
            continue
        add(f"{where} / 2 bare threads", balanced, cell("threads", s), 0.6 if small else 0.85)
        if s == 3.0:
            add(f"{where} / DDP", balanced, cell("ddp", s), 1.9 if small else 2.0)
    return checks


# -- transports -------------------------------------------------------------------------

TRANSPORTS = {
    "auto": ("AUTO", AverageBackend.AUTO),
    "cpu": ("CPU", AverageBackend.CPU),
    "thread": ("THREAD", AverageBackend.THREAD),
}
"""Title and backend of each way to average under ``CADENCE``."""
AUTO_WANTED = 0.95


def transports_table(measured: Measured) -> str:
    """Rates, and the medians of their ratios to AUTO in the same repetition."""
    rows = []
    for name, (title, _) in TRANSPORTS.items():
        middle, low, high = median_interval(measured.ratios("auto", name))
        rate = f"{median(measured.rates[name]):,.0f}"
        rows.append([title, rate, f"{middle:.3f}", f"{low:.2f} to {high:.2f}"])
    return table(("backend", "samples/s", "AUTO / this", "95 % interval"), rows)


def transports_check(model: str, measured: Measured) -> Check:
    """Cost of AUTO relative to the better of the fixed choices."""
    best = max(("cpu", "thread"), key=lambda name: median(measured.rates[name]))
    ratio = median(measured.ratios("auto", best))
    what = f"{model}: AUTO / {TRANSPORTS[best][0]}, the better one"
    return Check(what=what, measured=ratio, wanted=AUTO_WANTED)


# -- world ------------------------------------------------------------------------------


def world_shares(rates: Rates, sizes: Sequence[int]) -> dict[str, float]:
    """Share of the sum of the solo rates, for each policy and world size."""
    solo = rates["solo"]
    return {cell(s, n): rates[cell(s, n)] / (n * solo) for n in sizes for s in OURS}


def world_table(rates: Rates, sizes: Sequence[int]) -> str:
    """Shares by world size."""
    shares = world_shares(rates, sizes)
    rows = [[f"{n}", *(f"{shares[cell(s, n)]:.3f}" for s in OURS)] for n in sizes]
    return table(("workers", *(s.upper() for s in OURS)), rows, num_texts=0)


def world_checks(rates: Rates, sizes: Sequence[int], step_ms: float) -> list[Check]:
    """The target for the largest world."""
    shares, largest = world_shares(rates, sizes), max(sizes)
    return [
        Check(
            what=f"{largest} workers asleep {step_ms:g} ms a step: {s.upper()} / sum of solo rates",
            measured=shares[cell(s, largest)],
            wanted=EFFICIENCY,
        )
        for s in OURS
    ]


# -- model ------------------------------------------------------------------------------


def rounds_table(rates: Rates, rounds: Mapping[str, Mapping[str, float]]) -> str:
    """Table of the cost of averaging by model size.

    Args:
        rates: Samples/s of the bare loop and of the policies at each size.
        rounds: For each key of a policy, ``num_params``, ``round_s``, ``average_s``,
            ``pause_s``, ``averagings`` and ``anchor``.
    """
    head = ("parameters", "policy", "round, ms", "its arithmetic, ms", "pause of a worker, ms")
    rows = []
    for key, numbers in rounds.items():
        system, num_params = key.partition("@")[0], numbers["num_params"]
        share = rates[key] / (2 * rates[cell("solo", num_params)])
        times = [milliseconds(numbers[name]) for name in ("round_s", "average_s", "pause_s")]
        counts = [f"{numbers['averagings']:.0f}", f"{numbers['anchor']:.0f}", f"{share:.3f}"]
        rows.append([f"{num_params:.0e}", system.upper(), *times, *counts])
    more = ("averagings", "anchor at the end", "/ sum of solos")
    return table((*head, *more), rows, num_texts=2)


def lockstep_table(rates: Rates, sizes: Sequence[int], batch_size: int) -> str:
    """Time of a step of two ranks that reduce all gradients, beside bare threads."""
    systems = [s for s in ("threads", "sync", "ddp") if cell(s, sizes[0]) in rates]
    rows = []
    for size in sizes:
        steps = {s: 2 * batch_size / rates[cell(s, size)] for s in systems}
        more = [milliseconds(max(0.0, steps[s] - steps["threads"])) for s in systems[1:]]
        rows.append([f"{size:.0e}", *(milliseconds(steps[s]) for s in systems), *more])
    names = {"threads": "2 bare threads", "sync": "SYNC", "ddp": "DDP"}
    head = ["parameters", *(f"{names[s]}: step, ms" for s in systems)]
    return table([*head, *(f"{names[s]}: more, ms" for s in systems[1:])], rows)


# -- step -------------------------------------------------------------------------------


def step_table(rates: Rates, steps: Sequence[tuple[str, float]], batch_size: int) -> str:
    """Table of the fraction of the bare rates by step length.

    Args:
        rates: Samples/s at ``SYSTEM@STEP_MS/KIND`` (see :func:`step_cell`).
        steps: Kind of each step (asleep or busy) and its wanted time, in seconds.
        batch_size: Samples in a step.
    """
    rows = []
    for kind, step_s in steps:
        solo, threads, one, cadence = (
            rates[step_cell(s, kind, step_s)] for s in ("solo", "threads", "one", "cadence")
        )
        shares = [one / solo, cadence / threads, cadence / (2 * solo)]
        measured = milliseconds(batch_size / solo)
        rows.append([kind, f"{step_s * 1e3:g}", measured, *(f"{share:.3f}" for share in shares)])
    head = ("step is", "wanted, ms", "bare step, ms", "1 worker / bare loop")
    return table((*head, "CADENCE / 2 bare threads", "CADENCE / sum of solos"), rows)


def step_cell(system: str, kind: str, step_s: float) -> str:
    """Key of a measurement at a step's kind and time."""
    return f"{system}@{step_s * 1e3:g}/{kind}"


def step_checks(rates: Rates, steps: Sequence[tuple[str, float]]) -> list[Check]:
    """Efficiency of two workers at steps of 1 ms and more."""
    checks = []
    for kind, step_s in steps:
        if step_s >= MIN_STEP_S:
            cadence, threads = (rates[step_cell(s, kind, step_s)] for s in ("cadence", "threads"))
            what = f"{step_s * 1e3:g} ms {kind}: CADENCE / 2 bare threads"
            checks.append(Check(what=what, measured=cadence / threads, wanted=EFFICIENCY))
    return checks


# -- coordinator ------------------------------------------------------------------------


def coordinator_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The coordinator thread's own CPU time."""
    head = ("workers", "step, ms", "policy", "batches/s", "µs a batch", "% of a core")
    lines = [
        [
            f"{row['workers']}",
            f"{row['step_s'] * 1e3:g}",
            row["system"].upper(),
            f"{row['batches_per_s']:,.0f}",
            f"{row['cpu_s'] * 1e6:.1f}",
            f"{row['cpu_s'] * row['batches_per_s']:.2%}",
            f"{row['cpu_s'] * 1000:.2%}",
        ]
        for row in rows
    ]
    return table((*head, "at 1,000 batches/s"), lines, num_texts=3)


def coordinator_checks(rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Target for the share of a core."""
    return [
        Check(
            what=f"coordinator's CPU time at 1,000 batches/s, {row['workers']} workers, "
            f"{row['system'].upper()}",
            measured=row["cpu_s"] * 1000,
            wanted=MAX_COORDINATOR,
            at_most=True,
        )
        for row in rows
    ]


# == the sections ========================================================================


Options = argparse.Namespace
"""Arguments of the command line."""


def in_turn(options: Options, cells: Sequence[Cell]) -> Measured:
    """Measure these cells in turn."""
    return interleaved(cells, options.repeat, options.retry)


@dataclass
class Section:
    """Results of a section.

    Attributes:
        markdown: Its tables.
        record: For the JSON file.
        checks: Its targets.
        disturbed: For each measurement, True if others used the machine.
    """

    markdown: list[str] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    disturbed: list[bool] = field(default_factory=list)

    def add(self, measured: Measured, cells: Cells | None = None) -> dict[str, Any]:
        """Add the disturbances of measurements; returns their record."""
        self.disturbed += measured.disturbed()
        details = {} if cells is None else {"details": cells.details()}
        return {**measured.record(), **details}


def missing_peers() -> dict[str, str]:
    """Peers that cannot be measured here, with the reasons."""
    if importlib.util.find_spec("accelerate") is None:
        return {"local_sgd": "accelerate is not installed"}
    return {}


def peers(options: Options) -> Section:
    """The runtime against its peers, with rank 1 as fast as rank 0 and slowed."""
    section = Section()
    missing = missing_peers()
    slowdowns = options.slowdowns
    for name, why in missing.items():
        section.markdown.append(f"{TITLES[name]} is left out: {why}.")
    section.record["left_out"] = missing
    with GlooGroup(2) as group:
        for model in options.models:
            workload = WORKLOADS[model]
            step_s = step_seconds(workload)
            cells = Cells(workload, step_s, options.seconds, group)
            wanted = [c for s in slowdowns for c in _peer_cells(cells, step_s, s, missing)]
            if 1.0 not in slowdowns:  # rank 0's part of the sum
                wanted.append(cells.solo(cell("solo", 1.0)))
            measured = in_turn(options, wanted)
            rates = measured.medians()
            title = f"### {workload.what}: {step_s * 1e3:.2f} ms a step"
            section.markdown += [title, peers_table(rates, slowdowns)]
            section.checks += peers_checks(model, step_s, rates, slowdowns)
            section.checks += ddp_checks(model, rates, slowdowns)
            section.record[model] = {"step_s": step_s, **section.add(measured, cells)}
    return section


def _peer_cells(
    cells: Cells, step_s: float, slowdown: float, missing: Mapping[str, str]
) -> list[Cell]:
    pauses = (0.0, (slowdown - 1.0) * step_s)
    found = [cells.solo(cell("solo", slowdown), pauses[1])]
    found.append(cells.threads(cell("threads", slowdown), pauses))
    for name, policy in POLICIES.items():
        found.append(cells.runtime(cell(name, slowdown), policy, pauses))
    found.append(cells.way(cell("cadence_thread", slowdown), "cadence_thread", slowdown))
    if slowdown == 1.0:
        found.append(cells.way(cell("one", slowdown), "one"))
    if hasattr(os, "sched_setaffinity"):
        key = cell("sync_pinned", slowdown)
        found.append(cells.runtime(key, POLICIES["sync"], pauses, pinned=True))
    available = [name for name in PEERS if name not in missing]
    found += [cells.peer(cell(name, slowdown), name, pauses) for name in available]
    return found


def efficiency(options: Options) -> Section:
    """CADENCE against two bare threads, measured one right after the other, for longer."""
    section = Section()
    for model in options.models:
        workload = WORKLOADS[model]
        step_s = step_seconds(workload)
        cells = Cells(workload, step_s, LONGER * options.seconds)
        ratios: dict[float, list[float]] = {}
        for slowdown in options.slowdowns:
            pauses = (0.0, (slowdown - 1.0) * step_s)
            threads, cadence = (cell(name, slowdown) for name in ("threads", "cadence"))
            pair = [cells.threads(threads, pauses)]
            pair.append(cells.runtime(cadence, POLICIES["cadence"], pauses))
            measured = in_turn(options, pair)
            ratios[slowdown] = measured.ratios(cadence, threads)
            section.record.setdefault(model, {})[f"{slowdown:g}"] = section.add(measured)
        title = f"### {workload.what}: {step_s * 1e3:.2f} ms a step"
        section.markdown += [title, efficiency_table(ratios)]
        section.checks += efficiency_checks(model, step_s, ratios)
        section.record[model] |= {"step_s": step_s, "details": cells.details()}
    return section


def shares(options: Options) -> Section:
    """``SYNC`` with shares by measured speed, beside the policies without them."""
    section = Section()
    with GlooGroup(2) as group:
        for model in options.models:
            workload = WORKLOADS[model]
            step_s = step_seconds(workload)
            cells = Cells(workload, step_s, options.seconds, group)
            wanted = [c for s in options.slowdowns for c in _shares_cells(cells, step_s, s)]
            measured = in_turn(options, wanted)
            title = f"### {workload.what}: {step_s * 1e3:.2f} ms a step"
            section.markdown += [title, shares_table(measured, options.slowdowns)]
            section.checks += shares_checks(model, measured, options.slowdowns)
            section.record[model] = {"step_s": step_s, **section.add(measured, cells)}
    return section


def _shares_cells(cells: Cells, step_s: float, slowdown: float) -> list[Cell]:
    pauses = (0.0, (slowdown - 1.0) * step_s)
    sync, cadence = ApplyPolicy.SYNC, ApplyPolicy.CADENCE
    return [
        cells.threads(cell("threads", slowdown), pauses),
        cells.runtime(cell("balanced", slowdown), sync, pauses, balance=True),
        cells.threads(cell("alike", slowdown), pauses, like=cell("balanced", slowdown)),
        cells.runtime(cell("sync", slowdown), sync, pauses),
        cells.runtime(cell("cadence", slowdown), cadence, pauses),
        cells.peer(cell("ddp", slowdown), "ddp", pauses),
    ]


def follow(options: Options) -> Section:
    """Delay with which shares follow a rank's change of speed, and their steadiness before it."""
    section, rows = Section(), []
    for before, after in ((1.0, 3.0), (3.0, 1.0)):
        found = [follow_once(before, after, FOLLOW_AT + i) for i in range(options.repeat)]
        steps, excess = (list(column) for column in zip(*found, strict=True))
        what = f"rank 1 from {before:g} to {after:g} times as slow"
        rows.append([what, f"{max(steps)}", f"{max(excess):.1%}", f"{len(found)}"])
        section.record[what] = {"steps": steps, "excess": excess}
        section.checks += [
            Check(what=f"{what}: steps, the most", measured=max(steps), wanted=20, at_most=True),
            Check(
                what=f"{what}: steady steps above the shortest ones, the most",
                measured=max(excess),
                wanted=NEAR,
                at_most=True,
            ),
        ]
    head = ("change", "steps until the shares fit", "steady steps longer by", "runs")
    section.markdown.append(table(head, rows))
    return section


def sleeping(
    train_fn: Callable[..., Tensor], data: Any, batch_size: int, policy: ApplyPolicy
) -> TrainerBuilder:
    """A run of two workers whose steps are sleep, under ``SYNC`` with ``balance(True)``."""
    builder = (
        Trainer.builder(
            lambda device: nn.Linear(1, 1), lambda params: torch.optim.SGD(params, 1e-3), train_fn
        )
        .dataset(data)
        .batch_size(batch_size)
        .num_epochs(1)
        .devices(["cpu", "cpu"])
        .policy(policy)
        .tune_allocator(False)
        .progress(False)
    )
    return builder.balance(True) if policy is ApplyPolicy.SYNC else builder


def follow_once(before: float, after: float, change_at: int) -> tuple[int, float]:
    """One run of two workers that sleep for each sample, of which rank 1 changes its speed.

    Args:
        before: Initial sleep of rank 1 as a multiple of rank 0's.
        after: Likewise from its step ``change_at`` on.
        change_at: A step at which shares are steady.

    Returns:
        Steps from the change until all that follow are near the shortest that shares could make
        them; and by what part those right before the change are longer than theirs, the most.
    """
    pieces: list[list[int]] = [[], []]

    def factor(step: int) -> float:
        return before if step < change_at else after

    def train_fn(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        rank, num_samples = current_worker().rank, len(batch[0])
        times = factor(len(pieces[1])) if rank else 1.0
        pieces[rank].append(num_samples)
        time.sleep(times * FOLLOW_SAMPLE_S * num_samples)
        loss: Tensor = model(batch[0]).mean()
        return loss

    data = (torch.zeros(FOLLOW_STEPS * 2 * FOLLOW_BATCH, 1),)
    sleeping(train_fn, data, FOLLOW_BATCH, ApplyPolicy.SYNC).run().join()
    excess = []
    for step, (own, other) in enumerate(zip(*pieces, strict=True)):
        total, slowness = own + other, factor(step)
        best = min(max(n, slowness * (total - n)) for n in range(1, total))
        excess.append(max(own, slowness * other) / best - 1)
    late = [step for step in range(change_at, len(excess)) if excess[step] > NEAR]
    num_steps = late[-1] + 1 - change_at if late else 0
    return num_steps, max(excess[change_at - FOLLOW_STEADY : change_at])


@dataclass(frozen=True, kw_only=True)
class SleepingRun:
    """A run of two workers that sleep, one of which is slow in one respect.

    Attributes:
        policy: Its policy, under ``SYNC`` with ``balance(True)``.
        data: Reading a sample on rank 1 takes this multiple of the training of a sample.
        compute: Training a sample on rank 0 takes this multiple of the time on rank 1.
        prefetch: Batches that are read ahead.
        eval_batches: Duration of ``eval_fn``, in batches of its rank; 0: none.
        counts_waits: Waits for data count in the shares and in the cadence.
        eval_rank: The rank of ``eval_fn``; ``None``: chosen by cost.
    """

    policy: ApplyPolicy
    data: float = 0.0
    compute: float = 1.0
    prefetch: int = 1
    eval_batches: int = 0
    counts_waits: bool = True
    eval_rank: int | None = None

    def rate(self, _: float) -> float:
        """Samples per second of the whole run."""
        slowness = (self.compute, 1.0)

        def train_fn(model: nn.Module, batch: Tensor) -> Tensor:
            time.sleep(SLEEP_SAMPLE_S * slowness[current_worker().rank] * len(batch))
            loss: Tensor = model(batch).mean()
            return loss

        def eval_fn(model: nn.Module, epoch: int) -> dict[str, float]:
            batch_s = SLEEP_SAMPLE_S * SLEEP_BATCH
            time.sleep(self.eval_batches * batch_s * slowness[current_worker().rank])
            return {}

        data = SleepingData((0.0, self.data * SLEEP_SAMPLE_S))
        builder = sleeping(train_fn, data, SLEEP_BATCH, self.policy)
        builder.num_epochs(SLEEP_EPOCHS).prefetch(self.prefetch)
        if self.eval_batches:
            builder.eval_fn(eval_fn)
        if self.eval_rank is not None:
            builder.eval_rank(self.eval_rank)
        ignored = mock.patch.object(DataWaits, "per_sample_s", return_value=0.0)
        with nullcontext() if self.counts_waits else ignored:
            start = time.perf_counter()
            builder.run().join()
            return SLEEP_EPOCHS * len(data) / (time.perf_counter() - start)


class SleepingData:
    """Samples that each rank reads at its own speed.

    Args:
        seconds: Seconds that a sample takes, for each rank.
    """

    def __init__(self, seconds: tuple[float, float]) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return SLEEP_SAMPLES

    def get_batch(self, indices: Tensor) -> Tensor:
        """Read a batch."""
        time.sleep(self._seconds[current_worker().rank] * len(indices))
        return torch.zeros(len(indices), 1)


def delivered(options: Options) -> Section:
    """Shares that count waits for data over shares by compute time only, and ``eval_fn`` on the
    rank where it costs least over ``eval_rank(0)``.
    """
    section, rows = Section(), []
    pairs: list[tuple[str, SleepingRun, dict[str, Any]]] = []
    for policy in ApplyPolicy:
        for prefetch in (0, 1):
            what = f"{policy.value}, slow data, {'read ahead' if prefetch else 'on request'}"
            run = SleepingRun(policy=policy, data=SLEEP_SLOWDOWN, prefetch=prefetch)
            pairs.append((what, run, {"counts_waits": False}))
    for policy in (ApplyPolicy.SYNC, ApplyPolicy.CADENCE):
        run = SleepingRun(policy=policy, compute=SLEEP_SLOWDOWN, eval_batches=SLEEP_EVAL)
        pairs.append((f"{policy.value}, slow compute, placement", run, {"eval_rank": 0}))
    for what, run, without in pairs:
        cells = [
            Cell(key=f"{what}, with", guess=1.0, run=run.rate),
            Cell(key=f"{what}, without", guess=1.0, run=replace(run, **without).rate),
        ]
        measured = in_turn(options, cells)
        ratio, low, high = median_interval(measured.ratios(cells[0].key, cells[1].key))
        rates = measured.medians()
        rows.append([what, *(f"{rates[c.key]:,.0f}" for c in cells)])
        rows[-1].append(f"{ratio:.2f} ({low:.2f} to {high:.2f})")
        section.record[what] = section.add(measured)
        section.checks.append(Check(what=f"{what}: over without", measured=ratio, wanted=1.0))
    head = ("run", "with the rule: samples/s", "without", "ratio")
    section.markdown.append(table(head, rows))
    return section


def transports(options: Options) -> Section:
    """``backend(AUTO)`` beside each transport that it may select, two workers."""
    section = Section()
    for model in options.models:
        workload = WORKLOADS[model]
        step_s = step_seconds(workload)
        cells = Cells(workload, step_s, options.seconds)
        wanted = [
            cells.runtime(name, ApplyPolicy.CADENCE, (0.0, 0.0), backend=backend)
            for name, (_, backend) in TRANSPORTS.items()
        ]
        measured = in_turn(options, wanted)
        title = f"### {workload.what}: {step_s * 1e3:.2f} ms a step"
        section.markdown += [title, transports_table(measured)]
        section.checks.append(transports_check(model, measured))
        section.record[model] = {"step_s": step_s, **section.add(measured, cells)}
    return section


def world(options: Options) -> Section:
    """The cost of more workers, whose steps are sleep, so that cores are not the limit."""
    section, sizes = Section(), (1, 8) if options.quick else WORLDS
    cells = Cells(tiny(), 0.0, max(options.seconds, MIN_STEPS * WORLD_STEP_S))
    wanted = [cells.solo("solo", WORLD_STEP_S)]
    for size in sizes:
        for name, policy in POLICIES.items():
            pauses = (WORLD_STEP_S,) * size
            wanted.append(cells.runtime(cell(name, size), policy, pauses))
    measured = in_turn(options, wanted)
    rates = measured.medians()
    section.markdown.append(world_table(rates, sizes))
    section.checks += world_checks(rates, sizes, WORLD_STEP_S * 1e3)
    section.record = section.add(measured, cells)
    return section


def model(options: Options) -> Section:
    """The cost of larger models."""
    section, sizes = Section(), (10**4, 10**6) if options.quick else SIZES
    rates: dict[str, float] = {}
    rounds: dict[str, dict[str, float]] = {}
    seconds = max(options.seconds, MIN_STEPS * MODEL_STEP_S)
    pauses = (MODEL_STEP_S, MODEL_STEP_S)
    for size in sizes:
        cells = Cells(sparse(size), 0.0, seconds)
        wanted = [cells.solo(cell("solo", size), MODEL_STEP_S)]
        for name in ("cadence", "async"):
            key = cell(name, size)
            wanted.append(cells.runtime(key, POLICIES[name], pauses, recorded=True, steady=True))
        measured = in_turn(options, wanted)
        rates |= measured.medians()
        for key, outcomes in cells.outcomes.items():
            rounds[key] = {"num_params": size, **_round_numbers(outcomes)}
        section.record[f"{size}"] = section.add(measured, cells)
    section.markdown += ["### Averaging", rounds_table(rates, rounds)]
    section.record["rounds"] = rounds
    with GlooGroup(2) as group:
        lockstep, records = _lockstep(section, sizes, options, group)
    section.record["lockstep"] = records
    batch_size = tiny().batch_size
    section.markdown += ["### Lockstep", lockstep_table(lockstep, sizes, batch_size)]
    return section


def _round_numbers(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Medians over all rounds of all repetitions; the pause is a mean within a run."""
    last = outcomes[-1]
    return {
        "round_s": median(tuple(s for o in outcomes for s in o.round_s)),
        "average_s": median(tuple(s for o in outcomes for s in o.average_s)),
        "pause_s": median(tuple(o.pause_s for o in outcomes)),
        "averagings": last.averagings,
        "anchor": last.details["anchor"],
    }


def _lockstep(
    section: Section, sizes: Sequence[int], options: Options, group: GlooGroup
) -> tuple[dict[str, float], dict[str, Any]]:
    rates: dict[str, float] = {}
    records: dict[str, Any] = {}
    pauses = (0.0, 0.0)
    for size in sizes:
        workload = dense(size)
        data = workload.make_data(workload.batch_size * 8)
        rate = solo_rate(workload, data, warmup_s=0.1, measure_s=0.2)
        cells = Cells(workload, workload.batch_size / rate, options.seconds, group)
        wanted = [cells.threads(cell("threads", size), pauses)]
        key = cell("sync", size)
        wanted.append(cells.runtime(key, ApplyPolicy.SYNC, pauses, steady=True))
        wanted.append(cells.peer(cell("ddp", size), "ddp", pauses))
        measured = in_turn(options, wanted)
        rates |= measured.medians()
        records[f"{size}"] = section.add(measured, cells)
    return rates, records


def step(options: Options) -> Section:
    """The cost of shorter steps."""
    section = Section()
    steps = [("asleep", s) for s in ASLEEP] + [("busy", s) for s in BUSY]
    if options.quick:
        steps = [("asleep", 0.01), ("busy", 0.001), ("busy", 0.0001)]
    rates: dict[str, float] = {}
    for kind, step_s in steps:
        workload = tiny() if kind == "asleep" else busy(step_s)
        pause_s = step_s if kind == "asleep" else 0.0
        bare_s = 0.0 if kind == "asleep" else step_s
        cells = Cells(workload, bare_s, max(options.seconds, MIN_STEPS * step_s))
        cadence = ApplyPolicy.CADENCE
        wanted = [
            cells.solo(step_cell("solo", kind, step_s), pause_s),
            cells.threads(step_cell("threads", kind, step_s), (pause_s,) * 2),
            cells.runtime(step_cell("one", kind, step_s), cadence, (pause_s,)),
            cells.runtime(step_cell("cadence", kind, step_s), cadence, (pause_s,) * 2),
        ]
        measured = in_turn(options, wanted)
        rates |= measured.medians()
        section.record[f"{kind} {step_s * 1e3:g} ms"] = section.add(measured, cells)
    section.markdown.append(step_table(rates, steps, tiny().batch_size))
    section.checks += step_checks(rates, steps)
    return section


def coordinator(options: Options) -> Section:
    """CPU time of the coordinator's thread at about 1,000 batches/s in total."""
    section, rows = Section(), []
    for num_workers, step_s in COORDINATED:
        cells = Cells(tiny(), 0.0, LONGER * options.seconds)
        pauses = (step_s,) * num_workers
        wanted = [cells.runtime(name, policy, pauses) for name, policy in POLICIES.items()]
        measured = in_turn(options, wanted)
        for name, outcomes in cells.outcomes.items():
            rows.append(
                {
                    "workers": num_workers,
                    "step_s": step_s,
                    "system": name,
                    "batches_per_s": statistics.median(o.batches_per_s for o in outcomes),
                    "cpu_s": statistics.median(o.coordinator_s for o in outcomes),
                }
            )
        section.record[f"{num_workers} workers"] = section.add(measured, cells)
    section.record["rows"] = rows
    section.markdown.append(coordinator_table(rows))
    section.checks += coordinator_checks(rows)
    return section


SECTIONS: dict[str, tuple[str, Callable[[Options], Section]]] = {
    "peers": ("Against its peers", peers),
    "efficiency": ("CADENCE against two bare threads, pair by pair", efficiency),
    "shares": ("SYNC with shares by measured speed", shares),
    "follow": ("SYNC with shares: a rank that changes its speed", follow),
    "delivered": ("Waits for data in shares, placement of evaluations", delivered),
    "transports": ("AUTO against a fixed transport", transports),
    "world": (f"More workers, asleep {WORLD_STEP_S * 1e3:g} ms a step", world),
    "model": (f"Larger models, 2 workers, asleep {MODEL_STEP_S * 1e3:g} ms a step", model),
    "step": ("Shorter steps", step),
    "coordinator": ("The coordinator's thread", coordinator),
}


# == against another checkout =============================================================

AGAINST_WANTED = 0.98
OVERHEAD_WANTED = 1.0
OVERHEAD_S = 4.0
"""Length of one measurement of the step overhead."""
TREES = ("after", "before")
"""This checkout, and the other one."""
BOOT = """
import sys
root = sys.argv[1]
sys.path.insert(0, root)
import benchmarks.harness  # these benchmarks, whatever the other checkout has
sys.path.remove(root)
from benchmarks.speed import serve_tree
serve_tree()
"""


@contextmanager
def tree_child(name: str, tree: Path) -> Iterator[Child]:
    """A process of these benchmarks over the packages of a checkout.

    Raises:
        RuntimeError: It has imported other packages.
    """
    env = {**os.environ, "PYTHONPATH": str(tree)}
    # -P: else the current folder would be searched before PYTHONPATH.
    with Child(f"the process over {tree}", ["-P", "-c", BOOT, str(ROOT)], env) as child:
        found = child.answer()
        for package, folder in found.items():
            if Path(folder).parent != tree:
                raise RuntimeError(f"{package} of {name!r} is from {folder}, not from {tree}")
        yield child


def serve_tree() -> None:
    """Measure on request, over the packages that this process finds."""
    torch.set_num_threads(1)
    made: dict[tuple[str, float], Cells] = {}

    def work(
        what: str, model: str, way: str, step_s: float, seconds: float, slowdown: float, rate: float
    ) -> float:
        """Samples/s, or the time of a step of a worker over that of a bare step."""
        workload = workload_of(model)
        if what == "setup":
            from benchmarks import own_loops

            num_batches = min(max(24, int(seconds / step_s)), workload.max_batches)
            data = workload.make_data(num_batches * workload.batch_size)
            return own_loops.setup_rate(workload, data, WAYS[way][0], seconds)
        if what == "overhead":
            from benchmarks import overhead

            pairs = overhead.step_pairs(workload, WAYS[way][0], seconds)
            return statistics.median(p.wall_s[0] / p.wall_s[1] for p in pairs)
        cells = made.setdefault((model, seconds), Cells(workload, step_s, seconds))
        return cells.way("", way, slowdown).run(rate)

    packages = [importlib.import_module(name) for name in ("runtime", "coordinator")]
    serve(work, {p.__name__: str(Path(p.__file__ or "").resolve().parent) for p in packages})


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One measurement over both checkouts.

    Attributes:
        title: For the table.
        model: The workload's name.
        guess: First guess of the rate; later the fastest of either checkout sizes a run.
        request: Request to the processes, except for the rate.
    """

    title: str
    model: str
    guess: float
    request: dict[str, Any]

    @property
    def is_overhead(self) -> bool:
        """True for a step's time over a bare one's, of which less is better."""
        return self.request["what"] == "overhead"


def contests(args: argparse.Namespace) -> list[Contest]:
    """The measurements that the arguments select: rates, then steps against bare ones."""
    found = []
    for model in args.models:
        step_s = step_seconds(workload_of(model))
        cells = Cells(workload_of(model), step_s, args.seconds)

        def add(
            title: str, guess: float, model: str = model, step_s: float = step_s, **more: Any
        ) -> None:
            request = {"model": model, "step_s": step_s, "slowdown": 1.0, **more}
            found.append(Contest(title=title, model=model, guess=guess, request=request))

        for slowdown in args.slowdowns:
            for way in args.ways:
                if slowdown != 1.0 and WAYS[way][0] == 1:
                    continue
                slowed = f", rank 1 slowed {slowdown:g} times" if slowdown != 1.0 else ""
                guess = cells.way("", way, slowdown).guess
                more = {"what": "rate", "seconds": args.seconds, "slowdown": slowdown}
                add(f"{WAY_TITLES[way]}{slowed}", guess, way=way, **more)
        add("Trainer.setup", 0.0, what="setup", way="sync", seconds=args.seconds)
        if not args.no_overhead:
            more = {"what": "overhead", "seconds": args.overhead_seconds}
            add("step / bare step, 1 worker", 0.0, way="one", **more)
            add("step / bare step, 2 workers", 0.0, way="cadence", **more)
    return found


def ask(child: Child, request: Mapping[str, Any], _: float) -> float:
    """A process's answer."""
    measured: float = child.ask(**request)
    return measured


def run_contests(
    wanted: Sequence[Contest], trees: Mapping[str, Path], num_pairs: int, num_retries: int
) -> list[Measured]:
    """Measure all over both checkouts, one right after the other, in new processes each round.

    Every other round is in reverse order, and so is every other pair.
    """
    found = [Measured() for _ in wanted]
    for index in range(num_pairs):
        print(f"round {index + 1} of {num_pairs}", file=sys.stderr, flush=True)
        with (
            tree_child("after", trees["after"]) as after,
            tree_child("before", trees["before"]) as before,
        ):
            children = {"after": after, "before": before}
            order = list(enumerate(wanted))
            for position, contest in order if index % 2 == 0 else reversed(order):
                measured = found[position]
                rate = max((r for runs in measured.rates.values() for r in runs), default=0.0)

                request = {**contest.request, "rate": rate or contest.guess}
                cells = [
                    Cell(key=tree, guess=0.0, run=partial(ask, children[tree], request))
                    for tree in (TREES if (index + position) % 2 == 0 else TREES[::-1])
                ]
                pair = interleaved(cells, 1, num_retries)
                for tree in TREES:
                    measured.rates[tree] += pair.rates[tree]
                    measured.loads[tree] += pair.loads[tree]
    return found


def contest_check(contest: Contest, ratios: Sequence[float]) -> Check:
    """The target for the median of the ratios of neighbours in time.

    A rate shall be 0.98 of the other's at least. A step against a bare one shall not be longer,
    which it is if the whole interval of the median lies above 1.
    """
    middle, low, _ = median_interval(ratios)
    what = f"{contest.model}, {contest.title}: after / before"
    if contest.is_overhead:
        what += ", low end of the interval"
        return Check(what=what, measured=low, wanted=OVERHEAD_WANTED, at_most=True)
    return Check(what=what, measured=middle, wanted=AGAINST_WANTED)


def contest_table(wanted: Sequence[Contest], found: Sequence[Measured]) -> str:
    """A row of ratios for each measurement."""
    rows = []
    for contest, measured in zip(wanted, found, strict=True):
        ratios = measured.ratios(*TREES)
        middle, low, high = median_interval(ratios)
        check = contest_check(contest, ratios)
        bound = f"{'<=' if check.at_most else '>='} {check.wanted:g}"
        shares = [f"{median(measured.rates[tree]):.3f}" for tree in TREES]
        rows.append(
            [
                *(contest.model, contest.title, f"{middle:.3f}", f"{low:.3f} to {high:.3f}"),
                *(f"{len(ratios)}", bound, check.verdict),
                *(shares if contest.is_overhead else ("", "")),
            ]
        )
    head = ["model", "what", "after / before", "95 % interval", "pairs", "wanted", ""]
    return table([*head, "after", "before"], rows, num_texts=2)


def against(args: argparse.Namespace, result: dict[str, Any]) -> int:
    """This checkout against another one; 0 if every target is met, 1 if not."""
    trees = {"after": ROOT, "before": args.against.resolve()}
    for package in ("runtime", "coordinator"):
        if not (trees["before"] / package / "__init__.py").is_file():
            sys.exit(
                f"{trees['before']} has no package {package!r}: give a worktree of the project"
            )
    print(f"{args.pairs} interleaved pairs of about {args.seconds:g} s; after: this checkout\n")
    wanted = contests(args)
    found = run_contests(wanted, trees, args.pairs, args.retry)
    print(contest_table(wanted, found), end="\n\n")
    print(disturbed_line([one for measured in found for one in measured.disturbed()]))
    checks = [
        contest_check(contest, measured.ratios(*TREES))
        for contest, measured in zip(wanted, found, strict=True)
    ]
    rows = [
        {**contest.request, **measured.record(), "ratios": measured.ratios(*TREES)}
        for contest, measured in zip(wanted, found, strict=True)
    ]
    result |= {"rows": rows, "targets": [check.record() for check in checks]}
    save(args.json, result)
    return 0 if all(check.met for check in checks) else 1


# == the command line =====================================================================


def sections(args: argparse.Namespace, result: dict[str, Any]) -> int:
    """Measure the requested sections."""
    result |= {"repeat": args.repeat, "seconds": args.seconds, "sections": {}}
    print(f"medians of {args.repeat} interleaved runs of about {args.seconds:g} s each\n")
    checks: list[Check] = []
    disturbed: list[bool] = []
    for name in args.sections:
        title, measure = SECTIONS[name]
        section = measure(args)
        print(f"## {title}\n")
        print("\n\n".join(section.markdown), end="\n\n", flush=True)
        checks += section.checks
        disturbed += section.disturbed
        targets = [check.record() for check in section.checks]
        result["sections"][name] = {**section.record, "targets": targets}
        save(args.json, result)
    if checks:
        print("## Targets\n")
        print(checks_table(checks), end="\n\n")
    print(disturbed_line(disturbed))
    return 0


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    add(
        "--models",
        nargs="+",
        choices=WORKLOADS,
        help="of 'peers', 'efficiency', 'shares' and 'transports' (mlp lenet)",
    )
    add(
        "--slowdowns",
        nargs="+",
        type=float,
        help="factors on rank 1's step time there (1 2 3 5; --against: 1)",
    )
    add("--repeat", type=int, default=3, help="repetitions of each cell")
    add("--seconds", type=float, help="length of one measurement (1.5; --against: 1)")
    add("--quick", action="store_true", help="few cells, each once and short")
    add_retry(parser)
    other = parser.add_argument_group("against another checkout").add_argument
    other("--against", type=Path, metavar="WORKTREE", help="measure both, side by side")
    other("--pairs", type=int, default=10, help="pairs of each measurement (10)")
    other("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="policies and transports")
    other("--no-overhead", action="store_true", help="measure the throughput only")
    other(
        "--overhead-seconds",
        type=float,
        default=OVERHEAD_S,
        help=f"length of one measurement of the step overhead ({OVERHEAD_S:g})",
    )
    args = parser.parse_args(argv)
    compared = args.against is not None
    if args.quick:
        args.repeat, args.pairs = 1, min(args.pairs, 3)
        args.overhead_seconds = min(args.overhead_seconds, 2.0)
    if args.models is None:
        args.models = list(WORKLOADS) if compared else ["mlp", "lenet"]
    if args.seconds is None:
        args.seconds = 0.3 if args.quick else 1.0 if compared else 1.5
    if args.slowdowns is None:
        args.slowdowns = [1.0, 3.0] if args.quick else [1.0, 2.0, 3.0, 5.0]
        args.slowdowns = [1.0] if compared else args.slowdowns
    if min(args.repeat, args.pairs) < 1:
        parser.error("--repeat and --pairs must be at least 1")
    if min(args.slowdowns) < 1:
        parser.error("--slowdowns must be at least 1")
    if not (math.isfinite(args.seconds) and args.seconds > 0 and args.overhead_seconds >= 2):
        parser.error("--seconds must be above 0, --overhead-seconds at least 2")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if this checkout is slower than the other one."""
    args = parse_args(argv)
    result = begin()
    cores = result["machine"]["cores"]
    print(f"torch {torch.__version__}, {cores} cores, 1 intra-op thread everywhere;")
    return sections(args, result) if args.against is None else against(args, result)


if __name__ == "__main__":
    sys.exit(main())
