"""Checkpoint tests: small checkpoints, their comparison, and files with other content."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import is_dataclass, replace

import torch

from coordinator.codec import encode
from coordinator.config import CoordinatorConfig
from coordinator.coordinator_checkpoint import capture_run
from coordinator.metrics import EpochAccumulator
from coordinator.run_state import RunState
from runtime.checkpoint.content import (
    CheckpointData,
    SavedModule,
    SavedRank,
    SavedSchedule,
    SavedSettings,
    SavedStepper,
)
from runtime.checkpoint.files import flush_and_digest, write_pickle
from runtime.checkpoint.format import MANIFEST, STATE, WEIGHTS, Manifest, rank_file


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
    return CheckpointData(
        weights=weights,
        ranks=tuple(saved_rank(rank, step) for rank in range(ranks)),
        run=saved_run(step, ranks=ranks, epoch=epoch),
        settings=SavedSettings(
            global_batch_size=None,
            batch_size=2,
            num_samples=16,
            drop_last=False,
            seed=0,
            accumulate=1,
            sync=False,
            sampler=False,
            stream=False,
            shuffle="as a whole",
        ),
    )


def saved_run(step=10, *, ranks=2, epoch=1):
    """The coordinator's state after ``step`` batches and ``epoch`` epochs."""
    config = CoordinatorConfig(
        devices=("cpu",) * ranks, num_samples=16, batch_size=2, num_epochs=100
    )
    new = capture_run(RunState(config), (), 0.0, {})
    metrics = (
        EpochAccumulator(ranks).close(epoch=e, epoch_s=0.1, num_samples=16, devices=("cpu",))
        for e in range(epoch)
    )
    return replace(new, global_step=step, next_epoch=epoch, metrics=tuple(metrics))


def saved_rank(rank=0, step=10):
    """A rank's state, with values of every type that an optimizer may hold."""
    state = {
        "state": {0: {"step": torch.tensor(float(step))}},
        "param_groups": [],
        "generator": torch.Generator().manual_seed(rank + step).get_state(),
        "milestones": Counter({3: 1}),
        "ordered": OrderedDict(b=1, a=2),
        "odd": [None, True, math.inf, -0.0, 2**80, "text", (1, (2.5,))],
        "rank": rank,
    }
    return SavedRank(
        stepper=SavedStepper(kind="Odd", optimizer=state),
        module=SavedModule(frozen={}, extra_state={}, modes={}, requires_grad={}),
        schedule=SavedSchedule(
            position=0,
            origin=0,
            attached_in=None,
            kind="",
            every=1,
            scale=1.0,
            base=(),
            scheduler=None,
            settings={},
        ),
        groups=(),
        added=(),
        lr_scale=1.0,
        generators=None,
        version=0,
        local_step=step,
        epoch=0,
        begun_epoch=0,
        body_steps=step,
        buffers={},
        together=(0, 0, 0),
    )


def same(a, b):
    """True if two values are bitwise equal, with equal types and order."""
    if type(a) is not type(b):
        return False
    if is_dataclass(a):
        return same(encode(a), encode(b))
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


def rewrite(path, edit):
    """Edit the content of a written checkpoint, as of a version that wrote other values.

    Args:
        edit: Called with the coordinator's state as ``"run"``, the ranks' as ``"ranks"`` and so on.
    """
    manifest = Manifest.from_bytes((path / MANIFEST).read_bytes())
    numbers = range(manifest.world_size)
    parts = torch.load(path / STATE, weights_only=True)
    parts["ranks"] = [torch.load(path / rank_file(i), weights_only=True) for i in numbers]
    edit(parts)
    for i in numbers:
        (path / rank_file(i)).unlink()
    files = {STATE: {**parts, "ranks": []}}
    files |= {rank_file(i): rank for i, rank in enumerate(parts["ranks"])}
    for name, content in files.items():
        (path / name).unlink(missing_ok=True)
        write_pickle(path / name, content)
    found = {name: flush_and_digest(path / name) for name in (*files, WEIGHTS)}
    step, epoch = parts["run"]["global_step"], len(parts["run"]["metrics"])
    manifest = replace(manifest, files=found, global_step=step, epoch=epoch)
    (path / MANIFEST).write_bytes(manifest.to_bytes())
    return path


def names(directory):
    """All names in a directory, including hidden ones."""
    return sorted(path.name for path in directory.iterdir())
