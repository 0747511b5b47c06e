"""Early stopping, the best weights and a limit of time."""

from __future__ import annotations

import dataclasses
import logging
import math
import pickle
import threading
from datetime import timedelta

import pytest
import torch
from torch import nn

from runtime import (
    Callback,
    EarlyStopping,
    KeepBest,
    TimeLimit,
    TrainerHandle,
    UnknownMetric,
    WorkerFailed,
    current_worker,
    record_scalar,
)
from runtime.callbacks import MetricReader, MetricTracker
from runtime.checkpoint.tensor_file import load_file
from runtime.run import Run
from tests.support.running import CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, builder, count_up, over

WAYS = [(SYNC, THREAD), (CADENCE, OVER_CPU)]
each_way = over(WAYS)


def run_with(values, *callbacks, way=(SYNC, THREAD), epochs=None, **settings):
    """A run whose evaluation returns these values, one per epoch."""
    b = builder(way=way, epochs=epochs or len(values), **settings)
    b.eval_fn(lambda model, epoch: {"score": values[epoch]})
    return b.callbacks(*callbacks).run().join(WAIT_S)


def cut_short(b):
    return b.num_epochs(2).max_steps(3)


def not_validated(b):
    return b.num_epochs(1)


@pytest.mark.parametrize("way", [*WAYS, (SYNC, OVER_CPU)])
@pytest.mark.parametrize(("shorten", "every"), [(cut_short, 1), (not_validated, 2)])
@pytest.mark.parametrize(("in_file", "restore"), [(True, True), (True, False), (False, True)])
def test_best_weights_of_a_metric_that_no_epoch_had_are_reported_as_the_last_ones(
    way, shorten, every, in_file, restore, tmp_path, caplog
):
    path = tmp_path / "best.safetensors" if in_file else None
    keep = KeepBest(path, "val/loss", restore=restore)
    b = shorten(builder(way=way, dataset=80)).val_dataset((torch.arange(4),), every)
    state = b.callbacks(keep).run().join(WAIT_S)
    assert float(state.state_dict()["w"]) > 0
    (warning,) = [r.getMessage() for r in caplog.records if "KeepBest" in r.getMessage()]
    unwritten = f", and {path} was not written" if in_file else ""
    assert warning.startswith(
        "KeepBest(metric='val/loss'): no closed epoch had a value of this metric: the state has "
        f"the last weights{unwritten}. Train until an epoch closes"
    )
    assert not in_file or not path.exists()


def test_best_weights_of_a_metric_that_an_epoch_had_are_not_reported(tmp_path, caplog):
    run_with([2.0, 1.0], KeepBest(tmp_path / "best.safetensors", "eval/score"))
    assert "no closed epoch" not in caplog.text


# Early stopping.


@each_way
def test_a_run_ends_once_its_metric_was_no_better_for_so_many_epochs(way):
    stop = EarlyStopping("eval/score", patience=2)
    # More epochs may close before the run receives the request.
    state = run_with([5.0, 3.0, 4.0, 3.0, *[9.0] * 400], stop, way=way)
    assert (stop.best, stop.best_epoch, stop.stopped_epoch) == (3.0, 1, 3)
    assert state.stopped
    assert 4 <= len(state.metrics) < 404


@pytest.mark.parametrize(
    ("values", "settings", "stopped"),
    [
        ([1.0, 2.0, 3.0, 2.9, 2.9, 2.9], {"mode": "max", "patience": 3}, 5),
        ([1.0, 2.0, 3.0, 2.9, 2.9, 3.1], {"mode": "max", "patience": 3}, None),
        ([3.0, 2.95, 2.9, 2.85], {"min_delta": 0.2, "patience": 3}, 3),
        ([3.0, 2.9, 2.8, 2.7], {"patience": 1}, None),
        ([math.nan, 3.0, math.nan, math.nan], {"patience": 2}, 3),
        ([math.nan, math.nan, 1.0], {"patience": 2}, 1),
        ([5.0, 4.0, 2.0, 1.0], {"target": 2.0}, 2),
        ([0.5, 0.97, 0.99, 1.0], {"target": 0.98, "mode": "max"}, 2),
    ],
)
def test_when_early_stopping_ends_a_run(values, settings, stopped):
    stop = EarlyStopping("eval/score", **settings)
    run_with(values, stop)
    assert stop.stopped_epoch == stopped


@each_way
def test_an_early_stopping_that_is_used_again_starts_afresh(way):
    stop = EarlyStopping("eval/score", patience=2)
    run_with([1.0, 2.0, *[3.0] * 400], stop, way=way)
    assert (stop.best, stop.best_epoch, stop.stopped_epoch) == (1.0, 0, 2)
    # Worse than the best of the first run, and each time for one epoch only.
    state = run_with([math.nan, 5.0, 6.0, 4.0, 6.0, 3.0], stop, way=way)
    assert (state.stopped, len(state.metrics)) == (False, 6)
    assert (stop.best, stop.best_epoch, stop.stopped_epoch) == (3.0, 5, None)
    run_with([9.0, 8.0, *[9.0] * 400], stop, way=way)
    assert (stop.best, stop.best_epoch, stop.stopped_epoch) == (8.0, 1, 3)


def test_an_incomplete_epoch_does_not_count_for_early_stopping():
    stop = EarlyStopping(mode="max", patience=1)
    b = builder(dataset=80, epochs=3).max_steps(60)  # an epoch has 40; the loss falls
    state = b.callbacks(stop).run().join(WAIT_S)
    assert [m.partial for m in state.metrics] == [False, True]
    assert (stop.best_epoch, stop.stopped_epoch) == (0, None)


def test_the_loss_and_recorded_scalars_can_be_watched():
    def train(model, batch):
        record_scalar("accuracy", 0.5)
        return count_up(model, batch)

    loss, accuracy = EarlyStopping(patience=1), EarlyStopping("accuracy", patience=1, mode="max")
    state = builder(train=train, epochs=30).callbacks(loss, accuracy).run().join(WAIT_S)
    assert accuracy.stopped_epoch == 1
    assert loss.best == min(m.avg_loss for m in state.metrics[: loss.best_epoch + 1])


def misspelt_schedule(b, metric):
    def plateau(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    return b.scheduler(plateau, metric=metric)


def own_callback(b, metric):
    class Own(Callback):
        reader = MetricTracker("Own", metric, "min")

        def __call__(self, metrics):
            self.reader.read(metrics)

    return b.callbacks(Own())


FOLLOWERS = {
    "EarlyStopping": lambda b, metric: b.callbacks(EarlyStopping(metric)),
    "KeepBest": lambda b, metric: b.callbacks(KeepBest("best.safetensors", metric)),
    "scheduler": misspelt_schedule,
    "Own": own_callback,
}


@each_way
@pytest.mark.parametrize("follower", FOLLOWERS)
def test_a_misspelt_metric_ends_the_run_after_the_first_epoch_and_keeps_its_state(
    way, follower, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    # More epochs may close before the run has received the request to stop.
    b = builder(way=way, epochs=400).eval_fn(lambda model, epoch: {"accuracy": 0.5})
    b = FOLLOWERS[follower](b, "eval/acuracy").checkpoint_dir(tmp_path / "saved")
    handle = b.run()
    with pytest.raises(
        UnknownMetric,
        match=rf"{follower}.*: epoch 0 has no metric 'eval/acuracy' \(did you mean "
        r"'eval/accuracy'\?\); it has eval/accuracy, .*avg_loss",
    ):
        handle.join(WAIT_S)
    assert handle.state is not None
    assert (handle.state.stopped, handle.state.reason) == (True, "failed")
    assert 1 <= len(handle.state.metrics) < 400
    assert list((tmp_path / "saved").iterdir())


@pytest.mark.parametrize("follower", ["EarlyStopping", "KeepBest", "scheduler"])
@pytest.mark.parametrize(
    ("metric", "source"), [("eval/loss", "eval_fn"), ("val/loss", "val_dataset")]
)
def test_a_metric_of_an_evaluation_that_is_not_set_is_refused_before_the_run(
    follower, metric, source
):
    b = FOLLOWERS[follower](builder(), metric)
    with pytest.raises(
        ValueError, match=rf"{follower}\(metric='{metric}'\) needs {source}\(.*'loss'"
    ):
        b.run()


def test_a_misspelt_metric_of_a_run_of_one_epoch_is_an_error():
    handle = builder().callbacks(EarlyStopping("loss")).run()
    with pytest.raises(UnknownMetric, match=r"has no metric 'loss' \(did you mean 'avg_loss'"):
        handle.join(WAIT_S)
    assert len(handle.state.metrics) == 1


def test_a_metric_that_some_epochs_lack_is_warned_of_once(caplog):
    def train(model, batch):
        if current_worker().current_epoch % 2 == 0:
            record_scalar("even", 1.0)
        return count_up(model, batch)

    keep = EarlyStopping("even", patience=9)
    state = builder(train=train, epochs=6, way=(SYNC, THREAD)).callbacks(keep).run().join(WAIT_S)
    assert len(state.metrics) == 6
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "EarlyStopping: epoch 1 has no metric 'even', unlike earlier ones, and is ignored"
    ]


def test_an_epoch_before_the_first_validation_may_lack_its_metrics():
    reader = MetricReader("EarlyStopping", "val/los")
    metrics = run_with([1.0]).metrics[0]
    assert reader.read(metrics) is None
    with pytest.raises(UnknownMetric, match="did you mean 'val/loss'"):
        reader.read(dataclasses.replace(metrics, scalars={"val/loss": 1.0}))


def test_an_unknown_metric_can_be_pickled():
    error = UnknownMetric("EarlyStopping", 0, "los", ["avg_loss"])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.metric, again.available) == (str(error), "los", ("avg_loss",))


# The best weights.


@each_way
def test_the_file_holds_the_weights_of_the_best_epoch(tmp_path, way):
    seen = {}

    def evaluate(model, epoch):
        seen[epoch] = model.w.detach().clone()
        return {"score": values[epoch]}

    values = [3.0, 1.0, 2.0, 1.0]
    keep = KeepBest(tmp_path / "new" / "best.safetensors", "eval/score")
    b = builder(way=way, epochs=4).eval_fn(evaluate).callbacks(keep)
    b.run().join(WAIT_S)
    assert (keep.best, keep.best_epoch) == (1.0, 1)
    assert torch.equal(load_file(keep.path)["w"], seen[1])
    assert not torch.equal(seen[1], seen[3])
    assert not keep._weights  # nothing is held on to


def resumed_after(num_epochs, make, directory, values, states=None):
    """Callbacks made by ``make()`` for a run that stops after some epochs, and its resumed rest."""
    made, states = [], [] if states is None else states
    for epochs, resumes in ((num_epochs, False), (len(values), True)):
        made.append(make())
        b = builder(epochs=epochs).eval_fn(lambda model, epoch: {"score": values[epoch]})
        b = b.callbacks(made[-1]).checkpoint_dir(directory / "run")
        states.append((b.resume(directory / "run") if resumes else b).run().join(WAIT_S))
    return made


@pytest.mark.parametrize("shares_object", [False, True])
@pytest.mark.parametrize(("values", "best"), [([1.0, 3.0, 2.0], 0), ([2.0, 3.0, 1.0], 2)])
def test_the_best_weights_outlast_a_resume(tmp_path, values, best, shares_object):
    keep = KeepBest(tmp_path / "best.safetensors", "eval/score")
    reads = []

    def make():
        reads.append(keep.path.read_bytes() if keep.path.exists() else None)
        return keep if shares_object else KeepBest(keep.path, "eval/score")

    last = resumed_after(1, make, tmp_path, values)[-1]
    assert (last.best, last.best_epoch) == (values[best], best)
    assert (keep.path.read_bytes() == reads[1]) is (best == 0)


@pytest.mark.parametrize("harm", ["removed", "of another metric", "unreadable"])
def test_a_file_that_is_not_the_best_of_the_resumed_run_is_replaced(tmp_path, harm, caplog):
    path = tmp_path / "best.safetensors"
    made = []

    def make():
        if made and harm == "unreadable":
            path.write_bytes(b"no tensors")
        elif made and harm == "removed":
            path.unlink()
        is_other = harm == "of another metric" and not made
        made.append(KeepBest(path, "avg_loss" if is_other else "eval/score"))
        return made[-1]

    last = resumed_after(1, make, tmp_path, [1.0, 3.0, 2.0])[-1]
    assert (last.best, last.best_epoch) == (2.0, 2)
    assert load_file(path).keys() == {"w"}
    assert ("does not hold the weights of epoch 0" in caplog.text) is (harm != "removed")


def test_a_reused_object_starts_afresh_in_another_run(tmp_path):
    keep = KeepBest(tmp_path / "best.safetensors", "eval/score")
    for values in ([1.0], [5.0]):
        run_with(values, keep)
        assert keep.best == values[0]
        content = keep.path.read_bytes()
    run_with([7.0], keep)
    assert keep.path.read_bytes() != content


class Grown(nn.Module):
    """Has buffers in and outside of its state dict, and extra state."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("hidden", torch.zeros(1, dtype=torch.float64), persistent=False)
        self.notes = 0

    def get_extra_state(self):
        return {"notes": self.notes}

    def set_extra_state(self, state):
        self.notes = state["notes"]


def grow(model, batch):
    model.seen += 1
    model.hidden += 1
    model.notes += 1
    return -model.w.sum()


@each_way
@pytest.mark.parametrize("with_file", [False, True])
def test_the_state_of_the_run_has_the_best_weights(tmp_path, way, with_file):
    values, seen = [3.0, 1.0, 2.0, 1.0], {}

    def evaluate(model, epoch):
        seen[epoch] = {
            "w": model.w.item(),
            "seen": model.seen.item(),
            "hidden": model.hidden.item(),
        }
        seen[epoch]["notes"] = model.notes
        return {"score": values[epoch]}

    path = tmp_path / "best.safetensors" if with_file else None
    keep, given = KeepBest(path, "eval/score", restore=True), Grown()
    b = builder(way=way, epochs=4, model=given, train=grow).eval_fn(evaluate).callbacks(keep)
    state = b.run().join(WAIT_S)
    assert keep.best_epoch == 1
    for model in (state.model(Grown), given):
        found = {name: getattr(model, name).item() for name in ("w", "seen", "hidden")}
        assert found | {"notes": model.notes} == seen[1]
    assert seen[1]["w"] != seen[3]["w"]
    assert len(state.metrics) == 4
    if with_file:
        assert load_file(path)["w"].item() == seen[1]["w"]


def test_the_best_weights_of_a_stopped_run_are_restored(tmp_path):
    keep = KeepBest(metric="eval/score", mode="max", restore=True)
    stop = EarlyStopping("eval/score", patience=2, mode="max")
    state = run_with([1.0, 5.0, *[2.0] * 300], keep, stop, way=(CADENCE, OVER_CPU))
    assert state.stopped
    assert keep.best_epoch == 1
    assert state.params["w"].item() < 30


@pytest.mark.parametrize(("values", "best"), [([1.0, 3.0, 2.0], 0), ([2.0, 3.0, 1.0], 2)])
def test_the_best_weights_before_a_resume_are_restored_from_their_file(tmp_path, values, best):
    path, states = tmp_path / "best.safetensors", []

    def make():
        return KeepBest(path, "eval/score", restore=True)

    resumed_after(1, make, tmp_path, values, states)
    assert torch.equal(states[1].params["w"], load_file(path)["w"])
    assert torch.equal(states[1].params["w"], states[0].params["w"]) is (best == 0)


def test_epochs_before_a_resume_count_for_early_stopping(tmp_path):
    def make():
        return EarlyStopping("eval/score", patience=3)

    values = [1.0, 2.0, 2.0, 2.0, *[2.0] * 200]
    last = resumed_after(3, make, tmp_path, values)[-1]
    assert (last.best, last.best_epoch, last.stopped_epoch) == (1.0, 0, 3)


def test_an_early_end_is_announced_and_so_is_a_resume_from_it(tmp_path, caplog, monkeypatch):
    stopped = threading.Event()
    real_stop = Run.stop

    def stop(run, *args):
        real_stop(run, *args)
        stopped.set()

    monkeypatch.setattr(Run, "stop", stop)

    def run(*callbacks, first=0):
        caplog.clear()
        stopped.clear()

        def evaluate(model, epoch):
            assert epoch < first + 2 or not callbacks or stopped.wait(WAIT_S)
            return {"score": float(epoch)}

        b = builder(epochs=30).eval_fn(evaluate).callbacks(*callbacks)
        b = b.checkpoint_dir(tmp_path).resume(tmp_path, missing_ok=True)
        return len(b.run().join(WAIT_S).metrics)

    with caplog.at_level(logging.INFO):
        num = run(EarlyStopping("eval/score", patience=1))
        assert f"the run was stopped by EarlyStopping('eval/score') after {num} of" in caplog.text
        again = run(EarlyStopping("eval/score", patience=1), first=num)
        assert "ended early (stopped), and this one trains on" in caplog.text
        assert f"after {again} of 30 epochs" in caplog.text
        assert num < again < 30
        assert run() == 30
        assert "the run was stopped" not in caplog.text
        run()
        assert "ended early" not in caplog.text


def test_a_run_that_is_stopped_announces_the_reason(caplog):
    with caplog.at_level(logging.INFO):
        handle = builder(dataset=100_000).run()
        handle.stop("out_of_time")
        handle.join(WAIT_S)
        assert "the run was stopped (out_of_time) after 0 of 1 epochs" in caplog.text


def test_the_users_checkpoint_function_keeps_its_interval_beside_a_callback(tmp_path):
    versions = []
    keep = KeepBest(tmp_path / "best.safetensors")
    b = builder(epochs=5).checkpoint_every(2).callbacks(keep)
    b.checkpoint_fn(lambda version, model: versions.append(version)).run().join(WAIT_S)
    assert versions == [2, 4]
    assert keep.path.exists()


def test_training_continues_if_the_weights_cannot_be_written(tmp_path, caplog):
    keep = KeepBest(tmp_path / "best.safetensors")
    keep.path.mkdir()
    state = builder(epochs=2).callbacks(keep).run().join(WAIT_S)
    assert len(state.metrics) == 2
    assert any("KeepBest" in r.getMessage() for r in caplog.records)


# Scalars outside of training.


@pytest.mark.parametrize("record", [record_scalar, lambda *a: current_worker().record_scalar(*a)])
@pytest.mark.parametrize("way", [*WAYS, None], ids=lambda w: "one" if w is None else w[0].name)
def test_a_scalar_recorded_in_an_evaluation_is_refused_with_the_place_to_return_it(way, record):
    def evaluate(model, epoch):
        record("accuracy", 0.75)
        return {}

    b = builder(ranks=1) if way is None else builder(way=way)
    with pytest.raises(WorkerFailed, match=r"Return \{'accuracy': value\} from eval_fn"):
        b.eval_fn(evaluate).run().join(WAIT_S)


def test_a_scalar_recorded_in_a_checkpoint_function_is_an_error_in_the_log(caplog):
    b = builder(epochs=2).checkpoint_every(1)
    b.checkpoint_fn(lambda version, model: record_scalar("size", 1.0)).run().join(WAIT_S)
    assert "record_scalar('size', ...) in checkpoint_fn" in caplog.text


# A limit of time.


def test_a_run_ends_in_mid_epoch_when_its_time_is_over():
    limit, begun = TimeLimit(timedelta(seconds=0.05)), threading.Event()

    def train(model, batch):
        begun.wait(0.002)
        return count_up(model, batch)

    state = builder(train=train, dataset=10**6).callbacks(limit).run().join(WAIT_S)
    assert state.stopped
    assert state.metrics == ()


@pytest.mark.parametrize("fails", [False, True])
def test_no_thread_of_a_limit_outlives_its_run(fails):
    def train(model, batch):
        if fails:
            raise ValueError("planted")
        return count_up(model, batch)

    handle = builder(train=train).callbacks(TimeLimit(1000)).run()
    if fails:
        with pytest.raises(WorkerFailed):
            handle.join(WAIT_S)
    else:
        handle.join(WAIT_S)
    assert "time-limit" not in {thread.name for thread in threading.enumerate()}


# Callbacks of the user's own.


class Noting(Callback):
    """Records its calls; does not call the constructor of its base class."""

    takes_weights = True

    def __init__(self):
        self.log = []

    def begin(self, run):
        super().begin(run)
        assert isinstance(run, TrainerHandle)
        self.log.append("begin")

    def weights(self, epoch, model):
        self.log.append(("weights", epoch))

    def __call__(self, metrics):
        self.log.append(("metrics", metrics.epoch))

    def end(self):
        self.log.append("end")
        super().end()


@each_way
def test_a_callback_receives_weights_before_metrics_and_one_end(way):
    note, order = Noting(), []
    b = builder(way=way, epochs=2).callbacks(note)
    b.metrics_fn(lambda metrics: order.append(list(note.log))).run().join(WAIT_S)
    assert set(note.log) == {
        "begin",
        "end",
        *((what, epoch) for what in ("weights", "metrics") for epoch in (0, 1)),
    }
    assert (note.log[0], note.log[-1]) == ("begin", "end")
    for epoch in (0, 1):
        assert note.log.index(("weights", epoch)) < note.log.index(("metrics", epoch))
        assert ("metrics", epoch) not in order[epoch]  # metrics_fn comes first


def test_a_callback_serves_one_run_at_a_time():
    held, note = threading.Event(), Noting()

    def train(model, batch):
        assert held.wait(WAIT_S)
        return count_up(model, batch)

    handle = builder(train=train).callbacks(note).run()
    with pytest.raises(RuntimeError, match="create one for each run"):
        builder().callbacks(note).run()
    held.set()
    handle.join(WAIT_S)
    builder().callbacks(note).run().join(WAIT_S)
    assert note.log.count("end") == 2


def test_a_run_that_cannot_start_leaves_no_callback_in_use(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    note = Noting()
    with pytest.raises(OSError, match="file"):
        builder().callbacks(note, KeepBest(file / "best.safetensors")).run()
    assert note.log == ["begin", "end"]
    builder().callbacks(note).run().join(WAIT_S)


class Forgetful(Callback):
    def final_state(self, state):
        raise ValueError("planted")


class Renamed(Callback):
    def final_state(self, state):
        return dataclasses.replace(state, reason="planted")


def test_a_callback_that_fails_at_the_end_of_the_run_is_logged_and_the_others_are_called(caplog):
    state = builder().callbacks(Forgetful(), Renamed()).run().join(WAIT_S)
    assert state.reason == "planted"
    assert "failed at the end of the run" in caplog.text


class Failing(Callback):
    """Raises in every call during the run."""

    takes_weights = True

    def weights(self, epoch, model):
        raise ValueError("planted weights")

    def __call__(self, metrics):
        raise ValueError("planted metrics")

    def end(self):
        raise ValueError("planted end")


def test_an_exception_of_a_callback_is_logged_and_training_continues(caplog):
    note = Noting()
    state = builder(epochs=2).callbacks(Failing(), note).run().join(WAIT_S)
    assert len(state.metrics) == 2
    assert len(note.log) == 6
    planted = [str(r.exc_info[1]) for r in caplog.records if r.exc_info]
    assert sorted(planted) == ["planted end", *["planted metrics"] * 2, *["planted weights"] * 2]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: builder().callbacks(print), TypeError, "functions go into metrics_fn"),
        (lambda: EarlyStopping(3), TypeError, "pass a name"),
        (lambda: KeepBest("a", ""), ValueError, "pass a name"),
        (lambda: EarlyStopping(mode="best"), ValueError, "one of min, max"),
        (lambda: EarlyStopping(patience=0), ValueError, "patience"),
        (lambda: EarlyStopping(min_delta=-1.0), ValueError, "min_delta"),
        (lambda: KeepBest(3), TypeError, "pass a path"),
        (lambda: KeepBest(), ValueError, "keeps nothing"),
        (lambda: KeepBest("a", restore=1), TypeError, "restore"),
        (lambda: KeepBest("a", mode="most"), ValueError, "one of min, max"),
        (lambda: TimeLimit(0), ValueError, "TimeLimit"),
        (lambda: TimeLimit("1h"), TypeError, "TimeLimit"),
    ],
)
def test_an_invalid_callback_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


# Properties read by schedules.


@pytest.mark.parametrize(("max_steps", "wanted"), [(None, 36), (7, 7), (100, 36)])
def test_the_handle_has_the_number_of_batches_of_the_whole_run(max_steps, wanted):
    b = builder(dataset=23, batch_size=2, epochs=3, way=(SYNC, THREAD))
    handle = (b if max_steps is None else b.max_steps(max_steps)).run()
    state = handle.join(WAIT_S)
    assert handle.total_batches == wanted
    assert max_steps == 7 or sum(r.num_batches for r in handle.statistics().ranks) == wanted
    assert [m.partial for m in state.metrics] == ([True] if max_steps == 7 else [False] * 3)
