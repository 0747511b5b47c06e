"""The README and the pages of docs/: their code runs, their links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import runtime

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NUM_NOT_RUN = {"README.md": 2, "cluster.md": 2, "coming-from.md": 3, "gpus.md": 1, "training.md": 1}
"""Blocks that say in a comment above them why they are not run."""

FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?"
    r"^ *```(?P<language>[^\n{]+)\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
PACKAGES = ("benchmarks", "coordinator", "examples", "runtime", "tests")
FILE = re.compile(r"`([\w/]+\.py)`")
NAMED = re.compile(r"`((?:benchmarks|coordinator|examples|runtime|tests)/[\w/]+(?:\.py)?)/?[` ]")


@dataclass(frozen=True)
class Block:
    """A fenced block of code and the line on which its code begins."""

    language: str
    code: str
    line: int
    reason: str | None


def blocks_of(path):
    text = path.read_text(encoding="utf-8")
    return [
        Block(m["language"], m["code"], text.count("\n", 0, m.start("code")), m["reason"])
        for m in FENCE.finditer(text)
    ]


def pages_with(condition):
    return [path for path in PAGES if any(map(condition, blocks_of(path)))]


def runs(block):
    return block.reason is None


@pytest.mark.parametrize("path", pages_with(runs), ids=lambda path: path.name)
def test_the_blocks_of_a_page_run_one_after_the_other(path, tmp_path, monkeypatch):
    if path.name == "watching.md":
        pytest.importorskip("aiohttp")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": path.stem}
    for block in filter(runs, blocks_of(path)):
        assert block.language == "python", f"{path.name}:{block.line}: say why it is not run"
        code = compile("\n" * block.line + block.code, str(path), "exec")
        exec(code, namespace)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_blocks_that_are_not_run_are_counted(path):
    not_run = [block for block in blocks_of(path) if not runs(block)]
    assert len(not_run) == NUM_NOT_RUN.get(path.name, 0)
    for block in filter(lambda block: block.language == "python", not_run):
        compile(block.code, str(path), "exec")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files(path):
    targets = LINK.findall(path.read_text(encoding="utf-8"))
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_that_a_page_names_exist(path):
    text = path.read_text(encoding="utf-8")
    assert [name for name in NAMED.findall(text) if not (ROOT / name).exists()] == []
    files = {file.name for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    files |= {file.name for file in (ROOT / "docs").glob("*.py")}
    assert [name for name in FILE.findall(text) if name.split("/")[-1] not in files] == []


def test_the_reference_has_every_public_name_once():
    pages = (ROOT / "docs" / "api").glob("*.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    names = re.findall(r"^\.\. auto\w+:: runtime\.(\w+)$", text, re.MULTILINE)
    assert sorted(names) == sorted(runtime.__all__)


def test_the_readme_is_read_in_five_minutes():
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 160


def test_the_chart_is_drawn_from_the_record():
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    drawn = pictures.speed_svg()
    assert drawn == pictures.SPEED.read_text(encoding="utf-8"), "run docs/pictures.py speed"
    assert pictures.TIMELINE.stat().st_size < 300_000
