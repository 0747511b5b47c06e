"""Errors that the coordinator itself raises."""

from __future__ import annotations


class GpuWorkerError(RuntimeError):
    """Base of the errors that a run raises on its own account."""


class AveragingFailed(RuntimeError):
    """More averaging rounds failed in a row than ``max_failed_rounds`` allows."""


class RunAborted(GpuWorkerError):
    """A run was ended by a second Ctrl-C or SIGTERM, without waiting for its steps."""


class RunStalled(GpuWorkerError):
    """A run made no progress for ``stall_timeout`` seconds.

    Attributes:
        report: The coordinator's state, the last messages of each rank and the stack of
            every thread of the process, when it was found.
    """

    report: str = ""
