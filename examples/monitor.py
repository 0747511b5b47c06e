"""Shows a run in the browser; logs its metrics to files, and messages with their rank."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from profile_timeline import build_model, make_data
from slow import Slowdown
from torch import Tensor, nn

from gpuworker import (
    CombinedLogger,
    CsvLogger,
    Monitor,
    TensorBoardLogger,
    Timeline,
    Trainer,
    TrainerHandle,
    WorkerLogFilter,
    record_scalar,
)

logger = logging.getLogger("example")


def log_to_the_terminal() -> None:
    """Print each message with the rank, epoch and step of the worker that logged it."""
    handler = logging.StreamHandler()
    handler.addFilter(WorkerLogFilter())
    handler.setFormatter(logging.Formatter("%(levelname)s %(worker)s%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logger.setLevel(logging.INFO)


def start(args: argparse.Namespace) -> TrainerHandle:
    slowdown = Slowdown(0, args.slow)

    def train_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        slowdown()
        points, labels = batch
        logits = model(points)
        record_scalar("accuracy", (logits.argmax(1) == labels).float().mean())
        return nn.functional.cross_entropy(logits, labels)

    builder = Trainer.builder(
        lambda device: build_model().to(device),
        lambda params: torch.optim.SGD(params, lr=0.02),
        train_fn,
    ).dataset(make_data(args.samples))
    builder.devices(["cpu"] * args.workers).batch_size(32).num_epochs(args.epochs)
    builder.policy("cadence")  # rank 0 is slow: the other trains more of the data
    builder.epoch_fn(lambda epoch, worker: logger.info("begins"))
    tables = [CsvLogger(args.csv)] if args.csv else []
    boards = [TensorBoardLogger(args.tensorboard)] if args.tensorboard else []
    builder.metrics_fn(CombinedLogger(*tables, *boards))
    # With a timeline the page shows each rank's time by cause; it is optional.
    return builder.timeline(Timeline()).progress(False).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="of the page; 0 picks a free one")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slow", type=float, default=3.0, help="how much slower rank 0 is")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=16_000)
    parser.add_argument("--csv", type=Path, help="write each epoch's metrics to this table")
    parser.add_argument("--tensorboard", type=Path, help="and to this directory")
    parser.add_argument("--out", type=Path, help="save the page at the end as this file")
    parser.add_argument("--stay", action="store_true", help="serve the page until Enter is pressed")
    args = parser.parse_args()
    log_to_the_terminal()
    with Monitor(args.port) as monitor:
        print(f"open {monitor.url}", flush=True)
        handle = start(args).attach(monitor)
        try:
            state = handle.join()
        finally:  # a run that was stopped or failed has a page too
            if args.out:
                monitor.save_html(args.out)
        last = state.metrics[-1]
        print(f"loss {last.avg_loss:.3f}, accuracy {last.scalars['accuracy']:.1%}")
        if args.stay:
            input("the page is still there; press Enter to end ")


if __name__ == "__main__":
    main()
