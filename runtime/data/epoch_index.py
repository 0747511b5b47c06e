"""The order of samples in each epoch, from a permutation or the user's sampler."""

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
    """Which samples each batch of each epoch holds; shared by all workers, thread-safe.

    The permutations of the last few epochs that were asked for are kept (8 bytes a
    sample each); any other is computed again.

    Args:
        num_samples: Length of the data set.
        batch_size: Samples in a batch.
        seed: Seed of the run.
        sampler: Gives each epoch's order; ``None``: a permutation.
        of_stream: The data set is a stream, which has an order of its own.

    Attributes:
        num_samples: Samples in an epoch.
        of_stream: Whether sample ``epoch * num_samples + i`` is the ``i``-th of an epoch.
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
        self._orders: OrderedDict[int, _Order] = OrderedDict()

    def indices(self, epoch: int, batch: int) -> Tensor:
        """Samples of a batch, by its position in the epoch.

        Blocks while the epoch's permutation is computed, by this thread or another;
        other epochs are not waited for.

        Returns:
            An int64 CPU tensor, a view of the permutation that must not be written to.

        Raises:
            IndexError: The epoch has no such batch.
        """
        start, stop = self.bounds(batch)
        return self.order(epoch)[start:stop]

    def bounds(self, batch: int) -> tuple[int, int]:
        """Where a batch starts and stops in an epoch's permutation.

        Raises:
            IndexError: An epoch has no such batch.
        """
        start, stop = batch_bounds(batch, self.num_samples, self.batch_size)
        if not 0 <= start < stop:
            raise IndexError(f"no batch {batch} in an epoch of {self.num_samples} samples")
        return start, stop

    def order(self, epoch: int) -> Tensor:
        """The permutation of an epoch, not to be written to; blocks as :meth:`indices` does."""
        with self._lock:
            order = self._orders.get(epoch)
            if order is None:
                order = self._orders[epoch] = _Order()
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
        """What the sampler has given for an epoch and those after it; nothing without one."""
        with self._lock:
            orders = {e: o.permutation for e, o in self._orders.items() if e >= since}
        return {e: p for e, p in orders.items() if p is not None and self._sampled is not None}

    def restore(self, orders: Mapping[int, Tensor]) -> None:
        """Take what the sampler gave before for some epochs; it is not asked again.

        Raises:
            ValueError: The data set has become shorter.
        """
        if self._sampled is None:
            return
        for epoch, order in sorted(orders.items()):
            kept = self._orders[epoch] = _Order()
            kept.permutation = self._sampled.check(epoch, order)


class _Order:
    """The permutation of one epoch, computed by whoever asks first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.permutation: Tensor | None = None


class SampledOrder:
    """The order that a sampler gives for each epoch, drawn under a seed of the epoch.

    Samplers draw from a ``generator`` of their own, which is seeded here unless the user has
    set one, or from PyTorch's, NumPy's or Python's own, which are seeded for as long as it
    takes and put back. ``set_epoch`` is called where there is one. Not thread-safe.

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
        """The samples of an epoch, in order, int64, of shape ``(len(self),)``.

        Raises:
            ValueError: Another number than the sampler's length, or no sample of the data set.
        """
        if callable(getattr(self._sampler, "set_epoch", None)):
            self._sampler.set_epoch(epoch)
        seed = int(np.random.SeedSequence([self._seed, epoch]).generate_state(1)[0])
        with self._seeded(seed):
            order = torch.tensor([int(index) for index in self._sampler], dtype=torch.int64)
        if len(order) != len(self._sampler):
            raise ValueError(
                f"the sampler gave {len(order)} samples in epoch {epoch}, and its length is "
                f"{len(self._sampler)}: both must agree, in each epoch"
            )
        return self.check(epoch, order)

    def check(self, epoch: int, order: Tensor) -> Tensor:
        """An epoch's order, if all of it is in the data set.

        Raises:
            ValueError: It is not.
        """
        low, high = (int(value) for value in order.aminmax())
        if low < 0 or high >= self._num_samples:
            raise ValueError(
                f"the sampler gave index {low if low < 0 else high} in epoch {epoch}, and the data "
                f"set has {self._num_samples} samples"
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
    """A sampler that says how many samples an epoch has.

    Raises:
        TypeError: No iterable with a length, or one of batches.
        ValueError: It is empty, or gives each process its part.
    """
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise ValueError(
            f"a DistributedSampler over {sampler.num_replicas} processes leaves most samples out: "
            "the workers share the data set out among themselves, leave the sampler out"
        )
    if isinstance(sampler, BatchSampler):
        raise TypeError(
            "sampler() takes a sampler of single samples: pass the sampler that is in the "
            "BatchSampler, and use batch_size()"
        )
    try:
        length = len(sampler)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(
            f"sampler({sampler!r:.80}): pass a torch.utils.data.Sampler, or another iterable of "
            "indices with a length, which is the same in each epoch"
        ) from error
    if not callable(getattr(sampler, "__iter__", None)):
        raise TypeError(f"sampler({sampler!r:.80}): it has no __iter__")
    if length == 0:
        raise ValueError("sampler(): it is empty, so that an epoch would have no sample")
    return sampler
