"""Runs with a full, read-only or slow disk, or with damaged checkpoints."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from runtime import CheckpointError
from runtime.checkpoint import files, store
from runtime.checkpoint.store import entries, load_newest
from tests.support.checkpointing import names, same
from tests.support.running import CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, builder
from tests.unit.checkpoint.test_writer import SlowDisk

WAYS = [(SYNC, THREAD), (CADENCE, OVER_CPU)]
both_ways = pytest.mark.parametrize("way", WAYS, ids=["SYNC", "CADENCE"])


def trained_whole(state, epochs):
    return [m.num_samples for m in state.metrics] == [20] * epochs and not state.stopped


@both_ways
@pytest.mark.parametrize("path", ["/dev/null/checkpoints", "/proc/checkpoints"])
def test_a_path_that_is_not_writable_is_refused_before_any_thread_starts(way, path):
    before = set(threading.enumerate())
    with pytest.raises(CheckpointError, match=rf"written to {path}.*pass a directory"):
        builder(epochs=3, way=way).checkpoint_dir(path).run()
    assert set(threading.enumerate()) == before


def test_a_directory_without_write_permission_is_refused(tmp_path, monkeypatch):
    """Root may write anywhere, so the system's answer is planted."""
    monkeypatch.setattr(store.os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(CheckpointError, match=r"Permission denied.*pass a directory"):
        builder().checkpoint_dir(tmp_path).run()
    monkeypatch.undo()
    builder().checkpoint_dir(tmp_path).run().join(WAIT_S)  # the lock was released


@both_ways
def test_a_temporarily_full_disk_does_not_stop_training(way, tmp_path, monkeypatch, caplog):
    real, failed = files.os.fsync, []

    def fsync(fd):
        if not failed:
            failed.append(fd)
            raise OSError(errno.ENOSPC, "planted")
        real(fd)

    monkeypatch.setattr(files.os, "fsync", fsync)
    state = builder(epochs=3, way=way).checkpoint_dir(tmp_path, keep=9).run().join(WAIT_S)
    assert trained_whole(state, 3)
    assert [e.errno for e in state.checkpoint_errors] == [errno.ENOSPC]
    assert "planted; training continues" in caplog.text
    # Later checkpoints are complete, and nothing is left of the failed one.
    assert all(name.startswith("step-") for name in names(tmp_path))
    found = load_newest(tmp_path)
    assert (found.data.epoch, found.refused) == (3, ())
    assert same(found.data.weights["w"], state.params["w"])


@both_ways
def test_a_slow_disk_does_not_delay_training(way, tmp_path, monkeypatch):
    """All epochs close while the first checkpoint is being written."""
    disk = SlowDisk(monkeypatch)
    handle = builder(epochs=4, way=way).checkpoint_dir(tmp_path, keep=9).run()
    closed = [handle.next_metrics(WAIT_S).epoch for _ in range(4)]
    assert closed == [0, 1, 2, 3]
    disk.await_begin(1)
    assert names(tmp_path) == []
    disk.allow(9)
    state = handle.join(WAIT_S)
    assert state.checkpoint_errors == ()
    assert load_newest(tmp_path).data.epoch == 4
    assert len(names(tmp_path)) <= 3  # others were superseded while they waited


def test_join_waits_for_the_checkpoint_being_written(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    handle = builder().checkpoint_dir(tmp_path).run()
    disk.await_begin(1)
    with pytest.raises(TimeoutError):
        handle.join(0.05)
    disk.allow(9)
    handle.join(WAIT_S)
    assert load_newest(tmp_path).data.epoch == 1


@both_ways
def test_a_damaged_checkpoint_is_skipped_and_the_previous_one_resumed(way, tmp_path, caplog):
    handle = builder(epochs=2, way=way).checkpoint_dir(tmp_path, keep=9).run()
    handle.join(WAIT_S)
    handle.save(tmp_path)  # so that there are at least two
    torn = entries(tmp_path)[0].path
    os.truncate(torn / "weights.safetensors", 20)
    state = builder(epochs=3, way=way).resume(tmp_path).run().join(WAIT_S)
    assert trained_whole(state, 3)
    assert f"checkpoint refused: {torn / 'weights.safetensors'}" in caplog.text


def test_run_raises_before_any_thread_starts_if_every_checkpoint_is_damaged(tmp_path):
    builder().checkpoint_dir(tmp_path).run().join(WAIT_S)
    for entry in entries(tmp_path):
        (entry.path / "state.pt").unlink()
    with pytest.raises(CheckpointError, match=r"every checkpoint .* was refused.*state\.pt"):
        builder().resume(tmp_path, missing_ok=True).run()


@both_ways
def test_save_raises_its_error_and_the_run_continues(way, tmp_path):
    handle = builder(epochs=2, dataset=20, way=way).checkpoint_dir(tmp_path / "own").run()
    with pytest.raises(NotADirectoryError):
        handle.save("/dev/null/here")
    assert trained_whole(handle.join(WAIT_S), 2)
    path = handle.save(tmp_path / "after")  # after the end: the final state
    assert same(load_newest(path).data.weights["w"], handle.state.params["w"])
