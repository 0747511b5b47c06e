"""A process of :class:`ddp_group.DdpGroup`: joins its peers, then answers JSON lines on stdin."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


def join_group() -> tuple[int, int]:
    """Join the Gloo group that the arguments ``RANK WORLD_SIZE STORE_FILE`` name.

    Waits for all peers; from here on the process has one intra-op thread.

    Returns:
        Rank and world size.
    """
    rank, world_size, store_file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store_file}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    return rank, world_size


def serve(measure: Callable[..., float]) -> None:
    """Answer every request with a rate until stdin ends, then leave the group.

    Args:
        measure: Called with a request's entries by name; gives samples/s.
    """
    print(json.dumps({"ready": dist.get_rank()}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"rate": measure(**json.loads(line))}), flush=True)
    dist.destroy_process_group()
