"""Each example, run like a user's program with small settings."""

from __future__ import annotations

import gzip
import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from tests.compat.matrix import reason_to_skip
from tests.support import programs
from tests.support.pairs import SCALE
from tests.support.trace_format import load_trace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 150


@dataclass
class Done:
    """Result of a program."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_example(capfd, monkeypatch, tmp_path):
    """Runs an example like ``python examples/name``, in this process to save an import.

    Without ``TEST_SCALE`` a text of the example may be replaced by another, of a smaller model.
    """

    def run(name, *arguments, smaller=("", "")):
        path = EXAMPLES / name
        if SCALE == 1 and smaller[0]:
            text = path.read_text(encoding="utf-8")
            assert smaller[0] in text
            path = tmp_path / name
            path.write_text(text.replace(*smaller), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *map(str, arguments)])
        monkeypatch.syspath_prepend(str(EXAMPLES))
        code, num_threads = 0, torch.get_num_threads()
        torch.set_num_threads(
            1
        )  # two threads of one operation wait for each other on a busy machine
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        finally:
            torch.set_num_threads(num_threads)
        out, err = capfd.readouterr()
        return Done(code, out, err)

    return run


@pytest.fixture
def output_of(run_example):
    """Runs an example, which must succeed and print only its log to stderr."""

    def run(name, *arguments, **settings):
        done = run_example(name, *arguments, **settings)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout

    return run


def run_program(name, *arguments):
    """Runs an example in a separate process."""
    return programs.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::ResourceWarning"},
    )


def test_an_example_runs_as_a_program():
    done = run_program("digits.py", "--epochs", 1)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "accuracy" in done.stdout


def accuracy_in(output):
    return float(re.search(r"accuracy ([\d.]+)%", output.splitlines()[-1])[1]) / 100


@pytest.mark.parametrize(("policy", "backend"), [("sync", "thread"), ("cadence", "cpu")])
def test_digits_are_learned_in_a_few_epochs(output_of, policy, backend):
    output = output_of("digits.py", "--policy", policy, "--backend", backend, "--epochs", 3)
    assert len(re.findall(r"^epoch +\d+ .*samples/s$", output, re.MULTILINE)) == 3
    last = output.splitlines()[-1]
    assert last.startswith(f"{policy} ")
    assert re.search(rf" over {backend} *:", last)
    assert accuracy_in(output) >= 0.9
    assert int(re.search(r"(\d+) averagings", last)[1]) > 0
    shares = [int(share) for share in re.findall(r"(\d+)% at +[\d,]+/s", last)]
    assert len(shares) == 2
    assert 99 <= sum(shares) <= 101


def test_digits_assigns_a_slow_rank_less_work(output_of):
    output = output_of("digits.py", "--policy", "cadence", "--slow", 1, 4, "--epochs", 4)
    shares = [int(share) for share in re.findall(r"(\d+)% at +[\d,]+/s", output)]
    assert shares[1] < shares[0]


def test_mnist_trains_on_one_set_of_files(output_of, tmp_path):
    write_mnist(tmp_path, "small-10k", count=200)
    output = output_of("mnist.py", "--data", tmp_path, "--epochs", 5, "--batch-size", 16)
    assert "on 40 test images" in output
    assert accuracy_in(output) >= 0.9


def test_mnist_tests_on_the_test_files_if_there_are_any(output_of, tmp_path):
    write_mnist(tmp_path, "train", count=200, pack=False)
    write_mnist(tmp_path, "t10k", count=30)
    assert "on 30 test images" in output_of("mnist.py", "--data", tmp_path, "--epochs", 1)


def test_mnist_names_a_directory_without_images(run_example, tmp_path):
    done = run_example("mnist.py", "--data", tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path} holds no file" in done.stderr


@pytest.mark.parametrize("kept", [3, 500])
def test_mnist_names_a_file_that_is_cut_short(run_example, tmp_path, kept):
    write_mnist(tmp_path, "train", count=20, pack=False)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:kept])
    done = run_example("mnist.py", "--data", tmp_path)
    assert done.returncode == 2
    assert f"--data: {path} is not a whole idx file" in done.stderr


def test_char_lm_learns_a_text_and_writes_some(output_of, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 80, encoding="utf-8")
    output = output_of("char_lm.py", "--data", path, "--epochs", 2)
    losses = [float(loss) for loss in re.findall(r"validation ([\d.]+)", output)]
    assert len(losses) == 2
    assert losses[1] <= losses[0] < 3.5  # one average may close both epochs
    assert len(output.splitlines()[-1]) == 301


def test_char_lm_names_a_file_that_is_missing(run_example, tmp_path):
    done = run_example("char_lm.py", "--data", tmp_path / "absent.txt")
    assert done.returncode == 2
    assert "--data" in done.stderr
    assert "absent.txt" in done.stderr


def test_char_lm_names_a_text_that_is_too_short(run_example, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("short", encoding="utf-8")
    done = run_example("char_lm.py", "--data", path)
    assert done.returncode == 2
    assert "fewer than 1280 characters" in done.stderr


def test_char_gpt_resumes_and_is_as_good_as_on_one_device(output_of, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 180, encoding="utf-8")
    epochs, expected = ((7, 14), [["20"], ["40"]]) if SCALE > 1 else ((4, 7), [["10"], ["20"]])
    smaller = ("64, 96, 32, 2, 20, 20", "64, 16, 32, 2, 20, 10")  # width and interval
    best = []
    for name in ("char_gpt_one_device", "char_gpt"):
        steps = []
        for num_epochs in epochs:  # of three steps; the second run resumes the first
            options = ("--data", path, "--out", tmp_path / name, "--epochs", num_epochs)
            output = output_of(f"{name}.py", *options, smaller=smaller)
            steps.append(re.findall(r"^step (\d+)  validation", output, re.M))
        assert steps == expected
        best.append(torch.load(tmp_path / name / "best.pt"))
    assert best[1]["loss"] == pytest.approx(best[0]["loss"], rel=0.1)
    assert best[1]["model"].keys() == best[0]["model"].keys()


def test_actor_critic_learns_to_balance(output_of):
    output = output_of("actor_critic.py", "--epochs", 3)
    first, *_, last = (int(n) for n in re.findall(r"^epoch \d  (\d+) steps an", output, re.M))
    assert last > 2 * first
    balanced = re.search(r"^balanced for (\d+) of 500 steps$", output.splitlines()[-1])[1]
    assert int(balanced) > 50  # 22 with random pushes


def test_gan_draws_points_near_the_modes(output_of):
    output = output_of("gan.py", "--workers", 3, "--steps", 300 if SCALE > 1 else 200)
    assert len(re.findall(r"^epoch \d  judge [\d.]+  maker [\d.]+$", output, re.MULTILINE)) == 5
    share, modes = re.search(r"(\d+)% of the points lie near one of (\d) of 8", output).groups()
    # Points of an untrained generator are near no mode.
    assert int(share) >= 8
    assert int(modes) >= 4


def test_lora_trains_less_than_a_tenth_and_learns(output_of):
    output = output_of("lora.py", "--epochs", 2)
    travels, whole, share = re.search(
        r"^adapters and head: ([\d,]+) of ([\d,]+) bytes, ([\d.]+)%$", output, re.MULTILINE
    ).groups()
    assert float(share) < 10
    assert int(travels.replace(",", "")) < 0.1 * int(whole.replace(",", ""))
    before, after = (
        float(re.search(rf"^{name}: accuracy ([\d.]+)%", output, re.MULTILINE)[1])
        for name in ("base", "tuned")
    )
    assert before < 65
    assert after > 75
    assert len(re.findall(r"^epoch \d ", output, re.MULTILINE)) == 2


def needs(group):
    """Skips, with the reason, where a group's packages are not installed."""
    if reason := reason_to_skip(group):
        pytest.skip(reason)


theirs = pytest.mark.filterwarnings("ignore")  # warnings of libraries of others


@theirs
def test_finetune_learns_and_saves_a_model_that_transformers_loads(output_of, tmp_path):
    needs("Transformers")
    from transformers import AutoModelForCausalLM

    output = output_of("finetune.py", "--epochs", 2, "--out", tmp_path)
    first, last = (float(loss) for loss in re.findall(r"^epoch \d  loss ([\d.]+)", output, re.M))
    assert last < first
    assert "the quick" in output.splitlines()[-1]
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.n_layer == 2


@theirs
def test_timm_digits_learns(output_of):
    needs("timm")
    output = output_of("timm_digits.py", "--epochs", 3)
    assert accuracy_in(output) >= 0.3  # of the average of three epochs; 0.1 by chance
    assert len(re.findall(r"^epoch \d ", output, re.MULTILINE)) == 3


@theirs
def test_lora_of_peft_learns_and_saves_its_adapters(output_of, tmp_path):
    needs("Transformers")
    output = output_of("lora_peft.py", "--steps", 60, "--out", tmp_path)
    assert float(re.search(r"bytes, ([\d.]+)%$", output, re.MULTILINE)[1]) < 10
    assert accuracy_in(output) >= 0.7
    assert (tmp_path / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_has_under_100_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 100


def write_mnist(directory, prefix, count, pack=True):
    """Write images whose label is the position of their one bright stripe."""
    labels = np.random.default_rng(0).integers(10, size=count, dtype=np.uint8)
    images = np.zeros((count, 28, 28), np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 * label + 2 : 2 * label + 6] = 255
    for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        content = header + array.tobytes()
        path = directory / f"{prefix}-{kind}-ubyte{'.gz' if pack else ''}"
        path.write_bytes(gzip.compress(content) if pack else content)


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_profile_timeline_reports_the_use_of_time(output_of, tmp_path, policy):
    out = tmp_path / "run"
    output = output_of(
        "profile_timeline.py", "--policy", policy, "--epochs", 2, "--samples", 2000, "--out", out
    )
    line = r"^rank (\d) \(cpu\): [\d,]+ samples, [\d,]+ a second, idle [\d.]+%: (.*)$"
    ranks = re.findall(line, output, re.MULTILINE)
    assert [rank for rank, _ in ranks] == ["0", "1"]
    for _, shares in ranks:
        assert sum(float(share) for share in re.findall(r"([\d.]+)%", shares)) > 95
    load_trace(Path(f"{out}.trace.json"))
    assert Path(f"{out}.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_monitor_shows_a_run_and_logs_its_metrics(tmp_path):
    pytest.importorskip("aiohttp")
    files = ("--out", tmp_path / "run.html", "--csv", tmp_path / "run.csv")
    done = run_program("monitor.py", "--epochs", 2, "--samples", 2000, *files)
    assert done.returncode == 0, done.stderr
    assert re.match(r"open http://127\.0\.0\.1:\d+/\nloss [\d.]+, accuracy [\d.]+%\n", done.stdout)
    assert "INFO [rank 1 epoch 1 step " in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "run.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    lines = (tmp_path / "run.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1"]


def test_profile_torch_names_the_parts_of_each_workers_step(tmp_path):
    out = tmp_path / "torch.json"
    done = run_program("profile_torch.py", "--epochs", 1, "--out", out)  # PyTorch 2.11 warns
    assert done.returncode == 0, done.stderr
    output = done.stdout
    ranges = re.findall(r"^(gpu-worker-\d/\w+) +(\d+) times", output, re.MULTILINE)
    parts = ("backward", "forward", "optimizer")
    assert [name for name, _ in ranges] == [f"gpu-worker-{r}/{p}" for r in (0, 1) for p in parts]
    counts = [int(count) for _, count in ranges]
    assert counts[0:3] == [counts[0]] * 3
    assert counts[0] + counts[3] == 64
    names = {event["name"] for event in json.loads(out.read_text())["traceEvents"]}
    assert {name for name, _ in ranges} <= names


def test_ab_policies_compares_every_way(output_of, tmp_path):
    out = tmp_path / "policies.svg"
    few = ("--policies", "sync", "cadence", "--epochs", 1, "--seeds", 0)
    output = output_of("ab_policies.py", *few, "--slow", 1, "--out", out)
    rows = re.findall(r"^\| (sync|cadence|async) +\| (cpu|thread|gloo) +\|", output, re.MULTILINE)
    assert len(set(rows)) == len(rows) == 6
    picture = ElementTree.parse(out).getroot()
    assert len(picture.findall(".//{*}title")) == 6 * 8
