"""Text for logs, tables, traces and pages: one line, bounded length, no formulas; atomic files."""

from __future__ import annotations

import hashlib
import html
import os
import threading
from collections.abc import Sequence

MAX_LENGTH = 200
_FORMULA = ("=", "+", "-", "@", "|", "%")


def one_line(text: object, limit: int = MAX_LENGTH) -> str:
    """Text as one line of limited length, with visible characters only.

    Control characters, line breaks, bidirectional marks and lone surrogates are escaped. A text
    that is too long is cut and gets part of its hash, so that different texts stay different.

    Args:
        text: The text; other objects are converted by ``str``.
        limit: Maximum length.
    """
    try:
        whole = text if isinstance(text, str) else str(text)
    except Exception:  # a user's __str__
        whole = f"<{type(text).__name__}>"
    head = whole[: limit + 1]
    shown = "".join(c if c.isprintable() else _escaped(c) for c in head)
    if len(whole) <= limit and len(shown) <= limit:
        return shown
    digest = hashlib.sha256(whole.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"{shown[: limit - 10]}…#{digest}"


def error_text(error: BaseException) -> str:
    """Class and message of an error, as one line."""
    try:
        message = str(error)
    except Exception:  # a user's __str__
        message = "no message"
    return one_line(f"{type(error).__name__}: {message}")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def table_cell(text: str) -> str:
    """Text for a CSV cell, which no spreadsheet parses as a formula."""
    shown = one_line(text)
    return f"'{shown}" if shown.lstrip().startswith(_FORMULA) else shown


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with aligned columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """A table of escaped cells; the first row is the header. Empty without rows."""
    if not rows:
        return ""
    header, *body = [[html.escape(cell) for cell in row] for row in rows]
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in header) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body]
    return f"<table>{''.join(lines)}</table>"


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file atomically."""
    target = os.fspath(path)
    temporary = f"{target}.{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.replace(temporary, target)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
