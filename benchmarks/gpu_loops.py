"""Loops that the runtime is measured against, and the runtime itself, as samples/s.

All begin with new weights and leave their first steps out of the clock. What keeps the
device busy behind the host is waited for at both ends of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import GpuWorkload
from benchmarks.harness.models import Batch
from runtime import TrainedState, Trainer, TrainerBuilder, TrainerHandle, current_worker

WARM_STEPS = 12
"""More than a step needs to settle: the copies of a ``DataLoader`` are under way by then."""
LOADER_PROCESSES = 8
LOADER_TIMEOUT_S = 60.0
STALL_S = 60.0

Configure = Callable[[TrainerBuilder], TrainerBuilder]
TrainFn = Callable[[nn.Module, Any], Tensor]


def wait_for(device: torch.device) -> None:
    """Block until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def autocast_of(workload: GpuWorkload, device: torch.device) -> AbstractContextManager[Any]:
    """The autocast that ``precision`` stands for."""
    if workload.precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


class BareStep:
    """Zero, forward, backward, step, as one writes it by hand.

    Args:
        workload: What is trained.
        device: Where.
        capturable: Whether a CUDA graph can hold the optimizer's step.
    """

    def __init__(
        self, workload: GpuWorkload, device: torch.device, *, capturable: bool = False
    ) -> None:
        self._workload = workload
        self._device = device
        self._model: nn.Module = workload.make_model().to(device).train()
        self.optimizer = workload.make_optimizer(self._model.parameters())
        if capturable:
            for group in self.optimizer.param_groups:
                group["capturable"] = True

    def __call__(self, batch: Batch) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with autocast_of(self._workload, self._device):
            loss = self._workload.loss(self._model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def orders(num_samples: int, batch_size: int, device: torch.device) -> Iterator[Tensor]:
    """Indices of whole batches, in a new order each epoch, brought there without a wait."""
    while True:
        drawn = torch.randperm(num_samples, pin_memory=device.type == "cuda")
        order = drawn.to(device, non_blocking=True)
        yield from torch.split(order[: num_samples - num_samples % batch_size], batch_size)


def timed(device: torch.device, steps: Iterator[int], num_steps: int) -> float:
    """Samples/s of ``num_steps`` steps, each of which yields its samples."""
    for _ in range(WARM_STEPS):
        next(steps)
    wait_for(device)
    begin = time.perf_counter()
    num_samples = sum(next(steps) for _ in range(num_steps))
    wait_for(device)
    return num_samples / (time.perf_counter() - begin)


def bare_rate(
    workload: GpuWorkload, columns: Sequence[Tensor], device: torch.device, num_steps: int
) -> float:
    """A hand-written loop over data that lies on the device."""

    def steps() -> Iterator[int]:
        step = BareStep(workload, device)
        for indices in orders(len(columns[0]), workload.batch_size, device):
            x, y = (column.index_select(0, indices) for column in columns)
            step((x, y))
            yield len(indices)

    return timed(device, steps(), num_steps)


def graph_rate(
    workload: GpuWorkload, columns: Sequence[Tensor], device: torch.device, num_steps: int
) -> float:
    """The same with the whole step as one CUDA graph, captured by hand."""

    def steps() -> Iterator[int]:
        step = BareStep(workload, device, capturable=True)
        batches = orders(len(columns[0]), workload.batch_size, device)
        first = next(batches)
        x, y = (column.index_select(0, first) for column in columns)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                step((x, y))
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step((x, y))
        for indices in batches:
            for column, static in zip(columns, (x, y), strict=True):
                torch.index_select(column, 0, indices, out=static)
            graph.replay()
            yield len(indices)

    return timed(device, steps(), num_steps)


class Gathered(Dataset[Any]):
    """Tensors that give a whole batch at once, which is the fast way for a ``DataLoader``."""

    def __init__(self, columns: Sequence[Tensor]) -> None:
        self._columns = tuple(columns)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        rows = torch.tensor(indices)
        return tuple(column.index_select(0, rows) for column in self._columns)


def as_it_is(batch: Any) -> Any:
    """A batch is collated already."""
    return batch


def loader_rate(
    workload: GpuWorkload, columns: Sequence[Tensor], device: torch.device, num_steps: int
) -> float:
    """A hand-written loop over a ``DataLoader`` with pinned memory and copies that do not block.

    On the CPU, which only a dry run does, without processes and without pinning.
    """
    processes = LOADER_PROCESSES if device.type == "cuda" else 0
    loader: DataLoader[Any] = DataLoader(
        Gathered(columns),
        batch_size=workload.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=processes,
        collate_fn=as_it_is,
        pin_memory=device.type == "cuda",
        timeout=LOADER_TIMEOUT_S if processes else 0,
        multiprocessing_context="fork" if processes else None,
        persistent_workers=processes > 0,
    )

    def steps() -> Generator[int, None, None]:
        step = BareStep(workload, device)
        while True:
            for x, y in loader:
                step((x.to(device, non_blocking=True), y.to(device, non_blocking=True)))
                yield len(x)

    running = steps()
    try:
        return timed(device, running, num_steps)
    finally:
        running.close()


# -- the runtime ------------------------------------------------------------------------


def builder_of(
    bench: Bench,
    workload: GpuWorkload,
    data: Any,
    *,
    num_epochs: int,
    num_workers: int = 1,
    train_fn: TrainFn | None = None,
) -> TrainerBuilder:
    """A run of the workload, its workers all on the bench's device."""

    def make_model(device: torch.device) -> nn.Module:
        return workload.make_model().to(device)

    return (
        Trainer.builder(make_model, workload.make_optimizer, train_fn or workload.loss)
        .dataset(data)
        .batch_size(workload.batch_size)
        .num_epochs(num_epochs)
        .devices([bench.device] * num_workers)
        .precision(workload.precision)
        .stall_timeout(STALL_S)
        .tune_allocator(False)
        .progress(False)
    )


def ended(bench: Bench, handle: TrainerHandle) -> TrainedState:
    """The state at the end of a run, which is stopped if it takes too long."""
    try:
        return handle.join(bench.patience_s())
    except TimeoutError:
        handle.stop()
        raise


def epochs_for(bench: Bench, seconds: float, epoch_s: float) -> int:
    """Epochs of a run: the first is warm-up, the others take so long together."""
    return bench.pick(1 + max(2, round(seconds / epoch_s)), 2)


def runtime_rate(
    bench: Bench,
    workload: GpuWorkload,
    data: Batch,
    *,
    num_epochs: int,
    configure: Configure = lambda builder: builder,
) -> float:
    """One worker, from the close of epoch 0 to that of the last, by the coordinator's clock."""
    handle = configure(builder_of(bench, workload, data, num_epochs=num_epochs)).run()
    metrics = ended(bench, handle).metrics[1:]
    seconds: float = sum(m.epoch_s for m in metrics)
    return sum(m.num_samples for m in metrics) / seconds


def crowd_rate(
    bench: Bench,
    workload: GpuWorkload,
    data: Batch,
    *,
    num_epochs: int,
    num_workers: int,
    configure: Configure = lambda builder: builder,
) -> float:
    """Several workers, from the news of epoch 0's close to that of the last one's.

    Ranks may be ahead by then, so the batches given to the device are counted.
    """
    counts = [0] * num_workers
    loss = workload.loss

    def train_fn(model: nn.Module, batch: Batch) -> Tensor:
        counts[current_worker().rank] += 1
        return loss(model, batch)

    builder = builder_of(
        bench, workload, data, num_epochs=num_epochs, num_workers=num_workers, train_fn=train_fn
    )
    handle = configure(builder).run()
    marks: list[tuple[float, int]] = []
    try:
        while handle.next_metrics(bench.patience_s()) is not None:
            marks.append((time.perf_counter(), sum(counts)))
    except TimeoutError:
        handle.stop()
        raise
    (begin, before), (end, after) = marks[0], marks[-1]
    ended(bench, handle)
    # In a dry run the last batch may be given out before the first news is read.
    return max(1, after - before) * workload.batch_size / (end - begin)
