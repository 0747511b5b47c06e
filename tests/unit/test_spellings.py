"""Unambiguous names of other libraries, and a module in place of a factory."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from runtime import ApplyPolicy, AverageBackend, Trainer, WorkerFailed
from runtime.trainer import _OTHER_LIBRARIES_NAMES
from tests.support.running import WAIT_S, Counter, builder


@pytest.mark.parametrize(("word", "policy"), [("sync", "SYNC"), ("ASYNC", "ASYNC")])
def test_a_policy_is_selected_by_name(word, policy):
    assert builder().policy(word)._settings.policy is ApplyPolicy[policy]


def test_the_default_policy_is_sync_with_equal_shares_on_devices_of_one_kind():
    handle = run_of(Counter()).run()
    handle.join(WAIT_S)
    coordinator = handle._run.config.coordinator
    assert (coordinator.policy, coordinator.balance) == (ApplyPolicy.SYNC, False)


@pytest.mark.parametrize("backend", list(AverageBackend))
def test_a_backend_is_selected_by_name(backend):
    assert builder().backend(backend.value)._settings.backend is backend


@pytest.mark.parametrize(
    ("word", "name"),
    [("bf16-mixed", "bf16"), ("16-mixed", "fp16"), (16, "fp16"), (32, "fp32"), ("no", "fp32")],
)
def test_names_of_precisions_in_lightning_and_accelerate_are_accepted(word, name):
    assert builder().precision(word)._settings.precision == name


@pytest.mark.parametrize("name", _OTHER_LIBRARIES_NAMES)
def test_the_name_of_a_setting_in_another_library_is_answered_with_this_librarys(name):
    own = _OTHER_LIBRARIES_NAMES[name]
    assert callable(getattr(builder(), own))
    with pytest.raises(AttributeError, match=f"{name!r}: did you mean {own}"):
        getattr(builder(), name)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("batchsize", "batch_size"),
        ("frobnicate", "docs/training.md"),
        ("lr", r"torch.optim.AdamW\(params, lr=...\)"),
        ("join", r"the handle that run\(\) returns has it: builder.run\(\).join"),
    ],
)
def test_a_misspelt_setting_is_answered_with_the_nearest_name(name, hint):
    with pytest.raises(AttributeError, match=hint):
        getattr(builder(), name)


def test_devices_accepts_one_device_and_a_number_of_devices(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert builder().devices("cpu")._settings.devices == (cpu,)
    assert builder().devices(3)._settings.devices == (cpu,) * 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    two = tuple(torch.device("cuda", i) for i in range(2))
    assert builder().devices(2)._settings.devices == two
    with pytest.raises(ValueError, match="there is no cuda:2; 2 CUDA devices are visible"):
        builder().devices(3)


def run_of(model):
    return (
        Trainer.builder(
            model,
            lambda params: torch.optim.SGD(params, 1.0),
            lambda model, batch: -model.w.sum(),
        )
        .dataset(torch.arange(20))
        .batch_size(2)
        .num_epochs(1)
        .devices(2)
        .progress(False)
    )


def test_a_module_is_copied_for_each_worker_and_receives_the_trained_weights():
    model, seen = Counter(), set()
    with torch.no_grad():
        model.w.fill_(5.0)
    lock = threading.Lock()

    def note(epoch, worker):
        with lock:
            seen.add((worker.rank, worker.model is model, float(worker.model.w.detach().sum())))

    state = run_of(model).epoch_fn(note).run().join(WAIT_S)
    assert seen == {(0, False, 5.0), (1, False, 5.0)}
    assert float(state.params["w"]) != 5.0
    assert torch.equal(model.w.detach(), state.params["w"])


def test_a_module_that_cannot_be_copied_is_named_with_a_remedy():
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def __deepcopy__(self, memo):
            raise RuntimeError("planted")

    with pytest.raises(WorkerFailed) as failed:
        run_of(Stubborn()).run().join(WAIT_S)
    assert "Stubborn cannot be copied" in str(failed.value.__cause__)
    assert "lambda device" in str(failed.value.__cause__)
