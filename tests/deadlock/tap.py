"""What passes between coordinator and workers, seen by the test in the order of events."""

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
    """A message that lies in a worker's inbox."""

    rank: int
    message: Any


class Tap:
    """Notes every event before the machine takes it and every command once it is done.

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
            with self._changed:  # whoever waits looks at the machine's state as well
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

    # -- what was seen -------------------------------------------------------------

    def sent(self, kind: Any, rank: int | None = None) -> list[Any]:
        """Messages to workers."""
        found = [e for e in self._seen(Sent) if isinstance(e.message, kind)]
        return [e.message for e in found if rank in (None, e.rank)]

    def came(self, kind: Any, rank: int | None = None) -> list[Any]:
        """Events that the machine took."""
        return [e for e in self._seen(kind) if rank is None or e.rank == rank]

    @property
    def averages(self) -> list[Average]:
        """Averages that were computed aside."""
        return self._seen(Average)

    @property
    def closed(self) -> list[int]:
        """Epochs in the order in which they were published."""
        return [command.metrics.epoch for command in self._seen(PublishEpoch)]

    def parked(self, rank: int) -> bool:
        """Whether the machine knows that the rank waits to be released."""
        return self.machine is not None and self.machine.core.ranks[rank].parked

    def _seen(self, kind: Any) -> list[Any]:
        with self._changed:
            return [entry for entry in self.log if isinstance(entry, kind)]

    def where(self, wanted: Callable[[Any], bool]) -> list[int]:
        """Places in the log."""
        with self._changed:
            return [i for i, entry in enumerate(self.log) if wanted(entry)]

    def wait_for(self, ready: Callable[[], object]) -> None:
        """Wait until the traffic is as told; ``ready`` is asked again after each entry."""
        with self._changed:
            assert self._changed.wait_for(ready, BOUND_S), "it was never seen"

    def await_sent(self, kind: Any, rank: int, count: int = 1) -> None:
        """Wait until so many messages of a kind lie in the rank's inbox, or were there."""
        self.wait_for(lambda: len(self.sent(kind, rank)) >= count)

    def await_came(self, kind: Any, rank: int, count: int = 1) -> None:
        """Wait until so many events of a kind came from a rank."""
        self.wait_for(lambda: len(self.came(kind, rank)) >= count)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block takes less than that: far more than it needs, far less than a timeout."""
    start = time.monotonic()
    yield
    elapsed = time.monotonic() - start
    assert elapsed < seconds, f"took {elapsed:.1f} s"
