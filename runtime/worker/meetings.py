"""Agreement of ranks in lockstep on the steps that the bodies of their own loops make.

The bodies run in the ranks' threads, in one process, so that ranks agree through shared memory: a
rank posts each step before it joins the reduction, and compares the posts of all after it. A rank
whose body makes no step, or that has no samples, waits for the posts of the others. Evaluations
are agreed upon in the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations

from runtime.core.errors import CollectiveAborted, CollectiveTimeout, ReplicaMismatch
from runtime.core.group_gate import GroupGate

_NUM_KEPT = 4
"""Meetings and batches from which on those that all ranks have passed are freed."""


class Meetings:
    """Acts of all ranks of a run, by generation of their group. Thread-safe.

    Args:
        timeout_s: Longest wait for the acts of other ranks, in seconds.
        gate: Of the run.
    """

    def __init__(self, timeout_s: float, gate: GroupGate | None = None) -> None:
        self._timeout_s = timeout_s
        self._gate = gate or GroupGate()
        self._condition = self._gate.condition
        self._groups: dict[int, _Group] = {}

    def post(
        self, generation: int, ranks: Sequence[int], rank: int, number: int, post: Post
    ) -> None:
        """Post an act at a meeting, without waiting.

        Args:
            number: Number of the meeting, which each rank counts from 0 in each group.

        Raises:
            ReplicaMismatch: Another rank makes other steps.
        """
        with self._condition:
            if number == 0:
                for old in [each for each in self._groups if self._gate.is_aborted(each)]:
                    del self._groups[old]
            group = self._group(generation)
            group.places[rank] = number
            # A rank that follows may be meetings ahead of one that has not read the posts yet.
            if len(group.posts) > _NUM_KEPT and len(group.places) == len(ranks):
                passed = min(group.places.values())
                for old in [each for each in group.posts if each < passed]:
                    del group.posts[old]
            posts = group.posts.setdefault(number, {})
            posts[rank] = post
            group.note_end(post)
            if group.num_waiting:
                self._condition.notify_all()
            for other, theirs in (*posts.items(), *group.ended.items()):
                if other != rank and not _agree(post, theirs):
                    raise _mismatch((rank, post), (other, theirs))

    def end_batch(
        self, generation: int, ranks: Sequence[int], rank: int, number: int, made: Post
    ) -> None:
        """Post the end of a batch, without waiting.

        Args:
            number: Number of the rank's next meeting.

        Raises:
            ReplicaMismatch: Another rank makes one more step on this batch.
        """
        with self._condition:
            group = self._group(generation)
            group.ended[rank] = made
            group.note_end(made)
            if len(group.ends) > _NUM_KEPT and len(group.ended) == len(ranks):
                ended = min(post.batch for post in group.ended.values())
                for old in [each for each in group.ends if each < ended]:
                    del group.ends[old]
                    group.opened.discard(old)
            if group.num_waiting:
                self._condition.notify_all()
            for other, theirs in group.posts.get(number, {}).items():
                if other != rank and not _agree(theirs, made):
                    raise _mismatch((rank, made), (other, theirs))

    def follow(self, generation: int, ranks: Sequence[int], number: int, batch: int) -> Post | None:
        """Wait for a step or an evaluation of the other ranks.

        Args:
            generation: The caller's group.
            ranks: The ranks of the group.
            number: Number of the meeting, at which the caller has posted.
            batch: Number of the caller's batch.

        Returns:
            The step or evaluation; the end of this batch on a rank (``NEXT``); or ``None`` if all
            ranks have posted, and none steps.

        Raises:
            CollectiveAborted, CollectiveTimeout: As a collective.
        """
        found: Post | None = None

        def is_met() -> bool:
            nonlocal found
            group = self._group(generation)
            posts = group.posts.get(number, {})
            found = next((post for post in posts.values() if post.act in _JOINED), None)
            if found is None and all(r in posts and posts[r].batch == batch for r in ranks):
                return True  # some may have ended the batch since
            ends = (post for post in group.ended.values() if post.batch >= batch)
            found = found or next(ends, None)
            return found is not None

        self._wait(generation, is_met)
        return found

    def wait_for_all(
        self, generation: int, ranks: Sequence[int], number: int, batch: int
    ) -> tuple[Post, ...]:
        """Wait until all ranks have posted at a meeting, and return the posts.

        Raises:
            CollectiveAborted, CollectiveTimeout: As a collective.
            ReplicaMismatch: Ranks make different steps.
        """
        found: dict[int, Post] = {}

        def is_met() -> bool:
            nonlocal found
            found = dict(self._group(generation).posts.get(number, {}))
            return _all_posted(found, ranks, batch)

        self._wait(generation, is_met)
        for one, other in combinations(found.items(), 2):
            if not _agree(one[1], other[1]):
                raise _mismatch(one, other)
        return tuple(found.values())

    def end_of(self, generation: int, batch: int) -> Post:
        """The last post of a body on a batch that one of them has ended."""
        with self._condition:
            return self._group(generation).ends[batch]

    def any_open(self, generation: int, ranks: Sequence[int], batch: int) -> bool:
        """Wait until all ranks have ended a batch; True if a step is in progress on one of them.

        Raises:
            CollectiveAborted, CollectiveTimeout: As a collective.
        """
        group = self._group(generation)

        def is_met() -> bool:
            ended = [group.ended[rank].batch for rank in ranks if rank in group.ended]
            return len(ended) == len(ranks) and min(ended) >= batch

        self._wait(generation, is_met)
        return batch in group.opened

    def all_step(self, generation: int, number: int) -> bool:
        """True if no rank skips the batch of a meeting at which all have posted."""
        posts = self._group(generation).posts.get(number, {})
        return all(post.act is not Act.SKIP for post in tuple(posts.values()))

    def _group(self, generation: int) -> _Group:
        group = self._groups.get(generation)
        return self._groups.setdefault(generation, _Group()) if group is None else group

    def _wait(self, generation: int, is_met: Callable[[], bool]) -> None:
        with self._condition:
            group = self._group(generation)
            group.num_waiting += 1
            try:
                in_time = self._condition.wait_for(
                    lambda: self._gate.is_aborted(generation) or is_met(), self._timeout_s
                )
            finally:
                group.num_waiting -= 1
            if self._gate.is_aborted(generation):
                raise CollectiveAborted("another rank failed or left its group")
            if not in_time:
                raise CollectiveTimeout(
                    f"the other ranks made no step within {self._timeout_s:g} s: raise "
                    "collective_timeout if the body of the loop takes longer"
                )


class MeetingPlace:
    """The place of one rank in the meetings of its group. In its thread.

    Args:
        ranks: The ranks of the first group.

    Attributes:
        generation, ranks: Its group.
        number: Number of its next meeting.
        batch: Number of its batch: of the step of the plans, since the group was formed.
    """

    def __init__(self, meetings: Meetings, rank: int, ranks: Sequence[int]) -> None:
        self._meetings = meetings
        self._rank = rank
        self.join(0, ranks)

    def join(self, generation: int, ranks: Sequence[int]) -> None:
        self.generation, self.ranks = generation, ranks
        self.number, self.batch = 0, -1

    def post(self, act: Act, made: Sequence[str], num_batches: int, lr: float | None) -> int:
        """Post an act, without waiting; returns the number of the meeting. See :class:`Post`.

        Raises:
            ReplicaMismatch: Another rank makes other steps.
        """
        number, self.number = self.number, self.number + 1
        post = Post(act, self.batch, tuple(made), num_batches, lr)
        self._meetings.post(self.generation, self.ranks, self._rank, number, post)
        return number

    def end_batch(self, made: Sequence[str], lr: float | None, *, is_open: bool) -> None:
        """Post the end of the batch; see :meth:`Meetings.end_batch`."""
        post = Post(Act.NEXT, self.batch, tuple(made), lr=lr, is_open=is_open)
        self._meetings.end_batch(self.generation, self.ranks, self._rank, self.number, post)

    def follow(self, number: int) -> Post | None:
        return self._meetings.follow(self.generation, self.ranks, number, self.batch)

    def end_of_batch(self) -> Post:
        return self._meetings.end_of(self.generation, self.batch)

    def wait_for_all(self, number: int) -> None:
        """See :meth:`Meetings.wait_for_all`."""
        self._meetings.wait_for_all(self.generation, self.ranks, number, self.batch)

    def all_step(self, number: int) -> bool:
        return self._meetings.all_step(self.generation, number)

    def any_open(self) -> bool:
        return self._meetings.any_open(self.generation, self.ranks, self.batch)

    def differs(self, found: Post) -> ReplicaMismatch:
        """The error of an act of another rank that this rank cannot join."""
        return ReplicaMismatch(
            "under SYNC the bodies of all ranks make the same steps on each batch, and these "
            f"differ: a rank made {found}; rank {self._rank} made {Post(Act.NEXT, self.batch - 1)}"
        )


class Act(Enum):
    """The act of a rank at a meeting."""

    STEP = "an optimizer step"
    EVALUATE = "an evaluation"
    SKIP = "no step on the batch"
    FOLLOW = "the step of the others, without samples"
    NEXT = "the next batch"


@dataclass(frozen=True, slots=True)
class Post:
    """The act of one rank.

    Attributes:
        batch: Number of the batch: of the step of the plans, since the group was formed.
        made: Optimizers of the rank's steps on this batch, that of the act included.
        num_batches: Batches in the optimizer step.
        lr: The learning rate that its body has set on this batch.
        is_open: At its end, a step over several batches is in progress.
    """

    act: Act
    batch: int
    made: tuple[str, ...] = ()
    num_batches: int = 1
    lr: float | None = None
    is_open: bool = False

    @property
    def optimizer(self) -> str:
        return self.made[-1]

    def __str__(self) -> str:
        calls = ", ".join(f"step(optimizer={name!r})" if name else "step()" for name in self.made)
        over = f" over {self.num_batches} batches" if self.num_batches > 1 else ""
        then = _THEN.get(self.act, ", then the next batch")
        return f"{calls or 'no step'}{over} in its batch {self.batch}{then}"


_JOINED = Act.STEP, Act.EVALUATE
_THEN = {Act.EVALUATE: ", then evaluate()", Act.STEP: ""}


@dataclass(slots=True)
class _Group:
    """Acts of the ranks of one group.

    Attributes:
        posts: By number of the meeting and rank; freed once all ranks have passed the meeting.
        places: The last meeting at which each rank has posted.
        ended: The last batch that each rank has ended.
        ends: The last post of a body on each batch; freed once all ranks have ended it.
        opened: The batches of these at whose end a step over several is in progress on any rank.
    """

    posts: dict[int, dict[int, Post]] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    ended: dict[int, Post] = field(default_factory=dict)
    ends: dict[int, Post] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)
    num_waiting: int = 0

    def note_end(self, post: Post) -> None:
        """Keep a post that may be the last one of a body on its batch."""
        if post.act in (Act.SKIP, Act.NEXT):
            self.ends[post.batch] = post
        if post.is_open:
            self.opened.add(post.batch)


def _all_posted(posts: dict[int, Post], ranks: Sequence[int], batch: int) -> bool:
    """True if all ranks have posted; one without samples may still be at an earlier batch."""
    return len(posts) == len(ranks) and all(post.batch >= batch for post in posts.values())


def _agree(post: Post, other: Post) -> bool:
    """True if a rank may step, or skip its batch, while another one acts so."""
    if Act.FOLLOW in (post.act, other.act):
        return True
    if other.act is Act.NEXT:
        return other.batch < post.batch
    if post.act is other.act and post.act in _JOINED:
        mine = (post.batch, post.made, post.num_batches)
        return mine == (other.batch, other.made, other.num_batches)
    if not {post.act, other.act} <= {Act.STEP, Act.SKIP}:
        return False
    # One of them skips its batch, which it may do at the batch's first meeting only.
    return post.batch == other.batch and len(post.made) <= 1 and len(other.made) <= 1


def _mismatch(one: tuple[int, Post], other: tuple[int, Post]) -> ReplicaMismatch:
    (first, a), (second, b) = sorted((one, other), key=lambda each: each[0])
    return ReplicaMismatch(
        "under SYNC the bodies of all ranks make the same steps on each batch, and these differ: "
        f"rank {first} made {a}; rank {second} made {b}"
    )


class LoopPeers:
    """Shared by the workers of a run with an own loop. Thread-safe.

    Args:
        meetings: Agreement of ranks in lockstep on the steps of their bodies.
        save: Requests a checkpoint; ``None``: the run has no ``checkpoint_dir``.
        is_member: True if the run is one machine's part of a cluster.
    """

    def __init__(
        self,
        num_ranks: int,
        meetings: Meetings,
        save: Callable[[], None] | None = None,
        *,
        is_member: bool = False,
    ) -> None:
        self.meetings = meetings
        self.is_member = is_member
        self._save = save
        self._saved_at: int | None = None
        self._lock = threading.Lock()
        self._live = set(range(num_ranks))
        self._left: dict[int, int] = {}  # the last epoch that each rank has left
        self._granted: dict[tuple[int, int], tuple[int, tuple[int, int] | None]] = {}

    def save(self, step: int | None) -> None:
        """Request a checkpoint, under lockstep once for all ranks.

        Args:
            step: The step of all ranks; ``None``: they are not in lockstep.
        """
        if self._save is None:
            raise RuntimeError("worker.save() needs checkpoint_dir(path) on the builder")
        with self._lock:
            is_new = step is None or step != self._saved_at
            self._saved_at = step
        if is_new:
            self._save()

    def leave(self, rank: int) -> None:
        with self._lock:
            self._live.discard(rank)

    def leave_epoch(self, rank: int, epoch: int) -> None:
        """The body of a rank has left an epoch."""
        with self._lock:
            self._left[rank] = epoch

    def first(self, ranks: Collection[int], epoch: int) -> int:
        """The lowest of these ranks that is alive; without any, of those in an epoch."""
        with self._lock:
            in_epoch = {rank for rank in self._live if self._left.get(rank, -1) < epoch}
            return min(self._live.intersection(ranks) or in_epoch or self._live, default=0)

    def grant(
        self, key: tuple[int, int], multiple: int, before: int, at: tuple[int, int]
    ) -> tuple[int, bool]:
        """Grant a multiple of steps to the first batch that asks for it, under lockstep on all
        ranks.

        Args:
            key: The rank, or -1 for all, and the number of steps.
            multiple: The multiple that the steps have reached.
            before: The multiple at the start of the run.
            at: Number of the batch.

        Returns:
            The last multiple that was granted, and True if it was to this batch.
        """
        with self._lock:
            granted, batch = self._granted.get(key, (before, None))
            if multiple > granted:
                granted, batch = self._granted[key] = multiple, at
            return granted, batch == at
