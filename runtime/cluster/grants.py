"""GrantTracker: the batches that this machine's run was granted, has trained and contributed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.cluster.cluster_ledger import ClosedEpoch, ClusterLedger
from coordinator.cluster.grant import Grant
from coordinator.cluster.machine_report import EpochRanges, normalize
from coordinator.cluster.member import Captured
from coordinator.data_waits import common_wait_s
from coordinator.messages import EpochGrant, SaveCheckpoint
from coordinator.metrics import EpochAccumulator, EpochMetrics, MachineStats, Sums, metrics_state
from coordinator.splitting import BatchSet


class GrantTracker:
    """Tracks the batches that a run was granted, has trained and has contributed to rounds.

    One instance per run. Batches are counted in open epochs only.

    Attributes:
        was_granted: True once the run was granted batches.
    """

    def __init__(self) -> None:
        self._granted: defaultdict[int, BatchSet] = defaultdict(BatchSet)
        self._committed: defaultdict[int, BatchSet] = defaultdict(BatchSet)
        self._returned: EpochRanges = ()
        self._last = Captured()
        # (samples, weight) of each open epoch.
        self._captured: dict[int, tuple[int, float]] = {}
        self._contributed: dict[int, tuple[int, float]] = {}
        self._num_committed = 0
        self.was_granted = False

    def capture(self, checkpoint: SaveCheckpoint, ledger: ClusterLedger) -> Captured:
        """The run's progress since the last committed round, in open epochs."""
        done, kept, tallies = [], [], []
        self._returned = checkpoint.returned
        returned = dict(checkpoint.returned)
        self._captured = {}
        for state in checkpoint.run["epochs"]:
            epoch = int(state["epoch"])
            if epoch not in ledger.open_epochs:
                continue  # closed on all machines, not yet evaluated here
            granted = self._granted[epoch]
            granted.remove(returned.get(epoch, ()))
            trained = BatchSet(range(start, stop) for start, stop in state["consumed"])
            rest = BatchSet(granted.spans)
            rest.remove(trained.spans)
            trained.remove(self._committed[epoch].spans)
            done.append((epoch, trained.spans))
            if not checkpoint.final:
                kept.append((epoch, rest.spans))
            if state["tally"]["ranks"]:
                tallies.append((epoch, _tally(state)))
            ranks = state["tally"]["ranks"]
            samples = sum(int(rank["num_samples"]) for rank in ranks)
            self._captured[epoch] = (
                samples,
                math.fsum(_total_weight(r["loss_samples"]) for r in ranks),
            )
        news = [
            (samples - before[0], weight - before[1])
            for epoch, (samples, weight) in self._captured.items()
            for before in (self._contributed.get(epoch, (0, 0.0)),)
        ]
        self._last = Captured(
            done=normalize(done),
            kept=normalize(kept),
            weight=max(0.0, math.fsum(weight for _, weight in news)),
            num_samples=max(0, sum(samples for samples, _ in news)),
            seconds_per_batch=_seconds_per_batch(checkpoint.run),
            tallies=tuple(tallies),
        )
        return self._last

    def resume(self) -> tuple[EpochGrant, ...]:
        """Grant the returned batches again after a failed round."""
        returned, self._returned = self._returned, ()
        for epoch, spans in returned:
            self._granted[epoch].put_back(spans)
        self._last = Captured()
        return tuple(EpochGrant(epoch=epoch, batches=spans) for epoch, spans in returned)

    def commit(self, grant: Grant, ledger: ClusterLedger) -> tuple[EpochGrant, ...]:
        """Account for the committed round of the last capture.

        Args:
            grant: Batches to train from now on, kept ones included.
            ledger: The ledger after the round.

        Returns:
            The run's grants of the open epochs.
        """
        self.was_granted = self.was_granted or bool(len(grant))
        for epoch, spans in self._last.done:
            self._committed[epoch].put_back(spans)
            self._num_committed += sum(map(len, spans))
        self._contributed, self._captured = self._captured or self._contributed, {}
        kept, granted, epoch_grants = dict(self._last.kept), dict(grant.batches), []
        for epoch in ledger.open_epochs:
            more = BatchSet(granted.get(epoch, ()))
            more.remove(kept.get(epoch, ()))
            self._granted[epoch].put_back(more.spans)
            consumed = sum(map(len, ledger.consumed_of(epoch)))
            elsewhere = consumed - len(self._committed[epoch])
            if more or elsewhere:
                epoch_grants.append(
                    EpochGrant(epoch=epoch, batches=more.spans, num_elsewhere=elsewhere)
                )
        self._returned = ()
        self._last = Captured()
        return tuple(epoch_grants)

    def num_elsewhere(self, ledger: ClusterLedger) -> int:
        """Batches of the whole run that other machines have contributed."""
        return ledger.consumed - self._num_committed

    def close(
        self, closed: ClosedEpoch, *, num_batches: int, num_samples: int, own: str
    ) -> EpochGrant:
        """The run's last grant of a closed epoch."""
        committed = len(self._committed.pop(closed.epoch, BatchSet()))
        self._granted.pop(closed.epoch, None)
        return EpochGrant(
            epoch=closed.epoch,
            num_elsewhere=num_batches - committed,
            complete=True,
            num_samples=num_samples,
            others=machine_tallies(closed, without=own),
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


def _tally(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"ranks": state["tally"]["ranks"], "num_retrained": state["num_retrained"]}


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
