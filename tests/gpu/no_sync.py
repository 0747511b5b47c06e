"""Turns host-device synchronisation into errors (``torch.cuda.set_sync_debug_mode``)."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import torch


def forbid_sync():
    """Make every synchronisation that PyTorch detects an error, in the whole process."""
    _set_mode("error")


def allow_sync():
    """Undo :func:`forbid_sync`."""
    _set_mode("default")


def _set_mode(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first call warns that the feature is a prototype
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def no_sync():
    """Forbid synchronisation in this block."""
    forbid_sync()
    try:
        yield
    finally:
        allow_sync()
