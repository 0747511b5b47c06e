"""A checkpoint's weights contain exactly the samples that it records as consumed."""

from __future__ import annotations

import pytest

from runtime.checkpoint.store import load_newest, write_checkpoint
from tests.support.pairs import SCALE
from tests.support.resuming import MarkingRun, captured_run, consumed, marked
from tests.support.running import LOCAL_WAYS, WAIT_S


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("way", LOCAL_WAYS, ids=lambda way: "-".join(w.value for w in way))
def test_the_weights_of_every_checkpoint_contain_its_consumed_samples(way, ranks):
    run, saved = captured_run(90, ranks=ranks, way=way)
    for data in saved:
        assert marked(data.weights) == consumed(data, run.n, run.batch_size)
        assert data.global_step * run.batch_size == len(marked(data.weights))
        assert len(data.ranks) == ranks


@pytest.mark.parametrize("way", LOCAL_WAYS, ids=lambda way: "-".join(w.value for w in way))
def test_a_run_resumed_from_any_checkpoint_trains_the_rest_exactly_once(way, tmp_path):
    run, saved = captured_run(120, way=way)
    for data in saved[:: max(1, len(saved) // (4 if SCALE > 1 else 2))]:
        rest = MarkingRun(n=run.n, way=way)
        state = rest.builder().resume(write_checkpoint(tmp_path, data)).run().join(WAIT_S)
        assert set(rest.trained) == run.all_samples() - consumed(data, run.n, run.batch_size)
        assert set(rest.trained.values()) <= {1}
        assert marked(state.state_dict()) == run.all_samples()
        assert [m.epoch for m in state.metrics] == [0, 1, 2]
        for m in state.metrics:
            assert m.num_samples == sum(r.num_samples for r in m.per_rank) == run.n


def test_checkpoints_are_written_every_n_epochs_and_at_the_end(tmp_path):
    run = MarkingRun(epochs=5)
    run.builder().checkpoint_dir(tmp_path, every=2, keep=10).run().join(WAIT_S)
    newest = load_newest(tmp_path).data
    assert newest.epoch == 5
    assert marked(newest.weights) == run.all_samples()
