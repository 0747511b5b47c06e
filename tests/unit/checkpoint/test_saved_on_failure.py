"""A failed run leaves its last consistent state, from which training continues."""

from __future__ import annotations

import errno
import logging
import signal
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from coordinator import messages as m
from coordinator.machine import Coordinator
from runtime import (
    ApplyPolicy,
    AveragingFailed,
    CheckpointError,
    RunStalled,
    Trainer,
    WorkerFailed,
    current_worker,
)
from runtime import checkpoint_service as service_module
from runtime.checkpoint import files
from runtime.checkpoint import store as store_module
from runtime.checkpoint.store import entries, load_newest, remove_old_checkpoints, write_checkpoint
from runtime.settings import RunSettings
from runtime.worker import worker_threads
from tests.support.checkpointing import make, names
from tests.support.running import (
    ASYNC,
    CADENCE,
    GLOO,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    builder,
    count_up,
    over,
)
from tests.unit.checkpoint.test_writer import SlowDisk

N = 60
WAYS = [(SYNC, THREAD), (SYNC, GLOO), (CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, OVER_CPU)]


class Net(nn.Module):
    """A model with state outside of the parameters: statistics, and draws in each step."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def plain_sgd(params):
    return torch.optim.SGD(params, 0.1)


class Planted(RuntimeError):
    """The error of user code in these tests."""


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator)
    return x, x.sum(1, keepdim=True), torch.arange(N)


class Steps:
    """A ``train_fn`` that calls ``act`` at one step of one rank, after the forward pass.

    Attributes:
        trained: Samples of the steps whose loss was returned.
    """

    def __init__(self, rank=None, step=0, act=None):
        self._place, self._act = (rank, step), act
        self._lock = threading.Lock()
        self.trained = []

    def __call__(self, model, batch):
        worker = current_worker()
        loss = (model(batch[0]) - batch[1]).square().mean()
        if (worker.rank, worker.local_step) == self._place:
            self._act()
        with self._lock:
            self.trained += batch[2].tolist()
        return loss


def fail():
    raise Planted("the power is out")


def run_of(steps, way=(SYNC, THREAD), ranks=2, epochs=3, optim=None):
    b = builder(
        model=lambda device: Net().to(device),
        optim=optim or (lambda params: torch.optim.AdamW(params, 1e-2)),
        train=steps,
        dataset=data(),
        batch_size=3,
        epochs=epochs,
        ranks=ranks,
        way=way,
    ).seed(5)
    # Every rank reaches the step at which it fails.
    return b if way[0] is SYNC else b.partition_ratios([1] * ranks)


def trained_on(directory, way=(SYNC, THREAD), ranks=2, steps=None, **kwargs):
    return run_of(steps or Steps(), way, ranks, **kwargs).resume(directory).run().join(WAIT_S)


def expect_same(state, other):
    for name, value in {**other.params, **other.buffers}.items():
        assert torch.equal({**state.params, **state.buffers}[name], value), name
    assert [e.avg_loss for e in state.metrics] == [e.avg_loss for e in other.metrics]


def expect_failed(handle, kind):
    """The error of a run, with the note on its state."""
    with pytest.raises(kind) as caught:
        handle.join(WAIT_S)
    return caught.value, caught.value.__notes__[-1]


def failed_entry(directory):
    newest = entries(directory)[0]
    assert newest.failed
    assert "-failed-" in newest.path.name
    return newest


# -- an exception ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "rank", "step", "num_batches"),
    [(1, 0, 4, 4), (2, 0, 1, 2), (2, 1, 7, 14), (3, 2, 5, 15), (3, 0, 13, 38)],
)
def test_a_run_under_sync_continues_from_the_step_before_an_exception(
    tmp_path, ranks, rank, step, num_batches
):
    """To the bit: parameters, optimizer, statistics of batch norm, draws and losses."""
    handle = run_of(Steps(rank, step, fail), ranks=ranks).checkpoint_dir(tmp_path).run()
    error, note = expect_failed(handle, WorkerFailed)
    assert isinstance(error.__cause__, Planted)
    entry = failed_entry(tmp_path)
    assert entry.step == num_batches
    assert str(entry.path) in note
    assert f"resume('{tmp_path}')" in note
    assert (handle.state.reason, handle.state.stopped) == ("failed", False)
    expect_same(trained_on(tmp_path, ranks=ranks), run_of(Steps(), ranks=ranks).run().join(WAIT_S))


@pytest.mark.parametrize("ranks", [2, 3])
@over(WAYS)
def test_every_sample_is_trained_once_before_or_after_an_exception(tmp_path, way, ranks):
    steps, rest = Steps(ranks - 1, 3, fail), Steps()
    expect_failed(run_of(steps, way, ranks, 1).checkpoint_dir(tmp_path).run(), WorkerFailed)
    state = trained_on(tmp_path, way, ranks, rest, epochs=1)
    assert [e.num_samples for e in state.metrics] == [N]
    if way[0] is SYNC:  # the step in which a rank failed is undone on the others
        assert set(steps.trained + rest.trained) == set(range(N))
    else:
        assert sorted(steps.trained + rest.trained) == list(range(N))
    assert sum(r.num_samples for r in state.metrics[0].per_rank) == N


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=["SYNC", "CADENCE"])
@pytest.mark.parametrize("place", ["eval_fn", "epoch_fn", "data"])
def test_an_exception_between_steps_leaves_all_that_was_trained(tmp_path, way, place):
    rest = Steps()
    b = run_of(Steps(), way)

    def evaluate(model, epoch):
        if epoch == 1:
            fail()
        return {"value": 1.0}

    if place == "eval_fn":
        b = b.eval_fn(evaluate)
    elif place == "epoch_fn":
        b = b.epoch_fn(lambda epoch, worker: fail() if epoch == worker.rank == 1 else None)
    else:

        class Broken(torch.utils.data.Dataset):
            def __len__(self):
                return N

            def __getitem__(self, i):
                if i == 17:
                    fail()
                return tuple(t[i] for t in data())

        b = b.dataset(Broken())
    expect_failed(b.checkpoint_dir(tmp_path, every=9).run(), WorkerFailed)
    entry = failed_entry(tmp_path)
    after = run_of(rest, way)
    if place == "eval_fn":
        after = after.eval_fn(lambda model, epoch: {"value": 1.0})
    state = after.resume(tmp_path).run().join(WAIT_S)
    assert [e.num_samples for e in state.metrics] == [N] * 3
    assert len(rest.trained) == 3 * N - 3 * entry.step
    if place == "eval_fn":
        assert [e.scalars["eval/value"] for e in state.metrics] == [1.0] * 3
    elif way[0] is SYNC:
        expect_same(state, run_of(Steps()).run().join(WAIT_S))


class HalfStep(torch.optim.SGD):
    """An optimizer that fails after it has changed the parameters of rank 1."""

    breaks = True

    def step(self, closure=None):
        super().step(closure)
        worker = current_worker()
        if self.breaks and (worker.rank, worker.local_step) == (1, 4):
            fail()


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=["SYNC", "CADENCE"])
def test_a_rank_that_fails_within_the_optimizers_step_leaves_no_state(tmp_path, way, monkeypatch):
    b = run_of(Steps(), way, optim=lambda params: HalfStep(params, 0.1))
    expect_failed(b.checkpoint_dir(tmp_path).run(), WorkerFailed)
    found = load_newest(tmp_path).data
    assert found.run.saved_ranks == (0,)
    monkeypatch.setattr(HalfStep, "breaks", False)
    state = trained_on(tmp_path, way, optim=lambda params: HalfStep(params, 0.1))
    assert [e.num_samples for e in state.metrics] == [N] * 3


def test_the_only_rank_that_fails_within_its_step_leaves_the_last_checkpoint(tmp_path):
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if current_worker().local_step == 25:
                fail()

    b = run_of(Steps(), ranks=1, optim=lambda params: Fails(params, 0.1))
    handle = b.checkpoint_dir(tmp_path).run()
    _, note = expect_failed(handle, WorkerFailed)
    (entry,) = entries(tmp_path)
    assert not entry.failed
    assert f"No newer state could be saved; the last complete checkpoint is {entry.path}" in note
    assert handle.state is None
    with pytest.raises(CheckpointError, match="kept no full state"):
        handle.save(tmp_path)


def test_the_last_survivor_leaves_its_state(tmp_path):
    def steps(model, batch):
        worker = current_worker()
        if worker.local_step == 3 + 4 * worker.rank:
            fail()
        return count_up(model, batch)

    b = builder(train=steps, dataset=N, ranks=2).on_worker_failure("continue")
    handle = b.checkpoint_dir(tmp_path).run()
    expect_failed(handle, WorkerFailed)
    assert len(handle.state.failures) == 1
    failed_entry(tmp_path)
    state = builder(dataset=N, ranks=2).resume(tmp_path).run().join(WAIT_S)
    assert [e.num_samples for e in state.metrics] == [N]


# -- other ends --------------------------------------------------------------------------------


@pytest.fixture
def released():
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr("runtime.trainer.RunSettings", partial(RunSettings, grace_s=1.0))


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=["SYNC", "CADENCE"])
def test_the_ranks_that_are_not_stuck_leave_the_state_of_a_stalled_run(tmp_path, way, released):
    wait = Steps(1, 6, lambda: released.wait(WAIT_S))
    handle = run_of(wait, way, optim=plain_sgd).stall_timeout(0.5).checkpoint_dir(tmp_path).run()
    _, note = expect_failed(handle, RunStalled)
    entry = failed_entry(tmp_path)
    assert str(entry.path) in note
    assert handle.state.reason == "stalled"
    assert load_newest(tmp_path).data.run.saved_ranks == (0,)
    rest = Steps()
    state = trained_on(tmp_path, way, steps=rest, optim=plain_sgd)
    assert [e.num_samples for e in state.metrics] == [N] * 3
    assert len(rest.trained) == 3 * N - 3 * entry.step
    released.set()


@pytest.mark.leaks_thread("prefetch-0", "prefetch-1")
@pytest.mark.usefixtures("short_grace")
def test_ranks_that_wait_for_data_leave_the_state_of_a_stalled_run(tmp_path, released):
    class Stuck(torch.utils.data.Dataset):
        def __len__(self):
            return N

        def __getitem__(self, i):
            if i == 17:
                released.wait(WAIT_S)
            return tuple(t[i] for t in data())

    b = run_of(Steps()).dataset(Stuck()).stall_timeout(2.0).checkpoint_dir(tmp_path)
    expect_failed(b.run(), RunStalled)
    failed_entry(tmp_path)
    expect_same(trained_on(tmp_path), run_of(Steps()).run().join(WAIT_S))
    released.set()


@pytest.mark.usefixtures("short_grace")
def test_too_many_failed_rounds_leave_the_state_of_the_ranks_that_answer(tmp_path, released):
    wait = Steps(1, 2, lambda: released.wait(WAIT_S))
    b = run_of(wait, (CADENCE, OVER_CPU), epochs=1).snapshot_timeout(0.05).max_failed_rounds(2)
    handle = b.anchor(1).checkpoint_dir(tmp_path).run()
    expect_failed(handle, AveragingFailed)
    failed_entry(tmp_path)
    assert handle.state.reason == "failed"
    state = trained_on(tmp_path, (CADENCE, OVER_CPU), epochs=1)
    assert [e.num_samples for e in state.metrics] == [N]
    released.set()


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, THREAD)], ids=["SYNC", "CADENCE"])
def test_the_others_leave_their_state_when_a_thread_dies(tmp_path, way, monkeypatch):
    handle_event = Coordinator.handle

    def without_message(machine, event, now):
        return [] if isinstance(event, m.Failed) else handle_event(machine, event, now)

    monkeypatch.setattr(Coordinator, "handle", without_message)
    monkeypatch.setattr(worker_threads, "can_answer", lambda worker, error: False)
    handle = run_of(Steps(1, 5, fail), way, optim=plain_sgd).checkpoint_dir(tmp_path).run()
    error, _ = expect_failed(handle, WorkerFailed)
    assert "without a message" in str(error)
    assert load_newest(tmp_path).data.run.saved_ranks == (0,)
    failed_entry(tmp_path)
    monkeypatch.undo()
    state = trained_on(tmp_path, way, optim=plain_sgd)
    assert [e.num_samples for e in state.metrics] == [N] * 3


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("saves", [True, False])
def test_a_signal_leaves_an_ordinary_checkpoint_or_the_state(tmp_path, signum, saves, monkeypatch):
    monkeypatch.setattr("runtime.core.signals.INTERRUPTS._exit_signal", None)
    entered, sent = threading.Event(), threading.Event()

    def meet():
        entered.set()
        assert sent.wait(WAIT_S)

    b = run_of(Steps(0, 4, meet))
    handle = (b.checkpoint_dir(tmp_path) if saves else b).run()

    def send():
        assert entered.wait(WAIT_S)
        signal.pthread_kill(threading.main_thread().ident, signum)
        sent.set()

    before = signal.signal(signum, signal.getsignal(signum))
    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        handle.join()
    sender.join(WAIT_S)
    assert signal.getsignal(signum) == before
    assert (handle.state.reason, handle.state.stopped) == ("signalled", True)
    (note,) = caught.value.__notes__
    if not saves:
        assert "handle.state.save(path)" in note
        return
    found = load_newest(tmp_path)
    assert str(found.path) in note
    assert (found.data.reason, found.data.error) == ("signalled", "")
    assert "failed" not in found.name
    expect_same(trained_on(tmp_path), run_of(Steps()).run().join(WAIT_S))


# -- the disk ----------------------------------------------------------------------------------


def test_a_full_disk_at_the_failure_leaves_the_older_one_and_a_state_to_save(
    tmp_path, monkeypatch, caplog
):
    full = threading.Event()
    real = files.os.fsync

    def fsync(fd):
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    written, write = threading.Event(), store_module.write_checkpoint

    def write_and_note(*args, **kwargs):
        path = write(*args, **kwargs)
        written.set()
        return path

    def fill_and_fail():
        assert written.wait(WAIT_S)
        full.set()
        fail()

    monkeypatch.setattr(store_module, "write_checkpoint", write_and_note)

    monkeypatch.setattr(files.os, "fsync", fsync)
    handle = run_of(Steps(1, 25, fill_and_fail)).checkpoint_dir(tmp_path / "a").run()
    error, note = expect_failed(handle, WorkerFailed)
    assert isinstance(error.__cause__, Planted)
    assert "could not be saved" in note
    assert "No space left on device" in note
    older = entries(tmp_path / "a")
    assert str(older[0].path) in note
    assert not any(entry.failed for entry in older)
    assert not any(name.startswith(".unfinished") for name in names(tmp_path / "a"))
    assert [e.errno for e in handle.state.checkpoint_errors] == [errno.ENOSPC]
    full.clear()
    handle.save(tmp_path / "b")
    expect_same(trained_on(tmp_path / "b"), run_of(Steps()).run().join(WAIT_S))


def test_the_error_does_not_wait_for_a_slow_disk_forever(tmp_path, monkeypatch):
    monkeypatch.setattr(service_module, "FAILED_CLOSE_S", 0.3)
    disk = SlowDisk(monkeypatch)
    handle = run_of(Steps(1, 5, fail)).checkpoint_dir(tmp_path).run()
    _, note = expect_failed(handle, WorkerFailed)
    assert "still being written" in note
    disk.allow(9)


class Odd(torch.optim.SGD):
    """An optimizer without a state on some ranks, after some steps."""

    ranks = ()
    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        super().step(closure)

    def state_dict(self):
        name = threading.current_thread().name
        if self.num_steps > 3 and name in [f"gpu-worker-{rank}" for rank in self.ranks]:
            raise Planted("no state")
        return super().state_dict()


def odd_sgd(params):
    return Odd(params, 0.1)


def test_a_rank_whose_state_cannot_be_captured_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(Odd, "ranks", (1,))
    handle = run_of(Steps(0, 6, fail), optim=odd_sgd).checkpoint_dir(tmp_path).run()
    expect_failed(handle, WorkerFailed)
    assert load_newest(tmp_path).data.run.saved_ranks == (0,)
    monkeypatch.undo()
    assert [e.num_samples for e in trained_on(tmp_path, optim=odd_sgd).metrics] == [N] * 3


def test_states_that_cannot_be_captured_do_not_hide_the_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Odd, "ranks", (0, 1))
    handle = run_of(Steps(1, 6, fail), optim=odd_sgd).checkpoint_dir(tmp_path).run()
    error, note = expect_failed(handle, WorkerFailed)
    assert isinstance(error.__cause__, Planted)
    assert "there is no complete checkpoint" in note
    assert handle.state.reason == "failed"


def test_keep_counts_no_state_of_a_failed_run_and_removes_it_with_the_older_ones(tmp_path):
    def write(step, **kwargs):
        return write_checkpoint(tmp_path, replace(make(step), **kwargs)).name

    first = write(1, within=True)
    failed = write(2, reason="failed", error="an error")
    remove_old_checkpoints(tmp_path, 1)
    assert sorted(names(tmp_path)) == sorted([first, failed])
    second = write(3, within=True)
    remove_old_checkpoints(tmp_path, 1)
    assert names(tmp_path) == [second]


def test_a_failure_removes_no_older_checkpoint(tmp_path):
    handle = run_of(Steps(1, 25, fail)).checkpoint_dir(tmp_path, keep=1).run()
    expect_failed(handle, WorkerFailed)
    assert [entry.failed for entry in entries(tmp_path)] == [True, False]


# -- without a directory, and nothing to save ----------------------------------------------------


def test_without_a_directory_the_handle_holds_the_state(tmp_path):
    handle = run_of(Steps(1, 25, fail)).run()
    _, note = expect_failed(handle, WorkerFailed)
    assert "handle.state.save(path) writes them" in note
    assert handle.state.reason == "failed"
    assert len(handle.state.metrics) == 2
    handle.state.save(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"checkpoint_dir\(path\)") as caught:
        handle.save(tmp_path)
    assert isinstance(caught.value.__cause__, WorkerFailed)


def test_a_failure_in_the_first_step_saves_nothing(tmp_path):
    handle = run_of(Steps(0, 0, fail)).checkpoint_dir(tmp_path).run()
    with pytest.raises(WorkerFailed) as caught:
        handle.join(WAIT_S)
    assert entries(tmp_path) == []
    assert handle.state is None
    assert not any("state" in note for note in getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=lambda way: way[0].name)
def test_a_resumed_run_that_fails_in_its_first_step_adds_no_checkpoint(tmp_path, way):
    run_of(Steps(), way, epochs=1).checkpoint_dir(tmp_path).run().join(WAIT_S)
    before = names(tmp_path)
    b = run_of(lambda model, batch: fail(), way).checkpoint_dir(tmp_path).resume(tmp_path)
    with pytest.raises(WorkerFailed):
        b.run().join(WAIT_S)
    assert names(tmp_path) == before


def test_replicas_that_differ_are_not_saved(tmp_path):
    def epoch_fn(epoch, worker):
        if epoch == worker.rank == 1:
            with torch.no_grad():
                next(worker.model.parameters()).add_(1)

    b = run_of(Steps()).epoch_fn(epoch_fn).checkpoint_dir(tmp_path, every=9)
    with pytest.raises(ValueError, match="differ"):
        b.run().join(WAIT_S)
    assert entries(tmp_path) == []


def test_resume_logs_the_end_of_the_run_that_failed(tmp_path, caplog):
    expect_failed(run_of(Steps(1, 5, fail)).checkpoint_dir(tmp_path).run(), WorkerFailed)
    with caplog.at_level(logging.INFO):
        trained_on(tmp_path)
    text = caplog.text
    assert f"resuming from {entries(tmp_path)[0].path}" in text
    assert "worker 1 failed in epoch 0 at step 5: Planted: the power is out" in text


def test_two_failures_at_once_keep_the_first_error_and_the_state(tmp_path):
    barrier = threading.Barrier(2)

    def steps(model, batch):
        worker = current_worker()
        if worker.local_step == 5:
            barrier.wait(WAIT_S)
            raise Planted(str(worker.rank))
        return (model(batch[0]) - batch[1]).square().mean()

    error, _ = expect_failed(run_of(steps).checkpoint_dir(tmp_path).run(), WorkerFailed)
    assert str(error.__cause__) == str(error.rank)
    expect_same(trained_on(tmp_path), run_of(Steps()).run().join(WAIT_S))


def test_every_policy_is_covered():
    assert {policy for policy, _ in WAYS} == set(ApplyPolicy)


# -- your own loop -------------------------------------------------------------------------------


def own_loop(worker, act=None, place=None):
    """Two batches a step; fails before or after the step of its second batch."""
    for number, batch in enumerate(worker.batches()):
        loss = (worker.model(batch[0]) - batch[1]).square().mean()
        where = (worker.rank, worker.epoch, number)
        if number % 2 == 0:
            worker.backward(loss)
            continue
        if act is not None and (*where, "before") == place:
            act()
        worker.step(loss)
        if act is not None and (*where, "after") == place:
            act()


def loop_run(loop):
    b = Trainer.loop(
        lambda device: Net().to(device),
        lambda model: torch.optim.AdamW(model.parameters(), 1e-2),
        loop,
    )
    b = b.dataset(data()).batch_size(3).num_epochs(3).devices(["cpu", "cpu"])
    return b.policy("sync").backend("thread").seed(5)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_own_loop_under_sync_continues_from_the_step_before_an_exception(tmp_path, rank, when):
    place = (rank, 1, 13, when)
    handle = loop_run(partial(own_loop, act=fail, place=place)).checkpoint_dir(tmp_path).run()
    expect_failed(handle, WorkerFailed)
    failed_entry(tmp_path)
    state = loop_run(own_loop).resume(tmp_path).run().join(WAIT_S)
    expect_same(state, loop_run(own_loop).run().join(WAIT_S))


def test_resume_of_a_complete_run_logs_that_nothing_is_left(tmp_path, caplog):
    run_of(Steps()).checkpoint_dir(tmp_path).run().join(WAIT_S)
    with caplog.at_level(logging.INFO):
        run_of(Steps()).resume(tmp_path).run().join(WAIT_S)
    assert "nothing is left to train: raise num_epochs" in caplog.text
