"""Gradients in buckets: they are sent during the backward pass, with equal results."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from runtime import NonFiniteError, WorkerFailed, current_worker
from runtime.collective import create_collectives
from runtime.core.errors import CollectiveAborted
from runtime.replica.flat import FlatParams
from runtime.replica.reducer import GradientReducer
from tests.support.pairs import SCALE, diagonal, pairwise
from tests.support.running import CADENCE, GLOO, OVER_CPU, SYNC, THREAD, WAIT_S, builder
from tests.support.steppers import stepper_of

TINY = 64
"""Bytes: one gradient in each bucket."""


def plain_sgd(params):
    return torch.optim.SGD(params, 0.1, momentum=0.9)


class Net(nn.Module):
    """Layers that run in another order than that of registration; some ranks leave one out."""

    def __init__(self, dtypes=(torch.float64,)):
        super().__init__()
        torch.manual_seed(3)
        self.last = nn.Linear(16, 2)
        self.spare = nn.Linear(16, 16)
        self.first = nn.Linear(8, 16)
        self.middle = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16, dtype=dtypes[-1]))
        self.to(dtypes[0])
        self.scale.data = self.scale.data.to(dtypes[-1])

    def forward(self, x, *, spare=False):
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.middle(x) * self.scale.to(x.dtype))
        return self.last(self.spare(x) if spare else x)


class Ranks:
    """Replicas on ranks of one group, each with a stepper.

    Attributes:
        steppers: One for each rank.
        reducers: Theirs.
        ends: The collective's.
    """

    def __init__(self, kind, world_size, bucket_bytes=TINY, make=Net, timeout_s=10):
        self.ends = create_collectives(world_size, kind, timeout_s=timeout_s)
        self.models = [make() for _ in range(world_size)]
        self.steppers, self.reducers = [], []
        for model, end in zip(self.models, self.ends, strict=True):
            params = FlatParams(model)
            reducer = GradientReducer(params, end, bucket_bytes=bucket_bytes)
            self.reducers.append(reducer)
            self.steppers.append(
                stepper_of(model, plain_sgd(model.parameters()), params=params, reducer=reducer)
            )

    def step(self, rank, train_fn, batches):
        total = sum(len(batch[0]) for batch in batches)
        with self.steppers[rank].window(total, len(batches)) as window:
            for batch in batches:
                window.add(train_fn, batch, len(batch[0]))
            return window.finish()

    def run(self, work):
        with ThreadPoolExecutor(len(self.ends)) as pool:
            futures = [pool.submit(work, rank) for rank in range(len(self.ends))]
            return [future.exception(WAIT_S) or future.result() for future in futures]


@contextmanager
def team(*args, **kwargs):
    made = Ranks(*args, **kwargs)
    try:
        yield made
    finally:
        for end in made.ends:
            end.close()


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def batch_of(rank, step, size=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(97 * rank + step)
    return (
        torch.randn(size, 8, generator=generator, dtype=dtype),
        torch.randn(size, 2, generator=generator, dtype=dtype),
    )


def largest_error(a, b):
    return max(
        float((p - q).detach().abs().max())
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


def test_the_first_bucket_is_reduced_over_gloo_before_the_backward_pass_ends():
    """In PyTorch's trace, Gloo has begun before the last gradients are computed."""

    def make():
        torch.manual_seed(1)
        return nn.Sequential(*[nn.Linear(400, 400) for _ in range(8)])

    def train(model, batch):
        return model(batch[0]).square().mean()

    x = torch.randn(64, 400)
    meet = threading.Barrier(2)
    found = []
    with team("gloo", 2, bucket_bytes=400 * 400 * 4, make=make) as ranks:

        def work(rank):
            ranks.step(rank, train, [(x,)])
            if rank == 1:
                meet.wait(WAIT_S)
                ranks.step(rank, train, [(x,)])
                return
            with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
                meet.wait(WAIT_S)
                ranks.step(rank, train, [(x,)])
            found.extend(trace.events())

        assert ranks.run(work) == [None, None]
    begun = [e.time_range.start for e in found if "gloo:all_reduce" in e.name]
    computed = [e.time_range.end for e in found if "AccumulateGrad" in e.name]
    assert begun, sorted({e.name for e in found})
    assert computed
    assert min(begun) < max(computed)


@pytest.mark.parametrize("kind", ["gloo", "thread"])
def test_buckets_are_sent_in_the_order_of_the_backward_pass(kind):
    with team(kind, 2) as ranks:

        def work(rank):
            for step in range(2):
                ranks.step(rank, loss_of, [batch_of(rank, step)])

        assert ranks.run(work) == [None, None]
        names = [name for name, _ in ranks.models[0].named_parameters()]
        for reducer in ranks.reducers:
            order = [names[i] for i in reducer._order]
            assert order[-2:] == ["spare.weight", "spare.bias"]
            layers = [name.split(".")[0] for name in order]
            assert list(dict.fromkeys(layers)) == ["last", "scale", "middle", "first", "spare"]
            sent = [i for bucket in reducer._buckets for i in bucket.params]
            assert sent == list(reducer._order)


@pairwise(
    dtypes=[(torch.float64,), (torch.float64, torch.float32)],
    bucket_bytes=[1, 600, 1 << 20],
    group=[("gloo", 3), ("thread", 2)],
)
def test_steps_equal_those_without_buckets(group, bucket_bytes, dtypes):
    """Pieces of any size, including 0, in any number of micro-batches; a layer used by some."""
    kind, world_size = group

    def train(model, batch):
        return nn.functional.mse_loss(model(batch[0], spare=batch[2]), batch[1])

    def run(size):
        with team(kind, world_size, bucket_bytes=size, make=lambda: Net(dtypes)) as ranks:

            def work(rank):
                draw = torch.Generator().manual_seed(rank)
                for step in range(8):
                    parts = int(torch.randint(0 if rank else 1, 4, (), generator=draw))
                    spare = rank == 1 and step > 2
                    ranks.step(
                        rank,
                        train,
                        [(*batch_of(rank, 10 * step + k, size=k + 1), spare) for k in range(parts)],
                    )

            assert ranks.run(work) == [None] * world_size
            return ranks.models

    plain, cut = run(None), run(bucket_bytes)
    close = 1e-12 if len(dtypes) == 1 else 1e-6
    for model in cut:
        assert largest_error(model, plain[0]) < close
    assert largest_error(plain[0], Net(dtypes)) > 0.01


@pytest.mark.parametrize("kind", ["gloo", "thread"])
@pytest.mark.parametrize("weights", [(3.0, 1.0), (2.0, 0.0), (0.0, 0.0), (None, 5.0)])
def test_weights_equal_those_without_buckets(kind, weights):
    def run(size):
        with team(kind, 2, bucket_bytes=size) as ranks:

            def train(model, batch):
                weight = weights[batch[2]]
                loss = loss_of(model, batch)
                if weight == 0:
                    loss = loss * float("nan")
                return loss if weight is None else (loss, weight)

            def work(rank):
                for step in range(4):
                    ranks.step(rank, train, [(*batch_of(rank, step + k), rank) for k in range(2)])

            assert ranks.run(work) == [None] * 2
            return ranks.models

    plain, cut = run(None), run(TINY)
    for model in cut:
        assert largest_error(model, plain[0]) < 1e-12


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ctx.error


@pytest.mark.parametrize("kind", ["gloo", "thread"])
def test_a_backward_pass_that_fails_halfway_aborts_the_exchange_of_its_peers(kind):
    """Rank 1 fails after it has sent its first bucket; rank 0 waits for the rest."""
    with team(kind, 2, timeout_s=WAIT_S / 3) as ranks:

        def work(rank):
            def train(model, batch):
                x = model.first(batch[0])
                if rank == 1 and ranks.reducers[1]._has_order:
                    x = Failing.apply(x, RuntimeError("planted"))
                return model.last(torch.tanh(model.middle(x))).square().mean()

            for step in range(3):
                ranks.step(rank, train, [batch_of(rank, step)])

        first, second = ranks.run(work)
        assert isinstance(first, CollectiveAborted)
        assert not first.failed
        assert "planted" in str(second)
        # Peers may still write to the tensors of the aborted exchange: new ones replace them.
        reducer = ranks.reducers[0]
        assert reducer._mean is None
        assert reducer._flats[0].data_ptr() != reducer._aborted_flats[0].data_ptr()


def test_a_gradient_in_several_parts_turns_the_overlap_off():
    """A layer twice under PyTorch's reentrant checkpoint: its hook runs twice."""
    from torch.utils.checkpoint import checkpoint

    def train(model, batch):
        x = model.first(batch[0])
        for _ in range(2):
            x = checkpoint(model.middle, x, use_reentrant=True)
        return model.last(x).square().mean()

    def run(size):
        with team("gloo", 2, bucket_bytes=size) as ranks:

            def work(rank):
                for step in range(3):
                    ranks.step(rank, train, [batch_of(rank, step)])

            assert ranks.run(work) == [None, None]
            return ranks

    plain, cut = run(None), run(TINY)
    assert not any(reducer._overlaps for reducer in cut.reducers)
    assert largest_error(plain.models[0], cut.models[0]) < 1e-12


def test_a_gradient_in_several_parts_after_the_first_step_is_refused():
    from torch.utils.checkpoint import checkpoint

    with team("gloo", 2) as ranks:

        def work(rank):
            def train(model, batch):
                x = model.first(batch[0])
                for _ in range(2):
                    again = ranks.reducers[rank]._has_order
                    x = (
                        checkpoint(model.middle, x, use_reentrant=True)
                        if again
                        else model.middle(x)
                    )
                return model.last(x).square().mean()

            for step in range(3):
                ranks.step(rank, train, [batch_of(rank, step)])

        found = ranks.run(work)
        assert all(isinstance(error, (ValueError, CollectiveAborted)) for error in found)
        assert any("bucket_cap_mb(None)" in str(error) for error in found)


# Whole runs.


NUM_SAMPLES = 96 if SCALE > 1 else 48


def run_of(way, cap_mb, **settings):
    x, y = batch_of(0, 0, size=NUM_SAMPLES)
    b = builder(
        model=lambda device: Net(),
        optim=plain_sgd,
        train=settings.pop("train", loss_of),
        dataset=(x, y),
        batch_size=4,
        epochs=3,
        ranks=settings.pop("ranks", 2),
        way=way,
    )
    for name, value in settings.items():
        getattr(b, name)(value)
    return b.bucket_cap_mb(cap_mb).run()


@diagonal(
    settings=[
        {},
        {"accumulate": 3, "max_grad_norm": 0.1},
        {"on_non_finite": "skip", "precision": "bf16"},
        {"balance": True, "ranks": 3},
    ],
    way=[(SYNC, GLOO), (SYNC, THREAD)],
)
def test_runs_equal_those_without_buckets(way, settings):
    plain = run_of(way, None, **copy.copy(settings)).join(WAIT_S)
    cut = run_of(way, TINY / 2**20, **copy.copy(settings)).join(WAIT_S)
    close = 1e-3 if "precision" in settings else 1e-10
    for name, tensor in plain.params.items():
        assert torch.allclose(tensor, cut.params[name], atol=close, rtol=close), name


@pytest.mark.parametrize("way", [(SYNC, GLOO), (SYNC, THREAD)])
@pytest.mark.parametrize("where", ["backward", "forward"])
def test_the_other_ranks_continue_after_a_death_within_a_step(way, where):
    trained = []
    lock = threading.Lock()

    def train(model, batch):
        worker = current_worker()
        x = model.first(batch[0])
        if worker.rank == 1 and worker.local_step >= 3:
            if where == "forward":
                raise RuntimeError("planted")
            x = Failing.apply(x, RuntimeError("planted"))
        with lock:
            trained.append((worker.current_epoch, worker.rank))
        return nn.functional.mse_loss(model.last(torch.tanh(model.middle(x))), batch[1])

    handle = run_of(way, TINY / 2**20, ranks=3, on_worker_failure="continue", train=train)
    state = handle.join(WAIT_S)
    assert [metrics.num_samples for metrics in state.metrics] == [NUM_SAMPLES] * 3
    assert {rank for epoch, rank in trained if epoch == 2} == {0, 2}


@pytest.mark.parametrize("way", [(SYNC, GLOO), (SYNC, THREAD)])
def test_a_step_without_memory_in_its_backward_pass_is_repeated(way):
    failed = []

    def train(model, batch):
        worker = current_worker()
        x = model.first(batch[0])
        if worker.rank == 1 and worker.local_step >= 3 and len(x) > 1 and not failed:
            failed.append(worker.local_step)
            x = Failing.apply(x, torch.OutOfMemoryError("planted"))
        return nn.functional.mse_loss(model.last(torch.tanh(model.middle(x))), batch[1])

    state = run_of(way, TINY / 2**20, balance=True, train=train).join(WAIT_S)
    assert failed
    assert [metrics.num_samples for metrics in state.metrics] == [NUM_SAMPLES] * 3


@pytest.mark.parametrize("way", [(SYNC, GLOO), (SYNC, THREAD)])
def test_a_loss_that_is_not_finite_ends_the_run_by_name(way):
    def train(model, batch):
        worker = current_worker()
        bad = worker.rank == 1 and worker.local_step == 3
        return loss_of(model, batch) * (float("nan") if bad else 1.0)

    with pytest.raises(WorkerFailed) as failed:
        run_of(way, TINY / 2**20, train=train).join(WAIT_S)
    assert isinstance(failed.value.__cause__, NonFiniteError)
    assert failed.value.rank == 1


@pytest.mark.parametrize("way", [(SYNC, GLOO), (SYNC, THREAD)])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(way, tmp_path):
    whole = run_of(way, TINY / 2**20, ranks=3).join(WAIT_S)

    def stop_at(epoch, worker):
        if epoch == 1 and worker.rank == 0:
            handle.stop()

    ready = threading.Event()

    def epoch_fn(epoch, worker):
        ready.wait(WAIT_S)
        stop_at(epoch, worker)

    handle = run_of(way, TINY / 2**20, ranks=3, checkpoint_dir=tmp_path, epoch_fn=epoch_fn)
    ready.set()
    assert handle.join(WAIT_S).stopped
    resumed = run_of(way, TINY / 2**20, ranks=3, resume=tmp_path).join(WAIT_S)
    for name, tensor in whole.params.items():
        assert torch.equal(tensor, resumed.params[name]), name


@pytest.mark.parametrize(
    ("way", "settings", "message"),
    [
        ((CADENCE, OVER_CPU), {}, 'policy("sync")'),
        ((SYNC, GLOO), {"sync_batchnorm": True}, r"sync_batchnorm\(True\)"),
        ((SYNC, GLOO), {"cuda_graphs": True}, r"cuda_graphs\(True\)"),
    ],
)
def test_settings_that_exclude_buckets_are_refused(way, settings, message):
    with pytest.raises(ValueError, match=message.replace('("', r'\("').replace('")', r'"\)')):
        run_of(way, 25, **settings)


@pytest.mark.parametrize("mb", [0, -1, float("nan"), float("inf")])
def test_an_invalid_bucket_size_is_refused(mb):
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        builder().bucket_cap_mb(mb)
