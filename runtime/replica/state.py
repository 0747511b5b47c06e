"""What training may change in a module besides trained parameters and buffers.

Frozen parameters are no part of an average, and most never change; but some are written to
by the user's code, such as a teacher that follows the weights. Modules may keep extra state
of their own (``get_extra_state``).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runtime.checkpoint.format import plain
from runtime.core.errors import CheckpointError

logger = logging.getLogger(__name__)

_WORD_BYTES = 8
_PART = 1 << 22
"""Words that are summed at once."""


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that have state besides tensors, by name; the model itself is ``""``."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def mark(t: Tensor) -> Tensor:
    """A number that changes when the tensor's content does; stays on its device.

    The sum of its bytes as 64-bit words, part by part: exact, where a norm would round a
    small change away. Reads the tensor once.
    """
    t = t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    content = t.view(torch.uint8)
    if content.storage_offset() % _WORD_BYTES:
        content = content.clone()
    end = content.numel() // _WORD_BYTES * _WORD_BYTES
    words = content[:end].view(torch.int64)
    total = content[end:].sum(dtype=torch.int64)
    for begin in range(0, words.numel(), _PART):
        total = total * 31 + words[begin : begin + _PART].sum()
    return total


class ModuleState:
    """Takes and gives back one replica's frozen parameters and extra state.

    Used in the worker's thread, on the stream that is current there.

    Args:
        model: The replica, with the weights that a checkpoint's file of weights holds.
    """

    def __init__(self, model: nn.Module) -> None:
        self._frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        self._marks = {name: mark(p) for name, p in self._frozen.items()}
        self._modules = modules_with_extra_state(model)
        self._told: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """Frozen parameters that have changed, and extra state that a file can hold; no copies.

        Waits for the device where anything is frozen.
        """
        frozen = {
            name: p.detach()
            for name, p in self._frozen.items()
            if not torch.equal(mark(p), self._marks[name])
        }
        extra: dict[str, Any] = {}
        for name, module in self._modules.items():
            state = module.get_extra_state()
            try:
                extra[name] = plain(state, f"the extra state of module {name!r}")
            except CheckpointError as error:
                self._warn(name, f"{error}. Checkpoints are written without it")
        return {"frozen": frozen, "extra_state": extra}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, from a replica of the same kind."""
        with torch.no_grad():
            for name, saved in state["frozen"].items():
                self._frozen[name].copy_(saved)
        extra = state["extra_state"]
        for name, module in self._modules.items():
            if name in extra:
                module.set_extra_state(copy.deepcopy(extra[name]))
            else:
                self._warn(name, f"the extra state of module {name!r} was not saved: it is new")

    def _warn(self, name: str, message: str) -> None:
        if name not in self._told:
            self._told.add(name)
            logger.warning("%s", message)
