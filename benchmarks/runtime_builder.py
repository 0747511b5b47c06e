"""The runtime as the speed benchmarks run it: under the conditions of the bare loops."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor, nn

from benchmarks.harness.models import Batch, Workload
from runtime import ApplyPolicy, Trainer, TrainerBuilder, current_worker


def runtime_builder(
    workload: Workload,
    data: Batch,
    counts: list[int],
    *,
    num_epochs: int,
    policy: ApplyPolicy,
    pauses_s: Sequence[float] = (),
    pinned: bool = False,
) -> TrainerBuilder:
    """CPU workers with one intra-op thread each; all that is not named has the defaults.

    Args:
        workload: Model, optimizer and loss.
        data: The data set.
        counts: Batches that each rank has trained, which its worker counts up; as many
            zeros as there shall be workers.
        num_epochs: Epochs.
        policy: The policy.
        pauses_s: Sleep of each rank within a step, in seconds; empty: none.
        pinned: Whether each worker's thread is kept on a core of its own (Linux).
    """
    ranks = count()

    def train_fn(model: nn.Module, batch: Batch) -> Tensor:
        loss = workload.loss(model, batch)
        rank = current_worker().rank
        if pauses_s and pauses_s[rank]:
            time.sleep(pauses_s[rank])
        counts[rank] += 1
        return loss

    def make_model(device: torch.device) -> nn.Module:
        # Called in the worker's own thread, rank 0 first.
        torch.set_num_threads(1)
        if pinned:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[next(ranks) % len(cores)]})
        return workload.make_model().to(device)

    return (
        Trainer.builder(make_model, workload.make_optimizer, train_fn)
        .dataset(data)
        .batch_size(workload.batch_size)
        .num_epochs(num_epochs)
        .devices(["cpu"] * len(counts))
        .policy(policy)
        .tune_allocator(False)
        .progress(False)
    )
