"""Grants of batches: from the ledger of a cluster to a machine's run, and what the run has done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.cluster.cluster_ledger import ClosedEpoch, ClusterLedger
from coordinator.cluster.grant import Grant
from coordinator.cluster.member import Captured
from coordinator.data_waits import common_wait_s
from coordinator.messages import EpochGrant, SaveCheckpoint
from coordinator.metrics import EpochAccumulator, EpochMetrics, MachineStats, Sums, metrics_state
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
    for state in checkpoint.run["epochs"]:
        epoch = int(state["epoch"])
        if epoch not in ledger.open_epochs:
            continue  # closed on all machines, not yet evaluated here
        rest = BatchSet(granted.get(epoch, ()))
        rest.remove(range(start, stop) for start, stop in state["consumed"])
        trained = BatchSet(granted.get(epoch, ()))
        trained.remove(rest.spans)
        done.append((epoch, trained.spans))
        tally = {"ranks": state["tally"]["ranks"], "num_retrained": state["num_retrained"]}
        tallies.append((epoch, tally))
        before = ledger.tally_of(epoch, run_name) or {"ranks": ()}
        for sign, ranks in ((1, tally["ranks"]), (-1, before["ranks"])):
            num_samples += sign * sum(int(rank["num_samples"]) for rank in ranks)
            weights += [sign * _total_weight(rank["loss_samples"]) for rank in ranks]
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


def machine_tallies(closed: ClosedEpoch, *, without: str = "") -> tuple[MachineStats, ...]:
    """The metric sums of each machine's runs in an epoch, except the key ``without``."""
    return tuple(
        MachineStats(
            machine=key.rpartition("/")[0],
            ranks=tuple(map(Sums.from_state, stats["ranks"])),
            num_retrained=int(stats["num_retrained"]),
        )
        for key, stats in sorted(closed.tallies.items())
        if key != without
    )


def _total_weight(weight: Any) -> float:
    return math.fsum(weight) if isinstance(weight, list) else float(weight)


def _seconds_per_batch(run: Mapping[str, Any]) -> float | None:
    """Seconds per batch of a machine from those of its ranks; ``None`` if not measured.

    A wait for data that all ranks have does not count in their shares, but in the machine's.
    """
    ranks = run.get("ranks", ())
    num_batches = sum(rank["num_batches"] for rank in ranks)
    batch_samples = sum(rank["num_samples"] for rank in ranks) / max(1, num_batches)
    wait_s = common_wait_s(run.get("data_waits", ())) * batch_samples
    speed = math.fsum(1 / (s + wait_s) for s in run["elche"]["seconds"] if s > 0)
    return 1 / speed if speed else None


def resume_state(
    run: Mapping[str, Any], ledger: ClusterLedger, closed: Sequence[EpochMetrics]
) -> dict[str, Any]:
    """The coordinator state from which a machine's run restarts at the ledger.

    Args:
        run: This machine's coordinator state, from its last capture.
    """
    open_epochs = [number for number in ledger.open_epochs if ledger.consumed_of(number)]
    nothing = EpochAccumulator(int(run["world_size"])).state_dict()
    epochs = [
        {
            "epoch": number,
            "epoch_s": None,
            "consumed": [[span.start, span.stop] for span in ledger.consumed_of(number)],
            "num_samples": 0,
            "num_retrained": 0,
            "num_averagings": 0,
            "divergence": None,
            "norm": None,
            "tally": nothing,
            "quotas": None,
        }
        for number in range(len(closed), max(open_epochs, default=-1) + 1)
    ]
    return {
        **run,
        "global_step": ledger.consumed,
        "next_epoch": len(closed) + len(epochs),
        "elapsed_s": 0.0,
        "metrics": [metrics_state(metrics) for metrics in closed],
        "epochs": epochs,
    }
