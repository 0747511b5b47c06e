"""Mistakes of a first hour: each error names the thing, the value and a remedy to paste."""

import functools
import logging
import os
import re
import signal
import sqlite3
import sys
import threading
import traceback

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

import runtime
from runtime import (
    AverageBackend,
    CollectiveTimeout,
    DataParallelCoordinator,
    Ddp,
    EvaluationFailed,
    NonFiniteError,
    ReplicaFailed,
    Trainer,
    Weighted,
    WorkerFailed,
    create_collectives,
    fit,
    predict,
)
from runtime.collective import AbortableBarrier, close_collectives, split
from runtime.collective.barrier import Rendezvous
from runtime.core.checks import check_devices
from runtime.core.errors import text_of
from runtime.data.process_loader import refuse_import_of_main
from tests.support import programs
from tests.support.own_loop import exchanging_gradients
from tests.support.running import ASYNC, CADENCE, CPU, OVER_CPU, SYNC, THREAD, WAIT_S, at_once, over

N = 64
local_ways = over([(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, OVER_CPU)])


def mse(model, batch):
    return mse_loss(model(batch[0]), batch[1])


def sgd(params):
    return torch.optim.SGD(params, 0.1)


def linear(device=CPU):
    return nn.Linear(3, 1)


def data(n=N):
    return torch.randn(n, 3), torch.randn(n, 1)


def builder(train_fn=mse, dataset=None, batch_size=8, model=linear, optim=sgd):
    b = Trainer.builder(model, optim, train_fn).dataset(data() if dataset is None else dataset)
    if batch_size is not None:
        b.batch_size(batch_size)
    return b.num_epochs(1).devices(["cpu", "cpu"]).progress(False)


def message_of(b):
    """The message of a run's error, which is raised in bounded time."""
    with pytest.raises(WorkerFailed) as caught:
        b.run().join(WAIT_S)
    return str(caught.value)


# -- signatures ----------------------------------------------------------------


def three(model, batch, index):
    return mse(model, batch)


class Step:
    def __call__(self, batch):
        return batch


SIGNATURES = {
    "train_fn with three arguments": (
        lambda: builder(three),
        r"train_fn .*three\(model, batch, index\).*line \d+.*called as train_fn\(model, batch\): "
        r".*def train_fn\(model, batch\).*functools.partial\(train_fn, index=...\)",
    ),
    "train_fn without the model": (lambda: builder(Step()), r"pass lambda model, batch: Step\("),
    "train_fn with a keyword": (
        lambda: builder(lambda model, batch, *, scale: mse(model, batch)),
        r"functools.partial\(train_fn, scale=...\)",
    ),
    "model_factory without the device": (
        lambda: builder(model=lambda: linear()),
        r"model_factory .*called as model_factory\(device\): pass lambda device: model_factory\(\)",
    ),
    "model_factory that is a class": (
        lambda: builder(model=type("Net", (nn.Module,), {"__init__": lambda self: None})),
        r"pass lambda device: Net\(\)",
    ),
    "optim_factory without parameters": (
        lambda: builder(optim=lambda: None),
        r"pass lambda params: optim_factory\(\)",
    ),
    "an optimizer": (
        lambda: builder(optim=torch.optim.AdamW(linear().parameters(), 0.25)),
        r"optim_factory .*pass lambda params: torch.optim.AdamW\(params, lr=0.25\)",
    ),
    "a scheduler": (
        lambda: builder().scheduler(
            torch.optim.lr_scheduler.StepLR(torch.optim.SGD(linear().parameters(), 0.1), 3)
        ),
        r"pass lambda optimizer: torch.optim.lr_scheduler.StepLR\(optimizer, ...\)",
    ),
    "eval_fn with the model alone": (
        lambda: builder().eval_fn(lambda model: {}),
        r"eval_fn\(model, epoch\)",
    ),
    "epoch_fn with the epoch alone": (
        lambda: builder().epoch_fn(lambda epoch: None),
        r"epoch_fn\(epoch, worker\)",
    ),
    "metrics_fn with two arguments": (
        lambda: builder().metrics_fn(lambda epoch, metrics: None),
        r"metrics_fn\(EpochMetrics\)",
    ),
    "checkpoint_fn with the model alone": (
        lambda: builder().checkpoint_fn(lambda model: None),
        r"checkpoint_fn\(version, model\)",
    ),
    "collate_fn without samples": (
        lambda: builder().collate_fn(lambda: None),
        r"pass lambda list_of_samples: collate_fn\(\)",
    ),
    "loss of fit": (
        lambda: runtime.fit(linear(), data(), optimizer=sgd, loss=lambda output: output),
        r"loss\(output, target\)",
    ),
    "optimizer of setup": (
        lambda: Trainer.setup(linear(), lambda: None, ["cpu"]),
        r"optim_factory\(params\)",
    ),
    "model factory of setup": (
        lambda: Trainer.setup(lambda: linear(), sgd, ["cpu"]),
        r"model_factory\(device\): pass lambda device: model_factory\(\)",
    ),
    "param_groups of setup": (
        lambda: Trainer.setup(linear(), sgd, ["cpu"], param_groups=lambda: None),
        r"param_groups\(model\)",
    ),
    "loop of Trainer.loop": (
        lambda: Trainer.loop(linear, lambda model: None, lambda: None),
        r"loop\(worker\): pass lambda worker: loop\(\)",
    ),
    "loss_fn of DataParallelCoordinator": (
        lambda: DataParallelCoordinator(linear, sgd, lambda model: None, ["cpu"]),
        r"loss_fn\(model, samples\)",
    ),
    "one of several train_fns": (
        lambda: Trainer.builder(linear, {"a": sgd}, {"a": lambda model: None}),
        r"called as train_fn\['a'\]\(model, batch\): pass lambda model, batch: f\(\.\.\.\)",
    ),
}


@pytest.mark.parametrize("mistake", SIGNATURES)
def test_a_function_with_another_signature_is_refused_before_any_thread_starts(mistake):
    before = threading.active_count()
    do, remedy = SIGNATURES[mistake]
    with pytest.raises(TypeError, match=remedy):
        do()
    assert threading.active_count() == before


def with_logger(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args, None)

    return wrapper


@pytest.mark.parametrize(
    "train_fn",
    [
        functools.partial(three, index=0),
        with_logger(three),
        lambda model, batch, scale=1.0: mse(model, batch),
        lambda *args: mse(*args),
        torch.compile(mse, backend="eager"),
    ],
    ids=["partial", "wrapped", "default", "starred", "compiled"],
)
def test_a_function_that_can_be_called_with_two_arguments_is_accepted(train_fn):
    assert builder(train_fn).run().join(WAIT_S).metrics[0].num_samples == N


@pytest.mark.parametrize("train_fn", [min, np.add])
def test_a_function_of_c_is_accepted_with_and_without_a_signature(train_fn):
    # Neither can train this model: the error is that of the first call.
    assert re.match("worker . failed in epoch 0 at step 0: ", message_of(builder(train_fn)))


# -- devices, strategies, Trainer ----------------------------------------------


@pytest.mark.parametrize("devices", ["auto", -1, "cpu", ["cpu"]], ids=str)
def test_names_and_numbers_of_other_libraries_mean_devices(monkeypatch, devices):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert builder().devices(devices)._settings.resolved_devices() == (CPU,)
    with Trainer.setup(linear(), sgd, devices) as model:
        assert model.devices == (CPU,)


@pytest.mark.parametrize("devices", ["auto", "gpu", -1], ids=str)
def test_auto_and_gpu_are_every_visible_cuda_device(monkeypatch, devices):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check_devices(devices) == (torch.device("cuda", 0), torch.device("cuda", 1))


@pytest.mark.parametrize("devices", ["gpu", "cuda", ["cuda:1"]], ids=str)
def test_cuda_on_a_cpu_build_names_the_option_of_the_install_command(monkeypatch, devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    for do in (builder().devices, lambda d: Trainer.setup(linear(), sgd, d)):
        with pytest.raises(ValueError, match="CUDA") as caught:
            do(devices)
        assert "CPU build" in str(caught.value)
        assert "pip install --force-reinstall torch --extra-index-url" in str(caught.value)
        assert "://" not in str(caught.value)


def test_cuda_that_is_not_visible_names_the_variable_that_hides_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES is ''.*nvidia-smi"):
        builder().devices(["cuda:0"])


@pytest.mark.parametrize(
    ("strategy", "advice"), [("ddp", r'policy\("sync"\)'), ("fsdp", "gpuworker.FSDP")]
)
def test_a_strategy_of_another_library_leads_to_the_own_one(strategy, advice):
    with pytest.raises(ValueError, match=rf'"sync", "cadence", "async".*{advice}'):
        builder().policy(strategy)


def test_trainer_as_lightnings_leads_to_the_builder_with_the_settings_given():
    with pytest.raises(TypeError) as caught:
        Trainer(max_epochs=3, accelerator="gpu", fast_dev_run=True)
    assert "Trainer.builder(model_factory, optim_factory, train_fn)" in str(caught.value)
    assert ".num_epochs(3).devices('gpu').run()" in str(caught.value)
    assert "docs/coming-from.md" in str(caught.value)


def test_callbacks_are_taken_in_a_list():
    callbacks = [runtime.EarlyStopping(), runtime.TimeLimit(60)]
    assert builder().callbacks(callbacks)._settings.callbacks == tuple(callbacks)
    state = builder().callbacks(callbacks).run().join(WAIT_S)
    assert len(state.metrics) == 1
    with pytest.raises(TypeError, match="metrics_fn"):
        builder().callbacks([print])


# -- data ----------------------------------------------------------------------


def test_a_batch_larger_than_the_data_is_refused_with_one_that_fits():
    with pytest.raises(ValueError, match=r"batch_size\(65\) .* 64 samples: call .batch_size\(32\)"):
        builder(batch_size=65).run()
    with pytest.raises(ValueError, match=r"batch_size\(100\)"):
        builder(batch_size=[100, 20]).run()
    with pytest.raises(ValueError, match=r"global_batch_size\(65\) .*call .global_batch_size\(64"):
        builder(batch_size=None).global_batch_size(65).run()
    assert builder(batch_size=64).run().join(WAIT_S).metrics[0].num_samples == N


def test_a_few_samples_may_be_fewer_than_a_batch(caplog):
    state = builder(dataset=data(4)).run().join(WAIT_S)
    assert state.metrics[0].num_samples == 4
    assert "call .batch_size(2)" in caplog.text


@local_ways
@pytest.mark.parametrize("kind", ["arrays", "rows of floats"])
def test_float64_data_in_a_float32_model_names_both_and_the_conversion(way, kind):
    x, y = (t.double().numpy() for t in data())
    dataset = (
        (x, y)
        if kind == "arrays"
        else [(row.tolist(), t.item()) for row, t in zip(x, y, strict=True)]
    )

    def train_fn(model, batch):
        if kind == "arrays":
            return mse(model, batch)
        return model(torch.stack(batch[0], 1)).mean()

    text = message_of(builder(train_fn, dataset).policy(way[0]))
    assert "float64, and the model's parameters are float32" in text
    assert ".astype(numpy.float32)" in text


def through_setup(pair):
    with Trainer.setup(linear(), sgd, ["cpu", "cpu"]) as model:
        model(pair[0])


def through_accumulate(pair):
    with Trainer.setup(linear(), sgd, ["cpu", "cpu"]) as model:
        model.accumulate(mse, [pair, pair])


def through_coordinator(pair, loss_fn=mse):
    with DataParallelCoordinator(linear, sgd, loss_fn, ["cpu", "cpu"]) as coordinator:
        coordinator.train_batch(pair)


@pytest.mark.parametrize("door", [through_setup, through_accumulate, through_coordinator])
def test_float64_data_is_named_in_own_loops(door):
    pair = tuple(t.double() for t in data())
    with pytest.raises(ReplicaFailed, match=r"float64, .*model's parameters are float32"):
        door(pair)


@local_ways
def test_rows_of_dicts_train(way):
    x, y = data()
    rows = [{"x": x[i], "y": y[i], "label": "a"} for i in range(N)]

    def train_fn(model, batch):
        assert isinstance(batch["label"], list)
        return mse_loss(model(batch["x"]), batch["y"])

    state = builder(train_fn, rows).policy(way[0]).run().join(WAIT_S)
    assert state.metrics[0].num_samples == N


class Rows:
    """Rows as Hugging Face datasets give them without a format: numbers are in lists."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        return [{"ids": [1, 2, 3], "label": 0} for _ in indices]


def test_lists_of_numbers_in_rows_are_warned_of_once(caplog):
    def train_fn(model, batch):
        return model(torch.stack(batch["ids"], 1).float()).mean()

    builder(train_fn, Rows()).run().join(WAIT_S)
    warnings = [r.getMessage() for r in caplog.records if "'ids'" in r.getMessage()]
    assert len(warnings) == 1
    assert 'with_format("torch")' in warnings[0]


def test_samples_that_cannot_be_collated_name_collate_fn():
    rows = [{"ids": [1] * (1 + i % 3)} for i in range(N)]
    assert "pass collate_fn(f)" in message_of(builder(mse, rows))


@pytest.mark.parametrize("has_collate", [False, True])
def test_an_error_of_the_data_set_names_the_sample(has_collate):
    class Broken:
        def __len__(self):
            return N

        def __getitem__(self, index):
            if index == 33:
                raise KeyError("label")
            return torch.zeros(3), torch.zeros(1)

    b = builder(mse, Broken())
    message = message_of(b.collate_fn(default_collate) if has_collate else b)
    assert "raised by the data set for sample 33" in message


def test_inputs_and_targets_in_a_list_lead_to_a_tuple():
    assert "dataset((x, y))" in message_of(builder(mse, list(data())))


class Column:
    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]

    def to_numpy(self):
        return np.array(self.values)


class Narrow(Column):
    """A table of a single column, which is not divided into inputs and target."""

    columns = ("a",)


class Frame(Column):
    """A table as pandas makes it: items are columns."""

    columns = ("a", "b", "target")


@pytest.mark.parametrize(
    ("dataset", "remedy"),
    [
        (
            Frame([0] * N),
            r"a Frame, .*dataset\(\(table\[\['a', 'b'\]\].to_numpy\(\).astype\(\"float32\"\), "
            r"table\['target'\].to_numpy\(\).astype\(\"float32\"\),\)\)",
        ),
        (Column([0] * N), r"dataset\(\(column.to_numpy\(\)"),
        (Narrow([0] * N), r"dataset\(\(table\[\[...\]\]\.to_numpy.*table\[...\]\.to_numpy"),
        ((torch.zeros(N), Column([0] * N)), r"element 1 .* Column: .*to_numpy\(\)"),
        ({"x": torch.zeros(N), "y": Column([0] * N)}, r"element 'y' .*to_numpy\(\)"),
    ],
    ids=["table", "column", "narrow table", "column in a tuple", "column in a dict"],
)
def test_a_table_is_refused_with_code_that_converts_it_to_arrays(dataset, remedy):
    with pytest.raises(TypeError, match=remedy):
        builder(dataset=dataset).run()
    with pytest.raises(TypeError, match=remedy):
        runtime.fit(linear(), dataset, optimizer=sgd, batch_size=8, devices="cpu")


# -- backward ------------------------------------------------------------------


def backward_and_return(model, batch):
    loss = mse(model, batch)
    loss.backward()
    return loss


def backward_and_detach(model, batch):
    return backward_and_return(model, batch).detach()


def backward_twice(model, batch):
    loss = mse(model, batch)
    loss.backward(retain_graph=True)
    return loss


@local_ways
@pytest.mark.parametrize("train_fn", [backward_and_return, backward_and_detach])
def test_backward_in_train_fn_is_refused_by_name(way, train_fn):
    text = message_of(builder(train_fn).policy(way[0]))
    assert "train_fn calls backward()" in text
    assert "end train_fn with return loss" in text


def test_backward_that_counts_gradients_twice_is_warned_of_once(caplog):
    builder(backward_twice).run().join(WAIT_S)
    assert caplog.text.count("train_fn calls backward() itself") == 1


@local_ways
def test_a_memory_bank_written_before_backward_leads_to_a_copy(way):
    def model(device):
        net = linear()
        net.register_buffer("bank", torch.zeros(4, 1))
        return net

    def train_fn(model, batch):
        keys = model(batch[0])
        loss = (keys @ model.bank.T).square().mean()
        model.bank[0] = keys[0].detach()
        return loss

    message = message_of(builder(train_fn, model=model).policy(way[0]).backend(way[1]))
    assert "model.queue.clone()" in message


def test_several_losses_in_a_dict_lead_to_their_sum():
    message = message_of(builder(lambda model, batch: {"a": mse(model, batch)}))
    assert "return the sum, and record each with gpuworker.record_scalar" in message


def test_backward_in_loss_fn_is_refused_by_name():
    with pytest.raises(ReplicaFailed, match="loss_fn calls backward"):
        through_coordinator(data(), backward_and_return)


# -- memory --------------------------------------------------------------------


class Full:
    """A ``train_fn`` for which batches of more than ``most`` samples have no memory."""

    def __init__(self, most):
        self.most = most

    def __call__(self, model, batch):
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("planted: out of memory")
        return mse(model, batch)


def test_no_memory_names_accumulate_and_a_batch_that_fits():
    text = message_of(builder(Full(8), batch_size=16).accumulate(3))
    assert "the batch had 16 samples, none has fitted yet" in text
    assert ".batch_size(8).accumulate(6)" in text


def test_no_memory_with_a_global_batch_names_accumulate_alone():
    b = builder(Full(8), batch_size=None).global_batch_size(64).accumulate(2)
    assert "had 16 samples, none has fitted yet: .accumulate(4) trains" in message_of(b)


def test_no_memory_names_the_largest_batch_that_fitted():
    # Batches of rank 0's own size fit until the short last one has trained.
    calls = []

    def train_fn(model, batch):
        calls.append(len(batch[0]))
        most = 7 if len(calls) == 1 else 2
        return Full(most)(model, batch)

    b = builder(train_fn, data(23), batch_size=7).devices("cpu")
    text = message_of(b)
    assert calls == [7, 7]
    assert "the batch had 7 samples, the largest that fitted had 7" in text


class FullInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.num_samples = len(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.num_samples > 4:
            raise torch.OutOfMemoryError("planted: out of memory")
        return grad


def full_in_forward(x):
    if len(x) > 4:
        raise torch.OutOfMemoryError("planted: out of memory")


@pytest.mark.parametrize("full", [full_in_forward, FullInBackward.apply])
def test_no_memory_in_an_own_loop_names_smaller_batches(full):
    with Trainer.setup(linear(), sgd, ["cpu", "cpu"]) as model:
        model.module.register_forward_hook(lambda _, __, out: full(out))
        model(torch.zeros(8, 3)).sum().backward()
        with pytest.raises(ReplicaFailed, match="had 8 samples, the largest that fitted had 4: p"):
            model(torch.zeros(16, 3)).sum().backward()


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_no_memory_in_accumulate_names_more_batches(devices):
    with Trainer.setup(linear(), sgd, devices) as model:
        model.accumulate(Full(4), [data(4)] * 2)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            model.accumulate(Full(4), [data(8)] * 2)
    text = "".join(traceback.format_exception(caught.value))
    assert "the batch had 8 samples: pass more batches" in text


def test_no_memory_in_train_batch_names_fewer_samples():
    with pytest.raises(ReplicaFailed, match="the batch had 8 samples: pass fewer samples"):
        through_coordinator(data(16), Full(4))


def test_no_memory_in_a_loop_of_a_run_names_the_largest_batch_that_fitted():
    def loop(worker):
        for batch in worker.batches():
            most = 7 if worker.global_step == 0 else 2
            worker.step(Full(most)(worker.model, batch))

    b = Trainer.loop(lambda device: linear().to(device), lambda m: sgd(m.parameters()), loop)
    text = message_of(b.dataset(data(23)).batch_size(7).num_epochs(1).devices("cpu"))
    assert "the batch had 7 samples, the largest that fitted had 7: .batch_size(4)" in text


# -- state between calls -------------------------------------------------------


class Recurrent(nn.Module):
    """Keeps its hidden state, of the size of a batch; one replica's thread is slow."""

    def __init__(self, device=CPU, keep=True):
        super().__init__()
        self.cell, self.keep, self.hidden = nn.GRU(3, 4, batch_first=True), keep, None

    def forward(self, x):
        if threading.current_thread().name.endswith("-1"):
            threading.Event().wait(0.002 * len(x))
        fits = self.keep or self.hidden is None or self.hidden.size(1) == len(x)
        rows, hidden = self.cell(x.unsqueeze(1), self.hidden if fits else None)
        self.hidden = hidden.detach()
        return rows[:, 0]


def loss_of(model, batch):
    return model(batch[0]).square().mean()


def train_recurrent(sizes, keep=True):
    with Trainer.setup(Recurrent(keep=keep), sgd, ["cpu", "cpu"]) as model:
        for size in sizes:
            model(torch.randn(size, 3)).square().mean().backward()
            model.step()


@pytest.mark.parametrize(
    ("sizes", "pieces"), [([16] * 30, r"\d+ to \d+"), ([16, 10], "8 to 5")], ids=["shares", "last"]
)
def test_a_state_of_a_piece_that_has_changed_its_size_is_named_by_an_own_loop(sizes, pieces):
    with pytest.raises(ReplicaFailed) as caught:
        train_recurrent(sizes)
    assert re.search(
        f"the piece of this device has changed from {pieces} samples", str(caught.value)
    )
    assert "by DdpConfig(balance=False) and a loader with drop_last=True, or" in str(caught.value)


def test_a_state_that_is_begun_anew_as_shares_change_is_reported_once(caplog):
    train_recurrent([16] * 40, keep=False)
    (found,) = [r.getMessage() for r in caplog.records if "'hidden' of the model" in r.message]
    assert "change from [8, 8] to [" in found
    caplog.clear()
    train_recurrent([16, 10, 16], keep=False)
    assert "hidden" not in caplog.text


def run_recurrent(own_loop, dataset, policy="sync"):
    def body(worker):
        for batch in worker.batches():
            worker.step(loss_of(worker.model, batch))

    if own_loop:
        b = Trainer.loop(Recurrent, lambda model: sgd(model.parameters()), body)
    else:
        b = Trainer.builder(Recurrent, sgd, loss_of)
    b.dataset(dataset).batch_size(8).num_epochs(1).devices(["cpu", "cpu"]).progress(False)
    if policy == "sync":
        b.balance(True)
    return message_of(b.policy(policy))


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize(
    ("size", "policy", "pieces"),
    [(640, "sync", r"\d+ to \d+"), (26, "sync", "8 to 5"), (37, "cadence", "8 to 5")],
)
def test_a_state_of_a_piece_that_has_changed_its_size_is_named_by_a_run(
    own_loop, size, policy, pieces
):
    text = run_recurrent(own_loop, data(size), policy)
    assert re.search(f"the piece of this device has changed from {pieces} samples", text)
    assert "keep equal pieces, .balance(False), leave a short last batch out, .drop" in text


def test_a_state_of_a_shard_that_has_changed_its_size_is_named_by_a_coordinator():
    with DataParallelCoordinator(Recurrent(), sgd, loss_of, ["cpu", "cpu"]) as coordinator:
        coordinator.train_batch(data(16))
        with pytest.raises(ReplicaFailed, match=r"from 8 to 5 samples.*with drop_last=True"):
            coordinator.train_batch(data(10))


# -- processes -----------------------------------------------------------------


@pytest.mark.parametrize(
    "start",
    [
        lambda: builder().run(),
        lambda: runtime.fit(linear(), data(), optimizer=sgd, batch_size=8, devices="cpu"),
        lambda: Trainer.setup(linear(), sgd, ["cpu", "cpu"]),
        lambda: Trainer.setup(linear(), sgd, "cpu"),
        lambda: Ddp.wrap([linear(), linear()], ["cpu", "cpu"]),
        lambda: DataParallelCoordinator(linear, sgd, mse, ["cpu", "cpu"]),
        lambda: (
            Trainer.loop(linear, lambda model: sgd(model.parameters()), lambda worker: None)
            .dataset(data())
            .batch_size(8)
            .num_epochs(1)
            .run()
        ),
    ],
    ids=[
        "builder",
        "fit",
        "setup",
        "setup on one device",
        "Ddp",
        "DataParallelCoordinator",
        "loop",
    ],
)
def test_a_process_of_torchrun_is_refused_with_the_way_to_start_the_script(monkeypatch, start):
    before = threading.active_count()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE=2.*torchrun.*by python.*cluster"):
        start()
    assert threading.active_count() == before


@pytest.mark.parametrize("value", ["1", "", "many"])
def test_one_process_of_torchrun_trains(monkeypatch, value):
    monkeypatch.setenv("WORLD_SIZE", value)
    assert builder().run().join(WAIT_S).metrics[0].num_samples == N


UNGUARDED = """
import torch
from runtime import Trainer

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.ones(3)

b = Trainer.builder(torch.nn.Linear(3, 1), torch.optim.SGD, lambda m, b: m(b).mean())
b.dataset(Data()).batch_size(8).num_epochs(1).devices("cpu").loader_workers(1).run().join()
"""


def test_a_script_without_a_guard_fails_once_and_names_the_line(tmp_path):
    script = tmp_path / "user.py"
    script.write_text(UNGUARDED)
    done = programs.run(
        [sys.executable, str(script)],
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert "if __name__ == '__main__':" in lines[-1]
    assert [line.startswith("ValueError:") for line in lines].count(True) == 1
    assert len(lines) <= 30


def test_a_run_is_not_started_while_a_child_imports_the_script(monkeypatch):
    import multiprocessing

    process = multiprocessing.current_process()
    monkeypatch.setattr(process, "_inheriting", True, raising=False)
    with pytest.raises(SystemExit, match="__main__"):
        refuse_import_of_main()
    with pytest.raises(SystemExit, match="__main__"):
        builder().run()


def test_notes_of_an_error_are_in_the_message_of_the_run():
    def train_fn(model, batch):
        error = ValueError("planted")
        error.add_note("call plant() first")
        raise error

    assert message_of(builder(train_fn)).endswith("ValueError: planted. call plant() first")


@pytest.fixture(autouse=True)
def _warnings(caplog):
    caplog.set_level(logging.WARNING)


# -- timeouts of collectives ----------------------------------------------------


def reduce_in_a_run():
    builder().policy(SYNC).backend(THREAD).max_failed_rounds(1).run().join(WAIT_S)


def reduce_in_setup():
    with exchanging_gradients("copies"), Trainer.setup(linear(), sgd, ["cpu"] * 2) as model:
        model(data()[0]).sum().backward()
        model.step()


def reduce_in_data_parallel():
    devices, loss = ["cpu"] * 2, lambda model, samples: mse(model, samples)
    with (
        exchanging_gradients("copies"),
        DataParallelCoordinator(linear, sgd, loss, devices) as coordinator,
    ):
        coordinator.train_batch(data())


def reduce_in_ddp():
    models = [linear(), linear()]
    with Ddp.wrap(models, ["cpu"] * 2, AverageBackend.GLOO) as ddp:
        for model in models:
            model(data()[0]).sum().backward()
        ddp.all_reduce_gradients()


def reduce_in_own_threads():
    ends = create_collectives(2)
    try:
        at_once(lambda end: end.all_reduce_(torch.ones(3)), ends)
    finally:
        close_collectives(ends)


def reduce_in_a_subgroup():
    ends = create_collectives(2)
    groups = at_once(lambda end: split(end, 0), ends)
    try:
        at_once(lambda end: end.all_reduce_(torch.ones(3)), groups)
    finally:
        close_collectives([*groups, *ends])


@pytest.mark.parametrize(
    ("door", "remedy"),
    [
        (reduce_in_a_run, r"raise collective_timeout\(s\) if a step can take that long"),
        (reduce_in_setup, r"Trainer.setup_with\(..., config=DdpConfig\(speed_hint=\(rank, ratio"),
        (reduce_in_data_parallel, "pass fewer samples to train_batch, or leave the slower device"),
        (reduce_in_ddp, r"torch.cuda.synchronize\(device\).*backend=AverageBackend.CPU"),
        (reduce_in_own_threads, "pass a longer timeout_s to create_collectives if a step can"),
        (reduce_in_a_subgroup, "pass a longer timeout_s to create_collectives if a step can"),
    ],
)
def test_a_late_rank_names_what_its_door_can_set(monkeypatch, door, remedy):
    """Rank 1 reduces once rank 0 has waited too long."""
    meet, wait, is_late, messages = Rendezvous.meet, AbortableBarrier.wait, threading.Event(), []
    reducing = threading.local()

    def noted(self, rank, request, planner, on_wait=None):
        reducing.now = request.name in ("all_reduce_", "weighted_mean_", "barrier")
        return meet(self, rank, request, planner, on_wait)

    def late(self, rank, timeout_s, action=None, on_wait=None):
        if not getattr(reducing, "now", False):
            return wait(self, rank, timeout_s, action, on_wait)
        if rank == 1:
            assert is_late.wait(WAIT_S)
        try:
            return wait(self, rank, 0.05 if rank == 0 else timeout_s, action, on_wait)
        except CollectiveTimeout as error:
            messages.append(str(error))
            is_late.set()
            raise

    monkeypatch.setattr(Rendezvous, "meet", noted)
    monkeypatch.setattr(AbortableBarrier, "wait", late)
    with pytest.raises(RuntimeError):
        door()
    assert re.search(
        "rank 0 waited 0.05 s in a collective for rank 1; .*: .*" + remedy, messages[0]
    )


# -- a part of a batch without a label --------------------------------------------------

IGNORED = torch.full((N,), -100)
IGNORED[::8] = 1  # a worker's part of each global batch has none
PARTLY_IGNORED = (torch.randn(N, 3), IGNORED)
WITHOUT_LABELS = (
    r"a loss is not finite .* A mean over labels that are not ignored, .* return "
    r"(\(loss, weight\) or worker.step\(loss, weight=weight\)|Weighted\(loss, weight\)), such a "
)


def three_classes(device=CPU):
    return nn.Linear(3, 3)


def mean_of_labels(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def weighted_mean_of_labels(model, batch):
    return Weighted(mean_of_labels(model, batch), (batch[1] != -100).sum())


def train_by(train_fn, way):
    b = builder(train_fn, PARTLY_IGNORED, model=three_classes, batch_size=None)
    b.sampler(range(N)).global_batch_size(8).policy(way[0]).backend(way[1]).run().join(WAIT_S)


def train_in_loop(train_fn, way):
    def loop(worker):
        for batch in worker.batches():
            found = train_fn(worker.model, batch)
            is_weighted = isinstance(found, Weighted)
            worker.step(*((found.loss, found.weight) if is_weighted else (found, None)))

    b = Trainer.loop(three_classes, lambda m: sgd(m.parameters()), loop).dataset(PARTLY_IGNORED)
    b = b.devices(["cpu", "cpu"]).progress(False).num_epochs(1).sampler(range(N))
    b.global_batch_size(8).policy(way[0]).backend(way[1]).run().join(WAIT_S)


def train_by_batches(train_fn, way):
    with DataParallelCoordinator(three_classes, sgd, train_fn, ["cpu", "cpu"]) as coordinator:
        for x, y in zip(*(t.split(8) for t in PARTLY_IGNORED), strict=True):
            coordinator.train_batch((x, y))


@local_ways
@pytest.mark.parametrize("door", [train_by, train_in_loop, train_by_batches])
def test_a_part_without_a_label_leads_to_its_weight(door, way):
    with pytest.raises((WorkerFailed, NonFiniteError), match=WITHOUT_LABELS):
        door(mean_of_labels, way)
    door(weighted_mean_of_labels, way)  # the remedy


# -- data sets that cannot be read as they are -------------------------------------------


class Database(Dataset):
    """Rows of a database, by a connection of the main thread, or of each thread."""

    def __init__(self, path, by_thread=False):
        self.path, self.own = path, threading.local() if by_thread else None
        self.first = self.connect()

    def connect(self):
        return sqlite3.connect(self.path)

    def __len__(self):
        return N

    def __getitem__(self, index):
        connection = self.first
        if self.own is not None:
            connection = self.own.connection = getattr(self.own, "connection", self.connect())
        (value,) = connection.execute("SELECT ?", (int(index),)).fetchone()
        return torch.full((3,), float(value)), torch.ones(1)


class Signals(Database):
    """Sets a handler, which only a main thread may."""

    def __init__(self, path, by_thread=False):
        pass

    def __getitem__(self, index):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        return torch.ones(3), torch.ones(1)


class RowStream(IterableDataset):
    def __init__(self, *arguments):
        self.rows = Database(*arguments)

    def __len__(self):
        return N

    def __iter__(self):
        return (self.rows[i] for i in range(N))


def square(model, batch):
    return model(batch[0]).square().mean()


READERS = {
    "training": lambda ds: builder(dataset=ds).run().join(WAIT_S),
    "validation": lambda ds: builder().val_dataset(ds, fn=square).run().join(WAIT_S),
    "evaluate": lambda ds: builder().run().join(WAIT_S).evaluate(ds, square, ["cpu"] * 2),
    "predict": lambda ds: predict(linear(), ds, devices=["cpu"] * 2),
    "worker.evaluate": lambda ds: evaluated_in_loop(ds),
}


def evaluated_in_loop(dataset):
    def loop(worker):
        for number, batch in enumerate(worker.batches()):
            worker.step(mse(worker.model, batch))
            if number == 1:
                worker.evaluate(dataset, square)

    b = Trainer.loop(linear, lambda model: sgd(model.parameters()), loop).dataset(data())
    b.global_batch_size(8).devices(["cpu"] * 2).num_epochs(1).progress(False).run().join(WAIT_S)


READ_IN_A_THREAD = (
    r"the data set is read in the thread '(prefetch|evaluation|gpu-worker)-\d', not in the main "
    r"one: let __getitem__ .* is a threading.local\(\); or let loader_workers\(n\) read it"
)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # connections that are not closed
@pytest.mark.parametrize(
    ("reader", "kind"),
    [
        (reader, kind)
        for reader in READERS
        for kind in (Database, Signals, RowStream)
        if (reader, kind) != ("validation", RowStream)  # refused as a stream
    ],
)
def test_a_data_set_of_the_main_thread_leads_to_the_remedy(reader, kind, tmp_path):
    read = READERS[reader]
    with pytest.raises((WorkerFailed, EvaluationFailed, sqlite3.Error)) as caught:
        read(kind(tmp_path / "rows.sqlite"))
    assert re.search(READ_IN_A_THREAD, text_of(caught.value))
    if kind is not Signals:
        read(kind(tmp_path / "rows.sqlite", True))  # the remedy


class NoRows(Database):
    def __init__(self):
        pass

    def __len__(self):
        return 0


class NoItems(IterableDataset):
    def __iter__(self):
        return iter(())


EMPTY = {
    "tensors": lambda: data(0),
    "a list": list,
    "a data set": NoRows,
    "a loader": lambda: DataLoader(NoRows(), batch_size=4),
    "a loader with processes": lambda: DataLoader(NoRows(), batch_size=4, num_workers=1),
    "a loader of chosen samples": lambda: DataLoader(
        TensorDataset(*data()), batch_size=4, sampler=SubsetRandomSampler([])
    ),
    "a stream": NoItems,
}
CALLS = {
    "training": r"dataset\(ds\): the data set is empty: give it at least one sample$",
    "validation": r"val_dataset\(ds\): the data set is empty: .*, or leave the call out$",
    "evaluate": r"^evaluate\(ds, fn\): the data set is empty: .*, or leave the call out$",
    "predict": r"predict\(model, ds\): the data set is empty: .*, or leave the call out$",
    "worker.evaluate": r"worker.evaluate\(ds, fn\): the data set is empty: .*, or leave the call",
}


@pytest.mark.parametrize(
    ("reader", "kind"),
    [
        (reader, kind)
        for reader in READERS
        for kind in EMPTY
        if kind != "a stream" or reader in ("training", "evaluate")  # others refuse, or give no row
    ],
)
def test_an_empty_data_set_is_named_by_its_call(reader, kind):
    with pytest.raises((ValueError, WorkerFailed), match=CALLS[reader]):
        READERS[reader](EMPTY[kind]())


def test_an_empty_validation_set_of_fit_is_named():
    x, y = data()
    with pytest.raises(ValueError, match=CALLS["validation"]):
        fit(linear(), (x, y), optimizer=sgd, loss=nn.MSELoss(), val_dataset=[], batch_size=8)
