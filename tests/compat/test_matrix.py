"""The matrix, where its packages are installed. ``make compat`` installs them."""

from __future__ import annotations

import re
import warnings

import pytest

from tests.compat import __main__ as command
from tests.compat import recipes
from tests.compat.apis import APIS, EQUAL, FAILED, TRAINS, Judge
from tests.compat.matrix import PACKAGES, all_cases, reason_to_skip

pytestmark = pytest.mark.slow

CASES = all_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.group}: {case.name}")
def test_a_model_trains_through_each_api(case):
    with warnings.catch_warnings():
        if PACKAGES[case.group]:
            warnings.simplefilter("ignore")  # theirs
        if reason := reason_to_skip(case.group):
            pytest.skip(reason)
        judge = Judge(case)
        cells = {api: judge.judge(api) for api in APIS}
    failed = {api: message for api, (verdict, message) in cells.items() if verdict == FAILED}
    assert failed == {}


def test_there_are_enough_rows_with_unique_names():
    assert len({(case.group, case.name) for case in CASES}) == len(CASES) >= 30
    assert {case.group for case in CASES} == set(PACKAGES)


def test_the_page_shows_every_row_and_no_failure():
    page = command.PAGE.read_text(encoding="utf-8")
    table = page.partition(command.BEGIN)[2].partition(command.END)[0]
    shown = re.findall(r"^\| ([^|]+) \| (?:=|ok|n/a|refused)", table, re.MULTILINE)
    assert shown == [case.name for case in CASES]
    assert f"0 {FAILED}" in table


class Untrained:
    """Returns weights like an API."""

    def __init__(self, change):
        self._change = change

    def __call__(self, case):
        state = case.model().state_dict()
        return self._change(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state, "the loss went from"),
        (lambda state: {f"module.{k}": v for k, v in state.items()}, "Missing key"),
    ],
)
def test_weights_that_did_not_train_or_have_other_keys_fail(change, message, monkeypatch):
    monkeypatch.setitem(APIS, "setup", Untrained(change))
    verdict, why = Judge(recipes.recipe("plain")).judge("setup")
    assert verdict == FAILED
    assert message in why


def test_an_api_that_differs_from_one_device_fails(monkeypatch):
    case = recipes.recipe("plain")
    monkeypatch.setitem(APIS, "setup", APIS["CADENCE"])
    verdict, why = Judge(case).judge("setup")
    assert verdict == FAILED
    assert "differs from one device" in why
    assert Judge(case).judge("SYNC") == (EQUAL, "")
    assert Judge(case).judge("CADENCE") == (TRAINS, "")
