"""A mutation run: small faults are planted in the source, one after the other, and the tests
that shall see each are run. ``python -m tests.mutation --help``; too slow for every change.

Each mutant is tested in a copy of the tree, in a process of its own that is forked from one which
has imported PyTorch. What survives is printed with its place: it is either a test to write, or a
change that makes no difference.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

SIMULATION = ["tests/simulation"]
RUNS = ["tests/deadlock", "tests/unit/test_survival.py", "tests/unit/test_exactly_once.py"]
TARGETS: dict[str, list[str]] = {
    "coordinator": [
        "tests/unit/test_{stem}.py",
        "tests/unit/coordinator/test_machine.py",
        *SIMULATION,
    ],
    "runtime/worker/protocol.py": ["tests/unit/worker/test_protocol.py", *SIMULATION, *RUNS],
    "runtime/worker/rounds.py": ["tests/unit/replica/test_averaging_runtime.py", *RUNS],
    "runtime/replica/averaging.py": ["tests/unit/replica/test_averaging_runtime.py", *RUNS],
    "runtime/worker/group.py": [*SIMULATION, *RUNS],
    "runtime/worker/reporter.py": ["tests/unit/worker/test_worker.py", *SIMULATION, *RUNS],
    "runtime/checkpoint": [
        "tests/unit/test_checkpoint_{stem}.py",
        "tests/unit/checkpoint/test_reader.py",
        "tests/unit/checkpoint/test_store.py",
        "tests/unit/test_checkpoint_content.py",
        "tests/unit/checkpoint/test_resume_runs.py",
    ],
    "runtime/collective": [
        "tests/unit/collective/test_collectives.py",
        "tests/unit/collective/test_subgroups.py",
        "tests/unit/replica/test_averaging_runtime.py",
        "tests/unit/collective/test_nccl.py",
    ],
}
"""What is mutated, and the tests that shall see it, the quickest first; what is not there is left
out. ``{stem}`` is the name of the mutated file."""

COMPARE = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"}
UNTOUCHED = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)
"""Statements in which nothing is mutated: errors' texts, and checks of what cannot be."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the text between two offsets becomes another."""

    path: str
    line: int
    start: int
    end: int
    text: str
    what: str

    @property
    def key(self) -> str:
        """Names it in the record."""
        return f"{self.path}:{self.line} {self.what}"


class Mutator(ast.NodeVisitor):
    """Finds the mutants of a file."""

    def __init__(self, path: str, source: str) -> None:
        self._path = path
        self._source = source.encode()
        self._lines = [0]
        for line in self._source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.found: list[Mutant] = []
        self.visit(ast.parse(source))

    def _add(self, node: ast.expr | ast.stmt, text: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        end = self._lines[node.end_lineno - 1] + node.end_col_offset
        before = " ".join(self._source[start:end].decode().split())
        what = f"{before[:70]} -> {' '.join(text.split())[:70]}"
        self.found.append(Mutant(self._path, node.lineno, start, end, text, what))

    def visit(self, node: ast.AST) -> None:
        """Visit a node, unless nothing in it can matter to a test."""
        if isinstance(node, UNTOUCHED) or _is_text(node) or _is_logging(node):
            return
        if isinstance(node, ast.FunctionDef):
            for statement in node.body:
                self.visit(statement)
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.visit(node.value)
            return
        super().visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        """Note what can be changed here, and go on below."""
        match node:
            case ast.Compare(ops=[op]) if type(op) in COMPARE:
                left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
                self._add(node, f"({left} {COMPARE[type(op)]} {right})")
            case ast.BoolOp():
                other = " or " if isinstance(node.op, ast.And) else " and "
                self._add(node, "(" + other.join(f"({ast.unparse(v)})" for v in node.values) + ")")
            case ast.BinOp() if type(node.op) in ARITHMETIC:
                left, right = ast.unparse(node.left), ast.unparse(node.right)
                self._add(node, f"(({left}) {ARITHMETIC[type(node.op)]} ({right}))")
            case ast.UnaryOp(op=ast.Not()):
                self._add(node, f"({ast.unparse(node.operand)})")
            case ast.Constant(value=bool()):
                self._add(node, str(not node.value))
            case ast.Constant(value=int()):
                self._add(node, str(node.value + 1))
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                self._add(node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                self._add(node, "pass")
            case ast.Return(value=value) if value is not None and not isinstance(
                value, ast.Constant
            ):
                self._add(node, "return None")
            case ast.Continue() | ast.Break():
                self._add(node, "pass")
        super().generic_visit(node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_logging(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    function = call.func if isinstance(call, ast.Call) else None
    owner = function.value if isinstance(function, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id == "logger"


def mutants_of(targets: list[str]) -> Iterator[Mutant]:
    """All mutants of files, or of the files in folders."""
    for target in targets:
        path = ROOT / target
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield from Mutator(
                file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")
            ).found


def tests_for(path: str) -> list[str]:
    """The tests that shall see a change of a file."""
    target = max((t for t in TARGETS if path.startswith(t)), key=len)
    names = [name.format(stem=Path(path).stem) for name in TARGETS[target]]
    return [name for name in dict.fromkeys(names) if (ROOT / name).exists()]


def run(mutant: Mutant, tree: Path, limit_s: float) -> str:
    """Test one mutant in a copy of the tree; ``"killed"``, ``"timeout"`` or ``"survived"``."""
    file = tree / mutant.path
    source = file.read_bytes()
    file.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
    pid = os.fork()
    if pid == 0:
        _test(tree, tests_for(mutant.path))
    try:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
            time.sleep(0.05)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "timeout"
    finally:
        file.write_bytes(source)


def _test(tree: Path, tests: list[str]) -> None:
    """In the forked process: run the tests, and leave with their exit code."""
    import pytest

    os.setpgid(0, 0)
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    code = 1
    try:
        for test in tests:
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--timeout=60", test])
            if code:
                break
    finally:
        os._exit(int(code))


def copy_tree(to: Path) -> None:
    """Copy every file that git tracks."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in names.stdout.split():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def main() -> int:
    """Run a sample; the exit code is 1 if a mutant has survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help="files or folders")
    parser.add_argument("--sample", type=int, help="so many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds for each mutant")
    parser.add_argument("--minutes", type=float, help="stop after so many")
    parser.add_argument(
        "--record", type=Path, help="JSON lines; what stands there is not run again"
    )
    args = parser.parse_args()
    import pytest  # noqa: F401 - before the first fork, as PyTorch
    import torch  # noqa: F401

    sys.dont_write_bytecode = True
    everything = list(mutants_of(args.targets))
    chosen = everything
    if args.sample is not None and args.sample < len(everything):
        chosen = random.Random(args.seed).sample(everything, args.sample)
    known: dict[str, str] = {}
    if args.record and args.record.exists():
        for line in args.record.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            known[entry["mutant"]] = entry["result"]
    began, counts, survivors = time.monotonic(), Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy_tree(Path(folder))
        for mutant in chosen:
            if args.minutes and time.monotonic() - began > 60 * args.minutes:
                break
            result = known.get(mutant.key) or run(mutant, Path(folder), args.limit_s)
            counts[result] += 1
            if result == "survived":
                survivors.append(mutant.key)
                print("survived", mutant.key, flush=True)
            if args.record and mutant.key not in known:
                with args.record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"mutant": mutant.key, "result": result}) + "\n")
    print(
        f"{len(everything)} mutants, {sum(counts.values())} run: {counts['killed']} killed, "
        f"{counts['timeout']} timed out, {counts['survived']} survived"
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
