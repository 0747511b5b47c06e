"""The warning of a run whose GPUs wait for one interpreter, on fake devices."""

from __future__ import annotations

import sys

import pytest
import torch

from runtime.device import launch_load
from runtime.device.cuda import CudaDevice
from runtime.device.launch_load import SAMPLE_STEPS, SKIPPED_SAMPLES, WINDOW_SAMPLES, LaunchLoad
from runtime.device.timing import CudaTimer
from tests.support.fake_cuda import GPU, TICK_S, FakeCuda
from tests.support.running import builder
from tests.unit.worker.test_cuda_worker import pose

GPUS = [torch.device("cuda", i) for i in range(2)]
STEPS_OF_A_WINDOW = SAMPLE_STEPS * WINDOW_SAMPLES
TWO_WINDOWS = 2 * STEPS_OF_A_WINDOW + SAMPLE_STEPS * SKIPPED_SAMPLES + 8


class Clocks:
    """Wall and CPU time advanced by the test; counts the reads."""

    def __init__(self):
        self.wall_s = self.cpu_s = 0.0
        self.num_reads = 0

    def wall(self):
        self.num_reads += 1
        return self.wall_s

    def cpu(self):
        self.num_reads += 1
        return self.cpu_s

    def move(self, wall_s, cpu_s):
        self.wall_s += wall_s
        self.cpu_s += cpu_s


class Workers:
    """Two workers that step in turn; a step takes one tick on the device."""

    def __init__(self):
        self.clocks = Clocks()
        self.load = LaunchLoad(2, (self.clocks.wall, self.clocks.cpu))
        fakes = [FakeCuda(patience=0) for _ in range(2)]
        self.timers = [CudaTimer(fake, fake.new_stream(GPU), 3, self.load) for fake in fakes]

    def make_steps(self, num_steps, wall_s, cpu_s, paused_s=0.0):
        for _ in range(num_steps):
            for timer in self.timers:
                timer.start()
                self.clocks.move(wall_s / 2, cpu_s / 2)
                if paused_s:
                    timer.pause()
                    self.clocks.move(paused_s, 0.0)
                    timer.resume()
                self.clocks.move(wall_s / 2, cpu_s / 2)
                timer.stop(1)


@pytest.fixture
def workers():
    return Workers()


def warnings_of(caplog):
    return [
        r for r in caplog.records if r.name == launch_load.__name__ and r.levelname == "WARNING"
    ]


def test_a_run_that_waits_for_the_interpreter_is_warned_of_once_with_the_remedy(workers, caplog):
    workers.make_steps(4 * TWO_WINDOWS, wall_s=1.0 * TICK_S, cpu_s=0.6 * TICK_S)
    (record,) = warnings_of(caplog)
    text = record.getMessage()
    assert "2 GPUs wait for one Python process" in text
    assert "40 % of that waiting for the interpreter lock" in text
    for remedy in ("cuda_graphs(True)", "larger batches", "free-threaded", "cluster()"):
        assert remedy in text


@pytest.mark.parametrize(
    ("wall_s", "cpu_s"),
    [
        pytest.param(0.3 * TICK_S, 0.1 * TICK_S, id="the device takes longer"),
        pytest.param(1.0 * TICK_S, 0.95 * TICK_S, id="no thread waits"),
    ],
)
def test_a_run_with_another_bound_is_not_warned_of(workers, caplog, wall_s, cpu_s):
    workers.make_steps(2 * TWO_WINDOWS, wall_s, cpu_s)
    assert warnings_of(caplog) == []


def test_waits_for_peers_within_a_step_are_no_waits_for_the_interpreter(workers, caplog):
    workers.make_steps(2 * TWO_WINDOWS, 0.3 * TICK_S, 0.3 * TICK_S, paused_s=5 * TICK_S)
    assert warnings_of(caplog) == []


def test_one_window_decides_nothing(workers, caplog):
    for _ in range(4):
        workers.make_steps(STEPS_OF_A_WINDOW, 1.0 * TICK_S, 0.5 * TICK_S)
        workers.make_steps(STEPS_OF_A_WINDOW, 0.1 * TICK_S, 0.1 * TICK_S)
    assert warnings_of(caplog) == []


def test_clocks_are_read_in_one_step_of_many_and_not_after_the_warning(workers, caplog):
    workers.make_steps(SAMPLE_STEPS * 10, 0.1 * TICK_S, 0.1 * TICK_S)
    assert workers.clocks.num_reads == 2 * 10 * 4  # two workers, two clocks, two ends
    workers.make_steps(2 * TWO_WINDOWS, 1.0 * TICK_S, 0.5 * TICK_S)
    assert len(warnings_of(caplog)) == 1
    before = workers.clocks.num_reads
    workers.make_steps(SAMPLE_STEPS * 10, 1.0 * TICK_S, 0.5 * TICK_S)
    assert workers.clocks.num_reads == before


def test_one_gpu_and_an_interpreter_without_a_lock_are_not_measured(monkeypatch):
    cpu = torch.device("cpu")
    assert LaunchLoad.of([GPUS[0]]) is None
    assert LaunchLoad.of([GPUS[0], cpu]) is None
    assert LaunchLoad.of([cpu, cpu]) is None
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    assert LaunchLoad.of(GPUS) is not None
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert LaunchLoad.of(GPUS) is None


def test_a_cuda_device_gives_its_timer_the_load_of_the_run(workers):
    fake = FakeCuda(patience=0)
    device = CudaDevice(GPU, api=fake)
    with device.activate():
        timer = device.new_timer(workers.load)
        for _ in range(SAMPLE_STEPS):
            timer.start()
            timer.stop(1)
        fake.run_all()
    assert workers.clocks.num_reads == 4


def test_the_workers_of_a_run_share_one_load(monkeypatch):
    clocks = Clocks()
    load = LaunchLoad(2, (clocks.wall, clocks.cpu))
    monkeypatch.setattr(launch_load, "SAMPLE_STEPS", 1)
    monkeypatch.setattr(LaunchLoad, "of", lambda devices: load)
    pose(monkeypatch)
    builder(dataset=40).run().join()
    assert clocks.num_reads >= 2 * 20  # two clocks in each of 20 steps at least
