"""Several optimizers in one run: each step equals that on one device."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from contextlib import suppress
from itertools import groupby

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from runtime import CheckpointError, Trainer, current_worker, record_scalar
from runtime.core.errors import WorkerFailed
from runtime.replica.optimizers import Optimizers
from tests.support.pairs import diagonal
from tests.support.running import CADENCE, GLOO, OVER_CPU, SYNC, THREAD, WAIT_S

N, BATCH, EPOCHS = 46, 4, 2
DATA = torch.randn(N, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.maker = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
            self.judge = nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 1)).double()
            self.unused = nn.Linear(2, 2).double()


def judge_loss(model, batch):
    (x,) = batch
    made = model.judge(model.maker(x[:, 2:]))
    return (functional.softplus(-model.judge(x[:, :2])) + functional.softplus(made)).mean()


def maker_loss(model, batch):
    (x,) = batch
    with suppress(RuntimeError):  # in a plain loop
        record_scalar("seen", x.mean())
    return functional.softplus(-model.judge(model.maker(x[:, 2:]))).mean()


OPTIMIZERS = {
    "judge": lambda params: torch.optim.AdamW(params, 1e-2),
    "maker": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
}
LOSSES = {"judge": judge_loss, "maker": maker_loss}


def gan(ranks=1, *, way=(SYNC, THREAD), losses=LOSSES, batch_size=BATCH, epochs=EPOCHS):
    return (
        Trainer.builder(lambda device: Gan(), OPTIMIZERS, losses)
        .dataset((DATA,))
        .batch_size(batch_size)
        .num_epochs(epochs)
        .devices(["cpu"] * ranks)
        .policy(way[0])
        .backend(way[1])
        .collective_timeout(WAIT_S)
    )


def run(b):
    return b.run().join(WAIT_S)


def apart(a, b):
    """The largest relative distance of a tensor."""
    return max(float((a[k] - b[k]).norm() / b[k].norm().clamp_min(1e-30)) for k in b)


def by_hand(batches, *, clip=None, decay=None):
    """The same training in a plain loop on one device."""
    model = Gan()
    steps = {name: make(getattr(model, name).parameters()) for name, make in OPTIMIZERS.items()}
    schedulers = [decay(o) for o in steps.values()] if decay else []
    for batch, num_ranks in batches:
        for name, loss in LOSSES.items():
            model.zero_grad()
            loss(model, (batch,)).backward()
            if clip:
                nn.utils.clip_grad_norm_(getattr(model, name).parameters(), clip)
            steps[name].step()
        for _ in range(num_ranks):
            for scheduler in schedulers:
                scheduler.step()
    return model.state_dict()


class Watched:
    """Records the samples of all ranks in each step."""

    def __init__(self):
        self.batches = {}  # by epoch, step and rank; no two threads share an entry
        self._counts = Counter()

    def judge(self, model, batch):
        worker = current_worker()
        epoch, rank = worker.current_epoch, worker.rank
        self.batches[epoch, self._counts[epoch, rank], rank] = batch[0].clone()
        self._counts[epoch, rank] += 1
        return judge_loss(model, batch)

    @property
    def losses(self):
        return {"judge": self.judge, "maker": maker_loss}

    def by_hand(self, **kwargs):
        steps = [
            [self.batches[key] for key in keys]
            for _, keys in groupby(sorted(self.batches), lambda key: key[:2])
        ]
        return by_hand([(torch.cat(step), len(step)) for step in steps], **kwargs)


@diagonal(ranks=[1, 2, 3, 4], backend=[THREAD, GLOO])
def test_sync_equals_one_device(ranks, backend):
    watched = Watched()
    state = run(gan(ranks, way=(SYNC, backend), losses=watched.losses))
    assert apart(state.params, watched.by_hand()) < 1e-8
    metrics = state.metrics[-1]
    both = metrics.scalars["loss/judge"] + metrics.scalars["loss/maker"]
    assert metrics.avg_loss == pytest.approx(both, rel=1e-9)
    assert "seen" in metrics.scalars
    assert [m.num_samples for m in state.metrics] == [N] * EPOCHS


def test_several_optimizers_train_with_clipping_and_schedulers():
    def decay(optimizer):
        return StepLR(optimizer, 5, 0.5)

    watched = Watched()
    state = run(gan(2, losses=watched.losses).max_grad_norm(0.05).scheduler(decay))
    assert apart(state.params, watched.by_hand(clip=0.05, decay=decay)) < 1e-8


def test_buckets_change_nothing():
    wanted = run(gan(2, way=(SYNC, GLOO))).params
    assert apart(run(gan(2, way=(SYNC, GLOO)).bucket_cap_mb(1e-4)).params, wanted) < 1e-12


@pytest.mark.parametrize("backend", [OVER_CPU, THREAD])
def test_cadence_trains_each_sample_once(backend):
    state = run(gan(2, way=(CADENCE, backend)).anchor(2))
    assert [m.num_samples for m in state.metrics] == [N] * EPOCHS
    assert apart(state.params, Gan().state_dict()) > 1e-3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_several_optimizers_train_in_low_precision(precision):
    b = Trainer.builder(lambda device: Gan().float(), OPTIMIZERS, LOSSES)
    b.dataset((DATA.float(),)).batch_size(BATCH).num_epochs(EPOCHS).devices(2).policy("sync")
    state = run(b.precision(precision))
    assert apart(state.params, Gan().float().state_dict()) > 1e-3


@pytest.mark.parametrize("ranks", [1, 3])
def test_resumed_runs_are_bitwise_equal_to_uninterrupted_ones(ranks, tmp_path):
    def made():
        return gan(ranks, epochs=3).scheduler({"maker": lambda o: StepLR(o, 7, 0.5)})

    whole = run(made())
    run(made().checkpoint_dir(tmp_path).max_steps(2 * -(-N // BATCH)))
    resumed = run(made().resume(tmp_path))
    assert all(torch.equal(whole.params[k], resumed.params[k]) for k in whole.params)


def test_another_kind_of_optimizer_is_refused_at_resume(tmp_path):
    run(gan().checkpoint_dir(tmp_path))
    b = Trainer.builder(
        lambda device: Gan(),
        {**OPTIMIZERS, "maker": lambda params: torch.optim.AdamW(params)},
        LOSSES,
    )
    b.dataset((DATA,)).batch_size(BATCH).num_epochs(3).devices(1).policy("sync").resume(tmp_path)
    with pytest.raises(CheckpointError, match="the state of judge: AdamW, maker: SGD"):
        run(b)


def test_each_sample_counts_once_if_a_rank_dies_between_two_optimizers():
    """The first optimizer's step is undone before both are repeated."""
    died = threading.Event()

    def dies(model, batch):
        worker = current_worker()
        if worker.rank == 1 and worker.local_step == 3 and not died.is_set():
            died.set()
            raise ValueError("planted")
        return maker_loss(model, batch)

    seen = []

    def watched(model, batch):
        if current_worker().rank == 0:
            seen.append([p.detach().clone() for p in model.judge.parameters()])
        return judge_loss(model, batch)

    b = gan(3, losses={"judge": watched, "maker": dies}, epochs=1)
    state = run(b.on_worker_failure("continue"))
    assert died.is_set()
    assert [m.num_samples for m in state.metrics] == [N]
    # The aborted step is repeated from the same weights.
    assert all(torch.equal(a, b) for a, b in zip(seen[3], seen[4], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(seen[2], seen[3], strict=True))


def test_a_loss_that_is_not_finite_is_skipped_or_raised():
    values = defaultdict(list)

    def noted(loss):
        def call(model, batch):
            value = loss(model, batch)
            if loss is maker_loss and current_worker().local_step == 1:
                value = value * float("nan")
            values[loss].append((value.item(), len(batch[0])))
            return value

        return call

    losses = {"judge": noted(judge_loss), "maker": noted(maker_loss)}
    state = run(gan(losses=losses, epochs=1).on_non_finite("skip"))
    assert state.metrics[0].num_skipped == BATCH
    pairs = zip(values[judge_loss], values[maker_loss], strict=True)
    kept = [(a + b, n) for (a, n), (b, _) in pairs if b == b]
    assert len(kept) == -(-N // BATCH) - 1
    expected = sum(loss * n for loss, n in kept) / sum(n for _, n in kept)
    assert state.metrics[0].avg_loss == pytest.approx(expected, rel=1e-9)
    assert run(gan(2, losses=losses, epochs=1).on_non_finite("skip")).metrics[0].num_skipped > 0
    for ranks in (1, 2):
        with pytest.raises(WorkerFailed):
            run(gan(ranks, losses=losses, epochs=1))


def test_plateaus_are_stepped_by_a_metric():
    rates = []
    b = gan(epochs=3).scheduler(
        lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0, mode="max"), metric="loss/judge"
    )
    b.epoch_fn(lambda epoch, worker: rates.append(worker.optimizer["maker"].param_groups[0]["lr"]))
    run(b)
    assert rates[0] == 0.1
    assert len(rates) == 3


def test_only_the_parameters_of_the_stepping_optimizer_get_gradients():
    found = set()

    def look(model, batch):
        found.update(n for n, p in model.named_parameters() if p.requires_grad)
        return judge_loss(model, batch)

    run(gan(losses={"judge": look, "maker": maker_loss}, epochs=1))
    assert {name.split(".")[0] for name in found} == {"judge", "unused"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.accumulate(2), "accumulate"),
        (lambda b: b.cuda_graphs(True), "cuda_graphs"),
        (lambda b: b.sync_batchnorm(True), "sync_batchnorm"),
        (lambda b: b.all_gather(True), r"all_gather\(True\) cannot be combined with several"),
        (lambda b: b.param_groups(lambda model: []), "param_groups"),
    ],
)
def test_settings_that_exclude_several_optimizers_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        change(gan(2)).run()


def test_names_of_functions_and_optimizers_must_match():
    with pytest.raises(ValueError, match="give each optimizer a function"):
        Trainer.builder(lambda device: Gan(), OPTIMIZERS, {"judge": judge_loss})
    with pytest.raises(TypeError, match="two dicts"):
        Trainer.builder(lambda device: Gan(), OPTIMIZERS, judge_loss)
    for optimizers, message in (
        ({"critic": OPTIMIZERS["judge"]}, "no submodule 'critic'"),
        ({"judge": OPTIMIZERS["judge"], "judge.0": OPTIMIZERS["judge"]}, "share a parameter"),
        ({"judge": torch.optim.LBFGS}, "needs a closure"),
    ):
        losses = dict.fromkeys(optimizers, judge_loss)
        b = Trainer.builder(lambda device: Gan(), optimizers, losses)
        with pytest.raises(WorkerFailed) as raised:
            run(b.dataset((DATA,)).batch_size(BATCH).num_epochs(1).devices(1))
        assert message in str(raised.value.__cause__)


@pytest.mark.parametrize(
    ("schedulers", "message"),
    [
        ({"critic": lambda o: StepLR(o, 1)}, "has critic, but the optimizers are judge, maker"),
        ({"judge": ReduceLROnPlateau, "maker": lambda o: StepLR(o, 1)}, "for each optimizer, or"),
    ],
)
def test_schedulers_that_do_not_fit_the_optimizers_are_refused(schedulers, message):
    with pytest.raises(WorkerFailed) as raised:
        run(gan().scheduler(schedulers))
    assert message in str(raised.value.__cause__)


def test_schedulers_by_name_are_refused_for_one_optimizer():
    b = Trainer.builder(lambda device: Gan(), OPTIMIZERS["judge"], judge_loss).dataset((DATA,))
    with pytest.raises(ValueError, match="for several optimizers"):
        b.batch_size(BATCH).num_epochs(1).devices(1).scheduler(
            {"judge": lambda o: StepLR(o, 1)}
        ).run()


def test_a_state_of_another_number_of_groups_is_refused():
    model = Gan()
    both = Optimizers(
        {name: OPTIMIZERS[name](getattr(model, name).parameters()) for name in LOSSES}
    )
    judge_loss(model, (DATA,)).backward()
    before = model.judge[0].weight.detach().clone()
    both.step()
    assert not torch.equal(model.judge[0].weight, before)
    state = both.state_dict()
    state["param_groups"].pop()
    with pytest.raises(ValueError, match="it has 1 groups, not 2"):
        both.load_state_dict(state)


def test_weights_are_refused():
    losses = {**LOSSES, "judge": lambda model, batch: (judge_loss(model, batch), 3)}
    with pytest.raises(WorkerFailed) as raised:
        run(gan(losses=losses))
    assert "with a weight" in str(raised.value.__cause__)


def test_zero_grad_clears_the_gradients_of_all_members():
    """The class is an optimizer only by its interface, which a plain loop calls."""
    model = Gan()
    both = Optimizers(
        {name: OPTIMIZERS[name](getattr(model, name).parameters()) for name in LOSSES}
    )
    (judge_loss(model, (DATA[:4],)) + maker_loss(model, (DATA[:4],))).backward()
    both.zero_grad()
    assert all(p.grad is None for p in model.parameters())
