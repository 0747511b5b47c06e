"""The ledger of a cluster, its grants, and one machine's state machine."""

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cluster.cluster_ledger import ClusterLedger
from coordinator.cluster.grant import INITIAL_BATCHES, Grant
from coordinator.cluster.machine_report import LedgerError, MachineReport
from coordinator.cluster.member_protocol import (
    ApplyRound,
    CaptureDone,
    Commit,
    Committed,
    Finish,
    FormQuorum,
    Gathered,
    Idle,
    MemberProtocol,
    QuorumFailed,
    QuorumFormed,
    Reject,
    RequestCapture,
    ResetEngine,
    ResumeGrant,
    RunReady,
    Stop,
)
from coordinator.messages import Tick
from coordinator.splitting import BatchSet, split_by_cost
from tests.support.pairs import few_examples


def new_ledger(num_epochs=2, batches_per_epoch=100, period_s=1.0, max_batches=None, **settings):
    return ClusterLedger(
        settings={"seed": 0, **settings},
        num_epochs=num_epochs,
        batches_per_epoch=batches_per_epoch,
        period_s=period_s,
        max_batches=max_batches,
    )


def report_of(ledger, machine, done=(), **values):
    return MachineReport(
        machine=machine,
        step=ledger.step,
        lineage=ledger.lineage,
        consumed=ledger.consumed,
        settings=ledger.settings,
        done=done,
        **values,
    )


def commit_all(ledger, names=("a", "b"), seconds=0.1):
    """Commit a round in which all machines have trained their grants."""
    reports = []
    for name in names:
        done = ledger.grants.get(name, Grant()).batches
        reports.append(report_of(ledger, name, done, seconds_per_batch=seconds))
    return ledger.commit(reports)


# -- reports ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("machine", ""),
        ("machine", 7),
        ("step", -1),
        ("step", True),
        ("step", 2**60),
        ("lineage", "00"),
        ("lineage", "x" * 64),
        ("settings", []),
        ("done", [[0, [[3, 3]]]]),
        ("done", [[0, [[3, 5], [5, 6]]]]),
        ("done", [[1, [[0, 1]]], [0, [[0, 1]]]]),
        ("kept", [[0, []]]),
        ("kept", [[0, [[0, 1.5]]]]),
        ("weight", -1),
        ("weight", "1"),
        ("num_samples", 1.5),
        ("seconds_per_batch", 0),
        ("tallies", [[0, 1]]),
        ("leaving", 1),
        ("void", None),
    ],
)
def test_the_error_for_malformed_facts_names_the_field(field, value):
    sent = json.loads(report_of(new_ledger(), "a").to_json())
    sent[field] = value
    with pytest.raises(ValueError, match=field):
        MachineReport.from_json(json.dumps(sent).encode())


NAMES = json.dumps([field.name for field in fields(MachineReport)]).encode()


@pytest.mark.parametrize(
    "data", [NAMES, b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"weight": NaN}']
)
def test_garbage_instead_of_facts_raises(data):
    with pytest.raises(ValueError):  # noqa: PT011 - several messages
        MachineReport.from_json(data)


# -- the ledger -------------------------------------------------------------------------


def test_epochs_close_in_order_with_the_tallies_of_all_runs():
    ledger = new_ledger(batches_per_epoch=10)
    commit_all(ledger)
    closed = []
    while not ledger.complete:
        closed += commit_all(ledger)
    assert [epoch.epoch for epoch in closed] == [0, 1]
    assert ledger.consumed == 20
    assert ledger.recent == tuple(closed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("settings", {}),
        ("consumed", 3),
        ("first", 7),
        ("open", []),
        ("open", [[0, [[0, 1000]], {}], [1, [], {}]]),
        ("lineage", None),
        ("grants", [["a", 3]]),
    ],
)
def test_a_broken_ledger_is_refused(name, value):
    state = new_ledger().state_dict()
    with pytest.raises(ValueError, match=r"ledger|lineage|grant"):
        new_ledger().load_state_dict({**state, name: value})
    with pytest.raises(ValueError, match=f"ledger's state has no '{name}'"):
        new_ledger().load_state_dict({k: v for k, v in state.items() if k != name})


# -- grants -----------------------------------------------------------------------------


def test_grants_follow_speed_and_last_longer_than_a_period():
    ledger = new_ledger(batches_per_epoch=10_000)
    reports = [report_of(ledger, n, seconds_per_batch=s) for n, s in (("a", 0.1), ("b", 0.02))]
    grants = ledger.compute_grants(reports)
    assert [len(grants[name]) for name in "ab"] == [15, 75]
    assert grants["b"].batches == ((0, (range(15, 90),)),)


def test_a_machine_without_measurement_counts_as_the_mean_of_the_others():
    ledger = new_ledger(batches_per_epoch=10_000)
    reports = [report_of(ledger, "a", seconds_per_batch=0.1), report_of(ledger, "b")]
    assert len(ledger.compute_grants(reports)["b"]) == 15
    assert len(ledger.compute_grants([report_of(ledger, "b")])["b"]) == INITIAL_BATCHES


@few_examples
@given(
    st.lists(st.tuples(st.floats(1e-3, 10), st.integers(0, 50)), min_size=1, max_size=8),
    st.integers(0, 500),
)
def test_the_last_batches_are_assigned_so_that_all_finish_together(machines, total):
    seconds, kept = [s for s, _ in machines], [k for _, k in machines]
    parts = split_by_cost(total, [(k * s, s) for s, k in machines], least=0)
    assert sum(parts) == total
    assert min(parts) >= 0
    ends = [(k + p) * s for s, k, p in zip(seconds, kept, parts, strict=True)]
    last = max((e for e, p in zip(ends, parts, strict=True) if p), default=0.0)
    # No other machine would have finished the last batch earlier.
    assert all(e + s >= last * (1 - 1e-9) for e, s in zip(ends, seconds, strict=True))


@few_examples
@given(st.lists(st.sampled_from(range(40))), st.lists(st.sampled_from(range(40))))
def test_batches_are_removed_as_from_a_set(present, removed):
    batches = BatchSet(range(b, b + 1) for b in set(present))
    batches.remove([range(b, b + 1) for b in set(removed)])
    assert [b for span in batches.spans for b in span] == sorted(set(present) - set(removed))


# -- one machine ------------------------------------------------------------------------


def one(ledger=None):
    """A machine in its first quorum."""
    member = MemberProtocol("a", ledger or new_ledger())
    assert member.handle(RunReady(), 0.0) == [FormQuorum()]
    return member


def formed(*members, healed=None):
    return QuorumFormed(members=members, healed=healed)


def commit_alone(member, now=0.0):
    """The first round of a machine without peers."""
    (gather,) = member.handle(formed("a"), now)
    assert member.handle(Gathered(reports=(gather.report,)), now) == [Commit(ok=True)]
    return member.handle(Committed(ok=True), now)


def test_a_failed_quorum_is_retried_after_growing_pauses():
    member, now = one(), 0.0
    for pause in (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0):
        assert member.handle(QuorumFailed(error="away"), now) == [ResumeGrant(reason="away")]
        assert member.deadline == pytest.approx(now + pause)
        assert member.handle(Tick(), now) == []
        now = member.deadline
        assert member.handle(Tick(), now) == [FormQuorum()]


def test_an_idle_machine_requests_a_quorum_at_once():
    member = one()
    (apply,) = commit_alone(member)
    assert len(apply.grant) == INITIAL_BATCHES
    assert member.handle(Idle(), 0.1) == [FormQuorum()]


def test_a_superseded_machine_keeps_its_history_if_the_winner_dies():
    own, winning = new_ledger(), new_ledger()
    commit_all(own, ("a",))
    for _ in range(2):
        commit_all(winning, ("b",))
    lineage = own.lineage
    member = MemberProtocol("a", own)
    member.handle(RunReady(), 0.0)
    member.handle(formed("a", "b"), 0.0)
    nothing = CaptureDone(done=(), kept=(), weight=0.0, num_samples=0, seconds_per_batch=None)
    (gather,) = member.handle(nothing, 0.0)
    lost = member.handle(Gathered(reports=(gather.report, report_of(winning, "b"))), 0.0)
    assert ResetEngine(step=0) in lost
    assert member.handle(Tick(), 1.0) == [FormQuorum()]
    back, capture = member.handle(formed("a"), 1.0)  # no machine is left to heal from
    assert back == ResetEngine(step=1)
    assert isinstance(capture, RequestCapture)
    (gather,) = member.handle(nothing, 1.0)
    assert (gather.report.step, gather.report.lineage) == (1, lineage)
    member.handle(Gathered(reports=(gather.report,)), 1.0)
    (apply,) = member.handle(Committed(ok=True), 1.0)
    assert not apply.restart
    assert member.step == 2


def test_a_machine_with_other_settings_is_refused_by_name_and_the_others_continue():
    even, odd = new_ledger(), new_ledger(batch_size=8)
    commit_all(even, ("b",))
    member, other = one(odd), MemberProtocol("b", even)
    other.handle(RunReady(), 0.0)
    (reset, gather) = member.handle(formed("a", "b", healed=even.state_dict()), 0.0)
    assert reset == ResetEngine(step=0)
    other.handle(formed("a", "b"), 0.0)
    done = CaptureDone(done=(), kept=(), weight=0.0, num_samples=0, seconds_per_batch=None)
    (theirs,) = other.handle(done, 0.0)
    reports = (gather.report, theirs.report)
    (refused,) = member.handle(Gathered(reports=reports), 0.0)
    assert isinstance(refused, Reject)
    assert "machine a has other settings" in refused.reason
    assert "batch_size is 8" in refused.reason
    (resumed,) = other.handle(Gathered(reports=reports), 0.0)
    assert "batch_size is 8" in resumed.reason


def test_a_stopping_machine_finishes_when_rounds_fail_for_too_long():
    member = one()
    commit_alone(member)
    assert member.handle(Stop(), 1.0) == [FormQuorum()]
    assert member.deadline == 31.0
    member.handle(QuorumFailed(error="away"), 2.0)
    assert member.handle(Tick(), 31.0)[-1] == Finish(stopped=True)
    assert member.handle(Tick(), 32.0) == []


def test_a_stopping_machine_completes_a_round_in_progress():
    member = one()
    commit_alone(member)
    member.handle(Stop(), 1.0)
    capture = [RequestCapture(reserve_s=0.0)]
    assert member.handle(formed("a"), 31.5) == capture
    assert member.deadline is None
    assert member.handle(Tick(), 32.0) == []
    nothing = CaptureDone(done=(), kept=(), weight=0.0, num_samples=0, seconds_per_batch=None)
    (gather,) = member.handle(nothing, 33.0)
    assert gather.report.leaving
    assert member.handle(Gathered(reports=(gather.report,)), 34.0) == [Commit(ok=True)]
    apply, finish = member.handle(Committed(ok=True), 35.0)
    assert isinstance(apply, ApplyRound)
    assert finish == Finish(stopped=True)


def test_an_event_that_is_invalid_in_the_state_is_an_error():
    member = one()
    with pytest.raises(LedgerError, match="in state"):
        member.handle(Committed(ok=True), 0.0)
