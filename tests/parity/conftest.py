"""Shared fixtures of the parity tests: PyTorch's systems in real processes, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parity import ddp_process, fsdp_process
from tests.support import programs
from tests.support.rank_processes import RankProcesses


def _processes(module, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    processes = RankProcesses(module.__file__, tmp_path_factory.mktemp("processes"))
    try:
        yield processes
    finally:
        processes.close()


@pytest.fixture(scope="session")
def ddp_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    """``DistributedDataParallel``; see ``ddp_process.py`` for its jobs."""
    yield from _processes(ddp_process, tmp_path_factory)


@pytest.fixture(scope="module")
def fsdp_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    """``fully_shard``; see ``fsdp_process.py`` for its jobs."""
    programs.preload("torch.distributed.fsdp")
    yield from _processes(fsdp_process, tmp_path_factory)
