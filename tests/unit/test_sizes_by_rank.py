"""A batch size for each device, under CADENCE and ASYNC."""

from __future__ import annotations

import copy
import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from runtime import AverageBackend, CheckpointError, StepMetrics, Timeline, Trainer
from tests.support.running import ASYNC, CADENCE, OVER_CPU, THREAD, WAIT_S, Seen, Stream, builder

N, EPOCHS = 203, 2
SIZES = 12, 8
WAYS = [(CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, OVER_CPU), (ASYNC, AverageBackend.GLOO)]


class Indexed(Dataset):
    """Sample numbers by index, for loader processes."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return (torch.tensor(index),)


def run(seen, sizes, way, dataset=None, **more):
    b = builder(
        model=lambda device: nn.Linear(1, 1),
        train=seen,
        dataset=(torch.arange(N),) if dataset is None else dataset,
        batch_size=list(sizes),
        epochs=EPOCHS,
        ranks=len(sizes),
        way=way,
    )
    for name, value in more.items():
        getattr(b, name)(value)
    return b.run()


def trained(*traces):
    return Counter((e, i) for t in traces for _, e, batch in t.batches for i in batch)


EACH_ONCE = Counter({(epoch, i): 1 for epoch in range(EPOCHS) for i in range(N)})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("more", [{}, {"accumulate": 3}, {"partition_ratios": (1, 2)}])
def test_each_rank_has_batches_of_its_size_and_each_sample_comes_once(way, more):
    seen = Seen()
    check(run(seen, SIZES, way, **more), seen)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("more", [{}, {"accumulate": 3}])
def test_a_stream_is_handed_out_in_batches_of_each_ranks_size(way, more):
    seen = Seen()
    check(run(seen, SIZES, way, Stream(N), **more), seen)


def test_loader_processes_give_batches_of_each_ranks_size():
    seen = Seen()
    check(run(seen, SIZES, WAYS[0], Indexed(), loader_workers=1), seen)


@pytest.mark.parametrize("way", WAYS)
def test_metrics_of_steps_count_batches_of_the_mean_size(way):
    """Each contains both ranks' losses, weighted by the samples that they reported."""
    seen, found = Seen(), []
    handle = run(seen, SIZES, way, metrics_every=4, metrics_fn=found.append)
    state = handle.join(WAIT_S)
    steps = [entry for entry in found if isinstance(entry, StepMetrics)]
    nums = [entry.num_batches for entry in steps]
    assert [entry.step for entry in steps] == list(itertools.accumulate(nums))
    assert min(nums) >= 4
    assert 40 - 4 < sum(nums) < 45  # 406 samples; a short batch counts as a whole one
    losses = [entry.avg_loss for entry in steps]
    assert min(losses) <= max(m.avg_loss for m in state.metrics)
    assert max(losses) >= min(m.avg_loss for m in state.metrics)
    assert [entry.epoch for entry in steps] == sorted(entry.epoch for entry in steps)


def test_the_facts_of_a_run_name_the_sizes():
    timeline = Timeline()
    run(Seen(), SIZES, WAYS[0], timeline=timeline).join(WAIT_S)
    facts = timeline.summary().facts
    assert (facts.batch_size, facts.batch_sizes) == (10, SIZES)


def check(handle, seen, sizes=SIZES):
    state = handle.join(WAIT_S)
    assert trained(seen) == EACH_ONCE
    assert [m.num_samples for m in state.metrics] == [N] * EPOCHS
    for epoch in range(EPOCHS):
        for rank, size in enumerate(sizes):
            own = [len(batch) for r, e, batch in seen.batches if (r, e) == (rank, epoch)]
            assert all(n <= size for n in own)
            assert sum(n < size for n in own) <= 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dataset", [None, Stream(N)], ids=["indexed", "stream"])
def test_a_death_loses_nothing(way, dataset):
    seen = Seen(fails_at=3)
    state = run(seen, (12, 8, 4), way, dataset, on_worker_failure="continue").join(WAIT_S)
    assert trained(seen).keys() == EACH_ONCE.keys()
    assert [m.num_samples for m in state.metrics] == [N] * EPOCHS


@pytest.mark.parametrize("then", [(12, 8), (8, 4, 12), (4,)])
def test_a_resumed_run_continues_at_its_position(tmp_path, then):
    first, again = Seen(), Seen()
    run(first, (12, 8), WAYS[0], max_steps=13, checkpoint_dir=tmp_path).join(WAIT_S)
    assert sum(len(batch) for *_, batch in first.batches) == 13 * 10 + 2  # whole units of 4
    state = run(again, then, WAYS[0], resume=tmp_path).join(WAIT_S)
    assert trained(first, again) == EACH_ONCE
    assert [m.num_samples for m in state.metrics] == [N] * EPOCHS


def test_sizes_of_another_unit_are_refused(tmp_path):
    run(Seen(), (12, 8), WAYS[0], max_steps=3, checkpoint_dir=tmp_path).join(WAIT_S)
    with pytest.raises(CheckpointError, match="batch_size 4, this run has 3"):
        run(Seen(), (12, 9), WAYS[0], resume=tmp_path)


def test_schedules_and_progress_count_batches_of_the_mean_size():
    def halving(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)

    handle = run(Seen(), (12, 8), WAYS[0], scheduler=halving)
    handle.join(WAIT_S)
    assert handle.statistics().global_step == 41  # 2 x 51 units of 4 samples, in tens


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("setting", [{"batch_size": [3, 5]}, {"global_batch_size": 7}], ids=str)
def test_no_rank_trains_a_single_sample_where_batch_statistics_are_used(way, setting):
    """A whole first batch of rank 0 would leave one sample to rank 1."""
    model, sizes = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), []
    num = 4 if "batch_size" in setting else 5

    def train(model, batch):
        sizes.append(len(batch[0]))
        return model(batch[0]).square().mean()

    b = Trainer.builder(
        lambda device: copy.deepcopy(model), lambda p: torch.optim.SGD(p, 0.01), train
    )
    b.dataset((torch.randn(num, 2),)).num_epochs(EPOCHS).devices(["cpu"] * 2)
    b.policy(way[0]).backend(way[1]).progress(False).tune_allocator(False)
    for name, value in setting.items():
        getattr(b, name)(value)
    state = b.run().join(WAIT_S)
    assert [m.num_samples for m in state.metrics] == [num] * EPOCHS
    assert min(sizes) >= 2
