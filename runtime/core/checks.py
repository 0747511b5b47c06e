"""Validation of user arguments, and of optional dependencies."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import TypeVar

import torch

from runtime.core.capabilities import SEVERAL_WORKERS, missing_in

E = TypeVar("E", bound=Enum)


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int if it is an integer within bounds; raise otherwise."""
    if isinstance(value, bool) or not isinstance(value, Integral):  # includes NumPy's integers
        raise TypeError(f"{name}({value!r}): pass a whole number")
    number = int(value)
    if number < low or (high is not None and number > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name}({value}): must be {bound}")
    return number


def check_float(
    name: str, value: object, low: float, high: float = math.inf, *, above: bool = False
) -> float:
    """Return ``value`` as a finite float within bounds (above ``low`` if ``above``)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}({value!r}): pass a number")
    number = float(value)
    inside = (low < number if above else low <= number) and number <= high
    if not math.isfinite(number) or not inside:
        bound = f"above {low:g}" if above else f"at least {low:g}"
        if high != math.inf:
            bound += f" and at most {high:g}"
        raise ValueError(f"{name}({value}): must be {bound}")
    return number


def check_flag(name: str, value: object) -> bool:
    """Return ``value`` if it is a bool; raise otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}({value!r}): pass True or False")
    return value


def check_callable(name: str, value: object, signature: str) -> None:
    """Raise ``TypeError``, with the expected signature, unless ``value`` is callable."""
    if not callable(value):
        raise TypeError(f"{name} must be a function {signature}, got {type(value).__name__}")


def check_path(name: str, value: object) -> Path:
    """Return a string or ``os.PathLike`` as an absolute path; raise otherwise."""
    if not isinstance(value, (str, os.PathLike)) or isinstance(os.fspath(value), bytes):
        raise TypeError(f"{name}({value!r}): pass a path as a string or a pathlib.Path")
    if not os.fspath(value):
        raise ValueError(f"{name}({value!r}): the path is empty; '.' is the current directory")
    return Path(value).expanduser().absolute()


def check_directory(name: str, path: Path) -> None:
    """Raise ``ValueError`` if ``path`` exists and is not a directory."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{name}({str(path)!r}) is a file; pass a directory")


def check_choice(name: str, value: object, kind: type[E]) -> E:
    """Return a member of an enumeration, given as itself or by its value."""
    if isinstance(value, kind):
        return value
    words = {str(member.value): member for member in kind}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    wrong = ValueError if isinstance(value, str) else TypeError
    members = ", ".join(member.name for member in kind)
    raise wrong(
        f"{name}({value!r}): pass a member of {kind.__name__} or its name, one of {members}"
    )


def check_devices(devices: object) -> tuple[torch.device, ...]:
    """Parse devices given by name, object or number; each must be available.

    A number means that many CUDA devices, or that many workers on the CPU without CUDA.
    """
    if isinstance(devices, (str, torch.device)):
        devices = [devices]
    elif isinstance(devices, int) and not isinstance(devices, bool):
        check_int("devices", devices, 1)
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        devices = [f"cuda:{i}" if kind == "cuda" else "cpu" for i in range(devices)]
    elif not isinstance(devices, Sequence):
        raise TypeError(f"devices({devices!r}): pass a list, for instance ['cpu', 'cpu']")
    found = []
    for item in devices:
        if not isinstance(item, (str, torch.device)):
            raise TypeError(f"devices: {item!r} is not a device; pass names such as 'cpu'")
        try:
            device = torch.device(item)
        except RuntimeError as error:
            raise ValueError(
                f"devices: {item!r} is not a device; pass 'cpu' or 'cuda:0'"
            ) from error
        if device.type not in ("cpu", "cuda"):
            device = _check_accelerator(device, len(devices))
        if device.type == "cuda":
            count = torch.cuda.device_count()
            index = device.index or 0
            if index >= count:
                raise ValueError(f"devices: there is no {item}; {count} CUDA devices are visible")
            device = torch.device("cuda", index)
        found.append(torch.device("cpu") if device.type == "cpu" else device)
    if not found:
        raise ValueError("devices([]): name at least one device, or leave the call out")
    return tuple(found)


def _check_accelerator(device: torch.device, num_devices: int) -> torch.device:
    """A device of PyTorch's current accelerator that is not CUDA, with its index."""
    available = torch.accelerator.current_accelerator(check_available=True)
    if available is None or available.type != device.type:
        found = "no accelerator" if available is None else f"{available.type} alone"
        raise ValueError(
            f"devices: there is no {device} here; PyTorch finds {found}: pass 'cpu' or the name of "
            "an accelerator of this machine, such as 'cuda:0'"
        )
    if num_devices > 1:
        raise ValueError(
            f"devices: {missing_in(device, SEVERAL_WORKERS)}: pass one {device.type} device, or "
            "several CPUs"
        )
    count = torch.accelerator.device_count()
    if (device.index or 0) >= count:
        raise ValueError(f"devices: there is no {device}; {count} are visible")
    return torch.device(device.type, device.index or 0)


def default_devices() -> tuple[torch.device, ...]:
    """Every visible CUDA device, else one CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(torch.device("cuda", i) for i in range(count)) or (torch.device("cpu"),)


PROJECT = "gpuworker"


def require_modules(feature: str, modules: tuple[str, ...], extra: str) -> None:
    """Raise unless these modules are installed; imports none of them.

    Args:
        feature: The feature that needs them, for the message.
        modules: Top-level names.
        extra: The extra of this package that installs them.

    Raises:
        ImportError: A module is missing; the message has the command that installs it.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ImportError(
            f"{feature} needs {' and '.join(missing)}, which {verb} not installed: "
            f"pip install '{PROJECT}[{extra}]'"
        )
