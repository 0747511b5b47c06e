"""``on_worker_failure("continue")``: the others continue, with correct accounting."""

from __future__ import annotations

import threading

import pytest
import torch

from coordinator import messages as m
from runtime import WorkerFailed, current_worker
from runtime.replica.averager import ReplicaAverager
from tests.deadlock.faults import BOUND_S, Planted
from tests.deadlock.tap import within
from tests.deadlock.test_averaging_meanwhile import HeldAverage
from tests.deadlock.test_failures_reach_everyone import rank_0_waits_for_a_dying_peer
from tests.deadlock.test_throttle_and_gate import a_rank_too_far_ahead
from tests.support.pairs import diagonal, pairwise
from tests.support.running import (
    ASYNC,
    CADENCE,
    GLOO,
    OVER_CPU,
    SYNC,
    THREAD,
    WAYS,
    builder,
    every_way,
    local_averaged_ways,
    over,
)
from tests.unit.test_survival import BATCH, NUM_SAMPLES, effects, train_samples

DEATHS = ["fail_at", "vanish_at"]
both = pytest.mark.parametrize("how", DEATHS)
RANKS, STEPS = 3, 3
FAST_S = 5.0


def run_with(planted, way, *, ranks=RANKS, epochs=1):
    """Eleven batches, the last one short; each rank has at least three of them."""
    b = planted.builder(dataset=NUM_SAMPLES, batch_size=BATCH, ranks=ranks, epochs=epochs, way=way)
    b.anchor(2).partition_ratios([1] * ranks)
    return b.on_worker_failure("continue").run()


def check_books(state, dead, *, epochs=1):
    """Check that every epoch closed with every sample once, and repeats were counted."""
    assert sorted(f.rank for f in state.failures) == sorted(dead)
    assert [e.num_samples for e in state.metrics] == [NUM_SAMPLES] * epochs
    for epoch in state.metrics:
        trained = sum(r.num_samples for r in epoch.per_rank)
        assert trained - epoch.num_retrained == NUM_SAMPLES
        assert 0 <= epoch.num_retrained <= NUM_SAMPLES
    # A sample whose effect died with a rank has none.
    assert (state.params["w"] > 0).all()


@pairwise(way=WAYS, rank=range(RANKS), step=range(STEPS), how=DEATHS)
def test_a_death_at_any_step_of_any_rank_is_survived(way, rank, step, how, faults):
    """S2: in any wait of the others, none hangs and no sample is lost."""
    planted = getattr(faults(train_samples, effects), how)(rank=rank, step=step)
    handle = run_with(planted, way, epochs=2)
    with within(FAST_S):
        state = handle.join(BOUND_S)
    check_books(state, [rank], epochs=2)
    if how == "fail_at":
        assert (state.failures[0].step, state.failures[0].epoch) == (step, 0)
        assert isinstance(state.failures[0].error, Planted)


@pytest.mark.parametrize("backend", [THREAD, GLOO], ids=lambda b: b.name)
@pytest.mark.parametrize("dying", range(RANKS))
def test_a_round_with_a_dead_rank_excludes_its_training(backend, dying, monkeypatch):
    """S8: the average contains training of the dead rank, which is repeated, and is undone."""
    real, undo = ReplicaAverager.all_reduce, ReplicaAverager.undo_all_reduce
    own = [torch.zeros(NUM_SAMPLES, dtype=torch.float64) for _ in range(RANKS)]
    checked: list[int] = []
    all_have_it = threading.Barrier(RANKS, timeout=BOUND_S)

    def train(model, batch):
        own[current_worker().rank][batch[0]] += 1 / len(batch[0])
        return train_samples(model, batch)

    def dies_in_it(averager, *args, **settings):
        result = real(averager, *args, **settings)
        if averager.collective.world_size == RANKS:
            all_have_it.wait()
            if averager.collective.rank == dying:
                raise Planted
        return result

    def undone(averager):
        rank = int(threading.current_thread().name.removeprefix("gpu-worker-"))
        w = averager._state.params.params[0]
        assert not torch.allclose(w, own[rank])  # the round did take place here
        undo(averager)
        torch.testing.assert_close(w.detach(), own[rank])
        checked.append(rank)

    monkeypatch.setattr(ReplicaAverager, "all_reduce", dies_in_it)
    monkeypatch.setattr(ReplicaAverager, "undo_all_reduce", undone)
    b = builder(
        model=effects,
        train=train,
        dataset=NUM_SAMPLES,
        batch_size=BATCH,
        ranks=RANKS,
        way=(CADENCE, backend),
    )
    b.anchor(2).partition_ratios([1] * RANKS).on_worker_failure("continue")
    with within(FAST_S):
        state = b.run().join(BOUND_S)
    check_books(state, [dying])
    assert sorted(checked) == [rank for rank in range(RANKS) if rank != dying]


@diagonal(way=WAYS, how=DEATHS)
def test_ranks_die_down_to_one(way, how, faults):
    """S2: rank 0 first, then rank 2; the last trains what is left."""
    planted = faults(train_samples, effects)
    getattr(planted, how)(rank=0, step=1)
    getattr(planted, how)(rank=2, step=2)
    with within(FAST_S):
        state = run_with(planted, way, epochs=2).join(BOUND_S)
    check_books(state, [0, 2], epochs=2)


@every_way
def test_the_death_of_the_last_rank_fails_the_run(way, faults):
    """S2: no rank is left."""
    planted = faults().meet_at(ranks=range(RANKS), step=0)
    for rank in range(RANKS):
        planted.fail_at(rank=rank, step=0)
    with within(FAST_S), pytest.raises(WorkerFailed) as failed:
        run_with(planted, way).join(BOUND_S)
    assert isinstance(failed.value.__cause__, Planted)


@both
@over([w for w in WAYS if OVER_CPU not in w])
def test_a_survivor_leaves_the_collective_and_continues(way, how, faults, tap, monkeypatch):
    """D1: rank 0 sleeps in the round that rank 1 will never join."""
    planted = faults(train_samples, effects)
    sizes = {"dataset": NUM_SAMPLES, "batch_size": BATCH}
    handle, held = rank_0_waits_for_a_dying_peer(
        planted, way, how, monkeypatch, "continue", **sizes
    )
    with within(FAST_S):
        held.set()
        state = handle.join(BOUND_S)
    check_books(state, [1])
    assert tap.came(m.Exiting, 0)


@local_averaged_ways
def test_a_throttled_survivor_is_released_by_the_death_of_the_slow_rank(way, faults, tap):
    """D11: no rank will ever catch up with it."""
    held, planted = threading.Event(), faults()
    with a_rank_too_far_ahead(planted, tap, way, held, "continue") as handle:
        planted.vanish_at(rank=1, step=0)
        held.set()
        with within(FAST_S):
            state = handle.join(BOUND_S)
    assert [f.rank for f in state.failures] == [1]
    assert state.params["w"].item() == planted.steps[0] == 60


@over([(ASYNC, OVER_CPU), (ASYNC, THREAD)])
def test_a_survivor_parked_at_the_overshoot_limit_is_woken(way, faults, tap):
    """D27: the averaging that would have woken it never comes."""
    held, planted = threading.Event(), faults()
    planted.hold(rank=1, step=0, until=held).fail_at(rank=1, step=0)
    b = planted.builder(dataset=60, batch_size=1, way=way).anchor(2).max_overshoot(0)
    handle = b.on_worker_failure("continue").run()
    tap.wait_for(lambda: tap.parked(0))
    held.set()
    with within(FAST_S):
        state = handle.join(BOUND_S)
    assert state.params["w"].item() == 60.0
    assert state.metrics[0].num_samples == 60


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("policy", [CADENCE, ASYNC], ids=lambda p: p.name)
def test_training_of_a_rank_that_dies_during_its_average_is_repeated(
    policy, ranks, faults, tap, monkeypatch
):
    """D15: its round is abandoned, and its late average applied by no rank."""
    held, gone = HeldAverage(monkeypatch), threading.Event()
    planted = faults(train_samples, effects).hold(rank=1, step=2, until=gone)
    planted.slow(rank=1, seconds=0.005).fail_at(rank=1, step=3)
    b = planted.builder(dataset=NUM_SAMPLES, batch_size=1, ranks=ranks, way=(policy, OVER_CPU))
    b.anchor(2).max_overshoot(100).partition_ratios([1] * ranks)
    handle = b.on_worker_failure("continue").run()
    tap.await_sent(m.RequestParams, 1)
    for rank in {*range(ranks)} - {1}:
        tap.await_came(m.ParamSnapshot, rank)
    gone.set()  # it answers last, after this step, and dies in the next one
    held.await_start()
    tap.await_came(m.Failed, 1)
    if ranks == 3:  # the others are at the same point of the next round
        tap.wait_for(lambda: len(tap.averages) == 2)
    held.opened.set()
    with within(FAST_S):
        state = handle.join(BOUND_S)
    check_books(state, [1])
    assert tap.averages[0].weights[1] == state.metrics[0].num_retrained == 3
    assert tap.averages[0].round not in [update.round for update in tap.sent(m.Update)]
    if ranks == 2:  # from then on rank 0 trained every sample alone
        assert state.params["w"].tolist() == [1.0] * NUM_SAMPLES


def test_a_batch_that_kills_every_reader_ends_the_run(faults):
    """S2: it kills one rank after another, and the last one's error is raised."""
    planted = faults().fail_in_data(batch=5)
    b = planted.builder(dataset=planted.dataset(40), ranks=3, way=(CADENCE, OVER_CPU))
    with within(FAST_S), pytest.raises(WorkerFailed) as failed:
        b.on_worker_failure("continue").run().join(BOUND_S)
    assert isinstance(failed.value.__cause__, Planted)
    assert planted.num_shots == 3


@pytest.mark.parametrize("rank", [1, 2])
@over([(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, GLOO)])
def test_the_run_continues_without_a_rank_that_cannot_be_built(way, rank, faults):
    """D32: the others wait for its turn to build, and no longer."""
    planted = faults(train_samples, effects).fail_in_build(rank=rank)
    with within(FAST_S):
        state = run_with(planted, way).join(BOUND_S)
    check_books(state, [rank])
    assert state.failures[0].step == 0


@over([(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, GLOO)])
def test_a_failed_build_of_rank_0_ends_the_run(way, faults):
    """D32: there are no weights to begin from."""
    planted = faults().fail_in_build(rank=0)
    with within(FAST_S), pytest.raises(WorkerFailed) as failed:
        run_with(planted, way).join(BOUND_S)
    assert failed.value.rank == 0
