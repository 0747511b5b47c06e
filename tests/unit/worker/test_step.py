"""A worker's steps without the worker: the source of batches, and the counts."""

from __future__ import annotations

import pytest
import torch

from coordinator.config import ApplyPolicy
from runtime import UserFunctions, WorkerConfig, create_collectives
from runtime.core.errors import CollectiveAborted
from runtime.replica.build import BuildOrder
from runtime.worker.rank_resources import RankResources
from runtime.worker.replica import WorkerReplica
from runtime.worker.step import WorkerSteps
from tests.support.running import count_up, counter, plain_sgd

SIZE = 2
BATCH = (torch.zeros(SIZE),)


class Bench:
    """WorkerSteps with their environment; ``batches`` are returned in order."""

    def __init__(self, batches, *, model=counter, collective=None, **settings):
        config = WorkerConfig(num_samples=100, batch_size=SIZE, **settings)
        functions = UserFunctions(model_factory=model, optim_factory=plain_sgd, train_fn=count_up)
        resources = RankResources.open(config)
        self.meter, self.protocol = resources.meter, resources.protocol
        self.progress, self.lockstep = resources.progress, resources.lockstep
        self.protocol.on_built()
        order = BuildOrder(standalone=True)
        self.replica = WorkerReplica(resources, functions, collective, order)
        self.answers = []
        self._batches = iter(batches)
        self.steps = WorkerSteps(resources, self.replica, await_batch=self._await)

    def _await(self, *, answer):
        self.answers.append(answer)
        return next(self._batches)

    @property
    def w(self):
        return self.replica.model.w.item()


def test_a_window_makes_one_step_and_counts_all_its_batches():
    bench = Bench([BATCH] * 3, accumulate=3)
    assert bench.steps.run([SIZE] * 3, None, count_up)
    assert bench.w == 1.0
    assert bench.answers == [True, False, False]  # messages are handled only before a step
    counted = bench.protocol
    assert (counted.batches, counted.samples, counted.weight) == (3, 6, 6)
    assert (bench.progress.local_step, bench.lockstep.step) == (3, 1)
    stats = bench.meter.take()
    assert (stats.num_batches, stats.num_samples, stats.loss_samples) == (3, 6, 6)


def test_no_step_is_made_once_the_worker_must_leave():
    bench = Bench([None])
    assert not bench.steps.run([SIZE], None, count_up)
    assert (bench.w, bench.progress.local_step, bench.protocol.batches) == (0.0, 0, 0)


def test_weights_of_losses_replace_the_samples_as_the_workers_weight():
    bench = Bench([BATCH] * 2)

    def weighted(model, batch):
        return count_up(model, batch), torch.tensor(1.5)

    for _ in range(2):
        bench.steps.run([SIZE], None, weighted)
    bench.steps.flush_weight()
    assert (bench.protocol.samples, bench.protocol.weight) == (4, 3.0)


class Counted(torch.nn.Module):
    """Counts its forward passes in a buffer."""

    def __init__(self, device):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64, device=device))
        self.register_buffer("seen", torch.zeros(1, device=device))


def seeing(model, batch):
    model.seen += 1
    return -model.w


@pytest.mark.parametrize("survives", [True, False])
def test_a_lockstep_step_whose_reduction_fails_is_undone(survives, monkeypatch):
    """With survivors it is repeated; otherwise the run ends, and buffers are not copied."""
    (end,) = create_collectives(1)
    bench = Bench(
        [BATCH] * 3, model=Counted, collective=end, policy=ApplyPolicy.SYNC, survives=survives
    )
    bench.steps.run([SIZE], 0, seeing)

    def broken(*_):
        raise CollectiveAborted("a rank died")

    with monkeypatch.context() as patch:
        patch.setattr(end, "weighted_mean_", broken)
        with pytest.raises(CollectiveAborted):
            bench.steps.run([SIZE], 1, seeing)
    assert (bench.w, bench.lockstep.step, bench.progress.local_step) == (1.0, 1, 1)
    assert bench.replica.model.seen.item() == (1.0 if survives else 2.0)
    assert bench.meter.take().loss_samples == SIZE
    bench.steps.run([SIZE], 1, seeing)
    assert (bench.w, bench.lockstep.step) == (2.0, 2)
    end.close()


def test_a_closed_worker_has_no_batches():
    bench = Bench([BATCH])
    bench.steps.close()
    with pytest.raises(AssertionError, match="closed"):
        bench.steps.run([SIZE], None, count_up)
    assert float(bench.steps.train_step(BATCH, count_up).loss) == 0.0
