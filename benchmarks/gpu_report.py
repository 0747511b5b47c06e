"""What the GPU benchmark found: figures with targets, a result for each section, the file."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BAD = ("failed", "timed out", "died", "not run")
"""States of a section that did not come to its end."""


def plain(value: Any) -> Any:
    """A value as JSON holds it: numbers that are not finite become ``None``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure and its target.

    Attributes:
        name: What was measured or checked.
        figure: The number; ``None``: it could not be measured.
        unit: Of the figure; a ratio has none, ``"yes"`` makes it a check that is 0 or 1.
        target: The bound; ``None``: the figure is only told.
        at_most: Whether ``target`` bounds the figure from above.
    """

    name: str
    figure: float | None
    unit: str = ""
    target: float | None = None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the target is met; ``None`` without one."""
        if self.target is None:
            return None
        if self.figure is None:
            return False
        return self.figure <= self.target if self.at_most else self.figure >= self.target

    def as_dict(self) -> dict[str, Any]:
        """For the file."""
        return {
            "name": self.name,
            "figure": self.figure,
            "unit": self.unit,
            "target": self.target,
            "at_most": self.at_most,
            "met": self.met,
        }


@dataclass(kw_only=True)
class SectionResult:
    """What came of one section.

    Attributes:
        name: As given to ``--sections``.
        title: In words.
        status: ``"not run"``, ``"running"``, ``"done"``, ``"skipped"``, ``"failed"``,
            ``"timed out"`` or ``"died"``.
        reason: Why it did not come to its end.
        seconds: How long it took.
        budget_s: How long it was given.
        rows: Figures, in order.
        raw: Every measurement behind them, by system and unit.
        notes: Remarks, and what the packages logged as warnings.
        traceback: Of the error that ended it, or the stacks of a section that hung.
    """

    name: str
    title: str
    status: str = "not run"
    reason: str = ""
    seconds: float = 0.0
    budget_s: float = 0.0
    rows: list[Row] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    traceback: str = ""

    def apply(self, message: Mapping[str, Any]) -> bool:
        """Take a message of the section in; whether it was the last one."""
        match message["type"]:
            case "row":
                self.rows.append(Row(**message["row"]))
            case "raw":
                self.raw[message["name"]] = message["values"]
            case "note":
                self.notes.append(message["text"])
            case "end":
                self.status, self.reason = message["status"], message["reason"]
                self.traceback = message["traceback"]
                self.seconds = message["seconds"]
                return True
        return False

    def as_dict(self) -> dict[str, Any]:
        """For the file."""
        return {**vars(self), "rows": [row.as_dict() for row in self.rows]}


@dataclass(kw_only=True)
class Report:
    """All results of a run.

    Attributes:
        date: Of the run, as ``YYYY-MM-DD``.
        dry: Whether only the code paths were walked, on the CPU with tiny sizes.
        minutes: What the run was given.
        facts: The machine.
        sections: In order.
        seconds: How long the run took so far.
    """

    date: str
    dry: bool
    minutes: float
    facts: dict[str, Any] = field(default_factory=dict)
    sections: list[SectionResult] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether every section came to its end or was skipped."""
        return not any(section.status in (*BAD, "running") for section in self.sections)

    @property
    def met(self) -> bool:
        """Whether every target is met."""
        return not any(row.met is False for section in self.sections for row in section.rows)

    def as_dict(self) -> dict[str, Any]:
        """For the file."""
        return {**vars(self), "sections": [section.as_dict() for section in self.sections]}

    def file_name(self) -> str:
        """``<gpu>-<date>.json``."""
        gpu = "cpu-dry" if self.dry else str(self.facts.get("gpu", "unknown-gpu"))
        slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
        return f"{slug}-{self.date}.json"

    def write(self, folder: Path) -> Path:
        """Write the file, whole or not at all; overwrites that of the same day."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.file_name()
        text = json.dumps(plain(self.as_dict()), indent=2, allow_nan=False)
        partial = path.with_suffix(".partial")
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, path)
        return path


def number(value: float | None, unit: str) -> str:
    """A figure in words."""
    if value is None:
        return "-"
    if unit == "yes":
        return "yes" if value else "NO"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".strip()


def _bound(row: Row) -> str:
    if row.target is None:
        return ""
    if row.unit == "yes":
        return "yes"
    return f"{'<=' if row.at_most else '>='} {number(row.target, row.unit)}"


_VERDICTS = {None: "", True: "met", False: "MISSED"}


def section_table(section: SectionResult) -> str:
    """One section, as Markdown: its figures, then the medians behind them."""
    head = f"## {section.name}: {section.title} ({section.seconds:.0f} s)"
    lines = [head, ""]
    if section.rows:
        lines += ["| what | figure | target | |", "| --- | ---: | ---: | --- |"]
        for row in section.rows:
            figure, verdict = number(row.figure, row.unit), _VERDICTS[row.met]
            lines.append(f"| {row.name} | {figure} | {_bound(row)} | {verdict} |")
        lines.append("")
    for name, values in section.raw.items():
        kept = [v for v in values if v is not None] if isinstance(values, list) else []
        if kept and all(isinstance(v, int | float) for v in kept):
            median = statistics.median(kept)
            lines.append(f"- {name}: median {number(median, '')} of {len(kept)}")
    lines += [f"- {note}" for note in section.notes]
    if section.status != "done":
        lines.append(f"- **{section.status}**: {section.reason}")
    return "\n".join(lines).rstrip()


def summary(report: Report) -> str:
    """The machine, every target with its verdict, and what did not come to its end."""
    facts = ", ".join(f"{key} {value}" for key, value in report.facts.items())
    lines = [f"machine: {facts or 'unknown'}", ""]
    lines += ["| section | what | figure | target | |", "| --- | --- | ---: | ---: | --- |"]
    for section in report.sections:
        for row in section.rows:
            if row.target is not None:
                cells = (row.name, number(row.figure, row.unit), _bound(row), _VERDICTS[row.met])
                lines.append(f"| {section.name} | " + " | ".join(cells) + " |")
        if section.status != "done":
            lines.append(f"| {section.name} | {section.status}: {section.reason} | | | |")
    kind = "a dry run: figures mean nothing, " if report.dry else ""
    lines += ["", f"{kind}{report.seconds:.0f} s in all"]
    return "\n".join(lines)
