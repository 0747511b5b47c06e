"""NCCL with one rank: born, used, ended, born again, aborted, and born a third time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from benchmarks.gpu.bench import Bench
from runtime import Collective, CollectiveAborted, create_collectives

T = TypeVar("T")
MIB = 2**20
BUSY_CYCLES = 4_000_000_000  # some 2 seconds
ABORT_S, LIMIT_S = 10.0, 60.0


class Rank:
    """A lone rank, used in a thread and a stream of its own. A context manager."""

    def __init__(self, bench: Bench) -> None:
        self._device = bench.device
        self._patience_s = bench.patience_s()
        begin = time.perf_counter()
        (self.end,) = create_collectives(1, "nccl", [self._device], LIMIT_S)
        self.birth_s = time.perf_counter() - begin
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="nccl-rank")

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, work: Callable[[Collective], T]) -> Any:
        """Begin work in the rank's thread; a future."""

        def run() -> T:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                result = work(self.end)
                self._stream.synchronize()
                return result

        return self._pool.submit(run)

    def run(self, work: Callable[[Collective], T]) -> T:
        """Do work in the rank's thread."""
        result: T = self.start(work).result(self._patience_s)
        return result

    def close(self) -> float:
        """Leave the group; seconds that took."""
        begin = time.perf_counter()
        self.end.close()
        self._pool.shutdown(wait=False)
        return time.perf_counter() - begin


def all_reduces(num_bytes: int, count: int) -> Callable[[Collective], float]:
    """Work that reduces a tensor so often; seconds for each, or NaN if the sum is wrong."""

    def work(end: Collective) -> float:
        tensor = torch.arange(num_bytes // 4, dtype=torch.float32, device="cuda")
        expected = tensor.clone()
        begin = time.perf_counter()
        for _ in range(count):
            end.all_reduce_(tensor)
        elapsed_s = time.perf_counter() - begin
        return elapsed_s / count if torch.equal(tensor, expected) else float("nan")

    return work


def aborted_behind_a_kernel(bench: Bench, rank: Rank) -> float:
    """Seconds from the abort of an all-reduce that waits on the device to the rank's error.

    Raises:
        AssertionError: No error came, or another one.
    """

    def late(end: Collective) -> None:
        tensor = torch.ones(MIB, device="cuda")
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
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
    """Three incarnations, with the times of their parts."""
    small, large = all_reduces(4096, 50), all_reduces(256 * MIB, 5)
    exact = True
    births, ends = [], []
    for index in range(3):
        with Rank(bench) as rank:
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
