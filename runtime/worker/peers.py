"""What the workers of one run know of each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.worker.group import Groups

if TYPE_CHECKING:
    from runtime.worker.worker import GpuWorker


@dataclass(slots=True)
class Peers:
    """Shared by the workers of a run in which ranks may die.

    Attributes:
        groups: Where the ranks that are left meet.
        replicas: The worker of each rank, once it is built. A rank reads another's state
            only while that one waits for it in the first meeting of a new group.
    """

    groups: Groups
    replicas: dict[int, GpuWorker] = field(default_factory=dict)
