"""Synchronised batch normalisation: statistics over the global batch, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from runtime.replica.global_batch_comm import GlobalBatchComm


def synchronise(model: nn.Module, statistics: GlobalBatchComm) -> int:
    """Make a model's batch normalisation layers use the statistics of all ranks.

    The layers stay the same objects, with the same parameters, buffers, hooks and keys.

    Args:
        statistics: The exchange with the other ranks.

    Returns:
        The number of layers.

    Raises:
        TypeError: A layer is of another class than those of PyTorch.
    """
    num = 0
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        kind = _KINDS.get(type(module))
        if kind is None:
            raise TypeError(
                f"sync_batchnorm(True): {name or 'the model'} is a {type(module).__name__}, whose "
                "statistics cannot be shared; use torch.nn.BatchNorm1d, 2d or 3d there"
            )
        module.__class__ = kind
        module.statistics = statistics  # type: ignore[assignment]
        statistics.layers.append(module)
        num += 1
    return num


def uses_own_statistics(model: nn.Module) -> bool:
    """True if a layer normalises by statistics of the rank's own samples."""
    return any(
        isinstance(module, _BatchNorm)
        and not isinstance(module, _SyncedBatchNorm)
        and (module.training or module.running_mean is None)
        for module in model.modules()
    )


class _SyncedBatchNorm(_BatchNorm):
    """Normalises by the statistics of all ranks, within the training of a batch.

    That is where PyTorch's layers use the statistics of the batch: in training mode, or without
    running statistics. Elsewhere (an evaluation, ``update_bn``) each rank runs by itself.
    """

    statistics: GlobalBatchComm | None

    def forward(self, input: Tensor) -> Tensor:
        uses_batch = self.training or (self.running_mean is None and self.running_var is None)
        if not uses_batch or self.statistics is None or not self.statistics.is_open:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if self.statistics.is_single_rank and input.numel() == input.shape[1]:
            raise ValueError(
                "batch normalisation needs more than one value for each channel, and the global "
                f"batch has one (input of shape {tuple(input.shape)}): leave the short batch out "
                "with drop_last(True), or choose another batch_size"
            )
        y, mean, squares, count = _SyncedNormalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.statistics
        )
        if self.training and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self._update_running(mean, squares / (count - 1))
        return y  # type: ignore[no-any-return]

    def _update_running(self, mean: Tensor, var: Tensor) -> None:
        """Update the running statistics with those of a batch.

        Through ``.data``, so that version counters stay as PyTorch's kernels leave them: the graph
        of an earlier pass in eval mode has saved these buffers.
        """
        factor: float | Tensor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = self.num_batches_tracked.double().reciprocal()
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            assert running is not None, "checked by the caller"
            running.data.add_((new.to(running.dtype) - running) * factor)


class SynchronisedBatchNorm1d(_SyncedBatchNorm, nn.BatchNorm1d):
    """:class:`torch.nn.BatchNorm1d` over the global batch."""


class SynchronisedBatchNorm2d(_SyncedBatchNorm, nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d` over the global batch."""


class SynchronisedBatchNorm3d(_SyncedBatchNorm, nn.BatchNorm3d):
    """:class:`torch.nn.BatchNorm3d` over the global batch."""


class SynchronisedSyncBatchNorm(_SyncedBatchNorm, nn.SyncBatchNorm):
    """:class:`torch.nn.SyncBatchNorm` among the ranks of a run."""


_KINDS: dict[type[nn.Module], type[_SyncedBatchNorm]] = {
    nn.BatchNorm1d: SynchronisedBatchNorm1d,
    nn.BatchNorm2d: SynchronisedBatchNorm2d,
    nn.BatchNorm3d: SynchronisedBatchNorm3d,
    nn.SyncBatchNorm: SynchronisedSyncBatchNorm,
}


class _SyncedNormalize(torch.autograd.Function):
    """Normalises this rank's samples by the statistics of all ranks' samples."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        statistics: GlobalBatchComm,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.double() if x.dtype is torch.float64 else x.float()
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        num = x.numel() // x.shape[1]
        var, mean = torch.var_mean(wide, dims, correction=0)
        own = torch.cat([mean, var * num, mean.new_full((1,), num)])
        gathered = statistics.gather(own)
        means, squares, counts = torch.split(gathered, [len(mean), len(mean), 1], dim=1)
        # Sums of squares around the common mean: differences of large numbers would cancel.
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        squares = squares.sum(0) + ((means - mean).square() * counts).sum(0)
        scale = torch.rsqrt(squares / count + eps)
        y = (wide - mean.view(shape)) * scale.view(shape)
        if weight is not None:
            y = y * weight.view(shape)
        if bias is not None:
            y = y + bias.view(shape)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.statistics = statistics
        ctx.mark_non_differentiable(mean, squares, count)
        return y.to(x.dtype), mean, squares, count

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = _SyncedNormalize._gradients(ctx, dy)
        if torch.is_grad_enabled():  # create_graph=True
            x, weight = ctx.saved_tensors[:2]
            sources = [t for t in (dy, x, weight) if t is not None]
            grads = [None if g is None else _RefuseSecond.apply(g, *sources) for g in grads]  # type: ignore[no-untyped-call]
        return (*grads, None, None)

    @staticmethod
    def _gradients(ctx: Any, dy: Tensor) -> Sequence[Tensor | None]:
        x, weight, mean, scale, count = ctx.saved_tensors
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        dy = dy.to(mean.dtype)
        normal = (x.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        sums = torch.stack([dy.sum(dims), (dy * normal).sum(dims)])
        own_bias, own_weight = sums
        mean_grad, slope_grad = (ctx.statistics.sum_over_ranks(sums) / count).unbind()
        dx = dy - mean_grad.view(shape) - normal * slope_grad.view(shape)
        if weight is not None:
            scale = scale * weight
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        return [
            (dx * scale.view(shape)).to(x.dtype) if needs_x else None,
            own_weight.to(weight.dtype) if needs_weight else None,
            own_bias.to(weight.dtype) if needs_bias else None,
        ]


class _RefuseSecond(torch.autograd.Function):
    """The identity, whose backward refuses gradients of gradients by name."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(
            "sync_batchnorm(True): gradients of gradients (create_graph=True) do not pass through "
            "statistics of several ranks; use GroupNorm or LayerNorm in such a model, or train it "
            "on one device"
        )
