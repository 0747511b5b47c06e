"""Lighthouse: torchft's quorum server, in this process."""

from __future__ import annotations

import importlib
import os
import secrets
import socket
from typing import Any

from runtime.cluster.lighthouse_gate import LighthouseGate
from runtime.cluster.options import join_host_port
from runtime.core.checks import check_float, check_int, require_modules

DEFAULT_PORT = 29510
JOIN_TIMEOUT_S = 60.0
"""Default time for which a quorum waits for live machines that have not requested it yet."""
TICK_INTERVAL_MS = 20
"""Interval at which the lighthouse checks heartbeats."""


class Lighthouse:
    """A torchft lighthouse in threads of this process, started by the constructor.

    It trusts every machine that reaches its port: bind it to a private network. Web pages are
    refused; see :class:`~runtime.cluster.lighthouse_gate.LighthouseGate`.

    Args:
        host: Name or address to listen on, and the only one.
        port: Port to listen on; 0 picks a free one.
        min_machines: Fewest machines in a round.
        join_timeout_s: Seconds for which a quorum waits for live machines that have not requested
            it yet: longer than the period. Rounds of all live machines never wait.
        heartbeat_timeout_s: Seconds without a heartbeat after which a machine counts as dead.

    Raises:
        ImportError: torchft is not installed.
        OSError: The address is not available; the message names the remedy.

    Attributes:
        address: ``host:port`` for :class:`EngineOptions`.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        min_machines: int = 1,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        heartbeat_timeout_s: float = 5.0,
    ) -> None:
        check_int("port", port, 0, 65535)
        check_int("min_machines", min_machines, 1)
        check_float("join_timeout_s", join_timeout_s, 0.0)
        check_float("heartbeat_timeout_s", heartbeat_timeout_s, 0.0, above=True)
        torchft = load_torchft("the lighthouse")
        name = host.strip("[]")
        try:
            family, *_, (numeric, *_) = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server((numeric, port), family=family, backlog=1024)
        except OSError as error:
            raise OSError(
                f"the lighthouse cannot listen on {join_host_port(name, port)}: {error}; pass a "
                "host of this machine and a free port, or port 0"
            ) from error
        self.address = join_host_port(name, listener.getsockname()[1])
        inner = hidden_address()
        try:
            self._server: Any = torchft.LighthouseServer(
                bind=join_host_port(inner, 0),
                min_replicas=min_machines,
                join_timeout_ms=round(join_timeout_s * 1000),
                quorum_tick_ms=TICK_INTERVAL_MS,
                heartbeat_timeout_ms=round(heartbeat_timeout_s * 1000),
            )
        except (OSError, RuntimeError) as error:
            listener.close()
            raise OSError(f"the lighthouse cannot listen on {inner}: {error}") from error
        # The server's own address has the host name, whatever it is bound to.
        inner_port = int(self._server.address().rpartition(":")[2])
        self._gate = LighthouseGate(listener, (inner, inner_port), name)

    def close(self) -> None:
        """Stop accepting connections, and end open ones."""
        self._gate.close()
        self._server.shutdown()


def hidden_address() -> str:
    """A random loopback address, which a web page cannot find; 127.0.0.1 if there is only that."""
    host = ".".join(["127", *(str(1 + secrets.randbelow(254)) for _ in range(3))])
    try:
        socket.create_server((host, 0)).close()
    except OSError:
        return "127.0.0.1"
    return host


def load_torchft(feature: str) -> Any:
    """Import torchft's servers and clients.

    The servers log to stderr by themselves: from level ``warn``, unless ``RUST_LOG`` is set.

    Args:
        feature: The feature that needs them, for the error message.

    Raises:
        ImportError: torchft is not installed; the message has the command.
    """
    require_modules(feature, ("torchft",), "cluster")
    if "RUST_LOG" in os.environ:
        return importlib.import_module("torchft.coordination")
    os.environ["RUST_LOG"] = "warn"  # read once, at import
    try:
        return importlib.import_module("torchft.coordination")
    finally:
        del os.environ["RUST_LOG"]
