"""Deaths and delays at the edges of a run: its start, its end, its memory."""

import gc
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from coordinator.messages import AbortCollective
from coordinator.run_errors import AveragingFailed, RunStalled
from runtime import ApplyPolicy, NonFiniteError, WorkerFailed, current_worker
from tests.simulation.harness import Simulation
from tests.simulation.schedule import Pace, Schedule
from tests.simulation.test_unequal_speeds import every_way, schedule_of
from tests.support import programs
from tests.support.running import (
    CADENCE,
    LOCAL_WAYS,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    Trace,
    builder,
    count_up,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
@pytest.mark.parametrize("mode", ["raise", "continue"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_worker_thread_that_cannot_be_started_ends_the_run(way, mode, error, monkeypatch):
    """Also with "continue": run() has not returned, so nothing could stop the run."""
    start, trace = threading.Thread.start, Trace()

    def refuse(thread):
        if thread.name == "gpu-worker-1":
            raise error("planted")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    b = builder(train=trace, dataset=10_000, way=way).on_worker_failure(mode)._set(grace_s=30.0)
    began = time.monotonic()
    with pytest.raises(error, match="planted"):
        b.run()
    assert time.monotonic() - began < 15.0, "it is not waited for"
    assert len(trace.batches) < 100


@every_way
def test_a_rank_that_is_stuck_for_ever_ends_the_run_with_its_name(policy, backend):
    """No rank may train for hours without averaging; under ASYNC all park."""
    schedule = schedule_of(
        policy,
        backend,
        slowness=(1.0, 1.0, 1.0),
        num_samples=100_000,
        num_epochs=1,
        collective_timeout_s=2.0,
        snapshot_timeout_s=2.0,
    )
    stuck = (*schedule.paces[1], Pace(start_s=0.5, batch_s=1e9))
    paces = (schedule.paces[0], stuck, schedule.paces[2])
    run = Simulation(
        Schedule(
            config=schedule.config,
            paces=paces,
            average_s=schedule.average_s,
            delay_s=schedule.delay_s,
            collective_timeout_s=2.0,
        )
    ).run()
    error = run.machine.outcome.failure.error
    parks = policy is ApplyPolicy.ASYNC
    assert isinstance(error, RunStalled if parks else AveragingFailed)
    assert "timeout" in str(error)
    (failed_s,) = [time for time, _, what in run.trace if what == AbortCollective()]
    assert failed_s < (310.0 if parks else 30.0)


def run_script(script, *arguments, **kwargs):
    return programs.run(
        [sys.executable, "-c", script, *arguments], timeout=WAIT_S * 2, whole_end=True, **kwargs
    )


EXIT = """
import sys, threading
from tests.support import programs
from tests.support.running import ApplyPolicy, AverageBackend, builder, count_up
begun = threading.Event()
def train(model, batch):
    begun.set()
    return count_up(model, batch)
way = (ApplyPolicy(sys.argv[1]), AverageBackend(sys.argv[2]))
handle = builder(train=train, dataset=10, epochs=10**6, way=way).run()
begun.wait(20)
if sys.argv[3] == "raises":
    raise ValueError("planted")
"""


@pytest.mark.parametrize(
    ("way", "how"),
    [
        (("sync", "thread"), "raises"),
        (("cadence", "gloo"), "ends"),
        (("cadence", "gloo"), "raises"),
        (("cadence", "cpu"), "ends"),
    ],
)
def test_a_process_that_ends_without_a_join_ends_quietly(way, how):
    """Daemon threads that are killed inside PyTorch would abort the process."""
    found = run_script(EXIT, *way, how)
    assert found.returncode == (how == "raises"), found.stderr
    assert "terminate called" not in found.stderr
    assert ("planted" in found.stderr) == (how == "raises")


GROUP = """
import os, signal, threading, time
import torch
from torch.utils.data import Dataset
from tests.support import programs
from tests.support.running import builder, count_up
class Read(Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        return torch.tensor(index)
def ignore(*_):
    pass
def train(model, batch):
    if sent.acquire(blocking=False):
        while signal.getsignal(signal.SIGTERM) is ignore:  # until somebody waits for the run
            time.sleep(0.001)
        os.killpg(0, signal.SIGTERM)
    return count_up(model, batch)
if __name__ == "__main__":
    programs.fork_the_fork_server()
    sent = threading.Lock()
    signal.signal(signal.SIGTERM, ignore)
    b = builder(train=train, dataset=Read(), epochs=10**6)
    handle = b.loader_workers(1).run()
    try:
        handle.join()
    except KeyboardInterrupt:
        print("state" if handle.state is not None else "none")
"""


def test_after_sigterm_to_the_process_group_loaders_continue_to_the_boundary(tmp_path):
    """As sent by a job manager: the run stops at a step boundary and needs data until then."""
    path = tmp_path / "group.py"
    path.write_text(GROUP, encoding="utf-8")
    found = programs.run(
        [sys.executable, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=WAIT_S * 2,
        start_new_session=True,
        whole_end=True,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["state"], found.stderr
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


class Seen(nn.Module):
    """Counts its forwards in a buffer."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


@pytest.mark.parametrize("step", [1, 2])
def test_under_sync_buffers_forget_a_step_that_was_not_made(step):
    steps = 0

    def look(model, batch):
        nonlocal steps
        if current_worker().rank == 1:
            steps += 1
            if steps > step:
                raise ValueError("planted")
        model.seen += 1
        return count_up(model, batch)

    state = (
        builder(model=lambda device: Seen(), train=look, dataset=20, way=(SYNC, THREAD))
        .on_worker_failure("continue")
        .run()
        .join(WAIT_S)
    )
    assert [f.rank for f in state.failures] == [1]
    assert int(state.buffers["seen"]) == state.metrics[0].per_rank[0].num_batches


@pytest.mark.parametrize("way", LOCAL_WAYS)
def test_the_replica_of_a_dead_rank_is_freed_while_the_others_train(way):
    models = []

    def die(model, batch):
        if current_worker().rank == 1:
            models.append(weakref.ref(model))
            raise ValueError("planted")
        return count_up(model, batch)

    handle = (
        builder(train=die, dataset=20, epochs=10_000, ranks=3, way=way)
        .on_worker_failure("continue")
        .run()
    )
    while handle.statistics().ranks[1].alive:
        handle.next_metrics(WAIT_S)
    for thread in threading.enumerate():
        if thread.name == "gpu-worker-1":
            thread.join(WAIT_S)
    assert handle.next_metrics(WAIT_S) is not None  # the others go on
    gc.collect()
    assert models[0]() is None
    assert [r.alive for r in handle.statistics().ranks] == [True, False, True]
    handle.stop()
    state = handle.join(WAIT_S)
    assert state.stopped
    assert [f.rank for f in state.failures] == [1]


@pytest.mark.parametrize(
    "error",
    [WorkerFailed(1, 2, 3, ValueError("planted")), NonFiniteError(1, 2, "gradient", "w")],
)
def test_errors_can_be_sent_to_another_process(error):
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.rank == 1
