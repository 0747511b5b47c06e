"""The three workloads of the benchmarks: a model, its optimizer and synthetic data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


def _sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True)


def _adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4, fused=True)


def _classes(shape: tuple[int, ...]) -> Callable[[int], Batch]:
    def make(num_samples: int) -> Batch:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(num_samples, *shape, generator=generator)
        return x, torch.randint(10, (num_samples,), generator=generator)

    return make


def _characters(num_samples: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(65, (num_samples, 65), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


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
    """What is trained in a measurement.

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
            make_optimizer=_sgd,
            loss=classification_loss,
            make_data=_classes((784,)),
        ),
        Workload(
            name="lenet",
            what="LeNet 28x28, batch 64, SGD momentum fused",
            batch_size=64,
            sample_bytes=784 * 4,
            make_model=LeNet,
            make_optimizer=_sgd,
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
            make_data=_characters,
        ),
    )
}
