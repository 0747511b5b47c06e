"""Several optimizers of one model, each with a part of its parameters, as in a GAN."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


class Optimizers(torch.optim.Optimizer):
    """Several optimizers as one: its groups and states are theirs, one after the other.

    Args:
        members: By the names of the submodules that they train; ``optimizers[name]`` gives one.
    """

    def __init__(self, members: Mapping[str, torch.optim.Optimizer]) -> None:
        # Not that of the base class, which would make groups and states of its own.
        self.members = dict(members)

    def __getitem__(self, name: str) -> torch.optim.Optimizer:
        return self.members[name]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all."""
        return [group for each in self.members.values() for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The states of all; of its own, but the state of each parameter is the live one."""
        return {key: value for each in self.members.values() for key, value in each.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each."""
        for each in self.members.values():
            each.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters."""
        for each in self.members.values():
            each.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """In the form of one optimizer's."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for each in self.members.values():
            own = each.state_dict()
            state |= {first + i: value for i, value in own["state"].items()}
            groups += [
                {**group, "params": [first + i for i in group["params"]]}
                for group in own["param_groups"]
            ]
            first += sum(len(group["params"]) for group in own["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(f"it has {len(groups)} groups, not {len(self.param_groups)}")
        first = 0
        for each in self.members.values():
            own, groups = groups[: len(each.param_groups)], groups[len(each.param_groups) :]
            end = first + sum(len(group["params"]) for group in own)
            held = state_dict["state"].items()
            each.load_state_dict(
                {
                    "state": {i - first: value for i, value in held if first <= i < end},
                    "param_groups": [
                        {**group, "params": [i - first for i in group["params"]]} for group in own
                    ],
                }
            )
            first = end


def members_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that it consists of; one: itself."""
    return [*optimizer.members.values()] if isinstance(optimizer, Optimizers) else [optimizer]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of its class, or of those of its members."""
    if not isinstance(optimizer, Optimizers):
        return type(optimizer).__name__
    return ", ".join(f"{name}: {type(o).__name__}" for name, o in optimizer.members.items())


class Schedulers:
    """The schedulers of several optimizers, stepped together.

    Args:
        optimizers: What they drive.
        factory: Makes a scheduler for each, or, by name, for some.

    Raises:
        TypeError: Some are stepped by a metric and others are not, or there is no such optimizer.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        factory: Callable[[torch.optim.Optimizer], Any] | Mapping[str, Any],
    ) -> None:
        names = optimizers.members
        factories = factory if isinstance(factory, Mapping) else dict.fromkeys(names, factory)
        unknown = set(factories) - set(names)
        if unknown:
            raise TypeError(
                f"scheduler({{...}}) names {', '.join(sorted(unknown))}, and the optimizers are "
                f"{', '.join(names)}"
            )
        self._members = {name: make(optimizers[name]) for name, make in factories.items()}
        kinds = {isinstance(each, ReduceLROnPlateau) for each in self._members.values()}
        if len(kinds) > 1:
            raise TypeError(
                "scheduler({...}): ReduceLROnPlateau is stepped by a metric, and the others by "
                "steps: use it for each optimizer, or for none"
            )
        self.by_metric = kinds == {True}

    def step(self, *args: Any) -> None:
        """Step each."""
        for each in self._members.values():
            each.step(*args)

    def state_dict(self) -> dict[str, Any]:
        """That of each."""
        return {name: each.state_dict() for name, each in self._members.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        for name, each in self._members.items():
            each.load_state_dict(state[name])


def make_scheduler(optimizer: torch.optim.Optimizer, factory: Any) -> LRScheduler | Schedulers:
    """Call a scheduler's factory, for each optimizer if there are several."""
    if isinstance(optimizer, Optimizers):
        return Schedulers(optimizer, factory)
    scheduler: LRScheduler = factory(optimizer)
    return scheduler
