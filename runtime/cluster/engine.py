"""ClusterEngine: quorum, gather, all-reduce and commit between machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coordinator.cluster.member import RoundFailed
from runtime.core.errors import GpuWorkerError

MAX_REPORT_BYTES = 16 << 20
"""Largest message of one machine in :meth:`ClusterEngine.gather`."""


class ClusterEngine(ABC):
    """One machine's connection to the others.

    All calls are made by one thread and block, except :meth:`cancel_after`.

    A round is ``quorum``, ``gather``, ``all_reduce``, ``commit``, in this order. After an
    :class:`EngineError` the round is void: call :meth:`commit` with ``False``, or :meth:`quorum`
    at once.

    Attributes:
        machine: This machine's id.
    """

    machine: str

    @property
    @abstractmethod
    def step(self) -> int:
        """Rounds that this machine has committed; 0 before the first and after a reset."""

    @abstractmethod
    def quorum(self) -> Quorum:
        """Wait until enough machines request a round, and connect to them.

        Blocks while fewer than ``min_machines`` request one, or while other live machines are not
        ready. A machine whose step is below another's receives the state of one that is ahead;
        at step 0 all but one do.

        Raises:
            EngineError: A peer died, or the lighthouse was unreachable for too long; try again.
            PeerRefused: With this machine's name: it may not take part, because the others have
                another token or refuse its messages. With other names: their messages are
                refused; try again.
            EngineClosed: The engine was closed.
        """

    @abstractmethod
    def gather(self, report: bytes) -> tuple[bytes, ...]:
        """Gather the reports of all members, in the quorum's order.

        Args:
            report: At most :data:`MAX_REPORT_BYTES`.

        Raises:
            EngineError: A peer is gone, or timed out.
            PeerRefused: A peer's message is not signed with the token.
            EngineClosed: The engine was closed.
        """

    @abstractmethod
    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over the machines, in place; bitwise equal on all of them.

        With compression, float64 tensors and small ones are still sent uncompressed. Rounding
        errors are added to the tensor at the same position of the next committed round.

        Args:
            tensors: Contiguous CPU tensors of float32, float64 or bfloat16, of the same shapes
                on every machine.

        Raises:
            ValueError: A tensor is of another kind.
            EngineError: A peer is gone, or timed out; the contents of the tensors are undefined.
            EngineClosed: The engine was closed.
        """

    @abstractmethod
    def commit(self, ok: bool) -> bool:
        """Decide on the round for this machine alone; ``True`` counts the step.

        Machines may decide differently; the next round's reports must reveal that.

        Args:
            ok: True if this machine has all results of the round.

        Returns:
            ``ok``, unless a call of this round has failed.

        Raises:
            EngineError: The machine's own server does not respond; not committed.
            EngineClosed: The engine was closed.
        """

    @abstractmethod
    def reset(self, step: int = 0) -> None:
        """Set the step.

        Args:
            step: The new step; 0: the next quorum heals this machine.
        """

    @abstractmethod
    def cancel_after(self, timeout_s: float) -> None:
        """Make the call in progress at that time, and all later ones, raise :class:`EngineClosed`.

        Takes no lock and returns at once: callable from any thread and from signal handlers. Of
        several calls the earliest time applies.

        Args:
            timeout_s: Seconds from now; a blocked call notices a fraction of a second later.
        """

    @abstractmethod
    def send_status(self, read: StatusReader) -> None:
        """Send the run's progress to the lighthouse at intervals until :meth:`close`, if there is
        one. Returns at once.

        Args:
            read: Returns the record of the run; called in a thread of its own.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the cluster. Idempotent."""


StatusReader = Callable[[Callable[[float], object]], Mapping[str, Any]]
"""Returns the record of a run; called with a function that waits."""


class EngineError(RoundFailed):
    """A call between machines failed; the round is void, and the next quorum may be tried.

    The contents of the failed call's outputs, such as the tensors of an all-reduce, are undefined.
    """


class PeerRefused(EngineError):
    """A machine's message is not signed with this cluster's token, or is malformed.

    Attributes:
        machines: The refused machines, by the ids in their messages.
    """

    def __init__(self, machines: Sequence[str], reason: str) -> None:
        super().__init__(f"refused {', '.join(machines)}: {reason}")
        self.machines = tuple(machines)
        self._reason = reason

    def __reduce__(self) -> tuple[type[PeerRefused], tuple[object, ...]]:
        return type(self), (self.machines, self._reason)


class EngineClosed(GpuWorkerError):
    """The engine is closed, or cancelled by :meth:`ClusterEngine.cancel_after`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """The global state, which heals a machine that is behind.

    Attributes:
        tensors: Dense CPU tensors by name, of any strides.
        meta: JSON values: dicts with string keys, lists, strings, numbers, ``None``.
    """

    tensors: dict[str, Tensor]
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """The members of a round.

    Attributes:
        generation: Number of the group of connections. It changes whenever members do, and
            after a failure; not always ascending.
        rank: This machine's index in ``members``.
        members: Ids of the machines, sorted, the same on all of them.
        healed: The state received, if this machine was behind; its step is now the others'.
        refused: Machines that may not take part because they have another token or version, or
            sent a malformed message.
    """

    generation: int
    rank: int
    members: tuple[str, ...]
    healed: ClusterState | None
    refused: tuple[str, ...] = ()
