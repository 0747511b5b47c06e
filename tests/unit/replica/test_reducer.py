"""Gradient reduction: the flags of used parameters over many steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from runtime.collective import create_collectives
from runtime.replica.flat import FlatParams
from runtime.replica.reducer import GradientReducer


class TwoNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Parameter(torch.zeros(1))
        self.only_rank_0 = nn.Parameter(torch.zeros(1))


def test_a_parameter_that_one_rank_never_uses_stays_used_on_every_rank_for_many_steps():
    models = [TwoNumbers() for _ in range(2)]
    ends = create_collectives(2, timeout_s=10)
    reducers = [GradientReducer(FlatParams(x), e) for x, e in zip(models, ends, strict=True)]

    def steps(rank):
        model = models[rank]
        for _ in range(400):  # a flag halved 150 times is 0 in float32
            model.shared.grad = torch.ones(1)
            model.only_rank_0.grad = torch.ones(1) if rank == 0 else None
            reducers[rank].pack(1)
            assert reducers[rank].exchange(1)
            reducers[rank].unpack()
            if model.only_rank_0.grad is None:
                return False
        return float(model.only_rank_0.grad) == 0.5

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(steps, rank) for rank in range(2)]
        found = []
        for rank, future in enumerate(done):
            found.append(future.result(30))
            if not found[-1]:
                ends[rank].abort()
    for end in ends:
        end.close()
    assert found == [True, True]
