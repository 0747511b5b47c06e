"""Evaluation within epochs, on the averaged model; metrics of other packages in it."""

from __future__ import annotations

import csv
import importlib.util
import math
import threading
import time

import pytest
import torch
from torch import nn

from runtime import CsvLogger, StepMetrics, current_worker
from tests.support.pairs import pairwise
from tests.support.running import (
    ASYNC,
    CADENCE,
    GLOO,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    Counter,
    builder,
    count_up,
    over,
)

WAYS = [(SYNC, THREAD), (SYNC, GLOO), (CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, OVER_CPU)]
ways = over(WAYS)


class Recorder:
    """Records the metrics of steps and epochs, in order."""

    def __init__(self):
        self.all = []

    def __call__(self, metrics):
        self.all.append(metrics)

    @property
    def within(self):
        found = [m for m in self.all if isinstance(m, StepMetrics)]
        return [m for m in found if any(name.startswith("eval/") for name in m.scalars)]


def value(model, epoch):
    return {"w": model.w.item(), "rank": float(current_worker().rank)}


def run(recorder, *, way, every=8, ranks=2, dataset=96, epochs=2, **more):
    b = builder(dataset=dataset, batch_size=2, epochs=epochs, ranks=ranks, way=way, **more)
    return b.eval_fn(value).eval_every(every).metrics_fn(recorder)


@pairwise(ranks=[1, 2, 3], accumulate=[1, 3], backend=[THREAD, GLOO])
def test_sync_stops_at_each_multiple_and_shows_the_weights_of_that_step(ranks, accumulate, backend):
    """``w`` counts the optimizer steps."""
    recorder = Recorder()
    run(recorder, way=(SYNC, backend), ranks=ranks).accumulate(accumulate).run().join(WAIT_S)
    in_step = ranks * accumulate
    wanted, step, next_at = [], 0, 8
    for epoch in range(2):
        left = 48
        while left:
            taken = min(in_step, left)
            left -= taken
            step += taken
            if step >= next_at and left:
                wanted.append((step, epoch))
            if step >= next_at:
                next_at = (step // 8 + 1) * 8
    assert [(m.step, m.epoch) for m in recorder.within] == wanted
    for metrics in recorder.within:
        in_epochs = [min(48, max(0, metrics.step - 48 * epoch)) for epoch in range(2)]
        assert metrics.scalars["eval/w"] == sum(-(-part // in_step) for part in in_epochs)
        assert metrics.num_batches == 0
        assert math.isnan(metrics.avg_loss)


@ways
@pytest.mark.parametrize("ranks", [1, 3])
def test_eval_fn_is_called_on_one_rank_at_the_interval_and_at_the_end_of_epochs(way, ranks):
    recorder = Recorder()
    state = run(recorder, way=way, ranks=ranks, every=12).run().join(WAIT_S)
    assert [set(m.scalars) for m in state.metrics] == [{"eval/w", "eval/rank"}] * 2
    steps = [m.step for m in recorder.within]
    assert steps == sorted(set(steps))
    assert len(steps) <= 2 * 4
    assert {m.scalars["eval/rank"] for m in recorder.within} <= {0.0}
    if way[0] is SYNC or ranks == 1:
        assert steps


@pytest.mark.parametrize("way", [(CADENCE, OVER_CPU), (CADENCE, THREAD)])
def test_under_cadence_eval_fn_receives_an_average(way):
    """Ranks train in opposite directions, so only their mean is near 0."""
    pulled, shown = [], []

    def train(model, batch):
        time.sleep(0.001)
        pulled.append(abs(model.w.item()))
        return model.w.sum() * (1 if current_worker().rank else -1)

    def evaluate(model, epoch):
        shown.append(abs(model.w.item()))
        return {"w": model.w.item()}

    b = builder(train=train, dataset=400, batch_size=2, epochs=1, way=way).eval_fn(evaluate)
    # The mean is close to the rank that trains more.
    b.eval_every(30).anchor(50).max_anchor(50).max_batch_diff(4).run().join(WAIT_S)
    assert max(pulled) > 10
    assert len(shown) > 2
    assert max(shown) < max(pulled) / 2


@pytest.mark.parametrize("backend", [THREAD, GLOO])
def test_peers_wait_for_a_long_evaluation_longer_than_for_a_step(backend):
    recorder, waits_s = Recorder(), iter([2.5])

    def evaluate(model, epoch):
        time.sleep(next(waits_s, 0.0))
        return {"w": 0.0}

    b = run(recorder, way=(SYNC, backend), every=16).collective_timeout(2).eval_fn(evaluate)
    state = b.run().join(WAIT_S)
    assert [m.num_samples for m in state.metrics] == [96, 96]
    assert len(recorder.within) == 4
    # No rank counts it as the time of a step.
    assert sum(rank.compute_s for m in state.metrics for rank in m.per_rank) < 2.5


def test_an_evaluation_whose_rank_dies_is_made_by_another():
    recorder, once = Recorder(), threading.Event()

    def evaluate(model, epoch):
        if not once.is_set():
            once.set()
            raise RuntimeError("planted")
        return value(model, epoch)

    b = run(recorder, way=(SYNC, THREAD)).eval_fn(evaluate).on_worker_failure("continue")
    state = b.run().join(WAIT_S)
    assert [failure.rank for failure in state.failures] == [0]
    assert [m.num_samples for m in state.metrics] == [96, 96]
    assert recorder.within[0].step == 8
    assert {m.scalars["eval/rank"] for m in recorder.within} == {1.0}


class Normed(Counter):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))


def test_buffers_are_averaged_before_an_evaluation():
    def train(model, batch):
        model.seen.fill_(float(current_worker().rank))
        return count_up(model, batch)

    shown = []
    b = run(Recorder(), way=(SYNC, THREAD), model=lambda device: Normed(), train=train)
    b.eval_fn(lambda model, epoch: shown.append(model.seen.item()) or {}).run().join(WAIT_S)
    assert set(shown) == {0.5}


def test_the_trained_bits_are_the_same_with_and_without_evaluation():
    def result(every):
        def train(model, batch):
            return model(batch[0]).square().mean()

        torch.manual_seed(0)
        start = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        b = builder(
            model=start,
            optim=lambda params: torch.optim.SGD(params, 0.1),
            train=train,
            dataset=(torch.arange(48.0)[:, None] / 48,),
            epochs=2,
            way=(SYNC, THREAD),
        ).seed(3)
        if every:
            b.eval_every(every).eval_fn(lambda model, epoch: {"x": float(torch.rand(()))})
        return b.run().join(WAIT_S).state_dict()

    plain, within = result(None), result(4)
    assert all(torch.equal(plain[name], within[name]) for name in plain)


def test_a_resumed_run_evaluates_at_the_same_steps_as_an_uninterrupted_one(tmp_path):
    def steps(recorder):
        return [m.step for m in recorder.within]

    whole, first, second = Recorder(), Recorder(), Recorder()
    run(whole, way=(SYNC, THREAD), every=10).run().join(WAIT_S)
    part = run(first, way=(SYNC, THREAD), every=10).checkpoint_dir(tmp_path)
    part.max_steps(54).run().join(WAIT_S)
    run(second, way=(SYNC, THREAD), every=10).resume(tmp_path).run().join(WAIT_S)
    assert steps(first) + steps(second) == steps(whole)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", [(CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, OVER_CPU)])
def test_evaluation_steps_continue_after_a_resume_under_cadence_and_async(tmp_path, way, ranks):
    first, second = Recorder(), Recorder()
    part = run(first, way=way, every=10, ranks=ranks).checkpoint_dir(tmp_path)
    trained = part.anchor(2).min_anchor(1).max_steps(54).run().join(WAIT_S).metrics
    done = sum(rank.num_batches for metrics in trained for rank in metrics.per_rank)
    rest = run(second, way=way, every=10, ranks=ranks).resume(tmp_path)
    rest.anchor(2).min_anchor(1).run().join(WAIT_S)
    steps = [m.step for m in second.within]
    assert done == 54
    assert steps
    assert all(60 <= step <= 96 for step in steps)
    tens = [m.step // 10 for m in first.within + second.within]
    assert tens == sorted(set(tens))


def test_loggers_write_the_values_of_eval_fn(tmp_path):
    path = tmp_path / "run.csv"
    run(CsvLogger(path), way=(SYNC, THREAD)).run().join(WAIT_S)
    with path.with_name("run.steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows][:2] == ["8", "16"]
    assert [row["eval/w"] for row in rows][:2] == ["4.0", "8.0"]


def test_eval_every_without_eval_fn_is_refused():
    with pytest.raises(ValueError, match=r"eval_every\(5\) needs eval_fn"):
        builder().eval_every(5).run()


# -- metrics of other packages ---------------------------------------------------


class Accuracy:
    """Has the methods of ``torchmetrics.Metric`` that an evaluation uses."""

    def __init__(self, **_):
        self.reset()

    def reset(self):
        self.right = self.num = 0

    def update(self, logits, labels):
        self.right += (logits.argmax(1) == labels).sum().item()
        self.num += len(labels)

    def compute(self):
        return torch.tensor(self.right / self.num)


def accuracy():
    if importlib.util.find_spec("torchmetrics") is None:
        return Accuracy()
    from torchmetrics.classification import MulticlassAccuracy

    return MulticlassAccuracy(num_classes=2, average="micro")


@pytest.mark.parametrize("make", [Accuracy, accuracy])
def test_a_metric_object_is_updated_with_the_averaged_model(make):
    """As docs/training.md shows it; with torchmetrics where it is installed."""
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    labels = (x.sum(1) > 0).long()
    metric = make()

    def evaluate(model, epoch):
        metric.reset()
        for inputs, wanted in zip(x.split(16), labels.split(16), strict=True):
            metric.update(model(inputs), wanted)
        return {"accuracy": metric.compute()}

    b = builder(
        model=nn.Linear(3, 2),
        optim=lambda params: torch.optim.SGD(params, 0.5),
        train=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        dataset=(x, labels),
        batch_size=8,
        epochs=8,
    )
    state = b.eval_fn(evaluate).run().join(WAIT_S)
    assert state.metrics[-1].scalars["eval/accuracy"] > 0.9
