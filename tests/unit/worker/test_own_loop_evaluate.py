"""Evaluations in the body of an own loop: values, training bits, errors and deaths."""

import random
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from runtime import EvaluationFailed, ReplicaMismatch, Trainer, WorkerFailed, current_worker
from runtime.core.errors import CollectiveTimeout
from runtime.device.metering import StepMeter
from runtime.worker.meetings import Meetings
from tests.support.looping import (
    NUM_SAMPLES,
    Meeting,
    loop_builder,
    marked,
    net,
    one,
    points,
)
from tests.support.running import WAIT_S

HELD_OUT = 37  # no multiple of the batch size, nor of the ranks


def adam(model):
    return torch.optim.Adam(model.parameters(), 1e-2)


def square_loss(model, batch):
    return F.mse_loss(model(batch[0]).double(), batch[1])


def means(model, batch):
    """Means over the batch, which depend on the modes and on the weights."""
    assert not torch.is_grad_enabled()
    assert not any(module.training for module in model.modules())
    error = model(batch[0]).double() - batch[1]
    return {"square": error.square().mean(), "far": (error.abs() > 1).double().mean()}


def builder(loop, *, model=net, ranks=2, data=None, **settings):
    made = Trainer.loop(model, adam, loop).dataset(data or points(23, 1)).batch_size(4)
    made = made.num_epochs(2).devices(["cpu"] * ranks).policy("sync").seed(0)
    made = made.collective_timeout(WAIT_S).tune_allocator(False)
    for name, value in settings.items():
        getattr(made, name)(value)
    return made


def weights(state):
    return torch.cat([t.double().flatten() for t in state.state_dict().values()])


def on_one_device(parameters):
    """Means of the held-out samples, with a model of these parameters and no buffers."""
    model = smooth_net("cpu")
    nn.utils.vector_to_parameters(parameters, model.parameters())
    with torch.no_grad():
        found = means(model.eval(), points(HELD_OUT, 2))
    return {name: value.item() for name, value in found.items()}


def smooth_net(device):
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)
    return nn.Sequential(*layers).double().to(device)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("as_loader", [False, True], ids=["arrays", "loader"])
def test_the_means_equal_those_of_one_device(ranks, as_loader):
    held_out = points(HELD_OUT, 2)
    if as_loader:
        held_out = DataLoader(TensorDataset(*held_out), batch_size=5, drop_last=True)
    found = []

    def loop(worker):
        for batch in worker.batches():
            before = worker.evaluate(held_out, means)
            worker.step(square_loss(worker.model, batch))
            after = worker.evaluate(held_out, means)
            parameters = nn.utils.parameters_to_vector(worker.model.parameters()).detach()
            found.append((worker.global_step, before, after, parameters.clone()))

    builder(loop, model=smooth_net, ranks=ranks).run().join(WAIT_S)
    assert len(found) == 2 * 6  # as many calls as batches: the last one of an epoch has one rank
    by_step = {}
    for step, _, after, parameters in found:
        assert after == pytest.approx(on_one_device(parameters), rel=1e-12)
        assert by_step.setdefault(step, after) == after  # the same bits on all ranks
    for step, before, *_ in found:
        earlier = [at for at in by_step if at < step]
        if earlier:
            assert before == by_step[max(earlier)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_sample_is_evaluated_once_by_all_ranks(ranks):
    seen = []

    def note(model, batch):
        seen.extend(batch[0].tolist())
        return {"mean": batch[0].double().mean()}

    fn = Meeting(ranks, note)

    def loop(worker):
        for number, batch in enumerate(worker.batches()):
            worker.step(worker.model.loss(worker.epoch, batch))
            if number == 1:
                found = worker.evaluate((torch.arange(HELD_OUT),), fn)
                assert found == {"mean": pytest.approx((HELD_OUT - 1) / 2)}

    loop_builder(loop, ranks=ranks).run().join(WAIT_S)
    assert sorted(seen) == list(range(HELD_OUT))
    assert fn.met == set(range(ranks))


def test_the_function_has_the_current_worker():
    def fn(model, batch):
        return {"epoch": current_worker().current_epoch, "lr": current_worker().current_lr}

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            found = worker.evaluate((torch.arange(HELD_OUT),), fn)
            assert found == {"epoch": worker.epoch, "lr": worker.optimizer.param_groups[0]["lr"]}

    loop_builder(loop, ranks=2).run().join(WAIT_S)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "settings", [{}, {"precision": "bf16"}, {"precision": "fp16"}, {"accumulate": 2}]
)
def test_training_has_the_same_bits_with_evaluations(ranks, settings):
    def draws(model, batch):
        torch.rand(1), random.random(), np.random.rand()
        return means(model, batch)

    def trained(evaluates):
        def loop(worker):
            for batch in worker.batches():
                if evaluates and not settings.get("accumulate"):
                    worker.evaluate(points(HELD_OUT, 2), draws)
                worker.step(square_loss(worker.model, batch))
                modes = [module.training for module in worker.model.modules()]
                if evaluates and worker.every(1):
                    worker.evaluate(points(HELD_OUT, 2), draws)
                assert [module.training for module in worker.model.modules()] == modes

        return builder(loop, ranks=ranks, **settings).run().join(WAIT_S)

    without, evaluated = trained(False), trained(True)
    assert torch.equal(weights(without), weights(evaluated))
    losses = [[m.avg_loss for m in state.metrics] for state in (without, evaluated)]
    assert losses[0] == losses[1]


def test_buffers_are_averaged_over_the_ranks():
    held_out = points(HELD_OUT, 2)
    found, buffers = {}, {}

    def loop(worker):
        for number, batch in enumerate(worker.batches()):
            worker.step(square_loss(worker.model, batch))
            if number == 0:
                own = worker.model[1].running_mean.clone()
                found[worker.rank] = worker.evaluate(held_out, seen)
                assert torch.equal(worker.model[1].running_mean, own)
                buffers[worker.rank] = own

    def seen(model, batch):
        return {"mean": model[1].running_mean.sum(), **means(model, batch)}

    builder(loop).run().join(WAIT_S)
    assert not torch.equal(buffers[0], buffers[1])
    assert found[0] == found[1]
    assert found[0]["mean"] == pytest.approx(sum(b.sum().item() for b in buffers.values()) / 2)


class Scaled(nn.Module):
    """The backward pass reads a buffer, and the body writes another one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
        return self.linear(x) * self.scale


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluate_between_a_forward_and_its_backward_pass_changes_nothing(ranks):
    def scaled(device):
        torch.manual_seed(0)
        return Scaled().double().to(device)

    def trained(evaluates):
        def loop(worker):
            for batch in worker.batches():
                loss = square_loss(worker.model, batch)
                if evaluates:
                    worker.evaluate(points(HELD_OUT, 2), means)
                worker.step(loss)

        return weights(builder(loop, model=scaled, ranks=ranks).run().join(WAIT_S))

    assert torch.equal(trained(False), trained(True))


class TwoPoints(torch.optim.SGD):
    """An optimizer with modes: evaluated weights are the negative trained ones."""

    def eval(self):
        self._negate()

    def train(self):
        if self.state.pop("negated", None):
            self._negate()

    @torch.no_grad()
    def _negate(self):
        self.state["negated"] = {}
        for group in self.param_groups:
            for param in group["params"]:
                param.neg_()


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_of_an_optimizer_with_modes_are_those_of_its_eval(ranks):
    found = []

    def first(model, batch):
        return {"first": next(model.parameters()).flatten()[0]}

    def loop(worker):
        for number, batch in enumerate(worker.batches()):
            worker.step(square_loss(worker.model, batch))
            if number == 0:
                weight = next(worker.model.parameters()).flatten()[0].item()
                found.append((weight, worker.evaluate(points(9, 2), first)["first"]))
                assert next(worker.model.parameters()).flatten()[0].item() == weight

    made = Trainer.loop(smooth_net, lambda model: TwoPoints(model.parameters(), 0.1), loop)
    made = made.dataset(points(16, 1)).batch_size(4).num_epochs(1).devices(["cpu"] * ranks)
    made.tune_allocator(False).run().join(WAIT_S)
    assert [evaluated for _, evaluated in found] == [pytest.approx(-weight) for weight, _ in found]


def test_weights_of_a_result_are_used():
    values = torch.arange(1.0, 12.0)

    def by_value(model, batch):
        x = batch[0]
        return {"mean": (x * x).sum() / x.sum()}, x.sum()

    found = []

    def loop(worker):
        for number, batch in enumerate(worker.batches()):
            worker.step(worker.model.loss(worker.epoch, batch))
            if number == 0:
                found.append(worker.evaluate((values,), by_value)["mean"])

    loop_builder(loop).run().join(WAIT_S)
    assert found == [pytest.approx((values**2).sum() / values.sum())] * 2


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("alone", [0, 1])
def test_a_rank_that_evaluates_alone_gets_an_error_that_names_both(when, alone):
    def loop(worker):
        for batch in worker.batches():
            if when == "before" and worker.rank == alone:
                worker.evaluate((torch.arange(9),), one)
            worker.step(worker.model.loss(worker.epoch, batch))
            if when == "after" and worker.rank == alone:
                worker.evaluate((torch.arange(9),), one)

    since = time.monotonic()
    with pytest.raises(ReplicaMismatch, match=rf"rank {alone} made [^;]*then evaluate\(\)"):
        loop_builder(loop).run().join(WAIT_S)
    assert time.monotonic() - since < WAIT_S / 2


@pytest.mark.parametrize("dies", [False, True])
def test_a_rank_that_skips_an_evaluation_or_dies_before_it_ends_the_run_with_its_error(dies):
    def loop(worker):
        for batch in worker.batches():
            if worker.rank == 1 and dies:
                raise ValueError("planted")
            if worker.rank == 1:
                continue
            worker.evaluate((torch.arange(9),), one)
            worker.step(worker.model.loss(worker.epoch, batch))

    error, message = (WorkerFailed, "planted") if dies else (ReplicaMismatch, r"evaluate\(\)")
    with pytest.raises(error, match=message):
        loop_builder(loop).run().join(WAIT_S)


def test_a_rank_that_never_calls_ends_the_wait_of_the_others():
    ended = threading.Event()

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if worker.rank == 1:
                assert ended.wait(WAIT_S)
            try:
                worker.evaluate((torch.arange(9),), one)
            except CollectiveTimeout:
                ended.set()
                raise

    with pytest.raises(WorkerFailed, match=r"no step within 0\.3 s"):
        loop_builder(loop).collective_timeout(0.3).run().join(WAIT_S)


def test_a_long_evaluation_extends_the_wait_of_ranks_without_batches():
    """Rank 2 takes no batch, and waits for longer than the timeout in all."""
    pause = threading.Event()

    def slow(model, batch):
        pause.wait(0.15)  # never set: the time of a batch
        return {"n": 1.0}

    def loop(worker):
        for number, batch in enumerate(worker.batches()):
            worker.step(worker.model.loss(worker.epoch, batch))
            if number == 0:
                assert worker.evaluate((torch.arange(22),), slow) == {"n": 1.0}

    data = (torch.arange(4),)  # two batches for three ranks
    state = loop_builder(loop, ranks=3, dataset=data, epochs=1).collective_timeout(0.5)
    state.run().join(WAIT_S)


@pytest.fixture
def num_waiting(monkeypatch):
    """A semaphore that each rank releases when it waits at a meeting."""
    released = threading.Semaphore(0)
    wait_for_all = Meetings.wait_for_all

    def releasing(*args):
        released.release()
        return wait_for_all(*args)

    monkeypatch.setattr(Meetings, "wait_for_all", releasing)
    return released


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stepped", [False, True], ids=["before_the_step", "after_the_step"])
def test_a_death_before_an_evaluation_calls_the_loop_of_the_others_again(
    ranks, stepped, num_waiting
):
    calls = []

    def evaluate(worker):
        if worker.rank == 1:
            for _ in range(ranks - 1):
                assert num_waiting.acquire(timeout=WAIT_S)
            raise ValueError("planted")
        found = worker.evaluate((torch.arange(9),), one)
        assert found == {"n": 1.0}

    def loop(worker):
        calls.append(worker.rank)
        for batch in worker.batches():
            if not stepped:
                evaluate(worker)
            worker.step(worker.model.loss(worker.epoch, batch))
            if stepped:
                evaluate(worker)

    state = loop_builder(loop, ranks=ranks).on_worker_failure("continue").run().join(WAIT_S)
    assert marked(state) == [NUM_SAMPLES] * 2
    assert [m.num_samples for m in state.metrics] == [NUM_SAMPLES] * 2
    assert [failure.rank for failure in state.failures] == [1]
    others = [rank for rank in range(ranks) if rank != 1]
    assert sorted(calls) == sorted([1, *others, *others])


def dying(rank, ranks):
    """A function in which every rank evaluates a batch, and one raises."""

    def inner(model, batch):
        if current_worker().rank == rank:
            raise ValueError("planted")
        return one(model, batch)

    return Meeting(ranks, inner)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_death_within_an_evaluation_is_survived(ranks):
    fn = dying(1, ranks)

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            assert worker.evaluate((torch.arange(40),), fn) == {"n": 1.0}

    state = loop_builder(loop, ranks=ranks).on_worker_failure("continue").run().join(WAIT_S)
    assert marked(state) == [NUM_SAMPLES] * 2
    assert [failure.rank for failure in state.failures] == [1]


@pytest.mark.parametrize("hides", [False, True])
def test_an_error_of_the_function_names_the_samples(hides):
    def fn(model, batch):
        if 7 in batch[0]:
            raise ValueError("planted")
        return {"n": 1.0}

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            try:
                worker.evaluate((torch.arange(9),), fn)
            except EvaluationFailed:
                if not hides:
                    raise

    with pytest.raises(WorkerFailed, match=r"samples 6 to 7 .*planted"):
        loop_builder(loop).run().join(WAIT_S)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_single_worker_evaluates_under_every_policy(policy):
    found = []

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            found.append(worker.evaluate((torch.arange(9),), one))

    loop_builder(loop, ranks=1, policy=policy).run().join(WAIT_S)
    assert found == [{"n": 1.0}] * 24


def test_evaluate_within_a_step_and_outside_the_body_is_refused():
    def loop(worker):
        with pytest.raises(RuntimeError, match=r"worker.evaluate\(\) is for a batch"):
            worker.evaluate((torch.arange(9),), one)
        for batch in worker.batches():
            worker.backward(worker.model.loss(worker.epoch, batch))
            with pytest.raises(RuntimeError, match=r"after worker.step\(\)"):
                worker.evaluate((torch.arange(9),), one)
            worker.step()

    assert marked(loop_builder(loop).run().join(WAIT_S)) == [NUM_SAMPLES] * 2


def small_net(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_autocast_of_the_body_evaluates_the_weights_of_after_the_step(ranks):
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))
    found = []

    def mean(model, batch):
        return {"mean": model(batch[0]).mean()}

    def loop(worker):
        for batch, target in worker.batches():
            with autocast():
                loss = F.mse_loss(worker.model(batch.float()).float(), target.float())
                worker.step(loss)
                means = worker.evaluate((x,), mean)
            with autocast(), torch.no_grad():
                parts = [worker.model(part).mean().item() * len(part) for part in x.split(4)]
            found.append((means["mean"], sum(parts) / 9))

    builder(loop, model=small_net, ranks=ranks).run().join(WAIT_S)
    assert found
    assert all(mean == pytest.approx(expected, rel=1e-6) for mean, expected in found)


@pytest.mark.parametrize("ranks", [1, 2])
def test_casts_of_evaluated_weights_are_not_those_of_training(ranks):
    """An optimizer with modes, and a function that computes gradients, for which casts are kept."""

    @torch.enable_grad()
    def mean(model, batch):
        return {"mean": model(batch[0].float()).mean()}

    def trained(evaluates):
        def loop(worker):
            for x, y in worker.batches():
                if evaluates:
                    worker.evaluate(points(9, 2), mean)
                worker.step(F.mse_loss(worker.model(x.float()).float(), y.float()))

        made = Trainer.loop(small_net, lambda model: TwoPoints(model.parameters(), 0.1), loop)
        made.dataset(points(16, 1)).batch_size(4).num_epochs(1).devices(["cpu"] * ranks)
        return weights(made.precision("bf16").tune_allocator(False).run().join(WAIT_S))

    assert torch.equal(trained(False), trained(True))


def test_an_evaluation_does_not_count_as_an_averaging_of_the_buffers():
    """A rank with fewer of them would copy the state of another one after a death."""

    def counts(evaluates):
        found = {}

        def loop(worker):
            for batch in worker.batches():
                worker.step(square_loss(worker.model, batch))
                if evaluates:
                    worker.evaluate(points(9, 2), means)
                progress = worker._loop._replica.lockstep
                found[worker.rank, worker.global_step] = progress.num_syncs

        builder(loop, ranks=3).run().join(WAIT_S)
        return found

    assert counts(True) == counts(False)


def with_two_optimizers(loop):
    def optim(model):
        parts = {"a": model[0], "b": model[2]}
        return {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in parts.items()}

    b = Trainer.loop(lambda device: small_net(device).double(), optim, loop)
    b.dataset(points(22, 1)).batch_size(4).num_epochs(1).devices(["cpu"] * 2).policy("sync")
    return b.collective_timeout(WAIT_S).tune_allocator(False)


def test_a_step_before_an_evaluation_that_fails_stays_with_its_loss_and_its_time(monkeypatch):
    fn, made, taken = dying(1, 2), [], []
    take = StepMeter.take

    def noting(self, **kwargs):
        stats = take(self, **kwargs)
        if threading.current_thread().name == "gpu-worker-0":
            taken.append((stats.num_batches, stats.num_timed))
        return stats

    monkeypatch.setattr(StepMeter, "take", noting)

    def loop(worker):
        for batch in worker.batches():
            loss = worker.model(batch[0]).square().mean()
            for name in ("a", "b"):
                is_first = worker.rank == 0 and not made
                worker.backward(loss * 0 + float(is_first), optimizer=name, retain_graph=True)
                worker.step(optimizer=name)
            if worker.rank == 0:
                made.append(worker.global_step)
            worker.evaluate((torch.arange(40),), fn)

    state = with_two_optimizers(loop).on_worker_failure("continue").run().join(WAIT_S)
    assert state.metrics[0].scalars["loss/b"] > 0
    assert sum(num for num, _ in taken) == sum(timed for _, timed in taken) == len(made)


def test_a_death_in_an_evaluation_between_two_optimizers_leaves_no_state(tmp_path):
    fn = dying(1, 2)

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model(batch[0]).square().mean(), optimizer="a")
            worker.evaluate((torch.arange(40),), fn)
            worker.step(worker.model(batch[0]).square().mean(), optimizer="b")

    with pytest.raises(WorkerFailed, match="planted"):
        with_two_optimizers(loop).checkpoint_dir(tmp_path).run().join(WAIT_S)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_the_steps_of_the_body_are_counted_where_an_evaluation_fails():
    fn, made, counted = dying(1, 2), [], []

    def loop(worker):
        for batch in worker.batches():
            worker.step(square_loss(worker.model, batch))
            if worker.rank == 0:
                made.append(1)
                counted.append(worker._loop._replica.progress.body_steps)
            worker.evaluate((torch.arange(40),), fn)

    builder(loop, on_worker_failure="continue").run().join(WAIT_S)
    assert counted == list(range(1, len(made) + 1))
