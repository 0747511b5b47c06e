"""The engine on torchft: its lighthouse, its manager, and Gloo."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed
from torch import Tensor

from runtime.cluster.engine import (
    Engine,
    EngineClosed,
    EngineError,
    EngineOptions,
    Quorum,
    State,
    host_and_port,
)
from runtime.cluster.group import Group
from runtime.cluster.lighthouse import joined, load_torchft
from runtime.cluster.transport import StateServer, fetch_state

logger = logging.getLogger(__name__)

# Any: the type stubs leave out most of the names below.
_c10d: Any = torch.distributed

T = TypeVar("T")


class TorchftEngine(Engine):
    """Machines joined by torchft.

    Args:
        options: Where the lighthouse is, and limits.
        offer: The state that heals a peer; called in :meth:`quorum`, from the caller's thread.
            Nobody may write to its tensors until the round is over.
    """

    def __init__(self, options: EngineOptions, offer: Callable[[], State]) -> None:
        torchft = load_torchft("cluster()")
        self.machine = options.machine
        self._options = options
        self._offer = offer
        self._host = options.host or address_towards(options.address)
        self._step = 0
        self._failures = 0
        self._broken = True
        self._group: Group | None = None
        self._calls = _Calls(f"cluster-{self.machine}")
        self._store, store_port = own_store(self._host, options.timeout_s)
        self._store_address = joined(self._host, store_port)
        self._states = StateServer(self._host, options.token, options.timeout_s)
        lighthouse, port = host_and_port("address", options.address)
        self._manager: Any = torchft.ManagerServer(
            replica_id=self.machine,
            lighthouse_addr=f"http://{joined(lighthouse, port)}",
            hostname=f"[{self._host}]" if ":" in self._host else self._host,
            bind=joined(self._host, 0),
            store_addr=self._store_address,
            world_size=1,
            heartbeat_interval=timedelta(seconds=options.heartbeat_s),
            connect_timeout=timedelta(seconds=options.quorum_timeout_s),
            quorum_retries=options.quorum_retries,
        )
        self._client_of: Any = torchft.ManagerClient
        self._client: Any = torchft.ManagerClient(
            self._manager.address(), connect_timeout=timedelta(seconds=options.timeout_s)
        )

    @property
    def step(self) -> int:
        """Rounds committed, as this machine knows."""
        return self._step

    def quorum(self) -> Quorum:
        """See :meth:`Engine.quorum`."""
        self._states.withdraw()
        found = self._calls.run(self._ask_for_quorum)
        if self._group is None or self._broken or found.quorum_id != self._group.generation:
            self._broken = True
            self._group = None
            self._group = self._calls.run(lambda: self._connect(found))
        self._broken = False
        healed = None
        try:
            if found.recover_dst_replica_ranks:
                self._states.offer(found.max_step, self._offer())
            if found.heal:
                healed = self._calls.run(lambda: self._heal(found))
                self._step = found.max_step
        except BaseException:
            self._fail()
            raise
        group = self._group
        return Quorum(
            generation=group.generation, rank=group.rank, members=group.members, healed=healed
        )

    def gather(self, facts: bytes) -> tuple[bytes, ...]:
        """See :meth:`Engine.gather`."""
        return self._in_round(lambda group: group.gather(facts))

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """See :meth:`Engine.all_reduce`."""
        self._in_round(lambda group: group.all_reduce(tensors))

    def commit(self, ok: bool) -> bool:
        """See :meth:`Engine.commit`."""
        self._states.withdraw()
        ok = ok and not self._broken
        timeout = timedelta(seconds=self._options.timeout_s)
        done = self._calls.run(lambda: bool(self._client.should_commit(0, self._step, ok, timeout)))
        if done:
            self._step += 1
            self._failures = 0
        else:
            self._fail()
        return done

    def reset(self) -> None:
        """See :meth:`Engine.reset`."""
        self._step = 0

    def close(self) -> None:
        """See :meth:`Engine.close`."""
        self._calls.close()
        self._states.close()
        self._manager.shutdown()
        self._group = None

    def _fail(self) -> None:
        self._broken = True
        self._failures += 1

    def _in_round(self, call: Callable[[Group], T]) -> T:
        group = self._group
        if group is None or self._broken:
            raise EngineError("the round has failed: form a quorum first")
        try:
            return self._calls.run(lambda: call(group))
        except BaseException:
            self._fail()
            raise

    def _ask_for_quorum(self) -> Any:
        try:
            return self._client._quorum(
                group_rank=0,
                step=self._step,
                checkpoint_metadata=self._states.address,
                shrink_only=False,
                timeout=timedelta(seconds=self._options.quorum_timeout_s),
                init_sync=True,
                commit_failures=self._failures,
            )
        except (TimeoutError, RuntimeError) as error:
            raise EngineError(f"no quorum: {error}") from error

    def _connect(self, found: Any) -> Group:
        timeout = timedelta(seconds=self._options.timeout_s)
        is_owner = found.store_address == self._store_address
        try:
            store: Any = self._store
            if not is_owner:
                host, port = host_and_port("store", found.store_address)
                store = _c10d.TCPStore(
                    host, port, is_master=False, wait_for_workers=False, timeout=timeout
                )
            return Group(
                store=store,
                is_owner=is_owner,
                generation=found.quorum_id,
                rank=found.replica_rank,
                members=found.replica_ids,
                host=self._host,
                token=self._options.token,
                timeout_s=self._options.timeout_s,
            )
        except RuntimeError as error:
            self._failures += 1
            raise EngineError(f"the machines could not connect: {error}") from error

    def _heal(self, found: Any) -> State:
        timeout = timedelta(seconds=self._options.timeout_s)
        try:
            source = self._client_of(found.recover_src_manager_address, connect_timeout=timeout)
            address = source._checkpoint_metadata(0, timeout=timeout)
        except (TimeoutError, RuntimeError) as error:
            raise EngineError(f"the machine that heals this one is gone: {error}") from error
        return fetch_state(address, found.max_step, self._options.token, self._options.timeout_s)


class _Calls:
    """Runs blocking calls on a thread of its own, so that :meth:`close` wakes who waits."""

    def __init__(self, name: str) -> None:
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], T]) -> T:
        """What a call returns or raises.

        Raises:
            EngineClosed: Closed before or meanwhile; the call ends by its own timeout.
        """
        done: list[tuple[T | None, BaseException | None]] = []

        def work() -> None:
            try:
                entry: tuple[T | None, BaseException | None] = (call(), None)
            except BaseException as error:
                entry = (None, error)
            with self._changed:
                done.append(entry)
                self._changed.notify_all()

        with self._changed:
            if not self._closed:
                self._todo.put(work)
            self._changed.wait_for(lambda: done or self._closed)
            if not done:
                raise EngineClosed("the engine is closed")
        [(result, error)] = done
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._todo.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(0.5)

    def _work(self) -> None:
        while (call := self._todo.get()) is not None:
            call()


def own_store(host: str, timeout_s: float) -> tuple[Any, int]:
    """A store that listens on this address alone, and its port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = _c10d.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, port


def address_towards(address: str) -> str:
    """This machine's own address on the way to another; nothing is sent."""
    host, port = host_and_port("address", address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, proto, _, target = found[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(f"the lighthouse's address {address!r} leads nowhere: {error}") from error
