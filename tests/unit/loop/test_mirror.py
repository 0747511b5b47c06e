"""The caller's changes of the model and its optimizer reach every replica."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from runtime import DataParallelCoordinator, DdpConfig
from runtime.loop.scatter import to_replica
from tests.support.own_loop import (
    NUM_FEATURES,
    Centred,
    OneDevice,
    adamw,
    assert_close,
    assert_identical,
    exchanging_gradients,
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


# -- buffers -----------------------------------------------------------------------------------


class Shifted(nn.Module):
    """A net whose output depends on a buffer in every mode."""

    def __init__(self):
        super().__init__()
        self.net = make_net()
        self.register_buffer("shift", torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        return self.net(x) + self.shift


def in_place(net):
    net.shift.fill_(2.0)


def replaced(net):
    net.shift = torch.full((3,), 2.0, dtype=torch.float64)


def loaded(net):
    net.load_state_dict({"shift": torch.full((3,), 2.0, dtype=torch.float64)}, strict=False)


@pytest.mark.parametrize("change", [in_place, replaced, loaded])
@pytest.mark.parametrize("training", [True, False])
def test_a_buffer_changed_by_the_caller_reaches_the_replicas_before_they_compute(change, training):
    net = Shifted()
    x, y = make_batch(6)
    with on_cpus(net, 3) as model:
        train_step(model, x, y)
        model.train(training)
        model(x)
        change(net)
        assert_close([model(x)], [net(x)])
        assert_identical(model)
        change(net)
        train_step(model, x, y)
        assert_identical(model)


def test_a_buffer_changed_between_forward_and_backward_reaches_the_replicas():
    net = Shifted().eval()
    x, y = make_batch(6)
    with on_cpus(net, 2) as model:
        model.eval()
        loss = F.cross_entropy(model(x), y)
        in_place(net)
        loss.backward()
        assert_close([model(x)], [net(x)])


def test_statistics_come_from_the_first_device_if_a_submodule_enters_eval_mode():
    net = nn.Sequential(nn.Linear(NUM_FEATURES, 4), nn.BatchNorm1d(4)).double()
    with on_cpus(net, 2) as model:
        x, _ = make_batch(12)
        model(x)
        net[1].eval()
        assert_close([model(x)], [net(x)])


def test_a_buffer_may_be_replaced_by_one_of_another_shape():
    net = Shifted()
    x, _ = make_batch(6)
    with on_cpus(net, 2) as model:
        model(x)
        net.shift = torch.ones(1, dtype=torch.float64)
        assert_close([model(x)], [net(x)])


class Keeping(nn.Module):
    """Replaces a buffer in forward, as a cache does."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x):
        self.last = self.last + 1
        return x * self.w + self.last


@pytest.mark.parametrize("how", ["directly", "copies"])
def test_buffers_made_in_inference_mode_can_be_trained_on(how):
    net = Keeping()
    with exchanging_gradients(how), on_cpus(net, 2) as model:
        with torch.inference_mode():
            model(torch.ones(4, 3))
        model.step()
        assert_identical(model)
        with torch.no_grad():
            net.w.fill_(2.0)
        model(torch.ones(4, 3)).sum().backward()
        model.step()
        assert_identical(model)


# -- attributes and submodules -------------------------------------------------------------------


@one_or_two
def test_each_replica_has_its_own_copy_of_a_tensor_attribute(num_devices):
    with on_cpus(Shifted(), num_devices) as model:
        mask, table = torch.ones(3), {"a": [torch.zeros(2), 1]}
        model.mask, model.table = mask, table
        assert model.mask is mask
        assert model.module.table is table
        for replica in model.replicas[1:]:
            assert torch.equal(replica.mask, mask)
            assert replica.mask.data_ptr() != mask.data_ptr()
            assert torch.equal(replica.table["a"][0], torch.zeros(2))
            assert replica.table["a"][0] is not table["a"][0]
            assert replica.table["a"][1] == 1
        x, y = make_batch(6)
        model.shift = torch.full((3,), 3.0, dtype=torch.float64)
        assert_close([model(x)], [model.module(x)])
        train_step(model, x, y)
        assert_identical(model)


def test_a_tensor_set_as_an_attribute_is_moved_to_the_device():
    assert to_replica(torch.ones(2), torch.device("meta")).is_meta
    moved = to_replica([{"a": (torch.ones(2), None)}], torch.device("meta"))
    assert moved[0]["a"][0].is_meta


@one_or_two
def test_a_tensor_with_a_gradient_cannot_be_an_attribute(num_devices):
    with on_cpus(Shifted(), num_devices) as model:
        with pytest.raises(ValueError, match="requires a gradient"):
            model.prompt = [torch.ones(3, requires_grad=True)]
        assert not hasattr(model.module, "prompt")


@one_or_two
def test_a_models_own_attribute_with_an_underscore_reaches_all_replicas(num_devices):
    class Private(Shifted):
        _factor = 1.0

        def forward(self, x):
            return super().forward(x) * self._factor

    net = Private()
    with on_cpus(net, num_devices) as model:
        model._factor = 3.0
        model._note = "new"
        for replica in model.replicas:
            assert (replica._factor, replica._note) == (3.0, "new")
        assert net._note == "new"


@one_or_two
def test_a_buffer_registered_during_training_is_in_all_replicas(num_devices):
    net = make_net()
    with on_cpus(net, num_devices) as model:
        model.register_buffer("seen", torch.zeros(2))
        model.register_buffer("scratch", torch.zeros(1), persistent=False)
        assert [r.seen.tolist() for r in model.replicas] == [[0.0, 0.0]] * num_devices
        assert "seen" in model.state_dict()
        assert "scratch" not in model.state_dict()
        assert len({r.seen.data_ptr() for r in model.replicas}) == num_devices
        net.seen.fill_(4.0)
        train_step(model, *make_batch(5))
        assert_identical(model)
        with pytest.raises(KeyError, match="already exists"):
            model.register_buffer("0", torch.zeros(2))


def test_a_buffer_may_change_its_shape_if_set_on_all_replicas():
    with on_cpus(Shifted(), 2) as model:
        for size in (3, 1, 3):
            model.shift = torch.ones(size, dtype=torch.float64)
            train_step(model, *make_batch(5))
            assert_identical(model)


# -- the optimizer's groups --------------------------------------------------------------------


def head_params(params):
    return torch.optim.AdamW(list(params)[-2:], 1e-2)


@pytest.mark.parametrize("num_devices", [1, 3])
def test_a_parameter_group_added_during_training_is_trained_by_all_replicas(num_devices):
    net = make_net()
    alone = OneDevice(net, head_params)
    with on_cpus(net, num_devices, head_params) as model:
        for step in range(4):
            if step == 1:
                for loop in (model.optimizer, net), (alone.optimizer, alone.model):
                    loop[0].add_param_group({"params": [*loop[1][0].parameters()], "lr": 0.05})
            x, y = make_batch(7)
            train_step(model, x, y)
            train_step(alone, x, y)
            alone.model.zero_grad()  # parameters that its optimizer does not hold yet
            assert_identical(model)
            assert_close(model, alone.model)
        assert [len(o.param_groups) for o in model.optimizers] == [2] * num_devices
        model.load_optimizer_state_dict(model.optimizer_state_dict())
        model.optimizer.param_groups.pop()
        train_step(model, *make_batch(7))
        assert [len(o.param_groups) for o in model.optimizers] == [1] * num_devices
        assert all(
            torch.equal(a, b)
            for r in model.replicas
            for a, b in zip(net.parameters(), r.parameters(), strict=True)
        )


@one_or_two
def test_a_scale_applies_to_an_added_group_and_a_scheduler_continues_without_it(num_devices):
    net = make_net()

    def optim(params):
        return torch.optim.SGD(list(params)[-2:], 0.1)

    with on_cpus(net, num_devices, optim) as model:
        model.set_lr_scale(0.5)
        model.optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 1.0})
        train_step(model, *make_batch(4))
        assert [g["lr"] for g in model.optimizer.param_groups] == pytest.approx([0.05, 0.5])
        model.set_scheduler(lambda o: StepLR(o, step_size=1, gamma=0.1))
        assert [g["lr"] for g in model.optimizer.param_groups] == pytest.approx([0.05, 0.5])
        model.optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 1.0})
        train_step(model, *make_batch(4))
        rates = [g["lr"] for g in model.optimizer.param_groups]
        assert rates == pytest.approx([0.005, 0.05, 1.0])
        assert_identical(model)


# -- gradients, optimizers and frozen parameters ---------------------------------


@one_or_two
def test_gradients_zeroed_by_the_optimizer_are_not_restored(num_devices):
    net, batches = make_net(), [make_batch(4) for _ in range(4)]

    with on_cpus(net, num_devices) as model:
        alone = OneDevice(model.module)
        for order in (batches, batches[2:]):
            model.accumulate(loss_fn, order[:2])
            model.optimizer.zero_grad()
            if order is batches:
                model.accumulate(loss_fn, order[2:])
                mean_step(alone, order[2:])
            model.step()
            assert_close(model, alone.model)
        model.accumulate(loss_fn, batches[:2])
        model.optimizer.zero_grad()
        train_both(model, alone, [4])  # not mixed: no accumulated gradients are left


def test_a_cleared_optimizer_state_is_cleared_on_all_replicas():
    with on_cpus(make_net(), 3, adamw) as model:
        train_step(model, *make_batch(6))
        model.optimizer.state.clear()
        train_step(model, *make_batch(6))
        assert_identical(model)


class Counting(nn.Module):
    """Writes to a buffer in every mode."""

    def __init__(self):
        super().__init__()
        self.net = make_net()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.seen += x.detach().sum()
        return self.net(x)


def test_buffers_written_in_eval_mode_equal_rank_zeros_after_a_step():
    with on_cpus(Counting(), 3) as model:
        model.eval()
        for _ in range(2):
            train_step(model, *make_batch(6))
            assert_identical(model)


# -- attributes that are functions ---------------------------------------------------------------


class Activated(nn.Module):
    """Its activation is any callable: a partial, a bound method or a function with a closure."""

    def __init__(self, make):
        super().__init__()
        self.net = make_net()
        self.scale = nn.Parameter(torch.full((), 2.0, dtype=torch.float64))
        self.activation = make(self)

    def scaled(self, x):
        return x * self.scale

    def forward(self, x):
        return self.activation(self.net(x))


class Scaling:
    """A callable object that refers to a parameter."""

    def __init__(self, model):
        self.of = {"scale": model.scale}

    def __call__(self, x):
        return x * self.of["scale"]


def closure(model):
    scale = model.scale
    return lambda x: x * scale


def closure_with_an_empty_cell(model):
    scale = model.scale

    def activation(x):
        return x * scale if x is not None else later

    if scale is None:
        later = None
    return activation


@pytest.mark.parametrize(
    "make",
    [
        lambda model: model.scaled,
        lambda model: functools.partial(torch.mul, model.scale),
        Scaling,
        closure,
        closure_with_an_empty_cell,
    ],
    ids=["method", "partial", "object", "closure", "empty cell"],
)
def test_a_callable_that_refers_to_a_parameter_uses_that_of_its_replica(make):
    net, alone = Activated(make), Activated(make)  # a deep copy shares the closure
    alone.load_state_dict(net.state_dict())
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    x, y = make_batch(7)
    with on_cpus(net, 3, optim=lambda params: torch.optim.SGD(params, 0.1)) as model:
        for _ in range(2):
            train_step(model, x, y)
            optimizer.zero_grad()
            F.cross_entropy(alone(x), y).backward()
            optimizer.step()
        assert_close(list(model.parameters()), list(alone.parameters()))
        assert_identical(model)


def test_a_large_buffer_that_the_caller_replaces_reaches_the_replicas():
    net = Shifted()
    net.register_buffer("table", torch.zeros(4096, 16, dtype=torch.float64))
    x, y = make_batch(6)
    with on_cpus(net, 2) as model:
        train_step(model, x, y)
        net.table.add_(1.0)
        train_step(model, x, y)
        assert_identical(model)
        train_step(model, x, y)
        assert_identical(model)


class Uncopyable(nn.Module):
    """Has a lock, and a projection that is no buffer."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.features = torch.randn(3, 2)
        self.last = nn.Linear(2, 1)

    def forward(self, x):
        return self.last(x @ self.features)


def test_replicas_that_a_factory_makes_draw_the_same_attributes():
    made = []

    def factory(device):
        made.append(Uncopyable())
        return made[-1]

    x = torch.randn(6, 3)
    with on_cpus(factory, 2) as model:
        torch.testing.assert_close(model(x), made[0](x))
    assert len(made) == 2
    assert torch.equal(made[0].features, made[1].features)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_part_asks_for_a_factory():
    net = nn.Sequential(make_net(), torch.jit.script(nn.Tanh()))
    with pytest.raises(ValueError, match=r"made by torch\.jit.*factory"), on_cpus(net, 2):
        pass


# -- batch statistics ----------------------------------------------------------------------------


def test_a_shard_of_one_sample_is_not_made_where_batch_statistics_are_used():
    seen, lock = [], threading.Lock()

    class Noted(nn.BatchNorm1d):
        def forward(self, x):
            with lock:
                seen.append(len(x))
            return super().forward(x)

    net = nn.Sequential(nn.Linear(NUM_FEATURES, 4), Noted(4)).double()
    x, _ = make_batch(5)
    with on_cpus(net, 3, config=DdpConfig(whole=[])) as model:
        model(x).sum().backward()
        model.step()
        assert sorted(seen) == [2, 3]
        seen.clear()
        with torch.no_grad():  # as torch.optim.swa_utils.update_bn() does
            model(x)
        assert seen == [5]
        model(x[:2]).sum().backward()
        assert seen == [5, 2]
        assert_identical(model)


@pytest.mark.parametrize("of_samples", [True, False])
@pytest.mark.parametrize("door", ["setup", "coordinator"])
def test_a_buffer_that_depends_on_the_devices_samples_is_named_once(door, of_samples, caplog):
    net = Centred(of_samples=of_samples)
    if door == "setup":
        with on_cpus(net) as model:
            for _ in range(3):
                train_step(model, *make_batch(8))
    else:

        def loss_fn(model, samples):
            return F.cross_entropy(model(samples[0]), samples[1])

        with DataParallelCoordinator(net, sgd, loss_fn, ["cpu", "cpu"]) as replicas:
            for _ in range(3):
                replicas.train_batch(make_batch(8))
    found = [each for each in caplog.records if "buffer 'centre'" in each.message]
    assert len(found) == of_samples


def test_a_buffer_that_a_device_without_samples_lacks_is_not_reported(caplog):
    with on_cpus(Centred(of_samples=True)) as model:
        train_step(model, *make_batch(1))
        model.eval()
        train_step(model, *make_batch(8))
    assert "buffer" not in caplog.text
