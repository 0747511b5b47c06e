"""A changed limit is sent to its rank at once."""

from __future__ import annotations

from coordinator import messages as m
from tests.unit.coordinator.test_machine import EMPTY, Run


def test_a_reply_with_a_report_releases_a_rank_while_the_round_waits_for_others():
    run = Run(anchor=10, max_batch_diff=2)
    run.end_plan(0), run.end_plan(0), run.end_plan(0)
    run.machine.rounds.start(run.now)
    stats = m.ReportStats(num_batches=1, num_samples=1, compute_s=0.01)
    report = m.BatchReport(rank=1, epoch=0, stats=stats)
    sent = run.handle(
        m.ParamSnapshot(rank=1, round=1, payload=EMPTY, num_samples=1, num_batches=1, report=report)
    )
    assert (0, m.Resume(budget=m.BatchBudget(limit=4, report_after=1))) in sent
    assert run.jobs() == []
