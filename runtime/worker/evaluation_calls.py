"""EvaluationCalls: evaluations on the average of a round, for bodies that wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from coordinator.batch_means import BatchMeans
from runtime.core.errors import CollectiveAborted
from runtime.evaluation.batch_source import BatchSource, SampleRange
from runtime.evaluation.pending_means import EvaluationFn, EvaluationView, read_means


class EvaluationCalls:
    """Calls of ``worker.evaluate`` by the bodies of a run's own loops, at most one of each rank.
    Thread-safe.

    A rank that has the average of a round takes part in the calls that the round answers: it takes
    the next batch of the data set when it has completed one, until none is left. The caller is the
    last to end its part. It waits for the batches of the others, and evaluates those of ranks that
    have died meanwhile, since it still has the average.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._calls: dict[int, EvaluationCall] = {}
        self._too_early: dict[
            int, int
        ] = {}  # by caller, the last round that cannot answer its call
        self._is_over = False

    def open(
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
            caller: The calling rank.
            dataset: The data set.
            fn: ``f(model, batch)``, called in the threads of all ranks.
            read: Reads the data set.
            after: The last round whose average does not contain all training of the caller.
        """
        call = EvaluationCall(caller, dataset, fn, read)
        with self._condition:
            self._calls[caller] = call
            self._too_early[caller] = max(after, self._too_early.get(caller, 0))
        return call

    def close(self, caller: int) -> None:
        """Remove a call: no other rank evaluates for it any more."""
        with self._condition:
            self._calls.pop(caller, None)

    def join(self, caller: int, rank: int, round: int) -> EvaluationPart | None:
        """Take part in a call.

        Args:
            caller: The calling rank.
            rank: The rank that joins, which has the average of the round.
            round: Id of the round.

        Returns:
            The part of the rank; ``None``: the call was answered or dropped, or is a later one.
        """
        with self._condition:
            call = self._calls.get(caller)
            if call is None or call.is_answered or round <= self._too_early[caller]:
                return None
            if call.attempt is None or call.attempt.round < round:
                # The caller did not get the average of an earlier round, which was given up.
                call.attempt = _Attempt(round, is_first=call.attempt is None)
            if call.attempt.round > round:
                return None
            call.attempt.claims[rank] = {}
            return EvaluationPart(self, call, call.attempt, rank)

    def leave(self, rank: int) -> None:
        """A rank has died: its call is dropped, and its batches are evaluated by the callers."""
        with self._condition:
            self._calls.pop(rank, None)
            for call in self._calls.values():
                if call.attempt is not None:
                    claims = call.attempt.claims.pop(rank, {})
                    call.attempt.returned += [claim.samples for claim in claims.values()]
            self._condition.notify_all()

    def abort(self) -> None:
        """The run has failed: no rank waits any more."""
        with self._condition:
            self._is_over = True
            self._condition.notify_all()

    # Called by parts.

    def _may_continue(self, call: EvaluationCall, attempt: _Attempt) -> bool:
        is_open = self._calls.get(call.caller) is call and call.attempt is attempt
        return is_open and not self._is_over and attempt.error is None


@dataclass(eq=False, slots=True)
class EvaluationCall:
    """A call of ``worker.evaluate``.

    Attributes:
        caller: The calling rank.
        dataset: The data set.
        fn: ``f(model, batch)``.
        read: Reads the data set.
        attempt: The evaluation on the average of the last round; ``None``: none was made yet.
        is_answered: The evaluation is complete, or has failed.
    """

    caller: int
    dataset: Any
    fn: EvaluationFn
    read: Callable[[Any], BatchSource]
    attempt: _Attempt | None = None
    is_answered: bool = False

    def results(self) -> list[BatchMeans]:
        """The results of all batches, in no order, once the call is answered.

        Raises:
            EvaluationFailed: The function, the model or the data set raised on some rank.
            CollectiveAborted: The run has failed.
        """
        assert self.attempt is not None, "the call is answered"
        if self.attempt.error is not None:
            raise self.attempt.error
        return self.attempt.found


@dataclass(eq=False, slots=True)
class _Attempt:
    """An evaluation on the average of one round.

    Attributes:
        round: Id of the round.
        is_first: False if the average of an earlier round was evaluated in part.
        source: The batches; ``None``: not opened yet.
        claims: By rank that takes part, its batches without a result, by number.
        returned: Batches of ranks that have died.
        found: The results.
        error: The first error.
    """

    round: int
    is_first: bool
    source: BatchSource | None = None
    opening: threading.Lock = field(default_factory=threading.Lock)
    claims: dict[int, dict[int, _Claim]] = field(default_factory=dict)
    returned: list[SampleRange] = field(default_factory=list)
    found: list[BatchMeans] = field(default_factory=list)
    error: BaseException | None = None


@dataclass(eq=False, slots=True)
class _Claim:
    """A batch in evaluation, possibly in parts.

    Attributes:
        samples: The batch.
        num_left: Samples without a result.
        found: The results of its parts.
    """

    samples: SampleRange
    num_left: int
    found: list[BatchMeans] = field(default_factory=list)


class EvaluationPart(BatchSource):
    """The part of one rank in a call: the source of its batches, and the receiver of their
    results. For the thread of the rank.
    """

    def __init__(
        self, calls: EvaluationCalls, call: EvaluationCall, attempt: _Attempt, rank: int
    ) -> None:
        self.fn = call.fn
        self._calls = calls
        self._condition = calls._condition
        self._call = call
        self._attempt = attempt
        self._rank = rank

    def may_continue(self) -> bool:
        """False if no result is required any more."""
        with self._condition:
            return self._calls._may_continue(self._call, self._attempt)

    def take(self) -> SampleRange | None:
        """The next batch, of ranks that have died first; may block while the data set reads."""
        attempt = self._attempt
        while True:
            with self._condition:
                samples = attempt.returned.pop() if attempt.returned else None
            samples = samples or self._source().take()
            if samples is None or samples.start < samples.stop:
                break
        if samples is not None:
            claim = _Claim(samples, samples.stop - samples.start)
            with self._condition:
                attempt.claims[self._rank][samples.batch] = claim
        return samples

    def _source(self) -> BatchSource:
        attempt, dataset = self._attempt, self._call.dataset
        with attempt.opening:
            if attempt.source is None:
                if not attempt.is_first and isinstance(dataset, Iterator):
                    raise ValueError(
                        "the averaging round of an evaluation was repeated, and its data set, an "
                        "iterator, can be read only once: pass a data set that can be read again"
                    )
                attempt.source = self._call.read(dataset)
            return attempt.source

    def __call__(self, samples: SampleRange, data: Any, result: Any, view: EvaluationView) -> None:
        """Receive the result of a batch, or of a part of one; waits for the device."""
        means = read_means(samples.start, samples.stop, data, result, view)
        with self._condition:
            claims = self._attempt.claims[self._rank]
            claim = claims[samples.batch]
            claim.found.append(means)
            claim.num_left -= samples.stop - samples.start
            if claim.num_left == 0:
                del claims[samples.batch]
                self._attempt.found += claim.found

    def fail(self, error: BaseException) -> None:
        """Fail the call; its caller raises the first error."""
        with self._condition:
            self._attempt.error = self._attempt.error or error

    def end(self) -> bool:
        """End the part; on the caller wait for those of the others, and answer the call.

        Returns:
            False on the caller if batches of ranks that have died are left.
        """
        call, attempt = self._call, self._attempt
        with self._condition:
            if self._rank != call.caller:
                attempt.claims.pop(self._rank, None)
                self._condition.notify_all()
                return True
            self._condition.wait_for(
                lambda: (
                    attempt.returned
                    or len(attempt.claims) == 1
                    or not self._calls._may_continue(call, attempt)
                )
            )
            if self._calls._is_over:
                attempt.error = attempt.error or CollectiveAborted("the run has failed")
            elif attempt.returned and attempt.error is None:
                return False
            call.is_answered = True
            self._calls._too_early[call.caller] = attempt.round
            return True
