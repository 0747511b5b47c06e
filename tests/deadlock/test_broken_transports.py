"""Failing transports: ``AUTO`` continues over another, a named one fails the run."""

from __future__ import annotations

import logging
import random
import time

import pytest

import runtime.run
from coordinator.averaging import Averager
from runtime import AverageBackend, Timeline, WorkerFailed
from runtime.collective import Collective, create_collectives
from runtime.core.errors import CollectiveAborted, mark_failed
from tests.deadlock.faults import BOUND_S
from tests.deadlock.tap import within
from tests.deadlock.test_life_after_a_death import BATCH, NUM_SAMPLES, check_books
from tests.support.running import ASYNC, CADENCE, OVER_CPU, SYNC, THREAD, builder, count_up
from tests.unit.test_survival import effects, train_samples

AUTO, NCCL = AverageBackend.AUTO, AverageBackend.NCCL
EPOCHS = 24  # about as many rounds: enough for the fault, and three failures in a row after it
END_S = 10.0


class Wire:
    """Collectives whose exchanges fail, from a chosen one on, or at random.

    Args:
        monkeypatch: Of the test.
        kind: The kind that is broken.
        at: The first exchange of a rank that fails; ``None``: by chance.
        connects: True if a group can be connected.

    Attributes:
        num_cut: Exchanges that failed.
    """

    def __init__(self, monkeypatch, *, kind="thread", at=0, connects=True):
        self.num_cut = self.num_refused = self.num_calls = 0
        rng, wire = random.Random(7), self

        def broken(world_size, made="thread", devices=None, timeout_s=60.0):
            if made == kind and not connects:
                wire.num_refused += 1
                raise CollectiveAborted("no connection")
            ends = create_collectives(world_size, "thread", devices, timeout_s)
            for end in ends if made == kind else ():
                end.weighted_mean_ = wire.cut(end, at, rng)
            return ends

        monkeypatch.setattr(runtime.run, "create_collectives", broken)

    def cut(self, end, at, rng):
        def weighted_mean_(tensors, weight, *, tally=0.0):
            if end.rank == 0:
                self.num_calls += 1
                fails = self.num_calls > at if at is not None else rng.random() < 0.4
                if fails:
                    self.num_cut += 1
                    end.abort()
                    raise mark_failed(CollectiveAborted("the wire is cut"))
            return Collective.weighted_mean_(end, tensors, weight, tally=tally)

        return weighted_mean_


def run_over(faults, way, timeline=None):
    b = faults(train_samples, effects).builder(
        dataset=NUM_SAMPLES, batch_size=BATCH, ranks=3, epochs=EPOCHS, way=way
    )
    if timeline is not None:
        b.timeline(timeline)
    return b.anchor(1).max_failed_rounds(3).run()


BREAKS = {
    "that does not connect": {"connects": False},
    "broken at once": {"at": 0},
    "broken at round 3": {"at": 2},
    "broken at random": {"at": None},
}


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("policy", [CADENCE, ASYNC])
def test_auto_falls_back_to_the_cpu(policy, how, faults, monkeypatch, caplog):
    """D36: no rank waits in a broken collective, and no sample is lost."""
    wire = Wire(monkeypatch, **BREAKS[how])
    with within(END_S), caplog.at_level(logging.WARNING, "coordinator"):
        handle = run_over(faults, (policy, AUTO), timeline := Timeline())
        state = handle.join(BOUND_S)
    check_books(state, [], epochs=EPOCHS)
    assert wire.num_cut or wire.num_refused
    fallbacks = [
        r.getMessage() for r in caplog.records if "the run continues over" in r.getMessage()
    ]
    if how != "broken at random":  # random faults may never occur three times in a row
        assert handle.backend is OVER_CPU
        assert "THREAD failed" in handle.backend_reason
        assert len(fallbacks) == 1
        (event,) = [e for e in timeline.events() if e.kind.value == "transport"]
        assert (event.args["backend"], event.args["before"]) == ("CPU", "CPU")
        assert timeline.summary().facts.backend_reason == handle.backend_reason


@pytest.mark.parametrize("how", [name for name in BREAKS if name != "broken at random"])
def test_a_failed_named_transport_ends_the_run(how, faults, monkeypatch):
    """D36: the user requested it, and receives the error."""
    Wire(monkeypatch, **BREAKS[how])
    with within(END_S), pytest.raises(RuntimeError, match=r"no connection|the wire is cut"):
        run_over(faults, (CADENCE, THREAD)).join(BOUND_S)


def test_any_error_in_a_collective_is_a_fault_of_the_transport(faults, monkeypatch):
    """D36: under a named transport it kills the rank, under ``AUTO`` the transport."""

    def fails(end, *args, **kwargs):
        raise RuntimeError("an exchange that cannot be")

    monkeypatch.setattr(Collective, "weighted_mean_", fails)
    state = run_over(faults, (CADENCE, AUTO)).join(BOUND_S)
    check_books(state, [], epochs=EPOCHS)
    with pytest.raises(WorkerFailed, match="cannot be"):
        run_over(faults, (CADENCE, THREAD)).join(BOUND_S)


@pytest.mark.parametrize("how", BREAKS)
def test_sync_falls_back_to_shared_memory(how, faults, monkeypatch):
    """D36: from an agreed step, its gradients discarded; NCCL has a stand-in."""
    monkeypatch.setattr(runtime.run, "resolve_backend", lambda *_, **__: (NCCL, "a stand-in"))
    wire = Wire(monkeypatch, kind="nccl", **BREAKS[how])
    with within(END_S):
        handle = run_over(faults, (SYNC, AUTO))
        state = handle.join(BOUND_S)
    check_books(state, [], epochs=EPOCHS)
    assert wire.num_cut or wire.num_refused
    if how != "broken at random":
        assert handle.backend is THREAD
        assert "NCCL failed" in handle.backend_reason
    # Each step counts once, as without a fault.
    with monkeypatch.context() as patch:
        patch.setattr(runtime.run, "create_collectives", create_collectives)
        patch.setattr(runtime.run, "resolve_backend", lambda *_, **__: (THREAD, "plain"))
        plain = run_over(faults, (SYNC, THREAD)).join(BOUND_S)
    assert state.params["w"].equal(plain.params["w"])


@pytest.mark.usefixtures("no_garbage_collection")
def test_the_faster_of_collective_and_coordinator_is_chosen(monkeypatch):
    """D36: the cheaper backend is chosen, whichever was first."""
    slow = Collective.weighted_mean_

    def delayed(end, *args, **kwargs):
        time.sleep(0.03)
        return slow(end, *args, **kwargs)

    def step(model, batch):
        time.sleep(0.004)
        return count_up(model, batch)

    def steps():
        b = builder(train=step, dataset=600, batch_size=2, way=(CADENCE, AUTO))
        return b.anchor(2).max_anchor(2).run()

    with monkeypatch.context() as patch:
        patch.setattr(Collective, "weighted_mean_", delayed)
        handle = steps()
        handle.join(BOUND_S)
        assert handle.backend is OVER_CPU, handle.backend_reason
    average = Averager.average

    def late(averager, *args, **kwargs):
        time.sleep(0.05)
        return average(averager, *args, **kwargs)

    monkeypatch.setattr(Averager, "average", late)
    handle = steps()
    handle.join(BOUND_S)
    assert handle.backend is THREAD, handle.backend_reason
    assert "ms a round" in handle.backend_reason
