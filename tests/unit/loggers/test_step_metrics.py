"""``metrics_every``: metrics within an epoch, and their destinations."""

from __future__ import annotations

import csv
import itertools
import math
import threading
from dataclasses import replace

import pytest
import torch

from runtime import (
    Callback,
    CombinedLogger,
    CsvLogger,
    EpochMetrics,
    StepMetrics,
    TensorBoardLogger,
    Trainer,
    record_scalar,
)
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    builder,
    count_up,
    over,
)

WAYS = [(SYNC, THREAD), (CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, OVER_CPU)]


def falling(model, batch):
    """The first sample's number as loss, and twice that as a scalar."""
    loss = count_up(model, batch)
    number = batch[-1].double()[0]
    record_scalar("twice", 2 * number)
    return loss - loss.detach() + number


class Kept:
    """The received metrics by kind, in order."""

    def __init__(self):
        self.steps, self.epochs, self.order = [], [], []

    def __call__(self, metrics):
        self.order.append(metrics)
        (self.steps if isinstance(metrics, StepMetrics) else self.epochs).append(metrics)


@over(WAYS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 6])
def test_step_metrics_come_in_order_and_include_every_loss_once(way, ranks, every):
    kept = Kept()
    b = builder(train=falling, dataset=240, epochs=2, ranks=ranks, way=way)
    state = b.metrics_fn(kept).metrics_every(every).run().join(WAIT_S)
    assert len(kept.epochs) == 2
    nums = [m.num_batches for m in kept.steps]
    assert [m.step for m in kept.steps] == list(itertools.accumulate(nums))
    assert min(nums) >= every
    assert 240 - every < sum(nums) <= 240
    if way[0] is SYNC:
        assert set(nums) == {max(every, ranks)}
    if every == 1:
        whole = math.fsum(m.avg_loss * m.num_batches for m in kept.steps) / 240
        assert whole == pytest.approx(math.fsum(m.avg_loss for m in state.metrics) / 2)
    assert [m.epoch for m in kept.steps] == sorted(m.epoch for m in kept.steps)
    assert isinstance(kept.order[-1], EpochMetrics)
    assert all(m.scalars.keys() <= {"twice"} for m in kept.steps)
    assert {m.learning_rate for m in kept.steps} == {state.metrics[0].learning_rate}
    assert all(m.throughput > 0 for m in kept.steps[1:])


def test_under_sync_each_step_metrics_has_equal_batches_of_every_rank():
    kept, lock, seen = Kept(), threading.Lock(), []

    def noting(model, batch):
        with lock:  # so that no rank starts a step before its peer has left the previous one
            seen.append(float(batch[-1][0]))
        return falling(model, batch)

    b = builder(train=noting, dataset=120, ranks=2, way=(SYNC, THREAD), batch_size=1)
    b.metrics_fn(kept).metrics_every(4).run().join(WAIT_S)
    steps = [sum(seen[i : i + 4]) / 4 for i in range(0, 120, 4)]
    assert [metrics.avg_loss for metrics in kept.steps] == pytest.approx(steps)


def test_metrics_every_without_a_receiver_logs_a_warning(caplog):
    builder(dataset=20).metrics_every(4).run().join(WAIT_S)
    assert "metrics_every(n) has no effect" in caplog.text


@pytest.mark.parametrize(
    "num_batches", [10, 0]
)  # 0: the first step metrics belong to an evaluation
@pytest.mark.parametrize("done", [0, 40])
def test_a_logger_of_a_resumed_run_hides_only_metrics_after_its_checkpoint(
    tmp_path, done, num_batches
):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def step_metrics(step, loss):
        return StepMetrics(
            step=step,
            epoch=0,
            num_batches=10,
            avg_loss=loss,
            scalars={},
            learning_rate=0.1,
            throughput=1.0,
        )

    with TensorBoardLogger(tmp_path) as first:
        for step in range(done + 10, done + 50, 10):
            first(step_metrics(step, 1.0))
    with TensorBoardLogger(tmp_path) as second:  # resumes from a checkpoint after 20 more
        second(replace(step_metrics(done + 30, 2.0), num_batches=num_batches))
    events = EventAccumulator(str(tmp_path / "steps")).Reload().Scalars("step/avg_loss")
    shown = [(event.step - done, event.value) for event in events]
    assert shown == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_without_metrics_every_only_epochs_are_reported():
    kept = Kept()
    builder(dataset=60).metrics_fn(kept).run().join(WAIT_S)
    assert kept.steps == []
    assert len(kept.epochs) == 1


def test_the_learning_rate_follows_the_schedule():
    kept = Kept()
    b = builder(dataset=200, batch_size=1, ranks=1, epochs=2)
    b.scheduler(lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 400))
    state = b.metrics_fn(kept).metrics_every(10).run().join(WAIT_S)
    rates = [m.learning_rate for m in kept.steps]
    assert rates == sorted(rates, reverse=True)
    first, last = state.metrics
    assert first.learning_rate > last.learning_rate >= 0


def test_a_resumed_run_continues_the_step_count(tmp_path):
    first, second = Kept(), Kept()
    b = builder(dataset=40, epochs=1, way=(SYNC, THREAD)).checkpoint_dir(tmp_path)
    b.metrics_fn(first).metrics_every(4).run().join(WAIT_S)
    again = builder(dataset=40, epochs=2, way=(SYNC, THREAD)).resume(tmp_path)
    again.metrics_fn(second).metrics_every(4).run().join(WAIT_S)
    assert [m.step for m in first.steps] == [4, 8, 12, 16, 20]
    assert [m.step for m in second.steps] == [24, 28, 32, 36, 40]


def test_batches_with_dropped_losses_are_counted():
    def sick(model, batch):
        loss = falling(model, batch)
        return loss * (math.nan if batch[-1][0] % 4 == 0 else 1.0)

    kept = Kept()
    b = builder(train=sick, dataset=80, batch_size=1, ranks=1, way=(SYNC, THREAD))
    b.on_non_finite("skip").metrics_fn(kept).metrics_every(8).run().join(WAIT_S)
    assert [m.step for m in kept.steps] == [8 * (i + 1) for i in range(10)]
    assert not any(math.isnan(m.avg_loss) for m in kept.steps)


def test_false_for_some_steps_ends_the_run():
    state = (
        builder(dataset=10**5, epochs=100)
        .metrics_fn(lambda metrics: not isinstance(metrics, StepMetrics))
        .metrics_every(10)
        .run()
        .join(WAIT_S)
    )
    assert state.stopped


def test_callbacks_have_a_method_for_step_metrics():
    class Watch(Callback):
        def __init__(self):
            super().__init__()
            self.steps, self.epochs = [], []

        def __call__(self, metrics):
            self.epochs.append(metrics)

        def step(self, metrics):
            self.steps.append(metrics)

    watch = Watch()
    b = builder(dataset=80, way=(SYNC, THREAD))
    b.callbacks(watch).metrics_every(10).run().join(WAIT_S)
    assert [m.step for m in watch.steps] == [10, 20, 30, 40]
    assert all(isinstance(m, EpochMetrics) for m in watch.epochs)
    assert len(watch.epochs) == 1


def test_loggers_separate_step_metrics_from_epochs(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    table, board = CsvLogger(tmp_path / "run.csv"), TensorBoardLogger(tmp_path / "board")
    kept = Kept()
    b = builder(train=falling, dataset=80, way=(SYNC, THREAD))
    b.metrics_fn(CombinedLogger(table, board, kept)).metrics_every(10).run().join(WAIT_S)
    with (tmp_path / "run.steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [10, 20, 30, 40]
    assert [float(row["avg_loss"]) for row in rows] == [m.avg_loss for m in kept.steps]
    assert [float(row["twice"]) for row in rows if row["twice"]] == [
        m.scalars["twice"] for m in kept.steps if m.scalars
    ]
    with (tmp_path / "run.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["learning_rate"]) == kept.epochs[0].learning_rate
    events = EventAccumulator(str(tmp_path / "board" / "steps")).Reload()
    written = events.Scalars("step/avg_loss")
    assert [event.step for event in written] == [10, 20, 30, 40]
    assert [event.value for event in written] == pytest.approx([m.avg_loss for m in kept.steps])
    epochs = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [event.step for event in epochs.Scalars("epoch/avg_loss")] == [0]


@pytest.mark.parametrize("n", [0, -1, 1.5, "10", True])
def test_invalid_intervals_raise(n):
    with pytest.raises((TypeError, ValueError), match="metrics_every"):
        builder().metrics_every(n)


@pytest.mark.parametrize(
    ("door", "ranks", "accumulate"),
    [("builder", 1, 1), ("builder", 2, 1), ("builder", 2, 2), ("builder", 3, 1), ("loop", 2, 1)],
)
def test_each_step_metrics_has_the_loss_and_the_rate_of_its_own_step(door, ranks, accumulate):
    """A rate that grows in every step, as in a range test; the last batch is short."""
    size, num = 12, 100
    x = torch.linspace(-1, 1, num, dtype=torch.float64).reshape(-1, 1)
    kept = Kept()

    def new(device=None):
        torch.manual_seed(0)
        return torch.nn.Linear(1, 1, dtype=torch.float64)

    def train(model, batch):
        return (model(batch[0]) - 1).square().mean()

    def grow(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.2)

    def body(worker):
        for batch in worker.batches():
            worker.step(train(worker.model, batch))

    def sgd(params):
        return torch.optim.SGD(params, 1e-3)

    if door == "builder":
        b = Trainer.builder(new, sgd, train).accumulate(accumulate)
    else:
        b = Trainer.loop(new, lambda model: sgd(model.parameters()), body)
    b.dataset((x,)).sampler(range(num)).global_batch_size(size).num_epochs(1).policy("sync")
    b.scheduler(grow).devices(["cpu"] * ranks).progress(False)
    b.metrics_every(1).metrics_fn(kept).run().join(WAIT_S)
    net = new()
    optimizer = sgd(net.parameters())
    scheduler = grow(optimizer)
    for found, start in zip(kept.steps, range(0, num, size), strict=True):
        loss = train(net, (x[start : start + size],))
        assert found.avg_loss == pytest.approx(loss.item(), rel=1e-9)
        assert found.learning_rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


@over(WAYS[1:])
def test_rates_of_step_metrics_are_rates_of_the_schedule(way):
    kept = Kept()
    b = builder(train=falling, dataset=240, epochs=1, ranks=2, way=way)
    b.scheduler(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.1))
    b.metrics_fn(kept).metrics_every(2).run().join(WAIT_S)
    rates = [m.learning_rate for m in kept.steps]
    powers = [math.log(rate / rates[0], 1.1) for rate in rates]
    assert powers == pytest.approx([round(power) for power in powers], abs=1e-6)
