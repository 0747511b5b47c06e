"""Subgroups: some ranks of a group, with collectives of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.collective.base import Collective, Group, Plan, Request
from runtime.core.errors import CollectiveAborted, CollectiveTimeout


@dataclass(frozen=True, slots=True)
class _Place:
    """Objects shared by the ranks of one new subgroup.

    Attributes:
        shared: Their other objects, by kind of collective.
    """

    members: tuple[int, ...]
    group: Group
    shared: Any


@dataclass(slots=True)
class _SplitPlan(Plan):
    """Each rank's place."""

    places: Sequence[_Place] = ()


def split(collective: Collective, color: int) -> Collective:
    """Splits a group into subgroups: the ranks that pass the same color, in order of rank.

    A collective call: every rank of the group makes it. Blocks until the ranks of this
    rank's subgroup have connected. The subgroup is of the same kind, has the same time
    limit and the same rules, and may be used beside the group, also from another thread;
    over NCCL only when no exchange of the group is in progress, or the two may wait for each
    other on the device.

    An abort of the group aborts its subgroups, and a rank that closes its end of the group
    leaves its subgroups. A subgroup that breaks, or is closed, leaves the group as it is. Every
    end must be closed in the end.

    Args:
        collective: This rank's end of the group.
        color: Which subgroup this rank joins; any integer.

    Returns:
        This rank's end of its subgroup.

    Raises:
        ValueError: A rank passed something else, or called another method; raised on every
            rank, and the group stays usable.
        CollectiveAborted: The group is aborted, or a rank could not connect.
        CollectiveTimeout: A rank did not come in time.
    """
    group, rank = collective._group, collective.rank
    try:
        plan = group.meet(
            rank,
            Request("split", (), color),
            lambda requests: _plan(collective, requests),
        )
    except BaseException as error:
        group.fail(error)
        raise
    finally:
        group.slots[rank] = None
    if plan.fault is not None:
        raise ValueError(plan.fault)
    assert isinstance(plan, _SplitPlan)
    return _join(collective, plan.places[rank])


def split_nodes(collective: Collective, intra_node_size: int) -> tuple[Collective, Collective]:
    """Splits a group by nodes of contiguous ranks, and across them; see :func:`split`.

    Args:
        collective: This rank's end of the group.
        intra_node_size: Ranks of a node; divides the world size.

    Returns:
        This rank's ends of the group of its node, and of the group of the ranks at the same
        position of all nodes.

    Raises:
        ValueError: The world size is not a multiple of ``intra_node_size``.
    """
    world_size = collective.world_size
    if intra_node_size < 1 or world_size % intra_node_size:
        raise ValueError(
            f"a world of {world_size} ranks cannot be cut into nodes of {intra_node_size}; pass "
            "an intra_node_size that divides the world size"
        )
    node, place = divmod(collective.rank, intra_node_size)
    intra = split(collective, node)
    try:
        return intra, split(collective, place)
    except BaseException:
        intra.close()
        raise


def _plan(collective: Collective, requests: Sequence[Request]) -> Plan:
    """Runs in the last rank to arrive, while all others wait."""
    for rank, request in enumerate(requests):
        if request.name != requests[0].name:
            return Plan(
                fault=f"rank {rank} called {request.name}, rank 0 called {requests[0].name}"
            )
    for rank, request in enumerate(requests):
        if not isinstance(request.detail, int):
            return Plan(fault=f"split: rank {rank} passed color={request.detail!r}; pass an int")
    colors = [request.detail for request in requests]
    places: dict[Any, _Place] = {}
    for color in dict.fromkeys(colors):
        members = tuple(rank for rank, other in enumerate(colors) if other == color)
        group = Group(len(members), collective._group.timeout_s)
        group.barrier.remedy = collective._group.barrier.remedy
        places[color] = _Place(members, group, collective._new_shared(members, group))
        # Before any rank can use the subgroup.
        collective._group.barrier.link(group.barrier, members)
    return _SplitPlan(places=[places[color] for color in colors])


def _join(collective: Collective, place: _Place) -> Collective:
    """Connects this rank to the others of its subgroup, which do the same in their threads."""
    try:
        rank = place.members.index(collective.rank)
        return collective._join_subgroup(rank, place.group, place.shared)
    except BaseException as error:
        place.group.barrier.abort(f"rank {collective.rank} could not join its subgroup: {error}")
        if isinstance(error, RuntimeError) and not isinstance(
            error, (CollectiveAborted, CollectiveTimeout)
        ):
            raise CollectiveAborted(
                f"rank {collective.rank} could not join its subgroup: {error}"
            ) from error
        raise
