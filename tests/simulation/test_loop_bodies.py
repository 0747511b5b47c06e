"""Random bodies of a user's own loop, on real threads: no hang, and no sample twice."""

from __future__ import annotations

import random

import pytest
import torch

from runtime import GpuWorkerError, ReplicaMismatch, current_worker
from tests.support.looping import NUM_SAMPLES, loop_builder
from tests.support.pairs import SCALE

NUM_BODIES = 12 if SCALE == 1 else 200
TIMEOUT_S = 20.0
"""Bound of every wait: reached only by a test that fails."""
LATE = ("no progress", "in time", "no step within")
"""Texts of the errors of a rank that waited in vain."""
WAYS = (
    "skip",
    "break",
    "return",
    "late",
    "two",
    "accumulate",
    "plain",
    "raise",
    "evaluate",
    "fail",
)
"""Actions of a body instead of one step for each batch."""


def evaluate(worker, fails=None):
    """Evaluate five samples, in three batches; ``fails``: a rank that raises."""

    def size(model, batch):
        if fails == current_worker().rank:
            raise ValueError("planted")
        return {"size": len(batch[0])}

    assert worker.evaluate((torch.arange(5),), size) == {"size": pytest.approx(1.8)}


def make_loop(ways, seed, policy, *, alike, calls):
    """A loop whose bodies act differently on some batches; ``alike``: the same on all ranks."""

    def loop(worker):
        calls.append(worker.rank)
        for batch in worker.batches():
            who = "" if alike else worker.rank
            number = random.Random(f"{seed} {who} {worker.epoch} {worker.global_step}").random()
            way = WAYS[int(number * 2 * len(WAYS))] if number < 0.5 else "step"
            loss = worker.model.loss(worker.epoch, batch)
            if way == "step" or way not in ways:
                worker.step(loss)
            elif way == "two":
                worker.step(loss)
                worker.step(worker.model.loss(worker.epoch, batch))
            elif way == "evaluate":
                if policy == "sync":  # also between the forward and the backward pass
                    evaluate(worker)
                worker.step(loss)
                evaluate(worker)
            elif way == "fail":
                worker.step(loss)
                evaluate(worker, fails=worker.rank)
            elif way == "accumulate":
                worker.backward(loss)
            elif way == "plain":
                loss.backward()
            elif way == "raise":
                raise ValueError("planted")
            elif way in ("break", "late"):
                if way == "late":
                    worker.step(loss)
                break
            elif way == "return":
                return

    return loop


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@pytest.mark.timeout(600)
def test_no_body_hangs_and_no_sample_counts_twice(policy):
    ends, late, unexpected = set(), [], []
    for seed in range(NUM_BODIES):
        draws = random.Random(seed)
        ways = {way for way in WAYS if draws.random() < 0.3}
        calls = []
        loop = make_loop(ways, seed, policy, alike=draws.random() < 0.5, calls=calls)
        builder = loop_builder(loop, ranks=draws.choice((1, 2, 2, 3)), policy=policy)
        builder.collective_timeout(TIMEOUT_S).stall_timeout(TIMEOUT_S).progress(False)
        if draws.random() < 0.4:
            builder.on_worker_failure("continue")
        try:
            state = builder.run().join(2 * TIMEOUT_S)
        except (GpuWorkerError, ReplicaMismatch) as error:
            ends.add(type(error).__name__)
            if not isinstance(error.__cause__, RuntimeError | ValueError | None):
                unexpected.append((seed, error))
            late += [(seed, str(error)) for text in LATE if text in str(error)]
            continue
        ends.add("finished")
        for metrics in state.metrics:
            assert metrics.num_samples <= NUM_SAMPLES, seed
            if not ways & {"break", "return", "late"}:
                assert metrics.num_samples == NUM_SAMPLES, seed
    assert not late
    assert not unexpected
    assert ends >= {"finished", "WorkerFailed"}
    assert ("ReplicaMismatch" in ends) == (policy == "sync")
