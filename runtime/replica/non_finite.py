"""Values that are not finite: where they are looked for, and what follows.

Parameters are judged right before they are used: averaged, evaluated, handed over,
returned. Losses are judged when they are read, which is late. Only a step that must be
dropped, or whose gradients the peers take part in, is judged before it is made.

Buffers are not judged: an attention mask holds infinities on purpose.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coordinator import messages as m
from runtime.collective import Collective
from runtime.core.errors import CollectiveAborted, NonFiniteError
from runtime.device.metering import StepMeter, ValueLog
from runtime.replica.flat import FlatBuffers, FlatParams, NamedParams
from runtime.replica.optimizers import members_of

ON_NON_FINITE = ("raise", "skip", "ignore")
logger = logging.getLogger(__name__)


class ReplicaFiniteCheck:
    """Judges a replica's parameters before they are used, and its losses as they are read.

    Args:
        mode: One of :data:`ON_NON_FINITE`.
        rank: The worker's rank.
        params: The replica's parameters.
        optimizer: Its optimizer, which starts anew when an average replaces the replica.
        meter: Reads the losses and counts the samples whose effect is dropped.
        local_step: Gives the batches trained by the worker.
        averaged: Whether parameters are averaged, so that peers can heal a replica.

    Attributes:
        heals: Whether a replica that is not finite takes its peers' average.
        poisoned: Whether the replica was not finite when it was judged for the last round.
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
        self.heals = mode == "ignore" and averaged
        self.poisoned = False
        self._num_counted = 0
        if mode == "raise":
            meter.log.on_bad_loss = self._refuse_loss

    def _bad_parameter(self) -> str | None:
        if all_finite(self._params.flats):
            return None
        return first_bad(self._params.names, self._params.params)

    def _refuse_loss(self, step: int) -> None:
        raise NonFiniteError(self._rank, step, "loss", self._bad_parameter())

    def fault(self) -> NonFiniteError | None:
        """What is wrong with the parameters, if anything.

        Raises:
            NonFiniteError: It is wrong and no peer can stand in for this replica.
        """
        name = self._bad_parameter()
        if name is None:
            return None
        error = NonFiniteError(self._rank, max(0, self._local_step() - 1), "parameter", name)
        if not self.heals:
            self._meter.log.harvest()  # a loss that is refused there tells where it began
            raise error
        return error

    def require_finite(self) -> None:
        """Make sure that the live parameters can be used.

        Raises:
            NonFiniteError: They cannot, under any mode.
        """
        error = self.fault()
        if error is not None:
            raise error

    def enter_round(self, num_samples: int, squares: Sequence[float] | None = None) -> bool:
        """Judge the replica before its state goes into a round.

        Args:
            num_samples: Samples trained since the last round. Where the replica is not
                finite they count as skipped, once for all rounds that are given up.
            squares: The squared norms of its parameters, if they were measured: where they are
                finite nothing is read again.

        Returns:
            Whether it may go in; if not, it joins with weight 0 and takes the average.

        Raises:
            NonFiniteError: It may not, and the mode does not let it be replaced.
        """
        finite = squares is not None and all(map(math.isfinite, squares))
        error = None if finite else self.fault()
        self.poisoned = error is not None
        if error is None:
            self._num_counted = 0
            return True
        self._meter.num_skipped += max(0, num_samples - self._num_counted)
        self._num_counted = num_samples
        logger.warning(
            "rank %d, step %d: parameter %r is not finite; the replica takes its peers' average "
            "with a new optimizer state",
            error.rank,
            error.step,
            error.parameter,
        )
        return False

    def healed(self, num_samples: int = 0) -> None:
        """An average has replaced the replica, and what it trained since its snapshot.

        Args:
            num_samples: Samples trained since that snapshot.
        """
        self.poisoned = False
        self._num_counted = 0
        self._meter.num_skipped += num_samples
        for optimizer in members_of(self._optimizer):
            optimizer.state.clear()

    def final_fault(self, epoch: int) -> m.Failed | None:
        """Judge the replica's last state; what to send with it if it must not be used.

        Raises:
            NonFiniteError: It must not, and no peer's can take its place.
        """
        error = self.fault()
        if error is None:
            return None
        return m.Failed(
            rank=self._rank, epoch=epoch, step=self._local_step(), error=error, fatal=True
        )


class StepFiniteCheck:
    """Judges the losses and gradients of a step before the optimizer makes it.

    ``skip`` reads one flag a step. ``raise`` needs this object under lockstep alone, where
    a peer's gradients arrive with the reduction; on a CPU they are judged there and then,
    elsewhere a read would hold the device up, and the parameters are judged later.

    Args:
        mode: ``"raise"`` or ``"skip"``.
        rank: The worker's rank.
        params: What is stepped.
        buffers: The replica's buffers.
        log: Holds the losses of the step.
        device: Where the worker trains.
        losses_only: Leave the gradients to a gradient scaler.

    Attributes:
        skips: Whether bad steps are dropped.
        reads: Whether the device is read before a step is made.
    """

    def __init__(
        self,
        mode: str,
        rank: int,
        params: NamedParams,
        buffers: FlatBuffers,
        log: ValueLog,
        device: torch.device,
        *,
        losses_only: bool,
    ) -> None:
        self._rank = rank
        self._params = params
        self._buffers = buffers
        self._log = log
        self.skips = mode == "skip"
        self.reads = self.skips or device.type == "cpu"
        self._losses_only = losses_only
        self._mark = log.mark()
        self._kept: list[Tensor] = []

    def begin(self) -> None:
        """A step begins: what follows can be taken back."""
        self._mark = self._log.mark()
        if self.skips:
            self._kept = [b.clone() for b in self._buffers.tensors()]

    def accept(self) -> bool:
        """Judge a step whose gradients are this rank's own; if refused, take it back."""
        if not self.skips:
            return True
        grads = [p.grad for p in self._params.params]
        judged = [loss for loss, _, _ in self._log.since(self._mark)]
        if not self._losses_only:
            judged += [g for g in grads if g is not None]
        if all_finite(judged):
            return True
        self._drop(self._own_fault(grads))
        return False

    def write_flag(self, slot: Tensor, losses: Sequence[Tensor]) -> None:
        """Write NaN where a loss of this rank's step is not finite, else 0."""
        slot.zero_()
        for loss in losses:
            slot.add_(loss.reshape(-1) * 0)

    def accept_reduced(
        self,
        flats: Sequence[Tensor],
        slot: Tensor,
        grads: Sequence[Tensor | None],
        collective: Collective,
    ) -> bool:
        """Judge a step by what was reduced, which has the same bits on every rank.

        Args:
            flats: The reduced gradients and flags.
            slot: The part of them that :meth:`write_flag` filled.
            grads: This rank's own gradients.
            collective: What they were reduced over.

        Returns:
            Whether the step may be made; if not, it is taken back, on every rank alike.

        Raises:
            NonFiniteError: It may not, and this is the first rank at fault (``raise``).
            CollectiveAborted: It may not, and another rank says so.
        """
        if not self.reads or all_finite([slot] if self._losses_only else flats):
            return True
        fault = self._own_fault(grads)
        if self.skips:
            self._drop(fault)
            return False
        # One rank takes the blame, even if rounding alone is to blame: if none did, all
        # would wait for the end of the run.
        blamed = collective.tell(fault is not None)
        if collective.rank == blamed.index(max(blamed)):
            raise fault or NonFiniteError(self._rank, self._mark.step, "gradient")
        raise CollectiveAborted("a peer's loss or gradient is not finite")

    def _own_fault(self, grads: Sequence[Tensor | None]) -> NonFiniteError | None:
        """What in this rank's part of the step is not finite, if anything."""
        # As they were reduced: a gradient may be wider than its parameter.
        cast = [
            None if g is None else g.to(p.dtype)
            for p, g in zip(self._params.params, grads, strict=True)
        ]
        name = first_bad(self._params.names, cast)
        for loss, _, step in self._log.since(self._mark):
            if not bool(torch.isfinite(loss).all()):
                return NonFiniteError(self._rank, step, "loss", name)
        if name is None or self._losses_only:
            return None
        return NonFiniteError(self._rank, self._mark.step, "gradient", name)

    def _drop(self, fault: NonFiniteError | None) -> None:
        """Take the step back: its losses and scalars, and what it did to buffers."""
        self._log.rewind(self._mark)
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
    """Whether no tensor holds a NaN or an infinity: one reduction, one read of the device."""
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
    """Name of the first tensor that holds a NaN or an infinity."""
    for name, t in zip(names, tensors, strict=True):
        if t is not None and not bool(torch.isfinite(t).all()):
            return name
    return None
