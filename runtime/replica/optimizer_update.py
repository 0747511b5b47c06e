"""OptimizerUpdate: the update of a replica's parameters from complete gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.replica.flat import NamedParams
from runtime.replica.max_norm import MaxNorm
from runtime.replica.non_finite import StepFiniteCheck
from runtime.replica.param_ema import ParamEma
from runtime.replica.precision import Precision
from runtime.replica.reducer import GradientReducer
from runtime.replica.train_fn_checks import TrainFnChecks


class OptimizerUpdate:
    """Unscales and clips gradients, steps their optimizer, and updates the moving average.

    Args:
        rates: Context of the optimizer's step, which sets its learning rates.
        ema: Moving average of the parameters; ``None``: there is none.

    Attributes:
        precision: The precision of the passes that make the gradients.
        ema: See above.
        is_bare: The optimizer's step is all.
    """

    def __init__(
        self,
        precision: Precision | None = None,
        max_norm: MaxNorm | None = None,
        rates: Callable[[], AbstractContextManager[None]] | None = None,
        ema: ParamEma | None = None,
    ) -> None:
        self.precision = precision or Precision("fp32", torch.device("cpu"))
        self.ema = ema
        self._max_norm = max_norm or MaxNorm()
        self._rates = rates or nullcontext
        # With steps of 1 ms each call counts.
        self.is_bare = (
            rates is None
            and ema is None
            and self._max_norm.limit is None
            and not self.precision.scales
        )

    def apply(self, part: OptimizerPart, skip_flag: Tensor | None = None) -> None:
        """Step an optimizer.

        Args:
            skip_flag: On the device, 1: kernels change nothing; ``None``: the step is made.
        """
        self.precision.unscale(part.optimizer)
        if part.reducer is None:
            self._max_norm.clip(part.params.params)
        else:
            part.reducer.clip(self._max_norm)
        with self._rates():
            if skip_flag is None:
                skip_flag = self.precision.step(part.optimizer)
            else:
                _step_unless(skip_flag, part.optimizer)
        if part.reducer is not None:
            part.reducer.after_step()
        if self.ema is not None:
            self.ema.step(part.params.params if part.name else None, skip_flag)


def _step_unless(skip_flag: Tensor, optimizer: Any) -> None:
    """Step with kernels that do nothing if ``skip_flag`` is 1; nothing is read."""
    optimizer.found_inf = skip_flag
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """An optimizer with the objects of its steps.

    Attributes:
        checks: Of the function that computes its loss.
        reducer: Averages the gradients over the ranks; ``None``: each rank uses its own.
        finite_check: Checks each step before it is made; ``None``: no check.
        name: Name of the submodule that it trains; empty if there is one optimizer.
        parts: The optimizers, if it stands for several.
    """

    params: NamedParams
    optimizer: torch.optim.Optimizer
    checks: TrainFnChecks
    reducer: GradientReducer | None = None
    finite_check: StepFiniteCheck | None = None
    name: str = ""
    parts: tuple[OptimizerPart, ...] = ()

    def clear_gradients(self) -> None:
        """Drop the gradients and the reducer's state of a step."""
        if self.reducer is not None:
            self.reducer.reset()
        for p in self.params.params:
            p.grad = None
