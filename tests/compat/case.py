"""A model or recipe of the compatibility matrix, and its training data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

NUM_SAMPLES = 24
BATCH_SIZE = 4
"""Of one device."""
NUM_DEVICES = 2
NUM_EPOCHS = 2
DOUBLE = torch.float64
_DRAWING = threading.RLock()
"""Held by the thread that has seeded the generator of the process."""
Watch = Callable[[nn.Module], None]


def sgd(params: Any) -> torch.optim.Optimizer:
    """Plain and short enough that rounding stays rounding."""
    return torch.optim.SGD(params, 0.05)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model or recipe, written as its users write it.

    Attributes:
        name: Of the row.
        group: Of the rows that need the same packages.
        make: Builds the model with random weights.
        data: Builds the data set, of ``NUM_SAMPLES`` samples.
        loss: ``f(model, batch)``: the batch's mean loss, or the model's output with a ``loss``.
        loader: What the ``DataLoader`` is given besides: ``collate_fn``, ``sampler``.
        weight: ``f(batch)``: what the loss is a mean over; ``None``: the samples.
        optimizer: From the parameters.
        watch: ``f(bare)`` gives what is called with the bare module after each step, or, under
            the builder, after each epoch with the averaged weights.
        differs: Why the result is not that of one device to the last digits; empty: it is.
        whole: Batches cannot be cut along dimension 0: ``Trainer.setup`` is given whole batches
            for each device (``accumulate``), ``DataParallelCoordinator`` lists of samples.
        unlike: Doors whose result differs from one device for the case's own reason.
        absent: Doors that the recipe has no use for, with the reason.
        refused: Doors that refuse it, with the error's first words.
        bare: Builds the module that loads the trained weights, where it is another one.
        double: True if it is trained in float64.
        tolerance: Of the relative difference of the parameters' change to that on one device.
    """

    name: str
    group: str
    make: Callable[[], nn.Module]
    data: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Any]
    loader: Mapping[str, Any] = field(default_factory=dict)
    weight: Callable[[Any], Tensor] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    watch: Callable[[nn.Module], Watch] | None = None
    differs: str = ""
    whole: bool = False
    unlike: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    bare: Callable[[], nn.Module] | None = None
    double: bool = True
    tolerance: float = 1e-6

    def model(self) -> nn.Module:
        """The model, with the same weights at every call."""
        with _DRAWING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make()
        return model.to(DOUBLE) if self.double else model

    def load(self, state: dict[str, Tensor]) -> nn.Module:
        """The bare model with trained weights, all keys of which it has to know."""
        make = self.bare or self.make
        model = make().to(DOUBLE) if self.double else make()
        model.load_state_dict(state, strict=True)
        return model

    def dataset(self) -> Any:
        """The data set, with the same samples at every call."""
        with _DRAWING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.data()

    def batches(self, batch_size: int, *, listed: bool = False) -> Any:
        """A ``DataLoader`` of batches of so many samples; ``listed``: of lists of them."""
        options = {**self.loader, **({"collate_fn": list} if listed else {})}
        return DataLoader(self.dataset(), batch_size=batch_size, **options)

    def collate(self, samples: Sequence[Any]) -> Any:
        """A batch of samples."""
        return self.batches(BATCH_SIZE).collate_fn(list(samples))


def loss_of(result: Any) -> Tensor:
    """The loss in what a case's ``loss`` returned."""
    if isinstance(result, Tensor):
        return result
    found: Tensor = result["loss"]
    return found


class Rows(Dataset[dict[str, Tensor]]):
    """A data set of dicts, from their columns."""

    def __init__(self, **columns: Tensor) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self._columns.items()}


class Listed(Dataset[Any]):
    """A data set of any samples, in a list."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def floats(*shape: int) -> Tensor:
    """Standard normal numbers for so many samples."""
    return torch.randn(NUM_SAMPLES, *shape, dtype=DOUBLE)


def classes(count: int, *shape: int) -> Tensor:
    """Labels for so many samples."""
    return torch.randint(count, (NUM_SAMPLES, *shape))


def cut_labels(tokens: Tensor) -> Tensor:
    """The tokens as labels, with padding of unequal length at the end of each row."""
    lengths = torch.arange(len(tokens)) % (tokens.shape[1] // 2)
    positions = torch.arange(tokens.shape[1]).flip(0)
    return tokens.masked_fill(positions < lengths[:, None], -100)


def labels_that_count(batch: Any) -> Tensor:
    """Number of labels over which a batch's loss is a mean."""
    return (batch["labels"] != -100).sum()


def labels_after_the_first(batch: Any) -> Tensor:
    """Likewise for a causal language model, which does not predict the first token."""
    return (batch["labels"][:, 1:] != -100).sum()


def repeated(loader: Any) -> Iterator[Any]:
    """The batches of all epochs."""
    for _ in range(NUM_EPOCHS):
        yield from loader
