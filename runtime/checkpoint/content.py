"""CheckpointData: the content of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from torch import Tensor

from coordinator.cluster.cluster_ledger import LedgerState
from coordinator.codec import Count, Finite, Seconds
from coordinator.saved_run import SavedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointData:
    """The state of a run between two steps.

    Must not be modified after it was submitted, since another thread writes it later.

    Attributes:
        weights: Full state dict of the bare module on the CPU, in the module's order. Tied
            tensors appear under each of their names and may share memory.
        run: The coordinator's state.
        settings: Settings that must match when resuming.
        within: True if it was taken within an epoch.
        orders: A sampler's order of each open epoch.
        cluster: The state that the machines of a cluster share; ``None`` without one.
        reason: Of the last one of a run, the reason for its end; see ``TrainedState.reason``.
        error: The run's error; empty if there was none.
    """

    weights: dict[str, Tensor]
    ranks: tuple[SavedRank, ...]
    run: SavedRun
    settings: SavedSettings
    within: bool = False
    orders: dict[Count, Tensor] = field(default_factory=dict)
    sampler: SavedSampler | None = None
    stream: SavedStream | None = None
    cluster: SavedCluster | None = None
    reason: str = ""
    error: str = ""

    @property
    def epoch(self) -> int:
        """Number of closed epochs."""
        return self.run.num_closed

    @property
    def global_step(self) -> int:
        return self.run.global_step

    @property
    def failed(self) -> bool:
        """True if it was saved because the run failed."""
        return bool(self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSettings:
    """Settings that a resumed run must share with the checkpoint."""

    global_batch_size: Annotated[int, 1] | None
    batch_size: Annotated[int, 1]
    num_samples: Annotated[int, 1]
    drop_last: bool
    seed: Count
    accumulate: Annotated[int, 1]
    sync: bool
    sampler: bool
    stream: bool
    shuffle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRank:
    """A rank's own state: all of its training except the weights.

    Attributes:
        groups: The names of the parameters in each group of the optimizer; empty: without a name.
        added: Epochs whose ``epoch_fn`` added groups, and the number of groups before.
        lr_scale: Factor of the learning rate in the settings.
        generators: ``None`` for a rank that the saved run did not have.
        version: Averages applied.
        local_step: Batches trained.
        epoch: Epoch of the last plan, which the run may not have started yet.
        begun_epoch: The last epoch that the rank has begun.
        body_steps: Optimizer steps made by the body of its own loop.
        buffers: Buffers that are not in the weights, by name.
        together: Optimizer steps made with the peers, averagings of buffers, and samples since.
        shards: The shards of the parameters whose state the optimizer holds; ``None``: it has the
            state of whole parameters.
        train_point: The parameters in training, of an optimizer with modes, in flat tensors.
        strides: The strides of each parameter, which order its elements in flat tensors.
    """

    stepper: SavedStepper
    module: SavedModule
    schedule: SavedSchedule
    groups: tuple[tuple[str, ...], ...]
    added: tuple[tuple[int, int], ...]
    lr_scale: Annotated[float, 1e-300]
    generators: SavedGenerators | None
    version: Count
    local_step: Count
    epoch: Annotated[int, -1]
    begun_epoch: Annotated[int, -1]
    body_steps: Count
    buffers: dict[str, Tensor | dict[str, Any]]
    together: tuple[Count, Count, Count]
    shards: ShardFacts | None = None
    train_point: tuple[Tensor, ...] | None = None
    ema: SavedEma | None = None
    strides: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStepper:
    """State of the optimizer and the gradient scaler.

    Attributes:
        kind: The name of the optimizer's class.
        optimizer: Its state dict.
        numbers: Numbers of its own, and of each member's own, that steps have changed.
        scaler: State dict of the scaler; ``None``: losses are not scaled.
    """

    kind: str
    optimizer: dict[str, Any]
    numbers: tuple[dict[str, bool | int | float], ...] = ()
    scaler: dict[str, Count | Seconds] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModule:
    """State of the module that is not in its weights.

    Attributes:
        frozen: Frozen parameters that have changed since the start, by name.
        extra_state: Extra state of submodules, by name.
        modes: True for each submodule in train mode, by name.
    """

    frozen: dict[str, Tensor]
    extra_state: dict[str, Any]
    modes: dict[str, bool]
    requires_grad: dict[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSchedule:
    """State of the learning rates.

    Attributes:
        position: Steps of the scheduler.
        origin: Position of the schedule at which the scheduler begins; ``None``: at its first
            step.
        attached_in: Epoch whose ``epoch_fn`` attached the scheduler; ``None``: the run has it from
            the start, or none.
        kind: The names of the schedulers' classes; empty without one.
        every: Batches between two steps of the scheduler.
        base: Rates without the scale.
        scheduler: State dict of the scheduler, without functions.
        settings: Settings of the scheduler that no step has changed, as text.
    """

    position: Count
    origin: int | None
    attached_in: int | None
    kind: str
    every: Count
    scale: Annotated[float, 0.0]
    base: tuple[Finite, ...]
    scheduler: dict[str, Any] | None
    settings: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGenerators:
    """States of a rank's generator and of the process's.

    Attributes:
        numpy: With tensors in place of arrays.
        device: Of the rank's device, if it has one of its own.
    """

    worker: Tensor
    torch: Tensor
    python: Any
    numpy: dict[str, Any]
    device: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedEma:
    """State of the moving average of the parameters.

    Attributes:
        flats: In flat tensors.
        batches_due: Batches since the last update.
    """

    flats: tuple[Tensor, ...]
    batches_due: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """A rank's place among the shards, and each whole parameter in the order of the optimizer."""

    rank: Count
    num_shards: Annotated[int, 1]
    shapes: tuple[tuple[Count, ...], ...]
    strides: tuple[tuple[Count, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSampler:
    """State of a sampler's own generator before its draws of an epoch."""

    epoch: Count
    state: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStream:
    """State of a stream at or before its first untrained item.

    Attributes:
        item: Index of its next item.
        generator: State of the epoch's generator there.
        stream: Its own state dict.
    """

    item: Count
    generator: Tensor
    stream: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCluster:
    """The state that the machines of a cluster share; a run on one machine ignores it.

    Attributes:
        tensors: The global state, by name.
    """

    ledger: LedgerState
    tensors: dict[str, Tensor]
