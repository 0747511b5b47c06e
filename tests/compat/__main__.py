"""Train models and recipes of other projects through each API, and report the results.

Usage: ``python -m tests.compat [--groups timm ...] [--names TEXT] [--write]``. Rows without
installed packages are omitted. ``--write`` puts the table into ``docs/compatibility.md``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.compat.apis import ABSENT, APIS, EQUAL, FAILED, REFUSED, TITLES, TRAINS, Judge
from tests.compat.matrix import PACKAGES, all_cases, reason_to_skip

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
BEGIN, END = "<!-- table: python -m tests.compat --write -->", "<!-- end of the table -->"


def row(name: str, cells: Sequence[tuple[str, str]], notes: dict[str, int]) -> str:
    """A row of the table; remarks become numbered notes."""
    shown = []
    for verdict, remark in cells:
        number = f" ({notes.setdefault(remark, len(notes) + 1)})" if remark else ""
        shown.append(verdict + number)
    return f"| {name} | " + " | ".join(shown) + " |"


def versions(groups: Sequence[str]) -> str:
    """The packages of the groups, with their versions."""
    names = sorted({"torch", *(name for group in groups for name in PACKAGES[group])})
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def main(argv: Sequence[str] | None = None) -> int:
    """Train all cases and print the table; returns 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--names", default="", help="rows whose name holds this")
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    args = parser.parse_args(argv)
    logging.getLogger("runtime").setLevel(logging.ERROR)
    skipped = {group: why for group in args.groups if (why := reason_to_skip(group))}
    for group, why in skipped.items():
        print(f"{group}: skipped, {why}")
    groups = [group for group in args.groups if group not in skipped]
    notes: dict[str, int] = {}
    counts = dict.fromkeys((EQUAL, TRAINS, REFUSED, ABSENT, FAILED), 0)
    lines: list[str] = []
    start = time.perf_counter()
    for group in groups:
        lines += ["", f"**{group}**", "", "| | " + " | ".join(TITLES.values()) + " |"]
        lines.append("| --- " * (1 + len(APIS)) + "|")
        print(*lines[-5:], sep="\n")
        for case in (c for c in all_cases() if c.group == group and args.names in c.name):
            judge = Judge(case)
            cells = [judge.judge(api) for api in APIS]
            for verdict, _ in cells:
                counts[verdict] += 1
            lines.append(row(case.name, cells, notes))
            print(lines[-1], flush=True)
    totals = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    lines += ["", *(f"{number}. {remark}" for remark, number in notes.items())]
    lines += ["", f"With {versions(groups)}: {totals}."]
    print(*lines[-3 - len(notes) :], f"{time.perf_counter() - start:.0f} s", sep="\n")
    if args.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        table = "\n".join([BEGIN, *lines, "", END])
        PAGE.write_text(before + table + after, encoding="utf-8")
    return int(counts[FAILED] > 0)


if __name__ == "__main__":
    sys.exit(main())
