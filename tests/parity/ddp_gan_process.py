"""One rank of a small GAN under ``DistributedDataParallel`` over Gloo, in a real process.

Usage: ``ddp_gan_process.py RANK WORLD_SIZE STORE_FILE RESULT``. Rank 0 writes the final
state dicts of both networks to ``RESULT``.

The models are defined here too, for every system that is compared: the discriminator has a
parameter that no rank uses, one that only rank 0 uses, and a frozen one; the generator has batch
norm, whose buffers are rank 0's.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

NUM_STEPS = 30
BATCH_SIZE = 8


class Judge(nn.Module):
    """A discriminator whose parameters are used unequally."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.sometimes = nn.Linear(12, 12)
        self.never = nn.Linear(3, 3)
        self.last = nn.Linear(12, 1)

    def forward(self, points: Tensor, more: bool) -> Tensor:
        x = F.gelu(self.frozen(F.gelu(self.hidden(points))))
        return self.last(x + self.sometimes(x) if more else x)


def make_maker() -> nn.Module:
    """A generator with buffers."""
    return nn.Sequential(nn.Linear(3, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 2))


def make_models(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Generator and discriminator, with weights from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_maker().double(), Judge().double()


def make_optimizers(maker: nn.Module, judge: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    """AdamW with weight decay, which would change a parameter with a gradient of zero."""
    trained = [p for p in judge.parameters() if p.requires_grad]
    return (
        torch.optim.AdamW(maker.parameters(), 1e-2, weight_decay=0.1),
        torch.optim.AdamW(trained, 1e-2, weight_decay=0.1),
    )


def draws(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Real points, and the noise of both phases, of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shapes = ((BATCH_SIZE, 2), (BATCH_SIZE, 3), (BATCH_SIZE, 3))
    real, first, second = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return real + 1.0, first, second


def judge_loss(maker: nn.Module, judge: nn.Module, step: int, rank: int) -> Tensor:
    """The discriminator's loss, on real and generated points in one forward pass."""
    real, noise, _ = draws(step, rank)
    made = maker(noise).detach()
    scores = judge(torch.cat([real, made]), rank == 0 and step % 2 == 0)
    targets = torch.cat([torch.ones(BATCH_SIZE, 1), torch.zeros(BATCH_SIZE, 1)]).double()
    return F.binary_cross_entropy_with_logits(scores, targets)


def maker_loss(maker: nn.Module, judge: nn.Module, step: int, rank: int) -> Tensor:
    """The generator's loss."""
    _, _, noise = draws(step, rank)
    return F.softplus(-judge(maker(noise), rank == 0 and step % 2 == 0)).mean()


def main() -> None:
    rank, world_size, store_file, result = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store_file}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    # DDP broadcasts rank 0's weights.
    bare_maker, bare_judge = make_models(rank)
    maker = DistributedDataParallel(bare_maker)
    judge = DistributedDataParallel(bare_judge, find_unused_parameters=True)
    maker_step, judge_step = make_optimizers(bare_maker, bare_judge)
    for step in range(NUM_STEPS):
        maker_step.zero_grad()
        judge_step.zero_grad()
        judge_loss(maker, judge, step, rank).backward()
        judge_step.step()
        maker_step.zero_grad()
        maker_loss(maker, judge, step, rank).backward()
        maker_step.step()
    if rank == 0:
        torch.save((bare_maker.state_dict(), bare_judge.state_dict()), result)
    dist.barrier()
    # The group's threads may need the interpreter for their last tensors: its end would wait for
    # them, or abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()
