"""The command ``gpuworker``, or ``python -m gpuworker``: as ``python -m runtime``."""

from __future__ import annotations

from runtime.__main__ import main as run_command


def main() -> None:
    """Run the command line."""
    run_command(prog="gpuworker")


if __name__ == "__main__":
    main()
