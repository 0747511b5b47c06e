"""Ctrl-C in an example, then the same command with ``--resume``: as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 50
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def command(*arguments):
    digits = str(ROOT / "examples" / "digits.py")
    return [sys.executable, digits, "--epochs", "4", "--batch-size", "64", *map(str, arguments)]


def run(*arguments):
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def interrupt(*arguments, after):
    """Run an example, send it Ctrl-C once it has printed an epoch; gives what it printed."""
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
        env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith(f"epoch {after:2}"):
                process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130, "".join(lines)
    finally:
        process.kill()
        process.stdout.close()
        process.wait(TIMEOUT_S)
    return "".join(lines)


def epochs_in(output):
    """Epoch, loss and accuracy of each line."""
    return re.findall(r"^epoch +(\d+)  loss ([\d.]+)  accuracy +([\d.]+)%", output, re.MULTILINE)


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_an_example_that_was_interrupted_goes_on_where_it_was(policy, tmp_path):
    told = interrupt("--policy", policy, "--checkpoint-dir", tmp_path, after=0)
    assert "goes on with --resume" in told
    assert len(epochs_in(told)) < 4, "it was over before the signal came"
    rest = run("--policy", policy, "--checkpoint-dir", tmp_path, "--resume")
    parts = [*epochs_in(told), *epochs_in(rest)]
    assert [int(epoch) for epoch, _, _ in parts] == [0, 1, 2, 3]
    if policy == "sync":
        # The bits are compared in test_resume_sync.py; here it is the same course of training.
        straight = run("--policy", policy)
        for part, whole in zip(parts, epochs_in(straight), strict=True):
            assert [float(value) for value in part] == pytest.approx(
                [float(value) for value in whole], rel=0.02
            )
        end = r"averagings; samples by rank"
        assert re.search(rf"\d+ {end}", rest)[0] == re.search(rf"\d+ {end}", straight)[0]


def test_resume_without_a_directory_is_refused():
    done = subprocess.run(
        command("--resume"), capture_output=True, text=True, timeout=TIMEOUT_S, env=ENVIRONMENT
    )
    assert done.returncode == 2
    assert "--resume needs --checkpoint-dir" in done.stderr
