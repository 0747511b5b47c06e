"""Copies of the user's model for the ranks, which follow every change of the model."""

from __future__ import annotations

import copy
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from runtime.core.errors import ReplicaMismatch
from runtime.core.shared_objects import IN_OWN_LOOPS, shared_by
from runtime.device.cuda import devices_differ
from runtime.replica.build import Template, copy_template
from runtime.replica.flat import checksum
from runtime.replica.rank_statistics import first_difference, statistics_of, warn_of_frequencies

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
_OPAQUE = (*_PLAIN, type, ModuleType, BuiltinFunctionType)
_NOT_INSPECTED = {*sys.stdlib_module_names, "torch", "numpy"} - {"types", "argparse"}
"""Packages whose objects are copied, but not inspected for changes in place."""
SMALL_BUFFER_BYTES = 1 << 16
"""Buffers of up to this size together are copied at each forward, changed or not."""
SMALL_MODEL_BYTES = 1 << 28
"""Parameters of a model that is copied to be tried on its first batch, whatever the inputs."""
COMPARED_CALLS = 2
"""First calls in which the objects that ranks share are compared."""
_ALIGNMENT_BYTES = 64
UNCOPYABLE = (
    "the model cannot be copied for the other devices ({reason}); pass a factory "
    "f(device) -> nn.Module that makes one for each device, or train on one device"
)
UNFOLLOWED = (
    "the model was changed between two steps (a module, hook, buffer or other object was added or "
    "replaced), and the models of the other devices, made by the factory because this model "
    "cannot be copied, do not follow: make the change in the factory, or train on one device"
)
CHANGED_IN_FORWARD = (
    "forward changes parameter {name!r} in place, and does so on each of {num} replicas, which "
    "share its memory: change it between two steps, under torch.no_grad(), or assign a new "
    "tensor to its .data in forward"
)
RANK_STATISTICS = (
    "buffer %r of the model is computed from the samples of each device, and those of the first "
    "device are kept, while one device computes it from the whole batch: compute it in the loop, "
    "from what the model returns for the whole batch"
)
REPLACED = (
    "parameter {name!r} of the model was replaced by a computed tensor, as by "
    "torch.func.functional_call, which the other devices do not have: apply such functions to "
    "model.module, which runs on the first device only"
)
logger = logging.getLogger(__name__)
ModelMaker = Callable[[torch.device], nn.Module]


class ModelMirror:
    """The user's model, run by rank 0, and a copy of it for each other rank.

    The model alone is trained. The ranks compute with *leaves*, one per parameter: tensors that
    share the parameter's memory if all ranks are on one device, else copies of it on the rank's
    device. So gradients of a rank never reach the parameters directly, and hooks of parameters
    run once, on the sum.

    :meth:`follow` updates the copies: modules, hooks, attributes, modes, frozen
    parameters, weights and buffers. A number, string or flag that has changed is set on the
    copies; any other change replaces the copies, which hold no state. Not seen are tensors that
    are neither parameters nor buffers and change in place, and objects implemented in C. Large
    buffers, and parameters on other devices between two steps, are compared by version counters,
    which do not count writes through ``.data``.

    Not thread-safe; used while no task runs, except for :meth:`computing`.

    Args:
        model: On ``devices[0]``.
        devices: One per rank.
        make: Makes a model on a device; used if the model cannot be copied.

    Attributes:
        models: Each rank's model; rank 0's is the user's.
        leaves: Each rank's leaves, in order of ``params``.
        shares_memory: True if the leaves share the parameters' memory.

    Raises:
        ValueError: The model cannot be copied, and there is no factory.
    """

    def __init__(
        self, model: nn.Module, devices: Sequence[torch.device], make: ModelMaker | None = None
    ) -> None:
        self._model = model
        self._devices = devices
        self.shares_memory = can_share_memory(devices)
        self._memory: SharedMemory | CopiedMemory = (
            SharedMemory() if self.shares_memory else CopiedMemory(devices)
        )
        self._make = make
        self._structure = Structure(model)
        self._made: list[nn.Module | None] = []
        self.params: list[Tensor] = []
        self.leaves: list[list[Tensor]] = [[] for _ in devices]
        self.models: list[nn.Module] = []
        self._sums_values = True
        self._num_passes = 0  # of forward in training
        self._has_warned = False
        self._num_compared = 0 if len(devices) > 1 else COMPARED_CALLS
        self._build()
        if len(devices) > 1:
            warn_of_frequencies(model)

    def follow(self) -> None:
        """Bring all copies up to date with the model.

        Raises:
            RuntimeError: The model cannot be copied, and has changed in a way that needs a copy.
        """
        # A KeyboardInterrupt may have stopped an earlier call at any line.
        if self._is_built and (self._structure.is_current() or self._set_plain_changes()):
            flags = [p.requires_grad for p in self.params]
            if self._memory.is_in_place(self.params):
                if flags != self._flags:
                    self._set_flags(flags)
                self._memory.refresh()
                self._buffers.refresh()
                self._record_values()
                return
        self._build()
        self._record_values()

    @contextmanager
    def comparing(self, function: Any) -> Iterator[None]:
        """In the first calls, warn of writes of the function to what all ranks share."""
        if self._num_compared == COMPARED_CALLS:
            yield
            return
        self._num_compared += 1
        shared = shared_by(self.models, function, IN_OWN_LOOPS)
        yield
        if shared.compare():
            self._num_compared = COMPARED_CALLS

    def adopt_forward(self, ranks: Sequence[int]) -> None:
        """Like :meth:`adopt`, after a forward pass; also takes over its assignments to ``.data`` of
        parameters, which each rank computed alike.

        Raises:
            RuntimeError: The ranks have changed a parameter in memory that they share.
        """
        if self._before and self._before != self._values():
            names = {id(p): name for name, p in self._model.named_parameters()}
            pairs = zip(self.params, self._before, self._values(), strict=True)
            name = next(names.get(id(p)) for p, old, new in pairs if old != new)
            raise RuntimeError(CHANGED_IN_FORWARD.format(name=name, num=len(self._devices)))
        for index, (p, leaf) in enumerate(zip(self.params, self.leaves[0], strict=True)):
            if leaf.data_ptr() != p.data_ptr() and leaf.shape == p.shape:
                p.data.copy_(leaf.data)
                for rank, leaves in enumerate(self.leaves):
                    leaves[index].data = self._memory.data(rank, index)
                self.mark_stepped()
        self._sums_values = False
        if not self._has_warned:
            self._compare_statistics(ranks)
        self.adopt()

    def _compare_statistics(self, ranks: Sequence[int]) -> None:
        """Warn once if ranks compute a buffer from their samples: those of other ranks than 0 are
        dropped. Compares at passes 1, 2, 4, 8, and so on, as a model may begin to do so late.
        """
        if not (torch.is_grad_enabled() and self._model.training and len(ranks) > 1):
            return
        self._num_passes += 1
        if self._num_passes & (self._num_passes - 1):
            return
        own = statistics_of(self._model)
        for rank in ranks:
            if rank == 0 or devices_differ([self._devices[0], self._devices[rank]]):
                continue
            device = self._devices[0]
            others = {n: b.to(device) for n, b in statistics_of(self.models[rank]).items()}
            name = first_difference(own, others)
            if name is not None:
                self._has_warned = True
                logger.warning(RANK_STATISTICS, name)
                return

    def _values(self) -> list[int]:
        """Versions of the parameters; before and after the first pass checksums, which writes
        through ``.data`` change, too.
        """
        return [int(checksum(p)) if self._sums_values else version_of(p) for p in self.params]

    def _record_values(self) -> None:
        shares = self.shares_memory and len(self._devices) > 1
        self._before = self._values() if shares else []

    def adopt(self) -> None:
        """Record changes that rank 0's own pass made; the other ranks' copies made them too."""
        if not self._structure.is_current() and not self._structure.adopt():
            self._structure = Structure(self._model)
            self._slots = SlotSwap(self._structure, self.params, self.leaves[0])

    def names(self) -> list[str]:
        """Name of each of the model's parameters, in order of ``params``."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        return [names.get(id(p), "a tensor of the model") for p in self.params]

    def mark_stepped(self) -> None:
        """Record that all parameters may have changed."""
        self._memory.is_current = False

    @contextmanager
    def computing(self, rank: int) -> Iterator[nn.Module]:
        """A rank's model, with the rank's leaves in place of parameters. In the rank's thread."""
        if self.models[rank] is not self._model:
            yield self.models[rank]
        elif self._made and self._made[0] is not None:
            yield self._made[0]
        else:
            self._slots.put_leaves()
            try:
                yield self._model
            finally:
                self._slots.put_params()

    @property
    def uses_batch_statistics(self) -> bool:
        """True if a module computes statistics of its batch."""
        return any(m.training or m.running_mean is None for m in self._batch_norms)

    def new_copy(self) -> nn.Module | None:
        """A copy on rank 0's device with buffers of its own; ``None`` if it cannot be copied.

        The parameters of a small model are copied, too, as its forward may write to them.
        """
        if self._made:
            return None
        device, homes, leaves = self._devices[0], self._memory.homes(0), self.leaves[0]
        if self.is_small:
            copies, _ = copy_tensors(self.params, device, {})
            homes, leaves = {}, list(map(_new_leaf, self.params, copies))
        return self._copied(device, homes, leaves)[0]

    @property
    def is_small(self) -> bool:
        """True if one more copy of the parameters takes little memory."""
        return sum(p.numel() * p.element_size() for p in self.params) <= SMALL_MODEL_BYTES

    def _build(self) -> None:
        """Build the copies."""
        self._is_built = False
        model = self._model
        for name, p in model.named_parameters():
            if not p.is_leaf:
                raise RuntimeError(REPLACED.format(name=name))
        self._structure = Structure(model)
        params: list[Tensor] = list(model.parameters())
        known = set(map(id, params))
        previous = self.params
        self.params = [*params, *(p for p in self._structure.params if id(p) not in known)]
        self._memory.place(self.params)
        self.leaves = [
            self._leaves(rank, dict(zip(map(id, previous), leaves, strict=True)))
            for rank, leaves in enumerate(self.leaves)
        ]
        self._flags = [p.requires_grad for p in self.params]
        self._batch_norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        self._slots = SlotSwap(self._structure, self.params, self.leaves[0])
        if self._made:
            raise RuntimeError(UNFOLLOWED)
        copies: list[nn.Module] = []
        self._twins: list[dict[int, tuple[Any, Any]]] = []
        try:
            for rank, device in enumerate(self._devices[1:], 1):
                copied, memo = self._copied(device, self._memory.homes(rank), self.leaves[rank])
                copies.append(copied)
                self._add_twins(memo)
        except Exception as error:
            if self._make is None:
                raise ValueError(UNCOPYABLE.format(reason=error)) from error
            copies = self._make_all(self._make)
        self.models = [model, *copies]
        self._buffers = BufferMirror(
            [[m._buffers for m in each.modules()] for each in self.models],
            self._devices,
            [self._memory.homes(rank) for rank in range(len(self._devices))],
        )
        self._is_built = True

    def _leaves(self, rank: int, known: Mapping[int, Tensor]) -> list[Tensor]:
        """A rank's leaves; those of parameters that stay are kept, as graphs refer to them."""
        found = []
        for index, p in enumerate(self.params):
            data = self._memory.data(rank, index)
            leaf = known.get(id(p))
            if leaf is None or leaf.dtype != p.dtype:
                leaf = _new_leaf(p, data)
            elif leaf.data_ptr() != data.data_ptr() or leaf.shape != data.shape:
                leaf.data = data
            leaf.requires_grad_(p.requires_grad)
            leaf.__dict__.update(p.__dict__)
            found.append(leaf)
        return found

    def _copied(
        self, device: torch.device, homes: Homes, leaves: Sequence[Tensor]
    ) -> tuple[nn.Module, dict[int, Any]]:
        """A copy of the model with these leaves as its parameters, and its parts by id."""
        structure, model = self._structure, self._model
        scripted = [m for m in model.modules() if isinstance(m, torch.jit.ScriptModule)]
        if scripted:
            raise TypeError(f"it contains a {type(scripted[0]).__name__}, made by torch.jit")
        tensors = [t for t in structure.tensors if not isinstance(t, nn.Parameter)]
        memo: dict[int, Any] = {id(p): leaf for p, leaf in zip(self.params, leaves, strict=True)}
        memo.update(zip(map(id, tensors), copy_tensors(tensors, device, homes)[0], strict=True))
        functions = [f for f in structure.functions if structure.is_closed_over(f)]
        for function in functions:
            memo[id(function)] = _with_new_cells(function)
        copied = copy.deepcopy(model, memo)
        for function in functions:
            cells = zip(memo[id(function)].__closure__, function.__closure__ or (), strict=True)
            for cell, old in cells:
                with suppress(ValueError):  # a variable without a value
                    cell.cell_contents = memo.get(id(old.cell_contents), old.cell_contents)
        expected = [memo[id(p)] for p in model.parameters()]
        found = list(copied.parameters())
        if len(found) != len(expected) or not all(map(is_, found, expected)):
            raise TypeError(f"a copy of {type(model).__name__} has other parameters")
        return copied, memo

    def _make_all(self, make: ModelMaker) -> list[nn.Module]:
        """Models from the factory, with leaves in place of their parameters' memory."""
        swaps = not any(isinstance(m, torch.jit.ScriptModule) for m in self._model.modules())
        template = Template.of(self._model)
        self._twins = []
        for rank, device in enumerate(self._devices):
            if rank == 0 and swaps:
                self._made.append(None)
                continue
            made = make(device)
            copy_template(made, template, rank)
            if len(list(made.modules())) != len(list(self._model.modules())):
                raise ReplicaMismatch(
                    f"model_factory gave rank {rank} a different number of modules than rank 0; "
                    "it must build the same architecture each time"
                )
            for mine, theirs in zip(self._model.modules(), made.modules(), strict=True):
                theirs.training = mine.training
            own = dict(made.named_parameters())
            names = dict(self._model.named_parameters())
            self.leaves[rank] = [own[name] for name in names]
            for index, leaf in enumerate(self.leaves[rank]):
                leaf.data = self._memory.data(rank, index)
                leaf.requires_grad_(self.params[index].requires_grad)
            if rank == 0:
                for name, buffer in self._model.named_buffers():
                    dict(made.named_buffers())[name].data = buffer.data
            modules = zip(self._model.modules(), made.modules(), strict=True)
            self._add_twins({id(mine): theirs for mine, theirs in modules})
            self._made.append(made)
        return [made for made in self._made[1:] if made is not None]

    def _set_plain_changes(self) -> bool:
        """Set changed numbers, strings and flags on the copies; returns False if more changed."""
        changes = self._structure.plain_changes()
        if changes is None:
            return False
        owners = self._structure.owners
        for twins in self._twins:
            for index, key, value in changes:
                owner = owners[index]
                if id(owner) not in twins:
                    return False
                twin = twins[id(owner)][1]
                (twin if isinstance(owner, dict) else vars(twin))[key] = value
        self._structure.record()
        return True

    def _add_twins(self, memo: Mapping[int, Any]) -> None:
        """Record the parts of a copy that take plain changes; keeps the originals' ids valid."""
        self._twins.append(
            {id(o): (o, memo[id(o)]) for o in self._structure.owners if id(o) in memo}
        )

    def _set_flags(self, flags: list[bool]) -> None:
        for leaves in self.leaves:
            for leaf, flag in zip(leaves, flags, strict=True):
                leaf.requires_grad_(flag)
        self._flags = flags


def can_share_memory(devices: Sequence[torch.device]) -> bool:
    """True if the ranks can use the model's own memory."""
    return len(set(devices)) == 1


def _new_leaf(p: Tensor, data: Tensor) -> Tensor:
    if type(p) is Tensor:
        return data.detach()
    return torch.Tensor._make_subclass(type(p), data, p.requires_grad)


def _with_new_cells(function: FunctionType) -> FunctionType:
    cells = tuple(CellType() for _ in function.__closure__ or ())
    twin = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(function.__dict__)
    return twin


class Structure:
    """A snapshot of all that a model's modules refer to, in order to detect changes.

    Compares the identity of every value in the modules' dictionaries (attributes, parameters,
    buffers, submodules and hooks), and in the lists, dictionaries, sets and plain objects among
    the attributes.

    Attributes:
        params: Parameters, and other leaves that require a gradient.
        tensors: All other tensors.
        owners: The module, object or dictionary that each of them belongs to.
    """

    def __init__(self, model: nn.Module) -> None:
        self.dicts: list[dict[Any, Any]] = []
        self.lists: list[Any] = []
        self.params: list[Tensor] = []
        self.tensors: list[Tensor] = []
        self.functions: list[FunctionType] = []
        self.owners: list[Any] = []
        self._seen: dict[int, Any] = {}
        pending: list[Any] = [model]
        while pending:
            value = pending.pop()
            if isinstance(value, _OPAQUE) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            pending.extend(self._inspect(value))
        self.record()

    def _inspect(self, value: Any) -> Any:
        """Record a value; returns those that it refers to."""
        if isinstance(value, Tensor):
            is_param = isinstance(value, nn.Parameter)
            if is_param or (value.is_leaf and value.requires_grad):
                self.params.append(value)
                self._add(value.__dict__, value)
            else:
                self.tensors.append(value)
            return ()
        if isinstance(value, torch.jit.ScriptModule):
            return ()
        if isinstance(value, nn.Module):
            return self._add(value.__dict__, value)
        if isinstance(value, dict):
            return self._add(value, value)
        if isinstance(value, (list, set, deque)):
            self.lists.append(value)
            return list(value)
        if isinstance(value, (tuple, frozenset)):
            return list(value)
        if isinstance(value, FunctionType):
            self.functions.append(value)
            return ()
        if isinstance(value, MethodType):
            return (value.__self__,)
        if isinstance(value, partial):
            return (value.func, *value.args, value.keywords)
        if type(value).__module__.partition(".")[0] not in _NOT_INSPECTED:
            attributes = getattr(value, "__dict__", None)
            if type(attributes) is dict:
                return self._add(attributes, value)
        return ()

    def _add(self, attributes: dict[Any, Any], owner: Any) -> Any:
        self.dicts.append(attributes)
        self.owners.append(owner)
        return list(attributes.values())

    def record(self) -> None:
        """Take the current state as unchanged."""
        self._empty = [each for each in self.dicts if not each]  # most: hooks of each kind
        self._filled = [each for each in self.dicts if each]
        self._values = self._read()
        self._lengths = list(map(len, (*self.dicts, *self.lists)))

    def is_current(self) -> bool:
        """True if nothing has changed since :meth:`record`."""
        if any(self._empty):
            return False
        now = self._read()
        return len(now) == len(self._values) and all(map(is_, now, self._values))

    def adopt(self) -> bool:
        """Record a change that replaced tensors and plain values only; else return False."""
        if list(map(len, (*self.dicts, *self.lists))) != self._lengths:
            return False
        now = self._read()
        leaf = (Tensor, *_PLAIN)
        if not all(
            new is old or (isinstance(new, leaf) and isinstance(old, leaf))
            for new, old in zip(now, self._values, strict=True)
        ):
            return False
        self._values = now
        return True

    def plain_changes(self) -> list[tuple[int, Any, Any]] | None:
        """Index of the dictionary, key and value of each change; ``None`` if others changed too."""
        if list(map(len, (*self.dicts, *self.lists))) != self._lengths:
            return None
        found = []
        position = 0
        for index, attributes in enumerate(self.dicts):
            for key, value in attributes.items():
                old = self._values[position]
                position += 1
                if value is old:
                    continue
                if not isinstance(value, _PLAIN) or not isinstance(old, _PLAIN):
                    return None
                found.append((index, key, value))
        rest = chain.from_iterable(self.lists)
        return found if all(map(is_, rest, self._values[position:])) else None

    def is_closed_over(self, function: FunctionType) -> bool:
        """True if a function's closure refers to a part of the model."""
        return any(_content(cell) in self._seen for cell in function.__closure__ or ())

    def _read(self) -> tuple[Any, ...]:
        values = chain.from_iterable(map(dict.values, self._filled))
        return tuple(chain(values, chain.from_iterable(self.lists)))


def _content(cell: CellType) -> int:
    try:
        return id(cell.cell_contents)
    except ValueError:  # empty
        return 0


class SlotSwap:
    """Replaces parameters by leaves wherever a model refers to them, and back.

    Args:
        leaves: The leaf of each.
    """

    def __init__(
        self, structure: Structure, params: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> None:
        leaf_of = dict(zip(map(id, params), leaves, strict=True))
        self._dicts = []
        for slots in structure.dicts:
            own = {key: value for key, value in slots.items() if id(value) in leaf_of}
            if own:
                self._dicts.append((slots, {k: leaf_of[id(p)] for k, p in own.items()}, own))
        self._items = [
            (items, index, leaf_of[id(p)], p)
            for items in structure.lists
            if isinstance(items, list)
            for index, p in enumerate(items)
            if id(p) in leaf_of
        ]
        self._cells = [
            (cell, leaf_of[_content(cell)], cell.cell_contents)
            for function in structure.functions
            for cell in function.__closure__ or ()
            if _content(cell) in leaf_of
        ]

    def put_leaves(self) -> None:
        """Put the leaves in place."""
        for slots, leaves, _ in self._dicts:
            slots.update(leaves)
        for items, index, leaf, _ in self._items:
            items[index] = leaf
        for cell, leaf, _ in self._cells:
            cell.cell_contents = leaf

    def put_params(self) -> None:
        """Put the parameters back, except where the model's own pass set something else."""
        for slots, leaves, params in self._dicts:
            for key, leaf in leaves.items():
                if slots.get(key) is leaf:
                    slots[key] = params[key]
        for items, index, leaf, param in self._items:
            if index < len(items) and items[index] is leaf:
                items[index] = param
        for cell, leaf, param in self._cells:
            if cell.cell_contents is leaf:
                cell.cell_contents = param


Homes = dict[int, tuple[torch.UntypedStorage, int]]
"""Memory on another device, or the same, by the address of the storage that it replaces: a
storage, and the offset in bytes."""


class SharedMemory:
    """Leaves that share the memory of the parameters; all ranks are on one device."""

    is_current = True

    def place(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._places = _places(params)

    def is_in_place(self, params: Sequence[Tensor]) -> bool:
        """True if no parameter was moved or changed its shape since :meth:`place`."""
        return _places(params) == self._places

    def data(self, rank: int, index: int) -> Tensor:
        return self._params[index].detach()  # detach() shares the version counter

    def homes(self, rank: int) -> Homes:
        """Memory of all parameters on the rank's device."""
        storages = [p.untyped_storage() for p in self._params if _has_storage(p)]
        return {storage.data_ptr(): (storage, 0) for storage in storages}

    def refresh(self) -> None:
        """No effect: the memory is that of the parameters."""


class CopiedMemory:
    """Leaves on other devices, in one flat tensor per rank.

    Args:
        devices: One per rank.

    Attributes:
        is_current: True if no step was made since :meth:`refresh`.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._versions: list[int] = []
        self.is_current = False

    def place(self, params: Sequence[Tensor]) -> None:
        """Allocate memory for these parameters, and copy them."""
        self._params = params
        self._places = _places(params)
        self._sources: list[Tensor] = []
        offsets: dict[int, int] = {}
        size = 0
        for p in params:
            pointer = p.untyped_storage().data_ptr()
            if pointer not in offsets:
                source = bytes_of(p)
                self._sources.append(source)
                offsets[pointer] = size
                size += -(-source.numel() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._offsets = offsets
        self._flats = [torch.zeros(size, dtype=torch.uint8, device=d) for d in self._devices]
        ends = [start + s.numel() for start, s in zip(offsets.values(), self._sources, strict=True)]
        starts = zip(offsets.values(), ends, strict=True)
        self._pieces = [self._flats[0][start:end] for start, end in starts]
        self.is_current = False
        self.refresh()

    def is_in_place(self, params: Sequence[Tensor]) -> bool:
        """True if no parameter was moved or changed its shape since :meth:`place`."""
        return _places(params) == self._places

    def data(self, rank: int, index: int) -> Tensor:
        p = self._params[index]
        if rank == 0:
            return p.detach()
        return _viewed(p, self._devices[rank], self.homes(rank))

    def homes(self, rank: int) -> Homes:
        """Memory of all parameters on the rank's device."""
        if rank == 0:
            return {p.untyped_storage().data_ptr(): (p.untyped_storage(), 0) for p in self._params}
        storage = self._flats[rank].untyped_storage()
        return {pointer: (storage, start) for pointer, start in self._offsets.items()}

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the parameters to the other devices if they may have changed."""
        versions = list(map(version_of, self._params))
        if self.is_current and versions == self._versions:
            return
        self.is_current = False
        self._versions = versions
        torch._foreach_copy_(self._pieces, self._sources)
        for flat in self._flats[1:]:
            flat.copy_(self._flats[0], non_blocking=flat.device.type == "cuda")
        self.is_current = True


class BufferMirror:
    """Buffers of the copies, refreshed from the model's.

    Args:
        slots: For each model the dictionaries of its modules' buffers; the first is the source.
        devices: One per model.
        homes: For each model, memory of its parameters, which buffers may share.
    """

    def __init__(
        self,
        slots: Sequence[Sequence[dict[str, Tensor | None]]],
        devices: Sequence[torch.device],
        homes: Sequence[Homes],
    ) -> None:
        self._slots = slots
        self._devices = devices
        self._homes = homes
        self._versions: list[int] = []
        self._copy_all()

    def refresh(self) -> None:
        """Copy the model's buffers to all copies, if they may differ."""
        if not self._tensors[0]:
            if any(map(len, self._slots[0])):
                self._copy_all()
            return
        if any(tensor.numel() for tensor in self._unsized):
            self._copy_all()
            return
        for slots, tensors in zip(self._slots, self._tensors, strict=True):
            now = list(chain.from_iterable(map(dict.values, slots)))
            if len(now) != len(tensors) or not all(map(is_, now, tensors)):
                self._copy_all()
                return
        if self._small:
            _copy_(self._small)
        if self._large:
            versions = self._large_versions()
            if versions != self._versions:
                _copy_([pair for _, pair in self._large])
                self._versions = versions

    def _copy_all(self) -> None:
        source = self._slots[0]
        named = [
            (index, key, buffer)
            for index, slots in enumerate(source)
            for key, buffer in slots.items()
            if buffer is not None
        ]
        buffers = [buffer for _, _, buffer in named]
        self._small: list[tuple[Tensor, Tensor]] = []
        self._large: list[tuple[Tensor, tuple[Tensor, Tensor]]] = []
        num_bytes = 0
        for slots, device, homes in zip(
            self._slots[1:], self._devices[1:], self._homes[1:], strict=True
        ):
            copies, pairs = copy_tensors(buffers, device, homes)
            for (index, key, _), twin in zip(named, copies, strict=True):
                slots[index][key] = twin
            for target, origin, owner in pairs:
                num_bytes += origin.nbytes
                if num_bytes <= SMALL_BUFFER_BYTES:
                    self._small.append((target, origin))
                else:
                    self._large.append((buffers[owner], (target, origin)))
                    self._large.append((copies[owner], (target, origin)))
        self._tensors = [
            list(chain.from_iterable(map(dict.values, slots))) for slots in self._slots
        ]
        # Sized in place by the first forward pass, with others whose shape changes.
        self._unsized = [
            each for each in chain(*self._tensors) if each is not None and not each.numel()
        ]
        self._versions = self._large_versions()

    def _large_versions(self) -> list[int]:
        return [version_of(tensor) for tensor, _ in self._large]


def _copy_(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    targets, sources = [target for target, _ in pairs], [source for _, source in pairs]
    with torch.no_grad(), torch.inference_mode(False):
        torch._foreach_copy_(targets, sources)


def copy_tensors(
    tensors: Sequence[Tensor], device: torch.device, homes: Homes
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor, int]]]:
    """Copies on a device that share memory with each other as the originals do.

    Args:
        tensors: The originals; a tensor with a graph is copied without it.
        homes: Memory that replaces storages of parameters; not copied.

    Returns:
        The copies, and pairs of target and source by which they are copied again, each with
        the index of a tensor in it.
    """
    homes = dict(homes)
    found: list[Tensor] = []
    pairs: list[tuple[Tensor, Tensor, int]] = []
    with torch.no_grad(), torch.inference_mode(False):
        for index, tensor in enumerate(tensors):
            if not _has_storage(tensor):
                twin = tensor.detach().to(device, copy=True)
                pairs.append((twin, tensor.detach(), index))
            else:
                pointer = tensor.untyped_storage().data_ptr()
                if pointer not in homes:
                    source = bytes_of(tensor)
                    target = source.to(device, copy=True)
                    homes[pointer] = (target.untyped_storage(), 0)
                    pairs.append((target, source, index))
                twin = _viewed(tensor, device, homes)
            twin.__dict__.update(tensor.__dict__)
            found.append(twin)
    return found, pairs


def _viewed(tensor: Tensor, device: torch.device, homes: Homes) -> Tensor:
    """The view in place of ``tensor`` in the memory that replaces its storage."""
    storage, start = homes[tensor.untyped_storage().data_ptr()]
    offset = start // tensor.element_size() + tensor.storage_offset()
    view = torch.empty(0, dtype=tensor.dtype, device=device)
    return view.set_(storage, offset, tensor.size(), tensor.stride())


def bytes_of(tensor: Tensor) -> Tensor:
    """A tensor's whole storage, of shape ``(num bytes,)`` and ``uint8``; shares the memory."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _has_storage(tensor: Tensor) -> bool:
    """True for a strided tensor of no special kind, in memory of its own device."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().data_ptr() != 0
    )


def version_of(tensor: Tensor) -> int:
    """The version counter; inference tensors have none."""
    return -1 if tensor.is_inference() else tensor._version


def _places(tensors: Sequence[Tensor]) -> list[tuple[int, torch.Size]]:
    return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]
