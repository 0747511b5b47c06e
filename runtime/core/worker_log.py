"""Rank, epoch and step in the records of the standard ``logging``."""

from __future__ import annotations

import logging

from runtime.core.context import current_worker


class WorkerLogFilter(logging.Filter):
    """Gives each record the rank, the epoch and the step of the worker that logged it.

    Add it to a handler, then every record that the handler gets has them, whichever logger
    it came through; added to a logger it sees what is logged there directly, and nothing of
    that logger's children. With a ``QueueHandler`` it belongs on that handler, which runs in
    the thread that logs. It lets every record pass, and may be used by several threads::

        handler = logging.StreamHandler()
        handler.addFilter(WorkerLogFilter())
        handler.setFormatter(logging.Formatter("%(levelname)s %(worker)s%(message)s"))

    Attributes of a record that was made in a worker's thread, or in a loader that reads for
    it: ``rank``, ``epoch`` and ``step`` (batches that the rank has trained) as numbers, and
    ``worker``, a text such as ``"[rank 0 epoch 1 step 12] "``. In other threads the first
    three are ``None`` and ``worker`` is empty. What a record has already, by ``extra={"rank":
    3}``, it keeps. Nothing is read from a device.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes; always ``True``."""
        values: dict[str, object] = {"rank": None, "epoch": None, "step": None}
        text = ""
        try:
            worker: object = current_worker()
        except RuntimeError:
            worker = None
        if worker is not None:
            # A loader's process knows the rank alone.
            values["rank"] = getattr(worker, "rank", None)
            values["epoch"] = getattr(worker, "current_epoch", None)
            values["step"] = getattr(worker, "local_step", None)
            known = [f"{name} {value}" for name, value in values.items() if value is not None]
            text = f"[{' '.join(known)}] " if known else ""
        for name, value in {**values, "worker": text}.items():
            record.__dict__.setdefault(name, value)
        return True
