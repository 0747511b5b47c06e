"""Parameters that every rank holds in full."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from runtime.collective import Collective, ReduceOp
from runtime.fsdp.exchange import rank_0s
from runtime.fsdp.layout import Bucket, make_layouts
from runtime.fsdp.shared_parameters import SharedParameter
from runtime.replica.flat import dense_stride


class ReplicatedParameters:
    """The module's own parameters, under the interface of sharded ones.

    For the thread of its rank; everything runs on the current stream.

    Args:
        found: The module's parameters.
        world: All ranks; rank 0's values become everybody's. A collective call.

    Attributes:
        names: Names of the parameters.
        shards: The parameters themselves.
        generation: Always 0: full values are never replaced.
        is_held: Always ``False``: there is nothing to free.
        must_gather: Always ``False``: there is nothing to form.
    """

    generation = 0
    is_held = False
    is_changed = False
    must_gather = False
    is_prefetching = False

    def __init__(self, found: Sequence[SharedParameter], world: Collective) -> None:
        self.names = [each.name for each in found]
        self.shards = [each.parameter for each in found]
        self._world = world
        trainable = [p for p in self.shards if p.requires_grad]
        self._trainable = trainable
        self._added: set[int] = set()  # places of gradients that were added to and not reduced
        self._hooks: list[RemovableHandle] = []
        if world.world_size > 1:
            for i, parameter in enumerate(trainable):
                hook = partial(_note, self._added, i)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks.append(handle)
        # One shard: full tensors and flat shards are the same.
        self._layouts = make_layouts(trainable, 1)
        with torch.no_grad():
            for parameter in self.shards:
                parameter.copy_(rank_0s(parameter, world))

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter is."""
        return bool(self._trainable)

    def shard_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter."""
        return parameter

    def check(self) -> None:
        """Nothing: there is nothing to form."""

    def check_shards(self) -> None:
        """Nothing: they are what the module has."""

    def hold(self) -> None:
        """Nothing: the values are there."""

    def release(self) -> None:
        """Nothing: the values stay."""

    def refresh(self) -> None:
        """Nothing: the values are those of the optimizer."""

    def restore(self) -> None:
        """Gives the module its parameters back for good."""
        for hook in self._hooks:
            hook.remove()

    def wait_prefetch(self) -> None:
        """Nothing: there is none."""

    def drop_prefetch(self) -> None:
        """Nothing: there is none."""

    def start_prefetch(self, side: Callable[[], Collective], name: str) -> None:
        """Never called: there is nothing to gather."""
        raise AssertionError("nothing to prefetch")

    def as_shards(self) -> AbstractContextManager[None]:
        """Nothing: the module always holds them."""
        return nullcontext()

    def check_gradients(self) -> None:
        """Raises ``ValueError`` if a gradient is sparse."""
        for parameter in self._trainable:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise ValueError(
                    "a gradient is sparse, which FSDP does not support; use "
                    "Embedding(..., sparse=False)"
                )

    @torch.no_grad()
    def reduce(self) -> None:
        """Averages the gradients over all ranks, in place; a collective call.

        To be called after :meth:`check_gradients`.
        """
        for parameter in self._trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        wires: list[Tensor] = []
        copied: list[tuple[Tensor, list[Tensor]]] = []
        for layout in self._layouts:
            for bucket in layout.buckets:
                gradients = self._gradients_of(bucket)
                if (wire := _flat_view(gradients)) is None:
                    wire = torch.cat([gradient.reshape(-1) for gradient in gradients])
                    copied.append((wire, gradients))
                wires.append(wire)
        self._world.all_reduce_coalesced_(wires, ReduceOp.AVG)
        for wire, gradients in copied:
            parts = wire.split([gradient.numel() for gradient in gradients])  # type: ignore[no-untyped-call]
            torch._foreach_copy_(
                gradients, [part.view(g.size()) for part, g in zip(parts, gradients, strict=True)]
            )
        self._added.clear()

    @property
    def has_unreduced(self) -> bool:
        """Whether a backward pass has added to gradients since the last reduction."""
        return any(self._trainable[i].grad is not None for i in self._added)

    def _gradients_of(self, bucket: Bucket) -> list[Tensor]:
        gradients: list[Tensor] = []
        for slot in bucket.slots:
            gradient = self._trainable[slot.index].grad
            assert gradient is not None
            gradients.append(gradient)
        return gradients

    def gradients(self) -> list[Tensor]:
        """The gradients."""
        return [p.grad for p in self._trainable if p.grad is not None]

    def drop_gradients(self) -> None:
        """Nothing: there are none but those of the parameters."""

    def full_values(self) -> Iterator[tuple[int, Tensor]]:
        """Each parameter's place and values."""
        for index, parameter in enumerate(self.shards):
            yield index, parameter.detach()

    def shape_of(self, index: int) -> torch.Size:
        """Shape of a parameter."""
        return self.shards[index].size()

    @torch.no_grad()
    def load(self, index: int, values: Tensor) -> None:
        """Takes values over, of a parameter's shape and on any device."""
        self.shards[index].copy_(values)

    def loaded(self, *, was_changed: bool) -> None:
        """Nothing: there is no other copy."""


def _flat_view(gradients: Sequence[Tensor]) -> Tensor | None:
    """A single dense gradient in one dimension; ``None`` for any others."""
    if len(gradients) != 1 or dense_stride(gradients[0]) != gradients[0].stride():
        return None
    (gradient,) = gradients
    return torch.as_strided(gradient, (gradient.numel(),), (1,), gradient.storage_offset())


def _note(added: set[int], index: int, _: Tensor) -> None:
    added.add(index)
