"""Steppers of a model on the CPU."""

from __future__ import annotations

import torch

from runtime.replica.flat import FlatParams
from runtime.replica.optimizer_update import OptimizerPart, OptimizerUpdate
from runtime.replica.stepper import Stepper
from runtime.replica.train_fn_checks import TrainFnChecks

CPU = torch.device("cpu")


def part_of(model, optimizer, *, params=None, **objects):
    """An optimizer with the objects of its steps."""
    params = FlatParams(model) if params is None else params
    checks = TrainFnChecks(model, params, is_reduced="reducer" in objects)
    return OptimizerPart(params, optimizer, checks, **objects)


def stepper_of(model, optimizer, *, precision=None, is_prompt=True, **objects):
    """A stepper; ``objects`` are those of the optimizer's steps."""
    part = part_of(model, optimizer, **objects)
    return Stepper(model, part, OptimizerUpdate(precision), is_prompt=is_prompt)
