"""Kill a training run with SIGKILL at random moments, go on each time, and compare.

Usage: ``python benchmarks/kill_resume.py [--count 100] [--policy sync] [--seed 0]``.
What is checked and how stands in ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from runtime import ApplyPolicy, CheckpointError, Trainer, TrainerHandle
from runtime.checkpoint.reader import Loaded, load_newest

POLICIES = [policy.value for policy in ApplyPolicy]
NUM_SAMPLES, BATCH_SIZE, WIDTH = 480, 4, 256
JOIN_S = 120.0
LONGER = 1.3
"""What lives are lengthened by after one that got nowhere, as on a busy machine."""
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


def make_model(device: torch.device) -> nn.Module:
    torch.set_num_threads(1)
    return nn.Sequential(
        nn.Linear(16, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)
    ).to(device)


def train_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def train(directory: Path | None, policy: str, num_epochs: int, result: Path) -> None:
    """One life: begin or go on, to the end if it is let."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 16, generator=generator)
    y = torch.randint(4, (NUM_SAMPLES,), generator=generator)
    builder = (
        Trainer.builder(make_model, lambda params: torch.optim.AdamW(params, 1e-3), train_fn)
        .dataset((x, y))
        .batch_size(BATCH_SIZE)
        .num_epochs(num_epochs)
        .devices(["cpu", "cpu"])
        .policy(ApplyPolicy(policy))
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
    """Make PyTorch import now what it imports with the first step: each life would do so anew.

    No matrix is multiplied: the libraries for that are not made for a fork after their use.
    """
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter], 1e-3).step()


def forked(work: Callable[[], None]) -> int:
    """Run this in a child process, which has no threads yet; gives its id."""
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
    """What the kills have shown.

    Attributes:
        num_kills: Processes killed.
        num_while_writing: Kills that left an unfinished checkpoint behind.
        num_mid_epoch: Kills after which the middle of an epoch was gone on from.
        num_before_first: Kills before there was any checkpoint.
        lost_s: For each kill, the age of the checkpoint that was gone on from.
        num_finished: Lives that came to their end before the kill.
        faults: What should not have happened.
    """

    num_kills: int = 0
    num_while_writing: int = 0
    num_mid_epoch: int = 0
    num_before_first: int = 0
    num_finished: int = 0
    lost_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Killer:
    """Lets a run live again and again, and ends each life at a random moment.

    Args:
        place: A directory of its own.
        policy: The run's policy.
        count: How many kills.
        seed: Decides the moments.
        longest_s: The longest life, at first.
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
            logger = logging.getLogger("runtime.checkpoint.writer")
            logger.setLevel(logging.INFO)
            logger.addHandler(Noted(self._written))
            train(self._checkpoints, self._policy, num_epochs, self._result)

        return forked(work)

    def run(self) -> int:
        """Kill ``count`` times, then let it finish; gives the epochs that it trained."""
        many = 1_000_000  # more than it can train; raised and lowered between lives
        while self.record.num_kills < self._count:
            pid = self._life(many)
            self._wait_for_moment(pid)
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            if status != signal.SIGKILL:
                self.record.faults.append(f"a life ended by itself with status {status}")
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
        """Sleep for a random time; in every other life then until a checkpoint is begun."""
        time.sleep(self._random.uniform(0.02, self._longest_s))
        if self._random.random() < 0.5:
            return
        deadline = time.monotonic() + self._longest_s
        while time.monotonic() < deadline and not any(self._checkpoints.glob(LEFTOVER)):
            time.sleep(0.0005)
        time.sleep(self._random.uniform(0.0, 0.01))

    def _newest(self) -> Loaded | None:
        return load_newest(self._checkpoints, missing_ok=True)

    def _after_kill(self, killed_at: float) -> None:
        """The newest checkpoint is whole, is the last one that was written or a later one,
        and no older than the one before."""
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
        told = self._written.read_text().split() if self._written.exists() else []
        if told and serial(loaded.name) < serial(told[-1]):
            record.faults.append(f"{loaded.name} is taken, {told[-1]} was written")
        if loaded.data.global_step < self._step:
            record.faults.append(f"step {self._step} was reached before {loaded.name}")
        if loaded.data.global_step == self._step:
            self._longest_s *= LONGER
        self._step = loaded.data.global_step
        record.num_mid_epoch += self._step % (NUM_SAMPLES // BATCH_SIZE) != 0
        record.lost_s.append(killed_at - loaded.path.stat().st_mtime)

    def compare(self, num_epochs: int, straight: Path) -> None:
        """The last life's result against a run that nobody disturbed."""
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
        f"{record.num_before_first} before the first, {record.num_mid_epoch} went on within an "
        f"epoch; time since the checkpoint gone on from: "
        f"median {lost[len(lost) // 2]:.2f} s, at most {lost[-1]:.2f} s; {verdict}"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="kills")
    parser.add_argument("--policy", choices=POLICIES, default="sync")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--longest", type=float, default=1.0, help="longest life in seconds")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    if args.count < 1:
        parser.error("--count must be at least 1")
    return args


def main() -> None:
    args = parse_args()
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
    if args.json:
        result: dict[str, Any] = {"policy": args.policy, "epochs": num_epochs, "seed": args.seed}
        args.json.write_text(json.dumps({**result, **vars(record)}, indent=2) + "\n")
    sys.exit(bool(record.faults))


if __name__ == "__main__":
    main()
