"""Loading an optimizer's state that was made elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_OWN = ("capturable", "fused", "foreach")
"""Settings that say how an optimizer works where it is, and not what it computes."""


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """As ``optimizer.load_state_dict(state)``, but for how the optimizer works.

    Whether it counts its steps on the device, for one, stays as it is here, and the counts
    go where they are looked for.

    Args:
        optimizer: On any device.
        state: Of an optimizer of the same kind and parameters; its containers are changed.
    """
    for own, given in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for name in _OWN:
            given.pop(name, None)
        for name, value in own.items():
            if name != "params":
                given.setdefault(name, value)  # also what another version of PyTorch lacks
    optimizer.load_state_dict(state)
    for group in optimizer.param_groups:
        on_device = group.get("capturable") or group.get("fused")
        for p in group["params"]:
            step = optimizer.state.get(p, {}).get("step")
            if isinstance(step, Tensor):
                optimizer.state[p]["step"] = step.to(p.device if on_device else "cpu")
