"""Child processes that live through all repetitions, and PyTorch's own training in groups of them.

A child answers lines of JSON on its stdin with lines of JSON on its stdout, so that no
measurement contains a process start.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import environment
from benchmarks.harness.models import Batch, Workload, batches, train_step, workload_of

START_S = 90.0
MEASURE_S = 180.0
MEETING_S = 120.0
END_S = 10.0


# -- a child, from outside and from inside -----------------------------------------------


class Child:
    """A process that runs :func:`serve`. A context manager.

    Args:
        name: For errors.
        arguments: Of the Python interpreter.
        env: Its environment.
        python: The interpreter.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        env: dict[str, str],
        python: str = sys.executable,
    ) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [python, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, request: dict[str, Any]) -> None:
        """Send a request. If the process has ended, :meth:`answer` raises."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def answer(self, timeout_s: float = MEASURE_S) -> Any:
        """The next answer; the first one signals that the process is ready.

        Raises:
            RuntimeError: No answer arrived in time, or the process has ended.
        """
        stdout = self._process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], timeout_s)
        line = stdout.readline() if readable else ""
        if not line:
            raise RuntimeError(f"{self._name} gave no answer within {timeout_s:.0f} s")
        return json.loads(line)["answer"]

    def ask(self, timeout_s: float = MEASURE_S, **request: Any) -> Any:
        """Send a request and return its answer."""
        self.put(request)
        return self.answer(timeout_s)

    def end_input(self) -> None:
        """Close the pipe of requests."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # requests that a dead process did not read
                self._process.stdin.close()

    def close(self) -> None:
        """End the process: by closing its input, then by force. Idempotent."""
        self.end_input()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
        if self._process.stdout is not None:
            self._process.stdout.close()


def serve(work: Callable[..., Any], ready: object = None) -> None:
    """Answer every request on stdin until it ends.

    Args:
        work: Called with a request's entries by name.
        ready: The first answer, before any request.
    """
    print(json.dumps({"answer": ready}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"answer": work(**json.loads(line))}), flush=True)


# -- a group -----------------------------------------------------------------------------


class GlooGroup:
    """A context manager that holds ``world_size`` live processes of one Gloo group.

    Args:
        world_size: Number of processes.
        work: Function that handles a request, as ``MODULE:FUNCTION``; each receives all requests.
    """

    def __init__(
        self, world_size: int, work: str = "benchmarks.harness.processes:peer_rate"
    ) -> None:
        self._dir = tempfile.TemporaryDirectory(prefix="gloo-")
        env = environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        # Accelerate reads these, and uses the existing process group.
        env |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        code = "from benchmarks.harness.processes import serve_rank; serve_rank()"
        self._ranks = [
            Child(
                f"rank {rank} of the Gloo group",
                ["-c", code, work, str(Path(self._dir.name, "store"))],
                {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(world_size)
        ]

    def __enter__(self) -> GlooGroup:
        try:
            self._answers(START_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, timeout_s: float = MEASURE_S, **request: Any) -> Any:
        """Send every process a request; rank 0's answer, once all have answered."""
        for rank in self._ranks:
            rank.put(request)
        return self._answers(timeout_s)[0]

    def close(self) -> None:
        """End the processes, all at once: they leave the group together."""
        for rank in self._ranks:
            rank.end_input()
        for rank in self._ranks:
            rank.close()
        self._dir.cleanup()

    def _answers(self, timeout_s: float) -> list[Any]:
        return [rank.answer(timeout_s) for rank in self._ranks]


def serve_rank() -> None:
    """Run a rank: join the group, serve requests, leave. One intra-op thread."""
    work, store = sys.argv[1:]
    module, _, function = work.partition(":")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # of fully_shard
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=MEETING_S),
    )
    serve(getattr(importlib.import_module(module), function))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # the group's threads may still need the interpreter, whose end would abort


# -- peers -------------------------------------------------------------------------------

PERIOD = 8
"""Local steps between two averagings."""
Step = Callable[[Batch], None]
Peer = Callable[[Workload, float], AbstractContextManager[Step]]


@contextmanager
def ddp(workload: Workload, pause_s: float) -> Iterator[Step]:
    """``DistributedDataParallel``."""
    model = DistributedDataParallel(workload.make_model(), gradient_as_bucket_view=True)
    optimizer = workload.make_optimizer(model.parameters())
    yield lambda batch: train_step(workload, model, optimizer, batch, pause_s)


@contextmanager
def local_sgd(workload: Workload, pause_s: float) -> Iterator[Step]:
    """Hugging Face Accelerate's ``LocalSGD``."""
    from accelerate import Accelerator  # optional
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    bare = workload.make_model()
    model, optimizer = accelerator.prepare(bare, workload.make_optimizer(bare.parameters()))
    assert accelerator.num_processes == dist.get_world_size()
    assert isinstance(model, DistributedDataParallel)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=PERIOD) as local:

        def step(batch: Batch) -> None:
            optimizer.zero_grad()
            loss = workload.loss(model, batch)
            if pause_s:
                time.sleep(pause_s * len(batch[0]) / workload.batch_size)
            accelerator.backward(loss)
            optimizer.step()
            local.step()

        yield step
    accelerator.free_memory()


@contextmanager
def averager(workload: Workload, pause_s: float) -> Iterator[Step]:
    """PyTorch's ``PeriodicModelAverager`` behind plain local optimizers."""
    model = workload.make_model()
    optimizer = workload.make_optimizer(model.parameters())
    periodic = PeriodicModelAverager(period=PERIOD)

    def step(batch: Batch) -> None:
        train_step(workload, model, optimizer, batch, pause_s)
        periodic.average_parameters(model.parameters())

    yield step


@contextmanager
def sharded(workload: Workload, pause_s: float, *, by_block: bool = False) -> Iterator[Step]:
    """``fully_shard`` of the whole model, or of each block and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = workload.make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks if by_block else ():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = workload.make_optimizer(model.parameters())
    yield lambda batch: train_step(workload, model, optimizer, batch, pause_s)


@contextmanager
def sharded_blocks(workload: Workload, pause_s: float) -> Iterator[Step]:
    """``fully_shard`` of each block and of the model."""
    with sharded(workload, pause_s, by_block=True) as step:
        yield step


PEERS: dict[str, Peer] = {
    "ddp": ddp,
    "local_sgd": local_sgd,
    "averager": averager,
    "sharded": sharded,
    "sharded_blocks": sharded_blocks,
}
_data: dict[str, Batch] = {}
"""Setup of the last workload in a rank."""


def peer_rate(
    *,
    system: str,
    name: str,
    num_samples: int,
    num_warmup: int,
    num_steps: int,
    pauses_s: list[float],
) -> float:
    """Samples/s of all ranks together, from a barrier to a barrier; runs in each of them.

    Args:
        system: Of :data:`PEERS`.
        name: The workload's.
        num_samples: Samples in the data set.
        num_warmup: Steps before the clock starts.
        num_steps: Steps of each rank that are timed.
        pauses_s: Sleep of each rank within a step.
    """
    workload, rank = workload_of(name), dist.get_rank()
    if name not in _data or len(_data[name][0]) != num_samples:
        _data.clear()
        _data[name] = workload.make_data(num_samples)
    torch.manual_seed(0)  # the same weights on all ranks
    order = batches(_data[name], workload.batch_size, seed=rank)
    with PEERS[system](workload, pauses_s[rank]) as step:
        for batch in itertools.islice(order, num_warmup):
            step(batch)
        dist.barrier()
        start = time.perf_counter()
        for batch in itertools.islice(order, num_steps):
            step(batch)
        dist.barrier()
        elapsed_s = time.perf_counter() - start
    return len(pauses_s) * num_steps * workload.batch_size / elapsed_s
