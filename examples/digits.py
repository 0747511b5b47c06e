"""Train scikit-learn's handwritten digits with several workers on the CPU."""

from __future__ import annotations

import argparse
import sys

import torch
from sklearn.datasets import load_digits
from slow import Slowdown
from stopping import follow, parse, stoppable, with_checkpoints
from torch import Tensor, nn

from gpuworker import Trainer, TrainerHandle, device_summary, record_scalar

Batch = tuple[Tensor, Tensor]  # images and labels
POLICIES, BACKENDS = ["sync", "cadence", "async"], ["cpu", "thread", "gloo"]
REQUIRED_ACCURACY = 0.96


def load_data() -> tuple[Batch, Batch]:
    """1,797 images of 8 x 8 pixels; a fixed fifth of them is held out for the test."""
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = pixels.float().view(-1, 1, 8, 8) / 16
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return (images[order[359:]], labels[order[359:]]), (images[order[:359]], labels[order[:359]])


def build_model() -> nn.Sequential:
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    head = [nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*convolutions, nn.ReLU(), nn.MaxPool2d(2), *head)


def start(args: argparse.Namespace, policy: str, backend: str, data: Batch) -> TrainerHandle:
    slowdown = Slowdown(int(args.slow[0]), args.slow[1]) if args.slow else None

    def train_fn(model: nn.Module, batch: Batch) -> Tensor:
        if slowdown is not None:
            slowdown()
        images, labels = batch
        logits = model(images)
        record_scalar("accuracy", (logits.argmax(1) == labels).float().mean())
        return nn.functional.cross_entropy(logits, labels)

    builder = Trainer.builder(
        lambda device: build_model().to(device),
        lambda params: torch.optim.AdamW(params, lr=3e-3),
        train_fn,
    ).dataset(data)
    builder.devices(["cpu"] * args.workers).policy(policy).backend(backend)
    builder.global_batch_size(args.batch_size).num_epochs(args.epochs).seed(args.seed)
    if args.cluster:
        builder.cluster(args.cluster, min_machines=args.machines, period=1.0)
    return with_checkpoints(builder.progress(False), args).run()


def train(args: argparse.Namespace, policy: str, backend: str) -> float:
    """Train once, print a summary and return the accuracy on the test images."""
    train_set, (images, labels) = load_data()
    handle = start(args, policy, backend, train_set)
    follow(handle, quiet=args.all)
    state = handle.join()
    model = state.model()
    accuracy = float((model(images).argmax(1) == labels).float().mean())
    total = sum(m.num_samples for m in state.metrics)
    print(f"{policy:7} over {handle.backend.value:6}: test accuracy {accuracy:.1%}", end=", ")
    print(f"{sum(m.num_averagings for m in state.metrics):4} averagings; samples by rank:", end="")
    for rank in zip(*(m.per_rank for m in state.metrics), strict=False):
        samples, compute_s = sum(e.num_samples for e in rank), sum(e.compute_s for e in rank)
        print(f" {samples / total:4.0%} at {samples / max(compute_s, 1e-9):6,.0f}/s", end="")
    print(flush=True)
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", choices=POLICIES, default="sync")
    parser.add_argument("--backend", choices=["auto", *BACKENDS], default="auto")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slow", type=float, nargs=2, metavar=("RANK", "FACTOR"))
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cluster", metavar="HOST:PORT", help="train with other machines")
    parser.add_argument("--machines", type=int, default=1, help="fewest that begin")
    parser.add_argument("--all", action="store_true", help="every policy over every backend")
    args = parse(parser)
    print(device_summary([torch.device("cpu")] * args.workers))
    if not args.all:
        train(args, args.policy, args.backend)
        return
    lowest = min(train(args, policy, backend) for policy in POLICIES for backend in BACKENDS)
    print(f"lowest test accuracy {lowest:.1%}, required {REQUIRED_ACCURACY:.0%}")
    sys.exit(lowest < REQUIRED_ACCURACY)


if __name__ == "__main__":
    stoppable(main)
