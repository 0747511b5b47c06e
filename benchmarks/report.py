"""Targets, verdicts and tables of the throughput benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

Rates = Mapping[str, float]

TITLES = {
    "bare": "bare loop, 1 thread",
    "threads": "bare loops, 2 independent threads",
    "one": "runtime, 1 worker",
    "sync": "runtime, 2 workers, SYNC",
    "cadence": "runtime, 2 workers, CADENCE",
    "cadence_thread": "runtime, 2 workers, CADENCE over THREAD",
    "async": "runtime, 2 workers, ASYNC",
    "ddp": "DistributedDataParallel, 2 Gloo processes",
}
SLOWED = ("threads", "sync", "cadence", "cadence_thread", "async", "ddp")


def slowed(system: str) -> str:
    """Key of a system's measurement with rank 1 slowed."""
    return f"{system}/slowed"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A ratio of two measurements and its bound.

    Attributes:
        what: The sentence in the report.
        over: Key of the numerator.
        under: Key of the denominator.
        wanted: The bound.
        at_most: Whether ``wanted`` bounds the ratio from above.
    """

    what: str
    over: str
    under: str
    wanted: float
    at_most: bool = False


def targets(model: str) -> tuple[Target, ...]:
    """The targets for a model; against DDP they differ for the MLP."""
    small = model == "mlp"
    return (
        Target(what="1 worker / bare loop", over="one", under="bare", wanted=0.97),
        Target(
            what="CADENCE / 2 independent threads", over="cadence", under="threads", wanted=0.95
        ),
        Target(what="CADENCE / DDP", over="cadence", under="ddp", wanted=2.0 if small else 1.3),
        Target(what="SYNC / DDP", over="sync", under="ddp", wanted=2.0 if small else 1.2),
        Target(
            what="rank 1 slowed: CADENCE / DDP",
            over=slowed("cadence"),
            under=slowed("ddp"),
            wanted=1.8,
        ),
        Target(
            what="rank 1 slowed: CADENCE's time / time at the sum of both speeds",
            over=slowed("threads"),
            under=slowed("cadence"),
            wanted=1.10,
            at_most=True,
        ),
    )


def judge(model: str, rates: Rates) -> list[dict[str, Any]]:
    """Every target with what was measured and whether it is met."""
    verdicts = []
    for target in targets(model):
        ratio = rates[target.over] / rates[target.under]
        met = ratio <= target.wanted if target.at_most else ratio >= target.wanted
        verdicts.append({**asdict(target), "ratio": ratio, "met": met})
    return verdicts


def rate_table(rates: Rates) -> str:
    """All systems of one model, alone and with rank 1 slowed, as Markdown."""
    lines = [
        "| system | samples/s | / bare loop | / DDP | rank 1 slowed: samples/s | / DDP |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for system, title in TITLES.items():
        cells = [
            f"{rates[system]:,.0f}",
            f"{rates[system] / rates['bare']:.2f}",
            f"{rates[system] / rates['ddp']:.2f}",
            "",
            "",
        ]
        if system in SLOWED:
            rate = rates[slowed(system)]
            cells[3:] = [f"{rate:,.0f}", f"{rate / rates[slowed('ddp')]:.2f}"]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict_table(verdicts: Mapping[str, list[dict[str, Any]]]) -> str:
    """All targets of all models, as Markdown."""
    lines = ["| model | target | wanted | measured | |", "| --- | --- | ---: | ---: | --- |"]
    for model, rows in verdicts.items():
        for row in rows:
            bound = "at most" if row["at_most"] else "at least"
            lines.append(
                f"| {model} | {row['what']} | {bound} {row['wanted']:.2f} | {row['ratio']:.2f} "
                f"| {'met' if row['met'] else 'MISSED'} |"
            )
    return "\n".join(lines)
