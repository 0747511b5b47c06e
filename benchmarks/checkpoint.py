"""What checkpoints cost: the pause of training, and throughput.

Usage: ``python benchmarks/checkpoint.py [--quick] [--repeat 3] [--json FILE]``.
What is measured and how stands in ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.measure import MachineLoad, describe
from runtime import ApplyPolicy, Trainer, TrainerHandle, current_worker

WIDTH, BATCH_SIZE = 1024, 16
PAUSE_WANTED, THROUGHPUT_WANTED = 2.0, 0.97
EPOCH_S = 60.0
JOIN_S = 1200.0
SAVES, STEPS_BETWEEN = 4, 12
SYSTEMS = {
    "1 worker": (1, ApplyPolicy.CADENCE),
    "2 workers, SYNC": (2, ApplyPolicy.SYNC),
    "2 workers, CADENCE": (2, ApplyPolicy.CADENCE),
}
MB = 10**6


def make_model(num_bytes: int) -> nn.Module:
    """Linear layers whose parameters and momenta together have about this size."""
    depth = max(1, round(num_bytes / 2 / (4 * WIDTH * (WIDTH + 1))))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))


def state_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and of one momentum for each."""
    return 2 * sum(p.nbytes for p in model.parameters())


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The time between two calls of ``train_fn`` of a rank, and what happened in it.

    Attributes:
        rank: The rank.
        start: When the earlier call returned.
        wall_s: How long it was.
        cpu_s: What the rank's thread computed in it.
        num_faults: Page faults of that thread.
    """

    rank: int
    start: float
    wall_s: float
    cpu_s: float
    num_faults: int

    def overlaps(self, window: tuple[float, float]) -> bool:
        """Whether it has a moment in common with a period."""
        return self.start < window[1] and self.start + self.wall_s > window[0]


class Clock:
    """A ``train_fn`` that notes the gaps between its calls, for each rank."""

    def __init__(self) -> None:
        self.gaps: list[Gap] = []
        self.num_steps = 0
        self._last: dict[int, tuple[float, float, int]] = {}

    def __call__(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        rank = current_worker().rank
        if rank in self._last:
            start, cpu, faults = self._last[rank]
            now, cpu_now, faults_now = _usage()
            self.gaps.append(
                Gap(
                    rank=rank,
                    start=start,
                    wall_s=now - start,
                    cpu_s=cpu_now - cpu,
                    num_faults=faults_now - faults,
                )
            )
        self.num_steps += 1
        loss: Tensor = model(batch[0]).square().mean()
        self._last[rank] = _usage()
        return loss


def _usage() -> tuple[float, float, int]:
    return time.perf_counter(), time.thread_time(), _num_faults()


def _num_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def start(
    system: str, num_bytes: int, num_batches: int, num_epochs: int, directory: Path | None
) -> tuple[Clock, TrainerHandle]:
    """Start a run; ``directory`` gets a checkpoint every epoch."""
    num_ranks, policy = SYSTEMS[system]
    clock = Clock()

    def build(device: torch.device) -> nn.Module:
        torch.set_num_threads(1)
        return make_model(num_bytes).to(device)

    builder = (
        Trainer.builder(build, lambda p: torch.optim.SGD(p, 1e-4, momentum=0.9, fused=True), clock)
        .dataset((torch.randn(WIDTH).expand(num_batches * BATCH_SIZE, WIDTH),))
        .batch_size(BATCH_SIZE)
        .num_epochs(num_epochs)
        .devices(["cpu"] * num_ranks)
        .policy(policy)
        .progress(False)
    )
    if directory is not None:
        builder.checkpoint_dir(directory, keep=1)
    return clock, builder.run()


def epoch_times(
    system: str, num_bytes: int, num_batches: int, num_epochs: int, directory: Path | None
) -> list[float]:
    """Seconds of each epoch but the first, from close to close."""
    handle = start(system, num_bytes, num_batches, num_epochs, directory)[1]
    closes = []
    while handle.next_metrics(JOIN_S) is not None:
        closes.append(time.perf_counter())
    errors = handle.join(JOIN_S).checkpoint_errors
    assert not errors, errors
    return [later - earlier for earlier, later in pairwise(closes)]


# -- the pause ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Copy:
    """What copying a state takes, in as many threads at once as there are ranks.

    Attributes:
        wall_s: Time of a thread.
        cpu_s: What it computed.
        num_faults: Its page faults.
    """

    wall_s: float
    cpu_s: float
    num_faults: int


def copies(num_bytes: int, num_ranks: int) -> tuple[Copy, Copy]:
    """Copy the tensors of a state one by one, into fresh and then into the same memory."""
    states = [
        [torch.ones_like(p) for _ in range(2) for p in make_model(num_bytes).parameters()]
        for _ in range(num_ranks)
    ]
    found: list[list[Copy]] = []
    barrier = threading.Barrier(num_ranks)

    def work(state: list[Tensor]) -> None:
        torch.set_num_threads(1)
        targets: list[Tensor] = []
        both = []
        for _ in range(2):
            barrier.wait()
            start, cpu, faults = _usage()
            targets = targets or [torch.empty_like(t) for t in state]
            for t, target in zip(state, targets, strict=True):
                target.copy_(t)
            now, cpu_now, faults_now = _usage()
            both.append(
                Copy(wall_s=now - start, cpu_s=cpu_now - cpu, num_faults=faults_now - faults)
            )
        found.append(both)

    threads = [threading.Thread(target=work, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fresh, warm = (max(times, key=lambda c: c.wall_s) for times in zip(*found, strict=True))
    return fresh, warm


@dataclass(frozen=True, kw_only=True)
class Pause:
    """The pause of one rank for one checkpoint, against the copy in the same condition.

    Attributes:
        wall_s: The longest gap while the state is taken, less what gaps are otherwise.
        cpu_s: Likewise, what the thread computed.
        fresh: Share of the page faults of a copy into fresh memory that were in it.
        copy_wall_s: Time of a copy, by that share between fresh and warm memory.
        copy_cpu_s: Likewise.
    """

    wall_s: float
    cpu_s: float
    fresh: float
    copy_wall_s: float
    copy_cpu_s: float


def pauses(system: str, num_bytes: int, repeat: int) -> list[Pause]:
    """Save now and then in a run, one after the other, beside a measurement of the copy."""
    found: list[Pause] = []
    for _ in range(repeat):
        fresh, warm = copies(num_bytes, SYSTEMS[system][0])
        clock, handle = start(system, num_bytes, 10**6, 1, None)
        windows = []
        with tempfile.TemporaryDirectory() as place:
            for index in range(SAVES):
                _await_steps(clock, clock.num_steps + STEPS_BETWEEN)
                began = time.perf_counter()
                handle.save(Path(place) / str(index))
                windows.append((began, time.perf_counter()))
            _await_steps(clock, clock.num_steps + STEPS_BETWEEN)
            handle.stop()
            handle.join(JOIN_S)
        found += _judge(clock.gaps, windows, fresh, warm)
    return found


def _await_steps(clock: Clock, num_steps: int) -> None:
    while clock.num_steps < num_steps:
        time.sleep(0.005)


def _judge(
    gaps: list[Gap], windows: list[tuple[float, float]], fresh: Copy, warm: Copy
) -> Iterator[Pause]:
    outside = [g for g in gaps if not any(g.overlaps(window) for window in windows)]
    usual_wall_s = statistics.median(g.wall_s for g in outside)
    usual_cpu_s = statistics.median(g.cpu_s for g in outside)
    usual_faults = statistics.median(g.num_faults for g in outside)
    for window in windows:
        for rank in sorted({g.rank for g in gaps}):
            inside = [g for g in gaps if g.rank == rank and g.overlaps(window)]
            # The state is taken in the gap of most work; any may wait for the others.
            gap = max(inside, key=lambda g: g.cpu_s)
            share = (gap.num_faults - usual_faults) / max(1, fresh.num_faults)
            share = min(1.0, max(0.0, share))
            yield Pause(
                wall_s=gap.wall_s - usual_wall_s,
                cpu_s=gap.cpu_s - usual_cpu_s,
                fresh=share,
                copy_wall_s=share * fresh.wall_s + (1 - share) * warm.wall_s,
                copy_cpu_s=share * fresh.cpu_s + (1 - share) * warm.cpu_s,
            )


# -- throughput --------------------------------------------------------------------------


def throughput(system: str, num_bytes: int, epoch_s: float, repeat: int) -> dict[str, Any]:
    """Time of an epoch with a checkpoint in each and with none, in turn."""
    probe_s = epoch_times(system, num_bytes, 24, 2, None)[0]
    num_batches = max(12, round(24 * epoch_s / probe_s))
    times: dict[str, list[float]] = {"none": [], "every epoch": []}
    for index in range(repeat):
        for name in list(times) if index % 2 == 0 else reversed(times):
            with tempfile.TemporaryDirectory() as place:
                directory = None if name == "none" else Path(place)
                found_s = epoch_times(system, num_bytes, num_batches, 4, directory)
            times[name].append(statistics.mean(found_s))
    pairs = list(zip(times["none"], times["every epoch"], strict=True))
    return {
        "times_s": times,
        "ratio": statistics.median(none / saving for none, saving in pairs),
        "cost_s": statistics.median(saving - none for none, saving in pairs),
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--mb", type=int, help="size of a rank's state (400)")
    parser.add_argument("--repeat", type=int, help="repetitions (3)")
    parser.add_argument("--seconds", type=float, help=f"length of an epoch ({EPOCH_S:g})")
    parser.add_argument("--quick", action="store_true", help="a small state and short epochs")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args()
    quick = args.quick
    args.mb = args.mb or (40 if quick else 400)
    args.repeat = args.repeat or (1 if quick else 3)
    args.seconds = args.seconds or (1.0 if quick else EPOCH_S)
    return args


def report_pauses(found: list[Pause]) -> Iterator[str]:
    """The pauses in fresh and in warm memory."""
    for name, chosen in (
        ("fresh memory", [p for p in found if p.fresh >= 0.5]),
        ("warm memory", [p for p in found if p.fresh < 0.5]),
    ):
        if not chosen:
            continue
        ratio = statistics.median(p.wall_s / p.copy_wall_s for p in chosen)
        cpu = statistics.median(p.cpu_s / p.copy_cpu_s for p in chosen)
        yield (
            f"  {name}: {len(chosen)} pauses, median "
            f"{statistics.median(p.wall_s for p in chosen) * 1e3:.0f} ms; a copy "
            f"{statistics.median(p.copy_wall_s for p in chosen) * 1e3:.0f} ms; ratio {ratio:.2f} "
            f"(of CPU time {cpu:.2f}), wanted at most {PAUSE_WANTED:g}: "
            f"{'met' if ratio <= PAUSE_WANTED else 'MISSED'}"
        )


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": describe(), "mb": args.mb, "systems": {}}
    size = state_bytes(make_model(args.mb * MB))
    print(f"state of {size / MB:.0f} MB a rank, epochs of {args.seconds:g} s\n")
    for system in args.systems:
        load = MachineLoad()
        found = pauses(system, args.mb * MB, args.repeat)
        cost = throughput(system, args.mb * MB, args.seconds, args.repeat)
        at_a_minute = EPOCH_S / (EPOCH_S + max(0.0, cost["cost_s"]))
        met = "met" if at_a_minute >= THROUGHPUT_WANTED else "MISSED"
        print(f"## {system}")
        print("\n".join(report_pauses(found)))
        print(
            f"  throughput with a checkpoint every epoch / with none: {cost['ratio']:.3f}; a "
            f"checkpoint costs {cost['cost_s']:.2f} s, so {at_a_minute:.3f} with epochs of a "
            f"minute, wanted at least {THROUGHPUT_WANTED}: {met}"
        )
        print(f"  others used {load.others():.0%} of the cores\n", flush=True)
        results["systems"][system] = {
            "pauses": [asdict(p) for p in found],
            "throughput": cost,
            "used_by_others": load.others(),
        }
        if args.json:
            args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
