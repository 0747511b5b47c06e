"""MachineReport: one machine's report to the others in a round, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from coordinator.run_errors import GpuWorkerError
from coordinator.schema import (
    entries,
    integer,
    items,
    number,
    of_type,
    optional,
    parse_json,
    record,
    text,
)
from coordinator.splitting import BatchSet

EpochRanges = tuple[tuple[int, tuple[range, ...]], ...]
"""``(epoch, ranges of batches)``, epochs and ranges ascending, ranges of step 1."""

PROTOCOL_VERSION = 1
"""Version of the messages between machines. Machines with another one are refused."""
MAX_OPEN_EPOCHS = 2
"""Epochs open at a time, so that no machine waits for the last batches of one."""
MAX_RANGES = 65536
"""Ranges of one epoch in a message."""
MAX_COUNT = 2**53
"""Largest number of batches, samples or steps in a message."""


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
        tallies: Metric sums of each open epoch, cumulative since the machine's inner run
            started; opaque to the ledger.
        leaving: True if the machine leaves after this round; it then keeps nothing.
        stop: True if all machines are to stop after this round.
        void: The reason why the machine cannot take part, which voids the round; else empty.
    """

    machine: str
    run: int = 0
    step: int
    lineage: str
    consumed: int = 0
    settings: dict[str, Any]
    done: EpochRanges = ()
    kept: EpochRanges = ()
    weight: float = 0.0
    num_samples: int = 0
    seconds_per_batch: float | None = None
    tallies: tuple[tuple[int, dict[str, Any]], ...] = ()
    leaving: bool = False
    stop: bool = False
    void: str = ""

    @property
    def history(self) -> tuple[int, int, str]:
        """The machine's history as an ordered key; the greatest of a round wins."""
        return self.step, self.consumed, self.lineage

    def to_json(self) -> bytes:
        """The report as JSON; equal reports give equal bytes."""
        value = {name: getattr(self, name) for name in _FIELDS}
        value["done"], value["kept"] = ranges_to_json(self.done), ranges_to_json(self.kept)
        return canonical_json(value)

    @classmethod
    def from_json(cls, data: bytes) -> MachineReport:
        """Parse and validate another machine's report.

        Raises:
            ValueError: The data is malformed; the message names the field.
        """
        value = parse_json(data, parse_constant=_refuse_constant)
        if not isinstance(value, dict) or set(value) != set(_FIELDS):
            raise ValueError(f"report: not an object with the fields {', '.join(_FIELDS)}")
        _REPORT(value, "report")
        return cls(
            **{
                **value,
                "done": ranges_from_json(value["done"], "done"),
                "kept": ranges_from_json(value["kept"], "kept"),
                "tallies": tuple((epoch, stats) for epoch, stats in value["tallies"]),
            }
        )


COUNT = integer(0, MAX_COUNT)
LINEAGE = text(64, 64, "0123456789abcdef")
RANGES = items(entries(COUNT, items(entries(COUNT, COUNT), most=MAX_RANGES)), most=MAX_OPEN_EPOCHS)
_REPORT = record(
    {
        "machine": text(1, 256),
        "run": COUNT,
        "step": COUNT,
        "lineage": LINEAGE,
        "consumed": COUNT,
        "settings": of_type(dict),
        "done": RANGES,
        "kept": RANGES,
        "weight": number(0, 1e300),
        "num_samples": COUNT,
        "seconds_per_batch": optional(number(1e-12, 1e300)),
        "tallies": items(entries(COUNT, of_type(dict)), most=MAX_OPEN_EPOCHS),
        "leaving": of_type(bool),
        "stop": of_type(bool),
        "void": text(0, 4096),
    }
)
_FIELDS = tuple(MachineReport.__dataclass_fields__)


class LedgerError(GpuWorkerError):
    """Reports or events that contradict the ledger: a program error, or a corrupt message.

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


def ranges_to_json(ranges: EpochRanges) -> list[Any]:
    """``[epoch, [[start, stop], ...]]`` for each epoch."""
    return [[epoch, [[s.start, s.stop] for s in spans]] for epoch, spans in ranges]


def ranges_from_json(value: Any, name: str) -> EpochRanges:
    """The inverse of :func:`ranges_to_json`.

    Raises:
        ValueError: The value is malformed; the message begins with ``name``.
    """
    RANGES(value, name)
    ranges, previous = [], -1
    for epoch, pairs in value:
        if epoch <= previous or not pairs:
            raise ValueError(f"{name}: epochs are empty or not ascending")
        spans, stop = [], -1
        for first, end in pairs:
            if not stop < first < end:
                raise ValueError(f"{name}: ranges are empty, touch or are not ascending")
            stop = end
            spans.append(range(first, end))
        ranges.append((epoch, tuple(spans)))
        previous = epoch
    return tuple(ranges)


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
