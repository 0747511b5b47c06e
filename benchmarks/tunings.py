"""Speed-up of each tuning on this machine: blocks with and without it, in turn.

Usage: ``python benchmarks/tunings.py [--names NAME ...] [--json FILE]``.
``benchmarks/README.md`` describes the measurements.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness.cells import runtime_builder
from benchmarks.harness.measure import (
    Check,
    MachineLoad,
    begin,
    median_interval,
    parser_of,
    save,
    table,
)
from benchmarks.harness.models import WORKLOADS, tiny
from coordinator import averaging, rounds
from coordinator.averaging import Averager
from coordinator.messages import Payload
from runtime import ApplyPolicy, AverageBackend
from runtime.collective import thread
from runtime.replica import flat

TARGET = 1.02
"""Least gain of a tuning."""
JOIN_S = 600.0
WHOLE = 1 << 62
"""Bytes of a block that holds any tensor."""

Measure = Callable[[], float]
"""Function that measures work per second, once."""


@contextmanager
def replaced(owner: Any, **others: Any) -> Iterator[None]:
    """Replace attributes of a module within the block."""
    usual = {name: getattr(owner, name) for name in others}
    try:
        for name, other in others.items():
            setattr(owner, name, other)
        yield
    finally:
        for name, value in usual.items():
            setattr(owner, name, value)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run with two workers, whose batches are counted in intervals.

    Runs of the same program differ by more than a tenth in their memory layout; stretches of
    one run do not.

    Attributes:
        model: Its name.
        policy: The policy.
        backend: The transport.
        adapt_s: Seconds until a run has adapted to a change.
    """

    model: str
    policy: ApplyPolicy = ApplyPolicy.SYNC
    backend: AverageBackend = AverageBackend.THREAD
    adapt_s: float = 0.2

    @contextmanager
    def __call__(self, seconds: float) -> Iterator[Measure]:
        """Start the run, which continues while a tuning is switched off and on."""
        workload = tiny() if self.model == "tiny" else WORKLOADS[self.model]
        handle = runtime_builder(
            workload,
            workload.make_data(min(workload.max_batches, 20_000) * workload.batch_size),
            [0, 0],
            num_epochs=10**6,
            policy=self.policy,
            backend=self.backend,
        ).run()

        def trained() -> int:
            return sum(rank.num_batches for rank in handle.statistics().ranks)

        def stretch() -> float:
            time.sleep(self.adapt_s)
            before, start = trained(), time.perf_counter()
            time.sleep(seconds)
            return (trained() - before) / (time.perf_counter() - start)

        try:
            while not trained():
                time.sleep(self.adapt_s)
            yield stretch
        finally:
            handle.stop()
            handle.join(JOIN_S)


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """An average of some ranks, or a snapshot: the fastest of several.

    Attributes:
        numel: Elements of a rank's one tensor, in float32.
        num_threads: Intra-op threads.
        num_ranks: Whose average is formed; 1: a snapshot is taken.
        fresh: True if each measurement allocates its tensors anew.
    """

    numel: int
    num_threads: int
    num_ranks: int
    fresh: bool = False

    @contextmanager
    def __call__(self, seconds: float) -> Iterator[Measure]:
        """Allocate the tensors."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        kept = None if self.fresh else self._make()

        def fastest() -> float:
            work = kept or self._make()
            work()
            best, end = math.inf, time.perf_counter() + seconds / 4
            while (start := time.perf_counter()) < end or best == math.inf:
                work()
                best = min(best, time.perf_counter() - start)
            return 1 / best

        try:
            yield fastest
        finally:
            torch.set_num_threads(threads)

    def _make(self) -> Callable[[], object]:
        like = torch.empty(self.numel, device="meta")
        tensors = [averaging.empty_like(like).normal_() for _ in range(max(2, self.num_ranks))]
        if self.num_ranks == 1:
            return partial(flat.copy_with_norm, *tensors)
        payloads = [Payload(params=(tensor,)) for tensor in tensors]
        squares = [(float(tensor.double().square().sum()),) for tensor in tensors]
        return partial(Averager().average, payloads, [3, 5, 4][: self.num_ranks], squares)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """One tuning and its measurements.

    Attributes:
    what: Description.
            off: Context in which it is off in this process.
            cases: Measurements, by their names in the table.
    """

    what: str
    off: Callable[[], AbstractContextManager[None]]
    cases: dict[str, Callable[[float], AbstractContextManager[Measure]]]


def sizes(numels: list[int], ranks: list[int], **more: Any) -> dict[str, Any]:
    """Averages of so many ranks, or snapshots, of so many elements, by one thread and by two."""
    return {
        f"{numel:.0e} elements, {count} rank(s), {threads} thread(s)": Arithmetic(
            numel=numel, num_threads=threads, num_ranks=count, **more
        )
        for numel in numels
        for count in ranks
        for threads in (1, 2)
    }


TUNINGS = {
    "meeting": Tuning(
        what="small tensors are reduced by the rank that comes last",
        off=partial(replaced, thread, _SMALL=0),
        cases={"tiny": Run(model="tiny"), "mlp": Run(model="mlp")},
    ),
    "cpu_time": Tuning(
        what="the coordinator's own time makes rounds rarer",
        off=partial(replaced, rounds, COORDINATOR_SHARE=math.inf),
        cases={
            "mlp": Run(
                model="mlp", policy=ApplyPolicy.CADENCE, backend=AverageBackend.CPU, adapt_s=1.0
            )
        },
    ),
    "serial": Tuning(
        what="small states are averaged without a team of threads",
        off=partial(replaced, averaging, SERIAL_BYTES=0),
        cases=sizes([10**4, 10**5, 25 * 10**4], [2, 3]),
    ),
    "blocks": Tuning(
        what="averages are formed in blocks",
        off=partial(replaced, averaging, BLOCK_BYTES=WHOLE, _MAX_BLOCK_BYTES=WHOLE),
        cases=sizes([10**7], [2, 3]),
    ),
    "pages": Tuning(
        what="huge pages",
        off=partial(replaced, averaging, _HUGE_PAGE_MIN_BYTES=WHOLE),
        cases=sizes([5 * 10**7], [1, 2], fresh=True),
    ),
}


def ratios_of(
    tuning: Tuning, measured: AbstractContextManager[Measure], num_pairs: int
) -> list[float]:
    """Ratio with the tuning to without it, every other pair in reverse order."""
    ratios = []
    with measured as measure:
        for pair in range(num_pairs):
            rates = {}
            for tuned in (True, False) if pair % 2 else (False, True):
                with nullcontext() if tuned else tuning.off():
                    rates[tuned] = measure()
            ratios.append(rates[True] / rates[False])
    return ratios


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--names", nargs="+", choices=TUNINGS, default=list(TUNINGS))
    parser.add_argument("--pairs", type=int, default=21, help="pairs of measurements for each")
    parser.add_argument("--seconds", type=float, default=0.6, help="length of a measurement")
    args = parser.parse_args()
    if args.pairs < 1 or args.seconds <= 0:
        parser.error("--pairs must be at least 1, --seconds above 0")
    return args


def main() -> None:
    args = parse_args()
    result: dict[str, Any] = {**begin(), "tunings": {}}
    rows = []
    for name in args.names:
        tuning = TUNINGS[name]
        for where, measured in tuning.cases.items():
            load = MachineLoad()
            ratios = ratios_of(tuning, measured(args.seconds), args.pairs)
            others = load.others()
            result["tunings"][f"{name}/{where}"] = {"ratios": ratios, "used_by_others": others}
            middle, low, high = median_interval(ratios)
            verdict = Check(what="", measured=middle, wanted=TARGET).verdict
            rows.append(
                [
                    *(tuning.what, where, f"{middle:.3f}", f"{low:.3f} to {high:.3f}"),
                    *(f"{TARGET} {verdict}", f"{others:.0%}"),
                ]
            )
            save(args.json, result)
    head = ["tuning", "measured on", "with over without", "95 % interval", "target", "others"]
    print(table(head, rows, num_texts=2))


if __name__ == "__main__":
    main()
