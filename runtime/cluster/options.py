"""EngineOptions: address of the cluster, timeouts and limits."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.core.checks import check_float, check_int, check_text


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Address of the cluster, timeouts and limits.

    Attributes:
        address: ``host:port`` of the lighthouse.
        min_machines: Fewest machines in a round; more than half of all machines rules out two
            histories under a network partition.
        token: Secret shared by all machines; ``None`` trusts every machine that reaches the
            lighthouse.
        timeout_s: Longest wait for a machine that neither responds nor breaks its connection,
            in seconds, in each call except :meth:`ClusterEngine.quorum`.
        host: Name or address by which the other machines reach this one, and the only one
            it listens on; empty: the one from which it reaches the lighthouse.
        machine: Id of this machine, unique to this start of the process.
        compression: Encoding of :meth:`ClusterEngine.all_reduce`: ``None`` (uncompressed),
            ``"bf16"``, or ``"int8"`` with error feedback.
        connect_timeout_s: Longest wait for the machines of a quorum to connect, in seconds, if
            below ``timeout_s``.
        heal_timeout_s: Longest time to receive the state, in seconds; the other machines wait as
            long.
        lighthouse_timeout_s: Longest outage of the lighthouse, in seconds.
        heartbeat_s: Interval of this machine's heartbeats to the lighthouse, in seconds.
        max_state_bytes: Limit of the state that heals this machine.
    """

    address: str
    min_machines: int = 1
    token: str | None = field(default=None, repr=False)
    timeout_s: float = 30.0
    host: str = ""
    machine: str = field(default_factory=lambda: new_machine_id())
    compression: str | None = None
    connect_timeout_s: float = 10.0
    heal_timeout_s: float = 600.0
    lighthouse_timeout_s: float = 600.0
    heartbeat_s: float = 0.1
    max_state_bytes: int = 1 << 36

    def __post_init__(self) -> None:
        check_text("cluster: address", self.address, ADDRESS_REMEDY)
        split_host_port("cluster: address", self.address)
        check_int("cluster: min_machines", self.min_machines, 1)
        for name in ("timeout_s", "connect_timeout_s", "heal_timeout_s", "heartbeat_s"):
            check_float(f"cluster: {name.removesuffix('_s')}", getattr(self, name), 0.0, above=True)
        check_float("cluster: lighthouse_timeout", self.lighthouse_timeout_s, 0.0)
        check_int("cluster: max_state_bytes", self.max_state_bytes, 0)
        if not self.machine or len(self.machine.encode()) > MAX_MACHINE_ID_BYTES:
            raise ValueError(
                f"cluster: machine({self.machine!r}): pass an id of 1 to "
                f"{MAX_MACHINE_ID_BYTES} bytes"
            )
        if self.compression not in COMPRESSIONS:
            raise ValueError(
                f"cluster: compression({self.compression!r}): pass None, 'bf16' or 'int8'"
            )
        if self.token is not None:
            check_text("cluster: token", self.token, "a secret that all machines share, or None")
        if self.host != "":
            check_text("cluster: host", self.host, "a name or an address of this machine")

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, **given: Any
    ) -> EngineOptions:
        """Options, from environment variables where not given.

        ``GPUWORKER_CLUSTER`` is the address; ``GPUWORKER_CLUSTER_MIN_MACHINES``, ``_TOKEN``,
        ``_TIMEOUT``, ``_HOST`` and ``_COMPRESSION`` are the rest.

        Args:
            environ: Environment variables; those of the process by default.
            given: Options by name; ``None`` counts as not given.

        Raises:
            ValueError: There is no address, or a value is out of range; names the variable.
        """
        found = os.environ if environ is None else environ
        options = {name: value for name, value in given.items() if value is not None}
        for name, (variable, kind) in ENV_VARIABLES.items():
            if name not in options and found.get(variable):
                try:
                    options[name] = kind(found[variable])
                except ValueError as error:
                    raise ValueError(f"{variable}={found[variable]!r}: pass a number") from error
        if "address" not in options:
            raise ValueError(
                "cluster(): pass the lighthouse's address, for instance 'host:29510', or set "
                f"{ENV_VARIABLES['address'][0]}; 'gpuworker lighthouse' starts one"
            )
        return cls(**options)


ADDRESS_REMEDY = "'host:port', for instance 'host:29510'"
MAX_MACHINE_ID_BYTES = 256
COMPRESSIONS = (None, "bf16", "int8")
ENV_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "address": ("GPUWORKER_CLUSTER", str),
    "min_machines": ("GPUWORKER_CLUSTER_MIN_MACHINES", int),
    "token": ("GPUWORKER_CLUSTER_TOKEN", str),
    "timeout_s": ("GPUWORKER_CLUSTER_TIMEOUT", float),
    "host": ("GPUWORKER_CLUSTER_HOST", str),
    "compression": ("GPUWORKER_CLUSTER_COMPRESSION", str),
}
"""Environment variable and parser of each option."""


def new_machine_id() -> str:
    """An id unique to this start of the process: ``host-pid-random``."""
    host = socket.gethostname().split(".")[0] or "machine"
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


def split_host_port(name: str, address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[host]:port``.

    Raises:
        ValueError: The text is neither; names the option.
    """
    text = address.removeprefix("http://")
    host, colon, port = text.rpartition(":")
    bare = host.strip("[]")
    if not colon or not bare or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{name}({address!r}): pass {ADDRESS_REMEDY}")
    return bare, int(port)


def join_host_port(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
