"""Averaging of replicas: no training is lost, and only the averaged state is sent."""

import gc
import threading

import pytest
import torch
from torch import nn

from coordinator.averaging import Averager
from runtime import CollectiveAborted, create_collectives, current_worker
from runtime.device.base import Device
from runtime.replica.averager import ReplicaAverager
from runtime.replica.flat import FlatState
from tests.support.pairs import diagonal
from tests.support.running import (
    ASYNC,
    CADENCE,
    GLOO,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    WAYS,
    Trace,
    at_once,
    builder,
    every_way,
    local_ways,
)

# -- no training is lost ---------------------------------------------------


def _squares(payload):
    return tuple(float(t.double().square().sum()) for t in payload.params)


class WatchedAverager:
    """Records every average over the CPU path; delays the first until training continued."""

    def __init__(self, monkeypatch, hold):
        self.calls = []  # (snapshots, weights, average)
        self.squares = []  # (sent by the ranks, of the snapshots)
        self.meanwhile = 0
        real = Averager.average

        def average(averager, payloads, weights, squares):
            if not self.calls:
                self.meanwhile = hold()
            result = real(averager, payloads, weights, squares)
            values = [float(p.params[0][0]) for p in payloads]
            self.calls.append((values, tuple(weights), float(result.average.params[0][0])))
            self.squares.append((squares, [_squares(p) for p in payloads]))
            return result

        monkeypatch.setattr(Averager, "average", average)


@pytest.mark.parametrize("policy", [CADENCE, ASYNC], ids=lambda p: p.name)
def test_training_during_the_computation_of_an_average_is_kept(monkeypatch, policy):
    """Every step adds 1, so that a replica is its own steps plus the changes by averages."""
    trace, begun = Trace(), threading.Event()

    def train(model, batch):
        if trace.steps[current_worker().rank] >= 20:
            begun.wait(0.05)  # with an end: a rank replies between two steps
        return trace(model, batch)

    def hold():
        begun.set()
        before = dict(trace.steps)
        trace.wait_for(
            lambda: (
                all(trace.steps[r] >= before.get(r, 0) + 3 for r in (0, 1))
                or sum(trace.steps.values()) == 200
            )
        )
        return sum(trace.steps.values()) - sum(before.values())

    watched = WatchedAverager(monkeypatch, hold)
    b = builder(train=train, dataset=200, batch_size=1, way=(policy, OVER_CPU))
    state = b.anchor(2).max_overshoot(200).run().join(WAIT_S)
    assert watched.meanwhile >= 6  # the average really was computed beside training
    *rounds, (finals, weights, result) = watched.calls
    assert len(rounds) >= 1
    for rank, final in enumerate(finals):
        brought = sum(average - snapshots[rank] for snapshots, _, average in rounds)
        assert final == pytest.approx(trace.steps[rank] + brought, abs=1e-9)
    mean = sum(f * w for f, w in zip(finals, weights, strict=True)) / sum(weights)
    assert result == pytest.approx(mean, abs=1e-9)
    assert float(state.params["w"]) == result
    # The ranks have sent the norms of these very snapshots.
    for sent, own in watched.squares[:-1]:
        assert [pytest.approx(of_rank) for of_rank in sent] == own
    # Weights count each sample in exactly one round.
    assert sum(sum(w) for _, w, _ in watched.calls) == 200


class Norm(nn.Module):
    """A parameter, a float and an integer buffer, a frozen and a tied parameter."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.tied = self.w
        self.single = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.full((5,), 7.0), requires_grad=False)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(2, dtype=torch.bool), persistent=False)


def norm(device):
    return Norm().to(device)


def train_norm(model, batch):
    rank = current_worker().rank
    model.mean.fill_(float(rank + 1))
    model.count += 1
    model.flag.fill_(True)
    return -(model.w.sum() + model.single.sum())


@diagonal(way=WAYS, heaviest=[0, 1])
def test_buffers_are_averaged_and_integers_taken_from_the_most_samples(way, heaviest):
    """One rank trains three of four batches, or under ``SYNC`` three quarters of two global ones:
    3/4 of its buffer, and its integers.
    """
    b = builder(model=norm, train=train_norm, dataset=8, batch_size=2, way=way)
    ratios = [1, 3] if heaviest else [3, 1]
    state = b.partition_ratios(ratios).anchor(100).run().join(WAIT_S)
    assert state.buffers["mean"].tolist() == [1.75 if heaviest else 1.25] * 4
    assert int(state.buffers["count"]) == (2 if way[0] is SYNC else 3)
    assert state.buffers["flag"].tolist() == [True, True]
    assert state.params["frozen"].tolist() == [7.0] * 5
    steps = 2.0 if way[0] is SYNC else 3 * 0.75 + 1 * 0.25
    assert state.params["w"].tolist() == pytest.approx([steps] * 3)
    assert torch.equal(state.params["w"], state.params["tied"])


@every_way
def test_a_rank_without_samples_is_replaced_by_the_average(way):
    last = {}

    def evaluate(model, epoch):
        return {"w": float(model.w.detach()[0])}

    def epoch_fn(epoch, worker):
        last[epoch, worker.rank] = worker.model.w.detach().clone()

    b = builder(model=norm, train=train_norm, dataset=8, batch_size=2, epochs=2, way=way)
    b.partition_ratios([0, 1]).eval_fn(evaluate).epoch_fn(epoch_fn)
    state = b.run().join(WAIT_S)
    first, second = (m.scalars["eval/w"] for m in state.metrics)
    num_steps = 2 if way[0] is SYNC else 4  # in an epoch
    assert num_steps <= first <= 2 * num_steps  # over the CPU path the next epoch may have begun
    assert second == 2 * num_steps
    assert state.params["w"].tolist() == [2 * num_steps] * 3
    assert state.buffers["mean"].tolist() == [2.0] * 4


# -- equal averages over every transport ---------------------------------


def states(values):
    """A replica's flat state for each rank, filled from ``(w, half, mean, count)``."""
    found = []
    for w, half, mean, count in values:
        model = Norm()
        state = FlatState(model)
        with torch.no_grad():
            model.w.copy_(torch.tensor(w))
            model.single.fill_(half)
            model.mean.fill_(mean)
            model.count.fill_(count)
        found.append((model, state))
    return found


VALUES = [
    ([1.0, 2.0, 3.0], 0.5, 1.0, 10),
    ([2.0, -2.0, 0.0], 1.5, 2.0, 20),
    ([9.0, 9.0, 9.0], float("nan"), float("nan"), 30),
]
WEIGHTS = [30, 10, 0]


def test_a_loaded_state_is_temporary_and_a_pending_round_continues(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    averager = ReplicaAverager(FlatState(model), Device(1), None)
    other = averager.snapshot(reuse=False)
    for t in (*other.params, *other.buffers, *other.other_buffers):
        t.copy_(t * 3 + 2)
    kept = averager.snapshot(reuse=True)  # the coordinator averages it meanwhile
    before = [t.clone() for t in kept.params]
    with torch.no_grad():
        for t in model.state_dict().values():
            t.add_(1)  # trained since
    own = {name: t.clone() for name, t in model.state_dict().items()}
    with averager.holding(other):
        held = averager.snapshot(reuse=False)
        for name in ("params", "buffers", "other_buffers"):
            for found, wanted in zip(getattr(held, name), getattr(other, name), strict=True):
                assert torch.equal(found, wanted)
    assert all(torch.equal(t, own[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(kept.params, before, strict=True))
    with pytest.raises(KeyError), averager.holding(other):
        raise KeyError("in the user's function")
    assert all(torch.equal(t, own[name]) for name, t in model.state_dict().items())

    def fail(*_):
        monkeypatch.undo()
        raise MemoryError("half-way")

    monkeypatch.setattr(type(averager._state.buffers), "write_from", fail)
    with pytest.raises(MemoryError), averager.holding(other):
        pass
    assert all(torch.equal(t, own[name]) for name, t in model.state_dict().items())
    with averager.holding(None):
        assert all(torch.equal(t, own[name]) for name, t in model.state_dict().items())


def average_over_cpu(replicas, weights):
    averagers = [ReplicaAverager(state, Device(1), None) for _, state in replicas]
    payloads = [a.snapshot(reuse=True) for a in averagers]
    result = Averager().average(payloads, weights)
    for averager in averagers:
        averager.apply(result.average)
    return result.divergences


def average_over(kind, replicas, weights):
    collectives = create_collectives(len(replicas), kind, None, WAIT_S)

    def rank(i):
        averager = ReplicaAverager(replicas[i][1], Device(1), collectives[i])
        with torch.no_grad():
            return averager.all_reduce(weights[i])[0]

    found = at_once(rank, range(len(replicas)))
    for collective in collectives:
        collective.close()
    return tuple(found)


@pytest.mark.parametrize("kind", ["thread", "gloo"])
def test_every_transport_gives_the_same_average_and_divergence(kind):
    over_cpu, over_kind = states(VALUES[:2]), states(VALUES[:2])
    a = average_over_cpu(over_cpu, WEIGHTS[:2])
    b = average_over(kind, over_kind, WEIGHTS[:2])
    assert a == pytest.approx(b)
    assert min(a) > 0
    for (one, _), (two, _) in zip(over_cpu, over_kind, strict=True):
        for tensor, other in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
            torch.testing.assert_close(tensor, other)
    model = over_kind[1][0]
    assert model.w.tolist() == pytest.approx([1.25, 1.0, 2.25])
    assert model.single.tolist() == pytest.approx([0.75, 0.75])
    assert model.mean.tolist() == pytest.approx([1.25] * 4)
    assert int(model.count) == 10  # of rank 0, which has most samples
    assert model.tied is model.w


@pytest.mark.parametrize("kind", ["thread", "gloo"])
@pytest.mark.parametrize(
    ("weights", "heaviest"), [([1, 2, 3], 2), ([1, 3, 2], 1), ([0, 2, 2], 1), ([0, 0, 1], 2)]
)
def test_integers_are_copied_from_the_rank_of_largest_weight(kind, weights, heaviest):
    replicas = states([([0.0] * 3, 0.0, 0.0, count) for count in (10, 20, 30)])
    for rank, (model, _) in enumerate(replicas):
        model.flag.copy_(torch.tensor([rank == heaviest, rank != heaviest]))
    average_over(kind, replicas, weights)
    for model, _ in replicas:
        assert int(model.count) == 10 * (heaviest + 1)
        assert model.flag.tolist() == [True, False]


@pytest.mark.parametrize("kind", ["thread", "gloo"])
def test_a_collective_ignores_nan_of_a_rank_of_weight_0(kind):
    replicas = states(VALUES)
    average_over(kind, replicas, WEIGHTS)
    for model, _ in replicas:
        assert model.w.tolist() == pytest.approx([1.25, 1.0, 2.25])
        assert model.single.tolist() == pytest.approx([0.75, 0.75])


@pytest.mark.parametrize("kind", ["thread", "gloo"])
def test_all_weights_zero_change_nothing(kind):
    replicas = states(VALUES[:2])
    assert average_over(kind, replicas, [0, 0]) == (0.0, 0.0)
    assert [int(model.count) for model, _ in replicas] == [10, 20]
    assert replicas[1][0].w.tolist() == VALUES[1][0]
    assert replicas[1][0].mean.tolist() == [2.0] * 4


class Scribbling:
    """A collective that is aborted after it has written to the tensors."""

    rank, world_size = 0, 2

    def barrier(self):
        """There is no other rank."""

    def weighted_mean_(self, tensors, weight):
        for tensor in tensors:
            tensor.fill_(float("nan"))
        raise CollectiveAborted("planted")


def test_a_collective_aborted_halfway_leaves_the_replica_unchanged():
    ((model, state),) = states(VALUES[:1])
    wanted = {key: value.clone() for key, value in model.state_dict().items()}
    averager = ReplicaAverager(state, Device(1), Scribbling())
    with pytest.raises(CollectiveAborted):
        averager.all_reduce(5)
    for key, value in model.state_dict().items():
        assert torch.equal(value, wanted[key]), key
    assert averager.version == 0


def test_a_reused_snapshot_is_one_buffer_and_aliases_nothing():
    ((model, state),) = states(VALUES[:1])
    averager = ReplicaAverager(state, Device(1), None)
    first, second = averager.snapshot(reuse=True), averager.snapshot(reuse=True)
    assert first is second
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    for tensor in (*first.params, *first.buffers, *first.other_buffers):
        assert tensor.untyped_storage().data_ptr() not in own


# -- evaluation and checkpoints see the average -------------------------------


@every_way
def test_eval_fn_and_checkpoint_fn_see_the_average(monkeypatch, way):
    """Over the CPU path an average is known offline: the one that closed the epoch."""
    watched = WatchedAverager(monkeypatch, lambda: 0)
    evaluated, handed = [], []

    def evaluate(model, epoch):
        assert not model.training
        assert not torch.is_grad_enabled()
        evaluated.append((epoch, model.w.item()))
        return {"w": model.w.item()}

    b = builder(dataset=30, batch_size=1, epochs=4, ranks=3, way=way).eval_fn(evaluate)
    b.checkpoint_fn(lambda version, model: handed.append((version, model.w.item())))
    state = b.checkpoint_every(2).anchor(3).run().join(WAIT_S)
    assert [epoch for epoch, _ in evaluated] == [0, 1, 2, 3]
    assert [m.scalars["eval/w"] for m in state.metrics] == [w for _, w in evaluated]
    assert handed == [(2, evaluated[1][1]), (4, evaluated[3][1])]
    if way[0] is SYNC:
        assert [w for _, w in evaluated] == [10.0, 20.0, 30.0, 40.0]
    elif way[1] is OVER_CPU:
        averages = [average for _, _, average in watched.calls]
        assert all(w in averages for _, w in evaluated)
    assert float(state.params["w"]) == evaluated[-1][1]


@local_ways
def test_a_failing_checkpoint_fn_is_logged_and_training_continues(way, caplog):
    def fail(version, model):
        raise OSError("disk full")

    state = builder(epochs=2, way=way).checkpoint_fn(fail).run().join(WAIT_S)
    assert len(state.metrics) == 2
    assert "checkpoint_fn failed for version 1" in caplog.text
    assert "disk full" in caplog.text


# -- memory --------------------------------------------------------------------

NUMEL = 1 << 18


class Big(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(NUMEL))


def model_sized():
    """Memory blocks of the size of the model that are referenced by a tensor."""
    found = {}
    for thing in gc.get_objects():
        dense = type(thing) in (torch.Tensor, nn.Parameter) and thing.layout is torch.strided
        if dense and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if storage.nbytes() >= NUMEL * 4:
                found[storage.data_ptr()] = storage.nbytes()
    return len(found)


@diagonal(way=[(CADENCE, OVER_CPU), (CADENCE, GLOO), (ASYNC, THREAD)], ranks=[2, 4])
def test_averaging_uses_one_snapshot_a_rank_and_two_more_buffers(way, ranks):
    gc.collect()
    before = model_sized()
    averaged, opened = threading.Semaphore(0), threading.Event()

    def train(model, batch):
        if current_worker().current_version >= 3 and not opened.is_set():
            averaged.release()
            assert opened.wait(WAIT_S)
        return -model.w[:4].sum()

    b = builder(model=lambda d: Big(), train=train, dataset=100_000, ranks=ranks, way=way)
    with b.batch_size(1).anchor(2).max_anchor(2).run() as handle:
        for _ in range(ranks):
            assert averaged.acquire(timeout=WAIT_S)
        # No rank runs, nor does the coordinator while its lock is held.
        with handle._run._service._lock:
            count = model_sized() - before
        opened.set()
        handle.stop()
    models_and_gradients = 2 * ranks
    assert ranks < count <= models_and_gradients + ranks + 2
