"""BufferBackup: the buffers of a model before a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn


class BufferBackup:
    """The buffers of a model before a batch, which are restored if the batch makes no step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._saved: list[SavedBuffer] | None = None

    @property
    def is_held(self) -> bool:
        """True from :meth:`save` to :meth:`restore` or :meth:`discard`."""
        return self._saved is not None

    def save(self) -> None:
        self._saved = [SavedBuffer(*slot, slot[2].detach().clone()) for slot in _slots(self._model)]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the saved buffers back, with their contents."""
        for saved in self._saved or ():
            if saved.tensor.shape != saved.content.shape:  # sized by its first forward pass
                saved.tensor.resize_(saved.content.shape)
            saved.tensor.copy_(saved.content)
            saved.slots[saved.key] = saved.tensor
        self._saved = None

    def discard(self) -> None:
        """Discard the copies: the batch has made its step."""
        self._saved = None


class SavedBuffer(NamedTuple):
    """A saved buffer.

    Attributes:
        content: A copy of its content.
    """

    slots: dict[str, Tensor | None]
    key: str
    tensor: Tensor
    content: Tensor


def make_writable(model: nn.Module) -> None:
    """Replace buffers that were made in inference mode by copies, which are writable elsewhere."""
    for slots, key, buffer in _slots(model):
        if buffer.is_inference():
            with torch.inference_mode(False):
                slots[key] = buffer.clone()


def _slots(model: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
    for module in model.modules():
        for key, buffer in list(module._buffers.items()):
            if buffer is not None:
                yield module._buffers, key, buffer
