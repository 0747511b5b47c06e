"""All-gather of the next forward's parameters in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from runtime.device import cuda_api
from runtime.device.cuda_api import StreamSync


class ParamPrefetch:
    """One all-gather, in a thread of its own and over a group of its own.

    On a GPU it runs on a stream of its own, behind what the current stream of the caller had
    been given, and is complete when the thread ends. The thread ends with the all-gather,
    which waits for peers no longer than its group allows and ends at an abort of that.

    Args:
        gather: Fills the tensors; called once, in the thread.
        fulls: What it fills, at least one.
        name: Of the thread.
        stream: Of the GPU, where it runs; ``None``: on a new one.

    Attributes:
        stream: Where it runs, for the next one; ``None`` on a CPU. One after the other on the
            same stream keep the memory of one.
    """

    def __init__(
        self,
        gather: Callable[[Sequence[Tensor]], None],
        fulls: Sequence[Tensor],
        name: str,
        stream: cuda_api.Stream | None = None,
    ) -> None:
        self.stream = stream
        self._gather = gather
        self._fulls = fulls
        self._error: BaseException | None = None
        self._api = cuda_api.API
        device = self._api.device_of(fulls[0])
        self._device: torch.device | None = device if device.type == "cuda" else None
        self._sync = StreamSync()
        self._behind = self._sync.mark(device)
        if self._device is not None and stream is None:
            self.stream = self._api.new_stream(self._device)
        # A daemon: the interpreter must not wait for a peer that never comes.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self) -> Sequence[Tensor]:
        """Waits for the end; gives the tensors, filled, or raises what the thread raised, once."""
        self.end()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback leads back to here
        return self._fulls

    def end(self) -> None:
        """Waits for the end, whatever it is."""
        self._thread.join()

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                if self._device is not None:
                    stack.enter_context(self._api.on_device(self._device))
                    stack.enter_context(self._api.stream(self.stream))
                    self._sync.wait(self._device, [self._behind])
                self._gather(self._fulls)
                if self._device is not None:
                    # The memory belongs to the caller's stream: nothing may be pending here.
                    self._sync.wait_host(self._sync.mark(self._device))
        except BaseException as error:
            self._error = error
