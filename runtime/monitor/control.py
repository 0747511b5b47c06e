"""ControlServer: lists the runs of this process to other processes of its user, and stops them.

Each process with active runs listens on a Unix socket in a directory that only its user may enter.
A thread blocks in ``accept``, and uses no CPU time until a client connects.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.codec import parse_json
from coordinator.run_state import Statistics
from runtime.monitor.feed import Json
from runtime.timeline.recent_progress import WINDOW_S, CurrentProgress

logger = logging.getLogger(__name__)

SUFFIX = ".sock"
TIMEOUT_S = 2.0
"""Longest wait for another process, in each direction."""
SAMPLE_S = 0.5
"""Time over which speed and loss are measured without a recent request."""
MAX_REQUEST_BYTES = 256
MAX_REPLY_BYTES = 1 << 20


class ControlServer:
    """Answers ``gpuworker status`` and ``gpuworker stop`` for the active runs of this process.

    The thread and the socket exist while there are runs. A process that cannot create the socket is
    not listed, which is logged at DEBUG.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while the thread starts and ends; not acquired by it
        self._runs: tuple[ListedRun, ...] = ()
        self._endpoint: _Endpoint | None = None

    def add(self, run: ControlledRun) -> None:
        """List a run. Never raises."""
        with self._lock:
            self._runs = (*self._runs, ListedRun(run))
            if self._endpoint is None:
                try:
                    self._endpoint = _Endpoint(self._answer)
                except Exception as error:
                    logger.debug("the runs of this process are not listed: %s", error)

    def remove(self, run: ControlledRun) -> None:
        """Remove a run; with the last one the thread ends. Idempotent."""
        with self._lock:
            self._runs = tuple(listed for listed in self._runs if listed.run is not run)
            endpoint = self._endpoint
            if not self._runs and endpoint is not None:
                self._endpoint = None
                endpoint.close()

    def forget(self) -> None:
        """In a forked child: close the copy of the socket, which belongs to the parent."""
        endpoint, self._endpoint = self._endpoint, None
        self._lock, self._runs = threading.Lock(), ()
        if endpoint is not None:
            endpoint.listener.close()

    def _answer(self, request: Json, pause: Callable[[float], object]) -> Json:
        runs = self._runs
        if request.get("command") == "stop":
            for listed in runs:
                listed.run.stop()
            return {"stopped": [listed.run.describe() for listed in runs]}
        return {"runs": [listed.read(pause) for listed in runs]}


def program_name() -> str:
    """Name of the program that this process runs."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    if name in ("", "-c", "-m"):
        return "python"
    return "notebook" if "ipykernel" in name or "colab" in name else name


def control_directories() -> list[Path]:
    """Directories of sockets, the preferred one first: the user's runtime directory, and one in
    the directory for temporary files, which is used without the former.
    """
    found = []
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        found.append(Path(base) / "gpuworker")
    found.append(Path(tempfile.gettempdir()) / f"gpuworker-{os.getuid()}")
    return found


def require_private(directory: Path, *, create: bool = False) -> None:
    """Check that a directory belongs to this user, and that no other user may enter it.

    Raises:
        OSError: It does not exist, or others could replace its files.
    """
    if create:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} is no private directory of this user")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlledRun:
    """A run as the server uses it. Every function returns at once, from any thread.

    Attributes:
        describe: Returns facts of the run and its last checkpoint.
        statistics: Returns the coordinator's counters.
        measure: Begins a measurement; returns a function that reads the means since then.
        stop: Stops the run at a step boundary.
        total_batches: Batches of the whole run.
        num_epochs: Epochs of the whole run.
    """

    describe: Callable[[], Json]
    statistics: Callable[[], Statistics]
    measure: Callable[[], Callable[[], CurrentProgress]]
    stop: Callable[[], None]
    total_batches: int
    num_epochs: int


class ListedRun:
    """A run with its speed and loss."""

    def __init__(self, run: ControlledRun) -> None:
        self.run = run
        self._started = time.monotonic()
        self._recent: Callable[[], CurrentProgress] | None = None
        self._read_at = -math.inf

    def read(self, pause: Callable[[float], object]) -> Json:
        """The present state of the run; speed and loss over the last seconds."""
        run = self.run
        if self._recent is None or time.monotonic() - self._read_at > WINDOW_S:
            self._recent = run.measure()
            pause(SAMPLE_S)
        now = self._recent()
        self._read_at = time.monotonic()
        statistics = run.statistics()
        rate, loss = now.rate, now.loss
        if rate == 0:  # no step since: the means of the whole run
            num_samples = sum(rank.num_samples for rank in statistics.ranks)
            rate = num_samples / max(1e-9, self._read_at - self._started)
            if statistics.loss_weight > 0:
                loss = statistics.loss_sum / statistics.loss_weight
        return {
            **run.describe(),
            "elapsed_s": round(self._read_at - self._started, 1),
            "epoch": now.epoch,
            "num_epochs": run.num_epochs,
            "step": statistics.global_step,
            "total_steps": run.total_batches,
            "samples_per_s": round(rate, 1),
            "loss": loss if math.isfinite(loss) else None,
        }


class _Endpoint:
    """The socket of this process and the thread that serves it."""

    def __init__(self, answer: Callable[[Json, Callable[[float], object]], Json]) -> None:
        self._answer = answer
        self._closing = threading.Event()
        self.listener, self._path = _listen()
        self._thread = threading.Thread(target=self._serve, name="run-control", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._discard()
            raise

    def _serve(self) -> None:
        for pid, path in _sockets():
            if pid != os.getpid():
                _remove_if_abandoned(path)
        while not self._closing.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                if self._closing.is_set():
                    return
                try:
                    self._serve_one(connection)
                except Exception as error:  # of the other process
                    logger.debug("a request to this process's runs failed: %s", error)

    def _serve_one(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        if peer_of(connection)[1] not in (os.getuid(), None):
            return
        request = parse_json(_receive_line(connection, MAX_REQUEST_BYTES))
        reply = self._answer(dict(request), self._closing.wait)
        connection.sendall(json.dumps({"pid": os.getpid(), **reply}).encode() + b"\n")

    def close(self) -> None:
        """End the thread and remove the socket."""
        self._closing.set()
        with suppress(OSError), socket.socket(socket.AF_UNIX) as waker:
            waker.settimeout(TIMEOUT_S)
            waker.connect(str(self._path))  # wakes accept on every system
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # if the file is gone
        self._thread.join(2 * TIMEOUT_S)
        self._discard()

    def _discard(self) -> None:
        with suppress(OSError):
            self._path.unlink()
        self.listener.close()


def _listen() -> tuple[socket.socket, Path]:
    """Listen in the first usable directory.

    Raises:
        OSError: There is none.
    """
    error: OSError = OSError("there are no Unix sockets")
    for directory in control_directories():
        path = directory / f"{os.getpid()}{SUFFIX}"
        # Renamed once it listens: a socket that refuses connections has no owner.
        hidden = directory / f".{os.getpid()}{SUFFIX}"
        listener = socket.socket(socket.AF_UNIX)
        try:
            require_private(directory, create=True)
            with suppress(FileNotFoundError):
                hidden.unlink()
            listener.bind(str(hidden))
            hidden.chmod(0o600)
            listener.listen()
            hidden.rename(path)
        except OSError as caught:
            listener.close()
            error = caught
            continue
        return listener, path
    raise error


def peer_of(connection: socket.socket) -> tuple[int | None, int | None]:
    """Process and user at the other end; ``None`` where the system does not say."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None, None
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, size))
    return pid, uid


def _receive_line(connection: socket.socket, most: int) -> bytes:
    content = b""
    while not content.endswith(b"\n"):
        part = connection.recv(1 << 16)
        content += part
        if not part or len(content) > most:
            raise ValueError("the message is incomplete or too long")
    return content


# The other side.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRuns:
    """The active runs of a process.

    Attributes:
        runs: One record for each run; see :meth:`ListedRun.read`.
        responds: False if the process did not answer in time, for instance because it is stopped.
    """

    pid: int
    runs: list[dict[str, Any]]
    responds: bool = True


def find_runs() -> list[ProcessRuns]:
    """The active runs of this user on this machine. Blocks for some seconds at most.

    Sockets of processes that have ended are removed.
    """
    found = dict(reversed(list(_sockets())))  # a process has one, in the preferred directory
    with ThreadPoolExecutor(16) as pool:
        asked = pool.map(lambda item: (item[0], _ask(item[1], "status")), found.items())
        replies = sorted(asked, key=lambda reply: reply[0])
    listed = []
    for pid, reply in replies:
        if reply is not None:
            listed.append(ProcessRuns(pid=pid, runs=reply.get("runs", []), responds=bool(reply)))
    return listed


def stop_runs(pid: int) -> list[dict[str, Any]]:
    """Ask the runs of a process to stop at a step boundary, as :meth:`TrainerHandle.stop`.

    Returns:
        A record of each run.

    Raises:
        LookupError: The process has no run of this user, or does not answer.
    """
    for number, path in _sockets():
        if number == pid:
            reply = _ask(path, "stop")
            if reply == {}:
                raise LookupError(f"process {pid} does not answer within {TIMEOUT_S:g} s")
            if reply and reply["stopped"]:
                stopped: list[dict[str, Any]] = reply["stopped"]
                return stopped
    raise LookupError(f"process {pid} has no active run of this user: see 'gpuworker status'")


def _sockets() -> list[tuple[int, Path]]:
    found = []
    for directory in control_directories():
        try:
            require_private(directory)
            names = sorted(os.listdir(directory))
        except OSError:
            continue
        for name in names:
            number = name.removesuffix(SUFFIX)
            if name.endswith(SUFFIX) and number.isdecimal():
                found.append((int(number), directory / name))
    return found


def _remove_if_abandoned(path: Path) -> None:
    """Remove the socket of a process that has ended without doing so. Does not block."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:
            with suppress(OSError):
                path.unlink()
        except OSError:
            pass  # it is busy, or has removed its socket


def _ask(path: Path, command: str) -> dict[str, Any] | None:
    """The reply of a process; empty if there is none in time, ``None`` if it has ended."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps({"command": command}).encode() + b"\n")
            reply = parse_json(_receive_line(connection, MAX_REPLY_BYTES))
        except (ConnectionRefusedError, FileNotFoundError):
            with suppress(OSError):
                path.unlink()
            return None
        except TimeoutError:
            return {}
        except (OSError, ValueError):
            return None  # it has just ended
    return reply if isinstance(reply, dict) else None


CONTROL = ControlServer()
"""The server of this process."""

if sys.platform != "win32":
    os.register_at_fork(after_in_child=CONTROL.forget)
