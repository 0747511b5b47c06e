"""Errors that the coordinator itself raises."""

from __future__ import annotations


class GpuWorkerError(RuntimeError):
    """Base of the errors that gpuworker itself raises."""


class AveragingFailed(RuntimeError):
    """More averaging rounds failed in a row than ``max_failed_rounds`` allows."""


class ClusterError(GpuWorkerError):
    """This machine cannot join the cluster or remain in it; the message has the reason."""


class RunAborted(GpuWorkerError):
    """A second Ctrl-C or SIGTERM ended the run before the steps in progress completed."""


class RunStalled(GpuWorkerError):
    """A run made no progress for ``stall_timeout`` seconds.

    Attributes:
        report: The coordinator's state, the last messages of each rank and the stack of
            every thread of the process, at the time of detection.
    """

    report: str = ""
