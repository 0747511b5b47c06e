"""Detection of changes to a model and its optimizer that training does not follow."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from runtime.replica.flat import FlatState, checksum
from runtime.replica.schedule import Schedule


class StructureCheck:
    """Compares a replica's model and optimizer with those that the run began with."""

    def __init__(
        self,
        model: nn.Module,
        state: FlatState,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
    ) -> None:
        self._model = model
        self._state = state
        self._optimizer = optimizer
        self._schedule = schedule
        self._flat = {id(p): name for name, p in zip(*self._names_and_params(), strict=True)}
        self._trained = set(map(id, state.params.trained))
        self._saved = set(_saved_names(model))
        self._constants = {n: checksum(t) for n, t in state.buffers.constants() if _is_dense(t)}

    def _names_and_params(self) -> tuple[list[str], list[nn.Parameter]]:
        return self._state.params.names, self._state.params.params

    def check(self) -> None:
        """Check the present model and optimizer; waits for the device if buffers are constant.

        Raises:
            ValueError: A parameter or a buffer was added, replaced or renamed, a frozen parameter
                requires a gradient, a constant buffer has changed, or the optimizer has other
                parameters or fewer groups than its scheduler.
            RuntimeError: A buffer's shape has changed.
        """
        self._check_params()
        self._check_optimizer()
        self._state.buffers.check_shapes()
        for name in _saved_names(self._model):
            if name not in self._saved:
                raise ValueError(
                    f"{name!r} was added to the model during the run, so that replicas neither "
                    "average nor save it: register it in model_factory, or keep it as a plain "
                    "attribute or a buffer with persistent=False, which is local to each worker"
                )
        for name, t in self._state.buffers.constants():
            if name in self._constants and not torch.equal(checksum(t), self._constants[name]):
                raise ValueError(
                    f"buffer {name!r} of {t.dtype} changed during training, and values of that "
                    "dtype cannot be averaged: keep it in float32, or as a plain attribute, which "
                    "is local to each worker"
                )

    def _check_params(self) -> None:
        present = {id(p): name for name, p in self._model.named_parameters()}
        for key, name in self._flat.items():
            if present.get(key) != name:
                what = f"is now {present[key]!r}" if key in present else "was replaced or removed"
                raise ValueError(
                    f"parameter {name!r} {what}: assign to it in place (p.copy_(...)), and change "
                    "the model's structure, parametrizations included, in model_factory only"
                )
        for name, p in self._model.named_parameters():
            if p.requires_grad and id(p) not in self._flat:
                raise ValueError(
                    f"parameter {name!r} requires a gradient, but was added or unfrozen during the "
                    "run, so that replicas neither reduce nor average it: let it require a "
                    "gradient in model_factory, freeze it by p.requires_grad_(False) in "
                    "epoch_fn(0), and unfreeze it later; its parameter group is then made by "
                    "optim_factory"
                )

    def _check_optimizer(self) -> None:
        groups = self._optimizer.param_groups
        for number, group in enumerate(groups):
            if not all(id(p) in self._trained for p in group["params"]):
                raise ValueError(
                    f"parameter group {number} of the optimizer has a parameter that is not one "
                    "of this worker's model that required a gradient when the run began"
                )
        if self._schedule.scheduler is not None and self._schedule.num_groups > len(groups):
            raise ValueError(
                f"the optimizer has {len(groups)} parameter groups, its scheduler "
                f"{self._schedule.num_groups}: call worker.set_scheduler(f) after removing groups"
            )


def _saved_names(model: nn.Module) -> Iterator[str]:
    """Names of the parameters and of the buffers that a state dict contains."""
    for prefix, sub in model.named_modules():
        # Script modules have mappings that do not iterate over their keys.
        for key, value in (*sub._parameters.items(), *sub._buffers.items()):
            if value is not None and key not in sub._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key


def _is_dense(t: torch.Tensor) -> bool:
    return t.layout is torch.strided
