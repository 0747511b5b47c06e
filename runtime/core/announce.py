"""What a run says of itself, where nobody has said how to log."""

from __future__ import annotations

import logging
import sys


def announce(log: logging.Logger, text: str, *, silent: bool = False) -> None:
    """Log a line at INFO; where no handler would take it, write it to stderr.

    A logger that was made quiet stays so: one that is disabled, or of a level above INFO, here
    or above it but for the root, whose level is WARNING unless it is set.

    Args:
        log: The logger.
        text: What is said.
        silent: Write nothing to stderr in any case.
    """
    log.info("%s", text)
    if silent or log.hasHandlers() or _is_quiet(log) or sys.stderr is None:
        return
    record = log.makeRecord(log.name, logging.INFO, "", 0, text, (), None)
    logging.StreamHandler().handle(record)


def _is_quiet(log: logging.Logger) -> bool:
    if logging.root.manager.disable >= logging.INFO:
        return True
    at: logging.Logger | None = log
    while at is not None and at is not logging.root:
        if at.disabled or at.level > logging.INFO:
            return True
        at = at.parent
    return False
