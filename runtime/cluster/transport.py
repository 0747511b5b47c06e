"""Healing: the state of one machine for another, as safetensors and JSON over HTTP.

Nothing is unpickled, and nothing is parsed before its signature is checked. The token itself
never travels: the bearer token of a request is a signature made for it, and so is what
follows the content of an answer.
"""

from __future__ import annotations

import http.client
import json
import logging
import secrets
import socket
import threading
import time
from contextlib import ExitStack, suppress

from safetensors import SafetensorError
from safetensors.torch import load, save

from runtime.cluster.engine import EngineError, PeerRefused, State, host_and_port, joined
from runtime.cluster.wire import MAC_BYTES, is_signed, signature

logger = logging.getLogger(__name__)

META = "meta"
NOT_YET_S = 0.05
"""How long a machine waits before it asks again for a state that is not on offer yet."""
MAX_REQUEST_BYTES = 4096
REQUEST_S = 5.0
"""Within which a request must have arrived whole."""
MAX_CONNECTIONS = 16
"""Answered at a time; others wait."""
PIECE_BYTES = 1 << 20
"""What must get through within the timeout, in both directions."""


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
        except OSError as error:
            logger.debug("a request for the state ended early: %s", error)
        finally:
            with self._lock:
                self._open.discard(connection)
            self._free.release()

    def _answer_request(self, connection: socket.socket) -> None:
        line, headers = _request(connection)
        connection.settimeout(self._timeout_s)
        path, number = line.split(b" ")[1:2], headers.get(b"x-number", b"")
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if not path or not is_signed(_unhex(given), self._token, "ask", path[0], number):
            logger.warning("refused a request for the state, which has another token")
            connection.sendall(_head(401, 0))
            return
        offered = self._offered
        if offered is None or path[0] != _path(offered[0]).encode():
            connection.sendall(_head(404, 0))
            return
        content = memoryview(offered[1])
        connection.sendall(_head(200, len(content) + MAC_BYTES))
        for start in range(0, len(content), PIECE_BYTES):
            connection.sendall(content[start : start + PIECE_BYTES])
        connection.sendall(signature(self._token, "state", path[0], number, content))


def fetch_state(
    machine: str, address: str, step: int, token: str | None, timeout_s: float, max_bytes: int
) -> State:
    """The state of another machine, which may not be on offer yet.

    Args:
        machine: The other machine, for errors.
        address: Of its :class:`StateServer`.
        step: Which state.
        token: Shared by all machines.
        timeout_s: How long to wait for the offer, and then for each piece, in seconds.
        max_bytes: Limit of what it may send.

    Raises:
        EngineError: It is gone, took too long, or has no such state.
        PeerRefused: What it sent is not signed with the token, too much, or no state.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        content = _ask(machine, address, step, token, timeout_s, max_bytes)
        if content is not None:
            break
        if time.monotonic() > deadline:
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
    machine: str, address: str, step: int, token: str | None, timeout_s: float, max_bytes: int
) -> bytes | None:
    """The signed content of an answer; ``None``: it is not on offer."""
    path, number = _path(step), secrets.token_hex(16)
    bearer = signature(token, "ask", path.encode(), number.encode()).hex()
    host, port = host_and_port("address", address)
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    opened = ExitStack()
    opened.callback(connection.close)
    try:
        headers = {"Authorization": f"Bearer {bearer}", "X-Number": number}
        connection.request("GET", path, headers=headers)
        answer = opened.enter_context(connection.getresponse())
        if answer.status == http.client.NOT_FOUND:
            return None
        if answer.status == http.client.UNAUTHORIZED:
            raise PeerRefused((machine,), "it has another token")
        size = answer.length
        if answer.status != http.client.OK or size is None or not MAC_BYTES <= size <= max_bytes:
            raise PeerRefused(
                (machine,), f"it answers {answer.status} with {size} bytes; {max_bytes} may come"
            )
        content = bytearray()
        enough, deadline = PIECE_BYTES, time.monotonic() + timeout_s
        while len(content) < size:
            piece = answer.read1(min(PIECE_BYTES, size - len(content)))
            content += piece
            now = time.monotonic()
            if len(content) >= enough:
                enough, deadline = len(content) + PIECE_BYTES, now + timeout_s
            if not piece or now > deadline:
                how = "and no more" if not piece else "and is too slow"
                raise EngineError(
                    f"{machine} sent {len(content)} of {size} bytes of its state, {how}"
                )
        mac, whole = bytes(content[-MAC_BYTES:]), bytes(memoryview(content)[:-MAC_BYTES])
        if not is_signed(mac, token, "state", path.encode(), number.encode(), whole):
            raise PeerRefused((machine,), "its state is not signed with this machine's token")
        return whole
    except http.client.HTTPException as error:
        raise PeerRefused((machine,), f"its answer is no HTTP: {error!r}") from error
    except (OSError, MemoryError) as error:
        raise EngineError(f"no state from {machine} at {address}: {error!r}") from error
    finally:
        opened.close()


def _request(connection: socket.socket) -> tuple[bytes, dict[bytes, bytes]]:
    """The first line and the headers of a request, which may be neither long nor slow.

    Raises:
        OSError: It is.
    """
    deadline = time.monotonic() + REQUEST_S
    head = b""
    while b"\r\n\r\n" not in head:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or len(head) >= MAX_REQUEST_BYTES:
            raise OSError("a request that is too slow or too long")
        connection.settimeout(left_s)
        piece = connection.recv(MAX_REQUEST_BYTES - len(head))
        if not piece:
            raise OSError("half a request")
        head += piece
    line, *rest = head.partition(b"\r\n\r\n")[0].split(b"\r\n")
    pairs = (header.partition(b":") for header in rest)
    return line, {name.strip().lower(): value.strip() for name, _, value in pairs}


def _head(status: int, length: int) -> bytes:
    reason = http.client.responses[status]
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    return head.encode()


def _path(step: int) -> str:
    return f"/state/{step}"


def _unhex(text: bytes) -> bytes:
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return b""
