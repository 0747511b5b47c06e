"""The chunk pool: which batches are open, assigned, trained or settled, and who has them.

A batch goes through four states. *Open*: nobody has it. *Assigned*: in a plan sent to
a rank. *Trained*: the rank reported it, but its effect is in that rank's replica
alone. *Settled*: an averaging round has put its effect into the result. Only a settled
batch survives the death of the rank that trained it, so an epoch closes when all of its
batches are settled, and a death takes assigned and trained batches back to open.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from coordinator.metrics import EpochAccumulator, MachineStats
from coordinator.splitting import BatchSet, batch_bounds, count_batches, cut, split_by_ratio

CHUNK_S = 0.2
"""Time a chunk shall take on its rank, where the epoch has that much left."""
MAX_UNMEASURED_CHUNK = 1
"""Batches in a chunk for a rank whose speed is not known yet."""


class BatchLedger:
    """Deals the batches of up to two epochs at a time and follows each to its end.

    Args:
        num_samples: Length of the data set.
        batch_size: Samples in a batch.
        num_epochs: Epochs in the run.
        world_size: Ranks at the start.
        drop_last: Leave the short batch of an epoch out.
        ratios: Fixed share of each rank, or ``None`` to follow measured speed.
        progressive: Deal chunks as ranks ask; otherwise whole partitions.
        granularity: Chunks are multiples of this many batches (an accumulation window).
        max_batches: Deal no more than this many batches in the whole run.
        look_ahead: Whether a rank may start on the next epoch before this one closes.
        granted: Only what :meth:`grant` adds is dealt, and :meth:`end` says when all is.
        sizes: Where ranks have batches of sizes of their own, how many of the batches counted
            here make up one of each rank; ``None``: one.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        batch_size: int,
        num_epochs: int,
        world_size: int,
        drop_last: bool = False,
        ratios: Sequence[float] | None = None,
        progressive: bool = True,
        granularity: int = 1,
        max_batches: int | None = None,
        look_ahead: bool = True,
        granted: bool = False,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._num_epochs = num_epochs
        self._ratios = None if ratios is None else tuple(ratios)
        self._progressive = progressive
        self._granularity = granularity
        self._budget = max_batches
        self._look_ahead = look_ahead
        self._granted = granted
        self._ended = False
        self._sizes = tuple(sizes or (1,) * world_size)
        self.unequal = any(size != 1 for size in self._sizes)
        self.batches_per_epoch = count_batches(num_samples, batch_size, drop_last=drop_last)
        self.by_rank = [RankLedger() for _ in range(world_size)]
        self.epochs: deque[Epoch] = deque()
        self._next_epoch = 0

    def open_epoch(self, shares: Sequence[float]) -> Epoch | None:
        """Open the next epoch, if there is one left."""
        if self._next_epoch >= self._num_epochs or self._budget == 0:
            return None
        total = self.batches_per_epoch
        epoch = Epoch(
            epoch=self._next_epoch,
            num_batches=total,
            stats=EpochAccumulator(len(self.by_rank)),
            open=BatchSet(() if self._granted else [range(total)]),
            granted=BatchSet() if self._granted else None,
            complete=not self._granted,
        )
        epoch.quotas = self.quotas(len(epoch.open), shares)
        self._next_epoch += 1
        self.epochs.append(epoch)
        return epoch

    def quotas(self, count: int, shares: Sequence[float]) -> list[int] | None:
        """How many of so many batches are reserved for each rank, if any are."""
        if self._ratios is not None:
            return list(split_by_ratio(count, self._masked(self._ratios, shares)))
        return None if self._progressive else list(split_by_ratio(count, shares))

    def grant(self, number: int, spans: Sequence[range], shares: Sequence[float]) -> None:
        """These batches of an epoch may be dealt, too; opens it, and those before it."""
        while self._next_epoch <= number and self.open_epoch(shares) is not None:
            pass
        epoch = self._known(number)
        assert epoch.granted is not None, "nothing is granted where all is there from the start"
        epoch.granted.put_back(spans)
        epoch.open.put_back(spans)
        if epoch.quotas is not None:
            more = self.quotas(sum(map(len, spans)), shares) or [0] * len(epoch.quotas)
            epoch.quotas = [q + added for q, added in zip(epoch.quotas, more, strict=True)]

    def give_back(
        self, count: int, shares: Sequence[float]
    ) -> tuple[tuple[int, tuple[range, ...]], ...]:
        """Keep so many of the batches that nobody has; the others are not granted any more.

        Returns:
            Those that are not, by epoch.
        """
        returned = []
        for epoch in self.epochs:
            if epoch.granted is None:
                continue
            kept = epoch.open.take(count)
            count -= sum(map(len, kept))
            gone, epoch.open = epoch.open.spans, BatchSet(kept)
            epoch.granted.remove(gone)
            if epoch.quotas is not None:
                epoch.quotas = self.quotas(len(epoch.open), shares)
            if gone:
                returned.append((epoch.epoch, gone))
        return tuple(returned)

    def end(self) -> None:
        """No more is granted."""
        self._ended = True

    def is_idle(self, *, in_order: bool) -> bool:
        """Whether no rank has anything to train, nor could be given anything.

        Args:
            in_order: Whether an epoch begins only when the one before has closed.
        """
        ahead = self._look_ahead and not in_order
        dealable = list(self.epochs) if ahead else list(self.epochs)[:1]
        return not any(e.open for e in dealable) and not any(r.assigned for r in self.by_rank)

    @property
    def next_epoch(self) -> int:
        """The epoch that is opened next."""
        return self._next_epoch

    def resume(self, epochs: Iterable[Epoch], *, next_epoch: int, num_spent: int) -> None:
        """Go on with epochs that were begun, after so many batches of the run's."""
        self.epochs.extend(epochs)
        self._next_epoch = next_epoch
        if self._budget is not None:
            self._budget = max(0, self._budget - num_spent)

    @staticmethod
    def _masked(ratios: Sequence[float], shares: Sequence[float]) -> list[float]:
        """The user's ratios, without the ranks that are gone (share 0)."""
        kept = [r if s > 0 else 0.0 for r, s in zip(ratios, shares, strict=True)]
        return kept if sum(kept) > 0 else list(shares)

    def find(self, epoch: int) -> Epoch | None:
        """The open epoch of that number."""
        return next((e for e in self.epochs if e.epoch == epoch), None)

    @property
    def oldest(self) -> Epoch | None:
        """The epoch that closes next."""
        return self.epochs[0] if self.epochs else None

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left to deal now or later, short of a death."""
        if any(epoch.open for epoch in self.epochs) and self._budget != 0:
            return False
        if self._granted:
            return self._ended
        return self._next_epoch >= self._num_epochs or self._budget == 0

    def fully_trained(self, epoch: Epoch) -> bool:
        """Whether every batch of the epoch is trained, settled or not."""
        if epoch.open or not epoch.complete:
            return False
        return not any(e == epoch.epoch for led in self.by_rank for e, _ in led.assigned)

    def has_more(self, epoch: Epoch) -> bool:
        """Whether anything of the epoch is left to deal."""
        return bool(epoch.open) and self._budget != 0

    def first_unsettled(self) -> tuple[int, int]:
        """The first batch whose effect is not in the result, as ``(epoch, batch)``: no batch
        before it is dealt any more, but for those that :meth:`recount` takes back."""
        epoch = self.oldest
        if epoch is None:
            return self._next_epoch, 0
        starts = [span.start for span in epoch.open.spans[:1]]
        for ledger in self.by_rank:
            for held in (ledger.assigned, ledger.trained, ledger.in_round):
                starts += [span.start for number, span in held if number == epoch.epoch]
        return epoch.epoch, min(starts, default=epoch.num_batches)

    def pop_oldest(self) -> Epoch:
        """Close the oldest epoch."""
        return self.epochs.popleft()

    def deal_chunk(
        self,
        rank: int,
        *,
        shares: Sequence[float],
        seconds_per_batch: Sequence[float] | None,
        max_chunk: int | None = None,
        limit: int | None = None,
    ) -> tuple[int, tuple[range, ...]] | None:
        """Next chunk for a rank as ``(epoch, ranges)``, or ``None``: nothing for it now.

        Chunks take about ``CHUNK_S``, and shrink towards the end of an epoch to half of what is
        due to the rank, so that ranks of any speed finish it together (factoring, Hummel,
        Schonberg and Flynn 1992). Near the end a rank gets nothing if the others would be done
        with the rest before it had trained one more batch; it then starts on the next epoch.
        With ``max_chunk``, for ranks that are held together, chunks are no longer than that and
        no rank is refused. With ``limit`` they are no longer than that either.
        """
        if self._budget == 0:
            return None
        if self.unequal:
            parts = [share * size for share, size in zip(shares, self._sizes, strict=True)]
            shares = [part / sum(parts) for part in parts]
            if seconds_per_batch is not None:
                each = zip(seconds_per_batch, self._sizes, strict=True)
                seconds_per_batch = [seconds / size for seconds, size in each]
            max_chunk = None if max_chunk is None else max_chunk * self._sizes[rank]
        older = 0  # Open batches of older epochs: what is left of the run is theirs first.
        for epoch in self._dealable(shares):
            if max_chunk is None:
                count = self._chunk_size(epoch, rank, shares, seconds_per_batch, older)
            else:
                count = self._chunk_size(epoch, rank, shares, None, older, max_chunk)
            count = count if limit is None else min(count, limit * self._sizes[rank])
            if count > 0:
                return epoch.epoch, self._assign(epoch, rank, count)
            older += len(epoch.open)
        return None

    def _dealable(self, shares: Sequence[float]) -> Iterable[Epoch]:
        if not self.epochs and self.open_epoch(shares) is None:
            return
        yield self.epochs[0]
        if not self._look_ahead:
            return
        if len(self.epochs) == 1 and self.open_epoch(shares) is None:
            return
        yield self.epochs[1]

    def _chunk_size(
        self,
        epoch: Epoch,
        rank: int,
        shares: Sequence[float],
        seconds: Sequence[float] | None,
        older: int,
        unmeasured: int = MAX_UNMEASURED_CHUNK,
    ) -> int:
        left = len(epoch.open)
        if self._budget is not None:
            left = min(left, max(0, self._budget - older))
        if epoch.quotas is not None:
            left = min(left, epoch.quotas[rank])
            if not self._progressive:
                return left
        if left == 0:
            return 0
        if shares[rank] == 1.0 and not self._granted:
            return left  # nobody to balance with, and the end of a plan waits for the device
        if seconds is None or seconds[rank] <= 0:
            count = max(unmeasured, self._sizes[rank])
        else:
            if epoch.quotas is None and self._others_are_faster(left, rank, seconds, shares):
                return 0
            part = left * shares[rank] if epoch.quotas is None else float(left)
            count = int(min(CHUNK_S / seconds[rank], part / 2)) or 1
        step = self._granularity * self._sizes[rank]
        return min(left, -(-count // step) * step)

    def _others_are_faster(
        self, left: int, rank: int, seconds: Sequence[float], shares: Sequence[float]
    ) -> bool:
        """Whether the others finish ``left`` batches before this rank one more.

        Of those that take the same time the lowest comes first, or none would take any.
        """
        count = self.by_rank[rank].num_assigned + min(self._sizes[rank], left)
        if left * shares[rank] > count:
            return False  # more than all ranks together finish until then
        mine = count * seconds[rank]
        capacity = 0
        for r, s in enumerate(seconds):
            if r != rank and s > 0:
                size = min(self._sizes[r], left)
                n = (mine / s - self.by_rank[r].num_assigned) / size
                capacity += size * max(0, math.floor(n) if r < rank else math.ceil(n) - 1)
        return capacity >= left

    def deal_epoch(
        self,
        ranks: Sequence[int],
        shares: Sequence[float],
        most: int | None = None,
        limit: int | None = None,
    ) -> tuple[int, dict[int, tuple[range, ...]]] | None:
        """Deal what is open in the oldest epoch at once, for lockstep training.

        Equal shares interleave: global step ``s`` trains the open batches
        ``s * W`` to ``s * W + W - 1``, so that what is consumed is always a prefix. Fixed
        ratios deal contiguous ranges.

        Args:
            ranks: Who takes part.
            shares: Each rank's part of the work.
            most: For global batches that are cut into pieces: deal one range of no more than so
                many batches, all to the first rank; ``None``: all of them.
            limit: Deal no more than so many batches; ``None``: all.

        Returns:
            The epoch and the ranges of each rank, or ``None`` at the end of the run.
        """
        if not self.epochs and self.open_epoch(shares) is None:
            return None
        epoch = self.epochs[0]
        left = len(epoch.open) if self._budget is None else min(len(epoch.open), self._budget)
        if left == 0:
            return None
        left = left if limit is None else min(left, limit)
        if most is not None:
            spans = epoch.open.take(min(left, most, len(epoch.open.spans[0])))
            dealt = {rank: spans if rank == ranks[0] else () for rank in ranks}
        else:
            spans = epoch.open.take(left)
            # As they were dealt before the run was interrupted, if it was.
            dealt = epoch.take_parts(ranks, spans) or cut(spans, ranks, self._ratios)
        for rank, part in dealt.items():
            self._note(epoch, rank, part)
        return epoch.epoch, dealt

    def _assign(self, epoch: Epoch, rank: int, count: int) -> tuple[range, ...]:
        spans = epoch.open.take(count, whole=self._sizes[rank])
        if epoch.quotas is not None:
            epoch.quotas[rank] -= sum(map(len, spans))
        self._note(epoch, rank, spans)
        return spans

    def _note(self, epoch: Epoch, rank: int, spans: tuple[range, ...]) -> None:
        epoch.told.add(rank)
        for span in spans:
            if span:
                self.by_rank[rank].assigned.append((epoch.epoch, span))
        if self._budget is not None:
            self._budget -= sum(len(span) for span in spans)

    def trained(self, rank: int, count: int) -> None:
        """The rank trained its next ``count`` batches, of its own size, of those assigned."""
        ledger, size = self.by_rank[rank], self._sizes[rank]
        while count > 0:
            epoch, span = ledger.assigned.popleft()
            done, rest = span[: count * size], span[count * size :]
            ledger.note_trained(epoch, done)
            if rest:
                ledger.assigned.appendleft((epoch, rest))
            count -= -(-len(done) // size)

    def batches_of_rank(
        self, rank: int, spans: Sequence[range]
    ) -> tuple[tuple[range, ...], tuple[tuple[int, int], ...]]:
        """Ranges cut into batches of the rank's size: their numbers, and their samples.

        Each is the number of its first batch; the last one of a range may be a shorter one.
        """
        numbers = tuple(span[:: self._sizes[rank]] for span in spans)
        pieces = []
        for span in spans:
            for first in span[:: self._sizes[rank]]:
                last = min(first + self._sizes[rank], span.stop) - 1
                start, _ = batch_bounds(first, self._num_samples, self._batch_size)
                _, stop = batch_bounds(last, self._num_samples, self._batch_size)
                pieces.append((start, stop))
        return numbers, tuple(pieces)

    def freeze(self, rank: int) -> None:
        """What the rank trained so far is in its snapshot for the round."""
        ledger = self.by_rank[rank]
        ledger.in_round.extend(ledger.trained)
        ledger.trained.clear()

    def thaw(self) -> None:
        """The round was given up: what was in it waits for the next."""
        for ledger in self.by_rank:
            ledger.trained[:0] = ledger.in_round
            ledger.in_round.clear()

    def settle(self, rank: int) -> int:
        """The effect of the rank's frozen batches is in the result; gives their number."""
        ledger = self.by_rank[rank]
        count = sum(len(span) for _, span in ledger.in_round)
        for number, span in ledger.in_round:
            epoch = self._known(number)
            epoch.num_settled += len(span)
            epoch.num_samples += self._samples(span)
        ledger.in_round.clear()
        return count

    def cut_pieces(
        self,
        span: range,
        per_global: int,
        num_slices: int,
        sizes: Mapping[int, int],
        short: Callable[[int, Mapping[int, int]], Sequence[int]],
    ) -> tuple[dict[int, list[tuple[int, int]]], list[int]]:
        """The samples of each rank's micro-batches, where ranks share global batches out.

        A global batch is trained in slices, one after the other, each cut into contiguous
        pieces in the order of ranks: it holds the same samples whoever trains them.

        Args:
            span: Batches, from the beginning of a global batch on.
            per_global: Batches in a global batch; the last one may have fewer.
            num_slices: Slices of each.
            sizes: The piece of each rank in a whole slice; 0: none.
            short: Cuts so many samples of a smaller one like these sizes of its ranks.

        Returns:
            For each rank and micro-batch its positions ``[start, stop)`` in the epoch's
            permutation; and the batches of each global batch.
        """
        pieces: dict[int, list[tuple[int, int]]] = {rank: [] for rank in sizes}
        counts = []
        for first in range(span.start, span.stop, per_global):
            count = min(per_global, span.stop - first)
            counts.append(count)
            start, _ = batch_bounds(first, self._num_samples, self._batch_size)
            _, stop = batch_bounds(first + count - 1, self._num_samples, self._batch_size)
            most_ranks = -(-count * len(sizes) // per_global)
            for total in split_by_ratio(stop - start, [1] * num_slices):
                if total == sum(sizes.values()):
                    parts = sizes
                else:
                    some = dict(list(sizes.items())[: min(most_ranks, total)])
                    parts = dict(zip(some, short(total, some) if some else (), strict=True))
                for rank, own in pieces.items():
                    end = start + parts.get(rank, 0)
                    own.append((start, end))
                    start = end
        return pieces, counts

    def draw_keys(
        self, span: range, per_global: int, num_slices: int, num_ranks: int
    ) -> list[tuple[range, ...]]:
        """Numbers for the micro-batches of each rank, by which data sets draw: no two alike.

        One for each rank in a global batch of as many batches are the numbers of these.
        """
        beyond = self.batches_per_epoch + per_global
        keys: list[list[range]] = [[] for _ in range(num_ranks)]
        for first in range(span.start, span.stop, per_global):
            for i in range(num_slices * num_ranks):
                turn, place = divmod(i, per_global)
                key = first + place + turn * beyond
                keys[i % num_ranks].append(range(key, key + 1))
        return [tuple(own) for own in keys]

    def count_samples(self, batches: Iterable[int]) -> int:
        """Samples in these batches."""
        return sum(self._samples(range(b, b + 1)) for b in batches)

    def _samples(self, span: range) -> int:
        total = len(span) * self._batch_size
        if span and (excess := (span[-1] + 1) * self._batch_size - self._num_samples) > 0:
            total -= excess  # the epoch's last batch is a shorter one
        return total

    def take_back(self, rank: int, shares: Sequence[float], *, in_round: bool = True) -> None:
        """The rank is dead: its unsettled batches are open again.

        Args:
            rank: Who died.
            shares: Each rank's part of the work from here on; 0 for this one.
            in_round: Also those in the round in progress, which is then lost.
        """
        ledger = self.by_rank[rank]
        gone = [*ledger.trained, *(ledger.in_round if in_round else ())]
        for number, span in gone:
            epoch = self._known(number)
            epoch.num_retrained += self._samples(span)
        for number, span in (*ledger.assigned, *gone):
            epoch = self._known(number)
            self._reopen(epoch, [span])
            if epoch.quotas is not None:
                epoch.quotas[rank] += len(span)
        for epoch in self.epochs:
            self._hand_over(epoch, rank, shares)
        self.by_rank[rank] = RankLedger(in_round=[] if in_round else ledger.in_round)

    def _hand_over(self, epoch: Epoch, rank: int, shares: Sequence[float]) -> None:
        """What was reserved for a rank goes to the others, in proportion."""
        if epoch.quotas is None or not any(shares):
            return
        weights = shares if self._ratios is None else self._masked(self._ratios, shares)
        parts = split_by_ratio(epoch.quotas[rank], weights)
        epoch.quotas[rank] = 0
        epoch.quotas = [q + part for q, part in zip(epoch.quotas, parts, strict=True)]

    def _known(self, number: int) -> Epoch:
        epoch = self.find(number)
        assert epoch is not None, "a batch outlived its epoch"
        return epoch

    def _reopen(self, epoch: Epoch, spans: Sequence[range]) -> None:
        epoch.open.put_back(spans)
        if self._budget is not None:
            self._budget += sum(len(span) for span in spans)

    def recount(
        self, rank: int, number: int, spans: Sequence[range], *, told: int, made: int
    ) -> tuple[int, int]:
        """Under lockstep, after a death: only the first ``made`` batches of a plan count.

        Args:
            rank: Whose plan it is.
            number: Its epoch.
            spans: Its batches, in order.
            told: Batches of it that the rank reported, which are settled.
            made: Batches whose effect the ranks that are left have.

        Returns:
            Samples in the batches that count and were not told, and in those that were told and
            do not count.
        """
        self.by_rank[rank] = RankLedger()
        order = [batch for span in spans for batch in span]
        if told == made == len(order):
            return 0, 0
        epoch = self._known(number)
        untold, undone = (self.count_samples(p) for p in (order[told:made], order[made:told]))
        epoch.num_settled += made - told
        epoch.num_samples += untold - undone
        self._reopen(epoch, [range(b, b + 1) for b in order[made:]])
        return untold, undone

    def disable_look_ahead(self) -> None:
        """From here on an epoch begins only when the one before has closed."""
        self._look_ahead = False


@dataclass(slots=True)
class RankLedger:
    """What one rank holds, oldest first, as ``(epoch, ranges of batches)``."""

    assigned: deque[tuple[int, range]] = field(default_factory=deque)
    trained: list[tuple[int, range]] = field(default_factory=list)
    in_round: list[tuple[int, range]] = field(default_factory=list)

    @property
    def num_assigned(self) -> int:
        return sum(len(span) for _, span in self.assigned)

    def note_trained(self, epoch: int, span: range) -> None:
        """Batches were trained; with those right before them they are one range."""
        if self.trained:
            number, last = self.trained[-1]
            if number == epoch and last.stop == span.start and last.step == span.step == 1:
                self.trained[-1] = (epoch, range(last.start, span.stop))
                return
        self.trained.append((epoch, span))


@dataclass(slots=True)
class Epoch:
    """One open epoch.

    ``told`` are the ranks that had a plan of it, ``worked`` says that a round has carried
    its evaluation and checkpoint to ``lead``, ``evaluation`` is what came back, ``saved``
    says that the checkpoint function has returned, ``parts`` is what each rank was dealt of
    it before the run was interrupted. ``divergence`` is the largest of a rank in one of its
    rounds, ``norm`` that of the parameters when it was measured last.

    Where batches are granted, ``granted`` are those that this machine was granted and has not
    given back, ``num_elsewhere`` counts those that other machines have settled, ``complete``
    says that all are settled, here or there, and ``others`` are then the sums of the others.
    """

    epoch: int
    num_batches: int
    stats: EpochAccumulator
    open: BatchSet
    quotas: list[int] | None = None
    num_settled: int = 0
    num_samples: int = 0
    num_retrained: int = 0
    num_averagings: int = 0
    divergence: float | None = None
    norm: float | None = None
    told: set[int] = field(default_factory=set)
    worked: bool = False
    lead: int = -1
    evaluation: dict[str, float] | None = None
    saved: bool = False
    parts: dict[int, tuple[range, ...]] | None = None
    granted: BatchSet | None = None
    num_elsewhere: int = 0
    complete: bool = True
    others: tuple[MachineStats, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether the effect of every batch is in the result."""
        return self.complete and self.num_settled + self.num_elsewhere == self.num_batches

    def take_parts(
        self, ranks: Sequence[int], spans: Sequence[range]
    ) -> dict[int, tuple[range, ...]]:
        """What an interrupted run had dealt, if it is all of ``spans`` and for these ranks."""
        parts, self.parts = self.parts, None
        if parts is None or set(parts) != set(ranks):
            return {}
        dealt = sorted(b for part in parts.values() for span in part for b in span)
        return parts if dealt == [b for span in spans for b in span] else {}


@dataclass(slots=True)
class LockstepPlan:
    """What all ranks were dealt together under ``SYNC``, and what is known of it.

    Where global batches are cut into pieces it is dealt little by little: ranks hold its next
    steps before they are through with those before. Its batches then belong to no rank: those
    of a global batch count once the first rank has reported its last piece of it.

    Attributes:
        epoch: Its epoch.
        parts: The batches of each rank, in order; with pieces the first rank has all of them.
        first_window: Optimizer steps that every rank had made before it.
        num_windows: Optimizer steps in it.
        first_step: Batches that all ranks had trained before it.
        pieces: The samples of each micro-batch of each rank; empty: each is a batch of its own.
        counts: With pieces, the batches of each global batch.
        num_slices: With pieces, the micro-batches of each rank in a global batch.
        told: Micro-batches of it that each rank has reported.
    """

    epoch: int
    parts: dict[int, tuple[range, ...]]
    first_window: int
    num_windows: int
    first_step: int
    pieces: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    num_slices: int = 1
    told: dict[int, int] = field(default_factory=dict)
    _untimed: dict[int, deque[int]] = field(default_factory=dict)  # pieces, by their samples
    _timed: dict[int, tuple[int, int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.give(self.pieces)

    def give(self, pieces: dict[int, list[tuple[int, int]]]) -> None:
        """Its global batches are cut into these pieces."""
        self.pieces = pieces
        self._untimed = {rank: deque(_sizes(own)) for rank, own in pieces.items()}

    @property
    def num_batches(self) -> int:
        """Batches in it, of all ranks."""
        return sum(len(span) for spans in self.parts.values() for span in spans)

    def num_loads(self, rank: int) -> int:
        """Micro-batches of a rank."""
        if self.pieces:
            return len(self.pieces[rank])
        return sum(len(span) for span in self.parts[rank])

    def num_complete_batches(self, rank: int, num_loads: int) -> int:
        """Batches that count once a rank has trained so many of its micro-batches."""
        if not self.pieces:
            return num_loads
        if rank != next(iter(self.parts)):
            return 0
        return sum(self.counts[: num_loads // self.num_slices])

    def num_reported(self, rank: int) -> int:
        """Batches that count by what a rank has reported."""
        return self.num_complete_batches(rank, self.told.get(rank, 0))

    def part(self, per_global: int) -> Fraction | int:
        """What a micro-batch counts as, in batches."""
        num = self.num_slices * len(self.parts)
        return Fraction(per_global, num) if self.pieces and num != per_global else 1

    def has_whole_steps(self, accumulate: int) -> bool:
        """Whether more can follow: an optimizer step that was cut short is the last one."""
        return len(self.counts) % accumulate == 0

    def extend(self, more: LockstepPlan) -> None:
        """The same ranks were dealt more of the epoch."""
        self.num_windows += more.num_windows
        self.counts += more.counts
        for rank, spans in more.parts.items():
            self.parts[rank] += spans
            self.pieces[rank] += more.pieces[rank]
            self._untimed[rank] += more._untimed[rank]

    def drop_reported(self, accumulate: int) -> None:
        """Leave out the steps that every rank has told: no death can take them back."""
        per_step = accumulate * self.num_slices
        windows = min(self.told.get(rank, 0) for rank in self.parts) // per_step
        num = windows * per_step
        self.first_window += windows
        self.num_windows -= windows
        for rank, spans in self.parts.items():
            counted = self.num_complete_batches(rank, num)
            self.first_step += counted
            self.parts[rank] = _without_first(spans, counted)
            del self.pieces[rank][:num]
            self.told[rank] = self.told.get(rank, 0) - num
        del self.counts[: windows * accumulate]

    def note(self, rank: int, num_batches: int, num_timed: int, compute_s: float) -> None:
        """A rank has reported batches, and the time of batches, which may come later."""
        self.told[rank] = self.told.get(rank, 0) + num_batches
        untimed = self._untimed.get(rank, deque())
        num_timed = min(num_timed, len(untimed))
        num, samples, seconds = self._timed.get(rank, (0, 0, 0.0))
        samples += sum(untimed.popleft() for _ in range(num_timed))
        self._timed[rank] = (num + num_timed, samples, seconds + compute_s)

    def take_times(self, rank: int) -> tuple[float, float] | None:
        """What a rank's pieces took since the last call: their mean samples and seconds."""
        num, samples, seconds = self._timed.pop(rank, (0, 0, 0.0))
        return (samples / num, seconds / num) if num else None

    def count_samples(self, rank: int, start: int, stop: int) -> int:
        """Samples in some of a rank's pieces."""
        return sum(end - begin for begin, end in self.pieces[rank][start:stop])


def _sizes(pieces: Iterable[tuple[int, int]]) -> list[int]:
    """Samples of each piece that has any."""
    return [stop - start for start, stop in pieces if stop > start]


def _without_first(spans: tuple[range, ...], count: int) -> tuple[range, ...]:
    left = []
    for span in spans:
        left.append(span[count:])
        count = max(0, count - len(span))
    return tuple(span for span in left if span)
