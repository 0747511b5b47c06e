"""Runs tasks on all ranks: in their threads, in order with streams, and past failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.collective import Collective
from runtime.loop.crossing import Crossing
from runtime.loop.journal import Journal
from runtime.loop.replicas import Outcome, ReplicaThreads, Task, raise_first


class Ends:
    """The ranks' ends of one group, made when they are first needed.

    Args:
        make: Makes one end for each rank.
    """

    def __init__(self, make: Callable[[], Sequence[Collective]]) -> None:
        self._make = make
        self._ends: Sequence[Collective] = ()
        self._aborted = False

    def get(self) -> Sequence[Collective]:
        """The ends, new ones after an abort. Blocks until the group is connected."""
        if self._aborted:
            self.close()
        if not self._ends:
            self._ends = self._make()
        return self._ends

    def abort(self) -> None:
        """Wake whoever waits in a collective. From any thread."""
        self._aborted = True
        for end in self._ends:
            end.abort()

    def close(self) -> None:
        """Close the group; nobody is in it any more."""
        ends, self._ends, self._aborted = self._ends, (), False
        for end in ends:
            end.close()


class Runner:
    """Gives tasks to the ranks and brings back what came of them. For one thread at a time.

    Args:
        threads: The ranks' threads.
        devices: Their devices.
        ends: Where they meet.
        journal: Takes down what happens.
        crossing: Orders their streams and the caller's; ``None``: by events.

    Attributes:
        interrupted: Whether a caller left (by Ctrl-C, say) before its tasks were done.
    """

    def __init__(
        self,
        threads: ReplicaThreads,
        devices: Sequence[torch.device],
        ends: Ends,
        journal: Journal,
        crossing: Crossing | None = None,
    ) -> None:
        self._threads = threads
        self._devices = devices
        self._ends = ends
        self._journal = journal
        self._crossing = crossing or Crossing(devices)
        self.interrupted = False

    def check_caller(self) -> None:
        """Refuse what could only block.

        Raises:
            RuntimeError: The threads have ended, or one of them calls.
        """
        self._threads.check_caller()

    def check_thread(self) -> None:
        """See :meth:`ReplicaThreads.check_thread`."""
        self._threads.check_thread()

    def ends(self) -> Sequence[Collective]:
        """Each rank's end of the group."""
        return self._ends.get()

    def run(
        self, tasks: Sequence[Task | None], what: str, tensors: Sequence[Tensor] = ()
    ) -> list[Outcome]:
        """Do each rank's task in its thread; blocks until all are done.

        Args:
            tasks: One for each rank; ``None``: nothing to do.
            what: What they do.
            tensors: What the tasks read of the caller's.

        Raises:
            ReplicaFailed: A task raised.
            RuntimeError: The threads have ended.
        """
        events = self._crossing.depart(tensors)
        if events:
            tasks = [
                None if task is None else partial(self._crossed, device, events, task)
                for device, task in zip(self._devices, tasks, strict=True)
            ]
        try:
            outcomes = self._threads.run(tasks)
        except BaseException:
            self.interrupted = not self._threads.closed
            self._ends.abort()
            raise
        if events:
            self._rejoin(outcomes)
        self._journal.outcomes(what, outcomes)
        raise_first(outcomes, self._devices, what)
        return outcomes

    def settle(self) -> None:
        """After an interruption: wait for what the ranks still do."""
        self._threads.run([_nothing] * len(self._devices))
        self.interrupted = False

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    @contextmanager
    def waking_peers(self) -> Iterator[None]:
        """Around a task with a collective: who fails before it wakes those who wait there."""
        try:
            yield
        except BaseException:
            self._ends.abort()
            raise

    def _crossed(self, device: torch.device, events: Sequence[Any], task: Task) -> Any:
        self._crossing.arrive(device, events)
        value = task()
        return value, self._crossing.leave(device)

    def _rejoin(self, outcomes: Sequence[Outcome]) -> None:
        done = [outcome for outcome in outcomes if outcome.value is not None]
        marks = []
        for outcome in done:
            outcome.value, mark = outcome.value
            marks.append(mark)
        self._crossing.rejoin(marks)


def _nothing() -> None:
    return
