"""Epochs close once and in order, and no remainder is lost or keeps one open."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch

from coordinator import messages as m
from coordinator.messages import PublishEpoch
from runtime import current_worker
from runtime.collective import Collective
from tests.deadlock.faults import BOUND_S
from tests.deadlock.tap import Sent
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    WAYS,
    Trace,
    builder,
    count_up,
    local_ways,
    over,
)


def each_sample_once(trace, num_samples, num_epochs):
    for epoch in range(num_epochs):
        counts = Counter(i for _, indices in trace.of_epoch(epoch) for i in indices)
        assert counts == Counter(range(num_samples)), f"epoch {epoch}"


# -- remainders -------------------------------------------------------------------------


def test_dropping_the_only_batch_is_rejected_before_any_thread_starts():
    """S3: with ``drop_last`` nothing would be left."""
    before = threading.active_count()
    with pytest.raises(ValueError, match="drop_last"):
        builder(dataset=3, batch_size=10).drop_last(True).run()
    assert threading.active_count() == before


# -- epochs in order -----------------------------------------------------------------------


@pytest.mark.parametrize("policy", [CADENCE, ASYNC], ids=lambda p: p.name)
def test_epochs_close_in_order_while_a_fast_rank_has_trained_the_last(policy, faults, tap):
    """D26, D24: rank 0 ends epoch 1, the last, while rank 1 is in the first batch of epoch 0."""
    held, trace = threading.Event(), Trace()
    planted = faults(trace).hold(rank=1, step=0, until=held)
    b = planted.builder(dataset=12, batch_size=1, epochs=2, way=(policy, OVER_CPU))
    handle = b.anchor(100).max_overshoot(100).run()
    # Two plans of a batch were dealt to rank 1 before its speed was known.
    planted.wait_for(lambda: planted.steps[0] == 2 * 12 - 2)
    tap.wait_for(lambda: any(r.epoch == 1 for r in tap.came(m.EpochReport, 0)))
    assert (tap.closed, tap.sent(m.Shutdown)) == ([], [])
    held.set()
    state = handle.join(BOUND_S)
    assert [e.epoch for e in state.metrics] == tap.closed == [0, 1]
    each_sample_once(trace, 12, 2)
    last = tap.where(lambda e: isinstance(e, PublishEpoch))[-1]
    assert last < tap.where(lambda e: isinstance(e, Sent) and isinstance(e.message, m.Shutdown))[0]


@local_ways
def test_a_closed_epoch_is_never_assigned_again(way, tap):
    """D24: neither by the leading rank nor for the last of the others."""
    state = builder(dataset=22, batch_size=2, epochs=5, ranks=3, way=way).run().join(BOUND_S)
    assert [e.num_samples for e in state.metrics] == [22] * 5
    closed = -1
    for entry in tap.log:
        if isinstance(entry, PublishEpoch):
            closed = entry.metrics.epoch
        elif isinstance(entry, Sent) and isinstance(entry.message, m.StartEpoch):
            assert entry.message.plan.epoch > closed
    assert closed == 4


@local_ways
def test_epoch_fn_is_called_once_for_each_rank_and_epoch(way, tap):
    """D33: for any number of chunks in an epoch, and also for a rank without a batch."""
    calls = []
    b = builder(dataset=60, batch_size=2, epochs=3, ranks=3, way=way).anchor(2)
    b.epoch_fn(lambda epoch, worker: calls.append((worker.rank, epoch))).run().join(BOUND_S)
    chunks = Counter((e.rank, e.message.plan.epoch) for e in tap.log if is_plan(e))
    assert Counter(calls) == Counter({(r, e): 1 for r in range(3) for e in range(3)})
    if way[0] is not SYNC:
        assert max(chunks.values()) > 1


def is_plan(entry):
    return isinstance(entry, Sent) and isinstance(entry.message, m.StartEpoch)


# -- shares -----------------------------------------------------------------------------------


@over([way for way in WAYS if way[0] is not SYNC])
def test_partition_ratios_hold_while_chunks_are_dealt_on_demand(way, faults, tap):
    """S16: the rank with three quarters is slow, so that measured shares are the opposite."""
    planted = faults().slow(rank=0, seconds=0.002)
    b = planted.builder(dataset=40, batch_size=1, epochs=2, way=way).anchor(4)
    b.partition_ratios([3, 1]).run().join(BOUND_S)
    assert (planted.steps[0], planted.steps[1]) == (60, 20)
    plans = [msg for msg in tap.sent(m.StartEpoch, 0) if msg.plan.num_batches]
    assert len(plans) > 2


# -- SYNC -----------------------------------------------------------------------------------


class _Means:
    """Counts the gradient averagings of each rank."""

    def __init__(self, monkeypatch):
        self.calls = Counter()
        self._lock = threading.Lock()
        mean = Collective.weighted_mean_

        def counted(collective, tensors, weight):
            with self._lock:
                self.calls[collective.rank] += 1
            return mean(collective, tensors, weight)

        monkeypatch.setattr(Collective, "weighted_mean_", counted)


@pytest.mark.parametrize(
    ("num_samples", "ranks", "accumulate"), [(40, 2, 1), (103, 3, 1), (7, 3, 2)]
)
@over([w for w in WAYS if w[0] is SYNC])
def test_gradients_are_averaged_once_in_every_global_step(
    way, num_samples, ranks, accumulate, monkeypatch
):
    """S13: exactly one average in each step, with any remainders."""
    means = _Means(monkeypatch)
    b = builder(dataset=num_samples, batch_size=1, epochs=2, ranks=ranks, way=way)
    state = b.accumulate(accumulate).run().join(BOUND_S)
    per_rank = -(-num_samples // ranks)
    steps = -(-per_rank // accumulate)
    assert means.calls == dict.fromkeys(range(ranks), 2 * steps)
    assert [e.num_averagings for e in state.metrics] == [steps, steps]


@over([w for w in WAYS if w[0] is SYNC])
def test_no_rank_steps_ahead_while_gradients_are_reduced(way, faults, monkeypatch):
    """D18: rank 0 waits in the reduction of a step that rank 1 has not made."""
    held, trace, means = threading.Event(), Trace(), _Means(monkeypatch)
    planted = faults(trace).stall_at(rank=1, step=3, until=held)
    handle = planted.builder(dataset=40, batch_size=1, way=way).run()
    planted.await_all()
    planted.wait_for(lambda: planted.steps[0] == 4)
    assert means.calls[1] == 3
    held.set()
    handle.join(BOUND_S)
    assert (planted.steps[0], planted.steps[1]) == (20, 20)
    seen = Counter()
    for _, rank, _ in trace.batches:
        seen[rank] += 1
        assert abs(seen[0] - seen[1]) <= 1  # the two of one step, in either order


@over([w for w in WAYS if w[0] is SYNC])
def test_fewer_samples_than_replicas_leave_replicas_identical(way, tap):
    """S27: two samples for three ranks; the third has weight 0 and steps as the others."""
    builder(dataset=2, batch_size=1, epochs=3, ranks=3, way=way).run().join(BOUND_S)
    finals = [f.payload.params[0] for f in tap.came(m.FinalSnapshot)]
    assert len(finals) == 3
    assert finals[0][0] == 3.0
    assert all(torch.equal(finals[0], other) for other in finals[1:])


# -- the schedule -------------------------------------------------------------------------------


@over([(SYNC, THREAD), (CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, THREAD)])
def test_the_schedule_keeps_the_scale_of_the_world_size(way):
    """D34: three ranks at a ratio of 0.35 train at 1.7 times what the schedule gives."""
    rates, lock = [], threading.Lock()

    def train(model, batch):
        with lock:
            rates.append(current_worker().current_lr)
        return count_up(model, batch)

    b = builder(train=train, dataset=30, batch_size=1, ranks=3, way=way).anchor(2)
    b.scheduler(lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s)))
    b.lr_scale_ratio(0.35).run().join(BOUND_S)
    positions = [1.7 / rate - 1 for rate in rates]
    assert positions == pytest.approx([round(p) for p in positions])
    assert len({round(p) for p in positions}) > 5
    if way[0] is SYNC:
        assert Counter(map(round, positions)) == Counter({3 * s: 3 for s in range(10)})
