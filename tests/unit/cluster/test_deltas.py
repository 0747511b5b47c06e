"""Changes of other machines reach every rank once, in lockstep between two plans."""

from __future__ import annotations

import torch

from coordinator import messages as m
from coordinator.config import ApplyPolicy, CoordinatorConfig
from coordinator.machine import Coordinator
from coordinator.messages import Payload, Send
from coordinator.metrics import ReportStats


def delta(value):
    return Payload(params=(torch.tensor([value]),))


def machine_of(policy):
    """The coordinator of a machine with two ranks that are ready, without a grant."""
    machine = Coordinator(
        CoordinatorConfig(
            devices=("cpu", "cpu"),
            num_samples=40,
            batch_size=2,
            num_epochs=1,
            policy=policy,
            granted=True,
        )
    )
    for rank in (0, 1):
        machine.handle(m.Ready(rank=rank), 0.0)
    return machine


def test_the_deltas_of_two_rounds_during_an_averaging_are_sent_after_it():
    machine = machine_of(ApplyPolicy.CADENCE)
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
    assert [float(s.delta.params[0]) for s in deltas] == [1.0, 1.0, 2.0, 2.0]


def test_deltas_of_lockstep_are_sent_between_two_plans():
    machine = machine_of(ApplyPolicy.SYNC)
    machine.handle(m.ClusterRoundDone(epochs=(m.EpochGrant(epoch=0, batches=(range(20),)),)), 0.1)
    sent = machine.handle(m.ClusterRoundDone(delta=delta(1.0)), 0.2)
    assert sent == []
    kinds, num_queued = [], [2, 2]
    for rank in (0, 1, 0, 1):
        stats = ReportStats(num_batches=1, num_samples=2)
        report = m.EpochReport(rank=rank, epoch=0, stats=stats)
        commands = machine.handle(report, 0.3)
        num_queued[rank] -= 1
        kinds.append([type(c.message) for c in commands if isinstance(c, Send)])
    assert num_queued == [0, 0]
    assert kinds[:3] == [[], [], []]
    assert kinds[3][:2] == [m.ApplyDelta] * 2
    assert set(kinds[3][2:]) == {m.StartEpoch}
