"""Replay one schedule, or try many: ``python -m tests.simulation.replay --seed 17``."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.harness import Simulation, SimulationFailed, simulate
from tests.simulation.schedule import draw_schedule


def main() -> int:
    """Print the history of a seed, or run ``--count`` schedules from it on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="schedules to run, from SEED on")
    args = parser.parse_args()
    start, num_events, failed = time.perf_counter(), 0, []
    for seed in range(args.seed, args.seed + args.count):
        try:
            num_events += simulate(seed).num_events
        except SimulationFailed as error:
            failed.append(seed)
            print(error if args.count == 1 else str(error).splitlines()[0])
    if args.count == 1 and not failed:
        run = Simulation(draw_schedule(args.seed)).run()
        for moment, who, what in run.trace:
            print(f"{moment:10.6f}  {who:<16} {what}")
    seconds = time.perf_counter() - start
    rate = f"{args.count / seconds:.0f} schedules/s, {num_events / seconds:.0f} events/s"
    print(f"{args.count} schedules in {seconds:.1f} s ({rate}), failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
