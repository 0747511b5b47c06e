"""One worker's handling of values that are not finite, and its cost in each step."""

from __future__ import annotations

import pytest
import torch

from coordinator import messages as m
from runtime import NonFiniteError
from runtime.replica.non_finite import ON_NON_FINITE
from tests.support.faulty import Single, Spoilt, count_pair, is_finite, pair
from tests.support.running import WAIT_S, task
from tests.unit.worker import test_worker
from tests.unit.worker.test_worker import BATCH

READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__")


class Alone(test_worker.Alone):
    """One worker of two, whose queues the test reads and writes."""

    def __init__(self, mode, train=count_pair, model=pair, **kwargs):
        super().__init__(train=train, model=model, world_size=2, on_non_finite=mode, **kwargs)

    def steps(self, count, train=None):
        for _ in range(count):
            self.worker.train_step(BATCH, train)

    def send(self, message):
        super().send(message)
        self.worker.handle_control()

    def answer(self):
        return self.reports.get(timeout=WAIT_S)


def average_like(payload, value):
    return m.Payload(params=tuple(torch.full_like(t, value) for t in payload.params))


# -- cost ----------------------------------------------------------------------------


def reads_in_steps(monkeypatch, mode):
    """Names of the methods by which ten steps read values from the device."""
    alone = Alone(mode)
    alone.steps(1)
    reads = []

    def counted(name):
        real = getattr(torch.Tensor, name)

        def method(self, *args, **kwargs):
            reads.append(name)
            return real(self, *args, **kwargs)

        return method

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, counted(name), raising=False)
        assert bool(torch.ones(1)), "a read"
        assert reads == ["__bool__"], "reads are not counted"
        alone.steps(10)
    return reads[1:]


@pytest.mark.parametrize("mode", ["raise", "ignore"])
def test_a_step_reads_nothing_from_the_device(monkeypatch, mode):
    assert reads_in_steps(monkeypatch, mode) == []


def test_skip_reads_one_flag_a_step(monkeypatch):
    assert reads_in_steps(monkeypatch, "skip") == ["__float__"] * 10


# -- live weights --------------------------------------------------------------------


@pytest.mark.parametrize("kind", [m.TaskKind.EVALUATE, m.TaskKind.HAND_OVER])
@pytest.mark.parametrize("mode", ON_NON_FINITE)
def test_user_functions_are_not_called_with_bad_live_weights(mode, kind):
    seen, message = [], m.RunTasks(tasks=(task(kind),))

    def show(*_):
        seen.append(1)
        return {}

    alone = Alone(mode, eval_fn=show, checkpoint_fn=show)
    alone.steps(1)
    alone.send(message)
    assert len(seen) == 1
    with torch.no_grad():
        alone.worker.model.second[0] = float("nan")
    with pytest.raises(NonFiniteError, match="second"):
        alone.send(message)
    assert len(seen) == 1


def test_user_functions_see_the_average_of_a_round_without_samples():
    seen = []
    alone = Alone("raise", eval_fn=lambda model, epoch: seen.append(model.first.tolist()) or {})
    alone.send(m.RequestParams(round=1))
    snapshot = alone.answer()
    alone.steps(1)  # of the next epoch already
    average = average_like(snapshot.payload, 0.0)
    tasks = (task(m.TaskKind.EVALUATE),)
    alone.send(m.Update(round=1, average=average, num_samples=0, tasks=tasks))
    assert seen == [[0.0, 0.0]]
    assert alone.worker.model.first.tolist() == [1.0, 1.0]


# -- skip ----------------------------------------------------------------------------


def test_a_dropped_step_is_counted_and_has_no_weight():
    alone = Alone("skip", Spoilt("gradient", (0, 1)))
    alone.steps(3)
    alone.worker.report_timing()
    stats = alone.answer().stats
    assert (stats.num_batches, stats.num_samples, stats.num_skipped) == (3, 6, 2)
    assert stats.loss_samples == 4
    snapshot = alone.worker.snapshot_params()
    assert (snapshot.num_batches, snapshot.num_samples) == (3, 4)


def test_a_dropped_loss_keeps_fp16s_scale():
    alone = Alone("skip", model=lambda d: Single(), precision="fp16")
    precision = alone.worker.replica.precision
    scale = precision.state_dict()["scale"]
    for factor, after in ((1.0, scale), (float("nan"), scale), (1e38, scale / 2), (1.0, scale / 2)):
        alone.steps(1, lambda model, batch, f=factor: model.w.sum() * f)
        assert precision.state_dict()["scale"] == after
    assert alone.worker.model.w.tolist() == [-2.0]


# -- ignore --------------------------------------------------------------------------


def snapshot_of_a_spoilt_replica(alone):
    """Two steps, the second one bad, reported before the round."""
    alone.steps(2)
    alone.worker.report_timing()
    assert alone.answer().stats.num_skipped == 0
    alone.send(m.RequestParams(round=1))
    snapshot = alone.answer()
    assert (snapshot.healthy, snapshot.num_samples, snapshot.num_batches) == (False, 0, 2)
    assert snapshot.report.stats.num_batches == 0
    assert snapshot.report.stats.num_skipped == 4
    return snapshot


def test_the_average_replaces_a_bad_replica_and_its_later_training():
    alone = Alone("ignore", Spoilt("loss", (0, 1)))
    snapshot = snapshot_of_a_spoilt_replica(alone)
    alone.steps(3)
    alone.send(m.Update(round=1, average=average_like(snapshot.payload, 7.0), num_samples=4))
    assert isinstance(alone.answer(), m.SyncAck)
    assert alone.worker.model.first.tolist() == [7.0, 7.0]
    alone.steps(1)
    alone.send(m.RequestParams(round=2))
    snapshot = alone.answer()
    assert snapshot.report.stats.num_skipped == 6
    # Lost batches count for the limits; only the last one has a weight.
    assert (snapshot.healthy, snapshot.num_samples, snapshot.num_batches) == (True, 2, 4)
    assert is_finite(snapshot.payload.params)
    assert alone.worker.model.first.tolist() == [8.0, 8.0]


def test_the_average_of_a_round_without_a_finite_state_is_not_applied():
    alone = Alone("ignore", Spoilt("loss", (0, 1)))
    snapshot = snapshot_of_a_spoilt_replica(alone)
    tasks = (task(m.TaskKind.EVALUATE),)
    with pytest.raises(NonFiniteError, match="first"):
        alone.send(m.Update(round=1, average=snapshot.payload, num_samples=0, tasks=tasks))
    assert alone.reports.empty()


def test_a_replica_that_turns_bad_during_a_round_is_healed_in_the_next():
    alone = Alone("ignore", Spoilt("gradient", (0, 2)))
    alone.steps(2)
    alone.send(m.RequestParams(round=1))
    snapshot = alone.answer()
    assert snapshot.healthy
    alone.steps(1)
    alone.send(m.Update(round=1, average=average_like(snapshot.payload, 5.0), num_samples=4))
    assert isinstance(alone.answer(), m.SyncAck)
    alone.send(m.RequestParams(round=2))
    snapshot = alone.answer()
    assert (snapshot.healthy, snapshot.num_samples) == (False, 0)
    assert snapshot.report.stats.num_skipped == 2
    alone.send(m.Update(round=2, average=average_like(snapshot.payload, 6.0), num_samples=4))
    assert alone.worker.model.second.tolist() == [6.0] * 3
