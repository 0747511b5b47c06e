"""Runs the sections of the GPU benchmark in a process that may fail, hang or die.

Whatever happens there, all results so far are kept, and the run ends in time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Section, run_section
from benchmarks.gpu_report import Report, SectionResult

ROOT = Path(__file__).parents[1]
RESERVE_S = 5.0
"""Kept back of the whole time, to write and print the results."""
GRACE_S = 10.0
"""What a section may overrun its budget by before it is ended, on top of half of it."""
LEAST_S = 3.0
"""A section that would get less is not run."""
START_S = 120.0
STACKS_S = 2.0
TAIL_BYTES = 20_000
_POLL_S = 0.25


class Trouble(Exception):
    """The process is of no use any more.

    Args:
        status: What to call it.
        reason: Why.
        stacks: Where its threads were, and what it wrote to stderr last.
    """

    def __init__(self, status: str, reason: str, stacks: str) -> None:
        super().__init__(reason)
        self.status = status
        self.stacks = stacks


def budgets(sections: Sequence[Section], left_s: float) -> tuple[float, float]:
    """What the first of these gets: its budget, and when it is ended.

    The time left is shared out in proportion to what each takes by plan, of which none gets
    more than half as much again.
    """
    planned_s = sum(section.seconds for section in sections)
    share_s = left_s * sections[0].seconds / planned_s
    budget_s = min(share_s, 1.5 * sections[0].seconds)
    return budget_s, min(1.5 * budget_s + GRACE_S, left_s)


class Child:
    """The process; see :mod:`benchmarks.gpu_child`. It must be closed in the end.

    Args:
        table: Name of the module with the sections.
        until: Monotonic time by which it must be ready.

    Attributes:
        facts: What it told of the machine.

    Raises:
        Trouble: It did not get ready.
    """

    def __init__(self, table: str, until: float) -> None:
        self._errors, path = tempfile.mkstemp()
        os.unlink(path)
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._open = [self._errors, self._commands, self._answers]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_child", table, str(commands), str(answers)],
                stdin=subprocess.DEVNULL,
                stdout=2,
                stderr=self._errors,
                pass_fds=(commands, answers),
                env={**os.environ, "PYTHONPATH": path},
                process_group=0,  # its loader processes end with it
            )
        finally:
            os.close(commands)
            os.close(answers)
        self._rest = b""
        self.facts: dict[str, Any] = {}
        try:
            for message in self.messages(until):
                self.facts = message["facts"]
                break
        except BaseException:
            self.close()
            raise

    def order(self, section: str, seconds: float) -> None:
        """Have it run a section; if it has ended, :meth:`messages` tells."""
        line = json.dumps({"section": section, "seconds": seconds}) + "\n"
        with suppress(BrokenPipeError):
            os.write(self._commands, line.encode())

    def messages(self, until: float) -> Iterator[dict[str, Any]]:
        """What it tells, as it comes.

        Raises:
            Trouble: ``until`` has passed, or the process has ended.
        """
        begin = time.monotonic()
        while True:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                yield json.loads(line)
            left_s = until - time.monotonic()
            if left_s <= 0:
                waited_s = time.monotonic() - begin
                raise Trouble("timed out", f"no end after {waited_s:.0f} s", self.stacks())
            readable, _, _ = select.select([self._answers], [], [], min(left_s, _POLL_S))
            # Asked before the last look: what it wrote until then is there.
            ended = self._process.poll() is not None
            if not readable:
                readable, _, _ = select.select([self._answers], [], [], 0.0)
            block = os.read(self._answers, 65536) if readable else b""
            if not block and ended:
                code = self._process.returncode
                raise Trouble("died", f"its process ended with {code}", self._tail())
            self._rest += block

    def stacks(self) -> str:
        """Where its threads are, and what it wrote to stderr last."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGUSR1)
        end = time.monotonic() + STACKS_S
        size = -1
        while time.monotonic() < end and size != self._size():
            size = self._size()
            time.sleep(STACKS_S / 10)
        return self._tail()

    def _size(self) -> int:
        return os.fstat(self._errors).st_size

    def _tail(self) -> str:
        # Without a seek, which would move the place where the process writes.
        start = max(0, self._size() - TAIL_BYTES)
        return os.pread(self._errors, TAIL_BYTES, start).decode(errors="replace")

    def close(self) -> None:
        """End it and all that it has started. Idempotent."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # in the driver's hands
                self._process.wait(STACKS_S)
        while self._open:
            os.close(self._open.pop())


class Supervisor:
    """Runs all sections and keeps what came of them.

    Args:
        sections: What to run, in order.
        report: Gets the results.
        table: Name of the module that holds the sections.
        deadline: Monotonic time by which all is over.
        changed: Called when there is something new, with the section it is about, if that
            is over.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        report: Report,
        *,
        table: str,
        deadline: float,
        changed: Callable[[SectionResult | None], None],
    ) -> None:
        self._sections = list(sections)
        self._report = report
        self._table = table
        self._deadline = deadline
        self._changed = changed
        self._child: Child | None = None
        self._results = [SectionResult(name=s.name, title=s.title) for s in sections]
        report.sections.extend(self._results)

    def run(self) -> None:
        """Run all sections; returns at the deadline at the latest, but for seconds."""
        try:
            for index, result in enumerate(self._results):
                try:
                    self._run(index, result)
                except Trouble as trouble:
                    result.status, result.reason = trouble.status, str(trouble)
                    result.traceback = trouble.stacks
                if result.status != "done":
                    self._drop()
                self._changed(result)
        finally:
            self._drop()

    def _left_s(self) -> float:
        return self._deadline - RESERVE_S - time.monotonic()

    def _run(self, index: int, result: SectionResult) -> None:
        begin = time.monotonic()
        if self._child is None and self._left_s() >= LEAST_S:
            self._child = Child(self._table, begin + min(START_S, self._left_s()))
            self._report.facts.update(self._child.facts)
        result.budget_s, limit_s = budgets(self._sections[index:], self._left_s())
        if self._child is None or result.budget_s < LEAST_S:
            result.reason = "no time was left"
            return
        result.status = "running"
        begin = time.monotonic()
        try:
            self._child.order(result.name, result.budget_s)
            for message in self._child.messages(begin + limit_s):
                if result.apply(message):
                    return
                self._changed(None)
        finally:
            result.seconds = time.monotonic() - begin

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()


def run_here(
    sections: Sequence[Section], report: Report, *, seconds: float, changed: Callable[..., None]
) -> None:
    """A dry run: all sections in this process, with nothing to protect them from each other."""
    deadline = time.monotonic() + seconds
    for section in sections:
        result = SectionResult(name=section.name, title=section.title)
        report.sections.append(result)
        left_s = deadline - time.monotonic()
        result.budget_s = min(section.seconds, left_s)
        if left_s <= 0:
            result.reason = "no time was left"
        else:
            run_section(section, dry=True, seconds=result.budget_s, emit=result.apply)
        changed(result)
