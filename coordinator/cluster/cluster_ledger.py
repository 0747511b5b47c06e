"""ClusterLedger: the state that all machines of a cluster agree on, changed only by commits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.cluster.grant import Grant, compute_grants, round_interval_s
from coordinator.cluster.machine_report import (
    MAX_OPEN_EPOCHS,
    PROTOCOL_VERSION,
    LedgerError,
    MachineReport,
    canonical_json,
    check_lineage,
    check_ranges,
    is_subset,
    normalize,
    num_batches,
)
from coordinator.codec import Count, encode, parse_json
from coordinator.metrics import MachineStats
from coordinator.splitting import BatchSet

NUM_RECENT = 2
"""Closed epochs kept in the ledger, for a machine that missed the commit."""


class ClusterLedger:
    """The state that all machines of a cluster agree on.

    Args:
        settings: Settings that must be equal on all machines, as JSON: model, data, seed and the
            like. The other arguments are added to them.
        num_epochs: Epochs of the run.
        batches_per_epoch: Batches of each epoch.
        period_s: Seconds from one commit to the next round.
        max_batches: Batches after which the run is complete, in any epoch.

    Attributes:
        step: Rounds committed.
        lineage: Hash chain over the committed rounds.
        consumed: Batches consumed, over all epochs.
        stopped: True once a machine has stopped all.
        grants: The grant of each machine until the next commit.
        recent: The epochs closed last, the oldest first.
    """

    def __init__(
        self,
        *,
        settings: Mapping[str, Any],
        num_epochs: int,
        batches_per_epoch: int,
        period_s: float,
        max_batches: int | None = None,
    ) -> None:
        self.num_epochs = num_epochs
        self.batches_per_epoch = batches_per_epoch
        self.period_s = period_s
        self.max_batches = max_batches
        own = {
            "format": PROTOCOL_VERSION,
            "num_epochs": num_epochs,
            "batches_per_epoch": batches_per_epoch,
            "period_s": period_s,
            "max_batches": max_batches,
        }
        # Through JSON, as other machines' settings arrive.
        self.settings: dict[str, Any] = parse_json(canonical_json({**settings, **own}))
        self.step = 0
        self.lineage = hashlib.sha256(canonical_json(self.settings)).hexdigest()
        self.consumed = 0
        self.stopped = False
        self.grants: dict[str, Grant] = {}
        self.recent: tuple[ClosedEpoch, ...] = ()
        self._first_open = 0
        self._open: dict[int, _OpenEpoch] = {}
        self._open_epochs()

    @property
    def history(self) -> tuple[int, int, str]:
        """The ledger's history as an ordered key; see :attr:`MachineReport.history`."""
        return self.step, self.consumed, self.lineage

    @property
    def first_open(self) -> int:
        """The oldest epoch that is not closed."""
        return self._first_open

    @property
    def open_epochs(self) -> tuple[int, ...]:
        """Epochs with batches to grant, the oldest first."""
        return tuple(self._open)

    @property
    def complete(self) -> bool:
        """True if no batch is left to train."""
        limit = self.max_batches
        return self._first_open >= self.num_epochs or (limit is not None and self.consumed >= limit)

    @property
    def ended(self) -> bool:
        """True if nothing more will be granted."""
        return self.stopped or self.complete

    def consumed_of(self, epoch: int) -> tuple[range, ...]:
        """The batches of an open epoch that are in the global parameters."""
        return self._open[epoch].consumed.spans

    def tally_of(self, epoch: int, run: str) -> MachineStats | None:
        """The last committed tally of an inner run in an open epoch."""
        return self._open[epoch].tallies.get(run)

    def _open_epochs(self) -> None:
        for epoch in self._expected_open():
            self._open.setdefault(epoch, _OpenEpoch())

    def _expected_open(self) -> range:
        first = self._first_open
        return range(first, min(first + MAX_OPEN_EPOCHS, self.num_epochs))

    def copy(self) -> ClusterLedger:
        twin = ClusterLedger.__new__(ClusterLedger)
        twin.__dict__.update(self.__dict__)
        twin._open = {number: epoch.copy() for number, epoch in self._open.items()}
        return twin

    def errors_in(self, reports: Iterable[MachineReport]) -> dict[str, str]:
        """Errors in reports of this ledger's history, by machine.

        A machine may only report batches of its own grant, so that a batch reported twice is one
        machine's error.
        """
        errors = {}
        for peer in reports:
            granted = self.grants.get(peer.machine, Grant()).batches
            try:
                reported = normalize((*peer.done, *peer.kept))
            except LedgerError as error:
                errors[peer.machine] = f"contradicts itself: {error}"
                continue
            if not is_subset(reported, granted):
                errors[peer.machine] = "reports batches that were not granted to it"
            elif peer.leaving and peer.kept:
                errors[peer.machine] = "leaves and keeps batches"
        return errors

    def commit(self, reports: Sequence[MachineReport]) -> tuple[ClosedEpoch, ...]:
        """Commit the round of these reports, and grant the next batches.

        Returns:
            The epochs that it closed, the oldest first.

        Raises:
            LedgerError: The reports contradict the ledger or each other; nothing is changed.
        """
        ordered = sorted(reports, key=lambda peer: peer.machine)
        names = [peer.machine for peer in ordered]
        if len(set(names)) < len(names):
            raise LedgerError(f"a machine reports twice: {names}")
        for peer in ordered:
            if (peer.step, peer.lineage) != (self.step, self.lineage):
                raise LedgerError(f"machine {peer.machine} has another history")
        errors = self.errors_in(ordered)
        if errors:
            raise LedgerError(_listed(errors), errors)
        done: dict[int, list[range]] = {}
        for peer in ordered:
            for number, spans in peer.done:
                done.setdefault(number, []).extend(spans)
            self.consumed += num_batches(peer.done)
            for number, stats in peer.tallies:
                if number in self._open:
                    self._open[number].tallies[f"{peer.machine}/{peer.run}"] = stats
        for number, found in done.items():
            self._open[number].consumed.put_back(found)
        self.stopped = self.stopped or any(peer.stop for peer in ordered)
        closed = self._close_epochs()
        self.step += 1
        self.grants = self.compute_grants(ordered)
        self.lineage = self._next_lineage(ordered)
        return closed

    def _close_epochs(self) -> tuple[ClosedEpoch, ...]:
        closed = []
        while self._first_open in self._open:
            epoch = self._open[self._first_open]
            if len(epoch.consumed) < self.batches_per_epoch:
                break
            closed.append(ClosedEpoch(epoch=self._first_open, tallies=epoch.tallies))
            del self._open[self._first_open]
            self._first_open += 1
            self._open_epochs()
        self.recent = (*self.recent, *closed)[-NUM_RECENT:]
        return tuple(closed)

    @property
    def expected_rounds(self) -> float | None:
        """Rounds of the whole run, if the next ones settle as many batches as those so far.

        ``None`` before the first. Nothing is trained before the first commit.
        """
        if self.step < 2 or not self.consumed:
            return None
        total = self.num_epochs * self.batches_per_epoch
        if self.max_batches is not None:
            total = min(total, self.max_batches)
        return (self.step - 1) * total / self.consumed

    def compute_grants(self, reports: Sequence[MachineReport]) -> dict[str, Grant]:
        """The grants after a commit, once ``done`` of these reports is consumed."""
        if self.ended:
            return {peer.machine: Grant() for peer in reports}
        limit = None if self.max_batches is None else self.max_batches - self.consumed
        return compute_grants(
            reports, self._open_batches(reports), period_s=self.period_s, limit=limit
        )

    def _open_batches(self, reports: Sequence[MachineReport]) -> dict[int, BatchSet]:
        """The batches of each open epoch that are neither consumed nor kept."""
        batches = {}
        for epoch in self.open_epochs:
            batches[epoch] = BatchSet([range(self.batches_per_epoch)])
            batches[epoch].remove(self.consumed_of(epoch))
            kept = (spans for peer in reports for number, spans in peer.kept if number == epoch)
            batches[epoch].remove([span for spans in kept for span in spans])
        return batches

    def _next_lineage(self, reports: Sequence[MachineReport]) -> str:
        # With the grants, so that machines that compute them differently notice.
        chain = hashlib.sha256(self.lineage.encode())
        for peer in reports:
            chain.update(hashlib.sha256(peer.to_json()).digest())
        grants = sorted(self.grants.items())
        chain.update(canonical_json(encode(grants)))
        return chain.hexdigest()

    @property
    def state(self) -> LedgerState:
        """The whole ledger."""
        return LedgerState(
            settings=self.settings,
            step=self.step,
            lineage=self.lineage,
            consumed=self.consumed,
            stopped=self.stopped,
            first_open=self._first_open,
            open=tuple(
                SavedOpenEpoch(consumed=epoch.consumed.spans, tallies=dict(epoch.tallies))
                for epoch in self._open.values()
            ),
            grants=dict(self.grants),
            recent=self.recent,
        )

    def restore(self, state: LedgerState) -> None:
        """Replace the content by another ledger's state of equal settings.

        Raises:
            ValueError: The state contradicts itself or is of other settings; nothing is changed.
        """
        differences = describe_differences(state.settings, self.settings)
        if differences:
            raise ValueError(f"a ledger of other settings: {differences}")
        check_lineage(state.lineage)
        for name, grant in state.grants.items():
            check_ranges(grant.batches, f"grant of {name}")
        new = self.copy()
        new.step, new.lineage, new.stopped = state.step, state.lineage, state.stopped
        new._first_open, new.consumed = state.first_open, state.consumed
        new._open = {
            state.first_open + i: _OpenEpoch(BatchSet(epoch.consumed), dict(epoch.tallies))
            for i, epoch in enumerate(state.open)
        }
        new.grants, new.recent = dict(state.grants), state.recent
        new._check_consistent()
        self.__dict__.update(new.__dict__)

    def _check_consistent(self) -> None:
        if list(self._open) != list(self._expected_open()) or self._first_open > self.num_epochs:
            raise ValueError(f"a ledger's state is broken: epochs {list(self._open)} are open")
        for number, epoch in self._open.items():
            spans = epoch.consumed.spans
            if spans and spans[-1].stop > self.batches_per_epoch:
                raise ValueError(f"a ledger's state is broken: epoch {number} is longer")
        total = self._first_open * self.batches_per_epoch
        total += sum(len(epoch.consumed) for epoch in self._open.values())
        if total != self.consumed:
            raise ValueError(f"a ledger's state is broken: {total} batches, not {self.consumed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """Saved and sent state of a :class:`ClusterLedger`.

    Attributes:
        first_open: The oldest epoch that is not closed.
        open: The epochs from there on.
    """

    settings: dict[str, Any]
    step: Count
    lineage: str
    consumed: Count
    stopped: bool
    first_open: Count
    open: tuple[SavedOpenEpoch, ...]
    grants: dict[str, Grant]
    recent: tuple[ClosedEpoch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOpenEpoch:
    """An open epoch: the batches in the global parameters, and the tallies so far."""

    consumed: tuple[range, ...]
    tallies: dict[str, MachineStats]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedEpoch:
    """An epoch whose batches are all in the global parameters.

    Attributes:
        epoch: Counted from 0.
        tallies: The last tally of each inner run that had one, by ``"machine/run"``.
    """

    epoch: Count
    tallies: dict[str, MachineStats]


@dataclass(slots=True)
class _OpenEpoch:
    consumed: BatchSet = field(default_factory=BatchSet)
    tallies: dict[str, MachineStats] = field(default_factory=dict)

    def copy(self) -> _OpenEpoch:
        return _OpenEpoch(BatchSet(self.consumed.spans), dict(self.tallies))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """The result of a round's reports, the same on all machines of one history.

    Attributes:
        rejected: Machines that must end, with the reason as it continues after their name.
        superseded: Machines whose history loses to another one.
        void: The reason why the round must not be committed; empty if it may.
        ledger: The ledger after a commit.
        closed: Epochs that a commit closes.
        interval_s: Seconds from the commit to the next round.
    """

    rejected: Mapping[str, str] = field(default_factory=dict)
    superseded: frozenset[str] = frozenset()
    void: str = ""
    ledger: ClusterLedger
    closed: tuple[ClosedEpoch, ...] = ()
    interval_s: float = 0.0


def evaluate_round(ledger: ClusterLedger, reports: Sequence[MachineReport]) -> RoundOutcome:
    """Evaluate the reports of a round against a ledger, which is not changed."""
    leader = select_leader(reports)
    rejected = {
        peer.machine: f"has other settings than the cluster: {differences}"
        for peer in reports
        if (differences := describe_differences(peer.settings, leader.settings))
    }
    if rejected:
        return RoundOutcome(rejected=rejected, void=_listed(rejected), ledger=ledger)
    superseded = frozenset(peer.machine for peer in reports if peer.history != leader.history)
    if superseded:
        void = f"histories differ, and that of machine {leader.machine} continues"
        return RoundOutcome(superseded=superseded, void=void, ledger=ledger)
    void = _listed({f.machine: f"cannot take part: {f.void}" for f in reports if f.void})
    if void or ledger.ended:
        return RoundOutcome(void=void, ledger=ledger)
    after = ledger.copy()
    try:
        closed = after.commit(reports)
    except LedgerError as error:
        return RoundOutcome(rejected=error.errors, void=str(error), ledger=ledger)
    interval_s = round_interval_s(after.grants, reports, after.period_s)
    return RoundOutcome(ledger=after, closed=closed, interval_s=interval_s)


def select_leader(reports: Sequence[MachineReport]) -> MachineReport:
    """The machine whose history and settings the others follow.

    That is the one with most commits, then most batches; where these are equal and settings
    differ, one of the settings that most machines have.
    """
    if all(peer.settings == reports[0].settings for peer in reports):
        return max(reports, key=lambda peer: (peer.history, peer.machine))
    keys = [canonical_json(peer.settings) for peer in reports]
    places = [
        (peer.step, peer.consumed, keys.count(key), key, peer.lineage, peer.machine)
        for peer, key in zip(reports, keys, strict=True)
    ]
    return reports[places.index(max(places))]


def describe_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """The settings that differ, in words; empty if none do."""
    if theirs == ours:
        return ""
    return ", ".join(
        f"{name} is {theirs.get(name)!r:.60}, not {ours.get(name)!r:.60}"
        for name in sorted(set(theirs) | set(ours))
        if name not in theirs or name not in ours or theirs[name] != ours[name]
    )


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"machine {name} {reason}" for name, reason in reasons.items())
