"""Optimizers that were built from a module's parameters before it was sharded.

They hold what the module no longer uses, and would train nothing in silence. They are found
at their next step: looking through the whole heap for them when a module is wrapped takes
seconds in a large process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from runtime.fsdp.found import Found


class StaleOptimizers:
    """Knows the parameters that were sharded, and refuses steps on them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sharded: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
        self._version = 0
        self._checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def watch(self, found: Sequence[Found]) -> None:
        """These parameters are no longer used by their module."""
        with self._lock:
            if self._version == 0:
                register_optimizer_step_pre_hook(self._check)
            self._version += 1
            gone = [key for key, (ref, _) in self._sharded.items() if ref() is None]
            for key in gone:
                del self._sharded[key]
            for each in found:
                self._sharded[id(each.parameter)] = weakref.ref(each.parameter), each.name

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """They are their module's again."""
        with self._lock:
            for parameter in parameters:
                self._sharded.pop(id(parameter), None)

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before each step of any optimizer; looks at one once.

        Raises:
            ValueError: It would train nothing.
        """
        with self._lock:
            if self._checked.get(optimizer) == self._version:
                return
            for group in optimizer.param_groups:
                for p in group["params"]:
                    ref, name = self._sharded.get(id(p), (None, ""))
                    if ref is not None and ref() is p:
                        raise ValueError(
                            f"{type(optimizer).__name__} was built from {name!r} before the module "
                            "was wrapped, and would train nothing; build the optimizer from "
                            "fsdp.parameters()"
                        )
            self._checked[optimizer] = self._version


STALE = StaleOptimizers()
"""That of the process."""
