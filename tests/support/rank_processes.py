"""PyTorch's data-parallel systems in processes that serve jobs sequentially."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import programs

START_S = 80.0
JOB_S = 60.0


class RankProcesses:
    """Gloo processes of a script, one group per world size.

    Args:
        script: Takes ``RANK WORLD_SIZE STORE_FILE``, prints ``ready``, and for each path on stdin
            ``done``; rank 0 has then written the result beside it.
        directory: For jobs, results and stores.
    """

    def __init__(self, script: str, directory: Path) -> None:
        self._script = script
        self._directory = directory
        self._groups: dict[int, list[programs.Popen]] = {}
        self._job = count()

    def train(self, world_size: int, job: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The state dict after a group has done a job."""
        if world_size not in self._groups:
            self._start(world_size)
        path = self._directory / f"job-{next(self._job)}"
        torch.save(job, path)
        for process in self._groups[world_size]:
            assert process.stdin is not None
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
        for process in self._groups[world_size]:
            self._expect(process, "done", JOB_S)
        state: dict[str, torch.Tensor] = torch.load(f"{path}.result")
        return state

    def close(self) -> None:
        """Kill all processes."""
        processes = [process for group in self._groups.values() for process in group]
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate(timeout=10.0)

    def _start(self, world_size: int) -> None:
        store = self._directory / f"store-{world_size}"
        self._groups[world_size] = [
            programs.Popen(
                [sys.executable, self._script, str(rank), str(world_size), str(store)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                text=True,
            )
            for rank in range(world_size)
        ]
        for process in self._groups[world_size]:
            self._expect(process, "ready", START_S)

    @staticmethod
    def _expect(process: programs.Popen, word: str, timeout_s: float) -> None:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], timeout_s)
        answer = process.stdout.readline().strip() if readable else "nothing"
        assert answer == word, f"a process answered {answer!r} within {timeout_s:.0f} s"


def serve_jobs(run_job: Callable[[str], None]) -> None:
    """The main function of a rank's script: join the group, and run the job of each path."""
    rank, world_size, store_file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store_file}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    print("ready", flush=True)
    for line in sys.stdin:
        run_job(line.strip())
        print("done", flush=True)
    dist.destroy_process_group()
