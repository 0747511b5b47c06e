"""Models, optimizers, synthetic data and bare loops of the speed benchmarks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# -- workloads ----------------------------------------------------------------


Batch = tuple[Tensor, Tensor]
BYTES_PER_DATA_SET = 512 * 2**20


class LeNet(nn.Module):
    """The convolutional network of LeCun et al. (1998), on 28x28 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))


class Block(nn.Module):
    """One pre-norm transformer block with causal attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharTransformer(nn.Module):
    """A small character-level language model, of the size in ``examples/char_lm.py``."""

    def __init__(
        self, vocabulary: int = 65, length: int = 64, width: int = 96, depth: int = 3
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(x) + self.position)))


def make_mlp() -> nn.Module:
    """784-256-256-10 with ReLU."""
    return nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True)


def _adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4, fused=True)


def _classes(shape: tuple[int, ...]) -> Callable[[int], Batch]:
    def make(num_samples: int) -> Batch:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(num_samples, *shape, generator=generator)
        return x, torch.randint(10, (num_samples,), generator=generator)

    return make


def tokens(length: int, vocabulary: int) -> Callable[[int], Batch]:
    """Makes random sequences and their next tokens."""

    def make(num_samples: int) -> Batch:
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(vocabulary, (num_samples, length + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return make


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the logits of shape ``(batch, classes)``."""
    x, y = batch
    return F.cross_entropy(model(x), y)


def language_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy over every position, logits of shape ``(batch, length, vocabulary)``."""
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model, optimizer and data of a measurement.

    Attributes:
        name: As given to ``--models``.
        what: Model and optimizer in words, for the report.
        batch_size: Samples a step, for each worker.
        sample_bytes: Size of one sample, which bounds the data set's length.
        make_model: Builds the model with fresh weights.
        make_optimizer: Builds its optimizer.
        loss: Mean loss of a batch.
        make_data: Synthetic tensors for that many samples, the same at every call.
    """

    name: str
    what: str
    batch_size: int
    sample_bytes: int
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    loss: Callable[[nn.Module, Batch], Tensor]
    make_data: Callable[[int], Batch]

    @property
    def max_batches(self) -> int:
        """Batches in the largest data set that a measurement may hold."""
        return BYTES_PER_DATA_SET // (self.sample_bytes * self.batch_size)


WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            name="mlp",
            what="MLP 784-256-256-10, batch 64, SGD momentum fused",
            batch_size=64,
            sample_bytes=784 * 4,
            make_model=make_mlp,
            make_optimizer=sgd,
            loss=classification_loss,
            make_data=_classes((784,)),
        ),
        Workload(
            name="lenet",
            what="LeNet 28x28, batch 64, SGD momentum fused",
            batch_size=64,
            sample_bytes=784 * 4,
            make_model=LeNet,
            make_optimizer=sgd,
            loss=classification_loss,
            make_data=_classes((1, 28, 28)),
        ),
        Workload(
            name="transformer",
            what="character transformer 3x96, length 64, batch 8, AdamW fused",
            batch_size=8,
            sample_bytes=2 * 64 * 8,
            make_model=CharTransformer,
            make_optimizer=_adamw,
            loss=language_loss,
            make_data=tokens(64, 65),
        ),
    )
}


TRANSFORMERS = {
    "small": replace(WORKLOADS["transformer"], name="small"),
    "middle": replace(
        WORKLOADS["transformer"],
        name="middle",
        what="character transformer 4x192, length 64, batch 8, AdamW fused",
        make_model=lambda: CharTransformer(width=192, depth=4),
    ),
    "wide": replace(
        WORKLOADS["transformer"],
        name="wide",
        what="character transformer 4x384, length 64, batch 8, AdamW fused",
        make_model=lambda: CharTransformer(width=384, depth=4),
    ),
}
"""Transformers of three sizes, for sharded training."""


# -- loops without any runtime -----------------------------------------------------------


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
    """One step; a slowed rank pauses before its backward, as in every system.

    Args:
        workload: The workload.
        model: The model.
        optimizer: Its optimizer.
        batch: Of any size.
        pause_s: Sleep for a whole batch; a smaller one sleeps in proportion, as it computes.
    """
    optimizer.zero_grad()
    loss = workload.loss(model, batch)
    if pause_s:
        time.sleep(pause_s * len(batch[0]) / workload.batch_size)
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
    num_threads: int = 1,
    batch_size: int | None = None,
) -> float:
    """Samples/s of a bare loop in the calling thread, from step boundary to step boundary.

    Args:
        workload: The workload.
        data: The data set.
        warmup_s: Seconds before the clock starts.
        measure_s: Seconds that are timed.
        seed: Of the order of the samples.
        pause_s: Sleep within a step of the workload's batch size.
        num_threads: Intra-op threads; there is one again afterwards.
        batch_size: Samples a step, if not that of the workload.
    """
    torch.set_num_threads(num_threads)
    model = workload.make_model()
    optimizer = workload.make_optimizer(model.parameters())
    start: float | None = None
    num_samples = 0
    begin = now = time.perf_counter()
    for batch in batches(data, batch_size or workload.batch_size, seed):
        train_step(workload, model, optimizer, batch, pause_s)
        now = time.perf_counter()
        if start is not None:
            num_samples += len(batch[0])
            if now - start >= measure_s:
                break
        elif now - begin >= warmup_s:
            start = now
    assert start is not None
    torch.set_num_threads(1)
    return num_samples / (now - start)


def step_seconds(workload: Workload) -> float:
    """Time of a bare loop's step, the fastest of five runs."""
    data = workload.make_data(40 * workload.batch_size)
    runs = [solo_rate(workload, data, warmup_s=0.1, measure_s=0.3) for _ in range(5)]
    return workload.batch_size / max(runs)


def threads_rate(
    workload: Workload,
    data: Batch,
    *,
    num_threads: int,
    warmup_s: float,
    measure_s: float,
    pauses_s: tuple[float, ...] = (),
    sizes: tuple[int, ...] = (),
) -> float:
    """Samples/s of bare loops that run at the same time and share only the data.

    Args:
        workload: The workload.
        data: The data set.
        num_threads: Loops, each in a thread.
        warmup_s: Seconds before the clock starts.
        measure_s: Seconds that are timed.
        pauses_s: Sleep of each loop within a step of the workload's batch size.
        sizes: Samples in a step of each loop, if not that of the workload.

    Returns:
        The sum of the loops' rates. With ``sizes``, what loops would reach together if each
        waited in every step for the slowest, and that cost nothing.
    """
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
            batch_size=sizes[index] if sizes else None,
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
    if sizes:
        return sum(sizes) * min(rate / size for rate, size in zip(rates, sizes, strict=True))
    return sum(rates)


# -- workloads that sleep, compute or are large --------------------------------------------


NUM_FEATURES = 16
NUM_CLASSES = 10
BATCH_SIZE = 8
INNER = 128
"""Width of the busy step's matrices; their length sets its time."""


def _tiny_data(num_samples: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, NUM_FEATURES, generator=generator)
    return x, torch.randint(NUM_CLASSES, (num_samples,), generator=generator)


def _plain_sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
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
        make_optimizer=_plain_sgd,
        loss=loss,
        make_data=_tiny_data,
    )


def tiny() -> Workload:
    """A step of almost no work: its time is that of the added sleep."""
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
    """A step that takes ``step_s`` in a bare loop, or the shortest possible time."""
    data = _tiny_data(100 * BATCH_SIZE)
    num_rows = 0
    for _ in range(3):  # the time of a row depends slightly on the length
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
    """A linear layer, and ``num_params`` further parameters."""

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

    So the step takes the same time at every size, and only the averaging grows.
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
            return (WORKLOADS | TRANSFORMERS)[name]
