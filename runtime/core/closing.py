"""What is closed at the end of a ``with`` block."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import Self


class Closing:
    """A context manager that closes itself when the block is left."""

    @abstractmethod
    def close(self) -> None:
        """Free what is held. Idempotent."""

    def __enter__(self) -> Self:
        """Itself; closed when the block is left."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
