"""Calling the user's evaluation and checkpoint functions on averaged weights."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from runtime.worker.config import EvalFn

logger = logging.getLogger(__name__)


def evaluate_model(eval_fn: EvalFn, model: nn.Module, epoch: int) -> tuple[tuple[str, float], ...]:
    """Call the evaluation function in eval mode, without gradients.

    Returns:
        Name and value of each result.

    Raises:
        TypeError: It did not return a dict of numbers.
    """
    modes = [(sub, sub.training) for sub in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            values = eval_fn(model, epoch)
    finally:
        for sub, training in modes:
            sub.training = training
    try:
        return tuple((str(name), float(value)) for name, value in values.items())
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(
            f"eval_fn returned {values!r:.200}: return a dict of floats, for instance "
            "{'accuracy': 0.98}"
        ) from error


def hand_over(
    checkpoint_fn: Callable[[int, nn.Module], object], version: int, model: nn.Module, rank: int
) -> None:
    """Call the checkpoint function; its failure is logged and stops nothing."""
    try:
        checkpoint_fn(version, model)
    except Exception:
        logger.exception("rank %d: checkpoint_fn failed for version %d", rank, version)
