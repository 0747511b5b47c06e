"""Real replicas in the simulation: small tensors, averaged by the code of real runs.

A replica has a number for each batch of the run, which only training that batch changes, and
buffers that do the same. What the numbers must be is known without tensors: a batch counts 1
where it was trained, and, once a round has taken it, its rank's share in that round, once.

Only the meeting of a collective is a double: the ranks of a simulation are no threads, so that
each computes the result of all contributions itself when it leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from coordinator import messages as m
from runtime.collective.barrier import Rendezvous
from runtime.collective.base import Request
from runtime.collective.thread import ThreadCollective
from runtime.core.errors import CollectiveAborted
from runtime.device.base import Device
from runtime.replica.averager import ReplicaAverager
from runtime.replica.flat import FlatState
from tests.simulation.effects import Batch, Traced, Violation

TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Effects:
    """The expected state: the effect of each batch, and the number of its trainings by its lead.

    Attributes:
        shares: Float64, one for each batch: 1 if trained by nobody else.
        counts: Int64: buffers that are taken from the rank with most samples.
    """

    shares: Tensor
    counts: Tensor

    def plus(self, places: Sequence[int], share: float = 1.0) -> Effects:
        """These effects with some batches added."""
        shares, counts = self.shares.clone(), self.counts.clone()
        for place in places:
            shares[place] += share
            counts[place] += 1
        return Effects(shares, counts)


def average_effects(
    parts: Sequence[Effects],
    weights: Sequence[float],
    local: Sequence[Sequence[int]],
    base: Effects,
) -> Effects:
    """The effects of an average, weighted by rank.

    Args:
        parts: The state of each rank.
        weights: Of what each has trained.
        local: The batches that each has trained since the last average.
        base: That average, the same on all ranks.
    """
    total = sum(weights)
    shares = base.shares.clone()
    for places, weight in zip(local, weights, strict=True):
        for place in places:
            shares[place] += weight / total
    heaviest = weights.index(max(weights))
    return Effects(shares, parts[heaviest].counts if total else base.counts)


class Model(nn.Module):
    """A number for each batch, four times."""

    mean: Tensor
    count: Tensor
    odd: Tensor

    def __init__(self, num_batches: int) -> None:
        super().__init__()
        self.effects = nn.Parameter(torch.zeros(num_batches, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(num_batches, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(num_batches, dtype=torch.int64))
        self.register_buffer("odd", torch.zeros(num_batches, dtype=torch.bool))


@dataclass(frozen=True, slots=True)
class Contribution:
    """A rank's contribution to a collective."""

    reals: tuple[Tensor, ...]
    others: tuple[Tensor, ...]
    weight: float


class Meeting(ThreadCollective):
    """A rank's end of a collective to which all others have already contributed.

    Args:
        rank: The rank's place among those that meet.
        brought: The contribution of each.
        error: The reason if they never met.
        torn: True if the group breaks before the rank has its result.
    """

    def __init__(
        self,
        rank: int,
        brought: Sequence[Contribution],
        error: BaseException | None = None,
        torn: bool = False,
    ) -> None:
        super().__init__(rank, len(brought), Rendezvous(len(brought), 1.0))
        self._contributions = brought
        self._error = error
        self._torn = torn
        self._num_broadcasts = 0

    def _run(self, request: Request) -> float:
        if self._error is not None:
            raise self._error
        requests = [self._of_peer(peer, request) for peer in self._contributions]
        requests[self.rank] = request
        self._num_broadcasts += request.name == "broadcast_"
        plan = self._plan(requests)  # the rank that makes the plan reduces tensors this small
        assert plan.done
        if plan.fault is not None:
            raise ValueError(plan.fault)
        self._tallies = plan.tallies
        return plan.total

    def _of_peer(self, peer: Contribution, mine: Request) -> Request:
        """The matching request of a peer."""
        match mine.name:
            case "barrier":
                return mine
            case "weighted_mean_":
                return mine._replace(tensors=[t.clone() for t in peer.reals], weight=peer.weight)
            case "all_gather_number":
                return mine._replace(tally=peer.weight)
            case "broadcast_":
                return mine._replace(tensors=(peer.others[self._num_broadcasts].clone(),))
        raise AssertionError(f"a round calls {mine.name}")

    def check(self) -> None:
        if self._torn:
            raise CollectiveAborted("aborted")


class Replica:
    """A rank's tensors and their expected values.

    Attributes:
        held: Expected value of the average that it started from.
        seen: Counts of events.
    """

    def __init__(self, place_of: Callable[[Batch], int], num_batches: int, *, rounds: bool) -> None:
        self.model = Model(num_batches)
        self._state = FlatState(self.model)
        self._averager = ReplicaAverager(self._state, Device(1), None)
        self._place_of = place_of
        self._rounds_meet = rounds
        zeros = torch.zeros(num_batches, dtype=torch.float64)
        self.held = Effects(zeros, zeros.long())
        self.seen: Counter[str] = Counter()

    def places(self, batches: Sequence[Batch]) -> list[int]:
        return [self._place_of(batch) for batch in batches]

    @torch.no_grad()
    def train(self, batch: Batch) -> None:
        """A step."""
        place = self._place_of(batch)
        self.model.effects[place] += 1
        self.model.mean[place] += 1
        self.model.count[place] += 1
        self.model.odd[place] ^= True

    def expect(self, local: Sequence[Batch], when: str) -> None:
        """Check that the live state is the last average and the training since."""
        self.seen[when] += 1
        wanted = self.held.plus(self.places(local))
        model = self.model
        _compare(when, wanted, model.effects, model.mean, model.count)
        # Over the CPU flags stay where they are.
        if self._rounds_meet and not torch.equal(model.odd, wanted.counts % 2 == 1):
            raise Violation(f"{when}: flags are {model.odd.tolist()}, counts {wanted.counts}")

    # -- over the CPU ------------------------------------------------------------------

    def snapshot(self, traced: Traced) -> Traced:
        """A snapshot for a round."""
        payload, _, squares = self._averager.start_snapshot()
        return self._with(traced, payload, squares)

    def copy(self, traced: Traced, *, last: bool = False) -> Traced:
        """A snapshot outside of rounds."""
        averager = self._averager
        payload = averager.last_snapshot() if last else averager.snapshot(reuse=False)
        return self._with(traced, payload, None)

    def _with(
        self, traced: Traced, payload: m.Payload, squares: tuple[float, ...] | None
    ) -> Traced:
        return replace(
            traced,
            params=payload.params,
            buffers=payload.buffers,
            other_buffers=payload.other_buffers,
            squares=squares,
            held=self.held,
            places=tuple(self.places(traced.local)),
        )

    def take(self, average: Traced, *, wanted: bool) -> None:
        """Apply the average.

        Args:
            average: The average.
            wanted: True if the user's functions are to see it.
        """

        def meanwhile() -> None:
            self.seen["shown"] += 1
            _compare("shown", average.held, self.model.effects, self.model.mean, self.model.count)

        self._averager.apply(average, meanwhile if wanted else None)
        self.held = average.held

    # -- over a collective ---------------------------------------------------------------

    def bring(self, weight: float) -> Contribution:
        """The rank's present contribution to a round."""
        floats, others = self._state.buffers.empty()
        self._state.buffers.read_into(floats, others)
        reals = [*self._state.params.flats, *floats]
        return Contribution(tuple(t.detach().clone() for t in reals), others, weight)

    def meet(self, meeting: Meeting, weight: float) -> None:
        """Join a round; raises like a real one if it fails."""
        self._averager.collective = meeting
        self._averager.all_reduce(weight)

    def undo(self) -> None:
        """Undo the round."""
        self._averager.undo_all_reduce()


def expect_payload(payload: Traced, what: str) -> None:
    """Check the values of a payload."""
    wanted = payload.held.plus(payload.places)
    size = len(wanted.shares)
    (effects,), (mean,) = payload.params, payload.buffers
    count = next(t for t in payload.other_buffers if t.dtype is torch.int64)
    _compare(what, wanted, effects[:size], mean, count)


def _compare(when: str, wanted: Effects, effects: Tensor, mean: Tensor, count: Tensor) -> None:
    for name, found in (("parameters", effects), ("buffers", mean)):
        off = (found.detach() - wanted.shares).abs()
        if not bool((off < TOLERANCE).all()):
            raise Violation(
                f"{when}: effects in {name} are {found.tolist()}, not {wanted.shares.tolist()}"
            )
    if not torch.equal(count, wanted.counts):
        raise Violation(f"{when}: counts are {count.tolist()}, not {wanted.counts.tolist()}")
