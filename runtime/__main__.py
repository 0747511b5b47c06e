"""``python -m runtime`` shows what there is to train on; ``lighthouse`` serves a cluster."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from runtime.cluster.engine import VARIABLES
from runtime.cluster.lighthouse import DEFAULT_PORT, Lighthouse
from runtime.machine_report import machine_report


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """What to do, by the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m runtime",
        description="Without a command: the devices, and how replicas on them would average.",
    )
    commands = parser.add_subparsers(dest="command")
    server = commands.add_parser(
        "lighthouse",
        help="serve a cluster of machines until Ctrl-C or SIGTERM",
        description="The server at which the machines of a cluster meet. It trusts whoever "
        "reaches its port: bind it to a private network.",
    )
    server.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 picks a free one")
    server.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of this machine that it listens on; by default only this machine reaches it",
    )
    server.add_argument(
        "--min-machines", type=int, default=1, help="fewest machines that make a round"
    )
    server.add_argument(
        "--join-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long a round waits for machines that live and are not ready",
    )
    server.add_argument(
        "--heartbeat-timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="after which silence a machine counts as dead",
    )
    return parser.parse_args(args)


def serve_lighthouse(args: argparse.Namespace) -> None:
    """Run a lighthouse until Ctrl-C or SIGTERM."""
    ends = (signal.SIGINT, signal.SIGTERM)
    # Blocked before its threads start, so that the signal waits for sigwait.
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        lighthouse = Lighthouse(
            host=args.host,
            port=args.port,
            min_machines=args.min_machines,
            join_timeout_s=args.join_timeout,
            heartbeat_timeout_s=args.heartbeat_timeout,
        )
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"python -m runtime lighthouse: {error}") from None
    sys.stdout.write(
        f"lighthouse at {lighthouse.address}; on each machine: "
        f"cluster({lighthouse.address!r}), or {VARIABLES['address'][0]}={lighthouse.address}\n"
    )
    sys.stdout.flush()
    signal.sigwait(ends)
    lighthouse.close()


def main(args: Sequence[str] | None = None) -> None:
    """Do what the command line says."""
    found = parse_args(args)
    if found.command == "lighthouse":
        serve_lighthouse(found)
    else:
        sys.stdout.write(machine_report())


if __name__ == "__main__":
    main()
