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
from runtime.collective.base import LOW_PRECISION
from runtime.core.weight import WindowWeight
from runtime.replica.flat import FlatParams
from runtime.replica.non_finite import StepJudge


class Packed(NamedTuple):
    """What a rank gives to a reduction.

    Attributes:
        grads: Its own gradients, one for each parameter.
        complete: Whether every parameter has one.
        weighed: Whether the step's loss has a weight other than its samples.
    """

    grads: Sequence[Tensor | None]
    complete: bool
    weighed: bool = False


NOTHING = Packed([], complete=False)


class GradientReducer:
    """Averages gradients over the ranks through one flat tensor.

    They are weighted by samples, or by what :class:`~runtime.core.weight.WindowWeight` says: as soon as
    one rank's loss has a weight, each such rank multiplies its gradients by its weight for each
    sample, which lies in one more element, and the reduced gradients are divided by what that
    element became. The ranks agree on it as they meet, and nothing else changes without weights.

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
        is_empty: Whether the weights of the last exchange sum to 0: there is nothing to step by.
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
        sizes = [flat.numel() for flat in params.flats]
        room = [0] * len(sizes)
        room[0] = num if judge is None else num + 1
        # Where a total has most digits; 16 bits would round it to three of them.
        widest = max(range(len(sizes)), key=lambda i: (params.flats[i].element_size(), -i))
        self._weight_apart = params.flats[widest].dtype in LOW_PRECISION
        if not self._weight_apart:
            room[widest] += 1
        self._flats = [
            flat.new_zeros(flat.numel() + more)
            for flat, more in zip(params.flats, room, strict=True)
        ]
        self._grads = [flat[:size] for flat, size in zip(self._flats, sizes, strict=True)]
        self._flags = self._flats[0][sizes[0] : sizes[0] + num]
        end = sizes[0] + num
        self._loss_flag = self._flats[0][end : end + int(judge is not None)]
        # 0 wherever no weight was told.
        self._weight = self._flats[widest][-1:]
        if self._weight_apart:
            self._weight = self._weight.new_zeros(1, dtype=torch.float32)
        self._views = params.views(self._grads)
        self.packed = NOTHING
        self.is_empty = False

    def pack(
        self, num_samples: int, losses: Sequence[Tensor] = (), weight: WindowWeight | None = None
    ) -> None:
        """Write this rank's gradients, flags and losses into the flat tensors.

        Does not wait for the device, and where every parameter has a gradient it issues
        nothing but work on the device, so that it may be captured.

        Args:
            num_samples: Samples behind this rank's gradients; 0: it only receives.
            losses: Of the step.
            weight: Of the step; ``None``: its samples.
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
        if weight is not None:
            factor = weight.unit / num_samples
            for flat in self._grads:
                flat.mul_(factor)
            value = weight.units * factor
            if isinstance(value, Tensor):
                self._weight.copy_(value)
            else:
                self._weight.fill_(value)
        self.packed = Packed(grads, complete=complete, weighed=weight is not None)

    def exchange(self, num_samples: int) -> bool:
        """Replace what was packed by the weighted mean over the ranks.

        Args:
            num_samples: As :meth:`pack` was told.

        Returns:
            Whether the step may be made; if not, it is taken back. Whether there is anything
            to step by is in :attr:`is_empty`.

        Raises:
            NonFiniteError, CollectiveAborted: See :meth:`StepJudge.accept_reduced`.
        """
        self.is_empty = False
        told = {"tally": num_samples} if self.packed.weighed else {}
        try:
            with self._comm():
                total = self.collective.weighted_mean_(self._flats, num_samples, **told)
        except BaseException:
            self._weight.zero_()
            raise
        # The same on every rank: they have said it as they met.
        num_weighed = self.collective.tally
        mean = self._mean_weight(total, num_weighed, num_samples) if num_weighed else 1.0
        if self._judge is not None and not self._judge.accept_reduced(
            self._flats, self._loss_flag, self.packed.grads, self.collective
        ):
            return False
        if num_weighed:
            self.is_empty = not mean > 0
            if not self.is_empty:
                for flat in self._grads:
                    flat.div_(mean)
        return True

    def _mean_weight(self, total: float, num_weighed: float, num_samples: int) -> float:
        """The reduced weight for each sample; reads one number of the device.

        Args:
            total: Samples of all ranks.
            num_weighed: Those of the ranks whose loss has a weight.
            num_samples: Those of this rank.
        """
        if self._weight_apart:
            with self._comm():
                self.collective.weighted_mean_([self._weight], num_samples)
        mean = float(self._weight) + (total - num_weighed) / total
        self._weight.zero_()  # a rank without a weight writes nothing
        return mean

    def unpack(self) -> None:
        """Make what was reduced the parameters' ``.grad``."""
        used = None if self.packed.complete else (self._flags > 0).tolist()
        for i, (p, view) in enumerate(zip(self._params, self._views, strict=True)):
            p.grad = view if used is None or used[i] else None
        self.packed = Packed([], complete=self.packed.complete)  # the memory of the others
