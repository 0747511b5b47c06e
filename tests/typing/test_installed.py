"""Type checkers on users' programs, beside an installed wheel and outside this tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.house import PACKAGES, ROOT
from tests.support.pairs import SCALE

HERE = Path(__file__).parent
WITHOUT_TYPES = ("peft", "sklearn", "timm", "transformers")
"""Packages that the examples import, and that have no annotations or may be absent."""

pytestmark = pytest.mark.skipif(
    SCALE < 2, reason="TEST_SCALE=2 or more: type checkers read all of PyTorch"
)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Python of a virtual environment with the wheel, and the other packages of this one."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*build, "--wheel-dir", str(folder), str(source)], folder)
    shutil.rmtree(source)
    venv.create(folder / "venv", with_pip=False)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder / "venv" / "bin" / "python"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder with the typed program, the README's examples and the examples."""
    folder = tmp_path_factory.mktemp("programs")
    for path in (HERE / "user_script.py", *(ROOT / "examples").glob("*.py")):
        shutil.copy(path, folder)
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Example", 1)[1]
    for place, example in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
        (folder / f"readme{place}.py").write_text(example, encoding="utf-8")
    (folder / "mypy.ini").write_text(
        "[mypy]\n"
        + "".join(f"[mypy-{p}.*]\nignore_missing_imports = true\n" for p in WITHOUT_TYPES)
        # Tensor.backward has no annotations.
        + "[mypy-char_gpt_one_device]\ndisallow_untyped_calls = false\n",
        encoding="utf-8",
    )
    return folder


def run(command, folder):
    """Run a command that must succeed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_programs_pass_mypy_strict_beside_the_installed_package(python, programs):
    names = sorted(path.name for path in programs.glob("*.py"))
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), *names]
    assert f"no issues found in {len(names)} source files" in run(command, programs)


@pytest.mark.timeout(600)
def test_programs_pass_pyright_beside_the_installed_package(python, programs):
    pyright = shutil.which("pyright")
    if pyright is None:
        pytest.skip("needs the command pyright")
    absent = re.compile(rf'Import "(?:{"|".join(WITHOUT_TYPES)})\b')
    command = [pyright, "--pythonpath", str(python), "."]
    done = subprocess.run(command, cwd=programs, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if " - error: " in line]
    assert [line for line in errors if not absent.search(line)] == [], done.stderr
    assert "0 warnings" in done.stdout
