"""Train a small GAN on points around a circle, in a loop of its own, with replicas in step."""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

from runtime import Ddp

NUM_MODES, SPREAD, NOISE = 8, 0.05, 8


def mlp(num_in, num_out, width=64):
    return nn.Sequential(
        *(nn.Linear(num_in, width), nn.LeakyReLU(0.2)),
        *(nn.Linear(width, width), nn.LeakyReLU(0.2)),
        nn.Linear(width, num_out),
    )


def centres():
    angles = torch.arange(NUM_MODES) * (2 * math.pi / NUM_MODES)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def real_points(count, generator):
    modes = torch.randint(NUM_MODES, (count,), generator=generator)
    return centres()[modes] + SPREAD * torch.randn(count, 2, generator=generator)


def near_a_mode(points):
    """The share of points within four spreads of a mode, and how many modes have some."""
    distances, modes = torch.cdist(points, centres()).min(dim=1)
    near = distances < 4 * SPREAD
    return near.float().mean().item(), len(modes[near].unique())


def train_step(models, optimizers, group, losses):
    """One step of one of the two networks, on every replica alike."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    total = 0.0
    for rank in range(len(models)):
        loss = losses(rank)
        loss.backward()
        total += loss.item() / len(models)
    group.all_reduce_gradients()
    for optimizer in optimizers:
        optimizer.step()
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="replicas, all on the CPU")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=128, help="for each replica")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the operations are too small to be shared out
    torch.manual_seed(args.seed)
    random = torch.Generator().manual_seed(args.seed)

    devices = ["cpu"] * args.workers
    makers = [mlp(NOISE, 2) for _ in devices]
    judges = [mlp(2, 1) for _ in devices]
    maker_steps = [torch.optim.Adam(m.parameters(), 5e-4, betas=(0.5, 0.9)) for m in makers]
    judge_steps = [torch.optim.Adam(m.parameters(), 1e-3, betas=(0.5, 0.9)) for m in judges]

    def fake(rank):
        return makers[rank](torch.randn(args.batch_size, NOISE, generator=random))

    def judge_loss(rank):
        real = judges[rank](real_points(args.batch_size, random))
        return F.softplus(-real).mean() + F.softplus(judges[rank](fake(rank).detach())).mean()

    def maker_loss(rank):
        return F.softplus(-judges[rank](fake(rank))).mean()

    with Ddp.wrap(makers, devices) as maker_group, Ddp.wrap(judges, devices) as judge_group:
        maker_group.sync_params()
        judge_group.sync_params()
        for step in range(1, args.steps + 1):
            judged = train_step(judges, judge_steps, judge_group, judge_loss)
            made = train_step(makers, maker_steps, maker_group, maker_loss)
            if step % max(1, args.steps // 5) == 0:
                print(f"step {step:5}  judge {judged:.3f}  maker {made:.3f}", flush=True)
    with torch.no_grad():
        share, modes = near_a_mode(makers[-1](torch.randn(2000, NOISE, generator=random)))
    print(f"{share:.0%} of the points lie near one of {modes} of {NUM_MODES} modes")


if __name__ == "__main__":
    main()
