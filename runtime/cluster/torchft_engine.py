"""The engine on torchft: its lighthouse and its manager say who takes part, Gloo connects them.

torchft's ``Manager`` in Python is left out, as are its ``LocalSGD`` and ``DiLoCo``: it tells
neither who the members are nor whether healing failed, synchronizes a CUDA device in each
call, and its transport unpickles what it receives. Its server and client, on which it builds,
are used as they are.

What torchft itself leaves open: the lighthouse and each manager's port take requests from
whoever reaches them, among them one that ends the process; so does the store, which the
machines exchange addresses through; and what Gloo sends is neither signed nor encrypted. All
of them listen only on the address that the user named, or on that by which this machine
reaches the lighthouse. The remedy is a private network or a tunnel.
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

from runtime.cluster.compression import CODECS, ErrorFeedback
from runtime.cluster.engine import Engine, EngineClosed, EngineError, PeerRefused, Quorum, State
from runtime.cluster.lighthouse import load_torchft
from runtime.cluster.machine_group import Group
from runtime.cluster.options import EngineOptions, host_and_port, joined
from runtime.cluster.state_server import StateServer, fetch_state

logger = logging.getLogger(__name__)

# Any: the type stubs leave out most of the names below.
_c10d: Any = torch.distributed

T = TypeVar("T")

REQUEST_S = 15.0
"""Limit of one request for a quorum, after which it is made again."""
RETRIES = 30
"""How often torchft's manager connects to the lighthouse anew within a request."""
RECONNECT_S = 2.0
"""How long each of these may take."""
START_S = 30.0
"""How long a machine that starts waits for a lighthouse that is away."""
PAUSE_S = 0.2
"""Between two quorums where too few machines are there."""
LOOK_S = 0.1
"""How often a call that waits looks whether it is given up."""
CLOSE_S = 1.0
"""How long :meth:`TorchftEngine.close` waits for a call that is under way."""


class TorchftEngine(Engine):
    """Machines joined by torchft. See the module for what it leaves open.

    Args:
        options: Where the lighthouse is, and limits.
        offer: The state that heals a peer; called in :meth:`quorum`, by the same thread. It is
            copied in the call.

    Raises:
        ImportError: torchft is not installed; says how to install it.
        EngineError: The lighthouse's name leads nowhere, or it does not answer for
            :data:`START_S`; or this machine has no such host.
    """

    def __init__(self, options: EngineOptions, offer: Callable[[], State]) -> None:
        torchft = load_torchft("cluster()")
        self.machine = options.machine
        self._options = options
        self._offer = offer
        self._step = 0
        self._is_new = True  # it has no part in any history yet
        self._failures = 0
        self._refused: dict[str, str] = {}
        self._banned: set[str] = set()
        self._behind: tuple[str, ...] = ()
        self._group: Group | None = None
        self._parting: Group | None = None  # peers may still be reading in it what is refused
        self._feedback = ErrorFeedback(CODECS[options.compression]) if options.compression else None
        self._timeout = timedelta(seconds=options.timeout_s)
        lighthouse = joined(*host_and_port("address", options.address))
        self._host = options.host.strip("[]") or address_towards(options.address)
        with ExitStack() as opened:
            try:
                self._store, port = own_store(self._host, self._timeout)
                self._store_address = joined(self._host, port)
                wait_for_lighthouse(options.address, min(START_S, options.lighthouse_timeout_s))
                self._states = StateServer(self._host, options.token, options.timeout_s)
                opened.callback(self._states.close)
                self._manager: Any = torchft.ManagerServer(
                    replica_id=self.machine,
                    lighthouse_addr=f"http://{lighthouse}",
                    hostname=f"[{self._host}]" if ":" in self._host else self._host,
                    bind=joined(self._host, 0),
                    store_addr=self._store_address,
                    world_size=1,
                    heartbeat_interval=timedelta(seconds=options.heartbeat_s),
                    connect_timeout=timedelta(seconds=RECONNECT_S),
                    quorum_retries=RETRIES,
                )
                opened.callback(self._manager.shutdown)
                self._client: Any = torchft.ManagerClient(
                    self._manager.address(), connect_timeout=self._timeout
                )
            except (OSError, RuntimeError, TimeoutError) as error:
                raise EngineError(
                    f"cluster(): cannot listen on {self._host!r} or reach the lighthouse at "
                    f"{lighthouse}: {error}"
                ) from error
            opened.pop_all()
        self._calls = _Calls(f"cluster-{self.machine}")

    @property
    def step(self) -> int:
        """See :attr:`Engine.step`."""
        return self._step

    def quorum(self) -> Quorum:
        """See :meth:`Engine.quorum`."""
        self._states.withdraw()
        if self._feedback is not None:
            self._feedback.drop()
        try:
            while True:
                found = self._ask_until_answered()
                group = self._connected(found)
                if len(group.members) >= self._options.min_machines:
                    break
                self._calls.pause(PAUSE_S)
            healed = self._heal(group, found)
        except BaseException:
            self._failed()
            raise
        return Quorum(
            generation=group.generation,
            rank=group.rank,
            members=group.members,
            healed=healed,
            refused=tuple(sorted(group.refused)),
        )

    def gather(self, facts: bytes) -> tuple[bytes, ...]:
        """See :meth:`Engine.gather`."""
        patience = self._options.heal_timeout_s if self._behind else None
        self._behind = ()
        return self._in_round(lambda group: group.gather(facts, patience))

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """See :meth:`Engine.all_reduce`."""
        self._in_round(lambda group: group.all_reduce(tensors, self._feedback))

    def commit(self, ok: bool) -> bool:
        """See :meth:`Engine.commit`."""
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
            self._failed()
            raise late from error
        if not done:
            self._failed()
            return False
        self._step += 1
        self._is_new = False
        self._failures = 0
        if self._feedback is not None:
            self._feedback.keep()
        return True

    def reset(self, step: int = 0) -> None:
        """See :meth:`Engine.reset`."""
        self._step = step
        self._is_new = self._is_new and step == 0
        if self._feedback is not None:
            self._feedback.forget()

    def give_up(self, within_s: float) -> None:
        """See :meth:`Engine.give_up`."""
        self._calls.give_up(within_s)

    def close(self) -> None:
        """See :meth:`Engine.close`."""
        self._calls.close()
        self._states.close()
        self._manager.shutdown()
        self._group = self._parting = None

    def _failed(self) -> None:
        """The next quorum has to connect anew; letting go of the connections tells the peers."""
        self._group = None
        self._failures += 1

    def _refuse(self, group: Group, error: PeerRefused) -> None:
        """All have gathered the same, and each is to see for itself whom to refuse."""
        self._banned.update(error.machines)
        self._parting = group

    def _in_round(self, call: Callable[[Group], T]) -> T:
        group = self._group
        if group is None:
            raise EngineError("the round has failed, or has no quorum yet: form one first")
        try:
            return self._calls.run(lambda: call(group))
        except BaseException as error:
            if isinstance(error, PeerRefused):
                self._refuse(group, error)
            del group
            self._failed()
            raise

    def _ask_until_answered(self) -> Any:
        """torchft's quorum. Blocks while the others are not ready.

        Raises:
            EngineError: The lighthouse has not answered for as long as the options say.
        """
        silent_since: float | None = None
        while True:
            try:
                return self._calls.run(self._ask)
            except (RuntimeError, TimeoutError) as error:
                if isinstance(error, EngineClosed):
                    raise
                if self._calls.run(lambda: answers(self._options.address)):
                    silent_since = None  # it waits for machines
                    self._calls.pause(PAUSE_S if isinstance(error, RuntimeError) else 0.0)
                    continue
                now = time.monotonic()
                if silent_since is None:
                    silent_since = now
                    logger.warning("the lighthouse at %s is away", self._options.address)
                if now - silent_since >= self._options.lighthouse_timeout_s:
                    raise EngineError(
                        f"the lighthouse at {self._options.address} has been away for "
                        f"{now - silent_since:.0f} s: start one there with 'python -m runtime "
                        "lighthouse'"
                    ) from error
                self._calls.pause(PAUSE_S)

    def _ask(self) -> Any:
        return self._client._quorum(
            group_rank=0,
            step=self._step,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=timedelta(seconds=REQUEST_S),
            init_sync=True,
            commit_failures=self._failures,
        )

    def _connected(self, found: Any) -> Group:
        """The group of a quorum: that of the last one, if nothing has changed."""
        if self._group is not None and self._group.generation == found.quorum_id:
            return self._group
        self._group = None
        group = self._calls.run(lambda: self._connect(found))
        self._group, self._parting = group, None
        for machine, why in group.refused.items():
            if machine not in self._refused:
                logger.warning("machine %s is refused: %s", machine, why)
        self._refused = group.refused
        if self._is_new and group.members == (self.machine,) and group.refused:
            others = ", ".join(sorted(group.refused))
            raise PeerRefused(
                (self.machine,),
                f"{others} have another token than this machine, or none, or another version",
            )
        return group

    def _connect(self, found: Any) -> Group:
        connect_s = min(self._options.connect_timeout_s, self._options.timeout_s)
        is_owner = found.store_address == self._store_address
        store: Any = self._store
        if not is_owner:
            host, port = host_and_port("store", found.store_address)
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
        return Group(
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

    def _heal(self, group: Group, found: Any) -> State | None:
        """Bring all members to the same step; the state received, if this one was behind.

        torchft says whether steps differ. Who heals whom follows from what the members, whose
        word is signed, tell of themselves.
        """
        self._behind = ()
        if found.max_world_size == found.replica_world_size and found.max_step > 0:
            return None
        own = json.dumps([self._step, self._states.address]).encode()
        try:
            told = self._calls.run(lambda: group.gather(own))
            steps, addresses = _steps_and_addresses(group.members, told)
        except PeerRefused as error:
            self._refuse(group, error)
            raise
        top = max(steps.values())
        ahead = [name for name in group.members if steps[name] == top]
        if top == 0:
            ahead = ahead[:1]
        behind = [name for name in group.members if name not in ahead]
        self._behind = tuple(behind)
        # A source that fails is another one in the next generation.
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
                within_s=self._options.heal_timeout_s,
                max_bytes=self._options.max_state_bytes,
            )
        )
        self._step = top
        self._is_new = False
        if self._feedback is not None:
            self._feedback.forget()
        return state


def _steps_and_addresses(
    members: Sequence[str], told: Sequence[bytes]
) -> tuple[dict[str, int], dict[str, str]]:
    steps: dict[str, int] = {}
    addresses: dict[str, str] = {}
    for name, content in zip(members, told, strict=True):
        try:
            step, address = json.loads(content)
            host_and_port("address", address)
            if type(step) is not int or step < 0:
                raise ValueError(f"step {step!r:.80}")
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise PeerRefused((name,), f"it told no step and address: {error}") from error
        steps[name], addresses[name] = step, address
    return steps, addresses


class _Calls:
    """Runs blocking calls on a thread of its own, so that nobody has to wait for their end."""

    def __init__(self, name: str) -> None:
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._ends = [math.inf]  # only appended to, so that no thread loses another's
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], T]) -> T:
        """What a call returns or raises.

        Raises:
            EngineClosed: Given up before or meanwhile; a call under way ends by its own timeout.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)
            with self._changed:
                self._changed.notify_all()

        with self._changed:
            if time.monotonic() < min(self._ends):
                self._todo.put(work)
            if not self._wait(lambda: bool(results or errors), math.inf):
                raise EngineClosed("the engine is closed")
        if errors:
            raise errors.pop()
        return results.pop()

    def pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            EngineClosed: Given up before or meanwhile.
        """
        with self._changed:
            self._wait(lambda: False, time.monotonic() + seconds)
        if time.monotonic() >= min(self._ends):
            raise EngineClosed("the engine is closed")

    def _wait(self, ready: Callable[[], bool], until: float) -> bool:
        """Wait, under the lock, until it is so, or until a time or the end; whether it is so.

        Whoever gives up takes no lock, and so wakes nobody.
        """
        while not (done := ready()):
            left_s = min(until, *self._ends) - time.monotonic()
            if left_s <= 0:
                break
            self._changed.wait(min(left_s, LOOK_S))
        return done

    def give_up(self, within_s: float) -> None:
        """See :meth:`Engine.give_up`."""
        self._ends.append(time.monotonic() + within_s)

    def close(self) -> None:
        """Give up, and wait a little for the call that is under way. Idempotent."""
        self.give_up(0.0)
        self._todo.put(None)
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        while (call := self._todo.get()) is not None:
            call()
            del call  # it holds connections


def own_store(host: str, timeout: timedelta) -> tuple[Any, int]:
    """A store that listens on this address and no other, and its port."""
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


def address_towards(address: str) -> str:
    """This machine's own address on the way to another; nothing is sent.

    Raises:
        EngineError: The name is not known, or there is no way.
    """
    host, port = host_and_port("address", address)
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(f"cluster({address!r}): no way to this host: {error}") from error


def wait_for_lighthouse(address: str, timeout_s: float) -> None:
    """Return once the lighthouse takes connections, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while not answers(address) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)


def answers(address: str) -> bool:
    """Whether something takes connections there."""
    try:
        socket.create_connection(host_and_port("address", address), RECONNECT_S).close()
    except OSError:
        return False
    return True
