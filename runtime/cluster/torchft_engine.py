"""TorchftEngine: quorums by torchft's lighthouse and manager, collectives by Gloo.

torchft's Python ``Manager``, ``LocalSGD`` and ``DiLoCo`` are not used: the manager reports neither
the members nor a failed healing, synchronizes a CUDA device in each call, and unpickles what its
transport receives. The server and client below it are used unchanged.

Security: the ports of the lighthouse and of each manager accept requests from every client that
reaches them, including one that ends the process; so does the store through which the machines
exchange addresses; and Gloo's traffic is neither signed nor encrypted. All of them listen only on
the address that the user named, or on the one by which this machine reaches the lighthouse. The
remedy is a private network or a tunnel.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed
from torch import Tensor

from coordinator.codec import parse_json
from runtime.cluster.compression import CODECS, ErrorFeedback
from runtime.cluster.engine import (
    ClusterEngine,
    ClusterState,
    EngineClosed,
    EngineError,
    PeerRefused,
    Quorum,
    StatusReader,
)
from runtime.cluster.lighthouse import load_torchft
from runtime.cluster.machine_group import MachineGroup
from runtime.cluster.membership import Membership
from runtime.cluster.options import EngineOptions, join_host_port, split_host_port
from runtime.cluster.state_server import StateServer, fetch_state

logger = logging.getLogger(__name__)

# Any: the type stubs lack most of the names used below.
_c10d: Any = torch.distributed

T = TypeVar("T")

TORCHFT_REQUEST_TIMEOUT_S = 15.0
"""Timeout of one quorum request, which is then repeated."""
RETRIES = 30
"""Connection attempts of torchft's manager to the lighthouse within a request."""
RECONNECT_TIMEOUT_S = 2.0
"""Timeout of each attempt."""
START_TIMEOUT_S = 30.0
"""Longest wait of a starting machine for an unreachable lighthouse."""
PAUSE_S = 0.2
"""Pause between quorums with too few machines."""
POLL_S = 0.1
"""Interval at which a blocked call checks for cancellation."""
TORCHFT_CLOSE_TIMEOUT_S = 1.0
"""Longest wait of :meth:`TorchftEngine.close` for a call in progress."""


class TorchftEngine(ClusterEngine):
    """Engine on torchft. See the module for its security.

    Args:
        options: Address of the lighthouse, timeouts and limits.
        offer: Returns the state to heal a peer; called in :meth:`quorum`, by the same thread. The
            state is copied before the call returns.

    Raises:
        ImportError: torchft is not installed; the message has the command.
        PeerRefused: The machines of the cluster have another token or version.
        EngineError: The lighthouse's name cannot be resolved, or it does not respond within
            :data:`START_TIMEOUT_S`; or this machine has no such host.
    """

    def __init__(self, options: EngineOptions, offer: Callable[[], ClusterState]) -> None:
        torchft = load_torchft("cluster()")
        self.machine = options.machine
        self._options = options
        self._offer = offer
        self._step = 0
        self._is_new = True  # has taken part in no committed round
        self._failures = 0
        self._refused: dict[str, str] = {}
        self._banned: set[str] = set()
        self._behind: tuple[str, ...] = ()
        self._group: MachineGroup | None = None
        self._retired_group: MachineGroup | None = None  # peers may still be receiving in it
        self._feedback = ErrorFeedback(CODECS[options.compression]) if options.compression else None
        self._timeout = timedelta(seconds=options.timeout_s)
        lighthouse = join_host_port(*split_host_port("address", options.address))
        self._host = options.host.strip("[]") or local_address_towards(options.address)
        with ExitStack() as cleanup:
            try:
                self._store, port = open_store(self._host, self._timeout)
                self._store_address = join_host_port(self._host, port)
                wait_for_lighthouse(
                    options.address, min(START_TIMEOUT_S, options.lighthouse_timeout_s)
                )
                self._membership = Membership(options.address, options.machine, options.token)
                cleanup.callback(self._membership.close)
                self._states = StateServer(self._host, options.token, options.timeout_s)
                cleanup.callback(self._states.close)
                self._manager: Any = torchft.ManagerServer(
                    replica_id=self.machine,
                    lighthouse_addr=f"http://{lighthouse}",
                    hostname=f"[{self._host}]" if ":" in self._host else self._host,
                    bind=join_host_port(self._host, 0),
                    store_addr=self._store_address,
                    world_size=1,
                    heartbeat_interval=timedelta(seconds=options.heartbeat_s),
                    connect_timeout=timedelta(seconds=RECONNECT_TIMEOUT_S),
                    quorum_retries=RETRIES,
                )
                cleanup.callback(self._manager.shutdown)
                self._client: Any = torchft.ManagerClient(
                    self._manager.address(), connect_timeout=self._timeout
                )
            except PeerRefused:
                raise
            except (OSError, RuntimeError, TimeoutError) as error:
                raise EngineError(
                    f"cluster(): cannot listen on {self._host!r} or reach the lighthouse at "
                    f"{lighthouse}: {error}"
                ) from error
            cleanup.pop_all()
        self._calls = _CallThread(f"cluster-{self.machine}")

    @property
    def step(self) -> int:
        return self._step

    def quorum(self) -> Quorum:
        """See :meth:`ClusterEngine.quorum`."""
        self._states.withdraw()
        if self._feedback is not None:
            self._feedback.discard()
        try:
            while True:
                found = self._request_quorum()
                group = self._group_of(found)
                if len(group.members) >= self._options.min_machines:
                    break
                self._calls.pause(PAUSE_S)
            healed = self._heal(group, found)
        except BaseException:
            self._drop_group()
            raise
        return Quorum(
            generation=group.generation,
            rank=group.rank,
            members=group.members,
            healed=healed,
            refused=tuple(sorted(group.refused)),
        )

    def gather(self, report: bytes) -> tuple[bytes, ...]:
        patience = self._options.heal_timeout_s if self._behind else None
        self._behind = ()
        return self._in_round(lambda group: group.gather(report, patience))

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        self._in_round(lambda group: group.all_reduce(tensors, self._feedback))

    def commit(self, ok: bool) -> bool:
        """See :meth:`ClusterEngine.commit`."""
        self._states.withdraw()
        vote = ok and self._group is not None
        try:
            done = self._calls.run(
                lambda: bool(self._client.should_commit(0, self._step, vote, self._timeout))
            )
        except (RuntimeError, TimeoutError) as error:
            if isinstance(error, EngineClosed):
                raise
            late = EngineError(f"this machine's own manager does not answer: {error}")
            self._drop_group()
            raise late from error
        if not done:
            self._drop_group()
            return False
        self._step += 1
        self._is_new = False
        self._failures = 0
        if self._feedback is not None:
            self._feedback.commit()
        return True

    def reset(self, step: int = 0) -> None:
        self._step = step
        self._is_new = self._is_new and step == 0
        if self._feedback is not None:
            self._feedback.reset()

    def cancel_after(self, timeout_s: float) -> None:
        """See :meth:`ClusterEngine.cancel_after`."""
        self._calls.cancel_after(timeout_s)

    def send_status(self, read: StatusReader) -> None:
        self._membership.send_status(read)

    def close(self) -> None:
        """See :meth:`ClusterEngine.close`."""
        self._calls.close()
        self._membership.close()
        self._states.close()
        self._manager.shutdown()
        self._leave_group()
        self._retire(None)

    def _drop_group(self) -> None:
        """End the connections, which notifies the peers; the next quorum reconnects."""
        self._leave_group()
        self._failures += 1

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None and group is not self._retired_group:
            group.close()

    def _retire(self, group: MachineGroup | None) -> None:
        """Keep a group until the next one is connected, and end the one kept before."""
        before, self._retired_group = self._retired_group, group
        if before is not None:
            before.close()

    def _ban(self, group: MachineGroup, error: PeerRefused) -> None:
        """Ban the senders, and keep the group alive until all peers have received the message,
        so that each of them bans the senders too.
        """
        self._banned.update(error.machines)
        self._retire(group)

    def _in_round(self, call: Callable[[MachineGroup], T]) -> T:
        group = self._group
        if group is None:
            raise EngineError("the round has failed, or has no quorum yet: call quorum() first")
        try:
            return self._calls.run(lambda: call(group))
        except BaseException as error:
            if isinstance(error, PeerRefused):
                self._ban(group, error)
            self._drop_group()
            raise

    def _request_quorum(self) -> Any:
        """Torchft's quorum. Blocks while other machines are not ready.

        Raises:
            EngineError: The lighthouse did not respond for ``lighthouse_timeout_s``.
        """
        unreachable_since: float | None = None
        while True:
            try:
                return self._calls.run(self._request_once)
            except (RuntimeError, TimeoutError) as error:
                if isinstance(error, EngineClosed):
                    raise
                if self._calls.run(lambda: accepts_connections(self._options.address)):
                    unreachable_since = None  # it is waiting for machines
                    self._calls.pause(PAUSE_S if isinstance(error, RuntimeError) else 0.0)
                    continue
                now = time.monotonic()
                if unreachable_since is None:
                    unreachable_since = now
                    logger.warning("the lighthouse at %s is unreachable", self._options.address)
                if now - unreachable_since >= self._options.lighthouse_timeout_s:
                    raise EngineError(
                        f"the lighthouse at {self._options.address} has been unreachable "
                        f"for {now - unreachable_since:.0f} s: start one there with "
                        "'gpuworker lighthouse'"
                    ) from error
                self._calls.pause(PAUSE_S)

    def _request_once(self) -> Any:
        return self._client._quorum(
            group_rank=0,
            step=self._step,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=timedelta(seconds=TORCHFT_REQUEST_TIMEOUT_S),
            init_sync=True,
            commit_failures=self._failures,
        )

    def _group_of(self, found: Any) -> MachineGroup:
        """The group of a quorum; the previous one if the members are unchanged."""
        if self._group is not None and self._group.generation == found.quorum_id:
            return self._group
        self._leave_group()
        group = self._calls.run(lambda: self._connect(found))
        self._group = group
        self._retire(None)
        for machine, reason in group.refused.items():
            if machine not in self._refused:
                logger.warning("machine %s is refused: %s", machine, reason)
        self._refused = group.refused
        if self._is_new and group.members == (self.machine,) and group.refused:
            others = ", ".join(sorted(group.refused))
            raise PeerRefused(
                (self.machine,),
                f"{others} have another token than this machine, or none, or another version",
            )
        return group

    def _connect(self, found: Any) -> MachineGroup:
        connect_s = min(self._options.connect_timeout_s, self._options.timeout_s)
        is_owner = found.store_address == self._store_address
        store: Any = self._store
        if not is_owner:
            host, port = split_host_port("store", found.store_address)
            try:
                store = _c10d.TCPStore(
                    host,
                    port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=connect_s),
                )
            except RuntimeError as error:
                raise EngineError(f"the store of a quorum is gone: {error}") from error
        return MachineGroup(
            store=store,
            is_owner=is_owner,
            generation=found.quorum_id,
            rank=found.replica_rank,
            candidates=found.replica_ids,
            host=self._host,
            token=self._options.token,
            banned=self._banned,
            connect_timeout_s=connect_s,
            timeout_s=self._options.timeout_s,
        )

    def _heal(self, group: MachineGroup, found: Any) -> ClusterState | None:
        """Bring all members to the same step; returns the state received if this one was behind.

        torchft reports if steps differ. The source of each machine's state follows from the
        members' own signed reports.
        """
        self._behind = ()
        if found.max_world_size == found.replica_world_size and found.max_step > 0:
            return None
        own = json.dumps([self._step, self._states.address]).encode()
        try:
            reports = self._calls.run(lambda: group.gather(own))
            steps, addresses = _steps_and_addresses(group.members, reports)
        except PeerRefused as error:
            self._ban(group, error)
            raise
        top = max(steps.values())
        ahead = [name for name in group.members if steps[name] == top]
        if top == 0:
            ahead = ahead[:1]
        behind = [name for name in group.members if name not in ahead]
        self._behind = tuple(behind)
        # By generation, so that after a failure another machine is the source.
        source = {name: ahead[(i + group.generation) % len(ahead)] for i, name in enumerate(behind)}
        if self.machine in source.values():
            self._states.offer(top, self._offer())
        if self.machine not in source:
            return None
        machine = source[self.machine]
        state = self._calls.run(
            lambda: fetch_state(
                machine,
                addresses[machine],
                top,
                self._options.token,
                timeout_s=self._options.timeout_s,
                total_timeout_s=self._options.heal_timeout_s,
                max_bytes=self._options.max_state_bytes,
            )
        )
        self._step = top
        self._is_new = False
        if self._feedback is not None:
            self._feedback.reset()
        return state


def _steps_and_addresses(
    members: Sequence[str], reports: Sequence[bytes]
) -> tuple[dict[str, int], dict[str, str]]:
    steps: dict[str, int] = {}
    addresses: dict[str, str] = {}
    for name, content in zip(members, reports, strict=True):
        try:
            step, address = parse_json(content)
            split_host_port("address", address)
            if type(step) is not int or step < 0:
                raise ValueError(f"step {step!r:.80}")
        except (ValueError, TypeError, AttributeError) as error:
            raise PeerRefused((name,), f"its report has no step and address: {error}") from error
        steps[name], addresses[name] = step, address
    return steps, addresses


class _CallThread:
    """Runs blocking calls on a separate thread, so that callers can stop waiting for them."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done = threading.Condition()
        self._deadlines = [math.inf]  # append-only: no lock, and no update is lost
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], T]) -> T:
        """Run a call; return its result or raise its exception.

        Raises:
            EngineClosed: Cancelled before or meanwhile; the call itself ends by its own timeout.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)
            with self._done:
                self._done.notify_all()

        with self._done:
            if time.monotonic() < min(self._deadlines):
                self._queue.put(work)
            if not self._wait(lambda: bool(results or errors), math.inf):
                raise EngineClosed("the engine is closed")
        if errors:
            raise errors.pop()
        return results.pop()

    def pause(self, seconds: float) -> None:
        """Sleep.

        Raises:
            EngineClosed: Cancelled before or meanwhile.
        """
        with self._done:
            self._wait(lambda: False, time.monotonic() + seconds)
        if time.monotonic() >= min(self._deadlines):
            raise EngineClosed("the engine is closed")

    def _wait(self, ready: Callable[[], bool], until: float) -> bool:
        """Wait, under the lock, for a condition, a time or cancellation; return the condition.

        Cancellation takes no lock and notifies no waiter, so the wait polls.
        """
        while not (done := ready()):
            left_s = min(until, *self._deadlines) - time.monotonic()
            if left_s <= 0:
                break
            self._done.wait(min(left_s, POLL_S))
        return done

    def cancel_after(self, timeout_s: float) -> None:
        """See :meth:`ClusterEngine.cancel_after`."""
        self._deadlines.append(time.monotonic() + timeout_s)

    def close(self) -> None:
        """Cancel, and wait shortly for the call in progress. Idempotent."""
        self.cancel_after(0.0)
        self._queue.put(None)
        self._thread.join(TORCHFT_CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            call()
            del call  # it may hold connections


def open_store(host: str, timeout: timedelta) -> tuple[Any, int]:
    """A store that listens on this address only, and its port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    port = listener.getsockname()[1]
    store = _c10d.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )
    return store, port


def local_address_towards(address: str) -> str:
    """This machine's own address on the route to another host; sends nothing.

    Raises:
        EngineError: The name cannot be resolved, or there is no route.
    """
    host, port = split_host_port("address", address)
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(f"cluster({address!r}): no route to this host: {error}") from error


def wait_for_lighthouse(address: str, timeout_s: float) -> None:
    """Block until the lighthouse accepts connections, or until the timeout."""
    deadline = time.monotonic() + timeout_s
    while not accepts_connections(address) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)


def accepts_connections(address: str) -> bool:
    """True if a TCP server accepts connections at an address; blocks for its timeout at most."""
    try:
        socket.create_connection(split_host_port("address", address), RECONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
