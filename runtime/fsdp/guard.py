"""A backward that comes too late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from runtime.fsdp.state import Parameters


def guard(output: Any, parameters: Parameters) -> None:
    """Makes a backward fail that comes when the parameters of its forward are gone.

    Args:
        output: What forward gave: a tensor, or tensors in tuples, lists and mappings; others
            are not guarded.
        parameters: What it used.
    """
    generation = parameters.generation

    def check(_: Tensor) -> None:
        if parameters.generation != generation:
            raise RuntimeError(
                "backward() after the full parameters of its forward() were freed or replaced; "
                "run every backward() before sync_gradients() and reshard()"
            )

    for tensor in _tensors(output):
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(check)  # type: ignore[no-untyped-call]


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _tensors(part)
    elif isinstance(output, Mapping):
        yield from _tensors(tuple(output.values()))
