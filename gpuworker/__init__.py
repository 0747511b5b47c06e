"""Asynchronous, multi-threaded training for PyTorch: one thread for each device."""

import importlib.metadata
import importlib.util

_MARK = '__project__ = "gpuworker"'


def _require_own(package: str) -> None:
    """Raise unless ``import package`` finds the package of this project.

    Inspects the source only: the code of another package is not run.

    Raises:
        ImportError: Another package or module of this name is found first, or none.
    """
    spec = importlib.util.find_spec(package)
    get_source = getattr(None if spec is None else spec.loader, "get_source", lambda _: "")
    source = get_source(package)
    if source is not None and _MARK not in source:  # None: compiled, without its source
        found = "nothing" if spec is None else spec.origin or spec.submodule_search_locations
        raise ImportError(
            f"gpuworker needs its own package {package!r}, but Python finds {found}. Rename that "
            "file or folder if it is yours; otherwise uninstall the distribution that it belongs "
            "to. Then reinstall gpuworker: pip install --force-reinstall --no-deps gpuworker",
            name=package,
        )


_require_own("coordinator")
_require_own("runtime")

# After the check, which runs no foreign code.
import runtime  # noqa: E402
from runtime import *  # noqa: E402, F403

__all__: list[str] = []
__all__ += runtime.__all__

try:
    __version__ = importlib.metadata.version("gpuworker")
except importlib.metadata.PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"
