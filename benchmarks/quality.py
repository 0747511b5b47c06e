"""Held-out quality of averaged training against solo training and PyTorch's DDP.

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
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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
from benchmarks.harness.processes import GlooGroup
from benchmarks.harness.studies import (
    SIX,
    STUDIES,
    Columns,
    Data,
    DataMissing,
    Study,
    check_folder,
    default_folder,
    lr_factor,
    scheduler,
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
SOLO = {"solo-small": 1, "solo-global": WORLD_SIZE}
"""Modes of one process, with the size of their batch in batches of a worker."""
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
    "solo-global",
    *("sync-shares", "cpu-cadence"),
    *("sync-shares" + SLOWED, "cpu-cadence" + SLOWED),
)
"""Modes of ``sync``."""
DEFAULT_MODES = (*SOLO, "ddp", "sync", *AVERAGED)
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
ONE_MACHINE = "solo-global"
"""Their baseline: the same script, on one machine."""


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
    batch_size: int,
    rank: int,
    size: int,
    after_epoch: Callable[[nn.Module, int], object] = lambda model, epoch: None,
) -> float:
    """The loop of the modes without the runtime: ``size`` processes take equal parts.

    Returns:
        Seconds spent in steps, the gathering of the batch excluded.
    """
    optimizer = study.make_optimizer(model.parameters(), study.lr)
    whole = batch_size * size
    lr = scheduler(optimizer, study.num_epochs * (data.num_samples // whole))
    stepping_s = 0.0
    for epoch in range(study.num_epochs):
        order = torch.from_numpy(permutation(data.num_samples, epoch, seed))
        for indices in torch.split(order, whole):
            mine = indices[rank * batch_size : (rank + 1) * batch_size]
            batch = tuple(c.index_select(0, mine) for c in data.train)
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
    """One process, at the batch of a worker or at the global one."""
    model = make_model(study, data.num_symbols, spec["seed"])
    initial = fingerprint(model)
    batch_size = study.batch_size * SOLO[spec["mode"]]
    curve = Curve() if spec.get("curve") else None
    more = () if curve is None else (curve.keep,)
    start = time.perf_counter()
    stepping_s = train_loop(study, model, data, spec["seed"], batch_size, 0, 1, *more)
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
        .scheduler(lambda optimizer: scheduler(optimizer, num_positions))
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
        return cls(model, optimizer, scheduler(optimizer, num_positions), snapshot(model))

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


def train_rank(study: Study, data: Data, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """A rank's half of each global batch under DDP, timed from barrier to barrier."""
    model = make_model(study, data.num_symbols, seed)
    initial = fingerprint(model)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    dist.barrier()
    start, busy = time.perf_counter(), time.thread_time()
    train_loop(study, wrapped, data, seed, study.batch_size, dist.get_rank(), WORLD_SIZE)
    busy_s = torch.tensor(time.thread_time() - busy)
    dist.barrier()
    train_s = time.perf_counter() - start
    dist.all_reduce(busy_s)
    return model, {
        "initial": initial,
        "train_s": train_s,
        "idle_share": max(0.0, 1 - float(busy_s) / WORLD_SIZE / train_s),
        "num_averagings": study.num_epochs * (data.num_samples // (WORLD_SIZE * study.batch_size)),
    }


def run(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Train as the spec says, then evaluate; the result that goes into the record."""
    torch.set_num_threads(1)
    study = study_of(spec)
    data = study.load(Path(spec["data"]) if spec["data"] else None)
    warm_up(study, data)
    if spec["mode"] in SOLO:
        model, facts = run_solo(study, data, spec)
    elif spec["mode"] in MACHINES:
        model, facts = run_machines(study, data, spec)
    elif spec["mode"].removesuffix(SLOWED) in RUNTIME:
        model, facts = run_runtime(study, data, spec)
    else:
        model, facts = train_rank(study, data, spec["seed"])
    facts.setdefault("num_samples", study.num_epochs * data.num_samples)
    return {**facts, **study.evaluate(model, data.held_out)}


def child() -> None:
    """Make the runs given as JSON in the arguments; each prints its result as a line.

    An argument has ``model``, ``mode``, ``seed``, ``data`` (a folder, or null for the tiny
    stand-in), ``overrides`` of the study's numbers, ``settings`` of the trainer's builder, and
    ``curve`` if the loss over time is wanted.
    """
    for spec in map(json.loads, sys.argv[1:]):
        if spec["mode"] == "ddp":
            with GlooGroup(WORLD_SIZE, "benchmarks.quality:run_rank") as group:
                result = group.ask(RUN_S, spec=spec)
        else:
            result = run(spec)
        print(RESULT + json.dumps(result), flush=True)


def run_rank(*, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The same in a rank of DDP; that of rank 0 goes into the record."""
    return run(spec)


# -- verdicts: paired seeds, two standard errors -----------------------------------------


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
    """Number of cells compared with the global batch by loss, and the worse ones."""
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


# -- the judged results as Markdown ------------------------------------------------------


HEAD = (
    "| mode | held-out loss | accuracy | time (s) | averagings | idle | "
    "loss less solo at the global batch | | loss less solo at the small batch |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |",
)


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}"


def _spread(found: Mapping[str, Any], digits: int) -> str:
    text = _number(found["mean"], digits)
    return text if found["sd"] is None else f"{text} ± {_number(found['sd'], digits)}"


def _difference(found: Mapping[str, Any] | None, digits: int) -> str:
    if found is None:
        return ""
    text = f"{found['mean']:+.{digits}f}"
    return text if found["se"] is None else f"{text} ± {_number(found['se'], digits)}"


def _accuracy(row: Mapping[str, Any]) -> str:
    found = row["measures"].get("accuracy")
    if found is None:
        return ""
    percent = {key: found[key] and found[key] * 100 for key in ("mean", "sd")}
    text = f"{_spread(percent, 2)} %"
    against = found.get("against_global")
    return f"{text} (worse)" if against and against["verdict"] == "worse" else text


def _row(row: Mapping[str, Any], digits: int) -> str:
    loss = row["measures"]["loss"]
    against = loss.get("against_global")
    verdict = "" if against is None else against["verdict"]
    cells = [
        row["mode"],
        _spread(loss, digits),
        _accuracy(row),
        _spread(row["train_s"], 1),
        f"{row['num_averagings']['mean']:.0f}",
        f"{row['idle_share']['mean']:.0%}",
        _difference(against, digits),
        "**worse**" if verdict == "worse" else verdict,
        _difference(loss.get("against_small"), digits),
    ]
    return "| " + " | ".join(cells) + " |"


def model_table(found: Mapping[str, Any]) -> str:
    """The modes of one model."""
    smallest = min((row["measures"]["loss"]["mean"] for row in found["rows"]), default=1.0)
    digits = 6 if smallest < 0.005 else 5 if smallest < 0.05 else 4
    return "\n".join([*HEAD, *(_row(row, digits) for row in found["rows"])])


def markdown(report: Mapping[str, Any]) -> str:
    """The whole report.

    Args:
        report: Result of ``judge``, with ``machine``, ``settings`` and each model's
            ``definition`` and ``missing`` added.
    """
    machine = report["machine"]
    lines = [
        "# Held-out quality of averaged training",
        "",
        f"{machine['cores']} cores ({machine['architecture']}), Python {machine['python']}, "
        f"torch {machine['torch']}; two CPU workers, one intra-op thread each. Mean ± standard "
        "deviation over the seeds; differences are paired by seed, mean ± standard error, and "
        "count as worse beyond two of them. " + _settings(report["settings"]),
        "",
    ]
    for name, found in report["models"].items():
        lines += [f"## {name}", "", f"{found['definition']}.", "", model_table(found), ""]
        lines += [f"- {fault}" for fault in found["faults"]]
        if found["missing"]:
            lines.append(f"- Not there yet: {', '.join(found['missing'])}.")
        if lines[-1]:
            lines.append("")
    lines += ["## Verdict", "", _verdict(report), ""]
    return "\n".join(lines)


def _settings(settings: Mapping[str, Any]) -> str:
    if not settings:
        return "Averaged modes run with the defaults of the builder."
    named = ", ".join(f"`{name}({value})`" for name, value in settings.items())
    return f"Averaged modes run with the defaults of the builder but for {named}."


def _verdict(report: Mapping[str, Any]) -> str:
    num_judged, worse = report["num_judged"], report["worse"]
    if not num_judged:
        return "No mode has two seeds yet that solo has as well."
    which = f": {', '.join(worse)}" if worse else ""
    disturbed = report["num_disturbed"]
    return (
        f"{len(worse)} of {num_judged} cells are worse than solo at an equal global batch{which}. "
        f"Of cells that are no worse in truth, {report['expected_false_alarms']:.1f} would be "
        f"judged worse by chance.\n\nOther processes used over {report['quiet']:.0%} of the cores "
        f"in {disturbed} of {report['num_runs']} runs, whose times say little."
    )


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
    """All runs in the order they are made, those in one list at the same time.

    Seeds go round by pairs, so that a record that is cut short has every cell. Those of
    ``sync`` go round one by one, and a list is of one process, which makes one run after the
    other: neighbours in time are compared.
    """
    seeds = range(args.seeds)
    if args.command == "sync":
        for seed in seeds:
            for model in args.models:
                modes = args.modes if seed % 2 == 0 else args.modes[::-1]
                yield [make_job(args, model, mode, seed) for mode in modes]
        return
    for pair in (seeds[i : i + 2] for i in range(0, len(seeds), 2)):
        for model in args.models:
            for mode in args.modes:
                jobs = [make_job(args, model, mode, seed) for seed in pair]
                if args.pair_solo and (mode in SOLO or mode in MACHINES):
                    yield jobs
                else:
                    yield from ([job] for job in jobs)


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


def run_jobs(jobs: Sequence[Job], *, in_turn: bool) -> list[Line | None]:
    """Make runs, at the same time and each in a process of its own, or in turn in one process.

    Returns:
        Their lines of the record; ``None`` for one that failed.
    """
    env = environment(**ENVIRONMENT)
    load = MachineLoad()
    by_child = [jobs] if in_turn else [[job] for job in jobs]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, *(json.dumps(job.spec) for job in batch)],
            stdout=subprocess.PIPE,
            env=env,
            text=True,
            start_new_session=True,
        )
        for batch in by_child
    ]
    outputs: list[str] = []
    try:
        deadline = time.monotonic() + RUN_S
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                outputs.append(child.communicate(timeout=max(1.0, deadline - time.monotonic()))[0])
                continue
            outputs.append("")
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    others = round(load.others(), 4)
    lines: list[Line | None] = []
    for batch, output in zip(by_child, outputs, strict=True):
        found = [x.removeprefix(RESULT) for x in output.splitlines() if x.startswith(RESULT)]
        lines += [_line(job, result, others) for job, result in zip(batch, found, strict=False)]
        lines += [None] * (len(batch) - len(found))
    return lines


def _line(job: Job, result: str, others: float) -> Line:
    more = {"used_by_others": others, "torch": torch.__version__}
    return {**job.key(), **json.loads(result), **more}


def _is_wanted(args: argparse.Namespace, job: Job, line: Line | None) -> bool:
    """True if a run is missing, or was disturbed while its time is measured."""
    if args.timed and job.spec["mode"] in SOLO:
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
        made = run_jobs(wanted, in_turn=args.command == "sync")
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
        report = judge(results, args.modes)
        for model, note in notes.items():
            report["models"][model] |= note
            if args.command == "sync":
                report["models"][model]["rows"] = compare_sync(results[model], model)
        report |= {"machine": describe(), "settings": args.settings, "quiet": QUIET}
        report |= {"num_runs": len(loads), "num_disturbed": sum(load > QUIET for load in loads)}
        text = sync_markdown(report) if args.command == "sync" else markdown(report)
        args.report.write_text(text)
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
            one = {seed: result["loss"] for seed, result in runs.get(ONE_MACHINE, {}).items()}
            mine = runs.get(way, {})
            parts = {seed: mine[seed]["loss"] / one[seed] for seed in mine.keys() & one.keys()}
            found = compare(parts, dict.fromkeys(parts, 1.0), higher_is_better=False)
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
        shown = [_relative(cells.get(model)) for model in models]
        found = report["ways"][way]
        rows.append([way, *shown, f"{found['mean']:+.1%}", str(found["num_worse"])])
    lines = [
        "# Outer optimizers: two machines against one process",
        "",
        f"{machine['cores']} cores ({machine['architecture']}), Python {machine['python']}, torch "
        f"{machine['torch']}. Increase of the held-out loss of two machines over that of one "
        "process at the global batch, for which the learning rate is tuned, paired by seed: mean ± "
        "standard error, bold where worse by more than two of them. The number behind the name is "
        "that of the batches of each machine between two rounds.",
        "",
        table(["", *models, "mean", "worse"], rows),
        "",
        *(f"- {name}: {note['definition']}." for name, note in report["notes"].items()),
        *(f"- {fault}" for fault in report["faults"]),
    ]
    missing = [f"{m} {', '.join(n['missing'])}" for m, n in report["notes"].items() if n["missing"]]
    lines += [f"- Not there yet: {one}." for one in missing]
    if report["default"] is not None:
        means = " and ".join(f"{mean:+.1%} ({name})" for name, mean in report["means"].items())
        lines += ["", f"Means over all cells: {means}. The default follows: {report['default']}."]
    return "\n".join(lines) + "\n"


def _relative(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    text = f"{found['mean']:+.1%}"
    text += "" if found["se"] is None else f" ± {found['se']:.1%}"
    return f"**{text}**" if found["verdict"] == "worse" else text


# -- sync: SYNC with shares beside CADENCE, by loss and by the time to a loss ------------


MARGINS = {
    "logistic": 0.01,
    "mlp": 0.03,
    "lenet": 0.1,
    "autoencoder": 0.1,
    "char-rnn": 0.01,
    "gpt": 0.01,
}
"""By what part a held-out loss may lie above that of one device at the global batch and still be
no worse: more where seeds of one device differ by more, 2, 13 and 21 % in standard deviations."""
REACHED = 0.9
"""Part of the way from the initial loss to the last one of one device at the global batch."""
SIZES = ["lenet.part=0.5", "autoencoder.part=0.5"]
SIZES += [
    f"{model}.{size}" for model in ("char-rnn", "gpt") for size in ("part=0.2", "num_epochs=4")
]
"""Default overrides of ``sync``: less data, and more epochs; each is a point."""


def beside_solo(runs: Runs, mode: str, margin: float) -> Difference | None:
    """Relative excess of a mode's held-out loss over solo's, paired by seed.

    The verdict is ``"no worse"`` if the mean and two standard errors are within the margin,
    ``"worse"`` if they are not and the mean is more than two above 0, else ``"undecided"``.
    """
    solo, mine = runs["solo-global"], runs[mode]
    parts = {seed: mine[seed]["loss"] / solo[seed]["loss"] for seed in mine.keys() & solo.keys()}
    found = compare(parts, dict.fromkeys(parts, 1.0), higher_is_better=False)
    if found is None or found.se is None:
        return found
    if found.mean + LIMIT_SE * found.se <= margin:
        return replace(found, verdict="no worse")
    return found if found.verdict == "worse" else replace(found, verdict="undecided")


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
    """For each mode but solo, its loss, its times, and those of CADENCE over them."""
    margin, rows = MARGINS[model], []
    for mode in SYNC_MODES[1:]:
        if not runs.get(mode):
            continue
        difference = beside_solo(runs, mode, margin)
        row: dict[str, Any] = {"mode": mode, "num_runs": len(runs[mode]), "targets": []}
        row["loss"] = asdict(spread(result["loss"] for result in runs[mode].values()))
        row["beside_solo"] = None if difference is None else asdict(difference)
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
    head = ["model", "mode", "held-out loss", "above one device", "margin", "", "seeds"]
    ahead = ["model", "mode"]
    for what in (f"{REACHED:.0%} of the way", "its last loss and the margin"):
        ahead += [f"s to {what}", "reached", "CADENCE takes"]
    losses, times = [], []
    for model, found in report["models"].items():
        for row in found["rows"]:
            d = row["beside_solo"]
            shown = "" if d is None else f"{d['mean']:+.2%}"
            shown += f" ± {d['se']:.2%}" if d and d["se"] is not None else ""
            verdict = "" if d is None else d["verdict"]
            verdict = f"**{verdict}**" if verdict == "worse" else verdict
            loss, margin = f"{row['loss']['mean']:.5g}", f"{MARGINS[model]:.0%}"
            num_pairs = "" if d is None else f"{d['num_pairs']}"
            losses.append([model, row["mode"], loss, shown, margin, verdict, num_pairs])
            cells = [model, row["mode"]]
            for t in row["targets"]:
                gain, ends = t["cadence_over_this"], t["ends"]
                is_sync = row["mode"].startswith("sync")
                cells.append("" if t["median_s"] is None else f"{t['median_s']:.2f}")
                cells.append(f"{t['num_reached']} of {t['num_timed']}")
                span = "" if gain is None else f"{gain:.2f} x ({ends[0]:.2f} to {ends[1]:.2f})"
                cells.append(span if is_sync else "")
            times.append(cells)
    lines = ["# SYNC with shares beside CADENCE", ""]
    machine = report["machine"]
    lines += [
        f"{machine['cores']} cores, torch {machine['torch']}; two CPU workers, one intra-op thread "
        f"each; `{SLOWED[1:]}`: rank 1 takes {SLOWDOWN:g} times as long. Losses are paired by seed "
        "with one device at the global batch, mean ± standard error; no worse: two of them are "
        "within the margin. " + _settings(report["settings"]),
        "",
        table(head, losses, num_texts=2),
        "",
        "Times are medians of the runs that nothing disturbed, evaluated at the end of each "
        "epoch with straight lines between; the ratio is the median of the seeds that both "
        "reach, with both ends.",
        "",
        table(ahead, times, num_texts=2),
        "",
    ]
    for model, found in report["models"].items():
        lines += [f"- {model}: {found['definition']}."]
        lines += [f"  - {fault}" for fault in found["faults"]]
        lines += [f"  - Not there yet: {', '.join(found['missing'])}."] if found["missing"] else []
    return "\n".join([*lines, ""])


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
            rate = base * lr_factor(position / num_steps)
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
        model, _ = run_solo(case.study, data, {"mode": "solo-global", "seed": case.seed})
    return asdict(case) | case.study.evaluate(model, data.held_out)


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Every requested training."""
    folder = None if args.data is None else str(args.data)
    cases: list[Case] = []
    for seed, model in itertools.product(range(args.seeds), args.models):
        solo = Case(model=model, seed=seed, overrides=overrides_of(args, model), folder=folder)
        periods = args.every
        if args.rounds:
            study = solo.study
            steps = solo.load().num_samples // (study.batch_size * WORLD_SIZE) * study.num_epochs
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
        parts = {seed: row["loss"] / one[seed]["loss"] for seed, row in mine.items()}
        difference = compare(parts, dict.fromkeys(parts, 1.0), higher_is_better=False)
        assert difference is not None, "every seed has its solo training"
        line = dict(zip(WAY, way, strict=True)) | asdict(difference)
        if all("accuracy" in row for row in mine.values()):
            percent = [
                {seed: row["accuracy"] * 100 for seed, row in side.items()} for side in (mine, one)
            ]
            points = compare(*percent, higher_is_better=True)
            line["points"] = points and asdict(points)
        found.append(line)
    return found


def drift_table(summary: Sequence[dict[str, Any]]) -> str:
    """The summary as a table."""
    head = ["model", "replicas", "averaged every", "taken late by", "exact until", "learning rate"]
    head += ["held-out loss above solo's", "", "accuracy in points", "seeds"]

    def shown(found: Mapping[str, Any] | None, digits: int, unit: str) -> str:
        if found is None:
            return ""
        text = f"{found['mean']:+.{digits}{unit}}"
        return text if found["se"] is None else f"{text} ± {found['se']:.{digits}{unit}}"

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
    rows: list[dict[str, Any]] = []
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, spawned, torch.set_num_threads, (1,)) as pool:
        for row in pool.map(train_case, cases):
            del row["folder"]
            rows.append(row)
            record = {"machine": machine, "studies": studies, "rows": rows}
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
    modes = {"sync": SYNC_MODES, "machines": (ONE_MACHINE, *MACHINES)}.get(
        command or "", DEFAULT_MODES
    )
    sync = command == "sync"
    add("--modes", nargs="+", choices=(*MODES, *MACHINES), default=list(modes))
    add("--seeds", type=int, default=10 if sync else 5, help="runs of each cell (%(default)s)")
    add("--minutes", type=float, help="start no run after that long; call again to continue")
    add("--pair-solo", action="store_true", help="two seeds at once where a mode is one thread")
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
