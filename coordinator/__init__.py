"""The control plane: decides when, how much and how. Owns no model, touches no device."""

from coordinator.cadence import ElChe
from coordinator.config import CoordinatorConfig
from coordinator.convergence import ConvergenceGuard, Verdict
from coordinator.machine import Coordinator
from coordinator.metrics import EpochMetrics, RankMetrics
from coordinator.policy import ApplyPolicy, AverageBackend, choose_backend
from coordinator.ranks import RankStatistics, Statistics
from coordinator.service import Service

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
    "Verdict",
    "choose_backend",
]
