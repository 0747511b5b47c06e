"""Monitor: a live web page of a run."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable

from runtime.core.checks import check_float, check_int, check_text, require_modules
from runtime.core.threads import Closeable
from runtime.monitor import monitor_page
from runtime.monitor.feed import Feed
from runtime.monitor.run_view import RunView
from runtime.timeline.text import write_text

logger = logging.getLogger(__name__)

MIN_POLL_S = 0.05
MAX_POLL_S = 3600.0


class Monitor(Closeable):
    """A web page that shows a live run: attach it with ``handle.attach(monitor)``.

    The page leads with throughput, lost time and the loss. It shows the progress and time left,
    the curves of scalars, a panel for each rank with its time by cause, the anchor, the load of
    the machine and live events. For a run with ``.timeline(Timeline())`` it also shows the time
    before the monitor was attached, and the events of each rank.

    The server runs in its own daemon thread from here until :meth:`close`, the end of the
    ``with`` block, of this object or of the process. It keeps running after the run has ended,
    so the page can still be opened; a handle keeps the monitors attached to it. One monitor
    shows one run at a time: when that run has ended, another may be attached, whose page
    replaces the first. A run may have several monitors.

    A page receives the whole history at each load; a page that reads too slowly receives it again
    instead of the missed messages. The run never waits for a page or the server. A failure of the
    monitor is logged once and affects nothing else.

    The server only answers read requests with an accepted host name: this machine's loopback,
    ``host`` or one of ``allowed_hosts``. Requests that a page of another site makes (with an
    ``Origin``) are refused. There is no password: everyone who can reach the server
    can read the page. If ``host`` is not the loopback, that is everyone on the network; an SSH
    tunnel (``ssh -L 8080:localhost:8080 machine``) is safer.

    Every method is callable from any thread.

    Args:
        port: Port to listen on; 0 picks a free one, see the attribute ``port``.
        host: Address or name of this machine to listen on.
        allowed_hosts: Further names and addresses, without port, under which the page may be
            opened; ``"*"`` allows all.
        poll_s: Seconds between readings of the run, 0.05 to 3600.

    Attributes:
        host: Address or name that it listens on.
        port: Port that it listens on; never 0.
        url: Address to open in a browser.

    Raises:
        ImportError: The extra ``monitor`` is not installed.
        OSError: The port is in use or not permitted.
        TypeError, ValueError: A setting is invalid.
    """

    def __init__(
        self,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        allowed_hosts: Iterable[str] = (),
        poll_s: float = 1.0,
    ) -> None:
        require_modules("Monitor", ("aiohttp", "plotly"), "monitor")
        # Imported here: requires the extra.
        from runtime.monitor.hosts import allowed_names, is_loopback, listen, url_of
        from runtime.monitor.server import MonitorServer

        number = check_int("Monitor: port", port, 0, 65535)
        check_text("Monitor: host", host, "a name or an address")
        names = allowed_names(host, allowed_hosts)
        poll_s = check_float("Monitor: poll_s", poll_s, MIN_POLL_S, MAX_POLL_S)
        listener = listen(host, number)
        self.host = host
        self.port = int(listener.getsockname()[1])
        self.url = url_of(host, self.port)
        self._feed = Feed()
        self._lock = threading.Lock()  # guards _run, attaching and closing
        self._run: RunView | None = None
        self._server = MonitorServer(listener, names, self._feed, poll_s)
        self._server.start()
        # Also runs at the end of the process, while threads can still be joined.
        self._close = weakref.finalize(self, self._server.stop)
        if not is_loopback(host):
            logger.warning(
                "the monitor at %s can be read by everyone who reaches %s", self.url, host
            )
        logger.info("monitor at %s", self.url)

    def watch(self, run: RunView) -> None:
        """Show this run; called by :meth:`~gpuworker.TrainerHandle.attach`.

        Raises:
            RuntimeError: The monitor is closed.
            ValueError: It shows another run that is not over.
        """
        with self._lock:
            if not self._close.alive:
                raise RuntimeError("this Monitor is closed: create a new one")
            if self._run is not None and self._run.end() is None:
                raise ValueError(
                    "this Monitor shows another run that is still running: create a Monitor for "
                    "each, or attach it after the end of that run"
                )
            self._run = run if run.end() is None else None
            self._server.follow(run)

    def run_ended(self) -> None:
        """Record the end of the run; called by its handle. Returns at once."""
        with self._lock:
            if self._run is not None and self._run.end() is not None:
                self._run = None
        self._server.read_soon()

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the current page as one self-contained file (about 5 MB).

        Also works after the end of the run and after :meth:`close`.

        Raises:
            OSError: It cannot be written.
        """
        self._server.read_now()
        write_text(path, monitor_page.saved_page(self._feed.history()))

    def close(self) -> None:
        """Stop the server and notify open pages. Idempotent.

        Blocks until the server's thread has ended, at most a second if a page reads slowly.
        """
        self._close()
