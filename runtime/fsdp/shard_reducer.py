"""ShardReducer: the gradient reduction of a run whose optimizer state is sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from runtime.collective import Collective
from runtime.core.loss_weights import WindowWeight, scale_
from runtime.device.timing import StepTimer
from runtime.fsdp.sharded_norm import clip_by_, sharded_norm
from runtime.fsdp.sharded_params import ShardedParams
from runtime.fsdp.strategy import ShardingStrategy
from runtime.replica.flat import FlatParams, FlatState
from runtime.replica.max_norm import MaxNorm
from runtime.replica.non_finite import StepFiniteCheck, all_finite
from runtime.replica.reducer import NOTHING, GradientReducer, PackedGradients


class ShardReducer(GradientReducer):
    """Averages gradients over the ranks into the gradients of each rank's shards.

    Gradients are weighted as by :class:`GradientReducer`. Each rank sends one number, its weight
    or NaN if its loss or a gradient is not finite, and then its gradients in one reduce-scatter.
    The full parameters exist until :meth:`unpack`, so that a step that fails or is dropped before
    leaves no trace. A rank without samples takes part with zeros.

    Args:
        finite_check: Checks gradients and losses before they are reduced.
        sums: Return the sum over all samples in place of their mean.
    """

    def __init__(
        self,
        params: ShardedParams,
        collective: Collective,
        finite_check: StepFiniteCheck | None,
        *,
        timer: StepTimer | None = None,
        sums: bool = False,
    ) -> None:
        super().__init__(params, collective, finite_check, timer=timer, sums=sums)
        self._sharded = params
        self._losses: Sequence[Tensor] = ()
        self._window: WindowWeight | None = None

    def _arrange(self, order: Sequence[int] | None) -> None:
        """Gradients are reduced into the shards: there is no flat copy."""

    def join(self, collective: Collective) -> None:
        """Refuse another group of ranks, in which shards would be missing."""
        raise RuntimeError("with sharded(...) the group of ranks cannot change during a run")

    def reset(self) -> None:
        super().reset()
        for shard in self._sharded.trained:
            shard.grad = None

    def pack(
        self, num_samples: int, losses: Sequence[Tensor] = (), weight: WindowWeight | None = None
    ) -> None:
        """Take this rank's losses and weight; see :meth:`GradientReducer.pack`."""
        self._losses, self._window = losses, weight
        grads = [p.grad for p in self._params]
        self.packed = PackedGradients(grads, complete=False, weighed=weight is not None)

    def can_end_async(self) -> bool:
        """False: the host reads the weights."""
        return False

    def exchange(self, num_samples: int, *, async_op: bool = False) -> bool:
        """See :meth:`GradientReducer.exchange`; the gradients move to the shards."""
        grads = [g for g in self.packed.grads if g is not None]
        total = unit = float(num_samples)
        if self._window is not None:
            total, unit = float(self._window.total), float(self._window.unit)
        check = self._finite_check
        checks = check is not None and check.reads
        if checks and not all_finite([*grads, *self._losses]):
            total = math.nan
        totals = self.collective.all_gather_number(total)
        if check is not None and not math.isfinite(sum(totals)):
            bad = torch.full((1,), math.nan, device=self.skip_flag.device)
            if not check.accept_reduced([bad], bad, self.packed.grads, self.collective):
                return False
        self.packed = NOTHING
        whole = 1.0 if self._sums else sum(totals)
        self.is_empty = not whole > 0
        if self.is_empty:
            return True
        factor = unit * self.collective.world_size / whole if total else 0.0
        scale_(grads, self.skip_flag.new_full((), factor, dtype=torch.float64))
        del grads
        self._sharded.store.check_gradients()
        self._sharded.store.reduce_gradients()
        return True

    def unpack(self) -> None:
        self._sharded.release()

    def clip(self, max_norm: MaxNorm) -> None:
        """Clip the gradients of the shards by the norm over all ranks. Collective."""
        if max_norm.limit is not None:
            shards = self._sharded.trained
            total = sharded_norm(shards, self._sharded.group, 2.0)
            clip_by_(shards, total, max_norm.limit, error_if_nonfinite=False)

    def after_step(self) -> None:
        """Gather the updated parameters. Collective."""
        self._timer.pause()
        try:
            self._sharded.gather()
        finally:
            self._timer.resume()
        # A backward pass of an earlier graph fails, as after a step in place.
        increment_version(self._params)


@dataclass(frozen=True, slots=True)
class RunSharding:
    """The sharding of a run; see :class:`~runtime.replica.reducer.Sharding`.

    Attributes:
        intra_node_size: For ``HYBRID_SHARD``: ranks of a node.
    """

    strategy: ShardingStrategy
    intra_node_size: int | None

    def shard(
        self,
        model: nn.Module,
        state: FlatState,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
    ) -> None:
        """Replace the parameters of ``state``, and those of the optimizer by this rank's shards."""
        state.params = ShardedParams(
            model, state.params, optimizer, collective, self.strategy, self.intra_node_size
        )

    def make_reducer(
        self,
        params: FlatParams,
        collective: Collective,
        finite_check: StepFiniteCheck | None,
        *,
        timer: StepTimer,
        sums: bool,
    ) -> GradientReducer:
        """The reducer of these parameters."""
        assert isinstance(params, ShardedParams), "shard() comes first"
        return ShardReducer(params, collective, finite_check, timer=timer, sums=sums)
