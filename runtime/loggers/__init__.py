"""Objects for ``metrics_fn`` that write the metrics of each epoch somewhere."""

from __future__ import annotations

from runtime.loggers.base import CombinedLogger
from runtime.loggers.csv_file import CsvLogger
from runtime.loggers.tensorboard import TensorBoardLogger

__all__ = ["CombinedLogger", "CsvLogger", "TensorBoardLogger"]
