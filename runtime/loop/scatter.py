"""Scatters the nested inputs of one call to replicas along dimension 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.core.nested import flatten


class Scatter:
    """Cuts the inputs of one call into shards.

    Every tensor with dimensions is cut along dimension 0, so all of them have the same size
    there. Tensors without dimensions and all other values go to every replica unchanged.

    Args:
        args: Positional inputs.
        kwargs: Keyword inputs.

    Attributes:
        tensors: All tensors of the inputs, in order.
        num_samples: Size of the batch.

    Raises:
        TypeError: An input cannot be cut.
        ValueError: No tensor has a dimension, or sizes along dimension 0 differ.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self._spec = flatten((args, kwargs), self.tensors, strict=False)
        sizes = {t.size(0) for t in self.tensors if t.dim()}
        if not sizes:
            raise ValueError(
                "no input has a dimension to divide among the replicas: pass a batch, or call "
                "model.module(...), which runs on the first device only"
            )
        if len(sizes) > 1:
            shapes = ", ".join(str(tuple(t.shape)) for t in self.tensors if t.dim())
            raise ValueError(
                f"inputs of shapes {shapes} have different sizes along dimension 0, where they "
                "are divided among the replicas: put the batch first in each, and keep tensors "
                "that belong to no sample (a mask for all, for example) in a buffer of the model"
            )
        self.num_samples = sizes.pop()

    def shard(self, start: int, stop: int, device: torch.device) -> ShardInput:
        """The inputs of samples ``start`` to ``stop`` on a device.

        Views on the device of the inputs. Copies run on the current stream; the host does not
        wait for those from pinned memory and between GPUs.
        """
        parts, leaves = [], []
        for tensor in self.tensors:
            part = tensor.detach()
            if tensor.dim() and stop - start < self.num_samples:
                part = part[start:stop]
            part = to_device(part, device)
            leaf = None
            if tensor.requires_grad and torch.is_grad_enabled():
                leaf = part.requires_grad_()
            parts.append(part)
            leaves.append(leaf)
        args, kwargs = self._spec.build(iter(parts))
        return ShardInput(args, kwargs, leaves)

    def merge_gradients(
        self, index: int, parts: Sequence[Tensor | None], ranges: Sequence[tuple[int, int]]
    ) -> Tensor | None:
        """The gradient of an input from the gradients of its shards.

        Args:
            index: Index into :attr:`tensors`.
            parts: The shards' gradients; ``None`` for a shard without one.
            ranges: Each shard's samples.
        """
        if all(part is None for part in parts):
            return None
        tensor = self.tensors[index]
        if not tensor.dim():
            found = [part.to(tensor.device) for part in parts if part is not None]
            return torch.stack(found).sum(0)
        if len(parts) == 1 and parts[0] is not None:
            return parts[0].to(tensor.device)
        shape = tensor.shape[1:]
        return torch.cat(
            [
                tensor.new_zeros((stop - start, *shape)) if part is None else part.to(tensor.device)
                for part, (start, stop) in zip(parts, ranges, strict=True)
            ]
        )


class ShardInput(NamedTuple):
    """One replica's shard of the inputs.

    Attributes:
        args: Positional inputs.
        kwargs: Keyword inputs.
        leaves: For each input tensor the leaf that accumulates its gradient, or ``None``.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Tensor | None]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; the host waits only for a copy to the CPU.

    The host reads a CPU tensor without further synchronization.
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


def nested_to_device(value: Any, device: torch.device) -> Any:
    """Copy all tensors of a nested value to a device, on the current stream."""
    tensors: list[Tensor] = []
    spec = flatten(value, tensors, strict=False)
    if all(t.device == device for t in tensors):
        return value
    return spec.build(to_device(t, device) for t in tensors)


def to_replica(value: Any, device: torch.device, *, copy: bool) -> Any:
    """A replica's copy of a value set on all: its tensors are on the replica's device.

    Args:
        value: Any value; tensors may be in nested lists, tuples and dicts.
        device: The replica's device.
        copy: Whether to copy tensors that are on the device already.

    Raises:
        ValueError: A tensor requires a gradient, which replicas cannot share.
    """
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise ValueError(
                "a tensor that requires a gradient would get none from the replicas: pass it to "
                "forward, or detach() it; add parameters to the model before Trainer.setup"
            )
        return value.to(device, copy=copy)
    if type(value) not in (list, tuple, dict):
        return value
    parts = list(value.values()) if isinstance(value, dict) else list(value)
    own = [to_replica(part, device, copy=copy) for part in parts]
    if all(a is b for a, b in zip(own, parts, strict=True)):
        return value
    if isinstance(value, dict):
        return dict(zip(value, own, strict=True))
    return type(value)(own)
