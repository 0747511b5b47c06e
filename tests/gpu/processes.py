"""Child processes that may hang in C++; a hanging one is killed after its stacks are logged."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
DEATH_S = 4.0
"""Seconds for a process to write its Python stacks, and again for it to exit."""
STACKS_S = 25.0
"""Time limit of a debugger that reads native stacks, in seconds."""
SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    # Two ranks' NCCL kernels must fit on the GPU together, beside compute kernels.
    "NCCL_MAX_CTAS": "2",
    # With fewer hardware queues than streams, one rank's waiting kernel blocks another's work.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
"""Environment variables for ranks sharing a GPU over NCCL; read when CUDA and NCCL start."""
TRACERS = {
    "py-spy": ("dump", "--native", "--pid", "{pid}"),
    "gdb": (
        *("-p", "{pid}", "-batch", "-nx", "-iex", "set debuginfod enabled off"),
        *("-ex", "set pagination off", "-ex", "thread apply all bt 40"),
    ),
    "cuda-gdb": (
        *("-p", "{pid}", "-batch", "-nx", "-ex", "set pagination off"),
        *("-ex", "info cuda kernels", "-ex", "thread apply all bt 40"),
    ),
}
"""Arguments of each program that prints native stacks, best first."""


def start(
    command: Sequence[str], log: IO[bytes], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command in the repository's root, in a process group of its own."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**(os.environ if environment is None else environment), "PYTHONUNBUFFERED": "1"},
        process_group=0,  # its children are killed with it
    )


def run(command: Sequence[str], limit_s: float, log: IO[bytes]) -> int | None:
    """Run a command with its output in the log; return its exit status, ``None`` if killed."""
    process = start(command, log)
    try:
        return process.wait(max(limit_s, 0.0))
    except subprocess.TimeoutExpired:
        end(process, log)
        return None
    finally:
        kill(process)


def count_gpus(limit_s: float, log: IO[bytes]) -> int:
    """Number of CUDA devices, counted in a subprocess since a broken driver may hang."""
    if not any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg")):
        return 0
    code = "import sys, torch; sys.exit(100 + torch.cuda.device_count())"
    status = run([sys.executable, "-c", code], limit_s, log)
    return status - 100 if status is not None and status >= 100 else 0


def end(process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    """Log the native and Python stacks of a hanging process, then kill it."""
    write_native_stacks(process.pid, log)
    process.send_signal(signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(DEATH_S)
    kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # it may be blocked in the driver
        process.wait(DEATH_S)


def write_native_stacks(pid: int, log: IO[bytes]) -> str | None:
    """Log the native stacks of all threads; return the name of the program that printed them.

    Uses the first of :data:`TRACERS` that succeeds. Each thread's kernel state is always logged.
    """
    for task in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda path: int(path.name)):
        words = [_first_line(task / name) for name in ("comm", "wchan", "syscall")]
        log.write(f"thread {task.name}: {' | '.join(words)}\n".encode())
    for name, arguments in TRACERS.items():
        program = shutil.which(name)
        if program is None:
            continue
        log.write(f"-- native stacks of {pid} by {name}\n".encode())
        log.flush()
        try:
            done = subprocess.run(
                [program, *(a.format(pid=pid) for a in arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=STACKS_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            log.write(f"{name}: {error}\n".encode())
            continue
        if done.returncode == 0:
            return name
    log.write(b"no program here printed native stacks\n")
    return None


def _first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0].strip()
    except OSError as error:
        return error.strerror or "?"


def outcome_of(status: int) -> str:
    """Describe an exit status."""
    if status < 0:
        return f"died of {signal.Signals(-status).name}"
    return "passed" if status == 0 else f"failed (exit status {status})"
