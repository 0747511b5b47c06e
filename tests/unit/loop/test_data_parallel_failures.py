"""Failed batches: the error raised, and the state left unchanged."""

from __future__ import annotations

import _thread
import threading

import pytest
import torch
from torch import nn

from runtime import DataParallelCoordinator, NonFiniteError, ReplicaFailed
from runtime.loop import rank_replica, runner
from tests.support.own_loop import exchanging_gradients
from tests.support.parallel import adam, equal, identical, loss_fn, mlp, replicas, samples_of, state

WAIT_S = 60.0


def rank():
    return int(threading.current_thread().name.rsplit("-", 1)[1])


def with_norm(device):
    return mlp(device, norm=True)


def full_state(coordinator):
    """Parameters, buffers and optimizer state of every replica."""
    found = {}
    for r, (model, optimizer) in enumerate(
        zip(coordinator.models, coordinator.optimizers, strict=True)
    ):
        found |= {f"{r}.{name}": tensor for name, tensor in state(model).items()}
        for i, p in enumerate(optimizer.param_groups[0]["params"]):
            for name, value in optimizer.state[p].items():
                found[f"{r}.{i}.{name}"] = torch.as_tensor(value).clone()
    return found


@pytest.fixture
def trained():
    """Replicas with batch norm after two batches, and a plan for their ``loss_fn``."""
    plan = {}

    def planned(model, samples):
        loss, correct = loss_fn(model, samples)
        return plan.get(rank(), lambda loss, model: loss)(loss, model), correct

    with replicas(3, model=with_norm, loss=planned) as coordinator:
        for seed in range(2):
            coordinator.train_batch(samples_of(9, seed))
        yield coordinator, plan


def fails_and_stays_usable(coordinator, plan, error, match):
    """The batch changes nothing, and the next one trains."""
    before = full_state(coordinator)
    with pytest.raises(error, match=match) as caught:
        coordinator.train_batch(samples_of(9, 5))
    assert equal(full_state(coordinator), before)
    assert all(p.grad is None for model in coordinator.models for p in model.parameters())
    plan.clear()
    coordinator.train_batch(samples_of(9, 6))
    assert identical(coordinator)
    assert not equal(full_state(coordinator), before)
    return caught.value


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_exception_in_one_replica_names_its_rank_and_changes_nothing(trained, at):
    coordinator, plan = trained

    def fail(loss, model):
        raise LookupError("planted")

    plan[at] = fail
    error = fails_and_stays_usable(
        coordinator, plan, ReplicaFailed, f"rank {at} on cpu failed in batch 2: LookupError: plant"
    )
    assert (error.rank, type(error.__cause__)) == (at, LookupError)


def test_of_several_failures_the_lowest_rank_is_named(trained):
    coordinator, plan = trained

    def fail(loss, model):
        raise LookupError(f"planted on {rank()}")

    plan.update({1: fail, 2: fail})
    assert (
        fails_and_stays_usable(coordinator, plan, ReplicaFailed, "rank 1 .*planted on 1").rank == 1
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 2])
def test_a_non_finite_loss_raises_before_any_step(trained, at, value):
    coordinator, plan = trained
    plan[at] = lambda loss, model: loss + value
    error = fails_and_stays_usable(
        coordinator, plan, NonFiniteError, f"rank {at}, step 2: a loss is not finite.*No replica"
    )
    assert (error.rank, error.step, error.what) == (at, 2, "loss")


class Poisoned(torch.autograd.Function):
    """Identity in forward; writes a value into the gradient in backward."""

    @staticmethod
    def forward(ctx, weight, value):
        ctx.value = value
        return weight.sum() * 0

    @staticmethod
    def backward(ctx, grad):
        poison = torch.zeros(3, 8, dtype=torch.float64)
        poison[1, 1] = ctx.value
        return poison, None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 1])
def test_a_non_finite_gradient_raises_before_any_step(trained, at, value):
    """The value reaches the mean, is reported, and no optimizer has stepped."""
    coordinator, plan = trained
    plan[at] = lambda loss, model: loss + Poisoned.apply(model[3].weight, value)
    error = fails_and_stays_usable(
        coordinator, plan, NonFiniteError, f"rank {at}, step 2: a gradient .*parameter: '3.weight'"
    )
    assert (error.rank, error.what, error.parameter) == (at, "gradient", "3.weight")


def test_gradients_whose_squares_overflow_are_finite():
    def huge(model, samples):
        return loss_fn(model, samples)[0] * 1e30

    with replicas(2, model=lambda d: mlp(d, torch.float32), loss=huge) as coordinator:
        result = coordinator.train_batch(samples_of(8, dtype=torch.float32))
        assert 1e25 < result.grad_norm < 1e35
        assert identical(coordinator)


@pytest.mark.parametrize(
    ("result", "cause", "match"),
    [
        (lambda loss, model: 3.0, TypeError, "return the mean loss of the samples as a tensor"),
        (
            lambda loss, model: loss.expand(2),
            ValueError,
            r"a loss of shape \(2,\): return a scalar",
        ),
        (lambda loss, model: loss.detach(), ValueError, "without a gradient"),
    ],
)
def test_a_loss_of_the_wrong_type_is_named(trained, result, cause, match):
    coordinator, plan = trained
    plan[1] = result
    error = fails_and_stays_usable(coordinator, plan, ReplicaFailed, match)
    assert type(error.__cause__) is cause


@pytest.mark.parametrize(
    ("correct", "match"),
    [
        (0.5, "not their fraction"),
        (-1, "not their fraction"),
        (float("nan"), "not their fraction"),
        ("all", "the second value is the number of right samples"),
        (torch.zeros(2), "the second value is the number of right samples"),
        (True, "the second value is the number of right samples"),
    ],
)
def test_an_invalid_number_of_correct_samples_is_named(correct, match):
    def loss(model, samples):
        return loss_fn(model, samples)[0], correct

    with replicas(2, loss=loss) as coordinator, pytest.raises(ReplicaFailed, match=match):
        coordinator.train_batch(samples_of(4))


@pytest.mark.parametrize("correct", [2, 2.0, torch.tensor(2), torch.tensor([2.0])])
def test_numbers_of_correct_samples_are_summed(correct):
    with replicas(2, loss=lambda m, s: (loss_fn(m, s)[0], correct)) as coordinator:
        assert coordinator.train_batch(samples_of(4)).correct == 4


def test_a_loss_that_reaches_no_parameter_is_named():
    other = nn.Linear(6, 3).double()
    with (
        replicas(2, loss=lambda m, s: loss_fn(other, s)) as coordinator,
        pytest.raises(ReplicaFailed, match="depends on no trainable parameter"),
    ):
        coordinator.train_batch(samples_of(4))


def test_sparse_gradients_are_named():
    def model(device):
        return nn.EmbeddingBag(5, 2, sparse=True)

    with (
        replicas(
            2, model=model, optim=lambda p: torch.optim.SGD(p, 1), loss=lambda m, s: m(s).sum()
        ) as coordinator,
        pytest.raises(ReplicaFailed, match=r"'weight' has a sparse gradient.*sparse=False"),
    ):
        coordinator.train_batch(torch.zeros(4, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("samples", "error", "match"),
    [
        ((), ValueError, "no samples"),
        ([], ValueError, "no samples"),
        ({}, ValueError, "empty dict"),
        ((torch.zeros(0, 6), torch.zeros(0)), ValueError, "no samples"),
        (
            (torch.zeros(4, 6), torch.zeros(3)),
            ValueError,
            r"samples\[0\] has 4, samples\[1\] has 3",
        ),
        (torch.tensor(1.0), ValueError, "without dimension"),
        (7, TypeError, "samples is a int"),
    ],
)
def test_samples_that_cannot_be_cut_are_named_before_anything_runs(samples, error, match):
    ran = []
    with (
        replicas(2, loss=lambda m, s: ran.append(s)) as coordinator,
        pytest.raises(error, match=match),
    ):
        coordinator.train_batch(samples)
    assert ran == []


@pytest.mark.parametrize("how", ["directly", "copies"])
def test_after_a_failure_within_a_step_all_replicas_have_what_it_has_changed(how):
    """As on one device, that may be a part of the parameters; gradients and buffers are undone."""

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            if not failed:
                failed.append(True)
                self.param_groups[0]["params"][0].data.add_(1.0)  # no version counts it
                raise MemoryError("planted")
            return super().step(closure)

    failed = []
    with (
        exchanging_gradients(how),
        replicas(2, model=with_norm, optim=lambda p: Failing(p, 0.1)) as coordinator,
    ):
        before = state(coordinator.primary)
        with pytest.raises(ReplicaFailed, match=r"rank 0 .*MemoryError: planted"):
            coordinator.train_batch(samples_of(4))
        after = state(coordinator.primary)
        assert [name for name in after if not torch.equal(after[name], before[name])] == [
            next(name for name, _ in coordinator.primary.named_parameters())
        ]
        assert all(p.grad is None for p in coordinator.primary.parameters())
        assert identical(coordinator)
        coordinator.train_batch(samples_of(4))
        assert identical(coordinator)


def test_training_continues_after_an_average_that_failed(monkeypatch):
    """The group that the failure has aborted is made anew."""
    all_reduce, failed = rank_replica.RankReplica.all_reduce, []

    def fails_once(self, *args):
        if self.rank == 1 and not failed:
            failed.append(True)
            raise OSError("planted")
        return all_reduce(self, *args)

    monkeypatch.setattr(rank_replica.RankReplica, "all_reduce", fails_once)
    with exchanging_gradients("copies"), replicas(3, model=with_norm) as coordinator:
        before = full_state(coordinator)
        with pytest.raises(ReplicaFailed, match=r"rank 1 .*OSError: planted"):
            coordinator.train_batch(samples_of(9))
        assert equal(full_state(coordinator), before)
        coordinator.train_batch(samples_of(9))
        assert identical(coordinator)
        assert not equal(full_state(coordinator), before)


def test_train_batch_from_loss_fn_or_another_thread_is_refused():
    errors = []

    def again(model, samples):
        if rank() == 0:
            with pytest.raises(RuntimeError, match="is busy") as caught:
                coordinator.train_batch(samples)
            errors.append(caught.value)
        return loss_fn(model, samples)

    with replicas(2, loss=again) as coordinator:
        coordinator.train_batch(samples_of(4))
    assert len(errors) == 1


# -- Ctrl-C -----------------------------------------------------------------------------------


def interrupted(coordinator, seed):
    with pytest.raises(KeyboardInterrupt):
        coordinator.train_batch(samples_of(9, seed))


def test_ctrl_c_while_losses_are_computed_changes_nothing_and_training_may_go_on(trained):
    coordinator, plan = trained
    before = full_state(coordinator)
    go = threading.Event()

    def interrupt(loss, model):
        _thread.interrupt_main()
        assert go.wait(WAIT_S)
        return loss

    def release(loss, model):
        threading.Timer(0.1, go.set).start()
        return loss

    plan.update({1: interrupt, 2: release})
    interrupted(coordinator, 5)
    assert equal(full_state(coordinator), before)
    plan.clear()
    coordinator.train_batch(samples_of(9, 6))
    assert identical(coordinator)


def test_ctrl_c_within_a_step_lets_it_complete():
    class Interrupting(torch.optim.SGD):
        def step(self, closure=None):
            if presses:
                presses.pop()
                _thread.interrupt_main()
            stepped.append(rank())
            return super().step(closure)

    stepped, presses = [], [1]
    with replicas(2, optim=lambda p: Interrupting(p, 0.1)) as coordinator:
        before = state(coordinator.primary)
        interrupted(coordinator, 1)
        assert stepped == [0]
        assert identical(coordinator)
        assert not equal(state(coordinator.primary), before)
        coordinator.train_batch(samples_of(9, 2))


def test_after_ctrl_c_in_user_code_that_does_not_return_the_next_call_waits_for_it(
    trained, monkeypatch
):
    coordinator, plan = trained
    monkeypatch.setattr(runner, "INTERRUPT_TIMEOUT_S", 0.05)
    go = threading.Event()

    def stuck(loss, model):
        _thread.interrupt_main()
        assert go.wait(WAIT_S)
        return loss

    plan[1] = stuck
    before = full_state(coordinator)
    interrupted(coordinator, 5)
    plan[1] = lambda loss, model: go.is_set() and loss
    threading.Timer(0.1, go.set).start()
    assert equal(full_state(coordinator), before)
    assert go.is_set()
    coordinator.train_batch(samples_of(9))
    assert identical(coordinator)


def test_an_interrupted_build_leaves_no_thread():
    def interrupting(device):
        _thread.interrupt_main()
        return mlp(device)

    with pytest.raises(KeyboardInterrupt):
        DataParallelCoordinator(interrupting, adam, loss_fn, ["cpu"] * 2)
    assert not [t for t in threading.enumerate() if t.name.startswith("data-parallel-")]


@pytest.mark.parametrize("how", ["directly", "copies"])
def test_a_gradient_of_one_replica_that_cannot_be_averaged_is_named(how):
    class Late(nn.Module):
        """Has a sparse gradient, which cannot be averaged, in rank 1's second batch."""

        def __init__(self):
            super().__init__()
            self.embedding, self.linear = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1)
            self.sparse = False

        def forward(self, x):
            looked_up = self.embedding(torch.zeros(1, dtype=torch.long))
            return self.linear(x[:, :2]) + (looked_up.sum() if self.sparse else 0)

    def loss(model, samples):
        model.sparse = model.sparse or (rank() == 1 and model.count > 0)
        model.count += 1
        return model(samples).square().mean()

    def build(device):
        model = Late().to(device)
        model.count = 0
        return model

    with (
        exchanging_gradients(how),
        DataParallelCoordinator(
            build, lambda p: torch.optim.SGD(p, 0.1), loss, ["cpu", "cpu"]
        ) as coordinator,
    ):
        coordinator.train_batch(torch.ones(4, 2))
        with pytest.raises(ReplicaFailed, match=r"rank 1 .*'embedding.weight' has a sparse"):
            coordinator.train_batch(torch.ones(4, 2))
