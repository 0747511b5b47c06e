"""What the convergence benchmark trains, defined once for all modes.

The models are those of flodl's ``ddp-bench`` that need no download, made small enough for a
minute on one core: no dropout (its draws would unpair the seeds), narrower networks on the
text, and one learning rate schedule for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.convergence_data import (
    WINDOW,
    Columns,
    Data,
    digits,
    synthetic_digits,
    synthetic_text,
    text,
)
from benchmarks.harness.models import CharTransformer

WARM_UP = 0.05
"""Part of the training in which the learning rate rises to its value."""
FINAL_LR = 0.05
"""What is left of the learning rate at the end of the cosine."""
EVALUATED_AT_ONCE = 250


def lr_factor(progress: float) -> float:
    """The learning rate as a part of its value: a linear rise, then a cosine down.

    Args:
        progress: Part of the samples of the whole training seen so far, 0 to 1.
    """
    if progress < WARM_UP:
        return (progress + 0.002) / (WARM_UP + 0.002)
    turn = math.pi * (min(progress, 1.0) - WARM_UP) / (1 - WARM_UP)
    return FINAL_LR + (1 - FINAL_LR) * (1 + math.cos(turn)) / 2


def scheduler(
    optimizer: torch.optim.Optimizer, num_positions: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule of all modes; stepped ``num_positions`` times in the whole training."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: lr_factor(at / num_positions))


class LeNet(nn.Module):
    """The convolutional network of LeCun et al. (1998) with ReLU and batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.classes = nn.Sequential(
            nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classes(self.features(x).flatten(1))
        return out


class CharRnn(nn.Module):
    """A recurrent network that predicts the next character (Karpathy, 2015)."""

    def __init__(self, num_symbols: int, width: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.symbols = nn.Embedding(num_symbols, width)
        self.memory = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, num_symbols)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.memory(self.symbols(x))[0])
        return out


def make_autoencoder() -> nn.Module:
    """Two strided convolutions down and two up."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
        *(nn.ConvTranspose2d(32, 16, 3, 2, 1, 1), nn.ReLU()),
        *(nn.ConvTranspose2d(16, 1, 3, 2, 1, 1), nn.Sigmoid()),
    )


def class_loss(model: nn.Module, batch: Columns) -> Tensor:
    """Cross-entropy; logits of shape ``(batch, classes)`` or ``(batch, length, classes)``."""
    logits: Tensor = model(batch[0])
    return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


def pixel_loss(model: nn.Module, batch: Columns) -> Tensor:
    """Mean squared error of the images against themselves."""
    return F.mse_loss(model(batch[0]), batch[0])


def _adam(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=lr)


def _adamw(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.99), weight_decay=0.01)


def _rmsprop(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=lr)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A model and how it is trained, the same for all modes.

    Attributes:
        name: As given to ``--models``.
        what: Model and optimizer in words.
        make_model: Builds the model for an alphabet of that size, with fresh weights.
        make_optimizer: Builds its optimizer from parameters and learning rate.
        loss: Mean loss of a batch; of the held-out samples it is what is judged.
        lr: Learning rate, tuned for one process at the global batch.
        num_epochs: Epochs.
        batch_size: Samples in a batch of one worker; the global batch is two of them.
        part: Part of the training samples that is used; less than 1 for a quick look.
        is_text: Whether it reads the text, not the digits.
        accuracy: Whether the share of digits told right is reported as well.
    """

    name: str
    what: str
    make_model: Callable[[int], nn.Module]
    make_optimizer: Callable[[Iterable[Tensor], float], torch.optim.Optimizer]
    loss: Callable[[nn.Module, Columns], Tensor]
    lr: float
    num_epochs: int
    batch_size: int = 32
    part: float = 1.0
    is_text: bool = False
    accuracy: bool = False

    def load(self, folder: Path | None) -> Data:
        """The study's data; ``None``: the tiny stand-in."""
        if folder is None:
            data = synthetic_text() if self.is_text else synthetic_digits()
        else:
            data = text(folder) if self.is_text else digits(folder)
        return data if self.part == 1 else data.first(self.part)

    def definition(self) -> str:
        """Everything that makes results comparable, in one line."""
        return (
            f"{self.what}, lr {self.lr:g}, {self.num_epochs} epochs, batch {self.batch_size} "
            "for each worker" + (f", {self.part:.0%} of the samples" if self.part < 1 else "")
        )

    @torch.no_grad()
    def evaluate(self, model: nn.Module, held_out: Columns) -> dict[str, float]:
        """Mean loss of the held-out samples, and the accuracy where there is one."""
        model.eval()
        loss, right, num_samples = 0.0, 0, len(held_out[0])
        for start in range(0, num_samples, EVALUATED_AT_ONCE):
            batch = tuple(c[start : start + EVALUATED_AT_ONCE] for c in held_out)
            loss += float(self.loss(model, batch)) * len(batch[0])
            if self.accuracy:
                right += int((model(batch[0]).argmax(1) == batch[1]).sum())
        found = {"loss": loss / num_samples}
        if self.accuracy:
            found["accuracy"] = right / num_samples
        return found


def _make_logistic(num_symbols: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_symbols))


def _make_mlp(num_symbols: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, num_symbols))


def _make_gpt(num_symbols: int) -> nn.Module:
    return CharTransformer(num_symbols, WINDOW, width=64, depth=2)


STUDIES = {
    study.name: study
    for study in (
        Study(
            name="logistic",
            what="logistic regression 784-10 on digits, Adam",
            make_model=_make_logistic,
            make_optimizer=_adam,
            loss=class_loss,
            accuracy=True,
            lr=6e-3,
            num_epochs=12,
        ),
        Study(
            name="mlp",
            what="MLP 784-256-10 on digits, Adam",
            make_model=_make_mlp,
            make_optimizer=_adam,
            loss=class_loss,
            accuracy=True,
            lr=4e-3,
            num_epochs=10,
        ),
        Study(
            name="lenet",
            what="LeNet with batch normalization on digits, Adam",
            make_model=lambda _: LeNet(),
            make_optimizer=_adam,
            loss=class_loss,
            accuracy=True,
            lr=4e-3,
            num_epochs=6,
        ),
        Study(
            name="autoencoder",
            what="convolutional autoencoder 1-16-32-16-1 on digits, Adam",
            make_model=lambda _: make_autoencoder(),
            make_optimizer=_adam,
            loss=pixel_loss,
            lr=8e-3,
            num_epochs=6,
        ),
        Study(
            name="char-rnn",
            what="LSTM of 128 units on characters, RMSprop",
            make_model=CharRnn,
            make_optimizer=_rmsprop,
            loss=class_loss,
            is_text=True,
            lr=2e-2,
            num_epochs=2,
            batch_size=16,
        ),
        Study(
            name="gpt",
            what="GPT of 2 blocks of width 64 on characters, AdamW",
            make_model=_make_gpt,
            make_optimizer=_adamw,
            loss=class_loss,
            is_text=True,
            lr=1e-2,
            num_epochs=2,
            batch_size=8,
        ),
    )
}
