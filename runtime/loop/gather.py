"""Gathers the outputs of replicas, and runs their backward passes in their own threads.

PyTorch runs backward of CPU graphs in the calling thread. So each replica's graph ends at its own
outputs, and an autograd function connects them to the caller's outputs: its backward runs each
replica's backward in the replica's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.core.loss_weights import Weight, fractions_of
from runtime.core.nested import NestedSpec
from runtime.loop.scatter import Scatter, ShardInput, to_device

COUPLED_OUTPUT = (
    "forward returned tensors of shapes {shapes} for {sizes} samples on the replicas: each relates "
    "the samples of its shard to each other, but not to those of other shards. Return the features "
    "(z) and relate them (z @ z.T) in the loop: model(x) returns those of the whole batch, and "
    "gradients pass through them. In a train_fn of Trainer.builder, gather "
    "them with gpuworker.all_gather(z)"
)


class OutputGather:
    """The gathered output of one forward pass over all replicas, and its backward.

    Args:
        shards: The replicas' outputs, in order of samples.
        params: The parameters whose gradients ``backward`` returns.

    Attributes:
        gathered: Each tensor of the output.
        may_couple_samples: True if an output may relate the samples of a shard to each other:
            another dimension, a list or a number is as large as the shard, and all shards have
            the same size.

    Raises:
        ValueError: Outputs cannot be concatenated, or relate samples to each other.
    """

    def __init__(
        self,
        scatter: Scatter,
        shards: Sequence[ShardOutput],
        device: torch.device,
        backward: Backward | None,
        params: Sequence[Tensor] = (),
    ) -> None:
        self._shards = shards
        self._params = params
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
        batch_dim = scatter.batch_dim
        coupled = [parts for parts in columns if _couples_samples(parts, sizes, batch_dim)]
        self.may_couple_samples = bool(coupled) or _may_count_samples(first, sizes)
        if coupled and len(set(sizes)) > 1:
            shapes = ", ".join(str(tuple(part.shape)) for part in coupled[0])
            raise ValueError(COUPLED_OUTPUT.format(shapes=shapes, sizes=", ".join(map(str, sizes))))
        weight_index = shards[0].weight_index
        self.gathered = [
            GatheredTensor(parts, shards, device, batch_dim, is_weight=index == weight_index)
            for index, parts in enumerate(columns)
        ]

    def wanted_params(self, ctx: Any) -> list[bool] | None:
        """The parameters whose gradients the running backward pass computes; ``None``: all."""
        nodes = [node for node, _ in ctx.next_functions]
        if _will_run(nodes[0]):  # the anchor, whose gradient is never requested
            return None
        first = len(nodes) - len(self._params)
        return [node is not None and _will_run(node) for node in nodes[first:]]

    def output(self) -> Any:
        """The output of the call, with a graph if the replicas' outputs have one."""
        values = [tensor.value for tensor in self.gathered]
        if any(tensor.requires_grad for tensor in self.gathered):
            # Without an input that requires a gradient, autograd would skip the function.
            anchor = torch.zeros((), requires_grad=True)
            inputs = (*self._scatter.tensors, *self._params)
            values = list(_GatherFunction.apply(self, anchor, *inputs))  # type: ignore[no-untyped-call]
        for tensor in self.gathered:
            del tensor.value  # only the caller keeps a reference
        return self._shards[0].spec.build(iter(values))

    def backward(
        self,
        grads: Sequence[Tensor | None],
        *,
        wanted: Sequence[bool] | None,
        retain_graph: bool,
    ) -> list[Tensor | None]:
        """The gradients of the inputs and parameters from those of the outputs.

        Args:
            grads: Each output's gradient.
            wanted: The parameters that get one; ``None``: all, and every other leaf of the
                shards' graphs.
        """
        if any(shard.outputs is None for shard in self._shards):
            raise RuntimeError(
                "backward ran through this output before, and the graph was freed: pass "
                "retain_graph=True to the first backward to run a second"
            )
        inputs_of = [shard.inputs for shard in self._shards]
        self._scatter.mark_writes([given for given in inputs_of if given is not None])
        columns = [tensor.split(grad) for tensor, grad in zip(self.gathered, grads, strict=True)]
        parts = [list(row) for row in zip(*columns, strict=True)]
        assert self._run is not None, "only without gradients"
        found, params = self._run(
            self._shards, parts, wanted=wanted, params=self._params, retain_graph=retain_graph
        )
        ranges = [(shard.start, shard.stop) for shard in self._shards]
        inputs = [
            self._scatter.merge_gradients(index, shard_grads, ranges)
            for index, shard_grads in enumerate(zip(*found, strict=True))
        ]
        return [*inputs, *params]


class _GatherFunction(torch.autograd.Function):
    """Connects the replicas' graphs to the caller's."""

    @staticmethod
    def forward(
        ctx: Any, gather: OutputGather, anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gather = gather
        values = tuple(tensor.value for tensor in gather.gathered)
        ctx.mark_non_differentiable(
            *(v for v, m in zip(values, gather.gathered, strict=True) if not m.requires_grad)
        )
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: gradients of gradients do not pass through replicas; compute "
                "such a term with model.module(...), which runs on the first device only"
            )
        return (
            None,
            None,
            *ctx.gather.backward(
                grads, wanted=ctx.gather.wanted_params(ctx), retain_graph=_retains_graph()
            ),
        )


# Properties of the running backward pass, by private functions of PyTorch; without these the
# result is that of a plain loss.backward().
def _will_run(node: Any) -> bool:
    """True if the running backward pass computes the gradient of a leaf's node."""
    query: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)
    if query is None:
        return True
    try:
        return query(node)
    except RuntimeError:  # raised for leaves among the inputs of torch.autograd.grad
        return True


def _retains_graph() -> bool:
    """True if ``retain_graph=True`` was passed."""
    query: Callable[[], bool] | None = getattr(
        torch._C._autograd, "_get_current_graph_task_keep_graph", None
    )
    return query is not None and query()


class GatheredTensor:
    """One tensor of the output, combined from the shards' parts.

    Parts with dimensions have a fixed number of rows per sample and are concatenated. A
    floating-point part without dimensions counts as a mean over its shard's weight, or over its
    samples if the weight is unknown, and the combined value is the weighted mean. A shard of
    weight 0 adds nothing and gets no gradient. Weights that the model returns are summed.

    Args:
        parts: Each shard's part.
        batch_dim: The dimension that counts the samples, in parts that have it.
        is_weight: True if the parts are the shards' weights.

    Attributes:
        value: The combined tensor, without a graph.
        requires_grad: True if any part requires a gradient.
        weight_is_guessed: True if parts without a known weight were weighted by samples.

    Raises:
        ValueError: The parts cannot be combined.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        shards: Sequence[ShardOutput],
        device: torch.device,
        batch_dim: int = 0,
        *,
        is_weight: bool = False,
    ) -> None:
        self.weight_is_guessed = False
        self.requires_grad = any(part.requires_grad for part in parts)
        self._weights: Sequence[float | Tensor] = []
        self._rows: list[int] = []
        self._dim = 0
        values = [to_device(part.detach(), device) for part in parts]
        known = [shard.weight for shard in shards if shard.weight is not None]
        if is_weight:
            self._weights = [1.0] * len(parts)
            self.value = torch.stack(values).sum(0)
        elif parts[0].dim() == 0 and parts[0].is_floating_point() and len(known) == len(parts):
            self._weights = fractions_of(known, device)
            self.value = torch.stack(_scaled(values, self._weights)).sum(0)
        elif len(parts) == 1:
            self._weights = [1.0]
            self.value = values[0]
        elif parts[0].dim() == 0:
            self.weight_is_guessed = True
            self._guessed = torch.stack(values)
            samples = self._weights = _sample_fractions(parts, shards)
            scaled = [v * w for v, w in zip(values, samples, strict=True)]
            self.value = torch.stack(scaled).sum(0)
        else:
            self._dim = _sample_dim(parts, shards, batch_dim)
            self._rows = [part.size(self._dim) for part in parts]
            self.value = torch.cat(values, self._dim)

    @property
    def rows(self) -> tuple[int, int] | None:
        """The dimension of concatenated parts, and rows of the first; ``None`` for others."""
        return (self._dim, self._rows[0]) if self._rows else None

    @property
    def depends_on_guess(self) -> bool:
        """True if parts whose weight is guessed differ; a synchronization."""
        return self.weight_is_guessed and bool((self._guessed != self._guessed[0]).any())

    def split(self, grad: Tensor | None) -> list[Tensor | None]:
        """Each part's gradient from the gradient of the combined tensor."""
        if grad is None:
            return [None] * len(self._weights or self._rows)
        if self._rows:
            return list(torch.split(grad, self._rows, self._dim))
        found: list[Tensor | None] = []
        for w in self._weights:
            if isinstance(w, Tensor):
                found.append(grad * w.to(grad.dtype))
            else:  # no gradient for a shard of weight 0, whose own may be NaN
                found.append(grad if w == 1.0 else grad * w if w else None)
        return found


def _scaled(values: Sequence[Tensor], factors: Sequence[float | Tensor]) -> list[Tensor]:
    found = []
    for value, factor in zip(values, factors, strict=True):
        if isinstance(factor, Tensor):
            found.append(torch.where(factor == 0, 0.0, value * factor.to(value.dtype)))
        else:
            found.append(value * factor if factor else torch.zeros_like(value))
    return found


def _sample_fractions(parts: Sequence[Tensor], shards: Sequence[ShardOutput]) -> list[float]:
    if not parts[0].is_floating_point():
        raise ValueError(
            f"forward returned a {parts[0].dtype} tensor without dimensions, one for each of "
            f"{len(parts)} replicas, and how to combine them is unknown: return one value for "
            "each sample"
        )
    total = sum(shard.stop - shard.start for shard in shards)
    return [(shard.stop - shard.start) / total for shard in shards]


def _has_rows_per_sample(parts: Sequence[Tensor], sizes: Sequence[int], dim: int = 0) -> bool:
    """True if a dimension has the same number of rows for each sample."""
    rows = [part.size(dim) if part.dim() > dim else 0 for part in parts]
    per_sample = rows[0] // max(1, sizes[0])
    return rows == [per_sample * size for size in sizes] and (not dim or per_sample == 1)


def _sample_dim(parts: Sequence[Tensor], shards: Sequence[ShardOutput], batch_dim: int) -> int:
    """The dimension along which parts are concatenated."""
    sizes = [shard.stop - shard.start for shard in shards]
    for dim in dict.fromkeys((batch_dim, 0)):
        others = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
        if len(others) == 1 and _has_rows_per_sample(parts, sizes, dim):
            return dim
    shapes = ", ".join(str(tuple(part.shape)) for part in parts)
    raise ValueError(
        f"forward returned tensors of shapes {shapes} for {', '.join(map(str, sizes))} samples "
        "on the replicas, which cannot be concatenated: put the batch first in each output, or "
        "name its dimension, DdpConfig(batch_dim=1). Sequences need one length on all replicas, "
        "not that of the longest one of each: pad_packed_sequence(..., total_length=x.size(1))"
    )


def _couples_samples(parts: Sequence[Tensor], sizes: Sequence[int], batch_dim: int = 0) -> bool:
    """True if a dimension besides that of the samples is as long as each shard."""
    if len(parts) < 2 or min(part.dim() for part in parts) < 2:
        return False
    for dim in dict.fromkeys((batch_dim, 0)):
        if _has_rows_per_sample(parts, sizes, dim):
            shapes = [[*part.shape[:dim], *part.shape[dim + 1 :]] for part in parts]
            return any(list(lengths) == list(sizes) for lengths in zip(*shapes, strict=False))
    return False


def _may_count_samples(spec: NestedSpec, sizes: Sequence[int]) -> bool:
    """True if a list has an entry for each sample of a shard, or a number counts them, perhaps."""
    if len(sizes) < 2 or len(set(sizes)) > 1:
        return False
    if spec.kind is None:
        return type(spec.value) is int and spec.value == sizes[0]
    is_list = spec.kind in (list, tuple) and len(spec.children) == sizes[0]
    return is_list or any(_may_count_samples(child, sizes) for child in spec.children)


class ShardOutput:
    """One replica's output of one call, with its autograd graph.

    Attributes:
        start: First sample.
        stop: One past the last sample.
        outputs: The output's tensors; ``None`` once the graph was freed.
        inputs: The shard's inputs; ``None`` once the graph was freed.
        weight: The count that scalar losses are means over; ``None``: unknown.
        weight_index: Index of that weight in the outputs; ``None``: not among them.
        leaves: The rank's leaves, one per parameter of the model.
    """

    weight: Weight | None = None
    weight_index: int | None = None
    leaves: Sequence[Tensor] = ()

    def __init__(
        self, rank: int, start: int, stop: int, shard_input: ShardInput, spec: NestedSpec
    ) -> None:
        self.rank = rank
        self.start, self.stop = start, stop
        self.spec = spec
        self.outputs: list[Tensor] | None = []
        self.inputs: ShardInput | None = shard_input

    def backward(
        self,
        grads: Sequence[Tensor | None],
        *,
        wanted: Sequence[bool] | None,
        first_leaves: Sequence[Tensor],
        retain_graph: bool,
    ) -> list[Tensor | None]:
        """Run backward in the replica's thread.

        The leaves hold the parameters' gradients afterwards.

        Args:
            grads: Each output's gradient, on the replica's device.
            wanted: The parameters that get a gradient; ``None``: all.
            first_leaves: Rank 0's leaves, which hooks of other ranks may use.

        Returns:
            The gradient of each tensor of the shard's input; ``None`` if not required.
        """
        assert self.outputs is not None, "checked by the caller"
        assert self.inputs is not None, "cleared together with the outputs"
        leaves = self.inputs.leaves
        required = [leaf for leaf in leaves if leaf is not None]
        pairs = [(o, g) for o, g in zip(self.outputs, grads, strict=True) if g is not None]
        pairs = [(o, g) for o, g in pairs if o.requires_grad]
        chosen = None
        if wanted is not None:
            # A hook that refers to the model itself leads to rank 0's leaves.
            ranks = [self.leaves] if self.leaves is first_leaves else [self.leaves, first_leaves]
            pairs_of = chain.from_iterable(zip(own, wanted, strict=True) for own in ranks)
            chosen = [*required, *(leaf for leaf, flag in pairs_of if flag)]
        if pairs and (chosen is None or chosen):
            outputs, given = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, given, retain_graph=retain_graph, inputs=chosen)
        found = [None if leaf is None else leaf.grad for leaf in leaves]
        for leaf in required:
            leaf.grad = None
        if not retain_graph:
            self.outputs = self.inputs = None
        return found


class Backward(Protocol):
    """Runs backward of shards in their replicas' threads."""

    def __call__(
        self,
        shards: Sequence[ShardOutput],
        grads: Sequence[Sequence[Tensor | None]],
        *,
        wanted: Sequence[bool] | None,
        params: Sequence[Tensor],
        retain_graph: bool,
    ) -> tuple[list[list[Tensor | None]], Sequence[Tensor | None]]:
        """Return the gradients of each shard's inputs, and of the parameters, summed."""
