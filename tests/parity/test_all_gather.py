"""All-gather of rows in ``train_fn``: losses over the global batch, as on one device."""

import copy
import functools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import runtime
from coordinator.shares import Shares
from coordinator.splitting import permutation, split_like
from runtime import WorkerFailed, create_collectives, current_worker
from runtime.replica.global_batch_comm import GlobalBatchComm
from tests.support.pairs import diagonal
from tests.support.running import (
    ASYNC,
    CADENCE,
    GLOO,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    at_once,
    builder,
)

N, EPOCHS, SIZE, SEED = 43, 2, 4, 5
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randn(N, 5, generator=GENERATOR, dtype=torch.float64)


class Clip(nn.Module):
    """Two encoders and a temperature."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.text = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, y):
        return F.normalize(self.image(x), dim=1), F.normalize(self.text(y), dim=1)


torch.manual_seed(1)
START = Clip().double()


def clip_loss(model, images, texts):
    """The loss of all pairs, as on one device."""
    logits = model.scale * images @ texts.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def whole(model, batch):
    """Every rank computes the loss of the global batch."""
    images, texts = model(*batch[:2])
    return clip_loss(model, runtime.all_gather(images)[0], runtime.all_gather(texts)[0])


def own_rows(model, batch):
    """Every rank computes the loss of its own rows, and gathers all features in one call."""
    images, texts = model(*batch[:2])
    everyone, own = runtime.all_gather(torch.cat([images, texts], 1))
    all_images, all_texts = everyone.split(3, 1)
    labels = torch.arange(own.start, own.stop)
    one = F.cross_entropy(model.scale * images @ all_texts.T, labels)
    other = F.cross_entropy(model.scale * texts @ all_images.T, labels)
    return (one + other) / 2


def weighted(model, batch):
    """Rows are weighted by units of their own."""
    images, texts = model(*batch[:2])
    all_texts, own = runtime.all_gather(texts)
    units = (1 + batch[2] % 3).double()
    all_units, _ = runtime.all_gather(units)
    assert torch.equal(all_units[own], units)
    labels = torch.arange(own.start, own.stop)
    losses = F.cross_entropy(model.scale * images @ all_texts.T, labels, reduction="none")
    return (losses * units).sum() / units.sum(), units.sum()


def reference(train, model, indices):
    """The same losses of a global batch on one model, and their weight."""
    images, texts = model(X[indices], Y[indices])
    if train is not weighted:
        return clip_loss(model, images, texts), len(indices)
    units = (1 + indices % 3).double()
    losses = F.cross_entropy(
        model.scale * images @ texts.T, torch.arange(len(indices)), reduction="none"
    )
    return (losses * units).sum() / units.sum(), units.sum()


def run(train, *, ranks, accumulate=1, way=(SYNC, THREAD), balance=False, data=N, **more):
    b = builder(
        model=lambda device: copy.deepcopy(START),
        optim=lambda params: torch.optim.SGD(params, 0.3, momentum=0.9),
        train=train,
        dataset=(X[:data], Y[:data], torch.arange(data)),
        batch_size=SIZE,
        epochs=EPOCHS,
        ranks=ranks,
        way=way,
    )
    b.accumulate(accumulate).seed(SEED).tune_allocator(False).all_gather(True)
    if way[0] is SYNC:
        b.balance(balance)
    for name, value in more.items():
        getattr(b, name)(value)
    return b.run()


def one_device(train, ranks, accumulate=1, *, data=N):
    """The same global batches on one model."""
    model = copy.deepcopy(START)
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    for epoch in range(EPOCHS):
        order = torch.from_numpy(permutation(data, epoch, SEED))
        for window in order.split(SIZE * ranks * accumulate):
            optimizer.zero_grad()
            total = 0
            for indices in window.split(SIZE * ranks):
                loss, weight = reference(train, model, indices)
                (loss * weight).backward()
                total += weight
            for p in model.parameters():
                p.grad /= total
            optimizer.step()
    return model.state_dict()


def assert_same(actual, expected):
    for name, tensor in expected.items():
        error = ((actual[name] - tensor).norm() / tensor.norm()).item()
        assert error < 1e-8, f"{name}: relative error {error:.1e}"
    assert (expected["text.weight"] - START.state_dict()["text.weight"]).norm() > 0.05


@diagonal(
    way=[(1, 1, THREAD), (2, 2, GLOO), (3, 1, THREAD), (4, 2, THREAD), (4, 1, GLOO)],
    train=[whole, own_rows, weighted],
    times=2,
)
def test_ranks_equal_one_device_on_the_global_batch(way, train):
    """The last batch of an epoch is short, and with 4 ranks one of them has none of it."""
    ranks, accumulate, backend = way
    found = run(train, ranks=ranks, accumulate=accumulate, way=(SYNC, backend)).join(WAIT_S)
    assert_same(found.state_dict(), one_device(train, ranks, accumulate))


@pytest.mark.parametrize("backend", [THREAD, GLOO])
@pytest.mark.parametrize(("ranks", "train"), [(2, own_rows), (4, whole), (3, weighted)])
def test_unequal_pieces_and_ranks_without_a_batch_equal_one_device(
    monkeypatch, ranks, train, backend
):
    draw = random.Random(7)

    def sizes(self, total, ranks):
        some = draw.sample(range(len(ranks)), draw.randint(1, len(ranks)))
        parts = dict(zip(some, split_like(total, [1 + i for i in some]), strict=True))
        return tuple(parts.get(i, 0) for i in range(len(ranks)))

    monkeypatch.setattr(Shares, "sizes", sizes)
    state = run(train, ranks=ranks, balance=True, way=(SYNC, backend)).join(WAIT_S)
    assert_same(state.state_dict(), one_device(train, ranks))


@pytest.mark.parametrize("backend", [THREAD, GLOO])
def test_after_a_death_the_other_ranks_continue_with_the_global_batch(backend):
    """They wait for the dead rank within their forward passes."""

    def dies(model, batch):
        if current_worker().rank == 1 and current_worker().local_step == 3:
            raise RuntimeError("planted")
        return own_rows(model, batch)

    state = run(dies, ranks=3, on_worker_failure="continue", way=(SYNC, backend)).join(WAIT_S)
    assert [failure.rank for failure in state.failures] == [1]
    assert [metrics.num_samples for metrics in state.metrics] == [N] * EPOCHS
    assert_same(state.state_dict(), one_device(own_rows, 3))


def test_rows_gathered_without_gradients_leave_a_piece_of_weight_0_out():
    def train(model, batch, gathers=True):
        images, texts = model(*batch[:2])
        if gathers:
            with torch.no_grad():
                runtime.all_gather(texts)  # for a memory bank
        worker = current_worker()
        counts = worker.rank != 1 or worker.local_step % 3
        return (images * texts).mean(), float(len(images) if counts else 0)

    state = run(train, ranks=2).join(WAIT_S).state_dict()
    expected = run(functools.partial(train, gathers=False), ranks=2).join(WAIT_S).state_dict()
    assert_same(state, expected)


@pytest.mark.parametrize("counts", [False, True])
def test_a_rank_whose_loss_ignores_the_gathered_rows_has_gradients_of_other_losses(counts):
    """Its rows are negatives of the others; if its own loss has weight 0, its gradients are NaN."""

    def odd_ranks_only(model, batch):
        images, texts = model(*batch[:2])
        all_texts, own = runtime.all_gather(texts)
        if current_worker().rank % 2 == 0:
            if counts:
                return images[:, 0].square().mean(), len(images)
            return images.sum() * float("nan"), 0
        labels = torch.arange(own.start, own.stop)
        return F.cross_entropy(model.scale * images @ all_texts.T, labels), len(images)

    ends = run(odd_ranks_only, ranks=2, data=8).join(WAIT_S).state_dict()
    model = copy.deepcopy(START)
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    for epoch in range(EPOCHS):
        order = torch.from_numpy(permutation(8, epoch, SEED))
        optimizer.zero_grad()
        images, texts = model(X[order], Y[order])
        logits = model.scale * images[4:] @ texts.T
        loss = F.cross_entropy(logits, torch.arange(4, 8))
        if counts:
            loss = (loss + images[:4, 0].square().mean()) / 2
        loss.backward()
        optimizer.step()
    assert_same(ends, model.state_dict())


def gather_in_threads(pieces, upstream, *, live=None, loss_of=None):
    """The rows that each rank gathers, and the gradient of its piece for a gradient of these rows,
    or of a loss computed from them.
    """
    ends = create_collectives(len(pieces))
    found = [None] * len(pieces)

    def rank(i):
        batch = GlobalBatchComm(ends[i])
        batch.begin(1)
        batch.next_batch()
        learns = pieces[i].is_floating_point() or pieces[i].is_complex()
        piece = pieces[i].clone().requires_grad_(learns)
        out, own = batch.all_gather(piece)
        batch.weight = 2.0 + i
        batch.live = True if live is None else live[i]
        if loss_of is not None:
            batch.connect(loss_of(out), True)[0].backward()
        elif piece.requires_grad:
            out.backward(upstream[i])
        batch.end_batch()
        found[i] = out.detach(), own, piece.grad

    at_once(rank, range(len(pieces)))
    for end in ends:
        end.close()
    return zip(*found, strict=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 3, 3), (2, 0, 5)])
def test_gradients_are_the_weighted_sum_of_all_ranks(dtype, counts):
    """Rows of any further shape; a rank with weight 0 and NaN gradients adds nothing."""
    torch.manual_seed(3)
    x = torch.randn(sum(counts), 2, 3, dtype=torch.float64).to(dtype)
    upstream = [torch.randn_like(x) for _ in counts]
    upstream[1].fill_(float("nan"))
    out, own, grads = gather_in_threads(x.split(counts), upstream, live=[True, False, True])
    assert all(torch.equal(each, x) for each in out)
    assert [x[rows].shape[0] for rows in own] == list(counts)
    expected = 2 * upstream[0].double() + 4 * upstream[2].double()
    tolerance = 1e-12 if dtype is torch.float64 else 2e-2
    for i, (rows, grad) in enumerate(zip(own, grads, strict=True)):
        assert grad.dtype is dtype
        torch.testing.assert_close(
            grad.double() * (2 + i), expected[rows], rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_labels_and_masks_are_gathered_too(dtype):
    x = torch.arange(7).to(dtype)
    out, _, grads = gather_in_threads(x.split((4, 3)), None)
    assert all(torch.equal(each, x) for each in out)
    assert list(grads) == [None, None]


def test_complex_rows_are_gathered_with_their_gradients():
    x = torch.randn(5, 3, dtype=torch.complex128, generator=GENERATOR)
    loss_of = lambda rows: rows.abs().square().sum()  # noqa: E731
    out, _, grads = gather_in_threads(x.split((2, 3)), None, loss_of=loss_of)
    assert all(torch.equal(each, x) for each in out)
    for i, (rows, grad) in enumerate(zip(x.split((2, 3)), grads, strict=True)):
        torch.testing.assert_close(grad * (2 + i), 5 * 2 * rows)  # of both ranks' losses


def once_more_on_rank_1(model, batch):
    if current_worker().rank == 1:
        runtime.all_gather(batch[0])
    return own_rows(model, batch)


def never_on_rank_1(model, batch):
    if current_worker().rank == 1:
        return model(*batch[:2])[0].sum()
    return own_rows(model, batch)


def other_width_on_rank_1(model, batch):
    runtime.all_gather(batch[current_worker().rank])
    return own_rows(model, batch)


def detached_on_rank_1(model, batch):
    images, texts = model(*batch[:2])
    texts = texts.detach() if current_worker().rank == 1 else texts
    return clip_loss(model, runtime.all_gather(images)[0], runtime.all_gather(texts)[0])


def in_another_micro_batch_on_rank_1(model, batch):
    """Call it as often as the others in a step, but in another micro-batch."""
    worker = current_worker()
    is_first = not getattr(model, "was_first", False)
    model.was_first = is_first
    if is_first == (worker.rank == 1):
        runtime.all_gather(batch[0])
    return model(*batch[:2])[0].sum()


@pytest.mark.parametrize(
    "train",
    [
        once_more_on_rank_1,
        never_on_rank_1,
        other_width_on_rank_1,
        detached_on_rank_1,
        in_another_micro_batch_on_rank_1,
    ],
)
@pytest.mark.parametrize("data", [40, 6])
def test_different_calls_of_all_gather_on_the_ranks_raise_at_once(train, data):
    """Also within a subgroup, since one of three ranks has no batch."""
    accumulate = 2 if train is in_another_micro_batch_on_rank_1 else 1
    if accumulate == 2:  # full ones, or two for two of the ranks
        data = 24 if data == 40 else 20
    with pytest.raises(WorkerFailed) as failed:
        run(train, ranks=3, data=data, accumulate=accumulate).join(WAIT_S / 4)
    assert isinstance(failed.value.__cause__, ValueError)
    assert "all ranks that have a batch call all_gather equally often" in str(failed.value)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda b: b.policy(CADENCE).backend(OVER_CPU), "all_gather.True. is for SYNC"),
        (lambda b: b.policy(ASYNC).backend(THREAD), "all_gather.True. is for SYNC"),
        (lambda b: b.cuda_graphs(True), "cuda_graphs"),
        (lambda b: b.backend(GLOO).bucket_cap_mb(1.0), "bucket_cap_mb"),
    ],
)
def test_settings_that_exclude_all_gather_are_refused_before_the_run(change, match):
    b = builder(way=(SYNC, THREAD)).all_gather(True)
    change(b)
    with pytest.raises(ValueError, match=match):
        b.run()


class Reads(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return runtime.all_gather(X[index : index + 1])[0], Y[index], index


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"all_gather": False}, r"requires all_gather\(True\)"),
        ({"epoch_fn": lambda epoch, worker: runtime.all_gather(X)}, "call it in train_fn"),
        ({"eval_fn": lambda model, epoch: {"n": len(runtime.all_gather(X)[0])}}, "in train_fn"),
        ({"dataset": Reads()}, "a data set is read ahead"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_gather_outside_train_fn_is_refused(more, match, ranks):
    with pytest.raises(WorkerFailed, match=match):
        run(own_rows, ranks=ranks, **more).join(WAIT_S)


@pytest.mark.parametrize(("wrong", "match"), [([1.0], "pass a tensor"), (torch.ones(()), "rows")])
def test_values_without_rows_are_refused(wrong, match):
    with pytest.raises(WorkerFailed, match=match):
        run(lambda model, batch: runtime.all_gather(wrong), ranks=2).join(WAIT_S)


def test_all_gather_outside_a_run_is_refused():
    with pytest.raises(RuntimeError, match="inside train_fn"):
        runtime.all_gather(X)
