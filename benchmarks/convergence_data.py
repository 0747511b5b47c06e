"""The data of the convergence benchmark: real digits and a real text, or a tiny stand-in."""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from coordinator.dispatch import permutation

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
    """A file is not there, or not what it should be; the message says how to give it."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is trained and what is held out: tensors with the samples along dimension 0.

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
        """This part of the training samples, and all that are held out."""
        num_train = max(MULTIPLE, int(self.num_samples * part) // MULTIPLE * MULTIPLE)
        return replace(self, train=tuple(c[:num_train] for c in self.train))


def default_folder() -> Path:
    """``$GPUWORKER_DATA``, else ``data`` in the current directory."""
    return Path(os.environ.get("GPUWORKER_DATA") or "data")


def missing_files(folder: Path) -> list[str]:
    """Names of the files that are not in the folder."""
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
    """Few images that ten noisy patterns make: enough to run every line, no more."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 1, 28, 28, generator=generator)
    labels = torch.arange(384 + 64) % 10
    noise = torch.rand(len(labels), 1, 28, 28, generator=generator)
    return _split(((patterns[labels] + noise) / 2, labels), 384, 10)


def synthetic_text() -> Data:
    """A few sentences again and again."""
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
