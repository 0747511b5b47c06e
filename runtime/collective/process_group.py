"""Collectives over a PyTorch process group, one for each thread and none global."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from runtime.collective.base import (
    BUCKETED_MEAN,
    LOW_PRECISION,
    BucketedMean,
    Collective,
    CollectiveWork,
    Group,
    Meeting,
    Plan,
    ReduceOp,
    Request,
    pairs_of,
)
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, mark_failed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Any: the type stubs leave out most of the names below.
_c10d: Any = torch.distributed

EndT = TypeVar("EndT", bound=Collective)

_LOOK_S = 0.05
"""Interval at which a rank that waits for parts checks for an abort of the group."""
EXIT_TIMEOUT_S = 5.0
"""Longest time for which the exit of the process waits for backends that are being freed."""

FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Number of collectives that PyTorch's flight recorder keeps: its name, and the older one."""


class ProcessGroupCollective(Collective):
    """One rank of a process group whose ranks are threads of this process.

    Before every exchange the ranks meet at ``gate``, which an abort breaks at once. A rank
    that dies inside the exchange delays its peers by at most ``timeout_s``.

    The constructor blocks until every rank has connected; use
    :func:`create_process_groups`.

    Args:
        store: Shared by the ranks; the connection is set up through it.
        prefix: Name of the group in the store; fresh for every group.
        timeout_s: Limit of one exchange, and of the connection.
        gate: Shared by the ranks.
    """

    kind = "gloo"
    # All float32 copies of a request exist at once.
    coalesced_bytes = 100 * 2**20

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        prefix: str,
        timeout_s: float,
        gate: Group,
    ) -> None:
        super().__init__(rank, world_size, gate)
        _turn_off_flight_recorder()
        self._timeout_s = timeout_s
        self._bucketed_mean: ProcessGroupBucketedMean | None = None
        prefixed = _c10d.PrefixStore(prefix, store)
        self._owner = BackendOwner(lambda: self._connect(prefixed), f"collective-{rank}")
        self._backend: Any = self._owner.backend(self)

    def _connect(self, store: Store) -> Any:
        """The backend, connected to the other ranks'."""
        return _connect_gloo(self.rank, self.world_size, store, self._timeout_s)

    def _new_shared(self, members: Sequence[int], group: Group) -> Any:
        return new_store(group.timeout_s)

    def _join_subgroup(self, rank: int, group: Group, shared: Any) -> Collective:
        return ProcessGroupCollective(
            rank, group.barrier.parties, shared, "subgroup", group.timeout_s, group
        )

    def _options(self, kind: Any) -> Any:
        return kind()

    def _release(self) -> None:
        self._backend = None
        broken_off, self._bucketed_mean = self._bucketed_mean, None
        if broken_off is not None:
            broken_off.drop_sent()
        self._owner.release()
        if broken_off is None:
            self._owner.join(None)
        # Else freeing waits for parts in flight, which ends once the peers have freed theirs.

    def wait_closed(self, timeout_s: float) -> bool:
        """See :meth:`Collective.wait_closed`."""
        return self._owner.join(timeout_s)

    def _placement_fault(self, tensor: Tensor) -> str | None:
        if tensor.device.type == "cpu":
            return None
        return f"passed a tensor on {tensor.device}; GLOO takes CPU tensors, pass tensor.cpu()"

    def bucketed_mean(self, weight: float, *, tally: float = 0.0) -> BucketedMean:
        """Like :meth:`Collective.bucketed_mean`; buckets are sent as soon as they are added.

        The first one waits until every rank has added its first.
        """
        self._bucketed_mean = ProcessGroupBucketedMean(self, weight, tally)
        return self._bucketed_mean

    def _take_part(self, request: Request, plan: Plan) -> None:
        with self._named_faults(request.name):
            staged = self._stage(request)
            if plan.factors is not None:
                staged.scale_(plan.factors[self.rank])
            for issue in staged.issues:
                issue().wait()
            staged.finish()

    @contextmanager
    def _named_faults(self, name: str, start: float | None = None) -> Iterator[None]:
        """Context of an exchange that began at ``start``; converts the backend's errors."""
        start = time.monotonic() if start is None else start
        try:
            with torch.no_grad():
                yield
        except RuntimeError as error:
            elapsed_s = time.monotonic() - start
            if self._group.barrier.aborted:
                raise CollectiveAborted(f"rank {self.rank}: {name} failed") from error
            if elapsed_s >= 0.95 * self._timeout_s:
                raise mark_failed(
                    CollectiveTimeout(
                        f"rank {self.rank}: {name} did not end within {self._timeout_s:g} s; the "
                        f"group is aborted: {self._group.barrier.remedy}"
                    )
                ) from error
            self.abort()
            raise mark_failed(
                CollectiveAborted(f"rank {self.rank}: {name} failed: {error}")
            ) from error

    def _stage(self, request: Request) -> Staged:
        """Allocate the memory of a valid request and list its operations, without issuing them."""
        staged = Staged()
        op = request.detail
        match request.name:
            case "all_reduce_":
                assert isinstance(op, ReduceOp)
                for tensor in request.tensors:
                    if tensor.numel():
                        self._stage_all_reduce(staged, tensor.view(-1), op)
            case "reduce_scatter_into":
                assert isinstance(op, ReduceOp)
                for output, input in pairs_of(request.tensors):
                    if input.numel():
                        self._stage_reduce_scatter(staged, output.view(-1), input.view(-1), op)
            case "all_gather_into":
                for output, input in pairs_of(request.tensors):
                    if input.numel():
                        self._stage_all_gather(staged, output.view(-1), input.view(-1))
            case "broadcast_":
                assert isinstance(op, int)
                options = self._options(_c10d.BroadcastOptions)
                options.rootRank = op
                whole = [_as_bytes(request.tensors[0])]
                staged.issues.append(lambda: self._connected().broadcast(whole, options))
            case _:
                for tensor in request.tensors:
                    if tensor.numel():
                        self._stage_sum(staged, tensor.view(-1), is_mean=True)
        return staged

    def _send(self, flat: Tensor, factor: float) -> Any:
        """Start the weighted sum of a flat tensor; returns an item for :meth:`_arrived`."""
        wire = scale_(as_summed(flat), factor)
        return self._begin_sum(wire), wire, flat

    def _arrived(self, sent: list[Any]) -> None:
        """Wait for the sums started by :meth:`_send`, and drop them, also on an error."""
        try:
            for index in range(len(sent)):
                self._await(sent[index][0])
                wire, flat = sent[index][1:]
                if wire is not flat:
                    flat.copy_(wire)
        finally:
            # In the thread that made them: elsewhere free-threaded CPython would only queue it.
            sent.clear()

    def _follow(self, name: str, abort_flag: Tensor) -> CollectiveWork:
        """Completion of the exchange in the current stream, without a wait of the host."""
        raise NotImplementedError(f"over {self.kind} the host waits")

    def _await(self, work: Any) -> None:
        look = timedelta(seconds=_LOOK_S)
        try:
            while True:
                try:
                    work.wait(look)
                    return
                except RuntimeError:
                    if work.is_completed():  # just now, or it has failed
                        work.wait()
                        return
                self._group.require_intact()
        finally:
            del work  # else the traceback of an error would keep the connection open

    def _connected(self) -> Any:
        backend = self._backend  # once: another thread may close this end
        if backend is None:
            raise CollectiveAborted(f"rank {self.rank} has left the group")
        return backend

    def _stage_sum(self, staged: Staged, flat: Tensor, *, is_mean: bool = False) -> Tensor:
        """Stage the sum of a flat tensor over the ranks, in place; returns the tensor summed."""
        wire = as_summed(flat)
        if is_mean:
            staged.scaled.append(wire)
        staged.issues.append(lambda: self._begin_sum(wire))
        if wire is not flat:
            staged.copies.append((flat, wire))
        return wire

    def _stage_all_reduce(self, staged: Staged, flat: Tensor, op: ReduceOp) -> None:
        if op in (ReduceOp.MAX, ReduceOp.MIN):
            # Backends may drop a NaN; torch.amax and torch.amin keep it.
            gathered = flat.new_empty(self.world_size * flat.numel())
            self._stage_all_gather(staged, gathered, flat)
            reduce = torch.amax if op is ReduceOp.MAX else torch.amin
            staged.reductions.append(
                lambda: reduce(gathered.view(self.world_size, -1), dim=0, out=flat)
            )
            return
        wire = self._stage_sum(staged, flat)
        if op is ReduceOp.AVG:
            staged.reductions.append(lambda: wire.div_(self.world_size))

    def _stage_reduce_scatter(
        self, staged: Staged, output: Tensor, input: Tensor, op: ReduceOp
    ) -> None:
        """Reduce everything and keep the rank's part, since Gloo has no reduce-scatter."""
        whole = input.clone()
        self._stage_all_reduce(staged, whole, op)
        staged.copies.append((output, whole.view(self.world_size, -1)[self.rank]))

    def _stage_all_gather(self, staged: Staged, output: Tensor, input: Tensor) -> None:
        options = self._options(_c10d.distributed_c10d.AllgatherOptions)
        whole, part = _as_bytes(output), _as_bytes(input)
        staged.issues.append(lambda: self._connected()._allgather_base(whole, part, options))

    def _begin_sum(self, wire: Tensor) -> Any:
        options = self._options(_c10d.AllreduceOptions)
        options.reduceOp = _c10d.ReduceOp.SUM
        return self._connected().allreduce([wire], options)


@dataclass(slots=True)
class Staged:
    """One rank's part of an exchange: all memory is allocated, no operation is issued yet.

    The order is: scale, issue, reduce, copy.

    Attributes:
        scaled: Parts of a weighted mean, to be multiplied by the rank's factor.
        issues: Operations of the backend; each returns its work.
    """

    scaled: list[Tensor] = field(default_factory=list)
    issues: list[Callable[[], Any]] = field(default_factory=list)
    reductions: list[Callable[[], object]] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def scale_(self, factor: float) -> None:
        """Multiply this rank's parts of a mean by its factor."""
        for wire in self.scaled:
            scale_(wire, factor)

    def finish(self) -> None:
        """Compute the results and copy them to their targets."""
        for reduction in self.reductions:
            reduction()
        for target, source in self.copies:
            target.copy_(source)


class ProcessGroupBucketedMean(BucketedMean):
    """Sends each part as it is added, and waits at the end.

    The ranks meet once, before the first part, so that nothing is sent to a rank that does not
    arrive; one that dies later delays the others by at most the timeout of an exchange.
    """

    def __init__(self, collective: ProcessGroupCollective, weight: float, tally: float) -> None:
        super().__init__(collective, weight, tally)
        self._end: ProcessGroupCollective = collective
        self._sent: list[Any] = []
        self._total: float | None = None
        self._start = 0.0

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Send a part. The first one waits for the other ranks."""
        end = self._end
        if self._total is None:
            request = Request(BUCKETED_MEAN, weight=self._weight, tally=self._tally)
            self._total = end._run(request)
            self._start = time.monotonic()
        if self._total == 0:
            return
        factor = self._weight / self._total
        with self._failing():
            for tensor in tensors:
                if tensor.numel():
                    self._sent.append(end._send(tensor.view(-1), factor))

    def end(self) -> float:
        """Wait for all buckets sent."""
        end, total = self._end, self._begun()
        meeting = None if end.lane is None else Meeting(end.lane)
        if meeting is not None:
            meeting.met(is_long=True)
        try:
            with self._failing():
                end._arrived(self._sent)
        finally:
            if meeting is not None:
                meeting.over()
        self._sent.clear()
        end._bucketed_mean = None
        return total

    def end_async(self, abort_flag: Tensor) -> tuple[float, CollectiveWork | None]:
        """See :meth:`BucketedMean.end_async`."""
        end, total = self._end, self._begun()
        if not (end.host_runs_ahead and self._sent):
            return self.end(), None
        with self._failing():
            outcome = end._follow(BUCKETED_MEAN, abort_flag)
        self._sent.clear()
        end._bucketed_mean = None
        return total, outcome

    def _begun(self) -> float:
        """The sum of all ranks' weights; meets the other ranks if no part was added."""
        if self._total is None:
            self.add(())
        assert self._total is not None
        return self._total

    def drop_sent(self) -> None:
        """Free the parts sent; their connections stay open as long as they are referenced."""
        self._sent.clear()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            with self._end._named_faults(BUCKETED_MEAN, self._start):
                yield
        except BaseException as error:
            self._end._group.fail(error)
            raise


class BackendOwner:
    """Thread that creates a backend and drops the last reference to it.

    The backend's destructor closes sockets and joins threads, and can wait for other ranks. On
    free-threaded CPython it runs in the thread that created the object, or, once that has ended,
    in any later thread that has the same identifier: there the ranks would wait for each other.

    Blocks until the backend is created.

    Args:
        connect: Returns the backend; called once, in the thread.
        name: Name of the thread.
    """

    def __init__(self, connect: Callable[[], Any], name: str) -> None:
        self._held: list[Any] = []
        self._error: list[BaseException] = []
        # A reentrant queue: a finalizer may run in this thread while it begins to wait.
        self._released: queue.SimpleQueue[None] = queue.SimpleQueue()
        connected = threading.Event()
        # The thread references neither this object nor, after the call, that of ``connect``.
        args = ([connect], self._held, self._error, connected, self._released)
        self._thread = threading.Thread(target=_own_backend, args=args, name=name, daemon=True)
        self._thread.start()
        connected.wait()

    def backend(self, user: object) -> Any:
        """The backend.

        Args:
            user: Once it is garbage, the thread ends as by :meth:`release`.

        Raises:
            BaseException: The error of ``connect``.
        """
        if self._error:
            raise self._error.pop()
        weakref.finalize(user, self.release).atexit = False
        return self._held[0]

    def release(self) -> None:
        """Let the thread drop its reference, and end. The process's exit waits. Idempotent."""
        if self._thread.is_alive():
            _RELEASED.add(self._thread)
        self._released.put(None)

    def join(self, timeout_s: float | None) -> bool:
        """Wait until the backend is freed, unless others refer to it; returns False on timeout."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def _own_backend(
    connect: list[Callable[[], Any]],
    held: list[Any],
    errors: list[BaseException],
    connected: threading.Event,
    released: queue.SimpleQueue[None],
) -> None:
    try:
        held.append(connect.pop()())
    except BaseException as error:
        errors.append(error)
        return
    finally:
        connected.set()
    released.get()
    held.clear()
    _RELEASED.discard(threading.current_thread())


_RELEASED: set[threading.Thread] = set()
"""Threads that free a backend. The interpreter's exit would end one within the destructor, which
terminates the process with an error."""


@atexit.register
def _wait_until_freed() -> None:
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for thread in list(_RELEASED):
        thread.join(max(deadline - time.monotonic(), 0.0))


def create_process_groups(world_size: int, timeout_s: float) -> list[ProcessGroupCollective]:
    """Connects the ranks of one group over Gloo; see :func:`connect_ranks`."""
    gate = Group(world_size, timeout_s)
    store = _c10d.HashStore()

    def connect(rank: int) -> ProcessGroupCollective:
        return ProcessGroupCollective(rank, world_size, store, "collective", timeout_s, gate)

    return connect_ranks(connect, world_size, timeout_s)


def new_store(timeout_s: float) -> Store:
    """A store through which the ranks of one group connect."""
    store: Store = _c10d.HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def connect_ranks(
    connect: Callable[[int], EndT],
    world_size: int,
    timeout_s: float,
    give_up: Callable[[], None] = lambda: None,
) -> list[EndT]:
    """Connects the ranks of one group, each in a thread that ends with this call.

    Blocks until all have connected, or failed.

    Args:
        connect: Returns a rank's connected collective; called in that rank's thread.
        timeout_s: Limit of the connection, in seconds.
        give_up: Called on the first failure, from any thread, and on timeout.

    Raises:
        CollectiveAborted: A rank could not connect; the cause is the original exception.
        CollectiveTimeout: A rank did not connect within ``timeout_s`` seconds.
    """
    ends: list[EndT | None] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            ends[rank] = connect(rank)
        except BaseException as error:
            errors.append((rank, error))
            give_up()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"collective-connect-{rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    # The backend's own timeout ends the threads; the margin is for when it does not.
    deadline = time.monotonic() + timeout_s + 5.0
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    connected = [end for end in ends if end is not None]
    if len(connected) == world_size:
        return connected
    give_up()
    _close_all(connected)
    if not errors:
        missing = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        raise CollectiveTimeout(f"ranks {missing} did not connect within {timeout_s:g} s")
    # The first failure; the others are its consequence.
    rank, error = errors[0]
    if isinstance(error, CollectiveTimeout):
        raise error
    raise CollectiveAborted(f"rank {rank} could not connect to its peers: {error}") from error


def _close_all(ends: Sequence[Collective]) -> None:
    for end in ends:
        end.close()


def _turn_off_flight_recorder() -> None:
    """Disable PyTorch's flight recorder, which is unsafe if ranks are threads of one process.

    Up to PyTorch 2.11 it registers a new group without its lock (pytorch#179449), and the process
    crashes. A size set by the user, under either name, is kept. PyTorch reads the size once, at
    the first collective of the process.
    """
    if not any(name in os.environ for name in FLIGHT_RECORDER):
        os.environ[FLIGHT_RECORDER[0]] = "0"


def _connect_gloo(rank: int, world_size: int, store: Store, timeout_s: float) -> Any:
    """Gloo over the loopback interface; needs no host name and no network."""
    backend = _c10d.ProcessGroupGloo
    options = backend._Options()
    options._devices = [backend.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1  # one exchange at a time
    return backend(store, rank, world_size, options)


def as_summed(tensor: Tensor) -> Tensor:
    """A tensor in the dtype of summation; the tensor itself if it has that dtype."""
    if tensor.dtype in LOW_PRECISION:
        return tensor.float()
    return (
        tensor.to(torch.int32) if tensor.dtype is torch.int16 else tensor
    )  # unsupported by the backends


def scale_(wire: Tensor, factor: float) -> Tensor:
    """Multiply a rank's part of a weighted mean by its factor, in place."""
    # A factor of 0 must not turn NaN and infinity into NaN.
    return wire.mul_(factor) if factor else wire.zero_()


def _as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes, for transfers without computation: backends lack some dtypes."""
    return tensor.view(-1).view(torch.uint8)
