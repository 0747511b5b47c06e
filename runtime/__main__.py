"""Command line: devices and transports; ``status`` and ``stop`` for runs; ``lighthouse``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import sys
from collections.abc import Sequence

import psutil
import torch
import torch.distributed

from coordinator.config import ApplyPolicy, AverageBackend
from runtime.cluster.lighthouse import DEFAULT_PORT, JOIN_TIMEOUT_S, Lighthouse
from runtime.cluster.machine_status import status_table
from runtime.cluster.membership import read_cluster_status
from runtime.cluster.options import ENV_VARIABLES
from runtime.collective import resolve_backend
from runtime.collective.nccl_library import (
    has_nccl,
    launch_blocking_fault,
    loaded_version,
    version_name,
)
from runtime.core.capabilities import has_gil, missing_in_system
from runtime.core.checks import default_devices
from runtime.core.errors import ClusterError
from runtime.core.threads import num_cores
from runtime.device.base import device_summary
from runtime.monitor.control import find_runs, stop_runs
from runtime.timeline.run_table import RUN_COLUMNS, run_cells
from runtime.timeline.text import text_table


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
    fault = launch_blocking_fault(len(devices)) or ""
    for policy in ApplyPolicy:
        backend, reason = resolve_backend(AverageBackend.AUTO, devices, policy)
        if fault:  # in full above
            reason = reason.replace(fault, "CUDA_LAUNCH_BLOCKING is set, so NCCL is out")
        lines.append(f"  {policy.name:<10}{backend.name:<8}{reason}")
    return "\n".join(lines) + "\n"


def _facts(devices: Sequence[torch.device]) -> list[tuple[str, str]]:
    found = [("devices" if i == 0 else "", _device(d)) for i, d in enumerate(_distinct(devices))]
    found.append(("models", _models(devices)))
    memory = psutil.virtual_memory()
    found.append(
        ("host", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available")
    )
    found.append(("NCCL", _nccl(len(devices))))
    python = f"{platform.python_implementation()} {platform.python_version()}"
    found.append(("GIL", f"{'on' if has_gil() else 'off'} ({python})"))
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


def _nccl(num_ranks: int) -> str:
    if not has_nccl():
        return "not in this build of PyTorch"
    version = loaded_version()
    name = "" if version is None else f" ({version_name(version)})"
    fault = launch_blocking_fault(num_ranks)
    if fault is not None:
        return f"available{name}; {fault}"
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
        "has no authentication: bind it to a private network.",
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
    status = commands.add_parser(
        "status",
        help="list the active runs of this user on this machine",
        description="Lists the active runs of this user on this machine.",
    )
    status.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="list the machines of the cluster whose lighthouse is at ADDRESS instead; their token "
        f"is read from {ENV_VARIABLES['token'][0]}",
    )
    status.add_argument("--json", action="store_true", help="print the records as JSON")
    stop = commands.add_parser(
        "stop",
        help="stop the runs of a process",
        description="Asks the runs of a process to stop at their next step boundary, where they "
        "write a checkpoint if they have a checkpoint_dir. Returns once the process has answered.",
    )
    stop.add_argument("pid", type=int, metavar="PID", help="the process, as listed by status")
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


def show_status(args: argparse.Namespace) -> None:
    """Print the active runs of this user on this machine, or the machines of a cluster."""
    if args.cluster is not None:
        show_cluster(args)
        return
    found = find_runs()
    if args.json:
        records = [
            {"pid": each.pid, "responds": each.responds, "runs": each.runs} for each in found
        ]
        sys.stdout.write(json.dumps(records, indent=1) + "\n")
        return
    rows: list[tuple[str, ...]] = [RUN_COLUMNS]
    for process in found:
        if not process.responds:
            rows.append((str(process.pid), "does not answer", *("",) * (len(RUN_COLUMNS) - 2)))
        rows += [run_cells(process.pid, run) for run in process.runs]
    if len(rows) == 1:
        sys.stdout.write("no active run of this user on this machine\n")
        return
    sys.stdout.write("\n".join(text_table(rows)) + "\n")


def show_cluster(args: argparse.Namespace) -> None:
    """Print the machines of a cluster and the progress of their runs."""
    token = os.environ.get(ENV_VARIABLES["token"][0]) or None
    try:
        found = read_cluster_status(args.cluster, token)
    except (ValueError, ClusterError) as error:
        raise SystemExit(f"{args.prog} status: {error}") from None
    if args.json:
        records = [
            {"machine": each.machine, "age_s": round(each.age_s, 1), "run": each.run}
            for each in found.machines
        ]
        sys.stdout.write(json.dumps(records, indent=1) + "\n")
        return
    lines = [f"no machine is in the cluster at {args.cluster}"]
    if found.machines:
        lines = status_table(found.machines)
    if found.num_refused:
        lines.append(f"{found.num_refused} more with another token or version")
    sys.stdout.write("\n".join(lines) + "\n")


def request_stop(args: argparse.Namespace) -> None:
    """Ask the runs of a process to stop."""
    try:
        runs = stop_runs(args.pid)
    except LookupError as error:
        raise SystemExit(f"{args.prog} stop: {error.args[0]}") from None
    for run in runs:
        saved = run["checkpoint_dir"]
        where = f"writes a checkpoint to {saved}" if saved else "keeps its state in the program"
        sys.stdout.write(
            f"{run['name']} ({args.pid}) stops at its next step boundary and {where}\n"
        )


_REQUIRED = {
    "lighthouse": (signal, "sigwait"),
    "status": (socket, "AF_UNIX"),
    "stop": (socket, "AF_UNIX"),
}
"""Parts of Python that a command requires, and that Windows does not have."""


def require_system(args: argparse.Namespace) -> None:
    """End with a message if the operating system lacks what the command requires."""
    module, name = _REQUIRED.get(args.command, (sys, "path"))
    is_remote = getattr(args, "cluster", None) is not None
    if not is_remote and not hasattr(module, name):
        fault = missing_in_system(f"{args.prog} {args.command}", f"{module.__name__}.{name}")
        raise SystemExit(f"{fault}: run it on Linux or macOS")


def main(args: Sequence[str] | None = None, prog: str = "python -m runtime") -> None:
    """Run the command line; see :func:`parse_args`."""
    found = parse_args(args, prog)
    require_system(found)
    if found.command == "lighthouse":
        serve_lighthouse(found)
    elif found.command == "status":
        show_status(found)
    elif found.command == "stop":
        request_stop(found)
    else:
        sys.stdout.write(machine_report())


if __name__ == "__main__":
    main()
