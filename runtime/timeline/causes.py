"""What a rank's time goes to."""

from __future__ import annotations

from enum import IntEnum


class Cause(IntEnum):
    """What a rank is doing; at each moment it is exactly one of these.

    On a CUDA device these are the times of the host: ``COMPUTE`` is the time in which the
    worker gives its device work or waits because it is too far ahead of it.
    """

    UNATTRIBUTED = 0
    """In none of the parts of its life that have a name."""
    STARTUP = 1
    """Building the replica, and waiting for the others to have built theirs."""
    COMPUTE = 2
    """Forward, backward and the optimizer's step, and capturing them as a graph."""
    DATA = 3
    """Waiting for a batch, or reading it where that is done in the worker's thread."""
    SYNC = 4
    """Waiting for the other ranks to join a collective."""
    PARKED = 5
    """Throttled, because it is too far ahead of the others."""
    IDLE = 6
    """No plan, because nothing is left to train for now."""
    AVERAGING = 7
    """Copying parameters and exchanging them or gradients."""
    CALLBACKS = 8
    """``epoch_fn``, ``eval_fn``, and checkpoints: ``checkpoint_fn`` and copies of the state."""
    CONTROL = 9
    """Answering messages, reporting, and the loop between the steps."""
    ENDING = 10
    """The final snapshot and leaving."""
    GONE = 11
    """The rank has ended, and the run goes on."""

    @property
    def label(self) -> str:
        """As tables and pages name it."""
        return self.name.lower()


NUM_CAUSES = len(Cause)

# Plain numbers, which is all that a worker's thread handles: members of an enumeration cost it
# several times as much, and both kinds at one place undo what the interpreter specialises.
UNATTRIBUTED = int(Cause.UNATTRIBUTED)
STARTUP = int(Cause.STARTUP)
COMPUTE = int(Cause.COMPUTE)
DATA = int(Cause.DATA)
SYNC = int(Cause.SYNC)
PARKED = int(Cause.PARKED)
IDLE = int(Cause.IDLE)
AVERAGING = int(Cause.AVERAGING)
CALLBACKS = int(Cause.CALLBACKS)
CONTROL = int(Cause.CONTROL)
ENDING = int(Cause.ENDING)
GONE = int(Cause.GONE)
