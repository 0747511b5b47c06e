"""One machine of a cluster, as a program: ``python -m tests.support.cluster_program ADDRESS``.

It trains a number for each sample, and prints what came of it as JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys

import torch

from runtime import ApplyPolicy, Trainer
from tests.support.clustering import Effects, Recorded


class Told(Recorded):
    """Says when the first round has changed something."""

    def step(self, old, change):
        if not self.changes:
            say("a round")
        return super().step(old, change)


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--samples", type=int, default=8003)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--policy", default="cadence")
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--period", type=float, default=0.3)
    parser.add_argument("--step-s", type=float, default=0.0, help="work of a step")
    parser.add_argument("--token")
    parser.add_argument("--directory")
    args = parser.parse_args()
    outer = Told(args.samples)

    def train_fn(model, batch):
        (samples,) = batch
        if args.step_s:
            torch.ones(int(1e6 * args.step_s)).sin_()
        return -model.w[samples].mean()

    builder = (
        Trainer.builder(
            lambda device: Effects(args.samples),
            lambda params: torch.optim.SGD(params, 1.0),
            train_fn,
        )
        .dataset((torch.arange(args.samples),))
        .batch_size(4)
        .num_epochs(args.epochs)
        .devices(["cpu", "cpu"])
        .policy(ApplyPolicy(args.policy))
        .progress(False)
        .cluster(
            args.address,
            min_machines=args.machines,
            period=args.period,
            outer=outer,
            token=args.token,
            timeout=3.0,
        )
    )
    if args.directory:
        builder.checkpoint_dir(args.directory, every_s=0.2).resume(args.directory, missing_ok=True)
    handle = builder.run()
    say("started")
    try:
        state = handle.join()
    except KeyboardInterrupt:
        state = handle.state
    weights = state.params["w"]
    answer = {
        "digest": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "num_effects": int((weights != 0).sum()),
        "num_twice": int((outer.rounds_of_each_sample() > args.epochs).sum()),
        "num_samples": [metrics.num_samples for metrics in state.metrics],
        "machines": len({m.machine for metrics in state.metrics for m in metrics.machines}),
        "stopped": state.stopped,
    }
    say(json.dumps(answer))


if __name__ == "__main__":
    main()
