"""The step waits for no device: it reads no tensor values."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from runtime import record_scalar
from runtime.replica.stepper import AccumulationWindow, Stepper
from tests.deadlock.faults import BOUND_S
from tests.support.running import ASYNC, CADENCE, OVER_CPU, THREAD, builder, over

READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__")


class Reads:
    """Records every read of a tensor's value within a step."""

    def __init__(self, monkeypatch):
        self.found, self.num_steps = [], 0
        self._local = threading.local()
        self._lock = threading.Lock()
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, self._noting(name, getattr(torch.Tensor, name)))
        open_window, finish = Stepper.window, AccumulationWindow.finish

        def opened(stepper, *args, **kwargs):
            self._local.inside = True
            return open_window(stepper, *args, **kwargs)

        def finished(window, *args, **kwargs):
            try:
                return finish(window, *args, **kwargs)
            finally:
                self._local.inside = False
                with self._lock:
                    self.num_steps += 1

        monkeypatch.setattr(Stepper, "window", opened)
        monkeypatch.setattr(AccumulationWindow, "finish", finished)

    def _noting(self, name, read):
        def noting(tensor, *args, **kwargs):
            if getattr(self._local, "inside", False):
                with self._lock:
                    self.found.append(name)
            return read(tensor, *args, **kwargs)

        return noting


class Net(nn.Module):
    """A model with a buffer, whose loss is not a plain sum."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 2)


def train(model, batch):
    loss = model.linear(model.norm(batch[0])).square().mean()
    record_scalar("loss", loss)
    return loss


@pytest.mark.parametrize("ranks", [1, 2])
@over([(CADENCE, OVER_CPU), (ASYNC, THREAD)])
def test_a_step_reads_no_value_of_a_tensor(way, ranks, monkeypatch):
    """S22: neither a loss nor a norm; recorded values arrive later."""
    reads = Reads(monkeypatch)
    b = builder(
        model=lambda device: Net(),
        optim=lambda params: torch.optim.SGD(params, 0.01, momentum=0.9),
        train=train,
        dataset=(torch.randn(128, 3),),
        batch_size=4,
        ranks=ranks,
        way=way,
    )
    state = b.run().join(BOUND_S)
    assert reads.num_steps == 32
    assert reads.found == []
    assert state.metrics[0].scalars["loss"] == pytest.approx(state.metrics[0].avg_loss)


def test_a_loss_read_in_the_step_is_detected(monkeypatch):
    """S22: the planted fault, which the test above would find."""
    reads = Reads(monkeypatch)

    def eager(model, batch):
        loss = -model.w.sum()
        assert loss.item() <= 0
        return loss

    builder(train=eager, ranks=1).run().join(BOUND_S)
    assert reads.found == ["item"] * 10
