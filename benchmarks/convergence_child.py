"""One training run of the convergence benchmark, in a process of its own.

Usage: ``python -m benchmarks.convergence_child SPEC``, where ``SPEC`` is JSON with ``model``,
``mode``, ``seed``, ``data`` (a folder, or null for the tiny stand-in), ``overrides`` of the
study's numbers and ``settings`` of the trainer's builder. The last line it prints is the
result as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.convergence_data import Columns, Data
from benchmarks.harness.studies import STUDIES, Study, scheduler
from coordinator.dispatch import permutation
from runtime import ApplyPolicy, AverageBackend, Trainer

WORLD_SIZE = 2
JOIN_S = 900.0
SOLO = {"solo-small": 1, "solo-global": WORLD_SIZE}
"""Modes of one process, with the size of their batch in batches of a worker."""
RUNTIME = {
    "sync": (ApplyPolicy.SYNC, AverageBackend.AUTO),
    "cpu-cadence": (ApplyPolicy.CADENCE, AverageBackend.CPU),
    "cpu-async": (ApplyPolicy.ASYNC, AverageBackend.CPU),
    "collective-cadence": (ApplyPolicy.CADENCE, AverageBackend.THREAD),
    "collective-async": (ApplyPolicy.ASYNC, AverageBackend.THREAD),
}
AVERAGED = tuple(mode for mode, (policy, _) in RUNTIME.items() if policy is not ApplyPolicy.SYNC)
"""Modes whose replicas are averaged from time to time."""
MODES = (*SOLO, "ddp", *RUNTIME)


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
    """A step on a model of its own: PyTorch imports and prepares much at the first one."""
    model = make_model(study, data.num_symbols, 0)
    optimizer = study.make_optimizer(model.parameters(), study.lr)
    loss = study.loss(model, tuple(c[: study.batch_size] for c in data.train))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def train_loop(
    study: Study, model: nn.Module, data: Data, seed: int, batch_size: int, rank: int, size: int
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
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            lr.step()
            stepping_s += time.perf_counter() - start
    return stepping_s


def run_solo(study: Study, data: Data, spec: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """One process, at the batch of a worker or at the global one."""
    model = make_model(study, data.num_symbols, spec["seed"])
    initial = fingerprint(model)
    batch_size = study.batch_size * SOLO[spec["mode"]]
    start = time.perf_counter()
    stepping_s = train_loop(study, model, data, spec["seed"], batch_size, 0, 1)
    train_s = time.perf_counter() - start
    return model, {
        "initial": initial,
        "train_s": train_s,
        "idle_share": max(0.0, 1 - stepping_s / train_s),
        "num_averagings": 0,
    }


def run_runtime(
    study: Study, data: Data, spec: Mapping[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """Two CPU workers under one of the runtime's policies, defaults but for ``settings``."""
    policy, backend = RUNTIME[spec["mode"]]
    num_positions = study.num_epochs * (data.num_samples // study.batch_size)
    initial: list[float] = []

    def factory(device: torch.device) -> nn.Module:
        torch.set_num_threads(1)
        model = make_model(study, data.num_symbols, spec["seed"]).to(device)
        initial.append(fingerprint(model))
        return model

    def train_fn(model: nn.Module, batch: Columns) -> torch.Tensor:
        return study.loss(model, batch)

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
    start = time.perf_counter()
    handle = builder.run()
    state = handle.join(JOIN_S)
    train_s = time.perf_counter() - start
    statistics = handle.statistics()
    busy_s = sum(r.compute_s for r in statistics.ranks) / WORLD_SIZE
    model = study.make_model(data.num_symbols)
    model.load_state_dict(state.state_dict())
    return model, {
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


def run(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Train as the spec says, then evaluate; the result that goes into the record."""
    torch.set_num_threads(1)
    study = study_of(spec)
    data = study.load(Path(spec["data"]) if spec["data"] else None)
    warm_up(study, data)
    if spec["mode"] in SOLO:
        model, facts = run_solo(study, data, spec)
    elif spec["mode"] in RUNTIME:
        model, facts = run_runtime(study, data, spec)
    else:
        from benchmarks.convergence_ddp import run_ddp

        model, facts = run_ddp(study, data, spec)
    facts.setdefault("num_samples", study.num_epochs * data.num_samples)
    return {**facts, **study.evaluate(model, data.held_out)}


def main() -> None:
    print(json.dumps(run(json.loads(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()
