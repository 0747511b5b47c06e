"""One rank of PyTorch's ``fully_shard`` over Gloo, driven by JSON lines on stdin.

It stays alive for all repetitions, so that no measurement contains a process start.
Usage: ``fsdp_worker.py RANK WORLD_SIZE STORE_FILE``; see :class:`ddp_group.DdpGroup`.
"""

from __future__ import annotations

import time
import warnings
from itertools import islice

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.ddp_rank import join_group, serve
from benchmarks.fsdp_models import WORKLOADS
from benchmarks.harness.loops import batches, train_step


def measure(name: str, num_steps: int, by_block: bool) -> float:
    """Samples/s of all ranks together, after two steps of warm-up."""
    workload = WORKLOADS[name]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = workload.make_model()
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks if by_block else ():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = workload.make_optimizer(model.parameters())
    data = workload.make_data(64 * workload.batch_size)
    start = 0.0
    stream = batches(data, workload.batch_size, rank)
    for step, batch in enumerate(islice(stream, num_steps + 2)):
        if step == 2:
            dist.barrier()
            start = time.perf_counter()
        train_step(workload, model, optimizer, batch)
    dist.barrier()
    return world_size * num_steps * workload.batch_size / (time.perf_counter() - start)


def main() -> None:
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    join_group()
    serve(measure)


if __name__ == "__main__":
    main()
