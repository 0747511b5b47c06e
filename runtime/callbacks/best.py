"""Keeping the weights of the best epoch."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from coordinator.metrics import EpochMetrics
from runtime.callbacks.base import Callback, Running, Watched
from runtime.checkpoint.files import save_weights
from runtime.checkpoint.format import named_weights
from runtime.core.checks import check_path


class KeepBest(Callback):
    """Keeps the averaged weights of the epoch with the best metric in a safetensors file, which
    a bare module loads: ``Net().load_state_dict(safetensors.torch.load_file(path))``.

    The file is written in the metrics thread, whole or not at all. Until an epoch's metrics are
    known its weights are held in the host's memory, once. In a run that was resumed the first
    epoch counts as better than all before.

    Args:
        path: The file; its directory is made if needed.
        metric: As for :class:`EarlyStopping`.
        mode: ``"min"``: less is better; ``"max"``: more.

    Attributes:
        path: The file.
        best: The best value; ``None``: there was none.
        best_epoch: Its epoch, whose weights the file holds.

    Raises:
        TypeError, ValueError: An argument of the wrong type, or out of range.
    """

    takes_weights = True

    def __init__(
        self, path: str | os.PathLike[str], metric: str = "avg_loss", mode: str = "min"
    ) -> None:
        super().__init__()
        self.path: Path = check_path("KeepBest", path)
        self._make = partial(Watched, "KeepBest", metric, mode)
        self._watched = self._make()
        self._weights: dict[int, dict[str, Tensor]] = {}

    @property
    def best(self) -> float | None:
        """The best value of the run."""
        return self._watched.best

    @property
    def best_epoch(self) -> int | None:
        """Its epoch."""
        return self._watched.best_epoch

    def begin(self, run: Running) -> None:
        """Make the directory.

        Raises:
            OSError: It cannot be made.
        """
        super().begin(run)
        self._watched = self._make()
        self._weights = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def weights(self, epoch: int, model: nn.Module) -> None:
        """Copy an epoch's weights, whose metrics come later."""
        copies = {k: t.detach().to("cpu", copy=True) for k, t in named_weights(model).items()}
        with self._lock:
            self._weights[epoch] = copies

    def __call__(self, metrics: EpochMetrics) -> None:
        """Write an epoch's weights if it is the best."""
        with self._lock:
            weights = self._weights.pop(metrics.epoch, None)
        value = self._watched.read(metrics)
        if weights is None or value is None or not self._watched.improves(value, metrics.epoch):
            return
        save_weights(self.path, weights)
