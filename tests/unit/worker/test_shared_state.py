"""Consistency of objects that several threads use at once, with and without the GIL."""

import gc
import sys
import threading
import time
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch

from runtime import WandbLogger
from runtime.collective.barrier import Rendezvous
from runtime.collective.process_group import BackendOwner
from runtime.core import rng
from runtime.core.errors import CollectiveAborted
from runtime.core.live_registry import LiveRegistry
from runtime.data.dataset import adapt_dataset
from runtime.data.epoch_index import EpochIndex
from runtime.replica.build import BuildOrder, Template
from runtime.replica.graphs import GraphFallbacks
from runtime.run import Run
from tests.support import programs
from tests.support.running import WAIT_S, builder, until

STRESS_S = 0.15


class Item:
    """An object for the registry."""


class ThenLock:
    """A lock; ``then`` is called once, as soon as the lock is free again."""

    def __init__(self, then):
        self._lock, self._then = threading.Lock(), then

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()
        then, self._then = self._then, None
        if then is not None:
            then()


@pytest.fixture
def many_switches():
    """Make the interpreter switch threads as often as possible, if it has a GIL."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_live_registry_lists_objects_without_keeping_them_alive():
    living, item, other = LiveRegistry(), Item(), Item()
    living.add(item)
    living.add(other)
    living.add(item)
    assert sorted(map(id, living.all())) == sorted(map(id, (item, other)))
    del other
    gc.collect()
    assert living.all() == [item]
    assert len(living._refs) == 1


@pytest.mark.usefixtures("many_switches")
def test_a_live_registry_is_read_while_objects_are_added_and_freed():
    living, item, errors = LiveRegistry(), Item(), []
    living.add(item)
    deadline = time.monotonic() + STRESS_S

    def come_and_go():
        try:
            while time.monotonic() < deadline:
                kept = [Item() for _ in range(30)]
                for each in kept:
                    living.add(each)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        while time.monotonic() < deadline:
            assert item in living.all()
    finally:
        for thread in threads:
            thread.join(WAIT_S)
    assert not errors
    gc.collect()
    assert living.all() == [item]


def test_a_fallback_for_all_ranks_is_not_lost_to_one_of_a_single_rank():
    class Interrupted(GraphFallbacks):
        """Another rank writes as soon as one has read the state of all."""

        value, other = False, None

        @property
        def _all(self):
            found, other = self.value, self.other
            if other is not None:
                self.other = None
                other()
            return found

        @_all.setter
        def _all(self, value):
            self.value = value

    fallbacks = Interrupted()
    fallbacks.other = lambda: fallbacks.give_up(0, "for all")
    fallbacks.give_up(1, "for itself", everywhere=False)
    if fallbacks.other is not None:  # it was not read: no rank could interfere
        fallbacks.other()
    assert fallbacks.without_graphs is True


def test_a_slow_rank_gets_the_plan_of_its_exchange_although_the_next_one_was_refused():
    """An orderly end does not affect exchanges that every rank has joined."""
    refused, woken, group = threading.Event(), threading.Event(), Rendezvous(3, WAIT_S)
    wait, plans = group.barrier.wait, {}

    def wait_slowly(rank, *args):
        wait(rank, *args)
        if rank == 2:
            woken.set()
            assert refused.wait(WAIT_S)

    group.barrier.wait = wait_slowly

    def meet(rank):
        plans[rank] = group.meet(rank, f"of rank {rank}", "; ".join)

    def meet_again():
        meet(1)
        assert woken.wait(WAIT_S)
        with pytest.raises(CollectiveAborted) as refusal:
            group.meet(1, "once more", "; ".join)
        group.fail(refusal.value)
        refused.set()

    def meet_and_leave():
        meet(0)
        group.barrier.leave(0)

    ranks = [threading.Thread(target=work, daemon=True) for work in (meet_and_leave, meet_again)]
    for thread in ranks:
        thread.start()
    try:
        meet(2)
    finally:
        refused.set()
        for thread in ranks:
            thread.join(WAIT_S)
    assert plans == dict.fromkeys(range(3), "of rank 0; of rank 1; of rank 2")
    assert group._plans == [None] * 3


def test_no_rank_keeps_a_plan_that_an_abort_made_void():
    group = Rendezvous(1, WAIT_S)

    def plan(requests):
        group.barrier.abort()
        return requests[0]

    with pytest.raises(CollectiveAborted):
        group.meet(0, "a tensor", plan)
    assert group._plans == [None]


def test_the_last_rank_to_arrive_notices_one_that_an_abort_woke():
    left = threading.Event()

    class Aborted(Rendezvous):
        """Is aborted when all ranks have arrived and the last is about to read their requests."""

        def requests(self):
            self.barrier.abort()
            assert left.wait(WAIT_S)
            return super().requests()

    group, planned = Aborted(2, WAIT_S), []

    def first():
        with pytest.raises(CollectiveAborted):
            group.meet(0, "of rank 0", planned.append)
        group.slots[0] = None  # as a collective does when it ends
        left.set()

    thread = threading.Thread(target=first)
    thread.start()
    try:
        until(lambda: group.barrier._waiting == [0])
        with pytest.raises(CollectiveAborted):
            group.meet(1, "of rank 1", planned.append)
    finally:
        left.set()
        thread.join(WAIT_S)
    assert planned == []


def test_no_thread_draws_while_the_random_kernels_are_replaced(monkeypatch):
    replacing, may_end, entered, order = *(threading.Event() for _ in range(3)), []

    def replace(library, name):
        replacing.set()
        assert may_end.wait(WAIT_S)
        return True

    def draw():
        with rng.thread_generator(torch.Generator()):
            order.append(may_end.is_set())
            entered.set()

    monkeypatch.setattr(rng, "_installed", [])
    monkeypatch.setattr(rng, "_replace", replace)
    monkeypatch.setattr(torch.random, "default_generator", torch.random.default_generator)
    threads = [threading.Thread(target=each) for each in (rng.install_thread_generators, draw)]
    threads[0].start()
    try:
        assert replacing.wait(WAIT_S)
        threads[1].start()
        entered.wait(0.1)
    finally:
        may_end.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert order == [True]


def test_a_rank_whose_run_ends_before_its_turn_builds_no_model():
    class Ended(BuildOrder):
        """Its run ends while a rank waits for the process's lock."""

        @contextmanager
        def _process_lock(self):
            with super()._process_lock():
                self.forget()
                yield

    order = Ended()
    order.publish(Template({}, {}))
    with pytest.raises(CollectiveAborted, match="the run ended"), order.turn(1):
        pass
    order.publish(Template({}, {}))  # by a rank 0 that took longer than the run
    assert order._template is None


def test_the_length_of_an_epoch_is_not_that_of_the_next():
    lengths = iter((10, 12))
    index = EpochIndex(10, 2, 0, current_length=lambda: next(lengths))

    def next_epoch():
        with pytest.raises(ValueError, match="length 12 in epoch 1"):
            index.order(1)

    index._drawing = ThenLock(next_epoch)
    assert len(index.order(0)) == 10


def test_two_loaders_that_read_at_once_warn_once_of_lists(caplog):
    adapter = adapt_dataset([{"ids": [1, 2]}, {"ids": [3, 4]}])

    class Read(type(adapter)):
        """Another rank reads its first batch as soon as one has asked if it is the first."""

        value, other = False, True

        @property
        def _is_checked(self):
            found = self.value
            if self.other:
                self.other = False
                self.load(torch.tensor([1]))
            return found

        @_is_checked.setter
        def _is_checked(self, value):
            self.value = value

    del adapter.__dict__["_is_checked"]
    adapter.__class__ = Read
    adapter.load(torch.tensor([0]))
    assert sum("as lists of numbers" in text for text in caplog.messages) == 1


def test_facts_have_the_transport_and_its_own_reason():
    run = builder(ranks=1).run()
    assert run.join(WAIT_S)
    service = run._run._service

    class Choice:
        """The coordinator's; it is changed whenever the coordinator may handle an event."""

        value = run.backend
        reason = "at first"

        @property
        def chosen(self):
            if service._lock.acquire(blocking=False):
                self.reason = "later"
                service._lock.release()
            return self.value

    run._run.machine.run_state.backend_choice = Choice()
    assert run._run.report.facts.backend_reason == "at first"


def test_past_metrics_are_read_while_the_last_worker_is_built():
    class Resumed:
        """A run that drops its checkpoint after one read."""

        def __init__(self):
            run = SimpleNamespace(metrics=())
            self.found = [SimpleNamespace(data=SimpleNamespace(run=run)), None]

        @property
        def resumed(self):
            return self.found.pop(0)

    assert Run.past_metrics.fget(Resumed()) == ()


def test_a_wandb_run_is_finished_although_another_thread_writes(monkeypatch):
    class WandbRun:
        """A run of the package."""

        num_finished = 0

        def log(self, values):
            """Take values."""

        def finish(self):
            self.num_finished += 1
            module.run = None

    def init():
        module.run = WandbRun()
        return module.run

    module = ModuleType("wandb")
    module.run, module.init = None, init
    module.__spec__ = SimpleNamespace(name="wandb")
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: module.__spec__)
    log = WandbLogger()
    log._write({}, "epoch", 0, 0)
    first = module.run
    log._lock = ThenLock(lambda: log._write({}, "epoch", 1, 1))
    log.close()
    assert first.num_finished == 1


def test_a_backend_can_be_released_at_any_point_of_its_thread():
    """The garbage collector may run there, and find the user of the backend."""
    owners, is_made = [], threading.Event()

    def release(frame, event, arg):
        if isinstance(frame.f_locals.get("self"), threading.Condition) and "wait" in str(frame):
            assert is_made.wait(WAIT_S)
            owners[0].release()
        return release

    before = threading.gettrace()
    threading.settrace(release)
    try:
        owners.append(BackendOwner(Item, "collective-0"))
    finally:
        threading.settrace(before)
    is_made.set()
    threading.Thread(target=owners[0].release, daemon=True).start()
    assert owners[0].join(10.0)


def test_the_exit_of_a_process_waits_for_a_backend_that_is_being_freed():
    program = """
import threading, time
from types import SimpleNamespace
from runtime.collective import process_group

exit_waits = threading.Event()

def monotonic():
    exit_waits.set()
    return time.monotonic()

class Backend:
    def __del__(self):
        exit_waits.wait()
        print("freed", flush=True)

class User:
    pass

process_group.time = SimpleNamespace(monotonic=monotonic)
owner, user = process_group.BackendOwner(Backend, "collective-0"), User()
owner.backend(user)
owner.release()
"""
    ended = programs.run([sys.executable, "-c", program], timeout=60, check=True, whole_end=True)
    assert ended.stdout == "freed\n"
