"""Benchmarks of overhead run, and measure work that is added to a step."""

import time
from dataclasses import replace

import pytest
import torch

from benchmarks import overhead
from coordinator import ApplyPolicy
from tests.support.pairs import SCALE

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_restart(monkeypatch):
    monkeypatch.setattr(overhead, "begin", lambda: torch.set_num_threads(1) or {})


def test_every_part_has_a_cost(capsys):
    overhead.main(["parts", "--count", "300" if SCALE > 1 else "100", "--readings", "1"])
    printed = capsys.readouterr().out
    costs = [line.split("|")[2].split() for line in printed.splitlines() if line.endswith("s |")]
    assert [unit for _, unit in costs] == ["ns", "ns", "ns", "us", "us"]
    assert all(float(cost) > 0 for cost, _ in costs[3:])  # the others are small differences


@pytest.mark.parametrize("section", ["timeline", "metrics"])
def test_runs_with_and_without_a_feature_are_compared(section, capsys):
    overhead.main([section, "--ways", "one", "--pairs", "1", "--seconds", "0.3"])
    assert "| one | " in capsys.readouterr().out


def test_the_time_of_recording_in_a_step_is_measured(monkeypatch):
    plain = overhead.train

    def slowed(job):
        loss = job.workload.loss

        def burning(model, batch):
            end = time.thread_time() + 0.001
            while time.thread_time() < end:
                pass
            return loss(model, batch)

        return plain(replace(job, workload=replace(job.workload, loss=burning)))

    monkeypatch.setattr(overhead, "train", lambda job: slowed(job) if job.recorded else plain(job))
    step_ns, _ = overhead.added_ns(ApplyPolicy.CADENCE, 1, 300 if SCALE > 1 else 150)
    assert 0.9e6 < step_ns < 2e6
