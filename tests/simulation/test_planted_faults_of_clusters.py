"""Faults planted in the cluster's agreement, each of which the simulation must find."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace

from coordinator.cluster import member
from coordinator.cluster.cluster_ledger import ClusterLedger, LedgerState, evaluate_round
from coordinator.cluster.machine_report import num_batches
from coordinator.cluster.member import Commit, Member, RoundFailed, Wait
from coordinator.codec import decode
from tests.simulation.cluster_harness import TOO_LONG
from tests.simulation.cluster_machine import SimMachine
from tests.simulation.finding import assert_cluster_is_found

EFFECT = "(batch, effect, times consumed)"


def without_history(ledger, reports):
    """Reports as received by a machine that ignores histories."""
    own = {"step": ledger.step, "lineage": ledger.lineage, "consumed": ledger.consumed}
    return tuple(replace(peer, **own, done=peer.done, kept=peer.kept) for peer in reports)


def change_reports(monkeypatch, **values):
    report_of = Member._report

    def changed(self):
        return replace((yield from report_of(self)), **values)

    monkeypatch.setattr(Member, "_report", changed)


def test_an_ignored_lineage_is_found(monkeypatch):
    evaluate = evaluate_round

    def trusting(ledger, reports):
        return evaluate(ledger, without_history(ledger, reports))

    monkeypatch.setattr(member, "evaluate_round", trusting)
    monkeypatch.setattr(ClusterLedger, "errors_in", lambda self, reports: {})
    assert_cluster_is_found("granted though consumed")


def test_a_machine_that_ignores_healing_is_found(monkeypatch):
    """It continues in its own history, at an old step, and its commit counts."""
    evaluate = evaluate_round
    monkeypatch.setattr(
        member,
        "evaluate_round",
        lambda ledger, reports: evaluate(ledger, without_history(ledger, reports)),
    )
    monkeypatch.setattr(ClusterLedger, "errors_in", lambda self, reports: {})
    monkeypatch.setattr(Member, "_adopt", lambda self, state: iter(()))
    assert_cluster_is_found("granted though consumed")


def test_a_healed_machine_that_keeps_its_training_is_found(monkeypatch):
    def keeping(self, state):
        ledger = self.ledger.copy()
        ledger.restore(decode(LedgerState, state, "ledger"))
        self.ledger, self._engine_step = ledger, ledger.step
        return iter(())

    monkeypatch.setattr(Member, "_adopt", keeping)
    assert_cluster_is_found(EFFECT)


def test_a_grant_that_is_lost_with_its_machine_is_found(monkeypatch):
    open_batches = ClusterLedger._open_batches

    def without_those_of_the_dead(ledger, reports):
        pots = open_batches(ledger, reports)
        for machine, grant in ledger.grants.items():
            if machine not in {peer.machine for peer in reports}:
                for epoch, spans in grant.batches:
                    if epoch in pots:
                        pots[epoch].remove(spans)
        return pots

    commit = ClusterLedger.commit

    def keeping_the_dead(self, reports):
        before = dict(self.grants)
        closed = commit(self, reports)
        self.grants = {**before, **self.grants}
        return closed

    monkeypatch.setattr(ClusterLedger, "_open_batches", without_those_of_the_dead)
    monkeypatch.setattr(ClusterLedger, "commit", keeping_the_dead)
    assert_cluster_is_found(TOO_LONG, first=7)


def test_kept_batches_that_are_assigned_again_are_found(monkeypatch):
    open_batches = ClusterLedger._open_batches
    monkeypatch.setattr(
        ClusterLedger, "_open_batches", lambda ledger, reports: open_batches(ledger, ())
    )
    assert_cluster_is_found("twice")


def test_kept_batches_missing_from_the_facts_are_found(monkeypatch):
    change_reports(monkeypatch, kept=())
    assert_cluster_is_found("without a grant")


def test_a_failed_round_that_changes_the_ledger_is_found(monkeypatch):
    monkeypatch.setattr(ClusterLedger, "copy", lambda self: self)
    assert_cluster_is_found("machines of one lineage have different ledgers")


def test_a_failed_commit_that_counts_is_found(monkeypatch):
    commit = Member._commit

    def stubborn(self, reports):
        actions, answer = commit(self, reports), None
        while True:
            try:
                action = actions.send(answer)
            except StopIteration as end:
                return end.value
            with suppress(RoundFailed):
                yield action
            answer = isinstance(action, Commit)

    monkeypatch.setattr(Member, "_commit", stubborn)
    assert_cluster_is_found("sums that it never received")


def test_grants_that_differ_between_machines_are_found(monkeypatch):
    grants_of, turn = ClusterLedger.compute_grants, itertools.count()

    def turning(ledger, reports):
        grants = grants_of(ledger, reports)
        names = sorted(grants)
        by = next(turn) % len(names)
        return {n: grants[m] for n, m in zip(names, names[by:] + names[:by], strict=True)}

    monkeypatch.setattr(ClusterLedger, "compute_grants", turning)
    assert_cluster_is_found("batches are trained, and")


def test_a_machine_that_leaves_with_a_grant_is_found(monkeypatch):
    grants_of = ClusterLedger.compute_grants

    def generous(ledger, reports):
        return grants_of(ledger, [replace(f, leaving=False) for f in reports])

    monkeypatch.setattr(ClusterLedger, "compute_grants", generous)
    assert_cluster_is_found("leaves with", first=17)


def test_returned_batches_that_are_trained_are_found(monkeypatch):
    begin = SimMachine._begin_capture

    def greedy(self, reserve_s):
        begin(self, reserve_s)
        self._queue, self._returned = self._returned + self._queue, []
        self._hides = True

    capture = SimMachine._capture

    def hiding(self, *, keeps):
        todo = self._queue
        self._queue = todo[-2:]
        capture(self, keeps=keeps)
        self._queue = todo

    monkeypatch.setattr(SimMachine, "_begin_capture", greedy)
    monkeypatch.setattr(SimMachine, "_capture", hiding)
    assert_cluster_is_found("without a grant")


def test_an_epoch_that_closes_early_is_found(monkeypatch):
    close = ClusterLedger._close_epochs

    def hasty(self):
        self.batches_per_epoch -= 1
        try:
            return close(self)
        finally:
            self.batches_per_epoch += 1

    monkeypatch.setattr(ClusterLedger, "_close_epochs", hasty)
    assert_cluster_is_found("is closed with tallies")


def test_tallies_of_a_healed_machine_that_replace_earlier_ones_are_found(monkeypatch):
    change_reports(monkeypatch, run=0)
    assert_cluster_is_found("is closed with tallies")


def test_machines_that_leave_without_final_rounds_are_found(monkeypatch):
    play_round = Member._round

    def hurried(self):
        is_over = yield from play_round(self)
        return is_over or self.ledger.ended

    monkeypatch.setattr(Member, "_round", hurried)
    assert_cluster_is_found("end with different histories", first=71)


def test_an_idle_machine_that_keeps_forming_quorums_is_found(monkeypatch):
    def pushing(self):
        while self._now() < self._due and not (yield Wait(until=self._due)):
            pass

    monkeypatch.setattr(Member, "_train", pushing)
    assert_cluster_is_found(TOO_LONG, first=7)


def test_a_superseded_machine_that_is_not_healed_is_found(monkeypatch):
    reset = Member._reset_engine

    def proud(self, step):
        return reset(self, step or self._engine_step)

    monkeypatch.setattr(Member, "_reset_engine", proud)
    assert_cluster_is_found(TOO_LONG, first=5)


def test_more_batches_than_the_limit_are_found(monkeypatch):
    """Kept batches count towards the limit."""
    grants_of = ClusterLedger.compute_grants

    def forgetful(ledger, reports):
        ledger = ledger.copy()
        if ledger.max_batches is not None:
            ledger.max_batches += sum(num_batches(peer.kept) for peer in reports)
        return grants_of(ledger, reports)

    monkeypatch.setattr(ClusterLedger, "compute_grants", forgetful)
    assert_cluster_is_found("more than the limit", first=10)
