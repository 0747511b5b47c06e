"""RunPeers: the objects that the workers of a run share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from runtime.checkpoint.resume import ResumePoint
from runtime.device.launch_load import LaunchLoad
from runtime.evaluation.shared_evaluation import SharedEvaluations
from runtime.evaluation.validation_data import ValidationData
from runtime.replica.build import BuildOrder
from runtime.replica.graphs import GraphFallbacks
from runtime.worker.collective_groups import CollectiveGroups
from runtime.worker.lockstep import EpochStarts
from runtime.worker.meetings import LoopPeers
from runtime.worker.replica import WorkerReplica


@dataclass(slots=True, kw_only=True)
class RunPeers:
    """Objects shared by the workers of a run; by default those of a standalone worker.

    Attributes:
        order: The order in which the workers build their replicas.
        groups: Connects a new group of ranks after a death; ``None``: there is none.
        replicas: The replica of each rank, once its worker is built. A rank reads another's state
            only while that waits for it in the first barrier of a new group.
        first_batch: Reads the first batch of a worker, for models with lazy layers.
        resume: The state of an earlier run, which this one continues; ``None`` after the build.
        starts: In lockstep, the epochs that the ranks have begun.
        fallbacks: Records what is not captured.
        launch_load: Receives samples of launch times.
        evaluations: Evaluations that the workers do together.
        validation: The validation set; ``None``: there is none.
        loop: Agreement of the bodies of own loops; ``None``: there is one rank.
    """

    order: BuildOrder = field(default_factory=partial(BuildOrder, standalone=True))
    groups: CollectiveGroups | None = None
    replicas: dict[int, WorkerReplica] = field(default_factory=dict)
    first_batch: Callable[[Any], Any] | None = None
    resume: ResumePoint | None = None
    starts: EpochStarts = field(default_factory=EpochStarts)
    fallbacks: GraphFallbacks = field(default_factory=GraphFallbacks)
    launch_load: LaunchLoad | None = None
    evaluations: SharedEvaluations = field(default_factory=SharedEvaluations)
    validation: ValidationData | None = None
    loop: LoopPeers | None = None
