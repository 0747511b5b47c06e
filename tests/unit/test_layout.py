"""What holds for the source as a whole: dependencies, sizes, what is shipped."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("coordinator", "runtime")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def relative(path):
    return path.relative_to(ROOT).as_posix()


def sources(*packages):
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(path):
    """Absolute names of all modules that a file imports, wherever in it and however."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called(node).endswith(("import_module", "__import__")):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))


def called(node):
    """Dotted name of what a call calls, as far as it is made of names."""
    parts, target = [], node.func
    while isinstance(target, ast.Attribute):
        parts.append(target.attr)
        target = target.value
    parts.append(target.id if isinstance(target, ast.Name) else "")
    return ".".join(reversed(parts))


every_source = pytest.mark.parametrize("path", sources(*PACKAGES), ids=relative)


@pytest.mark.parametrize("path", sources("coordinator"), ids=relative)
def test_coordinator_never_imports_runtime(path):
    assert [name for name in imported_modules(path) if name.split(".")[0] == "runtime"] == []


def test_importing_coordinator_loads_no_runtime():
    code = (
        "import importlib, pkgutil, sys, coordinator\n"
        "for module in pkgutil.walk_packages(coordinator.__path__, 'coordinator.'):\n"
        "    importlib.import_module(module.name)\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'runtime']\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=50)


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_sorted_and_importable(package):
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(set(module.__all__))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@every_source
def test_packages_neither_print_nor_exit_nor_touch_the_root_logger(path):
    if path.name == "__main__.py":
        pytest.skip("a command line prints")
    forbidden = {"print", "sys.exit", "exit", "quit", "os._exit", "logging.basicConfig"}
    forbidden |= {f"logging.{m}" for m in ("debug", "info", "warning", "error", "exception", "log")}
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call):
            name = called(node)
            assert name not in forbidden, f"{name} in line {node.lineno}"
            if name.endswith("getLogger"):
                assert node.args, f"the root logger in line {node.lineno}"


@every_source
def test_files_and_functions_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    lengths = {
        f"{node.name} in line {node.lineno}": node.end_lineno - node.lineno + 1
        for node in ast.walk(parse(path))
        if isinstance(node, functions)
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}


@every_source
def test_files_have_a_docstring_and_annotations_from_the_future(path):
    tree = parse(path)
    assert ast.get_docstring(tree)
    if path.name != "__init__.py":
        assert "__future__.annotations" in imported_modules(path)


def test_pyproject_lists_the_packages_on_disk():
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    found = {path.parent for path in sources(*PACKAGES)}
    assert sorted(listed) == sorted(relative(folder).replace("/", ".") for folder in found)
    assert [folder for folder in found if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_ship_py_typed(package):
    assert (ROOT / package / "py.typed").exists()
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert "py.typed" in tomllib.load(file)["tool"]["setuptools"]["package-data"][package]
