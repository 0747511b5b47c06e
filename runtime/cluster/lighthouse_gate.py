"""Gate in front of a lighthouse: forwards gRPC, refuses web pages, and lists the members."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from contextlib import suppress

from runtime.cluster.membership import GREETING, MAX_LINE_BYTES
from runtime.core.host_names import LOOPBACK, host_name, is_address

logger = logging.getLogger(__name__)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""First bytes of a gRPC connection. No browser sends them without TLS."""
FIRST_BYTES_TIMEOUT_S = 5.0
"""Longest time for which a connection may be open without its first line."""
CONNECT_TIMEOUT_S = 10.0
GATE_CLOSE_TIMEOUT_S = 5.0
COPY_BYTES = 1 << 16
PAGES = ("/", "/status")
MAX_MEMBERS = 1024

_TEXT = b"Only the page itself is served here, for a request to this host."
REFUSAL = (
    b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_TEXT), _TEXT)
)


class LighthouseGate:
    """Forwards gRPC connections from one socket to a server, in a thread of its own.

    torchft's server answers gRPC and HTTP/1 on one port, and a POST to its page ends a machine,
    from any ``Host`` and ``Origin``. gRPC is forwarded, and a GET of the page if its ``Host`` is
    an address, which no DNS server can redirect, or this host's name. The page cannot act.

    Args:
        listener: The socket for connections; closed with the gate.
        target: Address of the server.
        host: Name on which ``listener`` listens.

    Raises:
        RuntimeError: The thread did not start.
    """

    def __init__(self, listener: socket.socket, target: tuple[str, int], host: str) -> None:
        self._listener = listener
        self._names = {*LOOPBACK, host.lower()}
        self._target = target
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._started = threading.Event()
        self._members: dict[asyncio.Task[None], object] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._main, name="lighthouse-gate", daemon=True)
        self._thread.start()
        if not self._started.wait(CONNECT_TIMEOUT_S):
            raise RuntimeError("the lighthouse's gate did not start")

    def close(self) -> None:
        """End the server and its connections. Idempotent."""
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(stopping.set)
        self._thread.join(GATE_CLOSE_TIMEOUT_S)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            logger.exception("the lighthouse's gate has failed")
        finally:
            self._started.set()
            self._listener.close()

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, sock=self._listener)
        self._started.set()
        await self._stopping.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._answer(task, reader, writer)
        except (OSError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
            logger.debug("a connection to the lighthouse has ended: %s", error)
        except asyncio.CancelledError:
            pass  # close(): the task's own server would log it
        finally:
            self._members.pop(task, None)
            self._tasks.discard(task)
            writer.close()

    async def _answer(
        self,
        task: asyncio.Task[None],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        async with asyncio.timeout(FIRST_BYTES_TIMEOUT_S):
            first = await _first_bytes(reader)
        if first == PREFACE:
            await self._forward(first, reader, writer)
        elif first == GREETING:
            await self._list_members(task, reader, writer)
        elif first:
            await self._answer_page(first, reader, writer)

    async def _answer_page(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with asyncio.timeout(FIRST_BYTES_TIMEOUT_S):
            head = first + await reader.readuntil(b"\r\n\r\n")
        path = self._allowed_path(head)
        if path is None:
            writer.write(REFUSAL)
            await writer.drain()
            return
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            answers, requests = await asyncio.open_connection(*self._target)
            try:
                request = f"GET {path} HTTP/1.1\r\nHost: lighthouse\r\nConnection: close\r\n\r\n"
                requests.write(request.encode())
                await _copy(answers, writer)
            finally:
                requests.close()

    def _allowed_path(self, head: bytes) -> str | None:
        """The path of a request that may be forwarded, else ``None``."""
        line, *rest = head.decode("latin-1").split("\r\n")
        headers = [
            (name.lower(), value.strip()) for name, _, value in (h.partition(":") for h in rest)
        ]
        hosts = [host_name(value) for name, value in headers if name == "host"]
        if len(hosts) != 1 or hosts[0] is None or any(name == "origin" for name, _ in headers):
            return None
        if hosts[0] not in self._names and not is_address(hosts[0]):
            return None
        method, _, path = line.partition(" ")
        path = path.partition(" ")[0]
        return path if method == "GET" and path in PAGES else None

    async def _forward(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            answers, requests = await asyncio.open_connection(*self._target)
        try:
            requests.write(first)
            copies = [
                asyncio.ensure_future(_copy(reader, requests)),
                asyncio.ensure_future(_copy(answers, writer)),
            ]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)
        finally:
            requests.close()

    async def _list_members(
        self,
        task: asyncio.Task[None],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Send the other members' cards; a card that the machine sends counts while it stays."""
        writer.write(json.dumps(list(self._members.values())).encode() + b"\n")
        await writer.drain()
        async with asyncio.timeout(FIRST_BYTES_TIMEOUT_S):
            line = await reader.readline()
        if not line.endswith(b"\n") or len(self._members) >= MAX_MEMBERS:
            return
        card = json.loads(line)
        if len(line) <= MAX_LINE_BYTES and isinstance(card, list):
            self._members[task] = card
            await reader.read()


async def _first_bytes(reader: asyncio.StreamReader) -> bytes:
    """The preface or the greeting, or as much as shows that it is neither."""
    first = b""
    while any(known.startswith(first) for known in (PREFACE, GREETING)):
        if first in (PREFACE, GREETING):
            break
        more = await reader.read(1)
        if not more:
            return b""
        first += more
    return first


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(COPY_BYTES):
        target.write(data)
        await target.drain()
