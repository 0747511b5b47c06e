"""Grants: each machine's grant of batches after a commit, in proportion to its speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.cluster.machine_report import EpochRanges, MachineReport, normalize, num_batches
from coordinator.splitting import BatchSet, split_by_cost

GRANT_PERIODS = 1.5
"""Length of a grant in periods, so that a machine whose speed was underestimated has work."""
INITIAL_BATCHES = 8
"""Batches granted to each machine while no speed is known."""
MIN_INTERVAL_S = 0.02
"""Shortest time from a commit to the next round, unless the machine is idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The batches that a machine may train until the next commit, kept ones included.

    Attributes:
        batches: The oldest epoch first.
    """

    batches: EpochRanges = ()

    def __len__(self) -> int:
        return num_batches(self.batches)


def compute_grants(
    reports: Sequence[MachineReport],
    open_batches: Mapping[int, BatchSet],
    *,
    period_s: float,
    limit: int | None = None,
) -> dict[str, Grant]:
    """The grant of each machine; the same on all machines.

    Each machine gets the batches that it trains in ``GRANT_PERIODS`` periods, less those it keeps.
    If fewer are open, they are granted so that all machines finish together. Each machine receives
    its part of the oldest open epoch first; its ranges are contiguous where possible.

    Args:
        reports: The reports of all machines in the round.
        open_batches: For each open epoch, oldest first, the batches that are neither consumed
            nor kept. The granted ones are removed.
        period_s: Seconds until the next round.
        limit: Batches still to be trained in the run, kept ones included; ``None``: no limit.

    Returns:
        A grant for each machine, empty for those that leave.
    """
    grants: dict[str, Grant] = {peer.machine: Grant() for peer in reports}
    staying = sorted((f for f in reports if not f.leaving), key=lambda peer: peer.machine)
    if not staying:
        return grants
    kept = [num_batches(peer.kept) for peer in staying]
    num_open = sum(map(len, open_batches.values()))
    if limit is not None:
        num_open = min(num_open, max(0, limit - sum(kept)))
    seconds = batch_seconds(staying)
    if seconds is None:
        amounts = [max(0, INITIAL_BATCHES - held) for held in kept]
        seconds = [1.0] * len(staying)
    else:
        most = 2.0**50
        amounts = [
            max(0, math.ceil(min(most, GRANT_PERIODS * period_s / s)) - held)
            for s, held in zip(seconds, kept, strict=True)
        ]
    if sum(amounts) > num_open:
        costs = [(s * held, s) for s, held in zip(seconds, kept, strict=True)]
        amounts = list(split_by_cost(num_open, costs, least=0))
    parts: list[list[tuple[int, tuple[range, ...]]]] = [list(peer.kept) for peer in staying]
    for epoch, batches in open_batches.items():
        sizes = _split_proportionally(min(len(batches), sum(amounts)), amounts)
        for part, size in zip(parts, sizes, strict=True):
            if size:
                part.append((epoch, batches.take(size)))
        amounts = [amount - size for amount, size in zip(amounts, sizes, strict=True)]
    for peer, part in zip(staying, parts, strict=True):
        grants[peer.machine] = Grant(batches=normalize(part))
    return grants


def batch_seconds(reports: Sequence[MachineReport]) -> list[float] | None:
    """Seconds per batch of each machine; the mean speed of the others where not measured.

    ``None`` if no machine has a measurement.
    """
    speeds = [1 / peer.seconds_per_batch for peer in reports if peer.seconds_per_batch]
    if not speeds:
        return None
    typical = len(speeds) / math.fsum(speeds)
    return [peer.seconds_per_batch or typical for peer in reports]


def round_interval_s(
    grants: Mapping[str, Grant], reports: Sequence[MachineReport], period_s: float
) -> float:
    """Seconds from a commit to the next round: a period, or less if all grants end earlier."""
    seconds = batch_seconds(reports)
    if seconds is None:
        return period_s
    durations = (len(grants[f.machine]) * s for f, s in zip(reports, seconds, strict=True))
    return min(period_s, max(MIN_INTERVAL_S, *durations))


def _split_proportionally(total: int, amounts: Sequence[int]) -> list[int]:
    """Split ``total`` in proportion to ``amounts``, no part above its amount; integers only."""
    whole = sum(amounts)
    if not whole:
        return [0] * len(amounts)
    parts = [total * amount // whole for amount in amounts]
    by_remainder = sorted(range(len(parts)), key=lambda i: (-(total * amounts[i] % whole), i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts
