"""Continuation after a death: surviving ranks regroup, and lost batches are trained again.

Without lockstep a death costs the batches that the rank trained since its last round; the others
continue and meet in a new collective. In lockstep every surviving rank halts and reports its
number of steps. The largest of these counts: ranks with fewer steps copy the state of a rank that
made all of them, and batches of steps that no rank made are reopened.
"""

from __future__ import annotations

from enum import Enum

from coordinator import messages as m
from coordinator.messages import BatchBudget
from coordinator.metrics import ReportStats
from coordinator.run_state import Rank, RankState, RunState


class FailureRecovery:
    """Removes dead ranks from a run and regroups the others.

    Attributes:
        phase: State of the recovery of lockstep ranks.
        num_halts: Consecutive halts at the same step that were not caused by a death.
        fault: The transport fault behind the last halt, if any.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._halted: dict[int, m.Halted] = {}
        self._left: set[tuple[int, int]] = set()  # ranks that left an epoch, and its number
        self._last_step = -1
        self.phase = RecoveryPhase.NONE
        self._agreed_step = 0
        self._counts = False  # the halt in progress counts against the limit
        self.num_halts = 0
        self.fault: str | None = None

    @property
    def survivors(self) -> list[Rank]:
        """Ranks that can train."""
        return [r for r in self._run.ranks if r.state in (RankState.BUILDING, RankState.LIVE)]

    def remove(self, failure: m.WorkerFailure, *, in_round: bool) -> None:
        """Remove a dead rank, while others survive.

        Args:
            in_round: The round in progress holds what the rank trained since the last one.
        """
        run = self._run
        run.outcome.failures.append(failure)
        run.elche.drop(failure.rank)
        if run.lockstep:
            self.halt()
            self._counts = False  # the others may have halted because of this death
            return
        run.ledger.reopen_rank(failure.rank, run.elche.shares, in_round=not in_round)
        run.backend_choice.reset()
        if run.collective is not None:
            self.regroup()

    def continue_alone(self) -> None:
        """Continue with one rank: its replica is the result, and it has no limits."""
        run = self._run
        run.alone = True
        (last,) = self.survivors
        if run.config.has_epoch_work:
            run.ledger.look_ahead = False
        if run.lockstep:
            return
        run.ledger.freeze(last.rank)
        run.settle(last.rank)
        last.enter_round()
        last.set_limit(None)
        run.lr_factor.update(run.elche.batch_counts)
        budget = BatchBudget(lr_factor=run.lr_factor.current)
        run.send(last.rank, m.Resume(budget=budget, alone=True))

    def regroup(self) -> None:
        """Abort the collective and connect the surviving ranks in a new one."""
        run = self._run
        run.abort_collective()
        run.generation += 1
        self._send_regroup(None, None)

    def _send_regroup(self, step: int | None, donor: int | None) -> None:
        ranks = tuple(r.rank for r in self.survivors)
        backend = self._run.collective
        assert backend is not None, "no collective"
        for rank in ranks:
            self._run.send(
                rank,
                m.Regroup(
                    generation=self._run.generation,
                    ranks=ranks,
                    backend=backend,
                    step=step,
                    donor=donor,
                ),
            )

    def halt(self) -> None:
        """Abort the collective and request the number of steps from every rank."""
        if self.phase is RecoveryPhase.HALTING:
            return
        run = self._run
        self.phase = RecoveryPhase.HALTING
        self._counts = False
        self._halted = {}
        run.abort_collective()
        for rank in self.survivors:
            run.send(rank.rank, m.Halt(generation=run.generation))

    def on_halted(self, event: m.Halted) -> None:
        """Handle the halt of a rank, on request or because its collective was aborted."""
        if event.left is not None:
            self._left.add((event.rank, event.left))
        if event.generation != self._run.generation or not self._run.is_live(event.rank):
            return
        if self.phase is not RecoveryPhase.HALTING:
            # No death is known: a peer was late, or out of memory.
            self.halt()
            self._counts = True
        if event.too_large or event.left is not None:
            self._counts = False  # the halt of a peer may have arrived before
        self._halted[event.rank] = event

    @property
    def all_halted(self) -> bool:
        """True if every surviving rank has halted."""
        return self.phase is RecoveryPhase.HALTING and all(
            r.rank in self._halted for r in self.survivors
        )

    def count_halts(self) -> None:
        """Count consecutive halts at the same step, and record the fault that a rank reported."""
        halted = [self._halted[r.rank] for r in self.survivors]
        self.fault = next((h.fault for h in halted if h.fault is not None), None)
        if self._counts:
            step = max(h.step for h in halted)
            self.num_halts = self.num_halts + 1 if step == self._last_step else 1
            self._last_step = step

    def agree(self) -> None:
        """Determine the steps that count, and regroup the halted ranks at them."""
        halted = [self._halted[r.rank] for r in self.survivors]
        donor = max(halted, key=lambda h: (h.step, h.num_syncs, -h.rank))
        self._agreed_step = donor.step
        self.phase = RecoveryPhase.REGROUPING
        self._run.generation += 1
        best = (donor.step, donor.num_syncs)
        behind = any((h.step, h.num_syncs) != best for h in halted)
        self._send_regroup(donor.step, donor.rank if behind else None)

    def on_regrouped(self, event: m.Regrouped) -> None:
        """Handle a connected group: from now on no death can undo the agreed steps."""
        if self.phase is RecoveryPhase.REGROUPING and event.generation == self._run.generation:
            self._resume()

    def _resume(self) -> None:
        self.phase = RecoveryPhase.NONE
        self.return_to(self._agreed_step)
        for leaver, number in self._left:
            self._run.ledger.leave_epoch(leaver, number, self._run.elche.shares)
        self._left.clear()
        for rank in self.survivors:
            rank.num_queued, rank.open_epoch = 0, None

    def return_to(self, num_steps: int) -> None:
        """Settle exactly the batches in the steps made since the start of the run, and reopen those
        of later ones.
        """
        run = self._run
        agreed = run.ledger.return_to(num_steps)
        if agreed is None:
            return
        epoch = run.ledger.find(agreed.epoch)
        run.global_step += sum(map(len, agreed.settled)) - sum(map(len, agreed.reverted))
        if not run.alone:
            run.count_averagings(-agreed.num_undone, epoch)
        if epoch is not None:
            for rank, (num_batches, num_samples) in agreed.unreported.items():
                rest = ReportStats(num_batches=num_batches, num_samples=num_samples)
                epoch.stats.add(rank, rest)
                run.ranks[rank].note(rest)


class RecoveryPhase(Enum):
    """State of the recovery in lockstep; no rank steps until it is ``NONE``."""

    NONE = "none"
    HALTING = "halting"
    REGROUPING = "regrouping"
