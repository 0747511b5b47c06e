"""One rank of PyTorch's ``fully_shard`` over Gloo, driven by JSON lines on stdin.

It stays alive for all repetitions, so that no measurement contains a process start.
Usage: ``fsdp_worker.py RANK WORLD_SIZE STORE_FILE``; see :class:`ddp_group.DdpGroup`.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from fsdp_models import WORKLOADS
from loops import batches, train_step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


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
    rank, world_size, store_file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store_file}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    print(json.dumps({"ready": rank}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"rate": measure(**json.loads(line))}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
