"""Recorder of the messages between coordinator and workers, in order of events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from coordinator import messages as m
from coordinator.machine import Coordinator
from coordinator.messages import Average, PublishEpoch, Send
from coordinator.service import Service
from tests.deadlock.faults import BOUND_S


@dataclass(frozen=True, slots=True)
class Sent:
    """A message in a worker's inbox."""

    rank: int
    message: Any


class Tap:
    """Records every event before the coordinator handles it, and every executed command.

    Attributes:
        log: Events, :class:`Sent` messages and other commands, oldest first.
        machine: The machine that took the last event.
    """

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.machine: Coordinator | None = None
        self._changed = threading.Condition()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Tap:
        handle, execute = Coordinator.handle, Service._execute

        def noted_event(machine: Coordinator, event: m.Event, now: float) -> Any:
            self.machine = machine
            self._note(event)
            commands = handle(machine, event, now)
            with self._changed:  # waiting tests inspect the coordinator's state as well
                self._changed.notify_all()
            return commands

        def noted_command(service: Service, command: Any, *args: Any) -> None:
            execute(service, command, *args)
            sent = isinstance(command, Send)
            self._note(Sent(command.rank, command.message) if sent else command)

        self._patch.setattr(Coordinator, "handle", noted_event)
        self._patch.setattr(Service, "_execute", noted_command)
        return self

    def __exit__(self, *exception: object) -> None:
        self._patch.undo()

    def _note(self, entry: Any) -> None:
        with self._changed:
            self.log.append(entry)
            self._changed.notify_all()

    # -- records -------------------------------------------------------------

    def sent(self, kind: Any, rank: int | None = None) -> list[Any]:
        """Messages to workers."""
        found = [e for e in self._seen(Sent) if isinstance(e.message, kind)]
        return [e.message for e in found if rank in (None, e.rank)]

    def came(self, kind: Any, rank: int | None = None) -> list[Any]:
        """Handled events."""
        return [e for e in self._seen(kind) if rank is None or e.rank == rank]

    @property
    def averages(self) -> list[Average]:
        """Averages computed in the background."""
        return self._seen(Average)

    @property
    def closed(self) -> list[int]:
        """Epochs in the order in which they were published."""
        return [command.metrics.epoch for command in self._seen(PublishEpoch)]

    def parked(self, rank: int) -> bool:
        """True if the rank is parked in the record of the coordinator."""
        return self.machine is not None and self.machine.run_state.ranks[rank].parked

    def _seen(self, kind: Any) -> list[Any]:
        with self._changed:
            return [entry for entry in self.log if isinstance(entry, kind)]

    def where(self, wanted: Callable[[Any], bool]) -> list[int]:
        """Positions in the log."""
        with self._changed:
            return [i for i, entry in enumerate(self.log) if wanted(entry)]

    def wait_for(self, ready: Callable[[], object]) -> None:
        """Wait until ``ready()``, which is evaluated after each entry."""
        with self._changed:
            assert self._changed.wait_for(ready, BOUND_S), "it was never seen"

    def await_sent(self, kind: Any, rank: int, count: int = 1) -> None:
        """Wait until ``count`` messages of a kind were put into the rank's inbox."""
        self.wait_for(lambda: len(self.sent(kind, rank)) >= count)

    def await_came(self, kind: Any, rank: int, count: int = 1) -> None:
        """Wait until ``count`` events of a kind were received from a rank."""
        self.wait_for(lambda: len(self.came(kind, rank)) >= count)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Assert that the block takes less than this, far less than any timeout."""
    start = time.monotonic()
    yield
    elapsed = time.monotonic() - start
    assert elapsed < seconds, f"took {elapsed:.1f} s"
