"""Checkpoints of the whole run: when one is due, and what goes into it.

A checkpoint is a cut through the run: each rank's own state between two steps, the
average that these steps are in, and the machine's state with exactly their batches
counted. Where replicas are averaged by rounds, the cut is a round, whose answers carry
the ranks' own states. Under ``SYNC`` all ranks answer at the same step, a single rank at
its next. What a rank tells after its part of the cut is not in it: the sums that a later
report would change are noted when the rank's part arrives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator import messages as m
from coordinator.epochs import EpochScheduler
from coordinator.messages import SAVE_ROUND, Average, Payload, SaveCheckpoint, SaveFailed
from coordinator.run_state import RankCut, capture_run
from coordinator.state import Core


class RunCheckpointer:
    """Makes cuts and turns each into one :class:`~coordinator.messages.SaveCheckpoint`."""

    def __init__(self, core: Core, epochs: EpochScheduler) -> None:
        self._core = core
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
        every = self._core.config.save_every
        return 0 if every is None else len(self._core.outcome.metrics) // every

    @property
    def _due_within(self) -> bool:
        """Whether the time or the batches between two saves within an epoch are over."""
        c, core = self._core.config, self._core
        oldest = core.ledger.oldest
        if self._saved_at is None or oldest is None or core.ledger.fully_trained(oldest):
            return False  # the end of an epoch is near
        if c.save_every_s is not None and core.now - self._saved_at >= c.save_every_s:
            return True
        every = c.save_every_steps
        return every is not None and core.num_trained - self._saved_step >= every

    @property
    def due(self) -> bool:
        """Whether a cut is to be made at the next opportunity."""
        return self._cut is None and (
            self._periods > self._periods_saved or bool(self._tickets) or self._due_within
        )

    def begin(self, now: float) -> None:
        """Training begins: the time and the batches until the next save count from here."""
        self._saved_at, self._saved_step = now, self._core.num_trained

    @property
    def asking(self) -> bool:
        """Whether the ranks are on their way to a cut."""
        return self._cut is not None and self._cut.run is None

    @property
    def final_checkpoint_due(self) -> bool:
        """Whether the last states of the ranks shall make a checkpoint."""
        config = self._core.config
        return config.save_every is not None or config.granted or bool(self._tickets)

    def resumed(self) -> None:
        """The machine goes on from a checkpoint: its periods are saved."""
        self._periods_saved = self._periods

    def request(self, ticket: int) -> None:
        """Somebody asked for a checkpoint."""
        self._tickets.append(ticket)

    def request_cluster_checkpoint(self, reserve_s: float) -> None:
        """The cluster asks for this machine's part of a round."""
        self._reserve_s = reserve_s
        self.request(m.CLUSTER_TICKET)

    @property
    def _reserve(self) -> int:
        """Batches that all ranks together train in the time that was asked for, and two more
        for each, so that none waits for the next grant."""
        seconds = self._core.elche.seconds_per_batch or ()
        live = [rank.rank for rank in self._core.live]
        speed = sum(1 / seconds[rank] for rank in live if seconds and seconds[rank] > 0)
        return math.ceil(speed * self._reserve_s) + 2 * len(live)

    def cancel(self) -> None:
        """The cut in the making is void; what it was made for stays due."""
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
            began_at=self._core.now,
            began_step=self._core.num_trained,
            tickets=tuple(self._tickets),
        )
        return self._cut

    def begin_round(self, ranks: Sequence[int]) -> None:
        """A round begins whose answers carry the ranks' own states."""
        self._begin(ranks)

    def note(self, rank: int, extra: m.Extra | None, payload: Payload | None = None) -> None:
        """A rank's part has come, with everything told that is in it.

        Args:
            rank: The rank.
            extra: Its own state.
            payload: The average, if this rank is the one that sends it.
        """
        cut = self._cut
        if cut is None or extra is None:
            return
        cut.notes[rank] = RankCut.of(self._core, self._epochs.all_open(), rank)
        if isinstance(extra, Exception):
            cut.error = extra
        else:
            cut.extras[rank] = extra
        if payload is not None:
            cut.lead_payload = payload

    def commit(self, payload: Payload | None) -> None:
        """The round has settled what is in it.

        Args:
            payload: A copy of the average; ``None``: the lead has sent it.
        """
        cut = self._cut
        if cut is None:
            return
        self._freeze(cut)
        self._emit(cut, cut.lead_payload if payload is None else payload)
        self._cut = None

    def ask(self) -> None:
        """Have every rank send its state, at the same step."""
        ranks = [rank.rank for rank in self._core.live]
        cut = self._begin(ranks)
        for rank in ranks:
            self._core.send(rank, m.TakeCheckpoint(id=cut.id))

    def on_captured(self, event: m.CapturedState) -> None:
        """A rank has sent its state; its report was taken in before."""
        cut = self._cut
        if cut is None or event.id != cut.id or event.rank not in cut.ranks:
            return
        self.note(event.rank, event.extra)
        cut.parts[event.rank] = event
        if len(cut.parts) < len(cut.ranks):
            return
        cut.step = event.step
        assert len({part.step for part in cut.parts.values()}) == 1, "ranks captured other steps"
        self._freeze(cut)
        parts = [cut.parts[rank] for rank in cut.ranks]
        weights = tuple(part.num_samples for part in parts)
        lead = parts[0].payload
        if len(parts) == 1 or not any(weights) or not (lead.buffers or lead.other_buffers):
            self._emit(cut, lead)
            self._cut = None
            return
        # The replicas' parameters are the same; their buffers are not.
        buffers = [
            Payload(
                params=(), buffers=part.payload.buffers, other_buffers=part.payload.other_buffers
            )
            for part in parts
        ]
        self._core.out.append(
            Average(
                round=SAVE_ROUND,
                ranks=cut.ranks,
                payloads=tuple(buffers),
                weights=weights,
                keep=True,
            )
        )

    def on_averaged(self, event: m.Averaged) -> None:
        """The average of the buffers is there, or could not be computed."""
        cut = self._cut
        if cut is not None and cut.run is not None:
            kept, lead = event.kept, cut.parts[cut.ranks[0]].payload
            whole = None
            if kept is not None:
                whole = Payload(
                    params=lead.params, buffers=kept.buffers, other_buffers=kept.other_buffers
                )
            self._emit(cut, whole)
        self._cut = None

    def freeze_end(self, finals: Sequence[m.FinalSnapshot]) -> None:
        """All ranks have left, and the result is made of these states."""
        self._cut = None
        core = self._core
        if not finals or any(final.extra is None for final in finals):
            return
        if core.config.granted and m.CLUSTER_TICKET not in self._tickets:
            self._tickets.append(m.CLUSTER_TICKET)  # the cluster wants to know what was trained
        used = {final.rank for final in finals}
        cut = self._begin(sorted(used))
        cut.scheduled = core.config.save_every is not None
        for rank in core.ranks:
            if rank.rank in used:
                core.ledger.freeze(rank.rank)
                num_batches = core.ledger.settle(rank.rank)
                if not (core.alone or core.lockstep):
                    core.global_step += num_batches
            elif not core.lockstep:
                core.ledger.take_back(rank.rank, core.elche.shares)
        for final in finals:
            self.note(final.rank, final.extra)
        cut.step = finals[0].step if core.lockstep else None
        self._freeze(cut)

    def emit_end(self, payload: Payload | None) -> None:
        """The result is there."""
        cut = self._cut
        if cut is not None and cut.run is not None and payload is not None:
            self._emit(cut, payload, final=True)
        self._cut = None

    def _freeze(self, cut: ConsistentCut) -> None:
        """The machine's state at the cut; nothing that comes later shows in it."""
        core = self._core
        cut.run = capture_run(
            core, self._epochs.closing(), self._epochs.elapsed_s, cut.notes, cut.step
        )
        cut.epoch = len(core.outcome.metrics)
        cut.global_step = cut.run["global_step"]

    def _emit(self, cut: ConsistentCut, payload: Payload | None, *, final: bool = False) -> None:
        assert cut.run is not None
        self._tickets = [t for t in self._tickets if t not in cut.tickets]
        self._periods_saved = cut.num_periods
        self._saved_at, self._saved_step = cut.began_at, cut.began_step
        returned: tuple[tuple[int, tuple[range, ...]], ...] = ()
        if m.CLUSTER_TICKET in cut.tickets:
            returned = self._core.ledger.give_back(self._reserve, self._core.elche.shares)
        if cut.error is not None or payload is None:
            error = cut.error or RuntimeError("there was no memory for a copy of the average")
            self._core.out.append(SaveFailed(error=error, tickets=cut.tickets))
            return
        self._core.out.append(
            SaveCheckpoint(
                payload=payload,
                ranks=tuple(cut.extras[rank] for rank in sorted(cut.extras)),
                run=cut.run,
                epoch=cut.epoch,
                global_step=cut.global_step,
                scheduled=cut.scheduled,
                tickets=cut.tickets,
                within=cut.within and not final,
                final=final,
                returned=returned,
            )
        )


@dataclass(slots=True)
class ConsistentCut:
    """A checkpoint in the making; ``run`` is set once every rank's part is there."""

    id: int
    ranks: tuple[int, ...]
    scheduled: bool
    within: bool
    num_periods: int
    began_at: float
    began_step: int
    tickets: tuple[int, ...]
    notes: dict[int, RankCut] = field(default_factory=dict)
    extras: dict[int, dict[str, Any]] = field(default_factory=dict)
    parts: dict[int, m.CapturedState] = field(default_factory=dict)
    lead_payload: Payload | None = None
    step: int | None = None
    run: dict[str, Any] | None = None
    error: Exception | None = None
    epoch: int = 0
    global_step: int = 0
