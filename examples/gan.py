"""Train a small GAN on points around a circle, with an optimizer for each of its two networks."""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpuworker import LoopWorker, Trainer

NUM_MODES, SPREAD, NOISE = 8, 0.05, 8


def mlp(num_in: int, num_out: int, width: int = 64) -> nn.Sequential:
    layers = [nn.Linear(num_in, width), nn.LeakyReLU(0.2), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.LeakyReLU(0.2), nn.Linear(width, num_out))


def centres() -> Tensor:
    angles = torch.arange(NUM_MODES) * (2 * math.pi / NUM_MODES)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def real_points(count: int) -> Tensor:
    modes = torch.randint(NUM_MODES, (count,))
    return centres()[modes] + SPREAD * torch.randn(count, 2)


def near_a_mode(points: Tensor) -> tuple[float, int]:
    """Share of the points within four spreads of a mode, and number of modes with such points."""
    distances, modes = torch.cdist(points, centres()).min(dim=1)
    near = distances < 4 * SPREAD
    return near.float().mean().item(), len(torch.unique(modes[near]))


def optimizers(model: nn.ModuleDict) -> dict[str, torch.optim.Optimizer]:
    rates = {"judge": 1e-3, "maker": 5e-4}
    return {
        name: torch.optim.Adam(model[name].parameters(), rate, betas=(0.5, 0.9))
        for name, rate in rates.items()
    }


def loop(worker: LoopWorker) -> None:
    maker, judge = worker.model.get_submodule("maker"), worker.model.get_submodule("judge")
    for (real,) in worker.batches():
        made = maker(torch.randn(len(real), NOISE))
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()
        worker.step(loss, optimizer="judge")
        worker.step(F.softplus(-judge(made)).mean(), optimizer="maker")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="replicas, all on the CPU")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=256, help="of a step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = nn.ModuleDict({"maker": mlp(NOISE, 2), "judge": mlp(2, 1)})
    num_epochs = min(5, args.steps)
    num_points = args.steps // num_epochs * args.batch_size  # in an epoch
    handle = (
        Trainer.loop(model, optimizers, loop)
        .dataset((real_points(num_points),))
        .global_batch_size(args.batch_size)
        .num_epochs(num_epochs)
        .devices(["cpu"] * args.workers)
        .seed(args.seed)
        .run()
    )
    for metrics in handle.metrics():
        judged, made = metrics.scalars["loss/judge"], metrics.scalars["loss/maker"]
        print(f"epoch {metrics.epoch}  judge {judged:.3f}  maker {made:.3f}", flush=True)

    model.load_state_dict(handle.join().state_dict())
    with torch.no_grad():
        share, modes = near_a_mode(model["maker"](torch.randn(2000, NOISE)))
    print(f"{share:.0%} of the points lie near one of {modes} of {NUM_MODES} modes")


if __name__ == "__main__":
    main()
