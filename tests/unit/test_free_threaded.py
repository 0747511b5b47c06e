"""The packages on free-threaded CPython: a part of the tests without the global lock."""

from __future__ import annotations

import logging
import stat
import sys
from types import SimpleNamespace

import pytest
from torch.torch_version import TorchVersion

from runtime import run
from runtime.core import capabilities
from tests.support import free_threaded
from tests.support.free_threaded import MARK, NAMES, VARIABLE, find, run_tests
from tests.support.running import builder

RUN_S = 170.0
PART = (
    "tests/unit/test_exactly_once.py",
    "tests/unit/coordinator/test_averaging.py",
    "tests/unit/coordinator/test_mixing.py",
    "tests/unit/replica/test_averaging_runtime.py",
    "tests/unit/coordinator/test_service.py",
    "tests/unit/worker/test_shared_state.py",
    "tests/unit/test_stall.py",
    "tests/deadlock/test_rounds_and_leaving.py",
    "tests/deadlock/test_throttle_and_gate.py",
    "tests/simulation/test_schedules.py::test_the_same_seed_gives_the_same_history",
    "tests/simulation/test_schedules.py::"
    "test_every_schedule_ends_with_every_sample_in_the_result_once[0]",
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Puts stand-ins for interpreters on an otherwise empty ``PATH``."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)

    def put(name, *lines):
        path = tmp_path / name
        path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return put


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_without_the_global_lock_the_tests_pass():
    if free_threaded.is_free_threaded():
        pytest.skip("this run of the tests is free-threaded itself")
    path, reason = find()
    if path is None:
        pytest.skip(f"no free-threaded interpreter: {reason}")
    report = run_tests(path, ["-q", "-x", "-p", "no:cacheprovider", *PART], RUN_S)
    assert report.code == 0, report.output[-8000:]
    assert report.is_lock_off, report.output[-2000:]


def test_without_an_interpreter_the_missing_part_is_named(place):
    path, reason = find()
    assert path is None
    assert all(name in reason for name in (*NAMES, VARIABLE))


@pytest.mark.parametrize("name", NAMES)
def test_an_interpreter_on_the_path_is_found_and_probed_without_the_lock(place, name):
    expected = place(name, 'test "$PYTHON_GIL" = 0 && test "$1" = -c')
    assert find() == (expected, "")


def test_an_interpreter_without_the_packages_is_skipped(place):
    place("python3.14t", 'echo "it cannot import torch: no wheel"; exit 1')
    expected = place("python3.13t", "exit 0")
    assert find() == (expected, "")


def test_the_reason_against_each_interpreter_is_reported(place):
    newer = place("python3.14t", 'echo "it cannot import torch: no wheel"; exit 1')
    older = place("python3.13t", "exit 7")
    assert find() == (
        None,
        f"{newer}: it cannot import torch: no wheel; {older}: it ended with 7",
    )


def test_the_variable_names_the_only_interpreter_probed(place, monkeypatch):
    place("python3.13t", "exit 0")
    expected = place("another", "exit 0")
    monkeypatch.setenv(VARIABLE, expected)
    assert find() == (expected, "")
    monkeypatch.setenv(VARIABLE, f"{expected}-gone")
    path, reason = find()
    assert path is None
    assert f"{expected}-gone: it cannot be started" in reason


@pytest.mark.skipif(free_threaded.is_free_threaded(), reason="needs an interpreter with the lock")
def test_an_interpreter_with_the_lock_is_rejected(place, monkeypatch):
    # Of those that know no PYTHON_GIL; others refuse to start with it.
    monkeypatch.setenv(VARIABLE, sys.executable)
    path, reason = find()
    assert path is None
    assert reason.startswith(f"{sys.executable}: ")
    assert "global lock" in reason or "GIL" in reason


def test_an_unresponsive_interpreter_is_given_up(place, monkeypatch):
    monkeypatch.setattr(free_threaded, "PROBE_S", 0.1)
    place("python3.13t", "exec /bin/sleep 30")
    path, reason = find()
    assert path is None
    assert "in no 0.1 s" in reason


@pytest.mark.parametrize(
    ("lines", "code", "is_lock_off"),
    [
        ([f"echo {MARK} off"], 0, True),
        ([f"echo {MARK} on"], 0, False),
        ([f"echo {MARK} off", "exit 1"], 1, True),
        (["exec /bin/sleep 30"], None, False),
    ],
)
def test_a_run_reports_success_and_the_state_of_the_lock(place, lines, code, is_lock_off):
    report = run_tests(place("python3.13t", *lines), ["tests"], 0.5 if code is None else 20.0)
    assert (report.code, report.is_lock_off) == (code, is_lock_off)


@pytest.mark.parametrize(
    ("is_free_threaded", "version", "is_warned"),
    [(True, "2.12.1", True), (True, "2.13.0", False), (False, "2.12.1", False)],
)
def test_a_run_warns_of_a_torch_that_crashes_at_ends_of_threads(
    monkeypatch, caplog, is_free_threaded, version, is_warned
):
    config = {"Py_GIL_DISABLED": int(is_free_threaded)}
    monkeypatch.setattr(capabilities.sysconfig, "get_config_var", config.get)
    monkeypatch.setattr(run, "thread_end_fault", capabilities.thread_end_fault)
    monkeypatch.setattr(capabilities, "torch", SimpleNamespace(__version__=TorchVersion(version)))
    with caplog.at_level(logging.WARNING):
        builder().run().join()
    warned = [r.getMessage() for r in caplog.records if "pybind11#5827" in r.getMessage()]
    assert len(warned) == is_warned
    assert all(f"PyTorch {version} on free-threaded Python" in text for text in warned)
