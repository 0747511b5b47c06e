"""Recipes that need PyTorch only."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pad_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset, Subset, TensorDataset, WeightedRandomSampler

from tests.compat.case import (
    NUM_SAMPLES,
    Case,
    Listed,
    Watch,
    classes,
    cut_labels,
    floats,
)

GROUP = "PyTorch alone"
NUM_FEATURES, WIDTH, NUM_CLASSES, VOCABULARY = 6, 16, 3, 11
DROPOUT = "dropout"
SPARSE = "parameter '0.weight' has a sparse gradient"
WHOLE = "needs full weights: use `full_state_dict()`"
PIECES = "samples are mixed within each device's piece"
STATISTICS = "batch statistics of each device's piece"


def network() -> nn.Sequential:
    """A small classifier of vectors."""
    return nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES))


def convolutions(*after: nn.Module) -> nn.Sequential:
    """A small classifier of images."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        *after,
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, NUM_CLASSES),
    )


def vectors() -> TensorDataset:
    """Vectors and their classes."""
    return TensorDataset(floats(NUM_FEATURES), classes(NUM_CLASSES))


def images() -> TensorDataset:
    """Images and their classes."""
    return TensorDataset(floats(3, 8, 8), classes(NUM_CLASSES))


def classify(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of ``(inputs, labels)``."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def follow_ema(bare: nn.Module) -> Watch:
    """An exponential moving average by ``torch.optim.swa_utils``."""
    average = AveragedModel(bare, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    first = copy.deepcopy(average.module.state_dict())

    def update(model: nn.Module) -> None:
        average.update_parameters(model)
        moved = average.module.state_dict()
        if average.n_averaged > 1:
            assert any(not torch.equal(moved[key], value) for key, value in first.items())

    return update


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(NUM_FEATURES, NUM_FEATURES) for _ in range(3))
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(lambda v, b=block: torch.tanh(b(v)), x, use_reentrant=False)
        return self.head(x)


def weight_normed() -> nn.Module:
    model = network()
    parametrizations.weight_norm(model[0])
    return model


def spectral_normed() -> nn.Module:
    model = network()
    parametrizations.spectral_norm(model[0])
    return model


def orthogonal() -> nn.Module:
    model = network()
    parametrizations.orthogonal(model[0])
    return model


class Language(nn.Module):
    """A recurrent language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.core = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.core(self.embedding(tokens))[0])


def texts() -> TensorDataset:
    """Rows of tokens, which are also the labels."""
    tokens = classes(VOCABULARY, 8)
    return TensorDataset(tokens, cut_labels(tokens))


def predict_tokens(model: nn.Module, batch: Any) -> Any:
    """The mean loss of the labels that are not ignored, and their number."""
    tokens, labels = batch
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
    return {"loss": loss, "loss_weight": (labels != -100).sum()}


def frozen_backbone() -> nn.Module:
    model = convolutions()
    model[0].requires_grad_(False)
    return model


def mixed_dtypes() -> nn.Module:
    """A bfloat16 part between float32 ones."""

    class Cast(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.dtype = dtype

        def forward(self, x: Tensor) -> Tensor:
            return x.to(self.dtype)

    first, act, last = network()
    middle = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)
    return nn.Sequential(first, act, Cast(torch.bfloat16), middle, Cast(torch.float32), act, last)


def mix_up(model: nn.Module, batch: Any) -> Tensor:
    """Mix each sample with its neighbour; the draw is fixed, and equal in every API."""
    inputs, labels = batch
    share = torch.linspace(0.5, 1.0, len(inputs), dtype=inputs.dtype)
    targets = F.one_hot(labels, NUM_CLASSES).to(inputs.dtype)
    mixed = share[:, None] * inputs + (1 - share[:, None]) * inputs.flip(0)
    mixed_targets = share[:, None] * targets + (1 - share[:, None]) * targets.flip(0)
    return F.cross_entropy(model(mixed), mixed_targets)


class Stream(IterableDataset[Any]):
    """The vectors in order, as a stream."""

    def __init__(self) -> None:
        self._rows = vectors()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows[i] for i in range(NUM_SAMPLES))


def sequences() -> Listed:
    """Sequences of unequal length, and their classes."""
    labels = classes(NUM_CLASSES)
    return Listed(
        [(torch.randn(2 + i % 5, NUM_FEATURES, dtype=torch.float64), labels[i]) for i in range(24)]
    )


def pad(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """A custom collate function: pads to the longest sequence of the batch."""
    rows, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(row) for row in rows])
    return pad_sequence(list(rows), batch_first=True), lengths, torch.stack(labels)


class Pooled(nn.Module):
    """The mean over the steps of each sequence without its padding."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, rows: Tensor, lengths: Tensor) -> Any:
        inside = torch.arange(rows.shape[1]) < lengths[:, None]
        return self.net((rows * inside[..., None]).sum(1) / lengths[:, None])


def encoder(dropout: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        NUM_FEATURES, 2, WIDTH, dropout=dropout, batch_first=True, norm_first=True
    )
    return nn.Sequential(
        nn.Unflatten(1, (2, NUM_FEATURES // 2)),
        nn.Linear(NUM_FEATURES // 2, NUM_FEATURES),
        nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
        nn.Flatten(),
        nn.Linear(2 * NUM_FEATURES, NUM_CLASSES),
    )


def recipe(name: str, make: Any = network, data: Any = vectors, **rest: Any) -> Case:
    """A case of this file."""
    return Case(name=name, group=GROUP, make=make, data=data, **{"loss": classify, **rest})


def weighted() -> WeightedRandomSampler:
    """Draws samples with weights; every run of an epoch draws the same."""
    return WeightedRandomSampler(torch.arange(1.0, NUM_SAMPLES + 1), NUM_SAMPLES)


def weighted_classes(model: nn.Module, batch: Any) -> Any:
    """A loss averaged by the weights of the samples' classes."""
    inputs, labels = batch
    weights = torch.tensor([1.0, 2.0, 5.0], dtype=inputs.dtype)
    loss = F.cross_entropy(model(inputs), labels, weight=weights, label_smoothing=0.1)
    return {"loss": loss, "loss_weight": weights[labels].sum()}


CASES = [
    recipe(
        "LSTM, tied embedding, padded labels",
        Language,
        texts,
        loss=predict_tokens,
        weight=lambda batch: (batch[1] != -100).sum(),
    ),
    recipe("TransformerEncoder", lambda: encoder(0.0)),
    recipe("TransformerEncoder with dropout", lambda: encoder(0.2), differs=DROPOUT),
    recipe(
        "convolutions with BatchNorm2d",
        lambda: convolutions(nn.BatchNorm2d(8)),
        images,
        differs=STATISTICS,
    ),
    recipe(
        "convolutions with GroupNorm, channels_last",
        lambda: convolutions(nn.GroupNorm(2, 8)).to(memory_format=torch.channels_last),
        images,
    ),
    recipe(
        "EMA weights (AveragedModel)",
        watch=follow_ema,
        absent={"FSDP": WHOLE},
    ),
    recipe("gradient checkpointing", Checkpointed),
    recipe("weight norm (parametrization)", weight_normed),
    recipe(
        "spectral norm (parametrization)",
        spectral_normed,
        differs="each device continues its own power iteration",
    ),
    recipe("orthogonal (parametrization)", orthogonal),
    recipe("frozen backbone", frozen_backbone, images),
    recipe(
        "bfloat16 layer between float32 ones",
        mixed_dtypes,
        lambda: TensorDataset(floats(NUM_FEATURES).float(), classes(NUM_CLASSES)),
        double=False,
        tolerance=5e-2,
    ),
    recipe(
        "class weights and label smoothing",
        loss=weighted_classes,
        weight=lambda batch: torch.tensor([1.0, 2.0, 5.0])[batch[1]].sum(),
    ),
    recipe(
        "mixup in the loop",
        loss=mix_up,
        unlike=dict.fromkeys(("SYNC", "FSDP", "coordinator"), PIECES),
    ),
    recipe(
        "collate_fn that pads",
        Pooled,
        sequences,
        loader={"collate_fn": pad},
        loss=lambda model, batch: F.cross_entropy(model(*batch[:2]), batch[2]),
    ),
    recipe(
        "WeightedRandomSampler",
        loader={"sampler": weighted()},
        differs="each run draws its own samples",
    ),
    recipe("Subset", data=lambda: Subset(vectors(), range(NUM_SAMPLES))),
    recipe("IterableDataset", data=Stream),
    recipe(
        "torch.compile",
        lambda: torch.compile(network(), backend="aot_eager"),
        bare=network,
    ),
    recipe("AdamW", optimizer=lambda params: torch.optim.AdamW(params, 1e-2), tolerance=1e-5),
    recipe(
        "Embedding(sparse=True)",
        lambda: nn.Sequential(
            nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean", sparse=True),
            nn.Linear(WIDTH, NUM_CLASSES),
        ),
        lambda: TensorDataset(classes(VOCABULARY, 4), classes(NUM_CLASSES)),
        refused=dict.fromkeys(("SYNC", "CADENCE", "FSDP", "coordinator"), SPARSE),
    ),
]
