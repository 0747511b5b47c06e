"""What the GPU benchmark trains: models that fill the device, and one that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness.models import (
    Batch,
    CharTransformer,
    Workload,
    classification_loss,
    language_loss,
)

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
    """Looks at little of its input, so that nothing hides the copy."""

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


def _sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True)


def _adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def _labelled(shape: tuple[int, ...]) -> Callable[[int], Batch]:
    """Samples of that shape with labels. Every 64 rows are alike: to draw them takes long."""

    def make(num_samples: int) -> Batch:
        generator = torch.Generator().manual_seed(0)
        tile = torch.randn(64, *shape, generator=generator)
        x = torch.empty(num_samples, *shape)
        for start in range(0, num_samples, len(tile)):
            part = x[start : start + len(tile)]
            part.copy_(tile[: len(part)])
        return x, torch.randint(NUM_CLASSES, (num_samples,), generator=generator)

    return make


def _tokens(length: int, vocabulary: int) -> Callable[[int], Batch]:
    def make(num_samples: int) -> Batch:
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(vocabulary, (num_samples, length + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return make


def _images(name: str, depths: tuple[int, ...], side: int, batch: int, **kind: bool) -> GpuWorkload:
    width = 64 if batch >= 64 else 8
    words = "x".join(map(str, depths))

    def make_model() -> nn.Module:
        model: Any = ResNet(depths, width, **kind)
        model.to(memory_format=torch.channels_last)
        return cast(nn.Module, model)

    return GpuWorkload(
        name=name,
        what=f"residual network {words}, {side}x{side}, batch {batch}, bf16, SGD fused",
        batch_size=batch,
        sample_bytes=3 * side * side * 4,
        make_model=make_model,
        make_optimizer=_sgd,
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
        make_data=_tokens(length, vocabulary),
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
    """Rows of 1 MiB in batches of 64 MiB, of which the model looks at 4 KiB."""
    row, batch = (32, 4) if dry else (2**18, 64)
    return GpuWorkload(
        name="copy",
        what=f"linear layer on the head of rows of {row * 4} bytes, batch {batch}",
        batch_size=batch,
        sample_bytes=row * 4,
        make_model=FirstColumns,
        make_optimizer=_sgd,
        loss=classification_loss,
        make_data=_labelled((row,)),
    )
