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
from coordinator.commands import AbortCollective
from coordinator.contents import Allowance, Tally
from coordinator.epochs import Epochs
from coordinator.outcome import Failure
from coordinator.ranks import Rank, RankState
from coordinator.round_keeper import RoundKeeper
from coordinator.state import Core


class Recovery(Enum):
    """What lockstep ranks are being brought to do; none of them steps meanwhile."""

    NONE = "none"
    HALTING = "halting"
    REGROUPING = "regrouping"


class Survival:
    """Takes ranks out of a run and brings the others together again.

    Attributes:
        recovery: What lockstep ranks are being brought to do.
        num_halts: Halts in a row, at the same step, that no death brought about.
    """

    def __init__(self, core: Core, epochs: Epochs, rounds: RoundKeeper) -> None:
        self._core = core
        self._epochs = epochs
        self._rounds = rounds
        self._halted: dict[int, m.Halted] = {}
        self._last_step = -1
        self.recovery = Recovery.NONE
        self._agreed_step = 0
        self.num_halts = 0

    @property
    def survivors(self) -> list[Rank]:
        """Ranks that can still train."""
        return [r for r in self._core.ranks if r.state in (RankState.BUILDING, RankState.LIVE)]

    # -- a death ---------------------------------------------------------------

    def lose(self, failure: Failure) -> None:
        """Take a dead rank out; some rank is left."""
        core = self._core
        core.outcome.failures.append(failure)
        core.elche.drop(failure.rank)
        if core.lockstep:
            self.halt()
            return
        lost = not self._rounds.holds(failure.rank)
        core.pool.take_back(failure.rank, core.elche.shares, in_round=lost)
        if core.config.uses_collectives:
            self.regroup()

    def become_alone(self) -> None:
        """One rank is left: its replica is the result, and nothing holds it back."""
        core = self._core
        core.alone = True
        (last,) = self.survivors
        if core.config.evaluate or core.config.checkpoint_every is not None:
            core.pool.stop_looking_ahead()
        if core.lockstep:
            return
        core.pool.freeze(last.rank)
        core.pool.settle(last.rank)
        core.global_step += last.since_round
        last.enter_round()
        last.set_limit(None)
        core.send(last.rank, m.Resume(allowance=Allowance()))

    def regroup(self) -> None:
        """Break the collective, and bring the ranks that are left together in a new one."""
        core = self._core
        core.out.append(AbortCollective(generation=core.generation))
        core.generation += 1
        self._tell_group(None, None)

    def _tell_group(self, step: int | None, donor: int | None) -> None:
        ranks = tuple(r.rank for r in self.survivors)
        for rank in ranks:
            self._core.send(
                rank,
                m.Regroup(generation=self._core.generation, ranks=ranks, step=step, donor=donor),
            )

    # -- lockstep ----------------------------------------------------------------

    def halt(self) -> None:
        """Break the collective and have every rank say where it stands."""
        if self.recovery is Recovery.HALTING:
            return
        core = self._core
        self.recovery = Recovery.HALTING
        self._halted = {}
        core.out.append(AbortCollective(generation=core.generation))
        for rank in self.survivors:
            core.send(rank.rank, m.Halt(generation=core.generation))

    def on_halted(self, event: m.Halted) -> None:
        """A rank has halted, because it was told or because its collective broke."""
        if event.generation != self._core.generation or not self._core.is_live(event.rank):
            return
        if self.recovery is not Recovery.HALTING:
            # Nobody died: a peer did not come in time.
            self.num_halts = self.num_halts + 1 if event.step == self._last_step else 1
            self._last_step = event.step
            self.halt()
        self._halted[event.rank] = event

    @property
    def all_halted(self) -> bool:
        """Whether every rank that is left has said where it stands."""
        return self.recovery is Recovery.HALTING and all(
            r.rank in self._halted for r in self.survivors
        )

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
        self._tell_group(donor.step, donor.rank if behind else None)

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

    def recount(self, made: int) -> None:
        """Settle the batches of the plan that are in the steps made, and no others."""
        core, plan = self._core, self._core.plan
        if plan is None:
            return
        core.plan = None
        windows = made - plan.first_window
        core.global_step = plan.first_step
        epoch = core.pool.find(plan.epoch)
        for rank, spans in plan.parts.items():
            share = sum(len(span) for span in spans)
            count = min(windows * core.config.accumulate, share)
            told = plan.told.get(rank, 0)
            samples = core.pool.recount(rank, plan.epoch, spans, told=told, made=count)
            core.global_step += count
            if epoch is not None and count > told:
                # A rank that could not say so had its part in these steps.
                rest = Tally(num_batches=count - told, num_samples=samples)
                epoch.tally.add(rank, rest)
                core.ranks[rank].note(rest)
        undone = 0 if core.alone else plan.num_windows - windows
        core.num_averagings -= undone
        if epoch is not None:
            epoch.num_averagings -= undone
