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
"""Batch size of one device."""
NUM_DEVICES = 2
NUM_EPOCHS = 2
DOUBLE = torch.float64
_DRAWING = threading.RLock()
"""Held while the process's generator is seeded."""
Watch = Callable[[nn.Module], None]


def sgd(params: Any) -> torch.optim.Optimizer:
    """Plain SGD, with steps so small that rounding errors do not grow."""
    return torch.optim.SGD(params, 0.05)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model or recipe, as written by its users.

    Attributes:
        name: Name of the row.
        group: Name of the rows that require the same packages.
        make: Builds the model with random weights.
        data: Builds the data set, of ``NUM_SAMPLES`` samples.
        loss: ``f(model, batch)``: the batch's mean loss, or the model's output with a ``loss``.
        loader: Further arguments of the ``DataLoader``: ``collate_fn``, ``sampler``.
        weight: ``f(batch)``: number of elements in the loss's mean; ``None``: the samples.
        optimizer: Builds the optimizer from the parameters.
        watch: ``f(bare)`` returns a function of the bare module, called after each step or, under
            the builder, after each epoch with the averaged weights.
        differs: The reason if the result differs from one device's beyond rounding; else empty.
        whole: Batches cannot be cut along dimension 0: ``Trainer.setup`` receives whole batches
            for each device (``accumulate``), ``DataParallelCoordinator`` lists of samples.
        unlike: Entry points whose result differs from one device, with the reason.
        absent: Entry points that do not apply to the recipe, with the reason.
        refused: Entry points that refuse it, with the error's first words.
        bare: Builds the module that loads the trained weights, if it is another one.
        double: True if it is trained in float64.
        tolerance: Limit of the relative difference of the parameters' change to one device's.
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
        """The bare model with trained weights; all keys must match."""
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
        """A ``DataLoader`` of batches; ``listed``: of lists of samples."""
        options = {**self.loader, **({"collate_fn": list} if listed else {})}
        return DataLoader(self.dataset(), batch_size=batch_size, **options)

    def collate(self, samples: Sequence[Any]) -> Any:
        """A batch of samples."""
        return self.batches(BATCH_SIZE).collate_fn(list(samples))


def loss_of(result: Any) -> Tensor:
    """The loss within the return value of a case's ``loss``."""
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
    """A data set over a list of samples."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def floats(*shape: int) -> Tensor:
    """Standard normal numbers for ``NUM_SAMPLES`` samples."""
    return torch.randn(NUM_SAMPLES, *shape, dtype=DOUBLE)


def classes(count: int, *shape: int) -> Tensor:
    """Labels for ``NUM_SAMPLES`` samples."""
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
    """The same for a causal language model, which does not predict the first token."""
    return (batch["labels"][:, 1:] != -100).sum()


def repeated(loader: Any) -> Iterator[Any]:
    """The batches of all epochs."""
    for _ in range(NUM_EPOCHS):
        yield from loader
