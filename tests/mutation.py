"""Mutation testing of the packages: ``python -m tests.mutation --sample 100 --seed 1``.

Changes one operator, constant or statement at a time in a copy of the tree, runs the tests
of its module until one fails, and reports the changes that no test detects. It is far too slow for
every commit: one change costs as long as its module's tests take.

Docstrings, strings, annotations, assertions, decorators, log lines and the arguments of
exceptions stay as they are. A failing test is repeated before the change counts as detected,
so timeouts on a busy machine do not count.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIMULATION = "tests/simulation/test_"


SCHEDULES = (
    f"{SIMULATION}schedules.py::test_every_schedule_ends_with_every_sample_in_the_result_once[0]"
)
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "coordinator": (
        SCHEDULES,
        *(f"{SIMULATION}{name}.py" for name in ("resumed_schedules", "transports")),
        *(f"{SIMULATION}{name}.py" for name in ("unequal_speeds", "cluster")),
        "tests/deadlock/test_life_after_a_death.py",
    ),
    "cluster": ("tests/unit/coordinator/test_cluster.py", f"{SIMULATION}cluster.py"),
    "replica": ("tests/parity/test_all_gather.py", "tests/parity/test_sync_batchnorm.py"),
    "worker": (SCHEDULES,),
}
"""Tests of a package outside of its folder in ``tests/unit``."""

TEST_TIMEOUT_S = 25
"""Time limit of a test; a longer test counts as stopped by the change."""

SWAPS = {
    "<": ("<=",), "<=": ("<",), ">": (">=",), ">=": (">",), "==": ("!=",), "!=": ("==",),
    "is": ("is not",), "is not": ("is",), "in": ("not in",), "not in": ("in",),
    "+": ("-",), "-": ("+",), "*": ("/",), "/": ("*",), "//": ("*",), "%": ("*",),
    "and": ("or",), "or": ("and",), "|": ("&",), "&": ("|",), "^": ("&",),
    "min": ("max",), "max": ("min",), "any": ("all",), "all": ("any",),
    "break": ("continue",), "continue": ("break",),
}  # fmt: skip
SYMBOLS: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+",
    ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.And: "and",
    ast.Or: "or", ast.BitOr: "|", ast.BitAnd: "&", ast.BitXor: "^",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: the bytes from ``start`` to ``stop`` of a module become ``after``."""

    module: str
    line: int
    before: str
    after: str
    start: int
    stop: int

    @property
    def key(self) -> str:
        """Key that identifies the change among all changes of the same source."""
        return f"{self.module}:{self.start}:{self.before}:{self.after}"

    def __str__(self) -> str:
        def short(text: str) -> str:
            return re.sub(r"\s+", " ", text)[:70]

        return f"{self.module}:{self.line}: {short(self.before)}  ->  {short(self.after)}"


class Finder:
    """Finds every change of a module."""

    def __init__(self, module: str, source: bytes) -> None:
        self._module = module
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.found: list[Mutant] = []
        self._visit(ast.parse(source))

    def _span(self, node: Any) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _add(self, start: int, stop: int, after: str) -> None:
        before = self._source[start:stop].decode()
        mutated = self._source[:start] + after.encode() + self._source[stop:]
        try:
            ast.parse(mutated)
        except SyntaxError:
            return
        line = self._source.count(b"\n", 0, start) + 1
        self.found.append(Mutant(self._module, line, before, after, start, stop))

    def _swap(self, left: Any, right: Any, symbol: str) -> None:
        """Another operator between two expressions."""
        if not symbol:
            return
        start, stop = self._span(left)[1], self._span(right)[0]
        pattern = symbol.replace(" ", r"\s+") if symbol[0].isalpha() else re.escape(symbol)
        match = re.search(pattern.encode(), self._source[start:stop])
        for other in SWAPS.get(symbol, ()):
            if match:
                self._add(start + match.start(), start + match.end(), other)

    def _visit(self, node: ast.AST) -> None:
        for child in self._children(node):
            self._mutate(child)
            self._visit(child)

    @staticmethod
    def _children(node: ast.AST) -> Iterator[ast.AST]:
        skipped: tuple[str, ...] = ()
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                skipped = ("decorator_list", "returns", "bases", "keywords")
            case ast.AnnAssign() | ast.arg():
                skipped = ("annotation",)
            case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
                return
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))):
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
            case ast.keyword(arg="strict" | "slots" | "name" | "daemon"):
                return
            case ast.match_case():
                skipped = ("pattern",)
            case ast.Call(func=ast.Name(id="TypeVar" | "cast" | "getLogger")):
                return
        for name, value in ast.iter_fields(node):
            if name not in skipped:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield child

    def _mutate(self, node: ast.AST) -> None:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=rights):
                for one, op, other in zip([left, *rights], ops, rights, strict=False):
                    self._swap(one, other, SYMBOLS[type(op)])
            case ast.BoolOp(op=op, values=values):
                for one, other in pairwise(values):
                    self._swap(one, other, SYMBOLS[type(op)])
                for value in values:
                    self._add(*self._span(value), str(isinstance(op, ast.And)))
            case ast.BinOp(left=left, op=op, right=right):
                self._swap(left, right, SYMBOLS.get(type(op), ""))
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                start, stop = self._span(node)
                inner = slice(*self._span(operand))
                self._add(start, stop, f"({self._source[inner].decode()})")
            case ast.Constant(value=bool() as value):
                self._add(*self._span(node), str(not value))
            case ast.Constant(value=int() | float() as number):
                self._add(*self._span(node), repr(number + 1))
            case ast.Name(id=name) if name in ("min", "max", "any", "all"):
                self._add(*self._span(node), SWAPS[name][0])
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr):
                    start, stop = self._span(test)
                    self._add(start, stop, f"not ({self._source[start:stop].decode()})")
            case ast.Break() | ast.Continue():
                text = "break" if isinstance(node, ast.Break) else "continue"
                self._add(*self._span(node), SWAPS[text][0])
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))):
                pass
            case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Delete():
                self._add(*self._span(node), "pass")
            case ast.AugAssign(target=target, op=op, value=value):
                self._swap(target, value, SYMBOLS.get(type(op), ""))
                self._add(*self._span(node), "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript() | ast.Tuple()]):
                self._add(*self._span(node), "pass")


def modules_of(names: list[str]) -> list[str]:
    """Paths of modules, named one by one or by their folder."""
    found = [
        path.relative_to(ROOT).as_posix()
        for name in names
        for path in (
            sorted((ROOT / name).rglob("*.py")) if (ROOT / name).is_dir() else [ROOT / name]
        )
    ]
    return [module for module in found if not module.endswith("__init__.py")]


def tests_of(module: str) -> tuple[str, ...]:
    """Tests that cover a module: those of its name, of its package, and whole runs."""
    path, unit = Path(module), ROOT / "tests" / "unit"
    package = "coordinator" if path.parts[0] == "coordinator" else path.parent.name
    folder = unit / package if (unit / package).is_dir() else unit
    own, others = sorted(unit.rglob(f"test_*{path.stem}*.py")), sorted(folder.glob("test_*.py"))
    found = [file.relative_to(ROOT).as_posix() for file in (*own, *others)]
    more = [t for t in ELSEWHERE.get(package, ()) if (ROOT / t.split("::")[0]).is_file()]
    return tuple(dict.fromkeys((*found, *more)))


# -- running tests ------------------------------------------------------------------


class Tests:
    """Runs tests on a copy of the tree, in processes forked once torch is imported."""

    def __init__(self, copy: Path) -> None:
        self._copy = copy

    def run(self, tests: tuple[str, ...], limit_s: float) -> tuple[str, str]:
        """Run until one fails.

        Returns:
            ``passed``, ``failed`` or ``timeout``, and the test that failed.
        """
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            try:
                self._child(tests, writing)
            finally:
                os._exit(3)
        os.close(writing)
        deadline, status = time.monotonic() + limit_s, None
        while status is None and time.monotonic() < deadline:
            done, code = os.waitpid(pid, os.WNOHANG)
            status = code if done else None
            if status is None:
                time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # processes started by the tests end as well
        if status is None:
            os.waitpid(pid, 0)
        with os.fdopen(reading) as pipe:
            seen = pipe.read()
        if status is None:
            return "timeout", seen
        code = os.waitstatus_to_exitcode(status)
        return ("passed", "") if code == 0 else ("failed", seen or f"exit status {code}")

    def _child(self, tests: tuple[str, ...], writing: int) -> None:
        import pytest

        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.chdir(self._copy)
        os.environ["PYTHONPATH"] = str(self._copy)
        sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() not in (ROOT, self._copy)]
        sys.path.insert(0, str(self._copy))
        # Spawned processes must not import this module as the main module.
        sys.modules["__main__"] = ModuleType("__main__")
        for name in list(sys.modules):
            if name.split(".")[0] in ("tests", "runtime", "coordinator"):
                del sys.modules[name]
        options = [
            "-x",
            "-q",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
            "-o",
            f"timeout={TEST_TIMEOUT_S}",
        ]
        for test in tests:  # one file at a time: files after a failure are not collected
            code = int(pytest.main([*options, test], plugins=[Twice(writing)]))
            if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
                os._exit(code)
        os._exit(0)


class Twice:
    """Plugin that repeats a failing test; its second result counts."""

    def __init__(self, writing: int) -> None:
        self._writing = writing

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        from _pytest.runner import runtestprotocol

        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if any(r.failed and "Timeout" not in r.longreprtext for r in reports):
            item._initrequest()
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
        for report in reports:
            if report.failed:
                os.write(self._writing, item.nodeid.encode())
            item.ihook.pytest_runtest_logreport(report=report)
        return True


# -- the run ------------------------------------------------------------------------


class Run:
    """Tests changes and records the results as lines of JSON, from which a later run continues."""

    def __init__(self, copy: Path, output: Path) -> None:
        self._copy = copy
        self._output = output
        self._tests = Tests(copy)
        self._limits_s: dict[tuple[str, ...], float] = {}
        self._stamp = int(time.time()) - 10**7
        self.verdicts: dict[str, dict[str, Any]] = {}
        if output.exists():
            for line in output.read_text().splitlines():
                result = json.loads(line)
                self.verdicts[result["key"]] = result

    def limit_s(self, tests: tuple[str, ...]) -> float:
        """Time limit of tests: a multiple of their time without a mutation.

        Returns:
            Seconds; 0 if they fail without a mutation and are useless.
        """
        if tests not in self._limits_s:
            start = time.monotonic()
            verdict, seen = self._tests.run(tests, 1800.0)
            took_s = time.monotonic() - start
            state = "pass" if verdict == "passed" else f"are useless: {seen} is red"
            print(f"{len(tests)} test files {state} in {took_s:.0f} s without a change", flush=True)
            useful = verdict == "passed"
            self._limits_s[tests] = 2 * TEST_TIMEOUT_S + 4 * took_s if useful else 0.0
        return self._limits_s[tests]

    def _write(self, target: Path, source: bytes) -> None:
        """Write a file with a new modification time, which makes compiled code stale."""
        target.write_bytes(source)
        self._stamp += 1
        os.utime(target, (self._stamp, self._stamp))

    def try_one(self, mutant: Mutant) -> dict[str, Any]:
        """Run the tests of one change."""
        tests = tests_of(mutant.module)
        limit_s = self.limit_s(tests)
        if not limit_s:
            return {"verdict": "untested"}
        target = self._copy / mutant.module
        source = target.read_bytes()
        start = time.monotonic()
        self._write(target, source[: mutant.start] + mutant.after.encode() + source[mutant.stop :])
        try:
            verdict, seen = self._tests.run(tests, limit_s)
        finally:
            self._write(target, source)
        names = {"passed": "survived", "failed": "killed"}
        result = {
            **asdict(mutant),
            "key": mutant.key,
            "verdict": names.get(verdict, verdict),
            "by": seen,
            "seconds": round(time.monotonic() - start, 1),
        }
        self.verdicts[mutant.key] = result
        with self._output.open("a") as lines:
            lines.write(json.dumps(result) + "\n")
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", default=["coordinator", "runtime"])
    parser.add_argument("--only", help="a pattern of what is changed, such as '= 0$' or '^max$'")
    parser.add_argument("--sample", type=int, default=0, help="changes to try; 0: all of them")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--output", type=Path, default=Path("mutation.jsonl"))
    args = parser.parse_args()
    modules = list(dict.fromkeys(modules_of(args.modules)))
    found = [m for module in modules for m in Finder(module, (ROOT / module).read_bytes()).found]
    mutants = sorted(set(found), key=lambda m: (m.module, m.start, m.after))
    if args.only:
        mutants = [m for m in mutants if re.search(args.only, m.before)]
    total = len(mutants)
    if args.sample:
        mutants = random.Random(args.seed).sample(mutants, min(args.sample, total))
    print(f"{total} changes in {len(modules)} modules, {len(mutants)} to try", flush=True)

    import pytest  # noqa: F401
    import torch  # noqa: F401  # imported once, for all processes forked from here

    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder).resolve() / "tree"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build")
        shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
        run = Run(copy, args.output)
        for number, mutant in enumerate(mutants):
            if mutant.key not in run.verdicts:
                result = run.try_one(mutant)
                print(f"{number + 1:5d} {result['verdict']:<9} {mutant}", flush=True)
    tried = [run.verdicts[m.key] for m in mutants if m.key in run.verdicts]
    counts = Counter(result["verdict"] for result in tried)
    print(f"\n{total} changes, {len(tried)} tried: {dict(counts)}")
    for mutant in mutants:
        if run.verdicts.get(mutant.key, {}).get("verdict") == "survived":
            print(f"survived  {mutant}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
