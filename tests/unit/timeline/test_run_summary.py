"""RunSummary: throughput, shares of lost time that sum to 1, and estimated gains."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace

import pytest
import torch

from coordinator import CoordinatorConfig
from coordinator.machine import Coordinator
from runtime import RunSummary, Timeline, WorkerFailed, current_worker
from runtime.timeline.events import Cause
from runtime.timeline.run_summary import (
    DEAD_RANKS,
    EXCHANGE,
    LOADING,
    OVERHEAD,
    PEERS,
    Alternatives,
    summarize,
)
from runtime.timeline.summary import RunFacts
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    builder,
    count_up,
)

WAYS = [(SYNC, THREAD), (CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, OVER_CPU)]
EVERY = Alternatives(balance=True, cadence=True, anchor=10)


def statistics(ranks=2):
    config = CoordinatorConfig(devices=("cpu",) * ranks, num_samples=8, batch_size=2, num_epochs=1)
    return Coordinator(config).statistics()


def summary_of(
    *ranks, policy="SYNC", alternatives=EVERY, steps=100, state="finished", alive=None, before=None
):
    """The summary of ranks, each given by its samples, its compute time and its causes."""
    first = statistics(len(ranks)) if before is None else before
    counters = [
        replace(
            rank,
            num_samples=rank.num_samples + samples,
            num_batches=rank.num_batches + steps,
            compute_s=rank.compute_s + compute_s,
            alive=alive is None or alive[rank.rank],
        )
        for rank, (samples, compute_s, _) in zip(first.ranks, ranks, strict=True)
    ]
    now = replace(first, num_averagings=first.num_averagings + steps, ranks=tuple(counters))
    facts = RunFacts(
        devices=("cpu",) * len(ranks),
        policy=policy,
        backend="THREAD",
        num_epochs=1,
        global_batch=64,
        batch_text="global batch 64 = 2 x 32",
        steps_per_epoch=10,
    )
    return summarize(
        facts,
        state=state,
        before=first,
        now=now,
        seconds=[[causes.get(cause, 0.0) for cause in Cause] for *_, causes in ranks],
        num_epochs=1,
        alternatives=alternatives,
    )


def whole(found):
    return found.share + sum(found.lost.values())


def test_each_second_of_training_is_training_or_lost_to_one_cause():
    causes = {Cause.STARTUP: 5, Cause.COMPUTE: 6.5, Cause.DATA: 1.5, Cause.SYNC: 1.0}
    causes |= {Cause.AVERAGING: 0.5, Cause.CONTROL: 0.5, Cause.ENDING: 1, Cause.GONE: 3}
    found = summary_of((600, 6.0, causes), (600, 6.0, causes))
    assert found.train_s == 10.0
    assert found.startup_s == 5
    assert found.samples_per_s == 120
    assert found.own_samples_per_s == 200
    assert found.share == pytest.approx(0.6)
    # The half second of the step outside its timer is part of the exchange.
    assert found.lost == pytest.approx({LOADING: 0.15, PEERS: 0.1, EXCHANGE: 0.1, OVERHEAD: 0.05})
    assert found.headline == (
        "120 samples/s, 60 % of what these devices can do alone; lost: 15 % waiting for data, "
        "10 % waiting for each other, 10 % averaging, 5 % overhead"
    )


def test_lost_time_is_weighted_by_the_own_rates_of_the_ranks():
    fast = (900, 3.0, {Cause.COMPUTE: 3.0, Cause.SYNC: 7.0})
    slow = (900, 9.0, {Cause.COMPUTE: 9.0, Cause.SYNC: 1.0})
    found = summary_of(fast, slow)
    assert found.own_samples_per_s == pytest.approx(400)
    assert found.share == pytest.approx(0.45)
    assert found.lost == pytest.approx({PEERS: (300 * 0.7 + 100 * 0.1) / 400})
    assert [r.lost[PEERS] for r in found.ranks] == pytest.approx([0.7, 0.1])


def test_waits_of_the_host_are_not_lost_while_the_device_computes():
    causes = {Cause.COMPUTE: 2.0, Cause.DATA: 6.0, Cause.CONTROL: 2.0}
    found = summary_of((100, 9.0, causes), (100, 9.0, causes))
    assert found.share == pytest.approx(0.9)
    assert found.lost == pytest.approx({LOADING: 0.075, OVERHEAD: 0.025})


def test_evaluation_on_one_rank_is_no_training_time_of_any_rank_in_lockstep():
    lead = {Cause.COMPUTE: 5.0, Cause.CALLBACKS: 4.0}
    peer = {Cause.COMPUTE: 5.0, Cause.IDLE: 4.5}
    found = summary_of((100, 5.0, lead), (100, 5.0, peer))
    assert found.callbacks_s == 4.0
    assert found.train_s == 5.5
    assert whole(found) == pytest.approx(1.0)
    assert found.lost[PEERS] == pytest.approx(0.5 / 5.5 / 2)


def test_a_dead_rank_is_a_loss():
    lived = {Cause.COMPUTE: 10.0}
    died = {Cause.COMPUTE: 4.0, Cause.GONE: 6.0}
    found = summary_of((100, 10.0, lived), (40, 4.0, died), alive=(True, False))
    assert found.share == pytest.approx(0.7)
    assert found.lost == pytest.approx({DEAD_RANKS: 0.3})


def test_a_single_rank_waits_for_nobody():
    found = summary_of((100, 8.0, {Cause.COMPUTE: 8.5, Cause.IDLE: 1.5}))
    assert found.lost == pytest.approx({OVERHEAD: 0.2})
    assert "of what this device can do alone" in found.headline


def test_counts_before_a_resume_are_left_out():
    first = statistics()
    resumed = replace(
        first,
        num_averagings=70,
        ranks=tuple(replace(r, num_samples=5000, compute_s=99.0) for r in first.ranks),
    )
    rank = (100, 10.0, {Cause.COMPUTE: 10.0})
    found = summary_of(rank, rank, before=resumed)
    assert found.num_samples == 200
    assert found.num_rounds == 100
    assert found.share == pytest.approx(1.0)


def test_percentages_of_a_headline_sum_to_100():
    causes = {Cause.COMPUTE: 1, Cause.DATA: 1, Cause.SYNC: 1, Cause.AVERAGING: 4, Cause.CONTROL: 0}
    found = summary_of((10, 1.0, causes), (10, 1.0, causes))
    assert sum(map(int, re.findall(r"(\d+) %", found.headline))) == 100


def test_no_gain_is_estimated_before_the_first_report():
    found = summary_of((0, 0.0, {Cause.STARTUP: 1.0}), (0, 0.0, {}), state="running")
    assert found.samples_per_s is found.own_samples_per_s is found.share is None
    assert found.headline == ""
    assert "nothing was trained" in str(found)


def test_without_compute_times_only_the_rate_is_given():
    causes = {Cause.COMPUTE: 2.0}
    found = summary_of((100, 0.0, causes), (100, 0.0, causes))
    assert found.headline == "100 samples/s"
    assert found.share is None
    assert "unknown" in str(found)


# -- gains --------------------------------------------------------------------------------------


WAITING = (100, 8.0, {Cause.COMPUTE: 8.0, Cause.SYNC: 1.5, Cause.AVERAGING: 0.5})


def test_lockstep_that_costs_more_than_a_tenth_names_cadence_with_its_gain():
    found = summary_of(WAITING, WAITING)
    # The waits end, and nine exchanges of ten.
    assert found.gains == pytest.approx({'policy("cadence")': (0.15 + 0.05 * 0.9) / 0.8})
    assert found.advice == 'policy("cadence") would gain about 24 % here; see docs/policies.md'


def test_a_rank_that_waits_for_its_data_names_balance_with_its_gain():
    slow = (100, 4.5, {Cause.COMPUTE: 4.5, Cause.DATA: 4.7, Cause.SYNC: 0.8})
    fast = (100, 4.5, {Cause.COMPUTE: 4.5, Cause.DATA: 0.2, Cause.SYNC: 5.3})
    found = summary_of(slow, fast)
    # The wait that both have stays: balanced, 200 samples take 6 s instead of 9.
    assert found.gains["balance(True)"] == pytest.approx(10 / 7 - 1)
    alike = (100, 4.5, {Cause.COMPUTE: 4.5, Cause.DATA: 4.7, Cause.SYNC: 0.8})
    assert "balance(True)" not in summary_of(slow, alike).gains


def test_unequal_ranks_name_balance_with_its_gain():
    slow = (100, 9.0, {Cause.COMPUTE: 9.0, Cause.SYNC: 1.0})
    fast = (100, 4.5, {Cause.COMPUTE: 4.5, Cause.SYNC: 5.5})
    found = summary_of(slow, fast)
    # Balanced, both compute 200 samples at 33.3 a second together: 6 s instead of 9.
    assert found.gains["balance(True)"] == pytest.approx(10 / 7 - 1)
    assert list(found.gains) == ["balance(True)", 'policy("cadence")']
    assert re.fullmatch(
        r"balance\(True\) would gain about 43 % here, policy\(.cadence.\) about \d+ %; see .*",
        found.advice,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"alternatives": Alternatives()},
        {"policy": "CADENCE"},
        {"steps": 10},
        {"alive": (True, False)},
    ],
    ids=["excluded by settings", "another policy", "a short run", "one live rank"],
)
def test_no_gain_is_named(change):
    assert summary_of(WAITING, WAITING, **change).gains == {}


def test_cheap_lockstep_names_nothing():
    rank = (100, 9.2, {Cause.COMPUTE: 9.2, Cause.SYNC: 0.5, Cause.AVERAGING: 0.3})
    assert summary_of(rank, rank).advice == ""


# -- tables -------------------------------------------------------------------------------------


def test_the_table_fits_80_columns():
    slow = (10**9, 9.0, {Cause.COMPUTE: 9.0, Cause.SYNC: 1.0, Cause.DATA: 0.4})
    found = summary_of(slow, (10**9, 4.5, {Cause.COMPUTE: 4.5, Cause.SYNC: 5.5}))
    found = replace(found, facts=replace(found.facts, devices=("cpu", "cpu"), num_epochs=10**6))
    assert max(map(len, str(found).splitlines())) < 80
    for part in ("balance(True)", "waiting for each other", "global batch 64 = 2 x 32"):
        assert part in str(found)


def test_a_notebook_shows_a_table_of_every_rank():
    page = summary_of(WAITING, WAITING)._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 2
    assert "<td>waiting for each other</td><td>15 %</td>" in page
    assert "policy(&quot;cadence&quot;)" in page
    assert page.count("<td>cpu</td>") == 2


# -- whole runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", [False, True], ids=["alone", "timeline"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[0].name} {way[1].name}")
def test_the_summary_of_a_run_adds_up(way, recorded):
    b = builder(dataset=200, epochs=2, way=way)
    if recorded:
        b.timeline(Timeline())
    handle = b.run()
    handle.join(WAIT_S)
    found = handle.summary()
    assert found is handle.summary()  # final
    assert isinstance(found, RunSummary)
    assert (found.state, found.num_epochs, found.num_samples) == ("finished", 2, 400)
    assert whole(found) == pytest.approx(1.0)
    assert 0 < found.share <= 1
    assert found.num_rounds == handle.statistics().num_averagings
    assert sum(r.share for r in found.ranks) == pytest.approx(1.0)
    assert sum(r.samples_per_s for r in found.ranks) == pytest.approx(found.samples_per_s)
    assert handle._repr_html_() == found._repr_html_()


def test_waits_of_a_fast_rank_for_a_slow_one_are_measured():
    turns = threading.Semaphore(0)

    def train(model, batch):
        if current_worker().rank:
            time.sleep(0.005)
            turns.release()
        return count_up(model, batch)

    handle = builder(dataset=80, train=train, way=(SYNC, THREAD)).run()
    handle.join(WAIT_S)
    fast, slow = handle.summary().ranks
    assert fast.lost[PEERS] > 0.5 > slow.lost.get(PEERS, 0.0)
    assert slow.own_samples_per_s < fast.own_samples_per_s


def test_a_summary_can_be_read_while_the_run_trains_and_names_a_stop():
    trains, goes_on = threading.Event(), threading.Event()

    def train(model, batch):
        trains.set()
        goes_on.wait(WAIT_S)
        return count_up(model, batch)

    handle = builder(dataset=10**6, train=train).run()
    try:
        assert trains.wait(WAIT_S)
        found = handle.summary()
        assert found.state == "running"
        assert "<p>" in handle._repr_html_()
    finally:
        handle.stop()
        goes_on.set()
        handle.join(WAIT_S)
    assert handle.summary().state == "stopped"


def test_the_summary_names_a_failure():
    def train(model, batch):
        raise LookupError("planted")

    handle = builder(train=train).run()
    with pytest.raises(WorkerFailed):
        handle.join(WAIT_S)
    assert handle.summary().state == "failed"
    assert handle.summary().headline == ""


def test_the_learning_rates_factor_is_in_the_summary():
    handle = builder(ranks=2).lr_scale_ratio(0.5).run()
    handle.join(WAIT_S)
    assert handle.summary().lr_factor == 1.5
    assert "learning rate x 1.5" in str(handle.summary())


@pytest.mark.parametrize(
    ("change", "text", "steps"),
    [
        (lambda b: b, "global batch 8 = 2 x 4", 5),
        (lambda b: b.accumulate(2), "global batch 16 = 2 x 4, accumulated 2 times", 3),
        (lambda b: b.batch_size([6, 2]), "global batch 8 = 6 + 2", 5),
        (lambda b: b.balance(True), "global batch 8, cut by measured speed", 5),
        (lambda b: b.policy("cadence"), "batches of 4 on each worker", 5),
        (lambda b: b.policy("async").batch_size([6, 2]), "batches of 6 + 2", 5),
        (lambda b: b.devices(["cpu"]), "global batch 4", 10),
        (lambda b: b.drop_last(True).dataset((torch.arange(43),)), "global batch 8 = 2 x 4", 5),
    ],
)
def test_the_batch_of_a_run_is_named_with_its_division(change, text, steps):
    b = builder(dataset=40, batch_size=4, way=(SYNC, THREAD)).backend("auto")
    facts = change(b).run()
    facts.join(WAIT_S)
    found = facts.summary().facts
    assert (found.batch_text, found.steps_per_epoch) == (text, steps)


def test_failed_rounds_and_callbacks_are_noted():
    found = summary_of((100, 1.0, {}), (100, 1.0, {}))
    assert found._notes() == ["100 global steps", "start-up 0.0 s"]
    found = replace(found, num_failed_rounds=3, callbacks_s=1.26)
    assert found._notes() == [
        "100 global steps",
        "3 failed rounds",
        "start-up 0.0 s",
        "evaluation, callbacks and checkpoints 1.3 s",
    ]
