"""The states of one averaging round."""

from dataclasses import replace
from itertools import product

import pytest

from coordinator import messages as m
from coordinator.rounds import Round, RoundState
from tests.unit.coordinator.test_machine import at_a_round

EMPTY = m.Payload(params=())
LEGAL = {
    (RoundState.COLLECTING, RoundState.COMPUTING),
    (RoundState.COLLECTING, RoundState.NONE),
    (RoundState.COMPUTING, RoundState.DELIVERING),
    (RoundState.COMPUTING, RoundState.NONE),
    (RoundState.DELIVERING, RoundState.NONE),
    (RoundState.SYNCING, RoundState.NONE),
}


def begun(state=RoundState.COLLECTING, ranks=(0, 1), number=1):
    return Round(id=number, state=state, ranks=ranks)


def snapshot(rank=0, round_id=1):
    return m.ParamSnapshot(rank=rank, round=round_id, payload=EMPTY, num_samples=10, num_batches=1)


@pytest.mark.parametrize(("state", "target"), list(product(RoundState, RoundState)))
def test_a_round_makes_only_legal_transitions(state, target):
    rnd = Round(state=state)
    if (state, target) in LEGAL:
        rnd.move(target)
        assert rnd.state is target
    else:
        with pytest.raises(AssertionError, match=str(state)):
            rnd.move(target)
        assert rnd.state is state


def test_a_round_cannot_start_while_another_is_in_flight():
    run = at_a_round()
    with pytest.raises(AssertionError, match="one round at a time"):
        run.machine.rounds.start(0.0)


def test_a_reply_to_an_old_round_is_ignored():
    """D15."""
    rnd = begun(number=2)
    assert not rnd.accepts(snapshot(round_id=1), RoundState.COLLECTING)
    assert rnd.accepts(snapshot(round_id=2), RoundState.COLLECTING)


def test_a_second_reply_is_ignored():
    rnd = begun()
    rnd.snapshots[0] = snapshot(0)
    assert not rnd.accepts(snapshot(0), RoundState.COLLECTING)
    assert rnd.accepts(snapshot(1), RoundState.COLLECTING)


def test_a_reply_in_another_state_or_of_another_rank_is_ignored():
    rnd = begun(ranks=(0, 2))
    assert not rnd.accepts(m.SyncAck(rank=0, round=1), RoundState.SYNCING)
    assert not rnd.accepts(snapshot(1), RoundState.COLLECTING)


@pytest.mark.parametrize(
    ("state", "answer", "taken"),
    [
        (RoundState.COLLECTING, snapshot(0), "snapshots"),
        (RoundState.SYNCING, m.SyncAck(rank=0, round=1), "acks"),
    ],
    ids=["collecting", "syncing"],
)
def test_an_accepted_reply_is_partial_until_the_round_changes_state(state, answer, taken):
    rnd = begun(state)
    assert not rnd.is_partial_reply(answer)
    getattr(rnd, taken)[0] = answer
    assert rnd.is_partial_reply(answer)
    assert not rnd.is_partial_reply(replace(answer, round=0)), "an answer to an older round"
    assert not rnd.is_partial_reply(replace(answer, rank=1)), "one that was not taken"
    assert not rnd.is_partial_reply(m.Exiting(rank=0))
    rnd.move(RoundState.NONE)
    assert not rnd.is_partial_reply(answer)
