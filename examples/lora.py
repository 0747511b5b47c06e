"""Teaches a trained network mirrored digits by low-rank adapters; only these are exchanged."""

from __future__ import annotations

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from gpuworker import DataParallelCoordinator

WIDTH, NUM_CLASSES, BATCH_SIZE = 512, 10, 64


class LoRA(nn.Module):
    """A frozen linear layer plus the product of two narrow ones (Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def build_base() -> nn.Sequential:
    hidden = nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(WIDTH, NUM_CLASSES))


def with_adapters(base: nn.Module, rank: int) -> nn.Sequential:
    """A copy of the base with frozen hidden layers, and adapters and a new head to train."""
    first, relu, second, _, _ = copy.deepcopy(base).children()
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    adapted = LoRA(first, rank), relu, LoRA(second, rank), relu
    return nn.Sequential(*adapted, nn.Linear(WIDTH, NUM_CLASSES))


def loss_fn(model: nn.Module, samples: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    logits, labels = model(samples[0]), samples[1]
    return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).sum()


def train(replicas: DataParallelCoordinator, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Train one pass over the samples; return the mean loss and the accuracy."""
    order = torch.randperm(len(labels))
    parts = (torch.split(each[order], BATCH_SIZE) for each in (images, labels))
    batches = zip(*parts, strict=True)
    results = [replicas.train_batch(batch) for batch in batches]
    loss = sum(result.avg_loss * result.total for result in results) / len(labels)
    return loss, sum(result.correct for result in results) / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="replicas, all on the CPU")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rank", type=int, default=4, help="of the adapters")
    args = parser.parse_args()
    torch.manual_seed(0)
    images, labels = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    upright = images.float() / 16
    mirrored = upright.view(-1, 8, 8).flip(2).flatten(1)
    seen, unseen = slice(0, 1400), slice(1400, None)

    def replicas_of(model: nn.Module, lr: float) -> DataParallelCoordinator:
        build, devices = (lambda device: copy.deepcopy(model).to(device)), ["cpu"] * args.workers
        return DataParallelCoordinator(build, lambda p: torch.optim.AdamW(p, lr), loss_fn, devices)

    with replicas_of(build_base(), 1e-3) as replicas:
        for _ in range(10):
            train(replicas, upright[seen], labels[seen])
        base = replicas.primary
    correct = loss_fn(base, (mirrored[unseen], labels[unseen]))[1]
    print(f"base: accuracy {correct / len(labels[unseen]):.1%} on mirrored digits")

    with replicas_of(with_adapters(base, args.rank), 4e-3) as replicas:
        params = list(replicas.primary.parameters())
        whole = sum(p.nbytes for p in params)
        travels = sum(p.nbytes for p in params if p.requires_grad)
        print(f"adapters and head: {travels:,} of {whole:,} bytes, {travels / whole:.1%}")
        for epoch in range(args.epochs):
            loss, share = train(replicas, mirrored[seen], labels[seen])
            print(f"epoch {epoch}  loss {loss:.4f}  accuracy {share:6.1%}", flush=True)
    correct = loss_fn(replicas.primary, (mirrored[unseen], labels[unseen]))[1]
    print(f"tuned: accuracy {correct / len(labels[unseen]):.1%} on mirrored digits")


if __name__ == "__main__":
    main()
