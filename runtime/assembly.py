"""The settings of a run, cut for the coordinator and for each worker."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coordinator import messages as m
from coordinator.config import CoordinatorConfig
from coordinator.dispatch import count_batches
from coordinator.policy import ApplyPolicy, AverageBackend
from coordinator.reports import LONGEST_REPORT_S
from runtime.config import TrainConfig
from runtime.core.errors import CheckpointError, NonFiniteError, ReplicaMismatch
from runtime.worker.config import UserFunctions, WorkerConfig
from runtime.worker.worker import GpuWorker

REPORTS_PER_S = 20
"""Reports that all ranks together send at the most because time has passed; two ranks one
each in every tenth of a second, and no rank more often than that."""


def coordinator_config(
    c: TrainConfig,
    *,
    devices: tuple[str, ...],
    num_samples: int,
    backend: AverageBackend,
    grace_s: float,
) -> CoordinatorConfig:
    """What the coordinator needs to know.

    Args:
        c: All settings, checked.
        devices: Name of each rank's device.
        num_samples: Length of the data set.
        backend: The resolved transport.
        grace_s: Seconds that the workers have to leave after a failure.
    """
    assert c.batch_size is not None
    assert c.num_epochs is not None
    progressive = c.progressive_dispatch
    return CoordinatorConfig(
        devices=devices,
        num_samples=num_samples,
        batch_size=c.batch_size,
        num_epochs=c.num_epochs,
        policy=c.policy,
        backend=backend,
        drop_last=c.drop_last,
        accumulate=c.accumulate,
        anchor=c.resolved_anchor(),
        min_anchor=c.resolved_min_anchor(),
        max_anchor=c.max_anchor,
        overhead_target=c.overhead_target,
        speed_hint=c.speed_hint,
        max_batch_diff=c.max_batch_diff,
        max_overshoot=c.max_overshoot,
        divergence_threshold=c.divergence_threshold,
        partition_ratios=c.partition_ratios,
        progressive=c.policy is not ApplyPolicy.SYNC if progressive is None else progressive,
        max_steps=c.max_steps,
        evaluate=c.eval_fn is not None,
        checkpoint_every=c.checkpoint_every,
        save_every=None if c.checkpoint_dir is None else c.checkpoint_dir_every,
        snapshot_timeout_s=c.snapshot_timeout,
        collective_timeout_s=c.collective_timeout,
        max_failed_rounds=c.max_failed_rounds,
        continue_on_failure=c.on_worker_failure == "continue",
        stall_timeout_s=c.stall_timeout,
        grace_s=grace_s,
    )


def worker_config(
    c: TrainConfig, *, rank: int, devices: Sequence[torch.device], num_samples: int
) -> WorkerConfig:
    """What the worker of a rank needs to know."""
    assert c.batch_size is not None
    assert c.num_epochs is not None
    per_epoch = count_batches(num_samples, c.batch_size, drop_last=c.drop_last)
    return WorkerConfig(
        rank=rank,
        world_size=len(devices),
        device=devices[rank],
        num_samples=num_samples,
        batch_size=c.batch_size,
        policy=c.policy,
        seed=c.seed or 0,
        accumulate=c.accumulate,
        max_grad_norm=c.max_grad_norm,
        precision=c.precision,
        on_non_finite=c.on_non_finite,
        lr_scale=1.0 + (len(devices) - 1) * c.lr_scale_ratio,
        total_steps=c.num_epochs * per_epoch,
        num_cpu_workers=sum(d.type == "cpu" for d in devices),
        survives=c.on_worker_failure == "continue",
        cuda_graphs=c.cuda_graphs,
        report_interval_s=min(max(2, len(devices)) / REPORTS_PER_S, LONGEST_REPORT_S),
    )


def user_functions(c: TrainConfig) -> UserFunctions:
    """The user's functions that run in the workers' threads."""
    return UserFunctions(
        model_factory=c.model_factory,
        optim_factory=c.optim_factory,
        train_fn=c.train_fn,
        param_groups=c.param_groups,
        scheduler=c.scheduler,
        eval_fn=c.eval_fn,
        epoch_fn=c.epoch_fn,
        checkpoint_fn=c.checkpoint_fn,
    )


def failed(rank: int, worker: GpuWorker | None, error: BaseException) -> m.Failed:
    """What the coordinator is told of a worker that died, built or not."""
    return m.Failed(
        rank=rank,
        epoch=worker.current_epoch if worker else 0,
        step=worker.local_step if worker else 0,
        error=error,
        fatal=isinstance(error, (ReplicaMismatch, NonFiniteError, CheckpointError)),
    )
