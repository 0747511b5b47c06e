"""All measurements on a GPU, in one run.

Usage: ``python -m benchmarks.gpu [--minutes 8] [--out DIR] [--sections NAME ...]``, from the
root of the repository. What is measured and how stands in ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Report, SectionResult, section_table, summary

TABLE = "benchmarks.gpu.sections"
RESULTS = Path(__file__).parents[1] / "results"
NO_CUDA = (
    "benchmarks.gpu needs a CUDA device, and PyTorch sees none here. To walk its code paths on "
    "the CPU with tiny sizes: python -m benchmarks.gpu --dry-run"
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    from benchmarks.gpu.sections import SECTIONS

    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of the run (8)")
    parser.add_argument("--out", type=Path, help="folder for the results (benchmarks/results)")
    parser.add_argument("--sections", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="walk the code paths on the CPU with tiny sizes; writes only to --out",
    )
    args = parser.parse_args(argv)
    if not args.minutes > 0:
        parser.error("--minutes must be above 0")
    return args


class Output:
    """Prints and writes new results.

    Args:
        report: The results so far.
        folder: Target directory; ``None``: do not write.
    """

    def __init__(self, report: Report, folder: Path | None) -> None:
        self._report = report
        self._folder = folder
        self._begin = time.monotonic()
        self.path: Path | None = None

    def changed(self, section: SectionResult | None) -> None:
        """Write all results, and print a completed section."""
        self._report.seconds = time.monotonic() - self._begin
        if self._folder is not None:
            self.path = self._report.write(self._folder)
        if section is not None:
            print(section_table(section), end="\n\n", flush=True)


def _end(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


def main(argv: list[str] | None = None) -> int:
    """Return 0 if all was measured and every target met, 1 if not, 2 without a CUDA device."""
    begin = time.monotonic()
    args = parse_args(argv)
    import torch

    from benchmarks.gpu.bench import Supervisor, run_here
    from benchmarks.gpu.sections import SECTIONS

    if not args.dry_run and not torch.cuda.is_available():
        print(NO_CUDA, file=sys.stderr)
        return 2
    sections = [section for section in SECTIONS if section.name in args.sections]
    today = datetime.date.today().isoformat()
    report = Report(date=today, dry=args.dry_run, minutes=args.minutes)
    output = Output(report, args.out if args.dry_run else args.out or RESULTS)
    seconds = 60.0 * args.minutes
    if args.dry_run:
        run_here(sections, report, seconds=seconds, changed=output.changed)
    else:
        before = signal.signal(signal.SIGTERM, _end)  # the process of the sections ends as well
        try:
            Supervisor(
                sections,
                report,
                table=TABLE,
                deadline=begin + seconds,
                changed=output.changed,
            ).run()
        finally:
            signal.signal(signal.SIGTERM, before)
    print(summary(report), flush=True)
    if output.path is not None:
        print(f"written to {output.path}", flush=True)
    return 0 if report.complete and (report.dry or report.met) else 1


if __name__ == "__main__":
    sys.exit(main())
