"""PyTorch in several threads."""

import sys

from tests.support import programs

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
    assert programs.run(run, timeout=100).returncode == 0


THREADS_OF_FORKED_PROCESSES = """
import os
import threading
import torch
from runtime.core.threads import prepare_threads

def set_in_threads():
    prepare_threads()
    ready, failed = [False] * 4, []

    def set_num_threads(index):
        ready[index] = True
        while not all(ready):  # at the same time, without the GIL
            pass
        try:
            torch.set_num_threads(1)
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=set_num_threads, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(len(failed))

def exit_code(work):
    pid = os.fork()
    if not pid:
        work()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fork_again():
    torch.set_num_threads(1)
    os._exit(sum(exit_code(set_in_threads) for _ in range(20)))

assert exit_code(fork_again) == 0
"""


def test_threads_of_a_forked_process_set_their_number_of_intra_op_threads():
    # Without the GIL plain PyTorch 2.12 fails in a quarter of the processes.
    run = [sys.executable, "-W", "ignore", "-c", THREADS_OF_FORKED_PROCESSES]
    assert programs.run(run, timeout=100).returncode == 0
