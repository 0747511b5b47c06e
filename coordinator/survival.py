"""Going on after a death: who is left, what is trained again, who meets whom from then on.

Without lockstep a death costs what the rank trained since its last round; the others
train on and meet in a new collective. Under lockstep every rank that is left halts and
says how many steps it has made. The steps that any of them made count, whatever was
reported: ranks that made fewer take everything from one that made all of them, and the
batches of the steps that were not made go back to the pool.
"""

from __future__ import annotations

from enum import Enum

from coordinator import messages as m
from coordinator.ledger import LockstepPlan
from coordinator.messages import AbortCollective, BatchBudget
from coordinator.metrics import ReportStats
from coordinator.state import Core, Failure, Rank, RankState


class Survival:
    """Takes ranks out of a run and brings the others together again.

    Attributes:
        recovery: What lockstep ranks are being brought to do.
        num_halts: Halts in a row, at the same step, that no death brought about.
        fault: Why the last halt came, where the transport itself had failed.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._halted: dict[int, m.Halted] = {}
        self._last_step = -1
        self.recovery = Recovery.NONE
        self._agreed_step = 0
        self._counts = False  # the halt in progress
        self.num_halts = 0
        self.fault: str | None = None

    @property
    def survivors(self) -> list[Rank]:
        """Ranks that can still train."""
        return [r for r in self._core.ranks if r.state in (RankState.BUILDING, RankState.LIVE)]

    def lose(self, failure: Failure, *, in_round: bool) -> None:
        """Take a dead rank out; some rank is left.

        Args:
            failure: The rank's failure.
            in_round: True if the round in progress holds all that the rank trained since the
                round before.
        """
        core = self._core
        core.outcome.failures.append(failure)
        core.elche.drop(failure.rank)
        if core.lockstep:
            self.halt()
            self._counts = False  # the others may have halted because of this death
            return
        core.ledger.take_back(failure.rank, core.elche.shares, in_round=not in_round)
        core.backend_choice.reset()
        if core.collective is not None:
            self.regroup()

    def continue_alone(self) -> None:
        """One rank is left: its replica is the result, and nothing holds it back."""
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
        """Break the collective, and bring the ranks that are left together in a new one."""
        core = self._core
        core.out.append(AbortCollective(generation=core.generation))
        core.generation += 1
        self._send_regroup(None, None)

    def _send_regroup(self, step: int | None, donor: int | None) -> None:
        ranks = tuple(r.rank for r in self.survivors)
        backend = self._core.collective
        assert backend is not None, "nowhere to meet"
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
        """Break the collective and have every rank say where it stands."""
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
        """A rank has halted, because it was told or because its collective broke."""
        if event.generation != self._core.generation or not self._core.is_live(event.rank):
            return
        if self.recovery is not Recovery.HALTING:
            # As far as is known nobody died: a peer did not come in time, or had no memory.
            self.halt()
            self._counts = True
        if event.too_large:
            self._counts = False  # a peer of it may have halted, and said so, before
        self._halted[event.rank] = event

    @property
    def all_halted(self) -> bool:
        """Whether every rank that is left has said where it stands."""
        return self.recovery is Recovery.HALTING and all(
            r.rank in self._halted for r in self.survivors
        )

    def judge(self) -> None:
        """All have halted: how often they have in a row, and what was wrong with the transport, if
        one of them says so. Whoever came furthest tells whether they have gone on since."""
        halted = [self._halted[r.rank] for r in self.survivors]
        self.fault = next((h.fault for h in halted if h.fault is not None), None)
        if self._counts:
            step = max(h.step for h in halted)
            self.num_halts = self.num_halts + 1 if step == self._last_step else 1
            self._last_step = step

    def agree(self, *, regroup: bool) -> None:
        """All have halted: agree on the steps that count, and bring the ranks there.

        Args:
            regroup: Whether they go on; not when the run is to end anyway.
        """
        halted = [self._halted[r.rank] for r in self.survivors]
        donor = max(halted, key=lambda h: (h.step, h.num_syncs, -h.rank))
        self._agreed_step = donor.step
        if not regroup:
            self._go_on()
            return
        self.recovery = Recovery.REGROUPING
        self._core.generation += 1
        best = (donor.step, donor.num_syncs)
        behind = any((h.step, h.num_syncs) != best for h in halted)
        self._send_regroup(donor.step, donor.rank if behind else None)

    def on_regrouped(self, event: m.Regrouped) -> None:
        """The new group has met: no death can take the agreed steps back any more."""
        if self.recovery is Recovery.REGROUPING and event.generation == self._core.generation:
            self._go_on()

    def _go_on(self) -> None:
        self.recovery = Recovery.NONE
        self.recount(self._agreed_step)
        self._core.num_windows = self._agreed_step
        for rank in self.survivors:
            rank.num_queued = 0

    def all_reported(self, made: int) -> bool:
        """Whether every rank has told all batches of the steps made.

        It has not where the ranks could not meet any more at the end of its plan.
        """
        plan = self._core.plan
        return plan is None or all(
            plan.told.get(rank, 0) >= self._num_made(plan, rank, made) for rank in plan.parts
        )

    def _num_made(self, plan: LockstepPlan, rank: int, made: int) -> int:
        """Micro-batches of a rank that are in the steps made."""
        per_step = self._core.config.accumulate * plan.num_slices
        return min((made - plan.first_window) * per_step, plan.num_loads(rank))

    def recount(self, made: int) -> None:
        """Settle the batches of the plan that are in the steps made, and no others."""
        core, plan = self._core, self._core.plan
        if plan is None:
            return
        core.plan = None
        windows = made - plan.first_window
        core.global_step = plan.first_step
        epoch = core.ledger.find(plan.epoch)
        for rank, spans in plan.parts.items():
            count = self._num_made(plan, rank, made)
            told = plan.told.get(rank, 0)
            counted = plan.num_complete_batches(rank, count)
            untold, undone = core.ledger.recount(
                rank, plan.epoch, spans, told=plan.num_reported(rank), made=counted
            )
            core.global_step += counted
            if plan.pieces:
                untold = plan.count_samples(rank, told, count)
                undone = plan.count_samples(rank, count, told)
            if epoch is None:
                continue
            epoch.num_retrained += undone
            if count > told:
                # A rank that could not say so had its part in these steps.
                rest = ReportStats(num_batches=count - told, num_samples=untold)
                epoch.stats.add(rank, rest)
                core.ranks[rank].note(rest)
        num_undone = 0 if core.alone else plan.num_windows - windows
        core.num_averagings -= num_undone
        if epoch is not None:
            epoch.num_averagings -= num_undone


class Recovery(Enum):
    """What lockstep ranks are being brought to do; none of them steps meanwhile."""

    NONE = "none"
    HALTING = "halting"
    REGROUPING = "regrouping"
