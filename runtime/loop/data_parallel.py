"""Replicas in parallel under one call for each mini-batch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from coordinator.policy import ApplyPolicy, AverageBackend, choose_backend
from runtime.collective import Collective
from runtime.config import check_callable, check_devices, check_float
from runtime.core.errors import NonFiniteError
from runtime.data.batches import parts_of
from runtime.device import cuda_api
from runtime.device.base import DeviceContext
from runtime.device.cuda_api import Event
from runtime.loop.loop_calls import LoopCalls
from runtime.loop.loop_mirror import LoopMirror
from runtime.loop.loop_replica import LoopReplica, LossFn
from runtime.loop.loop_threads import first_error, kind_of, start_threads
from runtime.loop.shards import count_samples, shard_samples
from runtime.replica.build import BuildOrder, ModelFactory, OptimFactory, build_replica
from runtime.replica.gradients import average_gradients, has_non_finite

_REMEDY = (
    "No replica was changed. Lower the learning rate, set max_grad_norm, or guard the loss "
    "against such batches"
)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of a mini-batch.

    Attributes:
        avg_loss: Mean loss of its samples.
        correct: How many of them were right; 0 where ``loss_fn`` does not count them.
        total: How many there were.
        grad_norm: L2 norm of the averaged gradient, before it was clipped.
    """

    avg_loss: float
    correct: int
    total: int
    grad_norm: float


class DataParallelCoordinator:
    """Trains one model on several devices, a mini-batch at a time, in the user's own loop.

    Each replica runs in a thread of its own, ``data-parallel-<rank>``, which lives until
    :meth:`close`; replicas on the CPU share its cores out. Every :meth:`train_batch` leaves
    all replicas with the same parameters and buffers, bit for bit on devices of one kind
    and with an optimizer that draws no random numbers. On devices of different kinds every
    replica takes over replica 0's parameters after each step. Replicas on the CPU share
    PyTorch's process-wide generator, so dropout there draws in no fixed order.

    One thread uses it at a time. A context manager; also closed when it is garbage and when
    the interpreter exits.

    Args:
        model_factory: ``f(device) -> nn.Module``, called in each replica's thread, one at a
            time, replica 0 first. All start from replica 0's weights. Which parameters are
            trainable is settled then; only those travel.
        optim_factory: ``f(params) -> Optimizer`` with the trainable parameters. Their memory
            has been moved by then: keep parameters, not ``.data``.
        loss_fn: ``f(model, samples)`` gives the mean loss of the samples, or ``(mean loss,
            number correct)``. Runs in the replicas' threads at once; enter autocast there.
        devices: One for each replica; a device may stand more than once.
        backend: How gradients travel, as for :class:`~runtime.trainer.Trainer` under SYNC.
        max_grad_norm: Clip the averaged gradient's norm to this; ``None``: leave it.

    Attributes:
        backend: The resolved transport.
        backend_reason: A sentence that says why.

    Raises:
        TypeError, ValueError: A wrong argument, models that differ, or what a factory raises.
    """

    shard_samples = staticmethod(shard_samples)
    average_gradients = staticmethod(average_gradients)
    has_non_finite = staticmethod(has_non_finite)

    def __init__(
        self,
        model_factory: ModelFactory,
        optim_factory: OptimFactory,
        loss_fn: LossFn,
        devices: Sequence[torch.device | str],
        *,
        backend: AverageBackend = AverageBackend.AUTO,
        max_grad_norm: float | None = None,
    ) -> None:
        check_callable("model_factory", model_factory, "f(device) -> torch.nn.Module")
        check_callable("optim_factory", optim_factory, "f(params) -> Optimizer")
        check_callable("loss_fn", loss_fn, "f(model, samples) -> loss, or (loss, correct)")
        if isinstance(devices, Sequence) and not devices:
            raise ValueError(
                "devices is empty: name one device for each replica, as ['cpu', 'cpu']"
            )
        self._devices = check_devices(devices)
        self._loss_fn = loss_fn
        self._max_grad_norm = max_grad_norm
        if max_grad_norm is not None:
            self._max_grad_norm = check_float("max_grad_norm", max_grad_norm, 0, above=True)
        if not isinstance(backend, AverageBackend):
            raise TypeError(f"backend={backend!r}; pass an AverageBackend")
        self.backend, self.backend_reason = choose_backend(
            backend,
            ApplyPolicy.SYNC,
            [str(device) for device in self._devices],
            nccl_available=torch.distributed.is_available()
            and torch.distributed.is_nccl_available(),
        )
        self._unlike = len({kind_of(device) for device in self._devices}) > 1
        self._busy = threading.Lock()
        self._alike = True
        contexts, ends, self._threads = start_threads(self._devices, self.backend)
        self._calls = LoopCalls(self._threads, self._devices)
        try:
            self._replicas = self._build(model_factory, optim_factory, contexts, ends)
        except BaseException:
            self._threads.close()
            raise
        self._mirror = LoopMirror(self._replicas)
        # Appended to: the hook must not keep this object and its threads alive.
        self._loaded: list[torch.optim.Optimizer] = []
        self._replicas[0].optimizer.register_load_state_dict_post_hook(self._loaded.append)

    def _build(
        self,
        model_factory: ModelFactory,
        optim_factory: OptimFactory,
        contexts: Sequence[DeviceContext],
        ends: Sequence[Collective],
    ) -> list[LoopReplica]:
        order = BuildOrder()

        def build(rank: int) -> LoopReplica:
            device = contexts[rank]
            replica = build_replica(
                order, rank, device.device, model_factory, optim_factory, finish=device.finish
            )
            built = LoopReplica(replica, device, ends[rank] if ends else None)
            device.finish()
            return built

        try:
            outcomes = self._calls.run(build)
        finally:
            order.forget()  # wakes whoever waits for replica 0
        rank, error = first_error(outcomes)
        if error is not None:
            error.add_note(f"while replica {rank} was built on {self._devices[rank]}")
            raise error
        return [outcome.value for outcome in outcomes]

    # -- what there is ------------------------------------------------------------------

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

        What is changed here between two batches holds for all replicas from the next one on:

        - the mode of each module: call ``primary.train()`` after an evaluation in ``eval()``
          mode;
        - which parameters are frozen, of those that were trainable when it was built;
        - parameters and buffers that were written to in place, as ``load_state_dict`` does,
          or buffers that were replaced by others of their shapes.

        PyTorch counts writes in place, and that tells of them. It does not count those through
        ``.data`` and by fused optimizers: call :meth:`sync_params` after these. Parameters that
        were replaced are an error.
        """
        return self._replicas[0].model

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """Every replica's model."""
        return tuple(replica.model for replica in self._replicas)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Every replica's optimizer.

        Settings of the first one, a learning rate or what a scheduler sets, and a state that is
        loaded into it, hold for all from the next batch on. Save the first one's; load it there.
        """
        return tuple(replica.optimizer for replica in self._replicas)

    # -- training -----------------------------------------------------------------------

    def train_batch(self, samples: Any) -> BatchResult:
        """Train all replicas on a mini-batch, cut among them; blocks until they are done.

        The step is that of one device on the whole mini-batch, apart from what a model
        computes over a batch (batch norm). The buffers of the first replica that had
        samples are copied to all. If anything goes wrong before the step, every replica is
        as it was before the call, without gradients, and training may go on; but a replica
        that fails in the middle of the averaging breaks the group, and this object, for good.

        Args:
            samples: As for :func:`~runtime.shard_samples`. Tensors in columns are
                moved to each replica's device; lists of samples are handed over as they
                are. With fewer samples than replicas some have none, and take the step all
                the same. Work on the caller's current streams is waited for.

        Raises:
            TypeError, ValueError: Samples that cannot be cut, or none.
            ReplicaFailed: A replica failed; names its rank, with the original as the cause.
            ReplicaMismatch: A buffer of the primary was replaced by one of another shape.
            NonFiniteError: A loss or a gradient is NaN or infinite. No optimizer has stepped.
            RuntimeError: Closed, broken by an earlier failure within a step, or in use; a
                parameter of the primary was replaced, or unfrozen which was frozen when it
                was built.
            KeyboardInterrupt: Ctrl-C. Each replica has come to the end of what it was doing,
                so either all or none have stepped; the next call puts right what is left.
        """
        with self._turn():
            total = count_samples(samples)
            if total == 0:
                raise ValueError("train_batch got no samples; leave the call out")
            shards = shard_samples(samples, self.num_devices)
            counts = [count_samples(shard) for shard in shards]
            self._mirror.follow_flags()
            self._mirror.follow_settings()
            marks = self._marks(samples)
            if self._loaded:
                self._copy_from_primary(lambda r, _: r.copy_optimizer(self._replicas[0]))
                self._loaded.clear()
            if not self._alike or self._mirror.is_changed():
                self._copy_all(marks)
            self._alike = False  # until the end: Ctrl-C may come between any two lines
            try:
                loss, correct = self._compute(shards, counts, marks)
                norm = self._reduce(counts)
            except BaseException:
                if self._calls.fault is None:
                    self._undo()
                    self._are_alike()
                raise
            self._step(norm, counts)
            self._calls.num_batches += 1
            self._are_alike()
        return BatchResult(loss, correct, total, norm)

    def _compute(
        self, shards: Sequence[Any], counts: Sequence[int], marks: Sequence[Event]
    ) -> tuple[float, int]:
        """Every replica's gradients; the mean loss and the number correct."""
        outcomes = self._calls.run(
            lambda rank: self._replicas[rank].forward_backward(
                self._loss_fn, shards[rank], counts[rank], marks
            )
        )
        parts = self._calls.values(outcomes)
        for rank, part in enumerate(parts):
            if not math.isfinite(part.loss):
                raise NonFiniteError(rank, self._calls.num_batches, "loss", remedy=_REMEDY)
        loss = sum(part.loss * n for part, n in zip(parts, counts, strict=True)) / sum(counts)
        return loss, sum(part.correct for part in parts)

    def _reduce(self, counts: Sequence[int]) -> float:
        """Average the gradients on all replicas; their norm."""
        outcomes = self._calls.run(lambda rank: self._replicas[rank].reduce(counts[rank]))
        if (error := first_error(outcomes)[1]) is not None:
            self._calls.fault = (
                f"their gradients could not be averaged ({error}), and the group is broken"
            )
        reduced = self._calls.values(outcomes)
        bad = [rank for rank, r in enumerate(reduced) if not math.isfinite(r.norm)]
        if bad:
            rank = next((r for r in bad if counts[r] and reduced[r].bad is not None), bad[0])
            name = reduced[rank].bad
            number = self._calls.num_batches
            raise NonFiniteError(rank, number, "gradient", name, remedy=_REMEDY)
        return float(reduced[0].norm)

    def _step(self, norm: float, counts: Sequence[int]) -> None:
        factor = 1.0
        if self._max_grad_norm is not None:
            factor = min(1.0, self._max_grad_norm / (norm + 1e-6))
        source = self._replicas[next(rank for rank, n in enumerate(counts) if n)]
        self._calls.settle(lambda rank: self._replicas[rank].step(factor, source))
        if self._unlike:
            self._copy_from_primary(lambda r, _: r.copy_params(self._replicas[0]))

    def sync_params(self) -> None:
        """Give every replica the primary's parameters, frozen ones too, and buffers.

        Needed after changes that PyTorch does not count, see :attr:`primary`; others are
        followed without it. Blocks until it is done. Optimizer states stay as they are.

        Raises:
            ReplicaMismatch, RuntimeError: As :meth:`train_batch`.
        """
        with self._turn():
            self._mirror.follow_flags()
            self._copy_all(self._marks(()))

    def _copy_all(self, marks: Sequence[Event]) -> None:
        """Give every replica all tensors of the primary's."""
        self._mirror.check()
        if not self._alike:
            self._undo()  # of a batch that was interrupted; nothing where it was stepped
        self._alike = False
        self._copy_from_primary(lambda r, rank: r.copy_all(self._replicas[0], rank, marks))
        self._are_alike()

    def _undo(self) -> None:
        self._calls.settle(lambda rank: self._replicas[rank].undo())

    def _are_alike(self) -> None:
        self._mirror.are_alike()
        self._alike = True

    def _copy_from_primary(self, copy: Callable[[LoopReplica, int], None]) -> None:
        self._calls.settle(lambda rank: copy(self._replicas[rank], rank) if rank else None)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self._busy.locked():
            raise RuntimeError(
                "this DataParallelCoordinator is at work already: call it from one thread at a "
                "time, and not from loss_fn"
            )
        with self._busy:  # not acquire(): Ctrl-C could come before a try
            self._calls.check()
            yield

    def _marks(self, samples: Any) -> list[Event]:
        """Events in the caller's current streams of every GPU that plays a part."""
        api = cuda_api.API
        places = {*self._devices}
        places |= {api.device_of(part) for part in parts_of(samples) if isinstance(part, Tensor)}
        marks = []
        for place in places:
            if place.type == "cuda":
                with api.on_device(place):
                    event = api.new_event()
                    api.record(event)
                    marks.append(event)
        return marks

    # -- the end ------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads and wait for them; gives the intra-op threads back. Idempotent.

        Raises:
            RuntimeError: A thread does not come back from user code.
        """
        self._threads.close()

    def __enter__(self) -> DataParallelCoordinator:
        """Close when the block is left."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
