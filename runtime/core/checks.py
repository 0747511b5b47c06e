"""What comes with an extra of this package, and may therefore not be installed."""

from __future__ import annotations

import importlib.util

PROJECT = "gpuworker"


def need(what: str, modules: tuple[str, ...], extra: str) -> None:
    """Raise unless these modules can be found; none is imported.

    Args:
        what: Who needs them.
        modules: Top-level names.
        extra: The extra of this package that installs them.

    Raises:
        ImportError: Says how to install them.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ImportError(
            f"{what} needs {' and '.join(missing)}, which {verb} not installed: "
            f"pip install '{PROJECT}[{extra}]'"
        )
