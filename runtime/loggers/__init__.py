"""Objects for ``metrics_fn`` that write the metrics of each epoch somewhere."""

from __future__ import annotations

from runtime.loggers.base import CombinedLogger
from runtime.loggers.csv_file import CsvLogger
from runtime.loggers.tensorboard import TensorBoardLogger
from runtime.loggers.trackers import MlflowLogger, WandbLogger

__all__ = ["CombinedLogger", "CsvLogger", "MlflowLogger", "TensorBoardLogger", "WandbLogger"]
