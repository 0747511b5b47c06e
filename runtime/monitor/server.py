"""The server behind a monitor: a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from runtime.monitor import page
from runtime.monitor.feed import Feed
from runtime.monitor.hosts import ANY, host_name
from runtime.monitor.run_reader import Reader
from runtime.monitor.viewer import Viewer
from runtime.monitor.watched_run import WatchedRun

logger = logging.getLogger(__name__)


THREAD_NAME = "monitor"
MAX_VIEWERS = 64
MAX_CONNECTIONS = 2 * MAX_VIEWERS
"""A page that is opened asks for its parts beside the stream of those that are open."""
SPARE_DESCRIPTORS = 256
"""Left to the run below the process's limit, or a quarter of that if it is less."""
HEADER_S = 5.0
"""How long a connection may be open without a whole request."""
STALLED_S = 30.0
"""How long a page may read nothing of what it is being sent."""
SWEEP_S = 0.5
START_S = 10.0
LOOK_S = 5.0
CLOSE_S = 1.0
"""How long a page that reads slowly may hold up the end."""
PING_S = 15.0
RETRY_MS = 2000

HEADERS = {
    "Content-Security-Policy": page.POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "gpuworker",
}
_FOR_GOOD = "private, max-age=31536000, immutable"


class Server:
    """Serves one page and its data, and reads the run at intervals.

    The thread holds a reference to this object. This object holds none to the monitor and,
    once the run is over, none to the run.

    Args:
        listener: The socket for requests; closed with the server.
        names: Host names to which it answers.
        feed: The data that the pages show.
        poll_s: Seconds between two readings of the run.
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
        # Of the loop: nothing is sent to one that was closed. The collector of cycles may call
        # stop() in a thread that holds it.
        self._lock = threading.RLock()
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._reader: Reader | None = None
        self._complained = False
        self._connections: _Connections | None = None

    # From any thread.

    def start(self) -> None:
        """Start the thread, and wait until it serves.

        Raises:
            RuntimeError: It could not be started.
        """
        try:
            self._thread.start()
        except BaseException:
            self._listener.close()
            raise
        if not self._started.wait(START_S) or self._error is not None:
            self.stop()
            raise RuntimeError("the monitor's server did not start") from self._error

    def follow(self, run: WatchedRun) -> None:
        """Show this run from now on. Returns at once."""
        self._send(lambda: self._begin(run))

    def look(self) -> None:
        """Read the run now. Returns at once; may be called from any thread."""
        self._send(lambda: self._due.set())

    def look_now(self, timeout_s: float = LOOK_S) -> None:
        """Read the run, and wait until that is done or times out; from any thread."""
        done = threading.Event()

        def look() -> None:
            self._try_to_look()
            done.set()

        if threading.current_thread() is self._thread:
            self._try_to_look()
        elif self._send(look):
            done.wait(timeout_s)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Notify the pages, end the thread and wait for it. Idempotent.

        Does not wait in the server's own thread, where the garbage collector may call it.
        """
        with self._lock:
            self._stopped = True
        self._send(lambda: self._over.set())
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the server is running."""
        return self._thread.is_alive()

    @property
    def num_connections(self) -> int:
        """Number of open connections of any kind; from any thread."""
        connections = self._connections
        return 0 if connections is None else len(connections)

    def _send(self, action: Callable[[], None]) -> bool:
        """Have the server's thread do something; ``False`` where it does not serve."""
        with self._lock:
            if self._loop is None:
                return False
            self._loop.call_soon_threadsafe(action)
            return True

    # On the server's thread.

    def _main(self) -> None:
        try:
            # Whatever loop the process prefers elsewhere.
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._error = error
            if self._started.is_set():
                logger.exception("the monitor's server died; the run goes on")
        finally:
            self._listener.close()
            self._leave()
            self._started.set()

    async def _serve(self) -> None:
        self._due, self._over = asyncio.Event(), asyncio.Event()
        self._viewers: set[Viewer] = set()
        app = web.Application(middlewares=[self._guard], logger=_quiet)
        for path, read, content_type, cached in (
            ("/", page.served_page, "text/html", "no-store"),
            (f"/{page.STYLE_NAME}", page.style, "text/css", "no-store"),
            (f"/{page.SCRIPT_NAME}", page.script, "text/javascript", "no-store"),
            # Its name has the version: it never changes.
            (f"/{page.plots_name()}", page.plots, "text/javascript", _FOR_GOOD),
        ):
            app.router.add_get(path, partial(_part, read, content_type, cached))
        app.router.add_get("/events", self._events)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_quiet,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=CLOSE_S,
        )
        await runner.setup()
        assert runner.server is not None
        connections = self._connections = _Connections(self._listener, runner.server)
        looks = asyncio.create_task(self._look_on())
        try:
            connections.open()
            with self._lock:
                self._loop = asyncio.get_running_loop()
                if self._stopped:  # whoever started it waits no longer
                    self._over.set()
            self._started.set()
            await self._over.wait()
        finally:
            with self._lock:
                self._loop = None  # which is about to be closed
            looks.cancel()
            self._try_to_look()  # the run may be over since the last look
            for viewer in self._viewers:
                viewer.put(b"event: bye\ndata: {}\n\n")
                viewer.close()
            # Let what is being sent go out for a while, then cut all connections.
            await connections.stop_accepting()
            await runner.cleanup()
            connections.abort()
            await _turns()

    def _leave(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _begin(self, run: WatchedRun) -> None:
        try:
            if self._reader is not None:
                self._reader.close()
            self._reader = None
            reader = Reader(run, self._poll_s)
            self._feed.begin(reader.facts())
            self._reader = reader
            self._look()
            for viewer in self._viewers:
                viewer.restart()
        except Exception:
            self._complain()
        self._due.set()

    async def _look_on(self) -> None:
        while True:
            try:
                # Without a run there is nothing to look at, and no need to wake up.
                timeout_s = PING_S if self._reader is None else self._poll_s
                await asyncio.wait_for(self._due.wait(), timeout_s)
            except TimeoutError:
                if self._reader is None:
                    self._tell(b": still here\n\n")
            self._due.clear()
            self._try_to_look()

    def _try_to_look(self) -> None:
        try:
            self._look()
        except Exception:
            self._complain()

    def _look(self) -> None:
        reader = self._reader
        if reader is None:
            return
        look = reader.look()
        message = self._feed.add(look.now, look.ticks, look.epochs, look.events)
        self._tell(_message("news", message))
        if look.over:
            self._reader = None
            reader.close()

    def _tell(self, message: bytes) -> None:
        """Send something to all pages that are open."""
        for viewer in self._viewers:
            viewer.put(message)

    def _complain(self) -> None:
        if not self._complained:
            self._complained = True
            logger.exception("the monitor failed, which it tells once; the run goes on")

    def _history(self) -> bytes:
        return _message("history", self._feed.history())

    @web.middleware
    async def _guard(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Refuse what is not meant for this server (as by DNS rebinding), and all but reading."""
        hosts = request.headers.getall("Host", [])
        name = host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None or (name not in self._names and ANY not in self._names):
            return _refusal(
                421, "This monitor does not answer to this host name: see allowed_hosts of Monitor."
            )
        if request.method not in ("GET", "HEAD"):
            return _refusal(405, "This monitor can only be read.", Allow="GET, HEAD")
        assert self._connections is not None
        connection = self._connections.of(request.transport)
        try:
            connection.answering = True
            return await handler(request)
        except web.HTTPException as error:
            return _refusal(error.status, error.reason)
        except Exception:
            self._complain()
            return _refusal(500, "The monitor failed: see the log of the run.")
        finally:
            connection.answering = False
            connection.changed = asyncio.get_running_loop().time()

    async def _events(self, request: web.Request) -> web.StreamResponse:
        headers = {**HEADERS, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        if request.method == "HEAD":
            return web.Response(headers=headers)
        if self._over.is_set() or len(self._viewers) >= MAX_VIEWERS:
            return _refusal(503, "Too many pages are open.")
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
    """What is known of one: whether a handler works for it, how many bytes wait to be read,
    and when either last changed."""

    changed: float
    answering: bool = False
    waiting_bytes: int = 0


class _Connections:
    """Takes connections in, no more than a page needs, and closes those that are not used.

    Somebody who opens many and sends nothing must not take the process's descriptors, which
    the run shares. Above the limits nobody is taken in, and who comes waits in the system's
    queue. In the event loop's thread alone, but for ``len()``.

    Args:
        listener: Where they come in.
        make_protocol: Makes what speaks HTTP to one.
    """

    def __init__(
        self, listener: socket.socket, make_protocol: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_protocol = make_protocol
        self._open: dict[asyncio.BaseTransport, _Connection] = {}
        self._entering: set[asyncio.Task[None]] = set()
        self._accepting = self._closed = False
        self._sweep_at: asyncio.TimerHandle | None = None
        self._told: set[str] = set()

    def __len__(self) -> int:
        return len(self._open) + len(self._entering)

    def open(self) -> None:
        """Take in who comes, from now on."""
        self._listener.setblocking(False)
        self._go_on()

    def of(self, transport: asyncio.BaseTransport | None) -> _Connection:
        """What is known of a connection; of one that was cut just now, nothing."""
        found = None if transport is None else self._open.get(transport)
        return _Connection(self._loop.time()) if found is None else found

    async def stop_accepting(self) -> None:
        """Take nobody in any more; who is being taken in becomes known first."""
        self._closed = True
        self._pause()
        if self._sweep_at is not None:
            self._sweep_at.cancel()
        while self._entering:
            await asyncio.wait(self._entering)
        await _turns()

    def abort(self) -> None:
        """Cut all of them, whatever they still have to be sent."""
        for transport in self._open:
            _abort(transport)

    def _go_on(self) -> None:
        if not self._accepting and not self._closed:
            self._accepting = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _pause(self, why: str | None = None) -> None:
        """Take nobody in until the next look; a reader that stayed would be called at once."""
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener.fileno())
        if why is not None:
            if why not in self._told:
                self._told.add(why)
                logger.warning(
                    "the monitor refuses new connections for now, since %s; the run goes on, and "
                    "this warning comes once",
                    why,
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
        # The system gives the lowest number that is free: all below it are in use.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY and sock.fileno() >= limit - min(
            SPARE_DESCRIPTORS, limit // 4
        ):
            sock.close()
            self._pause(f"the process nears its limit of {limit} descriptors for connections")
            return
        task = self._loop.create_task(self._enter(sock))
        self._entering.add(task)
        task.add_done_callback(self._entering.discard)

    async def _enter(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            transport, _ = await self._loop.connect_accepted_socket(self._make_protocol, sock)
        except OSError:  # it was closed again
            sock.close()
            return
        self._open[transport] = _Connection(self._loop.time())
        self._sweep_soon()

    def _sweep_soon(self) -> None:
        if self._sweep_at is None and not self._closed:
            self._sweep_at = self._loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """Close what is not used, and forget what is closed."""
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
                pass  # a page that waits for news
            elif now - connection.changed > (STALLED_S if waiting_bytes else HEADER_S):
                transport.abort()
        if self._open:
            self._sweep_soon()
        self._go_on()


def _abort(transport: asyncio.BaseTransport) -> None:
    assert isinstance(transport, asyncio.WriteTransport)
    transport.abort()


async def _turns() -> None:
    """Some turns of the loop: connections are opened and closed over more than one."""
    for _ in range(4):
        await asyncio.sleep(0)


# Broken requests are the sender's trouble: they are answered, and fill nobody's log.
_quiet = logging.getLogger(f"{__name__}.requests")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False


def _message(event: str, data: str) -> bytes:
    return f"event: {event}\ndata: {data}\n\n".encode("ascii")


async def _part(
    read: Callable[[], str | bytes], content_type: str, cached: str, request: web.Request
) -> web.StreamResponse:
    """A part of the page, whatever is asked of it."""
    found = read()
    return web.Response(
        body=found.encode("utf-8") if isinstance(found, str) else found,
        content_type=content_type,
        charset="utf-8",
        headers={**HEADERS, "Cache-Control": cached},
    )


def _refusal(status: int, reason: str, **headers: str) -> web.Response:
    return web.Response(status=status, text=f"{reason}\n", headers={**HEADERS, **headers})
