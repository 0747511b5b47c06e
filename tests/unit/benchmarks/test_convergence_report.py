"""The quality benchmark: its verdicts, its record, and a tiny run of two modes."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace

import pytest
import torch

from benchmarks import quality
from benchmarks.harness.studies import (
    STUDIES,
    DataMissing,
    constant,
    digits,
    lr_factor,
    synthetic_text,
)
from benchmarks.quality import compare, judge_mode, markdown, spread
from tests.support import programs
from tests.support.pairs import SCALE

pytestmark = pytest.mark.slow


def results(losses, **more):
    return {
        seed: {
            "loss": loss,
            "train_s": 2.0,
            "num_averagings": 3,
            "idle_share": 0.25,
            "num_samples": 64,
            "initial": float(seed),
            **more,
        }
        for seed, loss in enumerate(losses)
    }


def against(losses, solo, higher_is_better=False):
    return compare(
        dict(enumerate(losses)), dict(enumerate(solo)), higher_is_better=higher_is_better
    )


# -- the arithmetic ---------------------------------------------------------------------


def test_a_spread_has_the_sample_standard_deviation():
    found = spread([1.0, 2.0, 3.0, 6.0])
    assert found.mean == 3.0
    assert found.sd == pytest.approx(math.sqrt(14 / 3))
    assert spread([1.0]).sd is None


def test_differences_are_paired_by_seed():
    # Seeds differ by far more than modes do: only pairing shows that the mode is worse.
    found = against([1.011, 2.010, 3.009, 4.010, 5.010], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == pytest.approx(0.01)
    assert found.se == pytest.approx(math.sqrt(0.5e-6) / math.sqrt(5), rel=1e-6)
    assert found.verdict == "worse"


def test_seeds_that_only_one_side_has_are_left_out():
    found = compare({0: 1.0, 1: 2.0, 7: 90.0}, {0: 1.5, 1: 2.0, 3: 0.0}, higher_is_better=False)
    assert (found.num_pairs, found.mean) == (2, -0.25)
    assert compare({0: 1.0}, {1: 1.0}, higher_is_better=False) is None


@pytest.mark.parametrize(
    ("num_pairs", "errors"), [(2, 12.706), (4, 3.182), (10, 2.262), (20, 2.093), (40, 2.093)]
)
def test_a_verdict_begins_where_the_95_percent_interval_leaves_out_0(num_pairs, errors):
    """By Student's t, whose quantiles are far above two standard errors for a few pairs."""
    noise = [-1.0, 1.0] * (num_pairs // 2)
    se = spread(noise).sd / math.sqrt(num_pairs)
    for part, verdicts in ((0.99, ["no worse"] * 2), (1.01, ["worse", "better"])):
        shifted = [[n + sign * part * errors * se for n in noise] for sign in (1, -1)]
        assert [against(each, [0.0] * num_pairs).verdict for each in shifted] == verdicts


def test_a_mode_is_better_beyond_its_interval():
    assert against([0.9, 0.91, 0.89], [1.0, 1.0, 1.0]).verdict == "better"


def test_a_higher_accuracy_is_no_worse_and_a_lower_one_is():
    up, down = [0.93, 0.94, 0.93], [0.80, 0.81, 0.82]
    solo = [0.9, 0.9, 0.9]
    assert against(up, solo, higher_is_better=True).verdict == "better"
    found = against(down, solo, higher_is_better=True)
    assert (found.verdict, found.mean) == ("worse", pytest.approx(-0.09))


def test_equal_results_are_no_worse_and_equally_bad_ones_are_worse():
    assert against([1.0, 2.0], [1.0, 2.0]).verdict == "no worse"
    assert against([1.5, 2.5], [1.0, 2.0]).verdict == "worse"


def test_one_seed_has_no_verdict():
    found = against([1.0], [0.5])
    assert (found.se, found.verdict) == (None, "too few seeds")


def test_a_loss_that_is_not_a_number_is_worse():
    assert against([math.nan, 1.0], [1.0, 1.0]).verdict == "worse"


# -- tables ------------------------------------------------------------------------------


def report_of(runs):
    rows = [judge_mode(runs, mode) for mode in runs]
    toy = {"rows": rows, "faults": quality.unpaired(runs), "definition": "a toy", "missing": []}
    machine = {"cores": 2, "architecture": "any", "python": "3", "torch": "2"}
    counts = {"num_runs": 9, "num_disturbed": 1}
    return {"models": {"toy": toy}, "machine": machine, "settings": {}, **counts}


def test_cells_beyond_the_margins_are_named_and_marked_in_the_table():
    runs = {
        "solo-global": results([1.0, 1.1, 1.2], accuracy=0.9),
        "sync": results([1.0, 1.1, 1.2], accuracy=0.9),
        "cpu-async": results([1.5, 1.65, 1.8], accuracy=0.9),
        "cpu-cadence": results([1.0, 1.1, 1.2], accuracy=0.89),
        "collective-async": results([1.05, 1.05, 1.2], accuracy=0.9),
    }
    text = markdown(report_of(runs))
    assert "2 of 4 cells are worse: toy cpu-async, toy cpu-cadence." in text
    assert "1 of 4 cells are undecided: toy collective-async." in text
    rows = {line.split(" | ")[1]: line for line in text.splitlines() if line.startswith("| toy")}
    assert "| **+50.00% ± 0.00%** | 0.5% | worse | +0.00 ± 0.00 | no worse |" in rows["cpu-async"]
    assert "| +0.00% ± 0.00% | 0.5% | no worse | **-1.00 ± 0.00** |" in rows["cpu-cadence"]
    assert json.dumps(report_of(runs))


def test_runs_that_did_not_start_alike_are_named():
    runs = {"solo-global": results([1.0, 1.0]), "sync": results([1.0, 1.0], initial=5.0)}
    assert [fault[:6] for fault in report_of(runs)["models"]["toy"]["faults"]] == [
        "seed 0",
        "seed 1",
    ]


# -- data and models -----------------------------------------------------------------------


def test_without_data_the_message_names_the_files_and_the_remedy(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        quality.main(["--data", str(tmp_path), "--out", str(tmp_path / "record")])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "tinyshakespeare.txt" in message
    assert "GPUWORKER_DATA" in message
    assert "--data" in message


def test_digits_are_read_from_idx_files_and_torn_ones_are_refused(tmp_path):
    num = 2064
    labels = bytes(i % 10 for i in range(num))
    images = b"".join(bytes([i % 10]) * 784 for i in range(num))
    head = [(n).to_bytes(4, "big") for n in (2051, num, 28, 28, 2049)]
    whole = b"".join(head[:4]) + images
    (tmp_path / "mnist-10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(whole))
    file = tmp_path / "mnist-10k-labels-idx1-ubyte.gz"
    file.write_bytes(gzip.compress(head[4] + head[1] + labels))
    data = digits(tmp_path)
    assert (data.num_samples, len(data.held_out[0])) == (64, 2000)
    for x, y in (data.train, data.held_out):
        assert torch.equal((x[:, 0, 3, 5] * 255).round().long(), y)
    file.write_bytes(gzip.compress(head[4] + head[1] + labels[:-1]))
    with pytest.raises(DataMissing, match="cut short"):
        digits(tmp_path)


def test_held_out_text_is_not_trained_and_targets_are_one_character_on():
    data = synthetic_text()
    x, y = data.train
    assert x.shape == y.shape == (data.num_samples, 64)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert data.num_samples % 64 == 0
    assert len(data.held_out[0]) > 10


def test_the_learning_rate_rises_then_falls_whatever_the_batch():
    factors = [lr_factor(i / 100) for i in range(101)]
    top = factors.index(max(factors))
    assert 0 < factors[0] < 0.1
    assert max(factors) == 1.0
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    assert factors[100] == pytest.approx(0.05)


# The others of several machines have the same model and data.
@pytest.mark.parametrize(
    "name", [n for n in STUDIES if SCALE > 1 or n not in ("mnist-2", "mnist-4")]
)
def test_every_study_learns_and_is_evaluated(name):
    study = STUDIES[name]
    data = study.load(None)
    torch.manual_seed(0)
    model = study.make_model(data.num_symbols)
    before = study.evaluate(model, data.held_out)
    model.train()
    optimizer = study.make_optimizer(model.parameters(), 1e-3)
    for _ in range(20):
        study.loss(model, tuple(c[:32] for c in data.train)).backward()
        optimizer.step()
    after = study.evaluate(model, data.held_out)
    assert after["loss"] < before["loss"]
    assert ("accuracy" in after) == study.accuracy


# -- runs ----------------------------------------------------------------------------------


@pytest.fixture
def forked(monkeypatch):
    """Runs in processes that need not import PyTorch again."""
    programs.fork_from(monkeypatch, quality)


def test_modes_run_in_processes_and_a_second_call_skips_recorded_runs(tmp_path, forked):
    record = tmp_path / "record.jsonl"
    args = ["--synthetic", "--out", str(record), "--models", "logistic", "--seeds", "1"]
    args += ["--modes", "solo-global", "sync", "cpu-cadence", "--override", "num_epochs=2"]
    assert quality.main(args) == 0
    lines = quality.read_record(record)
    assert [line["mode"] for line in lines] == ["solo-global", "sync", "cpu-cadence"]
    assert len({line["initial"] for line in lines}) == 1
    assert {line["num_samples"] for line in lines} == {768}
    assert [line["num_averagings"] for line in lines[:2]] == [0, 12]
    assert lines[2]["num_averagings"] > 0
    assert lines[1]["loss"] == pytest.approx(lines[0]["loss"], rel=1e-4)  # the mean gradient's
    with record.open("a") as file:
        file.write('{"torn')
    assert quality.main(args) == 0
    assert quality.read_record(record) == lines

    # Another setting is another run of the averaged mode alone.
    table = tmp_path / "table.md"
    quality.main([*args, "--report", str(table), "--set", "anchor=3"])
    report = json.loads(table.with_suffix(".json").read_text())
    assert report["models"]["logistic"]["missing"] == ["cpu-cadence seed 0"]
    quality.main([*args, "--report", str(table)])
    assert "| logistic | cpu-cadence |" in table.read_text()
    report = json.loads(table.with_suffix(".json").read_text())
    assert report["models"]["logistic"]["faults"] == report["models"]["logistic"]["missing"] == []


def test_a_record_is_made_in_sittings_and_by_pairs_of_seeds(tmp_path):
    args = quality.parse_args(
        [
            *("--synthetic", "--out", str(tmp_path / "r"), "--models", "mlp", "--seeds", "3"),
            *("--modes", "solo-global", "cpu-async", "--set", "anchor=2"),
        ]
    )
    batches = [[job.name for job in jobs] for jobs in quality.batches_of_jobs(args)]
    assert batches == [
        ["mlp solo-global seed 0"],
        ["mlp solo-global seed 1"],
        ["mlp cpu-async seed 0"],
        ["mlp cpu-async seed 1"],
        ["mlp solo-global seed 2"],
        ["mlp cpu-async seed 2"],
    ]
    settings = [
        quality.make_job(args, "mlp", mode, 0).spec["settings"]
        for mode in ("solo-global", "sync", "cpu-async")
    ]
    assert settings == [{}, {}, {"anchor": 2}], "what is averaged in each step needs none"


# -- sync: by a margin, and by the time to a loss --------------------------------------------


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ([1.0, 1.002, 0.998, 1.0], "no worse"),
        ([1.006, 1.007, 1.008, 1.007], "no worse"),  # worse, but within the margin
        ([1.011, 1.012, 1.013, 1.012], "worse"),
        ([1.009, 1.01, 1.009, 1.01], "worse"),  # it may be beyond the margin
        ([0.98, 1.03, 0.99, 1.03], "undecided"),
    ],
)
def test_a_loss_within_the_margin_is_no_worse(parts, verdict):
    solo = results([0.5, 0.6, 0.7, 0.8])
    mine = results([part * solo[seed]["loss"] for seed, part in enumerate(parts)])
    row = judge_mode({"solo-global": solo, "sync-shares": mine}, "sync-shares", 0.01)
    assert row["excess"]["verdict"] == verdict


def test_the_time_to_a_loss_is_interpolated_between_two_points():
    curve = [(0.0, 2.0), (10.0, 1.0), (20.0, 1.2), (30.0, 0.8)]
    found = [quality.time_to(curve, loss) for loss in (2.0, 1.5, 1.0, 0.9, 0.8, 0.7)]
    assert found == [0.0, 5.0, 10.0, pytest.approx(27.5), 30.0, None]


def test_times_are_of_undisturbed_runs_and_those_of_cadence_are_beside_them():
    def timed(losses, end_s, others):
        curve = {"curve": [(0.0, 3.0), (end_s / 2, 1.0), (end_s, losses[0])]}
        return results(losses, used_by_others=others, **curve)

    runs = {
        "solo-global": timed([0.5, 0.5], 8.0, 0.3),
        "sync-shares": timed([0.5, 0.5], 4.0, 0.01),
        "cpu-cadence": timed([0.6, 0.6], 5.0, 0.01),
        "cpu-cadence-slowed": timed([0.5, 0.5], 5.0, 0.2),
    }
    sync, cadence, disturbed = quality.compare_sync(runs, "gpt")
    near, last = sync["targets"]
    # 90 % of the way from 3 to 0.5 is 0.75; its last loss and the margin is 0.505.
    assert near["median_s"] == pytest.approx(3.0)
    assert near["cadence_over_this"] == pytest.approx((2.5 + 2.5 * 0.25 / 0.4) / 3)
    assert (last["num_reached"], last["cadence_over_this"]) == (2, None)
    assert cadence["targets"][1]["num_reached"] == 0
    assert disturbed["targets"][0]["num_timed"] == 0
    report = {"models": {"gpt": {"rows": [sync], "faults": [], "missing": [], "definition": ""}}}
    machine = {"cores": 2, "architecture": "any", "python": "3", "torch": "2"}
    text = quality.sync_markdown(report | {"machine": machine, "settings": {}})
    assert "| gpt | sync-shares | 3.00 | 2 of 2 | 1.35 x (1.35 to 1.35) |" in text


def test_sync_makes_the_modes_of_a_seed_in_one_process_and_those_disturbed_once_more(
    tmp_path, forked
):
    record = tmp_path / "record.jsonl"
    args = ["sync", "--synthetic", "--out", str(record), "--models", "logistic", "--seeds", "1"]
    args += ["--override", "num_epochs=9", "logistic.num_epochs=2"]
    assert quality.main(args) == 0
    lines = quality.read_record(record)
    assert [line["mode"] for line in lines] == list(quality.SYNC_MODES)
    assert [len(line["curve"]) for line in lines] == [3] * 5
    assert len({line["initial"] for line in lines}) == 1
    assert all("2 epochs" in line["definition"] for line in lines)
    by_mode = {line["mode"]: line for line in lines}
    for mode in ("sync-shares", "sync-shares-slowed"):
        assert by_mode[mode]["loss"] == pytest.approx(by_mode["solo-global"]["loss"], rel=1e-3)
    assert quality.main(args) == 0
    assert quality.read_record(record) == lines
    for line, others in zip(lines, (0.5, 0.01, 0.5, 0.01, 0.01), strict=True):
        line["used_by_others"] = others
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert quality.main([*args, "--timed"]) == 0
    more = quality.read_record(record)[5:]
    assert [line["mode"] for line in more] == ["cpu-cadence"]
    table = tmp_path / "table.md"
    quality.main([*args, "--report", str(table)])
    assert "| logistic | sync-shares-slowed |" in table.read_text()


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ([], {}),
        (["--set", "anchor=3", "overhead_target=0.2"], {"anchor": 3, "overhead_target": 0.2}),
    ],
    ids=["defaults", "others"],
)
def test_averaged_modes_use_the_defaults_or_given_settings(given, settings, tmp_path):
    args = quality.parse_args(["--synthetic", "--out", str(tmp_path / "r"), *given])
    assert args.settings == settings


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (["--set", "anker=2"], "anker"),
        (["--set", "anchor=x"], "anchor=x: 'x' is no int"),
        (["--seeds", "0"], "--seeds must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(bad, words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        quality.parse_args(["--synthetic", "--out", str(tmp_path / "r"), *bad])
    assert words in capsys.readouterr().err


# -- machines of a cluster -----------------------------------------------------------------


@pytest.fixture
def machines(monkeypatch):
    """The machines that :func:`quality.run_machines` makes."""
    made, make = [], quality.Machine.of

    def of(*args):
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(quality.Machine, "of", of)
    return made


def cell(study, data, mode):
    return quality.run_machines(study, data, {"mode": mode, "seed": 3})


def test_two_machines_without_an_intermediate_round_end_with_the_mean_of_their_training(machines):
    study = quality.study_of({"model": "logistic", "overrides": {"num_epochs": 2}})
    data = study.load(None)
    model, facts = cell(study, data, "mean-128")
    assert facts["num_averagings"] == 1
    alone = [quality.Machine.of(study, data, 3, 24) for _ in range(2)]
    for epoch in range(2):
        order = torch.from_numpy(quality.permutation(data.num_samples, epoch, 3))
        for i, part in enumerate(torch.split(order, study.batch_size)):
            alone[i % 2].train(study, tuple(c.index_select(0, part) for c in data.train))
    mean = (
        quality.snapshot(alone[0].model).params[0] + quality.snapshot(alone[1].model).params[0]
    ) / 2
    assert torch.allclose(quality.snapshot(model).params[0], mean, atol=1e-6)


@pytest.mark.parametrize("mode", ["mean-8", "nesterov-8"])
def test_rounds_leave_all_machines_alike_at_the_end_of_the_schedule(mode, machines):
    study = quality.study_of({"model": "lenet", "overrides": {"num_epochs": 3}})
    data = study.load(None)
    model, facts = cell(study, data, mode)
    assert facts["num_averagings"] == 3  # after 8 and 16 of 18 batches, and at the end
    assert [m.schedule.last_epoch for m in machines] == [36, 36]
    for a, b in zip(*(quality.averaged_state(m.model) for m in machines), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    again, _ = cell(study, data, mode)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_training_of_machines_during_a_round_counts_once():
    study = replace(
        STUDIES["logistic"],
        make_optimizer=lambda params, lr: torch.optim.SGD(params, lr=1.0),
        loss=lambda model, batch: sum(p.sum() for p in model.parameters()),
        num_epochs=3,
        schedule=constant,
    )
    data = study.load(None)
    first = quality.snapshot(quality.make_model(study, data.num_symbols, 3)).params[0]
    model, _ = cell(study, data, "mean-8")
    assert torch.allclose(first - quality.snapshot(model).params[0], torch.tensor(18.0), atol=1e-4)


def test_the_outer_optimizer_that_is_better_over_all_cells_is_the_default(tmp_path):
    runs = {way: results([1.1, 1.0]) for way in quality.MACHINES if way.startswith("mean")}
    runs |= {way: results([1.55, 1.56]) for way in quality.MACHINES if way.startswith("nesterov")}
    report = quality.judge_machines({"toy": {**runs, "solo-global": results([1.0, 1.0])}})
    assert report["default"] == "mean"
    assert report["ways"]["nesterov-8"] == {
        "mean": pytest.approx(0.555),
        "num_worse": 1,
        "num_models": 1,
    }
    report |= {"machine": quality.describe(), "notes": {"toy": {"definition": "", "missing": []}}}
    text = quality.machines_markdown(report)
    assert "| mean-8 | +5.0% ± 5.0% |" in text
    assert "| nesterov-8 | **+55.5% ± 0.5%** |" in text
    assert "The default follows: mean." in text


def test_machines_are_compared_with_one_by_pairs_of_seeds(tmp_path):
    given = ["machines", "--synthetic", "--out", str(tmp_path / "r"), "--models", "mlp"]
    args = quality.parse_args([*given, "--seeds", "2"])
    names = ["solo-global seed 0", "solo-global seed 1", "mean-8 seed 0"]
    batches = [[job.name for job in jobs] for jobs in quality.batches_of_jobs(args)]
    assert batches[:3] == [[f"mlp {name}"] for name in names]
    assert len(batches) == 2 * (1 + len(quality.MACHINES))
