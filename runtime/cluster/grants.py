"""This machine's part of a round: what its run has trained, and the tensors that travel."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.cluster.deal import Grant
from coordinator.cluster.facts import EpochRanges, normalize
from coordinator.cluster.ledger import ClosedEpoch, ClusterLedger
from coordinator.cluster.member import CaptureDone
from coordinator.messages import EpochGrant, SaveCheckpoint
from coordinator.metrics import EpochAccumulator, EpochMetrics, MachineStats, metrics_state
from coordinator.splitting import BatchSet

NOTHING = CaptureDone(done=(), kept=(), weight=0.0, num_samples=0, seconds_per_batch=None)


class Account:
    """Follows what this machine's run was granted, has trained and has brought into rounds.

    One for each run: it begins with nothing. Batches are counted within open epochs alone.
    """

    def __init__(self) -> None:
        self._granted: defaultdict[int, BatchSet] = defaultdict(BatchSet)
        self._committed: defaultdict[int, BatchSet] = defaultdict(BatchSet)
        self._returned: EpochRanges = ()
        self._last = NOTHING
        # Samples and weight of each open epoch.
        self._captured: dict[int, tuple[int, float]] = {}
        self._brought: dict[int, tuple[int, float]] = {}
        self._num_committed = 0
        self.used = False

    def capture(self, share: SaveCheckpoint, ledger: ClusterLedger) -> CaptureDone:
        """What a capture says of the run since the last committed round, in open epochs."""
        done, kept, tallies = [], [], []
        self._returned = share.returned
        returned = dict(share.returned)
        self._captured = {}
        for state in share.run["epochs"]:
            epoch = int(state["epoch"])
            if epoch not in ledger.open_epochs:
                continue  # closed for all machines, and not yet evaluated here
            granted = self._granted[epoch]
            granted.remove(returned.get(epoch, ()))
            trained = BatchSet(range(start, stop) for start, stop in state["consumed"])
            rest = BatchSet(granted.spans)
            rest.remove(trained.spans)
            trained.remove(self._committed[epoch].spans)
            done.append((epoch, trained.spans))
            if not share.final:
                kept.append((epoch, rest.spans))
            if state["tally"]["ranks"]:
                tallies.append((epoch, _tally(state)))
            ranks = state["tally"]["ranks"]
            samples = sum(int(rank["num_samples"]) for rank in ranks)
            self._captured[epoch] = samples, math.fsum(_total(r["loss_samples"]) for r in ranks)
        news = [
            (samples - before[0], weight - before[1])
            for epoch, (samples, weight) in self._captured.items()
            for before in (self._brought.get(epoch, (0, 0.0)),)
        ]
        self._last = CaptureDone(
            done=normalize(done),
            kept=normalize(kept),
            weight=max(0.0, math.fsum(weight for _, weight in news)),
            num_samples=max(0, sum(samples for samples, _ in news)),
            seconds_per_batch=_seconds_per_batch(share.run["elche"]["seconds"]),
            tallies=tuple(tallies),
        )
        return self._last

    def resume(self) -> tuple[EpochGrant, ...]:
        """The round failed: what was given back is granted again."""
        returned, self._returned = self._returned, ()
        for epoch, spans in returned:
            self._granted[epoch].put_back(spans)
        self._last = NOTHING
        return tuple(EpochGrant(epoch=epoch, batches=spans) for epoch, spans in returned)

    def commit(self, grant: Grant, ledger: ClusterLedger) -> tuple[EpochGrant, ...]:
        """The round of the last capture is committed.

        Args:
            grant: What may be trained from here on, what is kept included.
            ledger: What all machines agree on now.

        Returns:
            What the run is to be told of the epochs that are open.
        """
        self.used = self.used or bool(len(grant))
        for epoch, spans in self._last.done:
            self._committed[epoch].put_back(spans)
            self._num_committed += sum(map(len, spans))
        self._brought, self._captured = self._captured or self._brought, {}
        kept, granted, told = dict(self._last.kept), dict(grant.batches), []
        for epoch in ledger.open_epochs:
            more = BatchSet(granted.get(epoch, ()))
            more.remove(kept.get(epoch, ()))
            self._granted[epoch].put_back(more.spans)
            consumed = sum(map(len, ledger.consumed_of(epoch)))
            elsewhere = consumed - len(self._committed[epoch])
            if more or elsewhere:
                told.append(EpochGrant(epoch=epoch, batches=more.spans, num_elsewhere=elsewhere))
        self._returned = ()
        self._last = NOTHING
        return tuple(told)

    def num_elsewhere(self, ledger: ClusterLedger) -> int:
        """Batches of the whole run that others have brought into the result."""
        return ledger.consumed - self._num_committed

    def close(
        self, closed: ClosedEpoch, *, num_batches: int, num_samples: int, own: str
    ) -> EpochGrant:
        """All batches of an epoch are in the result.

        Args:
            closed: The epoch.
            num_batches: Batches of an epoch.
            num_samples: Samples in them.
            own: The key of this run's tallies.
        """
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
    """The sums of each run of each machine in an epoch, but for one of them."""
    return tuple(
        MachineStats(
            machine=key.rpartition("/")[0],
            ranks=tuple(stats["ranks"]),
            num_retrained=int(stats["num_retrained"]),
        )
        for key, stats in sorted(closed.tallies.items())
        if key != without
    )


def _tally(state: Mapping[str, Any]) -> dict[str, Any]:
    """Of an epoch's captured state what metrics are made of."""
    return {"ranks": state["tally"]["ranks"], "num_retrained": state["num_retrained"]}


def _total(weight: Any) -> float:
    return math.fsum(weight) if isinstance(weight, list) else float(weight)


def _seconds_per_batch(seconds: Sequence[float]) -> float | None:
    """Of a machine whose ranks take so long each; ``None``: they are not measured."""
    speed = math.fsum(1 / s for s in seconds if s > 0)
    return 1 / speed if speed else None


def run_state(
    run: Mapping[str, Any], ledger: ClusterLedger, closed: Sequence[EpochMetrics]
) -> dict[str, Any]:
    """The state from which a machine's coordinator goes on with what all machines have.

    Args:
        run: Of this machine, from its last capture.
        ledger: What all agree on.
        closed: Metrics of the closed epochs.
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
            "parts": None,
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
