"""The mutation run: mutations made and left out, and their report."""

import json
import os
import shutil
import sys

import pytest

from tests import mutation
from tests.mutation import ELSEWHERE, ROOT, Finder, modules_of
from tests.support import programs

SOURCE = '''
"""A text: 1 + 2 and not 3."""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

logger = logging.getLogger(__name__)


class Thing:
    """Another: a < b."""

    limit: int | None = None

    def work(self, a: int | None, b: str | bytes = b"") -> int | str:
        assert a is not None and a > 0, "above 0"
        logger.warning("%d of %d", a + 1, 2)
        if a < 10 and not b:
            raise ValueError(f"{a - 1} is too {'small' if a < 0 else 'large'}")
        self.a = a
        self.close()
        return max(a, 7)
'''


def test_operators_constants_calls_and_assignments_are_changed_and_texts_are_not():
    found = {(m.before, m.after) for m in Finder("module.py", SOURCE.encode()).found}
    assert found == {
        ("<", "<="),
        ("10", "11"),
        ("and", "or"),
        ("a < 10", "True"),
        ("not b", "True"),
        ("not b", "(b)"),
        ("raise ValueError(f\"{a - 1} is too {'small' if a < 0 else 'large'}\")", "pass"),
        ("self.a = a", "pass"),
        ("self.close()", "pass"),
        ("max", "min"),
        ("7", "8"),
    }


@pytest.mark.parametrize(
    ("source", "before", "after"),
    [
        ("x = a is  not b\n", "is  not", "is"),
        ("x = a not in b\n", "not in", "in"),
        ("x = (a) // (b)\n", "//", "*"),
        ("x = -a\n", "-a", "(a)"),
        ("x = True\n", "True", "False"),
        ("x = 'ä' if y else (3, 'ö' == z)\n", "==", "!="),
        ("for x in y:\n    if x:\n        break\n", "break", "continue"),
        ("for x in y:\n    if x.z:\n        break\n", "x.z", "not (x.z)"),
        ("x[0] += 1\n", "+", "-"),
        ("x.y += 1\n", "x.y += 1", "pass"),
        ("del x.y\n", "del x.y", "pass"),
        ("x = 0 < a <= b\n", "<=", "<"),
    ],
)
def test_a_change_is_found_at_its_position(source, before, after):
    encoded = source.encode()
    (mutant,) = (m for m in Finder("m.py", encoded).found if (m.before, m.after) == (before, after))
    assert encoded[mutant.start : mutant.stop].decode() == before
    assert str(mutant).startswith(f"m.py:{mutant.line}: ")


def test_every_change_of_the_packages_is_another_program():
    for module in ("runtime/worker/collective_groups.py", "runtime/collective/thread.py"):
        source = (ROOT / module).read_bytes()
        found = Finder(module, source).found
        assert found
        assert len({m.key for m in found}) == len(found)
        for m in found:
            assert source[m.start : m.stop] != m.after.encode()


def test_every_module_has_tests_and_those_elsewhere_exist():
    """Moved modules and tests would otherwise be left out silently."""
    for module in modules_of(["coordinator", "runtime"]):
        assert mutation.tests_of(module), module
    for package, tests in ELSEWHERE.items():
        assert list(ROOT.glob(f"{package}/")) or list(ROOT.glob(f"runtime/{package}/"))
        assert all((ROOT / test.split("::")[0]).is_file() for test in tests)


SMALL = "def more(a, b):\n    return a > b\n\n\ndef unseen(a):\n    return a - b\n"
SMALL_TEST = """
from coordinator.small import more

def test_more():
    assert more(2, 1) and not more(1, 1)
"""


def run_in(project, *arguments):
    programs.preload("pytest")
    found = programs.run(
        [sys.executable, "tests/mutation.py", "coordinator/small.py", *arguments],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project)},
        timeout=50,
        check=True,
    )
    return found.stdout


@pytest.fixture
def project(tmp_path):
    for folder in ("coordinator", "tests/unit/coordinator"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "coordinator/__init__.py").touch()
    (tmp_path / "coordinator/small.py").write_text(SMALL)
    (tmp_path / "tests/unit/coordinator/test_rounds.py").write_text(SMALL_TEST)
    shutil.copy(mutation.__file__, tmp_path / "tests/mutation.py")
    return tmp_path


def test_a_run_reports_surviving_mutations_and_leaves_the_tree_unchanged(project):
    out = run_in(project)
    assert "2 changes, 2 tried: {'killed': 1, 'survived': 1}" in out
    assert "survived  coordinator/small.py:6: -  ->  +" in out
    assert (project / "coordinator/small.py").read_text() == SMALL
    results = [json.loads(line) for line in (project / "mutation.jsonl").read_text().splitlines()]
    assert [(r["verdict"], r["by"]) for r in results] == [
        ("killed", "tests/unit/coordinator/test_rounds.py::test_more"),
        ("survived", ""),
    ]
    # What was tried is not tried again.
    assert "1 changes, 1 tried: {'survived': 1}" in run_in(project, "--only", "-")
    assert len((project / "mutation.jsonl").read_text().splitlines()) == 2


def test_tests_that_fail_without_a_mutation_are_not_evaluated(project):
    (project / "tests/unit/coordinator/test_rounds.py").write_text(
        "def test():\n    assert False\n"
    )
    out = run_in(project)
    assert "useless: tests/unit/coordinator/test_rounds.py::test is red" in out
    assert "2 changes, 0 tried: {}" in out
