"""``python -m runtime`` shows what there is to train on; ``lighthouse`` serves a cluster."""

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
    """Some lines on the devices, the interpreter and the choices of ``AUTO``.

    Args:
        devices: Of a run; ``None``: every CUDA device, else two workers on the CPU.

    Returns:
        Lines that end with a line break. CUDA devices are asked for their properties, which
        gives them no work.
    """
    if devices is None:
        found = default_devices()
        devices = found * 2 if found[0].type == "cpu" else found
    lines = [device_summary(devices), ""]
    lines += [f"  {name:<10}{text}" for name, text in _facts(devices)]
    lines += ["", "backend(AUTO) would choose:"]
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
    """Whether the devices are alike, on which it depends how much ElChe has to even out."""
    cuda = [device for device in _distinct(devices) if device.type == "cuda"]
    names = {torch.cuda.get_device_properties(device).name for device in cuda}
    if len(_distinct(devices)) > len(cuda) > 0:
        return "mixed: CUDA devices and the CPU"
    if len(names) > 1:
        return f"distinct: {len(names)} models of GPU, of which the slow ones get less work"
    return "one model of GPU" if names else "no GPU"


def _has_nccl() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_nccl_available()


def _nccl() -> str:
    if not _has_nccl():
        return "not in this build of PyTorch"
    version = loaded_version()
    name = "" if version is None else f" ({version_name(version)})"
    return f"available{name}, for runs on distinct CUDA devices"


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
        default=JOIN_TIMEOUT_S,
        metavar="SECONDS",
        help="how long a round waits for machines that live and are not ready: above the period",
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
        f"cluster({lighthouse.address!r}), or {ENV_VARIABLES['address'][0]}={lighthouse.address}\n"
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
