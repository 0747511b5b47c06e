"""Held-out quality of averaged training compared with one device.

Usage: ``python -m benchmarks.quality --data FOLDER --out FILE [--minutes 90]``, as often as it
takes, then ``--report TABLE.md`` with the same ``--out``; with the same arguments
``python -m benchmarks.quality sync`` compares ``SYNC`` with shares with ``CADENCE``, by loss and by
the time to a loss, and ``python -m benchmarks.quality machines`` two machines with one; and
``python -m benchmarks.quality drift --data FOLDER [--every 2 3 6] [--json FILE]``.
``benchmarks/README.md`` describes the measurements.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness import environment
from benchmarks.harness.measure import (
    ENVIRONMENT,
    QUIET,
    MachineLoad,
    describe,
    parser_of,
    save,
    table,
)
from benchmarks.harness.studies import (
    SIX,
    STUDIES,
    Columns,
    Data,
    DataMissing,
    Study,
    check_folder,
    default_folder,
)
from coordinator.messages import Payload
from coordinator.splitting import permutation
from runtime import (
    ApplyPolicy,
    AverageBackend,
    Mean,
    Nesterov,
    OuterOptimizer,
    Trainer,
    current_worker,
)
from runtime.cluster.tensors import contribution, difference, split
from runtime.replica.scaled_rates import ignores_gradient_scale

RUN_S = 900.0
"""A run that takes longer is killed."""
CHILD = "from benchmarks.quality import child; child()"
RESULT = "result: "
"""Begins the line of a run's result."""
NUMBERS = {"lr": float, "num_epochs": int, "batch_size": int, "part": float}
"""Fields of a study that ``--override`` may change."""
SETTINGS = {
    "anchor": int,
    "min_anchor": int,
    "max_anchor": int,
    "max_overshoot": int,
    "max_batch_diff": int,
    "overhead_target": float,
    "divergence_threshold": float,
    "max_grad_norm": float,
    "lr_scale_ratio": float,
}
"""Settings of the trainer's builder that ``--set`` may give the averaged modes."""


# -- one training run, in a process of its own -------------------------------------------


WORLD_SIZE = 2
ONE_DEVICE = "solo-global"
"""The reference: one process at the global batch."""
RUNTIME = {
    "sync": (ApplyPolicy.SYNC, AverageBackend.AUTO),
    "sync-shares": (ApplyPolicy.SYNC, AverageBackend.AUTO),
    "cpu-cadence": (ApplyPolicy.CADENCE, AverageBackend.CPU),
    "cpu-async": (ApplyPolicy.ASYNC, AverageBackend.CPU),
    "collective-cadence": (ApplyPolicy.CADENCE, AverageBackend.THREAD),
    "collective-async": (ApplyPolicy.ASYNC, AverageBackend.THREAD),
}
AVERAGED = tuple(mode for mode, (policy, _) in RUNTIME.items() if policy is not ApplyPolicy.SYNC)
"""Modes whose replicas are averaged from time to time."""
SLOWED = "-slowed"
"""Ends the name of a mode of the runtime in which rank 1 is slowed."""
CURVE_SAMPLES = 500
"""Held-out samples for the loss over time; the final loss uses all."""
SLOWDOWN = 3.0
"""Factor on the step time of a slowed rank."""
SYNC_MODES = (
    ONE_DEVICE,
    *("sync-shares", "cpu-cadence"),
    *("sync-shares" + SLOWED, "cpu-cadence" + SLOWED),
)
"""Modes of ``sync``."""
DEFAULT_MODES = (ONE_DEVICE, "sync", *AVERAGED)
"""Modes of the comparison without a command."""
MODES = (*DEFAULT_MODES, *SYNC_MODES[1:2], *SYNC_MODES[3:])
OUTER: dict[str, Callable[[], OuterOptimizer]] = {
    "mean": Mean,
    "nesterov": Nesterov,
    "diloco": lambda: Nesterov(0.7, 0.9),
}
PERIODS = (8, 32, 128)
MACHINES = {f"{name}-{period}": (name, period) for name in OUTER for period in PERIODS}
"""Modes of two machines, by outer optimizer and batches of each machine between two rounds."""


def study_of(spec: Mapping[str, Any]) -> Study:
    """The study that a spec names, with the spec's numbers in it."""
    return replace(STUDIES[spec["model"]], **spec["overrides"])


def make_model(study: Study, num_symbols: int, seed: int) -> nn.Module:
    """The model with the initial weights of a seed, the same in all modes."""
    torch.manual_seed(seed)
    return study.make_model(num_symbols)


def fingerprint(model: nn.Module) -> float:
    """A number that two models share if they have the same weights."""
    flat = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    return float(flat @ torch.linspace(1, 2, len(flat), dtype=torch.float64))


def warm_up(study: Study, data: Data) -> None:
    """A step on a separate model: PyTorch imports and prepares much at the first one."""
    model = make_model(study, data.num_symbols, 0)
    optimizer = study.make_optimizer(model.parameters(), study.lr)
    loss = study.loss(model, tuple(c[: study.batch_size] for c in data.train))
    loss.backward()
    optimizer.step()


class Curve:
    """Copies of the weights over the time of a run; evaluated after it.

    Its clock begins with its construction.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._states: list[tuple[float, dict[str, Tensor]]] = []

    def keep(self, model: nn.Module, epoch: int) -> dict[str, float]:
        """Copy the weights as they are; an ``eval_fn`` that has no values."""
        del epoch
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self._states.append((time.perf_counter() - self._start, state))
        return {}

    def evaluate(self, study: Study, data: Data, seed: int) -> list[tuple[float, float]]:
        """Seconds and loss on some held-out samples: of the initial weights, then each copy."""
        model = make_model(study, data.num_symbols, seed)
        some = tuple(column[:CURVE_SAMPLES] for column in data.held_out)
        points = [(0.0, study.evaluate(model, some)["loss"])]
        for at_s, state in self._states:
            model.load_state_dict(state)
            points.append((round(at_s, 4), study.evaluate(model, some)["loss"]))
        return points


def train_loop(
    study: Study,
    model: nn.Module,
    data: Data,
    seed: int,
    after_epoch: Callable[[nn.Module, int], object] = lambda model, epoch: None,
) -> float:
    """Train as one device at the global batch.

    Returns:
        Seconds spent in steps, the gathering of the batch excluded.
    """
    optimizer = study.make_optimizer(model.parameters(), study.lr)
    size = study.batch_size * WORLD_SIZE
    lr = study.scheduler(optimizer, study.num_epochs * (data.num_samples // size))
    stepping_s = 0.0
    for epoch in range(study.num_epochs):
        order = torch.from_numpy(permutation(data.num_samples, epoch, seed))
        for indices in torch.split(order, size):
            batch = tuple(c.index_select(0, indices) for c in data.train)
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = study.loss(model, batch)
            loss.backward()
            optimizer.step()
            lr.step()
            stepping_s += time.perf_counter() - start
        after_epoch(model, epoch)
    return stepping_s


def run_solo(study: Study, data: Data, spec: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """One process at the global batch."""
    model = make_model(study, data.num_symbols, spec["seed"])
    initial = fingerprint(model)
    curve = Curve() if spec.get("curve") else None
    more = () if curve is None else (curve.keep,)
    start = time.perf_counter()
    stepping_s = train_loop(study, model, data, spec["seed"], *more)
    train_s = time.perf_counter() - start
    found = {} if curve is None else {"curve": curve.evaluate(study, data, spec["seed"])}
    return model, {
        **found,
        "initial": initial,
        "train_s": train_s,
        "idle_share": max(0.0, 1 - stepping_s / train_s),
        "num_averagings": 0,
    }


class Slowed:
    """Makes rank 1 slower: it sleeps in proportion to the CPU time of its thread."""

    def __init__(self) -> None:
        self._used_s: float | None = None

    def sleep(self) -> None:
        """In a step of rank 1: sleep for what its thread has used since the last call."""
        if current_worker().rank == 1:
            used_s = time.thread_time()
            if self._used_s is not None:
                time.sleep((SLOWDOWN - 1) * (used_s - self._used_s))
            self._used_s = time.thread_time()


def run_runtime(
    study: Study, data: Data, spec: Mapping[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """Two CPU workers under one of the runtime's policies, defaults but for ``settings``."""
    mode = spec["mode"].removesuffix(SLOWED)
    policy, backend = RUNTIME[mode]
    slowed = Slowed() if spec["mode"].endswith(SLOWED) else None
    num_positions = study.num_epochs * (data.num_samples // study.batch_size)
    initial: list[float] = []

    def factory(device: torch.device) -> nn.Module:
        torch.set_num_threads(1)
        model = make_model(study, data.num_symbols, spec["seed"]).to(device)
        initial.append(fingerprint(model))
        return model

    def train_fn(model: nn.Module, batch: Columns) -> torch.Tensor:
        loss = study.loss(model, batch)
        if slowed is not None:
            slowed.sleep()
        return loss

    builder = (
        Trainer.builder(factory, lambda params: study.make_optimizer(params, study.lr), train_fn)
        .dataset(data.train)
        .batch_size(study.batch_size)
        .num_epochs(study.num_epochs)
        .devices(["cpu"] * WORLD_SIZE)
        .policy(policy)
        .backend(backend)
        .seed(spec["seed"])
        .scheduler(lambda optimizer: study.scheduler(optimizer, num_positions))
        .tune_allocator(False)
        .progress(False)
    )
    for name, value in spec["settings"].items():
        getattr(builder, name)(value)
    if mode == "sync-shares":
        builder.balance(True)
    curve = Curve() if spec.get("curve") else None
    if curve is not None:
        builder.eval_fn(curve.keep)
    start = time.perf_counter()
    handle = builder.run()
    state = handle.join(RUN_S)
    train_s = time.perf_counter() - start
    statistics = handle.statistics()
    busy_s = sum(r.compute_s for r in statistics.ranks) / WORLD_SIZE
    model = study.make_model(data.num_symbols)
    model.load_state_dict(state.state_dict())
    found = {} if curve is None else {"curve": curve.evaluate(study, data, spec["seed"])}
    return model, {
        **found,
        "initial": initial[0],
        "train_s": train_s,
        "idle_share": max(0.0, 1 - busy_s / train_s),
        "num_averagings": statistics.num_averagings,
        "anchor": statistics.anchor,
        "num_samples": sum(r.num_samples for r in statistics.ranks),
        "rank_samples": [r.num_samples for r in statistics.ranks],
        "sync_s": [round(r.sync_s, 4) for r in statistics.ranks],
        "train_losses": [round(m.avg_loss, 5) for m in state.metrics],
    }


@dataclass
class Machine:
    """A machine of a cluster, as :func:`run_machines` trains it.

    Attributes:
        model: Its replica.
        optimizer: The inner optimizer.
        schedule: Of the learning rate.
        own: State of the replica without training since its last contribution to a round.
        num_batches: Trained by this machine.
        num_counted: By how many of the others' the schedule has been moved on.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    own: Payload
    num_batches: int = 0
    num_counted: int = 0

    @classmethod
    def of(cls, study: Study, data: Data, seed: int, num_positions: int) -> Machine:
        """One with the initial weights."""
        model = make_model(study, data.num_symbols, seed)
        optimizer = study.make_optimizer(model.parameters(), study.lr)
        return cls(model, optimizer, study.scheduler(optimizer, num_positions), snapshot(model))

    def train(self, study: Study, batch: Columns) -> None:
        """One batch."""
        self.optimizer.zero_grad()
        study.loss(self.model, batch).backward()
        self.optimizer.step()
        self.schedule.step()
        self.num_batches += 1

    @torch.no_grad()
    def take(self, new: Payload, own: Payload, num_elsewhere: int) -> None:
        """The round that this snapshot was part of is over: keep what was trained since."""
        change = difference(new, own)
        flat = torch.cat([*change.params, *change.buffers])
        for tensor in averaged_state(self.model):
            tensor.add_(flat[: tensor.numel()].view_as(tensor))
            flat = flat[tensor.numel() :]
        for _ in range(num_elsewhere - self.num_counted):
            self.schedule.step()
        self.num_counted = num_elsewhere


def snapshot(model: nn.Module) -> Payload:
    """Parameters and float buffers, each as one new tensor."""
    params = torch.cat([p.detach().flatten() for p in model.parameters()])
    buffers = [b.flatten() for b in model.buffers() if b.is_floating_point()]
    return Payload(params=(params,), buffers=(torch.cat(buffers),) if buffers else ())


def next_global(
    state: Payload, parts: Sequence[Payload], weights: Sequence[int], outer: OuterOptimizer
) -> Payload:
    """The global state after a round between machines."""
    sums = [
        sum(tensors[1:], start=tensors[0])
        for tensors in zip(
            *(
                contribution(state, part, weight / sum(weights), heaviest=False)
                for part, weight in zip(parts, weights, strict=True)
            ),
            strict=True,
        )
    ]
    params, buffers, _ = split(sums, state)
    kept = tuple(b - s for b, s in zip(state.buffers, buffers, strict=True))
    return Payload(params=tuple(outer.step(state.params, params)), buffers=kept)


def run_machines(
    study: Study, data: Data, spec: Mapping[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """Two machines of a cluster of one worker each, in one thread: their rounds repeat exactly.

    Each trains a batch in turn. After every period all take part in a round, whose change they
    take one batch later, as machines train on during a round. The arithmetic is the runtime's.
    """
    name, period = MACHINES[spec["mode"]]
    outer = OUTER[name]()
    num_positions = study.num_epochs * (data.num_samples // study.batch_size)
    machines = [Machine.of(study, data, spec["seed"], num_positions) for _ in range(WORLD_SIZE)]
    initial = fingerprint(machines[0].model)
    state, num_rounds, since = machines[0].own, 0, 0
    pending: list[Payload] = []  # the parts of a round under way
    start = time.perf_counter()

    def finish_round() -> None:
        nonlocal state, num_rounds
        state = next_global(state, pending, [1] * len(pending), outer)
        trained = sum(machine.num_batches for machine in machines)
        for machine, own in zip(machines, pending, strict=True):
            machine.take(state, own, trained - machine.num_batches)
        pending.clear()
        num_rounds += 1

    for epoch in range(study.num_epochs):
        order = torch.from_numpy(permutation(data.num_samples, epoch, spec["seed"]))
        for indices in torch.split(order, study.batch_size * WORLD_SIZE):
            for machine, part in zip(machines, torch.split(indices, study.batch_size), strict=True):
                machine.train(study, tuple(c.index_select(0, part) for c in data.train))
            since += 1
            if pending:
                finish_round()
            if since >= period:
                pending += [snapshot(machine.model) for machine in machines]
                since = 0
    if pending:
        finish_round()
    if since:
        pending += [snapshot(machine.model) for machine in machines]
        finish_round()
    train_s = time.perf_counter() - start
    return machines[0].model, {
        "initial": initial,
        "train_s": train_s,
        "idle_share": 0.0,
        "num_averagings": num_rounds,
    }


def run(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Train as the spec says, then evaluate; the result that goes into the record."""
    torch.set_num_threads(1)
    study = study_of(spec)
    data = study.load(Path(spec["data"]) if spec["data"] else None)
    warm_up(study, data)
    if spec["mode"] == ONE_DEVICE:
        model, facts = run_solo(study, data, spec)
    elif spec["mode"] in MACHINES:
        model, facts = run_machines(study, data, spec)
    else:
        model, facts = run_runtime(study, data, spec)
    facts.setdefault("num_samples", study.num_epochs * data.num_samples)
    return {**facts, **study.evaluate(model, data.held_out)}


def child() -> None:
    """Make the runs given as JSON in the arguments; each prints its result as a line.

    An argument has ``model``, ``mode``, ``seed``, ``data`` (a folder, or null for the tiny
    stand-in), ``overrides`` of the study's numbers, ``settings`` of the trainer's builder, and
    ``curve`` if the loss over time is wanted.
    """
    for spec in map(json.loads, sys.argv[1:]):
        print(RESULT + json.dumps(run(spec)), flush=True)


# -- verdicts: paired seeds, intervals of 95 % --------------------------------------------


QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
"""Two-sided 95 % quantiles of Student's t for 2 to 20 pairs; the last one holds for more pairs."""
MARGIN, POINTS = 0.005, 0.1
"""Announced cost of a policy: part of the loss, and points of accuracy."""
MARGINS = {
    "logistic": 0.01,
    "mlp": 0.03,
    "lenet": 0.1,
    "autoencoder": 0.1,
    "char-rnn": 0.01,
    "gpt": 0.01,
}
"""Margins of ``sync``, larger for models whose seeds differ by 2, 13 and 21 % (one standard
deviation) on one device."""

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
        verdict: ``"worse"`` or ``"better"`` if the 95 % interval of the mean leaves out 0, else
            ``"no worse"``; ``"too few seeds"`` for one. With a margin: ``"no worse"`` if the
            interval is within it, else ``"worse"`` as above, or ``"undecided"``.
    """

    mean: float
    se: float | None
    num_pairs: int
    verdict: str


def half_interval(se: float, num_pairs: int) -> float:
    """Half of the 95 % interval of a mean, by its standard error and the number of pairs."""
    return QUANTILES[min(num_pairs - 2, len(QUANTILES) - 1)] * se


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
    loss, half = -found.mean if higher_is_better else found.mean, half_interval(se, len(pairs))
    verdict = "no worse"
    # A loss that is not a number is worse than any number.
    if math.isnan(loss) or loss > half:
        verdict = "worse"
    elif -loss > half:
        verdict = "better"
    return Difference(mean=found.mean, se=se, num_pairs=len(pairs), verdict=verdict)


def _verdict(found: Difference, margin: float, cost: float) -> str:
    """The verdict with a margin; ``cost`` is the mean, positive if worse."""
    if found.se is None:
        return found.verdict
    if cost + half_interval(found.se, found.num_pairs) <= margin:
        return "no worse"
    return "worse" if found.verdict == "worse" else "undecided"


def excess(mine: Mapping[int, Result], one: Mapping[int, Result]) -> Difference | None:
    """Relative excess of held-out losses over those of one device, paired by seed."""
    parts = {seed: mine[seed]["loss"] / one[seed]["loss"] for seed in mine.keys() & one.keys()}
    return compare(parts, dict.fromkeys(parts, 1.0), higher_is_better=False)


def points(mine: Mapping[int, Result], one: Mapping[int, Result]) -> Difference | None:
    """Accuracy less that of one device in points, paired by seed; ``None`` if there is none."""
    percent = [
        {seed: row["accuracy"] * 100 for seed, row in rows.items() if "accuracy" in row}
        for rows in (mine, one)
    ]
    return compare(*percent, higher_is_better=True)


def judge_mode(runs: Runs, mode: str, margin: float = MARGIN) -> dict[str, Any]:
    """Everything that the tables say of one mode of one model."""
    mine, one = runs[mode], runs.get(ONE_DEVICE, {})
    row: dict[str, Any] = {"mode": mode, "seeds": sorted(mine), "margin": margin}
    for name in ("loss", "train_s", "num_averagings"):
        row[name] = asdict(spread(result[name] for result in mine.values()))
    if mode != ONE_DEVICE:
        if (loss := excess(mine, one)) is not None:
            row["excess"] = asdict(replace(loss, verdict=_verdict(loss, margin, loss.mean)))
        if (share := points(mine, one)) is not None:
            row["points"] = asdict(replace(share, verdict=_verdict(share, POINTS, -share.mean)))
    return row


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


# -- the judged results as Markdown ------------------------------------------------------


def shown(found: Mapping[str, Any] | None, digits: int, unit: str = "%") -> str:
    """A :class:`Difference` with its error, bold where it is worse."""
    if found is None:
        return ""
    text = f"{found['mean']:+.{digits}{unit}}"
    text += "" if found["se"] is None else f" ± {found['se']:.{digits}{unit}}"
    return f"**{text}**" if found["verdict"] == "worse" else text


def losses_table(report: Mapping[str, Any]) -> str:
    """The modes of all models, with their losses and accuracies compared with one device."""
    head = ["model", "mode", "held-out loss", "above one device", "margin", ""]
    head += ["accuracy in points", "", "averagings", "s", "seeds"]
    rows = []
    for model, found in report["models"].items():
        for row in found["rows"]:
            loss, share = row.get("excess"), row.get("points")
            rows.append([model, row["mode"], f"{row['loss']['mean']:.5g}", shown(loss, 2)])
            rows[-1] += [f"{row['margin']:.1%}", loss["verdict"]] if loss else ["", ""]
            rows[-1] += [shown(share, 2, "f"), share["verdict"] if share else ""]
            rows[-1] += [f"{row['num_averagings']['mean']:.0f}", f"{row['train_s']['mean']:.1f}"]
            rows[-1] += [str(len(row["seeds"]))]
    return table(head, rows, num_texts=2)


def markdown(report: Mapping[str, Any]) -> str:
    """The whole report.

    Args:
        report: ``rows``, ``faults``, ``definition`` and ``missing`` of each of ``models``, with
            ``machine``, ``settings``, ``num_runs`` and ``num_disturbed``.
    """
    cells = [
        (f"{model} {row['mode']}", [row[what]["verdict"] for what in CELLS if what in row])
        for model, found in report["models"].items()
        for row in found["rows"]
        if "excess" in row
    ]
    lines = [
        "# Held-out quality of averaged training",
        "",
        f"{about(report)}Losses and accuracies are paired by seed with one device at the global "
        "batch, mean ± standard error; no worse: the 95 % interval is within the margin, "
        f"{MARGIN:.1%} of the loss or {POINTS} points. {_settings(report['settings'])}",
        "",
        losses_table(report),
        "",
        *notes_of(report),
        "",
    ]
    for verdict in ("worse", "undecided"):
        names = [name for name, verdicts in cells if verdict in verdicts]
        which = f": {', '.join(names)}" if names else ""
        lines += [f"{len(names)} of {len(cells)} cells are {verdict}{which}.", ""]
    lines += [
        f"Other processes used over {QUIET:.0%} of the cores in {report['num_disturbed']} of "
        f"{report['num_runs']} runs, whose times say little.",
        "",
    ]
    return "\n".join(lines)


CELLS = ("excess", "points")
"""Compared numbers of a row."""


def about(report: Mapping[str, Any]) -> str:
    """The machine in a sentence."""
    machine = report["machine"]
    return (
        f"{machine['cores']} cores ({machine['architecture']}), Python {machine['python']}, "
        f"torch {machine['torch']}; two CPU workers, one intra-op thread each. "
    )


def notes_of(report: Mapping[str, Any]) -> list[str]:
    """Lines on the models: their definition, faults of the pairs, and what is missing."""
    lines = []
    for model, found in report["models"].items():
        lines += [f"- {model}: {found['definition']}."]
        lines += [f"  - {fault}" for fault in found["faults"]]
        lines += [f"  - Missing: {', '.join(found['missing'])}."] if found["missing"] else []
    return lines


def _settings(settings: Mapping[str, Any]) -> str:
    named = ", ".join(f"`{name}({value})`" for name, value in settings.items())
    but = f" but for {named}" if named else ""
    return f"Averaged modes run with the defaults of the builder{but}."


# -- runs and their record ---------------------------------------------------------------


Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: the spec sent to the child process, and the key of its record."""

    spec: Line
    definition: str

    @property
    def name(self) -> str:
        """For progress and for what is missing."""
        return f"{self.spec['model']} {self.spec['mode']} seed {self.spec['seed']}"

    def key(self) -> Line:
        """Fields by which a line of the record is this run's result."""
        kept = {name: self.spec[name] for name in ("model", "mode", "seed", "settings")}
        more = {"with_curve": True} if self.spec["curve"] else {}
        return {**kept, **more, "definition": self.definition}


def overrides_of(args: argparse.Namespace, model: str) -> Line:
    """Values of ``--override`` for a model: under its own name, or for all models."""
    given = {**args.override}
    own = {name: given.pop(f"{model}.{name}") for name in NUMBERS if f"{model}.{name}" in given}
    return {**{name: value for name, value in given.items() if name in NUMBERS}, **own}


def make_job(args: argparse.Namespace, model: str, mode: str, seed: int) -> Job:
    """The run of one cell and seed under the arguments."""
    overrides = overrides_of(args, model)
    study = replace(STUDIES[model], **overrides)
    spec = {
        "model": model,
        "mode": mode,
        "seed": seed,
        "data": None if args.synthetic else str(args.data.resolve()),
        "overrides": overrides,
        "settings": args.settings if mode.removesuffix(SLOWED) in AVERAGED else {},
        "curve": args.command == "sync",
    }
    stand_in = " (on stand-in data)" if args.synthetic else ""
    return Job(spec=spec, definition=study.definition() + stand_in)


def batches_of_jobs(args: argparse.Namespace) -> Iterator[list[Job]]:
    """All runs in the order they are made, those in one list in turn in one process.

    Seeds go round by pairs, so that a record that is cut short has every cell. Those of
    ``sync`` go round one by one in one process: neighbours in time are compared.
    """
    seeds = range(args.seeds)
    if args.command == "sync":
        for seed, model in itertools.product(seeds, args.models):
            modes = args.modes if seed % 2 == 0 else args.modes[::-1]
            yield [make_job(args, model, mode, seed) for mode in modes]
        return
    for pair in (seeds[i : i + 2] for i in range(0, len(seeds), 2)):
        for model, mode, seed in itertools.product(args.models, args.modes, pair):
            yield [make_job(args, model, mode, seed)]


def read_record(file: Path) -> list[Line]:
    """The lines of a record; a last line that was cut off is left out."""
    lines = []
    with contextlib.suppress(FileNotFoundError):
        for line in file.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
    return lines


def find(record: Sequence[Line], job: Job) -> Line | None:
    """The result of a run, if the record has it: the one that others disturbed least."""
    key = {"with_curve": None} | job.key()
    found = [line for line in record if all(line.get(k) == v for k, v in key.items())]
    return min(found, key=lambda line: float(line["used_by_others"]), default=None)


def run_jobs(jobs: Sequence[Job]) -> list[Line | None]:
    """Make runs in turn in a new process.

    Returns:
        Their lines of the record; ``None`` for one that failed.
    """
    load = MachineLoad()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, *(json.dumps(job.spec) for job in jobs)],
        stdout=subprocess.PIPE,
        env=environment(**ENVIRONMENT),
        text=True,
        start_new_session=True,
    )
    output = ""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            output = child.communicate(timeout=RUN_S)[0]
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    others = round(load.others(), 4)
    found = [x.removeprefix(RESULT) for x in output.splitlines() if x.startswith(RESULT)]
    lines = [_line(job, result, others) for job, result in zip(jobs, found, strict=False)]
    return [*lines, *[None] * (len(jobs) - len(found))]


def _line(job: Job, result: str, others: float) -> Line:
    more = {"used_by_others": others, "torch": torch.__version__}
    return {**job.key(), **json.loads(result), **more}


def _is_wanted(args: argparse.Namespace, job: Job, line: Line | None) -> bool:
    """True if a run is missing, or was disturbed while its time is measured."""
    if args.timed and job.spec["mode"] == ONE_DEVICE:
        return False
    return line is None or (args.timed and line["used_by_others"] > QUIET)


def make_runs(args: argparse.Namespace) -> bool:
    """Make the runs that the record lacks, as long as there is time; whether all went well."""
    until = time.monotonic() + args.minutes * 60 if args.minutes else None
    record = read_record(args.out)
    if args.out.exists() and not args.out.read_bytes().endswith(b"\n"):
        with args.out.open("a") as file:
            file.write("\n")
    well = True
    for jobs in batches_of_jobs(args):
        wanted = [job for job in jobs if _is_wanted(args, job, find(record, job))]
        if not wanted:
            continue
        if until is not None and time.monotonic() > until:
            print("Out of time: call again to continue.")
            return well
        made = run_jobs(wanted)
        for job, line in zip(wanted, made, strict=True):
            if line is None:
                well = False
                print(f"{job.name}: FAILED", flush=True)
                continue
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{job.name}: loss {line['loss']:.5f}, {line['train_s']:.1f} s", flush=True)
    return well


def write_report(args: argparse.Namespace) -> None:
    """Judge the record's results that belong to the arguments; write Markdown and JSON."""
    results, notes, loads = results_of(args)
    if args.command == "machines":
        report = judge_machines(results) | {"machine": describe(), "notes": notes}
        args.report.write_text(machines_markdown(report))
    else:
        sync = args.command == "sync"
        models = {
            model: {
                "rows": compare_sync(runs, model)
                if sync
                else [judge_mode(runs, mode) for mode in args.modes if runs[mode]],
                "faults": unpaired(runs),
                **notes[model],
            }
            for model, runs in results.items()
        }
        report = {"models": models, "machine": describe(), "settings": args.settings}
        report |= {"num_runs": len(loads), "num_disturbed": sum(load > QUIET for load in loads)}
        args.report.write_text(sync_markdown(report) if sync else markdown(report))
    args.report.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


def results_of(
    args: argparse.Namespace,
) -> tuple[dict[str, dict[str, dict[int, Line]]], dict[str, Line], list[float]]:
    """The record's results that belong to the arguments, by model, mode and seed.

    Returns:
        The results; of each model its definition and what is missing; and how much of the cores
        others used in each run.
    """
    record = read_record(args.out)
    results: dict[str, dict[str, dict[int, Line]]] = {}
    notes: dict[str, Line] = {}
    loads: list[float] = []
    for model in args.models:
        runs: dict[str, dict[int, Line]] = {mode: {} for mode in args.modes}
        missing = []
        for mode in args.modes:
            lacks = []
            for seed in range(args.seeds):
                job = make_job(args, model, mode, seed)
                if (line := find(record, job)) is None:
                    lacks.append(str(seed))
                    continue
                runs[mode][seed] = line
                loads.append(line["used_by_others"])
            if lacks:
                missing.append(f"{mode} seed {' '.join(lacks)}")
        results[model] = runs
        notes[model] = {"definition": job.definition, "missing": missing}
    return results, notes, loads


# -- machines of a cluster: which outer optimizer, at which period -----------------------


def judge_machines(results: Mapping[str, Runs]) -> dict[str, Any]:
    """By how much each way's held-out loss lies above one machine's, as a part of that.

    Returns:
        ``cells``: for each way and model a :class:`Difference`, paired by seed; ``ways``: for
        each way the mean over the models and in how many it is worse; ``default``: the outer
        optimizer with the lower mean over all its cells.
    """
    cells: dict[str, dict[str, Any]] = {}
    for way in MACHINES:
        for model, runs in results.items():
            found = excess(runs.get(way, {}), runs.get(ONE_DEVICE, {}))
            if found is not None:
                cells.setdefault(way, {})[model] = asdict(found)
    ways = {
        way: {
            "mean": statistics.fmean(cell["mean"] for cell in found.values()),
            "num_worse": sum(cell["verdict"] == "worse" for cell in found.values()),
            "num_models": len(found),
        }
        for way, found in cells.items()
    }
    means = {
        name: statistics.fmean(ways[way]["mean"] for way in ways if MACHINES[way][0] == name)
        for name in OUTER
        if any(MACHINES[way][0] == name for way in ways)
    }
    default = min(means, key=lambda name: means[name], default=None)
    faults = [f"{model}: {fault}" for model, runs in results.items() for fault in unpaired(runs)]
    return {"cells": cells, "ways": ways, "means": means, "default": default, "faults": faults}


def machines_markdown(report: Mapping[str, Any]) -> str:
    """The report of :func:`judge_machines`, with ``machine`` and ``notes`` added."""
    machine, models = report["machine"], list(report["notes"])
    rows = []
    for way, cells in report["cells"].items():
        found = report["ways"][way]
        rows.append(
            [
                way,
                *(shown(cells.get(model), 1) for model in models),
                f"{found['mean']:+.1%}",
                str(found["num_worse"]),
            ]
        )
    lines = [
        "# Outer optimizers: two machines against one process",
        "",
        f"{machine['cores']} cores ({machine['architecture']}), Python {machine['python']}, torch "
        f"{machine['torch']}. Increase of the held-out loss of two machines over that of one "
        "process at the global batch, for which the learning rate is tuned, paired by seed: mean ± "
        "standard error, bold where the 95 % interval is above 0. The number behind the name is "
        "that of the batches of each machine between two rounds.",
        "",
        table(["", *models, "mean", "worse"], rows),
        "",
        *(f"- {name}: {note['definition']}." for name, note in report["notes"].items()),
        *(f"- {fault}" for fault in report["faults"]),
    ]
    missing = [f"{m} {', '.join(n['missing'])}" for m, n in report["notes"].items() if n["missing"]]
    lines += [f"- Missing: {one}." for one in missing]
    if report["default"] is not None:
        means = " and ".join(f"{mean:+.1%} ({name})" for name, mean in report["means"].items())
        lines += ["", f"Means over all cells: {means}. The default follows: {report['default']}."]
    return "\n".join(lines) + "\n"


# -- sync: SYNC with shares compared with CADENCE, by loss and by the time to a loss ------


REACHED = 0.9
"""Part of the way from the initial loss to the last one of one device at the global batch."""
SIZES = ["lenet.part=0.5", "autoencoder.part=0.5"]
SIZES += [
    f"{model}.{size}" for model in ("char-rnn", "gpt") for size in ("part=0.2", "num_epochs=4")
]
"""Default overrides of ``sync``: less data, and more epochs; each is a point."""


def time_to(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """Seconds until a loss is first reached, between the points of a curve by a straight line.

    Args:
        curve: Seconds and loss of each point, the first at the start.
        loss: The target.

    Returns:
        The time; ``None`` if it is never reached.
    """
    before_s, before = curve[0]
    for at_s, value in curve:
        if value <= loss:
            part = (before - loss) / (before - value) if before > value else 1.0
            return before_s + part * (at_s - before_s)
        before_s, before = at_s, value
    return None


def targets(solo: Result, margin: float) -> tuple[float, float]:
    """Target losses of the times: near one device's final loss, and that plus the margin."""
    first, last = solo["curve"][0][1], solo["curve"][-1][1]
    return first + REACHED * (last - first), last * (1 + margin)


def times_of(runs: Runs, mode: str, margin: float) -> list[dict[int, float | None]]:
    """For each target, the time of each seed in which nothing disturbed the run."""
    solo = runs["solo-global"]
    found: list[dict[int, float | None]] = [{}, {}]
    for seed, result in runs[mode].items():
        if seed in solo and result["used_by_others"] <= QUIET:
            for times, loss in zip(found, targets(solo[seed], margin), strict=True):
                times[seed] = time_to(result["curve"], loss)
    return found


def compare_sync(runs: Runs, model: str) -> list[dict[str, Any]]:
    """For each mode but one device, its loss, its times, and those of CADENCE over them."""
    margin, rows = MARGINS[model], []
    for mode in SYNC_MODES[1:]:
        if not runs.get(mode):
            continue
        row = judge_mode(runs, mode, margin) | {"targets": []}
        cadence = times_of(runs, mode.replace("sync-shares", "cpu-cadence"), margin)
        for mine, other in zip(times_of(runs, mode, margin), cadence, strict=True):
            reached = {seed: at_s for seed, at_s in mine.items() if at_s is not None}
            gains = [s / reached[seed] for seed, s in other.items() if s and seed in reached]
            row["targets"].append(
                {
                    "num_timed": len(mine),
                    "num_reached": len(reached),
                    "median_s": statistics.median(reached.values()) if reached else None,
                    "cadence_over_this": statistics.median(gains) if gains else None,
                    "ends": [min(gains), max(gains)] if gains else None,
                }
            )
        rows.append(row)
    return rows


def sync_markdown(report: Mapping[str, Any]) -> str:
    """The comparison as Markdown: a table of losses, and one of times."""
    ahead = ["model", "mode"]
    for what in (f"{REACHED:.0%} of the way", "its last loss and the margin"):
        ahead += [f"s to {what}", "reached", "CADENCE takes"]
    times = []
    for model, found in report["models"].items():
        for row in found["rows"]:
            cells = [model, row["mode"]]
            for t in row["targets"]:
                gain, ends = t["cadence_over_this"], t["ends"]
                is_sync = row["mode"].startswith("sync")
                cells.append("" if t["median_s"] is None else f"{t['median_s']:.2f}")
                cells.append(f"{t['num_reached']} of {t['num_timed']}")
                span = "" if gain is None else f"{gain:.2f} x ({ends[0]:.2f} to {ends[1]:.2f})"
                cells.append(span if is_sync else "")
            times.append(cells)
    lines = [
        "# SYNC with shares compared with CADENCE",
        "",
        f"{about(report)}`{SLOWED[1:]}`: rank 1 takes {SLOWDOWN:g} times as long. Losses are "
        "paired by seed with one device at the global batch, mean ± standard error; no worse: the "
        "95 % interval is within the margin. " + _settings(report["settings"]),
        "",
        losses_table(report),
        "",
        "Times are medians of the runs that nothing disturbed, evaluated at the end of each "
        "epoch with straight lines between; the ratio is the median of the seeds that both "
        "reach, with both ends.",
        "",
        table(ahead, times, num_texts=2),
        "",
        *notes_of(report),
        "",
    ]
    return "\n".join(lines)


# -- drift: averages of replicas in one thread, apart from a machine's timing -------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training; ``every`` 0 is one device at the global batch.

    Attributes:
        model: Name of a study.
        seed: Of the weights and of the order of the samples.
        every: Steps between two averagings.
        late: True if a replica makes a step before it takes an average, 0 or 1.
        lr_scale: Factor on the study's learning rate; ``None``: the automatic one.
        ranks: Replicas, which split the global batch.
        counts: Batches of each replica between two averagings; empty: ``every``.
        exact_until: Part of the training whose steps average gradients.
        overrides: Changed numbers of the study.
        folder: Of the data; ``None``: the tiny stand-in.
    """

    model: str
    seed: int
    every: int = 0
    late: int = 0
    lr_scale: float | None = None
    ranks: int = WORLD_SIZE
    counts: tuple[int, ...] = ()
    exact_until: float = 0.0
    overrides: Mapping[str, Any] = field(default_factory=dict)
    folder: str | None = None

    @property
    def study(self) -> Study:
        """The study with the changed numbers."""
        return replace(STUDIES[self.model], **self.overrides)

    def load(self) -> Data:
        """The study's data."""
        return self.study.load(Path(self.folder) if self.folder else None)


def steps_of(study: Study, data: Data) -> int:
    """Steps of one device in the whole training."""
    return study.num_epochs * (data.num_samples // (study.batch_size * WORLD_SIZE))


def averaged_state(model: nn.Module) -> list[Tensor]:
    """Averaged tensors of a replica: parameters and floating-point buffers."""
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    return [*(p.data for p in model.parameters()), *buffers]


@torch.no_grad()
def mean_of(models: Sequence[nn.Module], weights: Sequence[int] = ()) -> list[Tensor]:
    """The weighted mean of the replicas' states, by default the plain one; a new one."""
    states = [averaged_state(model) for model in models]
    if len(set(weights)) < 2:
        return [torch.stack(parts).mean(0) for parts in zip(*states, strict=True)]
    shares = [weight / sum(weights) for weight in weights]
    return [
        torch.stack([share * t for share, t in zip(shares, parts, strict=True)]).sum(0)
        for parts in zip(*states, strict=True)
    ]


@torch.no_grad()
def move(models: Sequence[nn.Module], deltas: Sequence[Sequence[Tensor]]) -> None:
    """Add to each replica its change by an average."""
    for model, delta in zip(models, deltas, strict=True):
        for tensor, change in zip(averaged_state(model), delta, strict=True):
            tensor.add_(change)


def deltas_of(models: Sequence[nn.Module], weights: Sequence[int] = ()) -> list[list[Tensor]]:
    """The weighted mean less the state of each replica."""
    mean = mean_of(models, weights)
    return [[m - t for m, t in zip(mean, averaged_state(r), strict=True)] for r in models]


def rate_factor(optimizer: torch.optim.Optimizer, case: Case) -> float:
    """Factor on the learning rate while parameters are averaged."""
    if case.lr_scale is not None:
        return case.lr_scale
    if not ignores_gradient_scale(optimizer, optimizer.param_groups[0]):
        return 1.0
    counts = case.counts or (1,) * case.ranks
    return sum(counts) ** 2 / sum(n * n for n in counts) / math.sqrt(case.ranks)


def copy_replica(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give all replicas the weights and the optimizer state of the first."""
    for model, optimizer in zip(models[1:], optimizers[1:], strict=True):
        model.load_state_dict(models[0].state_dict())
        optimizer.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))


def train_replicas(study: Study, data: Data, case: Case) -> nn.Module:
    """Train replicas in turn; returns one that has their mean.

    Each trains its part of the study's global batch; with ``counts``, that many between two
    averagings. Steps that average gradients are made once, by the first replica.
    """
    models = [make_model(study, data.num_symbols, case.seed) for _ in range(case.ranks)]
    optimizers = [study.make_optimizer(model.parameters(), study.lr) for model in models]
    base = optimizers[0].param_groups[0]["lr"]
    factor = rate_factor(optimizers[0], case)
    size = study.batch_size * WORLD_SIZE // case.ranks
    counts = case.counts or (case.every,) * case.ranks
    num_steps = study.num_epochs * (data.num_samples // (size * case.ranks))
    num_exact = round(case.exact_until * num_steps)

    def step(rank: int, indices: Tensor, rate: float) -> None:
        optimizers[rank].param_groups[0]["lr"] = rate
        batch = tuple(c.index_select(0, indices) for c in data.train)
        optimizers[rank].zero_grad()
        study.loss(models[rank], batch).backward()
        optimizers[rank].step()

    under_way: list[list[Tensor]] | None = None
    left, position = list(counts), 0
    for epoch in range(study.num_epochs):
        order = torch.from_numpy(permutation(data.num_samples, epoch, case.seed))
        for indices in torch.split(order, size * case.ranks)[: num_steps // study.num_epochs]:
            rate = base * study.schedule(position / num_steps)
            position += 1
            if position <= num_exact:
                step(0, indices, rate)
                if position == num_exact:
                    copy_replica(models, optimizers)
                continue
            for part in torch.split(indices, size):
                # The ranks with the largest part of their round before them are behind.
                rank = max(range(case.ranks), key=lambda r: (left[r] / counts[r], -r))
                step(rank, part, rate * factor)
                left[rank] -= 1
                if under_way is not None and all(n < c for n, c in zip(left, counts, strict=True)):
                    move(models, under_way)
                    under_way = None
                if any(left):
                    continue
                left = list(counts)
                if case.late:
                    under_way = deltas_of(models, counts)
                else:
                    move(models, deltas_of(models, counts))
    if position > num_exact:
        move(models, deltas_of(models, counts))
    return models[0]


def train_case(case: Case) -> dict[str, Any]:
    """The case and its held-out loss."""
    data = case.load()
    if case.every:
        model = train_replicas(case.study, data, case)
    else:
        model, _ = run_solo(case.study, data, {"mode": ONE_DEVICE, "seed": case.seed})
    return asdict(case) | case.study.evaluate(model, data.held_out)


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Every requested training."""
    folder = None if args.data is None else str(args.data)
    cases: list[Case] = []
    for seed, model in itertools.product(range(args.seeds), args.models):
        solo = Case(model=model, seed=seed, overrides=overrides_of(args, model), folder=folder)
        periods = args.every
        if args.rounds:
            steps = steps_of(solo.study, solo.load())
            periods = [math.ceil(steps / rounds) for rounds in args.rounds]
        ways = itertools.product(args.ranks, args.lr_scales, args.late, args.exact_until, periods)
        cases.append(solo)
        cases += [
            replace(
                solo,
                ranks=ranks,
                lr_scale=scale,
                late=late,
                exact_until=exact,
                every=every,
                counts=tuple(args.counts),
            )
            for ranks, scale, late, exact, every in ways
        ]
    return cases


WAY = ("model", "ranks", "every", "late", "exact_until", "lr_scale")
"""Fields of a case that name a way to average."""


def summarize_drift(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each way to average, what part of solo's loss it adds, paired by seed.

    Where there is an accuracy: ``points``, a :class:`Difference` in points.
    """
    solo = {(row["model"], row["seed"]): row for row in rows if not row["every"]}
    ways: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["every"]:
            ways.setdefault(tuple(row[name] for name in WAY), {})[row["seed"]] = row
    found: list[dict[str, Any]] = []
    for way, mine in ways.items():
        one = {seed: solo[way[0], seed] for seed in mine}
        loss, share = excess(mine, one), points(mine, one)
        assert loss is not None, "every seed has its solo training"
        line = dict(zip(WAY, way, strict=True)) | asdict(loss)
        found.append(line | ({"points": asdict(share)} if share else {}))
    return found


def drift_table(summary: Sequence[dict[str, Any]]) -> str:
    """The summary as a table."""
    head = ["model", "replicas", "averaged every", "taken late by", "exact until", "learning rate"]
    head += ["held-out loss above solo's", "", "accuracy in points", "seeds"]
    rows = [
        [
            *(s["model"], str(s["ranks"]), str(s["every"]), str(s["late"])),
            f"{s['exact_until']:.0%}",
            "automatic" if s["lr_scale"] is None else f"{s['lr_scale']:.3g} times",
            *(shown(s, 2, "%"), s["verdict"], shown(s.get("points"), 2, "f")),
            str(s["num_pairs"]),
        ]
        for s in summary
    ]
    return table(head, rows)


def parse_drift(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(drift.__doc__)
    add = parser.add_argument
    add("--data", type=Path, default=default_folder(), help="the data's folder")
    add("--tiny", action="store_true", help="the tiny stand-in instead of data")
    add("--models", nargs="+", choices=STUDIES, default=["gpt"])
    add("--every", nargs="+", type=int, default=[1, 2, 3, 6])
    add("--rounds", nargs="+", type=int, default=[], help="averagings, instead of --every")
    add("--late", nargs="+", type=int, default=[0, 1])
    add("--lr-scales", nargs="+", type=float, default=[None], help="default: automatic")
    add("--ranks", nargs="+", type=int, default=[WORLD_SIZE], help="replicas")
    add("--counts", nargs="+", type=int, default=[], help="batches of each")
    exact = "part of the training whose steps average gradients (%(default)s)"
    add("--exact-until", nargs="+", type=float, default=[0.0], help=exact)
    add_override(parser, [])
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    add("--seeds", type=int, default=7)
    args = parser.parse_args(arguments)
    args.override = overrides_from(parser, args.override)
    if min([*args.every, *args.rounds]) < 1 or args.seeds < 1 or not {*args.late} <= {0, 1}:
        parser.error("--every, --rounds and --seeds must be at least 1, --late 0 or 1")
    if args.counts and (min(args.counts) < 1 or args.ranks != [len(args.counts)]):
        parser.error("--counts: a number of at least 1 for each of --ranks")
    if args.tiny:
        args.data = None
    return args


def drift(arguments: Sequence[str] | None = None) -> None:
    """Cost in quality of rare or late averaging, apart from timing: replicas in one thread."""
    args = parse_drift(arguments)
    try:
        if args.data is not None:
            check_folder(args.data)
    except DataMissing as error:
        raise SystemExit(str(error)) from None
    cases = cases_of(args)
    machine = describe()
    del machine["environment"]  # nothing is timed: it runs in the caller's
    studies = {case.model: case.study.definition() for case in cases}
    steps = {c.model: steps_of(c.study, c.load()) for c in cases if c.seed == c.every == 0}
    rows: list[dict[str, Any]] = []
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, spawned, torch.set_num_threads, (1,)) as pool:
        for row in pool.map(train_case, cases):
            del row["folder"]
            rows.append(row)
            record = {"machine": machine, "studies": studies, "steps": steps, "rows": rows}
            save(args.json, record | {"summary": summarize_drift(rows)})
    for definition in studies.values():
        print(f"- {definition}; replicas in one thread")
    print(f"\n{drift_table(summarize_drift(rows))}")


# -- the command line --------------------------------------------------------------------


def _assignments(
    parser: argparse.ArgumentParser, given: Sequence[str], types: Mapping[str, type]
) -> Line:
    values = {}
    for one in given:
        name, _, value = one.partition("=")
        if name not in types:
            parser.error(f"{one}: give NAME=VALUE, NAME one of {', '.join(types)}")
        try:
            values[name] = types[name](value)
        except ValueError:
            parser.error(f"{one}: {value!r} is no {types[name].__name__}")
    return values


def add_override(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """The option that changes numbers of the studies."""
    parser.add_argument(
        "--override",
        nargs="*",
        default=default,
        metavar="[MODEL.]NAME=VALUE",
        help=f"{', '.join(NUMBERS)} (%(default)s)",
    )


def overrides_from(parser: argparse.ArgumentParser, given: Sequence[str]) -> Line:
    """Values of ``--override``."""
    numbers = {f"{model}.{name}": kind for model in STUDIES for name, kind in NUMBERS.items()}
    return _assignments(parser, given, NUMBERS | numbers)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    command = argv[0] if argv[:1] in (["sync"], ["machines"]) else None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=default_folder(), help="folder of the digits and the text")
    add("--out", type=Path, required=True, help="record of the runs: a line of JSON for each")
    add("--models", nargs="+", choices=STUDIES, default=list(SIX))
    modes = {"sync": SYNC_MODES, "machines": (ONE_DEVICE, *MACHINES)}.get(
        command or "", DEFAULT_MODES
    )
    sync = command == "sync"
    add("--modes", nargs="+", choices=(*MODES, *MACHINES), default=list(modes))
    add("--seeds", type=int, default=10 if sync else 5, help="runs of each cell (%(default)s)")
    add("--minutes", type=float, help="start no run after that long; call again to continue")
    timed = "sync: only runs whose time counts, those that others disturbed once more"
    add("--timed", action="store_true", help=timed)
    add("--report", type=Path, help="make no runs; write the tables to this .md and its .json")
    add_override(parser, SIZES if sync else [])
    add(
        "--set",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help=f"{', '.join(SETTINGS)} (the builder's defaults)",
    )
    add("--synthetic", action="store_true", help="tiny stand-in data: for tests")
    args = parser.parse_args(argv[command is not None :])
    args.command = command
    if args.seeds < 1:
        parser.error("--seeds must be at least 1")
    args.override = overrides_from(parser, args.override)
    args.settings = _assignments(parser, args.set, SETTINGS)
    if not (args.synthetic or args.report):
        try:
            check_folder(args.data)
        except DataMissing as error:
            parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a run failed."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["drift"]:
        drift(given[1:])
        return 0
    args = parse_args(given)
    if args.report:
        write_report(args)
        print(f"{args.report} and {args.report.with_suffix('.json')} written")
        return 0
    return 0 if make_runs(args) else 1


if __name__ == "__main__":
    sys.exit(main())
