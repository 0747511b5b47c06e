"""PyTorch in several threads."""

from __future__ import annotations

import subprocess
import sys

FAKE_TENSORS_IN_THREADS_THAT_END = """
import threading
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from runtime.core.threads import prepare_threads

def enter():
    for _ in range(3):
        with FakeTensorMode():
            assert torch.empty(3).sum().shape == ()
        kept.append([torch.empty(64) for _ in range(100)])  # reuses memory that threads have freed

prepare_threads()
kept = []
for _ in range(4):
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
enter()
assert len(kept) == 15
"""


def test_a_thread_that_compiled_may_end_before_the_next_one_compiles():
    # In a CUDA build without a GPU, plain PyTorch 2.11 crashes here with SIGSEGV.
    run = [sys.executable, "-W", "ignore", "-c", FAKE_TENSORS_IN_THREADS_THAT_END]
    assert subprocess.run(run, timeout=100, check=False).returncode == 0
