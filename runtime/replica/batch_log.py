"""Losses and scalars of the batch in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from runtime.device.metering import ValueLog


class BatchLog:
    """Receives the losses and scalars of the batch in training, and passes them to a log.

    Args:
        values: The log.

    Attributes:
        values: The current log.
        num_samples: Samples in the batch.
    """

    __slots__ = ("num_samples", "values")

    def __init__(self, values: ValueLog) -> None:
        self.values = values
        self.num_samples = 1

    def record_scalar(self, name: str, value: float | Tensor) -> None:
        """See :func:`gpuworker.record_scalar`."""
        if isinstance(value, Tensor):
            value = value.data.clone()  # read later, after a parameter may have changed
        self.values.push_scalar(name, value, self.num_samples)

    @contextmanager
    def redirected(self, values: ValueLog) -> Iterator[None]:
        """Use another log for the duration of the context."""
        before, self.values = self.values, values
        try:
            yield
        finally:
            self.values = before
