"""Replay one schedule, or try many: ``python -m tests.simulation.replay --seed 17``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context

from tests.simulation.harness import Simulation, SimulationFailed, simulate
from tests.simulation.schedule import Schedule, draw_late_schedule, draw_schedule


def try_seed(draw: Callable[[int], Schedule], seed: int) -> tuple[int, int, str]:
    """Run a schedule; gives its seed, its number of events and what failed."""
    try:
        return seed, simulate(seed, draw=draw).num_events, ""
    except SimulationFailed as error:
        return seed, 0, str(error)


def show(schedule: Schedule) -> None:
    """Print the history of a schedule."""
    for moment, who, what in Simulation(schedule).run().trace:
        print(f"{moment:10.6f}  {who:<16} {what}")


def main() -> int:
    """Print the history of a seed, or run ``--count`` schedules from it on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="schedules to run, from SEED on")
    parser.add_argument("--jobs", type=int, default=1, help="processes to run them in")
    parser.add_argument("--late", action="store_true", help="longer ones with a late coordinator")
    args = parser.parse_args()
    draw = draw_late_schedule if args.late else draw_schedule
    start, num_events, failed = time.perf_counter(), 0, []
    with get_context("spawn").Pool(args.jobs) as pool:
        seeds = range(args.seed, args.seed + args.count)
        for seed, events, error in pool.imap_unordered(
            partial(try_seed, draw), seeds, chunksize=50
        ):
            num_events += events
            if error:
                failed.append(seed)
                print(error if args.count == 1 else error.splitlines()[0])
    seconds = time.perf_counter() - start
    if args.count == 1 and not failed:
        show(draw(args.seed))
    rate = f"{args.count / seconds:.0f} schedules/s, {num_events / seconds:.0f} events/s"
    print(f"{args.count} schedules in {seconds:.1f} s ({rate}), failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
