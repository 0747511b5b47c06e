"""Gradients on their way between the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from runtime.collective import Collective
from runtime.replica.flat import FlatParams


class GradientExchange:
    """One replica's gradients, in flat tensors where the ranks meet. For its thread.

    A parameter that got no gradient on any rank keeps ``.grad is None``. Which ones got one
    is told in ``used``, a list that all ranks share: a rank writes its entry before it meets
    the others in a collective, and reads theirs after it, so nothing is read from a device.

    Args:
        params: The replica's parameters.
        rank: Its rank.
        used: For each rank which parameters had a gradient.
        comm: The context for collectives, see :meth:`DeviceContext.comm`.
    """

    def __init__(
        self,
        params: FlatParams,
        rank: int,
        used: list[list[bool]],
        comm: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._params = params.params
        self._names = params.names
        self._rank = rank
        self._used = used
        self._comm = comm
        self._flats = params.like()
        self._views = params.views(self._flats)

    def collect(self, collective: Collective) -> None:
        """Add all ranks' gradients up on rank 0; the others have none afterwards.

        What rank 0 had before is part of the sum.
        """
        self._fill()
        with self._comm():
            for flat in self._flats:
                collective.all_reduce_(flat)
        if self._rank == 0:
            self._take(self._used_anywhere())
        else:
            self.drop()

    def spread(self, collective: Collective) -> None:
        """Give rank 0's gradients, as they are now, to all ranks."""
        if self._rank == 0:
            self._fill()
        with self._comm():
            for flat in self._flats:
                collective.broadcast_(flat)
        self._take(self._used[0])

    def average(self, collective: Collective, count: int) -> None:
        """Replace every rank's gradients by their mean, weighted by ``count``."""
        self._fill(empty=count == 0)
        with self._comm():
            collective.weighted_mean_(self._flats, count)
        self._take(self._used_anywhere())

    def drop(self) -> None:
        """Forget this rank's gradients."""
        for p in self._params:
            p.grad = None

    def _fill(self, *, empty: bool = False) -> None:
        """Bring the gradients into the flat tensors, and tell which there are."""
        grads = [None if empty else p.grad for p in self._params]
        self._used[self._rank] = [g is not None for g in grads]
        if empty:  # with the weight 0 nobody looks at the tensors
            return
        targets, sources = [], []
        for name, view, grad in zip(self._names, self._views, grads, strict=True):
            if grad is view:  # of an earlier exchange, added to since
                continue
            if grad is None:
                view.zero_()
            else:
                _refuse_sparse(name, grad)
                targets.append(view)
                sources.append(grad)
        if targets:
            torch._foreach_copy_(targets, sources)

    # -- in the caller's thread, while the ranks rest --------------------------------------

    @property
    def num_elements(self) -> int:
        """Of all parameters together."""
        return sum(p.numel() for p in self._params)

    @torch.no_grad()
    def hand_to(self, first: GradientExchange) -> None:
        """Add this rank's gradients to rank 0's; this one has none afterwards."""
        targets, sources = [], []
        for name, mine, theirs in zip(self._names, self._params, first._params, strict=True):
            grad = mine.grad
            if grad is None:
                continue
            _refuse_sparse(name, grad)
            if theirs.grad is None:
                theirs.grad = grad
            else:
                _refuse_sparse(name, theirs.grad)
                targets.append(theirs.grad)
                sources.append(grad)
        if targets:
            torch._foreach_add_(targets, sources)
        self.drop()

    @torch.no_grad()
    def take_from(self, first: GradientExchange) -> None:
        """Take rank 0's gradients, as they are now."""
        targets, sources = [], []
        for name, mine, view, theirs in zip(
            self._names, self._params, self._views, first._params, strict=True
        ):
            if theirs.grad is None:
                mine.grad = None
                continue
            _refuse_sparse(name, theirs.grad)
            targets.append(view)
            sources.append(theirs.grad)
            mine.grad = view
        if targets:
            torch._foreach_copy_(targets, sources)

    def _used_anywhere(self) -> list[bool]:
        return [any(flags) for flags in zip(*self._used, strict=True)]

    def _take(self, used: Sequence[bool]) -> None:
        for p, view, flag in zip(self._params, self._views, used, strict=True):
            p.grad = view if flag else None


def _refuse_sparse(name: str, grad: Tensor) -> None:
    if grad.layout is not torch.strided:
        raise ValueError(
            f"parameter {name!r} has a sparse gradient, which replicas cannot add up: "
            "build the embedding with sparse=False"
        )
