"""``make test-gpu`` where files hang, die and fail: the others run, and the log is whole."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

HANGS = """
import os, pathlib, subprocess, sys, threading
helper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
pathlib.Path(__file__).with_name("helper").write_text(str(helper.pid))
print("it hangs", file=sys.stderr, flush=True)
threading.Event().wait()  # no test has begun, so pytest has no limit for it
"""
DIES = """
import os, signal
def test_before():
    pass
def test_dies():
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


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # Nobody may have taken its status yet, where the first process of a machine does not.
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()


@pytest.mark.timeout(300)
def test_after_a_file_that_hangs_dies_or_fails_the_others_run(tmp_path):
    files = {"prefetch": DIES, "streams": HANGS, "runs": FAILS, "aside": PASSES, "fsdp": PASSES}
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    log = tmp_path / "run.log"
    done = run(tmp_path, log, "--anywhere", "--minutes", "5", "--limit", "30")
    assert done.returncode == 1
    written = log.read_text()
    summary = written.partition("== Summary\n")[2].splitlines()
    assert summary[:5] == [
        "test_streams.py: ended after 30 s",
        "test_prefetch.py: died of SIGKILL",
        "test_runs.py: failed (exit status 1)",
        "test_fsdp.py: passed",
        "test_aside.py: passed",
    ]
    for of_a_file in (
        "it hangs",
        "test_streams.py",  # in the stack of the one that hangs
        "::test_before PASSED",
        "'one thing' == 'another'",
        "::test_passes PASSED",
    ):
        assert of_a_file in written
    assert "Current thread" in written
    assert "'one thing' == 'another'" in done.stdout  # what failed is shown at once
    helper = int((tmp_path / "helper").read_text())
    deadline = time.monotonic() + 10
    while not is_gone(helper):
        assert time.monotonic() < deadline, "a process that a file has started is left"
        time.sleep(0.05)


def test_when_time_is_up_what_did_not_run_is_named(tmp_path):
    (tmp_path / "test_nccl.py").write_text(PASSES)
    done = run(tmp_path, tmp_path / "run.log", "--anywhere", "--minutes", "0")
    assert done.returncode == 1
    assert "test_nccl.py: did not run" in done.stdout
    assert "test_nccl.py: did not run" in (tmp_path / "run.log").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_does_not_pass(tmp_path):
    (tmp_path / "test_nccl.py").write_text(FAILS)
    done = run(tmp_path, tmp_path / "run.log")
    assert done.returncode == 5
    assert "No CUDA device was found" in done.stdout
    assert "test_nccl" not in (tmp_path / "run.log").read_text()
