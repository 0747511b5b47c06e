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
