"""Edge cases of checkpoints and resuming."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.serialization import config

from coordinator.codec import decode, encode
from coordinator.metrics import Sums
from runtime import CheckpointError, checkpoint_service
from runtime.checkpoint import files, store
from runtime.checkpoint.content import SavedGenerators
from runtime.checkpoint.format import MANIFEST, Manifest, plain
from runtime.checkpoint.store import load_newest, write_checkpoint
from runtime.core.signals import INTERRUPTS
from runtime.device.cuda import open_device
from runtime.worker.rank_checkpoint import _generators, _restore_process
from tests.support.checkpointing import make, same
from tests.support.resuming import MarkingRun
from tests.support.running import CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, Trace, builder
from tests.support.signalling import Probe, Waits, as_found
from tests.unit.checkpoint.test_writer import SlowDisk

# -- settings ----------------------------------------------------------------------------


def test_an_epoch_opened_ahead_is_not_trained_if_num_epochs_is_lower(tmp_path):
    run, rest = MarkingRun(n=20), MarkingRun(n=20)
    run.builder().num_epochs(2).max_steps(11).checkpoint_dir(tmp_path).run().join(WAIT_S)
    data = load_newest(tmp_path).data
    (opened,) = data.run.epochs
    opened = replace(opened, consumed=(), num_samples=0, sums=(Sums(), Sums()))
    data = replace(data, run=replace(data.run, global_step=10, epochs=(opened,)))
    path = write_checkpoint(tmp_path / "edited", data)
    state = rest.builder().num_epochs(1).resume(path).run().join(WAIT_S)
    assert [m.epoch for m in state.metrics] == [0]
    assert not rest.trained


def lrs(optimizer):
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5)


@pytest.mark.parametrize("scheduler", [None, lrs])
@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        ({}, None),
        ({"lr": 0.5}, "lr=0.25 is used in group 0 of the optimizer, not 0.5"),
        ({"momentum": 0.9}, "momentum=0.5 is used in group 0 of the optimizer, not 0.9"),
        ({"nesterov": True}, "nesterov=False is used in group 0 of the optimizer, not True"),
    ],
)
def test_changed_optimizer_settings_without_effect_are_logged(
    tmp_path, settings, warning, scheduler, caplog
):
    def make_optimizer(**more):
        b = builder(optim=lambda p: torch.optim.SGD(p, **{"lr": 0.25, "momentum": 0.5, **more}))
        return b if scheduler is None else b.scheduler(scheduler)

    make_optimizer().checkpoint_dir(tmp_path).run().join(WAIT_S)
    caplog.clear()
    make_optimizer(**settings).num_epochs(2).resume(tmp_path).run().join(WAIT_S)
    found = [r.getMessage() for r in caplog.records if "is used in group" in r.getMessage()]
    assert len(found) == (warning is not None)
    assert all(warning in message for message in found)


def test_a_learning_rate_scaled_by_the_number_of_workers_is_not_logged(tmp_path, caplog):
    for ranks in (1, 3):
        b = builder(ranks=ranks, epochs=ranks).lr_scale_ratio(1.0)
        b.resume(tmp_path, True).checkpoint_dir(tmp_path).run().join(WAIT_S)
    assert not [r for r in caplog.records if "is used in group" in r.getMessage()]


def cyclic(optimizer):
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, step_size_up=3)


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=200)


def cyclic_later(optimizer):
    first = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    both = [first, cyclic(optimizer)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, both, milestones=[1])


@pytest.mark.parametrize("scheduler", [cyclic, one_cycle, cyclic_later])
def test_a_momentum_that_the_scheduler_changes_is_not_logged(tmp_path, scheduler, caplog):
    for epochs in (1, 2):
        made = builder(optim=lambda p: torch.optim.SGD(p, 0.25, momentum=0.5), epochs=epochs)
        made.scheduler(scheduler).resume(tmp_path, True).checkpoint_dir(tmp_path).run().join(WAIT_S)
    assert not [r for r in caplog.records if "is used in group" in r.getMessage()]


def test_an_optimizer_of_another_class_is_refused(tmp_path):
    builder(optim=lambda p: torch.optim.SGD(p, 1.0)).checkpoint_dir(tmp_path).run().join(WAIT_S)
    b = builder(optim=lambda p: torch.optim.AdamW(p), epochs=2)
    with pytest.raises(CheckpointError, match="holds the state of SGD, not of AdamW"):
        b.resume(tmp_path).run().join(WAIT_S)


def test_checkpoints_of_another_run_in_the_directory_are_logged(tmp_path, caplog):
    builder().checkpoint_dir(tmp_path).run().join(WAIT_S)
    builder(epochs=2).checkpoint_dir(tmp_path).resume(tmp_path).run().join(WAIT_S)
    assert "of another run" not in caplog.text
    builder().checkpoint_dir(tmp_path).run().join(WAIT_S)
    assert "checkpoints of another run, which will be removed" in caplog.text


# -- user state ------------------------------------------------------------------------------


class Failing(torch.optim.SGD):
    def state_dict(self):
        raise KeyError("planted")


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=["SYNC", "CADENCE"])
def test_a_failing_state_dict_ends_a_run_with_checkpoints_before_its_first_step(way, tmp_path):
    trace = Trace()
    b = builder(optim=lambda p: Failing(p, 1.0), train=trace, epochs=3, way=way)
    with pytest.raises(CheckpointError, match="could be resumed: KeyError: 'planted'"):
        b.checkpoint_dir(tmp_path).run().join(WAIT_S)
    assert not trace.steps


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=["SYNC", "CADENCE"])
def test_a_failing_state_dict_fails_a_save_and_does_not_stop_training(way, tmp_path, caplog):
    b = builder(optim=lambda p: Failing(p, 1.0), epochs=10_000, way=way)
    with b.run() as handle:
        with pytest.raises(CheckpointError, match="was not captured: KeyError: 'planted'"):
            handle.save(tmp_path)
        assert handle.next_metrics(WAIT_S) is not None
        handle.stop()
        state = handle.join(WAIT_S)
    assert "its state could not be captured" in caplog.text
    # A traceback would keep the replicas alive as long as the state.
    assert state.checkpoint_errors[0].__cause__.__traceback__ is None


def test_any_numpy_bit_generator_is_restored(alone_context, caplog):
    before = np.random.get_bit_generator()
    try:
        for kind in (np.random.PCG64, np.random.SFC64, np.random.Philox, np.random.MT19937):
            np.random.set_bit_generator(kind(3))
            found = encode(_generators(torch.Generator(), alone_context))
            saved = decode(SavedGenerators, plain(found, "state", copy=True), "state")
            expected = np.random.rand(3)
            _restore_process(saved, alone_context)
            assert (np.random.rand(3) == expected).all()
        np.random.set_bit_generator(np.random.PCG64(3))
        _restore_process(saved, alone_context)
        assert "NumPy's global generator was not restored" in caplog.text
    finally:
        np.random.set_bit_generator(before)


@pytest.fixture
def alone_context():
    return open_device(torch.device("cpu"), 1)


# -- files -----------------------------------------------------------------------------


def test_directories_created_for_a_checkpoint_are_flushed(tmp_path, monkeypatch):
    flushed, real = [], files.flush_directory

    def flush(path):
        flushed.append(path)
        real(path)

    monkeypatch.setattr(files, "flush_directory", flush)
    monkeypatch.setattr(store, "flush_directory", flush)
    write_checkpoint(tmp_path / "a" / "b", make())
    assert flushed[:2] == [tmp_path, tmp_path / "a"]
    assert flushed[-1] == tmp_path / "a" / "b"


@pytest.mark.parametrize("number", ["Infinity", "1e400", "-1", "[]"])
def test_a_manifest_with_an_invalid_number_is_refused(tmp_path, number):
    path = write_checkpoint(tmp_path, make())
    body = json.loads((path / MANIFEST).read_bytes().replace(b'"epoch": 1', b'"epoch": 17171717'))
    del body["sha256"]
    for file in body["files"].values():
        file["bytes"] = 17171717
    text = (json.dumps(body, indent=1) + "\n").replace("17171717", number)
    digest = hashlib.sha256((json.dumps(json.loads(text), indent=1) + "\n").encode()).hexdigest()
    sealed = json.dumps({**json.loads(text), "sha256": digest}, indent=1) + "\n"
    (path / MANIFEST).write_text(sealed)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_newest(path)
    with pytest.raises(CheckpointError, match=r"instead of an integer|not a size and a SHA-256"):
        Manifest.from_bytes(sealed.encode())


def test_checkpoints_are_read_with_mmap_enabled_by_default(tmp_path):
    path = write_checkpoint(tmp_path, make())
    with config.patch("load.mmap", True):
        assert same(load_newest(path).data, make())


def test_a_tilde_in_a_path_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    builder().run().join(WAIT_S).save("~/weights.safetensors")
    assert (tmp_path / "weights.safetensors").is_file()


# -- a hanging disk ----------------------------------------------------------------------


def test_the_second_signal_stops_waiting_for_a_hanging_disk(tmp_path, monkeypatch):
    disk, warned, probe = SlowDisk(monkeypatch), threading.Event(), Probe()
    waits = Waits(monkeypatch)
    monkeypatch.setattr("runtime.core.signals.REPETITION_S", 0.0)
    monkeypatch.setattr(checkpoint_service, "WARN_AFTER_S", 0.0)
    monkeypatch.setattr(checkpoint_service.logger, "warning", lambda *args: warned.set())
    handle = builder().checkpoint_dir(tmp_path).run()
    disk.await_begin(1)

    def interrupt():
        assert waits.entered.wait(WAIT_S)
        assert warned.wait(WAIT_S)
        for answered in (probe.stopped, probe.aborted):
            os.kill(os.getpid(), signal.SIGINT)
            assert answered.wait(WAIT_S)

    thread = threading.Thread(target=interrupt)
    with as_found():
        INTERRUPTS.add(probe)
        try:
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                handle.join()
            thread.join(WAIT_S)
        finally:
            INTERRUPTS.remove(probe)
            disk.allow(9)
    assert len(handle.state.metrics) == 1
    (error,) = handle.state.checkpoint_errors
    assert f"the run ended before its last checkpoint was written to {tmp_path}" in str(error)
    assert handle._run._saves._writer.wait(WAIT_S)
