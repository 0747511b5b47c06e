"""Names in the ``Host`` headers of requests."""

from __future__ import annotations

import ipaddress

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
