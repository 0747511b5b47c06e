"""Machines in real processes over a real lighthouse: they come late, die and leave."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest

from tests.support import programs
from tests.support.machines import LighthouseProcess, needs_torchft

pytestmark = needs_torchft
SAMPLES = 12003
ACCURACY_MARGIN = 0.02
"""By how much the held-out accuracy of two machines may be below that of one: 7 of 359 images,
some four standard deviations of what another seed changes in one machine's (0.5 %)."""


class MachineProcess:
    """``tests/support/cluster_program.py`` in a process of its own."""

    def __init__(self, address, *args):
        programs.preload("tests.support.clustering")
        self._process = programs.Popen(
            [
                *(sys.executable, "-m", "tests.support.cluster_program", address),
                *("--samples", str(SAMPLES), *map(str, args)),
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=programs.ROOT,
        )

    def started(self):
        assert self._process.stdout.readline() == "started\n"
        return self

    def in_a_round(self):
        assert self._process.stdout.readline() == "a round\n"
        return self

    def signal(self, number):
        self._process.send_signal(number)

    def answer(self):
        out, _ = self._process.communicate(timeout=90)
        assert self._process.returncode == 0
        return json.loads(out.splitlines()[-1])

    def kill(self):
        self._process.kill()
        self._process.communicate(timeout=20)


@pytest.fixture
def lighthouse():
    server = LighthouseProcess(join_timeout_s=3.0)
    yield server
    server.close()


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_one_is_killed_another_comes_late_and_each_sample_counts_once(lighthouse, policy):
    samples = 3 * SAMPLES  # so that they still train when the late one is there
    args = ("--policy", policy, "--machines", 1, "--step-s", 0.02, "--samples", samples)
    a = MachineProcess(lighthouse.address, *args).started()
    b = MachineProcess(lighthouse.address, *args).started()
    b.in_a_round()
    b.kill()
    c = MachineProcess(lighthouse.address, *args)
    first, late = a.answer(), c.answer()
    assert first["digest"] == late["digest"]
    assert first["num_samples"] == late["num_samples"] == [samples]
    assert first["num_effects"] == samples
    assert first["num_twice"] == 0


def test_ctrl_c_on_one_machine_leaves_its_part_to_the_other(lighthouse):
    args = ("--machines", 1, "--step-s", 0.02)
    a, b = (MachineProcess(lighthouse.address, *args).started() for _ in range(2))
    b.in_a_round()
    b.signal(signal.SIGINT)
    assert b.answer()["stopped"]
    answer = a.answer()
    assert not answer["stopped"]
    assert answer["num_samples"] == [SAMPLES]
    assert answer["num_twice"] == 0


def test_the_lighthouse_dies_and_is_started_again(lighthouse):
    args = ("--machines", 2, "--step-s", 0.02)
    a, b = (MachineProcess(lighthouse.address, *args).started() for _ in range(2))
    b.in_a_round()
    port = lighthouse.address.rpartition(":")[2]
    lighthouse.kill()
    again = LighthouseProcess(port=port, join_timeout_s=3.0)
    try:
        answers = [machine.answer() for machine in (a, b)]
    finally:
        again.close()
    assert answers[0]["digest"] == answers[1]["digest"]
    assert answers[0]["num_effects"] == SAMPLES
    assert answers[0]["num_twice"] == 0


class Example:
    """``examples/digits.py`` in a process of its own, with one worker."""

    def __init__(self, *args):
        programs.preload("sklearn.datasets")
        self._process = programs.Popen(
            [
                *(sys.executable, "examples/digits.py", "--workers", "1", "--epochs", "6"),
                *map(str, args),
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=programs.ROOT,
        )

    def result(self):
        """Accuracy on the held-out images, and the part of the samples that it trained."""
        out, _ = self._process.communicate(timeout=90)
        assert self._process.returncode == 0
        accuracy, part = re.search(r"accuracy ([\d.]+)%.*by rank: +(\d+)%", out).groups()
        return float(accuracy) / 100, int(part) / 100


def test_the_readme_s_commands_end_with_the_accuracy_of_one_machine(lighthouse):
    together = ("--cluster", lighthouse.address, "--machines", 2)
    (a, part_a), (b, part_b) = [m.result() for m in [Example(*together), Example(*together)]]
    alone, whole = Example().result()
    assert a == b >= alone - ACCURACY_MARGIN
    assert part_a + part_b == pytest.approx(whole, abs=0.011)  # two roundings
    assert min(part_a, part_b) > 0.1
