"""Validator: divides the validation set among the ranks, and combines their results.

The batches are the same for any number of ranks, and each is evaluated by one rank. Results are
kept batch by batch, so that the means do not depend on the division.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter

from coordinator import messages as m
from coordinator.batch_means import BatchMeans, weighted_means
from coordinator.config import CoordinatorConfig
from coordinator.splitting import BatchSet, compress, split_by_ratio


class Validator:
    """The validations of a run: one for each average that closes an epoch, and one within an
    epoch at a time.

    Attributes:
        of_epoch: Validations at the end of an epoch, incomplete ones only.
        within: The validation within the open epoch, while it is incomplete.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self._num_begun = 0
        self._rates: dict[int, float] = {}  # batches a second
        self.of_epoch: dict[int, Validation] = {}
        self.within: Validation | None = None

    def is_due(self, epoch: int) -> bool:
        """True if the average that closes an epoch is validated."""
        return self._config.val_batches > 0 and (epoch + 1) % self._config.val_every == 0

    def begin(self, epoch: int, at: int | None, speeds: Mapping[int, float]) -> Validation:
        """Begin a validation; an incomplete one of the same epoch is dropped.

        Args:
            epoch: The epoch.
            at: Batches of all ranks before it; ``None``: at the end of the epoch.
            speeds: Training speed of each live rank, in any unit; 0: not measured.
        """
        self._num_begun += 1
        validation = Validation(id=self._num_begun, epoch=epoch, at=at)
        validation.tasks = self._divide(BatchSet([range(self._config.val_batches)]), speeds)
        if at is None:
            self.of_epoch[epoch] = validation
        else:
            self.within = validation
        return validation

    def _divide(self, batches: BatchSet, speeds: Mapping[int, float]) -> Tasks:
        """Take consecutive batches for each rank, in proportion to the ranks' speeds."""
        ranks = list(speeds)
        weights = [self._rates.get(rank, 0.0) for rank in ranks]
        if not all(weights):
            weights = list(speeds.values())
        if not all(weights):
            weights = [1.0] * len(ranks)
        counts = split_by_ratio(len(batches), weights)
        return {r: batches.take(count) for r, count in zip(ranks, counts, strict=True) if count}

    def reassign(self, validation: Validation, speeds: Mapping[int, float]) -> Tasks:
        """Divide the batches of ranks that have died among the live ones, whose weights are still
        those of the validation.

        Returns:
            The new tasks.
        """
        live = {rank: task for rank, task in validation.tasks.items() if rank in speeds}
        missing = BatchSet([range(self._config.val_batches)])
        missing.remove(chain(*live.values(), compress(sorted(validation.results))))
        new = self._divide(missing, speeds)
        validation.tasks = {r: (*live.get(r, ()), *new.get(r, ())) for r in live.keys() | new}
        return new

    def on_report(self, event: m.ValidationReport) -> Validation | None:
        """Record results; returns the validation if they complete it."""
        validation = self._find(event.id)
        task = None if validation is None else validation.tasks.get(event.rank)
        if validation is None or task is None:
            return None  # its average was rolled back
        found = {position: tuple(g) for position, g in groupby(event.results, _position)}
        validation.results |= found
        left = BatchSet(task)
        left.remove(compress(sorted(found)))
        validation.tasks[event.rank] = left.spans
        seconds, num = validation.spent.get(event.rank, (0.0, 0))
        spent = (seconds + event.seconds, num + len(found))
        validation.spent[event.rank] = spent
        if not left:
            del validation.tasks[event.rank]
            if spent[0] > 0:
                self._rates[event.rank] = spent[1] / spent[0]
        if len(validation.results) < self._config.val_batches:
            return None
        self.cancel(validation)
        return validation

    def _find(self, number: int) -> Validation | None:
        for validation in (self.within, *self.of_epoch.values()):
            if validation is not None and validation.id == number:
                return validation
        return None

    def cancel(self, validation: Validation | None) -> None:
        """Drop a validation, whose later results are ignored."""
        if validation is None:
            return
        if self.within is validation:
            self.within = None
        if self.of_epoch.get(validation.epoch) is validation:
            del self.of_epoch[validation.epoch]


_position = attrgetter("position")
Tasks = dict[int, tuple[range, ...]]
"""Batches of each rank."""


@dataclass(slots=True)
class Validation:
    """A validation in progress.

    Attributes:
        id: Counts the validations of the run.
        epoch: The epoch that closes, or within which it takes place.
        at: Batches of all ranks before it; ``None``: at the end of the epoch.
        tasks: Batches that ranks, also dead ones, have not reported.
        results: Results by batch: of its parts, if there was no memory for the whole.
        spent: Seconds and batches reported by each rank.
    """

    id: int
    epoch: int
    at: int | None
    tasks: Tasks = field(default_factory=dict)
    results: dict[int, tuple[BatchMeans, ...]] = field(default_factory=dict)
    spent: dict[int, tuple[float, int]] = field(default_factory=dict)

    def task(self, rank: int) -> m.ValidationTask | None:
        """The task of a rank; ``None``: it has none."""
        batches = self.tasks.get(rank)
        return None if batches is None else self.message(batches)

    def message(self, batches: tuple[range, ...]) -> m.ValidationTask:
        """A task with these batches."""
        return m.ValidationTask(id=self.id, epoch=self.epoch, batches=batches)

    def waits_for(self, live: Iterable[int]) -> bool:
        """True if a live rank has not reported its batches."""
        return not self.tasks.keys().isdisjoint(live)

    @property
    def means(self) -> dict[str, float]:
        """The weighted means of all values."""
        return weighted_means(part for _, parts in sorted(self.results.items()) for part in parts)

    @property
    def duration_s(self) -> float:
        """Time of the rank that took longest."""
        return max((seconds for seconds, _ in self.spent.values()), default=0.0)
