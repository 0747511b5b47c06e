"""Grants of batches: from the ledger of a cluster to a machine's run, and what the run has done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from coordinator.cluster.cluster_ledger import ClosedEpoch, ClusterLedger
from coordinator.cluster.grant import Grant
from coordinator.cluster.member import Captured
from coordinator.data_waits import common_wait_s
from coordinator.messages import EpochGrant, SaveCheckpoint
from coordinator.metrics import EpochMetrics, MachineStats, Sums, rounded
from coordinator.saved_run import SavedEpoch, SavedRun
from coordinator.splitting import BatchSet


def captured(
    checkpoint: SaveCheckpoint, ledger: ClusterLedger, machine: str, run_name: str
) -> Captured:
    """A run's progress since the last committed round, in epochs that are open on all machines.

    A machine's grant in the ledger holds no batch that is in an earlier round.

    Args:
        run_name: The run's name in the ledger's tallies.
    """
    granted, done, tallies = dict(ledger.grants[machine].batches), [], []
    num_samples, weights = 0, []
    for state in checkpoint.run.epochs:
        epoch = state.epoch
        if epoch not in ledger.open_epochs:
            continue  # closed on all machines, not yet evaluated here
        rest = BatchSet(granted.get(epoch, ()))
        rest.remove(state.consumed)
        trained = BatchSet(granted.get(epoch, ()))
        trained.remove(rest.spans)
        done.append((epoch, trained.spans))
        stats = MachineStats(machine=machine, ranks=state.sums, num_retrained=state.num_retrained)
        tallies.append((epoch, stats))
        before = ledger.tally_of(epoch, run_name)
        for sign, each in ((1, stats), (-1, before)):
            for sums in () if each is None else each.ranks:
                num_samples += sign * sums.num_samples
                weights.append(sign * rounded(sums.loss_samples))
    return Captured(
        done=tuple(done),
        kept=tuple(
            (epoch, spans) for epoch, spans in checkpoint.kept if epoch in ledger.open_epochs
        ),
        weight=max(0.0, math.fsum(weights)),
        num_samples=max(0, num_samples),
        seconds_per_batch=_seconds_per_batch(checkpoint.run),
        tallies=tuple(tallies),
    )


def epoch_grants(grant: Grant, ledger: ClusterLedger) -> tuple[EpochGrant, ...]:
    """A machine's grant after a committed round, for its run."""
    granted = dict(grant.batches)
    return tuple(
        EpochGrant(epoch=epoch, batches=granted.get(epoch, ()), consumed=ledger.consumed_of(epoch))
        for epoch in ledger.open_epochs
        if epoch in granted or ledger.consumed_of(epoch)
    )


def other_tallies(closed: ClosedEpoch, *, without: str = "") -> tuple[MachineStats, ...]:
    """The metric sums of each machine's runs in an epoch, except the key ``without``."""
    return tuple(stats for key, stats in sorted(closed.tallies.items()) if key != without)


def _seconds_per_batch(run: SavedRun) -> float | None:
    """Seconds per batch of a machine from those of its ranks; ``None`` if not measured.

    A wait for data that all ranks have does not count in their shares, but in the machine's.
    """
    num_batches = sum(totals.num_batches for totals in run.ranks)
    batch_samples = sum(totals.num_samples for totals in run.ranks) / max(1, num_batches)
    wait_s = common_wait_s(run.data_waits) * batch_samples
    speed = math.fsum(1 / (s + wait_s) for s in run.elche.seconds if s > 0)
    return 1 / speed if speed else None


def resumed_run(run: SavedRun, ledger: ClusterLedger, closed: Sequence[EpochMetrics]) -> SavedRun:
    """The coordinator state from which a machine's run restarts at the ledger.

    Args:
        run: This machine's coordinator state, from its last capture.
    """
    open_epochs = [number for number in ledger.open_epochs if ledger.consumed_of(number)]
    nothing = (Sums(),) * len(run.ranks)
    epochs = tuple(
        SavedEpoch(epoch=number, consumed=ledger.consumed_of(number), sums=nothing)
        for number in range(len(closed), max(open_epochs, default=-1) + 1)
    )
    return replace(
        run,
        global_step=ledger.consumed,
        next_epoch=len(closed) + len(epochs),
        elapsed_s=0.0,
        metrics=tuple(closed),
        epochs=epochs,
    )
