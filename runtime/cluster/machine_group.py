"""One generation of connections between machines: who belongs to it, gather and all-reduce."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from coordinator.cluster.facts import PROTOCOL_VERSION
from runtime.cluster.compression import ErrorFeedback, is_compressed
from runtime.cluster.engine import MAX_FACTS_BYTES, EngineError, PeerRefused
from runtime.cluster.signing import MAX_OVERHEAD_BYTES, opened, sealed

# Any: the type stubs leave out most of the names below.
_c10d: Any = torch.distributed

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
MAX_HELLO_BYTES = 1 << 16
_SESSION = re.compile(r"session/[0-9a-f]{32}")


class Group:
    """Gloo connections between the machines that trust each other.

    Every call blocks; one thread makes them all. The machines must make the same calls.

    Args:
        store: What the machines exchange addresses through; one of them has it in its process.
        is_owner: Whether this one does.
        generation: The quorum's number.
        rank: This machine's place in ``candidates``.
        candidates: Ids of the quorum's machines, in its order.
        host: Address of this machine; connections listen nowhere else.
        token: What the machines share.
        banned: Machines that this one refuses; those that another one refuses are refused too.
        connect_timeout_s: Limit of the construction, in seconds.
        timeout_s: Limit of each exchange.

    Raises:
        EngineError: A machine did not come.
        PeerRefused: The others have another token, or refuse this machine.

    Attributes:
        members: Ids of the machines that take part, sorted.
        refused: The others of the quorum, and why.
    """

    def __init__(
        self,
        *,
        store: Any,
        is_owner: bool,
        generation: int,
        rank: int,
        candidates: Sequence[str],
        host: str,
        token: str | None,
        banned: set[str],
        connect_timeout_s: float,
        timeout_s: float,
    ) -> None:
        self.generation = generation
        self._token = token
        self._timeout = timedelta(seconds=timeout_s)
        connect = timedelta(seconds=connect_timeout_s)
        machine = candidates[rank]
        try:
            session = _session(store, is_owner, generation, rank, len(candidates), connect)
            hellos = _exchange_hellos(store, session, rank, candidates, token, banned, connect)
            self.refused = _refused(hellos, machine)
            self.members = tuple(sorted(name for name in hellos if name not in self.refused))
            self.rank = self.members.index(machine)
            among = hashlib.sha256("\n".join(self.members).encode()).hexdigest()
            backend = _c10d.ProcessGroupGloo
            options = backend._Options()
            options._devices = [backend.create_device(hostname=host)]
            options._timeout = connect
            options._threads = 1  # one exchange at a time
            prefixed = _c10d.PrefixStore(f"{session}/{among}", store)
            self._backend = backend(prefixed, self.rank, len(self.members), options)
        except RuntimeError as error:
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"the machines of a quorum could not connect: {error}") from error

    def gather(self, payload: bytes, timeout_s: float | None = None) -> tuple[bytes, ...]:
        """See :meth:`Engine.gather`.

        Args:
            payload: This machine's.
            timeout_s: How long to wait for the last machine, where that may be long.
        """
        own = sealed(self._token, "gather", self.generation, self.members[self.rank], payload)
        size = len(self.members)
        lengths = torch.empty(size, dtype=torch.int64)
        patience = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._all_gather(lengths, torch.tensor([len(own)]), patience)
        told = dict(zip(self.members, lengths.tolist(), strict=True))
        limit = MAX_FACTS_BYTES + MAX_OVERHEAD_BYTES
        bad = [machine for machine, length in told.items() if not 0 <= length <= limit]
        if bad:
            raise PeerRefused(bad, f"a message that is not of 0 to {MAX_FACTS_BYTES} bytes")
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        whole = torch.empty(size, longest, dtype=torch.uint8)
        self._all_gather(whole, padded)
        found: list[bytes] = []
        refused: list[PeerRefused] = []
        for (machine, length), row in zip(told.items(), whole, strict=True):
            envelope = row[:length].numpy().tobytes()
            try:
                found.append(opened(self._token, "gather", self.generation, machine, envelope))
            except PeerRefused as error:
                refused.append(error)
        if refused:
            names = [name for error in refused for name in error.machines]
            raise PeerRefused(names, str(refused[0]))
        return tuple(found)

    def all_reduce(self, tensors: Sequence[Tensor], feedback: ErrorFeedback | None) -> None:
        """See :meth:`Engine.all_reduce`; what travels is compressed where there is feedback."""
        for tensor in tensors:
            if tensor.dtype not in DTYPES or tensor.device.type != "cpu":
                raise ValueError(f"all_reduce: {tensor.dtype} on {tensor.device} is not summed")
            if not tensor.is_contiguous():
                raise ValueError("all_reduce: pass contiguous tensors")
        self._compare_layouts(tensors, feedback is not None)
        for place, tensor in enumerate(tensors):
            flat = tensor.view(-1)
            if feedback is not None and is_compressed(flat):
                size = len(self.members)
                feedback.all_reduce(
                    place, flat, self.rank, size, self._all_to_all, self._all_gather
                )
                continue
            wire = flat.float() if flat.dtype is torch.bfloat16 else flat
            if wire.numel():
                options = _c10d.AllreduceOptions()
                options.reduceOp = _c10d.ReduceOp.SUM
                options.timeout = self._timeout
                self._wait(self._backend.allreduce([wire], options))
            if wire is not flat:
                flat.copy_(wire)

    def _compare_layouts(self, tensors: Sequence[Tensor], is_compressed: bool) -> None:
        """A machine with tensors of other sizes would end the process of its peers, in Gloo."""
        layout = repr([(tuple(t.shape), str(t.dtype)) for t in tensors] + [is_compressed])
        own = torch.frombuffer(
            bytearray(hashlib.sha256(layout.encode()).digest()), dtype=torch.uint8
        )
        whole = torch.empty(len(self.members), own.numel(), dtype=torch.uint8)
        self._all_gather(whole, own)
        same = (whole == own).all(dim=1).tolist()
        other = [m for m, equal in zip(self.members, same, strict=True) if not equal]
        if other:
            raise EngineError(f"tensors of other shapes, dtypes or compression: {other}")

    def _all_gather(self, output: Tensor, part: Tensor, timeout: timedelta | None = None) -> None:
        options = _c10d.distributed_c10d.AllgatherOptions()
        options.timeout = timeout or self._timeout
        whole, part = output.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8)
        self._wait(self._backend._allgather_base(whole, part, options))

    def _all_to_all(self, output: Tensor, input: Tensor) -> None:
        options = _c10d.distributed_c10d.AllToAllOptions()
        options.timeout = self._timeout
        work = self._backend.alltoall_base(output.view(-1), input.view(-1), [], [], options)
        self._wait(work)

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise EngineError(f"a machine of {self.members} is gone or late: {error}") from error


def _session(
    store: Any, is_owner: bool, generation: int, rank: int, size: int, timeout: timedelta
) -> str:
    """A name for this generation that no earlier one had, the same on all machines.

    A restarted lighthouse counts generations from 1 again, and what earlier ones left in the
    store must not be taken for this one's. So every machine announces itself with a fresh
    number, and the store's owner answers each number with the session's name.
    """
    number = secrets.token_hex(16)
    store.set(f"join/{generation}/{rank}", number)
    if is_owner:
        name = f"session/{secrets.token_hex(16)}"
        keys = [f"join/{generation}/{i}" for i in range(size)]
        store.wait(keys, timeout)
        for key in keys:
            store.set(f"answer/{store.get(key).decode(errors='replace')[:32]}", name)
            store.delete_key(key)
    answer = f"answer/{number}"
    store.wait([answer], timeout)
    name = str(store.get(answer).decode(errors="replace"))
    store.delete_key(answer)
    if not _SESSION.fullmatch(name):
        raise EngineError(f"the store's owner named the session {name!r:.80}")
    return name


def _exchange_hellos(
    store: Any,
    session: str,
    rank: int,
    candidates: Sequence[str],
    token: str | None,
    banned: set[str],
    timeout: timedelta,
) -> dict[str, list[str] | None]:
    """By machine whom it refuses; ``None`` where its hello is not signed with the token, or of
    another version of what machines tell each other."""
    body = json.dumps([PROTOCOL_VERSION, sorted(banned.intersection(candidates))]).encode()
    store.set(f"{session}/{rank}", sealed(token, session, rank, candidates[rank], body))
    keys = [f"{session}/{i}" for i in range(len(candidates))]
    store.wait(keys, timeout)
    hellos: dict[str, list[str] | None] = {}
    for i, (machine, content) in enumerate(zip(candidates, store.multi_get(keys), strict=True)):
        try:
            if len(content) > MAX_HELLO_BYTES:
                raise ValueError(f"{len(content)} bytes")
            version, names = json.loads(opened(token, session, i, machine, content))
            if version != PROTOCOL_VERSION:
                raise ValueError(f"version {version!r}")
            hellos[machine] = [str(name) for name in names]
        except (PeerRefused, ValueError, TypeError, RecursionError):
            hellos[machine] = None
    return hellos


def _refused(hellos: dict[str, list[str] | None], machine: str) -> dict[str, str]:
    """Who takes no part, and why.

    Raises:
        PeerRefused: This machine takes none.
    """
    other = "it has another token or version"
    refused = {name: other for name, told in hellos.items() if told is None}
    for name, told in hellos.items():
        for peer in told or ():
            if peer == machine and name != machine:
                raise PeerRefused((machine,), f"{name} refuses this machine for what it sent")
            if peer in hellos and peer != machine:
                refused.setdefault(peer, f"{name} refuses it for what it sent")
    return refused
