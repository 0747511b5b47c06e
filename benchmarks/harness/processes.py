"""Starts the DDP processes and asks them for measurements."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

START_S = 90.0
MEASURE_S = 180.0


class DdpGroup:
    """A context manager that holds ``world_size`` live Gloo processes.

    Args:
        world_size: How many.
        script: What they run, next to this file.
    """

    def __init__(self, world_size: int, script: str = "ddp_worker.py") -> None:
        self._dir = tempfile.TemporaryDirectory(prefix="ddp-")
        store = Path(self._dir.name, "store")
        worker = Path(__file__).parents[1] / script
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join(paths)
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(worker), str(rank), str(world_size), str(store)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
                text=True,
            )
            for rank in range(world_size)
        ]

    def __enter__(self) -> DdpGroup:
        try:
            for rank in range(len(self._processes)):
                self._answer(rank, START_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def measure(
        self, name: str, num_batches: int, num_epochs: int, pauses_s: tuple[float, ...]
    ) -> float:
        """Samples/s of all processes together; epoch 0 is not counted."""
        return self.ask(
            name=name,
            num_batches=num_batches,
            num_epochs=num_epochs,
            pauses_s=list(pauses_s) or [0.0] * len(self._processes),
        )["rate"]

    def ask(self, **request: object) -> dict[str, float]:
        """Send every process a request; rank 0's answer, once all have answered."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        answers = [self._answer(rank, MEASURE_S) for rank in range(len(self._processes))]
        return answers[0]

    def close(self) -> None:
        """End the processes: by closing their input, then by force."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10.0)
            if process.stdout is not None:
                process.stdout.close()
        self._dir.cleanup()

    def _answer(self, rank: int, timeout_s: float) -> dict[str, float]:
        stdout = self._processes[rank].stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], timeout_s)
        line = stdout.readline() if readable else ""
        if not line:
            raise RuntimeError(f"DDP rank {rank} gave no answer within {timeout_s:.0f} s")
        return json.loads(line)
