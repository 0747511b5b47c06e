"""The automatic factor of the learning rate: shares, stability, deaths, sparse rounds."""

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


def enabled(world=2, counts=None, **settings):
    """The factor of ranks that are expected to train ``counts`` batches between two rounds."""
    factor = LrFactor(config(world, **settings))
    factor.enable(("Adam",))
    factor.update(range(world), counts or [5] * world)
    return factor


def rounds(factor, *counts, times=1):
    """Record rounds; returns the factor that follows each."""
    found = []
    for _ in range(times):
        factor.record_round(dict(enumerate(counts)))
        factor.update(range(len(counts)), [5] * len(counts))
        found.append(factor.value)
    return found


def expected(*counts):
    k_eff = sum(counts) ** 2 / sum(n**2 for n in counts)
    return math.sqrt(len(counts)) * k_eff / len(counts)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_equal_shares_have_the_root_of_the_number_of_ranks(world):
    assert enabled(world).value == pytest.approx(math.sqrt(world))


def test_the_factor_follows_the_measured_shares():
    factor = enabled()
    assert rounds(factor, 2, 8, times=4)[-1] == pytest.approx(expected(2, 8))


def test_unequal_batches_move_the_average_as_far_as_one_device_with_all_of_them():
    sizes, counts = (4, 12), (6, 2)
    found = enabled(counts=counts, batch_size=4, batch_sizes=sizes).value
    samples = [n * size for n, size in zip(counts, sizes, strict=True)]
    moves = sum(s * n * math.sqrt(b) for s, n, b in zip(samples, counts, sizes, strict=True))
    one_device = sum(samples) / sum(sizes) * math.sqrt(sum(sizes))
    assert found * moves / sum(samples) == pytest.approx(one_device)


def test_the_factor_is_fixed_once_two_measurements_agree():
    factor = enabled()
    first = rounds(factor, 2, 8, times=8)[-1]
    assert rounds(factor, 5, 5, times=40)[-1] == first


def test_a_factor_of_speeds_that_change_is_not_fixed():
    factor = enabled()
    rounds(factor, 1, 9, times=4), rounds(factor, 5, 5, times=4)
    assert rounds(factor, 2, 8, times=4)[-1] == pytest.approx(expected(2, 8))


def test_speeds_that_never_agree_are_measured_a_bounded_number_of_times():
    factor = enabled()
    for i in range(8):
        rounds(factor, *((1, 9) if i % 2 else (5, 5)), times=4)
    fixed = factor.value
    assert rounds(factor, 3, 7, times=40)[-1] == fixed


def test_a_death_lowers_the_factor_and_is_measured_again():
    factor = enabled(3)
    rounds(factor, 5, 5, 5, times=20)
    factor.update((0, 2), [5, 0, 5])
    assert factor.value == pytest.approx(math.sqrt(3) * 2 / 3)
    for _ in range(8):
        factor.record_round({0: 2, 2: 8})
    factor.update((0, 2), [5, 0, 5])
    assert factor.value == pytest.approx(math.sqrt(3) / 3 * expected(2, 8) * math.sqrt(2))


def test_sparse_rounds_have_none_until_they_are_clearly_denser():
    factor, limit = enabled(), MAX_ROUND_BATCHES
    assert rounds(factor, limit, limit) == [pytest.approx(math.sqrt(2))]
    assert rounds(factor, limit + 1, limit + 1) == [1.0]
    assert rounds(factor, limit, limit) == [1.0]
    assert rounds(factor, limit // 2, limit // 2) == [pytest.approx(math.sqrt(2))]


def test_a_sparse_cadence_has_none_from_the_start():
    assert enabled(counts=[MAX_ROUND_BATCHES + 1] * 2).value == 1.0


@pytest.mark.parametrize(
    "settings", [{"policy": ApplyPolicy.SYNC}, {"auto_lr": False}, {"granted": True}]
)
def test_sync_a_number_and_clusters_have_none(settings):
    factor = enabled(**settings)
    assert (factor.value, factor.current) == (1.0, None)


def test_optimizers_that_follow_the_scale_of_the_gradient_have_none():
    factor = LrFactor(config())
    factor.enable(())
    factor.update((0, 1), [5, 5])
    assert (factor.value, factor.current) == (1.0, None)


def test_the_factor_is_logged_once_in_words(caplog):
    with caplog.at_level(logging.INFO):
        rounds(enabled(), 5, 5, times=40)
    (record,) = caplog.records
    assert record.getMessage() == (
        'lr_scale_ratio("auto"): the learning rate of Adam is multiplied by 1.41 from now on '
        "(workers with 50 %, 50 % of the batches)"
    )


def test_a_restored_factor_is_neither_measured_nor_estimated_again():
    before = enabled()
    rounds(before, 2, 8, times=8)
    restored = LrFactor(config())
    restored.load_state_dict(before.state_dict())
    restored.enable(("Adam",))
    restored.update((0, 1), [5, 5])
    assert restored.value == before.value
    assert rounds(restored, 5, 5, times=40)[-1] == before.value


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
