"""Streams: iterable data sets without indices, read in order."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from runtime.checkpoint.content import SavedStream
from runtime.core.context import LoaderView, current_worker, worker_context
from runtime.core.rng import thread_generator
from runtime.data.batches import epoch_generator
from runtime.data.dataset import TRAINING, Collate, DatasetAdapter, check_batch, empty_text
from runtime.data.epoch_index import require_length
from runtime.data.shared_reads import SharedReads

logger = logging.getLogger(__name__)

COUNT_LIMIT_S = 10.0
"""Time limit for counting the items of a stream without a length, in seconds."""

STATE_TIME_FRACTION = 0.02
"""Maximum fraction of time spent in the stream's ``state_dict()``."""

STATE_INTERVAL_S = 0.1
"""Minimum interval between two saved states, in seconds."""

NUM_STATES_KEPT = 8
"""States kept of released items, for checkpoints that are a little older."""


class StreamAdapter(DatasetAdapter):
    """A stream as a data set; sample ``epoch * num_samples + i`` is item ``i`` of an epoch.

    :meth:`load` reads the stream up to the batch requested, one thread at a time, so items keep
    the stream's order. An item is kept until :meth:`release_before`. Each epoch is one
    ``iter(dataset)``, read to its end before the next starts. A resumed epoch continues from a
    saved state if the stream (or its iterator) has ``state_dict`` and ``load_state_dict``;
    otherwise trained items are read again and skipped.

    Args:
        dataset: An object whose ``__iter__`` restarts. ``set_epoch`` is called first if it exists.
        length: Items of an epoch; ``None``: ``len(dataset)``, or else the items are counted.
        collate_fn: Collates a list of items into a batch; ``None``: PyTorch's.
        seed: Seed of the run; ``current_worker().generator`` is seeded by it and the epoch.
        lock: See :class:`~runtime.data.shared_reads.SharedReads`.

    Raises:
        TypeError: The stream is an iterator, which can be read only once.
        ValueError: It is empty, or counting took longer than ``COUNT_LIMIT_S``.
    """

    def __init__(
        self,
        dataset: Any,
        length: int | None,
        *,
        batch_size: int,
        collate_fn: Collate | None,
        seed: int,
        lock: bool | None = None,
    ) -> None:
        self._name = type(dataset).__name__
        if isinstance(dataset, Iterator) and not isinstance(dataset, IterableDataset):
            raise TypeError(
                f"the data set is of type {self._name}, which can be read only once: pass an "
                "object whose __iter__ restarts in each epoch, such as an IterableDataset"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._collate = collate_fn
        self._seed = seed
        self._check_end = length is None
        self._counts_itself = False
        self.num_samples = self._length() if length is None else length
        if self.num_samples == 0:
            raise ValueError(empty_text(TRAINING))
        self._released = 0
        self._reading = threading.Lock()
        self._item_reads = SharedReads(dataset, lock=lock, is_serial=True)
        self._collations = SharedReads(collate_fn, lock=lock)
        # Guarded by _reading: items that were read and not released, by index.
        self._items: dict[int, Any] = {}
        self._first = 0  # index of the first item kept
        self._next = 0  # index of the item read next
        self._iterator: Iterator[Any] | None = None
        self._generator = torch.Generator()
        self._error: Exception | None = None
        self._warned = False
        self._restored_epoch = -1
        self._resume_state: SavedStream | None = None
        self._next_state_at = 0.0  # no state is saved before this time
        self._state_lock = threading.Lock()
        self._states: dict[int, SavedStream] = {}  # by the index of the next item

    def _length(self) -> int:
        try:
            length = len(self._dataset)
            self._counts_itself = True
            return length
        except (TypeError, NotImplementedError):
            pass
        logger.info("%s has no length: its items are counted by reading it once", self._name)
        count, until = 0, time.monotonic() + COUNT_LIMIT_S
        view = LoaderView(0, epoch_generator(self._seed, 0))
        with worker_context(view), thread_generator(view.generator):
            for _ in self._start_epoch(0):
                count += 1
                if time.monotonic() > until:
                    raise ValueError(
                        f"{self._name} has no length, and {count:,} items were counted in "
                        f"{COUNT_LIMIT_S:g} s without reaching the end: pass the number of items "
                        "in an epoch with dataset(stream, length=n)"
                    )
        return count

    def release_before(self, epoch: int, batch: int) -> None:
        """Release all items before a batch of an epoch; they are not loaded again.

        Called by one thread. Acquires no lock, under which user code may run for long; memory is
        freed when the next batch is read. Called before the first batch, sets the position at
        which a resumed run continues.
        """
        self._released = max(self._released, self._item(epoch, batch))

    def _item(self, epoch: int, batch: int) -> int:
        """Index of a batch's first item."""
        return epoch * self.num_samples + min(batch * self._batch_size, self.num_samples)

    def state(self, epoch: int, batch: int) -> SavedStream | None:
        """The last saved state at or before a batch, for a checkpoint. Thread-safe."""
        item = self._item(epoch, batch)
        with self._state_lock:
            saved = [index for index in self._states if index <= item]
            return self._states[max(saved)] if saved else None

    def restore(self, state: SavedStream | None) -> None:
        """Resume from a state returned by :meth:`state`; called before the first batch."""
        self._resume_state = state

    def load(self, indices: Tensor) -> Any:
        """Read up to the last of ``indices`` and collate them; blocks while another thread reads.

        Raises:
            ValueError: The stream ended early; or see :func:`check_batch`.
        """
        with self._reading, self._item_reads.turn() as turn:
            self._free_items()
            while self._next <= int(indices[-1]):
                self._read()
            items = [self._items[index] for index in indices.tolist()]
            turn.take(())
        if self._collate is None:
            return check_batch(default_collate(items), len(items))
        collate = self._collate
        if self._collations.are_free:
            return check_batch(collate(items), None)
        with self._collations.turn() as turn:
            return turn.take(check_batch(collate(items), None))

    def _free_items(self) -> None:
        floor = self._released
        if self._iterator is None:  # an epoch in progress is read to its end
            self._next = max(self._next, floor)
        released = max(self._first, min(floor, self._next))
        for index in range(self._first, released):
            self._items.pop(index, None)
        self._first = released
        with self._state_lock:
            past = [index for index in self._states if index <= floor]
            for index in past[:-NUM_STATES_KEPT]:
                del self._states[index]

    def _read(self) -> None:
        """Read one item; an exception of the stream is raised again by every later call."""
        if self._error is not None:
            raise self._error
        epoch, position = divmod(self._next, self.num_samples)
        worker = current_worker()
        starts_epoch = self._iterator is None
        if starts_epoch:
            self._generator = epoch_generator(self._seed, epoch)
        try:
            view = LoaderView(worker.rank, self._generator, worker)
            with worker_context(view), thread_generator(self._generator):
                if starts_epoch:
                    for skipped in range(self._seek(epoch, position), position):
                        self._next_item(epoch, skipped)
                else:
                    self._save_state()
                self._items[self._next] = self._next_item(epoch, position)
                if position + 1 == self.num_samples:
                    self._finish()
        except Exception as error:
            self._error = error
            raise
        self._next += 1

    def _start_epoch(self, epoch: int) -> Iterator[Any]:
        if callable(getattr(self._dataset, "set_epoch", None)):
            self._dataset.set_epoch(epoch)
        if self._counts_itself:
            require_length("data set", epoch, len(self._dataset), self.num_samples)
        return iter(self._dataset)

    def _seek(self, epoch: int, position: int) -> int:
        """Start an epoch, from a saved state if there is one; return its first position."""
        state, self._resume_state = self._resume_state, None
        first = epoch * self.num_samples
        is_usable = state is not None and first < state.item <= first + position
        if state is not None and is_usable and _has_state(self._dataset):
            # The data set's next iterator starts there.
            self._dataset.load_state_dict(state.stream)
            self._iterator = self._start_epoch(epoch)
        else:
            iterator: Any = self._start_epoch(epoch)
            self._iterator = iterator
            if state is None or not is_usable or not _has_state(iterator):
                return 0
            iterator.load_state_dict(state.stream)
        self._restored_epoch = epoch
        self._generator.set_state(state.generator)
        return state.item - first

    def _finish(self) -> None:
        """Finish an epoch; exhaust the iterator if its length was not set by the user."""
        iterator, self._iterator = self._iterator, None
        assert iterator is not None
        if self._check_end and next(iterator, self) is not self and not self._warned:
            self._warned = True
            logger.warning(
                "%s has more items than its length, %d: the rest is ignored",
                self._name,
                self.num_samples,
            )

    def _save_state(self) -> None:
        """Save the stream's state, if it has one and one is due."""
        owner = next(filter(_has_state, (self._dataset, self._iterator)), None)
        now = time.monotonic()
        if owner is None or now < self._next_state_at:
            return
        state = SavedStream(
            item=self._next,
            generator=self._generator.get_state(),
            stream=copy.deepcopy(owner.state_dict()),
        )
        took = time.monotonic() - now
        self._next_state_at = now + max(STATE_INTERVAL_S, took / STATE_TIME_FRACTION)
        with self._state_lock:
            self._states[self._next] = state

    def _next_item(self, epoch: int, position: int) -> Any:
        assert self._iterator is not None
        try:
            return next(self._iterator)
        except StopIteration:
            remedy = "pass the number of items in an epoch with dataset(stream, length=n)"
            if epoch == self._restored_epoch:
                remedy = (
                    "its state in the checkpoint is incomplete, perhaps without a shuffle buffer; "
                    "wrap it in an object with only __iter__, so that trained items are read again"
                )
            raise ValueError(
                f"{self._name} ended after {position:,} items in epoch {epoch}, and its length is "
                f"{self.num_samples:,}: {remedy}"
            ) from None


def is_stream(dataset: Any) -> bool:
    """True if a data set can be iterated but not read by index."""
    if isinstance(dataset, IterableDataset):
        return True
    kind = type(dataset)
    by_index = hasattr(kind, "__getitem__") or callable(getattr(dataset, "get_batch", None))
    return hasattr(kind, "__iter__") and not by_index and not isinstance(dataset, type)


def _has_state(owner: Any) -> bool:
    """True if ``owner`` has ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(owner, f"{verb}state_dict", None)) for verb in ("", "load_"))
