"""Continuation after a death: surviving ranks regroup, and lost batches are trained again.

Without lockstep a death costs the batches that the rank trained since its last round; the others
continue and meet in a new collective. In lockstep every surviving rank halts and reports its
number of steps. The largest of these counts: ranks with fewer steps copy the state of a rank that
made all of them, and batches of steps that no rank made are reopened.
"""

from __future__ import annotations

from enum import Enum

from coordinator import messages as m
from coordinator.ledger import LockstepPlan
from coordinator.messages import AbortCollective, BatchBudget
from coordinator.metrics import ReportStats
from coordinator.state import Core, Failure, Rank, RankState


class Survival:
    """Removes dead ranks from a run and regroups the others.

    Attributes:
        recovery: State of the recovery of lockstep ranks.
        num_halts: Consecutive halts at the same step that were not caused by a death.
        fault: The transport fault behind the last halt, if any.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._halted: dict[int, m.Halted] = {}
        self._last_step = -1
        self.recovery = Recovery.NONE
        self._agreed_step = 0
        self._counts = False  # the halt in progress counts against the limit
        self.num_halts = 0
        self.fault: str | None = None

    @property
    def survivors(self) -> list[Rank]:
        """Ranks that can train."""
        return [r for r in self._core.ranks if r.state in (RankState.BUILDING, RankState.LIVE)]

    def remove(self, failure: Failure, *, in_round: bool) -> None:
        """Remove a dead rank, while others survive.

        Args:
            failure: The rank's failure.
            in_round: The round in progress holds what the rank trained since the last one.
        """
        core = self._core
        core.outcome.failures.append(failure)
        core.elche.drop(failure.rank)
        if core.lockstep:
            self.halt()
            self._counts = False  # the others may have halted because of this death
            return
        core.ledger.reopen_rank(failure.rank, core.elche.shares, in_round=not in_round)
        core.backend_choice.reset()
        if core.collective is not None:
            self.regroup()

    def continue_alone(self) -> None:
        """Continue with one rank: its replica is the result, and it has no limits."""
        core = self._core
        core.alone = True
        (last,) = self.survivors
        if core.config.evaluate or core.config.checkpoint_every is not None:
            core.ledger.disable_look_ahead()
        if core.lockstep:
            return
        core.ledger.freeze(last.rank)
        core.global_step += core.ledger.settle(last.rank)
        last.enter_round()
        last.set_limit(None)
        core.send(last.rank, m.Resume(budget=BatchBudget()))

    def regroup(self) -> None:
        """Abort the collective and connect the surviving ranks in a new one."""
        core = self._core
        core.out.append(AbortCollective(generation=core.generation))
        core.generation += 1
        self._send_regroup(None, None)

    def _send_regroup(self, step: int | None, donor: int | None) -> None:
        ranks = tuple(r.rank for r in self.survivors)
        backend = self._core.collective
        assert backend is not None, "no collective"
        for rank in ranks:
            self._core.send(
                rank,
                m.Regroup(
                    generation=self._core.generation,
                    ranks=ranks,
                    backend=backend,
                    step=step,
                    donor=donor,
                ),
            )

    def halt(self) -> None:
        """Abort the collective and request the number of steps from every rank."""
        if self.recovery is Recovery.HALTING:
            return
        core = self._core
        self.recovery = Recovery.HALTING
        self._counts = False
        self._halted = {}
        core.out.append(AbortCollective(generation=core.generation))
        for rank in self.survivors:
            core.send(rank.rank, m.Halt(generation=core.generation))

    def on_halted(self, event: m.Halted) -> None:
        """Handle the halt of a rank, on request or because its collective was aborted."""
        if event.generation != self._core.generation or not self._core.is_live(event.rank):
            return
        if self.recovery is not Recovery.HALTING:
            # No death is known: a peer was late, or out of memory.
            self.halt()
            self._counts = True
        if event.too_large:
            self._counts = False  # the halt of a peer may have arrived before
        self._halted[event.rank] = event

    @property
    def all_halted(self) -> bool:
        """True if every surviving rank has halted."""
        return self.recovery is Recovery.HALTING and all(
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

    def agree(self, *, regroup: bool) -> None:
        """Settle on the steps that count, and bring the halted ranks to them.

        Args:
            regroup: False if the run is about to end.
        """
        halted = [self._halted[r.rank] for r in self.survivors]
        donor = max(halted, key=lambda h: (h.step, h.num_syncs, -h.rank))
        self._agreed_step = donor.step
        if not regroup:
            self._resume()
            return
        self.recovery = Recovery.REGROUPING
        self._core.generation += 1
        best = (donor.step, donor.num_syncs)
        behind = any((h.step, h.num_syncs) != best for h in halted)
        self._send_regroup(donor.step, donor.rank if behind else None)

    def on_regrouped(self, event: m.Regrouped) -> None:
        """Handle a connected group: from now on no death can undo the agreed steps."""
        if self.recovery is Recovery.REGROUPING and event.generation == self._core.generation:
            self._resume()

    def _resume(self) -> None:
        self.recovery = Recovery.NONE
        self.recount(self._agreed_step)
        self._core.num_windows = self._agreed_step
        for rank in self.survivors:
            rank.num_queued = 0

    def all_reported(self, made: int) -> bool:
        """True if every rank has reported all batches of the steps made.

        False if the collective broke at the end of the plan.
        """
        plan = self._core.plan
        return plan is None or all(
            plan.reported.get(rank, 0) >= self._num_made(plan, rank, made) for rank in plan.parts
        )

    def _num_made(self, plan: LockstepPlan, rank: int, made: int) -> int:
        per_step = self._core.config.accumulate * plan.num_slices
        return min((made - plan.first_window) * per_step, plan.num_micro_batches(rank))

    def recount(self, made: int) -> None:
        """Settle exactly the batches of the plan that are in the steps made."""
        core, plan = self._core, self._core.plan
        if plan is None:
            return
        core.plan = None
        windows = made - plan.first_window
        core.global_step = plan.first_step
        epoch = core.ledger.find(plan.epoch)
        for rank, spans in plan.parts.items():
            count = self._num_made(plan, rank, made)
            reported = plan.reported.get(rank, 0)
            counted = plan.num_complete_batches(rank, count)
            unreported, undone = core.ledger.recount(
                rank, plan.epoch, spans, reported=plan.num_reported(rank), made=counted
            )
            core.global_step += counted
            if plan.pieces:
                unreported = plan.count_samples(rank, reported, count)
                undone = plan.count_samples(rank, count, reported)
            if epoch is None:
                continue
            epoch.num_retrained += undone
            if count > reported:
                # Unreported, but the rank took part in these steps.
                rest = ReportStats(num_batches=count - reported, num_samples=unreported)
                epoch.stats.add(rank, rest)
                core.ranks[rank].note(rest)
        num_undone = 0 if core.alone else plan.num_windows - windows
        core.num_averagings -= num_undone
        if epoch is not None:
            epoch.num_averagings -= num_undone


class Recovery(Enum):
    """State of the recovery in lockstep; no rank steps until it is ``NONE``."""

    NONE = "none"
    HALTING = "halting"
    REGROUPING = "regrouping"
