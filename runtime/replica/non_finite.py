"""Checks for NaN and infinity, and the reactions to them.

Parameters are checked right before they are averaged, evaluated, saved or returned. Losses are
checked when the host reads them, some steps later. A step itself is checked before the optimizer
makes it only if it may have to be dropped, or if its gradients are reduced with those of peers.

Buffers are not checked: an attention mask contains infinities on purpose.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from coordinator import messages as m
from runtime.collective.base import Collective
from runtime.core.errors import CollectiveAborted, NonFiniteError
from runtime.device.metering import StepMeter, StepValues
from runtime.replica.flat import FlatBuffers, FlatParams, NamedParams
from runtime.replica.optimizers import members_of

ON_NON_FINITE = ("raise", "skip", "ignore")
logger = logging.getLogger(__name__)


class ReplicaFiniteCheck:
    """Checks a replica's parameters before they are used, and its losses when they are read.

    Args:
        mode: One of :data:`ON_NON_FINITE`.
        optimizer: Its optimizer, whose state is reset when an average replaces the replica.
        meter: Reads the losses and counts the samples whose effect is dropped.
        local_step: Returns the number of batches trained by the worker.
        averaged: True if parameters are averaged, so that the peers' average can replace a replica.

    Attributes:
        can_heal: True if the peers' average replaces a replica that is not finite.
        is_bad: True if the replica was not finite at the last round's check.
    """

    def __init__(
        self,
        mode: str,
        rank: int,
        params: FlatParams,
        optimizer: torch.optim.Optimizer,
        meter: StepMeter,
        local_step: Callable[[], int],
        *,
        averaged: bool,
    ) -> None:
        self._rank = rank
        self._params = params
        self._optimizer = optimizer
        self._meter = meter
        self._local_step = local_step
        self.can_heal = mode == "ignore" and averaged
        self.is_bad = False
        self._num_counted = 0
        if mode == "raise":
            # Without a reference to the log, which would be a cycle.
            meter.log.on_bad_loss = partial(_raise_for_loss, rank, params)

    def fault(self) -> NonFiniteError | None:
        """The error of parameters that are not finite; ``None`` if all are finite.

        Raises:
            NonFiniteError: They are not finite, and no average can replace this replica.
        """
        name = _bad_parameter(self._params)
        if name is None:
            return None
        error = NonFiniteError(self._rank, max(0, self._local_step() - 1), "parameter", name)
        if not self.can_heal:
            self._meter.log.harvest()  # an earlier bad loss, raised here, is closer to the cause
            raise error
        return error

    def require_finite(self) -> None:
        """Check that the live parameters are finite.

        Raises:
            NonFiniteError: They are not, in any mode.
        """
        error = self.fault()
        if error is not None:
            raise error

    def enter_round(self, num_samples: int, squares: Sequence[float] | None = None) -> bool:
        """Check the replica before its state enters an averaging round.

        Args:
            num_samples: Samples trained since the last round. If the replica is not finite they
                are counted as skipped, once even if rounds are given up.
            squares: The squared norms of its parameters, if measured: if all are finite, the
                parameters are not read again.

        Returns:
            True if the state is finite. If False, the replica joins with weight 0 and is replaced
            by the average.

        Raises:
            NonFiniteError: The state is not finite, and no average can replace it.
        """
        finite = squares is not None and all(map(math.isfinite, squares))
        error = None if finite else self.fault()
        self.is_bad = error is not None
        if error is None:
            self._num_counted = 0
            return True
        self._meter.num_skipped += max(0, num_samples - self._num_counted)
        self._num_counted = num_samples
        logger.warning(
            "rank %d, step %d: parameter %r is not finite; the replica is replaced by its peers' "
            "average, with a new optimizer state",
            error.rank,
            error.step,
            error.parameter,
        )
        return False

    def healed(self, num_samples: int = 0) -> None:
        """Reset the state after an average has replaced the replica.

        Args:
            num_samples: Samples trained since the snapshot, which are lost.
        """
        self.is_bad = False
        self._num_counted = 0
        self._meter.num_skipped += num_samples
        for optimizer in members_of(self._optimizer):
            optimizer.state.clear()

    def final_fault(self, epoch: int) -> m.Failed | None:
        """Check the replica's final state; returns the failure to send if it is not finite.

        Raises:
            NonFiniteError: It is not finite, and no peer's state can replace it.
        """
        error = self.fault()
        if error is None:
            return None
        return m.Failed(
            rank=self._rank, epoch=epoch, step=self._local_step(), error=error, fatal=True
        )


def _bad_parameter(params: FlatParams) -> str | None:
    return None if all_finite(params.flats) else first_bad(params.names, params.params)


def _raise_for_loss(rank: int, params: FlatParams, step: int) -> None:
    raise NonFiniteError(rank, step, "loss", _bad_parameter(params))


class StepFiniteCheck:
    """Checks the losses and gradients of a step before the optimizer makes it.

    ``skip`` reads one flag in each step. ``raise`` requires this object under lockstep alone,
    where a peer's gradients arrive with the reduction. On a CPU they are checked at once;
    elsewhere a read would stall the device, and the parameters are checked later.

    Args:
        mode: ``"raise"`` or ``"skip"``.

    Attributes:
        skips: True if bad steps are dropped.
        reads: True if the device is read before a step is made.
    """

    def __init__(
        self,
        mode: str,
        rank: int,
        params: NamedParams,
        buffers: FlatBuffers,
        device: torch.device,
        *,
        losses_only: bool,
    ) -> None:
        self._rank = rank
        self._params = params
        self._buffers = buffers
        self.skips = mode == "skip"
        self.reads = self.skips or device.type == "cpu"
        self._losses_only = losses_only
        self._values: StepValues | None = None
        self._kept: list[Tensor] = []

    def begin(self, values: StepValues) -> None:
        """Begin the step of these values, and keep the state required to drop it."""
        self._values = values
        if self.skips:
            self._kept = [b.clone() for b in self._buffers.tensors()]

    def accept(self) -> bool:
        """Check a step on this rank's own gradients; returns False if it was dropped."""
        if not self.skips:
            return True
        grads = [p.grad for p in self._params.params]
        checked = [loss for _, loss in self._losses()]
        if not self._losses_only:
            checked += [g for g in grads if g is not None]
        if all_finite(checked):
            return True
        self._drop(self._own_fault(grads))
        return False

    def write_flag(self, slot: Tensor, losses: Sequence[Tensor]) -> None:
        """Write NaN to ``slot`` if a loss of this rank's step is not finite, else 0."""
        if not losses:
            slot.zero_()
            return
        torch.mul(losses[0].reshape(-1), 0, out=slot)
        for loss in losses[1:]:
            slot.add_(loss.reshape(-1) * 0)

    def accept_reduced(
        self,
        flats: Sequence[Tensor],
        slot: Tensor,
        grads: Sequence[Tensor | None],
        collective: Collective,
    ) -> bool:
        """Check a step on the reduced gradients, which are bitwise equal on all ranks.

        Args:
            slot: Their element that :meth:`write_flag` filled.
            grads: This rank's own gradients.

        Returns:
            True if the step may be made; if False, it was dropped, on every rank alike.

        Raises:
            NonFiniteError: The step is bad, and this is the first rank at fault (``raise``).
            CollectiveAborted: The step is bad, and another rank raises the error.
        """
        if not self.reads or all_finite([slot] if self._losses_only else flats):
            return True
        fault = self._own_fault(grads)
        if self.skips:
            self._drop(fault)
            return False
        # Exactly one rank raises the error, even if only the sum overflowed: if none did, all
        # would wait for the end of the run.
        at_fault = collective.all_gather_number(fault is not None)
        if collective.rank == at_fault.index(max(at_fault)):
            raise fault or NonFiniteError(self._rank, self._number, "gradient")
        raise CollectiveAborted("a peer's loss or gradient is not finite")

    def _own_fault(self, grads: Sequence[Tensor | None]) -> NonFiniteError | None:
        """The error of this rank's part of the step, if a value of it is not finite."""
        # In the dtype of the reduction: a gradient may be wider than its parameter.
        cast = [
            None if g is None else g.to(p.dtype)
            for p, g in zip(self._params.params, grads, strict=True)
        ]
        name = first_bad(self._params.names, cast)
        for step, loss in self._losses():
            if not bool(torch.isfinite(loss).all()):
                return NonFiniteError(self._rank, step, "loss", name)
        if name is None or self._losses_only:
            return None
        return NonFiniteError(self._rank, self._number, "gradient", name)

    def _losses(self) -> Iterator[tuple[int, Tensor]]:
        """The losses of the step, each with the number of its batch."""
        if self._values is None:
            return
        for loss in self._values.further:
            yield self._number, loss
        for step, batch in enumerate(self._values.losses, self._number):
            if batch is not None:
                yield step, batch[0]

    @property
    def _number(self) -> int:
        """Number of the step's first batch."""
        return 0 if self._values is None else self._values.number

    def _drop(self, fault: NonFiniteError | None) -> None:
        """Drop the step: its losses and scalars, and its changes to buffers."""
        if self._values is not None:
            self._values.drop()
        with torch.no_grad():
            for live, kept in zip(self._buffers.tensors(), self._kept, strict=True):
                live.copy_(kept)
        if fault is not None:
            logger.warning(
                "rank %d, step %d: the %s is not finite (first parameter hit: %s); the step is "
                "dropped",
                fault.rank,
                fault.step,
                fault.what,
                fault.parameter,
            )


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """True if all values are finite: one reduction, one read of the device."""
    if not tensors:
        return True
    if len(tensors) == 1:  # as in most lockstep steps: ten times cheaper for a small model
        total = torch.linalg.vector_norm(tensors[0])
    else:
        total = torch.nn.utils.get_total_norm(tensors)
    if math.isfinite(float(total)):
        return True
    # The norm of finite values can overflow.
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def first_bad(names: Sequence[str], tensors: Sequence[Tensor | None]) -> str | None:
    """Name of the first tensor with a value that is not finite."""
    for name, t in zip(names, tensors, strict=True):
        if t is not None and not bool(torch.isfinite(t).all()):
            return name
    return None
