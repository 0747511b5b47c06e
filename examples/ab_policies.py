"""Compares every policy over every backend on one model, in a table and a picture."""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

import torch
from digits import BACKENDS, POLICIES, build_model, load_data
from slow import Slowdown
from torch import Tensor, nn

from gpuworker import Timeline, TimelineSummary, Trainer

SHOWN = ["compute", "averaging", "control", "data", "sync", "parked", "idle", "gone"]
COLORS = ["#3a9d76", "#2c6fb3", "#8a7fd0", "#e6a11c", "#d0552d", "#b5659a", "#b9c0ca", "#566070"]


def train(
    args: argparse.Namespace, policy: str, backend: str, seed: int
) -> tuple[float, float, TimelineSummary]:
    """Train once; return the last epoch's loss, the test accuracy and the summary."""
    train_set, (images, labels) = load_data()
    slowdown = Slowdown(1, args.slow)

    def train_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        slowdown()
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    timeline = Timeline()
    builder = Trainer.builder(
        lambda device: build_model().to(device),
        lambda params: torch.optim.AdamW(params, lr=3e-3),
        train_fn,
    ).dataset(train_set)
    builder.devices(["cpu"] * args.workers).global_batch_size(32).num_epochs(args.epochs).seed(seed)
    builder.policy(policy).backend(backend).timeline(timeline)
    state = builder.progress(False).run().join()
    model = state.model()
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    return state.metrics[-1].avg_loss, accuracy, timeline.summary()


def picture(shares: dict[str, dict[str, float]]) -> str:
    """An SVG with a bar for each policy and backend, divided by cause."""
    height = 26 * len(shares) + 40
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height}"']
    lines.append('font-family="sans-serif" font-size="12">')
    for row, (way, parts) in enumerate(shares.items()):
        x, y = 150.0, 26 * row + 10
        lines.append(f'<text x="142" y="{y + 13}" text-anchor="end">{way}</text>')
        for cause, color in zip(SHOWN, COLORS, strict=True):
            width = 590 * parts[cause]
            lines.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18"')
            lines.append(f'fill="{color}"><title>{cause} {parts[cause]:.1%}</title></rect>')
            x += width
    for place, (cause, color) in enumerate(zip(SHOWN, COLORS, strict=True)):
        lines.append(f'<rect x="{150 + 74 * place}" y="{height - 22}" width="10" height="10"')
        lines.append(f'fill="{color}"/><text x="{164 + 74 * place}" y="{height - 13}">')
        lines.append(f"{cause}</text>")
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", choices=POLICIES, nargs="+", default=POLICIES)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slow", type=float, default=2.0, help="how much slower rank 1 is")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("policies.svg"))
    args = parser.parse_args()
    print("| policy  | backend | loss   | accuracy | time s | averagings | idle  |")
    print("| ------- | ------- | ------ | -------- | ------ | ---------- | ----- |")
    shares = {}
    for policy, backend in ((p, b) for p in args.policies for b in BACKENDS):
        runs = [train(args, policy, backend, seed) for seed in args.seeds]
        losses, accuracies, summaries = zip(*runs, strict=True)
        ranks = [rank for summary in summaries for rank in summary.ranks]
        seconds: dict[str, float] = defaultdict(float)
        for rank, cause in ((rank, cause) for rank in ranks for cause in SHOWN):
            seconds[cause] += rank.causes[cause]
        shares[f"{policy} over {backend}"] = {c: seconds[c] / sum(seconds.values()) for c in SHOWN}
        print(f"| {policy:7} | {backend:7} | {statistics.mean(losses):.4f}", end=" ")
        print(f"| {statistics.mean(accuracies):8.1%}", end=" ")
        print(f"| {statistics.mean(s.wall_s for s in summaries):6.2f}", end=" ")
        print(f"| {statistics.mean(s.num_averagings for s in summaries):10.0f}", end=" ")
        print(f"| {statistics.mean(r.idle_share for r in ranks):5.1%} |", flush=True)
    args.out.write_text(picture(shares), encoding="utf-8")
    print(f"\nwhere the time went: {args.out}; means of {len(args.seeds)} seeds")


if __name__ == "__main__":
    main()
