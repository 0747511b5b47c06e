"""The lighthouse, torchft's own: the server that tells machines who else wants a round."""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

from runtime.cluster.options import joined
from runtime.core.checks import check_float, check_int, need

DEFAULT_PORT = 29510


JOIN_TIMEOUT_S = 60.0
"""How long a round waits, by default, for machines that live and do not want one yet."""


TICK_MS = 20
"""How often the lighthouse looks whose heartbeat is late."""


class Lighthouse:
    """A lighthouse in threads of this process, from the constructor on.

    It trusts whoever reaches its port, and shows a page there on which members can be
    killed: bind it to a private network.

    Args:
        host: Name or address of this machine to listen on, and no other.
        port: 0 picks one that is free.
        min_machines: Fewest machines that make a round.
        join_timeout_s: How long machines that want a round wait for others that live and
            do not want one yet, in seconds: longer than the period. Rounds in which all take
            part never wait.
        heartbeat_timeout_s: After how many seconds of silence a machine counts as dead.

    Raises:
        ImportError: torchft is not installed.
        OSError: It cannot listen there; the message says what to do.

    Attributes:
        address: ``host:port`` for the machines.
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
            *_, (numeric, *_) = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
            self._server: Any = torchft.LighthouseServer(
                bind=joined(str(numeric), port),
                min_replicas=min_machines,
                join_timeout_ms=round(join_timeout_s * 1000),
                quorum_tick_ms=TICK_MS,
                heartbeat_timeout_ms=round(heartbeat_timeout_s * 1000),
            )
        except (OSError, RuntimeError) as error:
            raise OSError(
                f"the lighthouse cannot listen on {joined(name, port)}: {error}; pass a host of "
                "this machine and a port that is free, or port 0"
            ) from error
        # Its own answer names the machine, whatever it is bound to.
        self.address = joined(name, int(self._server.address().rpartition(":")[2]))

    def close(self) -> None:
        """Take no more connections; those that exist end with the process."""
        self._server.shutdown()


def load_torchft(what: str) -> Any:
    """torchft's servers and clients.

    Its servers log to stderr on their own; from ``warn`` upwards, unless ``RUST_LOG`` says
    something else.

    Args:
        what: Who needs them, for the error.

    Raises:
        ImportError: torchft is not installed; says how to install it.
    """
    need(what, ("torchft",), "cluster")
    if "RUST_LOG" in os.environ:
        return importlib.import_module("torchft.coordination")
    os.environ["RUST_LOG"] = "warn"  # read once, in the import
    try:
        return importlib.import_module("torchft.coordination")
    finally:
        del os.environ["RUST_LOG"]
