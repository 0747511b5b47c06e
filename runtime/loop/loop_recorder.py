"""Records a loop's work on a timeline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.core.nested import flatten, num_rows
from runtime.loop.rank_threads import TaskOutcome
from runtime.timeline.events import AVERAGING, COMPUTE, IDLE, SYNC, Kind
from runtime.timeline.rank_lane import RankLane
from runtime.timeline.summary import RunFacts
from runtime.timeline.timeline import Timeline

_TRAINING = {"forward", "backward", "accumulate", "step"}


class LoopRecorder:
    """Records a loop's work on a timeline; without one, every call has no effect.

    Not thread-safe. Replicas are timed in their own threads, and recorded here once all are done.
    So a rank's wait for its peers is known: from its own end, or from its arrival at a reduction,
    until the arrival of the last rank. Between two calls of the module a replica is idle.

    Args:
        timeline: The timeline; ``None``: nothing is recorded.
    """

    def __init__(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        self._lanes: list[RankLane] = []
        self._sizes: list[list[int]] = []
        self.step = 0

    @property
    def enabled(self) -> bool:
        """True if anything is recorded."""
        return self._timeline is not None

    def begin(self, devices: Sequence[torch.device], backend: str, reason: str) -> None:
        """Start the recording, before the replicas are built.

        Raises:
            ValueError: The timeline has recorded another run.
        """
        if self._timeline is None:
            return
        facts = RunFacts(
            devices=tuple(map(str, devices)),
            policy="own loop",
            backend=backend,
            backend_reason=reason,
        )
        self._timeline.begin(facts, devices, None)
        self._lanes = [self._timeline.lane(rank) for rank in range(len(devices))]
        self._sizes = [[] for _ in devices]

    def built(self, model: nn.Module) -> None:
        if self._timeline is not None:
            self._timeline.built(model)
            for lane in self._lanes:
                lane.enter(IDLE)

    def finish(self, error: BaseException | None = None) -> None:
        """End the recording. Idempotent."""
        if self._timeline is not None:
            for lane in self._lanes:
                lane.close()
            self._timeline.finish(stopped=False, error=error)
            self._timeline = None

    def record_tasks(self, operation: str, outcomes: Sequence[TaskOutcome]) -> None:
        """Record one task per rank."""
        if self._timeline is None or operation not in _TRAINING:
            return
        spans = {r: o for r, o in enumerate(outcomes) if o.end_s and o.error is None}
        if not spans:
            return
        last_s = max(outcome.end_s for outcome in spans.values())
        for rank, outcome in spans.items():
            self._enter(rank, COMPUTE, outcome.start_s)
            self._enter(rank, SYNC, outcome.end_s)
            self._enter(rank, IDLE, last_s)
            self._lanes[rank].record(
                Kind.PHASE, outcome.start_s, self.step, operation, end=outcome.end_s
            )
        if operation == "step":
            self._end_step(spans)

    def record_reductions(self, spans_s: Iterable[tuple[float, float]]) -> None:
        """Record a reduction between two tasks: its start and end on each rank's host."""
        if self._timeline is None:
            return
        for rank, (start_s, end_s) in enumerate(spans_s):
            self._enter(rank, AVERAGING, start_s)
            self._enter(rank, IDLE, end_s)
            self._lanes[rank].record(Kind.AVERAGING, start_s, self.step, "gradients", end=end_s)
        self._timeline.count_averaging()

    def record_batches(self, rank: int, batches: Sequence[Any]) -> None:
        """Add batches, or shard sizes, to a rank's next step."""
        if self._timeline is not None:
            self._sizes[rank] += [num_samples_of(batch) for batch in batches]

    def record(self, operation: str, start_s: float) -> None:
        """Record work of the only device, in the caller's thread."""
        if self._timeline is not None:
            self.record_tasks(operation, [TaskOutcome(start_s=start_s, end_s=time.monotonic())])

    def record_step(self, num_ranks: int, start_s: float | None) -> None:
        """Record an optimizer step of all ranks, made by the caller's thread."""
        if self._timeline is not None:
            end_s = time.monotonic()
            outcome = TaskOutcome(start_s=end_s if start_s is None else start_s, end_s=end_s)
            self.record_tasks("step", [outcome] * num_ranks)
        self.step += 1

    def watch_backward(self, output: Any) -> None:
        """Record the backward pass of the only device's ``output``."""
        tensors: list[Tensor] = []
        if self._timeline is None:
            return
        flatten(output, tensors, strict=False)
        started: list[float] = []

        def finished() -> None:
            if started:
                self.record("backward", started.pop())

        def on_backward(_: Tensor) -> None:
            if not started:
                started.append(time.monotonic())
                torch.autograd.Variable._execution_engine.queue_callback(finished)

        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(on_backward)  # type: ignore[no-untyped-call]

    def _end_step(self, spans: dict[int, TaskOutcome]) -> None:
        assert self._timeline is not None, "checked by the caller"
        for rank, lane in enumerate(self._lanes):
            sizes, self._sizes[rank] = self._sizes[rank], []
            start_s = spans[rank].start_s if rank in spans else lane.since
            lane.end_step(IDLE, start_s, sizes)
            self._timeline.count(rank, len(sizes), sum(sizes))

    def _enter(self, rank: int, cause: int, at_s: float) -> None:
        lane = self._lanes[rank]
        lane.enter(cause, max(at_s, lane.since))


def num_samples_of(batch: Any) -> int:
    """The size of a batch; an int is a size already."""
    if isinstance(batch, int):
        return batch
    return num_rows(batch) or 1
