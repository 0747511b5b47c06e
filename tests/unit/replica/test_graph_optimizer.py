"""PyTorch's optimizers in captured steps, with a changing learning rate."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from torch import nn

from runtime.replica.capturable import CapturableOptimizer
from tests.support.tape import Tape

CPU = torch.device("cpu")
NAMES = ("Adadelta", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


@pytest.fixture(autouse=True)
def capturable_on_cpu(monkeypatch):
    """Allow ``capturable`` optimizers on a CPU, which PyTorch restricts to accelerators."""
    for name in ("adadelta", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop"):
        module = importlib.import_module(f"torch.optim.{name}")
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])


def params():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(2)]


def step_both(optimizers, make_step):
    """Eight steps with a falling rate, eager on one side, on the other captured from the fourth."""
    (plain, eager), (captured, capturable, wrapped) = optimizers
    generator, tape = torch.Generator().manual_seed(1), None
    for p in (*plain, *captured):
        p.grad = torch.zeros(4, 3)
    for i in range(8):
        for a, b in zip(plain, captured, strict=True):
            a.grad.copy_(torch.randn(4, 3, generator=generator))
            b.grad.copy_(a.grad)
        for optimizer in (eager, capturable):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (i + 1)
        eager.step()
        wrapped.refresh()
        if i < 3:
            make_step()
            continue
        if tape is None:
            tape = Tape()
            with tape:
                make_step()
        tape.replay()


def pair(name, **settings):
    make = getattr(torch.optim, name)
    extra = {"capturable": True} if "capturable" in inspect.signature(make).parameters else {}
    plain, captured = params(), params()
    eager = make(plain, 0.01, **settings, **extra)
    capturable = make(captured, 0.01, **settings)
    return (plain, eager), (captured, capturable, CapturableOptimizer(capturable, CPU))


CAPTURED = [
    *((name, {"foreach": True}) for name in NAMES),
    *((name, {"fused": True}) for name in ("Adam", "AdamW", "Adagrad", "SGD")),
]


@pytest.mark.parametrize(("name", "settings"), CAPTURED, ids=str)
def test_a_captured_optimizer_follows_a_moving_learning_rate(name, settings):
    optimizers = pair(name, **settings)
    (plain, _), (captured, capturable, wrapped) = optimizers

    def step():
        with torch.no_grad(), wrapped.rates():
            capturable.step()

    step_both(optimizers, step)
    for a, b in zip(plain, captured, strict=True):
        torch.testing.assert_close(a, b)
    assert isinstance(capturable.param_groups[0]["lr"], float)


@pytest.mark.parametrize("name", ["Adagrad", "Adafactor"])
def test_an_optimizer_that_reads_its_state_cannot_be_captured(name):
    _, (captured, capturable, wrapped) = pair(name)
    for p in captured:
        p.grad = torch.ones(4, 3)
    refused = pytest.raises(RuntimeError, match="not permitted when stream is capturing")
    with refused, Tape(), torch.no_grad(), wrapped.rates():
        capturable.step()


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [({"capturable": True}, torch.float64), ({"fused": True}, torch.float32)],
    ids=["capturable", "fused"],
)
def test_a_rate_tensor_has_the_precision_of_the_kernels(settings, dtype):
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.AdamW([p], 0.01, **settings)
    wrapped = CapturableOptimizer(optimizer, CPU)
    wrapped.refresh()
    with wrapped.rates():
        assert optimizer.param_groups[0]["lr"].dtype == dtype


def test_the_settings_of_a_plain_sgd_contain_its_rate():
    _, (_, capturable, wrapped) = pair("SGD")
    before = wrapped.settings()
    with wrapped.rates():
        assert capturable.param_groups[0]["lr"] == 0.01
    capturable.param_groups[0]["lr"] = 0.02
    assert wrapped.settings() != before
    assert wrapped.changed_settings(before) == "lr"


def test_settings_do_not_contain_a_rate_in_a_tensor():
    _, (_, capturable, wrapped) = pair("AdamW")
    before = wrapped.settings()
    capturable.param_groups[0]["lr"] = 0.02
    assert wrapped.settings() == before
    capturable.param_groups[0]["betas"] = (0.8, 0.9)
    assert wrapped.changed_settings(before) == "betas"


def test_a_rate_tensor_of_the_user_is_kept():
    rate = torch.tensor(0.01)
    optimizer = torch.optim.AdamW(params(), rate, capturable=True)
    wrapped = CapturableOptimizer(optimizer, CPU)
    wrapped.refresh()
    with wrapped.rates():
        assert optimizer.param_groups[0]["lr"] is rate
    assert optimizer.param_groups[0]["lr"] is rate
