"""One rank of the peers, driven by JSON lines on stdin; see :class:`ddp_group.DdpGroup`.

``ddp`` is ``DistributedDataParallel``, ``local_sgd`` Hugging Face Accelerate's ``LocalSGD``,
``averager`` PyTorch's ``PeriodicModelAverager`` behind plain local optimizers. It stays alive
for all repetitions. Usage: ``peers_worker.py RANK WORLD_SIZE STORE_FILE``.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ddp_rank import join_group, serve
from benchmarks.harness.loops import batches, train_step
from benchmarks.harness.models import Batch, Workload
from benchmarks.peers_models import workload_of

PERIOD = 8
"""Local steps between two averagings."""
Step = Callable[[Batch], None]
Peer = Callable[[Workload, float], AbstractContextManager[Step]]


@contextmanager
def ddp(workload: Workload, pause_s: float) -> Iterator[Step]:
    model = DistributedDataParallel(workload.make_model(), gradient_as_bucket_view=True)
    optimizer = workload.make_optimizer(model.parameters())
    yield lambda batch: train_step(workload, model, optimizer, batch, pause_s)


@contextmanager
def local_sgd(workload: Workload, pause_s: float) -> Iterator[Step]:
    from accelerate import Accelerator  # not everyone has it
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
                time.sleep(pause_s)
            accelerator.backward(loss)
            optimizer.step()
            local.step()

        yield step
    accelerator.free_memory()


@contextmanager
def averager(workload: Workload, pause_s: float) -> Iterator[Step]:
    model = workload.make_model()
    optimizer = workload.make_optimizer(model.parameters())
    periodic = PeriodicModelAverager(period=PERIOD)

    def step(batch: Batch) -> None:
        train_step(workload, model, optimizer, batch, pause_s)
        periodic.average_parameters(model.parameters())

    yield step


PEERS: dict[str, Peer] = {"ddp": ddp, "local_sgd": local_sgd, "averager": averager}


class Rank:
    """Holds the data of the last workload, and measures."""

    def __init__(self) -> None:
        self._name = ""
        self._data: Batch | None = None

    def measure(
        self,
        *,
        system: str,
        name: str,
        num_samples: int,
        num_warmup: int,
        num_steps: int,
        pauses_s: list[float],
    ) -> float:
        """Samples/s of all ranks together, from a barrier to a barrier.

        Args:
            system: The peer.
            name: The workload's.
            num_samples: Samples in the data set.
            num_warmup: Steps before the clock starts.
            num_steps: Steps of each rank that are timed.
            pauses_s: Sleep of each rank within a step.
        """
        workload, rank = workload_of(name), dist.get_rank()
        if self._data is None or self._name != name or len(self._data[0]) != num_samples:
            self._name, self._data = name, workload.make_data(num_samples)
        torch.manual_seed(0)  # the same weights on all ranks
        order = batches(self._data, workload.batch_size, seed=rank)
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


def main() -> None:
    rank, world_size = join_group()
    # Accelerate learns from these, and takes the process group that is there.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    serve(Rank().measure)


if __name__ == "__main__":
    main()
