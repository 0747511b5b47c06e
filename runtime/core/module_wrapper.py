"""ModuleWrapper: a module that adds methods to another one."""

from __future__ import annotations

import inspect
import logging
from abc import abstractmethod
from functools import partial
from types import MethodType
from typing import Any, ClassVar, TypeGuard

from torch import Tensor, nn

logger = logging.getLogger(__name__)


class ModuleWrapper(nn.Module):
    """Adds methods to a module, whose attributes are read, set and deleted through it.

    Its own names come first. Those that the module has too are logged, and cannot be set.

    Attributes:
        VARIABLE: The wrapper in messages, as an expression.
        OWNER: The same in words.
    """

    VARIABLE: ClassVar[str]
    OWNER: ClassVar[str]

    @abstractmethod
    def _wrapped(self) -> nn.Module:
        """The module."""

    def _adopted(self, value: Any) -> Any:
        """The value that is set on the module for the one given; raises to refuse it."""
        return value

    def _seal(self, *, logs: bool = True) -> None:
        """End construction: names that this object lacks belong to the module from here on."""
        del self.__dict__["training"]
        own = {*dir(type(self)), *vars(self)} - set(dir(nn.Module()))
        hidden = sorted(
            name for name in own & set(dir(self._wrapped())) if not name.startswith("_")
        )
        for name in hidden:
            if inspect.isfunction(getattr(type(self), name, None)):
                # Errors of any use but a call show the name of the type.
                kind = f"{self.VARIABLE}.{name}(...) (the model's own: {self._path(name)})"
                self.__dict__[name] = type(kind, (partial,), {})(getattr(self, name))
        if hidden and logs:
            logger.warning(
                "attributes of %s are hidden by those of %s: use %s",
                type(self._wrapped()).__name__,
                self.OWNER,
                ", ".join(map(self._path, hidden)),
            )
        self.__dict__["_is_sealed"] = True

    def _path(self, name: str) -> str:
        return f"{self.VARIABLE}.module.{name}"

    def _is_own(self, name: str) -> bool:
        return name in self.__dict__ or hasattr(type(self), name)

    def _check_free(self, name: str) -> None:
        if self._is_own(name):
            raise AttributeError(
                f"{self.VARIABLE}.{name} belongs to {self.OWNER}, and cannot be changed: that of "
                f"the model itself is {self._path(name)}"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_is_sealed" not in self.__dict__:
            return super().__getattr__(name)
        module = self._wrapped()
        return module if name == "module" else getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_private = name.startswith("_") and self._is_own(name)
        if is_private or "_is_sealed" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            self._check_free(name)
            setattr(self._wrapped(), name, self._adopted(value))

    def __delattr__(self, name: str) -> None:
        self._check_free(name)
        self._adopted(getattr(self._wrapped(), name))
        delattr(self._wrapped(), name)

    def __dir__(self) -> list[str]:
        return sorted({*nn.Module.__dir__(self), *dir(self._wrapped())})  # type: ignore[no-untyped-call]

    def __getitem__(self, key: Any) -> Any:
        """An item of a model such as ``nn.Sequential``."""
        return self._wrapped()[key]  # type: ignore[index]

    def get_buffer(self, target: str) -> Tensor:
        return self._wrapped().get_buffer(target)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a buffer to the model.

        Raises:
            AttributeError: The name is one of this object's own.
            KeyError: The name is taken or not valid.
            TypeError: The value is not a tensor.
            ValueError: The tensor requires a gradient.
        """
        self._check_free(name)
        self._wrapped().register_buffer(name, self._adopted(tensor), persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter to the model; add it to the optimizer too, as on one device."""
        self._check_free(name)
        self._wrapped().register_parameter(name, self._adopted(param))

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a submodule to the model; add its parameters to the optimizer too."""
        self._check_free(name)
        self._wrapped().add_module(name, self._adopted(module))

    def set_submodule(self, target: str, module: nn.Module, strict: bool = False) -> None:
        """Set a submodule of the model; add its parameters to the optimizer too."""
        self._check_free(target)
        self._wrapped().set_submodule(target, self._adopted(module), strict)


def is_own_method(value: Any) -> TypeGuard[MethodType]:
    """True for a bound method that the class of a model adds to those of ``nn.Module``."""
    if not inspect.ismethod(value) or not isinstance(value.__self__, nn.Module):
        return False
    return not hasattr(nn.Module, value.__name__)
