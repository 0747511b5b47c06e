"""The four strategies against PyTorch's ``fully_shard``, and against one device."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from runtime import FSDP, Collective, ShardingStrategy, create_collectives
from tests.parity import fsdp_process
from tests.parity.fsdp_process import NUM_STEPS, Case, batch_of, make_model, mean_loss

START_S = 80.0
JOB_S = 30.0
TRAIN_S = 40.0

State = dict[str, Tensor]

pytestmark = pytest.mark.timeout(120)


class FsdpProcesses:
    """Gloo processes that answer one job after another, one group for each world size."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._groups: dict[int, list[subprocess.Popen[str]]] = {}
        self._job = count()

    def train(self, case: Case, initial: State) -> State:
        """The state after PyTorch has trained the same batches on the same ranks."""
        if case.world_size not in self._groups:
            self._start(case.world_size)
        group = self._groups[case.world_size]
        path = self._directory / f"job-{next(self._job)}"
        torch.save({"case": asdict(case), "initial": initial}, path)
        for process in group:
            assert process.stdin is not None
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
        for process in group:
            self._expect(process, "done", JOB_S)
        return torch.load(f"{path}.result")

    def close(self) -> None:
        processes = [process for group in self._groups.values() for process in group]
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate(timeout=10.0)

    def _start(self, world_size: int) -> None:
        store = self._directory / f"store-{world_size}"
        script = str(Path(fsdp_process.__file__))
        self._groups[world_size] = [
            subprocess.Popen(
                [sys.executable, script, str(rank), str(world_size), str(store)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
                text=True,
            )
            for rank in range(world_size)
        ]
        for process in self._groups[world_size]:
            self._expect(process, "ready", START_S)

    @staticmethod
    def _expect(process: subprocess.Popen[str], word: str, timeout_s: float) -> None:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], timeout_s)
        answer = process.stdout.readline().strip() if readable else "nothing"
        assert answer == word, f"an FSDP process said {answer!r} within {timeout_s:.0f} s"


@pytest.fixture(scope="module")
def fsdp_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpProcesses]:
    processes = FsdpProcesses(tmp_path_factory.mktemp("fsdp"))
    try:
        yield processes
    finally:
        processes.close()


def train_threads(case: Case, kind: str) -> list[State]:
    """The states of all ranks, each a thread, after every step of theirs."""
    strategy = ShardingStrategy[case.strategy]
    hybrid = strategy is ShardingStrategy.HYBRID_SHARD
    models = [make_model(case) for _ in range(case.world_size)]

    def train(end: Collective) -> State:
        try:
            fsdp = FSDP(models[end.rank], end, strategy, 2 if hybrid else None)
            optimizer = fsdp_process.make_optimizer(fsdp.parameters())
            for step in range(NUM_STEPS):
                optimizer.zero_grad()
                if step and strategy.frees_parameters and step % 2:
                    fsdp.prefetch_forward_params()
                mean_loss(fsdp, batch_of(step, end.rank)).backward()
                fsdp.sync_gradients()
                if case.max_norm:
                    fsdp.clip_grad_norm_(case.max_norm)
                optimizer.step()
                fsdp.broadcast_updated_params()
            return fsdp.full_state_dict()
        except BaseException:
            end.abort()
            raise

    ends = create_collectives(case.world_size, kind, timeout_s=20.0)
    try:
        with ThreadPoolExecutor(case.world_size) as pool:
            futures = [pool.submit(train, end) for end in ends]
            return [future.result(TRAIN_S) for future in futures]
    finally:
        for end in ends:
            end.close()


def train_one_device(case: Case) -> State:
    """A plain loop over the mean of the ranks' losses."""
    model = make_model(case)
    optimizer = fsdp_process.make_optimizer(model.parameters())
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        losses = [mean_loss(model, batch_of(step, rank)) for rank in range(case.world_size)]
        torch.stack(losses).mean().backward()
        if case.max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
    return model.state_dict()


def assert_parity(case: Case, actual: State, expected: State) -> None:
    """Within the tolerances: each tensor in float64, the whole vector in float32."""
    assert list(actual) == list(expected)
    if case.dtype == "float64":
        for name, tensor in expected.items():
            error = ((actual[name] - tensor).norm() / tensor.norm()).item()
            assert error < 1e-8, f"{name}: relative error {error:.1e}"
        return
    flat, wanted = (torch.cat([t.flatten() for t in s.values()]) for s in (actual, expected))
    error = ((flat - wanted).norm() / wanted.norm()).item()
    assert error < 1e-4, f"relative error {error:.1e}"


def assert_identical(states: list[State]) -> None:
    for state in states[1:]:
        assert all(state[name].equal(tensor) for name, tensor in states[0].items())


def assert_trained(case: Case, state: State) -> None:
    initial = make_model(case).state_dict()
    assert sum((state[k] - v).norm().item() for k, v in initial.items()) > 0.1


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float64", "thread"), ("float64", "gloo"), ("float32", "thread")]
)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", [s.name for s in ShardingStrategy])
def test_fsdp_equals_fully_shard(
    fsdp_processes: FsdpProcesses, strategy: str, world_size: int, dtype: str, kind: str
) -> None:
    case = Case(strategy=strategy, dtype=dtype, world_size=world_size)
    states = train_threads(case, kind)
    assert_trained(case, states[0])
    assert_identical(states)
    expected = fsdp_processes.train(case, make_model(case).state_dict())
    assert_parity(case, states[0], expected)


@pytest.mark.parametrize("strategy", [s.name for s in ShardingStrategy])
def test_clipped_fsdp_equals_clipped_fully_shard(
    fsdp_processes: FsdpProcesses, strategy: str
) -> None:
    case = Case(strategy=strategy, dtype="float64", world_size=4, max_norm=0.3)
    states = train_threads(case, "thread")
    unclipped = train_threads(Case(strategy=strategy, dtype="float64", world_size=4), "thread")
    assert not states[0]["norm.weight"].equal(unclipped[0]["norm.weight"])
    assert_parity(case, states[0], fsdp_processes.train(case, make_model(case).state_dict()))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    "strategy", [s.name for s in ShardingStrategy if s.value != "hybrid_shard"]
)
def test_fsdp_equals_one_device(strategy: str, world_size: int) -> None:
    case = Case(strategy=strategy, dtype="float64", world_size=world_size)
    states = train_threads(case, "thread")
    assert_identical(states)
    assert_parity(case, states[0], train_one_device(case))
