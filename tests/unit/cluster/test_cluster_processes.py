"""Machines as processes over a real lighthouse: they join late, die, stall and leave."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from runtime.checkpoint.store import entries
from runtime.cluster.membership import read_cluster_status
from tests.storm import Storm, violations
from tests.support import programs
from tests.support.machines import (
    ANSWER_S,
    LighthouseProcess,
    TrainingMachine,
    needs_torchft,
)
from tests.support.namespaces import SUBNET, Namespaces
from tests.support.pairs import SCALE

pytestmark = [needs_torchft, pytest.mark.slow]
long = pytest.mark.skipif(SCALE == 1, reason="TEST_SCALE=2 or more: takes many seconds")
SAMPLES = 12003
FEWER = SAMPLES if SCALE > 1 else SAMPLES // 4
ACCURACY_MARGIN = 0.05
"""Largest deficit of the held-out accuracy of two machines against one, 18 of 359 images: the fewer
rounds a loaded computer makes, the larger it is (2.8 % was seen); untrained is 90 %."""


@pytest.fixture
def start():
    """Starts machines that end with the test, and a lighthouse before the first one."""
    processes = []

    def light(**kwargs):
        processes.append(LighthouseProcess(join_timeout_s=3.0, **kwargs))
        return processes[-1]

    def machine(*args, samples=SAMPLES, namespace=None):
        address = (processes or [light()])[0].address
        args = ("--samples", samples, *args)
        processes.append(TrainingMachine(address, *args, namespace=namespace))
        return processes[-1]

    machine.light, machine.processes = light, processes
    yield machine
    for process in processes:
        process.close()


def check_once(*answers):
    """Check that each batch counts once and that all parameters are equal."""
    wrong = [(answer["num_missing"], answer["num_twice"]) for answer in answers]
    assert wrong == [(0, 0)] * len(answers)
    assert len({answer["digest"] for answer in answers}) == 1


@pytest.mark.parametrize("policy", ["sync", "cadence"] if SCALE > 1 else ["sync"])
def test_each_sample_counts_once_when_one_machine_is_killed_and_another_joins_late(start, policy):
    # So that they still train when the late one joins.
    samples, sleep_s = (3 * SAMPLES, 0.0) if SCALE > 1 else (SAMPLES // 2, 0.02)
    args = ("--policy", policy, "--machines", 1, "--step-s", 0.02, "--sleep-s", sleep_s)
    a, b = (start(*args, samples=samples) for _ in "ab")
    b.in_a_round().kill()
    c = start(*args, samples=samples)
    first, late = a.join(), c.join()
    check_once(first, late)
    assert first["num_samples"] == late["num_samples"] == [samples]


def test_ctrl_c_on_one_machine_leaves_its_batches_to_the_other(start):
    a, b = (start("--machines", 1, "--sleep-s", 0.01, samples=FEWER) for _ in "ab")
    b.in_a_round().signal(signal.SIGINT)
    assert b.join()["stopped"]
    answer = a.join()
    assert not answer["stopped"]
    assert answer["num_samples"] == [FEWER]
    check_once(answer)


def test_training_continues_when_the_lighthouse_is_restarted(start):
    a, b = (start("--machines", 2, "--sleep-s", 0.01, samples=FEWER) for _ in "ab")
    b.in_a_round()
    lighthouse = start.processes[0]
    lighthouse.kill()
    start.light(port=lighthouse.port)
    answers = [machine.join() for machine in (a, b)]
    check_once(*answers)


def test_the_lighthouse_has_the_progress_of_each_machine_until_it_dies(start, tmp_path):
    args = ("--token", "secret", "--machines", 1, "--sleep-s", 0.005, "--epochs", 100_000)
    machines = [start(*args, "--directory", tmp_path), start(*args)]
    address = start.processes[0].address

    def runs(ready):
        """The record of each process once ``ready(records)`` is true."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            for machine in machines:
                machine.poll(0.05)
            found = read_cluster_status(address, "secret").machines
            records = {each.run["pid"]: each.run for each in found if each.run}
            if ready(records):
                return records
            assert time.monotonic() < deadline, records

    pids = [machine.pid for machine in machines]
    records = runs(
        lambda found: (
            set(found) == set(pids)
            and found[pids[0]]["last_checkpoint"] is not None
            and all(run["samples_per_s"] and run["loss"] is not None for run in found.values())
        )
    )
    for record in records.values():
        assert record["name"] == "cluster_program.py"
        assert (record["num_epochs"], record["epoch"] >= 0) == (100_000, True)
    assert records[pids[0]]["last_checkpoint"].startswith(str(tmp_path))
    assert records[pids[1]]["checkpoint_dir"] is None
    with urllib.request.urlopen(f"http://{address}/status", timeout=5.0) as page:
        text = page.read().decode()
    assert all(f"<td>{pid}</td>" in text for pid in pids)
    machines.pop().kill()
    runs(lambda found: set(found) == {pids[0]})
    machines[0].signal(signal.SIGUSR1)
    assert machines[0].join()["stopped"]


def test_a_suspended_machine_is_healed_and_ends_with_the_others(start):
    # The run lasts until the test ends it, so that the machine always finds others.
    args = ("--machines", 2, "--timeout", 1.0, "--sleep-s", 0.005, "--epochs", 100_000)
    a, b, c = machines = [start(*args, samples=403) for _ in "abc"]
    c.in_a_round().signal(signal.SIGSTOP)
    for _ in range(3):
        a.in_a_round()  # without the suspended one
    c.signal(signal.SIGCONT)
    c.in_a_round()
    b.signal(signal.SIGUSR1)
    answers = [machine.join() for machine in machines]
    check_once(*answers)
    assert all(answer["stopped"] for answer in answers)


@long
def test_machines_with_wrong_clocks_train_each_sample_once(start):
    years_s = 3e8
    machines = [start("--machines", 3, "--clock-s", off) for off in (0.0, years_s, -years_s)]
    answers = [machine.join() for machine in machines]
    check_once(*answers)
    assert answers[0]["machines"] == 3


def test_fewer_machines_resume_from_the_checkpoint_after_all_are_killed(start, tmp_path):
    args = ("--machines", 2, "--sleep-s", 0.01, "--directory", tmp_path)
    machines = [start(*args, samples=FEWER) for _ in "abc"]
    machines[0].until(lambda _: any(entry.step for entry in entries(tmp_path)))
    for machine in machines:
        machine.kill()
    answers = [machine.join() for machine in [start(*args, samples=FEWER) for _ in "de"]]
    check_once(*answers)
    assert answers[0]["machines"] > 2  # part was trained by machines that are gone
    assert answers[0]["num_samples"] == [FEWER]


def rounds_until(end, machines):
    """Number of rounds of each machine at this time."""
    while (left_s := end - time.monotonic()) > 0:
        for machine in machines.values():
            machine.poll(min(left_s, 0.05))
    return {number: machine.poll().num_rounds for number, machine in machines.items()}


@pytest.fixture
def network():
    try:
        found = Namespaces()
    except OSError as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    yield found
    found.close()


# Addresses in the network: the lighthouse is 1; the first machine has the store.
@long
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_a_broken_link_creates_no_second_history(start, network, cut):
    down_s = 10.0
    start.light(host=f"{SUBNET}.1", namespace=network.join(1))
    args = ("--machines", 2, "--timeout", 1.0, "--sleep-s", 0.01, "--epochs", 100_000)
    machines = {
        number: start(*args, samples=803, namespace=network.join(number)) for number in (2, 3, 4)
    }
    began = time.monotonic()
    for machine in machines.values():
        machine.in_a_round()
    start_s = time.monotonic() - began
    network.cut(cut)
    cut_at = time.monotonic()
    before = rounds_until(cut_at + 0.5, machines)  # includes a round in progress
    after = rounds_until(cut_at + down_s, machines)
    network.mend(cut)
    back = time.monotonic()
    for number, machine in machines.items():
        grew = after[number] > before[number]
        assert grew == (cut not in (1, number)), (number, before, after)
        machine.in_a_round()
    took_s = time.monotonic() - back
    print(f"{cut} was cut off for {back - cut_at:.1f} s; all in a round {took_s:.2f} s later")
    assert took_s < 5.0 + start_s
    machines[2].signal(signal.SIGUSR1)
    answers = [machine.join() for machine in machines.values()]
    check_once(*answers)


def test_a_short_storm_of_faults_ends_with_equal_parameters():
    storm = Storm(3, min_machines=1)
    try:
        assert not violations(storm.run(3))
    finally:
        storm.close()
    assert storm.counts.total() == 3


MEMORIZED = """
import sys
import torch
sys.path.insert(0, "examples")
import digits

def load_data():
    samples = torch.arange(6000), torch.arange(6000) % 9 + 1
    return samples, samples

def build_model():
    return torch.nn.Embedding.from_pretrained(torch.zeros(6000, 10), freeze=False)

digits.load_data, digits.build_model = load_data, build_model
digits.stoppable(digits.main)
"""
"""The example on samples that must each be memorized. A model that was not trained on one
takes it for a 0, which none is, so that the accuracy is the part of the samples in the model."""


class Example:
    """``examples/digits.py`` in a separate process, with one worker."""

    def __init__(self, *args, script=("examples/digits.py",), epochs=6):
        programs.preload("sklearn.datasets")
        self._process = programs.Popen(
            [sys.executable, *script, "--workers", "1", "--epochs", str(epochs), *map(str, args)],
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


@long
def test_the_readme_commands_reach_the_accuracy_of_one_machine():
    lighthouse = LighthouseProcess(join_timeout_s=3.0)
    try:
        together = ("--cluster", lighthouse.address, "--machines", 2)
        (a, part_a), (b, part_b) = [m.result() for m in [Example(*together), Example(*together)]]
    finally:
        lighthouse.close()
    alone, whole = Example().result()
    assert a == b >= alone - ACCURACY_MARGIN
    assert part_a + part_b == pytest.approx(whole, abs=0.011)  # two roundings
    assert min(part_a, part_b) > 0.1


def test_the_readme_commands_train_one_model_on_the_samples_of_both_machines():
    lighthouse = LighthouseProcess(join_timeout_s=3.0)
    try:
        args = ("--cluster", lighthouse.address, "--machines", 2)
        machines = [Example(*args, script=("-c", MEMORIZED), epochs=1) for _ in "ab"]
        (a, part_a), (b, part_b) = [machine.result() for machine in machines]
    finally:
        lighthouse.close()
    assert a == b == 1.0
    assert min(part_a, part_b) > 0.1
