"""Asynchronous, multi-threaded training for PyTorch: one thread for each device."""

from coordinator.cadence import ElChe
from coordinator.metrics import EpochMetrics, RankMetrics
from coordinator.policy import ApplyPolicy, AverageBackend
from coordinator.world import RankStatistics, Statistics
from runtime.builder import TrainerBuilder
from runtime.collective import Collective, ReduceOp, create_collectives
from runtime.context import current_worker, record_scalar
from runtime.data_parallel import BatchResult, DataParallelCoordinator
from runtime.ddp import Ddp
from runtime.errors import (
    AveragingFailed,
    CheckpointError,
    CollectiveAborted,
    CollectiveTimeout,
    GpuWorkerError,
    NonFiniteError,
    ReplicaFailed,
    ReplicaMismatch,
    RunAborted,
    RunStalled,
    WorkerFailed,
)
from runtime.fsdp import FSDP, ShardingStrategy
from runtime.gradients import average_gradients, has_non_finite
from runtime.handle import TrainerHandle
from runtime.loggers import CombinedLogger, CsvLogger, TensorBoardLogger
from runtime.monitor import Monitor
from runtime.setup import DdpConfig, ReplicatedModule
from runtime.shards import shard_samples
from runtime.state import TrainedState, WorkerFailure
from runtime.summary import device_summary
from runtime.timeline import Cause, Event, IdleGap, Kind, Timeline, TimelineSummary
from runtime.trainer import Trainer
from runtime.worker import GpuWorker
from runtime.worker_log import WorkerLogFilter
from runtime.worker_types import UserFunctions, WorkerConfig

__all__ = [
    "ApplyPolicy",
    "AverageBackend",
    "AveragingFailed",
    "BatchResult",
    "Cause",
    "CheckpointError",
    "Collective",
    "CollectiveAborted",
    "CollectiveTimeout",
    "CombinedLogger",
    "CsvLogger",
    "DataParallelCoordinator",
    "Ddp",
    "DdpConfig",
    "ElChe",
    "EpochMetrics",
    "Event",
    "FSDP",
    "GpuWorker",
    "GpuWorkerError",
    "IdleGap",
    "Kind",
    "Monitor",
    "NonFiniteError",
    "RankMetrics",
    "RankStatistics",
    "ReduceOp",
    "ReplicaFailed",
    "ReplicaMismatch",
    "ReplicatedModule",
    "RunAborted",
    "RunStalled",
    "ShardingStrategy",
    "Statistics",
    "TensorBoardLogger",
    "Timeline",
    "TimelineSummary",
    "TrainedState",
    "Trainer",
    "TrainerBuilder",
    "TrainerHandle",
    "UserFunctions",
    "WorkerConfig",
    "WorkerFailed",
    "WorkerFailure",
    "WorkerLogFilter",
    "average_gradients",
    "create_collectives",
    "current_worker",
    "device_summary",
    "has_non_finite",
    "record_scalar",
    "shard_samples",
]
