from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from runtime.core.loss_weights import LossWeightFn
from runtime.device.base import Device
from runtime.device.cuda_api import StreamSync
from runtime.loop.loop_replica import LoopReplica
from runtime.loop.rank_threads import Task
from runtime.loop.runner import Runner
from runtime.replica.build import OptimFactory

RankModelFactory = Callable[[int, torch.device, nn.Module | None], nn.Module]
"""``f(rank, device, first)`` returns a rank's model on its device, with the weights of ``first``,
which is rank 0's model (``None`` for rank 0 itself)."""


def build_replicas(
    runner: Runner,
    make: RankModelFactory,
    optim_factory: OptimFactory,
    loss_weight: LossWeightFn | None = None,
    *,
    tensors: Sequence[Tensor] = (),
) -> list[LoopReplica]:
    """Build the replicas one at a time, each in its own thread, rank 0 first.

    Args:
        runner: Runs tasks in the replicas' threads.
        make: Makes a rank's model.
        optim_factory: Makes each replica's optimizer.
        loss_weight: See :class:`~gpuworker.DdpConfig`.
        tensors: Parameters and buffers of models that exist already.
    """
    replicas: list[LoopReplica] = []
    num_ranks = len(runner.contexts)
    has_grad: list[list[bool]] = [[] for _ in runner.contexts]
    sync = StreamSync([context.device for context in runner.contexts])
    # Copies of an existing model to its GPU may still be pending.
    events = sync.marks(tensors)

    def build(rank: int, context: Device) -> LoopReplica:
        sync.wait(context.device, events)
        model = make(rank, context.device, replicas[0].model if replicas else None)
        replica = LoopReplica(rank, context, model, optim_factory, has_grad, loss_weight)
        context.finish()  # the other replicas copy its weights on their own streams
        return replica

    for rank, context in enumerate(runner.contexts):
        tasks: list[Task | None] = [None] * num_ranks
        tasks[rank] = partial(build, rank, context)
        outcome = runner.execute(tasks)[rank]
        if outcome.error is not None:
            outcome.error.add_note(f"while replica {rank} was built on {context.device}")
            raise outcome.error
        replicas.append(outcome.value)
    return replicas
