"""The benchmark of interpreters: its rows, targets and refusal."""

from __future__ import annotations

import sys
import sysconfig

import pytest

from benchmarks import interpreters
from benchmarks.harness.measure import Measured
from benchmarks.interpreters import ROWS, WANTED, Interpreter, report, targets

pytestmark = pytest.mark.slow

FOUND = [Interpreter(name=name, run=None, solos=()) for name in ("GIL on", "GIL off")]


def measured(share):
    """Every run reaches this share of its processes; without the GIL all are twice as fast."""
    found = Measured()
    for speed, one in enumerate(FOUND, 1):
        for (step, num_workers), policies in ROWS.items():
            for policy in ("", *policies):
                key = one.key(step, num_workers, policy)
                found.rates[key] = [speed * (share if policy else 1.0)] * 3
                found.loads[key] = [0.0] * 3
    return found


def test_a_row_shows_each_column_and_the_ratio_of_the_rates():
    lines = report(measured(0.5), ["GIL on", "GIL off"], FOUND).splitlines()
    assert len(lines) == 2 + sum(map(len, ROWS.values()))
    assert lines[2] == (
        "| mlp, batch 4 | 2 | CADENCE | 0.50 [0.50, 0.50] | 0.50 [0.50, 0.50] | 2.00 |"
    )
    assert "| tiny, batch 8, 2.00 ms asleep | 8 | SYNC |" in lines[-1]


@pytest.mark.parametrize(("share", "met"), [(1.0, True), (0.5, False)])
def test_targets_apply_to_the_interpreter_without_the_gil(share, met):
    checks = targets(measured(share), FOUND[-1])
    assert len(checks) == len(WANTED)
    assert {check.met for check in checks} == {met}


@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="without the GIL")
def test_an_interpreter_that_is_built_with_the_gil_is_refused():
    args = type("Args", (), {"python": sys.executable, "gil_python": None})
    with pytest.raises(SystemExit, match="name another one by --python"):
        interpreters.columns(args)
