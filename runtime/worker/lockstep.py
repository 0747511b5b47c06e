"""Progress of ranks in lockstep, and the agreed steps at which all of them stop or save."""

from __future__ import annotations

import threading
from collections.abc import Callable

from coordinator.messages import ApplyDelta


class LockstepProgress:
    """Counters of a ``SYNC`` run that have equal values on all ranks.

    Attributes:
        step: Optimizer steps since the start of the run. The last ones may still fail, until they
            are confirmed; see :class:`~runtime.worker.step.WorkerSteps`.
        buffer_samples: Samples of this rank since the last averaging of buffers.
        num_captured: Number of the last checkpoint capture of this rank.
        num_deltas: Number of the last delta applied by this rank.
        equal_step: The last step after which the replicas were compared and equal.
    """

    def __init__(self, agreement: LockstepAgreement | None = None) -> None:
        self._agreement = agreement or LockstepAgreement()
        self.step = 0
        self.num_syncs = 0
        self.buffer_samples = 0
        self.num_captured = 0
        self.num_deltas = 0
        self.equal_step = 0

    @property
    def epoch_starts(self) -> EpochStarts:
        """The epochs that the ranks have begun."""
        return self._agreement.epoch_starts

    @property
    def position(self) -> tuple[int, int]:
        """Comparable progress of a rank."""
        return self.step, self.num_syncs

    @property
    def num_uncompared(self) -> int:
        """Steps since the replicas were last compared."""
        return self.step - self.equal_step

    def stepped(self, num_samples: int, num_steps: int = 1) -> None:
        """Count steps made with the peers."""
        self.step += num_steps
        self.buffer_samples += num_samples

    def step_undone(self, num_samples: int, num_steps: int = 1) -> None:
        """Uncount the last steps, which have failed."""
        self.step -= num_steps
        self.buffer_samples -= num_samples

    def synced(self) -> None:
        """Count an averaging of the buffers."""
        self.num_syncs += 1
        self.buffer_samples = 0

    def compared(self) -> None:
        """Count a comparison of equal replicas, as an averaging: a peer without it is behind."""
        self.equal_step = self.step
        self.num_syncs += 1

    def propose_stop(self) -> None:
        """Propose that all ranks stop after the next step."""
        self._agreement.propose(self.step + 1)

    @property
    def stop_reached(self) -> bool:
        """True if the ranks have agreed to stop before the next step."""
        return self._agreement.reached(self.step)

    def propose_capture(self, capture: int) -> None:
        """Propose that all ranks capture their states after the next step."""
        self._agreement.propose_capture(capture, self.step + 1)

    def propose_delta(self, delta: ApplyDelta) -> None:
        """Propose that all ranks apply a delta after the next step."""
        self._agreement.propose_delta(delta, self.step + 1)

    @property
    def delta_reached(self) -> ApplyDelta | None:
        """The next delta, if the ranks have agreed to apply it before the next step."""
        proposed = self._agreement.delta_at(self.num_deltas + 1)
        return proposed[0] if proposed is not None and self.step >= proposed[1] else None

    def delta_applied(self, delta: ApplyDelta) -> None:
        """Count an applied delta, as a change of buffers: a peer without it is behind."""
        self.num_deltas = delta.id
        self.num_syncs += 1

    @property
    def capture_reached(self) -> int | None:
        """Number of the capture that the ranks have agreed to make before the next step, if any."""
        capture, step = self._agreement.capture_at
        return capture if capture > self.num_captured and self.step >= step else None

    def copy_from(self, other: LockstepProgress) -> None:
        """Copy the progress of a peer."""
        self.step, self.num_syncs = other.step, other.num_syncs
        self.buffer_samples = other.buffer_samples
        self.num_deltas = other.num_deltas
        self.equal_step = other.equal_step


class LockstepAgreement:
    """The steps before which all ranks in lockstep stop, capture their state or apply a delta.

    A rank that receives a stop before step ``s`` has not joined the reduction of ``s``, so no peer
    has passed it. If it proposes ``s + 1`` before it joins, all peers see the proposal before
    step ``s + 1``, because the reduction orders it before their next check. The first proposal
    counts.
    """

    def __init__(self) -> None:
        self.epoch_starts = EpochStarts()
        self._lock = threading.Lock()
        self._stop_at: int | None = None
        self._capture_at = (0, 0)
        self._deltas: dict[int, tuple[ApplyDelta, int]] = {}

    def propose(self, step: int) -> None:
        """Set the step before which to stop, unless one is set."""
        with self._lock:
            if self._stop_at is None:
                self._stop_at = step

    def reached(self, step: int) -> bool:
        """True if ``step`` must not begin."""
        return self._stop_at is not None and step >= self._stop_at

    def propose_capture(self, capture: int, step: int) -> None:
        """Set the step before which a capture is made, unless it or a later capture has one.

        Args:
            capture: Number of the capture in the run, from 1.
        """
        with self._lock:
            if capture > self._capture_at[0]:
                self._capture_at = (capture, step)

    def propose_delta(self, delta: ApplyDelta, step: int) -> None:
        """Set the step before which a delta is applied, unless it has one.

        Shifts of steps before the last are removed: all ranks have applied them, since they have
        joined the reduction of a later step.
        """
        with self._lock:
            for number in [n for n, (_, at) in self._deltas.items() if at < step - 1]:
                del self._deltas[number]
            self._deltas.setdefault(delta.id, (delta, step))

    def delta_at(self, number: int) -> tuple[ApplyDelta, int] | None:
        """A delta and its step; ``None`` if it has none."""
        return self._deltas.get(number)

    @property
    def capture_at(self) -> tuple[int, int]:
        """Number of the last proposed capture (0: none), and its step."""
        return self._capture_at


class EpochStarts:
    """The epochs that ranks in lockstep have begun.

    What ``epoch_fn`` changes on one rank may decide what another one reads, so that no rank reads
    an epoch before all have called it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[int, int] = {}
        self._wake: dict[int, Callable[[], None]] = {}

    def join(self, rank: int, wake: Callable[[], None]) -> None:
        """Wait for a rank from here on; ``wake`` is called when a rank begins or leaves."""
        with self._lock:
            self._begun[rank], self._wake[rank] = -1, wake

    def begin(self, rank: int, epoch: int) -> None:
        """A rank has called ``epoch_fn``."""
        with self._lock:
            self._begun[rank] = epoch
            others = list(self._wake.values())
        for wake in others:
            wake()

    def leave(self, rank: int) -> None:
        """A rank has died or ended. Idempotent."""
        with self._lock:
            self._begun.pop(rank, None)
            self._wake.pop(rank, None)
            others = list(self._wake.values())
        for wake in others:
            wake()

    def all_begun(self, epoch: int) -> bool:
        """True if every rank has begun an epoch or a later one."""
        with self._lock:
            return all(begun >= epoch for begun in self._begun.values())
