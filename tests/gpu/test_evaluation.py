"""Prediction, validation and moving averages on GPUs: the results of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime import Trainer, predict
from runtime.replica.flat import FlatParams
from runtime.replica.param_ema import ParamEma
from tests.gpu.delays import GPU
from tests.gpu.no_sync import no_sync
from tests.gpu.runs import WAIT_S

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

DEVICES = [[GPU], [GPU, GPU], [GPU, "cpu"]]
devices = pytest.mark.parametrize("devices", DEVICES, ids=["one", "shared", "mixed"])
X = torch.randn(600, 16, generator=torch.Generator().manual_seed(0))
Y = X[:, :4].argmax(1)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]


def net(device="cpu"):
    torch.manual_seed(0)
    # A bias in front of batch norm has a gradient of rounding errors, which Adam would scale up.
    return nn.Sequential(
        nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
    ).to(device)


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def run(devices, policy="sync"):
    return (
        Trainer.builder(net, lambda params: torch.optim.AdamW(params, 3e-3), loss_of)
        .dataset((X, Y))
        .batch_size(50)
        .num_epochs(2)
        .devices(devices)
        .policy(policy)
    )


def plain_loss(state):
    model = state.model(lambda device: net(device)).eval()
    with torch.no_grad():
        return loss_of(model, (X, Y)).item()


@devices
@pytest.mark.parametrize("data", [(X, Y), Samples()], ids=["tensors", "samples"])
def test_outputs_are_those_of_the_cpu(devices, data):
    model = net()
    expected = model.eval()(X).detach()
    torch.testing.assert_close(
        predict(model, data, devices=devices), expected, rtol=1e-3, atol=1e-4
    )


def test_a_batch_for_which_a_gpu_has_no_memory_is_halved():
    def fn(model, batch):
        if len(batch[0]) > 40:
            torch.empty(2**46, dtype=torch.uint8, device=batch[0].device)
        return batch[0]

    assert torch.equal(predict(nn.Identity(), (X,), fn, [GPU], batch_size=300), X)


@devices
@pytest.mark.parametrize("policy", ["sync", "cadence"])
@pytest.mark.parametrize("data", [(X, Y), Samples()], ids=["tensors", "samples"])
def test_a_validation_has_the_loss_of_the_averaged_weights(devices, policy, data):
    b = run(devices, policy).val_dataset(data, every_steps=7)
    state = b.run().join(WAIT_S)
    # The final state of CADENCE may contain later training of one rank.
    tolerance = 1e-3 if policy == "sync" or len(devices) == 1 else 0.2
    assert state.metrics[-1].scalars["val/loss"] == pytest.approx(plain_loss(state), tolerance)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_moving_average_is_that_of_the_cpu(graphs):
    expected = run(["cpu"]).ema(0.9).run().join(WAIT_S).ema_state_dict()
    b = run([GPU]).ema(0.9).cuda_graphs(graphs)
    found = b.run().join(WAIT_S).ema_state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.02, atol=5e-3)


def test_an_update_of_a_moving_average_waits_for_no_device():
    params = FlatParams(net(GPU))
    ema = ParamEma(0.9, params)
    skip_flag = torch.zeros(1, device=GPU)
    with no_sync():
        ema.step()
        ema.step(None, skip_flag)
        ema.move(params.flats, 3.0, undoable=True)
