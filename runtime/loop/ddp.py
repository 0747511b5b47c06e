"""Ddp: explicit synchronization of parameters and gradients in the user's own loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from coordinator.config import AverageBackend
from runtime.collective import resolve_backend
from runtime.core.checks import check_devices
from runtime.core.launchers import refuse_launcher
from runtime.core.loss_weights import Weight, check_weight
from runtime.core.process_state import CompileLimits, import_dynamo
from runtime.core.threads import Closeable
from runtime.loop.reduction import Reduction, make_reduction
from runtime.loop.replica_set import ReplicaSet


class Ddp(Closeable):
    """Keeps replicas of one model in sync in the user's own loop, for GANs for example.

    One thread runs every replica and calls every method. Each method does the work of all
    replicas and blocks until it is done on the CPU. On GPUs it runs after the work already on
    the thread's current stream of each device, and before later work there.

    Parameters are matched by name when the models are wrapped. Wrap again after parameters were
    added or replaced.

    Attributes:
        backend: The transport of gradients, resolved.
        backend_reason: The reason for that transport.
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
        """Wrap models that already exist. Changes none of them.

        Call :meth:`sync_params` before the first step, unless they are equal.

        Args:
            models: One replica for each device, two or more, on its device. Frozen tensors
                may be shared between them, trainable parameters may not.
            devices: One per model; a device may be listed more than once.
            backend: ``AUTO``: NCCL with distinct CUDA devices. Otherwise the calling thread
                reduces if all replicas are on the CPU, and other replicas are reduced in CPU
                memory, through pinned memory (``THREAD`` and ``CPU`` are the same here). All
                except reduction in the calling thread use one internal thread per replica.

        Raises:
            TypeError: An argument is not a module, a device or a backend.
            ReplicaMismatch: The models differ (a ``ValueError``); names the first difference.
            ValueError: There are too few models, the number of devices differs, a model is not
                on its device, or the backend does not serve the devices.
        """
        refuse_launcher("Ddp.wrap")
        found = _check_models(models)
        places = check_devices(devices)
        if len(found) != len(places):
            raise ValueError(
                f"Ddp.wrap: {len(found)} models for {len(places)} devices; pass one device for "
                "each model (a device may be listed more than once)"
            )
        if not isinstance(backend, AverageBackend):
            raise TypeError(f"Ddp.wrap: backend={backend!r}; pass an AverageBackend")
        import_dynamo()
        CompileLimits.extend(len(places))
        replicas = ReplicaSet(found, places)
        chosen, reason = resolve_backend(backend, places)
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
            ReplicaMismatch: A buffer's shape differs from that on replica 0.
        """
        self._open_reduction()
        self._replicas.copy_params()

    def sync_buffers(self) -> None:
        """Copy replica 0's buffers to every other replica, as PyTorch's DDP does.

        Raises:
            RuntimeError: Closed.
            ReplicaMismatch: A buffer's shape differs from that on replica 0.
        """
        self._open_reduction()
        self._replicas.copy_buffers()

    def all_reduce_gradients(self) -> None:
        """Replace every gradient by its mean over the replicas; call it after backward.

        The same as :meth:`weighted_all_reduce_gradients` with equal weights.
        """
        self._reduce([1.0] * self.world_size)

    def weighted_all_reduce_gradients(self, weights: Sequence[float | Tensor] | Tensor) -> None:
        """Replace every gradient by its weighted mean over the replicas.

        Afterwards the gradients have the same bits on every replica, and keep their memory and
        strides. A parameter without a gradient on any replica keeps none. If some replicas have
        one, the others count as zero and get one. Everything is checked before anything is
        written.

        Args:
            weights: The count that each replica's gradient is a mean over: batches (from
                ``ElChe.batch_counts``, for instance), samples, tokens, or a sum of class
                weights; numbers or scalar tensors. A replica with weight 0 adds nothing,
                even if its gradients are NaN, and receives the mean. NaN and infinity of the others
                stay visible. The host does not read tensors on GPUs: gradients become zeros if
                all weights are 0, and NaN if one is negative.

        Raises:
            ValueError: There is not one weight for each replica, a weight is negative, or all
                are 0; a gradient is sparse; replicas' gradients differ in dtype, or a parameter
                is frozen on some replicas only.
            TypeError: A weight is neither a number nor a tensor.
            RuntimeError: Closed, or a parameter was replaced or moved.
            CollectiveAborted, CollectiveTimeout: With internal threads; the gradients are
                unchanged, and the models must be wrapped again.
        """
        self._reduce(_check_weights(weights, self.world_size))

    def _reduce(self, weights: Sequence[Weight]) -> None:
        reduction = self._open_reduction()
        counts = [isinstance(weight, Tensor) or weight > 0 for weight in weights]
        gradients = self._replicas.gradients(counts)
        if gradients.tensors[0]:
            reduction.mean_(gradients.tensors, weights)
        gradients.assign()

    def _open_reduction(self) -> Reduction:
        if self._reduction is None:
            raise RuntimeError("this Ddp is closed; wrap the models again")
        return self._reduction

    def close(self) -> None:
        """End internal threads and free memory; the models stay as they are. Idempotent."""
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            reduction.close()


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


def _check_weights(weights: object, world_size: int) -> list[Weight]:
    if not isinstance(weights, (Sequence, Tensor)):
        to_list = getattr(weights, "tolist", None)  # NumPy array
        weights = weights if to_list is None else to_list()
    if isinstance(weights, Tensor) and weights.dim() == 1:
        weights = list(weights) if weights.device.type != "cpu" else weights.tolist()
    if isinstance(weights, str) or not isinstance(weights, Sequence):
        raise TypeError(f"weights={weights!r}; pass a list with one number for each replica")
    if len(weights) != world_size:
        raise ValueError(
            f"weights has {len(weights)} entries for {world_size} replicas; pass one for each"
        )
    checked = [check_weight(f"weights[{i}]", weight) for i, weight in enumerate(weights)]
    numbers = [weight for weight in checked if not isinstance(weight, Tensor)]
    if len(numbers) == len(checked) and not 0 < sum(numbers) < math.inf:
        raise ValueError(
            f"weights {checked} sum to {sum(numbers):g}: at least one replica must have trained; "
            "skip the step otherwise"
        )
    return checked
