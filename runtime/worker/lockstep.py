"""Where a rank stands in a lockstep run."""

from __future__ import annotations

from runtime.worker.agreement import StopAgreement


class Lockstep:
    """Counts what every rank of a ``SYNC`` run does alike.

    Attributes:
        step: Optimizer steps made since the start of the run.
        num_syncs: Times the buffers were averaged.
        buffer_samples: Samples that this rank's buffers have seen since then.
        num_captured: The last capture that this rank has made.
    """

    def __init__(self, agreement: StopAgreement | None = None) -> None:
        self._agreement = agreement or StopAgreement()
        self.step = 0
        self.num_syncs = 0
        self.buffer_samples = 0
        self.num_captured = 0

    @property
    def standing(self) -> tuple[int, int]:
        """Compares how far ranks have come."""
        return self.step, self.num_syncs

    def stepped(self, num_samples: int) -> None:
        """A step was made with the peers."""
        self.step += 1
        self.buffer_samples += num_samples

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

    @property
    def capture_reached(self) -> int | None:
        """The capture that the ranks have agreed to make before the next step, if any."""
        capture, step = self._agreement.capture_at
        return capture if capture > self.num_captured and self.step >= step else None

    def copy_from(self, other: Lockstep) -> None:
        """Stand where a peer stands."""
        self.step, self.num_syncs = other.step, other.num_syncs
        self.buffer_samples = other.buffer_samples
