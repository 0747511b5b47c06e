"""Checkpoints: their cost in a run, and the state of a run that is killed repeatedly.

Usage: ``python benchmarks/checkpoint.py cost [--quick] [--repeat 3] [--json FILE]`` and
``python benchmarks/checkpoint.py kills [--count 100] [--policy sync] [--seed 0] [--json FILE]``.
``benchmarks/README.md`` describes the measurements and checks.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import logging
import os
import random
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness.measure import Check, MachineLoad, describe, parser_of_sections, save
from runtime import ApplyPolicy, CheckpointError, Trainer, TrainerHandle, current_worker
from runtime.checkpoint import store
from runtime.checkpoint.store import LoadedCheckpoint, load_newest
from runtime.checkpoint.tensor_file import load_file

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
    """The time between two calls of ``train_fn`` of a rank.

    Attributes:
        rank: The rank.
        start: Time of the earlier call's return.
        wall_s: Its duration.
        cpu_s: CPU time of the rank's thread in it.
        num_faults: Page faults of that thread.
    """

    rank: int
    start: float
    wall_s: float
    cpu_s: float
    num_faults: int

    def overlaps(self, window: tuple[float, float]) -> bool:
        """True if it overlaps a period."""
        return self.start < window[1] and self.start + self.wall_s > window[0]


class Clock:
    """A ``train_fn`` that records the gaps between its calls, for each rank."""

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
    """Cost of copying a state in one thread per rank at once.

    Attributes:
        wall_s: Time of a thread.
        cpu_s: Its CPU time.
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
        wall_s: The longest gap while the state is captured, less the usual gap.
        cpu_s: The same of the thread's CPU time.
        fresh: Its page faults as a share of those of a copy into fresh memory.
        copy_wall_s: Time of a copy, by that share between fresh and warm memory.
        copy_cpu_s: Likewise.
    """

    wall_s: float
    cpu_s: float
    fresh: float
    copy_wall_s: float
    copy_cpu_s: float


def pauses(system: str, num_bytes: int, repeat: int) -> list[Pause]:
    """Save sequentially at intervals in a run, beside a measurement of the copy."""
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
            # The state is captured in the gap with most work.
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


# -- reading back ------------------------------------------------------------------------


def reading_back(num_bytes: int, repeat: int) -> dict[str, Any]:
    """Writing and reading back the checkpoint of a run, in turn, and the memory that reading takes
    at its peak.
    """
    with tempfile.TemporaryDirectory() as place:
        start("1 worker", num_bytes, 1, 1, Path(place))[1].join(JOIN_S)
        loaded = store.load_newest(place)
    assert loaded is not None
    data = loaded.data
    times: dict[str, list[float]] = {"write": [], "read back": []}
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as place:
            began = time.perf_counter()
            path = store.write_checkpoint(Path(place), data)
            written = time.perf_counter()
            before = peak_bytes(anew=True)
            store.read_back(path)
            times["write"].append(written - began)
            times["read back"].append(time.perf_counter() - written)
            memory = peak_bytes() - before
    return {
        "times_s": times,
        "peak_bytes": memory,
        "largest_tensor_bytes": max(t.nbytes for t in data.weights.values()),
    }


def peak_bytes(*, anew: bool = False) -> int:
    """Peak of the resident memory, since the start or the last call with ``anew``."""
    if anew:
        ctypes.CDLL(None).malloc_trim(0)  # else it is hidden by memory that was used before
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def beside_training(system: str, num_bytes: int, epoch_s: float, repeat: int) -> list[float]:
    """Time of an epoch in which the first checkpoint is written and read back, relative to one in
    which it is only written, in turn.
    """
    probe_s = epoch_times(system, num_bytes, 24, 2, None)[0]
    num_batches = max(12, round(24 * epoch_s / probe_s))
    ratios = []
    for index in range(repeat):
        took: dict[bool, float] = {}
        for reads in (True, False) if index % 2 == 0 else (False, True):
            skipped = nullcontext() if reads else mock.patch.object(store, "read_back")
            with skipped, tempfile.TemporaryDirectory() as place:
                took[reads] = epoch_times(system, num_bytes, num_batches, 2, Path(place))[0]
        ratios.append(took[True] / took[False])
    return ratios


def report_reading(found: dict[str, Any], beside: Sequence[float]) -> Iterator[str]:
    """The cost of reading the first checkpoint back."""
    medians = {name: statistics.median(each) for name, each in found["times_s"].items()}
    yield (
        f"  the first checkpoint: write {medians['write']:.2f} s, read back "
        f"{medians['read back']:.2f} s beside the run; peak "
        f"{found['peak_bytes'] / MB:.1f} MB, the largest tensor "
        f"{found['largest_tensor_bytes'] / MB:.1f} MB; an epoch with it / without "
        f"{statistics.median(beside):.3f} (median of {len(beside)})"
    )


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


def cost(args: argparse.Namespace) -> int:
    """Cost of checkpoints: the pause of training, and throughput."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": describe(), "mb": args.mb, "systems": {}}
    size = state_bytes(make_model(args.mb * MB))
    print(f"state of {size / MB:.0f} MB a rank, epochs of {args.seconds:g} s\n")
    for system in args.systems:
        load = MachineLoad()
        found = pauses(system, args.mb * MB, args.repeat)
        epochs = throughput(system, args.mb * MB, args.seconds, args.repeat)
        reading = reading_back(args.mb * MB, args.repeat)
        beside = beside_training(system, args.mb * MB, args.seconds, args.repeat)
        at_a_minute = EPOCH_S / (EPOCH_S + max(0.0, epochs["cost_s"]))
        what = f"{system}: throughput with a checkpoint in every epoch of a minute / with none"
        check = Check(what=what, measured=at_a_minute, wanted=THROUGHPUT_WANTED)
        print(f"## {system}")
        print("\n".join((*report_pauses(found), *report_reading(reading, beside))))
        print(
            f"  throughput with a checkpoint every epoch / with none: {epochs['ratio']:.3f}; a "
            f"checkpoint costs {epochs['cost_s']:.2f} s\n  {check}"
        )
        print(f"  others used {load.others():.0%} of the cores\n", flush=True)
        results["systems"][system] = {
            "pauses": [asdict(p) for p in found],
            "throughput": epochs,
            "reading_back": {**reading, "epoch_ratios": beside},
            "used_by_others": load.others(),
        }
        save(args.json, results)
    return 0


# -- kills: processes ended by SIGKILL --------------------------------------------------


POLICIES = [policy.value for policy in ApplyPolicy]
NUM_SAMPLES, SMALL_BATCH, UNITS = 480, 4, 256
LONGER = 1.3
"""Factor on the lifetime of the process after one without progress, as on a busy machine."""
LEFTOVER = ".unfinished-*"


class Noted(logging.Handler):
    """Appends the name of each checkpoint to a file once it is on the disk."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.INFO)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("checkpoint %s written"):
            with open(self._file, "a") as file:
                file.write(f"{Path(str(record.args[0])).name}\n")  # type: ignore[index]


def make_small(device: torch.device) -> nn.Module:
    torch.set_num_threads(1)
    return nn.Sequential(
        nn.Linear(16, UNITS),
        nn.BatchNorm1d(UNITS),
        nn.ReLU(),
        nn.Linear(UNITS, 4),
    ).to(device)


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def train(directory: Path | None, policy: str, num_epochs: int, result: Path) -> None:
    """One process: start or resume training, to the end unless killed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 16, generator=generator)
    y = torch.randint(4, (NUM_SAMPLES,), generator=generator)
    builder = (
        Trainer.builder(make_small, lambda params: torch.optim.AdamW(params, 1e-3), class_loss)
        .dataset((x, y))
        .batch_size(SMALL_BATCH)
        .num_epochs(num_epochs)
        .devices(["cpu", "cpu"])
        .policy(ApplyPolicy(policy))
        .balance(False)
        .seed(7)
        .progress(False)
    )
    if directory is not None:
        builder.checkpoint_dir(directory, keep=3).resume(directory, missing_ok=True)
    handle = builder.run()
    if directory is not None:
        save_now_and_then(handle, directory)
    state = handle.join(JOIN_S)
    assert not state.stopped
    assert not state.checkpoint_errors
    state.save(result.with_suffix(".safetensors"))
    epochs = [
        {"epoch": m.epoch, "loss": m.avg_loss.hex(), "num_samples": m.num_samples}
        for m in state.metrics
    ]
    result.write_text(json.dumps(epochs))


def save_now_and_then(handle: TrainerHandle, directory: Path) -> None:
    """Also write checkpoints in the middle of epochs, until the run is over."""
    moments = random.Random(os.getpid())
    while handle.state is None:
        time.sleep(moments.uniform(0.0, 0.1))
        try:
            handle.save(directory)
        except CheckpointError:  # it is over
            return


def warm_up() -> None:
    """Trigger the imports of PyTorch's first step once, instead of in each process.

    No matrix is multiplied: the libraries for that do not support a fork after their use.
    """
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter], 1e-3).step()


def forked(work: Callable[[], None]) -> int:
    """Fork a process that runs this function; returns its id. This process has no threads yet."""
    pid = os.fork()
    if pid == 0:
        code = 1
        faulthandler.enable()
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


@dataclass
class Record:
    """Results of the kills.

    Attributes:
        num_kills: Processes killed.
        num_while_writing: Kills that left an unfinished checkpoint.
        num_mid_epoch: Kills after which training resumed within an epoch.
        num_before_first: Kills before there was any checkpoint.
        lost_s: For each kill, the age of the checkpoint that was resumed.
        num_finished: Processes that finished before the kill.
        faults: Violations.
    """

    num_kills: int = 0
    num_while_writing: int = 0
    num_mid_epoch: int = 0
    num_before_first: int = 0
    num_finished: int = 0
    lost_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Killer:
    """Starts a run repeatedly, and kills each process at a random moment.

    Args:
        place: A directory of its own.
        policy: The run's policy.
        count: Number of kills after the first checkpoint.
        seed: Seed of the moments.
        longest_s: The initial upper bound of a lifetime.
    """

    def __init__(self, place: Path, policy: str, count: int, seed: int, longest_s: float) -> None:
        self.record = Record()
        self._checkpoints = place / "checkpoints"
        self._written = place / "written"
        self._result = place / "result.json"
        self._policy = policy
        self._count = count
        self._random = random.Random(seed)
        self._longest_s = longest_s
        self._step = 0

    def _life(self, num_epochs: int) -> int:
        def work() -> None:
            logger = logging.getLogger("runtime.checkpoint")
            logger.setLevel(logging.INFO)
            logger.addHandler(Noted(self._written))
            train(self._checkpoints, self._policy, num_epochs, self._result)

        return forked(work)

    def run(self) -> int:
        """Kill ``count`` times behind the first checkpoint, then let it finish; gives the epochs
        that it trained.
        """
        many = 1_000_000  # more than it can train; adjusted between processes
        while self.record.num_kills - self.record.num_before_first < self._count:
            pid = self._life(many)
            self._wait_for_moment(pid)
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            if status != signal.SIGKILL:
                self.record.faults.append(f"a process ended on its own with status {status}")
                self.record.num_finished += 1
                if self.record.num_finished > 3:
                    return 0
                continue
            self._after_kill(time.time())
        loaded = self._newest()
        num_epochs = (0 if loaded is None else loaded.data.epoch) + 2
        if os.waitpid(self._life(num_epochs), 0)[1] != 0:
            self.record.faults.append("the last life did not end well")
        return num_epochs

    def _wait_for_moment(self, pid: int) -> None:
        """Sleep for a random time; in every other process also until a checkpoint begins."""
        time.sleep(self._random.uniform(0.02, self._longest_s))
        if self._random.random() < 0.5:
            return
        deadline = time.monotonic() + self._longest_s
        while time.monotonic() < deadline and not any(self._checkpoints.glob(LEFTOVER)):
            time.sleep(0.0005)
        time.sleep(self._random.uniform(0.0, 0.01))

    def _newest(self) -> LoadedCheckpoint | None:
        return load_newest(self._checkpoints, missing_ok=True)

    def _after_kill(self, killed_at: float) -> None:
        """Check that the newest checkpoint is complete, is the last one written or a later one,
        and no older than the previous one.
        """
        record = self.record
        record.num_kills += 1
        record.num_while_writing += any(self._checkpoints.glob(LEFTOVER))
        loaded = self._newest()
        if loaded is None:
            record.num_before_first += 1
            self._longest_s *= LONGER
            if self._written.exists():
                record.faults.append("no checkpoint is left of those that were written")
            return
        if loaded.refused:
            record.faults.append(f"refused: {loaded.refused}")
        written = self._written.read_text().split() if self._written.exists() else []
        if written and serial(loaded.name) < serial(written[-1]):
            record.faults.append(f"{loaded.name} is resumed, {written[-1]} was written")
        if loaded.data.global_step < self._step:
            record.faults.append(f"step {self._step} was reached before {loaded.name}")
        if loaded.data.global_step == self._step:
            self._longest_s *= LONGER
        self._step = loaded.data.global_step
        record.num_mid_epoch += self._step % (NUM_SAMPLES // SMALL_BATCH) != 0
        record.lost_s.append(killed_at - loaded.path.stat().st_mtime)

    def compare(self, num_epochs: int, straight: Path) -> None:
        """The last process's result compared with an uninterrupted run."""
        if not self._result.exists():
            self.record.faults.append("there is no result")
            return
        found = json.loads(self._result.read_text())
        counted = [(e["epoch"], e["num_samples"]) for e in found]
        if counted != [(epoch, NUM_SAMPLES) for epoch in range(num_epochs)]:
            self.record.faults.append("not every epoch has trained every sample once")
        if self._policy != ApplyPolicy.SYNC.value:
            return
        pid = forked(lambda: train(None, self._policy, num_epochs, straight))
        if os.waitpid(pid, 0)[1] != 0:
            self.record.faults.append("the undisturbed run did not end well")
            return
        wanted = json.loads(straight.read_text())
        if found != wanted:
            first = next(a["epoch"] for a, b in zip(found, wanted, strict=True) if a != b)
            self.record.faults.append(f"the loss of epoch {first} is another")
        theirs = load_file(straight.with_suffix(".safetensors"))
        for name, tensor in load_file(self._result.with_suffix(".safetensors")).items():
            if not torch.equal(tensor, theirs[name]):
                self.record.faults.append(f"{name} is another than undisturbed")


def serial(name: str) -> int:
    """The number at the end of a checkpoint's name."""
    return int(name.rsplit("-", 1)[1])


def summary(record: Record, policy: str, num_epochs: int) -> str:
    """One line."""
    lost = sorted(record.lost_s) or [0.0]
    same = ", same parameters and losses as undisturbed" if policy == "sync" else ""
    verdict = f"OK{same}" if not record.faults else f"FAULTS: {record.faults}"
    return (
        f"{policy}: {record.num_kills} kills over {num_epochs} epochs, "
        f"{record.num_while_writing} while a checkpoint was written, "
        f"{record.num_before_first} before the first, {record.num_mid_epoch} resumed within an "
        f"epoch; age of the resumed checkpoint: "
        f"median {lost[len(lost) // 2]:.2f} s, at most {lost[-1]:.2f} s; {verdict}"
    )


def kills(args: argparse.Namespace) -> int:
    """Kill a run with SIGKILL at random moments, resume it, and compare; 1 for a fault."""
    torch.set_num_threads(1)  # no threads, which a fork would lose
    warm_up()
    place = Path(tempfile.mkdtemp(prefix="kill-resume-"))
    try:
        killer = Killer(place, args.policy, args.count, args.seed, args.longest)
        num_epochs = killer.run()
        killer.compare(num_epochs, place / "straight.json")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    record = killer.record
    print(summary(record, args.policy, num_epochs))
    result: dict[str, Any] = {"policy": args.policy, "epochs": num_epochs, "seed": args.seed}
    save(args.json, {**result, **vars(record)})
    return int(bool(record.faults))


# -- the command line --------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser, commands = parser_of_sections(__doc__, {"cost": cost, "kills": kills})
    add = commands["cost"].add_argument
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    add("--mb", type=int, help="size of a rank's state (400)")
    add("--repeat", type=int, help="repetitions (3)")
    add("--seconds", type=float, help=f"length of an epoch ({EPOCH_S:g})")
    add("--quick", action="store_true", help="a small state and short epochs")
    add = commands["kills"].add_argument
    add("--count", type=int, default=100, help="kills")
    add("--policy", choices=POLICIES, default="sync")
    add("--seed", type=int, default=0, help="seed of the moments")
    add("--longest", type=float, default=1.0, help="initial upper bound of a lifetime, in seconds")
    args = parser.parse_args(argv)
    if args.section == "cost":
        args.mb = args.mb or (40 if args.quick else 400)
        args.repeat = args.repeat or (1 if args.quick else 3)
        args.seconds = args.seconds or (1.0 if args.quick else EPOCH_S)
    elif args.count < 1:
        parser.error("--count must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a killed run has shown a fault."""
    args = parse_args(argv)
    code: int = args.run(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
