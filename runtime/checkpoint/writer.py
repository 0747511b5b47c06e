"""Writing checkpoints beside the training."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from pathlib import Path

from runtime.checkpoint.files import DirectoryLock
from runtime.checkpoint.format import CheckpointData
from runtime.checkpoint.store import remove_old, write_checkpoint
from runtime.core.errors import CheckpointError, without_frames
from runtime.core.threads import Living

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 10.0
"""How long an interpreter that ends waits for checkpoints that are being written."""


def save_once(path: str | Path, data: CheckpointData) -> Path:
    """Write one checkpoint into the directory ``path``, and remove none. Blocks.

    Returns:
        The checkpoint's own directory in it.

    Raises:
        OSError, CheckpointError: It could not be written; nothing torn is left of it.
    """
    return write_checkpoint(Path(path), data)


class CheckpointWriter:
    """Writes what it is given, one at a time, from a thread that lives as long as there is
    something to write.

    Every method may be called from any thread. A failure is logged and counted; it stops
    nothing, and later checkpoints are written as if it had not been.

    Args:
        directory: Where checkpoints go; made with the first.
        keep: How many complete ones stay.

    Attributes:
        directory: Where checkpoints go.
        num_written: Checkpoints on the disk.
        num_failed: Checkpoints that could not be written.
        num_superseded: Checkpoints that a newer one replaced while they waited.
        last_error: What the last failure was, if any.
        newest: Directory of the last one written.
    """

    def __init__(self, directory: str | Path, keep: int) -> None:
        self.directory = Path(directory)
        self._lock: DirectoryLock | None = None
        self._keep = keep
        self._condition = threading.Condition()
        self._waiting: dict[bool, CheckpointData] = {}  # by whether it is within an epoch
        self._busy = False
        self._closed = False
        self.num_written = 0
        self.num_failed = 0
        self.num_superseded = 0
        self.last_error: BaseException | None = None
        self.newest: Path | None = None
        _LIVE.add(self)

    def claim(self) -> None:
        """Keep other runs out of the directory until this writer is closed and done.

        Raises:
            CheckpointError: Another live run has it.
        """
        try:
            self._lock = DirectoryLock(self.directory)
        except OSError as error:  # no checkpoint will be written either, which stops nothing
            logger.warning("%s cannot be locked against other runs: %s", self.directory, error)

    def submit(self, data: CheckpointData) -> None:
        """Write this as soon as what is being written is done. Returns at once.

        A checkpoint that still waits is replaced by one of its sort, within an epoch or not.
        After :meth:`close` it counts as failed.
        """
        with self._condition:
            if self._closed:
                self._failed(data, RuntimeError("the run is over"))
                return
            overtaken = self._waiting.pop(data.within, None)
            if overtaken is not None:
                self.num_superseded += 1
                logger.warning(
                    "checkpoint of step %d is left out: the disk is slower than checkpoints come",
                    overtaken.global_step,
                )
            self._waiting[data.within] = data
            if self._busy:
                return
            self._busy = True
        thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            with self._condition:
                self._busy = False
                self._waiting.clear()
                self._failed(data, error)
                self._unlock_if_over()
                self._condition.notify_all()

    def _work(self) -> None:
        while True:
            with self._condition:
                data = self._waiting.pop(next(iter(self._waiting), False), None)
                if data is None:
                    self._busy = False
                    self._unlock_if_over()
                    self._condition.notify_all()
                    return
            self._write(data)

    def _write(self, data: CheckpointData) -> None:
        began = time.monotonic()
        try:
            path = write_checkpoint(self.directory, data)
        except BaseException as error:
            with self._condition:
                self._failed(data, error)
            return
        with self._condition:
            self.num_written += 1
            self.newest = path
        logger.info("checkpoint %s written in %.1f s", path, time.monotonic() - began)
        try:
            remove_old(self.directory, self._keep)
        except OSError as error:
            logger.warning("old checkpoints in %s stay: %s", self.directory, error)

    def _failed(self, data: CheckpointData, error: BaseException) -> None:
        self.num_failed += 1
        logger.error(
            "checkpoint of step %d could not be written to %s: %s: %s; training goes on",
            data.global_step,
            self.directory,
            type(error).__name__,
            error,
            exc_info=None if isinstance(error, (OSError, CheckpointError)) else error,
        )
        self.last_error = without_frames(error)

    def _unlock_if_over(self) -> None:
        """Give the directory up, once nothing is written to it any more."""
        if self._closed and not self._busy and self._lock is not None:
            self._lock.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything submitted is written or has failed; False: not in time."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._busy, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more, and wait for what was submitted. Idempotent.

        Returns:
            False if it was not done in time: the thread goes on, and ends with its work.
        """
        with self._condition:
            self._closed = True
            self._unlock_if_over()
        done = self.wait(timeout_s)
        if not done:
            logger.error("a checkpoint to %s is still not written", self.directory)
        return done


_LIVE: Living[CheckpointWriter] = Living()


def _wait_at_exit() -> None:
    # The thread is a daemon, so that a dead disk cannot hold the interpreter for ever.
    deadline = time.monotonic() + EXIT_GRACE_S
    for writer in _LIVE.all():
        writer.wait(max(0.0, deadline - time.monotonic()))


atexit.register(_wait_at_exit)
