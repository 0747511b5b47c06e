"""The steps of checkpoints within an epoch, and the time that ranks have for their last states."""

from __future__ import annotations

import pytest

from coordinator.config import ApplyPolicy, AverageBackend, CoordinatorConfig
from tests.simulation.harness import Simulation
from tests.simulation.saves import Origin
from tests.simulation.schedule import Death, Pace, Schedule

NUM_BATCHES = 24
BATCH_S = 0.1
WAYS = {
    "sync": (ApplyPolicy.SYNC, AverageBackend.THREAD),
    "cadence": (ApplyPolicy.CADENCE, AverageBackend.CPU),
    "cadence over a collective": (ApplyPolicy.CADENCE, AverageBackend.THREAD),
    "async": (ApplyPolicy.ASYNC, AverageBackend.CPU),
}


def schedule_of(way, *, ranks, slows_to=BATCH_S, deaths=(), **settings):
    """Ranks that report each batch; the last one slows down within its tenth."""
    policy, backend = WAYS[way]
    config = CoordinatorConfig(
        devices=("cpu",) * ranks,
        num_samples=NUM_BATCHES * 10 * ranks,
        batch_size=10,
        num_epochs=1,
        policy=policy,
        backend=backend,
        divergence_threshold=None,
        save_every=1,
        **settings,
    )
    even = (Pace(start_s=0.0, batch_s=BATCH_S),)
    last = (*even, Pace(start_s=9.5 * BATCH_S, batch_s=slows_to))
    return Schedule(
        config=config,
        paces=(even,) * (ranks - 1) + (last,),
        report_interval_s=0.0,
        deaths=deaths,
    )


@pytest.mark.parametrize("every", [1, 4, 5])
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_is_requested_once_that_many_batches_are_trained_since_the_last(way, every):
    """Under ``SYNC`` a plan ends there; else the request arrives during the next batch."""
    schedule = schedule_of(way, ranks=1, save_every_steps=every)
    saved = [c.run.global_step for c in Simulation(schedule).run().saved if c.within]
    assert saved == list(range(every + (way != "sync"), NUM_BATCHES, every))


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_counts_batches_from_its_beginning(way):
    schedule = schedule_of(way, ranks=1, save_every_steps=5)
    origin = Origin(Simulation(schedule).run().saved[1])
    assert origin.run.global_step == (10 if way == "sync" else 11)
    saved = [c.run.global_step for c in Simulation(schedule, origin=origin).run().saved if c.within]
    assert saved == ([15, 20] if way == "sync" else [17, 22])


DEATH = Death(rank=0, at_s=10.2 * BATCH_S, vanishes=False)


def failed(way, **settings):
    """The run in which rank 0 fails while rank 1 makes a step that takes longer than usual."""
    run = Simulation(schedule_of(way, ranks=2, deaths=(DEATH,), grace_s=0.05, **settings)).run()
    assert run.machine.outcome.failure.rank == 0
    return run.machine.outcome.missing, [c.run.global_step for c in run.saved if c.final]


@pytest.mark.parametrize("way", WAYS)
def test_after_a_failure_a_rank_has_three_of_its_steps_for_its_last_state(way):
    num_batches = 20 if way == "sync" else 11
    assert failed(way, slows_to=2.8 * BATCH_S) == ((), [num_batches])
    assert failed(way, slows_to=4.5 * BATCH_S) == ((1,), [])


@pytest.mark.parametrize("way", ["sync", "cadence"])
def test_a_step_of_several_batches_counts_as_one(way):
    missing, saved = failed(way, slows_to=2.8 * BATCH_S, accumulate=2)
    assert (missing, len(saved)) == ((), 1)
