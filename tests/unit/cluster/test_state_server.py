"""Transfer of the state that heals a machine, and malformed responses."""

from __future__ import annotations

import json
import pickle
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch

from runtime.checkpoint.tensor_file import save
from runtime.cluster import state_server
from runtime.cluster.engine import ClusterState, EngineError, PeerRefused
from runtime.cluster.signing import MAC_BYTES, signature
from runtime.cluster.state_server import StateServer, fetch_state

STATE = ClusterState(
    tensors={
        "w": torch.arange(12.0).view(3, 4).t(),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "none": torch.empty(0),
    },
    meta={"ledger": {"step": 3, "open": [[0, 5]], "none": None}},
)


def fetch(address, *, step=3, token="secret", **limits):
    limits = {"timeout_s": 1.0, "total_timeout_s": 30.0, "max_bytes": 1 << 20, **limits}
    return fetch_state("peer", address, step, token, **limits)


@pytest.fixture
def server():
    server = StateServer("127.0.0.1", "secret", 1.0)
    yield server
    server.close()


def test_the_state_received_is_that_of_the_time_of_the_offer(server):
    tensors = {name: tensor.clone() for name, tensor in STATE.tensors.items()}
    server.offer(3, ClusterState(tensors=tensors, meta=STATE.meta))
    tensors["w"].zero_()
    found = fetch(server.address)
    assert found.meta == STATE.meta
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in STATE.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def test_a_fetch_waits_for_the_offer(server):
    timer = threading.Timer(0.2, server.offer, (3, STATE))
    timer.start()
    assert fetch(server.address, timeout_s=10.0).meta == STATE.meta
    timer.join()
    with pytest.raises(EngineError, match="offers no state of step 4"):
        fetch(server.address, step=4, timeout_s=1.0)
    server.withdraw()
    with pytest.raises(EngineError, match="offers no state of step 3"):
        fetch(server.address, timeout_s=1.0)


@pytest.mark.parametrize("token", ["wrong", None])
def test_a_server_refuses_another_token(server, token):
    server.offer(3, STATE)
    with pytest.raises(PeerRefused, match="another token") as caught:
        fetch(server.address, token=token)
    assert caught.value.machines == ("peer",)


REQUESTS = {
    "a pickle": pickle.dumps({"a": list(range(100))}) + b"\r\n\r\n",
    "a huge header": b"GET /state/3 HTTP/1.1\r\nX-Big: " + b"x" * (1 << 20),
    "half a request": b"GET /state/3 HTTP/1.1\r\n",
    "the token itself": b"GET /state/3 HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("request_bytes", REQUESTS.values(), ids=REQUESTS)
def test_a_server_survives_malformed_requests(server, request_bytes, monkeypatch):
    monkeypatch.setattr(state_server, "REQUEST_TIMEOUT_S", 0.3)
    server.offer(3, STATE)
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), 5.0) as connection:
        answer = b""
        try:
            connection.sendall(request_bytes)
            while piece := connection.recv(1 << 16):  # until the server disconnects
                answer += piece
        except ConnectionError:
            pass
    assert b"200" not in answer
    assert fetch(server.address).meta == STATE.meta


def test_slow_requests_do_not_block_others(server, monkeypatch):
    monkeypatch.setattr(state_server, "REQUEST_TIMEOUT_S", 0.3)
    server.offer(3, STATE)
    host, port = server.address.split(":")
    slow = [
        socket.create_connection((host, int(port))) for _ in range(2 * state_server.MAX_CONNECTIONS)
    ]
    start = time.monotonic()
    assert fetch(server.address, timeout_s=10.0).meta == STATE.meta
    assert time.monotonic() - start < 5.0
    for connection in slow:
        connection.close()


@contextmanager
def peer(answer):
    """A server that responds to each request with ``answer(path, number)``."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                _, headers, _ = state_server._read_head(connection, 5.0)
                with suppress(ConnectionError):  # the client may have disconnected
                    connection.sendall(answer(b"/state/3", headers[b"x-number"]))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def answer_of(content, token="secret", length=None):
    """An answer with this content, signed with this token."""

    def answer(path, number):
        mac = signature(token, "state", path, number, content)
        size = len(content) + MAC_BYTES if length is None else length
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + content + mac

    return answer


GOOD = save(dict(STATE.tensors, w=torch.ones(3)), {"meta": json.dumps(STATE.meta)})
ANSWERS = {
    "good": (answer_of(GOOD), None, None),
    "a pickle": (answer_of(pickle.dumps({"w": [1]})), PeerRefused, "malformed"),
    "a wrong token": (answer_of(GOOD, "wrong"), PeerRefused, "not signed"),
    "an unsigned pickle": (answer_of(pickle.dumps([1]), None), PeerRefused, "not signed"),
    "half a message": (answer_of(GOOD[:100], length=len(GOOD)), EngineError, r"sent \d+ of \d+"),
    "too much": (answer_of(b"", length=1 << 40), PeerRefused, "are accepted"),
    "no length": (lambda *_: b"HTTP/1.1 200 OK\r\n\r\n" + GOOD, PeerRefused, "are accepted"),
    "a huge header": (
        lambda *_: b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 17) + b"\r\n\r\n",
        PeerRefused,
        "not HTTP",
    ),
    "many headers": (
        lambda *_: b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        PeerRefused,
        "not HTTP",
    ),
    "a huge header of tensors": (
        answer_of((1 << 40).to_bytes(8, "little") + b"{}"),
        PeerRefused,
        "header",
    ),
    "no meta": (answer_of(save({"w": torch.ones(1)})), PeerRefused, "malformed"),
    "deep meta": (
        answer_of(save({}, {"meta": "[" * 100_000 + "]" * 100_000})),
        PeerRefused,
        "malformed",
    ),
    "meta of another kind": (answer_of(save({}, {"meta": "[]"})), PeerRefused, "list"),
    "a server error": (lambda *_: b"HTTP/1.1 500 X\r\n\r\n", PeerRefused, "500"),
    "no HTTP": (lambda *_: pickle.dumps([1]) + b"\r\n", PeerRefused, "not HTTP"),
}


@pytest.mark.parametrize(("answer", "kind", "text"), ANSWERS.values(), ids=ANSWERS)
def test_only_a_valid_and_signed_state_is_accepted(answer, kind, text, monkeypatch):
    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr(pickle, "Unpickler", None)
    with peer(answer) as address:
        if kind is None:
            assert fetch(address).meta == STATE.meta
            return
        with pytest.raises(kind, match=text) as caught:
            fetch(address)
    if kind is PeerRefused:
        assert caught.value.machines == ("peer",)
    assert "peer" in str(caught.value)


def test_a_silent_or_missing_peer_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EngineError, match="no state from peer"):
            fetch(address, timeout_s=0.2)
    with pytest.raises(EngineError, match="no state from peer"):
        fetch(address, timeout_s=0.2)


@pytest.mark.parametrize(
    ("begin", "limits"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", {"timeout_s": 0.3}),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n",
            {"timeout_s": 60.0, "total_timeout_s": 0.3},
        ),
        (b"HTTP/1.1 200 OK\r\nX: ", {"timeout_s": 0.3}),
    ],
)
def test_a_state_that_arrives_too_slowly_is_an_error(begin, limits):
    over = threading.Event()

    def drip(listener):
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            state_server._read_head(connection, 5.0)
            connection.sendall(begin)
            while not over.wait(0.02):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        try:
            with pytest.raises(EngineError, match=r"too slow|timed out"):
                fetch(f"127.0.0.1:{listener.getsockname()[1]}", **limits)
        finally:
            over.set()
            thread.join()


def test_close_ends_responses_in_progress_and_is_idempotent(server):
    server.offer(3, ClusterState(tensors={"w": torch.zeros(30_000_000)}, meta={}))
    host, port = server.address.split(":")
    number = b"1"
    bearer = signature("secret", "ask", b"/state/3", number).hex().encode()
    with socket.create_connection((host, int(port)), 5.0) as connection:
        connection.sendall(
            b"GET /state/3 HTTP/1.1\r\nAuthorization: Bearer %s\r\nX-Number: 1\r\n\r\n" % bearer
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        start = time.monotonic()
        server.close()
        server.close()
        assert time.monotonic() - start < 0.9
