"""Requests for pages of this host, and the names in their ``Host`` headers."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from http import HTTPStatus

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_address(text: str) -> bool:
    """True if a name is a numeric address, which no DNS server can redirect."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def host_name(header: str) -> str | None:
    """The name in a ``Host`` header, in lower case and without its port.

    Returns:
        ``None`` if the header is malformed.
    """
    if header.startswith("["):
        name, closed, port = header[1:].partition("]")
        if not closed or (port and not port.startswith(":")):
            return None
        port = port[1:]
    else:
        name, _, port = header.partition(":")
    if not name or (port and not (port.isascii() and port.isdigit())) or "/" in name:
        return None
    return name.lower()


def page_refusal(
    headers: Iterable[tuple[str, str]], accepts: Callable[[str], bool]
) -> HTTPStatus | None:
    """The status with which a request for a page is refused; ``None``: it may be answered.

    Browsers name a page that requests another site's content in ``Origin``. One whose DNS name
    has been redirected to this host (DNS rebinding) sends that name in ``Host``.

    Args:
        headers: Names and values.
        accepts: True for the host names, in lower case, under which the page may be opened.
    """
    pairs = [(name.lower(), value) for name, value in headers]
    hosts = [host_name(value) for name, value in pairs if name == "host"]
    if len(hosts) != 1 or hosts[0] is None or not accepts(hosts[0]):
        return HTTPStatus.MISDIRECTED_REQUEST
    return HTTPStatus.FORBIDDEN if any(name == "origin" for name, _ in pairs) else None
