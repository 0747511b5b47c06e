"""The optimizer's state of ranks that hold shards of the parameters: joined, and cut again.

Each rank's part of a checkpoint has the state of its own shards. Joined they are the state of an
optimizer of whole parameters, which any number of ranks can load, with shards or without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from runtime.checkpoint.content import SavedRank, SavedStepper

_SCALARS = {"step", "mu_product", "eta", "mu"}
"""Scalar states of PyTorch's optimizers, which a parameter without dimensions has as well."""


def missing_shards(ranks: Sequence[SavedRank]) -> list[int]:
    """The shards without the state of any rank; empty without shards."""
    facts = [state.shards for state in ranks if state.shards is not None]
    present = {each.rank for each in facts}
    return sorted(set(range(facts[0].num_shards if facts else 0)) - present)


def check_divisible(state: SavedRank, rank: int) -> None:
    """Check that all tensors of an optimizer of shards are in the states of its parameters.

    Raises:
        ValueError: Others are there, which cannot be joined with those of other ranks.
    """
    optimizer = state.stepper.optimizer
    own = {k: v for k, v in optimizer.items() if k not in ("state", "param_groups")}
    own |= {k: v for k, v in optimizer["state"].items() if type(k) is not int}
    for key, value in own.items() if state.shards is not None else ():
        if any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in tree_leaves(value)):
            raise ValueError(
                f"rank {rank}['optimizer'] has tensors in {key!r}, which sharded(...) cannot join "
                "with those of other ranks: keep them in the state of the parameters, self.state[p]"
            )


def check_shards(ranks: Sequence[SavedRank]) -> None:
    """Check that the states of all ranks have all shards.

    Raises:
        ValueError: They have not.
    """
    if missing := missing_shards(ranks):
        raise ValueError(f"it lacks shards {missing} of the optimizer's state")
    for rank, state in enumerate(ranks):
        facts, num = state.shards, len(_numbers(state))
        if facts is not None and not len(facts.shapes) == len(facts.strides) == num:
            raise ValueError(f"rank {rank} describes other shards than its optimizer has")
        if set(_names(state).values()) != set(_names(ranks[0]).values()):
            raise ValueError(
                f"the optimizer of rank {rank} has other parameters than that of rank 0"
            )


def join_shards(ranks: Sequence[SavedRank]) -> dict[Any, Any]:
    """The states of whole parameters, by name, and the optimizer's own by their keys.

    Optimizers of the ranks may hold their parameters in different orders.

    Args:
        ranks: The states of all ranks. Of those with the same shard one is used.
    """
    by_shard = {s.shards.rank: s for s in reversed(ranks) if s.shards is not None}
    first, *others = (by_shard[i] for i in sorted(by_shard))
    numbers = [{name: i for i, name in _names(state).items()} for state in others]
    names, facts = _names(first), first.shards
    assert facts is not None
    joined: dict[Any, Any] = {}
    for i, own in first.stepper.optimizer["state"].items():
        if type(i) is not int:  # the optimizer's own
            joined[i] = own
            continue
        pairs = zip(others, numbers, strict=True)
        parts = [own, *(s.stepper.optimizer["state"][number[names[i]]] for s, number in pairs)]
        shape, stride = facts.shapes[i], facts.strides[i]
        joined[names[i]] = {key: _join([part[key] for part in parts], shape, stride) for key in own}
    return joined


def with_states(state: SavedRank, joined: Mapping[Any, Any]) -> SavedStepper:
    """The optimizer's state of a rank with the states of whole parameters.

    Args:
        joined: The states by name, see :func:`join_shards`.
    """
    names = _names(state)
    own = {key: value for key, value in joined.items() if key not in names.values()}
    own |= {i: joined[name] for i, name in names.items() if name in joined}
    return replace(state.stepper, optimizer={**state.stepper.optimizer, "state": own})


def _numbers(state: SavedRank) -> list[int]:
    return [i for group in state.stepper.optimizer["param_groups"] for i in group["params"]]


def _names(state: SavedRank) -> dict[int, Any]:
    """The name of each parameter of a rank's optimizer by its number; without names, the number."""
    numbers = _numbers(state)
    names = [name for group in state.groups for name in group]
    if len(set(names)) != len(numbers) or "" in names:
        return {i: i for i in numbers}
    return dict(zip(numbers, names, strict=True))


def _join(values: Sequence[Any], shape: Sequence[int], stride: Sequence[int]) -> Any:
    first = values[0]
    if not isinstance(first, Tensor) or first.dim() != 1:
        return first
    whole = torch.cat(list(values))
    return whole.as_strided(shape, stride) if whole.numel() == math.prod(shape) else first


def cut_state(
    state: Mapping[str, Any],
    shapes: Sequence[Sequence[int]],
    cut: Callable[[int, Tensor], Tensor],
) -> dict[str, Any]:
    """The optimizer's state of a rank's shards.

    Args:
        state: The optimizer's state of whole parameters.
        shapes: The shape of each whole parameter, in the order of the optimizer.
        cut: Returns the rank's part of a tensor of the shape of a parameter, by its number.
    """

    def part(i: int, key: str, value: Any) -> Any:
        is_whole = isinstance(value, Tensor) and list(value.shape) == list(shapes[i])
        if not is_whole or (not shapes[i] and key in _SCALARS):
            return value
        return cut(i, value)

    states = {
        i: {key: part(i, key, value) for key, value in own.items()} if type(i) is int else own
        for i, own in state["state"].items()
    }
    return {**state, "state": states}
