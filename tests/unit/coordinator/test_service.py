"""The service between the coordinator and its queues, with real threads."""

from __future__ import annotations

import queue
import threading
import time

import pytest
import torch

from coordinator import messages as m
from coordinator import service as service_module
from coordinator.config import CoordinatorConfig
from coordinator.machine import Coordinator
from coordinator.messages import AbortCollective, Average, PublishEpoch, Send
from coordinator.metrics import EpochAccumulator
from coordinator.service import Service

WAIT_S = 60.0
"""Bound of every wait: reached only by a test that fails."""


class Scripted(Coordinator):
    """A coordinator with scripted commands."""

    def __init__(self, script, *, world=2, deadline=None):
        super().__init__(
            CoordinatorConfig(devices=("cpu",) * world, num_samples=10, batch_size=1, num_epochs=1)
        )
        self.script = script
        self.events = []
        self.ended = False
        self.due = deadline

    @property
    def deadline(self):
        return self.due

    @property
    def done(self):
        return self.ended

    def handle(self, event, now):
        self.events.append(event)
        return self.script(self, event)


class Bench:
    """A service whose effects are recorded in order."""

    def __init__(self, machine, world=2):
        self.machine = machine
        self.inbox = queue.SimpleQueue()
        self.outboxes = [queue.SimpleQueue() for _ in range(world)]
        self.log = []
        self.ended = threading.Event()
        self.service = Service(
            machine,
            self.inbox,
            self.outboxes,
            abort_collective=lambda generation: self.log.append("abort"),
            on_metrics=lambda metrics: self.log.append(metrics.epoch),
            on_end=self.end,
        )

    def end(self):
        self.log.append("end")
        self.ended.set()

    def run(self, *events):
        self.service.start()
        for event in events:
            self.inbox.put(event)
        assert self.ended.wait(WAIT_S)
        assert self.service.join(WAIT_S)
        return self


def threads():
    return {t.name for t in threading.enumerate()} & {"coordinator", "averager"}


def metrics_from_state(epoch):
    return EpochAccumulator(1).close(epoch=epoch, epoch_s=0.0, num_samples=0, devices=("cpu",))


def test_commands_are_executed_in_order():
    shutdown = m.Shutdown()

    def script(machine, event):
        machine.ended = True
        return [
            PublishEpoch(metrics=metrics_from_state(3)),
            Send(rank=1, message=m.Throttle()),
            AbortCollective(),
            PublishEpoch(metrics=metrics_from_state(4)),
            Send(rank=1, message=shutdown),
        ]

    bench = Bench(Scripted(script)).run(m.StopRequested())
    assert bench.log == [3, "abort", 4, "end"]
    assert [bench.outboxes[1].get_nowait() for _ in range(2)] == [m.Throttle(), shutdown]
    assert bench.outboxes[0].empty()


def test_events_are_handled_in_order():
    def script(machine, event):
        machine.ended = event == m.Ready(rank=9)
        return []

    events = [m.Ready(rank=r) for r in (3, 1, 2, 9)]
    bench = Bench(Scripted(script)).run(*events)
    assert bench.machine.events == events


def test_the_time_of_observers_is_not_a_cost_of_averaging():
    """Otherwise observers would make rounds rarer."""

    def observe(event, commands, now):
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass

    spent = []

    def script(machine, event):
        spent.append(machine.run_state.spent_s)
        machine.ended = event == m.Ready(rank=1)
        return []

    bench = Bench(Scripted(script))
    bench.service.observe(observe)
    bench.run(m.Ready(rank=0), m.Ready(rank=1))
    assert 0 <= spent[1] - spent[0] < 0.05


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
def test_a_failed_coordinator_thread_wakes_all_ranks_and_keeps_its_error(error, caplog):
    """D35: Python's queues never disconnect."""

    def script(machine, event):
        raise error

    bench = Bench(Scripted(script)).run(m.StopRequested())
    assert bench.machine.outcome.failure.error is error
    assert bench.log == ["abort", "end"]
    for outbox in bench.outboxes:
        assert outbox.get_nowait() == m.Shutdown(snapshot=False)
    assert threads() == set()
    assert "the coordinator's thread died" in caplog.text


def test_a_passed_deadline_is_a_tick():
    def script(machine, event):
        machine.ended = isinstance(event, m.Tick)
        return []

    bench = Bench(Scripted(script, deadline=0.0)).run()
    assert bench.machine.events == [m.Tick()]


def test_an_average_is_returned_as_an_event():
    seen = []

    def script(machine, event):
        match event:
            case m.StopRequested():
                payloads = tuple(m.Payload(params=(torch.tensor([value]),)) for value in (1.0, 4.0))
                return [Average(round=7, ranks=(0, 2), payloads=payloads, weights=(2, 1))]
            case m.Averaged():
                seen.append(event)
                machine.ended = True
        return []

    Bench(Scripted(script)).run(m.StopRequested())
    (averaged,) = seen
    assert averaged.round == 7
    assert averaged.num_samples == 3
    assert averaged.average.params[0].item() == 2.0
    assert averaged.divergences == ((0, 0.5), (2, 1.0))
    assert threads() == set()


def test_a_failed_average_is_returned_with_its_error(caplog):
    seen = []

    def script(machine, event):
        if isinstance(event, m.Averaged):
            seen.append(event)
            machine.ended = True
            return []
        payloads = (m.Payload(params=(torch.zeros(1),)), m.Payload(params=(torch.zeros(2),)))
        return [Average(round=1, ranks=(0, 1), payloads=payloads, weights=(1, 1))]

    Bench(Scripted(script)).run(m.StopRequested())
    assert seen[0].average is None
    assert isinstance(seen[0].error, ValueError)
    assert "averaging round 1 failed" in caplog.text


def test_a_failed_thread_start_leaves_no_thread_behind(monkeypatch):
    bench = Bench(Scripted(lambda machine, event: []))

    def refuse():
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(bench.service._thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        bench.service.start()
    assert not bench.service.started
    bench.service._averager.join(WAIT_S)
    assert threads() == set()


def test_an_average_without_memory_for_a_copy_is_not_kept(monkeypatch, caplog):
    def fails(average):
        raise MemoryError("planted")

    payload = m.Payload(params=(torch.ones(2),), buffers=(), other_buffers=())
    assert service_module._copy(payload).params[0].tolist() == [1, 1]
    monkeypatch.setattr(service_module, "clone_payload", fails)
    assert service_module._copy(payload) is None
    assert "an average could not be copied for a checkpoint" in caplog.text
