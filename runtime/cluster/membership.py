"""Membership: a machine's card and progress at the lighthouse's gate, signed with its token."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

from coordinator.cluster.machine_report import PROTOCOL_VERSION
from coordinator.codec import parse_json
from runtime.cluster.engine import PeerRefused, StatusReader
from runtime.cluster.machine_status import (
    MachineStatus,
    is_signed_status,
    parse_status,
    status_line,
)
from runtime.cluster.options import ENV_VARIABLES, split_host_port
from runtime.cluster.signing import is_signed, signature
from runtime.core.errors import ClusterError
from runtime.timeline.text import one_line

logger = logging.getLogger(__name__)

GREETING = b"GPUWORKER MEMBERS/1\n"
"""Requests the members' cards; the sender's card may follow."""
STATUS_GREETING = b"GPUWORKER STATUS/1\n"
"""Requests the members' cards, the last line of each, and its age in seconds."""
MAX_LINE_BYTES = 4096
"""Longest card and longest line of a member."""
MAX_LIST_BYTES = 1 << 23
TIMEOUT_S = 5.0
STATUS_INTERVAL_S = 2.0
"""Interval at which a machine sends its progress."""


class Membership:
    """This machine's card at the lighthouse's gate, for as long as it is open.

    A machine with another token learns of it here, before it takes part in a quorum, where the
    others would wait for it. Blocks for ``TIMEOUT_S`` at most; without a gate, or if it does not
    respond, machines still refuse each other in the quorum.

    Args:
        address: ``host:port`` of the lighthouse.
        token: Secret shared by the machines.

    Raises:
        PeerRefused: There are members, and all of them have another token or version.
    """

    def __init__(self, address: str, machine: str, token: str | None) -> None:
        self._address = split_host_port("address", address)
        self._machine = machine
        self._token = token
        self._closing = threading.Event()
        self._sender: threading.Thread | None = None
        self._connection: socket.socket | None = None
        with suppress(OSError):
            self._connection = self._connect(self._check)

    def _check(self, others: list[list[str]]) -> None:
        if others and not any(_is_valid(card, self._token) for card in others):
            names = [name for name, *_ in others]
            raise PeerRefused(
                (self._machine,),
                f"{', '.join(sorted(names))} have another token than this machine, or none, "
                "or another version",
            )

    def _connect(
        self, check: Callable[[list[list[str]]], object] = lambda others: None
    ) -> socket.socket | None:
        """Connect and send the card, if ``check`` of the others' cards does not raise.

        Returns:
            The connection; ``None``: the server is no gate.
        """
        connection = socket.create_connection(self._address, TIMEOUT_S)
        try:
            cards = read_list(connection, GREETING)
            if cards is None:
                connection.close()
                return None
            check([card for card in cards if _is_card(card)])
            card = _card(self._machine, self._token)
            connection.sendall(json.dumps(card).encode() + b"\n")
        except BaseException:
            connection.close()
            raise
        return connection

    def send_status(self, read: StatusReader) -> None:
        """Send the run's progress at intervals until :meth:`close`, from a thread of its own.

        If the lighthouse is restarted, the thread connects to the new one.

        Args:
            read: Returns the record of the run; see :func:`status_line`. It may wait with the
                function that it is passed.
        """
        if self._connection is None:
            return  # no gate
        self._sender = threading.Thread(
            target=self._send, args=(read,), name="cluster-status", daemon=True
        )
        self._sender.start()

    def _send(self, read: StatusReader) -> None:
        number = 0
        while not self._closing.is_set():
            number += 1
            try:
                line = status_line(self._token, self._machine, number, read(self._closing.wait))
                if self._connection is None:
                    self._connection = self._connect()
                if self._connection is not None:
                    self._connection.sendall(line)
            except OSError as error:
                logger.debug("machine %s cannot send its progress: %s", self._machine, error)
                self._disconnect()
            except Exception as error:
                logger.debug("machine %s cannot read its progress: %s", self._machine, error)
            self._closing.wait(STATUS_INTERVAL_S)
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Withdraw the card. Idempotent; blocks for ``TIMEOUT_S`` at most."""
        self._closing.set()
        if self._sender is not None:
            self._sender.join(TIMEOUT_S)
        self._disconnect()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The machines of a cluster.

    Attributes:
        machines: Those with this token, by id.
        num_refused: Number of those with another token or version.
    """

    machines: tuple[MachineStatus, ...]
    num_refused: int


def read_cluster_status(address: str, token: str | None) -> ClusterStatus:
    """The machines that have their card at a lighthouse, and their progress.

    Blocks for some seconds at most.

    Args:
        address: ``host:port`` of the lighthouse.
        token: Secret shared by the machines.

    Raises:
        ValueError: The address is malformed.
        ClusterError: Nothing answers there, the server is no lighthouse, or all machines have
            another token or version.
    """
    where = split_host_port("address", address)
    try:
        with socket.create_connection(where, TIMEOUT_S) as connection:
            entries = read_list(connection, STATUS_GREETING)
    except OSError as error:
        raise ClusterError(
            f"no lighthouse answers at {address} ({error}): start one there with 'gpuworker "
            "lighthouse', or pass the address that it prints"
        ) from error
    if entries is None:
        raise ClusterError(
            f"the server at {address} is no lighthouse of this version of gpuworker: pass the "
            "address that 'gpuworker lighthouse' prints"
        )
    verified = [status for entry in entries if (status := _verified(entry, token)) is not None]
    num_refused = len(entries) - len(verified)
    # In order of their numbers: another process may have sent a copy of an older line.
    found = {each.machine: each for each in sorted(verified, key=lambda each: each.number)}
    if num_refused and not found:
        raise ClusterError(
            f"the machines at {address} ({num_refused}) have another token or version: set "
            f"{ENV_VARIABLES['token'][0]} to the token that they pass to cluster(token=...)"
        )
    return ClusterStatus(
        machines=tuple(found[name] for name in sorted(found)), num_refused=num_refused
    )


def _verified(entry: object, token: str | None) -> MachineStatus | None:
    """The status in an entry of the list; ``None``: it is malformed or has another token."""
    match entry:
        case [card, line, int() | float() as age_s] if _is_card(card):
            if not _is_valid(card, token):
                return None
            if isinstance(line, str) and is_signed_status(line, token):
                with suppress(ValueError):
                    status = parse_status(line, age_s)
                    if status.machine == one_line(card[0]):
                        return status
            return MachineStatus(machine=one_line(card[0]), age_s=age_s)
    return None


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


def _is_card(card: object) -> TypeGuard[list[str]]:
    """True for a card of this version."""
    return isinstance(card, list) and len(card) == 3 and all(isinstance(p, str) for p in card)


def read_list(connection: socket.socket, greeting: bytes) -> list[Any] | None:
    """Send a greeting, and read the gate's list; ``None``: the server is no gate."""
    connection.sendall(greeting)
    content = b""
    while not content.endswith(b"\n"):
        part = connection.recv(1 << 16)
        content += part
        if not part or len(content) > MAX_LIST_BYTES or not content.startswith(b"["):
            return None
    try:
        found = parse_json(content)
    except ValueError:
        return None
    return found if isinstance(found, list) else None
