"""Collectives over NCCL: one process group and one issuing thread for each GPU."""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from runtime.collective.base import Group, LateResult, Plan, ReduceOp, Request
from runtime.collective.process_group import ProcessGroupCollective, as_summed, connect_ranks
from runtime.collective.thread import reduce_at_once
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, as_failed
from runtime.device import cuda_api
from runtime.device.cuda_api import Event
from runtime.device.timing import EventPool

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)


END_S = 10.0
"""How long the last rank to leave waits for all backends to end."""


class Communicators:
    """What the ranks of one group share; thread-safe.

    NCCL ends a communicator only together with its peers on the machine, and one that is
    aborted alone can leave theirs hanging. So an abort by anyone aborts all of them, each in
    a thread of its own, and an orderly end comes when the last rank has left.

    Exchanges that no rank waits for are looked at by a thread of the group, which keeps the time
    limit for them.

    Args:
        group: Where they meet.

    Attributes:
        called_off: In pinned memory: 1 once the group is aborted, before any backend is; else 0.
            What a kernel reads of it behind an exchange is 0 only if no abort can have ended that
            exchange. There from the first backend on.
    """

    called_off: Tensor

    def __init__(self, group: Group) -> None:
        self._group = group
        self._world_size = group.barrier.parties
        self._lock = threading.Lock()
        self._watched: list[WatchedExchange] = []
        self._changed = threading.Condition(self._lock)
        self._watcher: threading.Thread | None = None
        self._backends: dict[int, Any] = {}
        self._left: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._aborted = False
        self._ended = False

    def add(self, rank: int, backend: Any) -> None:
        """A rank has made its backend; in its thread, on its device."""
        with self._lock:
            if not self._backends:
                self.called_off = cuda_api.API.empty_pinned((), torch.float32)
                self.called_off.fill_(float(self._aborted))
            self._backends[rank] = backend
            if self._aborted:
                self._start("abort", rank, backend.abort)

    def abort(self) -> None:
        """Abort every backend, made or to be made. Idempotent; waits for none of them."""
        with self._lock:
            if self._aborted or self._ended:
                return
            self._aborted = True
            if self._backends:
                # A kernel that is aborted tells its peers that data has come: theirs may end with
                # garbage before they are aborted themselves.
                self.called_off.fill_(1)
            self._changed.notify_all()
            for rank, backend in self._backends.items():
                self._start("abort", rank, backend.abort)

    def leave(self, rank: int) -> None:
        """A rank uses its backend no more. Once all have left, waits until all have ended."""
        with self._lock:
            self._left.add(rank)
            if self._ended or len(self._left) < self._world_size:
                return
            self._ended = True
            self._changed.notify_all()
            if not self._aborted:
                for other, backend in self._backends.items():
                    self._start("close", other, backend.shutdown)
        self.settle(END_S)
        with self._lock:
            self._backends.clear()

    def watch(self, exchange: WatchedExchange) -> None:
        """Abort the group if an exchange does not end in time."""
        with self._changed:
            self._watched.append(exchange)
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=self._watch, name="collective-watch", daemon=True
                )
                self._threads.append(self._watcher)
                self._watcher.start()
            elif len(self._watched) == 1:
                self._changed.notify_all()

    def forget(self, exchange: WatchedExchange) -> None:
        """Its rank has seen the end of an exchange, and uses its events again."""
        with self._lock:
            if exchange in self._watched:
                self._watched.remove(exchange)

    def _watch(self) -> None:
        barrier = self._group.barrier
        while True:
            with self._changed:
                if self._aborted or self._ended:
                    self._watched.clear()
                    return
                reason = None if barrier.aborted else self._reason_to_abort()
                if reason is None and not barrier.aborted:
                    self._changed.wait(_WATCH_S if self._watched else None)
                    continue
            if reason is not None:
                barrier.abort(reason)
            self.abort()

    def _reason_to_abort(self) -> str | None:
        timeout_s = self._group.timeout_s
        for exchange in self._watched:
            try:
                if exchange.is_late(timeout_s):
                    return f"{exchange.name} did not end within {timeout_s:g} s"
            except RuntimeError as error:  # of its device, whose peers would wait for ever
                return f"{exchange.name} failed: {error}"
        return None

    def settle(self, timeout_s: float) -> bool:
        """Wait for the aborts, or the end, that were begun; whether they are over."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [thread.name for thread in threads if thread.is_alive()]
        if stuck:
            logger.warning("NCCL did not end within %g s: %s", timeout_s, ", ".join(stuck))
        return not stuck

    def _start(self, what: str, rank: int, end: Callable[[], object]) -> None:
        def run() -> None:
            try:
                end()
            except Exception:
                logger.warning("rank %d: NCCL %s failed", rank, what, exc_info=True)

        thread = threading.Thread(target=run, name=f"collective-{what}-{rank}", daemon=True)
        self._threads.append(thread)
        thread.start()


# Any: the type stubs leave out most of the names below.
_c10d: Any = torch.distributed

ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""Keeps PyTorch's watchdog from ending the process; read when a group is made. What the user
has set stands."""

ABORT_GRACE_S = 5.0
"""How long a kernel may take to end once its communicator was aborted."""
_WATCH_S = 0.05
"""How often exchanges are looked at that no rank waits for."""
_FIRST_NAP_S = 20e-6
_LONGEST_NAP_S = 250e-6

_incarnations = itertools.count()


class WatchedExchange(LateResult):
    """An exchange that the host does not wait for.

    Its time runs from when the device comes to it, which may be behind by some steps.

    Args:
        end: The rank's end of the group.
        name: Of the exchange.
        begun: Recorded in front of it.
        ended: Recorded behind it, and behind ``seen``.
        seen: What a kernel has read behind it of ``Communicators.called_off``.
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
        self._was_late = False

    def is_late(self, timeout_s: float) -> bool:
        """Whether it has taken longer than this; for the group's thread."""
        api = self._end._api
        with api.on_device(self._end._device):
            if self._since is None:
                if api.is_complete(self._begun):
                    self._since = time.monotonic()
                return False
            if time.monotonic() - self._since < timeout_s or api.is_complete(self._ended):
                return False
        self._was_late = True
        return True

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self._end._api.is_complete(self._ended)

    def wait(self) -> None:
        """As :meth:`LateResult.wait`."""
        end = self._end
        with end._api.on_device(end._device):
            has_ended = end._await_event(self._ended)
            failed = not has_ended
            if float(end._communicators.called_off):  # now; perhaps only after it had ended
                failed = failed or float(self._seen) != 0
        end._communicators.forget(self)
        if not failed:
            end._require_sound(self.name)
            end._events.give_back(self._begun, self._ended)
        elif self._was_late:
            raise end._lateness(self.name)
        else:
            raise CollectiveAborted(f"rank {end.rank}: {self.name} was broken off")


class NcclCollective(ProcessGroupCollective):
    """One rank of a group over NCCL.

    The ranks meet at ``gate`` first, as over Gloo; the exchange then runs on the stream that
    is current in the calling thread, behind what was given to it. The rank looks at an event
    behind the exchange until it is complete, and owns the time limit: whoever is late, all
    communicators are aborted, and every rank raises. A result is only trusted if the group
    was not aborted by then, for an aborted exchange ends without an error.

    Tensors of the CPU, with which ranks take small decisions, are exchanged at the gate.

    Args:
        rank: This rank.
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
        super().__init__(rank, len(devices), store, prefix, timeout_s, gate)

    def _connect(self, store: Store) -> Any:
        device = self._device
        with self._api.on_device(device):
            self._event = self._api.new_event()
            self._read_host = self._load_reader()
            self.host_runs_ahead = self._read_host is not None
            backend = new_backend(store, self.rank, self.world_size, self._timeout_s)
            self._communicators.add(self.rank, backend)
            # Nobody connects before all can: a connection cannot be broken off (D29).
            self._group.barrier.wait(self.rank, self._timeout_s)
            backend.eager_connect_single_device(device)
        return backend

    def _load_reader(self) -> Callable[[Tensor, Tensor], None] | None:
        try:
            return self._api.host_reader()
        except (AttributeError, OSError, RuntimeError) as error:
            logger.warning(
                "rank %d: the host waits for each reduction, since the kernel that would see an "
                "abort on the device cannot be loaded: %s",
                self.rank,
                error,
            )
            return None

    def abort(self) -> None:
        """As :meth:`Collective.abort`; the exchange in progress ends on every rank."""
        super().abort()
        self._communicators.abort()

    def check(self) -> None:
        """As :meth:`Collective.check`; sees the errors that the backend has noticed, too."""
        super().check()
        error = self._backend_error()
        if error is not None:
            self.abort()
            raise as_failed(CollectiveAborted(f"rank {self.rank}: NCCL has failed: {error}"))

    def _backend_error(self) -> str | None:
        # Not every build of PyTorch tells it.
        get_error = getattr(self._backend, "get_error", None)
        error = getattr(get_error() if get_error else None, "name", "SUCCESS")
        return None if error == "SUCCESS" else str(error)

    def _require_sound(self, name: str) -> None:
        """Make sure that the backend broke nothing off by itself, which no stream would see.

        Raises:
            RuntimeError: It may have, and the step was made all the same: there is no way back.
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

    def _plan(self, requests: Sequence[Request]) -> Plan:
        plan = super()._plan(requests)
        if plan.fault is not None:
            return plan
        fault, on_cpu = self._look_where(requests)
        if fault is not None:
            return Plan(fault=f"{requests[0].name}: {fault}")
        if on_cpu and not plan.done:
            return reduce_at_once(self._group, self.rank, requests, plan)
        return plan

    def _look_where(self, requests: Sequence[Request]) -> tuple[str | None, bool]:
        """What is wrong with where the tensors lie, and whether they lie on the CPU."""
        kinds = set()
        for rank, request in enumerate(requests):
            for tensor in request.tensors:
                device = self._api.device_of(tensor)
                kinds.add(device.type)
                if device.type == "cuda" and device != self._devices[rank]:
                    return f"rank {rank} passed a tensor on {device}, not its own device", False
        if len(kinds) > 1:
            return "some tensors are on the CPU, others on a GPU; pass all on one side", False
        return None, kinds == {"cpu"}

    def _take_part(self, request: Request, plan: Plan) -> None:
        start = time.monotonic()
        with self._named_faults(request.name):
            self._exchange(request, plan)
            self._await_end(request.name, start + self._timeout_s)
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
            raise  # nobody else would tell of it
        except RuntimeError as error:
            told = CollectiveAborted(f"rank {self.rank}: {name} failed: {error}")
            if not self._group.barrier.aborted:
                as_failed(told)
            self.abort()
            raise told from error

    def _send(self, flat: Tensor, factor: float) -> None:
        """Give the weighted sum of a flat tensor to the current stream."""
        if self._first_sent is None:
            self._first_sent = self._events.record()
        self._weighted_sum_(flat, factor)

    def _arrived(self, sent: Sequence[object]) -> None:
        """Wait for what the current stream was given."""
        self._take_first_sent()
        self._await_end("mean_in_parts", time.monotonic() + self._timeout_s)
        self.check()

    def _take_first_sent(self) -> Event:
        begun, self._first_sent = self._first_sent, None
        return begun

    def _follow(self, name: str, called_off: Tensor) -> LateResult:
        """As :meth:`ProcessGroupCollective._follow`; the thread of the group keeps the limit."""
        assert self._read_host is not None
        seen = torch.empty_like(called_off)
        self._read_host(called_off, self._communicators.called_off)
        self._api.copy(seen, called_off)
        exchange = WatchedExchange(self, name, self._take_first_sent(), self._events.record(), seen)
        self._communicators.watch(exchange)
        return exchange

    def _await_end(self, name: str, deadline: float) -> None:
        """Wait until the current stream is through; past the deadline abort, and let it come to
        an end.

        Raises:
            CollectiveTimeout: The deadline was this rank's to notice.
        """
        self._api.record(self._event)
        late = False

        def give_up() -> None:
            nonlocal late
            late = True
            self._group.barrier.abort(f"{name} did not end within {self._timeout_s:g} s")

        self._await_event(self._event, deadline, give_up)
        if late:
            raise self._lateness(name)

    def _await_event(
        self,
        event: Event,
        deadline: float = math.inf,
        give_up: Callable[[], None] = lambda: None,
    ) -> bool:
        """Wait for an event; of a group that is aborted, for some seconds more.

        Args:
            event: Behind an exchange.
            deadline: When this rank gives up.
            give_up: Called then; aborts the group.

        Returns:
            Whether it came; if not, what the exchange writes to is lost with the device.
        """
        barrier, nap_s = self._group.barrier, _FIRST_NAP_S
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
            time.sleep(nap_s)
            nap_s = min(nap_s * 1.5, _LONGEST_NAP_S)
        return True

    def _lateness(self, name: str) -> BaseException:
        return as_failed(
            CollectiveTimeout(
                f"rank {self.rank}: {name} did not end within {self._timeout_s:g} s; the group "
                "is aborted"
            )
        )

    def _reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp) -> None:
        """Sends each rank its part alone, without a copy of the input in float32 or float64.

        ``ProcessGroupNCCL::_reduce_scatter_base`` is one ``ncclReduceScatter``.
        """
        if op in (ReduceOp.MAX, ReduceOp.MIN):  # which NCCL computes without regard to NaN
            super()._reduce_scatter(output, input, op)
            return
        whole = as_summed(input)
        part = output if whole is input else whole.new_empty(output.numel())
        options = self._options(_c10d.ReduceScatterOptions)
        options.reduceOp = _c10d.ReduceOp.SUM
        self._wait(self._connected()._reduce_scatter_base(part, whole, options))
        if op is ReduceOp.AVG:
            part.div_(self.world_size)
        if part is not output:
            output.copy_(part)

    def _options(self, kind: Any) -> Any:
        options = kind()
        options.asyncOp = False  # on the current stream, which keeps its order
        return options

    def _wait(self, work: Any) -> None:
        """Nothing: the next operation is behind this one on the stream."""


def new_backend(store: Store, rank: int, world_size: int, timeout_s: float) -> Any:
    """One rank's process group, not connected yet."""
    backend = _c10d.ProcessGroupNCCL
    options = backend.Options()
    # The watchdog's own limit, never the first to be reached.
    options._timeout = timedelta(seconds=2 * timeout_s + 60.0)
    return backend(store, rank, world_size, options)


def create_nccl_groups(devices: Sequence[torch.device], timeout_s: float) -> list[NcclCollective]:
    """Connects the ranks of one group over NCCL; see :func:`connect_ranks`.

    A rank that does not come back from NCCL's own connection cannot be called back: its
    thread stays, a daemon.

    Args:
        devices: The GPU of each rank, all distinct.
        timeout_s: How long the connection, a meeting or an exchange may take, in seconds.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    world_size = len(devices)
    gate = Group(world_size, timeout_s)
    store = _c10d.HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    prefix = f"nccl-{next(_incarnations)}"
    communicators = Communicators(gate)

    def connect(rank: int) -> NcclCollective:
        return NcclCollective(rank, store, prefix, timeout_s, gate, devices, communicators)

    def give_up() -> None:
        gate.barrier.abort("a rank could not connect to its peers")
        communicators.abort()

    return connect_ranks(connect, world_size, timeout_s, give_up)
