"""Sample order of each epoch: a seeded permutation, or the user's sampler."""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
)

from coordinator.splitting import LONG, batch_bounds, permutation
from runtime.checkpoint.content import SavedSampler
from runtime.core.rng import seeded_globals, thread_generator
from runtime.data.epoch_order import Drawn, EpochOrder, Shuffled, computed_order

_KEPT_EPOCHS = 3  # ranks are at most two epochs apart


class EpochIndex:
    """Sample indices of every batch of every epoch; shared by all workers, thread-safe.

    Caches the orders of the last few epochs used: 8 bytes a sample each, unless the order is an
    :class:`EpochOrder`.

    Args:
        num_samples: Length of the data set.
        sampler: Yields each epoch's order; ``None``: a random permutation.
        of_stream: The data set is a stream, which is read in its own order.
        current_length: Returns the length of the data set at the start of an epoch; ``None``: it
            is constant.

    Attributes:
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
        current_length: Callable[[], int] | None = None,
    ) -> None:
        self.of_stream = of_stream
        self._current_length = current_length
        self._data_length = num_samples
        self._sampled = None if sampler is None else SampledOrder(sampler, seed)
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
            An int64 CPU tensor, not to be modified.

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

    def order(self, epoch: int) -> Tensor | EpochOrder:
        """The order of an epoch, to be read by slices; blocks as :meth:`indices`."""
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

    def _compute(self, epoch: int) -> Tensor | EpochOrder:
        with self._drawing:
            if self._current_length is not None:
                self._data_length = self._current_length()
            length = self._data_length  # another epoch's may follow
            if self._sampled is not None:
                return self._sampled.draw(epoch, length)
        require_length("data set", epoch, length, self.num_samples)
        if self.num_samples >= LONG:
            return Shuffled(self.num_samples, epoch, self.seed)
        return torch.from_numpy(permutation(self.num_samples, epoch, self.seed))

    def sampled_orders(self, since: int) -> dict[int, Tensor]:
        """Orders drawn from the sampler for an epoch and later ones; empty without a sampler. Those
        that are computed as they are read are left out.
        """
        with self._lock:
            orders = {e: o.permutation for e, o in self._orders.items() if e >= since}
        return {e: p for e, p in orders.items() if isinstance(p, Tensor) and self._sampled}

    def generator_state(self, since: int) -> SavedSampler | None:
        """Epoch number and state of a sampler's own generator before that epoch, for a checkpoint
        with :meth:`sampled_orders`; ``None`` without such a generator.
        """
        return None if self._sampled is None else self._sampled.state(since)

    def restore(self, orders: Mapping[int, Tensor], generator: SavedSampler | None = None) -> None:
        """Set the orders of some epochs, from :meth:`sampled_orders`, in place of the sampler's.

        Args:
            orders: From :meth:`sampled_orders`.
            generator: From :meth:`generator_state`.

        Raises:
            ValueError: An index is out of range, since the data set has become shorter.
        """
        if self._sampled is None:
            return
        for epoch, order in sorted(orders.items()):
            kept = self._orders[epoch] = _EpochOrder()
            kept.permutation = check_order(epoch, order, self._data_length)
        if generator is not None:
            self._sampled.restore(generator)


class _EpochOrder:
    """The permutation of one epoch, computed on first use."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.permutation: Tensor | EpochOrder | None = None


class SampledOrder:
    """Each epoch's order from a sampler, with random numbers seeded by run and epoch.

    Seeds the sampler's ``generator`` unless the user has set one, and otherwise PyTorch's,
    NumPy's and Python's global generators, which are restored afterwards. A generator that the
    user has set continues from epoch to epoch, as in a plain loop, so epochs are drawn in order;
    so are those of samplers of other packages without ``set_epoch``, the earlier ones of a resumed
    run included. Calls ``set_epoch`` if the sampler has it. Not thread-safe, except for
    :meth:`state`.

    Args:
        sampler: See :func:`check_sampler`.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler = sampler
        self._length = len(sampler)
        self._seed = seed
        own = getattr(sampler, "generator", None)
        self._generator = own if isinstance(own, torch.Generator) else None
        # Such a sampler may have state of another kind, such as a generator of NumPy.
        self._continues = not (
            isinstance(sampler, range | Tensor | EpochOrder)
            or callable(getattr(sampler, "set_epoch", None))
            or type(sampler).__module__.startswith("torch.utils.data.")
        )
        self._next = 0
        self._lock = threading.Lock()
        self._open: Drawn | None = None  # of the last epoch, which advances the generator
        # The generator's state before each of the last epochs.
        self._states: dict[int, Tensor] = {}
        self._keep_state()

    def draw(self, epoch: int, num_samples: int) -> Tensor | EpochOrder:
        """Iterate the sampler once: the epoch's samples, int64, of shape ``(len(self),)``.

        See :func:`computed_order` for samplers that are not iterated.

        Args:
            epoch: Epoch, counted from 0.
            num_samples: Length of the data set in this epoch.

        Raises:
            ValueError: The number of samples is not the sampler's length, or an index is out of
                range.
        """
        if self._generator is None:
            while self._continues and self._next < epoch:  # of a resumed run
                self._draw(self._next, num_samples)
                self._next += 1
            self._next = max(self._next, epoch + 1)
            return self._draw(epoch, num_samples)
        if epoch < self._next:
            if epoch not in self._states:
                raise ValueError(f"the sampler's generator is past epoch {epoch}")
            if self._open is not None:  # it continues with the sampler's generator
                again = torch.Generator()
                again.set_state(self._states[epoch])
                return self._draw(epoch, num_samples, again)
            self._generator.set_state(self._states[epoch])
            self._next = epoch
        while True:
            with self._lock:
                self._finish()
            drawn = self._next
            order = self._draw(drawn, num_samples)
            with self._lock:
                self._next = drawn + 1
                self._open = order if isinstance(order, Drawn) else None
                if self._open is None:
                    self._keep_state()
            if drawn == epoch:
                return order

    def _finish(self) -> None:
        """Advance the generator to the end of the last epoch that was begun."""
        if self._open is not None:
            self._open.finish()
            self._open = None
            self._keep_state()

    def state(self, since: int) -> SavedSampler | None:
        """See :meth:`EpochIndex.generator_state`; from any thread."""
        with self._lock:
            if since >= self._next:
                self._finish()
        states = self._states.copy()
        later = [epoch for epoch in states if epoch >= since]
        if not later:
            return None
        return SavedSampler(epoch=min(later), state=states[min(later)])

    def restore(self, saved: SavedSampler) -> None:
        """Continue from a state that :meth:`state` returned."""
        if self._generator is not None:
            self._generator.set_state(saved.state)
            self._next = saved.epoch
            self._states = {}
            self._keep_state()

    def _keep_state(self) -> None:
        if self._generator is not None:
            kept = {e: s for e, s in self._states.items() if e > self._next - 2 * _KEPT_EPOCHS}
            self._states = {**kept, self._next: self._generator.get_state()}

    def _draw(
        self, epoch: int, num_samples: int, generator: torch.Generator | None = None
    ) -> Tensor | EpochOrder:
        if callable(getattr(self._sampler, "set_epoch", None)):
            self._sampler.set_epoch(epoch)
        require_length("sampler", epoch, len(self._sampler), self._length)
        seed = int(np.random.SeedSequence([self._seed, epoch]).generate_state(1)[0])
        with self._seeded(seed):
            computed = computed_order(self._sampler, num_samples, generator)
            if computed is not None:
                return computed
            order = self._sampler
            if not isinstance(order, Tensor):
                order = torch.from_numpy(np.fromiter(map(_position, order), np.int64))
        if len(order) != self._length:
            raise ValueError(
                f"the sampler yielded {len(order)} samples in epoch {epoch}, and its length is "
                f"{self._length}: both must agree in every epoch"
            )
        return check_order(epoch, order, num_samples)

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


def _position(key: Any) -> int:
    try:
        return operator.index(key)
    except TypeError as error:
        raise TypeError(
            f"the sampler yielded {key!r:.60}, of type {type(key).__name__}: yield integers, and "
            "translate them to keys of another kind in the data set"
        ) from error


def require_length(kind: str, epoch: int, length: int, expected: int) -> None:
    """Raise ``ValueError`` for an epoch of another length than the first one.

    Schedules, shares and checkpoints count on batches of equal epochs.

    Args:
        kind: The object that the length is of, for the message.
        length: Its length now.
        expected: Its length at the start of the run.
    """
    if length != expected:
        raise ValueError(
            f"the {kind} has length {length} in epoch {epoch} and had {expected} at the start of "
            "the run, whose epochs all have one length: give it the largest length from the "
            f"start and draw from a part of it, by a sampler of {expected} samples with "
            "set_epoch(), or train each length in a run of its own that starts from the weights "
            "of the last"
        )


def check_order(epoch: int, order: Tensor, num_samples: int) -> Tensor:
    """An epoch's order, if all of it is in the data set.

    Raises:
        ValueError: It is not.
    """
    low, high = (int(value) for value in order.aminmax())
    if low < 0 or high >= num_samples:
        raise ValueError(
            f"the sampler yielded index {low if low < 0 else high} in epoch {epoch}, and the data "
            f"set has {num_samples} samples"
        )
    return order


def check_sampler(sampler: Any, empty: str = "sampler(s): it has no index") -> Any:
    """Return ``sampler`` if it is an iterable of single indices with a length.

    Args:
        sampler: A sampler of PyTorch, or another iterable.
        empty: The message if it is empty.

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
        raise ValueError(empty)
    return sampler
