"""Which transport carries the averagings of a run: the cheaper one, and never one that failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.config import ApplyPolicy, AverageBackend

WARM_UP_ROUNDS, MEASURED_ROUNDS = 1, 2
"""Rounds of a trial: the first over a transport allocates its memory and does not count."""
MAX_TRIAL_ROUNDS = 10
"""Rounds after which a trial is given up in which too few could be measured."""
RETRIAL_ROUNDS, MAX_RETRIAL_ROUNDS = 100, 1600
"""Rounds until the other transport is looked at again, twice as many each time that the choice
was confirmed, and the most."""
RETRIAL_SHARE = 0.01
"""Part of the time trained since the last look that the next one may cost, judged by the last."""
SWITCH_MARGIN = 0.9
"""A choice is given up for what costs less than this part of it: noise is no reason."""
COST_WEIGHT = 0.25
"""Weight of a round in the cost of the transport in use."""


class BackendChoice:
    """Tries each transport, keeps the cheaper one, and leaves one that fails.

    It changes only when it is told of a round, a failure or a death, and what it says holds
    for the next round: one in flight keeps the transport that it began with. Deterministic.

    Args:
        candidates: What can serve the run, the first to begin with; one alone is never left.
        measures: Whether costs decide; if not, only failures do.
        reason: Why the first one comes first.

    Attributes:
        chosen: The transport in use.
        before: What was in use when something was decided last.
        reason: Why, in a sentence.
        num_faults: Rounds that failed because their transport did, since the last good one.
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
        self._rounds_since_look = 0
        self._trained_since_look_s = 0.0
        self._look_after = RETRIAL_ROUNDS
        self._anchor = 0
        if self._measures:
            self._trials = list(self._candidates)

    @property
    def next(self) -> AverageBackend:
        """What carries the next round: the transport in use, or one that is tried."""
        return self._trials[0] if self._trials else self.chosen

    @property
    def usable(self) -> tuple[AverageBackend, ...]:
        """What has not failed among these ranks."""
        return tuple(b for b in self._candidates if b not in self._failed)

    @property
    def collective(self) -> AverageBackend | None:
        """The collective in which ranks are to be able to meet, if there is one."""
        meeting = [b for b in self.usable if b is not AverageBackend.CPU]
        return self.chosen if self.chosen in meeting else next(iter(meeting), None)

    def is_trial(self, backend: AverageBackend) -> bool:
        """Whether a round over this transport is no more than a trial."""
        return backend is not self.chosen

    def note(
        self, backend: AverageBackend, cost: RoundCost | None, trained_s: float, anchor: int
    ) -> bool:
        """A round is over, and went well.

        Args:
            backend: What carried it.
            cost: What it cost; ``None``: it did more than averaging, and tells nothing.
            trained_s: Time that the ranks trained for it, summed over them.
            anchor: Batches between two rounds.

        Returns:
            Whether anything was decided that is to be told.
        """
        self.num_faults = 0
        if not self._measures or len(self.usable) < 2:
            return False
        self._rounds_since_look += 1
        self._trained_since_look_s += trained_s
        if not self._trials:
            known = self._costs.get(backend)
            if cost is not None and backend is self.chosen:
                self._costs[backend] = cost if known is None else known.mixed(cost, COST_WEIGHT)
            if self._is_due(anchor):
                self._trials = [b for b in self.usable if b is not self.chosen]
            return False
        return self._note_trial(backend, cost, anchor)

    def _note_trial(self, backend: AverageBackend, cost: RoundCost | None, anchor: int) -> bool:
        if backend is not self._trials[0]:
            return False  # it began before the ranks were others
        self._num_tried += 1
        if cost is not None and self._num_tried > WARM_UP_ROUNDS:
            self._measured.append(cost)
        if len(self._measured) < MEASURED_ROUNDS and self._num_tried < MAX_TRIAL_ROUNDS:
            return False
        if self._measured:
            mean = self._measured[0]
            for i, each in enumerate(self._measured[1:], 2):
                mean = mean.mixed(each, 1 / i)
            self._costs[backend] = mean
        self._end_trial()
        return not self._trials and self._decide(anchor)

    def _end_trial(self) -> None:
        del self._trials[:1]
        self._measured, self._num_tried = [], 0

    def _is_due(self, anchor: int) -> bool:
        """Whether the other transport is to be looked at, and the look is not too dear."""
        moved = anchor >= 2 * self._anchor or 2 * anchor <= self._anchor
        if not moved and self._rounds_since_look < self._look_after:
            return False
        others = [self._costs[b] for b in self.usable if b is not self.chosen and b in self._costs]
        price_s = sum(cost.total_s for cost in others) * (WARM_UP_ROUNDS + MEASURED_ROUNDS)
        return price_s <= RETRIAL_SHARE * self._trained_since_look_s

    def _decide(self, anchor: int) -> bool:
        """All trials are over."""
        self._rounds_since_look, self._trained_since_look_s = 0, 0.0
        self._anchor = anchor
        told = {b: self._costs[b] for b in self.usable if b in self._costs}
        if not told:
            return False
        before, was_first = self.chosen, self._is_first
        self.before, self._is_first = before, False
        best = min(told, key=lambda b: told[b].total_s)
        own = told.get(before)
        if own is None or was_first or told[best].total_s < SWITCH_MARGIN * own.total_s:
            self.chosen = best
        confirmed = self.chosen is before and not was_first
        self._look_after = (
            min(2 * self._look_after, MAX_RETRIAL_ROUNDS) if confirmed else RETRIAL_ROUNDS
        )
        self.reason = "measured: " + ", ".join(f"{b.name} {told[b]}" for b in told)
        return not confirmed

    def record_fault(self, backend: AverageBackend, cost: RoundCost) -> None:
        """A round has failed because its transport did.

        Args:
            backend: What carried it.
            cost: What it cost.
        """
        if self._trials and backend is self._trials[0]:
            self._measured.append(cost)
        self.num_faults += 1

    def leave(self, backend: AverageBackend, why: str) -> bool:
        """A transport has failed: it is not used again among these ranks.

        Returns:
            Whether the run goes on over another; if not, there is none, and it stays what it was.
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
        self.reason = f"{backend.name} was left: {why}"
        return True

    def reset(self) -> None:
        """The ranks are others: what was measured and what failed holds no more."""
        if not self._measures:
            return
        self._failed.clear()
        self._costs.clear()
        self.num_faults = 0
        self._look_after = RETRIAL_ROUNDS
        self._measured, self._num_tried = [], 0
        self._is_first = True
        self._trials = sorted(self._candidates, key=lambda b: b is not self.chosen)

    def state_dict(self) -> dict[str, Any]:
        """The choice, and what it is made from, as plain values."""
        return {
            "candidates": [b.value for b in self._candidates],
            "chosen": self.chosen.value,
            "decided": not self._is_first,
            "costs": {
                b.value: [cost.ranks_s, cost.own_s, cost.stale_s] for b, cost in self._costs.items()
            },
            "anchor": self._anchor,
            "look_after": self._look_after,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the choice of a run that had the same transports to choose from."""
        mine = {b.value for b in self._candidates}
        told = {state["chosen"], *state["costs"]}
        same = set(state["candidates"]) == mine and told <= mine
        if not (self._measures and state["decided"] and same):
            return
        self.chosen = AverageBackend(state["chosen"])
        self._costs = {
            AverageBackend(name): RoundCost(ranks_s=parts[0], own_s=parts[1], stale_s=parts[2])
            for name, parts in state["costs"].items()
        }
        self._anchor, self._look_after = int(state["anchor"]), int(state["look_after"])
        self._is_first, self._trials = False, []
        figures = ", ".join(f"{b.name} {cost}" for b, cost in self._costs.items())
        self.reason = f"measured before the checkpoint: {figures}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCost:
    """What one averaging round cost, in seconds.

    Attributes:
        ranks_s: Time that ranks did not train, summed over them.
        own_s: The coordinator's own time, with that of the average.
        stale_s: Time that ranks trained on while the average was made, summed over them, as
            far as it counts.
    """

    ranks_s: float
    own_s: float = 0.0
    stale_s: float = 0.0

    @property
    def total_s(self) -> float:
        """What transports are compared by."""
        return self.ranks_s + self.own_s + self.stale_s

    def mixed(self, other: RoundCost, weight: float) -> RoundCost:
        """This cost moved towards another by that part of their difference."""
        return RoundCost(
            ranks_s=self.ranks_s + weight * (other.ranks_s - self.ranks_s),
            own_s=self.own_s + weight * (other.own_s - self.own_s),
            stale_s=self.stale_s + weight * (other.stale_s - self.stale_s),
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
    """Resolve ``AUTO`` and refuse what cannot work.

    Args:
        requested: What the user asked for.
        policy: When replicas average.
        devices: One device name for each rank, such as ``"cpu"`` or ``"cuda:0"``.
        nccl_available: Whether this build of PyTorch has NCCL.
        shared_gpu_fault: Why ``NCCL`` cannot be requested for a GPU that is named twice; ``None``:
            it can. ``AUTO`` never chooses it there.
        nccl_fault: Reason why NCCL would fail in this process, with the remedy; ``None``: none.

    Returns:
        The backend and a sentence that says why.

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
    return requested, "asked for"


def _choose_auto(
    policy: ApplyPolicy,
    devices: Sequence[str],
    on_cuda: list[bool],
    distinct: bool,
    nccl_fault: str | None,
) -> tuple[AverageBackend, str]:
    default = AverageBackend.THREAD if policy is ApplyPolicy.SYNC else AverageBackend.CPU
    what = "SYNC reduces in shared memory" if policy is ApplyPolicy.SYNC else "nobody waits on CPU"
    if len(devices) == 1:
        return default, "one device: nothing is averaged"
    if not all(on_cuda):
        return default, f"not all devices are CUDA devices, so NCCL is out; {what}"
    if not distinct:
        return default, f"a GPU stands more than once, which NCCL refuses; {what}"
    if nccl_fault is not None:
        return default, f"{nccl_fault}; {what}"
    return AverageBackend.NCCL, f"{len(devices)} distinct CUDA devices and NCCL is available"


def candidate_backends(
    requested: AverageBackend, policy: ApplyPolicy, chosen: AverageBackend, world_size: int
) -> tuple[AverageBackend, ...]:
    """The backends that ``AUTO`` may use in a run; only one if the user named it.

    Args:
        requested: What the user asked for.
        policy: When replicas average.
        chosen: The result of :func:`choose_backend`, which comes first.
        world_size: Number of ranks.
    """
    if requested is not AverageBackend.AUTO or world_size == 1:
        return (chosen,)
    if policy is ApplyPolicy.SYNC or chosen is AverageBackend.CPU:
        others = (AverageBackend.THREAD,)
    else:
        others = (AverageBackend.CPU,)
    return (chosen, *(b for b in others if b is not chosen))
