"""FSDP against PyTorch's ``fully_shard``: samples/s with 2 ranks, and memory for each rank.

Usage: ``python benchmarks/wrappers_fsdp.py [--models small middle wide] [--repeat 5]``.
What is measured and how stands in ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch

from benchmarks.fsdp_models import WORKLOADS
from benchmarks.harness.loops import batches, solo_rate
from benchmarks.harness.measure import ENVIRONMENT, MachineLoad, restart_with
from benchmarks.harness.models import Workload
from benchmarks.harness.processes import DdpGroup
from benchmarks.storage_meter import StorageMeter
from runtime import FSDP, Collective, ShardingStrategy, create_collectives
from runtime.fsdp import reachable_bytes

WORLD_SIZE = 2
WAIT_S = 180.0
TARGET = 1.0
MIN_STEP_S = 0.005
MEMORY_TARGET = 0.05
TITLES = {
    "bare": "bare loop, 1 thread",
    "fsdp": "FSDP FULL_SHARD, 2 threads",
    "prefetch": "the same with prefetch_forward_params",
    "torch": "fully_shard(model), 2 Gloo processes",
    "torch_blocks": "fully_shard(block) for each block and the model, 2 Gloo processes",
}
NODES = {ShardingStrategy.HYBRID_SHARD: 2}


def on_ranks(world_size: int, work: Callable[[Collective], Any]) -> list[Any]:
    """Runs a function for every rank, each in its thread."""

    def run(end: Collective) -> Any:
        torch.set_num_threads(1)
        try:
            return work(end)
        finally:
            end.close()

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run, end) for end in create_collectives(world_size)]
        return [future.result(WAIT_S) for future in futures]


def make_wrapper(workload: Workload, end: Collective, strategy: ShardingStrategy) -> FSDP:
    return FSDP(workload.make_model(), end, strategy, NODES.get(strategy))


def threads_rate(workload: Workload, num_steps: int, *, prefetches: bool) -> float:
    """Samples/s of all ranks together, after two steps of warm-up."""

    def work(end: Collective) -> float:
        fsdp = make_wrapper(workload, end, ShardingStrategy.FULL_SHARD)
        optimizer = workload.make_optimizer(fsdp.parameters())
        data = workload.make_data(64 * workload.batch_size)
        start = 0.0
        stream = batches(data, workload.batch_size, end.rank)
        for step, batch in enumerate(islice(stream, num_steps + 2)):
            if step == 2:
                end.barrier()
                start = time.perf_counter()
            optimizer.zero_grad()
            workload.loss(fsdp, batch).backward()
            fsdp.sync_gradients()
            optimizer.step()
            if prefetches:
                fsdp.prefetch_forward_params()
        end.barrier()
        elapsed_s = time.perf_counter() - start
        fsdp.close()
        return elapsed_s

    return WORLD_SIZE * num_steps * workload.batch_size / max(on_ranks(WORLD_SIZE, work))


def memory_of(
    workload: Workload, strategy: ShardingStrategy, world_size: int
) -> tuple[int, int, int]:
    """Bytes of rank 0: outside of steps, all that it ever held, and activations among it."""

    def work(end: Collective) -> tuple[int, int]:
        data = workload.make_data(workload.batch_size)
        with StorageMeter() as meter:
            fsdp = make_wrapper(workload, end, strategy)
            optimizer = workload.make_optimizer(fsdp.parameters())
            for step in range(3):
                optimizer.zero_grad()
                if step == 2:  # wrapping needs more, once
                    meter.peak_bytes = meter.now_bytes
                workload.loss(fsdp, data).backward()
                fsdp.sync_gradients()
                optimizer.step()
                fsdp.broadcast_updated_params()
        end.barrier()
        held = reachable_bytes(fsdp, optimizer)
        end.barrier()
        return held, meter.peak_bytes

    held, peak = on_ranks(world_size, work)[0]
    with StorageMeter() as meter:
        model = workload.make_model()
        data = workload.make_data(workload.batch_size)
        before = meter.now_bytes
        loss = workload.loss(model, data)
        activations = meter.peak_bytes - before
        del loss
    return held, peak, activations


def throughput(names: list[str], num_repeats: int, seconds: float) -> None:
    """Measure all systems in turn, every other time in reverse order, and print ratios."""
    with DdpGroup(WORLD_SIZE, "fsdp_worker.py") as processes:
        for name in names:
            workload = WORKLOADS[name]
            data = workload.make_data(64 * workload.batch_size)
            step_s = workload.batch_size / solo_rate(
                workload, data, warmup_s=0.2, measure_s=seconds
            )
            num_steps = max(5, int(seconds / step_s / 2))
            systems: dict[str, Callable[[], float]] = {
                "bare": lambda w=workload, d=data: solo_rate(w, d, warmup_s=0.2, measure_s=seconds),
                "fsdp": lambda w=workload, n=num_steps: threads_rate(w, n, prefetches=False),
                "prefetch": lambda w=workload, n=num_steps: threads_rate(w, n, prefetches=True),
                "torch": lambda k=name, n=num_steps: processes.ask(
                    name=k, num_steps=n, by_block=False
                )["rate"],
                "torch_blocks": lambda k=name, n=num_steps: processes.ask(
                    name=k, num_steps=n, by_block=True
                )["rate"],
            }
            load = MachineLoad()
            rates: dict[str, list[float]] = defaultdict(list)
            for index in range(num_repeats):
                for key in systems if index % 2 == 0 else reversed(systems):
                    rates[key].append(systems[key]())
            report_rates(workload, step_s, rates, load.others())


def report_rates(
    workload: Workload, step_s: float, rates: dict[str, list[float]], others: float
) -> None:
    medians = {key: statistics.median(runs) for key, runs in rates.items()}
    best = max(medians["torch"], medians["torch_blocks"])
    print(f"## {workload.what}: {step_s * 1e3:.1f} ms a bare step\n")
    print("| system | samples/s | / the better of PyTorch's |\n| --- | ---: | ---: |")
    for key, title in TITLES.items():
        print(f"| {title} | {medians[key]:,.0f} | {medians[key] / best:.2f} |")
    ratio = medians["fsdp"] / best
    verdict = "met" if ratio >= TARGET else "MISSED"
    if step_s < MIN_STEP_S:
        verdict = "no target under 5 ms"
    print(f"\nFSDP / PyTorch: at least {TARGET:.2f}, measured {ratio:.2f}: {verdict}.")
    print(f"Other processes used {others:.0%} of the cores meanwhile.\n", flush=True)


def memory(name: str) -> None:
    """Print what a rank holds under every strategy, in units of the model's size."""
    workload = WORKLOADS[name]
    unit = reachable_bytes(workload.make_model())
    replicated = memory_of(workload, ShardingStrategy.NO_SHARD, 1)[0]
    print(f"## Memory of a rank, in models of {unit / 2**20:.1f} MiB: {workload.what}\n")
    print("| strategy | ranks | outside of steps | / replicated | limit | peak in a step | |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for strategy in ShardingStrategy:
        for world_size in (2, 4):
            held, peak, activations = memory_of(workload, strategy, world_size)
            limited = strategy is ShardingStrategy.FULL_SHARD
            limit = 1 / world_size + MEMORY_TARGET
            met = "met" if held <= limit * replicated else "MISSED"
            print(
                f"| {strategy.name} | {world_size} | {held / unit:.2f} | {held / replicated:.3f} "
                f"| {f'{limit:.3f}' if limited else ''} | {peak / unit:.2f} "
                f"| {met if limited else ''} |"
            )
    print(f"\nActivations are {activations / unit:.2f} models of the peak.\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    restart_with(ENVIRONMENT)
    torch.set_num_threads(1)
    throughput(args.models, args.repeat, args.seconds)
    memory(args.models[-1])


if __name__ == "__main__":
    main()
