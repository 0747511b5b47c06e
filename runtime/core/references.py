"""References from objects and functions of the user."""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from types import BuiltinMethodType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

import coordinator

OWN = tuple(
    os.path.join(os.path.dirname(os.path.abspath(file)), "")
    for file in (os.path.dirname(__file__), coordinator.__file__)
)
"""Directories of this project's code."""
_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")
_PYTHON = (os.path.join(os.path.dirname(os.path.abspath(os.__file__)), ""), "<frozen ")
_SITE_PACKAGES = f"{os.sep}site-packages{os.sep}"  # may be below the standard library

_MAX_ELEMENTS = 1_024
"""Longest container of which all elements are listed."""
_FIRST_ELEMENTS = 64
"""Elements listed of a longer container."""


def references(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Objects that a function uses beside its arguments: closure, defaults and globals, by name."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False)
    yield from (function.__kwdefaults__ or {}).items()
    for name in globals_of(code):
        if name in function.__globals__:
            yield name, function.__globals__[name]


@lru_cache(1024)
def globals_of(code: CodeType) -> tuple[str, ...]:
    """Names of the globals that a function uses, those of functions within it included."""
    names = (each.argval for each in dis.get_instructions(code) if each.opname.endswith("_GLOBAL"))
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return tuple(sorted({*names}.union(*map(globals_of, inner))))


def held_by(value: Any) -> list[tuple[Any, Any]]:
    """Contents of an object, by attribute, key or position, and the user's classes that it is of.

    Nothing is listed of functions of libraries, and of modules neither parameters nor buffers.
    """
    if isinstance(value, MethodType | BuiltinMethodType):
        return [("__self__", value.__self__), ("__func__", getattr(value, "__func__", None))]
    if isinstance(value, functools.partial):
        return [("func", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, FunctionType):
        if not is_users(value.__code__.co_filename):
            return []
        return [*references(value), *value.__dict__.copy().items()]
    if isinstance(value, type):
        return list(_class_attributes(value)) if _is_users_class(value) else []
    kinds = [(kind.__name__, kind) for kind in type(value).__mro__ if _is_users_class(kind)]
    return [*_elements(value), *_attributes(value).items(), *kinds]


def _attributes(value: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if not name.startswith("__") and hasattr(value, name):
                found[name] = getattr(value, name)
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        found |= own.copy()  # another thread may add an attribute
    if isinstance(value, nn.Module):
        found.pop("_parameters", None)
        found.pop("_buffers", None)
    return found


def _elements(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, dict | list | tuple | set | frozenset | deque):
        return []
    limit = len(value) if len(value) <= _MAX_ELEMENTS else _FIRST_ELEMENTS
    try:
        return list(islice(value.items() if isinstance(value, dict) else enumerate(value), limit))
    except RuntimeError:  # another thread has changed its size
        return []


def _class_attributes(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(kind).copy().items():
        function = getattr(value, "__func__", value)  # of a static method or class method
        if isinstance(function, FunctionType):
            yield from references(function)
        elif not name.startswith("__") and not hasattr(type(value), "__get__"):
            yield name, value


def _is_users_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    if module is None or kind.__module__ in sys.builtin_module_names:
        return False
    return is_users(getattr(module, "__file__", None) or "")


def is_users(file: str, *, libraries: bool = False) -> bool:
    """True for a file of the user's own, or if ``libraries`` of any library but PyTorch."""
    if file.startswith((*OWN, _TORCH)):
        return False
    return libraries if _SITE_PACKAGES in file else not file.startswith(_PYTHON)
