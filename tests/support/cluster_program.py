"""One machine of a cluster, as a program: ``python -m tests.support.cluster_program ADDRESS``.

It trains the model of ``tests/support/clustering.py``, prints a line when it has started and after
each round, and its result as JSON at the end. SIGINT makes it leave the cluster, SIGUSR1 ends the
run on all machines, SIGUSR2 prints its threads' stacks to stderr.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import logging
import signal
import sys
import time

import torch

from runtime import ApplyPolicy, Trainer, current_worker
from runtime.cluster.cluster_run import ClusterRun
from tests.support.clustering import SLOTS, Counted, Effects, expected_rounds

BATCH_SIZE = 4


class Reporting(Counted):
    """Prints a line after each round with changes."""

    def step(self, old, change):
        new = super().step(old, change)
        print_line("a round")
        return new


def print_line(line):
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
    parser.add_argument("--timeout", type=float, default=3.0)
    parser.add_argument("--step-s", type=float, default=0.0, help="compute time of a step")
    parser.add_argument("--sleep-s", type=float, default=0.0, help="sleep of a step")
    parser.add_argument("--token")
    parser.add_argument("--clock-s", type=float, default=0.0, help="offset of every clock")
    parser.add_argument("--directory")
    parser.add_argument("--log", help="log file of the runtime")
    args = parser.parse_args()
    if args.log:
        log_format = "%(asctime)s.%(msecs)03d %(message).600s"
        logging.basicConfig(filename=args.log, level=logging.DEBUG, format=log_format, datefmt="%X")
    faulthandler.register(signal.SIGUSR2)
    if args.clock_s:
        for name in ("time", "monotonic"):
            original = getattr(time, name)
            setattr(time, name, lambda original=original: original() + args.clock_s)
    outer = Reporting(args.samples)

    def train_fn(model, batch):
        (samples,) = batch
        if args.step_s:
            torch.ones(int(1e6 * args.step_s)).sin_()
        if args.sleep_s:
            time.sleep(args.sleep_s)
        return -model.elements(samples, current_worker().current_epoch).mean()

    builder = (
        Trainer.builder(
            lambda device: Effects(args.samples, SLOTS),
            lambda params: torch.optim.SGD(params, 1.0),
            train_fn,
        )
        .dataset((torch.arange(args.samples),))
        .batch_size(BATCH_SIZE)
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
            timeout=args.timeout,
        )
    )
    if args.directory:
        builder.checkpoint_dir(args.directory, every_s=0.2).resume(args.directory, missing_ok=True)
    handle = builder.run()
    signal.signal(signal.SIGUSR1, lambda *_: handle.stop(everywhere=True))
    print_line("started")
    try:
        state = handle.join()
    except KeyboardInterrupt:
        assert handle.state is not None
        state = handle.state
    weights = state.params["w"]
    run = handle._run
    assert isinstance(run, ClusterRun)
    assert run._member is not None
    ledger = run._member.ledger
    expected = expected_rounds(ledger, args.samples, BATCH_SIZE)
    print_line(
        json.dumps(
            {
                "digest": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
                "step": ledger.step,
                "num_batches": ledger.consumed,
                "num_missing": int((outer.counts < expected).sum()),
                "num_twice": int((outer.counts > expected).sum()),
                "num_samples": [metrics.num_samples for metrics in state.metrics],
                "num_trained": [
                    sum(machine.num_samples for machine in metrics.machines)
                    for metrics in state.metrics
                ],
                "machines": len({m.machine for metrics in state.metrics for m in metrics.machines}),
                "stopped": state.stopped,
            }
        )
    )


if __name__ == "__main__":
    main()
