"""Runs the tests of this folder on a GPU: ``python -m tests.gpu.run``, or ``make test-gpu``.

Each file has a process of its own, since an error on a CUDA device stays with its process and
would fail every test after it. A file that hangs, in C++ too, is killed and the next one runs.
All output goes to one log; the summary at its end lists what failed and what did not run. The
total time never exceeds ``--minutes``.

Exit status: 0 if every file passed, 1 if one failed or did not run, and 5, which pytest uses
for a run without tests, if there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path
from typing import IO

from tests.gpu import processes

# The core of the runtime first, since the rest depends on it.
ORDER = (
    *("streams", "prefetch", "no_sync", "runs", "memory", "graphs"),
    *("nccl", "setup", "ddp", "fsdp"),
)
NO_GPU = 5
RESERVE_S = 40.0
"""Seconds reserved for the stacks of a hanging process and for the summary."""
PROBE_S = 60.0
TAIL_LINES = 30


def in_order(directory: Path) -> list[Path]:
    """Test files of a directory, those in ``ORDER`` first."""
    names = [f"test_{name}.py" for name in ORDER]
    rank = {name: i for i, name in enumerate(names)}
    return sorted(
        directory.glob("test_*.py"), key=lambda path: (rank.get(path.name, len(rank)), path.name)
    )


def run_file(path: Path, limit_s: float, log: IO[bytes]) -> str:
    """Run one file's tests and describe the result."""
    # Without capture: captured output would be lost with a process that dies.
    options = ["-v", "--tb=short", "--capture=no", "--timeout-method=thread"]
    pytest = [sys.executable, "-m", "pytest", "-c", str(processes.ROOT / "pyproject.toml")]
    status = processes.run([*pytest, *options, str(path)], limit_s, log)
    if status is None:
        return f"killed after {limit_s:.0f} s"
    return processes.outcome_of(status)


def tail(path: Path, start: int) -> str:
    """The last lines written to the log since offset ``start``."""
    with path.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])


def main() -> int:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", nargs="?", type=Path, default=Path(__file__).parent)
    parser.add_argument("--log", type=Path, default=Path("test-gpu.log"), help="where output goes")
    parser.add_argument("--minutes", type=float, default=9.0, help="limit on the total time")
    parser.add_argument("--limit", type=float, default=600.0, help="limit on each file, in seconds")
    parser.add_argument("--anywhere", action="store_true", help="do not look for a GPU")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # dumping core of a CUDA process takes minutes
    deadline = begin + 60.0 * options.minutes - RESERVE_S
    results: dict[str, str] = {}
    waiting = in_order(options.directory.resolve())
    options.log.unlink(missing_ok=True)
    # Unbuffered and in append mode: the tests' processes write to it as well.
    with options.log.open("ab", buffering=0) as log:

        def report(line: str) -> None:
            log.write(f"{line}\n".encode())
            print(line, flush=True)

        if not options.anywhere and processes.count_gpus(PROBE_S, log) == 0:
            report("No CUDA device was found: no test was run.")
            return NO_GPU
        try:
            while waiting and (left_s := deadline - time.monotonic()) > 0:
                # Twice its share of the time left, so that hanging files leave time for the last.
                limit_s = min(left_s, 2 * left_s / len(waiting), options.limit)
                path = waiting.pop(0)
                report(f"== {path.name}, at most {limit_s:.0f} s")
                results[path.name] = "interrupted"
                start, start_s = os.fstat(log.fileno()).st_size, time.monotonic()
                results[path.name] = run_file(path, limit_s, log)
                report(f"== {path.name}: {results[path.name]}, {time.monotonic() - start_s:.0f} s")
                if results[path.name] != "passed":
                    print(tail(options.log, start), flush=True)
        finally:
            report("\n== Summary")
            for name, result in results.items():
                report(f"{name}: {result}")
            for path in waiting:
                report(f"{path.name}: did not run")
            report(f"The log is {options.log.resolve()}")
    return 0 if results and not waiting and set(results.values()) == {"passed"} else 1


if __name__ == "__main__":
    sys.exit(main())
