"""What a run needs of the engine that joins machines: who is there, gather, all-reduce, commit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from runtime.core.errors import GpuWorkerError

MAX_FACTS_BYTES = 16 << 20
"""Limit of what one machine may pass to :meth:`Engine.gather`."""


class Engine(ABC):
    """One machine's connection to the others.

    All calls come from one thread and block, but for :meth:`give_up`.

    A round is ``quorum``, ``gather``, ``all_reduce``, ``commit``, in this order. After an
    :class:`EngineError` the round is void: go on with :meth:`commit` of ``False`` or with
    :meth:`quorum` at once.

    Attributes:
        machine: This machine's id.
    """

    machine: str

    @property
    @abstractmethod
    def step(self) -> int:
        """Rounds committed, as this machine knows; 0 before the first and after a reset."""

    @abstractmethod
    def quorum(self) -> Quorum:
        """Wait until enough machines want a round, and connect to them.

        Blocks while fewer than ``min_machines`` want one, or while others that live are not
        ready. A machine whose step is lower than another's receives the state of one that is
        ahead; at step 0 all but one do.

        Raises:
            EngineError: A peer died, or the lighthouse is away for too long; try again.
            PeerRefused: Names this machine: it may not take part, since the others have
                another token, or refuse what it sent. Names others: what they sent is refused;
                try again.
            EngineClosed: The engine was closed.
        """

    @abstractmethod
    def gather(self, facts: bytes) -> tuple[bytes, ...]:
        """Everybody's facts, in the order of the quorum's members.

        Args:
            facts: At most :data:`MAX_FACTS_BYTES`.

        Raises:
            EngineError: A peer is gone, or took too long.
            PeerRefused: What a peer sent is not signed with the token.
            EngineClosed: The engine was closed.
        """

    @abstractmethod
    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over the machines, in place; the same bits on all of them.

        With compression, float64 tensors and small ones travel as they are all the same. What
        rounding loses is added to the tensor at the same place of the next committed round.

        Args:
            tensors: Contiguous CPU tensors of float32, float64 or bfloat16, of the same shapes
                on every machine.

        Raises:
            ValueError: They are of another kind.
            EngineError: A peer is gone, or took too long; the tensors hold garbage.
            EngineClosed: The engine was closed.
        """

    @abstractmethod
    def commit(self, ok: bool) -> bool:
        """Decide on the round for this machine alone; ``True`` counts the step.

        Machines may decide differently: the next round's facts have to show it.

        Args:
            ok: Whether this machine has all of the round's results.

        Returns:
            ``ok``, unless a call of this round has failed.

        Raises:
            EngineError: The machine's own server does not answer; not committed.
            EngineClosed: The engine was closed.
        """

    @abstractmethod
    def reset(self, step: int = 0) -> None:
        """Count on from another step.

        Args:
            step: 0: the next quorum heals this machine.
        """

    @abstractmethod
    def give_up(self, within_s: float) -> None:
        """Have the call that waits then, and all later ones, raise :class:`EngineClosed`.

        Takes no lock and returns at once: for any thread, and for the handler of a signal. Of
        several calls the earliest time holds.

        Args:
            within_s: Seconds from now; what waits notices a fraction of a second later.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave. Idempotent."""


class EngineError(GpuWorkerError):
    """A call between machines failed; the round is void, and the next quorum may be tried.

    What the failed call has written to, such as the tensors of an all-reduce, holds garbage.
    """


class PeerRefused(EngineError):
    """What a machine sent is not signed with this cluster's token, or is malformed.

    Attributes:
        machines: Who was refused, by the names that they gave themselves.
    """

    def __init__(self, machines: Sequence[str], why: str) -> None:
        super().__init__(f"refused {', '.join(machines)}: {why}")
        self.machines = tuple(machines)
        self._why = why

    def __reduce__(self) -> tuple[type[PeerRefused], tuple[object, ...]]:
        return type(self), (self.machines, self._why)


class EngineClosed(GpuWorkerError):
    """The engine is closed, or the time of :meth:`Engine.give_up` has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What heals a machine that is behind.

    Attributes:
        tensors: Dense CPU tensors by name, of any strides.
        meta: What JSON holds: dicts with texts as keys, lists, texts, numbers, ``None``.
    """

    tensors: dict[str, Tensor]
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """Who takes part in a round.

    Attributes:
        generation: Number of the group of connections. It changes whenever members do, and
            after a failure; it does not always grow.
        rank: This machine's place in ``members``.
        members: Ids of the machines, sorted, the same on all of them.
        healed: The state received, if this machine was behind; its step is now the others'.
        refused: Machines that want to take part and may not, for they have another token or
            version, or sent what no machine sends.
    """

    generation: int
    rank: int
    members: tuple[str, ...]
    healed: State | None
    refused: tuple[str, ...] = ()
