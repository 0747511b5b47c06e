"""Healing: the state of one machine for another, as safetensors and JSON over HTTP.

Nothing is unpickled, and nothing is parsed before its signature is checked. The token itself
never travels: the bearer token of a request is a signature made for it, and so is what
follows the content of an answer.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import socket
import threading
import time
from contextlib import suppress
from http import HTTPStatus

from safetensors import SafetensorError
from safetensors.torch import load, save

from runtime.cluster.engine import EngineError, PeerRefused, State
from runtime.cluster.options import host_and_port, joined
from runtime.cluster.signing import MAC_BYTES, is_signed, signature

logger = logging.getLogger(__name__)

META = "meta"
NOT_YET_S = 0.05
"""How long a machine waits before it asks again for a state that is not on offer yet."""
MAX_HEAD_BYTES = 4096
REQUEST_S = 5.0
"""Within which a request must have arrived whole."""
MAX_CONNECTIONS = 16
"""Answered at a time; others wait."""
PIECE_BYTES = 1 << 20
"""What must get through within the timeout, in both directions."""
_STATUS = re.compile(rb"HTTP/1\.\d (\d{3})( |$)")


class StateServer:
    """Hands the offered state to machines that have the token.

    Args:
        host: Address to listen on, and no other.
        token: Shared by all machines.
        timeout_s: How long a piece of the state may take, in seconds.

    Attributes:
        address: ``host:port``.
    """

    def __init__(self, host: str, token: str | None, timeout_s: float) -> None:
        self._token = token
        self._timeout_s = timeout_s
        self._offered: tuple[int, bytes] | None = None
        self._closed = False
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.address = joined(host, self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="cluster-states", daemon=True)
        self._thread.start()

    def offer(self, step: int, state: State) -> None:
        """Hand out a copy of this state, as it is now, to whoever asks for this step."""
        tensors = {name: t.detach().contiguous() for name, t in state.tensors.items()}
        self._offered = step, save(tensors, {META: json.dumps(state.meta)})

    def withdraw(self) -> None:
        """Hand out nothing; answers under way go on."""
        self._offered = None

    def close(self) -> None:
        """End the server and its connections. Idempotent."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._thread.join(1.0)
        self._listener.close()

    def _serve(self) -> None:
        while not self._closed:
            self._free.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError:
                self._free.release()
                if not self._closed:  # out of descriptors, for instance
                    time.sleep(NOT_YET_S)
                continue
            threading.Thread(
                target=self._answer, args=(connection,), name="cluster-state", daemon=True
            ).start()

    def _answer(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.add(connection)
            closed = self._closed
        try:
            with connection:
                if not closed:
                    self._answer_request(connection)
        except (OSError, ValueError) as error:
            logger.debug("a request for the state ended early: %s", error)
        finally:
            with self._lock:
                self._open.discard(connection)
            self._free.release()

    def _answer_request(self, connection: socket.socket) -> None:
        line, headers, _ = _read_head(connection, REQUEST_S)
        connection.settimeout(self._timeout_s)
        path, number = line.split(b" ")[1:2], headers.get(b"x-number", b"")
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if not path or not is_signed(_unhex(given), self._token, "ask", path[0], number):
            logger.warning("refused a request for the state, which has another token")
            connection.sendall(_head(HTTPStatus.UNAUTHORIZED, 0))
            return
        offered = self._offered
        if offered is None or path[0] != _path(offered[0]).encode():
            connection.sendall(_head(HTTPStatus.NOT_FOUND, 0))
            return
        content = memoryview(offered[1])
        connection.sendall(_head(HTTPStatus.OK, len(content) + MAC_BYTES))
        for start in range(0, len(content), PIECE_BYTES):
            connection.sendall(content[start : start + PIECE_BYTES])
        connection.sendall(signature(self._token, "state", path[0], number, content))


def fetch_state(
    machine: str,
    address: str,
    step: int,
    token: str | None,
    *,
    timeout_s: float,
    within_s: float,
    max_bytes: int,
) -> State:
    """The state of another machine, which may not be on offer yet.

    Args:
        machine: The other machine, for errors.
        address: Of its :class:`StateServer`.
        step: Which state.
        token: Shared by all machines.
        timeout_s: How long to wait for the offer, and then for each piece, in seconds.
        within_s: How long all of it may take, in seconds.
        max_bytes: Limit of what it may send.

    Raises:
        EngineError: It is gone, took too long, or has no such state.
        PeerRefused: What it sent is not signed with the token, too much, or no state.
    """
    start = time.monotonic()
    while True:
        content = _ask(machine, address, step, token, timeout_s, start + within_s, max_bytes)
        if content is not None:
            break
        if time.monotonic() > start + timeout_s:
            raise EngineError(f"{machine} offers no state of step {step}")
        time.sleep(NOT_YET_S)
    try:
        length = int.from_bytes(content[:8], "little")
        tensors = load(content)  # checks the header, and that it covers the content
        meta = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][META])
        if not isinstance(meta, dict):
            raise TypeError(f"meta is a {type(meta).__name__}")
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PeerRefused((machine,), f"it sent no state: {error}") from error
    return State(tensors=tensors, meta=meta)


def _ask(
    machine: str,
    address: str,
    step: int,
    token: str | None,
    timeout_s: float,
    deadline: float,
    max_bytes: int,
) -> bytes | None:
    """The signed content of an answer; ``None``: it is not on offer."""
    path, number = _path(step).encode(), secrets.token_hex(16).encode()
    bearer = signature(token, "ask", path, number).hex().encode()
    request = b"GET %s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nX-Number: %s\r\n\r\n"
    target = host_and_port("address", address)
    try:
        with socket.create_connection(target, timeout_s) as connection:
            connection.sendall(request % (path, address.encode(), bearer, number))
            line, headers, content = _read_head(connection, timeout_s)
            if (found := _STATUS.match(line)) is None:
                raise ValueError(f"{line!r:.80}")
            status, size = int(found[1]), int(headers.get(b"content-length", b"-1"))
            if status == HTTPStatus.NOT_FOUND:
                return None
            if status == HTTPStatus.UNAUTHORIZED:
                raise PeerRefused((machine,), "it has another token")
            if status != HTTPStatus.OK or not MAC_BYTES <= size <= max_bytes:
                raise PeerRefused(
                    (machine,),
                    f"it answers {status} with {size} bytes; {max_bytes} may come",
                )
            whole, mac = _read_content(connection, content, size, timeout_s, deadline)
    except ValueError as error:
        raise PeerRefused((machine,), f"its answer is no HTTP: {error}") from error
    except (OSError, MemoryError) as error:
        raise EngineError(f"no state from {machine} at {address}: {error!r}") from error
    if not is_signed(mac, token, "state", path, number, whole):
        raise PeerRefused((machine,), "its state is not signed with this machine's token")
    return whole


def _read_content(
    connection: socket.socket, content: bytearray, size: int, timeout_s: float, deadline: float
) -> tuple[bytes, bytes]:
    """What follows a head, of which some is there already, and its signature.

    Raises:
        OSError: It ends too early, or is too slow.
    """
    connection.settimeout(timeout_s)
    enough, piece_deadline = PIECE_BYTES, time.monotonic() + timeout_s
    while len(content) < size:
        piece = connection.recv(min(PIECE_BYTES, size - len(content)))
        content += piece
        now = time.monotonic()
        if len(content) >= enough:
            enough, piece_deadline = len(content) + PIECE_BYTES, now + timeout_s
        if not piece or now > min(piece_deadline, deadline):
            how = "and no more" if not piece else "and is too slow"
            raise OSError(f"it sent {len(content)} of {size} bytes, {how}")
    del content[size:]
    return bytes(memoryview(content)[:-MAC_BYTES]), bytes(content[-MAC_BYTES:])


def _read_head(
    connection: socket.socket, within_s: float
) -> tuple[bytes, dict[bytes, bytes], bytearray]:
    """The first line of a request or an answer, its headers, and what has come behind them.

    Raises:
        OSError: It takes longer.
        ValueError: It is too long, or half of one.
    """
    deadline = time.monotonic() + within_s
    head = b""
    while b"\r\n\r\n" not in head:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it is too slow")
        if len(head) >= MAX_HEAD_BYTES:
            raise ValueError(f"no end in {MAX_HEAD_BYTES} bytes")
        connection.settimeout(left_s)
        piece = connection.recv(MAX_HEAD_BYTES - len(head))
        if not piece:
            raise ValueError(f"it ends after {len(head)} bytes")
        head += piece
    head, _, rest = head.partition(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    pairs = (header.partition(b":") for header in headers)
    found = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return line, found, bytearray(rest)


def _head(status: HTTPStatus, length: int) -> bytes:
    head = f"HTTP/1.1 {status} {status.phrase}\r\nContent-Length: {length}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode()


def _path(step: int) -> str:
    return f"/state/{step}"


def _unhex(text: bytes) -> bytes:
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return b""
