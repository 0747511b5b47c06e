"""Work that all replicas of a loop do at once, and whether they are alike after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from runtime.core.errors import ReplicaFailed
from runtime.loop.loop_threads import first_error
from runtime.loop.rank_threads import Call, Outcome, RankThreads

SETTLE_S = 30.0
"""How long Ctrl-C waits for the replicas to come to the end of what they are doing."""


class LoopCalls:
    """Calls of one thread to the threads of replicas.

    Ctrl-C may come between any two lines of the caller: every piece of work is done by all
    replicas or by none, and what went wrong is known at the next call at the latest.

    Args:
        threads: Of the replicas.
        devices: Of the replicas.

    Attributes:
        fault: Why the replicas may differ for good.
        num_batches: Batches trained, for errors.
    """

    def __init__(self, threads: RankThreads, devices: Sequence[torch.device]) -> None:
        self._threads = threads
        self._devices = devices
        self._changing: Call | None = None
        self.fault: str | None = None
        self.num_batches = 0

    def check(self) -> None:
        """Raises ``RuntimeError`` where nothing can be done with the replicas any more."""
        self._judge()
        if self._threads.closed:
            raise RuntimeError("this DataParallelCoordinator is closed; build a new one")
        if self.fault is not None:
            raise RuntimeError(
                f"the replicas may differ, for {self.fault}; build a new DataParallelCoordinator "
                "from a saved state"
            )

    def run(self, work: Callable[[int], Any], *, changes: bool = False) -> list[Outcome]:
        """Let every replica's thread work, and wait for all of them.

        Args:
            work: A replica's part.
            changes: Whether the replicas differ if it fails on one of them.
        """
        call = self._threads.new_call(work)
        self._changing = call if changes else None
        before = self.fault
        try:
            self._threads.deliver(call)
            call.wait()
        except BaseException:  # Ctrl-C: leave no thread at work on the replicas
            self.fault = "it was interrupted, and a replica did not come to an end"
            if call.is_begun:
                self._threads.deliver(call)  # to those that it has not reached
                if not call.wait(SETTLE_S):
                    raise
            self.fault = before
            raise
        return call.outcomes

    def settle(self, work: Callable[[int], Any]) -> None:
        """As :meth:`run`, for work that leaves the replicas different if it fails.

        Raises:
            ReplicaFailed: It did.
        """
        outcomes = self.run(work, changes=True)
        self._judge()
        self.values(outcomes)

    def values(self, outcomes: Sequence[Outcome]) -> list[Any]:
        """What the replicas returned; raises ``ReplicaFailed`` for the first that failed."""
        rank, error = first_error(outcomes)
        if error is not None:
            what = f"batch {self.num_batches}"
            raise ReplicaFailed(rank, str(self._devices[rank]), what, error) from error
        return [outcome.value for outcome in outcomes]

    def _judge(self) -> None:
        """Take note if the last change failed; Ctrl-C may have come before that was seen."""
        if self._changing is not None:
            rank, error = first_error(self._changing.outcomes)
            if error is not None:
                self.fault = f"rank {rank} failed while the replicas were changed"
            self._changing = None
