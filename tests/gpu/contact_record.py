"""The record of first contact: a file of JSON lines, to which the processes append."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NAME = "record.jsonl"
AGAIN = 3
"""Exit status of a process that leaves the rest of its part to the next one."""
BAD = ("failed", "hung", "died")
"""Results of a case that make the whole run fail."""


class NotHere(Exception):
    """A check is not possible on this machine."""


class Record:
    """Lines of one run. A line is written whole and at once, so that none is lost.

    Args:
        folder: Holds the file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME

    def clear(self) -> None:
        """Start a new record; an older one is renamed with the suffix ``.before``."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self.path.replace(self.path.with_suffix(".jsonl.before"))

    def plan(self, part: str, cases: Iterable[str]) -> None:
        """Name the cases of a part."""
        self._write(part=part, event="plan", cases=list(cases))

    def begin(self, part: str, case: str) -> None:
        """Record the start of a case."""
        self._write(part=part, event="begin", case=case)

    def end(
        self,
        part: str,
        case: str,
        result: str,
        seconds: float = 0.0,
        *,
        note: str = "",
        figures: Mapping[str, Any] | None = None,
    ) -> None:
        """Record the end of a case: passed, failed, hung, died or not run."""
        fields = {"note": note, "figures": dict(figures or {})}
        filled = {key: value for key, value in fields.items() if value}
        self._write(
            part=part, event="end", case=case, result=result, seconds=round(seconds, 2), **filled
        )

    def lines(self, part: str | None = None) -> list[dict[str, Any]]:
        """All lines, or those of a part."""
        if not self.path.exists():
            return []
        with self.path.open() as file:
            found = [json.loads(line) for line in file if line.endswith("\n")]
        return [line for line in found if part is None or line["part"] == part]

    def planned(self, part: str) -> list[str]:
        """The cases of a part, once its process has named them."""
        plans = [line["cases"] for line in self.lines(part) if line["event"] == "plan"]
        return plans[-1] if plans else []

    def begun(self, part: str) -> list[str]:
        """The cases of a part that have begun, in order."""
        return [line["case"] for line in self.lines(part) if line["event"] == "begin"]

    def results(self, part: str, case: str | None = None) -> list[str]:
        """Results of a part's cases that are over, or of one of them."""
        return [
            line["result"]
            for line in self.lines(part)
            if line["event"] == "end" and case in (None, line["case"])
        ]

    def open_case(self, part: str) -> str | None:
        """The case that has begun and is not over."""
        ended = [line["case"] for line in self.lines(part) if line["event"] == "end"]
        left = [case for case in self.begun(part) if case not in ended]
        return left[-1] if left else None

    def _write(self, **fields: Any) -> None:
        line = json.dumps({"time": round(time.time(), 3), **fields}, default=str)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, f"{line}\n".encode())
        finally:
            os.close(file)
