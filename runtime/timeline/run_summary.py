"""RunSummary: the throughput of a run, and its lost time by cause."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.config import ApplyPolicy
from coordinator.run_state import Statistics
from coordinator.shares import IMBALANCE_RATIO
from runtime.core.context import fold
from runtime.timeline.events import Cause
from runtime.timeline.summary import RunFacts
from runtime.timeline.text import html_table

TRAINED = "training"
LOADING = "waiting for data"
PEERS = "waiting for each other"
EXCHANGE = "averaging"
OVERHEAD = "overhead"
DEAD_RANKS = "dead ranks"
LOSSES = (LOADING, PEERS, EXCHANGE, OVERHEAD, DEAD_RANKS)
"""Causes of lost time, in the order of tables."""

_LOSS_OF: Mapping[Cause, str] = {
    Cause.DATA: LOADING,
    Cause.SYNC: PEERS,
    Cause.PARKED: PEERS,
    Cause.IDLE: PEERS,
    Cause.AVERAGING: EXCHANGE,
    Cause.CONTROL: OVERHEAD,
    Cause.UNATTRIBUTED: OVERHEAD,
}
_OUTSIDE = (Cause.STARTUP, Cause.ENDING, Cause.GONE)

LOCKSTEP_LIMIT = 0.10
"""Share of the time lost by lockstep above which alternatives are named."""
MIN_STEPS = 50
"""Optimizer steps before alternatives are named: the first ones load libraries."""
MIN_GAIN = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The throughput of a run, and its lost time by cause.

    A rank's own rate is the samples per second of its compute time, measured in this run while the
    others compute as well; a device's time is that of its stream. ``share`` and the values of
    ``lost`` sum to 1: each is a mean over the ranks, weighted by their own rates. On a GPU, waits
    of the host during which the device computes are not lost. Evaluation, callbacks and
    checkpoints are not part of the training time. Values cover this process since its start, on
    this machine; a resumed run excludes the run before.

    Attributes:
        state: ``"running"``, ``"finished"``, ``"stopped"`` or ``"failed"``.
        facts: Devices, policy, batch and learning rate of the run.
        num_epochs: Epochs closed, including those before a resume.
        num_samples: Samples trained, including those trained again after a death.
        train_s: Training time in seconds.
        startup_s: Seconds before it: threads, replicas and connections.
        callbacks_s: Seconds of evaluation, callbacks and checkpoints.
        samples_per_s: Samples per second of training time; ``None``: nothing was trained.
        own_samples_per_s: Sum of the ranks' own rates; ``None``: not measured.
        share: ``samples_per_s / own_samples_per_s``; ``None``: not measured.
        lost: Share of the training time by cause of loss; empty: not measured.
        num_rounds: Averaging rounds; under ``SYNC`` global steps.
        num_failed_rounds: Rounds that failed.
        lr_factor: Factor of the learning rate by ``lr_scale_ratio``; of optimizers whose steps
            ignore the scale of the gradient, if it is automatic.
        gains: Estimated gain of other settings, as a fraction of ``samples_per_s``, by their
            calls; empty unless lockstep costs more than a tenth or ranks are unequal.
        ranks: The throughput of each rank.
    """

    state: str
    facts: RunFacts
    num_epochs: int = 0
    num_samples: int = 0
    train_s: float = 0.0
    startup_s: float = 0.0
    callbacks_s: float = 0.0
    samples_per_s: float | None = None
    own_samples_per_s: float | None = None
    share: float | None = None
    lost: Mapping[str, float] = field(default_factory=dict)
    num_rounds: int = 0
    num_failed_rounds: int = 0
    lr_factor: float = 1.0
    gains: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple[RankThroughput, ...] = ()

    @property
    def headline(self) -> str:
        """The throughput and the lost time in one sentence; empty if nothing was trained."""
        if self.samples_per_s is None:
            return ""
        parts = [f"{_rate(self.samples_per_s)} samples/s"]
        if self.share is not None:
            of = "these devices" if len(self.facts.devices) > 1 else "this device"
            percents = self._percents()
            parts[0] += f", {percents.pop(TRAINED)} % of what {of} can do alone"
            lost = sorted(percents.items(), key=lambda item: -item[1])
            listed = ", ".join(f"{n} % {cause}" for cause, n in lost if n)
            parts += [f"lost: {listed}"] if listed else []
        return "; ".join(parts)

    @property
    def advice(self) -> str:
        """The settings that would be faster, with their estimated gains; empty: none."""
        calls = [f"{call} about {100 * gain:.0f} %" for call, gain in self.gains.items()]
        if not calls:
            return ""
        first = calls[0].replace(" about", " would gain about") + " here"
        return f"{', '.join([first, *calls[1:]])}; see docs/policies.md"

    def _percents(self) -> dict[str, int]:
        """Training and losses in whole percents that sum to 100."""
        parts = {TRAINED: self.share or 0.0, **self.lost}
        whole = {name: int(100 * part) for name, part in parts.items()}
        by_rest = sorted(parts, key=lambda name: whole[name] - 100 * parts[name])
        for name in by_rest[: 100 - sum(whole.values())]:
            whole[name] += 1
        return whole

    def _rows(self) -> list[tuple[str, str, str, str, str]]:
        """The ranks as text."""
        return [
            (
                str(r.rank),
                r.device,
                f"{r.share:.0%}",
                _rate(r.samples_per_s),
                "unknown" if r.own_samples_per_s is None else _rate(r.own_samples_per_s),
            )
            for r in self.ranks
        ]

    def _notes(self) -> list[str]:
        rounds = "global steps" if self.facts.policy == ApplyPolicy.SYNC.name else "averagings"
        notes = [f"{self.num_rounds:,} {rounds}"] if len(self.ranks) > 1 else []
        if self.num_failed_rounds:
            notes.append(f"{self.num_failed_rounds:,} failed rounds")
        notes.append(f"start-up {self.startup_s:.1f} s")
        if self.callbacks_s >= 0.05:
            notes.append(f"evaluation, callbacks and checkpoints {self.callbacks_s:.1f} s")
        return notes

    def _title(self) -> str:
        return (
            f"run {self.state}: {self.num_epochs:,} of {self.facts.num_epochs:,} epochs, "
            f"{self.num_samples:,} samples in {self.train_s:.1f} s"
        )

    def __str__(self) -> str:
        """A table of at most 80 columns."""
        lines = [self._title(), *fold(self.facts.batch_line), ""]
        lines += fold(self.headline or "nothing was trained")
        if self.share is not None:
            lines += ["", f"  {'time of the devices':<32}{'share':>8}"]
            lines += [f"  {name:<32}{n:>6} %" for name, n in self._percents().items() if n]
        if self.ranks:
            lines += ["", *(_columns(row) for row in (_HEADER, *self._rows()))]
        lines += ["", *fold("; ".join(self._notes()))]
        return "\n".join([*lines, *(fold(self.advice) if self.advice else [])])

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        shares = [(name, f"{n} %") for name, n in self._percents().items() if n]
        notes = [self.facts.batch_line, "; ".join(self._notes()), self.advice]
        return "".join(
            [
                f"<p><b>{html.escape(self.headline or 'nothing was trained')}</b><br>",
                f"{html.escape(self._title())}</p>",
                html_table([("time of the devices", "share"), *shares] if shares[1:] else []),
                html_table([_HEADER, *self._rows()] if self.ranks else []),
                *(f"<p>{html.escape(note)}</p>" for note in notes if note),
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankThroughput:
    """The throughput of one rank.

    Attributes:
        rank: The rank.
        device: Its device, by name.
        num_samples: Samples trained.
        samples_per_s: Samples per second of training time.
        own_samples_per_s: Samples per second of its compute time; ``None``: not measured.
        share: Its share of all samples.
        lost: Share of its training time by cause of loss.
    """

    rank: int
    device: str
    num_samples: int
    samples_per_s: float
    own_samples_per_s: float | None
    share: float
    lost: Mapping[str, float]


_HEADER = ("rank", "device", "share", "samples/s", "own rate")


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _columns(row: Sequence[str]) -> str:
    rank, device, part, rate, own = row
    return f"  {rank:>4}  {device[:28]:<28}{part:>7}{rate:>14}{own:>14}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """Settings that a run could have instead, for the estimate of their gains.

    Attributes:
        balance: True if ``balance(True)`` is possible and was not decided by the user.
        cadence: True if the settings do not require ``SYNC``.
        anchor: Batches between two averagings under ``CADENCE``.
    """

    balance: bool = False
    cadence: bool = False
    anchor: int = 1


def summarize(
    facts: RunFacts,
    *,
    state: str,
    before: Statistics,
    now: Statistics,
    seconds: Sequence[Sequence[float]],
    num_epochs: int,
    alternatives: Alternatives,
) -> RunSummary:
    """Make the summary of a run.

    Args:
        facts: Facts of the run.
        state: Its state.
        before: The counters at its start, which are not 0 after a resume.
        now: The counters.
        seconds: Seconds of each rank by cause; empty before the start.
        num_epochs: Epochs closed.
        alternatives: Settings to compare with.
    """
    lockstep = facts.policy == ApplyPolicy.SYNC.name
    ranks = _rank_times(before, now, seconds)
    _separate_callbacks(ranks, lockstep=lockstep)
    num_samples = sum(r.num_samples for r in ranks)
    train_s = max((max(r.train_s, r.compute_s) for r in ranks), default=0.0)
    found = RunSummary(
        state=state,
        facts=replace(
            facts,
            backend=now.backend.name,
            backend_reason=now.backend_reason,
            lr_factor=facts.lr_factor * now.lr_factor,
        ),
        num_epochs=num_epochs,
        num_samples=num_samples,
        train_s=train_s,
        startup_s=max((r.causes[Cause.STARTUP] for r in ranks), default=0.0),
        callbacks_s=max((r.callbacks_s for r in ranks), default=0.0),
        num_rounds=now.num_averagings - before.num_averagings,
        num_failed_rounds=now.num_failed_rounds - before.num_failed_rounds,
        lr_factor=facts.lr_factor * now.lr_factor,
    )
    if not (num_samples and train_s > 0):
        return found
    lost = [r.lost(train_s, lockstep=lockstep, alone=len(ranks) == 1) for r in ranks]
    found = replace(
        found,
        samples_per_s=num_samples / train_s,
        ranks=tuple(
            RankThroughput(
                rank=rank,
                device=facts.devices[rank],
                num_samples=r.num_samples,
                samples_per_s=r.num_samples / train_s,
                own_samples_per_s=r.own_rate,
                share=r.num_samples / num_samples,
                lost={name: spent / train_s for name, spent in lost[rank].items() if spent > 0},
            )
            for rank, r in enumerate(ranks)
        ),
    )
    whole = sum(r.own_rate or 0.0 for r in ranks)
    if not whole:
        return found
    means = {
        name: sum((r.own_rate or 0.0) * spent[name] for r, spent in zip(ranks, lost, strict=True))
        / (whole * train_s)
        for name in LOSSES
    }
    found = replace(
        found,
        own_samples_per_s=whole,
        share=num_samples / train_s / whole,
        lost={name: part for name, part in means.items() if part > 0},
    )
    return replace(found, gains=_gains(found, ranks, alternatives) if lockstep else {})


@dataclass(slots=True, kw_only=True)
class _RankTime:
    """One rank's counters since the start, and its seconds by cause."""

    num_samples: int
    num_batches: int
    compute_s: float
    alive: bool
    causes: list[float]
    callbacks_s: float = 0.0

    @property
    def train_s(self) -> float:
        return sum(self.causes) - sum(self.causes[c] for c in _OUTSIDE) - self.callbacks_s

    @property
    def own_rate(self) -> float | None:
        if not (self.num_samples and self.compute_s > 0):
            return None
        return self.num_samples / self.compute_s

    def lost(self, train_s: float, *, lockstep: bool, alone: bool) -> dict[str, float]:
        """Seconds by cause of loss; with ``compute_s`` they sum to ``train_s``."""
        found = dict.fromkeys(LOSSES, 0.0)
        for cause, name in _LOSS_OF.items():
            found[name] += self.causes[cause]
        if alone:  # no peer to wait for: the time between two plans
            found[OVERHEAD] += found.pop(PEERS)
            found[PEERS] = 0.0
        found[OVERHEAD if self.alive else DEAD_RANKS] += train_s - self.train_s
        rest = train_s - self.compute_s
        spent = sum(found.values())
        if spent <= rest:
            # The part of the step outside its timer: in lockstep the preparation of the exchange,
            # and on a GPU the exchange itself, which the host does not see.
            found[EXCHANGE if lockstep and not alone else OVERHEAD] += rest - spent
            return found
        # The device has computed while the host waited.
        return {name: seconds * rest / spent for name, seconds in found.items()}


def _rank_times(
    before: Statistics, now: Statistics, seconds: Sequence[Sequence[float]]
) -> list[_RankTime]:
    return [
        _RankTime(
            num_samples=after.num_samples - first.num_samples,
            num_batches=after.num_batches - first.num_batches,
            compute_s=after.compute_s - first.compute_s,
            alive=after.alive,
            causes=list(causes),
        )
        for first, after, causes in zip(before.ranks, now.ranks, seconds, strict=False)
    ]


def _separate_callbacks(ranks: Sequence[_RankTime], *, lockstep: bool) -> None:
    """Take evaluation, callbacks and checkpoints out of the ranks' training time.

    In lockstep the other ranks have no plan while one evaluates; that wait belongs to it.
    """
    longest = max((r.causes[Cause.CALLBACKS] for r in ranks), default=0.0)
    for r in ranks:
        own = r.causes[Cause.CALLBACKS]
        waited = min(r.causes[Cause.IDLE], longest - own) if lockstep else 0.0
        r.causes[Cause.IDLE] -= waited
        r.callbacks_s = own + waited
        r.causes[Cause.CALLBACKS] += waited


def _gains(
    found: RunSummary, ranks: Sequence[_RankTime], alternatives: Alternatives
) -> dict[str, float]:
    """Estimated gains of other settings over lockstep, by their calls."""
    live = [r for r in ranks if r.alive and r.own_rate]
    if len(live) < 2 or found.num_rounds < MIN_STEPS or not found.share:
        return {}
    gains: dict[str, float] = {}
    # Waits for data that are a rank's own count, too.
    common_s = min(r.causes[Cause.DATA] for r in live)
    times = [r.compute_s + r.causes[Cause.DATA] - common_s for r in live]
    unequal = max(times) >= IMBALANCE_RATIO * min(times)
    if alternatives.balance and unequal:
        # All ranks then take as long as the mean, weighted by their rates.
        rates = [r.num_samples / own_s for r, own_s in zip(live, times, strict=True)]
        balanced_s = sum(r.num_samples for r in live) / sum(rates)
        gains["balance(True)"] = found.train_s / (found.train_s - max(times) + balanced_s) - 1
    peers, averaging = found.lost.get(PEERS, 0.0), found.lost.get(EXCHANGE, 0.0)
    if alternatives.cadence and (peers + averaging > LOCKSTEP_LIMIT or unequal):
        saved = peers + averaging * (1 - 1 / alternatives.anchor)
        gains['policy("cadence")'] = saved / found.share
    return {call: gain for call, gain in gains.items() if gain >= MIN_GAIN}
