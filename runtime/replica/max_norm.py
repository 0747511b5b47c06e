"""MaxNorm: clipping of gradients by their norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_LEAST = 1e-6
"""Added to norms, as by ``torch.nn.utils.clip_grad_norm_``."""


class MaxNorm:
    """Clips gradients to an L2 norm.

    Args:
        limit: The largest norm after clipping; ``None``: gradients stay as they are.
    """

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit

    def clip(self, params: Sequence[Tensor]) -> None:
        if self.limit is not None:
            nn.utils.clip_grad_norm_(params, self.limit)

    def clip_grads(self, grads: Sequence[Tensor], norm: float | None = None) -> None:
        """Clip gradients that no parameter has yet.

        Args:
            norm: Their norm, if the host knows it.
        """
        if self.limit is None or not grads:
            return
        factor: float | Tensor
        if norm is None:
            total = nn.utils.get_total_norm(list(grads))
            factor = (self.limit / (total + _LEAST)).clamp(max=1.0)
        else:
            factor = min(1.0, self.limit / (norm + _LEAST))
        torch._foreach_mul_(list(grads), factor)
