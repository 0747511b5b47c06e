"""Studies of the quality benchmark: models, hyperparameters and data, the same for all modes.

The models are those of flodl's ``ddp-bench`` that need no download, made small enough for a
minute on one core: no dropout (its draws would unpair the seeds), narrower networks on the
text, and one learning rate schedule for all. The data are real digits and a real text, or a tiny
stand-in.
"""

from __future__ import annotations

import gzip
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness.models import CharTransformer
from coordinator.splitting import permutation

# -- data --------------------------------------------------------------------------------


Columns = tuple[Tensor, ...]

IMAGES = "mnist-10k-images-idx3-ubyte.gz"
LABELS = "mnist-10k-labels-idx1-ubyte.gz"
TEXT = "tinyshakespeare.txt"
NUM_HELD_OUT_DIGITS = 2_000
HELD_OUT_TEXT = 0.1
WINDOW = 64
"""Characters that a language model sees; each is trained to predict the one after it."""
MULTIPLE = 64
"""Training samples are a multiple of this, so that no mode has a short batch."""


class DataMissing(Exception):
    """A file is missing or invalid; the message names the remedy."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Training and held-out data: tensors with the samples along dimension 0.

    Attributes:
        train: Tensors of a sample's parts, as ``train_fn`` gets them.
        held_out: The same for the samples that no mode trains.
        num_symbols: Size of a text's alphabet; 10 for digits.
    """

    train: Columns
    held_out: Columns
    num_symbols: int

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return len(self.train[0])

    def first(self, part: float) -> Data:
        """This part of the training samples, and all held-out samples."""
        num_train = max(MULTIPLE, int(self.num_samples * part) // MULTIPLE * MULTIPLE)
        return replace(self, train=tuple(c[:num_train] for c in self.train))


def default_folder() -> Path:
    """``$GPUWORKER_DATA``, else ``data`` in the current directory."""
    return Path(os.environ.get("GPUWORKER_DATA") or "data")


def missing_files(folder: Path) -> list[str]:
    """Names of the files missing from the folder."""
    return [name for name in (IMAGES, LABELS, TEXT) if not (folder / name).is_file()]


def check_folder(folder: Path) -> None:
    """Raise ``DataMissing`` that names every file the folder lacks."""
    if missing := missing_files(folder):
        raise DataMissing(
            f"{folder} lacks {', '.join(missing)}: give the folder that has them with --data "
            "FOLDER or in the environment variable GPUWORKER_DATA. They are the 10,000 test "
            "digits of MNIST in their published form, and the tiny Shakespeare text"
        )


def _read_idx(path: Path, magic: int, num_dims: int) -> Tensor:
    """An array of bytes in the format of the MNIST files (big-endian header)."""
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise DataMissing(f"{path} cannot be read as a gzip file: {error}") from error
    header = [int.from_bytes(raw[i : i + 4], "big") for i in range(0, 4 * (1 + num_dims), 4)]
    shape, start = header[1:], 4 * (1 + num_dims)
    if header[0] != magic or len(raw) - start != torch.Size(shape).numel():
        raise DataMissing(f"{path} is not an idx file of {num_dims} dimensions, or it is cut short")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=start).view(shape)


def digits(folder: Path) -> Data:
    """The digits: images of shape ``(n, 1, 28, 28)`` in 0 to 1, and labels.

    The file's second half is easier than its first, so the held-out digits are drawn from
    all of it, always the same.
    """
    images = _read_idx(folder / IMAGES, 2051, 3).float().div_(255).unsqueeze(1)
    labels = _read_idx(folder / LABELS, 2049, 1).long()
    order = torch.from_numpy(permutation(len(labels), 0, 0))
    return _split((images[order], labels[order]), len(labels) - NUM_HELD_OUT_DIGITS, 10)


def text(folder: Path) -> Data:
    """Windows side by side of the first 90 % of the text; of the rest to be held out."""
    path = folder / TEXT
    try:
        return _windows(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataMissing(f"{path} cannot be read as text: {error}") from error


def synthetic_digits() -> Data:
    """A few images of ten noisy patterns, to run every line."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 1, 28, 28, generator=generator)
    labels = torch.arange(384 + 64) % 10
    noise = torch.rand(len(labels), 1, 28, 28, generator=generator)
    return _split(((patterns[labels] + noise) / 2, labels), 384, 10)


def random_vectors() -> Data:
    """The data of the README's example: the largest of five of 20 numbers, and others held out."""
    vectors = torch.randn(12_000, 20, generator=torch.Generator().manual_seed(0))
    return _split((vectors, vectors[:, :5].argmax(1)), 10_000, 5)


def synthetic_text() -> Data:
    """A few sentences, repeated."""
    return _windows("all the world is a stage, and all are merely players. " * 200)


def _windows(characters: str) -> Data:
    alphabet = {c: i for i, c in enumerate(sorted(set(characters)))}
    codes = torch.tensor([alphabet[c] for c in characters])
    cut = len(codes) - int(len(codes) * HELD_OUT_TEXT)
    train, held_out = (part.unfold(0, WINDOW + 1, WINDOW) for part in (codes[:cut], codes[cut:]))
    train = train[: len(train) // MULTIPLE * MULTIPLE]
    return Data(
        train=(train[:, :-1].contiguous(), train[:, 1:].contiguous()),
        held_out=(held_out[:, :-1].contiguous(), held_out[:, 1:].contiguous()),
        num_symbols=len(alphabet),
    )


def _split(columns: Columns, num_train: int, num_symbols: int) -> Data:
    num_train = num_train // MULTIPLE * MULTIPLE
    return Data(
        train=tuple(c[:num_train].contiguous() for c in columns),
        held_out=tuple(c[num_train:].contiguous() for c in columns),
        num_symbols=num_symbols,
    )


# -- models and their training -----------------------------------------------------


WARM_UP = 0.05
"""Part of the training in which the learning rate rises to its value."""
FINAL_LR = 0.05
"""Fraction of the learning rate at the end of the cosine."""
EVALUATED_AT_ONCE = 250


def lr_factor(progress: float) -> float:
    """Factor on the learning rate: a linear rise, then a cosine decay.

    Args:
        progress: Part of the samples of the whole training seen so far, 0 to 1.
    """
    if progress < WARM_UP:
        return (progress + 0.002) / (WARM_UP + 0.002)
    turn = math.pi * (min(progress, 1.0) - WARM_UP) / (1 - WARM_UP)
    return FINAL_LR + (1 - FINAL_LR) * (1 + math.cos(turn)) / 2


def constant(progress: float) -> float:
    """The learning rate stays as it is."""
    del progress
    return 1.0


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


def make_dropout_net() -> nn.Module:
    """A convolutional network of 1.2 million parameters with dropout."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU()),
        *(nn.Dropout(0.5), nn.Linear(128, 10)),
    )


def make_autoencoder() -> nn.Module:
    """An autoencoder of two strided convolutions and two transposed ones."""
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


def _momentum(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def _adamw_of_the_readme(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr)


def _adadelta(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adadelta(params, lr=lr)


def _rmsprop(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=lr)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A model and its training, the same for all modes.

    Attributes:
        name: As given to ``--models``.
        what: Model and optimizer in words.
        make_model: Builds the model for an alphabet of that size, with fresh weights.
        make_optimizer: Builds its optimizer from parameters and learning rate.
        loss: Mean loss of a batch; the held-out loss is the quality measure.
        lr: Learning rate, tuned for one process at the global batch.
        num_epochs: Epochs.
        batch_size: Samples in a batch of one worker; the global batch is two of them.
        part: Part of the training samples that is used; less than 1 for a quick look.
        is_text: True if it reads the text, not the digits.
        is_random: True if its data are those of the README's example.
        accuracy: True if the fraction of digits or characters predicted correctly is reported.
        schedule: Factor on the learning rate for the part of the training so far, 0 to 1.
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
    is_random: bool = False
    accuracy: bool = False
    schedule: Callable[[float], float] = lr_factor

    def load(self, folder: Path | None) -> Data:
        """The study's data; ``None``: the tiny stand-in."""
        if self.is_random:
            data = random_vectors()
        elif folder is None:
            data = synthetic_text() if self.is_text else synthetic_digits()
        else:
            data = text(folder) if self.is_text else digits(folder)
        return data if self.part == 1 else data.first(self.part)

    def scheduler(
        self, optimizer: torch.optim.Optimizer, num_positions: int
    ) -> torch.optim.lr_scheduler.LambdaLR:
        """The schedule, stepped ``num_positions`` times in the whole training."""
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda at: self.schedule(at / num_positions)
        )

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
                right += int((model(batch[0]).argmax(-1) == batch[1]).sum())
        found = {"loss": loss / num_samples}
        if self.accuracy:
            found["accuracy"] = right / held_out[1].numel()
        return found


def _make_logistic(num_symbols: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_symbols))


def _make_mlp(num_symbols: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, num_symbols))


def _make_readme_net(num_symbols: int) -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, num_symbols))


def _decay_per_epoch(num_epochs: int) -> Callable[[float], float]:
    return lambda progress: 0.7 ** int(progress * num_epochs)


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
            accuracy=True,
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
            accuracy=True,
            is_text=True,
            lr=1e-2,
            num_epochs=2,
            batch_size=8,
        ),
        Study(
            name="lenet-sgd",
            what="LeNet with batch normalization on digits, SGD with momentum 0.9",
            make_model=lambda _: LeNet(),
            make_optimizer=_momentum,
            loss=class_loss,
            accuracy=True,
            lr=0.03,
            num_epochs=6,
        ),
        Study(
            name="readme",
            what="the README's example, MLP 20-64-5 on random vectors, AdamW",
            make_model=_make_readme_net,
            make_optimizer=_adamw_of_the_readme,
            loss=class_loss,
            accuracy=True,
            lr=1e-3,
            num_epochs=3,
            batch_size=16,
            is_random=True,
            schedule=constant,
        ),
        *(
            Study(
                name=f"mnist-{num_epochs}",
                what="convolutional network of 1.2 million parameters with dropout on digits, "
                "Adadelta, 0.7 times the learning rate after each epoch",
                make_model=lambda _: make_dropout_net(),
                make_optimizer=_adadelta,
                loss=class_loss,
                accuracy=True,
                lr=1.0,
                num_epochs=num_epochs,
                schedule=_decay_per_epoch(num_epochs),
            )
            for num_epochs in (1, 2, 4)
        ),
    )
}
SIX = ("logistic", "mlp", "lenet", "autoencoder", "char-rnn", "gpt")
"""Studies of the tables of policies."""


def _long_warm_up(progress: float) -> float:
    if progress < 0.2:
        return progress / 0.2
    return (1 + math.cos(math.pi * (progress - 0.2) / 0.8)) / 2


def _recipe(name: str, lr: float) -> Study:
    study = STUDIES[name]
    what = f"{study.what}, with learning rate and epochs of flodl's ddp-bench"
    return replace(study, name=f"flodl-{name}", what=what, lr=lr, num_epochs=5, schedule=constant)


FLODL = (
    *(_recipe(name, 1e-3) for name in ("logistic", "mlp", "lenet", "autoencoder")),
    _recipe("char-rnn", 2e-3),
    replace(_recipe("gpt", 3e-4), make_optimizer=_adam, schedule=_long_warm_up),
)
STUDIES |= {study.name: study for study in FLODL}
