"""MachineReport: one machine's report to the others in a round, and its JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from coordinator.codec import Count, Seconds, decode, encode, fail, parse_json
from coordinator.metrics import MachineStats
from coordinator.run_errors import GpuWorkerError
from coordinator.splitting import BatchSet

EpochRanges = tuple[tuple[Count, tuple[range, ...]], ...]
"""``(epoch, ranges of batches)``, epochs and ranges ascending, ranges of step 1."""

PROTOCOL_VERSION = 2
"""Version of the messages between machines. Machines with another one are refused."""
MAX_OPEN_EPOCHS = 2
"""Epochs open at a time, so that no machine waits for the last batches of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """One machine's report to the others in a round.

    Attributes:
        machine: Machine id, unique to this start of its process. Machines are ordered by id.
        run: Restarts of the inner run after healing.
        step: Rounds committed.
        lineage: Hash chain over the committed rounds, 64 hexadecimal digits.
        consumed: Batches whose effect is in the global parameters, over all epochs.
        settings: Settings that must be equal on all machines.
        done: Batches in the capture, since the machine's last commit.
        kept: Granted batches that are not in the capture and that the machine keeps training.
        weight: Weight of the capture in the mean of the parameters.
        seconds_per_batch: Time per batch of the whole machine; ``None`` if not measured yet.
        tallies: Metric sums of each open epoch, cumulative since the machine's inner run started.
        leaving: True if the machine leaves after this round; it then keeps nothing.
        stop: True if all machines are to stop after this round.
        void: The reason why the machine cannot take part, which voids the round; else empty.
    """

    machine: str
    run: Count = 0
    step: Count
    lineage: str
    consumed: Count = 0
    settings: dict[str, Any]
    done: EpochRanges = ()
    kept: EpochRanges = ()
    weight: Seconds = 0.0
    num_samples: Count = 0
    seconds_per_batch: Annotated[float, 1e-12] | None = None
    tallies: tuple[tuple[Count, MachineStats], ...] = ()
    leaving: bool = False
    stop: bool = False
    void: str = ""

    @property
    def history(self) -> tuple[int, int, str]:
        """The machine's history as an ordered key; the greatest of a round wins."""
        return self.step, self.consumed, self.lineage

    def to_json(self) -> bytes:
        """The report as JSON; equal reports give equal bytes."""
        return canonical_json(encode(self))

    @classmethod
    def from_json(cls, data: bytes) -> MachineReport:
        """Parse and validate another machine's report.

        Raises:
            ValueError: The data is malformed; the message names the field.
        """
        report = decode(cls, parse_json(data, parse_constant=_refuse_constant), "report")
        check_lineage(report.lineage)
        check_ranges(report.done, "done")
        check_ranges(report.kept, "kept")
        if not report.machine:
            fail("report['machine']", report.machine, "the id of a machine")
        return report


class LedgerError(GpuWorkerError):
    """Reports that contradict the ledger: a program error, or a corrupt message.

    Attributes:
        errors: The error of each machine, as far as single machines are at fault.
    """

    def __init__(self, message: str, errors: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.errors = dict(errors or {})


def canonical_json(value: Any) -> bytes:
    """JSON without spaces and with sorted keys: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"report: {name} is not a number")


def check_lineage(lineage: str) -> None:
    """Raise ``ValueError`` for another text than a hash chain."""
    if not re.fullmatch("[0-9a-f]{64}", lineage):
        fail("lineage", lineage, "64 hexadecimal digits")


def check_ranges(ranges: EpochRanges, name: str) -> None:
    """Check that epochs and ranges ascend, and that no range is empty or touches another.

    Raises:
        ValueError: They do not; the message begins with ``name``.
    """
    epochs = [epoch for epoch, _ in ranges]
    if sorted(set(epochs)) != epochs or not all(spans for _, spans in ranges):
        raise ValueError(f"{name}: epochs are empty or not ascending")
    for _, spans in ranges:
        if any(span.stop >= following.start for span, following in pairwise(spans)):
            raise ValueError(f"{name}: ranges touch or are not ascending")


def normalize(ranges: Iterable[tuple[int, Iterable[range]]]) -> EpochRanges:
    """The same batches with ascending epochs, merged ascending ranges and nothing empty.

    Raises:
        LedgerError: A batch occurs twice.
    """
    by_epoch: dict[int, list[range]] = {}
    for epoch, spans in ranges:
        by_epoch.setdefault(epoch, []).extend(spans)
    normalized = []
    for epoch in sorted(by_epoch):
        ascending = tuple(by_epoch[epoch])
        if len(ascending) > 1 or any(span.step != 1 or not span for span in ascending):
            ascending = BatchSet(ascending).spans
            _check_disjoint(epoch, ascending)
        if ascending:
            normalized.append((epoch, ascending))
    return tuple(normalized)


def num_batches(ranges: EpochRanges) -> int:
    """The number of batches in the ranges of all epochs."""
    return sum(len(span) for _, spans in ranges for span in spans)


def _check_disjoint(epoch: int, ascending: Sequence[range]) -> None:
    for span, following in pairwise(ascending):
        if following.start < span.stop:
            raise LedgerError(f"batch {following.start} of epoch {epoch} occurs twice")


def is_subset(inner: EpochRanges, outer: EpochRanges) -> bool:
    """True if every batch of ``inner`` is in ``outer``."""
    outer_spans = dict(outer)
    for epoch, spans in inner:
        rest = BatchSet(outer_spans.get(epoch, ()))
        size = len(rest)
        rest.remove(spans)
        if size - len(rest) != sum(map(len, spans)):
            return False
    return True
