"""predict() and TrainedState.evaluate(): outputs and means equal those of one plain device."""

from __future__ import annotations

import pickle
import threading
from collections import UserDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

import gpuworker
from runtime import EvaluationFailed, Trainer, Weighted, current_worker, predict, record_scalar
from tests.support.running import SYNC, THREAD, WAIT_S, train

N = 45
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
RANKS = pytest.mark.parametrize("devices", [["cpu"], ["cpu"] * 2, ["cpu"] * 3], ids=len)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.drop = nn.Dropout(0.5)
        self.drop.eval()

    def forward(self, x):
        return self.two(self.drop(self.norm(self.one(x))))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def plain(model, x=X):
    """The outputs of one plain device."""
    modes = {name: sub.training for name, sub in model.named_modules()}
    model.eval()
    with torch.no_grad():
        found = model(x)
    for name, sub in model.named_modules():
        sub.training = modes[name]
    return found


def close(a, b):
    torch.testing.assert_close(a, b)


class Pairs(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return X[index], Y[index]


class Stream(IterableDataset):
    def __iter__(self):
        yield from ((X[i], Y[i]) for i in range(N))


class Batches:
    def __len__(self):
        return N

    def get_batch(self, indices):
        return X[indices], Y[indices]


SOURCES = {
    "tensor": X,
    "array": X.numpy(),
    "columns": (X, Y),
    "samples": [(X[i], Y[i]) for i in range(N)],
    "map style": Pairs(),
    "whole batches": Batches(),
    "stream": Stream(),
    "loader": DataLoader(Pairs(), batch_size=7),
    "shuffling loader": DataLoader(Pairs(), batch_size=7, shuffle=True, drop_last=True),
    "loader of a stream": DataLoader(Stream(), batch_size=7),
}


@RANKS
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_outputs_have_the_order_and_length_of_the_data(net, source, devices):
    close(predict(net, source, devices=devices), plain(net))


def test_a_loader_with_processes_is_read_in_order(net):
    loader = DataLoader(Pairs(), batch_size=7, num_workers=1, shuffle=True)
    close(predict(net, loader, devices=["cpu"] * 2), plain(net))


def test_a_sampler_decides_the_order(net):
    order = torch.randperm(N)[:20].tolist()
    close(predict(net, DataLoader(Pairs(), 7, sampler=order)), plain(net, X[order]))
    drawn = WeightedRandomSampler(torch.ones(N), 10)
    assert len(predict(net, DataLoader(Pairs(), 7, sampler=drawn))) == 10


def test_a_dict_batch_is_passed_by_name_or_whole(net):
    class Named(nn.Module):
        def forward(self, x, scale):
            return x * scale

    class Whole(nn.Module):
        def forward(self, batch):
            return batch["x"] * batch["scale"]

    data = {"x": X, "scale": torch.full((N, 1), 2.0)}
    for model in (Named(), Whole()):
        assert torch.equal(predict(model, data), 2 * X)


@RANKS
def test_every_form_of_output_is_put_together(net, devices):
    Pair = namedtuple("Pair", "logits label")

    def run(fn):
        return predict(net, (X, Y), lambda model, batch: fn(model(batch[0])), devices)

    def whole(out):
        close(out, plain(net))

    whole(run(lambda out: (out, out * 2))[0])
    whole(run(lambda out: {"a": out, "b": None})["a"])
    assert run(lambda out: {"a": out, "b": None})["b"] is None
    whole(run(lambda out: Pair(out, out.argmax(1))).logits)
    whole(run(lambda out: [out, out])[1])
    whole(run(lambda out: out.numpy()))
    items = run(lambda out: [{"row": row} for row in out])
    whole(torch.stack([item["row"] for item in items]))


@RANKS
def test_samples_of_unequal_shapes_become_a_list(devices):
    lengths = torch.arange(1, N + 1)

    def cut(model, batch):
        return torch.ones(len(batch[0]), int(batch[0].max()))

    rows = predict(nn.Identity(), (lengths,), cut, devices, batch_size=4)
    assert [len(row) for row in rows] == [min(N, -(-n // 4) * 4) for n in lengths.tolist()]


@RANKS
def test_each_sample_is_evaluated_once_in_eval_mode_without_gradients(net, devices):
    seen, lock = [], threading.Lock()

    def fn(model, batch):
        assert not any(sub.training for sub in model.modules())
        assert not torch.is_grad_enabled()
        with lock:
            seen.extend(batch[1].tolist())
        return model(batch[0])

    out = predict(net, (X, torch.arange(N)), fn, devices)
    assert sorted(seen) == list(range(N))
    assert not out.requires_grad
    assert [net.training, net.norm.training, net.drop.training] == [True, True, False]
    assert net.norm.num_batches_tracked == 0


def test_a_faster_device_evaluates_more():
    """The slow device holds its batch until the other has evaluated all others."""
    others, num = threading.Event(), {0: 0, 1: 0}
    began = threading.Barrier(2)

    def fn(model, batch):
        rank = current_worker().rank
        num[rank] += 1
        if num[rank] == 1:
            began.wait(WAIT_S)
        if rank == 0:
            assert others.wait(WAIT_S)
        elif num[1] == 8:
            others.set()
        return batch[0]

    predict(nn.Identity(), (X,), fn, ["cpu"] * 2, batch_size=5)
    assert num == {0: 1, 1: 8}


@RANKS
def test_a_batch_without_memory_is_halved(net, devices):
    sizes = []

    def fn(model, batch):
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("planted: out of memory")
        sizes.append(len(batch[0]))
        return model(batch[0])

    for source in ((X, Y), Stream()):
        close(predict(net, source, fn, devices, batch_size=15), plain(net))
    assert max(sizes) == 3
    with pytest.raises(EvaluationFailed, match="out of memory"):
        predict(net, (X, Y), lambda model, batch: fn(model, (batch[0].repeat(9, 1),)), devices)


@RANKS
def test_an_exception_names_the_samples_and_is_the_cause(net, devices):
    def fn(model, batch):
        if 23 in batch[1]:
            raise ValueError("planted")
        return model(batch[0])

    with pytest.raises(EvaluationFailed, match="samples 20 to 29 on cpu: ValueError: planted") as e:
        predict(net, (X, torch.arange(N)), fn, devices, batch_size=10)
    assert isinstance(e.value.__cause__, ValueError)
    assert (e.value.start, e.value.stop) == (20, 30)
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
    assert net.training


def test_a_data_set_that_raises_is_named_as_well(net):
    class Broken(Pairs):
        def __getitem__(self, index):
            if index == 12:
                raise KeyError("planted")
            return super().__getitem__(index)

    with pytest.raises(EvaluationFailed, match="samples 10 to 19"):
        predict(net, Broken(), batch_size=10)


@pytest.mark.parametrize(
    ("fn", "error"),
    [
        (lambda model, batch: model(batch[0]).sum(), "shape"),
        (lambda model, batch: 3, "has a int"),
        (lambda model, batch: None, "is None"),
        (lambda model, batch: {"logits": model(batch[0]), "name": "x"}, "has a str"),
        (lambda model, batch: model(batch[0])[:1], "one row for each sample"),
    ],
)
def test_outputs_without_a_row_for_each_sample_are_refused(net, fn, error):
    with pytest.raises((EvaluationFailed, TypeError, ValueError), match=error):
        predict(net, (X, Y), fn, batch_size=8)


@RANKS
def test_outputs_are_written_to_a_memory_map_an_array_or_a_tensor(net, devices, tmp_path):
    path = tmp_path / "out.npy"
    out = np.lib.format.open_memmap(path, "w+", "float32", (N, 2))
    assert predict(net, X, devices=devices, out=out) is out
    close(torch.from_numpy(np.load(path)), plain(net))
    array, tensor = np.zeros((N, 2), np.float32), torch.zeros(N, 2, dtype=torch.float64)
    assert predict(net, X, devices=devices, out=array) is array
    close(torch.from_numpy(array), plain(net))
    assert predict(net, X, devices=devices, out=tensor) is tensor
    close(tensor.float(), plain(net))


@pytest.mark.parametrize("out", ["out.npy", Path("out.npy"), (np.zeros((N, 2)),), {"a": "b"}])
def test_removed_forms_of_out_name_the_one_that_there_is(net, out):
    before = threading.active_count()
    with pytest.raises(TypeError, match=r"was removed: pass a tensor or memory map to fill, such"):
        predict(net, X, out=out)
    assert threading.active_count() == before


def test_an_array_of_another_shape_is_refused(net):
    with pytest.raises(EvaluationFailed, match=r"out= has the shape \(3, 2\)"):
        predict(net, X, out=np.zeros((3, 2), np.float32))
    with pytest.raises(ValueError, match="a data set with a length"):
        predict(net, Stream(), out=np.zeros((N, 2), np.float32))
    with pytest.raises(EvaluationFailed, match="the output has 2 tensors: return one from fn"):
        predict(net, X, lambda m, b: (m(b[0]), m(b[0])), out=np.zeros((N, 2), np.float32))


def trained():
    return train(
        model=lambda device: Net().to(device),
        optim=lambda params: torch.optim.SGD(params, 0.1),
        train=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        dataset=(X, Y),
        batch_size=8,
        way=(SYNC, THREAD),
    )


@RANKS
def test_a_state_is_predicted_with_by_the_factory_of_its_run(devices):
    state = trained()
    close(predict(state, X, devices=devices), plain(state.model()))
    loaded = pickle.loads(pickle.dumps(state))
    close(predict(loaded, X, devices=devices, model_factory=Net), plain(state.model()))
    with pytest.raises(ValueError, match="model_factory="):
        predict(loaded, X)


def test_a_module_of_another_loop_is_unwrapped(net):
    model = Trainer.setup(net, torch.optim.SGD, ["cpu"] * 2)
    with model:
        close(predict(model, X, devices=["cpu"] * 2), plain(net))


def test_a_module_that_cannot_be_copied_requires_a_factory(net):
    class Alone(Net):
        def __deepcopy__(self, memo):
            raise RuntimeError("planted")

    alone = Alone()
    close(predict(alone, X), plain(alone))
    with pytest.raises(TypeError, match="factory"):
        predict(alone, X, devices=["cpu"] * 2)
    close(predict(alone, X, devices=["cpu"] * 2, model_factory=Net), plain(alone))


def test_wrong_arguments_are_named(net):
    with pytest.raises(TypeError, match="pass a module or a TrainedState"):
        predict(net.state_dict(), X)
    with pytest.raises(TypeError, match="fn"):
        predict(net, X, fn=3)
    with pytest.raises(ValueError, match="batch_size"):
        predict(net, X, batch_size=0)
    assert gpuworker.predict is predict


def test_the_threads_of_the_caller_are_as_before(net):
    before, state = torch.get_num_threads(), torch.get_rng_state()
    predict(net, Pairs(), lambda m, b: m(b[0]) + torch.rand(1), devices=["cpu"] * 2)
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)


# -- evaluate ------------------------------------------------------------------------


def measures(model, batch):
    x, y = batch
    logits = model(x)
    record_scalar("recorded", (logits.argmax(1) == y).float().mean())
    return {
        "loss": nn.functional.cross_entropy(logits, y),
        "accuracy": (logits.argmax(1) == y).float().mean().item(),
    }


@RANKS
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_means_are_those_of_all_samples(devices, batch_size):
    state = trained()
    found = state.evaluate((X, Y), measures, devices, batch_size=batch_size)
    logits = plain(state.model())
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(logits, Y).item(), 1e-6)
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == Y).float().mean().item(), 1e-6)
    assert found["recorded"] == pytest.approx(found["accuracy"])
    assert all(type(value) is float for value in found.values())


@RANKS
def test_weights_of_a_batch_or_of_a_value_count(devices):
    weights = torch.arange(N, dtype=torch.float64)

    def all_alike(model, batch):
        return {"x": (batch[0] * batch[1]).sum() / batch[1].sum()}, batch[1].sum()

    def one(model, batch):
        mean = (batch[0] * batch[1]).sum() / batch[1].sum()
        return {"x": Weighted(mean, batch[1].sum()), "n": 1.0}

    values = torch.randn(N, dtype=torch.float64)
    weights[:8] = 0  # a batch of weight 0, whose mean is NaN
    right = float((values * weights).sum() / weights.sum())
    for fn in (all_alike, one):
        found = trained().evaluate((values, weights), fn, devices, batch_size=8)
        assert found["x"] == pytest.approx(right, 1e-12)


def test_a_train_fn_is_evaluated_as_it_is():
    state = trained()

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def weighted(model, batch):
        return loss(model, batch), len(batch[0])

    one = state.evaluate((X, Y), loss)
    assert set(one) == {"loss"}
    assert state.evaluate((X, Y), weighted)["loss"] == pytest.approx(one["loss"])


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (None, "returned None"),
        ({"x": torch.ones(2)}, "of shape"),
        ({"x": "high"}, "of type str"),
        (({"x": 1.0}, -1), "weight"),
        ("high", "return a dict of means"),
    ],
)
def test_results_that_are_no_means_are_refused(result, error):
    with pytest.raises((EvaluationFailed, TypeError, ValueError), match=error):
        trained().evaluate((X, Y), lambda model, batch: result)


def test_a_state_without_a_factory_requires_one():
    loaded = pickle.loads(pickle.dumps(trained()))
    assert loaded.evaluate((X, Y), measures, model_factory=Net)["loss"] > 0
    with pytest.raises(ValueError, match="model_factory="):
        loaded.evaluate((X, Y), measures)


def strings(model, batch):
    return [str(i) for i in range(len(batch[0]))]


def logits(model, batch):
    return model(batch[0])


def in_turn(first, later):
    """A function for the first batch, and another one for those after it."""
    return lambda model, batch: (first if batch[0][0, 0] == X[0, 0] else later)(model, batch)


@pytest.mark.parametrize(
    ("fn", "out", "words"),
    [
        (in_turn(strings, logits), False, "list of items and, for another batch, tensors"),
        (in_turn(logits, strings), False, "tensors and, for another batch, a list of items"),
        (in_turn(logits, lambda *a: (logits(*a),)), False, "unlike structure"),
        (strings, True, "out= is for tensors"),
    ],
)
def test_outputs_that_cannot_be_put_together_are_refused(net, fn, out, words):
    loader = DataLoader(TensorDataset(X), batch_size=15)
    with pytest.raises(EvaluationFailed) as caught:
        predict(net, loader, fn=fn, devices=["cpu"], out=torch.zeros(N, 2) if out else None)
    assert words in str(caught.value.__cause__)


@pytest.mark.parametrize("out", [None, "an array"])
def test_outputs_of_unequal_shapes_are_a_list_or_refused_for_an_array(net, out):
    array = None if out is None else np.zeros((N, 2), np.float32)
    loader = DataLoader(TensorDataset(X), batch_size=15)
    fn = in_turn(logits, lambda *a: logits(*a)[:, :1])
    if out is None:
        found = predict(net, loader, fn, ["cpu"])
        assert [len(row) for row in found] == [2] * 15 + [1] * 30
    else:
        with pytest.raises(EvaluationFailed) as caught:
            predict(net, loader, fn, ["cpu"], out=array)
        words = "out= holds samples of shape (2,), and an output has samples of shape (1,)"
        assert words in str(caught.value.__cause__)


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


def test_a_stream_without_samples_has_no_outputs(net):
    assert predict(net, Nothing(), devices=["cpu"]) == []


def test_a_mapping_of_another_class_returns_named_means():
    state, found = trained(), []

    def fn(model, batch):
        found.append(float(model(batch[0]).mean()) * len(batch[0]))
        return UserDict(mean=found[-1] / len(batch[0]))

    assert state.evaluate((X, Y), fn)["mean"] == pytest.approx(sum(found) / N)
