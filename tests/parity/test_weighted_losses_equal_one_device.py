"""Losses that are not a plain mean over samples equal one device on each global batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.graphing import capturable_on_cpu, posing
from tests.support.pairs import pairwise
from tests.support.running import GLOO, SYNC, THREAD, WAIT_S, Trace, builder

__all__ = ["capturable_on_cpu", "posing"]  # fixtures

N, TOKENS, VOCABULARY, WIDTH = 46, 6, 13, 16
IGNORED = -100
BOUND = 1e-8


class Block(nn.Module):
    """Attention and an MLP, each with a norm and a skip connection, as in GPT-2."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, 2, WIDTH // 2))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class SmallGpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def make_start():
    torch.manual_seed(5)
    return SmallGpt().double()


START = make_start()
RANDOM = torch.Generator().manual_seed(7)
INPUTS = torch.randint(VOCABULARY, (N, TOKENS), generator=RANDOM)
LABELS = torch.randint(VOCABULARY, (N, TOKENS), generator=RANDOM)
IS_IGNORED = torch.rand(N, TOKENS, generator=RANDOM) < 0.3
IS_IGNORED |= torch.rand(N, 1, generator=RANDOM) < 0.5  # whole samples, and so whole pieces
LABELS[IS_IGNORED] = IGNORED
CLASS_WEIGHTS = torch.rand(VOCABULARY, generator=RANDOM, dtype=torch.float64) * 5


def entropy(model, inputs, labels, **options):
    return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), **options)


def ignored_labels(model, inputs, labels):
    return entropy(model, inputs, labels), (labels != IGNORED).sum()


def class_weights(model, inputs, labels):
    loss = entropy(model, inputs, labels, weight=CLASS_WEIGHTS)
    weights = torch.where(labels == IGNORED, 0.0, CLASS_WEIGHTS[labels.clamp(min=0)])
    return loss, weights.sum()


def sum_of_tokens(model, inputs, labels):
    is_counted = (labels != IGNORED).flatten()
    count = int(is_counted.sum())
    losses = entropy(model, inputs, labels.clamp(min=0), reduction="none")
    # Without tokens 0 / 0, with NaN gradients.
    return (losses * is_counted).sum() / count, count


def constant_without_tokens(model, inputs, labels):
    count = int((labels != IGNORED).sum())
    return (entropy(model, inputs, labels) if count else torch.zeros(())), count


LOSSES = [ignored_labels, class_weights, sum_of_tokens, constant_without_tokens]


def sgd(params):
    return torch.optim.SGD(params, 0.2, momentum=0.9)


def adamw(params):
    return torch.optim.AdamW(params, 0.01)


def fused_sgd(params):
    return torch.optim.SGD(params, 0.2, momentum=0.9, fused=True)


def fused_adamw(params):
    return torch.optim.AdamW(params, 0.01, fused=True)


def one_device(steps, loss, optim, clip):
    """A plain loop; a global batch of weight 0 makes no step."""
    model = copy.deepcopy(START)
    optimizer = optim(model.parameters())
    total, weight, num_empty = 0.0, 0.0, 0
    for indices in steps:
        optimizer.zero_grad()
        value, units = loss(model, INPUTS[indices], LABELS[indices])
        if units == 0:
            num_empty += 1
            continue
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        total, weight = total + value.item() * float(units), weight + float(units)
    return model, total / weight, num_empty


def run(loss, optim, *, ranks, backend=THREAD, accumulate=1, ratios=None, clip=None, graphs=False):
    """A run of one epoch, and the samples of each of its global steps."""
    trace = Trace(lambda model, batch: loss(model, *batch[:2]))
    b = builder(
        model=lambda device: copy.deepcopy(START),
        optim=optim,
        train=trace,
        dataset=(INPUTS, LABELS, torch.arange(N)),
        batch_size=3,
        ranks=ranks,
        way=(SYNC, backend),
    )
    b.accumulate(accumulate).cuda_graphs(graphs)
    if clip is not None:
        b.max_grad_norm(clip)
    if ratios is not None:
        b.partition_ratios(ratios)
    state = b.run().join(WAIT_S)
    parts = {}
    for rank, indices in trace.of_epoch(0):
        parts.setdefault(rank, []).append(list(indices))
    longest = max(map(len, parts.values()))
    steps = [
        [x for part in parts.values() for batch in part[i : i + accumulate] for x in batch]
        for i in range(0, longest, accumulate)
    ]
    assert sorted(x for step in steps for x in step) == list(range(N))
    return state, steps


def error_of(state, model):
    """The largest relative distance of a tensor from that of one device."""
    return max(
        float((state.state_dict()[name] - wanted).norm() / wanted.norm())
        for name, wanted in model.state_dict().items()
    )


def assert_equal(loss, optim, *, clip=None, **settings):
    state, steps = run(loss, optim, clip=clip, **settings)
    model, avg_loss, num_empty = one_device(steps, loss, optim, clip)
    assert error_of(state, START) > 0.01
    assert error_of(state, model) < BOUND
    metrics = state.metrics[-1]
    assert (metrics.num_samples, metrics.num_skipped) == (N, 0)
    if settings["ranks"] == 1 and settings.get("accumulate", 1) == 1:
        assert num_empty > 0
        assert metrics.avg_loss == pytest.approx(avg_loss, rel=1e-12)


accumulated = pytest.mark.parametrize("accumulate", [1, 3])
optimizers = pytest.mark.parametrize("optim", [sgd, adamw])
losses = pytest.mark.parametrize("loss", LOSSES)


@pairwise(loss=LOSSES, optim=[sgd, adamw], accumulate=[1, 3], ranks=[1, 2, 3, 4])
def test_weighted_losses_equal_one_device(loss, optim, accumulate, ranks):
    assert_equal(loss, optim, ranks=ranks, accumulate=accumulate)


@losses
@accumulated
def test_weighted_losses_equal_one_device_over_gloo(loss, accumulate):
    assert_equal(loss, sgd, ranks=3, accumulate=accumulate, backend=GLOO)


@optimizers
@accumulated
def test_weighted_losses_equal_one_device_with_unequal_shares(optim, accumulate):
    settings = {"ranks": 3, "accumulate": accumulate, "ratios": [0.55, 0.3, 0.15]}
    assert_equal(ignored_labels, optim, **settings)


@accumulated
@pytest.mark.parametrize("ranks", [1, 3])
def test_weighted_losses_equal_one_device_with_clipped_gradients(accumulate, ranks):
    assert_equal(ignored_labels, sgd, ranks=ranks, accumulate=accumulate, clip=0.05)


# -- on a device whose values the host does not read ---------------------------------------


@pairwise(loss=LOSSES, optim=[sgd, adamw, fused_sgd, fused_adamw], accumulate=[1, 3])
def test_weighted_losses_on_a_device_equal_one_device(loss, optim, accumulate, posing):
    assert_equal(loss, optim, ranks=1, accumulate=accumulate)


@pairwise(loss=LOSSES, accumulate=[1, 3], ranks=[2, 3])
def test_weighted_losses_of_ranks_on_devices_equal_one_device(loss, accumulate, ranks, posing):
    assert_equal(loss, adamw, ranks=ranks, accumulate=accumulate)
