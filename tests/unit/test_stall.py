"""Stalled runs, with real threads, and the report of every thread's stack."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
import weakref
from functools import partial

import pytest
import torch

from coordinator import messages as m
from coordinator import service
from coordinator.metrics import ReportStats
from coordinator.run_errors import GpuWorkerError
from coordinator.stall import NUM_KEPT, MessageLog, StallDetector, thread_stacks
from runtime import RunStalled
from runtime.settings import RunSettings
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    Gate,
    builder,
    count_up,
    over,
    train,
    until,
)
from tests.unit.coordinator.test_service import Bench, Scripted

TIMEOUT_S = 0.5
BOUND_S = 5.0
"""More than timeout and grace together, less than any wait of the run."""


@pytest.fixture(autouse=True, scope="module")
def _warm():
    """Build once: the first build of a process takes longer than the timeout here."""
    train()


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch):
    monkeypatch.setattr("runtime.trainer.RunSettings", partial(RunSettings, grace_s=0.1))


class Stuck:
    """A user function that blocks until it is released."""

    def __init__(self):
        self.released = threading.Event()

    def stand_still(self, *args):
        assert self.released.wait(WAIT_S)


@pytest.fixture
def stuck():
    stuck = Stuck()
    yield stuck
    stuck.released.set()


def stack_of(name, report):
    """The stack of the thread of this name in a report."""
    ident = re.search(rf"(?m)^(0x[0-9a-f]+) {name}$", report)[1]
    return re.split(rf"hread {ident}\b", report)[1].split("\n\n")[0]


def report_of(run):
    """Let a run stall; returns its error."""
    handle = run.stall_timeout(TIMEOUT_S).run()
    start = time.monotonic()
    with pytest.raises(RunStalled, match="raise stall_timeout") as caught:
        handle.join()
    assert TIMEOUT_S * 0.9 < time.monotonic() - start < BOUND_S
    with pytest.raises(RunStalled):
        handle.join()
    assert handle.state is None or handle.state.reason == "stalled"
    return caught.value


@over([(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, THREAD)])
def test_a_step_that_does_not_return_ends_the_run_with_a_report(way, stuck, caplog):
    gate = Gate(rank=1)
    gate.opened = stuck.released
    error = report_of(builder(train=gate, dataset=1000, way=way))
    assert isinstance(error, GpuWorkerError)
    assert re.search(r'running\.py", line \d+ in __call__', stack_of("gpu-worker-1", error.report))
    assert "in join" in stack_of("MainThread", error.report)
    assert "in run" in stack_of("gpu-worker-0", error.report)
    assert f"phase running, policy {way[0].name} over {way[1].name}" in error.report
    assert "rank 1: rank=1, state=live" in error.report
    assert "ledger: epoch 0" in error.report
    assert "to rank 1:\n" in error.report
    assert "s ago  StartEpoch, epoch 0\n" in error.report
    assert "s ago  Ready\n" in error.report
    assert any("stuck in user code: gpu-worker-1" in note for note in error.__notes__)
    assert error.report in error.__notes__
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert record.getMessage() == error.report


def test_a_model_that_is_never_built_ends_the_run_before_any_message(stuck):
    error = report_of(builder(model=stuck.stand_still))
    assert "phase starting" in error.report
    assert "in stand_still" in error.report
    assert "== last messages ==\nnone" in error.report
    stuck.released.set()


def test_an_evaluation_that_does_not_return_ends_the_run(stuck):
    def evaluate(model, epoch):
        stuck.stand_still()
        return {}

    error = report_of(builder().eval_fn(evaluate))
    assert "in evaluate" in error.report
    assert "in the round" in error.report


@pytest.mark.leaks_thread("prefetch-0", "prefetch-1")
def test_a_data_set_that_does_not_return_ends_the_run_and_names_its_thread(stuck):
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 100

        def __getitem__(self, i):
            stuck.stand_still()
            return torch.tensor(i)

    error = report_of(builder(dataset=Slow()))
    stacks = [stack_of(f"prefetch-{rank}", error.report) for rank in range(2)]
    assert any("in stand_still" in stack for stack in stacks)  # the other may wait for its turn


def test_steps_shorter_than_the_timeout_are_no_stall_however_many():
    pause = threading.Event()

    def slow(model, batch):
        pause.wait(0.02)
        return count_up(model, batch)

    run = builder(train=slow, dataset=70, batch_size=1, ranks=1).stall_timeout(1.0)
    start = time.monotonic()
    run.run().join(WAIT_S)
    assert time.monotonic() - start > 1.0


def test_the_longest_timeout_is_not_shortened(monkeypatch):
    """A queue cannot be waited for as long: the end of a shorter wait is no stall."""
    monkeypatch.setattr(service, "MAX_WAIT_S", 0.01)
    ticks, check = [], StallDetector.check

    def checked(self, now):
        ticks.append(self.deadline)
        return check(self, now)

    monkeypatch.setattr(StallDetector, "check", checked)
    gate = Gate()
    handle = builder(train=gate).stall_timeout(sys.float_info.max).run()
    gate.await_entry()
    until(lambda: len(ticks) >= 3)
    gate.opened.set()
    assert len(handle.join(WAIT_S).metrics) == 1
    assert set(ticks) == {sys.float_info.max}


# -- the service ----------------------------------------------------------------------


class Watched(Scripted):
    """A coordinator that records the start of its watch."""

    def __init__(self, deadline):
        super().__init__(self.end, deadline=deadline)
        self.starts = []

    def restart_stall_timer(self, now):
        self.starts.append(now)

    @staticmethod
    def end(machine, event):
        machine.ended = True
        return []


@pytest.mark.parametrize(("late_s", "starts"), [(0.0, 1), (60.0, 2)])
def test_time_in_which_the_process_was_suspended_does_not_count(late_s, starts):
    machine = Watched(time.monotonic() + 0.01 - late_s)
    Bench(machine).run()
    assert machine.events == [m.Tick()]
    assert len(machine.starts) == starts


def test_a_report_that_cannot_be_made_still_ends_the_run(stuck, monkeypatch, caplog):
    def broken(*args):
        raise OSError("no source")

    monkeypatch.setattr("coordinator.service.stall_report", broken)
    error = report_of(builder(train=stuck.stand_still, ranks=1))
    assert error.report == ""
    assert "the stall report failed" in caplog.text


# -- the messages kept -------------------------------------------------------------------


def test_the_last_messages_are_listed_by_rank_and_direction_with_their_age():
    log = MessageLog()
    log.received(m.Ready(rank=1), 10.0)
    log.sent(1, m.Throttle(limit=3), 10.5)
    log.received(m.StopRequested(), 11.0)
    log.received(m.Ready(rank=0), 11.5)
    log.sent(0, m.Resume(), 11.5)
    assert log.text(12.0).splitlines() == [
        "from the service:",
        "      1.000 s ago  StopRequested",
        "from rank 0:",
        "      0.500 s ago  Ready",
        "to rank 0:",
        "      0.500 s ago  Resume",
        "from rank 1:",
        "      2.000 s ago  Ready",
        "to rank 1:",
        "      1.500 s ago  Throttle",
    ]


def test_only_the_last_messages_are_kept():
    log = MessageLog()
    for step in range(100):
        log.sent(0, m.SetGlobalStep(step=step), float(step))
    log.received(m.EpochReport(rank=0, epoch=7, stats=ReportStats()), 100.0)
    lines = log.text(100.0).splitlines()
    assert lines[1] == "      0.000 s ago  EpochReport, epoch 7"
    ages = [f"{100 - step:9.3f} s ago  SetGlobalStep" for step in range(100 - NUM_KEPT, 100)]
    assert lines[3:] == [f"  {age}" for age in ages]


def with_tensors(tensor):
    payload = m.Payload(params=(tensor,))

    def fail(held):
        raise ValueError("with a frame that holds it")

    try:
        fail(tensor)
    except ValueError as error:
        failed = m.Failed(rank=0, epoch=0, step=0, error=error)
    return (
        m.ParamSnapshot(rank=0, round=7, payload=payload, num_samples=1, num_batches=1),
        m.FinalSnapshot(rank=0, payload=payload, num_samples=1),
        m.Averaged(round=7, average=payload),
        m.SyncAck(rank=0, round=7, average=payload, extra={"a": tensor}),
        m.Halted(rank=0, generation=0, step=0, error=failed.error),
        failed,
    ), (m.Update(round=7, average=payload), m.RunTasks(tasks=(), state=payload))


def test_no_message_kept_holds_a_tensor():
    log = MessageLog()
    tensor = torch.zeros(3)
    alive = weakref.ref(tensor)
    events, messages = with_tensors(tensor)
    for event in events:
        log.received(event, 0.0)
    for message in messages:
        log.sent(0, message, 0.0)
    del tensor, events, event, messages, message
    gc.collect()
    assert alive() is None
    assert log.text(0.0).count("round 7") == 4
    assert "s ago  Failed, epoch 0" in log.text(0.0)


def test_the_stack_of_every_thread_is_listed_with_its_name(stuck, monkeypatch):
    """Frames of running threads, which must not be read without the GIL, are not read."""
    monkeypatch.delattr(sys, "_current_frames")
    started = threading.Event()

    def here_it_waits():
        started.set()
        stuck.stand_still()

    thread = threading.Thread(target=here_it_waits, name="some thread")
    thread.start()
    assert started.wait(WAIT_S)
    text = thread_stacks()
    stuck.released.set()
    thread.join(WAIT_S)
    assert "in here_it_waits" in stack_of("some thread", text)
    assert "test_the_stack_of_every_thread" in stack_of("MainThread", text)
    assert "some thread" not in thread_stacks()


def test_a_report_without_a_temporary_file_has_the_reason_in_place_of_stacks(monkeypatch):
    def fails():
        raise OSError("planted")

    monkeypatch.setattr("coordinator.stall.tempfile.TemporaryFile", fails)
    assert thread_stacks() == "no stacks, since no temporary file could be created: planted"
