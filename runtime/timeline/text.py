"""Text that is safe in tables, traces and pages: one line, bounded length, no formulas."""

from __future__ import annotations

import hashlib
import os
import threading

MAX_LENGTH = 200


_FORMULA = ("=", "+", "-", "@", "|", "%")


def one_line(text: object, limit: int = MAX_LENGTH) -> str:
    """A text on one line, of limited length, in which every character can be seen.

    Control characters, line breaks, marks that turn the direction of writing, and halves of
    surrogate pairs are written as escapes. A text that is too long is cut, with a part of
    its hash at the end: what differs stays different.

    Args:
        text: What to show; anything else than a string is first made one.
        limit: Characters at most.
    """
    try:
        whole = text if isinstance(text, str) else str(text)
    except Exception:  # a __str__ of the user's
        whole = f"<{type(text).__name__}>"
    head = whole[: limit + 1]
    shown = "".join(c if c.isprintable() else _escaped(c) for c in head)
    if len(whole) <= limit and len(shown) <= limit:
        return shown
    digest = hashlib.sha256(whole.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"{shown[: limit - 10]}…#{digest}"


def error_text(error: BaseException) -> str:
    """Class and message of an error, as :func:`one_line` gives them."""
    try:
        message = str(error)
    except Exception:  # a __str__ of the user's
        message = "no message"
    return one_line(f"{type(error).__name__}: {message}")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def table_cell(text: str) -> str:
    """A text for a cell of a CSV file, which no spreadsheet takes for a formula."""
    shown = one_line(text)
    return f"'{shown}" if shown.lstrip().startswith(_FORMULA) else shown


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a whole file; if interrupted, the old one stays."""
    target = os.fspath(path)
    beside = f"{target}.{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        with open(beside, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.replace(beside, target)
    except BaseException:
        if os.path.exists(beside):
            os.unlink(beside)
        raise
