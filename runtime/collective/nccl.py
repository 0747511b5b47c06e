"""Collectives over NCCL: one process group for each rank, launched for all ranks by one thread."""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from runtime.collective.base import (
    BUCKETED_MEAN,
    BucketedMean,
    Collective,
    CollectiveWork,
    Group,
    Plan,
    ReduceOp,
    Request,
    own_fault,
)
from runtime.collective.process_group import (
    ProcessGroupBucketedMean,
    ProcessGroupCollective,
    Staged,
    as_summed,
    connect_ranks,
    new_store,
)
from runtime.collective.thread import Scratch, reduce_at_once, work_of
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, GpuWorkerError, mark_failed
from runtime.device import capture_gate, cuda_api
from runtime.device.cuda_api import Event, Stream
from runtime.device.timing import EventPool

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

# Any: the type stubs leave out most of the names below.
_c10d: Any = torch.distributed

ENVIRONMENT = {
    # Keep PyTorch's watchdog from ending the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Connect when the group is created, so that a launch allocates nothing.
    "NCCL_RUNTIME_CONNECT": "0",
}
"""Read when a group is created. Values set by the user are kept."""

SHARED_GPU_ENVIRONMENT = {"CUDA_MODULE_LOADING": "EAGER"}
"""For ranks that share a GPU: loading a kernel lazily may wait for the device, where kernels of one
rank wait for the other's launch. Read when CUDA is initialised; PyTorch then sets ``LAZY`` if
it is unset."""

END_S = 10.0
"""Longest wait for the communicators of a group to end, by the last rank to leave it and by a new
group on the same GPUs."""
ABORT_GRACE_S = 5.0
"""Longest wait for a kernel to end after its communicator was aborted."""
_LAUNCH_GRACE_S = 1.0
"""Longest wait of an abort for a launch in progress."""
_QUERY_GRACE_S = 1.0
"""Longest wait of an abort for the answer to a query of the device."""
_WATCH_S = 0.05
"""Interval at which exchanges in flight are inspected."""
_IDLE_LOOKS = 20
"""Looks without an exchange after which the watching thread sleeps: to wake it for each exchange
would take the interpreter lock from the ranks."""
_MARGIN_S = 0.5
"""Delay after which the group's thread aborts a late exchange that the waiting rank has not."""
_SPIN_S = 150e-6
"""Time for which a wait for the device polls without naps, which last longer than requested: on an
H200 an exchange of two ranks took 517 us in place of 646, in one run of each."""
_FIRST_NAP_S = 20e-6
_LONGEST_NAP_S = 250e-6

_incarnations = itertools.count()


class NcclCollective(ProcessGroupCollective):
    """One rank of a group over NCCL.

    Each rank allocates the memory of an exchange and then meets the others. The last rank to arrive
    launches the exchange for all ranks while their threads are parked: inside one NCCL group, each
    part on the stream that is current in the rank's own thread. So no rank's kernel runs without
    its peers while a thread of the group calls the driver, and exchanges of several groups are
    launched in the same order on all devices. Other threads of the process make calls that may
    wait for a device inside ``CaptureGate.driver_call``.

    The rank then polls an event behind the exchange until it is complete or the timeout expires,
    upon which all communicators are aborted, and every rank raises. A result is used only if the
    group was not aborted by then, since an aborted exchange completes without an error.

    CPU tensors, which are small, are exchanged at the meeting.

    Args:
        store: Shared by the ranks; the connection is set up through it.
        prefix: Name of the group in the store; fresh for every group.
        timeout_s: Limit of one exchange, and of the connection.
        gate: Shared by the ranks.
        devices: The GPU of each rank.
        communicators: Shared by the ranks.
    """

    kind = "nccl"

    def __init__(
        self,
        rank: int,
        store: Store,
        prefix: str,
        timeout_s: float,
        gate: Group,
        devices: Sequence[torch.device],
        communicators: Communicators,
    ) -> None:
        self._api = cuda_api.API
        self._devices = devices
        self._device = devices[rank]
        self._communicators = communicators
        self._event: Any = None
        self._read_host: Callable[[Tensor, Tensor], None] | None = None
        self._events = EventPool(self._api)
        self._first_sent: Event | None = None  # in front of the exchange in progress
        self._begun: dict[Stream, Event] = {}  # in front of the last exchange of each stream
        super().__init__(rank, len(devices), store, prefix, timeout_s, gate)

    def _connect(self, store: Store) -> Any:
        device = self._device
        with self._api.on_device(device):
            # This thread is new: the driver has no context in it that a module could be loaded to.
            self._api.make_context_current(device)
            self._event = self._api.new_event()
            self._read_host = self._load_reader()
            backend = new_backend(store, self.rank, self.world_size, self._timeout_s)
            self._communicators.add(self.rank, backend, self._begun)
            # No rank connects before all are ready: connecting cannot be aborted. And a
            # rank without the kernel would wait on the host where its peers continue.
            self.host_runs_ahead = self.agree("joins", capable=self._read_host is not None)
            backend.eager_connect_single_device(device)
        return backend

    def _new_shared(self, members: Sequence[int], group: Group) -> Any:
        devices = [self._devices[member] for member in members]
        prefix = f"nccl-{next(_incarnations)}"
        return new_store(group.timeout_s), prefix, devices, Communicators(group, devices)

    def _join_subgroup(self, rank: int, group: Group, shared: Any) -> Collective:
        store, prefix, devices, communicators = shared
        try:
            return NcclCollective(
                rank, store, prefix, group.timeout_s, group, devices, communicators
            )
        except BaseException as error:
            # As :meth:`abort`: ranks that have connected must not use an aborted exchange.
            group.barrier.abort(f"rank {self.rank} could not join its subgroup: {error}")
            communicators.abort()
            raise

    def _load_reader(self) -> Callable[[Tensor, Tensor], None] | None:
        try:
            reader = self._api.host_reader()
            if reader is None:
                logger.info(
                    "rank %d: the host waits for each reduction: ROCm has no kernel here that "
                    "would see an abort on the device",
                    self.rank,
                )
            return reader
        except (AttributeError, OSError, RuntimeError) as error:
            logger.warning(
                "rank %d: the host waits for each reduction, on every rank, since the kernel that "
                "would see an abort on the device cannot be loaded: %s",
                self.rank,
                error,
            )
            return None

    def abort(self) -> None:
        """Like :meth:`Collective.abort`; the exchange in progress ends on every rank."""
        super().abort()
        self._communicators.abort()

    def check(self) -> None:
        """Like :meth:`Collective.check`; also raises for errors of the backend."""
        super().check()
        error = self._backend_error()
        if error is not None:
            self.abort()
            raise mark_failed(CollectiveAborted(f"rank {self.rank}: NCCL has failed: {error}"))

    def bucketed_mean(self, weight: float, *, tally: float = 0.0) -> BucketedMean:
        """Like :meth:`Collective.bucketed_mean`; buckets are launched once all ranks added them."""
        self._bucketed_mean = NcclBucketedMean(self, weight, tally)
        return self._bucketed_mean

    def _backend_error(self) -> str | None:
        # Not every build of PyTorch has it.
        get_error = getattr(self._backend, "get_error", None)
        error = getattr(get_error() if get_error else None, "name", "SUCCESS")
        return None if error == "SUCCESS" else str(error)

    def _require_sound(self, name: str) -> None:
        """Check that the backend has not aborted by itself, which no stream would show.

        Raises:
            RuntimeError: It may have, after the optimizer step: the replica is lost.
        """
        error = self._backend_error()
        if error is not None:
            self.abort()
            raise RuntimeError(
                f"rank {self.rank}: NCCL has failed during {name}, whose result is in use: "
                f"{error}; resume from a checkpoint"
            )

    def _release(self) -> None:
        super()._release()
        if self._group.barrier.aborted:
            self._communicators.abort()
        self._communicators.leave(self.rank)

    def _placement_fault(self, tensor: Tensor) -> str | None:
        device = self._api.device_of(tensor)
        return None if device.type in ("cpu", "cuda") else f"passed a tensor on {device}"

    # -- an exchange: stage, meet, launch, finish -----------------------------------------

    def _run(self, request: Request) -> float:
        staged: LaunchPart | None = None
        try:
            try:
                staged = self._staged(request)
            except BaseException as error:
                self._group.fail(error)
                raise
            return super()._run(request if staged is None else request._replace(staged=staged))
        except BaseException:
            if staged is not None and staged.in_flight and request.name != BUCKETED_MEAN:
                # Aborted at the meeting after the launch: the exchange still writes to tensors.
                self._communicators.abort()
                with self._api.on_device(self._device):
                    self._api.record(self._event)
                    self._await_event(self._event)
            raise

    def _staged(self, request: Request) -> LaunchPart | None:
        """This rank's part if its tensors are valid and on its GPU; allocates on this stream."""
        if own_fault(request, self.world_size, self._placement_fault) is not None:
            return None  # every rank raises the error at the meeting
        if not any(tensor.numel() for tensor in request.tensors) or any(
            self._api.device_of(tensor) != self._device for tensor in request.tensors
        ):
            return None
        with self._named_faults(request.name):
            if request.name == BUCKETED_MEAN and self._first_sent is None:
                self._first_sent = self._events.record()
            return LaunchPart(self, self._stage(request))

    def _plan(self, requests: Sequence[Request]) -> Plan:
        plan = super()._plan(requests)
        if plan.fault is not None:
            return plan
        fault, on_cpu = self._check_placement(requests)
        if fault is not None:
            return Plan(fault=f"{requests[0].name}: {fault}")
        if plan.done:
            return plan
        if on_cpu:
            work = work_of(requests, at_once=True)
            return reduce_at_once(self._group, self.rank, work, plan, Scratch())
        self._launch(requests, plan)
        return plan

    def _check_placement(self, requests: Sequence[Request]) -> tuple[str | None, bool]:
        """Returns an error of placement, if any, and True if all tensors are on the CPU."""
        kinds = set()
        for rank, request in enumerate(requests):
            for tensor in request.tensors:
                device = self._api.device_of(tensor)
                kinds.add(device.type)
                if device.type == "cuda" and device != self._devices[rank]:
                    return f"rank {rank} passed a tensor on {device}, not its own device", False
        if len(kinds) > 1:
            return "some tensors are on the CPU, others on a GPU; pass all on one of them", False
        return None, kinds == {"cpu"}

    def _launch(self, requests: Sequence[Request], plan: Plan) -> None:
        """Launch an exchange on every rank's stream; their threads are parked.

        An abort wakes them early: they wait for ``writing`` before they leave.
        """
        parts: list[LaunchPart] = [request.staged for request in requests]
        with self._group.writing[self.rank], self._named_faults(requests[0].name):
            self._group.require_intact()
            if plan.factors is not None:
                # Not in the NCCL group below: a kernel's first launch may wait for its device.
                for part, factor in zip(parts, plan.factors, strict=True):
                    with part.current():
                        part.staged.scale_(factor)
            with capture_gate.GATE.launching(), self._communicators.launching():
                backend = self._connected()
                backend._group_start()
                try:
                    for part in parts:
                        part.begin()
                        with part.current():
                            for issue in part.staged.issues:
                                issue()
                finally:
                    backend._group_end()

    def _take_part(self, request: Request, plan: Plan) -> None:
        part: LaunchPart = request.staged
        with self._named_faults(request.name):
            part.staged.finish()
            if request.name == BUCKETED_MEAN:  # its end is awaited once, after the last part
                return
            try:
                self._await_end(request.name, time.monotonic() + self._timeout_s)
            finally:
                part.in_flight = False
        self.check()  # an aborted exchange completes, with garbage

    @contextmanager
    def _named_faults(self, name: str, start: float | None = None) -> Iterator[None]:
        try:
            with self._api.on_device(self._device), torch.no_grad():
                yield
        except (CollectiveAborted, CollectiveTimeout):
            raise
        except torch.OutOfMemoryError:
            self.abort()
            raise  # no other rank would report it
        except RuntimeError as error:
            named = CollectiveAborted(f"rank {self.rank}: {name} failed: {error}")
            if not self._group.barrier.aborted:
                mark_failed(named)
            self.abort()
            raise named from error

    def _stage_reduce_scatter(
        self, staged: Staged, output: Tensor, input: Tensor, op: ReduceOp
    ) -> None:
        """Sends each rank only its part, without a copy of float32 or float64 input.

        ``ProcessGroupNCCL::_reduce_scatter_base`` is one ``ncclReduceScatter``.
        """
        if op in (ReduceOp.MAX, ReduceOp.MIN):  # NCCL's drop NaN
            super()._stage_reduce_scatter(staged, output, input, op)
            return
        whole = as_summed(input)
        part = output if whole is input else whole.new_empty(output.numel())
        options = self._options(_c10d.ReduceScatterOptions)
        options.reduceOp = _c10d.ReduceOp.SUM
        staged.issues.append(lambda: self._connected()._reduce_scatter_base(part, whole, options))
        if op is ReduceOp.AVG:
            staged.reductions.append(lambda: part.div_(self.world_size))
        if part is not output:
            staged.copies.append((output, part))

    def _options(self, kind: Any) -> Any:
        options = kind()
        options.asyncOp = False  # on the current stream, which keeps its order
        return options

    # -- the end of an exchange -----------------------------------------------------------

    def _arrived(self, sent: Sequence[object]) -> None:
        """Wait for all parts launched on the current stream."""
        begun = self._take_first_sent()
        if begun is None:  # the weights sum to 0, or all parts were on the CPU
            return
        self._await_end(BUCKETED_MEAN, time.monotonic() + self._timeout_s)
        self._events.give_back(begun)
        self.check()

    def _take_first_sent(self) -> Event | None:
        begun, self._first_sent = self._first_sent, None
        return begun

    def _follow(self, name: str, abort_flag: Tensor) -> CollectiveWork:
        """See :meth:`ProcessGroupCollective._follow`; the group's thread enforces the timeout."""
        assert self._read_host is not None
        seen = torch.empty_like(abort_flag)
        self._read_host(abort_flag, self._communicators.abort_flag)
        self._api.copy(seen, abort_flag)
        exchange = WatchedExchange(self, name, self._take_first_sent(), self._events.record(), seen)
        self._communicators.watch(exchange)
        return exchange

    def _await_end(self, name: str, deadline: float) -> None:
        """Wait for all work in the current stream; past the deadline abort, and wait for its end.

        Raises:
            CollectiveTimeout: The deadline has passed, for this rank or the group's thread.
        """
        self._api.record(self._event)
        wait = HostWait(name, deadline)

        def give_up() -> None:
            wait.is_late = True
            self._group.barrier.abort(f"{name} did not end within {self._timeout_s:g} s")

        self._communicators.expect(wait)
        try:
            self._await_event(self._event, deadline, give_up)
        finally:
            self._communicators.forget(wait)
        if wait.is_late:
            raise self._lateness(name)

    def _await_event(
        self,
        event: Event,
        deadline: float = math.inf,
        give_up: Callable[[], None] = lambda: None,
    ) -> bool:
        """Wait for an event; after an abort, for at most ``ABORT_GRACE_S`` more.

        Args:
            event: Recorded behind an exchange.
            deadline: Time of the abort by this rank.
            give_up: Called then; aborts the group.

        Returns:
            True if it is complete; if not, the exchange may still write to its tensors.
        """
        barrier, nap_s = self._group.barrier, _FIRST_NAP_S
        spin_end = time.monotonic() + _SPIN_S
        grace_end: float | None = None
        while not self._api.is_complete(event):
            now = time.monotonic()
            if grace_end is None and (barrier.aborted or now >= deadline):
                if not barrier.aborted:
                    give_up()
                self._communicators.abort()
                grace_end = now + ABORT_GRACE_S
            elif grace_end is not None and now >= grace_end:
                return False
            if now >= spin_end:
                time.sleep(nap_s)
                nap_s = min(nap_s * 1.5, _LONGEST_NAP_S)
        return True

    def _lateness(self, name: str) -> BaseException:
        return mark_failed(
            CollectiveTimeout(
                f"rank {self.rank}: {name} did not end within {self._timeout_s:g} s; the group "
                f"is aborted: {self._group.barrier.remedy}"
            )
        )


class LaunchPart:
    """One rank's part of an exchange, to be launched by any rank's thread.

    Args:
        end: The rank; its current stream is that of the exchange.

    Attributes:
        in_flight: True from the launch until the rank has waited for its end.
    """

    __slots__ = ("_api", "_begun", "_device", "_stream", "in_flight", "staged")

    def __init__(self, end: NcclCollective, staged: Staged) -> None:
        self.staged = staged
        self.in_flight = False
        self._api = end._api
        self._device = end._device
        self._stream = self._api.current_stream(self._device)
        self._begun = end._begun.get(self._stream)
        if self._begun is None:
            self._begun = end._begun[self._stream] = self._api.new_event()

    def begin(self) -> None:
        """Mark the place in the stream in front of the launch, which must follow."""
        self.in_flight = True
        self._api.record(self._begun, self._stream)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the rank's device and stream current in the calling thread."""
        with self._api.on_device(self._device), self._api.stream(self._stream):
            yield


class NcclBucketedMean(ProcessGroupBucketedMean):
    """Launches each part once every rank has added it.

    The ranks meet for each part, which includes the check that all have added the same.
    """

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Launch the tensors, one after the other. Blocks until the other ranks have added them."""
        for tensor in tensors:
            if tensor.numel():
                self._meet((tensor,))

    def _begun(self) -> float:
        if self._total is None:
            self._meet(())
        assert self._total is not None
        return self._total

    def _meet(self, tensors: Sequence[Tensor]) -> None:
        if self._total != 0:
            request = Request(BUCKETED_MEAN, tensors, None, self._weight, self._tally)
            self._total = self._end._run(request)
            self._sent.extend(tensors)


class HostWait:
    """An exchange that a rank waits for on the host.

    Args:
        deadline: Time at which the rank aborts.

    Attributes:
        is_late: True once the deadline has passed without an end.
    """

    __slots__ = ("deadline", "is_late", "name")

    def __init__(self, name: str, deadline: float) -> None:
        self.name = name
        self.deadline = deadline
        self.is_late = False

    def overdue(self, now: float, timeout_s: float) -> str | None:
        """The reason to abort, if the rank has not noticed its deadline."""
        if now < self.deadline + _MARGIN_S:
            return None
        self.is_late = True
        return f"{self.name} did not end within {timeout_s:g} s"


class WatchedExchange(CollectiveWork):
    """An exchange that the host does not wait for.

    Its timeout starts when the device reaches it, which may be some steps later.

    Args:
        end: The rank's end of the group.
        begun: Recorded in front of it.
        ended: Recorded behind it, and behind ``seen``.
        seen: Written by a kernel behind the exchange, from ``Communicators.abort_flag``.
    """

    def __init__(
        self, end: NcclCollective, name: str, begun: Event, ended: Event, seen: Tensor
    ) -> None:
        self.name = name
        self._end = end
        self._begun = begun
        self._ended = ended
        self._seen = seen
        self._since: float | None = None
        self._is_over = False
        self._is_late = False
        self._error: str | None = None

    def probe(self) -> None:
        """Query the device, which may block; runs in a thread for this only."""
        api = self._end._api
        try:
            with api.on_device(self._end._device):
                if self._since is None and api.is_complete(self._begun):
                    self._since = time.monotonic()
                if self._since is not None:
                    self._is_over = api.is_complete(self._ended)
        except RuntimeError as error:  # of the device; the peers would wait forever
            self._error = str(error)

    def overdue(self, now: float, timeout_s: float) -> str | None:
        """The reason to abort, from results of :meth:`probe`; makes no driver call."""
        if self._error is not None:
            return f"{self.name} failed: {self._error}"
        if self._since is None or self._is_over or now - self._since < timeout_s:
            return None
        self._is_late = True
        return f"{self.name} did not end within {timeout_s:g} s"

    @property
    def done(self) -> bool:
        """True if it is over."""
        return self._end._api.is_complete(self._ended)

    def wait(self) -> None:
        """See :meth:`CollectiveWork.wait`."""
        end = self._end
        with end._api.on_device(end._device):
            has_ended = end._await_event(self._ended)
            failed = not has_ended
            if float(end._communicators.abort_flag):  # possibly set after its end
                failed = failed or float(self._seen) != 0
        end._communicators.forget(self)
        if not failed:
            end._require_sound(self.name)
            end._events.give_back(self._begun, self._ended)
        elif self._is_late:
            raise end._lateness(self.name)
        else:
            raise CollectiveAborted(f"rank {end.rank}: {self.name} was aborted")


class Communicators:
    """The communicators of one group, and the limits of their exchanges; thread-safe.

    NCCL shuts a communicator down only together with its peers in the process, and aborting one
    alone can leave its peers hanging. So an abort by any rank aborts all of them, each in its own
    thread, and an orderly shutdown starts when the last rank has left.

    When all of them have been aborted, NCCL frees the memory of their kernels; kernels that run
    end, but one that is still behind other work in its stream would then run on freed memory, an
    error after which the process cannot use the device. So a communicator is only aborted once its
    last exchange has begun on the device.

    Two threads enforce the timeout of exchanges in flight. One queries the devices, and may block
    on them. The other compares its results with the timeout and aborts; it makes no driver call,
    and holds no lock while the first one queries.

    Args:
        devices: Their GPUs.

    Attributes:
        abort_flag: In pinned memory: set to 1 when the group is aborted, before any backend is;
            else 0. A kernel behind an exchange reads 0 only if no abort can have ended that
            exchange. Exists from the first backend on.
    """

    abort_flag: Tensor

    def __init__(self, group: Group, devices: Sequence[torch.device] = ()) -> None:
        self.devices = frozenset(devices)
        self._group = group
        self._world_size = group.barrier.parties
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._launching = threading.Lock()
        self._late_results: list[WatchedExchange] = []
        self._host_waits: list[HostWait] = []
        self._watcher: threading.Thread | None = None
        self._prober: threading.Thread | None = None
        self._probing_since: float | None = None
        self._num_idle = 0  # looks of the watcher since the last exchange began
        self._backends: dict[int, Any] = {}
        self._begun: dict[int, Mapping[Stream, Event]] = {}
        self._left: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._num_ending = 0
        self._aborted = False
        self._ended = False

    def add(self, rank: int, backend: Any, begun: Mapping[Stream, Event]) -> None:
        """Register a rank's backend; called in its thread, on its device.

        Args:
            begun: For each stream, an event in front of the last exchange.
        """
        with self._lock:
            self._begun[rank] = begun
            if not self._backends:
                self.abort_flag = cuda_api.API.empty_pinned((), torch.float32)
                self.abort_flag.fill_(float(self._aborted))
            self._backends[rank] = backend
            if self._aborted:
                self._start("abort", rank, backend.abort)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Context of a launch; an abort waits for its end, and prevents later ones.

        Raises:
            CollectiveAborted: The communicators are aborted.
        """
        with self._launching:
            if self._aborted or self._ended:
                raise CollectiveAborted("the collective was aborted")
            yield

    def abort(self) -> None:
        """Abort every backend, also those added later. Idempotent; does not wait."""
        with self._lock:
            if self._aborted or self._ended:
                return
            self._aborted = True
            if self._backends:
                # An aborted kernel signals its peers that data has arrived: theirs may complete
                # with garbage before they are aborted.
                self.abort_flag.fill_(1)
            self._changed.notify_all()
            for rank, backend in self._backends.items():
                self._start("abort", rank, backend.abort)

    def leave(self, rank: int) -> None:
        """Release a rank's backend. The last rank to leave waits until all have ended."""
        with self._lock:
            self._left.add(rank)
            if self._ended or len(self._left) < self._world_size:
                return
            self._ended = True
            self._changed.notify_all()
            if not self._aborted:
                for other, backend in self._backends.items():
                    self._start("close", other, backend.shutdown)
        stuck = self.settle(END_S)
        if stuck:
            logger.warning("NCCL did not end within %g s: %s", END_S, ", ".join(stuck))
        with self._lock:
            self._backends.clear()

    def settle(self, timeout_s: float) -> list[str]:
        """Wait for aborts and shutdowns in progress; returns the names of live threads."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in threads if thread.is_alive()]

    def watch(self, exchange: WatchedExchange) -> None:
        """Watch an exchange: abort the group if it does not end in time."""
        with self._changed:
            self._late_results.append(exchange)
            if self._prober is None:
                self._prober = self._start_thread("collective-probe", self._probe)
            elif len(self._late_results) == 1:  # it may sleep
                self._changed.notify_all()
            self._notify_watcher()

    def expect(self, wait: HostWait) -> None:
        """Watch a rank's wait: abort the group if the rank misses its deadline."""
        with self._changed:
            self._host_waits.append(wait)
            self._notify_watcher()

    def forget(self, exchange: WatchedExchange | HostWait) -> None:
        """Stop watching an exchange."""
        watched: list[Any] = (
            self._host_waits if isinstance(exchange, HostWait) else self._late_results
        )
        with self._lock:
            if exchange in watched:
                watched.remove(exchange)

    # With the lock held:

    def _notify_watcher(self) -> None:
        if self._watcher is None:
            self._watcher = self._start_thread("collective-watch", self._watch)
        elif self._num_idle > _IDLE_LOOKS:  # it sleeps
            self._changed.notify_all()
        self._num_idle = 0

    def _start_thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _start(self, what: str, rank: int, end: Callable[[], object]) -> None:
        def run() -> None:
            try:
                # A launch in progress must not use a freed communicator; but one that is stuck
                # in the driver ends only by the abort.
                if self._launching.acquire(timeout=_LAUNCH_GRACE_S):
                    self._launching.release()
                self._await_begun(rank)
                end()
            except Exception:
                logger.warning("rank %d: NCCL %s failed", rank, what, exc_info=True)
            finally:
                with self._lock:
                    self._num_ending -= 1
                    if not self._num_ending:
                        _ENDING.discard(self)

        self._num_ending += 1
        _ENDING.add(self)
        self._start_thread(f"collective-{what}-{rank}", run)

    def _await_begun(self, rank: int) -> None:
        """Wait until the last exchange of a rank has begun, or a query of the device is blocked.

        What blocks it may wait for the exchange, which then ends only by the abort.
        """
        has_begun, answered_at = threading.Event(), time.monotonic()
        is_complete, events = cuda_api.API.is_complete, list(self._begun[rank].values())

        def poll() -> None:
            nonlocal answered_at
            nap_s = _FIRST_NAP_S
            with suppress(RuntimeError):  # the device has failed: nothing will begin
                while not all(map(is_complete, events)):
                    answered_at = time.monotonic()
                    time.sleep(nap_s)
                    nap_s = min(nap_s * 1.5, _LONGEST_NAP_S)
            has_begun.set()

        self._start_thread(f"collective-begin-{rank}", poll)
        while not has_begun.wait(_WATCH_S):
            if time.monotonic() - answered_at >= _QUERY_GRACE_S:
                return

    def _overdue(self, now: float) -> str | None:
        timeout_s = self._group.timeout_s
        in_flight: list[WatchedExchange | HostWait] = [*self._late_results, *self._host_waits]
        for exchange in in_flight:
            reason = exchange.overdue(now, timeout_s)
            if reason is not None:
                return reason
        if self._probing_since is not None and now - self._probing_since >= timeout_s:
            return f"a device did not answer within {timeout_s:g} s"
        return None

    # In their own threads:

    def _watch(self) -> None:
        barrier = self._group.barrier
        while True:
            with self._changed:
                if self._aborted or self._ended:
                    self._late_results.clear()
                    self._host_waits.clear()
                    return
                reason = None if barrier.aborted else self._overdue(time.monotonic())
                if reason is None and not barrier.aborted:
                    self._num_idle += not self._late_results and not self._host_waits
                    self._changed.wait(None if self._num_idle > _IDLE_LOOKS else _WATCH_S)
                    continue
            if reason is not None:
                barrier.abort(reason)
            self.abort()

    def _probe(self) -> None:
        while True:
            with self._changed:
                self._probing_since = None
                if self._aborted or self._ended:
                    return
                self._changed.wait(_WATCH_S if self._late_results else None)
                exchanges = list(self._late_results)
                self._probing_since = time.monotonic()
            for exchange in exchanges:
                exchange.probe()


_ENDING: set[Communicators] = set()
"""Groups whose communicators are being aborted or closed."""


def await_ended(devices: Iterable[torch.device]) -> None:
    """Wait until earlier groups on these GPUs have ended.

    Raises:
        GpuWorkerError: One has not ended within ``END_S`` seconds. A new communicator could wait
            forever for the kernels of the old one.
    """
    deadline = time.monotonic() + END_S
    for earlier in [group for group in list(_ENDING) if not group.devices.isdisjoint(devices)]:
        stuck = earlier.settle(max(0.0, deadline - time.monotonic()))
        if stuck:
            raise GpuWorkerError(
                f"the communicators of the previous group did not end within {END_S:g} s "
                f"({', '.join(stuck)}), so that no new group can be created on "
                f"{', '.join(sorted(map(str, earlier.devices)))}: restart the program and resume "
                "from a checkpoint"
            )


def new_backend(store: Store, rank: int, world_size: int, timeout_s: float) -> Any:
    """One rank's process group, not connected yet."""
    backend = _c10d.ProcessGroupNCCL
    options = backend.Options()
    # The watchdog's timeout, longer than all others.
    options._timeout = timedelta(seconds=2 * timeout_s + 60.0)
    return backend(store, rank, world_size, options)


def create_nccl_groups(devices: Sequence[torch.device], timeout_s: float) -> list[NcclCollective]:
    """Connects the ranks of one group over NCCL; see :func:`connect_ranks`.

    A rank stuck in NCCL's connection cannot be interrupted: its daemon thread stays alive.

    Args:
        devices: The GPU of each rank.
        timeout_s: Limit of the connection, of a meeting and of an exchange, in seconds.

    Raises:
        GpuWorkerError: An earlier group on these GPUs has not ended.
    """
    await_ended(devices)
    environment = ENVIRONMENT
    if len(set(devices)) < len(devices):
        environment = ENVIRONMENT | SHARED_GPU_ENVIRONMENT
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    world_size = len(devices)
    gate = Group(world_size, timeout_s)
    store = new_store(timeout_s)
    prefix = f"nccl-{next(_incarnations)}"
    communicators = Communicators(gate, devices)

    def connect(rank: int) -> NcclCollective:
        return NcclCollective(rank, store, prefix, timeout_s, gate, devices, communicators)

    def give_up() -> None:
        gate.barrier.abort("a rank could not connect to its peers")
        communicators.abort()

    return connect_ranks(connect, world_size, timeout_s, give_up)
