"""Loggers: callables for ``metrics_fn`` that write metrics to files and trackers."""

from __future__ import annotations

from runtime.loggers.combined_logger import CombinedLogger
from runtime.loggers.csv_logger import CsvLogger
from runtime.loggers.tensorboard_logger import TensorBoardLogger
from runtime.loggers.trackers import MlflowLogger, WandbLogger

__all__ = ["CombinedLogger", "CsvLogger", "MlflowLogger", "TensorBoardLogger", "WandbLogger"]
