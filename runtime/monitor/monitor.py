"""Monitor: a live page of a run."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable

from runtime.core.checks import check_float, check_int, need
from runtime.core.threads import Closing
from runtime.monitor import page
from runtime.monitor.feed import Feed, WatchedRun
from runtime.timeline.timeline import write_text

logger = logging.getLogger(__name__)

MIN_POLL_S = 0.05
MAX_POLL_S = 3600.0


class Monitor(Closing):
    """A page that shows a run while it goes on: attach it with ``handle.attach(monitor)``.

    The page has the state, epoch, progress and time left, the curves of loss and scalars, a
    panel for each rank, the anchor, the load of the machine and events as they come. A run
    with ``.timeline(Timeline())`` also shows what each rank's time goes to, and what happened
    before the monitor was attached; without one, the page has what the coordinator counts.

    The server runs from here until :meth:`close`, the end of the ``with`` block, of this
    object or of the process, in a daemon thread of its own. It goes on when the run has
    ended, so that the page can still be opened; a handle keeps the monitors attached to it.
    One monitor shows one run at a time: once that has ended, another may be attached, whose
    page takes the place of the first. A run may have several monitors.

    Every page gets the whole history first, at each reload; one that reads too slowly gets
    it again instead of what it missed. Nothing in the run waits for a page or the server,
    and a fault in here is logged once and ends nothing else.

    The server answers to reading alone, and only where a request names a host it knows: those
    of this machine's loopback, ``host`` and ``allowed_hosts``. Whoever can reach it can read
    the page: there is no password. Where ``host`` is not the loopback, that is anybody on the
    network; an SSH tunnel (``ssh -L 8080:localhost:8080 machine``) is the better way.

    Every method may be called from any thread.

    Args:
        port: Where to listen; 0 picks one that is free, which the attribute ``port`` then tells.
        host: Address or name of this machine to listen on.
        allowed_hosts: Names and addresses, without port, under which the page may be opened
            beside those; ``"*"`` allows all.
        poll_s: Seconds between two looks at the run, 0.05 to 3600.

    Attributes:
        host: Where it listens.
        port: Where it listens; never 0.
        url: What to open in a browser.

    Raises:
        ImportError: The extra ``monitor`` is not installed.
        OSError: The port is in use, or cannot be used.
        TypeError, ValueError: A setting is wrong.
    """

    def __init__(
        self,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        allowed_hosts: Iterable[str] = (),
        poll_s: float = 1.0,
    ) -> None:
        need("Monitor", ("aiohttp", "plotly"), "monitor")
        # Only now: it needs the extra.
        from runtime.monitor.server import Server, allowed_names, is_loopback, listen, url_of

        number = check_int("Monitor: port", port, 0, 65535)
        if not isinstance(host, str) or not host:
            raise TypeError(f"Monitor: host={host!r}: pass a name or an address")
        names = allowed_names(host, allowed_hosts)
        poll_s = check_float("Monitor: poll_s", poll_s, MIN_POLL_S, MAX_POLL_S)
        listener = listen(host, number)
        self.host = host
        self.port = int(listener.getsockname()[1])
        self.url = url_of(host, self.port)
        self._feed = Feed()
        self._lock = threading.Lock()  # of _run, and of what is attached and closed
        self._run: WatchedRun | None = None
        self._server = Server(listener, names, self._feed, poll_s)
        self._server.start()
        # Also at the end of the process, while threads can still be joined.
        self._close = weakref.finalize(self, self._server.stop)
        if not is_loopback(host):
            logger.warning("the monitor at %s can be read by whoever reaches %s", self.url, host)
        logger.info("monitor at %s", self.url)

    def watch(self, run: WatchedRun) -> None:
        """Show this run; called by :meth:`~runtime.TrainerHandle.attach`.

        Raises:
            RuntimeError: The monitor is closed.
            ValueError: It shows another run, which goes on.
        """
        with self._lock:
            if not self._close.alive:
                raise RuntimeError("this Monitor is closed: make a new one")
            if self._run is not None and self._run.end() is None:
                raise ValueError(
                    "this Monitor shows another run that goes on: make a Monitor for each, or "
                    "attach it when that run is over"
                )
            self._run = run if run.end() is None else None
            self._server.follow(run)

    def run_ended(self) -> None:
        """The run is over; called by its handle. Returns at once."""
        with self._lock:
            if self._run is not None and self._run.end() is not None:
                self._run = None
        self._server.look()

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page, as it is now, as one file that needs nothing else (about 5 MB).

        Also after the end and after :meth:`close`.

        Raises:
            OSError: It cannot be written.
        """
        self._server.look_now()
        write_text(path, page.saved_page(self._feed.history()))

    def close(self) -> None:
        """End the server; open pages are told. Idempotent.

        Blocks until its thread has ended: for a second at most where a page reads slowly.
        """
        self._close()
