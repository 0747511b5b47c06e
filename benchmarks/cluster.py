"""Clusters: unequal machines, cost of a round, other systems on the same model, many grants.

Usage: ``python benchmarks/cluster.py [--sections speeds cost peers rounds grants] [--json FILE]``.
``benchmarks/README.md`` describes the measurements.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import multiprocessing
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness import environment, processes
from benchmarks.harness.measure import (
    ENVIRONMENT,
    QUIET,
    Cell,
    Check,
    MachineLoad,
    begin,
    interleaved,
    median_interval,
    milliseconds,
    parser_of,
    save,
    table,
    time_of,
)
from benchmarks.harness.models import Batch, Workload, batches, classification_loss, train_step
from benchmarks.harness.processes import Child, GlooGroup, Step, serve
from coordinator.cluster.cluster_ledger import ClusterLedger, evaluate_round
from coordinator.cluster.grant import Grant
from coordinator.cluster.machine_report import MachineReport, normalize
from runtime import Mean, Timeline, Trainer
from runtime.cluster.engine import ClusterState
from runtime.cluster.lighthouse import Lighthouse, load_torchft
from runtime.cluster.options import COMPRESSIONS, EngineOptions
from runtime.cluster.torchft_engine import TorchftEngine
from runtime.timeline.events import Cause

SLOWED = (1.0, 2.5, 5.0)
"""Factors on the batch time of the machines: speeds of 5 : 2 : 1."""
SPEED_TARGET = 0.90
"""Bound of the joint rate of unequal machines over the sum of their solo rates."""
SPEED_PERIOD_S = 5.0
COST_TARGET_S, COST_TARGET_SHARE = 0.015, 0.01
"""Bounds of the training time lost to a round on a machine, and of its share of a period."""
COST_PERIOD_S, DEFAULT_PERIOD_S = 1.0, 30.0
AROUND_S = 0.25
"""Time before and after a round that counts as part of it."""
NUM_GRANTED, GRANTS_TARGET_S = 1000, 0.020
ROUND_TARGET_S = 0.015
"""Bound of a round's calls between two machines on one host, nothing compressed."""
TARGET_PARAMETERS = 10**6
SIZES = (10**6, 10**7)
NUM_MACHINES, WARM_ROUNDS, NUM_ROUNDS = 2, 5, 50
CALLS = ("quorum", "gather", "all_reduce", "commit")
REPORT = bytes(200)
JOIN_S = 170.0

# -- machines in processes of their own ---------------------------------------------------


def make_million() -> nn.Module:
    """512-986-500 with ReLU."""
    return nn.Sequential(nn.Linear(512, 986), nn.ReLU(), nn.Linear(986, 500))


def make_data(num_samples: int) -> Batch:
    """Synthetic samples of arbitrary content."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 512, generator=generator)
    labels = torch.randint(500, (num_samples,), generator=generator)
    return x[torch.arange(num_samples) % 1024], labels


MILLION = Workload(
    name="million",
    what="MLP 512-986-500 (999,318 parameters), batch 32, AdamW fused",
    batch_size=32,
    sample_bytes=512 * 4,
    make_model=make_million,
    make_optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4, fused=True),
    loss=classification_loss,
    make_data=make_data,
)


PAUSES = (Cause.SYNC, Cause.PARKED, Cause.IDLE, Cause.AVERAGING, Cause.CALLBACKS)
"""Causes of time that a single worker has only in rounds between machines."""


class Clocked(Mean):
    """Records the time of each round's result, and the worker's pauses until then."""

    def __init__(self, timeline: Timeline) -> None:
        self.times: list[float] = []
        self.pauses_s: list[float] = []
        self._timeline = timeline

    def step(self, old: Sequence[Tensor], change: Sequence[Tensor]) -> list[Tensor]:
        """See :meth:`OuterOptimizer.step`."""
        self.times.append(time.monotonic())
        causes = self._timeline.summary().ranks[0].causes
        self.pauses_s.append(sum(causes[cause.label] for cause in PAUSES))
        return super().step(old, change)


def train(
    *,
    address: str | None,
    num_machines: int,
    period_s: float,
    pause_s: float,
    num_samples: int,
    num_epochs: int,
    stop_after_s: float | None,
) -> dict[str, Any]:
    """One machine's run, in its process; ``address`` ``None``: without the others.

    Returns:
        When each step began and each round's result was there, by the clock that all processes
        of a host share; the CPU time of the process at each step; how long the worker waited or
        copied for rounds; and how many samples are in the result.
    """
    steps: list[float] = []
    cpu: list[float] = []
    timeline = Timeline(min_gap_s=3600.0)
    outer, began = Clocked(timeline), threading.Event()

    def train_fn(model: nn.Module, batch: Batch) -> Tensor:
        steps.append(time.monotonic())
        cpu.append(time.process_time())
        began.set()
        loss = MILLION.loss(model, batch)
        if pause_s:
            time.sleep(pause_s * len(batch[0]) / MILLION.batch_size)
        return loss

    builder = (
        Trainer.builder(lambda device: make_million(), MILLION.make_optimizer, train_fn)
        .dataset(make_data(num_samples))
        .batch_size(MILLION.batch_size)
        .num_epochs(num_epochs)
        .devices(["cpu"])
        .policy("cadence")
        .seed(0)
        .tune_allocator(False)
        .timeline(timeline)
        .progress(False)
    )
    if address is not None:
        builder.cluster(address, min_machines=num_machines, period=period_s, outer=outer)
    handle = builder.run()
    if stop_after_s is not None:
        assert began.wait(JOIN_S)
        time.sleep(stop_after_s)
        handle.stop()
    state = handle.join(JOIN_S)
    trained = sum(metrics.num_samples for metrics in state.metrics)
    return {
        "steps": steps,
        "cpu": cpu,
        "rounds": outer.times,
        "pauses_s": outer.pauses_s,
        "num_samples": trained,
    }


def serve_machine() -> None:
    """Run one machine, which trains on request."""
    torch.set_num_threads(1)
    step_seconds()  # PyTorch imports and initialises modules in the first step
    serve(train)


@contextmanager
def machines(num: int) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Processes for several measurements; yields a function that makes all train at once."""
    env = environment(**ENVIRONMENT)
    code = "from benchmarks.cluster import serve_machine; serve_machine()"
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child(f"machine {i}", ["-c", code], env)) for i in range(num)
        ]
        for child in children:
            child.answer()

        def ask(pauses_s: Sequence[float], **request: Any) -> list[dict[str, Any]]:
            for child, pause_s in zip(children, pauses_s, strict=True):
                child.put({"num_machines": num, "pause_s": pause_s, **request})
            return [child.answer(JOIN_S) for child in children]

        yield ask


def own_rates(ask: Callable[..., list[dict[str, Any]]], pauses_s: Sequence[float]) -> list[float]:
    """Samples/s of each machine without exchange, all at once."""
    found = ask(
        pauses_s,
        address=None,
        period_s=1.0,
        num_samples=MILLION.batch_size * 1000,
        num_epochs=1000,
        stop_after_s=OWN_S,
    )
    start = max(one["steps"][0] for one in found) + 1.0
    stop = min(one["steps"][-1] for one in found)
    counts = [sum(start <= at < stop for at in one["steps"]) for one in found]
    return [count * MILLION.batch_size / (stop - start) for count in counts]


OWN_S = 7.0
CLUSTER_S, NUM_EPOCHS = 36.0, 3


def epoch_samples(rate: float, seconds: float) -> int:
    """Samples of an epoch, of :data:`NUM_EPOCHS` that take about so long at this rate."""
    return int(rate * seconds / NUM_EPOCHS / MILLION.batch_size) * MILLION.batch_size


def cluster_rate(
    ask: Callable[..., list[dict[str, Any]]],
    pauses_s: Sequence[float],
    num_samples: int,
    period_s: float,
) -> dict[str, Any]:
    """Samples/s of machines in a cluster, from the second round to the end of the last.

    Args:
        ask: Makes the machines train.
        pauses_s: Sleep of each in a step.
        num_samples: Samples in the data set.
        period_s: Between two rounds.
    """
    lighthouse = Lighthouse(port=0, min_machines=len(pauses_s))
    found = ask(
        pauses_s,
        address=lighthouse.address,
        period_s=period_s,
        num_samples=num_samples,
        num_epochs=NUM_EPOCHS,
        stop_after_s=None,
    )
    lighthouse.close()
    total = num_samples * NUM_EPOCHS
    assert all(one["num_samples"] == total for one in found)
    trained = sum(len(one["steps"]) for one in found) * MILLION.batch_size
    start = max(one["rounds"][1] for one in found)
    end = max(one["rounds"][-1] for one in found)
    before = sum(at < start for one in found for at in one["steps"]) * MILLION.batch_size
    return {
        "rate": (total - before) / (end - start),
        "seconds": end - start,
        "rounds": min(len(one["rounds"]) for one in found),
        "trained_twice": trained - total,
        "machines": found,
    }


def step_seconds() -> float:
    """Samples/s of a bare loop."""
    model = make_million()
    optimizer = MILLION.make_optimizer(model.parameters())
    order = batches(make_data(MILLION.batch_size * 100), MILLION.batch_size, seed=0)
    times = []
    for batch in itertools.islice(order, 300):
        start = time.perf_counter()
        train_step(MILLION, model, optimizer, batch, 0.0)
        times.append(time.perf_counter() - start)
    return statistics.median(times[100:])


# -- sections -----------------------------------------------------------------------------


def speeds(args: argparse.Namespace) -> tuple[dict[str, Any], list[Check]]:
    """Machines of unequal speed: their joint rate over the sum of their solo rates."""
    step_s = step_seconds()
    pauses_s = [(slowed - 1) * step_s for slowed in SLOWED]
    rows = []
    with machines(len(SLOWED)) as ask:
        for _ in range(args.repeat):
            load = MachineLoad()
            own = own_rates(ask, pauses_s)
            num_samples = epoch_samples(sum(own), CLUSTER_S)
            found = cluster_rate(ask, pauses_s, num_samples, SPEED_PERIOD_S)
            rows.append(
                {
                    "own": own,
                    **{name: value for name, value in found.items() if name != "machines"},
                    "ratio": found["rate"] / sum(own),
                    "used_by_others": load.others(),
                }
            )
    head = ["own rates: samples/s", "together", "ratio", "rounds", "trained twice"]
    cells = [
        [
            " + ".join(f"{rate:,.0f}" for rate in row["own"]),
            f"{row['rate']:,.0f}",
            f"{row['ratio']:.3f}",
            str(row["rounds"]),
            str(row["trained_twice"]),
        ]
        for row in rows
    ]
    print(f"Machines slowed {SLOWED}, a round every {SPEED_PERIOD_S:g} s; {MILLION.what}:\n")
    print(table(head, cells), end="\n\n", flush=True)
    ratio = statistics.median(row["ratio"] for row in rows)
    what = f"machines 5 : 2 : 1 in speed, period {SPEED_PERIOD_S:g} s, over their own rates"
    return {"rows": rows}, [Check(what=what, measured=ratio, wanted=SPEED_TARGET)]


def round_cpu_s(found: dict[str, Any]) -> list[float]:
    """CPU time of a machine's process for each round: the excess of the steps around it over
    those between rounds.
    """
    rounds = [at for at in found["rounds"][2:-1] if at < found["steps"][-1] - 2 * AROUND_S]

    def near(at: float) -> bool:
        return any(abs(at - round_at) < AROUND_S for round_at in found["rounds"])

    begun = found["rounds"][1] + AROUND_S
    gaps = [
        (at, after - before)
        for at, (before, after) in zip(
            found["steps"][:-1], itertools.pairwise(found["cpu"]), strict=True
        )
    ]
    usual = statistics.fmean(used for at, used in gaps if at > begun and not near(at))
    taken = []
    for round_at in rounds:
        own = [used for at, used in gaps if abs(at - round_at) < AROUND_S]
        taken.append(sum(own) - usual * len(own))
    return taken


def cost(args: argparse.Namespace) -> tuple[dict[str, Any], list[Check]]:
    """Cost of a round between two machines in training time of each."""
    load = MachineLoad()
    with machines(NUM_MACHINES) as ask:
        own = sum(own_rates(ask, [0.0] * NUM_MACHINES))
        num_samples = epoch_samples(own, CLUSTER_S / 2)
        found = cluster_rate(ask, [0.0] * NUM_MACHINES, num_samples, COST_PERIOD_S)
    # From the second round on: the first one waits for the start of the other machine.
    pauses = [
        (one["pauses_s"][-1] - one["pauses_s"][1]) / (len(one["rounds"]) - 2)
        for one in found["machines"]
    ]
    taken = [seconds for machine in found["machines"] for seconds in round_cpu_s(machine)]
    middle, low, high = median_interval(taken)
    print(
        f"A round of two machines; {MILLION.what}:\n\n"
        f"the worker waits and copies {milliseconds(max(pauses))} ms a round; the process computes "
        f"{milliseconds(middle)} ms for it (median of {len(taken)}, {low * 1e3:.1f} to "
        f"{high * 1e3:.1f}), in other threads for the most part\n",
        flush=True,
    )
    result = {"pauses_s": pauses, "cpu_s": taken, "used_by_others": load.others()}
    return result, [
        Check(
            what="a round of two machines, 1e6 parameters: seconds that the worker does not train",
            measured=max(pauses),
            wanted=COST_TARGET_S,
            at_most=True,
        ),
        Check(
            what=f"that and all CPU time of a round, as part of a period of {DEFAULT_PERIOD_S:g} s",
            measured=(max(pauses) + middle) / DEFAULT_PERIOD_S,
            wanted=COST_TARGET_SHARE,
            at_most=True,
        ),
    ]


@contextmanager
def bare(pause_s: float) -> Iterator[Step]:
    """A loop without exchanges."""
    model = make_million()
    optimizer = MILLION.make_optimizer(model.parameters())
    yield lambda batch: train_step(MILLION, model, optimizer, batch, pause_s)


@contextmanager
def diloco(pause_s: float, period: int, address: str) -> Iterator[Step]:
    """Torchft's own ``DiLoCo``, each rank as a replica group of one."""
    load_torchft("DiLoCo")  # quietly
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    model = make_million()
    optimizer = MILLION.make_optimizer(model.parameters())
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=dist.get_world_size(),
        use_async_quorum=False,
        init_sync=False,  # all start with the same weights
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://{address}",
        replica_id=f"rank-{dist.get_rank()}",
        hostname="127.0.0.1",
    )
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with DiLoCo(manager, [model], optimizer, outer, sync_every=period):
        yield lambda batch: train_step(MILLION, model, optimizer, batch, pause_s)
    dist.barrier()  # the first to leave would fail the other's round
    assert manager.current_step() > 0, "no round of DiLoCo was committed"
    manager.shutdown(wait=False)


BARE, HERE = "bare loops, no exchange", "this runtime"
PEERS = {
    "DistributedDataParallel": "ddp",
    "Accelerate's LocalSGD": "local_sgd",
    "torchft's DiLoCo": "diloco",
}
NEEDS = {"local_sgd": "accelerate", "diloco": "torchft"}
IN_PERIODS = ("local_sgd", "diloco")
PEER_S, NUM_PERIODS, NUM_WARMUP = 6.0, 2, 100
"""Seconds of a peer that has no period, periods of the others, steps before the clock starts."""
_data: dict[int, Batch] = {}


def own_batches(num_samples: int) -> Iterator[Batch]:
    """This rank's part of each epoch: every batch is one rank's, as in ``DistributedSampler``."""
    if num_samples not in _data:
        _data.clear()
        _data[num_samples] = make_data(num_samples)
    x, labels = _data[num_samples]
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(num_samples, generator=generator)
        for indices in order.split(MILLION.batch_size)[dist.get_rank() :: dist.get_world_size()]:
            yield x.index_select(0, indices), labels.index_select(0, indices)


def peer_rates(
    *,
    system: str,
    period: int,
    num_steps: int | None,
    num_samples: int,
    pauses_s: list[float],
    address: str,
) -> list[float]:
    """Samples/s of each rank of another system; runs in each of them.

    Args:
        system: ``"bare"``, or of :data:`PEERS`.
        period: Steps between two averages.
        num_steps: Steps that are timed, from a barrier to a barrier; ``None``: as many as each
            rank makes in :data:`PEER_S`.
        num_samples: Samples in the data set.
        pauses_s: Sleep of each rank within a step.
        address: The lighthouse, where there is one.
    """
    pause_s = pauses_s[dist.get_rank()]
    processes.PERIOD = period
    torch.manual_seed(0)  # the same weights on all ranks
    order = own_batches(num_samples)
    made: AbstractContextManager[Step]
    match system:
        case "bare":
            made = bare(pause_s)
        case "diloco":
            made = diloco(pause_s, period, address)
        case _:
            made = processes.PEERS[system](MILLION, pause_s)
    with made as step:
        # DiLoCo connects in its first round.
        for batch in itertools.islice(order, period if system == "diloco" else NUM_WARMUP):
            step(batch)
        dist.barrier()
        start, done = time.perf_counter(), 0
        while done < num_steps if num_steps else time.perf_counter() < start + PEER_S:
            step(next(order))
            done += 1
        if num_steps:
            dist.barrier()
        elapsed_s = time.perf_counter() - start
    rates = [0.0] * len(pauses_s)
    dist.all_gather_object(rates, done * MILLION.batch_size / elapsed_s)
    return rates


def measure_peers(
    slowed: float, step_s: float, repeat: int, systems: dict[str, str]
) -> dict[str, Any]:
    """Two machines, the second one slowed, under each system in turn."""
    pauses_s = [0.0, (slowed - 1) * step_s]
    rounds: list[dict[str, Any]] = []
    with ExitStack() as stack:
        ask = stack.enter_context(machines(NUM_MACHINES))
        group = stack.enter_context(GlooGroup(NUM_MACHINES, "benchmarks.cluster:peer_rates"))

        def rates_of(system: str, num_steps: int | None, num_samples: int, period: int) -> Any:
            lighthouse = Lighthouse(port=0, min_machines=NUM_MACHINES)
            try:
                return group.ask(
                    system=system,
                    period=period,
                    num_steps=num_steps,
                    num_samples=num_samples,
                    pauses_s=pauses_s,
                    address=lighthouse.address,
                )
            finally:
                lighthouse.close()

        first = rates_of("bare", None, MILLION.batch_size * 1000, NUM_WARMUP)
        total, lockstep = sum(first), NUM_MACHINES * min(first)
        num_samples = epoch_samples(total, CLUSTER_S / 2)
        period = round(SPEED_PERIOD_S * min(first) / MILLION.batch_size)

        def here(expected: float) -> float:
            found = cluster_rate(ask, pauses_s, num_samples, SPEED_PERIOD_S)
            rounds.append({key: found[key] for key in ("seconds", "rounds", "trained_twice")})
            return float(found["rate"])

        def peer(system: str) -> Callable[[float], float]:
            def run(expected: float) -> float:
                num_steps: int | None = None
                if system != "bare":
                    per_s = expected / NUM_MACHINES / MILLION.batch_size
                    num_steps = round(PEER_S * per_s)
                if system in IN_PERIODS:
                    num_periods = round(NUM_PERIODS * SPEED_PERIOD_S * per_s / period)
                    num_steps = max(1, num_periods) * period
                return float(sum(rates_of(system, num_steps, num_samples, period)))

            return run

        cells = [
            Cell(key=BARE, guess=total, run=peer("bare")),
            Cell(key=HERE, guess=total, run=here),
        ]
        for name, system in systems.items():
            # The guess is for DDP's exchange at each step.
            guess = lockstep if system in IN_PERIODS else lockstep / 3
            cells.append(Cell(key=name, guess=guess, run=peer(system)))
        measured = interleaved(cells, repeat)
    return {"period": period, "num_samples": num_samples, "here": rounds, **measured.record()}


def peers(args: argparse.Namespace) -> tuple[dict[str, Any], list[Check]]:
    """Two machines against other systems for two processes, equal and unequal."""
    step_s = step_seconds()
    missing = {
        name: f"{NEEDS[system]} is not installed"
        for name, system in PEERS.items()
        if system in NEEDS and importlib.util.find_spec(NEEDS[system]) is None
    }
    systems = {name: system for name, system in PEERS.items() if name not in missing}
    found = {
        f"{slowed:g}": measure_peers(slowed, step_s, args.repeat, systems)
        for slowed in args.slowdowns
    }
    names = [BARE, HERE, *systems]
    head = ["second machine slowed", *names]
    cells = [
        [
            f"{slowed} times",
            *(f"{rate:,.0f} ({rate / rates[BARE]:.2f})" for rate in map(rates.get, names)),
        ]
        for slowed, rates in ((slowed, one["median_rates"]) for slowed, one in found.items())
    ]
    print(
        f"Samples/s of two machines, and over bare loops; an average every {SPEED_PERIOD_S:g} s, "
        f"medians of {args.repeat}; {MILLION.what}:\n\n{table(head, cells)}\n"
    )
    for name, why in missing.items():
        print(f"{name} is skipped: {why}.")
    print(flush=True)
    return {"step_s": step_s, "slowed": found, "skipped": missing}, []


def cluster_machine(address: str, rank: int, size: int, compression: str | None, out: Any) -> None:
    """One machine's rounds; puts the seconds of each call of each round into a queue."""
    state = ClusterState(tensors={"weights": torch.zeros(size)}, meta={})
    options = EngineOptions(
        address=address,
        min_machines=NUM_MACHINES,
        machine=f"machine-{rank}",
        token="benchmark",
        compression=compression,
    )
    engine = TorchftEngine(options, lambda: state)
    delta = torch.full((size,), 0.5)
    seconds = []
    for _ in range(WARM_ROUNDS + NUM_ROUNDS):
        x = delta.clone()
        calls: list[Callable[[], object]] = [
            engine.quorum,
            lambda: engine.gather(REPORT),
            partial(engine.all_reduce, [x]),
            lambda: engine.commit(True),
        ]
        seconds.append([time_of(call) for call in calls])
    assert torch.allclose(x, delta * NUM_MACHINES, atol=0.05)
    out.put((rank, seconds[WARM_ROUNDS:]))
    engine.close()


def measure_rounds(size: int, compression: str | None) -> dict[str, Any]:
    """Rounds of machines that are processes of this host: medians of a whole one and its calls."""
    spawn = multiprocessing.get_context("spawn")
    out: Any = spawn.Queue()
    lighthouse = Lighthouse(port=0, min_machines=NUM_MACHINES)
    load = MachineLoad()
    processes = [
        spawn.Process(
            target=cluster_machine, args=(lighthouse.address, rank, size, compression, out)
        )
        for rank in range(NUM_MACHINES)
    ]
    for process in processes:
        process.start()
    found = dict(out.get(timeout=JOIN_S) for _ in processes)
    for process in processes:
        process.join(JOIN_S)
    lighthouse.close()
    rounds = found[0]
    return {
        "parameters": size,
        "compression": compression or "none",
        "rounds": len(rounds),
        "round_s": statistics.median(map(sum, rounds)),
        "calls_s": {
            name: statistics.median(calls)
            for name, calls in zip(CALLS, zip(*rounds, strict=True), strict=True)
        },
        "used_by_others": load.others(),
    }


def rounds_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each size and compression."""
    head = ["parameters", "compression", "round: ms", *CALLS]
    cells = [
        [
            f"{row['parameters']:.0e}",
            row["compression"],
            milliseconds(row["round_s"]),
            *(milliseconds(row["calls_s"][name]) for name in CALLS),
        ]
        for row in rows
    ]
    return table(head, cells)


def judge_rounds(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """The verdict on the size to which the target applies."""
    return [
        Check(
            what=f"a round of {NUM_MACHINES} machines, 1e6 parameters, in seconds",
            measured=row["round_s"],
            wanted=ROUND_TARGET_S,
            at_most=True,
        )
        for row in rows
        if row["parameters"] == TARGET_PARAMETERS and row["compression"] == "none"
    ]


def rounds(args: argparse.Namespace) -> tuple[dict[str, Any], list[Check]]:
    """The calls of a round, without concurrent training."""
    rows = [measure_rounds(size, kind) for size in SIZES for kind in COMPRESSIONS]
    print(f"Rounds of {NUM_MACHINES} machines on this host, medians of {NUM_ROUNDS}:\n")
    print(rounds_table(rows), end="\n\n", flush=True)
    return {"rows": rows}, judge_rounds(rows)


def reports_of(
    ledger: ClusterLedger, seconds: Sequence[float], rng: random.Random
) -> list[MachineReport]:
    """Reports that machines of these speeds would report at the end of a period."""
    found = []
    for i, batch_s in enumerate(seconds):
        name = f"machine-{i:04}"
        granted = ledger.grants.get(name, Grant()).batches
        todo = round(rng.uniform(0.9, 1.1) * ledger.period_s / batch_s)
        done, kept = [], []
        for epoch, spans in granted:
            for span in spans:
                cut = min(len(span), todo)
                todo -= cut
                done.append((epoch, (span[:cut],)))
                kept.append((epoch, (span[cut : cut + 4],)))
        found.append(
            MachineReport(
                machine=name,
                step=ledger.step,
                lineage=ledger.lineage,
                consumed=ledger.consumed,
                settings=ledger.settings,
                done=normalize(done),
                kept=normalize(kept),
                weight=1.0,
                seconds_per_batch=batch_s,
            )
        )
    return found


def grants(args: argparse.Namespace) -> tuple[dict[str, Any], list[Check]]:
    """CPU time of every machine's computation in a round of many machines: grants, and total."""
    rng = random.Random(0)
    seconds = [rng.uniform(0.05, 0.5) for _ in range(NUM_GRANTED)]
    ledger = ClusterLedger(
        settings={}, num_epochs=3, batches_per_epoch=600 * NUM_GRANTED, period_s=30.0
    )
    grants_s: list[float] = []
    wholes: list[float] = []
    while not ledger.complete and len(grants_s) < 40:
        reports = reports_of(ledger, seconds, rng)
        start = time.process_time()
        outcome = evaluate_round(ledger, reports)
        wholes.append(time.process_time() - start)
        assert not outcome.void, outcome.void
        ledger = outcome.ledger
        start = time.process_time()
        again = ledger.compute_grants(reports)
        grants_s.append(time.process_time() - start)
        assert again == ledger.grants
    middle = statistics.median(grants_s)
    print(
        f"CPU time of a round of {NUM_GRANTED} machines on each, medians of {len(grants_s)}: "
        f"the grants {milliseconds(middle)} ms (at most {milliseconds(max(grants_s))}), the whole "
        f"verdict {milliseconds(statistics.median(wholes))} ms.\n",
        flush=True,
    )
    what = f"the grants for {NUM_GRANTED} machines, seconds of CPU time"
    check = Check(what=what, measured=middle, wanted=GRANTS_TARGET_S, at_most=True)
    return {"deals_s": grants_s, "verdicts_s": wholes}, [check]


# -- the command line ---------------------------------------------------------------------

SECTIONS = {"speeds": speeds, "cost": cost, "peers": peers, "rounds": rounds, "grants": grants}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of speeds and peers")
    parser.add_argument(
        "--slowdowns",
        type=float,
        nargs="+",
        default=[1.0, 2.0],
        help="factors on the second machine's step time, in peers",
    )
    args = parser.parse_args()
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    if min(args.slowdowns) < 1:
        parser.error("--slowdowns must be at least 1")
    result = begin(ENVIRONMENT)
    checks: list[Check] = []
    load = MachineLoad()
    for name in args.sections:
        found, judged = SECTIONS[name](args)
        checks += judged
        result |= {name: found, "targets": [check.record() for check in checks]}
        save(args.json, result)
    print("\n".join(map(str, checks)))
    print(f"Other processes used {load.others():.0%} of the cores; quiet is {QUIET:.0%}.")


if __name__ == "__main__":
    main()
