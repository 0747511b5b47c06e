"""The worker protocol after the group of ranks was aborted."""

from __future__ import annotations

from coordinator import messages as m
from runtime.worker.protocol import WorkerProtocol, WorkerState

PLAN = m.EpochPlan(epoch=0, batches=(range(100),))


def training():
    protocol = WorkerProtocol(0)
    protocol.on_built()
    protocol.receive(m.StartEpoch(plan=PLAN))
    assert protocol.begin_plan() is PLAN
    return protocol


def halted():
    protocol = training()
    protocol.halt()
    return protocol


def test_a_halt_is_returned_once_for_each_group():
    protocol = training()
    halt = m.Halt(generation=0)
    assert protocol.receive(halt) is halt
    protocol.halt()
    assert protocol.receive(halt) is None
    protocol.on_regrouped(1)
    assert protocol.receive(halt) is None  # of a group that it has left
    assert protocol.receive(m.Halt(generation=1)) is not None


def test_a_halt_drops_all_plans():
    protocol = training()
    protocol.receive(m.StartEpoch(plan=PLAN))
    protocol.halt()
    assert protocol.begin_plan() is None
    assert protocol.state is WorkerState.HALTED


def test_a_plan_that_was_sent_before_the_halt_is_void():
    """The group was aborted before it was received; its batches are assigned again."""
    protocol = halted()
    assert not protocol.accepts(PLAN)
    protocol.receive(m.StartEpoch(plan=PLAN))
    assert protocol.begin_plan() is None
    protocol.on_regrouped(1)
    assert protocol.begin_plan() is None
    protocol.receive(m.StartEpoch(plan=PLAN))
    assert protocol.begin_plan() is PLAN


def test_a_halted_worker_leaves_on_shutdown():
    protocol = halted()
    protocol.receive(m.Shutdown())
    assert protocol.leaving
    protocol.on_gone()


def test_a_new_group_keeps_the_plan_of_a_worker_without_lockstep():
    protocol = training()
    regroup = m.Regroup(generation=1, ranks=(0, 2))
    assert protocol.receive(regroup) is regroup
    protocol.on_regrouped(1)
    assert protocol.plan is PLAN
    assert protocol.may_train


def test_a_leaving_worker_joins_no_new_group():
    protocol = training()
    protocol.receive(m.Shutdown())
    assert protocol.receive(m.Regroup(generation=1, ranks=(0, 2))) is None
    assert protocol.receive(m.Halt(generation=0)) is None


def test_the_counts_of_an_undone_round_join_those_of_the_next():
    protocol = training()
    protocol.on_trained(5, 50)
    message = m.SyncNow(round=3)
    assert protocol.receive(message) is message
    protocol.on_synced(message, ok=True)
    protocol.on_trained(2, 20)
    rollback = m.Rollback(round=3)
    assert protocol.receive(rollback) is rollback
    assert (protocol.batches, protocol.samples) == (7, 70)
    assert protocol.receive(rollback) is None  # once
    assert (protocol.batches, protocol.samples) == (7, 70)


def test_weights_cover_the_training_since_the_last_round():
    protocol = training()
    protocol.on_trained(5, 50, 0.1)
    protocol.on_snapshot_taken(1)
    protocol.on_trained(2, 20, 0.2)
    assert protocol.weight == 0.1 + 0.2
    assert protocol.on_updated(m.Update(round=1, average=None))
    assert protocol.weight == 0.2  # exactly: a rounding error would count as a weight
    protocol.on_snapshot_taken(2)
    assert protocol.on_updated(m.Update(round=2, average=None))
    assert protocol.weight == 0
    protocol.on_trained(1, 10, 0.5)
    protocol.add_weight(1.5)
    message = m.SyncNow(round=3)
    protocol.receive(message)
    protocol.on_synced(message, ok=True)
    assert protocol.weight == 0
    protocol.on_trained(1, 10)
    assert protocol.receive(m.Rollback(round=3)) is not None
    assert protocol.weight == 12.0
    assert protocol.discard_samples() == 20
    assert protocol.weight == 0


def test_a_round_that_was_not_applied_is_not_undone():
    protocol = training()
    protocol.on_trained(5, 50)
    message = m.SyncNow(round=3)
    protocol.receive(message)
    protocol.on_synced(message, ok=False)
    assert protocol.receive(m.Rollback(round=3)) is None
    assert (protocol.batches, protocol.samples) == (5, 50)
