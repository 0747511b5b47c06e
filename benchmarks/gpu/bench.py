"""Framework of the GPU benchmark: sections, their figures, and the process they run in.

A section that hangs is ended together with its process, and one that fails may leave the
device in a state that spoils those behind it: then the process is ended and another one started.
All results so far are kept in any case, and the run ends in time.

No PyTorch is imported in here before a section is.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import logging
import math
import os
import queue
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness import environment

# -- figures and the report --------------------------------------------------------------


BAD = ("failed", "timed out", "died", "not run")
"""Final states of incomplete sections."""


def plain(value: Any) -> Any:
    """A value for JSON: numbers that are not finite become ``None``."""
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
        name: The measurement.
        figure: The number; ``None``: it could not be measured.
        unit: Of the figure; a ratio has none.
        target: The bound; ``None``: the figure is only reported.
        at_most: True if ``target`` bounds the figure from above.
    """

    name: str
    figure: float | None
    unit: str = ""
    target: float | None = None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        """True if the target is met; ``None`` without one."""
        if self.target is None:
            return None
        if self.figure is None:
            return False
        return self.figure <= self.target if self.at_most else self.figure >= self.target

    def as_dict(self) -> dict[str, Any]:
        """Fields for the JSON file."""
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
    """Results of one section.

    Attributes:
        name: As given to ``--sections``.
        title: In words.
        status: ``"not run"``, ``"running"``, ``"done"``, ``"skipped"``, ``"failed"``,
            ``"timed out"`` or ``"died"``.
        reason: The reason if it did not complete.
        seconds: Its duration.
        budget_s: Its time budget.
        rows: Figures, in order.
        raw: Every measurement behind them, by system and unit.
        notes: Remarks, and warnings logged by the packages.
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
        """Apply a message of the section; returns True for the last one."""
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
        """Fields for the JSON file."""
        return {**vars(self), "rows": [row.as_dict() for row in self.rows]}


@dataclass(kw_only=True)
class Report:
    """All results of a run.

    Attributes:
        date: Of the run, as ``YYYY-MM-DD``.
        dry: True if only the code paths were walked, on the CPU with tiny sizes.
        minutes: Time budget of the run.
        facts: The machine.
        sections: In order.
        seconds: Duration of the run so far.
    """

    date: str
    dry: bool
    minutes: float
    facts: dict[str, Any] = field(default_factory=dict)
    sections: list[SectionResult] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """True if every section completed or was skipped."""
        return not any(section.status in (*BAD, "running") for section in self.sections)

    @property
    def met(self) -> bool:
        """True if every target is met."""
        return not any(row.met is False for section in self.sections for row in section.rows)

    def as_dict(self) -> dict[str, Any]:
        """Fields for the JSON file."""
        return {**vars(self), "sections": [section.as_dict() for section in self.sections]}

    def file_name(self) -> str:
        """``<gpu>-<date>.json``."""
        gpu = "cpu-dry" if self.dry else str(self.facts.get("gpu", "unknown-gpu"))
        slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
        return f"{slug}-{self.date}.json"

    def write(self, folder: Path) -> Path:
        """Write the file atomically; overwrites that of the same day."""
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
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".strip()


def _bound(row: Row) -> str:
    if row.target is None:
        return ""
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
    """The machine, every target with its verdict, and incomplete sections."""
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


# -- a section ---------------------------------------------------------------------------


T = TypeVar("T")
Emit = Callable[[dict[str, Any]], object]
NEEDS_CUDA = "needs CUDA"


class SystemFailed(Exception):
    """A system could not be measured; the text is that of the original error."""


class Bench:
    """Context of a section: sizes, time budget and output of figures.

    Args:
        dry: Walk the code paths on the CPU with tiny sizes.
        seconds: Budget of the section. It is not broken off here when that is spent; it
            makes fewer rounds.
        emit: Takes messages for :meth:`SectionResult.apply`.
    """

    def __init__(self, *, dry: bool, seconds: float, emit: Emit) -> None:
        self.dry = dry
        self._end = time.monotonic() + seconds
        self._emit = emit

    @property
    def device(self) -> Any:
        """The device to measure."""
        import torch

        return torch.device("cpu") if self.dry else torch.device("cuda", 0)

    def left_s(self) -> float:
        """Seconds left of the budget; negative once it is exceeded."""
        return self._end - time.monotonic()

    def patience_s(self) -> float:
        """Timeout for an expected event, in seconds."""
        return max(10.0, self.left_s() + 10.0)

    def pick(self, real: T, dry: T) -> T:
        """A size: the real one, or that of a dry run."""
        return dry if self.dry else real

    def row(
        self,
        name: str,
        figure: float | None,
        *,
        unit: str = "",
        target: float | None = None,
        at_most: bool = False,
    ) -> None:
        """Report a figure; see :class:`Row`. A dry run has no targets."""
        wanted = None if self.dry else target
        row = Row(name=name, figure=plain(figure), unit=unit, target=wanted, at_most=at_most)
        self._emit({"type": "row", "row": vars(row)})

    def raw(self, name: str, values: Any) -> None:
        """Report or replace the measurements behind a figure; the unit is in the name."""
        self._emit({"type": "raw", "name": name, "values": plain(values)})

    def note(self, text: str) -> None:
        """Report a remark."""
        self._emit({"type": "note", "text": text})


@dataclass(frozen=True, kw_only=True)
class Section:
    """An independent part of the benchmark.

    Attributes:
        name: As given to ``--sections``.
        title: In words.
        seconds: Its duration on the target machine.
        run: Measures.
        needs_cuda: True if a dry run leaves it out.
    """

    name: str
    title: str
    seconds: float
    run: Callable[[Bench], None]
    needs_cuda: bool = False


class _Notes(logging.Handler):
    """Turns warnings of the packages into notes."""

    def __init__(self, emit: Emit) -> None:
        super().__init__(logging.WARNING)
        self._emit = emit

    def emit(self, record: logging.LogRecord) -> None:
        self._emit({"type": "note", "text": f"{record.name}: {record.getMessage()}"})


def run_section(section: Section, *, dry: bool, seconds: float, emit: Emit) -> bool:
    """Run a section, report its errors and free its memory; returns True if it completed."""
    begin = time.monotonic()
    status, reason, text = "done", "", ""
    loggers = [logging.getLogger(name) for name in ("runtime", "coordinator")]
    handler = _Notes(emit)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        if dry and section.needs_cuda:
            status, reason = "skipped", NEEDS_CUDA
        else:
            section.run(Bench(dry=dry, seconds=seconds, emit=emit))
    except Exception as error:  # the other systems still run
        status, reason = "failed", f"{type(error).__name__}: {error}".split("\n")[0][:300]
        # The text alone: the traceback's frames hold device memory.
        text = "".join(traceback.format_exception(error))
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    try:
        tidy()
    except Exception as error:  # as after an illegal access, which all later calls report
        status, reason = "failed", reason or f"the device is lost: {error}"
        text = text or "".join(traceback.format_exception(error))
    elapsed_s = time.monotonic() - begin
    end = {"status": status, "reason": reason, "traceback": text, "seconds": elapsed_s}
    emit({"type": "end", **end})
    return status != "failed"


def tidy() -> None:
    """Free unused memory of the device, caches included."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.synchronize()
        clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear_workspaces is not None:  # workspaces of cuBLAS, one for each stream that used it
            clear_workspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@dataclass
class Rates:
    """Rates of systems in rounds that were measured in turn.

    Attributes:
        values: Of each system, one for each round that it was measured in.
        errors: Text of the error of each system that could not be measured.
    """

    values: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def ratio(self, over: str, under: str) -> float | None:
        """The median over the rounds of one system's rate over the other's."""
        pairs = list(zip(self.values.get(over, []), self.values.get(under, []), strict=False))
        return statistics.median(a / b for a, b in pairs) if pairs else None

    def median(self, system: str) -> float | None:
        """The median of a system's rates."""
        values = self.values.get(system)
        return statistics.median(values) if values else None

    def require(self, systems: Iterable[str]) -> None:
        """Raise if one of these could not be measured, after all figures were reported.

        Raises:
            SystemFailed: With the text of the first one's error.
        """
        for system in systems:
            if system in self.errors:
                text = self.errors[system]
                last_line = text.rstrip().rpartition("\n")[2]
                raise SystemFailed(f"{system}: {last_line}\n\n{text}")


def interleaved(
    bench: Bench, systems: Mapping[str, Callable[[], float]], *, rounds: int, unit: str
) -> Rates:
    """Measure all systems in turn, every other round in reverse order.

    A failed system is omitted from then on. A round begins only if the budget has room
    for it, except for the first one.

    Args:
        bench: Takes the raw values.
        systems: Each returns a rate.
        rounds: Maximum number of rounds.
        unit: Of the rates.
    """
    rates = Rates()
    longest_s = 0.0
    for index in range(rounds):
        if index and bench.left_s() < 1.1 * longest_s:
            bench.note(f"{index} of {rounds} rounds: the time is up")
            break
        begin = time.monotonic()
        names = list(systems)
        for name in names if index % 2 == 0 else reversed(names):
            if name in rates.errors:
                continue
            try:
                rates.values.setdefault(name, []).append(systems[name]())
            except Exception as error:
                rates.errors[name] = "".join(traceback.format_exception(error))
                bench.note(f"{name} failed: {type(error).__name__}: {error}".split("\n")[0])
            tidy()
            bench.raw(f"{name}, {unit}", rates.values.get(name, []))
        longest_s = max(longest_s, time.monotonic() - begin)
    return rates


# -- the process of the sections, from outside -------------------------------------------


RESERVE_S = 5.0
"""Time reserved to write and print the results."""
GRACE_S = 10.0
"""Time by which a section may exceed 1.5 times its budget before it is terminated."""
LEAST_S = 3.0
"""Least time for which a section is run."""
START_S = 120.0
STACKS_S = 2.0
TAIL_BYTES = 20_000
SERVE = "from benchmarks.gpu.bench import serve; serve()"
_POLL_S = 0.25


class Trouble(Exception):
    """The process is unusable.

    Args:
        status: Status of the section.
        reason: The reason.
        stacks: Stacks of its threads, and the tail of its stderr.
    """

    def __init__(self, status: str, reason: str, stacks: str) -> None:
        super().__init__(reason)
        self.status = status
        self.stacks = stacks


def budgets(sections: Sequence[Section], left_s: float) -> tuple[float, float]:
    """Budget of the first of these sections, and the time after which it is terminated.

    The time left is divided in proportion to the planned times; no section gets more than
    1.5 times its own.
    """
    planned_s = sum(section.seconds for section in sections)
    share_s = left_s * sections[0].seconds / planned_s
    budget_s = min(share_s, 1.5 * sections[0].seconds)
    return budget_s, min(1.5 * budget_s + GRACE_S, left_s)


class Child:
    """The process, which runs :func:`serve`. It must be closed in the end.

    Args:
        table: Name of the module with the sections.
        until: Monotonic time by which it must be ready.

    Attributes:
        facts: The facts that it reported on the machine.

    Raises:
        Trouble: It did not get ready.
    """

    def __init__(self, table: str, until: float) -> None:
        self._errors, path = tempfile.mkstemp()
        os.unlink(path)
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._open = [self._errors, self._commands, self._answers]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVE, table, str(commands), str(answers)],
                stdin=subprocess.DEVNULL,
                stdout=2,
                stderr=self._errors,
                pass_fds=(commands, answers),
                env=environment(),
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
        """Request a section; :meth:`messages` raises if the process has ended."""
        line = json.dumps({"section": section, "seconds": seconds}) + "\n"
        with suppress(BrokenPipeError):
            os.write(self._commands, line.encode())

    def messages(self, until: float) -> Iterator[dict[str, Any]]:
        """Yield the messages of the process as they arrive.

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
            # Polled before the last read, which then returns everything written.
            ended = self._process.poll() is not None
            if not readable:
                readable, _, _ = select.select([self._answers], [], [], 0.0)
            block = os.read(self._answers, 65536) if readable else b""
            if not block and ended:
                code = self._process.returncode
                raise Trouble("died", f"its process ended with {code}", self._tail())
            self._rest += block

    def stacks(self) -> str:
        """Stacks of its threads, and the tail of its stderr."""
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
        # Without a seek, which would move the process's write position.
        start = max(0, self._size() - TAIL_BYTES)
        return os.pread(self._errors, TAIL_BYTES, start).decode(errors="replace")

    def close(self) -> None:
        """End it and all that it has started. Idempotent."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # blocked in the driver
                self._process.wait(STACKS_S)
        while self._open:
            os.close(self._open.pop())


class Supervisor:
    """Runs all sections and collects the results.

    Args:
        sections: The sections, in order.
        report: Gets the results.
        table: Name of the module that holds the sections.
        deadline: Monotonic time of the deadline.
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
        """Run all sections; returns within seconds of the deadline."""
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
    """A dry run: all sections in this process, without isolation."""
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


# -- the process of the sections, from inside --------------------------------------------


class Answers:
    """Writes messages to the parent. For one thread at a time."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def put(self, message: dict[str, Any]) -> None:
        """Write one line, whole."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._pipe, line) :]


def read_commands(pipe: int, commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Take commands from the parent until it closes the pipe or dies, then end the process.

    Reads the bare pipe: a process forked meanwhile inherits no lock of a buffered file.
    """
    rest = b""
    while block := os.read(pipe, 65536):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            commands.put(json.loads(line))
    os._exit(0)


def serve() -> None:
    """Run sections on command until the parent ends the process.

    Its arguments are ``TABLE COMMANDS ANSWERS``: a module with ``SECTIONS`` and ``facts()``, and
    two pipes. Every line is a JSON object.
    """
    table, command_pipe, answer_pipe = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # Prints the stacks of all threads once the parent gives up waiting.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    answers = Answers(answer_pipe)
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    reader = threading.Thread(
        target=read_commands, args=(command_pipe, commands), name="commands", daemon=True
    )
    reader.start()
    module = importlib.import_module(table)
    sections = {section.name: section for section in module.SECTIONS}
    answers.put({"type": "ready", "facts": module.facts()})
    while True:
        command = commands.get()
        section = sections[command["section"]]
        run_section(section, dry=False, seconds=command["seconds"], emit=answers.put)
