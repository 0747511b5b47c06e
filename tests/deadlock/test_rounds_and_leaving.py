"""Averaging rounds: joining ranks, waiting ranks, and ranks that leave during one."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from coordinator import messages as m
from coordinator.rounds import RoundState
from runtime import create_collectives, current_worker
from runtime.worker.protocol import WorkerState
from tests.deadlock.faults import BOUND_S
from tests.deadlock.stage import Stage, running
from tests.deadlock.tap import Sent, within
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    Trace,
    averaged_ways,
    builder,
    count_up,
    every_way,
    local_averaged_ways,
    task,
    until,
)
from tests.unit.worker.test_worker import Alone, plan_of_pieces, start

# -- leaving ---------------------------------------------------------------------------


def test_no_rank_enters_a_collective_after_its_peer_left(tap):
    """D1: the first round goes out, the peer takes part and leaves, no second one does."""
    with Stage(backend=THREAD, anchor=1) as stage:
        stage.train()
        call = stage.join_round()
        tap.await_came(m.SyncAck, 0)
        stage.play(m.Exiting(rank=1), m.SyncAck(rank=1, round=call.round))
        failure = stage.join().failure
    assert "left before the run was over" in str(failure.error)
    left = tap.where(lambda e: isinstance(e, m.Exiting) and e.rank == 1)[0]
    sent = tap.where(lambda e: isinstance(e, Sent) and isinstance(e.message, m.SyncNow))
    assert sent
    assert max(sent) < left


def test_a_round_already_sent_out_is_aborted_when_a_peer_leaves(tap):
    """D1: rank 0 is in the collective and is woken when rank 1 leaves."""
    with Stage(backend=THREAD, anchor=1) as stage:
        entered = threading.Event()
        barrier = stage.collectives[0].barrier
        stage.collectives[0].barrier = lambda: (entered.set(), barrier())
        stage.train()
        stage.expect(m.SyncNow)
        assert entered.wait(BOUND_S)
        with within(5):
            stage.play(m.Exiting(rank=1))
            stage.join()
    assert [(ack.rank, ack.ok) for ack in tap.came(m.SyncAck)] == [(0, False)]
    assert tap.came(m.Exiting, 0)


@pytest.fixture
def ends():
    """The ends of a group of two."""
    made = create_collectives(2, "thread", None, BOUND_S)
    yield made
    for collective in made:
        collective.close()


STALE = [
    *(m.SyncNow(round=r) for r in (1, 2, 3)),
    m.RunTasks(tasks=(task(m.TaskKind.HAND_OVER),)),
    start(range(3, 6)),
]


def test_a_leaving_worker_skips_stale_rounds_and_exits(ends):
    """D2: ``SyncNow`` x3, ``RunTasks``, ``StartEpoch``, ``Shutdown`` ends in exit."""
    saved, trace = [], Trace()
    alone = Alone(
        train=trace,
        world_size=2,
        policy=SYNC,
        collective=ends[0],
        checkpoint_fn=lambda version, model: saved.append(version),
    )
    with running(alone):
        alone.send(m.StartEpoch(plan=plan_of_pieces(3)))
        trace.wait_for(lambda: trace.steps[0] == 1)
        alone.send(*STALE)
        assert not alone.control.empty()
        ends[1].abort()  # ends the reduction, so that it leaves
    assert [type(r) for r in alone.take()] == [m.Ready, m.Exiting]
    assert (alone.control.empty(), trace.steps[0], saved) == (True, 1, [])


def test_a_wake_among_other_messages_starts_the_loading_of_held_plans(ends):
    """D2: the last rank begins the epoch while this one handles a message and waits for a batch."""
    trace = Trace()
    alone = Alone(
        train=trace,
        world_size=2,
        policy=SYNC,
        collective=ends[0],
        epoch_fn=lambda epoch, worker: None,
    )
    worker, waits = alone.worker, threading.Event()
    starts, get_message = worker._peers.starts, worker._ops.get_message
    starts.join(1, lambda: None)

    def begins_behind_a_message(*args):
        if worker._loads._held and worker._progress.begun_epoch == 0:
            waits.set()
        message = yield from get_message(*args)
        if isinstance(message, m.SetGlobalStep):
            starts.begin(1, 0)
        return message

    worker._ops.get_message = begins_behind_a_message
    with running(alone):
        alone.send(m.StartEpoch(plan=plan_of_pieces(3)))
        assert waits.wait(BOUND_S)
        alone.send(m.SetGlobalStep(step=0))
        trace.wait_for(lambda: trace.steps[0] == 1)
        alone.send(m.Shutdown(snapshot=False))
        ends[1].abort()  # ends the reduction, so that it leaves


def test_a_leaving_worker_skips_messages_after_the_shutdown(ends, faults):
    """D2: behind the shutdown its inbox holds rounds of peers that are gone."""
    held = threading.Event()
    planted = faults().stall_at(rank=0, step=0, until=held)
    alone = Alone(train=planted, collective=ends[0])
    with running(alone):
        alone.send(start(range(3)))
        planted.await_all()
        alone.send(m.Shutdown(snapshot=False), *STALE)
        with within(5):
            held.set()
            alone.take_next(m.Exiting)
    assert (planted.steps[0], alone.w) == (1, 1.0)


@averaged_ways
def test_shutdown_behind_a_round_loses_neither(way, faults, tap):
    """D2: the run is stopped while the round lies in the inbox of a rank that is busy."""
    held = threading.Event()
    planted = faults().hold(rank=1, step=1, until=held).slow(rank=1, seconds=0.01)
    handle = planted.builder(dataset=400, batch_size=1, way=way).anchor(1).run()
    tap.await_sent(m.RequestParams if way[1] is OVER_CPU else m.SyncNow, 1)
    handle.stop()
    tap.wait_for(lambda: tap.came(m.StopRequested))
    assert not tap.came(m.SyncAck, 1)
    held.set()
    with within(5):
        assert handle.join(BOUND_S).stopped
    assert [(ack.round, ack.ok) for ack in tap.came(m.SyncAck, 1)] == [(1, True)]
    assert len(tap.sent(m.Shutdown)) == 2


# -- participants ------------------------------------------------------------------------


def test_an_idle_rank_still_joins_a_round(ends):
    """D3: rank 1 has no plan; rank 0 waits for it in the collective."""
    ranks = [Alone(rank=r, world_size=2, collective=ends[r]) for r in (0, 1)]
    with running(*ranks):
        ranks[0].send(start(range(3)))
        ranks[0].take_next(m.EpochReport)
        assert ranks[1].worker.protocol.state is WorkerState.IDLE
        for alone in ranks:
            alone.send(m.SyncNow(round=1))
        acks = [alone.take_next(m.SyncAck) for alone in ranks]
        assert [(ack.ok, ack.round) for ack in acks] == [(True, 1), (True, 1)]
        assert [alone.w for alone in ranks] == [3.0, 3.0]


@averaged_ways
def test_a_rank_that_never_has_a_batch_acknowledges_every_round(way, tap):
    """D4, D7: acknowledgements do not depend on batches, so the next round can start."""
    b = builder(dataset=20, batch_size=1, epochs=2, way=way).anchor(2).max_anchor(2)
    state = b.partition_ratios([1, 0]).run().join(BOUND_S)
    kind = m.RequestParams if way[1] is OVER_CPU else m.SyncNow
    asked = [[msg.round for msg in tap.sent(kind, rank)] for rank in (0, 1)]
    acknowledged = [[ack.round for ack in tap.came(m.SyncAck, rank)] for rank in (0, 1)]
    assert len(asked[0]) >= 2
    assert asked[0] == asked[1] == acknowledged[0] == acknowledged[1]
    assert sum(r.stats.num_batches for r in tap.came(m.EpochReport, 1)) == 0
    assert state.params["w"].item() == 40.0


@every_way
def test_ranks_without_a_batch_do_not_block_the_others(way):
    """D7: one batch for three ranks."""
    with within(5):
        state = builder(dataset=2, epochs=3, ranks=3, way=way).run().join(BOUND_S)
    assert [e.num_samples for e in state.metrics] == [2, 2, 2]


def test_a_rank_before_its_first_batch_does_not_block_the_others(faults, tap):
    """D7: its first batch is being loaded, and rounds wait for it."""
    loading = threading.Event()
    planted = faults().stall_in_data(rank=1, read=0, until=loading)
    b = planted.builder(dataset=planted.dataset(40), batch_size=1, way=(CADENCE, THREAD))
    handle = b.anchor(1).partition_ratios([39, 1]).run()
    planted.await_all()
    # All but the batch being loaded: rank 0 does not wait in a collective.
    planted.wait_for(lambda: planted.steps[0] == 39)
    assert not tap.came(m.Failed)
    assert planted.steps[1] == 0
    loading.set()
    assert [e.num_samples for e in handle.join(BOUND_S).metrics] == [40]


# -- one round at a time -----------------------------------------------------------------


@pytest.mark.parametrize("policy", [CADENCE, ASYNC], ids=lambda p: p.name)
def test_reports_during_a_round_start_no_second_round(policy, tap):
    """D6: rank 0 continues to train and report while rank 1 has not answered."""
    with Stage(policy=policy, anchor=1, max_overshoot=50) as stage:
        stage.train()
        first = stage.expect(m.RequestParams)
        # Ten rounds would be due.
        tap.wait_for(lambda: stage.machine.run_state.ranks[0].since_round >= 20)
        assert [r.round for r in tap.sent(m.RequestParams)] == [first.round] * 2
        stage.play(stage.snapshot(first.round, 1.0, 1))
        update = stage.expect(m.Update)
        stage.train()
        tap.await_came(m.EpochReport, 1, 2)
        tap.await_came(m.SyncAck, 0)
        assert [r.round for r in tap.sent(m.RequestParams)] == [first.round] * 2
        stage.play(m.SyncAck(rank=1, round=update.round))
        assert stage.expect(m.RequestParams).round == first.round + 1


def test_a_batch_report_is_not_an_acknowledgement(tap):
    """S12: after its peer's acknowledgement rank 1 reports batches, and the round stays open."""
    with Stage(backend=THREAD, anchor=1) as stage:
        stage.train()
        call = stage.join_round()
        tap.await_came(m.SyncAck, 0)
        stage.train()
        report = m.BatchReport(rank=1, epoch=0, stats=m.ReportStats())
        stage.play(*[report] * 5)
        tap.await_came(m.BatchReport, 1, 5)
        assert stage.machine.rounds.round.state is RoundState.SYNCING
        assert stage.machine.run_state.num_averagings == 0
        stage.play(m.SyncAck(rank=1, round=call.round - 1))
        stage.play(m.SyncAck(rank=1, round=call.round))
        tap.wait_for(lambda: stage.machine.run_state.num_averagings == 1 or tap.came(m.Failed))
        assert stage.machine.run_state.num_averagings == 1


def test_a_snapshot_of_an_abandoned_round_is_not_averaged_into_the_next(tap):
    """D15: the snapshot arrives late, while the next round collects."""
    with Stage(num_batches=60, anchor=1, snapshot_timeout_s=0.05, max_failed_rounds=1000) as stage:
        stage.train()
        old = stage.expect(m.RequestParams).round
        new = stage.expect(m.RequestParams).round
        assert new > old
        assert stage.machine.run_state.num_failed_rounds >= 1
        while not tap.averages:
            stage.play(stage.snapshot(old, 1e9, 1000), stage.snapshot(new, 1.0, 1))
            tap.wait_for(lambda n=new: tap.averages or tap.sent(m.RequestParams, 1)[-1].round > n)
            new = tap.sent(m.RequestParams, 1)[-1].round
        assert tap.where(lambda e: isinstance(e, m.ParamSnapshot) and e.round == old and e.rank)
        update = stage.expect(m.Update)
    assert tap.averages[0].weights[1] == 1
    assert 0 < float(update.average.params[0][0]) < 1000


@local_averaged_ways
def test_ten_batches_and_their_acknowledgements_are_ten_batches(way, tap):
    """D5: only batches advance the schedule, acknowledgements do not."""
    handle = builder(dataset=10, batch_size=1, way=way).anchor(1).max_anchor(1).run()
    handle.join(BOUND_S)
    assert len(tap.came(m.SyncAck)) >= 2
    assert handle.statistics().global_step == 10
    assert [msg.step for msg in tap.sent(m.SetGlobalStep)][-1] == 10


def test_final_snapshots_and_snapshots_of_a_round_are_distinguished(faults, tap):
    """D21: the run is stopped while a round collects; both kinds share one queue."""
    held = threading.Event()
    planted = faults().hold(rank=1, step=2, until=held)
    b = planted.builder(dataset=400, batch_size=1, way=(CADENCE, OVER_CPU)).anchor(2)
    handle = b.snapshot_timeout(60).run()
    tap.await_came(m.ParamSnapshot, 0)
    handle.stop()
    tap.wait_for(lambda: tap.came(m.StopRequested))
    assert not tap.came(m.ParamSnapshot, 1)
    held.set()
    state = handle.join(BOUND_S)
    assert len(tap.came(m.FinalSnapshot)) == 2
    # Every sample has one weight: in a round, or in the final average.
    weights = [sum(job.weights) for job in tap.averages]
    assert tap.averages[0].weights[1] > 0
    assert sum(weights) == sum(planted.steps.values())
    assert state.stopped


class HeldBack:
    """Samples equal to their indices, one of which is read only after a release."""

    def __init__(self, held):
        self.held, self.may_be_read = held, threading.Event()

    def __len__(self):
        return 40

    def get_batch(self, indices):
        if self.held in indices:
            assert self.may_be_read.wait(BOUND_S)
        return (indices,)


def test_a_rank_that_leaves_from_a_broken_step_reports_its_training(tap, tmp_path):
    """D15: its last steps are in the checkpoint, so a resumed run must not train them again."""
    data, trained = HeldBack(3), Counter()

    def train(model, batch):
        trained[current_worker().rank] += 1
        return count_up(model, batch)

    b = builder(train=train, dataset=data, batch_size=1, way=(SYNC, THREAD)).sampler(range(40))
    b.on_worker_failure("continue").collective_timeout(0.5).checkpoint_dir(tmp_path)
    b.dataset_lock(False)  # else rank 0's reads may wait for the one that is held back
    handle = b.run()
    until(lambda: trained[0] == 2)  # rank 0 goes to the second reduction, rank 1 has no batch
    handle.stop()
    tap.await_came(m.Halted, 0)
    data.may_be_read.set()
    assert handle.join(BOUND_S).stopped
    assert [rank.num_batches for rank in handle.statistics().ranks] == [1, 1]
    seen = []
    b = builder(train=lambda model, batch: seen.extend(batch[0].tolist()) or count_up(model, batch))
    b.dataset(HeldBack(-1)).batch_size(1).policy(SYNC).backend(THREAD).sampler(range(40))
    b.resume(tmp_path).run().join(BOUND_S)
    assert sorted(seen) == list(range(2, 40))
