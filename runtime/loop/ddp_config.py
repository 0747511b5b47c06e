"""Settings of a ReplicatedModule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.core.checks import check_callable, check_flag, check_float, check_int
from runtime.core.loss_weights import LossWeightFn
from runtime.timeline.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpConfig:
    """Settings of :meth:`Trainer.setup_with <gpuworker.Trainer.setup_with>`.

    Attributes:
        speed_hint: ``(slow rank, ratio)``: all other devices are ``ratio`` (at least 1) times
            faster. Sets the devices' first shares; measured speeds correct them.
        balance: True if measured speeds set the devices' shares. If not, shares stay equal, or
            those of the hint: for models that need shards of a certain size.
        overhead_target: Fraction of the compute time that reductions may cost, 0.01 to 0.50, if
            ElChe schedules them; ``None``: 0.10.
        max_anchor: Most batches that the slowest device runs between two reductions.
            ``None``: ElChe chooses; 0: ElChe is disabled, every device runs one. Several batches
            are passed by ``model.rounds`` and ``model.accumulate``. In a loop of
            ``loss.backward()`` and ``step()``, a value of 2 or more lets several steps share a
            reduction, see :meth:`step() <gpuworker.ReplicatedModule.step>`.
        max_grad_norm: Clip gradients to this L2 norm. After ``model.accumulate(...)`` each
            device's accumulated gradient is clipped separately, before it is divided by its
            number of batches; after ``loss.backward()`` the gradient of the whole batch.
        timeline: A :class:`gpuworker.Timeline`, which records the loop from ``Trainer.setup_with``
            until the model is closed: forward, backward, reductions and steps of each replica,
            and what they wait for. Times are measured on the host. On one device, work of the loop
            outside the model (the loss) counts as idle.
        loss_weight: ``f(inputs, output)`` returns the count that the model's own loss is a mean
            over, for one device's shard of the batch: tokens, or a sum of class weights, a
            number or a scalar tensor. ``inputs`` is the tuple of positional inputs, or the dict
            of keyword ones; with both, a dict under the names of ``forward``'s parameters.
            Called in the replica's thread, on its device. See
            :class:`~gpuworker.ReplicatedModule` for the weights without it.
        batch_dim: The dimension of inputs and outputs that counts the samples; 1 for models
            that take sequences first. Tensors without it have the samples in dimension 0.
        whole: Inputs that belong to no sample (a memory bank, a mask for all), by name or
            position in ``forward``; every device gets all of them. ``None``: not stated; then
            the first batch is checked, see :class:`~gpuworker.ReplicatedModule`.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range.
    """

    speed_hint: tuple[int, float] | None = None
    balance: bool = True
    overhead_target: float | None = None
    max_anchor: int | None = None
    max_grad_norm: float | None = None
    timeline: Timeline | None = None
    loss_weight: LossWeightFn | None = None
    batch_dim: int = 0
    whole: Sequence[str | int] | None = None

    def __post_init__(self) -> None:
        if self.speed_hint is not None:
            object.__setattr__(self, "speed_hint", _checked_hint(self.speed_hint))
        check_flag("balance", self.balance)
        check_int("batch_dim", self.batch_dim, 0)
        if self.whole is not None and (
            isinstance(self.whole, str) or not all(isinstance(i, (str, int)) for i in self.whole)
        ):
            raise TypeError(f'whole={self.whole!r}: pass names of inputs, whole=["bank"]')
        if self.loss_weight is not None:
            check_callable("loss_weight", self.loss_weight, "f(inputs, output) -> weight")
        if self.overhead_target is not None:
            check_float("overhead_target", self.overhead_target, 0.01, 0.50)
        if self.max_anchor is not None:
            check_int("max_anchor", self.max_anchor, 0)
        if self.max_grad_norm is not None:
            check_float("max_grad_norm", self.max_grad_norm, 0.0, above=True)
        if self.timeline is not None:
            if not isinstance(self.timeline, Timeline):
                raise TypeError(f"timeline({self.timeline!r}): pass a gpuworker.Timeline()")
            self.timeline.require_unused()

    def check(self, world_size: int) -> None:
        """Validate the settings that depend on the number of devices.

        Raises:
            ValueError: The hint's rank does not exist.
        """
        if self.speed_hint is not None and self.speed_hint[0] >= world_size:
            raise ValueError(
                f"speed_hint: there is no rank {self.speed_hint[0]} of {world_size}; name one from "
                f"0 to {world_size - 1}, or leave the hint out"
            )


def _checked_hint(hint: object) -> tuple[int, float]:
    if not isinstance(hint, Sequence) or isinstance(hint, str) or len(hint) != 2:
        raise TypeError(f"speed_hint({hint!r}): pass (slow rank, ratio), for instance (1, 2.3)")
    return check_int("speed_hint rank", hint[0], 0), check_float("speed_hint ratio", hint[1], 1.0)
