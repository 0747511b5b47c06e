"""Objects outside the model that workers share through the user's functions: writes to them."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from runtime.core.references import globals_of

logger = logging.getLogger(__name__)

_NUM_SAMPLED = 64
"""Elements of a tensor or array that are compared."""
_MAX_ITEMS = 100
"""Items of a container that are compared."""
_MAX_FUNCTIONS = 200
"""Functions that are searched."""
_MAX_NAMED = 4
"""Changes that the warning names."""
_SCALARS = (bool, int, float, complex, str, bytes)
_RECORDS = (types.SimpleNamespace, argparse.Namespace)
_LIBRARIES = {"torch", "numpy", "runtime", "coordinator", "gpuworker", *sys.stdlib_module_names}
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)

_IN_RUNS = (
    "Keep it in the model, which each worker has of its own: what is carried from step to step (a "
    "teacher, a running mean) as a frozen module or a buffer, changed in "
    "optimizer.register_step_post_hook(f) with gpuworker.current_worker().model; what a hook keeps "
    "(features) as an attribute of the module that it receives. Or make it in the body of "
    "Trainer.loop. A counter is gpuworker.current_worker().global_step, a log "
    "gpuworker.record_scalar"
)
IN_OWN_LOOPS = (
    "Write to it in your loop, between two calls; what a hook keeps (features) belongs into an "
    "attribute of the module that it receives"
)
IN_EVALUATIONS = "Return it from the function: results are in the data's order"

Key = tuple[Any, ...]


class SharedObjects:
    """Compares the objects that several workers of a process share through the user's functions.

    Closures, defaults, globals that the code names, bound objects, and the hooks of models and
    optimizers are searched. Replicas and their parts are each worker's own. Of a tensor or array
    a sample of the elements is compared. Thread-safe.

    Args:
        apart: A module that is copied for each worker, and is not compared.
        remedy: What to do instead, for the warning.
    """

    def __init__(self, apart: nn.Module | None = None, remedy: str = _IN_RUNS) -> None:
        self._lock = threading.Lock()
        self._remedy = remedy
        self._apart = apart  # keeps the ids of its parts
        self._own: set[int] = set() if apart is None else _parts(apart)
        self._found: dict[Key, tuple[str, Any]] = {}
        self._ranks: dict[Key, set[int]] = {}
        self._before: dict[Key, Any] | None = None
        self._changed: dict[str, None] = {}
        self._has_warned = False

    def add(
        self,
        rank: int,
        functions: Iterable[Any],
        model: nn.Module | None = None,
        optimizer: Any = None,
    ) -> None:
        """Add what a worker reaches, before any worker begins its first step."""
        hooked = [optimizer, *(() if model is None else model.modules())]
        hooks = [
            hook
            for owner in hooked
            for name in _HOOKS
            for hook in (getattr(owner, name, None) or {}).values()
        ]
        with self._lock:
            self._own.add(id(optimizer))
            if model is not None:
                self._own |= _parts(model)
            for key, name, value in _search([*functions, *hooks]):
                self._found.setdefault(key, (name, value))
                self._ranks.setdefault(key, set()).add(rank)

    def compare(self, *, warn: bool = True) -> bool:
        """Compare with the first call, which precedes every step.

        Items that were added since, as to a cache, are compared from then on.

        Args:
            warn: Log the changes, in one warning for the run.

        Returns:
            True if anything has changed since the first call.
        """
        with self._lock:
            first = self._before is None
            if first:  # what one worker alone reaches is its own
                self._before = {}
                self._found = {k: v for k, v in self._found.items() if len(self._ranks[k]) > 1}
            assert self._before is not None
            for key, (name, value) in self._found.items():
                for path, fact in _facts(name, value, self._own):
                    if self._before.setdefault((key, path), fact) != fact:
                        self._changed[path] = None
            warns = warn and bool(self._changed) and not self._has_warned
            self._has_warned |= warns
        if warns:
            logger.warning("%s", self.message())
        return bool(self._changed)

    def message(self) -> str:
        """The names of what has changed, and the remedy."""
        names = ", ".join(list(self._changed)[:_MAX_NAMED])
        more = len(self._changed) - _MAX_NAMED
        names += f" and {more} more" if more > 0 else ""
        return (
            f"all workers share {names}, outside the model, and write to it: each for its part of "
            "a batch and at its own time, so that results differ from those of one device and from "
            f"run to run. {self._remedy}"
        )

    def close(self) -> None:
        """End the comparisons of all workers: one of them has ended its first epoch."""
        with self._lock:
            self._found, self._before, self._apart, self._own = {}, {}, None, set()


def shared_by(models: Sequence[nn.Module], function: Any, remedy: str) -> SharedObjects:
    """Objects that the ranks of one call share, each with its model, as they are now."""
    shared = SharedObjects(remedy=remedy)
    for rank, model in enumerate(models):
        shared.add(rank, [function], model)
    shared.compare()
    return shared


def _parts(model: nn.Module) -> set[int]:
    return {id(each) for each in (*model.modules(), *model.parameters(), *model.buffers())}


def _search(roots: Sequence[Any]) -> Iterator[tuple[Key, str, Any]]:
    """Places that functions reach: the key and name of each place, and its object or a function
    that reads the place.
    """
    waiting: deque[Any] = deque(roots)
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_FUNCTIONS:
        called = waiting.popleft()
        if isinstance(called, Mapping):
            waiting.extend(called.values())
        elif isinstance(called, partial):
            waiting.append(called.func)
            for value in (*called.args, *called.keywords.values()):
                yield (id(value),), f"an argument of {_name(called.func)}", value
        elif isinstance(called, types.MethodType):
            waiting.append(called.__func__)
            yield (id(called.__self__),), _name(type(called.__self__)), called.__self__
        elif isinstance(called, types.FunctionType):
            if id(called) in seen or _library(called) in _LIBRARIES:
                continue
            seen.add(id(called))
            for key, name, value in _places(called):
                held = value() if isinstance(value, _Place) else value
                if isinstance(held, (types.FunctionType, types.MethodType, partial)):
                    waiting.append(held)
                elif not isinstance(held, (type, types.ModuleType)):
                    yield key, name, value
        elif hasattr(called, "__dict__") and not isinstance(called, type):
            yield (id(called),), _name(type(called)), called
            methods = [getattr(type(called), name, None) for name in ("__call__", "forward")]
            waiting += [each for each in methods if isinstance(each, types.FunctionType)]


def _places(function: types.FunctionType) -> Iterator[tuple[Key, str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield (id(cell),), name, _Place(partial(getattr, cell, "cell_contents"))
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield (id(value),), f"a default of {_name(function)}", value
    space = function.__globals__
    for name in globals_of(function.__code__):
        if name in space:
            yield (id(space), name), name, _Place(partial(space.__getitem__, name))


class _Place:
    """A closure cell or a global, whose object may be replaced."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def __call__(self) -> Any:
        try:
            return self._read()
        except (ValueError, KeyError):  # not assigned
            return None


def _name(thing: Any) -> str:
    return str(getattr(thing, "__name__", type(thing).__name__))


def _library(thing: Any) -> str:
    return str(getattr(thing, "__module__", None) or "").partition(".")[0]


def _facts(name: str, value: Any, own: set[int], depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Compared facts of a value, its items and attributes, each with its name."""
    if isinstance(value, _Place):
        value = value()
    if id(value) in own:
        return
    if isinstance(value, _SCALARS):
        yield name, repr(value) if isinstance(value, (float, complex)) else value
    elif isinstance(value, Tensor):
        yield name, _tensor_fact(value)
    elif isinstance(value, np.ndarray):
        yield name, (value.shape, value.flat[_sampled(value.size)].tobytes())
    elif isinstance(value, torch.Generator):
        yield name, value.get_state().numpy().tobytes()
    elif isinstance(value, np.random.Generator):
        yield name, repr(value.bit_generator.state)
    elif isinstance(value, random.Random):
        yield name, hash(value.getstate())
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules(prefix=name):
            held = {**vars(module), **module._parameters, **module._buffers}
            for key, item in () if id(module) in own else held.items():
                if key != "training" and not key.startswith("_"):
                    yield from _facts(f"{path}.{key}", item, own, min(depth, 1))
    elif depth:
        try:
            yield from list(_contents(name, value, own, depth - 1))
        except RuntimeError:  # another worker adds to it
            return


def _contents(name: str, value: Any, own: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in islice(value.items(), _MAX_ITEMS):
            yield from _facts(f"{name}[{key!r}]", item, own, depth)
    elif isinstance(value, (list, tuple, deque)):
        yield name, len(value)
        for number, item in enumerate(islice(value, _MAX_ITEMS)):
            yield from _facts(f"{name}[{number}]", item, own, depth)
    elif isinstance(value, Set):
        yield name, len(value)
    elif isinstance(value, _RECORDS) or (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, threading.local, Dataset, DataLoader, Sampler))
        and _library(type(value)) not in _LIBRARIES
    ):
        # Counters of a logger or progress bar do not enter a result.
        is_installed = "-packages" in str(
            getattr(sys.modules.get(type(value).__module__), "__file__", "")
        )
        for key, item in islice(vars(value).items(), _MAX_ITEMS):
            if not (is_installed and isinstance(item, _SCALARS)):
                yield from _facts(f"{name}.{key}", item, own, depth)


def _sampled(size: int) -> Any:
    return np.linspace(0, max(size - 1, 0), min(size, _NUM_SAMPLED)).astype(np.int64)


def _tensor_fact(tensor: Tensor) -> tuple[Any, ...]:
    """Identity, version counter and, on the CPU, a sample of the elements, as a write through
    ``.data`` counts no version.
    """
    sample = b""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if plain and tensor.device.type == "cpu" and tensor.numel():
        with torch.inference_mode():
            places = torch.from_numpy(_sampled(tensor.numel()))
            with suppress(RuntimeError, NotImplementedError):  # a dtype without take
                sample = torch.take(tensor, places).view(torch.uint8).numpy().tobytes()
    return _Same(tensor), 0 if tensor.is_inference() else tensor._version, sample


class _Same:
    """A weak reference that equals another one to the same object."""

    def __init__(self, value: Tensor) -> None:
        self._ref = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        value = self._ref()
        return value is not None and isinstance(other, _Same) and value is other._ref()

    __hash__ = None  # type: ignore[assignment]
