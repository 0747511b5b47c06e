"""A lighthouse and machines as processes, driven call by call."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from typing import Any

import pytest

from tests.support import programs

HEARTBEAT_TIMEOUT_S = 1.0
ANSWER_S = 40.0

needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None,
    reason="torchft is not installed: pip install 'gpuworker[cluster]'",
)


class CallFailed(Exception):
    """A call raised in the other process.

    Attributes:
        kind: Name of the exception's class.
        machines: The machines named by the exception.
    """

    def __init__(self, answer):
        super().__init__(f"{answer['error']}: {answer['text']}")
        self.kind = answer["error"]
        self.machines = tuple(answer["machines"])
        self.took_s = answer["took_s"]


class _Process:
    def __init__(self, module, *args, namespace=None):
        programs.preload("tests.support.engine_program")
        if namespace is not None:  # see tests/support/namespaces.py
            module, args = "tests.support.namespaces", (namespace, module, *args)
        self._process = programs.Popen(
            [sys.executable, "-m", module, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=programs.ROOT,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._rest = b""

    def _line(self, timeout_s=ANSWER_S):
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left_s = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._stdout], [], [], left_s)
            assert ready, f"no answer within {timeout_s:g} s"
            piece = os.read(self._stdout.fileno(), 1 << 16)
            assert piece, f"the process has ended: {self._process.poll()}"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    @property
    def pid(self):
        """Its process."""
        return self._process.pid

    def is_silent(self, seconds):
        """True if it prints no line within this time."""
        ready, _, _ = select.select([self._stdout], [], [], seconds)
        return not (ready or self._rest)

    def signal(self, number):
        """Send a signal."""
        self._process.send_signal(number)

    def kill(self):
        """SIGKILL, and wait."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10.0)

    def ended(self):
        """Wait for its exit status."""
        return self._process.wait(10.0)

    def close(self):
        """Kill it if it is alive."""
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate(timeout=10.0)


class LighthouseProcess(_Process):
    """``python -m runtime lighthouse``.

    Attributes:
        address: The printed address.
        line: The printed line.
    """

    def __init__(
        self, *, host="127.0.0.1", port=0, min_machines=1, join_timeout_s=10.0, namespace=None
    ):
        super().__init__(
            "runtime",
            *("lighthouse", "--host", host, "--port", port),
            *("--min-machines", min_machines),
            *("--join-timeout", join_timeout_s),
            *("--heartbeat-timeout", HEARTBEAT_TIMEOUT_S),
            namespace=namespace,
        )
        self.line = self._line()
        self.address = self.line.split()[2].rstrip(";")

    def wait_for(self, kind, count):
        """Wait until its page shows this number of ``"heartbeating"`` machines, or of
        ``"participants"``, which have requested a round.
        """
        pattern = {
            "heartbeating": r"\[(\d+) heartbeating",
            "participants": r"\[(\d+)/\d+ participants healthy",
        }[kind]
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            with urllib.request.urlopen(f"http://{self.address}/status", timeout=5.0) as page:
                found = re.search(pattern, page.read().decode())
            if found and int(found[1]) >= count:
                return
            time.sleep(0.01)
        raise AssertionError(f"not {count} {kind}")

    @property
    def port(self):
        """The port on which it listens."""
        return int(self.address.rpartition(":")[2])


class TrainingMachine(_Process):
    """``tests/support/cluster_program.py``: a whole run.

    Attributes:
        started: True once it has printed so.
        num_rounds: Rounds in which it has taken part.
        answer: Its printed result; ``None`` while it is running.
    """

    def __init__(self, address, *args, namespace=None):
        programs.preload("tests.support.clustering")
        super().__init__("tests.support.cluster_program", address, *args, namespace=namespace)
        self.started = False
        self.num_rounds = 0
        self.answer = None

    def poll(self, timeout_s=0.0):
        """Read the printed lines; wait for the first one up to the timeout."""
        while self.answer is None:
            ready, _, _ = select.select([self._stdout], [], [], timeout_s)
            if not ready and b"\n" not in self._rest:
                return self
            line, timeout_s = self._line(), 0.0
            match line:
                case "started":
                    self.started = True
                case "a round":
                    self.num_rounds += 1
                case _:
                    self.answer = json.loads(line)
        return self

    def until(self, ready, timeout_s=ANSWER_S):
        """Wait until ``ready(self)`` is true."""
        deadline = time.monotonic() + timeout_s
        while not ready(self.poll(0.05)):
            assert time.monotonic() < deadline, f"nothing more within {timeout_s:g} s"
        return self

    def in_a_round(self):
        """Wait until it has taken part in another round."""
        before = self.poll().num_rounds
        return self.until(lambda self: self.num_rounds > before)

    def join(self, timeout_s=90.0):
        """Wait for its end, and return its result."""
        self.until(lambda self: self.answer is not None, timeout_s)
        assert self._process.wait(timeout_s) == 0
        return self.answer


class EngineMachine(_Process):
    """A machine that makes the requested engine calls."""

    def __init__(self, address, name, **options):
        all_options = {"address": address, "machine": name, "timeout_s": 10.0, **options}
        super().__init__("tests.support.engine_program", json.dumps(all_options))
        self.name = name
        assert json.loads(self._line()) == {"ready": True}

    def send(self, name, **args):
        """Request a call without waiting for its result."""
        self._stdin.write(json.dumps({"call": name, **args}).encode() + b"\n")
        self._stdin.flush()

    def answer(self, timeout_s=ANSWER_S):
        """Wait for the result of the call. Raises :class:`CallFailed` if it raised."""
        found = json.loads(self._line(timeout_s))
        if "error" in found:
            raise CallFailed(found)
        return found.get("result", found)

    def call(self, name, **args):
        """Request a call, and wait for its result."""
        self.send(name, **args)
        return self.answer()


def together(machines, name, *args, **kwargs):
    """Make a call on all machines at once; the result or :class:`CallFailed` of each."""
    for machine in machines:
        machine.send(name, *args, **kwargs)
    found = []
    for machine in machines:
        try:
            found.append(machine.answer())
        except CallFailed as error:
            found.append(error)
    return found


def make_round(machines, report="", seed=0, value=None):
    """Complete a round, which must succeed; returns the quorums."""
    quorums = together(machines, "quorum")
    for found in (
        quorums,
        together(machines, "gather", report=report),
        together(machines, "all_reduce", seed=seed),
        together(machines, "commit", value=value),
    ):
        assert not any(isinstance(each, CallFailed) for each in found), found
    return quorums


@pytest.fixture
def cluster():
    """Starts lighthouses and machines that end with the test."""
    started: list[_Process] = []

    class Cluster:
        lighthouse: Any = None

        def light(self, **options):
            """Start the lighthouse of the next machines."""
            self.lighthouse = LighthouseProcess(**options)
            started.append(self.lighthouse)
            return self.lighthouse

        def machine(self, name, **options):
            """Start a machine."""
            if self.lighthouse is None:
                self.light()
            found = EngineMachine(self.lighthouse.address, name, **options)
            started.append(found)
            return found

        def machines(self, names, **options):
            """Start machines with different states, and wait for their heartbeats."""
            found = [self.machine(n, value=float(i), **options) for i, n in enumerate(names)]
            self.lighthouse.wait_for("heartbeating", len(found))
            return found

        def join(self, machine):
            """Let a machine request a quorum before the others."""
            machine.send("quorum")
            self.lighthouse.wait_for("participants", 1)

    yield Cluster()
    for process in started:
        process.close()
