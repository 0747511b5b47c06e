"""Loggers for ``metrics_fn``."""

from __future__ import annotations

from gpuworker import CombinedLogger, CsvLogger, MlflowLogger, TensorBoardLogger, WandbLogger

__all__ = ["CombinedLogger", "CsvLogger", "MlflowLogger", "TensorBoardLogger", "WandbLogger"]
