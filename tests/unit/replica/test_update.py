"""The parts of an update of parameters: clipping, and the scale of fp16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime.replica.max_norm import MaxNorm
from runtime.replica.precision import Precision

CPU = torch.device("cpu")


@pytest.mark.parametrize("limit", [0.1, 100.0, None])
@pytest.mark.parametrize("knows_norm", [False, True])
def test_gradients_of_no_parameter_are_clipped_as_those_of_parameters(limit, knows_norm):
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    grads = [torch.tensor([1.0, -2.0, 3.0]), torch.tensor([4.0, 0.0])]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
    MaxNorm(limit).clip(params)
    norm = float(nn.utils.get_total_norm(grads)) if knows_norm else None
    MaxNorm(limit).clip_grads(grads, norm)
    for p, grad in zip(params, grads, strict=True):
        torch.testing.assert_close(p.grad, grad)
    if limit == 0.1:
        assert float(nn.utils.get_total_norm(grads)) == pytest.approx(0.1, rel=1e-4)
    else:
        assert grads[0].tolist() == [1.0, -2.0, 3.0]


def test_a_checkpoint_holds_the_scale_of_fp16_alone():
    p = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([p], 1.0)
    trained, other = Precision("fp16", CPU), Precision("fp16", CPU)
    p.grad = torch.tensor(torch.inf)
    trained.unscale(optimizer)
    skipped = trained.step(optimizer)
    assert float(skipped) == 1.0
    assert trained.state_dict()["scale"] == other.state_dict()["scale"] / 2
    other.load_state_dict(trained.state_dict())
    assert other.state_dict() == trained.state_dict()
    plain = Precision("bf16", CPU)
    plain.load_state_dict(trained.state_dict())
    other.load_state_dict(plain.state_dict())
    assert plain.state_dict() is None
    assert other.state_dict() == trained.state_dict()
