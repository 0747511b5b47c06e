"""The four strategies against PyTorch's ``fully_shard``, and against one device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
from torch import Tensor

from runtime import FSDP, Collective, ShardingStrategy, create_collectives
from tests.parity import fsdp_process
from tests.parity.fsdp_process import NUM_STEPS, Case, batch_of, make_model, mean_loss
from tests.parity.test_sync_equals_ddp import assert_parity
from tests.support.pairs import diagonal
from tests.support.rank_processes import RankProcesses

TRAIN_S = 40.0

State = dict[str, Tensor]


def train_threads(case: Case, kind: str) -> list[State]:
    """The states of all ranks, one thread each, after every step."""
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


def train_fully_shard(processes: RankProcesses, case: Case) -> State:
    """PyTorch's ``fully_shard`` on the same batches of the same ranks."""
    job = {"case": asdict(case), "initial": make_model(case).state_dict()}
    return processes.train(case.world_size, job)


def assert_identical(states: list[State]) -> None:
    for state in states[1:]:
        assert all(state[name].equal(tensor) for name, tensor in states[0].items())


def assert_trained(case: Case, state: State) -> None:
    initial = make_model(case).state_dict()
    assert sum((state[k] - v).norm().item() for k, v in initial.items()) > 0.1


@diagonal(
    strategy=[s.name for s in ShardingStrategy],
    group=[(4, "float64", "gloo"), (2, "float64", "thread"), (4, "float32", "thread")],
)
def test_fsdp_equals_fully_shard(
    fsdp_processes: RankProcesses, strategy: str, group: tuple[int, str, str]
) -> None:
    world_size, dtype, kind = group
    case = Case(strategy=strategy, dtype=dtype, world_size=world_size)
    states = train_threads(case, kind)
    assert_trained(case, states[0])
    assert_identical(states)
    expected = train_fully_shard(fsdp_processes, case)
    assert_parity(case, states[0], expected)


@pytest.mark.parametrize("strategy", [s.name for s in ShardingStrategy])
def test_clipped_fsdp_equals_clipped_fully_shard(
    fsdp_processes: RankProcesses, strategy: str
) -> None:
    case = Case(strategy=strategy, dtype="float64", world_size=4, max_norm=0.3)
    states = train_threads(case, "thread")
    unclipped = train_threads(Case(strategy=strategy, dtype="float64", world_size=4), "thread")
    assert not states[0]["norm.weight"].equal(unclipped[0]["norm.weight"])
    assert_parity(case, states[0], train_fully_shard(fsdp_processes, case))
