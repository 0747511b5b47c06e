"""Evaluation between the steps of FSDP."""

from __future__ import annotations

import pytest
import torch

from tests.support.fsdp_ranks import FREEING, STRATEGIES, batch, loss_of, on_ranks, share, wrap


@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_evaluation_in_inference_mode_equals_evaluation_without_gradients(strategy, prefetches):
    x, _ = batch(4)

    def work(end):
        fsdp = wrap(end, strategy)
        optimizer = torch.optim.AdamW(fsdp.parameters(), lr=0.05)
        for seed in range(2):
            with torch.inference_mode():
                if prefetches and strategy in FREEING:
                    fsdp.prefetch_forward_params()
                logits = fsdp(x)
            with torch.no_grad():
                assert logits.equal(fsdp(x))
            optimizer.zero_grad()
            loss_of(fsdp, share(batch(8, seed), end)).backward()
            fsdp.sync_gradients()
            optimizer.step()

    on_ranks(2, work)
