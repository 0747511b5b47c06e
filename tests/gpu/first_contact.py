"""First tests on a new machine with GPUs: ``make first-contact``.

Parts run in order, each in a process of its own with a limit: facts, PyTorch alone, the default
run, driver calls beside exchanges, failures, speed, and the tests of this folder. A case that
hangs is ended with its native and Python stacks in the log, and the part continues behind it.
Results are written at once. Two ranks share a single GPU, over NCCL 2.30 or later; without
a GPU the parts run on the CPU and on fakes.

Exit status: 0 if nothing failed, hung or died, else 1. The summary
names the parts that did not run.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import IO

from tests.gpu import processes
from tests.gpu.contact_record import AGAIN, BAD, Record

LIMITS_S = {
    "facts": 45.0,
    "plain": 60.0,
    "train": 60.0,
    "hangs": 180.0,
    "failures": 90.0,
    "speed": 120.0,
    "rest": 400.0,
}
"""Seconds for each part, in order."""
OWN_PARTS = "tests.gpu.contact_parts"
CASE_S = 45.0
"""Seconds for one case."""
LONG_CASES_S = {"speed": 100.0, "rest": 600.0}
"""Seconds for one case of parts that have long ones."""
START_S = 60.0
"""Seconds until a process reaches its first case, and for the count of GPUs."""
TOTAL_S = 480.0
RESERVE_S = 35.0
"""Seconds reserved for the stacks of the last process and the summary."""
LOOK_S = 0.1
NUM_FACTS = 400


class Run:
    """Runs parts one after the other.

    Args:
        options: Of the command line.
        deadline: End of all parts, by the monotonic clock.
        log: Gets the output of all processes.
    """

    def __init__(self, options: argparse.Namespace, deadline: float, log: IO[bytes]) -> None:
        self._options = options
        self._environment = environment(log)
        self._deadline = deadline
        self._log = log
        self._record = Record(options.out)
        self._num_shown = 0

    def write_line(self, line: str) -> None:
        """Write a line to the log and to the terminal."""
        self._log.write(f"{line}\n".encode())
        print(line, flush=True)

    def part(self, part: str, limit_s: float) -> None:
        """Run a part, in as many processes as it takes."""
        end = min(time.monotonic() + limit_s, self._deadline)
        self.write_line(f"== {part}, at most {max(0.0, end - time.monotonic()):.0f} s")
        while time.monotonic() < end and self._process(part, end):
            pass
        self._show()
        left = [c for c in self._record.planned(part) if c not in self._record.begun(part)]
        if not self._record.planned(part) and not self._record.results(part):
            left = ["*"]
        for case in left:
            self._record.end(part, case, "not run", note="no time was left")
        self._show()

    def _process(self, part: str, end: float) -> bool:
        """Run one process; True if cases are left for another one."""
        options = self._options
        command = [sys.executable, "-m", "tests.gpu.contact_process", part]
        command += ["--out", str(options.out.resolve()), "--times", str(options.times)]
        command += ["--limit", f"{end - time.monotonic():.0f}"]
        command += ["--parts-from", options.parts_from, "--cases", options.cases.pattern]
        environment = self._environment
        if part == "plain":  # NCCL then logs its configuration and the reasons for refusals
            environment = {"NCCL_DEBUG": "INFO", **environment}
        process = processes.start(command, self._log, {"NCCL_DEBUG": "WARN", **environment})
        begun = len(self._record.begun(part))
        try:
            status, hung, is_late = self._watch(process, part, end)
        finally:
            processes.kill(process)
        case = self._record.open_case(part)
        if status is None:
            result, note = ("not run", "the time of its part was over")
            if is_late:
                result, note = ("hung", "its stacks are in the log")
            self._record.end(part, hung or "*", result, note=note)
            if case not in (None, hung):  # it began while the stacks were read
                self._record.end(part, case, "not run", note="its process was ended")
        elif status not in (0, AGAIN):
            how = processes.outcome_of(status)
            self._record.end(part, case or "*", "died", note=f"the process {how}")
        self._show()
        # A process that does not reach a case would not reach it in a second attempt.
        return status != 0 and len(self._record.begun(part)) > begun

    def _watch(
        self, process: subprocess.Popen[bytes], part: str, end: float
    ) -> tuple[int | None, str | None, bool]:
        """The exit status; or ``None``, the case in which the process was ended, and whether the
        case took longer than one may, rather than that the time of the part was over.
        """
        case, since = None, time.monotonic()
        case_s = max(self._options.case, LONG_CASES_S.get(part, 0.0))
        while True:
            try:
                return process.wait(LOOK_S), None, False
            except subprocess.TimeoutExpired:
                pass
            now, current = time.monotonic(), self._record.open_case(part)
            if current != case:
                case, since = current, now
                self._show()
            is_late = now - since >= (case_s if case else START_S)
            if now >= end or is_late:
                self.write_line(f"   {case or 'the start'} is ended after {now - since:.0f} s")
                processes.end(process, self._log)
                return None, case, is_late

    def _show(self) -> None:
        """Print new results."""
        lines = self._record.lines()
        for line in lines[self._num_shown :]:
            if line["event"] == "end":
                words = f"   {line['result']:8}{line['seconds']:7.1f} s  {line['case']}"
                more = str(line.get("note", "") or line.get("figures", ""))
                self.write_line(words + (f"  {more[:NUM_FACTS]}" if more else ""))
        self._num_shown = len(lines)

    def summary(self) -> int:
        """Print the summary; returns the exit status."""
        self.write_line("\n== Summary")
        ends = [line for line in self._record.lines() if line["event"] == "end"]
        for part in self._options.parts:
            counts = Counter(line["result"] for line in ends if line["part"] == part)
            words = ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))
            self.write_line(f"{part}: {words or 'not run'}")
        reasons: dict[str, list[str]] = {}
        for line in ends:
            if line["result"] == "not run":
                reasons.setdefault(line["note"], []).append(f"{line['part']}/{line['case']}")
        for reason, cases in reasons.items():
            self.write_line(f"not run, {reason}: {', '.join(cases)}")
        bad = [line for line in ends if line["result"] in BAD]
        for line in bad:
            self.write_line(
                f"{line['result']}: {line['part']}/{line['case']}: {line.get('note', '')}"
            )
        self.write_line(f"The record is {self._record.path.resolve()}")
        return 1 if bad else 0


def environment(log: IO[bytes]) -> dict[str, str]:
    """Environment of every process; the user's variables are kept."""
    found = {"OMP_WAIT_POLICY": "PASSIVE"}
    if processes.count_gpus(START_S, log) == 1:
        found.update(processes.SHARED_GPU)
    return {**found, **os.environ}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(LIMITS_S), help="in this order")
    parser.add_argument(
        "--limit", nargs="+", default=[], metavar="PART=SECONDS", help="limits of parts"
    )
    parser.add_argument("--total", type=float, default=TOTAL_S, help="seconds for everything")
    parser.add_argument("--case", type=float, default=CASE_S, help="seconds for one case")
    parser.add_argument(
        "--cases", type=re.compile, default="", help="regular expression: only matching cases"
    )
    parser.add_argument("--times", type=int, default=50, help="how often each probe is fired")
    parser.add_argument("--out", type=Path, default=Path("first-contact"), help="folder of results")
    parser.add_argument("--parts-from", default=OWN_PARTS, help="module of the parts")
    options = parser.parse_args(argv)
    options.limits = {
        **LIMITS_S,
        **{part: options.total for part in options.parts if part not in LIMITS_S},
    }
    for word in options.limit:
        part, _, seconds = word.partition("=")
        if part not in options.limits or not seconds:
            parser.error(f"--limit {word}: pass PART=SECONDS, of {', '.join(options.limits)}")
        options.limits[part] = float(seconds)
    if options.parts_from == OWN_PARTS:
        unknown = [part for part in options.parts if part not in LIMITS_S]
        if unknown:
            parser.error(f"--parts {unknown[0]}: pass some of {', '.join(LIMITS_S)}")
    return options


def main() -> int:
    begin = time.monotonic()
    options = parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of a CUDA process takes minutes
    Record(options.out).clear()
    with (options.out / "log.txt").open("wb", buffering=0) as log:
        run = Run(options, begin + options.total - RESERVE_S, log)
        try:
            for part in options.parts:
                run.part(part, options.limits[part])
        finally:
            status = run.summary()
    return status


if __name__ == "__main__":
    sys.exit(main())
