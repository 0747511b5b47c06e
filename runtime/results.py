"""Results of a run: TrainedState and WorkerFailure."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from coordinator.metrics import EpochMetrics
from coordinator.run_state import Outcome
from runtime.checkpoint.files import save_weights
from runtime.checkpoint.format import plain, plain_key
from runtime.core.checks import check_path
from runtime.core.errors import CheckpointError
from runtime.replica.flat import FlatState, modules_with_extra_state

EXTRA_STATE = "_extra_state"
"""Key of a module's extra state in ``state_dict()``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedState:
    """The averaged model at the end of a run.

    Attributes:
        params: All parameters, trained or frozen, on the CPU, under the bare module's names, in
            its order.
        buffers: All buffers, persistent or not, likewise.
        metrics: One entry for each closed epoch.
        failures: Workers that died during the run.
        stopped: True if the run was stopped before its end.
        checkpoint_errors: The last error of writing checkpoints, if any; all are logged.
    """

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    metrics: tuple[EpochMetrics, ...] = ()
    failures: tuple[WorkerFailure, ...] = ()
    stopped: bool = False
    checkpoint_errors: tuple[BaseException, ...] = ()
    _keys: tuple[str, ...] = field(default=(), repr=False)
    _extra: dict[str, Any] = field(default_factory=dict, repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights as a safetensors file, which a bare module loads:
        ``Net().load_state_dict(safetensors.torch.load_file(path))``.

        Blocks until the file is on disk. If this raises or the process dies, ``path`` keeps its
        old content. Tied tensors are written under each of their names. Extra state of modules
        (``get_extra_state``) is omitted: a model that has some loads the file with
        ``strict=False``.

        Raises:
            OSError, CheckpointError: The file could not be written, or safetensors does not
                support a tensor's type.
        """
        weights = {k: v for k, v in self.state_dict().items() if k not in self._extra}
        save_weights(check_path("save", path), weights)

    def state_dict(self) -> OrderedDict[str, Any]:
        """The state dict of the bare module, in its order, for ``Net().load_state_dict(...)``.

        Contains tensors, and the extra state of modules that have some.
        """
        every = {**self.params, **self.buffers, **self._extra}
        return OrderedDict((key, every[key]) for key in self._keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """A worker that failed.

    Attributes:
        rank: The worker's rank.
        epoch: Epoch of the failure.
        step: Batches that the worker had trained.
        error: Its exception.
    """

    rank: int
    epoch: int
    step: int
    error: BaseException


def assemble_state(
    model: nn.Module,
    flat: FlatState,
    outcome: Outcome,
    checkpoint_errors: tuple[BaseException, ...] = (),
) -> TrainedState:
    """Load the final average into the model and copy its state to the CPU.

    Args:
        model: A replica whose worker has exited.
        flat: Its flat state.
        outcome: The outcome of a run that did not fail.
        checkpoint_errors: Errors of writing checkpoints.
    """
    assert outcome.payload is not None, "a run without a failure has a final state"
    with torch.no_grad():
        flat.load(outcome.payload)
        copies: dict[int, Tensor] = {}

        def copy(t: Tensor) -> Tensor:
            if id(t) not in copies:
                copies[id(t)] = t.detach().to("cpu", copy=True)
            return copies[id(t)]

        params = {plain_key(n): copy(p) for n, p in model.named_parameters()}
        buffers = {plain_key(n): copy(b) for n, b in model.named_buffers()}
        state = {plain_key(k): v for k, v in model.state_dict(keep_vars=True).items()}
        extra = {k: _copied(v) for k, v in state.items() if k.rpartition(".")[2] == EXTRA_STATE}
        keys = []
        for key, value in state.items():
            if key in extra:
                keys.append(key)
                continue
            if not isinstance(value, Tensor):
                continue
            keys.append(key)
            if key not in params and key not in buffers:
                # The second name of a tied tensor.
                (params if isinstance(value, nn.Parameter) else buffers)[key] = copy(value)
    return TrainedState(
        params=params,
        buffers=buffers,
        metrics=tuple(outcome.metrics),
        failures=tuple(
            WorkerFailure(rank=f.rank, epoch=f.epoch, step=f.step, error=f.error)
            for f in outcome.failures
        ),
        stopped=outcome.stopped,
        checkpoint_errors=checkpoint_errors,
        _keys=tuple(keys),
        _extra=extra,
    )


@torch.no_grad()
def load_trained(module: nn.Module, state: TrainedState) -> None:
    """Copy the trained values into a module of the same structure, on its devices."""
    values = {**state.params, **state.buffers}
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        t.copy_(values[plain_key(name)])
    for name, sub in modules_with_extra_state(module).items():
        sub.set_extra_state(
            state._extra[plain_key(f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE)]
        )


def _copied(value: Any) -> Any:
    """Extra state, copied to the CPU if its types are supported."""
    try:
        return plain(value, EXTRA_STATE, copy=True)
    except CheckpointError:
        return value
