"""Checkpoints of the whole run: when one is due, and the consistent cut that it saves.

A checkpoint is a consistent cut: each rank's state between two steps, the average that contains
these steps, and the coordinator's state with exactly their batches counted. Where replicas are
averaged by rounds, the cut is a round whose replies carry the ranks' states. Under ``SYNC`` all
ranks reply between two plans, a single rank at its next step. Reports after a rank's reply are not
part of the cut: sums that they would change are copied when the reply arrives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator import messages as m
from coordinator.coordinator_checkpoint import RankCut, capture_run
from coordinator.epochs import EpochScheduler
from coordinator.messages import SAVE_ROUND, Average, Payload, SaveCheckpoint, SaveFailed
from coordinator.run_state import RunState
from coordinator.saved_run import SavedRun
from coordinator.splitting import BatchSet


class RunCheckpointer:
    """Takes consistent cuts and emits each as a :class:`~coordinator.messages.SaveCheckpoint`."""

    def __init__(self, run: RunState, epochs: EpochScheduler) -> None:
        self._run = run
        self._epochs = epochs
        self._tickets: list[int] = []
        self._cut: ConsistentCut | None = None
        self._num_cuts = 0
        self._periods_saved = self._periods
        self._saved_at: float | None = None
        self._saved_step = 0
        self._reserve_s = 0.0

    @property
    def _periods(self) -> int:
        every = self._run.config.save_every
        return 0 if every is None else len(self._run.outcome.metrics) // every

    @property
    def _due_within(self) -> bool:
        c, run = self._run.config, self._run
        oldest = run.ledger.oldest
        if self._saved_at is None or oldest is None or run.ledger.fully_trained(oldest):
            return False  # the epoch is about to close
        if c.save_every_s is not None and run.now - self._saved_at >= c.save_every_s:
            return True
        every = c.save_every_steps
        return every is not None and run.num_trained - self._saved_step >= every

    @property
    def due(self) -> bool:
        """True if a cut is due at the next opportunity."""
        return self._cut is None and (
            self._periods > self._periods_saved or bool(self._tickets) or self._due_within
        )

    @property
    def next_step(self) -> int | None:
        """Batches after which the next cut is due; ``None``: not known."""
        every = self._run.config.save_every_steps
        return None if every is None else self._saved_step + every

    def begin(self, now: float) -> None:
        """Start counting time and batches to the next save: training begins."""
        self._saved_at, self._saved_step = now, self._run.num_trained

    @property
    def is_collecting(self) -> bool:
        """True while replies of the ranks are outstanding."""
        return self._cut is not None and self._cut.run is None

    @property
    def final_checkpoint_due(self) -> bool:
        """True if the ranks' last states are saved as a checkpoint."""
        config = self._run.config
        return config.save_every is not None or config.granted or bool(self._tickets)

    def resumed(self) -> None:
        """Record that the periods up to a restored checkpoint are saved."""
        self._periods_saved = self._periods

    def request(self, ticket: int) -> None:
        if ticket != m.LOOP_TICKET or ticket not in self._tickets:
            self._tickets.append(ticket)

    def withdraw(self, ticket: int) -> None:
        """Withdraw a request, unless its checkpoint is in progress."""
        self._tickets = [t for t in self._tickets if t != ticket]

    def request_cluster_checkpoint(self, reserve_s: float) -> None:
        """Request this machine's part of a round between machines."""
        self._reserve_s = reserve_s
        self.request(m.CLUSTER_TICKET)

    @property
    def _reserve(self) -> int:
        """Batches that all ranks train in the requested time, and two more for each rank, so that
        none waits for the next grant.
        """
        seconds = self._run.elche.seconds_per_batch or ()
        live = [rank.rank for rank in self._run.live]
        speed = sum(1 / seconds[rank] for rank in live if seconds and seconds[rank] > 0)
        return math.ceil(speed * self._reserve_s) + 2 * len(live)

    def cancel(self) -> None:
        """Discard the cut in progress; its requests stay due."""
        self._cut = None

    def _begin(self, ranks: Sequence[int]) -> ConsistentCut:
        self._num_cuts += 1
        closes = self._periods > self._periods_saved
        self._cut = ConsistentCut(
            id=self._num_cuts,
            ranks=tuple(ranks),
            scheduled=closes or self._due_within,
            within=not closes,
            num_periods=self._periods,
            started_at=self._run.now,
            started_step=self._run.num_trained,
            tickets=tuple(self._tickets),
        )
        return self._cut

    def begin_round(self, ranks: Sequence[int]) -> None:
        """Start a cut with a round whose replies carry the ranks' states."""
        self._begin(ranks)

    def add_rank(self, rank: int, extra: m.Extra | None, payload: Payload | None = None) -> None:
        """Add a rank's part; all training in it has been reported.

        Args:
            extra: Its own state, or an error.
            payload: The average, from the rank that sends it.
        """
        cut = self._cut
        if cut is None or extra is None:
            return
        cut.cuts[rank] = RankCut.of(self._run, self._epochs.all_open(), rank)
        if isinstance(extra, Exception):
            cut.error = extra
        else:
            cut.extras[rank] = extra
        if payload is not None:
            cut.lead_payload = payload

    def commit(self, payload: Payload | None) -> None:
        """Complete the cut with its round.

        Args:
            payload: A copy of the average; ``None``: the lead sent it.
        """
        cut = self._cut
        if cut is None:
            return
        self._freeze(cut)
        self._emit(cut, cut.lead_payload if payload is None else payload)
        self._cut = None

    def request_states(self) -> None:
        """Request the state of every rank; under ``SYNC`` all are at the same step."""
        ranks = [rank.rank for rank in self._run.live]
        cut = self._begin(ranks)
        for rank in ranks:
            self._run.send(rank, m.TakeCheckpoint(id=cut.id))

    def on_captured(self, event: m.CapturedState) -> None:
        """Handle the state of a rank; its report has been recorded."""
        cut = self._cut
        if cut is None or event.id != cut.id or event.rank not in cut.ranks:
            return
        self.add_rank(event.rank, event.extra)
        cut.parts[event.rank] = event
        if len(cut.parts) < len(cut.ranks):
            return
        assert len({part.step for part in cut.parts.values()}) == 1, "ranks captured other steps"
        self._freeze(cut)
        parts = [cut.parts[rank] for rank in cut.ranks]
        weights = tuple(part.num_samples for part in parts)
        lead = parts[0].payload
        if len(parts) == 1 or not any(weights) or not (lead.buffers or lead.other_buffers):
            self._emit(cut, lead)
            self._cut = None
            return
        # The replicas' parameters are equal, their buffers are not.
        buffers = [
            Payload(
                params=(), buffers=part.payload.buffers, other_buffers=part.payload.other_buffers
            )
            for part in parts
        ]
        self._run.emit(
            Average(
                round=SAVE_ROUND,
                ranks=cut.ranks,
                payloads=tuple(buffers),
                weights=weights,
                keep=True,
            )
        )

    def on_averaged(self, event: m.Averaged) -> None:
        """Complete the cut with the average of the buffers."""
        cut = self._cut
        if cut is not None and cut.final:
            return  # of an earlier cut, discarded at the end of the run
        if cut is not None and cut.run is not None:
            kept, lead = event.kept, cut.parts[cut.ranks[0]].payload
            whole = None
            if kept is not None:
                whole = Payload(
                    params=lead.params, buffers=kept.buffers, other_buffers=kept.other_buffers
                )
            self._emit(cut, whole)
        self._cut = None

    def freeze_final(self, finals: Sequence[m.FinalSnapshot]) -> None:
        """Take the final cut, from these last states."""
        self._cut = None
        run = self._run
        if not finals or any(final.extra is None for final in finals):
            return
        if run.config.granted and m.CLUSTER_TICKET not in self._tickets:
            self._tickets.append(m.CLUSTER_TICKET)  # the cluster requires the trained batches
        used = {final.rank for final in finals}
        cut = self._begin(sorted(used))
        cut.scheduled, cut.final = run.config.save_every is not None, True
        for rank in run.ranks:
            if rank.rank in used:
                run.ledger.freeze(rank.rank)
                num_batches = run.ledger.settle(rank.rank)
                if not (run.alone or run.lockstep):
                    run.global_step += num_batches
            elif not run.lockstep:
                run.ledger.reopen_rank(rank.rank, run.elche.shares)
        for final in finals:
            self.add_rank(final.rank, final.extra)
        self._freeze(cut)

    def emit_final(self, payload: Payload | None) -> None:
        cut = self._cut
        if cut is not None and cut.run is not None and payload is not None:
            self._emit(cut, payload, final=True)
        self._cut = None

    def _freeze(self, cut: ConsistentCut) -> None:
        run = self._run
        cut.run = capture_run(run, self._epochs.closing(), self._epochs.elapsed_s, cut.cuts)

    def _emit(self, cut: ConsistentCut, payload: Payload | None, *, final: bool = False) -> None:
        assert cut.run is not None
        self._tickets = [t for t in self._tickets if t not in cut.tickets]
        self._periods_saved = cut.num_periods
        self._saved_at, self._saved_step = cut.started_at, cut.started_step
        kept: tuple[tuple[int, tuple[range, ...]], ...] = ()
        if m.CLUSTER_TICKET in cut.tickets and not final:
            self._run.ledger.revoke_open(self._reserve, self._run.elche.shares)
            kept = self._kept(cut.run)
        if cut.error is not None or payload is None:
            error = cut.error or RuntimeError("there was no memory for a copy of the average")
            self._run.emit(SaveFailed(error=error, tickets=cut.tickets))
            return
        self._run.emit(
            SaveCheckpoint(
                payload=payload,
                ranks=tuple(cut.extras[rank] for rank in sorted(cut.extras)),
                run=cut.run,
                scheduled=cut.scheduled,
                tickets=cut.tickets,
                within=cut.within and not final,
                final=final,
                kept=kept,
                reason=self._run.outcome.reason if final else "",
            )
        )

    def _kept(self, run: SavedRun) -> tuple[tuple[int, tuple[range, ...]], ...]:
        """The granted batches that are not in a cut, by epoch."""
        kept = []
        consumed = {epoch.epoch: epoch.consumed for epoch in run.epochs}
        for epoch in self._run.ledger.epochs:
            left = BatchSet(epoch.granted.spans if epoch.granted else ())
            left.remove(consumed.get(epoch.epoch, ()))
            kept.append((epoch.epoch, left.spans))
        return tuple(kept)


@dataclass(slots=True)
class ConsistentCut:
    """A checkpoint in progress; ``run`` is set once every rank has replied."""

    id: int
    ranks: tuple[int, ...]
    scheduled: bool
    within: bool
    num_periods: int
    started_at: float
    started_step: int
    tickets: tuple[int, ...]
    cuts: dict[int, RankCut] = field(default_factory=dict)
    extras: dict[int, Any] = field(default_factory=dict)
    parts: dict[int, m.CapturedState] = field(default_factory=dict)
    lead_payload: Payload | None = None
    run: SavedRun | None = None
    error: Exception | None = None
    final: bool = False
