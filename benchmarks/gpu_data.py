"""How fast batches come to the device: streamed from the host, resident, by ``DataLoader``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import models as gpu_models
from benchmarks.gpu.bench import Bench, interleaved
from benchmarks.gpu.models import GpuWorkload
from benchmarks.gpu_loops import (
    LOADER_PROCESSES,
    bare_rate,
    epochs_for,
    loader_rate,
    runtime_rate,
    wait_for,
)

LOADER = f"DataLoader(pin_memory=True, num_workers={LOADER_PROCESSES}), non-blocking copies"
STREAMED, RESIDENT, BARE = "worker, streamed", "worker, resident(True)", "bare loop, data on device"
ROUNDS = 3
Systems = dict[str, Callable[[], float]]
PINNED_BUFFERS = 4


def require_shared_memory(num_bytes: int) -> None:
    """Raise if the processes of a ``DataLoader`` have no room for batches under way.

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
    """The rate of a ``DataLoader``, where it can run."""
    if not bench.dry:
        require_shared_memory(workload.batch_size * workload.sample_bytes)
    return loader_rate(workload, data, device, steps)


def streaming(bench: Bench) -> None:
    """A ResNet in bf16: data on the host against data that lies on the device."""
    workload, device = gpu_models.resnet50(dry=bench.dry), bench.device
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

    def run(resident: bool) -> float:
        return runtime_rate(
            bench, workload, data, num_epochs=num_epochs, configure=lambda b: b.resident(resident)
        )

    def bare() -> float:
        return bare_rate(workload, [column.to(device) for column in data], device, steps)

    systems: Systems = {
        RESIDENT: partial(run, True),
        STREAMED: partial(run, False),
        LOADER: partial(loader, bench, workload, data, device, steps),
        BARE: bare,
    }
    rates = interleaved(bench, systems, rounds=bench.pick(ROUNDS, 1), unit="samples/s")
    bench.row("worker streamed / resident", rates.ratio(STREAMED, RESIDENT), target=0.97)
    bench.row("worker streamed / bare loop, data on device", rates.ratio(STREAMED, BARE))
    bench.row("DataLoader / bare loop, data on device", rates.ratio(LOADER, BARE))
    bench.row("worker streamed / DataLoader", rates.ratio(STREAMED, LOADER))
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


def gather_limit(data: Sequence[Tensor], batch_size: int, pin: bool, seconds: float) -> float:
    """Bytes/s of gathering random rows of the data set into pinned memory, in one thread."""
    rows = data[0]
    out = [torch.empty(batch_size, *rows.shape[1:], pin_memory=pin) for _ in range(PINNED_BUFFERS)]
    order = torch.randperm(len(rows))
    batches = torch.split(order[: len(rows) - len(rows) % batch_size], batch_size)
    for slot in out:
        torch.index_select(rows, 0, batches[0], out=slot)
    count, begin = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - begin) < seconds or count < 2:
        torch.index_select(rows, 0, batches[count % len(batches)], out=out[count % PINNED_BUFFERS])
        count += 1
    return count * out[0].nbytes / elapsed_s


def copying(bench: Bench) -> None:
    """A model too small to hide the copy: the prefetcher against the machine's copy limit."""
    workload, device = gpu_models.copy_bound(dry=bench.dry), bench.device
    data = workload.make_data(bench.pick(96, 8) * workload.batch_size)
    batch_bytes = workload.batch_size * workload.sample_bytes
    seconds = bench.pick(1.2, 0.02)
    pin = device.type == "cuda"

    def streamed(num_epochs: int) -> float:
        rate = runtime_rate(
            bench, workload, data, num_epochs=num_epochs, configure=lambda b: b.resident(False)
        )
        return rate * workload.sample_bytes

    def by_loader(steps: int) -> float:
        return loader(bench, workload, data, device, steps) * workload.sample_bytes

    limit, gather, prefetcher = "pinned copy limit", "gather into pinned memory", STREAMED
    bytes_per_s = copy_limit(batch_bytes, device, bench.pick(0.2, 0.01))
    epoch_s = len(data[0]) * workload.sample_bytes / bytes_per_s
    systems: Systems = {
        limit: partial(copy_limit, batch_bytes, device, bench.pick(0.5, 0.01)),
        gather: partial(gather_limit, data, workload.batch_size, pin, bench.pick(0.5, 0.01)),
        prefetcher: partial(streamed, epochs_for(bench, seconds, epoch_s)),
        LOADER: partial(by_loader, bench.pick(48, 4)),
    }
    rates = interleaved(bench, systems, rounds=bench.pick(ROUNDS, 1), unit="bytes/s")
    bench.row("prefetcher / pinned copy limit", rates.ratio(prefetcher, limit), target=0.9)
    bench.row("DataLoader / pinned copy limit", rates.ratio(LOADER, limit))
    bench.row("prefetcher / DataLoader", rates.ratio(prefetcher, LOADER))
    bench.row("gather into pinned memory / copy limit", rates.ratio(gather, limit))
    median = rates.median(limit)
    bench.row("pinned copy limit", None if median is None else median / 1e9, unit="GB/s")
    rates.require([limit, prefetcher])
