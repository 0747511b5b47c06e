"""ReplicatedModule: interface, settings and construction."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from runtime import (
    DdpConfig,
    Kind,
    ReplicaFailed,
    ReplicaMismatch,
    ReplicatedModule,
    Timeline,
    Trainer,
)
from tests.support.own_loop import (
    NUM_CLASSES,
    NUM_FEATURES,
    WAIT_S,
    OneDevice,
    adamw,
    assert_close,
    assert_identical,
    exchanging_gradients,
    loss_fn,
    make_batch,
    make_net,
    on_cpus,
    sgd,
    train_both,
    train_step,
)

one_or_two = pytest.mark.parametrize("num_devices", [1, 2])


@one_or_two
def test_the_module_is_kept_with_its_weights_and_keys(num_devices):
    net = make_net()
    before = copy.deepcopy(net.state_dict())
    with on_cpus(net, num_devices) as model:
        assert isinstance(model, nn.Module)
        assert model.module is net
        assert model.training
        assert net.training
        assert model.state_dict().keys() == before.keys()
        assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
        assert [n for n, _ in model.named_parameters()] == list(before)
        assert list(model.parameters()) == list(net.parameters())
        assert list(model.modules()) == list(net.modules())
        assert list(model.children()) == list(net.children())
        assert model.world_size == num_devices
        assert model.devices == (torch.device("cpu"),) * num_devices
        make_net().load_state_dict(model.state_dict())


@one_or_two
def test_a_loaded_state_reaches_all_replicas(num_devices):
    with on_cpus(make_net(), num_devices) as model:
        other = make_net().state_dict()
        model.load_state_dict(other)
        assert all(torch.equal(model.state_dict()[k], v) for k, v in other.items())
        assert_identical(model)
        with pytest.raises(ValueError, match="assign=True"):
            model.load_state_dict(other, assign=True)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})


@one_or_two
def test_train_and_eval_mode_reach_every_replica_and_submodule(num_devices):
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    x = torch.ones(8, 2)
    with on_cpus(net, num_devices) as model:
        assert not torch.equal(model(x), net[0](x))
        model.eval()
        assert not model.training
        assert torch.allclose(model(x), net[0](x))
        model.train()
        model.module[1].eval()
        assert torch.allclose(model(x), net[0](x))
        assert [r[1].training for r in model.replicas] == [False] * num_devices
        assert model.training


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES).double()
        self.scale = 1.0

    def forward(self, x):
        return self.linear(x) * self.scale

    def describe(self):
        return f"scaled by {self.scale}"


@one_or_two
def test_attributes_and_methods_of_the_model_are_accessible_and_can_be_set(num_devices):
    with on_cpus(Scaled(), num_devices) as model:
        x, _ = make_batch(4)
        before = model(x)
        model.scale = 2.0
        assert torch.allclose(model(x), before * 2)
        assert [r.scale for r in model.replicas] == [2.0] * num_devices
        assert model.describe() == "scaled by 2.0"
        assert model.linear is model.module.linear
        assert model.describe.__self__ is model.module
        with pytest.raises(AttributeError, match="missing"):
            _ = model.missing


class Encoding(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES, dtype=torch.float64)

    def encode(self, x):
        return self.linear(x)

    def forward(self, x):
        return self.encode(x)


@one_or_two
def test_a_method_that_computes_beside_forward_is_logged_once(num_devices, caplog):
    x, _ = make_batch(4)
    with on_cpus(Encoding(), num_devices) as model:
        model(x)
        assert torch.equal(model.encode(x), model.module.encode(x))
        model.encode(x).sum().backward()
        assert model.linear.weight.grad is not None
        model.register_buffer("scale", torch.ones(1))
    found = [r.getMessage() for r in caplog.records if "alone" in r.getMessage()]
    assert len(found) == num_devices - 1
    assert all(text.startswith("model.encode(...) ran on cpu alone") for text in found)


@one_or_two
def test_operations_that_move_or_copy_the_model_are_refused(num_devices):
    with on_cpus(make_net(), num_devices) as model:
        with pytest.raises(RuntimeError, match="cannot be moved"):
            model.to(torch.float32)
        with pytest.raises(TypeError, match=r"deepcopy\(model.module\)"):
            copy.deepcopy(model)
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(model)
        assert "devices=[cpu" in repr(model)


@one_or_two
def test_apply_and_requires_grad_reach_every_replica(num_devices):
    with on_cpus(make_net(), num_devices) as model:
        model.apply(lambda m: nn.init.zeros_(m.weight) if hasattr(m, "weight") else None)
        assert_identical(model)
        assert all((r[0].weight == 0).all() for r in model.replicas)
        model.requires_grad_(False)
        assert not model(make_batch(4)[0]).requires_grad
        assert not any(p.requires_grad for r in model.replicas for p in r.parameters())


# -- learning rate and optimizer -------------------------------------------------------------


def one_cycle(optimizer):
    return OneCycleLR(optimizer, max_lr=0.5, total_steps=20)


@one_or_two
def test_a_scheduler_takes_one_step_for_each_step(num_devices):
    net = make_net()
    alone = OneDevice(net, adamw)
    scheduler = one_cycle(alone.optimizer)
    with on_cpus(net, num_devices, adamw) as model:
        model.set_scheduler(one_cycle)
        for _ in range(8):
            assert model.current_lr == pytest.approx(alone.optimizer.param_groups[0]["lr"])
            x, y = make_batch(6)
            train_step(model, x, y)
            train_step(alone, x, y)
            scheduler.step()
        assert_identical(model)
        assert_close(model, alone.model)
        # It also changes the momentum.
        assert model.optimizer.param_groups[0]["betas"] != (0.9, 0.999)


@one_or_two
def test_a_scale_multiplies_the_schedule_at_every_step(num_devices):
    with on_cpus(make_net(), num_devices) as model:
        model.set_scheduler(lambda o: StepLR(o, step_size=2, gamma=0.1))
        model.set_lr_scale(3.0)
        found = []
        for _ in range(4):
            found.append(model.current_lr)
            train_step(model, *make_batch(4))
        assert found == pytest.approx([0.3, 0.3, 0.03, 0.03])
        assert_identical(model)


@one_or_two
def test_a_scale_applies_without_a_scheduler_and_to_one_set_later(num_devices):
    with on_cpus(make_net(), num_devices) as model:
        model.set_lr_scale(0.5)
        for _ in range(3):
            train_step(model, *make_batch(4))
            assert model.current_lr == pytest.approx(0.05)
        model.set_lr_scale(2.0)
        assert model.current_lr == pytest.approx(0.2)


def test_settings_of_the_first_optimizer_apply_to_all():
    net = make_net()
    alone = OneDevice(net)
    with on_cpus(net, 2) as model:
        for lr in (0.1, 0.5, 0.01):
            for optimizer in (model.optimizer, alone.optimizer):
                optimizer.param_groups[0]["lr"] = lr
            train_both(model, alone, [5])


def test_a_tensor_learning_rate_reaches_all_optimizers():
    def optim(params):
        return torch.optim.AdamW(params, torch.tensor(0.01), foreach=False)

    with on_cpus(make_net(), 2, optim) as model:
        model.optimizer.param_groups[0]["lr"].fill_(0.5)
        train_step(model, *make_batch(5))
        assert [o.param_groups[0]["lr"] for o in model.optimizers] == [0.5, 0.5]
        assert_identical(model)


@one_or_two
def test_training_continues_from_a_saved_optimizer(num_devices):
    net = make_net()
    with on_cpus(net, num_devices, adamw) as model:
        train_step(model, *make_batch(5))
        saved = copy.deepcopy((model.state_dict(), model.optimizer_state_dict()))
        batch = make_batch(5)
        train_step(model, *batch)
        expected = copy.deepcopy(model.state_dict())
    with on_cpus(make_net(), num_devices, adamw) as model:
        model.load_state_dict(saved[0])
        model.load_optimizer_state_dict(saved[1])
        assert_identical(model)
        train_step(model, *batch)
        assert_identical(model)
        for name, tensor in expected.items():
            assert torch.allclose(model.state_dict()[name], tensor, rtol=1e-12)


# -- construction --------------------------------------------------------------------


@one_or_two
def test_a_factory_is_called_once_and_its_model_is_trained(num_devices):
    made = []

    def factory(device):
        made.append(make_net().to(device))
        return made[-1]

    with on_cpus(factory, num_devices) as model:
        assert [model.module] == made
        assert_identical(model)


class Head:
    """A task head, as in some libraries: not a module, but with a ``.module``."""

    def __init__(self, module):
        self.module = module

    def compute_loss(self, x, y):
        return F.cross_entropy(self.module(x), y)


@one_or_two
@pytest.mark.parametrize("factory", [False, True])
def test_a_head_with_a_module_trains_through_the_replicas(num_devices, factory):
    net = make_net()
    alone = OneDevice(net)
    head = Head(net)
    given = (lambda device: Head(copy.deepcopy(net))) if factory else head
    with on_cpus(given, num_devices) as model:
        head = model.head
        assert head.module is model
        for _ in range(3):
            x, y = make_batch(5)
            head.compute_loss(x, y).backward()
            head.module.step()
            train_step(alone, x, y)
        assert_identical(model)
        assert_close(model, alone.model)


def test_a_module_with_a_submodule_called_module_is_a_module():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = make_net()

        def forward(self, x):
            return self.module(x) * 2

    outer = Outer()
    with on_cpus(outer, 2) as model:
        assert model.module is outer
        assert next(iter(model.state_dict())) == "module.0.weight"


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo):
        raise NotImplementedError("no copies")


def test_models_that_cannot_be_copied_come_from_the_factory_and_share_parameters():
    made = []

    def factory(device):
        made.append(
            nn.Sequential(Uncopyable(NUM_FEATURES, NUM_CLASSES), nn.BatchNorm1d(3)).double()
        )
        return made[-1]

    with on_cpus(factory, 2) as model:
        assert model.replicas == tuple(made)
        alone = OneDevice(make_net())
        alone.model = nn.Sequential(nn.Linear(NUM_FEATURES, 3), nn.BatchNorm1d(3)).double().eval()
        alone.model.load_state_dict(model.state_dict())
        alone.optimizer = sgd(alone.model.parameters())
        model.eval()
        train_both(model, alone, [6] * 3)


def test_factories_that_differ_are_refused():
    sizes = iter((3, 4))
    with pytest.raises(ReplicaMismatch, match="rank 1"):
        Trainer.setup(lambda device: Uncopyable(2, next(sizes)), sgd, ["cpu"] * 2)
    shared = Uncopyable(2, 2)
    with pytest.raises(ValueError, match="rank 0's own parameter"):
        Trainer.setup(lambda device: shared, sgd, ["cpu"] * 2)
    layers = iter((nn.Sequential(Uncopyable(2, 2)), nn.Sequential(Uncopyable(2, 2), nn.ReLU())))
    with pytest.raises(ReplicaMismatch, match="number of modules"):
        Trainer.setup(lambda device: next(layers), sgd, ["cpu"] * 2)


def frozen():
    return make_net().requires_grad_(False)


def optim_of_lbfgs(params):
    return torch.optim.LBFGS(params)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize(
    ("model", "optim", "error", "match"),
    [
        (3, sgd, TypeError, "torch.nn.Module"),
        (make_net(), None, TypeError, "optim_factory"),
        (lambda device: 3, sgd, TypeError, "return a torch.nn.Module"),
        (nn.LazyLinear(3), sgd, ValueError, "lazy"),
        (frozen(), sgd, ValueError, "requires a gradient"),
        (lambda device: frozen(), sgd, ValueError, "requires a gradient"),
        (make_net(), lambda p: 3, TypeError, "torch.optim.Optimizer"),
        (make_net(), optim_of_lbfgs, ValueError, "closure"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(model, optim, error, match, num_devices):
    with pytest.raises(error, match=match):
        Trainer.setup(model, optim, ["cpu"] * num_devices)


def test_batches_that_cannot_be_trained_on_several_devices_are_refused():
    with pytest.raises(ValueError, match="pass a factory"):
        Trainer.setup(Uncopyable(2, 2), sgd, ["cpu"] * 2)
    with on_cpus(make_net(), 2) as model, pytest.raises(ValueError, match="set up before"):
        Trainer.setup(Head(model), sgd, ["cpu"] * 2)


@pytest.mark.parametrize("devices", [[], ["gpu"], 2.0, ["cuda:99"]])
def test_devices_that_do_not_exist_are_refused(devices):
    with pytest.raises((TypeError, ValueError), match="devices"):
        Trainer.setup(make_net(), sgd, devices)


def test_the_devices_are_logged(caplog):
    with caplog.at_level(logging.INFO, "runtime.loop"), on_cpus(make_net(), 2):
        assert "2 x cpu" in caplog.text
        assert "THREAD" in caplog.text


# -- one device ------------------------------------------------------------------------------


def test_one_device_calls_the_model_directly():
    net = make_net()
    with on_cpus(net, 1) as model:
        assert model.__dict__["forward"] is net
        assert model.chunk_ratios == (1.0,)
        x, _ = make_batch(4)
        before = threading.enumerate()
        assert torch.equal(model(x), net(x))
        assert threading.enumerate() == before


def test_the_default_is_every_gpu_or_one_cpu():
    model = Trainer.setup(make_net(torch.float32), sgd)
    count = torch.cuda.device_count()
    assert [d.type for d in model.devices] == (["cuda"] * count or ["cpu"])
    model.close()
    assert isinstance(model, ReplicatedModule)


# -- the timeline ----------------------------------------------------------------------------


@one_or_two
@pytest.mark.parametrize("how", ["directly", "meeting"])
def test_a_timeline_records_the_work_of_each_replica(num_devices, how, tmp_path):
    timeline = Timeline(poll_s=0.01)
    config = DdpConfig(timeline=timeline, speed_hint=(0, 2.0), max_anchor=1)
    with exchanging_gradients(how), on_cpus(make_net(), num_devices, config=config) as model:
        train_step(model, *make_batch(6))
        model.accumulate(lambda m, b: m(b[0]).square().mean(), [make_batch(4)] * 3)
        model.step()
        assert timeline.summary().state == "running"
    summary = timeline.summary()
    assert (summary.state, summary.model) == ("finished", "Sequential")
    assert sum(rank.num_samples for rank in summary.ranks) == 6 + 12
    for rank in summary.ranks:
        assert rank.num_steps == 2
        assert rank.causes["compute"] > 0
        assert sum(rank.causes.values()) == pytest.approx(rank.wall_s)
        assert rank.unattributed_share == 0
        events = [event for event in timeline.events() if event.rank == rank.rank]
        phases = [event.args["phase"] for event in events if event.kind is Kind.PHASE]
        assert phases == ["forward", "backward", "step", "accumulate", "step"]
        reduced = [event for event in events if event.kind is Kind.AVERAGING]
        assert len(reduced) == (2 if num_devices == 2 else 0)
        assert all(event.start_s <= event.end_s for event in events)
    assert summary.num_averagings == (2 if num_devices == 2 else 0)
    assert "finished" in str(summary)
    for save in (timeline.save_html, timeline.save_trace, timeline.save_json, timeline.save_csv):
        save(tmp_path / "out")
        assert (tmp_path / "out").stat().st_size > 500
    with pytest.raises(ValueError, match="recorded a run already"):
        DdpConfig(timeline=timeline)


def test_the_timeline_shows_a_ranks_wait_for_a_slower_one():
    class Waiting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)

        def forward(self, x):
            if threading.current_thread().name.endswith("-1"):
                time.sleep(0.1)
            return self.linear(x)

    timeline = Timeline(poll_s=0.05)
    with on_cpus(Waiting(), 2, config=DdpConfig(timeline=timeline)) as model:
        train_step(model, *make_batch(6, torch.float32))
    quick, slow = (rank.causes for rank in timeline.summary().ranks)
    assert quick["sync"] > slow["sync"]
    assert slow["compute"] > 0.1


def test_the_timeline_of_a_garbage_collected_model_ends():
    timeline = Timeline(poll_s=0.01)
    model = Trainer.setup_with(make_net(), sgd, ["cpu"] * 2, config=DdpConfig(timeline=timeline))
    train_step(model, *make_batch(6))
    threads = [t for t in threading.enumerate() if t.name.startswith("replica-")]
    del model
    gc.collect()
    for thread in threads:
        thread.join(WAIT_S)
    assert timeline.summary().state == "finished"


def test_a_state_loaded_into_the_first_optimizer_directly_reaches_all():
    with on_cpus(make_net(), 2, adamw) as model:
        train_step(model, *make_batch(4))
        saved = copy.deepcopy(model.optimizer.state_dict())
        train_step(model, *make_batch(4))
        model.optimizer.load_state_dict(saved)
        train_step(model, *make_batch(4))
        assert_identical(model)


def call(model, out):
    model(make_batch(4)[0])


def zero_grad(model, out):
    model.zero_grad()


def set_attribute(model, out):
    model.seen = 1


def run_backward(model, out):
    out.sum().backward()


@pytest.mark.parametrize("use", [call, zero_grad, set_attribute, run_backward])
def test_a_replica_that_uses_the_model_raises_instead_of_hanging(use):
    with on_cpus(make_net(), 2) as model:
        out = model(make_batch(4)[0])

        def using_the_model(module, batch):
            use(model, out)
            return loss_fn(module, batch)

        with pytest.raises(ReplicaFailed, match="cannot call the model that it is a part of"):
            model.accumulate(using_the_model, [make_batch(4)] * 2)
        train_step(model, *make_batch(4))
        assert_identical(model)


@one_or_two
def test_parts_added_through_the_wrapper_are_parts_of_the_model(num_devices):
    net = nn.Sequential(make_net())
    x, _ = make_batch(6)
    with on_cpus(net, num_devices) as model:
        model.register_parameter("scale", nn.Parameter(torch.ones(())))
        model.add_module("tail", nn.Identity())
        model.set_submodule("tail", nn.Tanh())
        model.register_buffer("seen", torch.zeros(()))
        assert [name for name, _ in model.named_buffers()] == ["seen"]
        assert net.tail is model.get_submodule("tail")
        assert "scale" in dict(net.named_parameters())
        alone = copy.deepcopy(net)
        assert_close([model(x)], [alone(x)])
        with pytest.raises(AttributeError, match="__missing__"):
            _ = model.__missing__
