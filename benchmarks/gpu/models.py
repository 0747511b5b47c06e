"""Models of the GPU benchmark, reference loops, and training with the runtime.

Loops return samples/s. All start with new weights; the first steps are not timed, and the device
is synchronised at both ends of the timed part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.gpu.bench import Bench
from benchmarks.harness.models import (
    Batch,
    CharTransformer,
    Workload,
    classification_loss,
    language_loss,
    sgd,
    tokens,
)
from runtime import TrainedState, Trainer, TrainerBuilder, TrainerHandle, current_worker

NUM_CLASSES = 100


class Residual(nn.Module):
    """A residual block of He et al. (2016): two 3x3 convolutions, or a bottleneck of three."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        self.outputs = 4 * width if bottleneck else width
        plan = [(width, 1, 1), (width, 3, stride), (self.outputs, 1, 1)]
        if not bottleneck:
            plan = [(width, 3, stride), (width, 3, 1)]
        layers: list[nn.Module] = []
        before = inputs
        for after, kernel, step in plan:
            layers += [
                nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(inplace=True),
            ]
            before = after
        self.body = nn.Sequential(*layers[:-1])
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != self.outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, self.outputs, 1, stride, bias=False),
                nn.BatchNorm2d(self.outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) + self.skip(x)
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    """A residual network; depths (3, 4, 6, 3) with bottlenecks make ResNet-50."""

    def __init__(
        self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, *, bottleneck: bool = True
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if stage and index == 0 else 1
                block = Residual(channels, width << stage, stride, bottleneck=bottleneck)
                blocks.append(block)
                channels = block.outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x.to(memory_format=torch.channels_last)))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class FirstColumns(nn.Module):
    """Reads little of its input, so that no computation hides the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x[:, :16])
        return out


@dataclass(frozen=True, kw_only=True)
class GpuWorkload(Workload):
    """A workload with a precision, as for ``TrainerBuilder.precision``."""

    precision: str = "fp32"


def _adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def _labelled(shape: tuple[int, ...]) -> Callable[[int], Batch]:
    """Samples of this shape with labels. Every 64 rows are equal, as drawing them is slow."""

    def make(num_samples: int) -> Batch:
        generator = torch.Generator().manual_seed(0)
        tile = torch.randn(64, *shape, generator=generator)
        x = torch.empty(num_samples, *shape)
        for start in range(0, num_samples, len(tile)):
            part = x[start : start + len(tile)]
            part.copy_(tile[: len(part)])
        return x, torch.randint(NUM_CLASSES, (num_samples,), generator=generator)

    return make


def _images(name: str, depths: tuple[int, ...], side: int, batch: int, **kind: bool) -> GpuWorkload:
    width = 64 if batch >= 64 else 8
    words = "x".join(map(str, depths))

    def make_model() -> nn.Module:
        model: Any = ResNet(depths, width, **kind)
        model.to(memory_format=torch.channels_last)
        return cast("nn.Module", model)

    return GpuWorkload(
        name=name,
        what=f"residual network {words}, {side}x{side}, batch {batch}, bf16, SGD fused",
        batch_size=batch,
        sample_bytes=3 * side * side * 4,
        make_model=make_model,
        make_optimizer=sgd,
        loss=classification_loss,
        make_data=_labelled((3, side, side)),
        precision="bf16",
    )


def resnet50(*, dry: bool) -> GpuWorkload:
    """ResNet-50 on images of 224x224: some 30 ms a step on an H200."""
    if dry:
        return _images("resnet", (1,), 16, 4)
    return _images("resnet", (3, 4, 6, 3), 224, 192)


def conv(*, dry: bool) -> GpuWorkload:
    """A medium network of the kind of ResNet-18, on images of 128x128."""
    if dry:
        return _images("conv", (1,), 16, 4, bottleneck=False)
    return _images("conv", (2, 2, 2, 2), 128, 512, bottleneck=False)


def transformer(*, dry: bool) -> GpuWorkload:
    """A language model of 25 million parameters."""
    vocabulary, length, width, depth = (16, 8, 16, 1) if dry else (512, 512, 512, 8)
    batch = 4 if dry else 32
    return GpuWorkload(
        name="transformer",
        what=f"transformer {depth}x{width}, length {length}, batch {batch}, bf16, AdamW fused",
        batch_size=batch,
        sample_bytes=2 * length * 8,
        make_model=lambda: CharTransformer(vocabulary, length, width, depth),
        make_optimizer=_adamw,
        loss=language_loss,
        make_data=tokens(length, vocabulary),
        precision="bf16",
    )


def small_mlp(*, dry: bool) -> GpuWorkload:
    """Many small layers: the device waits for launches."""
    width, depth, batch = (16, 2, 8) if dry else (256, 24, 64)

    def make_model() -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, NUM_CLASSES))

    return GpuWorkload(
        name="mlp",
        what=f"MLP of {depth} layers of {width}, batch {batch}, fp32, AdamW fused",
        batch_size=batch,
        sample_bytes=width * 4,
        make_model=make_model,
        make_optimizer=_adamw,
        loss=classification_loss,
        make_data=_labelled((width,)),
    )


def copy_bound(*, dry: bool) -> GpuWorkload:
    """Rows of 1 MiB in batches of 64 MiB, of which the model reads 4 KiB."""
    row, batch = (32, 4) if dry else (2**18, 64)
    return GpuWorkload(
        name="copy",
        what=f"linear layer on the head of rows of {row * 4} bytes, batch {batch}",
        batch_size=batch,
        sample_bytes=row * 4,
        make_model=FirstColumns,
        make_optimizer=sgd,
        loss=classification_loss,
        make_data=_labelled((row,)),
    )


# -- loops -------------------------------------------------------------------------------


WARM_STEPS = 12
"""Warm-up steps, by which the copies of a ``DataLoader`` are in progress."""
LOADER_PROCESSES = 8
LOADER_TIMEOUT_S = 60.0
STALL_S = 60.0

Configure = Callable[[TrainerBuilder], TrainerBuilder]
TrainFn = Callable[[nn.Module, Any], Tensor]


def wait_for(device: torch.device) -> None:
    """Block until the device has completed all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def autocast_of(workload: GpuWorkload, device: torch.device) -> AbstractContextManager[Any]:
    """The autocast of a ``precision``."""
    if workload.precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


class BareStep:
    """A hand-written step: zero, forward, backward, step.

    Args:
        workload: The workload.
        device: The device.
        capturable: True if a CUDA graph can hold the optimizer's step.
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
        loss.backward()
        self.optimizer.step()


def orders(num_samples: int, batch_size: int, device: torch.device) -> Iterator[Tensor]:
    """Indices of whole batches, in a new order each epoch, copied to the device without a wait."""
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
    """A hand-written loop over data on the device."""

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
        stream = torch.cuda.Stream(device)
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
    """Tensors with whole batches as items, the fastest form for a ``DataLoader``."""

    def __init__(self, columns: Sequence[Tensor]) -> None:
        self._columns = tuple(columns)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        rows = torch.tensor(indices)
        return tuple(column.index_select(0, rows) for column in self._columns)


def as_it_is(batch: Any) -> Any:
    """Batches are already collated."""
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
        .policy("cadence")
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
    """Number of epochs of a run: the first is warm-up, the others take this long together."""
    return bench.pick(1 + max(2, round(seconds / epoch_s)), 3)


class StepClock:
    """A ``train_fn`` that records when each step is launched, by epoch.

    An epoch's interior begins behind its first steps, in which the host gives the device what
    the end of the epoch before has let run empty. From there on the host is held back: by the
    batches, or by the worker's bound on how far it may run ahead of the device.

    Args:
        loss: The workload's.
        num_edge_steps: Number of first steps.
    """

    def __init__(self, loss: TrainFn, num_edge_steps: int) -> None:
        self._loss = loss
        self._num_edge_steps = num_edge_steps
        self._stamps: list[float] = []
        self.epochs: list[list[float]] = []

    def begin(self, epoch: int, worker: Any) -> None:
        """An ``epoch_fn`` that starts a new epoch's list of steps."""
        self._stamps = []
        self.epochs.append(self._stamps)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        self._stamps.append(time.perf_counter())
        return self._loss(model, batch)

    def step_s(self) -> float:
        """Seconds of a step between the first and the last of an interior, without epoch 0.

        Raises:
            ValueError: The epochs are too short to have an interior.
        """
        interiors = [stamps[self._num_edge_steps :] for stamps in self.epochs[1:]]
        num_steps = sum(max(0, len(stamps) - 1) for stamps in interiors)
        if not num_steps:
            raise ValueError(f"no epoch has {self._num_edge_steps + 2} steps")
        return sum(stamps[-1] - stamps[0] for stamps in interiors if stamps) / num_steps

    def ends_s(self) -> list[float]:
        """Time of each epoch but the first and the last beyond that of its steps."""
        pairs = zip(self.epochs[1:], self.epochs[2:], strict=False)
        step_s = self.step_s()
        return [after[0] - stamps[0] - len(stamps) * step_s for stamps, after in pairs]


def interior_rate(
    bench: Bench,
    workload: GpuWorkload,
    data: Batch,
    *,
    num_epochs: int,
    configure: Configure = lambda builder: builder,
    ends_s: list[float] | None = None,
) -> float:
    """One worker, from the first to the last step of the epochs' interiors.

    Not for CUDA graphs, which run ``train_fn`` in the first steps alone.

    Args:
        bench: Says where, and how long to wait.
        workload: The workload.
        data: Its samples, whole batches.
        num_epochs: The first of which is warm-up.
        configure: Changes the run.
        ends_s: Receives the time of the ends of epochs beyond their steps.
    """
    clock = StepClock(workload.loss, bench.pick(WARM_STEPS, 2))
    builder = builder_of(bench, workload, data, num_epochs=num_epochs, train_fn=clock)
    ended(bench, configure(builder.epoch_fn(clock.begin)).run())
    if ends_s is not None:
        ends_s.extend(clock.ends_s())
    return workload.batch_size / clock.step_s()


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
    # In a dry run the last batch may be assigned before the first metrics are read.
    return max(1, after - before) * workload.batch_size / (end - begin)
