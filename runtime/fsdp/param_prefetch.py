"""All-gather of the next forward's parameters in a separate thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from runtime.device import cuda_api
from runtime.device.cuda_api import StreamSync


class ParamPrefetch:
    """One all-gather in a separate thread, over a separate group.

    On a GPU it runs on a separate stream, after the work already on the caller's current stream,
    and is complete when the thread ends. The thread ends with the all-gather, at the latest at
    the timeout or the abort of its group.

    Args:
        gather: Fills the tensors; called once, in the thread.
        full_flats: The tensors to fill, at least one.
        name: The thread's name.
        stream: The GPU stream to run on; ``None``: a new one.

    Attributes:
        stream: Its stream, to be passed to the next prefetch: the allocator then reuses the
            memory. ``None`` on a CPU.
    """

    def __init__(
        self,
        gather: Callable[[Sequence[Tensor]], None],
        full_flats: Sequence[Tensor],
        name: str,
        stream: cuda_api.Stream | None = None,
    ) -> None:
        self.stream = stream
        self._gather = gather
        self._full_flats = full_flats
        self._error: BaseException | None = None
        self._api = cuda_api.API
        device = self._api.device_of(full_flats[0])
        self._device: torch.device | None = device if device.type == "cuda" else None
        self._sync = StreamSync()
        self._issued = self._sync.mark(device)
        if self._device is not None and stream is None:
            self.stream = self._api.new_stream(self._device)
        # A daemon: interpreter exit must not wait for a peer that never joins.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self) -> Sequence[Tensor]:
        """Wait for the thread; return the filled tensors, or raise its exception once."""
        self.wait()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback refers back to this object
        return self._full_flats

    def wait(self) -> None:
        """Wait for the thread, and ignore its result."""
        self._thread.join()

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                if self._device is not None:
                    stack.enter_context(self._api.on_device(self._device))
                    stack.enter_context(self._api.stream(self.stream))
                    self._sync.wait(self._device, [self._issued])
                self._gather(self._full_flats)
                if self._device is not None:
                    # The memory belongs to the caller's stream: no work may be pending on this one.
                    self._sync.wait_host(self._sync.mark(self._device))
        except BaseException as error:
            self._error = error
