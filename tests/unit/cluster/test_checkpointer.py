"""Intervals of the checkpoints of a cluster."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.cluster.cluster_ledger import ClusterLedger
from coordinator.cluster.grant import Grant
from coordinator.cluster.machine_report import MachineReport
from runtime.checkpoint.store import entries
from runtime.cluster import checkpointer as checkpointer_module
from runtime.cluster.checkpointer import ClusterCheckpointer, ClusterCheckpointOptions
from tests.support.checkpointing import make

BATCHES = 500


def commit(ledger):
    """A round in which one machine has trained its grant; returns its number of batches."""
    done = ledger.grants.get("a", Grant()).batches
    report = MachineReport(
        machine="a",
        step=ledger.step,
        lineage=ledger.lineage,
        consumed=ledger.consumed,
        settings=ledger.settings,
        done=done,
        seconds_per_batch=0.1,
    )
    return ledger.commit([report])


def new_ledger(num_epochs=1):
    return ClusterLedger(
        settings={},
        num_epochs=num_epochs,
        batches_per_epoch=BATCHES,
        period_s=1.0,
        max_batches=None,
    )


def test_no_state_is_made_for_a_request_that_has_timed_out():
    checkpointer, ledger, made = ClusterCheckpointer(ClusterCheckpointOptions()), new_ledger(), []

    def state():
        made.append(make())
        return made[-1]

    with pytest.raises(TimeoutError, match=r"no round between machines within 0\.01 s"):
        checkpointer.request(0.01)
    commit(ledger)
    checkpointer.after_round(ledger, state)
    assert made == []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(checkpointer.request, 30.0)
        while not checkpointer._requests:
            assert not waiting.done()
        checkpointer.after_round(ledger, state)
        assert waiting.result() is made[0]
    checkpointer.close()


@pytest.mark.parametrize(
    ("settings", "num_epochs", "least"),
    [
        ({"every_steps": 45}, 1, 45),
        ({"every": 2}, 8, 2 * BATCHES),
        ({"every_s": 1e9}, 1, BATCHES),
    ],
    ids=["steps", "epochs", "seconds"],
)
def test_a_checkpoint_is_due_once_an_interval(settings, num_epochs, least, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer_module, "check_content", lambda data: None)  # of no run
    ledger = new_ledger(num_epochs)
    options = ClusterCheckpointOptions(directory=tmp_path, keep=99, **settings)
    checkpointer = ClusterCheckpointer(options)
    checkpointer.start_from(ledger)
    made = []
    while not ledger.ended:
        commit(ledger)
        checkpointer.after_round(ledger, lambda: (made.append(ledger.consumed), make())[1])
    checkpointer.close()
    total = num_epochs * BATCHES
    assert made[-1] == total
    assert len(made) <= -(-total // least)
    assert len(made) >= min(4, total // least)
    assert entries(tmp_path)
