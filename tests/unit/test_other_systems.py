"""Windows and macOS, as far as Linux shows: without what they lack, everything is imported, the CPU
trains, and what cannot work is refused by name.
"""

import sys
from pathlib import Path

import pytest

from tests.support import programs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
REFUSALS = {
    "windows": {
        "save": "CheckpointError: a checkpoint requires locks of directories (fcntl.flock), which",
        "checkpoint_dir": "ValueError: checkpoint_dir('",
        "status": "SystemExit: python -m runtime status requires socket.AF_UNIX, which",
        "stop": "SystemExit: python -m runtime stop requires socket.AF_UNIX, which",
        "lighthouse": "SystemExit: python -m runtime lighthouse requires signal.sigwait, which",
    },
    "macos": {},
}


@pytest.mark.parametrize("system", REFUSALS)
def test_packages_work_without_features_that_another_system_lacks(system, tmp_path):
    pytest.importorskip("aiohttp")
    done = programs.run(
        [sys.executable, "-W", "error", "-m", "tests.support.other_system", system, str(tmp_path)]
    )
    assert done.returncode == 0, done.stderr
    imported, trained, *refused = done.stdout.splitlines()
    assert int(imported.split()[1]) > 200
    assert trained == "trained"
    expected = REFUSALS[system]
    assert [line.split(": ", 1)[0] for line in refused] == list(expected)
    for line, text in zip(refused, expected.values(), strict=True):
        assert text in line
        assert "win32 does not have" in line
