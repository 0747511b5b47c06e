"""The README and the pages of docs/: their code runs, and their links are valid."""

from __future__ import annotations

import builtins
import difflib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import gpuworker
from tests.support.pairs import SCALE

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NUM_NOT_RUN = {
    "README.md": 2,
    "cluster.md": 3,
    "coming-from.md": 3,
    "free-threaded.md": 2,
    "gpus.md": 1,
    "how-to.md": 1,
    "own-loops.md": 1,
    "training.md": 1,
    "watching.md": 1,
}
"""Blocks that are not run, with the reason in a comment above them."""

FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?"
    r"^ *```(?P<language>[^\n{]+)\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
PACKAGES = ("benchmarks", "coordinator", "examples", "gpuworker", "runtime", "tests")
FILE = re.compile(r"`([\w/]+\.py)`")
NAMING = [*PAGES, *(ROOT / p for p in ("CONTRIBUTING.md", "examples/README.md"))]
CLASS = re.compile(r"`([A-Z]\w*[a-z]\w*)(?:\.(\w+))?`")
NAMED = re.compile(rf"`((?:{'|'.join(PACKAGES)})/[\w/]+(?:\.py)?)/?[` ]")


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


def smaller(code):
    """A block of the README with a tenth of its samples, and fewer epochs."""
    return code.replace("10_000", "1_000").replace("num_epochs(10)", "num_epochs(2)")


@pytest.mark.parametrize("path", pages_with(runs), ids=lambda path: path.name)
def test_the_blocks_of_a_page_run_one_after_the_other(path, tmp_path, monkeypatch):
    for module in {"watching.md": ["aiohttp"], "checkpoints.md": ["safetensors"]}.get(
        path.name, []
    ):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": path.stem}
    for block in filter(runs, blocks_of(path)):
        assert block.language == "python", (
            f"{path.name}:{block.line}: state the reason for not running it"
        )
        text = block.code if path != PAGES[0] or SCALE > 1 else smaller(block.code)
        code = compile("\n" * block.line + text, str(path), "exec")
        exec(code, namespace)


EXACT = {"data.md", "evaluation.md", "failures.md", "from-one-to-n.md"}
"""Pages whose examples assert figures of their own sizes."""
ODD = [path for path in pages_with(runs) if path.name not in EXACT]


def odd(code):
    """A block with three epochs, and numbers of samples that batches do not divide."""
    code = re.sub(r"num_epochs\(\d+\)", "num_epochs(3)", code)
    return re.sub(r"(torch\.rand\w*\()([\d_]{3,})(?=, )", lambda m: f"{m[1]}{int(m[2]) - 3}", code)


@pytest.mark.parametrize(
    "path",
    [p for p in ODD if SCALE > 1 or p.name in ("mirrored.md", "own-loops.md")],
    ids=lambda path: path.name,
)
def test_the_blocks_of_a_page_run_with_three_epochs_and_odd_sizes(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": path.stem}
    for block in filter(runs, blocks_of(path)):
        exec(compile("\n" * block.line + odd(block.code), str(path), "exec"), namespace)


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


@pytest.mark.parametrize("path", NAMING, ids=lambda path: str(path.relative_to(ROOT)))
def test_anchors_of_links_are_headings(path):
    missing = []
    for file, anchor in ANCHOR.findall(path.read_text(encoding="utf-8")):
        page = (path.parent / file) if file else path
        headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        if anchor not in slugs:
            missing.append(f"{file}#{anchor}")
    assert missing == []


@pytest.mark.parametrize("path", NAMING, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_names_exist(path):
    text = path.read_text(encoding="utf-8")
    assert [name for name in NAMED.findall(text) if not (ROOT / name).exists()] == []
    files = [f"/{file}" for folder in (*PACKAGES, "docs") for file in (ROOT / folder).rglob("*.py")]
    assert [
        name for name in FILE.findall(text) if not any(f.endswith(f"/{name}") for f in files)
    ] == []


def test_classes_that_the_design_page_names_exist():
    folders = (ROOT / "coordinator", ROOT / "runtime")
    sources = [file.read_text() for folder in folders for file in folder.rglob("*.py")]
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    missing = []
    for name, member in sorted(set(CLASS.findall(text))):
        homes = [s for s in sources if re.search(rf"^class {name}\b", s, re.MULTILINE)]
        if not any(re.search(rf"\b{member}\b", source) for source in homes):
            missing.append(f"{name}.{member}".rstrip("."))
    assert missing == []


NAME = re.compile(r"`(?:\w+\.)?([A-Za-z_]\w*)(?:\(\))?`")


def test_names_in_the_recipes_exist():
    folders = [ROOT / package for package in PACKAGES]
    sources = [file.read_text("utf-8") for folder in folders for file in folder.rglob("*.py")]
    defined = re.compile(
        r"^\s*(?:(?:async )?def|class) (\w+)|^\s*(?:self\.)?(\w+)(?:: [^=\n]+)? =", re.M
    )
    known = {name for text in sources for pair in defined.findall(text) for name in pair}
    named = set(NAME.findall((ROOT / "CONTRIBUTING.md").read_text("utf-8")))
    identifiers = {name for name in named if "_" in name or name != name.lower()}
    affixes = {"num_", "_bytes", "_s"}
    assert identifiers - known - affixes - set(dir(builtins)) == set(), (
        "mend the recipe in CONTRIBUTING.md"
    )


def test_the_reference_has_every_public_name_once():
    pages = (ROOT / "docs" / "api").glob("*.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    names = re.findall(r"^\.\. auto\w+:: gpuworker\.(\w+)$", text, re.MULTILINE)
    assert sorted(names) == sorted(gpuworker.__all__)


def test_the_search_puts_the_background_pages_last():
    script = (ROOT / "docs" / "search_order.js").read_text(encoding="utf-8")
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    background = index[index.index(":caption: Background") :].split("```")[0].split()[2:]
    assert re.findall(r'"([\w-]+)"', script.split("BACKGROUND = ")[1].split(";")[0]) == background


def test_a_script_moves_to_two_workers_with_at_most_12_new_or_changed_lines():
    old, new = (
        (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()
        for name in ("char_gpt_one_device.py", "char_gpt.py")
    )
    lines = list(difflib.unified_diff(old, new, n=1, lineterm=""))[2:]
    assert sum(line.startswith("+") and line != "+" for line in lines) <= 12
    (shown,) = (b for b in blocks_of(ROOT / "docs" / "own-loops.md") if b.language == "diff")
    assert shown.code.splitlines() == [line.rstrip() if line[0] != "@" else "@@" for line in lines]


def test_the_readme_is_read_in_five_minutes_and_names_both_commands():
    assert re.findall(r"`make (\w+)`", PAGES[0].read_text(encoding="utf-8"))[:2] == ["demo", "test"]
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 150


def test_the_charts_are_drawn_from_the_records():
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    drawn = pictures.speed_svg()
    assert drawn == pictures.SPEED.read_text(encoding="utf-8"), "run docs/pictures.py speed"
    drawn = pictures.rounds_svg()
    assert drawn == pictures.AVERAGINGS.read_text(encoding="utf-8"), "run docs/pictures.py rounds"
    assert pictures.TIMELINE.stat().st_size < 300_000


README_EXAMPLES = [b.code for b in blocks_of(PAGES[0]) if b.language == "python"]


@pytest.mark.parametrize("code", README_EXAMPLES, ids=["fit", "builder"])
def test_an_example_of_the_readme_has_the_loss_of_one_device_on_several(code):
    """In two epochs of 1,000 samples, with a seed; rounding alone differs."""
    losses = {}
    for num in (1, 2, 4):
        torch.manual_seed(0)
        changed = smaller(code).replace('["cpu", "cpu"]', f'["cpu"] * {num}')
        changed = changed.replace("num_epochs(2)", "num_epochs(2).seed(0).progress(False)")
        changed = changed.replace("epochs=3", "epochs=2, seed=0, progress=False")
        assert changed.count("progress") == 1
        namespace = {"__name__": "readme"}
        exec(compile(changed, "README.md", "exec"), namespace)
        losses[num] = namespace["state"].metrics[-1].avg_loss
    assert losses == dict.fromkeys(losses, pytest.approx(losses[1], rel=1e-4))
