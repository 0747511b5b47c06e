"""Replicas in a loop of the user's own: parameters and gradients, moved when the user says."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from coordinator.config import AverageBackend
from runtime.collective import Collective, create_collectives
from runtime.collective.thread import weighted_sums
from runtime.core.checks import check_devices
from runtime.core.errors import ReplicaMismatch
from runtime.core.threads import Closing
from runtime.core.weight import Weight, check_weight, parts_of, scale_
from runtime.device import cuda_api
from runtime.device.cuda_api import Event, StreamSync
from runtime.loop.rank_threads import Job, RankThreads, first_failure, resolve_backend
from runtime.replica.build import Template
from runtime.replica.flat import FlatBuffers, reals

Tensors = Sequence[Tensor]

_BLOCK = 1 << 18
"""Elements of one rank that are reduced before the next: they stay in cache meanwhile."""
ABORT_S = 10.0
"""How long internal threads may take to come back once their group was aborted."""


class Reduction(ABC):
    """Replaces the ranks' tensors by their weighted mean. For one thread at a time."""

    @abstractmethod
    def mean_(self, tensors: Sequence[Tensors], weights: Sequence[float]) -> None:
        """Give every rank the mean, in place, with the same bits on all of them.

        Runs after the work already on the calling thread's current stream of each GPU, and
        before later work there. Each tensor keeps its strides.

        Args:
            tensors: ``tensors[rank][i]``, of the same shape and dtype on every rank.
            weights: One for each rank, finite, not negative, not all 0. The values of a
                rank with weight 0 are never used.
        """

    def close(self) -> None:
        """Free what the reduction holds. Idempotent."""
        return


class CpuReduction(Reduction):
    """Reduces in place in the calling thread, for replicas that are all on the CPU.

    Adds in order of rank, float16 and bfloat16 in float32, as the collectives do.
    """

    def mean_(self, tensors: Sequence[Tensors], weights: Sequence[float]) -> None:
        """As :meth:`Reduction.mean_`."""
        total = float(sum(weights))
        factors = [weight / total for weight in weights]
        with torch.no_grad():
            for block in _blocks(tensors[0]):
                values = [[own[i] for i in block] for own in tensors]
                mean = weighted_sums(values, factors)
                for target in values:
                    if target is not mean:
                        torch._foreach_copy_(target, mean)


def _blocks(tensors: Tensors) -> Iterator[list[int]]:
    """Indices of tensors of one dtype that are reduced together."""
    order = sorted(range(len(tensors)), key=lambda i: str(tensors[i].dtype))
    block: list[int] = []
    size = 0
    for i in order:
        tensor = tensors[i]
        if block and (size + tensor.numel() > _BLOCK or tensors[block[0]].dtype != tensor.dtype):
            yield block
            block, size = [], 0
        block.append(i)
        size += tensor.numel()
    if block:
        yield block


class _Packed:
    """Tensors of one rank side by side: one flat tensor for each dtype, used again and again."""

    def __init__(self) -> None:
        self._flats: dict[torch.dtype, Tensor] = {}
        self._groups: list[tuple[list[int], list[Tensor]]] = []

    def load(self, tensors: Tensors) -> list[Tensor]:
        """Copy tensors of one device into the flat ones; gives those, in order of dtype."""
        groups: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            groups.setdefault(tensor.dtype, []).append(i)
        flats: list[Tensor] = []
        self._groups = []
        for group in groups.values():
            sizes = [tensors[i].numel() for i in group]
            flat = self._room(tensors[group[0]], sum(sizes))
            parts = flat.split(sizes)  # type: ignore[no-untyped-call]
            views = [part.view(tensors[i].shape) for i, part in zip(group, parts, strict=True)]
            torch._foreach_copy_(views, [tensors[i] for i in group])
            self._groups.append((group, views))
            flats.append(flat)
        return reals(flats)

    def store(self, tensors: Tensors) -> None:
        """Copy the flat tensors back to where they were loaded from."""
        for group, views in self._groups:
            torch._foreach_copy_([tensors[i] for i in group], views)

    def _room(self, like: Tensor, num_elements: int) -> Tensor:
        flat = self._flats.get(like.dtype)
        if flat is None or flat.numel() < num_elements:
            flat = self._flats[like.dtype] = like.new_empty(num_elements)
        return flat[:num_elements]


class GroupReduction(Reduction):
    """Reduces over a group of ranks, with one internal thread for each.

    The call blocks until earlier work is done and the mean is formed; copies back to the
    gradients are only issued. After a failure the tensors are unchanged, and the group stays
    aborted.

    Args:
        devices: The device of each rank.
        kind: ``"nccl"`` or ``"gloo"``; ``"thread"``: in CPU memory, through pinned memory for
            ranks on GPUs, of which several may share one.
        timeout_s: How long an exchange may take, in seconds.
    """

    def __init__(self, devices: Sequence[torch.device], kind: str, timeout_s: float = 60.0) -> None:
        self._devices = devices
        self._sync = StreamSync()
        self._packed = [_Packed() for _ in devices]
        self._events: list[Event | None] = [None] * len(devices)
        self._ends = create_collectives(len(devices), kind, devices, timeout_s)
        try:
            contexts = [_stream_of(device) for device in devices]
            self._threads = RankThreads("ddp", contexts, _closing(self._ends))
        except BaseException:
            _closing(self._ends)()
            raise

    def mean_(self, tensors: Sequence[Tensors], weights: Sequence[float]) -> None:
        """As :meth:`Reduction.mean_`.

        Raises:
            CollectiveAborted, CollectiveTimeout: The exchange failed, now or earlier.
        """
        with torch.no_grad():
            flats = [self._load(rank, own) for rank, own in enumerate(tensors)]

            def exchange(rank: int) -> Event | None:
                self._sync.wait(self._devices[rank], [self._events[rank]])
                self._ends[rank].weighted_mean_(flats[rank], weights[rank])
                return self._sync.mark(self._devices[rank])

            job = Job([partial(exchange, rank) for rank in range(len(flats))])
            try:
                self._threads.deliver(job)
                job.wait()
            except BaseException:  # Ctrl-C: nobody may write to the tensors any more
                if job.is_begun:
                    self._ends[0].abort()
                    self._threads.deliver(job)
                    job.wait(ABORT_S)
                raise
            failure = first_failure(job.outcomes)
            if failure is not None:
                raise failure[1]
            for rank, (own, outcome) in enumerate(zip(tensors, job.outcomes, strict=True)):
                self._store(rank, own, outcome.value)

    def _load(self, rank: int, tensors: Tensors) -> list[Tensor]:
        device, event = self._devices[rank], self._events[rank]
        # The stream may be another one now: what the last call copies must have left.
        self._sync.wait(device, [event])
        flats = self._packed[rank].load(tensors)
        self._events[rank] = self._sync.mark(device, event)
        return flats

    def _store(self, rank: int, tensors: Tensors, reduced: Event | None) -> None:
        device = self._devices[rank]
        self._sync.wait(device, [reduced])
        self._packed[rank].store(tensors)
        self._events[rank] = self._sync.mark(device, self._events[rank])

    def close(self) -> None:
        """End the threads and the group; blocks for that."""
        self._threads.close()
        self._packed = []


def _stream_of(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """What makes the context of a rank's internal thread: its device, and a stream of its own."""
    api: Any = cuda_api.API

    @contextmanager
    def current() -> Iterator[None]:
        with api.on_device(device), api.stream(api.new_stream(device)):
            yield

    return nullcontext if device.type == "cpu" else current


def _closing(ends: Sequence[Collective]) -> Callable[[], None]:
    def close() -> None:
        for end in ends:
            end.close()

    return close


@dataclass(frozen=True, slots=True)
class Gradients:
    """The checked gradients of a step; nothing is written yet.

    Attributes:
        tensors: ``tensors[rank][i]``: gradients to be averaged, of the same shape and dtype
            on every rank.
        made: Parameters without a gradient, and the zeros that become their gradients.
        dropped: Parameters whose gradient must not be used.
    """

    tensors: list[list[Tensor]]
    made: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    dropped: list[nn.Parameter] = field(default_factory=list)

    def adopt(self) -> None:
        """Set the parameters' gradients to the averaged ones."""
        for parameter, gradient in self.made:
            parameter.grad = gradient
        for parameter in self.dropped:
            parameter.grad = None


class _Slot:
    """Where one parameter stands in each replica."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.params: list[nn.Parameter] = []
        self._homes: list[tuple[nn.Module, str]] = []

    def add(self, module: nn.Module, key: str, param: nn.Parameter) -> None:
        self.params.append(param)
        self._homes.append((module, key))

    def check(self, devices: Sequence[torch.device]) -> None:
        """Make sure that the replicas' parameters are those of before, and alike."""
        first = self.params[0]
        for rank, ((module, key), p) in enumerate(zip(self._homes, self.params, strict=True)):
            if module._parameters.get(key) is not p:
                raise RuntimeError(
                    f"parameter {self.name!r} of model {rank} was replaced since Ddp.wrap: wrap "
                    "the models again once they are complete"
                )
            if p.requires_grad is not first.requires_grad:
                raise ReplicaMismatch(
                    f"parameter {self.name!r} requires a gradient on some models only (model 0: "
                    f"{first.requires_grad}, model {rank}: {p.requires_grad}); freeze or unfreeze "
                    "it on every model"
                )
            if _place(p) != devices[rank]:
                raise RuntimeError(
                    f"parameter {self.name!r} of model {rank} is on {_place(p)} now, not on "
                    f"{devices[rank]}; move the models first and wrap them then"
                )


class ReplicaSet:
    """Matches parameters and buffers of models by name.

    Args:
        models: One for each rank, two or more.
        devices: The device of each model.

    Raises:
        ReplicaMismatch: Models differ; names the first difference.
        ValueError: A tensor is lazy or on another device, or models share a trainable parameter.
    """

    def __init__(self, models: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        self._devices = devices
        templates = [Template.of(model) for model in models]
        for rank, template in enumerate(templates):
            _check_place(rank, template, devices[rank])
            difference = templates[0].first_difference(template)
            if difference is not None:
                raise ReplicaMismatch(
                    f"Ddp.wrap: model {rank} is no replica of model 0: {difference}; build all "
                    "models alike"
                )
        _check_apart(templates)
        self._slots = _match(models)
        self._buffers = [FlatBuffers(model) for model in models]

    def copy_params(self) -> None:
        """Copy rank 0's parameters and buffers to every replica."""
        self._check_buffers()
        for slot in self._slots:
            slot.check(self._devices)
        with torch.no_grad():
            for slot in self._slots:
                for target in slot.params[1:]:
                    target.copy_(slot.params[0])
        self.copy_buffers()

    def copy_buffers(self) -> None:
        """Copy rank 0's buffers to every replica."""
        self._check_buffers()
        source, *others = [buffers.tensors() for buffers in self._buffers]
        with torch.no_grad():
            for target in others:
                for mine, theirs in zip(target, source, strict=True):
                    mine.copy_(theirs)

    def _check_buffers(self) -> None:
        """Modules may replace their buffers, so they are compared each time."""
        source, *others = [buffers.tensors() for buffers in self._buffers]
        for rank, target in enumerate(others, 1):
            for name, mine, theirs in zip(self._buffers[0].names, target, source, strict=True):
                if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                    raise ReplicaMismatch(
                        f"buffer {name!r} has shape {tuple(mine.shape)} and {mine.dtype} on model "
                        f"{rank}, {tuple(theirs.shape)} and {theirs.dtype} on model 0; keep them "
                        "alike"
                    )

    def gradients(self, counts: Sequence[bool]) -> Gradients:
        """Check and return the gradients to be averaged.

        Args:
            counts: Whether a rank's gradients count.

        Raises:
            RuntimeError: A parameter was replaced or moved.
            ValueError: A gradient is sparse, or of another dtype than its peers.
        """
        found = Gradients([[] for _ in self._devices])
        for slot in self._slots:
            grads = [p.grad for p in slot.params]
            if all(grad is None for grad in grads):
                continue
            slot.check(self._devices)
            _check_alike(slot.name, grads)
            counted = [g for g, c in zip(grads, counts, strict=True) if c and g is not None]
            if not counted:
                found.dropped.extend(slot.params)
                continue
            for rank, (p, grad) in enumerate(zip(slot.params, grads, strict=True)):
                if grad is None:
                    grad = torch.zeros_like(counted[0], device=p.device)
                    found.made.append((p, grad))
                elif _overlaps(grad):  # cannot be written to
                    grad = grad.detach().clone(memory_format=torch.contiguous_format)
                    found.made.append((p, grad))
                found.tensors[rank].append(grad)
        return found


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Name, owner, key and parameter, as ``named_parameters`` gives them, tied ones once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, p in module._parameters.items():
            if p is not None and id(p) not in seen:
                seen.add(id(p))
                yield f"{prefix}.{key}" if prefix else key, module, key, p


def _match(models: Sequence[nn.Module]) -> list[_Slot]:
    slots = {name: _Slot(name) for name, _, _, _ in _named(models[0])}
    for model in models:
        for name, module, key, p in _named(model):
            slots[name].add(module, key, p)
    return list(slots.values())


def _place(tensor: Tensor) -> torch.device:
    return cuda_api.API.device_of(tensor)


def _check_place(rank: int, template: Template, device: torch.device) -> None:
    for name, tensor in template.tensors.items():
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"Ddp.wrap: {name!r} of model {rank} is lazy, its shape is not known before the "
                "first forward; run one before, on every model"
            )
        if _place(tensor) != device:
            raise ValueError(
                f"Ddp.wrap: {name!r} of model {rank} is on {_place(tensor)}, not on {device}; pass "
                f"model.to('{device}')"
            )


def _check_apart(templates: Sequence[Template]) -> None:
    """No two replicas may train the same memory; what is frozen may be shared."""
    owners: dict[tuple[torch.device, int], int] = {}
    for rank, template in enumerate(templates):
        for name, tensor in template.tensors.items():
            if template.kinds[name] != "trainable" or tensor.numel() == 0:
                continue
            key = _place(tensor), tensor.untyped_storage().data_ptr()
            owner = owners.setdefault(key, rank)
            if owner != rank:
                raise ValueError(
                    f"Ddp.wrap: models {owner} and {rank} share the parameter {name!r}: pass a "
                    "model of its own for each device, for instance copy.deepcopy(model)"
                )


def _check_alike(name: str, grads: Sequence[Tensor | None]) -> None:
    dtype: torch.dtype | None = None
    for rank, grad in enumerate(grads):
        if grad is None:
            continue
        if grad.layout is not torch.strided:
            raise ValueError(
                f"parameter {name!r} of model {rank} has a sparse gradient, which replicas cannot "
                "average: build the embedding with sparse=False"
            )
        if dtype is not None and grad.dtype != dtype:
            raise ReplicaMismatch(
                f"the gradient of {name!r} is {grad.dtype} on model {rank}, {dtype} on another; "
                "train every model in the same precision"
            )
        dtype = grad.dtype


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, as those of an expanded tensor do."""
    return 0 in tensor.stride() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


class Ddp(Closing):
    """Keeps replicas of one model in sync in a loop of your own, for GANs for example.

    One thread runs every replica and calls every method. Each method does the work of all
    replicas and blocks until it is done on the CPU. On GPUs it runs after the work already on
    the thread's current stream of each device, and before later work there.

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
        """Wrap models that already exist. Changes none of them.

        Call :meth:`sync_params` before the first step, unless they are equal.

        Args:
            models: One replica for each device, two or more, on its device. Frozen tensors
                may be shared between them, trainable parameters may not.
            devices: One for each model; a device may be listed more than once.
            backend: ``AUTO``: NCCL with distinct CUDA devices. Otherwise the calling thread
                reduces if all replicas are on the CPU, and other replicas are reduced in CPU
                memory, through pinned memory (``THREAD`` and ``CPU`` are the same here). All
                but reduction in the calling thread takes one internal thread for each replica.

        Raises:
            TypeError: An argument is not a module, a device or a backend.
            ReplicaMismatch: The models differ (a ``ValueError``); names the first difference.
            ValueError: There are too few models, the number of devices differs, a model is not
                on its device, or the backend does not serve the devices.
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
        self._open()
        self._replicas.copy_params()

    def sync_buffers(self) -> None:
        """Copy replica 0's buffers to every other replica, as PyTorch's DDP does.

        Raises:
            RuntimeError: Closed.
            ReplicaMismatch: A buffer's shape differs from that on replica 0.
        """
        self._open()
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
                whatever its gradients hold, and gets the mean. NaN and infinity of the others
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
        checked = _check_weights(weights, self.world_size)
        numbers = [weight for weight in checked if not isinstance(weight, Tensor)]
        if len(numbers) == len(checked):
            self._reduce(numbers)
        else:
            self._reduce_unread(checked)

    def _reduce_unread(self, weights: Sequence[Weight]) -> None:
        """The weighted mean as the plain mean of scaled gradients, without a host sync."""
        reduction = self._open()
        gradients = self._replicas.gradients([True] * self.world_size)
        scaled = [[g.detach().clone() for g in own] for own in gradients.tensors]
        first = next(w.device for w in weights if isinstance(w, Tensor))
        parts = parts_of([torch.as_tensor(weight) for weight in weights], first)
        for own, device, part in zip(scaled, self._devices, parts, strict=True):
            factor = part * self.world_size
            scale_(own, factor.to(device, non_blocking=device.type != "cpu"))
        if scaled[0]:
            reduction.mean_(scaled, [1.0] * self.world_size)
            with torch.no_grad():
                for own, new in zip(gradients.tensors, scaled, strict=True):
                    torch._foreach_copy_(own, new)
        gradients.adopt()

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


def make_reduction(backend: AverageBackend, devices: Sequence[torch.device]) -> Reduction:
    """Make the reduction for replicas on these devices; ``backend`` is resolved."""
    over_group = backend in (AverageBackend.NCCL, AverageBackend.GLOO)
    if not over_group and all(device.type == "cpu" for device in devices):
        return CpuReduction()
    return GroupReduction(devices, backend.value if over_group else "thread")


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
        to_list = getattr(weights, "tolist", None)  # of an array
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
