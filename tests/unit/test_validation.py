"""val_dataset(): means over a validation set on all workers equal those of one plain device."""

from __future__ import annotations

import copy
import csv
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from runtime import (
    CsvLogger,
    EarlyStopping,
    KeepBest,
    StepMetrics,
    Timeline,
    Trainer,
    Weighted,
    WorkerFailed,
    current_worker,
    fit,
    record_scalar,
)
from tests.support.running import (
    ASYNC,
    CADENCE,
    GLOO,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    builder,
    count_up,
    counter,
    over,
)

WAYS = [(SYNC, THREAD), (SYNC, GLOO), (CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, OVER_CPU)]
ways = over(WAYS)
ranks = pytest.mark.parametrize("ranks", [1, 2, 3])
ways_and_ranks = pytest.mark.parametrize(
    ("way", "ranks"), [*((way, 3) for way in WAYS), ((SYNC, THREAD), 1), ((CADENCE, OVER_CPU), 2)]
)

N = 41
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X.sum(1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm, self.two = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.drop = nn.Dropout(0.5)
        self.double()

    def forward(self, x):
        return self.two(self.drop(self.norm(self.one(x)).relu()))


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class Watch:
    """Keeps the weights that close each epoch, and all metrics."""

    def __init__(self):
        self.states, self.metrics = {}, []

    def checkpoint(self, version, model):
        self.states[version - 1] = copy.deepcopy(model.state_dict())

    def __call__(self, metrics):
        self.metrics.append(metrics)

    @property
    def within(self):
        return [m for m in self.metrics if isinstance(m, StepMetrics) and m.num_batches == 0]


def plain(state, num_samples=N):
    """The loss of one plain device over the validation set, or its first samples."""
    model = Net()
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        return loss_of(model, (X[:num_samples], Y[:num_samples])).item()


def run(way=(SYNC, THREAD), ranks=2, epochs=2, watch=None, train=loss_of, **more):
    x = torch.randn(96, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    b = builder(
        model=lambda device: Net(),
        optim=lambda params: torch.optim.SGD(params, 0.05),
        train=train,
        dataset=(x, x.sum(1, keepdim=True)),
        batch_size=4,
        epochs=epochs,
        ranks=ranks,
        way=way,
    )
    if watch is not None:
        b.checkpoint_fn(watch.checkpoint).metrics_fn(watch)
    return b.val_dataset((X, Y), **more)


@ways_and_ranks
def test_the_loss_of_each_epoch_is_that_of_one_device_on_the_averaged_weights(way, ranks):
    watch = Watch()
    state = run(way, ranks, watch=watch).run().join(WAIT_S)
    found = [m.scalars["val/loss"] for m in state.metrics]
    assert found == pytest.approx([plain(watch.states[epoch]) for epoch in range(2)], 1e-12)
    assert found[0] != found[1] or way[0] is not SYNC


def test_the_bits_are_the_same_for_any_number_of_workers():
    """The model does not change, so that only the division differs."""
    found = set()
    for num in (1, 2, 3):
        b = run(ranks=num, epochs=1, train=lambda model, batch: 0 * model.two.weight.sum())
        b.val_dataset((X, Y), fn=loss_of)
        state = b.run().join(WAIT_S)
        found.add(state.metrics[0].scalars["val/loss"])
    assert len(found) == 1


class Indexed(Dataset):
    """Records which ranks read which samples."""

    def __init__(self):
        self.lock, self.read = threading.Lock(), []

    def __len__(self):
        return N

    def __getitem__(self, index):
        with self.lock:
            self.read.append((current_worker().rank, index))
        return X[index], Y[index]


@ways_and_ranks
def test_each_sample_is_evaluated_once_in_eval_mode_by_all_workers(way, ranks):
    seen, lock = [], threading.Lock()

    def fn(model, batch):
        assert not any(sub.training for sub in model.modules())
        assert not torch.is_grad_enabled()
        with lock:
            seen.append((current_worker().rank, len(batch[0])))
        return {"loss": loss_of(model, batch)}

    data = Indexed()
    state = run(way, ranks, epochs=1).val_dataset(data, fn=fn).run().join(WAIT_S)
    assert sorted(index for _, index in data.read) == list(range(N))
    assert len({rank for rank, _ in seen}) >= min(ranks, 2)
    assert sum(size for _, size in seen) == N
    assert state.metrics[0].scalars.keys() == {"val/loss"}


def result(way, ranks, **validation):
    """The trained state, with draws by dropout, with or without a validation that draws too."""

    def fn(model, batch):
        torch.rand(3)
        torch.rand(3, generator=current_worker().generator)
        return loss_of(nn.Sequential(model, nn.Dropout(0.5).train()), batch)

    b = run(way, ranks, train=loss_of).seed(7)
    b.val_dataset((X, Y), fn=fn, **validation) if validation else b._set(val_dataset=None)
    return b.run().join(WAIT_S)


@ranks
@pytest.mark.parametrize("validation", [{"every": 1}, {"every": 2, "every_steps": 5}])
def test_the_bits_of_training_are_those_without_a_validation(ranks, validation):
    """Buffers included."""
    plain = result((SYNC, THREAD), ranks).state_dict()
    other = result((SYNC, THREAD), ranks, **validation).state_dict()
    assert [name for name in plain if not torch.equal(plain[name], other[name])] == []


def test_random_draws_of_a_validation_are_those_of_its_batches():
    one, two = (result((SYNC, THREAD), n, every=1).metrics for n in (1, 1))
    assert [m.scalars for m in one] == [m.scalars for m in two]


@ways_and_ranks
def test_validation_takes_place_every_n_epochs(way, ranks):
    state = run(way, ranks, epochs=5, every=2).run().join(WAIT_S)
    assert ["val/loss" in m.scalars for m in state.metrics] == [False, True] * 2 + [False]


@ranks
def test_within_epochs_sync_validates_at_each_multiple(ranks):
    watch = Watch()
    run((SYNC, THREAD), ranks, watch=watch, every_steps=6).run().join(WAIT_S)
    wanted, step, next_at = [], 0, 6
    for epoch in range(2):
        left = 24
        while left:
            taken = min(ranks, left)
            step, left = step + taken, left - taken
            if step >= next_at:
                wanted += [(step, epoch)] if left else []
                next_at = (step // 6 + 1) * 6
    assert [(m.step, m.epoch) for m in watch.within] == wanted
    assert all(m.scalars.keys() == {"val/loss"} for m in watch.within)


def test_within_an_epoch_the_average_of_the_step_is_validated():
    """With accumulated steps of one device, which has the same weights."""
    found = []
    for num in (1, 2):
        watch = Watch()
        b = run((SYNC, THREAD), num, watch=watch, every_steps=8, epochs=1)
        b.accumulate(2 // num).run().join(WAIT_S)
        found.append([m.scalars["val/loss"] for m in watch.within])
    assert len(found[0]) == 2
    # Batch norm has statistics of each piece.
    assert found[0] == pytest.approx(found[1], 0.2)


@pytest.mark.parametrize(
    ("way", "ranks"),
    [*((way, 3) for way in WAYS if way[0] is not SYNC), (WAYS[2], 1), (WAYS[2], 2)],
)
def test_without_lockstep_a_round_is_forced_and_all_ranks_validate_its_average(way, ranks):
    held, lock = {}, threading.Lock()

    def fn(model, batch):
        with lock:
            weights = float(sum(p.double().sum() for p in model.parameters()))
            held.setdefault(len(watch.within), set()).add(weights)
        return {"loss": loss_of(model, batch)}

    watch = Watch()
    b = run(way, ranks, epochs=1, watch=watch).val_dataset((X, Y), every_steps=6, fn=fn)
    b.anchor(100).max_anchor(100).run().join(WAIT_S)
    assert [m.step for m in watch.within] == sorted({m.step for m in watch.within})
    assert 1 <= len(watch.within) <= 4


@ways_and_ranks
def test_a_death_during_a_validation_loses_no_part_of_it(way, ranks):
    """The first batch that rank ``ranks - 1`` evaluates kills it; the others wait for that."""
    once, watch = threading.Event(), Watch()

    def fn(model, batch):
        if current_worker().rank == ranks - 1 > 0 and not once.is_set():
            once.set()
            raise RuntimeError("planted")
        assert ranks == 1 or once.wait(WAIT_S)
        return {"loss": loss_of(model, batch), "n": 1.0}

    b = run(way, ranks, watch=watch).val_dataset((X, Y), fn=fn)
    b.on_worker_failure("continue").checkpoint_fn(watch.checkpoint)
    state = b.run().join(WAIT_S)
    assert [failure.rank for failure in state.failures] == ([ranks - 1] if ranks > 1 else [])
    assert [m.num_samples for m in state.metrics] == [96, 96]
    if way[0] is SYNC:
        found = [m.scalars["val/loss"] for m in state.metrics]
        assert found == pytest.approx([plain(watch.states[epoch]) for epoch in range(2)], 1e-12)
    assert [m.scalars["val/n"] for m in state.metrics] == [1.0, 1.0]


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2], WAYS[3]], ids=lambda way: way[0].name)
def test_a_death_of_the_rank_that_ends_a_validation_begins_it_again(way):
    """The others drop the batches that they have read ahead for the first one."""
    once, held, watch = threading.Event(), threading.Event(), Watch()

    def fn(model, batch):
        if current_worker().rank == 0 and not once.is_set():
            assert held.wait(WAIT_S)
            once.set()
            raise RuntimeError("planted")
        held.set()
        assert once.wait(WAIT_S)
        return {"loss": loss_of(model, batch), "n": 1.0}

    b = run(way, 3, watch=watch).val_dataset(Indexed(), fn=fn).eval_rank(0)
    b.on_worker_failure("continue").checkpoint_fn(watch.checkpoint)
    state = b.run().join(WAIT_S)
    assert [failure.rank for failure in state.failures] == [0]
    assert [m.num_samples for m in state.metrics] == [96, 96]
    if way[0] is SYNC:
        found = [m.scalars["val/loss"] for m in state.metrics]
        assert found == pytest.approx([plain(watch.states[epoch]) for epoch in range(2)], 1e-12)
    assert [m.scalars["val/n"] for m in state.metrics] == [1.0, 1.0]


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2], WAYS[3]], ids=lambda way: way[0].name)
def test_a_death_during_a_validation_within_an_epoch_loses_no_part_of_it(way):
    once, watch = threading.Event(), Watch()

    def fn(model, batch):
        if current_worker().rank == 1 and not once.is_set():
            once.set()
            raise RuntimeError("planted")
        assert once.wait(WAIT_S)
        return {"n": 1.0}

    b = run(way, 3, watch=watch).val_dataset((X, Y), every_steps=9, fn=fn)
    state = b.on_worker_failure("continue").run().join(WAIT_S)
    assert [failure.rank for failure in state.failures] == [1]
    assert [m.num_samples for m in state.metrics] == [96, 96]
    assert {m.scalars["val/n"] for m in (*watch.within, *state.metrics)} == {1.0}


def test_an_error_names_the_samples_and_ends_the_run():
    def fn(model, batch):
        raise ValueError("planted")

    with pytest.raises(WorkerFailed, match="planted") as caught:
        run().val_dataset((X, Y), fn=fn).run().join(WAIT_S)
    assert isinstance(caught.value.__cause__, ValueError)
    assert any("in the validation of samples" in n for n in caught.value.__cause__.__notes__)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_without_memory_is_evaluated_in_parts(workers):
    sizes, refused, watch = [], [], Watch()

    def fn(model, batch):
        if len(batch[0]) > 3:
            refused.append(len(batch[0]))
            raise torch.OutOfMemoryError("planted: out of memory")
        sizes.append(len(batch[0]))
        return {"loss": loss_of(model, batch), "n": 1.0}

    data = DataLoader(TensorDataset(X, Y), batch_size=10, num_workers=workers)
    state = run(watch=watch, epochs=1).val_dataset(data, fn=fn).run().join(WAIT_S)
    assert sum(sizes) == N
    assert max(refused) == 10
    scalars = state.metrics[0].scalars
    assert scalars["val/loss"] == pytest.approx(plain(watch.states[0]))
    assert scalars["val/n"] == 1.0


def test_a_sample_without_memory_ends_the_run():
    def fn(model, batch):
        raise torch.OutOfMemoryError("planted: out of memory")

    with pytest.raises(WorkerFailed, match="planted") as caught:
        run(epochs=1).val_dataset((X, Y), fn=fn).run().join(WAIT_S)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_values_of_any_form_are_weighted_by_their_own_weights():
    weights = torch.arange(N, dtype=torch.float64)[:, None]
    right = float((X.sum(1, keepdim=True) * weights).sum() / weights.sum())

    def mean(x, w):
        return (x.sum(1, keepdim=True) * w).sum() / w.sum()

    def shared(model, batch):
        record_scalar("recorded", mean(*batch))
        return {"x": mean(*batch)}, batch[1].sum()

    def own(model, batch):
        return {"x": Weighted(mean(*batch), batch[1].sum()), "n": 1}

    for fn in (shared, own):
        state = run(epochs=1).val_dataset((X, weights), fn=fn).run().join(WAIT_S)
        assert state.metrics[0].scalars["val/x"] == pytest.approx(right, 1e-12)


def test_scalars_and_weights_of_train_fn_are_part_of_the_default():
    def train_fn(model, batch):
        record_scalar("error", (model(batch[0]) - batch[1]).abs().mean())
        return loss_of(model, batch), len(batch[0])

    watch = Watch()
    state = run(train=train_fn, watch=watch).run().join(WAIT_S)
    last = state.metrics[-1].scalars
    assert set(last) == {"error", "val/error", "val/loss"}
    assert last["val/loss"] == pytest.approx(plain(watch.states[1]), 1e-12)


@ranks
def test_losses_that_are_sums_are_validated_as_means(ranks):
    def total(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")

    watch = Watch()
    b = run(ranks=ranks, train=total, watch=watch).loss_reduction("sum")
    state = b._set(optim_factory=lambda params: torch.optim.SGD(params, 1e-3)).run().join(WAIT_S)
    found = [m.scalars["val/loss"] for m in state.metrics]
    assert found == pytest.approx([plain(watch.states[epoch]) for epoch in range(2)], 1e-12)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2]], ids=lambda way: way[0].name)
@ranks
def test_steps_are_those_of_global_batches(way, ranks):
    watch = Watch()
    b = Trainer.builder(lambda device: Net(), lambda p: torch.optim.SGD(p, 0.05), loss_of)
    x = torch.cat([X, X])[:72]
    b.dataset((x, x.sum(1, keepdim=True))).global_batch_size(18).num_epochs(2).metrics_fn(watch)
    b.devices(["cpu"] * ranks).policy(way[0]).backend(way[1])
    state = b.val_dataset((X, Y), every_steps=3).run().join(WAIT_S)
    steps = [m.step for m in watch.within]
    assert steps == sorted(set(steps))
    if way[0] is SYNC or ranks == 1:
        assert steps == [3, 6]  # 4 steps an epoch
    assert all("val/loss" in m.scalars for m in state.metrics)


def test_each_of_several_optimizers_has_its_loss():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()

    b = builder(
        model=lambda device: Two(),
        optim={n: lambda params: torch.optim.SGD(params, 0.1) for n in "ab"},
        train={n: lambda m, x, n=n: getattr(m, n)(x[0]).square().mean() for n in "ab"},
        dataset=(X,),
        way=(SYNC, THREAD),
    )
    scalars = b.val_dataset((X,)).run().join(WAIT_S).metrics[0].scalars
    assert scalars["val/loss"] == pytest.approx(scalars["val/loss/a"] + scalars["val/loss/b"])


@ways_and_ranks
def test_an_own_loop_is_validated_as_well(way, ranks):
    watch = Watch()

    def loop(worker):
        for batch in worker.batches():
            worker.step(loss_of(worker.model, batch))

    x = torch.randn(96, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    b = Trainer.loop(lambda device: Net(), lambda m: torch.optim.SGD(m.parameters(), 0.05), loop)
    b.dataset((x, x.sum(1, keepdim=True))).batch_size(4).num_epochs(2).ema(0.5)
    b.devices(["cpu"] * ranks).policy(way[0]).backend(way[1]).checkpoint_fn(watch.checkpoint)
    b.val_dataset((X, Y), every_steps=7, fn=lambda m, batch: {"loss": loss_of(m, batch)})
    state = b.metrics_fn(watch).run().join(WAIT_S)
    found = [m.scalars["val/loss"] for m in state.metrics]
    assert found == pytest.approx([plain(watch.states[epoch]) for epoch in range(2)], 1e-12)
    assert state.ema_state_dict().keys() == state.state_dict().keys()
    if way[0] is SYNC or ranks == 1:
        assert watch.within


def test_an_own_loop_names_the_function_of_its_validation():
    b = Trainer.loop(lambda device: Net(), lambda m: torch.optim.SGD(m.parameters(), 0.1), print)
    b.dataset((X, Y)).batch_size(4).num_epochs(1).val_dataset((X, Y))
    with pytest.raises(ValueError, match="pass fn=f"):
        b.run()


# -- callbacks, loggers, schedules -----------------------------------------------------


def test_callbacks_and_schedules_read_its_values(tmp_path):
    best = KeepBest(tmp_path / "best.safetensors", "val/loss")
    b = run(epochs=4).callbacks(best, EarlyStopping("val/loss", patience=10))
    b.scheduler(
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        metric="val/loss",
    )
    state = b.run().join(WAIT_S)
    losses = [m.scalars["val/loss"] for m in state.metrics]
    assert best.best == min(losses)
    assert best.best_epoch == losses.index(min(losses))


def test_loggers_write_its_values(tmp_path):
    path = tmp_path / "run.csv"
    run(epochs=1, every_steps=8).metrics_fn(CsvLogger(path)).run().join(WAIT_S)
    with path.open() as file:
        assert float(next(csv.DictReader(file))["val/loss"]) > 0
    with path.with_name("run.steps.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["8", "16"]


def test_fit_validates():
    class Loss(Net):
        def forward(self, x, y):
            return nn.functional.mse_loss(super().forward(x), y)

    state = fit(
        Loss(),
        (X[:40], Y[:40]),
        optimizer=torch.optim.SGD,
        batch_size=8,
        devices=["cpu"] * 2,
        policy="sync",
        val_dataset=(X, Y),
    )
    assert state.metrics[0].scalars["val/loss"] == pytest.approx(plain(state.state_dict()), 1e-12)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2]], ids=lambda way: way[0].name)
def test_a_resumed_run_validates_where_the_whole_one_does(tmp_path, way):
    def steps(watch):
        return [m.step for m in watch.within]

    whole, first, second = Watch(), Watch(), Watch()
    kwargs = {"way": way, "ranks": 2, "every_steps": 10, "epochs": 3}
    state = run(watch=whole, **kwargs).run().join(WAIT_S)
    run(watch=first, **kwargs).checkpoint_dir(tmp_path).max_steps(34).run().join(WAIT_S)
    resumed = run(watch=second, **kwargs).resume(tmp_path).run().join(WAIT_S)
    assert [set(m.scalars) for m in resumed.metrics] == [{"val/loss"}] * 3
    if way[0] is SYNC:
        assert steps(first) + steps(second) == steps(whole)
        found, wanted = ([m.scalars["val/loss"] for m in s.metrics] for s in (resumed, state))
        assert found == pytest.approx(wanted)


# -- data ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        DataLoader(list(zip(X, Y, strict=True)), 5, shuffle=True, drop_last=True),
        list(zip(X, Y, strict=True)),
        DataLoader(list(zip(X, Y, strict=True)), 5, sampler=range(N)),
    ],
    ids=["shuffling loader", "samples", "sampler"],
)
def test_data_sets_of_every_form_are_read_once(data):
    watch = Watch()
    state = run(epochs=1, watch=watch).val_dataset(data).run().join(WAIT_S)
    assert state.metrics[0].scalars["val/loss"] == pytest.approx(plain(watch.states[0]), 1e-12)


def test_a_loader_with_processes_is_read_once():
    watch = Watch()
    data = DataLoader(list(zip(X, Y, strict=True)), 5, num_workers=1)
    state = run(watch=watch, ranks=2).val_dataset(data).run().join(WAIT_S)
    found = [m.scalars["val/loss"] for m in state.metrics]
    assert found == pytest.approx([plain(watch.states[epoch]) for epoch in range(2)], 1e-12)


def test_fewer_batches_than_workers_are_validated_by_some():
    state = run(ranks=3).val_dataset((X[:3], Y[:3])).run().join(WAIT_S)
    alone = plain(state.state_dict(), 3)
    assert state.metrics[-1].scalars["val/loss"] == pytest.approx(alone, 1e-12)


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda b: b.val_dataset(None), "val_dataset\\(None\\)"),
        (lambda b: b.val_dataset((X, Y), every=0), "every"),
        (lambda b: b.val_dataset((X, Y), every_steps=0), "every_steps"),
        (lambda b: b.val_dataset((X, Y), fn=3), "fn"),
        (lambda b: b.val_dataset(Stream()).run(), "cannot be divided"),
        (lambda b: b.val_dataset(DataLoader(Stream(), 2)).run(), "cannot be divided"),
        (lambda b: b.val_dataset((X[:0], Y[:0])).run(), "empty"),
        (
            lambda b: b.scheduler(
                torch.optim.lr_scheduler.ReduceLROnPlateau, metric="val/loss"
            ).run(),
            "needs val_dataset",
        ),
    ],
)
def test_unsupported_validations_are_refused_before_the_run(change, error):
    b = builder(way=(SYNC, THREAD))
    with pytest.raises((TypeError, ValueError), match=error):
        change(b)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "returned None"),
        ({"x": torch.ones(3)}, r"'x' of shape \(3,\)"),
        ({"x": "high"}, "'x' of type str"),
    ],
)
def test_results_that_are_no_means_end_the_run(result, words):
    with pytest.raises(WorkerFailed, match=words):
        run().val_dataset((X, Y), fn=lambda model, batch: result).run().join(WAIT_S)


# -- time ------------------------------------------------------------------------------


@ways
def test_validation_is_not_counted_as_training_time(way):
    def slow(model, batch):
        threading.Event().wait(0.02)
        return {"x": 1.0}

    b = builder(dataset=8, ranks=2, way=way, train=count_up, model=counter, epochs=2)
    b.val_dataset((X,), fn=slow)
    state = b.timeline(timeline := Timeline()).run().join(WAIT_S)
    slept_s = 0.02 * -(-N // 2) / 2
    assert sum(rank.compute_s for m in state.metrics for rank in m.per_rank) < slept_s
    assert state.metrics[1].epoch_s < slept_s
    assert any(event.kind.value == "evaluation" for event in timeline.events())


class Modes(torch.optim.SGD):
    """Weights are evaluated at another point, as by schedule-free optimizers."""

    def train(self):
        self.param_groups[0].setdefault("mode", "train")
        if self.param_groups[0]["mode"] == "eval":
            self._shift(-1)
        self.param_groups[0]["mode"] = "train"

    def eval(self):
        if self.param_groups[0].setdefault("mode", "train") == "train":
            self._shift(1)
        self.param_groups[0]["mode"] = "eval"

    @torch.no_grad()
    def _shift(self, by):
        for p in self.param_groups[0]["params"]:
            p.add_(by)


def test_an_optimizer_with_modes_is_validated_at_its_eval_point():
    b = builder(way=(SYNC, THREAD), optim=lambda params: Modes(params, 1.0), dataset=8)
    b.val_dataset((X,), fn=lambda model, batch: {"w": model.w.item()})
    state = b.run().join(WAIT_S)
    assert state.metrics[0].scalars["val/w"] == state.params["w"].item() == 3.0


class Detector(nn.Module):
    """Returns losses in training mode, and detections in evaluation mode."""

    def __init__(self, in_eval):
        super().__init__()
        self.layer, self.in_eval = nn.Linear(3, 1, dtype=torch.float64), in_eval

    def forward(self, x, target):
        out = self.layer(x)
        losses = {"box": (out - target).square().mean(), "score": out.square().mean()}
        return losses if self.training else self.in_eval(out)


def sum_of_losses(model, batch):
    return sum(model(*batch).values())


def model_itself(model, batch):
    found = model(*batch)
    return sum(found.values()) if model.training else found


IN_EVAL_MODE = r"train_fn with the model in evaluation mode.*val_dataset\(ds, fn=f\)"


@pytest.mark.parametrize(
    ("train_fn", "in_eval"),
    [
        (sum_of_losses, lambda out: [{"box": row} for row in out]),
        (sum_of_losses, lambda out: out),
        (model_itself, lambda out: [out]),
        (model_itself, lambda out: {"boxes": out}),
        (model_itself, lambda out: None),
        ({"layer": sum_of_losses}, lambda out: out),
    ],
)
@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_a_model_that_returns_something_else_in_evaluation_mode_is_named(way, train_fn, in_eval):
    def made(**validation):
        optim = torch.optim.SGD
        optim = {"layer": optim} if isinstance(train_fn, dict) else optim
        b = Trainer.builder(Detector(in_eval), optim, train_fn).dataset((X, Y)).num_epochs(1)
        b = b.batch_size(4).devices(["cpu"] * 2).policy(way[0]).backend(way[1]).progress(False)
        return b.val_dataset((X, Y), **validation).run()

    with pytest.raises(WorkerFailed, match=IN_EVAL_MODE):
        made().join(WAIT_S)
    state = made(fn=lambda model, batch: {"size": model.layer.weight.sum()}).join(WAIT_S)
    assert "val/size" in state.metrics[0].scalars


def test_other_errors_of_a_validation_do_not_blame_the_mode():
    class Broken(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise LookupError("planted")

    def fails(model, batch):
        raise LookupError("planted")

    for dataset, fn in ((Broken(), None), ((X, Y), fails)):
        with pytest.raises(WorkerFailed, match="planted") as caught:
            builder(ranks=1).val_dataset(dataset, fn=fn).run().join(WAIT_S)
        assert "evaluation mode" not in str(caught.value)
