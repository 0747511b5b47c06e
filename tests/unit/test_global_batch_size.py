"""A global batch size: its parts, its counting of steps, and the settings that exclude it."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import runtime
from runtime import CheckpointError, StepMetrics, Trainer, WorkerFailed
from tests.support.pairs import pairwise
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    Seen,
    Stream,
    count_up,
    counter,
    plain_sgd,
)

N, SIZE, EPOCHS = 103, 10, 2
PER_EPOCH = math.ceil(N / SIZE)
WAYS = [(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, THREAD)]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0].name)


EACH_ONCE = Counter({(epoch, i): 1 for epoch in range(EPOCHS) for i in range(N)})


def builder(ranks, way=WAYS[0], seen=None, *, size=SIZE, dataset=None, **settings):
    b = Trainer.builder(lambda device: nn.Linear(1, 1), plain_sgd, seen or Seen())
    b.dataset((torch.arange(N),) if dataset is None else dataset).global_batch_size(size)
    b.num_epochs(EPOCHS).devices(["cpu"] * ranks).policy(way[0]).backend(way[1]).progress(False)
    for name, value in settings.items():
        getattr(b, name)(value)
    return b


# -- parts -------------------------------------------------------------------------------------


@pairwise(way=WAYS, accumulate=[1, 2], ranks=[1, 2, 3])
def test_each_rank_trains_its_part_and_each_sample_once(way, ranks, accumulate):
    seen = Seen()
    state = builder(ranks, way, seen, accumulate=accumulate).run().join(WAIT_S)
    assert seen.trained() == EACH_ONCE
    assert [m.num_samples for m in state.metrics] == [N] * EPOCHS
    own = [len(range(r, SIZE // accumulate, ranks)) for r in range(ranks)]
    for rank, size in enumerate(own):
        assert max(seen.sizes(rank), default=size) == size
    if way[0] is SYNC:
        whole = EPOCHS * (N // SIZE) * accumulate
        assert all(sum(n == own[r] for n in seen.sizes(r)) >= whole for r in range(ranks))


@pytest.mark.parametrize(("ranks", "pieces"), [(2, [3]), (4, [3]), (9, [2, 1])])
def test_a_short_batch_is_split_in_pieces_as_large_as_usual(ranks, pieces):
    """No rank trains a single sample, which batch normalisation cannot, if it has more usually."""
    seen = Seen()
    builder(ranks, seen=seen).num_epochs(1).run().join(WAIT_S)
    usual = sorted((len(range(r, SIZE, ranks)) for r in range(ranks)), reverse=True)
    found = [seen.sizes(rank)[N // SIZE :] for rank in range(ranks)]
    assert [n for short in found for n in short] == pieces
    assert [seen.sizes(rank)[0] for rank in range(ranks)] == usual


def test_a_short_batch_has_micro_batches_as_large_as_usual():
    seen = Seen()
    builder(2, seen=seen, accumulate=2).num_epochs(1).run().join(WAIT_S)
    whole = 2 * (N // SIZE)
    assert [seen.sizes(rank)[whole:] for rank in range(2)] == [[3], []]  # 3 samples of up to 5


@pytest.mark.parametrize("accumulate", [1, 2])
def test_pieces_do_not_grow_when_a_worker_dies(accumulate):
    """The memory for its piece suffices a rank, whose micro-batches then are more."""
    seen = Seen(fails_at=3)
    b = builder(2, seen=seen, accumulate=accumulate, on_worker_failure="continue")
    b.run().join(WAIT_S)
    assert max(seen.sizes(0)) == -(-SIZE // accumulate // 2)


@every_way
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stream_is_trained_once(way, accumulate):
    seen = Seen()
    builder(3, way, seen, dataset=Stream(N), accumulate=accumulate).run().join(WAIT_S)
    assert seen.trained() == EACH_ONCE


@every_way
@pytest.mark.parametrize("dataset", [None, Stream(N)], ids=["indexed", "stream"])
def test_a_death_loses_nothing(way, dataset):
    seen = Seen(fails_at=3)
    b = builder(3, way, seen, dataset=dataset, on_worker_failure="continue")
    state = b.run().join(WAIT_S)
    assert seen.trained().keys() == EACH_ONCE.keys()
    assert [m.num_samples for m in state.metrics] == [N] * EPOCHS


# -- counting ----------------------------------------------------------------------------------


class Rates:
    """A scheduler factory that records the number of steps that each rank's scheduler makes."""

    def __init__(self):
        self.totals, self.last, self._lock = [], {}, threading.Lock()

    def __call__(self, optimizer, total):
        with self._lock:
            self.totals.append(total)

        def rate(step):
            with self._lock:
                self.last[id(optimizer)] = step
            return 1.0 - step / (2 * total)

        return LambdaLR(optimizer, rate)


@pairwise(way=WAYS, accumulate=[1, 2], ranks=[1, 2, 3])
def test_schedules_and_progress_count_global_batches(way, ranks, accumulate):
    rates = Rates()
    handle = builder(ranks, way, scheduler=rates, accumulate=accumulate).run()
    handle.join(WAIT_S)
    total = EPOCHS * PER_EPOCH
    assert rates.totals == [total] * ranks
    assert handle.total_batches == total
    assert handle.statistics().global_step == handle.statistics().num_trained == total
    if way[0] is SYNC or ranks == 1:
        assert set(rates.last.values()) == {total - 1}
    else:  # the rate of the step that would follow is that of the end
        assert max(rates.last.values()) <= total


@every_way
def test_an_epoch_is_its_number_of_global_batches(way):
    """A scheduler that is stepped once an epoch takes ``total`` epochs."""
    rates = Rates()
    b = builder(2, way, size=9).scheduler(rates, interval="epoch")
    b.run().join(WAIT_S)
    assert rates.totals == [EPOCHS] * 2
    if way[0] is SYNC:
        assert set(rates.last.values()) == {EPOCHS - 1}
    else:  # a rank may train its last batches before a round that adds the others' batches
        assert max(rates.last.values()) < EPOCHS


@every_way
@pytest.mark.parametrize("ranks", [1, 2])
def test_drop_last_omits_the_rest_of_the_global_batches(way, ranks):
    seen = Seen()
    handle = builder(ranks, way, seen, drop_last=True).run()
    handle.join(WAIT_S)
    assert sum(seen.trained().values()) == EPOCHS * (N // SIZE) * SIZE
    assert handle.total_batches == EPOCHS * (N // SIZE)


@every_way
@pytest.mark.parametrize("ranks", [1, 2])
def test_max_steps_and_metrics_of_steps_count_global_batches(way, ranks):
    seen, found = Seen(), []
    b = builder(ranks, way, seen, max_steps=13, metrics_every=4, metrics_fn=found.append)
    handle = b.run()
    handle.join(WAIT_S)
    assert handle.total_batches == 13
    assert sum(seen.trained().values()) == N + 2 * SIZE
    steps = [entry.step for entry in found if isinstance(entry, StepMetrics)]
    if way[0] is SYNC:
        assert steps == [4, 8, 12]
    assert all(after - before >= 4 for before, after in itertools.pairwise([0, *steps]))
    assert 13 - 4 <= steps[-1] <= 13


# -- resume ------------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_continues_at_its_position(way, accumulate, tmp_path):
    first, again = Seen(), Seen()
    b = builder(2, way, first, accumulate=accumulate)
    b.max_steps(13).checkpoint_dir(tmp_path).run().join(WAIT_S)
    b = builder(2, way, again, accumulate=accumulate).resume(tmp_path)
    handle = b.run()
    handle.join(WAIT_S)
    assert first.trained() + again.trained() == EACH_ONCE
    assert handle.statistics().global_step == EPOCHS * PER_EPOCH


@pytest.mark.parametrize("size", [5, 20])
def test_a_checkpoint_of_another_global_batch_is_refused(size, tmp_path):
    builder(2, max_steps=3, checkpoint_dir=tmp_path).run().join(WAIT_S)
    with pytest.raises(CheckpointError, match=f"global_batch_size 10, this run has {size}"):
        builder(2, size=size, resume=tmp_path).run()


@pytest.mark.parametrize("size", [5, 10])
def test_a_checkpoint_of_a_batch_size_for_each_device_is_refused(size, tmp_path):
    """Its steps are counted differently, even if they have the same samples."""
    b = builder(2, max_steps=4, checkpoint_dir=tmp_path)
    b._set(global_batch_size=None, batch_size=size)
    b.run().join(WAIT_S)
    with pytest.raises(CheckpointError, match=rf"batch_size\({size}\) on 2 devices"):
        builder(2, resume=tmp_path).run()


# -- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "calls", [("global_batch_size", "batch_size"), ("batch_size", "global_batch_size")]
)
def test_one_of_the_two_batch_sizes_is_set(calls):
    b = Trainer.builder(counter, plain_sgd, count_up)
    first, second = calls
    getattr(b, first)(8)
    with pytest.raises(ValueError, match=rf"{second}\(8\) was called after {first}: call one"):
        getattr(b, second)(8)


def test_fit_takes_one_of_the_two_batch_sizes():
    model, data = nn.Linear(1, 1), (torch.ones(20, 1), torch.ones(20, 1))
    settings = {"optimizer": plain_sgd, "loss": nn.functional.mse_loss, "devices": 2}
    state = runtime.fit(model, data, **settings, global_batch_size=5)
    assert state.metrics[0].num_averagings == 4
    with pytest.raises(ValueError, match="call one of them"):
        runtime.fit(model, data, **settings, global_batch_size=5, batch_size=5)


@pytest.mark.parametrize("value", [0, -1, 2.5, "8", True])
def test_a_global_batch_has_a_sample(value):
    with pytest.raises((TypeError, ValueError), match="global_batch_size"):
        Trainer.builder(counter, plain_sgd, count_up).global_batch_size(value)


REFUSED = [
    ({"size": 2}, {}, r"global_batch_size\(2\) is too small for 3 devices.*at least 3"),
    ({"size": 5}, {"accumulate": 2}, r"each of accumulate\(2\) micro-batches: pass at least 6"),
    ({"way": WAYS[1]}, {"accumulate": 3}, "no multiple of accumulate.*pass 9 or 12"),
    ({"way": WAYS[2]}, {"drop_last": True}, "no multiple of the 3 devices"),
    ({"way": WAYS[2]}, {"cluster": "host:1"}, "no multiple of the 3 devices of this machine"),
    ({"size": 200}, {"drop_last": True}, r"fewer than global_batch_size\(200\)"),
]


@pytest.mark.parametrize(("made", "settings", "message"), REFUSED)
def test_a_global_batch_that_cannot_be_split_is_refused(made, settings, message):
    with pytest.raises(ValueError, match=message):
        builder(3, **made, **settings).run()


@pytest.mark.parametrize("result", [lambda loss: (loss, 3), lambda loss: {"loss": loss}])
@pytest.mark.filterwarnings("ignore")
def test_a_sum_has_no_weight(result):
    def train(model, batch):
        loss = model(torch.ones(len(batch[0]), 1)).sum()
        return result(loss)

    b = builder(2, seen=train).loss_reduction("sum")
    if isinstance(result(torch.ones(())), dict):
        b.run().join(WAIT_S)  # without labels there is no weight
        return
    with pytest.raises(WorkerFailed, match="return the sum alone"):
        b.run().join(WAIT_S)


def test_a_reduction_is_a_mean_or_a_sum():
    with pytest.raises(ValueError, match="pass one of mean, sum"):
        Trainer.builder(counter, plain_sgd, count_up).loss_reduction("none")
