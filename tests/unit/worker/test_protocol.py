"""The worker's side of the control protocol."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import messages as m
from runtime.worker.protocol import IllegalTransition, WorkerProtocol, WorkerState
from tests.support.running import task

EMPTY = m.Payload(params=())
PLAN = m.EpochPlan(epoch=0, batches=(range(100),))


def training(limit=None, report_after=None):
    """A worker in the middle of a plan."""
    protocol = WorkerProtocol(0)
    protocol.on_built()
    protocol.receive(m.Resume(budget=m.BatchBudget(limit=limit, report_after=report_after)))
    protocol.receive(m.StartEpoch(plan=PLAN))
    assert protocol.begin_plan() is PLAN
    return protocol


def parked():
    protocol = training()
    protocol.receive(m.Throttle())
    assert protocol.parked
    return protocol


def train(protocol, batches):
    for _ in range(batches):
        assert protocol.may_train
        protocol.on_trained(1, 10)


def release(protocol, message):
    work = protocol.receive(message)
    if isinstance(work, m.SyncNow):
        protocol.on_synced(work, ok=True)
    elif isinstance(work, m.Update):
        assert protocol.on_updated(work)


# -- states -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "next_state"),
    [
        (WorkerState.GONE, WorkerState.IDLE),
        (WorkerState.GONE, WorkerState.LEAVING),
        (WorkerState.LEAVING, WorkerState.TRAINING),
        (WorkerState.LEAVING, WorkerState.SYNCING),
        (WorkerState.BUILDING, WorkerState.TRAINING),
        (WorkerState.BUILDING, WorkerState.SYNCING),
        (WorkerState.TRAINING, WorkerState.BUILDING),
        (WorkerState.TRAINING, WorkerState.GONE),
    ],
)
def test_an_illegal_transition_raises_and_changes_nothing(state, next_state):
    protocol = WorkerProtocol(3, state=state)
    with pytest.raises(IllegalTransition, match="worker 3"):
        protocol.transition(next_state)
    assert protocol.state is state


# -- parking ------------------------------------------------------------------------------


def test_a_worker_goes_through_the_states_from_building_to_gone():
    protocol = WorkerProtocol(0)
    assert protocol.state is WorkerState.BUILDING
    protocol.on_built()
    assert protocol.state is WorkerState.IDLE
    protocol.receive(m.StartEpoch(plan=PLAN))
    protocol.begin_plan()
    assert protocol.state is WorkerState.TRAINING
    protocol.end_plan()
    assert protocol.state is WorkerState.IDLE
    protocol.receive(m.Shutdown())
    assert protocol.state is WorkerState.LEAVING
    protocol.on_gone()
    assert protocol.state is WorkerState.GONE
    protocol.leave()
    assert protocol.state is WorkerState.GONE


@pytest.mark.parametrize(
    "message",
    [
        m.Resume(),
        m.SyncNow(round=1),
        m.Update(round=1, average=EMPTY),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_parked_worker_is_released_by(message):
    protocol = parked()
    protocol.on_snapshot_taken(1)
    release(protocol, message)
    assert not protocol.parked
    assert protocol.may_train


@pytest.mark.parametrize(
    "message",
    [
        m.RequestParams(round=1),
        m.StartEpoch(plan=PLAN),
        m.SetGlobalStep(step=5),
        m.RunTasks(tasks=(task(m.TaskKind.EVALUATE),)),
        m.Throttle(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_parked_worker_is_not_released_by(message):
    protocol = parked()
    protocol.receive(message)
    assert protocol.parked


def test_a_worker_parks_at_its_limit_and_reports_at_once():
    protocol = training(limit=2)
    train(protocol, 2)
    assert protocol.parked
    assert protocol.report_due
    protocol.on_reported()
    assert not protocol.report_due


# -- rounds -----------------------------------------------------------------------------------


def test_seven_and_four_minus_five_and_three_is_two_and_one():
    """D19: counts subtract those of the snapshot."""
    ranks = [training(), training()]
    for protocol, before, after in zip(ranks, (5, 3), (2, 1), strict=True):
        train(protocol, before)
        assert protocol.receive(m.RequestParams(round=1)) is not None
        protocol.on_snapshot_taken(1)
        train(protocol, after)
    assert [p.batches for p in ranks] == [7, 4]
    for protocol in ranks:
        release(protocol, m.Update(round=1, average=EMPTY))
    assert [p.batches for p in ranks] == [2, 1]
    assert [p.samples for p in ranks] == [20, 10]


def test_a_round_adds_no_batches_to_the_counts():
    """D5: a round changes no count except the weight."""
    protocol = training()
    train(protocol, 10)
    assert (protocol.batches, protocol.unreported) == (10, 10)
    work = protocol.receive(m.SyncNow(round=1))
    assert (protocol.batches, protocol.unreported) == (10, 10)
    assert protocol.state is WorkerState.SYNCING
    protocol.on_synced(work, ok=True)
    assert protocol.state is WorkerState.TRAINING
    assert (protocol.batches, protocol.samples) == (0, 0)
    assert protocol.unreported == 10


def test_an_aborted_collective_keeps_the_counts():
    protocol = training(limit=4)
    train(protocol, 3)
    work = protocol.receive(m.SyncNow(round=1, budget=m.BatchBudget(limit=9)))
    protocol.on_synced(work, ok=False)
    assert (protocol.batches, protocol.samples) == (3, 30)
    train(protocol, 1)
    assert protocol.parked


@pytest.mark.parametrize("update", [True, False])
def test_a_round_sets_the_factor_of_the_learning_rate_and_its_rollback_restores_it(update):
    protocol = training(limit=4)
    protocol.receive(m.Resume(budget=m.BatchBudget(lr_factor=1.5)))
    train(protocol, 3)
    if update:
        protocol.on_snapshot_taken(1)
        budget = m.BatchBudget(lr_factor=2.0)
        assert protocol.on_updated(m.Update(round=1, average=EMPTY, budget=budget))
        assert protocol.lr_factor == 2.0
        return
    work = protocol.receive(m.SyncNow(round=1, budget=m.BatchBudget(lr_factor=2.0)))
    protocol.on_synced(work, ok=True)
    assert protocol.lr_factor == 2.0
    assert protocol.receive(m.Rollback(round=1)) is not None
    assert protocol.lr_factor == 1.5


def test_a_budget_without_a_factor_keeps_it():
    protocol = training(limit=4)
    protocol.receive(m.Resume(budget=m.BatchBudget(lr_factor=1.5)))
    protocol.receive(m.Resume(budget=m.BatchBudget(limit=3)))
    assert protocol.lr_factor == 1.5


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


def test_a_worker_that_is_leaving_undoes_a_round_that_its_peers_did_not_complete():
    protocol = training()
    protocol.on_trained(2, 20)
    message = m.SyncNow(round=1)
    protocol.receive(message)
    protocol.on_synced(message, ok=True)
    protocol.leave()
    assert protocol.receive(m.Rollback(round=1)) == m.Rollback(round=1)
    assert (protocol.batches, protocol.samples, protocol.weight) == (2, 20, 20)
    assert protocol.receive(m.Rollback(round=1)) is None


def test_a_halt_is_returned_once_for_each_group():
    protocol = training()
    halt = m.Halt(generation=0)
    assert protocol.receive(halt) is halt
    protocol.halt()
    assert protocol.receive(halt) is None
    protocol.on_regrouped(1)
    assert protocol.receive(halt) is None  # of a group that it has left
    assert protocol.receive(m.Halt(generation=1)) is not None


# -- the end ---------------------------------------------------------------------------------


# -- reports ------------------------------------------------------------------------------------


def test_a_report_is_due_once_at_the_count_of_the_budget():
    protocol = training(report_after=3)
    train(protocol, 2)
    assert not protocol.report_due
    train(protocol, 1)
    assert protocol.report_due
    protocol.on_reported()
    train(protocol, 5)
    assert not protocol.report_due


def test_no_report_is_due_without_trained_batches():
    protocol = training(limit=0, report_after=0)
    assert protocol.parked
    assert not protocol.report_due


def test_batches_trained_during_a_round_count_towards_the_next_report():
    protocol = training(report_after=2)
    train(protocol, 4)
    protocol.on_reported()
    protocol.on_snapshot_taken(1)
    train(protocol, 2)
    assert protocol.on_updated(
        m.Update(round=1, average=EMPTY, budget=m.BatchBudget(report_after=2))
    )
    assert protocol.report_due


def test_an_update_of_a_round_before_the_last_collective_changes_nothing():
    protocol = training()
    train(protocol, 1)
    protocol.on_snapshot_taken(1)
    protocol.on_synced(protocol.receive(m.SyncNow(round=2)), ok=True)
    train(protocol, 2)
    assert not protocol.on_updated(m.Update(round=1, average=EMPTY))
    assert (protocol.batches, protocol.samples) == (2, 20)


messages = st.sampled_from(
    [
        m.Throttle(),
        m.Throttle(limit=3),
        m.Resume(),
        m.Resume(budget=m.BatchBudget(limit=2)),
        m.SetGlobalStep(step=3),
        m.StartEpoch(plan=PLAN),
        m.RequestParams(round=1),
        m.Update(round=1, average=EMPTY),
        m.SyncNow(round=2),
        m.RunTasks(tasks=(task(m.TaskKind.EVALUATE),)),
    ]
)


@given(st.lists(st.one_of(messages, st.just("train"), st.just("end")), max_size=40))
def test_one_resume_or_shutdown_releases_the_worker_after_any_sequence_of_messages(steps):
    protocol = training()
    for step in steps:
        if step == "train":
            if protocol.may_train:
                protocol.on_trained(1, 1)
        elif step == "end":
            protocol.end_plan()
            protocol.begin_plan()
        else:
            work = protocol.receive(step)
            if isinstance(work, m.SyncNow):
                protocol.on_synced(work, ok=True)
            elif isinstance(work, m.RequestParams):
                protocol.on_snapshot_taken(work.round)
            elif isinstance(work, m.Update):
                protocol.on_updated(work)
        assert protocol.batches >= 0
        assert protocol.state in (WorkerState.IDLE, WorkerState.TRAINING, WorkerState.PARKED)
    protocol.receive(m.Resume())
    assert protocol.state is (WorkerState.IDLE if protocol.plan is None else WorkerState.TRAINING)
    protocol.receive(m.Shutdown())
    assert protocol.leaving
