"""Settings taken from the user's DataLoader or sampler."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from runtime import CheckpointError, WorkerFailed
from runtime.data.dataset import adapt_dataset
from runtime.data.epoch_index import EpochIndex, SampledOrder
from tests.support.running import (
    CADENCE,
    LOCAL_WAYS,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    builder,
    count_up,
    local_ways,
    numbers,
)

N = 23


class SampleLog:
    """A ``train_fn`` that records the samples of each batch."""

    def __init__(self):
        self.batches = []

    def __call__(self, model, batch):
        self.batches.append(batch[0].tolist())
        return count_up(model, batch)

    @property
    def samples(self):
        return [sample for batch in self.batches for sample in batch]


def trained(sampler, *, epochs=1, ranks=1, way=(SYNC, THREAD), seed=None, dataset=N):
    """The samples that a run with this sampler trains."""
    seen = SampleLog()
    b = builder(train=seen, dataset=dataset, epochs=epochs, ranks=ranks, way=way).sampler(sampler)
    state = (b if seed is None else b.seed(seed)).run().join(WAIT_S)
    return seen, state


class GlobalSampler(Sampler):
    """Draws from one of the process's global generators."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return N

    def __iter__(self):
        yield from (self.draw() % N for _ in range(N))


DRAWS = {
    "torch": lambda: int(torch.randint(0, 1000, ())),
    "numpy": lambda: int(np.random.randint(0, 1000)),
    "python": lambda: random.randrange(1000),
}


def samplers():
    weights = torch.arange(1, N + 1, dtype=torch.float64)
    return {
        "sequential": lambda: SequentialSampler(range(N)),
        "replacement": lambda: RandomSampler(range(N), replacement=True, num_samples=40),
        "weighted": lambda: WeightedRandomSampler(weights, 57),
        "subset": lambda: SubsetRandomSampler(range(3, N, 2)),
        "list": lambda: [4, 4, 4, 0, 22],
        **{name: lambda draw=draw: GlobalSampler(draw) for name, draw in DRAWS.items()},
    }


@pytest.mark.parametrize("name", samplers())
def test_each_position_of_the_samplers_order_is_trained_once_in_each_epoch(name):
    for way in LOCAL_WAYS:
        seen, state = trained(samplers()[name](), epochs=2, ranks=3, way=way)
        index = EpochIndex(N, 2, 0, samplers()[name]())
        wanted = Counter(index.order(0)[:].tolist()) + Counter(index.order(1)[:].tolist())
        assert Counter(seen.samples) == wanted, way
        assert [m.num_samples for m in state.metrics] == [index.num_samples] * 2


def test_samples_are_trained_in_the_samplers_order():
    seen, _ = trained(SequentialSampler(range(N)))
    assert seen.samples == list(range(N))


@pytest.mark.parametrize(
    "name", [name for name in samplers() if name not in ("sequential", "list")]
)
def test_a_samplers_order_differs_by_epoch_and_is_reproducible_by_seed(name):
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    orders = [EpochIndex(N, 2, seed, samplers()[name]()) for seed in (1, 1, 2)]
    first, again, other = ([index.order(e)[:].tolist() for e in range(3)] for index in orders)
    assert first == again != other
    assert all(a != b for a, b in pairwise(first))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]


def test_the_users_own_generator_is_kept():
    sampler = RandomSampler(range(N), generator=torch.Generator().manual_seed(5))
    wanted = list(RandomSampler(range(N), generator=torch.Generator().manual_seed(5)))
    seen, _ = trained(sampler)
    assert seen.samples == wanted


def test_set_epoch_is_called_on_samplers_that_have_it():
    sampler = DistributedSampler(range(N), num_replicas=1, rank=0, seed=3)
    seen, _ = trained(sampler, epochs=2)
    wanted = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        wanted += list(sampler)
    assert seen.samples == wanted


@pytest.mark.parametrize(
    ("sampler", "error", "remedy"),
    [
        (DistributedSampler(range(N), num_replicas=2, rank=0), ValueError, "leave the sampler out"),
        (BatchSampler(SequentialSampler(range(N)), 4, False), TypeError, "use batch_size"),
        ((i for i in range(N)), TypeError, "with a length"),
        (7, TypeError, "pass a torch.utils.data.Sampler"),
        ([], ValueError, r"sampler\(s\): it has no index"),
        (type("Sized", (), {"__len__": lambda self: N})(), TypeError, "it has no __iter__"),
    ],
)
def test_objects_that_are_not_samplers_are_refused_when_set(sampler, error, remedy):
    with pytest.raises(error, match=remedy):
        builder().sampler(sampler)


class WrongLength(Sampler):
    """Yields a different number of samples than its length."""

    def __len__(self):
        return N

    def __iter__(self):
        yield from range(N - 1)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (WrongLength(), "yielded 22 samples in epoch 0, and its length is 23"),
        ([0, 1, N], "yielded index 23 in epoch 0, and the data set has 23"),
        ([0, -1], "yielded index -1"),
        ([0, 1.5], "yielded 1.5, of type float: yield integers"),
        (["a", "b"], "yielded 'a', of type str: yield integers"),
    ],
)
def test_an_invalid_order_ends_the_run_with_the_reason(sampler, message):
    with pytest.raises(WorkerFailed) as caught:
        trained(sampler)
    assert message in str(caught.value.__cause__)


def own(seed):
    """A sampler whose generator continues, so that no epoch can be drawn again."""
    return RandomSampler(range(N), generator=torch.Generator().manual_seed(seed))


@local_ways
def test_a_resumed_epoch_continues_in_the_order_already_drawn(tmp_path, way):
    seen = SampleLog()
    b = builder(train=seen, dataset=N, epochs=2, way=way).sampler(own(1))
    b.checkpoint_dir(tmp_path).max_steps(5).run().join(WAIT_S)
    assert seen.batches
    b = builder(train=seen, dataset=N, epochs=1, way=way).sampler(own(2))
    state = b.resume(tmp_path).run().join(WAIT_S)
    assert sorted(seen.samples) == list(range(N))
    assert [m.num_samples for m in state.metrics] == [N]


class OwnState(Sampler):
    """Draws from generators of its own, and counts its epochs."""

    def __init__(self):
        self.python, self.numpy = random.Random(3), np.random.default_rng(3)
        self.num_epochs = 0

    def __len__(self):
        return N

    def __iter__(self):
        self.num_epochs += 1
        draws = self.python.sample(range(N), N), self.numpy.permutation(N)
        return iter([(int(a) + int(b) + self.num_epochs) % N for a, b in zip(*draws, strict=True)])


@pytest.mark.parametrize("steps", [N // 4 * 2, 7, 16])
def test_the_state_of_a_sampler_continues_in_a_resumed_run(tmp_path, steps):
    def run(configure=lambda b: b):
        seen = SampleLog()
        b = builder(train=seen, dataset=N, batch_size=2, epochs=4).sampler(OwnState())
        configure(b.checkpoint_dir(tmp_path)).run().join(WAIT_S)
        return seen

    whole = run().samples
    for each in tmp_path.iterdir():
        shutil.rmtree(each)
    first = run(lambda b: b.max_steps(steps)).samples
    assert sorted(first + run(lambda b: b.resume(tmp_path)).samples) == sorted(whole)


def test_resuming_requires_a_sampler_if_the_checkpoint_had_one(tmp_path):
    builder(dataset=N).sampler(own(1)).checkpoint_dir(tmp_path / "with").run().join(WAIT_S)
    with pytest.raises(CheckpointError, match="written with a sampler: True, this run has False"):
        builder(dataset=N).resume(tmp_path / "with").run()
    builder(dataset=N).checkpoint_dir(tmp_path / "without").run().join(WAIT_S)
    with pytest.raises(CheckpointError, match="written with a sampler: False, this run has True"):
        builder(dataset=N).sampler(own(1)).resume(tmp_path / "without").run()


def test_a_resumed_order_beyond_the_data_set_is_refused(tmp_path):
    b = builder(dataset=N).sampler(own(1)).max_steps(2)
    b.checkpoint_dir(tmp_path).run().join(WAIT_S)
    with pytest.raises(ValueError, match="the data set has 9 samples"):
        builder(dataset=9).sampler(own(1)).sampler([0] * N).resume(tmp_path).run()


def test_a_past_epoch_is_drawn_again_while_the_state_of_the_generator_is_kept():
    order = SampledOrder(own(1), seed=0)
    first, second = order.draw(0, N), order.draw(1, N)
    assert not torch.equal(first, second)
    assert torch.equal(order.draw(0, N), first)
    assert torch.equal(order.draw(1, N), second)
    order = SampledOrder(own(1), seed=0)
    order.draw(3, N)
    order.restore(order.state(3))
    with pytest.raises(ValueError, match="the sampler's generator is past epoch 0"):
        order.draw(0, N)


# DataLoaders.


def loader_of(**settings):
    return DataLoader(TensorDataset(*numbers(N)), **{"batch_size": 5, **settings})


def run_with(loader, *, epochs=1, ranks=1, **more):
    seen = SampleLog()
    b = builder(train=seen, epochs=epochs, ranks=ranks, way=(SYNC, THREAD))
    b._explicit.discard("batch_size")  # as if batch_size() had not been called
    b.dataset(loader)
    for name, value in more.items():
        getattr(b, name)(value)
    return seen, b.run().join(WAIT_S)


def test_data_batch_size_and_order_are_taken_from_the_loader():
    seen, _ = run_with(loader_of())
    assert seen.batches == [[*range(start, min(start + 5, N))] for start in range(0, N, 5)]


def test_a_shuffling_loader_is_shuffled_by_the_runs_seed():
    seen, _ = run_with(loader_of(shuffle=True), epochs=2)
    order = EpochIndex(N, 5, 0).order
    assert seen.samples == order(0).tolist() + order(1).tolist()


def test_drop_last_collate_fn_and_sampler_are_taken_from_the_loader():
    sampler = WeightedRandomSampler([1.0] * N, 17)
    loader = loader_of(
        sampler=sampler, drop_last=True, collate_fn=lambda s: (torch.stack([x for (x,) in s]) * 2,)
    )
    seen, _ = run_with(loader)
    wanted = [2 * i for i in EpochIndex(N, 5, 0, sampler).order(0).tolist()]
    assert seen.samples == wanted[:15]


def test_the_builders_settings_override_the_loaders():
    seen, _ = run_with(loader_of(drop_last=True), batch_size=7, drop_last=False)
    assert [len(batch) for batch in seen.batches] == [7, 7, 7, 2]


def test_setting_another_data_set_drops_the_loaders_settings():
    seen = SampleLog()
    b = builder(train=seen, batch_size=4, ranks=1, way=(CADENCE, OVER_CPU))
    b.dataset(loader_of(drop_last=True)).dataset(numbers(6)).run().join(WAIT_S)
    assert sorted(seen.samples) == list(range(6))


def test_the_loaders_processes_load_the_same_samples():
    seen, _ = run_with(loader_of(num_workers=1, collate_fn=torch.utils.data.default_collate))
    assert seen.samples == list(range(N))


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: loader_of(batch_size=None), "batch_size=None chooses"),
        (
            lambda: DataLoader(
                TensorDataset(*numbers(N)),
                batch_sampler=type("Own", (BatchSampler,), {})(range(N), 4, False),
            ),
            "a batch_sampler of its own",
        ),
    ],
)
def test_a_loader_with_its_own_batches_is_refused(make, remedy):
    with pytest.raises(TypeError, match=remedy):
        builder().dataset(make())


# Dicts of columns.


@pytest.mark.parametrize("resident", [None, True])
def test_a_dict_of_tensors_yields_dict_batches(resident):
    data = {"x": torch.arange(N), "y": np.arange(N) * 10}
    seen = []

    def train(model, batch):
        assert list(batch) == ["x", "y"]
        assert torch.equal(batch["y"], batch["x"] * 10)
        seen.extend(batch["x"].tolist())
        return count_up(model, batch)

    b = builder(train=train, dataset=data, way=(SYNC, THREAD))
    if resident is not None:
        b.resident(resident)
    b.run().join(WAIT_S)
    assert sorted(seen) == list(range(N))


def test_a_collate_fn_receives_dict_samples_of_a_dict():
    adapter = adapt_dataset(
        {"x": torch.arange(N)}, collate_fn=lambda s: torch.stack([d["x"] for d in s])
    )
    assert adapter.load(torch.tensor([3, 1])).tolist() == [3, 1]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({}, ValueError, "a dict of 0 elements"),
        ({"x": 1, "y": 2}, TypeError, "a dict of 2 elements without a tensor"),
        (
            {"x": torch.ones(2), "y": [1, 2]},
            TypeError,
            "element 'y' of the data set is of type list",
        ),
        ({"x": torch.ones(2), "y": torch.ones(3)}, ValueError, "unequal lengths"),
    ],
)
def test_a_dict_that_is_not_a_data_set_is_refused(data, error, message):
    with pytest.raises(error, match=message):
        builder(dataset=data).run()
