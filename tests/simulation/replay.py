"""Replay one schedule, or try many: ``python -m tests.simulation.replay --seed 17``."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context

from tests.simulation.cluster_harness import ClusterSimulation, simulate_cluster
from tests.simulation.harness import Simulation, SimulationFailed, simulate
from tests.simulation.loop_bodies import Bodies, BodyFailed, simulate_bodies
from tests.simulation.nccl_harness import NcclRun, ScheduleFailed, simulate_nccl
from tests.simulation.schedule import draw_late_schedule

Run = Callable[[int], Simulation | ClusterSimulation | NcclRun | Bodies]


def try_seed(run: Run, seed: int) -> tuple[int, int, str]:
    """Run a schedule; returns its seed, its number of events and the error."""
    logging.disable(logging.CRITICAL)  # of the failures that schedules have
    try:
        return seed, run(seed).num_events, ""
    except (SimulationFailed, ScheduleFailed, BodyFailed) as error:
        return seed, 0, str(error)


def show(run: Run, seed: int) -> None:
    """Print the history of a schedule."""
    for moment, who, what in run(seed).trace:
        print(f"{moment:10.6f}  {who:<16} {what}")


def main() -> int:
    """Print the history of a seed, or run ``--count`` schedules from it on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="schedules to run, from SEED on")
    parser.add_argument("--jobs", type=int, default=1, help="processes to run them in")
    parser.add_argument("--late", action="store_true", help="longer ones with a late coordinator")
    parser.add_argument("--cluster", action="store_true", help="clusters of machines")
    parser.add_argument("--nccl", action="store_true", help="the NCCL transport on modelled GPUs")
    parser.add_argument("--bodies", action="store_true", help="bodies of own loops, in real runs")
    args = parser.parse_args()
    run: Run = simulate_cluster if args.cluster else simulate
    if args.nccl:
        run = simulate_nccl
    if args.bodies:
        run = simulate_bodies
    if args.late:
        run = partial(simulate, draw=draw_late_schedule)
    start, num_events, failed = time.perf_counter(), 0, []
    with get_context("spawn").Pool(args.jobs) as pool:
        seeds = range(args.seed, args.seed + args.count)
        for seed, events, error in pool.imap_unordered(partial(try_seed, run), seeds, chunksize=50):
            num_events += events
            if error:
                failed.append(seed)
                text = error if args.count == 1 else f"{seed}: {error.splitlines()[0]}"
                print(text, flush=True)
    seconds = time.perf_counter() - start
    if args.count == 1 and not failed:
        show(run, args.seed)
    rate = f"{args.count / seconds:.0f} schedules/s, {num_events / seconds:.0f} events/s"
    print(f"{args.count} schedules in {seconds:.1f} s ({rate}), failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
