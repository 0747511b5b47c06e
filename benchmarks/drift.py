"""What averaging seldom or late costs in quality, apart from timing: replicas in one thread.

Usage: ``python -m benchmarks.drift --data FOLDER [--model gpt] [--every 2 3 6] [--late 0 1]
[--lr-scales 1.2] [--seeds 7] [--json FILE]``. What is measured stands in ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.convergence_child import WORLD_SIZE, make_model, run_solo
from benchmarks.convergence_data import Data, DataMissing, check_folder, default_folder
from benchmarks.convergence_report import compare
from benchmarks.harness.measure import describe, table
from benchmarks.harness.studies import STUDIES, Study, scheduler
from coordinator.dispatch import permutation


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training; ``every`` 0 is one device at the global batch.

    Attributes:
        model: Name of a study.
        seed: Of the weights and of the order of the samples.
        every: Steps between two averagings.
        late: Whether a replica makes a step before it takes an average, 0 or 1.
        lr_scale: Factor on the study's learning rate.
        folder: Of the data; ``None``: the tiny stand-in.
    """

    model: str
    seed: int
    every: int = 0
    late: int = 0
    lr_scale: float = 1.0
    folder: str | None = None


def averaged_state(model: nn.Module) -> list[Tensor]:
    """What is averaged of a replica: parameters and floating-point buffers."""
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    return [*(p.data for p in model.parameters()), *buffers]


@torch.no_grad()
def mean_of(models: Sequence[nn.Module]) -> list[Tensor]:
    """The mean of the replicas' states; a new one."""
    states = [averaged_state(model) for model in models]
    return [torch.stack(parts).mean(0) for parts in zip(*states, strict=True)]


@torch.no_grad()
def move(models: Sequence[nn.Module], deltas: Sequence[Sequence[Tensor]]) -> None:
    """Add to each replica what an average brings it."""
    for model, delta in zip(models, deltas, strict=True):
        for tensor, change in zip(averaged_state(model), delta, strict=True):
            tensor.add_(change)


def deltas_of(models: Sequence[nn.Module]) -> list[list[Tensor]]:
    """The mean less the state of each replica."""
    mean = mean_of(models)
    return [[m - t for m, t in zip(mean, averaged_state(r), strict=True)] for r in models]


def train_replicas(study: Study, data: Data, case: Case) -> nn.Module:
    """Train ``WORLD_SIZE`` replicas in turn; returns one that has their mean."""
    models = [make_model(study, data.num_symbols, case.seed) for _ in range(WORLD_SIZE)]
    rate = study.lr * case.lr_scale
    optimizers = [study.make_optimizer(model.parameters(), rate) for model in models]
    num_steps = study.num_epochs * (data.num_samples // (study.batch_size * WORLD_SIZE))
    schedules = [scheduler(optimizer, num_steps) for optimizer in optimizers]
    since = 0
    under_way: list[list[Tensor]] | None = None
    for epoch in range(study.num_epochs):
        order = torch.from_numpy(permutation(data.num_samples, epoch, case.seed))
        for indices in torch.split(order, study.batch_size * WORLD_SIZE):
            parts = torch.split(indices, study.batch_size)
            for model, optimizer, schedule, part in zip(
                models, optimizers, schedules, parts, strict=True
            ):
                batch = tuple(c.index_select(0, part) for c in data.train)
                optimizer.zero_grad()
                study.loss(model, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
            since += 1
            if under_way is not None:
                move(models, under_way)
                under_way = None
            if since == case.every:
                since = 0
                if case.late:
                    under_way = deltas_of(models)
                else:
                    move(models, deltas_of(models))
    move(models, deltas_of(models))
    return models[0]


def train(case: Case) -> dict[str, Any]:
    """The case and its held-out loss."""
    study = STUDIES[case.model]
    data = study.load(Path(case.folder) if case.folder else None)
    if case.every:
        model = train_replicas(study, data, case)
    else:
        model, _ = run_solo(study, data, {"mode": "solo-global", "seed": case.seed})
    return asdict(case) | study.evaluate(model, data.held_out)


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Every training that is asked for."""
    folder = None if args.data is None else str(args.data)
    cases: list[Case] = []
    for seed in range(args.seeds):
        common: dict[str, Any] = {"model": args.model, "seed": seed, "folder": folder}
        cases.append(Case(**common))
        cases += [
            Case(**common, every=every, late=late, lr_scale=scale)
            for scale in args.lr_scales
            for late in args.late
            for every in args.every
        ]
    return cases


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each way to average, what part of solo's loss it adds, paired by seed."""
    solo = {row["seed"]: row["loss"] for row in rows if not row["every"]}
    ways: dict[tuple[int, int, float], dict[int, float]] = {}
    for row in rows:
        if row["every"]:
            way = row["every"], row["late"], row["lr_scale"]
            ways.setdefault(way, {})[row["seed"]] = row["loss"] / solo[row["seed"]]
    found: list[dict[str, Any]] = []
    for (every, late, scale), parts in sorted(ways.items()):
        difference = compare(parts, dict.fromkeys(solo, 1.0), higher_is_better=False)
        assert difference is not None, "every seed has its solo training"
        found.append({"every": every, "late": late, "lr_scale": scale, **asdict(difference)})
    return found


def markdown(summary: Sequence[dict[str, Any]]) -> str:
    """The summary as a table."""
    head = ["averaged every", "taken late by", "learning rate"]
    head += ["held-out loss above solo's", "", "seeds"]
    rows = [
        [
            *(str(s["every"]), str(s["late"]), f"{s['lr_scale']:g} times"),
            f"{s['mean']:+.2%}" + ("" if s["se"] is None else f" ± {s['se']:.2%}"),
            *(s["verdict"], str(s["num_pairs"])),
        ]
        for s in summary
    ]
    return table(head, rows, num_texts=0)


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=default_folder(), help="the data's folder")
    parser.add_argument("--tiny", action="store_true", help="the tiny stand-in instead of data")
    parser.add_argument("--model", choices=STUDIES, default="gpt")
    parser.add_argument("--every", nargs="+", type=int, default=[1, 2, 3, 6])
    parser.add_argument("--late", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--lr-scales", nargs="+", type=float, default=[1.2])
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args(arguments)
    if min(args.every) < 1 or args.seeds < 1 or not all(0 <= n <= 1 for n in args.late):
        parser.error("--every and --seeds must be at least 1, --late 0 or 1")
    if args.tiny:
        args.data = None
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_args(arguments)
    try:
        if args.data is not None:
            check_folder(args.data)
    except DataMissing as error:
        raise SystemExit(str(error)) from None
    cores = os.cpu_count() or 1
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, spawned, torch.set_num_threads, (1,)) as pool:
        rows = list(pool.map(train, cases_of(args)))
    for row in rows:
        del row["folder"]
    summary = summarize(rows)
    print(f"{STUDIES[args.model].definition()}; two replicas in one thread\n\n{markdown(summary)}")
    if args.json:
        machine = describe()
        del machine["environment"]  # nothing is timed: it runs in the caller's
        record = {"machine": machine, "rows": rows, "summary": summary}
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
