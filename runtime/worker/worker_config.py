"""Settings, functions and queues of a worker, and the result of its steps."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from coordinator.config import ApplyPolicy, SharedConfig, SharedSettings, StepCount
from runtime.device.timing import StepTime
from runtime.replica.build import ModelFactory, OptimFactories, ParamGroups, TrainFns
from runtime.replica.reducer import Sharding
from runtime.replica.schedule import SchedulerFactories

EvalFn = Callable[[Any, int], Mapping[str, SupportsFloat]]


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(SharedSettings):
    """Settings of the user that every worker receives as they are.

    Attributes:
        loss_reduction: ``"mean"`` or ``"sum"``, of a loss over the samples of its batch.
        max_grad_norm: Maximum norm, to which gradients are clipped.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        on_non_finite: ``"raise"``, ``"skip"`` or ``"ignore"``.
        ema: Decay of the moving average of the parameters; ``None``: there is none.
        cuda_graphs: True if steps are captured and replayed.
        saves: True if the run writes checkpoints.
        dataset_lock: True: one thread at a time reads; False: all at once; ``None``: as observed.
    """

    loss_reduction: str = "mean"
    max_grad_norm: float | None = None
    precision: str = "fp32"
    on_non_finite: str = "raise"
    ema: float | None = None
    cuda_graphs: bool = False
    saves: bool = False
    dataset_lock: bool | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(WorkerSettings, SharedConfig):
    """The settings of one worker, and what follows for it from devices and data.

    Attributes:
        rank: The worker's rank.
        world_size: Number of ranks.
        device: The worker's device.
        batch_sizes: The batch size of each rank; ``None``: equal sizes.
        step_count: Counts global batches, as positions of the schedule; ``None``: each batch is
            one position.
        seed: Seed of the worker's generators.
        sharding: Shards gradients and optimizer state over the ranks; ``None``: each rank has all.
        lr_scale: Multiplies the learning rate.
        total_steps: The last position of the schedule.
        schedule_every: Positions between two steps of the scheduler; 0: it is stepped by a metric.
        scheduler_steps: Steps of the scheduler in the run; ``None``: unknown.
        num_cpu_workers: CPU workers that share the cores.
        survives: True if the worker continues after the death of another one.
        falls_back: True if the run continues over another transport after one fails.
        bucket_bytes: Under ``SYNC``, approximate size of the gradient buckets that are sent during
            the backward pass; ``None``: a single exchange after it.
        report_interval_s: Longest time between two reports.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    batch_sizes: tuple[int, ...] | None = None
    step_count: StepCount | None = None
    seed: int = 0
    sharding: Sharding | None = None
    lr_scale: float = 1.0
    total_steps: int | None = None
    schedule_every: int = 1
    scheduler_steps: int | None = None
    num_cpu_workers: int = 1
    survives: bool = False
    falls_back: bool = False
    bucket_bytes: int | None = None
    report_interval_s: float = 0.05

    @property
    def own_batch_size(self) -> int:
        """Samples in a full batch of this rank, if pieces do not follow measured speed."""
        return self.batch_size if self.batch_sizes is None else self.batch_sizes[self.rank]

    def position(self, global_step: int, num_batches: int) -> int:
        """Position of the schedule before a step.

        Args:
            global_step: The position up to which all ranks' batches are known.
            num_batches: Batches of this rank since.
        """
        sizes, count = self.batch_sizes, self.step_count
        if count is not None:
            num = num_batches * self.own_batch_size // count.batch_size
            return count.steps(count.batches(global_step) + num)
        if sizes is None or self.policy is ApplyPolicy.SYNC:
            return global_step + num_batches
        return global_step + num_batches * sizes[self.rank] * len(sizes) // sum(sizes)

    @property
    def sum_scale(self) -> float | None:
        """Factor of a sum's gradients on a rank that steps alone: its batch is a part of the global
        batch; ``None``: losses are means.
        """
        if self.loss_reduction == "mean":
            return None
        if self.policy is ApplyPolicy.SYNC or self.global_batch_size is None:
            return 1.0
        return self.global_batch_size / (self.own_batch_size * self.accumulate)

    @property
    def redoes(self) -> bool:
        """True if ranks under ``SYNC`` repeat an aborted step in a new group."""
        return self.survives or self.balance


@dataclass(frozen=True, kw_only=True)
class UserFunctions:
    """The user's functions; see ``TrainerBuilder`` for each.

    With ``loop`` the user runs the training loop: ``train_fn`` is not called, and ``optim_factory``
    receives the model and returns an optimizer or a dict of optimizers.
    """

    model_factory: ModelFactory
    optim_factory: OptimFactories
    train_fn: TrainFns
    loop: Callable[[Any], object] | None = None
    param_groups: ParamGroups | None = None
    scheduler: SchedulerFactories | None = None
    eval_fn: EvalFn | None = None
    val_fn: Callable[[nn.Module, Any], Any] | None = None
    epoch_fn: Callable[[int, Any], object] | None = None
    checkpoint_fn: Callable[[int, nn.Module], object] | None = None


@dataclass(frozen=True, slots=True)
class WorkerEndpoints:
    """The worker's ends of its queues."""

    inbox: queue.SimpleQueue[Any]
    outbox: queue.SimpleQueue[Any]


@dataclass(frozen=True, slots=True)
class WorkerChannels:
    """The other ends of a worker's queues: messages to it, and messages from it."""

    control: queue.SimpleQueue[Any]
    reports: queue.SimpleQueue[Any]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Handles of a step: reading them waits for the device, so read them late.

    Attributes:
        loss: Mean loss of the batch, detached, on the device.
        time: Time of the step, without waits for peers.
        weight: Number of units of the mean loss: as returned by ``train_fn``, a number or a tensor
            on the device, or the samples.
    """

    loss: Tensor
    time: StepTime
    weight: float | Tensor = 1

    @property
    def compute_s(self) -> float:
        """Seconds of the step; waits for it. Only in the worker's thread."""
        return self.time.seconds


class Wake:
    """Message of a loader to its worker: a batch is ready."""


WAKE = Wake()
