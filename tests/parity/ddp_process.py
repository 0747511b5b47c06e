"""One rank of PyTorch's ``DistributedDataParallel`` over Gloo, in a real process.

Usage: ``ddp_process.py RANK WORLD_SIZE STORE_FILE``. Every line on stdin is the path of a
job: ``{"case": fields of Case, "initial": state dict, "indices": [step][rank] tensors}``.
The answer on stdout is ``done``; rank 0 has then written the final state dict next to the
job, as ``<job>.result``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.support.rank_processes import serve_jobs

NUM_FEATURES = 12
NUM_CLASSES = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """The training, equal in every system that is compared.

    Attributes:
        optimizer: ``"sgd"`` (with momentum) or ``"adamw"``.
        dtype: ``"float64"`` or ``"float32"``.
        num_samples: Length of the data set.
        batch_size: Samples for each rank and step.
        num_epochs: Passes over the data set.
    """

    optimizer: str
    dtype: str
    num_samples: int
    batch_size: int
    num_epochs: int


def make_model(case: Case, seed: int = 0) -> nn.Module:
    """An MLP without buffers, with weights from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(NUM_FEATURES, 24),
            nn.LayerNorm(24),
            nn.GELU(),
            nn.Linear(24, 16),
            nn.Tanh(),
            nn.Linear(16, NUM_CLASSES),
        )
    return model.to(getattr(torch, case.dtype))


def make_optimizer(case: Case, params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay, or AdamW."""
    if case.optimizer == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3)
    return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.05)


def make_data(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Features, classes, and each sample's own index."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(case.num_samples, NUM_FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(NUM_CLASSES, (case.num_samples,), generator=generator)
    return x.to(getattr(torch, case.dtype)), y, torch.arange(case.num_samples)


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of a batch."""
    return F.cross_entropy(model(x), y)


def train(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[Tensor],
) -> None:
    """Train on the samples of each step in turn."""
    x, y, _ = make_data(case)
    for indices in steps:
        optimizer.zero_grad()
        mean_loss(model, x[indices], y[indices]).backward()
        optimizer.step()


def run_job(path: str) -> None:
    job = torch.load(path)
    case, rank = Case(**job["case"]), dist.get_rank()
    model = make_model(case)
    model.load_state_dict(job["initial"])
    replica = DistributedDataParallel(model)
    optimizer = make_optimizer(case, replica.parameters())
    train(case, replica, optimizer, [step[rank] for step in job["indices"]])
    if rank == 0:
        torch.save(model.state_dict(), f"{path}.result")


if __name__ == "__main__":
    serve_jobs(run_job)
