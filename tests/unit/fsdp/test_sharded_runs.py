"""Runs with ``sharded(strategy)``: equal to one device, resumed at any number of workers."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from runtime import (
    ReplicaMismatch,
    ShardingStrategy,
    Trainer,
    Weighted,
    WorkerFailed,
    current_worker,
)
from runtime.checkpoint.content import ShardFacts
from runtime.checkpoint.optimizer_shards import check_shards
from runtime.checkpoint.store import load_newest
from tests.support.checkpointing import saved_rank
from tests.support.pairs import diagonal, pairwise
from tests.support.running import GLOO, SYNC, THREAD, WAIT_S

N, EPOCHS, GLOBAL_BATCH = 26, 2, 12  # the last batch of an epoch has 2 samples
STEPS = 3 * EPOCHS
X = torch.randn(N, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
DATA = (X, X.sum(1, keepdim=True).sin(), torch.arange(N))
FULL, GRADS, NONE, HYBRID = ShardingStrategy
SHARDED = [(FULL, None), (GRADS, None), (HYBRID, 1)]
TOLERANCE = {"rtol": 0.0, "atol": 1e-8}


class Net(nn.Module):
    """Parameters of uneven sizes, a tied, an unused and a frozen one, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7, affine=False, momentum=None)
        self.second = nn.Linear(7, 7)
        self.second.bias = self.first.bias
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.last = nn.Linear(7, 1)

    def forward(self, x):
        x = torch.tanh(self.first(x) * self.frozen)
        with torch.no_grad():
            self.norm(x)
        return self.last(torch.tanh(self.second(x))) * self.scale


def net(device):
    torch.manual_seed(3)
    return Net().double().to(device)


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def adamw(params):
    return torch.optim.AdamW(params, 1e-2)


class Prepared(torch.optim.Adagrad):
    """An optimizer that makes its state of the parameters when it is built."""

    def __init__(self, params):
        super().__init__(params, 0.1)
        for p, state in self.state.items():
            state["sum"].add_(p.detach().abs())


def loss_of(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def sum_of(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).sum()


def weighted(model, batch):
    weights = batch[2].double() % 4  # some samples count nothing
    loss = ((model(batch[0]) - batch[1]) ** 2).squeeze(1) * weights
    return Weighted(loss.sum() / weights.sum().clamp(min=1e-12), weights.sum())


def body(worker):
    for batch in worker.batches():
        worker.step(loss_of(worker.model, batch))


def accumulating_body(worker):
    for number, batch in enumerate(worker.batches()):
        worker.backward(loss_of(worker.model, batch) / 2)
        if number % 2:
            worker.step()


def complete(made, ranks, strategy, *, epochs=EPOCHS):
    made = made.dataset(DATA).global_batch_size(GLOBAL_BATCH).num_epochs(epochs).seed(1)
    made.devices(["cpu"] * ranks).policy(SYNC).backend(THREAD).collective_timeout(WAIT_S)
    if strategy is not None:
        made.sharded(*strategy)
    return made.tune_allocator(False).progress(False)


def builder(ranks, strategy=None, *, train=loss_of, optim=adamw, epochs=EPOCHS):
    return complete(Trainer.builder(net, optim, train), ranks, strategy, epochs=epochs)


def looping(ranks, strategy=None, *, loop=body, optim=adamw):
    made = Trainer.loop(net, lambda model: optim(trainable(model)), loop)
    return complete(made, ranks, strategy)


def finish(made):
    return made.run().join(WAIT_S)


def assert_close(state, other):
    assert state.params.keys() == other.params.keys()
    for name, value in state.params.items():
        torch.testing.assert_close(value, other.params[name], **TOLERANCE, msg=name)


def assert_same(state, other):
    for name, value in state.params.items():
        assert torch.equal(value, other.params[name]), name
    ours, theirs = ([m.avg_loss for m in each.metrics] for each in (state, other))
    assert ours == theirs


CASES = {
    "plain": (lambda *way: builder(*way), lambda b: b),
    "accumulated": (lambda *way: builder(*way), lambda b: b.accumulate(2)),
    "clipped": (lambda *way: builder(*way), lambda b: b.max_grad_norm(0.05)),
    "weighted": (lambda *way: builder(*way, train=weighted), lambda b: b),
    "weighted, accumulated": (
        lambda *way: builder(*way, train=weighted),
        lambda b: b.accumulate(2),
    ),
    "sum": (
        lambda *way: builder(*way, train=sum_of),
        lambda b: b.loss_reduction("sum").max_grad_norm(1.0),
    ),
    "bf16": (lambda *way: builder(*way), lambda b: b.precision("bf16")),
    "state at construction": (
        lambda *way: builder(*way, optim=Prepared),
        lambda b: b,
    ),
    "scheduler": (
        lambda *way: builder(*way),
        lambda b: b.scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5)),
    ),
    "loop": (lambda *way: looping(*way), lambda b: b.max_grad_norm(0.05)),
    "loop, accumulated": (lambda *way: looping(*way), lambda b: b.accumulate(2)),
    "loop, backward by hand": (
        lambda *way: looping(*way, loop=accumulating_body),
        lambda b: b.drop_last(True),
    ),
}


@pytest.fixture(scope="module")
def one_device():
    states = {}

    def state(case):
        if case not in states:
            make, configure = CASES[case]
            states[case] = finish(configure(make(1)))
        return states[case]

    return state


@diagonal(
    case=list(CASES),
    way=[
        (1, SHARDED[0]),
        *((3, s) for s in SHARDED),
        (2, SHARDED[0]),
        (2, (NONE, None)),
        (3, (HYBRID, 3)),
    ],
)
def test_a_sharded_run_equals_one_device(case, way, one_device):
    make, configure = CASES[case]
    state = finish(configure(make(*way)))
    assert_close(state, one_device(case))
    assert [m.num_samples for m in state.metrics] == [
        m.num_samples for m in one_device(case).metrics
    ]


def test_two_nodes_of_two_workers_equal_one_device(one_device):
    state = finish(builder(4, (HYBRID, 2)).max_grad_norm(0.05))
    assert_close(state, one_device("clipped"))


def test_each_sample_is_trained_once_in_an_epoch():
    lock, seen = threading.Lock(), []

    def train(model, batch):
        with lock:
            seen.extend(batch[2].tolist())
        return loss_of(model, batch)

    finish(builder(3, (FULL, None), train=train))
    assert sorted(seen) == sorted([*range(N)] * EPOCHS)


@pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s[0].name)
def test_each_worker_has_a_part_of_the_optimizer_state(strategy):
    sizes = {}

    def look(epoch, worker):
        state = worker.optimizer.state.values()
        sizes[worker.rank] = sum(s["exp_avg"].numel() for s in state)

    finish(builder(3, strategy, optim=adamw).epoch_fn(look))
    trained = {n: p for n, p in net("cpu").named_parameters() if n not in ("unused", "frozen")}
    whole = sum(p.numel() for p in trained.values())
    if strategy[0] is HYBRID:  # nodes of one worker
        assert set(sizes.values()) == {whole}
    else:
        assert sum(sizes.values()) == whole
        assert max(sizes.values()) < 0.5 * whole


@pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s[0].name)
def test_parameter_groups_are_made_by_full_shapes(strategy):
    def decaying(params):
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.5},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, 1e-2)

    expected = finish(builder(1, optim=decaying))
    assert_close(finish(builder(2, strategy, optim=decaying)), expected)
    assert_close(finish(looping(2, strategy, optim=decaying)), expected)


@pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s[0].name)
def test_values_that_user_code_writes_to_parameters_are_kept(strategy):
    def clamp(epoch, worker):
        with torch.no_grad():
            for p in worker.model.parameters():
                p.clamp_(-0.1, 0.1)

    def clamping(worker):
        for batch in worker.batches():
            worker.step(loss_of(worker.model, batch))
            for p in worker.model.parameters():
                p.data.clamp_(-0.2, 0.2)

    expected = finish(builder(1).epoch_fn(clamp))
    assert_close(finish(builder(3, strategy).epoch_fn(clamp)), expected)
    found = finish(looping(2, strategy, loop=clamping).drop_last(True))
    expected = finish(looping(1, loop=clamping).drop_last(True))
    assert_close(found, expected)


@pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s[0].name)
def test_evaluations_and_checkpoint_fn_see_the_whole_model(strategy):
    def mean_of(model):
        return {"loss": float(loss_of(model, DATA).detach())}

    def run(ranks, *way):
        seen = []
        made = builder(ranks, *way).eval_fn(lambda model, epoch: mean_of(model))
        made.val_dataset(DATA, fn=lambda model, batch: {"loss": loss_of(model, batch)})
        made.checkpoint_every(1).checkpoint_fn(lambda version, model: seen.append(mean_of(model)))
        state = finish(made)
        rows = [m.scalars | {"seen": s["loss"]} for m, s in zip(state.metrics, seen, strict=True)]
        return state, [[row[name] for row in rows] for name in ("eval/loss", "val/loss", "seen")]

    one, expected = run(1)
    state, found = run(3, strategy)
    assert_close(state, one)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-8)


@pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s[0].name)
def test_a_loop_evaluates_on_all_workers(strategy):
    def run(ranks, *way):
        found = []

        def loop(worker):
            for batch in worker.batches():
                worker.step(loss_of(worker.model, batch))
                if worker.every(2):
                    means = worker.evaluate(DATA, lambda m, b: {"loss": loss_of(m, b)})
                    if worker.is_first:
                        found.append(means["loss"])

        return finish(looping(ranks, *way, loop=loop)), found

    one, expected = run(1)
    state, found = run(3, strategy)
    assert_close(state, one)
    assert found == pytest.approx(expected, abs=1e-8)
    assert len(found) == STEPS // 2


# Checkpoints.


def stopped(made, path, at):
    """Run up to a step; the last state is saved."""
    return finish(made.max_steps(at).checkpoint_dir(path))


@pairwise(make=[builder, looping], strategy=SHARDED, at=[1, 4])
def test_a_run_stopped_within_an_epoch_resumes_to_the_bit(make, strategy, at, tmp_path):
    straight = finish(make(3, strategy).max_grad_norm(0.1))
    stopped(make(3, strategy).max_grad_norm(0.1), tmp_path, at)
    resumed = finish(make(3, strategy).max_grad_norm(0.1).resume(tmp_path))
    assert_same(resumed, straight)


LAYOUTS = [  # of the run that wrote a checkpoint, and of the one that reads it
    ((3, (FULL, None)), (2, (FULL, None))),
    ((3, (FULL, None)), (1, (FULL, None))),
    ((3, (FULL, None)), (2, None)),
    ((3, (GRADS, None)), (1, None)),
    ((2, None), (3, (FULL, None))),
    ((1, None), (2, (GRADS, None))),
    ((4, (HYBRID, 2)), (3, (FULL, None))),
    ((2, (FULL, None)), (4, (HYBRID, 2))),
]


@pytest.mark.parametrize(
    ("layouts", "optim"),
    [
        *((layouts, adamw) for layouts in LAYOUTS),
        *((layouts, lambda p: torch.optim.NAdam(p, 1e-2)) for layouts in LAYOUTS[2:5:2]),
        *((layouts, lambda p: torch.optim.Rprop(p, 1e-2)) for layouts in LAYOUTS[2:5:2]),
    ],
)
def test_a_checkpoint_loads_at_another_number_of_workers(layouts, optim, tmp_path):
    wrote, reads = layouts
    expected = finish(builder(1, optim=optim))
    stopped(builder(*wrote, optim=optim), tmp_path, 4)
    assert_close(finish(builder(*reads, optim=optim).resume(tmp_path)), expected)


def test_a_checkpoint_keeps_the_elements_of_parameters_with_other_strides(tmp_path):
    def model(device):
        torch.manual_seed(3)
        layers = nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 1)
        return nn.Sequential(*layers).double().to(device, memory_format=torch.channels_last)

    images = torch.randn(24, 2, 2, 2, dtype=torch.float64)
    data = images, images.sum((1, 2, 3))[:, None]

    def made(ranks, *way):
        b = complete(Trainer.builder(model, adamw, loss_of), ranks, *way or (None,))
        return b.dataset(data)

    expected = finish(made(1))
    stopped(made(3, (FULL, None)), tmp_path, 2)
    assert_close(finish(made(2).resume(tmp_path)), expected)


def by_rank(*factories):
    """An optimizer factory that is another one on each rank."""
    order = itertools.cycle(factories)
    return lambda params: next(order)(params)


def in_order(step):
    def optim(params):
        return torch.optim.AdamW([{"params": list(params)[::step]}], 1e-2)

    return optim


def in_groups(step):
    """A group with weight decay and one without, in this order or the other."""

    def optim(params):
        params = list(params)
        groups = {"params": params[:3], "weight_decay": 0.5}, {"params": params[3:]}
        return torch.optim.AdamW(groups[::step], 1e-2, weight_decay=0.0)

    return optim


@pytest.mark.parametrize("make", [in_order, in_groups])
@diagonal(strategy=SHARDED, reads=[2, 1])
def test_ranks_may_hold_their_parameters_in_another_order(make, strategy, reads, tmp_path):
    expected = finish(builder(1, optim=make(1)))
    assert_close(finish(builder(2, strategy, optim=by_rank(make(1), make(-1)))), expected)
    stopped(builder(2, strategy, optim=by_rank(make(1), make(-1))), tmp_path, 4)
    made = builder(reads, strategy if reads > 1 else None, optim=by_rank(make(1), make(-1)))
    assert_close(finish(made.resume(tmp_path)), expected)


@pytest.mark.parametrize(
    "other",
    [
        lambda params: torch.optim.AdamW([{"params": params}], 1e-2, weight_decay=0.0),
        lambda params: torch.optim.AdamW(list(params)[1:], 1e-2, weight_decay=0.5),
    ],
    ids=["other settings", "one parameter less"],
)
@pytest.mark.parametrize("strategy", SHARDED[:2], ids=lambda s: s[0].name)
def test_ranks_that_train_a_parameter_with_other_settings_are_noticed(strategy, other):
    made = builder(2, strategy, optim=by_rank(in_groups(1), other))
    with pytest.raises(ReplicaMismatch, match="the optimizer's setting for 'scale' of rank 1"):
        finish(made)


def test_a_scheduler_that_a_rank_without_samples_does_not_step_is_noticed():
    """The last step of an epoch has 2 samples for 3 ranks."""

    def loop(worker):
        rates = torch.optim.lr_scheduler.LambdaLR(worker.optimizer, lambda step: 0.9**step)
        for batch in worker.batches():
            worker.step(loss_of(worker.model, batch))
            rates.step()

    with pytest.raises(ReplicaMismatch, match="setting for 'scale' of rank 1, 2 differs"):
        finish(looping(3, (FULL, None), loop=loop))


@diagonal(strategy=SHARDED, loops=[False, True])
def test_a_run_that_failed_in_user_code_resumes_where_it_stopped(strategy, loops, tmp_path):
    def fail(model, batch):
        worker = current_worker()
        if failing and worker.replica.lockstep.step == 4 and worker.rank == 1:
            raise OSError("planted")
        return loss_of(model, batch)

    def loop(worker):
        for batch in worker.batches():
            worker.step(fail(worker.model, batch))

    def made():
        return looping(3, strategy, loop=loop) if loops else builder(3, strategy, train=fail)

    failing = False
    straight = finish(made())
    failing = True
    handle = made().checkpoint_dir(tmp_path).run()
    with pytest.raises(WorkerFailed, match="planted"):
        handle.join(WAIT_S)
    newest = load_newest(tmp_path).data
    assert (newest.reason, newest.global_step) == ("failed", 4)
    failing = False
    assert_same(finish(made().resume(tmp_path)), straight)


@pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s[0].name)
def test_a_run_that_failed_in_the_optimizer_keeps_its_earlier_checkpoint(strategy, tmp_path):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.num_steps = getattr(self, "num_steps", 0) + 1
            if self.num_steps == 5 and threading.current_thread().name.endswith("-1"):
                raise OSError("planted")

    made = builder(3, strategy, optim=lambda p: Failing(p, 0.1)).checkpoint_dir(tmp_path)
    handle = made.run()
    with pytest.raises(WorkerFailed, match="planted"):
        handle.join(WAIT_S)
    assert load_newest(tmp_path).data.global_step == 3


def test_a_state_without_the_shard_of_a_rank_is_not_saved(tmp_path, caplog):
    class Silent(torch.optim.SGD):
        def state_dict(self):
            if has_failed.is_set() and threading.current_thread().name.endswith("-1"):
                raise OSError("planted in state_dict")
            return super().state_dict()

    def train(model, batch):
        worker = current_worker()
        if worker.current_epoch == 1 and worker.rank == 0:
            has_failed.set()
            raise OSError("planted")
        return loss_of(model, batch)

    has_failed = threading.Event()
    made = builder(2, (FULL, None), train=train, optim=lambda p: Silent(p, 0.1))
    handle = made.checkpoint_dir(tmp_path).run()
    with pytest.raises(WorkerFailed, match="planted"):
        handle.join(WAIT_S)
    data = load_newest(tmp_path).data
    assert (data.global_step, data.reason) == (3, "")
    assert "shards [1] of the optimizer's state are lost" in caplog.text


def test_a_model_that_one_worker_cannot_build_ends_the_run():
    def failing(device):
        if threading.current_thread().name.endswith("-2"):
            raise OSError("planted")
        return net(device)

    made = complete(Trainer.builder(failing, adamw, loss_of), 3, (FULL, None))
    with pytest.raises(WorkerFailed, match="planted"):
        finish(made)


@pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s[0].name)
def test_parameters_frozen_during_the_run_stay(strategy):
    def freeze(epoch, worker):
        worker.model.first.weight.requires_grad_(epoch == 1)
        worker.model.last.requires_grad_(epoch == 0)

    expected = finish(builder(1).epoch_fn(freeze))
    assert_close(finish(builder(3, strategy).epoch_fn(freeze)), expected)


def some(params):
    return torch.optim.AdamW(list(params)[:3], 1e-2)


@pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s[0].name)
def test_groups_may_be_added_by_the_shapes_of_full_parameters(strategy, tmp_path):
    def add(epoch, worker):
        last = list(worker.model.last.parameters())
        if epoch == 1 and len(worker.optimizer.param_groups) == 1:
            matrices, others = (
                [p for p in last if (p.ndim > 1) is is_2d] for is_2d in (True, False)
            )
            worker.optimizer.add_param_group({"params": matrices, "weight_decay": 0.5})
            worker.optimizer.add_param_group({"params": others, "weight_decay": 0.0})

    expected = finish(builder(1, optim=some).epoch_fn(add))
    assert_close(finish(builder(3, strategy, optim=some).epoch_fn(add)), expected)
    stopped(builder(3, strategy, optim=some).epoch_fn(add), tmp_path, 4)
    resumed = finish(builder(3, strategy, optim=some).epoch_fn(add).resume(tmp_path))
    assert_close(resumed, expected)


def test_a_group_that_is_added_within_an_epoch_is_refused():
    def loop(worker):
        for number, batch in enumerate(worker.batches()):
            if number == 1:
                worker.optimizer.add_param_group({"params": [worker.model.last.bias]})
            worker.step(loss_of(worker.model, batch))

    made = looping(2, (FULL, None), loop=loop, optim=some)
    with pytest.raises(WorkerFailed, match="group 1 of the optimizer has a parameter that is not"):
        finish(made)


def test_a_parameter_that_is_added_to_a_second_group_is_refused():
    def add(epoch, worker):
        worker.optimizer.add_param_group({"params": [worker.model.scale]})

    with pytest.raises(WorkerFailed, match="more than one parameter group"):
        finish(builder(2, (FULL, None)).epoch_fn(add))


def test_a_frozen_teacher_that_follows_the_weights_is_equal_on_all_workers():
    def train(model, batch):
        with torch.no_grad():
            model.frozen.lerp_(model.first.bias, 0.01)
        return loss_of(model, batch)

    expected = finish(builder(3, train=train))
    assert_close(finish(builder(3, (FULL, None), train=train)), expected)


@pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s[0].name)
def test_full_parameters_are_freed_for_the_optimizers_step(strategy):
    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            params = current_worker().replica.state.params
            sizes.append([p.numel() for p in params.params])
            return super().step(closure)

    sizes = []
    finish(builder(2, strategy, optim=lambda p: Looking(p, 0.1)))
    whole = [p.numel() for p in trainable(net("cpu"))]
    expected = whole if strategy[0] is GRADS else [0] * len(whole)
    assert sizes == [expected] * (2 * STEPS)


def test_shards_are_exchanged_over_gloo(one_device):
    state = finish(builder(2, (FULL, None)).max_grad_norm(0.05).backend(GLOO))
    assert_close(state, one_device("clipped"))


def test_bad_steps_are_dropped_as_without_shards():
    def train(model, batch):
        loss = loss_of(model, batch)
        return loss * float("nan") if 7 in batch[2] else loss

    expected = finish(builder(2, train=train).on_non_finite("skip"))
    state = finish(builder(2, (FULL, None), train=train).on_non_finite("skip"))
    assert_close(state, expected)
    assert [m.num_skipped for m in state.metrics] == [m.num_skipped for m in expected.metrics]
    assert sum(m.num_skipped for m in state.metrics) > 0


def test_a_loss_that_is_not_finite_ends_the_run():
    def train(model, batch):
        loss = loss_of(model, batch)
        return loss * float("nan") if 7 in batch[2] else loss

    handle = builder(3, (FULL, None), train=train).run()
    with pytest.raises(WorkerFailed, match="NonFiniteError"):
        handle.join(WAIT_S)


@pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s[0].name)
def test_a_backward_pass_of_an_earlier_step_fails(strategy):
    def loop(worker):
        for batch in worker.batches():
            loss = loss_of(worker.model, batch)
            worker.backward(loss, retain_graph=True)
            worker.step()
            worker.step(loss)

    with pytest.raises(WorkerFailed, match="modified by an inplace operation"):
        finish(looping(2, strategy, loop=loop).drop_last(True))


def test_a_body_that_leaves_an_epoch_is_refused():
    def loop(worker):
        for batch in worker.batches():
            worker.step(loss_of(worker.model, batch))
            break

    with pytest.raises(WorkerFailed, match="has left an epoch"):
        finish(looping(2, (FULL, None), loop=loop))


# Refusals.

REFUSED = {
    "SYNC": lambda b: b.policy("cadence"),
    "on_worker_failure": lambda b: b.on_worker_failure("continue"),
    "balance": lambda b: b.balance(True),
    "fp16": lambda b: b.precision("fp16"),
    "ema": lambda b: b.ema(0.9),
    "cuda_graphs": lambda b: b.cuda_graphs(True),
    "cluster": lambda b: b.cluster("127.0.0.1:9"),
    "bucket_cap_mb": lambda b: b.bucket_cap_mb(25),
    "intra_node_size": lambda b: b.sharded(HYBRID),
    "does not divide": lambda b: b.sharded(HYBRID, 3),
    "has no meaning": lambda b: b.sharded(FULL, 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_shards_do_not_support_are_refused_by_name(name):
    before = threading.active_count()
    with pytest.raises(ValueError, match=name):
        REFUSED[name](builder(2, (FULL, None))).run()
    assert threading.active_count() == before


def test_several_optimizers_are_refused():
    optims, fns = {"first": adamw, "last": adamw}, {"first": loss_of, "last": loss_of}
    made = Trainer.builder(net, optims, fns)
    with pytest.raises(ValueError, match="several optimizers"):
        complete(made, 2, (FULL, None)).run()
    both = {"a": lambda m: adamw(m.second.parameters()), "b": lambda m: adamw(m.last.parameters())}
    made = Trainer.loop(net, lambda m: {name: f(m) for name, f in both.items()}, body)
    with pytest.raises(WorkerFailed, match="a dict of optimizers"):
        finish(complete(made, 2, (FULL, None)))


def test_an_optimizer_of_whole_tensors_is_refused():
    with pytest.raises(WorkerFailed, match="Adafactor"):
        finish(builder(2, (FULL, None), optim=lambda p: torch.optim.Adafactor(p)))


class WithModes(torch.optim.SGD):
    def train(self):
        pass

    def eval(self):
        pass


def test_an_optimizer_with_modes_is_refused():
    with pytest.raises(WorkerFailed, match=r"WithModes, which has train\(\) and eval\(\) modes"):
        finish(builder(2, (FULL, None), optim=lambda p: WithModes(p, 0.1)))


def rank_state(rank, num_shards=2, num_params=1):
    """A rank's state of a checkpoint, of an optimizer of one parameter."""
    saved = saved_rank(rank)
    stepper = replace(saved.stepper, optimizer={"state": {}, "param_groups": [{"params": [0]}]})
    each = ((1,),) * num_params
    facts = ShardFacts(rank=rank, num_shards=num_shards, shapes=each, strides=each)
    return replace(saved, stepper=stepper, shards=facts)


def test_states_that_lack_shards_or_describe_other_ones_are_refused():
    check_shards([rank_state(0), rank_state(1)])
    with pytest.raises(ValueError, match=r"lacks shards \[1, 2\] of the optimizer's state"):
        check_shards([rank_state(0, num_shards=3)])
    with pytest.raises(ValueError, match="rank 1 describes other shards than its optimizer has"):
        check_shards([rank_state(0), rank_state(1, num_params=2)])


def test_without_shards_any_death_may_be_survived():
    made = builder(2, (NONE, None)).on_worker_failure("continue")
    assert_close(finish(made), finish(builder(1)))


def test_a_strategy_has_its_type():
    with pytest.raises(TypeError, match="ShardingStrategy"):
        builder(2).sharded("full_shard")


@pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s[0].name)
def test_a_sharded_run_clips_by_a_norm_that_low_precision_does_not_round(strategy):
    root = 257  # the norm of a shard's gradient, with one bit too many for bfloat16

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.low = nn.Parameter(torch.zeros(2 * root**2, dtype=torch.bfloat16))
            self.high = nn.Parameter(torch.zeros(2))

    trainer = Trainer.builder(
        lambda device: Mixed(),
        lambda params: torch.optim.SGD(params, 1.0),
        lambda model, batch: model.low.sum().float() + model.high.sum(),
    )
    trainer.dataset((torch.zeros(4),)).global_batch_size(4).num_epochs(1).devices(["cpu"] * 2)
    state = trainer.max_grad_norm(1.0).sharded(*strategy).run().join(WAIT_S)
    step = 1 / (2 * root**2 + 2) ** 0.5
    torch.testing.assert_close(state.params["high"], torch.full((2,), -step), rtol=1e-6, atol=0)
