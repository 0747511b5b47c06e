"""Averaging on the CPU path: its arithmetic relative to memory bandwidth, and whole rounds.

Usage: ``python benchmarks/averaging.py [--parameters 1e6 1e7 1e8] [--json FILE]``.
``benchmarks/README.md`` describes the measurements.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness.measure import ENVIRONMENT as ONE_THREAD
from benchmarks.harness.measure import (
    QUIET,
    Check,
    MachineLoad,
    begin,
    milliseconds,
    parser_of,
    save,
    table,
    time_of,
)
from coordinator import averaging as host_memory
from coordinator.averaging import Averager
from coordinator.messages import Payload
from runtime import ApplyPolicy, AverageBackend, Timeline, Trainer
from runtime.replica.flat import add_progress, copy_with_norm
from runtime.replica.non_finite import all_finite

TARGET = 1.5
"""Bound of the arithmetic over the time of reading both and writing one, at 2 ranks in float32."""
TARGET_PARAMETERS = 10**8
"""Size to which the target applies."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WORLDS = (2, 3, 4)
NUM_SLICE = 1024
"""Parameters used by the forward pass of the whole round's model; the optimizer steps all."""
NUM_BATCHES, ANCHOR = 24, 2
JOIN_S = 170.0
OURS, NO_NORMS = "this runtime", "the same, without norms"
"""Ranks on CPUs report the norms of their snapshots; ``NO_NORMS`` omits them."""
SNAPSHOT, UPDATE = "snapshot: this runtime", "update: this runtime"
ALLOCATING = "stack, then mean (unweighted)"
"""The variant that allocates and frees memory of the models' size, which slows later ones."""
# Copies are made with several intra-op threads.
ENVIRONMENT = {k: v for k, v in ONE_THREAD.items() if k != "OMP_NUM_THREADS"}

Work = Callable[[], object]


def payload(tensor: Tensor) -> Payload:
    """A replica of one tensor."""
    return Payload(params=(tensor,))


def naive(out: Tensor, sources: Sequence[Tensor], weights: Sequence[int]) -> dict[str, Work]:
    """Other implementations of the weighted mean, without a norm; the last allocates its result."""
    first, *others = sources
    parts = [weight / sum(weights) for weight in weights]

    def products() -> None:
        torch.mul(first, parts[0], out=out)
        for source, part in zip(others, parts[1:], strict=True):
            out.add_(source, alpha=part)

    ways: dict[str, Work] = {"mul, then add": products}
    if len(sources) == 2:
        ways["lerp"] = lambda: torch.lerp(first, others[0], parts[1], out=out)
    ways[ALLOCATING] = lambda: torch.stack(list(sources)).mean(0)
    return ways


def of_one_rank(out: Tensor, sources: Sequence[Tensor]) -> dict[str, Work]:
    """Work of a rank in a round, also with a snapshot in two passes; changes ``sources[3]``.

    A snapshot reads one and writes one, an update reads three and writes one.
    """
    base = sources[3]

    def snapshot() -> None:
        all_finite(sources[:1])
        out.copy_(sources[0])

    return {
        SNAPSHOT: lambda: copy_with_norm(out, sources[0]),
        "snapshot: finite?, then copy": snapshot,
        UPDATE: lambda: add_progress(out, sources[0], base),
    }


def measure_arithmetic(
    num_parameters: int, num_threads: int, dtype: torch.dtype, repeat: int
) -> list[dict[str, Any]]:
    """One row for each number of ranks and variant; all variants in turn, ``repeat`` times.

    The copy that a ratio refers to is measured in the same turns with the same threads, and
    all memory was written to before. The allocating variant is measured afterwards.
    """
    torch.set_num_threads(num_threads)
    weights = [3, 5, 4, 6]
    like = torch.empty(num_parameters, dtype=dtype, device="meta")
    # The memory of the ranks' snapshots.
    sources = [host_memory.empty_like(like).normal_() for _ in range(max(WORLDS))]
    out = host_memory.empty_like(like)
    squares = [(float(source.double().square().sum()),) for source in sources[:2]]
    averager = Averager()
    works: dict[tuple[int, str], Work] = {(1, "copy"): lambda: out.copy_(sources[0])}
    works |= {(1, way): work for way, work in of_one_rank(out, sources).items()}
    for world in WORLDS:
        payloads = [payload(source) for source in sources[:world]]
        given = payloads, weights[:world]
        works[world, OURS] = partial(averager.average, *given)
        if world == 2 and dtype is torch.float32:
            works[world, NO_NORMS] = works[world, OURS]
            works[world, OURS] = partial(averager.average, *given, squares)
        for way, work in naive(out, sources[:world], weights[:world]).items():
            works[world, way] = work
    for work in works.values():
        work()  # two results are used in turn: both have been written to
    times: dict[tuple[int, str], list[float]] = {key: [] for key in works}
    load = MachineLoad()
    calm = [key for key in works if key[1] != ALLOCATING]
    for index in range(repeat):
        for key in calm if index % 2 == 0 else reversed(calm):
            times[key].append(time_of(works[key]))
    for _ in range(repeat):
        for key in works:
            if key[1] == ALLOCATING:
                times[key].append(time_of(works[key]))
    others = load.others()
    medians = {key: statistics.median(runs) for key, runs in times.items()}
    copy_s = medians.pop((1, "copy"))
    return [
        {
            "parameters": num_parameters,
            "threads": num_threads,
            "dtype": str(dtype).removeprefix("torch."),
            "ranks": world,
            "way": way,
            "seconds": seconds,
            "memory_s": copy_s * num_passes(world, way) / 2,  # a copy is two
            "ratio": seconds / (copy_s * num_passes(world, way) / 2),
            "copy_gb_s": 2 * num_parameters * out.element_size() / copy_s / 1e9,
            "used_by_others": others,
        }
        for (world, way), seconds in medians.items()
    ]


def num_passes(world: int, way: str) -> int:
    """Memory traffic of an implementation, in replicas."""
    return 4 if way.startswith("update") else world + 1


class Flat(nn.Module):
    """A model with the given number of parameters, and a step cheaper than the optimizer's."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_parameters,), 1e-3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight[: x.shape[1]]


def measure_round(num_parameters: int) -> dict[str, Any]:
    """Rounds of a run with 2 workers under CADENCE over the CPU path, as medians in seconds."""
    torch.set_num_threads(os.cpu_count() or 1)
    timeline = Timeline(min_gap_s=3600.0)
    data = (torch.randn(NUM_BATCHES * 4, min(NUM_SLICE, num_parameters)),)
    load = MachineLoad()
    Trainer.builder(
        lambda device: Flat(num_parameters).to(device),
        lambda params: torch.optim.SGD(params, 1e-6),
        lambda model, batch: model(batch[0]).square().mean(),
    ).dataset(data).batch_size(4).num_epochs(1).devices(["cpu"] * 2).policy(
        ApplyPolicy.CADENCE
    ).backend(AverageBackend.CPU).anchor(ANCHOR).max_anchor(ANCHOR).timeline(timeline).progress(
        False
    ).snapshot_timeout(60.0).run().join(JOIN_S)
    # The first rounds allocate the snapshots and both results.
    rounds: dict[tuple[int, str], list[float]] = {}
    for event in timeline.events():
        part = event.args.get("part", event.args.get("phase"))
        if event.kind.value in ("averaging", "phase") and int(event.args["round"] or 0) > 2:
            rank = -1 if event.rank is None else event.rank
            rounds.setdefault((rank, str(part)), []).append(event.duration_s)
    medians = {key: statistics.median(runs) for key, runs in rounds.items()}
    return {
        "parameters": num_parameters,
        "rounds": len(rounds.get((-1, "round"), ())),
        "round_s": medians.get((-1, "round")),
        "arithmetic_s": medians.get((-1, "computed")),
        "pauses_s": [
            {part: medians.get((rank, part)) for part in ("snapshot", "update")} for rank in (0, 1)
        ],
        "used_by_others": load.others(),
    }


def judge(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """The target for each number of threads, at its size, if measured."""
    return [
        Check(
            what=f"2 ranks, float32, {row['parameters']:.0e} parameters, {row['threads']} "
            "threads: arithmetic / reading both and writing one",
            measured=row["ratio"],
            wanted=TARGET,
            at_most=True,
        )
        for row in rows
        if (row["ranks"], row["dtype"], row["way"]) == (2, "float32", OURS)
        and row["parameters"] == TARGET_PARAMETERS
    ]


def arithmetic_table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        [
            *(f"{r['parameters']:.0e}", f"{r['threads']}", r["dtype"], f"{r['ranks']}", r["way"]),
            *(f"{r['seconds'] * 1e3:.2f}", f"{r['memory_s'] * 1e3:.2f}", f"{r['ratio']:.2f}"),
        ]
        for r in rows
    ]
    head = ["parameters", "threads", "dtype", "ranks", "way", "ms", "memory alone: ms", "ratio"]
    return table(head, cells, num_texts=5)


def round_table(rounds: Sequence[dict[str, Any]]) -> str:
    head = ["parameters", "rounds", "round: ms", "of it arithmetic"]
    head += [f"rank {rank}: snapshot + update" for rank in (0, 1)]
    cells = []
    for r in rounds:
        shown = [milliseconds(r["round_s"]), milliseconds(r["arithmetic_s"])]
        shown += [
            f"{milliseconds(pause['snapshot'])} + {milliseconds(pause['update'])}"
            for pause in r["pauses_s"]
        ]
        cells.append([f"{r['parameters']:.0e}", f"{r['rounds']}", *shown])
    return table(head, cells)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--parameters", nargs="+", type=float, default=[1e6, 1e7, 1e8])
    cores = os.cpu_count() or 1
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, cores}))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repeat", type=int, default=7, help="repetitions of all variants")
    parser.add_argument("--no-round", action="store_true", help="measure the arithmetic only")
    args = parser.parse_args()
    if args.repeat < 1 or min(args.parameters) < 1 or min(args.threads) < 1:
        parser.error("--repeat, --parameters and --threads must be at least 1")
    return args


def main() -> None:
    args = parse_args()
    result: dict[str, Any] = {**begin(ENVIRONMENT), "repeat": args.repeat, "arithmetic": []}
    sizes = [int(number) for number in args.parameters]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, medians of {args.repeat} turns\n")
    for size in sizes:
        for threads in args.threads:
            for name in args.dtypes:
                result["arithmetic"] += measure_arithmetic(size, threads, DTYPES[name], args.repeat)
    print(arithmetic_table(result["arithmetic"]), end="\n\n", flush=True)
    result["rounds"] = [] if args.no_round else [measure_round(size) for size in sizes]
    if result["rounds"]:
        print("Whole rounds, 2 workers, CADENCE over the CPU path:\n")
        print(round_table(result["rounds"]), end="\n\n")
    checks = judge(result["arithmetic"])
    print(
        "\n".join(map(str, checks)) or f"No verdict: it is on {TARGET_PARAMETERS:.0e} parameters."
    )
    shares = [row["used_by_others"] for row in (*result["arithmetic"], *result["rounds"])]
    print(f"Other processes used up to {max(shares):.0%} of the cores; quiet is {QUIET:.0%}.")
    save(args.json, {**result, "targets": [check.record() for check in checks]})


if __name__ == "__main__":
    main()
