"""Resumed runs: every policy, other world sizes, and settings that are refused."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from coordinator import messages as m
from runtime import CheckpointError, Trainer, WorkerFailed
from runtime.checkpoint.store import entries, load_newest
from runtime.checkpoint_service import CheckpointService
from tests.support.resuming import MarkingRun, consumed, marked
from tests.support.running import (
    ASYNC,
    CADENCE,
    LOCAL_WAYS,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    Counter,
    Gate,
    Trace,
    builder,
    count_up,
    numbers,
    plain_sgd,
)

N = 60


def stop_after(run, num_steps):
    """Stop the run when the first rank has trained ``num_steps`` steps."""
    started, handles = threading.Event(), []

    def on_step(worker):
        if worker.local_step >= num_steps:
            assert started.wait(WAIT_S)
            handles[0].stop()

    def start(handle):
        handles.append(handle)
        started.set()
        return handle

    run.on_step = on_step
    return start


def in_two_halves(path, *, first, second, num_steps=11):
    """Stop a run and resume it; returns the resumed run's state."""
    state = stop_after(first, num_steps)(first.builder().checkpoint_dir(path).run()).join(WAIT_S)
    assert state.stopped
    data = load_newest(path).data
    assert set(first.trained) == consumed(data, N, 2) == marked(data.weights)
    assert torch.equal(data.weights["w"], state.state_dict()["w"])
    assert data.global_step == sum(first.trained.values()) // 2
    end = second.builder().resume(path).run().join(WAIT_S)
    assert first.trained + second.trained == dict.fromkeys(first.all_samples(), 1)
    assert marked(end.state_dict()) == first.all_samples()
    assert [m.num_samples for m in end.metrics] == [N] * 3
    assert [sum(r.num_samples for r in m.per_rank) for m in end.metrics] == [N] * 3
    return end


@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        *((way, ranks) for way in LOCAL_WAYS for ranks in ((2, 3), (3, 2))),
        *((way, ranks) for way in LOCAL_WAYS[:2] for ranks in ((1, 1), (2, 2), (1, 2), (2, 1))),
    ],
)
def test_every_sample_is_trained_once_over_the_two_halves(way, ranks, tmp_path):
    first, second = (MarkingRun(n=N, ranks=r, way=way) for r in ranks)
    in_two_halves(tmp_path, first=first, second=second)


@pytest.mark.parametrize("ways", [((CADENCE, OVER_CPU), (ASYNC, THREAD)), ((ASYNC, THREAD),) * 2])
def test_policy_and_backend_may_change_between_averaging_policies(ways, tmp_path):
    first, second = (MarkingRun(n=N, way=way) for way in ways)
    in_two_halves(tmp_path, first=first, second=second, num_steps=20)


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, THREAD)])
def test_a_checkpoint_after_a_failure_contains_the_survivors_state(way, tmp_path):
    first, second = (MarkingRun(n=N, ranks=3, way=way) for _ in range(2))
    start = stop_after(first, 12)
    stop = first.on_step

    died = threading.Event()

    def die(worker):
        if worker.rank == 2 and worker.local_step == 2:
            died.set()
            raise RuntimeError("dead")
        if worker.rank != 2 and worker.local_step == 11:
            assert died.wait(WAIT_S)
        stop(worker)

    first.on_step = die
    b = first.builder().on_worker_failure("continue").checkpoint_dir(tmp_path)
    if way[0] is not SYNC:
        b.partition_ratios([1, 1, 1])  # else the other ranks would train everything
    state = start(b.run()).join(WAIT_S)
    assert [f.rank for f in state.failures] == [2]
    data = load_newest(tmp_path).data
    assert marked(data.weights) == consumed(data, N, 2)
    assert len(data.ranks) == 2
    end = second.builder().resume(tmp_path).run().join(WAIT_S)
    assert set(second.trained) == first.all_samples() - consumed(data, N, 2)
    assert marked(end.state_dict()) == first.all_samples()
    assert end.failures == ()


def test_a_failure_leaves_the_earlier_checkpoints_and_one_of_the_steps_before_it(tmp_path):
    run = MarkingRun(n=N, way=(SYNC, THREAD))

    def die(worker):
        if worker.current_epoch == 1 and worker.local_step == 20:
            raise RuntimeError("dead")

    run.on_step = die
    with pytest.raises(WorkerFailed):
        run.builder().checkpoint_dir(tmp_path).run().join(WAIT_S)
    failed, earlier = (load_newest(entry.path).data for entry in entries(tmp_path))
    assert failed.epoch == earlier.epoch == 1
    assert len(marked(earlier.weights)) == N
    assert len(marked(failed.weights)) == failed.global_step * N // earlier.global_step > N


# -- refusals: before any thread starts, unless the model is needed ------------------------


def changed(**settings):
    def change(b):
        for name, value in settings.items():
            getattr(b, name)(value)
        return b

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(batch_size=3), "batch_size 2, this run has 3"),
        (changed(dataset=(torch.arange(50),)), "length of the data set 60, this run has 50"),
        (changed(seed=4), "seed 3, this run has 4"),
        (changed(drop_last=True), "drop_last False"),
        (changed(accumulate=2), "accumulate 1"),
        (changed(num_epochs=2), r"set at least 3"),
    ],
)
def test_settings_that_do_not_match_the_checkpoint_are_refused(change, message, tmp_path):
    run = MarkingRun(n=N)
    run.builder().checkpoint_dir(tmp_path).run().join(WAIT_S)
    with pytest.raises(CheckpointError, match=message):
        change(run.builder()).resume(tmp_path).run()


@pytest.mark.parametrize("sizes", ["batch_size", "global_batch_size"])
@pytest.mark.parametrize(("before", "after"), [(SYNC, ASYNC), (SYNC, CADENCE), (CADENCE, SYNC)])
def test_another_policy_is_named_with_the_one_that_resumes(before, after, sizes, tmp_path):
    """With global_batch_size a worker's batch differs as well, which is not what to change."""

    def made(policy, epochs=1):
        b = Trainer.builder(Counter(), plain_sgd, count_up).dataset(numbers(N)).devices(["cpu"] * 2)
        return getattr(b, sizes)(4).policy(policy).num_epochs(epochs).progress(False)

    made(before).checkpoint_dir(tmp_path).run().join(WAIT_S)
    other = "CADENCE or ASYNC"
    was, now = ("SYNC", other) if before is SYNC else (other, "SYNC")
    calls = r"policy\('sync'\)" if before is SYNC else r"policy\('cadence'\) or policy\('async'\)"
    message = f"written under the policy {was}, this run has {now}, .* call {calls} on the builder"
    with pytest.raises(CheckpointError, match=message):
        made(after).resume(tmp_path).run()
    state = made(before, epochs=2).resume(tmp_path).run().join(WAIT_S)
    assert [metrics.num_samples for metrics in state.metrics] == [N, N]


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))


class Extra(Counter):
    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.zeros(1))


class Single(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Wide, r"shape of 'w' is \(1,\) in the checkpoint and \(2,\)"),
        (Extra, "the model has 'more', the checkpoint does not"),
        (Single, "dtype of 'w' is torch.float64 in the checkpoint"),
    ],
)
def test_another_model_is_refused_with_its_first_difference(model, message, tmp_path):
    builder().checkpoint_dir(tmp_path).run().join(WAIT_S)
    handle = builder(model=lambda device: model(), epochs=2).resume(tmp_path).run()
    with pytest.raises(CheckpointError, match=message):
        handle.join(WAIT_S)


def test_another_optimizer_is_refused(tmp_path):
    builder(optim=lambda p: torch.optim.Adam(p)).checkpoint_dir(tmp_path).run().join(WAIT_S)

    def two_groups(params):
        return torch.optim.Adam([{"params": params}, {"params": [], "lr": 0.1}])

    handle = builder(optim=two_groups, epochs=2).resume(tmp_path).run()
    with pytest.raises(CheckpointError, match="does not fit this optimizer"):
        handle.join(WAIT_S)


def test_a_directory_without_a_checkpoint_is_refused_without_missing_ok(tmp_path):
    with pytest.raises(CheckpointError):
        builder().resume(tmp_path / "absent").run()
    state = builder().resume(tmp_path / "absent", missing_ok=True).run().join(WAIT_S)
    assert [m.epoch for m in state.metrics] == [0]


# -- save() and unsupported state --------------------------------------------------------


def test_save_in_a_workers_thread_raises_instead_of_deadlocking():
    run, caught, handles, started = MarkingRun(n=N), [], [], threading.Event()

    def save(worker):
        assert started.wait(WAIT_S)
        with pytest.raises(RuntimeError, match="a worker's own thread"):
            handles[0].save("nowhere")
        caught.append(worker.rank)

    run.on_step = save
    handles.append(run.builder().run())
    started.set()
    handles[0].join(WAIT_S)
    assert caught


def test_save_after_the_end_writes_the_final_state_if_it_was_kept(tmp_path):
    run = MarkingRun(n=N)
    handle = run.builder().checkpoint_dir(tmp_path / "own").run()
    state = handle.join(WAIT_S)
    written = handle.save(tmp_path / "other")
    assert torch.equal(load_newest(written).data.weights["w"], state.state_dict()["w"])
    handle = MarkingRun(n=N).builder().run()
    handle.join(WAIT_S)
    with pytest.raises(CheckpointError, match="kept no full state"):
        handle.save(tmp_path / "other")


def test_save_from_metrics_fn_works(tmp_path):
    run, handles, saved, started = MarkingRun(n=N, epochs=300), [], [], threading.Event()

    def save(metrics):
        assert started.wait(WAIT_S)
        if metrics.epoch == 0:
            saved.append(handles[0].save(tmp_path, timeout=WAIT_S))
            handles[0].stop()

    handles.append(run.builder().metrics_fn(save).run())
    started.set()
    handles[0].join(WAIT_S)
    data = load_newest(saved[0]).data
    assert marked(data.weights) == consumed(data, N, 2)


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_a_save_that_has_timed_out_waits_no_longer_for_its_state(way, tmp_path, monkeypatch):
    """The first call's state is being collected when it times out, that of the others is not."""
    make, made, released = CheckpointService.data, [], threading.Event()
    monkeypatch.setattr(
        CheckpointService, "data", lambda self, command: made.append(command) or make(self, command)
    )

    in_step = threading.Semaphore(0)

    def train(model, batch):
        in_step.release()
        assert released.wait(WAIT_S)
        return count_up(model, batch)

    handle = builder(train=train, dataset=40, epochs=3, way=way).run()
    assert all(in_step.acquire(timeout=WAIT_S) for _ in range(2))
    for _ in range(3):
        with pytest.raises(TimeoutError, match="no step boundary was reached"):
            handle.save(tmp_path, timeout=0.05)
    released.set()
    handle.join(WAIT_S)
    assert len(made) <= 1
    assert list(tmp_path.iterdir()) == []


class Odd(torch.optim.SGD):
    """An optimizer with state of an unsupported type."""

    def state_dict(self):
        return {**super().state_dict(), "odd": object()}


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, THREAD)])
def test_unsupported_state_ends_a_run_with_checkpoints_before_its_first_step(way, tmp_path):
    steps = Trace()
    b = builder(optim=lambda p: Odd(p, 1.0), train=steps, dataset=40, way=way)
    with pytest.raises(CheckpointError, match=r"optimizer.*odd.* is of type object"):
        b.checkpoint_dir(tmp_path).run().join(WAIT_S)
    assert not steps.steps
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, THREAD)])
def test_unsupported_state_fails_a_save_and_does_not_stop_training(way, tmp_path, caplog):
    b = builder(optim=lambda p: Odd(p, 1.0), dataset=40, epochs=10_000, way=way)
    handle = b.run()
    with pytest.raises(CheckpointError, match=r"optimizer.*odd"):
        handle.save(tmp_path)
    metrics = handle.next_metrics(WAIT_S)
    handle.stop()
    state = handle.join(WAIT_S)
    assert metrics is not None
    assert "odd" in str(state.checkpoint_errors[0])
    assert "no checkpoint could be taken" in caplog.text


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=lambda way: way[0].name)
def test_a_save_that_is_called_during_another_is_answered_by_the_next_checkpoint(way):
    """Rank 1 is in a step when both are requested, so that the first waits for it."""
    gate = Gate(rank=1)
    handle = builder(train=gate, dataset=40, epochs=10_000, way=way).run()
    gate.await_entry()
    saves, inbox = handle._run._saves, handle._run._inbox
    tickets = [saves.ticket() for _ in range(2)]
    for number, _ in tickets:
        inbox.put(m.SaveRequested(ticket=number))
    gate.opened.set()
    first, second = (ticket.wait(WAIT_S) for _, ticket in tickets)
    handle.stop()
    handle.join(WAIT_S)
    assert first.global_step <= second.global_step
