"""Streams: data sets without indices, whose items one reader hands out in order."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from runtime.core.context import LoaderView, current_worker, worker_context
from runtime.core.rng import thread_generator
from runtime.data.batches import epoch_generator
from runtime.data.dataset import Collate, DatasetAdapter, check_batch

logger = logging.getLogger(__name__)

COUNTING_S = 10.0
"""A stream of unknown length is read through once before the run, for so long at the most."""

STATES_SHARE = 0.02
"""Part of the time that may go into asking a stream for its state."""

STATES_APART_S = 0.1
"""Time between two states at the least, in seconds: they are kept as long as items are."""

STATES_KEPT = 8
"""States that are kept of what nobody asks for again: a checkpoint may be that old."""


class StreamAdapter(DatasetAdapter):
    """A stream as a data set whose sample ``epoch * num_samples + i`` is item ``i`` of an epoch.

    :meth:`load` reads the stream up to the batch requested, one thread at a time, so items keep
    the stream's order. An item is kept until :meth:`release_before`. Each epoch is one
    ``iter(dataset)``, read to its end before the next starts. A resumed epoch continues from a
    saved state if the stream (or its iterator) has ``state_dict`` and ``load_state_dict``;
    otherwise trained items are read again and skipped.

    Args:
        dataset: Has ``__iter__``, which begins anew each time; ``set_epoch`` is called before
            where there is one.
        length: Items of an epoch; ``None``: ``len(dataset)``, else they are counted.
        batch_size: Items of a batch.
        collate_fn: Makes a batch of a list of items; ``None``: PyTorch's.
        seed: Seed of the run: ``current_worker().generator`` is keyed by it and the epoch.

    Raises:
        TypeError: It can be read only once.
        ValueError: It is empty, or so long that counting takes more than ``COUNTING_S``.
    """

    def __init__(
        self,
        dataset: Any,
        length: int | None,
        *,
        batch_size: int,
        collate_fn: Collate | None,
        seed: int,
    ) -> None:
        self._name = type(dataset).__name__
        if isinstance(dataset, Iterator) and not isinstance(dataset, IterableDataset):
            raise TypeError(
                f"the data set is of type {self._name}, which can be read only once: pass an "
                "object whose __iter__ begins anew in each epoch, such as an IterableDataset"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._collate = collate_fn
        self._seed = seed
        self._to_the_end = length is None
        self.num_samples = self._length() if length is None else length
        if self.num_samples == 0:
            raise ValueError("the data set is empty: give it at least one sample")
        self._floor = 0
        self._reading = threading.Lock()
        # What it guards: items that were read and may be asked for, by their index.
        self._items: dict[int, Any] = {}
        self._first = 0  # nothing below it is kept
        self._next = 0  # what is read next
        self._iterator: Iterator[Any] | None = None
        self._generator = torch.Generator()
        self._error: Exception | None = None
        self._warned = False
        self._restored_epoch = -1
        self._from: Mapping[str, Any] | None = None  # the state that a resumed run begins at
        self._states_from = 0.0  # the next state is not asked for before this time
        self._keeping = threading.Lock()
        self._states: dict[int, dict[str, Any]] = {}  # by the item that comes next

    def _length(self) -> int:
        try:
            return len(self._dataset)
        except (TypeError, NotImplementedError):
            pass
        logger.info("%s has no length: it is read through once to count its items", self._name)
        count, until = 0, time.monotonic() + COUNTING_S
        view = LoaderView(0, epoch_generator(self._seed, 0))
        with worker_context(view), thread_generator(view.generator):
            for _ in self._begin(0):
                count += 1
                if time.monotonic() > until:
                    raise ValueError(
                        f"{self._name} has no length, and {count:,} items were counted in "
                        f"{COUNTING_S:g} s without an end: give the items of an epoch by "
                        "dataset(stream, length=n)"
                    )
        return count

    def release_before(self, epoch: int, batch: int) -> None:
        """Nobody asks again for what comes before a batch of an epoch.

        From one thread. Takes no lock, since the user's code may run under it for long: memory
        is given back when the next batch is read. Before the first batch it says where a
        resumed run goes on.
        """
        self._floor = max(self._floor, self._item(epoch, batch))

    def _item(self, epoch: int, batch: int) -> int:
        """The first item of a batch."""
        return epoch * self.num_samples + min(batch * self._batch_size, self.num_samples)

    def state(self, epoch: int, batch: int) -> dict[str, Any] | None:
        """The last state from which a batch can be reached, for a checkpoint; from any thread."""
        item = self._item(epoch, batch)
        with self._keeping:
            known = [index for index in self._states if index <= item]
            return self._states[max(known)] if known else None

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Begin at a state that :meth:`state` gave; before the first batch."""
        self._from = state

    def load(self, indices: Tensor) -> Any:
        """Read on to the last of ``indices``, and collate them; blocks while others read.

        Raises:
            ValueError: The stream ended before; or see :func:`check_batch`.
        """
        with self._reading:
            self._let_go()
            while self._next <= int(indices[-1]):
                self._read()
            items = [self._items[index] for index in indices.tolist()]
        if self._collate is None:
            return check_batch(default_collate(items), len(items))
        return check_batch(self._collate(items), None)

    def _let_go(self) -> None:
        floor = self._floor
        if self._iterator is None:  # an epoch that is begun is read to its end
            self._next = max(self._next, floor)
        released = max(self._first, min(floor, self._next))
        for index in range(self._first, released):
            self._items.pop(index, None)
        self._first = released
        with self._keeping:
            past = [index for index in self._states if index <= floor]
            for index in past[:-STATES_KEPT]:
                del self._states[index]

    def _read(self) -> None:
        """Take one item; an error of the stream comes again at each later call."""
        if self._error is not None:
            raise self._error
        epoch, position = divmod(self._next, self.num_samples)
        worker = current_worker()
        begins = self._iterator is None
        if begins:
            self._generator = epoch_generator(self._seed, epoch)
        try:
            view = LoaderView(worker.rank, self._generator, worker)
            with worker_context(view), thread_generator(self._generator):
                if begins:
                    for skipped in range(self._go_to(epoch, position), position):
                        self._take(epoch, skipped)
                else:
                    self._note_state()
                self._items[self._next] = self._take(epoch, position)
                if position + 1 == self.num_samples:
                    self._finish()
        except Exception as error:
            self._error = error
            raise
        self._next += 1

    def _begin(self, epoch: int) -> Iterator[Any]:
        if callable(getattr(self._dataset, "set_epoch", None)):
            self._dataset.set_epoch(epoch)
        return iter(self._dataset)

    def _go_to(self, epoch: int, position: int) -> int:
        """Begin an epoch, at the state there is of it; gives the item that comes first."""
        state, self._from = self._from, None
        first = epoch * self.num_samples
        knows = state is not None and first < state["item"] <= first + position
        if state is not None and knows and _has_state(self._dataset):
            # It says from where the next iterator goes on.
            self._dataset.load_state_dict(state["stream"])
            self._iterator = self._begin(epoch)
        else:
            iterator: Any = self._begin(epoch)
            self._iterator = iterator
            if state is None or not knows or not _has_state(iterator):
                return 0
            iterator.load_state_dict(state["stream"])
        self._restored_epoch = epoch
        self._generator.set_state(state["generator"])
        return int(state["item"]) - first

    def _finish(self) -> None:
        """An epoch was read: let the iterator come to its own end, where that is here."""
        iterator, self._iterator = self._iterator, None
        assert iterator is not None
        if self._to_the_end and next(iterator, self) is not self and not self._warned:
            self._warned = True
            logger.warning(
                "%s has more items than its length, %d: the others are left out",
                self._name,
                self.num_samples,
            )

    def _note_state(self) -> None:
        """Ask the stream where it stands, if it knows and not too often."""
        owner = next(filter(_has_state, (self._dataset, self._iterator)), None)
        now = time.monotonic()
        if owner is None or now < self._states_from:
            return
        state = {
            "item": self._next,
            "generator": self._generator.get_state(),
            "stream": copy.deepcopy(owner.state_dict()),
        }
        took = time.monotonic() - now
        self._states_from = now + max(STATES_APART_S, took / STATES_SHARE)
        with self._keeping:
            self._states[self._next] = state

    def _take(self, epoch: int, position: int) -> Any:
        assert self._iterator is not None
        try:
            return next(self._iterator)
        except StopIteration:
            remedy = "give what it has in each epoch by dataset(stream, length=n)"
            if epoch == self._restored_epoch:
                remedy = (
                    "its state in the checkpoint left something out, a shuffle buffer perhaps; "
                    "wrap it in an object with __iter__ alone, so that what was trained is read "
                    "again"
                )
            raise ValueError(
                f"{self._name} ended after {position:,} items in epoch {epoch}, and its length is "
                f"{self.num_samples:,}: {remedy}"
            ) from None


def is_stream(dataset: Any) -> bool:
    """Whether a data set can be iterated but not read by index."""
    if isinstance(dataset, IterableDataset):
        return True
    kind = type(dataset)
    by_index = hasattr(kind, "__getitem__") or callable(getattr(dataset, "get_batch", None))
    return hasattr(kind, "__iter__") and not by_index and not isinstance(dataset, type)


def _has_state(owner: Any) -> bool:
    """Whether it can say where it stands, and go on from there."""
    return all(callable(getattr(owner, f"{verb}state_dict", None)) for verb in ("", "load_"))
