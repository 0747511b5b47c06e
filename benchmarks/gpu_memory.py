"""Memory within its budget: what the allocator reserves, and what follows where it cannot."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.bench import Bench, tidy
from benchmarks.gpu_loops import STALL_S, ended
from runtime import Trainer, WorkerFailed

GIB = 2**30
BUDGETS_GIB = (2, 8, 32)
SHARES = 32
"""A batch is this part of the budget."""
ACTIVATIONS = 18
"""Activations of a batch's size that a step keeps: with the rest, three quarters of the budget."""
WIDTH = 4096
NUM_BATCHES, NUM_EPOCHS = 36, 2
OUT_OF_MEMORY_S = 30.0


class Keeper(nn.Module):
    """Keeps a known number of activations of its input's size, and weights of that size.

    Args:
        batch_bytes: The size.
    """

    def __init__(self, batch_bytes: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(batch_bytes // (4 * WIDTH), WIDTH))
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(ACTIVATIONS))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table[0]
        for gain in self.gains:
            x = torch.tanh(x * gain)  # of which only the result is kept for backward
        return x


class Depths(logging.Handler):
    """Notes what the prefetcher tells of its depth."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def train(bench: Bench, fraction: float, batch_bytes: int, train_fn: Any = None) -> None:
    """Train a :class:`Keeper` within a part of the device's memory, streamed."""
    rows = batch_bytes // (4 * WIDTH)
    # One row many times over: a data set larger than the budget that takes no memory.
    x = torch.randn(1, WIDTH).expand(rows * NUM_BATCHES, -1)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        out: Tensor = model(batch[0])
        return out.square().mean()

    handle = (
        Trainer.builder(
            lambda device: Keeper(batch_bytes).to(device),
            lambda params: torch.optim.SGD(params, 1e-6, fused=True),
            train_fn or loss,
        )
        .dataset((x,))
        .batch_size(rows)
        .num_epochs(NUM_EPOCHS)
        .devices([bench.device])
        .vram_fraction(fraction)
        .resident(False)
        .stall_timeout(STALL_S)
        .progress(False)
        .run()
    )
    state = ended(bench, handle)
    assert [m.num_samples for m in state.metrics] == [len(x)] * NUM_EPOCHS


def budgets(bench: Bench) -> None:
    """The peak of what is reserved, the model included, under budgets from small to large."""
    total = torch.cuda.get_device_properties(bench.device).total_memory
    logger, depths = logging.getLogger("runtime.prefetch"), Depths()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(depths)
    try:
        for gib in BUDGETS_GIB:
            _one_budget(bench, gib, total, depths)
    finally:
        logger.removeHandler(depths)
        logger.setLevel(level)
    _out_of_memory(bench, total)


def _one_budget(bench: Bench, gib: int, total: int, depths: Depths) -> None:
    name = f"peak of reserved memory / budget of {gib} GiB"
    if gib * GIB > total:
        bench.note(f"{gib} GiB: the device has {total / GIB:.0f} GiB")
        return
    tidy()  # resets the peak, too
    before = torch.cuda.memory_reserved(bench.device)
    depths.told.clear()
    begin = time.monotonic()
    try:
        train(bench, gib * GIB / total, gib * GIB // SHARES)
    except Exception:
        bench.row(name, None, target=1.0, at_most=True)
        raise
    peak = torch.cuda.max_memory_reserved(bench.device)
    bench.row(name, peak / (gib * GIB), target=1.0, at_most=True)
    allocated = torch.cuda.max_memory_allocated(bench.device)
    bench.raw(f"{gib} GiB: peak bytes reserved", [peak])
    bench.raw(f"{gib} GiB: peak bytes allocated", [allocated])
    retries = torch.cuda.memory_stats(bench.device).get("num_alloc_retries", 0)
    told = depths.told[-1] if depths.told else "no depth was told"
    bench.note(
        f"{gib} GiB: {told}; {before:,} bytes reserved before; {retries} allocation retries "
        "in the process so far; "
        f"{time.monotonic() - begin:.1f} s"
    )


def _out_of_memory(bench: Bench, total: int) -> None:
    """A step that asks for too much, after some that did not."""
    steps = 0

    def greedy(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        nonlocal steps
        steps += 1
        out: Tensor = model(batch[0])
        loss = out.square().mean()
        if steps == 10:
            loss = loss + torch.zeros(2 * GIB, device=batch[0].device).sum()
        return loss

    tidy()
    begin = time.monotonic()
    text = ""
    try:
        train(bench, GIB / total, GIB // SHARES, greedy)
    except WorkerFailed as error:
        text = f"{error}; {error.__cause__}"
    elapsed_s = time.monotonic() - begin
    bench.note(f"out of memory in step {steps}: {text[:300] or 'no error came'}")
    bench.check("out of memory: the error names the budget", "budget of 1.00 GiB" in text)
    bench.row(
        "out of memory: start to error", elapsed_s, unit="s", target=OUT_OF_MEMORY_S, at_most=True
    )
