"""Waits for the device as errors."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import torch


def forbid_waits():
    """From here on a wait that PyTorch knows of is an error, in the whole process."""
    _set_mode("error")


def allow_waits():
    """Undo :func:`forbid_waits`."""
    _set_mode("default")


def _set_mode(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first call, whatever the mode, warns of a prototype
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def no_sync():
    """Forbid waits in this block."""
    forbid_waits()
    try:
        yield
    finally:
        allow_waits()
