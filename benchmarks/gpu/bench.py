"""What a section of the GPU benchmark is made with: rows, rounds, a budget, a guard."""

from __future__ import annotations

import gc
import logging
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks.gpu_report import Row, plain

T = TypeVar("T")
Emit = Callable[[dict[str, Any]], object]
NEEDS_CUDA = "needs CUDA"


class SystemFailed(Exception):
    """A system could not be measured; the text is that of the original error."""


class Bench:
    """What a section is given: its sizes, its time, and where its figures go.

    Args:
        dry: Walk the code paths on the CPU with tiny sizes.
        seconds: Budget of the section. It is not broken off here when that is spent; it
            makes fewer rounds.
        emit: Takes messages for :meth:`benchmarks.gpu_report.SectionResult.apply`.
    """

    def __init__(self, *, dry: bool, seconds: float, emit: Emit) -> None:
        self.dry = dry
        self._end = time.monotonic() + seconds
        self._emit = emit

    @property
    def device(self) -> Any:
        """Where to measure."""
        import torch

        return torch.device("cpu") if self.dry else torch.device("cuda", 0)

    def left_s(self) -> float:
        """Seconds that are left of the budget; negative behind it."""
        return self._end - time.monotonic()

    def patience_s(self) -> float:
        """How long to wait for something that must come."""
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
        """Tell a figure; see :class:`benchmarks.gpu_report.Row`. A dry run judges checks alone."""
        wanted = None if self.dry and unit != "yes" else target
        row = Row(name=name, figure=plain(figure), unit=unit, target=wanted, at_most=at_most)
        self._emit({"type": "row", "row": vars(row)})

    def check(self, name: str, ok: bool) -> None:
        """Tell whether something that must hold does."""
        self.row(name, float(ok), unit="yes", target=1.0)

    def raw(self, name: str, values: Any) -> None:
        """Tell, or tell anew, the measurements behind a figure; the unit is in the name."""
        self._emit({"type": "raw", "name": name, "values": plain(values)})

    def note(self, text: str) -> None:
        """Tell something in words."""
        self._emit({"type": "note", "text": text})


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the benchmark that stands and falls alone.

    Attributes:
        name: As given to ``--sections``.
        title: In words.
        seconds: How long it takes on the machine that it is made for.
        run: Measures.
        needs_cuda: Whether a dry run leaves it out.
    """

    name: str
    title: str
    seconds: float
    run: Callable[[Bench], None]
    needs_cuda: bool = False


class _Notes(logging.Handler):
    """Turns what the packages warn of into notes."""

    def __init__(self, emit: Emit) -> None:
        super().__init__(logging.WARNING)
        self._emit = emit

    def emit(self, record: logging.LogRecord) -> None:
        self._emit({"type": "note", "text": f"{record.name}: {record.getMessage()}"})


def run_section(section: Section, *, dry: bool, seconds: float, emit: Emit) -> bool:
    """Run a section guarded, and free what it held; whether it came to its end."""
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
    except Exception as error:  # the others still run
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
    """Free what nobody uses any more on the device, caches included."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.synchronize()
        clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear_workspaces is not None:  # those of cuBLAS, one for each stream that used it
            clear_workspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@dataclass
class Rates:
    """What systems reached in rounds that were measured in turn.

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
        """Raise if one of these could not be measured, after all has been told.

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

    A system that fails is left out from there on. A round begins only if the budget has room
    for it, but for the first one.

    Args:
        bench: Takes the raw values.
        systems: Each gives a rate.
        rounds: How many rounds at most.
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
