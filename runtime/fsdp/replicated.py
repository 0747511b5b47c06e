"""Parameters that every rank holds whole: only gradients are exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from runtime.collective import Collective, ReduceOp
from runtime.fsdp.found import Found
from runtime.fsdp.layout import Bucket, dense_stride, make_layouts


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

    def __init__(self, found: Sequence[Found], world: Collective) -> None:
        self.names = [each.name for each in found]
        self.shards = [each.parameter for each in found]
        self._world = world
        trainable = [p for p in self.shards if p.requires_grad]
        self._trainable = trainable
        # One shard: full tensors and flat shards are the same.
        self._layouts = make_layouts(trainable, 1)
        with torch.no_grad():
            for parameter in self.shards:
                values = parameter.detach().clone(memory_format=torch.contiguous_format)
                world.broadcast_(values)
                parameter.copy_(values)

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
        """Nothing: the module has its parameters."""

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
        for layout in self._layouts:
            for bucket in layout.buckets:
                self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        gradients: list[Tensor] = []
        for slot in bucket.slots:
            gradient = self._trainable[slot.index].grad
            assert gradient is not None
            gradients.append(gradient)
        if len(gradients) == 1 and dense_stride(gradients[0]) == gradients[0].stride():
            (gradient,) = gradients
            flat = torch.as_strided(gradient, (gradient.numel(),), (1,), gradient.storage_offset())
            self._world.all_reduce_(flat, ReduceOp.AVG)
            return
        whole = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._world.all_reduce_(whole, ReduceOp.AVG)
        parts = whole.split([gradient.numel() for gradient in gradients])  # type: ignore[no-untyped-call]
        torch._foreach_copy_(
            gradients, [part.view(g.size()) for part, g in zip(parts, gradients, strict=True)]
        )

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
