"""``on_non_finite("ignore")``: the peers' average replaces a bad replica, or the run ends."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from coordinator.averaging import usable_weights
from runtime import NonFiniteError, WorkerFailed, create_collectives, current_worker
from runtime.device.base import Device
from runtime.replica.averager import ReplicaAverager
from runtime.replica.flat import FlatState
from tests.support.faulty import (
    Pair,
    Spoilt,
    SpoiltLater,
    Watch,
    is_finite,
    spoilt_run,
)
from tests.support.pairs import SCALE, pairwise
from tests.support.running import (
    CADENCE,
    LOCAL_WAYS,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    expect_finite,
    local_averaged_ways,
)

EPOCHS = 60 if SCALE > 1 else 20
PEERLESS = [((SYNC, THREAD), 1), ((CADENCE, OVER_CPU), 1), ((SYNC, THREAD), 2)]
AVERAGED = [way for way in LOCAL_WAYS if way[0] is not SYNC]
ruinous = pytest.mark.parametrize("kind", ["loss", "gradient"])


def momentum_sgd(params):
    return torch.optim.SGD(params, 1.0, momentum=0.5)


def warned(caplog):
    return [r.getMessage() for r in caplog.records if "new optimizer state" in r.getMessage()]


# -- healed --------------------------------------------------------------------------


@pairwise(way=AVERAGED, rank=[0, 1], kind=["loss", "gradient"])  # rank 0 evaluates
def test_a_replica_that_is_not_finite_is_replaced_by_the_average(
    monkeypatch, caplog, way, rank, kind
):
    watch = Watch(monkeypatch)
    spoilt = SpoiltLater(kind, rank, lambda: ("evaluated", True) in watch.seen)
    b = spoilt_run("ignore", spoilt, watch=watch, way=way, optim=momentum_sgd, epochs=EPOCHS)
    state = b.run().join(WAIT_S)
    spoilt.check()
    watch.check()
    assert is_finite(state.params.values())
    assert watch.seen.count(("evaluated", True)) == EPOCHS
    assert watch.seen.count(("checkpointed", True)) == EPOCHS
    skipped = sum(metrics.num_skipped for metrics in state.metrics)
    assert skipped >= 2
    # Every sample was part of one round, or was counted as skipped.
    assert sum(watch.weights) + skipped == sum(spoilt.samples.values()) == EPOCHS * 40
    (line,) = warned(caplog)
    parameter = "first" if kind == "loss" else "second"
    assert f"rank {rank}" in line
    assert repr(parameter) in line


@local_averaged_ways
def test_the_optimizer_state_of_a_healed_replica_is_reset(monkeypatch, way):
    watch = Watch(monkeypatch)
    inner = SpoiltLater("loss", 1, lambda: ("evaluated", True) in watch.seen)
    states = []

    def train(model, batch):
        worker = current_worker()
        if worker.rank == 1 and inner.at is not None:
            states.append([is_finite(s.values()) for s in worker.optimizer.state.values()])
        return inner(model, batch)

    b = spoilt_run("ignore", train, watch=watch, way=way, optim=momentum_sgd, epochs=EPOCHS)
    b.run().join(WAIT_S)
    inner.check()
    # Momentum of NaN if a step precedes the round, then no momentum, then a finite one.
    healed = states.index([])
    assert all(state == [False, False] for state in states[:healed])
    assert all(state == [True, True] for state in states[healed + 1 :])


@local_averaged_ways
def test_a_bad_loss_with_finite_parameters_is_ignored(monkeypatch, caplog, way):
    watch = Watch(monkeypatch)
    spoilt = Spoilt("value", (1, 3))
    state = spoilt_run("ignore", spoilt, watch=watch, way=way).run().join(WAIT_S)
    spoilt.check()
    assert all(metrics.num_skipped == 0 for metrics in state.metrics)
    assert any(math.isnan(metrics.avg_loss) for metrics in state.metrics)
    assert warned(caplog) == []


def test_a_stopped_run_returns_the_healthy_state():
    spoilt = Spoilt("gradient", (1, 1), hold=(1, 3))
    b = spoilt_run("ignore", spoilt, way=(CADENCE, OVER_CPU), dataset=4000, anchor=10**6)
    state = spoilt.stop_while_held(b.max_anchor(10**6)).join(WAIT_S)
    spoilt.check()
    assert state.stopped
    assert torch.equal(
        state.params["second"], torch.full((3,), spoilt.steps[0], dtype=torch.float64)
    )


# -- no finite state -----------------------------------------------------------


def assert_fails(handle, ranks):
    with pytest.raises(WorkerFailed) as caught:
        handle.join(WAIT_S)
    cause = caught.value.__cause__
    assert isinstance(cause, NonFiniteError)
    assert caught.value.rank == cause.rank
    assert cause.rank in ranks
    assert cause.what == "parameter"
    expect_finite(handle.state)


@ruinous
@local_averaged_ways
def test_a_round_without_a_finite_replica_ends_the_run(monkeypatch, way, kind):
    watch = Watch(monkeypatch)
    spoilt = Spoilt(kind, (0, 1), (1, 1))
    b = spoilt_run("ignore", spoilt, way=way, anchor=10).checkpoint_fn(watch.checkpoint)
    assert_fails(b.eval_fn(watch.evaluate).run(), (0, 1))
    spoilt.check()
    assert [s for s in watch.seen if s[0] != "averaged" and not s[1]] == []


def test_a_stopped_run_without_a_healthy_state_returns_none():
    spoilt = Spoilt("gradient", (0, 0), (1, 1), hold=(1, 3))
    b = spoilt_run("ignore", spoilt, way=(CADENCE, OVER_CPU), dataset=4000, anchor=10**6)
    assert_fails(spoilt.stop_while_held(b.max_anchor(10**6)), (0,))


@ruinous
@pytest.mark.parametrize(
    ("way", "ranks"),
    PEERLESS,
    ids=lambda x: x if isinstance(x, int) else f"{x[0].name}-{x[1].name}",
)
def test_a_bad_state_without_peers_ends_the_run(monkeypatch, way, ranks, kind):
    watch = Watch(monkeypatch, collectives=False)
    b = spoilt_run("ignore", Spoilt(kind, (0, 15)), watch=watch, way=way, ranks=ranks)
    handle = b.run()
    assert_fails(handle, range(ranks))
    watch.check()


# -- parts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "weights"),
    [
        ([4, 6], [4, 6]),
        ([0, 0], [0, 0]),
        ([None, 6], [0, 6]),
        ([None, 0, 6], [0, 0, 6]),
        ([None, 0, 0], [0, 1, 1]),
        ([None, None], [0, 0]),
    ],
)
def test_a_round_averages_only_finite_states(samples, weights):
    assert usable_weights(samples) == weights


@pytest.mark.parametrize(
    ("samples", "expected"), [((4, 0), 2.0), ((4, 6), 2.0), ((0, 0), 2.0)], ids=str
)
def test_an_idle_replica_heals_one_that_trained_over_a_collective(samples, expected):
    modules = [Pair(), Pair()]
    with torch.no_grad():
        for p in modules[0].parameters():
            p.fill_(float("nan"))
        for p in modules[1].parameters():
            p.fill_(expected)
    ends = create_collectives(2, timeout_s=WAIT_S)

    def join(rank):
        averager = ReplicaAverager(FlatState(modules[rank]), Device(1), ends[rank])
        averager.all_reduce(samples[rank], healthy=rank == 1)
        return [p.tolist() for p in modules[rank].parameters()]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(join, range(2)))
    for end in ends:
        end.close()
    assert found == [[[expected] * 2, [expected] * 3]] * 2


@local_averaged_ways
def test_an_idle_replica_heals_the_only_one_that_trained(monkeypatch, way):
    """Rank 0 gets no data, so that no other rank has samples in any round."""
    watch = Watch(monkeypatch)
    spoilt = Spoilt("loss", (1, 3))
    b = spoilt_run("ignore", spoilt, watch=watch, way=way, epochs=2).partition_ratios([0.0, 1.0])
    state = b.run().join(WAIT_S)
    spoilt.check()
    watch.check()
    assert is_finite(state.params.values())
    skipped = sum(metrics.num_skipped for metrics in state.metrics)
    assert skipped >= 2
    assert sum(watch.weights) + skipped == 80
