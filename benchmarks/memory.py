"""Memory use of averaging on the CPU path, in units of the model's size.

Usage: ``python benchmarks/memory.py [--epochs 12]``. Needs Linux with glibc 2.33 or later.
``benchmarks/README.md`` describes the measurements.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness.measure import Check, begin, parser_of, save, table
from runtime import ApplyPolicy, AverageBackend, Trainer, current_worker

WIDTH, DEPTH = 1024, 10
MODEL_BYTES = WIDTH * WIDTH * DEPTH * 4
NUM_SAMPLES, BATCH_SIZE = 512, 8
INTERVAL_S = 0.001
WAIT_S = 300.0
TOLERANCE = 0.05


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def mapped_bytes_reader() -> Callable[[], int]:
    """A function that returns the bytes of all blocks that glibc has mapped separately."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        sys.exit("mallinfo2 is missing: this benchmark needs Linux with glibc 2.33 or later")
    function.restype = _Mallinfo2
    return lambda: function().hblkhd


class Census(threading.Thread):
    """Samples the live model-sized blocks, and records the peak of each phase.

    Attributes:
        phase: ``"start"`` until every rank trains, ``"training"`` until the last epoch
            is closed, then ``"end"``.
        peaks: Peak bytes of each phase over what was mapped before the run.
        num_samples: Samples of each phase.
    """

    def __init__(self) -> None:
        super().__init__(name="census", daemon=True)
        self.phase = "start"
        self.peaks: dict[str, int] = defaultdict(int)
        self.num_samples: dict[str, int] = defaultdict(int)
        self._ended = threading.Event()
        self._read = mapped_bytes_reader()
        self._before = self._read()

    def run(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            phase = self.phase
            self.peaks[phase] = max(self.peaks[phase], self._read() - self._before)
            self.num_samples[phase] += 1

    def stop(self) -> None:
        self._ended.set()
        self.join(WAIT_S)


def make_model(device: torch.device) -> nn.Module:
    torch.set_num_threads(1)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]
    return nn.Sequential(*layers).to(device)


def measure(num_workers: int, num_epochs: int) -> tuple[Census, int]:
    """Train under CADENCE over the CPU path; the census and the number of averagings."""
    data = (torch.randn(NUM_SAMPLES, WIDTH), torch.randn(NUM_SAMPLES, WIDTH))
    started: set[int] = set()
    census = Census()

    def train_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if census.phase == "start":
            started.add(current_worker().rank)
            if len(started) == num_workers:
                census.phase = "training"
        return F.mse_loss(model(batch[0]), batch[1])

    census.start()
    try:
        handle = (
            Trainer.builder(make_model, lambda params: torch.optim.SGD(params, 1e-3), train_fn)
            .dataset(data)
            .batch_size(BATCH_SIZE)
            .num_epochs(num_epochs)
            .devices(["cpu"] * num_workers)
            .policy(ApplyPolicy.CADENCE)
            .backend(AverageBackend.CPU)
            .anchor(1)
            .tune_allocator(False)
            .progress(False)
            .run()
        )
        for metrics in handle.metrics():
            if metrics.epoch == num_epochs - 1:
                census.phase = "end"
        state = handle.join(WAIT_S)
    finally:
        census.stop()
    return census, sum(m.num_averagings for m in state.metrics)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    # glibc then maps every block of 32 MiB or more separately, and reports their sum.
    result: dict[str, Any] = {**begin(), "rows": []}
    print(f"Model: {MODEL_BYTES / 2**20:.0f} MiB. Peaks beside the replicas, in models:\n")
    rows, checks = [], []
    for num_workers in (2, 3):
        census, num_averagings = measure(num_workers, args.epochs)
        training, end = (census.peaks[p] / MODEL_BYTES - num_workers for p in ("training", "end"))
        checks.append(
            Check(
                what=f"{num_workers} workers: most models beside the replicas",
                measured=max(training, end) - TOLERANCE,
                wanted=num_workers + 2,
                at_most=True,
            )
        )
        num_samples = sum(census.num_samples.values())
        rows.append([f"{num_workers}", f"{num_averagings}", f"{num_samples}"])
        rows[-1] += [f"{training:.2f}", f"{end:.2f}", f"{num_workers + 2}", checks[-1].verdict]
        result["rows"].append({"training": training, "end": end, **checks[-1].record()})
    head = ["workers", "averagings", "samples", "training", "end of the run", "limit", ""]
    print(table(head, rows, num_texts=0))
    save(args.json, result)


if __name__ == "__main__":
    main()
