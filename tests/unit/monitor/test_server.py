"""The monitor's server: requests, hosts, listening and shutdown."""

import gc
import http.client
import importlib.util
import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from runtime import Monitor
from runtime.core.host_names import host_name
from runtime.monitor import server as server_module
from runtime.monitor.hosts import is_loopback, url_of
from runtime.monitor.server import THREAD_NAME
from tests.support import programs
from tests.support.running import WAIT_S
from tests.support.watching import history_of, open_page, request

ROOT = Path(__file__).parents[3]

pytest.importorskip("aiohttp")
pytest.importorskip("plotly")


@pytest.fixture(scope="module")
def open_monitor():
    with Monitor() as monitor:
        yield monitor


def servers():
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


# -- responses --------------------------------------------------------------------------


def test_the_page_and_its_parts_are_served(open_monitor):
    status, headers, body = request(open_monitor)
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    loaded = re.findall(r'(?:src|href)="([^"]+)"', body.decode())
    assert {"monitor.css", "monitor.js"} < set(loaded)
    for name in loaded:
        if name == "data:,":
            continue
        assert ":" not in name
        status, headers, part = request(open_monitor, f"/{name}")
        assert (status, len(part) > 1000) == (200, True), name
        assert headers["Content-Type"].startswith("text/")


def test_every_response_has_a_strict_policy(open_monitor):
    answers = [
        request(open_monitor),
        request(open_monitor, "/monitor.js"),
        request(open_monitor, "/nothing"),
        request(open_monitor, method="POST"),
        request(open_monitor, host="evil.example"),
        request(open_monitor, "/events", method="HEAD"),
    ]
    for _, headers, _ in answers:
        policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in str(policy)
        assert "http" not in str(policy)
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "aiohttp" not in headers["Server"]
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/monitor.js/../../server.py",
        "/assets/monitor.js",
        "/..%2fmonitor.py",
        "/monitor.py",
        "/plotly.min.js",
        "/events/1",
        "/\\..\\x",
    ],
)
def test_other_paths_are_not_served(open_monitor, path):
    status, _, body = request(open_monitor, path)
    assert status in (400, 404)
    assert len(body) < 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_read_methods_are_accepted(open_monitor, method):
    for path in ("/", "/events", "/nothing"):
        status, headers, _ = request(open_monitor, path, method=method)
        assert status == 405
        assert headers["Allow"] == "GET, HEAD"


def test_head_returns_only_headers(open_monitor):
    for path in ("/", "/monitor.js", "/events"):
        status, _, body = request(open_monitor, path, method="HEAD")
        assert (status, body) == (200, b"")


GOOD = ["localhost", "LocalHost:9999", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8080"]
BAD = [
    None,
    "",
    "evil.example",
    "evil.example:80",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "localhost@evil.example",
    "localhost:80:80",
    "localhost:evil",
    "[::1",
    "::1",
    "[::2]",
    "*",
    "localhost/",
    ["localhost", "evil.example"],
    ["evil.example", "localhost"],
]


@pytest.mark.parametrize("host", GOOD)
def test_requests_for_this_machine_are_answered(open_monitor, host):
    assert request(open_monitor, host=host)[0] == 200


@pytest.mark.parametrize("host", BAD, ids=str)
@pytest.mark.parametrize("path", ["/", "/events", "/monitor.js"])
def test_requests_for_other_hosts_are_refused(open_monitor, host, path):
    status, _, body = request(open_monitor, path, host=host)
    assert status in (400, 421)
    assert b"<" not in body


@pytest.mark.parametrize("path", ["/", "/events", "/monitor.js"])
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://localhost:1", "null", "http://127.0.0.1"]
)
def test_requests_of_other_pages_are_refused(open_monitor, path, origin):
    """A browser names the page in Origin, except for the requests of the monitor's own page."""
    for name in ("Origin", "origin"):
        status, headers, body = request(open_monitor, path, headers={name: origin})
        assert (status, body) == (
            403,
            b"This monitor does not answer to requests of other pages.\n",
        )
        assert headers["Content-Security-Policy"]


def test_requests_of_other_pages_are_refused_for_each_allowed_host():
    with Monitor(allowed_hosts=["*"]) as monitor:
        headers = {"Origin": "http://evil.example"}
        assert request(monitor, host="whatever.example", headers=headers)[0] == 403


def test_other_hosts_may_be_allowed():
    with Monitor(allowed_hosts=["Box.lan", "fe80::1"]) as monitor:
        assert request(monitor, host="box.LAN:80")[0] == 200
        assert request(monitor, host="[fe80::1]:80")[0] == 200
        assert request(monitor, host="evil.example")[0] == 421
    with Monitor(allowed_hosts=["*"]) as monitor:
        assert request(monitor, host="whatever.example")[0] == 200


def test_malformed_requests_do_not_stop_the_server(open_monitor, caplog):
    for junk in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"A" * 70_000, b"\r\n" * 50):
        with socket.create_connection(("127.0.0.1", open_monitor.port), timeout=WAIT_S) as sock:
            sock.sendall(junk)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
    assert request(open_monitor)[0] == 200
    # aiohttp's parser in Python, where its C extension is missing, logs errors of requests.
    own = [r.getMessage() for r in caplog.records if "Error handling request" not in r.message]
    assert own == []


def test_a_page_without_a_run_shows_none(open_monitor):
    content = history_of(open_monitor)
    assert (content["facts"], content["now"], content["ticks"]) == (None, None, [])


def test_too_many_pages_are_refused(monkeypatch):
    monkeypatch.setattr(server_module, "MAX_VIEWERS", 2)
    with Monitor() as monitor, open_page(monitor) as one, open_page(monitor) as two:
        assert one.next()[0] == two.next()[0] == "history"
        assert request(monitor, "/events")[0] == 503


def test_a_closed_page_frees_its_place(monkeypatch):
    monkeypatch.setattr(server_module, "MAX_VIEWERS", 1)
    with Monitor() as monitor:
        for _ in range(5):
            deadline = time.monotonic() + WAIT_S
            while True:
                connection = http.client.HTTPConnection("127.0.0.1", monitor.port, timeout=WAIT_S)
                connection.request("GET", "/events")
                status = connection.getresponse().status
                connection.close()
                if status == 200:
                    break
                assert time.monotonic() < deadline
                time.sleep(0.01)


# -- addresses ---------------------------------------------------------------------------


def test_port_0_picks_a_free_port():
    with Monitor() as one, Monitor(0) as two:
        assert one.port != two.port
        assert one.url == f"http://127.0.0.1:{one.port}/"
        with socket.create_connection(("127.0.0.1", two.port), timeout=WAIT_S):
            pass


def test_a_port_in_use_raises_with_the_remedy_and_leaves_no_thread():
    before = servers()
    with Monitor() as monitor:
        with pytest.raises(OSError, match="is in use: pass another port, or port=0"):
            Monitor(monitor.port)
        assert len(servers()) == len(before) + 1
    with Monitor(monitor.port) as again:
        assert request(again)[0] == 200


def test_a_host_of_another_machine_raises_with_the_remedy():
    with pytest.raises(OSError, match="pass a host of this machine"):
        Monitor(host="192.0.2.1")


def test_a_host_other_than_the_loopback_logs_a_warning(caplog):
    with Monitor(host="0.0.0.0") as monitor:
        assert monitor.url == f"http://127.0.0.1:{monitor.port}/"
        assert request(monitor)[0] == 200
        assert request(monitor, host="evil.example")[0] == 421
    assert "can be read by everyone who reaches 0.0.0.0" in caplog.text


@pytest.mark.skipif(not socket.has_ipv6, reason="there is no IPv6")
def test_the_server_listens_on_ipv6():
    try:
        monitor = Monitor(host="[::1]")
    except OSError:
        pytest.skip("there is no IPv6 loopback")
    with monitor:
        assert monitor.url == f"http://[::1]:{monitor.port}/"
        connection = http.client.HTTPConnection("::1", monitor.port, timeout=WAIT_S)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        connection.close()


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"port": -1}, ValueError, "between 0 and 65535"),
        ({"port": 65536}, ValueError, "between 0 and 65535"),
        ({"port": "80"}, TypeError, "whole number"),
        ({"host": ""}, ValueError, "a name or an address"),
        ({"host": None}, TypeError, "a name or an address"),
        ({"poll_s": 0}, ValueError, "at least 0.05"),
        ({"poll_s": float("nan")}, ValueError, "at least 0.05"),
        ({"allowed_hosts": "box"}, TypeError, "pass a list"),
        ({"allowed_hosts": [7]}, TypeError, "host names as strings"),
        ({"allowed_hosts": [""]}, ValueError, "host names as strings"),
        ({"allowed_hosts": ["-"]}, ValueError, "not a host name"),
        ({"allowed_hosts": ["http://box"]}, ValueError, "leave out scheme"),
        ({"allowed_hosts": ["box:80"]}, ValueError, "leave out scheme"),
    ],
)
def test_invalid_settings_raise_before_anything_starts(settings, error, words):
    before = servers()
    with pytest.raises(error, match=words):
        Monitor(**settings)
    assert servers() == before


def test_without_the_extra_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'gpuworker\[monitor\]'"):
        Monitor()


def test_host_headers_are_parsed_as_browsers_send_them():
    assert host_name("LOCALHOST:80") == "localhost"
    assert host_name("[::1]:80") == "::1"
    assert host_name("a:") == "a"
    assert [host_name(bad) for bad in ("", ":80", "[::1", "[::1]x", "a:b", "a/b")] == [None] * 6
    assert [is_loopback(name) for name in ("127.8.0.1", "::1", "LOCALHOST")] == [True] * 3
    assert [is_loopback(name) for name in ("0.0.0.0", "::", "box.lan", "10.0.0.1")] == [False] * 4
    assert url_of("::", 80) == "http://[::1]:80/"


# -- the end --------------------------------------------------------------------------------


def test_a_closed_monitor_leaves_no_thread_and_no_socket():
    before = servers()
    monitor = Monitor()
    port = monitor.port
    monitor.close()
    monitor.close()
    assert servers() == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def test_open_pages_are_notified_of_the_end():
    with Monitor() as monitor, open_page(monitor) as stream:
        assert stream.next()[0] == "history"
        monitor.close()
        assert stream.next() == ("bye", {})
        assert stream.next() is None


def test_a_new_connection_is_closed_with_the_server():
    for _ in range(6):
        with Monitor() as monitor:
            sock = socket.create_connection(("127.0.0.1", monitor.port), timeout=WAIT_S)
        with sock, suppress(ConnectionResetError):  # it was not accepted
            assert sock.recv(1) == b""
        gc.collect()  # an open descriptor is an error here


def test_a_garbage_collected_monitor_ends_its_thread():
    before = servers()
    monitor = Monitor()
    (thread,) = (thread for thread in servers() if thread not in before)
    del monitor
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_page_that_reads_nothing_delays_the_shutdown_by_a_second_at_most():
    monitor = Monitor()
    with socket.create_connection(("127.0.0.1", monitor.port), timeout=WAIT_S) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        path = next(name for name in request(monitor)[2].decode().split('"') if "plotly" in name)
        sock.sendall(f"GET /{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert sock.recv(100)  # the rest does not fit
        start = time.monotonic()
        monitor.close()
        assert time.monotonic() - start < 4.0


def test_a_process_with_an_open_monitor_ends(tmp_path):
    code = (
        "import faulthandler\n"
        "faulthandler.dump_traceback_later(90, exit=True)\n"  # prints the stacks if it hangs
        "from runtime import Monitor\n"
        "from tests.support.running import builder\n"
        "handle = builder(epochs=2).progress(False).run().attach(Monitor())\n"
        "handle.join()\n"
        "other = Monitor()\n"
        "print('done')\n"
    )
    done = programs.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=110,
        whole_end=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
