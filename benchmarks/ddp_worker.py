"""One rank of ``DistributedDataParallel`` over Gloo, driven by JSON lines on stdin.

It stays alive for all repetitions, so that no measurement contains a process start.
Usage: ``ddp_worker.py RANK WORLD_SIZE STORE_FILE``; see :class:`ddp_group.DdpGroup`.
"""

from __future__ import annotations

import time
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ddp_rank import join_group, serve
from benchmarks.harness.loops import train_step
from benchmarks.harness.models import WORKLOADS, Batch, Workload


def run_epoch(
    workload: Workload,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    data: Batch,
    epoch: int,
    pause_s: float,
) -> None:
    """Train this rank's share of a permutation that all ranks draw alike."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(epoch))
    for indices in order[rank::world_size].split(workload.batch_size):
        batch = (data[0].index_select(0, indices), data[1].index_select(0, indices))
        train_step(workload, model, optimizer, batch, pause_s)


def measure(
    name: str, num_batches: int, num_epochs: int, pauses_s: list[float], cache: dict[str, Batch]
) -> float:
    """Samples/s of all ranks together from the end of epoch 0 to the end of the last."""
    workload = WORKLOADS[name]
    num_samples = num_batches * workload.batch_size
    if name not in cache or len(cache[name][0]) != num_samples:
        cache.clear()
        cache[name] = workload.make_data(num_samples)
    model = DistributedDataParallel(workload.make_model(), gradient_as_bucket_view=True)
    optimizer = workload.make_optimizer(model.parameters())
    start = 0.0
    for epoch in range(num_epochs):
        run_epoch(workload, model, optimizer, cache[name], epoch, pauses_s[dist.get_rank()])
        if epoch == 0:
            dist.barrier()
            start = time.perf_counter()
    dist.barrier()
    return (num_epochs - 1) * num_samples / (time.perf_counter() - start)


def main() -> None:
    join_group()
    serve(partial(measure, cache={}))


if __name__ == "__main__":
    main()
