"""A replica's state in flat tensors: parameters as views of one tensor for each dtype, and buffers.

A snapshot is then one copy, an averaging one all-reduce, a divergence one norm. Tied parameters
are one parameter and stay tied; views keep each parameter's strides, so ``channels_last`` stays.

Frozen parameters are not averaged, and most never change; but user code may write to them, such as
to a teacher that follows the weights. Modules may have extra state (``get_extra_state``).
Checkpoints contain both, see :class:`ModuleState`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from coordinator import averaging as host_memory
from coordinator.averaging import block_length, blocks, dot_square, sum_squares
from coordinator.messages import Payload
from runtime.checkpoint.content import SavedModule, ShardFacts
from runtime.checkpoint.format import plain, plain_key
from runtime.checkpoint.subclasses import restore_subclasses, without_class
from runtime.core.errors import CheckpointError
from runtime.replica.copying import named_tensors, plain_attributes

logger = logging.getLogger(__name__)

ALIGNMENT_BYTES = 64
"""Alignment of each parameter in its flat tensor, and of the chunks of large parameters in FSDP."""
_COPIED_TOGETHER = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
_AVERAGED = _COPIED_TOGETHER | {
    *(torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64),
}
"""Dtypes of buffers that ranks average or, of integers, take from one rank."""
_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 22
"""Words summed at once."""
_ROW_WORDS = 256
_MIX = (0x1E3779B97F4A7C15, 0x56E8FEB86659FD93)
"""Multipliers, odd and below 2**63, of a hash of positions."""


class FlatState:
    """The averaged state of a replica: flat parameters and buffers.

    All methods run in the worker's thread, on its current stream.
    """

    def __init__(self, module: nn.Module) -> None:
        self.params = FlatParams(module)
        self.buffers = FlatBuffers(module)

    def new_base(self) -> Payload:
        """New memory for a snapshot, on the device of the state."""
        floats, others = self.buffers.empty()
        return Payload(
            params=tuple(
                host_memory.empty_like(f) if f.is_cpu else torch.empty_like(f)
                for f in self.params.flats
            ),
            buffers=floats,
            other_buffers=others,
        )

    def new_payload(self) -> Payload:
        floats, others = self.buffers.empty()
        whole = Payload(params=tuple(self.params.flats), buffers=floats, other_buffers=others)
        return whole.map(host_memory.empty_like)

    @torch.no_grad()
    def snapshot_into(self, payload: Payload) -> None:
        """Copy the live state into a payload, which shares no memory with it."""
        self.params.check()
        for out, flat in zip(payload.params, self.params.flats, strict=True):
            out.copy_(flat)
        self.buffers.read_into(payload.buffers, payload.other_buffers)

    @torch.no_grad()
    def snapshot_with_norms(self, payload: Payload) -> tuple[float, ...]:
        """Like :meth:`snapshot_into`, on a CPU.

        Returns:
            The squared norm of each flat tensor of parameters; not finite where a value is not.
        """
        self.params.check()
        flats = zip(payload.params, self.params.flats, strict=True)
        squares = tuple([copy_with_norm(out, flat) for out, flat in flats])
        self.buffers.read_into(payload.buffers, payload.other_buffers)
        return squares

    @torch.no_grad()
    def live(self) -> Payload:
        """The live parameters, not copied, and a copy of the buffers."""
        self.params.check()
        floats, others = self.buffers.empty()
        self.buffers.read_into(floats, others)
        return Payload(params=tuple(self.params.flats), buffers=floats, other_buffers=others)

    def check_payload(self, payload: Payload) -> None:
        """Raise ``ValueError`` if the payload's layout differs from this replica's."""
        floats, others = self.buffers.empty()
        for what, ours, theirs in (
            ("parameter", self.params.flats, payload.params),
            ("buffer", floats, payload.buffers),
            ("integer buffer", others, payload.other_buffers),
        ):
            mine = [(t.numel(), t.dtype) for t in ours]
            given = [(t.numel(), t.dtype) for t in theirs]
            if mine != given:
                raise ValueError(
                    f"the averaged state does not fit this model: its {what} tensors are {given}, "
                    f"the model's are {mine}"
                )

    @torch.no_grad()
    def copy_from(self, other: FlatState) -> None:
        """Copy another replica's parameters and buffers."""
        for flat, source in zip(self.params.flats, other.params.flats, strict=True):
            flat.copy_(source)
        for buffer, source in zip(self.buffers.tensors(), other.buffers.tensors(), strict=True):
            buffer.copy_(source)

    @torch.no_grad()
    def load(self, average: Payload) -> None:
        """Replace the live state; copies from pinned memory may still be pending on return."""
        for flat, mean in zip(self.params.flats, average.params, strict=True):
            flat.copy_(mean, non_blocking=True)
        self.buffers.write_from(average.buffers, average.other_buffers)

    @torch.no_grad()
    def compute_progress(self, base: Payload, scratch: Payload) -> None:
        """Replace ``base``, an earlier snapshot, by the progress since then: ``live - base``."""
        for flat, old in zip(self.params.flats, base.params, strict=True):
            torch.sub(flat, old, out=old)
        self._keep_buffers(base, scratch)

    @torch.no_grad()
    def load_with_progress(self, average: Payload, progress: Payload, scratch: Payload) -> None:
        """Set the live state to ``average + progress``; exact where progress is zero.

        Copies from pinned memory may still be pending on return.
        """
        flats = zip(self.params.flats, average.params, progress.params, strict=True)
        for flat, mean, delta in flats:
            add(mean, delta, out=flat)
        self._load_buffers(average, progress, scratch)

    @torch.no_grad()
    def add_progress(self, average: Payload, base: Payload, scratch: Payload) -> None:
        """:meth:`compute_progress` and :meth:`load_with_progress` in one pass, on a CPU."""
        for flat, mean, old in zip(self.params.flats, average.params, base.params, strict=True):
            add_progress(flat, mean, old)
        self._keep_buffers(base, scratch)
        self._load_buffers(average, base, scratch)

    def _keep_buffers(self, base: Payload, scratch: Payload) -> None:
        if not self.buffers:
            return
        self.buffers.read_into(scratch.buffers, scratch.other_buffers)
        for live, old in _pairs(scratch, base):
            if old.dtype is torch.bool:
                old.copy_(live)
            else:
                change(live, old, out=old)

    def _load_buffers(self, average: Payload, progress: Payload, scratch: Payload) -> None:
        if not self.buffers:
            return
        for live, (mean, delta) in zip(
            (*scratch.buffers, *scratch.other_buffers), _pairs(average, progress), strict=True
        ):
            if live.dtype is torch.bool:
                live.copy_(delta)
            else:
                add(mean, delta, out=live)
        self.buffers.write_from(scratch.buffers, scratch.other_buffers)


def _pairs(a: Payload, b: Payload) -> Iterable[tuple[Tensor, Tensor]]:
    return zip((*a.buffers, *a.other_buffers), (*b.buffers, *b.other_buffers), strict=True)


class FlatParams:
    """The trainable parameters of a module, moved into flat tensors.

    Args:
        module: The module. Its trainable parameters become views; the objects stay the same.

    Raises:
        ValueError: A trainable parameter shares elements with another tensor of the module.

    Attributes:
        names: Names in ``named_parameters`` order.
        params: The parameters in that order.
        trained: The optimizer's tensor for each: itself, or this rank's shard of it.
        flats: One tensor for each dtype, of shape ``(numel,)``.
        is_whole: False if a failure has left shards in place of the parameters.
    """

    is_whole = True

    def __init__(self, module: nn.Module) -> None:
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.names = [n for n, _ in named]
        self.params = self.trained = [p for _, p in named]
        check_memory(module)
        old = [p.data for p in self.params]
        self._layout = FlatLayout(old)
        self.flats = self._layout.empty(old[0].device) if old else []
        views = self._layout.views(self.flats, old)
        for p, view, source in zip(self.params, views, old, strict=True):
            view.copy_(source)
            p.data = view
        self._pointers = [view.data_ptr() for view in views]

    def like(self) -> list[Tensor]:
        """New flat tensors of the same shapes, filled with zeros."""
        return [torch.zeros_like(flat) for flat in self.flats]

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Views of ``flats``, one for each parameter, in order."""
        return self._layout.views(flats, [p.data for p in self.params])

    def viewer(self) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """:meth:`views` as a function that keeps no parameter alive."""
        like = [
            torch.empty_strided(p.size(), p.stride(), dtype=p.dtype, device="meta")
            for p in self.params
        ]
        layout = self._layout
        return lambda flats: layout.views(flats, like)

    def strides(self) -> tuple[tuple[int, ...], ...]:
        """The strides of each parameter, which order its elements in flat tensors."""
        return tuple(tuple(p.stride()) for p in self.params)

    @torch.no_grad()
    def reordered(
        self, flats: Sequence[Tensor], strides: tuple[tuple[int, ...], ...] | None
    ) -> Sequence[Tensor]:
        """Flat tensors of the same parameters with other strides, in the order of :attr:`flats`.

        Args:
            strides: The parameters' :meth:`strides` in them; ``None``: as here.
        """
        if strides is None or strides == self.strides():
            return flats
        like = [
            torch.empty_strided(p.size(), s, dtype=p.dtype, device="meta")
            for p, s in zip(self.params, strides, strict=True)
        ]
        own = [torch.zeros_like(flat) for flat in flats]
        for target, source in zip(self.views(own), self._layout.views(flats, like), strict=True):
            target.copy_(source)
        return own

    def shard_facts(self) -> ShardFacts | None:
        """Description of the optimizer's shards in a checkpoint; ``None``: it has the whole."""
        return None

    def own_part(self, optimizer_state: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of the optimizer's state of a checkpoint."""
        return optimizer_state

    def adopt_groups(self) -> None:
        """Replace parameters in groups that were added to the optimizer by this rank's shards."""

    def close(self) -> None:
        """Close the groups of ranks that shards need."""

    def check(self) -> None:
        """Check that no parameter was moved out of its flat tensor.

        Raises:
            RuntimeError: A parameter's memory was replaced, as by ``model.to(...)``.
        """
        for name, p, pointer in zip(self.names, self.params, self._pointers, strict=True):
            if p.data_ptr() != pointer:
                raise RuntimeError(
                    f"parameter {name!r} was moved to other memory during training: assign to it "
                    "in place (p.copy_(...)), and call .to(device) in the model factory only"
                )


def check_memory(module: nn.Module) -> None:
    """Check that moving a trainable parameter separates it from no other tensor.

    Parts of one storage that share no element may be moved apart.

    Raises:
        ValueError: A trainable parameter shares elements with another tensor of the module.
    """
    sharing: dict[int, list[tuple[str, Tensor]]] = {}
    seen: set[int] = set()
    for name, t in (*named_tensors(module), *plain_attributes(module)):
        if id(t) not in seen and t.layout is torch.strided and t.numel():
            seen.add(id(t))
            try:
                pointer = t.untyped_storage().data_ptr()
            except (NotImplementedError, RuntimeError):  # a wrapper of other tensors
                continue
            sharing.setdefault(pointer, []).append((name, t))
    for pointer, found in sharing.items():
        if pointer == 0 or len(found) == 1:
            continue
        for i, (name, t) in enumerate(found):
            for other, each in found[:i]:
                if (t.requires_grad or each.requires_grad) and _overlap(t, each):
                    raise ValueError(
                        f"{other!r} and {name!r} share memory, which training would separate: keep "
                        "one of them and compute the other in forward(), for instance as a property"
                    )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """True if two tensors of one storage have an element in common."""
    spans = [_byte_span(t) for t in (a, b)]
    begin, end = max(s[0] for s in spans), min(s[1] for s in spans)
    if begin >= end:
        return False
    if a.element_size() != b.element_size():
        return True
    size = max(s[1] for s in spans) // a.element_size()
    used = torch.zeros(size, dtype=torch.bool)
    used.as_strided(a.size(), a.stride(), a.storage_offset()).fill_(True)
    return bool(used.as_strided(b.size(), b.stride(), b.storage_offset()).any())


def _byte_span(t: Tensor) -> tuple[int, int]:
    """First byte, and the one after the last, of a tensor in its storage."""
    length = 1 + sum((n - 1) * s for n, s in zip(t.size(), t.stride(), strict=True))
    begin = int(t.storage_offset()) * t.element_size()
    return begin, begin + int(length) * t.element_size()


class NamedParams(Protocol):
    """Parameters with their names.

    Attributes:
        names: The name of each.
    """

    params: list[nn.Parameter]
    names: list[str]


@dataclass(slots=True)
class ParamSubset:
    """See :class:`NamedParams`."""

    params: list[nn.Parameter]
    names: list[str]


class FlatBuffers:
    """The buffers of a module, written in place.

    A module may replace a buffer's tensor, so buffers are looked up in each call. Of an expanded
    buffer, elements of the same memory are counted once. Buffers of a dtype or layout that cannot
    be averaged, such as float8, are constants, which no method but :meth:`constants` returns.
    """

    def __init__(self, module: nn.Module) -> None:
        owners: list[tuple[nn.Module, str, str]] = []
        self._constants: list[tuple[nn.Module, str, str]] = []
        seen: set[int] = set()
        for prefix, sub in module.named_modules():
            for key, buffer in sub._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    averaged = buffer.dtype in _AVERAGED
                    averaged = averaged and buffer.layout is torch.strided
                    (owners if averaged else self._constants).append(
                        (sub, key, f"{prefix}.{key}" if prefix else key)
                    )
        self.names = [name for _, _, name in owners]
        self._owners = [(sub, key) for sub, key, _ in owners]
        whole = [sub._buffers[key] for sub, key in self._owners]
        self._expanded = {
            i: b.size() for i, b in enumerate(whole) if b is not None and is_expanded(b)
        }
        self._shapes = [b.size() for b in self.tensors()]
        floats = [b.is_floating_point() or b.is_complex() for b in self.tensors()]
        self._float_groups = self._pick(floats)
        self._other_groups = self._pick([not f for f in floats])

    def _pick(self, mask: Sequence[bool]) -> list[list[int]]:
        chosen = [i for i, m in enumerate(mask) if m]
        tensors = self.tensors()
        return [[chosen[j] for j in g] for g in by_dtype(tensors[i] for i in chosen)]

    def tensors(self) -> list[Tensor]:
        """The current buffers, in order."""
        found = [sub._buffers.get(key) for sub, key in self._owners]
        tensors = [b if b is not None else torch.empty(0) for b in found]
        for i in self._expanded:
            tensors[i] = collapsed(tensors[i])
        return tensors

    def constants(self) -> list[tuple[str, Tensor]]:
        """Name and tensor of each buffer that is not averaged."""
        found = [(name, sub._buffers.get(key)) for sub, key, name in self._constants]
        return [(name, b) for name, b in found if b is not None]

    def __bool__(self) -> bool:
        return bool(self._owners)

    def empty(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """New tensors on the buffers' device for :meth:`read_into`."""
        return self._alloc(self._float_groups), self._alloc(self._other_groups)

    def _alloc(self, groups: list[list[int]]) -> tuple[Tensor, ...]:
        tensors = self.tensors()
        return tuple(tensors[g[0]].new_empty(sum(tensors[i].numel() for i in g)) for g in groups)

    def viewer(self) -> Callable[[Payload], dict[int, Tensor]]:
        """A function from a payload to views of its buffers, by index; keeps no buffer alive."""
        groups, shapes = [*self._float_groups, *self._other_groups], self._shapes
        expanded = self._expanded

        def views(payload: Payload) -> dict[int, Tensor]:
            found: dict[int, Tensor] = {}
            for group, flat in zip(groups, (*payload.buffers, *payload.other_buffers), strict=True):
                found.update(zip(group, views_of(flat, [shapes[i] for i in group]), strict=True))
            return found | {i: found[i].expand(size) for i, size in expanded.items()}

        return views

    @torch.no_grad()
    def read_into(self, floats: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Copy all buffers into flat tensors."""
        for parts, buffers in self._pieces(floats, others):
            _copy_each(parts, buffers)

    @torch.no_grad()
    def write_from(self, floats: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Copy flat tensors into the buffers."""
        for parts, buffers in self._pieces(floats, others):
            _copy_each(buffers, parts, non_blocking=True)

    def _pieces(
        self, floats: Sequence[Tensor], others: Sequence[Tensor]
    ) -> list[tuple[list[Tensor], list[Tensor]]]:
        """For each flat tensor, its views in the shapes of the buffers, and the buffers."""
        tensors = self.tensors()
        self.check_shapes(tensors)
        pieces = []
        groups = [*self._float_groups, *self._other_groups]
        for group, flat in zip(groups, (*floats, *others), strict=True):
            views = views_of(flat, [self._shapes[i] for i in group])
            pieces.append((views, [tensors[i] for i in group]))
        return pieces

    def check_shapes(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Raise ``RuntimeError`` if a buffer's shape has changed."""
        tensors = self.tensors() if tensors is None else tensors
        if [t.size() for t in tensors] == self._shapes:
            return
        for name, shape, buffer in zip(self.names, self._shapes, tensors, strict=True):
            if buffer.size() != shape:
                raise RuntimeError(
                    f"buffer {name!r} changed its shape from {tuple(shape)} to "
                    f"{tuple(buffer.size())}, and buffers are averaged in a fixed layout: give it "
                    "a fixed shape, with a count of the elements in use, or keep it as a plain "
                    "attribute, which is local to each worker. If its layer sizes it in its first "
                    "forward pass, run one forward pass before the run, or in the factory"
                )


def is_expanded(t: Tensor) -> bool:
    """True if several elements are one in memory, as after ``expand``."""
    return any(s == 0 and n > 1 for n, s in zip(t.size(), t.stride(), strict=True))


def collapsed(t: Tensor) -> Tensor:
    """The elements of an expanded tensor, each once."""
    for dim, stride in enumerate(t.stride()):
        if stride == 0:
            t = t.narrow(dim, 0, 1)
    return t


def _copy_each(targets: list[Tensor], sources: list[Tensor], *, non_blocking: bool = False) -> None:
    """Copy in one call if all tensors have one dtype that the foreach kernels support."""
    dtypes = {t.dtype for t in (*targets, *sources)}
    if len(dtypes) == 1 and dtypes <= _COPIED_TOGETHER:
        torch._foreach_copy_(targets, sources, non_blocking=non_blocking)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)


class FlatLayout:
    """The layout of tensors in flat tensors, one for each dtype.

    Args:
        tensors: Tensors whose shapes, dtypes and strides are used; they are not kept.
        order: The order of the tensors within flat tensors; ``None``: that of ``tensors``. The
            flat tensors themselves are in the order in which their dtypes occur in ``tensors``.

    Attributes:
        groups: For each flat tensor the indices of its tensors in ``tensors``, in layout order.
    """

    def __init__(self, tensors: Sequence[Tensor], order: Sequence[int] | None = None) -> None:
        self.groups = by_dtype(tensors)
        if order is not None:
            place = {i: rank for rank, i in enumerate(order)}
            self.groups = [sorted(group, key=place.__getitem__) for group in self.groups]
        self._layouts = [_Layout([tensors[i] for i in group]) for group in self.groups]

    def empty(self, device: torch.device) -> list[Tensor]:
        """New flat tensors, filled with zeros."""
        return [
            torch.zeros(layout.numel, dtype=layout.dtype, device=device) for layout in self._layouts
        ]

    def views(self, flats: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Views of ``flats`` with the shapes and, where dense, the strides of ``like``."""
        out = list(like)
        for group, layout, flat in zip(self.groups, self._layouts, flats, strict=True):
            for i, view in zip(group, layout.views(flat, [like[i] for i in group]), strict=True):
                out[i] = view
        return out

    def ends(self, number: int) -> list[int]:
        """Offsets in flat tensor ``number`` of the ends of its tensors."""
        layout = self._layouts[number]
        return [*layout.offsets[1:], layout.numel]


class _Layout:
    """The layout of tensors of one dtype in a flat tensor."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.dtype = tensors[0].dtype
        unit = max(1, ALIGNMENT_BYTES // tensors[0].element_size())
        self.offsets: list[int] = []
        end = 0
        for t in tensors:
            self.offsets.append(end)
            end += -(-t.numel() // unit) * unit
        self.numel = end

    def views(self, flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Views of ``flat`` with the shapes and, where dense, the strides of ``like``."""
        return [
            torch.as_strided(flat, t.size(), dense_stride(t), flat.storage_offset() + offset)
            for t, offset in zip(like, self.offsets, strict=True)
        ]


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides if it is dense, else contiguous strides."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != extent:
                return torch.empty(tensor.size(), device="meta").stride()
            extent *= size
    return tensor.stride()


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The strides that order a tensor's elements in a flat tensor, of dimensions above 1."""
    strides = zip(tensor.size(), dense_stride(tensor), strict=True)
    return tuple(stride for size, stride in strides if size != 1)


def by_dtype(tensors: Iterable[Tensor]) -> list[list[int]]:
    """Indices of the tensors of each dtype."""
    groups: dict[torch.dtype, list[int]] = {}
    for i, t in enumerate(tensors):
        groups.setdefault(t.dtype, []).append(i)
    return list(groups.values())


def views_of(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Consecutive views of a flat tensor in these shapes, without padding."""
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [
        part if len(shape) == 1 else part.view(shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]


def copy_with_norm(out: Tensor, source: Tensor) -> float:
    """Copy a flat tensor and return its squared norm, which is not finite if a value is not.

    Args:
        out: The copy; shares no memory with ``source``.
        source: A flat tensor, floating-point or complex.
    """
    out, source = reals([out, source])
    square = 0.0
    square_of = _square_of_narrow if source.dtype.itemsize < 4 else dot_square
    # A block stays in cache for the second read, and a sum of few numbers keeps its precision.
    length = block_length(source.dtype, torch.get_num_threads())
    for target, block in blocks([out, source], length):
        square += sum_squares(block, square_of)
        target.copy_(block)
    return square


def _square_of_narrow(block: Tensor) -> float:
    """Squared norm of float16 or bfloat16, accumulated in float32."""
    norm: float = torch.linalg.vector_norm(block, dtype=torch.float32).item()
    return norm * norm


def reals(flats: Iterable[Tensor]) -> list[Tensor]:
    """Real views of flat tensors, as collectives require."""
    return [torch.view_as_real(flat).view(-1) if flat.is_complex() else flat for flat in flats]


def add_progress(live: Tensor, average: Tensor, base: Tensor) -> None:
    """Set ``live`` to ``average + (live - base)``; exactly the average where it equals the base.

    Args:
        live: A flat tensor, modified in place.
        average: A flat tensor of the same shape.
        base: A flat tensor of the same shape, overwritten.
    """
    torch.sub(live, base, out=base)
    torch.add(average, base, out=live)


def add(mean: Tensor, delta: Tensor, out: Tensor) -> None:
    """``out = mean + delta``; the mean may be on the CPU."""
    if mean.device == out.device:
        torch.add(mean, delta, out=out)
    else:
        out.copy_(mean, non_blocking=True)
        out.add_(delta)


def change(new: Tensor, old: Tensor, out: Tensor) -> None:
    """``out = new - old``; 0 where both are the same infinity, as in a mask kept as a buffer."""
    same = new == old
    torch.sub(new, old, out=out)
    out.masked_fill_(same, 0)


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm over all tensors, a scalar on their device."""
    parts = [torch.linalg.vector_norm(t) for t in tensors]
    total: Tensor = torch.linalg.vector_norm(torch.stack([p.double() for p in parts]))
    return total


class ModuleState:
    """Saves and restores a replica's frozen parameters, modes, ``requires_grad`` and extra state.

    Used in the worker's thread, on its current stream.

    Args:
        model: The replica, with the weights of a checkpoint's weights file.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        self._checksums = {name: checksum(p) for name, p in self._frozen.items()}
        self._modules = modules_with_extra_state(model)
        self._warned: set[str] = set()

    def saved(self, *, frozen: bool = True) -> SavedModule:
        """Changed frozen parameters, modes and extra state; not copied.

        Waits for the device if any parameter is frozen; without ``frozen``, they are left out.
        """
        changed = {
            name: without_class(p)
            for name, p in self._frozen.items()
            if frozen and not torch.equal(checksum(p), self._checksums[name])
        }
        return SavedModule(
            frozen=changed,
            extra_state={name: self._extra_of(name) for name in self._modules},
            modes={name: bool(sub.training) for name, sub in self._model.named_modules()},
            requires_grad={name: p.requires_grad for name, p in self._model.named_parameters()},
        )

    def _extra_of(self, name: str) -> Any:
        return plain(self._modules[name].get_extra_state(), f"the extra state of module {name!r}")

    def check_extra_state(self) -> None:
        """Restore the extra state in shallow copies of the modules.

        Raises:
            CheckpointError: It cannot be saved or restored.
        """
        for name, module in self._modules.items():
            made = object.__new__(type(module))
            vars(made).update(vars(module))
            for part in ("_parameters", "_buffers", "_modules"):
                vars(made)[part] = vars(module)[part].copy()
            state = restore_subclasses(self._extra_of(name))
            try:
                if type(module).set_extra_state is nn.Module.set_extra_state:
                    raise NotImplementedError("the module does not define it")
                made.set_extra_state(state)
            except Exception as error:
                raise CheckpointError(
                    f"the extra state of module {name!r} cannot be restored by set_extra_state("
                    f"{state!r:.80}): {type(error).__name__}: {error}. Define it for what a file "
                    "holds of get_extra_state(), or train without checkpoint_dir(path)"
                ) from error

    def restore(self, saved: SavedModule) -> None:
        """Restore a state of :meth:`saved` of a replica of the same model."""
        with torch.no_grad():
            for name, value in saved.frozen.items():
                self._frozen[name].copy_(value)
        for name, part in self._model.named_modules():  # parents first
            mode = saved.modes.get(name, part.training)
            if part.training != mode:
                _set_mode(part, training=mode)
        for name, p in self._model.named_parameters():
            p.requires_grad_(saved.requires_grad.get(name, p.requires_grad))
        for name, module in self._modules.items():
            if name in saved.extra_state:
                module.set_extra_state(restore_subclasses(saved.extra_state[name]))
            else:
                self._warn(name, f"the extra state of module {name!r} is not in the checkpoint")

    def _warn(self, name: str, message: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning("%s", message)


def _set_mode(part: nn.Module, *, training: bool) -> None:
    """Set a mode by ``train()`` or ``eval()``, and keep the values of the part's tensors.

    A layer that overrides these, to merge an adapter for instance, has changed its tensors when the
    checkpoint was written.
    """
    own = nn.Module.train, nn.Module.eval
    overrides = any((type(m).train, type(m).eval) != own for m in part.modules())
    tensors = (*part.parameters(), *part.buffers()) if overrides else ()
    held = [(t, t.detach().clone()) for t in tensors]
    (part.train if training else part.eval)()
    with torch.no_grad():
        for t, value in held:
            t.copy_(value)


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Modules with extra state, by name; the model itself is ``""``."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


EXTRA_STATE = "_extra_state"
"""Key of a module's extra state in ``state_dict()``."""


def extra_key(name: str) -> str:
    """Key of the extra state of a submodule in the state dict."""
    return f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE


def copy_values(model: nn.Module) -> dict[str, Any]:
    """Copies of all parameters, buffers and extra state of a model, on the CPU, under the keys of
    a bare module.
    """
    copies: dict[int, Tensor] = {}
    values: dict[str, Any] = {}
    for name, t in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if id(t) not in copies:
            copies[id(t)] = t.detach().to("cpu", copy=True)
        values[plain_key(name)] = copies[id(t)]
    for name, sub in modules_with_extra_state(model).items():
        values[plain_key(extra_key(name))] = copy.deepcopy(sub.get_extra_state())
    return values


def states_of(params: Sequence[Tensor], *, with_values: bool) -> list[tuple[int, int]]:
    """Memory of each parameter and its version counter, to detect changes.

    Args:
        with_values: Take checksums in place of versions; writes through ``.data`` change them.
    """
    if with_values:
        return [(p.data_ptr(), int(checksum(p))) for p in params]
    return [(p.data_ptr(), p._version) for p in params]


def checksum(t: Tensor) -> Tensor:
    """A checksum of the tensor's content, on its device.

    A weighted sum of its bytes as 64-bit words, chunk by chunk: exact, where a norm would round a
    small change away. Each word's weight is that of its row plus that of its column, in rows of
    256, so that exchanged words are noticed. Reads the tensor twice.
    """
    t = t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    content = t.view(torch.uint8)
    if content.storage_offset() % _WORD_BYTES:
        content = content.clone()
    end = content.numel() // _WORD_BYTES * _WORD_BYTES
    words = content[:end].view(torch.int64)
    rest = content[end:]
    total = _weighted(rest.long()) if rest.numel() else words.new_zeros(())
    for begin in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[begin : begin + _CHUNK_WORDS]
        whole = chunk.numel() // _ROW_WORDS * _ROW_WORDS
        total = total * 31
        if whole < chunk.numel():
            total = total + _weighted(chunk[whole:])
        if whole:
            rows = chunk[:whole].view(-1, _ROW_WORDS)
            total = total + _weighted(rows.sum(0)) + 2 * _weighted(rows.sum(1))
    return total


def _weighted(words: Tensor) -> Tensor:
    """The sum of words with weights that are odd and mixed from their positions.

    Weights in proportion to the position would lose words whose lower bits are zero, such as those
    of 0.0 and 1.0 in float64.
    """
    weights = torch.arange(1, words.numel() + 1, device=words.device)
    for factor in _MIX:
        weights.mul_(factor)
        weights.bitwise_xor_(weights >> 32)
    return (words * weights.bitwise_or_(1)).sum()
