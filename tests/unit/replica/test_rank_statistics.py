"""Warnings of buffers and gradients that depend on the samples of one rank."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from runtime import DataParallelCoordinator
from tests.support.fsdp_ranks import SHARDED, on_ranks, wrap
from tests.support.own_loop import on_cpus
from tests.support.running import CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, builder

INDICES = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3])
SCALED = nn.Sequential(nn.Embedding(4, 3, scale_grad_by_freq=True))
WARNING = "scale_grad_by_freq=True"


def sgd(params):
    return torch.optim.SGD(params, 0.1)


def loss_of(model, batch):
    return model(batch[0]).square().mean()


def train_run(num_ranks, way=(SYNC, THREAD)):
    made = builder(
        model=lambda device: copy.deepcopy(SCALED),
        optim=sgd,
        train=loss_of,
        dataset=(INDICES,),
        batch_size=2,
        ranks=num_ranks,
        way=way,
    )
    made.run().join(WAIT_S)


def train_loop(num_ranks):
    with on_cpus(copy.deepcopy(SCALED), num_ranks, sgd) as model:
        model(INDICES).square().mean().backward()
        model.step()


def train_shards(num_ranks):
    def rank(end):
        wrap(end, SHARDED[0], copy.deepcopy(SCALED))

    on_ranks(num_ranks, rank)


def train_batches(num_ranks):
    places = ["cpu"] * num_ranks
    with DataParallelCoordinator(copy.deepcopy(SCALED), sgd, loss_of, places) as coordinator:
        coordinator.train_batch((INDICES,))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("train", [train_run, train_loop, train_shards, train_batches])
def test_gradients_by_the_counts_of_a_rank_are_reported_once(train, num_ranks, caplog):
    train(num_ranks)
    assert caplog.text.count(WARNING) == (num_ranks > 1)
    if num_ranks > 1:
        assert "Embedding '0' has" in caplog.text


def test_workers_that_step_for_themselves_use_the_counts_of_their_batches(caplog):
    train_run(2, (CADENCE, OVER_CPU))
    assert WARNING not in caplog.text
