"""Losses and scalars of the batch in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from runtime.device.metering import ValueLog


class BatchLog:
    """Receives the losses and scalars of the batch in training, and passes them to a log.

    Attributes:
        values: The current log.
        closed_by: The function in which scalars are refused; ``None``: they are accepted.
    """

    __slots__ = ("closed_by", "num_samples", "values")

    def __init__(self, values: ValueLog) -> None:
        self.values = values
        self.num_samples = 1
        self.closed_by: str | None = None

    def record_scalar(self, name: str, value: float | Tensor) -> None:
        """See :func:`gpuworker.record_scalar`."""
        if self.closed_by is not None:
            raise RuntimeError(
                f"record_scalar({name!r}, ...) in {self.closed_by}: it belongs to the batch being "
                f"trained, in train_fn. Return {{{name!r}: value}} from eval_fn; the epoch's "
                f"scalars have it as 'eval/{name}'"
            )
        if isinstance(value, Tensor):
            value = value.data.clone()  # read later, after a parameter may have changed
        self.values.push_scalar(name, value, self.num_samples)

    @contextmanager
    def closed(self, function: str) -> Iterator[None]:
        """Refuse scalars for the duration of the context, in which a function of the user runs."""
        before, self.closed_by = self.closed_by, function
        try:
            yield
        finally:
            self.closed_by = before

    @contextmanager
    def redirected(self, values: ValueLog) -> Iterator[None]:
        """Use another log for the duration of the context."""
        before, self.values = self.values, values
        try:
            yield
        finally:
            self.values = before
