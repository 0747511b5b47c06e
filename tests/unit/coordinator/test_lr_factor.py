"""The automatic factor of the learning rate: shares, deaths, sparse rounds."""

from __future__ import annotations

import logging
import math

import pytest

from coordinator import messages as m
from coordinator.config import ApplyPolicy, AverageBackend, CoordinatorConfig
from coordinator.lr_factor import MAX_ROUND_BATCHES, LrFactor
from tests.unit.coordinator.test_machine import Run


def config(world=2, **settings):
    defaults = {
        "num_samples": 100,
        "batch_size": 4,
        "num_epochs": 1,
        "policy": ApplyPolicy.CADENCE,
        "auto_lr": True,
    }
    return CoordinatorConfig(devices=("cpu",) * world, **(defaults | settings))


def enabled(*counts, **settings):
    """The factor of ranks that are expected to train ``counts`` batches between two rounds."""
    factor = LrFactor(config(len(counts), **settings))
    factor.enable(("Adam",))
    factor.update(counts)
    return factor


def then(factor, *counts):
    """The factor after these counts."""
    factor.update(counts)
    return factor.value


def expected(*counts):
    k_eff = sum(counts) ** 2 / sum(n**2 for n in counts)
    return math.sqrt(len(counts)) * k_eff / len(counts)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_equal_shares_have_the_root_of_the_number_of_ranks(world):
    assert enabled(*[5] * world).value == pytest.approx(math.sqrt(world))


def test_the_factor_follows_counts_that_clearly_differ():
    factor = enabled(5, 5)
    assert then(factor, 5, 7) == pytest.approx(expected(5, 5))  # noise
    assert then(factor, 2, 8) == pytest.approx(expected(2, 8))
    assert then(factor, 5, 20) == pytest.approx(expected(2, 8))
    assert then(factor, 5, 5) == pytest.approx(expected(5, 5))


def test_unequal_batches_move_the_average_as_far_as_one_device_with_all_of_them():
    sizes, counts = (4, 12), (6, 2)
    found = enabled(*counts, batch_size=4, batch_sizes=sizes).value
    samples = [n * size for n, size in zip(counts, sizes, strict=True)]
    moves = sum(s * n * math.sqrt(b) for s, n, b in zip(samples, counts, sizes, strict=True))
    one_device = sum(samples) / sum(sizes) * math.sqrt(sum(sizes))
    assert found * moves / sum(samples) == pytest.approx(one_device)


@pytest.mark.parametrize("world", [3, 40])
def test_a_death_lowers_the_factor(world):
    """Exactly, also where the change is small."""
    factor = enabled(*[5] * world)
    alive = [5] * (world - 1)
    assert then(factor, *alive, 0) == pytest.approx((world - 1) / math.sqrt(world))


def test_sparse_rounds_have_none_until_they_are_clearly_denser():
    limit = MAX_ROUND_BATCHES
    factor = enabled(limit, limit)
    assert factor.value == pytest.approx(math.sqrt(2))
    assert then(factor, limit + 1, limit + 1) == 1.0
    assert then(factor, limit, limit) == 1.0
    assert then(factor, limit // 2, limit // 2) == pytest.approx(math.sqrt(2))


def test_a_sparse_cadence_has_none_from_the_start():
    assert enabled(*[MAX_ROUND_BATCHES + 1] * 2).value == 1.0


@pytest.mark.parametrize(
    "settings", [{"policy": ApplyPolicy.SYNC}, {"auto_lr": False}, {"granted": True}]
)
def test_sync_a_number_and_clusters_have_none(settings):
    factor = enabled(5, 5, **settings)
    assert (factor.value, factor.current) == (1.0, None)


def test_optimizers_that_follow_the_scale_of_the_gradient_have_none():
    factor = LrFactor(config())
    factor.enable(())
    factor.update([5, 5])
    assert (factor.value, factor.current) == (1.0, None)


def test_the_factor_is_logged_at_the_start_and_after_a_death_in_words(caplog):
    with caplog.at_level(logging.INFO):
        factor = enabled(5, 5, 5)
        then(factor, 5, 5, 6), then(factor, 5, 5, 20), then(factor, 5, 20, 0)
    first, last = (record.getMessage() for record in caplog.records)
    assert first == (
        'lr_scale_ratio("auto"): the learning rate of Adam is multiplied by 1.73 from now on '
        "(workers with 33 %, 33 %, 33 % of the batches)"
    )
    assert last.endswith("by 0.849 from now on (workers with 20 %, 80 % of the batches)")


@pytest.mark.parametrize("kind", [m.RequestParams, m.SyncNow])
def test_every_rank_receives_the_factor_with_the_average(kind):
    backend = AverageBackend.CPU if kind is m.RequestParams else AverageBackend.THREAD
    run = Run(ready=False, auto_lr=True, backend=backend)
    for rank in range(2):
        run.handle(m.Ready(rank=rank, scale_invariant=("Adam",)))
    first = [msg.budget.lr_factor for msg in run.to(m.Resume)]
    assert first == pytest.approx([math.sqrt(2)] * 2)
    for _ in range(2):
        run.end_plan(0), run.end_plan(1)
    if kind is m.RequestParams:
        run.snapshot(0, 1), run.snapshot(1, 1)
        run.handle(m.Averaged(round=1, average=m.Payload(params=()), num_samples=2))
    sent = run.to(m.Update if kind is m.RequestParams else m.SyncNow)
    assert [msg.budget.lr_factor for msg in sent] == pytest.approx([math.sqrt(2)] * 2)


def test_the_last_rank_receives_its_factor():
    run = Run(ready=False, auto_lr=True, continue_on_failure=True)
    for rank in range(2):
        run.handle(m.Ready(rank=rank, scale_invariant=("Adam",)))
    run.handle(m.Failed(rank=1, epoch=0, step=0, error=RuntimeError("planted")))
    last = run.to(m.Resume, 0)[-1]
    assert last.alone
    assert last.budget.lr_factor == pytest.approx(1 / math.sqrt(2))
