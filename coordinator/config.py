"""Settings of the coordinator."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum
from fractions import Fraction
from typing import Any


class ApplyPolicy(Enum):
    """Averaging policy: when replicas exchange gradients or parameters."""

    SYNC = "sync"
    """Gradients are averaged before every optimizer step, weighted by samples or by the weights
    that come with the losses."""
    CADENCE = "cadence"
    """Parameters are averaged once the slowest rank has computed for ``anchor`` batches."""
    ASYNC = "async"
    """Parameters are averaged once every rank has run its own batch count; fast ranks
    continue by a bounded overshoot."""


class AverageBackend(Enum):
    """The transport of an averaging."""

    AUTO = "auto"
    """The first transport follows from devices and policy (see ``coordinator.choose_backend``);
    under ``CADENCE`` and ``ASYNC`` the run then measures the usable ones and keeps the cheapest.
    A transport that fails is replaced."""
    CPU = "cpu"
    """The coordinator averages snapshots; no rank waits for another."""
    THREAD = "thread"
    """All-reduce between the worker threads in shared memory."""
    GLOO = "gloo"
    """All-reduce by PyTorch's Gloo process group, one for each thread."""
    NCCL = "nccl"
    """All-reduce by NCCL, one communicator for each thread."""

    @property
    def collective(self) -> str:
        """Kind of collective that the ranks use; only for a resolved backend."""
        return "thread" if self is AverageBackend.CPU else self.value


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """Settings of the user that the coordinator and every worker share.

    Attributes:
        policy: Averaging policy; ``SYNC`` averages gradients in every step.
        global_batch_size: Samples of one optimizer step over all ranks, which is the unit in
            which steps are counted; ``None``: batches of one rank are counted.
        sync_batchnorm: Under ``SYNC``, batch norm layers use the statistics of the global batch,
            so that each rank trains its part of it in one pass.
        all_gather: The same, for losses that gather rows of the other ranks.
        metrics_every: Least batches in each metrics of steps; ``None``: none.
        collective_timeout_s: Seconds that a rank waits for its peers in a collective, or at a step
            of an own loop.
    """

    policy: ApplyPolicy = ApplyPolicy.SYNC
    global_batch_size: int | None = None
    sync_batchnorm: bool = False
    all_gather: bool = False
    metrics_every: int | None = None
    collective_timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class SharedConfig(SharedSettings):
    """These settings, and what follows for all ranks from devices and data.

    Attributes:
        num_samples: Length of the data set.
        batch_size: Samples in a batch of the ledger: the batch of one rank, or under ``SYNC``
            the global batch if ``global_batch_size`` is set.
        accumulate: Micro-batches in an optimizer step.
        num_micro_batches: Under ``SYNC`` with ``global_batch_size``, the micro-batches of a global
            batch; ``accumulate`` is then 1.
        auto_lr: Under ``CADENCE`` and ``ASYNC``, the coordinator decides a factor of the learning
            rate; see :class:`~coordinator.lr_factor.LrFactor`.
        balance: Under ``SYNC``, split each global batch by measured speed; pieces shrink if a
            device lacks memory for them.
    """

    num_samples: int = 0
    batch_size: int = 1
    accumulate: int = 1
    num_micro_batches: int = 1
    auto_lr: bool = False
    balance: bool = False


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings(SharedSettings):
    """Settings of the user that the coordinator receives as they are.

    Attributes:
        overhead_target: Share of the ranks' time that averaging may cost. The coordinator's own
            CPU time has a separate limit, ``rounds.COORDINATOR_SHARE``.
        speed_hint: ``(slow rank, ratio)``, or ``None``.
        max_batch_diff: Limit on the lead of the fastest rank, in batches.
        max_overshoot: Batches beyond its count that a rank may train under ``ASYNC``;
            ``None``: a quarter of the count, at least 2.
        divergence_threshold: See :class:`~coordinator.cadence.ConvergenceGuard`; ``None``: off.
        machine: The name of this machine in a cluster.
        granted: In a cluster, train only the batches granted by each round between machines, and
            end when a round says so; otherwise train all batches.
        max_steps: End after this many steps, as counted by ``CoordinatorConfig.count_steps``.
        eval_every: Steps between two evaluations within an epoch; ``None``: only at its end.
        eval_rank: Rank of the evaluation and checkpoint functions; ``None``: by measured cost.
        val_every_steps: Batches over all ranks between two validations within an epoch; ``None``:
            none.
        checkpoint_every: Epochs between two calls of the checkpoint function.
        scheduler_metric: Metric of each closed epoch that is sent to the ranks' schedulers.
        save_every: Epochs between two saves of the whole state, which is also saved at the
            end; ``None``: only on request.
        save_every_s: Seconds between two saves within an epoch; ``None``: off.
        save_every_steps: Steps between two saves within an epoch; ``None``: off.
        snapshot_timeout_s: Seconds after which a round on the CPU is given up.
        max_failed_rounds: Failed rounds in a row that end the run.
        continue_on_failure: Continue with the remaining ranks when one dies.
        stall_timeout_s: Seconds without progress after which the run fails.
        grace_s: Seconds that the workers have to leave after a failure.
    """

    drop_last: bool = False
    max_anchor: int = 200
    overhead_target: float = 0.10
    speed_hint: tuple[int, float] | None = None
    max_batch_diff: int | None = None
    max_overshoot: int | None = None
    divergence_threshold: float | None = 0.05
    machine: str = ""
    granted: bool = False
    max_steps: int | None = None
    eval_every: int | None = None
    eval_rank: int | None = None
    val_every: int = 1
    val_every_steps: int | None = None
    checkpoint_every: int | None = None
    scheduler_metric: str | None = None
    save_every: int | None = None
    save_every_s: float | None = None
    save_every_steps: int | None = None
    snapshot_timeout_s: float = 5.0
    max_failed_rounds: int = 5
    continue_on_failure: bool = False
    stall_timeout_s: float = 300.0
    grace_s: float = 5.0


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(CoordinatorSettings, SharedConfig):
    """The coordinator's settings, and what follows for it from devices and data.

    Attributes:
        devices: Device of each rank, by name; their number is the world size.
        batch_sizes: Batch size of each rank; ``None``: all equal. ``batch_size`` is then their
            mean under ``SYNC``, where a size may be 0, and otherwise their greatest common divisor,
            the ledger's unit.
        backend: The first transport, resolved, never ``AUTO``.
        alternatives: Other transports that the run may switch to.
        anchor: Batches of the slowest rank between two averagings, at the start.
        min_anchor: Lower limit to which the anchor shrinks while averaging is cheap; ``None``:
            ``anchor``.
        partition_ratios: Fixed share of each rank; under ``SYNC``, ``batch_sizes`` are fixed.
        read_ahead: Batches that each rank reads at a time.
        own_loop: Under ``SYNC``, each rank trains its part of a global batch in one pass, for loops
            of the user, which may make several steps on a batch.
        val_batches: Batches of the validation set; 0: there is none.
    """

    devices: tuple[str, ...]
    num_epochs: int
    batch_sizes: tuple[int, ...] | None = None
    backend: AverageBackend = AverageBackend.CPU
    alternatives: tuple[AverageBackend, ...] = ()
    backend_reason: str = ""
    anchor: int = 10
    min_anchor: int | None = None
    partition_ratios: tuple[float, ...] | None = None
    read_ahead: int = 1
    own_loop: bool = False
    evaluate: bool = False
    val_batches: int = 0

    @property
    def batch_parts(self) -> tuple[Fraction | int, ...]:
        """A batch of each rank, in steps."""
        sizes = self.batch_sizes
        if self.policy is ApplyPolicy.SYNC:
            return (1,) * self.world_size
        if self.global_batch_size is not None:
            own = sizes or (self.batch_size,) * self.world_size
            return tuple(Fraction(size, self.global_batch_size) for size in own)
        if sizes is None:
            return (1,) * self.world_size
        return tuple(Fraction(size * len(sizes), sum(sizes)) for size in sizes)

    @property
    def counted_as(self) -> Fraction | int:
        """A batch of the ledger, in batches of the mean size."""
        if self.batch_sizes is None or self.policy is ApplyPolicy.SYNC:
            return 1
        return Fraction(self.batch_size * len(self.batch_sizes), sum(self.batch_sizes))

    @property
    def has_epoch_work(self) -> bool:
        """True if averages that close an epoch are evaluated or handed over."""
        return self.evaluate or self.val_batches > 0 or self.checkpoint_every is not None

    @property
    def stops_within(self) -> bool:
        """True if there are evaluations within epochs."""
        return self.eval_every is not None or self.val_every_steps is not None

    @property
    def batches_per_epoch(self) -> int:
        """Batches of the ledger in an epoch."""
        num = self.num_samples
        if self.drop_last and self.global_batch_size is not None:
            num -= num % self.global_batch_size
        return num // self.batch_size if self.drop_last else -(-num // self.batch_size)

    @property
    def steps_per_epoch(self) -> Fraction | int:
        """Steps in an epoch: global batches if ``global_batch_size`` is set, else batches."""
        num, size = self.num_samples, self.global_batch_size
        if size is None:
            return self.batches_per_epoch * self.counted_as
        return num // size if self.drop_last else -(-num // size)

    @property
    def total_steps(self) -> int:
        """Steps in all epochs, whatever :attr:`max_steps` is."""
        return math.ceil(self.num_epochs * self.steps_per_epoch)

    @property
    def planned_steps(self) -> int:
        """Steps in the run, unless it ends early."""
        return self.total_steps if self.max_steps is None else min(self.total_steps, self.max_steps)

    @property
    def step_count(self) -> StepCount | None:
        """Counts global batches; ``None``: batches of the ledger are counted."""
        size = self.global_batch_size
        if size is None or size == self.batch_size:
            return None
        return StepCount(
            batch_size=self.batch_size,
            global_batch_size=size,
            batches_per_epoch=self.batches_per_epoch,
            steps_per_epoch=int(self.steps_per_epoch),
        )

    def count_steps(self, num_batches: int) -> int:
        """The position of schedules after ``num_batches`` of the ledger.

        With ``global_batch_size``, completed global batches, the short one of an epoch included;
        otherwise batches of the mean size over all ranks.
        """
        count = self.step_count
        return (
            math.ceil(num_batches * self.counted_as) if count is None else count.steps(num_batches)
        )

    def count_batches(self, num_steps: int) -> int:
        """Batches of the ledger in ``num_steps`` steps."""
        count = self.step_count
        return math.ceil(num_steps / self.counted_as) if count is None else count.batches(num_steps)

    @property
    def uses_collectives(self) -> bool:
        """True if ranks use a collective, in their steps or in rounds."""
        if self.world_size == 1:
            return False
        return self.policy is ApplyPolicy.SYNC or any(
            backend is not AverageBackend.CPU for backend in self.backends
        )

    @property
    def backends(self) -> tuple[AverageBackend, ...]:
        """All transports that the run may use, the first one first."""
        return (self.backend, *self.alternatives)

    @property
    def world_size(self) -> int:
        """Number of ranks at the start."""
        return len(self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCount:
    """Counts global batches in batches of the ledger, where these are parts of global batches.

    Attributes:
        batch_size: Samples in a batch of the ledger.
        global_batch_size: Samples in a global batch.
        batches_per_epoch: Batches in an epoch.
        steps_per_epoch: Global batches in an epoch, the short one included.
    """

    batch_size: int
    global_batch_size: int
    batches_per_epoch: int
    steps_per_epoch: int

    def steps(self, num_batches: int) -> int:
        """Completed global batches after ``num_batches``."""
        epochs, rest = divmod(num_batches, self.batches_per_epoch)
        return epochs * self.steps_per_epoch + rest * self.batch_size // self.global_batch_size

    def batches(self, num_steps: int) -> int:
        """Batches in ``num_steps`` global batches."""
        epochs, rest = divmod(num_steps, self.steps_per_epoch)
        part = rest * self.global_batch_size // self.batch_size
        return epochs * self.batches_per_epoch + min(part, self.batches_per_epoch)


def part_of(settings: Any, kind: type[Any]) -> dict[str, Any]:
    """The values of the fields that ``kind`` declares, by name."""
    return {each.name: getattr(settings, each.name) for each in fields(kind)}
