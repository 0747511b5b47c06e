"""The ledger of a cluster, its grants, and one machine's part in its rounds."""

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cluster.cluster_ledger import ClusterLedger, LedgerState
from coordinator.cluster.grant import INITIAL_BATCHES, Grant
from coordinator.cluster.machine_report import MachineReport
from coordinator.cluster.member import (
    MAX_FAILED_CAPTURES,
    MAX_FINAL_ROUNDS,
    AdoptState,
    ApplyRound,
    Capture,
    Captured,
    Commit,
    FormQuorum,
    Gather,
    Member,
    ResetEngine,
    ResumeGrant,
    RoundFailed,
    Wait,
)
from coordinator.codec import decode, encode
from coordinator.run_errors import ClusterError
from coordinator.splitting import BatchSet, split_by_cost
from tests.support.clustering import report_of
from tests.support.pairs import few_examples


def new_ledger(num_epochs=2, batches_per_epoch=100, period_s=1.0, max_batches=None, **settings):
    return ClusterLedger(
        settings={"seed": 0, **settings},
        num_epochs=num_epochs,
        batches_per_epoch=batches_per_epoch,
        period_s=period_s,
        max_batches=max_batches,
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
        ("step", 2**70),
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
        ("first_open", 7),
        ("open", []),
        ("open", [{"consumed": [[0, 1000]], "tallies": {}}, {"consumed": [], "tallies": {}}]),
        ("lineage", None),
        ("lineage", "0"),
        ("grants", {"a": 3}),
        ("grants", {"a": {"batches": [[0, [[0, 3], [2, 5]]]]}}),
    ],
)
def test_a_broken_ledger_is_refused(name, value):
    state = encode(new_ledger().state)
    with pytest.raises(ValueError, match=r"ledger|lineage|grant"):
        new_ledger().restore(decode(LedgerState, {**state, name: value}, "ledger"))
    with pytest.raises(ValueError, match=f"ledger has no '{name}'"):
        decode(LedgerState, {k: v for k, v in state.items() if k != name}, "ledger")


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


class Driver:
    """Resumes a machine by hand, at given times.

    Attributes:
        action: The action in progress; ``None``: the machine is done.
    """

    def __init__(self, machine="a", ledger=None):
        self.now = 0.0
        self.member = Member(machine, ledger or new_ledger(), lambda: self.now)
        self.actions = self.member.run()
        self.action = next(self.actions)

    def give(self, result=None, now=None):
        """Resume with a result or a failure; returns the next action."""
        self.now = self.now if now is None else now
        try:
            if isinstance(result, RoundFailed):
                self.action = self.actions.throw(result)
            else:
                self.action = self.actions.send(result)
        except StopIteration:
            self.action = None
        return self.action

    def commit_alone(self, now=None):
        """Play a round without peers up to its :class:`ApplyRound`."""
        action = self.give((("a",), None), now)
        if isinstance(action, Capture):
            action = self.give(Captured())
        assert self.give((action.report,)) == Commit(ok=True)
        return self.give(True)


def test_a_failed_quorum_is_retried_after_growing_pauses():
    a, now = Driver(), 0.0
    for pause in (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0):
        assert a.action == FormQuorum()
        assert a.give(RoundFailed("away"), now) == ResumeGrant(reason="away")
        wait = a.give()
        assert wait.until == pytest.approx(now + pause)
        assert a.give(False, now) == wait
        now = wait.until
        a.give(False, now)


def test_a_machine_without_batches_left_waits_after_a_failed_round():
    """Its next round would fail as well, and it would call the engine without a pause."""
    a = Driver()
    a.commit_alone()
    a.give()
    assert a.give(True, 0.1) == FormQuorum()
    a.give(RoundFailed("away"))
    wait = a.give()
    assert a.give(True) == wait
    assert a.give(False, wait.until) == FormQuorum()


def test_an_idle_machine_requests_a_quorum_at_once():
    a = Driver()
    assert len(a.commit_alone().grant) == INITIAL_BATCHES
    assert a.give() == Wait(until=1.0)
    assert a.give(True, 0.1) == FormQuorum()


def test_a_superseded_machine_keeps_its_history_if_the_winner_dies():
    own, winning = new_ledger(), new_ledger()
    commit_all(own, ("a",))
    for _ in range(2):
        commit_all(winning, ("b",))
    lineage = own.lineage
    a = Driver(ledger=own)
    assert a.action == ResetEngine(step=1)
    a.give()
    a.give((("a", "b"), None))
    gather = a.give(Captured())
    assert a.give((gather.report, report_of(winning, "b"))) == ResetEngine(step=0)
    assert "that of machine b continues" in a.give().reason
    wait = a.give()
    assert a.give(False, wait.until) == FormQuorum()
    assert a.give((("a",), None)) == ResetEngine(step=1)  # no machine is left to heal from
    assert isinstance(a.give(), Capture)
    gather = a.give(Captured())
    assert (gather.report.step, gather.report.lineage) == (1, lineage)
    a.give((gather.report,))
    assert not a.give(True).restart
    assert a.member.ledger.step == 2


def test_a_healed_machine_restarts_with_the_next_committed_round():
    ahead = new_ledger()
    commit_all(ahead, ("b",))
    a = Driver()
    assert a.give((("a", "b"), encode(ahead.state))) == AdoptState()
    gather = a.give()
    assert gather.report.step == 1
    assert a.give((gather.report, report_of(ahead, "b"))) == Commit(ok=True)
    assert a.give(True).restart
    assert not a.member.healing


def test_a_machine_with_other_settings_is_refused_by_name_and_the_others_continue():
    even, odd = new_ledger(), new_ledger(batch_size=8)
    commit_all(even, ("b",))
    a, b = Driver("a", odd), Driver("b", even)
    b.give()
    assert a.give((("a", "b"), encode(even.state))) == ResetEngine(step=0)
    reports = a.give().report, (b.give((("a", "b"), None)), b.give(Captured()))[1].report
    with pytest.raises(ClusterError, match=r"machine a has other settings.*batch_size is 8"):
        a.give(reports)
    assert "batch_size is 8" in b.give(reports).reason


def test_a_failed_sum_is_voted_down_and_its_reason_reported():
    a = Driver()
    a.commit_alone()
    a.give()
    a.give(True)
    a.give((("a",), None))
    gather = a.give(Captured(weight=1.0, num_samples=1))
    a.give((gather.report,))
    assert a.give(RoundFailed("a peer is gone")) == Commit(ok=False)
    assert a.give(False) == ResumeGrant(reason="a peer is gone")
    assert a.member.ledger.step == 1


def test_a_stopping_machine_finishes_when_rounds_fail_for_too_long():
    a = Driver()
    a.commit_alone()
    a.give()
    a.now = 0.5  # before the next round is due
    a.member.stop()
    assert a.give(False) == FormQuorum()
    assert a.member.finish_by == 30.5
    a.give(RoundFailed("away"), 30.49)
    assert a.give() == Wait(until=30.5)
    assert a.give(False, 30.5) is None


def test_a_stopping_machine_completes_a_round_in_progress():
    a = Driver()
    a.commit_alone()
    a.give()
    a.now = 1.0
    a.member.stop()
    a.give(False)
    assert a.give((("a",), None), 31.5) == Capture(reserve_s=0.0)
    gather = a.give(Captured(), 33.0)
    assert isinstance(gather, Gather)
    assert gather.report.leaving
    assert a.give((gather.report,), 34.0) == Commit(ok=True)
    assert isinstance(a.give(True, 35.0), ApplyRound)
    assert a.give() is None


def test_a_machine_that_is_stopped_within_a_round_requests_the_next_one_at_once():
    a = Driver()
    a.commit_alone()
    a.member.stop()
    assert a.give() == FormQuorum()


def test_a_machine_whose_captures_fail_ends_and_names_the_reason():
    a = Driver()
    a.commit_alone()
    a.give()
    a.give(True)
    for _ in range(MAX_FAILED_CAPTURES - 1):
        assert isinstance(a.give((("a",), None)), Capture)
        gather = a.give(RoundFailed("a worker died"))
        assert "machine a cannot take part: a worker died" in a.give((gather.report,)).reason
        a.give(False, a.give().until)
    a.give((("a",), None))
    gather = a.give(RoundFailed("a worker died"))
    with pytest.raises(ClusterError, match=r"5 captures in a row failed.*a worker died"):
        a.give((gather.report,))


def test_a_machine_that_is_stopped_before_its_first_round_takes_part_in_none():
    """Unless it stops all machines."""
    member = Member("a", new_ledger(), lambda: 0.0)
    member.stop()
    assert list(member.run()) == []
    member.stop(everywhere=True)
    assert next(member.run()) == FormQuorum()


def test_captures_that_fail_now_and_then_do_not_end_a_machine():
    a = Driver()
    a.commit_alone()
    a.give()
    a.give(True)
    for number in range(2 * MAX_FAILED_CAPTURES):
        a.give((("a",), None))
        gather = a.give(RoundFailed("a worker died") if number % 2 else Captured())
        a.give((gather.report,))
        if not number % 2:
            a.give(True)
        a.give(False, a.give().until)
        assert a.action == FormQuorum()


def test_a_machine_whose_final_rounds_fail_is_done():
    ledger = new_ledger(num_epochs=1, batches_per_epoch=INITIAL_BATCHES)
    a = Driver(ledger=ledger)
    apply = a.commit_alone()
    a.give()
    a.give(True)
    a.give((("a",), None))
    gather = a.give(Captured(done=apply.grant.batches))
    a.give((gather.report,))
    a.give(True)
    for _ in range(MAX_FINAL_ROUNDS):
        a.give()
        while isinstance(a.action, Wait):
            a.give(False, a.action.until)
        assert a.action == FormQuorum()
        a.give(RoundFailed("the others are gone"))
    assert a.give() is None


def test_a_stopping_machine_that_was_healed_has_nothing_to_hand_over():
    ahead = new_ledger()
    commit_all(ahead, ("b",))
    a = Driver()
    a.give((("a", "b"), encode(ahead.state)))
    a.member.stop()
    a.give()
    a.give(RoundFailed("machine b is gone"))
    assert a.give() is None
