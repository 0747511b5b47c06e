"""Steps as graphs, on a fake that records PyTorch's operations and repeats them."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from torch import nn

from coordinator.shares import Shares
from runtime import current_worker, record_scalar
from runtime.replica.graphs import MAX_SIZES
from tests.support.graphing import (
    DATA,
    a_run,
    adamw,
    assert_equal_runs,
    assert_graphs_change_nothing,
    capturable_on_cpu,
    loss_of,
    posing,
    sgd,
    train,
)
from tests.support.pairs import SCALE
from tests.support.running import SYNC, THREAD, local_ways

__all__ = ["capturable_on_cpu", "posing"]  # fixtures


# -- captured runs equal eager ones ---------------------------------------------------------


@pytest.mark.parametrize("optim", [adamw, sgd])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_of_a_graph_equal_eager_steps(optim, accumulate, posing):
    def make():
        return a_run(optim=optim).accumulate(accumulate).max_grad_norm(0.5)

    assert_graphs_change_nothing(make)
    windows = 3 * (16 // accumulate)  # each epoch ends with a short batch
    assert posing.num_replays == [windows - 3]


def test_in_lockstep_one_graph_precedes_the_reduction_and_one_follows(posing):
    assert_graphs_change_nothing(lambda: a_run(way=(SYNC, THREAD), ranks=2).max_grad_norm(0.5))
    assert len(posing.fake.graphs) == 4
    assert all(n >= 8 for n in posing.num_replays)


@pytest.mark.parametrize("turns", [[(5, 3)], [(5, 3), (6, 2), (3, 5), (4, 4), (2, 6)]])
def test_pieces_of_four_sizes_are_captured(turns, posing, monkeypatch):
    """The first repeated sizes, of which the rank's full batch of 4 is one."""
    dealt = count()

    def sizes(shares, total, ranks):
        return turns[next(dealt) % len(turns)] if total == 8 else (total - total // 2, total // 2)

    def make():
        nonlocal dealt
        dealt = count()
        b = a_run(way=(SYNC, THREAD), ranks=2, dataset=(DATA[:64],), epochs=20 if SCALE > 1 else 6)
        return b.balance(True)

    monkeypatch.setattr(Shares, "sizes", sizes)
    assert_graphs_change_nothing(make)
    assert all(n > 0 for n in posing.num_replays)
    # Two around each reduction, on each of two ranks.
    assert len(posing.fake.graphs) == 4 * min(len(turns), MAX_SIZES)


@local_ways
def test_every_policy_trains_every_sample_with_graphs(way, posing):
    state = train(a_run(way=way, ranks=3, epochs=3).cuda_graphs(True))
    assert [e.num_samples for e in state.metrics] == [66] * 3
    assert state.metrics[-1].avg_loss < state.metrics[0].avg_loss
    assert sum(posing.num_replays) > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_scheduler_changes_the_learning_rate_of_a_graph(ranks, posing):
    def make():
        b = a_run(way=(SYNC, THREAD), ranks=ranks)
        b.scheduler(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 60))
        return b

    assert_graphs_change_nothing(make)
    assert sum(posing.num_replays) > 15


def test_the_workers_generator_advances_with_each_replay(posing):
    def noisy(model, batch):
        draw = torch.rand(1, generator=current_worker().generator, dtype=torch.float64)
        record_scalar("draw", draw)
        return loss_of(model, batch) * draw.sum()

    state = train(a_run(loss=noisy).cuda_graphs(True))
    draws = [e.scalars["draw"] for e in state.metrics]
    assert len(set(draws)) == 3
    assert posing.num_replays == [45]


def test_short_batches_are_trained_without_a_graph(posing):
    train(a_run(epochs=6).cuda_graphs(True))
    assert posing.num_replays == [6 * 16 - 3]


def test_a_rank_that_waits_for_messages_does_not_prevent_a_capture(posing):
    """Rank 1 has no batch in the whole run."""
    state = train(a_run(ranks=2).partition_ratios([1, 0]).cuda_graphs(True))
    assert [e.num_samples for e in state.metrics] == [66] * 3
    assert posing.num_replays == [45]


# -- state used by graphs ------------------------------------------------------------------


def test_a_graph_is_dropped_when_the_state_of_its_optimizer_is_replaced(posing):
    seen = []

    def restart(epoch, worker):
        seen.append(len(posing.fake.graphs))
        if epoch == 1:
            worker.optimizer.load_state_dict(worker.optimizer.state_dict())

    assert_graphs_change_nothing(lambda: a_run(optim=sgd).epoch_fn(restart))
    assert posing.num_replays == [13, 29]


def test_forget_graphs_applies_a_change_made_in_python(posing):
    weight = [1.0]

    def weighted(model, batch):
        return loss_of(model, batch) * weight[0]

    def heavier(epoch, worker):
        weight[0] = 1.0 + epoch
        worker.forget_graphs()

    assert_graphs_change_nothing(lambda: a_run(loss=weighted).epoch_fn(heavier))
    assert posing.num_replays == [13, 13, 13]


def test_steps_that_may_be_dropped_are_checked_between_two_graphs(posing):
    data = DATA.clone()
    data[41] = torch.nan

    def run(flag):
        b = a_run(
            model=lambda d: nn.Sequential(nn.Linear(3, 1)).to(d, torch.float64), dataset=(data,)
        )
        return train(b.on_non_finite("skip").cuda_graphs(flag))

    expected = run(False)
    actual = run(True)
    assert_equal_runs(actual, expected)
    assert [e.num_skipped for e in actual.metrics] == [e.num_skipped for e in expected.metrics]
    assert sum(e.num_skipped for e in actual.metrics) >= 3
    assert posing.num_replays[0] == 45


def test_batches_of_several_shapes_have_a_graph_each(posing):
    lengths = [3, 5]

    class Ragged(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            raise AssertionError("batches are asked for")

        def __getitems__(self, indices):
            length = lengths[indices[0] % 2]
            return [torch.full((length,), float(i), dtype=torch.float64) / 64 for i in indices]

    def loss(model, batch):
        return (model.w * batch).sum(1).square().mean() + model.w.square().sum()

    def make():
        return a_run(model=_one_number, loss=loss, dataset=Ragged(), optim=sgd)

    assert_graphs_change_nothing(make)
    assert len(posing.num_replays) == 2
    assert sum(posing.num_replays) == 48 - 6


def _one_number(device):
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(1, dtype=torch.float64))
    return model.to(device)
