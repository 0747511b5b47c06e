from __future__ import annotations

import threading

import pytest

from runtime.collective import create_collectives
from runtime.core.errors import CollectiveAborted, GpuWorkerError
from runtime.worker.collective_groups import CollectiveGroups
from tests.support.running import THREAD, WAIT_S


class Maker:
    """Creates groups of threads, and counts them."""

    def __init__(self, hold=None):
        self.made = []
        self._hold = hold
        self.entered = threading.Event()

    def __call__(self, ranks, backend):
        self.made.append(tuple(ranks))
        self.entered.set()
        if self._hold is not None:
            assert self._hold.wait(WAIT_S)
        return create_collectives(len(ranks), "thread", timeout_s=WAIT_S)


def in_threads(*functions):
    """Call each function in its own thread; returns their results or exceptions."""
    found = [None] * len(functions)

    def call(i):
        try:
            found[i] = functions[i]()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    return found


def test_a_group_is_created_once_and_each_rank_gets_its_own_collective():
    make = Maker()
    groups = CollectiveGroups(make)
    ends = in_threads(*(lambda r=r: groups.connect(1, (0, 2, 5), r, THREAD) for r in (0, 2, 5)))
    assert make.made == [(0, 2, 5)]
    assert [end.rank for end in ends] == [0, 1, 2]
    assert in_threads(*(end.barrier for end in ends)) == [None] * 3
    groups.close()


def test_a_group_aborted_before_its_creation_is_created_aborted():
    groups = CollectiveGroups(Maker())
    groups.abort(1)
    with pytest.raises(CollectiveAborted):
        groups.connect(1, (0, 1), 0, THREAD).barrier()
    groups.connect(2, (0,), 0, THREAD).barrier()
    groups.close()


@pytest.mark.parametrize("end", [lambda g: g.abort(1), lambda g: g.abort(), lambda g: g.close()])
@pytest.mark.parametrize("made_first", [True, False])
def test_an_end_during_the_creation_of_a_group_aborts_the_group(end, made_first):
    """Otherwise its ranks would wait for their peers until the timeout."""
    hold = threading.Event()
    make = Maker(hold)
    groups = CollectiveGroups(make)
    found = []
    thread = threading.Thread(target=lambda: found.append(groups.connect(1, (0,), 0, THREAD)))
    if not made_first:
        groups.abort()
    thread.start()
    assert make.entered.wait(WAIT_S)
    end(groups)  # does not wait for it
    hold.set()
    thread.join(WAIT_S)
    with pytest.raises(CollectiveAborted):
        found[0].barrier()
    groups.close()


def test_the_abort_of_one_group_leaves_the_others():
    groups = CollectiveGroups(Maker())
    old = groups.connect(0, (0,), 0, THREAD)
    new = groups.connect(1, (0,), 0, THREAD)
    groups.abort(0)
    with pytest.raises(CollectiveAborted):
        old.barrier()
    new.barrier()
    groups.abort()
    with pytest.raises(CollectiveAborted):
        new.barrier()
    groups.close()


def test_no_group_is_created_after_the_end_of_the_run():
    make = Maker()
    groups = CollectiveGroups(make)
    groups.close()
    with pytest.raises(CollectiveAborted, match="ended"):
        groups.connect(0, (0, 1), 0, THREAD)
    assert make.made == []


def test_a_group_that_cannot_be_created_beside_an_earlier_one_fails_every_rank():
    """Not as a backend that could not connect, which another one would replace."""

    def make(ranks, backend):
        raise GpuWorkerError("planted: the previous group did not end")

    groups = CollectiveGroups(make)
    for rank in range(2):
        with pytest.raises(GpuWorkerError, match="planted") as caught:
            groups.connect(1, range(2), rank, THREAD)
        assert not isinstance(caught.value, CollectiveAborted)
