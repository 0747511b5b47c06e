"""Checks around every test: no leaked thread, intra-op threads unchanged, fixed seeds."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest

# Waiting OpenMP threads spin, unless this is set when OpenMP is loaded: with tests in parallel
# they then compete for cores with the threads that they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from tests.support import programs

if "PYTEST_XDIST_WORKER" not in os.environ and any(arg.startswith("-n") for arg in sys.argv):
    programs.share()  # imports PyTorch while this process does; see pytest_configure

import torch

# The first optimizer of a process imports it, which takes many seconds on a busy machine:
# not within a test's time limit.
import torch._dynamo
import tqdm

import tests.support.running  # noqa: F401  (switches a warning off)
from runtime.collective.nccl_library import shared_gpu_fault

# Without bytecode files every test process would compile the tests, which takes ten seconds.
sys.dont_write_bytecode = False

GRACE_S = 5.0
"""Time limit for all threads of a test together to end after it."""

POOLS = ("pytest_timeout", "tqdm_monitor")
"""Prefixes of the names of the test tools' threads."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # In a background job of a shell without job control SIGINT is ignored: tests of Ctrl-C, and
    # processes that they start, would receive no signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Imported once by the fork server, instead of in each loader process.
multiprocessing.set_forkserver_preload(["torch", "runtime"])

# The default deadline of 200 ms per example would fail on a busy machine.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

# tqdm's monitor is one daemon thread for the process; no test needs it.
tqdm.tqdm.monitor_interval = 0


def pytest_configure(config: pytest.Config) -> None:
    """Fork the workers of pytest-xdist, and the programs of their tests, from one process.

    Each would import PyTorch, which takes five seconds of a core.
    """
    workers = config.getoption("tx", None) or []
    plain = set(workers) == {"popen"} and "coverage" not in sys.modules
    if plain and "PYTEST_XDIST_WORKER" not in os.environ:
        programs.share()
        forked = f"popen//python={sys.executable} {programs.__file__}"
        config.option.tx = [forked] * len(workers)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect tests without garbage collection: what is made stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that require more CUDA devices than are available."""
    found = torch.cuda.device_count()
    shared = found == 1 and shared_gpu_fault() is None
    for item in items:
        needed = 2 if item.get_closest_marker("two_gpus") else 1
        if (needed == 2 or item.get_closest_marker("gpu")) and found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), has {found}"))
        elif item.get_closest_marker("two_ranks") and found < 2 and not shared:
            reason = f"needs 2 CUDA devices, or one that NCCL lets two ranks share; has {found}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def _old_objects_are_left_alone() -> None:
    """Exclude objects of earlier files from garbage collection.

    Millions of objects accumulate, and many tests call ``gc.collect()``.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """For tests of waits: without the GIL each collection stops all threads for many ms."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _no_thread_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread behind.

    A test with threads stuck in user code names them with the marker
    ``leaks_thread("gpu-worker-1")``; without a name all daemon threads are allowed.
    """
    before = set(threading.enumerate())
    yield
    marker = request.node.get_closest_marker("leaks_thread")
    left = [
        thread
        for thread in threading.enumerate()
        if thread not in before
        and not thread.name.startswith(POOLS)
        and not (marker and thread.daemon and (not marker.args or thread.name in marker.args))
    ]
    deadline = time.monotonic() + GRACE_S
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = sorted(thread.name for thread in left if thread.is_alive())
    if names:
        pytest.fail(f"threads left behind after {GRACE_S:g} s: {', '.join(names)}")


def _num_threads_of_a_new_thread() -> int:
    """The number of intra-op threads in a new thread."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture(autouse=True)
def _num_threads_is_as_found() -> Iterator[None]:
    """Fail a test that changes the intra-op threads of this thread or of later ones."""
    before = torch.get_num_threads()
    yield
    now, later = torch.get_num_threads(), _num_threads_of_a_new_thread()
    if (now, later) != (before, before):
        torch.set_num_threads(before)
        pytest.fail(
            f"torch.get_num_threads() was {before} and is {now} in this thread, {later} in new ones"
        )


@pytest.fixture(autouse=True)
def _grad_mode_is_as_found() -> Iterator[None]:
    """Fail a test that leaves gradients disabled in this thread."""
    yield
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail("gradients are disabled after the test")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed every process-wide generator; returns the seed."""
    value = 20_240_229
    random.seed(value)
    np.random.seed(value)
    # torch.manual_seed also queues calls, with a stack each, for devices that are not in use.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    return value
