"""Train an image model of timm on scikit-learn's digits, with mixup and an average of weights."""

from __future__ import annotations

import argparse

import timm
import torch
from sklearn.datasets import load_digits
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset, default_collate

from gpuworker import Trainer

NUM_CLASSES, NUM_TRAINED, SIZE = 10, 1400, 32


def digits() -> tuple[Tensor, Tensor]:
    """Images of 32 x 32 pixels, and their labels."""
    pixels, labels = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    images = F.interpolate(pixels.view(-1, 1, 8, 8).float() / 16, size=SIZE)
    return images, labels


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="test_vit", help="any of timm.list_models()")
    parser.add_argument("--workers", type=int, default=2, help="replicas, all on the CPU")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker, even")
    parser.add_argument("--optimizer", default="adamw", help="any of timm.optim.list_optimizers()")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    torch.manual_seed(0)
    images, labels = digits()
    held_out = images[NUM_TRAINED:], labels[NUM_TRAINED:]
    options = {"img_size": SIZE} if "vit" in args.model else {}
    model = timm.create_model(args.model, num_classes=NUM_CLASSES, in_chans=1, **options)
    average = AveragedModel(model, avg_fn=lambda a, b, _: (a + b) / 2, use_buffers=True)
    mix = Mixup(mixup_alpha=0.2, num_classes=NUM_CLASSES)

    loader = DataLoader(
        TensorDataset(images[:NUM_TRAINED], labels[:NUM_TRAINED]),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=lambda samples: mix(*default_collate(samples)),
    )
    soft_loss = SoftTargetCrossEntropy()

    def evaluate(replica: nn.Module, epoch: int) -> dict[str, float]:  # on averaged weights
        average.update_parameters(replica)
        return {"accuracy": accuracy(replica, *held_out)}

    handle = (
        Trainer.builder(
            model,
            lambda params: create_optimizer_v2(params, args.optimizer, lr=args.lr),
            lambda replica, batch: soft_loss(replica(batch[0]), batch[1]),
        )
        .dataset(loader)
        .num_epochs(args.epochs)
        .devices(["cpu"] * args.workers)
        .eval_fn(evaluate)
        .run()
    )
    for m in handle.metrics():
        reached = m.scalars["eval/accuracy"]
        print(f"epoch {m.epoch}  loss {m.avg_loss:.3f}  accuracy {reached:.1%}", flush=True)
    model.load_state_dict(handle.join().state_dict())
    print(f"{args.model}: accuracy {accuracy(model, *held_out):.1%}")
    print(f"its average over the epochs: accuracy {accuracy(average, *held_out):.1%}")


if __name__ == "__main__":
    main()
