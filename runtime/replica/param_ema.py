"""ParamEma: exponential moving average of a replica's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runtime.checkpoint.content import SavedEma
from runtime.replica.flat import FlatParams

_NARROW = (torch.float16, torch.bfloat16)


class ParamEma:
    """The moving average ``ema = decay * ema + (1 - decay) * params`` of the trainable parameters,
    on their device. It starts from the initial parameters. Parameters of 16 bits have averages
    of 32.

    Attributes:
        flats: The average, as ``params.flats``.
        batches_due: Batches of a rank that the weights of a checkpoint contain and its moving
            average does not.
    """

    def __init__(self, decay: float, params: FlatParams, accumulate: int = 1) -> None:
        self._decay = decay
        self._accumulate = accumulate
        self._params = params
        self.flats = [_widened(flat).clone() for flat in params.flats]
        self._views: dict[int, Tensor] = {}
        self._before: list[Tensor] | None = None
        self.batches_due = 0.0

    @torch.no_grad()
    def step(
        self, params: Sequence[nn.Parameter] | None = None, skip_flag: Tensor | None = None
    ) -> None:
        """Update after an optimizer step; the host waits for nothing.

        Args:
            params: The parameters of the optimizer; ``None``: all.
            skip_flag: A scalar on the device; 1: the step was skipped.
        """
        averages, values = self.flats, self._params.flats
        if params is not None:
            averages = [self._view(p) for p in params]
            values = [p.detach() for p in params]
        share = 1.0 - self._decay
        values = [v.to(a.dtype) for a, v in zip(averages, values, strict=True)]
        if skip_flag is None:
            torch._foreach_lerp_(averages, values, share)
            return
        kept = share * (1.0 - skip_flag.reshape(()).clamp(max=1.0))
        for average, value in zip(averages, values, strict=True):
            average.lerp_(value, kept.to(average.dtype))

    def _view(self, p: nn.Parameter) -> Tensor:
        if not self._views:
            views = self._params.views(self.flats)
            ids = map(id, self._params.params)
            self._views = dict(zip(ids, views, strict=True))
        return self._views[id(p)]

    @torch.no_grad()
    def move(
        self, average: Sequence[Tensor], num_batches: float, *, undoable: bool = False
    ) -> None:
        """Update by an average of replicas.

        Args:
            average: Flat tensors as ``params.flats``, on any device.
            num_batches: The batches of one rank that it contains since the last update.
            undoable: Keep the present average for :meth:`undo`.
        """
        if undoable:
            if self._before is None:
                self._before = [torch.empty_like(flat) for flat in self.flats]
            torch._foreach_copy_(self._before, self.flats)
        blend(self.flats, average, self._decay, num_batches / self._accumulate)
        self.batches_due = 0.0

    @torch.no_grad()
    def undo(self) -> None:
        """Undo the last :meth:`move`, which was undoable."""
        assert self._before is not None, "undo() follows move()"
        torch._foreach_copy_(self.flats, self._before)

    def copy(self) -> list[Tensor]:
        """A copy of the average, for :meth:`load`."""
        return [flat.clone() for flat in self.flats]

    @torch.no_grad()
    def load(self, flats: Sequence[Tensor]) -> None:
        for own, flat in zip(self.flats, flats, strict=True):
            own.copy_(flat)

    def saved(self) -> SavedEma:
        """The average and the batches due; not copied."""
        return SavedEma(flats=tuple(self.flats), batches_due=self.batches_due)

    def restore(self, flats: Sequence[Tensor], batches_due: float) -> None:
        """Restore a state of :meth:`saved`; the parameters are those of the checkpoint."""
        self.load(flats)
        self.move(self._params.flats, batches_due)

    def final_values(self, average: Sequence[Tensor], num_batches: float) -> dict[str, Tensor]:
        """The values at the end of a run by name, on the CPU, with the dtypes of the parameters.

        Args:
            num_batches: The batches of one rank that it contains since the last update.
        """
        flats = [flat.to("cpu", copy=True) for flat in self.flats]
        blend(flats, average, self._decay, num_batches / self._accumulate)
        views = self._params.viewer()(flats)
        both = zip(self._params.names, self._params.params, views, strict=True)
        return {name: view.to(p.dtype, copy=True) for name, p, view in both}


def blend(
    flats: Sequence[Tensor], average: Sequence[Tensor], decay: float, num_steps: float
) -> None:
    """Move ``flats`` towards ``average`` as ``num_steps`` updates with that average would."""
    if num_steps <= 0:
        return
    share = 1.0 - decay**num_steps
    with torch.no_grad():
        for flat, value in zip(flats, average, strict=True):
            flat.lerp_(value.to(flat.device, flat.dtype, non_blocking=True), share)


def _widened(flat: Tensor) -> Tensor:
    return flat.float() if flat.dtype in _NARROW else flat
