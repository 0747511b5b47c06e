"""SYNC with randomly changing shares equals one device on the global batch."""

from __future__ import annotations

import copy
import random
import threading

import pytest
import torch
from torch import nn

from coordinator import epochs
from coordinator.shares import Shares
from coordinator.splitting import permutation, split_like
from runtime import AverageBackend, WorkerFailed, current_worker
from tests.support.pairs import pairwise
from tests.support.running import SYNC, THREAD, WAIT_S, builder

N, EPOCHS, SIZE, SEED = 203, 2, 4, 5
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randn(N, 2, generator=GENERATOR, dtype=torch.float64)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


START = net()


def mean_loss(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def sgd(params):
    return torch.optim.SGD(params, 0.1, momentum=0.9)


def adamw(params):
    return torch.optim.AdamW(params, 0.01)


@pytest.fixture
def random_shares(monkeypatch):
    """Give each plan random sizes, unless they are fixed; yields all sizes."""
    draw, dealt, fixed = random.Random(7), [], Shares.sizes

    def sizes(self, total, ranks):
        if self._is_fixed:
            return fixed(self, total, ranks)
        parts = split_like(total, [draw.randint(0, 5) + (i == 0) for i in range(len(ranks))])
        dealt.append(parts)
        return parts

    monkeypatch.setattr(Shares, "sizes", sizes)
    return dealt


class Trace:
    """A ``train_fn`` that records the samples of each micro-batch of each rank."""

    def __init__(self, fails_at=None):
        self.pieces = {}
        self._fails_at = fails_at

    def __call__(self, model, batch):
        x, y, index = batch
        worker = current_worker()
        mine = self.pieces.setdefault((worker.current_epoch, worker.rank), [])
        if self._fails_at == (worker.rank, worker.current_epoch, len(mine)):
            raise RuntimeError("planted")
        mine.append(index.tolist())
        return mean_loss(model, x, y)


def run(
    trace,
    optim,
    *,
    ranks,
    accumulate=1,
    clip=None,
    way=(SYNC, THREAD),
    balance=True,
    dtype=torch.float64,
    **more,
):
    b = builder(
        model=lambda device: copy.deepcopy(START).to(dtype),
        optim=optim,
        train=trace,
        dataset=(X.to(dtype), Y.to(dtype), torch.arange(N)),
        batch_size=SIZE,
        epochs=EPOCHS,
        ranks=ranks,
        way=way,
    )
    b.accumulate(accumulate).balance(balance).seed(SEED).tune_allocator(False)
    if clip is not None:
        b.max_grad_norm(clip)
    for name, value in more.items():
        getattr(b, name)(value)
    return b.run()


def global_steps(ranks, accumulate):
    """The samples of each step of a run without deaths."""
    per_step = SIZE * ranks * accumulate
    for epoch in range(EPOCHS):
        order = torch.from_numpy(permutation(N, epoch, SEED))
        yield from order.split(per_step)


def one_device(steps, optim, clip, dtype=torch.float64):
    model, x, y = copy.deepcopy(START).to(dtype), X.to(dtype), Y.to(dtype)
    optimizer = optim(model.parameters())
    for indices in steps:
        optimizer.zero_grad()
        mean_loss(model, x[indices], y[indices]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


def assert_same(actual, expected):
    for name, tensor in expected.items():
        error = ((actual[name] - tensor).norm() / tensor.norm()).item()
        assert error < 1e-8, f"{name}: relative error {error:.1e}"
    before = START.state_dict()
    assert any((tensor - before[name]).norm() > 0.05 for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("ranks", "accumulate", "optim", "clip", "backend", "bucket_mb"),
    [
        (1, 1, sgd, None, THREAD, None),
        (2, 1, sgd, None, THREAD, None),
        (2, 3, adamw, 0.1, THREAD, 1e-4),
        (3, 1, adamw, None, AverageBackend.GLOO, None),
        (3, 1, adamw, None, AverageBackend.GLOO, 1e-4),
        (3, 2, sgd, 0.1, AverageBackend.GLOO, 1e-4),
        (3, 2, sgd, 0.1, THREAD, None),
        (4, 1, sgd, 0.1, THREAD, None),
        (4, 2, adamw, None, THREAD, None),
    ],
)
def test_any_shares_equal_one_device_on_the_global_batch(
    random_shares, ranks, accumulate, optim, clip, backend, bucket_mb
):
    trace = Trace()
    handle = run(
        trace,
        optim,
        ranks=ranks,
        accumulate=accumulate,
        clip=clip,
        way=(SYNC, backend),
        bucket_cap_mb=bucket_mb,
    )
    state = handle.join(WAIT_S)
    steps = list(global_steps(ranks, accumulate))
    assert_same(state.state_dict(), one_device(steps, optim, clip))
    assert [metrics.num_samples for metrics in state.metrics] == [N] * EPOCHS
    if ranks > 1:
        assert len(set(random_shares)) > 2
        assert any(len(p) > SIZE for pieces in trace.pieces.values() for p in pieces)
        per_rank = [sum(map(len, trace.pieces[0, rank])) for rank in range(ranks)]
        assert [r.num_samples for r in state.metrics[0].per_rank] == per_rank
    for epoch in range(EPOCHS):
        seen = [i for (e, _), found in trace.pieces.items() if e == epoch for p in found for i in p]
        assert sorted(seen) == list(range(N))


@pytest.mark.parametrize(("ranks", "optim", "clip"), [(2, sgd, None), (3, adamw, 0.1)])
def test_float32_is_equal_up_to_rounding(random_shares, ranks, optim, clip):
    trace, dtype = Trace(), torch.float32
    state = run(trace, optim, ranks=ranks, clip=clip, dtype=dtype).join(WAIT_S).state_dict()
    expected = one_device(global_steps(ranks, 1), optim, clip, dtype)
    found, wanted = (nn.utils.parameters_to_vector(d.values()) for d in (state, expected))
    assert found.dtype == dtype
    assert (found - wanted).norm() / wanted.norm() < 1e-4


class StopsAt(Trace):
    """A ``train_fn`` that stops the run after a number of batches of any rank."""

    def __init__(self, at):
        super().__init__()
        self.at, self.handle, self.runs = at, None, threading.Event()

    def __call__(self, model, batch):
        worker = current_worker()
        if worker.local_step >= self.at:  # of any rank: a slow one may get no batches
            assert self.runs.wait(WAIT_S)
            self.handle.stop()
        return super().__call__(model, batch)


@pairwise(
    stop=[(2, 3), (9, 3), (10, 3), (12, 3), (6, 1), (6, 2), (6, 5)],
    accumulate=[1, 2],
    measured=[False, True],
)
def test_a_run_with_shares_that_is_resumed_trains_the_same_steps(
    tmp_path, request, monkeypatch, measured, accumulate, stop
):
    monkeypatch.setattr(epochs, "PLAN_STEPS", 1)
    monkeypatch.setattr(epochs, "FIRST_PLAN_STEPS", 1)
    if not measured:
        request.getfixturevalue("random_shares")
    at, ranks_then = stop
    ranks, trace = 3, StopsAt(at)
    more = {"accumulate": accumulate, "checkpoint_dir": tmp_path}
    trace.handle = run(trace, sgd, ranks=ranks, **more)
    trace.runs.set()
    stopped = trace.handle.join(WAIT_S)
    assert stopped.stopped
    again = Trace()
    state = run(again, sgd, ranks=ranks_then, **more, resume=tmp_path).join(WAIT_S)
    assert [metrics.num_samples for metrics in state.metrics] == [N] * EPOCHS
    parts = [t.pieces.get((0, r), []) for t in (trace, again) for r in range(5)]
    assert sorted(i for pieces in parts for piece in pieces for i in piece) == list(range(N))
    assert 0 < sum(len(piece) for pieces in parts[:ranks] for piece in pieces) < N
    assert_same(state.state_dict(), one_device(global_steps(ranks, accumulate), sgd, None))


@pytest.mark.parametrize("balance", [True, False])
def test_a_step_trains_the_same_samples_with_and_without_measured_shares(random_shares, balance):
    ranks, trace = 3, Trace()
    run(trace, sgd, ranks=ranks, balance=balance).join(WAIT_S)
    per_rank = [trace.pieces[0, rank] for rank in range(ranks)]
    order = permutation(N, 0, SEED).tolist()
    for step in range(len(per_rank[0])):
        got = [i for own in per_rank if step < len(own) for i in own[step]]
        assert got == order[step * SIZE * ranks :][: SIZE * ranks]
    assert bool(random_shares) is balance


# -- batch sizes of the user ------------------------------------------------------------


def sized(trace, sizes, optim=sgd, *, balance=False, **more):
    return run(trace, optim, ranks=len(sizes), balance=balance, batch_size=list(sizes), **more)


@pytest.mark.parametrize(
    ("sizes", "optim", "more"),
    [
        ((7, 1), sgd, {}),
        ((1, 7), adamw, {"accumulate": 3}),
        ((2, 9, 1), sgd, {"clip": 0.1, "way": (SYNC, AverageBackend.GLOO)}),
        ((5, 4, 3, 4), adamw, {"drop_last": True}),
    ],
)
def test_batch_sizes_of_the_user_change_the_pieces_but_no_result(sizes, optim, more):
    ranks, trace = len(sizes), Trace()
    assert sum(sizes) == SIZE * ranks
    state = sized(trace, sizes, optim, **more).join(WAIT_S)
    steps = global_steps(ranks, more.get("accumulate", 1))
    if "drop_last" in more:
        steps = [step[: len(step) // SIZE * SIZE] for step in steps]
    expected = one_device(steps, optim, more.get("clip"))
    assert_same(state.state_dict(), expected)
    whole = N // (SIZE * ranks)
    for rank, size in enumerate(sizes):
        assert {len(piece) for piece in trace.pieces[0, rank][:whole]} == {size}


def test_runs_with_batch_sizes_of_the_user_are_bitwise_reproducible_and_resumable(tmp_path):
    sizes = (6, 1, 5)
    first, again = (sized(Trace(), sizes).join(WAIT_S).state_dict() for _ in range(2))
    cut = sized(Trace(), sizes, max_steps=33, checkpoint_dir=tmp_path).join(WAIT_S)
    assert [metrics.partial for metrics in cut.metrics] == [True]
    resumed = sized(Trace(), sizes, resume=tmp_path).join(WAIT_S).state_dict()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor, resumed[name])


def test_the_first_pieces_of_measured_shares_are_those_of_the_user():
    trace = Trace()
    state = sized(trace, (7, 1), balance=True).join(WAIT_S)
    assert [len(trace.pieces[0, rank][0]) for rank in (0, 1)] == [7, 1]
    assert_same(state.state_dict(), one_device(global_steps(2, 1), sgd, None))


def test_after_a_death_the_other_ranks_split_the_same_global_batch_by_their_sizes():
    trace = Trace(fails_at=(1, 0, 6))
    state = sized(trace, (6, 4, 2), on_worker_failure="continue").join(WAIT_S)
    assert_same(state.state_dict(), one_device(global_steps(3, 1), sgd, None))
    assert [metrics.num_samples for metrics in state.metrics] == [N] * EPOCHS
    # Two slices of 6, so that no piece is larger than before.
    assert [[len(p) for p in trace.pieces[1, rank][:2]] for rank in (0, 2)] == [[5, 5], [1, 1]]


@pytest.mark.parametrize("at", [0, 5, 6, 13])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_after_a_death_each_sample_still_counts_once(random_shares, at, accumulate):
    ranks, trace = 3, Trace(fails_at=(1, 0, at))
    handle = run(trace, sgd, ranks=ranks, accumulate=accumulate, on_worker_failure="continue")
    state = handle.join(WAIT_S)
    counted = trace.pieces.get((0, 1), [])[: at // accumulate * accumulate]
    assert state.metrics[0].per_rank[1].num_samples == sum(map(len, counted))
    assert_same(state.state_dict(), one_device(global_steps(ranks, accumulate), sgd, None))
    assert [metrics.num_samples for metrics in state.metrics] == [N] * EPOCHS


class Dies(Trace):
    """A ``train_fn`` that fails at the n-th micro-batch of some ranks."""

    def __init__(self, **at):
        super().__init__()
        self.at = {int(rank[1:]): num for rank, num in at.items()}
        self.counts = dict.fromkeys(self.at, 0)

    def __call__(self, model, batch):
        rank = current_worker().rank
        if rank in self.at:
            self.counts[rank] += 1
            if self.counts[rank] == self.at[rank]:
                raise RuntimeError("planted")
        return super().__call__(model, batch)


@pytest.mark.parametrize(
    ("ranks", "deaths", "optim", "more"),
    [
        (2, {"r0": 1}, sgd, {}),
        (2, {"r1": 5}, adamw, {"clip": 0.1, "accumulate": 2}),
        (3, {"r1": 6}, sgd, {"way": (SYNC, AverageBackend.GLOO)}),
        (4, {"r0": 4, "r2": 9}, adamw, {"accumulate": 3}),
        (5, {"r4": 3, "r1": 3, "r2": 8}, sgd, {"clip": 0.1}),
        (3, {"r2": 7}, adamw, {"drop_last": True}),
        (3, {"r1": 6}, adamw, {"loader_workers": 1}),
        (3, {"r0": 10}, sgd, {"max_steps": 71}),
    ],
)
def test_with_equal_batches_a_death_changes_no_step(ranks, deaths, optim, more):
    trace = Dies(**deaths)
    state = run(
        trace, optim, ranks=ranks, balance=False, on_worker_failure="continue", **more
    ).join(WAIT_S)
    assert len(state.failures) == len(deaths)
    accumulate = more.get("accumulate", 1)
    steps = list(global_steps(ranks, accumulate))
    if "drop_last" in more:
        steps = [step[: len(step) // SIZE * SIZE] for step in steps]
    if "max_steps" in more:  # batches of the initial ranks
        kept, rest = [], more["max_steps"]
        for step in steps:
            count = min(rest, -(-len(step) // SIZE))
            kept.append(step[: count * SIZE])
            rest -= count
        steps = [step for step in kept if len(step)]
    assert_same(state.state_dict(), one_device(steps, optim, more.get("clip")))
    assert max(len(piece) for own in trace.pieces.values() for piece in own) <= SIZE


def test_a_death_does_not_change_the_schedule():
    def rates(deaths, **more):
        trace, seen = Dies(**deaths), {}

        def train(model, batch):
            worker = current_worker()
            if worker.rank == 0:
                seen.setdefault(worker.replica.lockstep.step, worker.current_lr)
            return trace(model, batch)

        def halving(optimizer):
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)

        more = {"balance": False, "scheduler": halving, "on_worker_failure": "continue", **more}
        state = run(train, sgd, ranks=3, **more).join(WAIT_S)
        assert len(state.failures) == len(deaths)
        return seen

    whole = rates({})
    assert len(set(whole.values())) == len(whole) == EPOCHS * -(-N // (3 * SIZE))
    assert rates({"r1": 6}) == pytest.approx(whole)
    assert rates({"r1": 6, "r2": 9}) == pytest.approx(whole)


@pytest.mark.parametrize(
    ("accumulate", "backend", "loader"),
    [(1, THREAD, 0), (2, AverageBackend.GLOO, 0), (2, THREAD, 2)],
)
def test_ranks_without_samples_in_some_steps_change_no_result(
    monkeypatch, accumulate, backend, loader
):
    draw, dealt, ranks = random.Random(3), [], 3

    def sizes(self, total, ranks):
        parts = [0] * len(ranks)
        some = draw.sample(range(len(ranks)), draw.randint(1, len(ranks)))
        for i, n in zip(some, split_like(total, [draw.randint(1, 5) for _ in some]), strict=True):
            parts[i] = n
        dealt.append(tuple(parts))
        return tuple(parts)

    monkeypatch.setattr(Shares, "sizes", sizes)
    trace = Trace()
    way = (SYNC, backend)
    more = {"loader_workers": loader} if loader else {}
    state = run(trace, adamw, ranks=ranks, accumulate=accumulate, way=way, **more).join(WAIT_S)
    assert sum(0 in parts for parts in dealt) > 2
    assert_same(state.state_dict(), one_device(global_steps(ranks, accumulate), adamw, None))
    assert [metrics.num_samples for metrics in state.metrics] == [N] * EPOCHS
    pieces = [trace.pieces.get((0, rank), []) for rank in range(ranks)]
    assert sorted(i for own in pieces for piece in own for i in piece) == list(range(N))
    assert all(piece for own in pieces for piece in own)


def test_measured_shares_equal_one_device_too():
    trace = Trace()
    state = run(trace, adamw, ranks=3).join(WAIT_S)
    assert_same(state.state_dict(), one_device(global_steps(3, 1), adamw, None))


class Small(Trace):
    """A ``train_fn`` whose devices have memory for pieces of a limited size."""

    def __init__(self, bears):
        super().__init__()
        self.bears, self.num_failed = bears, 0
        self.draws, self.num_draws_before = [], 0  # of rank 0, with their epoch

    def __call__(self, model, batch):
        worker = current_worker()
        if worker.rank == 0:
            draw = torch.rand((), generator=worker.generator).item()
            self.draws.append((worker.current_epoch, draw))
        if len(batch[0]) > self.bears[worker.rank]:
            self.num_failed += 1
            self.num_draws_before = len(self.draws)
            raise torch.OutOfMemoryError("planted: out of memory")
        return super().__call__(model, batch)


@pairwise(failure=["raise", "continue"], backend=[THREAD, AverageBackend.GLOO], accumulate=[1, 2])
def test_a_step_without_memory_for_a_piece_is_repeated(caplog, failure, backend, accumulate):
    ranks, trace = 3, Small((3, 99, 99))  # the pieces of the first steps are of 4 samples
    handle = run(
        trace,
        sgd,
        ranks=ranks,
        accumulate=accumulate,
        way=(SYNC, backend),
        on_worker_failure=failure,
    )
    state = handle.join(WAIT_S)
    assert trace.num_failed == 1
    assert_same(state.state_dict(), one_device(global_steps(ranks, accumulate), sgd, None))
    assert [metrics.num_samples for metrics in state.metrics] == [N] * EPOCHS
    assert [metrics.num_retrained for metrics in state.metrics] == [0] * EPOCHS
    warnings = [r.getMessage() for r in caplog.records if "no memory for a piece" in r.getMessage()]
    assert len(warnings) == 1
    # A rank that was slow for a while may have no batches of an epoch.
    own = [len(p) for epoch in range(EPOCHS) for p in trace.pieces.get((epoch, 0), [])]
    assert max(own) <= 3
    before, after = trace.draws[: trace.num_draws_before], trace.draws[trace.num_draws_before :]
    if after and after[0][0] == before[-1][0]:
        assert after[0] in before, "a generator advanced in the repeated step"


def test_a_global_batch_too_large_for_all_ranks_ends_the_run():
    trace = Small((3, 4))
    with pytest.raises(WorkerFailed, match="smaller batch_size") as caught:
        run(trace, sgd, ranks=2).join(WAIT_S)
    assert isinstance(caught.value.__cause__.__cause__, torch.OutOfMemoryError)


def test_equal_batches_are_not_made_smaller():
    trace = Small((3, 4))
    with pytest.raises(WorkerFailed, match="out of memory"):
        run(trace, sgd, ranks=2, balance=False).join(WAIT_S)
    assert trace.num_failed == 1
