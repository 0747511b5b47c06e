"""A run that is killed repeatedly resumes from complete checkpoints."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support import programs
from tests.support.pairs import SCALE

ROOT = Path(__file__).parents[3]
BOUND_S = 110


@pytest.mark.parametrize(
    ("policy", "count"),
    [("sync", 5), ("cadence", 3)] if SCALE > 1 else [("sync", 3), ("cadence", 2)],
)
def test_every_restart_after_a_kill_resumes_from_a_complete_checkpoint(tmp_path, policy, count):
    result = tmp_path / "result.json"
    done = programs.run(
        [
            *(sys.executable, "benchmarks/checkpoint.py", "kills", "--count", str(count)),
            *("--policy", policy, "--longest", "0.3", "--json", str(result)),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=BOUND_S,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert found["num_kills"] - found["num_before_first"] == count
    assert found["num_while_writing"] >= 1
    assert found["faults"] == []
