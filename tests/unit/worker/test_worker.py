"""A standalone GpuWorker, driven through its queues."""

from __future__ import annotations

import threading

import pytest
import torch

from coordinator import messages as m
from coordinator.run_errors import GpuWorkerError
from runtime import (
    ApplyPolicy,
    GpuWorker,
    UserFunctions,
    WorkerConfig,
    create_collectives,
    current_worker,
    record_scalar,
)
from runtime.core.errors import CollectiveAborted
from runtime.data.dataset import adapt_dataset
from runtime.data.epoch_index import EpochIndex
from runtime.data.loader import InlineLoader, LoaderSpec, Stage, ThreadLoader
from runtime.device.base import PendingCopy
from runtime.replica.averager import ReplicaAverager
from runtime.worker import flow
from runtime.worker.protocol import WorkerState
from tests.support.running import (
    CADENCE,
    CPU,
    WAIT_S,
    Trace,
    count_up,
    counter,
    numbers,
    plain_sgd,
    task,
    until,
)
from tests.support.step_plans import step_plan

N, SIZE = 40, 2
BATCH = (torch.zeros(SIZE),)
MANY = m.BatchBudget(limit=None)


class Alone:
    """A worker whose queues the test reads and writes."""

    def __init__(self, *, train=count_up, model=counter, optim=plain_sgd, stalls=None, **kwargs):
        functions = {
            key: kwargs.pop(key)
            for key in ("epoch_fn", "eval_fn", "checkpoint_fn", "scheduler", "loop")
            if key in kwargs
        }
        settings = {
            key: kwargs.pop(key)
            for key in (
                *("rank", "world_size", "policy", "accumulate", "total_steps", "lr_scale"),
                *("survives", "on_non_finite", "precision"),
            )
            if key in kwargs
        }
        settings.setdefault("policy", CADENCE)
        endpoints, channels = GpuWorker.channels()
        self.control, self.reports = channels.control, channels.reports
        self.worker = GpuWorker(
            WorkerConfig(num_samples=N, batch_size=SIZE, report_interval_s=1e9, **settings),
            UserFunctions(model_factory=model, optim_factory=optim, train_fn=train, **functions),
            endpoints,
            make_loader=lambda worker, wake: self._loader(worker, wake, stalls),
            **kwargs,
        )

    @staticmethod
    def _loader(worker, wake, stalls):
        spec = LoaderSpec(
            adapter=adapt_dataset(numbers(N) if stalls is None else stalls),
            index=EpochIndex(N, SIZE, 0),
            device=CPU,
            seed=0,
            rank=worker.rank,
            worker=worker,
        )
        if stalls is None:
            return InlineLoader(spec)
        return ThreadLoader(spec, on_ready=wake, stage=Stage(1))

    @property
    def w(self):
        return self.worker.model.w.item()

    def send(self, *messages):
        for message in messages:
            self.control.put(message)

    def take_next(self, kind):
        """Wait for the next report of a kind."""
        while not isinstance(report := self.reports.get(timeout=WAIT_S), kind):
            pass
        return report

    def take(self, kind=None):
        """All reports so far, or the last of a kind."""
        found = []
        while not self.reports.empty():
            found.append(self.reports.get())
        return found if kind is None else [r for r in found if isinstance(r, kind)][-1]


def start(*batches, epoch=0):
    return m.StartEpoch(plan=plan(*batches, epoch=epoch))


def plan(*batches, epoch=0, **kwargs):
    return m.EpochPlan(epoch=epoch, batches=batches, **kwargs)


def plan_of_pieces(num_steps, world_size=2):
    """A plan under ``SYNC`` of ranks that have pieces of one size."""
    return m.EpochPlan(epoch=0, steps=step_plan(((SIZE,) * world_size,), num_steps))


def payload(value, buffers=()):
    flat = torch.zeros(8, dtype=torch.float64)  # one parameter, padded to 64 bytes
    flat[0] = value
    return m.Payload(params=(flat,), buffers=buffers)


# -- attributes ----------------------------------------------------------------


def test_a_worker_has_its_rank_world_size_and_device():
    alone = Alone(rank=1, world_size=3)
    worker = alone.worker
    assert (worker.rank, worker.world_size, worker.device) == (1, 3, CPU)
    assert (worker.local_step, worker.current_epoch, worker.current_version) == (0, 0, 0)
    assert worker.model.training
    assert isinstance(worker.optimizer, torch.optim.SGD)
    assert worker.current_lr == 1.0


def test_generators_differ_by_rank_and_epoch_and_repeat():
    draws = {}
    for rank in (0, 1):
        for _ in range(2):
            alone = Alone(rank=rank, world_size=2)
            for epoch in (0, 1):
                alone.worker.run_epoch_plan(plan(epoch=epoch))
                draw = torch.rand(2, generator=alone.worker.generator).tolist()
                assert draws.setdefault((rank, epoch), draw) == draw
    assert len({tuple(draw) for draw in draws.values()}) == 4


def test_current_worker_is_defined_only_in_user_code():
    seen = []
    alone = Alone(train=lambda model, b: seen.append(current_worker()) or count_up(model, b))
    alone.worker.train_step(BATCH)
    assert seen == [alone.worker]
    for function in (current_worker, lambda: record_scalar("x", 1.0)):
        with pytest.raises(RuntimeError, match="only defined inside"):
            function()


# -- steps ---------------------------------------------------------------------


def test_train_step_returns_handles_and_counts():
    alone = Alone()
    result = alone.worker.train_step(BATCH)
    assert float(result.loss) == 0.0
    assert not result.loss.requires_grad
    assert result.compute_s > 0
    assert alone.w == 1.0
    alone.worker.train_step(BATCH, lambda model, b: -2 * model.w.sum())
    assert (alone.w, alone.worker.local_step) == (3.0, 2)
    alone.worker.report_timing()
    stats = alone.take(m.BatchReport).stats
    assert (stats.num_batches, stats.num_samples, stats.loss_samples) == (2, 4, 4)
    assert stats.compute_s > 0


def test_recorded_scalars_are_weighted_by_samples():
    def train(model, batch):
        record_scalar("size", float(len(batch[0])))
        record_scalar("w", model.w)
        return count_up(model, batch)

    alone = Alone(train=train)
    for size in (2, 6):
        alone.worker.train_step((torch.zeros(size),))
    alone.worker.report_timing()
    scalars = alone.take(m.BatchReport).stats.scalars
    assert scalars == {"size": (2 * 2 + 6 * 6, 8), "w": (0.0 * 2 + 1.0 * 6, 8)}


def test_run_epoch_plan_trains_the_batches_of_a_given_plan():
    trace = Trace()
    alone = Alone(train=trace)
    assert alone.worker.run_epoch_plan(plan(range(3, 9, 2), range(1), epoch=4)) is False
    index = EpochIndex(N, SIZE, 0)
    expected = [tuple(index.indices(4, b).tolist()) for b in (3, 5, 7, 0)]
    assert [indices for _, _, indices in trace.batches] == expected
    assert (alone.worker.current_epoch, alone.worker.local_step) == (4, 4)
    report = alone.take(m.EpochReport)
    assert (report.epoch, report.stats.num_batches) == (4, 4)


def test_run_epoch_plan_accepts_another_train_fn():
    alone = Alone()
    alone.worker.run_epoch_plan(plan(range(2)), lambda model, batch: -3 * model.w.sum())
    assert alone.w == 6.0


def test_epoch_fn_is_called_once_an_epoch_also_without_a_batch():
    calls = []
    alone = Alone(epoch_fn=lambda epoch, worker: calls.append((epoch, worker.local_step)))
    for p in (plan(range(2)), plan(range(2, 4)), plan(epoch=1), plan(range(1), epoch=2)):
        alone.worker.run_epoch_plan(p)
    assert calls == [(0, 0), (1, 4), (2, 4)]


# -- control messages ----------------------------------------------------------


def test_handle_control_returns_at_once_without_messages():
    assert Alone().worker.handle_control() is False


def test_shutdown_is_returned_and_ends_a_plan():
    alone = Alone()
    alone.send(m.Shutdown())
    assert alone.worker.handle_control() is True
    assert alone.worker.run_epoch_plan(plan(range(5))) is True
    assert alone.w == 0.0


def test_wait_for_epoch_plan_handles_all_other_messages():
    alone = Alone()
    alone.send(m.RequestParams(round=1), m.SetGlobalStep(step=3), start(range(1)))
    assert alone.worker.wait_for_epoch_plan().num_batches == 1
    alone.send(m.Shutdown())
    alone.worker.run_epoch_plan(plan())
    assert alone.worker.wait_for_epoch_plan() is None


class Stalling:
    """A data set whose every batch waits for a permit."""

    def __init__(self):
        self.asked, self.permits = threading.Semaphore(0), threading.Semaphore(0)

    def __len__(self):
        return N

    def get_batch(self, indices):
        self.asked.release()
        assert self.permits.acquire(timeout=WAIT_S)
        return (indices,)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stalled_loader_delays_replies_only_within_a_window(accumulate):
    """The second batch stalls: a request is handled between windows, or after one."""
    data = Stalling()
    alone = Alone(stalls=data, accumulate=accumulate)
    alone.send(start(range(2)))
    thread = threading.Thread(target=alone.worker.run)
    thread.start()
    assert isinstance(alone.reports.get(timeout=WAIT_S), m.Ready)
    data.permits.release()
    for _ in range(2):
        assert data.asked.acquire(timeout=WAIT_S)
    alone.send(m.RequestParams(round=1))
    if accumulate == 1:
        snapshot = alone.take_next(m.ParamSnapshot)  # while the loader still stalls
        assert (snapshot.num_batches, float(snapshot.payload.params[0][0])) in ((0, 0.0), (1, 1.0))
        data.permits.release()
    else:
        data.permits.release()
        snapshot = alone.take_next(m.ParamSnapshot)
        whole = (snapshot.num_batches, float(snapshot.payload.params[0][0]))
        assert whole in ((0, 0.0), (2, 1.0))  # never half a window
    alone.send(m.Shutdown())
    thread.join(WAIT_S)
    assert alone.worker.close()


def test_a_request_is_handled_before_the_next_step():
    answered = []

    def train(model, batch):
        answered.append(not alone.reports.empty())
        if len(answered) == 2:
            alone.send(m.RequestParams(round=1))
        return count_up(model, batch)

    alone = Alone(train=train)
    alone.worker.run_epoch_plan(plan(range(4)))
    assert answered == [False, False, True, True]
    assert alone.take(m.ParamSnapshot).num_batches == 2


def test_messages_deferred_within_a_step_are_handled_before_the_next():
    data, begun = Stalling(), threading.Event()

    def train(model, batch):
        begun.set()
        return count_up(model, batch)

    alone = Alone(train=train, stalls=data, accumulate=2)
    alone.send(start(range(4)))
    thread = threading.Thread(target=alone.worker.run)
    thread.start()
    data.permits.release()
    assert begun.wait(WAIT_S)  # the step has its first batch, and not its second
    alone.send(m.RequestParams(round=1))
    until(alone.control.empty)
    for _ in range(3):
        data.permits.release()
    assert alone.take_next(m.ParamSnapshot).num_batches == 2
    alone.send(m.Shutdown())
    thread.join(WAIT_S)
    assert alone.worker.close()


def test_messages_held_for_copies_are_sent_before_the_next_step():
    class OnItsWay(PendingCopy):
        done = False

        def wait(self):
            raise AssertionError("nothing waits between two steps")

    arrival, sent = OnItsWay(), []

    def train(model, batch):
        sent.append(not alone.reports.empty())
        arrival.done = len(sent) == 2
        return count_up(model, batch)

    alone = Alone(train=train)
    alone.worker._reporter.send(m.Exiting(rank=0), arrival)
    alone.worker.run_epoch_plan(plan(range(3)))
    assert sent == [False, False, True]


@pytest.mark.parametrize("message", ["evaluate", "checkpoint"])
def test_callbacks_run_inside_the_worker(message):
    seen = []

    def callback(*arguments):
        seen.append((current_worker().rank, arguments))
        return {"good": 1.0}

    alone = Alone(eval_fn=callback, checkpoint_fn=callback)
    if message == "evaluate":
        alone.send(m.RunTasks(tasks=(task(m.TaskKind.EVALUATE, epoch=7),)))
        alone.worker.handle_control()
        assert alone.take(m.TaskDone).values == (("good", 1.0),)
        assert seen == [(0, (alone.worker.model, 7))]
        assert alone.worker.model.training
    else:
        alone.send(m.RunTasks(tasks=(task(m.TaskKind.HAND_OVER, epoch=6),)))
        alone.worker.handle_control()
        assert seen == [(0, (7, alone.worker.model))]


# -- averaging -----------------------------------------------------------------


def test_an_update_of_another_round_changes_nothing():
    alone = Alone()
    alone.send(m.RequestParams(round=1), m.RequestParams(round=2))
    alone.send(m.Update(round=1, average=payload(10.0)))
    alone.worker.handle_control()
    assert alone.w == 0.0
    assert not [r for r in alone.take() if isinstance(r, m.SyncAck)]
    alone.send(m.Update(round=2, average=payload(4.0)), m.Update(round=2, average=payload(9.0)))
    alone.worker.handle_control()
    assert alone.w == 4.0


def test_an_update_without_samples_changes_nothing_and_is_acknowledged():
    alone = Alone()
    alone.send(m.RequestParams(round=1))
    alone.send(m.Update(round=1, average=payload(10.0), num_samples=0))
    alone.worker.handle_control()
    assert (alone.w, alone.worker.current_version) == (0.0, 0)
    assert alone.take(m.SyncAck).round == 1


def test_snapshot_params_owns_its_memory():
    alone = Alone()
    first = alone.worker.snapshot_params(5)
    alone.worker.train_step(BATCH)
    second = alone.worker.snapshot_params()
    assert (first.round, first.num_samples, second.num_samples) == (5, 0, 2)
    assert float(first.payload.params[0][0]) == 0.0
    assert float(second.payload.params[0][0]) == 1.0
    second.payload.params[0].fill_(99.0)
    assert alone.w == 1.0


def test_load_averaged_replaces_the_live_state():
    alone = Alone()
    alone.worker.train_step(BATCH)
    average = payload(6.0)
    alone.worker.load_averaged(average)
    assert (alone.w, alone.worker.current_version) == (6.0, 1)
    alone.worker.load_averaged(m.Update(round=0, average=payload(7.0)))
    alone.worker.train_step(BATCH)
    assert (alone.w, alone.worker.current_version) == (8.0, 2)
    assert float(average.params[0][0]) == 6.0


@pytest.mark.parametrize(
    "wrong",
    [
        m.Payload(params=()),
        m.Payload(params=(torch.zeros(8, dtype=torch.float64),) * 2),
        m.Payload(params=(torch.zeros(7, dtype=torch.float64),)),
        m.Payload(params=(torch.zeros(8),)),
        payload(1.0, buffers=(torch.zeros(1),)),
    ],
    ids=["none", "two", "short", "dtype", "buffers"],
)
def test_load_averaged_raises_for_another_layout(wrong):
    alone = Alone()
    with pytest.raises(ValueError, match="does not fit this model"):
        alone.worker.load_averaged(wrong)
    assert (alone.w, alone.worker.current_version) == (0.0, 0)


# -- learning rates ------------------------------------------------------------


def test_set_lr_and_scale_lr_act_once():
    worker = Alone().worker
    worker.set_lr(0.5)
    assert worker.current_lr == 0.5
    worker.scale_lr(3.0)
    assert worker.current_lr == 1.5
    worker.set_lr_scale(2.0)  # there is no schedule
    assert worker.current_lr == 1.5


def test_a_schedule_keeps_set_lr_scale_and_overwrites_scale_lr():
    alone = Alone()
    alone.worker.set_scheduler(lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 + i))
    rates = []

    def steps(count):
        for _ in range(count):
            alone.worker.train_step(BATCH)
            rates.append(alone.worker.current_lr)

    steps(2)
    alone.worker.set_lr_scale(10.0)
    steps(2)
    alone.worker.scale_lr(100.0)
    steps(1)
    assert rates == [1.0, 2.0, 30.0, 40.0, 50.0]


def test_the_schedule_follows_the_steps_of_all_ranks():
    alone = Alone(
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: float(i)),
        total_steps=12,
    )
    alone.worker.train_step(BATCH)
    alone.worker.train_step(BATCH)
    assert alone.worker.current_lr == 1.0
    alone.send(m.RequestParams(round=1), m.Update(round=1, average=payload(0.0)))
    alone.send(m.SetGlobalStep(step=7))
    alone.worker.handle_control()
    alone.worker.train_step(BATCH)
    assert alone.worker.current_lr == 7.0
    for _ in range(8):
        alone.worker.train_step(BATCH)
    assert alone.worker.current_lr == 12.0  # clamped


# -- own loops -----------------------------------------------------------------


def test_plans_that_follow_an_epoch_which_the_body_has_left_have_their_own_batches():
    """The load of a plan of the next epoch, dropped with the others, comes before a new one."""
    seen = []

    def loop(worker):
        for batch in worker.batches():
            seen.append((worker.epoch, batch[0].tolist()))
            worker.step(count_up(worker.model, batch))
            if worker.epoch == 0:
                alone.send(start(range(3, 4), epoch=1))
                return
            if len(seen) == 3:
                alone.send(m.Shutdown())

    alone = Alone(loop=loop, optim=lambda model: plain_sgd(model.parameters()))
    alone.send(start(range(1)), start(range(2, 3), epoch=1))
    alone.worker.run()
    index = EpochIndex(N, SIZE, 0)
    assert seen == [(e, index.indices(e, batch).tolist()) for e, batch in ((0, 0), (1, 2), (1, 3))]


# -- the end -------------------------------------------------------------------


def test_drain_discards_all_messages_until_shutdown():
    alone = Alone()
    alone.send(*(m.SyncNow(round=r) for r in (1, 2, 3)))
    alone.send(
        m.RunTasks(tasks=(task(m.TaskKind.HAND_OVER),)),
        start(range(3)),
        m.RequestParams(round=4),
        m.Throttle(),
    )
    alone.send(m.Shutdown())
    alone.worker.drain_until_shutdown()
    assert alone.control.empty()
    assert alone.take() == []
    assert alone.w == 0.0
    assert alone.worker.protocol.state is WorkerState.LEAVING


def test_drain_undoes_a_round_that_peers_did_not_complete(monkeypatch):
    """A step was aborted after this rank's part of the round: its final state must not have it."""
    undone = []
    monkeypatch.setattr(ReplicaAverager, "undo_all_reduce", lambda self: undone.append(self))
    alone = Alone()
    alone.worker.train_step(BATCH)
    message = m.SyncNow(round=1)
    alone.worker.protocol.receive(message)
    alone.worker.protocol.on_synced(message, ok=True)
    alone.send(m.Rollback(round=1), m.Shutdown())
    alone.worker.drain_until_shutdown()
    assert len(undone) == 1
    assert alone.worker.protocol.batches == 1


def test_drain_applies_the_average_of_a_round_whose_snapshot_was_sent():
    """Its batches are settled: its final state must not count them again, and has the others'."""
    alone = Alone()
    alone.worker.train_step(BATCH)
    alone.send(m.RequestParams(round=1))
    alone.worker.handle_control()
    asked = task(m.TaskKind.EVALUATE)
    alone.send(m.Update(round=1, average=payload(10.0), tasks=(asked,)), m.Shutdown())
    alone.take()
    alone.worker.drain_until_shutdown()
    assert alone.w == 10.0
    assert alone.worker.protocol.samples == 0
    assert [type(report) for report in alone.take()] == [m.SyncAck]


def test_a_run_of_a_worker_ends_with_final_snapshot_and_exiting():
    alone = Alone()
    alone.send(start(range(3)), start(range(3, 5)))
    thread = threading.Thread(target=alone.worker.run)
    thread.start()
    done = [alone.reports.get(timeout=WAIT_S) for _ in range(3)]
    alone.send(m.Shutdown())
    thread.join(WAIT_S)
    assert [type(r) for r in done] == [m.Ready, m.EpochReport, m.EpochReport]
    final, exiting = alone.take()
    assert (final.num_samples, float(final.payload.params[0][0])) == (10, 5.0)
    assert isinstance(exiting, m.Exiting)


def test_no_final_snapshot_is_sent_unless_requested():
    alone = Alone()
    alone.send(m.Shutdown(snapshot=False))
    alone.worker.run()
    assert [type(r) for r in alone.take()] == [m.Ready, m.Exiting]


def test_a_worker_raises_if_no_rank_reports_the_cause_of_an_aborted_collective(monkeypatch):
    """All ranks may have failed in the same way inside the exchange."""
    monkeypatch.setattr(flow, "DRAIN_S", 0.05)
    (end,) = create_collectives(1)

    def broken(*_):
        raise CollectiveAborted("the exchange failed") from RuntimeError("bad device")

    monkeypatch.setattr(end, "weighted_mean_", broken)
    alone = Alone(policy=ApplyPolicy.SYNC, collective=end)
    alone.send(start(range(3)))
    with pytest.raises(GpuWorkerError, match="no rank has reported a cause") as raised:
        alone.worker.run()
    assert isinstance(raised.value.__cause__.__cause__, RuntimeError)
    alone.worker.close()
    end.close()
