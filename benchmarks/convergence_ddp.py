"""PyTorch's own data parallelism in the convergence benchmark: two Gloo processes.

The calling process is rank 0 and starts the other one:
``python -m benchmarks.convergence_ddp SPEC STORE_FILE``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.convergence_child import (
    WORLD_SIZE,
    fingerprint,
    make_model,
    study_of,
    train_loop,
    warm_up,
)
from benchmarks.convergence_data import Data
from benchmarks.harness.studies import Study

MEETING_S = 120.0
END_S = 30.0


def train_rank(
    study: Study, data: Data, seed: int, rank: int, store: str
) -> tuple[nn.Module, dict[str, Any]]:
    """Train one rank's half of each global batch, timed from barrier to barrier."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=MEETING_S),
    )
    model = make_model(study, data.num_symbols, seed)
    initial = fingerprint(model)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    dist.barrier()
    start, busy = time.perf_counter(), time.thread_time()
    train_loop(study, wrapped, data, seed, study.batch_size, rank, WORLD_SIZE)
    busy_s = torch.tensor(time.thread_time() - busy)
    dist.barrier()
    train_s = time.perf_counter() - start
    dist.all_reduce(busy_s)
    # First: were the group's last reference in here, its threads would be waited for with the
    # interpreter held, which one of them may need for its last tensor.
    del wrapped
    dist.destroy_process_group()
    return model, {
        "initial": initial,
        "train_s": train_s,
        "idle_share": max(0.0, 1 - float(busy_s) / WORLD_SIZE / train_s),
        "num_averagings": study.num_epochs * (data.num_samples // (WORLD_SIZE * study.batch_size)),
    }


def run_ddp(study: Study, data: Data, spec: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Rank 0 here, rank 1 in another process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory(prefix="ddp-") as folder:
        store = str(Path(folder, "store"))
        other = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.convergence_ddp", json.dumps(spec), store]
        )
        try:
            model, facts = train_rank(study, data, spec["seed"], 0, store)
            other.wait(END_S)
        finally:
            if other.poll() is None:
                other.kill()
                other.wait(END_S)
    if other.returncode:
        raise RuntimeError(f"rank 1 of DDP ended with exit code {other.returncode}")
    return model, facts


def main() -> None:
    spec, store = json.loads(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    study = study_of(spec)
    data = study.load(Path(spec["data"]) if spec["data"] else None)
    warm_up(study, data)
    train_rank(study, data, spec["seed"], 1, store)
    os._exit(0)  # the group's threads may still need the interpreter, whose end would abort


if __name__ == "__main__":
    main()
