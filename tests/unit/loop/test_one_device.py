"""One device raises the same errors about accumulated batches as several devices."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runtime import Trainer
from runtime.loop.loop_engine import LOCAL_GRADIENTS, MIXED_GRADIENTS
from tests.support.own_loop import (
    OneDevice,
    assert_close,
    assert_identical,
    gradients,
    loss_fn,
    make_batch,
    make_net,
    mean_step,
    on_cpus,
    sgd,
    train_both,
    train_step,
)

one_or_two = pytest.mark.parametrize("num_devices", [1, 2])


@one_or_two
def test_backward_after_batches_that_were_accumulated_is_refused(num_devices):
    net = make_net()
    alone = OneDevice(net)
    x, y = make_batch(4)
    batches = [make_batch(4), make_batch(4)]
    with on_cpus(net, num_devices) as model:
        model.accumulate(loss_fn, batches)
        before = gradients(net)
        with pytest.raises(RuntimeError) as error:
            F.cross_entropy(model(x), y).backward()
        assert str(error.value) == MIXED_GRADIENTS
        with pytest.raises(RuntimeError) as error:
            model.clip_grad_norm_(1.0)
        assert str(error.value) == LOCAL_GRADIENTS
        assert all(torch.equal(a, b) for a, b in zip(before, gradients(net), strict=True))
        model.step()  # on accumulated gradients only
        mean_step(alone, batches)
        assert_close(model, alone.model)
        train_both(model, alone, [4])


@one_or_two
@pytest.mark.parametrize("through", ["the model", "the first replica"])
def test_batches_after_a_backward_cannot_be_accumulated(num_devices, through):
    with on_cpus(make_net(), num_devices) as model:
        x, y = make_batch(4)
        used = model if through == "the model" else model.module
        F.cross_entropy(used(x), y).backward()
        with pytest.raises(RuntimeError) as error:
            model.accumulate(loss_fn, [make_batch(4)])
        assert str(error.value) == MIXED_GRADIENTS
        model.zero_grad()
        model.accumulate(loss_fn, [make_batch(4)])
        model.zero_grad()
        train_step(model, x, y)
        assert_identical(model)


@one_or_two
def test_accumulating_no_batches_allows_either_kind_of_step(num_devices):
    with on_cpus(make_net(), num_devices) as model:
        model.accumulate(loss_fn, [])
        train_step(model, *make_batch(4))
        assert_identical(model)


def test_autograd_grad_of_parameters_works_on_one_device():
    net = make_net()
    x, y = make_batch(4)
    with on_cpus(net, 1) as model:
        model.accumulate(loss_fn, [(x, y)])
        found = torch.autograd.grad(F.cross_entropy(model(x), y), list(net.parameters()))
        assert_close(found, gradients(net))


@one_or_two
def test_a_failure_clears_accumulated_gradients(num_devices):
    calls = Counter()

    def failing(module, batch):
        thread = threading.current_thread().name
        calls[thread] += 1
        if calls[thread] == 2 and not thread.endswith("-0"):
            raise ZeroDivisionError("bad batch")
        return loss_fn(module, batch)

    where = "rank 1 on cpu failed in accumulate" if num_devices == 2 else "bad batch"
    with on_cpus(make_net(), num_devices) as model:
        with pytest.raises(ZeroDivisionError, match=where):
            model.accumulate(failing, [make_batch(4)] * 4)
        assert all(p.grad is None for r in model.replicas for p in r.parameters())
        train_step(model, *make_batch(4))
        assert_identical(model)


class Exact(nn.Module):
    """Multiplies in full precision under any autocast of the caller."""

    def __init__(self, weight):
        super().__init__()
        self.w = nn.Parameter(weight.clone())

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return x @ self.w


@one_or_two
def test_backward_of_accumulated_batches_runs_outside_autocast(num_devices):
    net = Exact(torch.randn(8, 8))
    x = torch.randn(6, 8)
    expected = torch.autograd.grad(net(x).square().mean(), net.w)[0]
    with on_cpus(net, num_devices) as model:
        with torch.autocast("cpu", torch.bfloat16):
            model.accumulate(lambda m, b: m(b).square().mean(), [x] * num_devices)
        model.optimizer.param_groups[0]["lr"] = 1.0
        before = net.w.detach().clone()
        model.step()
        assert_close([before - net.w], [expected], 1e-5)


def test_a_model_with_accumulated_batches_on_one_device_is_freed():
    net = make_net()
    model = Trainer.setup(net, sgd, ["cpu"])
    model.accumulate(loss_fn, [make_batch(4)])
    engine, gone = weakref.ref(model._engine), weakref.ref(net)
    del model, net
    gc.collect()
    assert (engine(), gone()) == (None, None)


def test_every_copy_to_the_cpu_is_waited_for(monkeypatch):
    """A non-blocking copy from a GPU may be incomplete when the host reads it."""
    wrong, to = [], torch.Tensor.to

    def recorded_to(tensor, device, *args, **kwargs):
        if torch.device(device).type == "cpu" and kwargs.get("non_blocking"):
            wrong.append(tensor.shape)
        return to(tensor, device, *args, **kwargs)

    with on_cpus(make_net(), 2) as model:
        monkeypatch.setattr(torch.Tensor, "to", recorded_to)
        x, y = make_batch(4)
        train_step(model, x.requires_grad_(), y)
        model.accumulate(loss_fn, [make_batch(4)] * 2)
        model.step()
        monkeypatch.undo()
    assert wrong == []
