"""Small gradients on their way between CPU replicas, in the thread that calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from runtime.core.errors import ReplicaFailed
from runtime.loop.replica import LoopReplica

SMALL = 1 << 20
"""Elements of all ranks together up to which one thread brings gradients across faster than
the ranks can meet."""


class Direct:
    """Brings gradients to rank 0 and from there to all, while the replicas' threads rest.

    Args:
        replicas: On the CPU, in order of rank.
        max_grad_norm: Rank 0's gradients are clipped to it before all get them.
    """

    def __init__(self, replicas: Sequence[LoopReplica], max_grad_norm: float | None) -> None:
        self._first, *self._others = replicas
        self._max_grad_norm = max_grad_norm

    @staticmethod
    def serves(replicas: Sequence[LoopReplica]) -> bool:
        """Whether all replicas are on the CPU, and small."""
        return (
            all(replica.device.type == "cpu" for replica in replicas)
            and sum(replica.num_elements for replica in replicas) <= SMALL
        )

    def collect(self) -> None:
        """Add all ranks' gradients up on rank 0; the others have none afterwards."""
        for replica in self._others:
            with _naming(replica, "backward"):
                replica.hand_to(self._first)

    def spread(self) -> None:
        """Give rank 0's gradients, clipped, to all."""
        with _naming(self._first, "step"):
            self._first.state.params.check()
            if self._max_grad_norm is not None:
                self._first.clip(self._max_grad_norm)
        for replica in self._others:
            with _naming(replica, "step"):
                replica.take_from(self._first)


@contextmanager
def _naming(replica: LoopReplica, what: str) -> Iterator[None]:
    """Errors come out as those of tasks in the replicas' threads do."""
    try:
        yield
    except Exception as error:
        raise ReplicaFailed(replica.rank, str(replica.device), what, error) from error
