"""The settings of a run, checked as they are set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coordinator.config import ApplyPolicy, AverageBackend
from coordinator.dispatch import count_batches
from coordinator.metrics import EpochMetrics
from runtime.core.checks import check_directory
from runtime.data.path import DataOptions
from runtime.replica.build import ModelFactory, OptimFactory, ParamGroups
from runtime.replica.schedule import SchedulerFactory
from runtime.replica.step import TrainFn
from runtime.timeline import Timeline
from runtime.worker.config import EvalFn

PRECISIONS = ("fp32", "bf16", "fp16")
ON_WORKER_FAILURE = ("raise", "continue")
MAX_SEED = 2**63 - 1
"""The largest seed that every generator takes."""


DEFAULT_ANCHOR, DEFAULT_MIN_ANCHOR = 10, 5
"""The anchor at the start, and what it comes back to where averaging costs little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything a run is made from; :class:`~runtime.trainer.TrainerBuilder` fills it.

    The attributes carry the names of the builder's methods, which say what they mean.
    """

    model_factory: ModelFactory
    optim_factory: OptimFactory
    train_fn: TrainFn
    dataset: Any = None
    batch_size: int | None = None
    num_epochs: int | None = None
    devices: tuple[torch.device, ...] | None = None
    policy: ApplyPolicy = ApplyPolicy.CADENCE
    backend: AverageBackend = AverageBackend.AUTO
    seed: int | None = None
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    loader_workers: int = 0
    anchor: int | None = None
    min_anchor: int | None = None
    max_anchor: int = 200
    overhead_target: float = 0.10
    speed_hint: tuple[int, float] | None = None
    max_batch_diff: int | None = None
    max_overshoot: int | None = None
    divergence_threshold: float | None = 0.05
    partition_ratios: tuple[float, ...] | None = None
    progressive_dispatch: bool | None = None
    max_grad_norm: float | None = None
    accumulate: int = 1
    precision: str = "fp32"
    on_non_finite: str = "raise"
    scheduler: SchedulerFactory | None = None
    lr_scale_ratio: float = 0.0
    param_groups: ParamGroups | None = None
    max_steps: int | None = None
    dataset_lock: bool = False
    eval_fn: EvalFn | None = None
    epoch_fn: Callable[[int, Any], object] | None = None
    metrics_fn: Callable[[EpochMetrics], object] | None = None
    checkpoint_every: int | None = None
    checkpoint_fn: Callable[[int, nn.Module], object] | None = None
    checkpoint_dir: Path | None = None
    checkpoint_dir_every: int = 1
    checkpoint_dir_keep: int = 3
    resume: Path | None = None
    resume_missing_ok: bool = False
    snapshot_timeout: float = 5.0
    collective_timeout: float = 60.0
    max_failed_rounds: int = 5
    on_worker_failure: str = "raise"
    stall_timeout: float = 300.0
    vram_fraction: float = 0.90
    prefetch: int | None = None
    resident: bool | None = None
    cuda_graphs: bool = False
    tune_allocator: bool = True
    progress: bool | None = None
    timeline: Timeline | None = None

    def data_options(self) -> DataOptions:
        """How the data set is read."""
        assert self.batch_size is not None
        return DataOptions(
            batch_size=self.batch_size,
            seed=self.seed or 0,
            accumulate=self.accumulate,
            cuda_graphs=self.cuda_graphs,
            vram_fraction=self.vram_fraction,
            prefetch=self.prefetch,
            resident=self.resident,
            loader_workers=self.loader_workers,
        )

    def total_batches(self, num_samples: int) -> int:
        """Batches of the whole run, over all ranks, for a data set of that length."""
        assert self.batch_size is not None
        assert self.num_epochs is not None
        per_epoch = count_batches(num_samples, self.batch_size, drop_last=self.drop_last)
        total = per_epoch * self.num_epochs
        return total if self.max_steps is None else min(total, self.max_steps)

    def resolved_devices(self) -> tuple[torch.device, ...]:
        """The devices asked for, else every visible CUDA device, else one CPU."""
        if self.devices is not None:
            return self.devices
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return tuple(torch.device("cuda", i) for i in range(count)) or (torch.device("cpu"),)

    def resolved_anchor(self) -> int:
        """The anchor at the start of the run."""
        if self.anchor is not None:
            return self.anchor
        return min(max(DEFAULT_ANCHOR, self.min_anchor or 1), self.max_anchor)

    def resolved_min_anchor(self) -> int:
        """What the anchor comes back to: an anchor that was asked for is kept."""
        if self.min_anchor is not None:
            return self.min_anchor
        return self.anchor or min(DEFAULT_MIN_ANCHOR, self.max_anchor)

    def check(self, num_samples: int, devices: Sequence[torch.device]) -> None:
        """What can only be judged with all settings at hand.

        Raises:
            ValueError: A required value is missing, or values do not fit together.
        """
        for name in ("batch_size", "num_epochs"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} is not set: call .{name}(n) before .run()")
        assert self.batch_size is not None
        world = len(devices)
        if self.drop_last and num_samples < self.batch_size:
            raise ValueError(
                f"drop_last(True) drops everything: {num_samples} samples make no batch of "
                f"{self.batch_size}; use a smaller batch_size or keep the short batch"
            )
        if self.partition_ratios is not None and len(self.partition_ratios) != world:
            raise ValueError(
                f"partition_ratios has {len(self.partition_ratios)} entries for {world} devices"
            )
        if self.speed_hint is not None and self.speed_hint[0] >= world:
            raise ValueError(f"speed_hint: there is no rank {self.speed_hint[0]} of {world}")
        anchor, least = self.resolved_anchor(), self.resolved_min_anchor()
        if anchor > self.max_anchor:
            raise ValueError(
                f"anchor({anchor}) is above max_anchor({self.max_anchor}); raise max_anchor"
            )
        if least > anchor:
            raise ValueError(
                f"min_anchor({least}) is above the anchor at the start, {anchor}; lower it or "
                f"raise anchor and max_anchor({self.max_anchor})"
            )
        if self.prefetch == 0 and self.loader_workers:
            raise ValueError(
                f"prefetch(0) does not go with loader_workers({self.loader_workers}), which load "
                "ahead by nature; leave one of them out"
            )
        for name in ("checkpoint_dir", "resume"):
            path = getattr(self, name)
            if path is not None:
                check_directory(name, path)
        if self.checkpoint_every is not None and self.checkpoint_fn is None:
            raise ValueError("checkpoint_every(n) needs checkpoint_fn(f)")
        if self.policy is ApplyPolicy.SYNC and self.progressive_dispatch:
            raise ValueError(
                "progressive_dispatch(True) does not go with SYNC, whose ranks share each epoch "
                "out beforehand; leave it out"
            )
