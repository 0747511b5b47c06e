"""Closing of groups whose wrapper was garbage-collected: no lock, no thread left."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from runtime import ShardingStrategy, create_collectives
from runtime.collective import split
from runtime.core.errors import CollectiveAborted
from runtime.fsdp import group_closer as closing
from tests.support.fsdp_ranks import outcomes_of, wrap

WAIT_S = 5.0


def closer_threads():
    return [t for t in threading.enumerate() if t.name == "fsdp-closer"]


def join_closers():
    for thread in closer_threads():
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.fixture
def ranks():
    """Two wrappers, each with its own groups."""
    ends = create_collectives(2, timeout_s=20.0)
    wrapped = outcomes_of(ends, lambda end: wrap(end, ShardingStrategy.HYBRID_SHARD))
    yield wrapped
    for fsdp in wrapped:
        fsdp.close()
    wrapped.clear()
    for end in ends:
        end.close()
    join_closers()


def test_a_wrapper_may_be_collected_while_the_lock_of_its_group_is_held(ranks):
    mutex = ranks[0]._groups.shard._group.barrier._mutex
    gone = weakref.ref(ranks[0])

    def collect():
        # The garbage collector runs during a barrier.
        with mutex:
            ranks.pop(0)
            gc.collect()
        collected.set()

    collected = threading.Event()
    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    ends_in_time = collected.wait(WAIT_S)
    if not ends_in_time:
        mutex.release()
    thread.join(WAIT_S)
    assert ends_in_time
    assert gone() is None


def test_the_groups_of_a_collected_wrapper_are_closed(ranks):
    group = ranks[1]._groups.shard
    assert len(closer_threads()) == 1
    ranks.pop(0)
    gc.collect()
    with pytest.raises(CollectiveAborted, match="rank 0 has left"):
        group.barrier()
    assert len(closer_threads()) == 1  # for the other wrapper
    ranks[0].close()
    join_closers()


def test_wrappers_without_their_own_groups_need_no_thread():
    ends = create_collectives(2)
    wrapped = outcomes_of(ends, wrap)
    assert closer_threads() == []
    del wrapped
    for end in ends:
        end.close()


class Owner:
    """An owner of groups."""

    def __init__(self, groups):
        self.owned = closing.OwnedGroups()
        self.owned.add(groups)


@pytest.fixture
def subgroups():
    ends = create_collectives(2, timeout_s=WAIT_S)
    yield outcomes_of(ends, lambda end: split(end, end.rank))
    for end in ends:
        end.close()
    join_closers()


def test_groups_are_closed_once_and_by_the_caller_of_close(subgroups):
    owner = Owner(subgroups)
    owner.owned.close()
    owner.owned.close()
    assert all(group._closed for group in subgroups)
    join_closers()
    del owner
    gc.collect()
    assert closer_threads() == []


def test_a_new_thread_starts_after_the_closer_has_ended(subgroups):
    for group in subgroups:
        owner = Owner([group])
        (thread,) = closer_threads()
        del owner
        gc.collect()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert group._closed


def test_interpreter_exit_closes_open_groups(subgroups, monkeypatch):
    closer = closing.GroupCloser()
    monkeypatch.setattr(closing, "CLOSER", closer)
    owner = Owner(subgroups)
    closer.close_all()
    assert all(group._closed for group in subgroups)
    assert closer_threads() == []
    owner.owned.close()


def test_groups_are_closed_if_no_thread_can_be_started(subgroups, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="start new thread"):
            Owner(subgroups)
    assert all(group._closed for group in subgroups)
