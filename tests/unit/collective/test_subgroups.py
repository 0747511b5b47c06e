"""Subgroups of every kind of group, and their state after the group breaks."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch

from runtime.collective import AbortableBarrier, ReduceOp, create_collectives, split, split_nodes
from runtime.collective import process_group as process_group_module
from runtime.core.errors import CollectiveAborted, CollectiveTimeout
from tests.unit.collective.test_collectives import (
    KINDS,
    LARGE,
    errors_of,
    group_of,
    on_ranks,
    start_ranks,
    values_of,
)

WAKE_S = 10.0
WAIT_S = 30.0

each_kind = pytest.mark.parametrize("kind", KINDS)


def closing(work):
    """Close the subgroups of a rank in its thread."""

    def run(end):
        subgroups = []
        try:
            return work(end, subgroups)
        finally:
            for subgroup in subgroups:
                subgroup.close()

    return run


@each_kind
def test_ranks_of_one_color_are_a_group_in_order_of_rank(kind):
    colors = [7, -1, 7, -1, 7]

    def work(end, subgroups):
        subgroups.append(split(end, colors[end.rank]))
        (sub,) = subgroups
        tensor = torch.tensor([float(end.rank)])
        whole = torch.zeros(sub.world_size)
        sub.all_gather_into(whole, tensor)
        end.all_reduce_(tensor)  # the group is unchanged
        return sub.kind, sub.rank, sub.world_size, whole.tolist(), tensor.item()

    with group_of(5, kind) as ends:
        found = on_ranks(ends, closing(work))
        for rank, members in enumerate([[0, 2, 4], [1, 3]] * 2 + [[0, 2, 4]]):
            expected = ends[0].kind, members.index(rank), len(members), members, 10.0
            assert found[rank] == expected


@each_kind
@pytest.mark.parametrize("size", [7, LARGE])
def test_every_operation_of_a_subgroup_is_that_of_its_ranks_alone(kind, size):
    values = values_of(4, size)

    def work(end, subgroups):
        intra, inter = split_nodes(end, 2)
        subgroups += [intra, inter]
        summed, averaged = values[end.rank].clone(), values[end.rank].clone()
        intra.all_reduce_(summed)
        inter.all_reduce_(averaged, ReduceOp.AVG)
        weighted = values[end.rank].clone()
        intra.weighted_mean_([weighted], end.rank)
        received = values[end.rank].clone()
        inter.broadcast_(received, 1)
        part = torch.zeros(size)
        intra.reduce_scatter_into(part, values[end.rank].repeat(2))
        intra.barrier()
        return summed, averaged, weighted, received, part

    with group_of(4, kind) as ends:
        found = on_ranks(ends, closing(work))
    for rank, (summed, averaged, weighted, received, part) in enumerate(found):
        first = rank // 2 * 2
        other = values[(rank + 2) % 4]
        torch.testing.assert_close(summed, values[first] + values[first + 1])
        torch.testing.assert_close(averaged, (values[rank] + other) / 2)
        mean = values[first] * first + values[first + 1] * (first + 1)
        torch.testing.assert_close(weighted, mean / (2 * first + 1), rtol=1e-5, atol=1e-6)
        assert received.equal(values[rank % 2 + 2])
        torch.testing.assert_close(part, values[first] + values[first + 1])


@each_kind
def test_a_subgroup_is_used_beside_its_group_from_another_thread(kind):
    """Each rank sums over the group and over a second group of the same ranks at once."""

    def work(end, subgroups):
        subgroups.append(split(end, 0))

        def sums(collective):
            total = 0.0
            for _ in range(20):
                tensor = torch.full((1000,), float(end.rank + 1))
                collective.all_reduce_(tensor)
                total += tensor[-1].item()
            return total

        (beside,) = start_ranks([subgroups[0]], sums)
        return sums(end), beside.result(WAIT_S)

    with group_of(2, kind) as ends:
        assert on_ranks(ends, closing(work)) == [(60.0, 60.0)] * 2


@each_kind
def test_a_subgroup_can_be_split_again(kind):
    def work(end, subgroups):
        subgroups.append(split(end, end.rank // 2))
        subgroups.append(split(subgroups[0], 0))
        tensor = torch.tensor([end.rank])
        subgroups[1].all_reduce_(tensor)
        return tensor.item()

    with group_of(4, kind) as ends:
        assert on_ranks(ends, closing(work)) == [1, 1, 5, 5]


@each_kind
@pytest.mark.parametrize("color", ["red", None, 1.0])
def test_a_color_that_is_no_integer_is_an_error_on_every_rank(kind, color):
    with group_of(2, kind) as ends:
        errors = errors_of(ends, lambda end: split(end, color if end.rank else 0))
        assert all(isinstance(error, ValueError) for error in errors)
        assert "rank 1 passed color=" in str(errors[0])
        on_ranks(ends, lambda end: end.barrier())


@each_kind
@pytest.mark.parametrize("splitting", [0, 1])
def test_a_rank_that_does_something_else_is_an_error_on_every_rank(kind, splitting):
    def work(end):
        if end.rank == splitting:
            split(end, 0)
        else:
            end.barrier()

    with group_of(2, kind) as ends:
        for _ in range(5):  # whichever rank is last
            errors = errors_of(ends, work)
            assert {type(error) for error in errors} == {ValueError}
            assert all("called" in str(error) for error in errors)
        on_ranks(ends, lambda end: end.barrier())


@pytest.mark.parametrize("size", [0, 3, 8, -2])
def test_a_node_size_that_does_not_divide_the_world_is_an_error(size):
    with group_of(4, "thread") as ends, pytest.raises(ValueError, match="divides the world size"):
        split_nodes(ends[0], size)


# --- failures across linked groups -----------------------------------------------------------


def split_in_two(ends):
    """Subgroups of ranks 0 and 1, and of 2 and 3."""
    return on_ranks(ends, lambda end: split(end, end.rank // 2))


@pytest.fixture
def make():
    opened = []

    def make(kind, timeout_s=20.0):
        context = group_of(4, kind, timeout_s)
        ends = context.__enter__()
        opened.append((context, []))
        opened[-1][1].extend(split_in_two(ends))
        return ends, opened[-1][1]

    yield make
    for context, subgroups in opened:
        for subgroup in subgroups:
            subgroup.close()
        context.__exit__(None, None, None)


@each_kind
def test_an_abort_of_the_group_wakes_ranks_that_wait_in_a_subgroup(make, kind):
    ends, subgroups = make(kind)
    (waiting,) = start_ranks(subgroups[:1], lambda sub: sub.barrier())
    begin = time.monotonic()
    ends[3].abort()
    assert isinstance(waiting.exception(WAIT_S), CollectiveAborted)
    assert time.monotonic() - begin < WAKE_S
    for subgroup in subgroups:
        with pytest.raises(CollectiveAborted):
            subgroup.check()


@each_kind
def test_a_rank_that_closes_its_end_of_the_group_leaves_its_subgroups_alone(make, kind):
    ends, subgroups = make(kind)
    (waiting,) = start_ranks(subgroups[:1], lambda sub: sub.barrier())
    begin = time.monotonic()
    ends[1].close()
    error = waiting.exception(WAIT_S)
    assert isinstance(error, CollectiveAborted)
    assert "rank 1 has left" in str(error)
    assert time.monotonic() - begin < WAKE_S
    # Other groups are not affected, and complete their exchanges.
    on_ranks(subgroups[2:], lambda sub: sub.barrier())


@each_kind
def test_a_failure_in_a_subgroup_leaves_the_group_usable(make, kind):
    ends, subgroups = make(kind)
    subgroups[0].abort()
    with pytest.raises(CollectiveAborted):
        subgroups[1].check()
    subgroups[2].check()
    on_ranks(ends, lambda end: end.barrier())


def test_a_timeout_in_the_group_aborts_its_subgroups(make):
    ends, subgroups = make("thread", 1.5)
    with pytest.raises(CollectiveTimeout):
        ends[0].barrier()
    for subgroup in subgroups:
        with pytest.raises(CollectiveAborted):
            subgroup.check()


def test_a_subgroup_has_the_time_limit_of_its_group(make):
    _, subgroups = make("thread", 1.5)
    with pytest.raises(CollectiveTimeout, match=r"1\.5 s"):
        subgroups[0].barrier()


def test_a_rank_that_cannot_connect_wakes_the_others(monkeypatch):
    connect = process_group_module._connect_gloo
    calls = []

    def refuse(rank, world_size, store, timeout_s):
        calls.append(rank)
        if len(calls) > 2 and rank == 1:
            raise RuntimeError("no socket")
        return connect(rank, world_size, store, timeout_s)

    monkeypatch.setattr(process_group_module, "_connect_gloo", refuse)
    with group_of(2, "gloo", 1.0) as ends:
        begin = time.monotonic()
        errors = errors_of(ends, lambda end: split(end, 0))
        assert {type(error) for error in errors} == {CollectiveAborted}
        assert "could not join its subgroup: no socket" in str(errors[1])
        assert time.monotonic() - begin < WAKE_S


def test_a_group_does_not_keep_its_subgroups_alive():
    ends = create_collectives(1)
    subgroup = split(ends[0], 0)
    barrier = weakref.ref(subgroup._group.barrier)
    subgroup.close()
    del subgroup
    ends[0].barrier()  # the plan of the split is forgotten
    gc.collect()
    assert barrier() is None
    for _ in range(50):
        split(ends[0], 0).close()
    assert len(ends[0]._group.barrier._linked) < 5
    ends[0].close()


def test_a_barrier_that_is_linked_to_a_broken_one_breaks_at_once():
    whole, part = AbortableBarrier(2), AbortableBarrier(1)
    whole.abort("gone")
    whole.link(part, [1])
    with pytest.raises(CollectiveAborted, match="gone"):
        part.wait(0, 1.0)


def test_a_barrier_that_times_out_breaks_linked_barriers():
    whole, part = AbortableBarrier(2), AbortableBarrier(1)
    whole.link(part, [1])
    with pytest.raises(CollectiveTimeout):
        whole.wait(0, 0.01)
    assert part.aborted
