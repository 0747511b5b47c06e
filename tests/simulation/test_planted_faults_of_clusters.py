"""Faults planted in what machines of a cluster agree on: the simulator must find each."""

from __future__ import annotations

import itertools
from dataclasses import replace

from coordinator import cluster as c
from tests.simulation.cluster_harness import TOO_LONG
from tests.simulation.cluster_machine import SimMachine
from tests.simulation.finding import assert_cluster_is_found

EFFECT = "(place, effect, times consumed)"


def blind(ledger, facts):
    """Facts as one sees them who looks at nobody's history."""
    own = {"step": ledger.step, "lineage": ledger.lineage, "consumed": ledger.consumed}
    return tuple(replace(told, **own, done=told.done, kept=told.kept) for told in facts)


def test_a_lineage_that_is_not_looked_at_is_found(monkeypatch):
    judge = c.judge

    def trusting(ledger, facts):
        return judge(ledger, blind(ledger, facts))

    monkeypatch.setattr(c, "judge", trusting)
    monkeypatch.setattr(c.ClusterLedger, "faults", lambda self, facts: {})
    assert_cluster_is_found("Violation")


def test_a_machine_that_ignores_a_heal_is_found(monkeypatch):
    """It goes on in its own history, at an old step, and its commit counts."""
    judge = c.judge
    monkeypatch.setattr(c, "judge", lambda ledger, facts: judge(ledger, blind(ledger, facts)))
    monkeypatch.setattr(c.ClusterLedger, "faults", lambda self, facts: {})
    monkeypatch.setattr(c.Member, "_take_healed", lambda self, state: None)
    assert_cluster_is_found("Violation")


def test_a_healed_machine_that_keeps_what_it_did_is_found(monkeypatch):
    def keeping(self, state):
        ledger = self.ledger.copy()
        ledger.load_state_dict(state)
        self.ledger, self._engine_step = ledger, ledger.step

    monkeypatch.setattr(c.Member, "_take_healed", keeping)
    assert_cluster_is_found(EFFECT)


def test_a_grant_that_a_dead_machine_takes_along_is_found(monkeypatch):
    open_batches = c._open_batches

    def without_those_of_the_dead(ledger, facts):
        pots = open_batches(ledger, facts)
        for machine, grant in ledger.grants.items():
            if machine not in {told.machine for told in facts}:
                for epoch, spans in grant.batches:
                    if epoch in pots:
                        pots[epoch].remove(spans)
        return pots

    commit = c.ClusterLedger.commit

    def keeping_the_dead(self, facts):
        before = dict(self.grants)
        closed = commit(self, facts)
        self.grants = {**before, **self.grants}
        return closed

    monkeypatch.setattr(c, "_open_batches", without_those_of_the_dead)
    monkeypatch.setattr(c.ClusterLedger, "commit", keeping_the_dead)
    assert_cluster_is_found(TOO_LONG)


def test_batches_that_are_kept_and_dealt_are_found(monkeypatch):
    open_batches = c._open_batches
    monkeypatch.setattr(c, "_open_batches", lambda ledger, facts: open_batches(ledger, ()))
    assert_cluster_is_found("twice")


def test_batches_that_are_kept_and_not_told_of_are_found(monkeypatch):
    facts = c.Member._facts
    monkeypatch.setattr(
        c.Member, "_facts", lambda self, *args, **kw: replace(facts(self, *args, **kw), kept=())
    )
    assert_cluster_is_found("and lost them")


def test_facts_of_a_failed_round_that_count_are_found(monkeypatch):
    monkeypatch.setattr(c.ClusterLedger, "copy", lambda self: self)
    assert_cluster_is_found("machines of one lineage have different ledgers")


def test_a_commit_that_counts_though_it_failed_is_found(monkeypatch):
    on_committed = c.Member._on_committed

    def stubborn(self, event):
        on_committed(self, c.Committed(ok=True))

    monkeypatch.setattr(c.Member, "_on_committed", stubborn)
    assert_cluster_is_found("sums that it never got")


def test_a_deal_that_differs_between_machines_is_found(monkeypatch):
    deal, turn = c.deal, itertools.count()

    def turning(ledger, facts, *, period_s):
        grants = deal(ledger, facts, period_s=period_s)
        names = sorted(grants)
        by = next(turn) % len(names)
        return {n: grants[m] for n, m in zip(names, names[by:] + names[:by], strict=True)}

    monkeypatch.setattr(c, "deal", turning)
    assert_cluster_is_found("batches are trained, and")


def test_a_machine_that_leaves_with_a_grant_is_found(monkeypatch):
    deal = c.deal

    def generous(ledger, facts, *, period_s):
        return deal(ledger, [replace(f, leaving=False) for f in facts], period_s=period_s)

    monkeypatch.setattr(c, "deal", generous)
    assert_cluster_is_found("leaves with")


def test_a_reserve_that_is_given_back_and_trained_is_found(monkeypatch):
    begin = SimMachine._begin_capture

    def greedy(self, reserve_s):
        begin(self, reserve_s)
        self._todo, self._back = self._back + self._todo, []
        self._hides = True

    capture = SimMachine._capture

    def hiding(self, *, keeps):
        todo = self._todo
        self._todo = todo[-2:]
        capture(self, keeps=keeps)
        self._todo = todo

    monkeypatch.setattr(SimMachine, "_begin_capture", greedy)
    monkeypatch.setattr(SimMachine, "_capture", hiding)
    assert_cluster_is_found("and lost them")


def test_an_epoch_that_closes_too_early_is_found(monkeypatch):
    close = c.ClusterLedger._close

    def hasty(self):
        self.batches_per_epoch -= 1
        try:
            return close(self)
        finally:
            self.batches_per_epoch += 1

    monkeypatch.setattr(c.ClusterLedger, "_close", hasty)
    assert_cluster_is_found("is closed with tallies")


def test_tallies_of_a_healed_machine_over_those_from_before_are_found(monkeypatch):
    facts = c.Member._facts
    monkeypatch.setattr(
        c.Member, "_facts", lambda self, *args, **kw: replace(facts(self, *args, **kw), run=0)
    )
    assert_cluster_is_found("is closed with tallies")


def test_machines_that_part_without_a_farewell_are_found(monkeypatch):
    on_committed = c.Member._on_committed

    def hurried(self, event):
        on_committed(self, event)
        if self.ledger.ended and self.state is c.MemberState.QUORUM:
            self._out.pop()
            self._finish()

    monkeypatch.setattr(c.Member, "_on_committed", hurried)
    assert_cluster_is_found("end with other histories")


def test_an_idle_machine_that_does_not_let_the_others_train_is_found(monkeypatch):
    take = c.Member._take

    def pushing(self, event):
        if isinstance(event, c.Idle) and self.state is c.MemberState.TRAINING:
            self._form_quorum()
        else:
            take(self, event)

    monkeypatch.setattr(c.Member, "_take", pushing)
    assert_cluster_is_found(TOO_LONG)


def test_a_loser_that_is_not_healed_is_found(monkeypatch):
    set_step = c.Member._set_engine_step

    def proud(self, step):
        if step:
            set_step(self, step)

    monkeypatch.setattr(c.Member, "_set_engine_step", proud)
    assert_cluster_is_found(TOO_LONG)


def test_more_batches_than_the_limit_are_found(monkeypatch):
    """What machines keep counts towards it."""
    deal = c.deal

    def forgetful(ledger, facts, *, period_s):
        ledger = ledger.copy()
        if ledger.max_batches is not None:
            ledger.max_batches += sum(c.count(told.kept) for told in facts)
        return deal(ledger, facts, period_s=period_s)

    monkeypatch.setattr(c, "deal", forgetful)
    assert_cluster_is_found("more than the limit")
