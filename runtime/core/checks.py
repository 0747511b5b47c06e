"""Validation of user arguments, and of optional dependencies."""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

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
    """Raise ``TypeError`` unless ``value`` is a function with this signature.

    Args:
        value: The function. Its parameters are compared if Python can inspect them.
        signature: Its parameters by position in parentheses, optional ones in brackets, then
            anything else: ``"(model, batch) -> loss"``, ``"f(optimizer[, total])"``.
    """
    if not callable(value):
        raise TypeError(
            f"{name} must be a function {signature}, got {type(value).__name__}{_hint(value)}"
        )
    required, optional = _parameters(signature)
    try:
        # The wrapper's own parameters, not those of the function that it wraps.
        parameters = inspect.signature(value, follow_wrapped=False)
    except (TypeError, ValueError):  # implemented in C
        return
    if any(
        _accepts(parameters, len(required) + extra) for extra in reversed(range(len(optional) + 1))
    ):
        return
    own = getattr(value, "__name__", type(value).__name__)
    raise TypeError(
        f"{name} must be a function {signature}, but {own}{parameters}{_place(value)} cannot be "
        f"called as {name}({', '.join(required)}): "
        f"{_signature_remedy(name, own, parameters, required)}"
    )


def _parameters(signature: str) -> tuple[list[str], list[str]]:
    """The required and the optional parameters of a signature in a message."""
    inside = signature[signature.index("(") + 1 : signature.index(")")]
    required, _, optional = inside.partition("[")
    return _names(required), _names(optional.rstrip("]"))


def _names(text: str) -> list[str]:
    return [name for each in text.split(",") if (name := each.strip())]


def _accepts(parameters: inspect.Signature, num_arguments: int) -> bool:
    try:
        parameters.bind(*[None] * num_arguments)
    except TypeError:
        return False
    return True


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"


def _signature_remedy(
    name: str, own: str, parameters: inspect.Signature, required: Sequence[str]
) -> str:
    """The change that makes a function take the arguments ``required``."""
    call = ", ".join(re.sub(r"\W+", "_", each) for each in required)  # "list of samples"
    name = name if name.isidentifier() else "f"
    for fewer in reversed(range(len(required))):
        if _accepts(parameters, fewer):
            function = own if own.isidentifier() else name
            return f"pass lambda {call}: {function}({'...' if fewer else ''})"
    extra = [
        each.name
        for each in list(parameters.parameters.values())[len(required) :]
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    bound = ", ".join(f"{each}=..." for each in extra)
    return f"define it as def {name}({call}), or bind the rest, functools.partial({name}, {bound})"


def _hint(value: object) -> str:
    """The factory to pass in place of an object that was made in advance."""
    if isinstance(value, torch.optim.Optimizer):
        kind = type(value)
        module = "torch.optim." if kind.__module__.startswith("torch.optim") else ""
        settings = [f"lr={float(rate)}" for rate in [value.param_groups[0].get("lr")] if rate]
        return (
            ": each worker makes its own, for its own parameters; pass lambda params: "
            f"{module}{kind.__name__}({', '.join(['params', *settings])})"
        )
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return (
            ": each worker makes its own, for its own optimizer; pass lambda optimizer: "
            f"torch.optim.lr_scheduler.{type(value).__name__}(optimizer, ...)"
        )
    return ""


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


def check_text(name: str, value: object, remedy: str) -> str:
    """Return ``value`` if it is a string and not empty; raise otherwise.

    Args:
        remedy: The value to pass, for the message: ``"a name, such as 'eval/loss'"``.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name}({value!r:.40}): pass {remedy}")
    if not value:
        raise ValueError(f"{name}({value!r}): pass {remedy}")
    return value


def check_word(name: str, value: object, words: Sequence[str]) -> str:
    """Return ``value`` if it is one of these strings; raise ``ValueError`` otherwise."""
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name}({value!r:.40}): pass one of {', '.join(words)}")
    return value


def check_choice(
    name: str, value: object, kind: type[E], hints: Mapping[str, str] | None = None
) -> E:
    """Return a member of an enumeration, given as itself or by its value.

    Args:
        value: The member, or its value as a string in any case.
        hints: Advice for values of other libraries, in lower case.
    """
    if isinstance(value, kind):
        return value
    words = {str(member.value): member for member in kind}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    wrong = ValueError if isinstance(value, str) else TypeError
    members = ", ".join(member.name for member in kind)
    strings = ", ".join(f'"{word}"' for word in words)
    hint = (hints or {}).get(value.lower()) if isinstance(value, str) else None
    raise wrong(
        f"{name}({value!r}): pass one of {strings}, or a member of {kind.__name__} ({members})"
        + ("" if hint is None else f"; {hint}")
    )


def check_devices(devices: object) -> tuple[torch.device, ...]:
    """Parse devices given by name, object or number; each must be available.

    A number means that many CUDA devices, or that many workers on the CPU without CUDA; -1 and
    ``"auto"`` mean :func:`default_devices`, ``"gpu"`` every visible CUDA device.
    """
    if devices == "auto" or (devices == -1 and isinstance(devices, int)):
        return default_devices()
    if isinstance(devices, str) and devices.lower() in ("gpu", "gpus"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise ValueError(f"devices({devices!r}): {_missing_cuda()}")
        return tuple(torch.device("cuda", i) for i in range(count))
    if isinstance(devices, (str, torch.device)):
        devices = [devices]
    elif isinstance(devices, int) and not isinstance(devices, bool):
        check_int("devices", devices, 1)
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        devices = [f"cuda:{i}" if kind == "cuda" else "cpu" for i in range(devices)]
    elif not isinstance(devices, Sequence):
        raise TypeError(f"devices({devices!r}): pass a list, for instance ['cpu', 'cpu']")
    found = tuple(_check_device(item, len(devices)) for item in devices)
    if not found:
        raise ValueError("devices([]): name at least one device, or leave the call out")
    return found


def _check_device(item: object, num_devices: int) -> torch.device:
    if not isinstance(item, (str, torch.device)):
        by_number = isinstance(item, int) and not isinstance(item, bool)
        names = f"'cuda:{item}'" if by_number else "'cpu' or 'cuda:0'"
        raise TypeError(f"devices: {item!r} is not a device; pass names such as {names}")
    try:
        device = torch.device(item)
    except RuntimeError as error:
        raise ValueError(
            f"devices: {item!r} is not a device; pass 'cpu' or 'cuda:0' in a list, or one of "
            '"auto", "gpu" and "cpu" alone'
        ) from error
    if device.type not in ("cpu", "cuda"):
        return _check_accelerator(device, num_devices)
    if device.type == "cpu":
        return torch.device("cpu")
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        seen = f"{count} CUDA devices are visible" if count else _missing_cuda()
        raise ValueError(f"devices: there is no {item}; {seen}")
    return torch.device("cuda", index)


def _missing_cuda() -> str:
    """The reason for which no CUDA device is visible, and the remedy."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"this is a CPU build of PyTorch ({torch.__version__}), without CUDA: pass 'cpu', or "
            "install a build for your CUDA version, pip install --force-reinstall torch "
            "--extra-index-url URL, with the URL that PyTorch's installation page shows"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limited = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
    return (
        f"0 CUDA devices are visible to this build of PyTorch ({torch.__version__}){limited}: "
        "check that nvidia-smi lists them, or pass 'cpu'"
    )


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
        modules: Top-level names.

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


def in_func_transform() -> bool:
    """True in a function that a transform of ``torch.func`` (grad, vmap, jacrev, jvp) calls.

    Its tensors are wrapped, and the transform belongs to the calling thread.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None
