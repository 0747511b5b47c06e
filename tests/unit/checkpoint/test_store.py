"""Writing, reading and retention of checkpoints on disk."""

import errno
import io
import json
import os
import shutil
import stat
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

from runtime.checkpoint import files, store, tensor_file
from runtime.checkpoint.format import Manifest
from runtime.checkpoint.store import (
    load_newest,
    remove_old_checkpoints,
    write_checkpoint,
)
from runtime.core.errors import CheckpointError
from runtime.results import TrainedState
from tests.support import programs
from tests.support.checkpointing import make, names, same
from tests.support.running import WAIT_S, at_once

ROOT = Path(__file__).parents[3]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.norm = nn.BatchNorm1d(3)


def steps(directory):
    return [int(name.split("-")[1]) for name in names(directory) if name.startswith("step-")]


# -- writing and reading ---------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_is_read_as_written(tmp_path, ranks):
    data = make(ranks=ranks)
    path = write_checkpoint(tmp_path / "new" / "place", data)
    found = load_newest(tmp_path / "new" / "place")
    assert same(found.data, data)
    assert (found.path, found.name, found.refused) == (
        path,
        "step-0000000010-epoch-0001-000001",
        (),
    )
    assert all(t.is_contiguous() for t in found.data.weights.values())
    found.data.weights["z.weight"].add_(1)  # in its own, writable memory


def test_a_checkpoints_own_directory_can_be_passed(tmp_path):
    first = write_checkpoint(tmp_path, make(1))
    write_checkpoint(tmp_path, make(2))
    assert load_newest(str(first)).data.global_step == 1
    moved = first.rename(tmp_path / "best")
    assert load_newest(moved).data.global_step == 1


def test_a_bare_module_loads_the_weights_strictly(tmp_path):
    model = Tied()
    data = make()
    object.__setattr__(data, "weights", dict(model.state_dict()))
    path = write_checkpoint(tmp_path, data)
    other = Tied()
    other.load_state_dict(tensor_file.load_file(path / "weights.safetensors"))
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert list(load_newest(path).data.weights) == list(model.state_dict())


# PyTorch 2.11 warns about every sparse tensor that is loaded.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_views_are_written_without_their_whole_storage(tmp_path):
    whole = torch.arange(1_000_000, dtype=torch.float32)
    data = make()
    data.weights.update(view=whole[10:13], transposed=whole[:6].view(2, 3).T, overlap=whole[11:15])
    data.ranks[0].stepper.optimizer["exp_avg"] = [whole[5:7], whole[::200_000]]
    data.ranks[0].stepper.optimizer["rows"] = whole[:6].view(2, 3).to_sparse()  # has no storage
    path = write_checkpoint(tmp_path, data)
    assert sum(file.stat().st_size for file in path.iterdir()) < 50_000
    assert same(load_newest(tmp_path).data, data)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_all_files_have_the_mode_of_the_umask(mask, tmp_path):
    before = os.umask(mask)
    try:
        path = write_checkpoint(tmp_path, make(ranks=2))
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}
    assert set(modes.values()) == {0o666 & ~mask}, modes


def test_the_newest_checkpoint_is_the_last_written_whatever_its_step(tmp_path):
    for step in (100, 7, 7):
        write_checkpoint(tmp_path, make(step, epoch=step))
    assert names(tmp_path) == [
        "step-0000000007-epoch-0007-000002",
        "step-0000000007-epoch-0007-000003",
        "step-0000000100-epoch-0100-000001",
    ]
    assert load_newest(tmp_path).name == "step-0000000007-epoch-0007-000003"


def test_the_manifest_is_human_readable(tmp_path):
    path = write_checkpoint(tmp_path, make(ranks=2))
    body = json.loads((path / "manifest.json").read_text())
    assert (body["epoch"], body["global_step"]) == (1, 10)
    sizes = {name: entry["bytes"] for name, entry in body["files"].items()}
    assert sizes == {f.name: f.stat().st_size for f in path.iterdir() if f.name != "manifest.json"}


@pytest.mark.parametrize("kind", ["missing", "empty", "other files"])
def test_a_missing_checkpoint_is_an_error_without_missing_ok(tmp_path, kind):
    directory = tmp_path / "checkpoints"
    if kind != "missing":
        directory.mkdir()
    if kind == "other files":
        (directory / "step-12").mkdir()
        (directory / "step-0000000001-epoch-0001-000001").write_text("a file")
        (directory / ".unfinished-0123").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*missing_ok=True"):
        load_newest(directory)
    assert load_newest(directory, missing_ok=True) is None


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_newest(file, missing_ok=True)
    with pytest.raises(FileExistsError):
        write_checkpoint(file, make())


def test_a_checkpoint_is_not_written_into_a_checkpoint(tmp_path):
    path = write_checkpoint(tmp_path, make())
    with pytest.raises(CheckpointError, match="is itself a checkpoint"):
        write_checkpoint(path, make())


def test_files_are_flushed_before_the_rename(tmp_path, monkeypatch):
    log = []
    real_fsync, real_rename, real_replace = os.fsync, os.rename, os.replace

    def fsync(fd):
        real_fsync(fd)
        log.append(("fsync", Path(os.readlink(f"/proc/self/fd/{fd}"))))

    def rename(old, new):
        log.append(("rename", Path(new)))
        real_rename(old, new)

    def replace(old, new):
        log.append(("replace", Path(new)))
        real_replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", replace)
    path = write_checkpoint(tmp_path, make())
    renamed = log.index(("rename", path))
    temporary = log[0][1].parent
    *contents, manifest, directory = [p for what, p in log[:renamed]]
    assert sorted(contents) == [temporary / n for n in names(path) if n != "manifest.json"]
    assert (manifest, directory) == (temporary / "manifest.json", temporary)
    assert log[renamed + 1 :] == [("fsync", tmp_path)]

    log.clear()
    trained(Tied()).save(tmp_path / "model.safetensors")
    assert [what for what, _ in log] == ["fsync", "replace", "fsync"]
    assert log[2][1] == tmp_path


# -- retention -----------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["manifest", "missing", "cut"])
def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path, damage):
    for step in (1, 2, 3):
        path = write_checkpoint(tmp_path, make(step))
    file = path / ("manifest.json" if damage == "manifest" else "state.pt")
    file.unlink() if damage == "missing" else os.truncate(file, 5)
    remove_old_checkpoints(tmp_path, 1)
    assert steps(tmp_path) == [2, 3]  # the damaged one is kept for inspection
    write_checkpoint(tmp_path, make(4))
    remove_old_checkpoints(tmp_path, 1)
    assert steps(tmp_path) == [4]


def test_other_files_are_never_removed(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "step-best").mkdir()
    for step in range(3):
        write_checkpoint(tmp_path, make(step))
    remove_old_checkpoints(tmp_path, 1)
    assert names(tmp_path) == ["notes.txt", "step-0000000002-epoch-0001-000003", "step-best"]


def test_failed_removals_are_logged(tmp_path, monkeypatch, caplog):
    for step in range(2):
        write_checkpoint(tmp_path, make(step))

    def refuse(*paths):
        raise PermissionError(errno.EACCES, "planted")

    monkeypatch.setattr(store.os, "rename", refuse)
    remove_old_checkpoints(tmp_path, 1)
    assert steps(tmp_path) == [0, 1]
    assert "could not be removed" in caplog.text


# -- other processes -----------------------------------------------------------------

BUSY = """
import sys, time
from pathlib import Path
from runtime.checkpoint import store
from tests.support.checkpointing import make

def held(path, content):
    print(path.parent.name, flush=True)
    sys.stdin.readline()
    return real(path, content)

real, store.write_durably = store.write_durably, held
store.write_checkpoint(Path(sys.argv[1]), make(5))
"""


def start(script, *arguments):
    return programs.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_leftovers_of_dead_processes_only_are_removed(tmp_path):
    with start(BUSY, tmp_path) as dead, start(BUSY, tmp_path) as living:
        try:
            left, busy = dead.stdout.readline().strip(), living.stdout.readline().strip()
            assert names(tmp_path) == sorted([left, busy])
            dead.kill()
            dead.wait(WAIT_S)
            path = write_checkpoint(tmp_path, make(6))
            assert names(tmp_path) == sorted([busy, path.name])
            living.communicate("\n", timeout=WAIT_S)
        finally:
            living.kill()
            dead.kill()
    assert living.returncode == 0
    assert names(tmp_path) == ["step-0000000005-epoch-0001-000002", path.name]


MANY = """
import sys
from pathlib import Path
from runtime.checkpoint.store import remove_old_checkpoints, write_checkpoint
from tests.support.checkpointing import make

print("ready", flush=True)
sys.stdin.readline()
for step in range(20):
    write_checkpoint(Path(sys.argv[1]), make(step))
    remove_old_checkpoints(Path(sys.argv[1]), 2)
"""


def test_two_processes_in_one_directory_leave_complete_checkpoints(tmp_path):
    with start(MANY, tmp_path) as one, start(MANY, tmp_path) as two:
        try:
            for process in (one, two):
                process.stdout.readline()
            for process in (one, two):
                process.stdin.write("\n")
                process.stdin.flush()
            while one.poll() is None or two.poll() is None:
                # Read while they write and remove: always a complete one.
                found = load_newest(tmp_path, missing_ok=True)
                assert found is None or same(found.data, make(found.data.global_step))
        finally:
            one.kill()
            two.kill()
    assert (one.returncode, two.returncode) == (0, 0)
    assert 2 <= len(names(tmp_path)) <= 3  # each may keep one that the other has just written
    assert all(same(load_newest(tmp_path / n).data, make(19)) for n in names(tmp_path)[-1:])


def test_a_reader_tolerates_any_number_of_concurrent_removals(tmp_path, monkeypatch):
    """Each of the first twenty checkpoints is replaced by a newer one when it is opened."""
    write_checkpoint(tmp_path, make(0))
    read, opened = store._read, count(1)

    def removed(candidate, **how):
        number = next(opened)
        if number <= 20:
            write_checkpoint(tmp_path, make(number))
            shutil.rmtree(candidate)
        return read(candidate, **how)

    monkeypatch.setattr(store, "_read", removed)
    found = load_newest(tmp_path)
    assert found.data.global_step == 20
    assert found.refused == ()


def test_threads_writing_concurrently_get_distinct_names(tmp_path):
    at_once(lambda _: write_checkpoint(tmp_path, make(3)), range(4))
    assert names(tmp_path) == [f"step-0000000003-epoch-0001-{serial:06d}" for serial in range(1, 5)]


@pytest.mark.parametrize("moment", ["open", "lock"])
def test_a_directory_removed_before_it_was_locked_is_replaced(tmp_path, monkeypatch, moment):
    """Another process removes the directory between mkdir and the lock."""
    real_open, real_lock, removed = os.open, files._lock, []

    def clean():
        found = names(tmp_path)
        if found and not removed:
            removed.extend(found)
            files.remove_leftovers(tmp_path, ".unfinished-")
            assert names(tmp_path) == []

    def open_after_a_cleaner(path, *args, **kwargs):
        if moment == "open":
            clean()
        return real_open(path, *args, **kwargs)

    def lock_after_a_cleaner(fd, *, wait):
        if moment == "lock" and wait:
            clean()
        return real_lock(fd, wait=wait)

    monkeypatch.setattr(files.os, "open", open_after_a_cleaner)
    monkeypatch.setattr(files, "_lock", lock_after_a_cleaner)
    write_checkpoint(tmp_path, make())
    monkeypatch.undo()
    assert len(removed) == 1
    assert same(load_newest(tmp_path).data, make())
    assert len(names(tmp_path)) == 1


def test_without_file_locks_checkpoints_are_written_and_no_leftover_is_removed(
    tmp_path, monkeypatch
):
    def flock(fd, how):
        raise OSError(errno.ENOLCK, "planted")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    (tmp_path / ".unfinished-0123").mkdir()
    write_checkpoint(tmp_path, make())
    assert names(tmp_path) == [".unfinished-0123", "step-0000000010-epoch-0001-000001"]


# -- TrainedState.save --------------------------------------------------------------


def trained(model):
    return TrainedState(
        params=dict(model.named_parameters(remove_duplicate=False)),
        buffers=dict(model.named_buffers()),
        _keys=tuple(model.state_dict()),
    )


def test_a_saved_state_is_loaded_by_a_bare_module(tmp_path):
    model, path = Tied(), tmp_path / "model.safetensors"
    for _ in range(2):  # the second time overwrites the first
        nn.init.normal_(model.one.weight)
        trained(model).save(str(path))
        other = Tied()
        other.load_state_dict(tensor_file.load_file(path))
        assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert names(tmp_path) == ["model.safetensors"]


def test_a_failed_save_leaves_the_file_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    trained(Tied()).save(path)
    before = path.read_bytes()

    def full(fd):
        raise OSError(errno.ENOSPC, "planted")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="planted"):
        trained(Tied()).save(path)
    assert path.read_bytes() == before
    assert names(tmp_path) == ["model.safetensors"]


def test_a_manifest_lists_only_expected_files():
    entry = (3, "0" * 64)
    both = {"weights.safetensors": entry, "state.pt": entry}
    for listed, words in (
        ({}, r"it lists \[\], not \['state"),
        (both, r"it lists \['state"),
        ({**both, "ranks-00001.pt": entry}, r"'ranks-00001\.pt'.*, not \['ranks-00000\.pt'"),
        ({**both, "../ranks-00000.pt": entry}, r"it lists \['\.\./ranks-00000\.pt'"),
        (
            {**both, "ranks-00000.pt": (-1, "0" * 64)},
            r"ranks-00000\.pt is not a size and a SHA-256",
        ),
    ):
        content = Manifest(epoch=0, global_step=0, files=listed, about={}).to_bytes()
        with pytest.raises(CheckpointError, match=words):
            Manifest.from_bytes(content)


# -- errors of the file system --------------------------------------------------------


def fails_with(code, real, *, only=lambda *args: True):
    """A function of the system that raises ``OSError`` with this code for some arguments."""

    def call(*args, **kwargs):
        if only(*args):
            raise OSError(code, "planted")
        return real(*args, **kwargs)

    return call


def test_directories_that_cannot_be_flushed_are_accepted_on_network_file_systems(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(files.os, "fsync", fails_with(errno.EINVAL, os.fsync))
    files.flush_directory(tmp_path)
    monkeypatch.setattr(files.os, "fsync", fails_with(errno.EIO, os.fsync))
    with pytest.raises(OSError, match="planted"):
        files.flush_directory(tmp_path)


@pytest.mark.parametrize("name", ["checkpoint", "new/place"])
def test_a_directory_that_cannot_be_created_raises_the_error_of_the_system(
    name, tmp_path, monkeypatch
):
    monkeypatch.setattr(Path, "mkdir", fails_with(errno.EROFS, Path.mkdir))
    with pytest.raises(OSError, match="planted"):
        files.make_directory(tmp_path / name)


def test_a_parent_of_the_root_is_not_searched(monkeypatch):
    monkeypatch.setattr(Path, "mkdir", fails_with(errno.ENOENT, Path.mkdir))
    with pytest.raises(FileNotFoundError):
        files.make_directory(Path("/nowhere/at/all"))


class FullFile(io.BytesIO):
    def write(self, content):
        raise OSError(errno.ENOSPC, "planted")


def test_a_full_disk_is_reported_by_the_error_of_the_system(tmp_path, monkeypatch):
    """``torch.save`` hides the error of a write behind one of its own."""

    def save(value, file):
        with suppress(OSError):
            file.write(b"content")
        raise RuntimeError("unexpected pos 0 vs 7")

    monkeypatch.setattr(files.torch, "save", save)
    monkeypatch.setattr(files, "open", lambda path, mode: FullFile(), raising=False)
    with pytest.raises(OSError, match="planted") as caught:
        files.write_pickle(tmp_path / "state.pt", {"x": torch.ones(3)})
    assert caught.value.errno == errno.ENOSPC


def test_a_value_that_raises_an_os_error_when_pickled_passes_it_on(tmp_path):
    class Lost:
        def __reduce__(self):
            raise ConnectionError("planted")

    with pytest.raises(ConnectionError, match="planted"):
        files.write_pickle(tmp_path / "state.pt", Lost())
    with pytest.raises(CheckpointError, match=r"other.pt could not be written: \w+: "):
        files.write_pickle(tmp_path / "other.pt", lambda: None)


@pytest.mark.parametrize(
    "weight", [torch.ones(2, 2).to_sparse(), torch.ones(2, dtype=torch.complex128)]
)
def test_weights_that_safetensors_does_not_support_are_named(tmp_path, weight):
    with pytest.raises(CheckpointError, match=r"safetensors cannot hold 'w' of torch\.\w+ and"):
        files.write_weights(tmp_path / "x.safetensors", {"w": weight})


def test_metadata_that_safetensors_refuses_is_a_checkpoint_error(tmp_path, monkeypatch):
    def save_file(*args, **kwargs):
        raise tensor_file.TensorFileError("planted")

    monkeypatch.setattr(files, "save_file", save_file)
    with pytest.raises(CheckpointError, match=r"x.safetensors could not be written: planted"):
        files.write_weights(tmp_path / "x.safetensors", {"w": torch.ones(1)})


@pytest.mark.parametrize("has_no_follow", [True, False])
def test_a_link_in_place_of_a_file_is_not_followed(has_no_follow, tmp_path, monkeypatch):
    (tmp_path / "target").write_bytes(b"1234")
    (tmp_path / "link").symlink_to("target")
    monkeypatch.setattr(files, "_NO_FOLLOW", files._NO_FOLLOW if has_no_follow else 0)
    with pytest.raises(CheckpointError, match="a link, which is not followed"):
        files.read_regular(tmp_path / "link")
    for limit_bytes in (None, 4):
        assert files.read_regular(tmp_path / "target", limit_bytes) == b"1234"
    with pytest.raises(CheckpointError, match="4 bytes instead of at most 3"):
        files.read_regular(tmp_path / "target", 3)


def test_a_directory_is_used_without_a_lock_only_where_the_system_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(files.fcntl, "flock", fails_with(errno.ENOLCK, files.fcntl.flock))
    files.DirectoryLock(tmp_path).release()
    assert files._lock(0, wait=False) is False
    monkeypatch.setattr(files.fcntl, "flock", fails_with(errno.EIO, files.fcntl.flock))
    with pytest.raises(OSError, match="planted"):
        files.DirectoryLock(tmp_path)
    with pytest.raises(OSError, match="planted"):
        files._lock(0, wait=False)


def test_a_checkpoint_never_replaces_one_of_another_process(tmp_path, monkeypatch):
    """Another process takes the same number before the rename."""
    real, taken = os.rename, []

    def rename(source, target):
        if not taken:
            taken.append(shutil.copytree(source, target))
            raise OSError(errno.ENOTEMPTY, "planted")
        real(source, target)

    monkeypatch.setattr(store.os, "rename", rename)
    path = write_checkpoint(tmp_path, make(1))
    assert path != taken[0]
    assert sorted(names(tmp_path)) == sorted([path.name, taken[0].name])
    monkeypatch.setattr(store.os, "rename", fails_with(errno.EIO, real))
    with pytest.raises(OSError, match="planted"):
        write_checkpoint(tmp_path, make(2))


def test_old_checkpoints_that_cannot_be_removed_are_logged(tmp_path, monkeypatch, caplog):
    def remove(directory, keep):
        raise OSError(errno.EIO, "planted")

    monkeypatch.setattr(store, "remove_old_checkpoints", remove)
    writer = store.CheckpointWriter(tmp_path, keep=1)
    writer.submit(make(1))
    assert writer.close(WAIT_S)
    assert f"old checkpoints in {tmp_path} could not be removed: [Errno 5] planted" in caplog.text
    assert writer.num_written == 1
