"""What ``epoch_fn`` does to a run within an epoch that a checkpoint has begun is not done twice."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from runtime import CheckpointError, Trainer
from tests.support.running import CADENCE, SYNC, WAIT_S

X = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
SIZE, EPOCHS, PER_EPOCH = 16, 3, 6
STOPS = {"between epochs": PER_EPOCH, "within": PER_EPOCH + 3, "later": 2 * PER_EPOCH + 2}


def new(device=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def lower_the_rate(worker):
    for group in worker.optimizer.param_groups:
        group["lr"] *= 0.1


def clear_the_state(worker):
    worker.optimizer.state.clear()


def shrink_the_weights(worker):
    with torch.no_grad():
        for parameter in worker.model.parameters():
            parameter.mul_(0.5)


def reset_buffers(worker):
    worker.model[1].reset_running_stats()


def freeze(worker):
    worker.model[0].requires_grad_(False)


def add_a_group(worker):
    worker.optimizer.add_param_group({"params": [*worker.model[2].parameters()], "lr": 0.02})


def attach(worker):
    worker.set_scheduler(lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)))


def add_a_group_and_attach(worker):
    add_a_group(worker)
    attach(worker)


def draw(worker):
    torch.rand(3)
    torch.rand(2, generator=worker.generator)


CHANGES = [
    lower_the_rate,
    clear_the_state,
    shrink_the_weights,
    reset_buffers,
    freeze,
    add_a_group,
    attach,
    add_a_group_and_attach,
    draw,
]


def builder(change, *, ranks=2, policy=SYNC, door="builder", at=1, epochs=EPOCHS):
    def sgd(params):
        return torch.optim.SGD(
            [p for p in params if p.shape != (1, 4) and p.shape != (1,)], 0.05, 0.9
        )

    def train(model, batch):
        noise = torch.rand(len(batch[0]), 6)  # the worker's generator
        return (model(batch[0] + 0.1 * noise) - 1).square().mean()

    def body(worker):
        for batch in worker.batches():
            worker.step(train(worker.model, batch))

    if door == "loop":
        b = Trainer.loop(new, lambda model: sgd(model.parameters()), body)
    else:
        b = Trainer.builder(new, sgd, train)
    b.dataset((X,)).global_batch_size(SIZE).num_epochs(epochs).devices(["cpu"] * ranks)
    b.policy(policy).seed(0).progress(False)
    return b.epoch_fn(lambda epoch, worker: change(worker) if epoch == at else None)


def values(state):
    return {**state.params, **state.buffers}


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize(("ranks", "door"), [(1, "builder"), (2, "builder"), (2, "loop")])
def test_a_resumed_run_equals_one_that_was_not_stopped(change, stop, ranks, door, tmp_path):
    whole = builder(change, ranks=ranks, door=door).run().join(WAIT_S)
    b = builder(change, ranks=ranks, door=door).max_steps(STOPS[stop])
    b.checkpoint_dir(tmp_path).run().join(WAIT_S)
    resumed = builder(change, ranks=ranks, door=door).resume(tmp_path).run().join(WAIT_S)
    for name, value in values(whole).items():
        assert torch.equal(values(resumed)[name], value), name
    assert resumed.metrics[-1].learning_rate == whole.metrics[-1].learning_rate


@pytest.mark.parametrize("policy", [SYNC, CADENCE])
def test_it_is_called_for_the_epoch_that_had_begun_for_its_effect_elsewhere(policy, tmp_path):
    called = []

    def change(worker):
        called.append((worker.rank, worker.current_epoch, worker.local_step))

    b = builder(change, policy=policy).max_steps(STOPS["within"]).checkpoint_dir(tmp_path)
    b.run().join(WAIT_S)
    first, called[:] = list(called), []
    builder(change, policy=policy).resume(tmp_path).run().join(WAIT_S)
    assert {(rank, epoch) for rank, epoch, _ in called} == {(0, 1), (1, 1)}
    assert len(called) == 2
    begun = {rank for rank, *_ in first}
    assert begun == {0, 1} or policy is CADENCE
    assert all(step > 0 for rank, _, step in called if rank in begun)


def test_it_sees_the_weights_of_the_checkpoint(tmp_path):
    seen = []

    def change(worker):
        seen.append(worker.model[0].weight.detach().clone())

    state = builder(change, ranks=1).max_steps(9).checkpoint_dir(tmp_path).run().join(WAIT_S)
    seen.clear()
    builder(change, ranks=1).resume(tmp_path).run().join(WAIT_S)
    assert torch.equal(seen[0], state.params["0.weight"])


def test_a_run_may_be_resumed_twice_within_an_epoch(tmp_path):
    whole = builder(add_a_group_and_attach).run().join(WAIT_S)
    for stop in (9, 10):
        b = builder(add_a_group_and_attach).max_steps(stop).checkpoint_dir(tmp_path)
        b.resume(tmp_path, missing_ok=True).run().join(WAIT_S)
    resumed = builder(add_a_group_and_attach).resume(tmp_path).run().join(WAIT_S)
    for name, value in values(whole).items():
        assert torch.equal(values(resumed)[name], value), name


@pytest.mark.parametrize("stop", STOPS)
def test_a_schedule_that_nobody_attaches_again_is_refused(stop, tmp_path):
    builder(attach).max_steps(STOPS[stop]).checkpoint_dir(tmp_path).run().join(WAIT_S)
    if stop == "between epochs":  # it was not attached yet
        builder(lambda worker: None).resume(tmp_path).run().join(WAIT_S)
        return
    with pytest.raises(CheckpointError, match=r"attached by worker.set_scheduler\(f\) in epoch 1"):
        builder(lambda worker: None).resume(tmp_path).run().join(WAIT_S)
    with pytest.raises(CheckpointError, match=r"call worker\.set_scheduler"):
        builder(attach, at=7).resume(tmp_path).run().join(WAIT_S)


# Settings that the checkpoint has otherwise


def scheduled(scheduler, optimizer=None, epochs=2):
    make = optimizer or (lambda params: torch.optim.Adam(params, 0.01))
    b = Trainer.builder(new, make, lambda model, batch: model(batch[0]).square().mean())
    b.dataset((X,)).global_batch_size(SIZE).num_epochs(epochs).devices(["cpu"]).progress(False)
    return b if scheduler is None else b.scheduler(scheduler)


def steps(gamma=0.5):
    return lambda o: lr_scheduler.StepLR(o, 2, gamma)


def resumed(tmp_path, caplog, first, second):
    first.max_steps(8).checkpoint_dir(tmp_path).run().join(WAIT_S)
    caplog.clear()
    caplog.set_level(logging.WARNING)
    state = second.resume(tmp_path).run().join(WAIT_S)
    return state.metrics[-1].learning_rate, caplog.text


def test_another_class_of_scheduler_is_refused_by_name(tmp_path):
    scheduled(steps()).max_steps(8).checkpoint_dir(tmp_path).run().join(WAIT_S)
    again = scheduled(lambda o: lr_scheduler.CosineAnnealingLR(o, 12)).resume(tmp_path)
    with pytest.raises(CheckpointError, match=r"is StepLR, and .* makes CosineAnnealingLR"):
        again.run().join(WAIT_S)


def test_another_setting_of_a_scheduler_is_reported(tmp_path, caplog):
    _, text = resumed(tmp_path, caplog, scheduled(steps()), scheduled(steps(0.9)))
    assert "gamma=0.5" in text
    assert "gamma=0.9" in text


def test_a_scheduler_without_one_in_the_checkpoint_begins_here(tmp_path, caplog):
    rate, text = resumed(tmp_path, caplog, scheduled(None), scheduled(steps()))
    assert "the checkpoint has no scheduler: StepLR begins here" in text
    assert rate == pytest.approx(0.01 * 0.5)  # 4 steps: after the third the first halving


def test_a_checkpoint_with_a_scheduler_that_is_left_out_is_reported(tmp_path, caplog):
    rate, text = resumed(tmp_path, caplog, scheduled(steps()), scheduled(None))
    assert "has the scheduler StepLR, and this run none" in text
    assert rate == pytest.approx(0.01 * 0.5**3)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (lambda p: torch.optim.Adam(p, 0.01, amsgrad=True), ("amsgrad=False", "not True")),
        (lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1), ("weight_decay=0", "not 0.1")),
        (lambda p: torch.optim.Adam(p, 0.01, foreach=True), ()),
    ],
    ids=["amsgrad", "weight decay", "implementation"],
)
def test_another_setting_of_the_optimizer_is_reported(second, words, tmp_path, caplog):
    first = scheduled(None)
    first.max_steps(8).checkpoint_dir(tmp_path).run().join(WAIT_S)
    caplog.clear()
    scheduled(None, second).resume(tmp_path).run().join(WAIT_S)
    assert all(word in caplog.text for word in words)
    assert bool(words) == ("the checkpoint's" in caplog.text)
