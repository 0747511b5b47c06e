"""Names of events, texts of errors, and readings that fail or do not end."""

from __future__ import annotations

import logging
import math
import threading
from types import SimpleNamespace

import pytest

from coordinator import messages as m
from coordinator.messages import ReportStall
from runtime import Kind, Timeline
from runtime.timeline import resources
from runtime.timeline.coordinator_lane import CoordinatorLane
from runtime.timeline.events import Event
from runtime.timeline.export import _counters, title
from runtime.timeline.nvml import NvmlGpus
from runtime.timeline.resources import ResourcePoller
from runtime.timeline.text import error_text
from tests.support.running import WAIT_S, builder
from tests.unit.worker.test_timeline_worker import make_machine


@pytest.mark.parametrize(
    ("kind", "args", "name"),
    [
        (Kind.MACHINES, {"round": 3, "machines": "a 1, b 2"}, "round 3 of a 1, b 2"),
        (Kind.TRANSPORT, {"backend": "GLOO"}, "over GLOO"),
        (Kind.STOP, {"reason": "abort requested"}, "abort requested"),
        (Kind.ANCHOR, {"before": 2, "anchor": 4}, "anchor 2 to 4"),
        (Kind.FAILURE, {"error": "ValueError: x"}, "failure: ValueError: x"),
    ],
)
def test_an_event_is_named_by_its_arguments(kind, args, name):
    assert title(Event(kind=kind, rank=None, start_s=0.0, end_s=0.0, args=args)) == name


def test_the_text_of_an_error_without_a_message_names_its_class():
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError("planted")

    assert error_text(Broken()) == "Broken: no message"
    assert error_text(ValueError("x\ny")) == r"ValueError: x\ny"


def test_values_that_are_not_finite_have_no_counter():
    run = SimpleNamespace(
        anchor_curve=lambda: (),
        throughput=lambda: (1.0, ()),
        resources=lambda: (("cpu", "used_bytes"), [(1.0, math.nan, 2.0**20), (2.0, 5.0, math.inf)]),
    )
    found = [(counter["name"], counter["args"]) for counter in _counters(run)]
    assert found == [("used MiB", {"MiB": 1.0}), ("cpu", {"percent": 5.0})]


def test_an_abort_and_a_stall_are_events_of_the_run():
    lane = CoordinatorLane(make_machine(), 0.0, 16)
    lane.observe(m.AbortRequested(), [], 1.0)
    lane.observe(m.Tick(), [ReportStall(error=ValueError("planted"), state="")], 2.0)
    events, _ = lane.read()
    assert [(event.kind, event.args["reason"]) for event in events] == [
        (Kind.STOP, "abort requested"),
        (Kind.STOP, "stalled"),
    ]


def test_a_failure_to_shut_nvml_down_is_logged(caplog):
    class NVMLError(Exception):
        pass

    def fails():
        raise NVMLError("planted")

    nvml = SimpleNamespace(NVMLError=NVMLError, nvmlShutdown=fails)
    with caplog.at_level(logging.DEBUG, "runtime.timeline.nvml"):
        NvmlGpus(nvml, []).close()
    assert "NVML could not be shut down" in caplog.text


def test_a_poller_whose_thread_cannot_start_closes_the_gpus(monkeypatch):
    gpus = SimpleNamespace(closed=0)
    poller = ResourcePoller(1.0, [], lambda devices: None)
    monkeypatch.setattr(poller, "_close_gpus", lambda: setattr(gpus, "closed", gpus.closed + 1))

    def fails():
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(poller._thread, "start", fails)
    with pytest.raises(RuntimeError, match="new thread"):
        poller.start()
    assert gpus.closed == 1
    poller.stop()  # the thread has never run


def test_a_reading_that_does_not_end_is_reported(monkeypatch, caplog):
    monkeypatch.setattr(resources, "STOP_S", 0.01)
    entered, release = threading.Event(), threading.Event()
    poller = ResourcePoller(0.001, [], lambda devices: None)

    def stuck():
        entered.set()
        assert release.wait(WAIT_S)
        return ()

    monkeypatch.setattr(poller, "_read_gpus", stuck)
    poller.start()
    assert entered.wait(WAIT_S)
    poller.stop()
    assert "did not end within 0.01 s" in caplog.text
    release.set()
    poller._thread.join(WAIT_S)
    assert not poller._thread.is_alive()


def test_a_timeline_ends_once_and_takes_no_time_before_a_run():
    timeline = Timeline()
    assert timeline._elapsed() == 0.0
    builder(ranks=1).timeline(timeline).run().join(WAIT_S)
    wall_s = timeline.summary().wall_s
    timeline.finish(stopped=True, error=ValueError("planted"))
    assert timeline.summary().state == "finished"
    assert timeline.summary().wall_s == wall_s
