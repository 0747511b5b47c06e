"""Asynchronous, multi-threaded training for PyTorch: one thread for each device."""

from coordinator.cadence import ElChe
from coordinator.metrics import EpochMetrics, RankMetrics
from coordinator.policy import ApplyPolicy, AverageBackend
from coordinator.world import RankStatistics, Statistics
from runtime.builder import TrainerBuilder
from runtime.collective import Collective, ReduceOp, create_collectives
from runtime.context import current_worker, record_scalar
from runtime.errors import (
    AveragingFailed,
    CollectiveAborted,
    CollectiveTimeout,
    GpuWorkerError,
    NonFiniteError,
    ReplicaMismatch,
    RunAborted,
    RunStalled,
    WorkerFailed,
)
from runtime.handle import TrainerHandle
from runtime.state import TrainedState, WorkerFailure
from runtime.summary import device_summary
from runtime.trainer import Trainer
from runtime.worker import GpuWorker
from runtime.worker_types import UserFunctions, WorkerConfig

__all__ = [
    "ApplyPolicy",
    "AverageBackend",
    "AveragingFailed",
    "Collective",
    "CollectiveAborted",
    "CollectiveTimeout",
    "ElChe",
    "EpochMetrics",
    "GpuWorker",
    "GpuWorkerError",
    "NonFiniteError",
    "RankMetrics",
    "RankStatistics",
    "ReduceOp",
    "ReplicaMismatch",
    "RunAborted",
    "RunStalled",
    "Statistics",
    "TrainedState",
    "Trainer",
    "TrainerBuilder",
    "TrainerHandle",
    "UserFunctions",
    "WorkerConfig",
    "WorkerFailed",
    "WorkerFailure",
    "create_collectives",
    "current_worker",
    "device_summary",
    "record_scalar",
]
