"""Disturbed measurements in the benchmarks."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.harness import measure as machine
from benchmarks.harness.measure import QUIET

pytestmark = pytest.mark.slow

BUSY = 2 * QUIET


@pytest.fixture
def others(monkeypatch):
    """Shares of the cores that other processes are to use in the next measurements."""
    shares = []

    class Load:
        def others(self):
            return shares.pop(0)

    monkeypatch.setattr(machine, "MachineLoad", Load)
    return shares


# -- one measurement --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loads", "num_retries", "kept"),
    [
        ([BUSY, BUSY], 0, (BUSY, 1.0)),
        ([QUIET, 0.0], 3, (QUIET, 1.0)),
        ([BUSY, 0.0, 0.0], 3, (0.0, 2.0)),
        ([3 * BUSY, BUSY, 2 * BUSY, 0.0], 2, (BUSY, 2.0)),
    ],
)
def test_a_disturbed_measurement_is_repeated_and_the_least_disturbed_is_kept(
    others, loads, num_retries, kept
):
    others += loads
    rates = iter((1.0, 2.0, 3.0, 4.0))
    assert machine.undisturbed(num_retries, lambda: next(rates)) == kept


def test_without_a_word_nothing_is_repeated():
    parser = argparse.ArgumentParser()
    machine.add_retry(parser)
    assert parser.parse_args([]).retry == 0
    assert parser.parse_args(["--retry", "2"]).retry == 2
    assert f"over {QUIET:.0%} of the cores" in " ".join(parser.format_help().split())


# -- repetitions ------------------------------------------------------------------------


def test_medians_are_of_the_undisturbed_repetitions():
    found = machine.Measured()
    found.rates.update({"a": [9.0, 1.0, 2.0, 4.0], "b": [7.0, 8.0]})
    found.loads.update({"a": [BUSY, 0.0, QUIET, 0.01], "b": [0.0, BUSY]})
    assert found.medians() == {"a": 2.0, "b": 7.0}
    assert found.disturbed() == [True, False, False, False, False, True]
    assert found.record()["median_rates"] == found.medians()


def test_medians_are_of_all_repetitions_if_one_cell_was_never_undisturbed():
    """A ratio of an undisturbed rate and a disturbed one is meaningless."""
    found = machine.Measured()
    found.rates.update({"a": [9.0, 1.0, 2.0], "b": [7.0, 8.0]})
    found.loads.update({"a": [BUSY, 0.0, 0.0], "b": [BUSY, BUSY]})
    assert found.medians() == {"a": 2.0, "b": 7.5}


def test_ratios_are_of_one_repetition_each_and_of_undisturbed_pairs():
    found = machine.Measured()
    found.rates.update({"a": [9.0, 4.0, 6.0], "b": [3.0, 8.0, 6.0]})
    found.loads.update({"a": [BUSY, 0.0, 0.0], "b": [0.0, 0.0, QUIET]})
    assert found.ratios("a", "b") == [0.5, 1.0]
    found.loads["b"][1:] = [BUSY, BUSY]
    assert found.ratios("a", "b") == [3.0, 0.5, 1.0]


def test_every_cell_is_measured_in_turn_and_sized_by_its_fastest_repetition(others):
    asked, rates = [], {"a": [5.0, 3.0, 4.0, 2.0], "b": [7.0, 6.0, 9.0]}

    def cell(key):
        def run(expected):
            asked.append((key, expected))
            return rates[key].pop(0)

        return machine.Cell(key=key, guess=1.0, run=run)

    others += [BUSY, 0.01, 0.02, 0.03, 0.04, 0.0, 0.0]
    found = machine.interleaved([cell("a"), cell("b")], 3, num_retries=1)
    # The first measurement of a is disturbed and made again; then b, b a, a b.
    first = [("a", 1.0), ("a", 1.0), ("b", 1.0)]
    assert asked == [*first, ("b", 7.0), ("a", 3.0), ("a", 4.0), ("b", 7.0)]
    assert found.rates == {"a": [3.0, 4.0, 2.0], "b": [7.0, 6.0, 9.0]}
    assert found.loads == {"a": [0.01, 0.04, 0.0], "b": [0.02, 0.03, 0.0]}


def test_the_interval_of_a_median_is_made_of_the_values_order():
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert machine.median_interval(values) == (3.0, 1.0, 5.0)  # of five there is none
    ten = [float(i) for i in range(10)]
    assert machine.median_interval(ten) == (4.5, 1.0, 8.0)  # outside with a chance of 2.1 %
