"""Train LeNet on the handwritten digits of MNIST, read from its idx files."""

from __future__ import annotations

import argparse
import gzip
import math
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from stopping import follow, parse, stoppable, with_checkpoints
from torch import Tensor, nn

from gpuworker import Trainer, device_summary, record_scalar

Batch = tuple[Tensor, Tensor]  # images and labels


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array of unsigned bytes in an idx file: magic 0, 0, 8, rank; sizes; data."""
    raw = path.read_bytes()
    content = gzip.decompress(raw) if path.suffix == ".gz" else raw
    rank = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    header = 4 + 4 * rank
    shape = struct.unpack(f">{rank}I", content[4:header]) if len(content) >= header else ()
    if not rank or len(content) != header + math.prod(shape):
        raise ValueError(f"{path} is not a whole idx file of unsigned bytes")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()


def read_set(images_path: Path) -> Batch:
    """Images in [0, 1], and labels from the file whose name differs in these words."""
    name = images_path.name.replace("images", "labels").replace("idx3", "idx1")
    images, labels = read_idx(images_path), read_idx(images_path.with_name(name))
    if images.ndim != 3 or images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        raise ValueError(f"{images_path} and {name}: images {images.shape}, labels {labels.shape}")
    return torch.from_numpy(images).unsqueeze(1) / 255, torch.from_numpy(labels).long()


def load_data(directory: Path) -> tuple[Batch, Batch]:
    """Training and test set; of a single set the last fifth is the test set."""
    paths = sorted(directory.glob("*images*idx3-ubyte*"))
    if not paths:
        raise FileNotFoundError(f"{directory} holds no file named *images*idx3-ubyte or .gz")
    train = [path for path in paths if path.name.startswith("train")]
    test = [path for path in paths if path not in train]
    if train and test:
        return read_set(train[0]), read_set(test[0])
    images, labels = read_set(paths[0])
    split = len(labels) * 4 // 5
    return (images[:split], labels[:split]), (images[split:], labels[split:])


def lenet() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def train_fn(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    logits = model(images)
    record_scalar("accuracy", (logits.argmax(1) == labels).float().mean())
    return nn.functional.cross_entropy(logits, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--workers", type=int, default=2, help="all on the CPU")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of a step")
    args = parse(parser)
    try:
        train_set, (images, labels) = load_data(args.data)
    except (OSError, EOFError, ValueError) as error:
        parser.error(f"--data: {error}")
    builder = Trainer.builder(
        lambda device: lenet().to(device),
        lambda params: torch.optim.AdamW(params, lr=2e-3),
        train_fn,
    ).dataset(train_set)
    builder.devices(["cpu"] * args.workers).num_epochs(args.epochs)
    builder.global_batch_size(args.batch_size)
    handle = with_checkpoints(builder.seed(0), args).run()
    print(device_summary(handle.devices))
    follow(handle)
    model = handle.join().model()
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(f"accuracy {accuracy:.1%} on {len(labels)} test images")


if __name__ == "__main__":
    stoppable(main)
