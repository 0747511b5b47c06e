"""The interface of a group of ranks, what every implementation checks, and where ranks meet."""

from __future__ import annotations

import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from runtime.core.errors import CollectiveAborted, CollectiveTimeout
from runtime.device import capture_gate
from runtime.timeline.events import AVERAGING, SYNC

_LEAST_EXTENSION_S = 0.01

RequestT = TypeVar("RequestT")
PlanT = TypeVar("PlanT")


class AbortableBarrier:
    """A reusable barrier that any thread can break for good.

    Each rank sleeps on a lock of its own and the last to arrive opens them all, so a
    meeting costs each rank one wake-up. A rank whose meeting was complete returns from
    it normally, even if the barrier is broken before it gets to run.

    Attributes:
        parties: How many ranks meet.
    """

    def __init__(self, parties: int) -> None:
        if parties < 1:
            raise ValueError(f"a barrier needs at least one party, not {parties}")
        self.parties = parties
        self._mutex = threading.Lock()
        self._turnstiles = [threading.Lock() for _ in range(parties)]
        for turnstile in self._turnstiles:
            turnstile.acquire()
        self._waiting: list[int] = []
        self._cut: set[int] = set()
        self._aborted = False
        self._refusal: str | None = None
        self._linked: list[tuple[weakref.ref[AbortableBarrier], tuple[int, ...]]] = []

    @property
    def aborted(self) -> bool:
        """Whether :meth:`abort` was called or a rank timed out."""
        return self._aborted

    def wait(
        self,
        rank: int,
        timeout_s: float,
        action: Callable[[], object] | None = None,
        on_wait: Callable[[], object] | None = None,
    ) -> None:
        """Blocks until every rank is here.

        Args:
            rank: Who arrives; no rank may wait twice at the same time.
            timeout_s: How long to wait for the others, in seconds. Time in which a thread of the
                process captures a CUDA graph is not counted: captures are serial.
            action: Run by the last to arrive while the others still sleep, so it may
                touch what they own. If it raises, the barrier is aborted and the
                exception comes out of this rank's call.
            on_wait: Called by all others once the rank counts as arrived, so that it
                delays nobody; must not raise.

        Raises:
            CollectiveAborted: The barrier is broken, or was while this rank waited.
            CollectiveTimeout: The others did not come in time. The barrier is broken.
        """
        with self._mutex:
            self._refuse_if_broken()
            last = len(self._waiting) + 1 == self.parties
            if not last:
                self._waiting.append(rank)
        if last:
            self._complete(action)
        else:
            if on_wait is not None:
                on_wait()
            if not self._pass_turnstile(rank, timeout_s):
                self._time_out(rank, timeout_s)
        # Only ranks cut off by a break are in the set, and a break is for good.
        if self._cut and rank in self._cut:
            raise CollectiveAborted(str(self._refusal))

    def abort(self, reason: str = "the collective was aborted") -> None:
        """Wakes every waiting rank and refuses all to come. Idempotent, from any thread."""
        with self._mutex:
            self._aborted = True
            self._break(reason)
        self._abort_linked(reason)

    def leave(self, rank: int) -> None:
        """As :meth:`abort`, but an orderly end: :attr:`aborted` does not change."""
        with self._mutex:
            self._break(f"rank {rank} has left the group")
        for other, ranks in self._links():
            if rank in ranks:
                other.leave(ranks.index(rank))

    def link(self, other: AbortableBarrier, ranks: Sequence[int]) -> None:
        """Let another barrier, of some of the ranks here, break with this one.

        An abort of this one aborts it, a rank that leaves this one leaves it too. It breaks
        alone without an effect here, and is not kept alive.

        Args:
            other: Nobody has left it yet.
            ranks: Who its parties are here, in their order there.
        """
        with self._mutex:
            self._linked = [link for link in self._linked if link[0]() is not None]
            self._linked.append((weakref.ref(other), tuple(ranks)))
            aborted, reason = self._aborted, str(self._refusal)
        if aborted:
            other.abort(reason)

    def _pass_turnstile(self, rank: int, timeout_s: float) -> bool:
        """True once the turnstile is open; False at the limit, extended while graphs are captured.

        A capture that never ends is the supervisor's to notice, as any step that never ends.
        """
        captured_s = capture_gate.GATE.captured_s
        while not self._turnstiles[rank].acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            before, captured_s = captured_s, capture_gate.GATE.captured_s
            if captured_s == before:
                return False
            timeout_s = max(captured_s - before, _LEAST_EXTENSION_S)
        return True

    def _complete(self, action: Callable[[], object] | None) -> None:
        if action is not None:
            try:
                action()
            except BaseException as error:
                self.abort(f"a rank failed in a collective: {type(error).__name__}: {error}")
                raise
        with self._mutex:
            self._refuse_if_broken()  # broken while the action ran: the others were cut off
            for peer in self._waiting:
                self._turnstiles[peer].release()
            self._waiting.clear()

    def _time_out(self, rank: int, timeout_s: float) -> None:
        with self._mutex:
            # The last rank, or a break, may have opened the turnstile just now.
            if self._turnstiles[rank].acquire(blocking=False):
                return
            missing = sorted(set(range(self.parties)) - set(self._waiting))
            self._waiting.remove(rank)
            names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            reason = f"{names} did not join a collective within {timeout_s:g} s"
            self._aborted = True
            self._break(reason)
        self._abort_linked(reason)
        raise CollectiveTimeout(
            f"rank {rank} waited {timeout_s:g} s in a collective for {names}; the group is "
            "aborted. If a step can take that long, raise collective_timeout"
        )

    def _abort_linked(self, reason: str) -> None:
        # Never under the mutex: a linked barrier takes its own.
        for other, _ in self._links():
            other.abort(reason)

    def _links(self) -> list[tuple[AbortableBarrier, tuple[int, ...]]]:
        with self._mutex:
            linked = [(link(), ranks) for link, ranks in self._linked]
        return [(other, ranks) for other, ranks in linked if other is not None]

    def _refuse_if_broken(self) -> None:
        if self._refusal is not None:
            raise CollectiveAborted(self._refusal)

    def _break(self, reason: str) -> None:
        """Under the mutex. The first reason stands."""
        if self._refusal is None:
            self._refusal = reason
        self._cut.update(self._waiting)
        for peer in self._waiting:
            self._turnstiles[peer].release()
        self._waiting.clear()


class Rendezvous(Generic[RequestT, PlanT]):
    """What the ranks of one group share: a barrier, and a slot each to publish in.

    One slot for each rank is enough. A rank writes to its own only after the previous
    collective's last meeting, and peers read it only before they arrive there. Each rank is
    handed the plan before it is woken, and has taken it when it arrives at the next call.

    Attributes:
        barrier: The barrier of the group.
        timeout_s: How long a rank waits for the others at each meeting.
        slots: What each rank published for the collective in progress.
        writing: Held by a rank while it writes to its peers' tensors. It must call
            :meth:`go_on` once it holds its lock, and now and then after.
    """

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.barrier = AbortableBarrier(world_size)
        self.timeout_s = timeout_s
        self.slots: list[RequestT | None] = [None] * world_size
        self._plans: list[PlanT | None] = [None] * world_size
        self.writing = [threading.Lock() for _ in range(world_size)]

    def meet(
        self,
        rank: int,
        request: RequestT,
        planner: Callable[[Sequence[RequestT]], PlanT],
        on_wait: Callable[[], object] | None = None,
    ) -> PlanT:
        """Publishes a request; returns what the last rank to arrive made of all of them.

        Args:
            rank: Who arrives.
            request: What this rank wants.
            planner: Called once, by the last rank, with every rank's request in order.
            on_wait: Called by every other rank before it sleeps.

        Returns:
            The same plan on every rank.
        """

        planned = False

        def plan() -> None:
            nonlocal planned
            requests = self.requests()
            # A rank that an abort woke meanwhile has taken its own back.
            if len(requests) < self.barrier.parties:
                raise CollectiveAborted("the collective was aborted")
            self._plans[:] = [planner(requests)] * len(self._plans)
            planned = True

        self.slots[rank] = request
        try:
            self.barrier.wait(rank, self.timeout_s, plan, on_wait)
        except BaseException:
            if planned:  # for nobody: keep no tensor alive
                self._plans[:] = [None] * len(self._plans)
            raise
        made, self._plans[rank] = self._plans[rank], None
        if made is None:  # the rank that made it was interrupted as it opened the others' way
            raise CollectiveAborted("the collective was aborted")
        return made

    def part(self, rank: int) -> None:
        """The meeting that ends a collective: after it nobody touches this rank's tensors."""
        self.barrier.wait(rank, self.timeout_s)

    def requests(self) -> list[RequestT]:
        """Every rank's request; valid between the two meetings of a collective."""
        return [request for request in self.slots if request is not None]

    def go_on(self) -> None:
        """Raises :class:`CollectiveAborted` if the group was aborted."""
        if self.barrier.aborted:
            raise CollectiveAborted("the collective was aborted")

    def fail(self, error: BaseException) -> None:
        """Called by a rank that leaves a collective by an exception, before it goes on.

        Breaks the group if it is not broken yet, and returns once no peer writes to this
        rank's tensors any more: each stops at its next block.
        """
        if not isinstance(error, CollectiveAborted):
            self.barrier.abort(f"a rank failed in a collective: {type(error).__name__}: {error}")
        for lock in self.writing:
            if lock.acquire(timeout=min(self.timeout_s, threading.TIMEOUT_MAX)):
                lock.release()


if TYPE_CHECKING:
    from runtime.timeline.rank_lane import RankLane


class Meeting:
    """One collective on one rank's lane, which has the cause before again when it is over.

    The rank that arrives last is waited for, and after that all are: what is noted there
    takes each rank's time. So the last one notes nothing before it goes on, the others
    while they wait, and a short exchange is noted when it is over.

    Args:
        lane: Where it is noted.
    """

    __slots__ = ("_before", "_exchanging", "_lane", "_start")

    def __init__(self, lane: RankLane) -> None:
        self._lane = lane
        self._before = lane.cause
        self._start = time.monotonic()
        # The last one to arrive looks at what all want, and may do it at once.
        self._exchanging: float | None = self._start

    def waits(self) -> None:
        """The others have not arrived yet."""
        self._lane.enter(SYNC, self._start)
        self._exchanging = None

    def met(self, *, is_long: bool) -> None:
        """All are there, and the exchange begins."""
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
            self._lane.enter_past(AVERAGING, self._exchanging, self._before)


LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
FLOATS = LOW_PRECISION | {torch.float32, torch.float64}
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

# Sums of any number of ranks stay finite.
_MAX_WEIGHT = 1e300


@unique
class ReduceOp(Enum):
    """How values of different ranks become one. ``AVG`` is for floating point alone."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"
    MIN = "min"


class Request(NamedTuple):
    """What one rank asks of one collective.

    Attributes:
        name: The method called.
        tensors: Tensors to reduce, or ``(output, input, output, input, ...)``.
        detail: The reduction, the source rank, or what all ranks say alike.
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
"""Elements from which on an exchange is noted on the timeline when it begins."""


@dataclass(slots=True)  # not frozen: that costs as much as the rest of a small plan
class Plan:
    """What the last rank to arrive made of all requests; the same for all ranks.

    Attributes:
        fault: Why the collective cannot take place.
        done: Whether nothing is left to do.
        total: Sum of the weights.
        factors: Each rank's part in it; ``None``: a plain reduction.
        is_long: Whether the exchange takes so long that it is noted when it begins.
        tally: Sum of the ranks' tallies.
        told: Each rank's tally, where that was asked for.
    """

    fault: str | None = None
    done: bool = True
    total: float = 0.0
    factors: tuple[float, ...] | None = None
    is_long: bool = False
    tally: float = 0.0
    told: tuple[float, ...] = ()


Group = Rendezvous[Request, Plan]

PARTS = "mean_in_parts"
MEANS = ("weighted_mean_", PARTS)
_ROWS = "all_gather"
_ROWS_REMEDY = (
    "; in train_fn, all ranks that have a batch call all_gather equally often, in the same order, "
    "and with tensors that differ in their first dimension alone"
)


class LateResult(ABC):
    """How an exchange ends that the host does not wait for. For the rank's own thread."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether it is over, well or not; asks the device and does not wait."""

    @abstractmethod
    def wait(self) -> None:
        """Block until it is over. A group that is aborted ends all its exchanges.

        Raises:
            CollectiveAborted, CollectiveTimeout: What it left is not to be trusted. Every later
                exchange of the group ends in the same way.
        """


class MeanInParts:
    """A weighted mean over all ranks whose tensors are given one after the other.

    Every rank gives the same parts in the same order, and ends. This one exchanges them all at
    the end; where an exchange takes its time, each part travels as soon as it is given.

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
        """Give a part, to be replaced by the mean; nobody else uses it until the end.

        May block until the other ranks have begun, too.
        """
        self._parts.extend(tensors)

    def end(self) -> float:
        """Wait until the parts hold the mean.

        Returns:
            The sum of the weights. If it is 0 all tensors stay exactly as they were.
        """
        parts, self._parts = self._parts, []
        return self._collective.weighted_mean_(parts, self._weight, tally=self._tally)

    def end_late(self, called_off: Tensor) -> tuple[float, LateResult | None]:
        """As :meth:`end`, but where the collective ``host_runs_ahead`` only the device waits.

        What the current stream is given from here on finds the mean in the parts, or, where
        the group was aborted, garbage. Only ``called_off`` tells which.

        Args:
            called_off: A float32 scalar on the device: 0 behind an exchange that ended well, 1
                behind one that may not have.

        Returns:
            The sum of the weights, and how the exchange ends; ``None``: it has ended well.
        """
        return self.end(), None


class Collective(ABC):
    """One rank's end of a group whose ranks are threads of one process.

    Each rank has its own object and calls it from its own thread; :meth:`abort` and
    :meth:`check` may be called from any thread. Every rank must call the same methods in
    the same order. All of them block until the result is there (at most ``timeout_s`` for
    peers to arrive, and for a process group as long again for the exchange).

    Tensors are contiguous (``ValueError`` otherwise), and no two ranks' tensors may share
    memory. Results have the same bits on every rank where the result is the same. float16
    and bfloat16 are summed in float32, float64 in float64; NaN wins in ``MAX`` and ``MIN``.

    Arguments are judged when all ranks have met: if one rank's are wrong or do not fit
    the others', *every* rank raises ``ValueError``, nothing was written, and the group
    stays usable. :class:`~runtime.core.errors.CollectiveAborted`,
    :class:`~runtime.core.errors.CollectiveTimeout` and any other exception leave the tensors
    written to with undefined values, and the group aborted for good; nobody writes to
    them any more when the exception comes out.

    Attributes:
        rank: This rank.
        world_size: How many ranks there are.
        kind: ``"thread"``, ``"gloo"`` or ``"nccl"``.
        trails: Whether a mean in parts can be ended without a wait of the host.
        lane: Where the rank notes how long it waits for the others; ``None``: nowhere.
        tally: Sum of the ranks' tallies in the last collective.
        coalesced_bytes: Limit of one meeting of a coalesced collective, a larger tensor aside.
    """

    kind: str
    coalesced_bytes: float = math.inf
    host_runs_ahead: bool = False
    lane: RankLane | None = None
    tally: float = 0.0
    _told: tuple[float, ...] = ()

    def __init__(self, rank: int, world_size: int, group: Group) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group
        self._closed = False

    def all_reduce_(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        """Reduces a tensor over all ranks, in place; integers (no bool) or floats."""
        self._run(Request("all_reduce_", (tensor,), op))

    def all_reduce_coalesced_(self, tensors: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM) -> None:
        """:meth:`all_reduce_` of each tensor, in one meeting of the ranks and with one wait.

        Args:
            tensors: As many on every rank; their shapes and dtypes may differ.
            op: The reduction.
        """
        self._run_coalesced("all_reduce_", [(tensor,) for tensor in tensors], op)

    def weighted_mean_(
        self, tensors: Sequence[Tensor], weight: float, *, tally: float = 0.0
    ) -> float:
        """Replaces floating-point tensors by their weighted mean over all ranks.

        Args:
            tensors: A list or tuple, of the same shapes and dtypes on every rank.
            weight: This rank's weight, finite and not negative. The values of a rank with
                weight 0 are never used, NaN included; it takes the mean as the others do.
            tally: Any number; the sum over the ranks is in ``tally`` afterwards.

        Returns:
            The sum of the weights. If it is 0 all tensors stay exactly as they were.
        """
        return self._run(Request("weighted_mean_", tensors, None, weight, tally))

    def mean_in_parts(self, weight: float, *, tally: float = 0.0) -> MeanInParts:
        """:meth:`weighted_mean_` of tensors that become ready one after the other.

        The ranks use the group for nothing else until all have ended it. A rank that cannot end it
        calls :meth:`abort`; the tensors given belong to nobody then, and their memory is given up.
        """
        return MeanInParts(self, weight, tally)

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
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM
    ) -> None:
        """:meth:`reduce_scatter_into` of each pair, in one meeting of the ranks and with one wait.

        Args:
            outputs: As many on every rank.
            inputs: One for each output.
            op: The reduction.
        """
        self._run_coalesced("reduce_scatter_into", list(zip_longest(outputs, inputs)), op)

    def tell(self, number: float) -> tuple[float, ...]:
        """Every rank's number, in order of rank; on the host alone."""
        self._run(Request("tell", tally=number))
        return self._told

    def tell_rows(self, num_rows: int, call: str) -> tuple[float, ...]:
        """As :meth:`tell`, where rows are about to be gathered in a step.

        Args:
            num_rows: How many rows this rank gives.
            call: Which call of the step it is, and of what rows; the same on every rank.
        """
        self._run(Request(_ROWS, detail=call, tally=num_rows))
        return self._told

    def agree(self, subject: str, *, capable: bool = True, **properties: object) -> bool:
        """Agree with the other ranks on all that decides how exchanges are made; on the host.

        An exchange needs the same calls of every rank, so that what leads to other calls on one
        rank than on the next is agreed on here, before the first of them.

        Args:
            subject: What is made, for the error.
            capable: True if this rank can do what is asked for.
            properties: Must have the same values on every rank.

        Returns:
            True if every rank is capable.

        Raises:
            ValueError: Values differ; names those of two ranks. Raised on every rank.
        """
        described = ", ".join(f"{name}={value!r}" for name, value in properties.items())
        self._run(Request("agree", detail=f"{subject} {described}", tally=capable))
        return all(self._told)

    def barrier(self) -> None:
        """Blocks until every rank has called it."""
        self._run(Request("barrier"))

    def abort(self) -> None:
        """Breaks the group for good: ranks in a collective raise ``CollectiveAborted``.

        Idempotent. Ranks that wait for a peer wake at once; ranks inside the exchange of a
        process group end within ``timeout_s``.
        """
        self._group.barrier.abort(f"the group was aborted through rank {self.rank}")

    def check(self) -> None:
        """Raises ``CollectiveAborted`` if the group was aborted; a peer's close is none."""
        self._group.go_on()

    def close(self) -> None:
        """Leaves the group and frees what this rank holds of it. Idempotent.

        Called by the rank's own thread, or when that thread uses the group no more. Peers
        that start a collective later, or wait in one for this rank, raise
        ``CollectiveAborted``; collectives that every rank has joined are not disturbed.
        """
        if not self._closed:
            self._closed = True
            self._group.barrier.leave(self.rank)
            self._release()

    def _run_coalesced(
        self, name: str, rows: Sequence[tuple[Tensor, ...]], op: ReduceOp | None = None
    ) -> None:
        """Carries out one operation for each row of tensors, several in one request."""
        request: list[Tensor] = []
        num_bytes = 0
        for row in rows:
            row_bytes = max(t.nbytes if isinstance(t, Tensor) else 0 for t in row)
            if request and num_bytes + row_bytes > self.coalesced_bytes:
                self._run(Request(name, tuple(request), op))
                request, num_bytes = [], 0
            request.extend(row)
            num_bytes += row_bytes
        self._run(Request(name, tuple(request), op))

    def _run(self, request: Request) -> float:
        """Carries a collective out. Returns the sum of the weights."""
        group = self._group
        meeting = None if self.lane is None else Meeting(self.lane)
        on_wait = None if meeting is None else meeting.waits
        try:
            plan = group.meet(self.rank, request, self._plan, on_wait)
            if plan.fault is None and not plan.done:
                if meeting is not None:
                    # Between processes' groups and devices an exchange can hang.
                    meeting.met(is_long=plan.is_long or self.kind != "thread")
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
        self.tally, self._told = plan.tally, plan.told
        return plan.total

    def _plan(self, requests: Sequence[Request]) -> Plan:
        """Runs in the last rank to arrive, while all others wait."""
        first = requests[0]
        fault = find_fault(requests, self._placement_fault)
        if fault is not None:
            return Plan(fault=fault)
        if first.name in ("tell", "agree", _ROWS):
            return Plan(told=tuple(request.tally for request in requests))
        num_elements = max([sum([t.numel() for t in request.tensors]) for request in requests])
        if first.name not in MEANS:
            return Plan(done=num_elements == 0, is_long=num_elements >= LONG)
        weights = [request.weight for request in requests]
        total = float(sum(weights))
        tally = float(sum([request.tally for request in requests]))
        if total == 0 or num_elements == 0:
            return Plan(total=total, tally=tally)
        factors = tuple([weight / total for weight in weights])
        is_long = num_elements >= LONG
        return Plan(done=False, total=total, factors=factors, is_long=is_long, tally=tally)

    @abstractmethod
    def _placement_fault(self, tensor: Tensor) -> str | None:
        """Says why a tensor's device does not serve this kind of group."""

    @abstractmethod
    def _take_part(self, request: Request, plan: Plan) -> None:
        """Does this rank's work. If it raises, the group is aborted."""

    def _release(self) -> None:
        """Frees what :meth:`close` shall free."""
        return


def find_fault(
    requests: Sequence[Request], placement_fault: Callable[[Tensor], str | None]
) -> str | None:
    """Says what is wrong with the ranks' requests, naming the rank; ``None`` if nothing is.

    Args:
        requests: One for each rank, in order.
        placement_fault: Says why a tensor's device does not serve.
    """
    first = requests[0]
    for rank, request in enumerate(requests):
        if request.name != first.name:
            remedy = _ROWS_REMEDY if _ROWS in (request.name, first.name) else ""
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
    """Returns the error of one rank's request alone; ``None`` if there is none."""
    name, tensors, detail, weight, *_ = request
    if not isinstance(tensors, (tuple, list)):
        return f"passed a {type(tensors).__name__}; pass a list of tensors"
    allowed = _allowed_dtypes(name, detail)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            return f"passed a {type(tensor).__name__} where a tensor is due"
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
    if not isinstance(weight, (int, float)) or not 0 <= weight < _MAX_WEIGHT:
        return f"passed the weight {weight!r}; pass a finite number, not negative"
    if name in ("all_gather_into", "reduce_scatter_into"):
        return _size_fault(name, tensors, world_size)
    return None


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
