"""Checks on a GPU: no wait in the step loop, order of streams, memory, NCCL."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.bench import Bench, tidy
from benchmarks.gpu.models import STALL_S, ended
from coordinator.averaging import Averager
from coordinator.messages import Payload
from runtime import (
    ApplyPolicy,
    AverageBackend,
    Collective,
    CollectiveAborted,
    GpuWorker,
    Trainer,
    UserFunctions,
    WorkerConfig,
    WorkerFailed,
    create_collectives,
    current_worker,
    record_scalar,
)
from runtime.core.threads import IntraOpThreads
from runtime.device.base import Device, PendingCopy
from runtime.device.cuda import CudaDevice, open_device
from runtime.device.cuda_api import CudaApi
from runtime.replica.averager import ReplicaAverager
from runtime.replica.flat import FlatState

# -- no wait for the device in the step loop, as far as PyTorch detects it -----------------


BATCH, WIDTH, NUM_CLASSES = 64, 64, 10
NEVER = 100_000
"""An anchor that no epoch reaches: averages take place at the end of epochs."""


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(WIDTH, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Linear(256, NUM_CLASSES)
        )


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The mean loss, with a scalar on the side."""
    x, y = batch
    logits = model(x)
    record_scalar("accuracy", (logits.argmax(1) == y).float().mean())
    return F.cross_entropy(logits, y)


def waits(model: nn.Module, batch: Any) -> Tensor:
    """The planted fault: a step that reads its loss."""
    loss = loss_of(model, batch)
    return loss if loss.item() > -1.0 else -loss


def set_mode(bench: Bench, mode: str) -> None:
    """Set PyTorch's sync debug mode for the whole process; no effect on a CPU."""
    if not bench.dry:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode is called a prototype
            torch.cuda.set_sync_debug_mode(mode)


class Watch:
    """Makes every wait an error for some steps, after all ranks have reached a step.

    Args:
        bench: Gives the device.
        num_ranks: Ranks of the run.
        warm: Steps of each rank before.
        wanted: Steps of each rank under the watch.

    Attributes:
        watched: Steps of all ranks under the watch.
    """

    def __init__(self, bench: Bench, num_ranks: int, warm: int, wanted: int) -> None:
        self._bench = bench
        self._warm, self._wanted = warm, wanted
        self._lock = threading.Lock()
        self._counts = [0] * num_ranks
        self._before: list[int] | None = None
        self._over = False
        self.watched = 0

    def step(self, rank: int) -> None:
        """Called when a rank begins a step."""
        with self._lock:
            if self._over:
                return
            self._counts[rank] += 1
            if self._before is None:
                if min(self._counts) > self._warm:
                    self._before = list(self._counts)
                    set_mode(self._bench, "error")
                return
            each = [now - then for now, then in zip(self._counts, self._before, strict=True)]
            self.watched = sum(each)
            if min(each) >= self._wanted:
                self._over = True
                set_mode(self._bench, "default")


def watched_run(
    bench: Bench,
    policy: ApplyPolicy,
    num_ranks: int,
    *,
    resident: bool = False,
    anchor: int = NEVER,
    train_fn: Callable[[nn.Module, Any], Tensor] = loss_of,
) -> tuple[int, int, str]:
    """Number of watched steps, their wanted number, and the text of the error, if any."""
    warm, wanted = bench.pick((40, 250), (4, 6))
    watch = Watch(bench, num_ranks, warm, wanted)

    def step(model: nn.Module, batch: Any) -> Tensor:
        watch.step(current_worker().rank)
        return train_fn(model, batch)

    # Room for ranks of unequal speed, all in one epoch.
    num_samples = 3 * num_ranks * (warm + wanted) * BATCH
    data = (torch.randn(num_samples, WIDTH), torch.randint(NUM_CLASSES, (num_samples,)))
    builder = (
        Trainer.builder(
            lambda device: Mlp().to(device),
            lambda params: torch.optim.AdamW(params, 1e-3, fused=True),
            step,
        )
        .dataset(data)
        .batch_size(BATCH)
        .num_epochs(1)
        .devices([bench.device] * num_ranks)
        .policy(policy)
        .anchor(anchor)
        .max_anchor(max(anchor, 200))
        .max_grad_norm(1.0)
        .precision("bf16")
        .resident(resident)
        .stall_timeout(STALL_S)
        .tune_allocator(False)
        .progress(False)
    )
    if policy is not ApplyPolicy.SYNC:
        builder.backend(AverageBackend.CPU)
    error = ""
    try:
        ended(bench, builder.run())
    except WorkerFailed as failure:
        error = f"{failure}; {failure.__cause__}"
    finally:
        set_mode(bench, "default")
    tidy()
    return watch.watched, num_ranks * wanted, error


def lone_steps(bench: Bench) -> tuple[int, str]:
    """Steps of a lone worker that reduces its gradients by NCCL, and the error if any."""
    kind = bench.pick("nccl", "thread")
    (end,) = create_collectives(1, kind, [bench.device])
    endpoints, _ = GpuWorker.channels()
    config = WorkerConfig(
        device=bench.device,
        num_samples=BATCH,
        batch_size=BATCH,
        policy=ApplyPolicy.SYNC,
        report_interval_s=0.0,
    )
    functions = UserFunctions(
        model_factory=lambda device: Mlp().to(device),
        optim_factory=lambda params: torch.optim.AdamW(params, 1e-3, fused=True),
        train_fn=loss_of,
    )
    device: Device = open_device(bench.device, 1)
    count, error = 0, ""
    IntraOpThreads.acquire()
    try:
        with device.activate():
            worker = GpuWorker(config, functions, endpoints, collective=end, device=device)
            batch = (
                torch.randn(BATCH, WIDTH, device=bench.device),
                torch.randint(NUM_CLASSES, (BATCH,), device=bench.device),
            )
            for _ in range(5):
                worker.train_step(batch)
            set_mode(bench, "error")
            try:
                for _ in range(bench.pick(200, 3)):
                    worker.train_step(batch)
                    worker.handle_control()
                    count += 1
            except RuntimeError as failure:
                error = f"{type(failure).__name__}: {failure}; {failure.__cause__}"
            finally:
                set_mode(bench, "default")
            worker.close()
    finally:
        IntraOpThreads.release()
        end.close()
    return count, error


def step_loop(bench: Bench) -> None:
    """Whole runs with the mode on, except for start, end and rounds."""
    sync, cadence = ApplyPolicy.SYNC, ApplyPolicy.CADENCE
    ways: list[tuple[str, bool, Callable[[], tuple[int, int, str]]]] = [
        ("SYNC, 1 rank, streamed", True, lambda: watched_run(bench, sync, 1)),
        ("SYNC, 1 rank, resident", True, lambda: watched_run(bench, sync, 1, resident=True)),
        ("CADENCE, 1 rank, streamed", False, lambda: watched_run(bench, cadence, 1)),
        (
            "CADENCE, 2 workers on one GPU, between rounds",
            True,
            lambda: watched_run(bench, cadence, 2),
        ),
        (
            "CADENCE, 2 workers on one GPU, with rounds",
            False,
            lambda: watched_run(bench, cadence, 2, anchor=10),
        ),
    ]
    for name, has_target, run in ways:
        watched, wanted, error = run()
        bench.row(f"steps without a wait: {name}", watched, target=wanted if has_target else None)
        if has_target:
            bench.check(f"no wait was seen: {name}", not error)
        if error:
            bench.note(f"{name}: {error}"[:1000])
    count, error = lone_steps(bench)
    # The host waits for the reduction by an event, which the mode does not see.
    bench.row("steps without a wait but for the reduction: lone worker, SYNC over NCCL", count)
    if error:
        bench.note(f"lone worker, SYNC over NCCL: {error}"[:1000])
    if not bench.dry:
        _, _, error = watched_run(bench, sync, 1, train_fn=waits)
        bench.check("control: a step that reads its loss is noticed", "synchroniz" in error)


# -- the order of streams: delays before every write and copy, and exact averages after --


T = TypeVar("T")
NUM_ROUNDS = 1000
SIZE = 1 << 16
DELAY_CYCLES = 100_000  # some 50 microseconds
LONG_DELAY_CYCLES = 2_000_000  # some millisecond
CHECK_EVERY = 50


class DelayedApi(CudaApi):
    """Delays the current stream before every copy."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        torch.cuda._sleep(DELAY_CYCLES)
        super().copy(target, source)


class UnorderedApi(DelayedApi):
    """The planted fault: no stream waits for another."""

    def wait_event(self, event: Any, stream: Any = None) -> None:
        """Omit the ordering."""


class Counter(nn.Module):
    """Numbers and a buffer that every step adds to, late."""

    seen: Tensor

    def __init__(self, delay_cycles: int) -> None:
        super().__init__()
        self._delay_cycles = delay_cycles
        self.w = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(7, dtype=torch.float64))

    @torch.no_grad()
    def step(self, amount: int) -> None:
        if self.w.is_cuda:
            torch.cuda._sleep(self._delay_cycles)
        self.w.add_(amount)
        self.seen.add_(amount)


class Replica:
    """A replica in a separate thread, and the value that it must have. A context manager.

    Args:
        bench: Gives the device and the timeouts.
        rank: Its steps add ``rank + 1``.
        api: The CUDA API.
        delay_cycles: Delay of a step's writes.
    """

    def __init__(self, bench: Bench, rank: int, api: CudaApi, delay_cycles: int) -> None:
        self._bench = bench
        self._rank, self.expected, self.base = rank, 0.0, 0.0
        self._delay_cycles = delay_cycles
        self._context: Device = open_device(bench.device, 1)
        if bench.device.type == "cuda":
            self._context = CudaDevice(bench.device, api=api)
        self._active = self._context.activate()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"rank-{rank}")

    def __enter__(self) -> Replica:
        self.run(self._build)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(lambda: self._active.__exit__(None, None, None))
        finally:
            self._pool.shutdown(wait=False)

    def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run work in the rank's thread."""
        return self._pool.submit(work, *args).result(self._bench.patience_s())

    def _build(self) -> None:
        self._active.__enter__()
        self._model = Counter(self._delay_cycles).to(self._bench.device)
        self._averager = ReplicaAverager(FlatState(self._model), self._context, None)

    def train(self, num_steps: int) -> None:
        """Launch steps."""
        for _ in range(num_steps):
            self._model.step(self._rank + 1)
            self.expected += self._rank + 1

    def snapshot(self) -> Payload:
        """Take a snapshot; a step is made during its copy."""
        payload, arrival, _ = self._averager.start_snapshot()
        self.base = self.expected
        self.train(1)
        if arrival is not None:
            arrival.wait()
        return payload

    def take(self, average: Payload, value: float) -> PendingCopy | None:
        """Apply an average between two steps."""
        self.train(1)
        arrival = self._averager.apply(average)
        self.expected += value - self.base
        self.train(1)
        return arrival

    def is_exact(self) -> bool:
        """True if the replica has the expected values. Waits for the device."""
        tensors = (self._model.w, self._model.seen)
        return all(bool((tensor == self.expected).all()) for tensor in tensors)


def rounds_until_wrong(
    bench: Bench, api: CudaApi, delay_cycles: int, num_rounds: int
) -> tuple[int, bool]:
    """Number of averages of two ranks, and True if all were exact; stops at an inexact one."""
    averager = Averager()
    exact = True
    done = 0
    with ExitStack() as stack:
        ranks = [stack.enter_context(Replica(bench, rank, api, delay_cycles)) for rank in range(2)]
        while done < num_rounds and exact and (done < 2 or bench.left_s() > 2.0):
            for rank in ranks:
                rank.run(rank.train, 1 + done % 2)
            payloads = [rank.run(rank.snapshot) for rank in ranks]
            for rank, payload in zip(ranks, payloads, strict=True):
                exact = exact and bool((payload.params[0] == rank.base).all())
            average = averager.average(payloads, (1, 1)).average
            assert average is not None
            value = (ranks[0].base + ranks[1].base) / 2
            arrivals = [rank.run(rank.take, average, value) for rank in ranks]
            done += 1
            if done % CHECK_EVERY == 0 or done == num_rounds:
                exact = exact and all(rank.run(rank.is_exact) for rank in ranks)
            for rank, arrival in zip(ranks, arrivals, strict=True):
                if arrival is not None:
                    rank.run(arrival.wait)
    return done, exact


def averagings(bench: Bench) -> None:
    """Two workers on one device; every value is small enough to be exact."""
    wanted = bench.pick(NUM_ROUNDS, 4)
    IntraOpThreads.acquire()
    try:
        done, exact = rounds_until_wrong(bench, DelayedApi(), DELAY_CYCLES, wanted)
        bench.row("averagings of two workers on one device", done, target=wanted)
        bench.check("all averagings exact", exact)
        if not bench.dry:
            _, exact = rounds_until_wrong(bench, UnorderedApi(), LONG_DELAY_CYCLES, 20)
            bench.check("control: without the waits between streams they are not", not exact)
    finally:
        IntraOpThreads.release()


# -- memory within its budget, and errors beyond it -------------------


GIB = 2**30
BUDGETS_GIB = (2, 8, 32)
SHARES = 32
"""Size of a batch as a part of the budget."""
ACTIVATIONS = 18
"""Activations of a batch's size kept by a step: with the rest, three quarters of the budget."""
ROW = 4096
NUM_BATCHES, NUM_EPOCHS = 36, 2
OUT_OF_MEMORY_S = 30.0


class ClusterCheckpointer(nn.Module):
    """Keeps a known number of activations of its input's size, and weights of that size.

    Args:
        batch_bytes: The size.
    """

    def __init__(self, batch_bytes: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(batch_bytes // (4 * ROW), ROW))
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(ROW)) for _ in range(ACTIVATIONS))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table[0]
        for gain in self.gains:
            x = torch.tanh(x * gain)  # only the result is kept for backward
        return x


class Depths(logging.Handler):
    """Records the prefetcher's log messages on its depth."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.endswith("prefetch"):
            self.messages.append(record.getMessage())


def train(bench: Bench, fraction: float, batch_bytes: int, train_fn: Any = None) -> None:
    """Train a :class:`ClusterCheckpointer` within a part of the device's memory, streamed."""
    rows = batch_bytes // (4 * ROW)
    # One row, repeated: a data set larger than the budget that uses no memory.
    x = torch.randn(1, ROW).expand(rows * NUM_BATCHES, -1)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        out: Tensor = model(batch[0])
        return out.square().mean()

    handle = (
        Trainer.builder(
            lambda device: ClusterCheckpointer(batch_bytes).to(device),
            lambda params: torch.optim.SGD(params, 1e-6, fused=True),
            train_fn or loss,
        )
        .dataset((x,))
        .batch_size(rows)
        .num_epochs(NUM_EPOCHS)
        .devices([bench.device])
        .policy("cadence")
        .vram_fraction(fraction)
        .resident(False)
        .stall_timeout(STALL_S)
        .progress(False)
        .run()
    )
    state = ended(bench, handle)
    assert [m.num_samples for m in state.metrics] == [len(x)] * NUM_EPOCHS


def budgets(bench: Bench) -> None:
    """Peak of the reserved memory, including the model, under budgets from small to large."""
    total = torch.cuda.get_device_properties(bench.device).total_memory
    logger, depths = logging.getLogger("runtime"), Depths()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(depths)
    try:
        for gib in BUDGETS_GIB:
            _one_budget(bench, gib, total, depths)
    finally:
        logger.removeHandler(depths)
        logger.setLevel(level)
    _out_of_memory(bench, total)


def _one_budget(bench: Bench, gib: int, total: int, depths: Depths) -> None:
    name = f"peak of reserved memory / budget of {gib} GiB"
    if gib * GIB > total:
        bench.note(f"{gib} GiB: the device has {total / GIB:.0f} GiB")
        return
    tidy()  # resets the peak, too
    before = torch.cuda.memory_reserved(bench.device)
    depths.messages.clear()
    begin = time.monotonic()
    try:
        train(bench, gib * GIB / total, gib * GIB // SHARES)
    except Exception:
        bench.row(name, None, target=1.0, at_most=True)
        raise
    peak = torch.cuda.max_memory_reserved(bench.device)
    bench.row(name, peak / (gib * GIB), target=1.0, at_most=True)
    allocated = torch.cuda.max_memory_allocated(bench.device)
    bench.raw(f"{gib} GiB: peak bytes reserved", [peak])
    bench.raw(f"{gib} GiB: peak bytes allocated", [allocated])
    retries = torch.cuda.memory_stats(bench.device).get("num_alloc_retries", 0)
    depth = depths.messages[-1] if depths.messages else "no depth was logged"
    bench.note(
        f"{gib} GiB: {depth}; {before:,} bytes reserved before; {retries} allocation retries "
        "in the process so far; "
        f"{time.monotonic() - begin:.1f} s"
    )


def _out_of_memory(bench: Bench, total: int) -> None:
    """A step that allocates too much, after some that do not."""
    steps = 0

    def greedy(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        nonlocal steps
        steps += 1
        out: Tensor = model(batch[0])
        loss = out.square().mean()
        if steps == 10:
            loss = loss + torch.zeros(2 * GIB, device=batch[0].device).sum()
        return loss

    tidy()
    begin = time.monotonic()
    text = ""
    try:
        train(bench, GIB / total, GIB // SHARES, greedy)
    except WorkerFailed as error:
        text = f"{error}; {error.__cause__}"
    elapsed_s = time.monotonic() - begin
    bench.note(f"out of memory in step {steps}: {text[:300] or 'no error came'}")
    bench.check("out of memory: the error names the budget", "budget of 1.00 GiB" in text)
    bench.row(
        "out of memory: start to error", elapsed_s, unit="s", target=OUT_OF_MEMORY_S, at_most=True
    )


# -- NCCL with one rank: created, used, closed, created again, aborted, created a third time ---


MIB = 2**20
BUSY_CYCLES = 4_000_000_000  # some 2 seconds
ABORT_S, LIMIT_S = 10.0, 60.0


class LoneRank:
    """A single rank, used in a separate thread and stream. A context manager."""

    def __init__(self, bench: Bench) -> None:
        self._device = bench.device
        self._patience_s = bench.patience_s()
        begin = time.perf_counter()
        (self.end,) = create_collectives(1, "nccl", [self._device], LIMIT_S)
        self.birth_s = time.perf_counter() - begin
        self._stream = torch.cuda.Stream(self._device)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="nccl-rank")

    def __enter__(self) -> LoneRank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, work: Callable[[Collective], T]) -> Any:
        """Start work in the rank's thread; returns a future."""

        def run() -> T:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                result = work(self.end)
                self._stream.synchronize()
                return result

        return self._pool.submit(run)

    def run(self, work: Callable[[Collective], T]) -> T:
        """Run work in the rank's thread."""
        result: T = self.start(work).result(self._patience_s)
        return result

    def close(self) -> float:
        """Leave the group; returns the duration in seconds."""
        begin = time.perf_counter()
        self.end.close()
        self._pool.shutdown(wait=False)
        return time.perf_counter() - begin


def all_reduces(num_bytes: int, count: int) -> Callable[[Collective], float]:
    """Work that reduces a tensor this often; seconds for each, or NaN if the sum is wrong."""

    def work(end: Collective) -> float:
        tensor = torch.arange(num_bytes // 4, dtype=torch.float32, device="cuda")
        expected = tensor.clone()
        begin = time.perf_counter()
        for _ in range(count):
            end.all_reduce_(tensor)
        elapsed_s = time.perf_counter() - begin
        return elapsed_s / count if torch.equal(tensor, expected) else float("nan")

    return work


def aborted_behind_a_kernel(bench: Bench, rank: LoneRank) -> float:
    """Seconds from the abort of an all-reduce that waits on the device to the rank's error.

    Raises:
        AssertionError: No error came, or another one.
    """

    def late(end: Collective) -> None:
        tensor = torch.ones(MIB, device="cuda")
        torch.cuda._sleep(BUSY_CYCLES)
        end.all_reduce_(tensor)

    future = rank.start(late)
    time.sleep(0.3)  # until it waits
    begin = time.perf_counter()
    rank.end.abort()
    error = future.exception(bench.patience_s())
    elapsed_s = time.perf_counter() - begin
    assert isinstance(error, CollectiveAborted), f"the rank got {error!r}"
    return elapsed_s


def world_of_one(bench: Bench) -> None:
    """Three groups, with the times of their parts."""
    small, large = all_reduces(4096, 50), all_reduces(256 * MIB, 5)
    exact = True
    births, ends = [], []
    for index in range(3):
        with LoneRank(bench) as rank:
            births.append(rank.birth_s)
            first_s = rank.run(all_reduces(4096, 1))
            per_small_s, per_large_s = rank.run(small), rank.run(large)
            exact = exact and not any(s != s for s in (first_s, per_small_s, per_large_s))
            bench.note(
                f"incarnation {index}: first all-reduce {1e3 * first_s:.1f} ms, of 4 KiB "
                f"{1e6 * per_small_s:.0f} us, of 256 MiB {1e3 * per_large_s:.2f} ms"
            )
            if index == 1:
                abort_s = aborted_behind_a_kernel(bench, rank)
                bench.row(
                    "abort to the rank's error", abort_s, unit="s", target=ABORT_S, at_most=True
                )
            ends.append(rank.close())
    bench.raw("construction, s", births)
    bench.raw("shutdown, s", ends)
    bench.row("construction", max(births), unit="s", target=LIMIT_S, at_most=True)
    bench.row("shutdown, once after an abort", max(ends), unit="s", target=LIMIT_S, at_most=True)
    bench.check("sums are exact in every incarnation", exact)
