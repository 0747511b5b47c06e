"""RankThreads: order, failures, and every way to end."""

from __future__ import annotations

import _thread
import gc
import os
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest

from runtime.loop import rank_threads
from runtime.loop.rank_threads import Job, RankThreads
from tests.support import programs

ROOT = Path(__file__).parents[3]
WAIT_S = 10.0


@pytest.fixture
def make():
    made = []

    def make(num=3, context=nullcontext, **kwargs):
        made.append(RankThreads("ranks", [context] * num, **kwargs))
        return made[-1]

    yield make
    for threads in made:
        threads.close()


def values(call):
    assert call.wait(WAIT_S)
    return [outcome.value for outcome in call.outcomes]


def names():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("ranks-"))


def join_all(threads):
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_every_rank_has_its_own_persistent_daemon_thread(make):
    threads = make()

    def who(rank):
        return rank, threading.current_thread().name, threading.current_thread().daemon

    expected = [(rank, f"ranks-{rank}", True) for rank in range(3)]
    assert values(threads.start(who)) == expected
    assert values(threads.start(who)) == expected
    assert names() == ["ranks-0", "ranks-1", "ranks-2"]


def test_ranks_work_at_the_same_time(make):
    meeting = threading.Barrier(3, timeout=WAIT_S)
    assert sorted(values(make().start(lambda rank: meeting.wait()))) == [0, 1, 2]


def test_jobs_run_in_order(make):
    threads, done = make(2), [[], []]
    calls = [threads.start(lambda rank, i=i: done[rank].append(i)) for i in range(50)]
    assert calls[-1].wait(WAIT_S)
    assert done == [list(range(50))] * 2


def test_only_the_ranks_threads_are_recognized(make):
    threads = make(2)
    assert values(threads.start(lambda rank: threads.is_current_thread())) == [True, True]
    assert not threads.is_current_thread()
    threads.close()
    assert threads.exited() == {0: "ranks-0", 1: "ranks-1"}
    found = []
    for _ in range(20):  # which reuse the idents of ended threads
        other = threading.Thread(target=lambda: found.append(threads.is_current_thread()))
        other.start()
        join_all([other])
    assert found == [False] * 20


def test_a_failure_is_the_outcome_of_its_rank_alone(make):
    def fail(rank):
        if rank == 1:
            raise SystemExit(3)
        return rank

    threads = make()
    call = threads.start(fail)
    assert values(call) == [0, None, 2]
    assert isinstance(call.outcomes[1].error, SystemExit)
    assert values(threads.start(lambda rank: rank)) == [0, 1, 2]


def test_an_exception_of_the_context_is_the_outcome_of_every_task(make):
    @contextmanager
    def broken():
        raise OSError("no device")
        yield

    threads = make(2, broken)
    for _ in range(2):
        call = threads.start(lambda rank: rank)
        assert values(call) == [None, None]
        assert {str(outcome.error) for outcome in call.outcomes} == {"no device"}


def test_tasks_run_inside_the_context_and_it_exits_at_the_end(make):
    inside = threading.local()
    left = []

    @contextmanager
    def context():
        inside.here = True
        yield
        left.append(threading.current_thread().name)

    threads = make(2, context)
    assert values(threads.start(lambda rank: inside.here)) == [True, True]
    threads.close()
    assert sorted(left) == ["ranks-0", "ranks-1"]


def test_a_wait_can_time_out(make):
    threads, go = make(1), threading.Event()
    call = threads.start(lambda rank: go.wait(WAIT_S))
    assert not call.wait(0.01)
    go.set()
    assert values(call) == [True]


def test_close_ends_the_threads_after_their_jobs_and_is_idempotent(make):
    ended = []
    threads = make(2, on_end=lambda: ended.append(threading.current_thread().name))
    calls = [threads.start(lambda rank, i=i: i) for i in range(20)]
    threads.close()
    threads.close()
    assert [values(call) for call in calls] == [[i, i] for i in range(20)]
    assert len(ended) == 1
    assert ended[0].startswith("ranks-")
    assert names() == []
    with pytest.raises(RuntimeError, match="the threads of ranks are closed"):
        threads.start(lambda rank: rank)


def test_close_names_threads_that_do_not_end(make):
    go = threading.Event()
    threads = make(2)
    threads.start(lambda rank: rank == 1 or go.wait(WAIT_S))
    with pytest.raises(RuntimeError, match=r"ranks-0 did not end within 0\.05 s: user code"):
        threads.close(0.05)
    go.set()
    threads.close()


def test_close_from_one_of_the_threads_does_not_wait_for_itself(make):
    threads = make(1)
    alive = threading.enumerate()
    assert values(threads.start(lambda rank: threads.close() or "closed")) == ["closed"]
    join_all([t for t in alive if t.name == "ranks-0"])


def test_threads_end_when_they_are_garbage_collected():
    ended = threading.Event()
    owner = {"threads": RankThreads("ranks", [nullcontext] * 2, ended.set)}
    started = [t for t in threading.enumerate() if t.name.startswith("ranks-")]
    assert owner["threads"].start(lambda rank, owner=owner: owner).wait(WAIT_S)  # a reference cycle
    del owner
    gc.collect()
    join_all(started)
    assert ended.is_set()


def test_a_waiting_thread_keeps_no_reference_to_the_last_job(make):
    class Thing:
        pass

    threads, thing = make(2), Thing()
    gone = weakref.ref(thing)
    call = threads.start(lambda rank, thing=thing: thing)
    assert call.wait(WAIT_S)
    del call, thing
    # The thread drops a job right after its end.
    assert values(threads.start(lambda rank: None)) == [None, None]
    assert gone() is None


def test_a_thread_that_cannot_start_ends_those_that_did(monkeypatch):
    ended, started = threading.Event(), []

    class Failing(threading.Thread):
        def start(self):
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
            super().start()
            started.append(self)

    monkeypatch.setattr(rank_threads.threading, "Thread", Failing)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        RankThreads("ranks", [nullcontext] * 4, ended.set)
    join_all(started)
    assert len(started) == 2
    assert ended.wait(WAIT_S)


SCRIPT = """
from contextlib import contextmanager
from runtime.loop.rank_threads import RankThreads

@contextmanager
def context():
    yield
    print("left", flush=True)

threads = RankThreads("ranks", [context] * 2)
call = threads.start(lambda rank: rank)
{then}
"""


@pytest.mark.parametrize(
    ("then", "code", "run"),
    [
        ("", 0, subprocess.run),  # also before anything else was imported
        ("call.wait(); raise ValueError('planted')", 1, partial(programs.run, whole_end=True)),
    ],
    ids=["ends", "raises"],
)
def test_threads_end_with_the_interpreter(then, code, run):
    done = run(
        [sys.executable, "-c", SCRIPT.format(then=then)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout.count("left")) == (code, 2), done.stderr
    assert ("planted" in done.stderr) is (code == 1)
    assert "Fatal" not in done.stderr


def test_ctrl_c_interrupts_a_wait_while_the_ranks_continue(make):
    go, waiting = threading.Event(), threading.Event()

    def interrupt():
        assert waiting.wait(WAIT_S)
        _thread.interrupt_main()

    call = make(1).start(lambda rank: go.wait(WAIT_S))
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        waiting.set()
        call.wait()
    thread.join()
    go.set()
    assert values(call) == [True]


def test_a_fork_gets_an_error_that_its_threads_are_in_the_parent(monkeypatch):
    threads = RankThreads("here", [nullcontext, nullcontext])
    try:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="not in this fork"):
            threads.start(lambda rank: rank)
    finally:
        monkeypatch.undo()
        threads.close()


class Interrupted:
    """An inbox whose first put is interrupted by Ctrl-C."""

    def __init__(self, inbox):
        self._inbox = inbox
        self.left = 1

    def put(self, call):
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt
        self._inbox.put(call)

    def __getattr__(self, name):
        return getattr(self._inbox, name)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_interrupted_submit_can_be_repeated_and_each_task_runs_once(make, at):
    threads, done = make(3), []
    threads._inboxes[at] = Interrupted(threads._inboxes[at])
    call = Job([partial(done.append, rank) for rank in range(3)])
    assert not call.is_posted
    with pytest.raises(KeyboardInterrupt):
        threads.submit(call)
    assert call.is_posted
    assert not call.wait(0.01)
    for _ in range(2):
        threads.submit(call)
    assert call.wait(WAIT_S)
    assert threads.start(lambda rank: None).wait(WAIT_S)
    assert sorted(done) == [0, 1, 2]
