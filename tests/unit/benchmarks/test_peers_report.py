"""The speed benchmark: its ratios, verdicts and tables, and a run against another checkout."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from benchmarks import speed as report
from benchmarks.harness import measure
from benchmarks.harness.measure import Check
from benchmarks.speed import cell, step_cell
from tests.support.pairs import SCALE

pytestmark = pytest.mark.slow


def rates_at(slowdown, **systems):
    return {cell(name, slowdown): rate for name, rate in systems.items()}


def row_of(table, text):
    rows = [line for line in table.splitlines() if text in line]
    assert len(rows) == 1, rows
    return [part.strip() for part in rows[0].strip("|").split("|")]


FAIR = {
    **rates_at(1, solo=100.0, threads=180.0, sync=150.0, cadence=171.0, ddp=160.0),
    **rates_at(1, local_sgd=120.0, averager=165.0),
    **rates_at(1, **{"async": 165.0}),
    **rates_at(3, solo=30.0, threads=120.0, sync=50.0, cadence=117.0, ddp=55.0, averager=50.0),
    **rates_at(3, **{"async": 110.0}),
}


# -- bounds -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "at_most", "met"),
    [
        (0.95, False, True),
        (0.9499, False, False),
        (0.95, True, True),
        (0.9501, True, False),
        (math.nan, False, False),
        (math.nan, True, False),
    ],
)
def test_a_bound_is_kept_on_its_side_and_by_no_missing_number(measured, at_most, met):
    check = Check(what="x", measured=measured, wanted=0.95, at_most=at_most)
    assert check.met is met
    assert check.record()["met"] is met
    assert ("| met |" in measure.checks_table([check])) is met


# -- peers ------------------------------------------------------------------------------


def test_the_sum_of_solo_rates_uses_each_ranks_own_speed():
    assert report.sum_of_solos(FAIR, 1.0) == 200.0
    assert report.sum_of_solos(FAIR, 3.0) == 130.0


def test_a_system_is_judged_by_the_fastest_peer_at_the_same_slowdown():
    assert report.best_peer(FAIR, 1.0) == ("averager", 165.0)
    assert report.best_peer(FAIR, 3.0) == ("ddp", 55.0)
    assert report.against_peers(FAIR, "async", 1.0) == "1.00 yes"
    assert report.against_peers(FAIR, "sync", 1.0) == "0.91 NO (averager)"
    assert report.against_peers(FAIR, "cadence", 3.0) == "2.13 yes"


def test_without_a_peer_there_is_no_verdict():
    alone = {cell("sync", 1): 1.0}
    assert report.best_peer(alone, 1.0) is None
    assert report.against_peers(alone, "sync", 1.0) == "no peer"


def test_the_table_has_both_shares_and_omits_systems_that_were_not_measured():
    table = report.peers_table(FAIR, [1.0, 3.0])
    fair, slowed = table.split("| 3 | sum of solo rates", 1)
    assert row_of(fair, "CADENCE")[2:] == ["171", "0.85", "0.95", "1.04 yes"]
    assert row_of(slowed, "CADENCE")[2:] == ["117", "0.90", "0.97", "2.13 yes"]
    assert "LocalSGD" in fair
    assert "LocalSGD" not in slowed


def test_efficiency_is_wanted_from_steps_of_a_millisecond_on():
    long = report.peers_checks("mlp", 0.001, FAIR, [1.0, 3.0])
    short = report.peers_checks("mlp", 0.0005, FAIR, [1.0, 3.0])
    shares = [c for c in long if "bare threads" in c.what]
    assert [c.measured for c in shares] == pytest.approx([171 / 180, 117 / 120])
    assert all(c.met for c in shares)
    assert short == [c for c in long if c not in shares]
    assert [c.met for c in short] == [False, True, True, False, True, True]


def test_ddp_is_to_be_beaten_by_more_where_the_step_is_short_and_a_rank_is_slowed():
    rates = {**FAIR, cell("one", 1): 96.0}
    mlp = report.ddp_checks("mlp", rates, [1.0, 2.0, 3.0])
    assert [(c.measured, c.wanted, c.met) for c in mlp] == [
        (0.96, 0.97, False),
        (171 / 160, 2.0, False),
        (150 / 160, 2.0, False),
        (117 / 55, 1.8, True),
        (117 / 120, 1 / 1.1, True),
    ]
    assert [c.wanted for c in report.ddp_checks("lenet", rates, [1.0])] == [0.97, 1.3, 1.2]
    alone = {key: rate for key, rate in rates.items() if not key.startswith("ddp")}
    assert len(report.ddp_checks("mlp", alone, [1.0, 3.0])) == 2


def test_efficiency_is_judged_by_the_median_of_the_pairs():
    ratios = {1.0: [0.90, 0.96, 0.97], 3.0: [0.99, 0.94, 0.93]}
    checks = report.efficiency_checks("mlp", 0.001, ratios)
    assert [(c.measured, c.met) for c in checks] == [(0.96, True), (0.94, False)]
    assert report.efficiency_checks("mlp", 0.0005, ratios) == []
    table = report.efficiency_table(ratios)
    assert row_of(table, "| 3 | 0.9") == ["3", "0.940", "0.930", "0.990", "3"]


# -- world, step, model, coordinator ----------------------------------------------------


def test_workers_asleep_are_measured_against_as_many_solo_rates():
    rates = {"solo": 10.0, **rates_at(1, sync=9.0, cadence=10.0), **rates_at(8, sync=60.0)}
    rates |= {cell("async", 1): 9.5, cell("cadence", 8): 76.0, cell("async", 8): 75.9}
    shares = report.world_shares(rates, [1, 8])
    assert shares[cell("sync", 8)] == 0.75
    checks = report.world_checks(rates, [1, 8], 10.0)
    assert [c.met for c in checks] == [False, True, False]
    assert row_of(report.world_table(rates, [1, 8]), "| 8 |") == ["8", "0.750", "0.950", "0.949"]


def test_a_step_is_compared_alone_and_in_pairs():
    rates = {
        step_cell(name, kind, step_s): rate
        for kind, step_s in (("asleep", 0.001), ("busy", 0.0001))
        for name, rate in (
            ("solo", 800.0),
            ("threads", 1500.0),
            ("one", 760.0),
            ("cadence", 1440.0),
        )
    }
    steps = [("asleep", 0.001), ("busy", 0.0001)]
    row = row_of(report.step_table(rates, steps, batch_size=8), "asleep")
    assert row == ["asleep", "1", "10.00", "0.950", "0.960", "0.900"]
    checks = report.step_checks(rates, steps)
    assert [c.what for c in checks] == ["1 ms asleep: CADENCE / 2 bare threads"]
    assert checks[0].met


def test_the_coordinator_is_judged_at_a_thousand_batches_a_second():
    rows = [{"workers": 2, "step_s": 0.002, "system": "cadence"}]
    rows[0] |= {"batches_per_s": 500.0, "cpu_s": 19e-6}
    assert report.coordinator_checks(rows)[0].measured == pytest.approx(0.019)
    assert report.coordinator_checks(rows)[0].met
    assert row_of(report.coordinator_table(rows), "CADENCE")[3:] == [
        "500",
        "19.0",
        "0.95%",
        "1.90%",
    ]


def test_lockstep_steps_include_both_ranks_and_the_excess_over_bare_steps():
    rates = rates_at(1e4, threads=16_000.0, sync=8_000.0, ddp=4_000.0)
    row = row_of(report.lockstep_table(rates, [10_000], batch_size=8), "1e+04")
    assert row == ["1e+04", "1.00", "2.00", "4.00", "1.00", "3.00"]


def test_a_missing_time_is_left_blank():
    assert measure.milliseconds(math.nan) == ""
    assert measure.milliseconds(0.0001234) == "0.123"
    assert measure.milliseconds(0.0123) == "12.30"
    assert measure.milliseconds(1.5) == "1,500"


# -- against another checkout -----------------------------------------------------------


def contest(what="rate"):
    request = {"what": what, "way": "cadence"}
    return report.Contest(title="CADENCE", model="mlp", guess=1.0, request=request)


@pytest.mark.parametrize(
    ("what", "ratios", "met"),
    [
        ("rate", [0.97, 0.98, 1.5], True),
        ("rate", [0.90, 0.979, 1.5], False),
        ("overhead", [0.99, 1.02, 1.03], True),  # the interval has 1
        ("overhead", [1.001, 1.02, 1.03], False),
        ("overhead", [0.9, 0.91, 0.92], True),
    ],
)
def test_a_rate_has_a_bound_and_a_step_may_not_be_longer_for_sure(what, ratios, met):
    assert report.contest_check(contest(what), ratios).met is met


def test_the_table_shows_ratios_and_no_rates():
    found = measure.Measured()
    found.rates.update({"after": [4000.0, 2000.0], "before": [2000.0, 2000.0]})
    found.loads.update({"after": [0.0, 0.0], "before": [0.0, 0.0]})
    text = report.contest_table([contest()], [found])
    assert row_of(text, "CADENCE")[2:7] == ["1.500", "1.000 to 2.000", "2", ">= 0.98", "met"]
    assert "000.0" not in text.replace("1.000 to 2.000", "")


@pytest.fixture
def slow_checkout(tmp_path):
    """Another layout of the project, in which each step sleeps."""
    root = Path(__file__).parents[3]
    tree = tmp_path / "before"
    for package in ("runtime", "coordinator"):
        shutil.copytree(root / package, tree / package)
    init = tree / "runtime" / "__init__.py"
    init.write_text(init.read_text() + SLOW)
    return tree


SLOW = """

def _slow(builder):
    import time
    plain = builder

    def make(model_factory, optim_factory, train_fn):
        def slow(*args):
            time.sleep(0.02)
            return train_fn(*args)
        return plain(model_factory, optim_factory, slow)

    return staticmethod(make)

Trainer.builder = _slow(Trainer.builder)
"""


@pytest.mark.skipif(SCALE == 1, reason="TEST_SCALE=2 or more: takes many seconds")
@pytest.mark.timeout(300)
def test_a_slower_checkout_fails_its_comparison_with_this_one(slow_checkout):
    root = Path(__file__).parents[3]
    wanted = [
        report.Contest(
            title="1 worker",
            model="mlp",
            guess=200.0,
            request={
                "what": "rate",
                "model": "mlp",
                "step_s": 0.002,
                "way": "one",
                "seconds": 0.05,
                "slowdown": 1.0,
            },
        )
    ]
    (measured,) = report.run_contests(wanted, {"after": root, "before": slow_checkout}, 1, 0)
    (ratio,) = measured.ratios("after", "before")
    assert ratio > 1.2


def test_a_folder_without_the_packages_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no package 'runtime'"):
        report.against(report.parse_args(["--against", str(tmp_path)]), {})


def test_a_process_that_finds_other_packages_is_refused(tmp_path):
    for package in ("runtime", "coordinator"):
        (tmp_path / package).symlink_to(report.ROOT / package)
    with (
        pytest.raises(RuntimeError, match=r"runtime of 'before' is from .*, not from"),
        report.tree_child("before", tmp_path),
    ):
        pass
