"""Several optimizers of one model, each with a part of its parameters, as in a GAN."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from runtime.core.errors import CheckpointError

_IMPLEMENTATION_SETTINGS = ("capturable", "fused", "foreach")
"""Settings of an optimizer's implementation, which do not change its result."""
_MAX_NUMBER = float(1 << 53)
"""Upper bound of all settings and counts."""
_FORM = ("state", "param_groups")
"""What the state dict of an optimizer consists of."""


class Optimizers(torch.optim.Optimizer):
    """Several optimizers as one, with the concatenation of their groups and states.

    Args:
        members: The optimizers by the name of the submodule that each trains;
            ``optimizers[name]`` returns one.
    """

    def __init__(self, members: Mapping[str, torch.optim.Optimizer]) -> None:
        # Does not call that of the base class, which would create groups and states of its own.
        self.members = dict(members)

    def __getitem__(self, name: str) -> torch.optim.Optimizer:
        return self.members[name]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.members.values() for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The states of all members: a new dict of the live state of each parameter."""
        return {key: value for each in self.members.values() for key, value in each.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.members.values():
            each.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.members.values():
            each.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state dict of all members, in the form of a single optimizer's, with what a member
        has beside the states of its parameters.
        """
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        beside: dict[str, dict[str, Any]] = {}
        first = 0
        for name, each in self.members.items():
            own = state_of(each)
            state |= {first + i: v for i, v in own["state"].items() if type(i) is int}
            rest = {key: value for key, value in own.items() if key not in _FORM}
            keyed = {key: v for key, v in own["state"].items() if type(key) is not int}
            if rest or keyed:
                beside[name] = {**rest, "state": keyed}
            groups += [
                {**group, "params": [first + i for i in group["params"]]}
                for group in own["param_groups"]
            ]
            first += sum(len(group["params"]) for group in own["param_groups"])
        return {"state": state, "param_groups": groups, "beside": beside}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(f"it has {len(groups)} groups, not {len(self.param_groups)}")
        first = 0
        for name, each in self.members.items():
            own, groups = groups[: len(each.param_groups)], groups[len(each.param_groups) :]
            end = first + sum(len(group["params"]) for group in own)
            held = state_dict["state"].items()
            beside = state_dict["beside"].get(name, {})
            each.load_state_dict(
                {
                    **beside,
                    "state": {i - first: value for i, value in held if first <= i < end}
                    | beside.get("state", {}),
                    "param_groups": [
                        {**group, "params": [i - first for i in group["params"]]} for group in own
                    ],
                }
            )
            first = end


def members_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """The members of several optimizers; of a single one, itself."""
    return [*optimizer.members.values()] if isinstance(optimizer, Optimizers) else [optimizer]


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state dict; not copied.

    Raises:
        CheckpointError: It has a form of its own, which cannot be checked or divided when it is
            loaded.
    """
    state: Any = optimizer.state_dict()
    if not isinstance(state, Mapping) or not {*_FORM} <= {*state}:
        found = f"has {list(state)}" if isinstance(state, Mapping) else f"is {state!r:.80}"
        raise CheckpointError(
            f"the state_dict() of {type(optimizer).__name__} {found}, not 'state' and "
            "'param_groups', and checkpoints do not support another form: return those of the "
            "optimizer inside with own entries beside them, such as {**self.inner.state_dict(), "
            "'count': self.count}, or train without checkpoint_dir(path)"
        )
    return dict(state)


def shallow_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy with the same parameters and tensors, also of optimizers inside, which can load a
    state without changing the original.
    """
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        vars(made)[name] = _with_copies(value)
    return made


def _with_copies(value: Any) -> Any:
    if isinstance(value, torch.optim.Optimizer):
        return shallow_copy(value)
    if type(value) in (list, tuple):
        return type(value)(map(_with_copies, value))
    if type(value) is dict:
        return {key: _with_copies(item) for key, item in value.items()}
    return value


def own_numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """Numbers and flags among the attributes of each member, as of an optimizer that counts its
    steps itself. State dicts lack them; those of PyTorch's optimizers need none.
    """
    return [
        {name: value for name, value in vars(each).items() if type(value) in (bool, int, float)}
        if not type(each).__module__.startswith("torch.optim")
        else {}
        for each in members_of(optimizer)
    ]


def copy_tensor_settings(optimizer: torch.optim.Optimizer) -> None:
    """Give its groups settings of their own that are tensors: schedulers write them in place, and
    the factories of all workers may have passed one learning rate.
    """
    copies: dict[Tensor, Tensor] = {}
    for each in members_of(optimizer):
        for group in (getattr(each, "defaults", {}), *each.param_groups):
            for name, value in group.items():
                if isinstance(value, Tensor):
                    group[name] = copies.setdefault(value, value.detach().clone())


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """True if it has ``train()`` and ``eval()`` modes, as schedule-free optimizers do: gradients
    are taken at other weights than those to be evaluated.
    """
    return any(map(_has_modes, members_of(optimizer)))


def _has_modes(optimizer: torch.optim.Optimizer) -> bool:
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


@contextmanager
def at_eval_point(
    optimizer: torch.optim.Optimizer, flats: Sequence[Tensor]
) -> Iterator[list[Tensor] | None]:
    """Move the parameters to the point of evaluation for the duration of the context.

    Args:
        optimizer: Without modes, nothing is moved.
        flats: The memory of the parameters; restored bit for bit.

    Yields:
        A copy of ``flats`` before; ``None`` without modes.
    """
    if not has_modes(optimizer):
        yield None
        return
    kept = [flat.clone() for flat in flats]
    set_mode(optimizer, "eval")
    try:
        yield kept
    finally:
        set_mode(optimizer, "train")
        with torch.no_grad():
            for flat, old in zip(flats, kept, strict=True):
                flat.copy_(old)


def set_mode(optimizer: torch.optim.Optimizer, mode: Literal["train", "eval"]) -> None:
    """Call ``train()`` or ``eval()`` of the members that have modes."""
    for each in filter(_has_modes, members_of(optimizer)):
        getattr(each, mode)()


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """The name of its class, or those of its members' classes."""
    if not isinstance(optimizer, Optimizers):
        return type(optimizer).__name__
    return ", ".join(f"{name}: {type(o).__name__}" for name, o in optimizer.members.items())


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group that change the result of its steps."""
    others = ("params", "initial_lr", *_IMPLEMENTATION_SETTINGS)
    return {name: value for name, value in group.items() if name not in others}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Like ``optimizer.load_state_dict(state)``, except for settings of the implementation.

    ``capturable``, ``fused`` and ``foreach`` keep their values, step counts are moved to the
    device that these require, and states take the memory formats of their parameters.

    Args:
        state: The state of an optimizer of the same class and parameters; modified.

    Raises:
        ValueError: It has other groups, or settings and states that are invalid for this class.
    """
    for own, given in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for name in _IMPLEMENTATION_SETTINGS:
            given.pop(name, None)
        for name, value in own.items():
            if name != "params":
                given.setdefault(name, value)  # settings that another version of PyTorch lacks
                if isinstance(value, Enum):  # which a checkpoint holds by its value
                    given[name] = type(value)(given[name])
    check_settings(optimizer.param_groups, state["param_groups"])
    optimizer.load_state_dict(state)
    _check_types(optimizer, state["state"])
    for group in optimizer.param_groups:
        on_device = group.get("capturable") or group.get("fused")
        for p in group["params"]:
            step = optimizer.state.get(p, {}).get("step")
            if isinstance(step, Tensor):
                optimizer.state[p]["step"] = step.to(p.device if on_device else "cpu")
    take_memory_formats(optimizer)
    for each in members_of(optimizer):
        _check_states(each)


def take_memory_formats(optimizer: torch.optim.Optimizer) -> None:
    """Give states of a parameter's shape its strides.

    Fused kernels on CPUs pair the elements of a parameter and of its states by their places in
    memory, and ``load_state_dict`` keeps the strides of the optimizer that was saved.
    """
    for p, state in optimizer.state.items():
        for name, value in state.items() if isinstance(p, Tensor) else ():
            is_like = type(value) is Tensor and value.shape == p.shape
            if is_like and value.layout is torch.strided and value.stride() != p.stride():
                like = torch.empty_like(p.detach(), dtype=value.dtype, device=value.device)
                state[name] = like.copy_(value)


def state_in_order(
    state: Mapping[str, Any], theirs: Sequence[Sequence[str]], own: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """An optimizer's state dict for one whose groups have the same parameters in another order.

    State dicts number parameters, so that groups made from sets would exchange their states.

    Args:
        state: The state dict; not changed.
        theirs: The names of the parameters in each of its groups; empty for one without a name.

    Raises:
        ValueError: A group has other parameters.
    """
    groups = state["param_groups"]
    if [len(names) for names in theirs] != [len(names) for names in own] or len(groups) != len(own):
        return dict(state)  # refused when it is loaded
    states = dict(state["state"])
    for number, (group, before, after) in enumerate(zip(groups, theirs, own, strict=True)):
        if list(before) == list(after) or "" in (*before, *after):
            continue
        ids = dict(zip(before, group["params"], strict=True))
        if ids.keys() != set(after):
            raise ValueError(
                f"group {number} has the state of {sorted(ids.keys() - set(after))} in place of "
                f"{sorted(set(after) - ids.keys())}"
            )
        for place, name in zip(group["params"], after, strict=True):
            states.pop(place, None)
            if ids[name] in state["state"]:
                states[place] = state["state"][ids[name]]
    return {**state, "state": states}


def _check_types(optimizer: torch.optim.Optimizer, loaded: Mapping[int, Any]) -> None:
    """Raise ``ValueError`` if the optimizer has lost the class of a tensor that it has loaded."""
    own = optimizer.state_dict()["state"]
    for i, values in loaded.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            is_plain = not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter)
            kind = type(own.get(i, {}).get(name))
            if not is_plain and kind is not type(value):
                raise ValueError(
                    f"the optimizer loads its state {name!r}, of type {type(value).__name__}, as "
                    f"{kind.__name__}"
                )


def check_settings(
    groups: Sequence[Mapping[str, Any]], given_groups: Sequence[Mapping[str, Any]]
) -> None:
    """Check that an optimizer can load the settings of its groups.

    Raises:
        ValueError: torch would load them, but a step would fail or be wrong.
    """
    for number, (own, given) in enumerate(zip(groups, given_groups, strict=False)):
        for name, value in own.items():
            if name != "params" and name in given and not _is_compatible(value, given[name]):
                raise ValueError(
                    f"{name!r} of its group {number} is {given[name]!r:.60}, not like {value!r:.60}"
                )
        rate = float(given.get("lr", 0.0))
        if rate != rate:
            raise ValueError(f"the learning rate of its group {number} is {rate}")


def _is_compatible(own: Any, given: Any) -> bool:
    """True if the setting ``given`` may replace ``own``."""
    if own is None or given is None:
        return own is None
    if isinstance(own, str):
        return isinstance(given, str)
    if isinstance(own, bool):
        return type(given) is bool
    if isinstance(own, (tuple, list)):
        is_row = isinstance(given, (tuple, list)) and len(given) == len(own)
        return is_row and all(map(_is_compatible, own, given))
    if isinstance(own, (int, float)) or (isinstance(own, Tensor) and own.numel() == 1):
        if isinstance(given, Tensor):
            given = float(given) if given.numel() == 1 else None
        same = given == own or (given != given and own != own)  # NaN, too
        return type(given) in (int, float) and (bool(same) or abs(given) <= _MAX_NUMBER)
    return True


def _check_states(optimizer: torch.optim.Optimizer) -> None:
    """Raise for states that lack an entry that a step requires.

    For PyTorch's own optimizers, the entries are found by a step of a one-element parameter.
    """
    kind: type[Any] = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return
    known: dict[tuple[int, int], Mapping[str, Any]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            found = optimizer.state.get(p)
            if not found:
                continue
            key = number, p.dim()
            if key not in known:
                known[key] = _example_state(kind, group, p.dim())
            for name, value in known[key].items():
                _check_value(f"{name!r} in its state of a parameter", found, name, value, p)


def _check_value(where: str, found: Mapping[str, Any], name: str, example: Any, p: Tensor) -> None:
    if name not in found:
        raise ValueError(f"{where} of shape {tuple(p.shape)} is missing")
    if not isinstance(example, Tensor):
        return
    value = found[name]
    if value is None and name == "momentum_buffer":  # before the first gradient
        return
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} is {value!r:.80}, not a tensor")
    if name == "step" and not (value.numel() == 1 and 0 <= float(value) <= _MAX_NUMBER):
        raise ValueError(f"{where} is {value!r:.80}, not a count")
    shape = p.shape if example.dim() else example.shape
    if "row" not in name and "col" not in name and value.shape != shape:
        raise ValueError(f"{where} is of shape {tuple(value.shape)}, not {tuple(shape)}")


def _example_state(kind: type[Any], group: dict[str, Any], num_dims: int) -> Mapping[str, Any]:
    """The state that such an optimizer creates in a step; empty if its step fails."""
    p = torch.nn.Parameter(torch.ones([1] * num_dims))
    p.grad = torch.ones_like(p)
    try:
        probe = kind([{**settings_of(group), "params": [p]}])
        probe.step()
    except Exception:  # it requires a closure or sparse gradients, for instance
        return {}
    state: Mapping[str, Any] = probe.state[p]
    return state if num_dims else {}


class Schedulers:
    """The schedulers of several optimizers as one.

    Args:
        factory: A factory for all of them, or factories by optimizer name.

    Raises:
        TypeError: Only some of them are stepped by a metric, or an optimizer does not exist.
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
                f"scheduler({{...}}) has {', '.join(sorted(unknown))}, but the optimizers are "
                f"{', '.join(names)}"
            )
        self._members = {name: make(optimizers[name]) for name, make in factories.items()}
        kinds = {isinstance(each, ReduceLROnPlateau) for each in self._members.values()}
        if len(kinds) > 1:
            raise TypeError(
                "scheduler({...}): ReduceLROnPlateau is stepped by a metric, other schedulers by "
                "steps: use it for each optimizer, or for none"
            )
        self.by_metric = kinds == {True}

    @property
    def members(self) -> tuple[Any, ...]:
        return tuple(self._members.values())

    def step(self, *args: Any) -> None:
        for each in self._members.values():
            each.step(*args)

    def __copy__(self) -> Schedulers:
        made = object.__new__(Schedulers)
        made._members = {name: copy.copy(each) for name, each in self._members.items()}
        made.by_metric = self.by_metric
        return made

    def state_dict(self) -> dict[str, Any]:
        """The state dict of each scheduler, by name."""
        return {name: state_of_scheduler(each) for name, each in self._members.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        for name, each in self._members.items():
            each.load_state_dict(state[name])


def state_of_scheduler(scheduler: Any) -> Mapping[str, Any]:
    """The scheduler's state dict; not copied.

    Raises:
        CheckpointError: It has none that could be loaded.
    """
    read, load = (getattr(scheduler, f"{verb}state_dict", None) for verb in ("", "load_"))
    state = read() if callable(read) and callable(load) else None
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"the state of the scheduler, of type {type(scheduler).__name__}, cannot be saved: "
            "give it state_dict(), which returns a dict, and load_state_dict(state), or train "
            "without checkpoint_dir(path)"
        )
    return state


def make_scheduler(optimizer: torch.optim.Optimizer, factory: Any) -> LRScheduler | Schedulers:
    """Call the scheduler factory, once for each optimizer."""
    if isinstance(optimizer, Optimizers):
        return Schedulers(optimizer, factory)
    scheduler: LRScheduler = factory(optimizer)
    return scheduler


def needs_whole_parameters(optimizer: object) -> bool:
    """True for an optimizer whose step on a parameter depends on all its elements or on its shape.

    Those of PyTorch and well-known ones of other packages, recognised by their names.
    """
    kinds = (kind.__name__.lower() for kind in type(optimizer).__mro__)
    return any(_WHOLE_PARAMETERS.fullmatch(kind) for kind in kinds)


_WHOLE_PARAMETERS = re.compile(
    r"adafactor\w*|came|lbfgs\w*|(fused)?lamb|lar[sc]|\w*muon|(nv|fused)?novograd|\w*shampoo\w*|sm3|soap"
)
