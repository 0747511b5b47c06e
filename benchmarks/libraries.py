"""The same job in Accelerate, Lightning and here: lines of code, first batch, throughput.

Usage: ``python benchmarks/libraries.py [--repeat N] [--json FILE]``, with ``accelerate`` and
``lightning`` installed. What is measured stands in ``benchmarks/README.md``.
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

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

NUM_EPOCHS, NUM_BATCHES, BATCH_SIZE = 4, 200, 32
"""Batches of an epoch, over both devices, and the samples of each."""
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


def load() -> DataLoader[tuple[Tensor, ...]]:
    """The data, in memory."""
    x = torch.randn(NUM_BATCHES * BATCH_SIZE, 128)
    data = TensorDataset(x, x[:, :10].argmax(1))
    return DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)


def ours(policy: str) -> None:
    from runtime import Trainer

    def train_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        mark("batch")
        return cross_entropy(model(batch[0]), batch[1])

    handle = (
        Trainer.builder(make(), lambda params: torch.optim.AdamW(params, 1e-3), train_fn)
        .dataset(load())
        .num_epochs(NUM_EPOCHS)
        .devices(2)
        .policy(policy)
        .max_grad_norm(1.0)
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

    accelerator = Accelerator(cpu=True)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, load())
    for _ in range(NUM_EPOCHS):
        for inputs, labels in loader:
            mark("batch")
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        mark("epoch")


def lightning() -> None:
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            mark("batch")
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

        def on_train_epoch_end(self) -> None:
            mark("epoch")

    trainer = lightning.Trainer(
        max_epochs=NUM_EPOCHS,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), load())


SYSTEMS: dict[str, Callable[[], None]] = {
    "sync": sync,
    "cadence": cadence,
    "accelerate": accelerate,
    "lightning": lightning,
}
TITLES = {
    "sync": "gpuworker, `SYNC`, 2 threads",
    "cadence": "gpuworker, `CADENCE`, 2 threads",
    "accelerate": "Accelerate, 2 processes",
    "lightning": "Lightning, DDP, 2 processes",
}


def num_lines(system: str) -> int:
    """Lines of code of a system's job, without what only measures, nor blank ones."""
    job = ours if system in ("sync", "cadence") else SYSTEMS[system]
    lines = inspect.getsource(job).splitlines()[1:]
    return sum(bool(line.strip()) and "mark(" not in line for line in lines)


def run(system: str) -> dict[str, float]:
    """One run in processes of its own: seconds to the first batch, samples a second after it.

    The throughput is that of all epochs but the first.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", system]
    peers = []
    start = time.time()
    if system == "accelerate":  # as its launcher starts two processes on the CPU
        env |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
        other = env | {"RANK": "1", "LOCAL_RANK": "1"}
        peers = [subprocess.Popen(command, env=other, stdout=subprocess.DEVNULL)]
        env |= {"RANK": "0", "LOCAL_RANK": "0"}
    try:
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True
        )
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()
    marks = re.findall(r"mark (\w+) ([\d.]+)", done.stdout)
    batches = [float(when) for what, when in marks if what == "batch"]
    # With two processes each epoch is reported twice if both write to one pipe.
    epochs = sorted(float(when) for what, when in marks if what == "epoch")
    per_epoch = len(epochs) // NUM_EPOCHS
    ends = epochs[per_epoch - 1 :: per_epoch]
    num_samples = (NUM_EPOCHS - 1) * NUM_BATCHES * BATCH_SIZE
    return {"first_batch_s": min(batches) - start, "rate": num_samples / (ends[-1] - ends[0])}


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
        ]
        for system, runs in found.items()
    ]
    print(table(["system", "lines", "first batch", "samples/s"], rows))
    save(args.json, {**record, "runs": found})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each system")
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        SYSTEMS[args.child]()
    else:
        measure(args)


if __name__ == "__main__":
    main()
