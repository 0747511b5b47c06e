"""Memory of a run on a GPU: the peak of the reserved bytes as a part of the budget."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor, nn

from benchmarks.gpu.bench import Bench, tidy
from benchmarks.gpu.models import STALL_S, ended
from runtime import Trainer

GIB = 2**30
BUDGETS_GIB = (2, 8, 32)
SHARES = 32
"""Size of a batch as a part of the budget."""
ACTIVATIONS = 18
"""Activations of a batch's size kept by a step: with the rest, three quarters of the budget."""
ROW = 4096
NUM_BATCHES, NUM_EPOCHS = 36, 2


class Activations(nn.Module):
    """Keeps a known number of activations of its input's size, and weights of that size.

    Args:
        batch_bytes: The size.
    """

    def __init__(self, batch_bytes: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(batch_bytes // (4 * ROW), ROW))
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(ROW)) for _ in range(ACTIVATIONS))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table[0]
        for gain in self.gains:
            x = torch.tanh(x * gain)  # only the result is kept for backward
        return x


class Depths(logging.Handler):
    """Records the prefetcher's log messages on its depth."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.endswith("prefetch"):
            self.messages.append(record.getMessage())


def train(bench: Bench, fraction: float, batch_bytes: int) -> None:
    """Train :class:`Activations` within a part of the device's memory, streamed."""
    rows = batch_bytes // (4 * ROW)
    # One row, repeated: a data set larger than the budget that uses no memory.
    x = torch.randn(1, ROW).expand(rows * NUM_BATCHES, -1)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        out: Tensor = model(batch[0])
        return out.square().mean()

    handle = (
        Trainer.builder(
            lambda device: Activations(batch_bytes).to(device),
            lambda params: torch.optim.SGD(params, 1e-6, fused=True),
            loss,
        )
        .dataset((x,))
        .batch_size(rows)
        .num_epochs(NUM_EPOCHS)
        .devices([bench.device])
        .policy("cadence")
        .vram_fraction(fraction)
        .resident(False)
        .stall_timeout(STALL_S)
        .progress(False)
        .run()
    )
    state = ended(bench, handle)
    assert [m.num_samples for m in state.metrics] == [len(x)] * NUM_EPOCHS


def budgets(bench: Bench) -> None:
    """Peak of the reserved memory, including the model, under budgets from small to large."""
    total = torch.cuda.get_device_properties(bench.device).total_memory
    logger, depths = logging.getLogger("runtime"), Depths()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(depths)
    try:
        for gib in BUDGETS_GIB:
            _one_budget(bench, gib, total, depths)
    finally:
        logger.removeHandler(depths)
        logger.setLevel(level)


def _one_budget(bench: Bench, gib: int, total: int, depths: Depths) -> None:
    name = f"peak of reserved memory / budget of {gib} GiB"
    if gib * GIB > total:
        bench.note(f"{gib} GiB: the device has {total / GIB:.0f} GiB")
        return
    tidy()  # resets the peak, too
    before = torch.cuda.memory_reserved(bench.device)
    depths.messages.clear()
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
    depth = depths.messages[-1] if depths.messages else "no depth was logged"
    bench.note(
        f"{gib} GiB: {depth}; {before:,} bytes reserved before; {retries} allocation retries "
        "in the process so far; "
        f"{time.monotonic() - begin:.1f} s"
    )
