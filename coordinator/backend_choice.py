"""Choice of the averaging backend: by rule, by measured cost, and again after one has failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.codec import Count, Seconds
from coordinator.config import ApplyPolicy, AverageBackend

WARM_UP_ROUNDS, MEASURED_ROUNDS = 1, 2
"""Rounds of a trial: the first one allocates memory and is not measured."""
MAX_TRIAL_ROUNDS = 10
"""Rounds after which a trial ends with fewer measurements."""
SWITCH_MARGIN = 0.9
"""The choice changes only to a cost below this share of the present one: noise must not flip it."""


class BackendChoice:
    """Tries each backend, keeps the cheapest one, and excludes one that fails.

    Trials are made at the start, after a death, and once the anchor is twice that of the last ones.

    Its state changes only with a recorded round, fault or death, and applies to the next round: a
    round in flight keeps the backend that it started with. Deterministic.

    Args:
        candidates: Usable backends, the first one to start with; a single one is never excluded.
        measures: Choose by cost; otherwise only faults change the choice.
        reason: Reason for the first one.

    Attributes:
        before: The backend in use before the last decision.
        num_faults: Rounds since the last good one that failed because of their backend.
    """

    def __init__(
        self, candidates: Sequence[AverageBackend], *, measures: bool, reason: str = ""
    ) -> None:
        self._candidates = tuple(candidates)
        self._measures = measures and len(candidates) > 1
        self._failed: dict[AverageBackend, str] = {}
        self._costs: dict[AverageBackend, RoundCost] = {}
        self.chosen = self.before = self._candidates[0]
        self.reason = reason
        self._is_first = True
        self._trials: list[AverageBackend] = []
        self._measured: list[RoundCost] = []
        self._num_tried = 0
        self.num_faults = 0
        self._anchor = 0
        if self._measures:
            self._trials = list(self._candidates)

    @property
    def next(self) -> AverageBackend:
        """The backend of the next round: the one in use, or one on trial."""
        return self._trials[0] if self._trials else self.chosen

    @property
    def usable(self) -> tuple[AverageBackend, ...]:
        """The candidates that have not failed among the present ranks."""
        return tuple(b for b in self._candidates if b not in self._failed)

    @property
    def collective(self) -> AverageBackend | None:
        """The collective that ranks stay connected over; ``None``: none is usable."""
        meeting = [b for b in self.usable if b is not AverageBackend.CPU]
        return self.chosen if self.chosen in meeting else next(iter(meeting), None)

    def is_trial(self, backend: AverageBackend) -> bool:
        """True if a round over this backend is a trial."""
        return backend is not self.chosen

    def record_round(self, backend: AverageBackend, cost: RoundCost | None, anchor: int) -> bool:
        """Record a completed round.

        Args:
            cost: Its cost; ``None``: the round did more than averaging and is not measured.
            anchor: Batches between two rounds.

        Returns:
            True if a decision was made that is to be announced.
        """
        self.num_faults = 0
        if not self._measures or len(self.usable) < 2:
            return False
        if self._trials:
            return self._record_trial(backend, cost, anchor)
        if anchor >= 2 * self._anchor:
            self._begin_trials()
        return False

    def _begin_trials(self) -> None:
        self._trials = sorted(self.usable, key=lambda b: b is not self.chosen)
        self._measured, self._num_tried = [], 0

    def _record_trial(self, backend: AverageBackend, cost: RoundCost | None, anchor: int) -> bool:
        if backend is not self._trials[0]:
            return False  # it started before the last change of ranks
        self._num_tried += 1
        if cost is not None and self._num_tried > WARM_UP_ROUNDS:
            self._measured.append(cost)
        if len(self._measured) < MEASURED_ROUNDS and self._num_tried < MAX_TRIAL_ROUNDS:
            return False
        if self._measured:
            self._costs[backend] = RoundCost.mean(self._measured)
        self._end_trial()
        return not self._trials and self._decide(anchor)

    def _end_trial(self) -> None:
        del self._trials[:1]
        self._measured, self._num_tried = [], 0

    def _decide(self, anchor: int) -> bool:
        self._anchor = anchor
        measured = {b: self._costs[b] for b in self.usable if b in self._costs}
        if not measured:
            return False
        before, was_first = self.chosen, self._is_first
        self.before, self._is_first = before, False
        best = min(measured, key=lambda b: measured[b].total_s)
        own = measured.get(before)
        if own is None or was_first or measured[best].total_s < SWITCH_MARGIN * own.total_s:
            self.chosen = best
        self.reason = "measured: " + ", ".join(f"{b.name} {measured[b]}" for b in measured)
        return self.chosen is not before or was_first

    def record_fault(self, backend: AverageBackend, cost: RoundCost) -> None:
        """Record a round that failed because of its backend."""
        if self._trials and backend is self._trials[0]:
            self._measured.append(cost)
        self.num_faults += 1

    def exclude(self, backend: AverageBackend, why: str) -> bool:
        """Exclude a backend that failed, until the ranks change.

        Returns:
            True if another backend is in use now; False if there is none, and nothing changes.
        """
        if backend in self._failed or backend not in self._candidates:
            return False
        others = [b for b in self.usable if b is not backend]
        if not others:
            return False
        self._failed[backend] = why
        self._trials, self._measured, self._num_tried, self.num_faults = [], [], 0, 0
        self.before = self.chosen
        if backend is self.chosen:
            self.chosen = others[0]
        self.reason = f"{backend.name} failed: {why}"
        return True

    def reset(self) -> None:
        """Discard measurements and exclusions: the ranks have changed."""
        if not self._measures:
            return
        self._failed.clear()
        self._costs.clear()
        self.num_faults = 0
        self._is_first = True
        self._begin_trials()

    @property
    def state(self) -> BackendState:
        """The choice and its measurements."""
        return BackendState(
            candidates=self._candidates,
            chosen=self.chosen,
            decided=not self._is_first,
            costs=dict(self._costs),
            anchor=self._anchor,
        )

    def restore(self, state: BackendState) -> None:
        """Restore the choice of a run that had the same candidates; otherwise keep this one."""
        mine = set(self._candidates)
        same = set(state.candidates) == mine and {state.chosen, *state.costs} <= mine
        if not (self._measures and state.decided and same):
            return
        self.chosen, self._costs, self._anchor = state.chosen, dict(state.costs), state.anchor
        self._is_first, self._trials = False, []
        figures = ", ".join(f"{b.name} {cost}" for b, cost in self._costs.items())
        self.reason = f"measured before the checkpoint: {figures}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendState:
    """Saved state of :class:`BackendChoice`.

    Attributes:
        decided: False before the first decision by measurements.
        anchor: Batches between two rounds at the last decision.
    """

    candidates: tuple[AverageBackend, ...]
    chosen: AverageBackend
    decided: bool
    costs: dict[AverageBackend, RoundCost]
    anchor: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCost:
    """The cost of one averaging round, in seconds.

    Attributes:
        ranks_s: Time lost by the ranks, summed over ranks.
        own_s: CPU time of the coordinator, including the average.
        stale_s: Time that ranks trained while the average was computed, summed over ranks and
            weighted.
    """

    ranks_s: Seconds
    own_s: Seconds = 0.0
    stale_s: Seconds = 0.0

    @property
    def total_s(self) -> float:
        return self.ranks_s + self.own_s + self.stale_s

    @classmethod
    def mean(cls, costs: Sequence[RoundCost]) -> RoundCost:
        """The mean of some costs."""
        return cls(
            ranks_s=sum(cost.ranks_s for cost in costs) / len(costs),
            own_s=sum(cost.own_s for cost in costs) / len(costs),
            stale_s=sum(cost.stale_s for cost in costs) / len(costs),
        )

    def __str__(self) -> str:
        return (
            f"{1e3 * self.total_s:.3g} ms a round (ranks {1e3 * self.ranks_s:.3g}, coordinator "
            f"{1e3 * self.own_s:.3g}, staleness {1e3 * self.stale_s:.3g})"
        )


def choose_backend(
    requested: AverageBackend,
    policy: ApplyPolicy,
    devices: Sequence[str],
    *,
    nccl_available: bool,
    shared_gpu_fault: str | None = "NCCL refuses two ranks on one GPU",
    nccl_fault: str | None = None,
) -> tuple[AverageBackend, str]:
    """Resolve ``AUTO``, and reject a backend that cannot work.

    Args:
        requested: The backend that the user requested.
        policy: Averaging policy.
        devices: One device name for each rank, such as ``"cpu"`` or ``"cuda:0"``.
        nccl_available: True if this build of PyTorch has NCCL.
        shared_gpu_fault: Reason why ``NCCL`` cannot be requested for a GPU that is named twice;
            ``None``: it can. ``AUTO`` never chooses it there.
        nccl_fault: Reason why NCCL would fail in this process, with the remedy; ``None``: none.

    Returns:
        The backend and the reason, as a sentence.

    Raises:
        ValueError: The requested backend cannot serve these devices.
    """
    on_cuda = [d.startswith("cuda") for d in devices]
    distinct = len(set(devices)) == len(devices)
    names = ", ".join(devices)
    if requested is AverageBackend.AUTO:
        fault = nccl_fault if nccl_available else "this build of PyTorch has no NCCL"
        return _choose_auto(policy, devices, on_cuda, distinct, fault)
    if requested is AverageBackend.NCCL:
        fault = shared_gpu_fault if all(on_cuda) else "NCCL refuses CPU devices"
        if fault is not None and not (all(on_cuda) and distinct):
            raise ValueError(
                f"backend(NCCL) needs distinct CUDA devices, got [{names}]: {fault}; "
                "use THREAD, CPU or AUTO"
            )
        if not nccl_available:
            raise ValueError(
                "backend(NCCL): this build of PyTorch has no NCCL; use THREAD, CPU or AUTO"
            )
        if nccl_fault is not None:
            raise ValueError(f"backend(NCCL): {nccl_fault}, or use THREAD, CPU or AUTO")
    if requested is AverageBackend.GLOO and any(on_cuda):
        raise ValueError(
            f"backend(GLOO) serves CPU devices only, got [{names}]; use NCCL, THREAD, CPU or AUTO"
        )
    if requested is AverageBackend.CPU and policy is ApplyPolicy.SYNC:
        return requested, "SYNC over CPU is the in-process reduction in CPU memory, as THREAD"
    return requested, "requested"


def _choose_auto(
    policy: ApplyPolicy,
    devices: Sequence[str],
    on_cuda: list[bool],
    distinct: bool,
    nccl_fault: str | None,
) -> tuple[AverageBackend, str]:
    default = AverageBackend.THREAD if policy is ApplyPolicy.SYNC else AverageBackend.CPU
    what = "SYNC reduces in shared memory" if policy is ApplyPolicy.SYNC else "no rank waits on CPU"
    if len(devices) == 1:
        return default, "one device: nothing is averaged"
    if not all(on_cuda):
        return default, f"not all devices are CUDA devices, so NCCL is out; {what}"
    if not distinct:
        return default, f"a GPU is named more than once, which NCCL rejects; {what}"
    if nccl_fault is not None:
        return default, f"{nccl_fault}; {what}"
    return AverageBackend.NCCL, f"{len(devices)} distinct CUDA devices and NCCL is available"


def candidate_backends(
    requested: AverageBackend, policy: ApplyPolicy, chosen: AverageBackend, world_size: int
) -> tuple[AverageBackend, ...]:
    """The backends that a run may use: several for ``AUTO``, otherwise the requested one.

    Args:
        chosen: The result of :func:`choose_backend`, which becomes the first one.
    """
    if requested is not AverageBackend.AUTO or world_size == 1:
        return (chosen,)
    if policy is ApplyPolicy.SYNC or chosen is AverageBackend.CPU:
        others = (AverageBackend.THREAD,)
    else:
        others = (AverageBackend.CPU,)
    return (chosen, *(b for b in others if b is not chosen))
