"""What a checkpoint holds, in types that a file can give back without running code."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtime.core.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointData:
    """The whole state of a run between two steps.

    Nobody may write to it or to its tensors once it is handed over: it is written from
    another thread, later.

    Attributes:
        weights: Full state dict of the bare module on the CPU, in the module's order. Tied
            tensors stand under each of their names and may share memory.
        ranks: One state for each rank: optimizer, schedule, scaler, generators, own
            buffers, counters; values as :func:`plain` gives them.
        run: The coordinator's state, likewise.
        compatible: What must agree for the run to be continued, likewise.
        epoch: Closed epochs, for names and logs.
        global_step: Batches trained by all ranks together.
    """

    weights: dict[str, Tensor]
    ranks: tuple[dict[str, Any], ...]
    run: dict[str, Any]
    compatible: dict[str, Any]
    epoch: int
    global_step: int


def plain(value: Any, where: str, *, copy: bool = False, drop: bool = False) -> Any:
    """The value in types that ``torch.load(weights_only=True)`` gives back unchanged.

    Containers are rebuilt, so that later changes do not show; numbers and strings of
    other types (NumPy's scalars) become Python's own. Blocks while tensors are copied from
    a device.

    Args:
        value: Tensors, numbers, strings, bytes, ``None``, lists, tuples, sets and mappings of
            them.
        where: What it is, for the error.
        copy: Copy tensors to new CPU memory; otherwise they are taken as they are.
        drop: Leave out of mappings what a checkpoint cannot hold.

    Raises:
        CheckpointError: Something else is in it; names the place.
    """
    if value is None or isinstance(value, (bool, torch.dtype, torch.device, torch.Size)):
        return value
    if type(value) in (bytes, complex):
        return value
    if isinstance(value, Tensor) and _comes_back(value):
        return value.detach().to("cpu", copy=True) if copy else value.detach()
    if isinstance(value, str):
        return str(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        kept: dict[Any, Any] = {}
        if isinstance(value, (Counter, OrderedDict)):  # schedulers rely on them
            kept = Counter() if isinstance(value, Counter) else OrderedDict()
        for key, item in value.items():
            with suppress(CheckpointError) if drop else nullcontext():
                found = plain(item, f"{where}[{key!r}]", copy=copy, drop=drop)
                kept[plain(key, f"a key of {where}")] = found
        return kept
    if isinstance(value, (list, tuple)):
        items = [plain(item, f"{where}[{i}]", copy=copy, drop=drop) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if type(value) is set:
        return {plain(item, f"an item of {where}", copy=copy) for item in value}
    raise CheckpointError(
        f"{where} is of type {type(value).__name__}, which a checkpoint cannot hold: keep tensors, "
        "numbers, strings, lists, tuples and dicts in state dicts"
    )


def _comes_back(t: Tensor) -> bool:
    """Whether the safe reader knows the tensor's type: a subclass only if it was told of it."""
    kind = type(t)
    return kind in (Tensor, nn.Parameter) or kind in torch.serialization.get_safe_globals()
