"""Ranks of FSDP in threads, and models for its tests."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from runtime import FSDP, Collective, ShardingStrategy, create_collectives
from runtime.core.errors import CollectiveAborted

WAIT_S = 30.0
SEEDING = threading.Lock()
"""All threads share one generator."""

STRATEGIES = tuple(ShardingStrategy)
SHARDED = tuple(s for s in STRATEGIES if s is not ShardingStrategy.NO_SHARD)
FREEING = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


def node_size(strategy: ShardingStrategy, world_size: int) -> int | None:
    """The node size of a hybrid: two ranks if the world size allows it."""
    if strategy is not ShardingStrategy.HYBRID_SHARD:
        return None
    return 2 if world_size % 2 == 0 else 1


def forget_frames(error: BaseException | None) -> None:
    """Clear the frames of a failed rank, which would keep its objects in a cycle."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def outcomes_of(ends: Sequence[Collective], work: Callable[[Collective], Any]) -> list[Any]:
    """Each rank's result or exception; a rank that fails closes its collective."""

    def run(end: Collective) -> Any:
        try:
            return work(end)
        except BaseException as error:
            end.close()
            forget_frames(error)
            return error

    with ThreadPoolExecutor(len(ends), "rank") as pool:
        return [future.result(WAIT_S) for future in [pool.submit(run, end) for end in ends]]


def on_ranks(
    world_size: int, work: Callable[[Collective], Any], kind: str = "thread", timeout_s: float = 20
) -> list[Any]:
    """Run every rank of a new group; returns the results or raises a rank's exception."""
    ends = create_collectives(world_size, kind, timeout_s=timeout_s)
    with ExitStack() as stack:
        for end in ends:
            stack.callback(end.close)
        outcomes = outcomes_of(ends, work)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    # Errors of aborted peers are less specific.
    for error in sorted(errors, key=lambda error: isinstance(error, CollectiveAborted)):
        raise error
    return outcomes


class Net(nn.Module):
    """A hard case: odd sizes, tied, frozen, unused and scalar parameters, and a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        super().__init__()
        with SEEDING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(11, 6)
            self.norm = nn.LayerNorm(6)
            self.frozen = nn.Linear(6, 5).requires_grad_(False)
            self.hidden = nn.Linear(5, 6)
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.unused = nn.Parameter(torch.randn(3))
            self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1  # type: ignore[assignment, operator]
        x = self.norm(self.embed(tokens))
        x = self.hidden(torch.tanh(self.frozen(x))) * self.scale
        return self.head(x)


def batch(num_samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and classes for :class:`Net`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (num_samples,), generator=generator)
    return tokens, torch.randint(11, (num_samples,), generator=generator)


def share(batch: tuple[Tensor, Tensor], end: Collective) -> tuple[Tensor, Tensor]:
    """A rank's equal share of a batch."""
    x, y = (tensor.chunk(end.world_size)[end.rank] for tensor in batch)
    return x, y


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def wrap(
    end: Collective,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    module: nn.Module | None = None,
) -> FSDP:
    """A wrapped module, :class:`Net` unless another is given."""
    net = Net() if module is None else module
    return FSDP(net, end, strategy, node_size(strategy, end.world_size))
