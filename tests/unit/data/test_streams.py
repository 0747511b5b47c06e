"""Streams: each item is read and trained once, in order, also after failures and resumes."""

from __future__ import annotations

import threading
import weakref
from collections import Counter as Count
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import runtime.data.stream
from coordinator.codec import decode, encode
from runtime import CheckpointError, Trainer, WorkerFailed, current_worker
from runtime.checkpoint.content import SavedStream
from runtime.checkpoint.resume import check_content
from runtime.checkpoint.store import load_newest
from runtime.core.context import LoaderView, worker_context
from runtime.data.stream import StreamAdapter
from tests.support.resuming import Marks
from tests.support.running import (
    LOCAL_WAYS,
    SYNC,
    THREAD,
    WAIT_S,
    Trace,
    builder,
    count_up,
    counter,
    local_ways,
    numbers,
    plain_sgd,
)

N, SIZE = 43, 4


class Stream(IterableDataset):
    """Yields 0, 1, 2, ... and records how it is read."""

    def __init__(self, n=N):
        self.n = n
        self.read = []
        self.most_at_a_time = 0
        self._busy = threading.Semaphore(1)

    def __iter__(self):
        for i in range(self.n):
            assert self._busy.acquire(blocking=False), "two threads read it"
            self.read.append(i)
            self._busy.release()
            yield self.item(i)

    def item(self, i):
        return torch.tensor(i)


class Sized(Stream):
    def __len__(self):
        return self.n


def batches_of(n=N):
    return [tuple(range(start, min(start + SIZE, n))) for start in range(0, n, SIZE)]


def trained(stream, *, length=None, train=count_up, run=WAIT_S, **settings):
    trace = Trace(train)
    b = builder(train=trace, batch_size=SIZE, **settings).dataset(stream, length=length)
    return trace, b.run().join(run)


@pytest.mark.parametrize(
    ("way", "ranks"),
    [*((way, ranks) for way in LOCAL_WAYS for ranks in (2, 4)), (LOCAL_WAYS[0], 1)],
)
def test_each_item_is_trained_once_an_epoch_in_the_streams_order(way, ranks):
    stream = Sized()
    trace, state = trained(stream, epochs=3, ranks=ranks, way=way)
    for epoch in range(3):
        assert sorted(indices for _, indices in trace.of_epoch(epoch)) == batches_of()
    assert stream.read == [*range(N)] * 3
    assert [m.num_samples for m in state.metrics] == [N] * 3


def test_under_sync_each_rank_trains_its_share_of_the_order():
    trace, _ = trained(Sized(), ranks=2, way=(SYNC, THREAD))
    assert [i for rank, i in trace.of_epoch(0) if rank == 0] == batches_of()[::2]


def test_items_without_a_length_are_counted():
    stream = Stream()
    trace, _ = trained(stream, epochs=2)
    assert Count(i for _, _, batch in trace.batches for i in batch) == dict.fromkeys(range(N), 2)
    assert stream.read == [*range(N)] * 3


def test_a_given_length_ends_each_epoch():
    endless = Stream(10**12)
    trace, state = trained(endless, length=10, epochs=2)
    assert [m.num_samples for m in state.metrics] == [10, 10]
    assert endless.read == [*range(10)] * 2
    assert sorted(batch for _, batch in trace.of_epoch(1)) == batches_of(10)


@local_ways
@pytest.mark.parametrize("kind", [0, 1])
def test_drop_last_drops_the_end_of_each_epoch(way, kind):
    # One of them continues where its last iterator stopped.
    stream, trace = (Sized, Stateful)[kind](), Trace()
    b = builder(train=trace, batch_size=SIZE, epochs=3, way=way).dataset(stream).drop_last(True)
    assert [m.num_samples for m in b.run().join(WAIT_S).metrics] == [40] * 3
    for epoch in range(3):
        assert sorted(batch for _, batch in trace.of_epoch(epoch)) == batches_of()[:-1]


def test_settings_but_processes_are_taken_from_a_streams_loader():
    def collate(items):
        return (torch.stack(items) * 2,)

    trace = Trace()
    b = builder(train=trace, ranks=1)
    b._explicit.discard("batch_size")  # as if it had not been called
    b.dataset(DataLoader(Sized(10), batch_size=3, collate_fn=collate, num_workers=2))
    b.run().join(WAIT_S)
    assert [batch for _, _, batch in trace.batches] == [(0, 2, 4), (6, 8, 10), (12, 14, 16), (18,)]


@local_ways
@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_dead_workers_items_are_retrained_by_others_and_read_once(way, step):
    stream = Sized()

    def train(model, batch):
        worker = current_worker()
        if worker.rank == 1 and worker.local_step == step:
            raise RuntimeError("planted")
        return -model.w[worker.current_epoch, batch].sum()

    b = builder(
        model=lambda device: Marks(2, N).to(device),
        train=train,
        batch_size=SIZE,
        epochs=2,
        ranks=3,
        way=way,
    )
    if way[0] is not SYNC:
        b.partition_ratios([1, 1, 1]).anchor(2)  # each rank trains, fast or slow
    state = b.dataset(stream).on_worker_failure("continue").run().join(WAIT_S)
    assert [f.rank for f in state.failures] == [1]
    assert (state.params["w"] > 0).all()
    assert [m.num_samples for m in state.metrics] == [N] * 2
    assert stream.read == [*range(N)] * 2


class Items(Sized):
    """Tracks its items that are alive."""

    def __init__(self, n):
        super().__init__(n)
        self.alive = weakref.WeakSet()
        self.most = 0

    def item(self, i):
        item = Item(i)
        self.alive.add(item)
        self.most = max(self.most, len(self.alive))
        return item


class Item:
    def __init__(self, i):
        self.i = i


def number(items):
    return torch.tensor([item.i for item in items])


@local_ways
def test_items_are_freed_once_no_failure_can_require_them(way):
    stream = Items(300)
    b = builder(batch_size=2, epochs=4, way=way).collate_fn(number).dataset(stream)
    b.run().join(WAIT_S)
    # At most two epochs are open; under SYNC one, plus items read ahead and, without the GIL,
    # those that the thread that made them has not freed yet.
    assert stream.most <= (400 if way[0] is SYNC else 900)


def test_released_items_are_freed():
    stream = Items(300)
    adapter = StreamAdapter(stream, None, batch_size=2, collate_fn=number, seed=0)
    with reading():
        adapter.load(torch.arange(200, 210))
        assert len(stream.alive) == 210
        adapter.release_before(0, 90)
        assert adapter.load(torch.arange(180, 182)).tolist() == [180, 181]
        assert len(stream.alive) == 30
        adapter.release_before(
            1, 0
        )  # drop_last skips the rest, which is read before the next epoch
        assert adapter.load(torch.arange(300, 302)).tolist() == [0, 1]
        adapter.load(torch.arange(302, 304))
        assert len(stream.alive) == 4
    assert stream.read == [*range(300), 0, 1, 2, 3]


def reading():
    return worker_context(LoaderView(0, torch.Generator()))


@local_ways
def test_the_streams_random_draws_do_not_depend_on_the_reader(way):
    class Drawing(Sized):
        def item(self, i):
            return torch.rand((), generator=current_worker().generator).double()

    def drawn(ranks):
        found = Count()
        lock = threading.Lock()

        def train(model, batch):
            with lock:
                found.update((current_worker().current_epoch, x) for x in batch.tolist())
            return count_up(model, batch)

        b = builder(train=train, batch_size=SIZE, epochs=2, ranks=ranks, way=way)
        b.seed(5).dataset(Drawing()).run().join(WAIT_S)
        return found

    assert drawn(1) == drawn(3)
    assert len(drawn(2)) == 2 * N


# Resuming from a checkpoint.


class Stateful(Sized):
    """Has ``state_dict``, like Hugging Face's streams."""

    def __init__(self, n=N):
        super().__init__(n)
        self.at = 0

    def __iter__(self):
        self.at, start = 0, self.at
        for i, item in enumerate(super().__iter__()):
            if i >= start:
                self.at = i + 1
                yield item
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Quick(Stateful):
    """Resumes without reading earlier items."""

    def __iter__(self):
        self.at, start = 0, self.at
        for i in range(start, self.n):
            self.read.append(i)
            self.at = i + 1
            yield torch.tensor(i)
        self.at = 0


class OfIterator(Sized):
    """The iterator has ``state_dict``, the stream does not."""

    class Iterator:
        def __init__(self, stream):
            self.stream, self.at = stream, 0

        def __iter__(self):
            return self

        def __next__(self):
            if self.at == self.stream.n:
                raise StopIteration
            self.stream.read.append(self.at)
            self.at += 1
            return torch.tensor(self.at - 1)

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    def __iter__(self):
        return OfIterator.Iterator(self)


def interrupted(path, make, way, *, ranks=2, steps=5):
    """Train some steps, and the rest in a resumed run.

    Returns the second stream, how often each item was trained in each epoch, and the state.
    """
    streams, seen = (make(), make()), Count()

    def run(stream, **more):
        trace = Trace(lambda model, batch: -model.w[current_worker().current_epoch, batch].sum())
        b = builder(
            model=lambda device: Marks(2, N).to(device),
            optim=plain_sgd,
            train=trace,
            batch_size=SIZE,
            epochs=2,
            ranks=ranks,
            way=way,
        ).dataset(stream)
        for name, value in more.items():
            getattr(b, name)(value)
        state = b.run().join(WAIT_S)
        seen.update((epoch, i) for epoch, _, batch in trace.batches for i in batch)
        return state

    run(streams[0], checkpoint_dir=path, max_steps=steps)
    state = run(streams[1], resume=path)
    return streams[1], seen, state


@local_ways
@pytest.mark.parametrize("make", [Sized, Stateful, Quick, OfIterator])
def test_a_resumed_run_trains_the_rest_of_the_stream(tmp_path, make, way):
    _, seen, state = interrupted(tmp_path, make, way)
    assert seen == {(epoch, i): 1 for epoch in range(2) for i in range(N)}
    assert (state.params["w"] > 0).all()
    assert [m.num_samples for m in state.metrics] == [N] * 2


def save_every_state(monkeypatch):
    monkeypatch.setattr(runtime.data.stream, "STATE_INTERVAL_S", 0.0)
    monkeypatch.setattr(runtime.data.stream, "STATE_TIME_FRACTION", 1e9)


@pytest.mark.parametrize("make", [Quick, OfIterator])
def test_a_stream_with_state_is_not_read_from_its_beginning(tmp_path, monkeypatch, make):
    save_every_state(monkeypatch)
    again, _, _ = interrupted(tmp_path, make, (SYNC, THREAD), steps=8)
    first = again.read[0]
    assert 0 < first <= 8 * SIZE
    assert again.read[: N - first] == [*range(first, N)]


def test_random_draws_continue_with_the_stream(tmp_path, monkeypatch):
    save_every_state(monkeypatch)

    class Drawing(Quick):
        def __iter__(self):
            for item in super().__iter__():
                yield item, torch.rand((), generator=current_worker().generator)

    def run(*, steps=None, **more):
        sampled_orders = {}

        def train(model, batch):
            sampled_orders.update(zip(batch[0].tolist(), batch[1].tolist(), strict=True))
            return count_up(model, batch)

        b = builder(train=train, batch_size=SIZE, way=(SYNC, THREAD)).dataset(Drawing())
        for name, value in more.items():
            getattr(b, name)(value)
        b.run().join(WAIT_S)
        return sampled_orders

    whole = run()
    before = run(checkpoint_dir=tmp_path, max_steps=7)
    assert {**before, **run(resume=tmp_path)} == whole


def test_an_incomplete_state_raises_an_error_with_the_remedy(tmp_path, monkeypatch):
    save_every_state(monkeypatch)

    class Lossy(Quick):
        def load_state_dict(self, state):
            self.at = state["at"] + 2

    with pytest.raises(WorkerFailed) as failure:
        interrupted(tmp_path, Lossy, (SYNC, THREAD))
    assert "only __iter__" in str(failure.value.__cause__)


def test_a_state_that_cannot_be_saved_is_dropped_with_a_warning(tmp_path, caplog):
    class Odd(Quick):
        def state_dict(self):
            return {"at": self.at, "odd": object}

    _, _, state = interrupted(tmp_path, Odd, (SYNC, THREAD))
    assert (state.params["w"] > 0).all()
    assert "the state of the stream" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"), [("item", -1), ("generator", torch.zeros(3, dtype=torch.uint8))]
)
def test_an_invalid_state_is_refused_with_its_name(tmp_path, monkeypatch, name, value):
    save_every_state(monkeypatch)
    interrupted(tmp_path, Quick, (SYNC, THREAD))
    data = load_newest(tmp_path).data
    check_content(data)
    saved = {**encode(data.stream), name: value}
    with pytest.raises(ValueError, match=f"stream.*{name}"):
        check_content(replace(data, stream=decode(SavedStream, saved, "stream")))


def test_a_stream_does_not_resume_a_map_style_run_nor_vice_versa(tmp_path):
    b = builder(dataset=Sized(20), ranks=1).checkpoint_dir(tmp_path).max_steps(3)
    b.run().join(WAIT_S)
    with pytest.raises(CheckpointError, match="written with a stream: True, this run has False"):
        builder(dataset=20, ranks=1).resume(tmp_path).run()


# Unsupported settings.


class Once:
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda b: b.sampler(range(N)), "leave sampler"),
        (lambda b: b.loader_workers(2), "leave loader_workers out"),
        (lambda b: b.resident(True), "resident"),
        (lambda b: b.dataset(Stream(0)), "is empty"),
    ],
)
def test_settings_that_streams_do_not_support_are_refused(change, remedy):
    b = builder().dataset(Sized())
    with pytest.raises(ValueError, match=remedy):
        change(b).run()


def test_settings_are_refused_before_a_stream_is_read_to_count_it():
    stream = Stream()
    without_size = Trainer.builder(counter, plain_sgd, count_up).dataset(stream).num_epochs(1)
    with pytest.raises(ValueError, match=r"batch_size is not set: call \.batch_size\(n\)"):
        without_size.run()
    with pytest.raises(ValueError, match="partition_ratios fixes them: leave one of them out"):
        builder(dataset=stream).balance(True).partition_ratios([1, 2]).run()
    assert not stream.read


def test_an_iterator_is_refused():
    with pytest.raises(TypeError, match="restarts"):
        builder(dataset=(torch.tensor(i) for i in range(9))).run()


def test_any_object_that_can_be_iterated_again_is_a_stream():
    trace, _ = trained(Once(), ranks=1)
    assert [batch for _, _, batch in trace.batches] == [(0, 1, 2)]


def test_length_is_only_for_streams():
    with pytest.raises(ValueError, match="read by index: leave length out"):
        builder().dataset(numbers(3), length=2)
    with pytest.raises(ValueError, match="length"):
        builder().dataset(Stream(), length=0)


def test_an_endless_stream_needs_a_length(monkeypatch):
    monkeypatch.setattr(runtime.data.stream, "COUNT_LIMIT_S", 0.01)
    with pytest.raises(ValueError, match=r"items were counted in 0\.01 s .* length=n"):
        builder(dataset=Stream(10**12)).run()


@local_ways
def test_a_stream_that_ends_early_ends_the_run_with_an_error(way):
    with pytest.raises(WorkerFailed) as failure:
        trained(Sized(10), length=11, ranks=2, way=way)
    assert "ended after 10 items in epoch 0" in str(failure.value.__cause__)
    assert "length=n" in str(failure.value.__cause__)


def test_the_streams_error_is_raised_by_every_later_read():
    class Broken(Sized):
        def item(self, i):
            raise OSError("the disk is gone")

    adapter = StreamAdapter(Broken(), 8, batch_size=2, collate_fn=None, seed=0)
    with reading():
        for _ in range(2):
            with pytest.raises(OSError, match="disk"):
                adapter.load(torch.arange(2))


def test_a_stream_longer_than_its_length_is_logged_once(caplog):
    class Short(Sized):
        def __len__(self):
            return self.n - 1

    _, state = trained(Short(), epochs=3)
    assert [m.num_samples for m in state.metrics] == [N - 1] * 3
    assert [r for r in caplog.messages if "has more items" in r] == [
        f"Short has more items than its length, {N - 1}: the rest is ignored"
    ]


class Epochs(Sized):
    """Shifts its items by the epoch."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def item(self, i):
        return torch.tensor(i + 100 * self.epoch)


def test_set_epoch_is_called_on_a_stream_before_each_epoch():
    trace = Trace()
    builder(train=trace, dataset=Epochs(8), epochs=2, ranks=1, way=(SYNC, THREAD)).run().join(
        WAIT_S
    )
    read = [i for batch in trace.batches for i in batch[2]]
    assert read == [*range(8), *range(100, 108)]
