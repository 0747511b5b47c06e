"""TrainerHandle: waiting, stopping, metrics, statistics."""

from __future__ import annotations

import math
import queue
import threading
import time

import numpy as np
import pytest
import torch

from runtime import current_worker
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    Gate,
    Trace,
    builder,
    count_up,
    every_way,
    local_ways,
)

FOREVER = 100_000


# -- join ----------------------------------------------------------------------


def test_join_with_a_timeout_raises_and_the_run_continues():
    gate = Gate()
    handle = builder(train=gate).run()
    gate.await_entry()
    with pytest.raises(TimeoutError, match="continues"):
        handle.join(0.01)
    with pytest.raises(TimeoutError, match="continues"):
        handle.next_metrics(0.01)
    assert handle.state is None
    gate.opened.set()
    assert not handle.join(WAIT_S).stopped


def test_join_repeats_its_state_and_its_error():
    handle = builder().run()
    assert handle.join(WAIT_S) is handle.join(WAIT_S) is handle.state

    def broken(model, batch):
        raise ZeroDivisionError("no")

    failing = builder(train=broken).run()
    errors = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            failing.join(WAIT_S)
        errors.append(caught.value)
    assert errors[0] is errors[1]
    assert failing.state is None


def test_join_from_several_threads_returns_the_same_state():
    gate = Gate()
    handle = builder(train=gate).run()
    found = []
    threads = [threading.Thread(target=lambda: found.append(handle.join())) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.opened.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == [handle.state] * 4


# -- stop ----------------------------------------------------------------------


@every_way
def test_stop_in_the_middle_keeps_the_training_so_far(way):
    trace = Trace()
    handle = builder(train=trace, dataset=FOREVER, batch_size=1, way=way).run()
    trace.wait_for(lambda: min(trace.steps[0], trace.steps[1]) >= 3)
    for _ in range(3):
        handle.stop()
    state = handle.join(WAIT_S)
    assert state.stopped
    assert state.metrics == ()
    assert list(handle.metrics()) == []
    assert 0 < float(state.params["w"]) <= sum(trace.steps.values())
    handle.stop()
    assert handle.join(WAIT_S) is state


@every_way
def test_stop_before_the_first_step_ends_the_run(way):
    released = threading.Event()

    def slow_to_build(params):
        assert released.wait(WAIT_S)
        return torch.optim.SGD(params, 1.0)

    trace = Trace()
    handle = builder(train=trace, dataset=FOREVER, optim=slow_to_build, way=way).run()
    handle.stop()
    released.set()
    state = handle.join(WAIT_S)
    assert state.stopped
    assert trace.batches == []
    assert float(state.params["w"]) == 0.0


@pytest.mark.parametrize("ranks", [2, 3])
def test_lockstep_ranks_all_stop_before_the_same_step(ranks):
    trace = Trace()
    handle = builder(
        train=trace, dataset=FOREVER, batch_size=1, ranks=ranks, way=(SYNC, THREAD)
    ).run()
    trace.wait_for(lambda: sum(trace.steps.values()) >= 5 * ranks)
    threading.Thread(target=handle.stop).start()
    state = handle.join(WAIT_S)
    (steps,) = set(trace.steps.values())
    assert float(state.params["w"]) == steps


@local_ways
def test_stop_in_an_epochs_last_batches_ends_the_run(way):
    for last in range(1, 9):
        trace, handles, ready = Trace(), [], threading.Event()

        def train(model, batch, trace=trace, handles=handles, ready=ready, last=last):
            assert ready.wait(WAIT_S)
            if sum(trace.steps.values()) == last:
                handles[0].stop()
            return trace(model, batch)

        handle = builder(train=train, dataset=8, batch_size=2, epochs=50, way=way).run()
        handles.append(handle)
        ready.set()
        state = handle.join(WAIT_S)
        if way[0] is SYNC:
            assert trace.steps[0] == trace.steps[1] == float(state.params["w"])


# -- metrics -------------------------------------------------------------------


def test_metrics_are_one_queue_for_all_readers():
    handle = builder(epochs=4).run()
    first = handle.next_metrics(WAIT_S)
    assert first.epoch == 0
    assert [m.epoch for m in handle.metrics()] == [1, 2, 3]
    assert handle.next_metrics(WAIT_S) is None
    assert handle.poll_metrics() == []
    assert [m.epoch for m in handle.join(WAIT_S).metrics] == [0, 1, 2, 3]


def test_poll_metrics_returns_unread_metrics_at_once():
    handle = builder(epochs=3).run()
    handle.join(WAIT_S)
    assert [m.epoch for m in handle.poll_metrics()] == [0, 1, 2]
    assert handle.poll_metrics() == []


@pytest.mark.parametrize(
    ("way", "kind"),
    [((SYNC, THREAD), bool), ((CADENCE, OVER_CPU), np.bool_), ((ASYNC, THREAD), torch.tensor)],
)
def test_metrics_fn_that_returns_false_ends_the_run(way, kind):
    names = []

    def metrics_fn(metrics):
        names.append(threading.current_thread().name)
        return kind(metrics.epoch < 2)

    handle = builder(dataset=100, epochs=FOREVER, way=way).metrics_fn(metrics_fn).run()
    state = handle.join(WAIT_S)
    assert state.stopped
    assert len(state.metrics) >= 3
    assert set(names) == {"metrics"}


def test_progress_is_silent_off_a_terminal(capfd):
    builder().run().join(WAIT_S)
    assert capfd.readouterr() == ("", "")


def test_progress_off_a_terminal_logs_one_line_an_epoch(caplog, capfd):
    with caplog.at_level("INFO", logger="runtime.loggers.progress"):
        builder(epochs=2).run().join(WAIT_S)
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["epoch 0", "epoch 1"]
    assert capfd.readouterr() == ("", "")


# -- the context manager -------------------------------------------------------


def test_leaving_the_block_waits_for_the_end():
    with builder(epochs=2).run() as handle:
        pass
    assert len(handle.state.metrics) == 2


def test_leaving_the_block_on_an_exception_stops_the_run():
    trace = Trace()
    handle = builder(train=trace, dataset=FOREVER).run()

    def fail_inside():
        with handle:
            trace.wait_for(lambda: trace.batches)
            raise LookupError

    with pytest.raises(LookupError):
        fail_inside()
    assert handle.state.stopped


# -- state of the handle -------------------------------------------------------


@local_ways
def test_statistics_count_the_work_of_every_rank(way):
    handle = builder(dataset=41, batch_size=4, epochs=2, ranks=3, way=way).run()
    handle.statistics()  # at any time
    state = handle.join(WAIT_S)
    found = handle.statistics()
    assert found.global_step == 22
    assert sum(r.num_batches for r in found.ranks) == 22
    assert sum(r.num_samples for r in found.ranks) == 82
    assert sum(r.share for r in found.ranks) == pytest.approx(1.0)
    assert [r.rank for r in found.ranks] == [0, 1, 2]
    assert all(r.alive for r in found.ranks)
    assert found.num_averagings == sum(m.num_averagings for m in state.metrics)
    assert found.num_failed_rounds == 0
    with pytest.raises(AttributeError):
        found.epoch = 5


def test_the_handle_names_devices_and_backend():
    handle = builder(ranks=3, way=(SYNC, THREAD)).run()
    assert handle.world_size == 3
    assert handle.devices == (torch.device("cpu"),) * 3
    assert handle.backend is THREAD
    assert handle.backend_reason
    handle.join(WAIT_S)


@every_way
def test_max_steps_ends_after_that_many_batches_of_all_ranks(way):
    trace = Trace()
    handle = builder(train=trace, dataset=10, batch_size=2, epochs=9, way=way).max_steps(17).run()
    state = handle.join(WAIT_S)
    assert sum(trace.steps.values()) == 17
    assert len(trace.of_epoch(3)) == 2
    assert [metrics.partial for metrics in state.metrics] == [False] * 3 + [True]
    assert [metrics.epoch for metrics in handle.metrics()] == [0, 1, 2, 3]
    last = state.metrics[-1]
    assert last.num_samples == 4
    assert sum(rank.num_batches for rank in last.per_rank) == 2
    assert math.isfinite(last.avg_loss)
    assert not any(name.startswith("eval/") for name in last.scalars)
    assert 0 < last.epoch_s < WAIT_S


@every_way
def test_an_epoch_that_max_steps_ends_with_is_whole(way):
    state = builder(dataset=10, batch_size=2, epochs=9, way=way).max_steps(10).run().join(WAIT_S)
    assert [(e.epoch, e.num_samples, e.partial) for e in state.metrics] == [
        (0, 10, False),
        (1, 10, False),
    ]


def test_after_a_stop_the_epoch_that_was_cut_has_no_metrics():
    """Also with max_steps."""

    def stops(model, batch):
        if current_worker().local_step == 2:
            handle.stop()
        return count_up(model, batch)

    begun = threading.Event()
    handle = builder(
        train=lambda model, batch: (begun.wait(WAIT_S), stops(model, batch))[1],
        dataset=100,
        ranks=2,
        way=(SYNC, THREAD),
    )
    handle = handle.max_steps(40).run()
    begun.set()
    assert handle.join(WAIT_S).metrics == ()


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_a_resumed_run_reports_the_whole_epoch_that_max_steps_had_cut(way, tmp_path):
    """One entry for an epoch of which the earlier run reported a part."""

    def run(**more):
        b = builder(dataset=20, batch_size=2, epochs=2, way=way).checkpoint_dir(tmp_path)
        for name, value in more.items():
            getattr(b, name)(value)
        return b.run().join(WAIT_S)

    first = run(max_steps=13)
    assert [(e.num_samples, e.partial) for e in first.metrics] == [(20, False), (6, True)]
    second = run(resume=tmp_path)
    assert [(e.epoch, e.num_samples, e.partial) for e in second.metrics] == [
        (0, 20, False),
        (1, 20, False),
    ]


# -- the process around it -----------------------------------------------------


def test_intra_op_threads_are_restored():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 3)
    try:
        inside = []

        def train(model, batch):
            inside.append(torch.get_num_threads())
            return count_up(model, batch)

        builder(train=train, ranks=2).run().join(WAIT_S)
        later = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (torch.get_num_threads(), later) == (before + 3, [before + 3])
        assert before + 3 not in inside
    finally:
        torch.set_num_threads(before)


def test_run_returns_before_a_slow_factory_does():
    release = threading.Event()

    def model(device):
        assert release.wait(WAIT_S)
        return torch.nn.Linear(1, 1)

    start = time.monotonic()
    handle = builder(
        model=model, train=lambda m, b: m(b[0].float().unsqueeze(1)).mean(), ranks=2
    ).run()
    assert time.monotonic() - start < WAIT_S / 2
    assert handle.poll_metrics() == []
    release.set()
    handle.join(WAIT_S)


def test_a_callback_that_waits_for_its_own_run_gets_an_error_and_the_run_ends():
    published: queue.SimpleQueue[object] = queue.SimpleQueue()
    refused: list[BaseException] = []

    def wait_in_callback(metrics):
        try:
            published.get(timeout=WAIT_S).join()
        except RuntimeError as error:
            refused.append(error)

    handle = builder().metrics_fn(wait_in_callback).run()
    published.put(handle)
    handle.join(WAIT_S)
    assert "cannot wait for that run" in str(refused[0])
