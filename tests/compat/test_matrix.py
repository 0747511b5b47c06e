"""The matrix, where its packages are installed. ``make compat`` installs them."""

from __future__ import annotations

import re
import warnings

import pytest

from tests.compat import __main__ as command
from tests.compat import recipes
from tests.compat.doors import DOORS, EQUAL, FAILED, TRAINS, Judge
from tests.compat.matrix import PACKAGES, all_cases, reason_to_skip

CASES = all_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.group}: {case.name}")
def test_a_model_trains_through_each_door(case):
    with warnings.catch_warnings():
        if PACKAGES[case.group]:
            warnings.simplefilter("ignore")  # theirs
        if reason := reason_to_skip(case.group):
            pytest.skip(reason)
        judge = Judge(case)
        cells = {door: judge.judge(door) for door in DOORS}
    assert {door: said for door, (verdict, said) in cells.items() if verdict == FAILED} == {}


def test_there_are_rows_enough_with_names_of_their_own():
    assert len({(case.group, case.name) for case in CASES}) == len(CASES) >= 30
    assert {case.group for case in CASES} == set(PACKAGES)


def test_the_page_shows_every_row_and_no_failure():
    page = command.PAGE.read_text(encoding="utf-8")
    table = page.partition(command.BEGIN)[2].partition(command.END)[0]
    shown = re.findall(r"^\| ([^|]+) \| (?:=|ok|n/a|refused)", table, re.MULTILINE)
    assert shown == [case.name for case in CASES]
    assert f"0 {FAILED}" in table


class Untrained:
    """Hands out weights as a door does."""

    def __init__(self, change):
        self._change = change

    def __call__(self, case):
        state = case.model().state_dict()
        return self._change(state)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state, "the loss went from"),
        (lambda state: {f"module.{k}": v for k, v in state.items()}, "Missing key"),
    ],
)
def test_weights_that_did_not_train_or_have_other_keys_fail(change, said, monkeypatch):
    monkeypatch.setitem(DOORS, "setup", Untrained(change))
    verdict, why = Judge(recipes.recipe("plain")).judge("setup")
    assert verdict == FAILED
    assert said in why


def test_a_door_that_differs_from_one_device_fails(monkeypatch):
    case = recipes.recipe("plain")
    monkeypatch.setitem(DOORS, "setup", DOORS["CADENCE"])
    verdict, why = Judge(case).judge("setup")
    assert verdict == FAILED
    assert "differs from one device" in why
    assert Judge(case).judge("SYNC") == (EQUAL, "")
    assert Judge(case).judge("CADENCE") == (TRAINS, "")
