"""``Trainer.setup`` and ``FSDP`` against PyTorch's own, one after the other.

Usage: ``python benchmarks/wrappers.py [--repeat N] [--seconds S]``. Runs ``wrappers_setup.py`` and
``wrappers_fsdp.py`` with the same arguments; their texts say what is measured.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = ("wrappers_setup.py", "own_loops.py")


def main() -> int:
    """Run both; the worst of their exit codes."""
    here = Path(__file__).parent
    codes = [
        subprocess.run([sys.executable, str(here / name), *sys.argv[1:]], check=False).returncode
        for name in SCRIPTS
    ]
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main())
