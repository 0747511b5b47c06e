"""Command line: a report on devices and transports, and ``lighthouse``, a cluster's server."""

from __future__ import annotations

import argparse
import platform
import signal
import sys
from collections.abc import Sequence

import psutil
import torch
import torch.distributed

from coordinator.backend_choice import choose_backend
from coordinator.config import ApplyPolicy, AverageBackend
from runtime.cluster.lighthouse import DEFAULT_PORT, JOIN_TIMEOUT_S, Lighthouse
from runtime.cluster.options import ENV_VARIABLES
from runtime.collective.nccl_library import loaded_version, version_name
from runtime.core.checks import default_devices
from runtime.core.threads import num_cores
from runtime.device.base import device_summary


def machine_report(devices: Sequence[torch.device] | None = None) -> str:
    """Describe devices, host, NCCL, interpreter and the transports that ``AUTO`` selects.

    Args:
        devices: Devices of a run; ``None``: every CUDA device, else two workers on the CPU.

    Returns:
        Lines of text. Reads properties of CUDA devices and launches nothing on them.
    """
    if devices is None:
        found = default_devices()
        devices = found * 2 if found[0].type == "cpu" else found
    lines = [device_summary(devices), ""]
    lines += [f"  {name:<10}{text}" for name, text in _facts(devices)]
    lines += ["", "backend(AUTO) selects:"]
    nccl = _has_nccl()
    names = [str(device) for device in devices]
    for policy in ApplyPolicy:
        backend, reason = choose_backend(AverageBackend.AUTO, policy, names, nccl_available=nccl)
        lines.append(f"  {policy.name:<10}{backend.name:<8}{reason}")
    return "\n".join(lines) + "\n"


def _facts(devices: Sequence[torch.device]) -> list[tuple[str, str]]:
    found = [("devices" if i == 0 else "", _device(d)) for i, d in enumerate(_distinct(devices))]
    found.append(("models", _models(devices)))
    memory = psutil.virtual_memory()
    found.append(
        ("host", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available")
    )
    found.append(("NCCL", _nccl()))
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    python = f"{platform.python_implementation()} {platform.python_version()}"
    found.append(("GIL", f"{'on' if gil else 'off'} ({python})"))
    return found


def _distinct(devices: Sequence[torch.device]) -> list[torch.device]:
    return list(dict.fromkeys(devices))


def _device(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{device}, {num_cores()} cores"
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    memory = f"{properties.total_memory / 2**30:.1f} GiB"
    return f"{device}, {properties.name}, {memory}, compute capability {capability}"


def _models(devices: Sequence[torch.device]) -> str:
    cuda = [device for device in _distinct(devices) if device.type == "cuda"]
    names = {torch.cuda.get_device_properties(device).name for device in cuda}
    if len(_distinct(devices)) > len(cuda) > 0:
        return "mixed: CUDA devices and the CPU"
    if len(names) > 1:
        return f"distinct: {len(names)} models of GPU, the slower ones get less work"
    return "one model of GPU" if names else "no GPU"


def _has_nccl() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_nccl_available()


def _nccl() -> str:
    if not _has_nccl():
        return "not in this build of PyTorch"
    version = loaded_version()
    name = "" if version is None else f" ({version_name(version)})"
    return f"available{name}, for runs on distinct CUDA devices"


def parse_args(
    args: Sequence[str] | None = None, prog: str = "python -m runtime"
) -> argparse.Namespace:
    """Parse the command line.

    Args:
        args: Arguments; ``None``: those of the process.
        prog: Name of the program in help and errors.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Without a command: list the devices and the transport for each policy.",
    )
    commands = parser.add_subparsers(dest="command")
    server = commands.add_parser(
        "lighthouse",
        help="serve a cluster until Ctrl-C or SIGTERM",
        description="The server through which the machines of a cluster find each other. It "
        "authenticates nobody: bind it to a private network.",
    )
    server.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 picks a free one")
    server.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; the default is reachable from this machine only",
    )
    server.add_argument(
        "--min-machines", type=int, default=1, help="minimum number of machines in a round"
    )
    server.add_argument(
        "--join-timeout",
        type=float,
        default=JOIN_TIMEOUT_S,
        metavar="SECONDS",
        help="time that a round waits for live machines that are not ready; longer than the period",
    )
    server.add_argument(
        "--heartbeat-timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="time without a heartbeat after which a machine is dead",
    )
    found = parser.parse_args(args)
    found.prog = prog
    return found


def serve_lighthouse(args: argparse.Namespace) -> None:
    """Run a lighthouse until Ctrl-C or SIGTERM."""
    signals = (signal.SIGINT, signal.SIGTERM)
    # Blocked before its threads start, so that sigwait receives the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        lighthouse = Lighthouse(
            host=args.host,
            port=args.port,
            min_machines=args.min_machines,
            join_timeout_s=args.join_timeout,
            heartbeat_timeout_s=args.heartbeat_timeout,
        )
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"{args.prog} lighthouse: {error}") from None
    sys.stdout.write(
        f"lighthouse at {lighthouse.address}; on each machine: "
        f"cluster({lighthouse.address!r}), or {ENV_VARIABLES['address'][0]}={lighthouse.address}\n"
    )
    sys.stdout.flush()
    signal.sigwait(signals)
    lighthouse.close()


def main(args: Sequence[str] | None = None, prog: str = "python -m runtime") -> None:
    """Run the command line; see :func:`parse_args`."""
    found = parse_args(args, prog)
    if found.command == "lighthouse":
        serve_lighthouse(found)
    else:
        sys.stdout.write(machine_report())


if __name__ == "__main__":
    main()
