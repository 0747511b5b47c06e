"""One rank of PyTorch's ``fully_shard`` over Gloo, in a real process.

Usage: ``fsdp_process.py RANK WORLD_SIZE STORE_FILE``. Every line on stdin is the path of a
job: ``{"case": fields of Case, "initial": state dict}``. The answer on stdout is ``done``;
rank 0 has then written the final state dict next to the job, as ``<job>.result``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from tests.support.rank_processes import serve_jobs

VOCABULARY = 17
LENGTH = 8
NUM_STEPS = 4
BATCH_SIZE = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """The training, equal in every system that is compared.

    Attributes:
        strategy: Name of the strategy.
        dtype: ``"float64"`` or ``"float32"``.
        world_size: Number of ranks.
        max_norm: Limit of the gradient's norm, low enough to act; 0: none.
    """

    strategy: str
    dtype: str
    world_size: int
    max_norm: float = 0.0


class Block(nn.Module):
    """One pre-norm transformer block with causal attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A language model with sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        width = 18
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) / 10)
        self.blocks = nn.Sequential(Block(width, 3), Block(width, 3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(x) + self.position)))


def make_model(case: Case) -> nn.Module:
    """The model, with weights from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Transformer().to(getattr(torch, case.dtype))


def make_optimizer(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """AdamW with weight decay.

    The gradient of attention's key bias is rounding noise, which Adam scales to a full step: the
    learning rate bounds the difference of two systems in float32.
    """
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.05)


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The batch of a rank in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    text = torch.randint(VOCABULARY, (BATCH_SIZE, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of a batch."""
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def make_mesh(case: Case) -> DeviceMesh:
    """A mesh with one shard dimension, or with replicas of sharded groups."""
    size = case.world_size
    if case.strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        return init_device_mesh("cpu", (size,))
    num_shards = 2 if case.strategy == "HYBRID_SHARD" else 1
    names = ("replicate", "shard")
    return init_device_mesh("cpu", (size // num_shards, num_shards), mesh_dim_names=names)


def run_job(path: str) -> None:
    job = torch.load(path)
    case, rank = Case(**job["case"]), dist.get_rank()
    model = make_model(case)
    model.load_state_dict(job["initial"])
    mesh, reshards = make_mesh(case), case.strategy != "SHARD_GRAD_OP"
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    optimizer = make_optimizer(model.parameters())
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        mean_loss(model, batch_of(step, rank)).backward()
        if case.max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
    state = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    if rank == 0:
        torch.save(state, f"{path}.result")


if __name__ == "__main__":
    serve_jobs(run_job)
