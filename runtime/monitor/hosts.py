"""Host names, addresses and the listening socket of a monitor."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterable

from runtime.core.checks import check_text
from runtime.core.host_names import LOOPBACK, is_address

ANY_HOST = "*"
BACKLOG = 64
_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?")


def allowed_names(host: str, more: Iterable[str]) -> frozenset[str]:
    """The host names accepted in requests, in lower case; ``*`` accepts all.

    Args:
        more: Names added by the user.

    Raises:
        TypeError: ``more`` is one string, or holds something other than strings.
        ValueError: A name is empty, or has a scheme or a port.
    """
    if isinstance(more, str):
        raise TypeError(f"allowed_hosts={more!r}: pass a list, for instance [{more!r}]")
    names = {*LOOPBACK, host.strip("[]").lower()}
    for name in more:
        check_text("allowed_hosts", name, "host names as strings")
        found = name.strip("[]").lower()
        if found != ANY_HOST and not is_address(found) and not _HOST_NAME.fullmatch(found):
            raise ValueError(
                f"allowed_hosts: {name!r} is not a host name; leave out scheme, path and port"
            )
        names.add(found)
    return frozenset(names)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a server bound to this host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket on this host and port.

    Args:
        host: A name or address of this machine.
        port: The port; 0 picks a free one.

    Raises:
        OSError: The port is in use or not permitted, or the host is not this machine's; the
            message has the remedy.
    """
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        remedy = f"pass a host of this machine, such as {LOOPBACK[1]!r}"
        if error.errno == errno.EADDRINUSE:
            remedy = "it is in use: pass another port, or port=0 for one that is free"
        elif error.errno == errno.EACCES:
            remedy = "it may not be used by this user: pass one from 1024 up, or port=0"
        raise OSError(
            error.errno, f"Monitor cannot listen on port {port} of {host}: {remedy}"
        ) from error


def url_of(host: str, port: int) -> str:
    """The address to open in a browser of this machine."""
    address = host.strip("[]")
    if address in ("0.0.0.0", "::"):
        address = LOOPBACK[1] if address == "0.0.0.0" else LOOPBACK[2]
    return f"http://[{address}]:{port}/" if ":" in address else f"http://{address}:{port}/"
