"""Unused connections to a monitor, which take no descriptors from the run."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime import Monitor
from runtime.monitor import server as server_module
from tests.support import programs
from tests.support.half_sent import HALF
from tests.support.running import WAIT_S
from tests.support.watching import open_page, request

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
NUM_HALF_SENT = 1_100
NUM_DESCRIPTORS = 1_024

pytest.importorskip("aiohttp")
pytest.importorskip("plotly")

RUN = f"""
import resource, sys, time
import torch
from runtime import Monitor
from tests.support.running import OVER_CPU, SYNC, builder

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, ({NUM_DESCRIPTORS}, hard))

class Files(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, i):
        with open(sys.argv[1]) as file, open(sys.argv[1]):
            return torch.tensor(float(file.read()) + i)

monitor = Monitor(poll_s=0.05)
print(monitor.port, flush=True)
sys.stdin.readline()
def fit(model, batch):
    return model.w.sum() * batch.mean()

way = SYNC, OVER_CPU  # promises the same bits
handle = builder(train=fit, dataset=Files(), ranks=2, epochs=3, way=way).balance(False)
handle = handle.progress(False).run().attach(monitor)
state = handle.join(60)
print([m.num_samples for m in state.metrics], float(state.params["w"]), flush=True)
monitor.close()
"""


@contextmanager
def half_sent(port, count):
    """Send ``count`` incomplete requests from a separate process; returns its output."""
    script = ROOT / "tests" / "support" / "half_sent.py"
    process = subprocess.Popen(
        [sys.executable, str(script), str(port), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        yield process.stdout.readline()
    finally:
        process.communicate(timeout=WAIT_S)


def run_with(number, tmp_path):
    """Output and log of a run whose data set opens files, beside incomplete requests."""
    (tmp_path / "item").write_text("1")
    process = programs.Popen(
        [sys.executable, "-W", "error", "-c", RUN, str(tmp_path / "item")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    try:
        port = int(process.stdout.readline())
        if not number:
            return (*process.communicate("go\n", timeout=50), process.returncode)
        with half_sent(port, number) as output:
            assert output.startswith("open")
            return (*process.communicate("go\n", timeout=50), process.returncode)
    finally:
        process.kill()
        process.wait()


def test_incomplete_requests_beyond_the_descriptor_limit_do_not_affect_a_run(tmp_path):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < NUM_HALF_SENT + 100:
        pytest.skip(f"this process may open {hard} files at most")
    alone, log, code = run_with(0, tmp_path)
    assert (log, code) == ("", 0)
    beside, log, code = run_with(NUM_HALF_SENT, tmp_path)
    assert code == 0, log
    assert beside == alone
    assert len(log.splitlines()) == 1, log  # once, without traceback
    assert "connections" in log


# -- one at a time -------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    """Servers with a request timeout of 0.2 s."""
    monkeypatch.setattr(server_module, "REQUEST_TIMEOUT_S", 0.2)
    monkeypatch.setattr(server_module, "SWEEP_INTERVAL_S", 0.05)


def connected(monitor):
    return socket.create_connection(("127.0.0.1", monitor.port), timeout=WAIT_S)


def closed_after(sock, send=b""):
    """Seconds until the server closes the connection, sending ``send`` every 0.05 s."""
    began = time.monotonic()
    sock.settimeout(0.05)
    while time.monotonic() - began < WAIT_S:
        try:
            if send:
                sock.sendall(send)
            if not sock.recv(65536):
                return time.monotonic() - began
        except TimeoutError:
            continue
        except ConnectionError:
            return time.monotonic() - began
    pytest.fail("the server never closed the connection")


@pytest.mark.parametrize(
    ("begin", "dribble"),
    [
        (b"", b""),
        (b"GET", b""),
        (b"GET /", b"a"),
        (HALF, b""),
        (HALF, b"a"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\nX: ", b"a"),
    ],
    ids=["nothing", "method", "line", "header", "dribbling", "post"],
)
def test_a_connection_without_a_complete_header_is_closed(impatient, begin, dribble):
    began = time.monotonic()
    with Monitor() as monitor, connected(monitor) as sock:
        sock.sendall(begin)
        closed_after(sock, dribble)
        assert time.monotonic() - began > 0.2
        assert request(monitor)[0] == 200


def test_an_idle_connection_is_closed_after_its_response(impatient, monkeypatch):
    monkeypatch.setattr(server_module, "REQUEST_TIMEOUT_S", 1.0)
    with Monitor() as monitor, connected(monitor) as sock:
        until = time.monotonic() + 1.6
        while time.monotonic() < until:  # stays open while it sends requests
            sock.sendall(b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(65536).startswith(b"HTTP/1.1 404")
            time.sleep(0.1)
        closed_after(sock)


def test_a_missing_body_is_not_waited_for(impatient):
    with Monitor() as monitor, connected(monitor) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        closed_after(sock, b"a")
        assert request(monitor)[0] == 200


def test_a_page_that_reads_stays_open(impatient):
    with Monitor() as monitor, open_page(monitor) as page:
        assert page.next()[0] == "history"
        with connected(monitor) as idle:
            closed_after(idle)
        with connected(monitor) as idle:
            closed_after(idle)  # far beyond the time for a header
        monitor.close()
        assert page.next() == ("bye", {})


@pytest.mark.parametrize("path", ["/events", "/plots"])
def test_a_page_that_stops_reading_is_closed_and_frees_its_place(impatient, monkeypatch, path):
    monkeypatch.setattr(server_module, "STALL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(server_module, "MAX_VIEWERS", 1)
    monkeypatch.setattr(
        server_module.MonitorServer, "_history", lambda self: b": x\n\n" * 4_000_000
    )
    with Monitor() as monitor:
        if path == "/plots":
            body = request(monitor)[2].decode()
            path = "/" + next(name for name in body.split('"') if "plotly" in name)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            sock.settimeout(WAIT_S)
            sock.connect(("127.0.0.1", monitor.port))
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert sock.recv(10)  # the rest does not fit
            deadline = time.monotonic() + WAIT_S / 2
            while monitor._server.num_connections:
                assert time.monotonic() < deadline, "it is still open"
                time.sleep(0.02)
        assert request(monitor, "/events", method="HEAD")[0] == 200


def test_a_page_that_reads_slowly_is_not_closed(impatient, monkeypatch):
    size = 24 << 20  # more than the system's buffers take
    monkeypatch.setattr(server_module, "STALL_TIMEOUT_S", 1.0)
    monkeypatch.setattr(server_module.monitor_page, "plotly_script", lambda: b"x" * size)
    with Monitor() as monitor, socket.socket() as sock:
        path = f"/{server_module.monitor_page.plotly_name()}"
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sock.settimeout(WAIT_S)
        sock.connect(("127.0.0.1", monitor.port))
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        sock.sendall(head.encode())
        began, got, pause_at = time.monotonic(), 0, 0
        while part := sock.recv(1 << 16):
            got += len(part)
            if got > pause_at:
                time.sleep(0.15)
                pause_at += size // 16
        assert got > size
        assert time.monotonic() - began > 2.0


# -- many at once --------------------------------------------------------------------------


def test_connections_above_the_limit_wait_in_the_backlog(impatient, monkeypatch, caplog):
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 3)
    with Monitor() as monitor:
        idle = [connected(monitor) for _ in range(12)]
        most, deadline = 0, time.monotonic() + WAIT_S / 2
        while most < 3:
            assert time.monotonic() < deadline
            most = max(most, monitor._server.num_connections)
        assert request(monitor)[0] == 200  # its turn comes when those before it were given up
        assert monitor._server.num_connections <= 3
        for sock in idle:
            sock.close()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "3 connections" in caplog.text


def test_near_the_descriptor_limit_no_connection_is_accepted(impatient, monkeypatch, caplog):
    with Monitor() as monitor:
        assert request(monitor)[0] == 200
        here = os.open(os.devnull, os.O_RDONLY)
        os.close(here)
        limits = [(here + 1, here + 1)]
        monkeypatch.setattr(server_module.resource, "getrlimit", lambda which: limits[0])
        for _ in range(3):
            with connected(monitor) as sock:
                closed_after(sock, HALF)
        limits[0] = (here + 100_000, here + 100_000)
        assert request(monitor)[0] == 200
    assert len(caplog.records) == 1
    assert "descriptors" in caplog.text


def test_exhausted_descriptors_are_logged_once(impatient, monkeypatch, caplog):
    refused = []

    class Listener(socket.socket):
        def accept(self):
            if len(refused) < 3:
                refused.append(threading.current_thread().name)
                raise OSError(24, "Too many open files")
            return super().accept()

    real = server_module.MonitorServer.__init__

    def init(self, listener, *rest):
        real(self, Listener(fileno=listener.detach()), *rest)

    monkeypatch.setattr(server_module.MonitorServer, "__init__", init)
    with Monitor() as monitor:
        assert request(monitor)[0] == 200
    assert refused == ["monitor"] * 3
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is None
