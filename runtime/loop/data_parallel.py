"""Data-parallel training with one call per mini-batch."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from coordinator.config import AverageBackend
from runtime.collective import resolve_backend
from runtime.core.checks import check_callable, check_devices, check_float
from runtime.core.errors import PART_WITHOUT_UNITS, NonFiniteError, ReplicaFailed
from runtime.core.launchers import refuse_launcher
from runtime.core.nested import like, map_batch, movable_parts
from runtime.core.threads import Closeable
from runtime.core.tracebacks import folds_tracebacks
from runtime.data.batches import move_batch
from runtime.loop.buffer_backup import BufferBackup, make_writable
from runtime.loop.loop_recorder import LoopRecorder
from runtime.loop.rank_group import RankGroup
from runtime.loop.rank_replica import (
    FollowingOptimizer,
    Row,
    multiply_,
    take_grads,
)
from runtime.loop.rank_threads import Task
from runtime.loop.shard_loss import (
    SecondValueClassifier,
    ShardLoss,
    ShardLossFn,
    read_result,
    weights_of,
)
from runtime.loop.shard_samples import count_samples, holds_columns, shard_samples
from runtime.replica.build import (
    CopyingFactory,
    ModelFactory,
    OptimFactory,
    build_model,
    build_optimizer,
)
from runtime.replica.error_notes import MemoryUse, explain_error, explain_size
from runtime.replica.gradients import (
    average_gradients,
    check_gradients,
    gradient_norm,
    has_non_finite,
    refuse_sparse,
)
from runtime.replica.max_norm import MaxNorm
from runtime.replica.non_finite import first_bad

_REMEDY = (
    "No replica was changed. Lower the learning rate, set max_grad_norm, or guard the loss "
    "against such batches"
)
_MEMORY_REMEDY = "pass fewer samples to train_batch, or train on more devices"
_COORDINATOR_REMEDY = (
    "the limit of DataParallelCoordinator is fixed: pass fewer samples to train_batch, or leave "
    "the slower device out of devices"
)


_STATE_REMEDY = (
    "pass batches of one size, from a loader with drop_last=True, or the state with the samples"
)


class DataParallelCoordinator(Closeable):
    """Trains one model on several devices, a mini-batch at a time, in the user's own loop.

    There is one model, trained by one optimizer. Each replica computes with it or with a copy that
    shares or follows its parameters, in its own thread, ``data-parallel-<rank>``, which lives
    until :meth:`close`; replicas on the CPU divide its cores. In each call a replica draws random
    numbers on the CPU from a generator of its own, seeded from that of the caller's thread.

    Use it from one thread at a time. It is a context manager; it is also closed when it is
    garbage-collected and when the interpreter exits.

    Args:
        model_factory: ``f(device) -> nn.Module``, called in the first replica's thread, and once
            more for each device if its module cannot be copied; or a module, which is copied
            and not changed. Modes set on a part of the model stay; a model that is all in eval
            mode is put in train mode.
        optim_factory: ``f(params) -> Optimizer`` with the trainable parameters.
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
        refuse_launcher("DataParallelCoordinator")
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
        if max_grad_norm is not None:
            max_grad_norm = check_float("max_grad_norm", max_grad_norm, 0, above=True)
        self._max_norm = MaxNorm(max_grad_norm)
        if not isinstance(backend, AverageBackend):
            raise TypeError(f"backend={backend!r}; pass an AverageBackend")
        self.backend, self.backend_reason = resolve_backend(backend, self._devices)
        self._second_values = SecondValueClassifier()
        self._loss_fn = loss_fn
        self._busy = threading.Lock()
        self._num_batches = 0
        self._checked = [False] * len(self._devices)
        self._last = [0] * len(self._devices)  # samples of each replica's last shard
        build = partial(build_model, model_factory)
        ranks = RankGroup.start(
            self._devices,
            self.backend,
            LoopRecorder(None),
            build,
            build,
            partial(build_optimizer, optim_factory),
            timeout_remedy=_COORDINATOR_REMEDY,
            name="data-parallel",
        )
        self._runner, self._mirror, self._optimizer = ranks.runner, ranks.mirror, ranks.optimizer
        self._replicas, self._reduction = ranks.replicas, ranks.reduction
        self._model = self._mirror.models[0]
        self._buffers = BufferBackup(self._model)
        self._followers = [FollowingOptimizer(self._optimizer) for _ in self._devices[1:]]

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
        """The model, to evaluate, change and save; it stays usable after :meth:`close`.

        Replica 0 computes with it, the others with copies that share or follow its parameters.
        Changes of it between two batches hold for all from the next batch on: modes (call
        ``primary.train()`` after an evaluation), frozen parameters, weights, buffers, attributes,
        hooks and modules. After a change through ``.data`` call :meth:`sync_params` if the
        devices differ. Parameters that are added have to be added to the optimizer too, as on one
        device.
        """
        return self._model

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """Every replica's model: the primary, and copies of it."""
        if not self._runner.closed and not self._busy.locked():
            with self._exclusive():
                self._follow()
        return tuple(self._mirror.models)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The model's optimizer, and for each further replica one that follows it.

        There is one model, so only the first one steps; the others have its settings and state,
        and stepping or loading them has no effect. Save and load the state of the first one.
        """
        for follower in self._followers:
            follower.follow()
        return (self._optimizer, *self._followers)

    @folds_tracebacks
    def train_batch(self, samples: Any) -> BatchResult:
        """Train all replicas on a mini-batch, divided among them; blocks until they are done.

        The step equals that of one device on the whole mini-batch, except for what a model
        computes over a batch (batch norm, which gets two or more samples on each replica that
        has any). Buffers are those of the first replica. If anything
        fails before the step, the model returns to its state before the call, without gradients.
        A step that fails may have changed a part of the parameters, as on one device. Training
        may continue in each case.

        Args:
            samples: As for :func:`~gpuworker.shard_samples`. Tensors in columns are moved to each
                replica's device; lists of samples are passed as they are. With fewer samples
                than replicas some replicas get none, and still take the step. The call's work
                waits for the work on the caller's current streams.

        Raises:
            TypeError, ValueError: The samples cannot be cut, or there are none.
            ReplicaFailed: A replica failed; has its rank, and the original exception as the cause.
            NonFiniteError: A loss or a gradient is NaN or infinite. No optimizer has stepped.
            RuntimeError: Closed, or in use.
            KeyboardInterrupt: Each replica has finished its task, so the model has stepped, or is
                in its state before the call. If a task does not end within 30 seconds, the next
                call waits for it and restores that state.
        """
        with self._exclusive():
            total = count_samples(samples)
            if total == 0:
                raise ValueError("train_batch got no samples; leave the call out")
            self._follow()
            num = self.num_devices
            if self._mirror.uses_batch_statistics:
                num = max(1, min(num, total // 2))  # those of one sample are not defined
            shards = shard_samples(samples, num)
            # Replicas without samples are the last ones: buffers are those of rank 0.
            shards.sort(key=lambda shard: count_samples(shard) == 0)
            shards += [()] * (self.num_devices - num)
            counts = [count_samples(shard) for shard in shards]
            self._buffers.save()
            try:
                loss, correct, weights, rows = self._compute(shards, counts)
                if not any(weights):
                    self._undo()
                    return BatchResult(0.0, correct, total, 0.0)
                norm = self._reduce(rows, weights)
                tasks: list[Task | None] = [self._step, *[None] * (self.num_devices - 1)]
                self._runner.run(tasks, self._batch_name)
            except BaseException:
                if not self._runner.is_busy:
                    self._undo()
                raise
            self._num_batches += 1
        return BatchResult(loss, correct, total, norm)

    def _compute(
        self, shards: Sequence[Any], counts: Sequence[int]
    ) -> tuple[float, int, list[float], list[Row]]:
        """Compute every replica's gradients.

        Returns:
            Mean loss, number of right samples, and each replica's weight and gradients.
        """
        tensors = [part for part in movable_parts(shards) if isinstance(part, Tensor)]
        tasks = [
            partial(self._compute_shard, rank, shard, n) if n else None
            for rank, (shard, n) in enumerate(zip(shards, counts, strict=True))
        ]
        try:
            with self._mirror.comparing(self._loss_fn):
                outcomes = self._runner.run(tasks, self._batch_name, tensors)
        finally:
            rows: list[Row] = [take_grads(replica.leaves) for replica in self._replicas]
        self._mirror.adopt_forward([rank for rank, n in enumerate(counts) if n])
        found: list[ShardLoss] = [outcome.value or ShardLoss() for outcome in outcomes]
        self._second_values.classify(found, counts)
        parts = []
        for rank, part in enumerate(found):
            with self._failing(rank):
                parts.append(self._second_values.resolve(part))
        weights = weights_of(parts, counts)
        counted = [(part.loss, weight) for part, weight in zip(parts, weights, strict=True)]
        for rank, (loss, weight) in enumerate(counted):
            if weight and not math.isfinite(loss):
                remedy = _REMEDY + PART_WITHOUT_UNITS.format("return Weighted(loss, weight)")
                raise NonFiniteError(rank, self._num_batches, "loss", remedy=remedy)
        mean = sum(loss * weight for loss, weight in counted if weight) / (sum(weights) or 1.0)
        return mean, sum(part.correct for part in parts), weights, rows

    def _compute_shard(self, rank: int, samples: Any, num_samples: int) -> ShardLoss:
        """Compute the gradients of a shard; run in the replica's thread."""
        if isinstance(samples, Tensor) or holds_columns(samples):
            samples = move_batch(map_batch(samples, _uncoupled), self._devices[rank])
        with self._mirror.computing(rank) as model:
            try:
                loss, result = read_result(self._loss_fn(model, samples), model.parameters())
                loss.backward()  # type: ignore[no-untyped-call]
            except (RuntimeError, ValueError) as error:
                explain_error(
                    error,
                    "loss_fn",
                    model,
                    samples,
                    owns_backward=True,
                    place="samples",
                    memory=MemoryUse(num_samples, _MEMORY_REMEDY),
                )
                explain_size(error, (self._last[rank], num_samples), _STATE_REMEDY)
                raise
        self._last[rank] = num_samples
        leaves = self._replicas[rank].leaves
        if not self._checked[rank]:
            check_gradients(self._mirror.names(), leaves, "loss_fn")
            self._checked[rank] = True
        return result._replace(loss=float(loss.detach()))

    def _reduce(self, rows: Sequence[Row], weights: Sequence[float]) -> float:
        """Average the gradients in the model's; returns their norm, before clipping."""
        total = sum(weights)
        params = self._mirror.params
        names = self._mirror.names()
        own: list[Row] = []
        for rank, (row, weight) in enumerate(zip(rows, weights, strict=True)):
            with self._failing(rank):
                refuse_sparse(names, row)
            multiply_([g for g in row if g is not None], weight / total)
            own.append(row if weight else [None] * len(row))
        found = self._reduction.sum(own, params)
        summed = [g for g in found if g is not None]
        norm = gradient_norm(summed)
        if not math.isfinite(norm):
            bad_of = [first_bad(names, row) for row in own[1:]]  # rank 0's row may be the sum
            rank = next((rank for rank, bad in enumerate(bad_of, 1) if bad is not None), 0)
            bad = bad_of[rank - 1] if rank else first_bad(names, found)
            raise NonFiniteError(rank, self._num_batches, "gradient", bad, remedy=_REMEDY)
        self._max_norm.clip_grads(summed, norm)
        for p, grad in zip(params, found, strict=True):
            p.grad = grad
        return float(norm)

    def _step(self) -> None:
        """Step the optimizer; run in the first replica's thread, which no interrupt stops."""
        self._mirror.mark_stepped()
        self._optimizer.step()
        self._buffers.discard()

    def sync_params(self) -> None:
        """Copy the primary's parameters, frozen ones too, and buffers to every replica.

        Only needed after changes that version counters do not count, see :attr:`primary`; other
        changes are copied automatically. Blocks until it is done.
        """
        with self._exclusive():
            self._mirror.mark_stepped()
            self._follow()

    def _follow(self) -> None:
        """Bring all replicas to the primary's state, and clear the gradients."""
        self._undo(keep_grads=True)
        make_writable(self._model)
        self._mirror.follow()

    def _undo(self, *, keep_grads: bool = False) -> None:
        """Restore the buffers of a batch that did not step, and clear its gradients."""
        if self._buffers.is_held or not keep_grads:
            for replica in self._replicas:
                take_grads(replica.leaves)
            for p in self._mirror.params:
                p.grad = None
        self._buffers.restore()

    @contextmanager
    def _failing(self, rank: int) -> Iterator[None]:
        """Raise a ``ValueError`` as the failure of a replica."""
        try:
            yield
        except ValueError as error:
            raise ReplicaFailed.of(
                rank, str(self._devices[rank]), self._batch_name, error
            ) from error

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
            if self._runner.closed:
                raise RuntimeError("this DataParallelCoordinator is closed; build a new one")
            if self._runner.is_busy:
                self._runner.drain()
            yield

    def close(self) -> None:
        """End the threads and wait for them; restores the number of intra-op threads. Idempotent.

        Raises:
            RuntimeError: A thread does not return from user code.
        """
        self._runner.close()


def _uncoupled(part: Any) -> Any:
    """A view with a version counter of its own, as ranks may write to their parts in place."""
    return like(part.data, part) if isinstance(part, Tensor) and not part.requires_grad else part


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
