"""Checkpoints of the whole run: when one is due, and what goes into it.

A checkpoint is a cut through the run: each rank's own state between two steps, the
average that these steps are in, and the machine's state with exactly their batches
counted. Where replicas are averaged by rounds, the cut is a round, whose answers carry
the ranks' own states. Under ``SYNC`` all ranks answer at the same step, a single rank at
its next. What a rank tells after its part of the cut is not in it: the sums that a later
report would change are noted when the rank's part arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator import messages as m
from coordinator.commands import SAVE_ROUND, Average, SaveCheckpoint, SaveFailed
from coordinator.contents import Payload
from coordinator.epochs import Epochs
from coordinator.run_state import Note, capture_run
from coordinator.state import Core


@dataclass(slots=True)
class _Cut:
    """A checkpoint in the making; ``run`` is set once every rank's part is there."""

    id: int
    ranks: tuple[int, ...]
    scheduled: bool
    num_periods: int
    tickets: tuple[int, ...]
    notes: dict[int, Note] = field(default_factory=dict)
    extras: dict[int, dict[str, Any]] = field(default_factory=dict)
    parts: dict[int, m.Captured] = field(default_factory=dict)
    lead_payload: Payload | None = None
    step: int | None = None
    run: dict[str, Any] | None = None
    error: Exception | None = None
    epoch: int = 0
    global_step: int = 0


class Saving:
    """Makes cuts and turns each into one :class:`~coordinator.commands.SaveCheckpoint`."""

    def __init__(self, core: Core, epochs: Epochs) -> None:
        self._core = core
        self._epochs = epochs
        self._tickets: list[int] = []
        self._cut: _Cut | None = None
        self._num_cuts = 0
        self._periods_saved = self._periods

    # -- when ----------------------------------------------------------------------

    @property
    def _periods(self) -> int:
        every = self._core.config.save_every
        return 0 if every is None else len(self._core.outcome.metrics) // every

    @property
    def due(self) -> bool:
        """Whether a cut is to be made at the next opportunity."""
        return self._cut is None and (self._periods > self._periods_saved or bool(self._tickets))

    @property
    def asking(self) -> bool:
        """Whether the ranks are on their way to a cut."""
        return self._cut is not None and self._cut.run is None

    @property
    def wanted_at_end(self) -> bool:
        """Whether the last states of the ranks shall make a checkpoint."""
        return self._core.config.save_every is not None or bool(self._tickets)

    def resumed(self) -> None:
        """The machine goes on from a checkpoint: its periods are saved."""
        self._periods_saved = self._periods

    def request(self, ticket: int) -> None:
        """Somebody asked for a checkpoint."""
        self._tickets.append(ticket)

    def cancel(self) -> None:
        """The cut in the making is void; what it was made for stays due."""
        self._cut = None

    def _begin(self, ranks: Sequence[int]) -> _Cut:
        self._num_cuts += 1
        self._cut = _Cut(
            id=self._num_cuts,
            ranks=tuple(ranks),
            scheduled=self._periods > self._periods_saved,
            num_periods=self._periods,
            tickets=tuple(self._tickets),
        )
        return self._cut

    # -- in a round ------------------------------------------------------------------

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
        cut.notes[rank] = Note.of(self._core, self._epochs.all_open(), rank)
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

    # -- without rounds ----------------------------------------------------------------

    def ask(self) -> None:
        """Have every rank send its state, at the same step."""
        ranks = [rank.rank for rank in self._core.live]
        cut = self._begin(ranks)
        for rank in ranks:
            self._core.send(rank, m.Capture(id=cut.id))

    def on_captured(self, event: m.Captured) -> None:
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
        if len(parts) == 1 or not any(weights) or not (lead.buffers or lead.taken):
            self._emit(cut, lead)
            self._cut = None
            return
        # The replicas' parameters are the same; their buffers are not.
        buffers = [
            Payload(params=(), buffers=part.payload.buffers, taken=part.payload.taken)
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
                whole = Payload(params=lead.params, buffers=kept.buffers, taken=kept.taken)
            self._emit(cut, whole)
        self._cut = None

    # -- at the end ----------------------------------------------------------------------

    def freeze_end(self, finals: Sequence[m.FinalSnapshot]) -> None:
        """All ranks have left, and the result is made of these states."""
        self._cut = None
        core = self._core
        if not finals or any(final.extra is None for final in finals):
            return
        used = {final.rank for final in finals}
        cut = self._begin(sorted(used))
        cut.scheduled = core.config.save_every is not None
        for rank in core.ranks:
            if rank.rank in used:
                core.pool.freeze(rank.rank)
                core.pool.settle(rank.rank)
                if not (core.alone or core.lockstep):
                    core.global_step += rank.since_round
            elif not core.lockstep:
                core.pool.take_back(rank.rank, core.elche.shares)
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

    # -- what --------------------------------------------------------------------------

    def _freeze(self, cut: _Cut) -> None:
        """The machine's state at the cut; nothing that comes later shows in it."""
        core = self._core
        cut.run = capture_run(
            core, self._epochs.closing(), self._epochs.elapsed_s, cut.notes, cut.step
        )
        cut.epoch = len(core.outcome.metrics)
        cut.global_step = cut.run["global_step"]

    def _emit(self, cut: _Cut, payload: Payload | None, *, final: bool = False) -> None:
        assert cut.run is not None
        self._tickets = [t for t in self._tickets if t not in cut.tickets]
        self._periods_saved = cut.num_periods
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
                final=final,
            )
        )
