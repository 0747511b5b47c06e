"""What everybody was doing when a run stood still."""

from __future__ import annotations

import faulthandler
import re
import sys
import tempfile
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Mapping

from coordinator import messages as m

KEPT = 8
"""Messages kept of each rank and direction."""
MAX_CHARS = 400
"""Length at which a message in the report is cut."""

# Kept as they are. What may hold tensors, or an exception whose frames do, is kept as its
# name and numbers, and so is every kind of message that is not listed here.
_LIGHT = frozenset(
    (
        m.StartEpoch,
        m.SyncNow,
        m.RequestParams,
        m.SetGlobalStep,
        m.Throttle,
        m.Resume,
        m.Evaluate,
        m.Checkpoint,
        m.Shutdown,
        m.Ready,
        m.BatchReport,
        m.EpochReport,
        m.SyncAck,
        m.EvalReport,
        m.CheckpointDone,
        m.Exiting,
        m.ThreadEnded,
        m.StopRequested,
        m.AbortRequested,
    )
)
_NUMBERS = ("round", "generation", "epoch", "step")


class MessageLog:
    """The last messages to and from each rank; for one thread.

    Noting one formats nothing and keeps no tensor alive.
    """

    def __init__(self) -> None:
        self._rings: defaultdict[tuple[str, int], deque[tuple[float, object]]] = defaultdict(
            lambda: deque(maxlen=KEPT)
        )

    def received(self, event: m.Event, now: float) -> None:
        """The coordinator took an event; those of no rank are kept together."""
        if type(event) is not m.Tick:  # which says only that time has passed
            self._note(("from", getattr(event, "rank", -1)), event, now)

    def sent(self, rank: int, message: m.ToWorker, now: float) -> None:
        """The coordinator sent a message to a rank."""
        self._note(("to", rank), message, now)

    def _note(self, key: tuple[str, int], message: object, now: float) -> None:
        kind = type(message)
        if kind not in _LIGHT:
            numbers = [(name, getattr(message, name, None)) for name in _NUMBERS]
            message = (kind, [(name, n) for name, n in numbers if isinstance(n, int)])
        self._rings[key].append((now, message))

    def text(self, now: float) -> str:
        """The messages kept, oldest first, with their age in seconds."""
        lines = []
        for (way, rank), ring in sorted(self._rings.items(), key=lambda item: item[0][::-1]):
            lines.append(f"{way} rank {rank}:" if rank >= 0 else "from the service:")
            lines += [f"  {now - time:9.3f} s ago  {_text(message)}" for time, message in ring]
        return "\n".join(lines) or "none"


def _text(message: object) -> str:
    if isinstance(message, tuple):
        kind, numbers = message
        return f"{kind.__name__}({', '.join(f'{name}={n}' for name, n in numbers)})"
    text = repr(message)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ..."


def thread_stacks() -> str:
    """The stack of every thread of the process, with the threads' names."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return _stacks_of_stopped_threads(names)
    parts = []
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(ident, f'unknown to Python, {ident}')}:\n{stack}")
    return "\n".join(sorted(parts))


def _stacks_of_stopped_threads(names: Mapping[int | None, str]) -> str:
    """The same without the interpreter's lock: frames of threads that run must not be followed."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)  # stops them all meanwhile
            file.seek(0)
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"no stacks, which take a temporary file: {error}"

    def named(head: re.Match[str]) -> str:
        ident = int(head[1], 16)
        return f"thread {names.get(ident, f'unknown to Python, {ident}')}, the latest call first:"

    return re.sub(r"(?m)^(?:Current thread|Thread) (0x[0-9a-f]+)\b.*$", named, text)


def stall_report(reason: str, state: str, log: MessageLog, now: float) -> str:
    """The whole report.

    Args:
        reason: What happened.
        state: The machine's state.
        log: The last messages.
        now: The time.
    """
    sections = {
        "coordinator": state,
        "last messages": log.text(now),
        "threads": thread_stacks(),
    }
    return "\n\n".join((reason, *(f"== {title} ==\n{text}" for title, text in sections.items())))
