"""Settings taken over from a ``torch.utils.data.DataLoader``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    default_collate,
)

from runtime.data.dataset import TRAINING, Samples, empty_text
from runtime.data.epoch_index import check_sampler
from runtime.data.epoch_order import SeedingSampler
from runtime.data.process_loader import LoaderProcesses

APPLIED, IMPLIED, REFUSED = "applied", "implied", "refused"

LOADER_ARGUMENTS = {
    "dataset": APPLIED,
    "batch_size": APPLIED,
    "shuffle": APPLIED,
    "sampler": APPLIED,
    "batch_sampler": REFUSED,
    "num_workers": APPLIED,
    "collate_fn": APPLIED,
    "pin_memory": IMPLIED,
    "drop_last": APPLIED,
    "timeout": APPLIED,
    "worker_init_fn": APPLIED,
    "multiprocessing_context": APPLIED,
    "generator": APPLIED,
    "prefetch_factor": APPLIED,
    "persistent_workers": IMPLIED,
    "pin_memory_device": REFUSED,
    "in_order": REFUSED,
}
"""Arguments of ``DataLoader``: applied; implied, where every run does so anyway; or refused
where they are not the default."""

_OVERRIDES = ("__iter__", "__len__", "_get_iterator", "_index_sampler")
"""Attributes of ``DataLoader`` that decide which batches it yields."""


def settings_of_loader(loader: DataLoader[Any], call: str = TRAINING) -> dict[str, Any]:
    """The settings of a ``DataLoader``, under the builder's names.

    Args:
        call: The user's call, for errors.

    Raises:
        TypeError: Its batches cannot be shared out among workers.
        ValueError: It reads one part of the data set for each process, or has an argument that
            no run follows.
    """
    _refuse_overrides(loader)
    _refuse_arguments(loader)
    settings: dict[str, Any] = {
        "dataset": _dataset_of(loader),
        "batch_size": loader.batch_size,
        "loader_workers": loader.num_workers,
        "drop_last": loader.drop_last,
    }
    if loader.collate_fn is not default_collate:
        settings["collate_fn"] = loader.collate_fn
    if isinstance(loader.dataset, IterableDataset):
        _refuse_for_stream(loader)
        del settings["loader_workers"]  # one reader, in a thread, hands out each item once
        return settings
    settings["loader_processes"] = _processes_of(loader)
    sampler: Any = loader.sampler
    shuffles = type(sampler) is RandomSampler and not sampler.replacement
    whole = shuffles and sampler.num_samples == len(sampler.data_source)
    if not whole or sampler.generator is not None:
        draws_seeds = getattr(sampler, "generator", None) is loader.generator is not None
        settings["sampler"] = check_sampler(
            SeedingSampler(sampler, loader.generator) if draws_seeds else sampler,
            empty_text(call),
        )
    return settings


def _dataset_of(loader: DataLoader[Any]) -> Any:
    """The data set; a container of tensors is one of samples, as ``DataLoader`` reads it."""
    dataset: Any = loader.dataset
    plain = isinstance(dataset, Tensor | np.ndarray | list | tuple | dict)
    return Samples(dataset) if plain else dataset


def _processes_of(loader: DataLoader[Any]) -> LoaderProcesses:
    processes = LoaderProcesses(
        init_fn=loader.worker_init_fn,
        timeout_s=float(loader.timeout),
        batches_ahead=loader.prefetch_factor or LoaderProcesses().batches_ahead,
        generator_seed=None if loader.generator is None else loader.generator.initial_seed(),
    )
    context: Any = loader.multiprocessing_context
    if context is None:
        return processes
    method = context.get_start_method()
    if method == "fork":
        raise ValueError(
            "a DataLoader with multiprocessing_context='fork' copies a process whose threads may "
            "hold locks, so that loader processes may hang: leave multiprocessing_context out, or "
            "pass 'forkserver' or 'spawn'"
        )
    return replace(processes, start_method=method)


def _refuse_overrides(loader: DataLoader[Any]) -> None:
    kind = type(loader)
    for name in _OVERRIDES:
        if getattr(kind, name) is not getattr(DataLoader, name):
            raise TypeError(
                f"{kind.__name__} overrides DataLoader.{name}, and workers read the data set "
                "themselves, so that the override would have no effect: pass a plain DataLoader, "
                "with the change in its data set, sampler or collate_fn"
            )


def _refuse_arguments(loader: DataLoader[Any]) -> None:
    """Raise for arguments that have no effect here and are not the default."""
    if loader.batch_size is None:
        how = "a batch_sampler of its own" if loader.batch_sampler else "batch_size=None"
        raise TypeError(
            f"a DataLoader with {how} chooses the samples of each batch, and workers need batches "
            "of one size: pass its data set, and use batch_size(), sampler() and collate_fn()"
        )
    if loader.pin_memory_device:
        raise ValueError(
            f"a DataLoader with pin_memory_device={loader.pin_memory_device!r} names one device, "
            "and each worker's batches are pinned for its own: leave pin_memory_device out"
        )
    if not getattr(loader, "in_order", True):
        raise ValueError(
            "a DataLoader with in_order=False yields batches in the order of their arrival, and a "
            "run trains them in the order of its sampler: leave in_order out"
        )


def _refuse_for_stream(loader: DataLoader[Any]) -> None:
    """A stream is read in a thread: there is no process for these arguments."""
    for name, is_set in (
        ("worker_init_fn", loader.worker_init_fn is not None),
        ("timeout", loader.timeout > 0),
    ):
        if is_set and loader.num_workers:
            raise ValueError(
                f"a DataLoader with {name} over a stream: one thread reads a stream, without "
                f"loader processes; leave {name} out, and set up the stream in its __iter__"
            )
