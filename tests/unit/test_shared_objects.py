"""Objects outside the model that user functions of all workers reach: writes to them are named."""

from __future__ import annotations

import gc
import random
import threading
import types
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import gpuworker
from runtime.core.shared_objects import SharedObjects
from tests.support.running import CADENCE, SYNC, THREAD, WAIT_S, builder
from tests.unit.test_docs import ROOT, blocks_of

X = torch.randn(44, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X.sum(1, keepdim=True)
BATCH = 8  # the last batch has 4 samples
WORDS = "all workers share"


def new_net(device=None):
    torch.manual_seed(0)
    return nn.Linear(3, 1, dtype=torch.float64)


def mse(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def sgd(params):
    return torch.optim.SGD(params, 0.05)


def run(train=mse, *, model=new_net, optim=sgd, ranks=2, policy=SYNC, epochs=2, epoch_fn=None):
    b = builder(
        model=model,
        optim=optim,
        train=train,
        dataset=(X, Y),
        batch_size=BATCH // ranks if policy is SYNC else BATCH,
        epochs=epochs,
        ranks=ranks,
        way=(policy, THREAD),
    )
    return (b if epoch_fn is None else b.epoch_fn(epoch_fn)).run().join(WAIT_S)


def run_loop(train, *, optim=sgd, ranks=2):
    def body(worker):
        for batch in worker.batches():
            worker.step(train(worker.model, batch))

    b = gpuworker.Trainer.loop(new_net, lambda model: optim(list(model.parameters())), body)
    b.dataset((X, Y)).batch_size(BATCH // ranks).num_epochs(2).devices(["cpu"] * ranks)
    return b.policy("sync").progress(False).run().join(WAIT_S)


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if WORDS in r.getMessage()]


calls_of_module = 0


def counting():
    calls = 0

    def train(model, batch):
        nonlocal calls
        calls += 1
        return mse(model, batch) * min(1.0, calls / 16)

    return train


def counting_in_the_module():
    def train(model, batch):
        global calls_of_module
        calls_of_module += 1
        return mse(model, batch)

    return train


def with_a_teacher(through_data):
    teacher = new_net().requires_grad_(False)

    def train(model, batch):
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                (slow.data if through_data else slow).lerp_(fast, 0.1)
        return mse(model, batch) + nn.functional.mse_loss(model(batch[0]), teacher(batch[0]))

    return train


def carrying():
    last = None

    def train(model, batch):
        nonlocal last
        out = model(batch[0] if last is None else batch[0] + last)
        last = out.detach().mean()
        return nn.functional.mse_loss(out, batch[1])

    return train


class Averaging:
    def __init__(self):
        self.mean = torch.zeros(1, dtype=torch.float64)

    def train(self, model, batch):
        self.mean = self.mean * 0.9 + batch[1].mean() * 0.1
        return mse(model, batch)

    __call__ = train


def writing(thing, write):
    def train(model, batch):
        write(thing)
        return mse(model, batch)

    return train


def write_array(array):
    array[0] += 1


def in_a_partial():
    def train(seen, model, batch):
        seen.append(1)
        return mse(model, batch)

    return partial(train, [])


def with_a_default():
    def train(model, batch, seen=[0]):  # noqa: B006
        seen[0] += 1
        return mse(model, batch)

    return train


def through_a_helper():
    state = {"calls": 0}

    def count():
        state["calls"] += 1

    def train(model, batch):
        count()
        return mse(model, batch)

    return train


def bump(namespace):
    namespace.calls += 1


KINDS = {
    "counter": (counting, "calls"),
    "global": (counting_in_the_module, "calls_of_module"),
    "teacher": (lambda: with_a_teacher(False), "teacher.weight"),
    "teacher through .data": (lambda: with_a_teacher(True), "teacher.weight"),
    "carried": (carrying, "last"),
    "bound method": (lambda: Averaging().train, "Averaging.mean"),
    "callable object": (Averaging, "Averaging.mean"),
    "list": (lambda: writing([], lambda each: each.append(1)), "thing"),
    "set": (lambda: writing(set(), lambda each: each.add(len(each))), "thing"),
    "array": (lambda: writing(np.zeros(3), write_array), "thing"),
    "object": (lambda: writing(types.SimpleNamespace(calls=0), bump), "thing.calls"),
    "modules in a list": (
        lambda: writing([new_net()], lambda each: each[0].weight.data.add_(1)),
        "thing[0].weight",
    ),
    "torch generator": (
        lambda: writing(torch.Generator(), lambda each: torch.rand(1, generator=each)),
        "thing",
    ),
    "numpy generator": (
        lambda: writing(np.random.default_rng(0), lambda each: each.random()),
        "thing",
    ),
    "python generator": (lambda: writing(random.Random(0), lambda each: each.random()), "thing"),
    "partial": (in_a_partial, "an argument of train"),
    "default": (with_a_default, "a default of train[0]"),
    "helper": (through_a_helper, "state['calls']"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_of_train_fn_to_what_workers_share_is_named_once(kind, caplog):
    make, name = KINDS[kind]
    run(make())
    (warning,) = warnings_of(caplog)
    assert f"{WORDS} {name}" in warning
    assert "register_step_post_hook" in warning


@pytest.mark.parametrize("kind", ["counter", "teacher", "carried", "helper"])
def test_a_write_is_named_under_cadence(kind, caplog):
    make, name = KINDS[kind]
    run(make(), policy=CADENCE)
    (warning,) = warnings_of(caplog)
    assert f"{WORDS} {name}" in warning


@pytest.mark.parametrize("kind", ["counter", "teacher", "carried", "helper"])
def test_a_write_in_the_body_of_a_loop_is_named(kind, caplog):
    make, name = KINDS[kind]
    run_loop(make())
    (warning,) = warnings_of(caplog)
    assert name in warning


@pytest.mark.parametrize("kind", KINDS)
def test_one_worker_shares_nothing(kind, caplog):
    run(KINDS[kind][0](), ranks=1)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("door", [run, run_loop])
def test_a_write_in_a_hook_of_the_optimizer_is_named(door, caplog):
    teacher = new_net().requires_grad_(False)

    def hooked(params):
        params = list(params)
        optimizer = sgd(params)

        def move(*_):
            with torch.no_grad():
                teacher.weight.lerp_(params[0], 0.1)

        optimizer.register_step_post_hook(move)
        return optimizer

    door(mse, optim=hooked)
    (warning,) = warnings_of(caplog)
    assert f"{WORDS} teacher.weight, outside" in warning


def test_a_late_write_of_the_first_epoch_is_named(caplog):
    seen = []

    def train(model, batch):
        if gpuworker.current_worker().local_step >= 4:
            seen.append(1)
        return mse(model, batch)

    run(train)
    (warning,) = warnings_of(caplog)
    assert f"{WORDS} seen" in warning


def features_of(epochs):
    features = {}

    def factory(device):
        net = nn.Sequential(new_net(), nn.Linear(1, 1, dtype=torch.float64))
        net[0].register_forward_hook(lambda module, args, out: features.update(first=out))
        return net

    def train(model, batch):
        return mse(model, batch) + features["first"].square().mean()

    return run(train, model=factory, policy=CADENCE, epochs=epochs)


def test_features_kept_by_a_hook_are_named_and_not_a_backward_pass_of_train_fn(caplog):
    try:
        features_of(epochs=2)
        text = caplog.text
    except gpuworker.WorkerFailed as error:  # by timing: the graph of another worker
        text = str(error)
    assert "features['first']" in text
    assert "leave loss.backward()" not in text
    assert "calls backward() itself" not in text


def test_the_error_of_a_shared_graph_names_what_is_shared():
    """One worker runs the backward pass of the other's graph, again."""
    graphs = []

    def train(model, batch):
        loss = mse(model, batch)
        graphs.append(loss)
        return graphs[0]

    with pytest.raises(gpuworker.WorkerFailed) as caught:
        run(train)
    assert f"{WORDS} graphs" in str(caught.value)
    assert "leave loss.backward()" not in str(caught.value)


# No warning


@pytest.mark.parametrize("function", [min, np.add, torch.relu, partial(min, default=0)])
def test_functions_of_c_are_searched_without_effect(function):
    shared = SharedObjects()
    shared.add(0, [function])
    shared.add(1, [function])
    assert not shared.compare()
    assert not shared.compare()


def test_a_value_that_every_worker_sets_alike_is_not_named(caplog):
    setting = types.SimpleNamespace(level=-1)

    def train(model, batch):
        return mse(model, batch) * (1 + setting.level)

    def begin(epoch, worker):
        setting.level = epoch

    run(train, epoch_fn=begin, epochs=3)
    assert warnings_of(caplog) == []


def test_a_counter_of_epoch_fn_is_named(caplog):
    begun = [0]

    def begin(epoch, worker):
        begun[0] += 1

    run(epoch_fn=begin, epochs=2, policy=CADENCE)
    assert len(warnings_of(caplog)) <= 1  # by timing, not if both began before their first steps
    assert begun == [4]


def test_a_cache_that_is_filled_late_is_not_named(caplog):
    cache, table = {}, None

    def train(model, batch):
        nonlocal table
        if table is None:
            table = torch.ones(1, dtype=torch.float64)
        cache.setdefault("ones", table)
        return mse(model, batch) * cache["ones"].sum()

    run(train, epochs=2)
    assert warnings_of(caplog) == []


def test_what_is_only_read_and_what_each_worker_made_is_not_named(caplog):
    teacher, weights, names = new_net(), torch.ones(1), ["a"]
    criterion, calls_of_thread = nn.CrossEntropyLoss(), threading.local()

    def counted(params):
        calls = [0]
        optimizer = sgd(params)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        return optimizer

    def train(model, batch):
        assert names
        assert criterion
        calls_of_thread.number = getattr(calls_of_thread, "number", 0) + 1
        with torch.no_grad():
            target = teacher.eval()(batch[0])
        return nn.functional.mse_loss(model(batch[0]), target) * weights.sum()

    run(train, optim=counted)
    assert warnings_of(caplog) == []


def test_a_model_found_in_a_closure_is_not_named(caplog):
    net = new_net()

    def train(model, batch):
        assert net.weight.shape == model.weight.shape
        return mse(model, batch)

    run(train, model=net)
    assert warnings_of(caplog) == []


def test_nothing_is_compared_after_the_first_epoch_and_nothing_is_kept(monkeypatch):
    compared, compare = [], SharedObjects.compare
    monkeypatch.setattr(
        SharedObjects, "compare", lambda self, **kw: (compared.append(1), compare(self, **kw))[1]
    )
    held = new_net()

    kept = weakref.ref(held)
    run(partial(lambda held, model, batch: mse(model, batch), held), epochs=5)
    assert len(compared) == 2 * 4  # before the first step, after two, at the end of the epoch
    del held
    gc.collect()
    assert kept() is None


# Own loops and evaluations


def test_a_write_of_a_loss_function_is_named_once(caplog):
    calls = [0]

    def loss_fn(model, samples):
        calls[0] += 1
        return mse(model, samples)

    with gpuworker.DataParallelCoordinator(new_net, sgd, loss_fn, ["cpu"] * 2) as coordinator:
        for _ in range(4):
            coordinator.train_batch((X, Y))
    (warning,) = warnings_of(caplog)
    assert f"{WORDS} calls[0]" in warning
    assert "in your loop" in warning


def test_a_write_of_an_accumulated_loss_function_is_named_once(caplog):
    calls = [0]

    def loss_fn(model, samples):
        calls[0] += 1
        return mse(model, samples)

    with gpuworker.Trainer.setup(new_net, sgd, devices=["cpu"] * 2) as model:
        for _ in range(4):
            model.accumulate(loss_fn, [(X, Y)] * 2)
            model.step()
    assert len(warnings_of(caplog)) == 1


def test_writes_of_the_loop_itself_are_not_named(caplog):
    teacher = new_net()

    def loss_fn(model, samples):
        return mse(model, samples) + 0 * teacher(samples[0]).sum()

    with gpuworker.DataParallelCoordinator(new_net, sgd, loss_fn, ["cpu"] * 2) as coordinator:
        for _ in range(3):
            coordinator.train_batch((X, Y))
            with torch.no_grad():
                teacher.weight.lerp_(coordinator.primary.weight, 0.1)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_write_of_the_function_of_predict_is_named(num_devices, caplog):
    outputs = []

    def fn(model, batch):
        outputs.append(model(batch[0]))
        return outputs[-1]

    gpuworker.predict(new_net(), (X, Y), fn, devices=["cpu"] * num_devices)
    assert len(warnings_of(caplog)) == num_devices - 1
    assert ("data's order" in caplog.text) == (num_devices > 1)


# The remedy


def plain(epochs):
    """The loop of the documented example on one device."""
    net, teacher = new_net(), new_net().requires_grad_(False)
    optimizer = sgd(net.parameters())
    for _ in range(epochs):
        for start in range(0, len(X), BATCH):
            x, y = X[start : start + BATCH], Y[start : start + BATCH]
            out = net(x)
            loss = nn.functional.mse_loss(out, y) + nn.functional.mse_loss(out, teacher(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), net.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
    return net.weight.detach(), teacher.weight


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("door", ["builder", "loop"])
def test_the_documented_teacher_is_that_of_one_device(door, ranks, caplog):
    (block,) = (b for b in blocks_of(ROOT / "docs" / "mirrored.md") if "class Taught" in b.code)
    example = {"__name__": "example"}
    exec(compile(block.code, "mirrored.md", "exec"), example)

    def factory(device):
        return example["Taught"](new_net())

    if door == "builder":
        made = gpuworker.Trainer.builder(factory, example["optimizer_of"], example["train_fn"])
    else:

        def body(worker):
            for batch in worker.batches():
                worker.step(example["train_fn"](worker.model, batch))

        made = gpuworker.Trainer.loop(
            factory, lambda model: example["optimizer_of"](model.student.parameters()), body
        )
    made.dataset((X, Y)).sampler(range(len(X))).global_batch_size(BATCH).num_epochs(3)
    state = made.devices(["cpu"] * ranks).policy("sync").progress(False).run().join(WAIT_S)
    weight, teacher = plain(3)
    torch.testing.assert_close(state.params["student.weight"], weight, rtol=0, atol=1e-12)
    found = {**state.params, **state.buffers}["teacher.weight"]
    torch.testing.assert_close(found, teacher, rtol=0, atol=1e-12)
    assert warnings_of(caplog) == []
    assert "differ" not in caplog.text
