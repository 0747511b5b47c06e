"""Checkpoints for the examples: Ctrl-C stops one, and ``--resume`` continues it exactly."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TypeVar

from torch import nn

from gpuworker import EpochMetrics, TrainerBuilder, TrainerHandle

ModelT = TypeVar("ModelT", bound=nn.Module)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments, including those for checkpoints."""
    parser.add_argument("--checkpoint-dir", metavar="DIR", help="written every epoch and at Ctrl-C")
    parser.add_argument("--resume", action="store_true", help="continue from --checkpoint-dir")
    args = parser.parse_args()
    if args.resume and not args.checkpoint_dir:
        parser.error("--resume needs --checkpoint-dir")
    return args


def with_checkpoints(
    builder: TrainerBuilder[ModelT], args: argparse.Namespace
) -> TrainerBuilder[ModelT]:
    """The builder, with the checkpoints that the arguments request."""
    if args.checkpoint_dir:
        builder.checkpoint_dir(args.checkpoint_dir)
    if args.resume:
        builder.resume(args.checkpoint_dir, missing_ok=True)
    return builder


def print_epoch(m: EpochMetrics) -> None:
    """Print an epoch's line."""
    print(f"epoch {m.epoch:2}  loss {m.avg_loss:.4f}", end="  ")
    print(f"accuracy {m.scalars['accuracy']:6.1%}  {m.num_samples / m.epoch_s:6,.0f} samples/s")
    sys.stdout.flush()


def follow(handle: TrainerHandle, quiet: bool = False) -> None:
    """Print a line for each closed epoch, including those that close while Ctrl-C stops the run."""
    try:
        with handle:
            for m in handle.metrics():
                if not quiet:
                    print_epoch(m)
    finally:
        for m in handle.poll_metrics():
            if not quiet:
                print_epoch(m)


def stoppable(main: Callable[[], None]) -> None:
    """Call ``main``. When it raises ``KeyboardInterrupt`` the run has stopped between two steps."""
    try:
        main()
    except KeyboardInterrupt:
        print("stopped; with --checkpoint-dir the same command continues with --resume", flush=True)
        sys.exit(130)
