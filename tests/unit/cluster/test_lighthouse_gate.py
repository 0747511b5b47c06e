"""The lighthouse's gate: gRPC passes, pages cannot act, tokens are compared before a quorum, and
the machines' progress is listed.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress

import pytest

from runtime.__main__ import main
from runtime.cluster import membership
from runtime.cluster.engine import PeerRefused
from runtime.cluster.lighthouse_gate import PREFACE, LighthouseGate
from runtime.cluster.machine_status import MachineStatus, status_line, status_table
from runtime.cluster.membership import (
    GREETING,
    MAX_LINE_BYTES,
    STATUS_GREETING,
    Membership,
    read_cluster_status,
)
from runtime.core.errors import ClusterError
from tests.support.running import WAIT_S


class Backend:
    """Stands for torchft's server: answers each connection with what it received first."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.received = []
        self.answer = b"answer to "
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
                connection.sendall(self.answer + first)

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


@pytest.mark.parametrize(
    "card",
    [
        b"[" * 60_000 + b"\n",
        b"[" * 900 + b"]" * 900 + b"\n",
        b"[" * 100_000,
        b'["a", [["b"]]]\n',
        b'{"a": 1}\n',
        b"1" * 5000 + b"\n",
        b"\xff\n",
        b"[]",
    ],
)
def test_a_malformed_card_is_a_bad_request_and_reaches_no_member(gate, caplog, card):
    with RawMember(gate, "a"), socket.create_connection(gate.address, WAIT_S) as connection:
        connection.sendall(GREETING + card)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        with suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                found += part
        (cards, _, answer) = found.partition(b"\n")
        assert len(json.loads(cards)) == 1
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert [m.machine for m in read_cluster_status(address_of(gate), None).machines] == ["a"]
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


@pytest.mark.parametrize("head", [b"[" * 100_000, b"GET / HTTP/1.1\r\n"])
def test_a_malformed_head_is_a_bad_request(gate, head):
    with socket.create_connection(gate.address, WAIT_S) as connection:
        connection.sendall(head)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
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


RUN = {
    "name": "train.py",
    "epoch": 2,
    "num_epochs": 10,
    "step": 24,
    "total_steps": 100,
    "elapsed_s": 5.0,
    "samples_per_s": 12310.4,
    "loss": 0.41812,
    "checkpoint_dir": "/data/ck",
    "last_checkpoint": "/data/ck/step-0000001500-within-0002-000003",
    "policy": "SYNC",
    "devices": ["cpu"],
}
"""A record of a run, as ``ListedRun.read`` returns it."""


def address_of(gate):
    return "{}:{}".format(*gate.address)


def status_until(gate, token, ready):
    """The status of the cluster once it is ``ready``."""
    deadline = time.monotonic() + WAIT_S
    waiting = threading.Event()
    while not ready(found := read_cluster_status(address_of(gate), token)):
        assert time.monotonic() < deadline, found
        waiting.wait(0.02)
    return found


def has_progress(number):
    return lambda found: [each.number for each in found.machines if each.run] == [number]


class RawMember:
    """A machine that sends any lines after its card."""

    def __init__(self, gate, name, token=None):
        self.connection = socket.create_connection(gate.address, WAIT_S)
        self.connection.sendall(GREETING)
        assert self.connection.recv(1 << 16).startswith(b"[")
        self.send(json.dumps(membership._card(name, token)).encode() + b"\n")

    def send(self, content):
        self.connection.sendall(content)

    def is_ended(self):
        """Wait until the gate has ended the connection."""
        try:
            return self.connection.recv(1) == b""
        except ConnectionResetError:
            return True

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.connection.close()


@pytest.fixture
def members(gate):
    """Starts machines that send records at once and at short intervals."""
    made = []

    def start(name, token="secret", run=RUN):
        made.append(Membership(address_of(gate), name, token))
        made[-1].send_status(lambda pause: run)
        return made[-1]

    yield start
    for member in made:
        member.close()


def test_the_command_lists_each_machine_with_its_progress(gate, members, capsys, monkeypatch):
    monkeypatch.setenv("GPUWORKER_CLUSTER_TOKEN", "secret")
    names = [f"node1-{os.getpid()}-0123abcd", f"node2-{os.getpid()}-0123abcd"]
    members(names[0])
    members(names[1], run={**RUN, "loss": None, "checkpoint_dir": None, "last_checkpoint": None})
    status_until(gate, "secret", lambda found: sum(bool(m.run) for m in found.machines) == 2)
    main(["status", "--cluster", address_of(gate)])
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[0] == ["HOST", "PID", "EPOCH", "DONE", "SAMPLES/S", "LOSS", "AGE"]
    assert table[1][:-2] == ["node1", str(os.getpid()), "3/10", "24%", "12,310", "0.4181"]
    assert table[2] == ["train.py,", "last", "checkpoint:", RUN["last_checkpoint"]]
    assert table[3][5] == "-"
    assert table[4][-2:] == ["no", "checkpoint_dir"]
    main(["status", "--cluster", address_of(gate), "--json"])
    records = json.loads(capsys.readouterr().out)
    assert [record["machine"] for record in records] == names
    sent = {k: v for k, v in RUN.items() if k not in ("policy", "devices")}
    assert records[0]["run"] == {**sent, "pid": os.getpid()}


def test_a_machine_that_leaves_is_no_longer_listed(gate, members):
    first = members("a")
    members("b")
    status_until(gate, "secret", lambda found: len(found.machines) == 2)
    first.close()
    status_until(gate, "secret", lambda found: [m.machine for m in found.machines] == ["b"])


def test_machines_send_their_progress_to_a_restarted_lighthouse(gate, members, monkeypatch):
    monkeypatch.setattr(membership, "STATUS_INTERVAL_S", 0.02)
    members("a")
    status_until(gate, "secret", lambda found: found.machines and found.machines[0].number > 2)
    gate.close()
    listener = socket.create_server(gate.address)
    restarted = LighthouseGate(listener, gate.backend.listener.getsockname(), "localhost")
    try:
        status_until(gate, "secret", lambda found: found.machines and found.machines[0].run)
    finally:
        restarted.close()


def test_progress_with_another_token_is_not_listed(gate, members, capsys, monkeypatch):
    monkeypatch.setenv("GPUWORKER_CLUSTER_TOKEN", "secret")
    members("a")
    status_until(gate, "secret", has_progress(1))
    for token in ("wrong", None):
        with pytest.raises(ClusterError, match=r"\(1\) have another token.*: set "):
            read_cluster_status(address_of(gate), token)
    with RawMember(gate, "b", "wrong") as other:
        other.send(status_line("wrong", "b", 1, RUN))
        found = status_until(gate, "secret", lambda found: found.num_refused)
        assert [each.machine for each in found.machines] == ["a"]
        main(["status", "--cluster", address_of(gate)])
        assert capsys.readouterr().out.endswith("\n1 more with another token or version\n")


@pytest.mark.parametrize(
    "line",
    [
        status_line("wrong", "a", 9, RUN),
        status_line("secret", "b", 9, RUN),
        status_line("secret", "a", 9, RUN).replace(b"0.41812", b"0.00001"),
        status_line("secret", "a", 9, {**RUN, "epoch": -1}),
        status_line("secret", "a", 9, {**RUN, "samples_per_s": float("nan")}),
        status_line("secret", "a", 9, {**RUN, "step": "24"}),
        b"\n",
        b"x\n",
        b"00 [1]\n",
        b"[" * 4000 + b"\n",
    ],
)
def test_a_line_that_is_not_the_machines_own_is_no_progress(gate, line):
    with RawMember(gate, "a", "secret") as member:
        member.send(status_line("secret", "a", 1, RUN))
        status_until(gate, "secret", has_progress(1))
        member.send(line)
        found = status_until(gate, "secret", lambda found: not found.machines[0].run)
        assert found.num_refused == 0
        page_ = exchange(gate, page("GET", "/status", "Host: localhost"))
        assert page_.startswith(b"answer to GET")
        member.send(status_line("secret", "a", 2, RUN))
        status_until(gate, "secret", has_progress(2))


@pytest.mark.parametrize("line", [b"x" * MAX_LINE_BYTES + b"\n", b"x" * (1 << 18), b"\xff\n"])
def test_a_line_that_is_too_long_or_no_ascii_ends_the_connection(gate, members, line):
    members("a")
    with RawMember(gate, "b", "secret") as member:
        status_until(gate, "secret", lambda found: len(found.machines) == 2)
        member.send(line)
        assert member.is_ended()
    status_until(gate, "secret", lambda found: [m.machine for m in found.machines] == ["a"])


def test_a_copy_of_an_older_line_does_not_replace_the_newer_one(gate):
    with RawMember(gate, "a", "secret") as member, RawMember(gate, "a", "secret") as copy:
        member.send(status_line("secret", "a", 2, RUN))
        status_until(gate, "secret", has_progress(2))
        copy.send(status_line("secret", "a", 1, {**RUN, "loss": 9.0}))
        status_until(gate, "secret", lambda _: b'"loss\\": 9.0' in exchange(gate, STATUS_GREETING))
        (only,) = read_cluster_status(address_of(gate), "secret").machines
    assert only.run["loss"] == RUN["loss"]


def test_the_longest_line_of_a_machine_fits():
    run = {
        **RUN,
        **dict.fromkeys(("name", "checkpoint_dir", "last_checkpoint"), "\U0001f600" * 5000),
    }
    run |= {"step": 1 << 53, "total_steps": 1 << 53, "samples_per_s": 1e15 / 3, "loss": -1e-300 / 3}
    assert len(status_line("secret", "\U0001f600" * 64, 1 << 53, run)) <= MAX_LINE_BYTES


def test_the_table_has_eighty_columns():
    run = {**RUN, "pid": 4194304, "name": "n" * 40, "last_checkpoint": f"/{'d' * 100}/step-1"}
    run |= {"epoch": 998, "num_epochs": 1000, "samples_per_s": 123456789.0, "loss": -1.234e-05}
    machine = f"{'host' * 15}-4194304-0123abcd"
    lines = status_table([MachineStatus(machine=machine, number=1, run=run, age_s=86400.0)])
    assert max(map(len, lines)) <= 80
    assert lines[2].endswith("ddd/step-1")


@pytest.mark.parametrize("answer", [b"", b"[", b"[]\n", b"{}\n", b"HTTP/1.1 404 Not Found\r\n\r\n"])
def test_the_command_reports_a_server_that_is_no_lighthouse(capsys, answer):
    listener = socket.create_server(("127.0.0.1", 0))
    address = "{}:{}".format(*listener.getsockname())

    def serve():
        with listener.accept()[0] as connection:
            connection.recv(1 << 16)
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    if answer == b"[]\n":
        main(["status", "--cluster", address])
        assert capsys.readouterr().out == f"no machine is in the cluster at {address}\n"
    else:
        with pytest.raises(SystemExit, match="is no lighthouse of this version"):
            main(["status", "--cluster", address])
    thread.join(WAIT_S)
    listener.close()
    with pytest.raises(SystemExit, match=r"no lighthouse answers at .*refused.*'gpuworker"):
        main(["status", "--cluster", address])
    with pytest.raises(SystemExit, match="pass 'host:port'"):
        main(["status", "--cluster", "here"])


PAGE = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nContent-Length: 12\r\n\r\n<h1>two</h1>"


def test_the_page_shows_the_progress_of_each_machine_escaped(gate):
    gate.backend.answer = PAGE
    with RawMember(gate, "<b>a</b>") as member, RawMember(gate, "quiet"):
        member.send(status_line(None, "<b>a</b>", 1, {**RUN, "name": "<script>"}))
        status_until(gate, None, lambda found: sum(bool(m.run) for m in found.machines) == 1)
        found = exchange(gate, page("GET", "/status", "Host: localhost"))
        whole = exchange(gate, page("GET", "/", "Host: localhost"))
    head, _, body = found.decode().partition("\r\n\r\n")
    assert f"content-length: {len(body.encode())}" in head
    assert head.lower().count("content-length") == 1
    assert body.startswith("<h1>two</h1>")
    for text in ("&lt;b&gt;a&lt;/b&gt;", "&lt;script&gt;", "12,310", "0.4181", "3/10", "quiet"):
        assert text in body
    assert "<script>" not in body
    assert b"Progress" not in whole
