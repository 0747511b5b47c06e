"""Loggers of experiment trackers, with stand-ins and with installed packages."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from runtime import CombinedLogger, MlflowLogger, StepMetrics, WandbLogger, record_scalar
from tests.support.running import SYNC, THREAD, WAIT_S, builder, count_up


def stand_in(monkeypatch, name, **content):
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class WandbRun:
    def __init__(self, **settings):
        self.settings, self.axes, self.rows, self.num_finished = settings, {}, [], 0

    def define_metric(self, name, step_metric):
        self.axes[name] = step_metric

    def log(self, values):
        self.rows.append(values)

    def finish(self):
        self.num_finished += 1


@pytest.fixture
def wandb(monkeypatch):
    begun = []

    def init(**settings):
        begun.append(WandbRun(**settings))
        return begun[-1]

    return stand_in(monkeypatch, "wandb", run=None, init=init, begun=begun)


class MlflowStore:
    """The part of a client that the logger uses."""

    def __init__(self, active=None):
        self.active, self.experiments, self.rows, self.ended, self.uris = active, {}, {}, [], []

    def client(self, uri):
        self.uris.append(uri)
        return self

    def get_experiment_by_name(self, name):
        number = self.experiments.get(name)
        return None if number is None else SimpleNamespace(experiment_id=number)

    def create_experiment(self, name):
        self.experiments[name] = str(len(self.experiments))
        return self.experiments[name]

    def create_run(self, experiment_id):
        run_id = f"run {len(self.rows)} of {experiment_id}"
        self.rows[run_id] = []
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def log_batch(self, run_id, metrics):
        assert len(metrics) <= 1000
        self.rows.setdefault(run_id, []).extend(metrics)

    def set_terminated(self, run_id):
        self.ended.append(run_id)


@pytest.fixture
def mlflow(monkeypatch):
    store = MlflowStore()

    def active_run():
        return store.active and SimpleNamespace(info=SimpleNamespace(run_id=store.active))

    def metric(key, value, timestamp, step):
        return SimpleNamespace(key=key, value=value, step=step)

    entities = SimpleNamespace(Metric=metric)
    content = {"MlflowClient": store.client, "active_run": active_run, "entities": entities}
    stand_in(monkeypatch, "mlflow", **content)
    return store


def scored(model, batch):
    loss = count_up(model, batch)
    record_scalar("a: b*", loss.detach())
    return loss


def train(log):
    b = builder(train=scored, dataset=40, epochs=2, ranks=2, way=(SYNC, THREAD))
    b.metrics_every(10).metrics_fn(log)
    return b.run().join(WAIT_S).metrics


def test_a_run_started_by_the_logger_has_every_epoch_and_step_and_is_finished(wandb):
    epochs = train(WandbLogger(project="digits"))
    (run,) = wandb.begun
    assert run.settings == {"project": "digits"}
    assert run.num_finished == 1
    rows = [row for row in run.rows if "epoch/avg_loss" in row]
    assert [row["epoch"] for row in rows] == [0, 1]
    assert [row["epoch/avg_loss"] for row in rows] == [m.avg_loss for m in epochs]
    assert [row["a_ b_"] for row in rows] == [m.scalars["a: b*"] for m in epochs]
    assert [row["rank1/num_samples"] for row in rows] == [m.per_rank[1].num_samples for m in epochs]
    steps = [row for row in run.rows if "step/avg_loss" in row]
    assert [row["step"] for row in steps] == [10 * (i + 1) for i in range(len(steps))]
    assert {"epoch", "step/a_ b_", "step/throughput"} <= steps[0].keys()
    assert run.axes["step/avg_loss"] == run.axes["step/a_ b_"] == "step"
    assert run.axes["epoch/avg_loss"] == run.axes["a_ b_"] == "epoch"


@pytest.mark.parametrize("how", ["given", "in progress"])
def test_a_run_of_the_user_is_used_and_left_open(wandb, how):
    mine = WandbRun()
    if how == "given":
        train(WandbLogger(mine))
    else:
        wandb.run = mine
        train(WandbLogger())
    assert mine.rows
    assert (mine.num_finished, wandb.begun) == (0, [])


def test_settings_for_an_existing_run_are_refused(wandb):
    with pytest.raises(TypeError, match=r"pass the settings to wandb\.init"):
        WandbLogger(WandbRun(), project="digits")


def test_an_mlflow_run_is_created_in_its_experiment_and_ended(mlflow):
    log = MlflowLogger(experiment="mine", tracking_uri="there")
    epochs = train(CombinedLogger(log))
    assert mlflow.uris == ["there"]
    assert mlflow.experiments == {"mine": "0"}
    assert mlflow.ended == [log.run_id] == ["run 0 of 0"]
    rows = mlflow.rows[log.run_id]
    found = [(m.step, m.value) for m in rows if m.key == "epoch/avg_loss"]
    assert found == [(m.epoch, m.avg_loss) for m in epochs]
    steps = [m.step for m in rows if m.key == "step/avg_loss"]
    assert steps == [10 * (i + 1) for i in range(len(steps))]
    assert steps


@pytest.mark.parametrize("how", ["given", "active"])
def test_an_mlflow_run_of_the_user_is_left_open(mlflow, how):
    mlflow.active = "mine" if how == "active" else None
    log = MlflowLogger("mine" if how == "given" else None)
    train(log)
    assert mlflow.rows["mine"]
    assert mlflow.ended == []


def test_values_are_sent_to_mlflow_in_batches_of_its_limit(mlflow):
    log = MlflowLogger("mine")
    scalars = {f"value {i}": float(i) for i in range(1500)}
    log(
        StepMetrics(
            step=1,
            epoch=0,
            num_batches=1,
            avg_loss=0.5,
            scalars=scalars,
            learning_rate=0.1,
            throughput=1.0,
        )
    )
    assert len(mlflow.rows["mine"]) == 1503


@pytest.mark.parametrize(("kind", "name"), [(WandbLogger, "wandb"), (MlflowLogger, "mlflow")])
def test_without_the_package_the_error_names_the_extra(monkeypatch, kind, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(ImportError, match=rf"gpuworker\[{name}\]"):
        kind()


@pytest.mark.leaks_thread  # wandb's threads serve all runs of the process
def test_wandb_writes_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(WandbLogger(mode="offline", dir=tmp_path))
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_mlflow_has_every_epoch(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    log = MlflowLogger(experiment="mine", tracking_uri=(tmp_path / "runs").as_uri())
    epochs = train(log)
    client = mlflow.MlflowClient((tmp_path / "runs").as_uri())
    history = client.get_metric_history(log.run_id, "epoch/avg_loss")
    assert [(m.step, m.value) for m in history] == [(m.epoch, m.avg_loss) for m in epochs]
    assert client.get_run(log.run_id).info.status == "FINISHED"
