"""What has come in since the last optimizer step of a loop of the user's own."""

from __future__ import annotations

from enum import Enum, auto


class Window(Enum):
    """Where the gradients since the last step came from."""

    EMPTY = auto()
    BACKWARD = auto()
    """From ``loss.backward()``: those of the whole batch, on rank 0."""
    ACCUMULATED = auto()
    """From ``accumulate``: each rank's own."""
