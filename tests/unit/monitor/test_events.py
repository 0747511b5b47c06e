"""Events of a run without a timeline, from its counters; the monitor's address; a listed run."""

from __future__ import annotations

import errno
from dataclasses import replace
from types import SimpleNamespace

import pytest

from coordinator.config import AverageBackend, CoordinatorConfig
from coordinator.machine import Coordinator
from runtime.monitor import event_buffer, hosts
from runtime.monitor.control import ListedRun
from runtime.monitor.event_buffer import EventBuffer


def counters(ranks=2):
    config = CoordinatorConfig(devices=("cpu",) * ranks, num_samples=8, batch_size=2, num_epochs=1)
    return Coordinator(config).statistics()


def test_changes_of_counters_are_events():
    buffer = EventBuffer(SimpleNamespace(timeline=None))
    first = counters()
    assert buffer.since_last(first, (), None, 1.0) == []
    parked, dead = first.ranks
    now = replace(
        first,
        num_averagings=3,
        backend=AverageBackend.GLOO,
        backend_reason="planted",
        ranks=(replace(parked, num_throttles=2), replace(dead, alive=False)),
    )
    found = {event["kind"]: event for event in buffer.since_last(now, (), None, 2.0)}
    assert found.keys() == {"averaging", "transport", "throttle", "failure"}
    assert found["averaging"]["args"] == {"times": 3}
    assert found["transport"]["args"] == {
        "backend": "GLOO",
        "before": first.backend.name,
        "reason": "planted",
    }
    assert (found["throttle"]["rank"], found["throttle"]["args"]) == (0, {"times": 2})
    assert found["failure"]["rank"] == 1
    assert buffer.since_last(now, (), None, 3.0) == []


def test_events_beyond_the_limit_are_counted(monkeypatch):
    monkeypatch.setattr(event_buffer, "MAX_NEW_EVENTS", 2)
    buffer = EventBuffer(SimpleNamespace(timeline=None))
    epochs = [SimpleNamespace(epoch=epoch) for epoch in range(5)]
    found = buffer.since_last(counters(), epochs, SimpleNamespace(state="finished"), 1.0)
    assert [event["kind"] for event in found] == ["more", "epoch", "epoch", "finished"]
    assert found[0]["args"] == {"events": 3}
    assert [event["args"]["epoch"] for event in found[1:3]] == [3, 4]


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EADDRINUSE, "it is in use: pass another port"),
        (errno.EACCES, "it may not be used by this user: pass one from 1024 up"),
        (errno.EADDRNOTAVAIL, "pass a host of this machine, such as"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_with_the_remedy(code, remedy, monkeypatch):
    def fails(*args, **kwargs):
        raise OSError(code, "planted")

    monkeypatch.setattr(hosts.socket, "create_server", fails)
    with pytest.raises(
        OSError, match=rf"cannot listen on port 80 of localhost: {remedy}"
    ) as caught:
        hosts.listen("localhost", 80)
    assert caught.value.errno == code


def test_a_listed_run_without_a_recent_step_has_the_means_of_the_whole_run():
    statistics = replace(counters(), loss_sum=6.0, loss_weight=4.0)
    run = SimpleNamespace(
        measure=lambda: lambda: SimpleNamespace(rate=0.0, loss=0.0, epoch=1, left_s=None),
        statistics=lambda: statistics,
        describe=lambda: {"name": "run"},
        num_epochs=3,
        total_batches=10,
    )
    found = ListedRun(run).read(lambda seconds: None)
    assert (found["name"], found["loss"], found["samples_per_s"]) == ("run", 1.5, 0.0)
