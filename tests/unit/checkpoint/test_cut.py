"""A checkpoint's weights contain exactly the samples that it records as consumed."""

from __future__ import annotations

import threading

import pytest

from runtime.checkpoint.store import load_newest, save_once
from tests.support.resuming import MarkingRun, consumed, marked
from tests.support.running import LOCAL_WAYS, SYNC, WAIT_S

SYNC_WAYS = [way for way in LOCAL_WAYS if way[0] is SYNC]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("way", LOCAL_WAYS, ids=lambda way: "-".join(w.value for w in way))
def test_the_weights_of_every_checkpoint_contain_its_consumed_samples(way, ranks):
    run = MarkingRun(n=90, ranks=ranks, way=way)
    saved = run.capture_often()
    assert len(saved) > 2
    for data in saved:
        assert marked(data.weights) == consumed(data, run.n, run.batch_size)
        assert data.global_step * run.batch_size == len(marked(data.weights))
        assert len(data.ranks) == ranks


@pytest.mark.parametrize("way", LOCAL_WAYS, ids=lambda way: "-".join(w.value for w in way))
def test_a_run_resumed_from_any_checkpoint_trains_the_rest_exactly_once(way, tmp_path):
    run = MarkingRun(n=120, way=way)
    saved = run.capture_often()
    for data in saved[:: max(1, len(saved) // 4)]:
        rest = MarkingRun(n=120, way=way)
        state = rest.builder().resume(save_once(tmp_path, data)).run().join(WAIT_S)
        assert set(rest.trained) == run.all_samples() - consumed(data, run.n, run.batch_size)
        assert set(rest.trained.values()) <= {1}
        assert marked(state.state_dict()) == run.all_samples()
        assert [m.epoch for m in state.metrics] == [0, 1, 2]
        for m in state.metrics:
            assert m.num_samples == sum(r.num_samples for r in m.per_rank) == run.n


@pytest.mark.parametrize("way", SYNC_WAYS, ids=lambda way: "-".join(w.value for w in way))
def test_under_sync_a_checkpoint_is_taken_between_two_steps(way):
    run = MarkingRun(n=60, way=way)  # 15 steps of each rank in an epoch
    begun, saved = threading.Event(), threading.Event()

    def on_step(worker):
        if worker.rank == 0 and worker.current_epoch == 0:
            if worker.local_step == 3:
                begun.set()
            if worker.local_step == 12:
                assert saved.wait(WAIT_S)

    run.on_step = on_step
    handle = run.builder().run()
    assert begun.wait(WAIT_S)
    data = handle._run.save(WAIT_S)
    saved.set()
    handle.join(WAIT_S)
    assert 0 < data.global_step <= 24
    assert marked(data.weights) == consumed(data, run.n, run.batch_size)


def test_checkpoints_are_written_every_n_epochs_and_at_the_end(tmp_path):
    run = MarkingRun(epochs=5)
    run.builder().checkpoint_dir(tmp_path, every=2, keep=10).run().join(WAIT_S)
    newest = load_newest(tmp_path).data
    assert newest.epoch == 5
    assert marked(newest.weights) == run.all_samples()
