"""The workloads of the peers benchmark beside those of ``models``: asleep, busy, or large."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.loops import solo_rate
from benchmarks.harness.models import WORKLOADS, Batch, Workload, classification_loss

NUM_FEATURES = 16
NUM_CLASSES = 10
BATCH_SIZE = 8
INNER = 128
"""Width of the busy step's matrices; their length sets its time."""


def _tiny_data(num_samples: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, NUM_FEATURES, generator=generator)
    return x, torch.randint(NUM_CLASSES, (num_samples,), generator=generator)


def _sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, fused=True)


def _workload(
    name: str,
    what: str,
    make_model: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Batch], Tensor] = classification_loss,
) -> Workload:
    return Workload(
        name=name,
        what=what,
        batch_size=BATCH_SIZE,
        sample_bytes=4 * NUM_FEATURES,
        make_model=make_model,
        make_optimizer=_sgd,
        loss=loss,
        make_data=_tiny_data,
    )


def tiny() -> Workload:
    """A step of almost nothing: its time is that of the sleep that is added."""
    return _workload("tiny", "linear 16-10", lambda: nn.Linear(NUM_FEATURES, NUM_CLASSES))


class Busy(nn.Module):
    """A linear layer, and a product of matrices that keeps a core busy without the GIL."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        # Plain tensors, no buffers: buffers would be averaged.
        self.left = torch.randn(num_rows, INNER)
        self.right = torch.randn(INNER, INNER)
        self.product = torch.empty(num_rows, INNER)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.left):
            with torch.no_grad():
                torch.mm(self.left, self.right, out=self.product)
        logits: Tensor = self.head(x)
        return logits


def _busy_of(num_rows: int) -> Workload:
    return _workload(f"busy:{num_rows}", "linear 16-10 and a product", lambda: Busy(num_rows))


def busy(step_s: float) -> Workload:
    """A step that takes ``step_s`` in a bare loop, or as little as a step can."""
    data = _tiny_data(100 * BATCH_SIZE)
    num_rows = 0
    for _ in range(3):  # the time of a row is not quite the same at all lengths
        trial = _busy_of(num_rows)
        rate = max(solo_rate(trial, data, warmup_s=0.03, measure_s=0.1) for _ in range(3))
        missing_s = step_s - BATCH_SIZE / rate
        num_rows = max(0, num_rows + round(missing_s / _row_seconds(max(num_rows, 256))))
    return _busy_of(num_rows)


def _row_seconds(num_rows: int) -> float:
    model = Busy(num_rows)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        torch.mm(model.left, model.right, out=model.product)
        times.append(time.perf_counter() - start)
    return min(times) / num_rows


class Large(nn.Module):
    """A linear layer, and ``num_params`` parameters more."""

    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.body = nn.Parameter(torch.zeros(num_params))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits


def _dense_loss(model: nn.Module, batch: Batch) -> Tensor:
    module: Any = getattr(model, "module", model)  # of DistributedDataParallel
    body: Tensor = module.body
    return classification_loss(model, batch) + body[:16].sum()


def sparse(num_params: int) -> Workload:
    """All parameters are averaged, but only the linear layer has a gradient.

    So the step takes the same time at every size, and what grows is the averaging alone.
    """
    what = f"{num_params:,} parameters, few with a gradient"
    return _workload(f"sparse:{num_params}", what, lambda: Large(num_params))


def dense(num_params: int) -> Workload:
    """All parameters have a gradient, zero for most: one pass to make it, one in SGD."""
    what = f"{num_params:,} parameters, all with a gradient"
    return _workload(f"dense:{num_params}", what, lambda: Large(num_params), _dense_loss)


def workload_of(name: str) -> Workload:
    """The workload of a name, in any process."""
    kind, _, number = name.partition(":")
    match kind:
        case "tiny":
            return tiny()
        case "busy":
            return _busy_of(int(number))
        case "sparse":
            return sparse(int(number))
        case "dense":
            return dense(int(number))
        case _:
            return WORKLOADS[name]
