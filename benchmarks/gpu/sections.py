"""The worker's loop against loops written by hand, CUDA graphs, and two workers on one GPU."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from benchmarks.gpu import models as gpu_models
from benchmarks.gpu.bench import Bench, interleaved
from benchmarks.gpu.models import GpuWorkload
from benchmarks.gpu_loops import (
    bare_rate,
    crowd_rate,
    epochs_for,
    graph_rate,
    runtime_rate,
)
from runtime import ApplyPolicy, TrainerBuilder

ROUNDS = 3
WORKER, BARE, SYNC = "worker", "bare loop", "worker, SYNC"
GRAPHS, BARE_GRAPH = "worker, cuda_graphs(True)", "bare loop, torch.cuda.graph"


def resident(builder: TrainerBuilder) -> TrainerBuilder:
    """Keep the data on the device."""
    return builder.resident(True)


def in_lockstep(builder: TrainerBuilder) -> TrainerBuilder:
    """The same under SYNC, which deals a whole epoch at once."""
    return builder.resident(True).policy(ApplyPolicy.SYNC)


def with_graphs(builder: TrainerBuilder) -> TrainerBuilder:
    """The same with the whole step as one CUDA graph."""
    any_builder: Any = builder.resident(True)
    return cast(TrainerBuilder, any_builder.cuda_graphs(True))


def conv_loop(bench: Bench) -> None:
    """One worker over resident data against a bare loop over tensors on the device."""
    _compare(bench, gpu_models.conv(dry=bench.dry))


def transformer_loop(bench: Bench) -> None:
    """The same with a transformer."""
    _compare(bench, gpu_models.transformer(dry=bench.dry))


def _compare(bench: Bench, workload: GpuWorkload) -> None:
    data = workload.make_data(bench.pick(60, 6) * workload.batch_size)
    columns = [column.to(bench.device) for column in data]
    seconds = bench.pick(2.5, 0.02)
    probe = bare_rate(workload, columns, bench.device, bench.pick(30, 2))
    steps = round(seconds * probe / workload.batch_size) + 1
    step_ms = 1e3 * workload.batch_size / probe
    bench.note(f"{workload.what}: {step_ms:.1f} ms a step in the bare loop")
    num_epochs = epochs_for(bench, seconds, len(data[0]) / probe)
    run = partial(runtime_rate, bench, workload, data, num_epochs=num_epochs)
    systems = {
        BARE: partial(bare_rate, workload, columns, bench.device, steps),
        WORKER: partial(run, configure=resident),
        SYNC: partial(run, configure=in_lockstep),
    }
    rates = interleaved(bench, systems, rounds=bench.pick(ROUNDS, 1), unit="samples/s")
    what = f"{workload.name}, {step_ms:.1f} ms a step"
    bench.row(f"{what}: worker / bare loop", rates.ratio(WORKER, BARE), target=0.98)
    bench.row(f"{what}: worker under SYNC / bare loop", rates.ratio(SYNC, BARE))
    rates.require([BARE, WORKER])


def graphs(bench: Bench) -> None:
    """A launch-bound MLP: the whole step as one graph against the eager worker."""
    workload = gpu_models.small_mlp(dry=bench.dry)
    data = workload.make_data(bench.pick(800, 8) * workload.batch_size)
    columns = [column.to(bench.device) for column in data]
    seconds = bench.pick(2.0, 0.02)

    def epochs_and_steps(rate: float) -> tuple[int, int]:
        num_epochs = epochs_for(bench, seconds, len(data[0]) / rate)
        return num_epochs, round(seconds * rate / workload.batch_size) + 1

    few = bench.pick(100, 2)
    eager_epochs, eager_steps = epochs_and_steps(bare_rate(workload, columns, bench.device, few))
    graph_epochs, graph_steps = epochs_and_steps(graph_rate(workload, columns, bench.device, few))
    run = partial(runtime_rate, bench, workload, data)
    systems = {
        WORKER: partial(run, num_epochs=eager_epochs, configure=resident),
        GRAPHS: partial(run, num_epochs=graph_epochs, configure=with_graphs),
        BARE: partial(bare_rate, workload, columns, bench.device, eager_steps),
        BARE_GRAPH: partial(graph_rate, workload, columns, bench.device, graph_steps),
    }
    rates = interleaved(bench, systems, rounds=bench.pick(ROUNDS, 1), unit="samples/s")
    bench.note(workload.what)
    bench.row("worker: CUDA graphs / eager", rates.ratio(GRAPHS, WORKER), target=3.0)
    bench.row("bare loop: CUDA graph / eager", rates.ratio(BARE_GRAPH, BARE))
    bench.row("worker / bare loop, both eager", rates.ratio(WORKER, BARE))
    bench.row("worker / bare loop, both CUDA graphs", rates.ratio(GRAPHS, BARE_GRAPH))
    rates.require([WORKER, GRAPHS])


def crowd(bench: Bench) -> None:
    """Two workers on one GPU against one, under CADENCE over the CPU; only told."""
    for workload in (gpu_models.conv(dry=bench.dry), gpu_models.small_mlp(dry=bench.dry)):
        num_batches = bench.pick({"conv": 40, "mlp": 600}[workload.name], 12)
        data = workload.make_data(num_batches * workload.batch_size)
        num_epochs = bench.pick(5, 2)
        run = partial(crowd_rate, bench, workload, data, num_epochs=num_epochs, configure=resident)
        one, two = (f"{workload.name}: {n} worker{'s' * (n > 1)}" for n in (1, 2))
        systems = {one: partial(run, num_workers=1), two: partial(run, num_workers=2)}
        rates = interleaved(bench, systems, rounds=bench.pick(2, 1), unit="samples/s")
        bench.row(f"{workload.name}: 2 workers / 1 worker", rates.ratio(two, one))
        rates.require([one, two])
