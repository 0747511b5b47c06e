"""Intervals of the checkpoints of a cluster."""

from __future__ import annotations

import pytest

from coordinator.cluster.grant import Grant
from coordinator.cluster.ledger import ClusterLedger
from coordinator.cluster.machine_report import MachineReport
from runtime.checkpoint.store import entries
from runtime.cluster.checkpointer import ClusterCheckpointer, ClusterCheckpointOptions
from tests.support.checkpointing import make


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


@pytest.mark.parametrize(
    ("settings", "least"), [({"every_steps": 45}, 45), ({"every": None, "every_s": 1e9}, None)]
)
def test_a_checkpoint_is_due_once_an_interval(settings, least, tmp_path):
    ledger = ClusterLedger(
        settings={}, num_epochs=1, batches_per_epoch=1000, period_s=1.0, max_batches=None
    )
    options = ClusterCheckpointOptions(directory=tmp_path, keep=99, **settings)
    checkpointer = ClusterCheckpointer(options)
    checkpointer.start_from(ledger)
    made = []
    while not ledger.ended:
        commit(ledger)
        checkpointer.after_round(ledger, lambda: (made.append(ledger.consumed), make())[1])
    checkpointer.close()
    gaps = [b - a for a, b in zip([0, *made], made, strict=False)]
    if least is None:
        assert len(made) == 1
    else:
        assert len(made) > 5
        assert min(gaps[:-1]) >= least
    assert entries(tmp_path)
