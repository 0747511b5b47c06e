"""EpochOrder: the samples of an epoch, computed as they are read."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler

from coordinator.splitting import permuted

BLOCK = 1 << 17
"""Positions that are computed together: 1 MiB."""
_KEPT_BLOCKS = 32


class EpochOrder(ABC):
    """Sample indices of an epoch. A slice is an int64 CPU tensor, not to be modified. Thread-safe.

    Takes no memory for positions that are not read: blocks of them are computed as they are read,
    and the last few are kept.

    Args:
        num_positions: Positions in the epoch.
    """

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, Tensor] = OrderedDict()  # by their number

    def __len__(self) -> int:
        return self._num_positions

    def __getitem__(self, positions: slice) -> Tensor:
        start, stop, _ = positions.indices(self._num_positions)
        parts = [
            self._block(number)[max(0, start - number * BLOCK) : stop - number * BLOCK]
            for number in range(start // BLOCK, -(-stop // BLOCK))
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self._num_positions, BLOCK):
            yield from self[start : start + BLOCK].tolist()

    def _block(self, number: int) -> Tensor:
        with self._lock:
            block = self._blocks.get(number)
            if block is None:
                start = number * BLOCK
                block = self._compute(start, min(start + BLOCK, self._num_positions))
                self._blocks[number] = block
                if len(self._blocks) > _KEPT_BLOCKS:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end(number)
            return block

    @abstractmethod
    def _compute(self, start: int, stop: int) -> Tensor:
        """The samples at the positions of a block; called with the lock held."""


class InOrder(EpochOrder):
    """The indices of a range."""

    def __init__(self, indices: range) -> None:
        super().__init__(len(indices))
        self._indices = indices

    def _compute(self, start: int, stop: int) -> Tensor:
        part = self._indices[start:stop]
        return torch.arange(part.start, part.stop, part.step)


class Shuffled(EpochOrder):
    """A random permutation; see :func:`coordinator.splitting.permuted`."""

    def __init__(self, num_samples: int, epoch: int, seed: int) -> None:
        super().__init__(num_samples)
        self._epoch, self._seed = epoch, seed

    def _compute(self, start: int, stop: int) -> Tensor:
        positions = torch.arange(start, stop).numpy()
        return torch.from_numpy(permuted(positions, len(self), self._epoch, self._seed))


class Drawn(EpochOrder):
    """Samples with replacement, as ``RandomSampler`` draws them.

    Args:
        num_samples: Number of samples to draw from.
        num_draws: Positions in the epoch.
        generator: Draws them, in order: as far as the order has been read.
    """

    def __init__(self, num_samples: int, num_draws: int, generator: torch.Generator) -> None:
        super().__init__(num_draws)
        self._num_samples = num_samples
        self._generator = generator
        self._states: list[Tensor] = []  # of the generator before each block that was drawn

    def finish(self) -> None:
        """Advance the generator to the end of the epoch."""
        self._block((len(self) - 1) // BLOCK)

    def _compute(self, start: int, stop: int) -> Tensor:
        number = start // BLOCK
        if number < len(self._states):  # again
            generator = torch.Generator()
            generator.set_state(self._states[number])
            return self._draw(generator, stop - start)
        for _ in range(len(self._states), number):
            self._advance(BLOCK)
        return self._advance(stop - start)

    def _advance(self, num: int) -> Tensor:
        self._states.append(self._generator.get_state())
        return self._draw(self._generator, num)

    def _draw(self, generator: torch.Generator, num: int) -> Tensor:
        # The numbers of RandomSampler, which draws 32 at a time.
        return torch.randint(high=self._num_samples, size=(num,), generator=generator)


class SeedingSampler:
    """The sampler of a ``DataLoader`` that shares its generator.

    In each epoch a ``DataLoader`` draws the seed of its processes first: the order of the samples
    is then that of the same loader in a plain loop.
    """

    def __init__(self, sampler: Any, generator: torch.Generator) -> None:
        self.sampler = sampler
        self.generator = generator

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self.draw_seed(self.generator)
        return iter(self.sampler)

    def draw_seed(self, generator: torch.Generator) -> None:
        torch.empty((), dtype=torch.int64).random_(generator=generator)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)  # set_epoch


def computed_order(
    sampler: Any, num_samples: int, generator: torch.Generator | None = None
) -> EpochOrder | None:
    """The next order of a sampler, where it can be computed as it is read.

    Args:
        sampler: A range, a ``SequentialSampler``, or a ``RandomSampler`` with replacement; or an
            order that was computed before.
        num_samples: Length of the data set.
        generator: In place of the sampler's.

    Returns:
        ``None`` for other samplers, and those that leave the data set.
    """
    if isinstance(sampler, EpochOrder):
        return sampler
    if isinstance(sampler, SeedingSampler):
        generator = generator or sampler.generator
        order = computed_order(sampler.sampler, num_samples, generator)
        if order is not None:
            sampler.draw_seed(generator)
        return order
    indices = sampler
    if type(sampler) is SequentialSampler:
        indices = range(len(sampler.data_source))
    if isinstance(indices, range):
        ends = (*indices[:1], *indices[-1:])
        return InOrder(indices) if all(0 <= end < num_samples for end in ends) else None
    if type(sampler) is not RandomSampler or not sampler.replacement:
        return None
    high = len(sampler.data_source)
    if high > num_samples:
        return None
    generator = generator or sampler.generator
    if generator is None:  # as RandomSampler does
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator().manual_seed(seed)
    return Drawn(high, len(sampler), generator)
