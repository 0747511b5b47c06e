"""Progress of ranks in lockstep, and the steps at which all of them stop or save."""

from __future__ import annotations

import threading

from coordinator.messages import Shift


class LockstepProgress:
    """Counts what every rank of a ``SYNC`` run does alike.

    Attributes:
        step: Optimizer steps made since the start of the run. The last ones may still turn out to
            have failed, until the worker has looked; see :class:`~runtime.worker.step.WorkerSteps`.
        num_syncs: Times the buffers were averaged.
        buffer_samples: Samples that this rank's buffers have seen since then.
        num_captured: The last capture that this rank has made.
        num_shifts: The last shift that this rank has taken.
    """

    def __init__(self, agreement: LockstepAgreement | None = None) -> None:
        self._agreement = agreement or LockstepAgreement()
        self.step = 0
        self.num_syncs = 0
        self.buffer_samples = 0
        self.num_captured = 0
        self.num_shifts = 0

    @property
    def position(self) -> tuple[int, int]:
        """Compares how far ranks have come."""
        return self.step, self.num_syncs

    def stepped(self, num_samples: int) -> None:
        """A step was made with the peers."""
        self.step += 1
        self.buffer_samples += num_samples

    def step_undone(self, num_samples: int) -> None:
        """The last step has failed."""
        self.step -= 1
        self.buffer_samples -= num_samples

    def synced(self) -> None:
        """The buffers were averaged with the peers."""
        self.num_syncs += 1
        self.buffer_samples = 0

    def propose_stop(self) -> None:
        """Have all ranks stop after the next step."""
        self._agreement.propose(self.step + 1)

    @property
    def stop_reached(self) -> bool:
        """Whether the ranks have agreed to stop before the next step."""
        return self._agreement.reached(self.step)

    def propose_capture(self, capture: int) -> None:
        """Have all ranks take their states after the next step."""
        self._agreement.propose_capture(capture, self.step + 1)

    def propose_shift(self, shift: Shift) -> None:
        """Have all ranks take a shift after the next step."""
        self._agreement.propose_shift(shift, self.step + 1)

    @property
    def shift_reached(self) -> Shift | None:
        """The next shift, if the ranks have agreed to take it before the next step."""
        named = self._agreement.shift_at(self.num_shifts + 1)
        return named[0] if named is not None and self.step >= named[1] else None

    def shifted(self, shift: Shift) -> None:
        """A shift was taken: a peer that has not is behind, as after a change of buffers."""
        self.num_shifts = shift.id
        self.num_syncs += 1

    @property
    def capture_reached(self) -> int | None:
        """The capture that the ranks have agreed to make before the next step, if any."""
        capture, step = self._agreement.capture_at
        return capture if capture > self.num_captured and self.step >= step else None

    def copy_from(self, other: LockstepProgress) -> None:
        """Stand where a peer stands."""
        self.step, self.num_syncs = other.step, other.num_syncs
        self.buffer_samples = other.buffer_samples
        self.num_shifts = other.num_shifts


class LockstepAgreement:
    """The global steps before which every rank of a lockstep run stops, or takes its state.

    A rank that is asked to stop at the edge of step ``s`` has not joined the reduction of
    ``s``, so no peer can have passed it: naming ``s + 1`` before joining is seen by all
    of them, because the reduction orders it before their next look. The first name counts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop_at: int | None = None
        self._capture_at = (0, 0)
        self._shifts: dict[int, tuple[Shift, int]] = {}

    def propose(self, step: int) -> None:
        """Name the step before which to stop, unless one is named already."""
        with self._lock:
            if self._stop_at is None:
                self._stop_at = step

    def reached(self, step: int) -> bool:
        """Whether ``step`` must not begin."""
        return self._stop_at is not None and step >= self._stop_at

    def propose_capture(self, capture: int, step: int) -> None:
        """Name the step before which a capture is made, unless that or a later one is named.

        Args:
            capture: Counts the captures of a run, from 1.
            step: The step.
        """
        with self._lock:
            if capture > self._capture_at[0]:
                self._capture_at = (capture, step)

    def propose_shift(self, shift: Shift, step: int) -> None:
        """Name the step before which a shift is taken, unless one is named already.

        Those that were named for a step before the last are taken: every rank has joined the
        reduction of the step after them.
        """
        with self._lock:
            for number in [n for n, (_, at) in self._shifts.items() if at < step - 1]:
                del self._shifts[number]
            self._shifts.setdefault(shift.id, (shift, step))

    def shift_at(self, number: int) -> tuple[Shift, int] | None:
        """A shift and its step, if one was named."""
        return self._shifts.get(number)

    @property
    def capture_at(self) -> tuple[int, int]:
        """The last capture that was named, and its step; 0: none yet."""
        return self._capture_at
