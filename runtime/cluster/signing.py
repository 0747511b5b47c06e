"""Messages between machines, signed with the token that they share."""

from __future__ import annotations

import hashlib
import hmac
import struct

from runtime.cluster.engine import PeerRefused
from runtime.cluster.options import MAX_MACHINE_BYTES

MAC_BYTES = 32


_HEADER = struct.Struct(">QH")


MAX_OVERHEAD_BYTES = MAC_BYTES + _HEADER.size + MAX_MACHINE_BYTES
"""By how much an envelope may be longer than its payload."""


def signature(token: str | None, purpose: str, *parts: bytes | memoryview) -> bytes:
    """HMAC-SHA256 over a purpose and parts, none of which can pass for another.

    Without a token anyone can compute it, and nobody who has one takes it.
    """
    mac = hmac.new((token or "").encode(), digestmod=hashlib.sha256)
    for part in (purpose.encode(), *parts):
        mac.update(struct.pack(">Q", len(part)))
        mac.update(part)
    return mac.digest()


def is_signed(mac: bytes, token: str | None, purpose: str, *parts: bytes | memoryview) -> bool:
    """Whether the signature is that of these parts; takes the same time for every wrong one."""
    return hmac.compare_digest(mac, signature(token, purpose, *parts))


def sealed(token: str | None, purpose: str, number: int, machine: str, payload: bytes) -> bytes:
    """A payload with its sender's id and a number, signed."""
    name = machine.encode()
    header = _HEADER.pack(number, len(name))
    return signature(token, purpose, header, name, payload) + header + name + payload


def opened(token: str | None, purpose: str, number: int, machine: str, envelope: bytes) -> bytes:
    """The payload of :func:`sealed`.

    Raises:
        PeerRefused: It is not signed with the token, or is another machine's or of another
            number.
    """
    start = MAC_BYTES + _HEADER.size
    if len(envelope) < start:
        raise PeerRefused((machine,), f"{len(envelope)} bytes in place of a signed message")
    mac, header = envelope[:MAC_BYTES], envelope[MAC_BYTES:start]
    found, length = _HEADER.unpack(header)
    name, payload = envelope[start : start + length], envelope[start + length :]
    if not is_signed(mac, token, purpose, header, name, payload):
        raise PeerRefused((machine,), "its message is not signed with this machine's token")
    if name != machine.encode() or found != number:
        raise PeerRefused((machine,), "its message is another machine's, or of another time")
    return payload
