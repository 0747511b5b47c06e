"""MachineGroup: the connections of one quorum, with gather and all-reduce."""

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

from coordinator.cluster.machine_report import PROTOCOL_VERSION
from coordinator.codec import parse_json
from runtime.cluster.compression import ErrorFeedback, is_compressible
from runtime.cluster.engine import MAX_REPORT_BYTES, EngineError, PeerRefused
from runtime.cluster.signing import MAX_OVERHEAD_BYTES, seal, unseal
from runtime.collective.process_group import BackendOwner

# Any: the type stubs lack most of the names used below.
_c10d: Any = torch.distributed

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
MAX_HELLO_BYTES = 1 << 16
_SESSION = re.compile(r"session/[0-9a-f]{32}")


class MachineGroup:
    """Gloo connections between the machines of a quorum that accept each other.

    Every call but :meth:`close` blocks, and all these are made by one thread. All machines must
    make the same calls.

    Args:
        store: Store through which the machines exchange addresses, in the process of one of them.
        is_owner: True if the store is in this process.
        rank: This machine's index in ``candidates``.
        candidates: Ids of the quorum's machines, in its order.
        host: Address of this machine, the only one on which connections listen.
        token: Secret shared by the machines.
        banned: Machines that this one refuses; a machine refused by any member is refused by all.
        connect_timeout_s: Timeout of the construction, in seconds.
        timeout_s: Timeout of each exchange, in seconds.

    Raises:
        EngineError: A machine did not connect.
        PeerRefused: The others have another token, or refuse this machine.

    Attributes:
        members: Ids of the members, sorted.
        refused: The quorum's other machines, with the reason.
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
            session = _agree_on_session(store, is_owner, generation, rank, len(candidates), connect)
            hellos = _exchange_hellos(store, session, rank, candidates, token, banned, connect)
            self.refused = _refused(hellos, machine)
            self.members = tuple(sorted(name for name in hellos if name not in self.refused))
            self.rank = self.members.index(machine)
            member_digest = hashlib.sha256("\n".join(self.members).encode()).hexdigest()
            backend = _c10d.ProcessGroupGloo
            options = backend._Options()
            options._devices = [backend.create_device(hostname=host)]
            options._timeout = connect
            options._threads = 1  # one exchange at a time
            prefixed = _c10d.PrefixStore(f"{session}/{member_digest}", store)
            owner = BackendOwner(
                lambda: backend(prefixed, self.rank, len(self.members), options),
                f"cluster-group-{generation}",
            )
            self._backend: Any = owner.backend(self)
            self._release = owner.release
        except RuntimeError as error:
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"the machines of a quorum could not connect: {error}") from error

    def close(self) -> None:
        """End the connections, which notifies the peers, as soon as no call uses them.

        Does not block; from any thread. Idempotent.
        """
        self._backend = None
        self._release()

    def gather(self, payload: bytes, timeout_s: float | None = None) -> tuple[bytes, ...]:
        """See :meth:`ClusterEngine.gather`.

        Args:
            timeout_s: Timeout for the last machine to arrive; ``None``: that of the group.
        """
        own = seal(self._token, "gather", self.generation, self.members[self.rank], payload)
        size = len(self.members)
        lengths = torch.empty(size, dtype=torch.int64)
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._all_gather(lengths, torch.tensor([len(own)]), timeout)
        sizes = dict(zip(self.members, lengths.tolist(), strict=True))
        limit = MAX_REPORT_BYTES + MAX_OVERHEAD_BYTES
        bad = [machine for machine, length in sizes.items() if not 0 <= length <= limit]
        if bad:
            raise PeerRefused(bad, f"a message longer than {MAX_REPORT_BYTES} bytes")
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        whole = torch.empty(size, longest, dtype=torch.uint8)
        self._all_gather(whole, padded)
        found: list[bytes] = []
        refused: list[PeerRefused] = []
        for (machine, length), row in zip(sizes.items(), whole, strict=True):
            envelope = row[:length].numpy().tobytes()
            try:
                found.append(unseal(self._token, "gather", self.generation, machine, envelope))
            except PeerRefused as error:
                refused.append(error)
        if refused:
            names = [name for error in refused for name in error.machines]
            raise PeerRefused(names, str(refused[0]))
        return tuple(found)

    def all_reduce(self, tensors: Sequence[Tensor], feedback: ErrorFeedback | None) -> None:
        """See :meth:`ClusterEngine.all_reduce`; compressed if ``feedback`` is given."""
        for tensor in tensors:
            if tensor.dtype not in DTYPES or tensor.device.type != "cpu":
                raise ValueError(f"all_reduce: {tensor.dtype} on {tensor.device} is not supported")
            if not tensor.is_contiguous():
                raise ValueError("all_reduce: pass contiguous tensors")
        self._compare_layouts(tensors, feedback is not None)
        for index, tensor in enumerate(tensors):
            flat = tensor.view(-1)
            if feedback is not None and is_compressible(flat):
                size = len(self.members)
                feedback.all_reduce(
                    index, flat, self.rank, size, self._all_to_all, self._all_gather
                )
                continue
            wire = flat.float() if flat.dtype is torch.bfloat16 else flat
            if wire.numel():
                options = _c10d.AllreduceOptions()
                options.reduceOp = _c10d.ReduceOp.SUM
                options.timeout = self._timeout
                self._wait(self._connected().allreduce([wire], options))
            if wire is not flat:
                flat.copy_(wire)

    def _compare_layouts(self, tensors: Sequence[Tensor], is_compressible: bool) -> None:
        """Raise if layouts differ: with unequal sizes Gloo would abort the peers' processes."""
        layout = repr([(tuple(t.shape), str(t.dtype)) for t in tensors] + [is_compressible])
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
        self._wait(self._connected()._allgather_base(whole, part, options))

    def _all_to_all(self, output: Tensor, rows: Tensor) -> None:
        options = _c10d.distributed_c10d.AllToAllOptions()
        options.timeout = self._timeout
        work = self._connected().alltoall_base(output.view(-1), rows.view(-1), [], [], options)
        self._wait(work)

    def _connected(self) -> Any:
        backend = self._backend  # once: another thread may close the group
        if backend is None:
            raise EngineError("this machine has left the group")
        return backend

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise EngineError(
                f"a machine of {self.members} is gone or timed out: {error}"
            ) from error


def _agree_on_session(
    store: Any, is_owner: bool, generation: int, rank: int, size: int, timeout: timedelta
) -> str:
    """Agree on a unique name for this generation.

    A restarted lighthouse counts generations from 1 again, and keys left in the store by earlier
    ones must not be mistaken for this one's. So every machine announces itself with a nonce, and
    the store's owner answers each nonce with the name of the session.
    """
    nonce = secrets.token_hex(16)
    store.set(f"join/{generation}/{rank}", nonce)
    if is_owner:
        name = f"session/{secrets.token_hex(16)}"
        keys = [f"join/{generation}/{i}" for i in range(size)]
        store.wait(keys, timeout)
        for key in keys:
            store.set(f"answer/{store.get(key).decode(errors='replace')[:32]}", name)
            store.delete_key(key)
    answer = f"answer/{nonce}"
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
    """The machines that each machine refuses; ``None`` where its hello is not signed with the
    token, or has another protocol version.
    """
    body = json.dumps([PROTOCOL_VERSION, sorted(banned.intersection(candidates))]).encode()
    store.set(f"{session}/{rank}", seal(token, session, rank, candidates[rank], body))
    keys = [f"{session}/{i}" for i in range(len(candidates))]
    store.wait(keys, timeout)
    hellos: dict[str, list[str] | None] = {}
    for i, (machine, content) in enumerate(zip(candidates, store.multi_get(keys), strict=True)):
        try:
            if len(content) > MAX_HELLO_BYTES:
                raise ValueError(f"{len(content)} bytes")
            version, names = parse_json(unseal(token, session, i, machine, content))
            if version != PROTOCOL_VERSION:
                raise ValueError(f"version {version!r}")
            hellos[machine] = [str(name) for name in names]
        except (PeerRefused, ValueError, TypeError):
            hellos[machine] = None
    return hellos


def _refused(hellos: dict[str, list[str] | None], machine: str) -> dict[str, str]:
    """The machines that do not take part, with the reason.

    Raises:
        PeerRefused: This machine is one of them.
    """
    other = "it has another token or version"
    refused = {name: other for name, banned in hellos.items() if banned is None}
    for name, banned in hellos.items():
        for peer in banned or ():
            if peer == machine and name != machine:
                raise PeerRefused((machine,), f"{name} refuses this machine's messages")
            if peer in hellos and peer != machine:
                refused.setdefault(peer, f"{name} refuses its messages")
    return refused
