"""This machine's part of a round: what its run has trained, and the tensors that travel."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coordinator.cluster.deal import Grant
from coordinator.cluster.facts import EpochRanges, normalize
from coordinator.cluster.ledger import ClosedEpoch, ClusterLedger
from coordinator.cluster.member import CaptureDone
from coordinator.messages import EpochGrant, Payload, SaveCheckpoint
from coordinator.metrics import EpochMetrics, EpochTally, MachineTally, metrics_state
from coordinator.splitting import BatchSet

_PARTS = ("params", "buffers", "taken")
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


def machine_tallies(closed: ClosedEpoch, *, without: str = "") -> tuple[MachineTally, ...]:
    """The sums of each run of each machine in an epoch, but for one of them."""
    return tuple(
        MachineTally(
            machine=key.rpartition("/")[0],
            ranks=tuple(tally["ranks"]),
            num_retrained=int(tally["num_retrained"]),
        )
        for key, tally in sorted(closed.tallies.items())
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


def on_the_wire(t: Tensor) -> Tensor:
    """A tensor as it is summed between machines: real, contiguous, float32 or better."""
    real = torch.view_as_real(t) if t.is_complex() else t
    if real.dtype in (torch.float32, torch.float64):
        return real.contiguous()
    return real.to(torch.float32 if real.is_floating_point() else torch.float64)


def from_the_wire(summed: Tensor, like: Tensor) -> Tensor:
    """The opposite of :func:`on_the_wire`, for a tensor like this one."""
    if like.is_complex():
        return torch.view_as_complex(summed).to(like.dtype)
    if like.is_floating_point():
        return summed.to(like.dtype)
    return summed.round().to(like.dtype)


def contribution(
    state: Payload, own: Payload | None, scale: float, *, heaviest: bool
) -> list[Tensor]:
    """What this machine adds to the sums of a round.

    Args:
        state: The global state.
        own: This machine's average; ``None``: it has trained nothing.
        scale: Its part of the weights.
        heaviest: Whether the buffers that are not averaged are its own.

    Returns:
        Tensors to be summed: what it has taken from the parameters and float buffers, and the
        other buffers or zeros.
    """
    parts: list[Tensor] = []
    for name in ("params", "buffers"):
        flats = getattr(state, name)
        mine = flats if own is None else getattr(own, name)
        pairs = zip(flats, mine, strict=True)
        parts += [on_the_wire(g).sub(on_the_wire(s)).mul_(scale) for g, s in pairs]
    taken = state.taken if own is None else own.taken
    return parts + [on_the_wire(t).mul(1.0 if heaviest else 0.0) for t in taken]


def split(tensors: Sequence[Tensor], state: Payload) -> tuple[list[Tensor], ...]:
    """Summed tensors by the parts of a payload: parameters, buffers, others."""
    rest, found = list(tensors), []
    for name in _PARTS:
        count = len(getattr(state, name))
        found.append(rest[:count])
        rest = rest[count:]
    return tuple(found)


def difference(new: Payload, old: Payload) -> Payload:
    """``new - old``, and the new values of the buffers that are not averaged."""

    def minus(name: str) -> tuple[Tensor, ...]:
        pairs = zip(getattr(new, name), getattr(old, name), strict=True)
        return tuple(n - o for n, o in pairs)

    return Payload(params=minus("params"), buffers=minus("buffers"), taken=new.taken)


def to_tensors(state: Payload, outer: Iterable[Tensor]) -> dict[str, Tensor]:
    """What heals a machine, by name."""
    found = {f"{name}.{i}": t for name in _PARTS for i, t in enumerate(getattr(state, name))}
    return found | {f"outer.{i}": t for i, t in enumerate(outer)}


def from_tensors(tensors: Mapping[str, Tensor], like: Payload) -> tuple[Payload, list[Tensor]]:
    """The state and the outer optimizer's of what :func:`to_tensors` gave.

    Raises:
        ValueError: They are not those of this model; names the first that differs.
    """
    parts: dict[str, tuple[Tensor, ...]] = {}
    for name in _PARTS:
        found = []
        for i, own in enumerate(getattr(like, name)):
            t = tensors.get(f"{name}.{i}")
            if t is None or t.shape != own.shape or t.dtype != own.dtype:
                raise ValueError(f"the state received has another {name}.{i} than this model")
            found.append(t)
        parts[name] = tuple(found)
    num_outer = sum(key.startswith("outer.") for key in tensors)
    try:
        return Payload(**parts), [tensors[f"outer.{i}"] for i in range(num_outer)]
    except KeyError as error:
        raise ValueError(f"the state received has no tensor {error}") from error


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
    nothing = EpochTally(int(run["world_size"])).state_dict()
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
