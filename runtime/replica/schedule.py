"""Learning rates: a torch scheduler that follows the global step, and a scale factor."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from runtime.checkpoint.content import SavedSchedule
from runtime.checkpoint.format import plain
from runtime.checkpoint.subclasses import restore_subclasses
from runtime.core.errors import CheckpointError
from runtime.replica.optimizers import (
    Schedulers,
    make_scheduler,
    members_of,
    state_of_scheduler,
)

SchedulerFactory = (
    Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
    | Callable[[torch.optim.Optimizer, int], torch.optim.lr_scheduler.LRScheduler]
)
"""``f(optimizer)`` or ``f(optimizer, total)``, with the number of scheduler steps of the run."""
SchedulerFactories = SchedulerFactory | Mapping[str, SchedulerFactory]
"""One factory for all optimizers, or factories by optimizer name."""


class Schedule:
    """Sets an optimizer's learning rates by the position in the run.

    Args:
        factory: Factory of the scheduler; ``None``: constant rates.
        total: The last position of the scheduler; it stays there.
        every: Positions between two steps of the scheduler; 0: it is stepped by
            :meth:`step_by_metrics`, and positions are epochs.
        num_steps: Steps of the scheduler in the run, for ``factory(optimizer, total)``; ``None``:
            unknown.

    Attributes:
        scheduler: The scheduler; ``None``: constant rates.
        attached_in: Epoch whose ``epoch_fn`` attached it; ``None``: it is of the settings.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factory: SchedulerFactories | None = None,
        total: int | None = None,
        every: int = 1,
        num_steps: int | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._total = total
        self._every = every
        self._num_steps = num_steps
        self._position = 0
        self._origin: int | None = 0
        self._num_values = 0  # metrics seen
        self.attached_in: int | None = None
        self._scale = 1.0
        self._host_lr: float | None = None
        self._built: dict[str, str] = {}  # fields of the scheduler as the factory made it
        self.scheduler: torch.optim.lr_scheduler.LRScheduler | Schedulers | None = None
        self._base: list[float] = []
        self._num_groups: list[int] = []  # of each optimizer
        if isinstance(rate := optimizer.param_groups[0].get("lr"), torch.Tensor):
            self._host_lr = float(rate)
        if factory is not None:
            self.attach(factory)

    def attach(self, factory: SchedulerFactories, *, at_next: bool = False) -> None:
        """Set the learning rates by the scheduler ``factory(optimizer)``, or ``factory(optimizer,
        total)``, from now on.

        Args:
            at_next: It begins with the next step, and not with the run.

        Raises:
            TypeError: The factory or its result is of another kind.
            ValueError: The scheduler has fewer steps than the run, or the number is unknown.
        """
        if isinstance(factory, Mapping):
            factory = {name: self._with_total(each) for name, each in factory.items()}
        else:
            factory = self._with_total(factory)
        scheduler = make_scheduler(self._optimizer, factory)
        if not hasattr(scheduler, "step"):
            raise TypeError(
                f"scheduler(f): f(optimizer) returned {type(scheduler).__name__}, "
                "not a torch.optim.lr_scheduler.LRScheduler"
            )
        for each in scheduler.members if isinstance(scheduler, Schedulers) else (scheduler,):
            self._check_optimizer(each)
        if isinstance(scheduler, Schedulers):
            by_metric = scheduler.by_metric
        else:
            by_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if by_metric and self._every:
            raise TypeError(
                "ReduceLROnPlateau is stepped by a metric of each epoch: pass it to the builder's "
                "scheduler(f, metric='eval/loss'); elsewhere use a scheduler that follows steps, "
                "such as OneCycleLR"
            )
        if not by_metric and not self._every:
            raise TypeError(
                "scheduler(f, metric=...) is for ReduceLROnPlateau, and "
                f"{type(scheduler).__name__} follows steps or epochs: leave metric out"
            )
        # A rank may have to catch up with the others before its first step; torch would warn of
        # scheduler steps before optimizer steps.
        for optimizer in members_of(self._optimizer):
            optimizer._opt_called = True  # type: ignore[attr-defined]
        self.scheduler, self._built = scheduler, {}
        with suppress(Exception):  # of a scheduler without a state
            self._built = dict(_fields(self._scheduler_state()))
        if not at_next:
            self._check_length()
            self._origin = 0
        else:
            self._origin = self._num_values if by_metric else None
        self._position = 0
        self._num_groups = [len(each.param_groups) for each in members_of(self._optimizer)]
        self._base = self._read()
        if self._scale != 1.0:
            self._write([rate * self._scale for rate in self._base])

    def _check_optimizer(self, scheduler: Any) -> None:
        """Raise ``ValueError`` if a scheduler sets the learning rates of other parameters."""
        target = getattr(scheduler, "optimizer", None)
        own = {p for group in self._optimizer.param_groups for p in group["params"]}
        other = [p for group in getattr(target, "param_groups", ()) for p in group["params"]]
        if other and own.isdisjoint(other):
            raise ValueError(
                f"scheduler(f): f(optimizer) returned a {type(scheduler).__name__} of another "
                "optimizer, so that it would have no effect: make it for the one that it receives"
            )

    def _with_total(self, factory: SchedulerFactory) -> SchedulerFactory:
        if not takes_total(factory):
            return factory
        if self._num_steps is None:
            raise ValueError(
                "scheduler: the number of steps is unknown here, since the loop is the caller's: "
                "pass f(optimizer), with the number in it"
            )
        return partial(_call_with_total, factory, self._num_steps)

    @property
    def cycled_settings(self) -> tuple[str, ...]:
        """Settings of the optimizer other than the rate that a scheduler changes."""
        pending: list[Any] = list(self._members())
        for each in pending:
            pending += getattr(each, "_schedulers", ())  # of SequentialLR and ChainedScheduler
        cycles = any(getattr(each, "cycle_momentum", False) for each in pending)
        return ("momentum", "betas") if cycles else ()

    def _members(self) -> tuple[Any, ...]:
        found = self.scheduler
        return tuple(found.members) if isinstance(found, Schedulers) else (found,)

    def _one_cycles(self) -> Iterator[torch.optim.lr_scheduler.OneCycleLR]:
        """The schedulers that end, and raise if they are stepped beyond."""
        one_cycle = torch.optim.lr_scheduler.OneCycleLR
        yield from (each for each in self._members() if isinstance(each, one_cycle))

    def _check_length(self) -> None:
        """Check that no scheduler ends before the run.

        Raises:
            ValueError: One does.
        """
        for each in self._one_cycles():
            if self._num_steps is not None and each.total_steps < self._num_steps - 1:
                raise ValueError(
                    f"OneCycleLR has {each.total_steps} steps, and the run {self._num_steps}: pass "
                    "scheduler(lambda optimizer, total: OneCycleLR(optimizer, max_lr, "
                    "total_steps=total)). A resumed run keeps the steps of its checkpoint: do not "
                    "raise num_epochs or max_steps with this scheduler"
                )

    @property
    def num_groups(self) -> int:
        """Number of parameter groups when the scheduler was made."""
        return len(self._base)

    @contextmanager
    def _scheduled_groups(self) -> Iterator[None]:
        """Hide groups that were added to the optimizer after the scheduler was made."""
        members = members_of(self._optimizer)
        hidden = []
        for each, num in zip(members, self._num_groups, strict=False):
            hidden.append(each.param_groups[num:])
            del each.param_groups[num:]
        try:
            yield
        finally:
            for each, groups in zip(members, hidden, strict=False):
                each.param_groups.extend(groups)

    def _read(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _write(self, rates: list[float]) -> None:
        self._host_lr = rates[0]
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    @property
    def host_lr(self) -> float | None:
        """Learning rate of the first group, without a wait for the device.

        For a tensor on a device, the value last written there; ``None`` if not available.
        """
        rate = self._optimizer.param_groups[0].get("lr")
        if isinstance(rate, torch.Tensor) and rate.device.type != "cpu":
            return self._host_lr
        return None if rate is None else float(rate)

    @property
    def current(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set every group's rate; a scheduler overwrites it with its next step."""
        self._write([lr] * len(self._optimizer.param_groups))

    def scale_lr(self, factor: float) -> None:
        """Multiply every group's rate once; a scheduler overwrites it."""
        self._write([rate * factor for rate in self._read()])

    def set_scale(self, scale: float) -> None:
        """Multiply the scheduler's rates by ``scale`` from now on.

        No effect until a scheduler is attached.
        """
        self._scale = scale
        if self.scheduler is not None:
            with self._scheduled_groups():
                self._write([rate * scale for rate in self._base])

    def copy_from(self, other: Schedule) -> None:
        """Copy the state of another rank's schedule."""
        self._position, self._origin = other._position, other._origin
        self._scale, self._num_values = other._scale, other._num_values
        self.attached_in = other.attached_in
        self._base = list(other._base)
        if self.scheduler is not None and other.scheduler is not None:
            self.scheduler.load_state_dict(copy.deepcopy(other.scheduler.state_dict()))
        self._write(other._read())

    def saved(self) -> SavedSchedule:
        """Position, scale, unscaled rates, and the scheduler's own state and settings.

        Functions of the scheduler, which a file cannot hold, are left out: the factory creates them
        again.
        """
        scheduler = self._scheduler_state()
        now = dict(_fields(scheduler))
        return SavedSchedule(
            position=self._position,
            origin=self._origin,
            attached_in=self.attached_in,
            kind=self.kind,
            every=self._every,
            scale=self._scale,
            base=tuple(self._base),
            scheduler=scheduler,
            settings={name: text for name, text in self._built.items() if now.get(name) == text},
        )

    @property
    def kind(self) -> str:
        """Names of the schedulers' classes; empty without one."""
        found = [] if self.scheduler is None else list(self._members())
        return ", ".join(type(each).__name__ for each in found)

    def _scheduler_state(self) -> dict[str, Any] | None:
        if self.scheduler is None:
            return None
        several = isinstance(self.scheduler, Schedulers)
        state = self.scheduler.state_dict() if several else state_of_scheduler(self.scheduler)
        try:
            kept: dict[str, Any] = plain(state, "the scheduler's state", copy=True, drop=True)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; its state_dict() may leave out what the factory sets and no step changes"
            ) from None
        return kept

    def check_state(self) -> None:
        """Load the state into a copy of the scheduler.

        Raises:
            CheckpointError: It cannot be saved.
            Exception: It cannot be loaded.
        """
        made = copy.copy(self)
        made.scheduler, made._built = copy.copy(self.scheduler), {}
        made.load(self.saved())

    def replaced_settings(self, saved: SavedSchedule) -> str:
        """The settings of the built scheduler that :meth:`load` replaces, with both values; empty
        if there are none.

        Settings are the fields that the factory has set and no step has changed.
        """
        old, new = saved.settings, self._built
        names = [name for name in old if name in new and new[name] != old[name]]
        kept, made = (", ".join(f"{n}={each[n]:.60}" for n in names) for each in (old, new))
        return f"{kept}, where scheduler(f) now makes {made}" if names else ""

    def load(self, saved: SavedSchedule) -> None:
        """Load a state of :meth:`saved`; the rates are part of the optimizer's state.

        Raises:
            ValueError: The scheduler was stepped at another interval, or is of another class.
        """
        if self.scheduler is not None and saved.every != self._every:
            raise ValueError(
                f"the scheduler was stepped {_interval_text(saved.every)}, and is now stepped "
                f"{_interval_text(self._every)}: pass the earlier scheduler(f, interval, metric)"
            )
        kind, own = saved.kind, self.kind
        if not kind and own:
            self._origin = None  # begins here
            return
        if kind and own and kind != own:
            raise ValueError(
                f"the checkpoint's scheduler is {kind}, and scheduler(f) makes {own}, which cannot "
                f"continue it: return {kind}, or start from the weights"
            )
        self._position, self._origin, self._scale = saved.position, saved.origin, saved.scale
        self._base = list(saved.base) or self._read()
        if self.scheduler is not None and saved.scheduler is not None:
            self.scheduler.load_state_dict(restore_subclasses(dict(saved.scheduler)))
            self._built.update(saved.settings)
            if self._origin == 0:
                self._check_length()

    def mark(self) -> ScheduleMark | None:
        """The current state, for :meth:`restore`; ``None`` if no step changes it."""
        if self.scheduler is None or not self._every:
            return None
        rates = [group["lr"] for group in self._optimizer.param_groups]
        return ScheduleMark(
            self._position,
            self._scale,
            list(self._base),
            [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates],
            copy.deepcopy(self.scheduler.state_dict()),
        )

    def restore(self, mark: ScheduleMark) -> None:
        """Restore the state of :meth:`mark`; other settings that a scheduler changes are kept."""
        assert self.scheduler is not None
        self._position, self._scale, self._base = mark.position, mark.scale, mark.base
        self.scheduler.load_state_dict(mark.scheduler)
        for group, rate in zip(self._optimizer.param_groups, mark.rates, strict=True):
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate

    def rescale(self, factor: float) -> None:
        """Multiply the rates and, if there is a scheduler, its scale."""
        self._write([rate * factor for rate in self._read()])
        self._scale = self._scale * factor if self.scheduler is not None else self._scale

    def advance(self, position: int) -> None:
        """Step the scheduler to a position: the batches of all ranks before this step."""
        if self.scheduler is None or not self._every:
            return
        if self._total is not None:
            position = min(position, self._total)
        position //= self._every
        if self._origin is None:
            self._origin = position
        steps = position - self._origin - self._position
        if steps > 0:
            self._step([()] * steps)

    def step_by_metrics(self, values: Sequence[float | None]) -> None:
        """Step the scheduler by the metrics of epochs that it has not seen yet.

        Args:
            values: The metric of every closed epoch; ``None``: the epoch has no value, and the
                scheduler is not stepped.
        """
        if self.scheduler is None or self._every:
            return
        new = values[(self._origin or 0) + self._position :]
        self._num_values = len(values)
        self._step([(value,) for value in new if value is not None])
        self._position += sum(value is None for value in new)

    def _step(self, arguments: Sequence[tuple[Any, ...]]) -> None:
        assert self.scheduler is not None
        if not arguments:
            return
        with self._scheduled_groups():
            self._step_scheduled(arguments)

    def _step_scheduled(self, arguments: Sequence[tuple[Any, ...]]) -> None:
        assert self.scheduler is not None
        if self._scale != 1.0:
            self._write(self._base)
        for metrics in arguments:
            # The last position is after the last step, where no rate is needed.
            ended = any(each.last_epoch >= each.total_steps for each in self._one_cycles())
            if self._num_steps is None or not ended:
                self.scheduler.step(*metrics)
            self._position += 1
        if self._scale != 1.0:
            # Chainable schedulers compute from the current rate, which must not be the scaled one.
            self._base = self._read()
            self._write([rate * self._scale for rate in self._base])


class ScheduleMark(NamedTuple):
    """State of a schedule between two steps."""

    position: int
    scale: float
    base: list[float]
    rates: list[float | torch.Tensor]
    scheduler: dict[str, Any]


def takes_total(factory: Callable[..., Any]) -> bool:
    """True if a scheduler factory takes the number of steps after the optimizer, by its signature.

    Raises:
        TypeError: It is a scheduler's class, whose second argument is of another kind.
    """
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some callables have no signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    if isinstance(factory, type) and len(required) > 1:
        more = ", ".join(required)
        raise TypeError(
            f"scheduler({factory.__name__}): the class requires {more}: pass for instance "
            f"lambda optimizer, total: {factory.__name__}({more})"
        )
    return len(required) == 2 or any(p.name == "total" for p in positional[1:2])


def _call_with_total(factory: Any, total: int, optimizer: torch.optim.Optimizer) -> Any:
    return factory(optimizer, total)


_RATES = ("base_lrs", "_last_lr")
"""Fields that repeat settings of the optimizer."""


def _fields(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Name and text of each field of a scheduler's state."""
    if isinstance(value, dict) and not isinstance(value, Counter):
        for key, item in value.items():
            if key not in _RATES:
                yield from _fields(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for i, item in enumerate(value):
            yield from _fields(item, f"{name}[{i}]")
    else:
        is_whole = isinstance(value, float) and value.is_integer()
        yield name, repr(int(value) if is_whole else value)


def _interval_text(every: int) -> str:
    return f"every {every} batches" if every else "by a metric"
