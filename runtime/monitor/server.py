"""MonitorServer: the HTTP server of a monitor, in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

from aiohttp import web

from runtime.core.host_names import page_refusal
from runtime.monitor import monitor_page
from runtime.monitor.feed import Feed
from runtime.monitor.hosts import ANY_HOST
from runtime.monitor.run_reader import RunReader
from runtime.monitor.run_view import RunView
from runtime.monitor.viewer import Viewer

try:
    import resource
except ImportError:  # Windows
    HAS_LIMITS = False
else:
    HAS_LIMITS = True

logger = logging.getLogger(__name__)

THREAD_NAME = "monitor"
MAX_VIEWERS = 64
MAX_CONNECTIONS = 2 * MAX_VIEWERS
"""Twice the open pages, because a new page also loads its parts."""
SPARE_DESCRIPTORS = 256
"""File descriptors left to the run below the process's limit; at most a quarter of the limit."""
REQUEST_TIMEOUT_S = 5.0
"""Longest time for which a connection may be open without a complete request."""
STALL_TIMEOUT_S = 30.0
"""Longest time for which a page may read nothing of the data sent to it."""
SWEEP_INTERVAL_S = 0.5
START_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0
"""Longest delay of the shutdown by a page that reads slowly."""
PING_INTERVAL_S = 15.0
RETRY_MS = 2000

HEADERS = {
    "Content-Security-Policy": monitor_page.POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "gpuworker",
}
_REFUSALS = {
    HTTPStatus.MISDIRECTED_REQUEST: "This monitor does not answer to this host name: see "
    "allowed_hosts of Monitor.",
    HTTPStatus.FORBIDDEN: "This monitor does not answer to requests of other pages.",
}
_IMMUTABLE = "private, max-age=31536000, immutable"


class MonitorServer:
    """Serves one page and its data, and reads the run at intervals.

    The thread references this object, which references neither the monitor nor, after the end of
    the run, the run.

    Args:
        listener: The socket for requests; closed with the server.
        names: Accepted host names.
        poll_s: Seconds between readings of the run.
    """

    def __init__(
        self, listener: socket.socket, names: frozenset[str], feed: Feed, poll_s: float
    ) -> None:
        self._listener = listener
        self._names = names
        self._feed = feed
        self._poll_s = poll_s
        self._thread = threading.Thread(target=self._main, name=THREAD_NAME, daemon=True)
        self._started = threading.Event()
        # Guards _loop, which is never used once closed. Reentrant: the garbage collector may call
        # stop() in a thread that holds it.
        self._lock = threading.RLock()
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._reader: RunReader | None = None
        self._failure_logged = False
        self._connections: _Connections | None = None

    # From any thread.

    def start(self) -> None:
        """Start the thread, and wait until it serves.

        Raises:
            RuntimeError: The server did not start.
        """
        try:
            self._thread.start()
        except BaseException:
            self._listener.close()
            raise
        if not self._started.wait(START_TIMEOUT_S) or self._error is not None:
            self.stop()
            raise RuntimeError("the monitor's server did not start") from self._error

    def follow(self, run: RunView) -> None:
        """Show this run from now on. Returns at once."""
        self._call_soon(lambda: self._begin(run))

    def read_soon(self) -> None:
        """Schedule a reading of the run. Returns at once."""
        self._call_soon(lambda: self._due.set())

    def read_now(self, timeout_s: float = READ_TIMEOUT_S) -> None:
        """Read the run, and wait for completion or the timeout."""
        done = threading.Event()

        def read() -> None:
            self._try_read()
            done.set()

        if threading.current_thread() is self._thread:
            self._try_read()
        elif self._call_soon(read):
            done.wait(timeout_s)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Notify the pages, end the thread and wait for it. Idempotent.

        Does not wait in the server's own thread, where the garbage collector may call it.
        """
        with self._lock:
            self._stopped = True
        self._call_soon(lambda: self._stopping.set())
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    @property
    def num_connections(self) -> int:
        """Number of open connections of any kind."""
        connections = self._connections
        return 0 if connections is None else len(connections)

    def _call_soon(self, action: Callable[[], None]) -> bool:
        """Run an action in the server's thread; ``False`` if it is not serving."""
        with self._lock:
            if self._loop is None:
                return False
            self._loop.call_soon_threadsafe(action)
            return True

    # On the server's thread.

    def _main(self) -> None:
        try:
            # Independent of the process's event loop policy.
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._error = error
            if self._started.is_set():
                logger.exception("the monitor's server failed; the run continues")
        finally:
            self._listener.close()
            self._close_reader()
            self._started.set()

    async def _serve(self) -> None:
        self._due, self._stopping = asyncio.Event(), asyncio.Event()
        self._viewers: set[Viewer] = set()
        app = web.Application(middlewares=[self._guard], logger=_silent_logger)
        for path, read, content_type, cached in (
            ("/", monitor_page.served_page, "text/html", "no-store"),
            (f"/{monitor_page.STYLE_NAME}", monitor_page.style, "text/css", "no-store"),
            (f"/{monitor_page.SCRIPT_NAME}", monitor_page.script, "text/javascript", "no-store"),
            # Immutable: its name has the version.
            (
                f"/{monitor_page.plotly_name()}",
                monitor_page.plotly_script,
                "text/javascript",
                _IMMUTABLE,
            ),
        ):
            app.router.add_get(path, partial(_page_part, read, content_type, cached))
        app.router.add_get("/events", self._events)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_silent_logger,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=CLOSE_TIMEOUT_S,
        )
        await runner.setup()
        assert runner.server is not None
        connections = self._connections = _Connections(self._listener, runner.server)
        polling = asyncio.create_task(self._poll())
        try:
            connections.open()
            with self._lock:
                self._loop = asyncio.get_running_loop()
                if self._stopped:  # start() has timed out
                    self._stopping.set()
            self._started.set()
            await self._stopping.wait()
        finally:
            with self._lock:
                self._loop = None  # about to be closed
            polling.cancel()
            self._try_read()  # the run may have ended since the last reading
            for viewer in self._viewers:
                viewer.put(b"event: bye\ndata: {}\n\n")
                viewer.close()
            # Let responses in progress complete for a while, then abort all connections.
            await connections.stop_accepting()
            await runner.cleanup()
            connections.abort()
            await _loop_iterations()

    def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _begin(self, run: RunView) -> None:
        try:
            if self._reader is not None:
                self._reader.close()
            self._reader = None
            reader = RunReader(run, self._poll_s)
            self._feed.begin(reader.facts())
            self._reader = reader
            self._read()
            for viewer in self._viewers:
                viewer.restart()
        except Exception:
            self._log_failure()
        self._due.set()

    async def _poll(self) -> None:
        while True:
            try:
                # Without a run only pings are due.
                timeout_s = PING_INTERVAL_S if self._reader is None else self._poll_s
                await asyncio.wait_for(self._due.wait(), timeout_s)
            except TimeoutError:
                if self._reader is None:
                    self._broadcast(b": still here\n\n")
            self._due.clear()
            self._try_read()

    def _try_read(self) -> None:
        try:
            self._read()
        except Exception:
            self._log_failure()

    def _read(self) -> None:
        reader = self._reader
        if reader is None:
            return
        snapshot = reader.read()
        message = self._feed.add(snapshot.now, snapshot.ticks, snapshot.epochs, snapshot.events)
        self._broadcast(_message("news", message))
        if snapshot.over:
            self._reader = None
            reader.close()

    def _broadcast(self, message: bytes) -> None:
        for viewer in self._viewers:
            viewer.put(message)

    def _log_failure(self) -> None:
        if not self._failure_logged:
            self._failure_logged = True
            logger.exception("the monitor failed (logged once); the run continues")

    def _history(self) -> bytes:
        return _message("history", self._feed.history())

    @web.middleware
    async def _guard(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Refuse requests of other pages, for other hosts, and methods other than GET and HEAD."""
        refusal = page_refusal(
            request.headers.items(), lambda name: not self._names.isdisjoint((name, ANY_HOST))
        )
        if refusal is not None:
            return _error_response(refusal, _REFUSALS[refusal])
        if request.method not in ("GET", "HEAD"):
            return _error_response(405, "This monitor can only be read.", Allow="GET, HEAD")
        assert self._connections is not None
        connection = self._connections.of(request.transport)
        try:
            connection.answering = True
            return await handler(request)
        except web.HTTPException as error:
            return _error_response(error.status, error.reason)
        except Exception:
            self._log_failure()
            return _error_response(500, "The monitor failed: see the log of the run.")
        finally:
            connection.answering = False
            connection.changed = asyncio.get_running_loop().time()

    async def _events(self, request: web.Request) -> web.StreamResponse:
        headers = {**HEADERS, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        if request.method == "HEAD":
            return web.Response(headers=headers)
        if self._stopping.is_set() or len(self._viewers) >= MAX_VIEWERS:
            return _error_response(503, "Too many pages are open.")
        viewer = Viewer(self._history)
        self._viewers.add(viewer)
        response = web.StreamResponse(headers=headers)
        try:
            await response.prepare(request)
            await response.write(f"retry: {RETRY_MS}\n\n".encode())
            while (message := await viewer.next()) is not None:
                await response.write(message)
        except ConnectionError:
            pass  # the page was closed
        finally:
            self._viewers.discard(viewer)
        return response


@dataclass(slots=True)
class _Connection:
    """State of a connection: a handler is running, bytes not yet read by the client, and the time
    of the last change of either.
    """

    changed: float
    answering: bool = False
    waiting_bytes: int = 0


class _Connections:
    """Accepts connections up to a limit, and closes idle ones.

    Clients that open many connections and send nothing must not exhaust the file descriptors,
    which the run shares. Above the limits none is accepted, and clients wait in the system's
    backlog. Used in the event loop's thread only, except ``len()``.

    Args:
        make_protocol: Creates the HTTP protocol of a connection.
    """

    def __init__(
        self, listener: socket.socket, make_protocol: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_protocol = make_protocol
        self._open: dict[asyncio.BaseTransport, _Connection] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._accepting = self._closed = False
        self._sweep_at: asyncio.TimerHandle | None = None
        self._warned: set[str] = set()

    def __len__(self) -> int:
        return len(self._open) + len(self._opening)

    def open(self) -> None:
        self._listener.setblocking(False)
        self._resume()

    def of(self, transport: asyncio.BaseTransport | None) -> _Connection:
        """State of a connection; a new one if it was just aborted."""
        found = None if transport is None else self._open.get(transport)
        return _Connection(self._loop.time()) if found is None else found

    async def stop_accepting(self) -> None:
        """Stop accepting, after connections in progress are registered."""
        self._closed = True
        self._pause()
        if self._sweep_at is not None:
            self._sweep_at.cancel()
        while self._opening:
            await asyncio.wait(self._opening)
        await _loop_iterations()

    def abort(self) -> None:
        """Abort all connections, with unsent data."""
        for transport in self._open:
            _abort(transport)

    def _resume(self) -> None:
        if not self._accepting and not self._closed:
            self._accepting = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _pause(self, reason: str | None = None) -> None:
        """Stop accepting until the next sweep; a registered reader would be called at once."""
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener.fileno())
        if reason is not None:
            if reason not in self._warned:
                self._warned.add(reason)
                logger.warning(
                    "the monitor accepts no new connections for now, because %s; the run continues "
                    "(logged once)",
                    reason,
                )
            self._sweep_soon()

    def _accept(self) -> None:
        if len(self) >= MAX_CONNECTIONS:
            self._pause(f"it has {MAX_CONNECTIONS} connections")
            return
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(f"the system has no more connections: {error.strerror}")
            return
        # The system assigns the lowest free descriptor: all below it are in use.
        limit = descriptor_limit()
        if limit is not None and sock.fileno() >= limit - min(SPARE_DESCRIPTORS, limit // 4):
            sock.close()
            self._pause(f"the process nears its limit of {limit} descriptors for connections")
            return
        task = self._loop.create_task(self._open_connection(sock))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_connection(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            transport, _ = await self._loop.connect_accepted_socket(self._make_protocol, sock)
        except OSError:  # already closed by the client
            sock.close()
            return
        self._open[transport] = _Connection(self._loop.time())
        self._sweep_soon()

    def _sweep_soon(self) -> None:
        if self._sweep_at is None and not self._closed:
            self._sweep_at = self._loop.call_later(SWEEP_INTERVAL_S, self._sweep)

    def _sweep(self) -> None:
        """Close idle connections, and drop closed ones."""
        self._sweep_at = None
        now = self._loop.time()
        for transport, connection in list(self._open.items()):
            assert isinstance(transport, asyncio.WriteTransport)
            waiting_bytes = transport.get_write_buffer_size()
            if transport.is_closing() and not waiting_bytes:
                del self._open[transport]
            elif waiting_bytes != connection.waiting_bytes:
                connection.waiting_bytes, connection.changed = waiting_bytes, now
            elif connection.answering and not waiting_bytes:
                pass  # a page waiting for messages
            elif now - connection.changed > (
                STALL_TIMEOUT_S if waiting_bytes else REQUEST_TIMEOUT_S
            ):
                transport.abort()
        if self._open:
            self._sweep_soon()
        self._resume()


def _abort(transport: asyncio.BaseTransport) -> None:
    assert isinstance(transport, asyncio.WriteTransport)
    transport.abort()


async def _loop_iterations() -> None:
    """Run the loop some iterations: connections open and close over several."""
    for _ in range(4):
        await asyncio.sleep(0)


# Malformed requests are answered but not logged.
_silent_logger = logging.getLogger(f"{__name__}.requests")
_silent_logger.addHandler(logging.NullHandler())
_silent_logger.propagate = False


def _message(event: str, data: str) -> bytes:
    return f"event: {event}\ndata: {data}\n\n".encode("ascii")


async def _page_part(
    read: Callable[[], str | bytes], content_type: str, cached: str, request: web.Request
) -> web.StreamResponse:
    """Serve a part of the page, for any query."""
    found = read()
    return web.Response(
        body=found.encode("utf-8") if isinstance(found, str) else found,
        content_type=content_type,
        charset="utf-8",
        headers={**HEADERS, "Cache-Control": cached},
    )


def _error_response(status: int, reason: str, **headers: str) -> web.Response:
    return web.Response(status=status, text=f"{reason}\n", headers={**HEADERS, **headers})


def descriptor_limit() -> int | None:
    """Limit of the process's open file descriptors; ``None``: there is none."""
    if not HAS_LIMITS:
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit
