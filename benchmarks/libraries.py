"""The same job in a plain loop, Accelerate, Lightning and here: lines, first batch, throughput.

The job: train, validate after each epoch, a cosine schedule, the best weights in a file, resume.

Usage: ``python benchmarks/libraries.py [--repeat N] [--json FILE] [--show SYSTEM]``, with
``accelerate`` and ``lightning`` installed, or ``--first [--busy N] [--against FOLDER]`` for the
time to the first batch alone. ``benchmarks/README.md`` describes the measurements.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

NUM_EPOCHS, NUM_BATCHES, BATCH_SIZE = 4, 100, 64
"""Epochs, global batches of an epoch, and their samples over both devices."""
NUM_VALIDATED = 1600
TIMEOUT_S = 240.0


marked: set[str] = set()
"""Marks already sent to the parent; "batch" is sent once."""


def mark(what: str) -> None:
    """Send the time of an event to the parent."""
    if what not in marked or what != "batch":
        marked.add(what)
        print(f"mark {what} {time.time()}", flush=True)


def make() -> nn.Module:
    """The model, whose step takes about a millisecond."""
    torch.manual_seed(0)
    hidden = nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(512, 10))


def load(num_samples: int, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Data in memory, shuffled for training."""
    x = torch.randn(num_samples, 128, generator=torch.Generator().manual_seed(num_samples))
    data = TensorDataset(x, x[:, :10].argmax(1))
    return DataLoader(data, batch_size=batch_size, shuffle=num_samples > NUM_VALIDATED)


def right(logits: Tensor, labels: Tensor) -> Tensor:
    """1.0 for each correct sample."""
    return (logits.argmax(1) == labels).float()


def loop() -> None:
    loader, held_out = load(NUM_BATCHES * BATCH_SIZE, BATCH_SIZE), load(NUM_VALIDATED, BATCH_SIZE)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = CosineAnnealingLR(optimizer, NUM_EPOCHS * len(loader))
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    first, best = 0, 0.0
    if os.path.exists("last.pt"):
        saved = torch.load("last.pt")
        first, best = saved["epoch"] + 1, saved["best"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for epoch in range(first, NUM_EPOCHS):
        for inputs, labels in loader:
            mark("batch")
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            found = [right(model(inputs), labels) for inputs, labels in held_out]
        model.train()
        accuracy = torch.cat(found).mean().item()
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.3f}")
        if accuracy > best:
            best = accuracy
            torch.save(model.state_dict(), "best.pt")
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({"epoch": epoch, "best": best, **state}, "last.pt")
        mark("epoch")


def ours(policy: str) -> None:
    from gpuworker import KeepBest, Trainer

    def train_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        mark("batch")
        return cross_entropy(model(batch[0]), batch[1])

    def validate(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        return {"accuracy": right(model(batch[0]), batch[1]).mean()}

    handle = (
        Trainer.builder(make(), lambda params: torch.optim.AdamW(params, 1e-3), train_fn)
        .dataset(load(NUM_BATCHES * BATCH_SIZE, BATCH_SIZE))
        .global_batch_size(BATCH_SIZE)
        .val_dataset(load(NUM_VALIDATED, BATCH_SIZE), fn=validate)
        .num_epochs(NUM_EPOCHS)
        .devices(2)
        .policy(policy)
        .max_grad_norm(1.0)
        .scheduler(lambda optimizer, total: CosineAnnealingLR(optimizer, total))
        .callbacks(KeepBest("best.safetensors", "val/accuracy", mode="max"))
        .checkpoint_dir("last")
        .resume("last", missing_ok=True)
        .run()
    )
    for _ in handle.metrics():
        mark("epoch")


def sync() -> None:
    ours("sync")


def cadence() -> None:
    ours("cadence")


def accelerate() -> None:
    from accelerate import Accelerator

    class Progress(dict[str, float]):
        def state_dict(self) -> dict[str, float]:
            return dict(self)

        load_state_dict = dict.update

    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = CosineAnnealingLR(optimizer, NUM_EPOCHS * NUM_BATCHES)
    loader = load(NUM_BATCHES * BATCH_SIZE, BATCH_SIZE // accelerator.num_processes)
    held_out = load(NUM_VALIDATED, BATCH_SIZE)
    model, optimizer, scheduler, loader, held_out = accelerator.prepare(
        model, optimizer, scheduler, loader, held_out
    )
    progress = Progress(epoch=0, best=0.0)
    accelerator.register_for_checkpointing(progress)
    if os.path.exists("last"):
        accelerator.load_state("last")
    for epoch in range(int(progress["epoch"]), NUM_EPOCHS):
        for inputs, labels in loader:
            mark("batch")
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        model.eval()
        found = []
        for inputs, labels in held_out:
            with torch.no_grad():
                logits = model(inputs)
            found.append(right(*accelerator.gather_for_metrics((logits, labels))))
        model.train()
        accuracy = torch.cat(found).mean().item()
        accelerator.print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.3f}")
        if accuracy > progress["best"]:
            progress["best"] = accuracy
            accelerator.save(accelerator.unwrap_model(model).state_dict(), "best.pt")
        progress["epoch"] = epoch + 1
        accelerator.save_state("last")
        mark("epoch")


def lightning() -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            mark("batch")
            return cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            accuracy = right(self.net(batch[0]), batch[1]).mean()
            self.log("accuracy", accuracy, prog_bar=True, sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
            total = int(self.trainer.estimated_stepping_batches)
            scheduler = CosineAnnealingLR(optimizer, total)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def on_train_epoch_end(self) -> None:
            mark("epoch")

    trainer = lightning.Trainer(
        max_epochs=NUM_EPOCHS,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        gradient_clip_val=1.0,
        callbacks=ModelCheckpoint(".", monitor="accuracy", mode="max", save_last=True),
        logger=False,
    )
    loaders = load(NUM_BATCHES * BATCH_SIZE, BATCH_SIZE // 2), load(NUM_VALIDATED, BATCH_SIZE)
    trainer.fit(Classifier(), *loaders, ckpt_path="last", weights_only=False)


SYSTEMS: dict[str, Callable[[], None]] = {
    "loop": loop,
    "sync": sync,
    "cadence": cadence,
    "accelerate": accelerate,
    "lightning": lightning,
}
TITLES = {
    "loop": "plain loop, 1 device",
    "sync": "gpuworker, `SYNC`, 2 threads",
    "cadence": "gpuworker, `CADENCE`, 2 threads",
    "accelerate": "Accelerate, 2 processes",
    "lightning": "Lightning, DDP, 2 processes",
}


def num_lines(system: str) -> int:
    """Lines of code of a system's job, without blank lines and measurement code."""
    job = ours if system in ("sync", "cadence") else SYSTEMS[system]
    lines = inspect.getsource(job).splitlines()[1:]
    return sum(bool(line.strip()) and "mark(" not in line for line in lines)


def run(system: str) -> dict[str, float]:
    """Run the job in new processes; then start it again, which must resume and train nothing.

    Returns:
        Seconds to the first batch; samples a second, validation included, after the first epoch;
        batches trained by the second start.
    """
    with TemporaryDirectory() as folder:
        start = time.time()
        marks = marks_of(execute(system, folder))
        again = marks_of(execute(system, folder))
    ends = marks["epoch"]
    num_samples = (NUM_EPOCHS - 1) * NUM_BATCHES * BATCH_SIZE
    return {
        "first_batch_s": min(marks["batch"]) - start,
        "rate": num_samples / (ends[-1] - ends[0]),
        "resumed_batches": len(again["batch"]),
    }


def marks_of(output: str) -> dict[str, list[float]]:
    """Times of the marks in a job's output."""
    marks: dict[str, list[float]] = {"batch": [], "epoch": [], "end": []}
    for what, when in re.findall(r"mark (\w+) ([\d.]+)", output):
        marks[what].append(float(when))
    # With two processes each epoch is marked twice if both write to one pipe.
    per_epoch = max(1, len(marks["epoch"]) // NUM_EPOCHS)
    marks["epoch"] = sorted(marks["epoch"])[per_epoch - 1 :: per_epoch]
    return marks


def execute(system: str, folder: str, *, show: bool = False) -> str:
    """The output of a job in a folder; with ``show`` what a user sees, without marks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", system]
    peers = []
    if system == "accelerate":  # as its launcher starts two processes on the CPU
        env |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
        other = env | {"RANK": "1", "LOCAL_RANK": "1"}
        peers = [subprocess.Popen(command, env=other, cwd=folder, stdout=subprocess.DEVNULL)]
        env |= {"RANK": "0", "LOCAL_RANK": "0"}
    try:
        done = subprocess.run(
            command,
            env=env,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if show else None,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()
    # Not by the exit status: processes of Gloo may abort once they have finished.
    assert "mark end" in done.stdout, f"{system} ended with status {done.returncode}"
    return re.sub(r"mark \w+ [\d.]+\n", "", done.stdout) if show else done.stdout


def first_batch(system: str, root: Path) -> float:
    """Seconds from the start of a system's job in a checkout to its first batch."""
    command = [sys.executable, str(root / "benchmarks" / "libraries.py"), "--child", system]
    with TemporaryDirectory() as folder:
        start = time.time()
        job = subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert job.stdout is not None
        with job, job.stdout:
            try:
                for line in job.stdout:
                    if line.startswith("mark batch"):
                        return float(line.split()[2]) - start
            finally:
                job.kill()
    raise RuntimeError(f"{system} ended before its first batch")


def measure_first(args: argparse.Namespace) -> None:
    """Time to the first batch, idle and beside busy processes; prints medians."""
    from benchmarks.harness.measure import begin, save, table

    record = begin()
    here = Path(__file__).resolve().parents[1]
    jobs = [("loop", here), ("sync", here)]
    if args.against is not None:
        jobs.append(("sync", args.against.resolve()))
    found: dict[str, list[float]] = {}
    for num_busy in (0, args.busy):
        spin = [sys.executable, "-c", "while True: pass"]
        busy = [subprocess.Popen(spin) for _ in range(num_busy)]
        try:
            for index in range(args.repeat):
                for system, root in jobs[:: 1 if index % 2 == 0 else -1]:
                    where = "" if root == here else f", {root.name}"
                    name = f"{TITLES[system]}{where}, {num_busy} busy processes"
                    found.setdefault(name, []).append(first_batch(system, root))
        finally:
            for process in busy:
                process.kill()
                process.wait()
    rows = [
        [name, f"{statistics.median(times):.2f} s", f"{min(times):.2f} to {max(times):.2f} s"]
        for name, times in found.items()
    ]
    print(table(["system", "first batch", "range"], rows))
    save(args.json, {**record, "first_batch_s": found})


def measure(args: argparse.Namespace) -> None:
    """All systems in turn, every other time in reverse order; prints medians."""
    from benchmarks.harness.measure import begin, save, table

    record = begin()
    found: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    for index in range(args.repeat):
        for system in list(SYSTEMS)[:: 1 if index % 2 == 0 else -1]:
            found[system].append(run(system))
    rows = [
        [
            TITLES[system],
            str(num_lines(system)),
            f"{statistics.median(r['first_batch_s'] for r in runs):.1f} s",
            f"{statistics.median(r['rate'] for r in runs):,.0f}",
            f"{max(r['resumed_batches'] for r in runs):.0f}",
        ]
        for system, runs in found.items()
    ]
    print(table(["system", "lines", "first batch", "samples/s", "trained again"], rows))
    save(args.json, {**record, "runs": found})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each system")
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--show", choices=SYSTEMS, help="print the output of this system")
    parser.add_argument("--first", action="store_true", help="time to the first batch alone")
    parser.add_argument("--busy", type=int, default=8, help="busy processes, with --first")
    parser.add_argument("--against", type=Path, help="another checkout, with --first")
    args = parser.parse_args(argv)
    if args.first:
        measure_first(args)
    elif args.child:
        SYSTEMS[args.child]()
        mark("end")
    elif args.show:
        with TemporaryDirectory() as folder:
            print(execute(args.show, folder, show=True))
    else:
        measure(args)


if __name__ == "__main__":
    main()
