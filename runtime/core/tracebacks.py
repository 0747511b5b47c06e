"""Tracebacks for users: their own frames, without those of this project."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar

from runtime.core.errors import FRAMES_NOTE
from runtime.core.references import OWN, is_users

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
ErrorT = TypeVar("ErrorT", bound=BaseException)

VARIABLE = "GPUWORKER_TRACEBACK"
"""Environment variable: ``full`` keeps all frames."""

_INTERNAL = (AssertionError, AttributeError, LookupError, NameError)
"""Errors that are faults of this project if its own code raises them."""


def fold_tracebacks(error: ErrorT, *, with_note: bool = True) -> ErrorT:
    """Leave the frames of this project out of the tracebacks of an error and its causes.

    A note on the first cause gives their number, if ``with_note``. Where an error has frames of
    the user, those of libraries before them are left out as well. A traceback is kept if the error
    points to a fault of this project. Nothing is changed if ``GPUWORKER_TRACEBACK`` is ``full``.

    Returns:
        The same error.
    """
    if os.environ.get(VARIABLE) == "full":
        return error
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("all frames of the error", exc_info=error)
    chain = chain_of(error)
    num_left_out = sum(map(_fold, chain))
    if num_left_out and with_note:
        chain[-1].add_note(
            f"{FRAMES_NOTE}{num_left_out} frames of its own are left out; "
            f"{VARIABLE}=full shows them"
        )
    return error


def folds_tracebacks(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of functions that users call: errors leave with :func:`fold_tracebacks`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            fold_tracebacks(error, with_note=False)
            raise

    return call


def chain_of(error: BaseException) -> list[BaseException]:
    """An error with its causes and contexts."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and not any(each is other for other in found):
            found.append(each)
            waiting += [each.__cause__, each.__context__]
    return found


def _fold(error: BaseException) -> int:
    """Leave frames out of one traceback; returns their number."""
    frames = list(_frames(error.__traceback__))
    if not frames:
        return 0
    is_own = [frame.tb_frame.f_code.co_filename.startswith(OWN) for frame in frames]
    kept = [frame for frame, own in zip(frames, is_own, strict=True) if not own]
    if isinstance(error, _INTERNAL) and (is_own[-1] or not kept):
        return 0
    files = [frame.tb_frame.f_code.co_filename for frame in kept]
    first = next((i for i, file in enumerate(files) if is_users(file, libraries=True)), 0)
    kept = kept[first:]
    traceback = None
    for frame in reversed(kept):
        traceback = TracebackType(traceback, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = traceback
    return sum(is_own)


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def print_briefly(error: KeyboardInterrupt, *lines: str) -> None:
    """Make Python print these lines in place of a traceback if the error ends the process.

    Installs a hook in :data:`sys.excepthook`, unless the program has one. No effect if
    ``GPUWORKER_TRACEBACK`` is ``full``.
    """
    if os.environ.get(VARIABLE) == "full":
        return
    error.__dict__[_BRIEF] = lines
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_exception


_BRIEF = "_gpuworker_lines"


def _print_exception(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    lines = error.__dict__.get(_BRIEF)
    if lines is None or sys.stderr is None:
        sys.__excepthook__(kind, error, traceback)
    else:
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
