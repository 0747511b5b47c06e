"""The lighthouse's gate: gRPC passes, pages cannot act, and tokens are compared before a quorum."""

from __future__ import annotations

import socket
import threading

import pytest

from runtime.cluster.engine import PeerRefused
from runtime.cluster.lighthouse_gate import PREFACE, LighthouseGate
from runtime.cluster.membership import Membership
from tests.support.running import WAIT_S


class Backend:
    """Stands for torchft's server: answers each connection with what it received first."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.received = []
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self):
        while True:
            connection, _ = self.listener.accept()
            with connection:
                first = connection.recv(1 << 16)
                if first == b"end":
                    return
                self.received.append(first)
                connection.sendall(b"answer to " + first)

    def close(self):
        with socket.create_connection(self.listener.getsockname()) as last:
            last.sendall(b"end")
        self.thread.join(WAIT_S)
        self.listener.close()


@pytest.fixture
def gate():
    backend = Backend()
    listener = socket.create_server(("127.0.0.1", 0))
    made = LighthouseGate(listener, backend.listener.getsockname(), "lighthouse.lan")
    made.address = listener.getsockname()
    made.backend = backend
    yield made
    made.close()
    backend.close()


def exchange(gate, request):
    with socket.create_connection(gate.address, WAIT_S) as connection:
        connection.sendall(request)
        found = b""
        while part := connection.recv(1 << 16):
            found += part
    return found


def page(method="GET", path="/status", *headers):
    return "\r\n".join([f"{method} {path} HTTP/1.1", *headers, "", ""]).encode()


def test_grpc_passes(gate):
    assert exchange(gate, PREFACE) == b"answer to " + PREFACE


@pytest.mark.parametrize("host", ["127.0.0.1:29510", "localhost", "lighthouse.lan:80", "[::1]:1"])
def test_the_page_is_shown_to_a_request_for_this_host(gate, host):
    assert exchange(gate, page("GET", "/status", f"Host: {host}")).startswith(b"answer to GET /sta")


@pytest.mark.parametrize(
    "request_",
    [
        page("GET", "/status", "Host: rebound.example"),
        page("GET", "/status"),
        page("GET", "/status", "Host: localhost", "Host: rebound.example"),
        page("GET", "/status", "Host: localhost", "Origin: http://other.example"),
        page("POST", "/replica/a/kill", "Host: localhost"),
        page("POST", "/replica/a/kill", "Host: 127.0.0.1", "Origin: http://127.0.0.1"),
        page("GET", "/replica/a/kill", "Host: localhost"),
        page("GET", "/status", "Host: localhost", "Upgrade: h2c").replace(b"GET", b"PUT"),
        b"PRI * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_other_requests_do_not_reach_the_server(gate, request_):
    assert exchange(gate, request_).startswith(b"HTTP/1.1 403 ")
    assert gate.backend.received == []


@pytest.mark.parametrize("token", ["wrong", None])
def test_a_machine_with_another_token_is_refused_by_the_first_ones_card(gate, token):
    address = "{}:{}".format(*gate.address)
    first = Membership(address, "a", "secret")
    second = Membership(address, "b", "secret")
    with pytest.raises(PeerRefused, match="a, b have another token") as caught:
        Membership(address, "c", token)
    assert caught.value.machines == ("c",)
    assert gate.backend.received == []
    first.close()
    Membership(address, "d", "secret").close()
    second.close()


def test_a_card_counts_while_its_machine_is_there(gate):
    address = "{}:{}".format(*gate.address)
    Membership(address, "a", "secret").close()
    waiting = threading.Event()
    for _ in range(100):  # the gate sees the end of the connection some time
        try:
            Membership(address, "b", "other").close()
            break
        except PeerRefused:
            waiting.wait(0.02)
    else:
        pytest.fail("the card of a machine that has left still counts")


def test_a_server_without_a_gate_is_no_obstacle():
    backend = Backend()
    address = "{}:{}".format(*backend.listener.getsockname())
    Membership(address, "a", "secret").close()
    backend.close()
    Membership(address, "a", "secret").close()  # nobody listens
