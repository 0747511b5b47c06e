"""Matches and checks the parameters, buffers and gradients of models by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from runtime.core.errors import ReplicaMismatch
from runtime.device import cuda_api
from runtime.replica.build import Template
from runtime.replica.flat import FlatBuffers, is_expanded
from runtime.replica.gradients import refuse_sparse


class ReplicaSet:
    """Matches parameters and buffers of models by name.

    Args:
        models: One per rank, two or more.
        devices: One per model.

    Raises:
        ReplicaMismatch: Models differ; the message has the first difference.
        ValueError: A tensor is lazy or on another device, or models share a trainable parameter.
    """

    def __init__(self, models: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        self._devices = devices
        templates = [Template.of(model) for model in models]
        for rank, template in enumerate(templates):
            _check_devices(rank, template, devices[rank])
            difference = templates[0].first_difference(template)
            if difference is not None:
                raise ReplicaMismatch(
                    f"Ddp.wrap: model {rank} is no replica of model 0: {difference}; build all "
                    "models alike"
                )
        _check_not_shared(templates)
        self._slots = _match_parameters(models)
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
        """Compare buffers at each call, since modules may replace them."""
        source, *others = [buffers.tensors() for buffers in self._buffers]
        for rank, target in enumerate(others, 1):
            for name, mine, theirs in zip(self._buffers[0].names, target, source, strict=True):
                if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                    raise ReplicaMismatch(
                        f"buffer {name!r} has shape {tuple(mine.shape)} and {mine.dtype} on model "
                        f"{rank}, {tuple(theirs.shape)} and {theirs.dtype} on model 0; keep them "
                        "equal"
                    )

    def gradients(self, counts: Sequence[bool]) -> CheckedGradients:
        """Check and return the gradients to be averaged.

        Args:
            counts: For each rank, whether its gradients are used.

        Raises:
            RuntimeError: A parameter was replaced or moved.
            ValueError: A gradient is sparse, or of another dtype than its peers.
        """
        found = CheckedGradients([[] for _ in self._devices])
        for slot in self._slots:
            grads = [p.grad for p in slot.params]
            if all(grad is None for grad in grads):
                continue
            slot.check(self._devices)
            _check_same_dtype(slot.name, grads)
            counted = [g for g, c in zip(grads, counts, strict=True) if c and g is not None]
            if not counted:
                found.cleared.extend(slot.params)
                continue
            for rank, (p, grad) in enumerate(zip(slot.params, grads, strict=True)):
                if grad is None:
                    grad = torch.zeros_like(counted[0], device=p.device)
                    found.created.append((p, grad))
                elif is_expanded(grad):  # not writable
                    grad = grad.detach().clone(memory_format=torch.contiguous_format)
                    found.created.append((p, grad))
                found.tensors[rank].append(grad)
        return found


@dataclass(frozen=True, slots=True)
class CheckedGradients:
    """The checked gradients of a step, before anything is written.

    Attributes:
        tensors: ``tensors[rank][i]``: gradients to be averaged, of the same shape and dtype
            on every rank.
        created: Parameters with the new tensors that become their gradients.
        cleared: Parameters whose gradient must not be used.
    """

    tensors: list[list[Tensor]]
    created: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    cleared: list[nn.Parameter] = field(default_factory=list)

    def assign(self) -> None:
        for parameter, gradient in self.created:
            parameter.grad = gradient
        for parameter in self.cleared:
            parameter.grad = None


class _MatchedParameter:
    """One parameter, matched over all replicas."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.params: list[nn.Parameter] = []
        self._locations: list[tuple[nn.Module, str]] = []

    def add(self, module: nn.Module, key: str, param: nn.Parameter) -> None:
        self.params.append(param)
        self._locations.append((module, key))

    def check(self, devices: Sequence[torch.device]) -> None:
        """Check that the parameters were not replaced or moved, and match."""
        first = self.params[0]
        for rank, ((module, key), p) in enumerate(zip(self._locations, self.params, strict=True)):
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
            if _device_of(p) != devices[rank]:
                raise RuntimeError(
                    f"parameter {self.name!r} of model {rank} is on {_device_of(p)} now, not on "
                    f"{devices[rank]}; move the models first and wrap them then"
                )


def _iter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield name, owner, key and parameter, in the order of ``named_parameters``."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, p in module._parameters.items():
            if p is not None and id(p) not in seen:
                seen.add(id(p))
                yield f"{prefix}.{key}" if prefix else key, module, key, p


def _match_parameters(models: Sequence[nn.Module]) -> list[_MatchedParameter]:
    slots = {name: _MatchedParameter(name) for name, _, _, _ in _iter_parameters(models[0])}
    for model in models:
        for name, module, key, p in _iter_parameters(model):
            slots[name].add(module, key, p)
    return list(slots.values())


def _device_of(tensor: Tensor) -> torch.device:
    return cuda_api.API.device_of(tensor)


def _check_devices(rank: int, template: Template, device: torch.device) -> None:
    for name, tensor in template.tensors.items():
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"Ddp.wrap: {name!r} of model {rank} is lazy, its shape is not known before the "
                "first forward; run one before, on every model"
            )
        if _device_of(tensor) != device:
            raise ValueError(
                f"Ddp.wrap: {name!r} of model {rank} is on {_device_of(tensor)}, not on {device}; "
                f"pass model.to('{device}')"
            )


def _check_not_shared(templates: Sequence[Template]) -> None:
    """Check that no trainable memory is shared; frozen tensors may be."""
    owners: dict[tuple[torch.device, int], int] = {}
    for rank, template in enumerate(templates):
        for name, tensor in template.tensors.items():
            if template.kinds[name] != "trainable" or tensor.numel() == 0:
                continue
            key = _device_of(tensor), tensor.untyped_storage().data_ptr()
            owner = owners.setdefault(key, rank)
            if owner != rank:
                raise ValueError(
                    f"Ddp.wrap: models {owner} and {rank} share the parameter {name!r}: pass a "
                    "model of its own for each device, for instance copy.deepcopy(model)"
                )


def _check_same_dtype(name: str, grads: Sequence[Tensor | None]) -> None:
    dtype: torch.dtype | None = None
    for rank, grad in enumerate(grads):
        if grad is None:
            continue
        refuse_sparse([name], [grad], f" of model {rank}")
        if dtype is not None and grad.dtype != dtype:
            raise ReplicaMismatch(
                f"the gradient of {name!r} is {grad.dtype} on model {rank}, {dtype} on another; "
                "train every model in the same precision"
            )
        dtype = grad.dtype
