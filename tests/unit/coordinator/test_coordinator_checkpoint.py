"""The coordinator's state in a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from coordinator import messages as m
from coordinator.codec import decode, encode
from coordinator.config import ApplyPolicy, AverageBackend, CoordinatorConfig
from coordinator.coordinator_checkpoint import RankCut, capture_run, restore_run
from coordinator.messages import SaveCheckpoint
from coordinator.metrics import ReportStats
from coordinator.run_state import RunState
from coordinator.saved_run import SavedRun, check_run
from tests.unit.coordinator.test_machine import EMPTY, Run


def test_training_of_a_dead_rank_after_its_cut_is_not_in_the_checkpoint():
    """It dies before the cuts of the other ranks: its loss is after the checkpoint."""
    run = Run(world=3, backend=AverageBackend.THREAD, anchor=50, continue_on_failure=True)
    for rank in range(3):
        run.end_plan(rank), run.end_plan(rank)
    run.handle(m.SaveRequested(ticket=0))
    for rank in (1, 2, 0):
        average = EMPTY if rank == 0 else None
        run.handle(m.SyncAck(rank=rank, round=1, extra={"rank": rank}, average=average))
        if rank == 1:
            run.report(1)
            run.handle(m.Failed(rank=1, epoch=0, step=2, error=ValueError("planted")))
    (saved,) = (c for c in run.others if isinstance(c, SaveCheckpoint))
    (epoch, *_) = saved.run.epochs
    assert (epoch.num_samples, epoch.num_retrained) == (6, 0)
    assert [sums.num_samples for sums in epoch.sums] == [2, 2, 2]
    assert run.machine.run_state.ledger.oldest.num_retrained == 1


@pytest.mark.timeout(20)  # each batch as an integer takes minutes
def test_the_state_of_an_epoch_of_many_batches_is_made_checked_and_restored_in_ranges():
    num = 10**9
    run = Run(world=2, policy=ApplyPolicy.SYNC, backend=AverageBackend.THREAD, num_samples=num)
    for rank in (0, 1, 0, 1):
        run.end_plan(rank)
    found = run.machine.run_state
    cuts = {rank: RankCut.of(found, found.ledger.epochs, rank) for rank in (0, 1)}
    state = capture_run(found, (), 0.0, cuts)
    (epoch,) = state.epochs
    assert (epoch.consumed, epoch.num_samples) == ((range(4),), 4)
    check_run(state, num_samples=num, batch_size=1, drop_last=False, num_rank_states=2)
    again = RunState(found.config)
    restore_run(again, state)
    assert again.ledger.oldest.open.spans == (range(4, num),)
    assert again.ledger.oldest.num_settled == 4


CONFIG = CoordinatorConfig(
    devices=("cpu", "cpu"),
    num_samples=80,
    batch_size=4,
    num_epochs=2,
    policy=ApplyPolicy.SYNC,
)


def resumed(state, world):
    run = RunState(replace(CONFIG, devices=("cpu",) * world))
    if state is not None:
        restore_run(run, state)
    return run, capture_run(run, (), 0.0, {})


def test_the_global_batch_of_the_first_run_survives_every_resume():
    _, state = resumed(None, 4)
    for world, num_slices in ((2, 2), (3, 2), (8, 1), (1, 4)):
        run, state = resumed(state, world)
        assert (run.per_global, run.num_slices(range(world))) == (4, num_slices)


def test_waits_for_data_are_in_the_checkpoint():
    run, _ = resumed(None, 2)
    for wait_s in (0.0, 3.0, 3.0):
        run.data_waits.add(1, ReportStats(num_batches=1, num_samples=4, data_wait_s=wait_s))
    state = capture_run(run, (), 0.0, {})
    assert resumed(state, 2)[1].data_waits == ((), (0.0, 0.75, 0.75))
    assert resumed(state, 4)[1].data_waits == ((), (), (), ())


def test_a_restored_run_has_the_whole_state_of_the_first():
    config = replace(CONFIG, policy=ApplyPolicy.CADENCE, divergence_threshold=0.05)
    first, second = RunState(config), RunState(config)
    first.guard.report([0.2])
    first.elche.observe(1, 3.0, 2)
    first.data_waits.add(0, ReportStats(num_batches=1, num_samples=4, data_wait_s=1.0))
    first.ranks[1].note(ReportStats(num_batches=3, num_samples=12, compute_s=0.5))
    first.ledger.open_epoch(first.elche.shares)
    first.ledger.oldest.stats.add(1, ReportStats(num_batches=3, num_samples=12, loss_sum=0.1))
    first.global_step += 3
    first.count_averagings(2, first.ledger.oldest)
    first.num_failed_rounds += 1
    state = capture_run(first, (), 1.5, {})
    restore_run(second, state)
    assert capture_run(second, (), 1.5, {}) == state
    assert decode(SavedRun, json.loads(json.dumps(encode(state))), "run") == state
