"""RunSettings: the settings of a run, and the checks that they fit together."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coordinator.backend_choice import candidate_backends
from coordinator.config import ApplyPolicy, AverageBackend, CoordinatorConfig
from coordinator.messages import MAX_REPORT_INTERVAL_S
from coordinator.splitting import split_by_ratio
from runtime.callbacks import Callback, EarlyStopping, KeepBest
from runtime.checkpoint.files import locks_fault
from runtime.cluster.cluster_run import DataFacts
from runtime.cluster.cluster_settings import ClusterSettings
from runtime.core.capabilities import GRAPHS, missing_in
from runtime.core.checks import check_directory, default_devices
from runtime.data.data_path import DataOptions
from runtime.data.stream import is_stream
from runtime.device.base import Device
from runtime.device.cuda import devices_differ
from runtime.evaluation.validation_data import ValidationData
from runtime.fsdp.shard_reducer import RunSharding
from runtime.fsdp.strategy import ShardingStrategy, check_strategy
from runtime.loggers import CombinedLogger
from runtime.timeline import Timeline
from runtime.timeline.summary import RunFacts
from runtime.worker.worker_config import UserFunctions, WorkerConfig

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """All settings of a run; :class:`~runtime.trainer.TrainerBuilder` fills them.

    The configurations of coordinator, workers and data path are embedded. A value is set by name
    in every part that has such a field (:meth:`with_values`); values that depend on devices and
    data are filled in when the run starts (:meth:`for_run`). Fields are documented by their part
    or by the builder's method of the same name.

    Attributes:
        coordinator: Settings of the coordinator; a size or length of 0 is not set.
        requested_devices: ``None``: every visible CUDA device, else one CPU.
        requested_balance: ``None``: if devices differ.
        requested_bucket_mb: ``None``: default; 0: reduce gradients after the backward pass.
        anchor: ``None``: default, within its limits.
        min_anchor: ``None``: ``anchor`` if set, else default.
        dataset_length: Items in a stream's epoch; ``None``: the stream's length.
        val_dataset: The validation set; ``None``: there is none.
        steps_per_epoch: Steps of each worker in an epoch without a data set.
        sampler: Yields each epoch's order; ``None``: a random permutation.
        sharding: ``None``: each rank has all gradients and optimizer state.
        seed: ``None``: 0, without seeding the process generator.
    """

    functions: UserFunctions
    coordinator: CoordinatorConfig = field(
        default_factory=lambda: CoordinatorConfig(
            devices=(), num_samples=0, batch_size=0, num_epochs=0
        )
    )
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    data: DataOptions = field(default_factory=DataOptions)
    dataset: Any = None
    dataset_length: int | None = None
    steps_per_epoch: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    val_dataset: Any = None
    sampler: Any = None
    requested_devices: tuple[torch.device, ...] | None = None
    requested_backend: AverageBackend = AverageBackend.AUTO
    requested_balance: bool | None = None
    requested_bucket_mb: float | None = None
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

    def with_values(self, **values: Any) -> RunSettings:
        """Return a copy with values replaced, here and in every part that has such a field.

        Raises:
            TypeError: No part has such a field.
        """
        changed = {name: values[name] for name in values if name in _field_names(self)}
        known = set(changed)
        for part in ("functions", "coordinator", "worker", "data"):
            settings = getattr(self, part)
            own = {name: values[name] for name in values if name in _field_names(settings)}
            if own:
                changed[part] = replace(settings, **own)
            known |= set(own)
        if known != set(values):
            raise TypeError(f"there is no setting {', '.join(sorted(set(values) - known))}")
        return replace(self, **changed)

    def with_steps(self) -> RunSettings:
        """Return a copy whose data set counts steps, if ``steps_per_epoch`` takes its place."""
        if self.steps_per_epoch is None:
            return self
        steps = torch.arange(self.steps_per_epoch * len(self.resolved_devices()))
        return self.with_values(dataset=(steps,), batch_size=1)

    def with_callbacks(self) -> RunSettings:
        """Return a copy whose ``metrics_fn`` and ``checkpoint_fn`` also call the callbacks."""
        config = self
        if self.functions.checkpoint_fn and self.coordinator.checkpoint_every is None:
            config = config.with_values(checkpoint_every=1)
        if not self.callbacks:
            return config
        first = () if self.metrics_fn is None else (self.metrics_fn,)
        config = config.with_values(
            metrics_fn=CombinedLogger(*first, *(c.dispatch for c in self.callbacks))
        )
        keepers = [callback for callback in self.callbacks if callback.takes_weights]
        if not keepers:
            return config
        checkpoint_fn = self.functions.checkpoint_fn
        every = config.coordinator.checkpoint_every

        def hand_over(version: int, model: nn.Module) -> None:
            for keeper in keepers:
                try:
                    keeper.weights(version - 1, model)
                except Exception:
                    logger.exception("%r failed for epoch %d", keeper, version - 1)
            if checkpoint_fn is not None and every is not None and version % every == 0:
                checkpoint_fn(version, model)

        return config.with_values(checkpoint_fn=hand_over, checkpoint_every=1)

    def with_ledger_batch_size(self) -> RunSettings:
        """Return a copy with the batch size of the coordinator's ledger.

        With a batch size for each rank and a policy other than ``SYNC``, that is their greatest
        common divisor. Under ``SYNC`` with ``global_batch_size`` it is the global batch.

        Raises:
            ValueError: The global batch cannot be split.
        """
        if self.coordinator.global_batch_size is not None:
            return self._with_global_batch(self.coordinator.global_batch_size)
        sizes = self.coordinator.batch_sizes
        if sizes is None or len(set(sizes)) == 1 or self.coordinator.policy is ApplyPolicy.SYNC:
            return self
        config = self.with_values(batch_size=math.gcd(*sizes))
        return replace(config, data=replace(config.data, batch_size=max(sizes)))

    def _with_global_batch(self, size: int) -> RunSettings:
        c, world = self.coordinator, len(self.resolved_devices())
        way, num = f"global_batch_size({size})", c.accumulate
        if size < world * num:
            micro = f" in each of accumulate({num}) micro-batches" if num > 1 else ""
            raise ValueError(
                f"{way} is too small for {world} devices, which need a sample each{micro}: pass "
                f"at least {world * num}, or fewer devices"
            )
        if c.policy is ApplyPolicy.SYNC:
            parts = split_by_ratio(-(-size // num), [1] * world)
            config = self.with_values(batch_size=size, accumulate=1, num_micro_batches=num)
            worker = replace(config.worker, batch_sizes=parts if world * num > 1 else None)
            data = replace(config.data, batch_size=parts[0], accumulate=num)
            return replace(config, worker=worker, data=data)
        if size % num:
            raise ValueError(
                f"{way} is no multiple of accumulate({num}), whose micro-batches have one size "
                f"under {c.policy.name}: pass {size // num * num} or {(size // num + 1) * num}, or "
                'call policy("sync")'
            )
        parts = split_by_ratio(size // num, [1] * world)
        config = self.with_values(batch_size=math.gcd(*parts), batch_sizes=parts)
        return replace(config, data=replace(config.data, batch_size=parts[0]))

    def for_run(
        self,
        devices: Sequence[torch.device],
        num_samples: int,
        backend: AverageBackend,
        grace_s: float,
        backend_reason: str = "",
    ) -> RunSettings:
        """Return a copy completed for these devices and this data, except for the workers' ranks.

        Args:
            devices: The device of each rank.
            num_samples: Length of the data set.
            grace_s: Seconds that workers have to exit after a failure.
        """
        c = self.coordinator
        _, *others = candidate_backends(self.requested_backend, c.policy, backend, len(devices))
        if self.is_sharded:
            others = []  # shards would be missing in another group
        sizes = self._own_sizes()
        averages = c.policy is not ApplyPolicy.SYNC and len(devices) > 1 and self.cluster is None
        auto_lr = averages and self.lr_scale_ratio is None
        coordinator = replace(
            c,
            balance=self.resolved_balance(devices),
            batch_sizes=sizes,
            partition_ratios=None if c.policy is ApplyPolicy.SYNC else c.partition_ratios,
            devices=tuple(str(device) for device in devices),
            num_samples=num_samples,
            backend=backend,
            alternatives=tuple(others),
            backend_reason=backend_reason,
            anchor=self.resolved_anchor(),
            min_anchor=self.resolved_min_anchor(),
            evaluate=self.functions.eval_fn is not None,
            read_ahead=self.data.loader_workers,
            own_loop=self.functions.loop is not None,
            grace_s=grace_s,
            auto_lr=auto_lr,
        )
        every = int(coordinator.steps_per_epoch) if self.scheduler_interval == "epoch" else 1
        is_split = c.policy is ApplyPolicy.SYNC and c.global_batch_size is not None
        worker = replace(
            self.worker,
            **coordinator.shared,
            sharding=self.sharding if self.is_sharded else None,
            batch_sizes=self.worker.batch_sizes if is_split and sizes is None else sizes,
            bucket_bytes=self.resolved_bucket_bytes(backend),
            world_size=len(devices),
            falls_back=bool(others),
            lr_scale=1.0 + (len(devices) - 1) * (self.lr_scale_ratio or 0.0),
            total_steps=coordinator.total_steps,
            step_count=coordinator.step_count,
            schedule_every=0 if c.scheduler_metric is not None else every,
            scheduler_steps=c.num_epochs
            if c.scheduler_metric is not None
            else -(-self.total_batches(num_samples) // every),
            num_cpu_workers=sum(device.type == "cpu" for device in devices),
            report_interval_s=min(max(2, len(devices)) / REPORTS_PER_S, MAX_REPORT_INTERVAL_S),
        )
        return replace(self, coordinator=coordinator, worker=worker)

    def _own_sizes(self) -> tuple[int, ...] | None:
        """The batch size of each rank, or its part of a global batch; ``None``: all equal."""
        c = self.coordinator
        sizes = c.batch_sizes
        if c.policy is ApplyPolicy.SYNC and c.partition_ratios is not None:
            whole = c.batch_size * len(c.partition_ratios)
            if c.global_batch_size is not None:
                whole = -(-c.global_batch_size // c.num_micro_batches)
            sizes = split_by_ratio(whole, c.partition_ratios)
        return None if len(set(sizes or ())) < 2 else sizes

    def facts(self) -> RunFacts:
        """The facts of a run; of settings completed by :meth:`for_run`."""
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
            batch_text=_batch_text(self, sizes, global_batch),
            steps_per_epoch=-(-min(num_samples, kept) // per_step),
            lr_factor=self.worker.lr_scale,
        )

    def total_batches(self, num_samples: int) -> int:
        """Steps in the whole run, for a data set of ``num_samples``: batches over all ranks, or
        global batches.
        """
        c = replace(self.coordinator, num_samples=num_samples)
        return c.total_steps if c.max_steps is None else min(c.total_steps, c.max_steps)

    def validation_data(self, contexts: Sequence[Device]) -> ValidationData | None:
        """The validation set, if there is one.

        Args:
            contexts: The device context of each rank.
        """
        if self.val_dataset is None:
            return None
        return ValidationData(
            self.val_dataset,
            contexts,
            batch_size=self.data.batch_size,
            collate_fn=self.collate_fn,
            loader_workers=self.data.loader_workers,
            lock=self.worker.dataset_lock,
            seed=self.worker.seed,
        )

    def resolved_balance(self, devices: Sequence[torch.device]) -> bool:
        """True if ``SYNC`` cuts batches by measured speed: as requested, else if devices differ."""
        if self.requested_balance is not None or self.is_sharded:
            return bool(self.requested_balance)
        c = self.coordinator
        fits = c.policy is ApplyPolicy.SYNC and c.partition_ratios is None
        return fits and devices_differ(devices)

    def advises_balance(self, devices: Sequence[torch.device]) -> bool:
        """True if a summary may recommend ``balance(True)``: possible, and not decided."""
        c = self.coordinator
        is_fixed = c.partition_ratios is not None or len(set(c.batch_sizes or ())) > 1
        is_decided = self.requested_balance is not None or self.resolved_balance(devices)
        return not (is_fixed or is_decided or self.is_sharded or _share_a_gpu(devices))

    def resolved_bucket_bytes(self, backend: AverageBackend) -> int | None:
        """Approximate size of a gradient bucket under ``SYNC``; ``None``: no buckets."""
        asked_mb = self.requested_bucket_mb
        if asked_mb is None and self.functions.loop is None and not self.is_sharded:
            fits = self.coordinator.policy is ApplyPolicy.SYNC and backend is AverageBackend.NCCL
            beside = any(getattr(self.worker, name) for name in _EXCLUDE_BUCKETS)
            asked_mb = DEFAULT_BUCKET_MB if fits and not beside else 0.0
        return max(1, int(asked_mb * 2**20)) if asked_mb else None

    @property
    def is_sharded(self) -> bool:
        """True if ranks hold shards."""
        sharding = self.sharding
        return sharding is not None and sharding.strategy is not ShardingStrategy.NO_SHARD

    def resolved_devices(self) -> tuple[torch.device, ...]:
        """The requested devices, else every visible CUDA device, else one CPU."""
        return self.requested_devices or default_devices()

    def resolved_anchor(self) -> int:
        """The anchor at the start of the run."""
        if self.anchor is not None:
            return self.anchor
        return min(max(DEFAULT_ANCHOR, self.min_anchor or 1), self.coordinator.max_anchor)

    def resolved_min_anchor(self) -> int:
        """Lower limit of the anchor; an explicit anchor without a limit is its own."""
        if self.min_anchor is not None:
            return self.min_anchor
        is_async = self.coordinator.policy is ApplyPolicy.ASYNC
        floor = DEFAULT_MIN_ANCHOR_ASYNC if is_async else DEFAULT_MIN_ANCHOR
        return self.anchor or min(floor, self.coordinator.max_anchor)

    def check_combination(self) -> None:
        """Check that the settings are complete and that none excludes another, before data is read.

        Raises:
            ValueError: A required value is missing, or a row of the table of exclusions applies.
        """
        c = self.coordinator
        if self.steps_per_epoch is None:
            if self.dataset is None:
                raise ValueError("dataset is not set: call .dataset(ds) before .run()")
            if not (c.batch_size or c.global_batch_size):
                raise ValueError(
                    "batch_size is not set: call .batch_size(n), the samples of one device, or "
                    ".global_batch_size(n), those of one optimizer step over all devices, before "
                    ".run(), or fit(..., batch_size=n)"
                )
        if not c.num_epochs:
            raise ValueError("num_epochs is not set: call .num_epochs(n) before .run()")
        facts = {"policy": c.policy.name, "world": len(self.resolved_devices())}
        states = _states(self)
        for (name, other), text in _EXCLUSIONS.items():
            (is_set, first), (is_other_set, second) = states[name], states[other]
            if is_set and is_other_set:
                raise ValueError(text.format(first, second, **facts))

    def check(self, num_samples: int, devices: Sequence[torch.device]) -> None:
        """Check that the settings fit the data and the devices.

        Raises:
            ValueError: A value does not fit.
        """
        c = self.coordinator
        world = len(devices)
        name = "batch_size" if c.global_batch_size is None else "global_batch_size"
        size = c.global_batch_size or c.batch_size
        if c.drop_last and num_samples < size:
            raise ValueError(
                f"drop_last(True) would leave no batch: the data set has {num_samples} samples, "
                f"fewer than {name}({size}); lower {name} or call drop_last(False)"
            )
        self._check_batch_sizes(world)
        self._check_batch_fits(num_samples, world)
        if c.partition_ratios is not None and len(c.partition_ratios) != world:
            raise ValueError(
                f"partition_ratios has {len(c.partition_ratios)} entries for {world} devices"
            )
        for name, rank in (("speed_hint", (c.speed_hint or (0,))[0]), ("eval_rank", c.eval_rank)):
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
        c = self.coordinator
        anchor, least = self.resolved_anchor(), self.resolved_min_anchor()
        if anchor > c.max_anchor:
            raise ValueError(
                f"anchor({anchor}) is above max_anchor({c.max_anchor}); raise max_anchor"
            )
        if least > anchor:
            raise ValueError(
                f"min_anchor({least}) is above the anchor at the start, {anchor}; lower it or "
                f"raise anchor and max_anchor({c.max_anchor})"
            )

    def cluster_facts(self, num_samples: int) -> DataFacts:
        """The settings that all machines of a cluster must share, for ``num_samples`` samples."""
        c = replace(self.coordinator, num_samples=num_samples)
        settings = {
            "num_samples": num_samples,
            "batch_size": c.batch_size,
            "seed": self.worker.seed,
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
        c = self.coordinator
        if c.batch_sizes is None or c.global_batch_size is not None:
            return
        sizes = list(c.batch_sizes)
        if len(sizes) != world:
            raise ValueError(
                f"batch_size({sizes}) has {len(sizes)} entries for {world} devices: pass one "
                "number for each device, or one for all"
            )
        if c.policy is ApplyPolicy.SYNC and sum(sizes) % world:
            least = sum(sizes) // world * world
            raise ValueError(
                f"batch_size({sizes}): the sum of the sizes, {sum(sizes)}, is no multiple of the "
                f"{world} devices, as {least} and {least + world} are; change one of them"
            )

    def _check_batch_fits(self, num_samples: int, world: int) -> None:
        """Refuse a batch larger than the data set, or warn if that is a trial of a few samples."""
        c = self.coordinator
        if c.global_batch_size is not None:
            name, largest, fitting = "global_batch_size", c.global_batch_size, num_samples
        else:
            name, largest = "batch_size", max(c.batch_sizes or (c.batch_size,))
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
        metric = self.coordinator.scheduler_metric
        followed = [] if metric is None else [("scheduler", metric)]
        followed += [
            (type(each).__name__, each.metric)
            for each in self.callbacks
            if isinstance(each, EarlyStopping | KeepBest)
        ]
        for owner, name in followed:
            way = f"{owner}(metric={name!r})"
            if name.startswith("eval/") and self.functions.eval_fn is None:
                raise ValueError(f"{way} needs eval_fn(f), which gives {name[5:]!r}")
            if name.startswith("val/") and self.val_dataset is None:
                raise ValueError(f"{way} needs val_dataset(ds), which gives {name[4:]!r}")


_EXCLUDE_BUCKETS = ("cuda_graphs", "sync_batchnorm", "all_gather")
"""Settings under which gradients cannot be exchanged within the backward pass."""


def _states(s: RunSettings) -> dict[str, tuple[object, str]]:
    """The settings and states in rows of exclusions: true if set, and their text in a message."""
    c, w, f, devices = s.coordinator, s.worker, s.functions, s.resolved_devices()
    whole, lockstep = c.global_batch_size, c.policy is ApplyPolicy.SYNC
    sizes = list(c.batch_sizes or ()) if whole is None else []
    differ, fixed = len(set(sizes)) > 1, c.partition_ratios is not None
    part, rest = divmod(whole or 0, c.accumulate)
    foreign = next((device for device in devices if device.type not in ("cpu", "cuda")), None)
    exchange = next((name for name in ("sync_batchnorm", "all_gather") if getattr(w, name)), "")
    sharded = "" if s.sharding is None else f"sharded(ShardingStrategy.{s.sharding.strategy.name})"
    several = isinstance(f.optim_factory, Mapping)
    keeps = f.checkpoint_fn is not None or any(callback.takes_weights for callback in s.callbacks)
    return {
        **{name: (getattr(w, name), f"{name}(True)") for name in _EXCLUDE_BUCKETS},
        "accumulate": (c.accumulate > 1, f"accumulate({c.accumulate})"),
        "averages": (not lockstep, c.policy.name),
        "balance": (s.requested_balance, "balance(True)"),
        "batch_sizes": (differ, f"batch_size({sizes})"),
        "batch_sizes of averages": (differ and not lockstep, f"batch_size({sizes})"),
        "bucket_cap_mb": (s.requested_bucket_mb, f"bucket_cap_mb({s.requested_bucket_mb or 0:g})"),
        "checkpoint_every": (c.checkpoint_every is not None, "checkpoint_every(n)"),
        "cluster": (s.cluster is not None, "batches are assigned to machines by their numbers"),
        "continue": (w.survives, 'on_worker_failure("continue")'),
        "drop_last": (c.drop_last, "drop_last(True)"),
        "ema": (w.ema is not None, f"ema({w.ema})"),
        "eval_every": (c.eval_every is not None, f"eval_every({c.eval_every})"),
        "exchange in forward": (exchange and len(devices) > 1, f"{exchange}(True)"),
        "foreign device": (foreign, str(foreign)),
        "fp16": (w.precision == "fp16", 'precision("fp16")'),
        "loader_workers": (s.data.loader_workers, f"loader_workers({s.data.loader_workers})"),
        "loop": (f.loop is not None, "leave it out with Trainer.loop, or use Trainer.builder"),
        "loss_reduction": (w.loss_reduction != "mean", 'loss_reduction("sum")'),
        "no checkpoint_fn": (not keeps, ""),
        "no eval_fn": (f.eval_fn is None, ""),
        "no graphs": (foreign, "" if foreign is None else missing_in(foreign, GRAPHS)),
        "no loop": (f.loop is None, ""),
        "no val_fn": (f.loop is not None and not f.val_fn, ""),
        "one optimizer": (f.loop is None and not several, ""),
        "own data": (s.dataset is not None or c.batch_size or whole, ""),
        "param_groups": (f.param_groups is not None, "param_groups(f)"),
        "partition_ratios": (fixed, "partition_ratios"),
        "prefetch(0)": (s.data.prefetch == 0, "prefetch(0)"),
        "progressive_dispatch": (s.progressive_dispatch, "progressive_dispatch(True)"),
        "sampler": (s.sampler is not None, "sampler()"),
        "scheduler of epochs": (s.scheduler_interval == "epoch", ""),
        "schedulers": (isinstance(f.scheduler, Mapping), "scheduler({...})"),
        "several optimizers": (several, "several optimizers"),
        "sharded": (sharded, sharded),
        "shards": (s.is_sharded, f"{sharded} cannot be combined with"),
        "shares under SYNC": (fixed and lockstep, "partition_ratios"),
        "steps_per_epoch": (s.steps_per_epoch, f"steps_per_epoch({s.steps_per_epoch})"),
        "stream": (is_stream(s.dataset), "the data set is a stream"),
        "sync": (lockstep, c.policy.name),
        "uneven parts": (
            not (lockstep or rest) and part % len(devices),
            f"global_batch_size({whole})",
        ),
        "val_dataset": (s.val_dataset is not None, "val_dataset(ds)"),
        "val_every_steps": (c.val_every_steps, f"val_dataset(every_steps={c.val_every_steps})"),
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


def _share_a_gpu(devices: Sequence[torch.device]) -> bool:
    """True if ranks share a GPU, where the steps of one take longer beside those of another."""
    gpus = [device for device in devices if device.type != "cpu"]
    return len(set(gpus)) < len(gpus)


def _batch_text(settings: RunSettings, sizes: Sequence[int], global_batch: int) -> str:
    c = settings.coordinator
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


def _field_names(settings: Any) -> set[str]:
    return {each.name for each in fields(settings)}
