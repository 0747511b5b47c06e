"""Cells of the peers benchmark: the same training in each system, sized by its expected rate."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from benchmarks.harness.loops import solo_rate, threads_rate
from benchmarks.harness.models import Batch, Workload
from benchmarks.harness.processes import DdpGroup
from benchmarks.peers_measure import Cell
from benchmarks.peers_runtime import Job, Outcome, train
from runtime import ApplyPolicy

POLICIES = {p.name.lower(): p for p in (ApplyPolicy.SYNC, ApplyPolicy.CADENCE, ApplyPolicy.ASYNC)}
NUM_EPOCHS = 5
"""Of which the first warms up."""
MIN_BATCHES = 12
"""Of each rank in an epoch: at least one averaging by default."""
LOCKSTEP = 0.8
FREE = 0.85
"""First guesses of a system's share of what its ranks could reach."""


class Cells:
    """Makes the cells of one workload.

    Args:
        workload: What is trained.
        step_s: Time of its bare step, without pauses.
        seconds: Length of one measurement.
        group: The peers' processes, if there are any.

    Attributes:
        outcomes: What the runtime's runs gave, by key.
    """

    def __init__(
        self, workload: Workload, step_s: float, seconds: float, group: DdpGroup | None = None
    ) -> None:
        self._workload = workload
        self._step_s = step_s
        self._seconds = seconds
        self._group = group
        self._data: Batch | None = None
        self.outcomes: dict[str, list[Outcome]] = defaultdict(list)

    def solo(self, key: str, pause_s: float = 0.0) -> Cell:
        """A bare loop in the calling thread."""

        def run(expected: float) -> float:
            return solo_rate(
                self._workload,
                self._at_most(self._batches(expected)),
                warmup_s=self._seconds / 5,
                measure_s=self._seconds,
                pause_s=pause_s,
            )

        return Cell(key=key, guess=self._rate(pause_s), run=run)

    def threads(self, key: str, pauses_s: tuple[float, ...]) -> Cell:
        """Bare loops side by side; the sum of their rates."""

        def run(expected: float) -> float:
            return threads_rate(
                self._workload,
                self._at_most(self._batches(expected)),
                num_threads=len(pauses_s),
                warmup_s=self._seconds / 5,
                measure_s=self._seconds,
                pauses_s=pauses_s,
            )

        return Cell(key=key, guess=sum(map(self._rate, pauses_s)), run=run)

    def runtime(
        self,
        key: str,
        policy: ApplyPolicy,
        pauses_s: tuple[float, ...],
        *,
        recorded: bool = False,
        steady: bool = False,
        pinned: bool = False,
    ) -> Cell:
        """The runtime with as many workers as there are pauses.

        Args:
            key: The cell's.
            policy: The policy.
            pauses_s: Sleep of each rank within a step.
            recorded: Whether a timeline tells of the rounds.
            steady: Whether the rate leaves out what follows the last epoch.
            pinned: Whether each worker's thread is kept on a core of its own.
        """
        num_workers = len(pauses_s)

        def run(expected: float) -> float:
            wanted = max(self._batches(expected) // (NUM_EPOCHS - 1), MIN_BATCHES * num_workers)
            job = Job(
                workload=self._workload,
                data=self._at_most(num_workers * max(1, wanted // num_workers)),
                num_workers=num_workers,
                policy=policy,
                num_epochs=NUM_EPOCHS,
                pauses_s=pauses_s,
                recorded=recorded,
                pinned=pinned,
            )
            outcome = train(job)
            self.outcomes[key].append(outcome)
            return outcome.steady_rate if steady else outcome.rate

        return Cell(key=key, guess=self._expect(policy is ApplyPolicy.SYNC, pauses_s), run=run)

    def peer(self, key: str, system: str, pauses_s: tuple[float, ...]) -> Cell:
        """One of the peers, in as many processes as there are pauses."""
        group = self._group
        assert group is not None
        batch_size = self._workload.batch_size

        def run(expected: float) -> float:
            num_steps = max(MIN_BATCHES, self._batches(expected) // len(pauses_s))
            request: dict[str, Any] = {"system": system, "name": self._workload.name}
            return group.ask(
                **request,
                num_samples=batch_size * min(num_steps, self._workload.max_batches),
                num_warmup=max(2, num_steps // 5),
                num_steps=num_steps,
                pauses_s=list(pauses_s),
            )["rate"]

        return Cell(key=key, guess=self._expect(True, pauses_s), run=run)

    def details(self) -> dict[str, list[dict[str, Any]]]:
        """Of every repetition of the runtime's cells, for the record."""
        return {key: [o.details for o in found] for key, found in self.outcomes.items()}

    def _rate(self, pause_s: float) -> float:
        return self._workload.batch_size / (self._step_s + pause_s)

    def _expect(self, lockstep: bool, pauses_s: tuple[float, ...]) -> float:
        rates = [self._rate(pause_s) for pause_s in pauses_s]
        return LOCKSTEP * len(rates) * min(rates) if lockstep else FREE * sum(rates)

    def _batches(self, rate: float) -> int:
        return max(1, round(rate * self._seconds / self._workload.batch_size))

    def _at_most(self, num_batches: int) -> Batch:
        """A data set of that many batches, or as many as may be held."""
        num_samples = self._workload.batch_size * min(num_batches, self._workload.max_batches)
        if self._data is None or len(self._data[0]) < num_samples:
            self._data = self._workload.make_data(num_samples)
        return self._data[0][:num_samples], self._data[1][:num_samples]
