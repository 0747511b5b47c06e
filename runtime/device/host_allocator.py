"""Thresholds of glibc's allocator: freed memory of CPU workers stays in the process.

glibc returns large blocks to the system at every free, and every training step then pays the page
faults again. Raising two thresholds keeps the blocks; other C libraries are left alone. The
setting acts on the whole process and cannot be undone, but kept memory is returned when no run is
left: each run has new threads, whose memory would accumulate.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import threading

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_MMAP_BYTES = 32 * 2**20  # the largest value that glibc accepts
_TRIM_BYTES = 2**31 - 1
_lock = threading.Lock()
_done = False
_num_users = 0


def tune() -> bool:
    """Raise glibc's thresholds, once a process.

    Values that the user has set through the environment stay.

    Returns:
        True if the process runs with the thresholds raised by this function.
    """
    global _done
    with _lock:
        if _done:
            return True
        if platform.libc_ver()[0] != "glibc":
            return False
        settings = (
            ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, _MMAP_BYTES),
            ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, _TRIM_BYTES),
        )
        try:
            libc = ctypes.CDLL(None)
            for variable, parameter, value in settings:
                if variable not in os.environ and libc.mallopt(parameter, value) != 1:
                    logger.debug("mallopt(%d, %d) was refused", parameter, value)
        except (OSError, AttributeError) as error:
            logger.debug("the allocator cannot be tuned: %s", error)
            return False
        _done = True
        return True


def acquire() -> None:
    """Register a run for which freed memory is kept."""
    global _num_users
    tune()
    with _lock:
        _num_users += 1


def release() -> None:
    """Unregister such a run; after the last one, freed memory is returned to the system."""
    global _num_users
    with _lock:
        _num_users -= 1
        if _num_users or not _done:
            return
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError) as error:
        logger.debug("freed memory could not be returned to the system: %s", error)
