"""Asynchronous, multi-threaded training for PyTorch: one thread for each device."""

from coordinator.cadence import ElChe
from coordinator.config import ApplyPolicy, AverageBackend
from coordinator.messages import WorkerFailure
from coordinator.metrics import EpochMetrics, MachineMetrics, RankMetrics, StepMetrics
from coordinator.run_errors import AveragingFailed, GpuWorkerError, RunAborted, RunStalled
from coordinator.run_state import RankStatistics, Statistics
from runtime.callbacks import Callback, EarlyStopping, KeepBest, TimeLimit
from runtime.cluster.outer import Mean, Nesterov, OuterOptimizer
from runtime.collective import Collective, ReduceOp, create_collectives
from runtime.core.context import WorkerLogFilter, all_gather, current_worker, record_scalar
from runtime.core.errors import (
    CheckpointError,
    ClusterError,
    CollectiveAborted,
    CollectiveTimeout,
    EvaluationFailed,
    NonFiniteError,
    ReplicaFailed,
    ReplicaMismatch,
    UnknownMetric,
    WorkerFailed,
)
from runtime.core.loss_weights import Weighted
from runtime.device.base import device_summary
from runtime.fsdp import FSDP, ShardingStrategy
from runtime.handle import TrainerHandle
from runtime.loggers import (
    CombinedLogger,
    CsvLogger,
    MlflowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from runtime.loop import DdpConfig, ReplicatedModule
from runtime.loop.data_parallel import BatchResult, DataParallelCoordinator
from runtime.loop.ddp import Ddp
from runtime.loop.shard_samples import shard_samples
from runtime.monitor import Monitor
from runtime.replica.gradients import average_gradients, has_non_finite
from runtime.results import TrainedState, predict
from runtime.timeline import Cause, Event, IdleGap, Kind, Timeline, TimelineSummary
from runtime.timeline.run_summary import RankThroughput, RunSummary
from runtime.trainer import Trainer, TrainerBuilder, fit
from runtime.worker.loop_worker import LoopWorker
from runtime.worker.worker import GpuWorker
from runtime.worker.worker_config import UserFunctions, WorkerConfig

__project__ = "gpuworker"  # by which gpuworker recognises this package

__all__ = [
    "ApplyPolicy",
    "AverageBackend",
    "AveragingFailed",
    "BatchResult",
    "Callback",
    "Cause",
    "CheckpointError",
    "ClusterError",
    "Collective",
    "CollectiveAborted",
    "CollectiveTimeout",
    "CombinedLogger",
    "CsvLogger",
    "DataParallelCoordinator",
    "Ddp",
    "DdpConfig",
    "EarlyStopping",
    "ElChe",
    "EpochMetrics",
    "EvaluationFailed",
    "Event",
    "FSDP",
    "GpuWorker",
    "GpuWorkerError",
    "IdleGap",
    "KeepBest",
    "Kind",
    "LoopWorker",
    "MachineMetrics",
    "Mean",
    "MlflowLogger",
    "Monitor",
    "Nesterov",
    "NonFiniteError",
    "OuterOptimizer",
    "RankMetrics",
    "RankStatistics",
    "RankThroughput",
    "ReduceOp",
    "ReplicaFailed",
    "ReplicaMismatch",
    "ReplicatedModule",
    "RunAborted",
    "RunStalled",
    "RunSummary",
    "ShardingStrategy",
    "Statistics",
    "StepMetrics",
    "TensorBoardLogger",
    "TimeLimit",
    "Timeline",
    "TimelineSummary",
    "TrainedState",
    "Trainer",
    "TrainerBuilder",
    "TrainerHandle",
    "UnknownMetric",
    "UserFunctions",
    "WandbLogger",
    "Weighted",
    "WorkerConfig",
    "WorkerFailed",
    "WorkerFailure",
    "WorkerLogFilter",
    "all_gather",
    "average_gradients",
    "create_collectives",
    "current_worker",
    "device_summary",
    "fit",
    "has_non_finite",
    "predict",
    "record_scalar",
    "shard_samples",
]
