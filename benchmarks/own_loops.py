"""``Trainer.loop`` against ``train_fn``; ``Trainer.setup`` and ``FSDP`` against PyTorch's own.

Usage: ``python benchmarks/own_loops.py loop|setup|fsdp [--json FILE] ...``.
``benchmarks/README.md`` describes the measurements.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness.cells import Cells
from benchmarks.harness.measure import (
    Cell,
    Check,
    Measured,
    begin,
    disturbed_line,
    interleaved,
    median_interval,
    parser_of_sections,
    save,
    table,
)
from benchmarks.harness.models import (
    TRANSFORMERS,
    WORKLOADS,
    Batch,
    Workload,
    batches,
    busy,
    solo_rate,
    step_seconds,
)
from benchmarks.harness.processes import GlooGroup
from benchmarks.harness.reachable import reachable_bytes
from runtime import (
    FSDP,
    ApplyPolicy,
    Collective,
    ShardingStrategy,
    Trainer,
    create_collectives,
)

WORLD_SIZE = 2
WAIT_S = 180.0
TARGET = 1.0
"""Least ratio to the rate of PyTorch's own, by the shortest step of one worker's batch:"""
LONG_STEP_S = 5e-3


def judged(what: str, ratio: float, step_s: float) -> str:
    """The ratio to PyTorch's own and its verdict, if there is one at this length of a step."""
    if step_s < LONG_STEP_S:
        return f"{what}: {ratio:.2f}, no target under {LONG_STEP_S * 1e3:g} ms a step"
    return str(Check(what=what, measured=ratio, wanted=TARGET))


def report(
    workload: Workload,
    step_s: float,
    found: Measured,
    titles: dict[str, str],
    base: float,
    base_title: str = "PyTorch's own",
) -> None:
    """Print the medians of one workload, and their ratios to a base."""
    print(f"## {workload.what}: {step_s * 1e3:.2f} ms a bare step\n")
    rows = [
        [title, f"{rate:,.0f}", f"{rate / base:.2f}"]
        for title, rate in ((titles[key], rate) for key, rate in found.medians().items())
    ]
    print(table(["system", "samples/s", f"/ {base_title}"], rows), end="\n\n")
    print(disturbed_line(found.disturbed()), end="\n\n", flush=True)


# -- Trainer.loop ------------------------------------------------------------------------

LOOP_TARGET = 0.97
LOOP_TITLES = {
    "solo": "bare loop",
    "train_fn": "train_fn, 1 worker",
    "loop": "Trainer.loop, 1 worker",
    "train_fn_2": "train_fn, 2 workers under SYNC",
    "loop_2": "Trainer.loop, 2 workers under SYNC",
}


def loop(args: argparse.Namespace) -> None:
    """``Trainer.loop`` against ``train_fn`` and a bare loop, with one worker and with two."""
    result: dict[str, Any] = {**begin(), "repeat": args.repeat, "seconds": args.seconds}
    result["steps"] = {}
    for wanted_ms in args.step_ms:
        workload = busy(wanted_ms / 1e3)
        step_s = step_seconds(workload)
        cells = Cells(workload, step_s, args.seconds)
        wanted = [cells.solo("solo")]
        for suffix, num_workers in (("", 1), ("_2", 2)):
            pauses = (0.0,) * num_workers
            for key, is_own in (("train_fn", False), ("loop", True)):
                wanted.append(
                    cells.runtime(
                        key + suffix, ApplyPolicy.SYNC, pauses, steady=True, own_loop=is_own
                    )
                )
        found = interleaved(wanted, args.repeat)
        rates = found.medians()
        report(workload, step_s, found, LOOP_TITLES, rates["solo"], "bare loop")
        ratios = {}
        for name, base in (("loop", "train_fn"), ("loop_2", "train_fn_2"), ("loop", "solo")):
            ratio, *interval = median_interval(found.ratios(name, base))
            ratios[f"{name}_over_{base}"] = [ratio, *interval]
            what = f"{LOOP_TITLES[name]} / {LOOP_TITLES[base]}"
            spread = f" ({interval[0]:.3f} to {interval[1]:.3f})"
            check = Check(what=what, measured=ratio, wanted=LOOP_TARGET)
            print(f"{what}: {ratio:.3f}" if base == "solo" else check, end=spread + "\n")
        print(flush=True)
        result["steps"][f"{wanted_ms:g} ms"] = {"step_s": step_s, **found.record(), **ratios}
        save(args.json, result)


# -- Trainer.setup -----------------------------------------------------------------------

SETUP_TITLES = {
    "setup": "Trainer.setup, 2 CPU replicas",
    "ddp": "DistributedDataParallel, 2 Gloo processes",
    "cores": "one process, all cores, the global batch",
    "solo": "bare loop, 1 thread",
    "one": "Trainer.setup, 1 device, 1 thread",
}


def timed(step: Callable[[], None], seconds: float) -> float:
    """Steps a second, after a fifth of the time to warm up."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds / 5:
        step()
    num_steps, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        step()
        num_steps += 1
    return num_steps / elapsed


def setup_rate(workload: Workload, data: Batch, num_devices: int, seconds: float) -> float:
    """Samples/s of a loop over ``Trainer.setup``."""
    size = num_devices * workload.batch_size
    source = batches(data, size, 0)
    with Trainer.setup(
        workload.make_model(), workload.make_optimizer, ["cpu"] * num_devices
    ) as model:

        def step() -> None:
            workload.loss(model, next(source)).backward()
            model.step()

        return size * timed(step, seconds)


def setup(args: argparse.Namespace) -> None:
    """``Trainer.setup`` against DDP and against one process, and on one device a bare loop."""
    result: dict[str, Any] = {**begin(), "repeat": args.repeat, "seconds": args.seconds}
    result["models"] = {}
    with GlooGroup(WORLD_SIZE) as group:
        for name in args.models:
            workload = WORKLOADS[name]
            step_s = step_seconds(workload)
            cells = Cells(workload, step_s, args.seconds, group)
            num_batches = WORLD_SIZE * max(4, int(args.seconds / 3 / step_s))
            data = workload.make_data(workload.batch_size * min(num_batches, workload.max_batches))

            def wrapped(
                key: str, num_devices: int, w: Workload = workload, d: Batch = data
            ) -> Cell:
                def run(_: float) -> float:
                    return setup_rate(w, d, num_devices, args.seconds)

                return Cell(key=key, guess=1.0, run=run)

            def cores(_: float, w: Workload = workload, d: Batch = data) -> float:
                return solo_rate(
                    w,
                    d,
                    warmup_s=args.seconds / 5,
                    measure_s=args.seconds,
                    num_threads=os.cpu_count() or 1,
                    batch_size=WORLD_SIZE * w.batch_size,
                )

            wanted = [
                wrapped("setup", WORLD_SIZE),
                cells.peer("ddp", "ddp", (0.0,) * WORLD_SIZE),
                Cell(key="cores", guess=1.0, run=cores),
                cells.solo("solo"),
                wrapped("one", 1),
            ]
            found = interleaved(wanted, args.repeat)
            rates = found.medians()
            report(workload, step_s, found, SETUP_TITLES, rates["ddp"])
            ratios = {
                "setup_over_ddp": rates["setup"] / rates["ddp"],
                "setup_over_cores": rates["setup"] / rates["cores"],
                "one_device_over_bare": rates["one"] / rates["solo"],
            }
            print(judged("Trainer.setup / DDP", ratios["setup_over_ddp"], step_s))
            print(f"Trainer.setup / one process, all cores: {ratios['setup_over_cores']:.2f}")
            print(f"one device / bare loop: {ratios['one_device_over_bare']:.3f}\n", flush=True)
            result["models"][name] = {"step_s": step_s, **found.record(), **ratios}
            save(args.json, result)


# -- FSDP --------------------------------------------------------------------------------

MEMORY_TARGET = 0.05
FSDP_TITLES = {
    "solo": "bare loop, 1 thread",
    "fsdp": "FSDP FULL_SHARD, 2 threads",
    "prefetch": "the same with prefetch_forward_params",
    "sharded": "fully_shard(model), 2 Gloo processes",
    "sharded_blocks": "fully_shard(block) for each block and the model, 2 Gloo processes",
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
    """Bytes of rank 0: outside of steps, at the peak, and of activations in the peak."""

    def work(end: Collective) -> tuple[int, int]:
        data = workload.make_data(workload.batch_size)
        with StorageMeter() as meter:
            fsdp = make_wrapper(workload, end, strategy)
            optimizer = workload.make_optimizer(fsdp.parameters())
            for step in range(3):
                optimizer.zero_grad()
                if step == 2:  # wrapping temporarily needs more
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


class StorageMeter(TorchDispatchMode):
    """Tracks the outputs of the calling thread's operators, forward and backward.

    Temporaries within a kernel are not seen, nor is what existed before.

    Attributes:
        now_bytes: Bytes of live tensors.
        peak_bytes: Peak of ``now_bytes``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view of another thread's tensor does not count as this thread's memory.
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given:
                self._see(storage)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._alive or not num_bytes:
            return

        def gone(_: object) -> None:
            del self._alive[key]
            self.now_bytes -= num_bytes

        self._alive[key] = weakref.ref(storage, gone)
        self.now_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def memory(name: str) -> None:
    """Print the memory of a rank under every strategy, in units of the model's size."""
    workload = TRANSFORMERS[name]
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


def fsdp(args: argparse.Namespace) -> None:
    """``FSDP`` against ``fully_shard``, and the memory of a rank under every strategy."""
    result: dict[str, Any] = {**begin(), "repeat": args.repeat, "seconds": args.seconds}
    result["models"] = {}
    no_pauses = (0.0,) * WORLD_SIZE
    with GlooGroup(WORLD_SIZE) as group:
        for name in args.models:
            workload = TRANSFORMERS[name]
            step_s = step_seconds(workload)
            cells = Cells(workload, step_s, args.seconds, group)
            num_steps = max(5, int(args.seconds / step_s / 2))

            def threads(key: str, w: Workload = workload, n: int = num_steps) -> Cell:
                def run(_: float) -> float:
                    return threads_rate(w, n, prefetches=key == "prefetch")

                return Cell(key=key, guess=1.0, run=run)

            wanted = [cells.solo("solo"), threads("fsdp"), threads("prefetch")]
            wanted += [cells.peer(key, key, no_pauses) for key in ("sharded", "sharded_blocks")]
            found = interleaved(wanted, args.repeat)
            rates = found.medians()
            best = max(rates["sharded"], rates["sharded_blocks"])
            report(workload, step_s, found, FSDP_TITLES, best)
            print(
                judged("FSDP / the better of PyTorch's", rates["fsdp"] / best, step_s), end="\n\n"
            )
            result["models"][name] = {"step_s": step_s, **found.record()}
            save(args.json, result)
    memory(args.models[-1])


# -- the command line --------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser, commands = parser_of_sections(__doc__, {"loop": loop, "setup": setup, "fsdp": fsdp})
    commands["loop"].add_argument("--step-ms", type=float, nargs="+", default=[1.0, 6.0])
    for name, models, seconds, repeat in (
        ("loop", None, 1.5, 15),
        ("setup", WORKLOADS, 2.0, 5),
        ("fsdp", TRANSFORMERS, 1.0, 5),
    ):
        add = commands[name].add_argument
        if models is not None:
            add("--models", nargs="+", choices=models, default=list(models))
        add("--repeat", type=int, default=repeat, help=f"repetitions of each cell ({repeat})")
        add("--seconds", type=float, default=seconds, help=f"length of a measurement ({seconds:g})")
    args = parser.parse_args(argv)
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main()
