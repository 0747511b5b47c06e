"""Data-parallel training with one call per mini-batch."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coordinator.config import AverageBackend
from runtime.collective import Collective, create_collectives
from runtime.core.checks import check_callable, check_devices, check_float
from runtime.core.errors import NonFiniteError, ReplicaFailed, ReplicaMismatch
from runtime.core.threads import Closeable
from runtime.data.batches import movable_parts, move_batch
from runtime.loop.balance import unequal_devices
from runtime.loop.collective_group import CollectiveGroup, resolve_backend
from runtime.loop.loop_recorder import LoopRecorder
from runtime.loop.loop_replica import LoopReplica, Options
from runtime.loop.old_build import RankModelFactory, build_replicas
from runtime.loop.rank_threads import TaskOutcome
from runtime.loop.replica_mirror import ReplicaMirror
from runtime.loop.runner import Runner
from runtime.loop.shard_loss import Seconds, ShardLoss, ShardLossFn, read_result
from runtime.loop.shard_samples import count_samples, holds_columns, shard_samples
from runtime.replica.build import (
    CopyingFactory,
    ModelFactory,
    OptimFactory,
    Template,
    build_model,
    copy_template,
)
from runtime.replica.gradients import (
    average_gradients,
    check_gradients,
    gradient_norm,
    has_non_finite,
)
from runtime.replica.non_finite import first_bad

_REMEDY = (
    "No replica was changed. Lower the learning rate, set max_grad_norm, or guard the loss "
    "against such batches"
)


class DataParallelCoordinator(Closeable):
    """Trains one model on several devices, a mini-batch at a time, in the user's own loop.

    Each replica runs in its own thread, ``data-parallel-<rank>``, which lives until
    :meth:`close`; replicas on the CPU divide its cores. Every :meth:`train_batch` leaves all
    replicas with the same parameters and buffers, bit for bit if the devices are of one kind
    and the optimizer draws no random numbers. On devices of different kinds every replica
    copies replica 0's parameters after each step. Replicas on the CPU share PyTorch's
    process-wide generator, so dropout there draws in no fixed order.

    Use it from one thread at a time. It is a context manager; it is also closed when it is
    garbage-collected and when the interpreter exits.

    Args:
        model_factory: ``f(device) -> nn.Module``, called in each replica's thread, one at a
            time, replica 0 first; or a module, of which each replica gets a copy; the module
            itself is not changed. All start from replica 0's weights. The set of trainable
            parameters is fixed then; only those are reduced.
        optim_factory: ``f(params) -> Optimizer`` with the trainable parameters. Their memory
            has been moved by then: keep parameters, not ``.data``.
        loss_fn: ``f(model, samples)`` returns the mean loss of the samples; ``(loss, weight)``
            if it is a mean over something else (tokens, a sum of class weights); ``(loss,
            number correct)``; ``(loss, number correct, weight)``; or a :class:`Weighted`, which
            is never ambiguous. In a tuple of two the number is a weight if, on any replica of
            the batch, it exceeds the number of samples or is fractional above 1, and from then
            on it always is; otherwise it counts right samples. If a later batch contradicts
            that, it is an error. So if a weight may never exceed the samples (one label per
            sample), return a :class:`Weighted`. Replicas with weight 0 add nothing, even if their
            loss is NaN. Runs in all replicas' threads at the same time; enter autocast there.
        devices: One per replica; a device may be listed more than once.
        backend: Transport of gradients, as for :class:`~runtime.trainer.Trainer` under SYNC.
        max_grad_norm: Clip the averaged gradient to this L2 norm; ``None``: do not clip.

    Attributes:
        backend: The resolved transport.
        backend_reason: The reason for that transport.

    Raises:
        TypeError, ValueError: An argument is wrong, models differ, or a factory raises this.
    """

    shard_samples = staticmethod(shard_samples)
    average_gradients = staticmethod(average_gradients)
    has_non_finite = staticmethod(has_non_finite)

    def __init__(
        self,
        model_factory: ModelFactory | nn.Module,
        optim_factory: OptimFactory,
        loss_fn: ShardLossFn,
        devices: Sequence[torch.device | str],
        *,
        backend: AverageBackend = AverageBackend.AUTO,
        max_grad_norm: float | None = None,
    ) -> None:
        if isinstance(model_factory, nn.Module):
            model_factory = CopyingFactory(model_factory)
        check_callable("model_factory", model_factory, "f(device) -> torch.nn.Module")
        check_callable("optim_factory", optim_factory, "f(params) -> Optimizer")
        check_callable(
            "loss_fn", loss_fn, "f(model, samples) -> loss, (loss, weight) or (loss, correct)"
        )
        if isinstance(devices, Sequence) and not devices:
            raise ValueError(
                "devices is empty: name one device for each replica, as ['cpu', 'cpu']"
            )
        self._devices = check_devices(devices)
        self._max_grad_norm = max_grad_norm
        if max_grad_norm is not None:
            self._max_grad_norm = check_float("max_grad_norm", max_grad_norm, 0, above=True)
        if not isinstance(backend, AverageBackend):
            raise TypeError(f"backend={backend!r}; pass an AverageBackend")
        self.backend, self.backend_reason = resolve_backend(backend, self._devices)
        self._seconds = Seconds()
        self._busy = threading.Lock()
        self._in_sync = True
        self._num_batches = 0
        kind = self.backend.value if self.backend in _GROUPS else "thread"
        num_collectives = len(self._devices) if len(self._devices) > 1 else 0
        group = CollectiveGroup(
            partial(create_collectives, num_collectives, kind, self._devices)
            if num_collectives
            else list
        )
        self._runner = Runner(
            self._devices, group, LoopRecorder(None), name="data-parallel", waits_on_interrupt=True
        )
        try:
            self._replicas = build_replicas(
                self._runner, _rank_model_factory(model_factory), optim_factory
            )
            group.get()
        except BaseException:
            self._runner.close()
            raise
        self._shards = ShardTasks(self._replicas, loss_fn)
        self._devices_differ = unequal_devices(self._devices)
        self._mirror = ReplicaMirror(self._replicas, self._runner)
        for replica in self._replicas:
            replica.guard.close()  # the user may step optimizers directly
            # load_state_dict keeps tensors without a copy, and each replica needs its own.
            replica.optimizer.register_load_state_dict_pre_hook(lambda _, s: copy.deepcopy(s))

    @property
    def num_devices(self) -> int:
        """Number of replicas."""
        return len(self._devices)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Each replica's device."""
        return self._devices

    @property
    def primary(self) -> nn.Module:
        """Replica 0's model, to evaluate and save; it stays usable after :meth:`close`.

        These changes to it between two batches hold for all replicas from the next batch on:

        - the mode of each module: call ``primary.train()`` after an evaluation in ``eval()``
          mode;
        - which parameters are frozen, of those that were trainable when it was built;
        - parameters and buffers that were written to in place, as ``load_state_dict`` does,
          or buffers that were replaced by others of the same shape.

        In-place writes are found by PyTorch's version counters. These do not count writes
        through ``.data`` and by fused optimizers: call :meth:`sync_params` after them. Replaced
        parameters are an error.
        """
        return self._replicas[0].model

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """Every replica's model."""
        return tuple(replica.model for replica in self._replicas)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Every replica's optimizer.

        Settings of the first one (a learning rate, or what a scheduler sets) and a state loaded
        into it hold for all from the next batch on. Save and load the state of the first one.
        """
        return tuple(replica.optimizer for replica in self._replicas)

    def train_batch(self, samples: Any) -> BatchResult:
        """Train all replicas on a mini-batch, divided among them; blocks until they are done.

        The step equals that of one device on the whole mini-batch, except for what a model
        computes over a batch (batch norm). The buffers of the first replica that had samples
        are copied to all. If anything fails before the step, every replica returns to its state
        before the call, without gradients, and training may continue. But a replica that fails
        during the averaging breaks the group and this object permanently.

        Args:
            samples: As for :func:`~gpuworker.shard_samples`. Tensors in columns are moved to each
                replica's device; lists of samples are passed as they are. With fewer samples
                than replicas some replicas get none, and still take the step. The call's work
                waits for the work on the caller's current streams.

        Raises:
            TypeError, ValueError: The samples cannot be cut, or there are none.
            ReplicaFailed: A replica failed; has its rank, and the original exception as the cause.
            ReplicaMismatch: A buffer of the primary was replaced by one of another shape.
            NonFiniteError: A loss or a gradient is NaN or infinite. No optimizer has stepped.
            RuntimeError: Closed, broken by an earlier failure within a step, or in use; a
                parameter of the primary was replaced, or was unfrozen after it had been frozen
                when the object was built.
            KeyboardInterrupt: Each replica has finished its task, so either all or none have
                stepped; the next call restores the rest.
        """
        with self._exclusive():
            total = count_samples(samples)
            if total == 0:
                raise ValueError("train_batch got no samples; leave the call out")
            shards = shard_samples(samples, self.num_devices)
            counts = [count_samples(shard) for shard in shards]
            self._sync_flags()
            self._mirror.groups.check()
            if self._mirror.optimizer_loaded:
                self._copy_from_primary("copy_optimizer")
                self._mirror.optimizer_loaded = False
            if not self._in_sync or self._mirror.has_changed():
                self._copy_all()
            self._in_sync = (
                False  # until the end: a KeyboardInterrupt may occur between any two lines
            )
            try:
                loss, correct, weights = self._compute(shards, counts)
                if not any(weights):
                    self._undo()
                    self._mark_synced()
                    return BatchResult(0.0, correct, total, 0.0)
                norm = self._reduce(weights)
            except BaseException:
                if self._runner.fault is None:
                    self._undo()
                    self._mark_synced()
                raise
            self._step(norm, counts)
            self._num_batches += 1
            self._mark_synced()
        return BatchResult(loss, correct, total, norm)

    def _compute(
        self, shards: Sequence[Any], counts: Sequence[int]
    ) -> tuple[float, int, list[float]]:
        """Compute every replica's gradients; returns mean loss, number correct, and weights."""
        tensors = [part for part in movable_parts(shards) if isinstance(part, Tensor)]
        outcomes = self._run(
            lambda rank: self._shards.compute(rank, shards[rank], counts[rank]), tensors
        )
        found: list[ShardLoss] = [outcome.value for outcome in outcomes]
        self._seconds.classify(found, counts)
        parts = []
        for rank, part in enumerate(found):
            try:
                parts.append(self._seconds.resolve(part))
            except ValueError as error:
                raise ReplicaFailed(
                    rank, str(self._devices[rank]), self._batch_name, error
                ) from error
        has_weight = [part.weight is not None for part, n in zip(parts, counts, strict=True) if n]
        if any(has_weight) and not all(has_weight):
            raise ValueError(
                "loss_fn returned a weight on some replicas only, so the weights of the other "
                "losses are unknown: return it for every shard, 0 where nothing counts"
            )
        weights = [
            float(n) if part.weight is None else part.weight
            for part, n in zip(parts, counts, strict=True)
        ]
        counted = [(part.loss, weight) for part, weight in zip(parts, weights, strict=True)]
        for rank, (loss, weight) in enumerate(counted):
            if weight and not math.isfinite(loss):
                raise NonFiniteError(rank, self._num_batches, "loss", remedy=_REMEDY)
        mean = sum(loss * weight for loss, weight in counted if weight) / (sum(weights) or 1.0)
        return mean, sum(part.correct for part in parts), weights

    def _reduce(self, weights: Sequence[float]) -> float:
        """Average the gradients over all replicas; returns their norm."""
        collectives: Sequence[Collective | None] = self._runner.collectives() or [None]

        def reduce(rank: int) -> ReducedGradients:
            with self._runner.aborting_on_error():
                return self._shards.reduce(rank, collectives[rank], weights[rank])

        try:
            outcomes = self._run(reduce)
        except ReplicaFailed as error:
            self._runner.fault = (
                f"their gradients could not be averaged ({error.__cause__}), and the group is "
                "broken"
            )
            raise
        reduced: list[ReducedGradients] = [outcome.value for outcome in outcomes]
        bad = [rank for rank, r in enumerate(reduced) if not math.isfinite(r.norm)]
        if bad:
            rank = next((r for r in bad if weights[r] and reduced[r].bad is not None), bad[0])
            name = reduced[rank].bad
            raise NonFiniteError(rank, self._num_batches, "gradient", name, remedy=_REMEDY)
        return float(reduced[0].norm)

    def _step(self, norm: float, counts: Sequence[int]) -> None:
        factor = 1.0
        if self._max_grad_norm is not None:
            factor = min(1.0, self._max_grad_norm / (norm + 1e-6))
        source = self._replicas[next(rank for rank, n in enumerate(counts) if n)]
        options = self._mirror.groups.options()
        self._run(
            lambda rank: self._shards.step(rank, factor, source, options if rank else None),
            changes=True,
        )
        if self._devices_differ:
            self._copy_from_primary("copy_params")

    def sync_params(self) -> None:
        """Copy the primary's parameters, frozen ones too, and buffers to every replica.

        Only needed after changes that version counters do not count, see :attr:`primary`; other
        changes are copied automatically. Blocks until it is done. Optimizer states do not change.

        Raises:
            ReplicaMismatch, RuntimeError: As :meth:`train_batch`.
        """
        with self._exclusive():
            self._sync_flags()
            self._copy_all()

    def _sync_flags(self) -> None:
        """Copy modes and frozen parameters of the primary to all."""
        self._mirror.check()
        for module in self._replicas[0].modules:
            for key, buffer in module._buffers.items():
                # Created by a forward in inference mode: not writable elsewhere.
                if buffer is not None and buffer.is_inference():
                    with torch.inference_mode(False):
                        module._buffers[key] = buffer.clone()
        self._mirror.sync_flags(always=True)  # loss_fn may have changed any replica's

    def _copy_all(self) -> None:
        """Copy all tensors of the primary to every replica."""
        first = Template.of(self.primary)
        for rank, model in enumerate(self.models[1:], 1):
            difference = first.first_difference(Template.of(model))
            if difference is not None:
                raise ReplicaMismatch(
                    f"replica {rank} cannot follow the primary: {difference}; change tensors in "
                    "place and keep their shapes, or build a new DataParallelCoordinator"
                )
        if not self._in_sync:
            self._undo()  # an interrupted batch, unless it stepped
        self._in_sync = False
        self._copy_from_primary("copy_weights")
        self._mark_synced()

    def _undo(self) -> None:
        self._run(self._shards.undo, changes=True)

    def _mark_synced(self) -> None:
        self._mirror.mark_synced()
        self._in_sync = True

    def _copy_from_primary(self, method: str) -> None:
        self._mirror.copy(method, self._batch_name, changes=True)

    def _run(
        self,
        work: Callable[[int], Any],
        tensors: Sequence[Tensor] = (),
        *,
        changes: bool = False,
    ) -> list[TaskOutcome]:
        tasks = [partial(work, rank) for rank in range(self.num_devices)]
        return self._runner.run(tasks, self._batch_name, tensors, changes=changes)

    @property
    def _batch_name(self) -> str:
        return f"batch {self._num_batches}"

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._busy.locked():
            raise RuntimeError(
                "this DataParallelCoordinator is busy: call it from one thread at a "
                "time, and not from loss_fn"
            )
        with self._busy:  # not acquire(): a KeyboardInterrupt could occur before the try
            self._check_open()
            yield

    def _check_open(self) -> None:
        self._runner.record_fault()
        if self._runner.closed:
            raise RuntimeError("this DataParallelCoordinator is closed; build a new one")
        if self._runner.fault is not None:
            raise RuntimeError(
                f"the replicas may differ, since {self._runner.fault}; build a new "
                "DataParallelCoordinator from a saved state"
            )

    def close(self) -> None:
        """End the threads and wait for them; restores the number of intra-op threads. Idempotent.

        Raises:
            RuntimeError: A thread does not return from user code.
        """
        self._runner.close()


_GROUPS = (AverageBackend.NCCL, AverageBackend.GLOO)


def _rank_model_factory(model_factory: ModelFactory) -> RankModelFactory:
    def make(rank: int, device: torch.device, first: nn.Module | None) -> nn.Module:
        model = build_model(model_factory, device)
        if first is not None:
            copy_template(model, Template.of(first), rank)
        return model

    return make


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of training on a mini-batch.

    Attributes:
        avg_loss: Mean loss of its samples, or weighted by the weights of ``loss_fn``. 0 if all
            weights are 0: then no optimizer has stepped.
        correct: Number of right samples; 0 if ``loss_fn`` does not count them.
        total: Number of samples.
        grad_norm: L2 norm of the averaged gradient, before clipping.
    """

    avg_loss: float
    correct: int
    total: int
    grad_norm: float


class ShardTasks:
    """The replicas' tasks of a mini-batch. Every method runs in a replica's thread.

    Args:
        replicas: In order of rank.
        loss_fn: The user's loss function.
    """

    def __init__(self, replicas: Sequence[LoopReplica], loss_fn: ShardLossFn) -> None:
        self.replicas = replicas
        self.loss_fn = loss_fn
        self._saved_buffers: list[list[Tensor]] = [[] for _ in replicas]
        self._checked = [False] * len(replicas)

    def compute(self, rank: int, samples: Any, num_samples: int) -> ShardLoss:
        """Compute the gradients of a shard; without samples, only clear them.

        Tensors in columns are moved to the device.
        """
        replica = self.replicas[rank]
        replica.state.params.check()
        self._saved_buffers[rank] = [buffer.clone() for buffer in replica.state.buffers.tensors()]
        replica.zero_grad()
        if num_samples == 0:
            return ShardLoss()
        if isinstance(samples, Tensor) or holds_columns(samples):
            samples = move_batch(samples, replica.device)
        loss, result = read_result(self.loss_fn(replica.model, samples))
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._checked[rank]:
            params = replica.state.params
            check_gradients(params.names, params.params, "loss_fn")
            self._checked[rank] = True
        return result._replace(loss=float(loss.detach()))

    def reduce(self, rank: int, collective: Collective | None, weight: float) -> ReducedGradients:
        """Average the gradients over the replicas; not all weights are 0."""
        params = self.replicas[rank].state.params
        own = [p.grad for p in params.params]
        if collective is not None:
            self.replicas[rank].exchange.average(collective, weight)
        norm = gradient_norm([p.grad for p in params.params if p.grad is not None])
        return ReducedGradients(norm, None if math.isfinite(norm) else first_bad(params.names, own))

    def step(self, rank: int, factor: float, source: LoopReplica, options: Options | None) -> None:
        """Scale the gradients, step the optimizer, and copy another replica's buffers."""
        replica = self.replicas[rank]
        grads = [p.grad for p in replica.state.params.params if p.grad is not None]
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)
        replica.step(options, keep=True)
        if replica is not source:
            replica.copy_buffers(source)
        self._saved_buffers[rank] = []

    def undo(self, rank: int) -> None:
        """Restore the buffers, and clear the gradients."""
        replica = self.replicas[rank]
        replica.restore_buffers(self._saved_buffers[rank])
        self._saved_buffers[rank] = []
        replica.zero_grad()


class ReducedGradients(NamedTuple):
    """The averaged gradients on one replica.

    Attributes:
        norm: Their L2 norm; finite if and only if all of them are.
        bad: The first parameter whose own gradient was not finite on this replica.
    """

    norm: float
    bad: str | None = None
