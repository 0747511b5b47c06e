"""Cluster runs: each sample counts once, with machines that join, leave, die or are cut off."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter

import pytest
import torch

from runtime import (
    Callback,
    CheckpointError,
    ClusterError,
    GpuWorkerError,
    Monitor,
    Nesterov,
    RunAborted,
    Timeline,
    Trainer,
    WorkerFailed,
)
from runtime.checkpoint import store
from runtime.checkpoint.store import entries, load_newest
from runtime.cluster import cluster_run
from tests.support.clustering import PERIOD_S, Effects, Machine, RecordedChanges, same
from tests.support.memory_engine import MemoryCluster, MemoryEngine
from tests.support.running import ASYNC, CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, builder, until

WAYS = [(SYNC, THREAD), (CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, OVER_CPU)]


def train(*, configure, **kwargs):
    """Train on one machine to the end."""
    return configure(builder(ranks=2, **kwargs)).run().join(WAIT_S)


def once(machine, n=203):
    """True if each sample has had its effect in exactly one round."""
    return machine.outer.rounds_of_each_sample().tolist() == [1] * n


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_two_machines_train_each_sample_once_and_end_bitwise_equal(way, ranks):
    cluster = MemoryCluster(min_machines=2)
    a, b = (Machine(cluster, name, way=way, ranks=ranks) for name in "ab")
    states = a.join(), b.join()
    assert same(*states)
    assert once(a)
    assert once(b)
    assert a.trained + b.trained == dict.fromkeys(range(203), 1)
    assert a.trained
    assert b.trained


def test_each_handle_has_the_metrics_of_both_machines():
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
def test_a_late_machine_starts_from_the_state_of_the_first(way):
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
def test_the_batches_of_a_machine_that_dies_are_trained_by_the_other(point, way):
    cluster, trains = MemoryCluster(min_machines=2), threading.Event()
    cluster.faults.die_at("b", 2, point)

    def begin():  # both have batches
        cluster.min_machines = 1
        trains.set()

    a = Machine(cluster, "a", way=way, n=403, hold=trains)
    b = Machine(cluster, "b", way=way, n=403, before_step=begin)
    assert once(a, 403) if a.join() else None
    assert cluster.faults.pending == ()
    with pytest.raises(BaseException, match="b"):
        b.join()
    assert set(a.trained + b.trained) == set(range(403))


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, OVER_CPU)])
def test_a_machine_that_missed_a_commit_is_healed_from_one_that_committed(way):
    cluster = MemoryCluster(min_machines=2)
    cluster.faults.deny_at("b", 2)
    a, b = (Machine(cluster, name, way=way, n=403, epochs=2) for name in "ab")
    assert same(a.join(), b.join())
    assert cluster.faults.pending == ()
    assert sum(m.num_samples for m in a.join().metrics[0].machines) == 403
    assert all(count >= 2 for count in (a.trained + b.trained).values())


@pytest.mark.parametrize("point", ["gather", "all_reduce"])
def test_a_failed_round_changes_nothing(point):
    cluster = MemoryCluster(min_machines=2)
    for step in range(1, 9):  # a round without trained batches has no all-reduce
        cluster.faults.fail_at("ab"[step % 2], step, point)
    a, b = (Machine(cluster, name) for name in "ab")
    assert same(a.join(), b.join())
    assert cluster.faults.fired
    assert a.trained + b.trained == dict.fromkeys(range(203), 1)
    assert once(a)


def test_batches_that_a_machine_returns_in_a_failed_round_are_its_own_again():
    """Rounds begin before the grants end, and the machines train and keep such batches after."""
    cluster, n = MemoryCluster(min_machines=2), 20003
    for step in range(2, 7):
        cluster.faults.fail_at("ab"[step % 2], step, "gather")
    a, b = (Machine(cluster, name, n=n, period_s=0.2) for name in "ab")
    assert same(a.join(), b.join())
    assert cluster.faults.fired
    assert a.trained + b.trained == dict.fromkeys(range(n), 1)


def test_a_round_weighs_machines_by_their_samples_since_the_last_one():
    """A sample moves its element by 1/4 on its machine, and the round's change has the weight."""
    cluster = MemoryCluster(min_machines=2)
    machines = [Machine(cluster, name, n=8000, ranks=1) for name in "ab"]
    assert all(machine.join() for machine in machines)
    num_compared = 0
    for change in machines[0].outer.changes:
        moved = [change[list(machine.trained)].abs() for machine in machines]
        moved = [each[each > 1e-9] for each in moved]
        total = sum(map(len, moved))
        for each in moved:
            torch.testing.assert_close(each, torch.full_like(each, len(each) / total / 4))
        num_compared += all(map(len, moved))
    assert num_compared > 2


def test_a_stopping_machine_hands_over_its_batches_and_the_other_continues():
    cluster = MemoryCluster()
    a, b = (Machine(cluster, name, n=4003) for name in "ab")
    until(lambda: len(b.outer.changes) > 1)
    b.handle.stop()
    left = b.join()
    assert left.stopped
    # Its result is the global state after its last round.
    assert torch.equal(left.params["w"] != 0, b.outer.rounds_of_each_sample() > 0)
    assert not a.join().stopped
    assert once(a, 4003)


def test_a_machine_without_trained_batches_leaves_at_once():
    a = Machine(MemoryCluster(min_machines=2), "a")
    start = time.monotonic()
    a.handle.stop()
    assert a.join().stopped
    assert time.monotonic() - start < 10.0  # without waiting for a round


def test_a_machine_that_is_stopped_before_its_start_leaves_at_once():
    class Stops(Callback):
        """Stops its run before it starts, as another process may, which lists it already."""

        def begin(self, run):
            super().begin(run)
            run.stop()

    a = Machine(MemoryCluster(min_machines=2), "a", configure=lambda b: b.callbacks(Stops()))
    start = time.monotonic()
    assert a.join().stopped
    assert time.monotonic() - start < 10.0


def test_a_stopping_machine_waits_for_the_next_round(monkeypatch):
    monkeypatch.setattr(cluster_run, "LEAVE_TIMEOUT_S", 0.3)
    cluster = MemoryCluster()
    a, b = (
        Machine(
            cluster,
            name,
            n=16_003,
            period_s=2.0,
            timeout_s=0.7,  # with LEAVE_TIMEOUT_S less than the period
            before_step=lambda: time.sleep(0.005),
        )
        for name in "ab"
    )
    until(lambda: len(b.outer.changes) > 1)
    num_rounds = len(b.outer.changes)
    b.handle.stop()
    assert b.join().stopped
    assert len(b.outer.changes) > num_rounds
    a.handle.stop()
    assert a.join().stopped


def test_a_run_that_ends_during_a_round_does_not_revert_the_others_changes():
    runs = []

    class Cluster(MemoryCluster):
        def engine(self, machine, offer):
            engine = super().engine(machine, offer)
            commit = engine.commit

            def ended_first(ok):
                if machine == "b" and engine.step == 3:
                    until(lambda: runs)
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
    # Training only increases the parameters.
    assert all((change < 1e-9).all() for change in a.outer.changes)
    assert once(a, 4003)


def quorums_of(cluster, before_gather=lambda engine: None):
    """Count the quorums of a cluster's engines, and run a hook before each gather."""
    quorums, make = [], cluster.engine

    def engine(machine, offer):
        made = make(machine, offer)
        quorum, gather = made.quorum, made.gather

        def counted():
            quorums.append(machine)
            return quorum()

        def gathered(report):
            before_gather(made)
            return gather(report)

        made.quorum, made.gather = counted, gathered
        return made

    cluster.engine = engine
    return quorums


def test_an_idle_report_from_before_a_grant_is_ignored():
    runs, holding = [], threading.Event()

    def idle_in_the_second_round(engine):
        if engine.step == 1:
            until(lambda: runs)
            runs[0]._inbox.put(cluster_run._RunIdle(runs[0]._num_grants))
            holding.set()

    cluster, on, held = MemoryCluster(), threading.Event(), threading.Event()
    quorums = quorums_of(cluster, idle_in_the_second_round)

    def hold():
        if holding.is_set():
            held.set()
            assert on.wait(WAIT_S)

    a = Machine(cluster, "a", n=4003, before_step=hold, period_s=60.0)
    runs.append(a.handle._run)
    assert held.wait(WAIT_S)  # with the grant of the second round
    a.handle.stop()
    on.set()
    assert a.join().stopped
    # The first without batches, the second after eight batches, and the last one.
    assert len(quorums) == 3


def test_a_machine_that_is_stopped_while_it_applies_a_round_leaves_with_the_next_one():
    cluster, handles, num_quorums = MemoryCluster(), [], []
    quorums = quorums_of(cluster)

    class Slow(RecordedChanges):
        """Takes longer than the time to the next round, and is stopped meanwhile."""

        def step(self, old, change):
            if len(self.changes) == 1:
                until(lambda: handles)
                handles[0].stop()
                start = time.monotonic()
                until(lambda: time.monotonic() > start + 2 * PERIOD_S)
                num_quorums.append(len(quorums))
            return super().step(old, change)

    a = Machine(cluster, "a", n=16_003, outer=Slow(16_003))
    handles.append(a.handle)
    assert a.join().stopped
    assert len(quorums) == num_quorums[0] + 1


def test_an_abort_during_the_replacement_of_the_inner_run_is_not_lost():
    cluster = MemoryCluster(min_machines=2)
    cluster.faults.deny_at("b", 1)  # so that nearly all batches are left
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
    assert time.monotonic() - start < 4.0  # before the next round
    a.handle._run.abort()
    with pytest.raises(RunAborted):
        a.join()


def test_started_threads_end_if_a_later_one_cannot_be_started(monkeypatch):
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
    assert Machine(cluster, "a").join()  # the machine's place is free again


def test_a_stop_everywhere_ends_all_machines_with_equal_states():
    cluster = MemoryCluster(min_machines=2)
    a, b = (Machine(cluster, name, n=2003, epochs=50) for name in "ab")
    assert b.started.wait(WAIT_S)
    b.handle.stop(everywhere=True)
    states = a.join(), b.join()
    assert all(state.stopped for state in states)
    assert same(*states)
    assert len({len(state.metrics) for state in states}) == 1
    assert len(a.join().metrics) < 50


def test_a_worker_error_ends_only_its_machine():
    cluster = MemoryCluster()
    fails = threading.Event()

    def fail():
        if fails.is_set():
            raise ArithmeticError("no")

    a = Machine(cluster, "a", epochs=3)
    b = Machine(cluster, "b", epochs=3, before_step=fail)
    assert b.started.wait(WAIT_S)
    fails.set()
    with pytest.raises(WorkerFailed, match="no"):
        b.join()
    a.join()
    assert set(a.trained) == set(range(203))


@pytest.mark.parametrize("part", ["the result", "the end of the engine"])
def test_an_error_at_the_end_of_a_machine_is_raised_by_its_handle(part, monkeypatch):
    close = MemoryEngine.close

    def fail(owner, *args):
        if part != "the result":
            close(owner)
        raise OSError(f"planted in {part}")

    place = (cluster_run.ClusterRun, "_with_last_round")
    if part != "the result":
        place = (MemoryEngine, "close")
    monkeypatch.setattr(*place, fail)
    with pytest.raises(OSError, match=f"planted in {part}"):
        Machine(MemoryCluster(), "a").join()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"batch_size": 5}, r"machine c .*batch_size is 5, not 4"),
        ({"outer": Nesterov()}, r"machine c .*outer is 'Nesterov.*, not 'Mean"),
    ],
)
def test_a_machine_with_other_settings_is_refused_by_name_and_the_others_continue(other, message):
    cluster = MemoryCluster()
    a = Machine(cluster, "a", epochs=5000)
    assert a.started.wait(WAIT_S)
    c = Machine(cluster, "c", epochs=2, **other)
    with pytest.raises(ClusterError, match=message):
        c.join()
    a.handle.stop()
    assert a.join().stopped


def test_max_steps_counts_the_batches_of_all_machines():
    cluster = MemoryCluster(min_machines=2)
    a, b = (
        Machine(cluster, name, epochs=5, configure=lambda builder: builder.max_steps(60))
        for name in "ab"
    )
    assert same(a.join(), b.join())
    assert sum((a.trained + b.trained).values()) in range(59 * 4, 60 * 4 + 1)


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_a_machine_without_batches_applies_the_changes_of_each_round(way):
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
            # Each slows down as it trains, so that the two batches of a round alternate.
            before_step=lambda own=Counter(): [
                ballast.sin() for _ in range(own.update("s") or own["s"])
            ],
        )
        for name in "abc"
    ]
    assert same(*(machine.join() for machine in machines))
    assert all(machine.trained for machine in machines)
    assert sum((machine.trained for machine in machines), Counter()) == dict.fromkeys(range(4), 40)
    # Training only increases the parameters: a machine that missed a change would revert it.
    assert all((change < 1e-9).all() for change in machines[0].outer.changes)


def test_nesterov_equals_torch_sgd():
    own = Nesterov(lr=0.7, momentum=0.9)
    p = torch.nn.Parameter(torch.randn(7, dtype=torch.float64))
    torch_sgd = torch.optim.SGD([p], 0.7, momentum=0.9, nesterov=True)
    flat = [p.detach().clone()]
    for _ in range(5):
        p.grad = torch.randn(7, dtype=torch.float64)
        flat = own.step(flat, [p.grad.clone()])
        torch_sgd.step()
        assert torch.allclose(flat[0], p.detach(), rtol=1e-12)


@pytest.mark.parametrize(("outer", "warns"), [(Nesterov(1.0, 0.9999), 1), (Nesterov(), 0)])
def test_momentum_that_requires_more_rounds_than_the_run_has_is_logged_once(outer, warns, caplog):
    epochs = 4 if warns else 4000  # stopped, with thousands of rounds to come
    machine = Machine(MemoryCluster(), "a", epochs=epochs, outer=outer)
    for _ in range(2):
        machine.handle.next_metrics(WAIT_S)
    machine.handle.stop()
    machine.join()
    found = [r.getMessage() for r in caplog.records if "rounds between machines" in r.getMessage()]
    assert len(found) == warns
    assert all("needs 20000 or more: use Mean(), or a shorter period" in text for text in found)


def test_healing_restores_the_momentum_of_nesterov():
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
def test_all_machines_evaluate_and_return_the_global_state(way, ranks):
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
            before_step=lambda: ballast.sin(),  # so that both are in the middle of the next epoch
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


def test_timeline_monitor_and_statistics_show_the_machines_of_a_round(tmp_path):
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


def test_settings_that_a_cluster_does_not_support_raise_before_the_start():
    cluster = MemoryCluster()
    with pytest.raises(ValueError, match="sampler"):
        Machine(cluster, "a", configure=lambda b: b.sampler(range(203)))
    with pytest.raises(ValueError, match=r"batch_size\(\[6, 2\]\) names several: pass one number"):
        Machine(cluster, "b", batch_size=[6, 2])
    for configure, words in (
        (lambda b: b.dataset({1, 2}), "a stream has none"),
        (lambda b: b.ema(0.9), r"ema\(decay\) follows the averages of one machine"),
        (lambda b: b.eval_every(3).eval_fn(lambda model, epoch: {}), r"eval_every\(n\) counts"),
        (lambda b: b.val_dataset(torch.ones(4), every_steps=3), "every_steps=n"),
    ):
        with pytest.raises(ValueError, match=words):
            Machine(cluster, "d", configure=configure)
    assert Machine(cluster, "c", batch_size=[4, 4]).join().metrics[0].num_samples == 203


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_fewer_machines_resume_and_train_each_sample_once_after_all_were_killed(way, tmp_path):
    n = 8003

    def saved(builder):
        return builder.checkpoint_dir(tmp_path, every_s=0.05).resume(tmp_path, missing_ok=True)

    def is_saved():
        return any(entry.step for entry in entries(tmp_path))

    def stop_once_saved():
        assert not is_saved() or killed.wait(WAIT_S)

    killed = threading.Event()
    cluster = MemoryCluster(min_machines=2)
    first = [
        Machine(cluster, name, n=n, way=way, configure=saved, before_step=stop_once_saved)
        for name in "abc"
    ]
    until(is_saved)
    for machine in first:
        machine.handle._run.abort()
    killed.set()
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


def test_a_cluster_checkpoint_resumes_on_one_machine(tmp_path):
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


@pytest.mark.parametrize("only_at_the_end", [False, True])
def test_a_machine_whose_first_checkpoint_would_not_load_leaves_the_cluster(
    only_at_the_end, tmp_path, monkeypatch
):
    real = store.write_pickle
    monkeypatch.setattr(store, "write_pickle", lambda path, v: real(path, {**v, "odd": object()}))
    epochs, every_s = (1, None) if only_at_the_end else (10_000, 0.01)
    cluster = MemoryCluster()
    a = Machine(
        cluster,
        "a",
        epochs=epochs,
        configure=lambda builder: builder.checkpoint_dir(tmp_path, every_s=every_s),
    )
    with pytest.raises(CheckpointError, match="no run could resume from the checkpoint of step"):
        a.join()
    assert not list(tmp_path.iterdir())


def test_an_optimizer_whose_state_could_not_be_resumed_is_refused_in_a_cluster(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.optim.SGD, "state_dict", lambda self: {"fast": 1})
    a = Machine(MemoryCluster(), "a", configure=lambda builder: builder.checkpoint_dir(tmp_path))
    with pytest.raises(CheckpointError, match=r"state_dict\(\) of SGD has \['fast'\]"):
        a.join()
    assert not a.trained


def test_a_checkpoint_of_one_machine_is_refused_by_a_cluster(tmp_path):
    train(
        model=lambda device: Effects(203),
        dataset=203,
        batch_size=4,
        configure=lambda builder: builder.checkpoint_dir(tmp_path),
        train=lambda model, batch: -model.w[batch[0]].mean(),
    )
    with pytest.raises(CheckpointError, match="without cluster"):
        Machine(MemoryCluster(), "a", epochs=2, configure=lambda builder: builder.resume(tmp_path))


def test_save_returns_the_state_after_the_next_round(tmp_path):
    cluster = MemoryCluster()
    a = Machine(cluster, "a", epochs=5000)
    path = a.handle.save(tmp_path)
    a.handle.stop()
    a.join()
    assert load_newest(path, missing_ok=False).data.cluster.ledger.step > 0


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_steps_over_several_batches_count_once_in_a_cluster(policy):
    """Grants end within steps: rounds between machines do not wait for the rest of them."""

    def loop(worker):
        for number, batch in enumerate(worker.batches()):
            loss = -worker.model.w[batch[0]].mean()
            is_first = number % 2 == 0 and number < 6
            worker.backward(loss) if is_first else worker.step(loss)

    def configured(_):
        builder = Trainer.loop(
            lambda device: Effects(803),
            lambda model: torch.optim.SGD(model.parameters(), 1.0),
            loop,
        )
        builder.dataset((torch.arange(803),)).batch_size(4).devices(["cpu"] * 2)
        return builder.num_epochs(1).policy(policy).progress(False)

    cluster = MemoryCluster(min_machines=2)
    a, b = (Machine(cluster, name, n=803, configure=configured) for name in "ab")
    assert same(a.join(), b.join())
    assert once(a, 803)
    assert once(b, 803)


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_machine_whose_workers_leave_an_epoch_ends_and_the_others_train_its_batches(
    policy, stops
):
    """With an error, unless the body has called ``stop()`` before."""
    is_over = threading.Event()

    def configured(leaves):
        def loop(worker):
            for batch in worker.batches():
                if leaves and worker.epoch == 0:
                    if stops:
                        worker.stop()
                    break
                if not stops:  # a machine that stops hands its batches over in a round
                    assert is_over.wait(WAIT_S)
                worker.step(-worker.model.w[batch[0]].mean())

        builder = Trainer.loop(
            lambda device: Effects(203),
            lambda model: torch.optim.SGD(model.parameters(), 1.0),
            loop,
        )
        builder.dataset((torch.arange(203),)).batch_size(4).devices(["cpu"] * 2)
        return builder.num_epochs(1).policy(policy).progress(False)

    cluster = MemoryCluster()
    leaver = Machine(cluster, "a", configure=lambda _: configured(leaves=True))
    other = Machine(cluster, "b", configure=lambda _: configured(leaves=False))
    if stops:
        assert leaver.join().reason == "stopped"
    else:
        with pytest.raises(GpuWorkerError, match="left epoch 0 by break or return"):
            leaver.join()
    is_over.set()
    (w,) = other.join().params.values()
    assert bool((w > 0).all())
