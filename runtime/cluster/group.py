"""One generation of connections between machines: who belongs to it, gather and all-reduce."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from runtime.cluster.engine import MAX_FACTS_BYTES, EngineError, PeerRefused

# Any: the type stubs leave out most of the names below.
_c10d: Any = torch.distributed

MAC_BYTES = 32
MAX_NAME_BYTES = 256
_HEADER = struct.Struct(">QH")


def signature(token: str | None, *parts: bytes) -> bytes:
    """HMAC-SHA256 of parts, none of which can pass for another; zeros without a token."""
    if token is None:
        return bytes(MAC_BYTES)
    mac = hmac.new(token.encode(), digestmod=hashlib.sha256)
    for part in parts:
        mac.update(struct.pack(">Q", len(part)))
        mac.update(part)
    return mac.digest()


def sealed(token: str | None, generation: int, machine: str, payload: bytes) -> bytes:
    """A payload with its machine's id, signed for this generation."""
    name = machine.encode()
    mac = signature(token, b"gather", _HEADER.pack(generation, len(name)), name, payload)
    return mac + _HEADER.pack(generation, len(name)) + name + payload


def opened(token: str | None, generation: int, machine: str, envelope: bytes) -> bytes:
    """The payload of :func:`sealed`.

    Raises:
        PeerRefused: It is not this machine's, or not signed with the token.
    """
    start = MAC_BYTES + _HEADER.size
    if len(envelope) < start:
        raise PeerRefused((machine,), f"{len(envelope)} bytes are no envelope")
    mac, header = envelope[:MAC_BYTES], envelope[MAC_BYTES:start]
    number, length = _HEADER.unpack(header)
    name, payload = envelope[start : start + length], envelope[start + length :]
    if not hmac.compare_digest(mac, signature(token, b"gather", header, name, payload)):
        raise PeerRefused((machine,), "its message is not signed with this cluster's token")
    if number != generation or name != machine.encode():
        raise PeerRefused((machine,), "its message is of another generation or machine")
    return payload


class Group:
    """Gloo connections of one generation; each call blocks, and one thread makes them all."""

    def __init__(
        self,
        *,
        store: Any,
        is_owner: bool,
        generation: int,
        rank: int,
        members: Sequence[str],
        host: str,
        token: str | None,
        timeout_s: float,
    ) -> None:
        self.generation = generation
        self.members = tuple(members)
        self.rank = rank
        self._token = token
        self._timeout = timedelta(seconds=timeout_s)
        session = _session(store, is_owner, generation, rank, len(members), self._timeout)
        backend = _c10d.ProcessGroupGloo
        options = backend._Options()
        options._devices = [backend.create_device(hostname=host)]
        options._timeout = self._timeout
        options._threads = 1
        self._store = _c10d.PrefixStore(session, store)
        self._backend = backend(self._store, rank, len(members), options)

    def gather(self, payload: bytes) -> tuple[bytes, ...]:
        """See :meth:`Engine.gather`."""
        own = sealed(self._token, self.generation, self.members[self.rank], payload)
        size = len(self.members)
        lengths = torch.zeros(size, dtype=torch.int64)
        self._all_gather(lengths, torch.tensor([len(own)]))
        limit = MAX_FACTS_BYTES + MAC_BYTES + _HEADER.size + MAX_NAME_BYTES
        bad = [m for m, n in zip(self.members, lengths.tolist(), strict=True) if not 0 < n <= limit]
        if bad:
            raise PeerRefused(bad, f"a message of more than {limit} bytes, or of none")
        longest = int(lengths.max())
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        whole = torch.zeros(size * longest, dtype=torch.uint8)
        self._all_gather(whole, mine)
        rows = whole.view(size, longest)
        found = []
        for machine, row, length in zip(self.members, rows, lengths.tolist(), strict=True):
            envelope = row[:length].numpy().tobytes()
            found.append(opened(self._token, self.generation, machine, envelope))
        return tuple(found)

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """See :meth:`Engine.all_reduce`."""
        for tensor in tensors:
            flat = tensor.view(-1)
            wire = flat.float() if flat.dtype is torch.bfloat16 else flat
            options = _c10d.AllreduceOptions()
            options.reduceOp = _c10d.ReduceOp.SUM
            options.timeout = self._timeout
            self._wait(self._backend.allreduce([wire], options))
            if wire is not flat:
                flat.copy_(wire)

    def _all_gather(self, output: Tensor, part: Tensor) -> None:
        options = _c10d.distributed_c10d.AllgatherOptions()
        options.timeout = self._timeout
        self._wait(self._backend._allgather_base(output.view(-1), part.view(-1), options))

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise EngineError(f"a machine is gone or late: {error}") from error


def _session(
    store: Any, is_owner: bool, generation: int, rank: int, size: int, timeout: timedelta
) -> str:
    """A name for this generation that no earlier one had, the same on all machines.

    A restarted lighthouse counts generations from 1 again, and what the earlier ones left in
    the store must not be taken for this one's. So every machine announces itself with a fresh
    number, and the store's owner answers each number with the session's name.
    """
    joined = f"join/{generation}/"
    nonce = secrets.token_hex(16)
    store.set(f"{joined}{rank}", nonce)
    if is_owner:
        keys = [f"{joined}{i}" for i in range(size)]
        store.wait(keys, timeout)
        name = f"session/{secrets.token_hex(16)}"
        for key in keys:
            nonces = store.get(key).decode()
            store.delete_key(key)
            store.set(f"answer/{nonces}", json.dumps(name))
    key = f"answer/{nonce}"
    store.wait([key], timeout)
    name = str(json.loads(store.get(key)))
    store.delete_key(key)
    return name
