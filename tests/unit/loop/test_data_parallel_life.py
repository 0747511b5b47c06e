"""Construction and closing of a DataParallelCoordinator."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runtime import AverageBackend, DataParallelCoordinator
from runtime.core.threads import IntraOpThreads
from tests.support.parallel import adam, equal, identical, loss_fn, mlp, replicas, samples_of

WAIT_S = 60.0


# -- construction -----------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"devices": []}, ValueError, "devices is empty"),
        ({"devices": 2.0}, TypeError, "pass a list"),
        ({"devices": ["cpu", "tpu"]}, ValueError, "'tpu' is not a device"),
        ({"model": 3}, TypeError, "model_factory must be a function"),
        ({"optim": None}, TypeError, "optim_factory must be a function"),
        ({"loss": "mse"}, TypeError, "loss_fn must be a function"),
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm"),
        ({"backend": "auto"}, TypeError, "pass an AverageBackend"),
        ({"backend": AverageBackend.NCCL}, ValueError, "needs distinct CUDA devices"),
        ({"model": lambda d: "model"}, TypeError, "return a torch.nn.Module"),
        ({"optim": lambda p: "optimizer"}, TypeError, "return a torch.optim.Optimizer"),
        ({"optim": torch.optim.LBFGS}, ValueError, "needs a closure"),
        ({"model": lambda d: nn.LazyLinear(1)}, ValueError, "is lazy"),
        ({"model": nn.LazyLinear(1)}, ValueError, "LazyLinear: 'weight' is lazy"),
        ({"model": lambda d: nn.ReLU()}, ValueError, "no parameter requires a gradient"),
    ],
)
def test_wrong_arguments_are_named_and_leave_no_thread(change, error, match):
    before = threading.enumerate()
    given = {"model": mlp, "optim": adam, "loss": loss_fn, "devices": ["cpu"] * 2, **change}
    names = ("model", "optim", "loss", "devices")
    with pytest.raises(error, match=match):
        DataParallelCoordinator(
            *(given[n] for n in names), **{k: v for k, v in given.items() if k not in names}
        )
    assert [t for t in threading.enumerate() if t not in before] == []


def test_a_factorys_exception_is_raised():
    def factory(device):
        raise LookupError("planted")

    with pytest.raises(LookupError, match="planted"):
        replicas(3, model=factory)


def test_a_factory_is_called_once():
    built = []

    def random(device):
        built.append(nn.Linear(3, 3))
        return built[-1]

    with replicas(4, model=random) as coordinator:
        assert identical(coordinator)
        assert [coordinator.primary] == built


def test_a_module_is_copied_for_each_replica_and_not_changed():
    module = mlp("cpu")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with replicas(2, model=module) as coordinator, replicas(2) as made:
        assert all(model is not module for model in coordinator.models)
        for seed in range(3):
            coordinator.train_batch(samples_of(9, seed))
            made.train_batch(samples_of(9, seed))
        assert equal(coordinator.primary.state_dict(), made.primary.state_dict())
    assert equal(module.state_dict(), before)


# -- threads --------------------------------------------------------------------------------------


def own_threads():
    return [t for t in threading.enumerate() if t.name.startswith("data-parallel-")]


def test_the_cores_are_divided_among_replicas_and_restored():
    found = []

    def look(model, samples):
        found.append(torch.get_num_threads())
        return loss_fn(model, samples)

    before = torch.get_num_threads()
    with replicas(2, loss=look) as coordinator:
        coordinator.train_batch(samples_of(4))
        assert torch.get_num_threads() == max(1, before // 2)  # the share of a rank
    assert found == [max(1, IntraOpThreads.budget() // 2)] * 2
    assert torch.get_num_threads() == before  # in new threads too, as the fixture checks


def test_threads_end_with_the_last_reference_and_keep_no_model():
    coordinator = replicas(3)
    coordinator.train_batch(samples_of(6))
    threads = own_threads()
    assert len(threads) == 3
    model, gone = weakref.ref(coordinator.primary), weakref.ref(coordinator)
    del coordinator
    gc.collect()
    for thread in threads:
        thread.join(WAIT_S)
    assert own_threads() == []
    gc.collect()
    assert (gone(), model()) == (None, None)


def test_calls_on_a_closed_coordinator_raise_and_its_primary_stays_usable():
    coordinator = replicas(2)
    coordinator.train_batch(samples_of(4))
    coordinator.close()
    coordinator.close()
    for call in (lambda: coordinator.train_batch(samples_of(4)), coordinator.sync_params):
        with pytest.raises(RuntimeError, match="closed; build a new one"):
            call()
    assert coordinator.primary(samples_of(2)[0]).shape == (2, 3)
    assert copy.deepcopy(coordinator.primary) is not None


def test_loss_fn_may_return_the_loss_only():
    def loss(model, samples):
        return F.cross_entropy(model(samples["x"]), samples["y"])

    x, y = samples_of(8)
    with replicas(2, loss=loss) as coordinator:
        result = coordinator.train_batch({"x": x, "y": y})
    assert result.correct == 0
    assert result.total == 8
