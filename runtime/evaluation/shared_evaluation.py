"""SharedEvaluations: evaluations that the ranks of a run do together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from coordinator.messages import Task, TaskKind
from runtime.core.errors import CollectiveAborted
from runtime.core.group_gate import GroupGate
from runtime.evaluation.batch_means import BatchMeans
from runtime.evaluation.batch_source import BatchSource, SampleRange
from runtime.evaluation.pending_means import EvaluationFn, EvaluationView, read_means


class SharedEvaluations:
    """Evaluations in progress, and calls of ``worker.evaluate`` that wait for one. Thread-safe.

    A rank takes the next batch of the data set when it has completed one, until none is left. The
    rank of a task is the last to end its part: it waits for the batches of the others, and
    evaluates those of ranks that have died meanwhile, since it still has the average. In lockstep
    all ranks wait for each other, and all have the results.

    Args:
        gate: Of the run.
    """

    def __init__(self, gate: GroupGate | None = None) -> None:
        self._gate = gate or GroupGate()
        self._condition = self._gate.condition
        self._open: dict[int | tuple[int, int], _Evaluation] = {}
        self._calls: dict[int, EvaluationCall] = {}  # by caller
        self._last_ended = 0  # task
        self._dead: set[int] = set()

    def call(
        self,
        caller: int,
        dataset: Any,
        fn: EvaluationFn,
        read: Callable[[Any], BatchSource],
        *,
        after: int = 0,
    ) -> EvaluationCall:
        """Register a call, before its request is sent.

        Args:
            fn: ``f(model, batch)``, called in the threads of all ranks.
            after: The last round whose average does not contain all training of the caller.
        """
        call = EvaluationCall(dataset, fn, read, after)
        with self._condition:
            self._calls[caller] = call
        return call

    def close(self, caller: int) -> None:
        """Remove a call: no other rank evaluates for it any more."""
        with self._condition:
            call = self._calls.pop(caller, None)
            if call is not None and call.task is not None:
                self._end(call.task)

    def join(
        self, task: Task, rank: int, round: int, source: BatchSource | None = None
    ) -> EvaluationPart | None:
        """Take part in a task.

        Args:
            rank: The rank that joins, which has the average.
            round: Id of the round of the average.
            source: The batches, unless they are those of a call.

        Returns:
            The part of the rank; ``None``: the task is over, or its call is another one.
        """
        with self._condition:
            found = self._open.get(task.id)
            if found is None:
                is_over = task.id <= self._last_ended or task.rank in self._dead
                if is_over and rank != task.rank:
                    return None
                found = self._begin(task, round, source)
            if found is None:
                return None
            found.claims[rank] = {}
            return EvaluationPart(self, found, rank)

    def _begin(self, task: Task, round: int, source: BatchSource | None) -> _Evaluation | None:
        found = _Evaluation(task.id, ender=task.rank, source=source)
        if task.kind is TaskKind.REQUESTED:
            call = self._calls.get(task.rank)
            if call is None or call.is_answered or round <= call.after:
                return None
            if call.task is not None:
                if call.task > task.id:
                    return None
                self._end(call.task)  # its average was given up
            found.call = call
            found.read = partial(call.open, is_repeated=call.task is not None)
            call.task = task.id
        self._open[task.id] = found
        return found

    def meet(
        self,
        key: tuple[int, int],
        rank: int,
        num_ranks: int,
        read: Callable[[], BatchSource] | None,
    ) -> EvaluationPart:
        """Take part in an evaluation of all ranks in lockstep.

        Args:
            key: Generation of the group, and number of its meeting.
            rank: The rank that joins.
            num_ranks: Number of ranks of the group.
            read: Reads the data set; ``None``: this rank takes no batches.
        """
        with self._condition:
            found = self._open.get(key)
            if found is None:
                for old in [each for each in self._open if self._is_aborted(each)]:
                    del self._open[old]
                found = self._open[key] = _Evaluation(key, num_ranks=num_ranks)
            found.read = found.read or read
            found.claims[rank] = {}
            return EvaluationPart(self, found, rank)

    def drop(self, tasks: Collection[Task]) -> None:
        """End tasks whose rank has not received their average."""
        with self._condition:
            for task in tasks:
                self._end(task.id)

    def leave(self, rank: int) -> None:
        """A rank has died: what it ends is over, and its batches are evaluated by the others."""
        with self._condition:
            self._dead.add(rank)
            self._calls.pop(rank, None)
            for key, found in list(self._open.items()):
                claims = found.claims.pop(rank, {})
                found.returned += [claim.samples for claim in claims.values()]
                if found.ender == rank:
                    self._end(key)
            self._condition.notify_all()

    # Called by parts.

    def _end(self, key: int | tuple[int, int]) -> None:
        self._open.pop(key, None)
        if isinstance(key, int):
            self._last_ended = max(self._last_ended, key)

    def _may_continue(self, found: _Evaluation) -> bool:
        is_open = self._open.get(found.key) is found and not self._is_aborted(found.key)
        return is_open and found.error is None

    def _is_aborted(self, key: int | tuple[int, int]) -> bool:
        return self._gate.is_aborted(key[0] if isinstance(key, tuple) else None)


@dataclass(eq=False, slots=True)
class EvaluationCall:
    """A call of ``worker.evaluate`` that waits for the average of a round.

    Attributes:
        after: The last round that does not answer it.
        task: Id of the last task that evaluates for it.
        part: The caller's part, once the call is answered.
    """

    dataset: Any
    fn: EvaluationFn
    read: Callable[[Any], BatchSource]
    after: int
    task: int | None = None
    part: EvaluationPart | None = None

    @property
    def is_answered(self) -> bool:
        """True if the evaluation is complete, or has failed."""
        return self.part is not None

    def open(self, *, is_repeated: bool) -> BatchSource:
        """Read the data set for an average; ``is_repeated``: an earlier one was given up."""
        if is_repeated and isinstance(self.dataset, Iterator):
            raise ValueError(
                "the averaging round of an evaluation was repeated, and its data set, an "
                "iterator, can be read only once: pass a data set that can be read again"
            )
        return self.read(self.dataset)


@dataclass(eq=False, slots=True)
class _Evaluation:
    """An evaluation in progress.

    Attributes:
        key: Id of the task; in lockstep, generation and number of the meeting.
        ender: The rank that ends it and has the results; ``None``: all ranks.
        source: The batches; ``None``: not opened yet.
        call: The call that it answers, if any.
        num_ranks: In lockstep, the ranks that end it.
        num_ended: Those that have ended their parts.
        is_complete: All batches have results.
        claims: By rank that takes part, its batches without a result, by number.
        returned: Batches of ranks that have died.
    """

    key: int | tuple[int, int]
    ender: int | None = None
    source: BatchSource | None = None
    read: Callable[[], BatchSource] | None = None
    call: EvaluationCall | None = None
    num_ranks: int = 0
    num_ended: int = 0
    is_complete: bool = False
    opening: threading.Lock = field(default_factory=threading.Lock)
    claims: dict[int, dict[int, _Claim]] = field(default_factory=dict)
    returned: list[SampleRange] = field(default_factory=list)
    found: list[BatchMeans] = field(default_factory=list)
    error: BaseException | None = None


@dataclass(eq=False, slots=True)
class _Claim:
    """A batch in evaluation, possibly in parts.

    Attributes:
        num_left: Samples without a result.
    """

    samples: SampleRange
    num_left: int
    found: list[BatchMeans] = field(default_factory=list)


class EvaluationPart(BatchSource):
    """The part of one rank: the source of its batches, and the receiver of their results. For the
    thread of the rank.
    """

    num_samples = None

    def __init__(self, shared: SharedEvaluations, found: _Evaluation, rank: int) -> None:
        self._shared = shared
        self._condition = shared._condition
        self._found = found
        self._rank = rank

    @property
    def call(self) -> EvaluationCall | None:
        """The call that is answered, if any."""
        return self._found.call

    def may_continue(self) -> bool:
        """False if no result is required any more."""
        with self._condition:
            return self._shared._may_continue(self._found)

    def take(self) -> SampleRange | None:
        """The next batch, of ranks that have died first; may block while the data set reads."""
        found = self._found
        while True:
            with self._condition:
                samples = found.returned.pop() if found.returned else None
            samples = samples or self._source().take()
            if samples is None or samples.start < samples.stop:
                break
        if samples is not None:
            claim = _Claim(samples, samples.stop - samples.start)
            with self._condition:
                found.claims[self._rank][samples.batch] = claim
        return samples

    def _source(self) -> BatchSource:
        found = self._found
        with found.opening:
            if found.source is None:
                assert found.read is not None, "there is a source, or a way to open it"
                found.source = found.read()
            return found.source

    def __call__(self, samples: SampleRange, data: Any, result: Any, view: EvaluationView) -> None:
        """Receive the result of a batch, or of a part of one; waits for the device."""
        self.give(samples, read_means(samples.start, samples.stop, data, result, view))

    def give(self, samples: SampleRange, means: BatchMeans) -> None:
        """Add the means of a batch, or of a part of one."""
        with self._condition:
            claims = self._found.claims[self._rank]
            claim = claims[samples.batch]
            claim.found.append(means)
            claim.num_left -= samples.stop - samples.start
            if claim.num_left == 0:
                del claims[samples.batch]
                self._found.found += claim.found

    def fail(self, error: BaseException) -> None:
        """Fail the evaluation; the first error counts."""
        with self._condition:
            self._found.error = self._found.error or error

    @property
    def may_end(self) -> bool:
        """True if :meth:`end` does not wait."""
        found = self._found
        if found.is_complete or not self._shared._may_continue(found):
            return True
        if found.ender is None:
            return False
        return self._rank != found.ender or bool(found.returned) or len(found.claims) == 1

    def end(self) -> bool:
        """End the part. The rank that has the results waits for the parts of the others.

        Returns:
            False on that rank if batches of ranks that have died are left.
        """
        shared, found = self._shared, self._found
        with self._condition:
            if self._rank != found.ender:
                found.claims.pop(self._rank, None)
                if shared._may_continue(found):  # else batches may be left
                    found.num_ended += 1
                    found.is_complete = found.num_ended == found.num_ranks
                self._condition.notify_all()
            self._condition.wait_for(lambda: self.may_end)
            if self._rank == found.ender:
                if found.returned and shared._may_continue(found):
                    return False
                found.is_complete = shared._may_continue(found)
                if found.call is not None:
                    found.call.part = self
            if found.ender in (None, self._rank):
                shared._end(found.key)
            return True

    @property
    def is_complete(self) -> bool:
        """True if all batches have results."""
        return self._found.is_complete

    def results(self) -> list[BatchMeans]:
        """The means of all batches, in no order.

        Raises:
            EvaluationFailed: A rank has failed the evaluation.
            CollectiveAborted: They are not complete.
        """
        found = self._found
        if found.error is not None:
            raise found.error
        if not found.is_complete:
            raise CollectiveAborted("the run has failed, or another rank has left its group")
        return found.found
