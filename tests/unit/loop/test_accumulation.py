"""Several batches per device between two reductions."""

from __future__ import annotations

import math
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runtime import DdpConfig, ReplicaFailed, Trainer
from runtime.device import timing
from runtime.loop.accumulation import AccumulationSchedule, reduction_seconds, rounds
from tests.support.own_loop import (
    OneDevice,
    adamw,
    assert_close,
    assert_identical,
    exchanging_gradients,
    loss_fn,
    make_batch,
    make_net,
    mean_step,
    on_cpus,
    sgd,
    train_step,
)
from tests.support.pairs import pairwise


def weighted_reference(alone, batches, counts, max_norm=None):
    """Each rank's accumulated gradient clipped, divided by its count, averaged by count."""
    params = list(alone.model.parameters())
    total = [torch.zeros_like(p) for p in params]
    start = 0
    for count in counts:
        alone.model.zero_grad()
        for batch in batches[start : start + count]:
            loss_fn(alone.model, batch).backward()
        start += count
        if not count:
            continue
        if max_norm is not None:
            nn.utils.clip_grad_norm_(params, max_norm)
        for sum_, p in zip(total, params, strict=True):
            sum_ += p.grad / count * (count / sum(counts))
    for sum_, p in zip(total, params, strict=True):
        p.grad = sum_
    alone.step()


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("optim", [sgd, adamw])
def test_a_round_is_the_weighted_mean_of_accumulated_gradients(optim, max_norm):
    net = make_net()
    alone = OneDevice(net, optim)
    config = DdpConfig(speed_hint=(1, 2.0), max_anchor=2, max_grad_norm=max_norm)
    with on_cpus(net, 3, optim, config) as model:
        assert model.batch_counts == (4, 2, 4)
        loader = [make_batch(5) for _ in range(10)]
        (batches,) = model.rounds(loader)
        losses = model.accumulate(loss_fn, batches)
        expected = torch.stack([loss_fn(alone.model, b) for b in loader])
        assert torch.allclose(losses, expected, rtol=1e-12)
        assert not losses.requires_grad
        model.step()
        weighted_reference(alone, loader, (4, 2, 4), max_norm)
        assert_identical(model)
        assert_close(model, alone.model)


@pytest.mark.parametrize(
    ("hint", "anchor", "counts", "calls"),
    [
        ((0, 3.0), 1, (1, 3), [4]),
        ((1, 2.0), 4, (8, 4), [1]),  # a short round is divided in proportion,
        ((1, 2.0), 4, (8, 4), [3]),  # and idle devices have weight zero
        ((1, 2.0), 4, (8, 4), [5]),
        (None, 1, (1, 1), [2, 2, 2]),
    ],
)
def test_without_clipping_a_round_equals_the_mean_over_its_batches(hint, anchor, counts, calls):
    net = make_net()
    alone = OneDevice(net, adamw)
    with on_cpus(net, 2, adamw, DdpConfig(speed_hint=hint, max_anchor=anchor)) as model:
        assert model.batch_counts == counts
        batches = []
        for num_batches in calls:
            batches += [make_batch(5) for _ in range(num_batches)]
            model.accumulate(loss_fn, batches[-num_batches:])
        model.step()
        mean_step(alone, batches)
        assert_identical(model)
        assert_close(model, alone.model)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_loop_is_the_same_on_one_device(num_devices):
    """One batch per device and step, as in a plain loop."""
    net = make_net()
    alone = OneDevice(net)
    loader = [make_batch(5) for _ in range(6)]
    with on_cpus(net, num_devices) as model:
        assert model.batch_counts == (1,) * num_devices
        for batches in model.rounds(loader):
            assert len(batches) == num_devices
            model.accumulate(loss_fn, batches)
            model.step()
            mean_step(alone, batches)
        assert_identical(model)
        assert_close(model, alone.model)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_round_on_one_device_is_clipped_and_divided_too(num_devices):
    net = make_net()
    alone = OneDevice(net)
    config = DdpConfig(max_grad_norm=0.1, max_anchor=0)
    batches = [make_batch(5) for _ in range(4)]
    with on_cpus(net, num_devices, config=config) as model:
        model.accumulate(loss_fn, batches)
        model.step()
    counts = (4,) if num_devices == 1 else (2, 2)
    weighted_reference(alone, batches, counts, 0.1)
    assert_close(net, alone.model)


# -- several calls of step() share a reduction ---------------------------------------------


def config_with_anchor(anchor, **settings):
    """Reductions at every ``anchor``-th step, independent of their cost."""
    return DdpConfig(max_anchor=anchor, overhead_target=0.5, **settings)


@pairwise(how=["directly", "meeting", "copies"], max_norm=[None, 0.1], num_devices=[1, 2, 3])
def test_with_max_anchor_several_steps_of_a_plain_loop_share_a_reduction(
    how, max_norm, num_devices
):
    net = make_net()
    alone = OneDevice(net, adamw)
    batches = [make_batch(n) for n in (7, 5, 7, 7, 1, 7, 7, 7)]
    anchor = 3 if num_devices > 1 else 1
    config = config_with_anchor(3, max_grad_norm=max_norm)
    with exchanging_gradients(how), on_cpus(net, num_devices, adamw, config) as model:
        assert min(model.batch_counts) == anchor
        taken = []
        for at, (x, y) in enumerate(batches, 1):
            taken.append((x, y))
            before = [p.detach().clone() for p in model.parameters()]
            model.optimizer.zero_grad()  # as in most loops; stashed gradients are kept
            F.cross_entropy(model(x), y).backward()
            last = at == len(batches)
            model.step(reduce=True if last else None)
            if at % anchor and not last:
                assert all(map(torch.equal, before, model.parameters()))
                continue
            mean_step(alone, taken, max_norm)
            taken = []
            assert_identical(model)
            assert_close(model, alone.model)


@pytest.mark.parametrize("how", ["directly", "meeting", "copies"])
def test_weighted_steps_share_a_reduction_by_their_weights(how):
    net = make_net()
    alone = OneDevice(net)
    weights = [3.0, 0.0, torch.tensor(5.0, dtype=torch.float64)]
    batches = [make_batch(7) for _ in weights]
    with exchanging_gradients(how), on_cpus(net, 2, config=config_with_anchor(3)) as model:
        for (x, y), weight in zip(batches, weights, strict=True):
            (F.cross_entropy(model(x), y) * weight).backward()
            model.step(weight=weight)
        total = sum(loss_fn(alone.model, b) * w for b, w in zip(batches, weights, strict=True))
        (total / 8).backward()
        alone.step()
        assert_close(model, alone.model)
        loss_fn(model, batches[0]).backward()
        model.step(weight=2.0)
        loss_fn(model, batches[0]).backward()
        with pytest.raises(ValueError, match="for all of them"):
            model.step()


def test_a_failed_reduction_of_several_steps_clears_all_gradients(monkeypatch):
    net = make_net()
    alone = OneDevice(net)
    with on_cpus(net, 2, config=config_with_anchor(2)) as model:
        loss_fn(model, make_batch(6)).backward()
        model.step()
        loss_fn(model, make_batch(6)).backward()
        with monkeypatch.context() as patch:
            patch.setattr(model.optimizer, "step", None)
            with pytest.raises(TypeError):
                model.step()
        model.sync_params()
        alone.model.load_state_dict(model.state_dict())
        batches = [make_batch(6) for _ in range(2)]
        for batch in batches:
            loss_fn(model, batch).backward()
            model.step()
        mean_step(alone, batches)
        assert_identical(model)
        assert_close(model, alone.model)


def test_a_sparse_gradient_cannot_be_stashed_and_all_gradients_are_cleared():
    net = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
    with on_cpus(net, 2, config=config_with_anchor(2)) as model:
        model(torch.randint(9, (6, 2))).sum().backward()
        with pytest.raises(ValueError, match=r"'0\.weight' has a sparse gradient"):
            model.step()
        assert all(p.grad is None for replica in model.replicas for p in replica.parameters())


def test_operations_on_the_whole_gradient_are_refused_while_steps_share_a_reduction():
    with on_cpus(make_net(), 2, config=config_with_anchor(2)) as model:
        loss_fn(model, make_batch(6)).backward()
        with pytest.raises(RuntimeError, match="DdpConfig\\(max_grad_norm"):
            model.clip_grad_norm_(1.0)
        model.step()
        with pytest.raises(RuntimeError, match="cannot share a step"):
            model.accumulate(loss_fn, [make_batch(6)])
        model.step(reduce=True)
        model.accumulate(loss_fn, [make_batch(6)] * 2)
        model.step()
        assert_identical(model)


def test_steps_not_reduced_at_close_are_logged(caplog):
    for last in (None, True):
        with on_cpus(make_net(), 2, config=config_with_anchor(2)) as model:
            for at in range(3):
                loss_fn(model, make_batch(6)).backward()
                model.step(reduce=last if at == 2 else None)
        warnings = [r.getMessage() for r in caplog.records if "step(reduce=True)" in r.getMessage()]
        assert len(warnings) == 1
        assert "the last 1 steps were never reduced" in warnings[0]


@pytest.mark.parametrize("how", ["directly", "meeting", "copies"])
def test_the_anchor_of_a_plain_loop_follows_the_cost_of_reductions(how, monkeypatch):
    given = []
    report = AccumulationSchedule.report
    monkeypatch.setattr(
        AccumulationSchedule, "report", lambda *args: given.append(args[1:]) or report(*args)
    )
    with exchanging_gradients(how), on_cpus(make_net(), 2, config=config_with_anchor(2)) as model:
        for _ in range(4):
            loss_fn(model, make_batch(6)).backward()
            model.step()
    assert len(given) == 2
    for times, sync_s in given:
        assert [count for _, count in times] == [2, 2]
        assert all(seconds > 0 for seconds, _ in times)
        assert sync_s > 0


@pytest.fixture
def slow_rank_1(monkeypatch):
    """Rank 1's clock advances ten times as much between two readings."""
    now = Counter()

    def perf_counter():
        thread = threading.current_thread().name
        now[thread] += 10 if thread.endswith("-1") else 1
        return now[thread] / 1000

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=perf_counter))


def test_measured_speeds_correct_the_counts_and_ratios_after_the_first_reduction(slow_rank_1):
    config = DdpConfig(speed_hint=(0, 4.0), max_anchor=1)  # names the fast rank
    with on_cpus(make_net(), 2, config=config) as model:
        assert model.batch_counts == (1, 4)
        assert model.chunk_ratios == (0.2, 0.8)
        model.accumulate(loss_fn, [make_batch(5) for _ in range(5)])
        model.step()
        assert model.batch_counts[1] == 1
        assert model.batch_counts[0] > 2
        assert model.chunk_ratios[0] > 0.7


def test_without_elche_counts_stay_one(slow_rank_1):
    with on_cpus(make_net(), 2, config=DdpConfig(max_anchor=0)) as model:
        model.accumulate(loss_fn, [make_batch(5)] * 2)
        model.step()
        assert model.batch_counts == (1, 1)


def test_setup_runs_elche_for_unequal_gpus_only():
    with on_cpus(make_net(), 2) as model:
        assert model.batch_counts == (1, 1)
    with on_cpus(make_net(), 2, config=DdpConfig()) as model:
        assert model.batch_counts == (10, 10)


def test_the_anchor_is_capped_and_fitted_to_the_overhead():
    accumulation = AccumulationSchedule.of(
        2, DdpConfig(max_anchor=16, overhead_target=0.5), use_el_che=True
    )
    assert accumulation.batch_counts == (10, 10)
    for _ in range(5):
        shares = accumulation.report([(1.0, 10), (2.0, 10)], sync_s=100.0)
    assert shares == pytest.approx((2 / 3, 1 / 3))
    assert accumulation.batch_counts == (32, 16)
    assert AccumulationSchedule.of(2, DdpConfig(max_anchor=3), use_el_che=True).batch_counts == (
        3,
        3,
    )
    assert AccumulationSchedule.of(1, DdpConfig(), use_el_che=True).batch_counts == (1,)


def test_missing_measurements_change_nothing():
    """On a GPU timings are available some steps later."""
    accumulation = AccumulationSchedule.of(2, DdpConfig(), use_el_che=True)
    assert accumulation.report([(0.0, 0), (1.0, 10)], sync_s=math.nan) is None
    assert accumulation.batch_counts == (10, 10)
    assert math.isnan(reduction_seconds([(0.0, 0), (0.0, 0)]))
    assert reduction_seconds([(0.5, 1), (0.0, 0), (0.2, 1)]) == 0.2


def test_rounds_read_the_batch_counts_for_each_list():
    counts = [(1, 2)]
    found = []
    for given in rounds(range(10), lambda: counts[-1]):
        found.append(given)
        counts.append((2, 2))
    assert found == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9]]


# -- errors ------------------------------------------------------------------------


def bad_loss(value):
    return lambda module, batch: value


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (bad_loss(1.0), "return the batch's mean loss"),
        (lambda m, b: m(b[0]), "scalar"),
        (bad_loss(torch.tensor(1.0)), "without a gradient"),
    ],
)
def test_invalid_losses_are_refused_and_the_module_stays_usable(bad, match, num_devices):
    with on_cpus(make_net(), num_devices) as model:
        error = ReplicaFailed if num_devices > 1 else (TypeError, ValueError)
        with pytest.raises(error, match=match):
            model.accumulate(bad, [make_batch(4)] * 2)
        train_step(model, *make_batch(4))
        assert_identical(model)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_bad_arguments_are_refused(num_devices):
    with on_cpus(make_net(), num_devices) as model:
        with pytest.raises(TypeError, match="loss_fn must be a function"):
            model.accumulate(3, [])
        with pytest.raises(TypeError, match="list of batches"):
            model.accumulate(loss_fn, torch.zeros(3))
        with torch.no_grad(), pytest.raises(RuntimeError, match="no_grad"):
            model.accumulate(loss_fn, [make_batch(4)])
        assert model.accumulate(loss_fn, []).shape == (0,)
        model.step()


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"speed_hint": 3}, TypeError, "slow rank, ratio"),
        ({"speed_hint": (0, 0.5)}, ValueError, "at least 1"),
        ({"speed_hint": (-1, 2.0)}, ValueError, "at least 0"),
        ({"speed_hint": (0, "fast")}, TypeError, "pass a number"),
        ({"overhead_target": 0.6}, ValueError, "0.5"),
        ({"max_anchor": -1}, ValueError, "at least 0"),
        ({"max_anchor": 1.5}, TypeError, "whole number"),
        ({"max_grad_norm": 0.0}, ValueError, "above 0"),
        ({"timeline": object()}, TypeError, r"pass a gpuworker\.Timeline\(\)"),
        ({"whole": "bank"}, TypeError, r'pass names of inputs, whole=\["bank"\]'),
        ({"whole": [1.5]}, TypeError, r'pass names of inputs, whole=\["bank"\]'),
    ],
)
def test_settings_out_of_range_are_refused(kwargs, error, match):
    with pytest.raises(error, match=match):
        DdpConfig(**kwargs)


def test_a_hint_for_a_rank_that_does_not_exist_is_refused():
    config = DdpConfig(speed_hint=(2, 2.0))
    with pytest.raises(ValueError, match="no rank 2 of 2"):
        Trainer.setup_with(make_net(), sgd, ["cpu"] * 2, config=config)
    with pytest.raises(TypeError, match="DdpConfig"):
        Trainer.setup_with(make_net(), sgd, ["cpu"], config={"max_anchor": 1})


@pytest.mark.parametrize(("devices", "max_anchor"), [(2, None), (2, 0), (2, 1), (1, 2)])
def test_a_plain_loop_reduces_at_every_step_without_max_anchor(devices, max_anchor):
    with on_cpus(make_net(), devices, config=DdpConfig(max_anchor=max_anchor)) as model:
        before = [p.detach().clone() for p in model.parameters()]
        loss_fn(model, make_batch(6)).backward()
        model.step()
        assert not any(map(torch.equal, before, model.parameters()))
