"""Settings of a run as the coordinator and the workers receive them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from coordinator.config import ApplyPolicy, AverageBackend
from runtime.settings import RunSettings
from tests.support.running import builder, count_up, counter, plain_sgd


def settings_of(**settings):
    functions = {"model_factory": counter, "optim_factory": plain_sgd, "train_fn": count_up}
    return RunSettings(**functions | {"batch_size": 1, "num_epochs": 1} | settings)


def built(num_ranks=2, **settings):
    """The configurations of a run with these values, which are checked."""
    checked, devices = settings_of(**settings), [torch.device("cpu")] * num_ranks
    checked.check(num_samples=10, devices=devices)
    return checked.resolve(devices, 10, AverageBackend.CPU)


@pytest.mark.parametrize(
    ("settings", "start", "floor"),
    [
        ({}, 10, 2),
        ({"policy": ApplyPolicy.ASYNC}, 10, 5),
        ({"anchor": 7}, 7, 7),  # the requested anchor is kept
        ({"anchor": 1}, 1, 1),
        ({"anchor": 7, "min_anchor": 3}, 7, 3),
        ({"min_anchor": 4}, 10, 4),
        ({"min_anchor": 20}, 20, 20),
        ({"max_anchor": 3}, 3, 2),
        ({"max_anchor": 1}, 1, 1),
        ({"anchor": 7, "max_anchor": 7}, 7, 7),
    ],
)
def test_the_settings_determine_the_anchor_and_its_lower_limit(settings, start, floor):
    config = built(**settings).coordinator
    assert (config.anchor, config.min_anchor) == (start, floor)


@pytest.mark.parametrize(
    ("num_ranks", "interval_s"), [(1, 0.1), (2, 0.1), (8, 0.4), (10, 0.5), (64, 0.5)]
)
def test_more_ranks_report_more_rarely_but_within_half_a_second(num_ranks, interval_s):
    assert built(num_ranks).worker.report_interval_s == pytest.approx(interval_s)


def test_a_setting_reaches_every_part_that_has_a_field_of_its_name():
    """But for those that :meth:`RunSettings.resolve` derives from several."""
    values = {"batch_size": 3, "accumulate": 2, "seed": 5, "cuda_graphs": True, "prefetch": 4}
    values |= {"policy": ApplyPolicy.CADENCE, "metrics_every": 7, "collective_timeout_s": 8.0}
    values |= {"max_anchor": 90, "ema": 0.5, "resident": False, "stall_timeout_s": 9.0}
    config = built(**values)
    parts = [config.coordinator, config.worker, config.data]
    for name, value in values.items():
        found = [getattr(part, name) for part in parts if hasattr(part, name)]
        assert found == [value] * len(found) != [], name
    assert config.worker.num_samples == config.coordinator.num_samples == 10
    assert built(loader_workers=3).coordinator.read_ahead == 3


CADENCE = {"policy": ApplyPolicy.CADENCE}


@pytest.mark.parametrize(
    ("settings", "unit", "of_ranks", "of_workers", "loaded", "accumulated"),
    [
        ({"batch_size": 4}, 4, None, None, 4, (1, 1)),
        ({"batch_size": 4, "accumulate": 2}, 4, None, None, 4, (2, 1)),
        ({"batch_size": 5, "batch_sizes": (6, 4)}, 5, (6, 4), (6, 4), 5, (1, 1)),
        ({"batch_size": 5, "batch_sizes": (6, 4), **CADENCE}, 2, (6, 4), (6, 4), 6, (1, 1)),
        ({"batch_size": 4, "partition_ratios": (3.0, 1.0)}, 4, (6, 2), (6, 2), 4, (1, 1)),
        ({"batch_size": 4, "partition_ratios": (3.0, 1.0), **CADENCE}, 4, None, None, 4, (1, 1)),
        ({"global_batch_size": 7}, 7, None, (4, 3), 4, (1, 1)),
        ({"global_batch_size": 10, "accumulate": 2}, 10, None, (3, 2), 3, (1, 2)),
        ({"global_batch_size": 8, "partition_ratios": (3.0, 1.0)}, 8, (6, 2), (6, 2), 4, (1, 1)),
        ({"global_batch_size": 10, **CADENCE}, 5, None, None, 5, (1, 1)),
        ({"global_batch_size": 9, **CADENCE}, 1, (5, 4), (5, 4), 5, (1, 1)),
        ({"global_batch_size": 8, "accumulate": 2, **CADENCE}, 2, None, None, 2, (2, 1)),
    ],
)
def test_the_settings_determine_the_sizes_of_batches(
    settings, unit, of_ranks, of_workers, loaded, accumulated
):
    config = built(**settings)
    c, w, d = config.coordinator, config.worker, config.data
    assert (c.batch_size, w.batch_size, d.batch_size) == (unit, unit, loaded)
    assert (c.batch_sizes, w.batch_sizes) == (of_ranks, of_workers)
    assert (w.accumulate, w.num_micro_batches) == accumulated
    assert d.accumulate == settings.get("accumulate", 1)


@pytest.mark.parametrize(
    ("settings", "num_ranks", "automatic"),
    [
        ({"policy": ApplyPolicy.CADENCE}, 2, True),
        ({"policy": ApplyPolicy.ASYNC}, 2, True),
        ({"policy": ApplyPolicy.CADENCE}, 1, False),
        ({"policy": ApplyPolicy.SYNC}, 2, False),
        ({"policy": ApplyPolicy.CADENCE, "lr_scale_ratio": 0.0}, 2, False),
    ],
)
def test_policies_that_average_parameters_have_an_automatic_learning_rate(
    settings, num_ranks, automatic
):
    config = built(num_ranks, **settings)
    assert (config.coordinator.auto_lr, config.worker.auto_lr) == (automatic, automatic)
    assert config.worker.lr_scale == 1.0


def test_every_setting_of_the_builder_reaches_a_run():
    """Fails if the value of a builder method does not reach the configuration."""
    b = builder(ranks=2).anchor(7).max_anchor(9).overhead_target(0.2).max_batch_diff(3)
    b = b.max_steps(50).max_failed_rounds(2).snapshot_timeout(1).collective_timeout(2)
    b = b.stall_timeout(3).on_worker_failure("continue").vram_fraction(0.5).loader_workers(0)
    settings = b.max_grad_norm(4).drop_last(True)._settings
    config = settings.resolve(settings.devices, 10, AverageBackend.CPU)
    c, w = config.coordinator, config.worker
    assert (c.max_anchor, c.overhead_target, c.max_batch_diff, c.max_steps) == (9, 0.2, 3, 50)
    assert (c.max_failed_rounds, c.snapshot_timeout_s, c.collective_timeout_s) == (2, 1, 2)
    assert (c.stall_timeout_s, c.continue_on_failure, c.drop_last) == (3, True, True)
    assert (w.survives, w.max_grad_norm, config.data.vram_fraction) == (True, 4, 0.5)


def gpu(name="H100", major=9, minor=0, memory_gib=80.0):
    memory = int(memory_gib * 2**30)
    return SimpleNamespace(name=name, major=major, minor=minor, total_memory=memory)


@pytest.mark.parametrize(
    ("gpus", "differ"),
    [
        ([gpu(), gpu()], False),
        ([gpu(), gpu(memory_gib=80.2)], False),
        ([gpu(), gpu(name="A100", major=8)], True),
        ([gpu(), gpu(minor=1)], True),
        ([gpu(), gpu(memory_gib=40)], True),
        ([gpu(), None], True),
        ([None, None], False),
    ],
)
def test_shares_are_measured_by_default_where_devices_are_of_different_kinds(
    monkeypatch, gpus, differ
):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: gpus[d.index])
    names = ["cpu" if found is None else f"cuda:{i}" for i, found in enumerate(gpus)]
    devices = [torch.device(name) for name in names]

    def balance(**settings):
        chosen = settings_of(**settings)
        config = chosen.resolve(devices, 10, AverageBackend.THREAD)
        assert config.worker.balance is config.coordinator.balance
        return config.coordinator.balance, chosen.advises_balance(devices)

    assert balance(policy=ApplyPolicy.SYNC) == (differ, not differ)
    for asked in (True, False):
        assert balance(policy=ApplyPolicy.SYNC, balance=asked) == (asked, False)
    ratios = {"partition_ratios": (1.0, 2.0), "batch_size": 4, "policy": ApplyPolicy.SYNC}
    assert balance(**ratios) == (False, False)
    made = settings_of(**ratios).resolve(devices, 10, AverageBackend.THREAD).coordinator
    assert (made.batch_sizes, made.partition_ratios) == ((3, 5), None)
    assert not balance(policy=ApplyPolicy.CADENCE)[0]


def test_ranks_that_share_a_gpu_are_not_advised_to_balance(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: gpu())
    for names, advised in ((["cuda:0"] * 2, False), (["cuda:0", "cuda:1"], True)):
        devices = [torch.device(name) for name in names]
        settings = settings_of(policy=ApplyPolicy.SYNC)
        assert settings.advises_balance(devices) is advised
