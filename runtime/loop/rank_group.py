"""RankGroup: one model on several devices, with the threads that run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from coordinator.config import AverageBackend
from runtime.collective import Collective, create_collectives, set_timeout_remedy
from runtime.core.loss_weights import LossWeightFn
from runtime.loop.collective_group import CollectiveGroup
from runtime.loop.loop_recorder import LoopRecorder
from runtime.loop.mirror import ModelMaker, ModelMirror
from runtime.loop.rank_replica import GradientReduction, RankReplica
from runtime.loop.runner import Runner

NewOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
"""Makes the optimizer of a model."""

COLLECTIVE_TIMEOUT_S = 600.0
"""Seconds that a replica waits for a slower one; a failed replica aborts its peers at once."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """One model on several devices: a rank for each, and one optimizer.

    Attributes:
        runner: Runs tasks in the ranks' threads.
        mirror: The model and its copies.
        replicas: In order of rank.
        reduction: Sums the ranks' gradients.
    """

    runner: Runner
    mirror: ModelMirror
    optimizer: torch.optim.Optimizer
    replicas: Sequence[RankReplica]
    reduction: GradientReduction

    @classmethod
    def start(
        cls,
        devices: Sequence[torch.device],
        backend: AverageBackend,
        recorder: LoopRecorder,
        make_first: ModelMaker,
        make: ModelMaker | None,
        new_optimizer: NewOptimizer,
        *,
        timeout_remedy: str,
        loss_weight: LossWeightFn | None = None,
        name: str | None = None,
    ) -> RankGroup:
        """Start the threads, and build the model, its copies and its optimizer.

        A model that is all in eval mode is put in train mode. After a failure the threads have
        ended.

        Args:
            devices: One per rank; a device may be listed more than once.
            make_first: Makes the model that is trained; called in rank 0's thread.
            make: Makes a further model, see :class:`ModelMirror`.
            timeout_remedy: The caller's means against the timeout of a reduction.
            loss_weight: See :class:`~gpuworker.DdpConfig`.
            name: As for :class:`Runner`.
        """

        def connect() -> Sequence[Collective]:
            ends = create_collectives(
                len(devices), backend.collective, devices, COLLECTIVE_TIMEOUT_S
            )
            set_timeout_remedy(ends, timeout_remedy)
            return ends

        group = CollectiveGroup(connect)
        runner = Runner(devices, group, recorder, name=name)
        try:
            model: nn.Module = runner.run_first(partial(make_first, devices[0]))
            train_mode(model)
            mirror = ModelMirror(model, devices, make)
            optimizer = new_optimizer(model)
            if not mirror.shares_memory:
                group.get()
        except BaseException as error:
            recorder.finish(error)
            runner.close()
            raise
        replicas = [
            RankReplica(rank, context, mirror, loss_weight)
            for rank, context in enumerate(runner.contexts)
        ]
        reduction = GradientReduction(mirror, replicas, runner, recorder)
        return cls(runner, mirror, optimizer, replicas, reduction)


def train_mode(model: nn.Module) -> None:
    """Put a model that is all in eval mode in train mode; others keep their modes."""
    if not any(module.training for module in model.modules()):
        model.train()
