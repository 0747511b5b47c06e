"""The control plane: decides when, how much and how. Owns no model, touches no device."""

from coordinator.backend_choice import choose_backend
from coordinator.cadence import ConvergenceGuard, ElChe, Verdict
from coordinator.config import ApplyPolicy, AverageBackend, CoordinatorConfig
from coordinator.machine import Coordinator
from coordinator.metrics import EpochMetrics, RankMetrics, StepMetrics
from coordinator.service import Service
from coordinator.state import RankStatistics, Statistics

__all__ = [
    "ApplyPolicy",
    "AverageBackend",
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
    "Verdict",
    "choose_backend",
]
