"""Loader processes and their fork server end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.support import programs
from tests.support.running import WAIT_S

ROOT = Path(__file__).parents[3]
END_S = 10.0

SCRIPT = """
import multiprocessing, signal, sys, threading
import torch
from multiprocessing import forkserver
from torch.utils.data import Dataset
from tests.support.programs import fork_the_fork_server
from tests.support.running import builder, count_up
class Read(Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        return torch.tensor(index)
first = threading.Lock()
def train(model, batch):
    if first.acquire(blocking=False):
        while joins and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            threading.Event().wait(0.001)
        children = [child.pid for child in multiprocessing.active_children()]
        print(*children, forkserver._forkserver._forkserver_pid, flush=True)
    return count_up(model, batch)
joins = sys.argv[1] == "join"
if __name__ == "__main__":
    fork_the_fork_server()
    handle = builder(train=train, dataset=Read(), epochs=10**6).loader_workers(1).run()
    if joins:
        handle.join()
    signal.pause()
"""


def run_and_signal(tmp_path, where, signum, to_loader=False):
    """Exit status of a run with a loader process per rank that gets a signal, and its stderr."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    process = programs.Popen(
        [sys.executable, str(path), where],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        whole_end=True,
    )
    with process:
        try:
            pids = [int(word) for word in process.stdout.readline().split()]
            assert len(pids) == 3, process.stderr.read()
            os.kill(pids[0] if to_loader else process.pid, signum)
            _, text = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    until = time.monotonic() + END_S
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < until:
        threading.Event().wait(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    return process.returncode, text


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "signum"),
    [
        ("outside", signal.SIGKILL),
        ("outside", signal.SIGTERM),
        ("outside", signal.SIGHUP),
        ("join", signal.SIGKILL),
        ("join", signal.SIGHUP),
    ],
)
def test_no_loader_process_outlives_its_run(where, signum, tmp_path):
    status, _ = run_and_signal(tmp_path, where, signum)
    assert status == -signum


@pytest.mark.slow
def test_a_loader_process_ends_on_sigterm_and_fails_its_run(tmp_path):
    status, text = run_and_signal(tmp_path, "join", signal.SIGTERM, to_loader=True)
    assert status == 1
    assert "a loader process of rank" in text
