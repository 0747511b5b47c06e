"""Evaluations change modes by ``eval()`` and ``train()`` of the model, which layers override."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runtime import KeepBest, Trainer, predict
from runtime.loop import mirror
from tests.support.own_loop import on_cpus
from tests.support.running import WAIT_S

X = torch.randn(64, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X[:, :1].sin()
HELD_OUT = X[48:], Y[48:]
LOADER = DataLoader(TensorDataset(X[:48], Y[:48]), batch_size=16)
EPOCHS = 3


class Adapted(nn.Module):
    """A frozen layer with a trained part, which is merged into its weight in eval mode."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6, dtype=torch.float64).requires_grad_(False)
        self.up = nn.Parameter(torch.zeros(6, 2, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(2, 6, dtype=torch.float64))
        self.merged = False

    def merge(self, merged):
        if merged is not self.merged:
            self.base.weight.data += (1 if merged else -1) * (self.up.data @ self.down.data)
            self.merged = merged

    def train(self, mode=True):
        self.merge(not mode)
        return super().train(mode)

    def forward(self, x):
        return self.base(x) if self.merged else self.base(x) + x @ self.down.T @ self.up.T


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.adapted = Adapted()
        self.kept = nn.BatchNorm1d(6, dtype=torch.float64)
        self.head = nn.Linear(6, 1, dtype=torch.float64)

    def forward(self, x):
        return self.head(self.kept(self.adapted(x)).tanh())


class MergedByOwner(Adapted):
    train = nn.Module.train


class OverridesEval(Net):
    """Merges its layer in its own ``eval()``."""

    def __init__(self):
        super().__init__()
        self.adapted = MergedByOwner()

    def eval(self):
        self.adapted.merge(True)
        return super().eval()

    def train(self, mode=True):
        if mode:
            self.adapted.merge(False)
        return super().train(mode)


def make(kind):
    torch.manual_seed(0)
    net = kind()
    net.kept.eval()  # of a user, who keeps its statistics
    return net


def mse(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def adamw(params):
    return torch.optim.AdamW(params, 0.02)


def plain(net):
    """Held-out losses of a plain loop, which calls ``eval()`` and ``train()``."""
    values, optimizer = [], adamw([p for p in net.parameters() if p.requires_grad])
    for _ in range(EPOCHS):
        net.train()
        net.kept.eval()
        for batch in LOADER:
            optimizer.zero_grad()
            mse(net, batch).backward()
            optimizer.step()
        net.eval()
        values.append(mse(net, HELD_OUT).item())
    net.train()
    return values


def configured(builder, policy="sync", ranks=2):
    return (
        builder.dataset(LOADER)
        .global_batch_size(16)
        .num_epochs(EPOCHS)
        .devices(["cpu"] * ranks)
        .policy(policy)
        .progress(False)
    )


def run(net, configure, **kwargs):
    made = configure(configured(Trainer.builder(net, adamw, mse), **kwargs))
    return made.run().join(WAIT_S)


def by_val_dataset(net, **kwargs):
    state = run(net, lambda b: b.val_dataset(HELD_OUT), **kwargs)
    return [metrics.scalars["val/loss"] for metrics in state.metrics], state.state_dict()


def by_eval_fn(net, **kwargs):
    def eval_fn(model, epoch):
        return {"loss": mse(model, HELD_OUT).item()}

    state = run(net, lambda b: b.eval_fn(eval_fn), **kwargs)
    return [metrics.scalars["eval/loss"] for metrics in state.metrics], state.state_dict()


def by_worker_evaluate(net, policy="sync", ranks=2):
    values = []

    def loop(worker):
        for batch in worker.batches():
            worker.step(mse(worker.model, batch))
            if worker.every(3) and (policy == "sync" or worker.is_first):
                found = worker.evaluate(HELD_OUT, lambda m, b: {"loss": mse(m, b)})
                if worker.is_first:
                    values.append(found["loss"])

    def optim(model):
        return adamw([p for p in model.parameters() if p.requires_grad])

    made = configured(Trainer.loop(net, optim, loop), policy, ranks)
    state = made.run().join(WAIT_S)
    return values, state.state_dict()


def by_setup(net, ranks=2, policy="sync"):
    values = []
    with on_cpus(net, ranks, lambda p: adamw([q for q in p if q.requires_grad])) as model:
        for _ in range(EPOCHS):
            model.train()
            model.kept.eval()
            for batch in LOADER:
                mse(model, batch).backward()
                model.step()
            model.eval()
            assert net.adapted.merged
            values.append(mse(model, HELD_OUT).item())
        model.train()
    return values, net.state_dict()


DOORS = {
    "val_dataset": by_val_dataset,
    "eval_fn": by_eval_fn,
    "worker.evaluate": by_worker_evaluate,
    "setup": by_setup,
}
CASES = [
    *((door, "sync", ranks) for door in DOORS for ranks in (1, 2)),
    *((door, policy, 1) for door in DOORS if door != "setup" for policy in ("cadence", "async")),
]


@pytest.mark.parametrize(("door", "policy", "ranks"), CASES)
@pytest.mark.parametrize("kind", [Net, OverridesEval])
def test_evaluations_equal_those_of_a_plain_loop(kind, door, policy, ranks):
    expected = make(kind)
    wanted = plain(expected)
    values, weights = DOORS[door](make(kind), policy=policy, ranks=ranks)
    assert values == pytest.approx(wanted, rel=1e-9)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(weights[name], value, msg=name)


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("door", ["val_dataset", "eval_fn", "worker.evaluate"])
def test_evaluations_leave_the_layers_of_averaged_replicas_as_they_were(door, policy):
    net = make(Net)
    weight = net.adapted.base.weight.clone()
    _, weights = DOORS[door](net, policy=policy)
    torch.testing.assert_close(weights["adapted.base.weight"], weight)
    assert weights["adapted.up"].any()


def test_the_best_weights_of_a_run_are_those_of_the_best_evaluation():
    best = KeepBest(metric="val/loss", restore=True)
    state = run(make(Net), lambda b: b.val_dataset(HELD_OUT).callbacks(best))
    values = [metrics.scalars["val/loss"] for metrics in state.metrics]
    model = make(Net)
    model.load_state_dict(state.state_dict())
    assert mse(model.eval(), HELD_OUT).item() == pytest.approx(min(values))
    assert state.evaluate(HELD_OUT, mse)["loss"] == pytest.approx(min(values))


def test_a_model_is_trained_in_its_modes_after_checkpoint_fn():
    modes = []

    def train_fn(model, batch):
        modes.append((model.training, model.adapted.merged, model.kept.training))
        return mse(model, batch)

    built = configured(Trainer.builder(make(Net), adamw, train_fn))
    built.checkpoint_fn(lambda version, model: model.eval())
    built.run().join(WAIT_S)
    assert set(modes) == {(True, False, False)}


@pytest.mark.parametrize("epochs", [(2, 4), (2, 3, 4)])
def test_a_layer_that_was_merged_is_so_after_a_resume(tmp_path, epochs):
    net = make(Net)
    nn.init.normal_(net.adapted.up)

    def merge_once(epoch, worker):
        if epoch == 0:
            worker.model.adapted.eval()

    def trained(num_epochs, path):
        built = configured(Trainer.builder(copy.deepcopy(net), adamw, mse))
        built.epoch_fn(merge_once).num_epochs(num_epochs).checkpoint_dir(path)
        if path.exists():
            built.resume(path)
        return built.run().join(WAIT_S).state_dict()

    wanted = trained(4, tmp_path / "whole")
    for num_epochs in epochs:
        found = trained(num_epochs, tmp_path / "parts")
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=name)


@pytest.mark.parametrize("in_eval_mode", [False, True])
def test_predict_leaves_a_module_as_it_was(in_eval_mode):
    net = make(Net)
    nn.init.normal_(net.adapted.up)
    wanted = copy.deepcopy(net).eval()(X).detach()
    if in_eval_mode:
        net.eval()
    before = copy.deepcopy(net)
    found = predict(net, X, devices=["cpu"] * 2)
    torch.testing.assert_close(found, wanted)
    assert [m.training for m in net.modules()] == [m.training for m in before.modules()]
    assert net.adapted.merged is in_eval_mode
    torch.testing.assert_close(net.adapted.base.weight, before.adapted.base.weight)


def test_the_trial_of_a_large_model_leaves_its_weights(monkeypatch):
    monkeypatch.setattr(mirror, "SMALL_MODEL_BYTES", 0)

    class OfTwoInputs(Net):
        def forward(self, x, shift):
            return super().forward(x + shift)

    net = make(OfTwoInputs)
    nn.init.normal_(net.adapted.up)
    weight = net.adapted.base.weight.clone()
    with on_cpus(net) as model:
        model(X, X)
    torch.testing.assert_close(net.adapted.base.weight, weight)


# train() is not called at the start


class Frozen(Net):
    """``train()`` keeps the normalization in eval mode."""

    def train(self, mode=True):
        super().train(mode)
        self.kept.eval()
        return self


def frozen(device=None):
    torch.manual_seed(0)
    return Frozen()


NOT_CALLED = (
    "the model overrides train(), which is not called before training and would set {}: call "
    "model.train() before the run, or in the factory, to train as a loop that begins with it"
)


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if "overrides train()" in r.getMessage()]


@pytest.mark.parametrize("given", [frozen, frozen()], ids=["factory", "module"])
def test_a_model_whose_train_would_change_modes_is_named_once(caplog, given):
    state = run(given, lambda b: b.val_dataset(HELD_OUT))
    assert state.buffers["kept.num_batches_tracked"] > 0
    assert warnings_of(caplog) == [NOT_CALLED.format("model.kept.training = False")]


def test_a_model_whose_train_was_called_trains_as_a_loop_that_begins_with_it(caplog):
    wanted = plain(frozen())
    state = run(lambda device: frozen().train(), lambda b: b.val_dataset(HELD_OUT))
    found = [metrics.scalars["val/loss"] for metrics in state.metrics]
    assert found == pytest.approx(wanted, rel=1e-9)
    assert not warnings_of(caplog)


def test_flags_that_train_would_set_are_named(caplog):
    class Unfreezing(Net):
        def train(self, mode=True):
            self.adapted.base.requires_grad_(mode)
            return super().train(mode)

    run(make(Unfreezing), lambda b: b)
    text = "model.adapted.base.weight.requires_grad = True"
    assert warnings_of(caplog) == [NOT_CALLED.format(text)]


@pytest.mark.parametrize("kind", [Net, OverridesEval])
def test_a_model_whose_train_changes_nothing_is_not_named(caplog, kind):
    run(make(kind).train(), lambda b: b)
    assert not warnings_of(caplog)


def test_the_body_of_a_loop_calls_train_itself(caplog):
    by_worker_evaluate(frozen())
    assert not warnings_of(caplog)
