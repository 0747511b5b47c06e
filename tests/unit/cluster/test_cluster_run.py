"""Machines of a cluster: each sample once, whoever comes, leaves, dies or is cut off."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter

import pytest
import torch

from runtime import (
    CheckpointError,
    ClusterError,
    Monitor,
    Nesterov,
    RunAborted,
    Timeline,
    WorkerFailed,
)
from runtime.checkpoint.store import entries, load_newest
from runtime.cluster import cluster_run
from tests.support.clustering import Effects, Machine, same
from tests.support.memory_engine import MemoryCluster
from tests.support.running import ASYNC, CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, builder

WAYS = [(SYNC, THREAD), (CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, OVER_CPU)]


def train(*, configure, **kwargs):
    """A run of one machine alone, to its end."""
    return configure(builder(ranks=2, **kwargs)).run().join(WAIT_S)


def wait_until(ready):
    """Look until it is so."""
    deadline = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def once(machine, n=203):
    """Whether each sample has had its effect in exactly one round."""
    return machine.outer.rounds_of_each_sample().tolist() == [1] * n


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_two_machines_train_each_sample_once_and_end_with_the_same_bits(way, ranks):
    cluster = MemoryCluster(min_machines=2)
    a, b = (Machine(cluster, name, way=way, ranks=ranks) for name in "ab")
    states = a.join(), b.join()
    assert same(*states)
    assert once(a)
    assert once(b)
    assert a.trained + b.trained == dict.fromkeys(range(203), 1)
    assert a.trained
    assert b.trained


def test_metrics_of_both_machines_stand_on_each_handle():
    cluster = MemoryCluster(min_machines=2)
    a, b = (Machine(cluster, name, epochs=4) for name in "ab")
    for machine in (a, b):
        metrics = list(machine.handle.metrics())
        assert [each.epoch for each in metrics] == [0, 1, 2, 3]
        for each in metrics:
            assert each.num_samples == 203
            assert sum(m.num_samples for m in each.machines) == 203
            assert {m.machine for m in each.machines} <= {"a", "b"}
    first, second = a.join().metrics, b.join().metrics
    assert [each.avg_loss for each in first] == [each.avg_loss for each in second]


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_a_machine_that_comes_late_goes_on_where_the_first_is(way):
    cluster = MemoryCluster()
    closed, on = threading.Event(), threading.Event()

    def wait_for_the_late_one():
        if closed.is_set():
            assert on.wait(WAIT_S)

    a = Machine(cluster, "a", epochs=6, way=way, before_step=wait_for_the_late_one)
    assert a.handle.next_metrics(WAIT_S).epoch == 0
    closed.set()
    b = Machine(cluster, "b", epochs=6, way=way)
    on.set()
    assert [m.epoch for m in b.handle.metrics()] == list(range(6))
    assert same(a.join(), b.join())
    assert a.trained + b.trained == dict.fromkeys(range(203), 6)
    assert b.trained


@pytest.mark.parametrize("point", ["quorum", "gather", "all_reduce", "commit"])
@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_when_a_machine_dies_at_any_point_the_other_trains_what_it_had(point, way):
    cluster = MemoryCluster()
    cluster.faults.die_at("b", 2, point)
    a, b = (Machine(cluster, name, way=way, n=403) for name in "ab")
    assert once(a, 403) if a.join() else None
    assert cluster.faults.pending == ()
    with pytest.raises(BaseException, match="b"):
        b.join()
    assert set(a.trained + b.trained) == set(range(403))


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, OVER_CPU)])
def test_a_machine_that_does_not_commit_goes_on_from_the_state_of_the_one_that_did(way):
    cluster = MemoryCluster(min_machines=2)
    cluster.faults.deny_at("b", 2)
    a, b = (Machine(cluster, name, way=way, n=403, epochs=2) for name in "ab")
    assert same(a.join(), b.join())
    assert cluster.faults.pending == ()
    assert sum(m.num_samples for m in a.join().metrics[0].machines) == 403
    assert all(count >= 2 for count in (a.trained + b.trained).values())


@pytest.mark.parametrize("point", ["gather", "all_reduce"])
def test_a_round_that_fails_changes_nothing(point):
    cluster = MemoryCluster(min_machines=2)
    for step in range(1, 9):  # a round in which nobody has trained anything sums nothing
        cluster.faults.fail_at("ab"[step % 2], step, point)
    a, b = (Machine(cluster, name) for name in "ab")
    assert same(a.join(), b.join())
    assert cluster.faults.fired
    assert a.trained + b.trained == dict.fromkeys(range(203), 1)
    assert once(a)


def test_a_machine_that_stops_hands_over_what_it_has_and_the_other_goes_on():
    cluster = MemoryCluster()
    a, b = (Machine(cluster, name, n=4003) for name in "ab")
    wait_until(lambda: len(b.outer.changes) > 1)
    b.handle.stop()
    left = b.join()
    assert left.stopped
    # It returns the state of both after its last round.
    assert torch.equal(left.params["w"] != 0, b.outer.rounds_of_each_sample() > 0)
    assert not a.join().stopped
    assert once(a, 4003)


def test_a_machine_that_has_trained_nothing_leaves_at_once():
    a = Machine(MemoryCluster(min_machines=2), "a")
    start = time.monotonic()
    a.handle.stop()
    assert a.join().stopped
    assert time.monotonic() - start < 10.0  # and does not wait to hand over what it has not


def test_a_machine_that_stops_waits_for_the_next_round_of_the_others(monkeypatch):
    monkeypatch.setattr(cluster_run, "LEAVE_TIMEOUT_S", 0.3)
    cluster = MemoryCluster()
    a, b = (
        Machine(
            cluster,
            name,
            n=16_003,
            period_s=2.0,
            timeout_s=0.7,  # with what is above, it is less than the period
            before_step=lambda: time.sleep(0.005),
        )
        for name in "ab"
    )
    wait_until(lambda: len(b.outer.changes) > 1)
    num_rounds = len(b.outer.changes)
    b.handle.stop()
    assert b.join().stopped
    assert len(b.outer.changes) > num_rounds
    a.handle.stop()
    assert a.join().stopped


def test_a_run_that_ends_within_a_round_does_not_take_back_what_the_others_trained():
    runs = []

    class Cluster(MemoryCluster):
        def engine(self, machine, offer):
            engine = super().engine(machine, offer)
            commit = engine.commit

            def ended_first(ok):
                if machine == "b" and engine.step == 3:
                    wait_until(lambda: runs)
                    runs[0]._inner.stop()
                    runs[0]._inner.wait_threads(WAIT_S)
                return commit(ok)

            engine.commit = ended_first
            return engine

    cluster = Cluster()
    a, b = (Machine(cluster, name, n=4003) for name in "ab")
    runs.append(b.handle._run)
    left = b.join()
    assert left.stopped
    assert torch.equal(left.params["w"] != 0, b.outer.rounds_of_each_sample() > 0)
    a.join()
    # Training only adds.
    assert all((change < 1e-9).all() for change in a.outer.changes)
    assert once(a, 4003)


def quorums_of(cluster, before_gather=lambda engine: None):
    """How often the engines of a cluster were asked for a quorum, and something to do in each."""
    asked, make = [], cluster.engine

    def engine(machine, offer):
        made = make(machine, offer)
        quorum, gather = made.quorum, made.gather

        def counted():
            asked.append(machine)
            return quorum()

        def gathered(facts):
            before_gather(made)
            return gather(facts)

        made.quorum, made.gather = counted, gathered
        return made

    cluster.engine = engine
    return asked


def test_a_machine_that_has_been_granted_more_is_not_taken_for_idle():
    runs, holding = [], threading.Event()

    def idle_in_the_second_round(engine):
        if engine.step == 1:
            wait_until(lambda: runs)
            runs[0]._inbox.put(cluster_run._RunIdle(runs[0]._num_grants))
            holding.set()

    cluster, on, held = MemoryCluster(), threading.Event(), threading.Event()
    asked = quorums_of(cluster, idle_in_the_second_round)

    def hold():
        if holding.is_set():
            held.set()
            assert on.wait(WAIT_S)

    a = Machine(cluster, "a", n=4003, before_step=hold, period_s=60.0)
    runs.append(a.handle._run)
    assert held.wait(WAIT_S)  # with what the second round has granted
    a.handle.stop()
    on.set()
    assert a.join().stopped
    # The first without anything, the second once eight batches are trained, and the last one.
    assert len(asked) == 3


def test_an_abort_is_not_lost_while_the_run_inside_is_replaced():
    cluster = MemoryCluster(min_machines=2)
    cluster.faults.deny_at("b", 1)  # so that nearly all is left to train
    aborted, on = threading.Event(), threading.Event()

    def slow():  # so that rounds are a period apart
        time.sleep(0.05)

    a, b = (
        Machine(cluster, name, n=8003, hold=on, before_step=slow, period_s=5.0) for name in "ab"
    )
    run, make = b.handle._run, b.handle._run._make_run

    def abort_and_make(hooks):
        run.abort()
        aborted.set()
        return make(hooks)

    run._make_run = abort_and_make
    on.set()
    assert aborted.wait(WAIT_S)
    start = time.monotonic()
    with pytest.raises(RunAborted):
        b.join()
    assert time.monotonic() - start < 4.0  # and not in the next round
    a.handle._run.abort()
    with pytest.raises(RunAborted):
        a.join()


def test_a_thread_that_cannot_be_started_ends_what_was_started(monkeypatch):
    start = threading.Thread.start

    def fail(thread):
        if thread.name == "cluster":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    cluster = MemoryCluster()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Machine(cluster, "a")
    monkeypatch.undo()
    assert Machine(cluster, "a").join()  # its place is free again


def test_a_stop_everywhere_ends_all_machines_with_the_same_state():
    cluster = MemoryCluster(min_machines=2)
    a, b = (Machine(cluster, name, n=2003, epochs=50) for name in "ab")
    assert b.began.wait(WAIT_S)
    b.handle.stop(everywhere=True)
    states = a.join(), b.join()
    assert all(state.stopped for state in states)
    assert same(*states)
    assert len({len(state.metrics) for state in states}) == 1
    assert len(a.join().metrics) < 50


def test_an_error_of_a_worker_ends_its_machine_and_no_other():
    cluster = MemoryCluster()
    fails = threading.Event()

    def fail():
        if fails.is_set():
            raise ArithmeticError("no")

    a = Machine(cluster, "a", epochs=3)
    b = Machine(cluster, "b", epochs=3, before_step=fail)
    assert b.began.wait(WAIT_S)
    fails.set()
    with pytest.raises(WorkerFailed, match="no"):
        b.join()
    a.join()
    assert set(a.trained) == set(range(203))


def test_a_machine_with_other_settings_is_refused_by_name_and_the_others_go_on():
    cluster = MemoryCluster()
    a = Machine(cluster, "a", epochs=5000)
    assert a.began.wait(WAIT_S)
    c = Machine(cluster, "c", batch_size=5, epochs=2)
    with pytest.raises(ClusterError, match=r"machine c .*batch_size is 5, not 4"):
        c.join()
    a.handle.stop()
    assert a.join().stopped


def test_a_machine_with_another_outer_optimizer_is_refused():
    cluster = MemoryCluster()
    a = Machine(cluster, "a", epochs=5000)
    assert a.began.wait(WAIT_S)
    c = Machine(cluster, "c", epochs=5000, outer=Nesterov())
    with pytest.raises(ClusterError, match=r"outer is 'Nesterov.*, not 'Mean"):
        c.join()
    a.handle.stop()
    assert a.join().stopped


def test_max_steps_counts_batches_of_all_machines():
    cluster = MemoryCluster(min_machines=2)
    a, b = (
        Machine(cluster, name, epochs=5, configure=lambda builder: builder.max_steps(60))
        for name in "ab"
    )
    assert same(a.join(), b.join())
    assert sum((a.trained + b.trained).values()) in range(59 * 4, 60 * 4 + 1)


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_a_machine_without_work_for_some_rounds_takes_what_they_change(way):
    cluster = MemoryCluster(min_machines=3)
    ballast = torch.ones(1_000_000)
    machines = [
        Machine(
            cluster,
            name,
            n=4,
            epochs=40,
            ranks=1,
            way=way,
            # Each gets slower as it trains, so that the two batches of a round wander.
            before_step=lambda own=Counter(): [
                ballast.sin() for _ in range(own.update("s") or own["s"])
            ],
        )
        for name in "abc"
    ]
    assert same(*(machine.join() for machine in machines))
    assert all(machine.trained for machine in machines)
    assert sum((machine.trained for machine in machines), Counter()) == dict.fromkeys(range(4), 40)
    # Training only adds: who had not taken a round's change would take it back in the next.
    assert all((change < 1e-9).all() for change in machines[0].outer.changes)


def test_the_outer_optimizer_makes_the_steps_of_torch():
    own = Nesterov(lr=0.7, momentum=0.9)
    p = torch.nn.Parameter(torch.randn(7, dtype=torch.float64))
    torch_sgd = torch.optim.SGD([p], 0.7, momentum=0.9, nesterov=True)
    flat = [p.detach().clone()]
    for _ in range(5):
        p.grad = torch.randn(7, dtype=torch.float64)
        flat = own.step(flat, [p.grad.clone()])
        torch_sgd.step()
        assert torch.allclose(flat[0], p.detach(), rtol=1e-12)


def test_nesterov_on_two_machines_heals_a_third_with_its_momentum():
    cluster = MemoryCluster(min_machines=2)
    on = threading.Event()
    machines = [
        Machine(cluster, name, epochs=8, outer=Nesterov(), hold=None if name == "a" else on)
        for name in "ab"
    ]
    on.set()
    late = Machine(cluster, "c", epochs=8, outer=Nesterov())
    assert same(*(m.join() for m in machines), late.join())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_all_machines_evaluate_and_hand_over_the_state_that_they_have_in_common(way, ranks):
    cluster = MemoryCluster(min_machines=2)
    handed = {name: [] for name in "ab"}
    ballast = torch.ones(20_000)

    def value(model):
        return float((model.w.detach() * torch.arange(203)).sum())

    def configured(name):
        def configure(builder):
            builder.checkpoint_fn(lambda version, model: handed[name].append(value(model)))
            return builder.eval_fn(lambda model, epoch: {"at": value(model)}).checkpoint_every(1)

        return configure

    a, b = (
        Machine(
            cluster,
            name,
            way=way,
            ranks=ranks,
            epochs=4,
            configure=configured(name),
            before_step=lambda: ballast.sin(),  # so that both are amid the next epoch
        )
        for name in "ab"
    )
    states = a.join(), b.join()
    assert same(*states)
    assert a.trained + b.trained == dict.fromkeys(range(203), 4)
    seen = [[m.scalars["eval/at"] for m in state.metrics] for state in states]
    assert seen[0] == seen[1] == handed["a"] == handed["b"]
    assert len(seen[0]) == 4
    assert seen[0][-1] == float((states[0].params["w"] * torch.arange(203)).sum())


def test_a_timeline_a_monitor_and_the_statistics_show_who_took_part_in_a_round(tmp_path):
    cluster, timeline = MemoryCluster(min_machines=2), Timeline()
    a = Machine(cluster, "a", epochs=2, configure=lambda builder: builder.timeline(timeline))
    b = Machine(cluster, "b", epochs=2)
    with Monitor(poll_s=0.05) as monitor:
        b.handle.attach(monitor)
        a.join()
        b.join()
        monitor.save_html(tmp_path / "page.html")
    assert re.search(
        r'"machines":\[\{"machine":"a","num_samples":', (tmp_path / "page.html").read_text()
    )
    found = [e for e in timeline.events() if e.kind.value == "machines"]
    steps = [e.args["round"] for e in found]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert all(e.args["lasted_s"] < WAIT_S for e in found)
    shares = [dict(pair.split() for pair in e.args["machines"].split(", ")) for e in found]
    assert all(set(share) == {"a", "b"} for share in shares)
    assert sum(int(n) for share in shares for n in share.values()) == 2 * 203
    last = a.handle.statistics().machine_round
    assert last.step == steps[-1]
    assert last.machines == ("a", "b")


def test_what_does_not_go_with_a_cluster_is_said_before_anything_starts():
    cluster = MemoryCluster()
    with pytest.raises(ValueError, match="sampler"):
        Machine(cluster, "a", configure=lambda b: b.sampler(range(203)))
    with pytest.raises(ValueError, match=r"batch_size\(\[6, 2\]\) names several: pass one number"):
        Machine(cluster, "b", batch_size=[6, 2])
    assert Machine(cluster, "c", batch_size=[4, 4]).join().metrics[0].num_samples == 203


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_all_killed_and_resumed_with_one_machine_less_train_each_sample_once(way, tmp_path):
    n = 8003

    def saved(builder):
        return builder.checkpoint_dir(tmp_path, every_s=0.05).resume(tmp_path, missing_ok=True)

    cluster = MemoryCluster(min_machines=2)
    first = [Machine(cluster, name, n=n, way=way, configure=saved) for name in "abc"]
    wait_until(lambda: any(e.step for e in entries(tmp_path)))
    for machine in first:
        machine.handle._run.abort()
    for machine in first:
        with pytest.raises(RunAborted):
            machine.join()
    before = load_newest(tmp_path, missing_ok=False).data
    assert 0 < before.global_step < 2001
    cluster = MemoryCluster(min_machines=2)
    second = [Machine(cluster, name, n=n, way=way, configure=saved) for name in "de"]
    assert same(*(machine.join() for machine in second))
    for machine in second:
        trained = machine.outer.rounds_of_each_sample() + (before.weights["w"].abs() > 1e-9).long()
        assert trained.tolist() == [1] * n


def test_a_checkpoint_of_a_cluster_resumes_on_a_machine_alone(tmp_path):
    cluster = MemoryCluster(min_machines=2)
    a, b = (
        Machine(cluster, name, configure=lambda builder: builder.checkpoint_dir(tmp_path))
        for name in "ab"
    )
    assert same(a.join(), b.join())
    alone = train(
        model=lambda device: Effects(203),
        dataset=203,
        batch_size=4,
        epochs=2,
        configure=lambda builder: builder.resume(tmp_path).seed(0),
        train=lambda model, batch: -model.w[batch[0]].mean(),
    )
    assert len(alone.metrics) == 2
    assert not torch.equal(alone.params["w"], a.join().params["w"])


def test_a_checkpoint_of_a_machine_alone_is_refused_by_a_cluster(tmp_path):
    train(
        model=lambda device: Effects(203),
        dataset=203,
        batch_size=4,
        configure=lambda builder: builder.checkpoint_dir(tmp_path),
        train=lambda model, batch: -model.w[batch[0]].mean(),
    )
    with pytest.raises(CheckpointError, match="without cluster"):
        Machine(MemoryCluster(), "a", epochs=2, configure=lambda builder: builder.resume(tmp_path))


def test_save_gives_the_state_after_the_next_round(tmp_path):
    cluster = MemoryCluster()
    a = Machine(cluster, "a", epochs=5000)
    path = a.handle.save(tmp_path)
    a.handle.stop()
    a.join()
    assert load_newest(path, missing_ok=False).data.run["cluster"]["ledger"]["step"] > 0
