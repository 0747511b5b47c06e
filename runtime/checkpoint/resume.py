"""Going on from a checkpoint: what is read, what must agree, what each rank is given."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coordinator.dispatch import count_batches
from runtime.checkpoint.format import CheckpointData, named_weights
from runtime.checkpoint.reader import load_newest
from runtime.core.errors import CheckpointError

logger = logging.getLogger(__name__)


_WHAT = {
    "batch_size": "batch_size",
    "num_samples": "length of the data set",
    "drop_last": "drop_last",
    "seed": "seed",
    "accumulate": "accumulate",
    "sync": "policy SYNC",
}


class ResumePoint:
    """A checkpoint that a run goes on from. Read by all threads, written by none.

    Args:
        data: The checkpoint.
        name: What it is called in errors.
    """

    def __init__(self, data: CheckpointData, name: str) -> None:
        self._data = data
        self._name = name

    @classmethod
    def read(
        cls, path: Path, compatible: Mapping[str, Any], num_epochs: int, *, missing_ok: bool
    ) -> ResumePoint | None:
        """Read the newest checkpoint that is whole; blocks.

        Args:
            path: A checkpoint, or a directory of them.
            compatible: What must agree, as :class:`CheckpointData` holds it.
            num_epochs: Epochs of the run.
            missing_ok: Start afresh if there is none.

        Returns:
            ``None``: the run starts afresh.

        Raises:
            CheckpointError: There is none that is whole, or it belongs to another run.
        """
        loaded = load_newest(path, missing_ok=missing_ok)
        if loaded is None:
            logger.info("no checkpoint in %s: the run starts afresh", path)
            return None
        point = cls(loaded.data, str(loaded.path))
        point.check(compatible, num_epochs)
        logger.info(
            "going on from %s: %d epochs closed, %d batches trained",
            loaded.path,
            loaded.data.epoch,
            loaded.data.global_step,
        )
        return point

    def check(self, compatible: Mapping[str, Any], num_epochs: int) -> None:
        """Raise ``CheckpointError`` unless the run goes with the checkpoint."""
        saved = self._data.compatible
        for name, value in compatible.items():
            if saved.get(name) != value:
                raise CheckpointError(
                    f"{self._name} was written with {_WHAT[name]} {saved.get(name)!r}, this run "
                    f"has {value!r}: give the same, or start afresh without resume(path)"
                )
        begun = [e["epoch"] + 1 for e in self._data.run["epochs"] if e["consumed"]]
        done = max([len(self._data.run["metrics"]), *begun])
        if num_epochs < done:
            raise CheckpointError(
                f"{self._name} is in its epoch number {done}, this run has num_epochs("
                f"{num_epochs}): give at least {done}"
            )
        per_epoch = count_batches(
            compatible["num_samples"], compatible["batch_size"], drop_last=compatible["drop_last"]
        )
        assert self._data.global_step <= per_epoch * num_epochs

    @property
    def run(self) -> Mapping[str, Any]:
        """The coordinator's state."""
        return self._data.run

    def rank(self, rank: int) -> Mapping[str, Any]:
        """A rank's own state; at another world size that of ``rank mod`` the saved one.

        A rank that was not there draws random numbers of its own, not those of another.
        """
        saved = self._data.ranks
        state = saved[rank % len(saved)]
        return state if rank < len(saved) else {**state, "generators": None}

    def load_weights(self, model: nn.Module) -> None:
        """Give a model the checkpoint's weights.

        Raises:
            CheckpointError: It is another model; names the first difference.
        """
        saved = self._data.weights
        own = named_weights(model)
        difference = _first_difference(saved, own)
        if difference is not None:
            raise CheckpointError(
                f"{self._name} holds another model than model_factory builds: {difference}; "
                "build the same architecture, or start afresh without resume(path)"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved[name])


def _first_difference(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str | None:
    for name, theirs in saved.items():
        mine = own.get(name)
        if mine is None:
            return f"the checkpoint has {name!r}, the model has not"
        if mine.shape != theirs.shape:
            return (
                f"the shape of {name!r} is {tuple(theirs.shape)} in the checkpoint and "
                f"{tuple(mine.shape)} in the model"
            )
        if mine.dtype != theirs.dtype:
            return f"the dtype of {name!r} is {theirs.dtype} there and {mine.dtype} in the model"
    extra = next((name for name in own if name not in saved), None)
    return None if extra is None else f"the model has {extra!r}, the checkpoint has not"
