"""Checkpoint tests: small checkpoints, and their comparison."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict

import torch

from runtime.checkpoint.format import CheckpointData


def make(step=10, *, ranks=2, size=16, epoch=1):
    """A checkpoint with a tensor of each dtype; its values depend on ``step``."""
    tied = torch.full((4, 3), float(step))
    weights = {
        "z.weight": torch.arange(size, dtype=torch.float32) + step,
        "a.tied": tied,
        "b.tied": tied,
        "scalar": torch.tensor(step),
        "empty": torch.zeros(0, 5, dtype=torch.bfloat16),
        "flag": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
    }
    per_rank = tuple(
        {
            "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": []},
            "generator": torch.Generator().manual_seed(rank + step).get_state(),
            "milestones": Counter({3: 1}),
            "ordered": OrderedDict(b=1, a=2),
            "odd": [None, True, math.inf, -0.0, 2**80, "text", (1, (2.5,))],
            "rank": rank,
        }
        for rank in range(ranks)
    )
    return CheckpointData(
        weights=weights,
        ranks=per_rank,
        run={"rounds": 7, "losses": [0.1, math.nan]},
        compatible={"batch_size": 2, "names": ["w"]},
        epoch=epoch,
        global_step=step,
    )


def same(a, b):
    """True if two values are bitwise equal, with equal types and order."""
    if isinstance(a, CheckpointData):
        fields = ("weights", "ranks", "run", "compatible", "epoch", "global_step")
        return all(same(getattr(a, name), getattr(b, name)) for name in fields)
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        if a.layout is not torch.strided:
            return a.layout is b.layout and same(a.to_dense(), b.to_dense())
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(*raw)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    return a == b


def names(directory):
    """All names in a directory, including hidden ones."""
    return sorted(path.name for path in directory.iterdir())
