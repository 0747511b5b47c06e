"""StateServer: sends a machine's state to another one, as safetensors and JSON over HTTP.

Nothing is unpickled, and nothing is parsed before its signature is verified. The token itself is
never sent: the bearer token of a request is a signature over it, and the content of a response is
followed by its signature.
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

from coordinator.codec import parse_json
from runtime.checkpoint.tensor_file import load, save
from runtime.cluster.engine import ClusterState, EngineError, PeerRefused
from runtime.cluster.options import join_host_port, split_host_port
from runtime.cluster.signing import MAC_BYTES, is_signed, signature

logger = logging.getLogger(__name__)

METADATA_KEY = "meta"
RETRY_S = 0.05
"""Pause before a state that is not offered yet is requested again."""
MAX_HEAD_BYTES = 4096
REQUEST_TIMEOUT_S = 5.0
"""Longest time to receive a request."""
MAX_CONNECTIONS = 16
"""Connections served at a time; others wait."""
CHUNK_BYTES = 1 << 20
"""Bytes that must be transferred within the timeout, in both directions."""
_STATUS = re.compile(rb"HTTP/1\.\d (\d{3})( |$)")


class StateServer:
    """Sends the offered state to machines that have the token.

    Args:
        host: Address to listen on, and the only one.
        token: Secret shared by all machines.
        timeout_s: Timeout of each chunk of the state, in seconds.

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
        self.address = join_host_port(host, self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="cluster-states", daemon=True)
        self._thread.start()

    def offer(self, step: int, state: ClusterState) -> None:
        """Offer a copy of this state to machines that request this step."""
        tensors = {name: t.detach().contiguous() for name, t in state.tensors.items()}
        self._offered = step, save(tensors, {METADATA_KEY: json.dumps(state.meta)})

    def withdraw(self) -> None:
        """Offer nothing; responses in progress continue."""
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
                    time.sleep(RETRY_S)
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
        line, headers, _ = _read_head(connection, REQUEST_TIMEOUT_S)
        connection.settimeout(self._timeout_s)
        path, number = line.split(b" ")[1:2], headers.get(b"x-number", b"")
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if not path or not is_signed(_unhex(given), self._token, "ask", path[0], number):
            logger.warning("refused a request for the state with another token")
            connection.sendall(_head(HTTPStatus.UNAUTHORIZED, 0))
            return
        offered = self._offered
        if offered is None or path[0] != _path(offered[0]).encode():
            connection.sendall(_head(HTTPStatus.NOT_FOUND, 0))
            return
        content = memoryview(offered[1])
        connection.sendall(_head(HTTPStatus.OK, len(content) + MAC_BYTES))
        for start in range(0, len(content), CHUNK_BYTES):
            connection.sendall(content[start : start + CHUNK_BYTES])
        connection.sendall(signature(self._token, "state", path[0], number, content))


def fetch_state(
    machine: str,
    address: str,
    step: int,
    token: str | None,
    *,
    timeout_s: float,
    total_timeout_s: float,
    max_bytes: int,
) -> ClusterState:
    """Fetch the state of another machine, which may not be offered yet.

    Args:
        machine: The other machine's id, for errors.
        address: Address of its :class:`StateServer`.
        token: Secret shared by all machines.
        timeout_s: Timeout for the offer, and then for each chunk, in seconds.
        total_timeout_s: Timeout of the whole transfer, in seconds.
        max_bytes: Limit of the response.

    Raises:
        EngineError: The machine is gone, timed out, or has no such state.
        PeerRefused: The response is not signed with the token, too long, or malformed.
    """
    start = time.monotonic()
    while True:
        content = _request_state(
            machine, address, step, token, timeout_s, start + total_timeout_s, max_bytes
        )
        if content is not None:
            break
        if time.monotonic() > start + timeout_s:
            raise EngineError(f"{machine} offers no state of step {step}")
        time.sleep(RETRY_S)
    try:
        length = int.from_bytes(content[:8], "little")
        tensors = load(content)  # checks the header, and that it covers the content
        meta = parse_json(parse_json(content[8 : 8 + length])["__metadata__"][METADATA_KEY])
        if not isinstance(meta, dict):
            raise TypeError(f"meta is a {type(meta).__name__}")
    except (ValueError, KeyError, TypeError) as error:
        raise PeerRefused((machine,), f"its state is malformed: {error}") from error
    return ClusterState(tensors=tensors, meta=meta)


def _request_state(
    machine: str,
    address: str,
    step: int,
    token: str | None,
    timeout_s: float,
    deadline: float,
    max_bytes: int,
) -> bytes | None:
    """The verified content of a response; ``None`` if the state is not offered."""
    path, number = _path(step).encode(), secrets.token_hex(16).encode()
    bearer = signature(token, "ask", path, number).hex().encode()
    request = b"GET %s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nX-Number: %s\r\n\r\n"
    target = split_host_port("address", address)
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
                    f"it answers {status} with {size} bytes; at most {max_bytes} are accepted",
                )
            whole, mac = _read_content(connection, content, size, timeout_s, deadline)
    except ValueError as error:
        raise PeerRefused((machine,), f"its answer is not HTTP: {error}") from error
    except (OSError, MemoryError) as error:
        raise EngineError(f"no state from {machine} at {address}: {error!r}") from error
    if not is_signed(mac, token, "state", path, number, whole):
        raise PeerRefused((machine,), "its state is not signed with this machine's token")
    return whole


def _read_content(
    connection: socket.socket, content: bytearray, size: int, timeout_s: float, deadline: float
) -> tuple[bytes, bytes]:
    """Read the rest of a response; return its content and signature.

    Raises:
        OSError: It ends early, or is too slow.
    """
    connection.settimeout(timeout_s)
    next_mark, chunk_deadline = CHUNK_BYTES, time.monotonic() + timeout_s
    while len(content) < size:
        chunk = connection.recv(min(CHUNK_BYTES, size - len(content)))
        content += chunk
        now = time.monotonic()
        if len(content) >= next_mark:
            next_mark, chunk_deadline = len(content) + CHUNK_BYTES, now + timeout_s
        if not chunk or now > min(chunk_deadline, deadline):
            how = "and closed" if not chunk else "and is too slow"
            raise OSError(f"it sent {len(content)} of {size} bytes, {how}")
    del content[size:]
    return bytes(memoryview(content)[:-MAC_BYTES]), bytes(content[-MAC_BYTES:])


def _read_head(
    connection: socket.socket, timeout_s: float
) -> tuple[bytes, dict[bytes, bytes], bytearray]:
    """Read the head of a request or a response: first line, headers, and the bytes after it.

    Raises:
        OSError: It is too slow.
        ValueError: It is too long or incomplete.
    """
    deadline = time.monotonic() + timeout_s
    head = b""
    while b"\r\n\r\n" not in head:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it is too slow")
        if len(head) >= MAX_HEAD_BYTES:
            raise ValueError(f"no end in {MAX_HEAD_BYTES} bytes")
        connection.settimeout(left_s)
        chunk = connection.recv(MAX_HEAD_BYTES - len(head))
        if not chunk:
            raise ValueError(f"it ends after {len(head)} bytes")
        head += chunk
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
