"""What a timeline's parts cost on their own, in one thread: a step, a message, a reading."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from coordinator import messages as m
from coordinator.config import CoordinatorConfig
from coordinator.machine import Coordinator
from runtime.step import TrainFn
from runtime.timeline.causes import AVERAGING, COMPUTE, SYNC
from runtime.timeline.coordinator_lane import CoordinatorLane
from runtime.timeline.lane import Lane
from runtime.timeline.recorded_worker import RecordedWorker
from runtime.timeline.resources import Load
from runtime.worker import GpuWorker
from runtime.worker_types import UserFunctions, WorkerConfig

TARGET_NS = 10_000
"""A hundredth of a step of a millisecond."""
ROUNDS = 7
LOADED = SimpleNamespace(data=(torch.zeros(1),))


def make_lane() -> Lane:
    return Lane(0, time.monotonic(), max_events=20_000, min_gap_s=0.001, step_interval_s=0.02)


def make_functions() -> UserFunctions:
    return UserFunctions(
        model_factory=lambda device: nn.Linear(1, 1),
        optim_factory=lambda params: torch.optim.SGD(params, 0.1),
        train_fn=lambda model, batch: model(batch[0]).sum(),
    )


def nanoseconds(call: Callable[[], object], count: int) -> float:
    """CPU time of one call, the least disturbed of some rounds."""
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time_ns()
        for _ in range(count):
            call()
        times.append((time.thread_time_ns() - start) / count)
    return min(times)


def step_ns(count: int) -> float:
    """A step with nothing in it, recorded, less the same of the plain worker."""
    costs = {}
    loader: Any = SimpleNamespace(try_next=lambda: LOADED, close=lambda: True, reads_inline=False)
    nothing: dict[str, Any] = {"_train_window": lambda self, sizes, first, train_fn: None}
    makers: dict[str, Callable[..., GpuWorker]] = {
        "plain": GpuWorker,
        "recorded": partial(RecordedWorker, make_lane()),
    }
    for name, make in makers.items():
        endpoints, _ = GpuWorker.channels()
        worker = make(WorkerConfig(), make_functions(), endpoints)
        worker._loader = loader
        train_fn = make_functions().train_fn

        def step(worker: GpuWorker = worker, train_fn: TrainFn = train_fn) -> None:
            worker._run_window((16,), None, train_fn)

        with patch.multiple(GpuWorker, **nothing):
            costs[name] = nanoseconds(step, count)
        worker.close()
    return costs["recorded"] - costs["plain"]


def meeting_ns(count: int) -> float:
    """What a collective notes: the wait for the others, the exchange, and back."""
    lane = make_lane()

    def meet() -> None:
        lane.enter(SYNC)
        lane.enter(AVERAGING)
        lane.enter(COMPUTE)

    return nanoseconds(meet, count)


def message_ns(count: int) -> float:
    """What the coordinator's thread spends on a report of two ranks' runs."""
    config = CoordinatorConfig(devices=("cpu", "cpu"), num_samples=64, batch_size=2, num_epochs=1)
    lane = CoordinatorLane(Coordinator(config), time.monotonic(), 20_000)
    report = m.BatchReport(rank=0, epoch=0, tally=m.Tally(num_batches=1, num_samples=2))
    return nanoseconds(lambda: lane.observe(report, [], time.monotonic()), count)


def reading_us(count: int) -> list[float]:
    """CPU time of readings as they come, a tenth of a second apart."""
    load = Load()
    times = []
    for _ in range(count):
        time.sleep(0.1)
        start = time.thread_time_ns()
        load.read(time.monotonic())
        times.append((time.thread_time_ns() - start) / 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="calls in a round")
    parser.add_argument("--readings", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    step, meeting = step_ns(args.count), meeting_ns(args.count)
    message = message_ns(args.count)
    readings = reading_us(args.readings)
    print("| part | cost |")
    print("| --- | --- |")
    print(f"| a step | {step:.0f} ns |")
    print(f"| a collective in it | {meeting:.0f} ns |")
    print(f"| a message to the coordinator | {message:.0f} ns |")
    print(f"| a reading of the machine, median | {statistics.median(readings):.0f} us |")
    print(f"| ... and the longest | {max(readings):.0f} us |")
    verdict = "met" if step + meeting <= TARGET_NS else "missed"
    print(f"\nat most {TARGET_NS} ns for a step with its collective: {verdict}")


if __name__ == "__main__":
    main()
