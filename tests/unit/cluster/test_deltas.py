"""Changes of other machines reach every rank once, in lockstep at one step."""

from __future__ import annotations

import torch

from coordinator import messages as m
from coordinator.config import ApplyPolicy, CoordinatorConfig
from coordinator.machine import Coordinator
from coordinator.messages import Payload, Send
from runtime.worker.lockstep import LockstepAgreement, LockstepProgress


def delta(value):
    return Payload(params=(torch.tensor([value]),))


def apply_delta(number):
    return m.ApplyDelta(id=number, delta=delta(float(number)))


def test_the_deltas_of_two_rounds_during_an_averaging_are_sent_after_it():
    machine = Coordinator(
        CoordinatorConfig(
            devices=("cpu", "cpu"),
            num_samples=40,
            batch_size=2,
            num_epochs=1,
            policy=ApplyPolicy.CADENCE,
            granted=True,
        )
    )
    for rank in (0, 1):
        machine.handle(m.Ready(rank=rank), 0.0)
    machine.handle(m.ClusterCheckpointRequested(reserve_s=0.0), 0.1)  # starts an averaging round
    assert machine.rounds.round.in_flight
    commands = [machine.handle(m.ClusterRoundDone(delta=delta(v)), 0.2) for v in (1.0, 2.0)]
    assert not any(
        isinstance(c, Send) and isinstance(c.message, m.ApplyDelta)
        for batch in commands
        for c in batch
    )
    machine.rounds.give_up()
    sent = machine.handle(m.Tick(), 0.4)
    messages = [c.message for c in sent if isinstance(c, Send)]
    deltas = [message for message in messages if isinstance(message, m.ApplyDelta)]
    values = [(s.id, float(s.delta.params[0])) for s in deltas]
    assert values == [(1, 1.0), (1, 1.0), (2, 2.0), (2, 2.0)]


def test_lockstep_ranks_apply_deltas_in_order_at_one_step():
    agreement = LockstepAgreement()
    first, second = LockstepProgress(agreement), LockstepProgress(agreement)
    first.propose_delta(apply_delta(1))
    first.propose_delta(apply_delta(2))
    second.propose_delta(apply_delta(1))
    taken = {}
    for rank in (first, second):
        assert rank.delta_reached is None
        rank.stepped(4)
        while (due := rank.delta_reached) is not None:
            rank.delta_applied(due)
            taken.setdefault(rank, []).append((due.id, rank.step))
    assert list(taken.values()) == [[(1, 1), (2, 1)]] * 2
    assert first.position == second.position
