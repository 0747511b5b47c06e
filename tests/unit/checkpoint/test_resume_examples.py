"""An example interrupted by Ctrl-C and continued with ``--resume`` equals an uninterrupted one."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import programs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 200
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


@pytest.fixture(autouse=True, scope="module")
def _data_sets_are_imported_once():
    programs.preload("sklearn.datasets")


def command(*arguments, record=None):
    program = [str(ROOT / "examples" / "digits.py")]
    if record is not None:
        program = [str(ROOT / "tests/support/recorded_example.py"), str(record), *program]
    return [sys.executable, *program, "--epochs", "4", "--batch-size", "64", *map(str, arguments)]


def run(*arguments, record=None):
    done = programs.run(
        command(*arguments, record=record),
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def interrupt(*arguments, after, record=None):
    """Run an example, send Ctrl-C once it has printed an epoch, and return its output."""
    process = programs.Popen(
        command(*arguments, record=record),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
        env=ENVIRONMENT,
    )
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith(f"epoch {after:2}"):
                process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130, "".join(lines)
    finally:
        process.kill()
        process.stdout.close()
        process.wait(TIMEOUT_S)
    return "".join(lines)


def epochs_in(output):
    """Epoch, loss and accuracy of each line."""
    return re.findall(r"^epoch +(\d+)  loss ([\d.]+)  accuracy +([\d.]+)%", output, re.MULTILINE)


def steps_in(record):
    """The recorded steps, by step and rank."""
    steps = map(json.loads, record.read_text().splitlines())
    return {(step["step"], step["rank"]): step for step in steps}


def first_difference(parts, whole):
    """The first step that differs between ``parts`` and ``whole``, with the difference."""
    for at in sorted(parts):
        one, other = parts[at], whole.get(at, {})
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        if names:
            found = [f"  {name}: {one.get(name)}, straight {other.get(name)}" for name in names]
            return "\n".join([f"step {at[0]} of rank {at[1]}:", *found])
    return "none, each of its steps has the same bits"


def account(outputs, records, stopped, saving):
    """Describe which of three runs differs, and where.

    Args:
        outputs: Output of each run, by name: interrupted, resumed, straight.
        records: The files with their steps, in the same order.
        stopped: A copy of the checkpoints as they were when the first had stopped.
        saving: The arguments that the first and the second were given before a directory.
    """
    interrupted, rest, straight = (steps_in(record) for record in records)
    lines = []
    for (name, output), made in zip(outputs.items(), (interrupted, rest, straight), strict=True):
        lines += [f"-- {name}: (step, rank) from {sorted(made)[:1]}, {len(made)} of them"]
        lines += [output.strip()]
        lines += [f"first difference to straight: {first_difference(made, straight)}"]
    lines += [f"-- trained twice: {sorted(interrupted.keys() & rest.keys())}"]
    lines += [f"-- checkpoints when it had stopped: {sorted(p.name for p in stopped.iterdir())}"]
    print("\n".join(lines))  # before later checks time out
    policy, directory = saving[:-1], saving[-1]
    copy = shutil.copytree(stopped, stopped.with_name("copy"))
    lines += ["-- resumed once more", run(*policy, directory, copy, "--resume").strip()]
    lines += ["-- straight once more", run(*policy).strip()]
    return "\n".join(lines)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_an_interrupted_example_resumes_where_it_stopped(policy, tmp_path):
    directory, stopped = tmp_path / "checkpoints", tmp_path / "stopped"
    records = [tmp_path / name for name in ("interrupted", "resumed", "straight")]
    chosen = ("--policy", policy, "--checkpoint-dir")
    output = interrupt(*chosen, directory, after=0, record=records[0])
    assert "continues with --resume" in output
    assert len(epochs_in(output)) < 4, "it was over before the signal came"
    shutil.copytree(directory, stopped)
    rest = run(*chosen, directory, "--resume", record=records[1])
    parts = [*epochs_in(output), *epochs_in(rest)]
    assert [int(epoch) for epoch, _, _ in parts] == [0, 1, 2, 3]
    if policy == "sync":
        straight = run("--policy", policy, record=records[2])
        end = r"averagings; samples by rank"
        assert re.search(rf"\d+ {end}", rest)[0] == re.search(rf"\d+ {end}", straight)[0]
        made, whole = steps_in(records[0]) | steps_in(records[1]), steps_in(records[2])
        if (parts, made) != (epochs_in(straight), whole):
            outputs = {"interrupted": output, "resumed": rest, "straight": straight}
            pytest.fail(account(outputs, records, stopped, chosen))


def test_resume_without_a_directory_is_refused():
    done = programs.run(command("--resume"), timeout=TIMEOUT_S, env=ENVIRONMENT)
    assert done.returncode == 2
    assert "--resume needs --checkpoint-dir" in done.stderr
