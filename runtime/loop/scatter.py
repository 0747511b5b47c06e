"""Scatters the nested inputs of one call to replicas along the batch dimension."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runtime.core.loss_weights import LossWeightFn
from runtime.core.nested import (
    NestedSpec,
    cut_attributes,
    flatten,
    held_parts,
    is_batch,
    like,
    map_batch,
    num_rows,
    piece_of,
    rows_beside,
)
from runtime.loop.mirror import version_of

logger = logging.getLogger(__name__)

_MAX_SHAPES = 8
"""Shapes of inputs in an error."""
WRITES_WHOLE = (
    "forward writes to its input {name!r} in place, which every device has as a whole, and each of "
    "{num} devices does so: write to a copy in forward, {name} = {name}.clone()"
)


class Scatter:
    """Splits the inputs of one call into shards.

    Every tensor with dimensions is split along the batch dimension, dimension 0 unless the rules
    name another, so all of them have the same size there. A list that holds no tensor outside
    its entries, and has one entry per sample, is split too, and so is an object that holds
    samples, by its own class. A number called ``batch_size`` follows. Tensors without dimensions,
    inputs that the rules name, and all other values go to every replica unchanged.

    Args:
        args: Positional inputs.

    Attributes:
        tensors: All tensors of the inputs, in order.

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
        self._lists: dict[int, EntryList] = {}  # lists with one entry per sample, by id of spec
        self._objects: dict[int, tuple[str, Any]] = {}  # that their class cuts, by id of their spec
        self._counts: set[int] = set()  # numbers of samples, by id of their spec
        self.object_tensors: list[Tensor] = []
        self._rows: dict[int, int] = {}  # sample of a tensor in such a list, by index
        self._dims: list[int | None] = []
        self._names: list[str] = []
        lists: list[EntryList] = []
        objects: list[HeldObject] = []
        specs = []
        inputs: list[tuple[int | str, str, Any]] = [
            (i, rules.name_of(i, model), value) for i, value in enumerate(args)
        ]
        inputs += [(name, name, value) for name, value in kwargs.items()]
        for key, name, value in inputs:
            first = len(self.tensors)
            opaque: list[NestedSpec] = []
            spec = flatten(value, self.tensors, strict=False, objects=opaque)
            specs.append(spec)
            is_whole = key in rules.whole or name in rules.whole
            own = self.tensors[first:]
            self._dims += [None if is_whole else self._dim_of(t) for t in own]
            self._names += [name] * len(own)
            if not is_whole:
                found = enumerate(_entry_lists(spec, first))
                lists += [EntryList((name, number), *each) for number, each in found]
                held = ((each, held_parts(each.value)) for each in opaque)
                objects += [HeldObject(name, each, parts) for each, parts in held if parts]
        args_spec = NestedSpec(tuple, tuple(range(len(args))), tuple(specs[: len(args)]))
        kwargs_spec = NestedSpec(dict, tuple(kwargs), tuple(specs[len(args) :]))
        self._spec = NestedSpec(tuple, (0, 1), (args_spec, kwargs_spec))
        self._versions = list(map(version_of, self.tensors))
        self._find_samples(lists, objects, rules.lists)
        if objects:
            self._find_objects(objects, rules.divided)
        self._find_counts(self._spec)
        if not rules.is_logged:
            rules.log(self.split_names, [name for _, name, _ in inputs])

    @property
    def split_names(self) -> list[str]:
        dims = zip(self._names, self._dims, strict=True)
        cut = [name for name, dim in dims if dim is not None]
        cut += [each.name for each in self._lists.values()]
        return list(dict.fromkeys([*cut, *(name for name, _ in self._objects.values())]))

    @property
    def split_description(self) -> str:
        """Names of the inputs that are split, with the classes of objects."""
        kinds = {name: type(value).__name__ for name, value in self._objects.values()}
        return ", ".join(f"{n} (a {kinds[n]})" if n in kinds else n for n in self.split_names)

    def _dim_of(self, tensor: Tensor) -> int | None:
        if not tensor.dim():
            return None
        return self.batch_dim if tensor.dim() > self.batch_dim else 0

    def _sizes(self, indices: Iterable[int]) -> set[int]:
        """Sizes of tensors along the dimension where each is cut."""
        pairs = ((self.tensors[i], self._dims[i]) for i in indices)
        return {tensor.size(dim) for tensor, dim in pairs if dim is not None}

    def _find_samples(
        self,
        lists: Sequence[EntryList],
        objects: Sequence[HeldObject],
        known: dict[tuple[str, int], bool],
    ) -> None:
        """Find the number of samples, and lists that have an entry for each."""
        everything = range(len(self.tensors))
        beside = {len(each) for each in lists if not each.holds_tensors}
        lists = [e for e in lists if not e.is_tuple or known.get(e.key) or len(e) in beside]
        inside = {index for each in lists for index in each.indices}
        sizes = self._sizes(i for i in everything if i not in inside)
        batches = [each for each in objects if is_batch(each.spec.value)]
        if lists and batches:
            in_lists = {id(spec) for each in lists for spec in _walk(each.spec)}
            batches = [each for each in batches if id(each.spec) not in in_lists]
        sizes |= {n for each in batches if (n := num_rows(each.spec.value)) is not None}
        if not sizes:
            sizes = self._lengths(lists, known) or self._sizes(everything)
        if not sizes:
            sizes = {t.size(0) for each in objects for t in each.tensors[:1] if t.dim()}
        if len(sizes) == 1:
            (self.num_samples,) = sizes
            for each in lists:
                if self._has_samples(each, known):
                    self._cut_entries(each)
            if lists:
                sizes |= self._sizes(everything)
        if not sizes:
            raise ValueError(
                "no input has a dimension to divide among the replicas: pass a batch, or call "
                "model.module(...), which runs on the first device only"
            )
        if len(sizes) > 1:
            dims = zip(self._names, self.tensors, self._dims, strict=True)
            found = [f"{name} {tuple(t.shape)}" for name, t, dim in dims if dim is not None]
            for name, spec, _ in batches:
                kind = type(spec.value).__name__
                found.append(f"{name} (a {kind} of {num_rows(spec.value)} samples)")
            found = list(dict.fromkeys(found))
            shapes = ", ".join([*found[:_MAX_SHAPES], *["..."] * (len(found) > _MAX_SHAPES)])
            raise ValueError(
                f"inputs of shapes {shapes} have different sizes along dimension {self.batch_dim}, "
                "where they are divided among the replicas: put the batch first in each, or name "
                "its dimension, DdpConfig(batch_dim=1); name inputs that belong to no sample (a "
                'mask for all, a memory bank), DdpConfig(whole=["bank"]), or keep them in a '
                "buffer of the model"
            )

    def _lengths(
        self, lists: Sequence[EntryList], known: Mapping[tuple[str, int], bool]
    ) -> set[int]:
        """Lengths of lists whose tensors are samples, if no other input shows the batch's size.

        Tensors in lists are columns if they have the same number of rows, unless they look like
        images: with one or three rows, and many or of several sizes.
        """
        held = [each for each in lists if each.indices and known.get(each.key) is not False]
        found = {
            len(each)
            for each in held
            if known.get(each.key) or any(map(self._are_images, each.columns()))
        }
        if found or len(self._sizes(index for each in held for index in each.indices)) < 2:
            return found
        lengths = {len(each) for each in held}
        return lengths if len(lengths) == 1 else set()

    def _are_images(self, indices: Sequence[int]) -> bool:
        shapes = [self.tensors[i].shape for i in indices]
        alike = len({shape[:1] for shape in shapes}) == 1 and all(len(s) == 3 for s in shapes)
        many = len(shapes) > 4 or len(set(shapes)) > 1
        return alike and many and shapes[0][0] in (1, 3)

    def _has_samples(self, entries: EntryList, known: dict[tuple[str, int], bool]) -> bool:
        """True if a list has an entry for each sample; as in the first batch."""
        length = len(entries)
        may_be_columns = entries.holds_tensors or entries.spec.kind is tuple
        is_columns = may_be_columns and self._sizes(entries.indices) == {length}
        found = known.setdefault(entries.key, length == self.num_samples and not is_columns)
        if found and length != self.num_samples:
            raise ValueError(
                f"the list {entries.name!r} had an entry for each sample of the first batch, and "
                f"has {length} for {self.num_samples} samples now: if it belongs to no sample, "
                f"name it, DdpConfig(whole=[{entries.name!r}])"
            )
        return found

    def _cut_entries(self, entries: EntryList) -> None:
        """Divide a list by its entries."""
        self._lists[id(entries.spec)] = entries
        first = entries.first
        for row, child in enumerate(entries.spec.children):
            for _ in range(_num_tensors(child)):
                self._rows[first] = row
                self._dims[first] = None
                first += 1

    def _find_objects(self, objects: Sequence[HeldObject], divided: set[type]) -> None:
        """Find objects that hold samples, and check that their class divides them."""
        in_entries = {id(spec) for each in self._lists.values() for spec in _walk(each.spec)}
        num = self.num_samples
        for name, spec, parts in objects:
            each, kind = HeldObject(name, spec, parts), type(spec.value)
            if id(spec) in in_entries or not (is_batch(spec.value) or each.has_rows(num)):
                continue
            if num > 1 and kind not in divided:
                try:
                    piece_of(spec.value, 0, num // 2, num)
                except TypeError as error:
                    raise TypeError(
                        f"input {name!r}: {error}; model.accumulate(...) trains whole batches on "
                        f"each device, and DdpConfig(whole=[{name!r}]) gives all of it to every "
                        "device"
                    ) from None
                divided.add(kind)
            if torch.is_grad_enabled() and any(t.requires_grad for t in each.tensors):
                raise TypeError(
                    f"input {name!r}: a tensor in a {kind.__name__} requires a gradient, which "
                    "does not pass through pieces of it: pass the tensor itself"
                )
            self._objects[id(spec)] = name, spec.value
            self.object_tensors += each.tensors

    def _find_counts(self, spec: NestedSpec) -> None:
        """Find numbers of samples called ``batch_size``, and containers with lists as long."""
        for key, child in zip(spec.keys, spec.children, strict=True):
            if key == "batch_size":
                first = child.children[0] if child.children else child
                if type(first.value) is int and first.value == self.num_samples:
                    self._counts.add(id(first))
            if child.children:
                self._find_counts(child)
        if spec.value is not None and spec.children and rows_beside(spec.value, self.num_samples):
            self._counts.add(id(spec))

    def shard(
        self,
        start: int,
        stop: int,
        device: torch.device,
        *,
        copies: bool = False,
        dtype: torch.dtype | None = None,
    ) -> ShardInput:
        """The inputs of samples ``start`` to ``stop`` on a device.

        Views on the device of the inputs, with version counters of their own, as ranks may write
        to them in place at the same time. Copies run on the current stream; the host does not
        wait for those from pinned memory and between GPUs.

        Args:
            start: First sample.
            stop: One past the last sample.
            copies: Copy on the device of the inputs, too.
            dtype: Dtype of floating-point tensors; ``None``: their own.
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
                if dtype is not None and part.is_floating_point():
                    part = part.to(dtype)
                part = like(part, tensor)
                if tensor.requires_grad and torch.is_grad_enabled():
                    leaf = part.requires_grad_()
            parts.append(part)
            leaves.append(leaf)
            versions.append(-1 if part is None else version_of(part))
        spec = self._spec
        if self._lists or self._objects or self._counts:
            pieces = {
                key: self._object_piece(value, start, stop, device, copies=copies, dtype=dtype)
                for key, (_, value) in self._objects.items()
            }
            spec = self._sliced(spec, start, stop, pieces)
        args, kwargs = spec.build(part for part in parts if part is not None)
        return ShardInput(args, kwargs, leaves, parts, versions)

    def overwrite(self, given: ShardInput, start: int) -> None:
        """Overwrite the samples from ``start`` on of copied inputs, by other ones."""
        for index, part in enumerate(given.parts):
            dim = self._dims[index]
            if part is not None and dim is not None:
                num = part.size(dim) - start
                part.narrow(dim, start, num).copy_(part.narrow(dim, 0, num).clone())
            elif part is not None and self._rows.get(index, -1) >= start:
                part.copy_(part / 2)

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

    def _object_piece(
        self,
        value: Any,
        start: int,
        stop: int,
        device: torch.device,
        *,
        copies: bool,
        dtype: torch.dtype | None,
    ) -> Any:
        """Samples of an object on a device."""
        piece = piece_of(value, start, stop, self.num_samples)
        if any(getattr(part, "device", device) != device for part in held_parts(piece)):
            if not callable(getattr(piece, "to", None)):
                raise TypeError(
                    f"a {type(piece).__name__} cannot be copied to {device}: give it a method "
                    "to(device), or pass its tensors"
                )
            piece = piece.to(device)
        if dtype is not None and callable(getattr(piece, "to", None)):
            piece = piece.to(dtype)
        return copy.deepcopy(piece) if copies else piece

    def _sliced(
        self, spec: NestedSpec, start: int, stop: int, pieces: Mapping[int, Any]
    ) -> NestedSpec:
        """The structure with entries, objects and counts of samples ``start`` to ``stop``."""
        if id(spec) in self._counts and not spec.children:
            return NestedSpec(None, value=stop - start)
        if id(spec) in pieces:
            return NestedSpec(None, value=pieces[id(spec)])
        if id(spec) in self._lists:
            entries = spec.children[start:stop]
            return NestedSpec(spec.kind, tuple(range(len(entries))), entries, spec.value)
        if not spec.children:
            return spec
        children = tuple(self._sliced(child, start, stop, pieces) for child in spec.children)
        shell = spec.value
        if id(spec) in self._counts:
            shell = cut_attributes(copy.copy(shell), start, stop, self.num_samples)
        return NestedSpec(spec.kind, spec.keys, children, shell)

    def merge_gradients(
        self, index: int, parts: Sequence[Tensor | None], ranges: Sequence[tuple[int, int]]
    ) -> Tensor | None:
        """The gradient of an input from the gradients of its shards.

        Args:
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
        lists: True for lists that had an entry for each sample of the first batch, by input and
            number.
        is_logged: True once the division of inputs was logged.
        divided: Classes of objects that are known to divide themselves.
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
        self.lists: dict[tuple[str, int], bool] = {}
        self.divided: set[type] = set()
        self.is_logged = False
        self._names: tuple[str, ...] | None = None

    def name_of(self, position: int, model: nn.Module | None) -> str:
        """Name of a positional input."""
        if self._names is None:
            self._names = () if model is None else _parameter_names(model)
        return self._names[position] if position < len(self._names) else f"input {position}"

    def log(self, split_names: Sequence[str], names: Sequence[str]) -> None:
        """Log once which inputs are split."""
        self.is_logged = True
        whole = [name for name in names if name not in split_names]
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
    """Lists that may have an entry for each sample, with the index of the first tensor in each.

    Their entries are all tensors, or none is; those of a tuple are tensors, dicts or strings.
    """
    if spec.kind is None or spec.kind is Tensor:
        return []
    if issubclass(spec.kind, list):
        kinds = {child.kind for child in spec.children}
        if Tensor not in kinds or kinds == {Tensor}:
            return [(spec, first)]
    if spec.kind is tuple and spec.children:
        kinds = {child.kind for child in spec.children}
        if kinds == {Tensor} or all(map(_is_entry, spec.children)):
            return [(spec, first)]
    found = []
    for child in spec.children:
        found += _entry_lists(child, first)
        first += _num_tensors(child)
    return found


def _is_entry(spec: NestedSpec) -> bool:
    if spec.kind is None:
        return isinstance(spec.value, (str, bytes))
    return issubclass(spec.kind, Mapping)


def _walk(spec: NestedSpec) -> Iterator[NestedSpec]:
    yield spec
    for child in spec.children:
        yield from _walk(child)


class EntryList:
    """A list in the inputs that may have an entry for each sample.

    Args:
        key: Name of its input, and its number among the lists there.
        first: Index of the first tensor inside.
    """

    def __init__(self, key: tuple[str, int], spec: NestedSpec, first: int) -> None:
        self.key = key
        self.name = key[0]
        self.spec = spec
        self.first = first
        self.indices = range(first, first + _num_tensors(spec))
        self.holds_tensors = any(child.kind is Tensor for child in spec.children)
        self.is_tuple = self.holds_tensors and spec.kind is tuple  # often of inputs, or of states

    def __len__(self) -> int:
        return len(self.spec.children)

    def columns(self) -> Iterator[Sequence[int]]:
        """Indices of tensors at the same place of every entry."""
        width, rest = divmod(len(self.indices), len(self) or 1)
        if width and not rest:
            yield from (self.indices[place::width] for place in range(width))


class HeldObject(NamedTuple):
    """An object in the inputs that holds tensors.

    Attributes:
        parts: Tensors and objects with ``.to()`` among its items or attributes.
    """

    name: str
    spec: NestedSpec
    parts: Sequence[Any]

    @property
    def tensors(self) -> list[Tensor]:
        return [part for part in self.parts if isinstance(part, Tensor)]

    def has_rows(self, num_samples: int) -> bool:
        """True if it holds a tensor with as many rows."""
        return any(tensor.dim() and len(tensor) == num_samples for tensor in self.tensors)


class ShardInput(NamedTuple):
    """One replica's shard of the inputs.

    Attributes:
        args: Positional inputs.
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
    """Copy tensors and objects with ``.to()``, but no modules, to a device; see ``map_batch``."""

    def copied(part: Any) -> Any:
        if isinstance(part, nn.Module):
            return part
        return to_device(part, device) if isinstance(part, Tensor) else part.to(device)

    return map_batch(value, copied)


def to_replica(value: Any, device: torch.device) -> Any:
    """A value whose tensors are on a device; itself if they are there already.

    Args:
        value: Any value; tensors may be in nested lists, tuples and dicts.

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
