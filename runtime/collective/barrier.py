"""Abortable barriers of a group's threads, and the exchange of requests and plans at them.

:meth:`AbortableBarrier.abort` aborts a collective: ranks that wait at the barrier raise
:class:`~runtime.core.errors.CollectiveAborted`, and so do all later calls. The NCCL collective
additionally aborts its communicators (``Communicators.abort``), which ends exchanges in flight.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from runtime.core.errors import CollectiveAborted, CollectiveTimeout
from runtime.device import capture_gate

_LEAST_EXTENSION_S = 0.01
"""Minimum time that is left of a meeting's limit after a graph capture of another thread."""

RequestT = TypeVar("RequestT")
PlanT = TypeVar("PlanT")


class AbortableBarrier:
    """A reusable barrier that any thread can break for good.

    Each rank sleeps on a lock of its own and the last to arrive opens them all, so a
    meeting costs each rank one wake-up. A rank whose meeting was complete returns from
    it normally, even if the barrier is broken before it gets to run.

    Attributes:
        remedy: The end of the message of a timeout: the caller's means against it.
    """

    def __init__(self, parties: int) -> None:
        if parties < 1:
            raise ValueError(f"a barrier needs at least one party, not {parties}")
        self.parties = parties
        self.remedy = "pass a longer timeout_s to create_collectives if a step can take that long"
        self._mutex = threading.Lock()
        self._turnstiles = [threading.Lock() for _ in range(parties)]
        for turnstile in self._turnstiles:
            turnstile.acquire()
        self._waiting: list[int] = []
        self._interrupted: set[int] = set()
        self._aborted = False
        self._refusal: str | None = None
        self._linked: list[tuple[weakref.ref[AbortableBarrier], tuple[int, ...]]] = []

    @property
    def aborted(self) -> bool:
        """True once :meth:`abort` was called or a rank timed out."""
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
            rank: The rank that arrives; no rank may wait twice at the same time.
            timeout_s: Limit of the wait for the others, in seconds. Time in which a thread of the
                process captures a CUDA graph is not counted: captures are serial.
            action: Run by the last rank to arrive while the others still sleep, so that it may
                use their tensors and streams. If it raises, the barrier is aborted and the
                exception comes out of this rank's call.
            on_wait: Called by every other rank once it counts as arrived, so that it
                delays no rank; must not raise.

        Raises:
            CollectiveAborted: The barrier is broken, or was while this rank waited.
            CollectiveTimeout: The others did not arrive in time. The barrier is broken.
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
        # Ranks enter the set only by an abort, and an abort is final.
        if self._interrupted and rank in self._interrupted:
            raise CollectiveAborted(str(self._refusal))

    def abort(self, reason: str = "the collective was aborted") -> None:
        """Wakes every waiting rank and refuses later ones. Idempotent, from any thread."""
        with self._mutex:
            self._aborted = True
            self._break(reason)
        self._abort_linked(reason)

    def leave(self, rank: int) -> None:
        """Ends the barrier as :meth:`abort` does, but in order: :attr:`aborted` is unchanged."""
        with self._mutex:
            self._break(f"rank {rank} has left the group, and all ranks have to make each call")
        for other, ranks in self._links():
            if rank in ranks:
                other.leave(ranks.index(rank))

    def link(self, other: AbortableBarrier, ranks: Sequence[int]) -> None:
        """Link a barrier of some of these ranks, which then breaks with this one.

        An abort of this one aborts it, a rank that leaves this one leaves it too. A break of
        the other has no effect here. It is not kept alive.

        Args:
            other: No rank has left it yet.
            ranks: The ranks here of its parties, in their order there.
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
            f"aborted: {self.remedy}"
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
        """Called with the mutex held; the first reason is kept."""
        if self._refusal is None:
            self._refusal = reason
        self._interrupted.update(self._waiting)
        for peer in self._waiting:
            self._turnstiles[peer].release()
        self._waiting.clear()


class Rendezvous(Generic[RequestT, PlanT]):
    """The meeting point of one group: a barrier, and a slot for each rank's request.

    One slot for each rank is enough. A rank writes to its own only after the previous
    collective's last meeting, and peers read it only before they arrive there. Each rank is
    given the plan before it is woken, and has taken it when it arrives at the next call.

    Attributes:
        timeout_s: Longest wait of a rank for the others at each meeting.
        slots: Each rank's request of the collective in progress.
        writing: Held by a rank while it writes to its peers' tensors. It must call
            :meth:`require_intact` once it holds its lock, and after each block.
        kept: Work on registered tensors, kept for the next call. Used by the planner alone.
    """

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.barrier = AbortableBarrier(world_size)
        self.timeout_s = timeout_s
        self.slots: list[RequestT | None] = [None] * world_size
        self._plans: list[PlanT | None] = [None] * world_size
        self.writing = [threading.Lock() for _ in range(world_size)]
        self.kept: Any = None

    def meet(
        self,
        rank: int,
        request: RequestT,
        planner: Callable[[Sequence[RequestT]], PlanT],
        on_wait: Callable[[], object] | None = None,
    ) -> PlanT:
        """Publishes a request; returns the plan that the last rank to arrive made of all.

        Args:
            planner: Called once, by the last rank, with every rank's request in order.
            on_wait: Called by every other rank before it sleeps.

        Returns:
            The same plan on every rank.
        """
        planned = False

        def plan() -> None:
            nonlocal planned
            requests = self.requests()
            # A rank woken by an abort meanwhile has taken its own back.
            if len(requests) < self.barrier.parties:
                raise CollectiveAborted("the collective was aborted")
            self._plans[:] = [planner(requests)] * len(self._plans)
            planned = True

        self.slots[rank] = request
        try:
            self.barrier.wait(rank, self.timeout_s, plan, on_wait)
        except BaseException:
            if planned:  # for no rank: keep no tensor alive
                self._plans[:] = [None] * len(self._plans)
            raise
        made, self._plans[rank] = self._plans[rank], None
        if made is None:  # the rank that made it was interrupted as it opened the others' way
            raise CollectiveAborted("the collective was aborted")
        return made

    def part(self, rank: int) -> None:
        """The meeting that ends a collective: after it no peer uses this rank's tensors."""
        self.barrier.wait(rank, self.timeout_s)

    def requests(self) -> list[RequestT]:
        """Returns every rank's request; valid between the two meetings of a collective."""
        return [request for request in self.slots if request is not None]

    def require_intact(self) -> None:
        """Raises :class:`CollectiveAborted` if the group was aborted."""
        if self.barrier.aborted:
            raise CollectiveAborted("the collective was aborted")

    def fail(self, error: BaseException) -> None:
        """Breaks the group; called by a rank that leaves a collective by an exception.

        Returns once no peer writes to this rank's tensors any more: each stops at its next
        block.
        """
        if not isinstance(error, CollectiveAborted):
            self.barrier.abort(f"a rank failed in a collective: {type(error).__name__}: {error}")
        for lock in self.writing:
            if lock.acquire(timeout=min(self.timeout_s, threading.TIMEOUT_MAX)):
                lock.release()
