"""Optimizers with ``train()`` and ``eval()`` modes, as schedule-free ones."""

from __future__ import annotations

import pytest
import torch

from runtime import KeepBest, WorkerFailed
from runtime.checkpoint.tensor_file import load_file
from tests.support.running import ASYNC, CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, builder

CASES = [(SYNC, THREAD, 2), (SYNC, THREAD, 1), (CADENCE, OVER_CPU, 1), (ASYNC, OVER_CPU, 1)]


class Averaging(torch.optim.Optimizer):
    """Trains at ``y``, evaluates at ``y + 0.3 (z - y)``; ``z`` is part of its state."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})
        self.trains = False  # not in its state dict

    def _move(self, weight, trains):
        if self.trains is not trains:
            for p in self.param_groups[0]["params"]:
                if "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], weight)
            self.trains = trains

    def eval(self):
        self._move(0.3, False)

    def train(self):
        self._move(1 - 1 / 0.7, True)

    @torch.no_grad()
    def step(self, closure=None):
        assert self.trains, "not in train mode"
        for group in self.param_groups:
            for p in group["params"]:
                z = self.state[p].setdefault("z", torch.ones_like(p))
                z.sub_(p.grad, alpha=group["lr"])
                p.sub_(p.grad, alpha=group["lr"] / 2)


def run(directory, epochs=2, *, resumes=False, case=(SYNC, THREAD, 2), evaluates=True):
    seen = []
    keep = KeepBest(directory / "best.safetensors", "eval/score")

    def evaluate(model, epoch):
        seen.append(model.w.detach().clone())
        return {"score": float(-epoch)}

    b = builder(way=case[:2], epochs=epochs, ranks=case[2], optim=Averaging)
    b = b.checkpoint_dir(directory / "run")
    if evaluates:
        b = b.eval_fn(evaluate).callbacks(keep)
    if resumes:
        b = b.resume(directory / "run")
    return b.run().join(WAIT_S), seen, keep


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].name}-{c[2]}")
def test_evaluation_results_and_best_weights_are_those_of_the_eval_point(tmp_path, case):
    state, seen, keep = run(tmp_path, case=case)
    assert torch.equal(state.params["w"], seen[-1])
    assert torch.equal(load_file(keep.path)["w"], seen[-1])
    newest = sorted((tmp_path / "run").glob("*/weights.safetensors"))[-1]
    assert torch.equal(load_file(newest)["w"], seen[-1])


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].name}-{c[2]}")
def test_training_depends_neither_on_evaluation_nor_on_a_resume(tmp_path, case):
    whole = run(tmp_path / "a", 4, case=case)[0].params["w"]
    bare = run(tmp_path / "b", 4, case=case, evaluates=False)[0].params["w"]
    run(tmp_path / "c", 2, case=case)
    resumed = run(tmp_path / "c", 4, case=case, resumes=True)[0].params["w"]
    assert torch.equal(whole, bare)
    assert torch.equal(whole, resumed)


@pytest.mark.parametrize("policy", [CADENCE, ASYNC])
def test_replicas_that_average_weights_refuse_an_optimizer_with_modes(policy):
    with pytest.raises((WorkerFailed, ValueError), match=r"has train\(\) and eval\(\) modes"):
        builder(way=(policy, OVER_CPU), optim=Averaging).run().join(WAIT_S)
