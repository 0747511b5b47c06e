"""NCCL communicators on GPUs: creation, collectives, abort and re-creation."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed

from runtime import ApplyPolicy, AverageBackend, Trainer
from runtime.collective import ReduceOp, create_collectives
from runtime.core.errors import CollectiveAborted, CollectiveTimeout
from tests.gpu.placing import nccl_devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.distributed.is_nccl_available(), reason="this build of PyTorch has no NCCL"
    ),
    pytest.mark.timeout(300),
]

WAIT_S = 120.0
LONG_CYCLES = 16_000_000_000  # about 8 seconds


class Ranks:
    """A process group with one thread and one stream for each rank."""

    def __init__(self, world_size, timeout_s=60.0):
        self.devices = nccl_devices(world_size)
        self.ends = create_collectives(world_size, "nccl", self.devices, timeout_s)
        self.streams = [torch.cuda.Stream(device) for device in self.devices]
        self.pools = [ThreadPoolExecutor(1) for _ in self.devices]

    def start(self, work):
        def run(rank):
            with torch.cuda.device(self.devices[rank]), torch.cuda.stream(self.streams[rank]):
                result = work(self.ends[rank], self.devices[rank])
                self.streams[rank].synchronize()
                return result

        return [pool.submit(run, rank) for rank, pool in enumerate(self.pools)]

    def run(self, work):
        return [future.result(WAIT_S) for future in self.start(work)]

    def close(self):
        for end in self.ends:
            end.close()
        for pool in self.pools:
            pool.shutdown()


@pytest.fixture
def make():
    made = []

    def make(*args):
        made.append(Ranks(*args))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def sum_of_ranks(end, device):
    tensor = torch.full((1 << 20,), float(end.rank + 1), device=device)
    end.all_reduce_(tensor)
    return tensor[[0, -1]].tolist()


each_size = pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.two_ranks)])


@each_size
def test_a_group_is_created_used_and_closed(make, world_size):
    ranks = make(world_size)
    total = float(sum(range(1, world_size + 1)))
    assert ranks.run(sum_of_ranks) == [[total, total]] * world_size
    begin = time.monotonic()
    ranks.close()
    assert time.monotonic() - begin < 10


@each_size
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_weighted_mean_equals_that_of_the_cpu(make, world_size, dtype):
    ranks = make(world_size)
    values = [torch.randn(1001, generator=torch.Generator().manual_seed(r)) for r in range(2)]

    def mean(end, device):
        tensor = values[end.rank].to(device, dtype)
        total = end.weighted_mean_([tensor], end.rank + 1)
        return total, tensor.cpu()

    results = ranks.run(mean)
    weights = range(1, world_size + 1)
    expected = sum(
        w * v.to(dtype).double() for w, v in zip(weights, values[:world_size], strict=True)
    ) / sum(weights)
    for total, tensor in results:
        assert total == sum(weights)
        torch.testing.assert_close(tensor, expected.to(dtype))


@each_size
def test_every_operation_works(make, world_size):
    ranks = make(world_size)

    def work(end, device):
        largest = torch.tensor([float(end.rank)], device=device)
        end.all_reduce_(largest, ReduceOp.MAX)
        whole = torch.zeros(2 * world_size, dtype=torch.int64, device=device)
        end.all_gather_into(whole, torch.tensor([end.rank, 7], device=device))
        flag = torch.tensor([end.rank == world_size - 1], device=device)
        end.broadcast_(flag, world_size - 1)
        part = torch.zeros(3, device=device)
        end.reduce_scatter_into(part, torch.ones(3 * world_size, device=device))
        numbers = torch.zeros(world_size, dtype=torch.int64)
        end.all_gather_into(numbers, torch.tensor([end.rank]))
        end.barrier()
        return largest.item(), whole.tolist(), flag.item(), part.tolist(), numbers.tolist()

    gathered = [x for rank in range(world_size) for x in (rank, 7)]
    expected = (world_size - 1.0, gathered, True, [float(world_size)] * 3, list(range(world_size)))
    assert ranks.run(work) == [expected] * world_size


@each_size
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter_gives_each_rank_its_shard(make, world_size, op, dtype, in_place):
    ranks = make(world_size)
    whole = torch.arange(8.0 * world_size).to(dtype)

    def scatter(end, device):
        own = (whole + end.rank).to(device)
        part = own.view(world_size, -1)[end.rank] if in_place else torch.zeros(8).to(own)
        end.reduce_scatter_into(part, own, op)
        return part.cpu()

    values = torch.stack([whole + rank for rank in range(world_size)])
    reduce = {ReduceOp.SUM: torch.sum, ReduceOp.AVG: torch.mean, ReduceOp.MAX: torch.amax}[op]
    assert torch.equal(torch.cat(ranks.run(scatter)), reduce(values, dim=0))


@each_size
def test_a_new_group_works_after_an_abort(make, world_size):
    first = make(world_size)
    first.run(sum_of_ranks)
    first.ends[0].abort()
    for end in first.ends:
        with pytest.raises(CollectiveAborted):
            end.check()
    first.close()
    second = make(world_size)
    total = float(sum(range(1, world_size + 1)))
    assert second.run(sum_of_ranks) == [[total, total]] * world_size


def test_a_collective_behind_a_long_kernel_is_aborted_at_the_deadline(make):
    """The process survives, and the rank gets an exception."""
    ranks = make(1, 1.0)

    def late(end, device):
        torch.cuda._sleep(LONG_CYCLES)
        end.all_reduce_(torch.ones(10, device=device))

    begin = time.monotonic()
    error = ranks.start(late)[0].exception(WAIT_S)
    assert isinstance(error, CollectiveTimeout)
    assert time.monotonic() - begin < 10
    ranks.streams[0].synchronize()
    assert make(1).run(sum_of_ranks) == [[1.0, 1.0]]


@pytest.mark.parametrize("aborts", [False, True])
def test_the_abort_flag_is_read_by_the_device_after_the_collective(make, aborts):
    """Not when the copy of the flag is launched, while a long kernel still runs."""
    ranks = make(1)

    def work(end, device):
        abort_flag = torch.full((), 7.0, device=device)
        tensor = torch.ones(10, device=device)
        end.all_reduce_(tensor)
        torch.cuda._sleep(LONG_CYCLES // 8)
        mean = end.bucketed_mean(1.0)
        mean.add([tensor])
        begin = time.monotonic()
        _, outcome = mean.end_async(abort_flag)
        assert time.monotonic() - begin < 0.5, "the host waited"
        if aborts:
            end.abort()
            with pytest.raises(CollectiveAborted):
                outcome.wait()
        else:
            outcome.wait()
        return abort_flag.item()

    assert ranks.run(work) == [float(aborts)]


@pytest.mark.two_ranks
def test_a_peer_that_never_launches_its_kernel_does_not_hang_the_group(make):
    """The other rank's kernel waits on the device until both communicators are aborted."""
    ranks = make(2, 1.0)

    def work(end, device):
        if end.rank == 1:
            torch.cuda._sleep(LONG_CYCLES)
        end.all_reduce_(torch.ones(1 << 20, device=device))

    begin = time.monotonic()
    errors = [future.exception(WAIT_S) for future in ranks.start(work)]
    assert time.monotonic() - begin < 30
    assert {type(error) for error in errors} <= {CollectiveTimeout, CollectiveAborted}
    assert CollectiveTimeout in {type(error) for error in errors}
    assert make(2).run(sum_of_ranks) == [[3.0, 3.0]] * 2


@pytest.mark.two_ranks
@pytest.mark.parametrize("policy", ApplyPolicy)
@pytest.mark.parametrize(
    "backend",
    [AverageBackend.NCCL, pytest.param(AverageBackend.AUTO, marks=pytest.mark.two_gpus)],
)
def test_runs_of_two_ranks_train_every_sample_once(policy, backend):
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    handle = (
        Trainer.builder(
            lambda device: torch.nn.Sequential(
                torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1)
            ).to(device),
            lambda params: torch.optim.AdamW(params, 1e-2),
            lambda model, batch: (model(batch[0]).squeeze(1) - batch[0].sum(1)).square().mean(),
        )
        .dataset((x,))
        .batch_size(64)
        .num_epochs(3)
        .devices(nccl_devices(2))
        .policy(policy)
        .backend(backend)
        .seed(0)
        .run()
    )
    state = handle.join(WAIT_S)
    assert handle.backend is AverageBackend.NCCL
    assert [e.num_samples for e in state.metrics] == [4096] * 3
    assert state.metrics[-1].avg_loss < state.metrics[0].avg_loss
