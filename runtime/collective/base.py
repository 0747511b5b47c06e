"""The interface of a group of ranks, and the checks that every implementation makes."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from runtime.collective.barrier import Rendezvous
from runtime.timeline.events import AVERAGING, SYNC

if TYPE_CHECKING:
    from runtime.timeline.rank_lane import RankLane

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
FLOATS = LOW_PRECISION | {torch.float32, torch.float64}
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

# Sums of any number of ranks stay finite.
_MAX_WEIGHT = 1e300

CLOSE_TIMEOUT_S = 5.0
"""Longest wait for the threads of closed groups to end."""


@unique
class ReduceOp(Enum):
    """A reduction over the ranks. ``AVG`` supports floating point only."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"
    MIN = "min"


class Collective(ABC):
    """One rank's end of a group whose ranks are threads of one process.

    Each rank has its own object and calls it from its own thread; :meth:`abort` and
    :meth:`check` may be called from any thread. Every rank must call the same methods in
    the same order. All of them block until the result is available (at most ``timeout_s`` for
    peers to arrive, and for a process group as long again for the exchange).

    Tensors are contiguous (``ValueError`` otherwise), and no two ranks' tensors may share
    memory. Results that are equal on all ranks have the same bits there. float16 and bfloat16
    are summed in float32, float64 in float64; ``MAX`` and ``MIN`` propagate NaN.

    Arguments are checked when all ranks have arrived: if one rank's are invalid or differ from
    the others', *every* rank raises ``ValueError``, nothing is written, and the group stays
    usable. After :class:`~runtime.core.errors.CollectiveAborted`,
    :class:`~runtime.core.errors.CollectiveTimeout` or any other exception the output tensors
    are undefined and no longer written to, and the group is aborted permanently.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        kind: The kind; see :func:`~runtime.collective.create_collectives`.
        can_hang: True if an exchange may never end, although every rank has arrived.
        host_runs_ahead: True if ``BucketedMean.end_async`` lets only the device wait.
        lane: Records the rank's waits for the others; ``None``: they are not recorded.
        tally: Sum of the ranks' tallies in the last collective.
        coalesced_bytes: Limit of one meeting of a coalesced collective, a larger tensor aside.
    """

    kind: str
    can_hang: bool = True
    coalesced_bytes: float = math.inf
    host_runs_ahead: bool = False
    lane: RankLane | None = None
    tally: float = 0.0
    _tallies: tuple[float, ...] = ()

    def __init__(self, rank: int, world_size: int, group: Group) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group
        self._closed = False

    def all_reduce_(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        """Reduces a tensor over all ranks, in place; integers (no bool) or floats."""
        self._run(Request("all_reduce_", (tensor,), op))

    def all_reduce_coalesced_(
        self, tensors: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM, *, tally: float = 0.0
    ) -> None:
        """:meth:`all_reduce_` of each tensor, in one meeting of the ranks and with one wait.

        Args:
            tensors: As many on every rank; their shapes and dtypes may differ.
            op: The reduction.
            tally: Any number; the sum over the ranks is in ``tally`` afterwards.
        """
        self._run_coalesced("all_reduce_", [(tensor,) for tensor in tensors], op, tally)

    def weighted_mean_(
        self, tensors: Sequence[Tensor], weight: float, *, tally: float = 0.0
    ) -> float:
        """Replaces floating-point tensors by their weighted mean over all ranks.

        Args:
            tensors: A list or tuple, of the same shapes and dtypes on every rank.
            weight: This rank's weight, finite and not negative. The values of a rank with
                weight 0 are never used, NaN included; it receives the mean like the others.
            tally: Any number; the sum over the ranks is in ``tally`` afterwards.

        Returns:
            The sum of the weights. If it is 0 all tensors are unchanged.
        """
        return self._run(Request("weighted_mean_", tensors, None, weight, tally))

    def bucketed_mean(self, weight: float, *, tally: float = 0.0) -> BucketedMean:
        """:meth:`weighted_mean_` of tensors that become ready one after the other.

        The ranks use the group for nothing else until all have ended it. A rank that cannot end it
        calls :meth:`abort`; the tensors added so far must then not be used again.
        """
        return BucketedMean(self, weight, tally)

    def mean_in_parts(self, *args: object, **kwargs: object) -> NoReturn:
        """Removed: use :meth:`bucketed_mean`."""
        raise AttributeError("Collective.mean_in_parts was removed: use bucketed_mean")

    def broadcast_(self, tensor: Tensor, src: int = 0) -> None:
        """Copies rank ``src``'s tensor of any dtype to every rank, in place."""
        self._run(Request("broadcast_", (tensor,), src))

    def all_gather_into(self, output: Tensor, input: Tensor) -> None:
        """Writes every rank's ``input``, in order of rank, to ``output``.

        Args:
            output: ``world_size * input.numel()`` elements.
            input: Any dtype, the same size on every rank. It may be this rank's part of
                ``output``, and may not overlap it otherwise.
        """
        self._run(Request("all_gather_into", (output, input)))

    def all_gather_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """:meth:`all_gather_into` of each pair, in one meeting of the ranks and with one wait.

        Args:
            outputs: As many on every rank.
            inputs: One for each output.
        """
        self._run_coalesced("all_gather_into", list(zip_longest(outputs, inputs)))

    def reduce_scatter_into(
        self, output: Tensor, input: Tensor, op: ReduceOp = ReduceOp.SUM
    ) -> None:
        """Reduces ``input`` over all ranks and writes this rank's part to ``output``.

        Args:
            output: ``input.numel() / world_size`` elements. It may be this rank's part of
                ``input``, and may not overlap it otherwise.
            input: Unchanged; integers (no bool) or floats.
            op: The reduction.
        """
        self._run(Request("reduce_scatter_into", (output, input), op))

    def reduce_scatter_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        op: ReduceOp = ReduceOp.SUM,
        *,
        tally: float = 0.0,
    ) -> None:
        """:meth:`reduce_scatter_into` of each pair, in one meeting of the ranks and with one wait.

        Args:
            outputs: As many on every rank.
            inputs: One for each output.
            op: The reduction.
            tally: Any number; the sum over the ranks is in ``tally`` afterwards.
        """
        self._run_coalesced("reduce_scatter_into", list(zip_longest(outputs, inputs)), op, tally)

    def all_gather_number(self, number: float) -> tuple[float, ...]:
        """Returns every rank's number, in order of rank; uses no device."""
        self._run(Request("all_gather_number", tally=number))
        return self._tallies

    def tell(self, *args: object, **kwargs: object) -> NoReturn:
        """Removed: use :meth:`all_gather_number`."""
        raise AttributeError("Collective.tell was removed: use all_gather_number")

    def all_gather_num_rows(self, num_rows: int, call: str) -> tuple[float, ...]:
        """Like :meth:`all_gather_number`, before an ``all_gather`` of rows in a step.

        Args:
            num_rows: Number of rows of this rank.
            call: Describes the call and its rows; must be the same on every rank.
        """
        self._run(Request(_ROWS, detail=call, tally=num_rows))
        return self._tallies

    def agree(self, subject: str, *, capable: bool = True, **properties: object) -> bool:
        """Check on the host that properties which decide the sequence of calls equal those of
        the other ranks.

        Exchanges require the same calls on every rank; call this before the first of them.

        Args:
            subject: Subject of the agreement, for the error.
            capable: True if this rank has the optional capability.
            properties: Must have the same values on every rank.

        Returns:
            True if every rank is capable.

        Raises:
            ValueError: Values differ; the message contains those of two ranks. Raised on every
                rank.
        """
        described = ", ".join(f"{name}={value!r}" for name, value in properties.items())
        self._run(Request("agree", detail=f"{subject} {described}", tally=capable))
        return all(self._tallies)

    def barrier(self) -> None:
        """Blocks until every rank has arrived."""
        self._run(Request("barrier"))

    def abort(self) -> None:
        """Aborts the group permanently: ranks in a collective raise ``CollectiveAborted``.

        Idempotent. Ranks that wait for a peer wake at once; ranks inside the exchange of a
        process group return within ``timeout_s``.
        """
        self._group.barrier.abort(f"the group was aborted through rank {self.rank}")

    def check(self) -> None:
        """Raises ``CollectiveAborted`` if the group was aborted; closed peers do not count."""
        self._group.require_intact()

    def close(self) -> None:
        """Leaves the group and frees this rank's resources. Idempotent.

        Called by the rank's own thread, or once that thread no longer uses the group. Peers
        that start a collective later, or wait in one for this rank, raise
        ``CollectiveAborted``; collectives that every rank has joined complete.
        """
        if not self._closed:
            self._closed = True
            self._group.barrier.leave(self.rank)
            self._release()

    def _run_coalesced(
        self,
        name: str,
        rows: Sequence[tuple[Tensor, ...]],
        op: ReduceOp | None = None,
        tally: float = 0.0,
    ) -> None:
        """Runs one operation for each row of tensors, several in one request."""
        request: list[Tensor] = []
        num_bytes = 0
        for row in rows:
            row_bytes = max(t.nbytes if isinstance(t, Tensor) else 0 for t in row)
            if request and num_bytes + row_bytes > self.coalesced_bytes:
                self._run(Request(name, tuple(request), op))
                request, num_bytes = [], 0
            request.extend(row)
            num_bytes += row_bytes
        self._run(Request(name, tuple(request), op, tally=tally))

    def _run(self, request: Request) -> float:
        """Runs a collective. Returns the sum of the weights."""
        group = self._group
        meeting = None if self.lane is None else Meeting(self.lane)
        on_wait = None if meeting is None else meeting.waits
        try:
            plan = group.meet(self.rank, request, self._plan, on_wait)
            if plan.fault is None and not plan.done:
                if meeting is not None:
                    meeting.met(is_long=plan.is_long or self.can_hang)
                self._take_part(request, plan)
        except BaseException as error:
            group.fail(error)
            raise
        finally:
            group.slots[self.rank] = None  # keep no tensor alive
            if meeting is not None:
                meeting.over()
        if plan.fault is not None:
            raise ValueError(plan.fault)
        self.tally, self._tallies = plan.tally, plan.tallies
        return plan.total

    def _plan(self, requests: Sequence[Request]) -> Plan:
        """Makes the plan; runs on the last rank to arrive, while all others wait."""
        fault = find_fault(requests, self._placement_fault)
        return self._plan_valid(requests) if fault is None else Plan(fault=fault)

    def _plan_valid(self, requests: Sequence[Request]) -> Plan:
        first = requests[0]
        if first.name in ("all_gather_number", "agree", _ROWS):
            return Plan(tallies=tuple(request.tally for request in requests))
        num_elements = max([sum([t.numel() for t in request.tensors]) for request in requests])
        tally = float(sum([request.tally for request in requests]))
        if first.name not in MEANS:
            return Plan(done=num_elements == 0, is_long=num_elements >= LONG, tally=tally)
        weights = [request.weight for request in requests]
        total = float(sum(weights))
        if total == 0 or num_elements == 0:
            return Plan(total=total, tally=tally)
        factors = tuple([weight / total for weight in weights])
        is_long = num_elements >= LONG
        return Plan(done=False, total=total, factors=factors, is_long=is_long, tally=tally)

    @abstractmethod
    def _placement_fault(self, tensor: Tensor) -> str | None:
        """Returns an error if the group does not support a tensor's device."""

    @abstractmethod
    def _take_part(self, request: Request, plan: Plan) -> None:
        """Executes this rank's part of a plan. If it raises, the group is aborted."""

    def _new_shared(self, members: Sequence[int], group: Group) -> Any:
        """Objects that the ranks of a new subgroup share, in addition to ``group``.

        Runs on the last rank to arrive, while all others wait.

        Args:
            members: Their ranks in this group.
            group: Their rendezvous.
        """
        return None

    def _join_subgroup(self, rank: int, group: Group, shared: Any) -> Collective:
        """Connects this rank to the others of a new subgroup, which do the same in their threads.

        Args:
            rank: Its rank in the subgroup.
            group: The rendezvous.
            shared: The result of :meth:`_new_shared`.
        """
        raise TypeError(f"{type(self).__name__} cannot be split; use create_collectives")

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until the threads of a closed collective have ended, which requires that its peers
        are closed, too; returns False on timeout.
        """
        return True

    def _release(self) -> None:
        return


def close_collectives(collectives: Iterable[Collective]) -> None:
    """Close all ranks' collectives of some groups, and wait until their threads have ended.

    Blocks for at most ``CLOSE_TIMEOUT_S``, if a rank that is not included stays open.
    """
    closed = list(collectives)
    for collective in closed:
        collective.close()
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    for collective in closed:
        collective.wait_closed(max(0.0, deadline - time.monotonic()))


class CollectiveWork(ABC):
    """An asynchronous exchange, like ``torch.distributed.Work``. For the rank's own thread."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """True if it is over, with or without success; queries the device and does not wait."""

    @abstractmethod
    def wait(self) -> None:
        """Block until it is over. A group that is aborted ends all its exchanges.

        Raises:
            CollectiveAborted, CollectiveTimeout: Its results are undefined. Every later
                exchange of the group ends in the same way.
        """


class BucketedMean:
    """A weighted mean over all ranks whose tensors are added bucket by bucket.

    Every rank adds the same buckets in the same order, then calls :meth:`end`, which exchanges
    them all; over a process group each bucket is sent as soon as it is added.

    Args:
        collective: This rank's end of the group.
        weight: This rank's weight, finite and not negative.
        tally: Any number; the sum over the ranks is in the collective's ``tally`` at the end.
    """

    def __init__(self, collective: Collective, weight: float, tally: float) -> None:
        self._collective = collective
        self._weight = weight
        self._tally = tally
        self._parts: list[Tensor] = []

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Add tensors, to be replaced by the mean; they must not be used until the end.

        May block until the other ranks have added theirs.
        """
        self._parts.extend(tensors)

    def end(self) -> float:
        """Wait until the buckets hold the mean.

        Returns:
            The sum of the weights. If it is 0 all tensors are unchanged.
        """
        parts, self._parts = self._parts, []
        return self._collective.weighted_mean_(parts, self._weight, tally=self._tally)

    def end_async(self, abort_flag: Tensor) -> tuple[float, CollectiveWork | None]:
        """Like :meth:`end`, but only the device waits if the collective ``host_runs_ahead``.

        Later work on the current stream reads the mean from the buckets, or garbage if the group
        was aborted; ``abort_flag`` distinguishes the two.

        Args:
            abort_flag: A float32 scalar on the device, set to 0 after an exchange that
                succeeded, to 1 after one that may have failed.

        Returns:
            The sum of the weights, and the pending completion; ``None``: it has succeeded.
        """
        return self.end(), None


class Meeting:
    """Records one collective on a rank's lane, and restores the lane's cause at its end.

    Recording takes time, and every rank waits for the last one to arrive. So the last rank
    records nothing before it continues, the others record while they wait, and a short
    exchange is recorded when it is over.
    """

    __slots__ = ("_before", "_exchanging", "_lane", "_start")

    def __init__(self, lane: RankLane) -> None:
        self._lane = lane
        self._before = lane.cause
        self._start = time.monotonic()
        # The last rank to arrive makes the plan, and may execute it at once.
        self._exchanging: float | None = self._start

    def waits(self) -> None:
        """The others have not arrived yet."""
        self._lane.enter(SYNC, self._start)
        self._exchanging = None

    def met(self, *, is_long: bool) -> None:
        """All ranks have arrived, and the exchange begins."""
        if is_long:
            self._lane.enter(AVERAGING)
            self._exchanging = None
        elif self._exchanging is None:
            self._exchanging = time.monotonic()

    def over(self) -> None:
        """The collective is over, with or without success."""
        if self._exchanging is None:
            self._lane.enter(self._before)
        else:
            self._lane.record_interval(AVERAGING, self._exchanging, self._before)


class RegisteredTensors(tuple[Tensor, ...]):
    """Tensors that a rank passes to many calls: checked once, and kept by the group until the next.

    They keep their memory, shapes and dtypes.
    """


class Request(NamedTuple):
    """One rank's call of a collective.

    Attributes:
        name: The method called.
        tensors: Tensors to reduce, or ``(output, input, output, input, ...)``.
        detail: The reduction, the source rank, or a value that is equal on all ranks.
        weight: Weight of this rank's tensors.
        tally: A number that is summed over the ranks.
        staged: This rank's part of the exchange, prepared before the ranks meet, if any.
    """

    name: str
    tensors: Sequence[Tensor] = ()
    detail: ReduceOp | int | str | None = None
    weight: float = 1.0
    tally: float = 0.0
    staged: Any = None


LONG = 2**20
"""Minimum number of elements of an exchange that is recorded when it begins."""


@dataclass(slots=True)  # not frozen: that costs as much as the rest of a small plan
class Plan:
    """The outcome of a meeting, made by the last rank to arrive; the same for all ranks.

    Attributes:
        done: True if nothing is left to do.
        total: Sum of the weights.
        factors: Each rank's share of the mean; ``None``: a plain reduction.
        is_long: True if the exchange is recorded when it begins.
        tally: Sum of the ranks' tallies.
        tallies: Each rank's tally, in a collective that returns them.
    """

    fault: str | None = None
    done: bool = True
    total: float = 0.0
    factors: tuple[float, ...] | None = None
    is_long: bool = False
    tally: float = 0.0
    tallies: tuple[float, ...] = ()


Group = Rendezvous[Request, Plan]

BUCKETED_MEAN = "bucketed_mean"
MEANS = ("weighted_mean_", BUCKETED_MEAN)
_ROWS = "all_gather"
_ROWS_REMEDY = (
    "; in train_fn, all ranks that have a batch call all_gather equally often, in the same order, "
    "and with tensors that differ in their first dimension alone"
)


def find_fault(
    requests: Sequence[Request], placement_fault: Callable[[Tensor], str | None]
) -> str | None:
    """Returns the first error in the ranks' requests, with the rank; ``None``: all are valid.

    Args:
        requests: One for each rank, in order.
        placement_fault: Returns an error if the group does not support a tensor's device.
    """
    first = requests[0]
    for rank, request in enumerate(requests):
        if request.name != first.name:
            remedy = ": all ranks have to make the same calls in the same order"
            if _ROWS in (request.name, first.name):
                remedy = _ROWS_REMEDY
            return f"rank {rank} called {request.name}, rank 0 called {first.name}{remedy}"
        fault = own_fault(request, len(requests), placement_fault)
        if fault is None and rank > 0:
            fault = _difference(request, first)
        if fault is not None:
            return f"{request.name}: rank {rank} {fault}"
    return None


def own_fault(
    request: Request, world_size: int, placement_fault: Callable[[Tensor], str | None]
) -> str | None:
    """Returns the first error in one rank's own request; ``None``: it is valid."""
    name, tensors, detail, weight, *_ = request
    if not isinstance(tensors, (tuple, list)):
        return f"passed a {type(tensors).__name__}; pass a list of tensors"
    allowed = _allowed_dtypes(name, detail)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            return f"passed a {type(tensor).__name__} instead of a tensor"
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            return "passed a tensor that is not contiguous; pass tensor.contiguous() or a flat view"
        if (fault := placement_fault(tensor)) is not None:
            return fault
        if allowed is not None and tensor.dtype not in allowed:
            return f"passed a {tensor.dtype} tensor, which {_describe(detail)} does not support"
    if name == "broadcast_" and not (isinstance(detail, int) and 0 <= detail < world_size):
        return f"passed src={detail!r}; pass a rank from 0 to {world_size - 1}"
    if name in ("all_reduce_", "reduce_scatter_into") and not isinstance(detail, ReduceOp):
        return f"passed op={detail!r}; pass a ReduceOp"
    if not is_weight(weight):
        return f"passed the weight {weight!r}; pass a finite number, not negative"
    if name in ("all_gather_into", "reduce_scatter_into"):
        return _size_fault(name, tensors, world_size)
    return None


def is_weight(weight: object) -> bool:
    """True for a valid weight of a rank."""
    return isinstance(weight, (int, float)) and 0 <= weight < _MAX_WEIGHT


def _allowed_dtypes(name: str, detail: object) -> frozenset[torch.dtype] | None:
    if name in MEANS or detail is ReduceOp.AVG:
        return FLOATS
    return FLOATS | INTEGERS if isinstance(detail, ReduceOp) else None


def _describe(detail: object) -> str:
    return f"ReduceOp.{detail.name}" if isinstance(detail, ReduceOp) else "a weighted mean"


def _size_fault(name: str, tensors: Sequence[Tensor], world_size: int) -> str | None:
    for output, input in pairs_of(tensors):
        if output.dtype != input.dtype:
            return f"passed a {output.dtype} output for a {input.dtype} input; pass one dtype"
        whole, part = (output, input) if name == "all_gather_into" else (input, output)
        if whole.numel() != world_size * part.numel():
            return (
                f"passed an output of {output.numel()} and an input of {input.numel()} elements; "
                f"the {'output' if whole is output else 'input'} must hold {world_size} times as "
                "many"
            )
    return None


def pairs_of(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """``(output, input)`` of each all-gather or reduce-scatter in a request."""
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _difference(request: Request, first: Request) -> str | None:
    if request.detail != first.detail:
        remedy = _ROWS_REMEDY if request.name == _ROWS else ""
        return f"passed {request.detail!r}, rank 0 passed {first.detail!r}{remedy}"
    if len(request.tensors) != len(first.tensors):
        return f"passed {len(request.tensors)} tensors, rank 0 passed {len(first.tensors)}"
    for index, (mine, theirs) in enumerate(zip(request.tensors, first.tensors, strict=True)):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return (
                f"passed shape {tuple(mine.shape)} {mine.dtype} as tensor {index}, "
                f"rank 0 passed shape {tuple(theirs.shape)} {theirs.dtype}"
            )
    return None
