"""Checkpoints within an epoch: by time, by batches, and after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator import messages as m
from coordinator.config import CoordinatorConfig
from runtime import AverageBackend, Trainer
from runtime.checkpoint.store import (
    CheckpointWriter,
    entries,
    load_newest,
    remove_old_checkpoints,
    write_checkpoint,
)
from tests.simulation.harness import Simulation
from tests.simulation.schedule import draw_schedule
from tests.support import programs
from tests.support.checkpointing import make, names
from tests.support.resuming import MarkingRun, consumed, marked
from tests.support.running import ASYNC, CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, over

ROOT = Path(__file__).parents[3]
AUTO = AverageBackend.AUTO


@over([(SYNC, THREAD), (CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, AUTO)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_is_written_every_n_batches(tmp_path, way, ranks):
    run = MarkingRun(n=240, ranks=ranks, way=way, epochs=1)
    run.on_step = lambda worker: time.sleep(0.005)
    b = run.builder().checkpoint_dir(tmp_path, keep=100, every_steps=25)
    b.run().join(WAIT_S)
    found = sorted(entries(tmp_path))
    within = [entry for entry in found if entry.within]
    assert len(within) >= 2
    assert [entry.within for entry in found][-1] is False, "the end is that of an epoch"
    assert len(within) <= 120 // 25
    for entry in within:
        assert entry.path.name.startswith(f"step-{entry.step:010d}-within-0000-")
        data = load_newest(entry.path).data
        held = marked(data.weights)
        assert held == consumed(data, run.n, run.batch_size)
        assert 0 < len(held) <= run.n  # all if it was taken late, in the last round of the epoch
        assert data.global_step == entry.step


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=["sync", "cadence"])
def test_resuming_within_an_epoch_trains_the_rest_once(tmp_path, way):
    first = MarkingRun(n=240, way=way, epochs=1)
    first.on_step = lambda worker: time.sleep(0.01)
    first.builder().checkpoint_dir(tmp_path, keep=100, every_steps=25).run().join(WAIT_S)
    entry = min(entry for entry in entries(tmp_path) if entry.within)
    held = marked(load_newest(entry.path).data.weights)
    again = MarkingRun(n=240, way=way, epochs=1)
    state = again.builder().resume(entry.path).run().join(WAIT_S)
    assert Counter(again.trained) == dict.fromkeys(again.all_samples() - held, 1)
    assert marked(state.params) == again.all_samples()


def test_checkpoints_within_and_at_the_end_of_epochs_are_counted_separately(tmp_path):
    for step in range(1, 8):
        write_checkpoint(tmp_path, replace(make(step), within=step % 3 != 0))
    remove_old_checkpoints(tmp_path, 2)
    left = sorted(entries(tmp_path))
    assert [(entry.step, entry.within) for entry in left] == [
        (3, False),
        (5, True),
        (6, False),
        (7, True),
    ]
    assert load_newest(tmp_path).data.global_step == 7


def test_a_name_of_an_earlier_version_means_the_end_of_an_epoch(tmp_path):
    path = write_checkpoint(tmp_path, make(4))
    path.rename(tmp_path / "step-0000000004-000001")
    assert [(e.step, e.serial, e.within) for e in entries(tmp_path)] == [(4, 1, False)]
    assert load_newest(tmp_path).data.global_step == 4
    assert write_checkpoint(tmp_path, make(5)).name.endswith("-000002")


def test_a_checkpoint_within_an_epoch_supersedes_none_at_its_end(tmp_path, monkeypatch):
    """While the disk is busy, one of each kind waits."""
    writer = CheckpointWriter(tmp_path, keep=5)
    writer._busy = True
    for step, within in ((1, False), (2, True), (3, True)):
        writer.submit(replace(make(step), within=within))
    assert writer.num_superseded == 1
    writer._work()
    assert [entry.step for entry in sorted(entries(tmp_path))] == [1, 3]
    assert writer.close(WAIT_S)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"every_s": 0}, "every_s"),
        ({"every_s": "1"}, "every_s"),
        ({"every_steps": 0}, "every_steps"),
        ({"every_steps": 1.5}, "every_steps"),
    ],
)
def test_invalid_settings_are_refused(tmp_path, setting, message):
    b = Trainer.builder(lambda d: None, lambda p: None, lambda m, b: None)
    with pytest.raises((TypeError, ValueError), match=message):
        b.checkpoint_dir(tmp_path, **setting)


@pytest.mark.parametrize("seed", range(60))
def test_checkpoints_of_simulated_runs_are_complete_and_in_time(seed):
    """The simulation validates each of them; see ``SaveChecks``."""
    schedule = draw_schedule(seed)
    c: CoordinatorConfig = schedule.config
    batch_s = schedule.batch_s(0, 0.0)
    schedule = replace(
        schedule,
        config=replace(
            c, save_every=1, save_every_s=10 * batch_s, save_every_steps=7 if seed % 2 else None
        ),
    )
    run = Simulation(schedule).run()
    for command in run.saved:
        assert isinstance(command, m.SaveCheckpoint)
        assert not (command.within and command.final)


SCRIPT = """
import sys, time, torch
sys.path.insert(0, {root!r})
from runtime import ApplyPolicy
from tests.support.resuming import MarkingRun
from tests.support.running import WAYS

run = MarkingRun(n=4000, batch_size=4, way=(ApplyPolicy({policy!r}), {backend}), epochs=1)
run.on_step = lambda worker: time.sleep(0.02)
b = run.builder().checkpoint_dir({directory!r}, every_s=1)
handle = b.run()
print("begun", flush=True)
while True:
    time.sleep(0.05)
    print(time.time(), handle.statistics().global_step, flush=True)
"""


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_killed_run_of_one_epoch_loses_at_most_two_seconds(tmp_path, policy):
    script = SCRIPT.format(
        root=str(ROOT), policy=policy, directory=str(tmp_path), backend="WAYS[0][1].AUTO"
    )
    process = programs.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "begun\n"
        printed = []
        while len(entries(tmp_path)) < 3:
            printed.append(process.stdout.readline().split())
        deadline = time.monotonic() + 0.5  # between two checkpoints
        while time.monotonic() < deadline:
            printed.append(process.stdout.readline().split())
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert not any(name.startswith("step-") and "-epoch-" in name for name in names(tmp_path))
    data = load_newest(tmp_path).data
    killed_at, reached = float(printed[-1][0]), int(printed[-1][1])
    # The progress of two seconds before the kill is in the checkpoint.
    before = [int(step) for at, step in printed if float(at) <= killed_at - 2.0]
    assert before, "the process was killed before its first checkpoint"
    assert before[-1] <= data.global_step <= reached + 1000
    held = marked(data.weights)
    assert held == consumed(data, 4000, 4)
    again = MarkingRun(
        n=4000, batch_size=4, way=(CADENCE if policy != "sync" else SYNC, AUTO), epochs=1
    )
    state = again.builder().resume(tmp_path).run().join(WAIT_S)
    assert Counter(again.trained) == dict.fromkeys(again.all_samples() - held, 1)
    assert marked(state.params) == again.all_samples()
