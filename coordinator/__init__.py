"""Control plane: schedules epochs, averaging rounds and checkpoints, without model or device."""

from __future__ import annotations

import warnings

from coordinator.backend_choice import choose_backend
from coordinator.cadence import CadenceAction, ConvergenceGuard, ElChe
from coordinator.config import ApplyPolicy, AverageBackend, CoordinatorConfig
from coordinator.machine import Coordinator
from coordinator.metrics import EpochMetrics, RankMetrics, StepMetrics
from coordinator.run_state import RankStatistics, Statistics
from coordinator.service import Service

__project__ = "gpuworker"  # by which gpuworker recognises this package

__all__ = [
    "ApplyPolicy",
    "AverageBackend",
    "CadenceAction",
    "ConvergenceGuard",
    "Coordinator",
    "CoordinatorConfig",
    "ElChe",
    "EpochMetrics",
    "RankMetrics",
    "RankStatistics",
    "Service",
    "Statistics",
    "StepMetrics",
    "choose_backend",
]


def __getattr__(name: str) -> object:
    """``Verdict``: the deprecated name of :class:`CadenceAction`."""
    if name != "Verdict":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Verdict is called CadenceAction now", DeprecationWarning, stacklevel=2)
    return CadenceAction
