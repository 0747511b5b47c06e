"""Ledger of batches: which are open, assigned, trained or settled, and on which rank.

A batch passes through four states. *Open*: no rank has it. *Assigned*: in a plan sent to a rank.
*Trained*: reported by the rank, with an effect on that rank's replica only. *Settled*: an averaging
round has put its effect into the result. Only a settled batch survives the death of the rank that
trained it: an epoch closes when all of its batches are settled, and a death returns assigned and
trained batches to open.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from coordinator.metrics import EpochAccumulator, MachineStats
from coordinator.splitting import BatchSet, count_batches, split_by_ratio
from coordinator.steps import Agreement, StepQueue

CHUNK_S = 0.2
"""Target duration of a chunk on its rank."""
MAX_UNMEASURED_CHUNK = 1
"""Batches in a chunk for a rank whose speed is not measured yet."""


class BatchLedger:
    """Deals the batches of up to two open epochs, and tracks each batch until it is settled.

    Args:
        num_samples: Length of the data set.
        world_size: Ranks at the start.
        batches_per_epoch: Batches in an epoch, from its first one on; ``None``: all.
        ratios: Fixed share of each rank; ``None``: by measured speed.
        granularity: Chunks are multiples of this many batches (an accumulation window).
        max_batches: Maximum number of batches assigned in the run.
        granted: Deal only the batches added by :meth:`grant`, until :meth:`end`.
        sizes: For ranks with unequal batch sizes, the size of each rank's batch in batches of the
            ledger; ``None``: 1.

    Attributes:
        by_rank: The unsettled batches of each rank.
        queue: The unsettled batches of all ranks together, under ``SYNC``.
        cuts: The batches of each rank's own size.
        next_epoch: Number of the next epoch to open.
        look_ahead: A rank may start the next epoch before this one closes.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        batch_size: int,
        num_epochs: int,
        world_size: int,
        batches_per_epoch: int | None = None,
        ratios: Sequence[float] | None = None,
        granularity: int = 1,
        max_batches: int | None = None,
        granted: bool = False,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.cuts = BatchCuts(num_samples, batch_size, sizes or (1,) * world_size)
        self._num_epochs = num_epochs
        self._ratios = None if ratios is None else tuple(ratios)
        self._granularity = granularity
        self._batches_left = max_batches
        self.look_ahead = True
        self._granted = granted
        self._revoked: list[tuple[int, tuple[range, ...]]] = []  # in the present machine round
        self._ended = False
        self.batches_per_epoch = batches_per_epoch or count_batches(
            num_samples, batch_size, drop_last=False
        )
        self.by_rank = [RankLedger() for _ in range(world_size)]
        self.queue = StepQueue(granularity)
        self.epochs: deque[Epoch] = deque()
        self.next_epoch = 0

    def open_epoch(self, shares: Sequence[float]) -> Epoch | None:
        """Open the next epoch; ``None`` at the end of the run."""
        if self.next_epoch >= self._num_epochs or self._batches_left == 0:
            return None
        total = self.batches_per_epoch
        epoch = Epoch(
            epoch=self.next_epoch,
            num_batches=total,
            stats=EpochAccumulator(len(self.by_rank)),
            open=BatchSet(() if self._granted else [range(total)]),
            granted=BatchSet() if self._granted else None,
            complete=not self._granted,
        )
        epoch.quotas = self.quotas(len(epoch.open), shares)
        self.next_epoch += 1
        self.epochs.append(epoch)
        return epoch

    def quotas(self, count: int, shares: Sequence[float]) -> list[int] | None:
        """Split ``count`` batches by the fixed ratios; ``None``: there are none."""
        if self._ratios is None:
            return None
        return list(split_by_ratio(count, self._masked(self._ratios, shares)))

    def grant(self, number: int, spans: Sequence[range], shares: Sequence[float]) -> Epoch:
        """Grant batches of an epoch, of which this machine may have some already.

        Returns:
            The epoch. It is opened, with all before it.
        """
        while self.next_epoch <= number and self.open_epoch(shares) is not None:
            pass
        epoch = self._get(number)
        assert epoch.granted is not None, "grants need granted=True"
        new = BatchSet(spans)
        new.remove(epoch.granted.spans)
        epoch.granted.put_back(new.spans)
        epoch.open.put_back(new.spans)
        if epoch.quotas is not None:
            more = self.quotas(len(new), shares) or [0] * len(epoch.quotas)
            epoch.quotas = [q + added for q, added in zip(epoch.quotas, more, strict=True)]
        return epoch

    def revoke_open(self, count: int, shares: Sequence[float]) -> None:
        """Keep ``count`` of the open granted batches and revoke the grant of the others."""
        for epoch in self.epochs:
            if epoch.granted is None:
                continue
            kept = epoch.open.take(count)
            count -= sum(map(len, kept))
            revoked, epoch.open = epoch.open.spans, BatchSet(kept)
            epoch.granted.remove(revoked)
            if epoch.quotas is not None:
                epoch.quotas = self.quotas(len(epoch.open), shares)
            self._revoked.append((epoch.epoch, revoked))

    def end_machine_round(self, shares: Sequence[float], *, committed: bool) -> None:
        """End the round for which batches were revoked: if it failed, they are granted again."""
        revoked, self._revoked = self._revoked, []
        for number, spans in () if committed else revoked:
            self.grant(number, spans, shares)

    def end(self) -> None:
        self._ended = True

    def is_idle(self, *, in_order: bool) -> bool:
        """True if no batch is assigned and none can be assigned now.

        Args:
            in_order: An epoch begins only when the one before has closed.
        """
        ahead = self.look_ahead and not in_order
        assignable = list(self.epochs) if ahead else list(self.epochs)[:1]
        return not any(e.open for e in assignable) and not any(self._assigned())

    def restore(self, epochs: Iterable[Epoch], *, next_epoch: int, num_spent: int) -> None:
        """Restore open epochs of a checkpoint, with ``num_spent`` batches of the run assigned."""
        self.epochs.extend(epochs)
        self.next_epoch = next_epoch
        if self._batches_left is not None:
            self._batches_left = max(0, self._batches_left - num_spent)

    @staticmethod
    def _masked(ratios: Sequence[float], shares: Sequence[float]) -> list[float]:
        kept = [r if s > 0 else 0.0 for r, s in zip(ratios, shares, strict=True)]
        return kept if sum(kept) > 0 else list(shares)

    def find(self, epoch: int) -> Epoch | None:
        """The open epoch with that number, if any."""
        return next((e for e in self.epochs if e.epoch == epoch), None)

    @property
    def oldest(self) -> Epoch | None:
        """The oldest open epoch, which closes next."""
        return self.epochs[0] if self.epochs else None

    @property
    def exhausted(self) -> bool:
        """True if nothing is left to assign now or later, unless a rank dies."""
        if any(epoch.open for epoch in self.epochs) and self._batches_left != 0:
            return False
        if self._granted:
            return self._ended
        return self.next_epoch >= self._num_epochs or self._batches_left == 0

    def fully_trained(self, epoch: Epoch) -> bool:
        """True if every batch of the epoch is trained, settled or not."""
        if epoch.open or not epoch.complete:
            return False
        return not any(number == epoch.epoch for number, _ in self._assigned())

    def _assigned(self) -> Iterator[tuple[int, range]]:
        """The batches that are assigned and not trained, with their epochs."""
        for ledger in self.by_rank:
            yield from ledger.assigned
        yield from ((self.queue.plans[0].epoch, span) for span in self.queue.unsettled)

    def unsettled(self, epoch: Epoch) -> list[range]:
        """The batches of an epoch that are assigned or trained, and not settled."""
        spans = [span for ledger in self.by_rank for span in ledger.of_epoch(epoch.epoch)]
        if self.queue.plans and self.queue.plans[0].epoch == epoch.epoch:
            spans += self.queue.unsettled
        return spans

    def has_more(self, epoch: Epoch) -> bool:
        """True if batches of the epoch are left to assign."""
        return bool(epoch.open) and self._batches_left != 0

    def first_unsettled(self) -> tuple[int, int]:
        """The first unsettled batch, as ``(epoch, batch)``.

        No batch before it is assigned again, except those that :meth:`return_to` reopens.
        """
        epoch = self.oldest
        if epoch is None:
            return self.next_epoch, 0
        starts = [span.start for span in epoch.open.spans[:1]]
        starts += [span.start for span in self.unsettled(epoch)]
        return epoch.epoch, min(starts, default=epoch.num_batches)

    def assign_chunk(
        self,
        rank: int,
        *,
        shares: Sequence[float],
        seconds_per_batch: Sequence[float] | None,
        max_chunk: int | None = None,
        limit: int | None = None,
        within: int | None = None,
    ) -> tuple[int, tuple[range, ...]] | None:
        """Assign the next chunk to a rank; ``None``: no batch for it now.

        Chunks take about ``CHUNK_S``, and shrink towards the end of an epoch to half of the
        rank's remaining share, so that ranks of any speed finish it together (factoring, Hummel,
        Schonberg and Flynn 1992). Near the end a rank receives nothing if the others finish the
        rest before it could train one more batch; it then starts the next epoch.

        Args:
            shares: Each rank's share of the throughput.
            seconds_per_batch: Measured time of each rank's batches; ``None``: not measured.
            max_chunk: For ranks under a lead limit: maximum size of chunks, which then do not
                depend on speed.
            limit: Maximum size of this chunk.
            within: The last epoch that the rank has begun, if a step is in progress on it: it
                receives no batch of a later one, and those that others would finish sooner.

        Returns:
            The epoch and the ranges of the chunk.
        """
        if self._batches_left == 0:
            return None
        if self.cuts.unequal:
            parts = [share * size for share, size in zip(shares, self.cuts.sizes, strict=True)]
            shares = [part / sum(parts) for part in parts]
            if seconds_per_batch is not None:
                each = zip(seconds_per_batch, self.cuts.sizes, strict=True)
                seconds_per_batch = [seconds / size for seconds, size in each]
            max_chunk = None if max_chunk is None else max_chunk * self.cuts.sizes[rank]
        older = 0  # Open batches of older epochs, which come first in what is left of the run.
        epochs = self._assignable(shares)
        if within is not None:
            epochs = [epoch for epoch in self.epochs if epoch.epoch <= within]
        for epoch in epochs:
            if rank in epoch.left:
                older += len(epoch.open)
                continue
            if max_chunk is None:
                seconds = seconds_per_batch if within is None else None
                if seconds is not None and epoch.left:  # these train no more of it
                    seconds = [0.0 if r in epoch.left else s for r, s in enumerate(seconds)]
                count = self._chunk_size(epoch, rank, shares, seconds, older)
            else:
                count = self._chunk_size(epoch, rank, shares, None, older, max_chunk)
            count = count if limit is None else min(count, limit * self.cuts.sizes[rank])
            if count > 0:
                return epoch.epoch, self._assign(epoch, rank, count)
            older += len(epoch.open)
        return None

    def may_assign(self, number: int, rank: int | None = None) -> bool:
        """True if a rank, or any, may receive another batch of an epoch, now or later."""
        epoch = self.find(number)
        if epoch is None or self._batches_left == 0:
            return False
        if epoch.open and (rank is None or epoch.quotas is None or epoch.quotas[rank]):
            return True
        granted = 0 if epoch.granted is None else len(epoch.granted)
        is_dealt = epoch.complete or granted + epoch.num_elsewhere == epoch.num_batches
        return not (is_dealt or self._ended)

    def _assignable(self, shares: Sequence[float]) -> Iterable[Epoch]:
        if not self.epochs and self.open_epoch(shares) is None:
            return
        yield self.epochs[0]
        if not self.look_ahead:
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
        if self._batches_left is not None:
            left = min(left, max(0, self._batches_left - older))
        if epoch.quotas is not None:
            left = min(left, epoch.quotas[rank])
        if left == 0:
            return 0
        if shares[rank] == 1.0 and not self._granted:
            return left  # one rank: a plan's end would synchronise with the device
        if seconds is None or seconds[rank] <= 0:
            count = max(unmeasured, self.cuts.sizes[rank])
        else:
            if epoch.quotas is None and self._others_are_faster(left, rank, seconds, shares):
                return 0
            part = left * shares[rank] if epoch.quotas is None else float(left)
            count = int(min(CHUNK_S / seconds[rank], part / 2)) or 1
        step = self._granularity * self.cuts.sizes[rank]
        count = min(left, -(-count // step) * step)
        # What a quota or the end of the run leaves is a batch as well.
        too_small = 0 < (left - count) * self.cuts.batch_size < self.cuts.min_batch
        return count - 1 if too_small and self.cuts.sizes[rank] > 2 else count

    def _others_are_faster(
        self, left: int, rank: int, seconds: Sequence[float], shares: Sequence[float]
    ) -> bool:
        """True if the others finish ``left`` batches before this rank could train one more.

        Ties go to the lowest rank, or no rank would take a batch.
        """
        count = self.by_rank[rank].num_assigned + min(self.cuts.sizes[rank], left)
        if left * shares[rank] > count:
            return False  # more than all ranks together finish by then
        mine = count * seconds[rank]
        capacity = 0
        for r, s in enumerate(seconds):
            if r != rank and s > 0:
                size = min(self.cuts.sizes[r], left)
                n = (mine / s - self.by_rank[r].num_assigned) / size
                capacity += size * max(0, math.floor(n) if r < rank else math.ceil(n) - 1)
        return capacity >= left

    def take_global(
        self, ranks: Sequence[int], shares: Sequence[float], most: int
    ) -> tuple[int, range] | None:
        """Take the next open batches of the oldest epoch, for a plan under ``SYNC``.

        Args:
            ranks: The participating ranks.
            shares: Each rank's share of the work.
            most: Maximum number of batches.

        Returns:
            The epoch and the batches, or ``None`` at the end of the run.
        """
        if not self.epochs and self.open_epoch(shares) is None:
            return None
        epoch = self.epochs[0]
        if not self.has_more(epoch):
            return None
        if self._batches_left is not None:
            most = min(most, self._batches_left)
            self._batches_left -= min(most, len(epoch.open.spans[0]))
        epoch.notified.update(ranks)
        (span,) = epoch.open.take(min(most, len(epoch.open.spans[0])))
        return epoch.epoch, span

    def _assign(self, epoch: Epoch, rank: int, count: int) -> tuple[range, ...]:
        spans = epoch.open.take(count, whole=self.cuts.sizes[rank])
        if self.cuts.unequal:
            spans = self.cuts.without_small(spans, epoch.open, self.cuts.sizes[rank])
        if epoch.quotas is not None:
            epoch.quotas[rank] -= sum(map(len, spans))
        self._mark_assigned(epoch, rank, spans)
        return spans

    def _mark_assigned(self, epoch: Epoch, rank: int, spans: tuple[range, ...]) -> None:
        epoch.notified.add(rank)
        for span in spans:
            if span:
                self.by_rank[rank].assigned.append((epoch.epoch, span))
        if self._batches_left is not None:
            self._batches_left -= sum(len(span) for span in spans)

    def record_trained(self, rank: int, count: int) -> None:
        """Record that a rank trained its next ``count`` assigned batches, in its own batch size."""
        ledger, size = self.by_rank[rank], self.cuts.sizes[rank]
        while count > 0:
            assert ledger.assigned, f"rank {rank} reports batches that it was not assigned"
            epoch, span = ledger.assigned.popleft()
            done, rest = span[: count * size], span[count * size :]
            ledger.add_trained(epoch, done)
            if rest:
                ledger.assigned.appendleft((epoch, rest))
            count -= -(-len(done) // size)

    def freeze(self, rank: int) -> None:
        """Record that the rank's trained batches are in its snapshot for the round."""
        ledger = self.by_rank[rank]
        ledger.in_round.extend(ledger.trained)
        ledger.trained.clear()

    def unfreeze(self) -> None:
        """Return the batches of an abandoned round to trained, for the next round."""
        for ledger in self.by_rank:
            ledger.trained[:0] = ledger.in_round
            ledger.in_round.clear()

    def settle(self, rank: int) -> int:
        """Settle the rank's frozen batches; returns their number."""
        ledger = self.by_rank[rank]
        count = sum(len(span) for _, span in ledger.in_round)
        for number, span in ledger.in_round:
            self._settle(self._get(number), [span])
        ledger.in_round.clear()
        return count

    def reopen_rank(self, rank: int, shares: Sequence[float], *, in_round: bool = True) -> None:
        """Reopen the unsettled batches of a dead rank.

        Args:
            shares: Each rank's share of the work from now on; 0 for this one.
            in_round: Include those in the round in progress, whose effect is lost.
        """
        ledger = self.by_rank[rank]
        lost = [*ledger.trained, *(ledger.in_round if in_round else ())]
        for number, span in lost:
            epoch = self._get(number)
            epoch.num_retrained += self.cuts.num_samples(span)
        for number, span in (*ledger.assigned, *lost):
            epoch = self._get(number)
            self._reopen(epoch, [span])
            if epoch.quotas is not None:
                epoch.quotas[rank] += len(span)
        for epoch in self.epochs:
            self._redistribute_quota(epoch, rank, shares)
        self.by_rank[rank] = RankLedger(in_round=[] if in_round else ledger.in_round)

    def leave_epoch(self, rank: int, number: int, shares: Sequence[float]) -> None:
        """Reopen the assigned batches of an epoch that a rank has left, and those of earlier ones
        in a step in progress; it receives no others.

        Args:
            number: The epoch; no effect if it has closed.
            shares: Each rank's share of the work.
        """
        ledger = self.by_rank[rank]
        for epoch in (each for each in self.epochs if each.epoch <= number):
            epoch.left.add(rank)
            for _, span in (each for each in ledger.assigned if each[0] == epoch.epoch):
                self._reopen(epoch, [span])
                if epoch.quotas is not None:
                    epoch.quotas[rank] += len(span)
            self._redistribute_quota(epoch, rank, shares)
        ledger.assigned = deque(each for each in ledger.assigned if each[0] > number)

    def end_short(self, epoch: Epoch) -> int:
        """Omit the open batches of an epoch; returns their number of samples."""
        omitted = sum(self.cuts.num_samples(span) for span in epoch.open.spans)
        epoch.num_omitted += len(epoch.open)
        epoch.open = BatchSet()
        return omitted

    def _redistribute_quota(self, epoch: Epoch, rank: int, shares: Sequence[float]) -> None:
        shares = [0.0 if r in epoch.left else share for r, share in enumerate(shares)]
        if epoch.quotas is None or self._ratios is None or not any(shares):
            return
        parts = split_by_ratio(epoch.quotas[rank], self._masked(self._ratios, shares))
        epoch.quotas[rank] = 0
        epoch.quotas = [q + part for q, part in zip(epoch.quotas, parts, strict=True)]

    def _get(self, number: int) -> Epoch:
        epoch = self.find(number)
        assert epoch is not None, "a batch outlived its epoch"
        return epoch

    def _reopen(self, epoch: Epoch, spans: Sequence[range]) -> None:
        epoch.open.put_back(spans)
        if self._batches_left is not None:
            self._batches_left += sum(len(span) for span in spans)

    def report_steps(self, rank: int, num_pieces: int) -> int:
        """Record pieces that a rank has trained under ``SYNC``; returns the number of batches that
        are settled by them.
        """
        spans = self.queue.report(rank, num_pieces)
        if spans:
            self._settle(self._get(self.queue.plans[0].epoch), spans)
        return sum(map(len, spans))

    def return_to(self, num_steps: int) -> Agreement | None:
        """After a death under ``SYNC``, settle exactly the batches in the steps made since the run
        began, and reopen those of later ones.
        """
        agreed = self.queue.agree(num_steps)
        if agreed is not None and (epoch := self.find(agreed.epoch)) is not None:
            self._settle(epoch, agreed.settled)
            self._settle(epoch, agreed.reverted, -1)
            self._reopen(epoch, agreed.reopened)
            epoch.num_retrained += agreed.num_retrained
        return agreed

    def _settle(self, epoch: Epoch, spans: Sequence[range], sign: int = 1) -> None:
        epoch.num_settled += sign * sum(map(len, spans))
        epoch.num_samples += sign * sum(map(self.cuts.num_samples, spans))


class BatchCuts:
    """Samples of ranges of the ledger, and batches of each rank's own size in them.

    Args:
        num_samples: Length of the data set.
        batch_size: Samples in a batch of the ledger.
        sizes: The size of each rank's batch, in batches of the ledger.

    Attributes:
        unequal: True if a rank's batches are not those of the ledger.
        min_batch: Minimum samples of a batch of ranks with unequal batch sizes. Batches are smaller
            only where a rank's own batch has two batches of the ledger, or one.
    """

    def __init__(self, num_samples: int, batch_size: int, sizes: Sequence[int]) -> None:
        self._num_samples = num_samples
        self.batch_size = batch_size
        self.sizes = tuple(sizes)
        self.unequal = any(size != 1 for size in sizes)
        self.min_batch = 1

    def num_samples(self, span: range) -> int:
        """Samples in consecutive batches of the ledger."""
        total = len(span) * self.batch_size
        if span and (excess := (span[-1] + 1) * self.batch_size - self._num_samples) > 0:
            total -= excess  # the epoch's last batch is short
        return total

    def bounds(self, span: range) -> tuple[int, int]:
        """Positions ``[start, stop)`` of these samples in the epoch's permutation."""
        start = span.start * self.batch_size
        return start, start + self.num_samples(span)

    def of_rank(
        self, rank: int, spans: Sequence[range]
    ) -> tuple[tuple[range, ...], tuple[tuple[int, int], ...]]:
        """Split ranges into batches of the rank's size.

        Returns:
            The number of each batch, which is that of its first batch in the ledger, and its
            samples. The last batch of a range may be short.
        """
        size = self.sizes[rank]
        parts = [span[i : i + size] for span in spans for i in range(0, len(span), size)]
        return tuple(span[::size] for span in spans), tuple(map(self.bounds, parts))

    def without_small(self, spans: Sequence[range], left: BatchSet, size: int) -> tuple[range, ...]:
        """Ranges taken for a rank, whose batches have :attr:`min_batch` samples, as has the rest:
        the last batch is put back if that is needed.

        Args:
            left: What is left of the epoch.
            size: The size of the rank's batch.
        """
        *others, last = spans
        parts = [part for span in others for part in self._evened(span, size)]
        rest = left.spans[:1]
        if rest and rest[0].start == last.stop and self._is_small(rest[0]):
            kept = self._evened(last[:-1], size)
            if kept and not self._is_small(_last_batch(kept[-1], size)):
                left.put_back([last[-1:]])
                return (*parts, *kept)
        return (*parts, *self._evened(last, size))

    def _evened(self, span: range, size: int) -> tuple[range, ...]:
        """A range whose last batch is not too small: the one before gives it a part."""
        num = len(_last_batch(span, size))
        if num < len(span) and self._is_small(span[-num:]):
            before, end = span[: -num - 1], span[-num - 1 :]
            if before and not self._is_small(_last_batch(before, size)):
                return before, end
        return (span,) if span else ()

    def _is_small(self, span: range) -> bool:
        """True if these batches of the ledger have too few samples for a batch of a rank."""
        return len(span) <= 1 and self.num_samples(span) < self.min_batch


@dataclass(slots=True)
class RankLedger:
    """The unsettled batches of one rank, oldest first, as ``(epoch, range of batches)``."""

    assigned: deque[tuple[int, range]] = field(default_factory=deque)
    trained: list[tuple[int, range]] = field(default_factory=list)
    in_round: list[tuple[int, range]] = field(default_factory=list)

    @property
    def num_assigned(self) -> int:
        return sum(len(span) for _, span in self.assigned)

    def of_epoch(self, epoch: int) -> list[range]:
        held = (*self.assigned, *self.trained, *self.in_round)
        return [span for number, span in held if number == epoch]

    def add_trained(self, epoch: int, span: range) -> None:
        """Record trained batches, merged with an adjacent range."""
        if self.trained:
            number, last = self.trained[-1]
            if number == epoch and last.stop == span.start:
                self.trained[-1] = (epoch, range(last.start, span.stop))
                return
        self.trained.append((epoch, span))


@dataclass(slots=True)
class Epoch:
    """One open epoch.

    Attributes:
        epoch: Its number, from 0.
        stats: Sums of the ranks' reports.
        quotas: Open batches reserved for each rank; ``None``: not reserved.
        num_retrained: Samples trained again after a death.
        divergence: Largest divergence of a rank in its rounds; ``None``: not measured.
        norm: Last measured norm of the parameters; ``None``: not measured.
        averaged: A round has made the average that closes it.
        granted: In a cluster, batches granted to this machine and not returned.
        num_elsewhere: In a cluster, batches settled by other machines.
        complete: In a cluster, all batches are settled by some machine.
        others: In a cluster, the sums of the other machines, once complete.
        left: Ranks that have left it before its end.
        num_omitted: Batches that were open once all ranks had left it.
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
    notified: set[int] = field(default_factory=set)
    averaged: bool = False
    granted: BatchSet | None = None
    num_elsewhere: int = 0
    complete: bool = True
    others: tuple[MachineStats, ...] = ()
    left: set[int] = field(default_factory=set)
    num_omitted: int = 0

    def count_elsewhere(self, consumed: Sequence[range]) -> int:
        """Count the batches settled by other machines, of those settled by any.

        Returns:
            Those that were not counted before.
        """
        assert self.granted is not None, "there are no other machines"
        others = BatchSet(consumed)
        others.remove(self.granted.spans)
        before, self.num_elsewhere = self.num_elsewhere, len(others)
        return self.num_elsewhere - before

    @property
    def settled(self) -> bool:
        """True if every batch is settled or omitted."""
        num_done = self.num_settled + self.num_elsewhere + self.num_omitted
        return self.complete and num_done == self.num_batches


def _last_batch(span: range, size: int) -> range:
    """The last batch of a range that is cut into batches of ``size``."""
    return span[(len(span) - 1) // size * size :]
