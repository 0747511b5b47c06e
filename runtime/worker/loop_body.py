"""LoopBody: a user's own training loop, and the batches that its iterators yield."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

from runtime.core.errors import CollectiveAborted, CollectiveTimeout


class LoopBody:
    """Calls the user's loop, and continues the worker's control flow when it requests a batch.

    Args:
        function: ``loop(worker)``, without its argument.
        leave: Leaves the epoch of the batch in progress, or of the next one.
        owns: True for an error that the body has let through, and that does not end the run.
        explain: Adds notes to an error of a batch.

    Attributes:
        is_within: The body has a batch.
        is_ahead: It is the first one of the next call of the loop.
    """

    def __init__(
        self,
        function: Callable[[], object],
        leave: Callable[[], None],
        owns: Callable[[BaseException], bool],
        explain: Callable[[BaseException], None],
    ) -> None:
        self._function = function
        self._leave = leave
        self._owns = owns
        self._explain = explain
        self._source: Generator[Any, None, None] | None = None
        self._data: Any = None
        self.is_within = self.is_ahead = False
        self._is_over = False
        self._num_iterators = 0

    def run(self, source: Generator[Any, None, None]) -> None:
        """Call the loop until the run is over; see :meth:`OwnLoop.run`."""
        self._source = source
        try:
            while True:
                try:
                    self._function()
                except (CollectiveAborted, CollectiveTimeout) as error:
                    if not self._owns(error):
                        raise
                    # evaluate() has raised it: the batches continue in a new group
                except (RuntimeError, ValueError) as error:
                    if self.is_within:
                        self._explain(error)
                    raise
                else:
                    if self._is_over:
                        break
                    self._leave()
                if not self.advance():
                    break
                self.is_ahead = True
        finally:
            self._source = None
            source.close()

    def batches(self) -> Iterator[Any]:
        """See :meth:`LoopWorker.batches`."""
        if self.has_batch:
            self._leave()
        self._num_iterators += 1
        own = self._num_iterators
        while own == self._num_iterators:
            if not self.is_ahead and not self.advance():
                return
            self.is_ahead = False
            yield self._data

    @property
    def has_batch(self) -> bool:
        """True while a batch is in the body."""
        return self.is_within and not self.is_ahead

    def advance(self) -> bool:
        """Continue the worker to its next batch; False at the end of the run."""
        if self._source is None or self._is_over:
            return False
        self.is_within = False
        try:
            self._data = next(self._source)
        except BaseException as error:
            self._is_over = True
            self._data = None
            if isinstance(error, StopIteration):
                return False
            raise
        self.is_within = True
        return True

    def release(self) -> None:
        """Release the batch: the loader may use its memory again."""
        self._data = None
