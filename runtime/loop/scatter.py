"""The nested inputs of one call, cut along dimension 0, and the outputs put together again.

PyTorch runs backward of CPU graphs in the thread that calls it. So each replica's graph ends
at its own outputs, and a function of autograd stands between them and what the caller gets:
its backward hands every replica its part and lets it run backward in its own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from runtime.core.nested import Spec, flatten
from runtime.core.weight import Weight, parts_of

_DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class CallerModes:
    """Gradient mode, inference mode and autocast of a thread.

    Attributes:
        grad: Whether graphs are recorded.
        inference: Whether ``torch.inference_mode`` is on.
        autocasts: Device type and dtype of each autocast that is on.
        cache: Whether autocast keeps converted weights.
    """

    grad: bool
    inference: bool
    autocasts: tuple[tuple[str, torch.dtype], ...]
    cache: bool

    @classmethod
    def capture(cls) -> CallerModes:
        """Those of the calling thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocasts=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in _DEVICE_TYPES
                if torch.is_autocast_enabled(kind)
            ),
            cache=torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make them those of this thread for a while."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.cache))
            yield


@contextmanager
def outside_autocast() -> Iterator[None]:
    """No autocast for a while: around a backward pass, as PyTorch asks for.

    Backward runs each operation in the dtype of its forward, unless autocast changes that.
    """
    with ExitStack() as stack:
        for kind in _DEVICE_TYPES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class Piece(NamedTuple):
    """One replica's part of the inputs.

    Attributes:
        args: Positional inputs.
        kwargs: Keyword inputs.
        leaves: For each tensor of the inputs the one that collects its gradient, or ``None``.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Tensor | None]


class Scatter:
    """The inputs of one call and how they are cut.

    Every tensor with a dimension is cut along its first one, so all of them have the same
    size there. Tensors without a dimension and everything that is no tensor go to every
    replica as they are. Lists of other things are not cut.

    Args:
        args: Positional inputs.
        kwargs: Keyword inputs.

    Attributes:
        tensors: All tensors of the inputs, in order.
        num_samples: Size of the batch.

    Raises:
        TypeError: An input that cannot be cut.
        ValueError: No tensor with a dimension, or first dimensions of different sizes.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self._spec = flatten((args, kwargs), self.tensors, strict=False)
        sizes = {t.size(0) for t in self.tensors if t.dim()}
        if not sizes:
            raise ValueError(
                "no input has a dimension to share out over the replicas: pass a batch, or call "
                "model.module(...), which runs on the first device alone"
            )
        if len(sizes) > 1:
            shapes = ", ".join(str(tuple(t.shape)) for t in self.tensors if t.dim())
            raise ValueError(
                f"inputs of shapes {shapes} have different sizes along dimension 0, where they "
                "are shared out over the replicas: put the batch first in each, and keep what "
                "belongs to no sample (a mask for all, say) in a buffer of the model"
            )
        self.num_samples = sizes.pop()

    def piece(self, start: int, stop: int, device: torch.device) -> Piece:
        """The inputs for samples ``start`` to ``stop``, on a device.

        On the device of the inputs they are views. Copies run on the current stream;
        those from pinned memory and between GPUs are not waited for.
        """
        parts, leaves = [], []
        for tensor in self.tensors:
            part = tensor.detach()
            if tensor.dim() and stop - start < self.num_samples:
                part = part[start:stop]
            part = carry(part, device)
            leaf = None
            if tensor.requires_grad and torch.is_grad_enabled():
                leaf = part.requires_grad_()
            parts.append(part)
            leaves.append(leaf)
        args, kwargs = self._spec.build(iter(parts))
        return Piece(args, kwargs, leaves)

    def merge_gradients(
        self, index: int, parts: Sequence[Tensor | None], ranges: Sequence[tuple[int, int]]
    ) -> Tensor | None:
        """The gradient of an input from those of its pieces.

        Args:
            index: Which of :attr:`tensors`.
            parts: What the replicas found; ``None`` where their piece had no effect.
            ranges: Each replica's samples.
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


def carry(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; the host waits for the copy only if it goes to the CPU.

    There the host reads next, and nothing else would make it wait.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def move(value: Any, device: torch.device) -> Any:
    """A nested value with all its tensors on a device; copies run on the current stream."""
    tensors: list[Tensor] = []
    spec = flatten(value, tensors, strict=False)
    if all(t.device == device for t in tensors):
        return value
    return spec.build(carry(t, device) for t in tensors)


def placed(value: Any, device: torch.device, *, copy: bool) -> Any:
    """What a replica keeps of a value that is given to all: tensors on its own device.

    Args:
        value: Anything; tensors may stand in lists, tuples and dicts, also nested ones.
        device: The replica's.
        copy: Whether tensors that are there already are copied too.

    Raises:
        ValueError: A tensor with a gradient, which replicas cannot share.
    """
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise ValueError(
                "a tensor that requires a gradient would get none from the replicas: pass it to "
                "forward, or detach() it; what is to be trained belongs to the model before "
                "Trainer.setup"
            )
        return value.to(device, copy=copy)
    if type(value) not in (list, tuple, dict):
        return value
    parts = list(value.values()) if isinstance(value, dict) else list(value)
    own = [placed(part, device, copy=copy) for part in parts]
    if all(a is b for a, b in zip(own, parts, strict=True)):
        return value
    if isinstance(value, dict):
        return dict(zip(value, own, strict=True))
    return type(value)(own)


class Shard:
    """One replica's part of one call, with the graph that leads to its outputs.

    Attributes:
        rank: The replica.
        start: First sample.
        stop: One past the last.
        spec: What the output is like.
        outputs: Its tensors; ``None`` once the graph was freed.
        weight: What its scalar losses are means over; ``None``: not known.
        weight_index: Which of the outputs is that weight; ``None``: none is.
    """

    weight: Weight | None = None
    weight_index: int | None = None

    def __init__(self, rank: int, start: int, stop: int, piece: Piece, spec: Spec) -> None:
        self.rank = rank
        self.start, self.stop = start, stop
        self.spec = spec
        self.outputs: list[Tensor] | None = []
        self._piece: Piece | None = piece

    def backward(
        self, grads: Sequence[Tensor | None], *, params: bool, keep: bool
    ) -> list[Tensor | None]:
        """Run backward in the replica's thread.

        Args:
            grads: For each output its gradient, on the replica's device.
            params: Whether parameters get gradients too, not only inputs.
            keep: Whether the graph is used again.

        Returns:
            The gradient of each input tensor's piece, where one was asked for.
        """
        assert self.outputs is not None, "checked by the caller"
        assert self._piece is not None, "goes with the outputs"
        leaves = self._piece.leaves
        wanted = [leaf for leaf in leaves if leaf is not None]
        pairs = [(o, g) for o, g in zip(self.outputs, grads, strict=True) if g is not None]
        pairs = [(o, g) for o, g in pairs if o.requires_grad]
        if pairs and (params or wanted):
            outputs, given = zip(*pairs, strict=True)
            torch.autograd.backward(
                outputs, given, retain_graph=keep, inputs=None if params else wanted
            )
        found = [None if leaf is None else leaf.grad for leaf in leaves]
        for leaf in wanted:
            leaf.grad = None
        if not keep:
            self.outputs = self._piece = None
        return found


class Backward(Protocol):
    """Runs backward of shards in their replicas' threads."""

    def __call__(
        self,
        shards: Sequence[Shard],
        grads: Sequence[Sequence[Tensor | None]],
        *,
        params: bool,
        keep: bool,
    ) -> list[list[Tensor | None]]:
        """For each shard the gradients of its outputs; gives those of its inputs."""


class Merged:
    """One tensor of the output, put together from the shards' parts.

    A part with dimensions holds a fixed number of rows for each sample, and parts are laid
    end to end. A floating-point part without dimensions is taken for a mean over what its piece
    weighs, or over the samples where that is not known, and the whole is the mean of them all.
    A piece of weight 0 adds nothing to it, and gets no gradient from it. The weights
    themselves, where the model returns them, add up.

    Args:
        parts: Each shard's part.
        shards: The shards.
        device: Where the whole lies.
        adds_up: Whether these are the weights.

    Attributes:
        value: The whole, without a graph.
        requires_grad: Whether it leads to a graph.
        is_guessed: Whether parts were taken for means over samples because nothing tells.

    Raises:
        ValueError: Parts that cannot be put together.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        shards: Sequence[Shard],
        device: torch.device,
        *,
        adds_up: bool = False,
    ) -> None:
        self.is_guessed = False
        self.requires_grad = any(part.requires_grad for part in parts)
        self._weights: Sequence[float | Tensor] = []
        self._rows: list[int] = []
        values = [carry(part.detach(), device) for part in parts]
        known = [shard.weight for shard in shards if shard.weight is not None]
        if adds_up:
            self._weights = [1.0] * len(parts)
            self.value = torch.stack(values).sum(0)
        elif parts[0].dim() == 0 and parts[0].is_floating_point() and len(known) == len(parts):
            self._weights = _known_parts(known, device)
            self.value = torch.stack(_scaled(values, self._weights)).sum(0)
        elif len(parts) == 1:
            self._weights = [1.0]
            self.value = values[0]
        elif parts[0].dim() == 0:
            self.is_guessed = True
            samples = self._weights = _weights(parts, shards)
            scaled = [v * w for v, w in zip(values, samples, strict=True)]
            self.value = torch.stack(scaled).sum(0)
        else:
            _check_rows(parts, shards)
            self._rows = [part.size(0) for part in parts]
            self.value = torch.cat(values)

    def split(self, grad: Tensor | None) -> list[Tensor | None]:
        """The gradient of each part, from that of the whole."""
        if grad is None:
            return [None] * len(self._weights or self._rows)
        if self._rows:
            return list(torch.split(grad, self._rows))
        found: list[Tensor | None] = []
        for w in self._weights:
            if isinstance(w, Tensor):
                found.append(grad * w.to(grad.dtype))
            else:  # nothing goes back to a piece of weight 0, whose own gradients may be NaN
                found.append(grad if w == 1.0 else grad * w if w else None)
        return found


def _known_parts(weights: Sequence[Weight], device: torch.device) -> Sequence[float | Tensor]:
    """Each weight's part in their sum; tensors where the host cannot read one."""
    numbers = [weight for weight in weights if not isinstance(weight, Tensor)]
    if len(numbers) < len(weights):
        return parts_of([torch.as_tensor(weight) for weight in weights], device)
    total = sum(numbers) or 1.0
    return [number / total for number in numbers]


def _scaled(values: Sequence[Tensor], factors: Sequence[float | Tensor]) -> list[Tensor]:
    found = []
    for value, factor in zip(values, factors, strict=True):
        if isinstance(factor, Tensor):
            found.append(torch.where(factor == 0, 0.0, value * factor.to(value.dtype)))
        else:
            found.append(value * factor if factor else torch.zeros_like(value))
    return found


def _weights(parts: Sequence[Tensor], shards: Sequence[Shard]) -> list[float]:
    if not parts[0].is_floating_point():
        raise ValueError(
            f"forward returned a {parts[0].dtype} tensor without dimensions, one for each of "
            f"{len(parts)} replicas, and it is not known how they add up: return one value for "
            "each sample"
        )
    total = sum(shard.stop - shard.start for shard in shards)
    return [(shard.stop - shard.start) / total for shard in shards]


def _has_rows(parts: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Whether the first dimension has the same number of rows for each sample."""
    rows = [part.size(0) if part.dim() else 0 for part in parts]
    per_sample = rows[0] // sizes[0]
    return rows == [per_sample * size for size in sizes]


def _check_rows(parts: Sequence[Tensor], shards: Sequence[Shard]) -> None:
    sizes = [shard.stop - shard.start for shard in shards]
    if not _has_rows(parts, sizes):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise ValueError(
            f"forward returned tensors of shapes {shapes} for {', '.join(map(str, sizes))} samples "
            "on the replicas, which cannot be laid end to end: put the batch first in each output"
        )


CROSSED = (
    "forward returned tensors of shapes {shapes} for {sizes} samples on the replicas: each relates "
    "the samples of its piece to each other, and nothing those of different pieces. Return the "
    "features (z) and compute what relates them (z @ z.T) in the loop: model(x) gives those of the "
    "whole batch, and gradients go back through them. In a train_fn of Trainer.builder, gather "
    "them with runtime.all_gather(z)"
)


def _is_crossed(parts: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Whether a dimension other than the first, which is the samples', is as long as each piece."""
    if len(parts) < 2 or min(part.dim() for part in parts) < 2 or not _has_rows(parts, sizes):
        return False
    shapes = [part.shape[1:] for part in parts]
    return any(list(lengths) == list(sizes) for lengths in zip(*shapes, strict=False))


class Call:
    """One forward pass over all replicas, until its backward.

    Args:
        scatter: The inputs.
        shards: What the replicas made of them, in order of samples.
        device: Where the outputs shall lie.
        backward: Runs the shards' backward.

    Attributes:
        merged: Each tensor of the output.
        looks_crossed: Whether an output may relate the samples of a piece to each other: one of
            its other dimensions is as long as the piece, and all pieces are equal.

    Raises:
        ValueError: Outputs that cannot be put together, or relate samples to each other.
    """

    def __init__(
        self,
        scatter: Scatter,
        shards: Sequence[Shard],
        device: torch.device,
        backward: Backward,
    ) -> None:
        self._shards = shards
        self._run = backward
        self._scatter = scatter
        first = shards[0].spec
        for shard in shards[1:]:
            found = first.difference(shard.spec)
            if found is not None:
                raise ValueError(
                    f"rank {shard.rank} returned another output than rank {shards[0].rank}: {found}"
                )
        columns = list(zip(*(shard.outputs or [] for shard in shards), strict=True))
        sizes = [shard.stop - shard.start for shard in shards]
        crossed = [parts for parts in columns if _is_crossed(parts, sizes)]
        self.looks_crossed = bool(crossed)
        if crossed and len(set(sizes)) > 1:
            shapes = ", ".join(str(tuple(part.shape)) for part in crossed[0])
            raise ValueError(CROSSED.format(shapes=shapes, sizes=", ".join(map(str, sizes))))
        summed = shards[0].weight_index
        self.merged = [
            Merged(parts, shards, device, adds_up=index == summed)
            for index, parts in enumerate(columns)
        ]

    def output(self) -> Any:
        """The output of the call, with a graph where the replicas' outputs have one."""
        values = [merged.value for merged in self.merged]
        if any(merged.requires_grad for merged in self.merged):
            # One input with a gradient there must be, or autograd would skip the function.
            anchor = torch.zeros((), requires_grad=True)
            values = list(_Gather.apply(self, anchor, *self._scatter.tensors))  # type: ignore[no-untyped-call]
        for merged in self.merged:
            del merged.value  # the caller's alone from here on
        return self._shards[0].spec.build(iter(values))

    def backward(
        self, grads: Sequence[Tensor | None], *, params: bool, keep: bool
    ) -> list[Tensor | None]:
        """From the gradients of the outputs to those of the inputs."""
        if any(shard.outputs is None for shard in self._shards):
            raise RuntimeError(
                "backward ran through this output before, and the graph was freed: pass "
                "retain_graph=True to the first one if there are to be two"
            )
        columns = [merged.split(grad) for merged, grad in zip(self.merged, grads, strict=True)]
        parts = [list(row) for row in zip(*columns, strict=True)]
        found = self._run(self._shards, parts, params=params, keep=keep)
        ranges = [(shard.start, shard.stop) for shard in self._shards]
        return [
            self._scatter.merge_gradients(index, pieces, ranges)
            for index, pieces in enumerate(zip(*found, strict=True))
        ]


class _Gather(torch.autograd.Function):
    """Stands between the replicas' graphs and the caller's."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        values = tuple(merged.value for merged in call.merged)
        ctx.mark_non_differentiable(
            *(v for v, m in zip(values, call.merged, strict=True) if not m.requires_grad)
        )
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: gradients of gradients do not pass through replicas; compute "
                "such a term with model.module(...), which runs on the first device alone"
            )
        found = ctx.call.backward(grads, params=_params_wanted(ctx), keep=_graph_kept())
        return (None, None, *found)


# Two questions about the backward pass that is under way. Autograd answers them to its own
# users inside PyTorch; where it does not, the answer is that of a plain loss.backward().


def _params_wanted(ctx: Any) -> bool:
    """Whether leaves get gradients: not in ``torch.autograd.grad(output, inputs)``."""
    ask: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)
    return ask is None or ask(ctx.next_functions[0][0])


def _graph_kept() -> bool:
    """Whether ``retain_graph=True`` was passed."""
    ask: Callable[[], bool] | None = getattr(
        torch._C._autograd, "_get_current_graph_task_keep_graph", None
    )
    return ask is not None and ask()
