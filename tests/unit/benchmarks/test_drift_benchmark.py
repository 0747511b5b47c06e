"""The model of averaging in one thread: its effect on replicas, and bad input."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace

import pytest
import torch

from benchmarks import quality
from benchmarks.harness.studies import STUDIES
from benchmarks.quality import make_model, train_loop

pytestmark = pytest.mark.slow


@pytest.fixture
def plain(monkeypatch):
    """The logistic study with an optimizer whose mean step is that of the mean gradient."""
    study = replace(
        STUDIES["logistic"],
        make_optimizer=lambda params, lr: torch.optim.SGD(params, 10 * lr),
        num_epochs=2,
    )
    monkeypatch.setitem(STUDIES, "logistic", study)


def loss(**settings) -> float:
    return quality.train_case(quality.Case(model="logistic", seed=3, **settings))["loss"]


def test_replicas_averaged_after_every_step_of_sgd_are_one_device(plain):
    solo = loss()
    assert loss(every=1) == pytest.approx(solo, rel=1e-5)
    assert loss(every=1, late=1) != pytest.approx(solo, rel=1e-5)
    assert loss(every=3) != pytest.approx(solo, rel=1e-5)
    assert loss(every=1, lr_scale=2.0) != pytest.approx(solo, rel=1e-3)


def test_a_late_average_keeps_the_training_since_its_snapshot(plain):
    # No training of a replica is lost, so late averages are close to immediate ones.
    study = STUDIES["logistic"]
    data = study.load(None)
    untrained = study.evaluate(make_model(study, data.num_symbols, 3), data.held_out)
    solo = loss()
    gained = untrained["loss"] - solo
    assert abs(loss(every=1, late=1) - solo) < 0.05 * gained
    assert abs(loss(every=3, late=1) - solo) < 0.1 * gained
    never = loss(every=10**6)
    assert loss(every=1, late=1) != pytest.approx(never, rel=1e-5)


def test_the_mean_of_the_replicas_is_evaluated(plain):
    study = replace(STUDIES["logistic"], num_epochs=1)
    data = study.load(None).first(0.0)
    assert data.num_samples == study.batch_size * quality.WORLD_SIZE  # one step
    solo = make_model(study, data.num_symbols, 3)
    train_loop(study, solo, data, 3)
    case = quality.Case(model="logistic", seed=3, every=10)
    replica = quality.train_replicas(study, data, case)
    for mine, theirs in zip(replica.parameters(), solo.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_buffers_are_averaged_too():
    model = torch.nn.BatchNorm1d(2)
    other = torch.nn.BatchNorm1d(2)
    other.running_mean += 2.0
    quality.move([model, other], quality.deltas_of([model, other]))
    for norm in (model, other):
        assert norm.running_mean.tolist() == [1.0, 1.0]
        assert norm.num_batches_tracked == 0


def test_a_replica_that_trains_all_batches_of_a_round_but_one_dominates_the_mean():
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    for model, value in zip(models, (0.0, 4.0), strict=True):
        torch.nn.init.constant_(model.weight, value)
    (mean,) = quality.mean_of(models, (1, 3))
    assert mean.item() == 3.0


def test_replicas_with_counts_of_their_own_train_every_sample(plain):
    solo = loss()
    found = loss(every=1, ranks=2, counts=(1, 3))
    assert found != pytest.approx(loss(every=1, ranks=2), rel=1e-6)
    assert found == pytest.approx(solo, rel=0.2)


def test_the_automatic_factor_is_that_of_the_counts_and_not_for_sgd(plain):
    assert loss(every=5) == loss(every=5, lr_scale=1.0)
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    case = quality.Case(model="logistic", seed=3, every=1)
    assert quality.rate_factor(adam, case) == pytest.approx(2**0.5)
    unequal = replace(case, counts=(1, 3))
    assert quality.rate_factor(adam, unequal) == pytest.approx(2**0.5 * (16 / 10) / 2)


def test_steps_that_average_gradients_are_those_of_one_device():
    # With Adam averaged parameters differ from averaged gradients.
    solo = loss()
    assert loss(every=4) != pytest.approx(solo, rel=1e-4)
    assert loss(every=4, exact_until=1.0) == pytest.approx(solo, rel=1e-6)
    found = {exact: loss(every=1, lr_scale=1.0, exact_until=exact) for exact in (0.0, 0.5)}
    assert len({solo, *found.values()}) == 3


def test_replicas_begin_alike_after_steps_that_average_gradients(plain):
    # The mean step of SGD is that of the mean gradient, with momentum of its own as well.
    study = replace(STUDIES["lenet-sgd"], make_model=STUDIES["logistic"].make_model)
    data = study.load(None)
    case = quality.Case(model="lenet-sgd", seed=3, every=1, exact_until=0.5)
    solo = make_model(study, data.num_symbols, 3)
    train_loop(study, solo, data, 3)
    replica = quality.train_replicas(study, data, case)
    for mine, theirs in zip(replica.parameters(), solo.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_losses_are_paired_by_seed():
    way = {"model": "toy", "ranks": 2, "late": 0, "exact_until": 0.5, "lr_scale": 1.2}
    rows = [
        way | {"every": every, "seed": seed, "loss": value, "accuracy": 1 - value / 4}
        for every, seed, value in [(0, 0, 1.0), (0, 1, 2.0), (2, 0, 1.15), (2, 1, 2.28)]
    ]
    (found,) = quality.summarize_drift(rows)
    assert (found["every"], found["num_pairs"], found["verdict"]) == (2, 2, "worse")
    assert found["mean"] == pytest.approx(0.145)
    assert found["se"] == pytest.approx(0.005)
    row = "| toy | 2 | 2 | 0 | 50% | 1.2 times | **+14.50% ± 0.50%** | worse | -5.37 ± 1.62 | 2 |"
    assert row in quality.drift_table([found])


@pytest.mark.parametrize("wrong", [["--every", "0"], ["--late", "2"], ["--seeds", "0"]])
def test_settings_out_of_range_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        quality.parse_drift(wrong)
    assert "at least 1" in capsys.readouterr().err


def test_missing_data_names_the_remedy(tmp_path):
    with pytest.raises(SystemExit, match="--data"):
        quality.drift(["--data", str(tmp_path)])


def test_the_whole_command_writes_its_record(tmp_path, capsys, monkeypatch):
    # Forked processes need not import PyTorch again.
    forked = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(quality.multiprocessing, "get_context", lambda _: forked)
    target = tmp_path / "drift.json"
    settings = "--tiny --models logistic lenet-sgd --rounds 18 --late 0 --seeds 2 --jobs 1"
    settings += " --override num_epochs=6 --exact-until 0.5"
    quality.main(["drift", *settings.split(), "--json", str(target)])
    record = json.loads(target.read_text())
    assert len(record["rows"]) == 8
    assert record["summary"][0]["num_pairs"] == 2
    assert "| logistic | 2 | 2 | 0 | 50% | automatic |" in capsys.readouterr().out
