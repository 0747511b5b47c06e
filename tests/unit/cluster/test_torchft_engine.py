"""Rounds of machines as processes over a real lighthouse, with faults."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from runtime.cluster import torchft_engine
from runtime.cluster.engine import PeerRefused
from runtime.cluster.options import EngineOptions
from runtime.cluster.torchft_engine import TorchftEngine
from tests.support.engine_program import contribution
from tests.support.machines import (
    HEARTBEAT_TIMEOUT_S,
    CallFailed,
    cluster,
    make_round,
    needs_torchft,
    together,
)

pytestmark = needs_torchft
__all__ = ["cluster"]


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_machines_heal_gather_sum_and_commit(cluster, names):
    cluster.light(min_machines=len(names))
    machines = cluster.machines(names, token="secret")
    quorums = together(machines, "quorum")
    assert {tuple(q["members"]) for q in quorums} == {tuple(names)}
    assert [q["rank"] for q in quorums] == list(range(len(names)))
    # At step 0 all but one receive the state of that one.
    assert sorted(str(q["healed"]) for q in quorums) == ["0.0"] * (len(names) - 1) + ["None"]

    for machine in machines:
        machine.send("gather", report=f"of {machine.name}", size=10_000 * (machine.name == "a"))
    gathered = [machine.answer() for machine in machines]
    assert gathered == [[f"of {name}" for name in names]] * len(names)

    for seed, machine in enumerate(machines):
        machine.send("all_reduce", seed=seed)
    sums = [machine.answer() for machine in machines]
    assert len({found["digest"] for found in sums}) == 1
    expected = [sum(parts) for parts in zip(*map(contribution, range(len(names))), strict=True)]
    for found, wanted in zip(sums[0]["first"], expected, strict=True):
        rtol = 1e-2 if wanted.dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(torch.tensor(found), wanted[:2].float(), rtol=rtol, atol=1e-2)

    assert together(machines, "commit") == [{"done": True, "step": 1}] * len(names)
    again = make_round(machines, value=7.0)
    assert {q["generation"] for q in again} == {quorums[0]["generation"]}
    assert [q["healed"] for q in again] == [None] * len(names)

    late = cluster.machine("late", token="secret", value=99.0)
    cluster.join(late)
    found = [*together(machines, "quorum"), late.answer()]
    assert [q["healed"] for q in found] == [None] * len(names) + [7.0]
    assert {q["step"] for q in found} == {2}


def survive(survivor):
    """Repeat rounds until a machine whose peer is gone commits."""
    while True:
        found = [together([survivor], call)[0] for call in ("quorum", "gather", "all_reduce")]
        failed = [each for each in found if isinstance(each, CallFailed)]
        assert {each.kind for each in failed} <= {"EngineError"}, failed
        if survivor.call("commit")["done"]:
            return time.monotonic()


@pytest.mark.parametrize("point", ["quorum", "gather", "all_reduce", "commit"])
def test_a_killed_peer_costs_its_heartbeat(cluster, point):
    a, b = machines = cluster.machines("ab")
    make_round(machines)
    together(machines, "quorum")
    match point:
        case "quorum":  # before the gather
            b.kill()
            killed = time.monotonic()
            a.send("gather")
        case "gather" | "all_reduce":  # in the middle of the call
            b.call("freeze_at", point=point)
            if point == "all_reduce":
                together(machines, "gather")
            b.send(point)
            a.send(point)
            assert b.answer() == {"frozen": point}
            b.kill()
            killed = time.monotonic()
        case "commit":
            together(machines, "gather")
            together(machines, "all_reduce")
            b.kill()
            killed = time.monotonic()
            a.send("commit")
    if point == "commit":  # each machine decides by itself
        assert a.answer()["done"]
    else:
        with pytest.raises(CallFailed, match="gone or timed out") as caught:
            a.answer()
        assert caught.value.kind == "EngineError"
    detected_s = time.monotonic() - killed
    took_s = survive(a) - killed
    print(f"killed at {point}: detected after {detected_s:.2f} s, commit after {took_s:.2f} s")
    assert detected_s < 0.5
    assert took_s < HEARTBEAT_TIMEOUT_S + 0.5


def test_a_suspended_peer_costs_the_timeout_and_rejoins(cluster):
    a, b = machines = cluster.machines("ab", timeout_s=1.5)
    make_round(machines, value=1.0)
    together(machines, "quorum")
    b.signal(signal.SIGSTOP)
    with pytest.raises(CallFailed, match="gone or timed out") as caught:
        a.call("gather")
    assert 1.0 < caught.value.took_s < 3.0
    survive(a)
    b.signal(signal.SIGCONT)
    with pytest.raises(CallFailed, match="gone or timed out"):
        b.call("gather")
    cluster.join(b)
    a.send("quorum")
    assert [machine.answer()["healed"] for machine in machines] == [None, 1.0]


def test_machines_wait_for_a_restarted_lighthouse(cluster):
    first = cluster.light()
    machines = cluster.machines("ab")
    [before, _] = make_round(machines)
    first.kill()
    for machine in machines:
        machine.send("quorum")
    assert all(machine.is_silent(0.5) for machine in machines)  # neither answer nor error
    cluster.light(port=first.port, min_machines=2)
    back = time.monotonic()
    quorums = [machine.answer() for machine in machines]
    print(f"quorum {time.monotonic() - back:.2f} s after the lighthouse is back")
    assert time.monotonic() - back < 3.0
    assert [q["healed"] for q in quorums] == [None, None]
    # It counts from 1 again: the same number, with new connections after a failure.
    assert quorums[0]["generation"] == before["generation"]
    together(machines, "commit", ok=False)
    make_round(machines)


@pytest.mark.parametrize(("outage_s", "waits_s"), [(600.0, 30.0), (5.0, 5.0)])
def test_a_start_waits_for_a_lighthouse_no_longer_than_for_one_that_is_lost(
    outage_s, waits_s, monkeypatch
):
    def wait(address, timeout_s):
        raise OSError(f"waited {timeout_s}")

    monkeypatch.setattr(torchft_engine, "wait_for_lighthouse", wait)
    options = EngineOptions(address="localhost:1", host="localhost", lighthouse_timeout_s=outage_s)
    with pytest.raises(Exception, match=f"waited {waits_s}"):
        TorchftEngine(options, pytest.fail)


def test_a_starting_machine_waits_for_an_unreachable_lighthouse(monkeypatch):
    answers = iter([False, False, True])
    monkeypatch.setattr(torchft_engine, "accepts_connections", lambda address: next(answers))
    monkeypatch.setattr(torchft_engine, "PAUSE_S", 0.0)
    torchft_engine.wait_for_lighthouse("host:1", 10.0)
    assert list(answers) == []
    monkeypatch.setattr(torchft_engine, "accepts_connections", lambda address: False)
    torchft_engine.wait_for_lighthouse("host:1", 0.0)


def test_a_repeated_generation_number_does_not_use_old_addresses(cluster):
    first = cluster.light()
    machines = cluster.machines("ab")
    make_round(machines)
    together(machines, "commit", ok=False)
    assert {q["generation"] for q in make_round(machines)} == {2}
    first.kill()
    cluster.light(port=first.port, min_machines=2)
    assert {q["generation"] for q in make_round(machines)} == {1}


def test_two_histories_of_one_step_are_not_healed_unless_one_is_reset(cluster):
    a, b = machines = cluster.machines("ab")
    make_round(machines, value=1.0)
    together(machines, "quorum")
    assert a.call("commit", value=2.0) == {"done": True, "step": 2}
    assert b.call("commit", ok=False) == {"done": False, "step": 1}
    a.signal(signal.SIGSTOP)  # stalls, while the other one commits its own step 2
    survive(b)
    a.signal(signal.SIGCONT)
    cluster.join(a)
    b.send("quorum")
    quorums = [machine.answer() for machine in machines]
    assert [(q["step"], q["healed"]) for q in quorums] == [(2, None), (2, None)]
    b.call("reset")
    assert [q["healed"] for q in make_round(machines)] == [None, 2.0]


def test_a_reset_machine_continues_alone_if_its_source_dies(cluster):
    a, b = machines = cluster.machines("ab")
    make_round(machines, value=1.0)
    b.call("reset")  # its history has lost: it must be healed
    a.kill()
    [quorum] = together([b], "quorum")
    assert (quorum["step"], quorum["healed"], tuple(quorum["members"])) == (0, None, ("b",))
    b.call("reset", step=1)  # no machine is left to heal from
    b.call("gather")
    assert b.call("commit", value=2.0) == {"done": True, "step": 2}


def test_a_machine_that_missed_a_commit_is_healed(cluster):
    a, b = machines = cluster.machines("ab")
    make_round(machines, value=1.0)
    together(machines, "quorum")
    a.call("commit", value=5.0)
    b.call("commit", ok=False)
    quorums = make_round(machines)
    assert [(q["step"], q["healed"]) for q in quorums] == [(2, None), (2, 5.0)]


def test_a_machine_with_another_token_is_refused_and_the_others_continue(cluster):
    machines = cluster.machines("ab", token="secret")
    make_round(machines)
    for name, token in (("c", "wrong"), ("d", None)):
        stranger = cluster.machine(name, token=token, checked=False)
        cluster.join(stranger)
        quorums = make_round(machines)
        assert [tuple(q["members"]) for q in quorums] == [("a", "b")] * 2
        assert [q["refused"] for q in quorums] == [[name]] * 2
        with pytest.raises(CallFailed, match="another token") as caught:
            stranger.answer()
        assert (caught.value.kind, caught.value.machines) == ("PeerRefused", (name,))
        assert "a, b have" in str(caught.value)
        stranger.kill()


@pytest.mark.parametrize("token", ["wrong", None])
def test_a_machine_with_another_token_is_refused_before_it_joins_a_quorum(cluster, token):
    machines = cluster.machines("ab", token="secret")
    first = make_round(machines)
    options = EngineOptions(address=cluster.lighthouse.address, machine="c", token=token)
    with pytest.raises(PeerRefused, match="a, b have another token") as caught:
        TorchftEngine(options, pytest.fail)
    assert caught.value.machines == ("c",)
    second = make_round(machines)
    assert [q["refused"] for q in second] == [[], []]
    assert [q["generation"] for q in second] == [q["generation"] for q in first]


@pytest.mark.parametrize(
    "what", ["a pickle", "a wrong token", "an old message", "too much", "half a message"]
)
def test_a_peer_that_gathers_garbage_is_refused_and_the_others_continue(cluster, what):
    a, b, c = machines = cluster.machines("abc", token="secret")
    c.call("send", kind=what)
    failed = together(machines, "quorum")  # step and address are gathered for healing
    assert {(f.kind, f.machines) for f in failed} == {("PeerRefused", ("c",))}
    cluster.join(c)
    quorums = make_round([a, b])
    assert [q["refused"] for q in quorums] == [["c"]] * 2
    with pytest.raises(CallFailed, match="refuses this machine") as caught:
        c.answer()
    assert caught.value.kind == "PeerRefused"


def test_unequal_tensor_sizes_raise_and_do_not_abort_the_process(cluster):
    a, b = machines = cluster.machines("ab")
    together(machines, "quorum")
    a.send("all_reduce", numel=1000)
    b.send("all_reduce", numel=1001)
    for machine in machines:
        with pytest.raises(CallFailed, match="other shapes"):
            machine.answer()
    make_round(machines)


@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_compressed_sums_are_bitwise_equal_on_all_machines(cluster, compression):
    cluster.light(min_machines=3)
    machines = cluster.machines("abc", compression=compression)
    together(machines, "quorum")
    for seed, machine in enumerate(machines):
        machine.send("all_reduce", seed=seed)
    sums = [machine.answer() for machine in machines]
    assert len({found["digest"] for found in sums}) == 1
    single, double, *_ = [sum(parts) for parts in zip(*map(contribution, range(3)), strict=True)]
    assert sums[0]["first"][0] == pytest.approx(single[:2].tolist(), abs=0.1)
    assert sums[0]["first"][1] == double[:2].tolist()  # never compressed


def test_close_wakes_a_blocked_call(cluster):
    cluster.light(min_machines=3)
    machines = cluster.machines("ab")
    for machine in machines:
        machine.call("cancel_after", timeout_s=0.3)
        machine.send("quorum")
    for machine in machines:
        with pytest.raises(CallFailed) as caught:
            machine.answer()
        assert caught.value.kind == "EngineClosed"
        assert caught.value.took_s < 1.5


def test_a_quorum_waits_for_min_machines(cluster):
    a = cluster.machine("a", min_machines=2)
    a.send("quorum")
    with pytest.raises(AssertionError, match="no answer"):
        a.answer(0.5)
    b = cluster.machine("b", min_machines=2)
    b.send("quorum")
    assert tuple(a.answer()["members"]) == tuple(b.answer()["members"]) == ("a", "b")
