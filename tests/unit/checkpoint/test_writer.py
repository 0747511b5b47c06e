"""CheckpointWriter: does not block submitters, and survives failed writes."""

import errno
import gc
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.checkpoint import files, store
from runtime.checkpoint.store import CheckpointWriter, load_newest
from runtime.core.errors import CheckpointError
from tests.support import programs
from tests.support.checkpointing import make, names, same
from tests.support.running import WAIT_S, at_once

ROOT = Path(__file__).parents[3]


class SlowDisk:
    """Blocks each write until the test allows it."""

    def __init__(self, monkeypatch):
        self.begun = []
        self._changed = threading.Condition()
        self._allowed = 0
        real = store.write_checkpoint

        def write(directory, data):
            with self._changed:
                self.begun.append(data.global_step)
                self._changed.notify_all()
                number = len(self.begun)
                assert self._changed.wait_for(lambda: self._allowed >= number, WAIT_S)
            return real(directory, data)

        monkeypatch.setattr(store, "write_checkpoint", write)

    def await_begin(self, number):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= number, WAIT_S)

    def allow(self, number):
        with self._changed:
            self._allowed += number
            self._changed.notify_all()


def counts(w):
    return w.num_written, w.num_failed, w.num_superseded


def writers():
    return [t for t in threading.enumerate() if t.name == "checkpoint-writer"]


def test_submitted_checkpoints_are_on_disk_after_close(tmp_path):
    w = CheckpointWriter(tmp_path, keep=2)
    for step in range(4):
        w.submit(make(step))
        assert w.wait(WAIT_S)
    assert w.close(WAIT_S)
    assert w.close(WAIT_S)  # idempotent
    assert counts(w) == (4, 0, 0)
    assert w.last_error is None
    assert w.newest == tmp_path / "step-0000000003-epoch-0001-000004"
    assert names(tmp_path) == [
        "step-0000000002-epoch-0001-000003",
        "step-0000000003-epoch-0001-000004",
    ]
    assert same(load_newest(tmp_path).data, make(3))
    assert writers() == []


def test_on_a_slow_disk_submit_returns_and_the_newest_checkpoint_is_written_next(
    tmp_path, monkeypatch, caplog
):
    disk = SlowDisk(monkeypatch)
    w = CheckpointWriter(tmp_path, keep=9)
    w.submit(make(0))
    disk.await_begin(1)
    assert [t.daemon for t in writers()] == [True]
    for step in (1, 2, 3):
        w.submit(make(step))  # returns before the first is written
    assert counts(w) == (0, 0, 2)
    assert names(tmp_path) == []
    disk.allow(2)
    assert w.close(WAIT_S)
    assert disk.begun == [0, 3]
    assert counts(w) == (2, 0, 2)
    assert "step 1 is skipped" in caplog.text
    assert "step 2 is skipped" in caplog.text


def test_close_waits_at_most_its_timeout_and_the_thread_finishes_its_work(
    tmp_path, monkeypatch, caplog
):
    disk = SlowDisk(monkeypatch)
    w = CheckpointWriter(tmp_path, keep=1)
    w.submit(make(1))
    disk.await_begin(1)
    before = time.monotonic()
    assert not w.close(0.01)
    assert time.monotonic() - before < WAIT_S / 2
    assert "still not written" in caplog.text
    disk.allow(1)
    assert w.wait(WAIT_S)
    assert counts(w) == (1, 0, 0)


def test_submissions_after_close_fail(tmp_path, caplog):
    w = CheckpointWriter(tmp_path, keep=1)
    assert w.close(WAIT_S)
    w.submit(make(1))
    assert counts(w) == (0, 1, 0)
    assert "the run is over" in caplog.text
    assert names(tmp_path) == []


@pytest.mark.parametrize("function", ["mkdir", "fsync", "rename", "urandom"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_failure_is_counted_and_the_next_checkpoint_is_written(
    tmp_path, monkeypatch, caplog, function, code
):
    w = CheckpointWriter(tmp_path, keep=3)
    w.submit(make(1))
    assert w.wait(WAIT_S)

    def fail(*args, **kwargs):
        raise OSError(code, "planted")

    monkeypatch.setattr(files.os, function, fail)
    w.submit(make(2))
    assert w.wait(WAIT_S)
    monkeypatch.undo()
    assert counts(w) == (1, 1, 0)
    assert w.last_error.errno == code
    assert "checkpoint of step 2 could not be written" in caplog.text
    assert "planted; training continues" in caplog.text
    assert same(load_newest(tmp_path).data, make(1))
    assert names(tmp_path) == ["step-0000000001-epoch-0001-000001"]  # the second left no file
    w.submit(make(3))
    assert w.close(WAIT_S)
    assert counts(w) == (2, 1, 0)
    assert load_newest(tmp_path).data.global_step == 3


@pytest.mark.parametrize("path", ["/dev/null/checkpoints", "/proc/checkpoints"])
def test_a_path_that_is_not_writable_counts_as_a_failure(path):
    w = CheckpointWriter(path, keep=1)
    w.submit(make())
    assert w.close(WAIT_S)
    assert counts(w) == (0, 1, 0)
    assert isinstance(w.last_error, OSError)


def test_unsupported_content_counts_as_a_failure(tmp_path):
    data = replace(make(), run=replace(make().run, backend=threading.Lock()))
    w = CheckpointWriter(tmp_path, keep=1)
    w.submit(data)
    assert w.close(WAIT_S)
    assert counts(w) == (0, 1, 0)
    assert isinstance(w.last_error, CheckpointError)
    assert "state.pt['run']['backend'] is of type lock" in str(w.last_error)
    assert names(tmp_path) == []


def test_a_thread_that_cannot_be_started_counts_as_a_failure(tmp_path, monkeypatch):
    w = CheckpointWriter(tmp_path, keep=1)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    w.submit(make(1))
    monkeypatch.undo()
    assert counts(w) == (0, 1, 0)
    w.submit(make(2))
    assert w.close(WAIT_S)
    assert counts(w) == (1, 1, 0)


def test_many_threads_may_submit(tmp_path):
    w = CheckpointWriter(tmp_path, keep=2)
    at_once(w.submit, map(make, range(20)))
    assert w.close(WAIT_S)
    assert w.num_written + w.num_superseded == 20
    assert w.num_failed == 0
    assert len(names(tmp_path)) == min(2, w.num_written)


@pytest.mark.parametrize("fails", [False, True])
def test_the_state_is_freed_once_written(tmp_path, monkeypatch, fails):
    def fsync(fd):
        raise OSError(errno.ENOSPC, "planted")

    if fails:
        monkeypatch.setattr(files.os, "fsync", fsync)
    w = CheckpointWriter(tmp_path, keep=2)
    data = make()
    weight = weakref.ref(data.weights["z.weight"])
    w.submit(data)
    assert w.wait(WAIT_S)
    del data
    gc.collect()
    assert (w.last_error is not None) == fails
    assert weight() is None


# -- in separate processes --------------------------------------------------------------

LIMITED = """
import resource, sys
from runtime.checkpoint.store import CheckpointWriter
from tests.support.checkpointing import make
import torch

resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
w = CheckpointWriter(sys.argv[1], keep=3)
for step, (weights, state) in enumerate([(16, 16), (99_000, 16), (16, 99_000), (16, 16)]):
    data = make(step, size=weights)
    data.ranks[1].stepper.optimizer["exp_avg"] = torch.ones(state)
    w.submit(data)
    assert w.wait(20)
    print(w.num_written, w.num_failed, str(w.last_error))
"""


def run(script, *arguments):
    return programs.run(
        [sys.executable, "-c", script, *map(str, arguments)], timeout=50, check=True, whole_end=True
    )


def test_a_full_disk_leaves_no_incomplete_checkpoint(tmp_path):
    """A file size limit simulates a full disk: the n-th byte is refused."""
    lines = run(LIMITED, tmp_path).stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["1", "0"], ["1", "1"], ["1", "2"], ["2", "2"]]
    assert "File too large" in lines[1]
    assert "File too large" in lines[2]
    assert names(tmp_path) == [
        "step-0000000000-epoch-0001-000001",
        "step-0000000003-epoch-0001-000002",
    ]
    found = load_newest(tmp_path)
    assert found.refused == ()
    assert found.data.global_step == 3


def test_interpreter_exit_waits_for_the_checkpoint_being_written(tmp_path):
    script = """
import sys, threading
from runtime.checkpoint import store
from tests.support.checkpointing import make

real, ending = store.write_checkpoint, threading.Event()
store.write_checkpoint = lambda *a: ending.wait(20) and real(*a)
w = store.CheckpointWriter(sys.argv[1], keep=3)
w.submit(make(1))
w.submit(make(2))
import atexit
atexit.register(ending.set)  # runs before hooks registered earlier
"""
    run(script, tmp_path)
    assert load_newest(tmp_path).data.global_step == 2


def test_interpreter_exit_is_not_blocked_by_a_hanging_disk(tmp_path):
    script = """
import sys, threading
from runtime.checkpoint import store
from tests.support.checkpointing import make

store.EXIT_GRACE_S = 0.05
store.write_checkpoint = lambda *a: threading.Event().wait()
store.CheckpointWriter(sys.argv[1], keep=3).submit(make(1))
"""
    run(script, tmp_path)


# -- reading back --------------------------------------------------------------------------


def test_the_first_checkpoint_alone_is_read_back(tmp_path, monkeypatch):
    real, paths, checked = store.read_back, [], []

    def read_back(path, check):
        paths.append(path.name)
        real(path, check)

    monkeypatch.setattr(store, "read_back", read_back)
    w = CheckpointWriter(tmp_path, keep=9, check=lambda data: checked.append(data.global_step))
    for step in (1, 2, 3):
        w.submit(make(step))
        assert w.wait(WAIT_S)
    assert w.close(WAIT_S)
    assert paths == ["step-0000000001-epoch-0001-000001"]
    assert checked == [1, 1, 2, 3]  # before each is written, and of the first what was read


def refuse(step):
    def check(data):
        if data.global_step == step:
            raise ValueError("planted")

    return check


def test_after_a_first_checkpoint_that_is_refused_none_is_written(tmp_path, caplog):
    refusals = []
    w = CheckpointWriter(tmp_path, keep=9, check=refuse(1), on_refused=refusals.append)
    w.submit(make(1))
    assert w.wait(WAIT_S)
    w.submit(make(2))
    assert w.close(WAIT_S)
    assert counts(w) == (0, 2, 0)
    assert [w.refusal] == [w.last_error] == refusals
    assert "no run could resume from the checkpoint of step 1: planted" in str(w.refusal)
    assert (
        "planted. Correct what it names, or train without checkpoint_dir(path); training ends"
        in (caplog.text)
    )
    assert names(tmp_path) == []


def test_a_later_checkpoint_that_is_refused_is_not_written(tmp_path, caplog):
    refusals = []
    w = CheckpointWriter(tmp_path, keep=1, check=refuse(2), on_refused=refusals.append)
    for step in (1, 2):
        w.submit(make(step))
        assert w.wait(WAIT_S)
    assert names(tmp_path) == ["step-0000000001-epoch-0001-000001"]
    w.submit(make(3))
    assert w.close(WAIT_S)
    assert counts(w) == (2, 1, 0)
    assert (refusals, w.refusal) == ([], None)
    assert "checkpoint of step 2 could not be written" in caplog.text
    assert "training continues" in caplog.text


@pytest.mark.parametrize("function", ["open", "fstat"])
def test_a_disk_that_fails_while_a_checkpoint_is_read_back_refuses_nothing(
    tmp_path, monkeypatch, function
):
    real, refusals = store.read_back, []

    def read_back(path, check):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, function, fail)
            real(path, check)

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "planted")

    monkeypatch.setattr(store, "read_back", read_back)
    w = CheckpointWriter(tmp_path, keep=9, on_refused=refusals.append)
    w.submit(make(1))
    assert w.close(WAIT_S)
    assert counts(w) == (0, 1, 0)
    assert (refusals, w.refusal) == ([], None)
    assert load_newest(tmp_path).data.global_step == 1


@pytest.mark.parametrize("file", ["weights.safetensors", "state.pt", "ranks-00001.pt"])
@pytest.mark.parametrize("fault", ["a changed byte", "a shorter file", "no file"])
def test_a_file_that_the_disk_has_changed_is_refused(tmp_path, monkeypatch, file, fault):
    real = store.write_checkpoint

    def write(directory, data):
        path = real(directory, data)
        content = bytearray((path / file).read_bytes())
        if fault == "no file":
            (path / file).unlink()
        else:
            content[len(content) // 2] ^= 1
            (path / file).write_bytes(content[: -1 if "shorter" in fault else None])
        return path

    monkeypatch.setattr(store, "write_checkpoint", write)
    refusals = []
    w = CheckpointWriter(tmp_path, keep=9, on_refused=refusals.append)
    w.submit(make(1))
    assert w.close(WAIT_S)
    if fault == "no file":  # an error of the disk
        assert (refusals, w.last_failed) == ([], True)
        return
    (refusal,) = refusals
    assert f"{file}: " in str(refusal)
    assert names(tmp_path) == []


VALUES = {
    "sparse": lambda: torch.eye(200).to_sparse(),
    "compressed": lambda: torch.eye(200).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(9, 9000), 0.1, 0, torch.quint8),
    "strided": lambda: torch.arange(90_000.0).view(300, 300).t(),
    "conjugated": lambda: torch.ones(9000, dtype=torch.complex64).conj(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", VALUES)
def test_tensors_of_every_layout_are_read_back(tmp_path, kind):
    data = make(1)
    data.ranks[0].stepper.optimizer["more"] = VALUES[kind]()
    w = CheckpointWriter(tmp_path, keep=1)
    w.submit(data)
    assert w.close(WAIT_S)
    assert w.last_error is None
    assert counts(w) == (1, 0, 0)


PEAK = """
import sys
from pathlib import Path
import torch
from runtime.checkpoint import store
from tests.support.checkpointing import make

MB, NUM = 1 << 20, 12
def tensors():
    return {str(i): torch.ones(8 * MB // 4) for i in range(NUM)}
data = make(ranks=1)
data.weights.clear()
data.weights.update(tensors())
data.ranks[0].stepper.optimizer.update(tensors())
path = store.write_checkpoint(Path(sys.argv[1]), data)
store.read_back(path)
del data
def peak_mb():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = peak_mb()
store.read_back(path)
print(peak_mb() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_back_needs_memory_for_the_largest_tensor(tmp_path):
    """Two files of 96 MB with tensors of 8 MB."""
    done = programs.run(
        [sys.executable, "-c", PEAK, str(tmp_path)],
        check=True,
    )
    assert int(done.stdout) < 20
