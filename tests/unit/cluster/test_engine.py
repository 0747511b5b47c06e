"""Engine options, signatures, compression, the lighthouse command, the in-memory engine."""

import importlib.util
import json
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch

from coordinator.cluster.machine_report import PROTOCOL_VERSION
from runtime.cluster import machine_group
from runtime.cluster.cluster_settings import ClusterSettings
from runtime.cluster.compression import CODECS, ErrorFeedback, is_compressible
from runtime.cluster.engine import ClusterState, EngineClosed, EngineError, PeerRefused
from runtime.cluster.lighthouse import JOIN_TIMEOUT_S, Lighthouse
from runtime.cluster.options import EngineOptions, split_host_port
from runtime.cluster.signing import seal, signature, unseal
from runtime.cluster.torchft_engine import TorchftEngine, open_store
from tests.support import programs
from tests.support.machines import LighthouseProcess, needs_torchft
from tests.support.memory_engine import Died, MemoryCluster
from tests.support.running import WAIT_S, at_once

EMPTY = ClusterState(tensors={}, meta={})


def holding(value):
    """A state with one value."""
    return ClusterState(tensors={}, meta={"value": value})


# --- options ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("host:29510", ("host", 29510)),
        ("[::1]:1", ("::1", 1)),
        ("http://10.0.0.1:80", ("10.0.0.1", 80)),
    ],
)
def test_addresses_are_split(text, parts):
    assert split_host_port("address", text) == parts


@pytest.mark.parametrize("text", ["host", "host:", ":29510", "host:0", "host:65536", "host:x", ""])
def test_malformed_addresses_raise(text):
    with pytest.raises(ValueError, match=r"address\(.*host:port"):
        EngineOptions(address=text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_machines", 0),
        ("timeout_s", 0.0),
        ("token", ""),
        ("compression", "int4"),
        ("machine", ""),
        ("machine", "x" * 257),
        ("heartbeat_s", -1.0),
        ("max_state_bytes", -1),
    ],
)
def test_invalid_options_are_named(name, value):
    with pytest.raises(ValueError, match=f"cluster: {name.removesuffix('_s')}"):
        EngineOptions(address="host:1", **{name: value})


@pytest.mark.parametrize("name", ["address", "token", "host"])
def test_options_that_are_no_text_are_named(name):
    with pytest.raises(TypeError, match=rf"{name}\(29510\): pass"):
        EngineOptions(**{"address": "host:1", name: 29510})


def test_options_come_from_the_environment():
    environ = {
        "GPUWORKER_CLUSTER": "host:1",
        "GPUWORKER_CLUSTER_MIN_MACHINES": "3",
        "GPUWORKER_CLUSTER_TOKEN": "secret",
        "GPUWORKER_CLUSTER_TIMEOUT": "2.5",
        "GPUWORKER_CLUSTER_HOST": "10.0.0.1",
        "GPUWORKER_CLUSTER_COMPRESSION": "int8",
    }
    found = EngineOptions.from_environment(environ, min_machines=2, token=None)
    assert (found.address, found.min_machines, found.token) == ("host:1", 2, "secret")
    assert (found.timeout_s, found.host, found.compression) == (2.5, "10.0.0.1", "int8")
    assert "secret" not in repr(found)
    with pytest.raises(ValueError, match="GPUWORKER_CLUSTER"):
        EngineOptions.from_environment({})
    with pytest.raises(ValueError, match="GPUWORKER_CLUSTER_TIMEOUT='soon'"):
        EngineOptions.from_environment({**environ, "GPUWORKER_CLUSTER_TIMEOUT": "soon"})


def test_a_period_longer_than_the_join_timeout_logs_a_warning(caplog):
    options = EngineOptions(address="host:1")
    ClusterSettings(engine=options, period_s=JOIN_TIMEOUT_S / 2)
    assert not caplog.records
    ClusterSettings(engine=options, period_s=JOIN_TIMEOUT_S)
    assert "--join-timeout 120" in caplog.text


def test_without_torchft_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    remedy = r"torchft.*pip install 'gpuworker\[cluster\]'"
    with pytest.raises(ImportError, match=remedy):
        TorchftEngine(
            EngineOptions(address="127.0.0.1:1"), lambda: ClusterState(tensors={}, meta={})
        )
    with pytest.raises(ImportError, match=remedy):
        Lighthouse(port=0)


# --- signatures -----------------------------------------------------------------------


def test_an_envelope_unseals_only_with_its_token_machine_number_and_purpose():
    envelope = seal("token", "gather", 4, "a", b"facts")
    assert unseal("token", "gather", 4, "a", envelope) == b"facts"
    for args in (("other", "gather", 4, "a"), (None, "gather", 4, "a"), ("token", "hello", 4, "a")):
        with pytest.raises(PeerRefused, match="not signed"):
            unseal(*args, envelope)
    for number, machine in ((3, "a"), (4, "b")):
        with pytest.raises(PeerRefused, match="another sender or another number"):
            unseal("token", "gather", number, machine, envelope)
    for i in range(len(envelope)):
        changed = envelope[:i] + bytes([envelope[i] ^ 1]) + envelope[i + 1 :]
        with pytest.raises(PeerRefused):
            unseal("token", "gather", 4, "a", changed)


def test_a_signature_depends_on_the_boundaries_of_its_parts():
    assert signature("t", "p", b"ab", b"c") != signature("t", "p", b"a", b"bc")
    assert signature("t", "pa", b"b") != signature("t", "p", b"ab")


# --- members of a generation --------------------------------------------------------


def test_garbage_in_the_store_does_not_end_its_owner():
    timeout = timedelta(seconds=10)
    store, _ = open_store("127.0.0.1", timeout)
    store.set("join/7/1", b"\xff" * 100)
    assert machine_group._agree_on_session(store, True, 7, 0, 2, timeout).startswith("session/")


def test_a_machine_with_many_banned_peers_remains_a_member():
    timeout = timedelta(seconds=10)
    store, _ = open_store("127.0.0.1", timeout)
    store.set("s/1", seal("token", "s", 1, "b", json.dumps([PROTOCOL_VERSION, ["a"]]).encode()))
    gone = {f"gone-{i}" for i in range(10_000)}
    hellos = machine_group._exchange_hellos(
        store, "s", 0, ["a", "b"], "token", gone | {"b"}, timeout
    )
    assert hellos == {"a": ["b"], "b": ["a"]}


def test_a_closed_group_ends_its_connections_although_others_refer_to_it():
    timeout = timedelta(seconds=10)
    store, port = open_store("127.0.0.1", timeout)
    client = torch.distributed.TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    groups = {}

    def connect(rank):
        groups[rank] = machine_group.MachineGroup(
            store=client if rank else store,
            is_owner=rank == 0,
            generation=1,
            rank=rank,
            candidates=("a", "b"),
            host="127.0.0.1",
            token="token",
            banned=set(),
            connect_timeout_s=10.0,
            timeout_s=100 * WAIT_S,
        )

    at_once(connect, range(2))
    groups[0].close()
    groups[0].close()
    with pytest.raises(EngineError, match="left the group"):
        groups[0].gather(b"")
    with pytest.raises(EngineError, match="gone or timed out"):  # long before the timeout
        groups[1].gather(b"")
    groups[1].close()


# --- compression ----------------------------------------------------------------------


def summed(feedbacks, tensors, commit=True):
    """The sum on every machine; the machines are threads."""
    size = len(feedbacks)
    meeting = threading.Barrier(size)
    posted = [None] * size

    def run(rank):
        def exchange(output, input, pick):
            posted[rank] = input
            meeting.wait(10)
            output.copy_(torch.cat([pick(posted[i]) for i in range(size)]))
            meeting.wait(10)

        feedbacks[rank].all_reduce(
            0,
            tensors[rank],
            rank,
            size,
            lambda out, x: exchange(out, x, lambda sent: sent[rank : rank + 1]),
            lambda out, x: exchange(out, x, lambda sent: sent),
        )
        if commit:
            feedbacks[rank].commit()

    at_once(run, range(size))
    return tensors


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", CODECS)
def test_rounding_errors_are_added_in_the_next_rounds(name, size):
    draw = torch.Generator().manual_seed(0)
    own = [torch.randn(3001, generator=draw) for _ in range(size)]
    exact = torch.stack(own).sum(0)
    feedbacks = [ErrorFeedback(CODECS[name]) for _ in range(size)]
    total, lost = torch.zeros(3001), []
    for i in range(1, 21):
        results = summed(feedbacks, [x.clone() for x in own])
        assert all(torch.equal(results[0], other) for other in results)
        total += results[0]
        lost.append(float((total - i * exact).norm()))
    assert max(lost[10:]) < 3 * lost[0] + 1e-3  # and not 10 to 20 times as much


def test_a_failed_round_counts_no_rounding_error_twice():
    own = [torch.randn(2000), torch.randn(2000)]
    once = [ErrorFeedback(CODECS["int8"]) for _ in own]
    twice = [ErrorFeedback(CODECS["int8"]) for _ in own]
    summed(twice, [x.clone() for x in own], commit=False)
    for feedback in twice:
        feedback.discard()
    for _ in range(2):
        a, b = (summed(each, [x.clone() for x in own])[0] for each in (once, twice))
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_are_kept_and_do_not_affect_the_next_round(name, bad):
    feedback = ErrorFeedback(CODECS[name])
    x = torch.ones(2000)
    x[3] = bad
    summed([feedback], [x])
    assert not x[3].isfinite()
    assert summed([feedback], [torch.ones(2000)])[0].isfinite().all()


def test_only_large_tensors_below_float64_are_compressed():
    assert is_compressible(torch.ones(1024))
    assert not is_compressible(torch.ones(1023))
    assert not is_compressible(torch.ones(2000, dtype=torch.float64))


# --- the lighthouse -------------------------------------------------------------------


@needs_torchft
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_lighthouse_prints_its_address_and_ends_cleanly(number):
    lighthouse = LighthouseProcess()
    try:
        assert lighthouse.address == f"127.0.0.1:{lighthouse.port}"
        assert f"cluster('{lighthouse.address}')" in lighthouse.line
        lighthouse.wait_for("heartbeating", 0)
        lighthouse.signal(number)
        assert lighthouse.ended() == 0
    finally:
        lighthouse.close()


@needs_torchft
def test_a_lighthouse_that_cannot_listen_names_the_remedy():
    lighthouse = LighthouseProcess()
    try:
        again = programs.run(
            [sys.executable, "-m", "runtime", "lighthouse", "--port", str(lighthouse.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    finally:
        lighthouse.close()
    assert again.returncode == 1
    assert "in use" in again.stderr
    assert "port 0" in again.stderr
    assert "Traceback" not in again.stderr


# --- the in-memory engine ---------------------------------------------------------------


def run_rounds(cluster, names, num_rounds, log):
    """Run machines as threads until each has committed ``num_rounds`` rounds."""

    def run(engine, value):
        try:
            while engine.step < num_rounds:
                try:
                    found = engine.quorum()
                    if found.healed is not None:
                        value[0] = found.healed.meta["value"]
                    log.append((engine.machine, engine.gather(engine.machine.encode())))
                    x = torch.full((4,), 2.0)
                    engine.all_reduce([x])
                    assert x.tolist() == [2.0 * len(found.members)] * 4
                except EngineError:
                    engine.commit(False)
                    continue
                if engine.commit(True):
                    value[0] += 1
        except (Died, EngineClosed):
            return
        finally:
            engine.close()

    values = {name: [10 * i] for i, name in enumerate(names)}
    threads = []
    for name in names:
        value = values[name]
        engine = cluster.engine(name, lambda v=value: holding(v[0]))
        threads.append(threading.Thread(target=run, args=(engine, value)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return {name: value[0] for name, value in values.items()}


def test_machines_in_memory_agree_despite_faults():
    cluster = MemoryCluster(timeout_s=5.0)
    faults = cluster.faults.fail_at("a", 1, "gather").fail_at("b", 2, "all_reduce")
    faults.deny_at("c", 3).die_at("b", 4, "gather")
    log = []
    values = run_rounds(cluster, "abc", 6, log)
    assert faults.pending == ()
    assert len(faults.fired) == 4
    assert values["a"] == values["c"] == 6
    assert (("a", (b"a", b"b", b"c"))) in log
    assert (("a", (b"a", b"c"))) in log


def test_close_wakes_a_hanging_machine_in_memory():
    cluster = MemoryCluster(timeout_s=0.2)
    cluster.faults.hang_at("a", 0, "gather")
    a, b = (cluster.engine(name, lambda: EMPTY) for name in "ab")
    errors = []

    def run(engine):
        try:
            engine.quorum()
            engine.gather(b"")
        except (EngineError, EngineClosed) as error:
            errors.append(type(error))
            a.close()

    at_once(run, (a, b))
    b.close()
    assert errors == [EngineError, EngineClosed]
