"""Evaluations in the body of an own loop on the average of a round that each call forces."""

import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from coordinator.average_tasks import AverageTasks
from coordinator.machine import Coordinator
from coordinator.messages import Evaluating, EvaluationRequested, TaskKind
from coordinator.run_finalizer import RunFinalizer
from runtime import EvaluationFailed, Trainer, WorkerFailed, current_worker
from runtime.core.errors import CollectiveAborted
from runtime.worker import task_evaluation
from tests.support.looping import (
    NUM_SAMPLES,
    Marks,
    Meeting,
    loop_builder,
    marked,
    net,
    one,
    points,
)
from tests.support.running import ASYNC, CADENCE, GLOO, OVER_CPU, THREAD, WAIT_S, over

WAYS = [(CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, OVER_CPU), (ASYNC, THREAD)]
ways = over(WAYS)
HELD_OUT = (torch.arange(37),)  # 19 batches, the last of one sample


def built(loop, way, ranks=2, **kwargs):
    policy, backend = way
    return loop_builder(loop, ranks=ranks, policy=policy, **kwargs).backend(backend)


class Once:
    """True at the first call only; of one rank, or of any."""

    def __init__(self):
        self._lock = threading.Lock()
        self._is_used = False

    def __call__(self, *, of=True):
        with self._lock:
            first, self._is_used = of and not self._is_used, self._is_used or of
        return first


def observe(monkeypatch, kind, call):
    """Call ``call`` with each event of a kind that the coordinator has handled."""
    handle = Coordinator.handle

    def observed(self, event, now):
        commands = handle(self, event, now)
        if isinstance(event, kind):
            call(event)
        return commands

    monkeypatch.setattr(Coordinator, "handle", observed)


@over([*WAYS, (CADENCE, GLOO)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_evaluate_the_average_and_the_caller_gets_the_means(way, ranks):
    first, seen, samples, found = Once(), [], [], []

    def note(model, batch):
        samples.extend(batch[0].tolist())
        seen.append(model.w.clone())
        return {"w": model.w.sum(), "i": batch[0].double().mean()}

    fn = Meeting(ranks, note)

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if first():
                found.append(worker.evaluate(HELD_OUT, fn))
                seen.append(worker.model.w.detach().clone())

    state = built(loop, way, ranks).run().join(WAIT_S)
    assert fn.met == set(range(ranks))
    assert sorted(samples) == list(range(37))
    assert all(torch.equal(w, seen[0]) for w in seen)  # of one average, which the caller has
    assert found == [{"w": pytest.approx(seen[0].sum().item()), "i": pytest.approx(18)}]
    assert marked(state) == [NUM_SAMPLES] * 2


@ways
def test_every_call_is_answered_if_all_ranks_make_them_at_their_own_steps(way):
    found, due, epochs = [], [], set()

    def fn(model, batch):
        epochs.add(current_worker().current_epoch)
        return one(model, batch)

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if worker.every(2):
                due.append(worker.rank)
                found.append(worker.evaluate(HELD_OUT, fn))

    state = built(loop, way, ranks=3).run().join(WAIT_S)
    assert found == [{"n": 1.0}] * len(due)
    assert len(due) >= 24 // 2 - 3
    assert epochs <= {0, 1}
    assert [e.num_samples for e in state.metrics] == [NUM_SAMPLES] * 2


@ways
def test_calls_that_wait_are_answered_by_one_round(way, monkeypatch):
    requested, rounds = threading.Semaphore(0), []
    begin = AverageTasks.begin

    def noting(self, epoch, **settings):
        tasks = begin(self, epoch, **settings)
        rounds.append([task.rank for task in tasks if task.kind is TaskKind.REQUESTED])
        return tasks

    observe(monkeypatch, EvaluationRequested, lambda event: requested.release())
    monkeypatch.setattr(AverageTasks, "begin", noting)
    has_batch = threading.Barrier(3, timeout=WAIT_S)
    met, found = set(), []

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if worker.rank in met:
                continue
            met.add(worker.rank)
            has_batch.wait()
            if worker.rank == 2:  # its state is missing in the round of the first request
                for _ in range(2):
                    assert requested.acquire(timeout=WAIT_S)
            mean = worker.evaluate(HELD_OUT, lambda model, batch: {"rank": float(worker.rank)})
            found.append((worker.rank, mean["rank"]))

    built(loop, way, ranks=3).run().join(WAIT_S)
    answered = [callers for callers in rounds if callers]
    assert sorted(map(len, answered)) == [1, 2]
    assert 2 in max(answered, key=len)
    assert sorted(found) == [(0, 0.0), (1, 1.0), (2, 2.0)]


class Planted(BaseException):
    """Ends the thread of a worker: no error of an evaluation function."""


@ways
@pytest.mark.parametrize("ranks", [2, 3])
def test_batches_of_a_rank_that_dies_are_evaluated_by_the_others(way, ranks):
    first, samples, found = Once(), [], []

    def dies(model, batch):
        if current_worker().rank == 1 - found[0]:
            raise Planted
        samples.extend(batch[0].tolist())
        return {"i": batch[0].double().mean()}

    fn = Meeting(ranks, dies)

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if first(of=worker.rank < 2):
                found.append(worker.rank)
                found.append(worker.evaluate(HELD_OUT, fn))

    state = built(loop, way, ranks).on_worker_failure("continue").run().join(WAIT_S)
    assert sorted(samples) == list(range(37))
    assert found[1] == {"i": pytest.approx(18)}
    assert [failure.rank for failure in state.failures] == [1 - found[0]]
    assert marked(state) == [NUM_SAMPLES] * 2


@ways
@pytest.mark.parametrize("error", [Planted, ValueError])
def test_a_caller_that_dies_drops_its_evaluation_and_the_others_train_on(way, error):
    first, callers = Once(), []

    def dies(model, batch):
        if current_worker().rank == callers[0]:
            raise error("planted")
        return {"n": 1.0}

    fn = Meeting(3, dies)

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if first():
                callers.append(worker.rank)
                worker.evaluate(HELD_OUT, fn)

    state = built(loop, way, ranks=3).on_worker_failure("continue").run().join(WAIT_S)
    assert [failure.rank for failure in state.failures] == callers
    assert marked(state) == [NUM_SAMPLES] * 2


@ways
@pytest.mark.parametrize("hides", [False, True])
def test_an_error_on_another_rank_is_raised_by_the_caller_with_its_samples(way, hides):
    first, callers, caught = Once(), [], []

    def raises(model, batch):
        if current_worker().rank != callers[0]:
            raise ValueError("planted")
        return {"n": 1.0}

    fn = Meeting(2, raises)

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if first():
                callers.append(worker.rank)
                try:
                    worker.evaluate(HELD_OUT, fn)
                except EvaluationFailed as error:
                    caught.append(error)
                    if not hides:
                        raise

    state = built(loop, way).on_worker_failure("continue").run().join(WAIT_S)
    (error,) = caught
    assert (error.start, error.stop) in [(0, 2), (2, 4)]
    assert isinstance(error.__cause__, ValueError)
    assert [failure.rank for failure in state.failures] == callers
    assert marked(state) == [NUM_SAMPLES] * 2


@ways
def test_a_data_set_that_cannot_be_read_is_an_error_of_the_caller(way):
    first, callers = Once(), []

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if first():
                callers.append(worker.rank)
                worker.evaluate(object(), one)

    with pytest.raises(WorkerFailed, match="object") as caught:
        built(loop, way).run().join(WAIT_S)
    assert caught.value.rank == callers[0]


@ways
def test_a_death_before_the_round_leaves_the_call_to_the_remaining_ranks(way, monkeypatch):
    """Rank 1 is in its body, so that the round that rank 0 requests cannot complete with it."""
    has_batch, requested = threading.Barrier(2, timeout=WAIT_S), threading.Event()
    first, found = Once(), []
    observe(monkeypatch, EvaluationRequested, lambda event: requested.set())

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if worker.rank == 1:
                has_batch.wait()
                assert requested.wait(WAIT_S)
                raise ValueError("planted")
            if first():
                has_batch.wait()
                found.append(worker.evaluate(HELD_OUT, one))

    state = built(loop, way).on_worker_failure("continue").run().join(WAIT_S)
    assert found == [{"n": 1.0}]
    assert marked(state) == [NUM_SAMPLES] * 2


@ways
def test_the_last_rank_evaluates_alone(way):
    has_batch, died, found = threading.Barrier(2, timeout=WAIT_S), [], []

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if not died:
                has_batch.wait()
                if worker.rank == 1:
                    died.append(1)
                    raise ValueError("planted")
                has_batch.reset()
                died.append(0)
            found.append(worker.evaluate(HELD_OUT, one))

    state = built(loop, way).on_worker_failure("continue").run().join(WAIT_S)
    assert found
    assert found == [{"n": 1.0}] * len(found)
    assert marked(state) == [NUM_SAMPLES] * 2


@ways
def test_a_death_ends_the_run_and_the_wait_for_a_round(way):
    has_batch = threading.Barrier(2, timeout=WAIT_S)

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            has_batch.wait()
            if worker.rank == 1:
                raise ValueError("planted")
            worker.evaluate(HELD_OUT, one)

    with pytest.raises(WorkerFailed, match="planted"):
        built(loop, way).run().join(WAIT_S)


@ways
def test_a_failure_of_the_run_ends_the_wait_for_the_batch_of_another_rank(way):
    first, is_blocker, callers = Once(), Once(), []
    blocked, released = threading.Event(), threading.Event()

    def fn(model, batch):
        if is_blocker(of=current_worker().rank != callers[0]):
            blocked.set()
            assert released.wait(WAIT_S)
        assert blocked.wait(WAIT_S)
        return {"n": 1.0}

    def loop(worker):
        for batch in worker.batches():
            if blocked.is_set() and worker.rank not in callers:
                raise ValueError("planted")
            worker.step(worker.model.loss(worker.epoch, batch))
            if first():
                callers.append(worker.rank)
                try:
                    worker.evaluate(HELD_OUT, fn)
                finally:
                    released.set()

    with pytest.raises(WorkerFailed, match="planted"):
        built(loop, way, ranks=3).run().join(WAIT_S)


@ways
def test_all_ranks_evaluate_in_the_precision_of_the_run(way):
    first, types = Once(), {}

    def kind(model, batch):
        types[current_worker().rank] = model(batch[0].float()).dtype
        return {"n": 1.0}

    fn = Meeting(2, kind)

    def loop(worker):
        for x, y in worker.batches():
            worker.step(F.mse_loss(worker.model(x.float()).float(), y.float()))
            if first():
                worker.evaluate(points(37, 2), fn)
                assert not worker._loop._evaluation._evaluation.shared._calls

    b = Trainer.loop(
        lambda device: nn.Linear(4, 1).to(device),
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
        loop,
    )
    b.dataset(points(48, 1)).batch_size(4).num_epochs(1).devices(["cpu"] * 2).precision("bf16")
    b.policy(way[0]).backend(way[1]).tune_allocator(False).run().join(WAIT_S)
    assert types == {0: torch.bfloat16, 1: torch.bfloat16}


@ways
@pytest.mark.parametrize("hides", [False, True])
def test_a_call_after_the_run_was_stopped_ends_the_loop(way, hides, monkeypatch):
    shut_down, has_batch = threading.Event(), threading.Barrier(2, timeout=WAIT_S)
    original = RunFinalizer.shut_down_ranks
    ends, raised = [], []

    def noting(self):
        original(self)
        shut_down.set()

    monkeypatch.setattr(RunFinalizer, "shut_down_ranks", noting)

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if not ends:
                has_batch.wait()
            ends.append(worker.rank)
            if worker.rank == 1:
                worker.stop()
            assert shut_down.wait(WAIT_S)
            try:
                worker.evaluate(HELD_OUT, one)
            except CollectiveAborted as error:
                raised.append(str(error))
                if not hides:
                    raise

    state = built(loop, way).run().join(WAIT_S)
    assert state.reason == "stopped"
    assert raised == ["the run ends before the evaluation"] * 2


@ways
def test_a_stop_during_a_call_leaves_its_result_or_ends_the_loop(way):
    """Every order of the stop and the request ends the run as stopped."""
    has_batch, ends, met = threading.Barrier(2, timeout=WAIT_S), [], set()

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if worker.rank in met:
                continue
            met.add(worker.rank)
            has_batch.wait()
            if worker.rank == 1:
                worker.stop()
            try:
                ends.append(worker.evaluate(HELD_OUT, one))
            except CollectiveAborted as error:
                ends.append(str(error))
                raise

    for _ in range(5):
        ends.clear()
        met.clear()
        assert built(loop, way).run().join(WAIT_S).reason == "stopped"
        assert len(ends) == 2
        assert all(end in ({"n": 1.0}, "the run ends before the evaluation") for end in ends)


@ways
@pytest.mark.parametrize("settings", [{}, {"max_steps": 5}])
def test_a_call_in_the_last_batch_is_answered(way, settings):
    num_calls, found = [], []

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            num_calls.append(1)
            found.append(worker.evaluate(HELD_OUT, one))

    b = built(loop, way)
    for name, value in settings.items():
        getattr(b, name)(value)
    b.run().join(WAIT_S)
    assert found == [{"n": 1.0}] * len(num_calls)
    assert len(num_calls) == settings.get("max_steps", 24)


@ways
def test_a_rank_that_has_left_the_epoch_evaluates_too(way):
    left, first = threading.Event(), Once()
    fn = Meeting(2)

    def loop(worker):
        for batch in worker.batches():
            if worker.rank == 1 and worker.epoch == 0:
                left.set()
                break
            assert left.wait(WAIT_S)
            worker.step(worker.model.loss(worker.epoch, batch))
            if first(of=worker.epoch == 0):
                worker.evaluate(HELD_OUT, fn)

    state = built(loop, way).run().join(WAIT_S)
    assert fn.met == {0, 1}
    assert marked(state) == [NUM_SAMPLES] * 2


@ways
def test_evaluations_leave_no_trace_in_training(way):
    """One rank trains, so that rounds change nothing; the other one helps to evaluate."""

    def draws(model, batch):
        assert not torch.is_grad_enabled()
        assert not any(module.training for module in model.modules())
        torch.rand(1), random.random(), np.random.rand()
        return {"loss": F.mse_loss(model(batch[0]), batch[1])}

    def trained(evaluates):
        def loop(worker):
            for x, y in worker.batches():
                worker.step(F.mse_loss(worker.model(x), y))
                if evaluates and worker.every(2):
                    worker.evaluate(points(37, 2), draws)
                    assert all(module.training for module in worker.model.modules())

        b = Trainer.loop(net, lambda model: torch.optim.Adam(model.parameters(), 1e-2), loop)
        b.dataset(points(48, 1)).batch_size(4).num_epochs(2).devices(["cpu"] * 2).seed(0)
        b.policy(way[0]).backend(way[1]).partition_ratios([1, 0]).tune_allocator(False)
        state = b.run().join(WAIT_S)
        weights = torch.cat([t.double().flatten() for t in state.state_dict().values()])
        return weights, [e.avg_loss for e in state.metrics]

    (plain, losses), (evaluated, others) = trained(False), trained(True)
    if way[1] is THREAD:
        assert torch.equal(plain, evaluated)
        assert losses == others
    else:  # an average that arrives within a step adds rounding, with evaluations and without
        torch.testing.assert_close(plain, evaluated, rtol=1e-6, atol=1e-8)
        assert losses == pytest.approx(others)


@ways
def test_the_steps_of_two_optimizers_and_their_losses_count_in_the_round(way):
    found = []

    def loop(worker):
        for batch in worker.batches():
            for name in ("a", "b"):
                loss = -getattr(worker.model, name)[worker.epoch, batch[0]].mean()
                worker.step(loss, optimizer=name)
            found.append(worker.evaluate(HELD_OUT, one))

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("a", "b"):
                setattr(self, name, nn.Parameter(torch.zeros(2, NUM_SAMPLES).double()))

    def optim(model):
        return {name: torch.optim.SGD([getattr(model, name)], 1.0) for name in ("a", "b")}

    state = built(loop, way, model=lambda device: Two().to(device), optim=optim).run().join(WAIT_S)
    assert found == [{"n": 1.0}] * 24
    for values in state.state_dict().values():
        assert (values > 0).sum(1).tolist() == [NUM_SAMPLES] * 2
    assert all({"loss/a", "loss/b"} <= e.scalars.keys() for e in state.metrics)


@ways
def test_a_checkpoint_in_the_round_of_an_evaluation_continues_with_every_sample(way, tmp_path):
    first = Once()

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if worker.every(3):
                worker.save()
                worker.evaluate(HELD_OUT, one)
                if first(of=worker.epoch == 1):
                    worker.stop()

    built(loop, way).checkpoint_dir(tmp_path, keep=100).run().join(WAIT_S)
    state = built(loop, way).checkpoint_dir(tmp_path).resume(tmp_path).run().join(WAIT_S)
    assert marked(state) == [NUM_SAMPLES] * 2


@ways
def test_a_call_before_the_step_or_with_gradients_is_refused(way):
    def loop(worker):
        for batch in worker.batches():
            with pytest.raises(RuntimeError, match=rf"under {way[0].name} .* after worker.step"):
                worker.evaluate(HELD_OUT, one)
            worker.backward(worker.model.loss(worker.epoch, batch))
            with pytest.raises(RuntimeError, match=r"call it after worker.step\(\)"):
                worker.evaluate(HELD_OUT, one)
            worker.step()
            loss = worker.model.loss(worker.epoch, batch)
            loss.backward()
            with pytest.raises(RuntimeError, match=r"call it after worker.step\(\)"):
                worker.evaluate(HELD_OUT, one)
            worker.model.w.grad = None
            worker.evaluate(HELD_OUT, one)
            with pytest.raises(RuntimeError, match=r"all steps on a batch before the evaluation"):
                worker.step(worker.model.loss(worker.epoch, batch))

    assert marked(built(loop, way).run().join(WAIT_S)) == [NUM_SAMPLES] * 2


@ways
def test_a_long_evaluation_reports_progress(way, monkeypatch):
    monkeypatch.setattr(task_evaluation, "REPORT_INTERVAL_S", 0.0)
    reports, first = [], Once()
    observe(monkeypatch, Evaluating, lambda event: reports.append(event.rank))

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if first():
                worker.evaluate(HELD_OUT, Meeting(2))

    built(loop, way).run().join(WAIT_S)
    assert set(reports) == {0, 1}


def test_no_rank_enters_a_round_while_another_evaluates():
    """It would wait in the collective, for an evaluation that may take longer than its limit."""
    first, helped, far = Once(), threading.Event(), threading.Event()
    due = []  # steps after the coordinator could have begun the next round

    def fn(model, batch):
        if current_worker().rank == 0:
            assert far.wait(WAIT_S)
        helped.set()
        return one(model, batch)

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if worker.rank == 0 and first():
                worker.evaluate(HELD_OUT, fn)
            elif worker.rank == 1 and helped.is_set():
                if handle._run.machine.run_state.ranks[1].since_round > 4 * 5:
                    due.append(worker.global_step)
                if len(due) == 3:
                    far.set()

    size = 8000
    made = built(
        loop,
        (CADENCE, THREAD),
        model=lambda device: Marks(1, size),
        dataset=(torch.arange(size),),
        epochs=1,
    )
    handle = made.anchor(5).run()
    assert marked(handle.join(WAIT_S)) == [size]
    assert len(due) >= 3
