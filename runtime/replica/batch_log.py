"""Losses and scalars of the batch in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from runtime.device.metering import StepValues, ValueLog


class BatchLog:
    """Receives the scalars of the batch in training, and the values of its step.

    Attributes:
        kept: The log of the steps that were made.
        values: The values of the step in progress; the log between two steps.
        num_samples: Samples of the batch.
        closed_by: The function in which scalars are refused; ``None``: they are accepted.
    """

    __slots__ = ("closed_by", "kept", "num_samples", "values")

    def __init__(self, log: ValueLog) -> None:
        self.kept = log
        self.values: StepValues | ValueLog = log
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

    def new_values(self) -> StepValues:
        return StepValues(self.kept, self.kept.number)

    def begin(self) -> StepValues:
        """Begin the next step; its values are kept or dropped after :meth:`end`."""
        self.values = values = self.new_values()
        return values

    def end(self) -> None:
        """End the step: scalars from now on belong to none."""
        self.values = self.kept
