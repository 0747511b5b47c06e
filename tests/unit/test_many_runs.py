"""Many runs in one process, one after the other and at once."""

import gc
import os
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from runtime import ApplyPolicy, Trainer
from runtime.core.errors import CollectiveAborted
from runtime.replica import build
from tests.support import programs
from tests.support.pairs import SCALE
from tests.support.running import (
    ASYNC,
    CADENCE,
    GLOO,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    builder,
    count_up,
    counter,
    numbers,
    plain_sgd,
)

pytestmark = pytest.mark.slow

WAYS = [(CADENCE, OVER_CPU), (SYNC, THREAD), (ASYNC, THREAD), (SYNC, GLOO), (CADENCE, GLOO)]
NUM_RUNS, NUM_BEFORE = 40 if SCALE == 1 else 100 * SCALE, 20
ROOT = Path(__file__).parents[2]


def run_once(way, *, fails=False):
    """A training of a small model, in some cases with a worker's death."""
    deaths = iter([True] if fails else [])

    def fit(model, batch):
        (x,) = batch
        if next(deaths, False):
            raise ValueError("planted")
        return model(x.float().unsqueeze(1)).square().mean()

    b = builder(
        model=lambda device: nn.Sequential(nn.Linear(1, 256), nn.Linear(256, 256)),
        optim=lambda params: torch.optim.AdamW(params),
        train=fit,
        dataset=24,
        batch_size=4,
        epochs=2,
        ranks=2,
        way=way,
    )
    state = b.on_worker_failure("continue").run().join(WAIT_S)
    assert [m.num_samples for m in state.metrics] == [24, 24]


def held():
    gc.collect()
    process = psutil.Process()
    return threading.active_count(), process.num_fds(), process.memory_info().rss


def main():
    """Runs of every kind; prints the process's resources after 20 of them and at the end."""
    for i in range(NUM_RUNS):
        if i == NUM_BEFORE:
            before = held()
        run_once(WAYS[i % len(WAYS)], fails=i % 7 == 0)
    print(*before, *held())


@pytest.mark.timeout(180)
def test_many_runs_leave_no_thread_no_descriptor_and_no_memory():
    """In a separate process, whose resources depend only on the runs."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    found = programs.run(
        [sys.executable, "-c", "from tests.unit.test_many_runs import main; main()"],
        env={**os.environ, "PYTHONPATH": path},
        timeout=170,
    )
    assert found.returncode == 0, found.stderr
    threads, fds, rss, threads_now, fds_now, rss_now = map(int, found.stdout.split())
    assert (threads_now, fds_now) == (threads, fds)
    assert rss_now <= 1.05 * rss, f"{rss / 2**20:.1f} MiB after {NUM_BEFORE}, {rss_now / 2**20:.1f}"


@pytest.mark.parametrize("other", [(SYNC, GLOO), (ASYNC, THREAD), (CADENCE, OVER_CPU)])
def test_two_trainers_at_once_are_both_right(other):
    """Each waits in a step until the other has reached its own."""
    meeting = threading.Barrier(2)
    met = [threading.Lock(), threading.Lock()]
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    results = []
    for which, (way, slope) in enumerate([((SYNC, THREAD), 2.0), (other, -3.0)]):

        def fit(model, batch, which=which):
            if met[which].acquire(blocking=False):
                meeting.wait(WAIT_S)
            inputs, targets = batch
            return (model(inputs) - targets).square().mean()

        results.append(
            Trainer.builder(
                lambda device: nn.Linear(1, 1),
                lambda params: torch.optim.SGD(params, 0.2),
                fit,
            )
            .dataset((x, slope * x + 1))
            .batch_size(8)
            .num_epochs(20)
            .devices(["cpu"] * 2)
            .policy(way[0])
            .backend(way[1])
            .run()
        )
    for handle, slope in zip(results, (2.0, -3.0), strict=True):
        state = handle.join(WAIT_S)
        assert [m.num_samples for m in state.metrics] == [64] * 20
        assert float(state.params["weight"]) == pytest.approx(slope, abs=0.05)
        assert float(state.params["bias"]) == pytest.approx(1.0, abs=0.05)


def test_runs_at_once_give_the_same_bits_as_runs_alone():
    def start(seed):
        return (
            Trainer.builder(
                lambda device: nn.Linear(1, 4),
                lambda params: torch.optim.AdamW(params, 0.01),
                lambda model, batch: model(batch[0]).square().mean(),
            )
            .dataset((torch.arange(40.0).unsqueeze(1),))
            .batch_size(4)
            .num_epochs(3)
            .devices(["cpu"] * 2)
            .policy(ApplyPolicy.SYNC)
            .seed(seed)
            .run()
        )

    alone = [start(seed).join(WAIT_S) for seed in (1, 2)]
    at_once = [handle.join(WAIT_S) for handle in [start(1), start(2)]]
    for one, other in zip(alone, at_once, strict=True):
        assert all(torch.equal(p, other.params[name]) for name, p in one.params.items())


def test_no_run_draws_while_another_ones_model_is_built(monkeypatch):
    """The process's generators are seeded for one of them."""
    lock, waits = threading.Lock(), threading.Event()

    class Noted:
        def acquire(self, timeout):
            if not lock.acquire(blocking=False):
                waits.set()
                return lock.acquire(timeout=timeout)
            return True

        def release(self):
            lock.release()

    monkeypatch.setattr(build, "_PROCESS_LOCK", Noted())
    begun = threading.Event()

    def factory(device):
        model = nn.Linear(1, 4)
        if not begun.is_set():
            begun.set()
            assert waits.wait(WAIT_S), "the other run did not wait"
        return nn.Sequential(model, nn.Linear(4, 4))

    def start(seed):
        b = Trainer.builder(factory, lambda p: torch.optim.SGD(p, 0.0), lambda m, b: m(b[0]).mean())
        return b.dataset((torch.ones(4, 1),)).batch_size(2).num_epochs(1).devices(2).seed(seed)

    first = start(1).run()
    assert begun.wait(WAIT_S)
    second = start(2).run()
    found = [handle.join(WAIT_S).params for handle in (first, second)]
    for params, again in zip(
        found, [start(s).run().join(WAIT_S).params for s in (1, 2)], strict=True
    ):
        assert all(torch.equal(p, again[name]) for name, p in params.items())


def test_a_model_factory_may_run_another_run():
    def factory(device):
        inner = Trainer.builder(counter, plain_sgd, count_up).dataset(numbers(4)).batch_size(2)
        inner.num_epochs(1).devices(2).run().join(WAIT_S)
        return counter(device)

    outer = Trainer.builder(factory, plain_sgd, count_up).dataset(numbers(4)).batch_size(2)
    assert outer.num_epochs(1).devices(2).run().join(WAIT_S).metrics[0].num_samples == 4


def test_a_model_factory_may_wait_for_a_run_that_has_not_built_its_models(caplog, monkeypatch):
    """A lock would deadlock: its holder waits for the other run."""
    monkeypatch.setattr(build, "BUILD_LOCK_TIMEOUT_S", 0.5)
    begun, started = threading.Event(), threading.Event()

    def student(device):
        begun.set()
        assert started.wait(WAIT_S)
        if device.index is None and not teachers[0].state:
            teachers[0].join(WAIT_S)
        return counter(device)

    def run(factory):
        b = Trainer.builder(factory, plain_sgd, count_up).dataset(numbers(4)).batch_size(2)
        return b.num_epochs(1).devices(2).run()

    second = run(student)
    assert begun.wait(WAIT_S)
    teachers = [run(counter)]
    started.set()
    assert second.join(WAIT_S).metrics[0].num_samples == 4
    assert [r for r in caplog.messages if "another run" in r]


def test_an_ended_run_does_not_wait_for_the_models_of_another():
    order = build.BuildOrder()
    with build.BuildOrder().turn(0):
        waiting = threading.Thread(target=order.fail)
        waiting.start()
        with pytest.raises(CollectiveAborted, match="the run ended"), order.turn(0):
            pass
        waiting.join(WAIT_S)
    with pytest.raises(CollectiveAborted, match="rank 0 could not"), order.turn(1):
        pass
    with build.BuildOrder().turn(0) as template:
        assert template is None  # the lock is free
