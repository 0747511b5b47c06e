"""Finds an interpreter without the global lock, and runs tests under it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIABLE = "GPUWORKER_FREE_THREADED_PYTHON"
NAMES = ("python3.15t", "python3.14t", "python3.13t")
NEEDED = ("torch", "pytest", "pytest_timeout", "hypothesis", "runtime")
PROBE_S = 60.0
"""Time limit for an interpreter to import the required packages."""
MARK = "interpreter lock at the end:"

_PROBE = f"""
import importlib, sys
if getattr(sys, "_is_gil_enabled", lambda: True)():
    sys.exit("it runs with the global lock, PYTHON_GIL=0 or not")
for name in {NEEDED!r}:
    try:
        importlib.import_module(name)
    except BaseException as error:
        sys.exit(f"it cannot import {{name}}: {{type(error).__name__}}: {{error}}")
"""

_RUN = f"""
import sys, pytest
code = pytest.main(sys.argv[1:])
print("{MARK}", "on" if sys._is_gil_enabled() else "off")
sys.exit(code)
"""


@dataclass(frozen=True)
class Report:
    """Result of a run of tests.

    Attributes:
        code: The exit status of pytest; ``None``: the time limit was exceeded.
        is_lock_off: True if the global lock was off after all tests.
        output: Output of the run, both streams.
    """

    code: int | None
    is_lock_off: bool
    output: str


def is_free_threaded() -> bool:
    """True if this interpreter runs without the global lock."""
    return not getattr(sys, "_is_gil_enabled", lambda: True)()


def find() -> tuple[str | None, str]:
    """The path of an interpreter that can run the tests, or ``None`` and the reason.

    Only the interpreter in the variable is considered, or without it the first suitable one
    on ``PATH``.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        candidates, unfound = [named], ""
    else:
        candidates = [path for path in map(shutil.which, NAMES) if path is not None]
        unfound = f"no {', '.join(NAMES)} on PATH, and {VARIABLE} is not set"
    reasons = []
    for path in candidates:
        reason = probe(path)
        if reason is None:
            return path, ""
        reasons.append(f"{path}: {reason}")
    return None, "; ".join(reasons) or unfound


def probe(path: str) -> str | None:
    """Reason why an interpreter cannot run the tests without the lock; ``None`` if it can."""
    try:
        done = _start(path, ["-c", _PROBE], PROBE_S)
    except OSError as error:
        return f"it cannot be started: {error}"
    except subprocess.TimeoutExpired:
        return f"it imported {', '.join(NEEDED)} in no {PROBE_S:g} s"
    if done.returncode == 0:
        return None
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines else f"it ended with {done.returncode}"


def run_tests(path: str, arguments: Sequence[str], timeout_s: float) -> Report:
    """Run pytest without the lock, in a separate process, with a time limit."""
    try:
        done = _start(path, ["-c", _RUN, *arguments], timeout_s)
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return Report(None, False, text)
    return Report(done.returncode, f"{MARK} off" in done.stdout, done.stdout)


def _start(path: str, arguments: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess:
    return subprocess.run(
        [path, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHON_GIL": "0", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
