"""Where an average is computed: in the coordinator's own thread if it is small."""

from __future__ import annotations

import threading

import pytest
import torch

from coordinator import messages as m
from coordinator import service as service_module
from coordinator.averaging import Averager
from coordinator.messages import Average
from tests.unit.coordinator.test_service import Bench, Scripted


def average_of(payloads):
    return Average(round=1, ranks=(0, 1), payloads=payloads, weights=(1, 1))


@pytest.mark.parametrize(
    ("num_bytes", "name"), [(1 << 16, "coordinator"), (1 << 24, "averager")], ids=["small", "large"]
)
def test_only_a_small_average_is_computed_in_the_coordinators_thread(monkeypatch, num_bytes, name):
    """Training, plans and limits go on while a large one is computed."""
    found = []

    class Named(Averager):
        def average(self, payloads, weights, squares):
            found.append(threading.current_thread().name)
            return super().average(payloads, weights, squares)

    monkeypatch.setattr(service_module, "Averager", Named)
    payloads = (m.Payload(params=(torch.ones(num_bytes // 8),)),) * 2  # bytes of both together

    def script(machine, event):
        machine.ended = isinstance(event, m.Averaged)
        return [] if machine.ended else [average_of(payloads)]

    Bench(Scripted(script)).run(m.Ready(rank=0))
    assert found == [name]


def test_a_small_average_goes_out_before_other_events_are_handled():
    payloads = (m.Payload(params=(torch.ones(1),)),) * 2

    def script(machine, event):
        machine.ended |= event == m.Ready(rank=1)
        return [average_of(payloads)] if event == m.Ready(rank=0) else []

    bench = Bench(Scripted(script))
    events = [m.Ready(rank=0), m.Ready(rank=1)]
    for event in events:
        bench.inbox.put(event)
    bench.run()
    first, averaged, last = bench.machine.events
    assert [first, last] == events
    assert isinstance(averaged, m.Averaged)
