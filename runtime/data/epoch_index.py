"""Sample order of each epoch: a seeded permutation, or the user's sampler."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
)

from coordinator.splitting import batch_bounds, permutation
from runtime.core.rng import seeded_globals, thread_generator

_KEPT_EPOCHS = 3  # ranks are at most two epochs apart


class EpochIndex:
    """Sample indices of every batch of every epoch; shared by all workers, thread-safe.

    Caches the permutations of the last few epochs used (8 bytes a sample each).

    Args:
        num_samples: Length of the data set.
        batch_size: Samples in a batch.
        seed: Seed of the run.
        sampler: Yields each epoch's order; ``None``: a random permutation.
        of_stream: The data set is a stream, which is read in its own order.

    Attributes:
        num_samples: Samples in an epoch.
        of_stream: If True, the ``i``-th sample of an epoch is ``epoch * num_samples + i``.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        seed: int,
        sampler: Any = None,
        *,
        of_stream: bool = False,
    ) -> None:
        self.of_stream = of_stream
        self._sampled = None if sampler is None else SampledOrder(sampler, num_samples, seed)
        self.num_samples = num_samples if sampler is None else len(sampler)
        self.batch_size = batch_size
        self.seed = seed
        self._drawing = threading.Lock()
        self._lock = threading.Lock()
        self._orders: OrderedDict[int, _EpochOrder] = OrderedDict()

    def indices(self, epoch: int, batch: int) -> Tensor:
        """Sample indices of a batch, by its position in the epoch.

        Blocks while the epoch's permutation is computed, by this thread or another.

        Returns:
            An int64 CPU tensor, a read-only view of the permutation.

        Raises:
            IndexError: The epoch has no such batch.
        """
        start, stop = self.bounds(batch)
        return self.order(epoch)[start:stop]

    def bounds(self, batch: int) -> tuple[int, int]:
        """Start and stop of a batch in an epoch's permutation.

        Raises:
            IndexError: An epoch has no such batch.
        """
        start, stop = batch_bounds(batch, self.num_samples, self.batch_size)
        if not 0 <= start < stop:
            raise IndexError(f"no batch {batch} in an epoch of {self.num_samples} samples")
        return start, stop

    def order(self, epoch: int) -> Tensor:
        """The permutation of an epoch, read-only; blocks as :meth:`indices`."""
        with self._lock:
            order = self._orders.get(epoch)
            if order is None:
                order = self._orders[epoch] = _EpochOrder()
                if len(self._orders) > _KEPT_EPOCHS:
                    self._orders.popitem(last=False)
            else:
                self._orders.move_to_end(epoch)
        with order.lock:
            if order.permutation is None:
                order.permutation = self._compute(epoch)
            return order.permutation

    def _compute(self, epoch: int) -> Tensor:
        if self._sampled is None:
            return torch.from_numpy(permutation(self.num_samples, epoch, self.seed))
        with self._drawing:
            return self._sampled.draw(epoch)

    def sampled_orders(self, since: int) -> dict[int, Tensor]:
        """Orders drawn from the sampler for an epoch and later ones; empty without a sampler."""
        with self._lock:
            orders = {e: o.permutation for e, o in self._orders.items() if e >= since}
        return {e: p for e, p in orders.items() if p is not None and self._sampled is not None}

    def restore(self, orders: Mapping[int, Tensor]) -> None:
        """Set the orders of some epochs, from :meth:`sampled_orders`, in place of the sampler's.

        Raises:
            ValueError: An index is out of range, since the data set has become shorter.
        """
        if self._sampled is None:
            return
        for epoch, order in sorted(orders.items()):
            kept = self._orders[epoch] = _EpochOrder()
            kept.permutation = self._sampled.check(epoch, order)


class _EpochOrder:
    """The permutation of one epoch, computed on first use."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.permutation: Tensor | None = None


class SampledOrder:
    """Each epoch's order from a sampler, with random numbers seeded by run and epoch.

    Seeds the sampler's ``generator`` unless the user has set one, and otherwise PyTorch's,
    NumPy's and Python's global generators, which are restored afterwards. Calls ``set_epoch`` if
    the sampler has it. Not thread-safe.

    Args:
        sampler: See :func:`check_sampler`.
        num_samples: Length of the data set.
        seed: Seed of the run.
    """

    def __init__(self, sampler: Any, num_samples: int, seed: int) -> None:
        self._sampler = sampler
        self._num_samples = num_samples
        self._seed = seed

    def __len__(self) -> int:
        return len(self._sampler)

    def draw(self, epoch: int) -> Tensor:
        """Iterate the sampler once: the epoch's samples, int64, of shape ``(len(self),)``.

        Raises:
            ValueError: The number of samples is not the sampler's length, or an index is out of
                range.
        """
        if callable(getattr(self._sampler, "set_epoch", None)):
            self._sampler.set_epoch(epoch)
        seed = int(np.random.SeedSequence([self._seed, epoch]).generate_state(1)[0])
        with self._seeded(seed):
            order = torch.tensor([int(index) for index in self._sampler], dtype=torch.int64)
        if len(order) != len(self._sampler):
            raise ValueError(
                f"the sampler yielded {len(order)} samples in epoch {epoch}, and its length is "
                f"{len(self._sampler)}: both must agree in every epoch"
            )
        return self.check(epoch, order)

    def check(self, epoch: int, order: Tensor) -> Tensor:
        """Return an epoch's order if all indices are in range.

        Raises:
            ValueError: An index is out of range.
        """
        low, high = (int(value) for value in order.aminmax())
        if low < 0 or high >= self._num_samples:
            raise ValueError(
                f"the sampler yielded index {low if low < 0 else high} in epoch {epoch}, and the "
                f"data set has {self._num_samples} samples"
            )
        return order

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        if getattr(self._sampler, "generator", self) is None:
            self._sampler.generator = torch.Generator().manual_seed(seed)
            try:
                yield
            finally:
                self._sampler.generator = None
            return
        with thread_generator(torch.Generator().manual_seed(seed)), seeded_globals():
            yield


def check_sampler(sampler: Any) -> Any:
    """Return ``sampler`` if it is an iterable of single indices with a length.

    Raises:
        TypeError: It has no length, is not iterable, or yields batches.
        ValueError: It is empty, or a ``DistributedSampler`` over several processes.
    """
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise ValueError(
            f"a DistributedSampler over {sampler.num_replicas} processes leaves most samples out: "
            "the workers divide the data set among themselves, leave the sampler out"
        )
    if isinstance(sampler, BatchSampler):
        raise TypeError(
            "sampler() expects a sampler of single samples: pass the BatchSampler's own sampler, "
            "and use batch_size()"
        )
    try:
        length = len(sampler)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(
            f"sampler({sampler!r:.80}): pass a torch.utils.data.Sampler, or another iterable of "
            "indices with a length that is the same in each epoch"
        ) from error
    if not callable(getattr(sampler, "__iter__", None)):
        raise TypeError(f"sampler({sampler!r:.80}): it has no __iter__")
    if length == 0:
        raise ValueError("sampler(): it is empty, so that an epoch would have no sample")
    return sampler
