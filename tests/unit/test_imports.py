"""Structure of the source: imports between packages, layout, contents of the wheel."""

from __future__ import annotations

import ast
import importlib
import sys
import tomllib

import pytest

from tests import house
from tests.house import (
    OPENINGS,
    PACKAGES,
    ROOT,
    House,
    called,
    imported_modules,
    parse,
    relative,
    sources,
)
from tests.support import programs

STILL: tuple[str, ...] = ()
"""Known violations, each to be removed with its cause."""


def test_imports_go_down_and_names_are_unique():
    """Layers, circles, depth, modules at the top, names: see :class:`tests.house.House`."""
    faults = House().faults()
    assert [fault for fault in faults if not fault.startswith(STILL)] == []
    assert [known for known in STILL if not any(f.startswith(known) for f in faults)] == []


def test_every_exception_to_the_rule_of_opening_classes_is_needed(monkeypatch):
    monkeypatch.setattr(house, "OPENINGS", set())
    needed = {fault.split(" opens with ")[0] for fault in House().openings()}
    assert needed == OPENINGS, "take files that open with their class out of tests/house.py"


GOOD = {
    "coordinator/__init__.py": "from coordinator.service import Service",
    "coordinator/messages.py": "",
    "coordinator/service.py": "from coordinator import messages\nclass Service: ...",
    "runtime/__init__.py": "from runtime.run import Run",
    "runtime/run.py": "import runtime.worker.worker\nfrom .config import C\nclass Run: ...",
    "runtime/config.py": "",
    "runtime/core/__init__.py": "",
    "runtime/core/errors.py": "import torch",
    "runtime/device/__init__.py": "",
    "runtime/device/base.py": "from runtime.core import errors",
    "runtime/timeline/__init__.py": "",
    "runtime/timeline/events.py": "",
    "runtime/worker/__init__.py": "",
    "runtime/worker/worker.py": "from ..device.base import x\nclass Worker: ...",
    "runtime/worker/step.py": "from runtime.worker.worker import Worker\nclass _Own: ...",
    "runtime/loop/__init__.py": "",
    "runtime/loop/engine.py": "class _Own: ...\nfrom enum import Enum\nclass Mode(Enum): ...\n"
    "class Engine: ...\nlogger = 1",
}
"""A small tree without violations, with every kind of import."""

CHAIN = {f"coordinator/c{i}.py": f"import coordinator.c{i + 1}" for i in range(9)}

PLANTED = {
    "up": (
        {"runtime/core/errors.py": "from runtime.device.base import x"},
        "core/errors.py imports up",
    ),
    "up to a package": ({"runtime/core/errors.py": "from runtime.device import x"}, "imports up"),
    "up to the top": (
        {"runtime/worker/step.py": "import runtime.run"},
        "imports up: runtime/run.py",
    ),
    "up, relative": ({"runtime/core/errors.py": "from ..device import base"}, "imports up"),
    "up, lazy": (
        {"runtime/core/errors.py": "def f():\n    from runtime.run import Run"},
        "imports up",
    ),
    "up, for types alone": (
        {
            "runtime/core/errors.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from runtime.worker.worker import Worker"
        },
        "imports up",
    ),
    "up, by a call": (
        {"runtime/core/errors.py": "import importlib\nimportlib.import_module('runtime.run')"},
        "imports up",
    ),
    "across": (
        {"runtime/loop/engine.py": "from runtime.worker.worker import Worker"},
        "imports across",
    ),
    "across, device": (
        {"runtime/timeline/events.py": "import runtime.device.base"},
        "imports across",
    ),
    "coordinator": ({"coordinator/messages.py": "import runtime.core.errors"}, "imports up"),
    "coordinator, of nothing": ({"coordinator/messages.py": "import runtime.gone"}, "runtime.gone"),
    "a new folder": ({"runtime/cellar/__init__.py": ""}, "runtime/cellar has no layer"),
    "a circle": (
        {"runtime/worker/worker.py": "import runtime.worker.step\nclass Worker: ..."},
        "circle",
    ),
    "deep": ({**CHAIN, "coordinator/c9.py": ""}, "10 deep: c0.py > c1.py"),
    "a crowd": ({f"runtime/m{i}.py": "" for i in range(8)}, "11 modules in runtime/"),
    "two files": (
        {"runtime/loop/messages.py": "", "coordinator/messages.py": ""},
        "the name of coordinator/messages.py and runtime/loop/messages.py is defined twice",
    ),
    "a long function": (
        {"runtime/worker/step.py": "def f():\n" + "    1\n" * 80},
        "runtime/worker/step.py: f has 81 lines",
    ),
    "two classes": ({"runtime/config.py": "class Service: ..."}, "class Service is in"),
    "deep, runtime": (
        {f"runtime/loop/c{i}.py": f"import runtime.loop.c{i + 1}" for i in range(22)},
        "22 deep: c0.py > c1.py",
    ),
    "a circle of packages": (
        {"runtime/device/base.py": "import runtime.worker.step"},
        "circle of packages: runtime/device, runtime/worker",
    ),
    "two constants": (
        {"runtime/worker/step.py": "LIMIT = 1", "runtime/worker/plan.py": "LIMIT: int = 2"},
        "LIMIT is in runtime/worker/plan.py, runtime/worker/step.py",
    ),
    "an alias and a private class": (
        {"runtime/worker/step.py": "class _Cost: ...", "runtime/worker/plan.py": "_Cost = int"},
        "_Cost is in",
    ),
    "another class first": (
        {"runtime/worker/worker.py": "class Helper: ...\nclass Worker: ..."},
        "worker.py opens with Helper and not with Worker",
    ),
    "two modules": ({"runtime/device.py": ""}, "has the name of a folder beside it"),
}


def plant(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return House(root)


def test_a_tree_in_order_has_no_fault(tmp_path):
    house = plant(tmp_path, {**GOOD, **{f: t for f, t in CHAIN.items() if not f.endswith("c6.py")}})
    assert house.graph["runtime/run.py"] == {"runtime/worker/worker.py", "runtime/config.py"}
    assert house.faults() == []


@pytest.mark.parametrize(("files", "message"), PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found(tmp_path, files, message):
    faults = plant(tmp_path, {**GOOD, **files}).faults()
    assert [fault for fault in faults if message in fault], faults


def test_importing_coordinator_loads_no_runtime():
    code = (
        "import importlib, pkgutil, sys\n"
        "for name in [n for n in sys.modules if n.split('.')[0] in ('coordinator', 'runtime')]:\n"
        "    del sys.modules[name]\n"
        "import coordinator\n"
        "for module in pkgutil.walk_packages(coordinator.__path__, 'coordinator.'):\n"
        "    importlib.import_module(module.name)\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'runtime']\n"
    )
    programs.run([sys.executable, "-c", code], check=True)


FORBIDDEN = {"print", "sys.exit", "exit", "quit", "os._exit", "logging.basicConfig"}
FORBIDDEN |= {f"logging.{m}" for m in ("debug", "info", "warning", "error", "exception", "log")}


def rude_calls(path):
    """Calls that print, end the process, or use the root logger; a command line may."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and path.name != "__main__.py":
            name = called(node)
            if name in FORBIDDEN or (name.endswith("getLogger") and not node.args):
                yield f"{path.name} calls {name} in line {node.lineno}"


def test_packages_neither_print_nor_exit_nor_touch_the_root_logger():
    assert [fault for path in sources(*PACKAGES) for fault in rude_calls(path)] == []


@pytest.mark.parametrize(
    "call", ["print(1)", "import sys\nsys.exit()", "logging.getLogger().info(1)"]
)
def test_a_planted_call_is_found(tmp_path, call):
    (tmp_path / "planted.py").write_text(call, "utf-8")
    assert list(rude_calls(tmp_path / "planted.py"))


def test_json_and_pickles_are_read_in_one_place_each():
    """So that the limits on foreign content hold for all of it."""
    readers = {"json.load", "json.loads", "torch.load", "pickle.load", "pickle.loads"}
    found = {
        (relative(path), name)
        for path in sources(*PACKAGES)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and (name := called(node)) in readers
    }
    assert found == {
        ("coordinator/codec.py", "json.loads"),
        ("runtime/checkpoint/store.py", "torch.load"),
        ("runtime/data/process_loader.py", "pickle.loads"),  # of the run's own processes
    }


def test_files_have_a_docstring_and_annotations_from_the_future():
    for path in sources(*PACKAGES):
        assert ast.get_docstring(parse(path)), relative(path)
        if path.name != "__init__.py":
            assert "__future__.annotations" in imported_modules(path), relative(path)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_exports_and_ships_its_public_names(package):
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(set(module.__all__))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert (ROOT / package / "py.typed").exists()
    assert "py.typed" in setuptools_settings()["package-data"][package]


def test_pyproject_lists_the_packages_on_disk():
    found = {path.parent for path in sources(*PACKAGES)}
    listed = setuptools_settings()["packages"]
    assert sorted(listed) == sorted(relative(folder).replace("/", ".") for folder in found)
    assert [folder for folder in found if not (folder / "__init__.py").exists()] == []


def setuptools_settings():
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["setuptools"]
