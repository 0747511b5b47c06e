"""How a run ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from coordinator.contents import Payload
from coordinator.metrics import EpochMetrics


class Phase(Enum):
    """Where the run stands."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    LEAVING = "leaving"
    AVERAGING = "averaging"
    FAILING = "failing"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run failed: a worker's exception, or an error of the machine's own.

    ``rank`` is -1 where no single rank is to blame.
    """

    error: BaseException
    rank: int = -1
    epoch: int = 0
    step: int = 0


@dataclass(slots=True)
class Outcome:
    """The end of a run.

    Attributes:
        payload: The final average.
        metrics: One entry for each closed epoch.
        failure: Why there is no result.
        failures: Ranks that died while the others went on.
        stopped: Whether the run was ended before its time.
        missing: Ranks that did not leave in time after a failure.
    """

    payload: Payload | None = None
    metrics: list[EpochMetrics] = field(default_factory=list)
    failure: Failure | None = None
    failures: list[Failure] = field(default_factory=list)
    stopped: bool = False
    missing: tuple[int, ...] = ()
