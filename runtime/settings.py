"""RunSettings: the settings of a run, and the checks that they fit together."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coordinator.backend_choice import candidate_backends
from coordinator.config import (
    ApplyPolicy,
    AverageBackend,
    CoordinatorConfig,
    CoordinatorSettings,
    SharedConfig,
    part_of,
)
from coordinator.messages import MAX_REPORT_INTERVAL_S
from coordinator.splitting import split_by_ratio
from runtime.callbacks import Callback, EarlyStopping, KeepBest
from runtime.checkpoint.files import locks_fault
from runtime.cluster.cluster_run import DataFacts
from runtime.cluster.cluster_settings import ClusterSettings
from runtime.core.capabilities import GRAPHS, missing_in
from runtime.core.checks import check_directory, default_devices
from runtime.data.data_path import DataOptions, DataSettings
from runtime.data.stream import is_stream
from runtime.device.base import Device
from runtime.device.cuda import devices_differ
from runtime.evaluation.validation_data import ValidationData
from runtime.fsdp.shard_reducer import RunSharding
from runtime.fsdp.strategy import ShardingStrategy, check_strategy
from runtime.loggers import CombinedLogger
from runtime.timeline import Timeline
from runtime.timeline.summary import RunFacts
from runtime.worker.worker_config import UserFunctions, WorkerConfig, WorkerSettings

logger = logging.getLogger(__name__)

PRECISIONS = ("fp32", "bf16", "fp16")
PRECISION_NAMES = {
    **dict.fromkeys(("32", "32-true", "float32", "no"), "fp32"),
    **dict.fromkeys(("bf16-mixed", "bfloat16"), "bf16"),
    **dict.fromkeys(("16", "16-mixed", "float16"), "fp16"),
}
"""Aliases: the names that Lightning and Accelerate use."""
LOSS_REDUCTIONS = ("mean", "sum")
ON_WORKER_FAILURE = ("raise", "continue")
MAX_SEED = 2**63 - 1
"""The largest seed that every generator accepts."""


MAX_TRIAL_SAMPLES = 32
"""A data set of up to so many samples is a trial, and may be smaller than a batch."""


DEFAULT_ANCHOR, DEFAULT_MIN_ANCHOR = 10, 2
"""Default anchor at the start of a run, and its default lower limit."""
DEFAULT_MIN_ANCHOR_ASYNC = 5
"""Under ``ASYNC`` a fast rank parks near its count, which costs time where counts are small."""


DEFAULT_BUCKET_MB = 25.0
"""Default size of a gradient bucket in MiB, as in PyTorch's DDP."""


REPORTS_PER_S = 20
"""Maximum rate of periodic reports of all ranks together; each rank sends at most half as many."""


@dataclass(frozen=True, kw_only=True)
class RunSettings(UserFunctions, CoordinatorSettings, WorkerSettings, DataSettings):
    """All settings of a run; :class:`~runtime.trainer.TrainerBuilder` fills them.

    A field is declared by the part that uses it, or here if its value is not passed on as it is.
    :meth:`resolve` adds what follows from devices and data.

    Attributes:
        batch_size: Samples in a batch of one rank, or the mean of ``batch_sizes``; 0: not set.
        batch_sizes: Samples in a batch of each rank.
        num_epochs: 0: not set.
        dataset_length: Items in a stream's epoch; ``None``: the stream's length.
        steps_per_epoch: Steps of each worker in an epoch without a data set.
        val_dataset: The validation set; ``None``: there is none.
        sampler: Yields each epoch's order; ``None``: a random permutation.
        devices: ``None``: every visible CUDA device, else one CPU.
        balance: ``None``: if devices differ.
        bucket_cap_mb: ``None``: default; 0: reduce gradients after the backward pass.
        sharding: ``None``: each rank has all gradients and optimizer state.
        seed: ``None``: 0, without seeding the process generator.
        anchor: ``None``: default, within its limits.
        min_anchor: ``None``: ``anchor`` if set, else default.
    """

    batch_size: int = 0
    batch_sizes: tuple[int, ...] | None = None
    num_epochs: int = 0
    accumulate: int = 1
    dataset: Any = None
    dataset_length: int | None = None
    steps_per_epoch: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    val_dataset: Any = None
    sampler: Any = None
    devices: tuple[torch.device, ...] | None = None
    backend: AverageBackend = AverageBackend.AUTO
    partition_ratios: tuple[float, ...] | None = None
    balance: bool | None = None
    bucket_cap_mb: float | None = None
    sharding: RunSharding | None = None
    seed: int | None = None
    anchor: int | None = None
    min_anchor: int | None = None
    progressive_dispatch: bool = False
    lr_scale_ratio: float | None = None
    scheduler_interval: str = "step"
    metrics_fn: Callable[[Any], object] | None = None
    callbacks: tuple[Callback, ...] = ()
    checkpoint_dir: Path | None = None
    checkpoint_dir_keep: int = 3
    resume: Path | None = None
    resume_missing_ok: bool = False
    tune_allocator: bool = True
    pin_threads: bool = True
    progress: bool | None = None
    timeline: Timeline | None = None
    cluster: ClusterSettings | None = None

    def with_steps(self) -> RunSettings:
        """Return a copy whose data set counts steps, if ``steps_per_epoch`` takes its place."""
        if self.steps_per_epoch is None:
            return self
        steps = torch.arange(self.steps_per_epoch * len(self.resolved_devices()))
        return replace(self, dataset=(steps,), batch_size=1)

    def with_callbacks(self) -> RunSettings:
        """Return a copy whose ``metrics_fn`` and ``checkpoint_fn`` also call the callbacks."""
        settings, checkpoint_fn, every = self, self.checkpoint_fn, self.checkpoint_every
        if checkpoint_fn is not None and every is None:
            every = 1
            settings = replace(settings, checkpoint_every=every)
        if not self.callbacks:
            return settings
        first = () if self.metrics_fn is None else (self.metrics_fn,)
        settings = replace(
            settings, metrics_fn=CombinedLogger(*first, *(c.dispatch for c in self.callbacks))
        )
        keepers = [callback for callback in self.callbacks if callback.takes_weights]
        if not keepers:
            return settings

        def hand_over(version: int, model: nn.Module) -> None:
            for keeper in keepers:
                try:
                    keeper.weights(version - 1, model)
                except Exception:
                    logger.exception("%r failed for epoch %d", keeper, version - 1)
            if checkpoint_fn is not None and every is not None and version % every == 0:
                checkpoint_fn(version, model)

        return replace(settings, checkpoint_fn=hand_over, checkpoint_every=1)

    def batches(self, world: int) -> BatchSizes:
        """The sizes of batches on ``world`` ranks.

        Raises:
            ValueError: The global batch cannot be split.
        """
        if self.global_batch_size is not None:
            return self._parts_of(self.global_batch_size, world)
        size, sizes, ratios = self.batch_size, self.batch_sizes, self.partition_ratios
        if self.policy is ApplyPolicy.SYNC:
            if ratios is not None:
                sizes = split_by_ratio(size * len(ratios), ratios)
            return BatchSizes(unit=size, loaded=size, of_ranks=_if_unequal(sizes))
        sizes = _if_unequal(sizes)
        each = sizes or (size,)
        return BatchSizes(unit=math.gcd(*each), loaded=max(each), of_ranks=sizes)

    def _parts_of(self, size: int, world: int) -> BatchSizes:
        way, num = f"global_batch_size({size})", self.accumulate
        if size < world * num:
            micro = f" in each of accumulate({num}) micro-batches" if num > 1 else ""
            raise ValueError(
                f"{way} is too small for {world} devices, which need a sample each{micro}: pass "
                f"at least {world * num}, or fewer devices"
            )
        lockstep, micro_batch = self.policy is ApplyPolicy.SYNC, -(-size // num)
        if not lockstep and size % num:
            raise ValueError(
                f"{way} is no multiple of accumulate({num}), whose micro-batches have one size "
                f"under {self.policy.name}: pass {size // num * num} or {micro_batch * num}, or "
                'call policy("sync")'
            )
        parts = split_by_ratio(micro_batch, [1] * world)
        if not lockstep:
            return BatchSizes(unit=math.gcd(*parts), loaded=parts[0], of_ranks=_if_unequal(parts))
        ratios = self.partition_ratios
        own = None if ratios is None else _if_unequal(split_by_ratio(micro_batch, ratios))
        return BatchSizes(
            unit=size, loaded=parts[0], of_ranks=own, parts=parts if world * num > 1 else None
        )

    def resolve(
        self,
        devices: Sequence[torch.device],
        num_samples: int,
        backend: AverageBackend,
        backend_reason: str = "",
    ) -> RunConfig:
        """Return the configurations for these devices and this data.

        Args:
            devices: The device of each rank.
            num_samples: Length of the data set.
            backend: The first transport.
        """
        lockstep, world = self.policy is ApplyPolicy.SYNC, len(devices)
        sizes, (anchor, min_anchor) = self.batches(world), self.anchors()
        is_split = lockstep and self.global_batch_size is not None
        averages = not lockstep and world > 1 and self.cluster is None
        _, *others = candidate_backends(self.backend, self.policy, backend, world)
        coordinator = CoordinatorConfig(
            **part_of(self, CoordinatorSettings),
            num_samples=num_samples,
            batch_size=sizes.unit,
            accumulate=1 if is_split else self.accumulate,
            num_micro_batches=self.accumulate if is_split else 1,
            auto_lr=averages and self.lr_scale_ratio is None,
            balance=self.resolved_balance(devices),
            devices=tuple(str(device) for device in devices),
            num_epochs=self.num_epochs,
            batch_sizes=sizes.of_ranks,
            partition_ratios=None if lockstep else self.partition_ratios,
            backend=backend,
            # In another group shards would be missing.
            alternatives=() if self.is_sharded else tuple(others),
            backend_reason=backend_reason,
            anchor=anchor,
            min_anchor=min_anchor,
            evaluate=self.eval_fn is not None,
            read_ahead=self.loader_workers,
            own_loop=self.loop is not None,
        )
        data = DataOptions(
            **part_of(self, DataSettings),
            batch_size=sizes.loaded,
            seed=self.seed or 0,
            accumulate=self.accumulate,
            cuda_graphs=self.cuda_graphs,
        )
        worker = self._worker_config(coordinator, sizes, devices)
        return RunConfig(coordinator=coordinator, worker=worker, data=data)

    def _worker_config(
        self, c: CoordinatorConfig, sizes: BatchSizes, devices: Sequence[torch.device]
    ) -> WorkerConfig:
        every = int(c.steps_per_epoch) if self.scheduler_interval == "epoch" else 1
        by_metric, world = self.scheduler_metric is not None, len(devices)
        return WorkerConfig(
            **part_of(self, WorkerSettings) | part_of(c, SharedConfig),
            world_size=world,
            batch_sizes=sizes.of_ranks or sizes.parts,
            step_count=c.step_count,
            seed=self.seed or 0,
            sharding=self.sharding if self.is_sharded else None,
            lr_scale=1.0 + (world - 1) * (self.lr_scale_ratio or 0.0),
            total_steps=c.total_steps,
            schedule_every=0 if by_metric else every,
            scheduler_steps=self.num_epochs if by_metric else -(-c.planned_steps // every),
            num_cpu_workers=sum(device.type == "cpu" for device in devices),
            survives=self.continue_on_failure,
            falls_back=bool(c.alternatives),
            bucket_bytes=self.resolved_bucket_bytes(c.backend),
            report_interval_s=min(max(2, world) / REPORTS_PER_S, MAX_REPORT_INTERVAL_S),
        )

    def validation_data(self, contexts: Sequence[Device]) -> ValidationData | None:
        """The validation set, if there is one, for the device contexts of the ranks."""
        if self.val_dataset is None:
            return None
        return ValidationData(
            self.val_dataset,
            contexts,
            batch_size=self.batches(len(contexts)).loaded,
            collate_fn=self.collate_fn,
            loader_workers=self.loader_workers,
            lock=self.dataset_lock,
            seed=self.seed or 0,
        )

    def resolved_balance(self, devices: Sequence[torch.device]) -> bool:
        """True if ``SYNC`` cuts batches by measured speed: as requested, else if devices differ."""
        if self.balance is not None or self.is_sharded:
            return bool(self.balance)
        fits = self.policy is ApplyPolicy.SYNC and self.partition_ratios is None
        return fits and devices_differ(devices)

    def advises_balance(self, devices: Sequence[torch.device]) -> bool:
        """True if a summary may recommend ``balance(True)``: possible, and not decided.

        Of ranks that share a GPU, the steps of one take longer beside those of another.
        """
        gpus = [device for device in devices if device.type != "cpu"]
        is_fixed = self.batches(len(devices)).of_ranks or self.partition_ratios is not None
        is_decided = self.balance is not None or self.resolved_balance(devices)
        shares_gpu = len(set(gpus)) < len(gpus)
        return not (is_fixed or is_decided or self.is_sharded or shares_gpu)

    def resolved_bucket_bytes(self, backend: AverageBackend) -> int | None:
        """Approximate size of a gradient bucket under ``SYNC``; ``None``: no buckets."""
        asked_mb = self.bucket_cap_mb
        if asked_mb is None and self.loop is None and not self.is_sharded:
            fits = self.policy is ApplyPolicy.SYNC and backend is AverageBackend.NCCL
            beside = any(getattr(self, name) for name in _EXCLUDE_BUCKETS)
            asked_mb = DEFAULT_BUCKET_MB if fits and not beside else 0.0
        return max(1, int(asked_mb * 2**20)) if asked_mb else None

    @property
    def is_sharded(self) -> bool:
        """True if ranks hold shards."""
        sharding = self.sharding
        return sharding is not None and sharding.strategy is not ShardingStrategy.NO_SHARD

    def resolved_devices(self) -> tuple[torch.device, ...]:
        """The requested devices, else every visible CUDA device, else one CPU."""
        return self.devices or default_devices()

    def anchors(self) -> tuple[int, int]:
        """The anchor at the start and its lower limit; one that is set alone is its own limit."""
        is_async, most = self.policy is ApplyPolicy.ASYNC, self.max_anchor
        floor = DEFAULT_MIN_ANCHOR_ASYNC if is_async else DEFAULT_MIN_ANCHOR
        first = self.anchor or min(max(DEFAULT_ANCHOR, self.min_anchor or 1), most)
        return first, self.min_anchor or self.anchor or min(floor, most)

    def check_combination(self) -> None:
        """Check that the settings are complete and that none excludes another, before data is read.

        Raises:
            ValueError: A required value is missing, a row of the table of exclusions applies, or
                the global batch cannot be split.
        """
        if self.steps_per_epoch is None:
            if self.dataset is None:
                raise ValueError("dataset is not set: call .dataset(ds) before .run()")
            if not (self.batch_size or self.global_batch_size):
                raise ValueError(
                    "batch_size is not set: call .batch_size(n), the samples of one device, or "
                    ".global_batch_size(n), those of one optimizer step over all devices, before "
                    ".run(), or fit(..., batch_size=n)"
                )
        if not self.num_epochs:
            raise ValueError("num_epochs is not set: call .num_epochs(n) before .run()")
        world = len(self.resolved_devices())
        facts = {"policy": self.policy.name, "world": world}
        states = _states(self)
        for (name, other), text in _EXCLUSIONS.items():
            (is_set, first), (is_other_set, second) = states[name], states[other]
            if is_set and is_other_set:
                raise ValueError(text.format(first, second, **facts))
        self.batches(world)

    def check(self, num_samples: int, devices: Sequence[torch.device]) -> None:
        """Check that the settings fit the data and the devices.

        Raises:
            ValueError: A value does not fit.
        """
        world = len(devices)
        name = "batch_size" if self.global_batch_size is None else "global_batch_size"
        size = self.global_batch_size or self.batch_size
        if self.drop_last and num_samples < size:
            raise ValueError(
                f"drop_last(True) would leave no batch: the data set has {num_samples} samples, "
                f"fewer than {name}({size}); lower {name} or call drop_last(False)"
            )
        self._check_batch_sizes(world)
        self._check_batch_fits(num_samples, world)
        ratios = self.partition_ratios
        if ratios is not None and len(ratios) != world:
            raise ValueError(f"partition_ratios has {len(ratios)} entries for {world} devices")
        hinted = None if self.speed_hint is None else self.speed_hint[0]
        for name, rank in (("speed_hint", hinted), ("eval_rank", self.eval_rank)):
            if rank is not None and rank >= world:
                raise ValueError(f"{name}: there is no rank {rank} of {world}")
        self._check_anchor()
        for name in ("checkpoint_dir", "resume"):
            path = getattr(self, name)
            if path is not None:
                check_directory(name, path)
        if self.checkpoint_dir is not None:
            fault = locks_fault(f"checkpoint_dir({str(self.checkpoint_dir)!r})")
            if fault is not None:
                raise ValueError(fault)
        self._check_metrics()
        if self.sharding is not None:
            check_strategy(self.sharding.strategy, world, self.sharding.intra_node_size)

    def _check_anchor(self) -> None:
        anchor, least = self.anchors()
        if anchor > self.max_anchor:
            raise ValueError(
                f"anchor({anchor}) is above max_anchor({self.max_anchor}); raise max_anchor"
            )
        if least > anchor:
            raise ValueError(
                f"min_anchor({least}) is above the anchor at the start, {anchor}; lower it or "
                f"raise anchor and max_anchor({self.max_anchor})"
            )

    def cluster_facts(self, num_samples: int) -> DataFacts:
        """The settings that all machines of a cluster must share, for ``num_samples`` samples."""
        c = self.resolve(self.resolved_devices(), num_samples, AverageBackend.CPU).coordinator
        settings = {
            "num_samples": num_samples,
            "batch_size": c.batch_size,
            "seed": self.seed or 0,
            "drop_last": c.drop_last,
        }
        if c.global_batch_size is not None:
            settings["global_batch_size"] = c.global_batch_size
        return DataFacts(
            settings=settings,
            num_epochs=c.num_epochs,
            num_batches=c.batches_per_epoch,
            num_samples=min(num_samples, c.batches_per_epoch * c.batch_size),
            max_batches=None if c.max_steps is None else c.count_batches(c.max_steps),
        )

    def _check_batch_sizes(self, world: int) -> None:
        if self.batch_sizes is None or self.global_batch_size is not None:
            return
        sizes = list(self.batch_sizes)
        if len(sizes) != world:
            raise ValueError(
                f"batch_size({sizes}) has {len(sizes)} entries for {world} devices: pass one "
                "number for each device, or one for all"
            )
        if self.policy is ApplyPolicy.SYNC and sum(sizes) % world:
            least = sum(sizes) // world * world
            raise ValueError(
                f"batch_size({sizes}): the sum of the sizes, {sum(sizes)}, is no multiple of the "
                f"{world} devices, as {least} and {least + world} are; change one of them"
            )

    def _check_batch_fits(self, num_samples: int, world: int) -> None:
        """Refuse a batch larger than the data set, or warn if that is a trial of a few samples."""
        if self.global_batch_size is not None:
            name, largest, fitting = "global_batch_size", self.global_batch_size, num_samples
        else:
            name, largest = "batch_size", max(self.batch_sizes or (self.batch_size,))
            fitting = max(1, num_samples // world)
        if largest <= num_samples:
            return
        text = (
            f"{name}({largest}) is larger than the data set, which has {num_samples} samples: call "
            f".{name}({fitting}), with which each of the {world} workers has a part of it"
        )
        if num_samples > MAX_TRIAL_SAMPLES:
            raise ValueError(text)
        logger.warning("%s", text)

    def _check_metrics(self) -> None:
        """Check that evaluations exist whose metrics the scheduler and the callbacks follow."""
        metric = self.scheduler_metric
        followed = [] if metric is None else [("scheduler", metric)]
        followed += [
            (type(each).__name__, each.metric)
            for each in self.callbacks
            if isinstance(each, EarlyStopping | KeepBest)
        ]
        for owner, name in followed:
            way = f"{owner}(metric={name!r})"
            if name.startswith("eval/") and self.eval_fn is None:
                raise ValueError(f"{way} needs eval_fn(f), which gives {name[5:]!r}")
            if name.startswith("val/") and self.val_dataset is None:
                raise ValueError(f"{way} needs val_dataset(ds), which gives {name[4:]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Sizes of batches, in samples.

    Attributes:
        unit: A batch of the coordinator's ledger: under ``SYNC`` the global batch, if one was set;
            under other policies the greatest common divisor of the ranks' sizes.
        loaded: The batch for which loaders allocate.
        of_ranks: A batch of each rank; ``None``: all are equal.
        parts: Under ``SYNC``, the parts of a global batch that the ranks train at first.
    """

    unit: int
    loaded: int
    of_ranks: tuple[int, ...] | None
    parts: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The configurations of a run's parts; the worker's is without its rank and device."""

    coordinator: CoordinatorConfig
    worker: WorkerConfig
    data: DataOptions

    @property
    def facts(self) -> RunFacts:
        """The facts of the run, for its lines in the log and its summary."""
        c = self.coordinator
        num_samples, world = c.num_samples, c.world_size
        sizes = c.batch_sizes or (c.batch_size,) * world
        lockstep = c.policy is ApplyPolicy.SYNC
        if lockstep and c.global_batch_size is not None:
            sizes = self.worker.batch_sizes or sizes
        per_step = c.global_batch_size or sum(sizes) * c.accumulate
        kept = c.batches_per_epoch * c.batch_size
        global_batch = per_step if lockstep or world == 1 else 0
        return RunFacts(
            devices=c.devices,
            policy=c.policy.name,
            backend=c.backend.name,
            backend_reason=c.backend_reason,
            num_epochs=c.num_epochs,
            batch_size=sum(sizes) // world,
            batch_sizes=sizes if len(set(sizes)) > 1 else (),
            num_samples=num_samples,
            global_batch=global_batch,
            batch_text=_batch_text(c, sizes, global_batch),
            steps_per_epoch=-(-min(num_samples, kept) // per_step),
            lr_factor=self.worker.lr_scale,
        )


_EXCLUDE_BUCKETS = ("cuda_graphs", "sync_batchnorm", "all_gather")
"""Settings under which gradients cannot be exchanged within the backward pass."""


def _states(s: RunSettings) -> dict[str, tuple[object, str]]:
    """The settings and states in rows of exclusions: true if set, and their text in a message."""
    devices, whole = s.resolved_devices(), s.global_batch_size
    lockstep = s.policy is ApplyPolicy.SYNC
    sizes = list(s.batch_sizes or ()) if whole is None else []
    differ, fixed = len(set(sizes)) > 1, s.partition_ratios is not None
    part, rest = divmod(whole or 0, s.accumulate)
    foreign = next((device for device in devices if device.type not in ("cpu", "cuda")), None)
    exchange = next((name for name in ("sync_batchnorm", "all_gather") if getattr(s, name)), "")
    sharded = "" if s.sharding is None else f"sharded(ShardingStrategy.{s.sharding.strategy.name})"
    several = isinstance(s.optim_factory, Mapping)
    keeps = s.checkpoint_fn is not None or any(callback.takes_weights for callback in s.callbacks)
    return {
        **{name: (getattr(s, name), f"{name}(True)") for name in _EXCLUDE_BUCKETS},
        "accumulate": (s.accumulate > 1, f"accumulate({s.accumulate})"),
        "averages": (not lockstep, s.policy.name),
        "balance": (s.balance, "balance(True)"),
        "batch_sizes": (differ, f"batch_size({sizes})"),
        "batch_sizes of averages": (differ and not lockstep, f"batch_size({sizes})"),
        "bucket_cap_mb": (s.bucket_cap_mb, f"bucket_cap_mb({s.bucket_cap_mb or 0:g})"),
        "checkpoint_every": (s.checkpoint_every is not None, "checkpoint_every(n)"),
        "cluster": (s.cluster is not None, "batches are assigned to machines by their numbers"),
        "continue": (s.continue_on_failure, 'on_worker_failure("continue")'),
        "drop_last": (s.drop_last, "drop_last(True)"),
        "ema": (s.ema is not None, f"ema({s.ema})"),
        "eval_every": (s.eval_every is not None, f"eval_every({s.eval_every})"),
        "exchange in forward": (exchange and len(devices) > 1, f"{exchange}(True)"),
        "foreign device": (foreign, str(foreign)),
        "fp16": (s.precision == "fp16", 'precision("fp16")'),
        "loader_workers": (s.loader_workers, f"loader_workers({s.loader_workers})"),
        "loop": (s.loop is not None, "leave it out with Trainer.loop, or use Trainer.builder"),
        "loss_reduction": (s.loss_reduction != "mean", 'loss_reduction("sum")'),
        "no checkpoint_fn": (not keeps, ""),
        "no eval_fn": (s.eval_fn is None, ""),
        "no graphs": (foreign, "" if foreign is None else missing_in(foreign, GRAPHS)),
        "no loop": (s.loop is None, ""),
        "no val_fn": (s.loop is not None and not s.val_fn, ""),
        "one optimizer": (s.loop is None and not several, ""),
        "own data": (s.dataset is not None or s.batch_size or whole, ""),
        "param_groups": (s.param_groups is not None, "param_groups(f)"),
        "partition_ratios": (fixed, "partition_ratios"),
        "prefetch(0)": (s.prefetch == 0, "prefetch(0)"),
        "progressive_dispatch": (s.progressive_dispatch, "progressive_dispatch(True)"),
        "sampler": (s.sampler is not None, "sampler()"),
        "scheduler of epochs": (s.scheduler_interval == "epoch", ""),
        "schedulers": (isinstance(s.scheduler, Mapping), "scheduler({...})"),
        "several optimizers": (several, "several optimizers"),
        "sharded": (sharded, sharded),
        "shards": (s.is_sharded, f"{sharded} cannot be combined with"),
        "shares under SYNC": (fixed and lockstep, "partition_ratios"),
        "steps_per_epoch": (s.steps_per_epoch, f"steps_per_epoch({s.steps_per_epoch})"),
        "stream": (is_stream(s.dataset), "the data set is a stream"),
        "sync": (lockstep, s.policy.name),
        "uneven parts": (
            not (lockstep or rest) and part % len(devices),
            f"global_batch_size({whole})",
        ),
        "val_dataset": (s.val_dataset is not None, "val_dataset(ds)"),
        "val_every_steps": (s.val_every_steps, f"val_dataset(every_steps={s.val_every_steps})"),
    }


_STEPS_EACH = "{1} cannot be combined with {0}, each of which steps on every batch: leave it out"

_EXCLUSIONS = {
    ("steps_per_epoch", "no loop"): "{0} is for Trainer.loop, whose body makes its own data",
    ("steps_per_epoch", "own data"): (
        "{0} takes the place of dataset(ds) and batch_size(n): leave it out"
    ),
    ("uneven parts", "drop_last"): (
        "{0} is no multiple of the {world} devices, and cannot be combined with {1} under "
        "{policy}, where the short batch of an epoch depends on the ranks' speed: leave drop_last "
        'out, pass a multiple, or call policy("sync")'
    ),
    ("stream", "sampler"): "{0}, which has an order of its own: leave {1} out",
    ("stream", "loader_workers"): (
        "{0}, and each of {1} processes would read all of it: leave loader_workers out, and let "
        "the stream use processes of its own"
    ),
    ("cluster", "sampler"): (
        "cluster(): {0}, and a sampler's order may differ from machine to machine: leave {1} out, "
        "or give each sample its number of copies in the data set"
    ),
    ("cluster", "stream"): (
        "cluster(): {0}, and a stream has none: use a data set that is read by index"
    ),
    ("cluster", "uneven parts"): (
        "cluster(): {0}, which must be of one size on all of them, and {1} is no multiple of the "
        '{world} devices of this machine: pass a multiple, or call policy("sync")'
    ),
    ("cluster", "batch_sizes"): (
        "cluster(): {0}, which must be of one size on all of them, and {1} names several: pass one "
        "number; devices of a machine get batches by their speed, and under SYNC balance(True) "
        "cuts each step by it"
    ),
    ("cluster", "eval_every"): (
        "cluster(): eval_every(n) counts batches of one machine: leave it out, eval_fn is called "
        "when an epoch closes"
    ),
    ("cluster", "ema"): (
        "cluster(): ema(decay) follows the averages of one machine, not those of all: leave it out"
    ),
    ("cluster", "val_every_steps"): (
        "cluster(): val_dataset(every_steps=n) counts batches of one machine: leave it out, the "
        "validation takes place when an epoch closes"
    ),
    ("no graphs", "cuda_graphs"): "{1}: {0}: leave it out",
    ("foreign device", "loader_workers"): (
        "{1}: batches for {0} are copied in the worker's thread, since only CUDA streams are "
        "supported: leave it out"
    ),
    ("batch_sizes of averages", "drop_last"): (
        "{0} cannot be combined with {1} under {policy}, where the short batch of an epoch depends "
        'on the ranks\' speed; leave drop_last out, pass one number, or call policy("sync")'
    ),
    ("batch_sizes of averages", "scheduler of epochs"): (
        "{0} cannot be combined with a scheduler stepped once an epoch under {policy}: an epoch is "
        "no whole number of batches of the mean size; step it once a batch, pass one number, or "
        'call policy("sync")'
    ),
    ("batch_sizes", "shares under SYNC"): (
        "{0} and {1} both fix what each rank trains: leave one of them out"
    ),
    ("prefetch(0)", "loader_workers"): (
        "{0} turns loading ahead off, and {1} always loads ahead: leave one of them out"
    ),
    ("checkpoint_every", "no checkpoint_fn"): "{0} needs checkpoint_fn(f)",
    ("eval_every", "no eval_fn"): "{0} needs eval_fn(f)",
    ("val_dataset", "no val_fn"): (
        "{0} needs fn with Trainer.loop, which has no train_fn: pass fn=f, where f(model, batch) "
        "returns a dict of means such as {{'loss': loss}}"
    ),
    ("balance", "partition_ratios"): "{0} measures shares, {1} fixes them: leave one of them out",
    ("balance", "averages"): (
        "{0} cuts the global batches of SYNC; the other policies follow the ranks' speed anyway: "
        "leave it out"
    ),
    ("exchange in forward", "averages"): (
        "{0} is for SYNC, where all ranks train one batch; {1} trains each rank's own: leave it "
        'out or call policy("sync")'
    ),
    ("exchange in forward", "cuda_graphs"): (
        "{0} cannot be combined with {1}: a graph cannot hold the collectives of the forward "
        "pass; leave one of them out"
    ),
    ("bucket_cap_mb", "averages"): (
        "{0} is for SYNC, which exchanges gradients; {1} averages parameters: leave it out or "
        'call policy("sync")'
    ),
    **dict.fromkeys(
        (("bucket_cap_mb", name) for name in _EXCLUDE_BUCKETS),
        "{0} cannot be combined with {1}: gradients cannot be exchanged within its backward pass; "
        "leave one of them out",
    ),
    ("one optimizer", "schedulers"): "{1} is for several optimizers: pass one function",
    ("several optimizers", "accumulate"): _STEPS_EACH,
    ("several optimizers", "cuda_graphs"): _STEPS_EACH,
    ("several optimizers", "sync_batchnorm"): _STEPS_EACH,
    ("several optimizers", "all_gather"): _STEPS_EACH,
    ("several optimizers", "param_groups"): _STEPS_EACH,
    ("loop", "cuda_graphs"): "{1} captures train_fn: {0}",
    ("loop", "sync_batchnorm"): "{1} exchanges within train_fn: {0}",
    ("loop", "all_gather"): "{1} exchanges within train_fn: {0}",
    ("loop", "loss_reduction"): "{1} is for train_fn, and worker.step(loss) takes a mean: {0}",
    ("loop", "bucket_cap_mb"): "bucket_cap_mb(n) overlaps train_fn's last pass: {0}",
    ("loop", "param_groups"): (
        "{1} is for an optim_factory of parameters, and that of a loop receives the model: {0}"
    ),
    ("sharded", "averages"): (
        "{0} is for SYNC, which reduces gradients; {1} averages whole replicas: leave it out or "
        'call policy("sync")'
    ),
    ("shards", "continue"): (
        "{0} {1}, which loses the shard of a rank that dies: set checkpoint_dir(path), and resume "
        "with fewer devices"
    ),
    ("shards", "balance"): (
        "{0} {1}, which needs another group of ranks, in which shards would be missing after an "
        "out-of-memory error"
    ),
    ("shards", "fp16"): (
        '{0} {1}, which scales by the overflow of each rank\'s own shard: use "bf16"'
    ),
    ("shards", "ema"): "{0} {1}, which keeps a whole copy of the parameters",
    ("shards", "cuda_graphs"): "{0} {1}, which captures steps without their exchanges",
    (
        "shards",
        "bucket_cap_mb",
    ): "{0} bucket_cap_mb(n), which is for gradients that are not sharded",
    ("shards", "cluster"): "{0} cluster(...), which applies training to whole optimizers",
    ("shards", "several optimizers"): "{0} {1}, which reduce their gradients separately",
    ("sync", "progressive_dispatch"): (
        "{1} cannot be combined with {0}, where each rank trains its piece of every global "
        "batch; leave it out"
    ),
}
"""Texts of refusals, one for two states; ``{0}`` and ``{1}`` are the texts of these states.

The first row whose states are both true is raised.
"""


def _if_unequal(sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if len(set(sizes or ())) < 2 else sizes


def _batch_text(c: CoordinatorConfig, sizes: Sequence[int], global_batch: int) -> str:
    alike = len(set(sizes)) == 1
    num = c.accumulate * c.num_micro_batches
    notes = [f"accumulated {num} times"] if num > 1 else []
    if c.partition_ratios is not None:
        notes.insert(0, f"shares {' : '.join(f'{ratio:g}' for ratio in c.partition_ratios)}")
    if not global_batch:
        listed = str(sizes[0]) if alike else " + ".join(map(str, sizes))
        return ", ".join([f"batches of {listed}{' on each worker' if alike else ''}", *notes])
    whole = f"global batch {global_batch:,}"
    if c.policy is ApplyPolicy.SYNC and c.balance and len(sizes) > 1:
        return ", ".join([whole, "cut by measured speed", *notes])
    if len(sizes) == 1:
        listed = f" = {sizes[0]}" if notes else ""
    else:
        listed = f" = {len(sizes)} x {sizes[0]}" if alike else f" = {' + '.join(map(str, sizes))}"
    return ", ".join([whole + listed, *notes])
