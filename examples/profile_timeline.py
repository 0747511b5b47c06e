"""Profile workers of unequal speed: writes a page and a trace of the timeline."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from slow import Slowdown
from torch import Tensor, nn

from gpuworker import ApplyPolicy, Timeline, Trainer, TrainerHandle, record_scalar

POLICIES = [policy.value for policy in ApplyPolicy]
BACKENDS = ["auto", "cpu", "thread", "gloo"]


def make_data(num_samples: int, num_features: int = 64) -> tuple[Tensor, Tensor]:
    """Points around ten centres, and the number of the centre as the label."""
    labels = torch.arange(num_samples) % 10
    centres = torch.randn(10, num_features, generator=torch.Generator().manual_seed(0))
    return centres[labels] + 0.8 * torch.randn(num_samples, num_features), labels


def build_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def start(args: argparse.Namespace, timeline: Timeline) -> TrainerHandle:
    slowdown = Slowdown(0, args.slow)
    data = make_data(args.samples)
    test_points, test_labels = make_data(500)

    def train_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        slowdown()
        points, labels = batch
        logits = model(points)
        record_scalar("accuracy", (logits.argmax(1) == labels).float().mean())
        return nn.functional.cross_entropy(logits, labels)

    def evaluate(model: nn.Module, epoch: int) -> dict[str, float]:
        right = model(test_points).argmax(1) == test_labels
        return {"accuracy": right.float().mean().item()}

    builder = Trainer.builder(
        lambda device: build_model().to(device),
        lambda params: torch.optim.SGD(params, lr=0.05),
        train_fn,
    ).dataset(data)
    builder.devices(["cpu"] * args.workers).batch_size(32).num_epochs(args.epochs)
    builder.policy(args.policy).backend(args.backend)
    return builder.eval_fn(evaluate).timeline(timeline).progress(False).run()


def report(timeline: Timeline) -> None:
    """Print each rank's time by cause, and the longest waits."""
    print(timeline.summary())
    for gap in timeline.idle_gaps()[:5]:
        cause = gap.cause.label
        print(f"rank {gap.rank} lost {gap.duration_s * 1e3:6.1f} ms to {cause}", end=" ")
        print(f"at {gap.start_s:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", choices=POLICIES, default="cadence")
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slow", type=float, default=3.0, help="how much slower rank 0 is")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--samples", type=int, default=16_000)
    parser.add_argument("--out", type=Path, default=Path("timeline"), help="of the files, a stem")
    args = parser.parse_args()
    timeline = Timeline(poll_s=0.05)
    handle = start(args, timeline)
    try:
        handle.join()
    finally:  # also for a run that was stopped or failed
        timeline.save_html(f"{args.out}.html")
        timeline.save_trace(f"{args.out}.trace.json")
    report(timeline)
    print(f"open {args.out}.html in a browser, {args.out}.trace.json in Perfetto")


if __name__ == "__main__":
    main()
