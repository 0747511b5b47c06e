"""Training loops without any runtime: the baselines, and the step that all share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.harness.models import Batch, Workload

WAIT_S = 120.0


def batches(data: Batch, batch_size: int, seed: int) -> Iterator[Batch]:
    """Batches gathered from in-memory tensors, epoch after epoch, each in a new order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(data[0]), generator=generator)
        for indices in order.split(batch_size):
            yield data[0].index_select(0, indices), data[1].index_select(0, indices)


def train_step(
    workload: Workload,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    pause_s: float = 0.0,
) -> None:
    """One step; a slowed rank pauses before its backward, as it does in every system."""
    optimizer.zero_grad()
    loss = workload.loss(model, batch)
    if pause_s:
        time.sleep(pause_s)
    loss.backward()
    optimizer.step()


def solo_rate(
    workload: Workload,
    data: Batch,
    *,
    warmup_s: float,
    measure_s: float,
    seed: int = 0,
    pause_s: float = 0.0,
) -> float:
    """Samples/s of a bare loop in the calling thread, from step boundary to step boundary."""
    torch.set_num_threads(1)
    model = workload.make_model()
    optimizer = workload.make_optimizer(model.parameters())
    start: float | None = None
    num_steps = 0
    begin = now = time.perf_counter()
    for batch in batches(data, workload.batch_size, seed):
        train_step(workload, model, optimizer, batch, pause_s)
        now = time.perf_counter()
        if start is not None:
            num_steps += 1
            if now - start >= measure_s:
                break
        elif now - begin >= warmup_s:
            start = now
    assert start is not None
    return num_steps * workload.batch_size / (now - start)


def threads_rate(
    workload: Workload,
    data: Batch,
    *,
    num_threads: int,
    warmup_s: float,
    measure_s: float,
    pauses_s: tuple[float, ...] = (),
) -> float:
    """Sum of the samples/s of bare loops that run at the same time and share only the data."""
    rates = [0.0] * num_threads
    together = threading.Barrier(num_threads)

    def run(index: int) -> None:
        together.wait(WAIT_S)
        rates[index] = solo_rate(
            workload,
            data,
            warmup_s=warmup_s,
            measure_s=measure_s,
            seed=index,
            pause_s=pauses_s[index] if pauses_s else 0.0,
        )

    threads = [
        threading.Thread(target=run, args=(i,), name=f"bare-{i}", daemon=True)
        for i in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    if not all(rates):
        raise RuntimeError("a bare training thread did not finish")
    return sum(rates)
