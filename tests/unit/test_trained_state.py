"""TrainedState: its text, modules made from it, files, and the reason for the end of the run."""

from __future__ import annotations

import copy
import pickle
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from coordinator.messages import WorkerFailure
from runtime import TimeLimit, TrainedState, fit
from runtime.checkpoint import tensor_file
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    Counter,
    Gate,
    builder,
    count_up,
    counter,
    train,
)


class Net(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.first = nn.Linear(2, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def train_fn(model, batch):
    model.seen += 1
    return model(batch[0]).square().mean()


def run_net(**more):
    x = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
    return train(
        model=lambda device: Net().to(device),
        optim=lambda params: torch.optim.SGD(params, 0.1),
        train=train_fn,
        dataset=(x,),
        batch_size=8,
        way=(SYNC, THREAD),
        **more,
    )


def same(module, state):
    own = module.state_dict()
    return all(torch.equal(own[name], value) for name, value in state.state_dict().items())


def test_the_text_is_short_and_names_reason_epochs_loss_and_size():
    text = repr(run_net(epochs=2))
    assert text.startswith("TrainedState(finished, 2 epochs, avg_loss ")
    assert text.endswith("19 parameters in 6 tensors)")
    assert len(text) < 120


@pytest.mark.parametrize("factory", [None, Net, lambda: Net(), lambda device: Net()])
def test_a_model_is_made_with_the_trained_values(factory):
    state = run_net()
    model = state.model(factory)
    assert same(model, state)
    assert torch.equal(model.seen, state.buffers["seen"])
    assert model.seen[0] > 0
    assert model.training


def test_a_module_that_is_loaded_keeps_its_device_and_dtype():
    state, module = run_net(), Net().double()
    assert state.load_into(module) is module
    assert module.first.weight.dtype is torch.float64
    assert torch.equal(module.first.weight.float(), state.params["first.weight"])


def test_a_compiled_module_is_loaded_by_the_bare_names():
    state, module = run_net(), Net()
    module.first = torch.compile(module.first, backend="eager")
    state.load_into(module)
    assert torch.equal(module.last.weight, state.params["last.weight"])


def test_another_structure_is_refused_with_its_differences():
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.weight"):
        run_net().load_into(Net(width=4))


def test_a_module_and_a_factory_are_not_mixed_up():
    state = run_net()
    with pytest.raises(TypeError, match="load_into"):
        state.model(Net())
    with pytest.raises(TypeError, match="pass a module"):
        state.load_into(Net)
    with pytest.raises(TypeError, match=r"return a torch\.nn\.Module"):
        state.model(lambda device: None)


def test_copies_keep_the_factory_and_pickled_states_require_one():
    state = run_net()
    assert same(copy.deepcopy(state).model(), state)
    loaded = pickle.loads(pickle.dumps(state))
    assert same(loaded.model(Net), state)
    with pytest.raises(ValueError, match="model_factory="):
        loaded.model()


def test_fit_returns_a_state_that_makes_further_models():
    class Loss(Net):
        def forward(self, x):
            return super().forward(x).square().mean()

    x = torch.randn(16, 2)
    state = fit(Loss(), (x,), optimizer=torch.optim.SGD, batch_size=8, devices=["cpu"])
    assert same(state.model(), state)


def test_a_saved_file_has_the_state_dict(tmp_path):
    state = run_net()
    state.save(tmp_path / "net.safetensors")
    loaded = tensor_file.load_file(tmp_path / "net.safetensors")
    torch.testing.assert_close(loaded, dict(state.state_dict()), rtol=0, atol=0)


WAYS = [(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, OVER_CPU)]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0].name)
def test_the_reason_names_the_first_cause_of_the_end(way):
    def reason(change):
        gate = Gate(rank=0)
        b = builder(train=gate, epochs=3, way=way)
        handle = change(b, gate)
        return handle.join(WAIT_S).reason

    def finished(b, gate):
        gate.opened.set()
        return b.run()

    def stopped(b, gate):
        handle = b.run()
        gate.await_entry()
        handle.stop()
        handle.stop("another")
        gate.opened.set()
        return handle

    def own(b, gate):
        handle = b.run()
        gate.await_entry()
        handle.stop("enough")
        gate.opened.set()
        return handle

    assert reason(finished) == "finished"
    assert reason(stopped) == "stopped"
    assert reason(own) == "enough"


def test_a_time_limit_is_a_reason_of_its_own():
    ended = threading.Event()

    def slow(model, batch):
        ended.wait(0.01)
        return count_up(model, batch)

    state = builder(train=slow, epochs=10_000).callbacks(TimeLimit(0.1)).run().join(WAIT_S)
    assert (state.stopped, state.reason) == (True, "out_of_time")


def test_a_state_made_by_hand_has_no_factory():
    state = TrainedState(params={"w": torch.ones(1, dtype=torch.float64)}, buffers={}, _keys=("w",))
    with pytest.raises(ValueError, match="model_factory="):
        state.model()
    assert state.model(counter).w == 1
    assert isinstance(state.load_into(Counter()), Counter)


def test_the_text_counts_failed_workers():
    state = run_net()
    state = replace(state, failures=(WorkerFailure(rank=1, epoch=0, step=3, error=ValueError()),))
    assert "1 failed worker" in repr(state)


def test_a_factory_without_a_signature_receives_the_device():
    received = []

    class Factory:
        __signature__ = "none"

        def __call__(self, device):
            received.append(device)
            return Net().to(device)

    factory = Factory()
    state = train(
        model=factory,
        optim=lambda params: torch.optim.SGD(params, 0.1),
        train=train_fn,
        dataset=(torch.ones(8, 2),),
    )
    state.model()
    assert received == [torch.device("cpu")] * 3  # of two workers, and of the state
