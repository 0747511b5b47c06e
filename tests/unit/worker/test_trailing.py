"""SYNC over NCCL without a wait of the host: launched, counted and undone steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coordinator import messages as m
from runtime import Trainer, current_worker
from runtime import run as run_module
from runtime.collective import nccl as nccl_module
from runtime.collective.nccl import create_nccl_groups
from runtime.core.errors import CollectiveAborted
from runtime.device.cuda import CudaDevice
from tests.support.fake_cuda import GPU, FakeCuda, standing_in
from tests.support.posing import PosingBackend, posing_group
from tests.support.running import SYNC, THREAD, WAIT_S, builder
from tests.unit.worker.test_cuda_worker import pose
from tests.unit.worker.test_worker import Alone, plan

TIMEOUT_S = 20.0


def fused_sgd(params, lr=1.0, **kwargs):
    return torch.optim.SGD(params, lr, fused=True, **kwargs)


class Breaking(PosingBackend):
    """Exchanges that are aborted while they run, from one on: they end, with garbage.

    The ranks receive no error from the exchange: as hosts that run ahead of their devices, they
    launch further steps.

    Attributes:
        break_at: Number of the first one, for all ranks of the first group; ``None``: none is.
        on_break: Aborts the communicators; called by each broken exchange.
    """

    break_at = None

    def __init__(self, *args):
        super().__init__(*args)
        self.num_sums = 0
        self.breaks = self.break_at is not None and self.rank not in self.ranks
        self.ranks.add(self.rank)

    def allreduce(self, tensors, options):
        self.num_sums += 1
        if not self.breaks or self.num_sums <= self.break_at:
            return super().allreduce(tensors, options)
        self._note("broken")
        Breaking.on_break(self.rank)
        for tensor in tensors:
            tensor.fill_(float("nan"))
        return None


@pytest.fixture
def breaking(monkeypatch):
    monkeypatch.setattr(Breaking, "break_at", None)
    monkeypatch.setattr(Breaking, "ranks", set(), raising=False)
    return Breaking


class Ahead(FakeCuda):
    """A stand-in on which copies complete at once, while events still complete late."""

    def copy(self, target, source):
        if self.device_of(target).type == "cpu":
            super().copy(target, source)
        else:
            self._set(target, source)

    def host_reader(self):
        return self._set

    @staticmethod
    def _set(target, source):
        with torch.no_grad():
            target.copy_(source)


@pytest.fixture
def fake():
    return Ahead(patience=0)


class Lone:
    """A worker of a group of one over posing NCCL, whose batches report to the test."""

    def __init__(self, end, device, optim=fused_sgd):
        self.at_step = {}
        self.alone = Alone(
            policy=SYNC,
            on_non_finite="ignore",
            collective=end,
            device=device,
            optim=optim,
            train=self._train,
        )
        self.worker = self.alone.worker
        self.num_forwards = 0

    def _train(self, model, batch):
        step, self.num_forwards = self.num_forwards, self.num_forwards + 1
        self.at_step.get(step, lambda: None)()
        return -model.w.sum()

    @property
    def num_counted(self):
        return self.worker.protocol.unreported


@pytest.fixture
def lone(fake, breaking, request):
    breaking.break_at = getattr(request, "param", None)
    with posing_group(1, "nccl", TIMEOUT_S, fake=fake, new_backend=breaking) as (end,):
        breaking.on_break = lambda rank: end._communicators.abort()
        device = CudaDevice(GPU, api=fake)
        with device.activate():
            lone = Lone(end, device)
            yield lone
            lone.worker.close()


def test_the_host_runs_ahead_and_counts_a_step_once_its_reduction_has_succeeded(fake, lone):
    """From step 1 on an event completes only if waited for, which only the run-ahead does."""
    seen = []

    def look():
        seen.append((lone.num_counted, lone.worker.local_step, len(fake.calls("wait_host"))))

    def hold():
        look()
        fake.patience = None

    def let_go():
        look()
        fake.patience = 0

    lone.at_step = {0: look, 1: hold, 2: look, 3: let_go, 4: look}
    fake.log.clear()
    lone.worker.run_epoch_plan(plan(range(5)))
    # The first step is counted at once; the timer waits for the end of step 0 before step 3.
    assert seen[:4] == [(0, 0, 0), (1, 1, 0), (1, 2, 0), (1, 3, 1)]
    assert seen[4][0] >= 2
    assert lone.alone.w == 5.0
    (report,) = lone.alone.take()
    assert report.stats.num_batches == 5
    assert report.stats.loss_samples == 10


@pytest.mark.parametrize("lone", [1, 2, 4], indirect=True)
def test_an_aborted_reduction_changes_neither_parameters_nor_counts(lone, breaking):
    """Step ``break_at`` and those after it were launched, and ended with garbage."""
    break_at = breaking.break_at
    with pytest.raises(CollectiveAborted, match="bucketed_mean was aborted"):
        lone.worker.run_epoch_plan(plan(range(5)))
    lone.worker.steps.abandon_steps()
    lone.worker._reporter.report_rest()
    assert lone.num_forwards > break_at
    assert lone.alone.w == float(break_at)
    assert lone.worker.local_step == break_at
    assert lone.worker.replica.lockstep.step == break_at
    reports = [r for r in lone.alone.take() if isinstance(r, (m.BatchReport, m.EpochReport))]
    assert sum(r.stats.num_batches for r in reports) == break_at
    assert sum(r.stats.loss_samples for r in reports) == 2 * break_at


def test_the_host_waits_for_an_optimizer_whose_kernels_cannot_skip_a_step(fake, breaking):
    breaking.break_at = 2
    with posing_group(1, "nccl", TIMEOUT_S, fake=fake, new_backend=breaking) as (end,):
        breaking.on_break = lambda rank: end.abort()
        device = CudaDevice(GPU, api=fake)
        with device.activate():
            lone = Lone(end, device, optim=lambda params: torch.optim.SGD(params, 1.0))
            counted = []
            lone.at_step = {i: lambda: counted.append(lone.num_counted) for i in range(5)}
            with pytest.raises(CollectiveAborted):
                lone.worker.run_epoch_plan(plan(range(5)))
            assert counted == [0, 1, 2]
            assert lone.alone.w == 2.0
            lone.worker.close()


def test_a_message_is_handled_once_all_earlier_steps_have_succeeded(fake, lone):
    """The capture is requested before step 2, when step 1 is late."""

    def capture():
        lone.alone.send(m.TakeCheckpoint(id=1))
        fake.patience = 10

    lone.at_step = {1: capture}
    lone.worker.run_epoch_plan(plan(range(5)))
    (captured,) = [r for r in lone.alone.take() if isinstance(r, m.CapturedState)]
    assert captured.step == 2
    assert captured.report.stats.num_batches == 2
    assert captured.payload.params[0][0].item() == 2.0


# -- whole runs ----------------------------------------------------------------------------


@pytest.fixture
def over_nccl(monkeypatch, breaking):
    """Runs over posing NCCL; yields the stand-in."""
    fake = Ahead(patience=1)
    pose(monkeypatch, lambda: fake)
    ends = []

    def create(world_size, kind, devices, timeout_s):
        made = create_nccl_groups([GPU] * world_size, timeout_s)
        ends.append(made)
        return made

    breaking.on_break = lambda rank: ends[-1][rank]._communicators.abort()
    monkeypatch.setattr(run_module, "create_collectives", create)
    monkeypatch.setattr(nccl_module, "new_backend", breaking)
    with standing_in(fake):
        yield fake
    assert fake.violations == []


class Counted(nn.Module):
    """A number for each sample, which only training that sample changes, and a count of forwards.

    Attributes:
        w: Falls by the learning rate of the step in which the sample was trained.
        forwards: Passes behind these parameters.
    """

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(40, dtype=torch.float64))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.float64))

    def forward(self, indices):
        self.forwards += 1
        return self.w[indices]


def falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n))


def train_counted(model, batch):
    return -model(batch[0]).mean()


def train_weighted(model, batch):
    """Weights on the device, of which some are 0."""
    weights = (batch[0] % 3).double()
    losses = -model(batch[0]) * weights
    return losses.sum() / weights.sum().clamp(min=1), weights.sum()


def train_mixed(model, batch):
    """A weight on one rank, the next step on the other, and then on both."""
    worker = current_worker()
    train = train_counted if worker.local_step % 3 == worker.rank else train_weighted
    return train(model, batch)


def train_nothing(model, batch):
    return -model(batch[0]).mean(), torch.zeros((), dtype=torch.float64)


def counted_run(*, ranks=2, train=train_counted, optim=fused_sgd, **calls):
    b = builder(
        model=lambda device: Counted().to(device),
        optim=optim,
        train=train,
        dataset=40,
        way=(SYNC, THREAD),
        ranks=ranks,
    )
    b = b.seed(5).on_non_finite("ignore").scheduler(falling)
    for name, argument in calls.items():
        b = getattr(b, name)(argument)
    return b.run().join(WAIT_S)


def fused_adamw(params):
    return torch.optim.AdamW(params, 0.1, fused=True)


def fused_momentum(params):
    return fused_sgd(params, 0.1, momentum=0.9, weight_decay=0.1)


@pytest.fixture
def late_steps(monkeypatch):
    """Counts the steps launched before the host had the result of their reduction."""
    counted, make = [], nccl_module.WatchedExchange
    monkeypatch.setattr(nccl_module, "WatchedExchange", lambda *a: (counted.append(1), make(*a))[1])
    return counted


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optim": fused_adamw, "max_grad_norm": 0.3},
        {"optim": fused_momentum, "bucket_cap_mb": 1e-5, "accumulate": 2},
        {"optim": fused_adamw, "bucket_cap_mb": 1e-5, "balance": True},
        {"optim": fused_adamw, "train": train_weighted},
        {"optim": fused_adamw, "train": train_weighted, "accumulate": 2, "ranks": 3},
        {"optim": fused_momentum, "train": train_weighted, "bucket_cap_mb": 1e-5},
        {"optim": fused_momentum, "train": train_mixed},
        {"optim": fused_momentum, "train": train_mixed, "bucket_cap_mb": 1e-5},
    ],
    ids=[
        "plain",
        "clipped",
        "accumulated",
        "balanced",
        "weighted",
        "three ranks",
        "weighted buckets",
        "mixed",
        "mixed buckets",
    ],
)
def test_a_run_over_nccl_equals_one_over_threads(settings, over_nccl, late_steps, monkeypatch):
    over = counted_run(**settings)
    monkeypatch.undo()
    threads = counted_run(**settings)
    torch.testing.assert_close(over.params["w"], threads.params["w"], rtol=1e-12, atol=1e-12)
    assert [e.num_samples for e in over.metrics] == [40]
    assert over.metrics[0].avg_loss == pytest.approx(threads.metrics[0].avg_loss)
    assert late_steps


def test_weights_of_0_skip_the_step_on_the_device(over_nccl, monkeypatch):
    def train(model, batch):
        made = current_worker().local_step
        return (train_nothing if made % 2 else train_counted)(model, batch)

    over = counted_run(train=train, optim=fused_adamw)
    monkeypatch.undo()
    threads = counted_run(train=train, optim=fused_adamw)
    torch.testing.assert_close(over.params["w"], threads.params["w"], rtol=1e-12, atol=1e-12)
    assert over.metrics[0].num_samples == 40


def test_the_host_waits_for_steps_whose_values_it_reads(over_nccl, late_steps):
    """Steps that may be dropped, and those without samples on some rank."""
    counted_run(on_non_finite="skip")
    assert not late_steps


@pytest.mark.parametrize("dies_at", [1, 3, 5])
def test_the_other_ranks_continue_after_a_death_and_train_each_sample_once(dies_at, over_nccl):
    def train(model, batch):
        worker = current_worker()
        if worker.rank == 1 and worker.local_step == dies_at:
            raise ValueError("planted")
        return -model.w[batch[0]].sum()

    b = builder(
        model=lambda device: Counted().to(device),
        optim=fused_sgd,
        train=train,
        dataset=40,
        way=(SYNC, THREAD),
        ranks=3,
    )
    state = b.on_non_finite("ignore").on_worker_failure("continue").run().join(WAIT_S)
    assert [e.num_samples for e in state.metrics] == [40]
    assert (state.params["w"] > 0).all()
    assert [failure.rank for failure in state.failures] == [1]


@pytest.mark.parametrize("break_at", [1, 2, 5, 9])
def test_aborted_steps_are_repeated_without_a_trace_of_the_first_attempt(
    break_at, over_nccl, breaking, monkeypatch
):
    """Learning rates and buffers are restored."""
    breaking.break_at = break_at
    over = counted_run(balance=True, on_worker_failure="continue")
    breaking.break_at = None
    monkeypatch.undo()
    whole = counted_run()
    assert torch.equal(over.params["w"], whole.params["w"])
    assert over.buffers["forwards"].item() == whole.buffers["forwards"].item() == 10
    assert over.metrics[0].num_samples == 40


@pytest.mark.parametrize("break_at", [1, 2, 5, 7])
def test_aborted_steps_of_an_own_loop_are_not_counted_by_every(break_at, over_nccl, breaking):
    def fired():
        found = {0: [], 1: []}

        def loop(worker):
            for (indices,) in worker.batches():
                worker.step(-worker.model(indices).mean())
                if worker.every(3):
                    found[worker.rank].append(worker.global_step)

        run = Trainer.loop(
            lambda device: Counted().to(device), lambda model: fused_sgd(model.parameters()), loop
        )
        run.dataset((torch.arange(40),)).batch_size(2).devices(["cpu"] * 2).policy("sync").seed(5)
        run.num_epochs(1).backend("thread").balance(False).on_non_finite("ignore").progress(False)
        run.on_worker_failure("continue").tune_allocator(False).run().join(WAIT_S)
        return found

    breaking.break_at = break_at
    broken = fired()
    breaking.break_at = None
    assert broken == fired() == {0: [4, 10, 16], 1: [4, 10, 16]}
