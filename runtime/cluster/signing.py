"""Messages between machines, signed with the token that they share."""

from __future__ import annotations

import hashlib
import hmac
import struct

from runtime.cluster.engine import PeerRefused
from runtime.cluster.options import MAX_MACHINE_ID_BYTES

MAC_BYTES = 32
_HEADER = struct.Struct(">QH")
MAX_OVERHEAD_BYTES = MAC_BYTES + _HEADER.size + MAX_MACHINE_ID_BYTES
"""Largest difference in length between an envelope and its payload."""


def signature(token: str | None, purpose: str, *parts: bytes | memoryview) -> bytes:
    """HMAC-SHA256 over a purpose and parts, each with its length, so that no two inputs collide.

    Without a token anyone can compute it, but machines with a token do not accept it.
    """
    mac = hmac.new((token or "").encode(), digestmod=hashlib.sha256)
    for part in (purpose.encode(), *parts):
        mac.update(struct.pack(">Q", len(part)))
        mac.update(part)
    return mac.digest()


def is_signed(mac: bytes, token: str | None, purpose: str, *parts: bytes | memoryview) -> bool:
    """True if the signature is valid for these parts; compared in constant time."""
    return hmac.compare_digest(mac, signature(token, purpose, *parts))


def seal(token: str | None, purpose: str, number: int, machine: str, payload: bytes) -> bytes:
    """A signed envelope of a payload, its sender's id and a number."""
    name = machine.encode()
    header = _HEADER.pack(number, len(name))
    return signature(token, purpose, header, name, payload) + header + name + payload


def unseal(token: str | None, purpose: str, number: int, machine: str, envelope: bytes) -> bytes:
    """Verify an envelope of :func:`seal`, and return its payload.

    Raises:
        PeerRefused: It is not signed with the token, or has another sender or number.
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
        raise PeerRefused((machine,), "its message has another sender or another number")
    return payload
