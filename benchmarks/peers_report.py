"""Targets, verdicts and tables of the peers benchmark; pure functions of the rates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Rates = Mapping[str, float]

OURS = ("sync", "cadence", "async")
PEERS = ("ddp", "local_sgd", "averager")
TITLES = {
    "threads": "2 bare threads",
    "sync": "runtime, SYNC",
    "sync_pinned": "runtime, SYNC, each worker on a core of its own",
    "cadence": "runtime, CADENCE",
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
"""Of a core at 1,000 batches/s in all."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A measured number and its bound.

    Attributes:
        what: The sentence in the report.
        measured: The number.
        wanted: The bound.
        at_most: Whether ``wanted`` bounds it from above.
    """

    what: str
    measured: float
    wanted: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether it is kept; a number that is missing, ``nan``, keeps none."""
        if self.at_most:
            return self.measured <= self.wanted
        return self.measured >= self.wanted

    def record(self) -> dict[str, Any]:
        """For the JSON file."""
        return {**asdict(self), "met": self.met}


def cell(system: str, at: float) -> str:
    """Key of a system's measurement at a slow-down, a world size, a size or a step time."""
    return f"{system}@{at:g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int = 1) -> str:
    """A Markdown table; all columns but the first ``num_texts`` hold numbers."""
    rule = ["---"] * num_texts + ["---:"] * (len(head) - num_texts)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


# -- peers ------------------------------------------------------------------------------


def sum_of_solos(rates: Rates, slowdown: float) -> float:
    """Rate of both ranks if each had the machine for itself."""
    return rates[cell("solo", 1)] + rates[cell("solo", slowdown)]


def best_peer(rates: Rates, slowdown: float) -> tuple[str, float] | None:
    """The fastest of the peers that were measured, and its rate."""
    found = [(p, rates[cell(p, slowdown)]) for p in PEERS if cell(p, slowdown) in rates]
    return max(found, key=lambda pair: pair[1], default=None)


def against_peers(rates: Rates, system: str, slowdown: float) -> str:
    """The ratio to the fastest peer, and whether the system is at least as fast."""
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


def milliseconds(seconds: float) -> str:
    """A time for a table; nothing for one that is missing."""
    if math.isnan(seconds):
        return ""
    return f"{seconds * 1e3:,.{3 if seconds < 0.001 else 2 if seconds < 0.1 else 0}f}"


def rounds_table(rates: Rates, rounds: Mapping[str, Mapping[str, float]]) -> str:
    """What averaging costs by the size of the model.

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
    """What remains of the bare rates as the step shrinks.

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
    """At most so much of a core."""
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


def checks_table(checks: Sequence[Check]) -> str:
    """All targets."""
    rows = [
        [
            check.what,
            f"at {'most' if check.at_most else 'least'} {check.wanted:.2f}",
            f"{check.measured:.3f}",
            "met" if check.met else "MISSED",
        ]
        for check in checks
    ]
    return table(("target", "wanted", "measured", ""), rows)
