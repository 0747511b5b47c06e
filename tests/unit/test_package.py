"""The package ``gpuworker``: names, command, and foreign packages of the same names."""

import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpuworker
import gpuworker.__main__
import runtime
from tests.support import programs

ROOT = Path(__file__).parents[2]
FOREIGN = "raise SystemExit('the code of the foreign package was run')\n"


def python(*arguments, path):
    """Run Python with these directories first on ``sys.path``."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        cwd=path[0],
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_every_public_name_of_runtime_is_the_same_object_in_gpuworker():
    assert gpuworker.__all__ == runtime.__all__
    for name in runtime.__all__:
        assert getattr(gpuworker, name) is getattr(runtime, name), name


@pytest.mark.parametrize("name", ["cluster", "fsdp", "loggers"])
def test_public_submodules_hold_public_names(name):
    module = importlib.import_module(f"gpuworker.{name}")
    assert module.__all__ == sorted(set(module.__all__))
    assert set(module.__all__) <= set(runtime.__all__)
    for each in module.__all__:
        assert getattr(module, each) is getattr(runtime, each)


def test_the_version_is_that_of_the_distribution_or_unknown(monkeypatch):
    versions = {"gpuworker": "1.2.3"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", version)
        assert importlib.reload(gpuworker).__version__ == "1.2.3"
        versions.clear()
        assert importlib.reload(gpuworker).__version__ == "0+unknown"
    importlib.reload(gpuworker)


@pytest.mark.parametrize("package", ["coordinator", "runtime"])
@pytest.mark.parametrize("form", ["{}.py", "{}/__init__.py"], ids=["module", "package"])
def test_a_foreign_package_first_on_the_path_is_named_with_the_remedy(package, form, tmp_path):
    file = tmp_path / form.format(package)
    file.parent.mkdir(exist_ok=True)
    file.write_text(FOREIGN, "utf-8")
    done = python("-c", "import gpuworker", path=[tmp_path, ROOT])
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith("ImportError: gpuworker needs its own package"), done.stderr
    assert repr(package) in message
    assert str(file) in message
    assert "uninstall" in message


def test_a_foreign_package_already_imported_is_named(tmp_path):
    (tmp_path / "runtime.py").write_text("x = 1\n", "utf-8")
    done = python("-c", "import runtime, gpuworker", path=[tmp_path, ROOT])
    assert str(tmp_path / "runtime.py") in done.stderr.splitlines()[-1]


def test_a_missing_package_is_named(tmp_path):
    (tmp_path / "gpuworker").symlink_to(ROOT / "gpuworker")
    done = python("-S", "-c", "import gpuworker", path=[tmp_path])
    assert "'coordinator', but Python finds nothing" in done.stderr.splitlines()[-1]


def test_the_command_has_the_subcommands_of_python_m_runtime(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpuworker", "lighthouse", "--help"])
    with pytest.raises(SystemExit) as end:
        gpuworker.__main__.main()
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: gpuworker lighthouse")


def test_python_m_gpuworker_prints_the_machine_report():
    done = programs.run([sys.executable, "-m", "gpuworker"])
    assert done.returncode == 0, done.stderr
    assert "backend(AUTO)" in done.stdout
