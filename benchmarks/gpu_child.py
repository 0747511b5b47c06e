"""The process that runs sections of the GPU benchmark, one after the other, on command.

A section that hangs is ended together with its process, and one that fails may leave the
device in a state that spoils those behind it: then the parent ends the process and starts
another one. Started by :mod:`benchmarks.gpu_supervisor` as
``python -m benchmarks.gpu_child TABLE COMMANDS ANSWERS``: a module with ``SECTIONS`` and
``facts()``, and two pipes. Every line is a JSON object.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import queue
import signal
import sys
import threading
from typing import Any

from benchmarks.gpu.bench import run_section


class Answers:
    """Writes messages to the parent. For one thread at a time."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def put(self, message: dict[str, Any]) -> None:
        """Write one line, whole."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._pipe, line) :]


def read_commands(pipe: int, commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Take commands from the parent until it closes the pipe or dies, then end the process.

    Reads the bare pipe: a process forked meanwhile inherits no lock of a buffered file.
    """
    rest = b""
    while block := os.read(pipe, 65536):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            commands.put(json.loads(line))
    os._exit(0)


def main() -> None:
    """Serve until the parent ends it."""
    table, command_pipe, answer_pipe = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # The stacks of all threads, when the parent has waited long enough.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    answers = Answers(answer_pipe)
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    reader = threading.Thread(
        target=read_commands, args=(command_pipe, commands), name="commands", daemon=True
    )
    reader.start()
    module = importlib.import_module(table)
    sections = {section.name: section for section in module.SECTIONS}
    answers.put({"type": "ready", "facts": module.facts()})
    while True:
        command = commands.get()
        section = sections[command["section"]]
        run_section(section, dry=False, seconds=command["seconds"], emit=answers.put)


if __name__ == "__main__":
    main()
