"""The arithmetic of the convergence benchmark's verdicts: paired seeds, two standard errors.

No PyTorch and no file in here: results in, numbers and words out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

LIMIT_SE = 2.0
"""Standard errors by which a mode may be worse on average before it counts as worse."""
HIGHER_IS_BETTER = {"loss": False, "accuracy": True}
"""The measures, and which way is up."""
BASELINES = {"global": "solo-global", "small": "solo-small"}

Result = Mapping[str, Any]
Runs = Mapping[str, Mapping[int, Result]]
"""Results of one model: for each mode, by seed."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and standard deviation of a number over the seeds; ``sd`` is ``None`` for one."""

    mean: float
    sd: float | None
    num_seeds: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A mode less its baseline, over the seeds that both have.

    Attributes:
        mean: Mean of the paired differences, in the measure's own unit.
        se: Their standard deviation over the square root of their number; ``None`` for one.
        num_pairs: Seeds that both have.
        verdict: ``"worse"`` or ``"better"`` beyond two standard errors, else ``"no worse"``;
            ``"too few seeds"`` for one.
    """

    mean: float
    se: float | None
    num_pairs: int
    verdict: str


def spread(values: Iterable[float]) -> Spread:
    """Mean and sample standard deviation; needs one value at least."""
    numbers = list(values)
    sd = None
    if len(numbers) > 1:
        sd = statistics.stdev(numbers) if all(map(math.isfinite, numbers)) else math.nan
    return Spread(mean=statistics.fmean(numbers), sd=sd, num_seeds=len(numbers))


def compare(
    mode: Mapping[int, float], baseline: Mapping[int, float], *, higher_is_better: bool
) -> Difference | None:
    """Judge a mode against a baseline by the seeds that both have; ``None`` without any."""
    pairs = [mode[seed] - baseline[seed] for seed in sorted(mode.keys() & baseline.keys())]
    if not pairs:
        return None
    found = spread(pairs)
    if found.sd is None:
        return Difference(mean=found.mean, se=None, num_pairs=1, verdict="too few seeds")
    se = found.sd / math.sqrt(len(pairs))
    loss = -found.mean if higher_is_better else found.mean
    verdict = "no worse"
    # A loss that is not a number is worse than any number.
    if math.isnan(loss) or loss > LIMIT_SE * se:
        verdict = "worse"
    elif -loss > LIMIT_SE * se:
        verdict = "better"
    return Difference(mean=found.mean, se=se, num_pairs=len(pairs), verdict=verdict)


def false_alarms(num_pairs: int) -> float:
    """Chance that a mode as good as its baseline is judged worse: a tail of Student's t."""
    degrees = num_pairs - 1
    if degrees < 1:
        return 0.0
    scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
    num_steps = 200
    width = LIMIT_SE / num_steps
    area = 0.0
    for i in range(num_steps + 1):  # Simpson's rule from 0 to the limit
        weight = 1 if i in (0, num_steps) else 4 if i % 2 else 2
        area += weight * math.pow(1 + (i * width) ** 2 / degrees, -(degrees + 1) / 2)
    return 0.5 - scale * area * width / 3


def judge_mode(runs: Runs, mode: str) -> dict[str, Any]:
    """Everything that the tables say of one mode of one model."""
    mine = runs[mode]
    first = next(iter(mine.values()))
    row: dict[str, Any] = {"mode": mode, "seeds": sorted(mine)}
    for name in ("train_s", "num_averagings", "idle_share", "num_samples"):
        row[name] = asdict(spread(result[name] for result in mine.values()))
    row["measures"] = {
        measure: _judge_measure(runs, mode, measure)
        for measure in HIGHER_IS_BETTER
        if measure in first
    }
    return row


def _judge_measure(runs: Runs, mode: str, measure: str) -> dict[str, Any]:
    values = {seed: result[measure] for seed, result in runs[mode].items()}
    found: dict[str, Any] = asdict(spread(values.values()))
    for against, baseline in BASELINES.items():
        if baseline == mode or baseline not in runs:
            continue
        difference = compare(
            values,
            {seed: result[measure] for seed, result in runs[baseline].items()},
            higher_is_better=HIGHER_IS_BETTER[measure],
        )
        if difference is not None:
            found[f"against_{against}"] = asdict(difference)
    return found


def unpaired(runs: Runs) -> list[str]:
    """Sentences on seeds whose runs did not start from the same weights or differ in samples.

    Empty if the pairs are pairs.
    """
    faults = []
    for seed in sorted({seed for by_seed in runs.values() for seed in by_seed}):
        for what in ("initial", "num_samples"):
            found = {mode: by_seed[seed][what] for mode, by_seed in runs.items() if seed in by_seed}
            if len(set(found.values())) > 1:
                faults.append(f"seed {seed}: {what} differs between modes: {found}")
    return faults


def judge(results: Mapping[str, Runs], modes: Sequence[str]) -> dict[str, Any]:
    """All models and modes that have results, as plain dicts and lists for JSON."""
    models = {
        model: {
            "rows": [judge_mode(runs, mode) for mode in modes if runs.get(mode)],
            "faults": unpaired(runs),
        }
        for model, runs in results.items()
    }
    return {"models": models, **tally(models)}


def tally(models: Mapping[str, Any]) -> dict[str, Any]:
    """How many cells were judged against the global batch, and which are worse, by loss."""
    judged = [
        (model, row["mode"], row["measures"]["loss"]["against_global"])
        for model, found in models.items()
        for row in found["rows"]
        if row["mode"] not in BASELINES.values() and "against_global" in row["measures"]["loss"]
    ]
    judged = [cell for cell in judged if cell[2]["se"] is not None]
    return {
        "num_judged": len(judged),
        "worse": [f"{model} {mode}" for model, mode, cell in judged if cell["verdict"] == "worse"],
        "expected_false_alarms": sum(false_alarms(cell["num_pairs"]) for _, _, cell in judged),
    }
