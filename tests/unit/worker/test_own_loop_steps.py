"""What belongs to the step in bodies of own loops, also where a rank has no samples in it."""

import threading

import pytest
import torch

from runtime import Trainer
from runtime.core.group_gate import GroupGate
from runtime.worker.meetings import Meetings
from runtime.worker.task_evaluation import TaskEvaluation
from tests.support.looping import loop_builder, marked, one
from tests.support.running import WAIT_S
from tests.unit.worker.test_own_loop import (
    SHORT,
    one_device,
    run,
    smooth_net,
    square_loss,
    weights,
)

POLICIES = ("sync", "cadence", "async")


def sgd_of(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def is_short(worker):
    """True in the last step of an epoch of ``SHORT``, in which rank 1 has no sample."""
    return worker.global_step % 3 == 2


@pytest.mark.parametrize("early", [False, True], ids=["after_the_step", "before_the_step"])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_every_counts_the_steps_of_all_ranks(k, early):
    due = {0: [], 1: []}

    def act_if_due(worker):
        if worker.every(k):
            due[worker.rank].append(2 * worker.epoch + is_short(worker))
            assert worker.evaluate(SHORT, one) == {"n": 1.0}
            worker.set_lr(0.1 / len(due[0]))

    def loop(worker):
        for batch in worker.batches():
            if early:
                act_if_due(worker)
            worker.step(square_loss(worker.model, batch))
            if not early:
                act_if_due(worker)

    run(Trainer.loop(smooth_net, sgd_of, loop), SHORT, num_epochs=6)
    steps = range(k, 12, k) if early else range(k - 1, 12, k)
    assert due == {0: list(steps), 1: [step for step in steps if step % 2 == 0]}


def test_every_counts_a_step_that_another_rank_skips():
    due = {0: [], 1: []}

    def loop(worker):
        for batch in worker.batches():
            if worker.rank == 1 and worker.global_step == 2:
                continue
            worker.step(worker.model.loss(worker.epoch, batch))
            if worker.every(3):
                due[worker.rank].append(worker.global_step)
                worker.evaluate((torch.arange(9),), one)

    loop_builder(loop, dataset=(torch.arange(20),), epochs=1).run().join(WAIT_S)
    assert due == {0: [4], 1: [4]}


@pytest.mark.parametrize("early", [False, True], ids=["after_the_step", "before_the_step"])
def test_a_rate_that_is_set_in_a_short_step_holds_on_all_ranks(early):
    def loop(worker):
        for batch in worker.batches():
            if is_short(worker) and early:
                worker.set_lr(0.3 / (1 + worker.epoch))
            worker.step(square_loss(worker.model, batch))
            if is_short(worker):
                worker.set_lr(0.2 / (1 + worker.epoch))

    def body(model):
        optimizer, count = sgd_of(model), [0]

        def step(batch):
            epoch, short = divmod(count[0], 2)
            if short and early:
                optimizer.param_groups[0]["lr"] = 0.3 / (1 + epoch)
            optimizer.zero_grad()
            square_loss(model, batch).backward()
            optimizer.step()
            if short:
                optimizer.param_groups[0]["lr"] = 0.2 / (1 + epoch)
            count[0] += 1

        return step

    state = run(Trainer.loop(smooth_net, sgd_of, loop), SHORT, num_epochs=4)
    expected = one_device(body, data=SHORT, batch=8, epochs=4)
    torch.testing.assert_close(weights(state), expected, rtol=1e-8, atol=1e-10)


def test_a_rate_of_a_batch_that_all_skip_holds_on_all_ranks():
    rates = {0: set(), 1: set()}

    def loop(worker):
        for batch in worker.batches():
            if is_short(worker):
                worker.set_lr(0.25)
                continue
            worker.step(square_loss(worker.model, batch))
            if worker.epoch:
                rates[worker.rank].add(worker.optimizer.param_groups[0]["lr"])

    run(Trainer.loop(smooth_net, sgd_of, loop), SHORT, num_epochs=4)
    assert rates == {0: {0.25}, 1: {0.25}}


def test_one_of_the_ranks_with_samples_is_first_in_every_step():
    """Rank 0 has no samples, and runs the body in no step."""
    firsts = {}

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if worker.is_first:
                firsts.setdefault((worker.epoch, worker.global_step), []).append(worker.rank)

    data = (torch.arange(23),)
    loop_builder(loop, dataset=data).partition_ratios([0, 3]).run().join(WAIT_S)
    ranks = [rank for _, rank in sorted(firsts.items())]
    assert ranks == [[1]] * 12


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_that_has_left_the_epoch_is_not_first(policy):
    left, firsts = threading.Event(), {}

    def loop(worker):
        for number, batch in enumerate(worker.batches()):
            if worker.rank == 0 and worker.epoch == 0:
                break
            if worker.rank == 0:
                left.set()
            worker.step(worker.model.loss(worker.epoch, batch))
            if policy != "sync" and worker.epoch == 0 and number == 2:
                assert left.wait(WAIT_S)
            firsts.setdefault((worker.epoch, worker.rank), []).append(worker.is_first)
        if worker.epoch == 0:
            left.set()

    state = loop_builder(loop, ranks=3, policy=policy).run().join(WAIT_S)
    assert marked(state)[1] == 23
    assert firsts[0, 1][-1]
    assert firsts[1, 0][-1]
    assert not any(firsts[0, 2] + firsts.get((1, 2), []))
    assert (0, 0) not in firsts


def test_a_rank_without_samples_waits_for_an_evaluation_that_others_have_not_begun(monkeypatch):
    """Rank 1 reads the posts only when rank 2, without samples, waits for the evaluation."""
    wait, wait_for_all, ahead = TaskEvaluation.wait, Meetings.wait_for_all, threading.Event()
    waits = []

    def announced(self, key, num_ranks):
        ahead.set()
        wait(self, key, num_ranks)

    def waiting(self, generation, ranks, number, batch):
        if threading.current_thread().name == "gpu-worker-1" and number == 1:
            waits.append(ahead.wait(WAIT_S))
        return wait_for_all(self, generation, ranks, number, batch)

    monkeypatch.setattr(TaskEvaluation, "wait", announced)
    monkeypatch.setattr(Meetings, "wait_for_all", waiting)
    found = []

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            found.append(worker.evaluate((torch.arange(9),), one))

    made = loop_builder(loop, ranks=3, dataset=(torch.arange(4),), epochs=1)
    made.collective_timeout(2).run().join(WAIT_S)
    assert waits == [True]
    assert found == [{"n": 1.0}] * 2


def test_a_death_after_a_step_leaves_the_count_of_a_rank_without_samples(monkeypatch):
    """Rank 2 has joined the step, and waits for the next act, when rank 1 dies."""
    follow, abort = Meetings.follow, GroupGate.abort
    followed, aborted = threading.Semaphore(0), threading.Event()

    def following(*args):
        followed.release()
        return follow(*args)

    def aborting(*args):
        abort(*args)
        aborted.set()

    monkeypatch.setattr(Meetings, "follow", following)
    monkeypatch.setattr(GroupGate, "abort", aborting)
    due = {0: [], 2: []}

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if worker.rank == 1:
                assert all(followed.acquire(timeout=WAIT_S) for _ in range(2))
                raise ValueError("planted")
            assert aborted.wait(WAIT_S)
            if worker.every(3):
                due[worker.rank].append(worker.epoch)
                worker.evaluate((torch.arange(9),), one)

    made = loop_builder(loop, ranks=3, dataset=(torch.arange(4),), epochs=6)
    state = made.on_worker_failure("continue").run().join(WAIT_S)
    assert [failure.rank for failure in state.failures] == [1]
    assert due == {0: [2, 5], 2: [2, 5]}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_global_step_counts_the_batches_of_a_step_in_progress(policy, ranks):
    if policy != "sync" and ranks > 1:
        pytest.skip("ranks count the others' batches after each round")
    seen = [[] for _ in range(ranks)]

    def loop(worker):
        for batch in worker.batches():
            seen[worker.rank].append(worker.global_step)
            loss = worker.model.loss(worker.epoch, batch)
            is_last = worker.global_step // ranks % 5 == 4
            worker.step(loss) if is_last else worker.backward(loss)

    data = (torch.arange(10 * ranks),)
    loop_builder(loop, ranks=ranks, policy=policy, dataset=data).run().join(WAIT_S)
    assert seen == [list(range(0, 10 * ranks, ranks))] * ranks
