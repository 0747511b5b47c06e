"""The sections of the GPU benchmark: its speeds, the table of all, and the machine's facts."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import torch
import torch.cuda.nccl
import torch.distributed
from torch import Tensor

from benchmarks.gpu.bench import Bench, Rates, Section, interleaved
from benchmarks.gpu.memory_budgets import budgets
from benchmarks.gpu.models import (
    LOADER_PROCESSES,
    GpuWorkload,
    bare_rate,
    conv,
    copy_bound,
    crowd_rate,
    epochs_for,
    graph_rate,
    interior_rate,
    loader_rate,
    resnet50,
    runtime_rate,
    small_mlp,
    transformer,
    wait_for,
)
from benchmarks.harness.measure import describe
from runtime import ApplyPolicy, TrainerBuilder

# -- the worker's loop against loops by hand, CUDA graphs, and two workers on one GPU ----


ROUNDS = 3
WORKER, BARE, SYNC = "worker", "bare loop", "worker, SYNC"
GRAPHS, BARE_GRAPH = "worker, cuda_graphs(True)", "bare loop, torch.cuda.graph"


def resident(builder: TrainerBuilder) -> TrainerBuilder:
    """Keep the data on the device."""
    return builder.resident(True)


def in_lockstep(builder: TrainerBuilder) -> TrainerBuilder:
    """The same under SYNC, which deals a whole epoch at once."""
    return builder.resident(True).policy(ApplyPolicy.SYNC)


def with_graphs(builder: TrainerBuilder) -> TrainerBuilder:
    """The same with the whole step as one CUDA graph."""
    any_builder: Any = builder.resident(True)
    return cast("TrainerBuilder", any_builder.cuda_graphs(True))


def conv_loop(bench: Bench) -> None:
    """One worker over resident data against a bare loop over tensors on the device."""
    _compare(bench, conv(dry=bench.dry))


def transformer_loop(bench: Bench) -> None:
    """The same with a transformer."""
    _compare(bench, transformer(dry=bench.dry))


def _compare(bench: Bench, workload: GpuWorkload) -> None:
    data = workload.make_data(bench.pick(60, 6) * workload.batch_size)
    columns = [column.to(bench.device) for column in data]
    seconds = bench.pick(2.5, 0.02)
    probe = bare_rate(workload, columns, bench.device, bench.pick(30, 2))
    steps = round(seconds * probe / workload.batch_size) + 1
    step_ms = 1e3 * workload.batch_size / probe
    bench.note(f"{workload.what}: {step_ms:.1f} ms a step in the bare loop")
    num_epochs = epochs_for(bench, seconds, len(data[0]) / probe)
    run = partial(interior_rate, bench, workload, data, num_epochs=num_epochs)
    ends_s: list[float] = []
    systems = {
        BARE: partial(bare_rate, workload, columns, bench.device, steps),
        WORKER: partial(run, configure=resident, ends_s=ends_s),
        SYNC: partial(run, configure=in_lockstep),
    }
    rates = interleaved(bench, systems, rounds=bench.pick(ROUNDS, 1), unit="samples/s")
    what = f"{workload.name}, {step_ms:.1f} ms a step"
    bench.row(f"{what}: worker / bare loop", rates.ratio(WORKER, BARE), target=0.98)
    bench.row(f"{what}: worker under SYNC / bare loop", rates.ratio(SYNC, BARE))
    tell_ends(bench, f"{workload.name}: worker", ends_s)
    rates.require([BARE, WORKER])


def tell_ends(bench: Bench, what: str, ends_s: Sequence[float]) -> None:
    """Report the time of the end of an epoch, which the rates of its steps exclude."""
    bench.raw(f"{what}, end of an epoch, s", list(ends_s))
    figure = 1e3 * statistics.median(ends_s) if ends_s else None
    bench.row(f"{what}: end of an epoch, beyond its steps", figure, unit="ms")


def graphs(bench: Bench) -> None:
    """A launch-bound MLP: the whole step as one graph against the eager worker."""
    workload = small_mlp(dry=bench.dry)
    data = workload.make_data(bench.pick(800, 8) * workload.batch_size)
    columns = [column.to(bench.device) for column in data]
    seconds = bench.pick(2.0, 0.02)

    def epochs_and_steps(rate: float) -> tuple[int, int]:
        num_epochs = epochs_for(bench, seconds, len(data[0]) / rate)
        return num_epochs, round(seconds * rate / workload.batch_size) + 1

    few = bench.pick(100, 2)
    eager_epochs, eager_steps = epochs_and_steps(bare_rate(workload, columns, bench.device, few))
    graph_epochs, graph_steps = epochs_and_steps(graph_rate(workload, columns, bench.device, few))
    run = partial(runtime_rate, bench, workload, data)
    systems = {
        WORKER: partial(run, num_epochs=eager_epochs, configure=resident),
        GRAPHS: partial(run, num_epochs=graph_epochs, configure=with_graphs),
        BARE: partial(bare_rate, workload, columns, bench.device, eager_steps),
        BARE_GRAPH: partial(graph_rate, workload, columns, bench.device, graph_steps),
    }
    rates = interleaved(bench, systems, rounds=bench.pick(ROUNDS, 1), unit="samples/s")
    bench.note(workload.what)
    bench.row("worker: CUDA graphs / eager", rates.ratio(GRAPHS, WORKER), target=3.0)
    bench.row("bare loop: CUDA graph / eager", rates.ratio(BARE_GRAPH, BARE))
    bench.row("worker / bare loop, both eager", rates.ratio(WORKER, BARE))
    bench.row("worker / bare loop, both CUDA graphs", rates.ratio(GRAPHS, BARE_GRAPH))
    rates.require([WORKER, GRAPHS])


def crowd(bench: Bench) -> None:
    """Two workers on one GPU against one, under CADENCE over the CPU; without a target."""
    for workload in (conv(dry=bench.dry), small_mlp(dry=bench.dry)):
        num_batches = bench.pick({"conv": 40, "mlp": 600}[workload.name], 12)
        data = workload.make_data(num_batches * workload.batch_size)
        num_epochs = bench.pick(5, 2)
        run = partial(crowd_rate, bench, workload, data, num_epochs=num_epochs, configure=resident)
        one, two = (f"{workload.name}: {n} worker{'s' * (n > 1)}" for n in (1, 2))
        systems = {one: partial(run, num_workers=1), two: partial(run, num_workers=2)}
        rates = interleaved(bench, systems, rounds=bench.pick(2, 1), unit="samples/s")
        bench.row(f"{workload.name}: 2 workers / 1 worker", rates.ratio(two, one))
        rates.require([one, two])


# -- rate of batches on the device: streamed, resident, by DataLoader --------------


LOADER = f"DataLoader(pin_memory=True, num_workers={LOADER_PROCESSES}), non-blocking copies"
STREAMED, RESIDENT, BARE_THERE = (
    "worker, streamed",
    "worker, resident(True)",
    "bare loop, data on device",
)
Systems = dict[str, Callable[[], float]]
PINNED_BUFFERS = 4


def require_shared_memory(num_bytes: int) -> None:
    """Raise if shared memory is too small for the batches in transit of a ``DataLoader``.

    Raises:
        RuntimeError: With both figures.
    """
    needed = 2 * LOADER_PROCESSES * num_bytes
    stat = os.statvfs("/dev/shm")
    there = stat.f_bavail * stat.f_frsize
    if needed > there:
        raise RuntimeError(f"/dev/shm has {there:,} bytes, the loader's batches take {needed:,}")


def loader(
    bench: Bench, workload: GpuWorkload, data: Sequence[Tensor], device: torch.device, steps: int
) -> float:
    """The rate of a ``DataLoader``, if it can run."""
    if not bench.dry:
        require_shared_memory(workload.batch_size * workload.sample_bytes)
    return loader_rate(workload, data, device, steps)


def streaming(bench: Bench) -> None:
    """A ResNet in bf16: data on the host against data on the device."""
    workload, device = resnet50(dry=bench.dry), bench.device
    num_batches = bench.pick(36, 6)
    data = workload.make_data(num_batches * workload.batch_size)
    seconds = bench.pick(2.5, 0.02)
    columns = [column.to(device) for column in data]
    probe = bare_rate(workload, columns, device, bench.pick(20, 2))
    del columns
    epoch_s = len(data[0]) / probe
    num_epochs = epochs_for(bench, seconds, epoch_s)
    steps = round(seconds / epoch_s * num_batches) + 1
    bench.note(f"{workload.what}: {1e3 * epoch_s / num_batches:.1f} ms a step")

    ends_s: list[float] = []

    def run(resident: bool) -> float:
        return interior_rate(
            bench,
            workload,
            data,
            num_epochs=num_epochs,
            configure=lambda b: b.resident(resident),
            ends_s=None if resident else ends_s,
        )

    def bare() -> float:
        return bare_rate(workload, [column.to(device) for column in data], device, steps)

    systems: Systems = {
        RESIDENT: partial(run, True),
        STREAMED: partial(run, False),
        LOADER: partial(loader, bench, workload, data, device, steps),
        BARE_THERE: bare,
    }
    rates = interleaved(bench, systems, rounds=bench.pick(ROUNDS, 1), unit="samples/s")
    bench.row("worker streamed / resident", rates.ratio(STREAMED, RESIDENT), target=0.97)
    bench.row("worker streamed / bare loop, data on device", rates.ratio(STREAMED, BARE_THERE))
    bench.row("DataLoader / bare loop, data on device", rates.ratio(LOADER, BARE_THERE))
    bench.row("worker streamed / DataLoader", rates.ratio(STREAMED, LOADER))
    tell_ends(bench, STREAMED, ends_s)
    rates.require([STREAMED, RESIDENT])


# -- the copy limit -----------------------------------------------------------------------


def copy_limit(num_bytes: int, device: torch.device, seconds: float) -> float:
    """Bytes/s from pinned memory to the device, in copies of that size, one after another."""
    pin = device.type == "cuda"
    hosts = [
        torch.ones(num_bytes // 4, dtype=torch.float32, pin_memory=pin)
        for _ in range(PINNED_BUFFERS)
    ]
    targets = [torch.empty_like(host, device=device) for host in hosts]

    def copy(count: int) -> float:
        wait_for(device)
        begin = time.perf_counter()
        for index in range(count):
            slot = index % PINNED_BUFFERS
            targets[slot].copy_(hosts[slot], non_blocking=True)
        wait_for(device)
        return time.perf_counter() - begin

    copy(2 * PINNED_BUFFERS)
    once_s = copy(2 * PINNED_BUFFERS) / (2 * PINNED_BUFFERS)
    count = max(2 * PINNED_BUFFERS, round(seconds / once_s))
    return count * num_bytes / copy(count)


def gather_limit(
    data: Sequence[Tensor], batch_size: int, device: torch.device, seconds: float
) -> float:
    """Bytes/s of a bare loop: random rows are gathered into pinned memory, and copied.

    In one thread of its own, with PyTorch's intra-op threads, as the prefetcher of a worker does
    it. A buffer is reused once the copy out of it has completed.
    """
    rows, pin = data[0], device.type == "cuda"
    shape = (batch_size, *rows.shape[1:])
    hosts = [torch.empty(shape, pin_memory=pin) for _ in range(PINNED_BUFFERS)]
    targets = [torch.empty(shape, device=device) for _ in hosts]
    copied: list[Any] = [torch.cuda.Event(blocking=True) if pin else None for _ in hosts]
    order = torch.randperm(len(rows))
    batches = torch.split(order[: len(rows) - len(rows) % batch_size], batch_size)

    def copy_batch(index: int) -> None:
        slot = index % PINNED_BUFFERS
        if pin:
            copied[slot].synchronize()
        torch.index_select(rows, 0, batches[index % len(batches)], out=hosts[slot])
        targets[slot].copy_(hosts[slot], non_blocking=True)
        if pin:
            copied[slot].record()

    def loop() -> float:
        for index in range(2 * PINNED_BUFFERS):
            copy_batch(index)
        wait_for(device)
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds or count < 2:
            copy_batch(count)
            count += 1
        wait_for(device)
        return count * hosts[0].nbytes / (time.perf_counter() - begin)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(loop).result()


def smaller_of(rates: Rates, first: str, second: str) -> list[float]:
    """The smaller of two systems' rates in each round."""
    pairs = zip(rates.values.get(first, []), rates.values.get(second, []), strict=False)
    return [min(pair) for pair in pairs]


def copying(bench: Bench) -> None:
    """A model too small to hide the copy: the prefetcher against the machine's limit.

    The limit is the smaller rate of copies alone and of a bare loop that also gathers the
    rows, which host memory may bound.
    """
    workload, device = copy_bound(dry=bench.dry), bench.device
    data = workload.make_data(bench.pick(96, 8) * workload.batch_size)
    batch_bytes = workload.batch_size * workload.sample_bytes
    seconds = bench.pick(1.2, 0.02)
    ends_s: list[float] = []

    def streamed(num_epochs: int) -> float:
        rate = interior_rate(
            bench,
            workload,
            data,
            num_epochs=num_epochs,
            configure=lambda b: b.resident(False),
            ends_s=ends_s,
        )
        return rate * workload.sample_bytes

    def by_loader(steps: int) -> float:
        return loader(bench, workload, data, device, steps) * workload.sample_bytes

    limit, gather, prefetcher = "pinned copy limit", "bare gather and copy", STREAMED
    reachable = f"min({limit}, {gather})"
    bytes_per_s = copy_limit(batch_bytes, device, bench.pick(0.2, 0.01))
    epoch_s = len(data[0]) * workload.sample_bytes / bytes_per_s
    systems: Systems = {
        limit: partial(copy_limit, batch_bytes, device, bench.pick(0.5, 0.01)),
        gather: partial(gather_limit, data, workload.batch_size, device, bench.pick(0.5, 0.01)),
        prefetcher: partial(streamed, epochs_for(bench, seconds, epoch_s)),
        LOADER: partial(by_loader, bench.pick(48, 4)),
    }
    rates = interleaved(bench, systems, rounds=bench.pick(ROUNDS, 1), unit="bytes/s")
    rates.values[reachable] = smaller_of(rates, limit, gather)
    bench.row(f"prefetcher / {reachable}", rates.ratio(prefetcher, reachable), target=0.9)
    bench.row("prefetcher / pinned copy limit", rates.ratio(prefetcher, limit))
    bench.row("DataLoader / pinned copy limit", rates.ratio(LOADER, limit))
    bench.row("prefetcher / DataLoader", rates.ratio(prefetcher, LOADER))
    bench.row("bare gather and copy / pinned copy limit", rates.ratio(gather, limit))
    tell_ends(bench, prefetcher, ends_s)
    median = rates.median(limit)
    bench.row("pinned copy limit", None if median is None else median / 1e9, unit="GB/s")
    rates.require([limit, gather, prefetcher])


# -- the table ---------------------------------------------------------------------------


SECTIONS = (
    Section(
        name="streaming",
        title="a ResNet in bf16: streamed against resident data",
        seconds=85,
        run=streaming,
    ),
    Section(
        name="copying",
        title="a model too small to hide the copy",
        seconds=50,
        run=copying,
    ),
    Section(
        name="conv-loop",
        title="the worker's loop against a bare one: convolutions",
        seconds=50,
        run=conv_loop,
    ),
    Section(
        name="transformer-loop",
        title="the worker's loop against a bare one: transformer",
        seconds=45,
        run=transformer_loop,
    ),
    Section(
        name="graphs",
        title="CUDA graphs against the eager loop, launch-bound",
        seconds=45,
        run=graphs,
        needs_cuda=True,
    ),
    Section(
        name="memory",
        title="reserved memory within its budget",
        seconds=45,
        run=budgets,
        needs_cuda=True,
    ),
    Section(
        name="crowd",
        title="two workers on one GPU against one",
        seconds=35,
        run=crowd,
    ),
)


def driver_version() -> str:
    """Version of the NVIDIA driver, from ``nvidia-smi``."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run.stdout.strip().split("\n")[0]


def nccl_version() -> str:
    """Version of NCCL in this build of PyTorch."""
    if not torch.distributed.is_nccl_available():
        return "none"
    version = torch.cuda.nccl.version()
    return ".".join(map(str, version))


def shared_memory_gib() -> float | None:
    """Size of ``/dev/shm``, where the processes of a ``DataLoader`` put their batches."""
    try:
        return round(shutil.disk_usage("/dev/shm").total / 2**30, 1)
    except OSError:
        return None


def facts() -> dict[str, Any]:
    """Facts on the machine for readers of the results. Wakes the device."""
    machine = {key: value for key, value in describe().items() if key != "environment"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "cudnn": torch.backends.cudnn.version(),
        "threads": torch.get_num_threads(),
        "shm_gib": shared_memory_gib(),
        **machine,
    }
