"""Changes by user code in a run of the builder: equal to one device, or refused by name."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn

import gpuworker
from runtime.replica import train_fn_checks
from tests.support.own_loop import Centred
from tests.support.running import ASYNC, CADENCE, SYNC, THREAD, WAIT_S, builder

POLICIES = [SYNC, CADENCE, ASYNC]
X = torch.randn(32, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X.sum(1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.head = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


def make(change=lambda net: None):
    def factory(device):
        net = Net()
        change(net)
        return net

    return factory


def make_plain(device):
    net = Net()
    net.norm = nn.Identity()
    return net


def mse(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def sgd(params):
    return torch.optim.SGD(params, 0.05, momentum=0.9)


def run(model=None, train=mse, policy=SYNC, ranks=2, optim=sgd, epochs=2, configure=lambda b: b):
    b = builder(
        model=model or make(),
        optim=optim,
        train=train,
        dataset=(X, Y),
        batch_size=16 // ranks if policy is SYNC else 8,
        epochs=epochs,
        ranks=ranks,
        way=(policy, THREAD),
    )
    return configure(b.seed(0)).run().join(WAIT_S)


def refusal(words, **kwargs):
    with pytest.raises(gpuworker.WorkerFailed) as caught:
        run(**kwargs)
    for word in words:
        assert word in str(caught.value)


# Modes and requires_grad


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_part_in_eval_mode_stays_in_eval_mode(policy, ranks):
    modes = []

    def train(model, batch):
        modes.append((model.training, model.norm.training))
        return mse(model, batch)

    state = run(
        make(lambda net: net.norm.eval()),
        train,
        policy,
        ranks,
        configure=lambda b: b.eval_fn(lambda model, epoch: {"loss": 0.0}),
    )
    assert set(modes) == {(True, False)}
    assert state.buffers["norm.running_mean"].abs().max() == 0


def test_a_model_in_eval_mode_is_trained_in_it_with_a_warning(caplog):
    state = run(make(lambda net: net.eval()))
    assert state.buffers["norm.running_mean"].abs().max() == 0
    assert "model.train()" in caplog.text


@pytest.mark.parametrize("policy", POLICIES)
def test_modes_and_requires_grad_continue_after_resume(policy, tmp_path):
    found = []

    def epoch_fn(epoch, worker):
        if epoch == 0:
            worker.model.norm.eval()
            worker.model.body.requires_grad_(False)

    def train(model, batch):
        found.append((model.norm.training, model.body.weight.requires_grad))
        return mse(model, batch)

    def configure(b):
        return b.epoch_fn(epoch_fn).checkpoint_dir(tmp_path)

    run(train=train, policy=policy, epochs=1, configure=configure)
    found.clear()
    run(train=train, policy=policy, configure=lambda b: configure(b).resume(tmp_path))
    assert set(found) == {(False, False)}


def test_a_frozen_parameter_of_one_of_several_optimizers_stays_frozen():
    def epoch_fn(epoch, worker):
        worker.model.body.bias.requires_grad_(False)

    state = run(
        optim={"body": sgd, "head": sgd},
        train={"body": mse, "head": mse},
        configure=lambda b: b.epoch_fn(epoch_fn),
    )
    assert torch.equal(state.params["body.bias"], Net().body.bias.data)
    assert not torch.equal(state.params["body.weight"], Net().body.weight.data)


# Structure


def unfreeze(worker):
    worker.model.body.requires_grad_(True)
    worker.optimizer.add_param_group({"params": list(worker.model.body.parameters())})


def add_group(worker):
    worker.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def replace(worker):
    worker.model.head.weight = nn.Parameter(worker.model.head.weight.detach().clone())


def tie(worker):
    worker.model.norm.bias = worker.model.norm.weight


def parametrise(worker):
    nn.utils.parametrizations.weight_norm(worker.model.head)


def add_layer(worker):
    worker.model.extra = nn.Linear(3, 3, dtype=torch.float64)


def add_frozen_layer(worker):
    add_layer(worker)
    worker.model.extra.requires_grad_(False)


def add_buffer(worker):
    worker.model.register_buffer("count", torch.zeros(1))


def grow(worker):
    worker.model.norm.running_mean = torch.zeros(5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unfreeze, ("'body.weight'", "unfrozen", "model_factory", "epoch_fn(0)")),
        (add_group, ("parameter group 1", "optimizer")),
        (replace, ("'head.weight'", "replaced", "copy_")),
        (tie, ("'norm.bias'", "replaced")),
        (parametrise, ("'head.weight'", "parametrizations", "model_factory")),
        (add_layer, ("'extra.weight'", "added")),
        (add_frozen_layer, ("'extra.weight'", "added")),
        (add_buffer, ("'count'", "added", "persistent=False")),
        (grow, ("'norm.running_mean'", "shape", "fixed")),
    ],
)
def test_a_change_of_structure_is_refused_by_name(policy, change, words):
    def epoch_fn(epoch, worker):
        if epoch == 1:
            change(worker)

    frozen = change is unfreeze
    refusal(
        words,
        model=make(lambda net: net.body.requires_grad_(not frozen)),
        policy=policy,
        configure=lambda b: b.epoch_fn(epoch_fn),
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_schedule_in_force_continues_without_an_added_group(policy, scale):
    rates = []

    def optim(params):
        return torch.optim.SGD(params[:2], 0.05)

    def epoch_fn(epoch, worker):
        if epoch == 0:
            worker.set_lr_scale(scale)
        if epoch == 1:
            added = {"params": [worker.model.head.weight], "lr": 0.01}
            worker.optimizer.add_param_group(added)

    def train(model, batch):
        worker = gpuworker.current_worker()
        if worker.current_epoch:
            groups = worker.optimizer.param_groups
            rates.append((worker.global_step, groups[0]["lr"], groups[1]["lr"]))
        return mse(model, batch)

    def scheduled(b):
        b.scheduler(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
        return b.epoch_fn(epoch_fn)

    run(train=train, optim=optim, configure=scheduled, policy=policy)
    assert rates
    for position, first, added in rates:
        if policy is SYNC:  # elsewhere positions of ranks differ
            assert first == pytest.approx(scale * 0.05 * 0.5**position)
        assert math.log2(first / (scale * 0.05)) == pytest.approx(
            round(math.log2(first / (scale * 0.05)))
        )
        assert added == 0.01
    assert policy is not SYNC or len({first for _, first, _ in rates}) > 1


@pytest.mark.parametrize("policy", POLICIES)
def test_unfreezing_parameters_frozen_by_epoch_fn_equals_one_device(policy):
    def epoch_fn(epoch, worker):
        worker.model.body.requires_grad_(epoch > 0)

    eval_norm = make(lambda net: net.norm.eval())
    states = [
        run(eval_norm, policy=policy, ranks=ranks, configure=lambda b: b.epoch_fn(epoch_fn))
        for ranks in (1, 2)
    ]
    one, two = (state.params["body.weight"] for state in states)
    assert not torch.equal(two, Net().body.weight.data)
    if policy is SYNC:
        torch.testing.assert_close(one, two)


# Buffers


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_float8_and_expanded_buffers_are_kept(policy, ranks):
    def change(net):
        net.register_buffer("low", torch.randn(3, 3).to(torch.float8_e4m3fn))
        net.register_buffer("mask", torch.full((1, 4), 2.0).expand(3, 4))

    expected = Net()
    change(expected)
    state = run(make(change), policy=policy, ranks=ranks).state_dict()
    assert torch.equal(state["low"].float(), expected.low.float())
    assert torch.equal(state["mask"], expected.mask)


def test_a_float8_buffer_that_changes_is_refused_by_name():
    def change(net):
        net.register_buffer("low", torch.zeros(3).to(torch.float8_e4m3fn))

    def train(model, batch):
        model.low = torch.ones(3).to(torch.float8_e4m3fn)
        return mse(model, batch)

    refusal(("'low'", "float8_e4m3fn", "float32"), model=make(change), train=train)


# Gradients made by train_fn


def backward_of_a_part(model, batch):
    loss = mse(model, batch)
    (0.5 * loss).backward(retain_graph=True)
    return 0.5 * loss


def zero_grad(model, batch):
    model.zero_grad()
    return mse(model, batch)


def zero_grad_in_place(model, batch):
    model.zero_grad(set_to_none=False)
    return mse(model, batch)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("train", [backward_of_a_part, zero_grad, zero_grad_in_place])
def test_gradients_that_train_fn_changes_are_refused_with_accumulation(policy, train):
    refusal(
        ("train_fn", "backward()", "zero_grad()", "accumulate"),
        train=train,
        policy=policy,
        configure=lambda b: b.accumulate(2),
    )


@pytest.mark.parametrize("train", [backward_of_a_part, zero_grad])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_that_train_fn_changes_are_right_without_accumulation(train, policy):
    ranks = 2 if policy is SYNC else 1  # else batches have no fixed owner
    got, expected = (run(train=f, policy=policy, ranks=ranks).params for f in (train, mse))
    torch.testing.assert_close(got, expected)


def test_a_later_backward_of_a_part_is_refused_with_accumulation():
    def train(model, batch):
        late = gpuworker.current_worker().local_step >= 4
        return (backward_of_a_part if late else mse)(model, batch)

    refusal(("train_fn", "backward()"), train=train, epochs=8, configure=lambda b: b.accumulate(2))


def steps_in_backward(net):
    for p in net.parameters():
        optimizer = torch.optim.SGD([p], 0.05)

        def hook(p, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(hook)


def no_step(params):
    return torch.optim.SGD(params, 0.0)


def test_an_optimizer_in_backward_is_refused_where_gradients_are_reduced():
    refusal(("a hook", "optim_factory", "cadence"), model=make(steps_in_backward), optim=no_step)


@pytest.mark.parametrize(("policy", "ranks"), [(SYNC, 1), (CADENCE, 2), (ASYNC, 2)])
def test_an_optimizer_in_backward_trains_elsewhere_with_a_warning(policy, ranks, caplog):
    state = run(make(steps_in_backward), policy=policy, ranks=ranks, optim=no_step)
    assert not torch.equal(state.params["head.weight"], Net().head.weight.data)
    assert sum("checkpoints do not contain" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["module", "tensor"])
def test_parameters_outside_the_model_are_named_once(policy, kind, caplog):
    criterion = nn.Linear(1, 1, dtype=torch.float64)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    def train(model, batch):
        out = model(batch[0])
        out = criterion(out) if kind == "module" else out * scale
        return nn.functional.mse_loss(out, batch[1])

    run(train=train, policy=policy)
    warnings = [r.getMessage() for r in caplog.records if "outside the model" in r.getMessage()]
    assert len(warnings) == 1
    assert "model.criterion = criterion" in warnings[0]


def test_inputs_and_parts_of_the_model_that_require_gradients_are_not_named(caplog):
    def train(model, batch):
        x = batch[0].clone().requires_grad_()
        return nn.functional.mse_loss(model(x), batch[1])

    caplog.set_level(logging.WARNING)
    run(train=train)
    assert "outside the model" not in caplog.text


def test_graphs_are_searched_for_other_parameters_in_the_first_steps_only(monkeypatch):
    searched, leaves = [], train_fn_checks._leaves
    monkeypatch.setattr(
        train_fn_checks, "_leaves", lambda loss: (searched.append(loss), leaves(loss))[1]
    )
    run(ranks=1)
    assert len(searched) == 2


# The given module


@pytest.mark.parametrize("policy", POLICIES)
def test_a_given_module_receives_the_trained_weights(policy):
    net = Net()
    state = run(net, policy=policy)
    for name, value in net.state_dict().items():
        assert torch.equal(value, state.state_dict()[name]), name


def test_a_given_module_keeps_its_weights_if_the_run_fails():
    def train(model, batch):
        if gpuworker.current_worker().local_step == 2:
            raise OSError("planted")
        return mse(model, batch)

    net = Net()
    refusal(("planted",), model=net, train=train)
    for name, value in net.state_dict().items():
        assert torch.equal(value, Net().state_dict()[name]), name


@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_added_in_an_epoch_is_there_after_resume(policy, tmp_path):
    def optim(params):
        return torch.optim.SGD(params[-2:], 0.05, momentum=0.9)

    def epoch_fn(epoch, worker):
        if epoch == 1:
            group = {"params": list(worker.model.body.parameters()), "lr": 0.01}
            worker.optimizer.add_param_group(group)
        groups.append([g["lr"] for g in worker.optimizer.param_groups])

    groups: list[list[float]] = []

    def configure(path):
        return lambda b: b.epoch_fn(epoch_fn).checkpoint_dir(tmp_path / path)

    ranks = 2 if policy is SYNC else 1  # else batches have no fixed owner
    runs = {"policy": policy, "ranks": ranks, "optim": optim}
    whole = run(epochs=4, configure=configure("whole"), **runs)
    run(epochs=2, configure=configure("part"), **runs)
    groups.clear()
    resumed = run(
        epochs=4, configure=lambda b: configure("part")(b).resume(tmp_path / "part"), **runs
    )
    assert groups == [[0.05, 0.01]] * (2 * ranks)
    torch.testing.assert_close(resumed.params, whole.params)


@pytest.mark.parametrize("bucket_mb", [None, 0.0001])
def test_a_hook_added_in_an_epoch_acts_before_the_reduction(bucket_mb):
    def double(p):
        p.grad.mul_(2)

    def epoch_fn(epoch, worker):
        if epoch == 1:
            for p in worker.model.parameters():
                p.register_post_accumulate_grad_hook(double)

    eval_norm = make(lambda net: net.norm.eval())
    one, two = (
        run(
            eval_norm,
            ranks=ranks,
            epochs=3,
            configure=lambda b: b.epoch_fn(epoch_fn).bucket_cap_mb(bucket_mb),
        ).params
        for ranks in (1, 2)
    )
    torch.testing.assert_close(one, two)


# Batches with fewer rows than samples


def kept(samples):
    """Every fifth sample is broken, and left out."""
    return torch.utils.data.default_collate([s for s in samples if int(s[2]) % 5])


def collated(b, collate_fn=kept):
    samples = [(x, y, i) for i, (x, y) in enumerate(zip(X, Y, strict=True))]
    return b.dataset(samples).collate_fn(collate_fn)


def weighted(model, batch):
    return mse(model, batch), len(batch[0])


def test_batches_that_leave_out_samples_train_as_one_device_by_the_number_of_rows(caplog):
    states = [
        run(train=weighted, ranks=ranks, configure=collated, model=make_plain) for ranks in (1, 2)
    ]
    for name, p in states[0].params.items():
        torch.testing.assert_close(states[1].params[name], p)
    assert "rows" not in caplog.text


def nested(samples):
    x, y, _ = zip(*samples, strict=True)
    return torch.nested.nested_tensor([row[: 1 + i % 3] for i, row in enumerate(x)]), torch.stack(y)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_batches_with_a_nested_tensor_are_trained(caplog):
    def padded(model, batch):
        return nn.functional.mse_loss(model(batch[0].to_padded_tensor(0.0)), batch[1])

    run(train=padded, model=make_plain, configure=lambda b: collated(b, nested))
    assert "rows" not in caplog.text


def body(worker):
    for batch in worker.batches():
        worker.step(mse(worker.model, batch))


@pytest.mark.parametrize("door", ["train_fn", "loop"])
def test_batches_that_leave_out_samples_are_reported_without_a_weight(door, caplog):
    if door == "train_fn":
        run(configure=collated, model=make_plain)
    else:
        b = gpuworker.Trainer.loop(make_plain, lambda model: sgd(model.parameters()), body)
        b.batch_size(8).num_epochs(2).devices(["cpu"] * 2).policy("sync").progress(False)
        collated(b).run().join(WAIT_S)
    found = [each for each in caplog.records if "leaves out samples" in each.message]
    assert 1 <= len(found) <= 2  # one for each rank


@pytest.mark.parametrize(
    "collate",
    [
        torch.utils.data.default_collate,
        lambda samples: torch.stack([s[0] for s in samples], 1)[: 2 + len(samples) % 2],
        lambda samples: [s[0] for s in samples],
        lambda samples: (torch.cat([s[0] for s in samples]), torch.stack([s[1] for s in samples])),
        lambda samples: torch.stack([s[0] for s in samples for _ in range(2)]),
    ],
    ids=["default", "sequence first", "list", "tokens", "two views"],
)
def test_batches_in_another_form_are_not_reported(collate, caplog):
    def loss(model, batch):
        parts = batch if isinstance(batch, (list, tuple)) else [batch]
        sums = torch.stack([part.sum() for part in parts])
        return model.head(sums.sum() * torch.ones(1, 4, dtype=torch.float64)).square().mean() * 1e-6

    run(train=loss, configure=lambda b: collated(b, collate), model=make_plain)
    assert "rows" not in caplog.text


def test_steps_of_single_sequences_are_not_reported_as_rows(caplog):
    sequences = [torch.randn(2 + i % 3, 4, dtype=torch.float64) for i in range(8)]
    run(
        train=lambda model, x: model.head(x).square().mean(),
        configure=lambda b: b.dataset(sequences).batch_size(1).collate_fn(lambda s: s[0]),
        model=make_plain,
    )
    assert "rows" not in caplog.text


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.parametrize("policy", POLICIES)
def test_batches_of_sparse_tensors_are_trained(layout, policy):
    def collate(samples):
        x, y, _ = torch.utils.data.default_collate(samples)
        return x.to_sparse(layout=layout), y

    def loss(model, batch):
        assert batch[0].layout is layout
        return mse(model, (batch[0].to_dense(), batch[1]))

    state = run(train=loss, policy=policy, configure=lambda b: collated(b, collate))
    assert [m.num_samples for m in state.metrics] == [len(X)] * 2


# Buffers that each rank computes from its own samples


@pytest.mark.parametrize("of_samples", [True, False])
@pytest.mark.parametrize("policy", [SYNC, CADENCE])
def test_buffers_that_depend_on_the_ranks_samples_are_named_once_under_sync(
    of_samples, policy, caplog
):
    run(lambda device: Centred(3, 1, of_samples=of_samples), policy=policy, epochs=3)
    found = [each for each in caplog.records if "buffer 'centre' differs" in each.message]
    assert len(found) == (of_samples and policy is SYNC)


def test_statistics_of_batch_normalization_are_not_reported(caplog):
    run()
    assert "buffer" not in caplog.text
