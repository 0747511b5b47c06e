"""Scatters the nested inputs of one call to replicas along the batch dimension."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runtime.core.loss_weights import LossWeightFn
from runtime.core.nested import NestedSpec, flatten
from runtime.loop.mirror import version_of

logger = logging.getLogger(__name__)

WRITES_WHOLE = (
    "forward writes to its input {name!r} in place, which every device has as a whole, and each of "
    "{num} devices does so: write to a copy in forward, {name} = {name}.clone()"
)


class Scatter:
    """Splits the inputs of one call into shards.

    Every tensor with dimensions is split along the batch dimension, dimension 0 unless the rules
    name another, so all of them have the same size there. A list that holds no tensor outside
    its entries, and has one entry per sample, is split too. Tensors without dimensions, inputs
    that the rules name, and all other values go to every replica unchanged.

    Args:
        args: Positional inputs.
        kwargs: Keyword inputs.
        rules: Rules for cutting them.
        model: The model, for the names of its inputs.

    Attributes:
        tensors: All tensors of the inputs, in order.
        num_samples: Size of the batch.
        cut: Name of the input of each tensor or list that is split.

    Raises:
        TypeError: An input cannot be split.
        ValueError: No tensor has a dimension, or sizes along the batch dimension differ.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rules: InputRules | None = None,
        model: nn.Module | None = None,
    ) -> None:
        rules = rules or InputRules()
        self.batch_dim = rules.batch_dim
        self.tensors: list[Tensor] = []
        self._lists: dict[int, NestedSpec] = {}  # lists with one entry per sample, by id
        self._rows: dict[int, int] = {}  # sample of a tensor in such a list, by index
        self._dims: list[int | None] = []
        names: list[str] = []
        candidates: list[tuple[str, NestedSpec, int]] = []
        specs = []
        inputs: list[tuple[int | str, str, Any]] = [
            (i, rules.name_of(i, model), value) for i, value in enumerate(args)
        ]
        inputs += [(name, name, value) for name, value in kwargs.items()]
        for key, name, value in inputs:
            first = len(self.tensors)
            spec = flatten(value, self.tensors, strict=False)
            specs.append(spec)
            is_whole = key in rules.whole or name in rules.whole
            own = self.tensors[first:]
            self._dims += [None if is_whole else self._dim_of(t) for t in own]
            names += [name] * len(own)
            if not is_whole:
                candidates += [(name, found, at) for found, at in _entry_lists(spec, first)]
        args_spec = NestedSpec(tuple, tuple(range(len(args))), tuple(specs[: len(args)]))
        kwargs_spec = NestedSpec(dict, tuple(kwargs), tuple(specs[len(args) :]))
        self._spec = NestedSpec(tuple, (0, 1), (args_spec, kwargs_spec))
        self._names = names
        self._versions = list(map(version_of, self.tensors))
        self._find_samples(names, candidates)
        split_names = [n for n, dim in zip(names, self._dims, strict=True) if dim is not None]
        lists = [name for name, spec, _ in candidates if id(spec) in self._lists]
        self.split_names = list(dict.fromkeys([*split_names, *lists]))
        everything = dict.fromkeys([*names, *(name for _, name, _ in inputs)])
        rules.log(self.split_names, [name for name in everything if name not in self.split_names])

    def _dim_of(self, tensor: Tensor) -> int | None:
        if not tensor.dim():
            return None
        return self.batch_dim if tensor.dim() > self.batch_dim else 0

    def _find_samples(
        self, names: Sequence[str], candidates: Sequence[tuple[str, NestedSpec, int]]
    ) -> None:
        """Find the number of samples, and lists that have an entry for each."""
        inside = {
            index
            for _, spec, first in candidates
            for index in range(first, first + _num_tensors(spec))
        }
        outside = [i for i in range(len(self.tensors)) if i not in inside]
        if all(self._dims[i] is None for i in outside):
            outside = list(range(len(self.tensors)))
        sizes = {self.tensors[i].size(dim) for i in outside if (dim := self._dims[i]) is not None}
        if len(sizes) == 1:
            self.num_samples = sizes.pop()
            for _, spec, first in candidates:
                if len(spec.children) == self.num_samples and first not in outside:
                    self._lists[id(spec)] = spec
                    for row, child in enumerate(spec.children):
                        for _ in range(_num_tensors(child)):
                            self._rows[first] = row
                            self._dims[first] = None
                            first += 1
            sizes = {
                t.size(dim)
                for t, dim in zip(self.tensors, self._dims, strict=True)
                if dim is not None
            }
        if not sizes:
            raise ValueError(
                "no input has a dimension to divide among the replicas: pass a batch, or call "
                "model.module(...), which runs on the first device only"
            )
        if len(sizes) > 1:
            shapes = ", ".join(
                f"{name} {tuple(t.shape)}"
                for name, t, dim in zip(names, self.tensors, self._dims, strict=True)
                if dim is not None
            )
            raise ValueError(
                f"inputs of shapes {shapes} have different sizes along dimension {self.batch_dim}, "
                "where they are divided among the replicas: put the batch first in each, or name "
                "its dimension, DdpConfig(batch_dim=1); name inputs that belong to no sample (a "
                'mask for all, a memory bank), DdpConfig(whole=["bank"]), or keep them in a '
                "buffer of the model"
            )
        self.num_samples = sizes.pop()

    def shard(
        self, start: int, stop: int, device: torch.device, *, copies: bool = False
    ) -> ShardInput:
        """The inputs of samples ``start`` to ``stop`` on a device.

        Views on the device of the inputs, with version counters of their own, as ranks may write
        to them in place at the same time. Copies run on the current stream; the host does not
        wait for those from pinned memory and between GPUs.

        Args:
            start: First sample.
            stop: One past the last sample.
            device: The device.
            copies: Copy on the device of the inputs, too.
        """
        parts: list[Tensor | None] = []
        leaves, versions = [], []
        for index, tensor in enumerate(self.tensors):
            part = leaf = None
            row = self._rows.get(index, start)
            if start <= row < stop or row == start:
                part = tensor.data
                dim = self._dims[index]
                if dim is not None and stop - start < self.num_samples:
                    part = part.narrow(dim, start, stop - start)
                part = to_device(part, device)
                if copies and _is_on(part, tensor):
                    part = part.clone()
                if tensor.requires_grad and torch.is_grad_enabled():
                    leaf = part.requires_grad_()
            parts.append(part)
            leaves.append(leaf)
            versions.append(-1 if part is None else version_of(part))
        spec = self._sliced(self._spec, start, stop) if self._lists else self._spec
        args, kwargs = spec.build(part for part in parts if part is not None)
        return ShardInput(args, kwargs, leaves, parts, versions)

    def adopt_writes(self, shards: Sequence[tuple[int, int, ShardInput]]) -> None:
        """Take over what forward wrote to its inputs in place, as on one device.

        Args:
            shards: First sample, one past the last, and inputs of each shard.

        Raises:
            RuntimeError: Several shards have written to the same input.
        """
        for start, stop, given in shards:
            for index, (part, version) in enumerate(zip(given.parts, given.versions, strict=True)):
                if part is None or version_of(part) == version:
                    continue
                tensor, dim = self.tensors[index], self._dims[index]
                if dim is None and index not in self._rows and len(shards) > 1:
                    name = self._names[index]
                    raise RuntimeError(WRITES_WHOLE.format(name=name, num=len(shards)))
                if _is_on(part, tensor):
                    torch.autograd.graph.increment_version(tensor)
                else:
                    own = tensor if dim is None else tensor.narrow(dim, start, stop - start)
                    own.detach().copy_(part.detach())
                self._versions[index] = version_of(tensor)

    def mark_writes(self, shards: Sequence[ShardInput]) -> None:
        """Count writes of the caller to the inputs since the forward pass, before backward.

        Autograd then refuses those that it has saved, as on one device.
        """
        for index, tensor in enumerate(self.tensors):
            if version_of(tensor) == self._versions[index]:
                continue
            self._versions[index] = version_of(tensor)
            for given in shards:
                part = given.parts[index]
                if part is not None and _is_on(part, tensor):
                    torch.autograd.graph.increment_version(part)

    def _sliced(self, spec: NestedSpec, start: int, stop: int) -> NestedSpec:
        """The structure with the entries of samples ``start`` to ``stop`` in split lists."""
        if id(spec) in self._lists:
            entries = spec.children[start:stop]
            return NestedSpec(spec.kind, tuple(range(len(entries))), entries, spec.value)
        if not spec.children:
            return spec
        children = tuple(self._sliced(child, start, stop) for child in spec.children)
        return NestedSpec(spec.kind, spec.keys, children, spec.value)

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
        tensor, dim = self.tensors[index], self._dims[index]
        if dim is None:
            found = [part.to(tensor.device) for part in parts if part is not None]
            return torch.stack(found).sum(0)
        if len(parts) == 1 and parts[0] is not None:
            return parts[0].to(tensor.device)
        shape = list(tensor.shape)
        merged = []
        for part, (start, stop) in zip(parts, ranges, strict=True):
            shape[dim] = stop - start
            merged.append(tensor.new_zeros(shape) if part is None else part.to(tensor.device))
        return torch.cat(merged, dim)


class InputRules:
    """Rules for cutting a model's inputs into shards.

    Args:
        batch_dim: The dimension that counts the samples.
        whole: Inputs of which every rank gets all, by name or position; ``None``: not stated, so
            that a first batch is checked for inputs that belong to no sample.
        loss_weight: See :class:`~gpuworker.DdpConfig`.

    Attributes:
        is_checked: True if no check is due any more.
    """

    def __init__(
        self,
        batch_dim: int = 0,
        whole: Sequence[str | int] | None = None,
        loss_weight: LossWeightFn | None = None,
    ) -> None:
        self.batch_dim = batch_dim
        self.whole = frozenset(whole or ())
        self.loss_weight = loss_weight
        self.is_checked = whole is not None
        self._is_logged = False
        self._names: tuple[str, ...] | None = None

    def name_of(self, position: int, model: nn.Module | None) -> str:
        """Name of a positional input."""
        if self._names is None:
            self._names = () if model is None else _parameter_names(model)
        return self._names[position] if position < len(self._names) else f"input {position}"

    def log(self, split_names: Sequence[str], whole: Sequence[str]) -> None:
        """Log once which inputs are split."""
        if self._is_logged:
            return
        self._is_logged = True
        logger.info(
            "of the inputs, every device gets its samples of %s, and all of %s; others are named "
            "by DdpConfig(whole=[...])",
            ", ".join(split_names),
            ", ".join(whole) or "none",
        )


def _parameter_names(model: nn.Module) -> tuple[str, ...]:
    try:
        kinds = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in kinds if p.kind in positional)


def _is_on(part: Tensor, tensor: Tensor) -> bool:
    """True if a part of a tensor shares its memory."""
    return part.device == tensor.device


def _num_tensors(spec: NestedSpec) -> int:
    if spec.kind is Tensor:
        return 1
    return sum(map(_num_tensors, spec.children))


def _entry_lists(spec: NestedSpec, first: int) -> list[tuple[NestedSpec, int]]:
    """Lists without a tensor as an entry, with the index of the first tensor inside each."""
    if spec.kind is list and not any(child.kind is Tensor for child in spec.children):
        return [(spec, first)]
    found = []
    for child in spec.children:
        found += _entry_lists(child, first)
        first += _num_tensors(child)
    return found


class ShardInput(NamedTuple):
    """One replica's shard of the inputs.

    Attributes:
        args: Positional inputs.
        kwargs: Keyword inputs.
        leaves: For each input tensor the leaf that accumulates its gradient, or ``None``.
        parts: For each input tensor the shard's part, ``None`` if it has none.
        versions: The version counter of each part before the forward pass.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Tensor | None]
    parts: list[Tensor | None]
    versions: list[int]


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


def to_replica(value: Any, device: torch.device) -> Any:
    """A value whose tensors are on a device; itself if they are there already.

    Args:
        value: Any value; tensors may be in nested lists, tuples and dicts.
        device: The device.

    Raises:
        ValueError: A tensor requires a gradient.
    """
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise ValueError(
                "a tensor that requires a gradient and is an attribute is no parameter of the "
                "model: pass it to forward, detach() it, or make it an nn.Parameter"
            )
        return value.to(device)
    if type(value) not in (list, tuple, dict):
        return value
    parts = list(value.values()) if isinstance(value, dict) else list(value)
    own = [to_replica(part, device) for part in parts]
    if all(a is b for a, b in zip(own, parts, strict=True)):
        return value
    if isinstance(value, dict):
        return dict(zip(value, own, strict=True))
    return type(value)(own)
