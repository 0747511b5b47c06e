"""Check of a machine's token against the members of a cluster, before it joins."""

from __future__ import annotations

import json
import secrets
import socket
from contextlib import suppress

from coordinator.cluster.machine_report import PROTOCOL_VERSION
from runtime.cluster.engine import PeerRefused
from runtime.cluster.options import split_host_port
from runtime.cluster.signing import is_signed, signature

GREETING = b"GPUWORKER MEMBERS/1\n"
MAX_LINE_BYTES = 4096
"""Longest card of a member."""
MAX_LIST_BYTES = 1 << 22
TIMEOUT_S = 5.0


class Membership:
    """This machine's card at the lighthouse's gate, for as long as it is open.

    A machine with another token learns of it here, before it takes part in a quorum, where the
    others would wait for it. Blocks for ``TIMEOUT_S`` at most; without a gate, or if it does not
    respond, machines still refuse each other in the quorum.

    Args:
        address: ``host:port`` of the lighthouse.
        machine: Id of this machine.
        token: Secret shared by the machines.

    Raises:
        PeerRefused: There are members, and all of them have another token or version.
    """

    def __init__(self, address: str, machine: str, token: str | None) -> None:
        self._connection: socket.socket | None = None
        with suppress(OSError):
            self._connection = socket.create_connection(
                split_host_port("address", address), TIMEOUT_S
            )
        if self._connection is None:
            return
        try:
            others = _read_cards(self._connection)
            if others is None:
                self.close()
                return
            names = [name for name, *_ in others]
            if others and not any(_is_valid(card, token) for card in others):
                raise PeerRefused(
                    (machine,),
                    f"{', '.join(sorted(names))} have another token than this machine, or none, "
                    "or another version",
                )
            self._connection.sendall(json.dumps(_card(machine, token)).encode() + b"\n")
        except OSError:
            self.close()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Withdraw the card. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _card(machine: str, token: str | None) -> list[str]:
    nonce = secrets.token_hex(16)
    return [machine, nonce, signature(token, "member", *_signed_parts(machine, nonce)).hex()]


def _signed_parts(machine: str, nonce: str) -> tuple[bytes, ...]:
    return str(PROTOCOL_VERSION).encode(), machine.encode(), nonce.encode()


def _is_valid(card: list[str], token: str | None) -> bool:
    machine, nonce, mac = card
    try:
        return is_signed(bytes.fromhex(mac), token, "member", *_signed_parts(machine, nonce))
    except ValueError:
        return False


def _read_cards(connection: socket.socket) -> list[list[str]] | None:
    """The cards of the other members; ``None``: the server is no gate."""
    connection.sendall(GREETING)
    content = b""
    while not content.endswith(b"\n"):
        part = connection.recv(1 << 16)
        content += part
        if not part or len(content) > MAX_LIST_BYTES or not content.startswith(b"["):
            return None
    try:
        cards = json.loads(content)
    except (ValueError, RecursionError):
        return None
    # Cards of another form are of another version.
    return [
        [str(part) for part in card] for card in cards if isinstance(card, list) and len(card) == 3
    ]
