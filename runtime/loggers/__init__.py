"""Objects for ``metrics_fn`` that write the metrics of each epoch somewhere."""

from __future__ import annotations

from runtime.loggers.base import CombinedLogger, CsvLogger
from runtime.loggers.trackers import MlflowLogger, TensorBoardLogger, WandbLogger

__all__ = ["CombinedLogger", "CsvLogger", "MlflowLogger", "TensorBoardLogger", "WandbLogger"]
