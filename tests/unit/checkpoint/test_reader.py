"""Damaged, altered and malicious checkpoints are refused, and no code is executed."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import shutil
import zipfile
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_map

from runtime.checkpoint import store
from runtime.checkpoint.format import MANIFEST, Manifest
from runtime.checkpoint.store import load_newest, write_checkpoint
from runtime.core.errors import CheckpointError
from tests.support.checkpointing import make, same
from tests.support.pairs import SCALE

FILES = ["manifest.json", "ranks-00000.pt", "ranks-00001.pt", "state.pt", "weights.safetensors"]


@pytest.fixture
def pair(tmp_path):
    """Writes two checkpoints; the newer one's directory."""
    write_checkpoint(tmp_path, make(1))
    return write_checkpoint(tmp_path, make(2))


def check_refused(newer, file, caplog):
    """Check that the newer one is refused with the file's name, and the older one is used."""
    caplog.clear()
    found = load_newest(newer.parent)
    assert same(found.data, make(1))
    assert len(found.refused) == 1
    assert str(newer / file) in found.refused[0]
    assert str(newer / file) in caplog.text


def flip(file, position, mask=0xFF):
    with open(file, "r+b") as f:
        f.seek(position)
        byte = f.read(1)[0]
        f.seek(position)
        f.write(bytes([byte ^ mask]))


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_any_place_is_refused(pair, caplog, name):
    size = (pair / name).stat().st_size
    stride = (1 if SCALE > 1 else 5) if name == MANIFEST else max(1, size // 40)
    for position in {*range(0, size, stride), size - 1}:
        mask = 1 << position % 8
        flip(pair / name, position, mask)
        check_refused(pair, name, caplog)
        flip(pair / name, position, mask)
    assert same(load_newest(pair.parent).data, make(2))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "empty", "longer", "missing", "a directory", "a pipe"])
def test_a_damaged_file_is_refused(pair, caplog, name, damage):
    file = pair / name
    size = file.stat().st_size
    if damage in ("cut", "empty", "longer"):
        os.truncate(file, {"cut": size - 1, "empty": 0, "longer": size + 1}[damage])
    else:
        file.unlink()
    if damage == "a directory":
        file.mkdir()
    if damage == "a pipe":
        os.mkfifo(file)  # reading it would block forever
    check_refused(pair, name, caplog)


def test_unexpected_files_are_not_read(pair):
    (pair / "ranks-00002.pt").write_bytes(b"junk")
    (pair / "notes.txt").write_text("a note")
    assert same(load_newest(pair.parent).data, make(2))


def test_an_empty_directory_under_a_checkpoints_name_is_refused(pair, caplog):
    shutil.rmtree(pair)
    pair.mkdir()
    check_refused(pair, MANIFEST, caplog)


def test_files_of_two_checkpoints_cannot_be_mixed(pair, caplog):
    older = next(p for p in pair.parent.iterdir() if p != pair)
    shutil.copy(older / "weights.safetensors", pair)
    check_refused(pair, "weights.safetensors", caplog)


def test_if_all_are_refused_the_error_lists_each(pair):
    for path in pair.parent.iterdir():
        os.truncate(path / "state.pt", 10)
    with pytest.raises(CheckpointError) as caught:
        load_newest(pair.parent, missing_ok=True)  # a damaged checkpoint is not a missing one
    for path in pair.parent.iterdir():
        assert str(path / "state.pt") in str(caught.value)


def test_a_checkpoints_own_path_has_no_fallback(pair):
    flip(pair / "state.pt", 100)
    with pytest.raises(CheckpointError, match=r"state\.pt: its SHA-256"):
        load_newest(pair)
    (pair / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=MANIFEST):
        load_newest(pair, missing_ok=True)


@pytest.mark.parametrize("version", [1, 3])
def test_another_format_is_refused_with_its_version(version, pair, caplog, monkeypatch):
    monkeypatch.setattr("runtime.checkpoint.format.VERSION", version)
    write_checkpoint(pair.parent, make(3))
    monkeypatch.undo()
    assert same(load_newest(pair.parent).data, make(2))
    assert f"format version is {version}, this version reads 2" in caplog.text
    assert "start from its weights, in weights.safetensors" in caplog.text


def test_checkpoints_removed_during_the_search_are_no_error(pair, monkeypatch):
    """Another process writes a third one and removes the two that were listed."""
    real = store.entries

    def list_then_remove(directory):
        found = real(directory)
        monkeypatch.setattr(store, "entries", real)
        write_checkpoint(directory, make(3))
        for entry in found:
            shutil.rmtree(entry.path)
        return found

    monkeypatch.setattr(store, "entries", list_then_remove)
    assert same(load_newest(pair.parent).data, make(3))


# -- code in a checkpoint --------------------------------------------------------------

EXECUTED = []


def executed(*arguments):
    EXECUTED.append(arguments)


class Code:
    """Executes code when a plain unpickler reads it."""

    def __reduce__(self):
        return executed, (1,)


def as_zip():
    file = io.BytesIO()
    torch.save({"run": Code()}, file)
    return file.getvalue()


def as_zip_with(content):
    """A file of torch.save with a replaced pickle."""
    file, out = io.BytesIO(), io.BytesIO()
    torch.save({}, file)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, content if name.endswith("data.pkl") else old.read(name))
    return out.getvalue()


HOSTILE = {
    "torch.save": as_zip,
    "bare pickle": lambda: pickle.dumps({"run": Code()}, 2),
    "eval in a zip": lambda: as_zip_with(
        b"cbuiltins\neval\n(Vtests.unit.test_checkpoint_reader.executed(2)\ntR."
    ),
    "os.system": lambda: as_zip_with(b"cposix\nsystem\n(Vtouch executed\ntR."),
}


def reseal(directory):
    """Update the manifest to match altered files."""
    manifest = Manifest.from_bytes((directory / MANIFEST).read_bytes())
    files = {}
    for name in manifest.files:
        content = (directory / name).read_bytes()
        files[name] = (len(content), hashlib.sha256(content).hexdigest())
    (directory / MANIFEST).write_bytes(replace(manifest, files=files).to_bytes())


@pytest.mark.parametrize("sealed", [False, True], ids=["altered", "sealed anew"])
@pytest.mark.parametrize("name", ["ranks-00001.pt", "state.pt", "weights.safetensors"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_pickle_that_would_execute_code_is_refused(pair, caplog, monkeypatch, kind, name, sealed):
    monkeypatch.chdir(pair.parent.parent)
    content = HOSTILE[kind]()
    (pair / name).write_bytes(content)
    if sealed:
        reseal(pair)
    check_refused(pair, name, caplog)
    assert EXECUTED == []
    assert not (pair.parent.parent / "executed").exists()


def test_the_malicious_pickles_execute_code_in_a_plain_unpickler():
    """Shows that the test above can fail."""
    pickle.loads(HOSTILE["bare pickle"]())
    assert EXECUTED == [(1,)]
    EXECUTED.clear()
    torch.load(io.BytesIO(as_zip()), weights_only=False)
    assert EXECUTED == [(1,)]
    EXECUTED.clear()


def test_files_are_parsed_only_after_their_digest_matched(pair, monkeypatch, caplog):
    parsed = []
    monkeypatch.setattr(store.torch, "load", lambda *a, **k: parsed.append(a))
    monkeypatch.setattr(store.tensor_file, "load", lambda *a: parsed.append(a))
    for directory in pair.parent.iterdir():
        for name in FILES[1:]:
            flip(directory / name, 70)
    with pytest.raises(CheckpointError):
        load_newest(pair.parent)
    assert parsed == []


@pytest.mark.parametrize(
    "state",
    [
        [],
        {},
        {"epoch": 1, "global_step": 2, "others": {}, "names": [], "run": {}},
        {
            "epoch": 1,
            "global_step": 99,
            "others": {},
            "names": [],
            "run": {},
            "compatible": {},
        },
        {"epoch": 1, "global_step": 2, "others": {}, "names": ["gone"]},
        {"epoch": 1, "global_step": 2, "others": 5, "names": []},
        {"epoch": 1, "global_step": 2, "others": {}, "names": [], "run": 3, "compatible": {}},
    ],
    ids=[
        "list",
        "empty",
        "nothing to compare",
        "other step",
        "a name too many",
        "no dict",
        "no run",
    ],
)
def test_an_altered_state_with_a_valid_digest_is_refused(pair, caplog, state):
    torch.save(state, pair / "state.pt")
    reseal(pair)
    check_refused(pair, "state.pt", caplog)


# -- content that is larger than its file ------------------------------------------------


def doubled(num_levels):
    """A list of ``2**num_levels`` items by reference."""
    value = [0]
    for _ in range(num_levels):
        value = [value, value]
    return value


def endless():
    value = []
    value.append(value)
    return value


def nested(num_levels):
    value = []
    for _ in range(num_levels):
        value = {"below": value}
    return value


def shared():
    row = [1.5] * 50_000
    return {"rows": [row] * 50_000}


def compressed():
    file, out = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.zeros(1 << 20)}, file)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return out.getvalue()


def saved(value):
    file = io.BytesIO()
    torch.save({"epoch": 2, "global_step": 20, "value": value}, file)
    return file.getvalue()


LARGE = {
    "shared 2^32 times": (lambda: saved(doubled(32)), r"bytes hold \d{12}, as parts are repeated"),
    "a long row shared": (lambda: saved(shared()), r"bytes hold \d{12}, as parts are repeated"),
    "one number as a large tensor": (
        lambda: saved(torch.zeros(1).expand(10**10)),
        "as parts are repeated",
    ),
    "one tensor often": (
        lambda: saved([torch.zeros(10_000)] * 100_000),
        "as parts are repeated",
    ),
    "holds itself": (lambda: saved(endless()), "nested more than 100 levels deep"),
    "nested": (lambda: saved(nested(400)), "nested more than 100 levels deep"),
    "nested by reference": (
        lambda: saved([inner := nested(60), nested_in(inner, 60)]),
        "nested more than 100 levels deep",
    ),
    "compressed": (compressed, "its parts are larger than the file"),
}


def nested_in(value, num_levels):
    for _ in range(num_levels):
        value = [value]
    return value


@pytest.mark.timeout(60)  # copied as they are, they need hours, or all memory
@pytest.mark.parametrize("name", ["ranks-00001.pt", "state.pt"])
@pytest.mark.parametrize("kind", LARGE)
def test_content_far_larger_than_its_file_is_refused(pair, caplog, kind, name):
    make_content, message = LARGE[kind]
    (pair / name).write_bytes(make_content())
    reseal(pair)
    check_refused(pair, name, caplog)
    assert re.search(message, caplog.text)


def test_content_of_the_usual_forms_is_not_too_large(tmp_path):
    """Shared tensors, many small items, and levels of settings."""
    table = torch.arange(50_000.0)
    state = {
        "tied": [table] * 50,
        "views": list(table.view(-1, 10)),
        "none": [None] * 300_000,
        "levels": nested(50),
        "groups": [{"betas": (0.9, 0.999), "lr": 0.1}] * 1000,
    }
    data = make(1)
    data.ranks[0].stepper.optimizer["more"] = state
    found = load_newest(write_checkpoint(tmp_path, data)).data.ranks[0].stepper.optimizer["more"]
    assert tree_map(str, found) == tree_map(str, state)
