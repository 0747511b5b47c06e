"""What messages carry: plans, tensors, counts and limits.

Tensors travel inside :class:`Payload`: flat CPU tensors that belong to the message and
alias nothing that training writes to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """Batches of one epoch that one rank shall train.

    Attributes:
        epoch: Epoch, counted from 0.
        batches: Positions of the batches within the epoch's permutation, in the
            order of training. Batch ``b`` holds the samples
            ``permutation[b * batch_size : (b + 1) * batch_size]``.
        shares: Under ``SYNC``, how many batches each rank of the world trains in
            this plan: from it every rank knows when the others run out and how far
            the learning-rate schedule has moved. Empty under the other policies.
        first_step: Under ``SYNC``, the position of the schedule (batches trained by
            all ranks) before the plan.
    """

    epoch: int
    batches: tuple[range, ...] = ()
    shares: tuple[int, ...] = ()
    first_step: int = 0

    @property
    def num_batches(self) -> int:
        """Number of batches in the plan."""
        return sum(len(span) for span in self.batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The averaged state of one replica as flat CPU tensors.

    Attributes:
        params: One flat tensor for each dtype of the trainable parameters.
        buffers: One flat tensor for each dtype of the floating-point buffers.
        taken: One flat tensor for each dtype of the other buffers, which are not
            averaged but taken from the rank with the most samples.
    """

    params: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...] = ()
    taken: tuple[Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Memory held by all tensors of the payload."""
        return sum(t.numel() * t.element_size() for t in (*self.params, *self.buffers, *self.taken))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What a rank trained since its last report.

    Attributes:
        num_batches: Micro-batches trained.
        num_samples: Samples in them.
        num_skipped: Samples whose effect was dropped because a value was not finite.
        compute_s: Time spent in training steps, waits for data and peers excluded.
        num_timed: Micro-batches behind ``compute_s``, where they are not ``num_batches``
            because the times of the last ones are still in flight on the device.
        loss_sum: Sum over batches of mean loss times weight, in step order.
        loss_samples: Weight behind ``loss_sum``: samples, or what ``train_fn`` gave. Samples
            are less than ``num_samples`` where losses are still in flight on the device; they
            come with a later report.
        scalars: ``(name, weighted sum, weight)`` for each recorded scalar.
    """

    num_batches: int = 0
    num_samples: int = 0
    num_skipped: int = 0
    compute_s: float = 0.0
    num_timed: int | None = None
    loss_sum: float = 0.0
    loss_samples: float = 0
    scalars: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How far a worker may go after an averaging round, counted in batches since it.

    Attributes:
        limit: The worker parks once it has trained this many; ``None``: no limit.
        report_after: The worker reports at the latest after this many; ``None``: only
            at the end of a plan and after ``report_interval_s``.
    """

    limit: int | None = None
    report_after: int | None = None
