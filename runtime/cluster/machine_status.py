"""MachineStatus: the progress of one machine's run, sent to the lighthouse as a signed line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from coordinator.cluster.machine_report import PROTOCOL_VERSION
from coordinator.codec import Count, Finite, Seconds, decode, parse_json
from runtime.cluster.signing import MAC_BYTES, is_signed, signature
from runtime.core.context import LINE_WIDTH
from runtime.timeline.run_table import RUN_COLUMNS, run_cells
from runtime.timeline.text import html_table, one_line, text_table

_TEXTS = {"name": 40, "checkpoint_dir": 60, "last_checkpoint": 140}
"""Texts and their limits: with them a line is below :data:`membership.MAX_LINE_BYTES`, although a
character of JSON may take 12 bytes."""
_MAX_HOST_LENGTH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStatus:
    """The progress of one machine's run.

    Attributes:
        number: Number of the record; it grows while the machine's process lives.
        run: The record; see :meth:`runtime.monitor.control.ListedRun.read`. Texts are shortened.
            ``None``: the machine has sent none yet.
        age_s: Seconds since the lighthouse received the record.
    """

    machine: str
    number: int = 0
    run: Mapping[str, Any] | None = None
    age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _SentRun:
    """The form of a record in a line."""

    pid: Count
    epoch: Count
    num_epochs: Count
    step: Count
    total_steps: Count
    elapsed_s: Seconds
    samples_per_s: Seconds
    loss: Finite | None
    name: str | None
    checkpoint_dir: str | None
    last_checkpoint: str | None


def status_line(token: str | None, machine: str, number: int, run: Mapping[str, Any]) -> bytes:
    """A machine's line with its record, in ASCII: the signature and JSON.

    Args:
        token: Secret shared by the machines.
        number: Number of the record, larger than those before.
    """
    sent = {field.name: run.get(field.name) for field in fields(_SentRun)}
    sent["pid"] = os.getpid()
    for name, limit in _TEXTS.items():
        sent[name] = None if run[name] is None else _end_of(run[name], limit)
    body = json.dumps([machine, number, sent])
    return f"{signature(token, *_signed_parts(body)).hex()} {body}\n".encode()


def is_signed_status(line: str, token: str | None) -> bool:
    """True if the line of a machine is signed with the token."""
    mac, _, body = line.rstrip("\n").partition(" ")
    try:
        return is_signed(bytes.fromhex(mac), token, *_signed_parts(body))
    except ValueError:
        return False


def parse_status(line: str, age_s: float = 0.0) -> MachineStatus:
    """Parse the line of a machine, whose signature is not verified.

    Raises:
        ValueError: It is malformed.
    """
    parsed = parse_json(line[2 * MAC_BYTES :])
    machine, number, given = decode(tuple[str, Count, _SentRun], parsed, "the status")
    run = asdict(given)
    run |= {name: None if run[name] is None else one_line(run[name]) for name in _TEXTS}
    return MachineStatus(machine=one_line(machine), number=number, run=run, age_s=age_s)


def _signed_parts(body: str) -> tuple[str, bytes, bytes]:
    return "status", str(PROTOCOL_VERSION).encode(), body.encode("utf-8", "replace")


def status_table(statuses: Sequence[MachineStatus]) -> list[str]:
    """Two lines of at most 80 columns for each machine, after a header."""
    rows: list[tuple[str, ...]] = [_CLUSTER_HEADER]
    others = [""]
    for status in statuses:
        host, other = status.machine, "no progress yet"
        cells: tuple[str, ...] = ("-",) * 5
        if (run := status.run) is not None:
            host = host.rpartition(f"-{run['pid']}-")[0] or host
            pid, name, *numbers, saved = run_cells(run["pid"], run)
            cells, other = (pid, *numbers), f"{name}, last checkpoint: {saved}"
        rows.append((one_line(host, _MAX_HOST_LENGTH), *cells, _age(status.age_s)))
        others.append(f"  {_end_of(other, LINE_WIDTH - 2)}")
    pairs = zip(text_table(rows), others, strict=True)
    return [line for pair in pairs for line in pair if line]


_CLUSTER_HEADER = ("HOST", "PID", "EPOCH", "DONE", "SAMPLES/S", "LOSS", "AGE")


def _end_of(text: str, limit: int) -> str:
    """The text, without its beginning if it is too long."""
    return text if len(text) <= limit else f"…{text[1 - limit :]}"


def status_page(statuses: Sequence[MachineStatus]) -> str:
    """A section of HTML with the machines' progress."""
    rows: list[tuple[str, ...]] = [("MACHINE", *RUN_COLUMNS, "AGE")]
    for status in statuses:
        if status.run is None:
            cells: tuple[str, ...] = ("-",) * len(RUN_COLUMNS)
        else:
            cells = run_cells(status.run["pid"], status.run)
        rows.append((status.machine, *cells, _age(status.age_s)))
    return f"<h3>Progress</h3>{html_table(rows)}"


def _age(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s"
