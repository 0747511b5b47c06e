"""What a run has to do with its timeline, if it has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from coordinator.machine import Coordinator
from coordinator.service import Service
from runtime.config import TrainConfig
from runtime.timeline.summary import RunFacts
from runtime.worker.recorded import RecordedWorker
from runtime.worker.worker import GpuWorker


class Recording:
    """Ties a run to its timeline; without one, every call does nothing.

    Args:
        config: Settings of the run.

    Raises:
        ValueError: The timeline has recorded another run.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._timeline = config.timeline
        if self._timeline is not None:
            self._timeline.require_unused()

    def begin(
        self,
        devices: Sequence[torch.device],
        num_samples: int,
        backend: tuple[str, str],
        machine: Coordinator,
        service: Service,
    ) -> None:
        """The run begins; its threads have not started.

        Args:
            devices: Of each rank.
            num_samples: Length of the data set.
            backend: Its name, and why it was chosen.
            machine: The coordinator.
            service: Shows the timeline what the coordinator does.
        """
        c = self._config
        if self._timeline is None:
            return
        facts = RunFacts(
            devices=tuple(str(device) for device in devices),
            policy=c.policy.name,
            backend=backend[0],
            backend_reason=backend[1],
            num_epochs=c.num_epochs or 0,
            batch_size=c.batch_size or 0,
            num_samples=num_samples,
        )
        service.observe(self._timeline.begin(facts, devices, machine).observe)

    def worker_class(self, rank: int) -> Callable[..., GpuWorker]:
        """What to make the worker of a rank with."""
        if self._timeline is None:
            return GpuWorker
        return partial(RecordedWorker, self._timeline.lane(rank))

    def built(self, worker: GpuWorker) -> None:
        """A worker has built its replica."""
        if self._timeline is not None and worker.rank == 0:
            self._timeline.built(worker.model)

    def left(self, rank: int) -> None:
        """The thread of a rank is about to end; called in it."""
        if self._timeline is not None:
            self._timeline.lane(rank).close()

    def finish(self, *, stopped: bool, error: BaseException | None) -> None:
        """The run is over."""
        if self._timeline is not None:
            self._timeline.finish(stopped=stopped, error=error)
