"""The order of streams: delay kernels before every write and copy, and exact averages after."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.gpu.bench import Bench
from coordinator.averaging import Averager
from coordinator.messages import Payload
from runtime.averaging import ReplicaAverager
from runtime.cuda_api import CudaApi
from runtime.cuda_device import CudaDevice
from runtime.device import Arrival, DeviceContext, open_device
from runtime.flat import FlatState
from runtime.intra_op import IntraOpThreads

T = TypeVar("T")
NUM_ROUNDS = 1000
SIZE = 1 << 16
DELAY_CYCLES = 100_000  # some 50 microseconds
LONG_DELAY_CYCLES = 2_000_000  # some millisecond
CHECK_EVERY = 50


class DelayedApi(CudaApi):
    """Holds the current stream up before every copy."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        torch.cuda._sleep(DELAY_CYCLES)  # type: ignore[no-untyped-call]
        super().copy(target, source)


class UnorderedApi(DelayedApi):
    """The fault itself: no stream waits for another."""

    def wait_event(self, event: Any, stream: Any = None) -> None:
        """Order nothing."""


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
            torch.cuda._sleep(self._delay_cycles)  # type: ignore[no-untyped-call]
        self.w.add_(amount)
        self.seen.add_(amount)


class Rank:
    """A replica in a thread of its own, and the number that it must hold. A context manager.

    Args:
        bench: Says where, and how long to wait.
        rank: Its steps add ``rank + 1``.
        api: Speaks to CUDA.
        delay_cycles: How late a step writes.
    """

    def __init__(self, bench: Bench, rank: int, api: CudaApi, delay_cycles: int) -> None:
        self._bench = bench
        self._rank, self.expected, self.base = rank, 0.0, 0.0
        self._delay_cycles = delay_cycles
        self._context: DeviceContext = open_device(bench.device, 1)
        if bench.device.type == "cuda":
            self._context = CudaDevice(bench.device, api=api)
        self._active = self._context.activate()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"rank-{rank}")

    def __enter__(self) -> Rank:
        self.run(self._build)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(lambda: self._active.__exit__(None, None, None))
        finally:
            self._pool.shutdown(wait=False)

    def run(self, work: Callable[..., T], *args: Any) -> T:
        """Do work in the rank's thread."""
        return self._pool.submit(work, *args).result(self._bench.patience_s())

    def _build(self) -> None:
        self._active.__enter__()
        self._model = Counter(self._delay_cycles).to(self._bench.device)
        self._averager = ReplicaAverager(FlatState(self._model), self._context, None)

    def train(self, num_steps: int) -> None:
        """Give steps to the device."""
        for _ in range(num_steps):
            self._model.step(self._rank + 1)
            self.expected += self._rank + 1

    def snapshot(self) -> Payload:
        """A snapshot; a step is made while its copy is on its way."""
        payload, arrival, _ = self._averager.start_snapshot()
        self.base = self.expected
        self.train(1)
        if arrival is not None:
            arrival.wait()
        return payload

    def take(self, average: Payload, value: float) -> Arrival | None:
        """Take an average between two steps."""
        self.train(1)
        arrival = self._averager.take(average)
        self.expected += value - self.base
        self.train(1)
        return arrival

    def is_exact(self) -> bool:
        """Whether the replica holds what it must. Waits for the device."""
        tensors = (self._model.w, self._model.seen)
        return all(bool((tensor == self.expected).all()) for tensor in tensors)


def rounds_until_wrong(
    bench: Bench, api: CudaApi, delay_cycles: int, num_rounds: int
) -> tuple[int, bool]:
    """Averagings made by two ranks, and whether all were exact; stops at the first that is not."""
    averager = Averager()
    exact = True
    done = 0
    with ExitStack() as stack:
        ranks = [stack.enter_context(Rank(bench, rank, api, delay_cycles)) for rank in range(2)]
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
    """Two workers on one device; every number is small enough to be exact."""
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
