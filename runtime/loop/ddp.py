"""Replicas in a loop of the user's own: parameters and gradients, moved when the user says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType

import torch
import torch.distributed
from torch import nn

from coordinator.policy import ApplyPolicy, AverageBackend, choose_backend
from runtime.config import check_devices, check_float
from runtime.loop.reduction import CpuReduction, GroupReduction, Reduction, StagedReduction
from runtime.loop.replica_set import ReplicaSet


class Ddp:
    """Keeps replicas of one model together in a loop that the user writes, for GANs and the like.

    One thread, which runs every replica, calls every method; each does the work of all
    replicas and blocks until it is done on the CPU. On GPUs work is ordered behind what the
    thread's current stream of each device was given, and in front of what follows there.

    Parameters are matched by name when the models are wrapped. Wrap again after a model has
    grown or a parameter was replaced.

    Attributes:
        backend: The transport of gradients, resolved.
        backend_reason: A sentence that says why.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        devices: tuple[torch.device, ...],
        backend: AverageBackend,
        backend_reason: str,
        reduction: Reduction,
    ) -> None:
        self.backend = backend
        self.backend_reason = backend_reason
        self._replicas = replicas
        self._devices = devices
        self._reduction: Reduction | None = reduction

    @classmethod
    def wrap(
        cls,
        models: Sequence[nn.Module],
        devices: Sequence[torch.device | str],
        backend: AverageBackend = AverageBackend.AUTO,
    ) -> Ddp:
        """Take charge of models that are built already. Changes none of them.

        Call :meth:`sync_params` before the first step, unless they are equal.

        Args:
            models: One replica for each device, two or more, on its device. Frozen tensors
                may be shared between them, trainable parameters may not.
            devices: One for each model; a device may stand more than once.
            backend: ``AUTO``: NCCL with distinct CUDA devices, else the calling thread
                reduces in CPU memory, through pinned memory where replicas are on GPUs
                (``THREAD`` and ``CPU`` are the same here). ``NCCL`` and ``GLOO`` take one
                internal thread for each replica.

        Raises:
            TypeError: Something is no module, no device or no backend.
            ReplicaMismatch: The models differ (a ``ValueError``); names the first difference.
            ValueError: Too few models, another number of devices, a model that is not on
                its device, a backend that does not serve the devices.
        """
        found = _check_models(models)
        places = check_devices(devices)
        if len(found) != len(places):
            raise ValueError(
                f"Ddp.wrap: {len(found)} models for {len(places)} devices; pass one device for "
                "each model (a device may stand more than once)"
            )
        if not isinstance(backend, AverageBackend):
            raise TypeError(f"Ddp.wrap: backend={backend!r}; pass an AverageBackend")
        replicas = ReplicaSet(found, places)
        chosen, reason = choose_backend(
            backend,
            ApplyPolicy.SYNC,
            [str(device) for device in places],
            nccl_available=torch.distributed.is_available()
            and torch.distributed.is_nccl_available(),
        )
        return cls(replicas, places, chosen, reason, make_reduction(chosen, places))

    @property
    def world_size(self) -> int:
        """Number of replicas."""
        return len(self._devices)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Each replica's device."""
        return self._devices

    def sync_params(self) -> None:
        """Copy replica 0's parameters, frozen ones too, and buffers to every other replica.

        Raises:
            RuntimeError: Closed, or a parameter was replaced or moved.
            ReplicaMismatch: A buffer has another shape than on replica 0.
        """
        self._open()
        self._replicas.copy_params()

    def sync_buffers(self) -> None:
        """Copy replica 0's buffers to every other replica, as PyTorch's DDP does.

        Raises:
            RuntimeError: Closed.
            ReplicaMismatch: A buffer has another shape than on replica 0.
        """
        self._open()
        self._replicas.copy_buffers()

    def all_reduce_gradients(self) -> None:
        """Replace every gradient by its mean over the replicas; call it after backward.

        :meth:`weighted_all_reduce_gradients` with equal weights.
        """
        self._reduce([1.0] * self.world_size)

    def weighted_all_reduce_gradients(self, batch_counts: Sequence[float]) -> None:
        """Replace every gradient by its mean over the replicas, weighted by batches or samples.

        The gradients are the same bits on every replica afterwards, in the memory and with
        the strides that they had. A parameter that has no gradient on any replica keeps
        none; if it has one on some, it counts as zero on the others, which get one. All is
        checked before anything is written.

        Args:
            batch_counts: How many batches, or samples, each replica's gradient is the mean
                of; from ``ElChe.batch_counts``, for instance. A replica that counts 0 gives
                nothing, whatever its gradients hold, and gets the mean. NaN and infinity of
                the others stay visible.

        Raises:
            ValueError: Not one count for each replica, a negative one, all of them 0; a
                sparse gradient; replicas whose gradients have different dtypes or that are
                frozen on some alone.
            TypeError: A count is no number.
            RuntimeError: Closed, or a parameter was replaced or moved.
            CollectiveAborted, CollectiveTimeout: Over NCCL or Gloo; the gradients hold what
                they held before, and the models must be wrapped again.
        """
        self._reduce(_check_counts(batch_counts, self.world_size))

    def _reduce(self, weights: Sequence[float]) -> None:
        reduction = self._open()
        gradients = self._replicas.gradients([weight > 0 for weight in weights])
        if gradients.tensors[0]:
            reduction.mean_(gradients.tensors, weights)
        gradients.adopt()

    def _open(self) -> Reduction:
        if self._reduction is None:
            raise RuntimeError("this Ddp is closed; wrap the models again")
        return self._reduction

    def close(self) -> None:
        """End internal threads and free memory; the models stay as they are. Idempotent."""
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            reduction.close()

    def __enter__(self) -> Ddp:
        """Close when the block is left."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def make_reduction(backend: AverageBackend, devices: Sequence[torch.device]) -> Reduction:
    """What averages over replicas on these devices; ``backend`` is a resolved one."""
    if backend in (AverageBackend.NCCL, AverageBackend.GLOO):
        return GroupReduction(devices, backend.value)
    if all(device.type == "cpu" for device in devices):
        return CpuReduction()
    return StagedReduction(devices)


def _check_models(models: object) -> list[nn.Module]:
    if isinstance(models, nn.Module) or not isinstance(models, Sequence):
        raise TypeError(
            f"Ddp.wrap: models is a {type(models).__name__}; pass a list of replicas, one for each "
            "device"
        )
    for rank, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"Ddp.wrap: model {rank} is a {type(model).__name__}; pass torch.nn.Modules"
            )
    if len(models) < 2:
        raise ValueError(
            f"Ddp.wrap needs two or more models, got {len(models)}; one model needs no wrapping"
        )
    return list(models)


def _check_counts(batch_counts: object, world_size: int) -> list[float]:
    to_list = getattr(batch_counts, "tolist", None)  # of a tensor or an array
    if to_list is not None:
        batch_counts = to_list()
    if isinstance(batch_counts, str) or not isinstance(batch_counts, Sequence):
        raise TypeError(
            f"batch_counts={batch_counts!r}; pass a list with one number for each replica"
        )
    if len(batch_counts) != world_size:
        raise ValueError(
            f"batch_counts has {len(batch_counts)} entries for {world_size} replicas; pass one "
            "for each"
        )
    counts = [check_float(f"batch_counts[{i}]", count, 0) for i, count in enumerate(batch_counts)]
    total = sum(counts)
    if not 0 < total < math.inf:
        raise ValueError(
            f"batch_counts {counts} sum to {total:g}: at least one replica must have trained a "
            "batch; skip the step otherwise"
        )
    return counts
