"""Gate in front of a lighthouse: forwards gRPC, refuses web pages, and lists the members and their
progress.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from coordinator.codec import parse_json
from runtime.cluster.machine_status import MachineStatus, parse_status, status_page
from runtime.cluster.membership import GREETING, MAX_LINE_BYTES, STATUS_GREETING
from runtime.core.host_names import LOOPBACK, is_address, page_refusal
from runtime.timeline.text import one_line

logger = logging.getLogger(__name__)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""First bytes of a gRPC connection. No browser sends them without TLS."""
FIRST_BYTES_TIMEOUT_S = 5.0
"""Longest time for which a connection may be open without its first line."""
CONNECT_TIMEOUT_S = 10.0
GATE_CLOSE_TIMEOUT_S = 5.0
COPY_BYTES = 1 << 16
PROGRESS_PAGE = "/status"
"""The page that the other one loads every second into itself."""
PAGES = ("/", PROGRESS_PAGE)
MAX_MEMBERS = 1024

_TEXT = b"Only the page itself is served here, for a request to this host."
REFUSAL = (
    b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_TEXT), _TEXT)
)
MALFORMED = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class LighthouseGate:
    """Forwards gRPC connections from one socket to a server, in a thread of its own.

    torchft's server answers gRPC and HTTP/1 on one port, and a POST to its page ends a machine,
    from any ``Host`` and ``Origin``. gRPC is forwarded, and a GET of the page if its ``Host`` is
    an address, which no DNS server can redirect, or this host's name. The page cannot act.

    Args:
        listener: The socket for connections; closed with the gate.
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
        self._members: dict[asyncio.Task[None], _Member] = {}
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
            if task not in self._members and not isinstance(error, OSError):
                writer.write(MALFORMED)
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
        elif first == STATUS_GREETING:
            now = time.monotonic()
            members = [[m.card, m.line, now - m.received_at] for m in self._members.values()]
            writer.write(json.dumps(members).encode() + b"\n")
            await writer.drain()
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
                if path == PROGRESS_PAGE:
                    writer.write(_with_section(await answers.read(), self._page()))
                await _copy(answers, writer)
            finally:
                requests.close()

    def _allowed_path(self, head: bytes) -> str | None:
        """The path of a request that may be forwarded, else ``None``."""
        line, *rest = head.decode("latin-1").split("\r\n")
        headers = [(name, value.strip()) for name, _, value in (h.partition(":") for h in rest)]
        if page_refusal(headers, lambda name: name in self._names or is_address(name)) is not None:
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

    def _page(self) -> bytes:
        """The section of the members' progress, which is not verified: there is no token here."""
        now = time.monotonic()
        members = sorted(self._members.values(), key=lambda member: member.machine)
        return status_page([member.status(now) for member in members]).encode()

    async def _list_members(
        self,
        task: asyncio.Task[None],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Send the other members' cards. A card that the machine sends counts while it stays, and
        so does the last line of those that follow.
        """
        writer.write(json.dumps([m.card for m in self._members.values()]).encode() + b"\n")
        await writer.drain()
        async with asyncio.timeout(FIRST_BYTES_TIMEOUT_S):
            line = await reader.readline()
        if not line or len(self._members) >= MAX_MEMBERS:
            return
        card = parse_json(line)
        # Sent to all members, one of which may have another version.
        if len(line) > MAX_LINE_BYTES or not (
            line.endswith(b"\n")
            and isinstance(card, list)
            and all(isinstance(part, str | int | None) for part in card)
        ):
            raise ValueError("a member's card is malformed")
        member = self._members[task] = _Member(card, time.monotonic())
        while (line := await reader.readline()).endswith(b"\n"):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"a line of {len(line)} bytes")
            member.line, member.received_at = line.decode("ascii"), time.monotonic()


@dataclass(slots=True)
class _Member:
    """A machine's card, its last line, and the time of the later one."""

    card: list[object]
    received_at: float
    line: str | None = None

    @property
    def machine(self) -> str:
        return one_line(self.card[0] if self.card else "")

    def status(self, now: float) -> MachineStatus:
        """The machine's progress, without that of a malformed line."""
        age_s = now - self.received_at
        if self.line is not None:
            with suppress(ValueError):
                return parse_status(self.line, age_s)
        return MachineStatus(machine=self.machine, age_s=age_s)


def _with_section(answer: bytes, section: bytes) -> bytes:
    """An HTTP answer with a section at the end of its page; unchanged if it is no page."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 ") or b"\r\ntransfer-encoding:" in head.lower():
        return answer
    lines = [
        line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length:")
    ]
    lines.append(b"content-length: %d" % (len(body) + len(section)))
    return b"\r\n".join(lines) + separator + body + section


async def _first_bytes(reader: asyncio.StreamReader) -> bytes:
    """The preface or a greeting, or as much as shows that it is none of them."""
    openings = (PREFACE, GREETING, STATUS_GREETING)
    first = b""
    while any(known.startswith(first) for known in openings):
        if first in openings:
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
