"""``make test-gpu`` with files that hang, crash or fail: the other files run and are logged."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

HANGS = """
import os, pathlib, subprocess, sys, threading
helper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
pathlib.Path(__file__).with_name("helper").write_text(str(helper.pid))
print("hanging", file=sys.stderr, flush=True)
threading.Event().wait()  # at import, where pytest's timeout does not apply
"""
CRASHES = """
import os, signal
def test_before():
    pass
def test_crashes():
    os.kill(os.getpid(), signal.SIGKILL)
"""
FAILS = """
def test_fails():
    assert "one thing" == "another"
"""
PASSES = """
def test_passes():
    pass
"""


def run(directory: Path, log: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.run", str(directory), "--log", str(log), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )


def has_exited(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # A zombie, where the container's init does not reap.
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()


@pytest.mark.timeout(300)
def test_other_files_run_after_one_hangs_crashes_or_fails(tmp_path):
    files = {"prefetch": CRASHES, "streams": HANGS, "runs": FAILS, "other": PASSES, "fsdp": PASSES}
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    log = tmp_path / "run.log"
    done = run(tmp_path, log, "--anywhere", "--minutes", "5", "--limit", "12")
    assert done.returncode == 1
    written = log.read_text()
    summary = written.partition("== Summary\n")[2].splitlines()
    assert summary[:5] == [
        "test_streams.py: killed after 12 s",
        "test_prefetch.py: died of SIGKILL",
        "test_runs.py: failed (exit status 1)",
        "test_fsdp.py: passed",
        "test_other.py: passed",
    ]
    for line in (
        "hanging",
        "test_streams.py",  # in the stack of the hanging file
        "::test_before PASSED",
        "'one thing' == 'another'",
        "::test_passes PASSED",
    ):
        assert line in written
    assert "Current thread" in written
    assert "'one thing' == 'another'" in done.stdout  # failures are printed at once
    helper = int((tmp_path / "helper").read_text())
    deadline = time.monotonic() + 10
    while not has_exited(helper):
        assert time.monotonic() < deadline, "the hanging file's child process still runs"
        time.sleep(0.05)


def test_files_that_did_not_run_in_time_are_listed(tmp_path):
    (tmp_path / "test_nccl.py").write_text(PASSES)
    done = run(tmp_path, tmp_path / "run.log", "--anywhere", "--minutes", "0")
    assert done.returncode == 1
    assert "test_nccl.py: did not run" in done.stdout
    assert "test_nccl.py: did not run" in (tmp_path / "run.log").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_exit_status_is_5(tmp_path):
    (tmp_path / "test_nccl.py").write_text(FAILS)
    done = run(tmp_path, tmp_path / "run.log")
    assert done.returncode == 5
    assert "No CUDA device was found" in done.stdout
    assert "test_nccl" not in (tmp_path / "run.log").read_text()
