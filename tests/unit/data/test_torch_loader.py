"""Arguments of a ``DataLoader``: each is applied, implied or refused by its name."""

from __future__ import annotations

import copy
import inspect
import os
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from runtime import WorkerFailed
from runtime.data.torch_loader import (
    APPLIED,
    IMPLIED,
    LOADER_ARGUMENTS,
    REFUSED,
    settings_of_loader,
)
from tests.support.running import CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, builder, count_up

N = 24


class Numbers(Dataset):
    """Sample ``i`` is ``i + shift``."""

    def __init__(self, shift=0):
        self.shift = shift

    def __len__(self):
        return N

    def __getitem__(self, index):
        return torch.tensor(index + self.shift)


def trained(loader, *, epochs=1, ranks=1, way=(SYNC, THREAD), change=lambda b: b):
    """The samples that a run trains, in order, by epoch."""
    seen = []

    def train(model, batch):
        seen.extend(batch.tolist())
        return count_up(model, batch)

    b = builder(train=train, epochs=epochs, ranks=ranks, way=way)
    b._explicit.discard("batch_size")  # as if it had not been called
    change(b.dataset(loader)).run().join(WAIT_S)
    return [seen[start : start + N] for start in range(0, len(seen), N)]


def joined(epochs):
    return [sample for epoch in epochs for sample in epoch]


# The table.


def test_every_argument_of_a_loader_is_in_the_table():
    known = set(inspect.signature(DataLoader.__init__).parameters) - {"self"}
    assert known == set(LOADER_ARGUMENTS), "decide: applied, implied or refused"
    assert set(LOADER_ARGUMENTS.values()) == {APPLIED, IMPLIED, REFUSED}


class Scaled(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch * 100


class Short(DataLoader):
    def __len__(self):
        return 1


REFUSALS = {
    "batch_sampler": ({"batch_sampler": [[0, 1]]}, "batch_sampler of its own"),
    "pin_memory_device": ({"pin_memory_device": "cuda:0"}, "leave pin_memory_device out"),
    "in_order": ({"in_order": False}, "leave in_order out"),
    "multiprocessing_context": (
        {"num_workers": 1, "multiprocessing_context": "fork"},
        "leave multiprocessing_context out",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_argument_without_effect_is_refused_by_its_name(name):
    arguments, remedy = REFUSALS[name]
    with pytest.raises((TypeError, ValueError), match=remedy):
        builder().dataset(DataLoader(Numbers(), **arguments))


def test_each_refused_argument_has_a_case():
    assert {name for name, kind in LOADER_ARGUMENTS.items() if kind == REFUSED} <= set(REFUSALS)


@pytest.mark.parametrize(("kind", "name"), [(Scaled, "__iter__"), (Short, "__len__")])
def test_a_subclass_that_changes_the_batches_is_refused(kind, name):
    with pytest.raises(TypeError, match=f"{kind.__name__} overrides DataLoader.{name}"):
        builder().dataset(kind(Numbers(), batch_size=4))


def test_a_subclass_that_changes_nothing_is_taken():
    kind = type("Own", (DataLoader,), {})
    assert trained(kind(Numbers(), batch_size=4)) == [list(range(N))]


@pytest.mark.parametrize("name", ["worker_init_fn", "timeout"])
def test_arguments_of_processes_are_refused_for_a_stream(name):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    value = {"worker_init_fn": print, "timeout": 3}[name]
    with pytest.raises(ValueError, match=f"leave {name} out"):
        builder().dataset(DataLoader(Stream(), num_workers=1, **{name: value}))


# Orders.


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def plain_epochs(loader, epochs):
    return [torch.cat(list(loader)).tolist() for _ in range(epochs)]


ORDERS = {
    "shuffle": lambda g: {"shuffle": True, "generator": g},
    "sampler": lambda g: {"sampler": RandomSampler(range(N), generator=g)},
    "both": lambda g: {"sampler": RandomSampler(range(N), generator=g), "generator": g},
    "weights": lambda g: {"sampler": WeightedRandomSampler([1.0] * N, N, generator=g)},
}


@pytest.mark.parametrize("how", ORDERS)
@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=["sync", "cadence"])
def test_a_generator_orders_the_samples_as_in_a_plain_loop(how, way):
    def loader(seed=1):
        return DataLoader(Numbers(), batch_size=5, **ORDERS[how](generator(seed)))

    found = trained(loader(), epochs=3, way=way)
    assert found == plain_epochs(loader(), 3)
    assert found != trained(loader(2), epochs=3, way=way)


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=["sync", "cadence"])
def test_an_epoch_has_the_number_of_samples_of_a_random_sampler(way):
    sampler = RandomSampler(range(N), num_samples=10)
    samples = joined(trained(DataLoader(Numbers(), 5, sampler=sampler), epochs=2, way=way))
    assert [len(samples), len(set(samples[:10])), len(set(samples[10:]))] == [20, 10, 10]


@pytest.mark.parametrize("steps", [3, 5, 7])
def test_a_generator_continues_from_a_checkpoint(steps, tmp_path):
    def loader(g):
        return DataLoader(Numbers(), batch_size=5, shuffle=True, generator=g)

    g = generator()
    first = trained(
        loader(g), epochs=3, change=lambda b: b.checkpoint_dir(tmp_path).max_steps(steps)
    )
    g.manual_seed(99)  # its state is that of the checkpoint
    rest = trained(loader(g), epochs=3, change=lambda b: b.resume(tmp_path))
    whole = plain_epochs(loader(generator()), 3)
    assert joined(first) + joined(rest) == joined(whole)


# Containers.


@pytest.mark.parametrize(
    "samples",
    [
        list(torch.arange(N)),
        tuple(torch.arange(N)),
        dict(enumerate(torch.arange(N))),
        torch.arange(N),
        np.arange(N),
        list(np.arange(N)),
    ],
    ids=["list", "tuple", "dict", "tensor", "array", "arrays"],
)
def test_a_container_in_a_loader_holds_samples(samples):
    assert trained(DataLoader(samples, batch_size=5)) == plain_epochs(
        DataLoader(samples, batch_size=5), 1
    )


def test_a_list_of_tensors_holds_samples():
    loaded = trained(list(torch.arange(N)), change=lambda b: b.batch_size(5))
    assert sorted(loaded[0]) == list(range(N))


# Processes.


def shift_by_worker(worker):
    info = get_worker_info()
    assert info.id == worker
    info.dataset.shift = 100 * (1 + info.num_workers)


def fail(worker):
    raise SystemExit("no such file")


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_worker_init_fn_prepares_the_data_set_of_each_process(method):
    loader = DataLoader(
        Numbers(),
        batch_size=5,
        num_workers=1,
        worker_init_fn=shift_by_worker,
        multiprocessing_context=method,
    )
    assert trained(loader) == [[i + 200 for i in range(N)]]


def test_worker_init_fn_that_exits_is_an_error_of_the_run():
    loader = DataLoader(Numbers(), batch_size=5, num_workers=1, worker_init_fn=fail)
    with pytest.raises(WorkerFailed, match="worker_init_fn raised SystemExit"):
        trained(loader)


class Hangs(Numbers):
    def __getitem__(self, index):
        if index == N // 2:
            threading.Event().wait(WAIT_S)
        return super().__getitem__(index)


def test_a_process_that_hangs_ends_the_run_at_the_loaders_timeout():
    with pytest.raises(WorkerFailed, match=r"sent no batch within the timeout=1 of the DataLoader"):
        trained(DataLoader(Hangs(), batch_size=4, num_workers=1, timeout=1))


def as_lambdas(samples):
    return [torch.stack(samples), lambda: 0]


class Gradients(Numbers):
    def __getitem__(self, index):
        return torch.ones(1, requires_grad=True) * index


class Local(Numbers):
    def __getitem__(self, index):
        class Own(Exception):
            pass

        raise Own(f"sample {index} in {os.getpid()}")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"dataset": Numbers(), "collate_fn": as_lambdas}, "cannot be sent .*lambda"),
        ({"dataset": Gradients(), "collate_fn": torch.stack}, "cannot be sent .*gradients"),
        ({"dataset": Local()}, "Own: sample 0"),
    ],
    ids=["lambda", "gradients", "local exception"],
)
def test_a_batch_that_cannot_be_sent_from_a_process_raises(arguments, match):
    with pytest.raises(WorkerFailed, match=f"(?s){match}"):
        trained(DataLoader(batch_size=4, num_workers=1, **arguments))


def test_the_sampler_of_a_loader_with_a_shared_generator_can_be_copied():
    loader = DataLoader(Numbers(), **ORDERS["both"](generator()))
    sampler = settings_of_loader(loader)["sampler"]
    twin = copy.deepcopy(sampler)
    assert twin.generator is not sampler.generator
    assert [*twin] == [*sampler]
