"""In-memory engine: machines of a cluster as threads of one process.

A quorum forms as soon as every live machine requests one. Faults are injected beforehand, and
counted::

    cluster = MemoryCluster(min_machines=2)
    cluster.faults.fail_at("a", 3, "gather").die_at("b", 5, "commit")
    engine = cluster.engine("a", offer)
    ...
    assert cluster.faults.pending == ()
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.cluster.engine import (
    ClusterEngine,
    ClusterState,
    EngineClosed,
    EngineError,
    Quorum,
    StatusReader,
)

POLL_S = 0.02
"""Interval at which blocked calls check the clock."""
POINTS = ("quorum", "gather", "all_reduce", "commit")


class Died(BaseException):
    """Raised in the thread of a machine that dies, so that none of its code continues."""


@dataclass(frozen=True)
class Fault:
    """A fault of a machine in a call."""

    machine: str
    step: int
    point: str
    kind: str


class Faults:
    """Injected faults, each of which occurs once."""

    def __init__(self) -> None:
        self.pending: tuple[Fault, ...] = ()
        self.fired: tuple[Fault, ...] = ()

    def fail_at(self, machine: str, step: int, point: str) -> Faults:
        """The call raises ``EngineError``, also on the other machines."""
        return self._add(machine, step, point, "fail")

    def die_at(self, machine: str, step: int, point: str) -> Faults:
        """The machine dies in its first such call from the step on: its thread raises
        :class:`Died`.
        """
        return self._add(machine, step, point, "die")

    def hang_at(self, machine: str, step: int, point: str) -> Faults:
        """The call does not return until the engine is closed; the others time out."""
        return self._add(machine, step, point, "hang")

    def deny_at(self, machine: str, step: int) -> Faults:
        """``commit`` returns ``False`` on this machine only."""
        return self._add(machine, step, "commit", "deny")

    def take(self, machine: str, step: int, point: str) -> str | None:
        """Remove and return the kind of the fault that is due."""
        for fault in self.pending:
            is_due = step == fault.step or (fault.kind == "die" and step > fault.step)
            if is_due and (fault.machine, fault.point) == (machine, point):
                self.pending = tuple(other for other in self.pending if other is not fault)
                self.fired += (fault,)
                return fault.kind
        return None

    def _add(self, machine: str, step: int, point: str, kind: str) -> Faults:
        assert point in POINTS, point
        self.pending += (Fault(machine, step, point, kind),)
        return self


@dataclass
class _Generation:
    number: int
    members: tuple[str, ...]
    posts: dict[tuple[int, str], dict[str, object]] = field(default_factory=dict)
    failed: str | None = None


@dataclass(frozen=True)
class _Formed:
    generation: _Generation
    top: int
    source: str
    behind: tuple[str, ...]


class MemoryCluster:
    """The shared state of the machines.

    Args:
        min_machines: Fewest machines in a quorum; may change.
        timeout_s: Longest wait for a peer, in seconds.
        join_timeout_s: Longest wait of a quorum for live machines that have not requested it.
    """

    def __init__(
        self, min_machines: int = 1, timeout_s: float = 5.0, join_timeout_s: float = 60.0
    ) -> None:
        self.faults = Faults()
        self.changed = threading.Condition()
        self.timeout_s = timeout_s
        self.min_machines = min_machines
        self._join_timeout_s = join_timeout_s
        self._alive: dict[str, MemoryEngine] = {}
        self._waiting: dict[str, MemoryEngine] = {}
        self._since = 0.0
        self._generation = _Generation(0, ())

    def engine(self, machine: str, offer: Callable[[], ClusterState]) -> MemoryEngine:
        """Create a live machine."""
        with self.changed:
            assert machine not in self._alive, f"{machine} exists already"
            self._alive[machine] = engine = MemoryEngine(self, machine, offer)
            return engine

    def gone(self, machine: str) -> None:
        """Remove a dead machine; called under the lock."""
        self._alive.pop(machine, None)
        self._waiting.pop(machine, None)
        if machine in self._generation.members:
            self._generation.failed = f"{machine} is gone"
        self.changed.notify_all()

    def request(self, engine: MemoryEngine) -> None:
        """Request a quorum for a machine; called under the lock."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting[engine.machine] = engine
        self.changed.notify_all()

    def form(self) -> None:
        """Form a quorum if possible; called under the lock."""
        ready = sorted(self._waiting)
        late = time.monotonic() >= self._since + self._join_timeout_s
        enough = len(ready) >= self.min_machines and 2 * len(ready) > len(self._alive)
        if not ready or not enough or (len(ready) < len(self._alive) and not late):
            return
        engines = [self._waiting[name] for name in ready]
        failed = self._generation.failed is not None or any(e.broken for e in engines)
        if failed or self._generation.members != tuple(ready):
            self._generation = _Generation(self._generation.number + 1, tuple(ready))
        top = max(engine.step for engine in engines)
        source = next(engine.machine for engine in engines if engine.step == top)
        behind = {e.machine for e in engines if e.step < top or top == 0} - {source}
        formed = _Formed(self._generation, top, source, tuple(sorted(behind)))
        for engine in engines:
            engine.formed = formed
        self._waiting.clear()
        self.changed.notify_all()


class MemoryEngine(ClusterEngine):
    """One machine; created by :meth:`MemoryCluster.engine`."""

    def __init__(
        self, cluster: MemoryCluster, machine: str, offer: Callable[[], ClusterState]
    ) -> None:
        self.machine = machine
        self.formed: _Formed | None = None
        self.broken = False
        self._cluster = cluster
        self._offer = offer
        self._step = 0
        self._calls = 0
        self._deadlines = [math.inf]

    @property
    def step(self) -> int:
        return self._step

    def quorum(self) -> Quorum:
        self._enter("quorum")
        cluster = self._cluster
        with cluster.changed:
            self.formed = None
            cluster.request(self)
            while self.formed is None:
                self._check()
                cluster.form()
                if self.formed is None:
                    cluster.changed.wait(POLL_S)
            formed, self.broken, self._calls = self.formed, False, 0
        generation = formed.generation
        healed = None
        if formed.behind:
            own = _copied(self._offer()) if self.machine == formed.source else None
            posted = self._exchange("heal", own, needed=(formed.source,))
            state = posted[formed.source]
            assert isinstance(state, ClusterState)
            if self.machine in formed.behind:
                healed, self._step = _copied(state), formed.top
        return Quorum(
            generation=generation.number,
            rank=generation.members.index(self.machine),
            members=generation.members,
            healed=healed,
        )

    def gather(self, report: bytes) -> tuple[bytes, ...]:
        self._enter("gather")
        posted = self._exchange("gather", bytes(report))
        return tuple(value for value in posted.values() if isinstance(value, bytes))

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        self._enter("all_reduce")
        posted = self._exchange("all_reduce", [tensor.clone() for tensor in tensors])
        for i, tensor in enumerate(tensors):
            parts = [value[i] for value in posted.values() if isinstance(value, list)]
            tensor.copy_(torch.stack([part.double() for part in parts]).sum(0))

    def send_status(self, read: StatusReader) -> None:
        pass  # there is no lighthouse

    def commit(self, ok: bool) -> bool:
        denied = self._enter("commit") == "deny"
        with self._cluster.changed:
            self._check()
            done = ok and not self.broken and not denied and self.formed is not None
            self.formed = None
            if done:
                self._step += 1
            else:
                self.broken = True
            return done

    def reset(self, step: int = 0) -> None:
        self._step = step

    def cancel_after(self, timeout_s: float) -> None:
        self._deadlines.append(time.monotonic() + timeout_s)

    def close(self) -> None:
        with self._cluster.changed:
            self._deadlines.append(0.0)
            self._cluster.gone(self.machine)

    def _enter(self, point: str) -> str | None:
        """Check for a fault, and apply it."""
        cluster = self._cluster
        with cluster.changed:
            self._check()
            kind = cluster.faults.take(self.machine, self._step, point)
            if kind == "die":
                self._deadlines.append(0.0)
                cluster.gone(self.machine)
                raise Died(self.machine)
            if kind == "fail":
                raise self._fail(f"{self.machine} fails in {point}")
            while kind == "hang":
                self._check()
                cluster.changed.wait(POLL_S)
            if point in ("gather", "all_reduce") and (self.formed is None or self.broken):
                raise EngineError("the round has failed: form a quorum first")
            return kind

    def _exchange(
        self, name: str, value: object, needed: tuple[str, ...] | None = None
    ) -> dict[str, object]:
        """The values of the needed members in this call, by member; of all by default."""
        cluster = self._cluster
        deadline = time.monotonic() + cluster.timeout_s
        with cluster.changed:
            assert self.formed is not None
            generation = self.formed.generation
            needed = generation.members if needed is None else needed
            step = self.formed.top
            for key in [key for key in generation.posts if key[0] < step]:
                del generation.posts[key]  # all members have read them
            posts = generation.posts.setdefault((step, f"{name} {self._calls}"), {})
            self._calls += 1
            if value is not None:
                posts[self.machine] = value
                cluster.changed.notify_all()
            while not all(member in posts for member in needed):
                self._check()
                if generation.failed is not None:
                    raise self._fail(generation.failed)
                if time.monotonic() > deadline:
                    raise self._fail(f"no answer within {cluster.timeout_s:g} s")
                cluster.changed.wait(min(POLL_S, max(0.0, deadline - time.monotonic())))
            return {member: posts[member] for member in needed}

    def _check(self) -> None:
        if time.monotonic() >= min(self._deadlines):
            raise EngineClosed("the engine is closed")

    def _fail(self, reason: str) -> EngineError:
        self.broken = True
        if self.formed is not None and self.formed.generation.failed is None:
            self.formed.generation.failed = reason
        self._cluster.changed.notify_all()
        return EngineError(reason)


def _copied(state: ClusterState) -> ClusterState:
    """The state as received over a network: through JSON, with separate tensors."""
    tensors = {name: tensor.detach().clone() for name, tensor in state.tensors.items()}
    return ClusterState(tensors=tensors, meta=json.loads(json.dumps(state.meta)))
