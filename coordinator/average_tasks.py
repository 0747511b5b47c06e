"""AverageTasks: tasks of the ranks on an average, from the time they are due to their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from coordinator.config import CoordinatorConfig
from coordinator.messages import Task, TaskDone, TaskKind


class AverageTasks:
    """Tasks on the averages that close epochs, on those within an epoch, and on those that the
    bodies of own loops request.

    A task is due until its results are known: it is begun again if its average is given up, or if
    the rank that ends it dies.

    Args:
        choose: The rank of a task that begins now; ``within=True``: within an epoch.
        num_trained: Batches trained by all ranks so far.
        oldest: The oldest epoch that is open, if any.

    Attributes:
        callers: Ranks whose requests wait for a round, which is forced if none is due. A rank
            makes one request at a time.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        live: Callable[[], Collection[int]],
        choose: Callable[..., int],
        num_trained: Callable[[], int],
        oldest: Callable[[], int | None],
    ) -> None:
        self._config = config
        self._live, self._choose = live, choose
        self._num_trained, self._oldest = num_trained, oldest
        self._num_begun = 0
        self._open: dict[int, _OpenTask] = {}
        self._passed: dict[TaskKind, int] = {}  # multiples of the steps between two tasks
        self._at_end: dict[int, frozenset[TaskKind]] = {}  # of trained epochs
        self._results: dict[int, dict[TaskKind, dict[str, float]]] = {}
        self._within: list[TaskDone] = []  # results of the present round
        self.callers: set[int] = set()

    @property
    def _every_steps(self) -> dict[TaskKind, int]:
        c = self._config
        every = {TaskKind.EVALUATE: c.eval_every, TaskKind.VALIDATE: c.val_every_steps}
        return {kind: steps for kind, steps in every.items() if steps is not None}

    def _reached(self) -> list[TaskKind]:
        """The tasks within an epoch that are due for the batches trained so far."""
        num, every = self._num_trained(), self._every_steps
        return [kind for kind, n in every.items() if num // n > self._passed.get(kind, 0)]

    @property
    def next_within(self) -> int | None:
        """Batches of all ranks after which a task is due within an epoch; ``None``: none is."""
        every = self._every_steps.items()
        return min(((self._passed.get(kind, 0) + 1) * n for kind, n in every), default=None)

    def mark(self, kinds: Collection[TaskKind]) -> None:
        """Count these tasks as done for the batches trained so far."""
        for kind, every in self._every_steps.items():
            if kind in kinds:
                self._passed[kind] = self._num_trained() // every

    def at_end(self, epoch: int) -> frozenset[TaskKind]:
        """The tasks on the average that closes a trained epoch."""
        if epoch not in self._at_end:
            c, number, due = self._config, epoch + 1, set()
            if c.evaluate:
                due.add(TaskKind.EVALUATE)
            if c.checkpoint_every is not None and number % c.checkpoint_every == 0:
                due.add(TaskKind.HAND_OVER)
            by_epochs = c.val_batches > 0 and number % c.val_every == 0
            if by_epochs or TaskKind.VALIDATE in self._reached():
                due.add(TaskKind.VALIDATE)
            self._at_end[epoch] = frozenset(due)
            self._results[epoch] = {}
        return self._at_end[epoch]

    def due(self, epoch: int | None) -> list[TaskKind]:
        """The tasks that are due on the present average, and that no live rank is doing.

        Args:
            epoch: The trained epoch that the average closes, or has closed; ``None``: it is within
                the open one.
        """
        if epoch is None:
            return [] if self._oldest() is None or self.is_busy else self._reached()
        tasks = [each.task for each in self._open.values() if not each.is_void]
        doing = {task.kind for task in tasks if (task.epoch, task.at) == (epoch, None)}
        left = self.at_end(epoch) - self._results[epoch].keys() - doing
        return [kind for kind in TaskKind if kind in left]

    def is_done(self, epoch: int) -> bool:
        """True if a trained epoch has the results of all its tasks."""
        return self.at_end(epoch) <= self._results[epoch].keys()

    def take_results(self, epoch: int) -> dict[TaskKind, dict[str, float]]:
        """Remove an epoch, and return the results of its tasks."""
        self._at_end.pop(epoch, None)
        return self._results.pop(epoch, {})

    def take_within(self) -> list[TaskDone]:
        """Count the tasks within epochs that have results as done, and return their results."""
        found, self._within = self._within, []
        self.mark({event.task.kind for event in found})
        return found

    @property
    def is_busy(self) -> bool:
        """True while ranks do tasks within an epoch, or on an average that was given up."""
        return any(each.task.at is not None or each.is_void for each in self._open.values())

    def begin(self, epoch: int | None, *, requested: bool = False) -> tuple[Task, ...]:
        """Begin the due tasks.

        Args:
            epoch: As for :meth:`due`.
        """
        number, at = self._oldest() or 0, self._num_trained()
        if epoch is None:
            tasks = [self._add(kind, number, at) for kind in self.due(None)]
        else:
            tasks = [self._add(kind, epoch, None) for kind in self.due(epoch)]
        callers: Sequence[int] = sorted(self.callers) if requested else ()
        self.callers.difference_update(callers)
        return *tasks, *(self._add(TaskKind.REQUESTED, number, at, rank) for rank in callers)

    def _add(self, kind: TaskKind, epoch: int, at: int | None, rank: int | None = None) -> Task:
        if rank is None:
            rank = self._choose(within=at is not None)
        self._num_begun += 1
        task = Task(id=self._num_begun, kind=kind, epoch=epoch, at=at, rank=rank)
        self._open[task.id] = _OpenTask(task, set(self._live()) if kind.is_shared else {rank})
        return task

    def done(self, event: TaskDone) -> bool:
        """Record that a rank has done its part; True if the results of the task are known now."""
        task, has_results = event.task, event.values is not None
        if task.kind is TaskKind.REQUESTED and has_results:
            self.callers.discard(event.rank)
        each = self._open.get(task.id)
        if each is None:
            return False  # its average was given up
        self._remove(each, event.rank)
        if not has_results or each.is_void:
            return False
        if task.at is not None:
            self._within.append(event)
        elif task.epoch in self._results:
            self._results[task.epoch][task.kind] = dict(event.values or ())
        return True

    def _remove(self, each: _OpenTask, rank: int) -> None:
        each.ranks.discard(rank)
        if not each.ranks:
            del self._open[each.task.id]

    def lose(self, rank: int) -> None:
        """A rank has died: what it ends is due again, and its request is dropped."""
        self.callers.discard(rank)
        for each in list(self._open.values()):
            self._remove(each, rank)

    def cancel(self, tasks: Sequence[Task], averaged: Collection[int]) -> None:
        """The average of these tasks is given up: they are due again, with or without results.

        Args:
            averaged: Ranks that have the average, and do the tasks nevertheless.
        """
        self._within = [event for event in self._within if event.task not in tasks]
        for task in tasks:
            if task.at is None and task.epoch in self._results:
                self._results[task.epoch].pop(task.kind, None)
            each = self._open.get(task.id)
            if each is None:
                continue
            each.is_void = True
            if each.task.kind is TaskKind.REQUESTED and each.task.rank in each.ranks:
                self.callers.add(each.task.rank)
            for rank in each.ranks.difference(averaged):
                self._remove(each, rank)


@dataclass(slots=True)
class _OpenTask:
    """A task in progress.

    Attributes:
        ranks: Ranks that have not done their part.
        is_void: Its average was given up, so that its results do not count.
    """

    task: Task
    ranks: set[int]
    is_void: bool = False
