"""The sections of the peers benchmark."""

from __future__ import annotations

import importlib.util
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import peers_report as report
from benchmarks.harness.loops import solo_rate
from benchmarks.harness.models import WORKLOADS, Workload
from benchmarks.harness.processes import DdpGroup
from benchmarks.peers_cells import POLICIES, Cells
from benchmarks.peers_measure import Cell, Measured, Options, interleaved
from benchmarks.peers_models import busy, dense, sparse, tiny
from benchmarks.peers_runtime import Outcome, median
from runtime import ApplyPolicy

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
MIN_STEPS = 40
"""Of each worker in a measurement, however long they take."""


@dataclass
class Section:
    """What a section gives.

    Attributes:
        markdown: Its tables.
        record: For the JSON file.
        checks: Its targets.
        disturbed: For each measurement, whether others used the machine.
    """

    markdown: list[str] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    checks: list[report.Check] = field(default_factory=list)
    disturbed: list[bool] = field(default_factory=list)

    def add(self, measured: Measured, cells: Cells | None = None) -> dict[str, Any]:
        """Note how measurements went; their record."""
        self.disturbed += measured.disturbed()
        details = {} if cells is None else {"details": cells.details()}
        return {**measured.record(), **details}


def missing_peers() -> dict[str, str]:
    """Peers that cannot be measured here, and why."""
    if importlib.util.find_spec("accelerate") is None:
        return {"local_sgd": "accelerate is not installed"}
    return {}


def step_seconds(workload: Workload) -> float:
    """Time of a bare loop's step, the fastest of five runs."""
    data = workload.make_data(40 * workload.batch_size)
    runs = [solo_rate(workload, data, warmup_s=0.1, measure_s=0.3) for _ in range(5)]
    return workload.batch_size / max(runs)


def peers(options: Options) -> Section:
    """The runtime against its peers, with rank 1 as fast as rank 0 and slowed."""
    section = Section()
    missing = missing_peers()
    slowdowns = options.slowdowns
    for name, why in missing.items():
        section.markdown.append(f"{report.TITLES[name]} is left out: {why}.")
    section.record["left_out"] = missing
    with DdpGroup(2, "peers_worker.py") as group:
        for model in options.models:
            workload = WORKLOADS[model]
            step_s = step_seconds(workload)
            cells = Cells(workload, step_s, options.seconds, group)
            wanted = [c for s in slowdowns for c in _peer_cells(cells, step_s, s, missing)]
            if 1.0 not in slowdowns:  # rank 0's part of the sum
                wanted.append(cells.solo(report.cell("solo", 1.0)))
            measured = interleaved(wanted, options)
            rates = measured.medians()
            title = f"### {workload.what}: {step_s * 1e3:.2f} ms a step"
            section.markdown += [title, report.peers_table(rates, slowdowns)]
            section.checks += report.peers_checks(model, step_s, rates, slowdowns)
            section.record[model] = {"step_s": step_s, **section.add(measured, cells)}
    return section


def _peer_cells(
    cells: Cells, step_s: float, slowdown: float, missing: Mapping[str, str]
) -> list[Cell]:
    pauses = (0.0, (slowdown - 1.0) * step_s)
    found = [cells.solo(report.cell("solo", slowdown), pauses[1])]
    found.append(cells.threads(report.cell("threads", slowdown), pauses))
    for name, policy in POLICIES.items():
        found.append(cells.runtime(report.cell(name, slowdown), policy, pauses))
    if hasattr(os, "sched_setaffinity"):
        key = report.cell("sync_pinned", slowdown)
        found.append(cells.runtime(key, POLICIES["sync"], pauses, pinned=True))
    available = [name for name in report.PEERS if name not in missing]
    found += [cells.peer(report.cell(name, slowdown), name, pauses) for name in available]
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
            threads, cadence = (report.cell(name, slowdown) for name in ("threads", "cadence"))
            pair = [cells.threads(threads, pauses)]
            pair.append(cells.runtime(cadence, POLICIES["cadence"], pauses))
            measured = interleaved(pair, options)
            ratios[slowdown] = measured.ratios(cadence, threads)
            section.record.setdefault(model, {})[f"{slowdown:g}"] = section.add(measured)
        title = f"### {workload.what}: {step_s * 1e3:.2f} ms a step"
        section.markdown += [title, report.efficiency_table(ratios)]
        section.checks += report.efficiency_checks(model, step_s, ratios)
        section.record[model] |= {"step_s": step_s, "details": cells.details()}
    return section


def world(options: Options) -> Section:
    """The cost of more workers, whose steps are sleep, so that cores are not the limit."""
    section, sizes = Section(), (1, 8) if options.quick else WORLDS
    cells = Cells(tiny(), 0.0, max(options.seconds, MIN_STEPS * WORLD_STEP_S))
    wanted = [cells.solo("solo", WORLD_STEP_S)]
    for size in sizes:
        for name, policy in POLICIES.items():
            pauses = (WORLD_STEP_S,) * size
            wanted.append(cells.runtime(report.cell(name, size), policy, pauses))
    measured = interleaved(wanted, options)
    rates = measured.medians()
    section.markdown.append(report.world_table(rates, sizes))
    section.checks += report.world_checks(rates, sizes, WORLD_STEP_S * 1e3)
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
        wanted = [cells.solo(report.cell("solo", size), MODEL_STEP_S)]
        for name in ("cadence", "async"):
            key = report.cell(name, size)
            wanted.append(cells.runtime(key, POLICIES[name], pauses, recorded=True, steady=True))
        measured = interleaved(wanted, options)
        rates |= measured.medians()
        for key, outcomes in cells.outcomes.items():
            rounds[key] = {"num_params": size, **_round_numbers(outcomes)}
        section.record[f"{size}"] = section.add(measured, cells)
    section.markdown += ["### Averaging", report.rounds_table(rates, rounds)]
    section.record["rounds"] = rounds
    with DdpGroup(2, "peers_worker.py") as group:
        lockstep, records = _lockstep(section, sizes, options, group)
    section.record["lockstep"] = records
    batch_size = tiny().batch_size
    section.markdown += ["### Lockstep", report.lockstep_table(lockstep, sizes, batch_size)]
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
    section: Section, sizes: Sequence[int], options: Options, group: DdpGroup
) -> tuple[dict[str, float], dict[str, Any]]:
    rates: dict[str, float] = {}
    records: dict[str, Any] = {}
    pauses = (0.0, 0.0)
    for size in sizes:
        workload = dense(size)
        data = workload.make_data(workload.batch_size * 8)
        rate = solo_rate(workload, data, warmup_s=0.1, measure_s=0.2)
        cells = Cells(workload, workload.batch_size / rate, options.seconds, group)
        wanted = [cells.threads(report.cell("threads", size), pauses)]
        key = report.cell("sync", size)
        wanted.append(cells.runtime(key, ApplyPolicy.SYNC, pauses, steady=True))
        wanted.append(cells.peer(report.cell("ddp", size), "ddp", pauses))
        measured = interleaved(wanted, options)
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
            cells.solo(report.step_cell("solo", kind, step_s), pause_s),
            cells.threads(report.step_cell("threads", kind, step_s), (pause_s,) * 2),
            cells.runtime(report.step_cell("one", kind, step_s), cadence, (pause_s,)),
            cells.runtime(report.step_cell("cadence", kind, step_s), cadence, (pause_s,) * 2),
        ]
        measured = interleaved(wanted, options)
        rates |= measured.medians()
        section.record[f"{kind} {step_s * 1e3:g} ms"] = section.add(measured, cells)
    section.markdown.append(report.step_table(rates, steps, tiny().batch_size))
    section.checks += report.step_checks(rates, steps)
    return section


def coordinator(options: Options) -> Section:
    """CPU time of the coordinator's thread at about 1,000 batches/s in all."""
    section, rows = Section(), []
    for num_workers, step_s in COORDINATED:
        cells = Cells(tiny(), 0.0, LONGER * options.seconds)
        pauses = (step_s,) * num_workers
        wanted = [cells.runtime(name, policy, pauses) for name, policy in POLICIES.items()]
        measured = interleaved(wanted, options)
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
    section.markdown.append(report.coordinator_table(rows))
    section.checks += report.coordinator_checks(rows)
    return section


SECTIONS: dict[str, tuple[str, Callable[[Options], Section]]] = {
    "peers": ("Against its peers", peers),
    "efficiency": ("CADENCE against two bare threads, pair by pair", efficiency),
    "world": (f"More workers, asleep {WORLD_STEP_S * 1e3:g} ms a step", world),
    "model": (f"Larger models, 2 workers, asleep {MODEL_STEP_S * 1e3:g} ms a step", model),
    "step": ("Shorter steps", step),
    "coordinator": ("The coordinator's thread", coordinator),
}
