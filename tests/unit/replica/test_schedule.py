"""Learning rates: torch schedulers at the position of the run, and the scale."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from coordinator import messages as m
from coordinator.messages import Send
from coordinator.service import Service
from runtime import CheckpointError, WorkerFailed, current_worker
from runtime.replica.schedule import Schedule, takes_total
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    builder,
    count_up,
    every_way,
)

FACTORIES = {
    "LambdaLR": lambda o: LambdaLR(o, lambda i: 1.0 + i),
    "StepLR": lambda o: StepLR(o, 3, 0.5),
    "OneCycleLR": lambda o: OneCycleLR(o, 0.4, total_steps=21),
}
by_name = pytest.mark.parametrize("name", FACTORIES)


def optimizer(lr=0.1):
    # Two groups, both with rates of the scheduler.
    groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": 2 * lr}]
    return SGD(groups, lr, momentum=0.9)


def rates(o):
    return [group["lr"] for group in o.param_groups]


def reference(name, steps, scale=1.0):
    """The rates after each number of steps of a plain torch loop."""
    o = optimizer()
    scheduler = FACTORIES[name](o)
    found = [rates(o)]
    for _ in range(steps):
        o.step()
        scheduler.step()
        found.append(rates(o))
    return [[scale * r for r in row] for row in found]


@by_name
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("positions", [range(21), [0, 3, 4, 11, 20], [20]])
def test_a_position_gives_the_rate_of_a_torch_loop(name, scale, positions):
    o = optimizer()
    schedule = Schedule(o, FACTORIES[name], 20)
    schedule.set_scale(scale)
    wanted = reference(name, 20, scale)
    for position in positions:
        schedule.advance(position)
        assert rates(o) == pytest.approx(wanted[position])
    assert schedule.current == pytest.approx(wanted[positions[-1]][0])


@by_name
def test_positions_past_the_end_and_behind_change_nothing(name):
    o = optimizer()
    schedule = Schedule(o, FACTORIES[name], 20)
    for position in (20, 500, 3, 0):
        schedule.advance(position)
        assert rates(o) == pytest.approx(reference(name, 20)[20])


def test_a_scheduler_overwrites_a_rate_set_by_hand():
    o = optimizer()
    schedule = Schedule(o, FACTORIES["LambdaLR"])
    schedule.set_lr(9.0)
    assert rates(o) == [9.0, 9.0]
    schedule.advance(1)
    assert rates(o) == pytest.approx([0.2, 0.4])


def test_positions_have_no_effect_without_a_scheduler():
    o = optimizer()
    schedule = Schedule(o)
    schedule.advance(5)
    schedule.scale_lr(3.0)
    assert rates(o) == pytest.approx([0.3, 0.6])


def test_a_rate_in_a_tensor_stays_a_tensor():
    o = SGD([torch.zeros(1)], torch.tensor(0.5))
    schedule = Schedule(o)
    lr = o.param_groups[0]["lr"]
    schedule.set_lr(0.25)
    assert o.param_groups[0]["lr"] is lr
    assert schedule.current == 0.25


def test_an_object_without_step_is_refused_as_a_scheduler():
    with pytest.raises(TypeError, match="not a torch"):
        Schedule(optimizer(), lambda o: 3)


def test_a_scheduler_of_another_optimizer_is_refused():
    other = optimizer()
    with pytest.raises(ValueError, match="StepLR of another optimizer"):
        Schedule(optimizer(), lambda o: StepLR(other, 1))


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_workers_have_rates_of_their_own_if_their_factories_pass_one_tensor(way):
    rate, made = torch.tensor(0.5), []

    def optim(params):
        made.append(SGD(params, rate))
        return made[-1]

    b = builder(optim=optim, dataset=8, ranks=2, way=way)
    b.scheduler(lambda o: StepLR(o, 1, gamma=0.5)).run().join(WAIT_S)
    first, second = (o.param_groups[0]["lr"] for o in made)
    assert first is not second
    assert float(rate) == 0.5


class TestByMetric:
    def halving(self, o):
        return ReduceLROnPlateau(o, factor=0.5, patience=0)

    def test_each_value_counts_once_however_often_it_is_passed(self):
        o, alone = optimizer(), optimizer()
        schedule, expected = Schedule(o, self.halving, every=0), self.halving(alone)
        values = [1.0, 2.0, 0.5, 0.7, 0.9]
        for n in (0, 1, 1, 3, 5):
            schedule.step_by_metrics(values[:n])
        for value in values:
            expected.step(value)
        assert rates(o) == rates(alone) == [0.1 / 8, 0.2 / 8]

    def test_positions_have_no_effect(self):
        o = optimizer()
        schedule = Schedule(o, self.halving, every=0)
        schedule.advance(100)
        schedule.step_by_metrics([1.0, 2.0])
        assert rates(o) == [0.05, 0.1]

    def test_a_scale_multiplies_the_schedulers_rate(self):
        o = optimizer()
        schedule = Schedule(o, self.halving, every=0)
        schedule.set_scale(3.0)
        schedule.step_by_metrics([1.0, 2.0, 3.0])
        assert rates(o) == pytest.approx([0.075, 0.15])

    def test_the_state_contains_the_values_seen(self):
        o, other = optimizer(), optimizer()
        schedule, again = (Schedule(x, self.halving, every=0) for x in (o, other))
        schedule.step_by_metrics([1.0, 2.0])
        again.load(schedule.saved())
        other.load_state_dict(o.state_dict())
        again.step_by_metrics([1.0, 2.0, 3.0])
        assert rates(other) == [0.025, 0.05]

    def test_an_epoch_without_the_metric_makes_no_step(self):
        o, other = optimizer(), optimizer()
        Schedule(o, self.halving, every=0).step_by_metrics([1.0, None, 2.0])
        Schedule(other, self.halving, every=0).step_by_metrics([1.0, 2.0])
        assert rates(o) == rates(other)

    def test_a_metric_is_required_by_plateau_schedulers_and_refused_for_others(self):
        with pytest.raises(TypeError, match=r"is stepped by .* metric='eval/loss'"):
            Schedule(optimizer(), self.halving)
        with pytest.raises(TypeError, match="leave metric out"):
            Schedule(optimizer(), FACTORIES["LambdaLR"], every=0)

    def test_a_state_of_another_kind_is_refused(self):
        saved = Schedule(optimizer(), FACTORIES["LambdaLR"]).saved()
        with pytest.raises(ValueError, match="every 1 batches, and is now stepped by a metric"):
            Schedule(optimizer(), self.halving, every=0).load(saved)


# -- in a run ------------------------------------------------------------------


class Rates:
    """Records the rate of every batch, by rank."""

    def __init__(self):
        self._lock = threading.Lock()
        self.of = {}

    def __call__(self, model, batch):
        worker = current_worker()
        with self._lock:
            self.of.setdefault(worker.rank, []).append(worker.current_lr)
        return count_up(model, batch)


def counting(o):
    """The rate is the position, from 1."""
    return LambdaLR(o, lambda i: 1.0 + i)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_lockstep_ranks_count_the_batches_of_all(ranks):
    found = Rates()
    b = builder(train=found, dataset=22, epochs=2, ranks=ranks, way=(SYNC, THREAD))
    b.scheduler(counting).run().join(WAIT_S)
    # 11 batches an epoch, and the last step of an epoch may be short of ranks.
    steps = [i for epoch in (0, 11) for i in range(epoch, epoch + 11, ranks)]
    for rank in range(ranks):
        short = [i for i in steps if (i % 11) + rank < 11]
        assert found.of[rank] == [1.0 + i for i in short]


def test_a_window_is_one_position_of_the_schedule():
    found = Rates()
    b = builder(train=found, dataset=20, batch_size=1, epochs=1, ranks=2, way=(SYNC, THREAD))
    b.accumulate(3).scheduler(counting).run().join(WAIT_S)
    windows = [1.0] * 3 + [7.0] * 3 + [13.0] * 3 + [19.0]
    assert found.of == {0: windows, 1: windows}


@every_way
def test_the_position_ends_at_the_batches_of_all_ranks(way):
    """No rate is beyond the last position, and a late one is near it."""
    found = Rates()
    b = builder(train=found, dataset=60, batch_size=1, epochs=3, ranks=2, way=way)
    handle = b.anchor(2).max_anchor(2).scheduler(counting).run()
    handle.join(WAIT_S)
    assert handle.statistics().global_step == 180
    every = [rate for of in found.of.values() for rate in of]
    assert max(every) <= 181.0
    for of in found.of.values():
        assert of == sorted(of)
        assert of[0] == 1.0
    if way[0] is SYNC:
        assert max(every) == 179.0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_scale_without_a_scheduler_acts_once(ranks):
    found = Rates()
    builder(train=found, dataset=12, ranks=ranks).lr_scale_ratio(1.0).run().join(WAIT_S)
    assert {rate for of in found.of.values() for rate in of} == {float(ranks)}


def test_a_scale_set_before_the_scheduler_holds_from_the_first_step():
    parameter = torch.nn.Parameter(torch.zeros(1))
    schedule = Schedule(torch.optim.SGD([parameter], 0.1))
    schedule.set_scale(2.0)
    schedule.attach(lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
    assert schedule.current == pytest.approx(0.2)


def test_ranks_receive_the_global_step_before_their_next_report(monkeypatch):
    """Else every rate lags behind by what the ranks trained for the last round."""
    sent, received = threading.Event(), {}
    execute = Service._execute

    def tapped(service, command, now):
        execute(service, command, now)
        if isinstance(command, Send) and isinstance(command.message, m.SetGlobalStep):
            sent.set()

    def first_step_after_a_round(model, batch):
        worker = current_worker()
        if worker.rank not in received and worker.protocol.batches == 0 and worker.local_step >= 4:
            received[worker.rank] = sent.wait(WAIT_S / 4)
        return count_up(model, batch)

    monkeypatch.setattr(Service, "_execute", tapped)
    way = (CADENCE, THREAD)
    handle = (
        builder(dataset=400, train=first_step_after_a_round, ranks=2, way=way)
        .anchor(4)
        .max_anchor(4)
        .run()
    )
    handle.join(WAIT_S)
    assert received == {0: True, 1: True}


# -- once an epoch ----------------------------------------------------------------------------


def rates_by_epoch(way, ranks, epochs=3, seen=None, dataset=24, **more):
    """The rates that each epoch's batches were trained with."""
    seen = {} if seen is None else seen

    def look(model, batch):
        worker = current_worker()
        seen.setdefault(worker.current_epoch, set()).add(round(worker.current_lr, 9))
        return count_up(model, batch)

    b = builder(train=look, dataset=dataset, epochs=epochs, ranks=ranks, way=way)
    b.scheduler(lambda o: StepLR(o, 1, 0.5), interval="epoch")
    for name, value in more.items():
        getattr(b, name)(value)
    return seen, b.run().join(WAIT_S)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_with_the_interval_of_an_epoch_all_its_batches_have_one_rate(ranks):
    seen, state = rates_by_epoch((SYNC, THREAD), ranks)
    (first,) = seen[0]
    assert [found == {round(first * 0.5**epoch, 9)} for epoch, found in seen.items()] == [True] * 3
    assert state.metrics[0].learning_rate == pytest.approx(first)


@pytest.mark.parametrize("way", [(CADENCE, OVER_CPU), (ASYNC, THREAD)])
def test_epoch_intervals_hold_for_ranks_without_lockstep(way):
    # Between two rounds a rank counts only its own batches.
    seen, _ = rates_by_epoch(way, 2, dataset=400, anchor=2, max_anchor=2)
    first, last = max(seen[0]), min(seen[2])
    assert last == pytest.approx(first / 4)
    assert set().union(*seen.values()) <= {round(first * 0.5**i, 9) for i in range(4)}


def test_a_resumed_run_keeps_the_rate_of_the_epoch_and_refuses_another_interval(tmp_path):
    seen, _ = rates_by_epoch((SYNC, THREAD), 2, epochs=2, checkpoint_dir=tmp_path)
    rates_by_epoch((SYNC, THREAD), 2, epochs=3, seen=seen, resume=tmp_path)
    (first,) = seen[0]
    assert seen[2] == {round(first / 4, 9)}
    b = builder(dataset=24, epochs=4, way=(SYNC, THREAD)).resume(tmp_path)
    with pytest.raises(RuntimeError, match="interval"):
        b.scheduler(lambda o: StepLR(o, 1, 0.5)).run().join(WAIT_S)


def test_an_unknown_interval_is_refused():
    with pytest.raises(ValueError, match="pass one of step, epoch"):
        builder().scheduler(lambda o: StepLR(o, 1), interval="batch")


def worse(model, epoch):
    """A metric that gets worse from epoch to epoch."""
    return {"loss": 1.0 + epoch}


def halving(o):
    return ReduceLROnPlateau(o, factor=0.5, patience=0)


@pytest.mark.parametrize("ranks", [1, 3])
def test_under_sync_each_epoch_begins_with_the_metric_of_the_one_before(ranks):
    found = Rates()
    b = builder(train=found, dataset=12, epochs=4, ranks=ranks, way=(SYNC, THREAD))
    b.scheduler(halving, metric="eval/loss").eval_fn(worse)
    metrics = b.run().join(WAIT_S).metrics
    for rank in range(ranks):
        steps = len(found.of[rank]) // 4
        assert found.of[rank] == [r for r in (1.0, 1.0, 0.5, 0.25) for _ in range(steps)]
    assert [m.learning_rate for m in metrics] == [1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize("policy", [CADENCE, ASYNC])
def test_a_rank_receives_a_metric_with_its_next_plan(policy):
    def falling(model, batch):
        return count_up(model, batch) * 0 - current_worker().current_epoch

    b = builder(train=falling, dataset=40, epochs=12, ranks=2, way=(policy, OVER_CPU))
    b.scheduler(halving, metric="avg_loss").progress(False)
    metrics = b.run().join(WAIT_S).metrics
    assert {m.learning_rate for m in metrics} == {1.0}

    rates, late = Rates(), []

    def train(model, batch):
        worker = current_worker()
        # Three epochs are open at most.
        if worker.current_lr > 0.5 ** (worker.current_epoch - 3):
            late.append((worker.rank, worker.current_epoch, worker.current_lr))
        return rates(model, batch)

    b = builder(train=train, dataset=40, epochs=12, ranks=2, way=(policy, OVER_CPU))
    b.scheduler(halving, metric="eval/loss").eval_fn(worse)
    b.run().join(WAIT_S)
    assert not late
    assert all(of == sorted(of, reverse=True) for of in rates.of.values())


def test_a_resumed_run_steps_only_by_later_metrics(tmp_path):
    def run(epochs, **more):
        found = Rates()
        b = builder(train=found, dataset=12, epochs=epochs, ranks=2, way=(SYNC, THREAD))
        b.scheduler(halving, metric="eval/loss").eval_fn(worse)
        for name, value in more.items():
            getattr(b, name)(value)
        b.run().join(WAIT_S)
        return found.of

    whole = run(4)
    first = run(3, checkpoint_dir=tmp_path, max_steps=16)
    again = run(4, resume=tmp_path)
    assert {rank: first[rank] + again[rank] for rank in whole} == whole


def test_a_missing_metric_ends_the_run_with_the_remedy():
    b = builder(epochs=2, way=(SYNC, THREAD)).scheduler(halving, metric="accuracy")
    with pytest.raises(ValueError, match=r"scheduler\(metric='accuracy'\).*record_scalar"):
        b.run().join(WAIT_S)


def test_requirements_of_a_metric_are_checked_before_the_run():
    with pytest.raises(ValueError, match=r"needs eval_fn\(f\), which gives 'loss'"):
        builder().scheduler(halving, metric="eval/loss").run()
    with pytest.raises(TypeError, match="pass a name"):
        builder().scheduler(halving, metric=3)


# -- the number of steps of the run -------------------------------------------------------------


def one_cycle(optimizer, total):
    return OneCycleLR(optimizer, 0.4, total_steps=total)


class Callable:
    """A factory that is an object."""

    def __call__(self, optimizer, total):
        return one_cycle(optimizer, total)


TAKE_TOTAL = {
    "function": (one_cycle, True),
    "object": (Callable(), True),
    "bound method": (Callable().__call__, True),
    "total with a default": (lambda optimizer, total=None: None, True),
    "optimizer alone": (lambda optimizer: None, False),
    "setting with a default": (lambda optimizer, rate=0.1: None, False),
    "any arguments": (lambda *arguments: None, False),
    "partial": (functools.partial(OneCycleLR, max_lr=0.4, total_steps=9), False),
    "class": (torch.optim.lr_scheduler.ConstantLR, False),
}


@pytest.mark.parametrize("name", TAKE_TOTAL)
def test_a_factory_takes_the_number_of_steps_by_its_signature(name):
    factory, wanted = TAKE_TOTAL[name]
    assert takes_total(factory) is wanted


@pytest.mark.parametrize(
    "factory",
    [
        lambda: None,
        lambda optimizer, total, more: None,
        lambda optimizer, *, gamma: None,
        StepLR,  # its second argument is no number of steps of the run
        OneCycleLR,
    ],
)
def test_a_factory_with_another_signature_is_refused_at_once(factory):
    for given in (factory, {"a": factory}):
        with pytest.raises(TypeError, match=r"^scheduler.*optimizer.*(pass|define)"):
            builder().scheduler(given)


TOTALS = [
    ({}, {}, 30),  # 3 epochs of 10 batches, counted over both ranks
    ({}, {"interval": "epoch"}, 3),
    ({"max_steps": 14}, {}, 14),
    ({"max_steps": 14}, {"interval": "epoch"}, 2),
    ({"drop_last": True, "batch_size": 3}, {}, 18),
    ({"accumulate": 2}, {}, 30),
]


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@pytest.mark.parametrize(("settings", "how", "total"), TOTALS)
def test_the_number_of_steps_is_that_of_the_run(policy, settings, how, total):
    found = []

    def scheduler(optimizer, total):
        found.append(total)
        return one_cycle(optimizer, total)

    b = builder(dataset=20, batch_size=2, epochs=3, way=(SYNC, THREAD)).policy(policy)
    for name, value in settings.items():
        getattr(b, name)(value)
    b.scheduler(scheduler, **how).run().join(WAIT_S)
    assert found == [total] * 2


def test_a_plateau_scheduler_may_take_the_number_of_epochs():
    found = []

    def scheduler(optimizer, total):
        found.append(total)
        return ReduceLROnPlateau(optimizer)

    builder(epochs=3).scheduler(scheduler, metric="avg_loss").run().join(WAIT_S)
    assert found == [3] * 2


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_cycle_that_ends_one_step_early_is_no_error(policy, missing):
    """Every batch trains at a rate of the cycle: no step is made at the position after the last."""
    trained_at = []

    def train(model, batch):
        trained_at.append(current_worker().current_lr)
        return count_up(model, batch)

    def cycle(o):
        return OneCycleLR(o, 0.4, total_steps=20 - missing)

    b = builder(train=train, dataset=20, batch_size=2, epochs=2, way=(SYNC, THREAD)).policy(policy)
    b.scheduler(cycle).run().join(WAIT_S)
    scheduler, of_cycle = cycle(o := optimizer()), []
    for _ in range(20 - missing):
        of_cycle.append(rates(o)[0])
        o.step()
        scheduler.step()
    assert len(trained_at) == 20
    assert all(any(rate == pytest.approx(each) for each in of_cycle) for rate in trained_at)


def test_a_cycle_that_ended_one_step_early_keeps_its_last_rate():
    o = optimizer()
    schedule = Schedule(o, lambda o: OneCycleLR(o, 0.4, total_steps=19), 20, num_steps=20)
    schedule.advance(19)
    last = rates(o)
    schedule.advance(20)
    assert rates(o) == last


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_a_cycle_that_is_shorter_than_the_run_is_refused_before_the_first_step(way):
    stepped = []

    def train(model, batch):
        stepped.append(batch)
        return count_up(model, batch)

    b = builder(train=train, dataset=20, batch_size=2, epochs=2, way=way)
    b.scheduler(lambda o: OneCycleLR(o, 0.4, total_steps=18))
    with pytest.raises(WorkerFailed, match=r"18 steps, and the run 20.*lambda optimizer, total"):
        b.run().join(WAIT_S)
    assert stepped == []


def test_a_resumed_cycle_is_as_long_as_the_first(tmp_path):
    def run(epochs):
        b = builder(dataset=20, batch_size=2, epochs=epochs, way=(SYNC, THREAD))
        return b.scheduler(one_cycle)

    run(2).checkpoint_dir(tmp_path).run().join(WAIT_S)
    with pytest.raises(CheckpointError, match="keeps the steps of its checkpoint"):
        run(3).resume(tmp_path).run().join(WAIT_S)


def test_the_number_of_steps_is_unknown_without_a_run():
    with pytest.raises(ValueError, match="the loop is the caller's"):
        Schedule(optimizer(), one_cycle)
