"""Parts of first contact, each of them cases that run one after the other in one process."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed
from torch import nn

from benchmarks.gpu.sections import driver_version, shared_memory_gib
from runtime import ApplyPolicy, ShardingStrategy, Trainer, create_collectives, current_worker
from runtime.collective.nccl_library import loaded_version, shared_gpu_fault, version_name
from runtime.core.errors import CollectiveAborted
from tests.gpu import probes, runs
from tests.gpu.contact_record import BAD, NotHere, Record
from tests.gpu.ddp_process import workload_of
from tests.gpu.delays import LONG, delay
from tests.gpu.placing import Placement, default_placement, on_ranks, run_ends
from tests.gpu.processes import TRACERS

SYNC = ApplyPolicy.SYNC

Figures = Mapping[str, Any] | None
Case = Callable[[], Figures]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Parameters of the cases of a part.

    Attributes:
        placement: Devices of the ranks, and their transport.
        times: Minimum number of firings of each probe.
        limit_s: Seconds for the whole part.
    """

    placement: Placement
    times: int
    limit_s: float


def setting_of(record: Record, times: int, limit_s: float) -> Setting:
    """The setting on this machine, by the results so far."""
    nccl_works = not set(BAD).intersection(record.results("plain", "threads"))
    placement = default_placement(nccl_works=nccl_works)
    return Setting(placement=placement, times=times, limit_s=limit_s)


# -- facts ------------------------------------------------------------------------------------


def facts(setting: Setting) -> dict[str, Case]:
    return {"software": _software, "devices": _devices, "ranks": partial(_ranks, setting)}


def _software() -> Figures:
    prefixes = ("NCCL_", "TORCH_NCCL_", "CUDA_", "LD_PRELOAD")
    has_nccl = torch.distributed.is_nccl_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "NCCL loaded": version_name(loaded_version()),
        "NCCL compiled": torch.cuda.nccl.version() if has_nccl else None,
        "two ranks on one GPU": shared_gpu_fault() or "accepted",
        "environment": {k: v for k, v in os.environ.items() if k.startswith(prefixes)},
        "stack programs": [name for name in TRACERS if shutil.which(name)],
    }


def _devices() -> Figures:
    found: dict[str, Any] = {
        "cores": os.cpu_count(),
        "memory, GiB": round(psutil.virtual_memory().total / 2**30, 1),
        "shared memory, GiB": shared_memory_gib(),
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found[f"cuda:{index}"] = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
    program = shutil.which("nvidia-smi")
    if program is not None:
        command = [program, "topo", "-m"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        found["topology"] = done.stdout
    return found


def _ranks(setting: Setting) -> Figures:
    return {"ranks": str(setting.placement)}


# -- PyTorch alone ----------------------------------------------------------------------------


def plain(setting: Setting) -> dict[str, Case]:
    """Ranks of PyTorch alone, before anything that is built on it."""
    if not setting.placement.is_cuda:
        return {"threads": lambda: _plain_threads(setting.placement)}
    placement = default_placement()
    if placement.kind != "nccl":
        return {"threads": partial(_refuse, str(shared_gpu_fault()))}
    return {
        "threads": lambda: _plain_threads(placement),
        "processes": lambda: _ddp_rate("mlp", 20, placement, limit_s=45.0),
    }


def _refuse(why: str) -> Figures:
    raise NotHere(why)


def _plain_threads(placement: Placement) -> Figures:
    """All-reductions between threads: one process group, one stream, one thread for each rank."""
    c10d: Any = torch.distributed
    devices, store = placement.devices, c10d.HashStore()
    world_size, limit = len(devices), timedelta(seconds=20)
    meeting = threading.Barrier(world_size)
    seconds: list[float] = []

    def backend_of(rank: int) -> Any:
        prefixed = c10d.PrefixStore("plain", store)
        if not placement.is_cuda:
            return c10d.ProcessGroupGloo(prefixed, rank, world_size, limit)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = limit
        return c10d.ProcessGroupNCCL(prefixed, rank, world_size, options)

    def work(rank: int) -> None:
        device = devices[rank]
        backend = backend_of(rank)
        if placement.is_cuda:
            torch.cuda.set_device(device)
            torch.cuda.set_stream(torch.cuda.Stream(device))
            meeting.wait(20)
            backend.eager_connect_single_device(device)
        options = c10d.AllreduceOptions()
        options.asyncOp = False
        for step in range(100):
            tensor = torch.full((1 << 16,), float(rank + step), device=device)
            meeting.wait(20)
            begin = time.perf_counter()
            reduction = backend.allreduce([tensor], options)
            if placement.is_cuda:
                torch.cuda.current_stream().synchronize()
            else:
                reduction.wait()
            if rank == 0:
                seconds.append(time.perf_counter() - begin)
            expected = world_size * step + sum(range(world_size))
            assert tensor.unique().tolist() == [expected], f"step {step}: {tensor.unique()}"
        meeting.wait(20)
        if placement.is_cuda:
            backend.shutdown()

    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=guarded, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    if errors:  # the first error is the cause; the other ranks were aborted
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank does not return"
    return {"all-reduce of 256 KiB, us": round(1e6 * statistics.median(seconds), 1)}


# -- training ---------------------------------------------------------------------------------


def train(setting: Setting) -> dict[str, Case]:
    """Runs of all ranks, whose parameters equal those of one device."""
    placement = setting.placement
    name = "SYNC, 4 buckets or more, fused AdamW, 300 steps"
    found: dict[str, Case] = {name: partial(_equals_one_device, placement, bucket_cap_mb=BUCKET_MB)}
    short = partial(_equals_one_device, placement, num_epochs=3)
    found["SYNC batch norm"] = partial(short, norm=True, sync_batchnorm=True)
    for strategy in ShardingStrategy:
        if strategy is not ShardingStrategy.HYBRID_SHARD:
            found[f"sharded, {strategy.name}"] = partial(short, sharded=strategy)
    found["resumed"] = lambda: _resumes(placement)
    found["the host runs ahead"] = lambda: _runs_ahead(placement)
    return found


WIDTH, DEPTH, BATCH, NUM_BATCHES, NUM_EPOCHS = 64, 6, 8, 30, 10
BUCKET_MB = 0.04


def _net(device: torch.device, *, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH, bias=not norm)]
        layers += [nn.BatchNorm1d(WIDTH)] if norm else []
        layers += [nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1)).double().to(device)


def _loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    out: torch.Tensor = model(batch[0]).squeeze(1)
    return (out - batch[0].mean(1)).square().mean()


def _builder(
    placement: Placement,
    *,
    num_ranks: int | None = None,
    norm: bool = False,
    num_epochs: int = NUM_EPOCHS,
    loss: Any = _loss,
    **settings: Any,
) -> Any:
    """A ``SYNC`` run with the same global batches for any number of ranks."""
    generator = torch.Generator().manual_seed(1)
    num_all = len(placement.devices)
    num = num_ranks or num_all
    x = torch.randn(BATCH * num_all * NUM_BATCHES, WIDTH, generator=generator, dtype=torch.float64)
    builder = (
        Trainer.builder(
            partial(_net, norm=norm), lambda p: torch.optim.AdamW(p, 1e-3, fused=True), loss
        )
        .dataset((x,))
        .batch_size(BATCH * num_all // num)
        .num_epochs(num_epochs)
        .devices(placement.devices[:num])
        .policy(SYNC)
        .balance(False)
        .tune_allocator(False)
        .progress(False)
        .seed(0)
    )
    if num > 1:
        builder.backend(placement.backend).collective_timeout(20)
    for name, value in settings.items():
        getattr(builder, name)(value)
    return builder


def _relative_error(found: Any, expected: Any) -> float:
    return max(
        float((found.params[name].cpu() - p.cpu()).norm() / p.norm())
        for name, p in expected.params.items()
    )


ONLY_FOR_SEVERAL = ("bucket_cap_mb", "sharded", "sync_batchnorm")


def _equals_one_device(placement: Placement, **settings: Any) -> Figures:
    begin = time.monotonic()
    handle = _builder(placement, **settings).run()
    many = handle.join(120)
    assert handle.backend is placement.backend
    seconds = time.monotonic() - begin
    alone = {name: value for name, value in settings.items() if name not in ONLY_FOR_SEVERAL}
    one = _builder(placement, num_ranks=1, **alone).run().join(120)
    error = _relative_error(many, one)
    assert error < 1e-5, f"parameters differ by {error:.1e} from those of one device"
    assert many.metrics[-1].avg_loss < many.metrics[0].avg_loss
    figures: dict[str, Any] = {"relative error": error, "seconds": round(seconds, 2)}
    if "bucket_cap_mb" in settings:
        num_bytes = sum(p.numel() * p.element_size() for p in one.params.values())
        figures["buckets, about"] = int(num_bytes / (settings["bucket_cap_mb"] * 2**20))
        assert figures["buckets, about"] >= 4
    return figures


def _resumes(placement: Placement) -> Figures:
    """A run that is resumed from its checkpoint has the bits of one that was not interrupted."""
    whole = _builder(placement, num_epochs=4).run().join(120)
    with tempfile.TemporaryDirectory() as folder:
        _builder(placement, num_epochs=2, checkpoint_dir=folder).run().join(120)
        resumed = _builder(placement, num_epochs=4, resume=folder).run().join(120)
    for name, expected in whole.params.items():
        assert torch.equal(resumed.params[name].cpu(), expected.cpu()), name
    return None


def _runs_ahead(placement: Placement) -> Figures:
    """Steps are launched before the device has ended those in front of them."""
    if not placement.is_cuda:
        raise NotHere("a CPU runs each step at once")
    ahead: list[bool] = []
    last: dict[int, torch.cuda.Event] = {}

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        rank = current_worker().rank
        if rank in last:
            ahead.append(not last[rank].query())
        delay(batch[0].device, 4 * LONG)  # more than the launches of a step take
        last[rank] = torch.cuda.Event()
        last[rank].record()
        return _loss(model, batch)

    _builder(placement, num_epochs=2, loss=loss).run().join(120)
    share = sum(ahead) / len(ahead)
    assert placement.kind != "nccl" or share > 0.7, f"{share:.0%} of the steps"
    return {"share of steps": round(share, 3)}


# -- hangs ------------------------------------------------------------------------------------


def hangs(setting: Setting) -> dict[str, Case]:
    placement, times = setting.placement, setting.times
    found: dict[str, Case] = {}
    for mode, kind in probes.pairs():
        found[f"{mode}: {kind}"] = partial(probes.probe, placement, mode, kind, times)
    if not placement.is_cuda:
        for kind in probes.KINDS:
            found[f"NCCL over stand-ins: {kind}"] = partial(probes.probe_stand_in, kind, times)
    return found


# -- failures ---------------------------------------------------------------------------------


def failures(setting: Setting) -> dict[str, Case]:
    placement = setting.placement
    devices = list(placement.devices)
    found: dict[str, Case] = {
        "abort in mid-exchange": lambda: _abort(placement, num_delays=100),
        "abort of an exchange behind 4 s of other work": lambda: _abort(placement, num_delays=800),
    }
    for policy in ApplyPolicy:
        way = (policy, placement.backend)
        bodies = {
            "a rank raises": lambda way: runs.raising(devices, way),
            "a rank stalls": lambda way: runs.stalling(devices, way),
            "survivors of a dead rank": lambda way: runs.survivors_continue(devices, way, 1),
            "out of memory": lambda way: _exhaust(devices, way),
        }
        for name, body in bodies.items():
            found[f"{policy.name}: {name}"] = partial(body, way)
    return found


def _exhaust(devices: list[torch.device], way: Any) -> None:
    def grab() -> None:
        if devices[1].type == "cpu":
            raise torch.OutOfMemoryError("planted")
        num_bytes = 2 * runs.BUDGET_GIB * 2**30
        torch.empty(num_bytes, dtype=torch.uint8, device=devices[1])

    runs.exhaust(devices, way, grab, "planted" if devices[1].type == "cpu" else "memory")


def _abort(placement: Placement, num_delays: int) -> Figures:
    """Every rank raises soon, and the next group works."""
    world_size = len(placement.devices)
    arrived = threading.Barrier(world_size + 1)
    ends = create_collectives(world_size, placement.kind, placement.devices, 30.0)
    aborted_at: list[float] = []

    def abort() -> None:
        arrived.wait(20)
        aborted_at.append(time.monotonic())
        ends[0].abort()

    def work(end: Any, device: torch.device) -> float:
        tensor = torch.ones(1 << 20, device=device)
        end.all_reduce_(tensor)
        if end.rank == 0:
            for _ in range(num_delays):
                delay(device, LONG)
        arrived.wait(20)
        try:
            for _ in range(100_000):
                end.all_reduce_(tensor)
        except CollectiveAborted:
            return time.monotonic() - aborted_at[0]
        raise AssertionError("nothing was raised")

    thread = threading.Thread(target=abort, daemon=True)
    thread.start()
    try:
        seconds = run_ends(ends, placement.devices, work)
    except CollectiveAborted:  # at the end of a rank's stream
        seconds = [time.monotonic() - aborted_at[0]]
    finally:
        for end in ends:
            end.close()
    thread.join(10)
    assert max(seconds) < 10, f"{max(seconds):.1f} s from the abort to the error"
    on_ranks(
        placement.kind,
        placement.devices,
        lambda end, device: end.all_reduce_(torch.ones(10, device=device)),
    )
    return {"abort to error, s": round(max(seconds), 3)}


# -- speed ------------------------------------------------------------------------------------


def speed(setting: Setting) -> dict[str, Case]:
    found: dict[str, Case] = {"cost of an exchange": lambda: _exchange_cost(setting.placement)}
    for name in ("mlp", "transformer") if setting.placement.is_cuda else ("mlp",):
        found[f"{name}, beside DistributedDataParallel"] = partial(_beside_ddp, name, setting)
    return found


class _Launches:
    """A process group that records when its all-reductions are issued."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.times: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def allreduce(self, *arguments: Any) -> Any:
        self.times.append(time.perf_counter())
        return self._backend.allreduce(*arguments)


def _exchange_cost(placement: Placement, count: int = 300) -> Figures:
    """Small all-reductions: from arrival to launch, and from arrival to the end."""

    def work(end: Any, device: torch.device) -> tuple[list[float], list[float], list[float]]:
        launches = None
        if getattr(end, "_backend", None) is not None:
            launches = end._backend = _Launches(end._backend)
        tensor = torch.ones(1024, device=device)
        arrivals, ends = [], []
        for _ in range(count):
            arrivals.append(time.perf_counter())
            end.all_reduce_(tensor)
            ends.append(time.perf_counter())
        return arrivals, launches.times if launches else [], ends

    timed = on_ranks(placement.kind, placement.devices, work)
    last = [max(times) for times in zip(*(t[0] for t in timed), strict=True)]
    over = [max(times) for times in zip(*(t[2] for t in timed), strict=True)]
    found = {"last arrival to the end, us": _median_us(last, over)}
    launched = [times for _, times, _ in timed]
    if all(len(times) == count for times in launched):
        latest = [max(times) for times in zip(*launched, strict=True)]
        found["last arrival to the last launch, us"] = _median_us(last, latest)
    return found


def _median_us(begins: list[float], ends: list[float]) -> float:
    pairs = list(zip(begins, ends, strict=True))[len(begins) // 10 :]
    return round(1e6 * statistics.median(end - begin for begin, end in pairs), 1)


def _beside_ddp(name: str, setting: Setting) -> Figures:
    placement = setting.placement
    if placement.is_cuda and placement.kind != "nccl":
        raise NotHere("NCCL does not work between these ranks")
    num_steps = {"mlp": 400, "transformer": 60}[name] if placement.is_cuda else 60
    # Processes that share a GPU take turns on it, in which kernels wait for those of the others.
    is_shared = len(set(placement.devices)) < len(placement.devices)
    num_ddp_steps = num_steps // 10 if placement.is_cuda and is_shared else num_steps
    ours, theirs = [], []
    for _ in range(1 if is_shared else 2):
        ours.append(_own_rate(name, num_steps, placement))
        theirs.append(_ddp_rate(name, num_ddp_steps, placement, limit_s=60.0)["samples_per_s"])
    ratio = statistics.median(ours) / statistics.median(theirs)
    return {"samples/s": ours, "DDP, samples/s": theirs, "ratio": round(ratio, 3)}


def _own_rate(name: str, num_steps: int, placement: Placement) -> float:
    """Samples/s of a ``SYNC`` run without its first epoch."""
    workload = workload_of(name, dry=not placement.is_cuda)
    world_size = len(placement.devices)
    per_epoch = max(1, num_steps // 4)
    handle = (
        Trainer.builder(
            lambda device: workload.make_model().to(device), workload.make_optimizer, workload.loss
        )
        .dataset(workload.make_data(per_epoch * workload.batch_size * world_size))
        .batch_size(workload.batch_size)
        .num_epochs(5)
        .devices(placement.devices)
        .policy(SYNC)
        .backend(placement.backend)
        .precision(workload.precision)
        .tune_allocator(False)
        .progress(False)
        .run()
    )
    metrics = handle.join(60).metrics[1:]
    return sum(m.num_samples for m in metrics) / sum(m.epoch_s for m in metrics)


def _ddp_rate(name: str, num_steps: int, placement: Placement, limit_s: float) -> dict[str, float]:
    """Samples/s of ranks in processes, in the environment of ``torchrun``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world_size = len(placement.devices)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    command = [sys.executable, "-m", "tests.gpu.ddp_process", name, str(num_steps)]
    ranks = []
    for rank in range(world_size):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        pipe = subprocess.PIPE if rank == 0 else None
        ranks.append(subprocess.Popen(command, env=environment, stdout=pipe, text=True))
    try:
        text, _ = ranks[0].communicate(timeout=limit_s)
        status = [process.wait(10) for process in ranks]
        if any(status):
            raise RuntimeError(f"the ranks' processes ended with {status}: {text[-500:]}")
    finally:
        for process in ranks:
            process.kill()
    lines = [line for line in text.splitlines() if line.startswith("{")]
    found: dict[str, float] = json.loads(lines[-1])
    return found


# -- the tests of the folder --------------------------------------------------------------------


def rest(setting: Setting) -> dict[str, Case]:
    return {"make test-gpu": partial(_test_gpu, setting)}


def _test_gpu(setting: Setting) -> Figures:
    if not torch.cuda.is_available():
        raise NotHere("there is no CUDA device")
    minutes = max(0.0, setting.limit_s - 10.0) / 60.0
    command = [sys.executable, "-m", "tests.gpu.run", "--minutes", f"{minutes:.2f}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    summary = done.stdout.partition("== Summary\n")[2].strip().splitlines()
    figures = {"files": [line for line in summary if line.startswith("test_")]}
    if done.returncode:
        raise AssertionError("; ".join(line for line in figures["files"] if "passed" not in line))
    return figures


PARTS: dict[str, Callable[[Setting], dict[str, Case]]] = {
    "facts": facts,
    "plain": plain,
    "train": train,
    "hangs": hangs,
    "failures": failures,
    "speed": speed,
    "rest": rest,
}
