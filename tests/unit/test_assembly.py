"""What the coordinator is told of the settings."""

from __future__ import annotations

import pytest
import torch

from coordinator.config import AverageBackend
from runtime.config import TrainConfig
from runtime.run import coordinator_config, worker_config
from tests.support.running import count_up, counter, plain_sgd


def config_of(**settings):
    return TrainConfig(
        model_factory=counter,
        optim_factory=plain_sgd,
        train_fn=count_up,
        batch_size=1,
        num_epochs=1,
        **settings,
    )


def told(**settings):
    """The coordinator's settings for a run with these, which are checked first."""
    config = config_of(**settings)
    config.check(num_samples=10, devices=[torch.device("cpu")] * 2)
    return coordinator_config(
        config, devices=("cpu",) * 2, num_samples=10, backend=AverageBackend.CPU, grace_s=1.0
    )


@pytest.mark.parametrize(
    ("settings", "start", "floor"),
    [
        ({}, 10, 5),
        ({"anchor": 7}, 7, 7),  # what was asked for is kept
        ({"anchor": 1}, 1, 1),
        ({"anchor": 7, "min_anchor": 3}, 7, 3),
        ({"min_anchor": 4}, 10, 4),
        ({"min_anchor": 20}, 20, 20),
        ({"max_anchor": 3}, 3, 3),
        ({"max_anchor": 1}, 1, 1),
        ({"anchor": 7, "max_anchor": 7}, 7, 7),
    ],
)
def test_the_anchor_starts_and_ends_where_the_settings_say(settings, start, floor):
    config = told(**settings)
    assert (config.anchor, config.min_anchor) == (start, floor)


@pytest.mark.parametrize(
    ("num_ranks", "interval_s"), [(1, 0.1), (2, 0.1), (8, 0.4), (10, 0.5), (64, 0.5)]
)
def test_more_ranks_report_more_rarely_but_within_half_a_second(num_ranks, interval_s):
    devices = [torch.device("cpu")] * num_ranks
    worker = worker_config(config_of(), rank=0, devices=devices, num_samples=10)
    assert worker.report_interval_s == pytest.approx(interval_s)
