"""Validation of intact checkpoints whose content no run writes."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coordinator.codec import decode, encode
from coordinator.machine import Coordinator
from runtime import AverageBackend, CheckpointError, ReplicaMismatch, WorkerFailed
from runtime.checkpoint import format as manifest
from runtime.checkpoint.content import CheckpointData
from runtime.checkpoint.format import MANIFEST, Manifest
from runtime.checkpoint.resume import check_content
from runtime.checkpoint.store import load_newest, write_checkpoint
from tests.support import programs
from tests.support.checkpointing import rewrite
from tests.support.pairs import SCALE
from tests.support.resuming import MarkingRun, marked
from tests.support.running import CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, builder, count_up

ROOT = Path(__file__).parents[3]
WAYS = {"sync": (SYNC, THREAD), "cadence": (CADENCE, OVER_CPU)}


def cut_run(way):
    """A run stopped in its second epoch, and its checkpoint."""
    run = MarkingRun(n=60, way=WAYS[way])
    return run, run.builder().max_steps(41)


@pytest.fixture(scope="module", params=list(WAYS))
def written(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    run, b = cut_run(request.param)
    b.checkpoint_dir(path).run().join(WAIT_S)
    return request.param, run, load_newest(path).data


def resumed(way, path):
    rest = MarkingRun(n=60, way=WAYS[way])
    before = set(threading.enumerate())
    try:
        return rest.builder().resume(path).run().join(WAIT_S)
    finally:
        assert set(threading.enumerate()) <= before


def drop(*keys):
    def edit(data):
        target = data
        for key in keys[:-1]:
            target = target[key]
        del target[keys[-1]]

    return edit


def put(value, *keys):
    def edit(data):
        target = data
        for key in keys[:-1]:
            target = target[key]
        target[keys[-1]] = value

    return edit


def copied(value):
    """A copy of nested containers; tensors and long lists are shared."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and len(value) < 100:
        return type(value)(copied(item) for item in value)
    return value


def altered(data, edit):
    """The content of a checkpoint with one change, as it is read from files."""
    parts = copied(encode(data))
    edit(parts)
    return decode(CheckpointData, parts, "")


FAULTS = {
    "no epochs": (drop("run", "epochs"), r"run has no 'epochs'"),
    "an epoch before the first": (put(-1, "run", "next_epoch"), r"\['next_epoch'\] is -1"),
    "no ranks": (put([], "run", "ranks"), "the states of 2 ranks of 0"),
    "no file of a rank": (drop("ranks", 1), r"the states of 1 ranks of 2, .* of ranks \[0, 1\]"),
    "an open epoch is missing": (drop("run", "epochs", 0), r"run\['epochs'\] are"),
    "a closed epoch is missing": (drop("run", "metrics", 0), r"\['metrics'\]|run\['epochs'\] are"),
    "ranges that overlap": (
        put([[0, 5], [3, 6]], "run", "epochs", 0, "consumed"),
        r"\['consumed'\]\[1\] is \[3, 6\]",
    ),
    "a range outside": (
        put([[0, 10**9]], "run", "epochs", 0, "consumed"),
        r"\['consumed'\]\[0\] is \[0, 1000000000\]",
    ),
    "a step that is none": (put(10**9, "run", "global_step"), r"\['global_step'\] is 1000000000"),
    "a negative sum": (
        put(-3, "run", "epochs", 0, "sums", 0, "num_samples"),
        r"\['num_samples'\] is -3",
    ),
    "no anchor": (drop("run", "elche", "anchor"), r"\['elche'\] has no 'anchor'"),
    "an anchor that is none": (put(math.nan, "run", "elche", "anchor"), r"\['anchor'\] is nan"),
    "metrics with more": (put(1, "run", "metrics", 0, "more"), r"has \['more'\], which"),
    "a batch of nothing": (put(0, "settings", "batch_size"), r"settings\['batch_size'\] is 0"),
    "no optimizer": (drop("ranks", 0, "stepper"), r"rank 0 has no 'stepper'"),
    "a generator of lead": (
        put(torch.zeros(3, dtype=torch.uint8), "ranks", 0, "generators", "torch"),
        r"\['torch'\] is not a generator's state",
    ),
    "a rank at no position": (put([1, 2], "ranks", 1, "together"), r"\['together'\] has 2"),
    "metrics in another order": (
        put(1, "run", "metrics", 0, "epoch"),
        r"\['metrics'\]\[0\]\['epoch'\] is 1",
    ),
    "a buffer of text": (put({"b": "x"}, "ranks", 1, "buffers"), r"\['buffers'\]\['b'\] is 'x'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_content_is_refused_with_the_fields_name(fault, written, tmp_path):
    way, _, data = written
    edit, message = FAULTS[fault]
    rewrite(write_checkpoint(tmp_path, data), edit)
    with pytest.raises(CheckpointError, match=message):
        resumed(way, tmp_path)


def test_lockstep_ranks_at_different_steps_are_refused(written):
    way, _, data = written
    step, *others = data.ranks[1].together
    data = altered(data, put([step + 1, *others], "ranks", 1, "together"))
    if way == "sync":
        with pytest.raises(ValueError, match=r"rank 1\['together'\] is .*, as for rank 0"):
            check_content(data)
    else:
        check_content(data)


def test_a_step_that_differs_from_that_of_the_manifest_is_refused(written, tmp_path):
    _, _, data = written
    path = write_checkpoint(tmp_path, data)
    manifest = Manifest.from_bytes((path / MANIFEST).read_bytes())
    other = replace(manifest, global_step=data.global_step - 1)
    (path / MANIFEST).write_bytes(other.to_bytes())
    with pytest.raises(CheckpointError, match=r"state\.pt: its step differs from the manifest's"):
        load_newest(path)


def test_a_checkpoint_without_a_state_of_any_rank_is_refused(written):
    _, _, data = written
    with pytest.raises(ValueError, match="it holds the states of 0 ranks of 2"):
        check_content(replace(data, ranks=()))


@pytest.mark.parametrize("order", [torch.zeros(60), torch.zeros(59, dtype=torch.int64)])
def test_an_order_of_the_wrong_dtype_or_length_is_refused(order, written):
    _, _, data = written
    check_content(replace(data, orders={1: torch.zeros(60, dtype=torch.int64)}))
    with pytest.raises(ValueError, match=r"orders\[1\] is not a list of 60 samples"):
        check_content(replace(data, orders={1: order}))


def test_an_epoch_without_counted_samples_is_valid(written):
    _, _, data = written
    check_content(altered(data, put(0, "run", "metrics", 0, "num_samples")))


def test_the_checkpoint_before_a_refused_one_is_used(written, tmp_path, caplog):
    way, run, data = written
    write_checkpoint(tmp_path, data)
    rewrite(write_checkpoint(tmp_path, data), drop("run", "epochs"))
    state = resumed(way, tmp_path)
    assert "run has no 'epochs'" in caplog.text
    assert marked(state.state_dict()) == run.all_samples()


def places(value, at=()):
    """The path of every value in nested dictionaries and lists."""
    yield at
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*at, key))
    elif isinstance(value, (list, tuple)) and len(value) < 100:
        for i, item in enumerate(value):
            yield from places(item, (*at, i))


WRONG = [None, -1, 2**70, math.nan, "text", [], {}, [None], {"a": 1}, torch.zeros(2)]


def test_any_value_of_a_field_is_refused_or_restored(written):
    """Deletes each field of the coordinator's state, and replaces it by values of every type."""
    way, run, data = written
    _, b = cut_run(way)
    assert check_content(data) is None
    num_refused = num_taken = 0
    for place in places(encode(data.run)):
        for edit in (drop("run", *place), *(put(wrong, "run", *place) for wrong in WRONG)):
            if not place:
                continue
            try:
                tried = altered(data, edit)
                check_content(tried)
            except ValueError:
                num_refused += 1
            else:
                restore(b._settings, run, tried)
                num_taken += 1
    assert num_refused > 5 * num_taken > 0


def restore(settings, run, data):
    """Check that valid content can be restored by the coordinator."""
    cpu = torch.device("cpu")
    made = settings.resolve([cpu, cpu], run.n, AverageBackend.THREAD)
    Coordinator(made.coordinator, data.run)


# -- ranks and manifest ----------------------------------------------------------------------


class One(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x[:, None].double() * self.w).mean()


def adam_run(way):
    return builder(
        model=lambda device: One().to(device),
        optim=lambda params: torch.optim.AdamW(params, lr=0.01),
        train=lambda model, batch: model(batch[0]),
        dataset=24,
        epochs=3,
        way=WAYS[way],
    ).tune_allocator(False)


@pytest.fixture(scope="module", params=list(WAYS))
def adam(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(f"adam-{request.param}")
    adam_run(request.param).max_steps(17).checkpoint_dir(path).run().join(WAIT_S)
    return request.param, load_newest(path).data


def outcome_of(way, path):
    """The finished state; ``None`` if the checkpoint was refused, or its replicas differed."""
    try:
        return adam_run(way).resume(path).run().join(WAIT_S)
    except (CheckpointError, ReplicaMismatch):
        return None
    except WorkerFailed as error:
        if isinstance(error.__cause__, CheckpointError):
            return None
        raise


@pytest.mark.timeout(240)
def test_any_value_in_a_ranks_state_is_refused_or_harmless(adam, tmp_path, monkeypatch):
    """Deletes each field of a rank's own state, and replaces it by values of every type.

    Where it is the same code that takes them, the values take turns.
    """
    way, data = adam
    monkeypatch.setattr(os, "fsync", lambda file: None)
    every = 17 if SCALE == 1 else 1 if way == "sync" else 3
    num_refused = num_taken = num_edits = 0
    for part in ("ranks", "settings"):
        root = encode(data.ranks[0] if part == "ranks" else data.settings)
        at = (part, 0) if part == "ranks" else (part,)
        for place in places(root):
            for edit in (drop(*at, *place), *(put(wrong, *at, *place) for wrong in WRONG)):
                num_edits += 1
                if not place or num_edits % every:
                    continue
                try:
                    tried = altered(data, edit)
                    check_content(tried)
                except TypeError:  # within a tuple
                    continue
                except ValueError:
                    num_refused += 1
                    continue
                path = tmp_path / str(num_refused + num_taken)
                write_checkpoint(path, tried)
                state = outcome_of(way, path)
                num_refused += state is None
                num_taken += state is not None
                if state is not None:
                    assert torch.isfinite(state.params["w"]).all(), place
                    assert [m.num_samples for m in state.metrics] == [24, 24, 24], place
    assert num_refused > 4 * num_taken > 0


JSON_WRONG = [None, -1, 2**70, math.nan, "text", [], {}, [None], True, 1.5]


def test_any_value_in_the_manifest_is_refused_or_harmless(adam, tmp_path):
    """As above for the manifest, whose digest is recomputed."""
    _, data = adam
    file = write_checkpoint(tmp_path, data) / "manifest.json"
    body = json.loads(file.read_bytes())
    del body["sha256"]
    taken = []
    for place in places(body):
        for edit in (drop(*place), *(put(wrong, *place) for wrong in JSON_WRONG)) if place else ():
            tried = copy.deepcopy(body)
            edit(tried)
            text = manifest._dump(tried)
            whole = {**tried, "sha256": hashlib.sha256(text).hexdigest()}
            file.write_bytes(manifest._dump(whole))
            try:
                found = load_newest(tmp_path, check=check_content).data
            except CheckpointError:
                continue
            assert (found.epoch, found.global_step) == (data.epoch, data.global_step)
            taken.append(place[0])
    assert set(taken) <= {"about", "version"}


# -- links -------------------------------------------------------------------------------


def test_links_out_of_the_directory_are_not_followed(written, tmp_path):
    way, run, data = written
    inside, outside = tmp_path / "in", tmp_path / "out"
    good = write_checkpoint(outside, data)
    inside.mkdir()
    (inside / good.name).symlink_to(good)
    with pytest.raises(CheckpointError, match=f"{good.name}: a link, which is not followed"):
        resumed(way, inside)
    (inside / good.name).unlink()
    copied = write_checkpoint(inside, data)
    weights = copied / "weights.safetensors"
    weights.unlink()
    weights.symlink_to(good / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"weights\.safetensors: "):
        resumed(way, inside)
    # The user's path may itself be a link.
    (tmp_path / "link").symlink_to(outside)
    assert marked(resumed(way, tmp_path / "link").state_dict()) == run.all_samples()


# -- two runs in one directory -------------------------------------------------------------


def held_back():
    """A run blocked in its first step, and the event that releases it."""
    has_begun, may_go = threading.Event(), threading.Event()

    def train(model, batch):
        has_begun.set()
        may_go.wait(WAIT_S)
        return count_up(model, batch)

    return train, has_begun, may_go


def test_a_second_active_run_in_a_directory_is_refused_before_any_thread_starts(tmp_path):
    train, has_begun, may_go = held_back()
    first = builder(train=train).checkpoint_dir(tmp_path).run()
    try:
        assert has_begun.wait(WAIT_S)
        before = set(threading.enumerate())
        (tmp_path / "sub").mkdir()
        for same in (tmp_path, tmp_path / "sub" / ".."):
            with pytest.raises(CheckpointError, match="checkpoint_dir of another run"):
                builder().checkpoint_dir(same).run()
        assert set(threading.enumerate()) == before
        builder().checkpoint_dir(tmp_path / "other").run().join(WAIT_S)
    finally:
        may_go.set()
        first.join(WAIT_S)


@pytest.mark.parametrize("end", ["well", "failed", "stopped", "aborted", "never begun"])
def test_a_run_unlocks_its_directory_however_it_ends(end, tmp_path, monkeypatch):
    train, has_begun, may_go = held_back()
    if end == "never begun":
        with monkeypatch.context() as patch:
            patch.setattr("coordinator.service.Service.start", _cannot)
            with pytest.raises(RuntimeError, match="no more threads"):
                builder().checkpoint_dir(tmp_path).run()
    elif end == "failed":
        with pytest.raises(RuntimeError, match="planted"):
            builder(train=_planted).checkpoint_dir(tmp_path).run().join(WAIT_S)
    else:
        handle = builder(train=train).checkpoint_dir(tmp_path).run()
        assert has_begun.wait(WAIT_S)
        if end == "stopped":
            handle.stop()
        elif end == "aborted":
            handle._run.abort()
        may_go.set()
        if end == "aborted":
            with pytest.raises(RuntimeError):
                handle.join(WAIT_S)
        else:
            handle.join(WAIT_S)
    builder().checkpoint_dir(tmp_path).run().join(WAIT_S)


def _cannot(self):
    raise RuntimeError("no more threads")


def _planted(model, batch):
    raise RuntimeError("planted")


HOLDER = """
import sys, threading, torch
from runtime import Trainer

def train(model, batch):
    print("trains", flush=True)
    threading.Event().wait()

data = (torch.randn(40, 4), torch.randn(40, 1))
Trainer.builder(
    lambda device: torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, 0.1), train
).dataset(data).batch_size(2).num_epochs(1).devices(["cpu"]).checkpoint_dir(sys.argv[1]).run().join()
"""


def test_another_process_locks_its_directory_until_it_is_killed(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with programs.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, env=environment
    ) as process:
        try:
            assert process.stdout.readline() == b"trains\n"
            with pytest.raises(CheckpointError, match="checkpoint_dir of another run"):
                builder().checkpoint_dir(tmp_path).run()
        finally:
            process.kill()
    builder().checkpoint_dir(tmp_path).run().join(WAIT_S)
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("step-")] == []
