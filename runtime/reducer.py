"""Gradients averaged over the ranks, under lockstep.

The host reads the device only for the flags that say which parameters got a gradient, and
only where this rank alone cannot know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.collective import Collective
from runtime.finite import StepJudge
from runtime.flat import FlatParams


class Packed(NamedTuple):
    """What a rank gives to a reduction.

    Attributes:
        grads: Its own gradients, one for each parameter.
        complete: Whether every parameter has one.
    """

    grads: Sequence[Tensor | None]
    complete: bool


NOTHING = Packed([], complete=False)


class GradientReducer:
    """Averages gradients over the ranks, weighted by samples, through one flat tensor.

    Behind the gradients of the first dtype lies a flag for each parameter: a parameter
    that got no gradient on any rank keeps ``.grad is None`` for the optimizer. Where steps
    are judged, a last element tells every rank whether all losses are finite.

    Args:
        params: The replica's parameters.
        collective: Where the ranks meet.
        judge: Judges what was reduced.
        comm: The context for collectives, see :meth:`DeviceContext.comm`.

    Attributes:
        collective: Where the ranks meet; replaced when one of them is gone.
        packed: What :meth:`pack` has found.
    """

    def __init__(
        self,
        params: FlatParams,
        collective: Collective,
        judge: StepJudge | None = None,
        comm: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._params = params.params
        self.collective = collective
        self._judge = judge
        self._comm = comm
        num = len(self._params)
        first, *rest = params.flats
        extra = num if judge is None else num + 1
        self._flats = [first.new_zeros(first.numel() + extra), *(torch.zeros_like(f) for f in rest)]
        self._flags = self._flats[0][first.numel() : first.numel() + num]
        self._loss_flag = self._flats[0][first.numel() + num :]
        self._views = params.views([self._flats[0][: first.numel()], *self._flats[1:]])
        self.packed = NOTHING

    def pack(self, num_samples: int, losses: Sequence[Tensor] = ()) -> None:
        """Write this rank's gradients, flags and losses into the flat tensors.

        Does not wait for the device, and where every parameter has a gradient it issues
        nothing but work on the device, so that it may be captured.

        Args:
            num_samples: Samples behind this rank's gradients; 0: it only receives.
            losses: Of the step.
        """
        grads = [p.grad for p in self._params]
        complete = num_samples > 0 and not any(g is None for g in grads)
        if complete:
            torch._foreach_copy_(self._views, grads)  # type: ignore[arg-type]
            # Each time: a peer that lacks a parameter halves its flag, which would end at 0.
            self._flags.fill_(1)
        elif num_samples > 0:
            for view, grad in zip(self._views, grads, strict=True):
                view.zero_() if grad is None else view.copy_(grad)
            told = torch.tensor([g is not None for g in grads])
            self._flags.copy_(told, non_blocking=True)
        if self._judge is not None:
            self._judge.write_flag(self._loss_flag, losses)
        self.packed = Packed(grads, complete=complete)

    def exchange(self, num_samples: int) -> bool:
        """Replace what was packed by the weighted mean over the ranks.

        Args:
            num_samples: As :meth:`pack` was told.

        Returns:
            Whether the step may be made; if not, it is taken back.

        Raises:
            NonFiniteError, CollectiveAborted: See :meth:`StepJudge.accept_reduced`.
        """
        with self._comm():
            self.collective.weighted_mean_(self._flats, num_samples)
        return self._judge is None or self._judge.accept_reduced(
            self._flats, self._loss_flag, self.packed.grads, self.collective
        )

    def unpack(self) -> None:
        """Make what was reduced the parameters' ``.grad``."""
        used = None if self.packed.complete else (self._flags > 0).tolist()
        for i, (p, view) in enumerate(zip(self._params, self._views, strict=True)):
            p.grad = view if used is None or used[i] else None
        self.packed = Packed([], complete=self.packed.complete)  # the memory of the others
