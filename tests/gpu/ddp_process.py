"""One rank of ``DistributedDataParallel``, by the environment that ``torchrun`` sets.

``python -m tests.gpu.ddp_process WORKLOAD STEPS`` prints a line of JSON on rank 0: samples/s of all
ranks together. A GPU is shared where there are more ranks than GPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu import models

WARM_STEPS = 10


def workload_of(name: str, *, dry: bool) -> models.GpuWorkload:
    """A workload of the GPU benchmark; with ``dry`` of a size for the CPU."""
    return {"mlp": models.small_mlp, "transformer": models.transformer}[name](dry=dry)


def main() -> None:
    name, num_steps = sys.argv[1], int(sys.argv[2])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % num_gpus) if num_gpus else torch.device("cpu")
    if num_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if num_gpus else "gloo")
    workload = workload_of(name, dry=not num_gpus)
    model = DistributedDataParallel(
        workload.make_model().to(device),
        device_ids=[device.index] if num_gpus else None,
        gradient_as_bucket_view=True,
    )
    optimizer = workload.make_optimizer(model.parameters())
    x, y = (t.to(device) for t in workload.make_data(8 * workload.batch_size))
    bf16 = workload.precision == "bf16"
    begin = 0.0
    for step in range(WARM_STEPS + num_steps):
        if step == WARM_STEPS:
            models.wait_for(device)
            begin = time.perf_counter()
        rows = slice(step % 8 * workload.batch_size, (step % 8 + 1) * workload.batch_size)
        optimizer.zero_grad()
        autocast = torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
        with autocast:
            loss = workload.loss(model, (x[rows], y[rows]))
        loss.backward()
        optimizer.step()
    models.wait_for(device)
    seconds = time.perf_counter() - begin
    if rank == 0:
        rate = num_steps * workload.batch_size * world_size / seconds
        print(json.dumps({"samples_per_s": rate}), flush=True)
    dist.barrier()
    os._exit(0)  # a rank that ends later may lose the first one's store, and abort


if __name__ == "__main__":
    main()
