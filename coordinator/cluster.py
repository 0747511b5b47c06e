"""Training on several machines: who trains which batches, agreed on by all of them.

Machines average from time to time, in *rounds*. In each round every machine gathers the same
:class:`Facts` of all, and from them computes the same: what has been trained for good, and who
trains what next. So no machine deals for the others, and any of them may die. What they agree
on is the :class:`ClusterLedger`; it changes only when a round is committed. A machine that
missed a commit is behind: it receives the state of another, and what it trained since its own
last commit is open again. :class:`Member` is one machine's part in this, without a clock,
thread, socket or tensor: events and times go in, commands come out.

Batches are granted, and a grant ends with the next commit: what a machine has done of it is
consumed, what it keeps goes into its next grant, and the rest is open.

Engines count commits and know no more, so two machines may commit different rounds under one
number. Each commit therefore extends a chain of hashes, the *lineage*. Where lineages differ,
no round is committed: one history wins by a rule that all apply alike, and the machines of the
others are healed from it.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Any, assert_never

from coordinator.dispatch import BatchSet
from coordinator.errors import GpuWorkerError
from coordinator.messages import Tick

Batches = tuple[tuple[int, tuple[range, ...]], ...]
"""``(epoch, ranges of batches)``, epochs and ranges rising, the ranges of step 1."""

FORMAT = 1
"""Version of what machines tell each other. Machines with another one are refused."""
OPEN_EPOCHS = 2
"""Epochs that may be open at a time, so that nobody waits for the last batches of one."""
AHEAD = 1.5
"""Periods that a grant lasts, so that a machine whose speed was misjudged does not run dry."""
START_BATCHES = 8
"""Batches granted to each machine while no speed is known."""
MIN_DUE_S = 0.02
"""No round is due sooner after a commit, unless the machine is idle."""
KEEP_CLOSED = 2
"""Closed epochs that the ledger remembers, for a machine that missed the commit."""
MAX_RANGES = 65536
"""Ranges of one epoch that a machine may tell of."""
MAX_COUNT = 2**53
"""No number of batches, samples or steps is larger."""


class LedgerError(GpuWorkerError):
    """Facts or events that cannot be: a fault in the program, or a machine that lies.

    Attributes:
        faults: What is wrong, by machine, as far as it is one machine's fault.
    """

    def __init__(self, message: str, faults: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.faults = dict(faults or {})


# -- facts ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one machine tells the others in a round.

    Attributes:
        machine: Its id, unique to this start of its process. Machines are ordered by it.
        run: How often its inner run has begun anew after it was healed.
        step: Rounds committed.
        lineage: Hash of them, 64 hexadecimal digits.
        consumed: Batches whose effect is in the global parameters, of all epochs.
        settings: What must be equal on all machines.
        done: Batches in the capture, since the machine's last commit.
        kept: Batches of its grant, not in the capture, that it goes on with.
        weight: Of the capture: what its parameters count in the mean.
        num_samples: In the capture.
        seconds_per_batch: Of the whole machine; ``None``: not measured.
        tallies: For each open epoch what metrics are made of, cumulative since the machine's
            inner run began. Not looked at here.
        leaving: Whether the machine leaves after this round; it then keeps nothing.
        stop: Whether it asks that all stop after this round.
        void: Why it cannot take part in the round, which is then void for all; empty: it can.
    """

    machine: str
    run: int = 0
    step: int
    lineage: str
    consumed: int = 0
    settings: dict[str, Any]
    done: Batches = ()
    kept: Batches = ()
    weight: float = 0.0
    num_samples: int = 0
    seconds_per_batch: float | None = None
    tallies: tuple[tuple[int, dict[str, Any]], ...] = ()
    leaving: bool = False
    stop: bool = False
    void: str = ""

    @property
    def history(self) -> tuple[int, int, str]:
        """The history that the machine has; of several the greatest wins."""
        return self.step, self.consumed, self.lineage

    def to_json(self) -> bytes:
        """The facts as JSON; equal facts give equal bytes."""
        value = {name: getattr(self, name) for name in _FACTS}
        value["done"], value["kept"] = batches_to_json(self.done), batches_to_json(self.kept)
        return _canonical(value)

    @classmethod
    def from_json(cls, data: bytes) -> Facts:
        """The facts that a machine sent.

        Raises:
            ValueError: They are none; the message names the field.
        """
        try:
            value = json.loads(data, parse_constant=_refuse_constant)
        except RecursionError:
            raise ValueError("facts: nested too deeply") from None
        if not isinstance(value, dict) or set(value) != set(_FACTS):
            raise ValueError(f"facts: not an object with the fields {', '.join(_FACTS)}")
        seconds = value["seconds_per_batch"]
        lineage = _text(value, "lineage", 64)
        if len(lineage) != 64 or set(lineage) - set("0123456789abcdef"):
            raise ValueError(f"lineage: not 64 hexadecimal digits: {lineage!r}")
        if not isinstance(value["settings"], dict):
            raise ValueError("settings: not an object")
        machine = _text(value, "machine", 256)
        if not machine:
            raise ValueError("machine: empty")
        return cls(
            machine=machine,
            run=_count(value, "run"),
            step=_count(value, "step"),
            lineage=lineage,
            consumed=_count(value, "consumed"),
            settings=value["settings"],
            done=batches_from_json(value["done"], "done"),
            kept=batches_from_json(value["kept"], "kept"),
            weight=_real(value, "weight"),
            num_samples=_count(value, "num_samples"),
            seconds_per_batch=None if seconds is None else _real(value, "seconds_per_batch"),
            tallies=_tallies_from_json(value["tallies"]),
            leaving=_flag(value, "leaving"),
            stop=_flag(value, "stop"),
            void=_text(value, "void", 4096),
        )


_FACTS = tuple(Facts.__dataclass_fields__)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"facts: {name} is no number")


def _text(value: Mapping[str, Any], name: str, most: int) -> str:
    text = value[name]
    if not isinstance(text, str) or len(text) > most:
        raise ValueError(f"{name}: not a string of at most {most} characters")
    return text


def _count(value: Mapping[str, Any], name: str) -> int:
    number = value[name]
    if not _is_count(number):
        raise ValueError(f"{name}: not a whole number from 0 to 2**53: {number!r:.40}")
    return int(number)


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number <= MAX_COUNT


def _real(value: Mapping[str, Any], name: str) -> float:
    number = value[name]
    if type(number) not in (int, float) or not 0 <= number < 1e300:
        raise ValueError(f"{name}: not a finite number from 0 up: {number!r:.40}")
    if name == "seconds_per_batch" and number < 1e-12:
        raise ValueError(f"{name}: not above 0: {number!r:.40}")
    return float(number)


def _flag(value: Mapping[str, Any], name: str) -> bool:
    flag = value[name]
    if not isinstance(flag, bool):
        raise ValueError(f"{name}: neither true nor false")
    return flag


def _tallies_from_json(value: Any) -> tuple[tuple[int, dict[str, Any]], ...]:
    if not isinstance(value, list) or len(value) > OPEN_EPOCHS:
        raise ValueError(f"tallies: not a list of at most {OPEN_EPOCHS}")
    for item in value:
        good = isinstance(item, list) and len(item) == 2
        if not good or not _is_count(item[0]) or not isinstance(item[1], dict):
            raise ValueError("tallies: not pairs of an epoch and an object")
    return tuple((epoch, tally) for epoch, tally in value)


def batches_to_json(batches: Batches) -> list[Any]:
    """``[epoch, [[start, stop], ...]]`` for each epoch."""
    return [[epoch, [[s.start, s.stop] for s in spans]] for epoch, spans in batches]


def batches_from_json(value: Any, name: str) -> Batches:
    """What :func:`batches_to_json` made.

    Raises:
        ValueError: It made no such thing; the message begins with ``name``.
    """
    if not isinstance(value, list) or len(value) > OPEN_EPOCHS:
        raise ValueError(f"{name}: not a list of at most {OPEN_EPOCHS} epochs")
    batches, last = [], -1
    for item in value:
        if not isinstance(item, list) or len(item) != 2 or not _is_count(item[0]):
            raise ValueError(f"{name}: not pairs of an epoch and ranges")
        epoch, pairs = item
        if epoch <= last:
            raise ValueError(f"{name}: epochs do not rise")
        if not isinstance(pairs, list) or not 0 < len(pairs) <= MAX_RANGES:
            raise ValueError(f"{name}: not a list of 1 to {MAX_RANGES} ranges")
        spans, stop = [], -1
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_count, pair)):
                raise ValueError(f"{name}: a range is not a pair of whole numbers")
            if not stop < pair[0] < pair[1]:
                raise ValueError(f"{name}: ranges that are empty, touch or do not rise")
            stop = pair[1]
            spans.append(range(*pair))
        batches.append((epoch, tuple(spans)))
        last = epoch
    return tuple(batches)


def normal(batches: Iterable[tuple[int, Iterable[range]]]) -> Batches:
    """The same batches with epochs and ranges rising and merged, and nothing empty.

    Raises:
        LedgerError: A batch is in them twice.
    """
    found: dict[int, list[range]] = {}
    for epoch, spans in batches:
        found.setdefault(epoch, []).extend(spans)
    normalised = []
    for epoch in sorted(found):
        rising = tuple(found[epoch])
        if len(rising) > 1 or any(span.step != 1 or not span for span in rising):
            rising = BatchSet(rising).spans
            _refuse_overlap(epoch, rising)
        if rising:
            normalised.append((epoch, rising))
    return tuple(normalised)


def count(batches: Batches) -> int:
    """How many batches they are."""
    return sum(len(span) for _, spans in batches for span in spans)


def _refuse_overlap(epoch: int, rising: Sequence[range]) -> None:
    for span, following in pairwise(rising):
        if following.start < span.stop:
            raise LedgerError(f"batch {following.start} of epoch {epoch} is there twice")


def _all_in(inner: Batches, outer: Batches) -> bool:
    """Whether all of these batches are among those."""
    of = dict(outer)
    for epoch, spans in inner:
        rest = BatchSet(of.get(epoch, ()))
        before = len(rest)
        rest.remove(spans)
        if before - len(rest) != sum(map(len, spans)):
            return False
    return True


# -- the ledger -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The batches that a machine may train until the next commit, those it keeps included.

    Attributes:
        batches: The oldest epoch first.
    """

    batches: Batches = ()

    def __len__(self) -> int:
        return count(self.batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedEpoch:
    """An epoch whose batches are all in the global parameters.

    Attributes:
        epoch: Counted from 0.
        tallies: The last tally of each inner run that had one, by ``"machine/run"``.
    """

    epoch: int
    tallies: dict[str, dict[str, Any]]


@dataclass(slots=True)
class _OpenEpoch:
    consumed: BatchSet = field(default_factory=BatchSet)
    tallies: dict[str, dict[str, Any]] = field(default_factory=dict)

    def copy(self) -> _OpenEpoch:
        return _OpenEpoch(BatchSet(self.consumed.spans), dict(self.tallies))


class ClusterLedger:
    """What all machines of a cluster agree on.

    Args:
        settings: What must be equal on all machines, as JSON: model, data, seed and the like.
            The other arguments are added to it.
        num_epochs: Epochs of the run.
        batches_per_epoch: Batches of each.
        period_s: Seconds from one commit to the next round.
        max_batches: Batches after which the run is complete, whatever epoch it is in.

    Attributes:
        step: Rounds committed.
        lineage: Hash of all of them.
        consumed: Batches consumed, of all epochs.
        stopped: Whether a machine has asked that all stop.
        grants: What each machine may train until the next commit.
        recent: The epochs that closed last, the oldest first.
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
            "format": FORMAT,
            "num_epochs": num_epochs,
            "batches_per_epoch": batches_per_epoch,
            "period_s": period_s,
            "max_batches": max_batches,
        }
        # Through JSON, as the settings of others come.
        self.settings: dict[str, Any] = json.loads(_canonical({**settings, **own}))
        self.step = 0
        self.lineage = hashlib.sha256(_canonical(self.settings)).hexdigest()
        self.consumed = 0
        self.stopped = False
        self.grants: dict[str, Grant] = {}
        self.recent: tuple[ClosedEpoch, ...] = ()
        self._first = 0
        self._open: dict[int, _OpenEpoch] = {}
        self._open_epochs()

    @property
    def history(self) -> tuple[int, int, str]:
        """Its place among histories; see :attr:`Facts.history`."""
        return self.step, self.consumed, self.lineage

    @property
    def first_open(self) -> int:
        """The oldest epoch that is not closed."""
        return self._first

    @property
    def open_epochs(self) -> tuple[int, ...]:
        """Epochs that batches are granted of, the oldest first."""
        return tuple(self._open)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to be trained."""
        limit = self.max_batches
        return self._first >= self.num_epochs or (limit is not None and self.consumed >= limit)

    @property
    def ended(self) -> bool:
        """Whether nothing more will be granted."""
        return self.stopped or self.complete

    def consumed_of(self, epoch: int) -> tuple[range, ...]:
        """The batches of an open epoch that are in the global parameters."""
        return self._open[epoch].consumed.spans

    def _open_epochs(self) -> None:
        for epoch in range(self._first, min(self._first + OPEN_EPOCHS, self.num_epochs)):
            self._open.setdefault(epoch, _OpenEpoch())

    def copy(self) -> ClusterLedger:
        """A ledger that changes apart from this one."""
        twin = ClusterLedger.__new__(ClusterLedger)
        twin.__dict__.update(self.__dict__)
        twin._open = {number: epoch.copy() for number, epoch in self._open.items()}
        return twin

    def faults(self, facts: Iterable[Facts]) -> dict[str, str]:
        """What is wrong with facts of this ledger's history, by machine.

        Nobody may have done or keep what was not granted to it, so a batch that two machines
        tell of is the fault of one of them.
        """
        found = {}
        for told in facts:
            granted = self.grants.get(told.machine, Grant()).batches
            try:
                held = normal((*told.done, *told.kept))
            except LedgerError as error:
                found[told.machine] = f"tells what cannot be: {error}"
                continue
            if not _all_in(held, granted):
                found[told.machine] = "has batches that were not granted to it"
            elif told.leaving and told.kept:
                found[told.machine] = "leaves and keeps batches"
        return found

    def commit(self, facts: Sequence[Facts]) -> tuple[ClosedEpoch, ...]:
        """The round of these facts is committed; grants the next batches.

        Returns:
            The epochs that it closed, the oldest first.

        Raises:
            LedgerError: The facts contradict the ledger or each other, which is as it was.
        """
        ordered = sorted(facts, key=lambda told: told.machine)
        names = [told.machine for told in ordered]
        if len(set(names)) < len(names):
            raise LedgerError(f"a machine tells twice: {names}")
        for told in ordered:
            if (told.step, told.lineage) != (self.step, self.lineage):
                raise LedgerError(f"machine {told.machine} is in another history")
        faults = self.faults(ordered)
        if faults:
            raise LedgerError(_listed(faults), faults)
        done: dict[int, list[range]] = {}
        for told in ordered:
            for number, spans in told.done:
                done.setdefault(number, []).extend(spans)
            self.consumed += count(told.done)
            for number, tally in told.tallies:
                if number in self._open:
                    self._open[number].tallies[f"{told.machine}/{told.run}"] = tally
        for number, found in done.items():
            self._open[number].consumed.put_back(found)
        self.stopped = self.stopped or any(told.stop for told in ordered)
        closed = self._close()
        self.step += 1
        self.grants = deal(self, ordered, period_s=self.period_s)
        self.lineage = self._extended(ordered)
        return closed

    def _close(self) -> tuple[ClosedEpoch, ...]:
        closed = []
        while self._first in self._open:
            epoch = self._open[self._first]
            if len(epoch.consumed) < self.batches_per_epoch:
                break
            closed.append(ClosedEpoch(epoch=self._first, tallies=epoch.tallies))
            del self._open[self._first]
            self._first += 1
            self._open_epochs()
        self.recent = (*self.recent, *closed)[-KEEP_CLOSED:]
        return tuple(closed)

    def _extended(self, facts: Sequence[Facts]) -> str:
        # With the grants, so that machines which compute them differently find out.
        chain = hashlib.sha256(self.lineage.encode())
        for told in facts:
            chain.update(hashlib.sha256(told.to_json()).digest())
        grants = sorted(self.grants.items())
        chain.update(_canonical([[name, batches_to_json(g.batches)] for name, g in grants]))
        return chain.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return {
            "settings": self.settings,
            "step": self.step,
            "lineage": self.lineage,
            "consumed": self.consumed,
            "stopped": self.stopped,
            "first": self._first,
            "open": [
                [number, [[s.start, s.stop] for s in epoch.consumed.spans], epoch.tallies]
                for number, epoch in self._open.items()
            ],
            "grants": [[name, batches_to_json(g.batches)] for name, g in self.grants.items()],
            "recent": [[closed.epoch, closed.tallies] for closed in self.recent],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what another ledger gave, of the same settings.

        Raises:
            ValueError: It is no ledger's state, or one of other settings; nothing is changed.
        """
        new = self.copy()
        try:
            differences = differing(state["settings"], self.settings)
            if differences:
                raise ValueError(f"a ledger of other settings: {differences}")
            new.step = _count(state, "step")
            new.lineage = _text(state, "lineage", 64)
            new.stopped = _flag(state, "stopped")
            new._first = _count(state, "first")
            new._open = {
                number: _OpenEpoch(BatchSet(_spans_from_json(number, pairs)), dict(tallies))
                for number, pairs, tallies in state["open"]
            }
            new.grants = {
                name: Grant(batches=batches_from_json(value, f"grant of {name}"))
                for name, value in state["grants"]
            }
            new.recent = tuple(
                ClosedEpoch(epoch=epoch, tallies=dict(tallies))
                for epoch, tallies in state["recent"]
            )
            new.consumed = _count(state, "consumed")
        except (KeyError, TypeError) as error:
            raise ValueError(f"a ledger's state is broken: {error!r}") from error
        new._refuse_nonsense()
        self.__dict__.update(new.__dict__)

    def _refuse_nonsense(self) -> None:
        wanted = range(self._first, min(self._first + OPEN_EPOCHS, self.num_epochs))
        if list(self._open) != list(wanted) or self._first > self.num_epochs:
            raise ValueError(f"a ledger's state is broken: epochs {list(self._open)} are open")
        for number, epoch in self._open.items():
            spans = epoch.consumed.spans
            if spans and spans[-1].stop > self.batches_per_epoch:
                raise ValueError(f"a ledger's state is broken: epoch {number} is longer")
        total = self._first * self.batches_per_epoch
        total += sum(len(epoch.consumed) for epoch in self._open.values())
        if total != self.consumed:
            raise ValueError(f"a ledger's state is broken: {total} batches, not {self.consumed}")


def _spans_from_json(number: int, pairs: Any) -> tuple[range, ...]:
    found = batches_from_json([[number, pairs]] if pairs else [], f"epoch {number}")
    return found[0][1] if found else ()


def differing(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Which settings differ, in words; empty: none."""
    if theirs == ours:
        return ""
    names = sorted(set(theirs) | set(ours))
    told = (
        f"{name} is {theirs.get(name)!r:.60}, not {ours.get(name)!r:.60}"
        for name in names
        if name not in theirs or name not in ours or theirs[name] != ours[name]
    )
    return ", ".join(told)


# -- the deal -------------------------------------------------------------------------------


def deal(ledger: ClusterLedger, facts: Sequence[Facts], *, period_s: float) -> dict[str, Grant]:
    """What each machine may train after a commit; the same on all machines.

    Each machine gets what it trains in ``AHEAD`` periods, less what it keeps. When less than
    that is open, it is dealt so that all finish together. Each gets its part of the oldest
    open epoch, and the rest of the next one; its ranges are contiguous where they can be.

    Args:
        ledger: The ledger, with ``done`` of these facts consumed.
        facts: Of all machines in the round.
        period_s: Seconds until the next round.

    Returns:
        A grant for each machine, empty for those that leave.
    """
    grants: dict[str, Grant] = {told.machine: Grant() for told in facts}
    staying = sorted((f for f in facts if not f.leaving), key=lambda told: told.machine)
    if ledger.ended or not staying:
        return grants
    kept = [count(told.kept) for told in staying]
    pots = _open_batches(ledger, staying)
    num_open = sum(map(len, pots.values()))
    if ledger.max_batches is not None:
        num_open = min(num_open, ledger.max_batches - ledger.consumed - sum(kept))
    seconds = seconds_per_batch(staying)
    if seconds is None:
        wanted = [max(0, START_BATCHES - held) for held in kept]
        seconds = [1.0] * len(staying)
    else:
        most = 2.0**50
        wanted = [
            max(0, math.ceil(min(most, AHEAD * period_s / s)) - held)
            for s, held in zip(seconds, kept, strict=True)
        ]
    amounts = wanted if sum(wanted) <= num_open else finish_together(num_open, seconds, kept)
    parts: list[list[tuple[int, tuple[range, ...]]]] = [list(told.kept) for told in staying]
    for epoch, pot in pots.items():
        sizes = _split_whole(min(len(pot), sum(amounts)), amounts)
        for part, size in zip(parts, sizes, strict=True):
            if size:
                part.append((epoch, pot.take(size)))
        amounts = [amount - size for amount, size in zip(amounts, sizes, strict=True)]
    for told, part in zip(staying, parts, strict=True):
        grants[told.machine] = Grant(batches=normal(part))
    return grants


def _open_batches(ledger: ClusterLedger, facts: Sequence[Facts]) -> dict[int, BatchSet]:
    """What is neither consumed nor kept, for each open epoch."""
    kept: dict[int, list[range]] = {}
    for told in facts:
        for epoch, spans in told.kept:
            kept.setdefault(epoch, []).extend(spans)
    pots = {}
    for epoch in ledger.open_epochs:
        pot = BatchSet([range(ledger.batches_per_epoch)])
        pot.remove(ledger.consumed_of(epoch))
        pot.remove(kept.get(epoch, ()))
        pots[epoch] = pot
    return pots


def seconds_per_batch(facts: Sequence[Facts]) -> list[float] | None:
    """Of each machine; one not measured yet is like the mean of those that are.

    ``None``: no machine is measured.
    """
    speeds = [1 / told.seconds_per_batch for told in facts if told.seconds_per_batch]
    if not speeds:
        return None
    typical = len(speeds) / math.fsum(speeds)
    return [told.seconds_per_batch or typical for told in facts]


def due_s(ledger: ClusterLedger, facts: Sequence[Facts]) -> float:
    """Seconds from the commit to the next round: a period, or less if all is trained before."""
    seconds = seconds_per_batch(facts)
    if seconds is None:
        return ledger.period_s
    times = (len(ledger.grants[f.machine]) * s for f, s in zip(facts, seconds, strict=True))
    return min(ledger.period_s, max(MIN_DUE_S, *times))


def finish_together(total: int, seconds: Sequence[float], kept: Sequence[int]) -> list[int]:
    """Cut ``total`` batches so that all finish as early, and as close to together, as can be.

    Args:
        total: Batches to deal.
        seconds: That each machine takes for a batch.
        kept: Batches that each has already.
    """
    # The level: the time in which all are done that have not yet enough, as water rises.
    order = sorted(range(len(kept)), key=lambda i: (kept[i] * seconds[i], i))
    speed = held = level = 0.0
    for place, i in enumerate(order):
        speed, held = speed + 1 / seconds[i], held + kept[i]
        level = (total + held) / speed
        if place + 1 == len(order) or level <= kept[order[place + 1]] * seconds[order[place + 1]]:
            break
    parts = [max(0, int(level / s) - k) for s, k in zip(seconds, kept, strict=True)]
    while sum(parts) > total:  # by rounding alone
        parts[max(range(len(parts)), key=lambda i: (parts[i], i))] -= 1
    # The rest goes, one by one, to whoever is done with one more first.
    heap = [((kept[i] + parts[i] + 1) * seconds[i], i) for i in range(len(parts))]
    heapq.heapify(heap)
    for _ in range(total - sum(parts)):
        _, i = heap[0]
        parts[i] += 1
        heapq.heapreplace(heap, ((kept[i] + parts[i] + 1) * seconds[i], i))
    return parts


def _split_whole(total: int, amounts: Sequence[int]) -> list[int]:
    """Cut ``total`` in proportion to ``amounts``, none above its own; whole numbers only."""
    every = sum(amounts)
    if not every:
        return [0] * len(amounts)
    parts = [total * amount // every for amount in amounts]
    by_remainder = sorted(range(len(parts)), key=lambda i: (-(total * amounts[i] % every), i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


# -- a round's verdict ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundVerdict:
    """What the facts of a round come to, the same on all machines of one history.

    Attributes:
        refused: Machines that must end, with the reason as it goes on after their name.
        losers: Machines whose history another one wins over.
        void: Why the round may not be committed; empty: it may.
        ledger: What a commit makes of the ledger.
        closed: Epochs that a commit closes.
        due_s: Seconds from the commit to the next round.
    """

    refused: Mapping[str, str] = field(default_factory=dict)
    losers: frozenset[str] = frozenset()
    void: str = ""
    ledger: ClusterLedger
    closed: tuple[ClosedEpoch, ...] = ()
    due_s: float = 0.0


def judge(ledger: ClusterLedger, facts: Sequence[Facts]) -> RoundVerdict:
    """Look through the facts of a round; pure."""
    lead = leading(facts)
    refused = {
        told.machine: f"has other settings than the cluster: {why}"
        for told in facts
        if (why := differing(told.settings, lead.settings))
    }
    if refused:
        return RoundVerdict(refused=refused, void=_listed(refused), ledger=ledger)
    losers = frozenset(told.machine for told in facts if told.history != lead.history)
    if losers:
        void = f"histories differ, and that of machine {lead.machine} goes on"
        return RoundVerdict(losers=losers, void=void, ledger=ledger)
    void = _listed({f.machine: f"cannot take part: {f.void}" for f in facts if f.void})
    if void or ledger.ended:
        return RoundVerdict(void=void, ledger=ledger)
    after = ledger.copy()
    try:
        closed = after.commit(facts)
    except LedgerError as error:
        return RoundVerdict(refused=error.faults, void=str(error), ledger=ledger)
    return RoundVerdict(ledger=after, closed=closed, due_s=due_s(after, facts))


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"machine {name} {reason}" for name, reason in reasons.items())


def leading(facts: Sequence[Facts]) -> Facts:
    """The machine whose history and settings the others follow.

    It is the one with most commits, then most batches. Of settings that this leaves open those
    of most machines win.
    """
    if all(told.settings == facts[0].settings for told in facts):
        return max(facts, key=lambda told: (told.history, told.machine))
    keys = [_canonical(told.settings) for told in facts]
    places = [
        (told.step, told.consumed, keys.count(key), key, told.lineage, told.machine)
        for told, key in zip(facts, keys, strict=True)
    ]
    return facts[places.index(max(places))]


# -- events and commands --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The inner run stands idle with its first weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """All that was granted is trained. To be told once after each :class:`Apply` and
    :class:`ResumeGrant`, when it is so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumFormed:
    """The engine has found who takes part.

    Attributes:
        members: The machines, in the order in which facts are gathered.
        healed: The ledger's state as received, if the engine has brought this machine the
            state of another; ``None``: it has not.
    """

    members: tuple[str, ...]
    healed: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumFailed:
    """There is no quorum; the engine's step is what it was."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureDone:
    """The inner run's average is there; see :class:`Facts` for what the fields mean."""

    done: Batches
    kept: Batches
    weight: float
    num_samples: int
    seconds_per_batch: float | None
    tallies: tuple[tuple[int, dict[str, Any]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureFailed:
    """The inner run could not average."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The facts of all members, in their order."""

    facts: tuple[Facts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherFailed:
    """Facts are missing."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceDone:
    """The sums are there, or are not."""

    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The engine has decided, for this machine; its step has grown by one if so."""

    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The inner run has been asked to stop: one more round, then out.

    Attributes:
        everywhere: Whether all machines shall.
    """

    everywhere: bool = False


MemberEvent = (
    Built
    | Idle
    | QuorumFormed
    | QuorumFailed
    | CaptureDone
    | CaptureFailed
    | Gathered
    | GatherFailed
    | ReduceDone
    | Committed
    | Stop
    | Tick
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormQuorum:
    """Ask the engine for a quorum; answered by :class:`QuorumFormed` or ``QuorumFailed``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """The state received with the quorum is this machine's from now on, global parameters,
    buffers and outer optimizer, also for machines that are healed from it. What the inner run
    holds and trains counts for nothing any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetHistory:
    """Have the engine count on from another step. A state that came with the quorum is not
    taken.

    Attributes:
        step: 0: the machine is to be healed in the next quorum. Its state stays its own until
            then, and is what it goes on with if nobody else is left.
    """

    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeCapture:
    """Have the inner run average; answered by :class:`CaptureDone` or ``CaptureFailed``.

    From the capture on it trains only what it keeps.

    Attributes:
        reserve_s: Seconds of work to keep; 0: nothing at all, the machine leaves.
    """

    reserve_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """Exchange facts; answered by :class:`Gathered` or ``GatherFailed``."""

    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """Sum ``weight / sum(weights) * (global - snapshot)`` over machines, and buffers alike;
    answered by :class:`ReduceDone`. Not asked for where no machine has a weight: the global
    parameters then stay as they are.

    Attributes:
        weights: Of all members, in their order.
        samples: Likewise; integer buffers are those of the first with the most.
    """

    weights: tuple[float, ...]
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """Tell the engine whether this machine's part went well; answered by :class:`Committed`."""

    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """The round is committed.

    Attributes:
        grant: What to train from here on, in place of all that was granted before; what was
            trained of it since the capture counts as trained.
        closed: Epochs that closed.
        restart: The machine was healed: its inner run begins anew from the global parameters.
        reduced: Whether there were sums, so that the outer optimizer makes a step.
    """

    grant: Grant
    closed: tuple[ClosedEpoch, ...] = ()
    restart: bool = False
    reduced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeGrant:
    """The round failed and has changed nothing: the old grant goes on, with what was given
    back of it at a capture."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """This machine cannot take part; it must end with this reason."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """This machine's part is over, also where an engine call is under way.

    Attributes:
        stopped: Whether batches are left.
    """

    stopped: bool


MemberCommand = (
    FormQuorum
    | Adopt
    | ResetHistory
    | TakeCapture
    | Gather
    | Reduce
    | Vote
    | Apply
    | ResumeGrant
    | Refuse
    | Finish
)


# -- one machine's part ---------------------------------------------------------------------


class MemberState(Enum):
    """What a machine waits for."""

    BUILDING = "building"
    TRAINING = "training"
    QUORUM = "quorum"
    CAPTURE = "capture"
    GATHER = "gather"
    REDUCE = "reduce"
    VOTE = "vote"
    OUT = "out"


_S = MemberState
_NEXT = {
    _S.BUILDING: {_S.QUORUM, _S.OUT},
    _S.TRAINING: {_S.QUORUM, _S.OUT},
    _S.QUORUM: {_S.TRAINING, _S.CAPTURE, _S.GATHER, _S.OUT},
    _S.CAPTURE: {_S.GATHER, _S.OUT},
    _S.GATHER: {_S.TRAINING, _S.REDUCE, _S.VOTE, _S.OUT},
    _S.REDUCE: {_S.VOTE, _S.OUT},
    _S.VOTE: {_S.TRAINING, _S.OUT},
    _S.OUT: set(),
}

_BETWEEN_ROUNDS = {_S.BUILDING, _S.TRAINING, _S.QUORUM}
"""States in which a machine that has waited long enough may leave at once."""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
"""Time from a failed round's begin to the next, doubled with each that fails in a row, and the
longest; the first also at least from its end. An engine waits longer for a quorum, or machines
that ask in turns would never meet."""
FIRST_RESERVE_S = 1.0
"""Work kept for the first round, whose duration is not known."""
MAX_FAILED_CAPTURES = 5
"""Captures that may fail in a row."""
MAX_FAREWELLS = 3
"""Attempts to meet the others after the last commit."""


@dataclass(slots=True)
class _RoundInProgress:
    """What a machine knows of the round that it is in."""

    members: tuple[str, ...]
    asked_at: float
    leaving: bool = False
    facts: Facts | None = None
    verdict: RoundVerdict | None = None
    reduced: bool = False


class Member:
    """One machine's part in a cluster.

    Args:
        machine: Its id.
        ledger: Where it begins: a new ledger, or one from a checkpoint.
        leave_s: Seconds in which a machine that stops tries to hand over what it has trained,
            longer than a period. A round that has begun is not left for it.
        farewell_s: Seconds in which it waits, after the end, for machines that may have missed
            the last commit.

    Attributes:
        machine: Its id.
        ledger: What it knows to be agreed on. Replaced at each commit, never changed.
        state: What it waits for.
    """

    def __init__(
        self,
        machine: str,
        ledger: ClusterLedger,
        *,
        leave_s: float = 30.0,
        farewell_s: float = 10.0,
    ) -> None:
        self.machine = machine
        self.ledger = ledger
        self.state = MemberState.BUILDING
        self._leave_s = leave_s
        self._farewell_s = farewell_s
        self._out: list[MemberCommand] = []
        self._now = 0.0
        self._round = _RoundInProgress(members=(), asked_at=0.0)
        self._run = 0
        self._due: float | None = None
        self._gives_up_at: float | None = None
        self._num_failed = 0
        self._num_failed_captures = 0
        self._num_farewells = 0
        self._restart = False  # healed, and not in a committed round since
        self._engine_step = 0  # as far as this side has set it: 0 after a reset
        self._stop: Stop | None = None
        self._round_s: float | None = None
        self._seconds_per_batch: float | None = None
        self._next_closed: int | None = None if ledger.step == 0 else ledger.first_open

    @property
    def step(self) -> int:
        """Rounds committed."""
        return self.ledger.step

    @property
    def healing(self) -> bool:
        """Whether it has another machine's state and was in no committed round since."""
        return self._restart

    @property
    def deadline(self) -> float | None:
        """When to send a :class:`~coordinator.messages.Tick`, if nothing else comes."""
        due = self._due if self.state is _S.TRAINING else None
        gives_up_at = self._gives_up_at if self.state in _BETWEEN_ROUNDS else None
        return min((t for t in (due, gives_up_at) if t is not None), default=None)

    @property
    def _gives_up(self) -> bool:
        if self._gives_up_at is None or self.state not in _BETWEEN_ROUNDS:
            return False
        return self._now >= self._gives_up_at

    def transition(self, state: MemberState) -> None:
        """Go to ``state``.

        Raises:
            LedgerError: The present state does not lead there.
        """
        if state not in _NEXT[self.state]:
            raise LedgerError(f"machine {self.machine}: {self.state} -> {state}")
        self.state = state

    def handle(self, event: MemberEvent, now: float) -> list[MemberCommand]:
        """Take one event and return what is to be done, in order.

        Args:
            event: What happened.
            now: The time, in seconds of a clock that never goes back.

        Raises:
            LedgerError: The event does not fit the state.
        """
        self._out, self._now = [], now
        if self.state is not _S.OUT:
            self._take(event)
        if self._gives_up:
            self._finish()
        return self._out

    def _take(self, event: MemberEvent) -> None:
        match event:
            case Built():
                self._on_built()
            case Idle():
                # After a failure the pause is waited out. A machine that has nothing to bring
                # waits for the others, who would lose what they train to a round without them.
                if self.state is _S.TRAINING and self._num_failed == 0 and not self._has_nothing:
                    self._form_quorum()
            case Tick():
                if self.state is _S.TRAINING and self._due is not None and self._now >= self._due:
                    self._form_quorum()
            case Stop():
                self._on_stop(event)
            case QuorumFormed():
                self._on_quorum(event)
            case QuorumFailed():
                self._expect(_S.QUORUM, event)
                self._fail(event.error)
            case CaptureDone():
                self._on_capture(event)
            case CaptureFailed():
                self._on_capture_failed(event)
            case Gathered():
                self._on_gathered(event)
            case GatherFailed():
                self._expect(_S.GATHER, event)
                self._fail(event.error)
            case ReduceDone():
                self._expect(_S.REDUCE, event)
                self._vote(event.ok)
            case Committed():
                self._on_committed(event)
            case _:
                assert_never(event)

    def _expect(self, state: MemberState, event: MemberEvent) -> None:
        if self.state is not state:
            raise LedgerError(f"machine {self.machine}: {event} in state {self.state}")

    # -- when ---------------------------------------------------------------------------

    def _on_built(self) -> None:
        self._expect(_S.BUILDING, Built())
        if self._stop is not None and not self._stop.everywhere:
            self._finish()
            return
        if self.ledger.step:
            self._set_engine_step(self.ledger.step)
        self._form_quorum()

    def _on_stop(self, event: Stop) -> None:
        if self._stop is None:
            self._gives_up_at = self._now + self._leave_s
        if self._stop is None or event.everywhere:
            self._stop = event
        if self.state is _S.TRAINING:
            self._form_quorum()

    def _form_quorum(self) -> None:
        self.transition(_S.QUORUM)
        self._due = None
        self._round = _RoundInProgress(members=(), asked_at=self._now)
        self._out.append(FormQuorum())

    def _fail(self, reason: str) -> None:
        """The round has changed nothing; it is tried again after a pause."""
        self.transition(_S.TRAINING)
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._num_failed, 10))
        self._num_failed += 1
        self._due = max(self._now + FIRST_PAUSE_S, self._round.asked_at + pause_s)
        self._out.append(ResumeGrant(reason=reason))
        if self.ledger.ended:
            self._num_farewells += 1
        nothing_to_hand_over = self._stop is not None and self._restart
        if self._num_farewells >= MAX_FAREWELLS or nothing_to_hand_over:
            self._finish()

    def _finish(self) -> None:
        self.transition(_S.OUT)
        self._out.append(Finish(stopped=not self.ledger.complete))

    def _refuse(self, reason: str) -> None:
        self.transition(_S.OUT)
        self._out.append(Refuse(reason=reason))

    def _set_engine_step(self, step: int) -> None:
        self._engine_step = step
        self._out.append(ResetHistory(step=step))

    # -- a round ------------------------------------------------------------------------

    def _on_quorum(self, event: QuorumFormed) -> None:
        self._expect(_S.QUORUM, event)
        self._round.members = event.members
        if event.healed is not None:
            self._take_healed(event.healed)
        elif self._engine_step != self.ledger.step:
            self._set_engine_step(self.ledger.step)  # nobody was there to be healed from
        self._round.leaving = self._stop is not None
        if self._has_nothing:
            self._gather(self._facts())
        else:
            self.transition(_S.CAPTURE)
            self._out.append(TakeCapture(reserve_s=self._reserve_s()))

    @property
    def _has_nothing(self) -> bool:
        """Whether there is nothing that a capture could hold."""
        return self._restart or self.ledger.ended or not self.ledger.grants.get(self.machine)

    def _reserve_s(self) -> float:
        if self._round.leaving:
            return 0.0
        guess = FIRST_RESERVE_S if self._round_s is None else 2 * self._round_s
        return min(guess, self.ledger.period_s)

    def _take_healed(self, state: Mapping[str, Any]) -> None:
        """Another machine's state has come; it is taken unless this machine's own comes first."""
        ledger = self.ledger.copy()
        try:
            ledger.load_state_dict(state)
        except ValueError:
            self._set_engine_step(self.ledger.step)
            return
        if ledger.history < self.ledger.history:
            self._set_engine_step(self.ledger.step)
            return
        self.ledger = ledger
        self._engine_step = ledger.step
        self._restart = True
        self._out.append(Adopt())

    def _facts(self, capture: CaptureDone | None = None, void: str = "") -> Facts:
        ledger = self.ledger
        bare = Facts(
            machine=self.machine,
            run=self._run,
            step=ledger.step,
            lineage=ledger.lineage,
            consumed=ledger.consumed,
            settings=ledger.settings,
            seconds_per_batch=self._seconds_per_batch,
            leaving=self._round.leaving,
            stop=self._stop is not None and self._stop.everywhere,
            void=void,
        )
        if capture is None:
            return bare
        return replace(
            bare,
            done=normal(capture.done),
            kept=normal(capture.kept),
            weight=capture.weight,
            num_samples=capture.num_samples,
            tallies=capture.tallies,
        )

    def _gather(self, facts: Facts) -> None:
        self.transition(_S.GATHER)
        self._round.facts = facts
        self._out.append(Gather(facts=facts))

    def _on_capture(self, event: CaptureDone) -> None:
        self._expect(_S.CAPTURE, event)
        self._num_failed_captures = 0
        if event.seconds_per_batch is not None:
            self._seconds_per_batch = event.seconds_per_batch
        self._gather(self._facts(event))

    def _on_capture_failed(self, event: CaptureFailed) -> None:
        """The others are told, so that they do not wait."""
        self._expect(_S.CAPTURE, event)
        self._num_failed_captures += 1
        self._gather(self._facts(void=event.error or "the capture failed"))

    def _on_gathered(self, event: Gathered) -> None:
        self._expect(_S.GATHER, event)
        void = self._judge(event.facts)
        if self.state is _S.OUT:
            return
        if void:
            self._fail(void)
        elif self.ledger.ended:
            self._leave_ended()
        elif any(told.weight for told in event.facts):
            self.transition(_S.REDUCE)
            self._round.reduced = True
            weights = tuple(told.weight for told in event.facts)
            self._out.append(
                Reduce(weights=weights, samples=tuple(told.num_samples for told in event.facts))
            )
        else:
            self._vote(True)

    def _judge(self, facts: tuple[Facts, ...]) -> str:
        """Why the round is void, if it is; what it makes of the ledger is noted, if not."""
        round_ = self._round
        if tuple(told.machine for told in facts) != round_.members or round_.facts not in facts:
            return "the facts are not those of the members"
        verdict = self.verdict(facts)
        if self.machine in verdict.refused:
            self._refuse(f"machine {self.machine} {verdict.refused[self.machine]}")
        elif self.machine in verdict.losers:
            self._set_engine_step(0)
        elif self._num_failed_captures >= MAX_FAILED_CAPTURES:
            self._refuse(f"{self._num_failed_captures} captures in a row failed: {verdict.void}")
        round_.verdict = verdict
        return verdict.void

    def verdict(self, facts: tuple[Facts, ...]) -> RoundVerdict:
        """What :func:`judge` says; a simulation computes it once for all machines."""
        return judge(self.ledger, facts)

    def _vote(self, ok: bool) -> None:
        self.transition(_S.VOTE)
        self._out.append(Vote(ok=ok))

    def _on_committed(self, event: Committed) -> None:
        self._expect(_S.VOTE, event)
        if not event.ok:
            self._fail("the round was not committed")
            return
        verdict = self._round.verdict
        assert verdict is not None, "a round was committed before its facts were judged"
        self.transition(_S.TRAINING)
        before, self.ledger = self.ledger, verdict.ledger
        self._engine_step = self.ledger.step
        self._round_s = self._now - self._round.asked_at
        self._num_failed = 0
        self._due = self._now + verdict.due_s
        self._out.append(
            Apply(
                grant=self.ledger.grants[self.machine],
                closed=self._newly_closed(before, verdict.closed),
                restart=self._restart,
                reduced=self._round.reduced,
            )
        )
        self._run += self._restart
        self._restart = False
        if self.ledger.ended:
            self._gives_up_at = self._now + self._farewell_s
            self._form_quorum()
        elif self._round.leaving:
            self._finish()
        elif self._stop is not None:
            self._form_quorum()

    def _newly_closed(
        self, before: ClusterLedger, closed: tuple[ClosedEpoch, ...]
    ) -> tuple[ClosedEpoch, ...]:
        """Epochs that have closed since the last that was told of, as far as they are known."""
        first = before.first_open if self._next_closed is None else self._next_closed
        self._next_closed = max(first, self.ledger.first_open)
        known = self.ledger.recent if self._restart else closed
        return tuple(epoch for epoch in known if epoch.epoch >= first)

    def _leave_ended(self) -> None:
        """All members know that nothing is left."""
        if self._restart:
            self._out.append(
                Apply(grant=Grant(), closed=self._newly_closed(self.ledger, ()), restart=True)
            )
        self._finish()
