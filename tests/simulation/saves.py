"""Invariants of the checkpoints of a simulated run, and runs resumed from one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.config import ApplyPolicy
from coordinator.messages import SaveCheckpoint
from coordinator.run_state import Phase
from coordinator.saved_run import SavedRun
from tests.simulation.effects import Batch, Traced, Violation
from tests.simulation.replicas import expect_payload

if TYPE_CHECKING:
    from tests.simulation.harness import Simulation

BEFORE = -1
"""The rank of batches trained before a resume."""


def held_by(command: SaveCheckpoint) -> frozenset[Batch]:
    """The batches whose effect is in a checkpoint's weights."""
    payload = command.payload
    if not isinstance(payload, Traced):
        (payload,) = payload.params  # type: ignore[assignment]
    assert isinstance(payload, Traced)
    if len(payload.base.union(payload.local)) != len(payload.base) + len(payload.local):
        raise Violation("a batch is in a checkpoint twice")
    return payload.base.union(payload.local)


def consumed_by(run: SavedRun, per_epoch: int) -> frozenset[Batch]:
    """The consumed batches recorded in a checkpoint."""
    found = [(metrics.epoch, b) for metrics in run.metrics for b in range(per_epoch)]
    for epoch in run.epochs:
        found += [(epoch.epoch, b) for span in epoch.consumed for b in span]
    if len(set(found)) != len(found):
        raise Violation("a checkpoint counts a batch twice")
    return frozenset(found)


@dataclass(frozen=True)
class Origin:
    """The checkpoint of a resumed simulated run."""

    command: SaveCheckpoint

    @property
    def run(self) -> SavedRun:
        """The coordinator's state."""
        return self.command.run

    @property
    def held(self) -> frozenset[Batch]:
        """The batches in the weights."""
        return held_by(self.command)

    def step(self, rank: int) -> int:
        """Optimizer steps that the rank has made."""
        saved = self.command.ranks
        step: int = saved[rank % len(saved)]["step"]
        return step


class SaveChecks:
    """Checks the checkpoints of one run."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._requested: set[int] = set()
        self._answered: list[int] = []

    def on_save(self, command: SaveCheckpoint) -> None:
        """Check a completed checkpoint."""
        c = self._sim.schedule.config
        per_epoch = c.batches_per_epoch
        held, run = held_by(command), command.run
        if isinstance(command.payload, Traced) and command.payload.held is not None:
            expect_payload(command.payload, "saved")
        omitted = {b for e in range(c.num_epochs) for b in self._sim.checks.omitted(e, held)}
        recorded = consumed_by(run, per_epoch) - omitted
        if recorded != held:
            missing, extra = sorted(held - recorded), sorted(recorded - held)
            raise Violation(f"trained, not recorded: {missing}; recorded, not trained: {extra}")
        if run.global_step != len(held):
            raise Violation(f"a checkpoint of {len(held)} batches records {run.global_step}")
        for epoch in run.epochs:
            mine = [batch for batch in held if batch[0] == epoch.epoch]
            samples = sum(map(self._sim.samples_of, mine))
            total = sum(sums.num_samples for sums in epoch.sums)
            if self._sim.spans_epochs:
                total = samples + epoch.num_retrained
            if not epoch.num_samples == total - epoch.num_retrained == samples:
                raise Violation(f"{samples} samples of an epoch are in the checkpoint: {epoch}")
        if c.policy is ApplyPolicy.SYNC:
            steps = {rank["step"] for rank in command.ranks} | {run.num_windows}
            if len(steps) != 1:
                raise Violation(f"the ranks of a checkpoint have made {steps} steps")
            if run.per_global != self._sim.per_global:
                raise Violation(f"a checkpoint records {run.per_global} batches a global batch")
        if [r["rank"] for r in command.ranks] != sorted({r["rank"] for r in command.ranks}):
            raise Violation(f"the ranks of a checkpoint are {command.ranks}")
        again = set(command.tickets) & set(self._answered)
        if again:
            raise Violation(f"calls of save() are answered twice: {again}")
        self._answered += command.tickets

    def on_request(self, ticket: int) -> None:
        """Record a call of ``save()`` that the coordinator handles before it ends the run."""
        if self._sim.machine.phase in (Phase.STARTING, Phase.RUNNING, Phase.STOPPING):
            self._requested.add(ticket)

    def at_end(self) -> None:
        """Check that all calls are answered."""
        if missing := self._requested - {*self._answered}:
            raise Violation(f"calls of save() are not answered: {sorted(missing)}")
