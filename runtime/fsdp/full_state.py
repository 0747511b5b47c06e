"""The state dict of the bare module, gathered from sharded parameters and loaded into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runtime.checkpoint.format import plain_key
from runtime.collective import Collective
from runtime.fsdp.exchange import from_rank0
from runtime.fsdp.replicated import ReplicatedParameters
from runtime.fsdp.sharded import ShardedParameters

ParameterStore = ShardedParameters | ReplicatedParameters
_EXTRA = "_extra_state"


def gather_state(
    module: nn.Module, parameters: ParameterStore, world: Collective, *, keep: bool
) -> dict[str, Any]:
    """Return the bare module's state dict in CPU memory; a collective call.

    Keys are the same with and without compiled submodules.

    Args:
        keep: True if this rank gets the state; otherwise it gets an empty dict.

    Returns:
        Full parameters, and rank 0's buffers. Tied names share their memory.
    """
    entries = _entries(module, parameters)
    values: dict[int, Tensor] = {}
    for index, full in parameters.full_values():
        if keep:
            values[id(parameters.shards[index])] = full.detach().to("cpu", copy=True)
    for entry in entries.values():
        if isinstance(entry, Tensor) and id(entry) not in values and not _is_in(entry, parameters):
            values[id(entry)] = from_rank0(entry, world).to("cpu")
    if not keep:
        return {}
    return {
        plain_key(name): values[id(entry)] if isinstance(entry, Tensor) else entry
        for name, entry in entries.items()
    }


def load_state(
    module: nn.Module, parameters: ParameterStore, state: Mapping[str, Any], *, strict: bool
) -> None:
    """Load this rank's part of a full state dict; no collective call.

    Args:
        state: Tensors of full shapes on any device, under the bare module's keys, compiled or not.
        strict: True if the keys must be exactly those of the module.

    Raises:
        ValueError: Keys or shapes do not fit; nothing was changed.
    """
    was_changed = parameters.shards_changed
    entries = _entries(module, parameters)
    own = {plain_key(name): name for name in entries}
    state = {own.get(plain_key(key), key): value for key, value in state.items()}
    if strict:
        _check_keys(entries, state)
    indices = {id(shard): index for index, shard in enumerate(parameters.shards)}
    for name, entry in entries.items():
        given = state.get(name, entry)
        if not isinstance(entry, Tensor):
            continue
        if not isinstance(given, Tensor):
            raise ValueError(f"the state's {name!r} is a {type(given).__name__}, not a tensor")
        index = indices.get(id(entry))
        shape = entry.size() if index is None else parameters.shape_of(index)
        if name in state and given.size() != shape:
            raise ValueError(
                f"the state's {name!r} has the shape {tuple(given.size())}, the module's is "
                f"{tuple(shape)}; load the state of the same model"
            )
    for name, entry in entries.items():
        if name not in state:
            continue
        if not isinstance(entry, Tensor):
            owner = name.removesuffix(_EXTRA).removesuffix(".")
            module.get_submodule(owner).set_extra_state(state[name])
        elif id(entry) in indices:
            parameters.load(indices[id(entry)], state[name])
        else:
            with torch.no_grad():
                entry.copy_(state[name])
    parameters.mark_loaded(was_changed=was_changed)


def sync_buffers(module: nn.Module, world: Collective) -> None:
    """Copy rank 0's buffers to every rank; a collective call."""
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.copy_(from_rank0(buffer, world))


def _entries(module: nn.Module, parameters: ParameterStore) -> dict[str, Any]:
    """The entries of the state dict: shards, buffers and extra state."""
    with parameters.as_shards():
        return dict(module.state_dict(keep_vars=True))


def _is_in(tensor: Tensor, parameters: ParameterStore) -> bool:
    return any(tensor is shard for shard in parameters.shards)


def _check_keys(entries: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    missing = [name for name in entries if name not in state]
    unexpected = [name for name in state if name not in entries]
    if missing or unexpected:
        raise ValueError(
            f"the state does not fit the module: missing {missing}, unexpected {unexpected}; load "
            "the full_state_dict() of the same model, or pass strict=False"
        )
